//! Claiming, giving up, and cleaning up after others.

use std::borrow::Cow;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use leasehold_protocol::cas::{Version, When};
use leasehold_protocol::format::lease::Lease;
use leasehold_protocol::format::task::{self as format, DeadLetter, Receipt};
use leasehold_protocol::layout::queue::{Part, Unit};
use leasehold_protocol::mutant::{self, Mutant};
use leasehold_protocol::queue::{self as decide, Claim, History, Met};
use leasehold_protocol::settle::Proof;

use super::bundle::Run;
use super::task::Held;
use super::{Queue, wrote};
use crate::lease::{Desk, Passes, Tenure};
use crate::store::{Delete, Object, Write};
use crate::{Key, Result};

/// What came of an attempt to get something to do.
#[derive(Debug)]
pub(super) enum Tried {
    /// This task.
    Task(Box<Held>),
    /// This bundle.
    Bundle(Run),
    /// Somebody else has it.
    Taken,
    /// There is nothing to be done about it any more.
    Over,
    /// It is to be tried again after this.
    Later(Duration),
    /// It, or its lease, is not what it should be.
    Unreadable,
}

impl Queue {
    /// Claims what has no lease, as far as we know: a PUT and a GET. `passes` are this worker's.
    pub(super) async fn claim_free(
        &self,
        unit: &Unit,
        worker: &str,
        passes: &Passes,
    ) -> Result<Tried> {
        if mutant::is(Mutant::GhostClaim) {
            let there = self.store().get(&self.keys().part(unit, Part::Work)?).await?;
            return match self.desk(unit, worker)?.create(|_| {}).await? {
                Some(tenure) => {
                    Box::pin(self.begin_with(unit, tenure, History::default(), there)).await
                }
                None => Ok(Tried::Taken),
            };
        }
        let desk = self.desk(unit, worker)?;
        match desk.create_by(passes, |lease| self.note_companion(lease)).await? {
            Some(tenure) => self.begin(unit, tenure, History::default()).await,
            None => Ok(Tried::Taken),
        }
    }

    /// Whether a listed task seems to be there and free still: two HEADs cost a sixth of a claim
    /// that is refused. Says nothing about a moment later.
    pub(super) async fn looks_free(&self, unit: &Unit) -> Result<bool> {
        let work = self.keys().part(unit, Part::Work)?;
        let lease = self.keys().part(unit, Part::Lease)?;
        // In a directory that is told for less.
        let seems_there = |key| self.store().backend().seems_there(key);
        if seems_there(&lease) {
            return Ok(false);
        }
        if seems_there(&work) {
            return Ok(true);
        }
        let there = self.store().head(&work).await?.is_some();
        Ok(there && self.store().head(&lease).await?.is_none())
    }

    /// Claims what has a lease, if that is nobody's any more: after a failure, a drain or a crash.
    pub(super) async fn claim_leased(&self, unit: &Unit, desk: &Desk) -> Result<Tried> {
        let Some(seen) = desk.look().await? else {
            return match desk.create(|lease| self.note_companion(lease)).await? {
                Some(tenure) => self.begin(unit, tenure, History::default()).await,
                None => Ok(Tried::Taken),
            };
        };
        let history = match decide::claim(&seen, &desk.judge(&seen)) {
            Claim::Held(_) => return Ok(Tried::Taken),
            Claim::Later(at) => return Ok(Tried::Later(at.since(seen.now))),
            Claim::Take(history) => history,
        };
        // Whoever had it may have completed it, and vanished before it cleaned up.
        if self.is_over(unit).await? {
            let token = seen.record.as_ref().ok().and_then(|lease| lease.token).unwrap_or(0);
            self.store().retire(desk.key(), &seen.version, token).await.map(drop)?;
            return Ok(Tried::Over);
        }
        let fill = |lease: &mut Lease| {
            history.write(lease);
            self.note_companion(lease);
        };
        match desk.take(&seen, fill).await? {
            Some(tenure) => self.begin(unit, tenure, history).await,
            None => Ok(Tried::Taken),
        }
    }

