//! Relaxed mode: a node's own replica of a queue, and its sync with the bucket.
//!
//! ```no_run
//! # async fn example(local: leasehold::Store, bucket: leasehold::Store) -> leasehold::Result<()> {
//! use leasehold::queue::NewTask;
//! use leasehold::sync::Replica;
//!
//! let replica = Replica::open(&local, &bucket, "pi-4").await?;
//! let queue = replica.join("scrape").await?; // as the bucket's, but in the local directory
//! queue.push(NewTask::text("https://example.com")).await?; // no request, also offline
//! let task = queue.worker("pi-4").next().await?; // neither
//! # drop(task);
//! replica.up("scrape").await?; // the bucket learns of it
//! replica.down("scrape").await?; // and says what else there is to do
//! # Ok(()) }
//! ```
//!
//! In the replica a queue has the layout that it has in the bucket, and the same code works on it. What
//! the bucket must learn of is in the outbox first (`outbox.rs`), and goes up later by the
//! same conditional writes as strict mode's (`up.rs`). What there is to do comes down (`down.rs`).
//!
//! **What is guaranteed**: at least once; one recorded completion, the first to reach the bucket;
//! nothing is lost. Two nodes may *run* the same task: the second completion is counted as a duplicate.
//! Fencing tokens rise within a node only.
//!
//! The decisions are [`leasehold_protocol::sync`]'s, the keys [`leasehold_protocol::layout::sync`]'s.

mod clock;
mod down;
mod hold;
pub(crate) mod outbox;
mod run;
mod state;
mod up;
mod walk;

use std::sync::Arc;
use std::time::Duration;

use leasehold_protocol::cas::{Version, When};
use leasehold_protocol::key::Key;
use leasehold_protocol::layout::queue::{QueueKeys, Unit};
use leasehold_protocol::layout::sync as layout;
use leasehold_protocol::settle::Proof;
use serde::{Deserialize, Serialize};

pub use down::Down;
pub use state::{Plan, Status, Step};
pub use up::Up;

use crate::lock::{Guard, Lock, LockSettings};
use crate::queue::{self, Mode, Queue, QueueSettings};
use crate::store::{List, Store, Write};
use crate::{Error, ErrorKind, Result, StoreSettings, host};
use clock::{Ahead, BucketTime};
use outbox::Outbox;

/// How many requests of a sync are under way at a time.
const AT_A_TIME: usize = 16;

/// A node's replica of some of a bucket's queues. Clones share it.
#[derive(Debug, Clone)]
pub struct Replica(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    local: Store,
    bucket: Store,
    node: String,
    /// Marks our leases in the bucket.
    id: String,
}

/// `sync/replica.json`.
#[derive(Debug, Serialize, Deserialize)]
struct Identity {
    id: String,
    node: String,
    /// Which folder of which machine this was written for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    place: Option<String>,
}

/// A queue, here and in the bucket.
#[derive(Debug)]
struct Pair<'a> {
    replica: &'a Inner,
    local: Queue,
    there: Queue,
    outbox: Outbox,
    /// Whether what is untold may be there all the same, and be done since.
    careful: bool,
    /// Whether it is known that the bucket's queue is the one that this replica was made from.
    checked: tokio::sync::OnceCell<()>,
}

impl Replica {
    /// The replica in this store, a directory of this node as a rule, of queues of this bucket. No
    /// request to the bucket. `node` is this node's name, for people.
    pub async fn open(local: &Store, bucket: &Store, node: &str) -> Result<Self> {
        let env = local.env().clone();
        let backend = Arc::new(BucketTime::over(local.backend().clone(), env.clone()));
        let local = Store::new(backend, env, StoreSettings::default())?;
        let replica = |id| {
            let (local, bucket) = (local.clone(), bucket.clone());
            Self(Arc::new(Inner { local, bucket, node: node.to_owned(), id }))
        };
        if let Some(id) = identity(&local, node, false).await? {
            return Ok(replica(id));
        }
        // First that, then its new name: one that dies in between finds it a copy again.
        replica(String::new()).begin_anew().await?;
        let id = identity(&local, node, true).await?;
        Ok(replica(id.ok_or_else(|| Error::new(ErrorKind::Internal, "a replica has no id"))?))
    }

