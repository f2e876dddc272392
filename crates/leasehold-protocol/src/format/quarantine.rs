//! `quarantine/{id}.json`: why rows are in quarantine. The rows stand beside it as they were found.

use serde::{Deserialize, Serialize};

use crate::time::StoreTime;

/// Why rows are in quarantine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reason {
    /// Where they were found.
    pub source: String,
    /// In which shard.
    pub shard: String,
    /// When, by the store's clock.
    pub at: StoreTime,
    /// By whom.
    pub worker_id: String,
    /// What is wrong with each.
    pub reasons: Vec<String>,
}

impl Reason {
    /// The reason in these bytes, or `None`.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        serde_json::from_slice(bytes).ok()
    }

    /// Its bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        // Texts always serialise.
        let mut bytes = serde_json::to_vec_pretty(self).unwrap_or_default();
        bytes.push(b'\n');
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_bytes_are_still_read_and_written() {
        let reason = Reason {
            source: "indexes/domains/broken.com.usv".into(),
            shard: "5e".into(),
            at: "2026-01-31T09:05:00.123456Z".parse().unwrap(),
            worker_id: "pi-3:17".into(),
            reasons: vec![
                "field \"n\": not an integer: \"three\"".into(),
                "not UTF-8 at byte 3".into(),
            ],
        };
        let golden = include_bytes!("../../../../golden/quarantine-1.json");
        assert_eq!(Reason::parse(golden).as_ref(), Some(&reason));
        assert_eq!(String::from_utf8_lossy(&reason.to_bytes()), String::from_utf8_lossy(golden));
        assert_eq!(Reason::parse(b"{}"), None);
    }
}
