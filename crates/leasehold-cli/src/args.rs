//! What can be asked.

pub mod fleet;
pub mod index;

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args as ClapArgs, Parser, Subcommand};

use crate::exit;

pub mod queue;
pub mod sync;
#[cfg(feature = "torture")]
pub mod torture;

/// Locks, a work queue and a shared index on nothing but a bucket or a plain directory.
#[derive(Debug, Parser)]
#[command(name = "leasehold", version, after_help = exit::HELP, disable_help_subcommand = true)]
pub struct Args {
    #[command(flatten)]
    pub store: StoreArgs,

    /// Print data as JSON: one object, or one per line
    #[arg(long, global = true)]
    pub json: bool,

    /// Print what the command cost: requests, bytes, dollars at list price
    #[arg(long, global = true)]
    pub stats: bool,

    /// Say more; twice for even more
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub verbose: u8,

    /// Say nothing but errors
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub quiet: bool,

    /// What a supervisor tells its processes: for which node they work
    #[arg(long, global = true, hide = true, value_name = "NODE")]
    pub supervised: Option<String>,

    #[command(subcommand)]
    pub command: Command,
}

/// Which store, and how to reach it.
#[derive(Debug, ClapArgs)]
#[command(next_help_heading = "Store")]
pub struct StoreArgs {
    /// A path, file:///path, s3://bucket/prefix, gs://bucket/prefix, az://container/prefix, memory:
    /// [env: LEASEHOLD_STORE, else leasehold.toml, else ./.leasehold]
    #[arg(long, global = true, value_name = "URL")]
    pub store: Option<String>,

    /// This node's replica: a directory in which relaxed queues are worked on, also offline
    /// [env: LEASEHOLD_REPLICA, else leasehold.toml]
    #[arg(long, global = true, value_name = "DIR", hide_short_help = true)]
    pub replica: Option<PathBuf>,

    /// The configuration file [env: LEASEHOLD_CONFIG, else leasehold.toml here or in a folder above]
    #[arg(long, global = true, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// The server's URL, if it is not the provider's own [env: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL]
    #[arg(long, global = true, value_name = "URL", hide_short_help = true)]
    pub endpoint: Option<String>,

    /// The bucket's region [env: AWS_REGION, AWS_DEFAULT_REGION]
    #[arg(long, global = true, value_name = "NAME", hide_short_help = true)]
    pub region: Option<String>,

    /// The bucket in the path of URLs instead of in the host name (true with --endpoint)
    #[arg(long, global = true, value_name = "BOOL", hide_short_help = true)]
    pub path_style: Option<bool>,

    /// A profile of the AWS configuration files [env: AWS_PROFILE]
    #[arg(long, global = true, value_name = "NAME", hide_short_help = true)]
    pub profile: Option<String>,

    /// The access key, or Azure's account [env: AWS_ACCESS_KEY_ID, AZURE_STORAGE_ACCOUNT]
    #[arg(long, global = true, value_name = "KEY", hide_short_help = true)]
    pub access_key: Option<String>,

    /// Send unsigned requests
    #[arg(long, global = true, hide_short_help = true)]
    pub anonymous: bool,

    /// How many connections to open at most
    #[arg(long, global = true, value_name = "N", hide_short_help = true)]
    pub connections: Option<usize>,

    /// How many requests to send in a minute at most: those beyond it wait
    #[arg(long, global = true, value_name = "N", hide_short_help = true, value_parser = clap::value_parser!(u32).range(1..))]
    pub requests_per_minute: Option<u32>,

