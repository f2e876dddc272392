//! A task that is held.

use std::time::Duration;

use leasehold_protocol::cas::Version;
use leasehold_protocol::format::task::{self as format, DeadLetter, Failure, Json, Receipt};
use leasehold_protocol::layout::queue::{Part, Unit};
use leasehold_protocol::mutant::{self, Mutant};
use leasehold_protocol::queue::{self as decide, AfterFailure, History};
use leasehold_protocol::time::StoreTime;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio_util::sync::CancellationToken;

use super::Queue;
use super::bundle::Piece;
use crate::lease::Tenure;
use crate::{Error, ErrorKind, Result};

/// What an ack came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Acked {
    /// This was the completion that counts.
    First,
    /// Somebody else had completed the task already.
    Again,
}

/// A task to be done. Its claim is renewed in the background until it is acked, nacked or failed.
///
/// Dropping it without any of these counts as a failure: it is tried again later.
#[derive(Debug)]
pub struct Task(Option<Kind>);

#[derive(Debug)]
enum Kind {
    Single(Box<Held>),
    Piece(Box<Piece>),
}

/// A task of its own, and what is known of it.
#[derive(Debug)]
pub(super) struct Held {
    queue: Queue,
    unit: Unit,
    task: format::Task,
    version: Version,
    tenure: Tenure,
    history: History,
}

impl Task {
    pub(super) fn single(held: Box<Held>) -> Self {
        Self(Some(Kind::Single(held)))
    }

    pub(super) fn piece(piece: Piece) -> Self {
        Self(Some(Kind::Piece(Box::new(piece))))
    }

    /// There is one until the task is consumed.
    fn kind(&self) -> Option<&Kind> {
        self.0.as_ref()
    }

    fn task(&self) -> Option<&format::Task> {
        Some(match self.kind()? {
            Kind::Single(held) => &held.task,
            Kind::Piece(piece) => piece.task(),
        })
    }

    /// Its name.
    pub fn id(&self) -> &str {
        self.task().map_or("", |task| &task.id)
    }

    /// Which push of it this is: every push and every retry makes a new one.
    pub fn incarnation(&self) -> &str {
        self.task().map_or("", |task| &task.incarnation)
    }

    /// What is to be done: JSON as it was pushed.
    pub fn payload(&self) -> &str {
        self.task().map_or("", |task| task.payload.get())
    }

    /// The payload as text: what is behind the quotes if it is a JSON text, else the JSON.
    pub fn text(&self) -> String {
        self.task().map_or_else(String::new, |task| format::plain_text(&task.payload))
    }

    /// The payload as a value.
    pub fn json<T: DeserializeOwned>(&self) -> Result<T> {
        serde_json::from_str(self.payload()).map_err(|error| {
            let message =
                format!("the payload of task {:?} is not as expected: {error}", self.id());
            Error::new(ErrorKind::Data, message)
        })
    }

    /// Which attempt this is: 1 is the first.
    pub fn attempt(&self) -> u32 {
        match self.kind() {
            Some(Kind::Single(held)) => held.history.tries().saturating_add(1),
            Some(Kind::Piece(piece)) => piece.attempt(),
            None => 0,
        }
    }

    /// The fence: higher than that of everybody who had the task before.
    pub fn token(&self) -> u64 {
        match self.kind() {
            Some(Kind::Single(held)) => held.tenure.token(),
            Some(Kind::Piece(piece)) => piece.token(),
            None => 0,
        }
    }

    /// How long this attempt may take. No time at all says that there is no limit.
    pub fn timeout(&self) -> Option<Duration> {
        let own = self.task().and_then(|task| task.timeout);
        let limit = own.or_else(|| self.queue().and_then(|queue| queue.settings().timeout));
        limit.filter(|limit| !limit.is_zero())
    }

    /// When it was pushed, by the store's clock.
    pub fn pushed_at(&self) -> Option<StoreTime> {
        self.task().and_then(|task| task.pushed_at)
    }

