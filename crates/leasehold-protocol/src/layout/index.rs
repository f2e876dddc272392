//! The keys of an index.
//!
//! ```text
//! indexes/{index}/datapackage.json             fields, types, settings
//! indexes/{index}/inbox/{xx}/{hash}-{nonce}.usv     one pending record of shard xx
//! indexes/{index}/inbox/{xx}/-{count}-{nonce}.usv   a batch of them
//! indexes/{index}/{key}.usv                    the flat inbox: any tool may drop a record here
//! indexes/{index}/shards/{xx}.usv              shard xx, sorted by key
//! indexes/{index}/shards/{xx}.lock             its advisory lease
//! indexes/{index}/shards/{xx}.json             its statistics
//! indexes/{index}/quarantine/{id}.usv, .json   what could not be read, and why
//! ```
//!
//! Batches sort before single records, and the names of single records begin with the hash of their
//! key: whoever wants one key lists two short ranges of a long inbox.

use crate::cas::Nonce;
use crate::key::{Key, KeyError, decode_segment, encode_segment};
use crate::shard::{KeyHash, Shard};

/// What all indexes begin with.
pub const INDEXES: &str = "indexes/";

/// Why a text cannot name an index.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} cannot be the name of an index: up to 64 letters, digits, '-', '_' and '.', beginning \
     with a letter or digit"
)]
pub struct NameError(String);

/// The keys of one index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    name: String,
    base: String,
}

/// What an inbox object's name says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pending<'a> {
    /// One record whose key's hash begins so.
    Single {
        /// 16 hexadecimal digits.
        hash: &'a str,
    },
    /// This many records.
    Batch {
        /// How many.
        count: u64,
    },
}

impl Layout {
    /// Of the index with this name.
    pub fn new(name: &str) -> Result<Self, NameError> {
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        let starts = name.starts_with(|c: char| c.is_ascii_alphanumeric());
        if !starts || name.len() > 64 || !name.chars().all(plain) || name.ends_with('.') {
            return Err(NameError(name.to_owned()));
        }
        Ok(Self { name: name.to_owned(), base: format!("{INDEXES}{name}/") })
    }

    /// The index's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What all its keys begin with.
    pub fn base(&self) -> &str {
        &self.base
    }

    fn key(&self, rest: impl std::fmt::Display) -> Key {
        // The name is checked, shards are hexadecimal, nonces too.
        Key::new(format!("{}{rest}", self.base)).expect("a key of our own making")
    }

    /// Its description.
    pub fn datapackage(&self) -> Key {
        self.key("datapackage.json")
    }

    /// What the keys of the whole inbox begin with.
    pub fn inbox(&self) -> String {
        format!("{}inbox/", self.base)
    }

    /// What the keys of a shard's inbox begin with.
    pub fn inbox_of(&self, shard: Shard) -> String {
        format!("{}inbox/{shard}/", self.base)
    }

    /// A new pending record.
    pub fn single(&self, hash: &KeyHash, shard: Shard, nonce: Nonce) -> Key {
        self.key(format_args!("inbox/{shard}/{}-{nonce}.usv", hash.short()))
    }

    /// A new batch.
    pub fn batch(&self, shard: Shard, count: usize, nonce: Nonce) -> Key {
        self.key(format_args!("inbox/{shard}/-{count}-{nonce}.usv"))
    }

