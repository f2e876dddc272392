//! A work queue: pushers, workers, and somebody who looks after it.

use std::sync::Arc;
use std::time::Duration;

use leasehold::ErrorKind;
use leasehold::protocol::format::lease::Process;
use leasehold::queue::{Acked, Mode, NewTask, Queue, QueueSettings, Task, Worker, WorkerSettings};

use super::{Ctx, Role, spawn};
use crate::check::queue::QueueCheck;
use crate::rng::Rng;
use crate::world::{CHILD, DiskId, NodeId, World};

const NAME: &str = super::QUEUE;

/// A queue and what is done with it.
#[derive(Debug, Clone)]
pub struct Work {
    pushes: u64,
    workers: usize,
    pub(super) bundles: bool,
    pub(super) named: bool,
}

impl Work {
    /// The same with replicas: fewer who work in the bucket itself, and times that let syncs take part.
    pub async fn set_up_relaxed(
        world: &World,
        ctx: &Ctx,
        rng: &mut Rng,
    ) -> leasehold::Result<Self> {
        let ttl = Duration::from_secs(*rng.pick(&[18, 30, 60]));
        let settings = QueueSettings {
            ttl,
            heartbeat: ttl / 3,
            max_attempts: 3,
            max_crashes: 3,
            backoff: Duration::from_secs(1),
            backoff_cap: Duration::from_secs(20),
            shards: *rng.pick(&[1, 1, 1, 3]),
            retention: Duration::from_secs(*rng.pick(&[3600, 7 * 86_400])),
            mode: Mode::Relaxed,
            sync_up: ttl / 3,
            sync_down: Duration::from_secs(rng.between(15, 90)),
            ..QueueSettings::default()
        };
        let shards = settings.shards;
        Queue::create(&ctx.store, NAME, settings).await?;
        world.state().check.queue = QueueCheck::new(NAME, shards);
        Ok(Self {
            pushes: rng.between(1, 4),
            workers: rng.below(2) as usize,
            bundles: rng.chance(0.5),
            named: rng.chance(0.6),
        })
    }

    /// A queue with small limits, so that they are reached.
    pub async fn set_up(world: &World, ctx: &Ctx, rng: &mut Rng) -> leasehold::Result<Self> {
        let ttl = Duration::from_secs(*rng.pick(&[9, 15, 30]));
        let shards = *rng.pick(&[1, 1, 1, 3]);
        let settings = QueueSettings {
            ttl,
            heartbeat: ttl / 3,
            max_attempts: 3,
            max_crashes: 3,
            backoff: Duration::from_secs(1),
            backoff_cap: Duration::from_secs(20),
            shards,
            // Longer than any write can be late.
            retention: Duration::from_secs(*rng.pick(&[3600, 7 * 86_400])),
            ..QueueSettings::default()
        };
        Queue::create(&ctx.store, NAME, settings).await?;
        world.state().check.queue = QueueCheck::new(NAME, shards);
        Ok(Self {
            pushes: rng.between(2, 8),
            workers: rng.between(2, 3) as usize,
            bundles: rng.chance(0.5),
            named: rng.chance(0.7),
        })
    }

    /// Nodes that push, work and look after it.
    pub fn spawn(&self, world: &World, rng: &mut Rng) -> Vec<NodeId> {
        let mut nodes = Vec::new();
        for n in 0..2 {
            let (work, pushes) = (self.clone(), n == 0);
            let role: Role = Arc::new(move |ctx: Ctx| {
                let work = work.clone();
                Box::pin(async move {
                    match pushes {
                        true => work.push(ctx).await,
                        false => work.look_after(ctx).await,
                    }
                })
            });
            nodes.push(spawn(world, rng, ["pusher", "operator"][n], role));
        }
        for n in 0..self.workers {
            let work = self.clone();
            let role: Role = Arc::new(move |ctx: Ctx| {
                let work = work.clone();
                Box::pin(async move { work.work(ctx).await })
            });
            nodes.push(spawn(world, rng, &format!("worker-{n}"), role));
        }
        nodes
    }

    async fn open(&self, ctx: &Ctx) -> Queue {
        loop {
            match Queue::open(&ctx.store, NAME).await {
                Ok(Some(queue)) => return queue,
                Ok(None) => ctx.hold(|_| Err("the queue is gone".to_owned())),
                Err(error) => ctx.expected("open", &error),
            }
            ctx.sleep(Duration::from_secs(1)).await;
        }
    }

