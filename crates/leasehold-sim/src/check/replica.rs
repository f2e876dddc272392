//! Replicas: what a node was told, it keeps; and the bucket learns of all of it.

use std::collections::{BTreeMap, BTreeSet};

use leasehold::protocol::format::lease::Lease;
use leasehold::protocol::format::task::{Bundle, DeadLetter, Receipt, Task};
use leasehold::protocol::layout::queue::{Part, Unit};
use leasehold::protocol::layout::sync::SyncKeys;
use leasehold::queue::{Outcome, Pushed};

use super::queue::{Push, QueueCheck, incarnation, short};
use super::{Applied, Verdict};
use crate::disk::Disk;
use crate::objects::Stored;
use crate::world::{DiskId, Life, Micros, State};

/// What is known of the nodes' replicas.
#[derive(Debug, Default)]
pub struct Replicas {
    /// On which disk a push was first written that was made there.
    born: BTreeMap<String, DiskId>,
    /// Pushes that somebody was told are made: by their incarnations, and their names, and whether
    /// these were chosen.
    promised: BTreeMap<String, (String, bool)>,
    /// Bundles, by their names.
    bundles: BTreeSet<String>,
    /// The marks of receipts that workers of a replica wrote, and what they are about.
    done: BTreeMap<(DiskId, String), String>,
    /// Pushes of which a disk has, or had, a receipt or a dead letter.
    ended: BTreeSet<(DiskId, String)>,
    /// Names that were pending on a disk, and in which pushes.
    pending: BTreeMap<(DiskId, String), BTreeSet<String>>,
    /// Marks of receipts that gave way on their disk to that of another push.
    outdone: BTreeSet<String>,
    /// Marks of receipts that reached the bucket after those who had sent them were gone, or had given up
    /// waiting: another sync may have counted them in vain by then.
    late: BTreeSet<String>,
    /// Since when a process has its sync's lock.
    syncing: BTreeMap<u32, Micros>,
    /// The duplicates that were ever noted on a disk, and how many tasks each is: old ones become a number.
    noted: BTreeMap<DiskId, BTreeMap<String, u64>>,
    /// How many tasks on a disk may have come to an end in vain: it began, and nobody was told to be first.
    vain: BTreeMap<DiskId, u64>,
}

impl Replicas {
    /// On which disk a push was made, if it was on one.
    pub fn born_on(&self, incarnation: &str) -> Option<DiskId> {
        self.born.get(incarnation).copied()
    }

    /// This receipt reached the bucket late.
    pub fn came_late(&mut self, mark: &str) {
        self.late.insert(mark.to_owned());
    }

    /// Whether some node has recorded this completion for itself.
    pub fn has_done(&self, mark: &str, push: &str) -> bool {
        self.done.iter().any(|((_, done), what)| done == mark && what == push)
    }

    /// When a process began its present sync.
    pub fn sync_began(&self, life: Life) -> Option<Micros> {
        self.syncing.get(&life.pid()).copied()
    }
}

impl State {
    /// Which replica a process works on.
    pub fn replica_of(&self, life: Life) -> Option<String> {
        let disk = self.nodes[life.node].disk?;
        let key = leasehold::protocol::layout::sync::replica().ok()?;
        let stored = self.disks[disk].objects.get(&key)?;
        let identity: serde_json::Value = serde_json::from_slice(&stored.body).ok()?;
        identity["id"].as_str().map(str::to_owned)
    }
}

