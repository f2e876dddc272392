//! Plain object tools: what a store holds, and how to look at it.

use std::io::{Read as _, Write as _};

use anyhow::Context as _;
use base64::Engine as _;
use leasehold::protocol::format::root::ROOT_KEY;
use leasehold::store::{Delete, Detail, Entry, List, Meta, Put, Store};
use leasehold::{Error, ErrorKind, Key, Proof, Version, When, Write};
use serde::Serialize;

use crate::args::{self, Args};
use crate::exit::Exit;
use crate::render::{self, DIM, paint};

/// Makes the store.
pub async fn init(args: &Args, store: &Store) -> anyhow::Result<Exit> {
    store.init().await?;
    let limits = store.limits().await?;
    if args.json {
        render::json(&serde_json::json!({ "store": store.url(), "limits": limits }))?;
    } else if !args.quiet {
        render::line(format_args!("{} is ready", store.url()))?;
        for limit in limits {
            render::line(format_args!("limit: {}", serde_json::to_string(&limit)?))?;
        }
    }
    Ok(Exit::Done)
}

#[derive(Serialize)]
struct ObjectRow<'a> {
    key: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    size: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    modified: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    version: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    base64: Option<String>,
}

impl<'a> ObjectRow<'a> {
    fn of_entry(entry: &'a Entry) -> Self {
        Self {
            key: entry.key.as_str(),
            size: entry.size,
            modified: entry.modified.map(|time| time.to_string()),
            version: entry.version.as_ref().map(Version::as_str),
            text: None,
            base64: None,
        }
    }

    fn of_meta(key: &'a Key, meta: &'a Meta) -> Self {
        Self {
            key: key.as_str(),
            size: Some(meta.size),
            modified: Some(meta.modified.to_string()),
            version: Some(meta.version.as_str()),
            text: None,
            base64: None,
        }
    }
}

/// Lists keys as they come, page by page.
pub async fn ls(args: &Args, store: &Store, ls: &args::Ls) -> anyhow::Result<Exit> {
    let mut list = List::prefix(&ls.prefix)?;
    if ls.long {
        list = list.detail(Detail::Version);
    }
    if ls.delimited {
        list = list.delimited();
    }
    if let Some(limit) = ls.limit {
        list = list.limit(limit);
    }
    if let Some(key) = &ls.start_after {
        list = list.start_after(key);
    }
    let mut listing = store.list(list);
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    while let Some(page) = listing.next_page().await? {
        for prefix in &page.prefixes {
            match args.json {
                true => writeln!(out, "{}", serde_json::json!({ "prefix": prefix }))?,
                false if ls.long => writeln!(out, "{:>10}  {:<27}  {prefix}", "", "")?,
                false => writeln!(out, "{prefix}")?,
            }
        }
        for entry in &page.entries {
            if args.json {
                // A bucket tells all anyway; a directory only what it was asked for.
                let row = ObjectRow::of_entry(entry);
                writeln!(out, "{}", serde_json::to_string(&row)?)?;
            } else if ls.long {
                let size = entry.size.map(|size| size.to_string()).unwrap_or_default();
                let time = entry.modified.map(|time| time.to_string()).unwrap_or_default();
                let version = entry.version.as_ref().map_or("", Version::as_str);
                writeln!(out, "{size:>10}  {time:<27}  {}  {version}", entry.key)?;
            } else {
                writeln!(out, "{}", entry.key)?;
            }
        }
    }
    out.flush()?;
    Ok(Exit::Done)
}

/// Prints an object's bytes.
pub async fn cat(args: &Args, store: &Store, key: &str) -> anyhow::Result<Exit> {
    let key = parse_key(key)?;
    let Some(object) = store.get(&key).await? else { return Ok(not_found(&key)) };
    if !args.json {
        std::io::stdout().write_all(&object.body)?;
        return Ok(Exit::Done);
    }
    let mut row = ObjectRow::of_meta(&key, &object.meta);
    match std::str::from_utf8(&object.body) {
        Ok(text) => row.text = Some(text),
        Err(_) => row.base64 = Some(base64::prelude::BASE64_STANDARD.encode(&object.body)),
    }
    render::json(&row)?;
    Ok(Exit::Done)
}

/// Shows what the store tells of an object.
pub async fn stat(args: &Args, store: &Store, key: &str) -> anyhow::Result<Exit> {
    let key = parse_key(key)?;
    let Some(meta) = store.head(&key).await? else { return Ok(not_found(&key)) };
    if args.json {
        render::json(&ObjectRow::of_meta(&key, &meta))?;
        return Ok(Exit::Done);
    }
    let age = meta.now.since(meta.modified);
    for (label, value) in [
        ("key", key.to_string()),
        ("size", format!("{} ({} bytes)", render::bytes(meta.size), meta.size)),
        ("modified", format!("{}, {} s ago by the store's clock", meta.modified, age.as_secs())),
        ("version", meta.version.to_string()),
    ] {
        render::line(format_args!("{} {value}", paint(DIM, format_args!("{label:<9}"))))?;
    }
    Ok(Exit::Done)
}

