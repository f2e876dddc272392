//! What can be asked of queues.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args as ClapArgs, Subcommand};

use super::duration;

#[derive(Debug, Subcommand)]
pub enum QueueCommand {
    /// Make a queue. Pushing to one that is not there makes it as well, with what suits the store
    Create {
        /// Its name
        queue: String,
        #[command(flatten)]
        settings: QueueTerms,
    },
    /// Change settings of a queue, for everybody
    Set {
        /// Its name
        queue: String,
        #[command(flatten)]
        settings: QueueTerms,
    },
    /// List queues
    Ls,
    /// Show a queue's settings, or what became of a task
    Show {
        /// The queue
        queue: String,
        /// The task
        task: Option<String>,
    },
    /// Show how many tasks are in which state, and who does what
    Status {
        /// The queue
        queue: String,
        /// How many claims to look into: each is a request
        #[arg(long, value_name = "N", default_value_t = 20)]
        limit: usize,
    },
    /// Push tasks
    Push(Push),
    /// Show tasks without claiming them
    Peek {
        /// The queue
        queue: String,
        /// How many
        #[arg(short = 'n', long, value_name = "N", default_value_t = 10)]
        limit: usize,
    },
    /// Run a command for each task
    Work(Work),
    /// List dead letters: tasks that were given up
    Failed {
        /// The queue
        queue: String,
        /// How many
        #[arg(short = 'n', long, value_name = "N", default_value_t = 100)]
        limit: usize,
    },
    /// Push dead letters again, as new
    Retry {
        /// The queue
        queue: String,
        /// Which
        #[arg(required_unless_present = "all")]
        tasks: Vec<String>,
        /// All of them
        #[arg(long, conflicts_with = "tasks")]
        all: bool,
    },
    /// Remove tasks, dead letters or receipts
    Purge {
        /// The queue
        queue: String,
        #[command(flatten)]
        what: Purge,
    },
    /// Tell all workers to leave the tasks alone, within half a minute
    Pause {
        /// The queue
        queue: String,
    },
    /// The opposite of pause
    Resume {
        /// The queue
        queue: String,
    },
    /// Clean up now what workers clean up by and by
    Sweep {
        /// The queue
        queue: String,
    },
}

/// How a queue behaves. What is not given is what suits the store, or stays.
#[derive(Debug, Default, ClapArgs)]
pub struct QueueTerms {
    /// After how long without a heartbeat a task is anybody's: at least 1s
    #[arg(long, value_name = "DURATION", value_parser = ttl)]
    pub ttl: Option<Duration>,
    /// How often a claim is renewed [default: a third of the ttl]
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub heartbeat: Option<Duration>,
    /// How often a task may fail before it is given up
    #[arg(long, value_name = "N")]
    pub max_attempts: Option<u32>,
    /// How often the worker of a task may vanish before it is given up
    #[arg(long, value_name = "N")]
    pub max_crashes: Option<u32>,
    /// The first pause before a failed task is tried again; it doubles
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub backoff: Option<Duration>,
    /// The longest such pause
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub backoff_cap: Option<Duration>,
    /// How long an attempt may take; 0s: as long as it likes
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub timeout: Option<Duration>,
    /// Over how many prefixes tasks are spread; fixed when the queue is made
    #[arg(long, value_name = "N")]
    pub shards: Option<u16>,
    /// Whether completions are recorded
    #[arg(long, value_name = "BOOL")]
    pub receipts: Option<bool>,
    /// How long receipts are kept
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub retention: Option<Duration>,
    /// strict: claims go straight to the store. relaxed: nodes with a replica claim there, also
    /// offline, and tell the bucket later
    #[arg(long, value_name = "MODE")]
    pub mode: Option<QueueMode>,
    /// How often a node tells the bucket what it did, in relaxed mode
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub sync_up: Option<Duration>,
    /// How often a node asks the bucket what there is to do, in relaxed mode
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub sync_down: Option<Duration>,
    /// Whether tasks and receipts in a directory are flushed to disk before success is reported
    #[arg(long, value_name = "BOOL")]
    pub durable: Option<bool>,
}

