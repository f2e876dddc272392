//! `shards/{xx}.json`: what is known of a shard without reading it.
//!
//! Never needed for correctness. A record about another version of the shard counts as absent. One
//! about the shard's own version lets a compiler copy rows that it does not change, and lets
//! `verify` check that nothing went missing:
//!
//! ```text
//! rows before + inbox records = rows after + replaced + older + quarantined + purged + moved
//! digest after = digest before + Σ written − Σ replaced, purged, quarantined, moved from the shard
//! ```

use serde::{Deserialize, Serialize};

use crate::merge::Digest;
use crate::time::StoreTime;

/// What happened to each row and each record of a compaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Counts {
    /// Rows of the shard before.
    pub rows_before: u64,
    /// Records in the inbox.
    pub inbox: u64,
    /// Records of keys that the shard did not have.
    pub inserted: u64,
    /// Rows that a later record took the place of.
    pub replaced: u64,
    /// Records that were not the latest of their key.
    pub older: u64,
    /// Rows and records that could not be read.
    pub quarantined: u64,
    /// Deletions that were forgotten.
    pub purged: u64,
    /// Rows of the shard after.
    pub rows_after: u64,
    /// Rows of the shard that belong to others, and went to the inboxes there.
    #[serde(skip_serializing_if = "is_zero")]
    pub moved: u64,
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

impl Counts {
    /// Whether every row and record is accounted for.
    pub fn add_up(&self) -> bool {
        let sum = |counts: &[u64]| counts.iter().copied().map(u128::from).sum::<u128>();
        let Self { replaced, older, quarantined, purged, moved, .. } = *self;
        sum(&[self.rows_before, self.inbox])
            == sum(&[self.rows_after, replaced, older, quarantined, purged, moved])
    }
}

/// The statistics of a shard.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Statistics {
    /// The version of the shard that this is about.
    pub version: String,
    /// Under which schema its rows are canonical.
    pub schema: String,
    /// Its rows, deletions included.
    pub rows: u64,
    /// How many of them are deletions.
    pub deletions: u64,
    /// Its size.
    pub bytes: u64,
    /// The sum of its rows' hashes.
    #[serde(with = "as_text")]
    pub digest: Digest,
    /// How often it was written.
    pub generation: u64,
    /// When.
    pub compacted_at: StoreTime,
    /// By whom.
    pub worker_id: String,
    /// The version that it was made from, and what its digest was; empty the first time.
    pub version_before: String,
    /// The digest before.
    #[serde(with = "as_text")]
    pub digest_before: Digest,
    /// The sum of the hashes of the rows that were written.
    #[serde(with = "as_text")]
    pub digest_written: Digest,
    /// The sum of the hashes of the rows that were replaced, purged or quarantined.
    #[serde(with = "as_text")]
    pub digest_removed: Digest,
    /// What the last compaction did.
    pub last: Counts,
    /// What the file system said of the shard when it was written, in a directory: who finds the same
    /// knows without reading it that a compiler wrote it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
}

impl Statistics {
    /// The statistics in these bytes. Damaged ones are as good as none.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        serde_json::from_slice(bytes).ok()
    }

    /// Whether the statistics in these bytes are of the file of which the file system says this.
    pub fn are_of_file(bytes: &[u8], file: &str) -> bool {
        #[derive(Deserialize)]
        struct Of<'a> {
            file: Option<&'a str>,
        }
        serde_json::from_slice::<Of<'_>>(bytes).is_ok_and(|of| of.file == Some(file))
    }

    /// Their bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        // Numbers and texts always serialise.
        let mut bytes = serde_json::to_vec(self).unwrap_or_default();
        bytes.push(b'\n');
        bytes
    }

    /// What in them contradicts itself, if anything.
    pub fn contradiction(&self) -> Option<String> {
        if !self.last.add_up() {
            return Some(format!(
                "the counts of the last compaction do not add up: {:?}",
                self.last
            ));
        }
        if self.last.rows_after != self.rows {
            return Some("the last compaction left another number of rows".to_owned());
        }
        let digest = self.digest_before.plus(self.digest_written).minus(self.digest_removed);
        match digest == self.digest {
            true => None,
            false => Some("the digest is not what the last compaction made it".to_owned()),
        }
    }
}

mod as_text {
    use super::Digest;
    use serde::{Deserialize, Deserializer, Serializer, de::Error as _};

    pub fn serialize<S: Serializer>(digest: &Digest, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(digest)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Digest, D::Error> {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Statistics {
        Statistics {
            version: "c96a".into(),
            schema: "00ff".into(),
            rows: 9,
            deletions: 1,
            bytes: 512,
            digest: Digest(8),
            generation: 2,
            compacted_at: "2026-01-31T09:05:00.123456Z".parse().unwrap(),
            worker_id: "pi-3:17".into(),
            version_before: "b85b".into(),
            digest_before: Digest(5),
            digest_written: Digest(7),
            digest_removed: Digest(4),
            last: Counts {
                rows_before: 8,
                inbox: 5,
                inserted: 2,
                replaced: 1,
                older: 1,
                quarantined: 1,
                purged: 1,
                rows_after: 9,
                moved: 0,
            },
            file: None,
        }
    }

    #[test]
    fn golden_bytes_are_still_read_and_written() {
        let golden = include_bytes!("../../../../golden/statistics-1.json");
        assert_eq!(Statistics::parse(golden), Some(example()));
        assert_eq!(example().to_bytes(), golden);
        // In a directory.
        let file = Some("1f-200-697dc5fc-75bca00-697dc5fc-8f0d180".to_owned());
        let golden = include_bytes!("../../../../golden/statistics-2.json");
        assert_eq!(Statistics::parse(golden), Some(Statistics { file: file.clone(), ..example() }));
        assert_eq!(Statistics { file, ..example() }.to_bytes(), golden);
    }

    #[test]
    fn a_file_is_recognised() {
        let of = Statistics { file: Some("1f-200".into()), ..example() };
        assert_eq!(Statistics::parse(&of.to_bytes()), Some(of.clone()));
        assert!(Statistics::are_of_file(&of.to_bytes(), "1f-200"));
        assert!(!Statistics::are_of_file(&of.to_bytes(), "1f-201"));
        assert!(!Statistics::are_of_file(&example().to_bytes(), ""));
        assert!(!Statistics::are_of_file(b"{", "1f-200"));
    }

    #[test]
    fn contradictions_are_found() {
        assert_eq!(example().contradiction(), None);
        let mut lost = example();
        lost.last.older = 0;
        assert!(lost.contradiction().unwrap().contains("add up"));
        let other = Statistics { digest: Digest(9), ..example() };
        assert!(other.contradiction().unwrap().contains("digest"));
        let fewer = Statistics { rows: 8, ..example() };
        assert!(fewer.contradiction().unwrap().contains("rows"));
    }
}
