//! SQL over the indexes of a store: shards and inbox together, the latest record of each key, typed.
//!
//! SQLite does the SQL; every index is a virtual table (`table`) that reads the store as the query
//! goes along. A crate of its own, because SQLite takes a C compiler and a minute to build, and
//! not everybody asks questions in SQL.
//!
//! - `WHERE key = …` reads one shard;
//! - comparisons of numbers, and of texts for equality, are made before SQLite sees the row;
//! - only the fields that a query mentions are looked at;
//! - times are compared as times, however they are spelled (`time`);
//! - nothing is written: whatever is not a question is refused.
//!
//! For heavy analysis, DuckDB reads the same files: [`Index::duckdb_view`].

mod table;
mod time;

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use leasehold::index::{Index, IndexSettings};
use leasehold::{Error, ErrorKind, Result, Store};
use rusqlite::hooks::{AuthAction, AuthContext, Authorization};
use rusqlite::types::ValueRef;
use rusqlite::vtab::escape_double_quote;
use rusqlite::{Connection, ErrorCode};
use tokio::runtime::Handle;

/// A value of an answer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Value<'a> {
    /// Nothing.
    Null,
    /// A whole number.
    Integer(i64),
    /// Another number.
    Real(f64),
    /// Text.
    Text(&'a str),
    /// Bytes, which only functions of SQLite make.
    Blob(&'a [u8]),
}

/// Who takes an answer. Either may end the query with an error of its own.
pub trait Answer {
    /// What can go wrong with it.
    type Error: From<Error>;
    /// The names of the columns, once, before the rows.
    fn columns(&mut self, names: &[&str]) -> Result<(), Self::Error>;
    /// A row.
    fn row(&mut self, values: &[Value<'_>]) -> Result<(), Self::Error>;
}

/// The indexes of a store as a database.
#[derive(Debug)]
pub struct Database {
    connection: Connection,
    store: Store,
    runtime: Handle,
    settings: IndexSettings,
    parallel: usize,
    /// The indexes that are known, as they are spelled.
    names: RefCell<BTreeSet<String>>,
    /// The tables that a query reads, filled as it is prepared.
    read: Arc<Mutex<BTreeSet<String>>>,
}

impl Database {
    /// Of this store. Requests are made on `runtime`; the database itself is used from a thread that
    /// may block, outside of it. `parallel` shards are read at a time.
    pub fn new(
        store: &Store,
        runtime: Handle,
        settings: IndexSettings,
        parallel: usize,
    ) -> Result<Self> {
        let mut connection = Connection::open_in_memory().map_err(failed)?;
        connection.create_collation(time::COLLATION, time::compare).map_err(failed)?;
        let read: Arc<Mutex<BTreeSet<String>>> = Arc::default();
        let reads = read.clone();
        let judge = move |asked: AuthContext<'_>| judge(&asked.action, &reads);
        connection.authorizer(Some(judge)).map_err(failed)?;
        let (store, names) = (store.clone(), RefCell::default());
        Ok(Self { connection, store, runtime, settings, parallel, names, read })
    }

    /// Makes an index known under its name. [`Database::query`] does so for whatever a query names.
    pub fn add(&self, index: &Index) -> Result<()> {
        let name = index.name();
        let mut names = self.names.borrow_mut();
        if let Some(other) = names.iter().find(|other| *other != name && is_same(other, name)) {
            return Err(one_table(other, name));
        }
        let look = format!("SELECT 1 FROM \"{}\"", escape_double_quote(name));
        if !names.contains(name) && self.connection.prepare(&look).is_ok() {
            return Err(taken(name));
        }
        table::register(&self.connection, index, &self.runtime, self.parallel).map_err(failed)?;
        names.insert(name.to_owned());
        Ok(())
    }

    /// Runs a query and hands the answer over as it comes.
    pub fn query<A: Answer>(&self, sql: &str, answer: &mut A) -> Result<(), A::Error> {
        let mut statement = self.prepare(sql)?;
        let names: Vec<String> = statement.column_names().map(str::to_owned).collect();
        answer.columns(&names.iter().map(String::as_str).collect::<Vec<_>>())?;
        let mut rows = statement.query([]).map_err(failed)?;
        while let Some(found) = rows.next().map_err(failed)? {
            let mut values = Vec::with_capacity(names.len());
            for at in 0..names.len() {
                values.push(match found.get_ref(at).map_err(failed)? {
                    ValueRef::Null => Value::Null,
                    ValueRef::Integer(value) => Value::Integer(value),
                    ValueRef::Real(value) => Value::Real(value),
                    ValueRef::Text(text) => match std::str::from_utf8(text) {
                        Ok(text) => Value::Text(text),
                        Err(_) => Value::Blob(text),
                    },
                    ValueRef::Blob(bytes) => Value::Blob(bytes),
                });
            }
            answer.row(&values)?;
        }
        Ok(())
    }

    /// Refuses a query that may mean an index which SQLite takes for another, or for a table of its own:
    /// the answer would be the other's.
    fn tell_apart(&self, sql: &str) -> Result<()> {
        let read = std::mem::take(&mut *self.read.lock().unwrap_or_else(PoisonError::into_inner));
        for table in read {
            let ours = self.names.borrow().iter().any(|name| is_same(name, &table));
            let found = || self.runtime.block_on(Index::find(&self.store, &table));
            if !ours && let Ok(Some(_)) = found() {
                return Err(taken(&table));
            }
        }
        for name in &*self.names.borrow() {
            for spelled in other_spellings(sql, name) {
                // Not every word is an index, and not every text can be one.
                let found = self.runtime.block_on(Index::find(&self.store, spelled));
                if let Ok(Some(_)) = found {
                    return Err(one_table(name, spelled));
                }
            }
        }
        Ok(())
    }

    /// Prepares a query, opening the indexes that it names one by one as SQLite asks for them.
    fn prepare(&self, sql: &str) -> Result<rusqlite::Statement<'_>> {
        let mut opened: Vec<String> = Vec::new();
        loop {
            self.read.lock().unwrap_or_else(PoisonError::into_inner).clear();
            let error = match self.connection.prepare(sql) {
                Ok(statement) => {
                    if !statement.readonly() || statement.column_count() == 0 {
                        return Err(no_question());
                    }
                    self.tell_apart(sql)?;
                    return Ok(statement);
                }
                Err(error) => error,
            };
            let text = error.to_string();
            let Some(name) = missing_table(&text).filter(|name| !opened.contains(name)) else {
                return Err(failed(error));
            };
            let index = self.runtime.block_on(Index::open(&self.store, &name))?;
            self.add(&index.with_settings(self.settings.clone()))?;
            opened.push(name);
        }
    }
}

/// Allows what a question needs, and nothing that writes: there is nothing to write to but other files.
fn judge(asked: &AuthAction<'_>, read: &Mutex<BTreeSet<String>>) -> Authorization {
    match asked {
        AuthAction::Read { table_name, .. } => {
            let mut read = read.lock().unwrap_or_else(PoisonError::into_inner);
            if !read.contains(*table_name) {
                read.insert((*table_name).to_owned());
            }
            Authorization::Allow
        }
        AuthAction::Select | AuthAction::Function { .. } | AuthAction::Recursive => {
            Authorization::Allow
        }
        // What columns there are.
        AuthAction::Pragma { pragma_name, .. }
            if ["table_info", "table_xinfo"].iter().any(|name| is_same(name, pragma_name)) =>
        {
            Authorization::Allow
        }
        _ => Authorization::Deny,
    }
}

fn no_question() -> Error {
    let message =
        "only questions are answered, and nothing is written: SELECT, WITH, VALUES, EXPLAIN";
    Error::new(ErrorKind::Invalid, message)
}

/// Whether SQLite takes two names for one.
fn is_same(one: &str, other: &str) -> bool {
    one.eq_ignore_ascii_case(other)
}

fn one_table(one: &str, other: &str) -> Error {
    Error::new(
        ErrorKind::Invalid,
        format!(
            "the indexes {one:?} and {other:?} differ in case only, which SQL does not tell apart: \
             copy one of them to another name (index copy)"
        ),
    )
}

fn taken(name: &str) -> Error {
    Error::new(
        ErrorKind::Invalid,
        format!(
            "SQLite has a table {name:?} of its own, so the index of that name cannot be asked: copy it \
             to another name (index copy)"
        ),
    )
}

/// Where a name stands in a query, spelled in other ways than this.
fn other_spellings<'a>(sql: &'a str, name: &str) -> BTreeSet<&'a str> {
    let is_part = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_' || !byte.is_ascii();
    let (bytes, len) = (sql.as_bytes(), name.len());
    let starts = 0..(bytes.len() + 1).saturating_sub(len);
    let alone = |at: &usize| {
        let before = at.checked_sub(1).and_then(|before| bytes.get(before));
        !before.is_some_and(is_part) && !bytes.get(at + len).is_some_and(is_part)
    };
    let spelled = starts.filter(alone).filter_map(|at| sql.get(at..at + len));
    spelled.filter(|text| *text != name && is_same(text, name)).collect()
}

/// The table in "no such table: main.domains in SELECT …".
fn missing_table(message: &str) -> Option<String> {
    let (_, rest) = message.split_once("no such table: ")?;
    let rest = rest.split(" in ").next()?.trim();
    let name = rest.strip_prefix("main.").or_else(|| rest.strip_prefix("temp.")).unwrap_or(rest);
    Some(name.to_owned())
}

fn failed(error: rusqlite::Error) -> Error {
    if error.sqlite_error_code() == Some(ErrorCode::AuthorizationForStatementDenied) {
        return no_question();
    }
    let kind = match &error {
        // What our table said: the store's trouble.
        rusqlite::Error::ModuleError(_) => ErrorKind::Unavailable,
        _ => ErrorKind::Invalid,
    };
    Error::new(kind, error.to_string())
}
