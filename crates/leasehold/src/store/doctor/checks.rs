//! What the doctor tries. Each check says what it saw and what follows from it.

use std::collections::BTreeSet;

use bytes::Bytes;
use leasehold_protocol::cas::{Version, When};
use leasehold_protocol::settle::Proof;

use super::probe::Probe;
use super::{Check, Outcome, has_own_clock};
use crate::store::Kind;
use crate::store::types::{Delete, Detail, Put, Unknown};
use crate::{Error, Result};

/// How many do it at once.
const RACERS: usize = 16;
const CREATE_ROUNDS: usize = 12;
const DELETE_ROUNDS: usize = 20;
const DELETERS: usize = 8;
const SWAPS_EACH: usize = 6;

fn pass(id: &'static str, what: &'static str, detail: impl Into<String>) -> Check {
    Check { id, what, outcome: Outcome::Pass, detail: detail.into() }
}

fn limit(id: &'static str, what: &'static str, detail: impl Into<String>) -> Check {
    Check { id, what, outcome: Outcome::Limit, detail: detail.into() }
}

fn fail(id: &'static str, what: &'static str, detail: impl Into<String>) -> Check {
    Check { id, what, outcome: Outcome::Fail, detail: detail.into() }
}

/// The version of a write that has to apply for the check to mean anything.
fn stored(put: Put) -> Result<Version> {
    match put {
        Put::Stored(version) => Ok(version),
        Put::Unknown(unknown) => Err(unknown.into_error()),
        Put::Refused | Put::Contended => Err(Error::unavailable(
            "the store refused a write that nothing stood against; try again",
        )),
    }
}

/// `PUT If-None-Match: *` creates, and does not overwrite.
pub async fn create(probe: &Probe) -> Result<Check> {
    const ID: &str = "create";
    const WHAT: &str = "PUT If-None-Match";
    let key = probe.key("create")?;
    let (first, body) = probe.put(&key, "first", When::Absent).await?;
    stored(first)?;
    let (second, _) = probe.put(&key, "second", When::Absent).await?;
    let there = probe.get(&key).await?.map(|object| object.body);
    Ok(match (second, there) {
        (Put::Refused, Some(there)) if there == body => {
            pass(ID, WHAT, "creates once, then refuses")
        }
        (Put::Refused, _) => fail(ID, WHAT, "refused the second create, yet the object changed"),
        _ => fail(ID, WHAT, "ignored: it overwrites, so two nodes would hold one lock"),
    })
}

/// `PUT If-Match` swaps the matched version only, and creates nothing.
pub async fn swap(probe: &Probe) -> Result<Check> {
    const ID: &str = "swap";
    const WHAT: &str = "PUT If-Match";
    let key = probe.key("swap")?;
    let first = stored(probe.put(&key, "one", When::Absent).await?.0)?;
    let (second, body) = probe.put(&key, "two", When::Matches(first.clone())).await?;
    match second {
        Put::Stored(_) => {}
        Put::Unknown(unknown) => return Err(unknown.into_error()),
        Put::Refused | Put::Contended => {
            return Ok(fail(ID, WHAT, "refused although the version matched"));
        }
    }
    let (third, _) = probe.put(&key, "three", When::Matches(first.clone())).await?;
    let there = probe.get(&key).await?.map(|object| object.body);
    if !matches!(third, Put::Refused) || there != Some(body) {
        return Ok(fail(ID, WHAT, "ignored: it overwrites another version, so updates are lost"));
    }
    let missing = probe.key("swap-missing")?;
    let (put, _) = probe.put(&missing, "x", When::Matches(first)).await?;
    if !matches!(put, Put::Refused) || probe.head(&missing).await?.is_some() {
        return Ok(fail(ID, WHAT, "creates an object where none matches"));
    }
    Ok(pass(ID, WHAT, "swaps the matched version only"))
}

/// 16 creators at once: one winner, and its bytes are there.
pub async fn race_of_creates(probe: &Probe) -> Result<Check> {
    const ID: &str = "create-race";
    const WHAT: &str = "16 creates at once";
    let mut refused = 0;
    for round in 0..CREATE_ROUNDS {
        let key = probe.key(&format!("race-{round}"))?;
        let race = (0..RACERS).map(|n| {
            let (probe, key) = (probe.racer(), key.clone());
            tokio::spawn(async move { probe.put(&key, &format!("racer {n}"), When::Absent).await })
        });
        let mut winners = Vec::new();
        for racer in futures::future::join_all(race).await {
            let (put, body) = racer.map_err(interrupted)??;
            match put {
                Put::Stored(_) => winners.push(body),
                Put::Refused | Put::Contended | Put::Unknown(Unknown::Overtaken(_)) => refused += 1,
                Put::Unknown(unknown) => return Err(unknown.into_error()),
            }
        }
        if winners.len() != 1 {
            let detail = format!(
                "{} of {RACERS} were told that they created it: two nodes would hold one lock",
                winners.len()
            );
            return Ok(fail(ID, WHAT, detail));
        }
        let there = probe.get(&key).await?.map(|object| object.body);
        if there != winners.pop() {
            return Ok(fail(ID, WHAT, "the winner's bytes are not what is there"));
        }
    }
    Ok(pass(ID, WHAT, format!("one winner in each of {CREATE_ROUNDS} rounds, {refused} refused")))
}

