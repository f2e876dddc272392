//! A work queue: push, claim, heartbeat, ack, straight to the store.
//!
//! ```no_run
//! # async fn example(store: leasehold::Store) -> leasehold::Result<()> {
//! use leasehold::queue::{NewTask, Queue};
//!
//! let queue = Queue::open_or_create(&store, "scrape", None).await?;
//! queue.push(NewTask::json(&"https://example.com")?.id("example.com")).await?;
//!
//! let worker = queue.worker("pi-4");
//! while let Some(task) = worker.next().await? {
//!     let url: String = task.json()?;
//!     task.ack_json(&format!("fetched {url}")).await?;
//! #   break;
//! }
//! # Ok(()) }
//! ```
//!
//! **What is guaranteed**: at least once; exactly one recorded completion; nothing is lost. A task
//! may *run* twice: when its worker stops renewing for a ttl and is taken for dead, or when the
//! machine loses power between the work and its receipt. It is *completed* once.
//!
//! **What it costs** on a bucket: push is a PUT, claim a PUT and a GET, ack a PUT (and two DELETEs,
//! which are free), a heartbeat a PUT. Many small tasks go as a bundle: the same for a hundred.
//!
//! The decisions are [`leasehold_protocol::queue`]'s, the keys [`leasehold_protocol::layout::queue`]'s.

pub(crate) mod bundle;
mod claim;
mod find;
mod inspect;
mod lately;
pub(crate) mod push;
mod shunned;
pub(crate) mod sweep;
mod task;
mod worker;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use leasehold_protocol::cas::{Version, When};
use leasehold_protocol::format::lease::{Dialect, Lease, Process};
use leasehold_protocol::layout::queue::{self as layout, Part, QueueKeys, Unit};
use leasehold_protocol::settle::Proof;

pub use inspect::{Counts, Failed, HeldTask, Peeked, Status};
pub use leasehold_protocol::format::queue::{Mode, QueueSettings};
pub use leasehold_protocol::format::task::{DeadLetter, Failure, Json, Receipt};
pub use push::{MAX_BUNDLE, MAX_PAYLOAD, NewTask, Outcome, Pushed};
pub use sweep::Swept;
pub use task::{Acked, Task};
pub use worker::{Worker, WorkerSettings};

use crate::lease::{Desk, Terms};
use crate::store::{Durability, Get, Kind, List, Put, Store, Unknown, Write};
use crate::sync::outbox::Outbox;
use crate::{Error, ErrorKind, Key, Result};

/// A queue. Clones share what is known of it.
#[derive(Debug, Clone)]
pub struct Queue(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    store: Store,
    name: String,
    keys: QueueKeys,
    known: Mutex<(Arc<QueueSettings>, Version)>,
    ids: push::Ids,
    lately: lately::Lately,
    /// Whether it was made again with another number of shards: its tasks are elsewhere.
    moved: AtomicBool,
    /// See [`WorkerSettings::companion`].
    companion: OnceLock<Process>,
    /// How many tasks were found to have failed or crashed as often as they may.
    given_up: AtomicU64,
    /// In a node's replica: where it is noted what the bucket is to be told.
    outbox: Option<Outbox>,
}

/// What suits a kind of store: in a directory a heartbeat costs nothing, and a dead worker is told
/// by its process.
pub fn usual_settings(kind: Kind) -> QueueSettings {
    match kind {
        Kind::Directory | Kind::Memory => QueueSettings {
            ttl: Duration::from_secs(30),
            heartbeat: Duration::from_secs(10),
            ..QueueSettings::default()
        },
        Kind::S3 | Kind::Gcs | Kind::Azure => QueueSettings::default(),
    }
}

impl Queue {
    /// The queue with this name, or `None` if nobody has made it. One GET.
    pub async fn open(store: &Store, name: &str) -> Result<Option<Self>> {
        let key = keys_of(name, 1)?.settings()?;
        let Some(object) = store.get(&key).await? else { return Ok(None) };
        let settings = parse_settings(&object.body, &key)?;
        Self::with(store, name, settings, object.meta.version).map(Some)
    }

    /// Makes a queue. An error if there is one with this name already.
    pub async fn create(store: &Store, name: &str, settings: QueueSettings) -> Result<Self> {
        match Self::try_create(store, name, settings).await? {
            Some(queue) => Ok(queue),
            None => Err(Error::new(
                ErrorKind::Invalid,
                format!("there is a queue {name:?} already: choose another name, or use that one"),
            )),
        }
    }

