//! A queue with ever more tasks pending: the first claim, a push, a task drained.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use leasehold::Store;
use leasehold::queue::{Queue, QueueSettings, usual_settings};
use leasehold::store::Kind;
use tokio::runtime::Runtime;

use super::{left_out, sizes};
use crate::chart::{Chart, Cost, FLAT, LINEAR};
use crate::queue::{monotonic, ours, player};
use crate::report::Report;
use crate::rig::Rig;
use crate::stats::median;

/// How often the first claim is measured.
const FIRST: usize = 5;
const SIZES: [usize; 6] = [1_000, 3_000, 10_000, 30_000, 100_000, 1_000_000];

pub fn run(rig: &Rig, report: &mut Report) -> Result<()> {
    let runtime = rig.runtime()?;
    let mut chart =
        Chart::new("growth-pending", "A queue with many tasks pending", "pending tasks");
    for (cost, first) in [(Cost::Time, LINEAR), (Cost::Requests, FLAT), (Cost::Memory, FLAT)] {
        chart.curve("push", cost, FLAT);
        chart.curve("first claim", cost, first);
        chart.curve("task drained", cost, FLAT);
    }
    for name in ["push, bucket", "first claim, bucket", "task drained, bucket"] {
        chart.curve(name, Cost::Requests, FLAT);
    }
    for size in sizes(rig, &SIZES) {
        eprintln!("  {size} pending");
        let arena = rig.arena("growth-pending")?;
        directory(&runtime, &arena.store_path(), size, &mut chart)
            .with_context(|| format!("{size} tasks"))?;
        arena.clear()?;
        runtime.block_on(bucket(size, &mut chart))?;
    }
    chart.note(
        "One process each, receipts on, not durable. `bucket`: requests in memory with S3's rules, where \
         pages have 1,000 keys. The first claim in a directory reads the names of all tasks, in order; \
         the claims after it come from the same names.",
    );
    left_out(rig, &SIZES, &mut chart);
    report.chart(chart);
    Ok(())
}

fn directory(runtime: &Runtime, folder: &Path, size: usize, chart: &mut Chart) -> Result<()> {
    let store = ours::open(folder)?;
    let settings = QueueSettings { durable: false, ..usual_settings(Kind::Directory) };
    runtime.block_on(Queue::create(&store, "q", settings))?;
    let mut add = |name: &str, micros: f64, count: usize, receipt: player::Receipt| {
        let (size, count) = (size as f64, count as f64);
        chart.point(name, Cost::Time, size, micros / count);
        chart.point(name, Cost::Requests, size, receipt.usage.requests() as f64 / count);
        chart.point(name, Cost::Memory, size, receipt.mib());
    };

    let mut pusher = ours::player(folder, "q", 1)?;
    let start = Instant::now();
    ensure!(pusher.ask(&format!("push {size} 1 1"))? == size as f64, "not all were pushed");
    let micros = start.elapsed().as_secs_f64() * 1e6;
    add("push", micros, size, player::Receipt::of(&mut pusher)?);
    drop(pusher);
    super::settle(folder)?;

    // Each in a process that knows nothing yet. Acked, not given back: who meets somebody's lease
    // looks before it claims for a while.
    let (mut micros, mut last) = (Vec::new(), player::Receipt::default());
    for _ in 0..FIRST {
        let mut claimer = ours::player(folder, "q", 1)?;
        micros.push(claimer.ask("first done")? * 1e3);
        last = player::Receipt::of(&mut claimer)?;
    }
    add("first claim", median(&micros), 1, last);

    let mut worker = ours::player(folder, "q", 4)?;
    let start = monotonic();
    worker.tell("drain")?;
    let answer = worker.hear()?;
    let (done, end) = answer.split_once(' ').context("not an answer")?;
    let left = size - FIRST;
    ensure!(done.parse::<usize>()? == left, "{done} tasks were done instead of {left}");
    let micros = end.parse::<u64>()?.saturating_sub(start) as f64 / 1e3;
    add("task drained", micros, left, player::Receipt::of(&mut worker)?);
    Ok(())
}

/// Requests alone: the memory is the store's, and the time nobody's.
async fn bucket(size: usize, chart: &mut Chart) -> Result<()> {
    let store = Store::memory();
    let queue = Queue::create(&store, "q", usual_settings(Kind::Memory)).await?;
    let (at, mut before) = (size as f64, store.usage());
    let mut used = || {
        let used = store.usage().since(&before).requests() as f64;
        before = store.usage();
        used
    };
    player::push(queue.clone(), size, 1, 1).await?;
    chart.point("push, bucket", Cost::Requests, at, used() / at);
    let task = queue.worker("first").next().await?.context("nothing to do")?;
    chart.point("first claim, bucket", Cost::Requests, at, used());
    let _ = task.ack().await?;
    used();
    let (done, _) = player::drain(&queue, 4).await?;
    ensure!(done == size - 1, "{done} tasks were done instead of {}", size - 1);
    chart.point("task drained, bucket", Cost::Requests, at, used() / done as f64);
    Ok(())
}
