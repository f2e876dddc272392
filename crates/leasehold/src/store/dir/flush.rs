//! Group commit: many concurrent durable writes share one flush.
//!
//! A lone durable write asks twice: for its data before the object becomes visible, so that a power
//! loss never shows a half-written one, and for its folders afterwards. Where there are more, they
//! become visible at once and are noted in the [journal](super::journal). A thread collects what
//! has been asked for since its last round and flushes it together: all notes at once, files and
//! folders one by one if they are few, else with a single `syncfs`. It knows how many writers are
//! under way and gives the others a moment to catch up.
//!
//! After a failed flush the kernel may have dropped the data and report success the next time. So
//! that is final: nothing is reported durable by this process any more. A folder that could not
//! even be opened is another matter, and concerns only who asked for it.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, mpsc};
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use tokio::sync::oneshot;

use super::journal::{self, Journal, Record};
use crate::env::{BootTime, Env};
use crate::{Error, Result, host};

/// The largest body that is noted: a larger one would be written twice for little.
const NOTED: usize = 1 << 20;

/// What to flush.
#[derive(Debug)]
pub enum Target {
    /// The content of this file.
    File(Arc<OwnedFd>),
    /// That the object at this path is there, or gone: every folder above it.
    FoldersAbove(String),
}

struct Request {
    targets: Vec<Target>,
    /// What to note in the journal.
    record: Option<Record>,
    /// Who waits for it, if anybody does.
    done: Option<oneshot::Sender<Result<(), Failure>>>,
}

/// Why something is not known to be on disk.
#[derive(Debug, Clone, Copy)]
enum Failure {
    /// It could not be opened, so nothing was tried.
    Open(Errno),
    /// Flushing failed, now or before.
    Flush(Errno),
}

/// The flushing thread, started by the first durable write and ended with the store.
#[derive(Debug)]
pub struct Flusher {
    thread: Mutex<Option<Thread>>,
    root: Arc<OwnedFd>,
    env: Env,
    writers: Arc<AtomicUsize>,
    /// Whether a journal can be kept here at all.
    journals: OnceLock<bool>,
    /// Whether this process keeps one.
    noting: AtomicBool,
}

#[derive(Debug)]
struct Thread {
    requests: mpsc::Sender<Request>,
    handle: std::thread::JoinHandle<()>,
}

/// A write that is under way and will ask for flushes.
pub struct Writer(Arc<AtomicUsize>);

impl Drop for Writer {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

/// How long a round waits for writers that are under way: about what a flush takes.
const CATCH_UP: Duration = Duration::from_micros(300);

impl Flusher {
    pub fn new(root: Arc<OwnedFd>, env: Env) -> Self {
        Self {
            thread: Mutex::default(),
            root,
            env,
            writers: Arc::default(),
            journals: OnceLock::new(),
            noting: AtomicBool::new(false),
        }
    }

    /// Whether a durable write of this size is to be noted rather than flushed: where others are
    /// under way, and wherever a journal is kept, so that it does not miss anything.
    pub fn notes(&self, private: &OwnedFd, size: usize) -> bool {
        size <= NOTED
            && self.can_note()
            && (self.noting.load(Relaxed)
                || self.writers.load(Relaxed) > 2
                || journal::is_kept(private))
    }

    /// Whether a change that nobody waits for is to be noted: only where a journal is kept.
    pub fn notes_changes(&self, private: &OwnedFd) -> bool {
        self.can_note() && (self.noting.load(Relaxed) || journal::is_kept(private))
    }

    /// Not where clocks and boots cannot be told, as the order of notes hangs on them.
    fn can_note(&self) -> bool {
        *self.journals.get_or_init(|| {
            flushes_together(&self.root) && host::here(self.env.clock().boot()).is_some()
        })
    }

    /// The order of changes. To be taken under the stripe lock of the key.
    pub fn stamp(&self) -> u64 {
        let since = self.env.clock().boot().since(BootTime::from_boot(Duration::ZERO));
        u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
    }

    /// Returns once the change is noted, and on disk with that.
    pub async fn note(&self, record: Record) -> Result<()> {
        self.noting.store(true, Relaxed);
        self.request(Vec::new(), Some(record)).await
    }

    /// Notes a change that nobody waits for.
    pub fn note_later(&self, record: Record) {
        self.noting.store(true, Relaxed);
        let request = Request { targets: Vec::new(), record: Some(record), done: None };
        // If there is no thread, it is as if the change had been lost with the power.
        let _ = self.sender().map(|sender| sender.send(request));
    }

    /// Announces a write that will ask for flushes.
    pub fn writer(&self) -> Writer {
        self.writers.fetch_add(1, Relaxed);
        Writer(self.writers.clone())
    }

    /// Returns once all of these are on disk.
    pub async fn flush(&self, targets: Vec<Target>) -> Result<()> {
        self.request(targets, None).await
    }

    async fn request(&self, targets: Vec<Target>, record: Option<Record>) -> Result<()> {
        let (done, answer) = oneshot::channel();
        let sender = self.sender()?;
        let ended = || Error::unavailable("the flushing thread has ended");
        sender.send(Request { targets, record, done: Some(done) }).map_err(|_| ended())?;
        match answer.await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(Failure::Flush(error))) => Err(Error::unavailable(format!(
                "flushing to disk failed: {error}; check the disk, then start this process anew"
            ))
            .caused_by(error)),
            Ok(Err(Failure::Open(error))) => {
                Err(Error::unavailable(format!("cannot flush to disk: {error}")).caused_by(error))
            }
            Err(_) => Err(ended()),
        }
    }

    fn sender(&self) -> Result<mpsc::Sender<Request>> {
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(thread) = &*thread {
            return Ok(thread.requests.clone());
        }
        let (requests, receiver) = mpsc::channel();
        let (root, writers) = (self.root.clone(), self.writers.clone());
        let journal = Journal::new(root.clone(), self.env.clone());
        let handle = std::thread::Builder::new()
            .name("leasehold-flush".into())
            .spawn(move || Rounds { root, writers, journal, failed: None }.run(&receiver))
            .map_err(|error| {
                Error::unavailable("cannot start the flushing thread").caused_by(error)
            })?;
        Ok(thread.insert(Thread { requests, handle }).requests.clone())
    }
}