/// 16 incrementers of one counter: what was acknowledged is there.
pub async fn race_of_swaps(probe: &Probe) -> Result<Check> {
    const ID: &str = "swap-race";
    const WHAT: &str = "16 swaps at once";
    let key = probe.key("counter")?;
    stored(probe.put(&key, "0", When::Absent).await?.0)?;
    let race = (0..RACERS).map(|_| {
        let (probe, key) = (probe.racer(), key.clone());
        tokio::spawn(async move {
            let mut acknowledged = 0u64;
            for _ in 0..SWAPS_EACH {
                let Some(object) = probe.get(&key).await? else { continue };
                let next = count(&object.body) + 1;
                let when = When::Matches(object.meta.version);
                match probe.put(&key, &next.to_string(), when).await?.0 {
                    Put::Stored(_) => acknowledged += 1,
                    Put::Refused | Put::Contended => {}
                    Put::Unknown(unknown) => return Err(unknown.into_error()),
                }
            }
            Ok::<u64, Error>(acknowledged)
        })
    });
    let mut acknowledged = 0;
    for racer in futures::future::join_all(race).await {
        acknowledged += racer.map_err(interrupted)??;
    }
    let there = probe.get(&key).await?.map_or(0, |object| count(&object.body));
    Ok(match there == acknowledged {
        true => pass(ID, WHAT, format!("{acknowledged} acknowledged, {there} stored")),
        false => fail(
            ID,
            WHAT,
            format!("{acknowledged} acknowledged, but {there} stored: updates are lost"),
        ),
    })
}

fn count(body: &[u8]) -> u64 {
    let text = String::from_utf8_lossy(body);
    text.split(' ').next().and_then(|number| number.parse().ok()).unwrap_or(0)
}

/// `DELETE If-Match` deletes the matched version only.
pub async fn delete(probe: &Probe) -> Result<Check> {
    const ID: &str = "delete";
    const WHAT: &str = "DELETE If-Match";
    const FOLLOWS: &str = "it is never used: flat inbox files stay in place after a merge";
    let key = probe.key("delete")?;
    let first = stored(probe.put(&key, "one", When::Absent).await?.0)?;
    let second = stored(probe.put(&key, "two", When::Any).await?.0)?;
    let wrong = match probe.delete(&key, Some(&first)).await {
        Ok(wrong) => wrong,
        Err(error) if error.kind() == crate::ErrorKind::Unavailable => return Err(error),
        Err(error) => return Ok(limit(ID, WHAT, format!("not supported ({error}); {FOLLOWS}"))),
    };
    if probe.head(&key).await?.map(|meta| meta.version).as_ref() != Some(&second) {
        return Ok(limit(ID, WHAT, format!("ignored, it deletes any version; {FOLLOWS}")));
    }
    if !matches!(wrong, Delete::Refused) {
        return Ok(limit(ID, WHAT, format!("claims to have deleted another version; {FOLLOWS}")));
    }
    let right = probe.delete(&key, Some(&second)).await?;
    if !matches!(right, Delete::Deleted) || probe.head(&key).await?.is_some() {
        return Ok(limit(ID, WHAT, format!("refuses the matched version; {FOLLOWS}")));
    }
    Ok(pass(ID, WHAT, "deletes the matched version only"))
}

