//! Up to when everything is on disk: `.lh/log/floor`.
//!
//! Whoever has flushed the whole file system writes down the time at which it began to. Notes of
//! that boot up to then do not count any more, whosever they are: a process that was killed or
//! stopped cannot put its own away.
//!
//! Two blocks, written in turn, so that one is always whole: `LHFLOOR1`, turn, four times boot and
//! stamp (the boot's id, hashed), checksum.

use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use xxhash_rust::xxh3::xxh3_64;

use super::{boot_hash, is_at, open_folder, segment_names, write_all};
use crate::host;
use crate::store::dir::flush::flush_data;

const NAME: &str = "floor";
const MAGIC: &[u8; 8] = b"LHFLOOR1";
const BLOCK: u64 = 4096;
const LENGTH: usize = 88;
/// How long the last to leave waits for the lock, about. If it stays for ever, so does an empty folder.
const LEAVING: Duration = Duration::from_secs(1);
/// How long to wait at a time, at first and at most. Nobody who is in a hurry waits for this.
const PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(50));

/// Why the floor was not raised.
#[derive(Debug, Clone, Copy)]
pub enum NotRaised {
    /// It could not be opened or locked: nothing was tried.
    Open(Errno),
    /// Writing or flushing it failed.
    Failed(Errno),
}

impl From<NotRaised> for Errno {
    fn from(error: NotRaised) -> Self {
        match error {
            NotRaised::Open(error) | NotRaised::Failed(error) => error,
        }
    }
}

/// What the file says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Floors {
    turn: u64,
    /// Boot and stamp, the newest first.
    boots: [(u64, u64); 4],
}

impl Floors {
    /// Notes of this boot count above it.
    pub fn of(&self, boot_id: &str) -> u64 {
        let boot = boot_hash(boot_id);
        self.boots.iter().find(|(of, _)| *of == boot).map_or(0, |(_, stamp)| *stamp)
    }

    /// What stands in this folder; nothing if there is none.
    pub fn read(log: &OwnedFd) -> Result<Self, Errno> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        match rustix::fs::openat(log, NAME, flags, Mode::empty()) {
            Ok(file) => Self::from_file(&file),
            Err(Errno::NOENT) => Ok(Self::default()),
            Err(error) => Err(error),
        }
    }

    fn from_file(file: &OwnedFd) -> Result<Self, Errno> {
        let block = |at: u64| -> Result<Option<Self>, Errno> {
            let mut bytes = [0; LENGTH];
            let read = rustix::io::pread(file, &mut bytes, at)?;
            Ok(Self::parse(&bytes[..read]))
        };
        let both = [block(0)?, block(BLOCK)?];
        Ok(both.into_iter().flatten().max_by_key(|floors| floors.turn).unwrap_or_default())
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let (content, sum) = bytes.split_last_chunk()?;
        let mut numbers = content.strip_prefix(MAGIC)?.as_chunks::<8>().0.iter();
        let mut next = || numbers.next().map(|bytes| u64::from_le_bytes(*bytes));
        let mut floors = Self { turn: next()?, ..Self::default() };
        for slot in &mut floors.boots {
            *slot = (next()?, next()?);
        }
        (u64::from_le_bytes(*sum) == xxh3_64(content)).then_some(floors)
    }

    fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(self.turn.to_le_bytes());
        for (boot, stamp) in self.boots {
            bytes.extend(boot.to_le_bytes());
            bytes.extend(stamp.to_le_bytes());
        }
        let checksum = xxh3_64(&bytes);
        bytes.extend(checksum.to_le_bytes());
        bytes
    }

    fn raise(&mut self, boot: u64, stamp: u64) {
        let at = self.boots.iter().position(|(of, _)| *of == boot);
        let stamp = at.map_or(stamp, |at| self.boots[at].1.max(stamp));
        // The others keep their order, and the last makes room for one that is new.
        self.boots[..=at.unwrap_or(3)].rotate_right(1);
        self.boots[0] = (boot, stamp);
        self.turn += 1;
    }
}

/// The open file, kept so that raising the floor needs none when there are no more to be had.
#[derive(Debug, Default)]
pub struct Floor(Option<OwnedFd>);

impl Floor {
    /// Opens or makes the file, on disk with its name. Waits for nobody: if another process has it
    /// locked, that one sees to the rest, and whoever raises the floor looks again.
    pub fn prepare(&mut self, root: &OwnedFd) -> Result<&OwnedFd, NotRaised> {
        if self.0.as_ref().is_some_and(|file| !is_there(root, file)) {
            self.0 = None;
        }
        match &mut self.0 {
            Some(file) => Ok(file),
            empty => {
                let log = open_folder(root).map_err(NotRaised::Open)?;
                let log = log.ok_or(NotRaised::Open(Errno::NOENT))?;
                let flags = OFlags::RDWR
                    | OFlags::CREATE
                    | OFlags::CLOEXEC
                    | OFlags::NOFOLLOW
                    | OFlags::NONBLOCK;
                let file = rustix::fs::openat(&log, NAME, flags, Mode::from_raw_mode(0o666))
                    .map_err(NotRaised::Open)?;
                if size(&file)? < 2 * BLOCK
                    && let Some(lock) = Lock::attempt(&file).map_err(NotRaised::Open)?
                {
                    lock.make_room(&log)?;
                }
                Ok(empty.insert(file))
            }
        }
    }

