//! A fleet: the plan that says what each node runs, and the nodes' own records.
//!
//! The plan is a text at the store's root, `fleet.toml` or `fleet.json`. It is read and written here,
//! and parsed by whoever carries it out: what a node runs are commands.
//!
//! A node's record is a lease ([`Seat`]): its name has one supervisor at a time. Reporting renews it,
//! so a node costs a PUT and a HEAD for each interval, and nothing else.

mod seat;

use std::time::Duration;

use futures::StreamExt as _;
use leasehold_protocol::format::lease::{Dialect, Lease};
use leasehold_protocol::format::node::Node;
use leasehold_protocol::layout::fleet::{self as layout, PLAN_JSON, PLAN_TOML};
use leasehold_protocol::lease::{Judgement, Why};
use leasehold_protocol::settle::Proof;
use leasehold_protocol::supervise::{self, MISSED, Standing};

pub use seat::Seat;

use crate::lease::{Desk, Terms};
use crate::store::{Delete, List, Put, Store, Unknown, Write};
use crate::{Error, ErrorKind, Key, Result, Version, When};

/// How a plan is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Spelling {
    /// `fleet.toml`.
    Toml,
    /// `fleet.json`.
    Json,
}

impl Spelling {
    /// Where such a plan stands.
    pub fn key(self) -> Result<Key> {
        Ok(Key::new(match self {
            Self::Toml => PLAN_TOML,
            Self::Json => PLAN_JSON,
        })?)
    }

    fn other(self) -> Self {
        match self {
            Self::Toml => Self::Json,
            Self::Json => Self::Toml,
        }
    }
}

/// A plan as it is written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanText {
    /// How.
    pub spelling: Spelling,
    /// What.
    pub text: String,
    /// Which state of it.
    pub version: Version,
}

/// The longest plan that is read, in bytes: thousands of nodes. A longer one is somebody's mistake, and
/// must not take the memory of a whole fleet.
pub const LONGEST_PLAN: u64 = 1 << 20;

/// The plan in the store, unless it is still the known one: `None`. An error with kind `Invalid` if
/// there is none. One HEAD, which costs what a GET does, and a GET if it is another one; one HEAD more
/// where it is not where it was.
pub async fn look(store: &Store, known: Option<&(Spelling, Version)>) -> Result<Option<PlanText>> {
    let first = known.map_or(Spelling::Toml, |(spelling, _)| *spelling);
    for spelling in [first, first.other()] {
        let key = spelling.key()?;
        // Its size before all of it.
        let Some(meta) = store.head(&key).await? else { continue };
        if known.is_some_and(|(at, version)| *at == spelling && *version == meta.version) {
            return Ok(None);
        }
        too_long(meta.size).map_err(|error| error.at(&key))?;
        let Some(object) = store.get(&key).await? else { continue };
        let not_text = |_| Error::new(ErrorKind::Data, "is not text").at(&key);
        let text = String::from_utf8(object.body.to_vec()).map_err(not_text)?;
        return Ok(Some(PlanText { spelling, text, version: object.meta.version }));
    }
    Err(Error::invalid(format!("the store has no {PLAN_TOML} (see `leasehold fleet set`)")))
}

fn too_long(size: u64) -> Result<()> {
    match size > LONGEST_PLAN {
        true => Err(Error::invalid(format!("is too long for a plan: {size} bytes"))),
        false => Ok(()),
    }
}

/// Writes the plan over the one that is there, and says in which version; `None` if somebody else
/// wrote one meanwhile. What it says is not looked at: whoever writes a plan has checked it.
pub async fn set(store: &Store, spelling: Spelling, text: &str) -> Result<Option<Version>> {
    let key = spelling.key()?;
    too_long(text.len() as u64).map_err(|error| error.at(&key))?;
    let there = store.head(&key).await?.map(|meta| meta.version);
    let when = there.map_or(When::Absent, When::Matches);
    // Two who write the same text mean the same: whose bytes they are makes no difference.
    let write = Write::when(when, Proof::Bytes);
    let version = match store.put(&key, text.to_owned().into(), write).await? {
        Put::Stored(version) => version,
        Put::Refused | Put::Contended | Put::Unknown(Unknown::Overtaken(_)) => return Ok(None),
        Put::Unknown(unknown) => return Err(unknown.into_error()),
    };
    // One plan, in one place. The new one stands already, whatever happens here.
    let other = spelling.other().key()?;
    if store.head(&other).await?.is_some() {
        let _: Delete = store.delete(&other).await?;
    }
    Ok(Some(version))
}

