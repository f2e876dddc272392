//! One leader among many.

use std::time::Duration;

use leasehold_protocol::key::{Key, encode_segment};
use leasehold_protocol::layout::ELECTIONS;
use leasehold_protocol::lease::Judgement;

use super::{Guard, Lock, LockSettings};
use crate::{Result, Store};

/// An election: whoever holds its lock leads.
#[derive(Debug, Clone)]
pub struct Election {
    store: Store,
    lock: Lock,
}

/// What a leader holds. Dropping it resigns.
pub type Leadership = Guard;

impl Election {
    /// The election with this name, in which we stand as `candidate`.
    pub fn named(
        store: &Store,
        name: &str,
        candidate: impl Into<String>,
        settings: LockSettings,
    ) -> Result<Self> {
        let key = Key::new(format!("{ELECTIONS}{}.lock", encode_segment(name)))?;
        let lock = Lock::at(store, key, candidate, settings)?;
        Ok(Self { store: store.clone(), lock })
    }

    /// Waits until we lead, as long as it takes.
    pub async fn campaign(&self) -> Result<Leadership> {
        self.lock.acquire_forever().await
    }

    /// Waits until we lead, for as long as the settings say. An error of kind `Held` if another leads all
    /// that time.
    pub async fn campaign_in_time(&self) -> Result<Leadership> {
        self.lock.acquire().await
    }

    /// Who leads now. One GET.
    pub async fn leader(&self) -> Result<Option<String>> {
        let info = self.lock.info().await?;
        Ok(info.and_then(|info| match (info.judgement, info.lease) {
            (Judgement::Held { .. }, Ok(lease)) => Some(lease.holder),
            _ => None,
        }))
    }

    /// Completes when the leader is another than `known`, with the new one. Looks every `every`,
    /// one GET each; in a directory also as soon as something changes.
    pub async fn changed(&self, known: Option<&str>, every: Duration) -> Result<Option<String>> {
        let mut watch = self.store.watch(self.lock.key().as_str())?;
        loop {
            let leader = self.leader().await?;
            if leader.as_deref() != known {
                return Ok(leader);
            }
            tokio::select! {
                biased;
                () = self.store.env().clock().sleep(every) => {}
                () = watch.changed() => {}
            }
        }
    }
}
