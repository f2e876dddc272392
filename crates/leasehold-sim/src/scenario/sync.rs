//! Relaxed mode: machines with a replica each. On every one of them a sync, a worker and somebody who
//! pushes, as processes of their own, and in the bucket those who work there directly.

use std::sync::Arc;
use std::time::Duration;

use leasehold::ErrorKind;
use leasehold::protocol::format::lease::Process;
use leasehold::queue::{NewTask, Queue, Worker, WorkerSettings};
use leasehold::sync::Replica;
use tokio_util::sync::CancellationToken;

use super::queue::Work;
use super::{Ctx, QUEUE, Role, spawn_at};
use crate::rng::Rng;
use crate::world::{CHILD, DiskId, NodeId, World};

/// A machine with a replica, and what is done there.
#[derive(Debug, Clone)]
struct Machine {
    disk: DiskId,
    pushes: u64,
    bundles: bool,
    named: bool,
}

/// Two or three machines.
pub fn spawn(world: &World, rng: &mut Rng, queue: &Work) -> Vec<NodeId> {
    let mut nodes = Vec::new();
    for _ in 0..rng.between(2, 3) {
        let disk = world.add_disk();
        let (bundles, named) = (queue.bundles, queue.named);
        let machine = Machine { disk, pushes: rng.between(1, 5), bundles, named };
        for part in ["sync", "push", "work"] {
            let machine = machine.clone();
            let role: Role = Arc::new(move |ctx: Ctx| {
                let machine = machine.clone();
                Box::pin(async move {
                    match part {
                        "sync" => machine.sync(ctx).await,
                        "push" => machine.push(ctx).await,
                        _ => machine.work(ctx).await,
                    }
                })
            });
            nodes.push(spawn_at(world, disk, &format!("{part}-{disk}"), role));
        }
    }
    nodes
}

impl Machine {
    async fn open(&self, ctx: &Ctx) -> Replica {
        loop {
            let node = format!("machine-{}", self.disk);
            match Replica::open(&ctx.local(self.disk), &ctx.store, &node).await {
                Ok(replica) => return replica,
                Err(error) => ctx.expected("opening the replica", &error),
            }
            ctx.sleep(Duration::from_secs(1)).await;
        }
    }

    /// The replica of the queue, once there is one.
    async fn choose(&self, ctx: &mut Ctx, replica: &Replica) -> Queue {
        loop {
            match replica.choose(QUEUE).await {
                Ok(Some(queue)) => return queue,
                Ok(None) => ctx.hold(|_| Err("the queue is gone".to_owned())),
                Err(error) => expected(ctx, "choose", &error),
            }
            let pause = ctx.rng.millis(500, 8000);
            ctx.sleep(pause).await;
        }
    }

    /// Keeps the replica in step: by the library's own loop, or whenever it occurs to somebody.
    async fn sync(self, mut ctx: Ctx) {
        let replica = self.open(&ctx).await;
        if ctx.rng.chance(0.5) {
            return replica.run(&[QUEUE.to_owned()], CancellationToken::new()).await;
        }
        loop {
            let done = match ctx.rng.below(5) {
                0..=2 => self.up(&ctx, &replica).await,
                _ => self.down(&ctx, &replica).await,
            };
            if let Err(error) = done {
                if replica.queue(QUEUE).await.is_ok_and(|queue| queue.is_none()) {
                    let _ = replica.join(QUEUE).await;
                }
                expected(&ctx, "sync", &error);
            }
            let pause = match ctx.is_over() {
                true => ctx.rng.millis(5000, 30_000),
                false => ctx.rng.skewed_millis(100, 60_000),
            };
            ctx.sleep(pause).await;
        }
    }

    async fn up(&self, ctx: &Ctx, replica: &Replica) -> leasehold::Result<()> {
        let up = replica.up(QUEUE).await?;
        ctx.note(|| format!("up: {up:?}"));
        Ok(())
    }

