//! Replaces one small object by compare-and-swap: what a heartbeat in a directory costs. For
//! information: the floor compares nothing.

use std::time::Duration;

use anyhow::{Context, Result};
use bytes::Bytes;
use leasehold::{Durability, Key, Proof, Store, When, Write};
use tokio::runtime::Runtime;

use super::{create, floor, stored};
use crate::report::{Report, Row, Unit};
use crate::rig::{Arena, BODY, Rig};
use crate::stats::{Pairs, rate, rate_async};

const KEY: &str = "data/lease.json";

pub fn run(rig: &Rig, report: &mut Report) -> Result<()> {
    let runtime = rig.runtime()?;
    for (name, durability, floor_is) in [
        ("replace if unchanged, volatile", Durability::Volatile, "write temporary, rename over"),
        (
            "replace if unchanged, ordered",
            Durability::Ordered,
            "write temporary, fsync, rename over",
        ),
        (
            "replace if unchanged, durable",
            Durability::Durable,
            "write temporary, fsync, rename over, fsync the folder",
        ),
    ] {
        let arena = rig.arena("swap")?;
        let pairs = Pairs::measure(
            rig.pairs(),
            || {
                arena.settle()?;
                ours(&runtime, &arena.store, durability, rig.window())
            },
            || {
                arena.settle()?;
                bare(&arena, durability, rig.window())
            },
        )?;
        report.add(Row::new(name, Unit::Rate, pairs, floor_is));
        arena.clear()?;
    }
    Ok(())
}

fn ours(runtime: &Runtime, store: &Store, durability: Durability, window: Duration) -> Result<f64> {
    let key = Key::new(KEY)?;
    // Two bodies in turn, so that the version changes.
    let bodies = [Bytes::from_static(BODY), Bytes::from(BODY.to_ascii_uppercase())];
    runtime.block_on(async {
        let mut version = match store.head(&key).await? {
            Some(meta) => meta.version,
            None => stored(store.put(&key, bodies[1].clone(), create(durability)).await?)?,
        };
        let mut turn = 0;
        rate_async(window, async || {
            let write = Write::when(When::Matches(version.clone()), Proof::Bytes);
            let put =
                store.put(&key, bodies[turn % 2].clone(), write.durability(durability)).await?;
            version = stored(put)?;
            turn += 1;
            Ok(())
        })
        .await
    })
}

fn bare(arena: &Arena, durability: Durability, window: Duration) -> Result<f64> {
    let data = floor::open_folder(&arena.floor, "data").context("the floor's folder")?;
    rate(window, || {
        let file = floor::write_new(&arena.floor, "tmp/new", BODY)?;
        if durability != Durability::Volatile {
            rustix::fs::fsync(&file)?;
        }
        drop(file);
        floor::rename(&arena.floor, "tmp/new", KEY)?;
        if durability == Durability::Durable {
            rustix::fs::fsync(&data)?;
        }
        Ok(())
    })
}