/// A node as others see it.
#[derive(Debug, Clone)]
pub struct Seen {
    /// Its name.
    pub name: String,
    /// How it is doing.
    pub standing: Standing,
    /// How long ago it reported, by the store's clock.
    pub age: Duration,
    /// Who holds its name, as `host:pid`.
    pub supervisor: String,
    /// What it says, or why that cannot be read.
    pub record: Result<Node, String>,
}

/// How many records are read at a time.
const AT_ONCE: usize = 8;

/// All nodes that have a record, by name. One LIST per thousand, and one GET each.
pub async fn nodes(store: &Store) -> Result<Vec<Seen>> {
    let mut all = Vec::new();
    let mut listing = store.list(List::prefix(layout::all_nodes())?);
    while let Some(page) = listing.next_page().await? {
        let names = page.entries.iter().filter_map(|entry| layout::node_name(entry.key.as_str()));
        let names: Vec<String> = names.collect();
        let mut looks =
            futures::stream::iter(names.into_iter().map(|name| node(store.clone(), name)))
                .buffered(AT_ONCE);
        while let Some(seen) = looks.next().await {
            all.extend(seen?);
        }
    }
    all.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(all)
}

async fn node(store: Store, name: String) -> Result<Option<Seen>> {
    // Its own interval counts; these are for a record that does not tell.
    let desk = Desk::new(&store, layout::node(&name)?, "nodes", terms(supervise::EVERY))?;
    let Some(seen) = desk.look().await? else { return Ok(None) };
    let age = seen.now.since(seen.modified);
    let record = match &seen.record {
        Ok(lease) => Node::of(lease),
        Err(error) => Err(error.to_string()),
    };
    let every = record.as_ref().map_or(supervise::EVERY, |node| node.every);
    let standing = match desk.judge(&seen) {
        Judgement::Free(Why::Released) => Standing::Stopped,
        // It was on this machine, and its process is not.
        Judgement::Free(Why::HolderGone | Why::Rebooted) => Standing::Gone,
        _ => supervise::standing(age, every),
    };
    let supervisor = seen.record.as_ref().map(|lease: &Lease| lease.holder.clone());
    Ok(Some(Seen { name, standing, age, supervisor: supervisor.unwrap_or_default(), record }))
}

/// What came of forgetting a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Forgot {
    /// Its record is gone.
    Done,
    /// There was none.
    Missing,
    /// It reports, and would be back.
    Alive,
}

/// Removes the record of a node that does not report any more, in the version that was judged.
pub async fn forget(store: &Store, name: &str, force: bool) -> Result<Forgot> {
    let Some(seen) = node(store.clone(), name.to_owned()).await? else {
        return Ok(Forgot::Missing);
    };
    if seen.standing == Standing::Alive && !force {
        return Ok(Forgot::Alive);
    }
    let key = layout::node(name)?;
    let Some(meta) = store.head(&key).await? else { return Ok(Forgot::Done) };
    match store.deletes_conditionally().await? {
        true => match store.delete_version(&key, &meta.version).await? {
            Delete::Deleted => Ok(Forgot::Done),
            Delete::Refused | Delete::Contended => Ok(Forgot::Alive),
            Delete::Unknown(unknown) => Err(unknown.into_error()),
        },
        // Should it report at this moment, it takes its name again with its next report.
        false => match store.delete(&key).await? {
            Delete::Unknown(unknown) => Err(unknown.into_error()),
            _ => Ok(Forgot::Done),
        },
    }
}

/// The lease of a node that reports this often. The supervisor renews it with each report, a little
/// before it would renew itself.
fn terms(every: Duration) -> Terms {
    Terms { ttl: every * MISSED, heartbeat: every.mul_f64(1.4), dialect: Dialect::Task }
}
