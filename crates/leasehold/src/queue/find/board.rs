//! What the callers of a worker share of one queue: what to try next, and what came of it.
//!
//! Never locked while a request is under way. So whoever has claimed a task goes on with it while
//! somebody else lists what is left: a listing can take as long as a hundred other requests.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use leasehold_protocol::layout::queue::Unit;

use super::super::Queue;
use super::super::claim::Tried;
use super::{Candidate, Looked, UNREADABLE};
use crate::Result;
use crate::env::BootTime;
use crate::lease::Desk;
use crate::store::{Entry, Kind};

/// How many vain tries, one after the other, before a list is given up.
const VAIN: u32 = 12;
/// After how many claims, one after the other, what comes next is claimed without a look first: by then
/// we are on ground that nobody else works on.
const STREAK: u32 = 4;
/// How many leases are remembered.
const LOOKED: usize = 20_000;
/// How often to tend to what is due while there is something free: a directory is read for nothing.
const TEND: Duration = Duration::from_secs(60);
const TEND_NAMES: Duration = Duration::from_secs(1);
/// How many candidates are asked at a time whether they have a lease, and how many that had are remembered.
const ASKED: usize = 2000;
const MET: usize = 1000;

/// Shared by a worker's callers and its finder.
#[derive(Debug)]
pub(in crate::queue) struct Board {
    queue: Queue,
    worker: String,
    /// Whether names are cheaper to read than keys: in a directory.
    by_name: bool,
    notes: Mutex<Notes>,
}

#[derive(Debug, Default)]
struct Notes {
    candidates: VecDeque<Candidate>,
    /// Whether nobody got in the way while the last list was worked through. Not known at first.
    alone: Option<bool>,
    /// Vain tries with the present candidates, one after the other.
    vain: u32,
    /// Whether there was any.
    disturbed: bool,
    /// Claims since the last vain try.
    streak: u32,
    /// Whether anything came of the last list.
    fruitful: bool,
    /// What we are trying to get, or got: a list that was made before we had it shows it as free,
    /// and it would look as if somebody else had been faster.
    ours: HashMap<Unit, Ours>,
    /// Leases that were looked into: not again before this, while they stay in this version.
    looked: HashMap<Unit, Looked>,
    /// What had somebody else's lease, where names are read,
    met: VecDeque<Unit>,
    /// and what we claimed: it may come back. Fast workers forget the most of it.
    claimed: VecDeque<Unit>,
    /// From which candidate on to ask for leases next.
    asked: usize,
    /// When to tend to what is due next.
    tend: Option<BootTime>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ours {
    /// A claim is under way.
    Trying,
    /// It is claimed, or was: until the next list.
    Taken,
}

impl Board {
    pub fn new(queue: Queue, worker: String) -> Self {
        let by_name = queue.store().kind() == Kind::Directory;
        Self { queue, worker, by_name, notes: Mutex::default() }
    }

    fn notes(&self) -> MutexGuard<'_, Notes> {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next candidate that is known.
    pub fn next(self: &Arc<Self>) -> Option<Attempt> {
        self.next_if(|_| true)
    }

    /// The same, unless that is a bundle, of which nobody needs two: whoever claims one has the
    /// finder, and whoever waits for that may get a piece of it.
    pub fn next_single(self: &Arc<Self>) -> Option<Attempt> {
        self.next_if(|candidate| !candidate.is_bundle())
    }

    fn next_if(self: &Arc<Self>, wanted: impl FnOnce(&Candidate) -> bool) -> Option<Attempt> {
        let mut notes = self.notes();
        match notes.candidates.front() {
            Some(first) if wanted(first) => self.attempt(&mut notes),
            _ => None,
        }
    }

    /// Adds what a listing found, and takes the first of it.
    pub(super) fn publish(self: &Arc<Self>, found: Vec<Candidate>) -> Option<Attempt> {
        let mut notes = self.notes();
        notes.candidates.extend(found);
        self.attempt(&mut notes)
    }

    fn attempt(self: &Arc<Self>, notes: &mut Notes) -> Option<Attempt> {
        let candidate = match notes.candidates.pop_front()? {
            Candidate::Free(unit) if notes.alone == Some(false) && notes.streak < STREAK => {
                Candidate::Doubtful(unit)
            }
            candidate => candidate,
        };
        let unit = candidate.unit().clone();
        notes.ours.insert(unit.clone(), Ours::Trying);
        Some(Attempt { candidate, trying: Trying { board: self.clone(), unit, told: false } })
    }

