//! Flushes the file system in the background, so that notes can be forgotten.

use std::os::fd::OwnedFd;
use std::sync::mpsc::TrySendError;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

use rustix::fs::AtFlags;
use rustix::io::Errno;

use super::floor::{Floor, NotRaised};
use super::segment::{Segment, dead};
use super::{open_folder, stamp, sync_everything};
use crate::env::Env;

/// How many full segments may wait: then writers do.
const BACKLOG: usize = 4;

/// How often putting notes away is tried again, and after what pause.
const TRIES: u32 = 30;
const PAUSE: Duration = Duration::from_secs(1);

/// What the threads of one journal share.
#[derive(Debug)]
pub struct Common {
    pub root: Arc<OwnedFd>,
    pub env: Env,
    floor: Mutex<Floor>,
    failed: Mutex<Option<Errno>>,
}

impl Common {
    pub fn new(root: Arc<OwnedFd>, env: Env) -> Self {
        Self { root, env, floor: Mutex::default(), failed: Mutex::default() }
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
        let mut floor = self.floor.lock().unwrap_or_else(PoisonError::into_inner);
        floor.prepare(&self.root).map(drop)
    }

    /// Flushes the file system, and has it known that what was noted until now does not count any
    /// more: else a note of before could undo what was flushed after it.
    pub fn flush_everything(&self) -> Result<(), NotRaised> {
        self.flush_all_until(None)
    }

    /// The same for what was noted up to this stamp. Each process flushes for itself, as each is told of
    /// failures for itself; but that it has need not be written down by each.
    fn flush_all_until(&self, last: Option<u64>) -> Result<(), NotRaised> {
        let begun = stamp(&self.env);
        sync_everything(&self.root).map_err(NotRaised::Failed)?;
        if let Some(error) = self.failure() {
            return Err(NotRaised::Failed(error));
        }
        let mut floor = self.floor.lock().unwrap_or_else(PoisonError::into_inner);
        floor.raise(&self.root, begun, last.unwrap_or(begun))
    }

    /// Flushes everything and makes these segments as new. `false` if that failed: then they are
    /// kept, as after a reboot they may be all there is.
    fn forget(&self, segments: &mut [Segment]) -> bool {
        // Locked before the flush begins: one that dies meanwhile may have noted what this flush
        // did not see.
        let dead = dead(&self.root);
        // The dead may have noted later than we did, and somebody who lives noted the same key
        // before that: without the dead's, his would be the last note. So where there are any, the
        // floor must be as high as this flush, not only above what is ours.
        let last = segments.iter().map(|segment| segment.last).max().filter(|_| dead.is_empty());
        let mut flushed = self.flush_all_until(last);
        for _ in 0..TRIES {
            // Others keep the floor busy, or there are no more files to be had. Nothing is lost by that.
            let Err(NotRaised::Open(error)) = flushed else { break };
            tracing::warn!(%error, "notes cannot be put away yet");
            std::thread::sleep(PAUSE);
            flushed = self.flush_all_until(last);
        }
        let flushed = match flushed {
            Ok(()) => segments.iter_mut().try_for_each(Segment::forget),
            Err(error) => Err(error.into()),
        };
        if let Err(error) = flushed {
            self.fail(error);
            segments.iter().for_each(|segment| segment.keep(&self.root));
            return false;
        }
        if let Ok(Some(log)) = open_folder(&self.root) {
            for (name, _) in &dead {
                let _ = rustix::fs::unlinkat(&log, name, AtFlags::empty());
            }
        }
        true
    }

    /// Removes the folder if this was the last process that kept a journal.
    pub fn leave(&self) {
        let mut floor = self.floor.lock().unwrap_or_else(PoisonError::into_inner);
        // Whoever comes next tries again.
        let _ = floor.remove_if_last(&self.root);
    }
}

/// The background thread.
#[derive(Debug)]
pub struct Forgetter {
    full: mpsc::SyncSender<Segment>,
    pub spare: mpsc::Receiver<Segment>,
    thread: std::thread::JoinHandle<()>,
}

impl Forgetter {
    pub fn start(common: Arc<Common>) -> Option<Self> {
        let (full, segments) = mpsc::sync_channel::<Segment>(BACKLOG);
        let (give, spare) = mpsc::channel();
        let run = move || {
            while let Ok(first) = segments.recv() {
                let mut full = vec![first];
                full.extend(segments.try_iter());
                if !common.forget(&mut full) {
                    // Goes on, so that all that follow are kept too.
                    continue;
                }
                for (n, segment) in full.into_iter().enumerate() {
                    match n {
                        0 => drop(give.send(segment)),
                        _ => segment.remove(&common.root),
                    }
                }
            }
        };
        let thread = std::thread::Builder::new().name("leasehold-forget".into()).spawn(run).ok()?;
        Some(Self { full, spare, thread })
    }

    /// Has this segment forgotten, or gives it back. A full one waits for its turn.
    pub fn take(&self, segment: Segment, wait: bool) -> Result<(), Segment> {
        match wait {
            true => self.full.send(segment).map_err(|error| error.0),
            false => self.full.try_send(segment).map_err(|error| match error {
                TrySendError::Full(segment) | TrySendError::Disconnected(segment) => segment,
            }),
        }
    }

    /// Ends after all it was given is forgotten, and returns what can be removed.
    pub fn end(self) -> Vec<Segment> {
        let Self { full, spare, thread } = self;
        drop(full);
        let _ = thread.join();
        spare.try_iter().collect()
    }
}

/// Forgets a segment here and now, where there is no thread to do it.
pub fn forget_here(common: &Common, segment: Segment) -> Option<Segment> {
    let mut segments = [segment];
    common.forget(&mut segments).then_some(())?;
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
        common.floor.lock().unwrap().raise(&common.root, 20, 20).unwrap();
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
            let forgetting = scope.spawn(|| common.forget(&mut [ours]));
            for _ in 0..30 {
                std::thread::sleep(Duration::from_millis(10));
                assert!(there() || floor_of(&common) >= noted, "removed, and above the floor");
            }
            drop(held);
            assert!(forgetting.join().unwrap());
        });
        assert!(!there() && floor_of(&common) >= noted);
    }
}