    /// The queue it is from.
    pub fn queue(&self) -> Option<&Queue> {
        Some(match self.kind()? {
            Kind::Single(held) => &held.queue,
            Kind::Piece(piece) => piece.queue(),
        })
    }

    /// Cancelled when the claim is lost: somebody else may be doing the task by now. Stop then.
    pub fn lost(&self) -> CancellationToken {
        match self.kind() {
            Some(Kind::Single(held)) => held.tenure.lost(),
            Some(Kind::Piece(piece)) => piece.lost(),
            None => CancellationToken::new(),
        }
    }

    /// Whether the claim can be trusted at this moment. To be asked before each guarded action.
    pub fn check(&self) -> Result<()> {
        match self.kind() {
            Some(Kind::Single(held)) => held.tenure.check(),
            Some(Kind::Piece(piece)) => piece.check(),
            None => Ok(()),
        }
    }

    /// For how long the claim can be trusted from now on, if it is not renewed.
    pub fn trusted_for(&self) -> Duration {
        match self.kind() {
            Some(Kind::Single(held)) => held.tenure.trusted_for(),
            Some(Kind::Piece(piece)) => piece.trusted_for(),
            None => Duration::ZERO,
        }
    }

    /// Renews the claim now, with a note on how far the work is. One PUT. Within a bundle the note
    /// goes nowhere.
    pub async fn progress(&self, note: &impl Serialize) -> Result<()> {
        let note = serde_json::to_value(note)
            .map_err(|error| Error::invalid(format!("not a note: {error}")))?;
        match self.kind() {
            Some(Kind::Single(held)) => {
                let rewrite = |lease: &mut leasehold_protocol::format::lease::Lease| {
                    lease.other.insert("progress".to_owned(), note.clone());
                };
                held.tenure.rewrite(rewrite).await
            }
            Some(Kind::Piece(_)) | None => self.check(),
        }
    }

    /// Done, with nothing to tell.
    pub async fn ack(self) -> Result<Acked> {
        self.finish(None).await
    }

    /// Done, with this result.
    pub async fn ack_json(self, result: &impl Serialize) -> Result<Acked> {
        let result = serde_json::value::to_raw_value(result)
            .map_err(|error| Error::invalid(format!("the result cannot be JSON: {error}")))?;
        self.finish(Some(result)).await
    }

    /// Done, with this text as its result.
    pub async fn ack_text(self, result: &str) -> Result<Acked> {
        self.finish(Some(format::text_payload(result))).await
    }

    async fn finish(mut self, result: Option<Json>) -> Result<Acked> {
        match self.0.take() {
            Some(Kind::Single(held)) => held.ack(result).await,
            // Boxed: the ack of a bundle is in it, and every other would carry it along.
            Some(Kind::Piece(piece)) => Box::pin(piece.ack(result)).await,
            None => Ok(Acked::Again),
        }
    }

    /// Not done: to be tried again, after `delay` or what the queue's backoff says. Once it has
    /// failed as often as it may, it becomes a dead letter. Says whether it is tried again.
    pub async fn nack(mut self, error: &str, delay: Option<Duration>) -> Result<bool> {
        match self.0.take() {
            Some(Kind::Single(held)) => held.nack(error, delay).await,
            Some(Kind::Piece(piece)) => piece.nack(error, delay).await,
            None => Ok(false),
        }
    }

    /// Never to be done: becomes a dead letter now.
    pub async fn fail(mut self, error: &str) -> Result<()> {
        match self.0.take() {
            Some(Kind::Single(held)) => held.fail(error).await,
            Some(Kind::Piece(piece)) => piece.fail(error).await,
            None => Ok(()),
        }
    }

