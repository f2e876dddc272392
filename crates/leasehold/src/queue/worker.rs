//! A worker: claims tasks and hands them out.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use leasehold_protocol::backoff::full_jitter;
use leasehold_protocol::layout::queue::Unit;
use tokio_util::sync::CancellationToken;

use super::bundle::Run;
use super::claim::Tried;
use super::find::{Candidate, Finder, Outlook};
use super::{Queue, Task};
use crate::env::BootTime;
use crate::store::{Kind, Watch};
use crate::{ErrorKind, Result};

/// How a worker behaves.
#[derive(Debug, Clone)]
pub struct WorkerSettings {
    /// Its name, in leases and receipts.
    pub name: String,
    /// How long to wait at most before looking again where nothing was to be done: each look is a
    /// LIST.
    pub poll: Duration,
    /// Whether to end when there is nothing left, neither waiting nor being done by anybody.
    pub until_empty: bool,
}

impl WorkerSettings {
    /// With this name; polls at least every 30 seconds.
    pub fn named(name: impl Into<String>) -> Self {
        Self { name: name.into(), poll: Duration::from_secs(30), until_empty: false }
    }
}

/// Claims tasks of one or several queues, those of the first before those of the second.
///
/// [`Worker::next`] may be called by many at once: they share what is known of the queues.
#[derive(Debug)]
pub struct Worker {
    settings: WorkerSettings,
    queues: Vec<Source>,
    drain: CancellationToken,
}

#[derive(Debug)]
struct Source {
    queue: Queue,
    finder: tokio::sync::Mutex<Finder>,
    /// Tasks of bundles that are claimed and not handed out yet.
    bundles: Mutex<VecDeque<(Run, VecDeque<u32>)>>,
    checked: Mutex<Checked>,
}

/// When the settings were read last, and when something was last swept.
#[derive(Debug)]
struct Checked {
    settings: BootTime,
    sweep: BootTime,
}

/// How often settings are read again: a pause is seen within this.
const REFRESH: Duration = Duration::from_secs(30);
/// How often a worker sweeps a little.
const SWEEP: Duration = Duration::from_secs(600);
/// The first pause where there is nothing to do.
const FIRST: Duration = Duration::from_millis(500);
const FIRST_IN_DIRECTORY: Duration = Duration::from_millis(10);
/// How long to wait before looking at what changed.
const AFTER_CHANGE: Duration = Duration::from_millis(1);

impl Worker {
    /// A worker of these queues.
    pub fn new(queues: Vec<Queue>, settings: WorkerSettings) -> Self {
        let source = |queue: Queue| {
            let now = queue.store().env().clock().boot();
            Source {
                finder: tokio::sync::Mutex::new(Finder::new(queue.clone(), settings.name.clone())),
                bundles: Mutex::default(),
                checked: Mutex::new(Checked { settings: now, sweep: now }),
                queue,
            }
        };
        let queues = queues.into_iter().map(source).collect();
        Self { settings, queues, drain: CancellationToken::new() }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.settings.name
    }

    /// Hands out no more tasks: [`Worker::next`] returns `None` from now on. What was handed out
    /// may be finished; what is claimed but not handed out goes back to the others.
    pub async fn drain(&self) -> Result<()> {
        self.drain.cancel();
        for source in &self.queues {
            let runs: Vec<_> = source.bundles().drain(..).collect();
            for (run, _) in runs {
                run.abandon().await?;
            }
        }
        Ok(())
    }

    /// The next task; waits for one. `None` once the worker is drained, or has nothing left to do
    /// and was asked to end then.
    pub async fn next(&self) -> Result<Option<Task>> {
        let mut idle = 0;
        // In a directory somebody tells when there is something new.
        let mut watches = Vec::new();
        loop {
            let mut outlook = Outlook::default();
            for source in &self.queues {
                if self.drain.is_cancelled() {
                    return Ok(None);
                }
                match self.try_source(source).await? {
                    Ok(task) => {
                        // Drained meanwhile: it goes back.
                        if self.drain.is_cancelled() {
                            task.give_back().await?;
                            return Ok(None);
                        }
                        return Ok(Some(task));
                    }
                    Err(found) => {
                        outlook.busy |= found.busy;
                        outlook.due = [outlook.due, found.due].into_iter().flatten().min();
                    }
                }
            }
            if self.settings.until_empty && !outlook.busy {
                return Ok(None);
            }
            let Some(first) = self.queues.first() else { return Ok(None) };
            idle += 1;
            if idle == 1 && first.queue.store().kind() == Kind::Directory {
                // First the watch, then another look: nothing is missed in between.
                watches = self.watches()?;
                continue;
            }
            let live = !watches.is_empty() && watches.iter().all(Watch::is_live);
            let pause = self.pause(&first.queue, idle, outlook, live);
            let clock = first.queue.store().env().clone();
            tokio::select! {
                () = clock.clock().sleep(pause) => {}
                () = self.drain.cancelled() => return Ok(None),
                // Not at once: what is new may come in company.
                () = any_change(&mut watches) => clock.clock().sleep(AFTER_CHANGE).await,
            }
        }
    }

    fn watches(&self) -> Result<Vec<Watch>> {
        let mut watches = Vec::new();
        for Source { queue, .. } in &self.queues {
            let keys = queue.keys();
            for shard in 0..keys.shards() {
                watches.push(queue.store().watch(&keys.pending(shard))?);
            }
            watches.push(queue.store().watch(&keys.bundles())?);
        }
        Ok(watches)
    }

