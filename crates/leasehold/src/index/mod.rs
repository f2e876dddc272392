//! The index: records of any number, found by key, on a bucket or in a directory.
//!
//! ```text
//!   put ──▶ inbox/{xx}/…    immutable objects, visible at once
//!              │  compiler: many may run; a lease saves work, a condition keeps the data
//!              ▼
//!           shards/{xx}.usv  sorted rows, 256 of them, readable by DuckDB, qsv, Frictionless
//!              ▲
//!   get ── inbox first, then shard: the latest counts
//! ```
//!
//! ```
//! # async fn tour(store: leasehold::Store) -> leasehold::Result<()> {
//! use leasehold::index::{Index, NewIndex, Field};
//! use serde::{Deserialize, Serialize};
//!
//! #[derive(Serialize, Deserialize)]
//! struct Company { domain: String, company_name: String, scraper_version: i64 }
//!
//! let fields = ["domain:domain", "company_name", "scraper_version:integer"];
//! let fields = fields.map(|text| Field::parse(text).expect("a field")).to_vec();
//! let index = Index::create(&store, "domains", NewIndex::with_fields(fields)?).await?;
//! let acme = Company { domain: "example.com".into(), company_name: "Acme".into(), scraper_version: 3 };
//! index.put(&acme).await?;
//! let found: Option<Company> = index.get("Example.com.").await?;
//! # assert_eq!(found.map(|company| company.scraper_version), Some(3));
//! index.compact().await?;
//! # assert!(index.get::<Company>("example.com").await?.is_some());
//! # Ok(())
//! # }
//! # tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap()
//! #     .block_on(tour(leasehold::Store::memory())).unwrap();
//! ```
//!
//! The decisions are [`leasehold_protocol::compile`]'s, [`leasehold_protocol::merge`]'s and
//! [`leasehold_protocol::format`]'s; here they are carried out.

mod cache;
mod compact;
mod compiler;
mod convoy;
mod copy;
mod duckdb;
mod find;
mod inbox;
mod quarantine;
mod read;
mod scan;
mod sort;
mod status;
mod verify;
mod write;

use std::path::PathBuf;
use std::sync::atomic::AtomicI64;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use leasehold_protocol::cas::Version;
use leasehold_protocol::format::datapackage::SchemaError;
use leasehold_protocol::format::row::RowError;
use leasehold_protocol::layout::index::{INDEXES, Layout, NameError, index_of};
use leasehold_protocol::mutant::{self, Mutant};
use leasehold_protocol::settle::Proof;
use leasehold_protocol::time::Ahead;
use serde::{Deserialize, Serialize};

pub use compact::{Compaction, Outcome};
pub use compiler::{CompactOptions, Compiler, CompilerSettings, Pass};
pub use leasehold_protocol::compile::Trigger;
pub use leasehold_protocol::format::datapackage::{Field, Kind as FieldKind, Package, Schema};
pub use leasehold_protocol::format::quarantine::Reason;
pub use leasehold_protocol::format::statistics::{Counts, Statistics};
pub use leasehold_protocol::shard::{Shard, Width};
pub use quarantine::Quarantined;
pub use read::Freshness;
pub use scan::{Chunk, Scan};
pub use status::{ShardStatus, Status};
pub use verify::{Finding, Verified};
pub use write::Batch;

use crate::env::BootTime;
use crate::settings::duration_text;
use crate::store::{Get, List, Put, Unknown, Write};
use crate::{Error, ErrorKind, Result, Store, StoreTime, When};

