//! A worker: claims tasks and hands them out.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use leasehold_protocol::backoff::full_jitter;
use leasehold_protocol::format::lease::Process;
use tokio_util::sync::CancellationToken;

use super::bundle::Run;
use super::claim::Tried;
use super::find::{Attempt, Board, Candidate, Finder, Outlook};
use super::shunned::Shunned;
use super::{Mode, Queue, Task};
use crate::env::BootTime;
use crate::lease::Passes;
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
    /// A process that ends only after everything that works on tasks, where other processes than
    /// this one do. Workers on the same machine recognise a dead one at once; they leave its tasks
    /// alone while this lives, so that none runs twice at a time (FIELD.md row 26).
    pub companion: Option<Process>,
}

impl WorkerSettings {
    /// With this name; polls at least every 30 seconds.
    pub fn named(name: impl Into<String>) -> Self {
        let poll = Duration::from_secs(30);
        Self { name: name.into(), poll, until_empty: false, companion: None }
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
    /// Whether to end when a queue's mode changes, and whether one did.
    until_switched: bool,
    switched: AtomicBool,
}

#[derive(Debug)]
struct Source {
    queue: Queue,
    /// What to try next.
    board: Arc<Board>,
    /// Lists more of it. Held while that is done, and while a bundle is claimed.
    finder: tokio::sync::Mutex<Finder>,
    /// Tasks of bundles that are claimed and not handed out yet.
    bundles: Mutex<VecDeque<(Run, VecDeque<u32>)>>,
    checked: Mutex<Checked>,
    passes: Passes,
    /// What could not be claimed.
    shunned: Arc<Shunned>,
    /// How many tasks and bundles were claimed.
    claimed: AtomicU64,
    /// Whether we told of objects that are no tasks.
    told: AtomicBool,
    rest: Mutex<Rest>,
    /// The queue's mode when we began.
    mode: Mode,
    /// In a node's replica: whether it is noted that we have nothing to do.
    dry: AtomicBool,
}

/// How long a queue in which there was nothing to do is left alone, by all who call.
#[derive(Debug, Default)]
struct Rest {
    /// How often there was nothing, one after the other.
    idle: u32,
    until: Option<BootTime>,
    outlook: Outlook,
}

/// When the settings were read last, and when something is swept next.
#[derive(Debug)]
struct Checked {
    settings: BootTime,
    sweep: BootTime,
    /// The same if we have claimed something: whoever makes receipts removes old ones.
    early: Option<BootTime>,
    /// For how many of our claims there was a sweep.
    swept_for: u64,
}

/// How often settings are read again: a pause is seen within this.
const REFRESH: Duration = Duration::from_secs(30);
/// How often a worker sweeps a little.
const SWEEP: Duration = Duration::from_secs(600);
/// When it does so for the first time, if it has claimed something, and again where there was more.
const FIRST_SWEEP: Duration = Duration::from_secs(60);
/// How many receipts it looks at then, and how many at most.
const A_LITTLE: u64 = 1000;
const A_LOT: u64 = 10_000;
/// The first pause where there is nothing to do.
const FIRST: Duration = Duration::from_millis(500);
const FIRST_IN_DIRECTORY: Duration = Duration::from_millis(10);
/// How long a queue of several is left alone at most.
const PRIORITY: Duration = Duration::from_secs(10);
/// How long to wait after two lists of which nothing came.
const VAIN_LISTS: Duration = Duration::from_millis(50);
/// How long to wait before looking at what changed.
const AFTER_CHANGE: Duration = Duration::from_millis(1);

impl Worker {
    /// A worker of these queues.
    pub fn new(queues: Vec<Queue>, settings: WorkerSettings) -> Self {
        let source = |queue: Queue| {
            if let Some(companion) = &settings.companion {
                // One process has one: a second worker of the same queue means the same.
                let _ = queue.0.companion.set(companion.clone());
            }
            let env = queue.store().env();
            let now = env.clock().boot();
            // Not all that are started together at the same time.
            let early = now.plus(full_jitter(0, FIRST_SWEEP, FIRST_SWEEP, env.random()));
            let (sweep, early) = (now.plus(SWEEP), Some(early));
            let checked = Checked { settings: now, sweep, early, swept_for: 0 };
            let board = Arc::new(Board::new(queue.clone(), settings.name.clone()));
            let finder = Finder::new(&board);
            Source {
                shunned: finder.shunned.clone(),
                finder: tokio::sync::Mutex::new(finder),
                board,
                bundles: Mutex::default(),
                passes: Passes::default(),
                checked: Mutex::new(checked),
                claimed: AtomicU64::new(0),
                told: AtomicBool::new(false),
                mode: queue.settings().mode,
                dry: AtomicBool::new(false),
                rest: Mutex::default(),
                queue,
            }
        };
        let queues = queues.into_iter().map(source).collect();
        let (drain, switched) = (CancellationToken::new(), AtomicBool::new(false));
        Self { settings, queues, drain, until_switched: false, switched }
    }

