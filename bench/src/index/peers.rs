//! What users would pick instead, on the same files: DuckDB reads them as they are, the others have
//! the records in a database of their own.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use leasehold::index::Freshness;

use super::data;
use super::merge::{self, Fill};
use crate::peers::{Contender, Peer, Player};
use crate::report::{Report, Row, Target, Unit};
use crate::rig::Rig;
use crate::stats::{Pairs, median, rounds};

static PEERS: [Peer; 4] = [
    Peer { name: "SQLite (Python)", runner: "index.py", role: "sqlite", server: None },
    Peer { name: "LMDB 3.0.0 (Python)", runner: "index.py", role: "lmdb", server: None },
    Peer { name: "RocksDB (rocksdict 0.3.29)", runner: "index.py", role: "rocksdb", server: None },
    Peer { name: "DuckDB 2.0.0", runner: "index.py", role: "duckdb", server: None },
];

const MERGE: &str = "the same by this peer: reads the inbox, merges, commits, deletes the inbox";
const LOOKUP: &str = "the same by this peer, from Python, warm";

pub fn run(rig: &Rig, report: &mut Report) -> Result<()> {
    let peers = rig.peers(report, &PEERS.each_ref())?;
    if peers.is_empty() {
        return Ok(());
    }
    let runtime = rig.runtime()?;
    let base = data::base(rig, &runtime)?;
    for (what, fill, count, targets) in [
        ("single files", data::fill_files as Fill, 2, (2.0, 5.0)),
        ("batches", data::fill_batches, 5, (3.0, 6.0)),
    ] {
        let inbox = rig.path().join("peers-inbox");
        let runs = rounds(rig.pick(count, 1), 1 + peers.len(), |at| {
            if at == 0 {
                return merge::ours(rig, &runtime, &base, fill);
            }
            data::linked(&base, &inbox)?;
            fill(&inbox, data::size(rig))?;
            theirs(rig, &peers[at - 1], &inbox)
        })?;
        for (peer, theirs) in peers.iter().zip(&runs[1..]) {
            let pairs = Pairs { ours: runs[0].clone(), floor: theirs.clone() };
            let target = if peer.peer.role == "duckdb" { targets.1 } else { targets.0 };
            let name = format!("merge, {what} / {}", peer.peer.name);
            let row = Row::new(name, Unit::Millis, pairs, MERGE);
            // A quick run merges a tenth: what is done for each shard then weighs more than the records.
            report.add(if rig.quick() { row } else { row.target(Target::Ratio(target)) });
        }
        std::fs::remove_dir_all(&inbox)?;
    }
    lookups(rig, report, &peers, &base)
}

/// Milliseconds; each time into a database that does not have the updates yet.
fn theirs(rig: &Rig, peer: &Contender<'_>, inbox: &Path) -> Result<f64> {
    let mut player = built(rig, peer, inbox)?;
    player.ask("merge")
}

fn built(rig: &Rig, peer: &Contender<'_>, store: &Path) -> Result<Player> {
    let folder = rig.path().join("peers-data");
    if folder.exists() {
        std::fs::remove_dir_all(&folder)?;
    }
    std::fs::create_dir_all(&folder)?;
    let mut player = peer.player(&folder)?;
    player.tell(&format!("build {}", data::folder(store).display()))?;
    ensure!(player.hear()? == "built", "{} has no records", peer.peer.name);
    Ok(player)
}

fn lookups(rig: &Rig, report: &mut Report, peers: &[Contender<'_>], base: &Path) -> Result<()> {
    let runtime = rig.single_threaded()?;
    let records = data::size(rig).records;
    let keys: Vec<String> = (0..200).map(|n| data::domain(n * 7919 % records)).collect();
    let index = data::open_index(&runtime, base)?;
    // The first look reads little and keeps nothing, the second keeps the shard.
    for key in keys.iter().chain(&keys) {
        runtime.block_on(index.get_row(key, Freshness::Checked))?;
    }
    let asked = format!("lookup {}", keys.join(" "));
    for peer in peers {
        let mut player = built(rig, peer, base)?;
        let pairs = Pairs::measure(
            rig.pick(3, 1),
            || {
                runtime.block_on(async {
                    let mut millis = Vec::new();
                    for key in &keys {
                        let start = Instant::now();
                        let found = index.get_row(key, Freshness::Checked).await?;
                        millis.push(start.elapsed().as_secs_f64() * 1e3);
                        found.context("a record is missing")?;
                    }
                    Ok(median(&millis))
                })
            },
            || player.ask(&asked),
        )?;
        let note = format!(
            "{:.1} µs against {:.1} µs",
            median(&pairs.ours) * 1e3,
            median(&pairs.floor) * 1e3
        );
        let name = format!("lookup, warm / {}", peer.peer.name);
        report.add(Row::new(name, Unit::Millis, pairs, LOOKUP).note(note));
        let scans: Vec<f64> =
            (0..rig.pick(3, 1)).map(|_| player.ask("scan")).collect::<Result<_>>()?;
        report.fact(
            format!("count by version over all, {}", peer.peer.name),
            format!("{:.0} ms", median(&scans)),
        );
    }
    Ok(())
}
