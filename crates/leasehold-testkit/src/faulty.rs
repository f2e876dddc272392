//! A store in front of another one that loses answers, or breaks its word, on request.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use leasehold::store::backend::{Backend, Kind, Lister, Reading};
use leasehold::store::large::Draft;
use leasehold::store::meter::Meter;
use leasehold::store::{Delete, Durability, Get, List, Meta, Page, Put, Unknown};
use leasehold::{Error, ErrorKind, Key, Result, Version, When};

/// What happens to one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Nothing unusual.
    None,
    /// It is lost on the way there: not carried out, not answered.
    LostRequest,
    /// Its answer is lost: carried out, not answered.
    LostAnswer,
    /// It arrives late: carried out just before the next write, and not answered.
    Delayed,
    /// Its answer takes a second: carried out at once.
    SlowAnswer,
    /// The store says that others are writing.
    Contended,
    /// Carried out, but flushing it to disk failed.
    NotFlushed,
}

/// A write that is still on its way.
type Ghost = (Key, Bytes, When);

/// A promise that the store does not keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Broken {
    /// `PUT If-None-Match` overwrites.
    IgnoresAbsent,
    /// `PUT If-Match` overwrites.
    IgnoresMatch,
    /// `PUT If-None-Match` looks first and writes then.
    RacesCreate,
    /// `PUT If-Match` looks first and writes then.
    RacesMatch,
    /// `DELETE If-Match` deletes whatever is there.
    IgnoresDeleteMatch,
    /// `DELETE If-Match` looks first and deletes then.
    RacesDelete,
    /// A listing shows what was there a while ago.
    StaleList,
    /// A listing is not in order.
    UnsortedList,
}

/// The wrapper.
#[derive(Debug)]
pub struct Faulty {
    inner: Arc<dyn Backend>,
    broken: Option<Broken>,
    /// Faults of the coming writes and deletes, in order. Later ones have none.
    writes: Mutex<VecDeque<Fault>>,
    /// Whether the coming reads are answered. Later ones are.
    reads: Mutex<VecDeque<bool>>,
    /// A write that arrives before the next one.
    ghost: Mutex<Option<Ghost>>,
    /// What the stale listing shows: it learns of a key when that is written a second time.
    seen: Mutex<BTreeMap<Key, u32>>,
    /// Faults that begin with the next write of a key that contains this.
    aimed: Mutex<Option<Aimed>>,
    /// Keys that contain this may not be written.
    denied: Mutex<Option<String>>,
}

/// A part of a key, and the faults of writes and reads from its next write on.
type Aimed = (String, Vec<Fault>, Vec<bool>);

impl Faulty {
    /// Breaks a promise all the time.
    pub fn broken(inner: Arc<dyn Backend>, broken: Broken) -> Self {
        Self {
            inner,
            broken: Some(broken),
            writes: Mutex::default(),
            reads: Mutex::default(),
            ghost: Mutex::default(),
            seen: Mutex::default(),
            aimed: Mutex::default(),
            denied: Mutex::default(),
        }
    }

    /// These faults happen to the next writes and deletes.
    pub fn writes(inner: Arc<dyn Backend>, faults: impl IntoIterator<Item = Fault>) -> Self {
        Self {
            inner,
            broken: None,
            writes: Mutex::new(faults.into_iter().collect()),
            reads: Mutex::default(),
            ghost: Mutex::default(),
            seen: Mutex::default(),
            aimed: Mutex::default(),
            denied: Mutex::default(),
        }
    }

    /// The next GETs and HEADs are answered or not.
    #[must_use]
    pub fn reads(self, answered: impl IntoIterator<Item = bool>) -> Self {
        *lock(&self.reads) = answered.into_iter().collect();
        self
    }

    /// From the next write of a key that contains `part` on, these faults happen to writes and deletes,
    /// and reads are answered or not.
    pub fn next_put_of(&self, part: &str, faults: Vec<Fault>, reads: Vec<bool>) {
        *lock(&self.aimed) = Some((part.to_owned(), faults, reads));
    }

    /// From now on, keys that contain `part` may be read and not written: the permissions say so.
    pub fn deny_writes_of(&self, part: &str) {
        *lock(&self.denied) = Some(part.to_owned());
    }

    fn may_write(&self, key: &Key) -> Result<()> {
        match &*lock(&self.denied) {
            Some(part) if key.as_str().contains(part) => {
                Err(Error::new(ErrorKind::Denied, "denied by the test").at(key))
            }
            _ => Ok(()),
        }
    }

    fn aim(&self, key: &Key) {
        let hit = |aimed: &mut Aimed| key.as_str().contains(&aimed.0);
        if let Some((_, faults, reads)) = lock(&self.aimed).take_if(hit) {
            lock(&self.writes).extend(faults);
            lock(&self.reads).extend(reads);
        }
    }

    fn fault(&self) -> Fault {
        lock(&self.writes).pop_front().unwrap_or(Fault::None)
    }

    fn read_is_answered(&self) -> Result<()> {
        match lock(&self.reads).pop_front() {
            Some(false) => Err(lost()),
            _ => Ok(()),
        }
    }

    fn is(&self, broken: Broken) -> bool {
        self.broken == Some(broken)
    }

