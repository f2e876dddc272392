//! After a power loss: each key gets the state of its last committed note.
//!
//! Last by the stamps, over all segments, among those above the [floor](super::floor). Besides, an
//! intent that was not committed is looked after if its file is what the path shows: the rename
//! reached the disk, and the data, which the note has, may not.
//!
//! A segment that somebody has locked is of this boot whatever it says, and so there was none: a
//! container may be told another boot id than its host. The same is true where there are segments
//! that say they are of this boot, as nobody writes before this was done.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::time::Duration;

use bytes::Bytes;
use leasehold_protocol::key::Key;
use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags, Stat};
use rustix::io::Errno;

use super::floor::Floors;
use super::record::{self, HEADER, Header, Intent, Note, Record, State};
use super::restore::{Restore, Unrestored};
use super::segment::KEPT;
use super::{boot_hash, folder, open_folder, segment_names, sync_everything};
use crate::env::Env;
use crate::store::dir::files::{FileId, io_error, read_all};
use crate::store::dir::names::PRIVATE;
use crate::{Error, Result, host};

/// How long to wait for another process that is at it.
const PATIENCE: u32 = 60_000;

/// Brings the store to what was reported durable before a power loss, if there was one. Costs one
/// look into a folder if there was none.
pub fn recover(root: &OwnedFd, env: &Env) -> Result<()> {
    if old_segments(root, env)?.is_none() {
        return Ok(());
    }
    let _only_one = lock(root)?;
    // Somebody else may have done it while we waited.
    let Some((log, names)) = old_segments(root, env)? else { return Ok(()) };
    let mut segments = Vec::new();
    for name in names {
        match Segment::read(&log, name).map_err(failed)? {
            Found::Segment(segment) => segments.push(*segment),
            Found::Nothing => {}
            Found::Locked => return Ok(()),
        }
    }
    let floors = Floors::read(&log).map_err(failed)?;
    let notes: Vec<_> = segments.iter().map(|segment| &segment.notes).collect();
    let plans = plan(&notes, &floors);
    let (restored, aside) = apply(root, env, &segments, &plans)?;
    sync_everything(root).map_err(failed)?;
    put_away(root, env, &segments, &aside).map_err(failed)?;
    let (keys, aside) = (plans.len(), aside.len());
    tracing::info!(keys, restored, aside, "the machine went down: the journal was read back");
    Ok(())
}

/// The folder and the names of segments, if they are of another boot.
fn old_segments(root: &OwnedFd, env: &Env) -> Result<Option<(OwnedFd, Vec<String>)>> {
    let Some(log) = open_folder(root).map_err(failed)? else { return Ok(None) };
    let names = segment_names(&log).map_err(failed)?;
    let own = format!("{:016x}-", boot_hash(host::boot_id()));
    let old = !names.is_empty() && !names.iter().any(|name| name.starts_with(&own));
    // Who does not know which boot this is cannot tell whether there was another.
    Ok((old && host::here(env.clock().boot()).is_some()).then_some((log, names)))
}

/// A segment that was found. It stays locked.
struct Segment {
    name: String,
    stat: Stat,
    notes: Notes,
    _file: OwnedFd,
}

/// What it says.
struct Notes {
    header: Header,
    records: Vec<Record>,
    /// The flushes of its writer failed.
    kept: bool,
}

enum Found {
    Segment(Box<Segment>),
    /// Its writer never finished making it, or it is not one.
    Nothing,
    Locked,
}

impl Segment {
    fn read(log: &OwnedFd, name: String) -> Result<Found, Errno> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let file = match rustix::fs::openat(log, &name, flags, Mode::empty()) {
            Ok(file) => file,
            Err(Errno::NOENT | Errno::LOOP | Errno::NXIO) => return Ok(Found::Nothing),
            Err(error) => return Err(error),
        };
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Ok(Found::Locked),
            Err(error) => return Err(error),
        }
        let stat = rustix::fs::fstat(&file)?;
        if !rustix::fs::FileType::from_raw_mode(stat.st_mode).is_file() {
            return Ok(Found::Nothing);
        }
        let bytes = read_all(&file, &stat)?;
        let Some(header) = Header::parse(&bytes) else { return Ok(Found::Nothing) };
        let records = bytes.get(HEADER as usize..).unwrap_or_default();
        let records = record::records(records, header.epoch);
        let notes = Notes { header, records, kept: name.ends_with(KEPT) };
        Ok(Found::Segment(Box::new(Self { name, stat, notes, _file: file })))
    }
}

