//! Takes an inbox of 100,000 updates into 1,000,000 records.

use std::path::Path;
use std::time::Instant;

use anyhow::{Result, ensure};
use leasehold::index::Outcome;
use tokio::runtime::Runtime;

use super::data::{self, Size};
use super::floor;
use crate::report::{Report, Row, Target, Unit};
use crate::rig::Rig;
use crate::stats::Pairs;

pub type Fill = fn(&Path, Size) -> Result<()>;

/// One object per record.
pub fn files(rig: &Rig, report: &mut Report) -> Result<()> {
    both(rig, report, "100,000 single files", data::fill_files, 0.667)
}

/// One object per shard.
pub fn batches(rig: &Rig, report: &mut Report) -> Result<()> {
    both(rig, report, "batches", data::fill_batches, 0.5)
}

fn both(rig: &Rig, report: &mut Report, what: &str, fill: Fill, target: f64) -> Result<()> {
    let runtime = rig.runtime()?;
    let base = data::base(rig, &runtime)?;
    for durable in [false, true] {
        let pairs = Pairs::measure(
            rig.pick(3, 2),
            || ours(rig, &runtime, &base, fill),
            || bare(rig, &base, fill, durable),
        )?;
        let (name, floor) = match durable {
            false => (format!("merge, {what}"), "the bare loop, nothing flushed"),
            true => {
                (format!("merge, {what}, flushed floor"), "the bare loop, shards flushed by syncfs")
            }
        };
        let row = Row::new(name, Unit::Millis, pairs, floor).target(Target::Ratio(target));
        report.add(row.note("ours is durable, locked and conditional in both rows"));
    }
    Ok(())
}

fn settle(path: &Path) -> Result<()> {
    Ok(rustix::fs::syncfs(std::fs::File::open(path)?)?)
}

pub fn ours(rig: &Rig, runtime: &Runtime, base: &Path, fill: Fill) -> Result<f64> {
    let path = rig.path().join("ours");
    data::linked(base, &path)?;
    fill(&path, data::size(rig))?;
    settle(&path)?;
    let index = data::open_index(runtime, &path)?;
    let start = Instant::now();
    let pass =
        runtime.block_on(async { tokio::spawn(async move { index.compact().await }).await })??;
    let millis = start.elapsed().as_secs_f64() * 1000.0;
    ensure!(pass.records() == data::size(rig).updates);
    ensure!(pass.shards.iter().all(|done| done.outcome == Outcome::Published));
    Ok(millis)
}

fn bare(rig: &Rig, base: &Path, fill: Fill, durable: bool) -> Result<f64> {
    let path = rig.path().join("floor");
    data::linked(base, &path)?;
    fill(&path, data::size(rig))?;
    settle(&path)?;
    let start = Instant::now();
    floor::merge(&data::folder(&path), durable)?;
    let millis = start.elapsed().as_secs_f64() * 1000.0;
    let shard = "shards/5e.usv";
    let (ours, theirs) = (rig.path().join("ours"), path);
    let read = |path: &Path| std::fs::read(data::folder(path).join(shard));
    ensure!(read(&ours)? == read(&theirs)?, "the floor merged something else");
    Ok(millis)
}
