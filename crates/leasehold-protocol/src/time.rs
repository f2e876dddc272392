//! The store's time.
//!
//! Nobody's wall clock is trusted against anybody else's. A [`StoreTime`] is what a store said:
//! the `Date` of a response, or an object's `Last-Modified`. A node's own clocks are another
//! matter, and another type, so that the two cannot be compared by accident.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// A point in time as a store told it, in microseconds since 1970 (UTC).
///
/// Written with a fixed width, `2026-01-31T09:05:00.123456Z`, so that it sorts as text.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct StoreTime(i64);

/// The text is not a time that we can write: years 0000 to 9999, with an offset or `Z`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a time like 2026-01-31T09:05:00.123456Z: {0:?}")]
pub struct TimeError(String);

/// 0000-01-01 and the last microsecond of 9999: what the fixed-width form can hold.
const RANGE: std::ops::RangeInclusive<i64> = -62_167_219_200_000_000..=253_402_207_200_000_000;

impl StoreTime {
    /// The time that many microseconds after 1970. Clamped to the years 0000 to 9999.
    pub fn from_micros(micros: i64) -> Self {
        Self(micros.clamp(*RANGE.start(), *RANGE.end()))
    }

    /// Microseconds since 1970.
    pub fn as_micros(self) -> i64 {
        self.0
    }

    /// How long after `earlier` this is; zero if it is not.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_micros(self.0.saturating_sub(earlier.0).max(0).unsigned_abs())
    }

    /// The time `span` after this one.
    pub fn plus(self, span: Duration) -> Self {
        Self::from_micros(self.0.saturating_add(micros(span)))
    }

    /// The time `span` before this one.
    pub fn minus(self, span: Duration) -> Self {
        Self::from_micros(self.0.saturating_sub(micros(span)))
    }

    /// The same, with what a store that counts in whole seconds would have told.
    pub fn floor_to_second(self) -> Self {
        Self(self.0.div_euclid(1_000_000) * 1_000_000)
    }

    /// The time of an HTTP `Date` or `Last-Modified` header, or `None`.
    pub fn from_http_date(text: &str) -> Option<Self> {
        let zoned = jiff::fmt::rfc2822::parse(text).ok()?;
        Some(Self::from_micros(zoned.timestamp().as_microsecond()))
    }
}

/// How far a store's clock is ahead of a clock of ours that only goes on, in microseconds: somewhere
/// between these two.
///
/// A bucket tells whole seconds, rounded down, so one answer leaves a second open. Of several answers
/// each leaves another second open, and what all of them leave is less.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ahead {
    least: i64,
    most: i64,
}

impl Ahead {
    /// By one answer: the store told `told` when our clock showed `ours`, and it may have been
    /// `unsure` later by then.
    pub fn told(told: StoreTime, unsure: Duration, ours: Duration) -> Self {
        let least = told.as_micros().saturating_sub(micros(ours));
        Self { least, most: least.saturating_add(micros(unsure)) }
    }

    /// What both leave open. Where they contradict each other the newer one is believed: a clock was
    /// set, or one runs faster than the other.
    #[must_use]
    pub fn and(self, newer: Self) -> Self {
        let (least, most) = (self.least.max(newer.least), self.most.min(newer.most));
        if least <= most { Self { least, most } } else { newer }
    }

    /// The store's time when our clock shows `ours`. What is left open, our wall clock decides: so
    /// two processes of one host, which know nothing of each other, tell the times of what they do
    /// one after the other in that order; so do hosts whose clocks are right. A wall clock that is
    /// off cannot take it further than the store allows.
    pub fn at(self, ours: Duration, wall: StoreTime) -> StoreTime {
        let ours = micros(ours);
        let (least, most) = (self.least.saturating_add(ours), self.most.saturating_add(ours));
        StoreTime::from_micros(wall.as_micros().clamp(least, most.max(least)))
    }
}

fn micros(span: Duration) -> i64 {
    i64::try_from(span.as_micros()).unwrap_or(i64::MAX)
}

/// Six digits behind the second, always.
const PRINTER: jiff::fmt::temporal::DateTimePrinter =
    jiff::fmt::temporal::DateTimePrinter::new().precision(Some(6));

impl fmt::Display for StoreTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // In range by construction; were it not, the epoch is better than a panic.
        let time = Timestamp::from_microsecond(self.0).unwrap_or(Timestamp::UNIX_EPOCH);
        let printed = PRINTER.print_timestamp(&time, jiff::fmt::StdFmtWrite(f));
        printed.map_err(|_| fmt::Error)
    }
}

impl fmt::Debug for StoreTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for StoreTime {
    type Err = TimeError;

    /// Reads any RFC 3339 time, so that times written by other tools are understood.
    fn from_str(text: &str) -> Result<Self, TimeError> {
        let time: Timestamp = text.parse().map_err(|_| TimeError(text.to_owned()))?;
        let micros = time.as_microsecond();
        if !RANGE.contains(&micros) {
            return Err(TimeError(text.to_owned()));
        }
        Ok(Self(micros))
    }
}

