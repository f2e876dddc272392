//! Pushing: one PUT for a task, or for a whole bundle.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use futures::StreamExt as _;
use futures::future::BoxFuture;
use leasehold_protocol::cas::{Version, When};
use leasehold_protocol::format::task::{Bundle, Json, Receipt, Task, bundle_task, text_payload};
use leasehold_protocol::layout::queue::{Part, Unit};
use leasehold_protocol::queue::gives_way;
use leasehold_protocol::settle::Proof;
use leasehold_protocol::time::StoreTime;
use serde::Serialize;
use ulid::Ulid;

use super::{Queue, wrote};
use crate::env::Env;
use crate::store::{List, Write};
use crate::{Error, ErrorKind, Key, Result};

/// How many pushes of [`Queue::push_many`] are under way at a time.
const AT_A_TIME: usize = 32;

/// The most tasks in a bundle: its records must stay small enough to be rewritten by heartbeats.
pub const MAX_BUNDLE: usize = 10_000;

/// The longest payload. What is larger belongs into an object of its own, with its key as the
/// payload.
pub const MAX_PAYLOAD: usize = 16 << 20;

/// An empty name would be no name where tasks are in a bundle.
const NAMELESS: &str = "a task needs a name, or none at all to get one";

/// A task to be pushed.
#[derive(Debug, Clone)]
pub struct NewTask {
    id: Option<String>,
    payload: Json,
    delay: Option<Duration>,
    timeout: Option<Duration>,
    max_attempts: Option<u32>,
}

impl NewTask {
    /// A task with this text as its payload.
    pub fn text(text: &str) -> Self {
        Self::raw(text_payload(text))
    }

    /// A task with this value as its payload.
    pub fn json(value: &impl Serialize) -> Result<Self> {
        let payload = serde_json::value::to_raw_value(value).map_err(|error| {
            Error::invalid(format!("the payload cannot be written as JSON: {error}"))
        })?;
        Ok(Self::raw(payload))
    }

    /// A task with this JSON as its payload.
    pub fn raw(payload: Json) -> Self {
        Self { id: None, payload, delay: None, timeout: None, max_attempts: None }
    }

    /// Its name, any text: pushing it again changes nothing while it is pending, or completed and
    /// its receipt is kept. Without, it gets a name that sorts by time.
    #[must_use]
    pub fn id(mut self, id: impl Into<String>) -> Self {
        self.id = Some(id.into());
        self
    }

    /// It is not to be run before this has passed.
    #[must_use]
    pub fn delay(mut self, delay: Duration) -> Self {
        self.delay = Some(delay).filter(|delay| !delay.is_zero());
        self
    }

    /// How long an attempt may take.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// How often it may fail, if not as often as the queue says.
    #[must_use]
    pub fn max_attempts(mut self, attempts: u32) -> Self {
        self.max_attempts = Some(attempts);
        self
    }

    /// How many bytes its payload has: those of a bundle have [`MAX_PAYLOAD`] together.
    pub fn size(&self) -> usize {
        self.payload.get().len()
    }

    fn checked(&self) -> Result<()> {
        let size = self.size();
        if size > MAX_PAYLOAD {
            return Err(Error::invalid(format!(
                "a payload of {size} bytes is too long for a task (the most is {MAX_PAYLOAD}): store \
                 it as an object, and push its key"
            )));
        }
        if self.max_attempts == Some(0) {
            return Err(Error::invalid("a task needs at least one attempt"));
        }
        Ok(())
    }

    fn into_task(self, id: String, incarnation: String, pushed_at: Option<StoreTime>) -> Task {
        let Self { payload, timeout, max_attempts, .. } = self;
        Task { id, incarnation, pushed_at, timeout, max_attempts, origin: None, payload }
    }
}

/// What came of a push.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Pushed {
    /// The task's name.
    pub id: String,
    /// Whether it was new.
    pub outcome: Outcome,
    /// Which push of it is pending, where one is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub incarnation: Option<String>,
}

