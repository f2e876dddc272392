//! `leasehold demo`: a fleet in a temporary directory, and nobody coordinates it but that directory.
//!
//! Nothing is staged: the processes are the ordinary commands, what is shown is measured while it
//! happens, and in the end the store is read and compared with what was promised.

pub mod race;
mod tour;

use std::process::Child;

use anyhow::Context as _;

use crate::args::{Args, Demo};
use crate::exit::Exit;
use crate::render::{BAD, GOOD, paint};

/// The tour, or the race.
pub fn run(args: &Args, demo: &Demo) -> anyhow::Result<Exit> {
    let folder = tempfile::tempdir().context("cannot make a temporary directory")?;
    match demo.race {
        true => race::run(args, demo, &folder.path().join("race")),
        false => tour::run(args, demo, folder.path()),
    }
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
