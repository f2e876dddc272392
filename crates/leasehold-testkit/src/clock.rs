//! Clocks for tests: hours off, or running as fast as nothing happens.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::future::BoxFuture;
use leasehold::StoreTime;
use leasehold::env::{BootTime, Clock, Entropy, Env};
use tokio::sync::oneshot;

/// A wall clock that is hours off.
#[derive(Debug)]
pub struct Off {
    /// How many it is ahead.
    pub hours: i64,
}

impl Clock for Off {
    fn wall(&self) -> StoreTime {
        let now = Env::system().clock().wall();
        StoreTime::from_micros(now.as_micros() + self.hours * 3_600_000_000)
    }

    fn boot(&self) -> BootTime {
        Env::system().clock().boot()
    }

    fn sleep(&self, span: Duration) -> BoxFuture<'static, ()> {
        Box::pin(tokio::time::sleep(span))
    }
}

/// The system's clocks, with a boot clock that can be set forward, as by a machine's sleep.
#[derive(Debug, Default)]
pub struct Asleep(Mutex<Duration>);

impl Asleep {
    /// The machine sleeps for so long.
    pub fn sleep_for(&self, span: Duration) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) += span;
    }
}

impl Clock for Asleep {
    fn wall(&self) -> StoreTime {
        Env::system().clock().wall()
    }

    fn boot(&self) -> BootTime {
        let slept = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Env::system().clock().boot().plus(slept)
    }

    fn sleep(&self, span: Duration) -> BoxFuture<'static, ()> {
        Env::system().clock().sleep(span)
    }
}

/// Randomness of the system's.
#[derive(Debug, Default)]
pub struct Chance;

impl Entropy for Chance {
    fn fill(&self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            let random = Env::system().random().to_le_bytes();
            chunk.copy_from_slice(&random[..chunk.len()]);
        }
    }
}

/// Randomness that a seed decides.
#[derive(Debug)]
pub struct Seeded(Mutex<u64>);

impl Seeded {
    /// That of this seed.
    pub fn new(seed: u64) -> Self {
        Self(Mutex::new(seed))
    }
}

impl Entropy for Seeded {
    fn fill(&self, bytes: &mut [u8]) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for chunk in bytes.chunks_mut(8) {
            // splitmix64
            *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = *state;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            chunk.copy_from_slice(&(z ^ (z >> 31)).to_le_bytes()[..chunk.len()]);
        }
    }
}

/// A clock that runs as fast as nothing happens: a day passes in a moment.
#[derive(Debug, Clone, Default)]
pub struct Fast(Arc<Mutex<Sleepers>>);

#[derive(Debug, Default)]
struct Sleepers {
    now: Duration,
    /// Who is woken when; the number tells those of one moment apart.
    waiting: BTreeMap<(Duration, u64), oneshot::Sender<()>>,
    count: u64,
}

impl Fast {
    /// This clock and the system's randomness.
    pub fn env(&self) -> Env {
        Env::new(Arc::new(self.clone()), Arc::new(Chance))
    }

    /// This clock and the randomness of a seed.
    pub fn seeded(&self, seed: u64) -> Env {
        Env::new(Arc::new(self.clone()), Arc::new(Seeded::new(seed)))
    }

    fn sleepers(&self) -> std::sync::MutexGuard<'_, Sleepers> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets time pass while this goes on: whenever everybody sleeps, the first one is woken.
    pub async fn pass<T>(&self, work: impl Future<Output = T>) -> T {
        let mut work = std::pin::pin!(work);
        loop {
            // All that can go on does. Nothing here waits for anything but this clock.
            for _ in 0..20 {
                tokio::select! {
                    biased;
                    done = &mut work => return done,
                    () = tokio::task::yield_now() => {}
                }
            }
            let mut sleepers = self.sleepers();
            if let Some(((at, _), wake)) = sleepers.waiting.pop_first() {
                sleepers.now = sleepers.now.max(at);
                let _ = wake.send(());
            }
        }
    }
}

impl Clock for Fast {
    fn wall(&self) -> StoreTime {
        let since = i64::try_from(self.sleepers().now.as_micros()).unwrap_or(i64::MAX / 2);
        StoreTime::from_micros(1_800_000_000_000_000 + since)
    }

    fn boot(&self) -> BootTime {
        BootTime::from_boot(Duration::from_secs(1000) + self.sleepers().now)
    }

    fn sleep(&self, span: Duration) -> BoxFuture<'static, ()> {
        let mut sleepers = self.sleepers();
        let (wake, woken) = oneshot::channel();
        sleepers.count += 1;
        let at = (sleepers.now + span, sleepers.count);
        sleepers.waiting.insert(at, wake);
        Box::pin(async move { drop(woken.await) })
    }
}