    /// What is here is a copy. The bucket may have been told all of it, by the one that it was copied from,
    /// and more has happened since: each push is asked about before it is told.
    async fn begin_anew(&self) -> Result<()> {
        tracing::warn!(
            replica = self.local().url(),
            "this replica was copied, or moved: it is one of its own from now on"
        );
        for name in self.queues().await? {
            self.note_telling(&name, 0).await?;
        }
        Ok(())
    }

    /// The local store, whose clock tells the bucket's time.
    pub fn local(&self) -> &Store {
        &self.0.local
    }

    /// The bucket.
    pub fn bucket(&self) -> &Store {
        &self.0.bucket
    }

    /// This node's name.
    pub fn node(&self) -> &str {
        &self.0.node
    }

    /// The names of the queues that this replica has. No request to the bucket. One whose settings are
    /// damaged is left out, with a warning: it must not keep the others from their sync.
    pub async fn queues(&self) -> Result<Vec<String>> {
        let mut names = Vec::new();
        for name in Queue::list(self.local()).await? {
            match self.queue(&name).await {
                Ok(Some(_)) => names.push(name),
                Ok(None) => {}
                Err(error) if error.is_about_data() => {
                    tracing::warn!(queue = name, %error, "the replica of this queue cannot be read");
                }
                Err(error) => return Err(error),
            }
        }
        Ok(names)
    }

    /// The replica of a queue, if this node has one. No request to the bucket. Its settings say in
    /// which mode the bucket's was when they came down.
    pub async fn queue(&self, name: &str) -> Result<Option<Queue>> {
        let queue = Queue::open(self.local(), name).await?;
        Ok(queue.filter(|queue| queue.settings().replica))
    }

    /// The replica of a queue, made from the bucket's settings if this node has none: then one GET. An
    /// error if the bucket has no such queue, or if it is a strict one.
    pub async fn join(&self, name: &str) -> Result<Queue> {
        if let Some(queue) = self.queue(name).await? {
            return Ok(queue);
        }
        let Some(there) = Queue::open(self.bucket(), name).await? else {
            let message =
                format!("there is no queue {name:?} in the bucket (see `leasehold queue ls`)");
            return Err(Error::new(ErrorKind::NotFound, message));
        };
        if there.settings().mode != Mode::Relaxed {
            let message =
                format!("the queue {name:?} is a strict one: its tasks are not replicated");
            return Err(Error::invalid(message));
        }
        // The time before the settings: whoever finds these pushes, and by this host's clock that may be
        // due a day too late.
        self.learn_time().await?;
        self.take_settings(&there).await?;
        self.note_settings(&there).await?;
        let made = self.queue(name).await?;
        made.ok_or_else(|| Error::new(ErrorKind::Internal, "a replica was not made"))
    }

    /// The queue that workers and pushers of this node should use: the replica's if the queue is a
    /// relaxed one, else the bucket's. `None` if there is none. No request where the replica is known; a
    /// sync down where it is new, or was not used for a while.
    pub async fn choose(&self, name: &str) -> Result<Option<Queue>> {
        if let Some(queue) = self.queue(name).await?
            && queue.settings().mode == Mode::Relaxed
        {
            return Ok(Some(queue));
        }
        match Queue::open(self.bucket(), name).await? {
            None => Ok(None),
            Some(there) if there.settings().mode == Mode::Relaxed => {
                if self.queue(name).await?.is_none() {
                    self.join(name).await?;
                }
                // What is here may be nothing, or old, from before the queue was strict: nobody works on
                // it before it was compared.
                loop {
                    match self.down(name).await {
                        // Another process of this node is at it: what it does is as good.
                        Err(error) if error.kind() == ErrorKind::Held => {
                            let queue = self.queue(name).await?;
                            if queue.as_ref().is_some_and(|q| q.settings().mode == Mode::Relaxed) {
                                return Ok(queue);
                            }
                        }
                        Err(error) => return Err(error),
                        Ok(_) => return self.queue(name).await,
                    }
                }
            }
            Some(there) => {
                // It was relaxed once: who opens the replica next must know that it is not any more.
                if self.queue(name).await?.is_some() {
                    self.take_settings(&there).await?;
                }
                Ok(Some(there))
            }
        }
    }

