//! Sync down: what there is to do, and what others have done.
//!
//! One LIST per thousand objects shows what is pending. Compared with what the last sync saw, only what
//! is new or changed is fetched. What is here and not there is asked about, one by one. Nothing is
//! touched that the outbox has.
//!
//! What was seen is written down at the end. A crash before that costs the next sync a look at the
//! replica for each task, and no request.

use std::collections::HashSet;

use futures::StreamExt as _;
use leasehold_protocol::cas::{Version, When};
use leasehold_protocol::format::outbox::{Entry, Known, unit_hash};
use leasehold_protocol::format::task as format;
use leasehold_protocol::layout::queue::{Part, Unit};
use leasehold_protocol::lease::{self as lease_decide, Holder, Seen};
use leasehold_protocol::queue::{Claim, History, claim};
use leasehold_protocol::settle::Proof;
use leasehold_protocol::sync::{self as decide, Asked, Bring, LeaseThere, LocalLease, Missing};
use serde::Serialize;

use super::state::State;
use super::up::incarnation;
use super::walk::{Shown, Walk};
use super::{AT_A_TIME, Pair, Replica, local_units};
use crate::queue::{Mode, bundle, wrote};
use crate::store::meter::Usage;
use crate::store::{List, Write};
use crate::{Error, Key, Result, StoreTime};

/// What a sync down did.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Down {
    /// Tasks and bundles that are new here.
    pub new: u64,
    /// Those that were as they had been.
    pub unchanged: u64,
    /// Those that others have by now.
    pub shut: u64,
    /// Those that others let go of.
    pub opened: u64,
    /// Those that are here and were not in the bucket's listing.
    pub missing: u64,
    /// Those that were done, given up or replaced elsewhere, and went.
    pub removed: u64,
    /// Those of which the bucket knows nothing: kept, but not run.
    pub set_aside: u64,
    /// Scheduled ones that were due.
    pub promoted: u64,
    /// Those that something is wrong with; a warning says what.
    pub troubled: u64,
    /// What it took.
    pub usage: Usage,
}

/// Which parts of the queue are listed.
#[derive(Debug, Clone, Copy)]
struct Parts {
    pending: bool,
    bundles: bool,
    scheduled: bool,
    /// Whether it is known that there are no others.
    all: bool,
}

/// What a sync down asks for beside the tasks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asking {
    /// The settings: a conditional GET.
    pub settings: bool,
    /// Whether there are bundles and scheduled tasks, too: a LIST. Else, where there were tasks last time,
    /// only every second time, because tasks are listed anyway.
    pub all_parts: bool,
}

/// What a task has been through, as its lease in the bucket tells it.
#[derive(Debug, Default)]
struct Past {
    history: History,
    /// Of a bundle: the results of what is done.
    progress: serde_json::Map<String, serde_json::Value>,
}

impl Past {
    fn of(seen: &Seen, history: History) -> Self {
        let progress = seen.record.as_ref().map(bundle::progress).unwrap_or_default();
        Self { history, progress }
    }
}

/// What the bucket's listing showed, by the hashes of its keys.
#[derive(Debug, Default)]
struct Listed {
    /// What need not be looked at again, in these states.
    seen: Vec<(u128, u64)>,
    /// All of it, and whether as a bundle.
    listed: Vec<(u128, bool)>,
    /// What did not change since it came down, and should be here.
    expected: HashSet<u128>,
}

/// What became of one task, and the state in which it was seen, if it need not be looked at again.
type Brought = (Down, Option<(u128, u64)>);

impl Down {
    fn add(&mut self, other: &Self) {
        self.new += other.new;
        self.unchanged += other.unchanged;
        self.shut += other.shut;
        self.opened += other.opened;
        self.missing += other.missing;
        self.removed += other.removed;
        self.set_aside += other.set_aside;
        self.promoted += other.promoted;
        self.troubled += other.troubled;
    }
}

impl Replica {
    /// Asks the bucket what there is to do, and what others have done: one conditional GET for the
    /// settings, one or two LISTs, one more per thousand objects, a GET for each task that is new.
    pub async fn down(&self, queue: &str) -> Result<Down> {
        let _alone = self.lock().await?;
        self.down_alone(queue, Asking { settings: true, all_parts: true }).await
    }

