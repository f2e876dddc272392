//! Compacts one shard: takes its inbox in. The order of the steps and every refusal is
//! [`leasehold_protocol::compile`]'s.
//!
//! | file | step |
//! | --- | --- |
//! | `mod.rs` | lease, shard version, and the order of what follows |
//! | `memory.rs` | how much of it may be in memory |
//! | `take.rs` | reads the inbox, sorts it, sets aside what is not for this shard |
//! | `merge.rs` | merges the shard with it, piece by piece |
//! | `publish.rs` | writes the shard on its condition, its statistics, and sweeps the inbox |

mod memory;
mod merge;
mod publish;
mod take;

use bytes::Bytes;
use leasehold_protocol::compile::{self, Merger, Mode, Publish};
use leasehold_protocol::format::datapackage::Schema;
use leasehold_protocol::format::lease::Dialect;
use leasehold_protocol::format::statistics::{Counts, Statistics};
use leasehold_protocol::mutant::{self, Mutant};
use leasehold_protocol::shard::Shard;
use tokio::sync::OwnedSemaphorePermit;

use super::convoy::{Load, Place};
use super::inbox::Waiting;
use super::sort::{Spool, Spooled};
use super::{CompactOptions, Index};
use crate::lease::{Attempt, Desk, Tenure, Terms};
use crate::store::Kind;
use crate::{Error, ErrorKind, Key, Result};

pub(super) use memory::OPENING;
use merge::Merging;
pub(super) use merge::Pieces;
use publish::New;
use take::{Inbox, Taken};

/// This many inbox objects of a shard are deleted when it is published, not with others'.
const FEW: u32 = 8;

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
    /// Files of other tools that are still there: they cannot be read, or are still being written, or
    /// the store cannot delete conditionally.
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
    /// How many bytes those have, as far as that was listed.
    pub bytes: u64,
    /// Whether there may be more than those.
    pub more: bool,
    /// Files of the flat inbox.
    pub flat: Vec<Key>,
    /// How much that is, and since when it waits, where that was asked for.
    pub waiting: Waiting,
    /// Whether those are all that there are for this shard.
    pub whole: bool,
    /// With whom it is published, where that saves something.
    pub place: Option<Place>,
    /// Whether what was merged may be left to be deleted with others'.
    pub later: bool,
}

impl Work {
    /// Whether it merges so many objects that they may be left to be deleted with others'.
    pub fn is_swept_later(&self) -> bool {
        self.pending.as_ref().is_none_or(|keys| keys.len() > FEW as usize)
    }
}

/// A compaction, and what is left to do of it.
#[derive(Debug)]
pub(super) struct Done {
    pub compaction: Compaction,
    /// What was merged and has yet to be deleted.
    pub unswept: Option<Unswept>,
}

impl From<Compaction> for Done {
    fn from(compaction: Compaction) -> Self {
        Self { compaction, unswept: None }
    }
}

