//! Fencing tokens where lock files are deleted on release.
//!
//! A token must be higher than every earlier one of its lock: across release, restart, power loss
//! and clock steps. With the record goes the memory of its token, so it is kept elsewhere:
//!
//! - **within a boot** the stripe file of a key holds the highest token that was retired at that key, and a
//!   few others. It is written before the record is deleted, under the stripe lock, so whoever creates
//!   a record after the deletion finds it there;
//! - **across boots** `.lh/fence` holds a floor. No token is given out above the mark that was
//!   flushed to disk before, and after a boot all tokens are above that mark. The mark is moved an
//!   hour ahead at a time, so that costs one flush an hour.

use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::flush::flush_one;
use super::stripe::STRIPES;
use super::{Work, io_error};
use crate::{Error, ErrorKind, Result};

const FILE: &str = "fence";
const LOCK: &str = "fence.lock";

/// An hour of microseconds.
const AHEAD: u64 = 3_600_000_000;

/// What `.lh/fence` says.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    /// In which boot the floor was set.
    boot_id: String,
    /// Tokens of this boot are above it.
    floor: u64,
    /// No token above it has been given out.
    mark: u64,
}

/// This process' knowledge of the fence.
#[derive(Debug, Default)]
pub struct Fence(Mutex<Option<Record>>);

impl Fence {
    /// Every token to be given out at this key is above this.
    pub fn floor(&self, work: &Work, key: &str, boot_id: &str) -> Result<u64> {
        let floor = known(&mut self.lock(), work, 0, boot_id)?.floor;
        Ok(floor.max(work.stripes.retired(&work.root, key)?))
    }

    /// Makes sure that this token can be given out: that after a power loss all are above it.
    pub fn reserve(&self, work: &Work, token: u64, boot_id: &str) -> Result<()> {
        let mut fence = self.lock();
        let record = known(&mut fence, work, token, boot_id)?;
        if token <= record.mark {
            return Ok(());
        }
        let _lock = lock(&work.private)?;
        // Another process may have moved it further.
        let mut now = read(&work.private)?.unwrap_or_else(|| record.clone());
        now.mark = now.mark.max(token.saturating_add(AHEAD));
        write(&work.private, &now)?;
        record.mark = now.mark;
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Option<Record>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What this process knows, or what the file says. Where that has to be written, this token can be given out
/// then.
fn known<'a>(
    fence: &'a mut Option<Record>,
    work: &Work,
    token: u64,
    boot_id: &str,
) -> Result<&'a mut Record> {
    if fence.is_none() {
        *fence = Some(load(&work.private, &work.root, token, boot_id)?);
    }
    fence.as_mut().ok_or_else(|| Error::new(ErrorKind::Internal, "the fence was just read"))
}

fn load(private: &OwnedFd, root: &OwnedFd, token: u64, boot_id: &str) -> Result<Record> {
    let _lock = lock(private)?;
    let found = read(private)?;
    if let Some(record) = &found
        && record.boot_id == boot_id
        && !boot_id.is_empty()
    {
        return Ok(record.clone());
    }
    // The first process of this boot. What the stripes remember may be ahead of the mark if the
    // record was lost.
    let retired = (0..STRIPES).filter_map(|n| super::stripe::read_retired(root, n).ok()).max();
    let floor = found.map_or(0, |record| record.mark).max(retired.unwrap_or(0));
    let mark = if token > floor { token.saturating_add(AHEAD) } else { floor };
    let record = Record { boot_id: boot_id.to_owned(), floor, mark };
    write(private, &record)?;
    Ok(record)
}

fn lock(private: &OwnedFd) -> Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
    let file =
        rustix::fs::openat(private, LOCK, flags, Mode::from_raw_mode(0o666)).map_err(failed)?;
    // Held for reading and writing a small file, at most once an hour.
    for _ in 0..2000 {
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(Errno::WOULDBLOCK) => std::thread::sleep(Duration::from_millis(5)),
            Err(Errno::INTR) => {}
            Err(error) => return Err(failed(error)),
        }
    }
    Err(Error::unavailable(format!(
        "another process has held {}/{LOCK} for 10 s; is it stopped?",
        super::PRIVATE
    )))
}

fn read(private: &OwnedFd) -> Result<Option<Record>> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let file = match rustix::fs::openat(private, FILE, flags, Mode::empty()) {
        Ok(file) => file,
        Err(Errno::NOENT) => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    let stat = rustix::fs::fstat(&file).map_err(failed)?;
    let bytes = super::read_all(&file, &stat).map_err(failed)?;
    match serde_json::from_slice(&bytes) {
        Ok(record) => Ok(Some(record)),
        Err(error) => Err(Error::new(
            ErrorKind::Data,
            format!("{}/{FILE} is damaged ({error}): tokens could repeat", super::PRIVATE),
        )),
    }
}

/// On disk before it counts.
fn write(private: &OwnedFd, record: &Record) -> Result<()> {
    let temp = format!("{FILE}.new");
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::CLOEXEC;
    let file =
        rustix::fs::openat(private, &temp, flags, Mode::from_raw_mode(0o666)).map_err(failed)?;
    let mut bytes = serde_json::to_vec(record).unwrap_or_default();
    bytes.push(b'\n');
    let written = rustix::io::write(&file, &bytes).map_err(failed)?;
    if written != bytes.len() {
        return Err(failed(Errno::NOSPC));
    }
    flush_one(&file).map_err(failed)?;
    rustix::fs::renameat(private, &temp, private, FILE).map_err(failed)?;
    flush_one(private).map_err(failed)
}

fn failed(error: Errno) -> Error {
    io_error("keep the store's fence", error)
}
