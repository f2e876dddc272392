//! Flushes the file system in the background, so that notes can be forgotten.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::sync::mpsc::TrySendError;
use std::sync::{Arc, Mutex, PoisonError, TryLockError, mpsc};
use std::time::Duration;

use rustix::fs::AtFlags;
use rustix::io::Errno;

use super::floor::{Floor, NotRaised};
use super::segment::{Segment, dead};
use super::{open_folder, stamp, sync_everything};
use crate::env::Env;

/// How many full segments may wait: then writers do.
const BACKLOG: usize = 4;

/// How long to wait for the floor at a time, about: others hold its lock for one small flush. After
/// that writers go on as if it could never be had.
const TRY: Duration = Duration::from_secs(1);
/// How often that is tried at the end of a process, all in all.
const LAST_TRIES: u32 = 60;
/// How long to wait for it where writers cannot go on without.
const URGENT: Duration = Duration::from_secs(30);
/// Between two tries, so that another thread can have the floor.
const PAUSE: Duration = Duration::from_millis(50);
/// How often to look whether a full segment can be handed over.
const LOOK: Duration = Duration::from_millis(2);

/// What the threads of one journal share.
#[derive(Debug)]
pub struct Common {
    pub root: Arc<OwnedFd>,
    pub env: Env,
    floor: Mutex<Floor>,
    failed: Mutex<Option<Errno>>,
    /// Whether notes cannot be put away because the floor cannot be raised.
    stuck: AtomicBool,
    /// Whether this is the end,
    closing: AtomicBool,
    /// and how often the floor is tried yet.
    pub last_tries: AtomicU32,
}

impl Common {
    pub fn new(root: Arc<OwnedFd>, env: Env) -> Self {
        Self {
            root,
            env,
            floor: Mutex::default(),
            failed: Mutex::default(),
            stuck: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            last_tries: AtomicU32::new(LAST_TRIES),
        }
    }

    /// From now on nobody waits for the floor for long.
    pub fn close(&self) {
        self.closing.store(true, SeqCst);
    }