    /// Reads what we have claimed.
    async fn begin(&self, unit: &Unit, tenure: Tenure, history: History) -> Result<Tried> {
        let there = self.store().get(&self.keys().part(unit, Part::Work)?).await?;
        self.begin_with(unit, tenure, history, there).await
    }

    async fn begin_with(
        &self,
        unit: &Unit,
        tenure: Tenure,
        history: History,
        there: Option<Object>,
    ) -> Result<Tried> {
        let Some(object) = there else {
            // Finished elsewhere: our claim came from an old listing (FIELD.md row 7). Boxed, as all
            // that is rare here: every claim would carry its state along, from caller to caller.
            Box::pin(tenure.remove()).await?;
            return Ok(Tried::Over);
        };
        // The answer may have taken longer than the claim lasts: by now somebody else may have done it.
        tenure.check()?;
        let id = match unit {
            Unit::Task(id) => id,
            Unit::Bundle(id, _) => {
                return Box::pin(self.begin_bundle(unit, id, tenure, history, object)).await;
            }
        };
        let mark = object.meta.mark();
        let version = object.meta.version;
        let task = format::Task::parse(&object.body, id, &mark);
        // Back after its receipt, which we have seen: a request was under way for long. In a replica nothing
        // is for long, and what the bucket has again is taken from it by whoever does it once more. A task of
        // another client has no other mark than its bytes: the next one may look the same.
        let back = self.outbox().is_none()
            && task.incarnation != mark
            && self.0.lately.knows(unit, &task.incarnation);
        if back || self.is_done_in_bundle(&task.id).await? {
            if back {
                // Seen is not yet on disk: a power loss must not take the receipt, and leave the delete.
                self.store().persist(&[self.keys().receipt(unit)?]).await?;
            }
            let work = self.keys().part(unit, Part::Work)?;
            Box::pin(self.delete_work(&work, &version)).await?;
            Box::pin(tenure.remove()).await?;
            return Ok(Tried::Over);
        }
        self.note_claim(unit, &task.incarnation, task.origin.as_deref()).await?;
        let history = history.about(&task.incarnation, task.pushed_at);
        let may_run = decide::may_run(&history, &task, &self.settings());
        let held = Held::new(self, unit.clone(), task, version, tenure, history);
        match may_run {
            true => Ok(Tried::Task(Box::new(held))),
            false => {
                Box::pin(held.give_up()).await?;
                self.0.given_up.fetch_add(1, SeqCst);
                Ok(Tried::Over)
            }
        }
    }

    async fn begin_bundle(
        &self,
        unit: &Unit,
        id: &str,
        tenure: Tenure,
        history: History,
        object: Object,
    ) -> Result<Tried> {
        let mark = object.meta.mark();
        let version = object.meta.version;
        match format::Bundle::parse(&object.body, id) {
            Ok(bundle) => {
                let origin = bundle.origin.as_deref();
                self.note_claim(unit, &bundle.incarnation, origin).await?;
                let history = history.about(&bundle.incarnation, bundle.pushed_at);
                Run::begin(self, unit, bundle, version, tenure, history).await
            }
            // Kept as a dead letter as a whole.
            Err(error) => {
                let name = unit.name();
                let task = format::Task::parse(&object.body, &name, &mark);
                let held = Held::new(self, unit.clone(), task, version, tenure, history);
                held.give_up_because(&error.to_string()).await?;
                Ok(Tried::Over)
            }
        }
    }

    /// In a node's replica: the bucket is to learn that we have it.
    async fn note_claim(&self, unit: &Unit, incarnation: &str, origin: Option<&str>) -> Result<()> {
        match self.outbox() {
            Some(outbox) => Box::pin(outbox.claimed(unit, incarnation, origin)).await,
            None => Ok(()),
        }
    }

    /// In a node's replica: the bucket is to learn of a receipt or dead letter that is written next.
    pub(super) async fn note_finish(
        &self,
        unit: &Unit,
        incarnation: &str,
        origin: Option<&str>,
    ) -> Result<()> {
        match self.outbox() {
            Some(outbox) => {
                Box::pin(outbox.finishing(unit, incarnation, origin, self.durability())).await
            }
            None => Ok(()),
        }
    }