    /// How long to wait where there is nothing to do: longer each time, but not past what is due.
    fn pause(&self, queue: &Queue, idle: u32, outlook: Outlook, live: bool) -> Duration {
        let local = queue.store().kind() == Kind::Directory;
        let first = if local { FIRST_IN_DIRECTORY } else { FIRST };
        let cap = match (local, live) {
            // Looking costs nothing but a little time of this machine.
            (true, false) => self.settings.poll.min(Duration::from_millis(200)),
            (true, true) => self.settings.poll.min(Duration::from_secs(1)),
            (false, _) => self.settings.poll,
        };
        let random = queue.store().env().random();
        let longest = first.saturating_mul(2u32.saturating_pow(idle)).min(cap);
        // At least half of it, so that an idle worker costs what it says.
        let pause = longest / 2 + full_jitter(0, longest / 2, longest / 2, random);
        match outlook.due {
            Some(due) => pause.min(due.max(Duration::from_millis(5))),
            None => pause,
        }
    }

    /// A task of this queue, or what can be expected of it.
    async fn try_source(&self, source: &Source) -> Result<Result<Task, Outlook>> {
        let queue = &source.queue;
        self.look_after(source).await;
        if queue.settings().paused {
            // Somebody wants it to rest: nothing is to be done, but it is not empty either.
            return Ok(Err(Outlook { busy: true, due: None }));
        }
        loop {
            if let Some(task) = source.piece() {
                return Ok(Ok(task));
            }
            let mut finder = source.finder().await;
            // Somebody else may have claimed a bundle while we waited.
            if let Some(task) = source.piece() {
                return Ok(Ok(task));
            }
            let candidate = match finder.next() {
                Some(candidate) => candidate,
                None => {
                    let outlook = finder.refill().await?;
                    match finder.next() {
                        Some(candidate) => candidate,
                        None => return Ok(Err(outlook)),
                    }
                }
            };
            // Claims of several callers go on at the same time, but nobody needs two bundles.
            let keep = match candidate.is_bundle() {
                true => Some(finder),
                false => {
                    drop(finder);
                    None
                }
            };
            let (unit, tried) = self.try_candidate(queue, candidate).await?;
            let mut finder = match keep {
                Some(finder) => finder,
                None => source.finder().await,
            };
            finder.tried(&unit, &tried);
            match tried {
                Tried::Task(held) => return Ok(Ok(Task::single(held))),
                Tried::Bundle(run) => {
                    let left = run.left().into();
                    source.bundles().push_back((run, left));
                }
                Tried::Taken | Tried::Over | Tried::Later => {
                    if self.drain.is_cancelled() {
                        return Ok(Err(Outlook { busy: true, due: None }));
                    }
                }
            }
        }
    }

    async fn try_candidate(&self, queue: &Queue, candidate: Candidate) -> Result<(Unit, Tried)> {
        match candidate {
            Candidate::Free(unit) => {
                let tried = queue.claim_free(&unit, &self.settings.name).await;
                Ok((unit, or_lost(tried)?))
            }
            Candidate::Doubtful(unit) => {
                let tried = match queue.looks_free(&unit).await? {
                    true => queue.claim_free(&unit, &self.settings.name).await,
                    false => Ok(Tried::Taken),
                };
                Ok((unit, or_lost(tried)?))
            }
            Candidate::Leased(unit, desk) => {
                let tried = queue.claim_leased(&unit, &desk).await;
                Ok((unit, or_lost(tried)?))
            }
            Candidate::Orphan(unit, desk) => {
                queue.sweep_lease(&unit, &desk).await?;
                Ok((unit, Tried::Over))
            }
        }
    }

    /// Now and then: the settings, and a little sweeping.
    async fn look_after(&self, source: &Source) {
        let now = source.queue.store().env().clock().boot();
        let (refresh, sweep) = {
            let mut checked = source.checked();
            let refresh = now.since(checked.settings) >= REFRESH;
            let sweep = now.since(checked.sweep) >= SWEEP;
            if refresh {
                checked.settings = now;
            }
            if sweep {
                checked.sweep = now;
            }
            (refresh, sweep)
        };
        // What fails now is done another time.
        if refresh && let Err(error) = source.queue.refresh().await {
            tracing::warn!(%error, "the settings of the queue could not be read");
        }
        if sweep && let Err(error) = source.queue.sweep_a_little().await {
            tracing::debug!(%error, "sweeping failed");
        }
    }
}

/// Completes when one of them tells of a change; never if there is none.
async fn any_change(watches: &mut [Watch]) {
    if watches.is_empty() {
        return std::future::pending().await;
    }
    let changes = watches.iter_mut().map(|watch| Box::pin(watch.changed()));
    futures::future::select_all(changes).await;
}

/// A claim that was lost at once, by a pause of this process, is somebody else's.
fn or_lost(tried: Result<Tried>) -> Result<Tried> {
    match tried {
        Err(error) if error.kind() == ErrorKind::Lost => Ok(Tried::Taken),
        tried => tried,
    }
}

impl Source {
    fn bundles(&self) -> MutexGuard<'_, VecDeque<(Run, VecDeque<u32>)>> {
        self.bundles.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Others have it for less than a microsecond as a rule, and being woken takes ten: so it is
    /// tried a few times first.
    async fn finder(&self) -> tokio::sync::MutexGuard<'_, Finder> {
        for _ in 0..50 {
            if let Ok(finder) = self.finder.try_lock() {
                return finder;
            }
            std::hint::spin_loop();
        }
        self.finder.lock().await
    }

    fn checked(&self) -> MutexGuard<'_, Checked> {
        self.checked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A task of a bundle that is claimed already.
    fn piece(&self) -> Option<Task> {
        let mut bundles = self.bundles();
        while let Some((run, left)) = bundles.front_mut() {
            if let Some(n) = left.pop_front() {
                return Some(Task::piece(run.piece(n)));
            }
            bundles.pop_front();
        }
        None
    }
}
