//! What can be asked.

use std::path::PathBuf;

use clap::{Args as ClapArgs, Parser, Subcommand};

use crate::exit;

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

    /// Use a directory on a network file system, although it is not safe between machines
    #[arg(long, global = true, hide_short_help = true)]
    pub force_network_fs: bool,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Watch worker processes race for objects in a temporary store
    Demo(Demo),
    /// Find out whether a store is safe to use
    Doctor {
        /// Replace what earlier examinations noted, for a store that was mended
        #[arg(long)]
        forget: bool,
    },
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
    /// Print the manual page
    Man,
    /// A racing process of `demo`
    #[command(hide = true)]
    DemoWorker(DemoWorker),
}

#[derive(Debug, ClapArgs)]
pub struct Demo {
    /// How many processes race
    #[arg(short = 'j', long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub workers: u32,

    /// How many objects they race for
    #[arg(short = 'n', long, default_value_t = 5000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub objects: u32,
}

#[derive(Debug, ClapArgs)]
pub struct DemoWorker {
    pub dir: PathBuf,
    pub id: u32,
    pub objects: u32,
    pub swaps: u32,
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
