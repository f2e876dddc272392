//! What a kind of store implements: one request per call, no retries, no guesses.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use leasehold_protocol::cas::{Version, When};
use leasehold_protocol::key::Key;
use leasehold_protocol::time::StoreTime;

use super::large::{Draft, FileBody, Source, Staged, Stamp, Whole};
use super::meter::Meter;
use super::types::{Delete, Durability, Get, List, Meta, Page, Put};
use super::watch::Watch;
use crate::Result;
use crate::env::BootTime;

/// What sort of store it is: decides prices and defaults, never correctness.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A directory of this machine.
    Directory,
    /// This process' memory.
    Memory,
    /// Amazon S3 or a compatible store.
    S3,
    /// Google Cloud Storage.
    Gcs,
    /// Azure Blob Storage.
    Azure,
}

impl Kind {
    /// Whether requests go over a network and are billed.
    pub fn is_bucket(self) -> bool {
        matches!(self, Self::S3 | Self::Gcs | Self::Azure)
    }
}

/// The store's clock at a moment of ours.
#[derive(Debug, Clone, Copy)]
pub struct Reading {
    /// What the store said.
    pub store: StoreTime,
    /// When we heard it.
    pub at: BootTime,
    /// How much later it may have been by then: a bucket tells whole seconds, rounded down, and its
    /// answer is on its way for a while. Zero where the time is exact.
    pub unsure: Duration,
}

