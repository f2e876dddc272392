//! What goes into a store and what comes out.

use bytes::Bytes;
use leasehold_protocol::cas::{Version, When};
use leasehold_protocol::key::{self, Key};
use leasehold_protocol::settle::Proof;
use leasehold_protocol::time::StoreTime;

use crate::env::{BootTime, Env};
use crate::{Error, Result};

/// What a store tells of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Meta {
    /// Which state of the object this is.
    pub version: Version,
    /// When it was written, by the store's clock. A bucket rounds it down to the second.
    pub modified: StoreTime,
    /// The store's own time of this very response. `now.since(modified)` is the object's age
    /// without any other clock in it.
    pub now: StoreTime,
    /// Its length in bytes.
    pub size: u64,
}

impl Meta {
    /// Tells this write of the object from another one with the same bytes, which may have the same
    /// version: unless they came within a second of each other, on a bucket.
    pub(crate) fn mark(&self) -> String {
        format!("{}@{}", self.version.as_str(), self.modified.as_micros())
    }
}

/// An object: its content and what the store tells of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Object {
    /// The content.
    pub body: Bytes,
    /// The rest.
    pub meta: Meta,
}

/// What a read found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Get {
    /// This object.
    Found(Object),
    /// The version that the caller knows already; no body was transferred.
    Unchanged,
    /// Nothing.
    Absent,
}

/// What became of a write.
#[derive(Debug)]
#[must_use = "a write can be refused"]
pub enum Put {
    /// It applied, and this is its version.
    Stored(Version),
    /// It did not apply, certainly: somebody else's object is there, or the matched one is gone.
    Refused,
    /// It did not apply: others were writing at the same time. Try again.
    Contended,
    /// It may have applied or not, or may still do so.
    Unknown(Unknown),
}

/// What became of a delete.
#[derive(Debug)]
#[must_use = "a delete can be refused"]
pub enum Delete {
    /// The object is gone. Without a condition that includes "it was not there".
    Deleted,
    /// The matched version was not there.
    Refused,
    /// Nothing was deleted: others were writing at the same time. Try again.
    Contended,
    /// It may have applied or not, or may still do so.
    Unknown(Unknown),
}

/// Why nobody knows what became of a request.
#[derive(Debug)]
pub enum Unknown {
    /// The answer did not arrive, and reading did not tell either.
    NoAnswer(Error),
    /// The answer did not arrive, and something else is there now. Ours applied before that, or
    /// never: whoever wants to hold what is there does not, and whoever repeats it may do it twice.
    Overtaken(Error),
    /// It applied, but flushing it to disk failed: a power loss may undo it. Reading it back
    /// proves nothing, and a second flush may succeed without having written anything.
    NotFlushed(Error),
}

impl Unknown {
    /// What happened.
    pub fn error(&self) -> &Error {
        match self {
            Self::NoAnswer(error) | Self::Overtaken(error) | Self::NotFlushed(error) => error,
        }
    }

    /// The same, by value.
    pub fn into_error(self) -> Error {
        match self {
            Self::NoAnswer(error) | Self::Overtaken(error) | Self::NotFlushed(error) => error,
        }
    }
}

/// What a power loss may do to a write. Buckets make everything durable; where requests have to wait, they
/// are sent `Volatile` ones first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Durability {
    /// On disk before success is reported. Concurrent durable writes share their flushes.
    #[default]
    Durable,
    /// Its content is on disk before it becomes visible: after a power loss the old object or the
    /// new one is there, whole. Half the flushes of `Durable`.
    Ordered,
    /// Not flushed at all, and possibly empty after a power loss. For what a reboot makes worthless
    /// anyway, like heartbeats.
    Volatile,
}

/// How to write.
#[derive(Debug, Clone)]
pub struct Write {
    pub(crate) when: When,
    pub(crate) proof: Proof,
    pub(crate) durability: Durability,
    /// Not to be sent after this.
    pub(crate) until: Option<BootTime>,
}

impl Write {
    /// Replaces whatever is there. Durable.
    pub fn any() -> Self {
        Self::when(When::Any, Proof::Bytes)
    }

    /// Applies only in this state of the object; `proof` is how the write is recognised should its
    /// answer be lost. Durable.
    pub fn when(when: When, proof: Proof) -> Self {
        Self { when, proof, durability: Durability::Durable, until: None }
    }

    /// The same with another durability.
    #[must_use]
    pub fn durability(mut self, durability: Durability) -> Self {
        self.durability = durability;
        self
    }

    /// The same, but neither sent nor sent again after this moment: for what is computed from an object
    /// that may by then have become the same again, byte by byte, and mean something else.
    #[must_use]
    pub fn until(mut self, until: BootTime) -> Self {
        self.until = Some(until);
        self
    }

    pub(crate) fn is_late(&self, env: &Env) -> bool {
        self.until.is_some_and(|until| env.clock().boot() > until)
    }

