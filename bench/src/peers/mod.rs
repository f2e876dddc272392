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
//! adds a runner there and a list of [`Peer`]s; a new server is a function in [`services`].

pub mod services;

use std::ffi::OsString;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context as _, Result, ensure};

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
}

/// The fetched peers, and the servers that some of them need, for as long as this lives.
pub struct Peers {
    fetched: PathBuf,
    variables: Vec<(&'static str, String)>,
    _services: Vec<Service>,
}

impl Peers {
    /// Fetches what is missing and starts these servers, with their data in this folder: on the
    /// same disk as ours.
    pub fn prepare(services: &[services::Start], data: &Path) -> Result<Self> {
        let fetched = std::env::var_os("LEASEHOLD_PEERS").map(PathBuf::from);
        let fetched = fetched.unwrap_or_else(|| scripts().join("../../.peers"));
        let done = Command::new("bash")
            .arg(scripts().join("setup.sh"))
            .env("LEASEHOLD_PEERS", &fetched)
            .status()
            .context("cannot run bench/peers/setup.sh")?;
        ensure!(done.success(), "bench/peers/setup.sh failed");
        let fetched = fetched.canonicalize()?;
        let mut peers = Self { fetched, variables: Vec::new(), _services: Vec::new() };
        for start in services {
            let (service, variable) = start(&peers.fetched, data)?;
            peers._services.push(service);
            peers.variables.push(variable);
        }
        Ok(peers)
    }

    /// A process that plays this peer in this folder, ready to be asked.
    pub fn player(&self, peer: &Peer, dir: &Path) -> Result<Player> {
        let python = peer.runner.ends_with(".py");
        let program = match python {
            true => self.fetched.join("venv/bin/python3").into_os_string(),
            false => OsString::from("node"),
        };
        let mut command = Command::new(program);
        command.arg(scripts().join(peer.runner)).arg(peer.role).arg(dir);
        command.env("NODE_PATH", self.fetched.join("npm/node_modules"));
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        Player::start(command).with_context(|| format!("cannot start {}", peer.name))
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
