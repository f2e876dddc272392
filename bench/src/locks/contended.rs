//! Eight processes increment a number in one JSON file, each time under a lock: how long 2,000
//! increments take, and how evenly they are shared.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use leasehold::{Key, Put, Store, Write};
use tokio::runtime::{Builder, Runtime};

use super::{Contestant, contestants};
use crate::bucket::Place;
use crate::report::{Report, Row, Target, Unit};
use crate::rig::Rig;
use crate::stats::{Pairs, median, rounds};

const PROCESSES: usize = 8;
const TOTAL: f64 = 2000.0;
const FLOOR: &str =
    "8 processes: O_EXCL lock file with a random pause of at most 0.8 ms, file rewritten in place";

pub fn run(rig: &Rig, report: &mut Report) -> Result<()> {
    let arena = rig.arena("contended")?;
    let all = contestants(rig, report, arena.path(), &["ours", "bare"])?;
    let mut shares = vec![Vec::new(); all.len()];
    let runs = rounds(rig.pairs(), all.len(), |at| {
        arena.settle()?;
        let (millis, share) = race(&all[at], PROCESSES, TOTAL)?;
        shares[at].push(share);
        Ok(millis)
    })?;
    for (at, contestant) in all.iter().enumerate().skip(1) {
        let pairs = Pairs { ours: runs[0].clone(), floor: runs[at].clone() };
        report.add(match at {
            1 => Row::new("2,000 locked increments, 8 processes", Unit::Millis, pairs, FLOOR),
            _ => {
                let name = format!("the same / {}", contestant.name);
                let is = "the same by this peer, file rewritten in place";
                Row::new(name, Unit::Millis, pairs, is).target(Target::Ratio(1.0))
            }
        });
    }
    for (contestant, shares) in all.iter().zip(&mut shares) {
        shares.sort_by(f64::total_cmp);
        let target = if contestant.name == "ours" { " (target 0.5)" } else { "" };
        report.fact(
            format!("fairness (smallest share / largest), {}", contestant.name),
            format!("{:.2} median, {:.2} at worst{target}", median(shares), shares[0]),
        );
    }
    arena.clear()
}

/// How long it takes, and the smallest share by the largest.
pub fn race(contestant: &Contestant<'_>, processes: usize, total: f64) -> Result<(f64, f64)> {
    let counter = Counter::new(&contestant.place)?;
    let mut players = Vec::new();
    for _ in 0..processes {
        players.push(contestant.player()?);
    }
    let start = Instant::now();
    for player in &mut players {
        player.tell(&format!("count {total}"))?;
    }
    let mut shares = Vec::new();
    for player in &mut players {
        shares.push(player.hear()?.parse::<f64>()?);
    }
    let millis = start.elapsed().as_secs_f64() * 1000.0;
    let text = counter.read()?;
    let value: serde_json::Value = serde_json::from_str(&text)?;
    let name = contestant.name;
    ensure!(value["counter"].as_f64() == Some(total), "{name}: increments were lost: {text}");
    ensure!(shares.iter().sum::<f64>() == total, "{name}: shares do not add up: {shares:?}");
    let smallest = shares.iter().copied().fold(f64::MAX, f64::min);
    let largest = shares.iter().copied().fold(0.0, f64::max);
    Ok((millis, smallest / largest))
}

/// The number that everybody increments.
enum Counter {
    File(PathBuf),
    Object(Runtime, Store),
}

impl Counter {
    const KEY: &str = "counter.json";
    const NONE: &str = "{\"counter\":0}\n";

    /// At zero.
    fn new(place: &Place) -> Result<Self> {
        match place {
            Place::Directory(folder) => {
                let path = folder.join(Self::KEY);
                std::fs::write(&path, Self::NONE)?;
                Ok(Self::File(path))
            }
            Place::Bucket { .. } => {
                let runtime = Builder::new_current_thread().enable_all().build()?;
                let store = place.open()?;
                let body = Bytes::from_static(Self::NONE.as_bytes());
                let key = Key::new(Self::KEY)?;
                let put = runtime.block_on(store.put(&key, body, Write::any()))?;
                ensure!(matches!(put, Put::Stored(_)), "no counter");
                Ok(Self::Object(runtime, store))
            }
        }
    }

    fn read(&self) -> Result<String> {
        match self {
            Self::File(path) => Ok(std::fs::read_to_string(path)?),
            Self::Object(runtime, store) => {
                let object = runtime.block_on(store.get(&Key::new(Self::KEY)?))?;
                let object = object.context("the counter is gone")?;
                Ok(String::from_utf8(object.body.to_vec())?)
            }
        }
    }
}
