//! Sync up: what happened here reaches the bucket, by the same conditional writes as strict mode's.
//!
//! For each entry of the outbox: the entry is read, *then* what it is about, then the bucket is told,
//! and then the entry goes, in the version that was read: whatever happened meanwhile was noted again.
//! Every step can be repeated, so a crash anywhere is repaired by the next sync.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use futures::StreamExt as _;
use leasehold_protocol::cas::{Version, When};
use leasehold_protocol::format::lease::Lease;
use leasehold_protocol::format::outbox::{Entry, Intent, Writer, state_hash, unit_hash};
use leasehold_protocol::format::task::{self as format, DeadLetter, Receipt};
use leasehold_protocol::layout::queue::{Part, Unit};
use leasehold_protocol::lease::{Judgement, Seen, Why};
use leasehold_protocol::queue::{History, gives_way};
use leasehold_protocol::settle::Proof;
use leasehold_protocol::sync::{self as decide, End, Local, LocalLease, Missing, TellLease};
use serde::Serialize;

use super::{AT_A_TIME, Pair, Replica};
use crate::lock::Guard;
use crate::queue::push::{Stored, bundle_of};
use crate::queue::wrote;
use crate::store::meter::Usage;
use crate::store::{List, Object, Write};
use crate::{Error, Result, StoreTime};

/// Stands for no state of a task: it is to be looked at.
const UNSEEN: u64 = 0;

/// What a sync up did.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Up {
    /// Tasks and bundles that the bucket did not know.
    pub pushed: u64,
    /// Claims that were told, or renewed.
    pub held: u64,
    /// Failures and hand-backs that were told.
    pub released: u64,
    /// Completions that were the first.
    pub completed: u64,
    /// Completions that were not.
    pub duplicates: u64,
    /// Dead letters.
    pub given_up: u64,
    /// Claims that somebody else's came before: their work here is stopped.
    pub lost: u64,
    /// Failed attempts before the completions and dead letters.
    pub retries: u64,
    /// Entries that stay: their tasks are being done, or could not be told of.
    pub left: u64,
    /// Those of them that something is wrong with; a warning says what.
    pub troubled: u64,
    /// What it took.
    pub usage: Usage,
    /// Pushes in the versions that they got, for the next sync down.
    #[serde(skip)]
    pub(super) seen: Vec<(u128, u64)>,
    /// Something stays untold that may have been told by a sync that was cut off.
    #[serde(skip)]
    unsure: bool,
}

impl Up {
    fn add(&mut self, other: Self) {
        self.pushed += other.pushed;
        self.held += other.held;
        self.released += other.released;
        self.completed += other.completed;
        self.duplicates += other.duplicates;
        self.given_up += other.given_up;
        self.lost += other.lost;
        self.retries += other.retries;
        self.left += other.left;
        self.troubled += other.troubled;
        self.seen.extend(other.seen);
        self.unsure |= other.unsure;
    }
}

/// What the replica shows of a task or bundle, and the records behind it.
#[derive(Debug)]
pub(super) struct View {
    pub local: Local,
    pub work: Option<(Vec<u8>, Version)>,
    pub lease: Option<Seen>,
    pub receipt: Option<(Receipt, Version)>,
    pub letter: Option<(DeadLetter, Version)>,
    /// The version of the entry, unless something was noted since.
    entry: Option<Version>,
    /// The entry without what it announced and the replica shows, until that is written down.
    shown: Option<Entry>,
}

impl View {
    pub fn record(&self) -> Option<&Lease> {
        self.lease.as_ref().and_then(|seen| seen.record.as_ref().ok())
    }
}

impl Replica {
    /// Tells the bucket what happened here since. No request where nothing did.
    pub async fn up(&self, queue: &str) -> Result<Up> {
        let alone = self.lock().await?;
        self.up_alone(queue, &alone).await
    }

