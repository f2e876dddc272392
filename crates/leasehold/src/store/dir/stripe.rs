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
}

impl Stripe<'_> {
    /// Notes that a lease with this token is about to be deleted: see `fence`.
    pub fn retire(&self, token: u64) -> Result<(), Errno> {
        let Some(Open { file, .. }) = &*self.file else { return Err(Errno::BADF) };
        if token > read_token(file)? {
            rustix::io::pwrite(file, &token.to_le_bytes(), 0)?;
        }
        Ok(())
    }
}

/// The highest token that was retired in a stripe. Eight bytes are read and written at once.
fn read_token(file: &OwnedFd) -> Result<u64, Errno> {
    let mut bytes = [0; 8];
    match rustix::io::pread(file, &mut bytes, 0)? {
        // What a power loss left there instead would be above all that can be given out.
        8 => Ok(Some(u64::from_le_bytes(bytes)).filter(|token| *token <= MAX_TOKEN).unwrap_or(0)),
        _ => Ok(0),
    }
}

/// The same, by the stripe's number.
pub fn read_retired(root: &OwnedFd, index: usize) -> Result<u64, Errno> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    match rustix::fs::openat(root, path_of(index), flags, Mode::empty()) {
        Ok(file) => read_token(&file),
        Err(Errno::NOENT) => Ok(0),
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
        let name = name_of(index_of(key));
        let path = path_of(index_of(key));
        let holder = rustix::fs::statat(root, path.as_str(), rustix::fs::AtFlags::empty())
            .ok()
            .and_then(|stat| flock_holder(stat.st_ino))
            .map_or_else(|| "another process".to_owned(), |pid| format!("process {pid}"));
        Err(Error::unavailable(format!(
            "{holder} has held the store's stripe lock {name} for {} s; is it stopped?",
            PATIENCE.as_secs()
        )))
    }

    /// The highest token that was retired in the stripe of `key`, by any process.
    pub fn retired(&self, root: &OwnedFd, key: &str) -> Result<u64> {
        let index = index_of(key);
        if let Ok(file) = self.files[index].try_lock()
            && let Some(open) = &*file
        {
            return read_token(&open.file).map_err(|error| failed(index, error));
        }
        read_retired(root, index).map_err(|error| failed(index, error))
    }

    fn lock_within(
        &self,
        root: &OwnedFd,
        key: &str,
        env: &Env,
        patience: Duration,
    ) -> Result<Option<Stripe<'_>>> {
        let index = index_of(key);
        let deadline = env.clock().boot().plus(patience);
        let mut pause = Duration::from_micros(10);
        loop {
            if let Some(stripe) = self.try_lock(root, index)? {
                return Ok(Some(stripe));
            }
            if env.clock().boot() >= deadline {
                return Ok(None);
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(1));
        }
    }

    fn try_lock(&self, root: &OwnedFd, index: usize) -> Result<Option<Stripe<'_>>> {
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
                        Ok(there) if there == open.identity => return Ok(Some(Stripe { file })),
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

/// A task and its lease have the same, so that both can go at once.
fn index_of(key: &str) -> usize {
    let name = unit_folder(key).unwrap_or(key);
    (xxhash_rust::xxh3::xxh3_64(name.as_bytes()) % STRIPES as u64) as usize
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
