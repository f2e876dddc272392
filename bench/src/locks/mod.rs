//! Locks in a directory and on a bucket: alone, in a crowd, and after a kill -9; beside the bare loop and, with
//! `--peers`, beside what users would pick instead.

mod bucket;
mod contended;
pub mod player;
mod takeover;
mod uncontended;

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Result, bail};

use crate::bucket::Place;
use crate::peers::{Contender, Peer, Player, Server};
use crate::report::Report;
use crate::rig::Rig;
use crate::suite::Bench;

/// All of them.
pub const BENCHES: &[Bench] = &[
    Bench { name: "uncontended", run: uncontended::run },
    Bench { name: "contended", run: contended::run },
    Bench { name: "takeover", run: takeover::run },
    Bench { name: "bucket", run: bucket::run },
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

/// Someone who takes part, in a place of its own.
struct Contestant<'a> {
    name: &'static str,
    place: Place,
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
        match (&self.kind, &self.place) {
            (Kind::Ourselves(role), place) => {
                let mut command = Command::new(std::env::current_exe()?);
                command.arg("lock-player").arg(role).arg(place.word());
                Player::start(command)
            }
            (Kind::Peer(peer), Place::Directory(folder)) => peer.player(folder),
            (Kind::Peer(peer), Place::Bucket { .. }) => bail!("{} needs a folder", peer.peer.name),
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
        let place = Place::Directory(folder(role)?);
        all.push(Contestant { name: role, place, kind: Kind::Ourselves(role) });
    }
    for contender in rig.peers(report, &PEERS.each_ref())? {
        let peer = contender.peer;
        let kind = Kind::Peer(contender);
        let place = Place::Directory(folder(peer.role)?);
        all.push(Contestant { name: peer.name, place, kind });
    }
    Ok(all)
}
