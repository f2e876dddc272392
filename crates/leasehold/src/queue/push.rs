//! Pushing: one PUT for a task, or for a whole bundle.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use futures::StreamExt as _;
use leasehold_protocol::cas::When;
use leasehold_protocol::format::task::{Bundle, Json, Receipt, Task, text_payload};
use leasehold_protocol::layout::queue::{Part, Unit};
use leasehold_protocol::settle::Proof;
use leasehold_protocol::time::StoreTime;
use serde::Serialize;
use ulid::Ulid;

use super::{Queue, wrote};
use crate::env::Env;
use crate::store::Write;
use crate::{Error, ErrorKind, Result};

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

    fn checked(&self) -> Result<()> {
        let size = self.payload.get().len();
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
        Task { id, incarnation, pushed_at, timeout, max_attempts, payload }
    }
}

/// What came of a push.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Pushed {
    /// The task's name.
    pub id: String,
    /// Whether it was new.
    pub outcome: Outcome,
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
        let key = match delay {
            Some(delay) => self.keys().scheduled_at(now.plus(delay), &id),
            None => self.keys().part(&unit, Part::Work),
        };
        let key = key.map_err(|error| Error::invalid(format!("task id {id:?}: {error}")))?;
        let receipt = self.keys().receipt(&unit)?;
        // Before, or a task that was done long ago would be seen by workers for a moment.
        let remembers = chosen.is_some() && self.settings().receipts;
        if remembers && store.head(&receipt).await?.is_some() {
            return Ok(Pushed { id, outcome: Outcome::AlreadyCompleted });
        }
        let stored = task.into_task(id.clone(), nonce.to_string(), Some(now));
        let write = Write::when(When::Absent, Proof::Nonce(nonce)).durability(self.durability());
        let Some(version) = wrote(store.put(&key, stored.to_bytes().into(), write).await?)? else {
            return Ok(Pushed { id, outcome: Outcome::AlreadyPending });
        };
        // And after: it may have been completed and removed in between.
        if remembers
            && let Some(object) = store.get(&receipt).await?
            && Receipt::parse(&object.body)
                .is_ok_and(|receipt| receipt.incarnation != nonce.to_string())
        {
            self.delete_work(&key, &version).await?;
            return Ok(Pushed { id, outcome: Outcome::AlreadyCompleted });
        }
        Ok(Pushed { id, outcome: Outcome::New })
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

    /// Pushes many small tasks as one object, under one lease and with one receipt: one PUT. Their
    /// ids are for the reader only, and they cannot be delayed.
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
        let size: usize = tasks.iter().map(|task| task.payload.get().len()).sum();
        if size > MAX_PAYLOAD {
            return Err(Error::invalid(format!(
                "a bundle of {size} bytes is too long (the most is {MAX_PAYLOAD}): make several"
            )));
        }
        let store = self.store();
        let now = store.now().await?;
        let nonce = store.env().nonce();
        let id = self.0.ids.next(now, store.env());
        let unit = Unit::Bundle(id.clone(), tasks.len() as u32);
        let names = tasks.iter().enumerate();
        let names = names.map(|(n, task)| task.id.clone().unwrap_or_else(|| format!("{id}.{n}")));
        let names: Vec<String> = names.collect();
        // What a name cannot be is better said now than when the task leaves the bundle.
        for name in &names {
            if name.is_empty() {
                return Err(Error::invalid(NAMELESS));
            }
            self.keys()
                .part(&Unit::Task(name.clone()), Part::Work)
                .map_err(|error| Error::invalid(format!("task id {name:?}: {error}")))?;
        }
        let tasks = tasks.into_iter().map(|task| {
            let id = task.id.clone().unwrap_or_default();
            task.into_task(id, String::new(), None)
        });
        let bundle =
            Bundle { incarnation: nonce.to_string(), pushed_at: Some(now), tasks: tasks.collect() };
        let key = self.keys().part(&unit, Part::Work)?;
        let write = Write::when(When::Absent, Proof::Nonce(nonce)).durability(self.durability());
        match wrote(store.put(&key, bundle.to_bytes().into(), write).await?)? {
            Some(_) => Ok(names),
            None => Err(Error::new(ErrorKind::Internal, "a fresh name was taken").at(&key)),
        }
    }

    /// The receipt of a task, if it was completed and its receipt is kept.
    pub async fn receipt(&self, id: &str) -> Result<Option<Receipt>> {
        self.receipt_of(&Unit::Task(id.to_owned())).await
    }

    /// Waits until a task is completed or given up. An error where the queue keeps no receipts: then
    /// there is nothing to be seen of a completion.
    pub async fn wait(
        &self,
        id: &str,
        poll: Duration,
    ) -> Result<Result<Receipt, super::DeadLetter>> {
        if !self.settings().receipts {
            return Err(Error::invalid(
                "the queue keeps no receipts: nobody can wait for its tasks",
            ));
        }
        loop {
            if let Some(receipt) = self.receipt(id).await? {
                return Ok(Ok(receipt));
            }
            if let Some(letter) = self.dead_letter(id).await?
                && !self.is_pushed_since(&letter).await?
            {
                return Ok(Err(letter));
            }
            self.store().env().clock().sleep(poll).await;
        }
    }

    /// Whether the task of a dead letter was pushed again, and is neither completed nor given up in
    /// that incarnation yet: the letter is of the past then.
    async fn is_pushed_since(&self, letter: &super::DeadLetter) -> Result<bool> {
        let id = &letter.task.id;
        let key = self.keys().part(&Unit::Task(id.clone()), Part::Work)?;
        if let Some(object) = self.store().get(&key).await? {
            let task = Task::parse(&object.body, id, object.meta.version.as_str());
            return Ok(task.incarnation != letter.task.incarnation);
        }
        // Gone in between: then its outcome is there by now.
        let now = self.dead_letter(id).await?.map(|letter| letter.task.incarnation);
        let done = self.receipt(id).await?.is_some();
        Ok(done || now.as_ref() != Some(&letter.task.incarnation))
    }
}
