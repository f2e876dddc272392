//! A store in a plain directory: real compare-and-swap between processes, nothing to install.
//!
//! - **Create** writes a temporary file and renames it without replacing: exactly one of many
//!   racing creators succeeds, and nobody sees a half-written or empty object. Leases of tasks are
//!   made in their place instead, which is cheaper, and may be seen empty for a moment; or, cheaper yet, they
//!   are links of one file.
//! - **Replace and delete** hold a stripe lock (`stripe`) while they compare and rename.
//! - **Version**: a hash of the content. Inode numbers are reused and timestamps are coarse.
//! - **Durable** writes are flushed in groups (`flush`); others are not waited for.
//! - A **network file system** is refused: see `netfs`.
//!
//! Everything that is not an object stands in `.lh/`. A crash can leave a temporary file there;
//! a process that begins to write seventy minutes later sweeps it away.

mod discard;
mod draft;
mod fence;
mod files;
mod flush;
mod foreign;
mod journal;
mod large;
mod list;
mod names;
mod netfs;
mod noted;
mod smallest;
mod staged;
mod stripe;
mod temp;
mod tidy;
#[cfg(any(target_os = "linux", target_os = "android"))]
pub(super) mod watch;

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use leasehold_protocol::cas::{Version, When};
use leasehold_protocol::key::Key;
use leasehold_protocol::layout::queue::{is_lease, unit_folder};
use rustix::fs::{Access, AtFlags, Mode, OFlags, Stat};
use rustix::io::Errno;

use self::draft::Drafts;
use self::fence::Fence;
use self::files::{
    Folders, InPlace, create, create_lease, file_meta, io_error, make_folder, mtime, open,
    open_beneath, read_all, remove, remove_after, remove_both, replace, version_by_content,
    version_of, write_error,
};
use self::flush::{Flusher, Target};
use self::names::{PRIVATE, path_of};
use self::stripe::{Stripe, Stripes};
use self::temp::Temps;
use self::tidy::Traffic;
use super::backend::{Backend, Kind, Lister, Reading};
use super::large::{Draft, FileBody, Source, Staged, Stamp};
use super::meter::{Class, Meter};
use super::types::{Delete, Durability, Get, List, Meta, Object, Put};
#[cfg(any(target_os = "linux", target_os = "android"))]
use super::watch::Watch;
use crate::env::Env;
use crate::{Error, ErrorKind, Result, host};

/// Up to this size a version is a hash of the whole content. Larger objects take longer to write
/// than the coarsest file system clock ticks, so for them inode and times are as good.
const HASHED: u64 = 16 << 20;

/// What is no longer than this is written at once: nobody sees the first half of it.
const ONE_PAGE: usize = 4096;

/// A directory.
#[derive(Debug)]
pub struct Dir(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    path: PathBuf,
    force: bool,
    env: Env,
    meter: Arc<Meter>,
    root: OnceLock<Arc<OwnedFd>>,
    work: OnceLock<Work>,
    steady: OnceLock<bool>,
}

/// What writing needs.
#[derive(Debug)]
struct Work {
    root: Arc<OwnedFd>,
    private: OwnedFd,
    temps: Temps,
    stripes: Stripes,
    folders: Folders,
    flusher: Arc<Flusher>,
    fence: Fence,
    drafts: Drafts,
    traffic: Traffic,
}

impl Drop for Work {
    fn drop(&mut self) {
        self.flusher.end();
    }
}

impl Dir {
    /// The store in this directory, which the first write creates if it is not there. `force` uses
    /// it even on a network file system.
    pub fn new(path: impl Into<PathBuf>, force: bool, env: Env) -> Result<Self> {
        Self::with_meter(path.into(), force, env, Arc::default())
    }

    fn with_meter(path: PathBuf, force: bool, env: Env, meter: Arc<Meter>) -> Result<Self> {
        let shared = Shared {
            path,
            force,
            env,
            meter,
            root: OnceLock::new(),
            work: OnceLock::new(),
            steady: OnceLock::new(),
        };
        // A file in its place, or a network under it, is better said now than later.
        shared.root()?;
        Ok(Self(Arc::new(shared)))
    }