    pub(super) async fn down_alone(&self, queue: &str, asking: Asking) -> Result<Down> {
        let before = self.bucket().usage();
        let mut pair = self.pair(queue).await?;
        let mut state = self.state(queue).await?;
        let mut down = Down::default();
        let mut done = self.bring_all(&pair, asking, &mut state, &mut down).await;
        if done.as_ref().is_err_and(Error::is_about_data) && self.follow_shards(&pair).await? {
            (pair, state) = (self.pair(queue).await?, self.state(queue).await?);
            done = self.bring_all(&pair, asking, &mut state, &mut down).await;
        }
        down.usage = self.bucket().usage().since(&before);
        self.learn_time().await?;
        if done.is_ok() {
            state.down_at = Some(self.local().now().await?);
            if asking.settings {
                self.forget_duplicates(&pair).await?;
            }
        }
        self.change_state(queue, |now| now.add_down(&state, &down)).await?;
        done.map(|()| down)
    }

    async fn bring_all(
        &self,
        pair: &Pair<'_>,
        asking: Asking,
        state: &mut State,
        down: &mut Down,
    ) -> Result<()> {
        if asking.settings {
            if !pair.there.reread().await? {
                let name = pair.there.name();
                return Err(Error::invalid(format!("the queue {name:?} is gone from the bucket")));
            }
            state.settings_version = pair.there.settings_version().as_str().to_owned();
        }
        let was_relaxed = pair.local.settings().mode == Mode::Relaxed;
        match pair.there.settings().mode {
            // Nobody works here any more.
            Mode::Strict => return self.take_settings(&pair.there).await,
            Mode::Relaxed if was_relaxed => self.take_settings(&pair.there).await?,
            // Not before what is here was compared: it may be old.
            Mode::Relaxed => {}
        }
        let parts = self.parts(pair, asking, state).await?;
        if parts.scheduled {
            let now = self.bucket().now().await?;
            loop {
                let promoted = pair.there.promote_due(now).await?;
                down.promoted += promoted.ids.len() as u64;
                if !promoted.more {
                    break;
                }
            }
        }
        let parts = Parts { pending: parts.pending || down.promoted > 0, ..parts };
        // Here too, though nobody may work here: what was pushed here for later is in the bucket, and done
        // by others as a rule. As a pending task it is compared, and goes.
        let now = self.local().now().await?;
        while pair.local.promote_due(now).await?.more {}
        let known = self.known(pair.local.name()).await?;
        let outbox = pair.in_outbox().await?;
        let Listed { mut seen, listed, expected } =
            self.bring_listed(pair, parts, &known, &outbox, down).await?;
        let keys = pair.there.keys();
        state.pending = listed.iter().any(|(_, bundle)| !bundle);
        state.bundles = listed.iter().any(|(_, bundle)| *bundle);
        let mut listed: Vec<u128> = listed.into_iter().map(|(unit, _)| unit).collect();
        listed.sort_unstable();
        let mut lost = expected;
        for mut units in local_units(self.local(), pair.local.keys()).await? {
            while let Some(units) = units.next(pair.local.keys()).await? {
                let mut missing = Vec::new();
                for unit in units {
                    let was_listed = match unit {
                        Unit::Task(_) => parts.pending || parts.all,
                        Unit::Bundle(..) => parts.bundles || parts.all,
                    };
                    let hash = unit_hash(keys.part(&unit, Part::Work)?.as_str());
                    lost.remove(&hash);
                    if was_listed && listed.binary_search(&hash).is_err() && !outbox.contains(&hash)
                    {
                        missing.push(unit);
                    }
                }
                self.ask_for(pair, missing, down).await?;
            }
        }
        // What should be here and is not, after a damaged disk or from an old backup, is fetched next time.
        seen.retain(|(hash, _)| !lost.contains(hash));
        let seen = Known::new(seen);
        if seen != known {
            self.save_known(pair.local.name(), &seen).await?;
        }
        match was_relaxed {
            true => Ok(()),
            false => self.take_settings(&pair.there).await,
        }
    }

    /// Which parts the queue has: one delimited LIST.
    async fn parts(&self, pair: &Pair<'_>, asking: Asking, state: &mut State) -> Result<Parts> {
        if !asking.all_parts
            && state.pending
            && state.since_overview == 0
            && state.down_at.is_some()
        {
            state.since_overview += 1;
            return Ok(Parts {
                pending: true,
                bundles: state.bundles,
                scheduled: false,
                all: false,
            });
        }
        state.since_overview = 0;
        let keys = pair.there.keys();
        let list = List::prefix(keys.everything())?.delimited();
        let parts = self.bucket().list(list).collect().await?.prefixes;
        let has = |prefix: &str| parts.iter().any(|there| there == prefix);
        Ok(Parts {
            pending: has(&keys.all_pending()),
            bundles: has(&keys.bundles()),
            scheduled: has(&keys.scheduled()),
            all: true,
        })
    }

