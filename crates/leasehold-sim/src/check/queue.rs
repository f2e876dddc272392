//! The queue: nothing is lost, and every push has one receipt at most.

use std::collections::{BTreeMap, BTreeSet};

use leasehold::protocol::format::lease::Lease;
use leasehold::protocol::format::task::{Bundle, DeadLetter, Receipt, Task, bundle_task};
use leasehold::protocol::layout::queue::{Part, QueueKeys, Unit};
use leasehold::queue::Acked;

use super::replica::Replicas;
use super::{Applied, Verdict};
use crate::objects::{Objects, Stored};
use crate::world::{Life, Micros, State};

/// How long it takes from seeing a receipt to knowing it.
const SETTLING: Micros = 50_000;

/// What is known of one push.
#[derive(Debug, Default)]
pub(super) struct Push {
    pub(super) id: String,
    /// Its receipt: nonce, worker, token, when.
    receipt: Option<(String, String, u64, Micros)>,
    letter: bool,
    /// Its receipt gave way in a replica to one that names it, and came to the bucket as that.
    named: bool,
    /// Somebody removed it on purpose, or it gave way to another of its name.
    pub(super) removed: bool,
    /// Whether its receipt came from a replica, whose worker had no lease in the bucket.
    relaxed: bool,
    /// It was pending, and not only scheduled.
    pending: bool,
    /// It was scheduled: one that was pushed with its name meanwhile counts.
    scheduled: bool,
    /// A write of it arrived late: it may be back after it was done.
    late: bool,
    /// Whether a worker was told to be the first to complete it.
    first: bool,
}

impl Push {
    /// Done, given up, or removed on purpose.
    pub(super) fn is_over(&self) -> bool {
        self.receipt.is_some() || self.named || self.letter || self.removed
    }
}

/// What is known of the queue.
#[derive(Debug)]
pub struct QueueCheck {
    pub(super) keys: QueueKeys,
    pub(super) pushes: BTreeMap<String, Push>,
    /// The marks of all receipts that ever stood in the bucket.
    pub(super) recorded: BTreeSet<String>,
    /// What is known of the nodes' replicas.
    pub(super) replicas: Replicas,
    /// Which lives have seen which receipts, and since when.
    seen: BTreeMap<(u32, String), Micros>,
    /// When leases were taken, by name and token.
    claimed: BTreeMap<(String, u64), Micros>,
    /// When leases were created where there was none, by name and token.
    created: BTreeMap<(String, u64), Micros>,
    /// When a task or receipt of a name was last there.
    work_gone: BTreeMap<String, Micros>,
    receipt_gone: BTreeMap<String, Micros>,
    /// Tasks of bundles of which a worker said that they are done.
    pieces: BTreeSet<String>,
    /// How many completions there were.
    pub completions: u64,
}

impl QueueCheck {
    /// For the queue with this name.
    pub fn new(name: &str, shards: u16) -> Option<Self> {
        Some(Self {
            keys: QueueKeys::new(name, shards).ok()?,
            pushes: BTreeMap::new(),
            recorded: BTreeSet::new(),
            replicas: Replicas::default(),
            seen: BTreeMap::new(),
            claimed: BTreeMap::new(),
            created: BTreeMap::new(),
            work_gone: BTreeMap::new(),
            receipt_gone: BTreeMap::new(),
            pieces: BTreeSet::new(),
            completions: 0,
        })
    }

    /// Where its objects are.
    pub fn keys(&self) -> &QueueKeys {
        &self.keys
    }

    /// Checks a change of one of its objects.
    pub fn applied(&mut self, state: &State, applied: &Applied<'_>) -> Verdict {
        let key = applied.key;
        if !key.starts_with(self.keys.everything()) {
            return Ok(());
        }
        match self.keys.parse_part(key) {
            Some((unit, Part::Work)) => return self.work(state, applied, &unit, false),
            Some((unit, Part::Lease)) => {
                if let Some(after) = &applied.after
                    && let Ok(lease) = Lease::parse(&after.body)
                {
                    let claim = (unit.name(), lease.token.unwrap_or(0));
                    if applied.before.is_none() {
                        self.created.entry(claim.clone()).or_insert(state.now);
                    }
                    self.claimed.entry(claim).or_insert(state.now);
                }
                return Ok(());
            }
            None => {}
        }
        if let Some((_, id)) = self.keys.parse_scheduled(key) {
            return self.work(state, applied, &Unit::Task(id), true);
        }
        if let Some(name) = self.keys.parse_record(key) {
            return match key.starts_with(&self.keys.completed()) {
                true => self.receipt(state, applied, &name),
                false => self.letter(state, applied, &name),
            };
        }
        Ok(())
    }

