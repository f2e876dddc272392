//! `leasehold.json`: may we write here, and what can this store not do?

use std::collections::BTreeSet;

use bytes::Bytes;
use leasehold_protocol::cas::When;
use leasehold_protocol::format::root::{Limit, ROOT_KEY, Root, RootError};
use leasehold_protocol::key::Key;
use leasehold_protocol::settle::Proof;

use super::backend::Backend;
use super::settle::{Driver, retrying};
use super::types::{Delete, Durability, Get, Put, Unknown, Write};
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
pub(super) async fn know(driver: Driver<'_>, make: bool) -> Result<Known> {
    let key = key();
    for _ in 0..4 {
        if let Some(root) = read(driver, &key).await? {
            return Ok(Known::of(root));
        }
        if !make {
            return Ok(Known { limits: BTreeSet::new(), refusal: None });
        }
        // What we wrote ourselves is known to be right; a stranger's server is tried out first.
        let limits = match driver.backend.kind().is_bucket() {
            true => retrying!(driver, try_conditions(driver).await)?,
            false => BTreeSet::new(),
        };
        let nonce = driver.env.nonce();
        let root = Root::new(limits, nonce);
        let write = Write::when(When::Absent, Proof::Nonce(nonce));
        match driver.put(&key, root.to_bytes().into(), &write, None).await? {
            Put::Stored(_) => return Ok(Known::of(root)),
            // Another node made it at the same moment: theirs counts.
            Put::Refused | Put::Contended | Put::Unknown(Unknown::Overtaken(_)) => {}
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

/// What the doctor found.
#[derive(Debug, Clone, Default)]
pub(super) struct Findings {
    pub limits: BTreeSet<Limit>,
    pub unsafe_because: Option<String>,
    /// Whether only a race showed it, so that nobody would find out when the store is made.
    pub only_by_racing: bool,
}

/// Notes the doctor's findings in the root record and says whether they stand there. A store that
/// has none yet gets one if nobody else would find out. What was once seen stays, because a race
/// can be won by luck, unless the doctor was asked to `forget`. A record that cannot be read is an error of
/// kind `Data`; with `repair` it is replaced by a fresh one, unless somebody else has mended it meanwhile.
pub(super) async fn record(
    driver: Driver<'_>,
    findings: &Findings,
    forget: bool,
    repair: bool,
) -> Result<bool> {
    let key = key();
    for _ in 0..8 {
        let there = retrying!(driver, driver.backend.get(&key, None).await)?;
        let nonce = driver.env.nonce();
        let mut damaged = false;
        let (mut root, when) = match there {
            Get::Found(object) => {
                let root = match Root::parse(&object.body) {
                    Err(_) if repair => {
                        damaged = true;
                        Root::new(BTreeSet::new(), nonce)
                    }
                    root => root?,
                };
                (root, When::Matches(object.meta.version))
            }
            Get::Absent | Get::Unchanged if !findings.only_by_racing => return Ok(false),
            Get::Absent | Get::Unchanged => (Root::new(BTreeSet::new(), nonce), When::Absent),
        };
        // A layout that we do not know is not ours to rewrite.
        if let Err(RootError::Format(_) | RootError::Features(_)) = root.may_write() {
            return Ok(false);
        }
        let mut noted = root.clone();
        if forget {
            noted.limits.clear();
            noted.unsafe_because = None;
        }
        noted.limits.extend(findings.limits.iter().cloned());
        noted.unsafe_because = findings.unsafe_because.clone().or(noted.unsafe_because);
        if noted == root && when != When::Absent && !damaged {
            return Ok(true);
        }
        root = Root { nonce: nonce.to_string(), ..noted };
        let write = Write::when(when, Proof::Nonce(nonce));
        match driver.put(&key, root.to_bytes().into(), &write, None).await? {
            Put::Stored(_) => return Ok(true),
            Put::Refused | Put::Contended | Put::Unknown(Unknown::Overtaken(_)) => {}
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
    if !is_refused(put(When::Absent).await?)? {
        return Err(ignored("If-None-Match on PUT"));
    }
    let second = expect_stored(put(When::Matches(first.clone())).await?)?;
    if !is_refused(put(When::Matches(first.clone())).await?)? {
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

/// Whether it was refused. Anything but a clear answer is no proof either way.
fn is_refused(put: Put) -> Result<bool> {
    match put {
        Put::Stored(_) => Ok(false),
        Put::Refused => Ok(true),
        Put::Contended => Err(Error::unavailable("the store is busy: try again")),
        Put::Unknown(unknown) => Err(unknown.into_error()),
    }
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
