//! How long a task waits until somebody has it, at 10, 50 and 90 % of what the queue can do.
//!
//! One pushes at even intervals, whether or not the queue keeps up, and four jobs of one worker
//! claim. A task's wait is from when it was due to be pushed to when its payload is in hand, so
//! a queue that falls behind shows. What the queue can do is measured the same way, without pauses.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use leasehold::Store;
use leasehold::queue::{NewTask, Queue, QueueSettings, Worker, WorkerSettings, usual_settings};
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinSet;

use super::monotonic;
use crate::bucket::{Place, seaweedfs};
use crate::report::{Report, thousands};
use crate::rig::Rig;
use crate::stats::percentile;

/// How many tasks one worker has at a time, on each kind of store.
const JOBS: usize = 4;
const BUCKET_JOBS: usize = 16;
/// How often an idle worker looks on a bucket at least. Usually 30 s; each look is a LIST.
const POLL: Duration = Duration::from_secs(1);

pub fn run(rig: &Rig, report: &mut Report) -> Result<()> {
    let arena = rig.arena("queue-latency")?;
    let place = Place::Directory(arena.store_path());
    measure(rig, report, "directory", &place, JOBS)?;
    arena.clear()?;
    let Some(server) = seaweedfs(rig, report, "claim latency on SeaweedFS")? else { return Ok(()) };
    measure(rig, report, "SeaweedFS", &Place::on(&server), BUCKET_JOBS)
}

fn measure(rig: &Rig, report: &mut Report, name: &str, place: &Place, jobs: usize) -> Result<()> {
    let bench = Bench { runtime: rig.runtime()?, place, jobs };
    let most = rig.pick(5.0, 1.5);
    bench.run("warm-up", 200, 0.0)?;
    let count = if name == "directory" { rig.pick(20_000, 5_000) } else { rig.pick(1_500, 400) };
    let (_, rate) = bench.run("all-at-once", count, 0.0)?;
    let mut shown = Vec::new();
    for share in [0.1, 0.5, 0.9] {
        let wanted = rate * share;
        let tasks = (wanted * most).max(50.0) as usize;
        let (waits, _) = bench.run(&format!("at-{:.0}", share * 100.0), tasks, wanted)?;
        shown.push(format!(
            "{:.0} %: {} / {}",
            share * 100.0,
            millis(percentile(&waits, 0.5)),
            millis(percentile(&waits, 0.99))
        ));
    }
    report.fact(
        format!("from push to claim, p50 / p99, {name}"),
        format!("{} (of {} tasks/s pushed and drained)", shown.join("; "), thousands(rate)),
    );
    Ok(())
}

fn millis(value: f64) -> String {
    if value < 10.0 { format!("{value:.2} ms") } else { format!("{value:.0} ms") }
}

struct Bench<'a> {
    runtime: Runtime,
    place: &'a Place,
    jobs: usize,
}

impl Bench<'_> {
    /// How many milliseconds each task waited, and how many there were per second. At a rate of 0,
    /// one push follows the other.
    fn run(&self, queue: &str, tasks: usize, rate: f64) -> Result<(Vec<f64>, f64)> {
        let store = self.place.open()?;
        let settings = QueueSettings { durable: false, ..usual_settings(store.kind()) };
        let queue = self.runtime.block_on(Queue::create(&store, queue, settings))?;
        let settings = WorkerSettings { poll: POLL, ..WorkerSettings::named("worker") };
        let worker = Arc::new(Worker::new(vec![queue.clone()], settings));
        let mut jobs = JoinSet::new();
        for _ in 0..self.jobs {
            jobs.spawn_on(work(worker.clone()), self.runtime.handle());
        }
        // Jobs that look before there is anything rest first.
        std::thread::sleep(Duration::from_millis(100));
        let start = monotonic();
        let (place, name) = (self.place.clone(), queue.name().to_owned());
        let pusher = std::thread::spawn(move || push(&place.open()?, &name, tasks, rate));
        let mut waits = Vec::new();
        self.runtime.block_on(async {
            let mut done = 0;
            while done < tasks {
                let wait = tokio::time::timeout(Duration::from_secs(60), jobs.join_next()).await;
                let wait = wait.context("tasks do not come")?.context("no jobs left")??;
                waits.push(wait?);
                jobs.spawn(work(worker.clone()));
                done += 1;
            }
            jobs.shutdown().await;
            anyhow::Ok(())
        })?;
        let rate = tasks as f64 * 1e9 / (monotonic() - start) as f64;
        pusher.join().ok().context("the pusher panicked")??;
        Ok((waits, rate))
    }
}

/// One task: claimed, acked. How long it waited, in milliseconds.
async fn work(worker: Arc<Worker>) -> Result<f64> {
    let task = worker.next().await?.context("the worker ended")?;
    let due: u64 = task.json()?;
    let wait = monotonic().saturating_sub(due) as f64 / 1e6;
    let _ = task.ack().await?;
    Ok(wait)
}

/// On a thread of its own, whose pauses are exact.
fn push(store: &Store, queue: &str, tasks: usize, rate: f64) -> Result<()> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let queue = runtime.block_on(Queue::open(store, queue))?.context("no such queue")?;
    let start = monotonic();
    for n in 0..tasks {
        let mut due = monotonic();
        if rate > 0.0 {
            due = start + (n as f64 * 1e9 / rate) as u64;
            let early = due.saturating_sub(monotonic());
            std::thread::sleep(Duration::from_nanos(early));
        }
        runtime.block_on(queue.push(NewTask::json(&due)?))?;
    }
    ensure!(tasks > 0, "nothing to push");
    Ok(())
}
