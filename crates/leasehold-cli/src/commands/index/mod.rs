//! `leasehold index`.

mod compile;
mod look;
#[cfg(feature = "sql")]
mod query;
mod tabular;
mod transfer;

use std::io::Read as _;
use std::path::Path;

use anyhow::Context as _;
use leasehold::index::{Field, Freshness, Index, IndexSettings, NewIndex, Package, Schema, Width};
use leasehold::{Error, ErrorKind, Store};
use serde_json::{Map, Value, json};

use crate::args::Args;
use crate::args::index::{Alter, Create, IndexCommand};
use crate::exit::{Ending, Exit};
use crate::render::{self, DIM, paint};

/// `leasehold index …`.
pub async fn run(args: &Args, store: &Store, command: &IndexCommand) -> anyhow::Result<Ending> {
    let exit = match command {
        IndexCommand::Create(create) => make(args, store, create).await?,
        IndexCommand::Ls => ls(args, store).await?,
        IndexCommand::Show { index } => show(args, &open(store, index).await?)?,
        IndexCommand::Alter(alter) => {
            change(args, &open(store, &alter.index).await?, alter).await?
        }
        IndexCommand::Put { index, values } => put(&open(store, index).await?, values).await?,
        IndexCommand::Get { index, keys, stale_ok } => {
            let freshness = if *stale_ok { Freshness::StaleOk } else { Freshness::Checked };
            get(args, &open(store, index).await?, keys, freshness).await?
        }
        IndexCommand::Delete { index, keys } => {
            open(store, index).await?.delete_many(keys).await?;
            Exit::Done
        }
        IndexCommand::Import(import) => {
            transfer::import(args, &open(store, &import.index).await?, import).await?
        }
        IndexCommand::Export { index, format } => {
            transfer::export(&open(store, index).await?, *format).await?
        }
        IndexCommand::Copy(copy) => {
            transfer::copy(args, &open(store, &copy.from).await?, copy).await?
        }
        IndexCommand::Compact(compact) => {
            compile::compact(args, &open(store, &compact.index).await?, compact).await?
        }
        IndexCommand::Compile(compile) => compile::compile(args, store, compile).await?,
        IndexCommand::Purge { index, older_than, force } => {
            compile::purge(args, &open(store, index).await?, *older_than, *force).await?
        }
        IndexCommand::Query { sql, format } => query(args, store, sql, *format).await?,
        IndexCommand::Duckdb { index } => {
            print!("{}", open(store, index).await?.duckdb_view());
            Exit::Done
        }
        IndexCommand::Status { index, quick } => {
            look::status(args, &open(store, index).await?, *quick).await?
        }
        IndexCommand::Verify { index } => look::verify(args, &open(store, index).await?).await?,
        IndexCommand::Quarantine(command) => look::quarantine(args, store, command).await?,
    };
    Ok(exit.into())
}

#[cfg(feature = "sql")]
use query::query;

#[cfg(not(feature = "sql"))]
async fn query(
    _: &Args,
    _: &Store,
    _: &str,
    _: Option<crate::args::index::AnswerFormat>,
) -> anyhow::Result<Exit> {
    let message = "this binary was built without SQL (cargo feature `sql`)";
    Err(Error::new(ErrorKind::Unsupported, message).into())
}

/// What a command line has to do once needs no large cache.
fn settings() -> IndexSettings {
    IndexSettings { cache_bytes: 64 << 20, ..IndexSettings::default() }
}

async fn open(store: &Store, name: &str) -> Result<Index, Error> {
    Ok(Index::open(store, name).await?.with_settings(settings()))
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Invalid, message)
}

fn fields(given: &[String], file: Option<&Path>) -> anyhow::Result<Vec<Field>> {
    match file {
        Some(file) => {
            let bytes =
                std::fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
            Ok(Package::fields_in(&bytes).map_err(Error::from)?)
        }
        None => {
            let fields: Result<_, _> = given.iter().map(|field| Field::parse(field)).collect();
            Ok(fields.map_err(Error::from)?)
        }
    }
}

async fn make(args: &Args, store: &Store, create: &Create) -> anyhow::Result<Exit> {
    let fields = fields(&create.fields, create.schema.as_deref())?;
    let width = Width::new(create.width).ok_or_else(|| invalid("--width is 1 to 4"))?;
    let new = NewIndex {
        schema: Schema::new(fields).map_err(Error::from)?,
        width,
        flat_inbox: !create.no_flat,
    };
    let index = Index::create(store, &create.index, new).await?;
    if args.json {
        render::json(&describe(&index))?;
    } else if !args.quiet {
        render::line(format_args!("{} is ready: {} shards", index.name(), width.shards()))?;
    }
    Ok(Exit::Done)
}

