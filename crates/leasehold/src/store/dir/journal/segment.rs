//! One file of the journal.

use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use super::record::{HEADER, Header};
use super::{FULL, boot_hash, folder, is_at, open_folder, write_all};
use crate::env::BootTime;
use crate::host;
use crate::store::dir::files::make_folder;
use crate::store::dir::flush::flush_data;
use crate::store::dir::names::PRIVATE;

/// A segment grows by this much: within what it has, a flush writes nothing but the records.
const GROWTH: u64 = 256 << 10;

#[derive(Debug)]
pub struct Segment {
    file: OwnedFd,
    name: String,
    header: Header,
    /// Tells the uses of this process' segments apart.
    pub turn: u64,
    /// Where the next record goes.
    pub end: u64,
    /// Up to where blocks are written.
    ready: u64,
    /// When the first record was noted.
    pub since: Option<BootTime>,
    /// The last stamp of those that were noted.
    pub last: u64,
}

impl Segment {
    /// A new one. It is locked before anybody can see it, and on disk before anything is in it.
    pub fn create(root: &OwnedFd, writer: u64, turn: u64) -> Result<Self, Errno> {
        let name = format!("{:016x}-{writer:016x}-{turn}.log", boot_hash(host::boot_id()));
        let temp = format!("{PRIVATE}/tmp/{name}");
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file = rustix::fs::openat(root, &temp, flags, Mode::from_raw_mode(0o666))?;
        let made = (|| {
            rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)?;
            let header = Header { epoch: 1, writer, boot_id: host::boot_id().to_owned() };
            write_all(&file, &header.to_bytes(), 0)?;
            let (end, ready, since, last) = (HEADER, HEADER, None, 0);
            let mut segment = Self { file, name, header, turn, end, ready, since, last };
            segment.make_room(GROWTH - HEADER)?;
            rustix::fs::fsync(&segment.file)?;
            // Somebody may remove the empty folder meanwhile, but not for ever.
            for _ in 0..100 {
                make_folder(root, &folder())?;
                let Some(log) = open_folder(root)? else { continue };
                match rustix::fs::renameat(root, &temp, &log, &segment.name) {
                    Err(Errno::NOENT) => {}
                    renamed => {
                        renamed?;
                        flush_above(root, &log)?;
                        return Ok(segment);
                    }
                }
            }
            Err(Errno::NOENT)
        })();
        if made.is_err() {
            let _ = rustix::fs::unlinkat(root, &temp, AtFlags::empty());
        }
        made
    }

    /// Writes these frames behind the others. None has a later stamp than `last`.
    pub fn write(&mut self, frames: &[u8], last: u64, now: BootTime) -> Result<(), Errno> {
        self.last = self.last.max(last);
        self.make_room(frames.len() as u64)?;
        write_all(&self.file, frames, self.end)?;
        self.end += frames.len() as u64;
        self.since.get_or_insert(now);
        Ok(())
    }

    pub fn flush(&self) -> Result<(), Errno> {
        flush_data(&self.file)
    }

    /// Whether it still stands where recovery would look for it.
    pub fn is_there(&self, root: &OwnedFd) -> bool {
        is_at(root, &format!("{}/{}", folder(), self.name), &self.file)
    }

    pub fn epoch(&self) -> u32 {
        self.header.epoch
    }

    fn make_room(&mut self, bytes: u64) -> Result<(), Errno> {
        let needed = self.end + bytes;
        if needed > self.ready {
            let ready = needed.next_multiple_of(GROWTH);
            write_all(&self.file, &vec![0; (ready - self.ready) as usize], self.ready)?;
            self.ready = ready;
        }
        Ok(())
    }

    /// Makes it as new. Its records are not needed any more.
    pub fn forget(&mut self) -> Result<(), Errno> {
        self.header.epoch = self.header.epoch.wrapping_add(1);
        write_all(&self.file, &self.header.to_bytes(), 0)?;
        if self.ready > 4 * FULL {
            // Grown while it could not be put away. It is not removed instead: that this process
            // has a segment keeps the others from removing the floor.
            rustix::fs::ftruncate(&self.file, FULL)?;
            self.ready = FULL;
        }
        self.flush()?;
        (self.end, self.since, self.last) = (HEADER, None, 0);
        Ok(())
    }

    pub fn remove(&self, root: &OwnedFd) {
        // One that stays is removed by whoever finds it later.
        if let Ok(Some(log)) = open_folder(root)
            && self.is_there(root)
        {
            let _ = rustix::fs::unlinkat(&log, &self.name, AtFlags::empty());
        }
    }

    /// Marks it as needed after a reboot, whatever other processes flush until then.
    pub fn keep(&self, root: &OwnedFd) {
        if let (Ok(Some(log)), Some(name)) = (open_folder(root), self.name.strip_suffix(".log")) {
            let _ = rustix::fs::renameat(&log, &self.name, &log, format!("{name}{KEPT}"));
        }
    }
}

/// How the names of those end that only a recovery after a reboot may touch.
pub const KEPT: &str = ".kept.log";

/// That a segment is there must be on disk too.
fn flush_above(root: &OwnedFd, log: &OwnedFd) -> Result<(), Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::fsync(log)?;
    rustix::fs::fsync(rustix::fs::openat(root, PRIVATE, flags, Mode::empty())?)?;
    rustix::fs::fsync(root.as_fd())
}

/// The segments of processes of this boot that are gone, locked by us now: nobody writes to them.
pub fn dead(root: &OwnedFd) -> Vec<(String, OwnedFd)> {
    let prefix = format!("{:016x}-", boot_hash(host::boot_id()));
    let Ok(Some(log)) = open_folder(root) else { return Vec::new() };
    let Ok(names) = super::segment_names(&log) else { return Vec::new() };
    let ours = names.into_iter().filter(|name| name.starts_with(&prefix) && !name.ends_with(KEPT));
    let locked = ours.filter_map(|name| {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let file = rustix::fs::openat(&log, &name, flags, Mode::empty()).ok()?;
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).ok()?;
        Some((name, file))
    });
    locked.collect()
}
