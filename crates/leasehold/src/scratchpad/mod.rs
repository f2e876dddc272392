//! Shared state in files, for processes and agents.
//!
//! ```
//! # async fn tour(store: leasehold::Store) -> leasehold::Result<()> {
//! use leasehold::scratchpad::Scratchpad;
//! use serde_json::{Value, json};
//!
//! let pad = Scratchpad::on(&store, "agent-7")?;
//! pad.write("plan.yaml", &json!({ "counter": 1 })).await?;
//! // One safe read-modify-write, whoever else does the same.
//! let plan = pad
//!     .update("plan.yaml", |plan: Option<Value>| {
//!         let mut plan = plan.unwrap_or_default();
//!         plan["counter"] = (plan["counter"].as_i64().unwrap_or(0) + 1).into();
//!         Ok(plan)
//!     })
//!     .await?;
//! # assert_eq!(plan["counter"], 2);
//! # Ok(())
//! # }
//! # tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap()
//! #     .block_on(tour(leasehold::Store::memory())).unwrap();
//! ```
//!
//! A [`Locked`] file remembers the version that it has seen, and every write is conditional on it.
//! That condition, not the lock, is what keeps the data: a holder that was stopped between checking
//! its lock and writing is refused (FIELD.md row 30). The lock only saves work that would be
//! refused.

mod format;

use std::collections::HashMap;
use std::path::Path;
use std::sync::PoisonError;
use std::time::Duration;

use bytes::Bytes;
use leasehold_protocol::format::root::ROOT_KEY;
use leasehold_protocol::key::Key;
use leasehold_protocol::lease::Judgement;
use leasehold_protocol::mutant::{self, Mutant};
use leasehold_protocol::settle::Proof;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::Mutex;

pub use format::Format;

use crate::lease::Info;
use crate::lock::{Guard, Lock, LockSettings};
use crate::store::{Durability, Kind, List, Put, Store, Unknown, Write};
use crate::{Error, ErrorKind, Result, Version, When};

/// Files that many share.
#[derive(Debug)]
pub struct Scratchpad {
    store: Store,
    holder: String,
    settings: LockSettings,
    durability: Durability,
    /// The locks of files that were locked lately: they remember whether others wait.
    locks: std::sync::Mutex<HashMap<Key, Lock>>,
    /// Locks taken by [`Scratchpad::acquire_lock`], by path and holder.
    held: Mutex<HashMap<(Key, String), Guard>>,
}

impl Scratchpad {
    /// The files in this directory, which is made when something is written.
    #[cfg(unix)]
    pub fn open(root: impl AsRef<Path>) -> Result<Self> {
        let url = crate::store::StoreUrl::Directory(root.as_ref().to_owned());
        let store = crate::store::Connect::new(url).open()?.without_root_record();
        Self::on(&store, format!("{}:{}", crate::host::host_name(), std::process::id()))
    }

    /// The files in this store, locked under this name.
    pub fn on(store: &Store, holder: impl Into<String>) -> Result<Self> {
        Ok(Self {
            settings: LockSettings::of(store.kind()),
            store: store.clone(),
            holder: holder.into(),
            durability: Durability::Ordered,
            locks: std::sync::Mutex::default(),
            held: Mutex::default(),
        })
    }

    /// With other settings for its locks.
    #[must_use]
    pub fn with_settings(mut self, settings: LockSettings) -> Self {
        self.settings = settings;
        self.locks = std::sync::Mutex::default();
        self
    }

    /// With another durability of what is written. By default a power loss leaves the old content
    /// or the new one.
    #[must_use]
    pub fn with_durability(mut self, durability: Durability) -> Self {
        self.durability = durability;
        self
    }

