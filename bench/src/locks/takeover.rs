//! How long after a kill -9 of its holder a lock is somebody else's, on the same host.

use std::time::{Duration, Instant};

use anyhow::Result;

use super::{Contestant, contestants};
use crate::report::{Report, Row, Unit};
use crate::rig::Rig;
use crate::stats::{Pairs, percentile, rounds};

pub fn run(rig: &Rig, report: &mut Report) -> Result<()> {
    let arena = rig.arena("takeover")?;
    let all = contestants(rig, report, arena.path(), &["ours"])?;
    let mut gaps = Vec::new();
    for _ in 0..rig.pick(40, 15) {
        gaps.push(take_over(&all[0])?);
    }
    let (middle, most) = (percentile(&gaps, 0.5), percentile(&gaps, 1.0));
    report.fact(
        "takeover after kill -9, same host",
        format!("{middle:.1} ms median, {most:.1} ms at most (target 20 ms)"),
    );
    if all.len() > 1 {
        // Some of them wait for ten seconds.
        let runs = rounds(rig.pick(2, 1), all.len(), |at| take_over(&all[at]))?;
        for (at, contestant) in all.iter().enumerate().skip(1) {
            let pairs = Pairs { ours: runs[0].clone(), floor: runs[at].clone() };
            let name = format!("takeover after kill -9 / {}", contestant.name);
            report.add(Row::new(name, Unit::Millis, pairs, "the same by this peer"));
        }
    }
    arena.clear()
}

/// From the kill to the successor's word that it has the lock, in milliseconds.
pub fn take_over(contestant: &Contestant<'_>) -> Result<f64> {
    let mut holder = contestant.player()?;
    holder.tell("take")?;
    holder.hear()?;
    let mut heir = contestant.player()?;
    heir.tell("take")?;
    // Until it has tried, and waits.
    std::thread::sleep(Duration::from_millis(200));
    let start = Instant::now();
    holder.kill()?;
    heir.hear()?;
    let gap = start.elapsed().as_secs_f64() * 1000.0;
    heir.tell("release")?;
    heir.hear()?;
    Ok(gap)
}
