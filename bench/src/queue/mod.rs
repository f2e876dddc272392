//! The queue: in a directory by 1, 4 and 16 worker processes, durable and not, in bundles, on a
//! bucket, and with a great many tasks pending; beside the bare loop that does the same and, with
//! `--peers`, beside what users would pick instead.

mod bucket;
mod bundles;
mod cost;
mod directory;
mod discovery;
mod durable;
pub mod floor;
mod latency;
pub mod ours;
pub mod player;

use std::path::Path;

use anyhow::{Result, bail, ensure};

use crate::peers::{Contender, Player};
use crate::rig::Rig;
use crate::stats::Pairs;
use crate::suite::Bench;

/// All of them.
pub const BENCHES: &[Bench] = &[
    Bench { name: "plain", run: directory::without_receipts },
    Bench { name: "receipts", run: directory::with_receipts },
    Bench { name: "durable-1", run: durable::by_1 },
    Bench { name: "durable-4", run: durable::by_4 },
    Bench { name: "durable-16", run: durable::by_16 },
    Bench { name: "bundles", run: bundles::run },
    Bench { name: "bucket", run: bucket::run },
    Bench { name: "discovery", run: discovery::run },
    Bench { name: "latency", run: latency::run },
    Bench { name: "cost", run: cost::run },
];

/// How many worker processes.
const WORKERS: [usize; 3] = [1, 4, 16];

/// The payload of a task: 200 bytes, quotes included.
fn payload() -> String {
    "x".repeat(198)
}

/// Tasks per second.
#[derive(Debug, Clone, Copy)]
pub struct Speed {
    pub push: f64,
    pub drain: f64,
}

/// What one contestant gave, round by round.
#[derive(Debug, Clone, Default)]
struct Runs {
    push: Vec<f64>,
    drain: Vec<f64>,
}

impl Runs {
    /// Ours beside another's: pushed, drained.
    fn beside(&self, other: &Self) -> (Pairs, Pairs) {
        (
            Pairs { ours: self.push.clone(), floor: other.push.clone() },
            Pairs { ours: self.drain.clone(), floor: other.drain.clone() },
        )
    }
}

/// How many pairs to measure: a run of a queue takes seconds.
fn pairs(rig: &Rig) -> usize {
    rig.pick(5, 3)
}

/// What each contestant gives, round by round, after one round that does not count.
fn contest(
    rounds: usize,
    count: usize,
    mut run: impl FnMut(usize) -> Result<Speed>,
) -> Result<Vec<Runs>> {
    let mut runs = vec![Runs::default(); count];
    for round in 0..=rounds {
        for (at, runs) in runs.iter_mut().enumerate() {
            let Speed { push, drain } = run(at)?;
            if round > 0 {
                runs.push.push(push);
                runs.drain.push(drain);
            }
        }
    }
    Ok(runs)
}

/// Pushes by the first of these processes and drains by all.
pub fn race(players: &mut [Player], command: &str, tasks: usize) -> Result<Speed> {
    let push = push(players, command, tasks)?;
    Ok(Speed { push, drain: drain(players, tasks)? })
}

/// Tasks per second, pushed by the first of these processes. Ends with its answer.
fn push(players: &mut [Player], command: &str, tasks: usize) -> Result<f64> {
    let [first, ..] = players else { bail!("nobody to push") };
    let start = monotonic();
    ensure!(first.ask(command)? == tasks as f64, "not all tasks were pushed");
    Ok(per_second(tasks, start, monotonic()))
}

/// Tasks per second, drained by all of them. Ends with the last ack of anybody, not with finding
/// out that there is nothing left.
fn drain(players: &mut [Player], tasks: usize) -> Result<f64> {
    let start = monotonic();
    for player in &mut *players {
        player.tell("drain")?;
    }
    let (mut done, mut end) = (0, start);
    for player in players {
        let answer = player.hear()?;
        let Some((count, last)) = answer.split_once(' ') else { bail!("heard {answer:?}") };
        done += count.parse::<usize>()?;
        end = end.max(last.parse()?);
    }
    ensure!(done == tasks, "{done} tasks were done instead of {tasks}");
    Ok(per_second(tasks, start, end))
}

/// What a peer does, all of it durable or none, with this many worker processes.
fn theirs(peer: &Contender<'_>, folder: &Path, tasks: usize, workers: usize) -> Result<Speed> {
    let mut players = Vec::new();
    for _ in 0..workers {
        players.push(peer.player(folder)?);
    }
    players[0].ask("reset")?;
    race(&mut players, &format!("push {tasks}"), tasks)
}

pub fn per_second(tasks: usize, start: u64, end: u64) -> f64 {
    tasks as f64 * 1e9 / end.saturating_sub(start).max(1) as f64
}

/// Nanoseconds of a clock that all processes of this machine share.
pub fn monotonic() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}