    /// Adds what is to be tried before everything else.
    pub(super) fn put_first(&self, found: Vec<Candidate>) {
        if found.is_empty() {
            return;
        }
        let mut notes = self.notes();
        // Once is enough: the second try would look as if somebody else had been faster.
        let units: HashSet<&Unit> = found.iter().map(Candidate::unit).collect();
        notes.candidates.retain(|other| !units.contains(other.unit()));
        for candidate in found.into_iter().rev() {
            if notes.ours.get(candidate.unit()) != Some(&Ours::Trying) {
                notes.candidates.push_front(candidate);
            }
        }
    }

    /// Whether it is time to tend to what is due. Not at the very beginning, nor where there is nothing else to
    /// do: then everything is looked at.
    pub fn is_to_tend(&self) -> bool {
        let now = self.now();
        let mut notes = self.notes();
        if notes.candidates.is_empty() {
            return false;
        }
        let first = || now.plus(self.tends_every());
        *notes.tend.get_or_insert_with(first) <= now
    }

    /// That was done, from this time on: not again for a while, and most of the time goes into tasks.
    pub fn tended(&self, since: BootTime) {
        let now = self.now();
        let pause = now.since(since).saturating_mul(4).max(self.tends_every());
        self.notes().tend = Some(now.plus(pause));
    }

    fn tends_every(&self) -> Duration {
        if self.by_name { TEND_NAMES } else { TEND }
    }

    /// What may have a lease that is nobody's any more: what was met, and some of the candidates. Not what was
    /// looked into a moment ago.
    pub(super) fn to_tend(&self) -> Vec<Unit> {
        let now = self.now();
        let mut notes = self.notes();
        // Others each time.
        let from = std::mem::take(&mut notes.asked);
        let mut met = std::mem::take(&mut notes.met);
        met.append(&mut notes.claimed);
        let is_due = |unit: &Unit| notes.looked.get(unit).is_none_or(|looked| looked.again <= now);
        // Each once.
        let mut all = HashSet::new();
        let met = met.into_iter().filter(|unit| all.insert(unit.clone()));
        let (mut units, later): (Vec<_>, Vec<_>) = met.partition(is_due);
        let candidates = &notes.candidates;
        let from = if from < candidates.len() { from } else { 0 };
        let some = candidates.iter().cycle().skip(from).take(candidates.len().min(ASKED));
        let some = some.map(Candidate::unit).filter(|unit| is_due(unit));
        units.extend(some.filter(|unit| all.insert((*unit).clone())).cloned());
        // What is not due yet is not forgotten.
        notes.met = later.into();
        let many = notes.met.len().saturating_sub(MET);
        notes.met.drain(..many);
        notes.asked = from + ASKED;
        units
    }

    /// This has a lease, by which it is found again.
    pub(super) fn meet(&self, unit: &Unit) {
        self.notes().meet(unit);
    }

    /// What became of a candidate.
    fn tried(&self, unit: &Unit, tried: &Tried) {
        let mut notes = self.notes();
        match tried {
            Tried::Task(_) | Tried::Bundle(_) => {
                if let Some(ours) = notes.ours.get_mut(unit) {
                    *ours = Ours::Taken;
                }
                notes.vain = 0;
                notes.streak = notes.streak.saturating_add(1);
                notes.fruitful = true;
                if self.by_name {
                    keep(&mut notes.claimed, unit);
                }
                match tried {
                    // Nobody needs to look into our own lease while it is as we wrote it.
                    Tried::Task(held) if !self.by_name => {
                        let again = self.now().plus(held.trusted_for());
                        let version = Some(held.lease_version());
                        notes.note(unit, Looked { version, desk: None, again });
                    }
                    _ if notes.looked.is_empty() => {}
                    _ => _ = notes.looked.remove(unit),
                }
                return;
            }
            Tried::Later(left) => self.not_before(&mut notes, unit, *left),
            // What cannot be read is not looked at again and again.
            Tried::Unreadable => self.not_before(&mut notes, unit, UNREADABLE),
            // A lease that may yet turn out to be nobody's has its time already.
            Tried::Taken | Tried::Over if notes.looked.contains_key(unit) => {
                if self.by_name && matches!(tried, Tried::Taken) {
                    notes.meet(unit);
                }
            }
            Tried::Taken | Tried::Over => {
                if self.by_name && matches!(tried, Tried::Taken) {
                    notes.meet(unit);
                }
                (notes.alone, notes.disturbed) = (Some(false), true);
                notes.vain += 1;
                notes.streak = 0;
                if notes.vain >= VAIN {
                    // The list is of no use any more.
                    notes.candidates.clear();
                } else if !notes.candidates.is_empty() {
                    // Somebody else works from here on: elsewhere may be better.
                    let random = self.queue.store().env().random();
                    let jump = random % notes.candidates.len() as u64;
                    notes.candidates.rotate_left(jump as usize);
                }
            }
        }
        notes.ours.remove(unit);
    }