/// Deletes and swaps of the same version at once: if a swap was acknowledged, its object is there
/// and no delete was.
pub async fn race_of_delete_and_swap(probe: &Probe) -> Result<Check> {
    const ID: &str = "delete-race";
    const WHAT: &str = "DELETE against PUT If-Match";
    let mut both = 0;
    for round in 0..DELETE_ROUNDS {
        let key = probe.key(&format!("duel-{round}"))?;
        let version = stored(probe.put(&key, "start", When::Absent).await?.0)?;
        let deletes: Vec<_> = (0..DELETERS)
            .map(|_| {
                let (probe, key, version) = (probe.racer(), key.clone(), version.clone());
                tokio::spawn(async move { probe.delete(&key, Some(&version)).await })
            })
            .collect();
        // A store that looks first and deletes then is caught only by a swap in between: so the
        // swaps start at random moments of the time that a delete takes.
        let swaps: Vec<_> = (0..RACERS - DELETERS)
            .map(|_| {
                let (probe, key, version) = (probe.racer(), key.clone(), version.clone());
                tokio::spawn(async move {
                    probe.pause_within_a("delete").await;
                    probe.put(&key, "swapped", When::Matches(version)).await
                })
            })
            .collect();
        let mut swapped = false;
        for swap in swaps {
            swapped |= matches!(swap.await.map_err(interrupted)??.0, Put::Stored(_));
        }
        let mut deleted = false;
        for delete in deletes {
            deleted |= matches!(delete.await.map_err(interrupted)??, Delete::Deleted);
        }
        if swapped && (deleted || probe.head(&key).await?.is_none()) {
            both += 1;
        }
    }
    Ok(match both {
        0 => pass(ID, WHAT, format!("never both, in {DELETE_ROUNDS} rounds")),
        both => limit(
            ID,
            WHAT,
            format!(
                "both applied in {both} of {DELETE_ROUNDS} rounds; DELETE If-Match is never used"
            ),
        ),
    })
}

/// Whether equal bytes have equal versions. Nothing depends on it; it is why bodies carry nonces.
pub async fn equal_content(probe: &Probe) -> Result<Check> {
    const ID: &str = "equal-content";
    const WHAT: &str = "versions of equal bytes";
    let key = probe.key("equal")?;
    let body = Bytes::from_static(b"the same bytes");
    let first = stored(probe.put_raw(&key, body.clone(), When::Any, Proof::Bytes).await?)?;
    let second = stored(probe.put_raw(&key, body, When::Any, Proof::Bytes).await?)?;
    Ok(match first == second {
        true => pass(ID, WHAT, "equal (as on S3): a nonce in each body tells writes apart"),
        false => pass(ID, WHAT, "different"),
    })
}

/// A listing shows what was written and deleted before it.
pub async fn list_after_write(probe: &Probe) -> Result<Check> {
    const ID: &str = "list-after-write";
    const WHAT: &str = "listing after a write";
    for round in 0..5 {
        let name = format!("fresh/{round}");
        let key = probe.key(&name)?;
        stored(probe.put(&key, "x", When::Absent).await?.0)?;
        if !probe.listed(probe.list("fresh/")?).await?.contains(&name) {
            return Ok(fail(ID, WHAT, "does not show an object that was just written"));
        }
        match probe.delete(&key, None).await? {
            Delete::Unknown(unknown) => return Err(unknown.into_error()),
            Delete::Deleted | Delete::Refused | Delete::Contended => {}
        }
        if probe.listed(probe.list("fresh/")?).await?.contains(&name) {
            return Ok(fail(ID, WHAT, "still shows an object that was just deleted"));
        }
    }
    Ok(pass(ID, WHAT, "shows writes and deletes at once"))
}

/// Order, paging, entry points, common prefixes, and versions in listings.
pub async fn listing(probe: &Probe) -> Result<Vec<Check>> {
    // Names that byte order and "folders first" sort differently.
    let names =
        ["b/1", "b/2", "b!", "b", "b0", "a/x/1", "a/x/2", "a/y", "c-1", "c/1", "c.1", "Z", "é"];
    // No store has to have a key that is also a folder of others: "b" goes without its slash.
    let names: Vec<String> = names
        .iter()
        .filter(|name| **name != "b")
        .map(|name| format!("list/{name}"))
        .chain((0..14).map(|n| format!("list/d/{n:02}")))
        .collect();
    for name in &names {
        stored(probe.put(&probe.key(name)?, "x", When::Absent).await?.0)?;
    }
    let all: BTreeSet<&String> = names.iter().collect();
    let mut checks = Vec::new();

    let paged: Vec<String> = {
        let pages = probe.pages(probe.list("list/")?.page_size(7).detail(Detail::Version)).await?;
        pages.iter().flat_map(|page| probe.names(&page.entries)).collect()
    };
    let unique: BTreeSet<&String> = paged.iter().collect();
    checks.push(match (unique == all, paged.len() == all.len()) {
        (true, true) => pass("list-paging", "listing in pages of 7", "every key exactly once"),
        (true, false) => limit("list-paging", "listing in pages of 7", "shows some keys twice"),
        (false, _) => fail("list-paging", "listing in pages of 7", "loses keys between pages"),
    });

    checks.push(match paged.is_sorted() {
        true => pass("list-order", "order of listings", "by bytes"),
        false => limit(
            "list-order",
            "order of listings",
            "not by bytes: a key is an entry point and never a cursor",
        ),
    });

    let after = "list/c.1";
    let wanted: BTreeSet<&String> =
        all.iter().copied().filter(|name| name.as_str() > after).collect();
    let list = probe.list("list/")?.start_after(probe.key(after)?.as_str());
    let shown = probe.listed(list).await?;
    let shown: BTreeSet<&String> = shown.iter().collect();
    checks.push(match shown == wanted {
        true => pass("list-start-after", "listing after a key", "starts there"),
        false => limit(
            "list-start-after",
            "listing after a key",
            format!(
                "shows {} of {} keys: not used where all are needed",
                shown.len(),
                wanted.len()
            ),
        ),
    });

    let pages = probe.pages(probe.list("list/")?.delimited()).await?;
    let prefixes: BTreeSet<String> = pages
        .iter()
        .flat_map(|page| page.prefixes.iter().map(|prefix| probe.name(prefix).to_owned()))
        .collect();
    let expected: BTreeSet<String> =
        ["list/a/", "list/b/", "list/c/", "list/d/"].map(str::to_owned).into();
    checks.push(match prefixes == expected {
        true => pass("list-prefixes", "common prefixes", "as they should be"),
        false => fail("list-prefixes", "common prefixes", format!("shows {prefixes:?}")),
    });
    Ok(checks)
}

