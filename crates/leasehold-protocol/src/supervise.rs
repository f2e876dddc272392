//! What a supervisor decides: which processes run, which are started and stopped when the plan
//! changes, when one that ended is started again, and how the fleet's nodes are doing.
//!
//! ```text
//!   plan (fleet.toml) ── processes() ──▶ what should run ──┐
//!   what runs ─────────────────────────────────────────────┴─ compare() ──▶ keep, stop, start
//!
//!   a process that ends ── Restarts::ended() ──▶ again after 0.5 s, 1 s, 2 s … 1 min
//!                                               5 times within 10 min: a crash loop
//!                                               1 min of running: all is forgiven
//! ```
//!
//! A process is its arguments: two that are started alike are the same, so a plan that only moves
//! lines, or changes a number of processes, leaves alone what it does not change.

mod script;

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use crate::backoff::full_jitter;
use crate::duration;
use crate::format::fleet::{CompilerPlan, NodePlan, Words, WorkerPlan};

/// What sort of process it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// Works on queues.
    Worker,
    /// Compiles indexes.
    Compiler,
}

impl Role {
    /// Its word.
    pub fn word(self) -> &'static str {
        match self {
            Self::Worker => "worker",
            Self::Compiler => "compiler",
        }
    }
}

/// A process that should run.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Process {
    /// What sort.
    pub role: Role,
    /// Its queues or indexes.
    pub of: Vec<String>,
    /// The arguments of `leasehold` that make it.
    pub words: Vec<String>,
    /// Variables of its environment.
    pub env: BTreeMap<String, String>,
    /// How long it may take to end when it is told to.
    pub drain: Duration,
}

/// How long a worker's running tasks may go on where the plan does not say.
pub const USUAL_DRAIN: Duration = Duration::from_secs(30);

/// The processes that a plan asks for.
pub fn processes(plan: &NodePlan) -> Vec<Process> {
    let workers = plan.worker.iter().flat_map(|plan| repeat(worker(plan), plan.count));
    let compilers = plan.compiler.iter().flat_map(|plan| repeat(compiler(plan), plan.count));
    workers.chain(compilers).collect()
}

fn repeat(process: Process, count: u32) -> impl Iterator<Item = Process> {
    (0..count).map(move |_| process.clone())
}

fn worker(plan: &WorkerPlan) -> Process {
    let drain = plan.drain.unwrap_or(USUAL_DRAIN);
    let mut words: Vec<String> = ["queue", "work"].map(str::to_owned).into();
    let mut option = |name: &str, value: Option<String>| {
        words.extend(value.map(|value| format!("--{name}={value}")));
    };
    option("jobs", Some(plan.jobs.to_string()));
    option("drain", Some(duration::format(drain)));
    option("poll", plan.poll.map(duration::format));
    option("grace", plan.grace.map(duration::format));
    option("fail-code", plan.fail_code.map(|code| code.to_string()));
    option("log", plan.log.clone());
    words.push(plan.queue.all().join(","));
    words.push("--".to_owned());
    match &plan.command {
        Words::One(script) => words.extend(script::command_of(script)),
        Words::List(command) => words.extend(command.iter().cloned()),
    }
    let of = plan.queue.all().to_vec();
    Process { role: Role::Worker, of, words, env: plan.env.clone(), drain }
}

fn compiler(plan: &CompilerPlan) -> Process {
    let mut words: Vec<String> = ["index", "compile"].map(str::to_owned).into();
    words.extend(plan.pause.map(|pause| format!("--pause={}", duration::format(pause))));
    words.extend(plan.parallel.map(|parallel| format!("--parallel={parallel}")));
    words.push("--".to_owned());
    words.extend(plan.index.all().iter().cloned());
    let of = plan.index.all().to_vec();
    Process { role: Role::Compiler, of, words, env: BTreeMap::new(), drain: USUAL_DRAIN }
}

/// What is to be done so that what should run does.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Changes {
    /// Which of those that run are to be stopped, by their places.
    pub stop: Vec<usize>,
    /// What is to be started.
    pub start: Vec<Process>,
}

/// Compares what runs with what should. Of several alike, the first ones stay.
pub fn compare(running: &[&Process], wanted: &[Process]) -> Changes {
    let mut left: Vec<Option<&Process>> = wanted.iter().map(Some).collect();
    let mut changes = Changes::default();
    for (n, process) in running.iter().enumerate() {
        match left.iter_mut().find(|wanted| wanted.is_some_and(|wanted| wanted == *process)) {
            Some(found) => *found = None,
            None => changes.stop.push(n),
        }
    }
    changes.start = left.into_iter().flatten().cloned().collect();
    changes
}

/// What each of a node's processes may take of a limit for all of them, the supervisor being one:
/// the supervisor's share first, then everybody else's.
pub fn share(limit: u32, processes: u32) -> (u32, u32) {
    let each = limit / processes.saturating_add(1);
    (limit.saturating_sub(each.saturating_mul(processes)).max(1), each.max(1))
}