    /// A lease is not looked into again before this has passed, unless it changes.
    fn not_before(&self, notes: &mut Notes, unit: &Unit, span: Duration) {
        let again = self.now().plus(span);
        match notes.looked.get_mut(unit) {
            Some(looked) => looked.again = again,
            None => notes.note(unit, Looked { version: None, desk: None, again }),
        }
    }

    pub(super) fn note(&self, unit: &Unit, looked: Looked) {
        self.notes().note(unit, looked);
    }

    /// Whether this state of a lease was looked into already, and for how long it is to be left
    /// alone.
    pub(super) fn left_alone(&self, unit: &Unit, lease: &Entry) -> Option<Duration> {
        let notes = self.notes();
        let looked = notes.looked.get(unit)?;
        let now = self.now();
        let same = looked.version.is_none() || looked.version == lease.version;
        (same && looked.again > now).then(|| looked.again.since(now))
    }

    /// Where to ask for its lease.
    pub(super) fn desk_for(&self, unit: &Unit) -> Result<Desk> {
        match self.notes().looked.get(unit).and_then(|looked| looked.desk.clone()) {
            // It remembers for how long it has seen the lease unchanged.
            Some(desk) => Ok(desk),
            None => self.queue.desk(unit, &self.worker),
        }
    }

    pub(super) fn queue(&self) -> &Queue {
        &self.queue
    }

    /// Forgets the present candidates: a new list is to be made. Says whether anything came of the
    /// last one.
    pub(super) fn begin(&self) -> bool {
        let mut notes = self.notes();
        notes.candidates.clear();
        (notes.vain, notes.streak) = (0, 0);
        // Whoever worked through a list undisturbed is alone, as far as it knows.
        let disturbed = std::mem::take(&mut notes.disturbed);
        // Where the last list was of no use, the same again is not either.
        let fruitful = std::mem::take(&mut notes.fruitful);
        notes.alone = match (notes.alone, disturbed) {
            (_, true) => Some(false),
            (None, false) if fruitful => Some(true),
            (Some(false), false) if fruitful => None,
            (alone, false) => alone,
        };
        fruitful
    }

    /// A listing of keys is about to be asked for: it shows the leases that we have by now.
    pub(super) fn listing(&self) {
        self.notes().ours.retain(|_, ours| *ours == Ours::Trying);
    }

    /// Whether what a list shows as free is ours, or about to be.
    pub(super) fn is_ours(&self, unit: &Unit) -> bool {
        self.notes().ours.contains_key(unit)
    }

    /// Leaves those that are not ours. Names show no leases, so what we took is passed over once: by
    /// the next time it is done, or has a lease by which it is found, or was pushed again.
    pub(super) fn pass_over(&self, units: &mut Vec<Unit>) {
        let mut notes = self.notes();
        units.retain(|unit| !notes.ours.contains_key(unit));
        notes.ours.retain(|_, ours| *ours == Ours::Trying);
    }

    pub(super) fn alone(&self) -> Option<bool> {
        self.notes().alone
    }

    pub(super) fn add(&self, candidates: Vec<Candidate>) {
        self.notes().candidates.extend(candidates);
    }

    /// There is nothing in the queue.
    pub(super) fn forget(&self) {
        let mut notes = self.notes();
        notes.looked.clear();
        notes.alone = None;
    }

    fn now(&self) -> BootTime {
        self.queue.store().env().clock().boot()
    }
}

impl Notes {
    fn meet(&mut self, unit: &Unit) {
        keep(&mut self.met, unit);
    }

    fn note(&mut self, unit: &Unit, looked: Looked) {
        if self.looked.len() >= LOOKED {
            self.looked.clear();
        }
        self.looked.insert(unit.clone(), looked);
    }
}

fn keep(units: &mut VecDeque<Unit>, unit: &Unit) {
    if units.len() >= MET {
        units.pop_front();
    }
    units.push_back(unit.clone());
}

/// A candidate, and that it is being tried.
#[derive(Debug)]
pub(in crate::queue) struct Attempt {
    pub candidate: Candidate,
    pub trying: Trying,
}

/// A claim that is under way. Dropping it ends that: whoever gives up waiting must not keep the task
/// from the others here for ever.
#[derive(Debug)]
pub(in crate::queue) struct Trying {
    board: Arc<Board>,
    unit: Unit,
    told: bool,
}

impl Trying {
    /// What came of it.
    pub fn came_to(mut self, tried: &Tried) {
        self.told = true;
        self.board.tried(&self.unit, tried);
    }
}

impl Drop for Trying {
    fn drop(&mut self) {
        if !self.told {
            self.board.notes().ours.remove(&self.unit);
        }
    }
}
