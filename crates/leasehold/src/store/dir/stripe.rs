//! Stripe locks: what makes "compare, then rename" one step between processes.
//!
//! A lock is `flock` on one of 64 never-deleted files, chosen by the key's hash. The kernel drops
//! it with its process, so a crash cannot leave one behind. It is held for a compare and a rename,
//! never while something is flushed, so waits are short; one that is not names who is in the way.

use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::Duration;

use leasehold_protocol::format::lease::MAX_TOKEN;
use leasehold_protocol::layout::queue::unit_folder;
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use super::files::{Identity, identity, identity_by_name, open_unnoted};
use crate::env::Env;
use crate::{Error, Result};

pub const STRIPES: usize = 64;

/// How many tokens a stripe file remembers, one after the other: each for its share of the stripe's keys. The
/// more, the less often a key's token has to be above another key's.
const SLOTS: usize = 512;

/// How many bytes a token takes.
const TOKEN: usize = size_of::<u64>();

/// How long to wait for another process' compare-and-rename before giving up.
const PATIENCE: Duration = Duration::from_secs(30);

/// How long to wait on the caller's own thread, which may be an executor's.
pub const BRIEF: Duration = Duration::from_millis(2);

#[derive(Debug)]
pub struct Stripes {
    files: [Mutex<Option<Open>>; STRIPES],
}

/// An open stripe file, and what tells it from another of the same name.
#[derive(Debug)]
struct Open {
    file: OwnedFd,
    identity: Identity,
    /// A fork shares the open file, and flock does not tell the two processes apart.
    process: u32,
}

/// Held while it lives.
pub struct Stripe<'a> {
    file: MutexGuard<'a, Option<Open>>,
    slot: usize,
}

impl Stripe<'_> {
    /// Notes that a lease with this token is about to be deleted: see `fence`.
    pub fn retire(&self, token: u64) -> Result<(), Errno> {
        let Some(Open { file, .. }) = &*self.file else { return Err(Errno::BADF) };
        let retired = match read_slot(file, self.slot)? {
            Some(retired) => retired,
            None => self.fill(file)?,
        };
        if token > retired {
            write_at(file, &token.to_le_bytes(), (self.slot * TOKEN) as u64)?;
        }
        Ok(())
    }
}

impl Stripe<'_> {
    /// Gives every key a slot, in a file that remembers one token for all of them, or none yet. Says which.
    fn fill(&self, file: &OwnedFd) -> Result<u64, Errno> {
        let retired = read_slot(file, 0)?.unwrap_or(0);
        // The disk may have been full when somebody else did so: what is there counts.
        let there = usize::try_from(rustix::fs::fstat(file)?.st_size).unwrap_or(0) / TOKEN;
        let missing = retired.to_le_bytes().repeat(SLOTS.saturating_sub(there));
        write_at(file, &missing, (there * TOKEN) as u64)?;
        Ok(retired)
    }
}

fn write_at(file: &OwnedFd, bytes: &[u8], at: u64) -> Result<(), Errno> {
    match rustix::io::pwrite(file, bytes, at)? {
        written if written == bytes.len() => Ok(()),
        _ => Err(Errno::NOSPC),
    }
}

/// The highest token that was retired in a slot; `None` if the file ends before it. Eight bytes are read and
/// written at once.
fn read_slot(file: &OwnedFd, slot: usize) -> Result<Option<u64>, Errno> {
    let mut bytes = [0; TOKEN];
    let read = rustix::io::pread(file, &mut bytes, (slot * TOKEN) as u64)?;
    Ok((read == TOKEN).then(|| token(bytes)))
}

/// What a power loss left in the place of one would be above all that can be given out.
fn token(bytes: [u8; TOKEN]) -> u64 {
    Some(u64::from_le_bytes(bytes)).filter(|token| *token <= MAX_TOKEN).unwrap_or(0)
}

/// The same of a file that may have one for all its keys.
fn read_token(file: &OwnedFd, slot: usize) -> Result<u64, Errno> {
    match read_slot(file, slot)? {
        Some(token) => Ok(token),
        None => Ok(read_slot(file, 0)?.unwrap_or(0)),
    }
}

/// The highest token that was retired in a stripe, by its number.
pub fn read_retired(root: &OwnedFd, index: usize) -> Result<u64, Errno> {
    let Some(file) = open_to_read(root, index)? else { return Ok(0) };
    let mut bytes = [0; SLOTS * TOKEN];
    let read = rustix::io::pread(&file, &mut bytes, 0)?;
    let tokens = bytes[..read].as_chunks().0.iter().map(|bytes| token(*bytes));
    Ok(tokens.max().unwrap_or(0))
}

