//! A machine's own disk: a directory, as relaxed nodes have one beside the bucket.
//!
//! It answers always, and what was written stays. But every operation takes its time, and its process
//! may die or stop before it, or after it and before it knows. Times are those of the machine's wall
//! clock, whatever that says.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use leasehold::store::backend::{Backend, Kind, Lister, Reading};
use leasehold::store::large::Draft;
use leasehold::store::meter::{Class, Meter};
use leasehold::store::{Delete, Durability, Get, List, Meta, Page, Put};
use leasehold::{Key, Result, Version, When};

use crate::check::Applied;
use crate::env::boot_time;
use crate::net::excerpt;
use crate::objects::Objects;
use crate::world::{DiskId, Life, State, What, World};

/// What is on a disk.
#[derive(Debug)]
pub struct Disk {
    /// Its files.
    pub objects: Objects,
    /// The highest token of a lease that was removed, by its key.
    retired: BTreeMap<Key, u64>,
}

impl Default for Disk {
    fn default() -> Self {
        let mut objects = Objects::default();
        objects.fine = true;
        Self { objects, retired: BTreeMap::new() }
    }
}

/// How much less often a process dies or stops at a file than at a request: there are many more.
const RARELY: f64 = 0.1;

/// A process' view of its machine's disk.
#[derive(Debug, Clone)]
pub struct Folder {
    world: World,
    life: Life,
    disk: DiskId,
    meter: Arc<Meter>,
}

impl Folder {
    /// Of this life, on this disk.
    pub fn new(world: &World, life: Life, disk: DiskId) -> Self {
        Self { world: world.clone(), life, disk, meter: Arc::default() }
    }

    /// Does something to the disk, all at once; but it takes a while, and may be the last thing that is
    /// done.
    async fn act<T>(&self, class: Class, act: impl FnOnce(&Self, &mut State) -> T + Send) -> T {
        self.meter.request(class, 0);
        let (before, after) = {
            let mut state = self.world.state();
            let faults = state.faults.clone();
            let node = self.life.node;
            if state.hits(faults.deaths * RARELY) {
                let at = state.now + state.rng.below(4000);
                state.at(at, What::Crash(node));
            }
            if state.hits(faults.stalls * RARELY) {
                let at = state.now + state.rng.below(4000);
                let longest = state.longest_stall;
                let long = state.rng.between(100_000, longest);
                state.at(at, What::Pause(node, long));
            }
            (state.rng.between(50, 2500), state.rng.between(1, 500))
        };
        self.world.sleep_on(self.life, Duration::from_micros(before)).await;
        let done = act(self, &mut self.world.state());
        self.world.sleep_on(self.life, Duration::from_micros(after)).await;
        done
    }

    fn note(&self, state: &mut State, what: &str, key: &str, outcome: &str, body: &[u8]) {
        let now = state.now;
        state.trace.mix(now);
        state.trace.mix_bytes(what.as_bytes());
        state.trace.mix_bytes(key.as_bytes());
        state.trace.mix_bytes(outcome.as_bytes());
        if state.trace.records() {
            let body = excerpt(body);
            state.note(self.life.node, || format!("disk: {what} {key} → {outcome}  {body}"));
        }
    }

    /// Writes or deletes, whatever is there, and has it checked.
    fn write(&self, state: &mut State, key: &Key, body: Option<Bytes>) -> Option<Version> {
        let wall = state.wall(self.life.node);
        let objects = &mut state.disks[self.disk].objects;
        let before = match body {
            Some(body) => objects.put(key, body, wall),
            None => objects.delete(key, wall),
        };
        let after = objects.get(key).cloned();
        let version = after.as_ref().map(|after| after.version.clone());
        let (life, label) = (self.life, state.nodes[self.life.node].label);
        let applied = Applied { life, label, key: key.as_str(), before, after, late: false };
        state.applied_here(self.disk, applied);
        version
    }

    /// Deletes, unless it is another version that is there.
    fn remove(&self, state: &mut State, key: &Key, version: Option<&Version>) -> Delete {
        let there = state.disks[self.disk].objects.get(key).map(|there| &there.version);
        let holds = version.is_none_or(|version| there == Some(version));
        if holds {
            self.write(state, key, None);
        }
        let outcome = if holds { "deleted" } else { "refused" };
        self.note(state, "DELETE", key.as_str(), outcome, b"");
        if holds { Delete::Deleted } else { Delete::Refused }
    }
}

#[async_trait]
impl Backend for Folder {
    fn url(&self) -> String {
        format!("disk-{}", self.disk)
    }

