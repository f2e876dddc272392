//! Waiting for somebody else's lease.

use std::time::Duration;

use leasehold_protocol::backoff::full_jitter;

use super::HeldBy;
use crate::Store;
use crate::env::BootTime;
use crate::store::Kind;

/// Decides when to look again: with growing pauses and full jitter, so that many who wait do not
/// come at once.
#[derive(Debug)]
pub(crate) struct Waiting {
    deadline: Option<BootTime>,
    attempt: u32,
    base: Duration,
    cap: Duration,
}

/// How often to look at a lock in a directory before coming back less often.
const PATIENT: u32 = 100;

/// The longest pause until then.
const BRIEF: Duration = Duration::from_micros(600);

/// Leaves a lock that others wait for to them, for a moment.
pub(super) fn give_way(store: &Store) {
    let part = store.env().random() as f64 / u64::MAX as f64;
    std::thread::sleep(BRIEF.mul_f64(part));
}

impl Waiting {
    /// For at most `patience`, or for ever. On a bucket, where a look is a paid request, pauses
    /// begin at `base`; in a directory it takes microseconds, and a waiter comes back soon.
    pub fn new(store: &Store, patience: Option<Duration>, base: Duration) -> Self {
        let now = store.env().clock().boot();
        let (base, cap) = match store.kind() {
            Kind::Directory | Kind::Memory => (Duration::from_micros(60), Duration::from_millis(5)),
            Kind::S3 | Kind::Gcs | Kind::Azure => (base, base.saturating_mul(50)),
        };
        Self { deadline: patience.map(|patience| now.plus(patience)), attempt: 0, base, cap }
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
        let cap = match store.kind() {
            // Who has not waited long comes back soon: most locks are held for less than that.
            Kind::Directory if self.attempt < PATIENT => BRIEF,
            _ => self.cap,
        };
        let pause = full_jitter(self.attempt, self.base, cap, store.env().random());
        self.attempt = self.attempt.saturating_add(1);
        // It may be stale by then, which is as good as a release.
        let pause = pause.min(left).min(held.left.max(Duration::from_millis(1)));
        match pause < Duration::from_millis(1) && store.kind() == Kind::Directory {
            // A runtime's timers are too coarse for what a lock in a directory takes.
            true => std::thread::sleep(pause),
            false => clock.sleep(pause).await,
        }
        true
    }
}