    /// What becomes of it then: nothing, or nobody knows if it was sent before.
    pub(crate) fn too_late(&self, key: &Key, doubt: Option<Error>) -> Result<Put> {
        match doubt {
            None => Err(Error::unavailable("too much time has passed to write this").at(key)),
            Some(doubt) => Ok(Put::Unknown(Unknown::NoAnswer(doubt))),
        }
    }
}

/// How much a listing tells of each object. A bucket always tells all, at no extra cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Detail {
    /// Keys.
    #[default]
    Keys,
    /// Sizes and times too: in a directory, one more system call each.
    Stat,
    /// Versions too: in a directory, each file is read.
    Version,
}

/// Keys per page where nothing else is asked for: what S3 gives at most.
pub const PAGE: usize = 1000;

/// Which keys to list.
#[derive(Debug, Clone)]
pub struct List {
    pub(crate) prefix: String,
    pub(crate) start_after: Option<String>,
    pub(crate) delimited: bool,
    pub(crate) limit: Option<usize>,
    pub(crate) page: usize,
    pub(crate) detail: Detail,
    pub(crate) ordered: bool,
    pub(crate) loose: bool,
}

impl List {
    /// Everything whose key begins with `prefix`.
    pub fn prefix(prefix: impl Into<String>) -> Result<Self> {
        let prefix = prefix.into();
        key::check_prefix(&prefix)
            .map_err(|error| Error::invalid(format!("prefix {prefix:?}: {error}")))?;
        Ok(Self {
            prefix,
            start_after: None,
            delimited: false,
            limit: None,
            page: PAGE,
            detail: Detail::Keys,
            ordered: true,
            loose: false,
        })
    }

    /// What the keys begin with.
    pub fn prefix_text(&self) -> &str {
        &self.prefix
    }

    /// Only keys after this one. An entry point, not a cursor: some stores list out of order, so
    /// whoever wants all the keys goes on with the same listing's next page.
    #[must_use]
    pub fn start_after(mut self, key: impl Into<String>) -> Self {
        self.start_after = Some(key.into());
        self
    }

    /// Folds everything behind the next `/` into one common prefix.
    #[must_use]
    pub fn delimited(mut self) -> Self {
        self.delimited = true;
        self
    }

    /// At most this many keys and prefixes altogether.
    #[must_use]
    pub fn limit(mut self, limit: usize) -> Self {
        self.limit = Some(limit);
        self
    }

    /// At most this many keys and prefixes per page, 1 to 1,000.
    #[must_use]
    pub fn page_size(mut self, page: usize) -> Self {
        self.page = page.clamp(1, PAGE);
        self
    }

    /// How much to tell of each object.
    #[must_use]
    pub fn detail(mut self, detail: Detail) -> Self {
        self.detail = detail;
        self
    }

    /// In whatever order is cheapest. In a directory the first page then costs a page, however
    /// many entries there are; in order, the names of one directory are read first.
    #[must_use]
    pub fn unordered(mut self) -> Self {
        self.ordered = false;
        self
    }

    /// With prefixes that may turn out to hold nothing. In a directory that saves opening each
    /// folder.
    #[must_use]
    pub fn loose(mut self) -> Self {
        self.loose = true;
        self
    }

    /// How many keys and prefixes a page has at most.
    pub fn most_per_page(&self) -> usize {
        self.page
    }

    /// Whether `key` is one of those asked for, as far as prefix and entry point go.
    pub fn includes(&self, key: &str) -> bool {
        key.starts_with(&self.prefix) && self.start_after.as_deref().is_none_or(|after| key > after)
    }

    /// The common prefix that `key` is folded into, if any: up to the first `/` behind the prefix.
    pub fn fold<'k>(&self, key: &'k str) -> Option<&'k str> {
        if !self.delimited {
            return None;
        }
        let rest = key.get(self.prefix.len()..)?;
        rest.find('/').map(|slash| &key[..self.prefix.len() + slash + 1])
    }
}

/// An object as a listing shows it. What a directory was not asked for is `None`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Its name.
    pub key: Key,
    /// Its length in bytes.
    pub size: Option<u64>,
    /// When it was written, by the store's clock.
    pub modified: Option<StoreTime>,
    /// Which state it is in.
    pub version: Option<Version>,
}

/// A page of a listing.
#[derive(Debug, Clone, Default)]
pub struct Page {
    /// Objects.
    pub entries: Vec<Entry>,
    /// Common prefixes, each ending with `/`, where the listing is delimited.
    pub prefixes: Vec<String>,
    /// The store's time of this page.
    pub now: Option<StoreTime>,
    /// How many files were passed over because no key has their name, or they are none: a directory only.
    pub unnamed: u64,
}

impl Page {
    /// How many objects and prefixes it holds.
    pub fn len(&self) -> usize {
        self.entries.len() + self.prefixes.len()
    }

    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