    /// Not done, and nobody's fault: back to the others at once, without counting. For a worker
    /// that has to end.
    pub async fn give_back(mut self) -> Result<()> {
        match self.0.take() {
            Some(Kind::Single(held)) => held.give_back().await,
            Some(Kind::Piece(piece)) => piece.give_back().await,
            None => Ok(()),
        }
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        let Some(kind) = self.0.take() else { return };
        // Also where there is no runtime around us: a task that makes its worker panic must count.
        let runtime = match &kind {
            Kind::Single(held) => held.tenure.runtime().clone(),
            Kind::Piece(piece) => piece.runtime().clone(),
        };
        runtime.spawn(async move {
            let error = "the worker dropped the task";
            let nacked = match kind {
                Kind::Single(held) => held.nack(error, None).await,
                Kind::Piece(piece) => piece.nack(error, None).await,
            };
            if let Err(error) = nacked {
                tracing::debug!(%error, "a dropped task could not be given back");
            }
        });
    }
}

impl Held {
    pub fn new(
        queue: &Queue,
        unit: Unit,
        task: format::Task,
        version: Version,
        tenure: Tenure,
        history: History,
    ) -> Self {
        Self { queue: queue.clone(), unit, task, version, tenure, history }
    }

    /// Whether the claim cannot be trusted any more.
    pub fn is_lost(&self) -> bool {
        self.tenure.check().is_err()
    }

    /// For how long the claim can be trusted from now on, if it is not renewed.
    pub fn trusted_for(&self) -> Duration {
        self.tenure.trusted_for()
    }

    /// The version of its lease, as we last wrote it.
    pub fn lease_version(&self) -> Version {
        self.tenure.version()
    }

    fn worker(&self) -> String {
        self.tenure.lease().holder
    }

    async fn ack(self, result: Option<Json>) -> Result<Acked> {
        let queue = self.queue.clone();
        if !queue.settings().receipts {
            // Deleting is what completes it, so only whoever still has it may.
            self.tenure.check()?;
            let first = self.remove().await?;
            return Ok(if first { Acked::First } else { Acked::Again });
        }
        if mutant::is(Mutant::ZombieAck) {
            let _ = queue.store().delete(&queue.keys().part(&self.unit, Part::Work)?).await?;
            let _ = queue.store().delete(&queue.keys().part(&self.unit, Part::Lease)?).await?;
        }
        let lease = self.tenure.lease();
        let receipt = Receipt {
            id: self.task.id.clone(),
            incarnation: self.task.incarnation.clone(),
            worker: lease.holder,
            token: self.tenure.token(),
            pushed_at: self.task.pushed_at,
            started_at: lease.acquired_at,
            completed_at: queue.store().now().await?,
            retries: self.history.tries(),
            result,
            results: None,
            replaced: Vec::new(),
            copied: false,
            nonce: String::new(),
        };
        let recorded = match queue.is_done_in_bundle(&self.task.id).await {
            Ok(true) => Ok(false),
            Ok(false) => self.record(receipt).await,
            Err(error) => Err(error),
        };
        let first = match recorded {
            Ok(first) => first,
            Err(error) => {
                // Nothing says that it is done, so it is done again; but not at once. Nor for ever, unless it
                // is the store that is in trouble: no task is given up for that.
                let _ = match error.kind() {
                    ErrorKind::Unavailable => Box::pin(self.put_off()).await,
                    _ => {
                        let message = format!("done, but not recorded: {error}");
                        Box::pin(self.nack(&message, None)).await.map(drop)
                    }
                };
                return Err(error);
            }
        };
        queue.0.lately.completed(&self.unit, &self.task.incarnation);
        if !first {
            Box::pin(queue.note_duplicate(&self.unit, &self.task.incarnation)).await;
        }
        // It is done, whatever happens from here on: others finish the clean-up if we do not.
        self.clean_up().await;
        Ok(if first { Acked::First } else { Acked::Again })
    }

