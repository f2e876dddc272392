//! What nodes do, and what must come of it.

mod index;
mod locks;
mod queue;
mod sync;

use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use leasehold::{ErrorKind, Store, StoreSettings};

use crate::disk::Folder;
use crate::env::env_of;
use crate::net::{Client, LATEST};
use crate::rng::Rng;
use crate::world::{DiskId, Life, Micros, NodeId, What, World};

/// The queue of every world that has one.
pub const QUEUE: &str = "q";

/// A kind of world.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scenario {
    /// Locks, and files that they guard.
    Locks,
    /// A work queue.
    Queue,
    /// An index.
    Index,
    /// An index over hours, with deletions that are purged.
    Purge,
    /// All at once, on the same nodes.
    Mixed,
    /// A queue of which machines have replicas, and work on these.
    Sync,
}

impl Scenario {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::Locks, Self::Queue, Self::Index, Self::Purge, Self::Mixed, Self::Sync];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Locks => "locks",
            Self::Queue => "queue",
            Self::Index => "index",
            Self::Purge => "purge",
            Self::Mixed => "mixed",
            Self::Sync => "sync",
        }
    }

    /// The one with this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|scenario| scenario.name() == name)
    }

    /// Plays it: sets up, makes trouble, heals, and looks at what is left.
    pub async fn play(self, world: &World, mut rng: Rng) -> Result<(), String> {
        let set_up = |error: leasehold::Error| format!("setting up failed: {error:?}");
        let observer = world.add_node("observer", 99, 0);
        let life = world.state().life(observer);
        let ctx = Ctx::new(world, life);
        ctx.store.init().await.map_err(set_up)?;
        {
            // Only now: the store is tried out when it is made, which finds some of these.
            let mut state = world.state();
            state.objects.broken = state.broken;
        }
        match self {
            Self::Locks => {
                let locks = locks::Locks::set_up(&mut rng);
                let nodes = locks.spawn(world, &mut rng, 3);
                trouble(world, &mut rng, &nodes, &locks.keys(), Duration::from_secs(180)).await;
                locks.finish(world, &ctx).await
            }
            Self::Queue => {
                let queue = queue::Work::set_up(world, &ctx, &mut rng).await.map_err(set_up)?;
                let nodes = queue.spawn(world, &mut rng);
                trouble(world, &mut rng, &nodes, &[], Duration::from_secs(240)).await;
                queue.finish(world, &ctx).await
            }
            Self::Index | Self::Purge => {
                let long = self == Self::Purge;
                let index = index::Records::set_up(world, &ctx, &mut rng, long).await;
                let index = index.map_err(set_up)?;
                let nodes = index.spawn(world, &mut rng);
                let span = Duration::from_secs(if long { 8 * 3600 } else { 180 });
                trouble(world, &mut rng, &nodes, &[], span).await;
                index.finish(world, &ctx).await
            }
            Self::Mixed => {
                let locks = locks::Locks::set_up(&mut rng);
                let queue = queue::Work::set_up(world, &ctx, &mut rng).await.map_err(set_up)?;
                let index = index::Records::set_up(world, &ctx, &mut rng, false).await;
                let index = index.map_err(set_up)?;
                let mut nodes = locks.spawn(world, &mut rng, 2);
                nodes.extend(queue.spawn(world, &mut rng));
                nodes.extend(index.spawn(world, &mut rng));
                trouble(world, &mut rng, &nodes, &locks.keys(), Duration::from_secs(120)).await;
                locks.finish(world, &ctx).await?;
                queue.finish(world, &ctx).await?;
                index.finish(world, &ctx).await
            }
            Self::Sync => {
                let queue = queue::Work::set_up_relaxed(world, &ctx, &mut rng).await;
                let queue = queue.map_err(set_up)?;
                let mut nodes = sync::spawn(world, &mut rng, &queue);
                nodes.extend(queue.spawn(world, &mut rng));
                trouble(world, &mut rng, &nodes, &[], Duration::from_secs(300)).await;
                queue.finish(world, &ctx).await
            }
        }
    }
}

