//! Creates and deletes one small object over and over, without fsync: what an uncontended lock in
//! a directory costs.

use std::time::Duration;

use anyhow::Result;
use bytes::Bytes;
use leasehold::{Delete, Durability, Key, Store};
use rustix::fd::OwnedFd;
use tokio::runtime::Runtime;

use super::{create, floor, stored};
use crate::report::{Report, Row, Target, Unit};
use crate::rig::{BODY, Rig};
use crate::stats::{Pairs, rate, rate_async};

const FLOOR: &str =
    "create temporary (O_EXCL), write, close, link, unlink temporary, unlink; one thread";

/// How the object is deleted.
#[derive(Clone, Copy)]
enum Deleting {
    Anything,
    ThatVersion,
}

pub fn run(rig: &Rig, report: &mut Report) -> Result<()> {
    let target = Target::Ratio(0.6);
    for (name, runtime, deleting, target) in [
        ("create + delete, 2 workers", rig.runtime()?, Deleting::Anything, Some(target)),
        ("create + delete, 1 thread", rig.single_threaded()?, Deleting::Anything, Some(target)),
        ("create + delete that version", rig.runtime()?, Deleting::ThatVersion, None),
    ] {
        let arena = rig.arena("churn")?;
        let window = rig.window();
        let pairs = Pairs::measure(
            rig.pairs(),
            || {
                arena.settle()?;
                ours(&runtime, &arena.store, deleting, window)
            },
            || {
                arena.settle()?;
                bare(&arena.floor, window)
            },
        )?;
        let row = Row::new(name, Unit::Rate, pairs, FLOOR);
        report.add(match target {
            Some(target) => row.target(target),
            None => row.note("a conditional delete reads the object first, the floor does not"),
        });
        arena.clear()?;
    }
    Ok(())
}

fn ours(runtime: &Runtime, store: &Store, deleting: Deleting, window: Duration) -> Result<f64> {
    let key = Key::new("data/lease.json")?;
    let body = Bytes::from_static(BODY);
    runtime.block_on(rate_async(window, async || {
        let put = store.put(&key, body.clone(), create(Durability::Volatile)).await?;
        let version = stored(put)?;
        let deleted = match deleting {
            Deleting::Anything => store.delete(&key).await?,
            Deleting::ThatVersion => store.delete_version(&key, &version).await?,
        };
        anyhow::ensure!(matches!(deleted, Delete::Deleted), "not deleted: {deleted:?}");
        Ok(())
    }))
}

fn bare(folder: &OwnedFd, window: Duration) -> Result<f64> {
    rate(window, || {
        drop(floor::write_new(folder, "tmp/new", BODY)?);
        floor::link(folder, "tmp/new", "data/lease.json")?;
        floor::remove(folder, "tmp/new")?;
        floor::remove(folder, "data/lease.json")?;
        Ok(())
    })
}
