//! 16 workers on an S3 server, against bare HTTP with the same requests.
//!
//! Requests per second, since that is what a bucket gives: a push is a PUT, a task done is a PUT (its
//! lease), a GET, a PUT (its receipt) and two DELETEs. Before the first of them somebody has to LIST what
//! there is, which takes SeaweedFS as long as some hundred other requests: the floor does that once,
//! too.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use leasehold::queue::{NewTask, Queue, QueueSettings};
use leasehold::store::meter::Usage;
use leasehold::{Key, Store};
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

use super::{Speed, contest, payload, player};
use crate::bucket::{Place, seaweedfs};
use crate::host::cpu_time;
use crate::report::{Report, Row, Target, Unit};
use crate::rig::Rig;
use crate::stats::median;
use crate::store::bucket::bare::{Bare, Connection, NEW};

const WORKERS: usize = 16;
const FLOOR: &str = "hyper, a connection per worker, the same requests, bytes and forms of keys";

pub fn run(rig: &Rig, report: &mut Report) -> Result<()> {
    let Some(server) = seaweedfs(rig, report, "16 workers on SeaweedFS")? else { return Ok(()) };
    let runtime = rig.runtime()?;
    let store = Place::on(&server).open()?;
    runtime.block_on(store.init())?;
    let sample = Arc::new(runtime.block_on(Sample::take(&store))?);
    let floor = Bare::new(&server)?;
    let tasks = rig.pick(480, 240);
    let mut run = 0;
    let (mut our_cpu, mut bare_cpu) = (Vec::new(), Vec::new());
    let (mut per_task, mut lists) = (Vec::new(), Vec::new());
    let runs = contest(rig.pick(9, 5), 2, |at| {
        run += 1;
        let cpu = cpu_time();
        match at {
            0 => {
                let name = format!("q{run}");
                let (speed, used) = runtime.block_on(ours(&store, &name, tasks))?;
                our_cpu.push((cpu_time() - cpu).as_secs_f64() * 1e6 / tasks as f64);
                per_task.push(used.requests() as f64 / tasks as f64);
                lists.push(used.list as f64);
                Ok(speed)
            }
            _ => {
                let speed = bare(&runtime, &floor, &sample, &format!("b{run}"), tasks)?;
                bare_cpu.push((cpu_time() - cpu).as_secs_f64() * 1e6 / tasks as f64);
                Ok(speed)
            }
        }
    })?;
    let (push, drain) = runs[0].beside(&runs[1]);
    let row = Row::new("pushes by 16, SeaweedFS, requests", Unit::Rate, push, FLOOR);
    report.add(row.target(Target::Ratio(0.9)));
    let row = Row::new("drain by 16 workers, SeaweedFS, requests", Unit::Rate, drain, FLOOR);
    report.add(row.target(Target::Ratio(0.9)).note(format!(
        "{:.2} requests per task drained, {:.0} LISTs in all (the floor's 5, and one LIST); client's CPU per \
         task: {:.0} µs, the floor's {:.0} µs",
        median(&per_task),
        median(&lists),
        median(&our_cpu),
        median(&bare_cpu)
    )));
    Ok(())
}

/// Requests per second, pushing and draining, and what the drain requested.
async fn ours(store: &Store, name: &str, tasks: usize) -> Result<(Speed, Usage)> {
    let queue = Queue::create(store, name, QueueSettings::default()).await?;
    let (before, start) = (store.usage(), Instant::now());
    let pushed = player::push(queue.clone(), tasks, WORKERS, 1).await?;
    let push = store.usage().since(&before).requests() as f64 / start.elapsed().as_secs_f64();
    ensure!(pushed == tasks, "not all tasks were pushed");
    let (before, start) = (store.usage(), super::monotonic());
    let (done, last) = player::drain(&queue, WORKERS).await?;
    ensure!(done == tasks, "{done} tasks were done instead of {tasks}");
    let used = store.usage().since(&before);
    let drain = used.requests() as f64 * 1e9 / last.saturating_sub(start) as f64;
    Ok((Speed { push, drain }, used))
}

/// What the bare loop writes: the very bytes that a task, its lease and its receipt have, under keys of
/// the same form. Servers spend time on both.
struct Sample {
    task: Bytes,
    lease: Bytes,
    receipt: Bytes,
}

