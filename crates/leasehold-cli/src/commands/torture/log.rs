//! The operation log: what each process was about to do, and what it was told.
//!
//! One file per life of a process, one JSON object per line, written by one `write` each before the
//! operation begins and after it has returned: so `kill -9` loses nothing that anybody else could
//! have seen. All times are of the host's boot clock, which all processes share. An operation whose
//! end is missing, or says [`Answer::Unknown`], is *open*: it may have taken effect, may do so later,
//! or never.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use anyhow::Context as _;
use leasehold::env::{BootTime, Env};
use leasehold::store::meter::Usage;
use serde::{Deserialize, Serialize};

/// What a register holds. Each is written once only, `by` sees to that.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Value {
    /// One more than what it replaced.
    pub n: u64,
    /// Which operation of which process wrote it.
    pub by: String,
    /// The fence of the lock that it was written under; 0 without one.
    #[serde(default)]
    pub token: u64,
}

/// A record of the index, as it was put or found.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Record {
    /// Its `updated_at`, in microseconds.
    pub time: i64,
    /// Whether it is a deletion. At equal times that wins.
    pub deleted: bool,
    /// What it says. At equal times the larger wins.
    pub value: String,
}

/// What a process is about to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Call {
    /// Take a lock.
    Acquire { lock: String },
    /// Ask whether a lock is still ours.
    Check { lock: String, token: u64 },
    /// Let go of a lock.
    Release { lock: String, token: u64 },
    /// Read a register.
    Read { register: String },
    /// Replace what a register holds, if it is still this.
    Swap { register: String, from: Option<Value>, to: Value },
    /// Push a task.
    Push { task: String },
    /// Push a bundle, whose tasks get their names with the answer.
    PushBundle { tasks: u32 },
    /// Claim a task, whichever.
    Claim,
    /// Ask whether a task is still ours.
    Working { task: String, token: u64 },
    /// Complete a task, in this push of it.
    Ack { task: String, token: u64, push: String },
    /// Give a task back.
    Nack { task: String, token: u64 },
    /// Give a task up.
    Fail { task: String, token: u64 },
    /// Push a dead letter again.
    Retry { task: String },
    /// Put a record, or the deletion of one.
    Put { key: String, record: Record },
    /// Look a record up.
    Get { key: String },
    /// Compact the index.
    Compact,
}

/// What it was told.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// It is done.
    Done,
    /// The lock is ours, with this fence.
    Acquired { token: u64 },
    /// Somebody has the lock.
    Held,
    /// It is not ours any more.
    Lost,
    /// The condition did not hold: nothing was changed.
    Refused,
    /// Nothing was changed, for whatever reason.
    Nothing,
    /// What the register holds.
    Value { value: Option<Value> },
    /// The tasks are pushed.
    Pushed { tasks: Vec<String>, incarnation: Option<String> },
    /// This task is ours, in this push of it.
    Claimed { task: String, token: u64, push: String },
    /// It is completed, by us.
    First,
    /// It was completed before.
    Again,
    /// It was given up.
    GivenUp,
    /// What the lookup found.
    Found { record: Option<Record> },
    /// No answer.
    Unknown { error: String },
}

/// What is there in the end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Observed {
    /// A receipt. `results`: of a bundle, which of its tasks it is about.
    Receipt { id: String, incarnation: String, token: u64, results: Option<Vec<bool>> },
    /// A dead letter.
    DeadLetter { id: String, incarnation: String },
    /// An object of the queue that should be gone.
    Left { key: String },
    /// What `verify` says of the index.
    Verified { shards: u64, rows: u64, findings: Vec<String> },
    /// Objects that are still in the inbox.
    Inbox { objects: u64 },
    /// What did not come to an end in time.
    Stuck { what: String },
}

/// What was done to a process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Deed {
    /// It was started.
    Start { player: u32, life: u32 },
    /// It was killed.
    Kill { player: u32, life: u32 },
    /// It was stopped for this long.
    Pause { player: u32, life: u32, millis: u64 },
    /// It ended by itself, with this code.
    Ended { player: u32, life: u32, code: Option<i32> },
}

