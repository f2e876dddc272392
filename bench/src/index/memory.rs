//! How much memory a compiler takes: in a process of its own, because a peak only ever rises.

use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use leasehold::index::Index;
use tokio::runtime::Builder;

use super::data;
use crate::host::peak_memory;
use crate::report::Report;
use crate::rig::Rig;

/// What to compact.
#[derive(clap::Args)]
pub struct Options {
    store: PathBuf,
    index: String,
}

/// Compacts, and says how much memory that took.
pub fn child(options: &Options) -> Result<()> {
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let store = data::open(&options.store)?;
    runtime.block_on(async {
        let index = Index::open(&store, &options.index).await?;
        index.compact().await?;
        anyhow::Ok(())
    })?;
    println!("{}", peak_memory().context("the kernel does not tell VmHWM")?);
    Ok(())
}

fn measure(store: &std::path::Path, index: &str) -> Result<String> {
    let start = Instant::now();
    let output = Command::new(std::env::current_exe()?)
        .arg("compile-child")
        .arg(store)
        .arg(index)
        .output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let kib: u64 = String::from_utf8(output.stdout)?.trim().parse()?;
    let verdict = if kib <= 64 << 10 { "met" } else { "MISSED" };
    let seconds = start.elapsed().as_secs_f64();
    Ok(format!("{} MiB at most (target: 64), {verdict}; {seconds:.1} s", kib >> 10))
}

pub fn run(rig: &Rig, report: &mut Report) -> Result<()> {
    let runtime = rig.runtime()?;
    let base = data::base(rig, &runtime)?;
    let store = rig.path().join("memory");
    for (what, fill) in [
        ("memory, an inbox of single files", data::fill_files as fn(_, _) -> _),
        ("memory, an inbox of batches", data::fill_batches),
    ] {
        data::linked(&base, &store)?;
        fill(&store, data::size(rig))?;
        report.fact(what, measure(&store, data::NAME)?);
    }
    std::fs::remove_dir_all(&store)?;
    let rows = rig.pick(250_000, 80_000);
    runtime.block_on(async {
        let index = data::create_one_shard(&data::open(&store)?, "wide").await?;
        data::fill_all_shards(&index, rows).await
    })?;
    let what = format!("memory, first compactions of 16 shards with {rows} records of 1 kB");
    report.fact(what, measure(&store, "wide")?);
    std::fs::remove_dir_all(&store)?;
    let gigabyte = rig.pick(1 << 30, 128 << 20);
    let large = data::open(&store)?;
    runtime.block_on(async {
        let index = data::create_one_shard(&large, "large").await?;
        data::fill_one_shard(&index, gigabyte).await
    })?;
    let size = gigabyte >> 20;
    report.fact(format!("memory, a first shard of {size} MiB"), measure(&store, "large")?);
    runtime.block_on(async {
        let index = Index::open(&large, "large").await?;
        let mut batch = index.batch().await?;
        for key in data::one_shard_keys()?.take(1250) {
            batch.put_texts([key.as_str(), "new"])?;
        }
        batch.flush().await?;
        anyhow::Ok(())
    })?;
    report.fact(format!("memory, an update of a shard of {size} MiB"), measure(&store, "large")?);
    std::fs::remove_dir_all(&store)?;
    Ok(())
}