/// Keys with unusual characters, and long ones.
pub async fn odd_keys(probe: &Probe) -> Result<Check> {
    const ID: &str = "odd-keys";
    const WHAT: &str = "unusual keys";
    let long = ["x".repeat(200), "y".repeat(200), "z".repeat(200)].join("/");
    let names = [
        "odd/with space",
        "odd/ edge ",
        "odd/plus+&=",
        "odd/percent%41%zz",
        "odd/?#",
        "odd/'\"`",
        "odd/<&amp;>",
        "odd/日本語-é-🦀",
        "odd/.hidden",
        "odd/Case",
        "odd/case",
        "odd/back\\slash",
        &format!("odd/{long}"),
    ]
    .map(str::to_owned);
    let mut bad = Vec::new();
    for name in &names {
        let key = probe.key(name)?;
        let body = match probe.put(&key, "odd", When::Absent).await {
            Ok((Put::Stored(_), body)) => body,
            Ok((Put::Unknown(unknown), _)) => return Err(unknown.into_error()),
            Err(error) if error.kind() == crate::ErrorKind::Unavailable => return Err(error),
            Ok(_) | Err(_) => {
                bad.push(name);
                continue;
            }
        };
        if probe.get(&key).await?.map(|object| object.body) != Some(body) {
            bad.push(name);
        }
    }
    let listed = probe.listed(probe.list("odd/")?).await?;
    bad.extend(names.iter().filter(|name| !listed.contains(name)));
    bad.sort_unstable();
    bad.dedup();
    Ok(match bad.is_empty() {
        true => pass(ID, WHAT, format!("{} of {} kept as they are", names.len(), names.len())),
        false => {
            let bad: Vec<&str> = bad.iter().map(|name| name.trim_start_matches("odd/")).collect();
            limit(ID, WHAT, format!("not kept: {bad:?}; Leasehold's own keys avoid these"))
        }
    })
}

/// Whether answers carry the store's time, and how far it is from this host's.
pub async fn clock(probe: &Probe, kind: Kind) -> Result<(Check, Option<f64>)> {
    const ID: &str = "clock";
    const WHAT: &str = "the store's clock";
    if !has_own_clock(kind) {
        return Ok((pass(ID, WHAT, "is this host's"), Some(0.0)));
    }
    probe.head(&probe.key("create")?).await?;
    let (reading, wall) = probe.clocks();
    let Some(reading) = reading else {
        let detail = "no Date in answers: staleness is judged by watching for a whole ttl";
        return Ok((limit(ID, WHAT, detail), None));
    };
    // A Date has a resolution of one second, so on average it is half a second behind.
    let ahead = (reading.store.as_micros() - wall.as_micros()) as f64 / 1e6 + 0.5;
    let detail = match ahead.abs() {
        ..2.0 => "agrees with this host's".to_owned(),
        off => format!(
            "{off:.0} s {} this host's: harmless here, leases go by the store's",
            if ahead > 0.0 { "ahead of" } else { "behind" }
        ),
    };
    Ok((pass(ID, WHAT, detail), Some((ahead * 10.0).round() / 10.0)))
}

fn interrupted(error: tokio::task::JoinError) -> Error {
    Error::unavailable("a task of the doctor's ended early").caused_by(error)
}
