//! The index on an S3 server: what it takes in time, requests and bytes.

use std::time::Instant;

use anyhow::{Context as _, Result};
use leasehold::Store;
use leasehold::index::{Freshness, Index};
use leasehold::store::Kind;
use leasehold::store::meter::{Prices, Usage};

use super::data;
use crate::bucket::{Place, seaweedfs};
use crate::report::{Report, thousands};
use crate::rig::Rig;
use crate::stats::median;

pub fn run(rig: &Rig, report: &mut Report) -> Result<()> {
    let Some(server) = seaweedfs(rig, report, "the index on SeaweedFS")? else { return Ok(()) };
    let place = Place::on(&server);
    let store = place.open()?;
    let records = rig.pick(1_000_000, 50_000);
    rig.runtime()?.block_on(async {
        let index = data::create(&store).await?;
        let mut bench =
            Bench { report, store: &store, before: store.usage(), start: Instant::now() };
        data::import(&index, records).await?;
        bench.tell(format!("import of {} rows", thousands(records as f64)));
        index.compact().await?.into_result()?;
        bench.tell("compaction, the first".to_owned());
        let mut batch = index.batch().await?;
        for n in 0..records / 10 {
            batch.put_row(data::update(n * 10).trim_end().as_bytes())?;
        }
        batch.flush().await?;
        bench.tell(format!("put of {} updates in batches", thousands((records / 10) as f64)));
        index.compact().await?.into_result()?;
        bench.tell("compaction of those".to_owned());
        for n in 0..50 {
            let mut batch = index.batch().await?;
            batch.put_row(data::update(n * 13).trim_end().as_bytes())?;
            batch.flush().await?;
        }
        bench.tell("50 single puts".to_owned());
        index.compact().await?.into_result()?;
        bench.tell("compaction of those".to_owned());
        let keys: Vec<String> = (0..50).map(|n| data::domain(n * 7919 % records)).collect();
        for (name, freshness, cold) in [
            ("lookup, cold", Freshness::Checked, true),
            ("lookup, warm, checked", Freshness::Checked, false),
            ("lookup, warm, stale-ok", Freshness::StaleOk, false),
        ] {
            lookups(&mut bench, name, &index, &keys, freshness, cold).await?;
        }
        anyhow::Ok(())
    })
}

async fn lookups(
    bench: &mut Bench<'_>,
    name: &str,
    index: &Index,
    keys: &[String],
    freshness: Freshness,
    cold: bool,
) -> Result<()> {
    let (mut millis, mut used) = (Vec::new(), Usage::default());
    for key in keys {
        let fresh = Index::open(bench.store, data::NAME).await?;
        let index = if cold { &fresh } else { index };
        // The first look reads little and keeps nothing, the second keeps the shard.
        for _ in 0..if cold { 0 } else { 2 } {
            index.get_row(key, freshness).await?;
        }
        let (before, start) = (bench.store.usage(), Instant::now());
        let found = index.get_row(key, freshness).await?;
        millis.push(start.elapsed().as_secs_f64() * 1e3);
        used = used.plus(&bench.store.usage().since(&before));
        found.context("a record is missing")?;
    }
    let each = |count: u64| count as f64 / keys.len() as f64;
    bench.report.fact(
        format!("SeaweedFS: {name}"),
        format!(
            "{:.2} ms median; {:.2} LIST, {:.2} GET, {} bytes received",
            median(&millis),
            each(used.list),
            each(used.get),
            thousands(each(used.bytes_received))
        ),
    );
    Ok(())
}

/// What was used since the last step.
struct Bench<'a> {
    report: &'a mut Report,
    store: &'a Store,
    before: Usage,
    start: Instant,
}

impl Bench<'_> {
    fn tell(&mut self, name: String) {
        let used = self.store.usage().since(&self.before);
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        self.report.fact(
            format!("SeaweedFS: {name}"),
            format!(
                "{:.2} s; {} PUT, {} GET, {} LIST, {} DELETE, {} else; {:.1} MiB sent, {:.1} received; \
                 ${:.4}",
                self.start.elapsed().as_secs_f64(),
                used.put,
                used.get,
                used.list,
                used.delete,
                used.head + used.other,
                mib(used.bytes_sent),
                mib(used.bytes_received),
                used.dollars(&Prices::of(Kind::S3))
            ),
        );
        (self.before, self.start) = (self.store.usage(), Instant::now());
    }
}