/// One that is shorter is over before its command has started.
fn ttl(text: &str) -> Result<Duration, String> {
    match duration(text)? {
        ttl if ttl < Duration::from_secs(1) => Err("a queue's ttl is at least 1s".to_owned()),
        ttl => Ok(ttl),
    }
}

/// How claims reach the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum QueueMode {
    Strict,
    Relaxed,
}

#[derive(Debug, ClapArgs)]
pub struct Push {
    /// The queue
    pub queue: String,

    /// Tasks: JSON, or any text. - reads one per line from standard input
    #[arg(value_name = "TASK", required = true)]
    pub tasks: Vec<String>,

    /// Its name: pushing it again changes nothing while it waits or its receipt is kept, unless --delay is given
    /// (with one task)
    #[arg(long, value_name = "ID", conflicts_with = "id_field")]
    pub id: Option<String>,

    /// Take the name from this field of each task, which must be a JSON object
    #[arg(long, value_name = "FIELD")]
    pub id_field: Option<String>,

    /// Take tasks as text, even those that look like JSON
    #[arg(long)]
    pub text: bool,

    /// Not to be run before this has passed
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub delay: Option<Duration>,

    /// How long an attempt may take; 0s: as long as it likes
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub timeout: Option<Duration>,

    /// How often it may fail before it is given up
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_attempts: Option<u32>,

    /// How many tasks go into one object, under one lease and with one receipt: a hundredth of the
    /// requests with 100. 1 is single tasks [default: 1; with - 100, unless tasks have names or a
    /// delay]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub bundle: Option<u32>,

    /// Wait until the task is done, and print its result (with one task)
    #[arg(long, conflicts_with = "bundle")]
    pub wait: bool,
}

#[derive(Debug, ClapArgs)]
pub struct Work {
    /// Queues, separated by commas: those of the first come before those of the second
    pub queues: String,

    /// How many tasks at a time
    #[arg(short = 'j', long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub jobs: u16,

    /// End when there is nothing left, neither waiting nor being done by anybody. The exit code is 1 if
    /// tasks were given up in this run
    #[arg(long)]
    pub exit_when_empty: bool,

    /// The exit code with which the command says that the task will never work
    #[arg(long, value_name = "CODE", default_value_t = 65)]
    pub fail_code: u8,

    /// How often to look for tasks at least, where there were none: each look is a request
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = duration)]
    pub poll: Duration,

    /// When it must stop: how long after TERM to send KILL
    #[arg(long, value_name = "DURATION", default_value = "5s", value_parser = duration)]
    pub grace: Duration,

    /// After a signal to end: how long running tasks may go on before they are stopped and go back
    /// to the others
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = duration)]
    pub drain: Duration,

    /// The name under which tasks are claimed [default: host:pid]
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,

    /// Append a line of JSON to this file for each run: which task, and how it ended. Whoever keeps it
    /// short replaces it: it is opened anew for each line
    #[arg(long, value_name = "FILE")]
    pub log: Option<PathBuf>,

    /// The command and its arguments. {} is the task, {id}, {attempt}, {token} and {queue} what they
    /// say; the task is also on standard input. Exit code 0: done, with what it printed as the
    /// result; anything else: again later. What it leaves running ends with it
    #[arg(last = true, required = true, value_name = "CMD")]
    pub command: Vec<OsString>,
}

#[derive(Debug, ClapArgs)]
#[group(id = "what", required = true, multiple = true)]
pub struct Purge {
    /// Tasks that nobody has claimed, and scheduled ones
    #[arg(long)]
    pub pending: bool,
    /// Dead letters
    #[arg(long)]
    pub failed: bool,
    /// Receipts
    #[arg(long)]
    pub completed: bool,
}
