//! Asks in SQL.

use std::time::Instant;

use anyhow::{Result, ensure};
use leasehold_sql::{Answer, Database, Value};

use super::{data, lookup};
use crate::report::{Report, Row, Target, Unit};
use crate::rig::Rig;
use crate::stats::Pairs;

#[derive(Default)]
struct Sum(i64, u64);

impl Answer for Sum {
    type Error = anyhow::Error;
    fn columns(&mut self, _: &[&str]) -> Result<()> {
        Ok(())
    }
    fn row(&mut self, row: &[Value<'_>]) -> Result<()> {
        self.1 += 1;
        if let [.., Value::Integer(count)] = row {
            self.0 += count;
        }
        Ok(())
    }
}

const AGGREGATE: &str = "select scraper_version, count(*) from";

pub fn run(rig: &Rig, report: &mut Report) -> Result<()> {
    let runtime = rig.runtime()?;
    let base = data::base(rig, &runtime)?;
    let store = data::open(&base)?;
    let records = data::size(rig).records;
    let index = data::open_index(&runtime, &base)?;
    let database = Database::new(&store, runtime.handle().clone(), Default::default(), 2)?;
    database.add(&index)?;
    let native = lookup::sqlite(rig, &base)?;
    let pairs = Pairs::measure(
        rig.pairs(),
        || {
            let start = Instant::now();
            let mut sum = Sum::default();
            database.query(&format!("{AGGREGATE} {} group by 1", data::NAME), &mut sum)?;
            ensure!(sum.0 == records as i64);
            Ok(start.elapsed().as_secs_f64() * 1e3)
        },
        || {
            let start = Instant::now();
            let mut select = native.prepare(&format!("{AGGREGATE} d group by 1"))?;
            let mut rows = select.query([])?;
            let mut sum = 0;
            while let Some(row) = rows.next()? {
                sum += row.get::<_, i64>(1)?;
            }
            ensure!(sum == records as i64);
            Ok(start.elapsed().as_secs_f64() * 1e3)
        },
    )?;
    let row = Row::new(
        "SQL, count by version over all",
        Unit::Millis,
        pairs,
        "SQLite on a table of its own",
    );
    report.add(row.target(Target::Ratio(0.667)));
    std::thread::sleep(std::time::Duration::from_secs(3));
    let mut times = Vec::new();
    for n in 0..200 {
        let key = data::domain(n * 4999 % records);
        let sql = format!("select * from {} where domain = '{key}'", data::NAME);
        let start = Instant::now();
        let mut sum = Sum::default();
        database.query(&sql, &mut sum)?;
        times.push(start.elapsed().as_secs_f64() * 1e3);
        ensure!(sum.1 == 1);
    }
    let by_key = crate::stats::median(&times);
    report.fact(
        "SQL, WHERE key = …, prepared anew each time",
        format!("{:.1} µs median", by_key * 1e3),
    );
    if let Some(theirs) = duckdb(&base, &data::domain(4999))? {
        report.fact(
            "the same by DuckDB over all shards",
            format!("{theirs:.0} ms median, {:.0} × ours (target: 50 ×)", theirs / by_key),
        );
    }
    Ok(())
}

/// DuckDB on the same files, if it is installed.
fn duckdb(base: &std::path::Path, key: &str) -> Result<Option<f64>> {
    let python = leasehold_testkit::servers::servers_folder().join("readers/bin/python3");
    if !python.exists() {
        return Ok(None);
    }
    let script = format!(
        "import duckdb, time, statistics\n\
         c = duckdb.connect(); c.execute('set threads=2'); t = []\n\
         for _ in range(7):\n    \
             s = time.perf_counter()\n    \
             r = c.execute(\"select * from read_csv('{}/shards/*.usv', delim=chr(31), quote='', escape='', \
             header=false, auto_detect=false, null_padding=true, columns={{'domain':'VARCHAR','name':'VARCHAR',\
             'v':'BIGINT','t':'VARCHAR','d':'BOOLEAN'}}) where domain = '{key}'\").fetchall()\n    \
             assert len(r) == 1; t.append(time.perf_counter() - s)\n\
         print(statistics.median(t) * 1e3)",
        data::folder(base).display()
    );
    let done = std::process::Command::new(python).args(["-c", &script]).output()?;
    ensure!(done.status.success(), "DuckDB: {}", String::from_utf8_lossy(&done.stderr));
    Ok(Some(String::from_utf8(done.stdout)?.trim().parse()?))
}