/// Whether a name is that of a bundle (`-` and how many tasks) or of a task of one (`.` and which).
pub(crate) fn bundle_of(id: &str) -> Option<(char, u32)> {
    let (bundle, rest) = id.split_at_checked(26)?;
    Ulid::from_string(bundle).ok()?;
    let kind = rest.chars().next().filter(|kind| matches!(kind, '-' | '.'))?;
    Some((kind, rest[1..].parse().ok()?))
}

/// What became of a task that was to be stored.
#[derive(Debug)]
pub(crate) enum Stored {
    /// It is there now.
    New(Version),
    /// There is one with its name, of this incarnation.
    Pending(Option<String>),
    /// It was done before.
    Completed,
    /// It was there, and is done or given up by now.
    Over,
}

/// What became of work that was to be put into its place.
#[derive(Debug)]
pub(crate) enum Placed {
    /// It is there now.
    There(Version),
    /// Something else is.
    Taken,
    /// A record says that it need not be.
    Over(Recorded),
}

/// What a push's record is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Recorded {
    /// The push itself: it was there, and is done or given up.
    This,
    /// One of the same name that came later, and is done: the record of this one may have given way to it.
    Later,
}

/// Whether a pushed task was new.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It was, and waits to be done.
    New,
    /// It waits, or is being done, already.
    AlreadyPending,
    /// It was done before; its receipt stands.
    AlreadyCompleted,
}

/// Makes names that sort by time, also within a millisecond.
#[derive(Debug, Default)]
pub(super) struct Ids(Mutex<Option<Ulid>>);

impl Ids {
    fn next(&self, now: StoreTime, env: &Env) -> String {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let millis = u64::try_from(now.as_micros() / 1000).unwrap_or(0);
        let random = u128::from(env.random()) << 64 | u128::from(env.random());
        let fresh = Ulid::from_parts(millis, random);
        let next = match *last {
            Some(last) if last.timestamp_ms() >= millis => last.increment().unwrap_or(fresh),
            _ => fresh,
        };
        *last = Some(next);
        next.to_string()
    }
}

impl Queue {
    /// Pushes a task. One PUT; with a chosen id also two HEADs, to find out whether it was done
    /// before.
    pub async fn push(&self, task: NewTask) -> Result<Pushed> {
        task.checked()?;
        let store = self.store();
        let now = store.now().await?;
        let nonce = store.env().nonce();
        let chosen = task.id.clone();
        if chosen.as_deref() == Some("") {
            return Err(Error::invalid(NAMELESS));
        }
        let delay = task.delay;
        let id = match &chosen {
            Some(id) => id.clone(),
            None => self.0.ids.next(now, store.env()),
        };
        let unit = Unit::Task(id.clone());
        let scheduled = delay.map(|delay| now.plus(delay));
        let key = match scheduled {
            Some(time) => self.keys().scheduled_at(time, &id),
            None => self.keys().part(&unit, Part::Work),
        };
        let bad = |error| Error::invalid(format!("task id {id:?}: {error}"));
        let key = key.map_err(bad)?;
        // Whatever will be written about it must have a name, too.
        self.keys().part(&unit, Part::Lease).map_err(bad)?;
        self.keys().dead_letter(&id).map_err(bad)?;
        let receipt = self.keys().receipt(&unit).map_err(bad)?;
        if chosen.is_some() && bundle_of(&id).is_some() {
            return Err(Error::invalid(format!(
                "task id {id:?}: bundles and their tasks have such names, choose another"
            )));
        }
        let stored = task.into_task(id.clone(), nonce.to_string(), Some(now));
        if let Some(outbox) = self.outbox() {
            // Before it is noted: a receipt that is past its time is kept for as long as the outbox has
            // something to tell of its task, and a push must not be what keeps it.
            if chosen.is_some() && self.settings().receipts && self.is_remembered(&receipt).await? {
                return Ok(Pushed { id, outcome: Outcome::AlreadyCompleted, incarnation: None });
            }
            // Nor must what is pending already look as if the bucket did not know it.
            if chosen.is_some()
                && let Some(object) = self.store().get(&key).await?
            {
                let there = Task::parse(&object.body, &id, &object.meta.mark());
                let incarnation = Some(there.incarnation);
                return Ok(Pushed { id, outcome: Outcome::AlreadyPending, incarnation });
            }
            let how = (chosen.is_some(), scheduled);
            outbox.pushing(&unit, &stored.incarnation, how, self.durability()).await?;
        }
        let proof = Proof::Nonce(nonce);
        let outcome = self.store_task(&key, &receipt, &stored, chosen.is_some(), proof).await?;
        if let (Some(outbox), Stored::Pending(_) | Stored::Completed) = (self.outbox(), &outcome) {
            outbox.not_pushing(&unit, &stored.incarnation).await?;
        }
        Ok(match outcome {
            Stored::New(_) | Stored::Over => {
                Pushed { id, outcome: Outcome::New, incarnation: Some(nonce.to_string()) }
            }
            Stored::Pending(incarnation) => {
                Pushed { id, outcome: Outcome::AlreadyPending, incarnation }
            }
            Stored::Completed => {
                Pushed { id, outcome: Outcome::AlreadyCompleted, incarnation: None }
            }
        })
    }

