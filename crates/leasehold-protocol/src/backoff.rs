//! How long to wait before the next attempt.

use std::time::Duration;

/// A pause before attempt `attempt + 1` (the first attempt is number 0): exponential, capped, with
/// full jitter, so that a fleet that failed together does not come back together.
///
/// `random` is 64 random bits. The result lies in `[0, min(cap, base · 2^attempt)]`.
pub fn full_jitter(attempt: u32, base: Duration, cap: Duration, random: u64) -> Duration {
    let factor = 2u32.saturating_pow(attempt);
    let ceiling = base.saturating_mul(factor).min(cap);
    ceiling.mul_f64(random as f64 / u64::MAX as f64).min(ceiling)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BASE: Duration = Duration::from_millis(100);
    const CAP: Duration = Duration::from_secs(20);

    #[test]
    fn the_ceiling_doubles_up_to_the_cap() {
        let longest = |attempt| full_jitter(attempt, BASE, CAP, u64::MAX);
        assert_eq!(longest(0), BASE);
        assert_eq!(longest(1), BASE * 2);
        assert_eq!(longest(5), BASE * 32);
        assert_eq!(longest(60), CAP);
        assert_eq!(full_jitter(3, BASE, CAP, 0), Duration::ZERO);
    }

    proptest! {
        #[test]
        fn never_beyond_the_cap(attempt in any::<u32>(), random in any::<u64>()) {
            prop_assert!(full_jitter(attempt, BASE, CAP, random) <= CAP);
        }
    }
}
