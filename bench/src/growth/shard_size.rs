//! One shard that is ever larger.

use anyhow::Result;

use super::{left_out, records, settle, sizes};
use crate::chart::{Bound, Chart};
use crate::index::data;
use crate::report::Report;
use crate::rig::Rig;

/// In MB.
const SIZES: [usize; 6] = [1, 4, 16, 64, 256, 1_024];

pub fn run(rig: &Rig, report: &mut Report) -> Result<()> {
    let runtime = rig.runtime()?;
    let mut chart =
        Chart::new("growth-shard-size", "One shard that is ever larger", "MiB of the shard");
    // From memory, then from the file: it jumps, and stays below this.
    records::curves(&mut chart, Bound::Value(1_000.0));
    for size in sizes(rig, &SIZES) {
        eprintln!("  a shard of {size} MiB");
        let path = rig.path().join("growth-shard");
        let store = data::open(&path)?;
        let records = runtime.block_on(async {
            let index = data::create_one_shard(&store, "large").await?;
            let records = data::fill_one_shard(&index, size << 20).await?;
            index.compact().await?.into_result()?;
            anyhow::Ok(records)
        })?;
        settle(&path)?;
        let keys: Vec<String> =
            data::one_shard_keys()?.step_by((records / 60).max(1) as usize).take(50).collect();
        let row = |key: &String| format!("{key}\u{1f}new");
        let rows = data::one_shard_keys()?.take(1_000.min(records as usize)).collect::<Vec<_>>();
        let rows = rows.iter().map(row).collect();
        records::measure(&mut chart, &path, "large", size as f64, keys, rows)?;
        std::fs::remove_dir_all(&path)?;
    }
    chart.note(
        "In a directory; records of 900 bytes; a compaction takes in 1,000, put one by one. A shard that is too \
         large for the cache is searched in its file, warm or cold.",
    );
    left_out(rig, &SIZES, &mut chart);
    report.chart(chart);
    Ok(())
}