    /// Runs `change` with the key's stripe lock: here if it is free, else on a thread that may
    /// wait.
    async fn locked<T: Send + 'static>(
        &self,
        key: &Key,
        change: impl FnOnce(&Work, Stripe<'_>) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let shared = &self.0;
        let work = shared.work()?;
        if let Some(stripe) = work.stripes.lock_briefly(&work.root, key.as_str(), &shared.env)? {
            return change(work, stripe);
        }
        let (shared, key) = (shared.clone(), key.clone());
        // Whoever stops waiting must not find the change made later.
        let wanted = Arc::new(AtomicBool::new(true));
        let _abandon = Abandon(wanted.clone());
        tokio::task::spawn_blocking(move || {
            let work = shared.work()?;
            let stripe = work.stripes.lock(&work.root, key.as_str(), &shared.env)?;
            match wanted.load(SeqCst) {
                true => change(work, stripe),
                false => Err(Error::unavailable("nobody waits for this write any more").at(&key)),
            }
        })
        .await
        .map_err(|error| Error::unavailable("the write was interrupted").caused_by(error))?
    }
}

/// Set to false when the future that holds it is dropped.
struct Abandon(Arc<AtomicBool>);

impl Drop for Abandon {
    fn drop(&mut self) {
        self.0.store(false, SeqCst);
    }
}

#[async_trait]
impl Backend for Dir {
    fn url(&self) -> String {
        self.0.path.display().to_string()
    }

    fn kind(&self) -> Kind {
        Kind::Directory
    }

    fn meter(&self) -> &Arc<Meter> {
        &self.0.meter
    }

    fn reading(&self) -> Option<Reading> {
        let clock = self.0.env.clock();
        Some(Reading { store: clock.wall(), at: clock.boot(), unsure: Duration::ZERO })
    }

    async fn get(&self, key: &Key, unless: Option<&Version>) -> Result<Get> {
        self.0.meter.request(Class::Get, 0);
        let Some(root) = self.0.root()? else { return Ok(Get::Absent) };
        let mut patience = 10;
        let (body, stat) = loop {
            let Some((file, stat)) = open(root, key)? else { return Ok(Get::Absent) };
            let body = read_all(&file, &stat).map_err(|error| io_error("read", error).at(key))?;
            let about_to_be_written = || {
                let age = self.0.env.clock().wall().since(mtime(&stat));
                age < Duration::from_secs(1) && is_lease(key.as_str())
            };
            // See `create_lease`.
            if !body.is_empty() || patience == 0 || !about_to_be_written() {
                break (body, stat);
            }
            patience -= 1;
            self.0.env.clock().sleep(Duration::from_millis(1)).await;
        };
        let version = version_of(&body, &stat, key);
        if unless == Some(&version) {
            return Ok(Get::Unchanged);
        }
        self.0.meter.received(body.len() as u64);
        let meta = self.0.meta(version, &stat);
        Ok(Get::Found(Object { body: body.into(), meta }))
    }

    async fn head(&self, key: &Key) -> Result<Option<Meta>> {
        self.0.meter.request(Class::Head, 0);
        let Some(root) = self.0.root()? else { return Ok(None) };
        let found = file_meta(root, key)?;
        Ok(found.map(|(version, stat)| self.0.meta(version, &stat)))
    }

    async fn put(
        &self,
        key: &Key,
        body: Bytes,
        when: &When,
        durability: Durability,
    ) -> Result<Put> {
        self.0.meter.request(Class::Put, body.len() as u64);
        let work = self.0.work()?;
        if let (When::Absent, Durability::Volatile) = (when, durability)
            && is_lease(key.as_str())
            && body.len() <= ONE_PAGE
        {
            match create_lease(work, key, &body, &self.0.env)? {
                InPlace::Created(version) => return Ok(Put::Stored(version)),
                InPlace::Exists => return Ok(Put::Refused),
                InPlace::NotHere => {}
            }
        }
        let _writer = (durability != Durability::Volatile).then(|| work.flusher.writer());
        let mut temp = work.temps.write(&body).map_err(|error| error.at(key))?;
        if durability == Durability::Durable {
            return self.put_durable(key, body, temp, when).await;
        }
        if durability != Durability::Volatile {
            // Nothing is visible yet, so a failure here is a plain one.
            let data = vec![Target::File(temp.file.clone())];
            work.flusher.flush(data).await.map_err(|error| error.at(key))?;
        }
        let version = version_by_content(&body);
        let stored = match when {
            When::Absent => create(work, key, &mut temp, version.as_ref())?,
            When::Any | When::Matches(_) => {
                let (at, when) = (key.clone(), when.clone());
                let replaced = self.locked(key, move |work, _stripe| {
                    replace(work, &at, &mut temp, version.as_ref(), &when, durability)
                });
                replaced.await?
            }
        };
        Ok(stored.map_or(Put::Refused, Put::Stored))
    }