    /// Ends when a queue was switched between strict and relaxed mode, as soon as that is noticed: its
    /// tasks are to be claimed elsewhere from then on. What was handed out may be finished.
    #[must_use]
    pub fn until_switched(mut self) -> Self {
        self.until_switched = true;
        self
    }

    /// Whether it ended because a queue was switched to another mode.
    pub fn was_switched(&self) -> bool {
        self.switched.load(SeqCst)
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.settings.name
    }

    /// How many tasks it gave up without handing them out: their workers had crashed as often as they may.
    pub fn given_up(&self) -> u64 {
        self.queues.iter().map(|source| source.queue.0.given_up.load(SeqCst)).sum()
    }

    /// Hands out no more tasks: [`Worker::next`] returns `None` from now on. What was handed out
    /// may be finished; what is claimed but not handed out goes back to the others. All of it that can:
    /// the first error is returned at the end, and what it is about is found after its ttl.
    pub async fn drain(&self) -> Result<()> {
        self.drain.cancel();
        let mut drained = Ok(());
        for source in &self.queues {
            let runs: Vec<_> = source.bundles().drain(..).collect();
            for (run, _) in runs {
                match run.abandon().await {
                    // Somebody else has it already.
                    Err(error) if error.kind() == ErrorKind::Lost => {}
                    abandoned => drained = drained.and(abandoned),
                }
            }
        }
        drained
    }