    /// Writes the bucket's settings down as ours.
    async fn take_settings(&self, there: &Queue) -> Result<()> {
        // A queue that was made again may have other shards there. What is here stays where it is.
        let here = self.queue(there.name()).await?;
        let shards = here.map_or(there.settings().shards, |here| here.keys().shards());
        let settings = QueueSettings { replica: true, shards, ..(*there.settings()).clone() };
        let key = there.keys().settings()?;
        let there_now = self.local().get(&key).await?;
        if there_now.is_some_and(|object| object.body == settings.to_bytes()) {
            return Ok(());
        }
        let put = self.local().put(&key, settings.to_bytes().into(), Write::any()).await?;
        queue::wrote(put).map(drop)
    }

    /// Remembers in which version the bucket's settings were taken.
    async fn note_settings(&self, there: &Queue) -> Result<()> {
        let version = there.settings_version();
        let note = |state: &mut state::State| {
            version.as_str().clone_into(&mut state.settings_version);
        };
        self.change_state(there.name(), note).await
    }

    /// One sync at a time: two would do the same work twice, and one might push what is done since the other
    /// told of it.
    async fn lock(&self) -> Result<Guard> {
        let key = Key::new("sync/sync.lock")?;
        // A holder that died is recognised by its process, and one that is busy with a hundred thousand files
        // is not robbed.
        let settings = LockSettings {
            ttl: Duration::from_secs(60),
            heartbeat: Duration::from_secs(10),
            ..LockSettings::of(self.local().kind())
        };
        let (lasts, lock) = (settings.ttl, Lock::at(self.local(), key, &self.0.node, settings)?);
        match lock.try_acquire().await? {
            Ok(guard) => Ok(guard),
            // Most likely left by a power loss: that is seen by watching it.
            Err(held) if held.is_aged => lock.acquire_timeout(lasts).await,
            Err(_) => lock.acquire().await,
        }
    }

    /// What the bucket's last answer said about the time.
    async fn learn_time(&self) -> Result<()> {
        let Some(reading) = self.bucket().backend().reading() else { return Ok(()) };
        let env = self.local().env();
        let now = reading.store.plus(env.clock().boot().since(reading.at));
        let ahead = Ahead::measure(now, env);
        let key = layout::clock()?;
        let known = self.local().get(&key).await?;
        let known = known.and_then(|object| serde_json::from_slice::<Ahead>(&object.body).ok());
        if known.is_some_and(|known| !known.differs(&ahead)) {
            return Ok(());
        }
        let body = serde_json::to_vec(&ahead).unwrap_or_default();
        let put = self.local().put(&key, body.into(), Write::any()).await?;
        queue::wrote(put).map(drop)
    }

    /// Which boot this is; empty where the system does not say.
    fn boot_id(&self) -> String {
        let env = self.local().env();
        env.host().here(env.clock().boot()).map(|place| place.boot_id).unwrap_or_default()
    }

    async fn pair(&self, name: &str) -> Result<Pair<'_>> {
        let Some(local) = self.queue(name).await? else {
            return Err(Error::invalid(format!("this node has no replica of the queue {name:?}")));
        };
        // What is known of the bucket's settings: nothing is asked for that.
        let state = self.state(name).await?;
        let shards = state.shards.unwrap_or(local.keys().shards());
        let settings = QueueSettings { replica: false, shards, ..(*local.settings()).clone() };
        let careful = state.is_careful(&self.boot_id());
        let version = Version::new(state.settings_version);
        let there = Queue::with(self.bucket(), name, settings, version)?;
        let outbox = Outbox::new(self.local(), name)?;
        let checked = tokio::sync::OnceCell::new();
        Ok(Pair { replica: &self.0, local, there, outbox, careful, checked })
    }

    /// Whether the bucket's queue has another number of shards than we thought: it was made again. From the
    /// next look at it on it is found there. One GET.
    async fn follow_shards(&self, pair: &Pair<'_>) -> Result<bool> {
        let Some(there) = Queue::open(self.bucket(), pair.there.name()).await? else {
            return Ok(false);
        };
        let (before, now) = (pair.there.keys().shards(), there.keys().shards());
        if before == now {
            return Ok(false);
        }
        tracing::warn!(queue = there.name(), before, now, "was made again with other shards");
        let version = there.settings_version();
        self.change_state(there.name(), |state| {
            state.shards = Some(now);
            version.as_str().clone_into(&mut state.settings_version);
        })
        .await?;
        Ok(true)
    }

    /// Whether a worker of this queue has said that it has nothing to do.
    pub async fn is_dry(&self, queue: &str) -> Result<bool> {
        let key = layout::SyncKeys::new(queue)?.dry()?;
        Ok(self.local().head(&key).await?.is_some())
    }
}