    /// Puts a task where it waits to be done, or for its time, unless it is there already, or was
    /// done before.
    pub(crate) async fn store_task(
        &self,
        key: &Key,
        receipt: &Key,
        task: &Task,
        chosen: bool,
        proof: Proof,
    ) -> Result<Stored> {
        let store = self.store();
        // Before, or a task that was done long ago would be seen by workers for a moment.
        let remembers = chosen && self.settings().receipts;
        if remembers && self.is_remembered(receipt).await? {
            return Ok(Stored::Completed);
        }
        let unit = Unit::Task(task.id.clone());
        let is_pending = *key == self.keys().part(&unit, Part::Work)?;
        let mut met = false;
        let push = (task.incarnation.as_str(), task.pushed_at);
        let version = loop {
            match self.place(&unit, key, task.to_bytes(), push, proof).await? {
                Placed::There(version) => break version,
                Placed::Over(Recorded::This) => return Ok(Stored::Over),
                Placed::Over(Recorded::Later) => return Ok(Stored::Completed),
                Placed::Taken => {}
            }
            // Done or given up, and whoever did that has yet to clean up: nobody does it once more.
            if is_pending
                && chosen
                && !std::mem::replace(&mut met, true)
                && self.is_over(&unit).await?
            {
                continue;
            }
            let there = store
                .get(key)
                .await?
                .map(|object| Task::parse(&object.body, &task.id, &object.meta.mark()).incarnation);
            return Ok(Stored::Pending(there));
        };
        // And after: it may have been completed and removed in between.
        if remembers
            && let Some(object) = store.get(receipt).await?
            && let Ok(done) = Receipt::parse(&object.body)
        {
            self.delete_work(key, &version).await?;
            // Our own, too: what was under way for long may have landed after all (FIELD.md row 21).
            return Ok(match done.is_about(&task.incarnation) {
                true => Stored::Over,
                false => Stored::Completed,
            });
        }
        Ok(Stored::New(version))
    }

