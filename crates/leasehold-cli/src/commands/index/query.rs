//! `leasehold index query`.

use std::io::{BufWriter, Write as _};

use leasehold::Store;
use leasehold_sql::{Answer, Database, Value};
use serde_json::Map;

use super::settings;
use crate::args::Args;
use crate::args::index::AnswerFormat;
use crate::exit::Exit;
use crate::render;

/// Asks and prints the answer as it comes; a table for people needs all of it first.
pub async fn query(
    args: &Args,
    store: &Store,
    sql: &str,
    format: Option<AnswerFormat>,
) -> anyhow::Result<Exit> {
    let usual = if args.json { AnswerFormat::Jsonl } else { AnswerFormat::Table };
    let format = format.unwrap_or(usual);
    let (store, sql) = (store.clone(), sql.to_owned());
    let runtime = tokio::runtime::Handle::current();
    // SQLite blocks; the requests go on beside it.
    tokio::task::spawn_blocking(move || {
        let database = Database::new(&store, runtime, settings(), 4)?;
        match format {
            AnswerFormat::Table => {
                let mut table = Table::default();
                database.query(&sql, &mut table)?;
                table.print()?;
            }
            AnswerFormat::Csv => {
                let mut csv = Csv(csv::Writer::from_writer(std::io::stdout().lock()));
                database.query(&sql, &mut csv)?;
                csv.0.flush()?;
            }
            AnswerFormat::Jsonl => {
                let out = BufWriter::new(std::io::stdout().lock());
                let mut lines = Lines { out, names: Vec::new() };
                database.query(&sql, &mut lines)?;
                lines.out.flush()?;
            }
        }
        Ok(Exit::Done)
    })
    .await?
}

fn text(value: &Value<'_>) -> String {
    match value {
        Value::Null => String::new(),
        Value::Integer(number) => number.to_string(),
        Value::Real(number) => number.to_string(),
        Value::Text(text) => (*text).to_owned(),
        Value::Blob(bytes) => String::from_utf8_lossy(bytes).into_owned(),
    }
}

#[derive(Default)]
struct Table {
    names: Vec<String>,
    rows: Vec<Vec<String>>,
    /// Which columns hold nothing but numbers.
    numbers: Vec<bool>,
}

impl Answer for Table {
    type Error = anyhow::Error;

    fn columns(&mut self, names: &[&str]) -> anyhow::Result<()> {
        self.names = names.iter().map(|name| (*name).to_owned()).collect();
        self.numbers = vec![true; names.len()];
        Ok(())
    }

    fn row(&mut self, row: &[Value<'_>]) -> anyhow::Result<()> {
        for (number, value) in self.numbers.iter_mut().zip(row) {
            *number &= matches!(value, Value::Null | Value::Integer(_) | Value::Real(_));
        }
        // Control characters would tear the table apart.
        let clean = |value| text(value).replace(|c: char| c.is_control(), " ");
        self.rows.push(row.iter().map(clean).collect());
        Ok(())
    }
}

impl Table {
    fn print(self) -> anyhow::Result<()> {
        let names: Vec<&str> = self.names.iter().map(String::as_str).collect();
        let mut table = render::table(&names, &[]);
        table.add_rows(self.rows);
        for (at, _) in self.numbers.iter().enumerate().filter(|(_, number)| **number) {
            if let Some(column) = table.column_mut(at) {
                column.set_cell_alignment(comfy_table::CellAlignment::Right);
            }
        }
        render::line(&table)
    }
}

struct Csv<W: std::io::Write>(csv::Writer<W>);

impl<W: std::io::Write> Answer for Csv<W> {
    type Error = anyhow::Error;

    fn columns(&mut self, names: &[&str]) -> anyhow::Result<()> {
        Ok(self.0.write_record(names)?)
    }

    fn row(&mut self, row: &[Value<'_>]) -> anyhow::Result<()> {
        Ok(self.0.write_record(row.iter().map(text))?)
    }
}

struct Lines<W: std::io::Write> {
    out: W,
    names: Vec<String>,
}

impl<W: std::io::Write> Answer for Lines<W> {
    type Error = anyhow::Error;

    fn columns(&mut self, names: &[&str]) -> anyhow::Result<()> {
        // Two columns of one name, as joins have them, would be one value.
        self.names.clear();
        for name in names {
            let numbered = (2..).map(|number| format!("{name}_{number}"));
            let mut spellings = std::iter::once((*name).to_owned()).chain(numbered);
            let is_free = |spelled: &String| {
                !self.names.contains(spelled) && (spelled == name || !names.contains(&&**spelled))
            };
            self.names.extend(spellings.find(is_free));
        }
        Ok(())
    }

    fn row(&mut self, row: &[Value<'_>]) -> anyhow::Result<()> {
        let mut record = Map::new();
        for (name, value) in self.names.iter().zip(row) {
            let value = match value {
                Value::Null => serde_json::Value::Null,
                Value::Integer(number) => (*number).into(),
                Value::Real(number) => (*number).into(),
                Value::Text(text) => (*text).into(),
                Value::Blob(bytes) => String::from_utf8_lossy(bytes).into(),
            };
            record.insert(name.clone(), value);
        }
        serde_json::to_writer(&mut self.out, &record)?;
        Ok(self.out.write_all(b"\n")?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Joins have columns of the same name: each of them keeps its value.
    #[test]
    fn columns_of_one_name_keep_their_values() {
        let mut lines = Lines { out: Vec::new(), names: Vec::new() };
        lines.columns(&["domain", "n", "domain", "domain_2", "domain", "Domain"]).unwrap();
        let values: Vec<_> = (0..6).map(Value::Integer).collect();
        lines.row(&values).unwrap();
        let line: serde_json::Value = serde_json::from_slice(&lines.out).unwrap();
        let expected = serde_json::json!({
            "domain": 0, "n": 1, "domain_3": 2, "domain_2": 3, "domain_4": 4, "Domain": 5,
        });
        assert_eq!(line, expected);
    }
}
