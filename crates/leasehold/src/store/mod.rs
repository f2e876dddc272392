//! Compare-and-swap objects: the only thing that Leasehold needs from the world.
//!
//! ```text
//!   Store     a handle: retries, settles unknown outcomes, checks the store's format
//!     │
//!   Backend   one request per call, four outcomes: stored, refused, contended, unknown
//!     │
//!   dir   memory   cloud (S3, GCS, Azure)
//! ```
//!
//! **Unknown is resolved, never guessed.** A conditional write whose answer was lost is read back:
//! if its nonce is there, it applied. So is any refusal that follows a retry, because a retry that
//! meets its own first attempt is refused too.
//!
//! Nothing above this module sees a status code.

pub mod backend;
#[cfg(feature = "cloud")]
pub mod cloud;
#[cfg(unix)]
pub mod dir;
pub mod doctor;
pub mod large;
pub mod memory;
pub mod meter;
mod root;
mod settle;
mod types;
mod url;
mod watch;

use std::sync::Arc;

use bytes::Bytes;
use leasehold_protocol::cas::Version;
use leasehold_protocol::format::root::Limit;
use leasehold_protocol::key::Key;
use leasehold_protocol::time::StoreTime;

pub use backend::{Backend, Kind};
pub use types::{
    Delete, Detail, Durability, Entry, Get, List, Meta, Object, PAGE, Page, Put, Unknown, Write,
};
pub use url::{Connect, StoreUrl};
pub use watch::Watch;

use crate::env::Env;
use crate::lease::Nursery;
use crate::store::large::Draft;
use crate::{Error, ErrorKind, Result, StoreSettings};
use meter::{Meter, Usage};
use settle::{Driver, retrying};

/// A store. Clones share the connection, the meter and what is known of the store.
#[derive(Debug, Clone)]
pub struct Store(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    backend: Arc<dyn Backend>,
    env: Env,
    settings: StoreSettings,
    root: tokio::sync::OnceCell<root::Known>,
    /// Whether the root record is made if it is not there.
    makes_root: bool,
    nursery: Nursery,
}

impl Store {
    /// A store on this backend.
    pub fn new(backend: Arc<dyn Backend>, env: Env, settings: StoreSettings) -> Result<Self> {
        let settings = settings.checked()?;
        let root = tokio::sync::OnceCell::new();
        Ok(Self(Arc::new(Inner {
            backend,
            env,
            settings,
            root,
            makes_root: true,
            nursery: Nursery::default(),
        })))
    }

    /// The same store, but no root record is put into it: for a folder of somebody else's, in which
    /// only single files are ours. One that is there is minded.
    #[must_use]
    pub fn without_root_record(&self) -> Self {
        let Inner { backend, env, settings, .. } = &*self.0;
        Self(Arc::new(Inner {
            backend: backend.clone(),
            env: env.clone(),
            settings: settings.clone(),
            root: tokio::sync::OnceCell::new(),
            makes_root: false,
            nursery: Nursery::default(),
        }))
    }

    /// An empty store in memory.
    pub fn memory() -> Self {
        let env = Env::system();
        let backend = Arc::new(memory::Memory::new(env.clone()));
        Self(Arc::new(Inner {
            backend,
            env,
            settings: StoreSettings::default(),
            root: tokio::sync::OnceCell::new(),
            makes_root: true,
            nursery: Nursery::default(),
        }))
    }

    /// The object at `key`, or `None`. One GET.
    pub async fn get(&self, key: &Key) -> Result<Option<Object>> {
        let got = retrying!(self.driver(), self.0.backend.get(key, None).await)?;
        Ok(match got {
            Get::Found(object) => Some(object),
            Get::Absent | Get::Unchanged => None,
        })
    }

    /// The object at `key` unless it is still the `known` version: then no body is transferred.
    /// One GET.
    pub async fn get_if_changed(&self, key: &Key, known: &Version) -> Result<Get> {
        retrying!(self.driver(), self.0.backend.get(key, Some(known)).await)
    }

    /// What the store tells of the object at `key`, or `None`. One HEAD.
    pub async fn head(&self, key: &Key) -> Result<Option<Meta>> {
        retrying!(self.driver(), self.0.backend.head(key).await)
    }

    /// Writes an object. One PUT; one GET more for each answer that got lost.
    ///
    /// `Contended` and `Unknown` are what remains after all attempts.
    pub async fn put(&self, key: &Key, body: Bytes, write: Write) -> Result<Put> {
        self.may_write().await?;
        self.driver().put(key, body, &write, None).await
    }

