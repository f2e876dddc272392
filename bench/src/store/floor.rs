//! The barest way to do with files what a store does: a few system calls, relative to an open
//! folder, without a check of any kind.

use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;

/// Makes a file that is not there yet, with this content.
pub fn write_new(folder: impl AsFd, path: &str, body: &[u8]) -> Result<OwnedFd, Errno> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let file = rustix::fs::openat(folder, path, flags, Mode::from_raw_mode(0o666))?;
    match rustix::io::write(&file, body)? == body.len() {
        true => Ok(file),
        false => Err(Errno::IO),
    }
}

/// Removes a file.
pub fn remove(folder: impl AsFd, path: &str) -> Result<(), Errno> {
    rustix::fs::unlinkat(folder, path, AtFlags::empty())
}

/// Gives a file a second name.
pub fn link(folder: impl AsFd, from: &str, to: &str) -> Result<(), Errno> {
    rustix::fs::linkat(&folder, from, &folder, to, AtFlags::empty())
}

/// Renames a file over whatever is there.
pub fn rename(folder: impl AsFd, from: &str, to: &str) -> Result<(), Errno> {
    rustix::fs::renameat(&folder, from, &folder, to)
}

/// Opens a folder, to be flushed.
pub fn open_folder(folder: impl AsFd, path: &str) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::openat(folder, path, flags, Mode::empty())
}
