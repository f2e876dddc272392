//! Locks, and the claims of tasks, which are leases too.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::super::log::{Answer, Call};
use super::history::Op;
use super::lock::{Lock, Op as LockOp};
use super::search::{Outcome, Timed, search};
use super::{Property, is_of_bundle};

/// What is known of one tenure.
#[derive(Debug, Clone)]
struct Tenure {
    token: u64,
    by: String,
    begin: u64,
    end: u64,
    /// When the last question "is it still mine?" that was answered with yes began.
    trusted: u64,
    released: bool,
}

/// All that is said of the locks and of the claims.
pub struct Checked {
    /// Each lock is linearizable.
    pub linearizable: Property,
    /// Each claim is.
    pub claims: Property,
    /// Nobody was told that it holds what somebody else had taken.
    pub exclusive: Property,
    /// Later tokens are higher.
    pub rising: Property,
    /// How often a lock or a task was taken from whoever did not release it.
    pub takeovers: u64,
}

/// Checks them.
pub fn check(ops: &[Op<'_>]) -> Checked {
    let mut checked = Checked {
        linearizable: Property::new("each lock is linearizable"),
        claims: Property::new("each task's claim is linearizable"),
        exclusive: Property::new("one holder at a time, by token"),
        rising: Property::new("tokens strictly rise"),
        takeovers: 0,
    };
    let tasks = claims(ops);
    for (of, by_key) in [("lock", by_lock(ops)), ("task", tasks)] {
        for (key, history) in by_key {
            let name = format!("{of} {key}");
            let property = match of {
                "lock" => &mut checked.linearizable,
                _ => &mut checked.claims,
            };
            property.checked += history.len() as u64;
            match search(&Lock, &history) {
                Outcome::Linearizable => {}
                Outcome::Broken(story) => property.broken.push(format!("{name}: {story}")),
                Outcome::Undecided(story) => property.undecided.push(format!("{name}: {story}")),
            }
            let tenures = tenures(&history);
            exclusive(&name, &tenures, &mut checked.exclusive);
            rising(&name, &tenures, &mut checked.rising);
            let followed = tenures.len().saturating_sub(1);
            let abandoned = tenures.iter().take(followed).filter(|tenure| !tenure.released);
            checked.takeovers += abandoned.count() as u64;
        }
    }
    checked
}

type Histories = BTreeMap<String, Vec<Timed<LockOp>>>;

fn by_lock(ops: &[Op<'_>]) -> Histories {
    let mut locks = Histories::new();
    for op in ops {
        let (lock, what) = match (op.call, op.answer) {
            (Call::Acquire { lock }, Some(Answer::Acquired { token })) => {
                (lock, LockOp::Acquired(*token))
            }
            (Call::Acquire { lock }, Some(Answer::Held)) => (lock, LockOp::Held),
            (Call::Acquire { lock }, None) => (lock, LockOp::OpenAcquire),
            (Call::Check { lock, token }, Some(Answer::Done)) => (lock, LockOp::Checked(*token)),
            (Call::Release { lock, token }, Some(Answer::Done)) => (lock, LockOp::Released(*token)),
            (Call::Release { lock, token }, Some(_)) => (lock, LockOp::LostOnRelease(*token)),
            (Call::Release { lock, token }, None) => (lock, LockOp::OpenRelease(*token)),
            _ => continue,
        };
        locks.entry(lock.clone()).or_default().push(op.timed(what));
    }
    locks
}

/// Claims of tasks that have a lease of their own, and always the same: not those of bundles, and not
/// those that were given up and pushed again, which begin with a new lease.
fn claims(ops: &[Op<'_>]) -> Histories {
    let mut tasks = Histories::new();
    let retried: BTreeSet<&str> = ops
        .iter()
        .filter_map(|op| match op.call {
            Call::Retry { task } => Some(task.as_str()),
            _ => None,
        })
        .collect();
    let rounds = rounds(ops);
    for op in ops {
        let (task, token, what): (_, _, fn(u64) -> LockOp) = match (op.call, op.answer) {
            (Call::Claim, Some(Answer::Claimed { task, token, .. })) => {
                (task, token, LockOp::Acquired)
            }
            (Call::Working { task, token }, Some(Answer::Done)) => (task, token, LockOp::Checked),
            (Call::Nack { task, token }, Some(Answer::Done)) => (task, token, LockOp::Released),
            (
                Call::Ack { task, token, .. }
                | Call::Nack { task, token }
                | Call::Fail { task, token },
                answer,
            ) => match answer {
                Some(_) => (task, token, LockOp::LostOnRelease),
                None => (task, token, LockOp::OpenRelease),
            },
            _ => continue,
        };
        if !is_of_bundle(task) && !retried.contains(task.as_str()) {
            let round = rounds.get(&(op.life, task.as_str(), *token)).copied().unwrap_or(0);
            let what = what(token + round * ROUND);
            tasks.entry(task.clone()).or_default().push(op.timed(what));
        }
    }
    tasks
}

/// More than any token.
const ROUND: u64 = 1 << 56;

/// How often the claimed task had come to an end by the time of the claim's answer, by whose claim it is: it was
/// acked or given up, perhaps without an answer. Its lease goes with that. Where another push of its name,
/// or a request that was under way for long, brings it back, who claims it begins with a new lease, and
/// comes after all that were before; on a bucket its token may be lower within the second.
fn rounds<'a>(ops: &[Op<'a>]) -> HashMap<(&'a str, &'a str, u64), u64> {
    let mut ended: HashMap<&str, Vec<u64>> = HashMap::new();
    for op in ops {
        let task = match (op.call, op.answer) {
            (Call::Ack { task, .. } | Call::Fail { task, .. }, _) => task,
            // A nack of the last attempt gives it up.
            (Call::Nack { task, .. }, None | Some(Answer::GivenUp)) => task,
            _ => continue,
        };
        ended.entry(task).or_default().push(op.end.unwrap_or(op.begin));
    }
    let mut rounds = HashMap::new();
    for op in ops {
        if let (Some(Answer::Claimed { task, token, .. }), Some(at)) = (op.answer, op.end) {
            let before = ended.get(task.as_str()).into_iter().flatten();
            let round = before.filter(|end| **end < at).count() as u64;
            rounds.insert((op.life, task.as_str(), *token), round);
        }
    }
    rounds
}

/// By token.
fn tenures(history: &[Timed<LockOp>]) -> Vec<Tenure> {
    let mut tenures: Vec<Tenure> = Vec::new();
    for timed in history {
        if let (LockOp::Acquired(token), Some(end)) = (&timed.op, timed.end) {
            tenures.push(Tenure {
                token: *token,
                by: timed.by.clone(),
                begin: timed.begin,
                end,
                trusted: 0,
                released: false,
            });
        }
    }
    tenures.sort_by_key(|tenure| (tenure.token, tenure.end));
    for timed in history {
        let (token, trusted, released) = match &timed.op {
            LockOp::Checked(token) => (*token, timed.begin, false),
            LockOp::Released(token) => (*token, timed.begin, true),
            LockOp::LostOnRelease(token) if timed.end.is_some() => (*token, 0, true),
            _ => continue,
        };
        let at = tenures.partition_point(|tenure| tenure.token < token);
        if let Some(tenure) = tenures.get_mut(at).filter(|tenure| tenure.token == token) {
            tenure.trusted = tenure.trusted.max(trusted);
            tenure.released |= released;
        }
    }
    tenures
}

fn exclusive(name: &str, tenures: &[Tenure], property: &mut Property) {
    property.checked += tenures.len() as u64;
    // The earliest end of an acquisition with a higher token than the one that is looked at.
    let mut earliest: Option<&Tenure> = None;
    for tenure in tenures.iter().rev() {
        if let Some(later) = earliest.filter(|later| later.end < tenure.trusted) {
            property.broken.push(format!(
                "{name}: {} was told at {} that it holds it with token {}, but {} had taken it with \
                 token {} by {}",
                tenure.by, tenure.trusted, tenure.token, later.by, later.token, later.end
            ));
        }
        if earliest.is_none_or(|later| tenure.end < later.end) {
            earliest = Some(tenure);
        }
    }
}

fn rising(name: &str, tenures: &[Tenure], property: &mut Property) {
    property.checked += tenures.len() as u64;
    let second = |tenure: &Tenure| tenure.token % ROUND / 1_000_000;
    for pair in tenures.windows(2) {
        // Also from one round to the next.
        if second(&pair[0]) > second(&pair[1]) {
            property.broken.push(format!(
                "{name}: {} got token {}, and {} the lower {} after it had ended",
                pair[0].by,
                pair[0].token % ROUND,
                pair[1].by,
                pair[1].token % ROUND
            ));
        }
        if pair[0].token == pair[1].token {
            property.broken.push(format!(
                "{name}: {} and {} have the same token {}",
                pair[0].by, pair[1].by, pair[0].token
            ));
        }
    }
    // From the highest token down: nobody with a higher one may have ended before we began.
    let mut earliest: Option<&Tenure> = None;
    for tenure in tenures.iter().rev() {
        if let Some(higher) = earliest.filter(|higher| higher.end < tenure.begin) {
            property.broken.push(format!(
                "{name}: {} got token {} at {}, and {} got the lower {} after that",
                higher.by, higher.token, higher.end, tenure.by, tenure.token
            ));
        }
        if earliest.is_none_or(|higher| tenure.end < higher.end) {
            earliest = Some(tenure);
        }
    }
}
