//! A node's clocks, its randomness and its neighbours.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::future::BoxFuture;
use leasehold::StoreTime;
use leasehold::env::{BootTime, Clock, Entropy, Env, Host};
use leasehold::protocol::format::lease::{Place, Process};
use leasehold::protocol::mutant::{self, Mutant};

use crate::rng::Rng;
use crate::world::{Life, NodeId, State, World};

/// The environment of one life of a node.
pub fn env_of(world: &World, life: Life) -> Env {
    let clock = Arc::new(NodeClock(world.clone(), life));
    let entropy = Arc::new(NodeChance(Mutex::new(world.chance_of(life))));
    Env::new(clock, entropy).on(Arc::new(NodeHost(world.clone(), life)))
}

/// What a node's boot clock says.
pub fn boot_time(state: &State, node: NodeId) -> BootTime {
    let mut boot = state.boot(node);
    // The other clock of the system, which stands still while the machine sleeps (FIELD.md row 31).
    if mutant::is(Mutant::Suspend) {
        boot = boot.saturating_sub(state.nodes[node].suspended);
    }
    BootTime::from_boot(Duration::from_micros(boot))
}

#[derive(Debug)]
struct NodeClock(World, Life);

impl Clock for NodeClock {
    fn wall(&self) -> StoreTime {
        self.0.state().wall(self.1.node)
    }

    fn boot(&self) -> BootTime {
        boot_time(&self.0.state(), self.1.node)
    }

    fn sleep(&self, span: Duration) -> BoxFuture<'static, ()> {
        Box::pin(self.0.sleep_on(self.1, span))
    }

    /// Nothing happens meanwhile: whoever naps between two looks at a disk has the looks to wait for.
    fn nap(&self, _: Duration) {}
}

#[derive(Debug)]
struct NodeChance(Mutex<Rng>);

impl Entropy for NodeChance {
    fn fill(&self, bytes: &mut [u8]) {
        let mut rng = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for chunk in bytes.chunks_mut(8) {
            let random = rng.bits().to_le_bytes();
            chunk.copy_from_slice(&random[..chunk.len()]);
        }
    }
}

#[derive(Debug)]
struct NodeHost(World, Life);

impl Host for NodeHost {
    fn here(&self, now: BootTime) -> Option<Place> {
        let state = self.0.state();
        let node = &state.nodes[self.1.node];
        Some(Place {
            host: format!("machine-{}", node.machine),
            boot_id: format!("boot-{}", node.machine),
            boot_time: now.since(BootTime::from_boot(Duration::ZERO)),
            pid_ns: format!("pid:[{}]", node.container),
            process: Process { pid: self.1.pid(), start: u64::from(self.1.epoch) },
            child: None,
        })
    }

    fn is_gone(&self, process: &Process) -> bool {
        let state = self.0.state();
        let node = &state.nodes[self.1.node];
        !state.process_lives(node.machine, node.container, process.pid)
    }
}
