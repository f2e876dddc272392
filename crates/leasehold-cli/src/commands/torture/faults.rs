//! Faults between the library and its backend, for stores that no proxy can stand before: a
//! directory, or a bucket that is reached by TLS.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use leasehold::env::Env;
use leasehold::store::backend::{Backend, Kind, Lister, Reading};
use leasehold::store::large::{Draft, FileBody, Source, Staged, Stamp};
use leasehold::store::meter::Meter;
use leasehold::store::{Delete, Durability, Get, List, Meta, Page, Put, Store, Unknown, Watch};
use leasehold::{Error, ErrorKind, Key, Result, StoreSettings, Version, When};

use super::log::nanos;
use super::plan::{Dice, Plan, Weather};

/// What happens to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    /// It does not arrive.
    Before,
    /// Its answer does not arrive.
    After,
    /// It is late.
    Slow(Duration),
}

/// What spoils, and what it did.
#[derive(Debug)]
pub struct Spoiler {
    plan: Plan,
    env: Env,
    dice: Mutex<Dice>,
    done: Mutex<BTreeMap<String, u64>>,
}

impl Spoiler {
    pub fn new(plan: Plan, env: Env, dice: Dice) -> Self {
        Self { plan, env, dice: Mutex::new(dice), done: Mutex::default() }
    }

    /// Faults so far, by kind.
    pub fn done(&self) -> BTreeMap<String, u64> {
        self.done.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn next(&self) -> Fault {
        let Some(weather) = Weather::at(&self.plan, nanos(&self.env)) else { return Fault::None };
        let mut dice = self.dice.lock().unwrap_or_else(PoisonError::into_inner);
        let (lost, slow) = match weather {
            Weather::Calm => (2, 2),
            Weather::Lossy => (100, 20),
            Weather::Storm => (900, 0),
        };
        let (fault, name) = match dice.below(1000) {
            n if n < lost && (weather == Weather::Storm || n % 2 == 0) => {
                (Fault::Before, "request lost")
            }
            n if n < lost => (Fault::After, "answer lost"),
            n if n < lost + slow => (Fault::Slow(dice.millis(20, 800)), "slow"),
            _ => return Fault::None,
        };
        let mut done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        *done.entry(name.to_owned()).or_default() += 1;
        fault
    }

    /// What happens to a read: whether it is lost makes no difference to when.
    async fn read(&self) -> Result<()> {
        match self.next() {
            Fault::None => Ok(()),
            Fault::Before | Fault::After => Err(lost()),
            Fault::Slow(pause) => {
                tokio::time::sleep(pause).await;
                Ok(())
            }
        }
    }

    /// What happens to a write: whether it is lost on its way there.
    async fn write(&self) -> (bool, bool) {
        match self.next() {
            Fault::None => (false, false),
            Fault::Before => (true, false),
            Fault::After => (false, true),
            Fault::Slow(pause) => {
                tokio::time::sleep(pause).await;
                (false, false)
            }
        }
    }
}

fn lost() -> Error {
    Error::new(ErrorKind::Unavailable, "lost by the torture")
}

/// The store with faults.
pub fn spoil(
    store: &Store,
    spoiler: Arc<Spoiler>,
    settings: StoreSettings,
) -> anyhow::Result<Store> {
    let backend = Spoilt { inner: store.backend().clone(), spoiler };
    Ok(Store::new(Arc::new(backend), store.env().clone(), settings)?)
}

#[derive(Debug)]
struct Spoilt {
    inner: Arc<dyn Backend>,
    spoiler: Arc<Spoiler>,
}

#[async_trait]
impl Backend for Spoilt {
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
        self.inner.reading()
    }

    async fn get(&self, key: &Key, unless: Option<&Version>) -> Result<Get> {
        self.spoiler.read().await?;
        self.inner.get(key, unless).await
    }

    async fn head(&self, key: &Key) -> Result<Option<Meta>> {
        self.spoiler.read().await?;
        self.inner.head(key).await
    }

    async fn put(
        &self,
        key: &Key,
        body: Bytes,
        when: &When,
        durability: Durability,
    ) -> Result<Put> {
        let (before, after) = self.spoiler.write().await;
        if before {
            return Ok(Put::Unknown(Unknown::NoAnswer(lost())));
        }
        let put = self.inner.put(key, body, when, durability).await?;
        Ok(if after { Put::Unknown(Unknown::NoAnswer(lost())) } else { put })
    }

    fn draft(&self, body: &Bytes) -> Option<Draft> {
        self.inner.draft(body)
    }

    async fn link(&self, key: &Key, draft: &Draft) -> Result<Option<Put>> {
        let (before, after) = self.spoiler.write().await;
        if before {
            return Ok(Some(Put::Unknown(Unknown::NoAnswer(lost()))));
        }
        let put = self.inner.link(key, draft).await?;
        Ok(put.map(|put| if after { Put::Unknown(Unknown::NoAnswer(lost())) } else { put }))
    }

