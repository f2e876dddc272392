//! When the next request may be sent: so many a minute, on average, with a little ahead.

use std::time::Duration;

/// A limit of so many a minute. After a rest, as many as ten seconds hold may go at once.
///
/// Kept is one point in time: when the next one is due if none is ahead. So there is nothing to
/// refill, and whoever asks gets a place in line at once, however many ask together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pace {
    /// The time that each takes.
    each: Duration,
    /// How far ahead one may be.
    ahead: Duration,
    next: Duration,
}

/// What may go at once after a rest.
const BURST: Duration = Duration::from_secs(10);

impl Pace {
    /// So many a minute; at least one.
    pub fn per_minute(limit: u32) -> Self {
        let each = Duration::from_secs(60) / limit.max(1);
        // At least the one that is asked for.
        let ahead = BURST.saturating_sub(each);
        Self { each, ahead, next: Duration::ZERO }
    }

    /// Takes the next place: how long to wait for it. `now` counts from anywhere, but never back.
    pub fn take(&mut self, now: Duration) -> Duration {
        // What was not used for long is lost.
        self.next = self.next.max(now.saturating_sub(self.ahead));
        let wait = self.next.saturating_sub(now);
        self.next += self.each;
        wait
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_burst_and_then_one_after_the_other() {
        let mut pace = Pace::per_minute(60);
        let now = SECOND * 1000;
        let waits: Vec<u64> = (0..13).map(|_| pace.take(now).as_secs()).collect();
        assert_eq!(waits, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3]);
        // A rest brings back ten seconds' worth, never more.
        let later = now + SECOND * 3600;
        assert_eq!((0..10).map(|_| pace.take(later)).max(), Some(Duration::ZERO));
        assert_eq!(pace.take(later), SECOND);
    }

    #[test]
    fn one_a_minute_goes_at_once_and_then_waits() {
        let mut pace = Pace::per_minute(1);
        assert_eq!(pace.take(SECOND), Duration::ZERO);
        assert_eq!(pace.take(SECOND), SECOND * 60);
    }

    proptest! {
        /// In any minute no more than the limit and a burst.
        #[test]
        fn never_more_than_allowed(
            limit in 1..2000u32,
            steps in proptest::collection::vec(0..3000u64, 1..300),
        ) {
            let mut pace = Pace::per_minute(limit);
            let mut now = Duration::from_secs(100);
            let mut sent = Vec::new();
            for step in steps {
                now += Duration::from_millis(step);
                sent.push(now + pace.take(now));
            }
            for start in &sent {
                let within = sent.iter().filter(|at| *at >= start && **at < *start + SECOND * 60);
                let most = limit + limit.div_ceil(6) + 1;
                prop_assert!(within.count() <= most as usize);
            }
        }
    }
}