    /// Use a directory on a network file system, although it is not safe between machines
    #[arg(long, global = true, hide_short_help = true)]
    pub force_network_fs: bool,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Watch a small fleet at work in a temporary directory: under a minute, and all of it real
    Demo(Demo),
    /// Find out whether a store is safe to use
    Doctor {
        /// Replace what earlier examinations noted, for a store that was mended
        #[arg(long)]
        forget: bool,
        /// Write a new leasehold.json in the place of one that cannot be read
        #[arg(long)]
        repair: bool,
    },
    /// Run commands under locks, and look after locks
    #[command(subcommand)]
    Lock(LockCommand),
    /// Run a command while leading, one process among many
    Elect(Elect),
    /// Read and change shared files safely
    #[command(subcommand)]
    Pad(PadCommand),
    /// Share work: push tasks, and run a command for each
    #[command(subcommand)]
    Queue(queue::QueueCommand),
    /// Keep records, find them by key, ask about them in SQL
    #[command(subcommand)]
    Index(index::IndexCommand),
    /// Bring this node's replica and the bucket into step, for relaxed queues
    Sync(sync::Sync),
    /// Run this node's workers and compilers, as the fleet's plan says
    Supervise(fleet::Supervise),
    /// Say what each node runs
    #[command(subcommand)]
    Fleet(fleet::FleetCommand),
    /// Show how the nodes of the fleet are doing
    Nodes(fleet::Nodes),
    /// Kill and stop processes that share a store, spoil its answers, and check what they were told
    #[cfg(feature = "torture")]
    Torture(torture::Torture),
    /// Make the store now instead of at the first write
    Init,
    /// List keys
    Ls(Ls),
    /// Print an object
    Cat {
        /// Its key
        key: String,
    },
    /// Show what the store tells of an object
    Stat {
        /// Its key
        key: String,
    },
    /// Write an object
    Put(Put),
    /// Delete objects
    Rm(Rm),
    /// Print a completion script for a shell
    Completions {
        /// Which shell
        shell: clap_complete::Shell,
    },
    /// Print the manual page, or write those of all commands into a folder
    Man {
        /// The folder
        dir: Option<PathBuf>,
    },
    /// A racing process of `demo`
    #[command(hide = true)]
    DemoWorker(DemoWorker),
    /// A process of `torture`
    #[cfg(feature = "torture")]
    #[command(hide = true)]
    TorturePlayer(torture::TorturePlayer),
}

#[derive(Debug, ClapArgs)]
pub struct Demo {
    /// Another demonstration: processes race for the same objects, and for one counter
    #[arg(long)]
    pub race: bool,

    /// How many workers, or racing processes [default: 3, or 8]
    #[arg(short = 'j', long, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub workers: Option<u32>,

    /// How many tasks, or objects to race for [default: 200, or 5000]
    #[arg(short = 'n', long, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub number: Option<u32>,
}

#[derive(Debug, ClapArgs)]
pub struct DemoWorker {
    pub dir: PathBuf,
    pub id: u32,
    pub objects: u32,
    pub swaps: u32,
}

/// Which lock.
#[derive(Debug, ClapArgs)]
pub struct LockName {
    /// The lock's name
    #[arg(required_unless_present = "file")]
    pub name: Option<String>,

    /// The lock of this file, FILE.lock beside it, instead of a named one
    #[arg(long, value_name = "FILE", conflicts_with = "name")]
    pub file: Option<PathBuf>,
}

/// How a lock is acquired and kept. What is not given comes from leasehold.toml, else from what
/// suits the store.
#[derive(Debug, Default, ClapArgs)]
pub struct LockTerms {
    /// How long to wait for it, like 10m [default: 5s in a directory, 30s on a bucket; elect: for ever]
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub wait: Option<Duration>,

    /// After how long without a heartbeat it is anybody's [default: 3s in a directory, 5m on a bucket]
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub ttl: Option<Duration>,

    /// How often it is renewed [default: a third of --ttl, else 1s in a directory, 1m on a bucket]
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub heartbeat: Option<Duration>,

    /// How often to try at most, with pauses that double; not with --wait [default: 10]
    #[arg(long, value_name = "N", conflicts_with = "wait", value_parser = clap::value_parser!(u32).range(1..))]
    pub attempts: Option<u32>,

    /// The first pause between two tries [default: 100ms in a directory, 200ms on a bucket]
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub retry_delay: Option<Duration>,

    /// The name under which it is held [default: host:pid]
    #[arg(long, value_name = "NAME")]
    pub holder: Option<String>,
}

/// What to run, and how to stop it.
#[derive(Debug, ClapArgs)]
pub struct Program {
    /// When it must stop: how long after TERM to send KILL
    #[arg(long, value_name = "DURATION", default_value = "5s", value_parser = duration)]
    pub grace: Duration,

    /// When somebody asks for the lock: stop the command and let go, instead of carrying on
    #[arg(long)]
    pub yield_on_ask: bool,

    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "CMD")]
    pub command: Vec<OsString>,
}

fn duration(text: &str) -> Result<Duration, String> {
    leasehold::settings::parse_duration(text).map_err(|error| error.to_string())
}

