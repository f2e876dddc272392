//! Group commit: many concurrent durable writes share one flush.
//!
//! A durable write asks twice: for its data before the object becomes visible, so that a power
//! loss never shows a half-written one, and for its folders afterwards. A thread collects what has
//! been asked for since its last round and flushes it together: one or two requests one by one,
//! more with a single `syncfs`, which costs about as much as one `fsync`. It knows how many writers
//! are under way and gives the others a moment to catch up.
//!
//! After a failed flush the kernel may have dropped the data and report success the next time. So
//! that is final: nothing is reported durable by this process any more. A folder that could not
//! even be opened is another matter, and concerns only who asked for it.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use tokio::sync::oneshot;

use crate::{Error, Result};

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
    done: oneshot::Sender<Result<(), Failure>>,
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
    requests: Mutex<Option<mpsc::Sender<Request>>>,
    root: Arc<OwnedFd>,
    writers: Arc<AtomicUsize>,
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
    pub fn new(root: Arc<OwnedFd>) -> Self {
        Self { requests: Mutex::new(None), root, writers: Arc::default() }
    }

    /// Announces a write that will ask for flushes.
    pub fn writer(&self) -> Writer {
        self.writers.fetch_add(1, Relaxed);
        Writer(self.writers.clone())
    }

    /// Returns once all of these are on disk.
    pub async fn flush(&self, targets: Vec<Target>) -> Result<()> {
        let (done, answer) = oneshot::channel();
        let sender = self.sender()?;
        let ended = || Error::unavailable("the flushing thread has ended");
        sender.send(Request { targets, done }).map_err(|_| ended())?;
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
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(sender) = &*requests {
            return Ok(sender.clone());
        }
        let (sender, receiver) = mpsc::channel();
        let (root, writers) = (self.root.clone(), self.writers.clone());
        std::thread::Builder::new()
            .name("leasehold-flush".into())
            .spawn(move || run(&root, &receiver, &writers))
            .map_err(|error| {
                Error::unavailable("cannot start the flushing thread").caused_by(error)
            })?;
        Ok(requests.insert(sender).clone())
    }
}

fn run(root: &OwnedFd, requests: &mpsc::Receiver<Request>, writers: &AtomicUsize) {
    let together = flushes_together(root);
    let mut failed = None;
    while let Ok(first) = requests.recv() {
        let mut round = vec![first];
        round.extend(requests.try_iter());
        while together && round.len() < writers.load(Relaxed) {
            match requests.recv_timeout(CATCH_UP) {
                Ok(request) => round.push(request),
                Err(_) => break,
            }
        }
        let targets: usize = round.iter().map(|request| request.targets.len()).sum();
        let whole = (together && targets > 2 && failed.is_none()).then(|| flush_everything(root));
        if let Some(Err(error)) = whole {
            failed = Some(error);
        }
        for request in round {
            let outcome = match (failed, whole) {
                (Some(error), _) => Err(Failure::Flush(error)),
                (None, Some(_)) => Ok(()),
                (None, None) => flush_each(root, &request.targets),
            };
            if let Err(Failure::Flush(error)) = outcome {
                failed = Some(error);
            }
            // Nobody waits any more when the caller was cancelled.
            let _ = request.done.send(outcome);
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