    /// The shard that an inbox object belongs to and what its name says, or `None` for what is not
    /// an inbox object. Other tools may give other names: those count as batches of any size.
    pub fn pending<'a>(&self, key: &'a str) -> Option<(Shard, Pending<'a>)> {
        let rest = key.strip_prefix(&self.base)?.strip_prefix("inbox/")?;
        let (shard, name) = rest.split_once('/')?;
        let shard: Shard = shard.parse().ok()?;
        let name = name.strip_suffix(".usv")?;
        if let Some((hash, _)) = name.split_once('-')
            && hash.len() == 16
            && hash.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
        {
            return Some((shard, Pending::Single { hash }));
        }
        let count = name.strip_prefix('-').and_then(|rest| rest.split_once('-')?.0.parse().ok());
        Some((shard, Pending::Batch { count: count.unwrap_or(1) }))
    }

    /// Whether an inbox object has a name that we gave it: used once, never written again, and its
    /// records were checked before. What other tools name may be overwritten by them at any time.
    pub fn is_ours(&self, key: &str) -> bool {
        let hexadecimal = |text: &str, length: usize| {
            text.len() == length && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
        };
        let name = key.rsplit('/').next().and_then(|name| name.strip_suffix(".usv"));
        let Some((what, nonce)) = name.and_then(|name| name.rsplit_once('-')) else { return false };
        let known = match what.strip_prefix('-') {
            Some(count) => !count.is_empty() && count.bytes().all(|byte| byte.is_ascii_digit()),
            None => hexadecimal(what, 16),
        };
        known && hexadecimal(nonce, 32)
    }

    /// The shard behind a common prefix of the inbox.
    pub fn shard_of_prefix(&self, prefix: &str) -> Option<Shard> {
        prefix.strip_prefix(&self.inbox())?.strip_suffix('/')?.parse().ok()
    }

    /// The same as [`Layout::shard`], as text.
    pub fn shard_text(&self, shard: Shard) -> String {
        format!("{}shards/{shard}.usv", self.base)
    }

    /// The same as [`Layout::flat`], as text and unchecked: to look whether it is there at all.
    pub fn flat_text(&self, key: &str) -> String {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_');
        match key.bytes().all(plain) && !key.ends_with('.') {
            true => [&self.base, key, ".usv"].concat(),
            false => format!("{}{}.usv", self.base, encode_segment(key)),
        }
    }

    /// Where the flat inbox holds this key.
    pub fn flat(&self, key: &str) -> Result<Key, KeyError> {
        Key::new(format!("{}{}.usv", self.base, encode_segment(key)))
    }

    /// The key that a file of the flat inbox is named after.
    pub fn flat_name(&self, key: &str) -> Option<String> {
        let name = key.strip_prefix(&self.base)?.strip_suffix(".usv")?;
        if name.contains('/') || name.is_empty() {
            return None;
        }
        // A name that our encoding would not give, `50%.usv`, is meant as it stands.
        Some(decode_segment(name).unwrap_or_else(|| name.to_owned()))
    }

    /// A shard's rows.
    pub fn shard(&self, shard: Shard) -> Key {
        self.key(format_args!("shards/{shard}.usv"))
    }

    /// What the keys of shards, locks and statistics begin with.
    pub fn shards(&self) -> String {
        format!("{}shards/", self.base)
    }

    /// The shard and the kind of file, `usv`, `lock` or `json`.
    pub fn parse_shard<'a>(&self, key: &'a str) -> Option<(Shard, &'a str)> {
        let (shard, kind) =
            key.strip_prefix(&self.base)?.strip_prefix("shards/")?.split_once('.')?;
        Some((shard.parse().ok()?, kind))
    }

    /// A shard's advisory lease.
    pub fn lock(&self, shard: Shard) -> Key {
        self.key(format_args!("shards/{shard}.lock"))
    }

    /// A shard's statistics.
    pub fn statistics(&self, shard: Shard) -> Key {
        self.key(format_args!("shards/{shard}.json"))
    }

    /// What the keys of the quarantine begin with.
    pub fn quarantine(&self) -> String {
        format!("{}quarantine/", self.base)
    }

    /// The rows that were put into quarantine under this name. The name is made by [`quarantine_id`].
    pub fn quarantined(&self, id: &str) -> Result<Key, KeyError> {
        Key::new(format!("{}quarantine/{}.usv", self.base, encode_segment(id)))
    }

    /// Why they were.
    pub fn quarantine_reason(&self, id: &str) -> Result<Key, KeyError> {
        Key::new(format!("{}quarantine/{}.json", self.base, encode_segment(id)))
    }

    /// The name under which a reason stands.
    pub fn parse_quarantine(&self, key: &str) -> Option<String> {
        let name = key.strip_prefix(&self.base)?.strip_prefix("quarantine/")?;
        decode_segment(name.strip_suffix(".json")?)
    }
}

/// A name for what a source and these rows of it are put into quarantine under: the same each time,
/// so that a compiler that starts again writes the same objects again.
pub fn quarantine_id(shard: Shard, source: &str, rows: &[u8]) -> String {
    let mut bytes = source.as_bytes().to_vec();
    bytes.push(0);
    bytes.extend_from_slice(rows);
    format!("{shard}-{:032x}", xxhash_rust::xxh3::xxh3_128(&bytes))
}

