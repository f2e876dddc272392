//! Waiting for somebody else's lease.

use std::time::Duration;

use leasehold_protocol::backoff::full_jitter;

use super::HeldBy;
use crate::Store;
use crate::env::BootTime;
use crate::store::{Kind, Watch};

/// Decides when to look again: with growing pauses and full jitter, so that many who wait do not
/// come at once; and as soon as something changes, where the store tells.
#[derive(Debug)]
pub(crate) struct Waiting {
    deadline: Option<BootTime>,
    attempt: u32,
    base: Duration,
    cap: Duration,
    /// What the keys of the lease, or leases, begin with.
    prefix: String,
    /// Made once it has taken longer than most locks are held.
    watch: Option<Watch>,
}

/// How often to look at a lock in a directory before watching it.
const PATIENT: u32 = 100;

/// The longest pause until then.
const BRIEF: Duration = Duration::from_micros(600);

/// The longest pause in a directory that is watched. A holder that dies changes nothing there.
const WATCHED: Duration = Duration::from_millis(20);

/// The same where changes are not told.
const UNWATCHED: Duration = Duration::from_millis(5);

/// Leaves a lock that others wait for to them, for a moment.
pub(super) fn give_way(store: &Store) {
    let part = store.env().random() as f64 / u64::MAX as f64;
    std::thread::sleep(BRIEF.mul_f64(part));
}

impl Waiting {
    /// For at most `patience`, or for ever, for leases whose keys begin with `prefix`. On a bucket,
    /// where a look is a paid request, pauses begin at `base`; in a directory it takes
    /// microseconds, and a waiter comes back soon.
    pub fn new(store: &Store, prefix: &str, patience: Option<Duration>, base: Duration) -> Self {
        let now = store.env().clock().boot();
        let (base, cap) = match store.kind() {
            Kind::Directory | Kind::Memory => (Duration::from_micros(60), UNWATCHED),
            Kind::S3 | Kind::Gcs | Kind::Azure => (base, base.saturating_mul(50)),
        };
        let deadline = patience.map(|patience| now.plus(patience));
        Self { deadline, attempt: 0, base, cap, prefix: prefix.to_owned(), watch: None }
    }

    /// Waits for the next look, or says that there is no time for one.
    pub async fn pause(&mut self, store: &Store, held: &HeldBy) -> bool {
        let clock = store.env().clock();
        let now = clock.boot();
        let left = match self.deadline {
            Some(deadline) if deadline <= now => return false,
            Some(deadline) => deadline.since(now),
            None => Duration::MAX,
        };
        let in_directory = store.kind() == Kind::Directory;
        let brief = in_directory && self.attempt < PATIENT;
        if in_directory && !brief && self.watch.is_none() {
            self.watch = Some(store.watch(&self.prefix).unwrap_or_else(|_| Watch::never()));
            // What changed before it was watched is seen by looking once more.
            return true;
        }
        let cap = match &self.watch {
            // Who has not waited long comes back soon: most locks are held for less than that.
            _ if brief => BRIEF,
            Some(watch) if watch.is_live() => WATCHED,
            _ => self.cap,
        };
        let pause = full_jitter(self.attempt, self.base, cap, store.env().random());
        self.attempt = self.attempt.saturating_add(1);
        // It may be stale by then, which is as good as a release.
        let pause = pause.min(left).min(held.left.max(Duration::from_millis(1)));
        match &mut self.watch {
            Some(watch) => tokio::select! {
                () = clock.sleep(pause) => {}
                // Everybody who waits is woken at once, and one will get it: not all at once.
                () = watch.changed() => give_way(store),
            },
            // A runtime's timers are too coarse for what a lock in a directory takes.
            None if in_directory && pause < Duration::from_millis(1) => std::thread::sleep(pause),
            None => clock.sleep(pause).await,
        }
        true
    }
}
