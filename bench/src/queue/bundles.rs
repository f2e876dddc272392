//! Tasks in bundles of 100, durable and not: pushed and drained by one process.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::path::Path;

use anyhow::Result;

use super::ours::{Ours, Plan};
use super::{Speed, contest, monotonic, pairs, payload, per_second};
use crate::report::{Report, Row, Target, Unit};
use crate::rig::Rig;

const TASKS: usize = 100_000;
const BUNDLE: usize = 100;
const PUSH: &str = "append 100 tasks to one file, with fdatasync if durable; one thread";
const DRAIN: &str =
    "read 100 tasks, append 100 times 8 bytes to another file, with fdatasync if durable";

pub fn run(rig: &Rig, report: &mut Report) -> Result<()> {
    let arena = rig.arena("queue-bundles")?;
    let mut ours = Ours::new(arena.store_path(), rig.runtime()?);
    for durable in [false, true] {
        let plan = Plan {
            tasks: TASKS,
            workers: 1,
            loops: 8,
            pushers: 16,
            bundle: BUNDLE,
            receipts: true,
            durable,
        };
        let runs = contest(pairs(rig), 2, |at| {
            arena.settle()?;
            match at {
                0 => ours.run(plan),
                _ => log(&arena.floor_path(), durable),
            }
        })?;
        let (push, drain) = runs[0].beside(&runs[1]);
        let how = if durable { "durable" } else { "not durable" };
        for (verb, pairs, is) in [("push", push, PUSH), ("drain", drain, DRAIN)] {
            let name = format!("{verb}, bundles of {BUNDLE}, {how}");
            report.add(Row::new(name, Unit::Rate, pairs, is).target(Target::Rate(100_000.0)));
        }
    }
    arena.clear()
}

/// What a plain log allows.
fn log(folder: &Path, durable: bool) -> Result<Speed> {
    let (tasks, acks) = (folder.join("tasks"), folder.join("acks"));
    let bundle = payload().repeat(BUNDLE);
    let mut file = File::create(&tasks)?;
    let start = monotonic();
    for _ in 0..TASKS / BUNDLE {
        file.write_all(bundle.as_bytes())?;
        if durable {
            file.sync_data()?;
        }
    }
    let push = per_second(TASKS, start, monotonic());
    let (mut file, mut acked) = (File::open(&tasks)?, File::create(&acks)?);
    let mut body = vec![0; bundle.len()];
    let start = monotonic();
    for n in 0..TASKS / BUNDLE {
        file.read_exact(&mut body)?;
        for k in 0..BUNDLE {
            acked.write_all(&((n * BUNDLE + k) as u64).to_le_bytes())?;
        }
        if durable {
            acked.sync_data()?;
        }
    }
    let drain = per_second(TASKS, start, monotonic());
    std::fs::remove_file(&tasks)?;
    std::fs::remove_file(&acks)?;
    Ok(Speed { push, drain })
}