    /// Records the completion; where this is a node's replica, the bucket is to be told of it.
    async fn record(&self, receipt: Receipt) -> Result<bool> {
        let Self { queue, unit, task, .. } = self;
        queue.note_finish(unit, &task.incarnation, task.origin.as_deref()).await?;
        queue.write_receipt(unit, receipt).await
    }

    async fn clean_up(self) {
        if let Err(error) = self.remove().await {
            tracing::debug!(%error, "left for the next sweep");
        }
    }

    /// The task, then its lease: in that order. Says whether the task was there.
    async fn remove(&self) -> Result<bool> {
        let key = self.queue.keys().part(&self.unit, Part::Work)?;
        let first = match self.tenure.remove_with(&key, &self.version).await? {
            Some(first) => first,
            None => self.queue.delete_work(&key, &self.version).await?,
        };
        if let Err(error) = self.tenure.remove().await {
            tracing::debug!(%error, "left for the next sweep");
        }
        Ok(first)
    }

    async fn failure(&self, error: &str) -> Result<Failure> {
        let at = self.queue.store().now().await?;
        Ok(Failure { at, worker: self.worker(), crash: false, error: error.to_owned() })
    }

    async fn nack(self, error: &str, delay: Option<Duration>) -> Result<bool> {
        let failure = self.failure(error).await?;
        let random = self.queue.store().env().random();
        let settings = self.queue.settings();
        match decide::after_failure(&self.history, &self.task, &settings, failure, delay, random) {
            AfterFailure::Retry(history) => {
                let durability = self.queue.durability();
                let released = self.tenure.release_with(durability, |lease| history.write(lease));
                released.await.map(|()| true)
            }
            AfterFailure::GiveUp(history) => {
                Self { history, ..self }.give_up().await.map(|()| false)
            }
        }
    }

    async fn fail(self, error: &str) -> Result<()> {
        let failure = self.failure(error).await?;
        self.give_up_with(failure).await
    }

    /// The same for what we found to be impossible ourselves.
    pub async fn give_up_because(self, error: &str) -> Result<()> {
        let failure = self.failure(error).await?;
        self.give_up_with(failure).await
    }

    async fn give_up_with(mut self, failure: Failure) -> Result<()> {
        self.history.failures = self.history.failures.saturating_add(1);
        self.history.note(failure);
        self.give_up().await
    }

    /// Writes a dead letter, unless somebody completed the task meanwhile; then cleans up.
    pub async fn give_up(self) -> Result<()> {
        self.tenure.check()?;
        let queue = self.queue.clone();
        let receipt = queue.receipt_of(&self.unit).await?;
        if receipt.is_none_or(|receipt| !receipt.is_about(&self.task.incarnation))
            && !queue.is_done_in_bundle(&self.task.id).await?
        {
            let letter = DeadLetter {
                task: self.task.clone(),
                failed_at: queue.store().now().await?,
                worker: self.worker(),
                failures: self.history.failures,
                crashes: self.history.crashes,
                errors: self.history.errors.clone(),
                nonce: String::new(),
            };
            let origin = self.task.origin.as_deref();
            queue.note_finish(&self.unit, &self.task.incarnation, origin).await?;
            queue.write_dead_letter(letter, Some(&self.version)).await?;
        }
        if mutant::is(Mutant::HalfDoneDeadLetter) {
            let _ = queue.store().delete(&queue.keys().part(&self.unit, Part::Work)?).await?;
        }
        self.clean_up().await;
        Ok(())
    }

    /// Back to the others without counting, to be tried again after the first pause.
    async fn put_off(mut self) -> Result<()> {
        let pause = self.queue.settings().backoff.max(Duration::from_secs(1));
        self.history.not_before = Some(self.queue.store().now().await?.plus(pause));
        self.give_back().await
    }

    async fn give_back(self) -> Result<()> {
        let history = self.history;
        let durability = self.queue.durability();
        self.tenure.release_with(durability, |lease| history.write(lease)).await
    }
}
