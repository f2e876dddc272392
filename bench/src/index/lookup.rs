//! Looks single records up, warm and cold.

use std::time::Instant;

use anyhow::{Context, Result};
use leasehold::index::{Freshness, Shard, Width};
use rusqlite::Connection;

use super::data;
use crate::report::{Report, Row, Target, Unit};
use crate::rig::Rig;
use crate::stats::{Pairs, median};

pub fn run(rig: &Rig, report: &mut Report) -> Result<()> {
    let runtime = rig.single_threaded()?;
    let base = data::base(rig, &runtime)?;
    let records = data::size(rig).records;
    let keys: Vec<String> = (0..500).map(|n| data::domain(n * 7919 % records)).collect();
    let database = sqlite(rig, &base)?;
    let mut select = database.prepare("select * from d where domain = ?")?;
    let plain = rig.path().join("plain");
    data::linked(&base, &plain)?;
    let package = data::folder(&plain).join("datapackage.json");
    let text = std::fs::read_to_string(&package)?;
    std::fs::write(&package, text.replace("\"flat_inbox\": true", "\"flat_inbox\": false"))?;
    // A change of the last seconds would have to be looked at more closely.
    std::thread::sleep(std::time::Duration::from_secs(3));
    for (name, path) in
        [("lookup, warm, freshness checked", &plain), ("lookup, warm, with the flat inbox", &base)]
    {
        let index = data::open_index(&runtime, path)?;
        let warm = Pairs::measure(
            rig.pairs(),
            || {
                let mut times = Vec::new();
                runtime.block_on(async {
                    for key in &keys {
                        index.get_row(key, Freshness::Checked).await?;
                    }
                    for key in &keys {
                        let start = Instant::now();
                        let found = index.get_row(key, Freshness::Checked).await?;
                        times.push(start.elapsed().as_secs_f64() * 1e3);
                        found.context("a record is missing")?;
                    }
                    anyhow::Ok(median(&times))
                })
            },
            || {
                let mut times = Vec::new();
                for key in &keys {
                    let start = Instant::now();
                    let found: Vec<String> = select
                        .query_row([key], |row| Ok(vec![row.get(0)?, row.get(1)?, row.get(3)?]))?;
                    times.push(start.elapsed().as_secs_f64() * 1e3);
                    std::hint::black_box(found);
                }
                Ok(median(&times))
            },
        )?;
        let micros = (median(&warm.ours) * 1e3, median(&warm.floor) * 1e3);
        let row = Row::new(name, Unit::Millis, warm, "SQLite by primary key, prepared, WAL");
        let note = format!("{:.1} µs against {:.1} µs", micros.0, micros.1);
        report.add(row.target(Target::Ratio(1.0)).note(note));
    }
    let cold = Pairs::measure(
        rig.pairs(),
        || {
            let mut times = Vec::new();
            for key in &keys[..60] {
                let index = data::open_index(&runtime, &base)?;
                let start = Instant::now();
                let found = runtime.block_on(index.get_row(key, Freshness::Checked))?;
                times.push(start.elapsed().as_secs_f64() * 1e3);
                found.context("a record is missing")?;
            }
            Ok(median(&times))
        },
        || {
            let mut times = Vec::new();
            for key in &keys[..60] {
                let shard = Shard::of(key, Width::USUAL);
                let path = data::folder(&base).join(format!("shards/{shard}.usv"));
                let start = Instant::now();
                std::hint::black_box(std::fs::read(path)?);
                times.push(start.elapsed().as_secs_f64() * 1e3);
            }
            Ok(median(&times))
        },
    )?;
    let row = Row::new("lookup, nothing cached", Unit::Millis, cold, "reading the shard's file");
    report.add(row.target(Target::Ratio(0.667)));
    Ok(())
}

/// The same records in a table of SQLite's own.
pub fn sqlite(rig: &Rig, base: &std::path::Path) -> Result<Connection> {
    let path = rig.path().join("sqlite.db");
    let ready = path.exists();
    let mut database = Connection::open(path)?;
    database.pragma_update(None, "journal_mode", "wal")?;
    if ready {
        return Ok(database);
    }
    database.execute_batch(
        "create table d(domain text primary key, company_name text, scraper_version int, \
         updated_at text) without rowid",
    )?;
    let transaction = database.transaction()?;
    {
        let mut rows = Vec::new();
        for shard in Width::USUAL.all() {
            let path = data::folder(base).join(format!("shards/{shard}.usv"));
            rows.extend(std::fs::read_to_string(path)?.lines().map(str::to_owned));
        }
        rows.sort_unstable();
        let mut insert = transaction.prepare("insert into d values(?,?,?,?)")?;
        for row in &rows {
            let fields: Vec<&str> = row.split('\u{1f}').collect();
            insert.execute((fields[0], fields[1], fields[2].parse::<i64>()?, fields[3]))?;
        }
    }
    transaction.commit()?;
    database.execute_batch("pragma wal_checkpoint(truncate)")?;
    Ok(database)
}
