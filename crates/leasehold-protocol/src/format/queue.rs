//! `queue.json`: a queue's settings.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::duration;
use crate::layout::queue::MAX_SHARDS;

/// How claims reach the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// At once: nobody else starts a task that is claimed.
    #[default]
    Strict,
    /// Later, through each node's own directory.
    Relaxed,
}

/// How a queue behaves. All who work on it see the same.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct QueueSettings {
    /// Without a heartbeat for this long, a task is anybody's.
    #[serde(with = "duration")]
    pub ttl: Duration,
    /// How often a claim is renewed: each is a PUT.
    #[serde(with = "duration")]
    pub heartbeat: Duration,
    /// How often a task may fail before it is a dead letter.
    pub max_attempts: u32,
    /// How often whoever runs a task may vanish before it is a dead letter.
    pub max_crashes: u32,
    /// The first pause before a failed task is tried again; it doubles.
    #[serde(with = "duration")]
    pub backoff: Duration,
    /// The longest such pause.
    #[serde(with = "duration")]
    pub backoff_cap: Duration,
    /// How long an attempt may take, where the task does not say.
    #[serde(with = "duration::option", skip_serializing_if = "Option::is_none")]
    pub timeout: Option<Duration>,
    /// Over how many prefixes tasks are spread, for stores that limit requests per prefix. Fixed
    /// when the queue is made.
    pub shards: u16,
    /// Whether completions are recorded: one PUT each. Without, a task can be completed twice.
    pub receipts: bool,
    /// How long receipts are kept: so long a chosen id is not run again.
    #[serde(with = "duration")]
    pub retention: Duration,
    /// Whether workers leave the tasks alone.
    pub paused: bool,
    /// How claims reach the store.
    pub mode: Mode,
    /// How often a node tells the bucket what it did, in relaxed mode.
    #[serde(with = "duration", skip_serializing_if = "is_usual_up")]
    pub sync_up: Duration,
    /// How often a node asks the bucket what there is to do, in relaxed mode: a LIST per thousand
    /// tasks each time.
    #[serde(with = "duration", skip_serializing_if = "is_usual_down")]
    pub sync_down: Duration,
    /// Whether this is a node's copy of the settings, beside its replica of the queue. What happens
    /// there is noted for the bucket.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub replica: bool,
    /// Whether tasks and receipts in a directory are flushed to disk before success is reported.
    pub durable: bool,
    /// Marks the write of this record.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub nonce: String,
    /// What later versions added: kept when we rewrite the record.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

impl Default for QueueSettings {
    fn default() -> Self {
        Self {
            ttl: Duration::from_secs(300),
            heartbeat: Duration::from_secs(100),
            max_attempts: 5,
            max_crashes: 5,
            backoff: Duration::from_secs(1),
            backoff_cap: Duration::from_secs(600),
            timeout: None,
            shards: 1,
            receipts: true,
            retention: Duration::from_secs(7 * 86_400),
            paused: false,
            mode: Mode::Strict,
            sync_up: SYNC_UP,
            sync_down: SYNC_DOWN,
            replica: false,
            durable: true,
            nonce: String::new(),
            other: Map::new(),
        }
    }
}

const SYNC_UP: Duration = Duration::from_secs(300);
const SYNC_DOWN: Duration = Duration::from_secs(3600);

fn is_usual_up(span: &Duration) -> bool {
    *span == SYNC_UP
}

fn is_usual_down(span: &Duration) -> bool {
    *span == SYNC_DOWN
}

/// Longer, and nobody lives to see a dead worker's task done.
const LONGEST_TTL: Duration = Duration::from_secs(365 * 86_400);

/// Why settings cannot work.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct SettingsError(String);

