//! What a small machine feels: the program's size, how long it takes to start, what it takes when
//! it has nothing to do, and what it writes to the disk.
//!
//! The command is the one that was built beside this program.

mod idle;
mod start;
mod written;

use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;

use crate::report::Report;
use crate::suite::Bench;

/// All of them.
pub const BENCHES: &[Bench] = &[
    Bench { name: "start", run: start::run },
    Bench { name: "idle", run: idle::run },
    Bench { name: "written", run: written::run },
];

/// The command `leasehold`, if it was built as this program was; else the report says so.
fn program(report: &mut Report, what: &str) -> Result<Option<PathBuf>> {
    let path = std::env::current_exe()?.with_file_name("leasehold");
    if path.is_file() {
        return Ok(Some(path));
    }
    let why =
        format!("there is no {}: build it with -p leasehold-cli, as this was", path.display());
    report.not_run(what, why);
    Ok(None)
}

/// The command, in this folder and on a store there, whatever the environment says.
fn command(program: &std::path::Path, folder: &std::path::Path) -> Command {
    let mut command = Command::new(program);
    for name in ["LEASEHOLD_STORE", "LEASEHOLD_CONFIG", "LEASEHOLD_REPLICA", "NOTIFY_SOCKET"] {
        command.env_remove(name);
    }
    command.env("LEASEHOLD_STATE", folder.join("state")).current_dir(folder);
    command.arg("--store").arg(folder.join("store"));
    command
}
