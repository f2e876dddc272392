//! Temporary files: what an object is before it has its name.

use std::ffi::CString;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use leasehold_protocol::time::StoreTime;
use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use rustix::io::Errno;

use super::files::{mtime, write_error};
use super::names::PRIVATE;
use crate::store::large::FileBody;
use crate::{Error, Result};

/// How many folders there are: each process takes one of them by chance. All making and renaming of files
/// in one folder is done one after the other by the kernel, and processes would wait for each other.
const FOLDERS: u64 = 16;

/// Where temporary files stand, and how this process names its own.
#[derive(Debug)]
pub(super) struct Temps {
    /// The folder of all of them.
    above: OwnedFd,
    pub folder: Arc<OwnedFd>,
    tag: u64,
    counter: AtomicU64,
}

impl Temps {
    /// Those of this store, by a number that no other process has. `open` makes folders.
    pub fn new(tag: u64, open: impl Fn(&str) -> Result<OwnedFd, Errno>) -> Result<Self, Errno> {
        let above = open(&format!("{PRIVATE}/tmp"))?;
        let folder = Arc::new(open(&format!("{PRIVATE}/tmp/{:x}", tag % FOLDERS))?);
        Ok(Self { above, folder, tag, counter: AtomicU64::new(0) })
    }

    fn create(&self) -> Result<(OwnedFd, String), Errno> {
        // A fork has the tag and the counter of its parent.
        let (pid, n) = (std::process::id(), self.counter.fetch_add(1, Relaxed));
        let name = format!("{:016x}-{pid:x}-{n:x}", self.tag);
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&self.folder, &name, flags, Mode::from_raw_mode(0o666))?;
        Ok((file, name))
    }

    /// A temporary file with this content.
    pub fn write(&self, body: &[u8]) -> Result<Temp> {
        let (file, name) = self.create().map_err(write_error)?;
        let temp = Temp { folder: self.folder.clone(), file: Arc::new(file), name: Some(name) };
        let mut rest = body;
        while !rest.is_empty() {
            match rustix::io::write(&temp.file, rest) {
                Ok(0) => return Err(write_error(Errno::IO)),
                Ok(written) => rest = &rest[written..],
                Err(Errno::INTR) => {}
                Err(error) => return Err(write_error(error)),
            }
        }
        Ok(temp)
    }

    /// A temporary file with the content of this one.
    pub fn copy(&self, from: &FileBody) -> Result<Temp> {
        let (file, name) = self.create().map_err(write_error)?;
        let temp = Temp { folder: self.folder.clone(), file: Arc::new(file), name: Some(name) };
        let failed =
            |error: std::io::Error| write_error(Errno::from_io_error(&error).unwrap_or(Errno::IO));
        let mut copy = temp.file.try_clone().map(std::fs::File::from).map_err(failed)?;
        from.copy_to(&mut copy).map_err(failed)?;
        Ok(temp)
    }

    /// Whether the temporary file is still there: another process sweeps it away if ours slept for
    /// an hour between writing it and naming it.
    pub fn check(&self, temp: &Temp) -> Result<()> {
        match rustix::fs::statat(&self.folder, temp.name(), AtFlags::empty()) {
            Err(Errno::NOENT) => {
                Err(Error::unavailable("the temporary file was swept away: try again"))
            }
            _ => Ok(()),
        }
    }

    /// Removes temporary files that crashed processes left, unless somebody has done so in the last ten
    /// minutes: that takes a hundred system calls, and a command that writes one object should not
    /// take as many again. So what was left goes with the first write of any process that starts
    /// seventy minutes later.
    ///
    /// Ages are told by the file system alone: a file that it makes now says what time it is there.
    /// The time of this host only tells whether to look; one that is wrong looks too often.
    pub fn sweep(&self, private: &OwnedFd, now: StoreTime) {
        const OLD: i64 = 3600;
        let Some(now) = begin_sweep(private, now) else { return };
        let Ok((mut left, folders)) = found(&self.above) else { return };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        for name in folders {
            let Ok(folder) = rustix::fs::openat(&self.above, &name, flags, Mode::empty()) else {
                continue;
            };
            let Ok((files, _)) = found(&folder) else { continue };
            let path = |file: CString| [name.to_bytes(), b"/", file.to_bytes()].concat();
            left.extend(
                files
                    .into_iter()
                    .filter_map(|(at, file)| Some((at, CString::new(path(file)).ok()?))),
            );
        }
        for (modified, file) in left {
            if now - modified > OLD {
                let _ = rustix::fs::unlinkat(&self.above, file, AtFlags::empty());
            }
        }
    }
}

/// Whose age is that of the last sweep.
const SWEPT: &str = "swept";
const SWEEP_EVERY: Duration = Duration::from_secs(600);

/// The file system's time, if it is time for a sweep: for others it is not from now on. Should this
/// process die at it, the next one is in ten minutes.
fn begin_sweep(private: &OwnedFd, now: StoreTime) -> Option<i64> {
    if let Ok(stat) = rustix::fs::statat(private, SWEPT, AtFlags::SYMLINK_NOFOLLOW) {
        let last = mtime(&stat);
        if last <= now && now.since(last) < SWEEP_EVERY {
            return None;
        }
        // Not written to: it may be somebody else's.
        let _ = rustix::fs::unlinkat(private, SWEPT, AtFlags::empty());
    }
    // If it is there again, another does it.
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let file = rustix::fs::openat(private, SWEPT, flags, Mode::from_raw_mode(0o666)).ok()?;
    rustix::fs::fstat(&file).ok().map(|stat| stat.st_mtime)
}

/// When a file was written, and its name.
type File = (i64, CString);

/// The files in a folder, and the folders.
fn found(folder: &OwnedFd) -> Result<(Vec<File>, Vec<CString>), Errno> {
    let (mut files, mut folders) = (Vec::new(), Vec::new());
    for entry in rustix::fs::Dir::read_from(folder)? {
        let entry = entry?;
        let name = entry.file_name().to_owned();
        if entry.file_type() == FileType::Directory {
            folders.extend((!name.to_bytes().starts_with(b".")).then_some(name));
            continue;
        }
        let Ok(stat) = rustix::fs::statat(folder, &name, AtFlags::SYMLINK_NOFOLLOW) else {
            continue;
        };
        match FileType::from_raw_mode(stat.st_mode) {
            // Not every file system says so beforehand.
            FileType::Directory if name.to_bytes().starts_with(b".") => {}
            FileType::Directory => folders.push(name),
            _ => files.push((stat.st_mtime, name)),
        }
    }
    Ok((files, folders))
}

/// A temporary file, removed when dropped unless it became an object.
#[derive(Debug)]
pub(super) struct Temp {
    folder: Arc<OwnedFd>,
    pub file: Arc<OwnedFd>,
    name: Option<String>,
}

impl Temp {
    pub fn name(&self) -> &str {
        self.name.as_deref().unwrap_or_default()
    }

    /// It has become an object.
    pub fn became_object(&mut self) {
        self.name = None;
    }

    /// Leaves it for a later sweep.
    pub fn leave(mut self) {
        self.name = None;
    }
}

impl Drop for Temp {
    fn drop(&mut self) {
        if let Some(name) = &self.name {
            // If it is gone already, so much the better.
            let _ = rustix::fs::unlinkat(&self.folder, name.as_str(), AtFlags::empty());
        }
    }
}