/// How this process reads and compiles.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct IndexSettings {
    /// How many bytes of shards and inbox objects are kept in memory. A shard that is kept costs a
    /// conditional GET without a body per lookup; one that is not, a GET of all of it.
    pub cache_bytes: u64,
    /// Where shards are kept between two runs of a program, if anywhere.
    pub cache_folder: Option<PathBuf>,
    /// Where compilers put what does not fit into memory. By default the system's folder for
    /// temporary files; it needs room for a shard and its inbox.
    pub spool_folder: Option<PathBuf>,
    /// How many bytes compilers keep in memory, all of this process together.
    pub compiler_bytes: u64,
    /// How many inbox objects one compaction takes at most. Their names are kept in memory.
    pub most_objects: usize,
    /// After how long without a renewal the lease of a shard is anybody's.
    #[serde(with = "duration_text")]
    pub lock_ttl: Duration,
}

impl Default for IndexSettings {
    fn default() -> Self {
        Self {
            cache_bytes: 256 << 20,
            cache_folder: None,
            spool_folder: None,
            compiler_bytes: 20 << 20,
            most_objects: 50_000,
            lock_ttl: Duration::from_secs(300),
        }
    }
}

/// What a new index is like.
#[derive(Debug, Clone)]
pub struct NewIndex {
    /// What its records look like.
    pub schema: Schema,
    /// How many digits name a shard. Fixed: another width is another index.
    pub width: Width,
    /// Whether `{key}.usv` files that other tools drop beside the inbox are picked up. Costs one
    /// request per lookup and one LIST per compaction.
    pub flat_inbox: bool,
}

impl NewIndex {
    /// With these fields, the first of which is the key, and 256 shards.
    pub fn with_fields(fields: Vec<Field>) -> Result<Self> {
        Ok(Self { schema: Schema::new(fields)?, width: Width::USUAL, flat_inbox: true })
    }
}

/// An index. Clones share the cache.
#[derive(Debug, Clone)]
pub struct Index(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    store: Store,
    layout: Layout,
    settings: IndexSettings,
    known: RwLock<Arc<Known>>,
    /// The latest time that this handle gave to a record.
    last: AtomicI64,
    /// How far the store's clock is ahead of our boot clock, as far as it told.
    ahead: Mutex<Option<Ahead>>,
    cache: cache::Cache,
    /// Memory for compilers, in KiB.
    memory: Arc<tokio::sync::Semaphore>,
    /// Room for names of objects that were merged and have yet to be deleted.
    unswept: Arc<tokio::sync::Semaphore>,
    /// Compilers that publish together.
    convoy: Arc<convoy::Convoy>,
    /// Who may open a shard before there is room for its compaction.
    opening: tokio::sync::Semaphore,
    /// Leave to read inbox objects of a bucket.
    reading: Arc<tokio::sync::Semaphore>,
    /// Whose turn it is to list an inbox.
    listing: tokio::sync::Mutex<()>,
    /// Shards that are sent from a file through memory, one after the other.
    sending: tokio::sync::Mutex<()>,
}

/// What is known of the index's description.
#[derive(Debug)]
struct Known {
    package: Arc<Package>,
    schema: Arc<Schema>,
    version: Version,
}

impl From<SchemaError> for Error {
    fn from(error: SchemaError) -> Self {
        Self::invalid(error.to_string())
    }
}

impl From<RowError> for Error {
    fn from(error: RowError) -> Self {
        Self::invalid(error.to_string())
    }
}

impl From<NameError> for Error {
    fn from(error: NameError) -> Self {
        Self::invalid(error.to_string())
    }
}

impl Index {
    /// Makes an index. `Invalid` if there is one with this name. One PUT.
    pub async fn create(store: &Store, name: &str, new: NewIndex) -> Result<Self> {
        let layout = Layout::new(name)?;
        let nonce = store.env().nonce();
        let package = Package::new(name, new.schema, new.width, new.flat_inbox).marked(nonce);
        let key = layout.datapackage();
        let write = Write::when(When::Absent, Proof::Nonce(nonce));
        match store.put(&key, package.to_bytes().into(), write).await? {
            Put::Stored(version) => {
                Ok(Self::with(store, layout, package, version, IndexSettings::default()))
            }
            Put::Refused | Put::Contended | Put::Unknown(Unknown::Overtaken(_)) => {
                Err(Error::invalid(format!("there is an index {name:?} already")))
            }
            Put::Unknown(unknown) => Err(unknown.into_error()),
        }
    }

