//! Single tasks in a directory, not flushed: push by one process, drain by 1, 4 and 16.

use anyhow::Result;

use super::ours::{Ours, Plan};
use super::{WORKERS, contest, floor, pairs, theirs};
use crate::peers::{Contender, Peer, Server};
use crate::report::{Report, Row, Target, Unit};
use crate::rig::Rig;
use crate::stats::median;

/// A process does one task after the other, as the bare loop and the peers do.
const LOOPS: usize = 1;
const PUSH: &str = "create temporary (O_EXCL), write, rename; one thread";
const DRAIN: &str =
    "create lease (O_EXCL), read the task, write the lease, unlink both; a thread per worker";

const PEER: &str = "the same by this peer: a process pushes one task after the other, a process per worker \
    claims and acks one after the other; nothing flushed";

static PEERS: [Peer; 2] = [
    Peer {
        name: "Redis list (redis-py)",
        runner: "queues.py",
        role: "redis",
        server: Some(Server::Redis),
    },
    Peer {
        name: "huey FileStorage 3.5.4, no ack",
        runner: "queues.py",
        role: "huey-file",
        server: None,
    },
];

pub fn without_receipts(rig: &Rig, report: &mut Report) -> Result<()> {
    rows(rig, report, false)
}

pub fn with_receipts(rig: &Rig, report: &mut Report) -> Result<()> {
    rows(rig, report, true)
}

fn rows(rig: &Rig, report: &mut Report, receipts: bool) -> Result<()> {
    let name = if receipts { "receipts" } else { "plain" };
    let arena = rig.arena(&format!("queue-{name}"))?;
    let mut ours = Ours::new(arena.store_path(), rig.runtime()?);
    let (mut drained, tasks) = (Vec::new(), rig.pick(10_000, 4_000));
    // Once is enough: they know no receipts.
    let peers = if receipts { Vec::new() } else { rig.peers(report, &PEERS.each_ref())? };
    for workers in WORKERS {
        let plan =
            Plan { tasks, workers, loops: LOOPS, pushers: 1, bundle: 1, receipts, durable: false };
        let runs = contest(pairs(rig), 2 + peers.len(), |at| {
            arena.settle()?;
            match at {
                0 => ours.run(plan),
                1 => floor::run(&arena.floor_path(), tasks, workers, false),
                _ => theirs(&peers[at - 2], arena.path(), tasks, workers),
            }
        })?;
        let (push, drain) = runs[0].beside(&runs[1]);
        drained.push(median(&drain.ours));
        // Who pushes is one process whatever the number of workers.
        if workers == 1 {
            let row = Row::new(format!("push, {name}"), Unit::Rate, push, PUSH);
            report.add(row.target(Target::Ratio(0.5)));
        }
        let row = Row::new(format!("drain by {workers}, {name}"), Unit::Rate, drain, DRAIN);
        report.add(row.target(Target::Ratio(0.5)));
        for (theirs, Contender { peer, .. }) in runs[2..].iter().zip(&peers) {
            let (push, drain) = runs[0].beside(theirs);
            if workers == 1 {
                let name = format!("push, {name} / {}", peer.name);
                report.add(Row::new(name, Unit::Rate, push, PEER));
            }
            let name = format!("drain by {workers}, {name} / {}", peer.name);
            report.add(Row::new(name, Unit::Rate, drain, PEER));
        }
    }
    let slower = drained.last() < drained.first();
    report.fact(
        format!("drain by 16 / by 1, {name}"),
        format!(
            "{:.2} (target 1){}",
            drained[drained.len() - 1] / drained[0],
            if slower { " MISSED" } else { "" }
        ),
    );
    arena.clear()
}