impl QueueCheck {
    /// Checks a change on a machine's disk.
    pub fn applied_here(&mut self, state: &State, disk: DiskId, applied: &Applied<'_>) -> Verdict {
        let key = applied.key;
        if let Some((unit, Part::Work)) = self.keys.parse_part(key) {
            return self.work_here(state, disk, applied, &unit);
        }
        if let Some((_, id)) = self.keys.parse_scheduled(key) {
            return self.scheduled_here(state, disk, applied, &id);
        }
        if self.keys.parse_record(key).is_some() {
            self.record_here(disk, applied, key.starts_with(&self.keys.completed()));
            return Ok(());
        }
        if key == "sync/sync.lock"
            && let Some(after) = &applied.after
            && !same_lease(applied.before.as_ref(), after)
        {
            self.replicas.syncing.insert(applied.life.pid(), state.now);
        }
        if let Ok(sync) = SyncKeys::new(QUEUE)
            && let Some(tasks) = sync.parse_duplicate(key)
        {
            self.replicas.noted.entry(disk).or_default().insert(key.to_owned(), tasks);
        }
        if let Some((_, mark)) = key.rsplit_once('~')
            && key.contains("/duplicates/")
            && applied.before.is_none()
            && let Some(about) = self.replicas.done.get(&(disk, mark.to_owned()))
            && self.stands(state, about, mark)
            && !self.replicas.late.contains(mark)
        {
            let about = short(about);
            return Err(format!("a completion of push {about} is recorded, and counted in vain"));
        }
        match key.contains("/aside/") {
            true => self.aside(applied),
            false => Ok(()),
        }
    }

    /// Work leaves a replica only if it came to an end, here or in the bucket, or another push has its
    /// name, or it is set aside: never because it is not found elsewhere (FIELD.md row 14).
    fn work_here(
        &mut self,
        state: &State,
        disk: DiskId,
        applied: &Applied<'_>,
        unit: &Unit,
    ) -> Verdict {
        let name = unit.name();
        let before = applied.before.as_ref().map(|there| incarnation(unit, there));
        if let Some(after) = &applied.after {
            let pushed = incarnation(unit, after);
            if !is_copy(unit, after) {
                self.replicas.born.entry(pushed.clone()).or_insert(disk);
            }
            self.replicas.pending.entry((disk, name)).or_default().insert(pushed);
            return Ok(());
        }
        let Some(before) = before else { return Ok(()) };
        let over = self.pushes.get(&before).is_some_and(Push::is_over)
            || self.replicas.ended.contains(&(disk, before.clone()));
        let other = self.pushes.iter().any(|(inc, push)| push.id == name && *inc != before);
        let objects = &state.disks[disk].objects;
        let done = self.has_result(objects, &name)
            || self.newer_stands(objects, unit, applied.before.as_ref());
        match over || other || done || self.is_aside(state, disk, unit, &before) {
            true => Ok(()),
            false => {
                Err(format!("push {} is gone from a replica, and is not over", short(&before)))
            }
        }
    }

    fn is_aside(&self, state: &State, disk: DiskId, unit: &Unit, ours: &str) -> bool {
        let keys = SyncKeys::new(QUEUE).and_then(|keys| keys.aside(unit));
        let there = keys.ok().and_then(|key| state.disks[disk].objects.get(&key));
        there.is_some_and(|there| incarnation(unit, there) == ours)
    }

    /// What waits for its time is promoted, or gives way to what has its name.
    fn scheduled_here(
        &mut self,
        state: &State,
        disk: DiskId,
        applied: &Applied<'_>,
        id: &str,
    ) -> Verdict {
        let unit = Unit::Task(id.to_owned());
        if let Some(after) = &applied.after {
            self.replicas.born.entry(incarnation(&unit, after)).or_insert(disk);
        }
        let (Some(before), None) = (&applied.before, &applied.after) else { return Ok(()) };
        let before = incarnation(&unit, before);
        let moved = self.replicas.pending.contains_key(&(disk, id.to_owned()));
        let receipt = self.keys.receipt(&unit).ok();
        let done = receipt.is_some_and(|key| state.disks[disk].objects.get(&key).is_some());
        match moved || done {
            true => Ok(()),
            false => Err(format!("push {} is gone before its time", short(&before))),
        }
    }