/// The index that a key of `indexes/{index}/…` belongs to.
pub fn index_of(key: &str) -> Option<&str> {
    Some(key.strip_prefix(INDEXES)?.split_once('/')?.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shard::Width;
    use proptest::prelude::*;

    fn layout() -> Layout {
        Layout::new("domains").unwrap()
    }

    #[test]
    fn keys_are_those_of_the_seed() {
        let (layout, shard) = (layout(), "5e".parse().unwrap());
        assert_eq!(layout.shard(shard).as_str(), "indexes/domains/shards/5e.usv");
        assert_eq!(layout.lock(shard).as_str(), "indexes/domains/shards/5e.lock");
        assert_eq!(layout.flat("example.com").unwrap().as_str(), "indexes/domains/example.com.usv");
        assert_eq!(layout.datapackage().as_str(), "indexes/domains/datapackage.json");
        assert_eq!(layout.parse_shard("indexes/domains/shards/5e.lock"), Some((shard, "lock")));
        assert_eq!(index_of("indexes/domains/shards/5e.lock"), Some("domains"));
        assert_eq!(index_of("queues/q/x"), None);
    }

    #[test]
    fn names_of_inbox_objects_say_what_is_in_them() {
        let layout = layout();
        let nonce = Nonce::from_bytes([7; 16]);
        let hash = KeyHash::of("example.com");
        let shard = hash.shard(Width::USUAL);
        let single = layout.single(&hash, shard, nonce);
        assert!(single.as_str().starts_with("indexes/domains/inbox/a3/a379a6f6eeafb9a5-0707"));
        let said = layout.pending(single.as_str());
        assert_eq!(said, Some((shard, Pending::Single { hash: &hash.short() })));
        let batch = layout.batch(shard, 17, nonce);
        assert!(batch < single, "batches sort first");
        assert!(batch.as_str().starts_with("indexes/domains/inbox/a3/-17-0707"));
        assert_eq!(layout.pending(batch.as_str()), Some((shard, Pending::Batch { count: 17 })));
        let foreign = "indexes/domains/inbox/a3/anything.usv";
        assert_eq!(layout.pending(foreign), Some((shard, Pending::Batch { count: 1 })));
        assert!(layout.is_ours(single.as_str()) && layout.is_ours(batch.as_str()));
        for other in [foreign, "a379a6f6eeafb9a5-1.usv", "-x-0707.usv", "--.usv", "-.usv", ""] {
            assert!(!layout.is_ours(other), "{other}");
        }
        for other in [
            "indexes/domains/inbox/a3/x.tmp",
            "indexes/domains/inbox/x.usv",
            "indexes/other/inbox/a3/x.usv",
        ] {
            assert_eq!(layout.pending(other), None, "{other}");
        }
        assert_eq!(layout.shard_of_prefix("indexes/domains/inbox/a3/"), Some(shard));
        assert_eq!(layout.shard_of_prefix("indexes/domains/inbox/zz/"), None);
    }

    /// FIELD.md row 18: no key leaves its prefix.
    #[test]
    fn no_name_leads_out_of_the_index() {
        for bad in ["", "a/b", "..", ".hidden", "a b", "x.", "-x", &"x".repeat(65)] {
            assert!(Layout::new(bad).is_err(), "{bad:?}");
        }
        let layout = layout();
        assert_eq!(layout.flat("../x").unwrap().as_str(), "indexes/domains/..%2Fx.usv");
        assert_eq!(layout.flat_name("indexes/domains/shards/5e.usv"), None);
        assert_eq!(layout.flat_name("indexes/domains/datapackage.json"), None);
    }

    proptest! {
        #[test]
        fn every_key_has_a_flat_name_and_back(key in ".{1,80}") {
            let layout = layout();
            let flat = layout.flat(&key).unwrap();
            prop_assert_eq!(layout.flat_name(flat.as_str()), Some(key));
            prop_assert_eq!(flat.as_str().matches('/').count(), 2);
            prop_assert_eq!(layout.flat_text(&layout.flat_name(flat.as_str()).unwrap()), flat.as_str());
        }

        #[test]
        fn no_input_panics(text in any::<String>()) {
            let layout = layout();
            for key in [text.clone(), format!("indexes/domains/{text}"), format!("indexes/domains/inbox/a3/{text}")] {
                let _ = (layout.pending(&key), layout.flat_name(&key), layout.parse_shard(&key));
                let _ = (layout.parse_quarantine(&key), index_of(&key));
            }
        }
    }
}