    fn draft(&self, body: &Bytes) -> Option<Draft> {
        self.draft_file(body)
    }

    async fn link(&self, key: &Key, draft: &Draft) -> Result<Option<Put>> {
        self.link_draft(key, draft)
    }

    async fn delete(&self, key: &Key, version: Option<&Version>) -> Result<Delete> {
        self.0.meter.request(Class::Delete, 0);
        if self.0.root()?.is_none() {
            return Ok(if version.is_some() { Delete::Refused } else { Delete::Deleted });
        }
        let (at, version) = (key.clone(), version.cloned());
        self.locked(key, move |work, stripe| {
            let outcome = remove(work, &at, version.as_ref())?;
            if matches!(outcome, Delete::Deleted) {
                work.note_deleted([&at]);
                drop(stripe);
                work.tidy(&path_of(at.as_str()), false);
            }
            Ok(outcome)
        })
        .await
    }

    async fn delete_foreign(&self, key: &Key, version: &Version) -> Result<Delete> {
        self.0.meter.request(Class::Delete, 0);
        if self.0.root()?.is_none() {
            return Ok(Delete::Refused);
        }
        let (at, version, random) = (key.clone(), version.clone(), self.0.env.random());
        self.locked(key, move |work, stripe| {
            let outcome = foreign::remove(work, &at, &version, random)?;
            if matches!(outcome, Delete::Deleted) {
                work.note_deleted([&at]);
                drop(stripe);
                work.tidy(&path_of(at.as_str()), false);
            }
            Ok(outcome)
        })
        .await
    }

    async fn retire(&self, key: &Key, version: &Version, token: u64) -> Result<Delete> {
        self.0.meter.request(Class::Delete, 0);
        let (at, version) = (key.clone(), version.clone());
        self.locked(key, move |work, stripe| {
            // First what is remembered, then what is forgotten.
            let outcome = remove_after(work, &at, Some(&version), || {
                stripe.retire(token).map_err(|error| write_error(error).at(&at))
            })?;
            if matches!(outcome, Delete::Deleted) {
                work.note_deleted([&at]);
            }
            drop(stripe);
            if matches!(outcome, Delete::Deleted) {
                work.tidy(&path_of(at.as_str()), false);
            }
            Ok(outcome)
        })
        .await
    }

    async fn finish(
        &self,
        work: (&Key, &Version),
        lease: (&Key, &Version),
        token: u64,
    ) -> Result<Option<(Delete, Delete)>> {
        let folder = unit_folder(work.0.as_str());
        if folder.is_none() || folder != unit_folder(lease.0.as_str()) {
            return Ok(None);
        }
        self.0.meter.request(Class::Delete, 0);
        self.0.meter.request(Class::Delete, 0);
        let (at, task_version) = (work.0.clone(), work.1.clone());
        let (lease, lease_version) = (lease.0.clone(), lease.1.clone());
        let both = self.locked(work.0, move |work, stripe| {
            let one = (&at, &task_version);
            let removed = remove_both(work, one, (&lease, &lease_version), || {
                stripe.retire(token).map_err(|error| write_error(error).at(&lease))
            })?;
            let gone = [(&removed.0, &at), (&removed.1, &lease)];
            let gone = gone.into_iter().filter(|(removed, _)| matches!(removed, Delete::Deleted));
            work.note_deleted(gone.map(|(_, key)| key));
            drop(stripe);
            // Nobody would have put the lease there after the task.
            if matches!(removed.1, Delete::Deleted) {
                work.tidy(&path_of(lease.as_str()), false);
            }
            Ok(removed)
        });
        both.await.map(Some)
    }

