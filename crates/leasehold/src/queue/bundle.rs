//! Bundles: many small tasks in one object, under one lease and one receipt.
//!
//! A worker claims the bundle and hands out its tasks one by one. What is done is written with each
//! heartbeat, so a successor does only the rest. A task that has to be tried again leaves the bundle
//! as a task of its own *before* the bundle's receipt, with a name and an incarnation that follow
//! from the bundle's: whoever repeats that repeats the same.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use leasehold_protocol::cas::{Version, When};
use leasehold_protocol::format::lease::Lease;
use leasehold_protocol::format::task::{self as format, DeadLetter, Failure, Json, Receipt};
use leasehold_protocol::layout::queue::{Part, Unit};
use leasehold_protocol::lease::{self as lease_decide, Holder};
use leasehold_protocol::queue::{self as decide, AfterFailure, History};
use leasehold_protocol::settle::Proof;
use tokio_util::sync::CancellationToken;

use super::claim::Tried;
use super::task::Acked;
use super::{Queue, wrote};
use crate::lease::Tenure;
use crate::store::{Durability, Write};
use crate::{Error, ErrorKind, Result};

/// How many bytes of results are kept in the lease for a successor.
const RESULTS: usize = 64 << 10;
const RESULTS_FIELD: &str = "results";

/// A bundle that is being worked on.
#[derive(Debug, Clone)]
pub(super) struct Run(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    queue: Queue,
    unit: Unit,
    bundle: format::Bundle,
    version: Version,
    history: History,
    token: u64,
    lost: CancellationToken,
    /// Taken by whoever ends it.
    tenure: Mutex<Option<Arc<Tenure>>>,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    history: History,
    results: Vec<Option<Json>>,
    kept: usize,
    /// Handed out and not finished.
    under_way: usize,
    /// No more are handed out.
    abandoned: bool,
}

/// One task of a bundle, handed out.
#[derive(Debug)]
pub(super) struct Piece {
    run: Run,
    n: u32,
}

impl Run {
    /// Starts on a bundle, or breaks it up where its workers vanished too often.
    pub async fn begin(
        queue: &Queue,
        unit: &Unit,
        bundle: format::Bundle,
        version: Version,
        tenure: Tenure,
        history: History,
    ) -> Result<Tried> {
        let mut results: Vec<Option<Json>> = vec![None; bundle.tasks.len()];
        let before = tenure.lease().other.get(RESULTS_FIELD).cloned().unwrap_or_default();
        if let Ok(before) = serde_json::from_value::<Vec<(u32, serde_json::Value)>>(before) {
            for (n, result) in before {
                if let Some(slot) = results.get_mut(n as usize) {
                    *slot = serde_json::value::to_raw_value(&result).ok();
                }
            }
        }
        let state = State { history: history.clone(), results, ..State::default() };
        let state = Arc::new(Mutex::new(state));
        let noted = state.clone();
        tenure.on_renewal(move |lease| note(&noted, lease));
        let run = Self(Arc::new(Shared {
            queue: queue.clone(),
            unit: unit.clone(),
            bundle,
            version,
            history,
            token: tenure.token(),
            lost: tenure.lost(),
            tenure: Mutex::new(Some(Arc::new(tenure))),
            state,
        }));
        if run.0.history.crashes >= queue.settings().max_crashes {
            run.break_up().await?;
            return Ok(Tried::Over);
        }
        if run.left().is_empty() {
            run.complete().await?;
            return Ok(Tried::Over);
        }
        Ok(Tried::Bundle(run))
    }

    /// The tasks that are not done yet.
    pub fn left(&self) -> Vec<u32> {
        let state = self.state();
        let all = 0..self.0.bundle.tasks.len() as u32;
        all.filter(|n| !state.history.done.contains(*n)).collect()
    }

    /// Hands out a task, unless the bundle goes back to the others.
    pub fn piece(&self, n: u32) -> Option<Piece> {
        let mut state = self.state();
        if state.abandoned || self.0.lost.is_cancelled() {
            return None;
        }
        state.under_way += 1;
        Some(Piece { run: self.clone(), n })
    }

    /// No more tasks are handed out: the bundle goes back to the others once those that were are
    /// finished.
    pub async fn abandon(&self) -> Result<()> {
        let idle = {
            let mut state = self.state();
            state.abandoned = true;
            // Where all are done, whoever finished the last one completes the bundle right now.
            state.under_way == 0 && !self.is_done(&state)
        };
        match idle {
            true => self.let_go().await,
            false => Ok(()),
        }
    }

