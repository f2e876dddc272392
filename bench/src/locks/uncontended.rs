//! Takes and releases one lock over and over.

use anyhow::Result;

use super::contestants;
use crate::report::{Report, Row, Target, Unit};
use crate::rig::Rig;
use crate::stats::{Pairs, rounds};

const FLOOR: &str =
    "create temporary (O_EXCL), write, close, link, unlink temporary, unlink; one thread";

pub fn run(rig: &Rig, report: &mut Report) -> Result<()> {
    let arena = rig.arena("uncontended")?;
    let all = contestants(rig, report, arena.path(), &["ours", "ours-two-workers", "bare"])?;
    let mut players = Vec::new();
    for contestant in &all {
        players.push(contestant.player()?);
    }
    let what = format!("rate {}", rig.window().as_secs_f64());
    let runs = rounds(rig.pairs(), players.len(), |at| {
        arena.settle()?;
        players[at].ask(&what)
    })?;
    let against =
        |ours: usize, other: usize| Pairs { ours: runs[ours].clone(), floor: runs[other].clone() };
    for (at, name) in ["lock + release, 1 thread", "lock + release, 2 workers"].iter().enumerate() {
        let row = Row::new(*name, Unit::Rate, against(at, 2), FLOOR);
        report.add(row.target(Target::Ratio(0.6)));
    }
    for (at, contestant) in all.iter().enumerate().skip(3) {
        let name = format!("lock + release / {}", contestant.name);
        let row = Row::new(name, Unit::Rate, against(0, at), "the same by this peer, one process");
        report.add(match contestant.name {
            name if name.contains("proper-lockfile") => row.target(Target::Ratio(5.0)),
            name if name.contains("SoftFileLock") => row.target(Target::Ratio(3.0)),
            _ => row,
        });
    }
    drop(players);
    arena.clear()
}