    /// Writes down that everything up to this stamp is on disk. Nothing to do where there are no
    /// notes at all, or another process has raised it as far as `needed` meanwhile. Waits for
    /// others for about as long as `patience`.
    pub fn raise(
        &mut self,
        root: &OwnedFd,
        (stamp, needed): (u64, u64),
        patience: Duration,
    ) -> Result<(), NotRaised> {
        loop {
            // Asked first without opening anything: there may be no more files to be had.
            let there = rustix::fs::statat(root, super::folder(), AtFlags::SYMLINK_NOFOLLOW);
            if there.is_err() {
                return Ok(());
            }
            let log = open_folder(root).map_err(NotRaised::Open)?;
            let Some(log) = log else { return Ok(()) };
            let file = self.prepare(root)?;
            let high = || is_above(file, needed, flush_data);
            let lock = Lock::take_unless(file, patience, high)?;
            // The last to leave removed it before we had the lock.
            if !is_there(root, file) {
                continue;
            }
            let Some(lock) = lock else { return Ok(()) };
            lock.make_room(&log)?;
            let write = || {
                let mut floors = Floors::from_file(file)?;
                floors.raise(boot_hash(host::boot_id()), stamp);
                write_all(file, &floors.to_bytes(), floors.turn % 2 * BLOCK)?;
                flush_data(file)
            };
            let written = write().map_err(NotRaised::Failed);
            drop(lock);
            return written;
        }
    }

    /// Removes the floor and the folder if there are no segments left.
    pub fn remove_if_last(&mut self, root: &OwnedFd) -> Result<(), Errno> {
        let Some(log) = open_folder(root)? else { return Ok(()) };
        // Segments must be gone from the disk before that which makes them harmless.
        rustix::fs::fsync(&log)?;
        let file = self.prepare(root)?;
        let lock = Lock::take_unless(file, LEAVING, || Ok(false))?;
        // Another removed it before we had the lock: what stands there now is not ours to remove.
        if !is_there(root, file) {
            return Ok(());
        }
        if segment_names(&log)?.is_empty() {
            rustix::fs::unlinkat(&log, NAME, AtFlags::empty())?;
            // Stays if somebody begins a journal right now, who then needs no floor of before.
            let _ = rustix::fs::unlinkat(root, super::folder(), AtFlags::REMOVEDIR);
        }
        drop(lock);
        Ok(())
    }
}

/// Whether this is the file that recovery would look at.
fn is_there(root: &OwnedFd, file: &OwnedFd) -> bool {
    is_at(root, &format!("{}/{NAME}", super::folder()), file)
}

/// Whether another has raised the floor as far as `needed`. Whoever did may be at just that, so it is
/// flushed; and a flush that failed is no less final for being another's.
fn is_above(
    file: &OwnedFd,
    needed: u64,
    flush: impl Fn(&OwnedFd) -> Result<(), Errno>,
) -> Result<bool, NotRaised> {
    let floors = Floors::from_file(file).map_err(NotRaised::Open)?;
    if floors.of(host::boot_id()) < needed {
        return Ok(false);
    }
    flush(file).map(|()| true).map_err(NotRaised::Failed)
}

fn size(file: &OwnedFd) -> Result<u64, NotRaised> {
    rustix::fs::fstat(file).map(|stat| stat.st_size as u64).map_err(NotRaised::Open)
}

#[derive(Debug)]
struct Lock<'a>(&'a OwnedFd);

impl<'a> Lock<'a> {
    /// `None` if another process has it.
    fn attempt(file: &'a OwnedFd) -> Result<Option<Self>, Errno> {
        match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(Self(file))),
            Err(Errno::WOULDBLOCK | Errno::INTR) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// `None` once there is no need for it any more.
    fn take_unless(
        file: &'a OwnedFd,
        patience: Duration,
        needless: impl Fn() -> Result<bool, NotRaised>,
    ) -> Result<Option<Self>, NotRaised> {
        let (mut pause, mut waited) = (PAUSES.0, Duration::ZERO);
        loop {
            if let Some(lock) = Self::attempt(file).map_err(NotRaised::Open)? {
                return Ok(Some(lock));
            }
            if needless()? {
                return Ok(None);
            }
            if waited >= patience {
                return Err(NotRaised::Open(Errno::TIMEDOUT));
            }
            std::thread::sleep(pause);
            waited += pause;
            pause = (pause * 2).min(PAUSES.1);
        }
    }

