//! The replica's clock tells the bucket's time.
//!
//! A node's own clock may be hours off, and what its workers write is meant for the bucket: when a
//! task was pushed, when it may be tried again. So a replica's times are the bucket's: its last word,
//! and what has passed here since by the clock that nobody sets. Before the bucket has said anything
//! they are this host's.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use leasehold_protocol::cas::{Version, When};
use leasehold_protocol::key::Key;
use leasehold_protocol::layout::sync as layout;
use leasehold_protocol::time::StoreTime;
use serde::{Deserialize, Serialize};

use crate::env::{BootTime, Env};
use crate::store::backend::{Backend, Kind, Lister, Reading};
use crate::store::large::{Draft, FileBody, Source, Stamp};
use crate::store::meter::Meter;
use crate::store::{Delete, Durability, Entry, Get, List, Meta, Page, Put, Watch};
use crate::{Result, host};

/// How often the record of the clock is read again: others may have heard from the bucket.
const AGAIN: Duration = Duration::from_secs(30);

/// `sync/clock.json`: how far the bucket's clock is ahead of this host's, in microseconds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Ahead {
    /// Which boot the first figure is about.
    boot_id: String,
    /// Ahead of the clock since boot.
    of_boot_us: i64,
    /// Ahead of the wall clock: what is left after a reboot.
    of_wall_us: i64,
}

impl Ahead {
    pub fn measure(bucket: StoreTime, env: &Env) -> Self {
        Self {
            boot_id: host::boot_id().to_owned(),
            of_boot_us: bucket.as_micros() - micros(env.clock().boot()),
            of_wall_us: bucket.as_micros() - env.clock().wall().as_micros(),
        }
    }

    /// Whether it says something else, by more than what a listing's whole seconds and a slow answer
    /// make.
    pub fn differs(&self, other: &Self) -> bool {
        self.boot_id != other.boot_id || self.of_boot_us.abs_diff(other.of_boot_us) > 2_000_000
    }
}

fn micros(boot: BootTime) -> i64 {
    let since = boot.since(BootTime::from_boot(Duration::ZERO)).as_micros();
    i64::try_from(since).unwrap_or(i64::MAX)
}

/// A store in whose answers all times are the bucket's.
#[derive(Debug)]
pub(super) struct BucketTime {
    inner: Arc<dyn Backend>,
    env: Env,
    ahead: Arc<Offset>,
}

/// What the bucket's clock is ahead of ours, as it was last read.
#[derive(Debug, Default)]
struct Offset {
    /// Of the boot clock; 0 is "not known".
    of_boot_us: AtomicI64,
    /// When it was read, in microseconds since boot, plus one.
    read: AtomicU64,
}

impl Offset {
    /// The bucket's time now, if it is known.
    fn now(&self, env: &Env) -> Option<StoreTime> {
        match self.of_boot_us.load(Relaxed) {
            0 => None,
            ahead => Some(StoreTime::from_micros(micros(env.clock().boot()).saturating_add(ahead))),
        }
    }

    /// The same age before the bucket's now.
    fn shift(&self, env: &Env, now: StoreTime, time: StoreTime) -> StoreTime {
        let Some(bucket) = self.now(env) else { return time };
        let age = now.as_micros().saturating_sub(time.as_micros());
        StoreTime::from_micros(bucket.as_micros().saturating_sub(age))
    }

    fn meta(&self, env: &Env, meta: Meta) -> Meta {
        let modified = self.shift(env, meta.now, meta.modified);
        Meta { modified, now: self.now(env).unwrap_or(meta.now), ..meta }
    }
}

impl BucketTime {
    pub fn over(inner: Arc<dyn Backend>, env: Env) -> Self {
        Self { inner, env, ahead: Arc::default() }
    }

    /// Reads what others heard from the bucket, now and then.
    async fn listen(&self) -> Result<()> {
        let now = u64::try_from(micros(self.env.clock().boot())).unwrap_or(0) + 1;
        let read = self.ahead.read.load(Relaxed);
        // As long as nothing is known, each time: whoever made this replica may write it at any moment, and
        // what is pushed by this host's clock may be due a day too late.
        let known = self.ahead.of_boot_us.load(Relaxed) != 0;
        if known && now.saturating_sub(read) < AGAIN.as_micros() as u64 {
            return Ok(());
        }
        self.ahead.read.store(now, Relaxed);
        let Some(key) = key() else { return Ok(()) };
        if let Get::Found(object) = self.inner.get(key, None).await? {
            self.take(&object.body);
        }
        Ok(())
    }

    fn take(&self, record: &[u8]) {
        let Ok(ahead) = serde_json::from_slice::<Ahead>(record) else { return };
        let of_boot = match ahead.boot_id == host::boot_id() && !ahead.boot_id.is_empty() {
            true => ahead.of_boot_us,
            // Rebooted since: the wall clock is the best there is.
            false => {
                let wall = self.env.clock().wall().as_micros();
                wall.saturating_add(ahead.of_wall_us) - micros(self.env.clock().boot())
            }
        };
        self.ahead.of_boot_us.store(of_boot, Relaxed);
    }
}

