//! What becomes of a task.
//!
//! ```text
//!   push ──▶ free ──claim──▶ held ──ack──▶ completed      (receipt, then task, then lease goes)
//!             ▲               │ │
//!             │      drain    │ └─fail, or once too often──▶ failed   (dead letter, then the same)
//!             └───────────────┤
//!             retrying ◀──nack┘   the lease stays, released, with `not_before` and what went wrong
//!                 └── due ──▶ held      a holder that vanished: taken over, counted as a crash
//! ```
//!
//! The commit points are single conditional writes: the receipt's creation completes a task, the
//! dead letter's gives it up, and whoever meets a task beside its receipt or dead letter finishes
//! the clean-up. Work is deleted before its lease: a missing lease means that the task was never
//! claimed, or is gone too (FIELD.md row 7).

mod discover;

use std::time::Duration;

use serde_json::Value;

use crate::backoff::full_jitter;
use crate::format::lease::Lease;
use crate::format::queue::QueueSettings;
use crate::format::task::{DeadLetter, Failure, Receipt, Replaced, Task};
use crate::lease::{Judgement, SLACK, Seen, Why};
use crate::time::StoreTime;

pub use discover::{Standing, order};

/// How many of a task's errors are kept, and how much of each.
const ERRORS: usize = 10;
const ERROR_BYTES: usize = 2000;

/// How many receipts a receipt names whose place it took: each is of a push within [`SLACK`] of its own.
const REPLACED: usize = 16;

/// What a task has been through: kept in its lease.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct History {
    /// Which push of the task this is about; empty where the claimer did not know it yet.
    pub incarnation: String,
    /// How often it failed.
    pub failures: u32,
    /// How often whoever ran it vanished.
    pub crashes: u32,
    /// When it may be tried again.
    pub not_before: Option<StoreTime>,
    /// The last of what went wrong.
    pub errors: Vec<Failure>,
    /// Which tasks of a bundle are done.
    pub done: Done,
    /// Since when the lease was held that told it. Not written.
    pub since: Option<StoreTime>,
}

const INCARNATION: &str = "incarnation";
const FAILURES: &str = "failures";
const CRASHES: &str = "crashes";
const NOT_BEFORE: &str = "not_before";
const ERRORS_FIELD: &str = "errors";
const DONE: &str = "done";

impl History {
    /// What the lease tells. What cannot be read counts as nothing.
    pub fn of(lease: &Lease) -> Self {
        let field = |name: &str| lease.other.get(name);
        let count = |name: &str| {
            let count = field(name).and_then(Value::as_u64).unwrap_or(0);
            u32::try_from(count).unwrap_or(u32::MAX)
        };
        let text = |name: &str| field(name).and_then(Value::as_str);
        let errors = field(ERRORS_FIELD).cloned().unwrap_or_default();
        Self {
            incarnation: text(INCARNATION).unwrap_or_default().to_owned(),
            failures: count(FAILURES),
            crashes: count(CRASHES),
            not_before: text(NOT_BEFORE).and_then(|text| text.parse().ok()),
            errors: serde_json::from_value(errors).unwrap_or_default(),
            done: text(DONE).map(Done::parse).unwrap_or_default(),
            since: lease.acquired_at,
        }
    }

    /// Writes it into the lease.
    pub fn write(&self, lease: &mut Lease) {
        let mut set = |name: &str, value: Value| match value {
            Value::Null => drop(lease.other.remove(name)),
            value => drop(lease.other.insert(name.to_owned(), value)),
        };
        let some = |there: bool, value: Value| if there { value } else { Value::Null };
        let incarnation = self.incarnation.clone();
        set(INCARNATION, some(!self.incarnation.is_empty(), incarnation.into()));
        set(FAILURES, some(self.failures > 0, self.failures.into()));
        set(CRASHES, some(self.crashes > 0, self.crashes.into()));
        set(NOT_BEFORE, self.not_before.map_or(Value::Null, |at| at.to_string().into()));
        let errors = serde_json::to_value(&self.errors).unwrap_or_default();
        set(ERRORS_FIELD, some(!self.errors.is_empty(), errors));
        set(DONE, some(!self.done.is_empty(), self.done.to_string().into()));
        // To clients that only know times it is free again when it is due.
        if let Some(not_before) = self.not_before {
            lease.expires_at = Some(not_before);
        }
    }

