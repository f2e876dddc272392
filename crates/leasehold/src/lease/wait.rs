//! Waiting for somebody else's lease.

use std::time::Duration;

use leasehold_protocol::backoff::full_jitter;
use leasehold_protocol::key::Key;

use super::HeldBy;
use crate::Store;
use crate::env::BootTime;
use crate::store::{Kind, Watch};

/// What is waited for.
#[derive(Debug, Clone)]
pub(crate) enum Awaited {
    /// The lease at this key.
    One(Key),
    /// One of those whose keys begin with this.
    AnyOf(String),
}

/// Decides when to look again: with growing pauses and full jitter, so that many who wait do not
/// come at once; and as soon as something changes, where the store tells.
#[derive(Debug)]
pub(crate) struct Waiting {
    awaited: Awaited,
    since: BootTime,
    deadline: Option<BootTime>,
    attempt: u32,
    base: Duration,
    cap: Duration,
    /// Made once it has taken longer than most locks are held.
    watch: Option<Watch>,
}

/// For how long a lock in a directory is looked at again and again, before it is watched: most are
/// held for less than that.
const HASTY: Duration = Duration::from_millis(30);

/// The longest pause until then, for who has just come or has just let go of the lock.
const BRIEF: Duration = Duration::from_micros(600);

/// After how long of waiting a pause is as short as it gets. Who has waited longest looks most
/// often and gets the lock first, most likely; the others leave the machine to whoever holds it.
const AGED: Duration = Duration::from_millis(1);

/// After how long of glancing to look whether its holder is alive.
const GLANCING: Duration = Duration::from_millis(2);

/// The longest pause in a directory that is watched. A holder that dies changes nothing there.
const WATCHED: Duration = Duration::from_millis(10);

/// The same where changes are not told.
const UNWATCHED: Duration = Duration::from_millis(5);

/// For how long who has seen others hold a lock leaves it to them after its own turns.
pub(super) const LATELY: Duration = Duration::from_millis(10);

/// For how long it may take the lock again and again before that: a few times, where little is done
/// under it. Handing it over each time would take longer than the work.
pub(super) const TURN: Duration = Duration::from_millis(1);

/// Sleeps for at most this long, on this very thread: a runtime's timers are too coarse for what a
/// lock in a directory takes.
fn sleep_up_to(store: &Store, most: Duration) {
    let part = store.env().random() as f64 / u64::MAX as f64;
    store.env().clock().nap(most.mul_f64(part));
}

/// Leaves a lock that others wait for to them, for a moment.
pub(super) fn give_way(store: &Store) {
    sleep_up_to(store, BRIEF);
}

impl Waiting {
    /// For at most `patience`, or for ever. On a bucket, where a look is a paid request, pauses
    /// begin at `base`; in a directory it takes microseconds, and a waiter comes back soon.
    pub fn new(
        store: &Store,
        awaited: Awaited,
        patience: Option<Duration>,
        base: Duration,
    ) -> Self {
        let since = store.env().clock().boot();
        let (base, cap) = match store.kind() {
            Kind::Directory | Kind::Memory => (Duration::from_micros(60), UNWATCHED),
            Kind::S3 | Kind::Gcs | Kind::Azure => (base, base.saturating_mul(50)),
        };
        let deadline = patience.map(|patience| since.plus(patience));
        Self { awaited, since, deadline, attempt: 0, base, cap, watch: None }
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
        // It may be stale by then, which is as good as a release.
        let left = left.min(held.left.max(Duration::from_millis(1)));
        if store.kind() == Kind::Directory {
            // Not if the holder is of this process: it may need this very thread to go on.
            if now.since(self.since) < HASTY && !held.is_us {
                self.glance(store, left);
                // Others on this runtime have their turn, too.
                tokio::task::yield_now().await;
                return true;
            }
            if self.watch.is_none() {
                let prefix = match &self.awaited {
                    Awaited::One(key) => key.as_str(),
                    Awaited::AnyOf(prefix) => prefix,
                };
                self.watch = Some(store.watch(prefix).unwrap_or_else(|_| Watch::never()));
                // What changed before it was watched is seen by looking once more.
                return true;
            }
        }
        let cap = match &self.watch {
            Some(watch) if watch.is_live() => WATCHED,
            _ => self.cap,
        };
        let pause = full_jitter(self.attempt, self.base, cap, store.env().random()).min(left);
        self.attempt = self.attempt.saturating_add(1);
        match &mut self.watch {
            Some(watch) => tokio::select! {
                biased;
                () = clock.sleep(pause) => {}
                // Everybody who waits is woken at once, and one will get it: not all at once.
                () = watch.changed() => give_way(store),
            },
            None => clock.sleep(pause).await,
        }
        true
    }

    /// Returns when the lock file seems to be gone, or after a few milliseconds. A glance takes a
    /// twentieth of a look: in a crowd, looks would leave little to whoever holds the lock.
    fn glance(&self, store: &Store, left: Duration) {
        let start = store.env().clock().boot();
        let mut now = start;
        while now.since(start) < GLANCING.min(left) {
            let youth =
                AGED.saturating_sub(now.since(self.since)).as_secs_f64() / AGED.as_secs_f64();
            sleep_up_to(store, BRIEF.mul_f64(youth.max(0.1)));
            match &self.awaited {
                Awaited::One(key) if store.backend().seems_there(key) => {}
                _ => return,
            }
            now = store.env().clock().boot();
        }
    }
}