    /// The same for an object that means something even when it is gone again. `may_repeat` is asked before
    /// it is sent again because no answer came and nothing is there: it may have been there meanwhile.
    /// If not, it is [`Unknown::Overtaken`].
    pub(crate) async fn put_unless_over<'a>(
        &'a self,
        key: &Key,
        body: Bytes,
        write: Write,
        may_repeat: settle::MayRepeat<'a>,
    ) -> Result<Put> {
        self.may_write().await?;
        self.driver().put(key, body, &write, Some(may_repeat)).await
    }

    /// Writes a body once that can become many objects, where that saves something: for [`Store::link`].
    pub(crate) async fn draft(&self, body: &Bytes) -> Result<Option<Draft>> {
        self.may_write().await?;
        Ok(self.0.backend.draft(body))
    }

    /// Makes a draft the object at `key`, if there is none. `None` where it has to be put instead. There is
    /// nothing to settle: it is this machine's file.
    pub(crate) async fn link(&self, key: &Key, draft: &Draft) -> Result<Option<Put>> {
        self.may_write().await?;
        self.0.backend.link(key, draft).await
    }

    /// Deletes an object in whatever state it is. One DELETE.
    pub async fn delete(&self, key: &Key) -> Result<Delete> {
        self.may_write().await?;
        self.driver().delete(key, None).await
    }

    /// Deletes an object in this version only. One DELETE; one HEAD more for each lost answer.
    ///
    /// `Unsupported` on a store that cannot do it safely: see [`Store::limits`].
    pub async fn delete_version(&self, key: &Key, version: &Version) -> Result<Delete> {
        if !self.deletes_conditionally().await? {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "this store cannot delete conditionally (run `leasehold doctor`)",
            )
            .at(key));
        }
        self.driver().delete(key, Some(version)).await
    }

    /// The same of an object that other programs may write. In a directory they take no lock of ours.
    pub(crate) async fn delete_foreign(&self, key: &Key, version: &Version) -> Result<Delete> {
        match self.kind() == Kind::Directory && self.deletes_conditionally().await? {
            true => self.0.backend.delete_foreign(key, version).await,
            false => self.delete_version(key, version).await,
        }
    }

    /// Whether this store can delete conditionally.
    pub(crate) async fn deletes_conditionally(&self) -> Result<bool> {
        Ok(!self.may_write().await?.limits.contains(&Limit::ConditionalDelete))
    }

    /// Deletes a lease in this version, remembering its token. On a store that cannot delete
    /// conditionally nothing is deleted, and that counts as refused.
    pub(crate) async fn retire(&self, key: &Key, version: &Version, token: u64) -> Result<Delete> {
        if !self.deletes_conditionally().await? {
            return Ok(Delete::Refused);
        }
        self.0.backend.retire(key, version, token).await
    }

    /// Deletes what is done and then its lease, as [`Store::delete_version`] and
    /// [`Store::retire`] do one after the other. `None` where that is no better.
    pub(crate) async fn finish(
        &self,
        work: (&Key, &Version),
        lease: (&Key, &Version),
        token: u64,
    ) -> Result<Option<(Delete, Delete)>> {
        match self.deletes_conditionally().await? {
            true => self.0.backend.finish(work, lease, token).await,
            false => Ok(None),
        }
    }

    /// Deletes many objects in whatever state they are, in batches where the store has them. On an
    /// error some may be gone; deleting the same again is safe.
    pub async fn delete_many(&self, keys: &[Key]) -> Result<()> {
        self.may_write().await?;
        retrying!(self.driver(), self.0.backend.delete_many(keys).await)
    }

    /// A listing, fetched page by page: one LIST each.
    pub fn list(&self, list: List) -> Listing {
        let limit = list.limit;
        let mut list = list;
        if let Some(limit) = limit {
            list.page = list.page.min(limit.max(1));
        }
        Listing { store: self.clone(), lister: self.0.backend.list(list), left: limit }
    }

    /// Wakes whoever waits for a key, or for keys with this prefix, to change: in a directory, where
    /// the system can tell. No request, and on a bucket no effect.
    ///
    /// A prefix that ends with `/` is a folder: told is what changes in it, and what appears in
    /// folders that are made in it from now on. What changes deeper in folders that are there
    /// already is not: watch those.
    pub fn watch(&self, prefix: &str) -> Result<Watch> {
        leasehold_protocol::key::check_prefix(prefix)?;
        Ok(self.0.backend.watch(prefix))
    }

    /// Makes what others wrote at these keys durable. No request on a bucket, which always is.
    pub async fn persist(&self, keys: &[Key]) -> Result<()> {
        self.0.backend.persist(keys).await
    }

    /// The store's time, as its last answer told it plus what has passed here since. Asks the
    /// store (one HEAD) if it has not said anything yet.
    ///
    /// Good enough to rank and to stamp. Whether a lease is stale is judged by the two times of
    /// one response instead, see [`Meta`].
    pub async fn now(&self) -> Result<StoreTime> {
        let reading = match self.0.backend.reading() {
            Some(reading) => reading,
            None => {
                Box::pin(self.head(&root::key())).await?;
                self.0.backend.reading().ok_or_else(|| {
                    Error::new(ErrorKind::Unsupported, "the store does not tell the time")
                })?
            }
        };
        Ok(reading.store.plus(self.0.env.clock().boot().since(reading.at)))
    }

    /// What this store is known not to do. Reads the store's root record, once.
    pub async fn limits(&self) -> Result<std::collections::BTreeSet<Limit>> {
        Ok(self.may_write().await?.limits.clone())
    }

    /// Makes the store if it is not there: tries out its conditional requests and writes the root
    /// record. Every write does this first, once; calling it is a way to do it early.
    pub async fn init(&self) -> Result<()> {
        self.may_write().await.map(|_| ())
    }

    /// From now on: at most so many connections, and requests a minute, for all clones. See
    /// [`StoreSettings`], which these take the place of.
    pub fn limit(&self, connections: usize, requests_per_minute: Option<u32>) {
        self.0.backend.limit(connections.max(1), requests_per_minute);
    }

    /// What was requested so far, by all clones.
    pub fn usage(&self) -> Usage {
        self.meter().usage()
    }

    /// The counter behind [`Store::usage`].
    pub fn meter(&self) -> &Arc<Meter> {
        self.0.backend.meter()
    }

    /// Its URL, for messages.
    pub fn url(&self) -> String {
        self.0.backend.url()
    }

    /// What sort of store it is.
    pub fn kind(&self) -> Kind {
        self.0.backend.kind()
    }

    /// Where its time and chance come from.
    pub fn env(&self) -> &Env {
        &self.0.env
    }

    /// What is below it: single requests and raw outcomes. For the doctor and for tests.
    pub fn backend(&self) -> &Arc<dyn Backend> {
        &self.0.backend
    }

    /// A handle whose backend shares nothing with this one's, where that makes a difference.
    fn sibling(&self) -> Self {
        match self.0.backend.sibling() {
            Some(backend) => Self(Arc::new(Inner {
                backend,
                env: self.0.env.clone(),
                settings: self.0.settings.clone(),
                root: tokio::sync::OnceCell::new(),
                makes_root: self.0.makes_root,
                nursery: Nursery::default(),
            })),
            None => self.clone(),
        }
    }

    /// Where leases of this store are kept an eye on until they are worth a task of their own.
    pub(crate) fn nursery(&self) -> &Nursery {
        &self.0.nursery
    }

    fn driver(&self) -> Driver<'_> {
        Driver { backend: &*self.0.backend, env: &self.0.env, settings: &self.0.settings }
    }

    async fn may_write(&self) -> Result<&root::Known> {
        let known = match self.0.root.get() {
            Some(known) => known,
            // Boxed: this happens once, and every write would carry it along.
            None => {
                let know = || root::know(self.driver(), self.0.makes_root);
                Box::pin(self.0.root.get_or_try_init(know)).await?
            }
        };
        known.writable()?;
        Ok(known)
    }
}

