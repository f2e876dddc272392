//! What can be asked of a fleet and its nodes.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args as ClapArgs, Subcommand};

use super::duration;

#[derive(Debug, Clone, ClapArgs)]
pub struct Supervise {
    /// This node's name [env: LEASEHOLD_NODE, else leasehold.toml, else the host's name]
    #[arg(long, value_name = "NAME")]
    pub node: Option<String>,

    /// Where to keep what a restart must know [env: LEASEHOLD_STATE, else leasehold.toml, else
    /// ~/.local/state/leasehold]
    #[arg(long, value_name = "DIR")]
    pub state: Option<PathBuf>,

    /// After TERM or Ctrl-C: how long until everything has ended, running tasks included. Those that
    /// would take longer are stopped in time and go back to the others
    #[arg(long, value_name = "DURATION", default_value = "1m", value_parser = duration)]
    pub drain: Duration,

    /// Print a unit for systemd instead, which runs this command with these options
    #[arg(long)]
    pub print_unit: bool,
}

#[derive(Debug, Subcommand)]
pub enum FleetCommand {
    /// Print the plan, or what it means for a node
    Show {
        /// The commands that this node runs
        #[arg(long, value_name = "NAME")]
        node: Option<String>,
    },
    /// Find out whether a plan can be carried out, without touching any store
    Check {
        /// TOML, or JSON if its name ends with .json; - is standard input
        file: PathBuf,
    },
    /// Check a plan and make it the fleet's: nodes carry it out within a minute
    Set {
        /// TOML, or JSON if its name ends with .json; - is standard input
        file: PathBuf,
    },
}

#[derive(Debug, ClapArgs)]
pub struct Nodes {
    #[command(subcommand)]
    pub command: Option<NodesCommand>,
}

#[derive(Debug, Subcommand)]
pub enum NodesCommand {
    /// Remove the record of a node that is no more
    Forget {
        /// Its name
        name: String,
        /// Even if it reports: it will be back with its next report
        #[arg(long)]
        force: bool,
    },
}