/// The first pause before a process that ended is started again; it doubles.
const FIRST: Duration = Duration::from_millis(500);
/// The longest.
const LONGEST: Duration = Duration::from_secs(60);
/// After this long what was before does not count any more.
const STABLE: Duration = Duration::from_secs(60);
/// This many ends…
const LOOP: usize = 5;
/// … within this time are a crash loop.
const WITHIN: Duration = Duration::from_secs(600);

/// How often a process has ended that should not have.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Restarts {
    /// All of them.
    pub count: u64,
    in_a_row: u32,
    /// When the last ones were, counted from anywhere.
    recent: VecDeque<Duration>,
    looping: bool,
}

impl Restarts {
    /// The process has ended after running for so long: how long to wait before it is started again.
    /// `now` counts from anywhere, `random` is 64 random bits.
    pub fn ended(&mut self, ran: Duration, now: Duration, random: u64) -> Duration {
        self.running(ran);
        self.count += 1;
        self.recent.push_back(now);
        while self.recent.len() > LOOP {
            self.recent.pop_front();
        }
        let first = self.recent.front().copied().unwrap_or(now);
        self.looping |= self.recent.len() == LOOP && now.saturating_sub(first) <= WITHIN;
        let longest = FIRST.saturating_mul(2u32.saturating_pow(self.in_a_row)).min(LONGEST);
        self.in_a_row = self.in_a_row.saturating_add(1);
        // At least half of it: a fleet that fails together must not come back together, and none of
        // it at once.
        longest / 2 + full_jitter(0, longest / 2, longest / 2, random)
    }

    /// The process has been running for so long.
    pub fn running(&mut self, ran: Duration) {
        if ran >= STABLE {
            self.in_a_row = 0;
            self.looping = false;
            self.recent.clear();
        }
    }

    /// Whether it ends again and again.
    pub fn is_loop(&self) -> bool {
        self.looping
    }
}

/// How many lines of a process are passed on at once, after a rest…
const LINES: u32 = 1000;
/// … and how many in a second.
const LINES_PER_SECOND: u32 = 20;

/// How much a process may say: a command that says the same all day must not fill a disk with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Flow {
    /// Lines that may be passed on, and since when.
    left: u32,
    since: Duration,
    dropped: u64,
}

impl Default for Flow {
    fn default() -> Self {
        Self { left: LINES, since: Duration::ZERO, dropped: 0 }
    }
}

impl Flow {
    /// A line came; `now` counts from anywhere. `None` if it is dropped, else how many were before it.
    pub fn line(&mut self, now: Duration) -> Option<u64> {
        let seconds = u32::try_from(now.saturating_sub(self.since).as_secs()).unwrap_or(u32::MAX);
        if seconds > 0 {
            self.left =
                self.left.saturating_add(seconds.saturating_mul(LINES_PER_SECOND)).min(LINES);
            self.since = now;
        }
        match self.left.checked_sub(1) {
            Some(left) => {
                self.left = left;
                Some(self.dropped())
            }
            None => {
                self.dropped += 1;
                None
            }
        }
    }

    /// How many lines were dropped since this was last told.
    pub fn dropped(&mut self) -> u64 {
        std::mem::take(&mut self.dropped)
    }
}

/// How a node is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// It reports.
    Alive,
    /// It has not reported for a while.
    Stalled,
    /// It has not for so long that it will not, or its supervisor is known to be dead.
    Gone,
    /// It said goodbye.
    Stopped,
}

impl Standing {
    /// Its word.
    pub fn word(self) -> &'static str {
        match self {
            Self::Alive => "alive",
            Self::Stalled => "stalled",
            Self::Gone => "gone",
            Self::Stopped => "stopped",
        }
    }
}

/// How long after its last report a node's name is anybody's, in reports missed.
pub const MISSED: u32 = 3;
const MISSED_FOR_GOOD: u32 = 10;

/// How a node is doing whose record is so old, by the store's clock, and which reports this often.
pub fn standing(age: Duration, every: Duration) -> Standing {
    match () {
        () if age >= every.saturating_mul(MISSED_FOR_GOOD) => Standing::Gone,
        () if age >= every.saturating_mul(MISSED) => Standing::Stalled,
        () => Standing::Alive,
    }
}

/// Whether a clock that is so many milliseconds ahead of the store's is off. The store tells whole
/// seconds, and the way to it takes time.
pub fn is_clock_off(ahead: i64) -> bool {
    ahead.unsigned_abs() >= 10_000
}

/// How often a node reports and reads its plan, where the plan does not say: within a minute.
pub const EVERY: Duration = Duration::from_secs(50);

/// The pause until the next report: the interval and 5 to 15 percent of it, so that a fleet does not
/// report all at once, and a day of 5 minutes each has no more than 275 reports.
pub fn pause(every: Duration, random: u64) -> Duration {
    let part = every / 20;
    every + part + full_jitter(0, part * 2, part * 2, random)
}

#[cfg(test)]
mod tests;
