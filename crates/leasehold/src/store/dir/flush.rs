//! Group commit: many concurrent durable writes share one flush.
//!
//! A lone durable write asks twice: for its data before the object becomes visible, so that a power
//! loss never shows a half-written one, and for its folders afterwards. Where there are more, they
//! ask twice for a note in the [journal]. A thread collects what has been asked for
//! since its last round and flushes it together: all notes at once, files and folders one by one if
//! they are few, else with a single `syncfs`. It knows how many writers are under way and gives the
//! others a moment to catch up.
//!
//! After a failed flush the kernel may have dropped the data and report success the next time. So
//! that is final: nothing is reported durable by this process any more. What could not even be
//! opened is another matter, and concerns only who asked for it; where it is the journal that
//! cannot be written, the whole file system is flushed instead.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, mpsc};
use std::time::Duration;

use bytes::Bytes;
use leasehold_protocol::key::Key;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use tokio::sync::oneshot;

use super::files::{FileId, id_of};
use super::journal::{self, Entry, Intent, Journal, NotNoted, NotRaised, Note, Pending};
use super::temp::Temp;
use crate::env::Env;
use crate::{Error, Result, host};

/// The largest body that is noted: a larger one would be written twice for little. Of shards of 300 KiB that
/// cost a fifth of the time that a compiler's processors were busy.
const NOTED: usize = 64 << 10;

/// What to flush.
#[derive(Debug)]
pub enum Target {
    /// The content of this file.
    File(Arc<OwnedFd>),
    /// That the object at this path is there, or gone: every folder above it.
    FoldersAbove(String),
}

enum Request {
    Do(Job),
    /// Put the journal away and end.
    End,
}

#[derive(Default)]
struct Job {
    targets: Vec<Target>,
    /// What to note in the journal.
    entries: Vec<Entry>,
    /// A file that must not go before that is on disk.
    temp: Option<Temp>,
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
    /// The number of the next intent.
    number: AtomicU64,
    ended: AtomicBool,
}

#[derive(Debug)]
struct Thread {
    requests: mpsc::Sender<Request>,
    handle: std::thread::JoinHandle<()>,
    /// A fork has its parent's memory, but not its threads.
    process: u32,
}

/// A write that is under way and will ask for flushes.
pub struct Writer(Arc<AtomicUsize>);