    async fn push(self, mut ctx: Ctx) {
        let queue = self.open(&ctx).await;
        for n in 0..self.pushes {
            let pause = ctx.rng.skewed_millis(1, 40_000);
            ctx.sleep(pause).await;
            if ctx.is_over() {
                return;
            }
            ctx.label("push");
            let since = ctx.now();
            if self.bundles && ctx.rng.chance(0.3) {
                let count = ctx.rng.between(1, 4);
                let tasks = (0..count).map(|n| NewTask::text(&n.to_string())).collect();
                match queue.push_bundle(tasks).await {
                    Ok(names) => ctx.note(|| format!("pushed a bundle: {names:?}")),
                    Err(error) => ctx.expected("push", &error),
                }
                continue;
            }
            let mut task = NewTask::text(&format!("{n}"));
            if self.named {
                task = task.id(format!("t{}", ctx.rng.below(3)));
            }
            if ctx.rng.chance(0.2) {
                task = task.delay(ctx.rng.millis(100, 90_000));
            }
            match queue.push(task).await {
                Ok(pushed) => {
                    ctx.note(|| format!("pushed: {pushed:?}"));
                    ctx.hold(|state| {
                        let Some(mut queue) = state.check.queue.take() else { return Ok(()) };
                        let verdict = queue.pushed(state, since, &pushed);
                        state.check.queue = Some(queue);
                        verdict
                    });
                }
                Err(error) => ctx.expected("push", &error),
            }
        }
        ctx.label("");
    }

    async fn work(self, mut ctx: Ctx) {
        let queue = self.open(&ctx).await;
        let companion = Some(Process { pid: CHILD + ctx.life.pid(), start: 1 });
        let settings = WorkerSettings {
            poll: Duration::from_secs(20),
            companion,
            ..WorkerSettings::named(ctx.name.clone())
        };
        let worker = Arc::new(Worker::new(vec![queue.clone()], settings));
        // Two at a time, as a process with two jobs does.
        let jobs = 1 + ctx.rng.below(2);
        for job in 1..jobs {
            let (worker, mut ctx) = (worker.clone(), ctx.clone());
            ctx.rng = ctx.rng.fork(job);
            tokio::spawn(async move { Self::job(ctx, &worker).await });
        }
        Self::job(ctx, &worker).await;
    }

    async fn job(mut ctx: Ctx, worker: &Worker) {
        loop {
            match worker.next().await {
                Ok(Some(task)) => Self::run(&mut ctx, task, None).await,
                Ok(None) => return,
                Err(error) => {
                    ctx.expected("next", &error);
                    ctx.sleep(Duration::from_secs(1)).await;
                }
            }
        }
    }

