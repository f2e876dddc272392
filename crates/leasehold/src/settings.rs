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
    /// How many requests this process sends to a bucket in a minute at most, ten seconds' worth of
    /// them at once after a rest. Requests beyond it wait. Heartbeats go before all others, but wait
    /// for each other: fewer than a few for each lease that is held, and leases are lost.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub requests_per_minute: Option<u32>,
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
            requests_per_minute: None,
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
        if self.requests_per_minute == Some(0) {
            return Err(Error::invalid("`requests_per_minute` must be at least 1"));
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

pub use leasehold_protocol::duration::{self as duration_text, format as format_duration};

/// The duration in a text like `250ms`, `30s`, `5m`, `2h` or `1d`.
pub fn parse_duration(text: &str) -> Result<Duration> {
    duration_text::parse(text).map_err(|error| Error::invalid(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_cannot_work_are_refused() {
        let ok = StoreSettings::default();
        assert!(ok.clone().checked().is_ok());
        assert!(StoreSettings { connections: 0, ..ok.clone() }.checked().is_err());
        assert!(StoreSettings { requests_per_minute: Some(0), ..ok.clone() }.checked().is_err());
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
