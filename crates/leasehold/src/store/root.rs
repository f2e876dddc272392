//! `leasehold.json`: may we write here, and what can this store not do?

use std::collections::BTreeSet;

use bytes::Bytes;
use leasehold_protocol::cas::When;
use leasehold_protocol::format::root::{Limit, ROOT_KEY, Root, RootError};
use leasehold_protocol::key::Key;
use leasehold_protocol::settle::Proof;

use super::backend::Backend;
use super::settle::{Driver, retrying};
use super::types::{Delete, Durability, Get, Put, Write};
use crate::env::Env;
use crate::{Error, ErrorKind, Result};

pub(super) fn key() -> Key {
    Key::new(ROOT_KEY).expect("a constant that is a key")
}

/// What the root record says.
#[derive(Debug)]
pub(super) struct Known {
    pub limits: BTreeSet<Limit>,
    refusal: Option<RootError>,
}

impl Known {
    fn of(root: Root) -> Self {
        Self { refusal: root.may_write().err(), limits: root.limits }
    }

    pub fn writable(&self) -> Result<()> {
        match &self.refusal {
            Some(refusal) => Err(refusal.clone().into()),
            None => Ok(()),
        }
    }
}

/// Reads the root record, or makes the store: one GET, and for a new bucket about eight requests
/// more, once in its life.
pub(super) async fn know(driver: Driver<'_>) -> Result<Known> {
    let key = key();
    for _ in 0..4 {
        if let Some(root) = read(driver, &key).await? {
            return Ok(Known::of(root));
        }
        // What we wrote ourselves is known to be right; a stranger's server is tried out first.
        let limits = match driver.backend.kind().is_bucket() {
            true => retrying!(driver, try_conditions(driver).await)?,
            false => BTreeSet::new(),
        };
        let nonce = driver.env.nonce();
        let root = Root::new(limits, nonce);
        let write = Write::when(When::Absent, Proof::Nonce(nonce));
        match driver.put(&key, root.to_bytes().into(), &write).await? {
            Put::Stored(_) => return Ok(Known::of(root)),
            // Another node made it at the same moment: theirs counts.
            Put::Refused | Put::Contended => {}
            Put::Unknown(unknown) => return Err(unknown.into_error().at(&key)),
        }
    }
    Err(Error::unavailable("others keep making and removing the store's root record").at(&key))
}

async fn read(driver: Driver<'_>, key: &Key) -> Result<Option<Root>> {
    match retrying!(driver, driver.backend.get(key, None).await)? {
        Get::Found(object) => Ok(Some(Root::parse(&object.body)?)),
        Get::Absent | Get::Unchanged => Ok(None),
    }
}

/// The doctor's word about the store, noted in the root record if there is one.
pub(super) async fn record(
    driver: Driver<'_>,
    limits: &BTreeSet<Limit>,
    unsafe_because: Option<String>,
) -> Result<bool> {
    let key = key();
    for _ in 0..8 {
        let Get::Found(object) = retrying!(driver, driver.backend.get(&key, None).await)? else {
            return Ok(false);
        };
        let mut root = Root::parse(&object.body)?;
        if root.limits == *limits && root.unsafe_because == unsafe_because {
            return Ok(true);
        }
        let nonce = driver.env.nonce();
        root.limits = limits.clone();
        root.unsafe_because = unsafe_because.clone();
        root.nonce = nonce.to_string();
        let when = When::Matches(object.meta.version);
        let write = Write::when(when, Proof::Nonce(nonce));
        match driver.put(&key, root.to_bytes().into(), &write).await? {
            Put::Stored(_) => return Ok(true),
            Put::Refused | Put::Contended => {}
            Put::Unknown(unknown) => return Err(unknown.into_error().at(&key)),
        }
    }
    Err(Error::unavailable("others keep changing the store's root record").at(&key))
}

/// Whether the store minds conditions at all, one request at a time. It does not show races: that
/// is the doctor's work.
async fn try_conditions(driver: Driver<'_>) -> Result<BTreeSet<Limit>> {
    let key = Key::new(format!("leasehold.probe-{}", driver.env.nonce()))?;
    let tried = try_conditions_on(driver.backend, driver.env, &key).await;
    // Whatever came out, the probe goes.
    if let Delete::Unknown(unknown) = driver.delete(&key, None).await? {
        return Err(unknown.into_error());
    }
    tried
}

async fn try_conditions_on(backend: &dyn Backend, env: &Env, key: &Key) -> Result<BTreeSet<Limit>> {
    let put = |when: When| async move {
        let body = Bytes::from(format!("a probe of Leasehold's: {}\n", env.nonce()));
        backend.put(key, body, &when, Durability::Volatile).await
    };
    let ignored = |what: &str| {
        Error::new(
            ErrorKind::Unsupported,
            format!("{} ignores {what}: it is not safe (run `leasehold doctor`)", backend.url()),
        )
    };
    let first = expect_stored(put(When::Absent).await?)?;
    if let Put::Stored(_) = put(When::Absent).await? {
        return Err(ignored("If-None-Match on PUT"));
    }
    let second = expect_stored(put(When::Matches(first.clone())).await?)?;
    if let Put::Stored(_) = put(When::Matches(first.clone())).await? {
        return Err(ignored("If-Match on PUT"));
    }
    let deleted = backend.delete(key, Some(&first)).await;
    let mut limits = BTreeSet::new();
    match (deleted, backend.head(key).await?) {
        (Ok(Delete::Refused), Some(meta)) if meta.version == second => {}
        _ => _ = limits.insert(Limit::ConditionalDelete),
    }
    Ok(limits)
}

fn expect_stored(put: Put) -> Result<leasehold_protocol::cas::Version> {
    match put {
        Put::Stored(version) => Ok(version),
        Put::Unknown(unknown) => Err(unknown.into_error()),
        Put::Refused | Put::Contended => Err(Error::new(
            ErrorKind::Unsupported,
            "the store refused a conditional PUT whose condition held (run `leasehold doctor`)",
        )),
    }
}