/// Writes an object.
pub async fn put(args: &Args, store: &Store, put: &args::Put) -> anyhow::Result<Exit> {
    let key = parse_key_to_change(&put.key)?;
    // All of it first: a source that breaks off must not leave half an object.
    let body = match &put.text {
        Some(text) => text.clone().into_bytes(),
        None => read_source(&put.file)?,
    };
    let when = match &put.if_version {
        Some(version) => When::Matches(Version::new(version.trim_matches('"'))),
        None if put.if_absent => When::Absent,
        None => When::Any,
    };
    match store.put(&key, body.into(), Write::when(when, Proof::Bytes)).await? {
        Put::Stored(version) => {
            if args.json {
                render::json(&serde_json::json!({ "key": key, "version": version.as_str() }))?;
            } else if !args.quiet {
                render::line(&version)?;
            }
            Ok(Exit::Done)
        }
        Put::Refused => {
            let reason = match put.if_absent {
                true => "there is such an object already",
                false => "the object is not in this version",
            };
            Ok(refused(&key, reason))
        }
        Put::Contended => Err(contended(&key).into()),
        Put::Unknown(unknown) => Err(unknown.into_error().into()),
    }
}

/// Deletes objects.
pub async fn rm(args: &Args, store: &Store, rm: &args::Rm) -> anyhow::Result<Exit> {
    if let Some(prefix) = &rm.prefix {
        return rm_prefix(args, store, prefix).await;
    }
    // All of them first: nothing is deleted if one of them cannot be a key.
    let keys: Vec<Key> =
        rm.keys.iter().map(|key| parse_key_to_change(key)).collect::<Result<_, _>>()?;
    let outcome = match (&rm.if_version, keys.as_slice()) {
        (Some(version), [key]) => {
            store.delete_version(key, &Version::new(version.trim_matches('"'))).await?
        }
        (Some(_), _) => {
            return Err(invalid("--if-version goes with exactly one key").into());
        }
        (None, [key]) => store.delete(key).await?,
        (None, keys) => {
            store.delete_many(keys).await?;
            Delete::Deleted
        }
    };
    match outcome {
        Delete::Deleted => {
            if args.json {
                render::json(&serde_json::json!({ "deleted": keys }))?;
            }
            Ok(Exit::Done)
        }
        Delete::Refused => Ok(refused(&keys[0], "the object is not in this version")),
        Delete::Contended => Err(contended(&keys[0]).into()),
        Delete::Unknown(unknown) => Err(unknown.into_error().into()),
    }
}

async fn rm_prefix(args: &Args, store: &Store, prefix: &str) -> anyhow::Result<Exit> {
    if prefix.is_empty() {
        return Err(invalid("an empty --prefix would delete the whole store; name one").into());
    }
    let mut listing = store.list(List::prefix(prefix)?);
    let mut deleted = 0;
    while let Some(page) = listing.next_page().await? {
        let keys = page.entries.into_iter().map(|entry| entry.key);
        let keys: Vec<Key> = keys.filter(|key| key.as_str() != ROOT_KEY).collect();
        store.delete_many(&keys).await?;
        deleted += keys.len();
    }
    match args.json {
        true => render::json(&serde_json::json!({ "deleted_count": deleted }))?,
        false if args.quiet => {}
        false => render::line(format_args!("deleted {deleted} objects"))?,
    }
    Ok(Exit::Done)
}

fn read_source(file: &std::path::Path) -> anyhow::Result<Vec<u8>> {
    if file != std::path::Path::new("-") {
        return std::fs::read(file).with_context(|| format!("cannot read {}", file.display()));
    }
    let mut body = Vec::new();
    std::io::stdin().lock().read_to_end(&mut body).context("cannot read standard input")?;
    Ok(body)
}

fn parse_key(text: &str) -> Result<Key, Error> {
    Key::new(text).map_err(|error| invalid(format!("{text:?} cannot be a key: {error}")))
}

/// The same for a key that is written or removed: without its root record, a store is nobody's.
fn parse_key_to_change(text: &str) -> Result<Key, Error> {
    match parse_key(text)? {
        key if key.as_str() == ROOT_KEY => Err(invalid(format!(
            "{ROOT_KEY} is the store's own record: nobody could write here without it \
             (`leasehold doctor --repair` mends it)"
        ))),
        key => Ok(key),
    }
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Invalid, message)
}

fn contended(key: &Key) -> Error {
    Error::new(ErrorKind::Unavailable, "others keep writing this object: try again").at(key)
}

fn not_found(key: &Key) -> Exit {
    render::say(format_args!("{key}: there is no such object"));
    Exit::NotFound
}

fn refused(key: &Key, reason: &str) -> Exit {
    render::say(format_args!("{key}: refused, {reason}; nothing was changed"));
    Exit::Refused
}
