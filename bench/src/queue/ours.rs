//! Our side: a queue of its own for each run, worked on by processes of this program.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;
use leasehold::Store;
use leasehold::queue::{Queue, QueueSettings, usual_settings};
use leasehold::store::{Connect, Kind, StoreUrl};
use tokio::runtime::Runtime;

use super::{Speed, drain, push};
use crate::peers::Player;

/// How a run goes.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    pub tasks: usize,
    /// Worker processes, each with a runtime of two threads.
    pub workers: usize,
    /// How many loops claim, work and ack in each.
    pub loops: usize,
    /// How many pushes are under way at a time in the process that pushes.
    pub pushers: usize,
    /// How many tasks go together: 1 for single ones.
    pub bundle: usize,
    pub receipts: bool,
    pub durable: bool,
}

/// Queues in the store of one folder.
pub struct Ours {
    folder: PathBuf,
    runtime: Runtime,
    runs: usize,
}

impl Ours {
    pub fn new(folder: PathBuf, runtime: Runtime) -> Self {
        Self { folder, runtime, runs: 0 }
    }

    /// Pushes and drains a new queue. It is gone afterwards, and so are its receipts.
    pub fn run(&mut self, plan: Plan) -> Result<Speed> {
        self.run_with(plan, || Ok(()))
    }

    /// The same, with everything written out between pushing and draining, and before it is gone.
    pub fn run_settled(&mut self, plan: Plan) -> Result<Speed> {
        let folder = File::open(self.folder.parent().unwrap_or(&self.folder))?;
        self.run_with(plan, || Ok(rustix::fs::syncfs(&folder)?))
    }

    fn run_with(&mut self, plan: Plan, mut between: impl FnMut() -> Result<()>) -> Result<Speed> {
        self.runs += 1;
        let name = format!("q{}", self.runs);
        let store = open(&self.folder)?;
        let settings = QueueSettings {
            receipts: plan.receipts,
            durable: plan.durable,
            ..usual_settings(Kind::Directory)
        };
        self.runtime.block_on(Queue::create(&store, &name, settings))?;
        let mut players = Vec::new();
        for _ in 0..plan.workers {
            players.push(player(&self.folder, &name, plan.loops)?);
        }
        let Plan { tasks, pushers, bundle, .. } = plan;
        let push = push(&mut players, &format!("push {tasks} {pushers} {bundle}"), tasks)?;
        between()?;
        let drain = drain(&mut players, tasks)?;
        between()?;
        drop(players);
        std::fs::remove_dir_all(self.folder.join("queues").join(&name))?;
        Ok(Speed { push, drain })
    }
}

/// The store in this folder.
pub fn open(folder: &Path) -> Result<Store> {
    Ok(Connect::new(StoreUrl::Directory(folder.to_owned())).open()?)
}

/// A process that works on this queue.
pub fn player(folder: &Path, queue: &str, loops: usize) -> Result<Player> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("queue-player").arg(folder).args([queue, &loops.to_string()]);
    Player::start(command)
}
