//! The journal: what makes many durable writes cost one flush.
//!
//! A durable write may either flush its file and its folders, or be noted in the journal, which
//! costs a part of two flushes: all that are noted at the same time share them. Every few seconds
//! the whole file system is flushed in the background, and what was noted until then is forgotten.
//!
//! ```text
//!   temporary file ─▶ intent: key, content, which file ─▶ flush ─┐   nothing is visible yet
//!   ┌──────────────────────────────────────────────────────────◀─┘
//!   └▶ rename and stamp, under the stripe lock ─▶ commit: key, stamp, which intent ─▶ flush ─▶ ok
//!
//!   .lh/log/{boot}-{process}-{n}.log   segment: header, records; locked (flock) while its writer lives
//!   .lh/log/{…}.kept.log               of a process whose flushes failed: for after a reboot
//!   .lh/log/floor                      up to when everything is on disk
//! ```
//!
//! Within a boot nothing is ever read back: when a process dies, the kernel still has its files.
//! The first process after a power loss [recovers](mod@recover): **each key gets the state of its last
//! committed note**. So a file that became visible without its data can be mended from its intent,
//! and what was acknowledged is there whichever renames reached the disk.
//!
//! - What is not durable is not noted, and a recovery undoes it if there is a note on its key.
//! - Durable writes beside the journal are noted *as they are*, after their own flushes, where
//!   anybody keeps a journal: an older note must not undo them. They look for one after their
//!   rename; one that begins later has only later notes.
//! - Deletes are noted too, but nobody waits for that: one that was not persisted may be undone.
//! - An intent and its commit stand in one segment. Whatever else an intent was for (a refused
//!   write), its file keeps its inode number until that is noted too.

mod floor;
mod forget;
mod record;
mod recover;
mod restore;
mod segment;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use rustix::fs::{AtFlags, OFlags};
use rustix::io::Errno;

pub use floor::NotRaised;
pub use record::{Intent, Note, State};
pub use recover::recover;

use self::forget::{Common, Forgetter, forget_here};
use self::record::Record;
use self::segment::Segment;
use super::files::open_beneath;
use super::names::PRIVATE;
use crate::env::{BootTime, Env};

/// A segment is full at this size.
const FULL: u64 = 4 << 20;
/// Where it cannot be put away, up to this one: all of it is read after a power loss.
const LIMIT: u64 = 256 << 20;
/// How long a record waits to be forgotten.
const KEEP: Duration = Duration::from_secs(5);

/// Where the segments are, from the root.
fn folder() -> String {
    format!("{PRIVATE}/log")
}

/// Whether anybody keeps a journal in this store.
pub fn is_kept(private: &OwnedFd) -> bool {
    rustix::fs::statat(private, "log", AtFlags::SYMLINK_NOFOLLOW).is_ok()
}

