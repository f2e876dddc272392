//! Takes and releases one lock over and over.

use anyhow::Result;
use leasehold::lock::{Lock, LockSettings};
use leasehold::store::Kind;

use crate::report::{Report, Row, Target, Unit};
use crate::rig::{BODY, Rig};
use crate::stats::{Pairs, rate, rate_async};
use crate::store::floor;

const FLOOR: &str =
    "create temporary (O_EXCL), write, close, link, unlink temporary, unlink; one thread";

pub fn run(rig: &Rig, report: &mut Report) -> Result<()> {
    for (name, runtime) in [
        ("lock + release, 2 workers", rig.runtime()?),
        ("lock + release, 1 thread", rig.single_threaded()?),
    ] {
        let arena = rig.arena("uncontended")?;
        let window = rig.window();
        let settings = LockSettings::of(Kind::Directory);
        let lock = Lock::named(&arena.store, "bench", "worker-001", settings)?;
        let pairs = Pairs::measure(
            rig.pairs(),
            || {
                arena.settle()?;
                runtime.block_on(rate_async(window, async || {
                    lock.acquire().await?.release().await?;
                    Ok(())
                }))
            },
            || {
                arena.settle()?;
                rate(window, || {
                    drop(floor::write_new(&arena.floor, "tmp/new", BODY)?);
                    floor::link(&arena.floor, "tmp/new", "data/x.lock")?;
                    floor::remove(&arena.floor, "tmp/new")?;
                    floor::remove(&arena.floor, "data/x.lock")?;
                    Ok(())
                })
            },
        )?;
        report.add(Row::new(name, Unit::Rate, pairs, FLOOR).target(Target::Ratio(0.6)));
        arena.clear()?;
    }
    Ok(())
}
