//! Bodies that are written once and become many objects: hard links of one file.
//!
//! A link makes no inode and writes nothing, nor does its removal free one while there are others. All links
//! have one content, so this is for objects that nobody writes to in place: as everywhere here, who replaces one puts
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

use super::files::{Folder, Identity, beneath, identity_of};
use super::names::path_of;
use super::temp::Temp;
use super::{Dir, ONE_PAGE};
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
    identity: Identity,
    size: u64,
}

/// What a file shows that nobody has written to since: which it is, how long, and when it was written.
/// Not when it was changed: so it is by every link.
type Marks = (Identity, i64, [i64; 2]);

fn marks(stat: &Stat) -> Marks {
    #[allow(clippy::unnecessary_cast)] // the fields differ in type between systems
    let written = [stat.st_mtime as i64, stat.st_mtime_nsec as i64];
    (identity_of(stat), stat.st_size, written)
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
        let stat = rustix::fs::fstat(&temp.file).ok()?;
        let (version, file) = (content_version(body), temp.file.clone());
        work.drafts.note(Known { version: version.clone(), marks: marks(&stat), _file: file });
        let (identity, size) = (identity_of(&stat), body.len() as u64);
        Some(Draft::new(Drafted { temp, version, identity, size }))
    }

    pub(super) fn link_draft(&self, key: &Key, draft: &Draft) -> Result<Option<Put>> {
        let Some(draft) = draft.known::<Drafted>() else { return Ok(None) };
        let work = self.0.work()?;
        let path = path_of(key.as_str());
        // No folder, or no way there: whatever it is, a put will tell.
        let Ok((folder, name)) = beneath(work, &path) else { return Ok(None) };
        let (from, temp) = (&work.temps.folder, draft.temp.name());
        let linked = rustix::fs::linkat(from, temp, folder.as_fd(), name, AtFlags::empty());
        let made = match linked {
            Ok(()) => true,
            Err(error) => {
                let there = rustix::fs::statat(folder.as_fd(), name, AtFlags::SYMLINK_NOFOLLOW);
                match (there, error) {
                    // Done, whatever was said: file systems over a wire ask again if they hear nothing. A draft
                    // has each name once.
                    (Ok(there), _) if identity_of(&there) == draft.identity => true,
                    (Ok(there), Errno::EXIST) if !is_folder(&there) => false,
                    (
                        _,
                        Errno::PERM | Errno::ACCESS | Errno::NOTSUP | Errno::NOSYS | Errno::XDEV,
                    ) => {
                        // It will not be otherwise with the next one.
                        work.drafts.refused.store(true, Relaxed);
                        return Ok(None);
                    }
                    // Swept away, too many names.
                    _ => return Ok(None),
                }
            }
        };
        self.0.meter.request(Class::Put, draft.size);
        if !made {
            return Ok(Some(Put::Refused));
        }
        work.note_created(&path);
        Ok(Some(Put::Stored(draft.version.clone())))
    }
}

fn is_folder(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::Directory
}
