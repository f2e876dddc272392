//! The words of compare-and-swap, shared by every decision and every store.

use std::fmt;
use std::sync::Arc;

/// Which state of an object this is: an ETag, a generation, a content hash. Opaque and compared
/// for equality only.
///
/// On most stores equal bytes have equal versions, so a version alone cannot tell "unchanged" from
/// "changed and changed back". The [`Nonce`] in every conditional body is what rules that out.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Version(Arc<str>);

impl Version {
    /// The version with this name, as a store told it.
    pub fn new(text: impl Into<Arc<str>>) -> Self {
        Self(text.into())
    }

    /// Its text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Version({})", self.0)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The state in which an object must be for a write or delete to apply.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum When {
    /// Whatever is there, or nothing.
    Any,
    /// Nothing is there (`If-None-Match: *`).
    Absent,
    /// Exactly this version is there (`If-Match`).
    Matches(Version),
}

/// 128 random bits that mark one write, so that its author recognises it when the answer was lost.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Nonce([u8; 16]);

impl Nonce {
    /// The nonce of these random bytes.
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }
}

impl fmt::Display for Nonce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

impl fmt::Debug for Nonce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