/// Inbox objects of a shard that was published.
#[derive(Debug)]
pub(super) struct Unswept {
    pub keys: Vec<Key>,
    /// Others would merge them again.
    tenure: Option<Tenure>,
    /// For their names.
    _room: OwnedSemaphorePermit,
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
    ) -> Result<Done> {
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
            // Most likely left by a power loss, and nobody watches it for long enough to be sure. The lock
            // saves work, no more.
            Attempt::Held(held) if held.is_aged => {
                tracing::info!(%shard, by = held.holder, "compacted in spite of an old lock");
                return self.compact_unguarded(shard, &work, options, None).await;
            }
            Attempt::Held(held) => {
                return Ok(Compaction::new(shard, Outcome::Locked { by: held.holder }).into());
            }
        };
        let mut done = self.compact_unguarded(shard, &work, options, Some(&tenure)).await;
        if let Ok(Done { unswept: Some(unswept), .. }) = &mut done {
            unswept.tenure = Some(tenure);
            return done;
        }
        self.let_go(shard, tenure).await;
        done
    }

    async fn let_go(&self, shard: Shard, tenure: Tenure) {
        // In a directory the lock file goes: a record that stays would be written over twice by the next
        // compaction, and tokens are kept elsewhere there.
        let released = match self.0.store.kind() {
            Kind::Directory => tenure.remove().await.map(|_| ()),
            _ => tenure.release().await,
        };
        if let Err(error) = released {
            tracing::debug!(%error, %shard, "the lease could not be released; its ttl will end it");
        }
    }

    /// Compacts whether or not anybody else does: the condition on the shard keeps the data.
    async fn compact_unguarded(
        &self,
        shard: Shard,
        work: &Work,
        options: &CompactOptions,
        tenure: Option<&Tenure>,
    ) -> Result<Done> {
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
                    return Ok(Compaction::new(shard, Outcome::Aborted { reason }).into());
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
    ) -> Result<Done, Stop> {
        let (store, layout) = (&self.0.store, &self.0.layout);
        let known = self.known();
        let key = layout.shard(shard);
        let turn = match &work.pending {
            Some(_) => None,
            None => Some(self.turn(work).await),
        };
        let listed = work.pending.as_ref();
        let (bytes, more) = (work.bytes, work.more);
        let mut inbox = listed.map(|keys| Inbox { keys: keys.into(), bytes, more });
        let mut early = None;
        if mutant::is(Mutant::CompilerOrder) {
            let listed = match inbox.take() {
                Some(inbox) => inbox,
                None => self.inbox(shard).await?,
            };
            let sort = self.plan(&listed, work, 0).sort;
            early = Some(self.take(shard, &listed, work, options, None, sort).await?);
            inbox = Some(listed);
        }
        // Where the size can be told without opening it, nothing is read before there is room for it.
        let told = store.stamp(&layout.shard_text(shard)).map(|stamp| stamp.size().unwrap_or(0));
        let to_sort = |size: u64| if resort { size } else { 0 };
        let mut reserved = None;
        if let (Some(size), Some(inbox)) = (told, &inbox) {
            reserved = Some(self.reserve(self.plan(inbox, work, to_sort(size)), size, work).await?);
        }
        // Elsewhere opening one reads its beginning, of which only so many wait for room.
        let opening = match reserved {
            Some(_) => None,
            None => self.0.opening.acquire().await.ok(),
        };
        let started = store.env().clock().boot();
        // The version first, then the inbox. `None` is a proven absence; a failed read ends here.
        let opened = store.open(&key).await;
        let failed = mutant::is(Mutant::FailedShardRead) && opened.is_err();
        let source = if failed { None } else { opened? };
        let size = source.as_ref().map_or(0, |source| source.meta().size);
        let inbox = match inbox {
            Some(inbox) => inbox,
            None => self.inbox(shard).await?,
        };
        let (plan, mut memory) = match reserved {
            Some(reserved) => reserved,
            None => self.reserve(self.plan(&inbox, work, to_sort(size)), size, work).await?,
        };
        drop((turn, opening));
        let statistics = match &source {
            Some(_) => store.get(&layout.statistics(shard)).await?,
            None => None,
        };
        let noted = statistics.as_ref().map(|object| object.meta.version.clone());
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
            None => self.take(shard, &inbox, work, options, unsorted, plan.sort).await?,
        };
        let ours = |key: &Key| layout.is_ours(key.as_str());
        let none = inbox.keys.is_empty() || (taken.left > 0 && !inbox.keys.iter().any(ours));
        let idle = taken.records == 0 && none && taken.flat.is_empty();
        // A deletion is forgotten only if nothing waits that was not looked at: an older record of its
        // key would come back.
        let purge_before = options.purge_before.filter(|_| work.whole && !inbox.more);
        let purge_before = purge_before.filter(|_| taken.left == 0);
        if idle && !options.rewrite && purge_before.is_none() && !resort {
            let left = taken.left;
            return Ok(Compaction { left, ..Compaction::new(shard, Outcome::Idle) }.into());
        }
        let mode = if current.is_some() { Mode::Copy } else { Mode::Rewrite };
        let Taken { mut sorted, records, quarantined, flat, left, resorted } = taken;
        let mut merging = Merging {
            index: self,
            shard,
            schema: known.schema.clone(),
            merger: Merger::new(known.schema.clone(), mode, purge_before).of_shard(shard),
            spool: Spool::new(self.0.settings.spool_folder.clone(), plan.spool),
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
        drop((sorted, source));
        let (len, mut kept, mut body) = (spool.len(), spool.in_memory(), spool.finish());
        let place = work.place.as_ref();
        match (compile::publish(&tally, seen.as_ref()), &body) {
            // What is not written needs no memory.
            (Publish::Nothing, _) => (kept, body) = (0, Spooled::Memory(Bytes::new())),
            (Publish::Write(_), Spooled::Memory(bytes)) if place.is_some() => {
                if let Some(staged) = store.stage(&key, bytes).await? {
                    (kept, body) = (0, Spooled::Staged(staged));
                }
            }
            _ => {}
        }
        let kept = kept + plan.names;
        memory.keep(kept);
        let load = Load { bytes: len, kept: kept as u64 };
        // Large ones are written one after the other: meanwhile no others are made that wait for that.
        let large = matches!(body, Spooled::File(_));
        let _turn = place.filter(|_| large).and_then(Place::keep_turn);
        if let (Some(place), Spooled::Memory(_) | Spooled::File(_)) = (place, &body) {
            place.depart(load, store.env()).await;
        }
        let mut done = Compaction::new(shard, Outcome::Unchanged);
        (done.counts, done.more, done.left) = (tally.counts, inbox.more, left);
        let new = New {
            shard,
            seen,
            blind: failed,
            tally,
            body,
            load,
            place,
            started,
            tenure,
            current,
            last: statistics.as_ref(),
            noted,
            schema: fingerprint,
        };
        let published = self.publish(new, options, &mut done).await?;
        memory.keep(plan.names);
        if !compile::may_sweep(published) {
            return Ok(done.into());
        }
        // Not where the next round would list them again, nor where there are too many to keep: all who
        // end at the same time might have as many. Nor a few: nobody is the worse for deleting those now.
        let names = u32::try_from(inbox.keys.len()).unwrap_or(u32::MAX);
        if work.later
            && !inbox.more
            && flat.is_empty()
            && left == 0
            && names > FEW
            && let Ok(room) = self.0.unswept.clone().try_acquire_many_owned(names)
        {
            let keys = inbox.keys.into_owned();
            let unswept = Unswept { keys, tenure: None, _room: room };
            return Ok(Done { compaction: done, unswept: Some(unswept) });
        }
        self.sweep(&mut done, &inbox.keys, &flat).await;
        Ok(done.into())
    }

    /// Rows that do not fit may be of a newer schema than ours: then they are not bad, we are late.
    async fn still_that(&self, schema: &Schema) -> Result<(), Stop> {
        match self.has_other_schema(schema).await? {
            false => Ok(()),
            true => Err(Stop::Abort("the schema was changed meanwhile".to_owned())),
        }
    }
}
