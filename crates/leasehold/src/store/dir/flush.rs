//! Group commit: many concurrent durable writes share one flush.
//!
//! A durable write asks twice: for its data before the object becomes visible, so that a power
//! loss never shows a half-written one, and for its folders afterwards. A thread collects what has
//! been asked for since its last round and flushes it together: one or two requests one by one,
//! more with a single `syncfs`, which costs about as much as one `fsync`.
//!
//! After a failed flush the kernel may have dropped the data and report success the next time. So
//! a failure is final: nothing is reported durable by this process any more.

use std::os::fd::OwnedFd;
use std::sync::mpsc;
use std::sync::{Arc, Mutex, PoisonError};

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
    done: oneshot::Sender<Result<(), Errno>>,
}

/// The flushing thread, started by the first durable write and ended with the store.
#[derive(Debug)]
pub struct Flusher {
    requests: Mutex<Option<mpsc::Sender<Request>>>,
    root: Arc<OwnedFd>,
}

impl Flusher {
    pub fn new(root: Arc<OwnedFd>) -> Self {
        Self { requests: Mutex::new(None), root }
    }

    /// Returns once all of these are on disk.
    pub async fn flush(&self, targets: Vec<Target>) -> Result<()> {
        let (done, answer) = oneshot::channel();
        let sender = self.sender()?;
        let ended = || Error::unavailable("the flushing thread has ended");
        sender.send(Request { targets, done }).map_err(|_| ended())?;
        match answer.await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(Error::unavailable(format!(
                "flushing to disk failed: {error}; check the disk, then start this process anew"
            ))
            .caused_by(error)),
            Err(_) => Err(ended()),
        }
    }

    fn sender(&self) -> Result<mpsc::Sender<Request>> {
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(sender) = &*requests {
            return Ok(sender.clone());
        }
        let (sender, receiver) = mpsc::channel();
        let root = self.root.clone();
        std::thread::Builder::new()
            .name("leasehold-flush".into())
            .spawn(move || run(&root, &receiver))
            .map_err(|error| {
                Error::unavailable("cannot start the flushing thread").caused_by(error)
            })?;
        Ok(requests.insert(sender).clone())
    }
}

fn run(root: &OwnedFd, requests: &mpsc::Receiver<Request>) {
    let mut failed = None;
    while let Ok(first) = requests.recv() {
        let mut round = vec![first];
        round.extend(requests.try_iter());
        let outcome = match failed {
            Some(error) => Err(error),
            None => flush_all(root, &round),
        };
        failed = outcome.err();
        for request in round {
            // Nobody waits any more when the caller was cancelled.
            let _ = request.done.send(outcome);
        }
    }
}

fn flush_all(root: &OwnedFd, round: &[Request]) -> Result<(), Errno> {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    if round.len() > 2 {
        return rustix::fs::syncfs(root);
    }
    for target in round.iter().flat_map(|request| &request.targets) {
        match target {
            Target::File(file) => flush_one(file)?,
            Target::FoldersAbove(path) => flush_folders(root, path)?,
        }
    }
    Ok(())
}

/// All of them: another process may have made the upper ones without flushing them.
fn flush_folders(root: &OwnedFd, path: &str) -> Result<(), Errno> {
    let mut folder = path;
    while let Some((above, _)) = folder.rsplit_once('/') {
        folder = above;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        match rustix::fs::openat(root, folder, flags, Mode::empty()) {
            Ok(open) => flush_one(&open)?,
            // Removed since, and with it what was to be flushed.
            Err(Errno::NOENT) => {}
            Err(error) => return Err(error),
        }
    }
    flush_one(root)
}

fn flush_one(file: &OwnedFd) -> Result<(), Errno> {
    // macOS' fsync leaves data in the drive's cache.
    #[cfg(target_vendor = "apple")]
    return rustix::fs::fcntl_fullfsync(file);
    #[cfg(not(target_vendor = "apple"))]
    rustix::fs::fsync(file)
}