    /// Adds what went wrong to what is kept of that.
    pub fn note(&mut self, failure: Failure) {
        let mut failure = failure;
        if failure.error.len() > ERROR_BYTES {
            let mut end = ERROR_BYTES;
            while !failure.error.is_char_boundary(end) {
                end -= 1;
            }
            failure.error.truncate(end);
            failure.error.push('…');
        }
        self.errors.push(failure);
        let surplus = self.errors.len().saturating_sub(ERRORS);
        self.errors.drain(..surplus);
    }

    /// How often the task was started before, a drain aside.
    pub fn tries(&self) -> u32 {
        self.failures.saturating_add(self.crashes)
    }

    /// What it is worth for this push of the task: a history of another says nothing. Whoever
    /// claimed the task before it was pushed had another.
    #[must_use]
    pub fn about(self, incarnation: &str, pushed_at: Option<StoreTime>) -> Self {
        let same = match self.incarnation.is_empty() {
            // Both are told in whole seconds by some stores.
            true => {
                self.since.zip(pushed_at).is_none_or(|(since, pushed)| since.plus(SLACK) >= pushed)
            }
            false => self.incarnation == incarnation,
        };
        match same {
            true => Self { incarnation: incarnation.to_owned(), ..self },
            false => Self { incarnation: incarnation.to_owned(), ..Self::default() },
        }
    }
}

/// What can be done about a task that has a lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Claim {
    /// Take it over in this version, with this history.
    Take(History),
    /// Somebody has it, and cannot have lost it sooner than this.
    Held(Duration),
    /// It failed, and is to be tried again no sooner than this.
    Later(StoreTime),
}

/// What can be done about a task with this lease, which was judged so.
///
/// A holder that vanished counts as a crash of the task: a task that kills its workers must not
/// come back for ever. One that let go of it does not.
pub fn claim(seen: &Seen, judgement: &Judgement) -> Claim {
    let lease = seen.record.as_ref().ok();
    let mut history = lease.map(History::of).unwrap_or_default();
    match judgement {
        Judgement::Held { left } => Claim::Held(*left),
        Judgement::Free(Why::Released) => match history.not_before {
            Some(at) if at > seen.now => Claim::Later(at),
            _ => Claim::Take(History { not_before: None, ..history }),
        },
        Judgement::Free(why) => {
            history.crashes = history.crashes.saturating_add(1);
            history.not_before = None;
            let worker = lease.map_or_else(String::new, |lease| lease.holder.clone());
            let error = match why {
                Why::HolderGone => "the worker's process ended",
                Why::Rebooted => "the worker's machine was restarted",
                Why::Unreadable => "the lease was damaged",
                Why::Expired | Why::Released => "the worker stopped renewing its claim",
            };
            history.note(Failure { at: seen.now, worker, crash: true, error: error.to_owned() });
            Claim::Take(history)
        }
    }
}

/// Whether a task may be tried (again), or has to be given up.
pub fn may_run(history: &History, task: &Task, settings: &QueueSettings) -> bool {
    let most = task.max_attempts.unwrap_or(settings.max_attempts).max(1);
    history.failures < most && history.crashes < settings.max_crashes.max(1)
}

/// What to do with a task that failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AfterFailure {
    /// Release the lease with this history.
    Retry(History),
    /// Write a dead letter with this one.
    GiveUp(History),
}

/// A task failed: what now. `delay` is the caller's own wish; else pauses double, with jitter.
pub fn after_failure(
    history: &History,
    task: &Task,
    settings: &QueueSettings,
    failure: Failure,
    delay: Option<Duration>,
    random: u64,
) -> AfterFailure {
    let mut history = history.clone();
    let at = failure.at;
    history.note(failure);
    history.failures = history.failures.saturating_add(1);
    if !may_run(&history, task, settings) {
        return AfterFailure::GiveUp(history);
    }
    let pause = delay.unwrap_or_else(|| {
        // Half of it is certain: a task that fails at once must not be back at once.
        let (base, cap) = (settings.backoff / 2, settings.backoff_cap / 2);
        let certain = base.saturating_mul(2u32.saturating_pow(history.failures - 1)).min(cap);
        certain + full_jitter(history.failures - 1, base, cap, random)
    });
    history.not_before = Some(at.plus(pause));
    AfterFailure::Retry(history)
}

