//! What an operation came to, from what was answered.

use std::sync::{Mutex, PoisonError};

use leasehold_protocol::cas::{Version, When};
use leasehold_protocol::key::Key;
use leasehold_protocol::time::StoreTime;
use opendal::Metadata;

use super::answer::{Answer, Condition};
use super::transport::Answered;
use crate::store::types::{Delete, Get, Meta, Put, Unknown};
use crate::{Error, ErrorKind, Result};

pub fn condition_of(when: &When) -> Condition {
    match when {
        When::Any => Condition::None,
        When::Absent => Condition::Absent,
        When::Matches(_) => Condition::Matches,
    }
}

/// The condition value that a version stands for on the wire.
pub fn etag(version: &Version) -> String {
    format!("\"{version}\"")
}

pub fn modified(meta: &Metadata) -> Option<StoreTime> {
    let time = meta.last_modified()?;
    let time = std::time::SystemTime::from(time);
    let micros = time.duration_since(std::time::UNIX_EPOCH).ok()?.as_micros();
    Some(StoreTime::from_micros(i64::try_from(micros).ok()?))
}

/// What a failed operation means, from what the transport saw. OpenDAL's own view of it is only
/// used where no answer was seen at all: it failed before sending, over credentials for example.
pub fn failed(answered: &Mutex<Answered>, error: &opendal::Error, condition: Condition) -> Answer {
    let mut answered = answered.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(error) = answered.unsent.take() {
        return Answer::Failed(error);
    }
    let seen = &answered.seen;
    if seen.status == 0 && seen.failure.is_empty() {
        let kind = match error.kind() {
            opendal::ErrorKind::ConfigInvalid => ErrorKind::Invalid,
            opendal::ErrorKind::PermissionDenied => ErrorKind::Denied,
            opendal::ErrorKind::Unsupported => ErrorKind::Unsupported,
            _ => ErrorKind::Denied,
        };
        return Answer::Failed(unsent(&answered, kind, &first_line(error)));
    }
    seen.answer(condition)
}

/// Why nothing was sent. That credentials could not be fetched just now is not the same as having none.
pub fn unsent(answered: &Answered, kind: ErrorKind, why: &str) -> Error {
    match &answered.side_failure {
        Some(failure) => Error::unavailable(format!("no credentials: {failure}")),
        None => {
            let what = "the request could not be sent (are there credentials?)";
            Error::new(kind, format!("{what}: {why}"))
        }
    }
}

pub fn first_line(error: &opendal::Error) -> String {
    let mut text = error.message().to_owned();
    let mut source = std::error::Error::source(error);
    while let Some(inner) = source {
        text = format!("{text}: {inner}");
        source = inner.source();
    }
    text.lines().next().unwrap_or_default().to_owned()
}

pub fn tells_nothing(key: &Key) -> Error {
    Error::new(ErrorKind::Unsupported, "the store tells nothing of the object").at(key)
}

/// For reads: everything that is not an answer is an error.
pub fn read_error(answer: Answer, key: Option<&Key>) -> Error {
    let error = match answer {
        Answer::Unanswered(error) | Answer::Failed(error) => error,
        Answer::Contended => Error::unavailable("the store is busy with this object"),
        other => Error::new(ErrorKind::Internal, format!("unexpected answer to a read: {other:?}")),
    };
    match key {
        Some(key) => error.at(key),
        None => error,
    }
}

/// What a read came to that was no success.
pub fn not_got(answer: Answer, conditional: bool, key: &Key) -> Result<Get> {
    match answer {
        Answer::Missing => Ok(Get::Absent),
        Answer::NotModified => Ok(Get::Unchanged),
        Answer::Refused if conditional => Ok(Get::Unchanged),
        other => Err(read_error(other, Some(key))),
    }
}

/// The same of a write.
pub fn not_stored(answer: Answer, key: &Key) -> Result<Put> {
    match answer {
        Answer::Refused => Ok(Put::Refused),
        Answer::Contended => Ok(Put::Contended),
        Answer::Unanswered(error) => Ok(Put::Unknown(Unknown::NoAnswer(error.at(key)))),
        Answer::Missing | Answer::NotModified => Err(Error::invalid(
            "the bucket does not exist: check its name, the region and the endpoint",
        )),
        Answer::Failed(error) => Err(error.at(key)),
    }
}

/// The same of a delete.
pub fn not_deleted(answer: Answer, key: &Key) -> Result<Delete> {
    match answer {
        Answer::Refused => Ok(Delete::Refused),
        Answer::Missing | Answer::NotModified => Ok(Delete::Deleted),
        Answer::Contended => Ok(Delete::Contended),
        Answer::Unanswered(error) => Ok(Delete::Unknown(Unknown::NoAnswer(error.at(key)))),
        Answer::Failed(error) => Err(error.at(key)),
    }
}

/// What an answer tells of an object.
pub fn meta_of(
    version: Option<Version>,
    modified: Option<StoreTime>,
    size: u64,
    date: Option<StoreTime>,
    key: &Key,
) -> Result<Meta> {
    let untold = |what: &str| Error::new(ErrorKind::Unsupported, what).at(key);
    let modified = modified.ok_or_else(|| untold("the store does not tell when it was written"))?;
    let version = version.ok_or_else(|| untold("the store does not tell the object's version"))?;
    // Without a Date there is no store clock; the doctor says so. An age of zero is the safe side:
    // nothing looks stale.
    let now = date.unwrap_or(modified);
    Ok(Meta { version, modified, now, size })
}

/// What a write came to that was carried out. In which version? Whoever asks finds our bytes, or why
/// nobody can be told.
pub fn stored(version: Option<Version>, key: &Key) -> Put {
    match version {
        Some(version) => Put::Stored(version),
        None => {
            let error = Error::unavailable("the store does not tell the new version");
            Put::Unknown(Unknown::NoAnswer(error.at(key)))
        }
    }
}
