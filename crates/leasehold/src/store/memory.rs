//! A store in this process' memory with S3's semantics, for tests and the simulator.
//!
//! As on S3: strongly consistent; equal bytes have equal versions; times in whole seconds;
//! `If-Match` on a missing key is refused; keys in byte order, 1,000 a page; a key may also be the
//! "directory" of others. Time comes from the [`Env`], so it runs under simulated time. Faults are
//! put in front of it by wrapping it in another [`Backend`].

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use leasehold_protocol::cas::{Version, When};
use leasehold_protocol::key::Key;
use leasehold_protocol::time::StoreTime;

use super::backend::{Backend, Kind, Lister, Reading};
use super::meter::{Class, Meter};
use super::types::{Delete, Durability, Entry, Get, List, Meta, Object, Page, Put};
use crate::Result;
use crate::env::Env;

/// Objects in memory. Clones of the `Arc` share them.
#[derive(Debug)]
pub struct Memory {
    objects: Arc<Mutex<Objects>>,
    /// The store's own clock.
    env: Env,
    /// The client's: when it heard what the store's says.
    client: Env,
    meter: Arc<Meter>,
}

type Objects = BTreeMap<Key, Stored>;

#[derive(Debug, Clone)]
struct Stored {
    body: Bytes,
    version: Version,
    modified: StoreTime,
}

impl Memory {
    /// An empty store.
    pub fn new(env: Env) -> Self {
        Self { objects: Arc::default(), client: env.clone(), env, meter: Arc::default() }
    }

    /// Another client of the same store, with a clock and a meter of its own: a second node.
    pub fn client(&self, client: Env) -> Self {
        let (objects, env) = (self.objects.clone(), self.env.clone());
        Self { objects, env, client, meter: Arc::default() }
    }

    fn objects(&self) -> MutexGuard<'_, Objects> {
        // Nothing panics while holding it; a poisoned map is as good as any.
        self.objects.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> StoreTime {
        self.env.clock().wall().floor_to_second()
    }

    fn meta(&self, stored: &Stored) -> Meta {
        Meta {
            version: stored.version.clone(),
            modified: stored.modified,
            now: self.now(),
            size: stored.body.len() as u64,
        }
    }
}

#[async_trait]
impl Backend for Memory {
    fn url(&self) -> String {
        "memory:".to_owned()
    }

    fn kind(&self) -> Kind {
        Kind::Memory
    }

    fn meter(&self) -> &Arc<Meter> {
        &self.meter
    }

    fn reading(&self) -> Option<Reading> {
        let (store, at) = (self.env.clock().wall(), self.client.clock().boot());
        Some(Reading { store, at, unsure: Duration::ZERO })
    }

    async fn get(&self, key: &Key, unless: Option<&Version>) -> Result<Get> {
        self.meter.request(Class::Get, 0);
        let found = self.objects().get(key).cloned();
        Ok(match found {
            None => Get::Absent,
            Some(stored) if unless == Some(&stored.version) => Get::Unchanged,
            Some(stored) => {
                self.meter.received(stored.body.len() as u64);
                Get::Found(Object { meta: self.meta(&stored), body: stored.body })
            }
        })
    }

    async fn head(&self, key: &Key) -> Result<Option<Meta>> {
        self.meter.request(Class::Head, 0);
        let found = self.objects().get(key).cloned();
        Ok(found.map(|stored| self.meta(&stored)))
    }

    async fn put(&self, key: &Key, body: Bytes, when: &When, _: Durability) -> Result<Put> {
        self.meter.request(Class::Put, body.len() as u64);
        let mut objects = self.objects();
        let holds = match (when, objects.get(key)) {
            (When::Any, _) | (When::Absent, None) => true,
            (When::Absent, Some(_)) | (When::Matches(_), None) => false,
            (When::Matches(version), Some(there)) => *version == there.version,
        };
        if !holds {
            return Ok(Put::Refused);
        }
        let version = super::content_version(&body);
        let stored = Stored { body, version: version.clone(), modified: self.now() };
        objects.insert(key.clone(), stored);
        Ok(Put::Stored(version))
    }

    async fn delete(&self, key: &Key, version: Option<&Version>) -> Result<Delete> {
        self.meter.request(Class::Delete, 0);
        let mut objects = self.objects();
        if let Some(version) = version
            && objects.get(key).map(|there| &there.version) != Some(version)
        {
            return Ok(Delete::Refused);
        }
        objects.remove(key);
        Ok(Delete::Deleted)
    }

    async fn delete_many(&self, keys: &[Key]) -> Result<()> {
        for batch in keys.chunks(1000) {
            self.meter.request(Class::Delete, 0);
            let mut objects = self.objects();
            for key in batch {
                objects.remove(key);
            }
        }
        Ok(())
    }

    fn list(&self, list: List) -> Box<dyn Lister> {
        Box::new(MemoryLister {
            objects: self.objects.clone(),
            env: self.env.clone(),
            meter: self.meter.clone(),
            after: Bound::Unbounded,
            list,
            done: false,
        })
    }

    async fn persist(&self, _: &[Key]) -> Result<()> {
        Ok(())
    }
}

/// Pages are snapshots of their own, as on S3: what changes between two pages is seen or not.
struct MemoryLister {
    objects: Arc<Mutex<Objects>>,
    env: Env,
    meter: Arc<Meter>,
    list: List,
    after: Bound<Key>,
    done: bool,
}

#[async_trait]
impl Lister for MemoryLister {
    async fn next_page(&mut self) -> Result<Option<Page>> {
        if self.done {
            return Ok(None);
        }
        self.meter.request(Class::List, 0);
        let objects = self.objects.lock().unwrap_or_else(PoisonError::into_inner);
        let mut page =
            Page { now: Some(self.env.clock().wall().floor_to_second()), ..Page::default() };
        let mut folded: Option<String> = None;
        let mut last = None;
        for (key, stored) in objects.range((self.after.clone(), Bound::Unbounded)) {
            if !self.list.includes(key.as_str()) {
                continue;
            }
            let prefix = self.list.fold(key.as_str());
            // Everything behind a common prefix is one item, also across pages.
            if prefix.is_some() && prefix == folded.as_deref() {
                last = Some(key.clone());
                continue;
            }
            if page.len() == self.list.page {
                self.after = last.map_or(Bound::Unbounded, Bound::Excluded);
                return Ok(Some(page));
            }
            match prefix {
                Some(prefix) => {
                    folded = Some(prefix.to_owned());
                    page.prefixes.push(prefix.to_owned());
                }
                None => page.entries.push(Entry {
                    key: key.clone(),
                    size: Some(stored.body.len() as u64),
                    modified: Some(stored.modified),
                    version: Some(stored.version.clone()),
                }),
            }
            last = Some(key.clone());
        }
        self.done = true;
        Ok(Some(page))
    }
}