    fn record_here(&mut self, disk: DiskId, applied: &Applied<'_>, receipt: bool) {
        let Some(after) = &applied.after else { return };
        let about = match receipt {
            true => Receipt::parse(&after.body).ok().map(|receipt| {
                let before = applied.before.as_ref().and_then(|b| Receipt::parse(&b.body).ok());
                let other = before.filter(|before| before.incarnation != receipt.incarnation);
                self.replicas.outdone.extend(other.map(|other| other.nonce));
                // Else it is a copy of the one that counts.
                if !self.recorded.contains(&receipt.nonce) {
                    let mark = (disk, receipt.nonce);
                    self.replicas.done.insert(mark, receipt.incarnation.clone());
                }
                receipt.incarnation
            }),
            false => DeadLetter::parse(&after.body).ok().map(|letter| letter.task.incarnation),
        };
        self.replicas.ended.extend(about.map(|about| (disk, about)));
    }

    /// Only what somebody removed is set aside.
    fn aside(&self, applied: &Applied<'_>) -> Verdict {
        let Some(after) = &applied.after else { return Ok(()) };
        let Ok(keys) = SyncKeys::new(QUEUE) else { return Ok(()) };
        let name = applied.key.replacen(&keys.set_aside(), &keys.outbox(), 1);
        let Some(unit) = keys.parse_entry(&name) else { return Ok(()) };
        let inc = incarnation(&unit, after);
        let name = unit.name();
        let mut others = self.pushes.values().filter(|push| push.id == name);
        // Or what lost its name to another, and never was anywhere else.
        let lost = !self.pushes.contains_key(&inc) && others.any(|push| push.is_over());
        match lost || self.pushes.get(&inc).is_some_and(Push::is_over) {
            true => Ok(()),
            false => Err(format!("push {} was set aside, and nobody removed it", short(&inc))),
        }
    }

    /// Somebody was told that a task is pushed, by its node's replica.
    pub fn promised(&mut self, pushed: &Pushed, chosen: bool) {
        if let (Outcome::New, Some(incarnation)) = (pushed.outcome, &pushed.incarnation) {
            let push = (pushed.id.clone(), chosen);
            self.replicas.promised.insert(incarnation.clone(), push);
        }
    }

    /// The same of a bundle.
    pub fn promised_bundle(&mut self, tasks: &[String]) {
        let first = tasks.first().and_then(|name| name.rsplit_once('.'));
        let name = first.map(|(bundle, _)| format!("{bundle}-{}", tasks.len()));
        self.replicas.bundles.extend(name);
    }

    /// A worker of a replica is about to end a task, and maybe with it a bundle.
    pub fn ending(&mut self, disk: DiskId) {
        *self.replicas.vain.entry(disk).or_default() += 1;
    }

    /// It was told to be the first on its disk.
    pub fn was_first(&mut self, disk: DiskId) {
        self.replicas.vain.entry(disk).and_modify(|vain| *vain -= 1);
    }

    /// Whatever a node was told to be pushed is over: in that push, or in one that had its name.
    pub(super) fn promises_kept(&self) -> Verdict {
        for (inc, (name, chosen)) in &self.replicas.promised {
            let other = || {
                let mut pushes = self.pushes.iter();
                pushes.any(|(other, push)| push.id == *name && other != inc && push.is_over())
            };
            let over = self.pushes.get(inc).is_some_and(Push::is_over);
            if !(over || (*chosen && other())) {
                return Err(format!("push {} of {name} never reached the bucket", short(inc)));
            }
        }
        let over = |name: &String| self.pushes.values().any(|p| p.id == *name && p.is_over());
        match self.replicas.bundles.iter().find(|name| !over(name)) {
            Some(name) => Err(format!("the bundle {name} never reached the bucket")),
            None => Ok(()),
        }
    }

    /// What a replica still has that it should not.
    pub fn left_here(&self, state: &State) -> Option<String> {
        let sync = SyncKeys::new(QUEUE).ok()?;
        let prefixes =
            [self.keys.all_pending(), self.keys.bundles(), self.keys.scheduled(), sync.outbox()];
        let mut disks = state.disks.iter().enumerate();
        disks.find_map(|(n, disk)| {
            let mut left = prefixes.iter().flat_map(|prefix| disk.objects.under(prefix));
            let work = left.find(|(key, _)| !key.as_str().ends_with("/lease.json"));
            work.map(|(key, _)| format!("disk {n}: {key}"))
        })
    }