    /// The queue with this name, made with these settings (or what suits the store) if need be.
    pub async fn open_or_create(
        store: &Store,
        name: &str,
        settings: Option<QueueSettings>,
    ) -> Result<Self> {
        if let Some(queue) = Self::open(store, name).await? {
            return Ok(queue);
        }
        let settings = settings.unwrap_or_else(|| usual_settings(store.kind()));
        if let Some(queue) = Self::try_create(store, name, settings).await? {
            return Ok(queue);
        }
        let gone = || Error::unavailable(format!("the queue {name:?} was removed meanwhile"));
        Self::open(store, name).await?.ok_or_else(gone)
    }

    async fn try_create(
        store: &Store,
        name: &str,
        settings: QueueSettings,
    ) -> Result<Option<Self>> {
        let mut settings = settings.checked().map_err(|error| Error::invalid(error.to_string()))?;
        let key = keys_of(name, settings.shards)?.settings()?;
        let nonce = store.env().nonce();
        settings.nonce = nonce.to_string();
        let write = Write::when(When::Absent, Proof::Nonce(nonce));
        match wrote(store.put(&key, settings.to_bytes().into(), write).await?)? {
            Some(version) => Self::with(store, name, settings, version).map(Some),
            None => Ok(None),
        }
    }

    /// The queue with these settings, which were read before.
    pub(crate) fn with(
        store: &Store,
        name: &str,
        settings: QueueSettings,
        version: Version,
    ) -> Result<Self> {
        let outbox = settings.replica.then(|| Outbox::new(store, name)).transpose()?;
        Ok(Self(Arc::new(Inner {
            outbox,
            store: store.clone(),
            name: name.to_owned(),
            keys: keys_of(name, settings.shards)?,
            known: Mutex::new((Arc::new(settings), version)),
            ids: push::Ids::default(),
            lately: lately::Lately::default(),
            moved: AtomicBool::new(false),
            companion: OnceLock::new(),
            given_up: AtomicU64::new(0),
        })))
    }

