//! Locks in a directory: alone, in a crowd, and after a kill -9; beside the bare loop and, with
//! `--peers`, beside what users would pick instead.

mod contended;
pub mod player;
mod takeover;
mod uncontended;

use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;

use crate::peers::{Contender, Peer, Player, Server};
use crate::report::Report;
use crate::rig::Rig;
use crate::suite::Bench;

/// All of them.
pub const BENCHES: &[Bench] = &[
    Bench { name: "uncontended", run: uncontended::run },
    Bench { name: "contended", run: contended::run },
    Bench { name: "takeover", run: takeover::run },
];

/// What users would pick instead.
static PEERS: [Peer; 6] = [
    Peer {
        name: "npm proper-lockfile 4.1.2",
        runner: "locks.js",
        role: "proper-lockfile",
        server: None,
    },
    Peer {
        name: "Python SoftFileLock 4.2.10",
        runner: "locks.py",
        role: "soft-filelock",
        server: None,
    },
    Peer { name: "Python FileLock 4.2.10", runner: "locks.py", role: "filelock", server: None },
    Peer { name: "Python fcntl.flock", runner: "locks.py", role: "flock", server: None },
    Peer {
        name: "Redis SET NX (redis-py)",
        runner: "locks.py",
        role: "redis",
        server: Some(Server::Redis),
    },
    Peer {
        name: "PostgreSQL advisory (psycopg)",
        runner: "locks.py",
        role: "postgres",
        server: Some(Server::Postgres),
    },
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
    Peer(Contender<'a>),
}

impl Contestant<'_> {
    /// A process that plays it.
    fn player(&self) -> Result<Player> {
        match &self.kind {
            Kind::Ourselves(role) => {
                let mut command = Command::new(std::env::current_exe()?);
                command.arg("lock-player").arg(role).arg(&self.folder);
                Player::start(command)
            }
            Kind::Peer(peer) => peer.player(&self.folder),
        }
    }
}

/// Those of this program in these roles, then all peers if they were asked for.
fn contestants<'a>(
    rig: &'a Rig,
    report: &mut Report,
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
    for contender in rig.peers(report, &PEERS.each_ref())? {
        let peer = contender.peer;
        let kind = Kind::Peer(contender);
        all.push(Contestant { name: peer.name, folder: folder(peer.role)?, kind });
    }
    Ok(all)
}
