//! Lists folders with many objects: keys per second, time to the first page, and memory.

pub mod child;

use std::fs::{self, File};
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use leasehold::{List, Store};
use tokio::runtime::Runtime;

use self::child::How;
use crate::report::{Report, Row, Target, Unit};
use crate::rig::{Arena, Rig};
use crate::stats::Pairs;

/// Keys on a page, as many as S3 gives.
const PAGE: usize = 1000;

/// How many names one file gets: ext4 allows 65,000.
const LINKS: usize = 30_000;

pub fn run(rig: &Rig, report: &mut Report) -> Result<()> {
    let arena = rig.arena("listing")?;
    let runtime = rig.runtime()?;
    runtime.block_on(arena.store.init())?;
    fs::create_dir(arena.store_path().join("none"))?;

    let many = 100_000;
    fill(&arena, "many", many)?;
    report.add(whole(rig, &runtime, &arena, many)?.target(Target::Rate(500_000.0)));
    let empty = child::spawn(&arena.store_path(), "none", How::Pages)?.peak_kib;
    for (name, how) in [
        ("memory, listing 100,000 keys by pages", How::Pages),
        ("memory, bare readdir + sort of 100,000", How::BareSorted),
    ] {
        report.fact(name, memory(&arena, "many", how, empty)?);
    }

    let most = rig.pick(1_000_000, 100_000);
    if most != many {
        fill(&arena, "most", most)?;
    }
    let folder = if most == many { "many" } else { "most" };
    let of = if most == many { "100,000" } else { "1,000,000" };
    for (order, how, bare, floor_is) in [
        (
            "ordered",
            How::FirstPage,
            How::BareFirstPage,
            "readdir all, select and sort the first 1,000",
        ),
        ("unordered", How::AnyPage, How::BareAnyPage, "readdir of 1,000 names"),
    ] {
        let pairs = Pairs::measure(
            rig.pairs(),
            || millis(|| how.list(&runtime, &arena.store, &arena.store_path(), folder), PAGE),
            || millis(|| bare.list(&runtime, &arena.store, &arena.store_path(), folder), PAGE),
        )?;
        report.add(Row::new(format!("first page of {of}, {order}"), Unit::Millis, pairs, floor_is));
        report.fact(
            format!("memory, first page of {of}, {order}"),
            memory(&arena, folder, how, empty)?,
        );
    }
    report.fact(
        format!("memory, bare first page of {of}, ordered"),
        memory(&arena, folder, How::BareFirstPage, empty)?,
    );
    arena.clear()
}

/// All keys of the folder.
fn whole(rig: &Rig, runtime: &Runtime, arena: &Arena, keys: usize) -> Result<Row> {
    let per_second = |how: How| -> Result<f64> {
        let list = || how.list(runtime, &arena.store, &arena.store_path(), "many");
        Ok(keys as f64 / millis(list, keys)? * 1e3)
    };
    let pairs =
        Pairs::measure(rig.pairs(), || per_second(How::Pages), || per_second(How::BareSorted))?;
    let floor_is = "std's read_dir, collect the names, sort";
    Ok(Row::new("keys listed, of 100,000, ordered", Unit::Rate, pairs, floor_is))
}

/// How long it takes to list this many.
fn millis(list: impl FnOnce() -> Result<usize>, keys: usize) -> Result<f64> {
    let start = Instant::now();
    let listed = list()?;
    let millis = start.elapsed().as_secs_f64() * 1e3;
    ensure!(listed == keys, "{listed} keys listed instead of {keys}");
    Ok(millis)
}

/// The peak memory of a process that does nothing else, and what of it is due to the listing.
fn memory(arena: &Arena, folder: &str, how: How, empty: u64) -> Result<String> {
    let peak = child::spawn(&arena.store_path(), folder, how)?.peak_kib;
    let mib = |kib: u64| kib as f64 / 1024.0;
    Ok(format!(
        "{:.1} MiB at most, {:.1} more than listing nothing",
        mib(peak),
        mib(peak.saturating_sub(empty))
    ))
}

/// Fills a folder of the store. Listings of keys only look at names, so a few files with many
/// names each do, in a quarter of the time of as many files.
fn fill(arena: &Arena, name: &str, keys: usize) -> Result<()> {
    let folder = arena.store_path().join(name);
    fs::create_dir(&folder)?;
    let mut file = Path::new("").to_owned();
    for n in 0..keys {
        let path = folder.join(format!("task-{:016x}.json", scrambled(n as u64)));
        if n % LINKS == 0 {
            File::create_new(&path)?;
            file = path;
        } else {
            fs::hard_link(&file, &path).with_context(|| format!("object {n} of {keys}"))?;
        }
    }
    arena.settle()
}

/// A different number for each, in no order (the end of SplitMix64).
fn scrambled(n: u64) -> u64 {
    let n = n.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let n = (n ^ (n >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let n = (n ^ (n >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    n ^ (n >> 31)
}

/// Lists page by page and drops each page, as callers do; at most `limit` keys.
async fn by_pages(store: &Store, list: List) -> Result<usize> {
    let mut listing = store.list(list);
    let mut keys = 0;
    while let Some(page) = listing.next_page().await? {
        keys += std::hint::black_box(page).len();
    }
    Ok(keys)
}
