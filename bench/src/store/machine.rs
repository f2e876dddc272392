//! What this machine can do at best: the context of every other figure.

use std::fs::File;
use std::io::Write as _;
use std::time::Instant;

use anyhow::Result;

use super::floor;
use crate::report::{Report, thousands};
use crate::rig::{BODY, Rig};
use crate::stats::{median, percentile, rate};

pub fn run(rig: &Rig, report: &mut Report) -> Result<()> {
    let arena = rig.arena("machine")?;
    report.fact("memcpy, 1 thread", format!("{} MiB/s", thousands(memcpy(rig.pick(256, 64)))));

    let mut file = File::create(arena.floor_path().join("data/log"))?;
    let block = [7; 4096];
    let mut millis = Vec::new();
    rate(rig.window(), || {
        let start = Instant::now();
        file.write_all(&block)?;
        file.sync_all()?;
        millis.push(start.elapsed().as_secs_f64() * 1e3);
        Ok(())
    })?;
    report.fact(
        "append 4 KiB + fsync",
        format!("{:.2} ms median, {:.2} ms p99", median(&millis), percentile(&millis, 0.99)),
    );

    arena.settle()?;
    let files = rig.pick(20_000, 5_000);
    let names: Vec<String> = (0..files).map(|n| format!("data/{n:06}")).collect();
    let per_second = |start: Instant| thousands(files as f64 / start.elapsed().as_secs_f64());
    let start = Instant::now();
    for name in &names {
        floor::write_new(&arena.floor, name, BODY)?;
    }
    report.fact("small files created", format!("{}/s", per_second(start)));
    let start = Instant::now();
    for name in &names {
        floor::remove(&arena.floor, name)?;
    }
    report.fact("small files removed", format!("{}/s", per_second(start)));
    arena.clear()
}

/// MiB per second.
fn memcpy(mib: usize) -> f64 {
    let from = vec![1_u8; mib << 20];
    let mut to = vec![2_u8; mib << 20];
    let runs: Vec<f64> = (0..5)
        .map(|_| {
            let start = Instant::now();
            to.copy_from_slice(std::hint::black_box(&from));
            std::hint::black_box(&to);
            mib as f64 / start.elapsed().as_secs_f64()
        })
        .collect();
    median(&runs)
}
