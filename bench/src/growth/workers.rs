//! Ever more worker processes on one queue in a directory, and ever more workers on a bucket.

use std::sync::Arc;

use anyhow::{Result, ensure};
use leasehold::Store;
use leasehold::queue::{Queue, QueueSettings, usual_settings};
use leasehold::store::Kind;
use tokio::task::JoinSet;

use super::{left_out, sizes};
use crate::chart::{Chart, Cost, FLAT};
use crate::queue::{ours, player, race};
use crate::report::Report;
use crate::rig::Rig;
use crate::stats::median;

const SIZES: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];

pub fn run(rig: &Rig, report: &mut Report) -> Result<()> {
    let runtime = rig.runtime()?;
    let tasks = rig.pick(10_000, 2_000);
    let mut chart = Chart::new("growth-workers", "A queue drained by many workers", "workers");
    for cost in [Cost::Time, Cost::Cpu, Cost::Requests, Cost::Memory] {
        chart.curve("task drained", cost, FLAT);
    }
    chart.curve("task drained, bucket", Cost::Requests, FLAT);
    let arena = rig.arena("growth-workers")?;
    for workers in sizes(rig, &SIZES) {
        eprintln!("  {workers} workers");
        let at = workers as f64;
        let runs: Vec<Run> = (0..rig.pick(3, 1))
            .map(|run| {
                arena.settle()?;
                Run::new(
                    &runtime,
                    &arena.store_path(),
                    &format!("q{workers}-{run}"),
                    tasks,
                    workers,
                )
            })
            .collect::<Result<_>>()?;
        let middle = |of: fn(&Run) -> f64| median(&runs.iter().map(of).collect::<Vec<_>>());
        chart.point("task drained", Cost::Time, at, middle(|run| run.micros));
        chart.point("task drained", Cost::Cpu, at, middle(|run| run.cpu));
        chart.point("task drained", Cost::Requests, at, middle(|run| run.requests));
        chart.point("task drained", Cost::Memory, at, middle(|run| run.mib));
        let requests = runtime.block_on(bucket(rig.pick(2_000, 1_000), workers))?;
        chart.point("task drained, bucket", Cost::Requests, at, requests);
    }
    chart.note(format!(
        "{tasks} tasks pushed and drained, receipts on, not durable; a worker is a process with 4 jobs \
         on this machine's {} cores. CPU time includes pushing. `bucket`: workers in one \
         process, requests in memory with S3's rules; looks after the last task count too.",
        std::thread::available_parallelism().map_or(1, usize::from)
    ));
    left_out(rig, &SIZES, &mut chart);
    report.chart(chart);
    arena.clear()
}

/// Per task; memory per process.
struct Run {
    micros: f64,
    cpu: f64,
    requests: f64,
    mib: f64,
}

impl Run {
    fn new(
        runtime: &tokio::runtime::Runtime,
        folder: &std::path::Path,
        queue: &str,
        tasks: usize,
        workers: usize,
    ) -> Result<Self> {
        let store = ours::open(folder)?;
        let settings = QueueSettings { durable: false, ..usual_settings(Kind::Directory) };
        runtime.block_on(Queue::create(&store, queue, settings))?;
        let mut players = Vec::new();
        for _ in 0..workers {
            players.push(ours::player(folder, queue, 4)?);
        }
        let speed = race(&mut players, &format!("push {tasks} 1 1"), tasks)?;
        let (mut requests, mut cpu, mut most) = (0, 0.0, 0.0);
        for player in &mut players {
            let receipt = player::Receipt::of(player)?;
            requests += receipt.usage.requests();
            cpu += receipt.cpu_micros;
            most = f64::max(most, receipt.mib());
        }
        let tasks_f = tasks as f64;
        // One PUT of each task was its push.
        let requests = requests as f64 / tasks_f - 1.0;
        Ok(Self { micros: 1e6 / speed.drain, cpu: cpu / tasks_f, requests, mib: most })
    }
}

/// Requests per task drained.
async fn bucket(tasks: usize, workers: usize) -> Result<f64> {
    let store = Store::memory();
    let queue = Queue::create(&store, "q", usual_settings(Kind::Memory)).await?;
    player::push(queue.clone(), tasks, 1, 1).await?;
    let before = store.usage();
    let mut running = JoinSet::new();
    let queue = Arc::new(queue);
    for _ in 0..workers {
        let queue = queue.clone();
        running.spawn(async move { player::drain(&queue, 1).await });
    }
    let mut done = 0;
    while let Some(ended) = running.join_next().await {
        done += ended??.0;
    }
    ensure!(done == tasks, "{done} tasks were done instead of {tasks}");
    Ok(store.usage().since(&before).requests() as f64 / tasks as f64)
}
