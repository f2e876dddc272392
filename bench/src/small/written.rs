//! How many bytes reach the disk per task: cards and cheap disks wear.
//!
//! By the device's own count, which has everything in it, the file system's bookkeeping too, and
//! the neighbours', if there are any; so the floor, a bare loop that does the same with plain files,
//! is measured beside it. A queue is written out after the pushes and after the drain, as it would
//! be where tasks wait for a while.

use std::fs::File;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use anyhow::{Context as _, Result};

use crate::queue::ours::{Ours, Plan};
use crate::queue::{Speed, floor};
use crate::report::Report;
use crate::rig::Rig;

pub fn run(rig: &Rig, report: &mut Report) -> Result<()> {
    let arena = rig.arena("small-written")?;
    let Some(device) = Device::of(arena.path())? else {
        report
            .not_run("bytes written per task", "the kernel tells nothing of this folder's device");
        return Ok(());
    };
    let mut ours = Ours::new(arena.store_path(), rig.runtime()?);
    let tasks = rig.pick(10_000, 2_000);
    for (name, bundle, durable) in [
        ("single tasks, not durable", 1, false),
        ("single tasks, durable", 1, true),
        ("bundles of 100, not durable", 100, false),
        ("bundles of 100, durable", 100, true),
    ] {
        let pushers = if durable { 64 } else { 1 };
        let plan = Plan { tasks, workers: 1, loops: 4, pushers, bundle, receipts: true, durable };
        let written = device.during(arena.path(), || ours.run_settled(plan))?;
        report.fact(format!("written per task, {name}"), per_task(written, tasks));
    }
    for (name, flush) in [("nothing flushed", false), ("each flushed", true)] {
        let folder = arena.floor_path();
        let settle = || arena.settle();
        let bare = || floor::run_with(&folder, tasks, 1, flush, settle);
        let written = device.during(arena.path(), bare)?;
        report.fact(format!("written per task, bare loop, {name}"), per_task(written, tasks));
    }
    arena.clear()
}

fn per_task(bytes: u64, tasks: usize) -> String {
    format!("{:.0} bytes to the device, for 200 bytes of payload", bytes as f64 / tasks as f64)
}

/// The device that a folder is on.
struct Device(String);

impl Device {
    fn of(folder: &Path) -> Result<Option<Self>> {
        let device = std::fs::metadata(folder)?.dev();
        let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
        let path = format!("/sys/dev/block/{major}:{minor}/stat");
        Ok(Path::new(&path).exists().then_some(Self(path)))
    }

    /// Bytes written so far.
    fn written(&self) -> Result<u64> {
        let stat = std::fs::read_to_string(&self.0)?;
        // Sectors of 512 bytes, whatever the device's own are.
        let sectors = stat.split_whitespace().nth(6).context("not a device's statistics")?;
        Ok(sectors.parse::<u64>()? * 512)
    }

    /// Bytes written by this, down to the disk.
    fn during(&self, folder: &Path, work: impl FnOnce() -> Result<Speed>) -> Result<u64> {
        rustix::fs::syncfs(File::open(folder)?)?;
        let before = self.written()?;
        work()?;
        rustix::fs::syncfs(File::open(folder)?)?;
        Ok(self.written()? - before)
    }
}
