//! One error type. Its kind says what the caller can do; its text says what happened, to which
//! key, and what to do about it.
//!
//! Contention is never an error: [`Put`](crate::Put) and [`Delete`](crate::Delete) are values.

use std::fmt;

use leasehold_protocol::format::root::RootError;
use leasehold_protocol::key::{Key, KeyError};

/// What the caller can do about an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// What was held is held no longer: stop the work that it guarded.
    Lost,
    /// Somebody else holds it, all the time that was given: wait longer, or ask for it.
    Held,
    /// The store did not answer, or not in time: try again later.
    Unavailable,
    /// The input or the configuration is wrong: correct it.
    Invalid,
    /// There is nothing of that name: check it, or make it first.
    NotFound,
    /// The credentials or permissions do not allow it: get others.
    Denied,
    /// Stored bytes are not what they should be: look at them.
    Data,
    /// This store, or this binary, cannot do it: use another.
    Unsupported,
    /// A bug in Leasehold: report it.
    Internal,
}

/// What went wrong.
pub struct Error {
    kind: ErrorKind,
    message: String,
    key: Option<Key>,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    /// An error of this kind.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), key: None, source: None }
    }

    /// The same, about this key.
    #[must_use]
    pub fn at(mut self, key: &Key) -> Self {
        self.key = Some(key.clone());
        self
    }

    /// The same, caused by `source`.
    #[must_use]
    pub fn caused_by(
        mut self,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        self.source = Some(source.into());
        self
    }

    /// What the caller can do.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The key it happened to, where it was about one.
    pub fn key(&self) -> Option<&Key> {
        self.key.as_ref()
    }

    /// What happened, without the key.
    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    /// Whether it is about one object, and not about the store or us.
    pub(crate) fn is_about_data(&self) -> bool {
        matches!(self.kind, ErrorKind::Data | ErrorKind::Invalid | ErrorKind::NotFound)
    }

    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Invalid, message)
    }

    pub(crate) fn unavailable(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Unavailable, message)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(key) = &self.key {
            write!(f, "{key}: ")?;
        }
        f.write_str(&self.message)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {self}", self.kind)?;
        if let Some(source) = &self.source {
            write!(f, " ({source})")?;
        }
        Ok(())
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}

impl From<KeyError> for Error {
    fn from(error: KeyError) -> Self {
        Self::invalid(error.to_string())
    }
}

impl From<RootError> for Error {
    fn from(error: RootError) -> Self {
        let kind = match error {
            RootError::Unreadable(_) => ErrorKind::Data,
            _ => ErrorKind::Unsupported,
        };
        Self::new(kind, error.to_string())
    }
}