impl QueueSettings {
    /// These settings, or why they cannot work.
    pub fn checked(self) -> Result<Self, SettingsError> {
        let span = duration::format;
        let bad = |text: String| Err(SettingsError(text));
        if self.ttl > LONGEST_TTL {
            return bad(format!("a ttl is at most {}, not {}", span(LONGEST_TTL), span(self.ttl)));
        }
        if self.heartbeat.is_zero() || self.heartbeat.saturating_mul(2) > self.ttl {
            return bad(format!(
                "a task must be renewed at least twice within its ttl: heartbeat {} and ttl {} do \
                 not go together",
                span(self.heartbeat),
                span(self.ttl)
            ));
        }
        if self.max_attempts == 0 || self.max_crashes == 0 {
            return bad("max_attempts and max_crashes are at least 1".to_owned());
        }
        if self.backoff > self.backoff_cap {
            return bad(format!(
                "backoff {} is longer than its cap {}",
                span(self.backoff),
                span(self.backoff_cap)
            ));
        }
        if self.shards == 0 || self.shards > MAX_SHARDS {
            return bad(format!("a queue has 1 to {MAX_SHARDS} shards, not {}", self.shards));
        }
        if self.receipts && self.retention < Duration::from_secs(3600) {
            return bad(format!(
                "receipts must outlive any request that is under way: a retention of {} is too \
                 short, the least is 1h",
                span(self.retention)
            ));
        }
        if self.mode == Mode::Relaxed && !self.receipts {
            return bad("relaxed mode needs receipts".to_owned());
        }
        if self.sync_up.is_zero() || self.sync_down.is_zero() {
            return bad("sync_up and sync_down are longer than zero".to_owned());
        }
        if self.mode == Mode::Relaxed && self.ttl < self.sync_up.saturating_mul(3) {
            return bad(format!(
                "a claim that a node tells of every {} would look stale to others: in relaxed mode \
                 the ttl is at least three times sync_up, {}, not {}",
                span(self.sync_up),
                span(self.sync_up.saturating_mul(3)),
                span(self.ttl)
            ));
        }
        Ok(self)
    }

    /// The settings in these bytes.
    pub fn parse(bytes: &[u8]) -> Result<Self, SettingsError> {
        serde_json::from_slice(bytes).map_err(|error| SettingsError(error.to_string()))
    }

    /// Their bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        // Numbers and text always serialise.
        let mut bytes = serde_json::to_vec_pretty(self).unwrap_or_default();
        bytes.push(b'\n');
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_come_back_with_what_we_do_not_know() {
        let text = br#"{"ttl": "30s", "heartbeat": "10s", "colour": "green"}"#;
        let settings = QueueSettings::parse(text).unwrap();
        assert_eq!(settings.ttl, Duration::from_secs(30));
        assert_eq!(settings.max_attempts, 5);
        let again = QueueSettings::parse(&settings.to_bytes()).unwrap();
        assert_eq!(again, settings);
        assert_eq!(again.other["colour"], "green");
    }

    #[test]
    fn settings_that_cannot_work_are_refused() {
        let ok = QueueSettings::default();
        assert!(ok.clone().checked().is_ok());
        let ttl = Duration::from_secs(150);
        let long = Duration::from_secs(900);
        for bad in [
            QueueSettings { ttl, ..ok.clone() },
            QueueSettings { heartbeat: Duration::ZERO, ..ok.clone() },
            QueueSettings { max_attempts: 0, ..ok.clone() },
            QueueSettings { shards: 0, ..ok.clone() },
            QueueSettings { shards: 257, ..ok.clone() },
            QueueSettings { retention: Duration::from_secs(60), ..ok.clone() },
            QueueSettings { backoff: Duration::from_secs(700), ..ok.clone() },
            QueueSettings { mode: Mode::Relaxed, receipts: false, ttl: long, ..ok.clone() },
            QueueSettings { mode: Mode::Relaxed, ttl: long - Duration::from_secs(1), ..ok.clone() },
            QueueSettings { sync_up: Duration::ZERO, ..ok.clone() },
        ] {
            assert!(bad.checked().is_err());
        }
        assert!(QueueSettings { mode: Mode::Relaxed, ttl: long, ..ok }.checked().is_ok());
    }
}