    /// In a node's replica: a completion came second.
    pub(super) async fn note_duplicate(&self, unit: &Unit, incarnation: &str) {
        let Some(outbox) = self.outbox() else { return };
        // What was announced does not come: the record that stands may be of another push, and would
        // not show that it is over.
        if let Err(error) = outbox.not_finishing(unit, incarnation).await {
            tracing::debug!(%error, "left until this process ends");
        }
        let mark = self.store().env().nonce().to_string();
        if let Err(error) = outbox.count_duplicate(unit, &mark).await {
            tracing::warn!(%error, "a duplicate was not counted");
        }
    }

    /// Whether a task was completed or given up in its present incarnation. If so, and it still
    /// stands there, it is removed.
    pub(super) async fn is_over(&self, unit: &Unit) -> Result<bool> {
        let receipt = self.receipt_of(unit).await?;
        let letter = match unit {
            Unit::Task(id) => self.dead_letter(id).await?.map(|letter| letter.task.incarnation),
            Unit::Bundle(..) => None,
        };
        if receipt.is_none() && letter.is_none() {
            return Ok(false);
        }
        let key = self.keys().part(unit, Part::Work)?;
        let Some(object) = self.store().get(&key).await? else { return Ok(true) };
        let incarnation = match unit {
            Unit::Task(id) => {
                format::Task::parse(&object.body, id, &object.meta.mark()).incarnation
            }
            Unit::Bundle(id, _) => format::Bundle::parse(&object.body, id)
                .map_or_else(|_| object.meta.mark(), |bundle| bundle.incarnation),
        };
        let version = object.meta.version;
        let receipt = receipt.as_ref().map(|receipt| receipt.about(&incarnation));
        match decide::met(&incarnation, receipt, letter.as_deref()) {
            Met::Open => Ok(false),
            Met::Over => {
                // What others wrote must be on disk before we delete on the strength of it.
                let records = [self.keys().receipt(unit)?, self.keys().dead_letter(&unit.name())?];
                self.store().persist(&records).await?;
                self.delete_work(&key, &version).await?;
                Ok(true)
            }
        }
    }

    /// Records a completion. `false` if somebody else's record of the same push stands already.
    pub(super) async fn write_receipt(&self, unit: &Unit, receipt: Receipt) -> Result<bool> {
        let nonce = self.store().env().nonce();
        let receipt = Receipt { nonce: nonce.to_string(), ..receipt };
        let theirs = self.record_receipt(unit, &receipt, Proof::Nonce(nonce)).await?;
        Ok(theirs.is_none())
    }

    /// Records a completion whose receipt has its nonce already: recording it twice is recording it
    /// once. Returns somebody else's if that stands.
    pub(crate) async fn record_receipt(
        &self,
        unit: &Unit,
        receipt: &Receipt,
        proof: Proof,
    ) -> Result<Option<Receipt>> {
        let key = self.keys().receipt(unit)?;
        // With those that it takes the place of.
        let mut receipt = Cow::Borrowed(receipt);
        let mut when = match mutant::is(Mutant::LateGhostPut) {
            true => When::Any,
            false => When::Absent,
        };
        loop {
            let write = Write::when(when, proof).durability(self.durability());
            let put = self.store().put(&key, receipt.to_bytes().into(), write).await?;
            if wrote(put)?.is_some() {
                return Ok(None);
            }
            when = match self.store().get(&key).await? {
                None => When::Absent,
                Some(object) => match Receipt::parse(&object.body) {
                    Ok(there) if there.has_recorded(&receipt.nonce) => return Ok(None),
                    // The first counts. Of an earlier push, it gives way; of a later one, ours is out
                    // of date.
                    Ok(there)
                        if there.is_about(&receipt.incarnation)
                            || !decide::gives_way(there.pushed_at, receipt.pushed_at) =>
                    {
                        self.store().persist(std::slice::from_ref(&key)).await?;
                        return Ok(Some(there));
                    }
                    Ok(there) => {
                        decide::replace(receipt.to_mut(), &there);
                        When::Matches(object.meta.version)
                    }
                    Err(_) => When::Matches(object.meta.version),
                },
            };
        }
    }

