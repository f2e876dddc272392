//! `queue work --log`: what became of each run, in a file of the worker's own.

use std::fs::File;
use std::io::Write as _;
use std::path::Path;

use leasehold::env::Env;
use leasehold::queue::Task;
use serde_json::json;

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// It is recorded as done, by us.
    Done,
    /// It is done, and somebody else's record of it was first.
    DoneBefore,
    /// It failed, and is tried again.
    Retried,
    /// It failed for good.
    Failed,
    /// It was stopped and goes back, uncounted.
    Returned,
    /// Its claim was somebody else's by then.
    Lost,
    /// How it ended could not be recorded.
    Unrecorded,
}

impl End {
    fn word(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::DoneBefore => "done before",
            Self::Retried => "retried",
            Self::Failed => "failed",
            Self::Returned => "returned",
            Self::Lost => "lost",
            Self::Unrecorded => "unrecorded",
        }
    }
}

/// What a line says of a run before its end is known.
pub struct Run {
    queue: String,
    task: String,
    attempt: u32,
    token: u64,
}

impl Run {
    pub fn of(task: &Task) -> Self {
        let queue = task.queue().map_or("", |queue| queue.name()).to_owned();
        let (attempt, token) = (task.attempt(), task.token());
        Self { queue, task: task.id().to_owned(), attempt, token }
    }

    /// What people call it.
    pub fn name(&self) -> String {
        format!("{}/{}", self.queue, self.task)
    }

    /// Appends its line: after the end is recorded in the queue, so that a line never says too much. One
    /// write, so that workers may share the file. A disk that is full stops no work.
    pub fn log(&self, file: &Path, env: &Env, end: End) {
        let Self { queue, task, attempt, token } = self;
        let line = json!({
            "at": env.clock().wall().to_string(), "queue": queue, "task": task, "attempt": attempt,
            "token": token, "end": end.word(),
        });
        let append = || {
            let mut file = File::options().create(true).append(true).open(file)?;
            file.write_all(format!("{line}\n").as_bytes())
        };
        if let Err(error) = append() {
            tracing::warn!(file = %file.display(), %error, "the log cannot be written");
        }
    }
}