/// What is to become of one key.
#[derive(Debug, Default, PartialEq, Eq)]
struct Plan {
    /// The last committed state.
    last: Option<Last>,
    /// Files that became visible, perhaps without their data.
    torn: Vec<(FileId, Bytes)>,
    /// In which segments it is mentioned.
    segments: BTreeSet<usize>,
    /// From which segment the state comes.
    from: usize,
}

#[derive(Debug, PartialEq, Eq)]
struct Last {
    stamp: u64,
    /// `None` is *as it is*.
    state: Option<Wanted>,
}

#[derive(Debug, PartialEq, Eq)]
enum Wanted {
    Content(Bytes),
    Absent,
    /// A commit without its intent, which no writer leaves.
    Unknown,
}

/// What the notes say about each key.
fn plan(segments: &[&Notes], floors: &Floors) -> BTreeMap<String, Plan> {
    let mut plans = BTreeMap::<String, Plan>::new();
    let mut intents = HashMap::<(u64, u64), &Intent>::new();
    // Also by a later segment of their writer.
    let (mut committed, mut void) = (HashSet::new(), HashSet::new());
    for Notes { header: Header { writer, .. }, records, .. } in segments {
        for record in records {
            match record {
                Record::Intent(intent) => drop(intents.insert((*writer, intent.number), intent)),
                Record::Note(Note { state: State::Content(number), .. }) => {
                    committed.insert((*writer, *number));
                }
                Record::Void(number) => drop(void.insert((*writer, *number))),
                Record::Note(_) => {}
            }
        }
    }
    for (n, segment) in segments.iter().enumerate() {
        let (writer, floor) = (segment.header.writer, floors.of(&segment.header.boot_id));
        for record in &segment.records {
            let (key, stamp) = match record {
                Record::Intent(Intent { key, stamp, .. })
                | Record::Note(Note { key, stamp, .. }) => (key, *stamp),
                Record::Void(_) => continue,
            };
            // Others may have raised the floor although the flushes of this one failed.
            let counts = stamp > floor;
            if !counts && !segment.kept {
                continue;
            }
            let plan = plans.entry(key.clone()).or_default();
            plan.segments.insert(n);
            match record {
                Record::Intent(Intent { number, file, body, .. }) => {
                    let id = (writer, *number);
                    let open = !committed.contains(&id) || segment.kept;
                    plan.torn.extend((open && !void.contains(&id)).then(|| (*file, body.clone())));
                }
                Record::Note(Note { state, .. }) if counts => {
                    let last = plan.last.as_ref().map_or(0, |last| last.stamp);
                    if stamp < last {
                        continue;
                    }
                    let state = match state {
                        State::Content(number) => Some(match intents.get(&(writer, *number)) {
                            Some(intent) => Wanted::Content(intent.body.clone()),
                            None => Wanted::Unknown,
                        }),
                        State::Absent => Some(Wanted::Absent),
                        State::AsItIs => None,
                    };
                    (plan.last, plan.from) = (Some(Last { stamp, state }), n);
                }
                _ => {}
            }
        }
    }
    plans
}

/// Carries the plans out. Returns how many objects were not as they should be, and which segments
/// mention one that could not be helped.
fn apply(
    root: &OwnedFd,
    env: &Env,
    segments: &[Segment],
    plans: &BTreeMap<String, Plan>,
) -> Result<(usize, BTreeSet<usize>)> {
    let restore = Restore { root, env };
    let (mut restored, mut aside) = (0, BTreeSet::new());
    let is_absent =
        |plan: &Plan| plan.last.as_ref().is_some_and(|last| last.state == Some(Wanted::Absent));
    // What is absent first: it may stand where another needs a folder, or be in a folder that
    // stands where another needs its name.
    let (absent, others): (Vec<_>, Vec<_>) = plans.iter().partition(|(_, plan)| is_absent(plan));
    for (name, plan) in absent.into_iter().chain(others) {
        let carry_out = || -> Result<bool, Unrestored> {
            let key = Key::new(name).map_err(|error| Unrestored::Key(error.to_string()))?;
            let owner = &segments[plan.from].stat;
            match plan.last.as_ref().and_then(|last| last.state.as_ref()) {
                Some(Wanted::Absent) => restore.absent(&key),
                Some(Wanted::Content(body)) => restore.content(&key, body, owner),
                Some(Wanted::Unknown) => Err(Unrestored::Key("its content was not noted".into())),
                None => restore.torn(&key, &plan.torn, owner),
            }
        };
        match carry_out() {
            Ok(changed) => restored += usize::from(changed),
            Err(Unrestored::Key(reason)) => {
                tracing::warn!(key = name, reason, "cannot be recovered as it was before");
                aside.extend(&plan.segments);
            }
            Err(Unrestored::Store(error)) => return Err(failed(error)),
        }
    }
    Ok((restored, aside))
}

