//! What this machine can do at best: the context of every other figure.

mod http;

use std::fs::File;
use std::io::{PipeReader, PipeWriter, Read as _, Write as _};
use std::time::Instant;

use anyhow::Result;
use rustix::fs::{Mode, OFlags};

use crate::report::{Report, thousands};
use crate::rig::{BODY, Rig};
use crate::stats::{median, percentile, rate};
use crate::store::floor;
use crate::suite::Bench;

/// All of them.
pub const BENCHES: &[Bench] = &[
    Bench { name: "memory", run: memory },
    Bench { name: "calls", run: calls },
    Bench { name: "files", run: files },
    Bench { name: "http", run: bare_http },
];

fn memory(rig: &Rig, report: &mut Report) -> Result<()> {
    report.fact("memcpy, 1 thread", format!("{} MiB/s", thousands(memcpy(rig.pick(256, 64)))));
    Ok(())
}

/// The cheapest system call, one that looks up a name, and a hand-over to another thread and back.
fn calls(rig: &Rig, report: &mut Report) -> Result<()> {
    let calls = rate(rig.window(), || {
        for _ in 0..100 {
            std::hint::black_box(rustix::process::getppid());
        }
        Ok(())
    })?;
    report.fact("system calls (getppid), 1 thread", format!("{}/s", thousands(calls * 100.0)));
    let folder = rustix::fs::open(rig.path(), OFlags::DIRECTORY, Mode::empty())?;
    let opens = rate(rig.window(), || {
        drop(rustix::fs::openat(&folder, ".", OFlags::PATH, Mode::empty())?);
        Ok(())
    })?;
    report.fact("open + close, 1 thread", format!("{}/s", thousands(opens)));
    let ((to, from), (back, forth)) = (std::io::pipe()?, std::io::pipe()?);
    let echo = std::thread::spawn(move || echo(to, forth));
    let (mut from, mut back) = (from, back);
    let turns = rate(rig.window(), || {
        from.write_all(b"x")?;
        Ok(back.read_exact(&mut [0])?)
    })?;
    drop(from);
    let _ = echo.join();
    report.fact("wake-ups of another thread and back", format!("{}/s", thousands(turns)));
    Ok(())
}

fn echo(mut from: PipeReader, mut to: PipeWriter) -> std::io::Result<()> {
    let mut byte = [0];
    loop {
        from.read_exact(&mut byte)?;
        to.write_all(&byte)?;
    }
}

fn bare_http(rig: &Rig, report: &mut Report) -> Result<()> {
    let runtime = rig.runtime()?;
    for connections in [1, 16] {
        let rate = http::rate(&runtime, connections, rig.window())?;
        let name = format!("bare HTTP over loopback, {connections} connections");
        report.fact(name, format!("{}/s", thousands(rate)));
    }
    Ok(())
}

fn files(rig: &Rig, report: &mut Report) -> Result<()> {
    let arena = rig.arena("machine")?;
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
