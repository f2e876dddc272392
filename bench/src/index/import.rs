//! Takes in 1,000,000 rows, to disk: put in batches, then compacted; beside SQLite, which takes the
//! same rows in one transaction into a table with the same primary key.

use std::time::Instant;

use anyhow::Result;
use rusqlite::Connection;

use super::data;
use crate::report::{Report, Row, Unit};
use crate::rig::Rig;
use crate::stats::Pairs;

const FLOOR: &str = "SQLite, WAL, synchronous=full, the same rows in one transaction";

pub fn run(rig: &Rig, report: &mut Report) -> Result<()> {
    let runtime = rig.runtime()?;
    let records = rig.pick(1_000_000, 100_000);
    let path = rig.path().join("import");
    let mut put = Vec::new();
    let pairs = Pairs::measure(
        rig.pick(3, 2),
        || {
            let store = data::open(&path)?;
            let start = Instant::now();
            runtime.block_on(async {
                let index = data::create(&store).await?;
                data::import(&index, records).await?;
                put.push(records as f64 / start.elapsed().as_secs_f64());
                index.compact().await?.into_result()?;
                anyhow::Ok(())
            })?;
            let rate = records as f64 / start.elapsed().as_secs_f64();
            std::fs::remove_dir_all(&path)?;
            Ok(rate)
        },
        || {
            std::fs::create_dir_all(&path)?;
            let rate = sqlite(&path.join("rows.db"), records);
            std::fs::remove_dir_all(&path)?;
            rate
        },
    )?;
    let name = format!("import of {} rows, compacted", crate::report::thousands(records as f64));
    let note =
        format!("put alone: {} rows/s", crate::report::thousands(crate::stats::median(&put)));
    report.add(Row::new(name, Unit::Rate, pairs, FLOOR).note(note));
    Ok(())
}

/// Rows per second.
fn sqlite(path: &std::path::Path, records: u64) -> Result<f64> {
    let mut database = Connection::open(path)?;
    database.pragma_update(None, "journal_mode", "wal")?;
    database.execute_batch(
        "create table d(domain text primary key, company_name text, scraper_version int, \
         updated_at text) without rowid",
    )?;
    let start = Instant::now();
    let transaction = database.transaction()?;
    {
        let mut insert = transaction.prepare("insert into d values(?,?,?,?)")?;
        for n in 0..records {
            let row = data::base_row(n);
            let fields: Vec<&str> = row.trim_end().split('\u{1f}').collect();
            insert.execute((fields[0], fields[1], fields[2].parse::<i64>()?, fields[3]))?;
        }
    }
    transaction.commit()?;
    Ok(records as f64 / start.elapsed().as_secs_f64())
}