    async fn delete(&self, key: &Key, version: Option<&Version>) -> Result<Delete> {
        let (before, after) = self.spoiler.write().await;
        if before {
            return Ok(Delete::Unknown(Unknown::NoAnswer(lost())));
        }
        let deleted = self.inner.delete(key, version).await?;
        Ok(if after { Delete::Unknown(Unknown::NoAnswer(lost())) } else { deleted })
    }

    async fn retire(&self, key: &Key, version: &Version, token: u64) -> Result<Delete> {
        let (before, after) = self.spoiler.write().await;
        if before {
            return Ok(Delete::Unknown(Unknown::NoAnswer(lost())));
        }
        let deleted = self.inner.retire(key, version, token).await?;
        Ok(if after { Delete::Unknown(Unknown::NoAnswer(lost())) } else { deleted })
    }

    async fn finish(
        &self,
        work: (&Key, &Version),
        lease: (&Key, &Version),
        token: u64,
    ) -> Result<Option<(Delete, Delete)>> {
        let (before, after) = self.spoiler.write().await;
        if before {
            return Err(lost());
        }
        let finished = self.inner.finish(work, lease, token).await?;
        if after { Err(lost()) } else { Ok(finished) }
    }

    async fn floor(&self, key: &Key) -> Result<u64> {
        self.inner.floor(key).await
    }

    async fn reserve(&self, token: u64) -> Result<()> {
        self.inner.reserve(token).await
    }

    async fn delete_many(&self, keys: &[Key]) -> Result<()> {
        let (before, after) = self.spoiler.write().await;
        if before {
            return Err(lost());
        }
        self.inner.delete_many(keys).await?;
        if after { Err(lost()) } else { Ok(()) }
    }

    async fn open(&self, key: &Key) -> Result<Option<Box<dyn Source>>> {
        self.spoiler.read().await?;
        self.inner.open(key).await
    }

    async fn put_file(
        &self,
        key: &Key,
        body: &FileBody,
        when: &When,
        durability: Durability,
    ) -> Result<Put> {
        let (before, after) = self.spoiler.write().await;
        if before {
            return Ok(Put::Unknown(Unknown::NoAnswer(lost())));
        }
        let put = self.inner.put_file(key, body, when, durability).await?;
        Ok(if after { Put::Unknown(Unknown::NoAnswer(lost())) } else { put })
    }

    async fn stage(&self, key: &Key, body: &Bytes) -> Result<Option<Staged>> {
        self.inner.stage(key, body).await
    }

    async fn publish(&self, staged: Vec<(Staged, When)>) -> Vec<Result<Put>> {
        let (mut lost_after, mut sent) = (Vec::new(), Vec::new());
        for one in staged {
            let (before, after) = self.spoiler.write().await;
            lost_after.push(if before { None } else { Some(after) });
            if !before {
                sent.push(one);
            }
        }
        let mut published = self.inner.publish(sent).await.into_iter();
        let unknown = || Ok(Put::Unknown(Unknown::NoAnswer(lost())));
        let outcome = |after: Option<bool>| match after.and_then(|_| published.next()) {
            Some(put) if after == Some(false) => put,
            _ => unknown(),
        };
        lost_after.into_iter().map(outcome).collect()
    }

    async fn discard(&self, keys: &[Key]) -> Result<()> {
        let (before, after) = self.spoiler.write().await;
        if before {
            return Err(lost());
        }
        self.inner.discard(keys).await?;
        if after { Err(lost()) } else { Ok(()) }
    }

    // What follows costs no request, and cannot be lost.

    fn stamp(&self, name: &str) -> Option<Stamp> {
        self.inner.stamp(name)
    }

    fn peek(&self, folder: &str, most: usize) -> Option<(Stamp, Vec<Key>)> {
        self.inner.peek(folder, most)
    }

    fn slurp(&self, key: &Key) -> Option<(Stamp, Bytes)> {
        self.inner.slurp(key)
    }

    fn glance(&self, key: &Key) -> Option<(Stamp, Option<Box<dyn Source>>)> {
        self.inner.glance(key)
    }

    fn list(&self, list: List) -> Box<dyn Lister> {
        Box::new(SpoiltLister { inner: self.inner.list(list), spoiler: self.spoiler.clone() })
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

struct SpoiltLister {
    inner: Box<dyn Lister>,
    spoiler: Arc<Spoiler>,
}

#[async_trait]
impl Lister for SpoiltLister {
    async fn next_page(&mut self) -> Result<Option<Page>> {
        // Before the page is fetched: asked again, it gives the same one.
        self.spoiler.read().await?;
        self.inner.next_page().await
    }
}