impl Drop for Writer {
    fn drop(&mut self) {
        // A fork begins at zero, whatever was under way in its parent.
        let _ = self.0.fetch_update(Relaxed, Relaxed, |writers| writers.checked_sub(1));
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
            number: AtomicU64::new(0),
            ended: AtomicBool::new(false),
        }
    }

    /// Whether a durable write of this size is to be noted rather than flushed: where others are
    /// under way, and wherever a journal is kept, as it must be noted in any case.
    pub fn notes(&self, private: &OwnedFd, size: usize) -> bool {
        size <= NOTED && self.can_note() && (self.writers.load(Relaxed) > 2 || self.keeps(private))
    }

    /// Whether changes beside the journal must be noted: where anybody keeps one. To be asked
    /// after the change was made, so that a journal that begins later has only later notes.
    pub fn must_note(&self, private: &OwnedFd) -> bool {
        self.can_note() && self.keeps(private)
    }

    fn keeps(&self, private: &OwnedFd) -> bool {
        self.noting.load(Relaxed) || journal::is_kept(private)
    }

    /// Not where clocks and boots cannot be told, as the order of notes hangs on them, nor where
    /// one file cannot be told from the next.
    fn can_note(&self) -> bool {
        *self.journals.get_or_init(|| {
            flushes_together(&self.root)
                && keeps_numbers(&self.root)
                && id_of(&self.root).is_some()
                && host::here(self.env.clock().boot()).is_some()
        })
    }

    /// The order of changes. To be taken under the stripe lock of the key.
    pub fn stamp(&self) -> u64 {
        journal::stamp(&self.env)
    }

    /// Returns once it is on disk that this file is to become the object at `key`.
    pub async fn intend(
        self: &Arc<Self>,
        key: &Key,
        body: Bytes,
        (temp, file): (Temp, FileId),
    ) -> Result<Intended> {
        let number = self.number.fetch_add(1, Relaxed);
        let (stamp, key) = (self.stamp(), key.to_string());
        let pending = Pending::new(Intent { number, stamp, file, key, body });
        let intended =
            Intended { flusher: self.clone(), temp: Some(temp), pending: Some(pending.clone()) };
        self.noting.store(true, Relaxed);
        self.ask(Vec::new(), vec![Entry::Intent(pending)])?.wait().await?;
        Ok(intended)
    }

    /// Returns once these are noted, and on disk with that.
    pub async fn note(&self, notes: Vec<Note>) -> Result<()> {
        self.noting.store(true, Relaxed);
        self.ask(Vec::new(), notes.into_iter().map(Entry::Note).collect())?.wait().await
    }

    /// Notes a change that nobody waits for.
    pub fn note_later(&self, note: Note) {
        self.noting.store(true, Relaxed);
        let job = Job { entries: vec![Entry::Note(note)], ..Job::default() };
        // If there is no thread, it is as if the change had been lost with the power.
        let _ = self.sender().map(|sender| sender.send(Request::Do(job)));
    }

    /// Announces a write that will ask for flushes.
    pub fn writer(&self) -> Writer {
        self.writers.fetch_add(1, Relaxed);
        Writer(self.writers.clone())
    }

    /// Returns once all of these are on disk.
    pub async fn flush(&self, targets: Vec<Target>) -> Result<()> {
        self.ask(targets, Vec::new())?.wait().await
    }

    fn ask(&self, targets: Vec<Target>, entries: Vec<Entry>) -> Result<Answer> {
        let (done, answer) = oneshot::channel();
        let job = Job { targets, entries, temp: None, done: Some(done) };
        self.sender()?.send(Request::Do(job)).map_err(|_| ended())?;
        Ok(Answer(answer))
    }

    fn sender(&self) -> Result<mpsc::Sender<Request>> {
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if self.ended.load(Relaxed) {
            return Err(ended());
        }
        if let Some(thread) = &*thread
            && thread.process == std::process::id()
        {
            return Ok(thread.requests.clone());
        }
        if let Some(parents) = thread.take() {
            std::mem::forget(parents);
            self.writers.store(0, Relaxed);
        }
        let (requests, receiver) = mpsc::channel();
        let (root, writers) = (self.root.clone(), self.writers.clone());
        let journal = Journal::new(root.clone(), self.env.clone());
        let handle = std::thread::Builder::new()
            .name("leasehold-flush".into())
            .spawn(move || {
                let anchored = Anchored::default();
                Rounds { root, writers, journal, anchored, failed: None }.run(&receiver);
            })
            .map_err(|error| {
                Error::unavailable("cannot start the flushing thread").caused_by(error)
            })?;
        let process = std::process::id();
        Ok(thread.insert(Thread { requests, handle, process }).requests.clone())
    }

    /// Waits until the journal is put away, so that the next process finds none.
    pub fn end(&self) {
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        self.ended.store(true, Relaxed);
        let thread = thread.take();
        match thread {
            Some(thread) if thread.process == std::process::id() => {
                let _ = thread.requests.send(Request::End);
                let _ = thread.handle.join();
            }
            Some(parents) => std::mem::forget(parents),
            None => {}
        }
    }
}

/// The answer of the flushing thread, to come.
pub struct Answer(oneshot::Receiver<Result<(), Failure>>);

