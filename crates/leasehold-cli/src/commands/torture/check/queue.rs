//! The queue: what was pushed comes to exactly one end.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::super::log::{Answer, Call, Observed};
use super::history::Op;
use super::{Property, is_of_bundle};

/// What happened to one task.
#[derive(Debug, Default)]
struct Task<'a> {
    acknowledged: bool,
    pushes: u32,
    retries: u32,
    incarnation: Option<&'a str>,
    /// Acks that were told to be the first: of which push, by whom, with which token.
    first: Vec<(&'a str, String, u64)>,
    /// Acks that were not answered: of which push, with which token.
    open: Vec<(&'a str, u64)>,
    receipts: Vec<(&'a str, u64)>,
    letters: Vec<&'a str>,
}

/// All that is said of the queue.
pub struct Checked {
    /// Nothing that was pushed is lost.
    pub kept: Property,
    /// Nothing is completed twice.
    pub once: Property,
    /// Nobody starts what it knows to be completed.
    pub seen: Property,
    /// Tasks that ended.
    pub completed: u64,
    /// And that were given up.
    pub given_up: u64,
    /// Claims of tasks that somebody else had completed before.
    pub late_starts: u64,
}

/// Checks it.
pub fn check(ops: &[Op<'_>], observed: &[&Observed]) -> Checked {
    let mut checked = Checked {
        kept: Property::new("every pushed task has one receipt or one dead letter"),
        once: Property::new("no task is completed twice"),
        seen: Property::new("nobody starts what it saw completed"),
        completed: 0,
        given_up: 0,
        late_starts: 0,
    };
    let tasks = gather(ops, observed);
    for (id, task) in &tasks {
        end_of(id, task, &mut checked);
        completion_of(id, task, &mut checked.once);
    }
    starts(ops, &mut checked);
    checked
}

fn gather<'a>(ops: &[Op<'a>], observed: &[&'a Observed]) -> BTreeMap<String, Task<'a>> {
    let mut tasks: BTreeMap<String, Task<'a>> = BTreeMap::new();
    for op in ops {
        match (op.call, op.answer) {
            (Call::Push { task }, answer) => {
                let task = tasks.entry(task.clone()).or_default();
                task.pushes += 1;
                if let Some(Answer::Pushed { incarnation, .. }) = answer {
                    task.acknowledged = true;
                    task.incarnation = incarnation.as_deref();
                }
            }
            (Call::PushBundle { .. }, Some(Answer::Pushed { tasks: names, .. })) => {
                for name in names {
                    let task = tasks.entry(name.clone()).or_default();
                    (task.acknowledged, task.pushes) = (true, 1);
                }
            }
            (Call::Retry { task }, _) => tasks.entry(task.clone()).or_default().retries += 1,
            (Call::Ack { task, token, push }, Some(Answer::First)) => {
                tasks.entry(task.clone()).or_default().first.push((push, op.by(), *token));
            }
            (Call::Ack { task, token, push }, None) => {
                tasks.entry(task.clone()).or_default().open.push((push, *token));
            }
            _ => {}
        }
    }
    for thing in observed {
        match thing {
            Observed::Receipt { id, incarnation, token, results: None } => {
                tasks.entry(id.clone()).or_default().receipts.push((incarnation, *token));
            }
            // Of a bundle: it stands for those of its tasks that did not leave it.
            Observed::Receipt { id, incarnation, token, results: Some(results) } => {
                let bundle = id.rsplit_once('-').map_or(id.as_str(), |(bundle, _)| bundle);
                for (n, _) in results.iter().enumerate().filter(|(_, done)| **done) {
                    let task = tasks.entry(format!("{bundle}.{n}")).or_default();
                    task.receipts.push((incarnation, *token));
                }
            }
            Observed::DeadLetter { id, incarnation } => {
                tasks.entry(id.clone()).or_default().letters.push(incarnation);
            }
            _ => {}
        }
    }
    tasks
}

fn end_of(id: &str, task: &Task<'_>, checked: &mut Checked) {
    let (receipts, letters) = (task.receipts.len(), task.letters.len());
    checked.completed += u64::from(receipts > 0);
    checked.given_up += u64::from(letters > 0 && receipts == 0);
    let kept = &mut checked.kept;
    if task.acknowledged {
        kept.checked += 1;
        match (receipts, letters) {
            (1, 0) | (0, 1) => {}
            // Given up, and pushed again by another who did not know: each of the two has its end.
            (1, 1) if task.pushes > 1 && task.receipts[0].0 != task.letters[0] => {}
            (0, 0) => kept.broken.push(format!("task {id} was pushed, and is lost")),
            _ => kept.broken.push(format!(
                "task {id} has {receipts} receipts {:?} and {letters} dead letters {:?}",
                task.receipts, task.letters
            )),
        }
    } else if task.pushes == 0 && task.retries == 0 && !is_of_bundle(id) {
        kept.broken.push(format!("task {id} was never pushed, and yet there is a record of it"));
    }
    // Pushed once only, and never again: then what was done is that very push.
    let ends = task.receipts.iter().map(|(incarnation, _)| *incarnation);
    let end = ends.chain(task.letters.iter().copied()).next();
    if let (true, Some(pushed), Some(end)) =
        (task.pushes == 1 && task.retries == 0, task.incarnation, end)
        && pushed != end
    {
        kept.broken.push(format!("task {id} was pushed as {pushed}, its record is about {end}"));
    }
}

/// Tasks of bundles are left out: their acks are recorded with the bundle's receipt, later.
fn completion_of(id: &str, task: &Task<'_>, once: &mut Property) {
    if is_of_bundle(id) {
        return;
    }
    once.checked += task.first.len() as u64;
    let mut firsts = task.first.clone();
    firsts.sort();
    for pair in firsts.windows(2).filter(|pair| pair[0].0 == pair[1].0) {
        once.broken.push(format!("task {id} was completed by {} and by {}", pair[0].1, pair[1].1));
    }
    match task.receipts.first() {
        None => {
            if let Some((_, by, _)) = task.first.first() {
                let what = "and there is no receipt";
                once.broken.push(format!("task {id} was completed by {by}, {what}"));
            }
        }
        Some((push, recorded)) => {
            let first = task.first.iter().find(|(of, ..)| of == push);
            match first {
                Some((_, by, token)) if token != recorded => once.broken.push(format!(
                    "task {id} was completed by {by} with token {token}, the receipt says {recorded}"
                )),
                None if !task.open.contains(&(*push, *recorded)) => once.broken.push(format!(
                    "task {id} has a receipt with token {recorded}, which nobody wrote"
                )),
                _ => {}
            }
        }
    }
}

fn starts(ops: &[Op<'_>], checked: &mut Checked) {
    // When this life learned that the push is completed; and when the first of all did. Another push of
    // the same task is another matter: it may have been on its way when this one was completed.
    let mut seen: HashMap<(&str, &str), u64> = HashMap::new();
    let mut completed: HashMap<&str, u64> = HashMap::new();
    for op in ops {
        if let (Call::Ack { task, push, .. }, Some(Answer::First | Answer::Again), Some(end)) =
            (op.call, op.answer, op.end)
            && !is_of_bundle(task)
        {
            seen.entry((op.life, push)).and_modify(|at| *at = (*at).min(end)).or_insert(end);
            completed.entry(push).and_modify(|at| *at = (*at).min(end)).or_insert(end);
        }
    }
    let mut late = BTreeSet::new();
    for op in ops {
        let Some(Answer::Claimed { task, push, .. }) = op.answer else { continue };
        checked.seen.checked += 1;
        if let Some(at) = seen.get(&(op.life, push.as_str())).filter(|at| **at < op.begin) {
            checked.seen.broken.push(format!(
                "{} claimed task {task} at {}, which it knew to be completed since {at}",
                op.by(),
                op.begin
            ));
        } else if completed.get(push.as_str()).is_some_and(|at| *at < op.begin) {
            late.insert(task);
        }
    }
    checked.late_starts = late.len() as u64;
}
