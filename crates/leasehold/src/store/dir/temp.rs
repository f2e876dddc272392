//! Temporary files: what an object is before it has its name.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use rustix::io::Errno;

use super::files::write_error;
use crate::store::large::FileBody;
use crate::{Error, Result};

/// Where temporary files stand, and how this process names its own.
#[derive(Debug)]
pub(super) struct Temps {
    pub folder: Arc<OwnedFd>,
    tag: u64,
    counter: AtomicU64,
}

impl Temps {
    pub fn new(folder: OwnedFd, tag: u64) -> Self {
        Self { folder: Arc::new(folder), tag, counter: AtomicU64::new(0) }
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

    /// Removes temporary files that crashed processes left. Ages are told by the file system
    /// alone: a file that it makes now says what time it is there.
    pub fn sweep(&self) {
        const OLD: i64 = 3600;
        let Ok(dir) = rustix::fs::Dir::read_from(self.folder.as_fd()) else { return };
        let stat = |name: &std::ffi::CStr| {
            rustix::fs::statat(&self.folder, name, AtFlags::SYMLINK_NOFOLLOW)
        };
        let names: Vec<_> = dir
            .filter_map(Result::ok)
            .filter(|entry| entry.file_type() != FileType::Directory)
            .filter_map(|entry| Some((stat(entry.file_name()).ok()?.st_mtime, entry)))
            .collect();
        if names.is_empty() {
            return;
        }
        let Ok((file, name)) = self.create() else { return };
        if let Ok(now) = rustix::fs::fstat(&file) {
            for (modified, entry) in names {
                if now.st_mtime - modified > OLD {
                    let _ = rustix::fs::unlinkat(&self.folder, entry.file_name(), AtFlags::empty());
                }
            }
        }
        let _ = rustix::fs::unlinkat(&self.folder, name, AtFlags::empty());
    }
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