    fn work(
        &mut self,
        state: &State,
        applied: &Applied<'_>,
        unit: &Unit,
        scheduled: bool,
    ) -> Verdict {
        let before = applied.before.as_ref().map(|there| incarnation(unit, there));
        let after = applied.after.as_ref().map(|there| incarnation(unit, there));
        let name = unit.name();
        let disk = state.nodes[applied.life.node].disk;
        if let Some(before) = &before
            && after.as_ref() != Some(before)
        {
            if !scheduled {
                self.work_gone.insert(name.clone(), state.now);
            }
            let other = self.pushes.iter().any(|(inc, push)| push.id == name && inc != before);
            let newer = self.newer_stands(&state.objects, unit, applied.before.as_ref());
            let done = self.done_in_bundle(state, &name, before);
            let receipt = self.keys.receipt(unit).ok();
            let standing = receipt.is_some_and(|key| state.objects.get(&key).is_some());
            let born = self.replicas.born_on(before);
            let push = self.pushes.entry(before.clone()).or_default();
            let over = push.is_over();
            let may = match applied.label {
                // The same in a sync: of what was pushed there, and of nothing else (FIELD.md row 14).
                _ if disk.is_some() => other && born == disk,
                // Taken away on purpose.
                "purge" => true,
                // The pusher found that the name was completed meanwhile.
                "push" => other,
                _ => false,
            };
            // Of a name for which a later push is recorded as done or given up.
            // Or where deletes take no condition: it was looked at, and replaced before it was deleted.
            let may = may
                || newer
                || done
                || (push.scheduled && standing)
                || (state.objects.deletes_blindly && other);
            // Promoted, or dropped for another with its name.
            let moved = scheduled && (push.pending || other);
            if may || (moved && !push.pending) {
                push.removed = true;
            }
            if !(over || may || moved) {
                return Err(format!(
                    "push {} was deleted, and was neither done nor given up",
                    short(before)
                ));
            }
        }
        if let Some(after) = after {
            let back = !scheduled && before.as_ref() != Some(&after);
            let push = self.pushes.entry(after.clone()).or_default();
            let began = self.replicas.sync_began(applied.life);
            let done = push.receipt.as_ref().map(|(_, _, _, done)| *done);
            // A sync that began after it was done must know that (FIELD.md row 15). One that was under way
            // may be sending again what it had no answer to.
            if back && !applied.late && done.zip(began).is_some_and(|(done, began)| done < began) {
                return Err(format!("push {} is back after it was done", short(&after)));
            }
            push.id = name;
            // Also one that is sent again because its answer got lost and it is not there any more.
            push.late |= applied.late || (back && push.pending);
            push.pending |= !scheduled;
            push.scheduled |= scheduled;
        }
        Ok(())
    }

    /// Whether this task left a bundle late, and whoever had that by then did it there. Or it failed for
    /// one holder of the bundle, was retried as a dead letter, and another holder had done it: then the
    /// bundle's receipt has its result.
    fn done_in_bundle(&self, state: &State, name: &str, incarnation: &str) -> bool {
        if !self.pieces.contains(name) {
            return false;
        }
        let bundle = incarnation.rsplit_once('.').and_then(|(bundle, _)| self.pushes.get(bundle));
        bundle.is_some_and(|bundle| bundle.receipt.is_some())
            || self.has_result(&state.objects, name)
    }

    /// Whether the receipt of the bundle that this task was in has its result.
    pub(super) fn has_result(&self, objects: &Objects, name: &str) -> bool {
        let Some((bundle, n)) = name.rsplit_once('.') else { return false };
        let Ok(n) = n.parse::<usize>() else { return false };
        let receipts = format!("{}{bundle}-", self.keys.completed());
        objects.under(&receipts).any(|(_, there)| {
            let results = Receipt::parse(&there.body).ok().and_then(|receipt| receipt.results);
            results.is_some_and(|results| results.get(n).is_some_and(Option::is_some))
        })
    }

    /// Whether there is a receipt or dead letter of a later push of the same name.
    pub(super) fn newer_stands(
        &self,
        objects: &Objects,
        unit: &Unit,
        work: Option<&Stored>,
    ) -> bool {
        let Unit::Task(id) = unit else { return false };
        let Some(work) = work else { return false };
        let ours = Task::parse(&work.body, id, work.version.as_str()).pushed_at;
        let read = |key: Option<leasehold::Key>| key.and_then(|key| objects.get(&key));
        let receipt = read(self.keys.receipt(unit).ok());
        let receipt = receipt.and_then(|there| Receipt::parse(&there.body).ok()?.pushed_at);
        let letter = read(self.keys.dead_letter(id).ok());
        let letter = letter.and_then(|there| DeadLetter::parse(&there.body).ok()?.task.pushed_at);
        receipt.max(letter).zip(ours).is_some_and(|(there, ours)| there > ours)
    }

