//! Eight processes increment a number in one JSON file, each time under a lock: how long 2,000
//! increments take, and how evenly they are shared.

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Seek as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use leasehold::Durability;
use leasehold::lock::LockSettings;
use leasehold::scratchpad::Scratchpad;
use leasehold::store::Kind;
use serde_json::json;

use crate::report::{Report, Row, Unit};
use crate::rig::{BODY, Rig};
use crate::stats::Pairs;

const PROCESSES: usize = 8;
const TOTAL: u64 = 2000;
const FLOOR: &str =
    "8 processes: O_EXCL lock file with a random pause of at most 0.8 ms, file rewritten in place";

/// One of the eight.
#[derive(clap::Args)]
pub struct Options {
    dir: PathBuf,
    #[arg(long)]
    bare: bool,
}

pub fn run(rig: &Rig, report: &mut Report) -> Result<()> {
    let arena = rig.arena("contended")?;
    let (ours, floor) = (arena.store_path(), arena.floor_path());
    std::fs::create_dir_all(&ours)?;
    let mut shares = Vec::new();
    let pairs = Pairs::measure(
        rig.pairs(),
        || {
            arena.settle()?;
            let (millis, share) = race(&ours, false)?;
            shares.push(share);
            Ok(millis)
        },
        || {
            arena.settle()?;
            Ok(race(&floor, true)?.0)
        },
    )?;
    report.add(Row::new("2,000 locked increments, 8 processes", Unit::Millis, pairs, FLOOR));
    shares.sort_by(f64::total_cmp);
    let (least, middle) = (shares[0], shares[shares.len() / 2]);
    report.fact(
        "fairness of the increments: smallest share / largest",
        format!("{middle:.2} median, {least:.2} at worst (target 0.5)"),
    );
    arena.clear()
}

/// How long it takes, and the smallest share by the largest.
fn race(dir: &Path, bare: bool) -> Result<(f64, f64)> {
    std::fs::write(dir.join("counter.json"), "{\"counter\":0}\n")?;
    let start = Instant::now();
    let mut children = Vec::new();
    for _ in 0..PROCESSES {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("contended-child").arg(dir).stdout(Stdio::piped());
        if bare {
            command.arg("--bare");
        }
        children.push(command.spawn()?);
    }
    let mut shares = Vec::new();
    for child in children {
        let done = child.wait_with_output()?;
        ensure!(done.status.success(), "a process of the benchmark failed");
        shares.push(String::from_utf8(done.stdout)?.trim().parse::<f64>()?);
    }
    let millis = start.elapsed().as_secs_f64() * 1000.0;
    let text = std::fs::read_to_string(dir.join("counter.json"))?;
    let value: serde_json::Value = serde_json::from_str(&text)?;
    ensure!(value["counter"] == TOTAL, "increments were lost: {text}");
    ensure!(shares.iter().sum::<f64>() == TOTAL as f64, "shares do not add up: {shares:?}");
    let smallest = shares.iter().copied().fold(f64::MAX, f64::min);
    let largest = shares.iter().copied().fold(0.0, f64::max);
    Ok((millis, smallest / largest))
}

pub fn child(options: &Options) -> Result<()> {
    let done = match options.bare {
        true => bare(&options.dir)?,
        false => ours(&options.dir)?,
    };
    println!("{done}");
    Ok(())
}

fn ours(dir: &Path) -> Result<u64> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let settings = LockSettings {
            timeout: Duration::from_secs(60),
            attempts: 30,
            ..LockSettings::of(Kind::Directory)
        };
        // As the peers: a lock, and no fsync.
        let pad =
            Scratchpad::open(dir)?.with_settings(settings).with_durability(Durability::Volatile);
        let mut done = 0;
        loop {
            let mut file = pad.lock("counter.json").await?;
            let value: serde_json::Value = file.read().await?.context("no counter")?;
            let count = value["counter"].as_u64().context("not a counter")?;
            if count < TOTAL {
                file.write(&json!({ "counter": count + 1 })).await?;
                done += 1;
            }
            file.release().await?;
            if count >= TOTAL {
                return Ok(done);
            }
        }
    })
}

fn bare(dir: &Path) -> Result<u64> {
    let (lock, counter) = (dir.join("counter.lock"), dir.join("counter.json"));
    let mut done = 0;
    let mut random = u64::from(std::process::id()) | 1;
    loop {
        let mut tries = 0;
        loop {
            match File::create_new(&lock) {
                Ok(mut file) => {
                    file.write_all(BODY)?;
                    break;
                }
                Err(_) => {
                    random ^= random << 13;
                    random ^= random >> 7;
                    random ^= random << 17;
                    let most = 50 << u64::min(tries, 4);
                    tries += 1;
                    std::thread::sleep(Duration::from_micros(random % most + 5));
                }
            }
        }
        let mut file = OpenOptions::new().read(true).write(true).open(&counter)?;
        let mut text = String::new();
        file.read_to_string(&mut text)?;
        let value: serde_json::Value = serde_json::from_str(&text)?;
        let count = value["counter"].as_u64().context("not a counter")?;
        if count < TOTAL {
            let text = format!("{{\"counter\":{}}}\n", count + 1);
            file.rewind()?;
            file.write_all(text.as_bytes())?;
            file.set_len(text.len() as u64)?;
            done += 1;
        }
        std::fs::remove_file(&lock)?;
        if count >= TOTAL {
            return Ok(done);
        }
    }
}
