//! An index as a virtual table of SQLite.

// SQLite calls back through C. The traits are unsafe because the structs must begin with what SQLite
// expects there: `#[repr(C)]` and the first field, below.
#![allow(unsafe_code)]

use std::borrow::Cow;
use std::ffi::{CStr, CString, c_int};
use std::marker::PhantomData;
use std::sync::Arc;

use leasehold::index::{Chunk, FieldKind, Freshness, Index, Scan, Schema};
use leasehold::protocol::format::{row, usv};
use leasehold::protocol::shard::KeyHash;
use rusqlite::types::{Null, ValueRef};
use rusqlite::vtab::{
    Context, Filters, IndexConstraintOp, IndexInfo, Module, VTab, VTabConnection, VTabCursor,
    escape_double_quote,
};
use rusqlite::{Connection, Error, Result, ffi};
use tokio::runtime::Handle;

use crate::time;

/// What a table needs to know.
#[derive(Debug, Clone)]
struct Aux {
    index: Index,
    runtime: Handle,
    parallel: usize,
}

/// Makes an index a table with its name.
pub fn register(
    connection: &Connection,
    index: &Index,
    runtime: &Handle,
    parallel: usize,
) -> Result<()> {
    let aux = Aux { index: index.clone(), runtime: runtime.clone(), parallel };
    const MODULE: Module<'_, Table> = Module::eponymous_only_module();
    connection.create_module(index.name(), &MODULE, Some(aux))
}

#[repr(C)]
struct Table {
    /// SQLite's own part: it must come first.
    base: ffi::sqlite3_vtab,
    aux: Aux,
    schema: Arc<Schema>,
}

/// How a query goes about it: by key, or over everything.
const BY_KEY: c_int = 1;

// SAFETY: `Table` is `repr(C)` and begins with `sqlite3_vtab`.
unsafe impl<'vtab> VTab<'vtab> for Table {
    type Aux = Aux;
    type Cursor = Cursor<'vtab>;

    fn connect(
        _: &mut VTabConnection,
        aux: Option<&Aux>,
        _: &[u8],
        _: &[u8],
        _: &[u8],
        _: &[&[u8]],
    ) -> Result<(Cow<'static, CStr>, Self)> {
        let aux = aux.ok_or_else(|| module("no index"))?.clone();
        let schema = aux.index.schema();
        let columns: Vec<String> = schema
            .fields()
            .iter()
            .map(|field| {
                let kind = match field.kind {
                    FieldKind::Integer => "INTEGER",
                    FieldKind::Number => "REAL",
                    FieldKind::Boolean => "BOOLEAN",
                    // Columns of type DATE would be numbers to SQLite, and every date above '2027'.
                    FieldKind::Date | FieldKind::Datetime => "TEXT",
                    FieldKind::String | FieldKind::Object | FieldKind::Array => "TEXT",
                };
                let hidden = match field.name == schema.fields()[schema.deleted()].name {
                    true => " HIDDEN",
                    false => "",
                };
                let collation = match field.kind {
                    FieldKind::Datetime => format!(" COLLATE {}", time::COLLATION),
                    _ => String::new(),
                };
                format!("\"{}\" {kind}{collation}{hidden}", escape_double_quote(&field.name))
            })
            .collect();
        let sql = CString::new(format!("CREATE TABLE x({})", columns.join(", ")))
            .map_err(|_| module("a field has a name that SQL cannot hold"))?;
        let table = Self { base: ffi::sqlite3_vtab::default(), aux, schema };
        Ok((Cow::Owned(sql), table))
    }

    fn best_index(&self, info: &mut IndexInfo) -> Result<bool> {
        let mut by_key = None;
        let mut filters: Vec<(usize, c_int, char)> = Vec::new();
        for (at, constraint) in info.constraints().enumerate() {
            let column = constraint.column();
            let Some(field) =
                usize::try_from(column).ok().and_then(|c| self.schema.fields().get(c))
            else {
                continue;
            };
            if !constraint.is_usable() {
                continue;
            }
            let binary = info.collation(at).is_ok_and(|collation| collation == "BINARY");
            let op = match constraint.operator() {
                IndexConstraintOp::SQLITE_INDEX_CONSTRAINT_EQ => '=',
                IndexConstraintOp::SQLITE_INDEX_CONSTRAINT_GT => '>',
                IndexConstraintOp::SQLITE_INDEX_CONSTRAINT_GE => 'g',
                IndexConstraintOp::SQLITE_INDEX_CONSTRAINT_LT => '<',
                IndexConstraintOp::SQLITE_INDEX_CONSTRAINT_LE => 'l',
                _ => continue,
            };
            if column == 0 && op == '=' && binary && by_key.is_none() {
                by_key = Some(at);
            } else if field.kind == FieldKind::Integer
                || (op == '=' && binary && field.kind == FieldKind::String)
            {
                filters.push((at, column, op));
            }
        }
        // SQLite checks every row again: what is left to us is only what saves work.
        if let Some(at) = by_key {
            info.constraint_usage(at).set_argv_index(1);
            info.set_idx_num(BY_KEY);
            info.set_estimated_cost(100.0);
            info.set_estimated_rows(1);
            return Ok(true);
        }
        let mut plan = format!("{:x}", info.col_used());
        for (number, (at, column, op)) in filters.iter().enumerate() {
            info.constraint_usage(*at).set_argv_index(number as c_int + 1);
            plan.push_str(&format!(" {column}{op}"));
        }
        info.set_idx_str(&plan);
        info.set_estimated_cost(1e9 / (filters.len() + 1) as f64);
        info.set_estimated_rows(1_000_000 / (10 * filters.len() as i64 + 1));
        Ok(true)
    }

