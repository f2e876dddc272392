//! Who may hold a lease, until when, with which token.
//!
//! ```text
//!             acquire: PUT Absent                heartbeat: PUT Matches
//!   absent ───────────────────────────▶ held ◀──────────────┐
//!                                        │ └────────────────┘
//!        acquire: GET, judge, PUT Matches│      ▲
//!                                release │      │ take over: GET, judge stale, PUT Matches
//!                                        ▼      │
//!                                     released ─┘
//! ```
//!
//! Every arrow is one conditional write, so two who want the same arrow cannot both take it. There
//! is no delete-then-create: of two who see a stale lease, the second would delete the first one's
//! fresh one (FIELD.md row 2).
//!
//! **The time rule.** A holder trusts its lease until `sent + ttl − margin`, where `sent` is when it
//! *began* to send its last successful renewal, by its own clock that goes on during suspend. An
//! observer calls a lease stale when its age is at least its own ttl (plus [`SLACK`] where times are
//! whole seconds). The renewal landed after `sent`, so the holder stops before anyone may start.
//! Nobody's wall clock is compared with anybody else's.

use std::time::Duration;

use crate::cas::{Nonce, Version, When};
use crate::format::lease::{Ask, Lease, LeaseError, MAX_TOKEN, Place, State};
use crate::mutant::{self, Mutant};
use crate::time::StoreTime;

/// What is added to a ttl where the store tells whole seconds: its `Date` and its `Last-Modified`
/// may each be up to a second off.
pub const SLACK: Duration = Duration::from_secs(2);

/// How long before its ttl is over a holder stops trusting its lease.
pub fn margin(ttl: Duration) -> Duration {
    ttl / 10
}

/// A lease as it was found.
#[derive(Debug, Clone)]
pub struct Seen {
    /// The record, or why it is none.
    pub record: Result<Lease, LeaseError>,
    /// Its version: what a takeover matches.
    pub version: Version,
    /// When it was written, by the store's clock.
    pub modified: StoreTime,
    /// The store's time of the same response.
    pub now: StoreTime,
}

/// Whether a process is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Liveness {
    /// It is, or we may not look.
    Alive,
    /// It is gone, a zombie, or its number belongs to another by now.
    Gone,
}

/// Who looks at a lease, and what it knows.
#[derive(Debug, Clone)]
pub struct Observer<'a> {
    /// The ttl of leases that name none.
    pub ttl: Duration,
    /// For how long, by its own clock, it has seen this very version.
    pub watched: Duration,
    /// Where it runs, with its boot clock's time.
    pub here: Option<&'a Place>,
    /// Whether the store is a directory of this host, and so every holder a process of this host.
    pub store_is_here: bool,
    /// What became of the holder's process and its child, where both could be looked up: same boot,
    /// same process namespace.
    pub holder: Option<Liveness>,
}

/// What an observer makes of a lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Judgement {
    /// Somebody holds it. It cannot become stale sooner than this.
    Held {
        /// The time left if it is not renewed.
        left: Duration,
    },
    /// Nobody holds it: it can be taken in this version.
    Free(Why),
}

/// Why nobody holds a lease although there is a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    /// The holder let go.
    Released,
    /// It was not renewed for its ttl.
    Expired,
    /// The holder's process is gone.
    HolderGone,
    /// The host was booted since.
    Rebooted,
    /// The record is damaged, and has been for a ttl.
    Unreadable,
}

/// How long the lease lasts without a renewal: by its own word, else by the observer's.
fn ttl_of(lease: &Lease, observer: &Observer<'_>) -> Duration {
    let renewed = lease.heartbeat_at.or(lease.acquired_at);
    let own = match (lease.ttl, lease.expires_at, renewed) {
        (Some(ttl), _, _) => Some(ttl),
        // Two times of one writer can be compared with each other, whatever its clock says.
        (None, Some(expires), Some(renewed)) => Some(expires.since(renewed)),
        _ => None,
    };
    own.filter(|ttl| !ttl.is_zero()).unwrap_or(observer.ttl)
}

/// Whether somebody holds the lease.
pub fn judge(seen: &Seen, observer: &Observer<'_>) -> Judgement {
    let lease = match &seen.record {
        Ok(lease) => lease,
        Err(_) if mutant::is(Mutant::EmptyLockFile) => {
            return Judgement::Held { left: observer.ttl };
        }
        // An empty or broken record must not wedge the key, but its writer may be about to mend it.
        Err(_) => return by_age(seen, observer, observer.ttl, Why::Unreadable),
    };
    if lease.state == State::Released {
        return Judgement::Free(Why::Released);
    }
    let ttl = ttl_of(lease, observer);
    if let (Some(here), Some(there)) = (observer.here, &lease.place) {
        let same_boot = here.boot_id == there.boot_id;
        // Both must match, or "no such process" says nothing (FIELD.md row 27).
        let same_ns = here.pid_ns == there.pid_ns || mutant::is(Mutant::OtherPidNamespace);
        if same_boot && same_ns && observer.holder == Some(Liveness::Gone) {
            return Judgement::Free(Why::HolderGone);
        }
        // A time that is yet to come is of another clock: it proves nothing.
        if observer.store_is_here
            && same_boot
            && let Some(age) = here.boot_time.checked_sub(there.boot_time)
        {
            return match ttl.checked_sub(age).filter(|left| !left.is_zero()) {
                Some(left) => Judgement::Held { left },
                None => Judgement::Free(Why::Expired),
            };
        }
        // Names of hosts repeat in a fleet, but not within one directory.
        if observer.store_is_here && here.host == there.host && !same_boot {
            return Judgement::Free(Why::Rebooted);
        }
    }
    by_age(seen, observer, ttl, Why::Expired)
}

