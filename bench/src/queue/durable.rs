//! The same, durable: pushed tasks and receipts are on disk before anybody is told so.

use anyhow::Result;

use super::ours::{Ours, Plan};
use super::{contest, floor, pairs, race};
use crate::peers::{Peer, services};
use crate::report::{Report, Row, Target, Unit};
use crate::rig::Rig;

/// Many, so that they share flushes.
const LOOPS: usize = 32;
const PUSHERS: usize = 64;
const PUSH: &str = "create temporary (O_EXCL), write, fsync, rename; one thread";
const DRAIN: &str = "create lease (O_EXCL), read the task, write the lease, fsync, unlink both; a thread per worker";
const PEER: &str = "the same by this peer: one client pushes one task after the other, a process per \
    worker claims and acks one after the other, each a flush; ours has 64 pushes and 32 tasks per \
    process under way, and flushes receipts alone";

const PEERS: &[(Peer, f64)] = &[
    (Peer { name: "PostgreSQL SKIP LOCKED (psycopg)", runner: "queues.py", role: "postgres" }, 3.0),
    (Peer { name: "beanstalkd -f0 (greenstalk)", runner: "queues.py", role: "beanstalkd" }, 1.0),
];

pub fn by_1(rig: &Rig, report: &mut Report) -> Result<()> {
    rows(rig, report, 1)
}

pub fn by_4(rig: &Rig, report: &mut Report) -> Result<()> {
    rows(rig, report, 4)
}

pub fn by_16(rig: &Rig, report: &mut Report) -> Result<()> {
    rows(rig, report, 16)
}

fn rows(rig: &Rig, report: &mut Report, workers: usize) -> Result<()> {
    let arena = rig.arena(&format!("queue-durable-{workers}"))?;
    let mut ours = Ours::new(arena.store_path(), rig.runtime()?);
    let tasks = rig.pick(4000, 2000);
    let peers = rig.peers(&[services::postgres, services::beanstalkd])?;
    let count = 3 + if peers.is_some() { PEERS.len() } else { 0 };
    let plan = |receipts| Plan {
        tasks,
        workers,
        loops: LOOPS,
        pushers: PUSHERS,
        bundle: 1,
        receipts,
        durable: true,
    };
    let runs = contest(pairs(rig).min(3), count, |at| {
        arena.settle()?;
        match (at, peers) {
            (0, _) => ours.run(plan(true)),
            (1, _) => ours.run(plan(false)),
            (2, _) | (_, None) => floor::run(&arena.floor_path(), tasks, workers, true),
            (_, Some(peers)) => {
                let mut players = Vec::new();
                for _ in 0..workers {
                    players.push(peers.player(&PEERS[at - 3].0, arena.path())?);
                }
                players[0].ask("reset")?;
                race(&mut players, &format!("push {tasks}"), tasks)
            }
        }
    })?;
    for (ours, how) in runs[..2].iter().zip(["receipts", "no receipts"]) {
        let (push, drain) = ours.beside(&runs[2]);
        if workers == 1 {
            report.add(Row::new(format!("push, durable, {how}"), Unit::Rate, push, PUSH));
        }
        let name = format!("drain by {workers}, durable, {how}");
        report.add(Row::new(name, Unit::Rate, drain, DRAIN));
        for (theirs, (peer, target)) in runs[3..].iter().zip(PEERS) {
            let (push, drain) = ours.beside(theirs);
            let target = Target::Ratio(*target);
            if workers == 1 {
                let name = format!("push, durable, {how} / {}", peer.name);
                report.add(Row::new(name, Unit::Rate, push, PEER).target(target));
            }
            let name = format!("drain by {workers}, durable, {how} / {}", peer.name);
            report.add(Row::new(name, Unit::Rate, drain, PEER).target(target));
        }
    }
    arena.clear()
}
