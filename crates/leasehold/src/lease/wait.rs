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

/// The longest pause until then, the same for all: were it shorter for those who have just come,
/// or longer, they would get more than their share, or less.
const BRIEF: Duration = Duration::from_micros(400);

/// After how many glances to look whether its holder is alive.
const GLANCES: u32 = 8;

/// The longest pause in a directory that is watched. A holder that dies changes nothing there.
const WATCHED: Duration = Duration::from_millis(10);

/// The same where changes are not told.
const UNWATCHED: Duration = Duration::from_millis(5);

/// Sleeps for at most [`BRIEF`], on this very thread: a runtime's timers are too coarse for what a
/// lock in a directory takes.
fn sleep_briefly(store: &Store, most: Duration) {
    let part = store.env().random() as f64 / u64::MAX as f64;
    std::thread::sleep(BRIEF.mul_f64(part).min(most));
}

/// Leaves a lock that others wait for to them, for a moment.
pub(super) fn give_way(store: &Store) {
    sleep_briefly(store, BRIEF);
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
            if now.since(self.since) < HASTY {
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
                () = clock.sleep(pause) => {}
                // Everybody who waits is woken at once, and one will get it: not all at once.
                () = watch.changed() => give_way(store),
            },
            None => clock.sleep(pause).await,
        }
        true
    }

    /// Returns when it looks as if the lock had changed hands, or after a few milliseconds. A
    /// glance takes a tenth of a look, and leaves the rest to whoever holds the lock.
    fn glance(&self, store: &Store, left: Duration) {
        let Awaited::One(key) = &self.awaited else { return sleep_briefly(store, left) };
        let before = store.backend().glance(key);
        for _ in 0..GLANCES {
            sleep_briefly(store, left);
            if before.is_none() || store.backend().glance(key) != before {
                return;
            }
        }
    }
}