/// By the store's clock, where the store is not this host; else, and where it shows no clock, by
/// having watched the same version for that long.
///
/// In a directory, where this host's clock may have been set between a file's time and now
/// (FIELD.md row 12), the file's age counts only together with having watched for a while: whoever
/// is alive renews in that time.
fn by_age(seen: &Seen, observer: &Observer<'_>, ttl: Duration, why: Why) -> Judgement {
    let limit = ttl.saturating_add(SLACK);
    let left_by_age = limit.saturating_sub(seen.now.since(seen.modified));
    let left_by_watching = |span: Duration| span.saturating_sub(observer.watched);
    let left = match observer.store_is_here {
        true => left_by_watching(ttl).min(left_by_age.max(left_by_watching(ttl / 2))),
        false => left_by_watching(ttl).min(left_by_age),
    };
    match left.is_zero() {
        true => Judgement::Free(why),
        false => Judgement::Held { left },
    }
}

/// Who wants to hold a lease.
#[derive(Debug, Clone)]
pub struct Holder<'a> {
    /// Its name.
    pub name: &'a str,
    /// How long the lease is to last without a renewal.
    pub ttl: Duration,
    /// Where it runs.
    pub place: Option<&'a Place>,
}

/// A write to make: these bytes' record, in this state of the object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// The record.
    pub lease: Lease,
    /// When it applies.
    pub when: When,
}

/// The record with which `holder` takes a lease that nobody holds: absent (`seen` is `None`), or
/// [judged](judge) free.
///
/// The token is above the record's, above `floor` (what the store knows to have been given out at
/// this key), and at least the store's time in microseconds where there was no record.
pub fn acquire(
    seen: Option<&Seen>,
    holder: &Holder<'_>,
    now: StoreTime,
    floor: u64,
    nonce: Nonce,
) -> Change {
    let before = seen.and_then(|seen| seen.record.as_ref().ok());
    // A damaged record hides its token, which may be of this very second.
    let hidden = seen.is_some_and(|seen| seen.record.is_err());
    let from = if hidden { now.plus(SLACK) } else { now };
    let token = match before.and_then(|lease| lease.token) {
        Some(token) => token.max(floor).saturating_add(1),
        None => (from.as_micros().max(1) as u64).min(MAX_TOKEN / 2).max(floor.saturating_add(1)),
    };
    let lease = Lease {
        holder: holder.name.to_owned(),
        acquired_at: Some(now),
        heartbeat_at: Some(now),
        expires_at: Some(now.plus(holder.ttl)),
        ttl: Some(holder.ttl),
        token: Some(token),
        nonce: Some(nonce.to_string()),
        lease_id: Some(nonce.to_string()),
        state: State::Held,
        place: holder.place.cloned(),
        ask: None,
        // What others keep in the record outlives its holders.
        other: before.map(|lease| lease.other.clone()).unwrap_or_default(),
    };
    let when = match seen {
        Some(seen) => When::Matches(seen.version.clone()),
        None => When::Absent,
    };
    Change { lease, when }
}

/// The record of a renewal: the same holder and token, a new time and mark.
pub fn renew(held: &Lease, now: StoreTime, boot_time: Option<Duration>, nonce: Nonce) -> Lease {
    let mut lease = held.clone().marked(nonce);
    lease.heartbeat_at = Some(now);
    lease.expires_at = lease.ttl.map(|ttl| now.plus(ttl));
    if let (Some(place), Some(boot_time)) = (&mut lease.place, boot_time) {
        place.boot_time = boot_time;
    }
    lease
}

/// The record that a release leaves on a bucket. It looks expired to clients that only know times.
pub fn release(held: &Lease, now: StoreTime, nonce: Nonce) -> Lease {
    let mut lease = held.clone().marked(nonce);
    lease.state = State::Released;
    lease.expires_at = Some(now);
    lease.ask = None;
    lease
}

/// What a holder makes of what it finds after a renewal was refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refused {
    /// Still ours: somebody changed the record without taking it, to ask for it for example. Go on
    /// from this record and version (FIELD.md row 25).
    StillOurs(Box<Lease>, Version),
    /// Somebody else's, or gone.
    Lost,
}

/// Whether a lease that we hold by `held` is still ours, given what is there now.
pub fn after_refusal(held: &Lease, there: Option<&Seen>) -> Refused {
    match there.map(|seen| (&seen.record, &seen.version)) {
        Some((Ok(lease), version))
            if lease.state == State::Held
                && lease.holder == held.holder
                && lease.token == held.token
                && lease.lease_id == held.lease_id
                && !(mutant::is(Mutant::AskToDeath) && lease.ask.is_some()) =>
        {
            Refused::StillOurs(Box::new(lease.clone()), version.clone())
        }
        _ => Refused::Lost,
    }
}

/// What asking for a held lease amounts to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Asking {
    /// Write this.
    Write(Box<Change>),
    /// Somebody has asked already. A second request would only keep a dead lease fresh.
    Pending(Ask),
    /// Nobody holds it, or the record is damaged: there is nobody to ask.
    NobodyToAsk,
}

/// Asks the holder for its lease.
pub fn ask(seen: &Seen, by: &str, now: StoreTime, nonce: Nonce) -> Asking {
    match &seen.record {
        Ok(lease) if lease.state == State::Held => match &lease.ask {
            Some(pending) => Asking::Pending(pending.clone()),
            None => {
                let mut lease = lease.clone().marked(nonce);
                lease.ask = Some(Ask { by: by.to_owned(), at: now });
                let when = When::Matches(seen.version.clone());
                Asking::Write(Box::new(Change { lease, when }))
            }
        },
        _ => Asking::NobodyToAsk,
    }
}

#[cfg(test)]
mod tests;
