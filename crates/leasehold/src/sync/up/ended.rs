//! What came to its end here: receipts, dead letters, and what is left of their tasks.

use leasehold_protocol::cas::{Version, When};
use leasehold_protocol::format::outbox::{Entry, Intent};
use leasehold_protocol::format::task::{self as format, DeadLetter, Receipt};
use leasehold_protocol::layout::queue::{Part, Unit};
use leasehold_protocol::queue::gives_way;
use leasehold_protocol::settle::Proof;
use leasehold_protocol::sync::{Local, LocalLease};

use super::{Up, View, incarnation};
use crate::queue::wrote;
use crate::store::Write;
use crate::sync::{Pair, hold};
use crate::{Result, StoreTime};

impl Pair<'_> {
    /// Says whether all of it was told: else something was noted meanwhile, and the next sync does the rest.
    pub(super) async fn tell_done(
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
    pub(super) async fn tell_dead(
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
            let token = hold::token(seen).unwrap_or(0);
            let _ = self.local_store().retire(&key, &seen.version, token).await?;
        }
        Ok(())
    }

    /// A task that came to its end here in vain: a record of a later push of its name stands, which does
    /// not give way, or it was done in the bundle that it left. Strict mode removes it then; else it
    /// would come down again and again.
    pub(super) async fn tell_outdated(
        &self,
        unit: &Unit,
        entry: &mut Entry,
        view: &View,
    ) -> Result<()> {
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
    pub(in crate::sync) async fn take_receipt(
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
}
