//! An index of ever more records.

use std::path::Path;

use anyhow::Result;

use super::index_child::Work;
use super::{left_out, settle, sizes};
use crate::chart::{Bound, Chart, Cost, FLAT, LINEAR, LOGARITHMIC};
use crate::index::data;
use crate::report::Report;
use crate::rig::Rig;

const SIZES: [usize; 6] = [30_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000];
/// How many records a compaction takes in.
const UPDATES: u64 = 1_000;

pub fn run(rig: &Rig, report: &mut Report) -> Result<()> {
    let runtime = rig.runtime()?;
    let mut chart = Chart::new("growth-records", "An index of many records", "records");
    curves(&mut chart, LOGARITHMIC);
    for size in sizes(rig, &SIZES) {
        eprintln!("  {size} records");
        let store = rig.path().join("growth-records");
        data::build(&runtime, &store, size as u64)?;
        settle(&store)?;
        let keys = (0..50).map(|n| data::domain(n * 7919 % size as u64)).collect();
        let row = |n: u64| data::update(n * (size as u64 / UPDATES)).trim_end().to_owned();
        measure(
            &mut chart,
            &store,
            data::NAME,
            size as f64,
            keys,
            (0..UPDATES).map(row).collect(),
        )?;
        std::fs::remove_dir_all(&store)?;
    }
    chart.note(format!(
        "In a directory, flat inbox on. A compaction takes in {UPDATES} records of all shards, so it \
         rewrites all of them: its time is bound to be linear, its memory has a limit."
    ));
    left_out(rig, &SIZES, &mut chart);
    report.chart(chart);
    Ok(())
}

/// What may grow with the number of records, and what may not.
pub fn curves(chart: &mut Chart, warm_lookup: Bound) {
    for cost in [Cost::Time, Cost::Requests, Cost::Memory] {
        let (warm, cold, compact) = match cost {
            Cost::Time => (warm_lookup, LOGARITHMIC, LINEAR),
            // What is kept of shards, up to the cache's limit; the compilers' own limit.
            Cost::Memory => (Bound::Value(300.0), FLAT, Bound::Value(64.0)),
            _ => (FLAT, FLAT, FLAT),
        };
        chart.curve("lookup, warm", cost, warm);
        chart.curve("lookup, cold", cost, cold);
        chart.curve("put", cost, FLAT);
        chart.curve("compact", cost, compact);
    }
}

/// Adds the points of this size: lookups of these keys, and puts of these rows, which are then
/// compacted.
pub fn measure(
    chart: &mut Chart,
    store: &Path,
    index: &str,
    size: f64,
    keys: Vec<String>,
    rows: Vec<String>,
) -> Result<()> {
    for (name, work, lines) in [
        ("lookup, warm", Work::LookupWarm, &keys),
        ("lookup, cold", Work::LookupCold, &keys),
        ("put", Work::Put, &rows),
        ("compact", Work::Compact, &Vec::new()),
    ] {
        let took = work.measure(store, index, lines)?;
        chart.point(name, Cost::Time, size, took.micros);
        chart.point(name, Cost::Requests, size, took.requests);
        chart.point(name, Cost::Memory, size, took.mib);
    }
    Ok(())
}