fn key() -> Option<&'static Key> {
    static KEY: OnceLock<Option<Key>> = OnceLock::new();
    KEY.get_or_init(|| layout::clock().ok()).as_ref()
}

#[async_trait]
impl Backend for BucketTime {
    fn url(&self) -> String {
        self.inner.url()
    }

    fn kind(&self) -> Kind {
        self.inner.kind()
    }

    fn meter(&self) -> &Arc<Meter> {
        self.inner.meter()
    }

    fn reading(&self) -> Option<Reading> {
        match self.ahead.now(&self.env) {
            Some(store) => {
                let at = self.env.clock().boot();
                Some(Reading { store, at, unsure: Duration::ZERO })
            }
            None => self.inner.reading(),
        }
    }

    async fn get(&self, key: &Key, unless: Option<&Version>) -> Result<Get> {
        self.listen().await?;
        Ok(match self.inner.get(key, unless).await? {
            Get::Found(mut object) => {
                // Whoever made this replica wrote the time first: what is here since says that it is, too.
                self.listen().await?;
                object.meta = self.ahead.meta(&self.env, object.meta);
                Get::Found(object)
            }
            other => other,
        })
    }

    async fn head(&self, key: &Key) -> Result<Option<Meta>> {
        self.listen().await?;
        Ok(self.inner.head(key).await?.map(|meta| self.ahead.meta(&self.env, meta)))
    }

    async fn put(
        &self,
        key: &Key,
        body: Bytes,
        when: &When,
        durability: Durability,
    ) -> Result<Put> {
        if Some(key) == self::key() {
            self.take(&body);
        }
        self.inner.put(key, body, when, durability).await
    }

    fn draft(&self, body: &Bytes) -> Option<Draft> {
        self.inner.draft(body)
    }

    async fn link(&self, key: &Key, draft: &Draft) -> Result<Option<Put>> {
        self.inner.link(key, draft).await
    }

    async fn delete(&self, key: &Key, version: Option<&Version>) -> Result<Delete> {
        self.inner.delete(key, version).await
    }

    async fn retire(&self, key: &Key, version: &Version, token: u64) -> Result<Delete> {
        self.inner.retire(key, version, token).await
    }

    async fn finish(
        &self,
        work: (&Key, &Version),
        lease: (&Key, &Version),
        token: u64,
    ) -> Result<Option<(Delete, Delete)>> {
        self.inner.finish(work, lease, token).await
    }

    async fn floor(&self, key: &Key) -> Result<u64> {
        self.inner.floor(key).await
    }

    async fn reserve(&self, token: u64) -> Result<()> {
        self.inner.reserve(token).await
    }

    async fn delete_many(&self, keys: &[Key]) -> Result<()> {
        self.inner.delete_many(keys).await
    }

    async fn open(&self, key: &Key) -> Result<Option<Box<dyn Source>>> {
        self.inner.open(key).await
    }

    async fn put_file(
        &self,
        key: &Key,
        body: &FileBody,
        when: &When,
        durability: Durability,
    ) -> Result<Put> {
        self.inner.put_file(key, body, when, durability).await
    }

    async fn discard(&self, keys: &[Key]) -> Result<()> {
        self.inner.discard(keys).await
    }

    fn stamp(&self, name: &str) -> Option<Stamp> {
        self.inner.stamp(name)
    }

    fn peek(&self, folder: &str, most: usize) -> Option<(Stamp, Vec<Key>)> {
        self.inner.peek(folder, most)
    }

    fn slurp(&self, key: &Key) -> Option<(Stamp, Bytes)> {
        self.inner.slurp(key)
    }

    fn list(&self, list: List) -> Box<dyn Lister> {
        let (env, ahead) = (self.env.clone(), self.ahead.clone());
        Box::new(Shifted { inner: self.inner.list(list), env, ahead })
    }

    fn seems_there(&self, key: &Key) -> bool {
        self.inner.seems_there(key)
    }

    fn watch(&self, prefix: &str) -> Watch {
        self.inner.watch(prefix)
    }

    async fn persist(&self, keys: &[Key]) -> Result<()> {
        self.inner.persist(keys).await
    }
}

struct Shifted {
    inner: Box<dyn Lister>,
    env: Env,
    ahead: Arc<Offset>,
}

#[async_trait]
impl Lister for Shifted {
    async fn next_page(&mut self) -> Result<Option<Page>> {
        let Some(mut page) = self.inner.next_page().await? else { return Ok(None) };
        if let Some(now) = page.now {
            let shift = |entry: Entry| Entry {
                modified: entry.modified.map(|time| self.ahead.shift(&self.env, now, time)),
                ..entry
            };
            page.entries = page.entries.into_iter().map(shift).collect();
            page.now = Some(self.ahead.now(&self.env).unwrap_or(now));
        }
        Ok(Some(page))
    }
}
