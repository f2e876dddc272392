//! The same, durable: pushed tasks and receipts are on disk before anybody is told so.

use anyhow::Result;

use super::ours::{Ours, Plan};
use super::{contest, floor, pairs, theirs};
use crate::peers::{Contender, Peer, Server};
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

static PEERS: [Peer; 4] = [
    Peer {
        name: "PostgreSQL SKIP LOCKED (psycopg)",
        runner: "queues.py",
        role: "postgres",
        server: Some(Server::Postgres),
    },
    Peer {
        name: "beanstalkd -f0 (greenstalk)",
        runner: "queues.py",
        role: "beanstalkd",
        server: Some(Server::Beanstalkd),
    },
    Peer {
        name: "Redis list, AOF always (redis-py)",
        runner: "queues.py",
        role: "redis",
        server: Some(Server::DurableRedis),
    },
    Peer {
        name: "huey SqliteStorage 3.5.4, no ack",
        runner: "queues.py",
        role: "huey-sqlite",
        server: None,
    },
];

/// What we want to be, times this peer.
fn target(peer: &Peer) -> Option<f64> {
    match peer.role {
        "postgres" => Some(3.0),
        "beanstalkd" => Some(1.0),
        _ => None,
    }
}

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
    let peers = rig.peers(report, &PEERS.each_ref())?;
    let plan = |receipts| Plan {
        tasks,
        workers,
        loops: LOOPS,
        pushers: PUSHERS,
        bundle: 1,
        receipts,
        durable: true,
    };
    let runs = contest(pairs(rig).min(3), 3 + peers.len(), |at| {
        arena.settle()?;
        match at {
            0 => ours.run(plan(true)),
            1 => ours.run(plan(false)),
            2 => floor::run(&arena.floor_path(), tasks, workers, true),
            _ => theirs(&peers[at - 3], arena.path(), tasks, workers),
        }
    })?;
    for (ours, how) in runs[..2].iter().zip(["receipts", "no receipts"]) {
        let (push, drain) = ours.beside(&runs[2]);
        if workers == 1 {
            report.add(Row::new(format!("push, durable, {how}"), Unit::Rate, push, PUSH));
        }
        let name = format!("drain by {workers}, durable, {how}");
        report.add(Row::new(name, Unit::Rate, drain, DRAIN));
        for (theirs, Contender { peer, .. }) in runs[3..].iter().zip(&peers) {
            let (push, drain) = ours.beside(theirs);
            let aimed = |row: Row| match target(peer) {
                Some(target) => row.target(Target::Ratio(target)),
                None => row,
            };
            if workers == 1 {
                let name = format!("push, durable, {how} / {}", peer.name);
                report.add(aimed(Row::new(name, Unit::Rate, push, PEER)));
            }
            let name = format!("drain by {workers}, durable, {how} / {}", peer.name);
            report.add(aimed(Row::new(name, Unit::Rate, drain, PEER)));
        }
    }
    arena.clear()
}
