//! The second act: workers of a queue, and one of them is killed.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use leasehold::queue::{
    NewTask, Queue, QueueSettings, Receipt, Worker, WorkerSettings, usual_settings,
};
use leasehold::store::{Connect, Kind, List, Store, StoreUrl};

use super::{Processes, verdict};
use crate::args::{Args, Demo, DemoQueue};
use crate::exit::Exit;
use crate::render;

const QUEUE: &str = "demo";

fn open(dir: &Path) -> anyhow::Result<Store> {
    Ok(Connect::new(StoreUrl::Directory(dir.to_owned())).open()?)
}

/// Pushes tasks, starts workers, kills one half-way, and looks at what is left.
pub fn run(args: &Args, demo: &Demo, dir: &Path) -> anyhow::Result<Exit> {
    let tasks = demo.objects.min(2000);
    if !args.json && !args.quiet {
        render::line(format_args!(
            "{} processes work through a queue of {tasks} tasks. One of them is killed (kill -9) on the way.\n",
            demo.workers
        ))?;
    }
    let runtime = crate::runtime(2)?;
    let store = open(dir)?;
    let queue = runtime.block_on(async {
        let settings = QueueSettings { durable: false, ..usual_settings(Kind::Directory) };
        let queue = Queue::create(&store, QUEUE, settings).await?;
        let new = (0..tasks).map(|n| NewTask::text(&n.to_string()).id(format!("task-{n:04}")));
        queue.push_many(new).await?;
        anyhow::Ok(queue)
    })?;
    let mut workers = Processes(Vec::new());
    for id in 1..=demo.workers {
        let worker = Command::new(std::env::current_exe()?)
            .arg("demo-queue")
            .arg(dir)
            .arg(id.to_string())
            .spawn()
            .context("cannot start a worker")?;
        workers.0.push(worker);
    }
    // Half-way, in the middle of whatever it is doing.
    let killed = demo.workers > 1;
    while killed && runtime.block_on(queue.status(0))?.counts.completed < u64::from(tasks / 3) {
        std::thread::sleep(Duration::from_millis(5));
    }
    if killed && let Some(victim) = workers.0.first_mut() {
        victim.kill()?;
    }
    for (n, worker) in workers.0.iter_mut().enumerate() {
        let status = worker.wait()?;
        ensure!(status.success() || (killed && n == 0), "a worker failed: {status}");
    }
    let seen = runtime.block_on(look(&queue))?;
    report(args, tasks, &seen)
}

/// One of the workers.
pub async fn worker(worker: &DemoQueue) -> anyhow::Result<Exit> {
    let queue = Queue::open(&open(&worker.dir)?, QUEUE).await?.context("there is no queue")?;
    let settings = WorkerSettings {
        until_empty: true,
        ..WorkerSettings::named(format!("worker {}", worker.id))
    };
    let worker = Worker::new(vec![queue], settings);
    while let Some(task) = worker.next().await? {
        let number: String = task.json()?;
        tokio::time::sleep(Duration::from_millis(3)).await;
        task.ack_text(&format!("did {number}")).await?;
    }
    Ok(Exit::Done)
}

struct Seen {
    done: BTreeMap<String, u32>,
    taken_over: u32,
    left: u64,
    failed: u64,
}

async fn look(queue: &Queue) -> anyhow::Result<Seen> {
    let store = queue.store();
    let mut seen = Seen { done: BTreeMap::new(), taken_over: 0, left: 0, failed: 0 };
    let mut listing = store.list(List::prefix(format!("queues/{QUEUE}/completed/"))?);
    while let Some(page) = listing.next_page().await? {
        for entry in page.entries {
            let object = store.get(&entry.key).await?.context("a receipt has vanished")?;
            let receipt = Receipt::parse(&object.body)?;
            *seen.done.entry(receipt.worker).or_default() += 1;
            seen.taken_over += u32::from(receipt.retries > 0);
        }
    }
    let counts = queue.status(0).await?.counts;
    (seen.left, seen.failed) = (counts.free + counts.leased, counts.failed);
    Ok(seen)
}

fn report(args: &Args, tasks: u32, seen: &Seen) -> anyhow::Result<Exit> {
    let done: u32 = seen.done.values().sum();
    let right = done == tasks && seen.left == 0 && seen.failed == 0;
    let exit = if right { Exit::Done } else { Exit::Failed };
    if args.json {
        render::json(&serde_json::json!({
            "tasks": tasks, "receipts": done, "by": seen.done, "taken_over": seen.taken_over,
            "left": seen.left, "correct": right,
        }))?;
        return Ok(exit);
    }
    if !args.quiet {
        let mut table = render::table(&["worker", "completed"], &[1]);
        for (worker, done) in &seen.done {
            table.add_row([worker.trim_start_matches("worker ").to_owned(), done.to_string()]);
        }
        render::line(format_args!("{table}\n"))?;
    }
    render::line(format_args!(
        "{}  every task was completed, and has one receipt: {done} of {tasks}; \
         {} of them taken over from the dead",
        verdict(right),
        seen.taken_over
    ))?;
    Ok(exit)
}
