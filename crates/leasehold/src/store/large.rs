//! Objects that are too large for memory, or too many to handle one by one.
//!
//! - [`Source`]: an object that is read in pieces, all of one version;
//! - [`FileBody`]: a file that becomes an object, in parts where the store has them, with the
//!   condition on the last request;
//! - [`Stamp`]: whether something in a directory changed, for the price of a system call.

use std::any::Any;
use std::fmt::Debug;
use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use bytes::Bytes;
use leasehold_protocol::cas::When;
use leasehold_protocol::key::Key;

use super::Store;
use super::settle::{Attempts, retrying};
use super::types::{Meta, Object, Put, Unknown, Write};
use crate::{Error, ErrorKind, Result};

/// What is read or sent at once.
pub const PIECE: usize = 6 << 20;

/// Up to this size an object is read at once when it is opened.
pub(crate) const SMALL: usize = 1 << 20;

/// An object that is read in pieces. All of them are of the version in [`Source::meta`]: if the
/// object is replaced meanwhile, reading goes on or fails, and never mixes.
#[async_trait]
pub trait Source: Debug + Send + Sync {
    /// What the store told when it was opened.
    fn meta(&self) -> &Meta;

    /// The bytes from `offset` on: `len` of them, or as many as there are.
    async fn read_at(&self, offset: u64, len: usize) -> Result<Bytes>;
}

/// An object that is in memory.
#[derive(Debug)]
pub struct Whole(pub Object);

#[async_trait]
impl Source for Whole {
    fn meta(&self) -> &Meta {
        &self.0.meta
    }

    async fn read_at(&self, offset: u64, len: usize) -> Result<Bytes> {
        let body = &self.0.body;
        let from = usize::try_from(offset).unwrap_or(usize::MAX).min(body.len());
        Ok(body.slice(from..from.saturating_add(len).min(body.len())))
    }
}

/// A file whose content is to become an object. It must not change meanwhile.
#[derive(Debug, Clone)]
pub struct FileBody {
    file: Arc<Mutex<File>>,
    len: u64,
}

impl FileBody {
    /// The whole of this file.
    pub fn new(file: File) -> Result<Self> {
        let len = file.metadata().map_err(|error| local("look at", error))?.len();
        Ok(Self { file: Arc::new(Mutex::new(file)), len })
    }

    /// How many bytes it has.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes from `offset` on: `len` of them, or as many as there are.
    pub fn read_at(&self, offset: u64, len: usize) -> Result<Bytes> {
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let left = usize::try_from(self.len.saturating_sub(offset)).unwrap_or(usize::MAX);
        let mut bytes = vec![0; len.min(left)];
        file.seek(SeekFrom::Start(offset))
            .and_then(|_| file.read_exact(&mut bytes))
            .map_err(|error| local("read", error))?;
        Ok(bytes.into())
    }

    /// All of it.
    pub fn read_all(&self) -> Result<Bytes> {
        self.read_at(0, usize::try_from(self.len).unwrap_or(usize::MAX))
    }

    /// Appends all of it to another file.
    #[cfg(unix)]
    pub(super) fn copy_to(&self, to: &mut File) -> std::io::Result<u64> {
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        file.seek(SeekFrom::Start(0))?;
        std::io::copy(&mut *file, to)
    }
}

/// A body that was written where nobody sees it yet. Dropped, it is as if it had never been.
#[derive(Debug)]
pub struct Staged {
    pub(super) key: Key,
    pub(super) len: u64,
    /// What its backend knows of it.
    pub(super) file: Box<dyn Any + Send + Sync>,
}

impl Staged {
    /// The object that it is to become.
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// How many bytes it has.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(super) fn elsewhere(&self) -> Error {
        Error::new(ErrorKind::Internal, "was not staged in this store").at(&self.key)
    }
}

/// A body that was written once and can become many objects. Dropped, those stay.
#[derive(Debug)]
pub struct Draft(Box<dyn Any + Send + Sync>);

impl Draft {
    /// What a backend knows of it.
    pub fn new(known: impl Any + Send + Sync) -> Self {
        Self(Box::new(known))
    }