    async fn floor(&self, key: &Key) -> Result<u64> {
        let work = self.0.work()?;
        work.fence.floor(work, key.as_str(), host::boot_id())
    }

    async fn reserve(&self, token: u64) -> Result<()> {
        let work = self.0.work()?;
        work.fence.reserve(work, token, host::boot_id())
    }

    async fn delete_many(&self, keys: &[Key]) -> Result<()> {
        for key in keys {
            // Without a condition there is nothing to be refused.
            let _ = self.delete(key, None).await?;
        }
        // Whoever deletes by the dozen is done with the folders too.
        if let Some(work) = self.0.work.get() {
            keys.iter().for_each(|key| work.tidy(&path_of(key.as_str()), true));
        }
        Ok(())
    }

    async fn open(&self, key: &Key) -> Result<Option<Box<dyn Source>>> {
        self.open_source(key)
    }

    async fn put_file(
        &self,
        key: &Key,
        body: &FileBody,
        when: &When,
        durability: Durability,
    ) -> Result<Put> {
        match body.len() > HASHED {
            true => self.put_large(key, body, when, durability).await,
            false => self.put(key, body.read_all()?, when, durability).await,
        }
    }

    async fn stage(&self, key: &Key, body: &Bytes) -> Result<Option<Staged>> {
        self.stage_file(key, body)
    }

    async fn publish(&self, staged: Vec<(Staged, When)>) -> Vec<Result<Put>> {
        self.publish_files(staged).await
    }

    async fn discard(&self, keys: &[Key]) -> Result<()> {
        self.discard_files(keys).await
    }

    fn stamp(&self, name: &str) -> Option<Stamp> {
        self.stamp_of(name)
    }

    fn peek(&self, folder: &str, most: usize) -> Option<(Stamp, Vec<Key>)> {
        list::peek(&self.0, folder, most)
    }

    fn slurp(&self, key: &Key) -> Option<(Stamp, Bytes)> {
        self.slurp_file(key)
    }

    fn glance(&self, key: &Key) -> Option<(Stamp, Option<Box<dyn Source>>)> {
        self.glance_at(key)
    }

    fn list(&self, list: List) -> Box<dyn Lister> {
        Box::new(list::DirLister::new(self.0.clone(), list))
    }

    fn sibling(&self) -> Option<Arc<dyn Backend>> {
        // Open files and mutexes of its own: as different as another process.
        let Shared { path, force, env, meter, .. } = &*self.0;
        let sibling = Self::with_meter(path.clone(), *force, env.clone(), meter.clone());
        Some(Arc::new(sibling.ok()?))
    }

    fn seems_there(&self, key: &Key) -> bool {
        let Ok(Some(root)) = self.0.root() else { return false };
        rustix::fs::accessat(root, &*path_of(key.as_str()), Access::EXISTS, AtFlags::empty())
            .is_ok()
    }

    #[cfg(any(target_os = "linux", target_os = "android"))]
    fn watch(&self, prefix: &str) -> Watch {
        match self.0.root() {
            Ok(Some(root)) => Watch::by(watch::Watcher::new(root, &path_of(prefix))),
            // Nobody has written anything yet, and there is nothing to watch.
            _ => Watch::never(),
        }
    }

    async fn persist(&self, keys: &[Key]) -> Result<()> {
        match self.0.root()? {
            Some(_) => self.persist_noted(keys).await,
            None => Ok(()),
        }
    }
}