    /// Why flushing failed, if it ever did: that is final.
    pub fn failure(&self) -> Option<Errno> {
        *self.failed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn fail(&self, error: Errno) {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
    }

    /// Opens the floor while that is possible.
    pub fn prepare_floor(&self) -> Result<(), Errno> {
        let mut floor = match self.floor.try_lock() {
            Ok(floor) => floor,
            Err(TryLockError::Poisoned(floor)) => floor.into_inner(),
            // The other thread is raising it, perhaps for hours. That begins with the same, and is
            // repeated until it succeeds.
            Err(TryLockError::WouldBlock) => return Ok(()),
        };
        Ok(floor.prepare(&self.root).map(drop)?)
    }

    /// Flushes the file system, and has it known that what was noted until now does not count any
    /// more: else a note of before could undo what was flushed after it.
    pub fn flush_everything(&self) -> Result<(), NotRaised> {
        let begun = self.flush_all()?;
        self.raise((begun, begun), URGENT)
    }

    /// Flushes the file system, and returns when it began to. Each process does so for itself, as each
    /// is told of failures for itself; but that it has need not be written down by each.
    fn flush_all(&self) -> Result<u64, NotRaised> {
        let begun = stamp(&self.env);
        sync_everything(&self.root).map_err(NotRaised::Failed)?;
        self.failure().map_or(Ok(begun), |error| Err(NotRaised::Failed(error)))
    }

    fn raise(&self, to: (u64, u64), patience: Duration) -> Result<(), NotRaised> {
        let mut floor = self.floor.lock().unwrap_or_else(PoisonError::into_inner);
        floor.raise(&self.root, to, patience)
    }

    /// Tries until it is raised, failed for good or is not worth waiting for any more.
    fn raise_in_time(&self, to: (u64, u64), wait: bool) -> Result<(), NotRaised> {
        let mut tries: u32 = 0;
        loop {
            let raised = self.raise(to, TRY);
            let Err(NotRaised::Open(error)) = raised else {
                self.stuck.store(false, SeqCst);
                return raised;
            };
            // Another process is stopped while it has the lock, or there are no more files to be
            // had. Nothing is lost by that: the notes count as before.
            self.stuck.store(true, SeqCst);
            tries += 1;
            if tries % 60 == 10 {
                tracing::warn!(%error, "notes cannot be put away yet");
            }
            if let Some(error) = self.failure() {
                return Err(NotRaised::Failed(error));
            }
            if !wait || self.closing.load(SeqCst) && !self.may_try_again() {
                return raised;
            }
            std::thread::sleep(if error == Errno::TIMEDOUT { PAUSE } else { TRY });
        }
    }

    fn may_try_again(&self) -> bool {
        self.last_tries.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1)).is_ok()
    }

    /// Flushes everything and makes these segments as new. `wait` is for a thread that has nothing
    /// else to do.
    fn forget(&self, segments: &mut [Segment], wait: bool) -> Forgot {
        // Locked before the flush begins: one that dies meanwhile may have noted what this flush
        // did not see.
        let dead = dead(&self.root);
        // The dead may have noted later than we did, and somebody who lives noted the same key
        // before that: without the dead's, his would be the last note. So where there are any, the
        // floor must be as high as this flush, not only above what is ours.
        let last = segments.iter().map(|segment| segment.last).max().filter(|_| dead.is_empty());
        let flushed = self.flush_all();
        let raised =
            flushed.and_then(|begun| self.raise_in_time((begun, last.unwrap_or(begun)), wait));
        let forgotten = match raised {
            Ok(()) => segments.iter_mut().try_for_each(Segment::forget),
            Err(NotRaised::Open(_)) => return Forgot::NotYet,
            Err(NotRaised::Failed(error)) => Err(error),
        };
        if let Err(error) = forgotten {
            self.fail(error);
            segments.iter().for_each(|segment| segment.keep(&self.root));
            return Forgot::Never;
        }
        if let Ok(Some(log)) = open_folder(&self.root) {
            for (name, _) in &dead {
                let _ = rustix::fs::unlinkat(&log, name, AtFlags::empty());
            }
        }
        Forgot::Now
    }

    /// Removes the folder if this was the last process that kept a journal.
    pub fn leave(&self) {
        let mut floor = self.floor.lock().unwrap_or_else(PoisonError::into_inner);
        // Whoever comes next tries again.
        let _ = floor.remove_if_last(&self.root);
    }
}

/// What became of segments that were to be forgotten.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Forgot {
    /// They are as new.
    Now,
    /// They are as they were. Should the process end, whoever comes next finds those of a dead one.
    NotYet,
    /// Flushing failed. They are kept, as after a reboot they may be all there is.
    Never,
}

/// The background thread.
#[derive(Debug)]
pub struct Forgetter {
    common: Arc<Common>,
    full: mpsc::SyncSender<Segment>,
    pub spare: mpsc::Receiver<Segment>,
    thread: std::thread::JoinHandle<()>,
}

impl Forgetter {
    pub fn start(common: Arc<Common>) -> Option<Self> {
        let (full, segments) = mpsc::sync_channel::<Segment>(BACKLOG);
        let (give, spare) = mpsc::channel();
        let shared = common.clone();
        let run = move || {
            while let Ok(first) = segments.recv() {
                let mut full = vec![first];
                full.extend(segments.try_iter());
                if shared.forget(&mut full, true) != Forgot::Now {
                    // Goes on, so that all that follow are kept too.
                    continue;
                }
                for (n, segment) in full.into_iter().enumerate() {
                    match n {
                        0 => drop(give.send(segment)),
                        _ => segment.remove(&shared.root),
                    }
                }
            }
        };
        let thread = std::thread::Builder::new().name("leasehold-forget".into()).spawn(run).ok()?;
        Some(Self { common, full, spare, thread })
    }