    fn is_done(&self, state: &State) -> bool {
        state.history.done.len() == self.0.bundle.tasks.len() as u64
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tenure(&self) -> Result<Arc<Tenure>> {
        let tenure = self.0.tenure.lock().unwrap_or_else(PoisonError::into_inner).clone();
        tenure.ok_or_else(|| Error::new(ErrorKind::Lost, "the bundle was given back"))
    }

    /// The tenure for good. Others may still be looking at it, but nobody gets it any more.
    async fn take_tenure(&self) -> Option<Tenure> {
        let mut tenure = self.0.tenure.lock().unwrap_or_else(PoisonError::into_inner).take()?;
        loop {
            match Arc::try_unwrap(tenure) {
                Ok(tenure) => return Some(tenure),
                Err(shared) => tenure = shared,
            }
            tokio::task::yield_now().await;
        }
    }

    async fn let_go(&self) -> Result<()> {
        let Some(tenure) = self.take_tenure().await else { return Ok(()) };
        let state = self.0.state.clone();
        tenure.release_with(move |lease| note(&state, lease)).await
    }

    /// One task is finished, one way or another. The last one finishes the bundle.
    async fn finished(&self, n: u32, result: Option<Json>) -> Result<Acked> {
        let (all, abandoned) = {
            let mut state = self.state();
            state.under_way -= 1;
            state.history.done.insert(n);
            if let Some(slot) = state.results.get_mut(n as usize) {
                *slot = result;
            }
            let all = self.is_done(&state);
            (all, state.abandoned && state.under_way == 0)
        };
        match (all, abandoned) {
            (true, _) => self.complete().await,
            (false, true) => self.let_go().await.map(|()| Acked::First),
            (false, false) => Ok(Acked::First),
        }
    }

    /// One task was not finished, and stays in the bundle.
    async fn unfinished(&self) -> Result<()> {
        let idle = {
            let mut state = self.state();
            state.under_way -= 1;
            state.abandoned = true;
            state.under_way == 0
        };
        match idle {
            true => self.let_go().await,
            false => Ok(()),
        }
    }

    async fn complete(&self) -> Result<Acked> {
        let Shared { queue, unit, bundle, version, history, token, .. } = &*self.0;
        let tenure = self.tenure()?;
        let lease = tenure.lease();
        let mut first = true;
        match queue.settings().receipts {
            false => tenure.check()?,
            true => {
                let results = std::mem::take(&mut self.state().results);
                let receipt = Receipt {
                    id: unit.name(),
                    incarnation: bundle.incarnation.clone(),
                    worker: lease.holder,
                    token: *token,
                    pushed_at: bundle.pushed_at,
                    started_at: lease.acquired_at,
                    completed_at: queue.store().now().await?,
                    retries: history.tries(),
                    result: None,
                    results: results.iter().any(Option::is_some).then_some(results),
                    nonce: String::new(),
                };
                first = queue.write_receipt(unit, receipt).await?;
            }
        }
        drop(tenure);
        let cleaned = async {
            queue.delete_work(&queue.keys().part(unit, Part::Work)?, version).await?;
            match self.take_tenure().await {
                Some(tenure) => tenure.remove().await,
                None => Ok(false),
            }
        };
        if let Err(error) = cleaned.await {
            tracing::debug!(%error, "left for the next sweep");
        }
        Ok(if first { Acked::First } else { Acked::Again })
    }

    /// Its workers vanished too often: one of its tasks may be to blame, and nobody knows which. So
    /// each goes on by itself, and the others need not suffer for it.
    async fn break_up(&self) -> Result<()> {
        let history = History { errors: self.0.history.errors.clone(), ..History::default() };
        for n in self.left() {
            self.leave(n, &history).await?;
            self.state().history.done.insert(n);
        }
        self.complete().await.map(|_| ())
    }

    fn task(&self, n: u32) -> Result<&format::Task> {
        let gone = || Error::new(ErrorKind::Internal, "a bundle has no such task");
        self.0.bundle.tasks.get(n as usize).ok_or_else(gone)
    }

    async fn write_dead_letter(&self, n: u32, history: History) -> Result<()> {
        let queue = &self.0.queue;
        let letter = DeadLetter {
            task: self.task(n)?.clone(),
            failed_at: queue.store().now().await?,
            worker: self.tenure()?.lease().holder,
            failures: history.failures,
            crashes: history.crashes,
            errors: history.errors,
            nonce: String::new(),
        };
        queue.write_dead_letter(letter).await
    }

    /// A task leaves the bundle, to be tried again on its own. Its lease comes first: the task must
    /// not be seen as free before its time.
    async fn leave(&self, n: u32, history: &History) -> Result<()> {
        let queue = &self.0.queue;
        let store = queue.store();
        let task = self.task(n)?;
        let unit = Unit::Task(task.id.clone());
        let history = history.clone().about(&task.incarnation);
        let (nonce, now) = (store.env().nonce(), store.now().await?);
        let holder = self.tenure()?.lease().holder;
        let holder = Holder { name: &holder, ttl: queue.settings().ttl, place: None };
        let held = lease_decide::acquire(None, &holder, now, 0, nonce).lease;
        let mut released = lease_decide::release(&held, now, nonce);
        history.write(&mut released);
        let body = released.to_bytes(leasehold_protocol::format::lease::Dialect::Task);
        let lease = Write::when(When::Absent, Proof::Nonce(nonce));
        let key = queue.keys().part(&unit, Part::Lease)?;
        wrote(store.put(&key, body.into(), lease.durability(Durability::Volatile)).await?)?;
        // Its bytes say which push it is, so whoever repeats this writes the same.
        let write = Write::when(When::Absent, Proof::Bytes).durability(queue.durability());
        let key = queue.keys().part(&unit, Part::Work)?;
        wrote(store.put(&key, task.to_bytes().into(), write).await?)?;
        Ok(())
    }
}

/// Writes down what is done.
fn note(state: &Mutex<State>, lease: &mut Lease) {
    let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
    state.history.write(lease);
    let mut kept = Vec::new();
    let mut bytes = 0;
    for (n, result) in state.results.iter().enumerate() {
        let Some(result) = result else { continue };
        bytes += result.get().len() + 8;
        if bytes > RESULTS {
            break;
        }
        let value: serde_json::Value = serde_json::from_str(result.get()).unwrap_or_default();
        kept.push((n as u32, value));
    }
    state.kept = kept.len();
    if !kept.is_empty() {
        let kept = serde_json::to_value(kept).unwrap_or_default();
        lease.other.insert(RESULTS_FIELD.to_owned(), kept);
    }
}

impl Piece {
    pub fn task(&self) -> &format::Task {
        // Pieces are only made of tasks that are there.
        &self.run.0.bundle.tasks[self.n as usize]
    }