/// Which replica this is; made if need be. A folder that was copied, or came from a backup, is not the one
/// that it was copied from: two with one id would take each other's leases in the bucket for their own. It
/// gets a new one if `anew` says so, else `None` says that it should.
async fn identity(local: &Store, node: &str, anew: bool) -> Result<Option<String>> {
    let key = layout::replica()?;
    for _ in 0..8 {
        let here = host::folder(local);
        let nonce = local.env().nonce();
        let fresh = Identity { id: nonce.to_string(), node: node.to_owned(), place: here.clone() };
        let (identity, write) = match local.get(&key).await? {
            None => (fresh, Write::when(When::Absent, Proof::Nonce(nonce))),
            Some(object) => {
                let known: Identity = serde_json::from_slice(&object.body).map_err(|error| {
                    Error::new(ErrorKind::Data, format!("not a replica: {error}")).at(&key)
                })?;
                let when = When::Matches(object.meta.version);
                match (&known.place, &here) {
                    (Some(there), Some(here)) if there != here && !anew => return Ok(None),
                    (Some(there), Some(here)) if there != here => {
                        (fresh, Write::when(when, Proof::Nonce(nonce)))
                    }
                    // The folder was not there yet when it was made. All who notice write the same.
                    (None, Some(_)) => {
                        (Identity { place: here, ..known }, Write::when(when, Proof::Bytes))
                    }
                    _ => return Ok(Some(known.id)),
                }
            }
        };
        let body = serde_json::to_vec(&identity).unwrap_or_default();
        queue::wrote(local.put(&key, body.into(), write).await?)?;
    }
    Err(Error::unavailable("others keep making and removing this replica").at(&key))
}

/// All tasks and bundles of a queue in a directory, by the names of their folders.
async fn local_units(store: &Store, keys: &QueueKeys) -> Result<Vec<Listing>> {
    let mut listings = Vec::new();
    for shard in 0..keys.shards() {
        listings.push(Listing::new(store, keys.pending(shard))?);
    }
    listings.push(Listing::new(store, keys.bundles())?);
    Ok(listings)
}

/// A listing of folders, page by page.
struct Listing(crate::store::Listing);

impl Listing {
    fn new(store: &Store, prefix: String) -> Result<Self> {
        Ok(Self(store.list(List::prefix(prefix)?.delimited().unordered().loose())))
    }

    async fn next(&mut self, keys: &QueueKeys) -> Result<Option<Vec<Unit>>> {
        let Some(page) = self.0.next_page().await? else { return Ok(None) };
        Ok(Some(page.prefixes.iter().filter_map(|prefix| keys.parse_folder(prefix)).collect()))
    }
}

impl Pair<'_> {
    fn local_store(&self) -> &Store {
        &self.replica.local
    }

    fn bucket(&self) -> &Store {
        &self.replica.bucket
    }

    /// An error if the bucket's queue is gone, or was made again with another number of shards: what is
    /// pushed there would be found by nobody. One conditional GET, once per sync.
    async fn check_queue(&self) -> Result<()> {
        if self.there.reread().await? {
            return Ok(());
        }
        let name = self.there.name();
        Err(Error::new(ErrorKind::Data, format!("the queue {name:?} is gone from the bucket")))
    }
}