    /// The value in a file, or an error if there is no such file.
    pub async fn read<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        let key = key(path)?;
        let missing = || Error::invalid("there is no such file").at(&key);
        self.read_opt(path).await?.ok_or_else(missing)
    }

    /// The value in a file, or `None` if there is no such file.
    pub async fn read_opt<T: DeserializeOwned>(&self, path: &str) -> Result<Option<T>> {
        self.read_as(path, Format::of(path)).await
    }

    /// The same, with a format that the name does not tell.
    pub async fn read_as<T: DeserializeOwned>(
        &self,
        path: &str,
        format: Format,
    ) -> Result<Option<T>> {
        let key = key(path)?;
        match self.store.get(&key).await? {
            Some(object) => Ok(Some(format.parse(&object.body, &key)?)),
            None => Ok(None),
        }
    }

    /// The bytes of a file, or `None` if there is no such file.
    pub async fn read_bytes(&self, path: &str) -> Result<Option<Bytes>> {
        Ok(self.store.get(&key(path)?).await?.map(|object| object.body))
    }

    /// Writes a value, whatever is there. Whoever changes a value wants [`Scratchpad::update`].
    pub async fn write<T: Serialize + ?Sized>(&self, path: &str, value: &T) -> Result<()> {
        self.write_as(path, value, Format::of(path)).await
    }

    /// The same, with a format that the name does not tell.
    pub async fn write_as<T: Serialize + ?Sized>(
        &self,
        path: &str,
        value: &T,
        format: Format,
    ) -> Result<()> {
        let bytes = format.write(value, &key(path)?)?;
        self.write_bytes(path, bytes).await
    }

    /// Writes bytes, whatever is there.
    pub async fn write_bytes(&self, path: &str, bytes: impl Into<Bytes>) -> Result<()> {
        let key = key(path)?;
        let write = Write::any().durability(self.durability);
        match self.store.put(&key, bytes.into(), write).await? {
            Put::Stored(_) => Ok(()),
            Put::Refused | Put::Contended => {
                Err(Error::unavailable("others keep writing this file: try again").at(&key))
            }
            Put::Unknown(unknown) => Err(unknown.into_error()),
        }
    }

    /// Removes a file. One that is not there is fine.
    pub async fn remove(&self, path: &str) -> Result<()> {
        use crate::store::Delete;
        match self.store.delete(&key(path)?).await? {
            Delete::Unknown(unknown) => Err(unknown.into_error()),
            Delete::Deleted | Delete::Refused | Delete::Contended => Ok(()),
        }
    }

    /// Files whose path begins with `prefix`, locks left out.
    pub async fn list(&self, prefix: &str) -> Result<Vec<String>> {
        let mut listing = self.store.list(List::prefix(prefix)?);
        let mut paths = Vec::new();
        while let Some(page) = listing.next_page().await? {
            let keys = page.entries.into_iter().map(|entry| entry.key.to_string());
            paths.extend(keys.filter(|key| !key.ends_with(".lock") && key != ROOT_KEY));
        }
        Ok(paths)
    }

    /// Runs `work` with the file locked, and releases the lock whatever happens inside.
    pub async fn with_lock<T>(
        &self,
        path: &str,
        work: impl AsyncFnOnce(&mut Locked<'_>) -> Result<T>,
    ) -> Result<T> {
        let mut locked = self.lock(path).await?;
        let result = work(&mut locked).await;
        let released = locked.release().await;
        let value = result?;
        released?;
        Ok(value)
    }

    /// The file, locked.
    pub async fn lock(&self, path: &str) -> Result<Locked<'_>> {
        let key = key(path)?;
        let guard = self.own_lock_of(&key)?.acquire().await?;
        match self.store.head(&key).await {
            Ok(meta) => {
                Ok(Locked { pad: self, key, guard, version: meta.map(|meta| meta.version) })
            }
            Err(error) => {
                // Nobody should have to wait for the ttl because we could not look.
                let _ = guard.release().await;
                Err(error)
            }
        }
    }

    /// The file, locked, and its bytes: one request less than locking it and then reading it.
    pub async fn lock_and_read(&self, path: &str) -> Result<(Locked<'_>, Option<Bytes>)> {
        let key = key(path)?;
        let guard = self.own_lock_of(&key)?.acquire().await?;
        let mut locked = Locked { pad: self, key, guard, version: None };
        match locked.read_bytes().await {
            Ok(bytes) => Ok((locked, bytes)),
            Err(error) => {
                // Nobody should have to wait for the ttl because we could not read.
                let _ = locked.release().await;
                Err(error)
            }
        }
    }

    /// One safe read-modify-write. `change` gets the value, or `None` if there is no file, and may
    /// be called again when somebody who does not mind the lock wrote in between.
    pub async fn update<T, C>(&self, path: &str, change: C) -> Result<T>
    where
        T: Serialize + DeserializeOwned,
        C: FnMut(Option<T>) -> Result<T>,
    {
        self.update_as(path, Format::of(path), change).await
    }

    /// The same, with a format that the name does not tell.
    pub async fn update_as<T, C>(&self, path: &str, format: Format, mut change: C) -> Result<T>
    where
        T: Serialize + DeserializeOwned,
        C: FnMut(Option<T>) -> Result<T>,
    {
        let file = key(path)?;
        self.update_bytes(path, |bytes| {
            let before = match bytes {
                Some(bytes) => Some(format.parse(&bytes, &file)?),
                None => None,
            };
            let after = change(before)?;
            Ok((format.write(&after, &file)?.into(), after))
        })
        .await
    }

    /// The same on bytes: `change` returns what to write and what to return.
    pub async fn update_bytes<T>(
        &self,
        path: &str,
        mut change: impl FnMut(Option<Bytes>) -> Result<(Bytes, T)>,
    ) -> Result<T> {
        let (mut locked, mut before) = self.lock_and_read(path).await?;
        let outcome = loop {
            let attempt = async {
                let (bytes, value) = change(before.take())?;
                locked.write_bytes(bytes).await.map(|()| value)
            };
            match attempt.await {
                // Somebody without the lock was faster: once more, on what is there now.
                Err(error) if error.kind() == ErrorKind::Lost && locked.check().is_ok() => {
                    match locked.read_bytes().await {
                        Ok(bytes) => before = bytes,
                        Err(error) => break Err(error),
                    }
                }
                outcome => break outcome,
            }
        };
        let released = locked.release().await;
        let value = outcome?;
        // What was written stands, also if the lock was lost right after it.
        match released {
            Err(error) if error.kind() != ErrorKind::Lost => Err(error),
            _ => Ok(value),
        }
    }

    /// Takes the lock of a file under a name, and keeps it until it is released or the scratchpad
    /// is disposed of. `false` if somebody else holds it all the time that the settings allow.
    pub async fn acquire_lock(&self, path: &str, holder: &str) -> Result<bool> {
        let key = key(path)?;
        match self.lock_of(&key, holder)?.acquire().await {
            Ok(guard) => {
                self.held.lock().await.insert((key, holder.to_owned()), guard);
                Ok(true)
            }
            Err(error) if error.kind() == ErrorKind::Held => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Releases a lock that [`Scratchpad::acquire_lock`] took. What is not locked is fine; what
    /// somebody else holds is an error.
    pub async fn release_lock(&self, path: &str, holder: &str) -> Result<()> {
        let key = key(path)?;
        let guard = self.held.lock().await.remove(&(key.clone(), holder.to_owned()));
        if let Some(guard) = guard {
            return guard.release().await;
        }
        match self.lock_info(path).await? {
            Some(Info { judgement: Judgement::Held { .. }, lease: Ok(lease) }) => {
                let by = match (&lease.place, lease.holder == holder) {
                    (_, false) => format!("{}, not by {holder}", lease.holder),
                    (Some(place), true) => format!(
                        "{holder}, but not through this scratchpad: by process {} on {}, which \
                         alone can release it",
                        place.process.pid, place.host
                    ),
                    (None, true) => format!("{holder}, but not through this scratchpad"),
                };
                Err(Error::invalid(format!("is locked by {by}")).at(&key))
            }
            _ => Ok(()),
        }
    }

    /// Who has locked a file, if anybody has.
    pub async fn lock_info(&self, path: &str) -> Result<Option<Info>> {
        self.lock_of(&key(path)?, &self.holder)?.info().await
    }

    /// Removes locks whose holders are gone, and says how many. A lock of which nothing else is
    /// known is watched for as long as it may live.
    pub async fn clean_stale_locks(&self) -> Result<usize> {
        let mut locks = Vec::new();
        let mut listing = self.store.list(List::prefix("")?);
        while let Some(page) = listing.next_page().await? {
            for entry in
                page.entries.into_iter().filter(|entry| entry.key.as_str().ends_with(".lock"))
            {
                let settings = self.settings.clone();
                locks.push(Lock::at(&self.store, entry.key, self.holder.clone(), settings)?);
            }
        }
        let mut cleaned = 0;
        let mut left = Vec::new();
        for lock in locks {
            match lock.clean().await {
                Ok(true) => cleaned += 1,
                Ok(false) => left.push(lock),
                // Somebody's file that only ends like a lock's.
                Err(error) if error.kind() == ErrorKind::Data => {}
                Err(error) => return Err(error),
            }
        }
        // On a bucket the store's clock has decided.
        if left.is_empty() || self.store.kind().is_bucket() {
            return Ok(cleaned);
        }
        let pause = self.settings.ttl + Duration::from_millis(50);
        self.store.env().clock().sleep(pause).await;
        for lock in left {
            cleaned += usize::from(lock.clean().await?);
        }
        Ok(cleaned)
    }

    /// Releases everything that [`Scratchpad::acquire_lock`] took. Dropping the scratchpad does it
    /// too, as well as it can.
    pub async fn dispose(self) -> Result<()> {
        let mut failed = None;
        for (_, guard) in self.held.lock().await.drain() {
            match guard.release().await {
                Err(error) if error.kind() != ErrorKind::Lost => failed = Some(error),
                _ => {}
            }
        }
        failed.map_or(Ok(()), Err)
    }

    /// The lock of a file, under our own name.
    fn own_lock_of(&self, key: &Key) -> Result<Lock> {
        /// How many are remembered.
        const LATELY: usize = 256;
        let mut locks = self.locks.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(lock) = locks.get(key) {
            return Ok(lock.clone());
        }
        if locks.len() >= LATELY {
            locks.clear();
        }
        let lock = self.lock_of(key, &self.holder)?;
        locks.insert(key.clone(), lock.clone());
        Ok(lock)
    }

    fn lock_of(&self, key: &Key, holder: &str) -> Result<Lock> {
        Lock::beside(&self.store, key, holder, self.settings.clone())
    }
}

/// A path as a key: nothing outside the root, and no lock file.
fn key(path: &str) -> Result<Key> {
    let bad = |reason: String| Error::invalid(format!("{path:?} cannot be a path here: {reason}"));
    let key = Key::new(path.strip_prefix("./").unwrap_or(path))
        .map_err(|error| bad(error.to_string()))?;
    match key.as_str().ends_with(".lock") {
        true => Err(bad("it is the name of a lock".to_owned())),
        false => Ok(key),
    }
}

/// A file that is locked. Its version is remembered, and every write is conditional on it.
#[derive(Debug)]
pub struct Locked<'a> {
    pad: &'a Scratchpad,
    key: Key,
    guard: Guard,
    version: Option<Version>,
}