fn open_to_read(root: &OwnedFd, index: usize) -> Result<Option<OwnedFd>, Errno> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    match rustix::fs::openat(root, path_of(index), flags, Mode::empty()) {
        Ok(file) => Ok(Some(file)),
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(error),
    }
}

impl Drop for Stripe<'_> {
    fn drop(&mut self) {
        if let Some(Open { file, .. }) = &*self.file {
            // Closing is the only other way to unlock, and the kernel does that when we end.
            let _ = rustix::fs::flock(file, FlockOperation::Unlock);
        }
    }
}

impl Stripes {
    pub fn new() -> Self {
        Self { files: [const { Mutex::new(None) }; STRIPES] }
    }

    /// Takes the lock for `key`, or returns `None` if that takes longer than [`BRIEF`].
    pub fn lock_briefly(&self, root: &OwnedFd, key: &str, env: &Env) -> Result<Option<Stripe<'_>>> {
        self.lock_within(root, key, env, BRIEF)
    }

    /// Takes the lock for `key`, waiting as long as is reasonable.
    pub fn lock(&self, root: &OwnedFd, key: &str, env: &Env) -> Result<Stripe<'_>> {
        if let Some(stripe) = self.lock_within(root, key, env, PATIENCE)? {
            return Ok(stripe);
        }
        let (index, _) = place_of(key);
        let (name, path) = (name_of(index), path_of(index));
        let holder = rustix::fs::statat(root, path.as_str(), rustix::fs::AtFlags::empty())
            .ok()
            .and_then(|stat| flock_holder(stat.st_ino))
            .map_or_else(|| "another process".to_owned(), |pid| format!("process {pid}"));
        Err(Error::unavailable(format!(
            "{holder} has held the store's stripe lock {name} for {} s; is it stopped?",
            PATIENCE.as_secs()
        )))
    }

    /// The highest token that was retired at `key`, and at those that share its slot, by any process.
    pub fn retired(&self, root: &OwnedFd, key: &str) -> Result<u64> {
        let (index, slot) = place_of(key);
        if let Ok(file) = self.files[index].try_lock()
            && let Some(open) = &*file
        {
            return read_token(&open.file, slot).map_err(|error| failed(index, error));
        }
        let opened = open_to_read(root, index);
        let token = opened.and_then(|file| file.map_or(Ok(0), |file| read_token(&file, slot)));
        token.map_err(|error| failed(index, error))
    }

    fn lock_within(
        &self,
        root: &OwnedFd,
        key: &str,
        env: &Env,
        patience: Duration,
    ) -> Result<Option<Stripe<'_>>> {
        let (index, slot) = place_of(key);
        let deadline = env.clock().boot().plus(patience);
        let mut pause = Duration::from_micros(10);
        loop {
            if let Some(file) = self.try_lock(root, index)? {
                return Ok(Some(Stripe { file, slot }));
            }
            if env.clock().boot() >= deadline {
                return Ok(None);
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(1));
        }
    }

    fn try_lock(
        &self,
        root: &OwnedFd,
        index: usize,
    ) -> Result<Option<MutexGuard<'_, Option<Open>>>> {
        // Threads of this process share the open file, which flock does not tell apart: the mutex
        // does. Nobody waits while holding it.
        let mut file = match self.files[index].try_lock() {
            Ok(file) => file,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(None),
        };
        if file.as_ref().is_some_and(|open| open.process != std::process::id()) {
            *file = None;
        }
        loop {
            let open = match &*file {
                Some(open) => open,
                None => file.insert(open_stripe(root, index)?),
            };
            match rustix::fs::flock(&open.file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {
                    // Somebody removed or moved the file, and others lock a new one: so must we.
                    match identity_by_name(root, &path_of(index)) {
                        Ok(there) if there == open.identity => return Ok(Some(file)),
                        Ok(_) | Err(Errno::NOENT) => *file = None,
                        Err(error) => return Err(failed(index, error)),
                    }
                }
                Err(Errno::WOULDBLOCK) => return Ok(None),
                Err(Errno::INTR) => {}
                Err(error) => return Err(failed(index, error)),
            }
        }
    }
}

fn open_stripe(root: &OwnedFd, index: usize) -> Result<Open> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let open = || -> Result<Open, Errno> {
        let file = open_unnoted(flags, |flags| {
            rustix::fs::openat(root, path_of(index), flags, Mode::from_raw_mode(0o666))
        })?;
        let identity = identity(&file)?;
        Ok(Open { file, identity, process: std::process::id() })
    };
    open().map_err(|error| failed(index, error))
}

fn failed(index: usize, error: Errno) -> Error {
    super::io_error(&format!("take the store's stripe lock {}", name_of(index)), error)
}