    /// The index with this name. `NotFound` if there is none. One GET.
    pub async fn open(store: &Store, name: &str) -> Result<Self> {
        let found = Self::find(store, name).await?;
        found.ok_or_else(|| {
            let message = format!("there is no index {name:?} (see `leasehold index ls`)");
            Error::new(ErrorKind::NotFound, message)
        })
    }

    /// The index with this name, or `None`. One GET.
    pub async fn find(store: &Store, name: &str) -> Result<Option<Self>> {
        let layout = Layout::new(name)?;
        let key = layout.datapackage();
        let Some(object) = store.get(&key).await? else { return Ok(None) };
        let package = parse(&object.body).map_err(|error| error.at(&key))?;
        let version = object.meta.version;
        Ok(Some(Self::with(store, layout, package, version, IndexSettings::default())))
    }

    /// The names of all indexes in a store, page by page: one LIST. There may be folders among them that
    /// another tool made and that are no index: [`find`](Self::find) says so.
    pub async fn names(store: &Store) -> Result<Vec<String>> {
        let mut names = Vec::new();
        let mut listing = store.list(List::prefix(INDEXES)?.delimited());
        while let Some(page) = listing.next_page().await? {
            names.extend(
                page.prefixes.iter().filter_map(|prefix| index_of(prefix)).map(str::to_owned),
            );
        }
        Ok(names)
    }

    /// The same index, read and compiled in this way. Starts with an empty cache.
    #[must_use]
    pub fn with_settings(&self, settings: IndexSettings) -> Self {
        let known = self.known();
        let Inner { store, layout, .. } = &*self.0;
        let package = (*known.package).clone();
        Self::with(store, layout.clone(), package, known.version.clone(), settings)
    }

    fn with(
        store: &Store,
        layout: Layout,
        package: Package,
        version: Version,
        settings: IndexSettings,
    ) -> Self {
        let schema = Arc::new(package.schema.clone());
        let kib = usize::try_from(settings.compiler_bytes >> 10).unwrap_or(usize::MAX);
        let kib = kib.clamp(1 << 10, tokio::sync::Semaphore::MAX_PERMITS).min(u32::MAX as usize);
        Self(Arc::new(Inner {
            store: store.clone(),
            cache: cache::Cache::new(&settings, store, layout.name()),
            memory: Arc::new(tokio::sync::Semaphore::new(kib)),
            unswept: Arc::new(tokio::sync::Semaphore::new(settings.most_unswept())),
            convoy: Arc::default(),
            opening: tokio::sync::Semaphore::new(compact::OPENING),
            reading: Arc::new(tokio::sync::Semaphore::new(inbox::WINDOW)),
            listing: tokio::sync::Mutex::default(),
            sending: tokio::sync::Mutex::default(),
            known: RwLock::new(Arc::new(Known { package: Arc::new(package), schema, version })),
            last: AtomicI64::new(i64::MIN),
            ahead: Mutex::default(),
            layout,
            settings,
        }))
    }

    /// Its name.
    pub fn name(&self) -> &str {
        self.0.layout.name()
    }

    /// The store that it is in.
    pub fn store(&self) -> &Store {
        &self.0.store
    }

    /// How it is read and compiled.
    pub fn settings(&self) -> &IndexSettings {
        &self.0.settings
    }

    /// Its description, as this handle last saw it.
    pub fn package(&self) -> Arc<Package> {
        self.known().package.clone()
    }

    /// What its records look like, as this handle last saw it.
    pub fn schema(&self) -> Arc<Schema> {
        self.known().schema.clone()
    }

    /// All its shards.
    pub fn shards(&self) -> impl DoubleEndedIterator<Item = Shard> + ExactSizeIterator + use<> {
        self.known().package.width.all()
    }

