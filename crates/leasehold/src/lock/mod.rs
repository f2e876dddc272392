//! Locks: one holder at a time, in a directory or on a bucket.
//!
//! ```
//! # async fn tour(store: leasehold::Store) -> leasehold::Result<()> {
//! use leasehold::lock::{Lock, LockSettings};
//!
//! let lock = Lock::named(&store, "deploy", "worker-001", LockSettings::of(store.kind()))?;
//! let guard = lock.acquire().await?;
//! println!("ours, with token {}", guard.token());
//! guard.check()?; // before each guarded action: are we still the holder?
//! guard.release().await?;
//!
//! // Or all in one, released also on an error or a panic inside.
//! let answer = lock.with(async |_guard| 6 * 7).await?;
//! # assert_eq!(answer, 42);
//! # Ok(())
//! # }
//! # tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap()
//! #     .block_on(tour(leasehold::Store::memory())).unwrap();
//! ```
//!
//! A lock keeps others out as long as its holder is alive and renews it. What it guards is safe
//! even so if every guarded write names the version it is based on, or carries the token: a holder
//! that was stopped between checking and writing cannot be kept from writing by any lock.

pub mod blocking;
mod election;
mod semaphore;

use std::time::Duration;

use leasehold_protocol::format::lease::{Ask, Dialect, Lease, Process};
use leasehold_protocol::key::{Key, encode_segment};
use leasehold_protocol::layout::LOCKS;
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

pub use election::{Election, Leadership};
pub use semaphore::Semaphore;

use crate::lease::{Asked, Attempt, Awaited, Desk, HeldBy, Info, Tenure, Terms, Waiting};
use crate::settings::duration_text;
use crate::store::Kind;
use crate::{Error, ErrorKind, Result, Store};

/// How a lock is acquired and kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LockSettings {
    /// How long to wait for it.
    #[serde(with = "duration_text")]
    pub timeout: Duration,
    /// How often a holder renews it. On a bucket each is a PUT.
    #[serde(with = "duration_text")]
    pub heartbeat: Duration,
    /// After how long without a renewal it is anybody's: the longest time for which a dead holder
    /// keeps others waiting.
    #[serde(with = "duration_text")]
    pub ttl: Duration,
    /// How often to try, with pauses that double from `retry_delay`: whichever of this and
    /// `timeout` is over first. In between, a directory is watched.
    pub attempts: u32,
    /// The first pause between two attempts.
    #[serde(with = "duration_text")]
    pub retry_delay: Duration,
}

impl LockSettings {
    /// What suits this kind of store: seconds in a directory, minutes on a bucket.
    pub fn of(kind: Kind) -> Self {
        let local = Self {
            timeout: Duration::from_secs(5),
            heartbeat: Duration::from_secs(1),
            ttl: Duration::from_secs(3),
            attempts: 10,
            retry_delay: Duration::from_millis(100),
        };
        match kind.is_bucket() {
            false => local,
            true => Self {
                timeout: Duration::from_secs(30),
                heartbeat: Duration::from_secs(60),
                ttl: Duration::from_secs(300),
                attempts: 10,
                retry_delay: Duration::from_millis(200),
            },
        }
    }

    /// How long to wait altogether.
    fn patience(&self) -> Duration {
        let doublings = self.attempts.saturating_sub(1).min(30);
        self.timeout.min(self.retry_delay.saturating_mul((1 << doublings) - 1))
    }

    fn terms(&self) -> Terms {
        Terms { ttl: self.ttl, heartbeat: self.heartbeat, dialect: Dialect::Lock }
    }

    fn checked(self) -> Result<Self> {
        if self.attempts == 0 {
            return Err(Error::invalid("`attempts` must be at least 1"));
        }
        self.terms().checked()?;
        Ok(self)
    }
}

/// A lock, to be held under one name.
#[derive(Debug, Clone)]
pub struct Lock {
    store: Store,
    desk: Desk,
    settings: LockSettings,
}

impl Lock {
    /// The lock with this name, to be held by `holder`. Any text is a name.
    pub fn named(
        store: &Store,
        name: &str,
        holder: impl Into<String>,
        settings: LockSettings,
    ) -> Result<Self> {
        Self::at(store, key_of(name)?, holder, settings)
    }

    /// The lock of a file: `{file}.lock` beside it.
    pub fn beside(
        store: &Store,
        file: &Key,
        holder: impl Into<String>,
        settings: LockSettings,
    ) -> Result<Self> {
        Self::at(store, Key::new(format!("{file}.lock"))?, holder, settings)
    }

    /// The lock whose record stands at this key.
    pub fn at(
        store: &Store,
        key: Key,
        holder: impl Into<String>,
        settings: LockSettings,
    ) -> Result<Self> {
        let settings = settings.checked()?;
        let desk = Desk::new(store, key, holder, settings.terms())?;
        Ok(Self { store: store.clone(), desk, settings })
    }

    /// Waits for the lock as long as the settings say. An error with kind `Held` if somebody held it
    /// all the time; it says who.
    pub async fn acquire(&self) -> Result<Guard> {
        self.acquire_timeout(self.settings.patience()).await
    }