    /// Does a task, or fails at it. On a machine with a replica, that is what is told of it.
    pub(super) async fn run(ctx: &mut Ctx, task: Task, disk: Option<DiskId>) {
        let (id, inc, token) = (task.id().to_owned(), task.incarnation().to_owned(), task.token());
        ctx.note(|| format!("starts {id} with token {token}, attempt {}", task.attempt()));
        let life = ctx.life;
        if disk.is_none() {
            ctx.hold(|state| {
                let Some(mut queue) = state.check.queue.take() else { return Ok(()) };
                let verdict = queue.started(state, life, &id, &inc, token);
                state.check.queue = Some(queue);
                verdict
            });
        }
        let single = {
            let state = ctx.world.state();
            let objects = disk.map_or(&state.objects, |disk| &state.disks[disk].objects);
            state.check.queue.as_ref().is_some_and(|queue| queue.is_single(objects, &id, token))
        };
        let takes = ctx.rng.skewed_millis(1, 25_000);
        ctx.sleep(takes).await;
        if ctx.rng.chance(0.1)
            && let Err(error) = task.progress(&"half").await
        {
            ctx.expected("progress", &error);
        }
        if let Some(disk) = disk {
            ctx.hold(|state| {
                state.check.queue.iter_mut().for_each(|queue| queue.ending(disk));
                Ok(())
            });
        }
        let ended = match ctx.rng.below(20) {
            0..=13 => {
                if !single {
                    // As soon as it says so, the worker may count it as done.
                    ctx.hold(|state| {
                        state.check.queue.iter_mut().for_each(|queue| queue.done_piece(&id));
                        Ok(())
                    });
                }
                let acked = task.ack_text("done").await;
                ctx.note(|| format!("acks {id}: {acked:?}"));
                match (acked, disk) {
                    (Ok(acked), Some(disk)) => {
                        ctx.hold(|state| {
                            let Some(queue) = &mut state.check.queue else { return Ok(()) };
                            if acked == Acked::First {
                                queue.was_first(disk);
                            }
                            Ok(())
                        });
                        Ok(())
                    }
                    (Ok(acked), None) => {
                        if single {
                            let name = ctx.name.clone();
                            ctx.hold(|state| {
                                let Some(mut queue) = state.check.queue.take() else {
                                    return Ok(());
                                };
                                let standing = queue.receipt_of(state, &id);
                                let verdict = queue.acked(
                                    state.now,
                                    life,
                                    (&name, token),
                                    &inc,
                                    acked,
                                    standing,
                                );
                                state.check.queue = Some(queue);
                                verdict
                            });
                        }
                        Ok(())
                    }
                    (Err(error), _) => Err(error),
                }
            }
            14..=15 => {
                let delay = ctx.rng.chance(0.3).then(|| ctx.rng.millis(1, 20_000));
                ctx.note(|| format!("nacks {id}"));
                task.nack("did not work", delay).await.map(drop)
            }
            16 => {
                ctx.note(|| format!("fails {id}"));
                task.fail("never").await
            }
            17..=18 => {
                ctx.note(|| format!("gives {id} back"));
                task.give_back().await
            }
            _ => {
                ctx.note(|| format!("drops {id}"));
                drop(task);
                Ok(())
            }
        };
        if let Err(error) = ended {
            ctx.expected("end of a task", &error);
        }
    }

    async fn look_after(self, mut ctx: Ctx) {
        let queue = self.open(&ctx).await;
        for _ in 0..ctx.rng.between(1, 6) {
            let pause = ctx.rng.skewed_millis(1, 60_000);
            ctx.sleep(pause).await;
            if ctx.is_over() {
                return;
            }
            let done = match ctx.rng.below(12) {
                0..=3 => self.retry(&ctx, &queue).await,
                4..=5 => {
                    ctx.label("sweep");
                    queue.sweep().await.map(drop)
                }
                6 => {
                    ctx.label("purge");
                    queue.purge_pending().await.map(drop)
                }
                7 => {
                    ctx.label("discard");
                    queue.purge_failed().await.map(drop)
                }
                8 => {
                    ctx.label("");
                    queue.purge_receipts(Duration::from_secs(3600)).await.map(drop)
                }
                9 => {
                    ctx.label("");
                    let paused = queue.pause().await;
                    let rest = ctx.rng.millis(1, 60_000);
                    ctx.sleep(rest).await;
                    paused.and(queue.resume().await)
                }
                10 => queue.status(3).await.map(drop),
                _ => queue.peek(3).await.map(drop),
            };
            ctx.label("");
            if let Err(error) = done {
                ctx.expected("looking after the queue", &error);
            }
        }
    }

    async fn retry(&self, ctx: &Ctx, queue: &Queue) -> leasehold::Result<()> {
        ctx.label("retry");
        for id in queue.failed_ids().await? {
            let again = queue.retry(&id).await?;
            ctx.note(|| format!("retries {id}: {again}"));
        }
        Ok(())
    }

    /// Once trouble is over, the queue drains, and nothing was lost; on no machine either.
    pub async fn finish(&self, world: &World, ctx: &Ctx) -> Result<(), String> {
        let queue = self.open(ctx).await;
        queue.resume().await.map_err(|error| format!("resume: {error}"))?;
        let left = || {
            let state = world.state();
            let check = state.check.queue.as_ref()?;
            check.leftovers(&state).or_else(|| check.left_here(&state))
        };
        for _ in 0..120 {
            match left() {
                None => break,
                Some(_) => world.sleep(Duration::from_secs(30)).await,
            }
            // Whoever ran something has let go of it by now: what is left of leases is swept.
            if let Err(error) = queue.sweep().await
                && error.kind() != ErrorKind::Unavailable
            {
                return Err(format!("sweep: {error}"));
            }
        }
        if let Some(left) = left() {
            return Err(format!("the queue does not drain: {left} is still there"));
        }
        let state = world.state();
        let Some(check) = &state.check.queue else { return Ok(()) };
        check.at_the_end()?;
        check.counted(&state)
    }
}
