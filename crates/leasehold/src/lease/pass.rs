//! One record for the leases of many tasks.
//!
//! Whoever claims thousands of tasks a second in a directory would write as many records that differ in
//! nothing but their times and marks. So a worker that is that busy writes one, a *pass*, and for a few
//! hundredths of a second every task that it claims gets that very file as its lease. What a record says
//! stays true: its holder has had the lease since that time at the latest, and trusts it from then on. The first
//! renewal gives a lease a record of its own.
//!
//! A pass is never used twice at one key: mark and version of a record tell a lease from every other that
//! was ever there.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use leasehold_protocol::format::lease::Lease;
use leasehold_protocol::key::Key;
use leasehold_protocol::lease::{self, Holder};

use super::{Desk, Landing, Shared, Tenure, Terms};
use crate::Result;
use crate::env::BootTime;
use crate::store::Put;
use crate::store::large::Draft;

/// For how long a pass is used: so much sooner a claim has to be renewed.
const SPAN: Duration = Duration::from_millis(50);

/// Who claims something less often needs none.
const PACE: Duration = Duration::from_millis(5);

/// How often a pass is used: a file has so many names at most, on some file systems.
const USES: usize = 1000;

/// How soon a store is asked again that had no use for a pass: a bucket never has.
const ASKED_AGAIN: Duration = Duration::from_secs(10);

/// The passes of a worker, one after the other.
#[derive(Debug, Default)]
pub(crate) struct Passes(Mutex<Current>);

#[derive(Debug, Default)]
struct Current {
    pass: Option<Arc<Pass>>,
    /// When something was last claimed.
    last: Option<BootTime>,
    /// When a store last had no use for one.
    refused: Option<BootTime>,
}

#[derive(Debug)]
struct Pass {
    lease: Lease,
    draft: Draft,
    /// When it began to be written.
    sent: BootTime,
    /// A fork is another holder.
    process: u32,
    /// At which keys it was used.
    used: Mutex<HashSet<Key>>,
}

impl Passes {
    /// For when nothing is to be claimed for a while.
    pub fn clear(&self) {
        self.current().pass = None;
    }

    fn current(&self) -> MutexGuard<'_, Current> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pass {
    /// Whether it can be used once more, at this key.
    fn admits(&self, key: &Key, now: BootTime, terms: &Terms) -> bool {
        let is_fresh = now.since(self.sent) < SPAN.min(terms.heartbeat / 10);
        if !is_fresh || self.lease.ttl != Some(terms.ttl) || self.process != std::process::id() {
            return false;
        }
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        used.len() < USES && used.insert(key.clone())
    }
}

impl Desk {
    /// As [`Desk::create`], by a pass where that is cheaper. All who use these passes have one name, and fill
    /// their records alike.
    pub(crate) async fn create_by(
        &self,
        passes: &Passes,
        fill: impl Fn(&mut Lease),
    ) -> Result<Option<Tenure>> {
        if let Some(pass) = self.pass(passes, &fill).await?
            && let Some(claimed) = self.link(&pass).await?
        {
            return Ok(claimed);
        }
        self.create(fill).await
    }

    /// A pass that can be used here.
    async fn pass(&self, passes: &Passes, fill: &impl Fn(&mut Lease)) -> Result<Option<Arc<Pass>>> {
        let Shared { store, key, name, terms, .. } = &*self.0;
        let sent = store.env().clock().boot();
        {
            let mut current = passes.current();
            let before = current.last.replace(sent);
            if let Some(pass) = &current.pass
                && pass.admits(key, sent, terms)
            {
                return Ok(Some(pass.clone()));
            }
            current.pass = None;
            let lately = |at: Option<BootTime>, span| at.is_some_and(|at| sent.since(at) < span);
            if !lately(before, PACE) || lately(current.refused, ASKED_AGAIN) {
                return Ok(None);
            }
        }
        let place = store.env().host().here(sent);
        let holder = Holder { name, ttl: terms.ttl, place: place.as_ref() };
        let nonce = store.env().nonce();
        let mut lease = lease::acquire(None, &holder, store.now().await?, 0, nonce).lease;
        fill(&mut lease);
        store.backend().reserve(lease.token.unwrap_or(0)).await?;
        let body = Bytes::from(lease.to_bytes(terms.dialect));
        let Some(draft) = store.draft(&body).await? else {
            passes.current().refused = Some(sent);
            return Ok(None);
        };
        let (process, used) = (std::process::id(), Mutex::default());
        let pass = Arc::new(Pass { lease, draft, sent, process, used });
        let admits = pass.admits(key, store.env().clock().boot(), terms);
        passes.current().pass = Some(pass.clone());
        Ok(admits.then_some(pass))
    }

    /// Takes the lease by this pass, if there is none. `None` where that cannot be done.
    async fn link(&self, pass: &Pass) -> Result<Option<Option<Tenure>>> {
        let Shared { store, key, .. } = &*self.0;
        let landing = Landing { desk: self, lease: &pass.lease, settled: false };
        let linked = store.link(key, &pass.draft).await.transpose();
        // Where it cannot be done, nothing was.
        landing.settle(linked.as_ref().unwrap_or(&Ok(Put::Refused)));
        let Some(put) = linked else { return Ok(None) };
        let mut lease = pass.lease.clone();
        // What this task's history says is exact; so is its record, from the first renewal on.
        let age = store.env().clock().boot().since(pass.sent);
        lease.acquired_at = lease.acquired_at.map(|at| at.plus(age));
        Ok(Some(self.claimed(lease, put?, pass.sent).await?.ok()))
    }
}