    /// The same, if it is that backend's.
    pub fn known<T: Any>(&self) -> Option<&T> {
        self.0.downcast_ref()
    }
}

/// A failure of this machine's own disk.
pub(crate) fn local(verb: &str, error: std::io::Error) -> Error {
    let message = format!("cannot {verb} a temporary file of this machine: {error}");
    Error::new(ErrorKind::Unavailable, message).caused_by(error)
}

/// What the file system says of a file or folder: equal stamps mean that nothing has changed, if they
/// are settled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stamp {
    /// It is not there.
    Absent,
    /// It is there.
    Present {
        /// Inode, size and times.
        ids: [i64; 6],
        /// Whether its last change is so long ago that another one must show in the times. A clock
        /// that ticks slowly gives two changes the same time.
        settled: bool,
    },
}

impl Stamp {
    /// Whether a change after it was taken would show.
    pub fn is_settled(&self) -> bool {
        matches!(self, Self::Present { settled: true, .. })
    }

    /// How many bytes there are.
    pub fn size(&self) -> Option<u64> {
        let Self::Present { ids, .. } = self else { return None };
        u64::try_from(ids[1]).ok()
    }

    /// What it says of something that is there, to be written down.
    pub fn text(&self) -> Option<String> {
        let Self::Present { ids, .. } = self else { return None };
        Some(ids.map(|id| format!("{id:x}")).join("-"))
    }

    /// Whether it says the same as an earlier one that can be relied on.
    pub fn confirms(&self, earlier: &Self) -> bool {
        match (self, earlier) {
            (Self::Absent, Self::Absent) => true,
            (Self::Present { ids, .. }, Self::Present { ids: before, settled: true }) => {
                ids == before
            }
            _ => false,
        }
    }
}

impl Store {
    /// Writes a body where nobody sees it yet, where that saves something: for [`Store::publish`].
    pub(crate) async fn stage(&self, key: &Key, body: &Bytes) -> Result<Option<Staged>> {
        self.may_write().await?;
        self.backend().stage(key, body).await
    }

    /// Makes staged bodies objects, each as its write says, with no more flushes than one of them takes. Says
    /// of each, in this order, what became of it. There is nothing to settle: they are this machine's files.
    pub(crate) async fn publish(&self, staged: Vec<(Staged, Write)>) -> Vec<Result<Put>> {
        if let Err(error) = self.may_write().await {
            let (kind, message) = (error.kind(), error.to_string());
            let failed =
                |(staged, _): &(Staged, _)| Err(Error::new(kind, message.clone()).at(&staged.key));
            return staged.iter().map(failed).collect();
        }
        let (mut timely, mut outcomes) = (Vec::new(), Vec::new());
        for (staged, write) in staged {
            match write.is_late(self.env()) {
                true => outcomes.push(Some(write.too_late(&staged.key, None))),
                false => {
                    outcomes.push(None);
                    timely.push((staged, write.when));
                }
            }
        }
        let mut published = self.backend().publish(timely).await.into_iter();
        let missing = || Err(Error::new(ErrorKind::Internal, "nothing became of it"));
        let outcome = |late: Option<_>| late.or_else(|| published.next()).unwrap_or_else(missing);
        outcomes.into_iter().map(outcome).collect()
    }

    /// The object at `key` for reading in pieces, or `None` if it is proven that there is none. One
    /// GET, and one per [`PIECE`] of what is larger than that.
    pub async fn open(&self, key: &Key) -> Result<Option<Box<dyn Source>>> {
        let source = retrying!(self.driver(), self.backend().open(key).await)?;
        Ok(source.map(|source| Box::new(Persistent { source, store: self.clone() }) as _))
    }

