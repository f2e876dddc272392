//! Settings: plain data. Components (a clock, a backend) are passed beside them.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// How a store is talked to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct StoreSettings {
    /// How many connections this process opens to a bucket at most. Each costs memory here and a
    /// file descriptor on both sides; requests beyond it wait.
    pub connections: usize,
    /// How long one request may take, its body's transfer aside. What takes longer counts as
    /// unanswered, and costs one more request to find out what became of it.
    #[serde(with = "duration_text")]
    pub request_timeout: Duration,
    /// How often a request is sent at most when the store does not answer, or asks to slow down.
    /// Each attempt is a paid request.
    pub attempts: u32,
    /// The longest pause before the second attempt. It doubles with each further one.
    #[serde(with = "duration_text")]
    pub retry_base: Duration,
    /// The longest pause between two attempts.
    #[serde(with = "duration_text")]
    pub retry_cap: Duration,
}

impl Default for StoreSettings {
    fn default() -> Self {
        Self {
            connections: 32,
            request_timeout: Duration::from_secs(20),
            attempts: 6,
            retry_base: Duration::from_millis(100),
            retry_cap: Duration::from_secs(5),
        }
    }
}

impl StoreSettings {
    /// These settings, or why they cannot work.
    pub fn checked(self) -> Result<Self> {
        if self.connections == 0 {
            return Err(Error::invalid("`connections` must be at least 1"));
        }
        if self.attempts == 0 {
            return Err(Error::invalid("`attempts` must be at least 1"));
        }
        if self.request_timeout.is_zero() {
            return Err(Error::invalid("`request_timeout` must be longer than zero"));
        }
        if self.retry_cap < self.retry_base {
            return Err(Error::invalid("`retry_cap` must not be shorter than `retry_base`"));
        }
        Ok(self)
    }
}

/// The duration in a text like `250ms`, `30s`, `5m`, `2h` or `1d`.
pub fn parse_duration(text: &str) -> Result<Duration> {
    let bad = || Error::invalid(format!("not a duration like 250ms, 30s, 5m, 2h or 1d: {text:?}"));
    let digits = text.find(|c: char| !c.is_ascii_digit()).ok_or_else(bad)?;
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| bad())?;
    let millis = match unit {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => return Err(bad()),
    };
    Ok(Duration::from_millis(number.checked_mul(millis).ok_or_else(bad)?))
}

/// The shortest text that [`parse_duration`] reads as this duration, to the millisecond.
pub fn format_duration(span: Duration) -> String {
    let millis = span.as_millis();
    for (unit, size) in [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000)] {
        if millis != 0 && millis.is_multiple_of(size) {
            return format!("{}{unit}", millis / size);
        }
    }
    format!("{millis}ms")
}

/// Durations as text, for serde's `with`.
pub mod duration_text {
    use super::*;
    use serde::{Deserializer, Serializer, de::Error as _};

    /// Writes `30s`.
    pub fn serialize<S: Serializer>(span: &Duration, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&format_duration(*span))
    }

    /// Reads `30s`.
    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
        let text = String::deserialize(from)?;
        parse_duration(&text).map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_and_written() {
        for (text, millis) in [("250ms", 250), ("30s", 30_000), ("5m", 300_000), ("1d", 86_400_000)]
        {
            assert_eq!(parse_duration(text).unwrap(), Duration::from_millis(millis));
            assert_eq!(format_duration(Duration::from_millis(millis)), text);
        }
        for bad in [
            "",
            "s",
            "5",
            "5 s",
            "-1s",
            "1.5s",
            "1w",
            "99999999999999999999s",
            "99999999999999999d",
        ] {
            assert!(parse_duration(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn settings_that_cannot_work_are_refused() {
        let ok = StoreSettings::default();
        assert!(ok.clone().checked().is_ok());
        assert!(StoreSettings { connections: 0, ..ok.clone() }.checked().is_err());
        assert!(StoreSettings { attempts: 0, ..ok.clone() }.checked().is_err());
        assert!(StoreSettings { retry_cap: Duration::ZERO, ..ok }.checked().is_err());
    }

    #[test]
    fn unknown_settings_are_refused() {
        assert!(serde_json::from_str::<StoreSettings>(r#"{"conections": 3}"#).is_err());
        let some: StoreSettings = serde_json::from_str(r#"{"request_timeout": "5s"}"#).unwrap();
        assert_eq!(some.request_timeout, Duration::from_secs(5));
    }
}