/// The order of changes. To be taken under the stripe lock of the key.
pub fn stamp(env: &Env) -> u64 {
    let since = env.clock().boot().since(BootTime::from_boot(Duration::ZERO));
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// What is to be noted.
#[derive(Debug)]
pub enum Entry {
    Intent(Arc<Pending>),
    /// The intent's file became the object at this time.
    Commit(Arc<Pending>, u64),
    /// The intent's file did not.
    Void(Arc<Pending>),
    Note(Note),
}

impl Entry {
    /// Whether it says what a key is, as of before this.
    fn is_before(&self, since: u64) -> bool {
        match self {
            Self::Commit(_, stamp) => *stamp < since,
            Self::Note(note) => note.stamp < since && note.state != State::AsItIs,
            Self::Intent(_) | Self::Void(_) => false,
        }
    }

    fn stamp(&self) -> u64 {
        match self {
            Self::Intent(pending) => pending.intent.stamp,
            Self::Commit(_, stamp) => *stamp,
            Self::Void(_) => 0,
            Self::Note(note) => note.stamp,
        }
    }
}

/// An intent on its way.
#[derive(Debug)]
pub struct Pending {
    intent: Intent,
    /// In which use of which segment it stands; zero before it does.
    turn: AtomicU64,
}

impl Pending {
    pub fn new(intent: Intent) -> Arc<Self> {
        Arc::new(Self { intent, turn: AtomicU64::new(0) })
    }
}

/// Why something was not noted.
#[derive(Debug, Clone, Copy)]
pub enum NotNoted {
    /// The journal could not be written, or is gone: flushing everything does as well.
    Unwritten,
    /// A flush failed, or what it wrote cannot be known.
    Failed(Errno),
}

/// This process' journal of one store. Belongs to the flushing thread.
#[derive(Debug)]
pub struct Journal {
    common: Arc<Common>,
    writer: u64,
    turns: u64,
    current: Option<Segment>,
    forgetter: Option<Forgetter>,
    used: bool,
    /// Since when a segment of ours has been there, which keeps the floor. Before, all segments may have gone,
    /// and the floor with them: a note from then could undo what others wrote after it.
    since: Option<u64>,
}

impl Journal {
    pub fn new(root: Arc<OwnedFd>, env: Env) -> Self {
        let writer = env.random();
        let common = Arc::new(Common::new(root, env));
        Self { common, writer, turns: 0, current: None, forgetter: None, used: false, since: None }
    }

    /// Writes the entries, and if `flush` is given returns once they are on disk.
    pub fn note(&mut self, entries: &[Entry], flush: bool) -> Result<(), NotNoted> {
        if self.current.as_ref().is_some_and(|segment| segment.end >= FULL) {
            self.forget_later(true);
        }
        // Still there, as the floor cannot be raised. Writers go on, but not for ever.
        if self.current.as_ref().is_some_and(|segment| segment.end >= LIMIT) {
            return Err(NotNoted::Unwritten);
        }
        let mut segment = match self.current.take() {
            Some(segment) => segment,
            None => self.next_segment().map_err(unwritten)?,
        };
        let since = self.since.unwrap_or(u64::MAX);
        if entries.iter().any(|entry| entry.is_before(since)) {
            self.current = Some(segment);
            return Err(NotNoted::Unwritten);
        }
        let mut frames = Vec::new();
        let mut frame = |record: &Record| frames.extend(record.frame(segment.epoch()));
        for entry in entries {
            match entry {
                Entry::Intent(pending) => frame(&Record::Intent(pending.intent.clone())),
                Entry::Commit(pending, stamp) => {
                    let Intent { number, key, .. } = &pending.intent;
                    // The segment that it stood in was full or flushed meanwhile.
                    if pending.turn.load(Relaxed) != segment.turn {
                        frame(&Record::Intent(pending.intent.clone()));
                    }
                    let (key, state) = (key.clone(), State::Content(*number));
                    frame(&Record::Note(Note { stamp: *stamp, key, state }));
                }
                Entry::Void(pending) => frame(&Record::Void(pending.intent.number)),
                Entry::Note(note) => frame(&Record::Note(note.clone())),
            }
        }
        let last = entries.iter().map(Entry::stamp).max().unwrap_or(0);
        let written = segment.write(&frames, last, self.common.env.clock().boot());
        let turn = segment.turn;
        let segment = self.current.insert(segment);
        if let Err(error) = written {
            // A part of it may be there, and must not be taken for what follows the next records:
            // the segment is used no more before its epoch is over.
            self.forget_later(false);
            return Err(unwritten(error));
        }
        for entry in entries {
            if let Entry::Intent(pending) | Entry::Commit(pending, _) = entry {
                pending.turn.store(turn, Relaxed);
            }
        }
        if !flush {
            return Ok(());
        }
        segment.flush().map_err(NotNoted::Failed)?;
        if !segment.is_there(&self.common.root) {
            // Somebody removed it, and with it what was noted before.
            (self.current, self.since) = (None, None);
            return Err(NotNoted::Unwritten);
        }
        Ok(())
    }

    /// Flushes the whole file system in place of noting.
    pub fn flush_everything(&self) -> Result<(), NotRaised> {
        self.common.flush_everything()
    }

    /// When the records that were noted so far should be forgotten; `None` if there are none.
    pub fn due(&self) -> Option<Duration> {
        let since = self.current.as_ref()?.since?;
        Some(KEEP.saturating_sub(self.common.env.clock().boot().since(since)))
    }

    /// Has everything flushed in the background, so that the records so far can be forgotten. If
    /// that is busy, waits for it only if asked to.
    pub fn forget_later(&mut self, wait: bool) {
        let Some(segment) = self.current.take() else { return };
        if segment.since.is_none() {
            self.current = Some(segment);
            return;
        }
        if self.forgetter.is_none() {
            self.forgetter = Forgetter::start(self.common.clone());
        }
        let back = match &self.forgetter {
            Some(forgetter) => forgetter.take(segment, wait).err(),
            None => forget_here(&self.common, segment, false),
        };
        self.current = back.map(|mut segment| match &mut segment.since {
            // Busy: once more after a while.
            Some(since) => {
                *since = self.common.env.clock().boot();
                segment
            }
            None => self.renewed(segment),
        });
    }

    /// Why flushing failed, if it ever did.
    pub fn failure(&self) -> Option<Errno> {
        self.common.failure()
    }

    /// Nothing is noted any more, and what was is kept.
    pub fn fail(&mut self, error: Errno) {
        self.common.fail(error);
        if let Some(segment) = &self.current {
            segment.keep(&self.common.root);
        }
    }

    /// Flushes everything and removes the segments: the regular end. Where the floor cannot be
    /// raised for a minute they stay, as those of a process that was killed do.
    pub fn close(mut self) {
        if !self.used {
            return;
        }
        if let Some(error) = self.failure() {
            self.fail(error);
            return;
        }
        self.common.close();
        self.forget_later(true);
        let mut unused = self.forgetter.take().map_or_else(Vec::new, Forgetter::end);
        unused.extend(match self.current.take() {
            // There was no room for it.
            Some(segment) if segment.since.is_some() => forget_here(&self.common, segment, true),
            current => current,
        });
        for segment in unused.iter().filter(|segment| segment.since.is_none()) {
            segment.remove(&self.common.root);
        }
        self.common.leave();
    }

    fn next_segment(&mut self) -> Result<Segment, Errno> {
        let spare = self.forgetter.as_ref().and_then(|forgetter| forgetter.spare.try_recv().ok());
        if let Some(segment) = spare {
            return Ok(self.renewed(segment));
        }
        self.turns += 1;
        self.used = true;
        let segment = Segment::create(&self.common.root, self.writer, self.turns)?;
        self.common.prepare_floor().inspect_err(|_| segment.remove(&self.common.root))?;
        self.since.get_or_insert_with(|| stamp(&self.common.env));
        Ok(segment)
    }

    fn renewed(&mut self, mut segment: Segment) -> Segment {
        self.turns += 1;
        segment.turn = self.turns;
        segment
    }
}

/// Before anything was noted all errors but a broken disk leave another way.
fn unwritten(error: Errno) -> NotNoted {
    match error {
        Errno::IO => NotNoted::Failed(error),
        _ => NotNoted::Unwritten,
    }
}

/// The folder of the journal, if there is one: not where a link leads.
fn open_folder(root: &OwnedFd) -> Result<Option<OwnedFd>, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    match open_beneath(root, &folder(), flags) {
        Ok(folder) => Ok(Some(folder)),
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::XDEV) => Ok(None),
        Err(error) => Err(error),
    }
}

