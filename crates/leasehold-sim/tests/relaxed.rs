//! Rows 14 and 15, which are about relaxed mode, in the very histories that they break, on a store in
//! memory; `mutants.rs` finds them by chance.
#![cfg(feature = "mutants")]
#![allow(clippy::unwrap_used)] // in a test, a failure is a panic

use std::sync::Arc;
use std::time::Duration;

use leasehold::env::Env;
use leasehold::protocol::mutant::{Mutant, make};
use leasehold::queue::{Mode, NewTask, Queue, QueueSettings, Worker, WorkerSettings};
use leasehold::store::memory::Memory;
use leasehold::store::{List, Store};
use leasehold::sync::Replica;
use leasehold::{Result, StoreSettings};

/// A bucket with a relaxed queue, and a node that has a replica of it.
struct World {
    bucket: Store,
    queue: Queue,
    node: Replica,
    here: Queue,
}

impl World {
    async fn new() -> Result<Self> {
        let memory = Memory::new(Env::system());
        let client = |memory: &Memory| {
            let backend = Arc::new(memory.client(Env::system()));
            Store::new(backend, Env::system(), StoreSettings::default())
        };
        let bucket = client(&memory)?;
        let settings = QueueSettings {
            ttl: Duration::from_secs(3),
            heartbeat: Duration::from_secs(1),
            mode: Mode::Relaxed,
            sync_up: Duration::from_secs(1),
            ..QueueSettings::default()
        };
        let queue = Queue::create(&bucket, "q", settings).await?;
        let node = Replica::open(&Store::memory(), &client(&memory)?, "node").await?;
        let here = node.join("q").await?;
        Ok(Self { bucket, queue, node, here })
    }

    async fn sync(&self) -> Result<()> {
        self.node.up("q").await?;
        self.node.down("q").await?;
        Ok(())
    }

    /// Acks everything that is to be done there.
    async fn drain(&self, queue: &Queue) -> Result<()> {
        let settings = WorkerSettings { until_empty: true, ..WorkerSettings::named("w") };
        let worker = Worker::new(vec![queue.clone()], settings);
        while let Some(task) = worker.next().await? {
            let _ = task.ack().await?;
        }
        Ok(())
    }

    /// Whether the bucket has nothing but receipts.
    async fn is_done(&self) -> Result<bool> {
        let keys = self.bucket.list(List::prefix("queues/q/")?).collect().await?.entries;
        Ok(keys.iter().all(|entry| {
            let key = entry.key.as_str();
            key.contains("/completed/") || key.ends_with("/queue.json")
        }))
    }
}

/// A task that was pushed elsewhere is not deleted by a node that does not have it.
async fn what_is_not_here_stays_there() -> Result<bool> {
    let world = World::new().await?;
    world.queue.push(NewTask::text("x").id("old")).await?;
    world.sync().await?;
    world.drain(&world.here).await?;
    world.queue.push(NewTask::text("x").id("new")).await?;
    world.sync().await?;
    world.drain(&world.here).await?;
    world.sync().await?;
    Ok(world.queue.receipt("new").await?.is_some())
}

/// A task that was done elsewhere does not come back by a node that had a copy.
async fn what_was_acked_stays_away() -> Result<bool> {
    let world = World::new().await?;
    world.queue.push(NewTask::text("x").id("t")).await?;
    world.sync().await?;
    world.drain(&world.queue).await?;
    world.sync().await?;
    world.sync().await?;
    world.is_done().await
}

/// One test for both: which mistake is made is decided for the whole process.
#[test]
fn the_mistakes_of_relaxed_mode_are_caught() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let holds = || {
        (
            runtime.block_on(what_is_not_here_stays_there()).unwrap(),
            runtime.block_on(what_was_acked_stays_away()).unwrap(),
        )
    };
    assert_eq!(holds(), (true, true));
    make(Some(Mutant::AbsentMeansDeleted));
    assert!(!runtime.block_on(what_is_not_here_stays_there()).unwrap());
    make(Some(Mutant::Resurrection));
    assert!(!runtime.block_on(what_was_acked_stays_away()).unwrap());
    make(None);
    assert_eq!(holds(), (true, true));
}