    fn receipt(&mut self, state: &State, applied: &Applied<'_>, name: &str) -> Verdict {
        if applied.before.is_some() && applied.after.is_none() {
            self.receipt_gone.insert(name.to_owned(), state.now);
        }
        let Some(after) = &applied.after else { return Ok(()) };
        let receipt = Receipt::parse(&after.body).map_err(|error| error.to_string())?;
        self.recorded.insert(receipt.nonce.clone());
        if applied.late || !state.lives(applied.life) {
            self.replicas.came_late(&receipt.nonce);
        }
        for replaced in &receipt.replaced {
            let there = self.recorded.contains(&replaced.nonce);
            if !there && !self.replicas.has_done(&replaced.nonce, &replaced.incarnation) {
                let what = short(&replaced.incarnation);
                return Err(format!("push {what} is named as done, and nobody did it"));
            }
            self.pushes.entry(replaced.incarnation.clone()).or_default().named = true;
        }
        let push = self.pushes.entry(receipt.incarnation.clone()).or_default();
        if let Some((nonce, worker, token, _)) = &push.receipt {
            return match *nonce == receipt.nonce {
                true => Ok(()),
                false => Err(format!(
                    "a second receipt of push {}: by {} with token {}, after {worker} with {token}",
                    short(&receipt.incarnation),
                    receipt.worker,
                    receipt.token
                )),
            };
        }
        push.receipt = Some((receipt.nonce, receipt.worker, receipt.token, state.now));
        push.relaxed = state.nodes[applied.life.node].disk.is_some();
        // It may be known by this alone: it was pushed and done where the bucket was out of reach.
        push.id = name.to_owned();
        self.completions += 1;
        // A bundle is done when each of its tasks is, or has left it.
        if let Some((bundle, count)) = name.rsplit_once('-')
            && let Ok(count) = count.parse::<u32>()
            && bundle.len() == 26
        {
            for n in 0..count {
                let task = bundle_task(bundle, n);
                let left = self.pushes.values().any(|push| push.id == task);
                if !left && !self.pieces.contains(&task) {
                    return Err(format!("the bundle is recorded as done, and task {n} is not"));
                }
            }
        }
        Ok(())
    }

    fn letter(&mut self, state: &State, applied: &Applied<'_>, name: &str) -> Verdict {
        let parse = |stored: &Option<Stored>| {
            stored.as_ref().and_then(|there| DeadLetter::parse(&there.body).ok())
        };
        if let Some(after) = parse(&applied.after) {
            let push = self.pushes.entry(after.task.incarnation).or_default();
            push.id = name.to_owned();
            push.letter = true;
        }
        if let (Some(before), None) = (parse(&applied.before), &applied.after) {
            let inc = before.task.incarnation;
            let done = self.pushes.get(&inc).is_some_and(|push| push.receipt.is_some());
            let done = done || self.done_in_bundle(state, name, &inc);
            let again = self.pushes.iter().any(|(other, push)| push.id == name && *other != inc);
            if !(done || again || applied.label == "discard") {
                return Err(format!("the dead letter of push {} is gone", short(&inc)));
            }
        }
        Ok(())
    }

    /// A node was shown a receipt.
    pub fn witnessed(&mut self, now: Micros, life: Life, key: &str, body: &[u8]) {
        if key.starts_with(&self.keys.completed())
            && let Ok(receipt) = Receipt::parse(body)
        {
            self.seen.entry((life.pid(), receipt.incarnation)).or_insert(now);
        }
    }

    /// A worker was handed a task.
    pub fn started(
        &mut self,
        state: &State,
        life: Life,
        id: &str,
        inc: &str,
        token: u64,
    ) -> Verdict {
        let Some(push) = self.pushes.get(inc) else { return Ok(()) };
        let bundle = inc.rsplit_once('.').and_then(|(bundle, _)| self.pushes.get(bundle));
        if push.late || bundle.is_some_and(|push| push.late) || state.objects.deletes_blindly {
            return Ok(());
        }
        // Before it claimed it, that is: two jobs of one worker may have it at the same time.
        let seen = self.seen.get(&(life.pid(), inc.to_owned()));
        let claimed = self.claimed.get(&(id.to_owned(), token));
        // Whoever reads it to settle an answer that got lost has it twice before it acts on it.
        if seen.zip(claimed).is_some_and(|(seen, claimed)| seen + SETTLING < *claimed) {
            return Err(format!("{id}: a worker was handed a task whose receipt it had seen"));
        }
        if let (Some((_, _, _, done)), Some(created)) =
            (&push.receipt, self.created.get(&(id.to_owned(), token)))
            && done < created
            && !push.relaxed
        {
            return Err(format!(
                "{id}: a worker claimed a task that was done, and gone, and was handed it"
            ));
        }
        Ok(())
    }