    pub(super) async fn up_alone(&self, queue: &str, alone: &Guard) -> Result<Up> {
        let before = self.bucket().usage();
        let pair = self.pair(queue).await?;
        let mut up = Up::default();
        let told = self.tell_all(&pair, alone, &mut up).await;
        up.usage = self.bucket().usage().since(&before);
        // What was pushed need not be compared with what was pushed.
        let seen = std::mem::take(&mut up.seen);
        if !seen.is_empty() {
            let known = self.known(queue).await?.with(seen);
            self.save_known(queue, &known).await?;
        }
        if up.usage.requests() > 0 {
            self.learn_time().await?;
        }
        let at = self.local().now().await?;
        let (all, sure, boot_id) = (told.is_ok(), !up.unsure, self.boot_id());
        self.change_state(queue, |state| {
            state.add_up(&up);
            if all {
                // Else the next sync is careful, too: so where a later one has begun, which may be cut off.
                state.telling &= !sure || state.teller > alone.token();
                state.boot_id.clone_from(&boot_id);
                state.up_at = Some(at);
            }
        })
        .await?;
        told.map(|()| up)
    }

    async fn tell_all(&self, pair: &Pair<'_>, alone: &Guard, up: &mut Up) -> Result<()> {
        let keys = pair.outbox.keys();
        for part in keys.outbox_parts() {
            self.tell_part(pair, alone, part, up).await?;
        }
        Ok(())
    }

    async fn tell_part(
        &self,
        pair: &Pair<'_>,
        alone: &Guard,
        part: String,
        up: &mut Up,
    ) -> Result<()> {
        let keys = pair.outbox.keys();
        let mut listing = self.local().list(List::prefix(part)?);
        while let Some(page) = listing.next_page().await? {
            let entries = page.entries.iter();
            let units: Vec<Unit> =
                entries.filter_map(|entry| keys.parse_entry(entry.key.as_str())).collect();
            if !units.is_empty() {
                self.note_telling(pair.local.name(), alone.token()).await?;
            }
            let failed = AtomicBool::new(false);
            let tellings = units.into_iter().map(|unit| pair.tell_in_turn(unit, alone, &failed));
            let mut tellings = futures::stream::iter(tellings).buffer_unordered(AT_A_TIME);
            let mut all = Ok(());
            // What is under way when one fails is waited for: a push that is given up on may land after the
            // next sync told that it is done.
            while let Some(told) = tellings.next().await {
                match told {
                    Ok(told) => up.add(told),
                    Err(error) => all = all.and(Err(error)),
                }
            }
            all?;
        }
        Ok(())
    }
}

