//! Conditional PUTs by 16 tasks to a real S3 server, against bare HTTP with the same requests.
//!
//! Server and client share this machine's cores, so what the client spends, the server lacks: the
//! ratio shows our whole cost per request. So does the client's own CPU time, with less noise.

pub mod bare;
mod sigv4;

use std::time::Instant;

use anyhow::Result;
use bytes::Bytes;
use leasehold::{Durability, Key, Store};
use leasehold_testkit::servers::Server;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

use super::{create, stored};
use crate::bucket::{Place, ministack, seaweedfs};
use crate::host::cpu_time;
use crate::report::{Report, Row, Target, Unit};
use crate::rig::{BODY, Rig};
use crate::stats::{Pairs, median};

/// Concurrent requests.
const TASKS: usize = 16;

const FLOOR: &str = "hyper, a connection per task, the same requests signed as they are sent";

pub fn run(rig: &Rig, report: &mut Report) -> Result<()> {
    if let Some(server) = seaweedfs(rig, report, "conditional PUTs, SeaweedFS")? {
        row(rig, report, "SeaweedFS", server, rig.pick(100, 40))?;
    }
    // A Python program, and slower.
    if let Some(server) = ministack(rig, report, "conditional PUTs, ministack")? {
        row(rig, report, "ministack", server, rig.pick(40, 15))?;
    }
    Ok(())
}

fn row(rig: &Rig, report: &mut Report, name: &str, server: Server, each: usize) -> Result<()> {
    let runtime = rig.runtime()?;
    let store = Place::on(&server).open()?;
    runtime.block_on(store.init())?;
    let before = store.usage();
    let floor = bare::Bare::new(&server)?;
    let (mut our_run, mut bare_run) = (0, 0);
    let (mut our_cpu, mut bare_cpu) = (Vec::new(), Vec::new());
    let pairs = Pairs::measure(
        // Many short runs: a server of many parts has good and bad moments of its own.
        rig.pick(15, 7),
        || {
            our_run += 1;
            let start = cpu_time();
            let rate = ours(&runtime, &store, &format!("ours-{our_run}"), each);
            our_cpu.push((cpu_time() - start).as_secs_f64());
            rate
        },
        || {
            bare_run += 1;
            let (connections, run) =
                (bare::connections(&runtime, &floor)?, format!("bare-{bare_run}"));
            let start = cpu_time();
            let rate = bare::puts(&runtime, &floor, connections, &run, each);
            bare_cpu.push((cpu_time() - start).as_secs_f64());
            rate
        },
    )?;
    let used = store.usage().since(&before);
    let micros = |runs: &[f64]| median(runs) * 1e6 / (TASKS * each) as f64;
    let row = Row::new(format!("{TASKS} conditional PUTs, {name}"), Unit::Rate, pairs, FLOOR);
    report.add(row.target(Target::Ratio(0.9)).note(format!(
        "client's CPU per PUT: {:.0} µs, the floor's {:.0} µs; {} requests for {} objects, {} retries",
        micros(&our_cpu),
        micros(&bare_cpu),
        used.requests(),
        our_run * TASKS * each,
        used.retries
    )));
    Ok(())
}

/// Objects per second, each task writing `each`.
fn ours(runtime: &Runtime, store: &Store, run: &str, each: usize) -> Result<f64> {
    runtime.block_on(async {
        let start = Instant::now();
        let mut tasks = JoinSet::new();
        for task in 0..TASKS {
            let (store, run) = (store.clone(), run.to_owned());
            tasks.spawn(async move {
                for n in 0..each {
                    let key = Key::new(object(&run, task, n))?;
                    let body = Bytes::from_static(BODY);
                    stored(store.put(&key, body, create(Durability::Durable)).await?)?;
                }
                anyhow::Ok(())
            });
        }
        while let Some(task) = tasks.join_next().await {
            task??;
        }
        Ok((TASKS * each) as f64 / start.elapsed().as_secs_f64())
    })
}

/// The key of a task's n-th object.
fn object(run: &str, task: usize, n: usize) -> String {
    format!("{run}/{task:02}-{n:05}.json")
}