    /// The store's time, to a fraction of a second: a bucket tells whole ones, and two nodes that put
    /// one after the other would otherwise be up to a second apart, in the wrong order.
    async fn now(&self) -> Result<StoreTime> {
        if let Some(now) = self.told() {
            return Ok(now);
        }
        let now = self.0.store.now().await?;
        Ok(self.told().unwrap_or(now))
    }

    /// The same without a request, or `None` if the store has not said anything yet.
    fn told(&self) -> Option<StoreTime> {
        let (store, clock) = (&self.0.store, self.0.store.env().clock());
        if mutant::is(Mutant::NaiveClock) {
            return Some(clock.wall());
        }
        let reading = store.backend().reading()?;
        let since_boot = |at: BootTime| at.since(BootTime::from_boot(Duration::ZERO));
        let newer = Ahead::told(reading.store, reading.unsure, since_boot(reading.at));
        let mut known = self.0.ahead.lock().unwrap_or_else(PoisonError::into_inner);
        let ahead = known.map_or(newer, |ahead| ahead.and(newer));
        *known = Some(ahead);
        Some(ahead.at(since_boot(clock.boot()), clock.wall()))
    }

    fn known(&self) -> Arc<Known> {
        self.0.known.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn learn(&self, package: Package, version: Version) {
        let schema = Arc::new(package.schema.clone());
        let mut known = self.0.known.write().unwrap_or_else(PoisonError::into_inner);
        *known = Arc::new(Known { package: Arc::new(package), schema, version });
    }

    /// Looks whether somebody changed the description: a conditional GET.
    pub async fn refresh(&self) -> Result<()> {
        let key = self.0.layout.datapackage();
        match self.0.store.get_if_changed(&key, &self.known().version).await? {
            Get::Unchanged => Ok(()),
            Get::Found(object) => {
                let package = parse(&object.body).map_err(|error| error.at(&key))?;
                self.learn(package, object.meta.version);
                Ok(())
            }
            Get::Absent => Err(Error::new(ErrorKind::Invalid, "the index was removed").at(&key)),
        }
    }

    /// Adds fields behind those that are there. Records that are there do not have them.
    pub async fn add_fields(&self, fields: Vec<Field>) -> Result<()> {
        self.change(|package| {
            package.schema = package.schema.grown(fields.clone())?;
            Ok(true)
        })
        .await
    }

    /// Gives the index another schema. Refused unless it only has more fields at its end; `force` does
    /// it nevertheless, and rows that do not fit it go to quarantine when they are next compacted.
    pub async fn set_schema(&self, schema: Schema, force: bool) -> Result<()> {
        self.change(|package| {
            if !force {
                package.schema.may_become(&schema)?;
            }
            package.schema = schema.clone();
            Ok(true)
        })
        .await
    }

    /// Changes the description, on top of whatever others changed meanwhile. `change` says whether
    /// there is anything to write.
    async fn change(&self, change: impl Fn(&mut Package) -> Result<bool>) -> Result<()> {
        let key = self.0.layout.datapackage();
        for _ in 0..16 {
            self.refresh().await?;
            let known = self.known();
            let nonce = self.0.store.env().nonce();
            let mut next = (*known.package).clone();
            if !change(&mut next)? {
                return Ok(());
            }
            let next = next.marked(nonce);
            let matches = When::Matches(known.version.clone());
            let write = Write::when(matches, Proof::Nonce(nonce));
            match self.0.store.put(&key, next.to_bytes().into(), write).await? {
                Put::Stored(version) => {
                    self.learn(next, version);
                    return Ok(());
                }
                Put::Refused | Put::Contended | Put::Unknown(Unknown::Overtaken(_)) => {}
                Put::Unknown(unknown) => return Err(unknown.into_error()),
            }
        }
        Err(Error::unavailable("others keep changing the index's description").at(&key))
    }
}

fn parse(bytes: &[u8]) -> Result<Package> {
    Package::parse(bytes).map_err(|error| Error::new(ErrorKind::Data, error.to_string()))
}
