//! `nodes/{node}.json`: what a node says of itself.
//!
//! The record is the node's lease, in snake case, with one more field: `node`. So a name has one
//! supervisor at a time, and keeping the lease and reporting are one PUT.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::duration;
use crate::format::lease::Lease;
use crate::time::StoreTime;

/// The field of the lease that holds it.
const FIELD: &str = "node";

/// What a node says of itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Node {
    /// The version of the program.
    pub version: String,
    /// When its supervisor started, by the store's clock.
    pub started_at: Option<StoreTime>,
    /// For how long it has been running.
    pub uptime_s: u64,
    /// How often it reports.
    #[serde(with = "duration")]
    pub every: Duration,
    /// Whether it has been told to end.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub draining: bool,
    /// The plan that it carries out: the version of `fleet.toml`; none if it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plan: Option<String>,
    /// Why it does not carry out the one that is there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
    /// Its processes.
    #[serde(default)]
    pub processes: Vec<NodeProcess>,
    /// Tasks that its workers hold, some of them if they are many.
    #[serde(default)]
    pub held: Vec<String>,
    /// How many tasks they hold.
    #[serde(default)]
    pub holds: u64,
    /// Tasks done since it started, and records compiled.
    #[serde(default)]
    pub done: u64,
    /// Attempts that failed since then.
    #[serde(default)]
    pub failed: u64,
    /// Tasks done in the last minutes, per minute.
    #[serde(default)]
    pub done_per_minute: f64,
    /// Attempts that failed, the same.
    #[serde(default)]
    pub failed_per_minute: f64,
    /// What went wrong last.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub errors: Vec<NodeError>,
    /// Free bytes where it keeps its state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_free: Option<u64>,
    /// How many milliseconds its clock is ahead of the store's.
    #[serde(default)]
    pub clock_ahead_ms: i64,
    /// Requests since it started, of all its processes.
    #[serde(default)]
    pub requests: Requests,
    /// What they cost at list price.
    #[serde(default)]
    pub dollars: f64,
    /// What later versions added: kept.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// Requests by class: what a store bills by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Requests {
    /// Objects written.
    pub put: u64,
    /// Objects read.
    pub get: u64,
    /// Objects asked about.
    pub head: u64,
    /// Pages listed.
    pub list: u64,
    /// Deletes.
    pub delete: u64,
}

/// A process of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeProcess {
    /// `worker` or `compiler`.
    pub role: String,
    /// Its queues or indexes.
    pub of: Vec<String>,
    /// Its number, while it runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// `running`, `waiting` (to be started again) or `draining`.
    pub state: String,
    /// Whether it ends again and again.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub crash_loop: bool,
    /// How often it had to be started again.
    #[serde(default)]
    pub restarts: u64,
    /// Tasks done, or records compiled.
    #[serde(default)]
    pub done: u64,
    /// Attempts that failed.
    #[serde(default)]
    pub failed: u64,
}

/// Something that went wrong.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeError {
    /// When, by the store's clock, if it was known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<StoreTime>,
    /// What.
    pub text: String,
}

/// The longest text of an error that is kept.
pub const LONGEST_ERROR: usize = 300;
/// How many errors are kept.
pub const MOST_ERRORS: usize = 5;
/// How many of the tasks that are held are named.
pub const MOST_HELD: usize = 20;

impl Node {
    /// Puts it into the node's lease.
    pub fn put_into(&self, lease: &mut Lease) {
        // Numbers that are none become null, and nothing else can fail.
        let value = serde_json::to_value(self).unwrap_or_default();
        lease.other.insert(FIELD.to_owned(), value);
    }

    /// What a node's lease says; an error where it cannot be read.
    pub fn of(lease: &Lease) -> Result<Self, String> {
        let value = lease.other.get(FIELD).ok_or("it does not say anything of the node")?;
        serde_json::from_value(value.clone()).map_err(|error| error.to_string())
    }
}

/// A text that fits into a record: its end, where the reason is.
pub fn shortened(text: &str) -> String {
    let text = text.trim();
    let start = text.len().saturating_sub(LONGEST_ERROR);
    let start = (start..=text.len()).find(|at| text.is_char_boundary(*at)).unwrap_or(0);
    match start {
        0 => text.to_owned(),
        _ => format!("…{}", &text[start..]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::lease::{Dialect, State};

    fn full() -> Node {
        let time = |text: &str| Some(text.parse().unwrap());
        Node {
            version: "0.1.0".into(),
            started_at: time("2026-11-15T09:00:00Z"),
            uptime_s: 3600,
            every: Duration::from_secs(50),
            draining: false,
            plan: Some("abc".into()),
            refused: Some("node 1 (a): name is empty".into()),
            processes: vec![NodeProcess {
                role: "worker".into(),
                of: vec!["scrape".into()],
                pid: Some(4711),
                state: "running".into(),
                crash_loop: true,
                restarts: 5,
                done: 12,
                failed: 1,
            }],
            held: vec!["scrape/example.com".into()],
            holds: 1,
            done: 12,
            failed: 1,
            done_per_minute: 0.5,
            failed_per_minute: 0.25,
            errors: vec![NodeError { at: time("2026-11-15T09:59:00Z"), text: "it ended".into() }],
            disk_free: Some(1 << 30),
            clock_ahead_ms: -1500,
            requests: Requests { put: 80, get: 10, head: 4, list: 5, delete: 1 },
            dollars: 0.0005,
            other: Map::new(),
        }
    }

    fn lease() -> Lease {
        Lease {
            holder: "pi-4".into(),
            acquired_at: Some("2026-11-15T09:00:00Z".parse().unwrap()),
            heartbeat_at: Some("2026-11-15T10:00:00Z".parse().unwrap()),
            expires_at: None,
            ttl: Some(Duration::from_secs(150)),
            token: Some(7),
            nonce: None,
            lease_id: None,
            state: State::Held,
            place: None,
            ask: None,
            other: Map::new(),
        }
    }

    #[test]
    fn golden_bytes_are_still_read_and_written() {
        let golden = include_bytes!("../../../../golden/node-1.json");
        let mut written = lease();
        full().put_into(&mut written);
        assert_eq!(
            String::from_utf8_lossy(&written.to_bytes(Dialect::Task)),
            String::from_utf8_lossy(golden)
        );
        let read = Lease::parse(golden).unwrap();
        assert_eq!(Node::of(&read), Ok(full()));
    }

    #[test]
    fn what_is_not_a_record_is_told() {
        assert!(Node::of(&lease()).is_err());
        let mut odd = lease();
        odd.other.insert("node".into(), Value::from(3));
        assert!(Node::of(&odd).is_err());
        let later = r#"{"version":"9","started_at":null,"uptime_s":1,"every":"1m","mood":"good"}"#;
        odd.other.insert("node".into(), serde_json::from_str(later).unwrap());
        assert_eq!(Node::of(&odd).unwrap().other["mood"], "good");
    }

    #[test]
    fn long_texts_keep_their_end() {
        assert_eq!(shortened(" short\n"), "short");
        let long = "ä".repeat(400) + "the reason";
        let cut = shortened(&long);
        assert!(cut.ends_with("the reason") && cut.len() <= LONGEST_ERROR + 4, "{cut}");
    }
}