/// A kind of store. Every call is one request: it is not retried, and an outcome that is not known
/// is reported as unknown. [`Store`](super::Store) is what turns that into facts.
///
/// An error with kind `Unavailable` may be tried again; any other is final and, for a write, means
/// that it did not apply.
#[async_trait]
pub trait Backend: Debug + Send + Sync + 'static {
    /// Its URL, for messages.
    fn url(&self) -> String;

    /// What sort of store it is.
    fn kind(&self) -> Kind;

    /// Counts the requests.
    fn meter(&self) -> &Arc<Meter>;

    /// The newest word of the store's clock, if it has said anything yet.
    fn reading(&self) -> Option<Reading>;

    /// From now on: at most so many connections, and requests a minute. No effect where there are
    /// neither.
    fn limit(&self, connections: usize, requests_per_minute: Option<u32>) {
        let _ = (connections, requests_per_minute);
    }

    /// The object at `key`, unless it is still the version `unless`.
    async fn get(&self, key: &Key, unless: Option<&Version>) -> Result<Get>;

    /// What the store tells of the object at `key`.
    async fn head(&self, key: &Key) -> Result<Option<Meta>>;

    /// Writes the object if `when` holds.
    async fn put(&self, key: &Key, body: Bytes, when: &When, durability: Durability)
    -> Result<Put>;

    /// Writes a body once, so that it can become many objects by [`Backend::link`]. `None` where that saves
    /// nothing, or cannot be done now.
    fn draft(&self, body: &Bytes) -> Option<Draft> {
        let _ = body;
        None
    }

    /// Makes what was drafted here the object at `key`, if there is none: as a volatile put of its body, once
    /// for each key. `None` where that cannot be done: then nothing was.
    async fn link(&self, key: &Key, draft: &Draft) -> Result<Option<Put>> {
        let _ = (key, draft);
        Ok(None)
    }

    /// Deletes the object: in any state, or in this version only.
    async fn delete(&self, key: &Key, version: Option<&Version>) -> Result<Delete>;

    /// Deletes an object in this version only, which other programs may write, whatever locks we have.
    async fn delete_foreign(&self, key: &Key, version: &Version) -> Result<Delete> {
        self.delete(key, Some(version)).await
    }

    /// Deletes a lease in this version and remembers its token, so that [`Backend::floor`] knows it.
    async fn retire(&self, key: &Key, version: &Version, token: u64) -> Result<Delete> {
        let _ = token;
        self.delete(key, Some(version)).await
    }

    /// Deletes what is done and then the lease under which it was done, each in this version only,
    /// and remembers the lease's token: as [`Backend::delete`] and [`Backend::retire`] do one after
    /// the other. `None` where that is no better.
    async fn finish(
        &self,
        work: (&Key, &Version),
        lease: (&Key, &Version),
        token: u64,
    ) -> Result<Option<(Delete, Delete)>> {
        let _ = (work, lease, token);
        Ok(None)
    }

    /// The fencing tokens that are yet to be given out at this key are above this. Zero where no
    /// lease is ever deleted by its release.
    async fn floor(&self, key: &Key) -> Result<u64> {
        let _ = key;
        Ok(0)
    }

    /// Makes sure that this token may be given out: that no power loss makes it come again.
    async fn reserve(&self, token: u64) -> Result<()> {
        let _ = token;
        Ok(())
    }

    /// Deletes many objects in any state, in as few requests as the store allows. On an error some
    /// may be gone and others not.
    async fn delete_many(&self, keys: &[Key]) -> Result<()>;

    /// The object at `key` for reading in pieces.
    async fn open(&self, key: &Key) -> Result<Option<Box<dyn Source>>> {
        Ok(match self.get(key, None).await? {
            Get::Found(object) => Some(Box::new(Whole(object))),
            Get::Absent | Get::Unchanged => None,
        })
    }

    /// Writes the object from a file if `when` holds.
    async fn put_file(
        &self,
        key: &Key,
        body: &FileBody,
        when: &When,
        durability: Durability,
    ) -> Result<Put> {
        self.put(key, body.read_all()?, when, durability).await
    }

    /// Writes a body where nobody sees it yet, for [`Backend::publish`]. `None` where that saves nothing.
    async fn stage(&self, key: &Key, body: &Bytes) -> Result<Option<Staged>> {
        let _ = (key, body);
        Ok(None)
    }

    /// Makes what was staged here objects, each if its condition holds: durably, and with no more flushes
    /// than one of them takes. Says of each, in this order, what became of it.
    async fn publish(&self, staged: Vec<(Staged, When)>) -> Vec<Result<Put>> {
        staged.into_iter().map(|(staged, _)| Err(staged.elsewhere())).collect()
    }

    /// Deletes many objects that nobody ever replaces.
    async fn discard(&self, keys: &[Key]) -> Result<()> {
        self.delete_many(keys).await
    }

    /// What the file system says of this object or folder; `None` where there is none.
    fn stamp(&self, name: &str) -> Option<Stamp> {
        let _ = name;
        None
    }

    /// The objects in this folder, if that can be told at once and there are at most `most`, and what
    /// [`Backend::stamp`] would have said before.
    fn peek(&self, folder: &str, most: usize) -> Option<(Stamp, Vec<Key>)> {
        let _ = (folder, most);
        None
    }

    /// The content of an object without its version, where finding that out costs extra, and what
    /// [`Backend::stamp`] would have said before. `None` if this is no such store, or if the object is
    /// too large.
    fn slurp(&self, key: &Key) -> Option<(Stamp, Bytes)> {
        let _ = key;
        None
    }

    /// An object that is opened and not read, and what [`Backend::stamp`] would have said; no source if
    /// there is none. It has no version. `None` if this is no such store.
    fn glance(&self, key: &Key) -> Option<(Stamp, Option<Box<dyn Source>>)> {
        let _ = key;
        None
    }

    /// A listing, to be fetched page by page.
    fn list(&self, list: List) -> Box<dyn Lister>;

    /// What the doctor should warn of that no request of ours shows: settings of the bucket that
    /// make it dear or that delete objects behind our back. Empty where it cannot be known.
    async fn warnings(&self) -> Vec<String> {
        Vec::new()
    }

    /// Another client of the same store that shares nothing with this one but the meter, where
    /// that makes a difference: for the doctor's races.
    fn sibling(&self) -> Option<Arc<dyn Backend>> {
        None
    }

    /// Whether the object is most likely there, where that can be told for next to nothing; `false`
    /// elsewhere. For those who wait until it goes, and want to know whether it is worth looking:
    /// it proves nothing, and is not counted as a request.
    fn seems_there(&self, key: &Key) -> bool {
        let _ = key;
        false
    }

    /// Wakes whoever waits for keys with this prefix to change, where the store can tell.
    fn watch(&self, prefix: &str) -> Watch {
        let _ = prefix;
        Watch::never()
    }

    /// Makes what others wrote at these keys durable: done before something is deleted on the
    /// strength of it.
    async fn persist(&self, keys: &[Key]) -> Result<()>;
}

/// A listing in progress.
#[async_trait]
pub trait Lister: Send {
    /// The next page, or `None` after the last. Any page may be short, as some stores end them early.
    /// After an error it either gives the same page when
    /// asked again, or goes on failing; it never goes on with something left out.
    async fn next_page(&mut self) -> Result<Option<Page>>;
}
