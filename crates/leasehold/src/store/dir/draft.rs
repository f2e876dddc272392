//! Bodies that are written once and become many objects: hard links of one file.
//!
//! A link costs a fifth of a new file, and so does its removal while there are others. All links have one
//! content, so this is for objects that nobody writes to in place: as everywhere here, who replaces one puts
//! another file there.

use std::collections::VecDeque;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use leasehold_protocol::cas::Version;
use leasehold_protocol::key::Key;
use rustix::fs::{AtFlags, FileType, Stat};
use rustix::io::Errno;

use super::files::{Folder, beneath, file_type};
use super::names::path_of;
use super::temp::Temp;
use super::{Dir, ONE_PAGE, Work};
use crate::Result;
use crate::store::content_version;
use crate::store::large::Draft;
use crate::store::meter::Class;
use crate::store::types::Put;

/// How many are remembered.
const KEPT: usize = 4;

/// This process' drafts.
#[derive(Debug, Default)]
pub(super) struct Drafts {
    /// The last few.
    known: Mutex<VecDeque<Known>>,
    /// Not on this file system, or not in this sandbox.
    refused: AtomicBool,
}

#[derive(Debug)]
struct Known {
    version: Version,
    marks: Marks,
    /// Open, so that no other file has its number.
    _file: Arc<OwnedFd>,
}

/// What is known of a draft. Its file has a name until it is dropped.
#[derive(Debug)]
struct Drafted {
    temp: Temp,
    version: Version,
    size: u64,
}

/// What a file shows that nobody has written to since: which it is, how long, and when it was written.
/// Not when it was changed: so it is by every link.
type Marks = [i128; 5];

fn marks(stat: &Stat) -> Marks {
    #[allow(clippy::unnecessary_cast)] // the fields differ in type between systems
    [
        stat.st_dev as i128,
        stat.st_ino as i128,
        stat.st_size as i128,
        stat.st_mtime as i128,
        stat.st_mtime_nsec as i128,
    ]
}

impl Drafts {
    /// Whether the file with this name is one of them, with this version: then it needs not be read. Others
    /// may be as well.
    pub fn is_known(&self, folder: &Folder<'_>, name: &str, version: &Version) -> bool {
        // Locked while we look: it stays open.
        let known = self.known();
        let Some(draft) = known.iter().rfind(|draft| draft.version == *version) else {
            return false;
        };
        let stat = rustix::fs::statat(folder.as_fd(), name, AtFlags::SYMLINK_NOFOLLOW);
        stat.is_ok_and(|stat| marks(&stat) == draft.marks)
    }

    fn known(&self) -> MutexGuard<'_, VecDeque<Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, known: Known) {
        let mut all = self.known();
        if all.len() >= KEPT {
            all.pop_front();
        }
        all.push_back(known);
    }
}

impl Dir {
    /// What cannot be drafted is put in another way, which also says what is wrong.
    pub(super) fn draft_file(&self, body: &Bytes) -> Option<Draft> {
        let work = self.0.work().ok()?;
        if work.drafts.refused.load(Relaxed) || body.len() > ONE_PAGE {
            return None;
        }
        let temp = work.temps.write(body).ok()?;
        let marks = marks(&rustix::fs::fstat(&temp.file).ok()?);
        let version = content_version(body);
        work.drafts.note(Known { version: version.clone(), marks, _file: temp.file.clone() });
        Some(Draft::new(Drafted { temp, version, size: body.len() as u64 }))
    }

    pub(super) fn link_draft(&self, key: &Key, draft: &Draft) -> Result<Option<Put>> {
        let Some(draft) = draft.known::<Drafted>() else { return Ok(None) };
        let work = self.0.work()?;
        let path = path_of(key.as_str());
        match link(work, &draft.temp, &path) {
            Ok(()) => {
                self.0.meter.request(Class::Put, draft.size);
                work.note_created(&path);
                Ok(Some(Put::Stored(draft.version.clone())))
            }
            Err(Errno::EXIST) if file_type(&work.root, &path) != Some(FileType::Directory) => {
                self.0.meter.request(Class::Put, draft.size);
                Ok(Some(Put::Refused))
            }
            // It will not be otherwise with the next one.
            Err(Errno::PERM | Errno::ACCESS | Errno::NOTSUP | Errno::NOSYS | Errno::XDEV) => {
                work.drafts.refused.store(true, Relaxed);
                Ok(None)
            }
            // No folder, no draft any more, too many links: whatever it is, a put will tell.
            Err(_) => Ok(None),
        }
    }
}

fn link(work: &Work, temp: &Temp, path: &str) -> Result<(), Errno> {
    let (folder, name) = beneath(work, path)?;
    rustix::fs::linkat(&work.temps.folder, temp.name(), folder.as_fd(), name, AtFlags::empty())
}
