//! Between a supervisor and its processes.
//!
//! A process that was started with `--supervised` has two lines to its supervisor:
//!
//! ```text
//!   standard input    limits, one JSON object per line. When it closes, the supervisor is gone,
//!                     however it ended, and the process drains as if it had been told to
//!   standard output   reports, one JSON object per line: what was done since the start, what is held
//! ```
//!
//! Standard error is for people, as ever. What goes wrong with these lines never stops the work.

use std::io::BufRead as _;
use std::time::Duration;

use leasehold::Store;
use leasehold::store::meter::Usage;
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use crate::args::Args;

/// What a process may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    pub connections: usize,
    pub requests_per_minute: Option<u32>,
}

/// What a process has done since it started.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Tasks, or records that were compiled.
    pub done: u64,
    /// Attempts that failed.
    pub failed: u64,
    /// How many tasks are held.
    pub holds: u64,
    /// Some of them.
    pub held: Vec<String>,
    /// What went wrong last.
    pub error: Option<String>,
    pub usage: Usage,
}

/// How often a process reports at most.
pub const REPORT: Duration = Duration::from_secs(1);

/// The lines to the supervisor.
#[derive(Debug)]
pub struct Leash {
    node: String,
    cut: CancellationToken,
    told: Option<Report>,
    /// What a supervisor that does not listen has not taken of the last line.
    rest: Vec<u8>,
}

impl Leash {
    /// They, if this process has a supervisor. What that allows is minded from now on.
    pub fn take(args: &Args, store: &Store) -> Option<Self> {
        let node = args.supervised.clone()?;
        let cut = CancellationToken::new();
        let (store, end) = (store.clone(), cut.clone());
        let runtime = tokio::runtime::Handle::current();
        // Should it not listen, the work does not wait for it.
        let _ = rustix::io::ioctl_fionbio(rustix::stdio::stdout(), true);
        // A thread of its own: reading standard input cannot be called off.
        std::thread::spawn(move || {
            for line in std::io::stdin().lock().lines() {
                let Ok(line) = line else { break };
                if let Ok(limits) = serde_json::from_str::<Limits>(&line) {
                    let _inside = runtime.enter();
                    store.limit(limits.connections, limits.requests_per_minute);
                }
            }
            end.cancel();
        });
        Some(Self { node, cut, told: None, rest: Vec::new() })
    }

    /// Completes when the supervisor is gone.
    pub fn cut(&self) -> CancellationToken {
        self.cut.clone()
    }

    /// The name under which this process claims tasks.
    pub fn name(&self) -> String {
        format!("{}:{}", self.node, std::process::id())
    }

    /// Tells what is new, if anything is.
    pub fn tell(&mut self, report: Report) {
        if self.told.as_ref() == Some(&report) {
            return;
        }
        // Half a line would spoil the next one.
        if !self.pass_on() {
            return;
        }
        // Numbers and text always serialise.
        self.rest = serde_json::to_vec(&report).unwrap_or_default();
        self.rest.push(b'\n');
        self.pass_on();
        self.told = Some(report);
    }

    /// Writes what is left of a line, as far as it is taken. Says whether that was all.
    fn pass_on(&mut self) -> bool {
        while !self.rest.is_empty() {
            match rustix::io::write(rustix::stdio::stdout(), &self.rest) {
                Ok(written) => drop(self.rest.drain(..written)),
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return false,
                // If nobody is there, the line is cut, and that is told otherwise.
                Err(_) => self.rest.clear(),
            }
        }
        true
    }
}

/// Completes when it is cancelled; never if there is none.
pub async fn cut(token: Option<&CancellationToken>) {
    match token {
        Some(token) => token.cancelled().await,
        None => std::future::pending().await,
    }
}