    /// The names of all queues.
    pub async fn list(store: &Store) -> Result<Vec<String>> {
        let mut names = Vec::new();
        let mut listing = store.list(List::prefix(layout::all_queues())?.delimited());
        while let Some(page) = listing.next_page().await? {
            names.extend(page.prefixes.iter().filter_map(|prefix| layout::queue_name(prefix)));
        }
        Ok(names)
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The store it is in.
    pub fn store(&self) -> &Store {
        &self.0.store
    }

    /// Its settings, as they were last read.
    pub fn settings(&self) -> Arc<QueueSettings> {
        self.known().0.clone()
    }

    /// Reads the settings again, if they changed. One GET.
    pub async fn refresh(&self) -> Result<Arc<QueueSettings>> {
        if !self.reread().await? {
            // Somebody removed it with the rest of the queue: then there is nothing to do in it.
            tracing::debug!(queue = self.name(), "the queue has no settings any more");
        }
        Ok(self.settings())
    }

    /// Reads the settings again, if they changed. `false` if there are none any more. One GET.
    pub(crate) async fn reread(&self) -> Result<bool> {
        let key = self.keys().settings()?;
        let version = self.known().1.clone();
        let got = match version.as_str() {
            // They were never read.
            "" => self.store().get(&key).await?.map_or(Get::Absent, Get::Found),
            _ => self.store().get_if_changed(&key, &version).await?,
        };
        match got {
            Get::Found(object) => {
                let settings = parse_settings(&object.body, &key)?;
                if settings.shards != self.keys().shards() {
                    self.0.moved.store(true, SeqCst);
                    self.not_moved()?;
                }
                *self.known() = (Arc::new(settings), object.meta.version);
            }
            Get::Unchanged => {}
            Get::Absent => return Ok(false),
        }
        Ok(true)
    }

    /// An error if the queue was made again with another number of shards since we opened it.
    fn not_moved(&self) -> Result<()> {
        if !self.0.moved.load(SeqCst) {
            return Ok(());
        }
        let message =
            "its number of shards was changed, and its tasks would not be found: start again";
        Err(Error::new(ErrorKind::Data, message).at(&self.keys().settings()?))
    }

    /// Changes settings for everybody. The number of shards cannot be changed.
    pub async fn update(&self, change: impl Fn(&mut QueueSettings)) -> Result<Arc<QueueSettings>> {
        self.not_in_a_replica()?;
        let key = self.keys().settings()?;
        for _ in 0..16 {
            let current = self.refresh().await?;
            let version = self.known().1.clone();
            let mut changed = (*current).clone();
            change(&mut changed);
            if changed == *current {
                return Ok(current);
            }
            if changed.shards != current.shards {
                return Err(Error::invalid("the number of shards is fixed: make another queue"));
            }
            let nonce = self.store().env().nonce();
            changed.nonce = nonce.to_string();
            let changed = changed.checked().map_err(|error| Error::invalid(error.to_string()))?;
            let write = Write::when(When::Matches(version), Proof::Nonce(nonce));
            let put = self.store().put(&key, changed.to_bytes().into(), write).await?;
            if let Some(version) = wrote(put)? {
                *self.known() = (Arc::new(changed), version);
                return Ok(self.settings());
            }
        }
        Err(Error::unavailable("others keep changing the settings: try again").at(&key))
    }

    /// Tells all workers to leave the tasks alone, within half a minute.
    pub async fn pause(&self) -> Result<()> {
        self.update(|settings| settings.paused = true).await.map(|_| ())
    }

    /// The opposite.
    pub async fn resume(&self) -> Result<()> {
        self.update(|settings| settings.paused = false).await.map(|_| ())
    }

    /// A worker of this queue with this name. See [`Worker`].
    pub fn worker(&self, name: impl Into<String>) -> Worker {
        Worker::new(vec![self.clone()], WorkerSettings::named(name))
    }

    pub(crate) fn keys(&self) -> &QueueKeys {
        &self.0.keys
    }

    /// The version of its settings.
    pub(crate) fn settings_version(&self) -> Version {
        self.known().1.clone()
    }

    /// Where it is noted what the bucket is to be told, in a node's replica.
    pub(crate) fn outbox(&self) -> Option<&Outbox> {
        self.0.outbox.as_ref()
    }

    /// What only the bucket's queue is for: to a replica it would be a change that nobody learns of.
    fn not_in_a_replica(&self) -> Result<()> {
        match self.outbox() {
            None => Ok(()),
            Some(_) => Err(Error::new(
                ErrorKind::Unsupported,
                "this is a node's replica of the queue: do that in the bucket",
            )),
        }
    }

    fn known(&self) -> MutexGuard<'_, (Arc<QueueSettings>, Version)> {
        self.0.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where the lease of a task or bundle is asked for.
    pub(crate) fn desk(&self, unit: &Unit, worker: &str) -> Result<Desk> {
        let settings = self.settings();
        let terms =
            Terms { ttl: settings.ttl, heartbeat: settings.heartbeat, dialect: Dialect::Task };
        Desk::new(self.store(), self.keys().part(unit, Part::Lease)?, worker, terms)
    }

    /// Notes in a lease of ours which process must be gone, beside this one, before others take the
    /// task over at once.
    fn note_companion(&self, lease: &mut Lease) {
        if let (Some(place), Some(companion)) = (&mut lease.place, self.0.companion.get()) {
            place.child = Some(companion.clone());
        }
    }

    pub(crate) fn durability(&self) -> Durability {
        match self.settings().durable {
            true => Durability::Durable,
            false => Durability::Volatile,
        }
    }
}

pub(crate) fn keys_of(name: &str, shards: u16) -> Result<QueueKeys> {
    if name.is_empty() {
        return Err(Error::invalid("a queue needs a name"));
    }
    QueueKeys::new(name, shards)
        .map_err(|error| Error::invalid(format!("queue name {name:?}: {error}")))
}

pub(crate) fn parse_settings(bytes: &[u8], key: &Key) -> Result<QueueSettings> {
    QueueSettings::parse(bytes)
        .and_then(QueueSettings::checked)
        .map_err(|error| Error::new(ErrorKind::Data, error.to_string()).at(key))
}

/// The version that was written, or `None` where somebody else's object is in the way.
pub(crate) fn wrote(put: Put) -> Result<Option<Version>> {
    match put {
        Put::Stored(version) => Ok(Some(version)),
        Put::Refused | Put::Unknown(Unknown::Overtaken(_)) => Ok(None),
        Put::Contended => Err(Error::unavailable("others keep writing this object: try again")),
        Put::Unknown(unknown) => Err(unknown.into_error()),
    }
}