async fn ls(args: &Args, store: &Store) -> anyhow::Result<Exit> {
    for name in Index::names(store).await? {
        match Index::find(store, &name).await {
            // A folder that another tool made.
            Ok(None) => continue,
            // One whose description is damaged is an index all the same.
            Err(error) if error.kind() != ErrorKind::Data => return Err(error.into()),
            Ok(Some(_)) | Err(_) => {}
        }
        match args.json {
            true => render::json(&json!({ "index": name }))?,
            false => render::line(&name)?,
        }
    }
    Ok(Exit::Done)
}

fn describe(index: &Index) -> Value {
    let package = index.package();
    let fields: Vec<Value> = package
        .schema
        .fields()
        .iter()
        .map(|field| {
            json!({
                "name": field.name,
                "type": field.kind.name(),
                "required": field.required,
                "max_length": field.max_length,
                "domain": field.domain,
            })
        })
        .collect();
    json!({
        "index": index.name(),
        "key": package.schema.key().name,
        "fields": fields,
        "shards": package.width.shards(),
        "flat_inbox": package.flat_inbox,
    })
}

fn show(args: &Args, index: &Index) -> anyhow::Result<Exit> {
    if args.json {
        render::json(&describe(index))?;
        return Ok(Exit::Done);
    }
    let package = index.package();
    let mut table = render::table(&["field", "type", ""], &[]);
    for (at, field) in package.schema.fields().iter().enumerate() {
        let mut notes = Vec::new();
        match at {
            0 => notes.push("key".to_owned()),
            _ if at == package.schema.updated_at() => notes.push("the latest counts".to_owned()),
            _ if at == package.schema.deleted() => notes.push("marks deletions".to_owned()),
            _ if field.required => notes.push("required".to_owned()),
            _ => {}
        }
        if field.domain {
            notes.push("domain".to_owned());
        }
        if let Some(most) = field.max_length {
            notes.push(format!("at most {most} characters"));
        }
        table.add_row([field.name.clone(), field.kind.name().to_owned(), notes.join(", ")]);
    }
    render::line(&table)?;
    let flat = if package.flat_inbox { "on" } else { "off" };
    let text = format!("{} shards; flat inbox {flat}", package.width.shards());
    render::line(paint(DIM, text))?;
    Ok(Exit::Done)
}

async fn change(args: &Args, index: &Index, alter: &Alter) -> anyhow::Result<Exit> {
    let fields = fields(&alter.add, alter.schema.as_deref())?;
    match alter.schema.is_some() {
        true => {
            // `_deleted` stays where it is: the file names the fields of the user's.
            let old = index.schema();
            let mut fields = fields;
            let deleted = old.fields()[old.deleted()].clone();
            let rest = fields.split_off(fields.len().min(old.deleted()));
            let schema = Schema::with_deleted(fields, deleted, rest).map_err(Error::from)?;
            index.set_schema(schema, alter.force).await?;
        }
        false => index.add_fields(fields).await?,
    }
    show(args, index)
}

async fn put(index: &Index, values: &[String]) -> anyhow::Result<Exit> {
    let mut record = Map::new();
    for value in values {
        let (field, text) = value
            .split_once('=')
            .ok_or_else(|| invalid(format!("{value:?} is not FIELD=VALUE")))?;
        if record.insert(field.to_owned(), text.into()).is_some() {
            return Err(invalid(format!("{field:?} is given twice")).into());
        }
    }
    if values.is_empty() {
        let mut text = String::new();
        std::io::stdin().lock().read_to_string(&mut text).context("cannot read standard input")?;
        record = leasehold::protocol::format::json::read(&text)
            .map_err(|error| invalid(format!("standard input is not a JSON object: {error}")))?;
    }
    // Who types it means now, whatever time the record that is there says.
    index.replace(&record).await?;
    Ok(Exit::Done)
}

async fn get(
    args: &Args,
    index: &Index,
    keys: &[String],
    freshness: Freshness,
) -> anyhow::Result<Exit> {
    let mut exit = Exit::Done;
    for key in keys {
        let Some(row) = index.get_row(key, freshness).await? else {
            render::say(format_args!("{key}: there is no such record"));
            exit = Exit::NotFound;
            continue;
        };
        // Looking may have shown a newer one.
        let schema = index.schema();
        let record = schema.read_json(&row);
        if args.json {
            render::json(&record)?;
            continue;
        }
        let longest = schema.fields().iter().map(|field| field.name.chars().count()).max();
        for field in schema.fields() {
            let text = match record.get(&field.name) {
                None => continue,
                Some(Value::Null) => String::new(),
                Some(Value::String(text)) => text.clone(),
                Some(other) => other.to_string(),
            };
            let width = longest.unwrap_or(0);
            let name = paint(DIM, format_args!("{:<width$}", field.name));
            render::line(format_args!("{name}  {text}"))?;
        }
    }
    Ok(exit)
}