/// Whether a record about one push of a task gives way to one about another: only an older to a
/// younger, or a worker that was asleep for long would undo what came after it. Where the two are too
/// close for a store that tells whole seconds, ours counts.
pub fn gives_way(there: Option<StoreTime>, ours: Option<StoreTime>) -> bool {
    there.zip(ours).is_none_or(|(there, ours)| there <= ours.plus(SLACK))
}

/// Notes in our receipt which one it is about to take the place of, if that could take it back: where
/// the two are so close that each gives way to the other, both would be recorded again and again.
pub fn replace(ours: &mut Receipt, there: &Receipt) {
    if !gives_way(ours.pushed_at, there.pushed_at) {
        return;
    }
    let it = Replaced { incarnation: there.incarnation.clone(), nonce: there.nonce.clone() };
    for replaced in there.replaced.iter().chain(std::iter::once(&it)) {
        if !ours.replaced.contains(replaced) && ours.replaced.len() < REPLACED {
            ours.replaced.push(replaced.clone());
        }
    }
}

/// Whether a dead letter is out of date: its task was completed after all, in the very push that it is
/// about or in a later one. A retry writes the task and then removes the letter, so one whose process
/// died in between leaves a letter that must not be retried again once that push is completed.
pub fn is_outdated(letter: &DeadLetter, receipt: &Receipt) -> bool {
    let pushes = letter.task.pushed_at.zip(receipt.pushed_at);
    receipt.is_about(&letter.task.incarnation)
        || pushes.is_some_and(|(given_up, completed)| completed > given_up)
}

/// What a task's other records say about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Met {
    /// Nothing: it is still to be done.
    Open,
    /// It was completed or given up; what is left of it wants to be cleaned up.
    Over,
}

/// Whether a task in this incarnation is over, by the incarnations that its receipt and its dead
/// letter name.
pub fn met(incarnation: &str, receipt: Option<&str>, dead_letter: Option<&str>) -> Met {
    match [receipt, dead_letter].contains(&Some(incarnation)) {
        true => Met::Over,
        false => Met::Open,
    }
}

/// Which tasks of a bundle are done: ranges, as they come in order mostly.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Done(Vec<(u32, u32)>);

impl Done {
    /// Notes that this one is.
    pub fn insert(&mut self, n: u32) {
        if self.contains(n) {
            return;
        }
        let at = self.0.partition_point(|(first, _)| *first < n);
        self.0.insert(at, (n, n));
        let mut merged: Vec<(u32, u32)> = Vec::with_capacity(self.0.len());
        for (first, last) in self.0.drain(..) {
            match merged.last_mut() {
                Some((_, end)) if *end + 1 == first => *end = last,
                _ => merged.push((first, last)),
            }
        }
        self.0 = merged;
    }

    /// Whether this one is.
    pub fn contains(&self, n: u32) -> bool {
        self.0.iter().any(|(first, last)| (*first..=*last).contains(&n))
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// How many are.
    pub fn len(&self) -> u64 {
        self.0.iter().map(|(first, last)| u64::from(last - first) + 1).sum()
    }

    /// Reads `0-13,15`. What cannot be read is not done.
    pub fn parse(text: &str) -> Self {
        let mut done = Self::default();
        for range in text.split(',') {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let (Ok(first), Ok(last)) = (first.parse::<u32>(), last.parse::<u32>()) else {
                continue;
            };
            // In order and apart from each other, or it is not our work.
            if first <= last && last < u32::MAX && done.0.last().is_none_or(|(_, end)| *end < first)
            {
                done.0.push((first, last));
            }
        }
        done
    }
}

impl std::fmt::Display for Done {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (n, (first, last)) in self.0.iter().enumerate() {
            let comma = if n > 0 { "," } else { "" };
            match first == last {
                true => write!(f, "{comma}{first}")?,
                false => write!(f, "{comma}{first}-{last}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
