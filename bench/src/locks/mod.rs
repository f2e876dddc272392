//! Locks in a directory: alone, in a crowd, and after a kill -9; beside the bare loop and, with
//! `--peers`, beside what users would pick instead.

mod contended;
pub mod player;
mod takeover;
mod uncontended;

use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;

use crate::peers::{Peer, Peers, Player, services};
use crate::rig::Rig;
use crate::suite::Bench;

/// All of them.
pub const BENCHES: &[Bench] = &[
    Bench { name: "uncontended", run: uncontended::run },
    Bench { name: "contended", run: contended::run },
    Bench { name: "takeover", run: takeover::run },
];

/// What users would pick instead.
const PEERS: &[Peer] = &[
    Peer { name: "npm proper-lockfile 4.1.2", runner: "locks.js", role: "proper-lockfile" },
    Peer { name: "Python SoftFileLock 4.2.10", runner: "locks.py", role: "soft-filelock" },
    Peer { name: "Python FileLock 4.2.10", runner: "locks.py", role: "filelock" },
    Peer { name: "Python fcntl.flock", runner: "locks.py", role: "flock" },
    Peer { name: "Redis SET NX (redis-py)", runner: "locks.py", role: "redis" },
    Peer { name: "PostgreSQL advisory (psycopg)", runner: "locks.py", role: "postgres" },
];

/// Someone who takes part, in a folder of its own.
struct Contestant<'a> {
    name: &'static str,
    folder: PathBuf,
    kind: Kind<'a>,
}

enum Kind<'a> {
    /// This program, in this role.
    Ourselves(&'static str),
    Peer(&'a Peers, &'static Peer),
}

impl Contestant<'_> {
    /// A process that plays it.
    fn player(&self) -> Result<Player> {
        match self.kind {
            Kind::Ourselves(role) => {
                let mut command = Command::new(std::env::current_exe()?);
                command.arg("lock-player").arg(role).arg(&self.folder);
                Player::start(command)
            }
            Kind::Peer(peers, peer) => peers.player(peer, &self.folder),
        }
    }
}

/// Those of this program in these roles, then all peers if they were asked for.
fn contestants<'a>(
    rig: &'a Rig,
    arena: &std::path::Path,
    ours: &[&'static str],
) -> Result<Vec<Contestant<'a>>> {
    let folder = |name: &str| -> Result<PathBuf> {
        let folder = arena.join(name);
        std::fs::create_dir_all(&folder)?;
        Ok(folder)
    };
    let mut all = Vec::new();
    for role in ours {
        all.push(Contestant { name: role, folder: folder(role)?, kind: Kind::Ourselves(role) });
    }
    if let Some(peers) = rig.peers(&[services::redis, services::postgres])? {
        for peer in PEERS {
            let kind = Kind::Peer(peers, peer);
            all.push(Contestant { name: peer.name, folder: folder(peer.role)?, kind });
        }
    }
    Ok(all)
}