/// Takes the journal away in one step, so that another power loss does not leave a part of it, then
/// removes it but for what could not be recovered.
fn put_away(
    root: &OwnedFd,
    env: &Env,
    segments: &[Segment],
    aside: &BTreeSet<usize>,
) -> Result<(), Errno> {
    let done = format!("{PRIVATE}/log.{:016x}", env.random());
    rustix::fs::renameat(root, folder(), root, &done)?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    rustix::fs::fsync(rustix::fs::openat(root, PRIVATE, flags, Mode::empty())?)?;
    if !aside.is_empty() {
        tracing::warn!(folder = done, "what could not be recovered is kept here");
    }
    // From here on nothing matters any more but order in the house.
    let Ok(folder) = rustix::fs::openat(root, &done, flags, Mode::empty()) else { return Ok(()) };
    let kept: BTreeSet<_> = aside.iter().map(|n| segments[*n].name.as_str()).collect();
    for entry in rustix::fs::Dir::read_from(&folder)?.filter_map(Result::ok) {
        if !entry.file_name().to_str().is_ok_and(|name| kept.contains(name)) {
            let _ = rustix::fs::unlinkat(&folder, entry.file_name(), AtFlags::empty());
        }
    }
    let _ = rustix::fs::unlinkat(root, &done, AtFlags::REMOVEDIR);
    Ok(())
}

fn lock(root: &OwnedFd) -> Result<OwnedFd> {
    let path = format!("{PRIVATE}/recover.lock");
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let file = rustix::fs::openat(root, path, flags, Mode::from_raw_mode(0o666)).map_err(failed)?;
    for _ in 0..PATIENCE {
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(Errno::WOULDBLOCK | Errno::INTR) => std::thread::sleep(Duration::from_millis(1)),
            Err(error) => return Err(failed(error)),
        }
    }
    Err(Error::unavailable("another process has been recovering this store for a minute"))
}

fn failed(error: Errno) -> Error {
    io_error("recover what was written before the machine went down", error)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn notes(writer: u64, records: Vec<Record>) -> Notes {
        let header = Header { epoch: 1, writer, boot_id: "b".into() };
        Notes { header, records, kept: false }
    }

    fn intent(number: u64, inode: u64, body: &'static str) -> Record {
        let (file, body) = (FileId { inode, born: (1, 2) }, Bytes::from_static(body.as_bytes()));
        Record::Intent(Intent { number, stamp: number, file, key: "x".into(), body })
    }

    fn note(stamp: u64, state: State) -> Record {
        Record::Note(Note { stamp, key: "x".into(), state })
    }

    fn plan_of(segments: &[Notes]) -> Plan {
        let segments: Vec<_> = segments.iter().collect();
        plan(&segments, &Floors::default()).remove("x").unwrap_or_default()
    }

    #[test]
    fn the_last_stamp_decides_whichever_segment_it_is_in() {
        let early = || notes(1, vec![intent(1, 1, "early"), note(10, State::Content(1))]);
        // The same number, of another writer.
        let late = || notes(2, vec![intent(1, 2, "late"), note(20, State::Content(1))]);
        for segments in [[early(), late()], [late(), early()]] {
            let plan = plan_of(&segments);
            let state = Some(Wanted::Content("late".into()));
            assert_eq!(plan.last, Some(Last { stamp: 20, state }));
            assert_eq!((plan.torn.len(), plan.segments.len()), (0, 2));
        }
        let as_it_is = notes(3, vec![note(30, State::AsItIs)]);
        assert_eq!(plan_of(&[as_it_is, late()]).last, Some(Last { stamp: 30, state: None }));
    }

    /// The number of a refused write's inode is free for a file that has nothing to do with it.
    #[test]
    fn an_intent_that_came_to_nothing_is_not_looked_after() {
        let open = notes(1, vec![intent(1, 7, "refused")]);
        assert_eq!(plan_of(std::slice::from_ref(&open)).torn.len(), 1);
        let void = || notes(1, vec![Record::Void(1)]);
        assert_eq!(plan_of(&[open, void()]).torn, []);
        let kept = Notes { kept: true, ..notes(1, vec![intent(1, 7, "refused")]) };
        assert_eq!(plan_of(&[kept, void()]).torn, []);
        let of_another = notes(2, vec![intent(1, 7, "theirs")]);
        assert_eq!(plan_of(&[of_another, void()]).torn.len(), 1);
    }

    #[test]
    fn a_commit_without_its_intent_is_not_guessed() {
        let plan = plan_of(&[notes(1, vec![note(10, State::Content(1))])]);
        assert_eq!(plan.last, Some(Last { stamp: 10, state: Some(Wanted::Unknown) }));
    }
}