    /// Whether this token is of the task's own lease, and not of a bundle's.
    pub fn is_single(&self, objects: &Objects, id: &str, token: u64) -> bool {
        let key = self.keys.part(&Unit::Task(id.to_owned()), Part::Lease);
        let there = key.ok().and_then(|key| objects.get(&key));
        let lease = there.and_then(|there| Lease::parse(&there.body).ok());
        lease.is_some_and(|lease| lease.token == Some(token))
    }

    /// A worker says that it has done a task of a bundle.
    pub fn done_piece(&mut self, id: &str) {
        self.pieces.insert(id.to_owned());
    }

    /// Which push of a name the receipt that stands there is about.
    pub fn receipt_of(&self, state: &State, id: &str) -> Option<String> {
        let key = self.keys.receipt(&Unit::Task(id.to_owned())).ok()?;
        Some(Receipt::parse(&state.objects.get(&key)?.body).ok()?.incarnation)
    }

    /// A worker was told what its ack came to.
    pub fn acked(
        &mut self,
        now: Micros,
        life: Life,
        (worker, token): (&str, u64),
        inc: &str,
        acked: Acked,
        standing: Option<String>,
    ) -> Verdict {
        self.seen.entry((life.pid(), inc.to_owned())).or_insert(now);
        let Some(push) = self.pushes.get_mut(inc) else {
            return Err(format!("push {} was acked, and never was", short(inc)));
        };
        let ours =
            push.receipt.as_ref().is_some_and(|(_, by, with, _)| by == worker && *with == token);
        match acked {
            Acked::First if !ours => {
                Err(format!("{worker} was told to be the first, and the receipt is not its own"))
            }
            Acked::First if std::mem::replace(&mut push.first, true) => {
                Err("two were told to be the first".to_owned())
            }
            // Unless another job of the same worker was told so, of a task that came back.
            // Or its receipt has given way to that of a later push before it was told.
            Acked::Again if ours && !push.first && standing.as_deref() == Some(inc) => {
                Err(format!("{worker} was told that somebody else completed what it had completed"))
            }
            _ => Ok(()),
        }
    }

    /// A pusher was told that a task of this name is new, pending or completed.
    pub fn pushed(
        &mut self,
        state: &State,
        since: Micros,
        pushed: &leasehold::queue::Pushed,
    ) -> Verdict {
        use leasehold::queue::Outcome;
        let unit = Unit::Task(pushed.id.clone());
        let lately = |gone: &BTreeMap<String, Micros>| {
            gone.get(&pushed.id).is_some_and(|gone| *gone >= since)
        };
        let there = |key: Result<leasehold::Key, _>| {
            key.is_ok_and(|key: leasehold::Key| state.objects.get(&key).is_some())
        };
        let fine = match pushed.outcome {
            Outcome::New => {
                pushed.incarnation.as_ref().is_some_and(|inc| self.pushes.contains_key(inc))
            }
            Outcome::AlreadyPending => {
                there(self.keys.part(&unit, Part::Work).map_err(drop)) || lately(&self.work_gone)
            }
            Outcome::AlreadyCompleted => {
                there(self.keys.receipt(&unit).map_err(drop)) || lately(&self.receipt_gone)
            }
        };
        match fine {
            true => Ok(()),
            false => Err(format!(
                "{}: pushed, and told {:?}, which it is not",
                pushed.id, pushed.outcome
            )),
        }
    }

    /// Once everything has come to rest: every push was done, given up, or removed on purpose.
    pub fn at_the_end(&self) -> Verdict {
        for (inc, push) in &self.pushes {
            if !push.is_over() && !push.id.is_empty() {
                return Err(format!("push {} of {} is lost", short(inc), push.id));
            }
        }
        self.promises_kept()
    }

    /// What is still there that should not be.
    pub fn leftovers(&self, state: &State) -> Option<String> {
        let prefixes = [self.keys.all_pending(), self.keys.bundles(), self.keys.scheduled()];
        prefixes.iter().find_map(|prefix| {
            // Where nothing can be deleted safely, leases stay.
            let mut left = state.objects.under(prefix).map(|(key, _)| key.to_string());
            left.find(|key| !(state.objects.deletes_blindly && key.ends_with("/lease.json")))
        })
    }
}

/// Which push of a task or bundle this is.
pub(super) fn incarnation(unit: &Unit, there: &Stored) -> String {
    match unit {
        Unit::Task(id) => Task::parse(&there.body, id, there.version.as_str()).incarnation,
        Unit::Bundle(id, _) => Bundle::parse(&there.body, id)
            .map_or_else(|_| there.version.as_str().to_owned(), |bundle| bundle.incarnation),
    }
}

pub(super) fn short(incarnation: &str) -> &str {
    incarnation.get(..8).unwrap_or(incarnation)
}
