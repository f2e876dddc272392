//! Eight processes increment a number in one JSON file, each time under a lock: how long 2,000
//! increments take, and how evenly they are shared.

use std::time::Instant;

use anyhow::{Result, ensure};

use super::{Contestant, contestants};
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
        let (millis, share) = race(&all[at])?;
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
fn race(contestant: &Contestant<'_>) -> Result<(f64, f64)> {
    let counter = contestant.folder.join("counter.json");
    std::fs::write(&counter, "{\"counter\":0}\n")?;
    let mut players = Vec::new();
    for _ in 0..PROCESSES {
        players.push(contestant.player()?);
    }
    let start = Instant::now();
    for player in &mut players {
        player.tell(&format!("count {TOTAL}"))?;
    }
    let mut shares = Vec::new();
    for player in &mut players {
        shares.push(player.hear()?.parse::<f64>()?);
    }
    let millis = start.elapsed().as_secs_f64() * 1000.0;
    let text = std::fs::read_to_string(&counter)?;
    let value: serde_json::Value = serde_json::from_str(&text)?;
    let name = contestant.name;
    ensure!(value["counter"].as_f64() == Some(TOTAL), "{name}: increments were lost: {text}");
    ensure!(shares.iter().sum::<f64>() == TOTAL, "{name}: shares do not add up: {shares:?}");
    let smallest = shares.iter().copied().fold(f64::MAX, f64::min);
    let largest = shares.iter().copied().fold(0.0, f64::max);
    Ok((millis, smallest / largest))
}