    /// Room for both blocks, so that a full disk is no obstacle later, and the name on disk.
    /// Under the lock: another may have written what must not be overwritten.
    fn make_room(&self, log: &OwnedFd) -> Result<(), NotRaised> {
        let size = size(self.0)?;
        if size < 2 * BLOCK {
            let room = vec![0; (2 * BLOCK - size) as usize];
            write_all(self.0, &room, size).map_err(NotRaised::Open)?;
            rustix::fs::fsync(self.0).map_err(NotRaised::Failed)?;
            rustix::fs::fsync(log).map_err(NotRaised::Failed)?;
        }
        Ok(())
    }
}

impl Drop for Lock<'_> {
    fn drop(&mut self) {
        // Closing is the only other way to unlock, and the kernel does that when we end.
        let _ = rustix::fs::flock(self.0, FlockOperation::Unlock);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn folder() -> (tempfile::TempDir, OwnedFd) {
        let dir = tempfile::TempDir::new().unwrap();
        std::fs::create_dir_all(dir.path().join(super::super::folder())).unwrap();
        let root = std::fs::File::open(dir.path()).unwrap().into();
        (dir, root)
    }

    /// One that waits for the floor while others raise it goes on as soon as that is far enough, and one that
    /// cannot have it says so rather than wait for ever.
    #[test]
    fn who_waits_for_the_floor_need_not_raise_it() {
        let (_dir, root) = folder();
        let (mut others, mut ours) = (Floor::default(), Floor::default());
        others.raise(&root, (100, 100), LONG).unwrap();
        let file = others.prepare(&root).unwrap();
        let held = Lock::attempt(file).unwrap().unwrap();
        let turn = || Floors::from_file(file).unwrap().turn;
        let before = turn();
        ours.raise(&root, (200, 90), LONG).unwrap();
        ours.raise(&root, (200, 100), LONG).unwrap();
        assert_eq!(turn(), before, "not raised again");
        let busy = ours.raise(&root, (200, 101), Duration::from_millis(5));
        assert!(matches!(busy, Err(NotRaised::Open(Errno::TIMEDOUT))), "{busy:?}");
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| ours.raise(&root, (200, 101), LONG).unwrap());
            std::thread::sleep(Duration::from_millis(20));
            assert!(!waits.is_finished(), "101 is not covered");
            drop(held);
        });
        assert_eq!(
            (turn(), Floors::from_file(file).unwrap().of(host::boot_id())),
            (before + 1, 200)
        );
    }

    /// The kernel reports it once: asked again, the same flush would seem to succeed.
    #[test]
    fn a_flush_that_failed_is_final_whoever_wrote_it() {
        let (dir, root) = folder();
        let mut floor = Floor::default();
        floor.raise(&root, (100, 100), LONG).unwrap();
        let file = floor.prepare(&root).unwrap();
        let _held = Lock::attempt(file).unwrap().unwrap();
        let other = std::fs::File::open(dir.path().join(super::super::folder()).join(NAME));
        let other = OwnedFd::from(other.unwrap());
        let above = |needed| is_above(&other, needed, |_| Err(Errno::IO));
        let waited = Lock::take_unless(&other, LONG, || above(100)).map(drop);
        assert!(matches!(waited, Err(NotRaised::Failed(Errno::IO))), "{waited:?}");
        assert!(!above(101).unwrap(), "nothing to flush");
    }

    /// Another process was stopped when it had just made the file, and has it locked.
    #[test]
    fn an_unfinished_floor_is_not_waited_for_and_finished_by_who_raises_it() {
        let (dir, root) = folder();
        let path = dir.path().join(super::super::folder()).join(NAME);
        let stopped = OwnedFd::from(std::fs::File::create(&path).unwrap());
        let held = Lock::attempt(&stopped).unwrap().unwrap();
        let mut floor = Floor::default();
        floor.prepare(&root).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 0, "left to who has the lock");
        drop(held);
        floor.raise(&root, (100, 100), LONG).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 2 * BLOCK);
        let log = open_folder(&root).unwrap().unwrap();
        assert_eq!(Floors::read(&log).unwrap().of(host::boot_id()), 100);
    }

    #[test]
    fn a_floor_only_rises_and_each_boot_has_its_own() {
        let mut floors = Floors::default();
        floors.raise(boot_hash("a"), 7);
        floors.raise(boot_hash("b"), 3);
        floors.raise(boot_hash("a"), 5);
        assert_eq!((floors.of("a"), floors.of("b"), floors.of("c")), (7, 3, 0));
        for boot in ["c", "d", "e"] {
            floors.raise(boot_hash(boot), 1);
        }
        assert_eq!((floors.of("a"), floors.of("b"), floors.of("e")), (7, 0, 1));
        let mut bytes = floors.to_bytes();
        assert_eq!(bytes.len(), LENGTH);
        assert_eq!(Floors::parse(&bytes), Some(floors));
        bytes[20] ^= 1;
        assert_eq!(Floors::parse(&bytes), None);
        assert_eq!(Floors::parse(b""), None);
    }
}