#[derive(Debug, Subcommand)]
pub enum LockCommand {
    /// Run a command while holding a lock
    ///
    /// Gives up if somebody else holds the lock for longer than --wait. Its token is in LEASEHOLD_TOKEN. If
    /// the lock is lost, the command is stopped. Exits with the command's own code; 75: somebody held the
    /// lock all the time; 76: it was lost.
    Run {
        #[command(flatten)]
        lock: LockName,
        #[command(flatten)]
        terms: LockTerms,
        /// How many may hold it at a time; all must name the same number
        #[arg(long, value_name = "N", conflicts_with = "file")]
        slots: Option<u32>,
        #[command(flatten)]
        run: Program,
    },
    /// List locks
    Ls,
    /// Show who holds a lock
    Show {
        #[command(flatten)]
        lock: LockName,
    },
    /// Ask the holder of a lock to let go
    Ask {
        #[command(flatten)]
        lock: LockName,
    },
    /// Remove a lock that nobody holds any more
    Release {
        #[command(flatten)]
        lock: LockName,
        /// Also from a holder that is alive: it finds out at its next heartbeat
        #[arg(long)]
        force: bool,
    },
    /// Remove all locks that nobody holds any more
    Clean,
}

#[derive(Debug, ClapArgs)]
pub struct Elect {
    /// The election's name
    pub name: String,
    #[command(flatten)]
    pub terms: LockTerms,
    #[command(flatten)]
    pub run: Program,
}

#[derive(Debug, Subcommand)]
pub enum PadCommand {
    /// Print a file
    Read {
        /// Its path
        path: String,
        /// What it holds, if its name does not tell
        #[arg(long, value_name = "FORMAT")]
        format: Option<FileFormat>,
    },
    /// Write a file from standard input, under its lock
    Write {
        /// Its path
        path: String,
        /// What it holds, if its name does not tell
        #[arg(long, value_name = "FORMAT")]
        format: Option<FileFormat>,
        /// Write this text instead
        #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
        text: Option<String>,
    },
    /// Change a file by a command that reads it on standard input and writes it on standard output,
    /// under its lock
    Update {
        /// Its path
        path: String,
        /// What it holds, if its name does not tell
        #[arg(long, value_name = "FORMAT")]
        format: Option<FileFormat>,
        #[command(flatten)]
        terms: LockTerms,
        /// Let the command empty a file that is not empty
        #[arg(long)]
        allow_empty: bool,
        /// The command and its arguments
        #[arg(last = true, required = true, value_name = "CMD")]
        command: Vec<OsString>,
    },
    /// List files
    Ls {
        /// What their paths begin with
        #[arg(default_value = "")]
        prefix: String,
    },
}

/// What a file holds. YAML and JSON are checked before they are written, text must be UTF-8.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum FileFormat {
    Yaml,
    Json,
    Text,
    Raw,
}

#[derive(Debug, ClapArgs)]
pub struct Ls {
    /// What the keys begin with
    #[arg(default_value = "")]
    pub prefix: String,

    /// Show sizes, times and versions
    #[arg(short, long)]
    pub long: bool,

    /// Show only one level: fold what is behind the next slash
    #[arg(short, long)]
    pub delimited: bool,

    /// Stop after this many
    #[arg(long, value_name = "N")]
    pub limit: Option<usize>,

    /// Start after this key
    #[arg(long, value_name = "KEY")]
    pub start_after: Option<String>,
}

#[derive(Debug, ClapArgs)]
pub struct Put {
    /// Its key
    pub key: String,

    /// The file to read; - is standard input
    #[arg(default_value = "-")]
    pub file: PathBuf,

    /// Write this text instead of a file
    #[arg(long, value_name = "TEXT", conflicts_with = "file", allow_hyphen_values = true)]
    pub text: Option<String>,

    /// Only if there is no such object
    #[arg(long, conflicts_with = "if_version")]
    pub if_absent: bool,

    /// Only if the object is in this version
    #[arg(long, value_name = "VERSION")]
    pub if_version: Option<String>,
}

#[derive(Debug, ClapArgs)]
pub struct Rm {
    /// Their keys
    #[arg(required_unless_present = "prefix")]
    pub keys: Vec<String>,

    /// Only in this version (with one key)
    #[arg(long, value_name = "VERSION", conflicts_with = "prefix")]
    pub if_version: Option<String>,

    /// Everything whose key begins with this
    #[arg(long, value_name = "PREFIX", conflicts_with = "keys")]
    pub prefix: Option<String>,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    #[test]
    fn the_definitions_are_consistent() {
        super::Args::command().debug_assert();
    }
}