    async fn down(&self, ctx: &Ctx, replica: &Replica) -> leasehold::Result<()> {
        let down = replica.down(QUEUE).await?;
        ctx.note(|| format!("down: {down:?}"));
        Ok(())
    }

    /// Pushes to the replica; and now and then somebody there syncs by hand.
    async fn push(self, mut ctx: Ctx) {
        let replica = self.open(&ctx).await;
        let queue = self.choose(&mut ctx, &replica).await;
        for n in 0..self.pushes {
            let pause = ctx.rng.skewed_millis(1, 60_000);
            ctx.sleep(pause).await;
            if ctx.is_over() {
                return;
            }
            let done = match ctx.rng.below(10) {
                0 => self.up(&ctx, &replica).await,
                1 => self.down(&ctx, &replica).await,
                2..=4 if self.bundles => self.push_bundle(&mut ctx, &queue).await,
                _ => self.push_one(&mut ctx, &queue, n).await,
            };
            if let Err(error) = done {
                expected(&ctx, "push", &error);
            }
        }
    }

    async fn push_one(&self, ctx: &mut Ctx, queue: &Queue, n: u64) -> leasehold::Result<()> {
        let mut task = NewTask::text(&format!("{n}"));
        let chosen = self.named && ctx.rng.chance(0.6);
        if chosen {
            task = task.id(format!("t{}", ctx.rng.below(3)));
        }
        if ctx.rng.chance(0.2) {
            task = task.delay(ctx.rng.millis(100, 90_000));
        }
        let pushed = queue.push(task).await?;
        ctx.note(|| format!("pushed: {pushed:?}"));
        ctx.hold(|state| {
            state.check.queue.iter_mut().for_each(|check| check.promised(&pushed, chosen));
            Ok(())
        });
        Ok(())
    }

    async fn push_bundle(&self, ctx: &mut Ctx, queue: &Queue) -> leasehold::Result<()> {
        let count = ctx.rng.between(1, 4);
        let tasks = (0..count).map(|n| NewTask::text(&n.to_string())).collect();
        let names = queue.push_bundle(tasks).await?;
        ctx.note(|| format!("pushed a bundle: {names:?}"));
        ctx.hold(|state| {
            state.check.queue.iter_mut().for_each(|check| check.promised_bundle(&names));
            Ok(())
        });
        Ok(())
    }

    async fn work(self, mut ctx: Ctx) {
        let replica = self.open(&ctx).await;
        let queue = self.choose(&mut ctx, &replica).await;
        let settings = WorkerSettings {
            companion: Some(Process { pid: CHILD + ctx.life.pid(), start: 1 }),
            // Else it would look every second, for ever.
            until_empty: true,
            ..WorkerSettings::named(ctx.name.clone())
        };
        let worker = Arc::new(Worker::new(vec![queue], settings));
        if ctx.rng.chance(0.4) {
            let (worker, mut ctx, disk) = (worker.clone(), ctx.clone(), self.disk);
            ctx.rng = ctx.rng.fork(1);
            tokio::spawn(async move { Self::job(ctx, &worker, disk).await });
        }
        Self::job(ctx, &worker, self.disk).await;
    }

    async fn job(mut ctx: Ctx, worker: &Worker, disk: DiskId) {
        loop {
            match worker.next().await {
                Ok(Some(task)) => Work::run(&mut ctx, task, Some(disk)).await,
                Ok(None) => {
                    let pause = match ctx.is_over() {
                        true => ctx.rng.millis(10_000, 30_000),
                        false => ctx.rng.millis(100, 8000),
                    };
                    ctx.sleep(pause).await;
                }
                Err(error) => {
                    expected(&ctx, "next", &error);
                    ctx.sleep(Duration::from_secs(1)).await;
                }
            }
        }
    }
}

/// Somebody else of this machine may have the sync's lock.
fn expected(ctx: &Ctx, what: &str, error: &leasehold::Error) {
    match error.kind() {
        ErrorKind::Held => ctx.note(|| format!("{what}: {error}")),
        _ => ctx.expected(what, error),
    }
}
