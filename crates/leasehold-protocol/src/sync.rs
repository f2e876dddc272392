//! What a node's replica tells the bucket, and what it takes from it.
//!
//! ```text
//!   worker ── claims, acks ──▶ replica ── outbox ──▶ up:   the same conditional writes as strict mode
//!                                 ▲                        (receipt, dead letter, task, lease)
//!                                 └──────────────── down:  new work; leases of others; receipts, where
//!                                                          work is missing
//! ```
//!
//! **Up** goes by the outbox alone: nothing in the replica reaches the bucket, and nothing there is
//! deleted, because something is or is not *here* (FIELD.md row 14). A receipt wins over everything:
//! work that has one is never told of as open (row 15).
//!
//! **Down** infers nothing from absence. Work that is missing in the bucket is removed here only on
//! the strength of a receipt or a dead letter of the same push; what has neither is set aside, neither
//! run nor deleted.
//!
//! **Who wins** where two nodes have the same task: the first receipt, else the first lease to reach
//! the bucket.

use crate::cas::Version;
use crate::format::lease::{Lease, State};
use crate::format::outbox::{Entry, Intent, Writer};
use crate::lease::{Judgement, Seen};
use crate::mutant::{self, Mutant};
use crate::queue::{Claim, History, claim};
use serde_json::Value;

/// What the replica shows of a lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LocalLease {
    /// There is none.
    None,
    /// A worker of this node has it.
    Held,
    /// A worker of this node had it and let go.
    Released(History),
    /// A worker of this node had it and is gone.
    Dead,
    /// It stands for one of another node's.
    Foreign,
}

/// What the replica shows of a task or bundle. Records are named by their incarnations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Local {
    /// The work, if it waits or is being done.
    pub work: Option<String>,
    /// The same that waits for its time.
    pub scheduled: Option<String>,
    /// Its lease.
    pub lease: LocalLease,
    /// Its receipt.
    pub receipt: Option<String>,
    /// Its dead letter.
    pub letter: Option<String>,
}

/// What the bucket is to be told of a task or bundle, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Tale {
    /// How it ended.
    pub end: Option<End>,
    /// That it is to be done.
    pub push: bool,
    /// Who does it.
    pub lease: Option<TellLease>,
}

/// How a task ended here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// It has a receipt.
    Done,
    /// It has a dead letter.
    Dead,
}

/// What to tell of a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TellLease {
    /// A worker of this node has it.
    Hold,
    /// Nobody of this node has it any more; what went wrong stands in it.
    Release,
}

/// What the bucket is to be told, by an entry and by what the replica shows.
pub fn tell(entry: &Entry, local: &Local) -> Tale {
    // A record of another push may have been told of long ago, and have given way there since.
    let names = |record: &String| {
        *record == entry.incarnation
            || entry.earlier.contains(record)
            || entry.writers.iter().any(|writer| writer.incarnation == *record)
    };
    let is_about = |record: &Option<String>| match (record, &local.work) {
        (None, _) => false,
        // One that was damaged names nothing.
        (Some(record), None) => entry.nonce.is_empty() || names(record),
        (Some(record), Some(work)) => record == work || *record == entry.incarnation,
    };
    let end = match (is_about(&local.receipt), is_about(&local.letter)) {
        (true, _) => Some(End::Done),
        (false, true) => Some(End::Dead),
        (false, false) => None,
    };
    // Receipts and dead letters win: what has one is not open any more, whatever stands beside it.
    let over =
        |work: &String| local.receipt.as_ref() == Some(work) || local.letter.as_ref() == Some(work);
    let open = local.work.as_ref().is_some_and(|work| !over(work));
    // What waits for its time is open also where an earlier push of its name came to an end.
    let waits = local.scheduled.as_ref().is_some_and(|work| !over(work));
    if mutant::is(Mutant::Resurrection) {
        return Tale { end, push: true, lease: Some(TellLease::Hold) };
    }
    let lease = match &local.lease {
        _ if !open => None,
        LocalLease::Held => Some(TellLease::Hold),
        LocalLease::Released(history) => {
            let tells = entry.told.is_some() || history.tries() > 0 || !history.done.is_empty();
            tells.then_some(TellLease::Release)
        }
        // A crash is counted by whoever takes the task over, here or there.
        LocalLease::Dead | LocalLease::Foreign | LocalLease::None => None,
    };
    Tale { end, push: (open || waits) && entry.untold, lease }
}

/// Whether the bucket is to be told first that an earlier push was given up: there it may be pending
/// still, and in the way of the one that came after it.
pub fn owes_letter(entry: &Entry, local: &Local) -> bool {
    local.letter.as_ref().is_some_and(|letter| {
        entry.earlier.contains(letter)
            && local.receipt.as_ref() != Some(letter)
            && local.work.as_ref() != Some(letter)
    })
}