/// Makes trouble for so long, and then waits until the last of it has passed.
async fn trouble(world: &World, rng: &mut Rng, nodes: &[NodeId], keys: &[String], span: Duration) {
    let micros = span.as_micros() as u64;
    {
        let mut state = world.state();
        state.troubled = true;
        // Longer than a ttl; or, where it takes hours, longer than deletions are kept.
        let hours = micros > 3_600_000_000;
        let most = [5_000_000, 60_000_000, micros];
        state.longest_stall = if hours { micros / 2 } else { *rng.pick(&most) };
        let faults = state.faults.clone();
        let from = state.now;
        let times = |rate: f64, rng: &mut Rng| rng.between(0, rate.round() as u64);
        for _ in 0..times(faults.storms, rng) {
            let at = from + rng.below(micros);
            let until = at + rng.between(1_000_000, 40_000_000);
            state.at(at, What::Storm(until));
        }
        for node in nodes {
            for _ in 0..times(faults.crashes, rng) {
                state.at(from + rng.below(micros), What::Crash(*node));
            }
            for _ in 0..times(faults.pauses, rng) {
                let longest = *rng.pick(&[5_000_000, 60_000_000, micros]);
                let long = rng.between(100_000, longest.max(200_000));
                state.at(from + rng.below(micros), What::Pause(*node, long));
            }
            for _ in 0..times(faults.jumps, rng) {
                let day = 86_400_000_000;
                let by = rng.below(2 * day) as i64 - day as i64;
                state.at(from + rng.below(micros), What::Jump(*node, by));
            }
        }
        for disk in 0..state.disks.len() {
            for _ in 0..times(faults.offline, rng) {
                let longest = *rng.pick(&[20_000_000, 90_000_000, micros]);
                let at = from + rng.below(micros);
                let until = (at + rng.between(1_000_000, longest)).min(from + micros);
                for node in 0..state.nodes.len() {
                    if state.nodes[node].disk == Some(disk) {
                        state.at(at, What::Offline(node, until));
                    }
                }
            }
        }
        for key in keys {
            for _ in 0..times(faults.damage, rng) {
                state.at(from + rng.below(micros), What::Damage(key.clone()));
            }
        }
    }
    world.sleep(span).await;
    {
        let mut state = world.state();
        (state.troubled, state.resting) = (false, true);
    }
    // Late writes land, whoever stopped goes on, and whoever died starts again.
    let late = Duration::from_micros(LATEST + 120_000_000);
    let rest: Micros = {
        let state = world.state();
        let last = state.nodes.iter().map(|node| node.paused_until).max().unwrap_or(0);
        last.saturating_sub(state.now)
    };
    world.sleep(late + Duration::from_micros(rest)).await;
}

/// One life of a node, and all that it has.
#[derive(Debug, Clone)]
pub struct Ctx {
    /// The world.
    pub world: World,
    /// Which life.
    pub life: Life,
    /// The node's name.
    pub name: String,
    /// The store as this node reaches it.
    pub store: Store,
    /// Chance for what it does.
    pub rng: Rng,
}

impl Ctx {
    /// Of this life.
    pub fn new(world: &World, life: Life) -> Self {
        let settings = StoreSettings {
            attempts: 3,
            retry_base: Duration::from_millis(100),
            retry_cap: Duration::from_secs(1),
            ..StoreSettings::default()
        };
        let client = Arc::new(Client::new(world, life));
        let store = Store::new(client, env_of(world, life), settings);
        let name = world.state().nodes[life.node].name.clone();
        Self {
            life,
            name,
            store: store.expect("these settings work"),
            rng: world.chance_of(Life { node: life.node + 500, epoch: life.epoch }),
            world: world.clone(),
        }
    }

    /// The disk of this node's machine, as a store.
    pub fn local(&self, disk: DiskId) -> Store {
        let folder = Arc::new(Folder::new(&self.world, self.life, disk));
        let store = Store::new(folder, env_of(&self.world, self.life), StoreSettings::default());
        store.expect("these settings work")
    }

    /// Waits by this node's clock.
    pub async fn sleep(&self, span: Duration) {
        self.world.sleep_on(self.life, span).await;
    }

    /// Says what this node does from now on.
    pub fn label(&self, label: &'static str) {
        let mut state = self.world.state();
        let now = state.now;
        let node = &mut state.nodes[self.life.node];
        (node.label, node.began) = (label, now);
    }

    /// Whether to begin nothing new.
    pub fn is_over(&self) -> bool {
        self.world.state().resting
    }

    /// Writes a line into the history.
    pub fn note(&self, text: impl FnOnce() -> String) {
        let mut state = self.world.state();
        if state.trace.records() {
            state.note(self.life.node, text);
        }
    }

    /// Checks something; what does not hold ends the world.
    pub fn hold(&self, what: impl FnOnce(&mut crate::world::State) -> Result<(), String>) {
        let mut state = self.world.state();
        if let Err(what) = what(&mut state) {
            state.violate(what);
        }
    }

    /// Now, by the world's clock.
    pub fn now(&self) -> Micros {
        self.world.state().now
    }

    /// An error that a user could see is fine; one that blames our own code is not.
    pub fn expected(&self, what: &str, error: &leasehold::Error) {
        self.note(|| format!("{what}: {error:?}"));
        if matches!(error.kind(), ErrorKind::Internal) {
            self.hold(|_| Err(format!("{what}: {error:?}")));
        }
    }
}

/// What a node does in each of its lives.
pub type Role = Arc<dyn Fn(Ctx) -> BoxFuture<'static, ()> + Send + Sync>;

/// Adds a node that does this, from its start and from each restart on.
pub fn spawn(world: &World, rng: &mut Rng, name: &str, role: Role) -> NodeId {
    // Some share a machine, and some of those a container.
    let (machine, container) = (rng.below(2) as u32, rng.below(2) as u32);
    let node = world.add_node(name, machine, container);
    start(world, node, role);
    node
}

/// Adds a process of a machine that has this disk.
pub fn spawn_at(world: &World, disk: DiskId, name: &str, role: Role) -> NodeId {
    let node = world.add_node(name, 10 + disk as u32, 0);
    world.on_disk(node, disk);
    start(world, node, role);
    node
}

fn start(world: &World, node: NodeId, role: Role) {
    let world = world.clone();
    tokio::spawn(async move {
        let mut life = world.state().life(node);
        loop {
            tokio::spawn(role(Ctx::new(&world, life)));
            life = world.next_life(life).await;
        }
    });
}
