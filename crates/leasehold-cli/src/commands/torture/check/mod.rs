//! Is what the processes were told possible?
//!
//! Pure: logs in, a report out. Each property has a history among the tests that it must refuse.

mod history;
mod index;
mod lock;
mod locks;
mod queue;
mod register;
mod registers;
mod search;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use leasehold::store::meter::Usage;
use serde::{Deserialize, Serialize};

pub use history::Life;

use super::log::{Deed, Observed, Said};

/// Something that must hold.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Property {
    /// What.
    pub name: String,
    /// On how many answers, tenures, tasks or shards it was tried.
    pub checked: u64,
    /// Where it does not hold.
    pub broken: Vec<String>,
    /// Where nobody knows.
    pub undecided: Vec<String>,
}

impl Property {
    fn new(name: &str) -> Self {
        Self { name: name.to_owned(), checked: 0, broken: Vec::new(), undecided: Vec::new() }
    }

    /// Whether it does.
    pub fn holds(&self) -> bool {
        self.broken.is_empty() && self.undecided.is_empty()
    }
}

/// What the logs say.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// What must hold.
    pub properties: Vec<Property>,
    /// Operations of all processes.
    pub operations: u64,
    /// Those that were never answered.
    pub open: u64,
    /// Processes that were started.
    pub lives: u64,
    /// How often one was killed.
    pub kills: u64,
    /// How often one was stopped for a while.
    pub pauses: u64,
    /// Faults of the store, by kind.
    pub faults: BTreeMap<String, u64>,
    /// Locks and tasks that were taken from whoever did not release them.
    pub takeovers: u64,
    /// Tasks that were completed.
    pub completed: u64,
    /// Tasks that were given up.
    pub given_up: u64,
    /// Tasks that were started again after another worker had completed them: allowed, and rare.
    pub late_starts: u64,
    /// Requests of all processes, as far as those that were killed told.
    pub usage: Usage,
}

impl Report {
    /// Whether everything holds.
    pub fn holds(&self) -> bool {
        self.properties.iter().all(Property::holds)
    }
}

/// Checks the logs of all lives.
pub fn check(lives: &[Life]) -> Report {
    let ops = history::operations(lives);
    let observed: Vec<&Observed> = lives
        .iter()
        .flat_map(|life| &life.lines)
        .filter_map(|line| match &line.said {
            Said::Observed(observed) => Some(observed),
            _ => None,
        })
        .collect();
    let locks = locks::check(&ops);
    let [registers, fenced] = registers::check(&ops);
    let queue = queue::check(&ops, &observed);
    let mut report = Report {
        properties: vec![
            locks.linearizable,
            locks.claims,
            locks.exclusive,
            locks.rising,
            registers,
            fenced,
            queue.kept,
            queue.once,
            queue.seen,
            index::check(&ops),
            index::check_digests(&observed),
            recovered(&observed),
            explained(lives),
        ],
        operations: ops.len() as u64,
        open: ops.iter().filter(|op| op.answer.is_none()).count() as u64,
        lives: 0,
        kills: 0,
        pauses: 0,
        faults: BTreeMap::new(),
        takeovers: locks.takeovers,
        completed: queue.completed,
        given_up: queue.given_up,
        late_starts: queue.late_starts,
        usage: Usage::default(),
    };
    count(lives, &mut report);
    report
}

/// Once the faults stop, everything goes on.
fn recovered(observed: &[&Observed]) -> Property {
    let mut property = Property::new("once the faults stop, everything comes to its end");
    for thing in observed {
        property.checked += 1;
        match thing {
            Observed::Left { key } => property.broken.push(format!("{key} was left behind")),
            Observed::Stuck { what } => property.broken.push(what.clone()),
            _ => {}
        }
    }
    property
}

/// Processes end because they are told to, and errors come from faults.
fn explained(lives: &[Life]) -> Property {
    let mut property = Property::new("nothing happened that no fault explains");
    for life in lives {
        property.checked += 1;
        for line in &life.lines {
            match &line.said {
                Said::Odd(what) => property.broken.push(format!("{}: {what}", life.name)),
                Said::Deed(Deed::Ended { player, life, code }) if *code != Some(0) => {
                    property.broken.push(format!("player {player}.{life} ended with {code:?}"));
                }
                _ => {}
            }
        }
    }
    property
}

fn count(lives: &[Life], report: &mut Report) {
    for life in lives {
        let mut tally = None;
        for line in &life.lines {
            match &line.said {
                Said::Deed(Deed::Start { .. }) => report.lives += 1,
                Said::Deed(Deed::Kill { .. }) => report.kills += 1,
                Said::Deed(Deed::Pause { .. }) => report.pauses += 1,
                Said::Tally { usage, faults } => tally = Some((usage, faults)),
                _ => {}
            }
        }
        // The last one counts: each is about the life so far.
        if let Some((usage, faults)) = tally {
            report.usage = report.usage.plus(usage);
            for (kind, count) in faults {
                *report.faults.entry(kind.clone()).or_default() += count;
            }
        }
    }
}

/// Whether a task is of a bundle: then it has no lease of its own.
fn is_of_bundle(task: &str) -> bool {
    // Ours are named `t-…`; those of bundles by the library, which begins with a number.
    task.starts_with(|c: char| c.is_ascii_digit())
}