/// The stripe of a key, and its slot there. A task and its lease have the same, so that both can go at once.
fn place_of(key: &str) -> (usize, usize) {
    let name = unit_folder(key).unwrap_or(key);
    let hash = xxhash_rust::xxh3::xxh3_64(name.as_bytes());
    let (stripes, slots) = (STRIPES as u64, SLOTS as u64);
    ((hash % stripes) as usize, (hash / stripes % slots) as usize)
}

fn name_of(index: usize) -> String {
    format!("{index:02}")
}

/// From the root, so that moving the folder away is noticed too.
fn path_of(index: usize) -> String {
    format!("{}/locks/{index:02}", super::PRIVATE)
}

/// The process that holds a flock on this inode, as Linux shows it.
fn flock_holder(inode: u64) -> Option<u32> {
    let locks = std::fs::read_to_string("/proc/locks").ok()?;
    locks.lines().find_map(|line| {
        // "1: FLOCK  ADVISORY  WRITE 1234 fe:00:131 0 EOF"
        let mut words = line.split_whitespace();
        let held = words.nth(1)? == "FLOCK";
        let pid = words.nth(2)?.parse().ok()?;
        let same = words.next()?.rsplit(':').next()?.parse() == Ok(inode);
        (held && same).then_some(pid)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two keys of one stripe, and not of one slot.
    fn keys() -> (String, String) {
        let (one, mut n) = ("key-0".to_owned(), 1);
        loop {
            let other = format!("key-{n}");
            let (a, b) = (place_of(&one), place_of(&other));
            if a.0 == b.0 && a.1 != b.1 {
                return (one, other);
            }
            n += 1;
        }
    }

    fn root() -> (tempfile::TempDir, OwnedFd) {
        let dir = tempfile::TempDir::new().unwrap();
        std::fs::create_dir_all(dir.path().join(".lh/locks")).unwrap();
        let root = std::fs::File::open(dir.path()).unwrap().into();
        (dir, root)
    }

    fn retire(root: &OwnedFd, key: &str, token: u64) {
        let stripes = Stripes::new();
        stripes.lock(root, key, &Env::system()).unwrap().retire(token).unwrap();
    }

    #[test]
    fn tokens_are_remembered_key_by_key() {
        let (_dir, root) = root();
        let (one, other) = keys();
        let retired = |key: &str| Stripes::new().retired(&root, key).unwrap();
        assert_eq!((retired(&one), retired(&other)), (0, 0));
        retire(&root, &one, 7);
        assert_eq!((retired(&one), retired(&other)), (7, 0));
        retire(&root, &other, 5);
        retire(&root, &one, 6);
        assert_eq!((retired(&one), retired(&other)), (7, 5));
        assert_eq!(read_retired(&root, place_of(&one).0).unwrap(), 7);
        // The same by whoever has the file open.
        let stripes = Stripes::new();
        drop(stripes.lock(&root, &one, &Env::system()).unwrap());
        assert_eq!(stripes.retired(&root, &one).unwrap(), 7);
    }

    /// As files of earlier versions are: one token for all keys of the stripe.
    #[test]
    fn a_short_file_speaks_for_all_its_keys() {
        let (dir, root) = root();
        let (one, other) = keys();
        let path = dir.path().join(path_of(place_of(&one).0));
        std::fs::write(&path, 9_u64.to_le_bytes()).unwrap();
        let retired = |key: &str| Stripes::new().retired(&root, key).unwrap();
        assert_eq!((retired(&one), retired(&other)), (9, 9));
        retire(&root, &one, 8);
        assert_eq!((retired(&one), retired(&other)), (9, 9));
        retire(&root, &one, 11);
        assert_eq!((retired(&one), retired(&other)), (11, 9));
        assert_eq!(read_retired(&root, place_of(&one).0).unwrap(), 11);
        // What a power loss left there is no token.
        std::fs::write(&path, [0xff; SLOTS * TOKEN]).unwrap();
        assert_eq!((retired(&one), read_retired(&root, place_of(&one).0).unwrap()), (0, 0));
        // A file that was filled in part: what is there counts.
        let there = place_of(&one).1.min(place_of(&other).1) + 1;
        std::fs::write(&path, 5_u64.to_le_bytes().repeat(there)).unwrap();
        let (early, late) = match place_of(&one).1 < place_of(&other).1 {
            true => (&one, &other),
            false => (&other, &one),
        };
        retire(&root, early, 20);
        retire(&root, late, 6);
        assert_eq!((retired(early), retired(late)), (20, 6));
        // The half of one is none.
        std::fs::write(&path, [1; 3]).unwrap();
        assert_eq!(retired(&one), 0);
        retire(&root, &one, 4);
        assert_eq!((retired(&one), retired(&other)), (4, 0));
    }
}