    /// What the bucket's listing shows.
    async fn bring_listed(
        &self,
        pair: &Pair<'_>,
        parts: Parts,
        known: &Known,
        outbox: &HashSet<u128>,
        down: &mut Down,
    ) -> Result<Listed> {
        let mut all = Listed::default();
        let Listed { seen, listed, expected } = &mut all;
        let mut walk = Walk::new(&pair.there, prefixes(pair, parts));
        while let Some(batch) = walk.next().await? {
            let mut changed = Vec::new();
            for shown in batch {
                let Some(work) = &shown.work else { continue };
                let hash = unit_hash(pair.there.keys().part(&shown.unit, Part::Work)?.as_str());
                listed.push((hash, matches!(shown.unit, Unit::Bundle(..))));
                let state = shown.state(work);
                match known.get(hash) {
                    // Whatever the outbox has is told of first.
                    before if outbox.contains(&hash) => {
                        seen.extend(before.map(|before| (hash, before)));
                    }
                    Some(before) if before == state => {
                        down.unchanged += 1;
                        seen.push((hash, state));
                        if shown.lease_there() != LeaseThere::Young {
                            expected.insert(hash);
                        }
                    }
                    _ => changed.push((shown, hash)),
                }
            }
            let brings = changed.into_iter().map(|(shown, hash)| pair.bring_or_warn(shown, hash));
            let mut brings = futures::stream::iter(brings).buffer_unordered(AT_A_TIME);
            while let Some(brought) = brings.next().await {
                let (brought, state) = brought?;
                down.add(&brought);
                seen.extend(state);
            }
        }
        Ok(all)
    }

    /// What became of tasks that the bucket's listing does not show.
    async fn ask_for(&self, pair: &Pair<'_>, missing: Vec<Unit>, down: &mut Down) -> Result<()> {
        let asks = missing.into_iter().map(|unit| pair.ask_or_warn(unit));
        let mut asks = futures::stream::iter(asks).buffer_unordered(AT_A_TIME);
        let mut nowhere = Vec::new();
        while let Some(asked) = asks.next().await {
            let (asked, unit) = asked?;
            down.add(&asked);
            nowhere.extend(unit);
        }
        if nowhere.is_empty() {
            return Ok(());
        }
        // Pushed here for later and told, promoted here, and not yet promoted there.
        let scheduled = pair.scheduled().await?;
        for unit in nowhere {
            let scheduled = matches!(&unit, Unit::Task(id) if scheduled.contains(id));
            if let (false, Some(mut view)) = (scheduled, pair.idle(&unit).await?)
                && let Some(ours) = view.local.work.clone()
                // Once more, after the scheduled ones: it may have been promoted in between, and done.
                && decide::missing(&ours, &pair.ask(&unit, &ours).await?) == Missing::SetAside
            {
                pair.set_aside(&unit, &mut view).await?;
                down.set_aside += 1;
            }
        }
        Ok(())
    }

    /// What a sync down would find, changing nothing.
    pub(super) async fn compare(&self, pair: &Pair<'_>) -> Result<Down> {
        let mut down = Down::default();
        let parts = Parts { pending: true, bundles: true, scheduled: false, all: true };
        let known = self.known(pair.local.name()).await?;
        let outbox = pair.in_outbox().await?;
        let mut listed = HashSet::new();
        let mut walk = Walk::new(&pair.there, prefixes(pair, parts));
        while let Some(batch) = walk.next().await? {
            for shown in batch {
                let Some(work) = &shown.work else { continue };
                let hash = unit_hash(pair.there.keys().part(&shown.unit, Part::Work)?.as_str());
                listed.insert(hash);
                let same = known.get(hash) == Some(shown.state(work)) || outbox.contains(&hash);
                down.unchanged += u64::from(same);
                down.new += u64::from(!same);
            }
        }
        for mut units in local_units(self.local(), pair.local.keys()).await? {
            while let Some(units) = units.next(pair.local.keys()).await? {
                for unit in units {
                    let hash = unit_hash(pair.there.keys().part(&unit, Part::Work)?.as_str());
                    let there = listed.contains(&hash) || outbox.contains(&hash);
                    down.missing += u64::from(!there && pair.idle(&unit).await?.is_some());
                }
            }
        }
        Ok(down)
    }
}