    fn open(&'vtab mut self) -> Result<Cursor<'vtab>> {
        Ok(Cursor {
            base: ffi::sqlite3_vtab_cursor::default(),
            aux: self.aux.clone(),
            schema: self.schema.clone(),
            rows: Rows::None,
            filters: Vec::new(),
            fields: Vec::new(),
            at: 0,
            done: true,
            _table: PhantomData,
        })
    }
}

#[repr(C)]
struct Cursor<'vtab> {
    /// SQLite's own part: it must come first.
    base: ffi::sqlite3_vtab_cursor,
    aux: Aux,
    schema: Arc<Schema>,
    rows: Rows,
    filters: Vec<Filter>,
    /// Where the fields of the current row begin and end.
    fields: Vec<(u32, u32)>,
    /// Where the next row begins.
    at: usize,
    done: bool,
    _table: PhantomData<&'vtab Table>,
}

enum Rows {
    None,
    One(Vec<u8>),
    Scan { scan: Box<Scan>, chunk: Chunk },
}

impl Rows {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::None => &[],
            Self::One(row) => row,
            Self::Scan { chunk, .. } => &chunk.rows,
        }
    }
}

/// A comparison that a row must pass.
struct Filter {
    column: usize,
    op: u8,
    with: Operand,
}

enum Operand {
    Integer(i64),
    Text(Vec<u8>),
}

impl Filter {
    fn passes(&self, field: &[u8]) -> bool {
        match &self.with {
            Operand::Text(text) => match memchr::memchr(usv::ESCAPE, field) {
                None => field == &text[..],
                Some(_) => {
                    let field = String::from_utf8_lossy(field);
                    usv::unescape(&field).as_bytes() == &text[..]
                }
            },
            Operand::Integer(other) => {
                let Some(value) = integer(field) else {
                    // NULL compares with nothing; other text is SQLite's to judge.
                    return !field.is_empty();
                };
                match self.op {
                    b'=' => value == *other,
                    b'>' => value > *other,
                    b'g' => value >= *other,
                    b'<' => value < *other,
                    _ => value <= *other,
                }
            }
        }
    }
}

/// Nothing equals this.
struct NoKey;

/// The whole number that this one is.
fn whole(number: f64) -> Result<String, NoKey> {
    // Beyond this, numbers are not told apart any more.
    match number.fract() == 0.0 && number.abs() <= 9_007_199_254_740_992.0 {
        true => Ok(format!("{number:.0}")),
        false => Err(NoKey),
    }
}

fn integer(field: &[u8]) -> Option<i64> {
    if field.len() < 18 && !field.is_empty() && field.iter().all(u8::is_ascii_digit) {
        return Some(field.iter().fold(0, |sum, digit| sum * 10 + i64::from(digit - b'0')));
    }
    std::str::from_utf8(field).ok()?.parse().ok()
}

impl Cursor<'_> {
    fn field(&self, at: usize) -> &[u8] {
        let Some((from, to)) = self.fields.get(at) else { return &[] };
        &self.rows.bytes()[*from as usize..*to as usize]
    }

    /// Goes on to the next record that passes the filters.
    fn advance(&mut self) -> Result<()> {
        loop {
            while self.split() {
                let deleted = row::is_true(self.field(self.schema.deleted()));
                let passes =
                    self.filters.iter().all(|filter| filter.passes(self.field(filter.column)));
                if !deleted && passes {
                    return Ok(());
                }
            }
            let Rows::Scan { scan, chunk } = &mut self.rows else { break };
            match scan.blocking_next().map_err(of_store)? {
                Some(next) => (*chunk, self.at) = (next, 0),
                None => break,
            }
        }
        self.done = true;
        Ok(())
    }

    /// Finds the fields of the next row, if there is one in what was read.
    fn split(&mut self) -> bool {
        let bytes = self.rows.bytes();
        if self.at >= bytes.len() {
            return false;
        }
        self.fields.clear();
        let mut from = self.at;
        for place in memchr::memchr2_iter(usv::UNIT, usv::END, &bytes[self.at..]) {
            let to = self.at + place;
            self.fields.push((from as u32, to as u32));
            from = to + 1;
            if bytes[to] == usv::END {
                self.at = from;
                // Other tools end records with a carriage return, too. Ours never end so.
                if to > 0 && bytes[to - 1] == b'\r' {
                    self.trim();
                }
                return true;
            }
        }
        self.fields.push((from as u32, bytes.len() as u32));
        self.at = bytes.len();
        true
    }

    #[cold]
    fn trim(&mut self) {
        if let Some((from, to)) = self.fields.last_mut()
            && from < to
        {
            *to -= 1;
        }
    }

    /// The key that equals this value by SQLite's rules, or `None` where that takes looking at all.
    fn key(&self, value: ValueRef<'_>) -> Result<Option<String>, NoKey> {
        let integer = self.schema.key().kind == FieldKind::Integer;
        Ok(match value {
            ValueRef::Text(text) if !integer => Some(String::from_utf8_lossy(text).into_owned()),
            ValueRef::Integer(number) => Some(number.to_string()),
            // A number in a text counts as that number.
            ValueRef::Text(text) => {
                let text = String::from_utf8_lossy(text);
                let text = text.trim_matches([' ', '\t', '\n', '\r', '\x0b', '\x0c']);
                match text.parse::<i64>() {
                    Ok(number) => Some(number.to_string()),
                    Err(_) => Some(whole(text.parse().map_err(|_| NoKey)?)?),
                }
            }
            ValueRef::Real(number) if integer => Some(whole(number)?),
            // How SQLite writes this number is its own business: it compares.
            ValueRef::Real(_) => None,
            ValueRef::Null | ValueRef::Blob(_) => return Err(NoKey),
        })
    }
}

