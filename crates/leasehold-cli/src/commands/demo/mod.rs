//! `leasehold demo`: processes share work, and nobody coordinates them but a plain directory.
//!
//! Two acts, each with processes of its own: a race for objects, and a queue whose workers are
//! killed. Nothing is staged: in the end the store is read, and compared with what the processes
//! were told.

pub mod queue;
pub mod race;

use std::process::Child;

use anyhow::Context as _;

use crate::args::{Args, Demo};
use crate::exit::Exit;
use crate::render::{self, BAD, GOOD, paint};

/// Both acts.
pub fn run(args: &Args, demo: &Demo) -> anyhow::Result<Exit> {
    let folder = tempfile::tempdir().context("cannot make a temporary directory")?;
    let raced = race::run(args, demo, &folder.path().join("race"))?;
    if !args.json && !args.quiet {
        render::line("")?;
    }
    let worked = queue::run(args, demo, &folder.path().join("queue"))?;
    Ok(if raced == Exit::Done { worked } else { raced })
}

/// Whether what was promised holds.
fn verdict(holds: bool) -> String {
    match holds {
        true => paint(GOOD.bold(), "yes"),
        false => paint(BAD.bold(), "NO"),
    }
}

/// Ends what is still running when something goes wrong.
struct Processes(Vec<Child>);

impl Drop for Processes {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