fn prefixes(pair: &Pair<'_>, parts: Parts) -> Vec<String> {
    let keys = pair.there.keys();
    let pending = parts.pending.then(|| keys.all_pending());
    pending.into_iter().chain(parts.bundles.then(|| keys.bundles())).collect()
}

impl Pair<'_> {
    async fn in_outbox(&self) -> Result<HashSet<u128>> {
        let keys = self.outbox.keys();
        let mut listing = self.local_store().list(List::prefix(keys.outbox())?.unordered());
        let mut all = HashSet::new();
        while let Some(page) = listing.next_page().await? {
            for entry in page.entries {
                if let Some(unit) = keys.parse_entry(entry.key.as_str()) {
                    all.insert(unit_hash(self.there.keys().part(&unit, Part::Work)?.as_str()));
                }
            }
        }
        Ok(all)
    }

    async fn bring_or_warn(&self, shown: Shown, hash: u128) -> Result<Brought> {
        match self.bring(&shown, hash).await {
            Err(error) if error.is_about_data() => {
                tracing::warn!(unit = shown.unit.name(), %error, "cannot be brought down");
                Ok((Down { troubled: 1, ..Down::default() }, None))
            }
            brought => brought,
        }
    }

    async fn bring(&self, shown: &Shown, hash: u128) -> Result<Brought> {
        let Shown { unit, .. } = shown;
        let Some(work) = &shown.work else { return Ok(Brought::default()) };
        let key = self.local.keys().part(unit, Part::Work)?;
        let local = self.local_store().get(&key).await?;
        let origin = local.as_ref().map(|object| origin(unit, &object.body));
        let here = match &origin {
            Some(Some(origin)) => origin == work.as_str(),
            // Pushed here: most likely the same. Whether it is shows when it is fetched, if it is to be.
            Some(None) => shown.lease_there() == LeaseThere::Young,
            None => false,
        };
        let seen = Some((hash, shown.state(work)));
        let mut down = Down::default();
        let first = decide::bring(here, shown.lease_there());
        let (bring, past) = match first {
            Bring::Look => self.look_into(unit, here).await?,
            bring => (bring, None),
        };
        // An old lease that somebody has after all, by its own ttl, is looked into again: it will be
        // nobody's without having changed.
        let seen =
            seen.filter(|_| first != Bring::Look || matches!(bring, Bring::Open | Bring::Fetch));
        match bring {
            Bring::Nothing => {}
            Bring::Fetch => {
                let Some(state) = self.fetch(shown, past, &mut down).await? else {
                    return Ok((down, None));
                };
                return Ok((down, Some((hash, state))));
            }
            Bring::Shut => down.shut += u64::from(self.shut(unit, None).await?),
            Bring::Open => down.opened += u64::from(self.open(unit, past).await?),
            Bring::DeleteThere => {
                let key = self.there.keys().part(unit, Part::Work)?;
                self.there.delete_work(&key, work).await?;
            }
            Bring::Look => {}
        }
        Ok((down, seen))
    }

    /// Whose an old lease in the bucket is: nobody's most likely. One GET.
    async fn look_into(&self, unit: &Unit, here: bool) -> Result<(Bring, Option<Past>)> {
        let desk = self.there.desk(unit, &self.replica.node)?;
        let free = if here { Bring::Open } else { Bring::Fetch };
        let Some(seen) = desk.look().await? else { return Ok((free, None)) };
        Ok(match claim(&seen, &desk.judge(&seen)) {
            Claim::Take(history) => (free, Some(Past::of(&seen, history))),
            Claim::Later(at) => {
                let history = seen.record.as_ref().map(History::of).unwrap_or_default();
                let history = History { not_before: Some(at), ..history };
                (free, Some(Past::of(&seen, history)))
            }
            Claim::Held(_) if here => (Bring::Shut, None),
            Claim::Held(_) => (Bring::Nothing, None),
        })
    }

    /// Lets this node's workers have a task that another node had.
    async fn open(&self, unit: &Unit, past: Option<Past>) -> Result<bool> {
        let desk = self.local.desk(unit, &self.replica.node)?;
        let seen = desk.look().await?;
        let foreign =
            seen.as_ref().filter(|seen| seen.record.as_ref().is_ok_and(decide::is_foreign));
        match (seen.is_some(), foreign, past) {
            // One of our own: it says more than the bucket's.
            (true, None, _) => Ok(false),
            (_, Some(seen), None) => {
                let token = super::hold::token(seen).unwrap_or(0);
                let retired = self.local_store().retire(desk.key(), &seen.version, token).await?;
                Ok(matches!(retired, crate::store::Delete::Deleted))
            }
            (_, Some(seen), Some(past)) => {
                self.write_released(unit, &past, When::Matches(seen.version.clone())).await
            }
            (false, None, Some(past)) => self.write_released(unit, &past, When::Absent).await,
            (false, None, None) => Ok(false),
        }
    }

    /// A lease that nobody has, with what a task has been through.
    async fn write_released(&self, unit: &Unit, past: &Past, when: When) -> Result<bool> {
        let store = self.local_store();
        let (nonce, now) = (store.env().nonce(), store.now().await?);
        let ttl = self.local.settings().ttl;
        let holder = Holder { name: "another node", ttl, place: None };
        let held = lease_decide::acquire(None, &holder, now, 0, nonce).lease;
        let mut released = lease_decide::release(&held, now, nonce);
        past.history.write(&mut released);
        released.other.extend(past.progress.clone());
        self.write_here(unit, &released, when, nonce).await
    }

    /// Fetches a task: one GET. Returns the state in which it was seen.
    async fn fetch(
        &self,
        shown: &Shown,
        past: Option<Past>,
        down: &mut Down,
    ) -> Result<Option<u64>> {
        let unit = &shown.unit;
        let Some(object) = self.bucket().get(&self.there.keys().part(unit, Part::Work)?).await?
        else {
            // Done while we listed.
            return Ok(None);
        };
        let theirs = incarnation(unit, &object);
        let (version, mark) = (object.meta.version.clone(), object.meta.mark());
        if let Unit::Task(id) = unit
            && self.there.is_done_in_bundle(id).await?
        {
            // As in strict mode: whoever had the bundle did it there after all.
            self.there.delete_work(&self.there.keys().part(unit, Part::Work)?, &version).await?;
            return Ok(None);
        }
        // First that it is not here, then that it was not done here: whoever does it writes the record
        // first (FIELD.md row 15).
        let mut view = self.look(unit, &Entry::default()).await?;
        let state = Some(shown.state(&version));
        if view.local.work.as_ref() == Some(&theirs) {
            // Pushed here, and nobody has it any more.
            down.opened += u64::from(self.open(unit, past).await?);
            return Ok(state);
        }
        if [&view.local.receipt, &view.local.letter].contains(&&Some(theirs.clone())) {
            return Ok(state);
        }
        if self.outbox.has(unit).await? {
            return Ok(None);
        }
        if view.local.work.is_some() {
            // Pushed again elsewhere, under the same name.
            self.drop_local(unit, &mut view).await?;
            down.removed += 1;
        }
        // The lease first: the task must not be seen as free before its time.
        let past = past.filter(|Past { history, .. }| {
            history.tries() > 0 || history.not_before.is_some() || !history.done.is_empty()
        });
        match past {
            // One that stood for somebody's claim of an earlier push.
            past if view.local.lease == LocalLease::Foreign => {
                self.open(unit, past).await?;
            }
            Some(past) => {
                self.write_released(unit, &past, When::Absent).await?;
            }
            None => {}
        }
        let body = copy(unit, &object.body, &version, &mark);
        let write = Write::when(When::Absent, Proof::Bytes).durability(self.local.durability());
        let key: Key = self.local.keys().part(unit, Part::Work)?;
        if wrote(self.local_store().put(&key, body.into(), write).await?)?.is_some() {
            down.new += 1;
        }
        Ok(state)
    }

    /// What the replica shows of a task that nobody here is at.
    async fn idle(&self, unit: &Unit) -> Result<Option<super::up::View>> {
        let view = self.look(unit, &Entry::default()).await?;
        let busy = view.local.work.is_none() || view.local.lease == LocalLease::Held;
        Ok(if busy || self.outbox.has(unit).await? { None } else { Some(view) })
    }

    /// Removes a lease that stands for another node's and has no task: nothing else would, for a year,
    /// and it would keep everybody here from the next push of this name.
    async fn sweep_foreign(&self, unit: &Unit) -> Result<()> {
        let view = self.look(unit, &Entry::default()).await?;
        if view.local.work.is_none()
            && view.local.lease == LocalLease::Foreign
            && let Some(seen) = &view.lease
        {
            let key = self.local.keys().part(unit, Part::Lease)?;
            let token = super::hold::token(seen).unwrap_or(0);
            let _ = self.local_store().retire(&key, &seen.version, token).await?;
        }
        Ok(())
    }

    async fn ask_or_warn(&self, unit: Unit) -> Result<(Down, Option<Unit>)> {
        match self.ask_about(&unit).await {
            Ok((down, nowhere)) => Ok((down, nowhere.then_some(unit))),
            Err(error) if error.is_about_data() => {
                tracing::warn!(unit = unit.name(), %error, "the bucket cannot be asked about this");
                Ok((Down { troubled: 1, ..Down::default() }, None))
            }
            Err(error) => Err(error),
        }
    }

    /// Asks about a task that the bucket's listing does not show: one GET where it was done elsewhere.
    /// Says whether nothing is known of it.
    async fn ask_about(&self, unit: &Unit) -> Result<(Down, bool)> {
        let mut down = Down::default();
        let Some(mut view) = self.idle(unit).await? else {
            self.sweep_foreign(unit).await?;
            return Ok((down, false));
        };
        let Some(ours) = view.local.work.clone() else { return Ok((down, false)) };
        down.missing += 1;
        let receipt = self.there.receipt_of(unit).await?;
        let asked = Asked {
            receipt: receipt.as_ref().map(|receipt| receipt.about(&ours).to_owned()),
            ..Asked::default()
        };
        let what = match decide::missing(&ours, &asked) {
            Missing::SetAside => decide::missing(&ours, &self.ask(unit, &ours).await?),
            what => what,
        };
        match what {
            Missing::Stay => {}
            Missing::SetAside => {
                // It left its bundle here after that was done elsewhere, and it with it.
                let done = match unit {
                    Unit::Task(id) => self.there.is_done_in_bundle(id).await?,
                    Unit::Bundle(..) => false,
                };
                if !done {
                    return Ok((down, true));
                }
                self.drop_local(unit, &mut view).await?;
                down.removed += 1;
            }
            Missing::Done | Missing::Dead | Missing::Replaced => {
                if let Some(receipt) = receipt.filter(|receipt| receipt.is_about(&ours)) {
                    self.take_receipt(unit, &receipt, None).await?;
                    self.drop_local(unit, &mut view).await?;
                } else {
                    self.end_here(unit, what, &mut view).await?;
                }
                down.removed += 1;
            }
            Missing::PushAgain => {
                if let (Unit::Task(id), Some((body, _))) = (unit, &view.work) {
                    let task =
                        format::Task { origin: None, ..format::Task::parse(body, id, &ours) };
                    let keys = self.there.keys();
                    let key = keys.part(unit, Part::Work)?;
                    let write = Write::when(When::Absent, Proof::Bytes);
                    wrote(self.bucket().put(&key, task.to_bytes().into(), write).await?)?;
                }
            }
        }
        Ok((down, false))
    }

    /// The names of what waits for its time in the bucket.
    pub(super) async fn scheduled(&self) -> Result<HashSet<String>> {
        let keys = self.there.keys();
        let mut listing = self.bucket().list(List::prefix(keys.scheduled())?);
        let mut all = HashSet::new();
        while let Some(page) = listing.next_page().await? {
            let parsed =
                page.entries.iter().filter_map(|entry| keys.parse_scheduled(entry.key.as_str()));
            all.extend(parsed.map(|(_, id): (StoreTime, String)| id));
        }
        Ok(all)
    }
}

/// The bucket's version that this work is a copy of.
fn origin(unit: &Unit, body: &[u8]) -> Option<String> {
    match unit {
        Unit::Task(id) => format::Task::parse(body, id, "").origin,
        Unit::Bundle(id, _) => format::Bundle::parse(body, id).ok()?.origin,
    }
}

/// The work of the bucket as it stands here.
fn copy(unit: &Unit, body: &[u8], version: &Version, mark: &str) -> Vec<u8> {
    match unit {
        Unit::Task(id) => {
            let task = format::Task::parse(body, id, mark);
            format::Task { origin: Some(version.as_str().to_owned()), ..task }.to_bytes()
        }
        // What is no bundle comes down as it is: whoever claims it makes a dead letter of it.
        Unit::Bundle(..) => {
            format::Bundle::copied(body, Some(version.as_str())).unwrap_or(body.to_vec())
        }
    }
}