    /// Records that a task was given up.
    pub(crate) async fn write_dead_letter(
        &self,
        mut letter: DeadLetter,
        work: Option<&Version>,
    ) -> Result<()> {
        let key = self.keys().dead_letter(&letter.task.id)?;
        let unit = Unit::Task(letter.task.id.clone());
        let mut when = When::Absent;
        loop {
            let nonce = self.store().env().nonce();
            letter.nonce = nonce.to_string();
            let write = Write::when(when, Proof::Nonce(nonce)).durability(self.durability());
            let put = self.store().put(&key, letter.to_bytes().into(), write).await?;
            if wrote(put)?.is_some() {
                return Ok(());
            }
            when = match self.store().get(&key).await? {
                None => When::Absent,
                Some(object) => match DeadLetter::parse(&object.body) {
                    Ok(there)
                        if there.task.incarnation == letter.task.incarnation
                            || !(decide::gives_way(
                                there.task.pushed_at,
                                letter.task.pushed_at,
                            ) || self.is_latest(&unit, work).await?) =>
                    {
                        if let Some(outbox) = self.outbox() {
                            // What was announced does not come: that of a later push stands for it.
                            outbox.not_finishing(&unit, &letter.task.incarnation).await?;
                        }
                        return self.store().persist(std::slice::from_ref(&key)).await;
                    }
                    _ => When::Matches(object.meta.version),
                },
            };
        }
    }

    /// Whether this is the latest push of its name, by whatever clock it came: no other can be pushed while
    /// it stands there. In a bucket it may be back after it was done, and that has one clock.
    async fn is_latest(&self, unit: &Unit, work: Option<&Version>) -> Result<bool> {
        let Some(work) = work.filter(|_| !self.store().kind().is_bucket()) else {
            return Ok(false);
        };
        let there = self.store().head(&self.keys().part(unit, Part::Work)?).await?;
        Ok(there.is_some_and(|there| there.version == *work))
    }

    /// Deletes a task or bundle in this version only (FIELD.md rows 22, 23). Says whether it was
    /// there.
    pub(crate) async fn delete_work(&self, key: &Key, version: &Version) -> Result<bool> {
        let store = self.store();
        if mutant::is(Mutant::SameIdNewTask) {
            let _ = store.delete(key).await?;
            return Ok(true);
        }
        if store.deletes_conditionally().await? {
            return match store.delete_version(key, version).await? {
                Delete::Deleted => Ok(true),
                Delete::Refused => Ok(false),
                Delete::Contended => Err(crate::Error::unavailable("others keep writing").at(key)),
                Delete::Unknown(unknown) => Err(unknown.into_error()),
            };
        }
        // The best that such a store allows. While its receipt stands, nobody pushes it again.
        match store.head(key).await? {
            Some(meta) if meta.version == *version => {
                let _ = store.delete(key).await?;
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    pub(crate) async fn receipt_of(&self, unit: &Unit) -> Result<Option<Receipt>> {
        let key = self.keys().receipt(unit)?;
        let Some(object) = self.store().get(&key).await? else { return Ok(None) };
        match Receipt::parse(&object.body) {
            Ok(receipt) => {
                // At once: another of our jobs may have asked before it was written, and be about to
                // begin.
                for incarnation in receipt.pushes() {
                    self.0.lately.completed(unit, incarnation);
                }
                Ok(Some(receipt))
            }
            Err(error) => {
                tracing::warn!(%key, %error, "a receipt cannot be read");
                Ok(None)
            }
        }
    }

    /// The dead letter of a task, if it was given up.
    pub async fn dead_letter(&self, id: &str) -> Result<Option<DeadLetter>> {
        let key = self.keys().dead_letter(id)?;
        let Some(object) = self.store().get(&key).await? else { return Ok(None) };
        match DeadLetter::parse(&object.body) {
            Ok(letter) => Ok(Some(letter)),
            Err(error) => {
                tracing::warn!(%key, %error, "a dead letter cannot be read");
                Ok(None)
            }
        }
    }
}
