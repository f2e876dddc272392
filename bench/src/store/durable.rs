//! Durable writes by 16 tasks, which share their flushes, against one writer that flushes each.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::Result;
use bytes::Bytes;
use leasehold::{Durability, Key, Store};
use rustix::fs::Mode;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

use super::{create, floor, stored};
use crate::report::{Report, Row, Target, Unit};
use crate::rig::{Arena, BODY, Rig};
use crate::stats::{Pairs, rate};

const TASKS: usize = 16;
const FLOOR: &str =
    "create temporary, write, fsync, rename, fsync the folder, one object after the other";

pub fn run(rig: &Rig, report: &mut Report) -> Result<()> {
    let arena = rig.arena("durable")?;
    let runtime = rig.runtime()?;
    let window = rig.pick(Duration::from_millis(1500), Duration::from_millis(400));
    // A new folder per run instead of deleting in between: see `Host` about deletes.
    let (mut our_run, mut bare_run) = (0, 0);
    let pairs = Pairs::measure(
        rig.pairs(),
        || {
            our_run += 1;
            arena.settle()?;
            ours(&runtime, &arena.store, our_run, window)
        },
        || {
            bare_run += 1;
            arena.settle()?;
            bare(&arena, bare_run, window)
        },
    )?;
    let row = Row::new(format!("durable puts, {TASKS} tasks"), Unit::Rate, pairs, FLOOR);
    report.add(row.target(Target::Ratio(5.0)));
    arena.clear()
}

fn ours(runtime: &Runtime, store: &Store, run: u32, window: Duration) -> Result<f64> {
    let next = Arc::new(AtomicU64::new(0));
    runtime.block_on(async {
        store.init().await?;
        let start = Instant::now();
        let mut tasks = JoinSet::new();
        for _ in 0..TASKS {
            let (store, next) = (store.clone(), next.clone());
            tasks.spawn(async move {
                while start.elapsed() < window {
                    let n = next.fetch_add(1, Relaxed);
                    let key = Key::new(format!("data-{run}/{n:08}.json"))?;
                    let body = Bytes::from_static(BODY);
                    stored(store.put(&key, body, create(Durability::Durable)).await?)?;
                }
                anyhow::Ok(())
            });
        }
        while let Some(task) = tasks.join_next().await {
            task??;
        }
        Ok(next.load(Relaxed) as f64 / start.elapsed().as_secs_f64())
    })
}

fn bare(arena: &Arena, run: u32, window: Duration) -> Result<f64> {
    let folder = format!("data-{run}");
    rustix::fs::mkdirat(&arena.floor, &folder, Mode::from_raw_mode(0o777))?;
    let data = floor::open_folder(&arena.floor, &folder)?;
    let mut next = 0_u64;
    rate(window, || {
        next += 1;
        let file = floor::write_new(&arena.floor, "tmp/new", BODY)?;
        rustix::fs::fsync(&file)?;
        drop(file);
        floor::rename(&arena.floor, "tmp/new", &format!("{folder}/{next:08}.json"))?;
        Ok(rustix::fs::fsync(&data)?)
    })
}