/// What a line says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Said {
    /// An operation begins.
    Begin(Call),
    /// It has returned.
    End(Answer),
    /// Requests and faults of this life so far.
    Tally {
        /// Requests.
        usage: Usage,
        /// Faults by kind.
        faults: BTreeMap<String, u64>,
    },
    /// Something that no fault explains.
    Odd(String),
    /// What is there in the end.
    Observed(Observed),
    /// What was done to a process.
    Deed(Deed),
}

/// A line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Line {
    /// When, in nanoseconds of the boot clock.
    pub at: u64,
    /// Which operation of this life; 0 for what is none.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub op: u64,
    /// What.
    #[serde(flatten)]
    pub said: Said,
}

fn is_zero(op: &u64) -> bool {
    *op == 0
}

/// Writes a log.
#[derive(Debug)]
pub struct Log {
    file: File,
    env: Env,
    ops: AtomicU64,
}

impl Log {
    /// A log in this new file.
    pub fn create(path: &Path, env: Env) -> anyhow::Result<Self> {
        let file = OpenOptions::new().create_new(true).append(true).open(path);
        let file = file.with_context(|| format!("cannot make the log {}", path.display()))?;
        Ok(Self { file, env, ops: AtomicU64::new(1) })
    }

    /// Says that an operation begins, and gives it its number.
    pub fn begin(&self, call: Call) -> u64 {
        let op = self.ops.fetch_add(1, Relaxed);
        self.write(op, Said::Begin(call));
        op
    }

    /// Says what became of it.
    pub fn end(&self, op: u64, answer: Answer) {
        self.write(op, Said::End(answer));
    }

    /// Says anything else.
    pub fn say(&self, said: Said) {
        self.write(0, said);
    }

    /// The boot clock, in nanoseconds.
    pub fn now(&self) -> u64 {
        nanos(&self.env)
    }

    fn write(&self, op: u64, said: Said) {
        let line = Line { at: self.now(), op, said };
        let mut text = serde_json::to_string(&line).unwrap_or_default();
        text.push('\n');
        // One write: lines of several tasks do not mix, and the kernel has it when we are killed.
        if let Err(error) = (&self.file).write_all(text.as_bytes()) {
            // A process that cannot tell what it does must not do it.
            eprintln!("the log cannot be written: {error}");
            std::process::exit(3);
        }
    }
}

/// The boot clock, in nanoseconds.
pub fn nanos(env: &Env) -> u64 {
    let since = env.clock().boot().since(BootTime::from_boot(Duration::ZERO));
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// The lines of a log. A last line that is cut off is left out: its process died writing it.
pub fn read(path: &Path) -> anyhow::Result<Vec<Line>> {
    let file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut lines = Vec::new();
    let mut reader = BufReader::new(file);
    let mut text = String::new();
    for number in 1.. {
        text.clear();
        if reader.read_line(&mut text)? == 0 {
            break;
        }
        match serde_json::from_str(&text) {
            Ok(line) => lines.push(line),
            Err(_) if !text.ends_with('\n') => break,
            Err(error) => {
                return Err(error).with_context(|| format!("{}, line {number}", path.display()));
            }
        }
    }
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_back_and_a_torn_one_is_left_out() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let log = Log::create(&path, Env::system()).unwrap();
        let op = log.begin(Call::Claim);
        log.end(op, Answer::Claimed { task: "t".into(), token: 7, push: "i".into() });
        log.say(Said::Odd("why".into()));
        (&log.file).write_all(br#"{"at":1,"op":9,"beg"#).unwrap();
        let lines = read(&path).unwrap();
        assert_eq!(lines.len(), 3);
        assert_eq!(lines[0].said, Said::Begin(Call::Claim));
        assert!(lines[0].at <= lines[1].at && lines[0].op == lines[1].op);
        assert!(Log::create(&path, Env::system()).is_err(), "no life writes into another's log");
        std::fs::write(&path, "nonsense\n").unwrap();
        assert!(read(&path).is_err());
    }
}
