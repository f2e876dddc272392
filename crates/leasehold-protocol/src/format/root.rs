//! `leasehold.json` at the root of a store: which binaries may write here.
//!
//! A fleet is upgraded node by node. A new layout that old binaries would damage is announced as a
//! *required feature*; a binary that does not know one reads, but refuses to write.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::cas::Nonce;

/// The layout that this code writes.
pub const FORMAT: u32 = 1;

/// The features that this code knows. None so far: format 1 is the first.
pub const KNOWN_FEATURES: &[&str] = &[];

/// Where the record stands, below the store's prefix.
pub const ROOT_KEY: &str = "leasehold.json";

/// What is known to be missing or broken in the store under us.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum Limit {
    /// `DELETE If-Match` is ignored, or loses races: it is never used.
    ConditionalDelete,
    /// Listings are not in byte order: a key is an entry point, never a cursor.
    ListOrder,
    /// Something that a later version found. Kept when we rewrite the record.
    Other(String),
}

impl From<String> for Limit {
    fn from(text: String) -> Self {
        match text.as_str() {
            "conditional-delete" => Self::ConditionalDelete,
            "list-order" => Self::ListOrder,
            _ => Self::Other(text),
        }
    }
}

impl From<Limit> for String {
    fn from(limit: Limit) -> Self {
        match limit {
            Limit::ConditionalDelete => "conditional-delete".to_owned(),
            Limit::ListOrder => "list-order".to_owned(),
            Limit::Other(text) => text,
        }
    }
}

/// The content of `leasehold.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Root {
    /// The layout's version.
    pub format: u32,
    /// Features that a writer must know.
    #[serde(default)]
    pub requires: BTreeSet<String>,
    /// What the store cannot do, as found when it was made or by the doctor since.
    #[serde(default)]
    pub limits: BTreeSet<Limit>,
    /// Set by the doctor when the store's conditional writes proved broken: nobody may write.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unsafe_because: Option<String>,
    /// Marks the write that made this record.
    #[serde(default)]
    pub nonce: String,
    /// What later versions added: kept when we rewrite the record.
    #[serde(flatten)]
    pub other: serde_json::Map<String, serde_json::Value>,
}

/// Why this binary must not write to the store.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RootError {
    /// Not our record, or damaged.
    #[error("{ROOT_KEY} is not a Leasehold root record ({0}); is this the right prefix?")]
    Unreadable(String),
    /// A newer layout.
    #[error(
        "the store has format {0}, this binary writes format {FORMAT}: upgrade it to write here"
    )]
    Format(u32),
    /// A feature that this binary does not know.
    #[error("the store requires {0}, which this binary does not know: upgrade it to write here")]
    Features(String),
    /// The doctor found it out.
    #[error("the store is marked unsafe: {0}; run `leasehold doctor` again once that is mended")]
    Unsafe(String),
}

impl Root {
    /// A fresh record for a store with these limits.
    pub fn new(limits: BTreeSet<Limit>, nonce: Nonce) -> Self {
        Self {
            format: FORMAT,
            requires: BTreeSet::new(),
            limits,
            unsafe_because: None,
            nonce: nonce.to_string(),
            other: serde_json::Map::new(),
        }
    }

    /// The record in these bytes.
    pub fn parse(bytes: &[u8]) -> Result<Self, RootError> {
        serde_json::from_slice(bytes).map_err(|error| RootError::Unreadable(error.to_string()))
    }

    /// The record's bytes: JSON with a final newline, for people who open it.
    pub fn to_bytes(&self) -> Vec<u8> {
        // Maps with text keys and plain values always serialise.
        let mut bytes = serde_json::to_vec_pretty(self).unwrap_or_default();
        bytes.push(b'\n');
        bytes
    }

    /// Whether this binary may write to the store.
    pub fn may_write(&self) -> Result<(), RootError> {
        if self.format != FORMAT {
            return Err(RootError::Format(self.format));
        }
        let unknown: Vec<&str> = self
            .requires
            .iter()
            .map(String::as_str)
            .filter(|feature| !KNOWN_FEATURES.contains(feature))
            .collect();
        if !unknown.is_empty() {
            return Err(RootError::Features(unknown.join(", ")));
        }
        if let Some(reason) = &self.unsafe_because {
            return Err(RootError::Unsafe(reason.clone()));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fresh() -> Root {
        Root::new([Limit::ConditionalDelete].into(), Nonce::from_bytes([1; 16]))
    }

    #[test]
    fn golden_bytes_are_still_read_and_written() {
        let golden = include_bytes!("../../../../golden/leasehold-1.json");
        assert_eq!(Root::parse(golden), Ok(fresh()));
        assert_eq!(fresh().to_bytes(), golden);
    }

    #[test]
    fn unknown_features_and_formats_forbid_writing() {
        let mut root = fresh();
        assert_eq!(root.may_write(), Ok(()));
        root.requires = ["wide-shards".to_owned()].into();
        assert_eq!(root.may_write(), Err(RootError::Features("wide-shards".into())));
        root.format = 2;
        assert_eq!(root.may_write(), Err(RootError::Format(2)));
    }

    #[test]
    fn unknown_fields_and_limits_survive_a_rewrite() {
        let text = br#"{"format":1,"requires":[],"limits":["no-such-thing"],"later":{"x":1}}"#;
        let root = Root::parse(text).unwrap();
        let again = Root::parse(&root.to_bytes()).unwrap();
        assert_eq!(again.limits, [Limit::Other("no-such-thing".into())].into());
        assert_eq!(again.other["later"]["x"], 1);
    }

    #[test]
    fn damage_is_reported_and_not_guessed() {
        for bad in [&b""[..], b"{}", b"[]", b"{\"format\":\"1\"}", b"\xff"] {
            assert!(matches!(Root::parse(bad), Err(RootError::Unreadable(_))));
        }
    }
}