/// Whether the bucket is to be told first that an earlier push was done: its receipt is here, and another
/// push has its name by now.
pub fn owes_receipt(entry: &Entry, local: &Local) -> bool {
    let both = local.receipt.as_ref().zip(local.work.as_ref());
    both.is_some_and(|(receipt, work)| receipt != work && entry.earlier.contains(receipt))
}

/// Whether an entry can go once all that the replica showed was told.
///
/// What is noted is noted before it happens, so the replica may not show it yet. As long as whoever
/// noted it may be about to do it, the entry stays, or it would be done without one. `is_gone` says
/// whether a writer of the entry (by its place in the list) has ended.
pub fn is_settled(entry: &Entry, local: &Local, is_gone: impl Fn(usize) -> bool) -> bool {
    // One that is held will be told of again.
    if local.work.is_some() && local.lease == LocalLease::Held {
        return false;
    }
    let all = entry.writers.iter().enumerate();
    all.into_iter().all(|(n, writer)| shows(entry, local, writer) || is_gone(n))
}

/// Whether the replica shows that what was announced has happened.
fn shows(entry: &Entry, local: &Local, writer: &Writer) -> bool {
    match writer.intent {
        // As earlier versions noted it.
        Intent::Push if writer.incarnation.is_empty() => {
            let ended = local.receipt.is_some() || local.letter.is_some();
            ended || local.work.is_some() || local.scheduled.is_some()
        }
        // That very push: another of its name says nothing about what is to come.
        Intent::Push => {
            let Local { work, scheduled, receipt, letter, .. } = local;
            let shown = [work, scheduled, receipt, letter];
            shown.iter().any(|shown| shown.as_ref() == Some(&writer.incarnation))
        }
        Intent::Finish => {
            let about = |incarnation: &String| {
                [&local.receipt, &local.letter].contains(&&Some(incarnation.clone()))
            };
            // Of that very push, or of the one that the entry is about by now: that took its place, or will
            // not give way to it. A record of an earlier one says nothing about what is to come.
            about(&writer.incarnation) || about(&entry.incarnation)
        }
    }
}

/// Forgets who announced what has happened: from here on the replica may be changed by the sync
/// itself, and not show it any more.
pub fn forget_seen(entry: &mut Entry, local: &Local) {
    let seen: Vec<bool> = entry.writers.iter().map(|writer| shows(entry, local, writer)).collect();
    let mut seen = seen.into_iter();
    entry.writers.retain(|_| !seen.next().unwrap_or(false));
}

/// Sees to it that a push that is announced, and yet to come, will be told of: what was told was about
/// others of its name.
pub fn keep_announced(entry: &mut Entry, before: &Entry) {
    if entry.writers.iter().any(|writer| writer.intent == Intent::Push) {
        entry.untold |= before.untold;
        entry.chosen |= before.chosen;
        entry.scheduled = entry.scheduled.or(before.scheduled);
    }
}

/// Notes what was told in an entry that was changed meanwhile: `before` is what it was told from, and
/// `told` what became of that. Else a push would look as if the bucket had never heard of it, and be sent
/// again once it is over there (FIELD.md row 15).
pub fn note_told(now: &mut Entry, before: &Entry, told: &Entry) {
    let since = |writer: &Writer| !before.writers.contains(writer);
    let announced = now.writers.iter().any(|writer| writer.intent == Intent::Push && since(writer));
    if !told.untold && !announced {
        now.untold = false;
        now.scheduled = None;
    }
    now.writers.retain(|writer| since(writer) || told.writers.contains(writer));
    now.earlier.retain(|push| !before.earlier.contains(push) || told.earlier.contains(push));
    if now.incarnation == told.incarnation {
        now.origin = now.origin.take().or(told.origin.clone());
        now.withdrawn |= told.withdrawn;
    }
    (now.told, now.token) = (told.told.clone(), told.token);
}

/// The field of a lease in the bucket that names the replica it came from.
pub const REPLICA_FIELD: &str = "replica";
/// The field of a lease in a replica that stands for one of another node's.
pub const FOREIGN_FIELD: &str = "foreign";

/// Whether a lease in a replica stands for one of another node's.
pub fn is_foreign(lease: &Lease) -> bool {
    lease.other.get(FOREIGN_FIELD).and_then(Value::as_bool) == Some(true)
}

/// What to do about the bucket's lease of a task that a worker of this node has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Hold {
    /// Create it.
    Create,
    /// It is this replica's already: write it in this version.
    Renew(Version),
    /// It is nobody's: take it over in this version, with this history.
    TakeOver(Version, History),
    /// Somebody else has it, and was first.
    Lost,
}

