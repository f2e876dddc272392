//! Is a history linearizable? Is there a moment within each operation at which it could have
//! happened, all at once, so that every answer is right?
//!
//! Events are gone through in time. What is kept is every *configuration* in which the object could
//! be: its state, which of the operations under way have happened already, and which open ones still
//! may. When an operation returns it must have happened, so each configuration is continued by all
//! orders of operations under way that end with it (Wing and Gong, with Lowe's memory of what was
//! seen). Who only looks happens as soon as it can. Where nobody is at work only states are left, so
//! memory does not grow with the history.
//!
//! Open operations (no answer, or a process that was killed) stay possible for ever. What keeps them
//! from doubling the work each:
//! - one that can have no effect any more is forgotten ([`Model::is_spent`]), and one that would change
//!   nothing is not tried;
//! - of those that are alike, only the first is tried ([`Model::alike`]);
//! - a configuration with fewer of them left than another, and otherwise equal, can do nothing that
//!   the other cannot.

use std::collections::{BTreeSet, HashSet};
use std::fmt::Debug;
use std::hash::Hash;

/// What an object is supposed to do.
pub trait Model {
    /// What it remembers.
    type State: Clone + Eq + Hash + Debug;
    /// An operation and what it was told; for an open one, what it may have done.
    type Op: Debug;

    /// How it begins.
    fn start(&self) -> Self::State;

    /// The states that the operation, with this answer, can lead to. None: it cannot happen here.
    fn step(&self, state: &Self::State, op: &Self::Op) -> Vec<Self::State>;

    /// Whether an open operation can never have an effect from this state on.
    fn is_spent(&self, state: &Self::State, op: &Self::Op) -> bool;

    /// Whether two open operations do the same, whichever happens first.
    fn alike(&self, one: &Self::Op, other: &Self::Op) -> bool;
}

/// An operation in time.
#[derive(Debug, Clone)]
pub struct Timed<O> {
    /// When it began.
    pub begin: u64,
    /// When it returned; `None` if it is open.
    pub end: Option<u64>,
    /// Who did it, for messages.
    pub by: String,
    /// What.
    pub op: O,
}

/// How a search came out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// There is an order.
    Linearizable,
    /// There is none. Says which answer cannot be, and what the object could have been.
    Broken(String),
    /// Too many orders to try all of them.
    Undecided(String),
}

/// How many configurations are looked at for one answer at most.
const MOST: usize = 400_000;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Configuration<S> {
    state: S,
    /// Operations under way that have happened.
    happened: BTreeSet<usize>,
    /// Open operations that may still happen.
    left: BTreeSet<usize>,
}

/// Looks for an order.
pub fn search<M: Model>(model: &M, history: &[Timed<M::Op>]) -> Outcome {
    let mut events: Vec<(u64, bool, usize)> = Vec::with_capacity(history.len() * 2);
    for (at, timed) in history.iter().enumerate() {
        // What begins at the very moment at which something else returns overlaps it.
        events.push((timed.begin, false, at));
        if let Some(end) = timed.end {
            events.push((end, true, at));
        }
    }
    events.sort_unstable();
    let mut search = Search { model, history, under_way: BTreeSet::new() };
    let start =
        Configuration { state: model.start(), happened: BTreeSet::new(), left: BTreeSet::new() };
    let mut configurations = vec![start];
    for (_, returns, at) in events {
        if returns {
            let next = match search.returned(&configurations, at) {
                Ok(next) => next,
                Err(()) => return Outcome::Undecided(search.story(&configurations, at)),
            };
            if next.is_empty() {
                return Outcome::Broken(search.story(&configurations, at));
            }
            search.under_way.remove(&at);
            configurations = next;
        } else if history[at].end.is_some() {
            search.under_way.insert(at);
            for configuration in &mut configurations {
                search.look(configuration, at);
            }
        } else {
            for configuration in &mut configurations {
                if !model.is_spent(&configuration.state, &history[at].op) {
                    configuration.left.insert(at);
                }
            }
        }
    }
    Outcome::Linearizable
}

struct Search<'a, M: Model> {
    model: &'a M,
    history: &'a [Timed<M::Op>],
    under_way: BTreeSet<usize>,
}