    /// Has this segment forgotten, or gives it back. A full one waits for its turn, so that writers are not
    /// faster than the disk; but not where it hangs on the floor, which another process may have
    /// for ever.
    pub fn take(&self, mut segment: Segment, wait: bool) -> Result<(), Segment> {
        loop {
            match self.full.try_send(segment) {
                Ok(()) => return Ok(()),
                Err(TrySendError::Full(back)) if wait && !self.common.stuck.load(SeqCst) => {
                    segment = back;
                    std::thread::sleep(LOOK);
                }
                Err(TrySendError::Full(back) | TrySendError::Disconnected(back)) => {
                    return Err(back);
                }
            }
        }
    }

    /// Ends after all it was given is forgotten, or cannot be, and returns what can be removed.
    pub fn end(self) -> Vec<Segment> {
        let Self { full, spare, thread, .. } = self;
        drop(full);
        let _ = thread.join();
        spare.try_iter().collect()
    }
}

/// Forgets a segment here and now, where there is no thread to do it. It comes back as it was if that
/// is not possible yet.
pub fn forget_here(common: &Common, segment: Segment, wait: bool) -> Option<Segment> {
    let mut segments = [segment];
    (common.forget(&mut segments, wait) != Forgot::Never).then_some(())?;
    let [segment] = segments;
    Some(segment)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use rustix::fs::FlockOperation;

    use super::super::floor::Floors;
    use super::super::record::{Note, Record, State};
    use super::*;
    use crate::host;

    fn common(dir: &Path) -> Common {
        std::fs::create_dir_all(dir.join(".lh/tmp")).unwrap();
        let root: OwnedFd = std::fs::File::open(dir).unwrap().into();
        Common::new(Arc::new(root), Env::system())
    }

    /// A segment with one note of this time.
    fn segment(common: &Common, writer: u64, stamp: u64) -> Segment {
        let mut segment = Segment::create(&common.root, writer, 1).unwrap();
        let note = Record::Note(Note { stamp, key: "k".into(), state: State::Absent });
        segment.write(&note.frame(segment.epoch()), stamp, common.env.clock().boot()).unwrap();
        segment.flush().unwrap();
        segment
    }

    fn floor_of(common: &Common) -> u64 {
        let log = open_folder(&common.root).unwrap().unwrap();
        Floors::read(&log).unwrap().of(host::boot_id())
    }

    /// The floor's lock, as another process holds it that is stopped while it flushes.
    fn hold_floor(dir: &Path) -> OwnedFd {
        let floor = dir.join(".lh/log/floor");
        let file: OwnedFd = std::fs::File::options().write(true).open(floor).unwrap().into();
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).unwrap();
        file
    }

    /// Another has raised the floor above all that is ours, but not above what the dead noted after
    /// that. A living third has noted something else for the same key in between: if the dead's
    /// note went now, that would be the last one.
    #[test]
    fn what_the_dead_noted_stays_until_the_floor_is_above_it() {
        let dir = tempfile::TempDir::new().unwrap();
        let common = common(dir.path());
        let ours = segment(&common, 1, 10);
        common.raise((20, 20), TRY).unwrap();
        let noted = stamp(&common.env);
        drop(segment(&common, 2, noted));
        let there = || {
            let name = format!("-{:016x}-1.log", 2);
            let names = super::super::segment_names(&open_folder(&common.root).unwrap().unwrap());
            names.unwrap().iter().any(|other| other.ends_with(&name))
        };
        assert!(there());
        let held = hold_floor(dir.path());
        std::thread::scope(|scope| {
            let forgetting = scope.spawn(|| common.forget(&mut [ours], true));
            while !common.stuck.load(SeqCst) && !forgetting.is_finished() {
                std::thread::sleep(Duration::from_millis(10));
            }
            assert!(there(), "it is above the floor");
            drop(held);
            assert_eq!(forgetting.join().unwrap(), Forgot::Now);
        });
        assert!(!there() && floor_of(&common) >= noted);
    }
}
