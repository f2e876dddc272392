//! What can be asked of a node's replica.

use clap::{Args as ClapArgs, Subcommand};

#[derive(Debug, ClapArgs)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Sync {
    /// Show what a sync would do, and do nothing: LISTs only
    #[arg(long)]
    pub dry_run: bool,

    /// Only these queues [default: all that this node has replicas of]
    #[arg(value_name = "QUEUE")]
    pub queues: Vec<String>,

    #[command(subcommand)]
    pub command: Option<SyncCommand>,
}

#[derive(Debug, Subcommand)]
pub enum SyncCommand {
    /// Tell the bucket now what was done here, and ask it what there is to do
    Now {
        /// Only these queues
        queues: Vec<String>,
        /// Only tell
        #[arg(long, conflicts_with = "down")]
        up: bool,
        /// Only ask
        #[arg(long)]
        down: bool,
    },
    /// Show when the last syncs were, what is still to be told, duplicates and requests saved
    Status {
        /// Only these queues
        queues: Vec<String>,
    },
    /// Sync in the queues' own intervals, until a signal
    Run {
        /// Which queues; those that this node has no replica of are joined
        queues: Vec<String>,
    },
}
