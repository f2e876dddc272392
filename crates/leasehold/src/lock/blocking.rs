//! Locks for code that is not async.
//!
//! A thread of its own keeps the heartbeats going while the caller's is busy.

use std::sync::Arc;
use std::time::Duration;

use super::HeldBy;
use crate::{Error, ErrorKind, Result};

/// A thread that keeps heartbeats going.
fn runtime() -> Result<Arc<tokio::runtime::Runtime>> {
    let built = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .thread_name("leasehold-lock")
        .enable_all()
        .build();
    built.map(Arc::new).map_err(|error| {
        Error::new(ErrorKind::Unavailable, "cannot start a thread").caused_by(error)
    })
}

/// A lock with several holders, for code that is not async.
#[derive(Debug, Clone)]
pub struct Semaphore {
    semaphore: super::Semaphore,
    runtime: Arc<tokio::runtime::Runtime>,
}

impl Semaphore {
    /// The same semaphore, without async.
    pub fn new(semaphore: super::Semaphore) -> Result<Self> {
        Ok(Self { semaphore, runtime: runtime()? })
    }

    /// Waits for a slot as long as the settings say.
    pub fn acquire(&self) -> Result<Guard> {
        let guard = self.runtime.block_on(self.semaphore.acquire())?;
        Ok(Guard { guard: Some(guard), runtime: self.runtime.clone() })
    }

    /// A slot, or who holds the one that is likely to be free first.
    pub fn try_acquire(&self) -> Result<Result<Guard, HeldBy>> {
        let tried = self.runtime.block_on(self.semaphore.try_acquire())?;
        Ok(tried.map(|guard| Guard { guard: Some(guard), runtime: self.runtime.clone() }))
    }
}

/// An election, for code that is not async.
#[derive(Debug, Clone)]
pub struct Election {
    election: super::Election,
    runtime: Arc<tokio::runtime::Runtime>,
}

impl Election {
    /// The same election, without async.
    pub fn new(election: super::Election) -> Result<Self> {
        Ok(Self { election, runtime: runtime()? })
    }

    /// Waits until we lead, as long as it takes.
    pub fn campaign(&self) -> Result<Guard> {
        let guard = self.runtime.block_on(self.election.campaign())?;
        Ok(Guard { guard: Some(guard), runtime: self.runtime.clone() })
    }

    /// Who leads now.
    pub fn leader(&self) -> Result<Option<String>> {
        self.runtime.block_on(self.election.leader())
    }
}

/// A lock for code that is not async.
#[derive(Debug, Clone)]
pub struct Lock {
    lock: super::Lock,
    runtime: Arc<tokio::runtime::Runtime>,
}

/// A lock that is held. Dropping it releases it.
#[derive(Debug)]
pub struct Guard {
    guard: Option<super::Guard>,
    runtime: Arc<tokio::runtime::Runtime>,
}

impl Lock {
    /// The same lock, without async.
    pub fn new(lock: super::Lock) -> Result<Self> {
        Ok(Self { lock, runtime: runtime()? })
    }

    /// Waits for the lock as long as the settings say.
    pub fn acquire(&self) -> Result<Guard> {
        Ok(self.guard(self.runtime.block_on(self.lock.acquire())?))
    }

    /// Waits for the lock for at most this long.
    pub fn acquire_timeout(&self, patience: Duration) -> Result<Guard> {
        Ok(self.guard(self.runtime.block_on(self.lock.acquire_timeout(patience))?))
    }

    /// The lock if it is free, else who holds it.
    pub fn try_acquire(&self) -> Result<Result<Guard, HeldBy>> {
        let tried = self.runtime.block_on(self.lock.try_acquire())?;
        Ok(tried.map(|guard| self.guard(guard)))
    }

    /// Runs `work` under the lock and releases it, also when `work` panics.
    pub fn with<T>(&self, work: impl FnOnce(&Guard) -> T) -> Result<T> {
        let guard = self.acquire()?;
        let result = work(&guard);
        guard.release()?;
        Ok(result)
    }

    fn guard(&self, guard: super::Guard) -> Guard {
        Guard { guard: Some(guard), runtime: self.runtime.clone() }
    }
}

impl Guard {
    /// The fence: higher than that of every earlier holder.
    pub fn token(&self) -> u64 {
        self.guard.as_ref().map_or(0, super::Guard::token)
    }

    /// Whether the lock can be trusted at this moment. To be asked before each guarded action.
    pub fn check(&self) -> Result<()> {
        match &self.guard {
            Some(guard) => guard.check(),
            None => Err(Error::new(ErrorKind::Lost, "the lock was released")),
        }
    }

    /// Lets go. An error with kind `Lost` says that it was not ours any more.
    pub fn release(mut self) -> Result<()> {
        match self.guard.take() {
            Some(guard) => self.runtime.block_on(guard.release()),
            None => Ok(()),
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(guard) = self.guard.take() {
            // As well as it can be done; the ttl is what others can count on.
            let _ = self.runtime.block_on(guard.release());
        }
    }
}
