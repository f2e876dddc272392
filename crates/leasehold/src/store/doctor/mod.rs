//! Proves that a store is safe before anyone trusts it.
//!
//! Stores lie: some ignore conditions, some check first and write then, and it shows only when 16
//! clients do it at once. [`Doctor::run`] does that, on objects of its own, and says what came out:
//!
//! - **safe**: everything that Leasehold builds on holds;
//! - **usable with limits**: something that it can do without does not hold, and is not used;
//! - **unsafe**: a conditional PUT is ignored or loses races, or a listing does not show what was
//!   written. The library refuses such a store;
//! - **damaged**: the store would do, but its root record cannot be read, so that nobody may write.
//!   [`Doctor::repair`] replaces it.
//!
//! The verdict is noted in the store's root record, so that every node minds it. A store without
//! one gets it if only a race showed what is wrong: nobody else would find out.

mod checks;
mod probe;

use std::collections::BTreeSet;

use leasehold_protocol::format::root::Limit;
use serde::Serialize;

use self::probe::Probe;
use super::meter::Usage;
use super::{Kind, Store, root};
use crate::{ErrorKind, Result};

/// How a check came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// As it should be.
    Pass,
    /// Not as it should be, but Leasehold can do without.
    Limit,
    /// Leasehold cannot work on this.
    Fail,
}

/// One thing that was tried.
#[derive(Debug, Clone, Serialize)]
pub struct Check {
    /// A short name that stays the same between versions.
    pub id: &'static str,
    /// What was tried.
    pub what: &'static str,
    /// How it came out.
    pub outcome: Outcome,
    /// What was seen, and what follows from it.
    pub detail: String,
}

/// How long a verb takes.
#[derive(Debug, Clone, Serialize)]
pub struct Latency {
    /// Which.
    pub verb: &'static str,
    /// How often it was measured.
    pub samples: usize,
    /// Half of the requests were faster, in milliseconds.
    pub p50_ms: f64,
    /// 99 of 100 were faster, in milliseconds.
    pub p99_ms: f64,
}

/// What came out altogether.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// Everything holds.
    Safe,
    /// Some things do not hold, and are not used.
    UsableWithLimits,
    /// Its root record cannot be read: nobody can write until it is repaired.
    Damaged,
    /// Do not use it.
    Unsafe,
}

/// The doctor's report.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// Which store.
    pub store: String,
    /// What came out.
    pub verdict: Verdict,
    /// What was tried.
    pub checks: Vec<Check>,
    /// How long each verb takes.
    pub latencies: Vec<Latency>,
    /// Settings of the bucket that work behind our back, where they can be read.
    pub warnings: Vec<String>,
    /// How far the store's clock is ahead of this host's, in seconds. `None` if it has none.
    pub clock_offset_s: Option<f64>,
    /// Whether what was found stands in the store's root record.
    pub recorded: bool,
    /// Why some of the doctor's own objects are still there, if they are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub left_behind: Option<String>,
    /// What it took.
    pub usage: Usage,
}

/// Examines one store.
#[derive(Debug)]
pub struct Doctor {
    probe: Probe,
    store: Store,
    forget: bool,
    repair: bool,
}

impl Doctor {
    /// A doctor for this store. Nothing is sent yet.
    pub fn new(store: &Store) -> Self {
        Self { probe: Probe::new(store), store: store.clone(), forget: false, repair: false }
    }

    /// Lets this examination replace a root record that cannot be read. One that can be stays.
    #[must_use]
    pub fn repair(mut self) -> Self {
        self.repair = true;
        self
    }

    /// Lets this examination replace what earlier ones noted, instead of adding to it. For a store
    /// that was mended.
    #[must_use]
    pub fn forget(mut self) -> Self {
        self.forget = true;
        self
    }

