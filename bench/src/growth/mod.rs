//! How costs grow: pending tasks, records of an index, workers, the size of a shard.
//!
//! Time, requests and memory per operation at each size, the exponent of the power law through
//! them (see [`chart`](crate::chart)), and with `--plots docs` a picture. An operation that should
//! cost the same at any size has 0 as its bound; what has to touch everything, 1.
//!
//! Requests are counted in a directory and, where that differs, in a store in memory that has S3's
//! rules: there the counts are those of a bucket.

mod index_child;
mod pending;
mod records;
mod shard_size;
mod workers;

pub use index_child::{Options as ChildOptions, run as child};

use std::fs::File;
use std::path::Path;
use std::time::Duration;

use anyhow::Result;

use crate::chart::Chart;
use crate::report::thousands;
use crate::rig::Rig;
use crate::suite::Bench;

/// All of them.
pub const BENCHES: &[Bench] = &[
    Bench { name: "pending", run: pending::run },
    Bench { name: "workers", run: workers::run },
    Bench { name: "records", run: records::run },
    Bench { name: "shard-size", run: shard_size::run },
];

/// Those of these sizes that there is time for; the last step is for large runs alone, and the two before
/// it for those that need not be quick.
fn sizes(rig: &Rig, all: &[usize]) -> Vec<usize> {
    let most = match (rig.large(), rig.quick()) {
        (true, _) => all.len(),
        (false, false) => all.len() - 1,
        (false, true) => all.len() - 3,
    };
    all[..most].to_vec()
}

/// Says what was left out, if anything was.
fn left_out(rig: &Rig, all: &[usize], chart: &mut Chart) {
    let left = &all[sizes(rig, all).len()..];
    if !left.is_empty() {
        let words: Vec<String> = left.iter().map(|size| thousands(*size as f64)).collect();
        chart.note(format!("Not run: {} (--large runs them).", words.join(", ")));
    }
}

/// Waits until what was made is on disk, and until it is not of the last seconds any more: what is would be
/// looked at more closely.
fn settle(folder: &Path) -> Result<()> {
    rustix::fs::syncfs(File::open(folder)?)?;
    std::thread::sleep(Duration::from_secs(3));
    Ok(())
}