    fn kind(&self) -> Kind {
        Kind::Directory
    }

    fn meter(&self) -> &Arc<Meter> {
        &self.meter
    }

    fn reading(&self) -> Option<Reading> {
        let state = self.world.state();
        let node = self.life.node;
        let (store, at) = (state.wall(node), boot_time(&state, node));
        Some(Reading { store, at, unsure: Duration::ZERO })
    }

    async fn get(&self, key: &Key, unless: Option<&Version>) -> Result<Get> {
        let got = self.act(Class::Get, |folder, state| {
            let now = state.wall(folder.life.node);
            let got = state.disks[folder.disk].objects.read(key, unless, now);
            let (outcome, body) = match &got {
                Get::Found(object) => ("found", object.body.clone()),
                Get::Absent => ("absent", Bytes::new()),
                Get::Unchanged => ("unchanged", Bytes::new()),
            };
            folder.note(state, "GET", key.as_str(), outcome, &body);
            got
        });
        Ok(got.await)
    }

    async fn head(&self, key: &Key) -> Result<Option<Meta>> {
        let looked = self.act(Class::Head, |folder, state| {
            let now = state.wall(folder.life.node);
            let meta = state.disks[folder.disk].objects.look(key, now);
            let outcome = if meta.is_some() { "found" } else { "absent" };
            folder.note(state, "HEAD", key.as_str(), outcome, b"");
            meta
        });
        Ok(looked.await)
    }

    async fn put(&self, key: &Key, body: Bytes, when: &When, _: Durability) -> Result<Put> {
        let put = self.act(Class::Put, |folder, state| {
            let holds = state.disks[folder.disk].objects.holds(key, when);
            let outcome = if holds { "stored" } else { "refused" };
            folder.note(state, "PUT", key.as_str(), outcome, &body);
            let written = holds.then(|| folder.write(state, key, Some(body))).flatten();
            written.map_or(Put::Refused, Put::Stored)
        });
        Ok(put.await)
    }

    fn draft(&self, body: &Bytes) -> Option<Draft> {
        Some(Draft::new(body.clone()))
    }

    async fn link(&self, key: &Key, draft: &Draft) -> Result<Option<Put>> {
        let Some(body) = draft.known::<Bytes>() else { return Ok(None) };
        self.put(key, body.clone(), &When::Absent, Durability::Volatile).await.map(Some)
    }

    async fn delete(&self, key: &Key, version: Option<&Version>) -> Result<Delete> {
        Ok(self.act(Class::Delete, |folder, state| folder.remove(state, key, version)).await)
    }

    async fn retire(&self, key: &Key, version: &Version, token: u64) -> Result<Delete> {
        let retired = self.act(Class::Delete, |folder, state| {
            let removed = folder.remove(state, key, Some(version));
            if matches!(removed, Delete::Deleted) {
                let retired = state.disks[folder.disk].retired.entry(key.clone()).or_default();
                *retired = token.max(*retired);
            }
            removed
        });
        Ok(retired.await)
    }

    async fn floor(&self, key: &Key) -> Result<u64> {
        let floor = self.act(Class::Get, |folder, state| {
            state.disks[folder.disk].retired.get(key).copied().unwrap_or(0)
        });
        Ok(floor.await)
    }

    async fn delete_many(&self, keys: &[Key]) -> Result<()> {
        for key in keys {
            let _ = self.delete(key, None).await?;
        }
        Ok(())
    }

    fn list(&self, list: List) -> Box<dyn Lister> {
        Box::new(Pages { folder: self.clone(), list, after: None, done: false })
    }

    async fn persist(&self, _: &[Key]) -> Result<()> {
        Ok(())
    }
}

struct Pages {
    folder: Folder,
    list: List,
    after: Option<String>,
    done: bool,
}

#[async_trait]
impl Lister for Pages {
    async fn next_page(&mut self) -> Result<Option<Page>> {
        if self.done {
            return Ok(None);
        }
        let (list, after) = (self.list.clone(), self.after.clone());
        let listed = self.folder.act(Class::List, move |folder, state| {
            let now = state.wall(folder.life.node);
            let objects = &state.disks[folder.disk].objects;
            let (page, next) = objects.list(&list, after.as_deref(), 1000, now);
            let outcome = format!("page of {}", page.len());
            folder.note(state, "LIST", list.prefix_text(), &outcome, b"");
            (page, next)
        });
        let (page, next) = listed.await;
        self.done = next.is_none();
        self.after = next;
        Ok(Some(page))
    }
}