    /// Writes an object from a file; its bytes are its proof. One PUT, or one per [`PIECE`] and two
    /// more.
    pub async fn put_file(&self, key: &Key, body: &FileBody, write: Write) -> Result<Put> {
        self.may_write().await?;
        let Write { when, durability, .. } = write.clone();
        let mut attempts = Attempts::new(self.driver());
        let mut doubt: Option<Error> = None;
        loop {
            if write.is_late(self.env()) {
                return write.too_late(key, doubt);
            }
            match self.backend().put_file(key, body, &when, durability).await {
                Ok(put @ (Put::Stored(_) | Put::Unknown(Unknown::NotFlushed(_)))) => {
                    return Ok(put);
                }
                Ok(Put::Refused) if doubt.is_none() => return Ok(Put::Refused),
                Ok(Put::Refused) => {}
                Ok(Put::Contended) if attempts.pause().await => continue,
                Ok(Put::Contended) if doubt.is_none() => return Ok(Put::Contended),
                Ok(Put::Contended) => {}
                Ok(Put::Unknown(unknown)) => doubt = Some(unknown.into_error()),
                Err(error) if attempts.again(&error).await => continue,
                Err(error) if doubt.is_none() => return Err(error),
                Err(_) => {}
            }
            // Some attempt was not answered. What is there now says what became of it.
            let cause = doubt.as_ref().map(ToString::to_string).unwrap_or_default();
            let unknown = || Error::unavailable(cause.clone()).at(key);
            let Ok(there) = self.open(key).await else {
                return Ok(Put::Unknown(Unknown::NoAnswer(unknown())));
            };
            let version = match &there {
                Some(there) if is_same(&**there, body).await? => {
                    return Ok(Put::Stored(there.meta().version.clone()));
                }
                there => there.as_ref().map(|there| &there.meta().version),
            };
            let open = match (&when, version) {
                (When::Any, _) | (When::Absent, None) => true,
                (When::Matches(expected), Some(version)) => expected == version,
                (When::Absent, Some(_)) | (When::Matches(_), None) => false,
            };
            if !open {
                return Ok(Put::Unknown(Unknown::Overtaken(unknown())));
            }
            if !attempts.pause().await {
                return Ok(Put::Unknown(Unknown::NoAnswer(unknown())));
            }
        }
    }

    /// Deletes objects that nobody ever replaces, such as those with a name of their own. Cheaper than
    /// [`Store::delete_many`] in a directory: there is nothing to lock.
    pub async fn discard(&self, keys: &[Key]) -> Result<()> {
        self.may_write().await?;
        retrying!(self.driver(), self.backend().discard(keys).await)
    }

    /// The objects in a folder, if that can be told at once and there are at most `most`, and the
    /// folder's stamp before.
    pub(crate) fn peek(&self, folder: &str, most: usize) -> Option<(Stamp, Vec<Key>)> {
        self.backend().peek(folder, most)
    }

    /// The content of an object without its version, where finding that out costs extra, and its stamp
    /// before. Nothing, and absent, if it is not there.
    pub(crate) fn slurp(&self, key: &Key) -> Option<(Stamp, Bytes)> {
        self.backend().slurp(key)
    }

    /// An object that is opened and not read, if it is a file, and its stamp. It has no version. No source,
    /// and absent, if it is not there.
    pub(crate) fn glance(&self, key: &Key) -> Option<(Stamp, Option<Box<dyn Source>>)> {
        self.backend().glance(key)
    }

    /// What the file system says of this object or folder; `None` where there is no file system.
    pub fn stamp(&self, name: &str) -> Option<Stamp> {
        self.backend().stamp(name)
    }
}

/// A source whose pieces are asked for again when the store does not answer.
#[derive(Debug)]
struct Persistent {
    source: Box<dyn Source>,
    store: Store,
}

#[async_trait]
impl Source for Persistent {
    fn meta(&self) -> &Meta {
        self.source.meta()
    }

    async fn read_at(&self, offset: u64, len: usize) -> Result<Bytes> {
        retrying!(self.store.driver(), self.source.read_at(offset, len).await)
    }
}

async fn is_same(there: &dyn Source, body: &FileBody) -> Result<bool> {
    if there.meta().size != body.len() {
        return Ok(false);
    }
    let mut at = 0;
    while at < body.len() {
        let theirs = there.read_at(at, PIECE).await?;
        let ours = body.read_at(at, PIECE)?;
        if theirs != ours || ours.is_empty() {
            return Ok(false);
        }
        at += ours.len() as u64;
    }
    Ok(true)
}