impl Locked<'_> {
    /// The value, or `None` if there is no file.
    pub async fn read<T: DeserializeOwned>(&mut self) -> Result<Option<T>> {
        self.read_as(Format::of(self.key.as_str())).await
    }

    /// The same, with a format that the name does not tell.
    pub async fn read_as<T: DeserializeOwned>(&mut self, format: Format) -> Result<Option<T>> {
        match self.read_bytes().await? {
            Some(bytes) => Ok(Some(format.parse(&bytes, &self.key)?)),
            None => Ok(None),
        }
    }

    /// The bytes, or `None` if there is no file.
    pub async fn read_bytes(&mut self) -> Result<Option<Bytes>> {
        let object = self.pad.store.get(&self.key).await?;
        self.version = object.as_ref().map(|object| object.meta.version.clone());
        Ok(object.map(|object| object.body))
    }

    /// Writes a value if the file is as it was when we saw it last. `Lost` if it is not, or if the
    /// lock was lost.
    pub async fn write<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<()> {
        self.write_as(value, Format::of(self.key.as_str())).await
    }

    /// The same, with a format that the name does not tell.
    pub async fn write_as<T: Serialize + ?Sized>(
        &mut self,
        value: &T,
        format: Format,
    ) -> Result<()> {
        let bytes = format.write(value, &self.key)?;
        self.write_bytes(bytes).await
    }

    /// The same with bytes.
    pub async fn write_bytes(&mut self, bytes: impl Into<Bytes>) -> Result<()> {
        // In a directory the token is checked too, which costs no request.
        match self.pad.store.kind() {
            Kind::Directory => self.guard.confirm().await?,
            _ => self.guard.check()?,
        }
        let bytes = bytes.into();
        let when = self.version.clone().map_or(When::Absent, When::Matches);
        let when = if mutant::is(Mutant::CheckedThenPaused) { When::Any } else { when };
        // The bytes are the user's and carry no nonce, and equal ones may be somebody else's: were
        // they taken for ours, two increments would count as one.
        let write = Write::when(when, Proof::None).durability(self.pad.durability);
        match self.pad.store.put(&self.key, bytes, write).await? {
            Put::Stored(version) => {
                self.version = Some(version);
                Ok(())
            }
            Put::Refused | Put::Contended => Err(Error::new(
                ErrorKind::Lost,
                "was changed by somebody else since it was read; nothing was written",
            )
            .at(&self.key)),
            Put::Unknown(Unknown::Overtaken(error)) => Err(Error::unavailable(
                "no answer, and the file is not as it was: it may have been written or not; read it",
            )
            .caused_by(error)
            .at(&self.key)),
            Put::Unknown(unknown) => Err(unknown.into_error()),
        }
    }

    /// The fence: higher than that of every earlier holder.
    pub fn token(&self) -> u64 {
        self.guard.token()
    }

    /// For how long the lock can be trusted from now on, if it is not renewed.
    pub fn trusted_for(&self) -> Duration {
        self.guard.trusted_for()
    }

    /// Cancelled when the lock is lost: stop then.
    pub fn lost(&self) -> tokio_util::sync::CancellationToken {
        self.guard.lost()
    }

    /// Whether the lock can be trusted at this moment.
    pub fn check(&self) -> Result<()> {
        self.guard.check()
    }

    /// Lets go.
    pub async fn release(self) -> Result<()> {
        self.guard.release().await
    }
}