impl From<StoreTime> for String {
    fn from(time: StoreTime) -> Self {
        time.to_string()
    }
}

impl TryFrom<String> for StoreTime {
    type Error = TimeError;
    fn try_from(text: String) -> Result<Self, TimeError> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn text_has_a_fixed_width_and_sorts() {
        let time: StoreTime = "2026-01-31T09:05:00Z".parse().unwrap();
        assert_eq!(time.to_string(), "2026-01-31T09:05:00.000000Z");
        let later = time.plus(Duration::from_micros(123_456));
        assert_eq!(later.to_string(), "2026-01-31T09:05:00.123456Z");
        assert!(later.to_string() > time.to_string());
    }

    #[test]
    fn other_tools_times_are_read_and_nonsense_is_refused() {
        let ours: StoreTime = "2024-02-15T10:30:05.000000Z".parse().unwrap();
        for same in
            ["2024-02-15T10:30:05.000Z", "2024-02-15T11:30:05+01:00", "2024-02-15 10:30:05Z"]
        {
            assert_eq!(same.parse(), Ok(ours), "{same}");
        }
        for bad in ["", "now", "2024-02-15", "2024-02-15T10:30:05", "2024-13-01T00:00:00Z"] {
            assert!(bad.parse::<StoreTime>().is_err(), "{bad}");
        }
    }

    #[test]
    fn http_dates_are_read() {
        let time = StoreTime::from_http_date("Sun, 15 Nov 2026 09:41:57 GMT").unwrap();
        assert_eq!(time.to_string(), "2026-11-15T09:41:57.000000Z");
        assert_eq!(StoreTime::from_http_date("yesterday"), None);
    }

    #[test]
    fn spans_saturate() {
        let time = StoreTime::from_micros(0);
        assert_eq!(time.since(time.plus(Duration::from_secs(5))), Duration::ZERO);
        assert_eq!(time.plus(Duration::MAX), StoreTime::from_micros(i64::MAX));
        assert_eq!(time.minus(Duration::MAX), StoreTime::from_micros(i64::MIN));
        for edge in [i64::MIN, i64::MAX] {
            assert_eq!(StoreTime::from_micros(edge).to_string().len(), 27);
        }
    }

    const SECOND: Duration = Duration::from_secs(1);

    fn at(micros: i64) -> StoreTime {
        StoreTime::from_micros(1_700_000_000_000_000 + micros)
    }

    #[test]
    fn the_wall_clock_decides_within_the_second_that_was_told() {
        let ours = Duration::from_secs(77);
        let ahead = Ahead::told(at(0), SECOND, ours);
        let later = ours + Duration::from_micros(5);
        assert_eq!(ahead.at(later, at(300_000)), at(300_000));
        // Hours behind, hours ahead.
        assert_eq!(ahead.at(later, at(-7_200_000_000)), at(5));
        assert_eq!(ahead.at(later, at(7_200_000_000)), at(1_000_005));
        // Some stores tell it exactly.
        let exact = Ahead::told(at(250_000), Duration::ZERO, ours);
        assert_eq!(exact.at(later, at(300_000)), at(250_005));
    }

    #[test]
    fn more_answers_leave_less_open_and_a_clock_that_was_set_is_believed() {
        let far = at(7_200_000_000);
        let first = Ahead::told(at(0), SECOND, Duration::from_micros(10));
        // 0.6 s later a new second begins.
        let next = Ahead::told(at(1_000_000), SECOND, Duration::from_micros(600_010));
        let both = first.and(next);
        assert_eq!(both.at(Duration::from_micros(600_010), at(0)), at(1_000_000));
        assert_eq!(both.at(Duration::from_micros(600_010), far), at(1_600_000));
        let back = Ahead::told(at(-9_000_000), SECOND, Duration::from_micros(700_010));
        assert_eq!(both.and(back), back);
    }

    proptest! {
        #[test]
        fn no_clock_panics(told in any::<i64>(), wall in any::<i64>(), ours in any::<u64>(), unsure in any::<u64>()) {
            let ours = Duration::from_micros(ours);
            let ahead = Ahead::told(StoreTime::from_micros(told), Duration::from_micros(unsure), ours);
            let other = Ahead::told(StoreTime::from_micros(wall), Duration::MAX, Duration::ZERO);
            let _ = ahead.and(other).at(ours, StoreTime::from_micros(wall));
        }

        #[test]
        fn text_round_trips_and_keeps_the_order(a in any::<i64>(), b in any::<i64>()) {
            let (a, b) = (StoreTime::from_micros(a), StoreTime::from_micros(b));
            prop_assert_eq!(a.to_string().len(), 27);
            prop_assert_eq!(a.to_string().parse(), Ok(a));
            prop_assert_eq!(a.cmp(&b), a.to_string().cmp(&b.to_string()));
        }

        #[test]
        fn no_input_panics(text in any::<String>()) {
            let _ = text.parse::<StoreTime>();
            let _ = StoreTime::from_http_date(&text);
        }
    }
}