    /// Tries everything: about 900 requests, on S3 a third of a cent. `done` hears
    /// of each check as it ends. An error means that the store did not answer, not that it is bad.
    ///
    /// Its own objects are removed again; if this future is dropped, [`Doctor::clean_up`] does it.
    pub async fn run(&self, mut done: impl FnMut(&Check)) -> Result<Report> {
        let before = self.store.usage();
        let examined = self.examine(&mut done).await;
        let left_behind = self.clean_up().await.err().map(|error| error.to_string());
        let (checks, clock_offset_s) = examined?;
        let mut verdict = verdict_of(&checks);
        let mut warnings = self.store.backend().warnings().await;
        let recorded = match self.record(&checks).await {
            Ok(recorded) => recorded,
            Err(error) => {
                warnings.push(format!("the verdict could not be noted: {error}"));
                if error.kind() == ErrorKind::Data && verdict != Verdict::Unsafe {
                    verdict = Verdict::Damaged;
                }
                false
            }
        };
        Ok(Report {
            store: self.store.url(),
            verdict,
            checks,
            latencies: self.probe.latencies(),
            warnings,
            clock_offset_s,
            recorded,
            left_behind,
            usage: self.store.usage().since(&before),
        })
    }

    /// Removes the doctor's own objects.
    pub async fn clean_up(&self) -> Result<()> {
        self.probe.remove_all().await
    }

    async fn examine(&self, done: &mut impl FnMut(&Check)) -> Result<(Vec<Check>, Option<f64>)> {
        let probe = &self.probe;
        let mut checks = Vec::new();
        let mut note = |check: Check| {
            done(&check);
            checks.push(check);
        };
        let (create, swap) = (checks::create(probe).await?, checks::swap(probe).await?);
        let minds = |check: &Check| check.outcome == Outcome::Pass;
        // Whoever ignores a condition needs no race to lose, and some such servers are left in a
        // sorry state by one.
        let races = minds(&create) && minds(&swap);
        note(create);
        note(swap);
        if races {
            note(checks::race_of_creates(probe).await?);
            note(checks::race_of_swaps(probe).await?);
        }
        let delete = checks::delete(probe).await?;
        let races = races && minds(&delete);
        note(delete);
        if races {
            note(checks::race_of_delete_and_swap(probe).await?);
        }
        note(checks::equal_content(probe).await?);
        note(checks::list_after_write(probe).await?);
        for check in checks::listing(probe).await? {
            note(check);
        }
        note(checks::odd_keys(probe).await?);
        let (clock, offset) = checks::clock(probe, self.store.kind()).await?;
        note(clock);
        Ok((checks, offset))
    }

    async fn record(&self, checks: &[Check]) -> Result<bool> {
        let failed =
            |id: &str| checks.iter().any(|check| check.id == id && check.outcome != Outcome::Pass);
        let mut limits = BTreeSet::new();
        if failed("delete") || failed("delete-race") {
            limits.insert(Limit::ConditionalDelete);
        }
        if failed("list-order") {
            limits.insert(Limit::ListOrder);
        }
        let broken = checks.iter().find(|check| check.outcome == Outcome::Fail);
        let findings = root::Findings {
            limits,
            unsafe_because: broken.map(|check| format!("{}: {}", check.what, check.detail)),
            only_by_racing: ["create-race", "swap-race", "delete-race", "list-after-write"]
                .into_iter()
                .any(failed),
        };
        root::record(self.store.driver(), &findings, self.forget, self.repair).await
    }
}

fn verdict_of(checks: &[Check]) -> Verdict {
    match checks.iter().map(|check| check.outcome).max() {
        Some(Outcome::Fail) => Verdict::Unsafe,
        Some(Outcome::Limit) => Verdict::UsableWithLimits,
        Some(Outcome::Pass) | None => Verdict::Safe,
    }
}

/// Whether a store of this kind tells its own time, as opposed to being this host.
fn has_own_clock(kind: Kind) -> bool {
    kind.is_bucket()
}
