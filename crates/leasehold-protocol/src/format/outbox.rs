//! The records of a replica's sync: an outbox entry, what a sync down has seen.
//!
//! An entry says *about which* task or bundle the bucket is to be told something; what that is shows
//! in the replica itself, so however often something happens, there is one entry.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::lease::{Place, Process};
use crate::time::StoreTime;

/// `sync/{queue}/outbox/…/{unit}.json`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Entry {
    /// Which push of the work this is about, where that is known.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub incarnation: String,
    /// Pushes that this was about before, and of whose end the bucket may not know.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub earlier: Vec<String>,
    /// Whether the work itself may be unknown to the bucket: it was pushed here.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub untold: bool,
    /// Whether somebody chose its name, so that it may have been pushed elsewhere too.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub chosen: bool,
    /// For when it was pushed, if not for at once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scheduled: Option<StoreTime>,
    /// The bucket's version of the work.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub origin: Option<String>,
    /// Our lease in the bucket, as we wrote it last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub told: Option<String>,
    /// Its token there.
    #[serde(skip_serializing_if = "is_zero")]
    pub token: u64,
    /// Whether the work was found to be gone from the bucket, by somebody's hand, while it was being
    /// done here.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub withdrawn: bool,
    /// Who was about to change something. What they noted may be yet to come.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub writers: Vec<Writer>,
    /// Marks the write of this record.
    pub nonce: String,
    /// What later versions added.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

fn is_zero(token: &u64) -> bool {
    *token == 0
}

/// What somebody was about to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Intent {
    /// Push the work.
    Push,
    /// Record that it is done, or given up.
    Finish,
}

/// A process that was about to change something.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Writer {
    /// What.
    pub intent: Intent,
    /// Which push it is about to finish.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub incarnation: String,
    /// Which boot of the host it runs in.
    #[serde(default)]
    pub boot_id: String,
    /// To which namespace its number belongs.
    #[serde(default)]
    pub pid_namespace: String,
    /// Its number.
    #[serde(default)]
    pub pid: u32,
    /// When it started.
    #[serde(default)]
    pub start_time: u64,
}

impl Writer {
    /// A process that runs here.
    pub fn new(intent: Intent, here: Option<&Place>) -> Self {
        match here {
            Some(place) => Self {
                intent,
                incarnation: String::new(),
                boot_id: place.boot_id.clone(),
                pid_namespace: place.pid_ns.clone(),
                pid: place.process.pid,
                start_time: place.process.start,
            },
            None => Self {
                intent,
                incarnation: String::new(),
                boot_id: String::new(),
                pid_namespace: String::new(),
                pid: 0,
                start_time: 0,
            },
        }
    }

    /// Where it runs, if it said so.
    pub fn place(&self) -> Option<Place> {
        (!self.boot_id.is_empty()).then(|| Place {
            host: String::new(),
            boot_id: self.boot_id.clone(),
            boot_time: std::time::Duration::ZERO,
            pid_ns: self.pid_namespace.clone(),
            process: Process { pid: self.pid, start: self.start_time },
            child: None,
        })
    }
}

impl Entry {
    /// The entry in these bytes. One that a power loss damaged is an entry still: what is to be told
    /// shows in the replica, and that the bucket may not know the work costs two requests to find out.
    pub fn parse(bytes: &[u8]) -> Self {
        let unknown = || Self { untold: true, chosen: true, ..Self::default() };
        serde_json::from_slice(bytes).unwrap_or_else(|_| unknown())
    }

    /// Its bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = serde_json::to_vec(self).unwrap_or_default();
        bytes.push(b'\n');
        bytes
    }

    /// Notes which push it is about from now on. An earlier one that was not told of yet is kept: it
    /// may have been given up here, and be pending in the bucket still.
    pub fn name(&mut self, incarnation: &str, origin: Option<&str>) {
        // Whoever has it, or had the one before, has seen it: the replica may not show it much longer.
        let shown = [incarnation.to_owned(), self.incarnation.clone()];
        let push =
            |writer: &Writer| writer.intent == Intent::Push && !writer.incarnation.is_empty();
        self.writers.retain(|writer| !(push(writer) && shown.contains(&writer.incarnation)));
        if self.incarnation != incarnation {
            let earlier = std::mem::replace(&mut self.incarnation, incarnation.to_owned());
            if !earlier.is_empty() && !self.earlier.contains(&earlier) {
                self.earlier.push(earlier);
            }
            self.earlier.retain(|earlier| earlier != incarnation);
            self.origin = None;
            // That was about the earlier one.
            self.withdrawn = false;
        }
        if let Some(origin) = origin {
            self.origin = Some(origin.to_owned());
        }
    }

    /// Notes that this process is about to do something.
    pub fn add(&mut self, writer: Writer) {
        if !self.writers.contains(&writer) {
            self.writers.push(writer);
        }
    }
}

/// `known.bin`: what a sync down has seen, as hashes. 24 bytes for a task, so that a hundred thousand
/// take little memory and one read. It only saves requests: whatever is not in it is looked at.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Known(Vec<(u128, u64)>);

