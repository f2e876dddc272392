//! A process that pushes to and works on a queue, told what to do on standard input:
//!
//! ```text
//!   (start)                     ready
//!   push TASKS PUSHERS BUNDLE   TASKS           all are pushed
//!   drain                       COUNT NANOS     there is nothing left; how many were ours, and
//!                                               when the last of them was acked
//!   first back|done             MILLIS          one task: how long it took to claim; then given back, or
//!                                               acked
//!   receipt                     JSON            what all of it took so far: see `Receipt`
//! ```

use std::io::BufRead as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use leasehold::Store;
use leasehold::queue::{NewTask, Queue, Worker, WorkerSettings};
use leasehold::store::meter::Usage;
use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;

use super::ours::open;
use super::{monotonic, payload};
use crate::host::{cpu_time, peak_memory};
use crate::peers::Player;

/// One of the processes of a benchmark of queues.
#[derive(clap::Args)]
pub struct Options {
    dir: PathBuf,
    queue: String,
    loops: usize,
}

pub fn run(options: &Options) -> Result<()> {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let store = open(&options.dir)?;
    let queue = runtime.block_on(Queue::open(&store, &options.queue))?.context("no such queue")?;
    let before = Before { usage: store.usage(), cpu: cpu_time() };
    let mut used = None;
    println!("ready");
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let words: Vec<&str> = line.split(' ').collect();
        let answer = match words[..] {
            ["push", tasks, pushers, bundle] => {
                let (tasks, pushers, bundle) = (tasks.parse()?, pushers.parse()?, bundle.parse()?);
                // On a worker, not on the thread that waits: that would be a hand-over per wake-up.
                let pushed = runtime.spawn(push(queue.clone(), tasks, pushers, bundle));
                runtime.block_on(pushed)??.to_string()
            }
            ["drain"] => {
                let (done, last) = runtime.block_on(drain(&queue, options.loops))?;
                format!("{done} {last}")
            }
            ["first", then] => {
                let (millis, claimed) = runtime.block_on(first(&queue, &before, then))?;
                used = Some(claimed);
                millis.to_string()
            }
            ["receipt"] => match used.take() {
                Some(used) => serde_json::to_string(&used)?,
                None => serde_json::to_string(&Receipt::since(&store, &before)?)?,
            },
            _ => bail!("not understood: {line}"),
        };
        println!("{answer}");
    }
    Ok(())
}

/// Pushes this many, several at a time.
pub async fn push(queue: Queue, tasks: usize, pushers: usize, bundle: usize) -> Result<usize> {
    let next = Arc::new(AtomicUsize::new(0));
    let mut loops = JoinSet::new();
    for _ in 0..pushers {
        let (queue, next, payload) = (queue.clone(), next.clone(), payload());
        loops.spawn(async move {
            let mut pushed = 0;
            loop {
                let from = next.fetch_add(bundle, Relaxed);
                if from >= tasks {
                    return anyhow::Ok(pushed);
                }
                let count = bundle.min(tasks - from);
                pushed += count;
                if bundle == 1 {
                    queue.push(NewTask::text(&payload)).await?;
                } else {
                    queue.push_bundle(vec![NewTask::text(&payload); count]).await?;
                }
            }
        });
    }
    let mut pushed = 0;
    while let Some(done) = loops.join_next().await {
        pushed += done??;
    }
    Ok(pushed)
}

/// Does all tasks that there are. Says how many, and when the last was acked.
pub async fn drain(queue: &Queue, loops: usize) -> Result<(usize, u64)> {
    let name = format!("worker-{}", std::process::id());
    let settings = WorkerSettings { until_empty: true, ..WorkerSettings::named(name) };
    let worker = Arc::new(Worker::new(vec![queue.clone()], settings));
    let mut running = JoinSet::new();
    for _ in 0..loops {
        let worker = worker.clone();
        running.spawn(async move {
            let (mut done, mut last) = (0, 0);
            while let Some(task) = worker.next().await? {
                ensure!(task.payload().len() == 200, "not the payload that was pushed");
                // Neither its answer nor whether it was the first matters here.
                let _ = task.ack().await?;
                done += 1;
                last = monotonic();
            }
            anyhow::Ok((done, last))
        });
    }
    let (mut done, mut last) = (0, 0);
    while let Some(ended) = running.join_next().await {
        let (count, at) = ended??;
        done += count;
        last = last.max(at);
    }
    Ok((done, last))
}

/// What it took to get ready.
struct Before {
    usage: Usage,
    cpu: Duration,
}

/// What a process took so far, beyond getting ready.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct Receipt {
    pub usage: Usage,
    /// The most memory that it had.
    pub peak_kib: u64,
    pub cpu_micros: f64,
}

impl Receipt {
    /// Of this process, which had used this much when it was ready.
    fn since(store: &Store, before: &Before) -> Result<Self> {
        Ok(Self {
            usage: store.usage().since(&before.usage),
            peak_kib: peak_memory().context("the kernel does not tell VmHWM")?,
            cpu_micros: (cpu_time() - before.cpu).as_secs_f64() * 1e6,
        })
    }

    /// Of the process that this player is.
    pub fn of(player: &mut Player) -> Result<Self> {
        player.tell("receipt")?;
        Ok(serde_json::from_str(&player.hear()?)?)
    }

    pub fn mib(&self) -> f64 {
        self.peak_kib as f64 / 1024.0
    }
}

/// How many milliseconds it took to get a task, and what it took else; what becomes of it is not in
/// it.
async fn first(queue: &Queue, before: &Before, then: &str) -> Result<(f64, Receipt)> {
    let start = Instant::now();
    let task = queue.worker("first").next().await?.context("nothing to do")?;
    let millis = start.elapsed().as_secs_f64() * 1e3;
    let receipt = Receipt::since(queue.store(), before)?;
    match then {
        "back" => task.give_back().await?,
        _ => _ = task.ack().await?,
    }
    Ok((millis, receipt))
}