/// What to do about the bucket's lease, given what is there and how it was judged.
///
/// The lease is the *replica's* there: which of its workers has the task is its own business.
pub fn hold(there: Option<(&Seen, &Judgement)>, replica: &str) -> Hold {
    let Some((seen, judgement)) = there else { return Hold::Create };
    let from =
        |lease: &Lease| lease.other.get(REPLICA_FIELD).and_then(Value::as_str) == Some(replica);
    if seen.record.as_ref().is_ok_and(from) {
        return Hold::Renew(seen.version.clone());
    }
    match claim(seen, judgement) {
        Claim::Take(history) => Hold::TakeOver(seen.version.clone(), history),
        // It failed elsewhere and waits to be tried again: it is being tried, here.
        Claim::Later(_) => {
            let history = seen.record.as_ref().map(History::of).unwrap_or_default();
            Hold::TakeOver(seen.version.clone(), history)
        }
        Claim::Held(_) => Hold::Lost,
    }
}

/// What two nodes know of one push of a task, together: what each counted, the other did not see.
#[must_use]
pub fn merge(ours: History, theirs: History) -> History {
    if theirs.incarnation != ours.incarnation && !theirs.incarnation.is_empty() {
        return ours;
    }
    let mut merged = ours;
    merged.failures = merged.failures.max(theirs.failures);
    merged.crashes = merged.crashes.max(theirs.crashes);
    if merged.errors.is_empty() {
        merged.errors = theirs.errors;
    }
    merged
}

/// What the bucket's listing shows of a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeaseThere {
    /// There is none.
    None,
    /// It was written within the queue's ttl: most likely somebody has the task.
    Young,
    /// It was not: most likely nobody does.
    Old,
}

/// What to do about a task that the bucket has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bring {
    /// Nothing: somebody else has it.
    Nothing,
    /// Fetch it: a GET.
    Fetch,
    /// Look into its lease: a GET. Then fetch it, or let go of it here.
    Look,
    /// See to it that nobody here takes it.
    Shut,
    /// See to it that somebody here may.
    Open,
    /// Delete it there. Nobody does this: it is the mistake of those who take a task that they do not
    /// have for one that was deleted.
    DeleteThere,
}

/// What to do about a task that the bucket's listing shows, in a version that the replica has or not.
pub fn bring(here: bool, lease: LeaseThere) -> Bring {
    if !here && mutant::is(Mutant::AbsentMeansDeleted) {
        return Bring::DeleteThere;
    }
    match (here, lease) {
        (false, LeaseThere::None) => Bring::Fetch,
        (false, LeaseThere::Young) => Bring::Nothing,
        (_, LeaseThere::Old) => Bring::Look,
        (true, LeaseThere::Young) => Bring::Shut,
        (true, LeaseThere::None) => Bring::Open,
    }
}

/// What the bucket says about a task that the replica has and the bucket's listing does not show.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Asked {
    /// The receipt's incarnation.
    pub receipt: Option<String>,
    /// The dead letter's.
    pub letter: Option<String>,
    /// The work's: it may have been written since, or have been passed over.
    pub work: Option<String>,
    /// Whether it waits for its time there.
    pub scheduled: bool,
}

/// What to do about a task that the bucket's listing does not show.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Missing {
    /// It was done elsewhere: remove it here.
    Done,
    /// It was given up elsewhere: remove it here.
    Dead,
    /// It is there after all.
    Stay,
    /// It is another push that is there: this one is over, and that comes down like any other.
    Replaced,
    /// Nobody knows anything of it, and somebody must have removed it, or its receipt is past its time:
    /// keep it, but do not run it.
    SetAside,
    /// Push it again. Nobody does this: it is the mistake by which finished tasks come back.
    PushAgain,
}

/// What to do about a task in this incarnation that is here and not in the bucket's listing.
pub fn missing(incarnation: &str, there: &Asked) -> Missing {
    if mutant::is(Mutant::Resurrection) {
        return Missing::PushAgain;
    }
    if there.receipt.as_deref() == Some(incarnation) {
        return Missing::Done;
    }
    if there.letter.as_deref() == Some(incarnation) {
        return Missing::Dead;
    }
    match &there.work {
        Some(work) if work == incarnation => Missing::Stay,
        Some(_) => Missing::Replaced,
        None if there.scheduled => Missing::Stay,
        None => Missing::SetAside,
    }
}

/// Whether a released lease says that the task waits to be tried again.
pub fn is_released(lease: &Lease) -> bool {
    lease.state == State::Released
}

#[cfg(test)]
mod tests;
