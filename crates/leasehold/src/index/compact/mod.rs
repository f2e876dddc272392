//! Compacts one shard: takes its inbox in. The order of the steps and every refusal is
//! [`leasehold_protocol::compile`]'s.
//!
//! | file | step |
//! | --- | --- |
//! | `mod.rs` | lease, shard version, and the order of what follows |
//! | `take.rs` | reads the inbox, sorts it, sets aside what is not for this shard |
//! | `merge.rs` | merges the shard with it, piece by piece |
//! | `publish.rs` | writes the shard on its condition, its statistics, and sweeps the inbox |

mod merge;
mod publish;
mod take;

use leasehold_protocol::compile::{self, Merger, Mode};
use leasehold_protocol::format::datapackage::Schema;
use leasehold_protocol::format::lease::Dialect;
use leasehold_protocol::format::statistics::{Counts, Statistics};
use leasehold_protocol::layout::index::Pending;
use leasehold_protocol::mutant::{self, Mutant};
use leasehold_protocol::shard::Shard;

use super::inbox::Waiting;
use super::sort::Spool;
use super::{CompactOptions, Index};
use crate::lease::{Attempt, Desk, Tenure, Terms};
use crate::{Error, ErrorKind, Key, Result};

use merge::Merging;
pub(super) use merge::Pieces;
use publish::New;
use take::Taken;

/// What became of a compaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// There was nothing in the inbox.
    Idle,
    /// Another compiler is at it.
    Locked {
        /// Who.
        by: String,
    },
    /// The shard already said it all; the inbox was cleared.
    Unchanged,
    /// The shard was written and the inbox cleared.
    Published,
    /// Another compiler wrote the shard first. Nothing was deleted.
    Refused,
    /// Given up, for this reason. Nothing was deleted.
    Aborted {
        /// Why.
        reason: String,
    },
}

/// What a compaction did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compaction {
    /// Of which shard.
    pub shard: Shard,
    /// How it ended.
    pub outcome: Outcome,
    /// Rows and records.
    pub counts: Counts,
    /// Bytes written.
    pub bytes: u64,
    /// Objects deleted from the inbox.
    pub swept: u64,
    /// Files of the flat inbox that were merged but could not be deleted, because the store cannot
    /// delete conditionally.
    pub left: u64,
    /// Whether there is more in the inbox than one compaction takes.
    pub more: bool,
    /// Whether it was the shard's first.
    pub created: bool,
}

impl Compaction {
    fn new(shard: Shard, outcome: Outcome) -> Self {
        Self {
            shard,
            outcome,
            counts: Counts::default(),
            bytes: 0,
            swept: 0,
            left: 0,
            more: false,
            created: false,
        }
    }
}

/// What to take in.
#[derive(Debug, Default)]
pub(super) struct Work {
    /// The inbox objects, if they were listed already.
    pub pending: Option<Vec<Key>>,
    /// Whether there may be more than those.
    pub more: bool,
    /// Files of the flat inbox.
    pub flat: Vec<Key>,
    /// How much that is, and since when it waits, where that was asked for.
    pub waiting: Waiting,
    /// Whether those are all that there are for this shard.
    pub whole: bool,
}