fn segment_names(log: &OwnedFd) -> Result<Vec<String>, Errno> {
    let mut names = Vec::new();
    for entry in rustix::fs::Dir::read_from(log)? {
        if let Ok(name) = entry?.file_name().to_str()
            && name.ends_with(".log")
        {
            names.push(name.to_owned());
        }
    }
    Ok(names)
}

/// Whether this file is what stands at `path`, and not one that was removed or moved away.
fn is_at(root: &OwnedFd, path: &str, file: &OwnedFd) -> bool {
    let there = rustix::fs::statat(root, path, AtFlags::SYMLINK_NOFOLLOW);
    match (there, rustix::fs::fstat(file)) {
        (Ok(there), Ok(own)) => (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino),
        _ => false,
    }
}

fn boot_hash(boot_id: &str) -> u64 {
    xxhash_rust::xxh3::xxh3_64(boot_id.as_bytes())
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn sync_everything(root: &OwnedFd) -> Result<(), Errno> {
    rustix::fs::syncfs(root)
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn sync_everything(_: &OwnedFd) -> Result<(), Errno> {
    Err(Errno::NOSYS)
}

fn write_all(file: &OwnedFd, mut bytes: &[u8], mut at: u64) -> Result<(), Errno> {
    while !bytes.is_empty() {
        match rustix::io::pwrite(file, bytes, at) {
            Ok(0) => return Err(Errno::IO),
            Ok(written) => {
                bytes = &bytes[written..];
                at += written as u64;
            }
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::record::{HEADER, Header, records};
    use super::*;
    use crate::store::dir::files::FileId;

    fn journal(dir: &std::path::Path) -> Journal {
        std::fs::create_dir_all(dir.join(".lh/tmp")).unwrap();
        let root: OwnedFd = std::fs::File::open(dir).unwrap().into();
        let mut journal = Journal::new(Arc::new(root), Env::system());
        // So that it has a segment.
        let note = Note { stamp: 1, key: "first".into(), state: State::AsItIs };
        journal.note(&[Entry::Note(note)], true).unwrap();
        journal
    }

    fn absence() -> Entry {
        let stamp = stamp(&Env::system());
        Entry::Note(Note { stamp, key: "x".into(), state: State::Absent })
    }

    /// All segments may have gone since, and the floor with them, which was above it.
    #[test]
    fn what_was_before_the_first_segment_is_not_noted() {
        let dir = tempfile::TempDir::new().unwrap();
        let late = absence();
        let mut journal = journal(dir.path());
        assert!(matches!(journal.note(&[late], true), Err(NotNoted::Unwritten)));
        journal.note(&[absence()], true).unwrap();
        journal.close();
    }

    #[test]
    fn after_a_failed_flush_the_notes_stay_whoever_flushes_later() {
        let dir = tempfile::TempDir::new().unwrap();
        let (mut failing, mut other) = (journal(dir.path()), journal(dir.path()));
        failing.note(&[absence()], true).unwrap();
        other.note(&[absence()], true).unwrap();
        failing.fail(Errno::IO);
        failing.close();
        other.close();
        let left = std::fs::read_dir(dir.path().join(".lh/log")).unwrap();
        let left: Vec<_> = left.map(|entry| entry.unwrap().file_name()).collect();
        let kept = |name: &&std::ffi::OsString| name.to_string_lossy().ends_with(".kept.log");
        assert_eq!(left.iter().filter(kept).count(), 1, "{left:?}");
        assert_eq!(left.len(), 2, "and the floor: {left:?}");
    }

    #[test]
    fn a_commit_stands_in_one_segment_with_its_intent() {
        let dir = tempfile::TempDir::new().unwrap();
        let mut journal = journal(dir.path());
        let file = FileId { inode: 1, born: (0, 0) };
        let intent = Intent { number: 1, stamp: 1, file, key: "x".into(), body: "body".into() };
        let pending = Pending::new(intent.clone());
        journal.note(&[Entry::Intent(pending.clone())], true).unwrap();
        // Everything is flushed in between, and its records forgotten.
        journal.forget_later(true);
        let stamp = stamp(&Env::system());
        journal.note(&[Entry::Commit(pending, stamp)], true).unwrap();
        let segments = std::fs::read_dir(dir.path().join(".lh/log")).unwrap();
        let commit = Note { stamp, key: "x".into(), state: State::Content(1) };
        let whole = [Record::Intent(intent), Record::Note(commit)];
        let found = segments.map(|entry| std::fs::read(entry.unwrap().path()).unwrap());
        let found: Vec<_> = found
            .filter_map(|bytes| {
                let header = Header::parse(&bytes)?;
                Some(records(&bytes[HEADER as usize..], header.epoch))
            })
            .collect();
        assert!(found.iter().any(|records| records[..] == whole), "{found:?}");
        journal.close();
        assert!(!dir.path().join(".lh/log").exists());
    }

    fn lengths(dir: &std::path::Path) -> Vec<u64> {
        let entries = std::fs::read_dir(dir.join(".lh/log")).unwrap().map(Result::unwrap);
        let segments = entries.filter(|entry| entry.path().extension().is_some());
        segments.map(|entry| entry.metadata().unwrap().len()).collect()
    }

    /// Another process is stopped while it has the floor's lock. The others note what they write
    /// as before, and do not wait for it when they end.
    #[test]
    fn a_floor_that_cannot_be_had_stops_nobody() {
        use std::sync::atomic::Ordering::SeqCst;

        let dir = tempfile::TempDir::new().unwrap();
        let mut journal = journal(dir.path());
        journal.note(&[absence()], true).unwrap();
        let floor = std::fs::File::options().write(true).open(dir.path().join(".lh/log/floor"));
        let held = floor.unwrap();
        held.lock().unwrap();
        journal.common.last_tries.store(1, SeqCst);
        let (done, waits) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let (file, body) = (FileId { inode: 1, born: (0, 0) }, vec![7; 1 << 20].into());
            let intent = Intent { number: 1, stamp: 2, file, key: "x".into(), body };
            for n in 1..=40 {
                let pending = Pending::new(Intent { number: n, ..intent.clone() });
                journal.note(&[Entry::Intent(pending)], true).unwrap();
            }
            let current = journal.current.as_mut().unwrap();
            let end = std::mem::replace(&mut current.end, LIMIT);
            assert!(end > 2 * FULL, "it grows where it cannot be put away");
            let full = journal.note(&[absence()], true);
            assert!(matches!(full, Err(NotNoted::Unwritten)), "but not for ever");
            done.send(()).unwrap();
            journal.close();
            done.send(()).unwrap();
        });
        let soon = Duration::from_secs(120);
        waits.recv_timeout(soon).expect("noted while the floor could not be had");
        waits.recv_timeout(soon).expect("closed while the floor could not be had");
        assert!(lengths(dir.path()).iter().sum::<u64>() >= 40 << 20, "and nothing is forgotten");
        // Who comes later puts it all away.
        drop(held);
        let mut later = self::journal(dir.path());
        later.note(&[absence()], true).unwrap();
        later.close();
        assert!(!dir.path().join(".lh/log").exists());
    }

    /// What grew while it could not be put away does not stay large.
    #[test]
    fn a_grown_segment_shrinks_when_it_is_forgotten() {
        let dir = tempfile::TempDir::new().unwrap();
        let mut journal = journal(dir.path());
        let (file, body) = (FileId { inode: 1, born: (0, 0) }, vec![7; 17 << 20].into());
        let intent = Intent { number: 1, stamp: 1, file, key: "x".into(), body };
        journal.note(&[Entry::Intent(Pending::new(intent))], true).unwrap();
        let segment = journal.current.take().unwrap();
        let segment = forget_here(&journal.common, segment, false).unwrap();
        assert_eq!((segment.end, segment.since), (HEADER, None));
        assert_eq!(lengths(dir.path()), [FULL]);
        journal.current = Some(segment);
        journal.close();
    }
}
