//! A process of this node: started, listened to, told to end.

use std::fs::File;
use std::io::Write as _;
use std::os::unix::process::CommandExt as _;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::Context as _;
use leasehold::env::BootTime;
use leasehold::protocol::supervise::{Flow, Process, Restarts};
use rustix::process::{Pid, Signal};
use tokio::io::{AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, BufReader};
use tokio::sync::mpsc;

use super::Event;
use crate::child::own_program;
use crate::render;
use crate::supervised::{Limits, Report};

/// The longest line that is listened to.
const LINE: u64 = 16 << 10;

/// A process that should run, and what became of it.
pub struct Slot {
    /// Ours, not the system's: those are given out again.
    pub id: u64,
    pub process: Process,
    pub restarts: Restarts,
    pub state: State,
    /// What it has told, and what those before it had told in the end.
    pub report: Report,
    pub before: Report,
    /// The last that it said on standard error, and whether that was passed on.
    pub last_words: (String, bool),
    /// How much it may say.
    pub flow: Flow,
}

pub enum State {
    Running(Child),
    /// Ended, and to be started again then.
    Waiting(BootTime),
    /// Told to end, and to be killed then.
    Draining(Child, BootTime),
}

/// A process that runs.
pub struct Child {
    pub pid: u32,
    pub since: BootTime,
    /// Its standard input: closed when we end, however that is.
    line: File,
}

impl Child {
    /// Tells it what it may take.
    pub fn limit(&mut self, limits: &Limits) {
        let text = serde_json::to_string(limits).unwrap_or_default();
        // It may have just ended; and a line that is full is not read.
        let _ = self.line.write(format!("{text}\n").as_bytes());
    }

    /// Sends it a signal. What it runs is its own business.
    pub fn signal(&self, signal: Signal) {
        if let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) {
            // If it has just ended, so much the better: nobody has waited for it yet, so the number
            // is still its own.
            let _ = rustix::process::kill_process(pid, signal);
        }
    }
}

impl Slot {
    /// One that is to be started now.
    pub fn new(id: u64, process: Process, now: BootTime) -> Self {
        Self {
            id,
            process,
            restarts: Restarts::default(),
            state: State::Waiting(now),
            report: Report::default(),
            before: Report::default(),
            last_words: (String::new(), false),
            flow: Flow::default(),
        }
    }

    /// What people call it.
    pub fn name(&self) -> String {
        format!("{} {}", self.process.role.word(), self.process.of.join(","))
    }

    /// Says how many of its lines were not passed on.
    pub fn tell_dropped(&self, dropped: u64) {
        if dropped > 0 {
            render::say(format_args!("{}: … and {dropped} more lines", self.name()));
        }
    }

    pub fn child(&mut self) -> Option<&mut Child> {
        match &mut self.state {
            State::Running(child) | State::Draining(child, _) => Some(child),
            State::Waiting(_) => None,
        }
    }

    pub fn pid(&self) -> Option<u32> {
        match &self.state {
            State::Running(child) | State::Draining(child, _) => Some(child.pid),
            State::Waiting(_) => None,
        }
    }

    pub fn is_draining(&self) -> bool {
        matches!(self.state, State::Draining(..))
    }

    /// What all that ran here has done.
    pub fn total(&self) -> Report {
        sum(&self.before, &self.report)
    }
}

/// Both together; what is held is the later's.
pub fn sum(before: &Report, now: &Report) -> Report {
    Report {
        done: before.done + now.done,
        failed: before.failed + now.failed,
        usage: before.usage.plus(&now.usage),
        ..now.clone()
    }
}

/// Starts a process: ourselves, with these words first, which say which store.
pub fn start(
    slot: &Slot,
    first: &[String],
    now: BootTime,
    events: mpsc::Sender<Event>,
) -> anyhow::Result<Child> {
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    // Writing never waits.
    rustix::io::ioctl_fionbio(&write, true)?;
    let mut command = std::process::Command::new(own_program()?);
    command.args(first).args(&slot.process.words).envs(&slot.process.env);
    command.stdin(read).stdout(Stdio::piped()).stderr(Stdio::piped());
    // What is typed on a terminal is for us: we tell the others.
    command.process_group(0);
    let child = tokio::process::Command::from(command).spawn().context("cannot start a process")?;
    let pid = child.id().context("a process has no number")?;
    tokio::spawn(listen(slot.id, child, events));
    Ok(Child { pid, since: now, line: write.into() })
}

/// Passes on what a process tells, and its end.
async fn listen(id: u64, mut child: tokio::process::Child, events: mpsc::Sender<Event>) {
    let (out, err) = (child.stdout.take(), child.stderr.take());
    // What cannot be read as a report is not one.
    let report = move |line: &str| {
        let report = serde_json::from_str(line).ok()?;
        Some(Event::Reported(id, Box::new(report)))
    };
    let reports = lines(out, events.clone(), report);
    let words = lines(err, events.clone(), move |line| Some(Event::Said(id, line.to_owned())));
    let all = async { tokio::join!(reports, words) };
    tokio::pin!(all);
    let status = tokio::select! {
        status = child.wait() => {
            // What it said last; but whoever holds its pipes must not keep it alive for us.
            let _ = tokio::time::timeout(Duration::from_secs(1), &mut all).await;
            status
        }
        _ = &mut all => child.wait().await,
    };
    let _ = events.send(Event::Ended(id, status.ok())).await;
}

async fn lines(
    from: Option<impl AsyncRead + Unpin>,
    to: mpsc::Sender<Event>,
    event: impl Fn(&str) -> Option<Event>,
) {
    let Some(from) = from else { return };
    let mut from = BufReader::with_capacity(1024, from);
    let mut line = Vec::new();
    // A line that never ends comes in pieces.
    while let Ok(1..) = (&mut from).take(LINE).read_until(b'\n', &mut line).await {
        if let Some(event) = event(String::from_utf8_lossy(&line).trim_end()) {
            let _ = to.send(event).await;
        }
        line.clear();
    }
}

/// How a process ended, for people.
pub fn ending(status: Option<ExitStatus>) -> String {
    use std::os::unix::process::ExitStatusExt as _;
    match status.map(|status| (status.code(), status.signal())) {
        Some((Some(code), _)) => format!("ended with exit code {code}"),
        Some((None, Some(signal))) => format!("was killed by signal {signal}"),
        _ => "ended".to_owned(),
    }
}