impl Pair<'_> {
    /// Unless one has failed: then nothing more is begun.
    async fn tell_in_turn(&self, unit: Unit, alone: &Guard, failed: &AtomicBool) -> Result<Up> {
        if failed.load(Relaxed) {
            return Ok(Up::default());
        }
        let told = match alone.check() {
            Ok(()) => self.tell_or_warn(unit).await,
            Err(lost) => Err(lost),
        };
        failed.fetch_or(told.is_err(), Relaxed);
        told
    }

    /// One entry that cannot be told of must not keep the others from it, unless it is the bucket that
    /// does not answer.
    async fn tell_or_warn(&self, unit: Unit) -> Result<Up> {
        match self.tell(&unit).await {
            Err(error) if error.is_about_data() => {
                tracing::warn!(unit = unit.name(), %error, "the bucket cannot be told of this");
                Ok(Up { left: 1, troubled: 1, unsure: true, ..Up::default() })
            }
            told => told,
        }
    }

    /// What the replica shows. The work before its records: whoever finishes it writes these first.
    pub(super) async fn look(&self, unit: &Unit, entry: &Entry) -> Result<View> {
        let (store, keys) = (self.local_store(), self.local.keys());
        let scheduled = match (entry.scheduled, unit) {
            (Some(time), Unit::Task(id)) => store.get(&keys.scheduled_at(time, id)?).await?,
            _ => None,
        };
        let scheduled = scheduled.map(|object| incarnation(unit, &object));
        let work = store.get(&keys.part(unit, Part::Work)?).await?;
        let incarnation = work.as_ref().map(|object| incarnation(unit, object));
        let desk = self.local.desk(unit, &self.replica.node)?;
        let seen = desk.look().await?;
        let lease = match &seen {
            None => LocalLease::None,
            Some(seen) if seen.record.as_ref().is_ok_and(decide::is_foreign) => LocalLease::Foreign,
            Some(seen) => match desk.judge(seen) {
                Judgement::Held { .. } => LocalLease::Held,
                Judgement::Free(Why::Released) => {
                    LocalLease::Released(seen.record.as_ref().map(History::of).unwrap_or_default())
                }
                Judgement::Free(_) => LocalLease::Dead,
            },
        };
        let receipt = store.get(&keys.receipt(unit)?).await?;
        let receipt = receipt
            .and_then(|object| Some((Receipt::parse(&object.body).ok()?, object.meta.version)));
        let letter = match unit {
            Unit::Task(id) => store.get(&keys.dead_letter(id)?).await?,
            // One that could not be read as a bundle.
            Unit::Bundle(..) => store.get(&keys.dead_letter(&unit.name())?).await?,
        };
        let letter = letter
            .and_then(|object| Some((DeadLetter::parse(&object.body).ok()?, object.meta.version)));
        let local = Local {
            work: incarnation,
            scheduled,
            lease,
            receipt: receipt.as_ref().map(|(receipt, _)| receipt.incarnation.clone()),
            letter: letter.as_ref().map(|(letter, _)| letter.task.incarnation.clone()),
        };
        let work = work.map(|object| (object.body.to_vec(), object.meta.version));
        Ok(View { local, work, lease: seen, receipt, letter, entry: None, shown: None })
    }

    /// Tells of one task or bundle, and removes its entry if there is nothing more to tell.
    async fn tell(&self, unit: &Unit) -> Result<Up> {
        let mut up = Up::default();
        let Some((before, version)) = self.outbox.entry(unit).await? else { return Ok(up) };
        let mut entry = before.clone();
        // Before the look: whoever ends after it may have done what it announced in between.
        let writers = before.writers.iter().enumerate();
        let gone: Vec<Writer> = writers
            .filter(|(n, _)| self.outbox.is_gone(&before, *n))
            .map(|(_, writer)| writer.clone())
            .collect();
        let mut view = self.look(unit, &entry).await?;
        decide::forget_seen(&mut entry, &view.local);
        view.shown = Some(entry.clone());
        view.entry = Some(version);
        if decide::owes_letter(&entry, &view.local) {
            let untold = entry.untold;
            if self.tell_dead(unit, &mut entry, &mut view, &mut up).await? {
                entry.earlier.clear();
            }
            // That was about the earlier push.
            entry.untold = untold;
            view.local.letter = None;
        }
        if decide::owes_receipt(&entry, &view.local) {
            let untold = entry.untold;
            let told = self.tell_done(unit, &mut entry, &mut view, &mut up).await?;
            // That was about the earlier push.
            entry.untold = untold;
            entry.earlier.retain(|earlier| !told || Some(earlier) != view.local.receipt.as_ref());
        }
        let mut tale = decide::tell(&entry, &view.local);
        let mut owed = false;
        if tale == decide::Tale::default() {
            self.tell_outdated(unit, &mut entry, &view).await?;
        }
        let (work, lease) = (view.local.work.is_some(), view.local.lease.clone());
        if (tale.end.is_some() || tale.lease.is_some())
            && let Unit::Bundle(id, _) = unit
        {
            // What left the bundle must be known before the bundle is over, or its lease says that nothing
            // is to be done about it, or it would be nowhere.
            let (told, all) = self.tell_of_those_who_left(id).await?;
            up.add(told);
            if !all {
                // Next time.
                owed = true;
                (tale.end, tale.lease) = (None, None);
            }
        }
        match tale.end {
            Some(End::Done) => {
                self.tell_done(unit, &mut entry, &mut view, &mut up).await?;
            }
            Some(End::Dead) => {
                self.tell_dead(unit, &mut entry, &mut view, &mut up).await?;
            }
            None => {}
        }
        if tale.push && !self.tell_push(unit, &mut entry, &mut view, &mut up).await? {
            // It is somebody else's task by now.
            self.drop_local(unit, &mut view).await?;
        } else {
            // Promoted while we looked, and in neither place when we did: it is told of next time.
            owed |= tale.push && entry.untold;
            match tale.lease {
                Some(TellLease::Hold) => {
                    self.tell_hold(unit, &mut entry, &mut view, &mut up).await?
                }
                Some(TellLease::Release) => {
                    self.tell_release(unit, &mut entry, &mut view, &mut up).await?;
                }
                None => {}
            }
        }
        decide::keep_announced(&mut entry, &before);
        let shut = view.local.lease == LocalLease::Foreign && lease != LocalLease::Foreign;
        if shut || (work && view.local.work.is_none()) {
            // The bucket may look again as it did when we had it: it is to be looked at all the same, or
            // nobody here would get it any more.
            let key = self.there.keys().part(unit, Part::Work)?;
            up.seen.push((unit_hash(key.as_str()), UNSEEN));
        }
        let is_gone = |n: usize| entry.writers.get(n).is_some_and(|writer| gone.contains(writer));
        let settled = !owed && decide::is_settled(&entry, &view.local, is_gone);
        let written = match view.entry {
            Some(version) if settled => self.outbox.remove(unit, &version).await?,
            Some(_) if entry == before => true,
            Some(version) => self.outbox.rewrite(unit, &entry, version).await?.is_some(),
            None => false,
        };
        if !written {
            // Noted again: there is more to tell.
            self.outbox.note_told(unit, &before, &entry).await?;
        }
        up.left += u64::from(!settled || !written);
        // As when it was promoted while we looked: whether it was there before is to be asked again.
        up.unsure |= self.careful && entry.untold;
        Ok(up)
    }

    /// Writes down that what the entry announced has shown itself, before what shows it is removed. A
    /// sync that is cut off in between would leave an entry that waits for as long as those live who
    /// announced it, and no task of this name would come down meanwhile. `false` if something was noted
    /// since: then nothing is to be removed, and the next sync tells of all.
    pub(super) async fn note_shown(&self, unit: &Unit, view: &mut View) -> Result<bool> {
        let Some(entry) = &view.shown else { return Ok(true) };
        // It was refused before.
        let Some(version) = view.entry.take() else { return Ok(false) };
        view.entry = self.outbox.rewrite(unit, entry, version).await?;
        Ok(view.entry.is_some())
    }

    /// Says whether the bucket knows of all of them now. Of one it may not: something was noted while we
    /// looked, so that what we had read of its entry told nothing.
    async fn tell_of_those_who_left(&self, bundle: &str) -> Result<(Up, bool)> {
        let (mut up, mut all) = (Up::default(), true);
        let keys = self.outbox.keys();
        let prefix = keys.entries_of_those_who_left(bundle);
        let mut listing = self.local_store().list(List::prefix(prefix)?);
        while let Some(page) = listing.next_page().await? {
            for entry in page.entries {
                if let Some(unit @ Unit::Task(_)) = keys.parse_entry(entry.key.as_str()) {
                    up.add(Box::pin(self.tell(&unit)).await?);
                    let entry = self.outbox.entry(&unit).await?;
                    all &= entry.is_none_or(|(entry, _)| !entry.untold);
                }
            }
        }
        // Counted on their own turn.
        Ok((Up { left: 0, ..up }, all))
    }

    /// Says whether all of it was told: else something was noted meanwhile, and the next sync does the rest.
    async fn tell_done(
        &self,
        unit: &Unit,
        entry: &mut Entry,
        view: &mut View,
        up: &mut Up,
    ) -> Result<bool> {
        let Some((receipt, version)) = view.receipt.clone() else { return Ok(true) };
        if receipt.copied {
            // It was done elsewhere, and the bucket may have forgotten that since.
            self.clean_up(unit, entry, &receipt.incarnation).await?;
            self.clean_up_here(unit, view, &receipt.incarnation).await?;
            return Ok(true);
        }
        up.retries += u64::from(receipt.retries);
        // A name that was chosen here may have been chosen elsewhere: then that push counts, and ours was
        // done in vain. Strict mode would have refused it.
        if entry.untold
            && entry.chosen
            && self.is_pushed_by_others(unit, &receipt.incarnation).await?
        {
            if !self.note_shown(unit, view).await? {
                return Ok(false);
            }
            self.count_duplicate(unit, &receipt, up).await?;
            self.local.delete_work(&self.local.keys().receipt(unit)?, &version).await?;
            entry.untold = false;
            return Ok(true);
        }
        match self.there.record_receipt(unit, &receipt, Proof::Bytes).await? {
            None => up.completed += 1,
            Some(theirs) => {
                if !self.note_shown(unit, view).await? {
                    return Ok(false);
                }
                self.count_duplicate(unit, &receipt, up).await?;
                self.take_receipt(unit, &theirs, Some(version)).await?;
            }
        }
        self.clean_up(unit, entry, &receipt.incarnation).await?;
        self.clean_up_here(unit, view, &receipt.incarnation).await?;
        Ok(true)
    }

    /// Once it is certain that this is told of for the last time, or one that is old by then would be
    /// forgotten and counted again.
    async fn count_duplicate(&self, unit: &Unit, receipt: &Receipt, up: &mut Up) -> Result<()> {
        up.duplicates += unit.tasks();
        self.outbox.count_duplicate(unit, &receipt.nonce).await
    }

    /// Whether the bucket has another push of this task, or a receipt of one that still stands for it.
    async fn is_pushed_by_others(&self, unit: &Unit, ours: &str) -> Result<bool> {
        let theirs = self.there.receipt_of(unit).await?;
        if let Some(theirs) = theirs {
            // Told before, by a sync that was cut off, and pushed again since.
            if theirs.is_about(ours) {
                return Ok(false);
            }
            // One that is past its time would not have kept a strict push away.
            if self.there.is_remembered(&self.there.keys().receipt(unit)?).await? {
                return Ok(true);
            }
        }
        let work = self.bucket().get(&self.there.keys().part(unit, Part::Work)?).await?;
        Ok(work.is_some_and(|object| incarnation(unit, &object) != ours))
    }

    /// Says whether all of it was told, as [`Self::tell_done`].
    async fn tell_dead(
        &self,
        unit: &Unit,
        entry: &mut Entry,
        view: &mut View,
        up: &mut Up,
    ) -> Result<bool> {
        let Some((letter, version)) = view.letter.clone() else { return Ok(true) };
        let incarnation = letter.task.incarnation.clone();
        up.retries += u64::from((letter.failures + letter.crashes).saturating_sub(1));
        match self.there.receipt_of(unit).await? {
            // A receipt beats a dead letter.
            Some(theirs) if theirs.is_about(&incarnation) => {
                if !self.note_shown(unit, view).await? {
                    return Ok(false);
                }
                self.take_receipt(unit, &theirs, None).await?;
                let key = self.local.keys().dead_letter(&letter.task.id)?;
                self.local.delete_work(&key, &version).await?;
            }
            _ => {
                let task = format::Task { origin: None, ..letter.task };
                self.there.write_dead_letter(DeadLetter { task, ..letter }, None).await?;
                up.given_up += 1;
            }
        }
        self.clean_up(unit, entry, &incarnation).await?;
        self.clean_up_here(unit, view, &incarnation).await?;
        Ok(true)
    }

    /// The bucket's work, then its lease, in that order: the record is there.
    async fn clean_up(&self, unit: &Unit, entry: &mut Entry, ours: &str) -> Result<()> {
        let key = self.there.keys().part(unit, Part::Work)?;
        let version = match &entry.origin {
            Some(origin) if entry.incarnation == ours => Some(Version::new(origin.as_str())),
            // Pushed here: in which version it stands there was not kept.
            _ => self.bucket().get(&key).await?.and_then(|object| {
                let same = incarnation(unit, &object) == ours;
                same.then_some(object.meta.version)
            }),
        };
        if let Some(version) = version {
            self.there.delete_work(&key, &version).await?;
        }
        if let Some(told) = entry.told.take() {
            let key = self.there.keys().part(unit, Part::Lease)?;
            let _ = self.bucket().retire(&key, &Version::new(told), entry.token).await?;
        }
        entry.untold = false;
        Ok(())
    }

    /// What a worker of this node left beside its record when it died.
    async fn clean_up_here(&self, unit: &Unit, view: &mut View, ours: &str) -> Result<()> {
        if view.local.work.as_deref() == Some(ours)
            && let Some((_, version)) = &view.work
        {
            self.local.delete_work(&self.local.keys().part(unit, Part::Work)?, version).await?;
            view.local.work = None;
            view.work = None;
        }
        // One that lost its claim and finished all the same: what stood for the other's lease would keep
        // everybody here from the next push of this name.
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

    /// A task that came to its end here in vain: a record of a later push of its name stands, which does
    /// not give way, or it was done in the bundle that it left. Strict mode removes it then; else it
    /// would come down again and again.
    async fn tell_outdated(&self, unit: &Unit, entry: &mut Entry, view: &View) -> Result<()> {
        let Unit::Task(id) = unit else { return Ok(()) };
        let Local { work: None, scheduled: None, receipt, letter, .. } = &view.local else {
            return Ok(());
        };
        if self.local.is_done_in_bundle(id).await? {
            // It was there, or whoever claims it removes it.
            entry.writers.retain(|writer| writer.intent != Intent::Push);
            entry.untold = false;
        }
        if entry.origin.is_none() || (receipt.is_none() && letter.is_none()) {
            return Ok(());
        }
        let key = self.there.keys().part(unit, Part::Work)?;
        let Some(object) = self.bucket().get(&key).await? else { return Ok(()) };
        let task = format::Task::parse(&object.body, id, &object.meta.mark());
        let version = object.meta.version;
        if task.incarnation != entry.incarnation {
            return Ok(());
        }
        let receipt = self.there.receipt_of(unit).await?;
        let letter = self.there.dead_letter(id).await?;
        let stands = |at: Option<StoreTime>| !gives_way(at, task.pushed_at);
        if receipt.is_some_and(|receipt| stands(receipt.pushed_at))
            || letter.is_some_and(|letter| stands(letter.task.pushed_at))
        {
            self.there.delete_work(&key, &version).await?;
            if let Some(told) = entry.told.take() {
                let key = self.there.keys().part(unit, Part::Lease)?;
                let _ = self.bucket().retire(&key, &Version::new(told), entry.token).await?;
            }
        }
        Ok(())
    }

    /// Their receipt counts: it stands here too from now on.
    pub(super) async fn take_receipt(
        &self,
        unit: &Unit,
        theirs: &Receipt,
        ours: Option<Version>,
    ) -> Result<()> {
        let key = self.local.keys().receipt(unit)?;
        let when = ours.map_or(When::Absent, When::Matches);
        let write = Write::when(when, Proof::Bytes).durability(self.local.durability());
        let copy = Receipt { copied: true, ..theirs.clone() };
        wrote(self.local_store().put(&key, copy.to_bytes().into(), write).await?).map(drop)
    }

    /// Says whether the task is the one that the bucket has.
    async fn tell_push(
        &self,
        unit: &Unit,
        entry: &mut Entry,
        view: &mut View,
        up: &mut Up,
    ) -> Result<bool> {
        // Its name follows from a bundle's, so whoever had the bundle elsewhere may have pushed it, too.
        let left = matches!(unit, Unit::Task(id) if bundle_of(id).is_some());
        if view.work.is_some() && view.local.scheduled.is_some() {
            self.tell_scheduled(unit, entry).await?;
        }
        if is_copy(unit, view) {
            // It is another push that is to be told of, and that is yet to come.
            entry.untold = false;
            return Ok(true);
        }
        self.checked.get_or_try_init(|| self.check_queue()).await?;
        // This may have been there, and be over (FIELD.md row 15).
        let ours = view.local.work.clone().or(view.local.scheduled.clone());
        if (self.careful || left)
            && let Some(ours) = ours.clone()
        {
            let what = decide::missing(&ours, &self.ask(unit, &ours).await?);
            if matches!(what, Missing::Done | Missing::Dead) {
                self.end_here(unit, what, view).await?;
                return Ok(false);
            }
        }
        let keys = self.there.keys();
        let receipt = keys.receipt(unit)?;
        let stored = match unit {
            Unit::Task(id) => {
                let scheduled = match (&view.work, entry.scheduled) {
                    (None, Some(time)) => {
                        let key = self.local.keys().scheduled_at(time, id)?;
                        self.local_store().get(&key).await?.map(|object| (time, object))
                    }
                    _ => None,
                };
                let (key, body) = match (&view.work, &scheduled) {
                    (Some((body, _)), _) => (keys.part(unit, Part::Work)?, &body[..]),
                    (None, Some((time, object))) => {
                        (keys.scheduled_at(*time, id)?, &object.body[..])
                    }
                    // Promoted while we looked: told of next time.
                    (None, None) => return Ok(true),
                };
                let task = format::Task {
                    origin: None,
                    ..format::Task::parse(body, id, ours.as_deref().unwrap_or_default())
                };
                // One that left a bundle must not be seen as free before its time.
                if let (LocalLease::Released(history), Some(lease)) =
                    (&view.local.lease, view.record())
                    && history.tries() > 0
                {
                    let lease = self.as_theirs(unit, lease, entry);
                    self.create_lease(unit, &lease, entry).await?;
                }
                let stored = self
                    .there
                    .store_task(&key, &receipt, &task, entry.chosen || left, Proof::Bytes)
                    .await?;
                match stored {
                    Stored::Pending(there) if there.as_deref() == Some(&task.incarnation) => None,
                    stored => Some(stored),
                }
            }
            Unit::Bundle(..) => {
                let Some((body, _)) = &view.work else { return Ok(true) };
                let body = format::Bundle::copied(body, None)
                    .map_err(|error| Error::new(crate::ErrorKind::Data, error.to_string()))?;
                let write = Write::when(When::Absent, Proof::Bytes);
                let put =
                    self.bucket().put(&keys.part(unit, Part::Work)?, body.into(), write).await?;
                // Its name is fresh: whatever stands there is this one.
                wrote(put)?.map(Stored::New)
            }
        };
        match stored {
            Some(Stored::New(version)) => {
                up.pushed += 1;
                let work = keys.part(unit, Part::Work)?;
                if view.work.is_some() && view.local.lease != LocalLease::Foreign {
                    up.seen.push((unit_hash(work.as_str()), state_hash(version.as_str(), "free")));
                }
                if view.work.is_some() {
                    entry.origin = Some(version.as_str().to_owned());
                    entry.incarnation = view.local.work.clone().unwrap_or_default();
                }
            }
            None => {}
            Some(Stored::Pending(_)) => return Ok(false),
            Some(Stored::Completed) => {
                if let Some(theirs) = self.there.receipt_of(unit).await? {
                    self.take_receipt(unit, &theirs, None).await?;
                }
                return Ok(false);
            }
        }
        entry.untold = false;
        entry.scheduled = None;
        Ok(true)
    }

    /// Tells of what waits for its time beside a task of its name.
    async fn tell_scheduled(&self, unit: &Unit, entry: &Entry) -> Result<()> {
        let (Unit::Task(id), Some(time)) = (unit, entry.scheduled) else { return Ok(()) };
        let here = self.local_store().get(&self.local.keys().scheduled_at(time, id)?).await?;
        let Some(object) = here else { return Ok(()) };
        let task = format::Task::parse(&object.body, id, &object.meta.mark());
        let (key, receipt) =
            (self.there.keys().scheduled_at(time, id)?, self.there.keys().receipt(unit)?);
        // Done before: it gives way here, too, once its time has come.
        self.there.store_task(&key, &receipt, &task, entry.chosen, Proof::Bytes).await.map(drop)
    }
}

/// Whether the work came from the bucket.
fn is_copy(unit: &Unit, view: &View) -> bool {
    let Some((body, _)) = &view.work else { return false };
    match unit {
        Unit::Task(id) => format::Task::parse(body, id, "").origin.is_some(),
        Unit::Bundle(id, _) => {
            format::Bundle::parse(body, id).is_ok_and(|bundle| bundle.origin.is_some())
        }
    }
}

/// Which push of a task or bundle this is.
pub(super) fn incarnation(unit: &Unit, object: &Object) -> String {
    let mark = object.meta.mark();
    match unit {
        Unit::Task(id) => format::Task::parse(&object.body, id, &mark).incarnation,
        Unit::Bundle(id, _) => {
            format::Bundle::parse(&object.body, id).map_or(mark, |bundle| bundle.incarnation)
        }
    }
}