impl Answer {
    /// Returns once it is on disk.
    pub async fn wait(self) -> Result<()> {
        match self.0.await {
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
}

fn ended() -> Error {
    Error::unavailable("the flushing thread has ended")
}

/// A file that is on its way to become an object, and noted as such.
pub struct Intended {
    flusher: Arc<Flusher>,
    temp: Option<Temp>,
    pending: Option<Arc<Pending>>,
}

impl Intended {
    /// The file.
    pub fn temp(&mut self) -> Option<&mut Temp> {
        self.temp.as_mut()
    }

    /// It has become the object at this time. The note is on its way when this returns, whether
    /// or not anybody waits for it.
    pub fn commit(mut self, stamp: u64) -> Result<Answer> {
        let entries = self.pending.take().map(|pending| Entry::Commit(pending, stamp));
        self.flusher.ask(Vec::new(), entries.into_iter().collect())
    }
}

impl Drop for Intended {
    /// If nothing became of it, that is noted before the file goes: another file of the same
    /// object could get its inode number, and be taken for it.
    fn drop(&mut self) {
        let (Some(pending), Some(temp)) = (self.pending.take(), self.temp.take()) else { return };
        let entries = vec![Entry::Void(pending)];
        let job = Job { entries, temp: Some(temp), ..Job::default() };
        let sent = match self.flusher.sender() {
            Ok(sender) => sender.send(Request::Do(job)).map_err(|unsent| unsent.0),
            Err(_) => Err(Request::Do(job)),
        };
        if let Err(Request::Do(Job { temp: Some(temp), .. })) = sent {
            temp.leave();
        }
    }
}

/// The flushing thread.
struct Rounds {
    root: Arc<OwnedFd>,
    writers: Arc<AtomicUsize>,
    journal: Journal,
    anchored: Anchored,
    failed: Option<Errno>,
}

impl Rounds {
    fn run(mut self, requests: &mpsc::Receiver<Request>) {
        let together = flushes_together(&self.root);
        let mut ended = false;
        while !ended {
            let first = match self.journal.due() {
                None => requests.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(due) => requests.recv_timeout(due),
            };
            let mut round = Vec::new();
            match first {
                Ok(Request::Do(first)) => round.push(first),
                Err(RecvTimeoutError::Timeout) => {
                    self.journal.forget_later(false);
                    continue;
                }
                Ok(Request::End) | Err(RecvTimeoutError::Disconnected) => break,
            }
            while !ended {
                let wait = together && round.len() < self.writers.load(Relaxed);
                let next = match requests.try_recv() {
                    Err(_) if wait => requests.recv_timeout(CATCH_UP).ok(),
                    next => next.ok(),
                };
                match next {
                    Some(Request::Do(job)) => round.push(job),
                    Some(Request::End) => ended = true,
                    None => break,
                }
            }
            self.round(round, together);
        }
        self.journal.close();
    }

    fn round(&mut self, mut round: Vec<Job>, together: bool) {
        if let (None, Some(error)) = (self.failed, self.journal.failure()) {
            self.fail(error);
        }
        if self.journal.due() == Some(Duration::ZERO) {
            self.journal.forget_later(false);
        }
        let awaited = round
            .iter()
            .any(|job| !job.entries.is_empty() && (job.done.is_some() || job.temp.is_some()));
        let targets: usize = round.iter().map(|job| job.targets.len()).sum();
        let entries: Vec<_> =
            round.iter_mut().flat_map(|job| std::mem::take(&mut job.entries)).collect();
        let mut noted = Ok(());
        if !entries.is_empty() && self.failed.is_none() {
            noted = self.journal.note(&entries, awaited);
        }
        let whole = match noted {
            Ok(()) if together && targets > 2 && self.failed.is_none() => {
                Some(flush_everything(&self.root).map_err(Failure::Flush))
            }
            Ok(()) => None,
            // Nobody waits: it is as if the notes had been lost with the power.
            Err(NotNoted::Unwritten) if !awaited && targets == 0 => None,
            Err(NotNoted::Unwritten) => {
                Some(self.journal.flush_everything().map_err(|error| match error {
                    NotRaised::Open(error) => Failure::Open(error),
                    NotRaised::Failed(error) => Failure::Flush(error),
                }))
            }
            Err(NotNoted::Failed(error)) => Some(Err(Failure::Flush(error))),
        };
        if let Some(Err(Failure::Flush(error))) = whole {
            self.fail(error);
        }
        for job in round {
            let outcome = match (self.failed, whole) {
                (Some(error), _) => Err(Failure::Flush(error)),
                (None, Some(whole)) => whole,
                (None, None) => flush_each(&self.root, &job.targets, &mut self.anchored),
            };
            if let Err(Failure::Flush(error)) = outcome
                && self.failed.is_none()
            {
                self.fail(error);
            }
            if let (Err(_), Some(temp)) = (outcome, job.temp) {
                temp.leave();
            }
            // Nobody waits any more when the caller was cancelled.
            let _ = job.done.map(|done| done.send(outcome));
        }
    }

    fn fail(&mut self, error: Errno) {
        self.failed = Some(error);
        self.journal.fail(error);
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

/// Whether a file has the same inode number after a reboot. FAT makes them up.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn keeps_numbers(root: &OwnedFd) -> bool {
    rustix::fs::fstatfs(root).is_ok_and(|fs| fs.f_type as u64 != 0x4d44)
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn keeps_numbers(_: &OwnedFd) -> bool {
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

fn flush_each(root: &OwnedFd, targets: &[Target], anchored: &mut Anchored) -> Result<(), Failure> {
    for target in targets {
        match target {
            Target::File(file) => flush_one(file).map_err(Failure::Flush)?,
            Target::FoldersAbove(path) => anchored.flush_above(root, path, flush_one)?,
        }
    }
    Ok(())
}

/// Folders that are known to be on disk, with all above them. A folder that was removed does not come back:
/// one that is made in its place is another.
#[derive(Debug, Default)]
struct Anchored(HashMap<String, FileId>);

/// How many are remembered.
const ANCHORED: usize = 256;

impl Anchored {
    /// Flushes the folders above `path`, up to the first that is on disk already. All of them where that is not
    /// known: another process may have made the upper ones without flushing them.
    fn flush_above(
        &mut self,
        root: &OwnedFd,
        path: &str,
        mut flush: impl FnMut(&OwnedFd) -> Result<(), Errno>,
    ) -> Result<(), Failure> {
        let mut flushed = Vec::new();
        let mut folder = path;
        while let Some((above, _)) = folder.rsplit_once('/') {
            folder = above;
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            match rustix::fs::openat(root, folder, flags, Mode::empty()) {
                Ok(open) => {
                    flush(&open).map_err(Failure::Flush)?;
                    let id = id_of(&open);
                    if id.is_some() && self.0.get(folder) == id.as_ref() {
                        self.remember(flushed);
                        return Ok(());
                    }
                    flushed.extend(id.map(|id| (folder.to_owned(), id)));
                }
                // Removed since, and with it what was to be flushed.
                Err(Errno::NOENT | Errno::NOTDIR) => {}
                Err(error) => return Err(Failure::Open(error)),
            }
        }
        flush(root).map_err(Failure::Flush)?;
        self.remember(flushed);
        Ok(())
    }

    fn remember(&mut self, folders: Vec<(String, FileId)>) {
        if self.0.len() + folders.len() > ANCHORED {
            self.0.clear();
        }
        self.0.extend(folders);
    }
}

/// The content of a file that is as long as before.
#[cfg(not(target_vendor = "apple"))]
pub(super) fn flush_data(file: &OwnedFd) -> Result<(), Errno> {
    rustix::fs::fdatasync(file)
}

/// The content of a file.
#[cfg(target_vendor = "apple")]
pub(super) fn flush_data(file: &OwnedFd) -> Result<(), Errno> {
    flush_one(file)
}

pub(super) fn flush_one(file: &OwnedFd) -> Result<(), Errno> {
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

#[cfg(test)]
mod tests {
    use super::super::temp::Temps;
    use super::*;

    fn flusher(dir: &std::path::Path) -> Arc<Flusher> {
        std::fs::create_dir_all(dir.join(".lh/tmp")).unwrap();
        let root = std::fs::File::open(dir).unwrap();
        Arc::new(Flusher::new(Arc::new(root.into()), Env::system()))
    }

    fn absence() -> Note {
        Note { stamp: 1, key: "x".into(), state: journal::State::Absent }
    }

    /// How many folders are flushed for this object, of a store in `dir`.
    fn flushed(anchored: &mut Anchored, dir: &std::path::Path, path: &str) -> usize {
        let root: OwnedFd = std::fs::File::open(dir).unwrap().into();
        let mut flushed = 0;
        let flush = |_: &OwnedFd| {
            flushed += 1;
            Ok(())
        };
        anchored.flush_above(&root, path, flush).ok().unwrap();
        flushed
    }

    #[test]
    fn folders_are_flushed_until_they_are_on_disk() {
        let dir = tempfile::TempDir::new().unwrap();
        let mut anchored = Anchored::default();
        let mut count = |path: &str| flushed(&mut anchored, dir.path(), path);
        let make = |path: &str| std::fs::create_dir_all(dir.path().join(path)).unwrap();
        make("a/b/c");
        assert_eq!(count("a/b/c/x"), 4);
        let file: OwnedFd = std::fs::File::open(dir.path()).unwrap().into();
        if id_of(&file).is_none() {
            return;
        }
        // From now on its own folder alone.
        assert_eq!(count("a/b/c/x"), 1);
        assert_eq!(count("a/b/y"), 1);
        make("a/b/d/e");
        assert_eq!(count("a/b/d/e/z"), 3, "and what is new, with the folder that it is in");
        assert_eq!(count("a/b/d/e/z"), 1);
        // Another folder in its place, by another process.
        std::fs::remove_dir_all(dir.path().join("a/b")).unwrap();
        make("a/b/c");
        assert_eq!(count("a/b/c/x"), 3);
        // One that is not there is not remembered.
        assert_eq!(count("a/gone/x"), 1);
        make("a/gone");
        assert_eq!(count("a/gone/x"), 2);
        // There is a limit to what is.
        for n in 0..2 * ANCHORED {
            make(&format!("a/{n}"));
            assert!(count(&format!("a/{n}/x")) <= 3);
        }
        assert!(anchored.0.len() <= ANCHORED);
    }

    /// It could not be flushed: the next one tries again.
    #[test]
    fn a_folder_whose_flush_failed_is_not_on_disk() {
        let dir = tempfile::TempDir::new().unwrap();
        std::fs::create_dir_all(dir.path().join("a/b")).unwrap();
        let root: OwnedFd = std::fs::File::open(dir.path()).unwrap().into();
        let mut anchored = Anchored::default();
        let mut calls = 0;
        let failing = |_: &OwnedFd| {
            calls += 1;
            if calls == 2 { Err(Errno::IO) } else { Ok(()) }
        };
        assert!(anchored.flush_above(&root, "a/b/x", failing).is_err());
        assert_eq!(flushed(&mut anchored, dir.path(), "a/b/x"), 3);
    }

    #[tokio::test]
    async fn a_fork_starts_anew() {
        let dir = tempfile::TempDir::new().unwrap();
        let flusher = flusher(dir.path());
        if !flusher.can_note() {
            return;
        }
        flusher.note(vec![absence()]).await.unwrap();
        let segments = || std::fs::read_dir(dir.path().join(".lh/log")).unwrap().count() - 1;
        assert_eq!(segments(), 1);
        // As a child finds it: the thread is another process'.
        let as_forked = || flusher.thread.lock().unwrap().as_mut().unwrap().process += 1;
        let parents = flusher.sender().unwrap();
        as_forked();
        flusher.note(vec![absence()]).await.unwrap();
        assert_eq!(segments(), 2, "the child has a journal of its own");
        as_forked();
        // Does not wait for a thread that does not exist here.
        flusher.end();
        drop(parents);
    }

    #[tokio::test]
    async fn what_is_left_after_the_end_stays_for_the_sweep() {
        let dir = tempfile::TempDir::new().unwrap();
        let flusher = flusher(dir.path());
        let folder = dir.path().join(".lh/tmp/1");
        std::fs::create_dir(&folder).unwrap();
        let open = |name: &str| Ok(std::fs::File::open(dir.path().join(name)).unwrap().into());
        let temp = Temps::new(1, open).unwrap().write(b"body").unwrap();
        let Some(file) = id_of(&temp.file) else { return };
        let key = Key::new("x").unwrap();
        let intended = flusher.intend(&key, "body".into(), (temp, file)).await.unwrap();
        flusher.end();
        drop(intended);
        assert_eq!(std::fs::read_dir(folder).unwrap().count(), 1);
        assert!(flusher.note(vec![absence()]).await.is_err());
    }
}