impl<M: Model> Search<'_, M> {
    /// All configurations in which `at` has happened.
    fn returned(
        &self,
        configurations: &[Configuration<M::State>],
        at: usize,
    ) -> Result<Vec<Configuration<M::State>>, ()> {
        let mut results: Vec<Configuration<M::State>> = Vec::new();
        let mut seen: HashSet<Configuration<M::State>> = HashSet::new();
        let mut stack: Vec<Configuration<M::State>> = Vec::new();
        for configuration in configurations {
            if configuration.happened.contains(&at) {
                let mut kept = configuration.clone();
                kept.happened.remove(&at);
                keep_best(&mut results, kept);
            } else if seen.insert(configuration.clone()) {
                stack.push(configuration.clone());
            }
        }
        while let Some(configuration) = stack.pop() {
            if seen.len() > MOST {
                return Err(());
            }
            for candidate in self.candidates(&configuration) {
                for state in self.model.step(&configuration.state, &self.history[candidate].op) {
                    // An open operation that changes nothing might as well not have happened.
                    let open = configuration.left.contains(&candidate);
                    if open && state == configuration.state {
                        continue;
                    }
                    let mut next = Configuration {
                        happened: configuration.happened.clone(),
                        left: configuration.left.clone(),
                        state,
                    };
                    if open {
                        next.left.remove(&candidate);
                    } else {
                        next.happened.insert(candidate);
                    }
                    let possible =
                        |op: &usize| !self.model.is_spent(&next.state, &self.history[*op].op);
                    next.left.retain(possible);
                    for other in self.under_way.difference(&next.happened.clone()) {
                        self.look(&mut next, *other);
                    }
                    if next.happened.remove(&at) {
                        keep_best(&mut results, next);
                    } else if seen.insert(next.clone()) {
                        stack.push(next);
                    }
                }
            }
        }
        Ok(results)
    }

    /// An operation under way that changes nothing, and can happen now, happens now: whatever comes
    /// later can come just as well.
    fn look(&self, configuration: &mut Configuration<M::State>, at: usize) {
        let next = self.model.step(&configuration.state, &self.history[at].op);
        if let [state] = &next[..]
            && *state == configuration.state
        {
            configuration.happened.insert(at);
        }
    }

    /// What may happen next: anything under way, and of open ones that are alike the first.
    fn candidates(&self, configuration: &Configuration<M::State>) -> Vec<usize> {
        let mut candidates: Vec<usize> =
            self.under_way.difference(&configuration.happened).copied().collect();
        let mut open: Vec<usize> = Vec::new();
        for at in &configuration.left {
            let op = &self.history[*at].op;
            if !open.iter().any(|other| self.model.alike(&self.history[*other].op, op)) {
                open.push(*at);
            }
        }
        candidates.append(&mut open);
        candidates
    }

    fn story(&self, configurations: &[Configuration<M::State>], at: usize) -> String {
        let timed = &self.history[at];
        let mut states: Vec<String> = Vec::new();
        for configuration in configurations {
            let state = format!("{:?}", configuration.state);
            if !states.contains(&state) && states.len() < 4 {
                states.push(state);
            }
        }
        let others: Vec<String> = self
            .under_way
            .iter()
            .filter(|other| **other != at)
            .map(|other| {
                format!("{} by {}", show(&self.history[*other].op), self.history[*other].by)
            })
            .collect();
        format!(
            "{} by {}, from {} to {}, cannot be: the object was {}{}",
            show(&timed.op),
            timed.by,
            timed.begin,
            timed.end.unwrap_or_default(),
            states.join(" or "),
            match others.is_empty() {
                true => String::new(),
                false => format!("; at the same time: {}", others.join(", ")),
            }
        )
    }
}

fn show(op: &impl Debug) -> String {
    format!("{op:?}")
}

