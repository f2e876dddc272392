//! Bundles: many small tasks in one object, under one lease and one receipt.
//!
//! A worker claims the bundle and hands out its tasks one by one. What is done is written with each
//! heartbeat, so a successor does only the rest. A task that has to be tried again leaves the bundle
//! as a task of its own *before* the bundle's receipt, with a name and an incarnation that follow
//! from the bundle's: whoever repeats that repeats the same.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use leasehold_protocol::cas::{Version, When};
use leasehold_protocol::format::lease::Lease;
use leasehold_protocol::format::task::{self as format, DeadLetter, Failure, Json, Receipt};
use leasehold_protocol::layout::queue::{Part, Unit};
use leasehold_protocol::lease::{self as lease_decide, Holder};
use leasehold_protocol::queue::{self as decide, AfterFailure, Done, History};
use leasehold_protocol::settle::Proof;
use serde_json::value::RawValue;
use tokio_util::sync::CancellationToken;

use super::claim::Tried;
use super::push::{Placed, bundle_of};
use super::task::Acked;
use super::{Queue, wrote};
use crate::lease::Tenure;
use crate::store::{List, Write};
use crate::{Error, ErrorKind, Result};

/// How many bytes of results are kept in the lease for a successor.
const RESULTS: usize = 64 << 10;
/// How many bytes of results a bundle keeps: its receipt, and the lease of who goes on with it, hold all
/// of them. Of a longer one only its length is kept.
const KEPT: usize = 8 << 20;
/// Results as JSON texts: a number that is too long for us must come out as it went in.
const TEXTS_FIELD: &str = "result_texts";
/// The same as JSON, by earlier versions.
const RESULTS_FIELD: &str = "results";
/// Stands in the lease once nobody knows whether a task has left the bundle.
const DOUBT_FIELD: &str = "left_in_doubt";

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
    tenure: Tenure,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    history: History,
    results: Vec<Option<Json>>,
    /// How many bytes these are.
    kept: usize,
    /// Handed out and not finished.
    under_way: usize,
    /// Whether a task may have left the bundle without our knowing: no answer came.
    doubt: bool,
    phase: Phase,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Tasks are handed out.
    #[default]
    Open,
    /// No more are: the bundle goes back to the others once those that were are finished.
    Abandoned,
    /// Everything is done, and being recorded.
    Completing,
    /// It is not ours any more.
    Over,
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
        let before = tenure.lease().other.get(TEXTS_FIELD).cloned().unwrap_or_default();
        if let Ok(before) = serde_json::from_value::<Vec<(u32, String)>>(before) {
            for (n, result) in before {
                if let Some(slot) = results.get_mut(n as usize) {
                    *slot = RawValue::from_string(result).ok();
                }
            }
        }
        let doubt = tenure.lease().other.contains_key(DOUBT_FIELD);
        let kept = results.iter().flatten().map(|result| result.get().len()).sum();
        let state = State { history: history.clone(), results, kept, doubt, ..State::default() };
        let state = Arc::new(Mutex::new(state));
        let noted = state.clone();
        tenure.on_renewal(move |lease| note(&noted, lease, RESULTS));
        let run = Self(Arc::new(Shared {
            queue: queue.clone(),
            unit: unit.clone(),
            bundle,
            version,
            history,
            tenure,
            state,
        }));
        if run.0.history.crashes > 0 || doubt {
            run.skip_those_that_left().await?;
        }
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

    /// Hands out a task, unless the bundle goes back to the others or is theirs already.
    pub fn piece(&self, n: u32) -> Option<Piece> {
        let mut state = self.state();
        if state.phase != Phase::Open || self.0.tenure.lost().is_cancelled() {
            return None;
        }
        state.under_way += 1;
        Some(Piece { run: self.clone(), n })
    }

    /// No more tasks are handed out: the bundle goes back to the others once those that were are
    /// finished.
    pub async fn abandon(&self) -> Result<()> {
        self.let_go_if(|state| {
            if state.phase == Phase::Open {
                state.phase = Phase::Abandoned;
            }
        })
        .await
    }

    /// Lets go of the bundle if, after this change, nobody is at it any more.
    async fn let_go_if(&self, change: impl FnOnce(&mut State)) -> Result<()> {
        {
            let mut state = self.state();
            change(&mut state);
            if state.phase != Phase::Abandoned || state.under_way > 0 {
                return Ok(());
            }
            state.phase = Phase::Over;
        }
        let Shared { queue, tenure, state, .. } = &*self.0;
        tenure.release_with(queue.durability(), |lease| note(state, lease, usize::MAX)).await
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lost(&self) -> Error {
        let message = "the bundle is not ours any more: somebody else does the task again";
        Error::new(ErrorKind::Lost, message)
    }

    /// One task is finished, one way or another. The last one finishes the bundle.
    async fn finished(&self, n: u32, result: Option<Json>) -> Result<Acked> {
        let all = {
            let mut state = self.state();
            if state.phase == Phase::Over {
                return Err(self.lost());
            }
            state.history.done.insert(n);
            let result = result.map(|result| match state.kept + result.get().len() > KEPT {
                true => too_long(&result),
                false => result,
            });
            state.kept += result.as_ref().map_or(0, |result| result.get().len());
            if let Some(slot) = state.results.get_mut(n as usize) {
                *slot = result;
            }
            let all = state.history.done.len() == self.0.bundle.tasks.len() as u64;
            if all {
                state.phase = Phase::Completing;
            }
            all
        };
        if all {
            let acked = self.complete().await?;
            if acked == Acked::Again {
                let Shared { queue, unit, bundle, .. } = &*self.0;
                queue.note_duplicate(unit, &bundle.incarnation).await;
            }
            return Ok(acked);
        }
        self.let_go_if(|state| state.under_way -= 1).await?;
        // Nothing records it but our claim.
        match self.0.tenure.lost().is_cancelled() {
            true => Err(self.lost()),
            false => Ok(Acked::First),
        }
    }

    /// One task was not finished, and stays in the bundle. With `doubt` it may have left it all the
    /// same: whoever goes on looks first, or it would be done twice, here and on its own.
    async fn unfinished(&self, doubt: bool) -> Result<()> {
        self.let_go_if(|state| {
            state.under_way -= 1;
            state.doubt |= doubt;
            if state.phase == Phase::Open {
                state.phase = Phase::Abandoned;
            }
        })
        .await
    }

    async fn complete(&self) -> Result<Acked> {
        let recorded = self.record().await;
        let Shared { queue, unit, version, tenure, state, .. } = &*self.0;
        self.state().phase = Phase::Over;
        let first = match recorded {
            Ok(first) => first,
            Err(error) => {
                // Others go on from here, and find everything done.
                let noted = |lease: &mut Lease| note(state, lease, usize::MAX);
                let _ = tenure.release_with(queue.durability(), noted).await;
                return Err(error);
            }
        };
        let cleaned = async {
            queue.delete_work(&queue.keys().part(unit, Part::Work)?, version).await?;
            tenure.remove().await
        };
        if let Err(error) = cleaned.await {
            tracing::debug!(%error, "left for the next sweep");
        }
        Ok(if first { Acked::First } else { Acked::Again })
    }

    async fn record(&self) -> Result<bool> {
        let Shared { queue, unit, bundle, history, tenure, .. } = &*self.0;
        if !queue.settings().receipts {
            tenure.check()?;
            return Ok(true);
        }
        let lease = tenure.lease();
        let mut results = self.state().results.clone();
        // Or whoever has it now did, because we were stopped for long.
        if history.crashes > 0 || self.state().doubt || tenure.check().is_err() {
            self.leave_out_those_that_left(&mut results).await?;
        }
        let receipt = Receipt {
            id: unit.name(),
            incarnation: bundle.incarnation.clone(),
            worker: lease.holder,
            token: tenure.token(),
            pushed_at: bundle.pushed_at,
            started_at: lease.acquired_at,
            completed_at: queue.store().now().await?,
            retries: history.tries(),
            result: None,
            results: results.iter().any(Option::is_some).then_some(results),
            replaced: Vec::new(),
            copied: false,
            nonce: String::new(),
        };
        queue.note_finish(unit, &bundle.incarnation, bundle.origin.as_deref()).await?;
        queue.write_receipt(unit, receipt).await
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

    /// Tasks that left the bundle before its worker vanished, which may not have had the time to
    /// write that down, or was not told.
    async fn skip_those_that_left(&self) -> Result<()> {
        let queue = &self.0.queue;
        // Their keys, by what these begin with: lists of what has left are short, and asking for each
        // task that could have takes as long as doing it.
        let mut of = HashMap::new();
        let mut prefixes = BTreeSet::new();
        for n in self.left() {
            let unit = Unit::Task(self.task(n)?.id.clone());
            let records = [
                (queue.keys().part(&unit, Part::Work)?, format!("{n}/task.json")),
                (queue.keys().receipt(&unit)?, format!("{n}.json")),
                (queue.keys().dead_letter(&unit.name())?, format!("{n}.json")),
            ];
            for (key, end) in records {
                prefixes.extend(key.as_str().strip_suffix(&end).map(str::to_owned));
                of.insert(key, n);
            }
        }
        for prefix in prefixes {
            let mut listing = queue.store().list(List::prefix(prefix)?);
            while let Some(page) = listing.next_page().await? {
                let left = page.entries.iter().filter_map(|entry| of.get(&entry.key));
                let mut state = self.state();
                left.for_each(|n| state.history.done.insert(*n));
            }
        }
        Ok(())
    }

    /// Takes out the results of tasks that came to an end of their own meanwhile: whoever had the bundle
    /// before us let them leave after all. See [`Queue::is_done_in_bundle`].
    async fn leave_out_those_that_left(&self, results: &mut [Option<Json>]) -> Result<()> {
        let queue = &self.0.queue;
        for (n, result) in results.iter_mut().enumerate().filter(|(_, result)| result.is_some()) {
            let unit = Unit::Task(self.task(n as u32)?.id.clone());
            for key in [queue.keys().receipt(&unit)?, queue.keys().dead_letter(&unit.name())?] {
                if result.is_some() && queue.store().head(&key).await?.is_some() {
                    *result = None;
                }
            }
        }
        Ok(())
    }

    fn task(&self, n: u32) -> Result<&format::Task> {
        let gone = || Error::new(ErrorKind::Internal, "a bundle has no such task");
        self.0.bundle.tasks.get(n as usize).ok_or_else(gone)
    }

    async fn write_dead_letter(&self, n: u32, history: History) -> Result<()> {
        let Shared { queue, tenure, .. } = &*self.0;
        let letter = DeadLetter {
            task: self.task(n)?.clone(),
            failed_at: queue.store().now().await?,
            worker: tenure.lease().holder,
            failures: history.failures,
            crashes: history.crashes,
            errors: history.errors,
            nonce: String::new(),
        };
        queue
            .note_finish(&Unit::Task(letter.task.id.clone()), &letter.task.incarnation, None)
            .await?;
        queue.write_dead_letter(letter, None).await
    }

    /// A task leaves the bundle, to be tried again on its own. Its lease comes first: the task must
    /// not be seen as free before its time.
    async fn leave(&self, n: u32, history: &History) -> Result<()> {
        let Shared { queue, tenure, .. } = &*self.0;
        let store = queue.store();
        let task = self.task(n)?;
        let unit = Unit::Task(task.id.clone());
        let history = history.clone().about(&task.incarnation, None);
        if let Some(outbox) = queue.outbox() {
            let how = (false, None);
            outbox.pushing(&unit, &task.incarnation, how, queue.durability()).await?;
        }
        let (nonce, now) = (store.env().nonce(), store.now().await?);
        let holder = tenure.lease().holder;
        let holder = Holder { name: &holder, ttl: queue.settings().ttl, place: None };
        let held = lease_decide::acquire(None, &holder, now, 0, nonce).lease;
        let mut released = lease_decide::release(&held, now, nonce);
        history.write(&mut released);
        let body = released.to_bytes(leasehold_protocol::format::lease::Dialect::Task);
        let lease = Write::when(When::Absent, Proof::Nonce(nonce));
        let key = queue.keys().part(&unit, Part::Lease)?;
        wrote(store.put(&key, body.into(), lease.durability(queue.durability())).await?)?;
        // Its bytes say which push it is, so whoever repeats this writes the same.
        let key = queue.keys().part(&unit, Part::Work)?;
        let push = (task.incarnation.as_str(), task.pushed_at);
        match queue.place(&unit, &key, task.to_bytes(), push, Proof::Bytes).await? {
            Placed::There(_) | Placed::Over(_) => return Ok(()),
            Placed::Taken => {}
        }
        // Somebody did this before us, or something else has its name.
        let there = store.get(&key).await?.map(|object| {
            format::Task::parse(&object.body, &task.id, &object.meta.mark()).incarnation
        });
        match there {
            Some(there) if there != task.incarnation => {
                if let Some(outbox) = queue.outbox() {
                    outbox.not_pushing(&unit, &task.incarnation).await?;
                }
                let message = "another task has the name of one that has to leave its bundle";
                Err(Error::new(ErrorKind::Data, message).at(&key))
            }
            _ => Ok(()),
        }
    }
}

impl Queue {
    /// Whether a task that left its bundle was done there all the same. Who lets a task leave may be
    /// stopped on the way, for so long that others take the bundle over, see nothing of that, and do the
    /// task; woken up, it goes on. One LIST and one GET, for tasks that left bundles only.
    pub(crate) async fn is_done_in_bundle(&self, id: &str) -> Result<bool> {
        match bundle_of(id) {
            // Boxed: few are from a bundle, and every task would carry it along.
            Some(('.', n)) => Box::pin(self.is_done_as(id, n)).await,
            _ => Ok(false),
        }
    }

    async fn is_done_as(&self, id: &str, n: u32) -> Result<bool> {
        let bundle = id.split('.').next().unwrap_or_default();
        let list = List::prefix(format!("{}{bundle}-", self.keys().completed()))?.limit(1);
        for entry in self.store().list(list).collect().await?.entries {
            let Some(object) = self.store().get(&entry.key).await? else { continue };
            let results = Receipt::parse(&object.body).ok().and_then(|receipt| receipt.results);
            // Without a result nothing says whether it was done there or has left.
            if results.is_some_and(|all| all.get(n as usize).is_some_and(Option::is_some)) {
                self.store().persist(std::slice::from_ref(&entry.key)).await?;
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// What a lease says about a bundle beside its history: the results of what is done. Whoever copies the
/// one without the other says that a task is done, and loses its result.
pub(crate) fn progress(lease: &Lease) -> serde_json::Map<String, serde_json::Value> {
    let fields = [TEXTS_FIELD, RESULTS_FIELD, DOUBT_FIELD].into_iter();
    let there = fields.filter_map(|field| Some((field, lease.other.get(field)?)));
    there.map(|(field, value)| (field.to_owned(), value.clone())).collect()
}

/// Writes down what is done, with at most this many bytes of results. What has a result that does
/// not fit is not written down as done: its result would be lost.
fn note(state: &Mutex<State>, lease: &mut Lease, most: usize) {
    let state = state.lock().unwrap_or_else(PoisonError::into_inner);
    let mut history = History { done: Done::default(), ..state.history.clone() };
    let mut kept = Vec::new();
    let mut bytes = 0;
    for (n, result) in state.results.iter().enumerate() {
        let n = n as u32;
        if !state.history.done.contains(n) {
            continue;
        }
        if let Some(result) = result {
            bytes += result.get().len() + 8;
            if bytes > most {
                continue;
            }
            kept.push((n, result.get()));
        }
        history.done.insert(n);
    }
    history.write(lease);
    if state.doubt {
        lease.other.insert(DOUBT_FIELD.to_owned(), true.into());
    }
    lease.other.remove(RESULTS_FIELD);
    lease.other.remove(TEXTS_FIELD);
    if !kept.is_empty() {
        let kept = serde_json::to_value(kept).unwrap_or_default();
        lease.other.insert(TEXTS_FIELD.to_owned(), kept);
    }
}

/// What stands for a result that is not kept: the task is done all the same.
fn too_long(result: &RawValue) -> Json {
    let length = result.get().len();
    tracing::warn!(length, "a result is too long for its bundle, and is not kept");
    serde_json::value::to_raw_value(&serde_json::json!({ "too_long": length })).unwrap_or_default()
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
        self.run.0.tenure.token()
    }

    pub fn lost(&self) -> CancellationToken {
        self.run.0.tenure.lost()
    }

    pub fn check(&self) -> Result<()> {
        match self.run.state().phase {
            Phase::Over => Err(self.run.lost()),
            _ => self.run.0.tenure.check(),
        }
    }

    pub fn trusted_for(&self) -> Duration {
        self.run.0.tenure.trusted_for()
    }

    pub fn runtime(&self) -> &tokio::runtime::Handle {
        self.run.0.tenure.runtime()
    }

    pub async fn ack(self, result: Option<Json>) -> Result<Acked> {
        self.run.finished(self.n, result).await
    }

    /// What went wrong, if the bundle is still ours: else it is not for us to say.
    async fn failure(&self, error: &str) -> Result<Failure> {
        self.check()?;
        let at = self.queue().store().now().await?;
        let worker = self.run.0.tenure.lease().holder;
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
            let mut history = History { failures: 1, ..History::default() };
            history.note(failure);
            self.run.write_dead_letter(self.n, history).await
        };
        self.left_by(left.await).await
    }

    async fn left_by(&self, left: Result<()>) -> Result<()> {
        match left {
            Ok(()) => self.run.finished(self.n, None).await.map(|_| ()),
            // It stays in the bundle, which others do again.
            Err(error) => {
                self.run.unfinished(true).await?;
                Err(error)
            }
        }
    }

    pub async fn give_back(self) -> Result<()> {
        self.run.unfinished(false).await
    }
}
