//! Leases that were acquired a moment ago.
//!
//! A lease is renewed by a task of its desk's. Most leases of queues are given back long before their
//! first renewal, each at a desk of its own, and starting a task for each would wake another thread
//! every time. So new leases are looked at together, 20 times a second, by one task per runtime, and
//! only those that are still held get a task of their own.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::runtime::{Handle, Id};
use tokio::task::JoinHandle;

use super::{Desk, Shared, tenure};
use crate::env::Env;

/// How often to look. A lease has its own task when it is not young any more, or this much later.
const LOOK: Duration = Duration::from_millis(50);

/// Leases that are renewed at least this often get their task at once.
const HURRIED: Duration = Duration::from_millis(500);

/// The desks of one store whose leases have no task yet.
#[derive(Debug, Default)]
pub(crate) struct Nursery(Arc<Mutex<Vec<Ward>>>);

/// Those of one runtime: what looks after them must not end before they do.
#[derive(Debug)]
struct Ward {
    runtime: Id,
    desks: Vec<Weak<Shared>>,
    task: JoinHandle<()>,
}

impl Nursery {
    /// Takes in a desk whose lease was just acquired. `false` if that cannot wait.
    pub(super) fn take_in(&self, desk: &Desk, runtime: &Handle) -> bool {
        if desk.0.terms.heartbeat < HURRIED {
            return false;
        }
        let start = || {
            let (wards, env) = (Arc::downgrade(&self.0), desk.0.store.env().clone());
            runtime.spawn(look_after(wards, runtime.id(), env))
        };
        let mut wards = lock(&self.0);
        // Those of runtimes that have ended.
        wards.retain(|ward| ward.runtime == runtime.id() || !ward.task.is_finished());
        let at = match wards.iter().position(|ward| ward.runtime == runtime.id()) {
            Some(at) => at,
            None => {
                wards.push(Ward { runtime: runtime.id(), desks: Vec::new(), task: start() });
                wards.len() - 1
            }
        };
        if wards[at].task.is_finished() {
            wards[at].task = start();
        }
        wards[at].desks.push(Arc::downgrade(&desk.0));
        true
    }
}

async fn look_after(wards: Weak<Mutex<Vec<Ward>>>, runtime: Id, env: Env) {
    loop {
        env.clock().sleep(LOOK).await;
        let Some(wards) = wards.upgrade() else { return };
        let ward = |wards: &[Ward]| wards.iter().position(|ward| ward.runtime == runtime);
        // Not with the lock: who acquires a lease waits for it.
        let desks = {
            let mut wards = lock(&wards);
            let Some(at) = ward(&wards) else { return };
            std::mem::take(&mut wards[at].desks)
        };
        let now = env.clock().boot();
        let young =
            |desk: &Weak<Shared>| desk.upgrade().is_some_and(|desk| tenure::grow_up(&desk, now));
        let desks: Vec<_> = desks.into_iter().filter(young).collect();
        let mut wards = lock(&wards);
        let Some(at) = ward(&wards) else { return };
        wards[at].desks.extend(desks);
        if wards[at].desks.is_empty() {
            // With the lock, so that who comes now finds no task and starts one.
            wards.swap_remove(at);
            return;
        }
    }
}

fn lock(wards: &Mutex<Vec<Ward>>) -> MutexGuard<'_, Vec<Ward>> {
    wards.lock().unwrap_or_else(PoisonError::into_inner)
}