    /// Puts work where others find it. Where no answer came and it is not there, it may have been there, and
    /// be done: so it is not sent again before a look for a record of that, and after it was sent again
    /// there is another look. Of `push`, its incarnation and its time.
    pub(crate) async fn place(
        &self,
        unit: &Unit,
        key: &Key,
        body: Vec<u8>,
        push: (&str, Option<StoreTime>),
        proof: Proof,
    ) -> Result<Placed> {
        // What the last look found, if there was one.
        let looked = &Mutex::new(None);
        let may_repeat = move || -> BoxFuture<'_, Result<bool>> {
            Box::pin(async move {
                let found = self.recorded(unit, push).await?;
                *looked.lock().unwrap_or_else(PoisonError::into_inner) = Some(found);
                Ok(found.is_none())
            })
        };
        let write = Write::when(When::Absent, proof).durability(self.durability());
        let put = self.store().put_unless_over(key, body.into(), write, &may_repeat).await?;
        let looked = *looked.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(Some(recorded)) = looked {
            return Ok(Placed::Over(recorded));
        }
        let Some(version) = wrote(put)? else { return Ok(Placed::Taken) };
        if looked.is_some() {
            // It is there, whatever comes of this: a failure is not one of the push.
            match self.recorded(unit, push).await {
                Ok(Some(recorded)) => {
                    if let Err(error) = self.delete_work(key, &version).await {
                        tracing::debug!(%error, "left for whoever meets it");
                    }
                    return Ok(Placed::Over(recorded));
                }
                Ok(None) => {}
                Err(error) => tracing::debug!(%error, "nobody knows whether it is over"),
            }
        }
        Ok(Placed::There(version))
    }

    /// Whether this push was done or given up, or one of its name that came after it was done. One that came
    /// before is another: this one was accepted, and is done too.
    pub(super) async fn recorded(
        &self,
        unit: &Unit,
        (ours, at): (&str, Option<StoreTime>),
    ) -> Result<Option<Recorded>> {
        let receipt = self.receipt_of(unit).await?;
        if receipt.as_ref().is_some_and(|receipt| receipt.is_about(ours)) {
            return Ok(Some(Recorded::This));
        }
        let letter = self.dead_letter(&unit.name()).await?;
        if letter.is_some_and(|letter| letter.task.incarnation == *ours) {
            return Ok(Some(Recorded::This));
        }
        let later = receipt.is_some_and(|receipt| !gives_way(receipt.pushed_at, at));
        Ok(later.then_some(Recorded::Later))
    }

    /// Whether this receipt still stands for its task. One that is past its time is removed: nobody
    /// may have swept it.
    pub(crate) async fn is_remembered(&self, receipt: &Key) -> Result<bool> {
        let Some(meta) = self.store().head(receipt).await? else { return Ok(false) };
        if meta.now.since(meta.modified) < self.settings().retention {
            return Ok(true);
        }
        if !self.may_forget(receipt).await? {
            return Ok(true);
        }
        self.delete_work(receipt, &meta.version).await?;
        Ok(false)
    }

    /// Whether a receipt that is past its time may go: not before the bucket knows of it.
    pub(super) async fn may_forget(&self, receipt: &Key) -> Result<bool> {
        let Some(outbox) = self.outbox() else { return Ok(true) };
        let Some(name) = self.keys().parse_record(receipt.as_str()) else { return Ok(true) };
        let bundle = name.rsplit_once('-').and_then(|(id, n)| Some((id, n.parse().ok()?)));
        let bundle = bundle.map(|(id, n)| Unit::Bundle(id.to_owned(), n));
        for unit in [Some(Unit::Task(name)), bundle].into_iter().flatten() {
            if outbox.has(&unit).await? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Pushes many tasks, several at a time. Stops at the first error; what was pushed before it
    /// stays.
    pub async fn push_many(&self, tasks: impl IntoIterator<Item = NewTask>) -> Result<Vec<Pushed>> {
        let mut pushes =
            futures::stream::iter(tasks).map(|task| self.push(task)).buffered(AT_A_TIME);
        let mut pushed = Vec::new();
        while let Some(push) = pushes.next().await {
            pushed.push(push?);
        }
        Ok(pushed)
    }

    /// Pushes many small tasks as one object, under one lease and with one receipt: one PUT. They
    /// have no ids of their own, and cannot be delayed.
    pub async fn push_bundle(&self, tasks: Vec<NewTask>) -> Result<Vec<String>> {
        if tasks.is_empty() {
            return Ok(Vec::new());
        }
        if tasks.len() > MAX_BUNDLE {
            let count = tasks.len();
            return Err(Error::invalid(format!(
                "a bundle has at most {MAX_BUNDLE} tasks, not {count}: make several"
            )));
        }
        if tasks.iter().any(|task| task.delay.is_some()) {
            return Err(Error::invalid("tasks in a bundle cannot be delayed: push them singly"));
        }
        tasks.iter().try_for_each(NewTask::checked)?;
        let size: usize = tasks.iter().map(NewTask::size).sum();
        if size > MAX_PAYLOAD {
            return Err(Error::invalid(format!(
                "a bundle of {size} bytes is too long (the most is {MAX_PAYLOAD}): make several"
            )));
        }
        if tasks.iter().any(|task| task.id.is_some()) {
            return Err(Error::invalid(
                "tasks in a bundle have no ids of their own: push those that need one singly",
            ));
        }
        let store = self.store();
        let now = store.now().await?;
        let nonce = store.env().nonce();
        let id = self.0.ids.next(now, store.env());
        let count = tasks.len() as u32;
        let unit = Unit::Bundle(id.clone(), count);
        let names = (0..count).map(|n| bundle_task(&id, n)).collect();
        let tasks =
            tasks.into_iter().map(|task| task.into_task(String::new(), String::new(), None));
        let bundle = Bundle {
            incarnation: nonce.to_string(),
            pushed_at: Some(now),
            origin: None,
            tasks: tasks.collect(),
        };
        let key = self.keys().part(&unit, Part::Work)?;
        if let Some(outbox) = self.outbox() {
            let how = (false, None);
            outbox.pushing(&unit, &bundle.incarnation, how, self.durability()).await?;
        }
        let push = (bundle.incarnation.as_str(), bundle.pushed_at);
        match self.place(&unit, &key, bundle.to_bytes(), push, Proof::Nonce(nonce)).await? {
            Placed::There(_) | Placed::Over(_) => Ok(names),
            Placed::Taken => {
                Err(Error::new(ErrorKind::Internal, "a fresh name was taken").at(&key))
            }
        }
    }

    /// The receipt of a task, if it was completed and its receipt is kept.
    pub async fn receipt(&self, id: &str) -> Result<Option<Receipt>> {
        self.receipt_of(&Unit::Task(id.to_owned())).await
    }

    /// Waits until a task that was pushed is completed or given up.
    pub async fn wait(
        &self,
        pushed: &Pushed,
        poll: Duration,
    ) -> Result<Result<Receipt, super::DeadLetter>> {
        if !self.settings().receipts {
            return Err(Error::invalid(
                "this queue keeps no receipts: there is nothing to wait for",
            ));
        }
        let ours = pushed.incarnation.as_deref();
        let mut missing = 0;
        loop {
            let receipt = self.receipt(&pushed.id).await?;
            if let Some(receipt) = receipt.filter(|it| ours.is_none_or(|ours| it.is_about(ours))) {
                return Ok(Ok(receipt));
            }
            let letter = self.dead_letter(&pushed.id).await?;
            if let Some(letter) =
                letter.filter(|it| ours.is_none_or(|ours| it.task.incarnation == ours))
            {
                return Ok(Err(letter));
            }
            // Pending, or scheduled, or between the two: but not nowhere for long.
            let work = self.keys().part(&Unit::Task(pushed.id.clone()), Part::Work)?;
            missing = match self.store().head(&work).await? {
                Some(_) => 0,
                None => missing + 1,
            };
            if missing > 2 && self.scheduled_key(&pushed.id).await?.is_none() {
                let message = format!("task {:?} is gone: it was removed", pushed.id);
                return Err(Error::new(ErrorKind::Data, message));
            }
            self.store().env().clock().sleep(poll).await;
        }
    }

    /// Where a task waits for its time, and which, if it does. A LIST per thousand that do.
    pub(super) async fn scheduled_key(&self, id: &str) -> Result<Option<(StoreTime, Key)>> {
        let mut listing = self.store().list(List::prefix(self.keys().scheduled())?);
        while let Some(page) = listing.next_page().await? {
            for entry in page.entries {
                match self.keys().parse_scheduled(entry.key.as_str()) {
                    Some((time, there)) if there == id => return Ok(Some((time, entry.key))),
                    _ => {}
                }
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_bundles_and_their_tasks_are_reserved() {
        for reserved in ["01ARZ3NDEKTSV4RRFFQ69G5FAV-3", "01ARZ3NDEKTSV4RRFFQ69G5FAV.17"] {
            assert!(bundle_of(reserved).is_some());
        }
        for fine in
            ["example.com", "01ARZ3NDEKTSV4RRFFQ69G5FAV", "01ARZ3NDEKTSV4RRFFQ69G5FAV.x", ""]
        {
            assert_eq!(bundle_of(fine), None, "{fine}");
        }
        assert_eq!(bundle_of(&"é".repeat(20)), None);
    }
}
