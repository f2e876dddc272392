//! Sync up: what happened here reaches the bucket, by the same conditional writes as strict mode's.
//!
//! For each entry of the outbox: the entry is read, *then* what it is about, then the bucket is told,
//! and then the entry goes, in the version that was read: whatever happened meanwhile was noted again.
//! Every step can be repeated, so a crash anywhere is repaired by the next sync.

mod ended;
mod pushed;

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use futures::StreamExt as _;
use leasehold_protocol::cas::Version;
use leasehold_protocol::format::lease::Lease;
use leasehold_protocol::format::outbox::{Entry, Writer, unit_hash};
use leasehold_protocol::format::task::{self as format, DeadLetter, Receipt};
use leasehold_protocol::layout::queue::{Part, Unit};
use leasehold_protocol::lease::{Judgement, Seen, Why};
use leasehold_protocol::queue::History;
use leasehold_protocol::sync::{self as decide, End, Local, LocalLease, TellLease};
use serde::Serialize;

use super::{AT_A_TIME, Pair, Replica};
use crate::Result;
use crate::lock::Guard;
use crate::store::meter::Usage;
use crate::store::{List, Object};

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