    pub fn queue(&self) -> &Queue {
        &self.run.0.queue
    }

    pub fn attempt(&self) -> u32 {
        self.run.0.history.tries().saturating_add(1)
    }

    pub fn token(&self) -> u64 {
        self.run.0.token
    }

    pub fn lost(&self) -> CancellationToken {
        self.run.0.lost.clone()
    }

    pub fn check(&self) -> Result<()> {
        self.run.tenure()?.check()
    }

    pub fn trusted_for(&self) -> Duration {
        self.run.tenure().map_or(Duration::ZERO, |tenure| tenure.trusted_for())
    }

    pub async fn ack(self, result: Option<Json>) -> Result<Acked> {
        self.run.finished(self.n, result).await
    }

    async fn failure(&self, error: &str) -> Result<Failure> {
        let at = self.queue().store().now().await?;
        let worker = self.run.tenure()?.lease().holder;
        Ok(Failure { at, worker, crash: false, error: error.to_owned() })
    }

    pub async fn nack(self, error: &str, delay: Option<Duration>) -> Result<bool> {
        let left = async {
            let failure = self.failure(error).await?;
            let random = self.queue().store().env().random();
            let settings = self.queue().settings();
            let history = History { crashes: self.run.0.history.crashes, ..History::default() };
            let task = self.task();
            match decide::after_failure(&history, task, &settings, failure, delay, random) {
                AfterFailure::Retry(history) => {
                    self.run.leave(self.n, &history).await.map(|()| true)
                }
                AfterFailure::GiveUp(history) => {
                    self.run.write_dead_letter(self.n, history).await.map(|()| false)
                }
            }
        };
        let left = left.await;
        let again = *left.as_ref().unwrap_or(&false);
        self.left_by(left.map(drop)).await.map(|()| again)
    }

    pub async fn fail(self, error: &str) -> Result<()> {
        let left = async {
            let failure = self.failure(error).await?;
            let history = History { failures: 1, errors: vec![failure], ..History::default() };
            self.run.write_dead_letter(self.n, history).await
        };
        self.left_by(left.await).await
    }

    async fn left_by(&self, left: Result<()>) -> Result<()> {
        match left {
            Ok(()) => self.run.finished(self.n, None).await.map(|_| ()),
            // It stays in the bundle, which others do again.
            Err(error) => {
                self.run.unfinished().await?;
                Err(error)
            }
        }
    }

    pub async fn give_back(self) -> Result<()> {
        self.run.unfinished().await
    }
}
