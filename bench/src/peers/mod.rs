//! What users would pick instead, in the same run.
//!
//! A *player* is a process that does one side of a benchmark: ours, the bare floor, or a peer's. It
//! is told what to do line by line on standard input, and answers with one line each:
//!
//! ```text
//!   (start)          ready        everything is connected and warm
//!   rate SECONDS     NUMBER       how often per second it did its work, for that long
//!   count TOTAL      NUMBER       how many of TOTAL increments of DIR/counter.json were its own
//!   take, release    taken …      the lock
//!   reset, push N, drain          a queue: see `queue/player.rs`
//! ```
//!
//! Starting a player is not measured: a Python interpreter takes longer than thousands of locks.
//! `bench/peers/setup.sh` fetches the peers, `bench/peers/*.py` and `*.js` play them. A new suite
//! adds a runner there and a list of [`Peer`]s; a new server is a [`Server`]. Whoever cannot be fetched
//! or started here is in the report, with the reason.

mod services;

use std::cell::RefCell;
use std::ffi::OsString;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context as _, Result, bail, ensure};

use crate::report::Report;
pub use services::Server;
use services::Service;

/// Who plays, and with what.
#[derive(Debug, Clone)]
pub struct Peer {
    /// For the report, with the version.
    pub name: &'static str,
    /// `locks.py`, say.
    pub runner: &'static str,
    /// What the runner calls it.
    pub role: &'static str,
    /// The server that it talks to.
    pub server: Option<Server>,
}

impl Peer {
    fn is_python(&self) -> bool {
        self.runner.ends_with(".py")
    }

    /// The parts of `setup.sh` that it needs.
    fn parts(&self) -> Vec<&'static str> {
        let mut parts = vec![if self.is_python() { "venv" } else { "npm" }];
        if self.server.is_some() {
            parts.push("debs");
        }
        parts
    }
}

/// A peer that can take part.
#[derive(Clone, Copy)]
pub struct Contender<'a> {
    pub peer: &'static Peer,
    peers: &'a Peers,
}

impl Contender<'_> {
    /// A process that plays it in this folder, ready to be asked.
    pub fn player(&self, dir: &Path) -> Result<Player> {
        let (peer, fetched) = (self.peer, &self.peers.fetched);
        let program = match peer.is_python() {
            true => fetched.join("venv/bin/python3").into_os_string(),
            false => OsString::from("node"),
        };
        let mut command = Command::new(program);
        command.arg(scripts().join(peer.runner)).arg(peer.role).arg(dir);
        command.env("NODE_PATH", fetched.join("npm/node_modules"));
        if let Some(server) = peer.server {
            command.env("PORT", self.peers.port(server)?.to_string());
        }
        Player::start(command).with_context(|| format!("cannot start {}", peer.name))
    }
}

/// The fetched peers, and the servers that some of them need, for as long as this lives.
pub struct Peers {
    fetched: PathBuf,
    data: PathBuf,
    running: RefCell<Vec<(Server, Service)>>,
    /// Who was tried out, and what kept it from playing.
    known: RefCell<Vec<(&'static Peer, Option<String>)>>,
}

impl Peers {
    /// Fetches what is missing. Servers will have their data in this folder: on the same disk as
    /// ours.
    pub fn prepare(data: &Path) -> Result<Self> {
        let fetched = std::env::var_os("LEASEHOLD_PEERS").map(PathBuf::from);
        let fetched = fetched.unwrap_or_else(|| scripts().join("../../.peers"));
        let done = Command::new("bash")
            .arg(scripts().join("setup.sh"))
            .env("LEASEHOLD_PEERS", &fetched)
            .stdout(std::io::stderr())
            .status()
            .context("cannot run bench/peers/setup.sh")?;
        ensure!(done.success(), "bench/peers/setup.sh failed");
        let (fetched, data) = (fetched.canonicalize()?, data.to_owned());
        Ok(Self { fetched, data, running: RefCell::default(), known: RefCell::default() })
    }

    /// Those that can take part; the report says why the others cannot.
    pub fn able<'a>(&'a self, report: &mut Report, all: &[&'static Peer]) -> Vec<Contender<'a>> {
        let mut able = Vec::new();
        for peer in all {
            match self.what_keeps(peer) {
                Some(why) => report.not_run(peer.name, why),
                None => able.push(Contender { peer, peers: self }),
            }
        }
        able
    }

    /// Why a peer cannot take part, found out once by starting it.
    fn what_keeps(&self, peer: &'static Peer) -> Option<String> {
        let mut known = self.known.borrow_mut();
        if let Some((_, why)) = known.iter().find(|(other, _)| std::ptr::eq(*other, peer)) {
            return why.clone();
        }
        let why = self.try_out(peer).err().map(|error| format!("{error:#}"));
        known.push((peer, why.clone()));
        why
    }

    fn try_out(&self, peer: &'static Peer) -> Result<()> {
        for part in peer.parts() {
            // Written by setup.sh where it could not fetch a part.
            if let Ok(why) = std::fs::read_to_string(self.fetched.join(part).join(".missing")) {
                bail!("{}", why.trim().replace('\n', "; "));
            }
        }
        let folder = tempfile::tempdir_in(&self.data)?;
        Contender { peer, peers: self }.player(folder.path())?;
        Ok(())
    }

    /// Where the server listens. Started the first time.
    fn port(&self, server: Server) -> Result<u16> {
        let mut running = self.running.borrow_mut();
        if let Some((_, service)) = running.iter().find(|(known, _)| *known == server) {
            return Ok(service.port);
        }
        let service = server.start(&self.fetched, &self.data)?;
        let port = service.port;
        running.push((server, service));
        Ok(port)
    }
}

/// Where the runners are.
fn scripts() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("peers")
}

/// A process that takes part in a benchmark. Killed when dropped.
pub struct Player {
    process: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Player {
    /// Starts it and waits until it is ready.
    pub fn start(mut command: Command) -> Result<Self> {
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let stdin = process.stdin.take().context("no pipe")?;
        let stdout = BufReader::new(process.stdout.take().context("no pipe")?);
        let mut player = Self { process, stdin, stdout };
        let word = player.hear()?;
        ensure!(word == "ready", "said {word:?} instead of being ready");
        Ok(player)
    }

    /// Tells it what to do.
    pub fn tell(&mut self, what: &str) -> Result<()> {
        Ok(self.stdin.write_all(format!("{what}\n").as_bytes())?)
    }

    /// Its next answer.
    pub fn hear(&mut self) -> Result<String> {
        let mut line = String::new();
        let read = self.stdout.read_line(&mut line)?;
        ensure!(read > 0, "a process of the benchmark ended too early");
        Ok(line.trim().to_owned())
    }

    /// The number that it answers.
    pub fn ask(&mut self, what: &str) -> Result<f64> {
        self.tell(what)?;
        let answer = self.hear()?;
        answer.parse().with_context(|| format!("{what}: {answer:?} is not a number"))
    }

    /// Kills it as kill -9 does, and returns once it is gone.
    pub fn kill(&mut self) -> Result<()> {
        self.process.kill()?;
        self.process.wait()?;
        Ok(())
    }
}

impl Drop for Player {
    fn drop(&mut self) {
        // If it has ended by itself, so much the better.
        let _ = self.kill();
    }
}