/// Why a compaction ends early.
enum Stop {
    Abort(String),
    /// The shard is not sorted.
    Disorder,
    Failed(Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

impl Index {
    pub(super) async fn compact_shard(
        &self,
        shard: Shard,
        work: Work,
        options: &CompactOptions,
    ) -> Result<Compaction> {
        if !options.lock {
            return self.compact_unguarded(shard, &work, options, None).await;
        }
        let ttl = self.0.settings.lock_ttl;
        let terms = Terms { ttl, heartbeat: ttl / 3, dialect: Dialect::Task };
        let key = self.0.layout.lock(shard);
        let desk = Desk::new(&self.0.store, key, options.worker.clone(), terms)?;
        // Looks first: on a bucket a released lease is still there, and trying to create it would be
        // a wasted request each time.
        let tenure = match desk.attempt_again().await? {
            Attempt::Acquired(tenure) => tenure,
            Attempt::Held(held) => {
                return Ok(Compaction::new(shard, Outcome::Locked { by: held.holder }));
            }
        };
        let done = self.compact_unguarded(shard, &work, options, Some(&tenure)).await;
        if let Err(error) = tenure.release().await {
            tracing::debug!(%error, %shard, "the lease could not be released; its ttl will end it");
        }
        done
    }

    /// Compacts whether or not anybody else does: the condition on the shard keeps the data.
    async fn compact_unguarded(
        &self,
        shard: Shard,
        work: &Work,
        options: &CompactOptions,
        tenure: Option<&Tenure>,
    ) -> Result<Compaction> {
        let mut resort = false;
        loop {
            match self.try_compact(shard, work, options, tenure, resort).await {
                Ok(done) => return Ok(done),
                Err(Stop::Disorder) if !resort => {
                    tracing::warn!(%shard, "the shard is not in order: sorting it");
                    resort = true;
                }
                Err(Stop::Disorder) => {
                    let key = self.0.layout.shard(shard);
                    let message = "cannot be put into order";
                    return Err(Error::new(ErrorKind::Data, message).at(&key));
                }
                Err(Stop::Abort(reason)) => {
                    tracing::info!(%shard, reason, "compaction given up");
                    return Ok(Compaction::new(shard, Outcome::Aborted { reason }));
                }
                Err(Stop::Failed(error)) => return Err(error),
            }
        }
    }

    async fn try_compact(
        &self,
        shard: Shard,
        work: &Work,
        options: &CompactOptions,
        tenure: Option<&Tenure>,
        resort: bool,
    ) -> Result<Compaction, Stop> {
        let (store, layout) = (&self.0.store, &self.0.layout);
        let known = self.known();
        let key = layout.shard(shard);
        let budget = self.sort_budget(work);
        let early = match mutant::is(Mutant::CompilerOrder) {
            true => Some(self.take(shard, work, options, None, budget).await?),
            false => None,
        };
        let started = store.env().clock().boot();
        // The version first, then the inbox. `None` is a proven absence; a failed read ends here.
        let opened = store.open(&key).await;
        let failed = mutant::is(Mutant::FailedShardRead) && opened.is_err();
        let source = if failed { None } else { opened? };
        let size = source.as_ref().map_or(0, |source| source.meta().size);
        let _memory = self.reserve(size, work, budget).await?;
        let statistics = match &source {
            Some(_) => store.get(&layout.statistics(shard)).await?,
            None => None,
        };
        let statistics = statistics.and_then(|object| Statistics::parse(&object.body));
        let fingerprint = known.schema.fingerprint();
        let ours = |statistics: &&Statistics| {
            let version = source.as_ref().map(|source| source.meta().version.as_str());
            Some(statistics.version.as_str()) == version && statistics.schema == fingerprint
        };
        let current = statistics.as_ref().filter(ours).filter(|_| !options.rewrite && !resort);
        let unsorted = source.as_deref().filter(|_| resort);
        let taken = match early {
            Some(taken) => taken,
            None => self.take(shard, work, options, unsorted, budget).await?,
        };
        let idle = taken.records == 0 && taken.pending.is_empty() && taken.flat.is_empty();
        // A deletion is forgotten only if nothing waits that was not looked at: an older record of its
        // key would come back.
        let purge_before = options.purge_before.filter(|_| work.whole && !taken.more);
        if idle && !options.rewrite && purge_before.is_none() && !resort {
            return Ok(Compaction::new(shard, Outcome::Idle));
        }
        let mode = if current.is_some() { Mode::Copy } else { Mode::Rewrite };
        let Taken { mut sorted, records, quarantined, pending, flat, more, resorted } = taken;
        let mut merging = Merging {
            index: self,
            shard,
            schema: known.schema.clone(),
            merger: Merger::new(known.schema.clone(), mode, purge_before).of_shard(shard),
            spool: Spool::new(self.0.settings.spool_folder.clone()),
            tenure,
        };
        let unread = source.as_deref().filter(|_| resorted.is_none());
        merging.run(unread, &mut sorted).await?;
        let (spool, mut tally) = (merging.spool, *merging.merger.tally());
        tally.counts.inbox = records;
        tally.counts.older += sorted.dropped();
        tally.counts.quarantined += quarantined;
        if let Some(resorted) = &resorted {
            // Rows of the shard came in like records: those that are left were there before.
            tally.counts.rows_before = resorted.rows;
            tally.counts.moved = resorted.moved;
            tally.counts.inserted = 0;
            tally.before = Some(resorted.digest);
            tally.removed = tally.removed.plus(resorted.digest);
            tally.respelled += 1;
        }
        let seen = source.as_ref().map(|source| source.meta().version.clone());
        let mut done = Compaction::new(shard, Outcome::Unchanged);
        (done.counts, done.more) = (tally.counts, more);
        let new = New {
            shard,
            seen,
            blind: failed,
            tally,
            spool,
            started,
            tenure,
            current,
            last: statistics.as_ref(),
            schema: fingerprint,
        };
        let published = self.publish(new, options, &mut done).await?;
        if compile::may_sweep(published) {
            self.sweep(&mut done, &pending, &flat).await;
        }
        Ok(done)
    }

    /// Takes memory for a compaction out of what all of this process share.
    async fn reserve(
        &self,
        size: u64,
        work: &Work,
        budget: usize,
    ) -> Result<tokio::sync::OwnedSemaphorePermit, Stop> {
        let all = (self.0.settings.compiler_bytes >> 10).clamp(1 << 10, u64::from(u32::MAX));
        // The shard and what becomes of it, as far as they are kept in memory; the records; the names
        // of the objects that they are in.
        let most = self.0.settings.most_objects;
        let names = work.pending.as_ref().map_or(most, Vec::len).min(most) + work.flat.len();
        let needed = 2 * size.min(6 << 20) + budget as u64 + names as u64 * 128 + (128 << 10);
        let needed = u32::try_from((needed >> 10).min(all)).unwrap_or(u32::MAX);
        let memory = self.0.memory.clone().acquire_many_owned(needed).await;
        memory.map_err(|_| Stop::Abort("this process is ending".to_owned()))
    }

    /// How many bytes of records one compaction sorts in memory: more go through files.
    fn sort_budget(&self, work: &Work) -> usize {
        let most = usize::try_from(self.0.settings.compiler_bytes / 5).unwrap_or(usize::MAX);
        let most = most.max(256 << 10);
        let Some(pending) = &work.pending else { return most };
        // By their names, with records of a usual size.
        let records = |key: &Key| match self.0.layout.pending(key.as_str()) {
            Some((_, Pending::Batch { count })) => usize::try_from(count).unwrap_or(usize::MAX),
            _ => 1,
        };
        let records = pending.iter().map(records).fold(work.flat.len(), usize::saturating_add);
        records.saturating_mul(256).clamp(256 << 10, most)
    }

    /// Rows that do not fit may be of a newer schema than ours: then they are not bad, we are late.
    async fn still_that(&self, schema: &Schema) -> Result<(), Stop> {
        self.refresh().await?;
        match self.schema().fingerprint() == schema.fingerprint() {
            true => Ok(()),
            false => Err(Stop::Abort("the schema was changed meanwhile".to_owned())),
        }
    }
}
