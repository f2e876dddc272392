//! What tasks cost on a bucket: requests by class, and dollars per million at list price. Exact, and
//! counted in memory with S3's rules; tests assert on the same figures.

use anyhow::{Result, ensure};
use leasehold::Store;
use leasehold::queue::{Queue, QueueSettings};
use leasehold::store::Kind;
use leasehold::store::meter::Prices;

use super::player;
use crate::report::Report;
use crate::rig::Rig;

const TASKS: usize = 10_000;

pub fn run(rig: &Rig, report: &mut Report) -> Result<()> {
    let runtime = rig.runtime()?;
    for (name, bundle, receipts) in [
        ("single tasks", 1, true),
        ("single tasks, no receipts", 1, false),
        ("bundles of 100", 100, true),
        ("bundles of 1,000", 1_000, true),
    ] {
        let store = Store::memory();
        let used = runtime.block_on(async {
            let settings = QueueSettings { receipts, ..QueueSettings::default() };
            let queue = Queue::create(&store, "q", settings).await?;
            let before = store.usage();
            player::push(queue.clone(), TASKS, 1, bundle).await?;
            let (done, _) = player::drain(&queue, 1).await?;
            ensure!(done == TASKS, "{done} tasks were done instead of {TASKS}");
            anyhow::Ok(store.usage().since(&before))
        })?;
        let per_task = |count: u64| count as f64 / TASKS as f64;
        let dollars = used.dollars(&Prices::of(Kind::S3)) * 1e6 / TASKS as f64;
        report.fact(
            format!("cost on S3, {name}, pushed and drained by one"),
            format!(
                "${dollars:.2} per million; per task {:.3} PUT, {:.3} GET, {:.3} HEAD, {:.3} LIST, \
                 {:.3} DELETE (free)",
                per_task(used.put),
                per_task(used.get),
                per_task(used.head),
                per_task(used.list),
                per_task(used.delete)
            ),
        );
    }
    Ok(())
}