impl Drop for Flusher {
    /// Waits until the journal is put away, so that the next process finds none.
    fn drop(&mut self) {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(Thread { requests, handle }) = thread {
            drop(requests);
            let _ = handle.join();
        }
    }
}

/// The flushing thread.
struct Rounds {
    root: Arc<OwnedFd>,
    writers: Arc<AtomicUsize>,
    journal: Journal,
    failed: Option<Errno>,
}

impl Rounds {
    fn run(mut self, requests: &mpsc::Receiver<Request>) {
        let together = flushes_together(&self.root);
        loop {
            let first = match self.journal.due() {
                None => requests.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(due) => requests.recv_timeout(due),
            };
            let first = match first {
                Ok(first) => first,
                Err(RecvTimeoutError::Timeout) => {
                    self.journal.forget_later();
                    continue;
                }
                Err(RecvTimeoutError::Disconnected) => break,
            };
            let mut round = vec![first];
            round.extend(requests.try_iter());
            while together && round.len() < self.writers.load(Relaxed) {
                match requests.recv_timeout(CATCH_UP) {
                    Ok(request) => round.push(request),
                    Err(_) => break,
                }
            }
            self.round(round, together);
        }
        if self.failed.is_none() {
            self.journal.close();
        }
    }

    fn round(&mut self, mut round: Vec<Request>, together: bool) {
        self.failed = self.failed.or(self.journal.failure());
        if self.journal.due() == Some(Duration::ZERO) {
            self.journal.forget_later();
        }
        let awaited =
            round.iter().any(|request| request.record.is_some() && request.done.is_some());
        let records: Vec<_> =
            round.iter_mut().filter_map(|request| request.record.take()).collect();
        let mut targets: usize = round.iter().map(|request| request.targets.len()).sum();
        if !records.is_empty()
            && self.failed.is_none()
            && let Err(error) = self.journal.note(&records, awaited)
        {
            match error {
                // No room for notes: then everything is flushed in its place.
                Errno::NOSPC | Errno::DQUOT => targets = usize::MAX,
                error => self.failed = Some(error),
            }
        }
        let whole = (together && targets > 2 && self.failed.is_none())
            .then(|| flush_everything(&self.root));
        if let Some(Err(error)) = whole {
            self.failed = Some(error);
        }
        for request in round {
            let outcome = match (self.failed, whole) {
                (Some(error), _) => Err(Failure::Flush(error)),
                (None, Some(_)) => Ok(()),
                (None, None) => flush_each(&self.root, &request.targets),
            };
            if let Err(Failure::Flush(error)) = outcome {
                self.failed = Some(error);
            }
            // Nobody waits any more when the caller was cancelled.
            let _ = request.done.map(|done| done.send(outcome));
        }
    }
}

/// Whether `syncfs` really flushes this file system. On a FUSE mount it tells the server nothing.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn flushes_together(root: &OwnedFd) -> bool {
    const KNOWN: [u64; 9] = [
        0xef53,      // ext2, ext3, ext4
        0x5846_5342, // xfs
        0x9123_683e, // btrfs
        0xf2f5_2010, // f2fs
        0x2fc1_2fc1, // zfs
        0xca45_1a4e, // bcachefs
        0x794c_7630, // overlayfs
        0x0102_1994, // tmpfs
        0x4d44,      // vfat
    ];
    rustix::fs::fstatfs(root).is_ok_and(|fs| KNOWN.contains(&(fs.f_type as u64 & 0xffff_ffff)))
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn flushes_together(_: &OwnedFd) -> bool {
    false
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn flush_everything(root: &OwnedFd) -> Result<(), Errno> {
    rustix::fs::syncfs(root)
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn flush_everything(_: &OwnedFd) -> Result<(), Errno> {
    Err(Errno::NOSYS)
}

fn flush_each(root: &OwnedFd, targets: &[Target]) -> Result<(), Failure> {
    for target in targets {
        match target {
            Target::File(file) => flush_one(file).map_err(Failure::Flush)?,
            Target::FoldersAbove(path) => flush_folders(root, path)?,
        }
    }
    Ok(())
}

/// All of them: another process may have made the upper ones without flushing them.
fn flush_folders(root: &OwnedFd, path: &str) -> Result<(), Failure> {
    let mut folder = path;
    while let Some((above, _)) = folder.rsplit_once('/') {
        folder = above;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        match rustix::fs::openat(root, folder, flags, Mode::empty()) {
            Ok(open) => flush_one(&open).map_err(Failure::Flush)?,
            // Removed since, and with it what was to be flushed.
            Err(Errno::NOENT | Errno::NOTDIR) => {}
            Err(error) => return Err(Failure::Open(error)),
        }
    }
    flush_one(root).map_err(Failure::Flush)
}

fn flush_one(file: &OwnedFd) -> Result<(), Errno> {
    // macOS' fsync leaves data in the drive's cache.
    #[cfg(target_vendor = "apple")]
    match rustix::fs::fcntl_fullfsync(file) {
        // Not every file system has it.
        Err(Errno::NOTSUP | Errno::INVAL) => return rustix::fs::fsync(file),
        flushed => return flushed,
    }
    #[cfg(not(target_vendor = "apple"))]
    rustix::fs::fsync(file)
}