/// Adds a configuration unless another can do all that it can; takes out those that it outdoes.
fn keep_best<S: Eq>(all: &mut Vec<Configuration<S>>, new: Configuration<S>) {
    let same = |one: &Configuration<S>| one.state == new.state && one.happened == new.happened;
    if all.iter().any(|one| same(one) && one.left.is_superset(&new.left)) {
        return;
    }
    all.retain(|one| !(same(one) && one.left.is_subset(&new.left)));
    all.push(new);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::torture::check::lock::{Lock, Op as LockOp};
    use crate::commands::torture::check::register::{Op, Register};
    use crate::commands::torture::log::Value;
    use crate::commands::torture::plan::Dice;

    /// The definition itself: tries every order. Open operations may be left out.
    fn by_definition<M: Model>(model: &M, history: &[Timed<M::Op>]) -> bool {
        fn go<M: Model>(
            model: &M,
            history: &[Timed<M::Op>],
            state: &M::State,
            done: &mut Vec<bool>,
        ) -> bool {
            let missing = |at: usize| !done[at] && history[at].end.is_some();
            // Whoever comes next must not have begun after another one of these returned.
            let before = (0..history.len()).filter(|at| missing(*at));
            let Some(limit) = before.filter_map(|at| history[at].end).min() else { return true };
            for at in 0..history.len() {
                if done[at] || history[at].begin > limit {
                    continue;
                }
                for next in model.step(state, &history[at].op) {
                    done[at] = true;
                    if go(model, history, &next, done) {
                        return true;
                    }
                    done[at] = false;
                }
            }
            false
        }
        go(model, history, &model.start(), &mut vec![false; history.len()])
    }

    fn times(dice: &mut Dice) -> (u64, Option<u64>) {
        let begin = dice.below(30);
        let end = (!dice.permille(250)).then(|| begin + 1 + dice.below(12));
        (begin, end)
    }

    fn agree<M: Model>(model: &M, histories: Vec<Vec<Timed<M::Op>>>) {
        let (mut good, mut bad) = (0, 0);
        for history in histories {
            let expected = by_definition(model, &history);
            let found = search(model, &history);
            assert_eq!(found == Outcome::Linearizable, expected, "{found:?}: {history:#?}");
            assert!(!matches!(found, Outcome::Undecided(_)));
            if expected { good += 1 } else { bad += 1 }
        }
        assert!(good > 500 && bad > 500, "{good} good, {bad} bad: too easy");
    }

    #[test]
    fn the_search_agrees_with_the_definition_on_registers() {
        let value = |n: u64, by: u64| (n > 0).then(|| Value { n, by: by.to_string(), token: 0 });
        let mut dice = Dice::new(1, &[]);
        let history = |dice: &mut Dice| {
            let mut history = Vec::new();
            for at in 0..2 + dice.below(6) {
                let (begin, end) = times(dice);
                // Few values, so that they meet; each is written once.
                let n = dice.below(3);
                let from = value(n, if n == 0 { 0 } else { dice.below(at + 1) });
                let to = Value { n: n + 1, by: at.to_string(), token: 0 };
                let op = match (dice.below(4), end) {
                    (_, None) => Op::Open(from, to),
                    (0, _) => Op::Read(from),
                    (1, _) => Op::Refused(from),
                    _ => Op::Swapped(from, to),
                };
                history.push(Timed { begin, end, by: at.to_string(), op });
            }
            history
        };
        agree(&Register, (0..20_000).map(|_| history(&mut dice)).collect());
    }

    #[test]
    fn the_search_agrees_with_the_definition_on_locks() {
        let mut dice = Dice::new(2, &[]);
        let history = |dice: &mut Dice| {
            let mut history: Vec<Timed<LockOp>> = Vec::new();
            let mut token = 0;
            for _ in 0..1 + dice.below(3) {
                let (begin, end) = times(dice);
                token += 1 + dice.below(2);
                let Some(end) = end else {
                    let (by, op) = (token.to_string(), LockOp::OpenAcquire);
                    history.push(Timed { begin, end: None, by, op });
                    continue;
                };
                let mut add = |begin: u64, end: Option<u64>, op: LockOp| {
                    history.push(Timed { begin, end, by: token.to_string(), op });
                };
                add(begin, Some(end), LockOp::Acquired(token));
                // What its holder does comes after it, in turn.
                let mut at = end + dice.below(8);
                if dice.permille(600) {
                    add(at, Some(at + 1), LockOp::Checked(token));
                    at += 1 + dice.below(8);
                }
                match dice.below(4) {
                    0 => add(at, Some(at + 3), LockOp::Released(token)),
                    1 => add(at, Some(at + 3), LockOp::LostOnRelease(token)),
                    2 => add(at, None, LockOp::OpenRelease(token)),
                    _ => {}
                }
            }
            let (begin, end) = times(dice);
            if end.is_some() {
                history.push(Timed { begin, end, by: "other".into(), op: LockOp::Held });
            }
            history
        };
        agree(&Lock, (0..20_000).map(|_| history(&mut dice)).collect());
    }
}