impl Shared {
    /// The root, or `None` if nobody has written anything yet.
    fn root(&self) -> Result<Option<&Arc<OwnedFd>>> {
        if let Some(root) = self.root.get() {
            return Ok(Some(root));
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = match rustix::fs::open(&self.path, flags, Mode::empty()) {
            Ok(root) => root,
            Err(Errno::NOENT) => return Ok(None),
            Err(Errno::NOTDIR) => return Err(self.not_a_directory()),
            Err(error) => return Err(self.failed("open", error)),
        };
        if !self.force
            && let Some(name) = netfs::network_fs(&root)
        {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "{} is on a network file system ({name}), where locks and renames are not \
                     reliable between machines; use a local directory or a bucket",
                    self.path.display()
                ),
            ));
        }
        if let Err(error) = journal::recover(&root, &self.env) {
            // What is there can be read. Writing waits until this has been done.
            tracing::warn!(
                store = %self.path.display(), %error,
                "the machine was not shut down cleanly, and what was written last cannot be recovered"
            );
        }
        Ok(Some(self.root.get_or_init(|| Arc::new(root))))
    }

    /// The root and what writing needs, made if they are not there.
    fn work(&self) -> Result<&Work> {
        if let Some(work) = self.work.get() {
            return Ok(work);
        }
        let root = match self.root()? {
            Some(root) => root.clone(),
            None => self.create_root()?,
        };
        // Done already, unless it failed: a recovery that came later would undo what we write.
        journal::recover(&root, &self.env)?;
        let folder = |name: &str| -> Result<OwnedFd, Errno> {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let open = || rustix::fs::openat(&root, name, flags, Mode::empty());
            match open() {
                Err(Errno::NOENT) => make_folder(&root, name).and_then(|()| open()),
                opened => opened,
            }
        };
        let make = || -> Result<Work, Errno> {
            let private = folder(PRIVATE)?;
            make_folder(&root, &format!("{PRIVATE}/locks"))?;
            Ok(Work {
                private,
                temps: Temps::new(self.env.random(), folder)?,
                stripes: Stripes::new(),
                folders: Folders::default(),
                flusher: Arc::new(Flusher::new(root.clone(), self.env.clone())),
                fence: Fence::default(),
                drafts: Drafts::default(),
                traffic: Traffic::default(),
                root: root.clone(),
            })
        };
        let work = make().map_err(|error| self.failed("write to", error))?;
        let work = self.work.get_or_init(|| work);
        work.temps.sweep(&work.private, self.env.clock().wall());
        Ok(work)
    }

    fn create_root(&self) -> Result<Arc<OwnedFd>> {
        let made = std::fs::create_dir_all(&self.path).and_then(|()| {
            // The new directory's own entry must survive a power loss too.
            let parent = self.path.parent().filter(|parent| !parent.as_os_str().is_empty());
            std::fs::File::open(parent.unwrap_or(Path::new(".")))?.sync_all()
        });
        if let Err(error) = made {
            if matches!(
                error.kind(),
                std::io::ErrorKind::NotADirectory | std::io::ErrorKind::AlreadyExists
            ) {
                return Err(self.not_a_directory());
            }
            let error = Errno::from_io_error(&error).unwrap_or(Errno::IO);
            return Err(self.failed("create", error));
        }
        let root = self.root()?;
        root.cloned().ok_or_else(|| self.failed("open", Errno::NOENT))
    }

    /// When the folder of these keys last changed, on file systems where reading it meanwhile can
    /// miss what was there all the time. `None` where it cannot: ext4 and xfs.
    fn changes_of(&self, root: &OwnedFd, key: &str) -> Result<Option<(i64, i64)>> {
        let steady = *self.steady.get_or_init(|| netfs::reads_steadily(root));
        if steady {
            return Ok(None);
        }
        let path = path_of(key.trim_end_matches('/'));
        let path = if path.is_empty() { "." } else { &*path };
        match rustix::fs::statat(root, path, AtFlags::empty()) {
            #[allow(clippy::unnecessary_cast)] // the fields differ in type between systems
            Ok(stat) => Ok(Some((stat.st_mtime as i64, stat.st_mtime_nsec as i64))),
            Err(_) => Ok(None),
        }
    }

    fn meta(&self, version: Version, stat: &Stat) -> Meta {
        Meta {
            version,
            modified: mtime(stat),
            now: self.env.clock().wall(),
            size: u64::try_from(stat.st_size).unwrap_or(0),
        }
    }

    fn not_a_directory(&self) -> Error {
        Error::invalid(format!(
            "{} is a file, and a store needs a directory: choose another path",
            self.path.display()
        ))
    }

    fn failed(&self, verb: &str, error: Errno) -> Error {
        io_error(&format!("{verb} {}", self.path.display()), error)
    }
}