/// A listing in progress.
pub struct Listing {
    store: Store,
    lister: Box<dyn backend::Lister>,
    left: Option<usize>,
}

impl Listing {
    /// The next page, or `None` after the last one.
    pub async fn next_page(&mut self) -> Result<Option<Page>> {
        if self.left == Some(0) {
            return Ok(None);
        }
        let page = retrying!(self.store.driver(), self.lister.next_page().await)?;
        let Some(mut page) = page else { return Ok(None) };
        if let Some(left) = &mut self.left {
            // Only the last page can be too long. What comes last in order goes.
            while page.len() > *left {
                let entry = page.entries.last().map(|entry| entry.key.as_str());
                match entry > page.prefixes.last().map(String::as_str) {
                    true => drop(page.entries.pop()),
                    false => drop(page.prefixes.pop()),
                }
            }
            *left -= page.len();
        }
        Ok(Some(page))
    }

    /// Everything at once. Only for what is known to be small, or limited.
    pub async fn collect(mut self) -> Result<Page> {
        let mut all = Page::default();
        while let Some(page) = self.next_page().await? {
            all.entries.extend(page.entries);
            all.prefixes.extend(page.prefixes);
            all.now = page.now.or(all.now);
            all.unnamed += page.unnamed;
        }
        Ok(all)
    }
}

/// The version of a small object where the store has no better one: a hash of its content.
fn content_version(body: &[u8]) -> Version {
    Version::new(format!("{:032x}", xxhash_rust::xxh3::xxh3_128(body)))
}
