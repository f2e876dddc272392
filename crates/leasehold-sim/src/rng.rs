//! Chance, from a seed.

use std::time::Duration;

/// SplitMix64: small, quick, and the same everywhere.
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    /// From this seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Another one that goes its own way from here.
    #[must_use]
    pub fn fork(&mut self, salt: u64) -> Self {
        Self(self.bits() ^ salt.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    /// 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`; zero if that is zero.
    pub fn below(&mut self, n: u64) -> u64 {
        self.bits() % n.max(1)
    }

    /// A number from `low` to `high`, both included.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high.saturating_sub(low) + 1)
    }

    /// True with this probability.
    pub fn chance(&mut self, probability: f64) -> bool {
        probability > 0.0 && (self.bits() >> 11) as f64 / ((1u64 << 53) as f64) < probability
    }

    /// One of these.
    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len() as u64) as usize]
    }

    /// A span between two numbers of milliseconds.
    pub fn millis(&mut self, low: u64, high: u64) -> Duration {
        Duration::from_micros(self.between(low * 1000, high * 1000))
    }

    /// A span between two numbers of milliseconds, short ones likelier than long ones.
    pub fn skewed_millis(&mut self, low: u64, high: u64) -> Duration {
        let top = self.between(low, high);
        self.millis(low, top)
    }
}
