//! What all processes of a run know: names, times, and the seed.

use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use leasehold::lock::LockSettings;
use leasehold::queue::QueueSettings;
use leasehold::settings::duration_text;
use leasehold::store::Kind;
use leasehold::{Store, StoreSettings};
use serde::{Deserialize, Serialize};

/// The queue that all share.
pub const QUEUE: &str = "torture";
/// The index that all share.
pub const INDEX: &str = "torture";

/// How answers are spoilt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Faults {
    /// By an HTTP proxy between the processes and the store.
    Proxy,
    /// In each process, between the library and its backend.
    InProcess,
}

/// The plan of a run, in `plan.json`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Plan {
    /// What decides.
    pub seed: u64,
    /// How many play.
    pub processes: u32,
    /// Whose place it is, for messages.
    pub store: String,
    /// How answers are spoilt.
    pub faults: Faults,
    /// Whether the store is used without asking whether it is safe.
    pub anyway: bool,
    /// After how long without renewal a lock or claim is anybody's.
    #[serde(with = "duration_text")]
    pub ttl: Duration,
    /// How often they are renewed.
    #[serde(with = "duration_text")]
    pub heartbeat: Duration,
    /// When it began, in nanoseconds of the boot clock.
    pub begin: u64,
    /// When the faults end.
    pub end: u64,
    /// Whether they ended earlier than they were meant to.
    #[serde(default)]
    pub interrupted: bool,
}

impl Plan {
    /// What suits the kind of store: short, so that much happens, but no shorter than clocks allow.
    pub fn terms(kind: Kind) -> (Duration, Duration) {
        match kind.is_bucket() {
            true => (Duration::from_secs(4), Duration::from_secs(1)),
            false => (Duration::from_millis(1500), Duration::from_millis(300)),
        }
    }

    /// Longer than anybody waits for somebody who does not answer.
    pub fn too_long(&self) -> Duration {
        // On a bucket times have a resolution of a second.
        self.ttl + Duration::from_secs(3)
    }

    pub fn read(evidence: &Path) -> anyhow::Result<Self> {
        let path = evidence.join("plan.json");
        let bytes =
            std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        serde_json::from_slice(&bytes).with_context(|| format!("{} is no plan", path.display()))
    }

    pub fn write(&self, evidence: &Path) -> anyhow::Result<()> {
        Ok(std::fs::write(evidence.join("plan.json"), serde_json::to_vec_pretty(self)?)?)
    }

    pub fn lock_settings(&self) -> LockSettings {
        LockSettings {
            timeout: Duration::from_secs(2),
            heartbeat: self.heartbeat,
            ttl: self.ttl,
            attempts: u32::MAX,
            retry_delay: Duration::from_millis(50),
        }
    }

    pub fn queue_settings(&self) -> QueueSettings {
        QueueSettings {
            ttl: self.ttl,
            heartbeat: self.heartbeat,
            max_attempts: 4,
            // Who is killed all the time is not the task's fault.
            max_crashes: 1000,
            backoff: Duration::from_millis(50),
            backoff_cap: Duration::from_millis(500),
            ..QueueSettings::default()
        }
    }

    /// Impatient, so that what is not answered is over soon.
    pub fn store_settings(settings: StoreSettings) -> StoreSettings {
        StoreSettings {
            request_timeout: settings.request_timeout.min(Duration::from_secs(3)),
            attempts: 4,
            retry_base: Duration::from_millis(50),
            retry_cap: Duration::from_millis(500),
            ..settings
        }
    }

    /// The store as the processes use it.
    pub fn adapt(&self, store: Store) -> Store {
        match self.anyway {
            // It would not get a root record.
            true => store.without_root_record(),
            false => store,
        }
    }
}

/// Names of plain locks, of registers and of files under locks.
pub fn locks() -> [String; 3] {
    std::array::from_fn(|n| format!("lock-{n}"))
}

/// See [`locks`].
pub fn registers() -> [String; 3] {
    std::array::from_fn(|n| format!("registers/{n}.json"))
}

/// See [`locks`].
pub fn files() -> [String; 2] {
    std::array::from_fn(|n| format!("files/{n}.json"))
}

/// Keys of the index.
pub fn keys() -> [String; 40] {
    std::array::from_fn(|n| format!("key-{n:02}"))
}

/// Chance that a seed decides (SplitMix64).
#[derive(Debug, Clone)]
pub struct Dice(u64);

impl Dice {
    /// For whatever these numbers name.
    pub fn new(seed: u64, of: &[u64]) -> Self {
        let mut dice = Self(seed);
        for number in of {
            dice.0 ^= number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            dice.roll();
        }
        dice
    }

    /// Any number.
    pub fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// One below `n`.
    pub fn below(&mut self, n: u64) -> u64 {
        self.roll() % n.max(1)
    }

    /// True that many times of a thousand.
    pub fn permille(&mut self, n: u64) -> bool {
        self.below(1000) < n
    }

    /// One of these.
    pub fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.below(of.len() as u64) as usize]
    }

    /// A time between these, in milliseconds.
    pub fn millis(&mut self, from: u64, to: u64) -> Duration {
        Duration::from_millis(from + self.below(to.saturating_sub(from) + 1))
    }
}

/// How bad things are, by slots of two seconds: calm, lossy or stormy. All processes agree without a
/// word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weather {
    /// Hardly a fault.
    Calm,
    /// Many answers are lost.
    Lossy,
    /// Nothing gets through.
    Storm,
}

impl Weather {
    /// At this time of the boot clock.
    pub fn at(plan: &Plan, now: u64) -> Option<Self> {
        if now < plan.begin || now >= plan.end {
            return None;
        }
        let slot = (now - plan.begin) / 2_000_000_000;
        Some(match Dice::new(plan.seed, &[0x77ea_74e5, slot]).below(20) {
            0..=11 => Self::Calm,
            12..=18 => Self::Lossy,
            _ => Self::Storm,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_decides() {
        let roll = |seed, of: &[u64]| Dice::new(seed, of).roll();
        assert_eq!(roll(1, &[2, 3]), roll(1, &[2, 3]));
        let all = [roll(1, &[2, 3]), roll(2, &[2, 3]), roll(1, &[3, 2]), roll(1, &[2])];
        let different: std::collections::BTreeSet<u64> = all.into_iter().collect();
        assert_eq!(different.len(), all.len());
        let mut dice = Dice::new(7, &[]);
        assert!((0..1000).all(|_| dice.millis(3, 5).as_millis() - 3 <= 2));
    }
}