    /// Whether the condition holds right now: what a store that looks first would find.
    async fn holds(&self, key: &Key, when: &When) -> Result<bool> {
        let there = self.inner.head(key).await?.map(|meta| meta.version);
        Ok(match when {
            When::Any => true,
            When::Absent => there.is_none(),
            When::Matches(version) => there.as_ref() == Some(version),
        })
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn lost() -> Error {
    Error::new(ErrorKind::Unavailable, "lost by the test")
}

#[async_trait]
impl Backend for Faulty {
    fn url(&self) -> String {
        self.inner.url()
    }

    fn kind(&self) -> Kind {
        // A stranger's server, which has to be tried out.
        Kind::S3
    }

    fn meter(&self) -> &Arc<Meter> {
        self.inner.meter()
    }

    fn reading(&self) -> Option<Reading> {
        self.inner.reading()
    }

    async fn get(&self, key: &Key, unless: Option<&Version>) -> Result<Get> {
        self.read_is_answered()?;
        self.inner.get(key, unless).await
    }

    async fn head(&self, key: &Key) -> Result<Option<Meta>> {
        self.read_is_answered()?;
        self.inner.head(key).await
    }

    async fn put(
        &self,
        key: &Key,
        body: Bytes,
        when: &When,
        durability: Durability,
    ) -> Result<Put> {
        self.may_write(key)?;
        *lock(&self.seen).entry(key.clone()).or_default() += 1;
        self.aim(key);
        let ghost = lock(&self.ghost).take();
        if let Some((key, body, when)) = ghost {
            let _ = self.inner.put(&key, body, &when, durability).await?;
        }
        let fault = self.fault();
        match fault {
            Fault::LostRequest => return Ok(Put::Unknown(Unknown::NoAnswer(lost()))),
            Fault::Delayed => {
                *lock(&self.ghost) = Some((key.clone(), body, when.clone()));
                return Ok(Put::Unknown(Unknown::NoAnswer(lost())));
            }
            Fault::Contended => return Ok(Put::Contended),
            Fault::None | Fault::LostAnswer | Fault::SlowAnswer | Fault::NotFlushed => {}
        }
        let ignored = match when {
            When::Any => false,
            When::Absent => self.is(Broken::IgnoresAbsent),
            When::Matches(_) => self.is(Broken::IgnoresMatch),
        };
        let raced = match when {
            When::Any => false,
            When::Absent => self.is(Broken::RacesCreate),
            When::Matches(_) => self.is(Broken::RacesMatch),
        };
        if raced {
            if !self.holds(key, when).await? {
                return Ok(Put::Refused);
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        let when = if ignored || raced { &When::Any } else { when };
        let outcome = self.inner.put(key, body, when, durability).await?;
        match fault {
            Fault::LostAnswer => Ok(Put::Unknown(Unknown::NoAnswer(lost()))),
            Fault::SlowAnswer => {
                tokio::time::sleep(Duration::from_secs(1)).await;
                Ok(outcome)
            }
            Fault::NotFlushed => Ok(Put::Unknown(Unknown::NotFlushed(lost()))),
            _ => Ok(outcome),
        }
    }

    fn draft(&self, body: &Bytes) -> Option<Draft> {
        self.inner.draft(body)
    }

    async fn link(&self, key: &Key, draft: &Draft) -> Result<Option<Put>> {
        self.may_write(key)?;
        self.aim(key);
        let unknown = || Ok(Some(Put::Unknown(Unknown::NoAnswer(lost()))));
        match self.fault() {
            Fault::LostRequest | Fault::Delayed => unknown(),
            Fault::LostAnswer => self.inner.link(key, draft).await.and_then(|_| unknown()),
            _ => self.inner.link(key, draft).await,
        }
    }

    async fn delete(&self, key: &Key, version: Option<&Version>) -> Result<Delete> {
        self.may_write(key)?;
        let fault = self.fault();
        match fault {
            Fault::LostRequest | Fault::Delayed => {
                return Ok(Delete::Unknown(Unknown::NoAnswer(lost())));
            }
            Fault::Contended => return Ok(Delete::Contended),
            Fault::None | Fault::LostAnswer | Fault::SlowAnswer | Fault::NotFlushed => {}
        }
        let mut version = version;
        if self.is(Broken::IgnoresDeleteMatch) {
            version = None;
        } else if self.is(Broken::RacesDelete)
            && let Some(expected) = version
        {
            if !self.holds(key, &When::Matches(expected.clone())).await? {
                return Ok(Delete::Refused);
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
            version = None;
        }
        let outcome = self.inner.delete(key, version).await?;
        match fault {
            Fault::LostAnswer => Ok(Delete::Unknown(Unknown::NoAnswer(lost()))),
            _ => Ok(outcome),
        }
    }

    async fn delete_many(&self, keys: &[Key]) -> Result<()> {
        self.inner.delete_many(keys).await
    }

    fn list(&self, list: List) -> Box<dyn Lister> {
        let hidden = match self.is(Broken::StaleList) {
            true => lock(&self.seen)
                .iter()
                .filter(|(_, writes)| **writes < 2)
                .map(|(key, _)| key.clone())
                .collect(),
            false => Vec::new(),
        };
        let reversed = self.is(Broken::UnsortedList);
        Box::new(FaultyLister { inner: self.inner.list(list), hidden, reversed })
    }

    async fn persist(&self, keys: &[Key]) -> Result<()> {
        self.inner.persist(keys).await
    }
}

struct FaultyLister {
    inner: Box<dyn Lister>,
    hidden: Vec<Key>,
    reversed: bool,
}

#[async_trait]
impl Lister for FaultyLister {
    async fn next_page(&mut self) -> Result<Option<Page>> {
        let page = self.inner.next_page().await?;
        Ok(page.map(|mut page| {
            page.entries.retain(|entry| !self.hidden.contains(&entry.key));
            if self.reversed {
                page.entries.reverse();
            }
            page
        }))
    }
}