    /// Once everything has come to rest: every completion was recorded in the bucket, or is counted as
    /// one that came second.
    ///
    /// Of what somebody removed, or what lost its name to another before the bucket heard of it, or whose
    /// receipt gave way to a later push's, it does not matter.
    pub fn counted(&self, state: &State) -> Verdict {
        let Ok(sync) = SyncKeys::new(QUEUE) else { return Ok(()) };
        for (n, disk) in state.disks.iter().enumerate() {
            let noted = self.replicas.noted.get(&n).cloned().unwrap_or_default();
            let mark = |key: &String| Some(key.rsplit_once('~')?.1.to_owned());
            let marks: BTreeSet<String> = noted.keys().filter_map(mark).collect();
            let (shown, all) = (shown_duplicates(disk, &sync), noted.values().sum::<u64>());
            if shown != all {
                return Err(format!(
                    "disk {n}: {all} duplicates were noted, and {shown} are shown"
                ));
            }
            let ours = self.replicas.done.iter().filter(|((disk, _), _)| *disk == n);
            let mut known = BTreeSet::new();
            for ((_, mark), about) in ours {
                known.insert(mark.clone());
                let gave_way = self.replicas.outdone.contains(mark);
                let matters = !gave_way && self.pushes.get(about).is_some_and(|push| !push.removed);
                if !self.recorded.contains(mark) && !marks.contains(mark) && matters {
                    let about = short(about);
                    return Err(format!(
                        "disk {n}: a completion of push {about} is neither recorded nor counted"
                    ));
                }
            }
            let others = marks.difference(&known).count() as u64;
            if others > self.replicas.vain.get(&n).copied().unwrap_or(0) {
                return Err(format!("disk {n}: {others} more duplicates than completions"));
            }
        }
        Ok(())
    }
}

/// What a replica's status tells: those that stand there, and the number of those that did.
fn shown_duplicates(disk: &Disk, sync: &SyncKeys) -> u64 {
    let state = sync.state().ok().and_then(|key| disk.objects.get(&key));
    let state =
        state.and_then(|state| serde_json::from_slice::<serde_json::Value>(&state.body).ok());
    let state = state.unwrap_or_default();
    let forgetting = state["forgetting"].as_array().cloned().unwrap_or_default();
    let prefix = sync.duplicates();
    let stands = disk.objects.under(&prefix).map(|(key, _)| key.as_str());
    let stands = stands.filter(|key| !forgetting.iter().any(|old| old == key));
    let stands: u64 = stands.filter_map(|key| sync.parse_duplicate(key)).sum();
    stands + state["old_duplicates"].as_u64().unwrap_or(0)
}

impl QueueCheck {
    /// Whether the receipt that stands for a push has this mark.
    fn stands(&self, state: &State, push: &str, mark: &str) -> bool {
        let Some(push) = self.pushes.get(push) else { return false };
        let key = format!("{}{}.json", self.keys.completed(), push.id);
        let mut there = state.objects.under(&key);
        let read = |stored: &Stored| Receipt::parse(&stored.body).ok();
        there.any(|(_, stored)| read(stored).is_some_and(|receipt| receipt.nonce == mark))
    }
}

/// The queue that is replicated.
const QUEUE: &str = crate::scenario::QUEUE;

/// Whether a lock was only renewed.
fn same_lease(before: Option<&Stored>, after: &Stored) -> bool {
    let id = |stored: &Stored| Lease::parse(&stored.body).ok().map(|lease| lease.lease_id);
    before.and_then(id) == id(after)
}

/// Whether it came down from the bucket.
fn is_copy(unit: &Unit, there: &Stored) -> bool {
    match unit {
        Unit::Task(id) => Task::parse(&there.body, id, "").origin.is_some(),
        Unit::Bundle(id, _) => {
            Bundle::parse(&there.body, id).is_ok_and(|bundle| bundle.origin.is_some())
        }
    }
}
