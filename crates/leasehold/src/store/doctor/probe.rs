//! The doctor's hands: requests that are timed, and objects that are remembered.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use leasehold_protocol::cas::{Version, When};
use leasehold_protocol::key::Key;
use leasehold_protocol::settle::Proof;

use super::Latency;
use crate::store::backend::Reading;
use crate::store::settle::{Driver, retrying};
use crate::store::types::{Delete, Durability, Entry, Get, List, Meta, Object, Page, Put, Write};
use crate::store::{Listing, Store};
use crate::{Error, Result};

/// Clones share the memory of what was written, so that tasks can use it.
#[derive(Debug, Clone)]
pub struct Probe {
    store: Store,
    prefix: Arc<str>,
    written: Arc<Mutex<BTreeSet<Key>>>,
    times: Arc<Mutex<BTreeMap<&'static str, Vec<Duration>>>>,
}

impl Probe {
    pub fn new(store: &Store) -> Self {
        let prefix = format!("leasehold-doctor-{}", store.env().nonce());
        Self {
            store: store.clone(),
            prefix: prefix.into(),
            written: Arc::default(),
            times: Arc::default(),
        }
    }

    /// One of many who do it at once.
    pub fn racer(&self) -> Self {
        Self { store: self.store.sibling(), ..self.clone() }
    }

    /// A key of the doctor's own.
    pub fn key(&self, name: &str) -> Result<Key> {
        Ok(Key::new(format!("{}/{name}", self.prefix))?)
    }

    /// A listing of the doctor's own keys below `prefix`.
    pub fn list(&self, prefix: &str) -> Result<List> {
        List::prefix(format!("{}/{prefix}", self.prefix))
    }

    /// The part of a key that was given to [`Probe::key`].
    pub fn name<'k>(&self, key: &'k str) -> &'k str {
        key.strip_prefix(&*self.prefix).map_or(key, |name| name.trim_start_matches('/'))
    }

    pub fn names(&self, entries: &[Entry]) -> Vec<String> {
        entries.iter().map(|entry| self.name(entry.key.as_str()).to_owned()).collect()
    }

    /// Writes a body of its own kind, marked with a fresh nonce, and returns it with the outcome.
    pub async fn put(&self, key: &Key, text: &str, when: When) -> Result<(Put, Bytes)> {
        let nonce = self.store.env().nonce();
        let body = Bytes::from(format!("{text} {nonce}"));
        let put = self.put_raw(key, body.clone(), when, Proof::Nonce(nonce)).await?;
        Ok((put, body))
    }

    /// Writes exactly these bytes.
    pub async fn put_raw(&self, key: &Key, body: Bytes, when: When, proof: Proof) -> Result<Put> {
        lock(&self.written).insert(key.clone());
        let write = Write::when(when, proof).durability(Durability::Volatile);
        self.timed("put", self.driver().put(key, body, &write, None)).await
    }

    pub async fn get(&self, key: &Key) -> Result<Option<Object>> {
        let get = async { retrying!(self.driver(), self.store.backend().get(key, None).await) };
        Ok(match self.timed("get", get).await? {
            Get::Found(object) => Some(object),
            Get::Absent | Get::Unchanged => None,
        })
    }

    pub async fn head(&self, key: &Key) -> Result<Option<Meta>> {
        let head = async { retrying!(self.driver(), self.store.backend().head(key).await) };
        self.timed("head", head).await
    }

    pub async fn delete(&self, key: &Key, version: Option<&Version>) -> Result<Delete> {
        self.timed("delete", self.driver().delete(key, version)).await
    }

    /// Waits for a random part of the time that this verb has taken so far.
    pub async fn pause_within_a(&self, verb: &str) {
        let longest = lock(&self.times).get(verb).and_then(|times| times.iter().max().copied());
        let part = self.store.env().random() as f64 / u64::MAX as f64;
        let pause = longest.unwrap_or_default().mul_f64(part);
        self.store.env().clock().sleep(pause).await;
    }

    /// All pages of a listing.
    pub async fn pages(&self, list: List) -> Result<Vec<Page>> {
        let mut listing: Listing = self.store.list(list);
        let mut pages = Vec::new();
        while let Some(page) = self.timed("list", listing.next_page()).await? {
            pages.push(page);
        }
        Ok(pages)
    }

    /// Everything that a listing shows.
    pub async fn listed(&self, list: List) -> Result<Vec<String>> {
        let pages = self.pages(list).await?;
        Ok(pages.iter().flat_map(|page| self.names(&page.entries)).collect())
    }

    /// The store's clock and this host's, at one moment.
    pub fn clocks(&self) -> (Option<Reading>, leasehold_protocol::time::StoreTime) {
        (self.store.backend().reading(), self.store.env().clock().wall())
    }

    /// Removes whatever was written, whether a listing shows it or not, and whatever else a
    /// listing shows: some servers change names, and some carry out a write after a later delete.
    pub async fn remove_all(&self) -> Result<()> {
        let mut keys: BTreeSet<Key> = lock(&self.written).clone();
        for _ in 0..10 {
            let mut listing = self.store.list(self.list("")?);
            while let Some(page) = listing.next_page().await? {
                keys.extend(page.entries.into_iter().map(|entry| entry.key));
            }
            if keys.is_empty() {
                lock(&self.written).clear();
                return Ok(());
            }
            let doomed: Vec<Key> = std::mem::take(&mut keys).into_iter().collect();
            retrying!(self.driver(), self.store.backend().delete_many(&doomed).await)?;
            self.store.env().clock().sleep(Duration::from_millis(50)).await;
        }
        Err(Error::unavailable(format!("could not remove everything below {}/", self.prefix)))
    }

    pub fn latencies(&self) -> Vec<Latency> {
        let mut times = lock(&self.times);
        let row = |(verb, times): (&&'static str, &mut Vec<Duration>)| {
            times.sort_unstable();
            let at = |part: f64| {
                let index = ((times.len().saturating_sub(1)) as f64 * part) as usize;
                times.get(index).map_or(0.0, |time| time.as_secs_f64() * 1000.0)
            };
            Latency { verb, samples: times.len(), p50_ms: at(0.5), p99_ms: at(0.99) }
        };
        times.iter_mut().map(row).collect()
    }

    fn driver(&self) -> Driver<'_> {
        self.store.driver()
    }

    async fn timed<T>(
        &self,
        verb: &'static str,
        request: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let clock = self.store.env().clock();
        let start = clock.boot();
        let answer = request.await?;
        let took = clock.boot().since(start);
        lock(&self.times).entry(verb).or_default().push(took);
        Ok(answer)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