impl Sample {
    /// Of a task that is pushed and done for it.
    async fn take(store: &Store) -> Result<Self> {
        let queue = Queue::create(store, "sample", QueueSettings::default()).await?;
        queue.push(NewTask::text(&payload())).await?;
        let name = format!("worker-{}", std::process::id());
        let task = queue.worker(name).next().await?.context("the task is gone")?;
        let read = async |key: String| {
            let object = store.get(&Key::new(key)?).await?;
            anyhow::Ok(object.context("not where it should be")?.body)
        };
        let id = task.id().to_owned();
        let written = read(format!("queues/sample/pending/{id}/task.json")).await?;
        let lease = read(format!("queues/sample/pending/{id}/lease.json")).await?;
        task.ack().await?;
        let receipt = read(format!("queues/sample/completed/{id}.json")).await?;
        Ok(Self { task: written, lease, receipt })
    }
}

fn bare(
    runtime: &Runtime,
    server: &Arc<Bare>,
    sample: &Arc<Sample>,
    run: &str,
    tasks: usize,
) -> Result<Speed> {
    let each = tasks / WORKERS;
    runtime.block_on(async {
        let mut workers = Vec::new();
        for worker in 0..WORKERS {
            workers.push(Loop {
                server: server.clone(),
                sample: sample.clone(),
                connection: server.connect().await?,
                queue: format!("queues/{run}"),
                // As long as ours.
                names: (0..each).map(|n| format!("{worker:013}{n:013}")).collect(),
            });
        }
        let start = Instant::now();
        let mut tasks = JoinSet::new();
        for mut worker in workers {
            tasks.spawn(async move {
                for name in worker.names.clone() {
                    worker.push(&name).await?;
                }
                anyhow::Ok(worker)
            });
        }
        let mut workers = Vec::new();
        while let Some(worker) = tasks.join_next().await {
            workers.push(worker??);
        }
        let push = (each * WORKERS) as f64 / start.elapsed().as_secs_f64();
        let start = Instant::now();
        // Whoever works on a queue has to find out what there is.
        if let Some(Loop { server, connection, queue, .. }) = workers.first_mut() {
            server.list(connection, &format!("{queue}/pending/")).await?;
        }
        let mut tasks = JoinSet::new();
        for mut worker in workers {
            tasks.spawn(async move {
                for name in worker.names.clone() {
                    worker.one(&name).await?;
                }
                anyhow::Ok(())
            });
        }
        while let Some(worker) = tasks.join_next().await {
            worker??;
        }
        let drain = (each * WORKERS * 5 + 1) as f64 / start.elapsed().as_secs_f64();
        Ok(Speed { push, drain })
    })
}

/// A worker of the floor.
struct Loop {
    server: Arc<Bare>,
    sample: Arc<Sample>,
    connection: Connection,
    queue: String,
    names: Vec<String>,
}

impl Loop {
    async fn push(&mut self, name: &str) -> Result<()> {
        let Self { server, sample, connection, queue, .. } = self;
        let key = format!("{queue}/pending/{name}/task.json");
        server.ask(connection, "PUT", &key, sample.task.clone(), NEW, 200).await?;
        Ok(())
    }

    /// Claims, reads, records and removes a task.
    async fn one(&mut self, name: &str) -> Result<()> {
        let Self { server, sample, connection, queue, .. } = self;
        let task = format!("{queue}/pending/{name}/task.json");
        let lease = format!("{queue}/pending/{name}/lease.json");
        let receipt = format!("{queue}/completed/{name}.json");
        let none = Bytes::new();
        let held = server.ask(connection, "PUT", &lease, sample.lease.clone(), NEW, 200).await?;
        let read = server.ask(connection, "GET", &task, none.clone(), None, 200).await?;
        server.ask(connection, "PUT", &receipt, sample.receipt.clone(), NEW, 200).await?;
        let (read, held) = (Some(("if-match", &*read)), Some(("if-match", &*held)));
        server.ask(connection, "DELETE", &task, none.clone(), read, 204).await?;
        server.ask(connection, "DELETE", &lease, none, held, 204).await?;
        Ok(())
    }
}