    /// Waits for the lock for at most this long.
    pub async fn acquire_timeout(&self, patience: Duration) -> Result<Guard> {
        match self.wait(Some(patience)).await? {
            Ok(guard) => Ok(guard),
            Err(held) => Err(timed_out(&self.desk, &held, patience)),
        }
    }

    /// Waits for the lock as long as it takes.
    pub async fn acquire_forever(&self) -> Result<Guard> {
        match self.wait(None).await? {
            Ok(guard) => Ok(guard),
            Err(_) => Err(Error::new(ErrorKind::Internal, "waiting for ever came to an end")),
        }
    }

    /// The lock if it is free, else who holds it.
    pub async fn try_acquire(&self) -> Result<Result<Guard, HeldBy>> {
        Ok(match self.desk.attempt().await? {
            Attempt::Acquired(tenure) => Ok(Guard(tenure)),
            Attempt::Held(held) => Err(*held),
        })
    }

    /// The lock, taken from whoever holds it. The other finds out at its next renewal, and until
    /// then two believe to hold it: only for holders that are known to be dead or stuck.
    pub async fn force(&self) -> Result<Guard> {
        match self.desk.force().await? {
            Attempt::Acquired(tenure) => Ok(Guard(tenure)),
            Attempt::Held(held) => Err(timed_out(&self.desk, &held, Duration::ZERO)),
        }
    }

    /// Runs `work` under the lock and releases it, also when `work` panics.
    pub async fn with<T>(&self, work: impl AsyncFnOnce(&Guard) -> T) -> Result<T> {
        let guard = self.acquire().await?;
        let result = work(&guard).await;
        guard.release().await?;
        Ok(result)
    }

    /// Asks the holder to let go.
    pub async fn ask(&self) -> Result<Asked> {
        self.desk.ask().await
    }

    /// Who holds it, if there is a record.
    pub async fn info(&self) -> Result<Option<Info>> {
        self.desk.info().await
    }

    /// Removes the record if nobody holds the lock, and says whether it did.
    pub async fn clean(&self) -> Result<bool> {
        self.desk.clean().await
    }

    /// Where its record stands.
    pub fn key(&self) -> &Key {
        self.desk.key()
    }

    /// How it is acquired and kept.
    pub fn settings(&self) -> &LockSettings {
        &self.settings
    }

    async fn wait(&self, patience: Option<Duration>) -> Result<Result<Guard, HeldBy>> {
        let mut waiting = Waiting::new(
            &self.store,
            Awaited::One(self.desk.key().clone()),
            patience,
            self.settings.retry_delay,
        );
        let mut attempt = self.desk.attempt().await?;
        loop {
            let held = match attempt {
                Attempt::Acquired(tenure) => return Ok(Ok(Guard(tenure))),
                Attempt::Held(held) => held,
            };
            if !waiting.pause(&self.store, &held).await {
                return Ok(Err(*held));
            }
            attempt = self.desk.attempt_again().await?;
        }
    }
}

/// Where the record of a named lock stands.
pub fn key_of(name: &str) -> Result<Key> {
    Ok(Key::new(format!("{LOCKS}{}.lock", encode_segment(name)))?)
}

fn timed_out(desk: &Desk, held: &HeldBy, patience: Duration) -> Error {
    let span = crate::settings::format_duration(patience);
    let message = format!("still held by {} after {span}", held.holder);
    Error::new(ErrorKind::Held, message).at(desk.key())
}

/// A lock that is held. Dropping it releases it, as well as that can be done in the background.
#[derive(Debug)]
pub struct Guard(Tenure);

impl Guard {
    /// The fence: higher than that of every earlier holder. Hand it to whatever you write to.
    pub fn token(&self) -> u64 {
        self.0.token()
    }

    /// Cancelled when the lock is lost: stop then.
    pub fn lost(&self) -> CancellationToken {
        self.0.lost()
    }

    /// Whether the lock can be trusted at this moment. To be asked before each guarded action.
    pub fn check(&self) -> Result<()> {
        self.0.check()
    }

    /// The same by the lock's record, unless that was read or written a moment ago: somebody may have
    /// taken the lock by force. One GET.
    pub async fn confirm(&self) -> Result<()> {
        self.0.confirm().await
    }

    /// For how long the lock can be trusted from now on, if it is not renewed: zero once it is
    /// lost. For what cannot ask before each action, and must be stopped in time instead.
    pub fn trusted_for(&self) -> Duration {
        self.0.trusted_for()
    }

    /// Completes when somebody asks for the lock.
    pub async fn asked(&self) -> Ask {
        self.0.asked().await
    }

    /// The record as it was last written or read.
    pub fn lease(&self) -> Lease {
        self.0.lease()
    }

    /// Notes which process works under the lock: it is not taken over while that lives.
    pub async fn set_child(&self, child: Option<Process>) -> Result<()> {
        self.0.set_child(child).await
    }

    /// Lets go. An error with kind `Lost` says that it was not ours any more.
    pub async fn release(self) -> Result<()> {
        self.0.release().await
    }
}
