//! The first task of a queue with a great many pending: how long, how many LISTs, how much memory.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use leasehold::queue::Queue;

use super::ours::{open, player};
use super::payload;
use super::player::Receipt;
use crate::report::{Report, thousands};
use crate::rig::Rig;
use crate::stats::median;

/// How many names one file gets: ext4 allows 65,000.
const LINKS: usize = 30_000;

pub fn run(rig: &Rig, report: &mut Report) -> Result<()> {
    let arena = rig.arena("queue-discovery")?;
    let runtime = rig.runtime()?;
    let most = match rig.large() {
        true => 1_000_000,
        false => rig.pick(100_000, 20_000),
    };
    let store = open(&arena.store_path())?;
    let mut idle = 0.0;
    for (name, tasks) in [("one", 1), ("most", most)] {
        runtime.block_on(Queue::create(
            &store,
            name,
            leasehold::queue::usual_settings(store.kind()),
        ))?;
        fill(&arena.store_path().join(format!("queues/{name}/pending")), tasks)?;
        arena.settle()?;
        let (mut millis, mut lists, mut memory) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..rig.pairs() {
            let mut player = player(&arena.store_path(), name, 1)?;
            millis.push(player.ask("first back")?);
            let receipt = Receipt::of(&mut player)?;
            lists.push(receipt.usage.list as f64);
            memory.push(receipt.mib());
        }
        if tasks == 1 {
            idle = median(&memory);
            continue;
        }
        let least = lists.iter().copied().fold(0.0, f64::max);
        report.fact(
            format!("first claim of {} pending", thousands(tasks as f64)),
            format!(
                "{:.1} ms median, {:.1} at worst; {least} LISTs (target 3{})",
                median(&millis),
                millis.iter().copied().fold(0.0, f64::max),
                if least > 3.0 { ", MISSED" } else { "" }
            ),
        );
        report.fact(
            format!("memory, first claim of {} pending", thousands(tasks as f64)),
            format!(
                "{:.1} MiB at most, {:.1} more than with one pending",
                median(&memory),
                median(&memory) - idle
            ),
        );
    }
    arena.clear()
}

/// Fills a queue as seed clients do: folders with a task in each. A few files with many names do.
fn fill(pending: &Path, tasks: usize) -> Result<()> {
    fs::create_dir_all(pending)?;
    let mut file = pending.to_owned();
    for n in 0..tasks {
        // As generated ids: they sort by time.
        let folder = pending.join(format!("01K9ZZZZ{n:018}"));
        fs::create_dir(&folder)?;
        let path = folder.join("task.json");
        if n % LINKS == 0 {
            fs::write(&path, format!("{{\"payload\":\"{}\"}}\n", payload()))?;
            file = path;
        } else {
            fs::hard_link(&file, &path).with_context(|| format!("task {n} of {tasks}"))?;
        }
    }
    Ok(())
}