// SAFETY: `Cursor` is `repr(C)` and begins with `sqlite3_vtab_cursor`.
unsafe impl VTabCursor for Cursor<'_> {
    fn filter(&mut self, how: c_int, plan: Option<&str>, args: &Filters<'_>) -> Result<()> {
        (self.rows, self.at, self.done) = (Rows::None, 0, false);
        self.filters.clear();
        let Aux { index, runtime, parallel } = &self.aux;
        if how == BY_KEY {
            match args.iter().next().map_or(Err(NoKey), |value| self.key(value)) {
                Err(NoKey) => {
                    self.done = true;
                    return Ok(());
                }
                Ok(Some(key)) => {
                    let found = match index.schema().normalise_key(&key) {
                        Ok(_) => runtime.block_on(index.get_row(&key, Freshness::Checked)),
                        Err(_) => Ok(None),
                    };
                    if let Some(row) = found.map_err(of_store)? {
                        self.rows = Rows::One(row.to_vec());
                    }
                    return self.advance();
                }
                Ok(None) => {}
            }
        }
        let steps = plan.unwrap_or_default().split(' ').skip(1);
        for (step, value) in steps.zip(args.iter()) {
            let (column, op) = step.split_at(step.len().saturating_sub(1));
            let (Ok(column), Some(op)) = (column.parse::<usize>(), op.bytes().next()) else {
                continue;
            };
            let text = self.schema.fields()[column].kind == FieldKind::String;
            let with = match value {
                ValueRef::Integer(number) if !text => Operand::Integer(number),
                ValueRef::Text(value) if text && !value.is_empty() => Operand::Text(value.to_vec()),
                _ => continue,
            };
            self.filters.push(Filter { column, op, with });
        }
        let scan = runtime.block_on(index.scan(*parallel)).map_err(of_store)?;
        let shard = index.shards().next().ok_or_else(|| module("no shards"))?;
        let chunk = Chunk { shard, rows: Default::default() };
        self.rows = Rows::Scan { scan: Box::new(scan), chunk };
        self.advance()
    }

    fn next(&mut self) -> Result<()> {
        self.advance()
    }

    fn eof(&self) -> bool {
        self.done
    }

    fn column(&self, context: &mut Context, column: c_int) -> Result<()> {
        let at = usize::try_from(column).unwrap_or(usize::MAX);
        let field = self.field(at);
        if field.is_empty() {
            return context.set_result(Null);
        }
        let kind = self.schema.fields().get(at).map(|field| field.kind);
        match kind {
            Some(FieldKind::Integer) => {
                if let Some(number) = integer(field) {
                    return context.set_result(number);
                }
            }
            Some(FieldKind::Number) => {
                let number =
                    std::str::from_utf8(field).ok().and_then(|text| text.parse::<f64>().ok());
                if let Some(number) = number {
                    return context.set_result(number);
                }
            }
            Some(FieldKind::Boolean) => match field {
                b"true" => return context.set_result(true),
                b"false" => return context.set_result(false),
                _ => {}
            },
            _ => {}
        }
        match std::str::from_utf8(field) {
            Ok(text) => context.set_result(&*usv::unescape(text)),
            Err(_) => context.set_result(field),
        }
    }

    /// The same for a record in every scan of a query: SQLite tells by it which of them `a OR b` has
    /// found already.
    fn rowid(&self) -> Result<i64> {
        let hash = KeyHash::of_field(self.field(0));
        Ok(hash.number())
    }
}

fn module(message: &str) -> Error {
    Error::ModuleError(message.to_owned())
}

fn of_store(error: leasehold::Error) -> Error {
    Error::ModuleError(error.to_string())
}