    /// The next task; waits for one. `None` once the worker is drained, or has nothing left to do
    /// and was asked to end then: nothing that waits, or is being done, by anybody. Tasks that are
    /// scheduled for later do not count.
    ///
    /// If it is dropped while it claims something, that is given back, at the cost of a few requests:
    /// do not call it with a timeout of milliseconds.
    pub async fn next(&self) -> Result<Option<Task>> {
        // In a directory somebody tells when there is something new.
        let mut watches: Option<Vec<Watch>> = None;
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
                            Box::pin(task.give_back()).await?;
                            return Ok(None);
                        }
                        return Ok(Some(task));
                    }
                    Err(found) => outlook.and(found),
                }
            }
            let ends = self.settings.until_empty && !outlook.busy;
            // What we may not claim is told by whoever can do nothing else.
            let claimed = self.queues.iter().any(|source| source.claimed.load(SeqCst) > 0);
            let error = |source: &Source| source.shunned.error(!outlook.busy);
            if (ends || !claimed)
                && let Some(error) = self.queues.iter().find_map(error)
            {
                return Err(error);
            }
            if ends {
                for source in &self.queues {
                    source.tell_of_unknown();
                    Box::pin(source.sweep_what_we_made()).await;
                }
                return Ok(None);
            }
            let Some(first) = self.queues.first() else { return Ok(None) };
            let env = first.queue.store().env().clone();
            if watches.is_none() && first.queue.store().kind() == Kind::Directory {
                // First the watch, then another look: nothing is missed in between.
                watches = Some(self.watches()?);
                self.queues.iter().for_each(Source::wake);
                continue;
            }
            let now = env.clock().boot();
            let rests = self.queues.iter().filter_map(|source| source.rest().until);
            let until = rests.min().unwrap_or(now.plus(AFTER_CHANGE));
            let pause = until.since(now).max(AFTER_CHANGE);
            tokio::select! {
                biased;
                () = env.clock().sleep(pause) => {}
                () = self.drain.cancelled() => return Ok(None),
                () = any_change(watches.as_deref_mut().unwrap_or_default()) => {
                    // Not at once: what is new may come in company.
                    env.clock().sleep(AFTER_CHANGE).await;
                    self.queues.iter().for_each(Source::wake);
                }
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

    /// How long to leave a queue alone in which there was nothing to do: longer each time, but not
    /// past what is due.
    fn pause(&self, queue: &Queue, idle: u32, outlook: Outlook) -> Duration {
        let local = queue.store().kind() == Kind::Directory;
        let (first, cap) = match local {
            // Looking costs nothing but a little time of this machine, and changes are told.
            true => (FIRST_IN_DIRECTORY, self.settings.poll.min(Duration::from_secs(1))),
            // While there is work elsewhere, what comes before it is looked for more often.
            false if self.queues.len() > 1 => (FIRST, self.settings.poll.min(PRIORITY)),
            false => (FIRST, self.settings.poll),
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
        // It would never find a task again.
        queue.not_moved()?;
        if self.until_switched && queue.settings().mode != source.mode {
            self.switched.store(true, SeqCst);
            Box::pin(self.drain()).await?;
            return Ok(Err(Outlook { busy: true, due: None }));
        }
        if queue.settings().paused {
            // Somebody wants it to rest: nothing is to be done, but it is not empty either.
            let outlook = Outlook { busy: true, due: None };
            source.go_to_rest(outlook, |idle| self.pause(queue, idle, outlook));
            return Ok(Err(outlook));
        }
        let mut refills = 0;
        loop {
            if let Some(task) = source.piece() {
                return Ok(Ok(task));
            }
            if let Some(outlook) = source.resting() {
                return Ok(Err(outlook));
            }
            if source.board.is_to_tend()
                && !self.drain.is_cancelled()
                && let Ok(mut finder) = source.finder.try_lock()
            {
                let since = queue.store().env().clock().boot();
                if let Err(error) = Box::pin(finder.tend()).await {
                    tracing::debug!(%error, "what is due is looked for another time");
                }
                source.board.tended(since);
            }
            // Kept until a bundle's tasks can be had.
            let (attempt, _finder) = match source.board.next_single() {
                Some(attempt) => (attempt, None),
                None => {
                    let mut finder = source.finder.lock().await;
                    // Somebody else may have claimed a bundle while we waited, or found that there
                    // is nothing.
                    if let Some(task) = source.piece() {
                        return Ok(Ok(task));
                    }
                    if let Some(outlook) = source.resting() {
                        return Ok(Err(outlook));
                    }
                    let (attempt, outlook) = match source.board.next() {
                        Some(attempt) => (Some(attempt), Outlook::default()),
                        // Lists of which nothing comes, one after the other, are not the way.
                        None if refills >= 2 => {
                            (None, Outlook { busy: true, due: Some(VAIN_LISTS) })
                        }
                        None => {
                            refills += 1;
                            // Boxed: as a rule there is something, and every claim would carry it
                            // along.
                            Box::pin(finder.refill()).await?
                        }
                    };
                    match attempt {
                        // Claims of several callers go on at the same time, but nobody needs two
                        // bundles.
                        Some(attempt) if attempt.candidate.is_bundle() => (attempt, Some(finder)),
                        Some(attempt) => (attempt, None),
                        None => {
                            source.note_dry(true).await;
                            source.go_to_rest(outlook, |idle| self.pause(queue, idle, outlook));
                            return Ok(Err(outlook));
                        }
                    }
                }
            };
            let Attempt { candidate, trying } = attempt;
            let (tried, go_on) = self.try_candidate(source, candidate).await?;
            trying.came_to(&tried);
            if !go_on {
                let outlook = Outlook { busy: true, due: None };
                source.go_to_rest(outlook, |idle| self.pause(queue, idle, outlook));
                return Ok(Err(outlook));
            }
            match tried {
                // Somebody else's by now: we were stopped, or waited for the others here.
                Tried::Task(held) if held.is_lost() => {}
                Tried::Task(held) => {
                    source.note_claim().await;
                    return Ok(Ok(Task::single(held)));
                }
                Tried::Bundle(run) => {
                    source.note_claim().await;
                    let left = run.left().into();
                    source.bundles().push_back((run, left));
                }
                Tried::Taken | Tried::Over | Tried::Later(_) | Tried::Unreadable => {
                    if self.drain.is_cancelled() {
                        return Ok(Err(Outlook { busy: true, due: None }));
                    }
                }
            }
        }
    }

    /// What came of a candidate, and whether others are to be tried.
    async fn try_candidate(&self, source: &Source, candidate: Candidate) -> Result<(Tried, bool)> {
        let unit = candidate.unit().clone();
        match self.try_unit(source, candidate).await {
            // A claim that was lost at once, by a pause of this process, is somebody else's.
            Err(error) if error.kind() == ErrorKind::Lost => Ok((Tried::Taken, true)),
            // One bad object, or one that is not for us, must not keep everybody from the others.
            Err(error) if error.is_about_data() || error.kind() == ErrorKind::Denied => {
                let now = source.queue.store().env().clock().boot();
                let go_on = source.shunned.add(&unit, &error, now);
                Ok((Tried::Unreadable, go_on))
            }
            tried => Ok((tried?, true)),
        }
    }

    async fn try_unit(&self, source: &Source, candidate: Candidate) -> Result<Tried> {
        let Source { queue, passes, .. } = source;
        let name = &self.settings.name;
        match candidate {
            Candidate::Free(unit) => queue.claim_free(&unit, name, passes).await,
            Candidate::Doubtful(unit) => match queue.looks_free(&unit).await? {
                true => queue.claim_free(&unit, name, passes).await,
                false => Ok(Tried::Taken),
            },
            // Boxed: most are free, and their claims would carry these along.
            Candidate::Leased(unit, desk) => Box::pin(queue.claim_leased(&unit, &desk)).await,
            Candidate::Orphan(unit, desk) => {
                Box::pin(queue.sweep_lease(&unit, &desk)).await?;
                Ok(Tried::Over)
            }
        }
    }

    /// Now and then: the settings, and a little sweeping.
    async fn look_after(&self, source: &Source) {
        let now = source.queue.store().env().clock().boot();
        let (refresh, sweep) = {
            let mut checked = source.checked();
            let refresh = now.since(checked.settings) >= REFRESH;
            if refresh {
                checked.settings = now;
            }
            let fresh = source.claimed.load(SeqCst) > checked.swept_for;
            let early = fresh && checked.early.is_some_and(|early| early <= now);
            let sweep = early || checked.sweep <= now;
            if sweep {
                (checked.sweep, checked.early) = (now.plus(SWEEP), None);
            }
            (refresh, sweep)
        };
        // What fails now is done another time. Boxed: every claim would carry it along.
        if refresh && let Err(error) = Box::pin(source.queue.refresh()).await {
            tracing::warn!(%error, "the settings of the queue could not be read");
        }
        if sweep && Box::pin(source.sweep()).await {
            source.checked().early = Some(now.plus(FIRST_SWEEP));
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

impl Source {
    fn rest(&self) -> MutexGuard<'_, Rest> {
        self.rest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was to be expected when there was last nothing to do, if that was a moment ago.
    fn resting(&self) -> Option<Outlook> {
        let rest = self.rest();
        let now = self.queue.store().env().clock().boot();
        rest.until.is_some_and(|until| until > now).then_some(rest.outlook)
    }

    fn go_to_rest(&self, outlook: Outlook, pause: impl Fn(u32) -> Duration) {
        self.passes.clear();
        let mut rest = self.rest();
        let now = self.queue.store().env().clock().boot();
        rest.until = Some(now.plus(pause(rest.idle)));
        rest.idle = rest.idle.saturating_add(1);
        rest.outlook = outlook;
    }

    /// Something was claimed.
    async fn note_claim(&self) {
        self.note_dry(false).await;
        self.rest().idle = 0;
        self.claimed.fetch_add(1, SeqCst);
        self.shunned.claimed();
    }

    /// Removes old receipts, twice as many as we make: so they do not become ever more, and nobody has
    /// to do it all at once. Says whether there is more to do.
    async fn sweep(&self) -> bool {
        let budget = {
            let mut checked = self.checked();
            let fresh = self.claimed.load(SeqCst) - checked.swept_for;
            let budget = fresh.saturating_mul(2).clamp(A_LITTLE, A_LOT);
            checked.swept_for += fresh.min(budget / 2);
            budget
        };
        match self.queue.sweep_a_little(budget as usize).await {
            Ok(more) => more,
            Err(error) => {
                // What fails now is done another time.
                tracing::debug!(%error, "sweeping failed");
                false
            }
        }
    }

    /// The same for all that we made, by the first who comes to the end: workers that run for a few
    /// minutes each would leave ever more.
    async fn sweep_what_we_made(&self) {
        let is_due = || self.claimed.load(SeqCst) > self.checked().swept_for;
        while self.queue.settings().receipts && is_due() && self.sweep().await {}
    }

    /// The queue looks empty to us, and is not: once, whoever relies on that is to know.
    fn tell_of_unknown(&self) {
        let unknown = self.shunned.unknown();
        if unknown > 0 && !self.told.swap(true, SeqCst) {
            let queue = self.queue.name();
            tracing::warn!(
                queue,
                unknown,
                "objects among the tasks have names that are no task's, and are not done: a name is \
                 escaped in one way only (docs/format.md)"
            );
        }
    }

    /// Something has changed.
    fn wake(&self) {
        let mut rest = self.rest();
        (rest.until, rest.idle) = (None, 0);
    }

    /// In a node's replica: says that there is nothing to do, so that the bucket is asked, or that
    /// there is again.
    async fn note_dry(&self, dry: bool) {
        let Some(outbox) = self.queue.outbox() else { return };
        if self.dry.swap(dry, SeqCst) == dry {
            return;
        }
        if let Err(error) = Box::pin(outbox.dry(dry)).await {
            tracing::debug!(%error, "not noted that there is nothing to do");
        }
    }

    fn bundles(&self) -> MutexGuard<'_, VecDeque<(Run, VecDeque<u32>)>> {
        self.bundles.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn checked(&self) -> MutexGuard<'_, Checked> {
        self.checked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A task of a bundle that is claimed already.
    fn piece(&self) -> Option<Task> {
        let mut bundles = self.bundles();
        while let Some((run, left)) = bundles.front_mut() {
            if let Some(piece) = left.pop_front().and_then(|n| run.piece(n)) {
                return Some(Task::piece(piece));
            }
            bundles.pop_front();
        }
        None
    }
}