const MAGIC: &[u8; 8] = b"LHKNOWN1";
const EACH: usize = 24;

impl Known {
    /// These, each once.
    pub fn new(seen: Vec<(u128, u64)>) -> Self {
        let mut seen = seen;
        seen.sort_unstable();
        seen.dedup_by_key(|(unit, _)| *unit);
        Self(seen)
    }

    /// These in the states in which they were seen since, and the others as before.
    #[must_use]
    pub fn with(self, seen: Vec<(u128, u64)>) -> Self {
        let seen = Self::new(seen);
        let mut all: Vec<_> =
            self.0.into_iter().filter(|(unit, _)| seen.get(*unit).is_none()).collect();
        all.extend(seen.0);
        Self::new(all)
    }

    /// The record in these bytes; an empty one where they are damaged.
    pub fn parse(bytes: &[u8]) -> Self {
        let Some(rest) = bytes.strip_prefix(MAGIC) else { return Self::default() };
        let Some((rest, sum)) = rest.split_last_chunk::<8>() else { return Self::default() };
        if rest.len() % EACH != 0 || u64::from_le_bytes(*sum) != hash(rest) {
            return Self::default();
        }
        let seen = rest.chunks_exact(EACH).filter_map(|chunk| {
            let (unit, state) = chunk.split_first_chunk::<16>()?;
            Some((u128::from_le_bytes(*unit), u64::from_le_bytes(state.try_into().ok()?)))
        });
        Self::new(seen.collect())
    }

    /// Its bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(16 + EACH * self.0.len());
        bytes.extend(MAGIC);
        for (unit, state) in &self.0 {
            bytes.extend(unit.to_le_bytes());
            bytes.extend(state.to_le_bytes());
        }
        bytes.extend(hash(&bytes[MAGIC.len()..]).to_le_bytes());
        bytes
    }

    /// The state in which it was seen.
    pub fn get(&self, unit: u128) -> Option<u64> {
        let at = self.0.binary_search_by_key(&unit, |(unit, _)| *unit).ok()?;
        Some(self.0[at].1)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

fn hash(bytes: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64(bytes)
}

/// What stands for a task or bundle in [`Known`], by the key of its work.
pub fn unit_hash(work: &str) -> u128 {
    xxhash_rust::xxh3::xxh3_128(work.as_bytes())
}

/// What stands for the state of one: the version of its work, and what its lease amounts to.
pub fn state_hash(work: &str, lease: &str) -> u64 {
    hash(format!("{work}\0{lease}").as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn full() -> Entry {
        Entry {
            incarnation: "00112233445566778899aabbccddeeff".into(),
            earlier: Vec::new(),
            untold: true,
            chosen: true,
            scheduled: Some("2026-01-31T09:05:00.123456Z".parse().unwrap()),
            origin: Some("\"etag\"".into()),
            told: Some("\"other\"".into()),
            token: 17,
            withdrawn: true,
            writers: vec![Writer {
                intent: Intent::Finish,
                incarnation: String::new(),
                boot_id: "b".into(),
                pid_namespace: "pid:[1]".into(),
                pid: 7,
                start_time: 8,
            }],
            nonce: "ffeeddccbbaa99887766554433221100".into(),
            other: Map::new(),
        }
    }

    #[test]
    fn golden_bytes_are_still_read_and_written() {
        let golden = include_bytes!("../../../../golden/outbox-1.json");
        assert_eq!(Entry::parse(golden), full());
        assert_eq!(String::from_utf8_lossy(&full().to_bytes()), String::from_utf8_lossy(golden));
        let golden = include_bytes!("../../../../golden/known-1.bin");
        let known =
            Known::new(vec![(unit_hash("b"), 2), (unit_hash("a"), state_hash("v", "free"))]);
        assert_eq!(Known::parse(golden), known);
        assert_eq!(known.to_bytes(), golden);
    }

    /// Damage must cost requests, never a task.
    #[test]
    fn damage_is_as_good_as_nothing() {
        assert!(Entry::parse(b"\0\0").untold);
        let mut bytes = Known::new(vec![(1, 2), (3, 4)]).to_bytes();
        bytes[20] ^= 1;
        assert!(Known::parse(&bytes).is_empty());
        assert!(Known::parse(b"").is_empty());
    }

    proptest! {
        #[test]
        fn what_was_seen_is_found(seen in proptest::collection::btree_map(any::<u128>(), any::<u64>(), 0..50)) {
            let known = Known::parse(&Known::new(seen.clone().into_iter().collect()).to_bytes());
            for (unit, state) in &seen {
                prop_assert_eq!(known.get(*unit), Some(*state));
            }
            prop_assert_eq!(known.len(), seen.len());
            let later = known.with(vec![(7, 8), (7, 8), (9, 10)]);
            prop_assert_eq!((later.get(7), later.get(9)), (Some(8), Some(10)));
        }

        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            let _ = (Entry::parse(&bytes), Known::parse(&bytes));
        }
    }
}
