//! Compacts one shard: takes its inbox in. The order of the steps and every refusal is
//! [`leasehold_protocol::compile`]'s.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use leasehold_protocol::compile::{
    self, Bad, Incoming as _, MergeError, Merger, Mode, Publish, Published, Tally,
};
use leasehold_protocol::format::datapackage::Schema;
use leasehold_protocol::format::lease::Dialect;
use leasehold_protocol::format::statistics::{Counts, Statistics};
use leasehold_protocol::format::usv;
use leasehold_protocol::layout::index::Pending;
use leasehold_protocol::merge::Digest;
use leasehold_protocol::mutant::{self, Mutant};
use leasehold_protocol::settle::Proof;
use leasehold_protocol::shard::{KeyHash, Shard};

use super::inbox::Waiting;
use super::sort::{Sorted, Sorter, Spool, Spooled};
use super::write::AHEAD;
use super::{CompactOptions, Index};
use crate::env::BootTime;
use crate::lease::{Attempt, Desk, Tenure, Terms};
use crate::store::large::{FileBody, Source};
use crate::store::{Delete, Durability, Put, Write};
use crate::{Error, ErrorKind, Key, Result, Version, When};

/// A shard that was read longer ago than this is not written any more. Deletions may be purged after a
/// day, and a compiler that slept that long could bring back what they deleted: on most stores equal
/// bytes have equal versions.
const PUBLISH_WITHIN: Duration = Duration::from_secs(3600);

/// How much is merged between two looks at the rest of the world.
const STEP: usize = 2 << 20;

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

/// What was taken in.
#[derive(Debug)]
struct Taken {
    sorted: Sorted,
    /// Records of this shard, readable or not.
    records: u64,
    quarantined: u64,
    /// Objects with names of ours: deleted whatever their version, because they have one only.
    pending: Vec<Key>,
    /// Objects that other tools may overwrite: deleted in the version that was read.
    flat: Vec<(Key, Version)>,
    more: bool,
    /// Rows of the shard itself, where it had to be sorted.
    resorted: Option<Resorted>,
}

#[derive(Debug, Default)]
struct Resorted {
    rows: u64,
    moved: u64,
    digest: Digest,
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
        let published = match compile::publish(&tally, seen.as_ref()) {
            Publish::Nothing => {
                // Others wrote it: it must be on disk before what it is made of goes.
                store.persist(std::slice::from_ref(&key)).await?;
                Published::Nothing
            }
            Publish::Write(when) => {
                self.still_ours(started, tenure)?;
                let blind = failed || (mutant::is(Mutant::FirstShardWrite) && seen.is_none());
                let when = if blind { When::Any } else { when };
                let len = spool.len();
                (done.bytes, done.created) = (len, seen.is_none());
                let put = match spool.finish() {
                    Spooled::Memory(bytes) => {
                        store.put(&key, bytes.into(), Write::when(when, Proof::Bytes)).await?
                    }
                    Spooled::File(file) => {
                        let body = FileBody::new(file)?;
                        store.put_file(&key, &body, when, Durability::Durable).await?
                    }
                };
                match put {
                    Put::Stored(version) => {
                        let after = Compacted { shard, version, before: seen, len, tally };
                        self.note(after, current, statistics.as_ref(), fingerprint, options).await;
                        Published::Stored
                    }
                    Put::Refused | Put::Contended => Published::Refused,
                    Put::Unknown(unknown) => {
                        tracing::info!(%shard, error = %unknown.error(), "nobody knows whether it was written");
                        Published::Unknown
                    }
                }
            }
        };
        done.outcome = match published {
            Published::Nothing => Outcome::Unchanged,
            Published::Stored => Outcome::Published,
            Published::Refused => Outcome::Refused,
            Published::Unknown => {
                Outcome::Aborted { reason: "it is not known whether the shard was written".into() }
            }
        };
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

    /// Reads the inbox.
    async fn take(
        &self,
        shard: Shard,
        work: &Work,
        options: &CompactOptions,
        unsorted: Option<&dyn Source>,
        budget: usize,
    ) -> Result<Taken, Stop> {
        let known = self.known();
        let most = self.0.settings.most_objects.max(1);
        let mut pending = match &work.pending {
            Some(pending) => pending.clone(),
            None => self.list_inbox(shard, most).await?,
        };
        let more = match work.pending {
            Some(_) => work.more,
            None => pending.len() == most,
        };
        let folder = self.0.settings.spool_folder.clone();
        let mut reading = Reading {
            schema: known.schema.clone(),
            width: known.package.width,
            shard,
            ahead: i64::MAX,
            moved: 0,
            sorter: Sorter::new(known.schema.clone(), folder, budget),
            quarantined: 0,
            bad: Vec::new(),
            strays: BTreeMap::new(),
        };
        let (mut gone, mut flat) = (false, Vec::new());
        for keys in pending.chunks(1024) {
            let each = |key: &Key, object: Option<crate::store::Object>| {
                let Some(object) = object else {
                    gone = true;
                    return Ok(());
                };
                // What one of us put was checked then, and its name is not used again. Others' records
                // are judged by the time of this very answer: it may have taken us an hour to ask.
                let ours = self.0.layout.is_ours(key.as_str());
                let ahead = object.meta.now.plus(AHEAD).as_micros();
                reading.ahead = if ours { i64::MAX } else { ahead };
                reading.read(key, &object.body)?;
                if !ours {
                    flat.push((key.clone(), object.meta.version));
                }
                Ok(())
            };
            let large = self.read_objects(keys, each).await?;
            for key in large {
                let ours = self.0.layout.is_ours(key.as_str());
                reading.ahead = match ours {
                    true => i64::MAX,
                    false => self.now().await?.plus(AHEAD).as_micros(),
                };
                match self.take_large(&key, shard, &mut reading, options).await? {
                    Some(version) if !ours => flat.push((key, version)),
                    Some(_) => {}
                    None => gone = true,
                }
            }
            if gone {
                // Merged by another compiler, whose shard is not the one that we opened.
                return Err(Stop::Abort("another compiler has taken the inbox".to_owned()));
            }
            self.set_aside(shard, &mut reading, options).await?;
        }
        if !flat.is_empty() {
            pending.retain(|key| self.0.layout.is_ours(key.as_str()));
        }
        for keys in work.flat.chunks(1024) {
            let each = |key: &Key, object: Option<crate::store::Object>| {
                // One that is gone was merged, or taken back by whoever wrote it.
                if let Some(object) = object {
                    reading.ahead = object.meta.now.plus(AHEAD).as_micros();
                    reading.read(key, &object.body)?;
                    flat.push((key.clone(), object.meta.version));
                }
                Ok(())
            };
            let large = self.read_objects(keys, each).await?;
            for key in large {
                let version = self.take_large(&key, shard, &mut reading, options).await?;
                flat.extend(version.map(|version| (key, version)));
            }
            self.set_aside(shard, &mut reading, options).await?;
        }
        let records = reading.sorter.pushed() + reading.quarantined;
        let resorted = match unsorted {
            Some(source) => Some(self.take_shard(source, shard, &mut reading, options).await?),
            None => None,
        };
        let Reading { sorter, quarantined, .. } = reading;
        Ok(Taken { sorted: sorter.finish()?, records, quarantined, pending, flat, more, resorted })
    }

    /// Reads an object that is too large for memory, and returns its version, or `None` if it is gone.
    async fn take_large(
        &self,
        key: &Key,
        shard: Shard,
        reading: &mut Reading,
        options: &CompactOptions,
    ) -> Result<Option<Version>, Stop> {
        let Some(source) = self.0.store.open(key).await? else { return Ok(None) };
        let mut pieces = Pieces::new(&*source);
        while let Some(rows) = pieces.next().await? {
            reading.read(key, &rows)?;
            self.set_aside(shard, reading, options).await?;
        }
        Ok(Some(source.meta().version.clone()))
    }

    /// Reads a shard that is not sorted like an inbox.
    async fn take_shard(
        &self,
        source: &dyn Source,
        shard: Shard,
        reading: &mut Reading,
        options: &CompactOptions,
    ) -> Result<Resorted, Stop> {
        let mut resorted = Resorted::default();
        let mut pieces = Pieces::new(source);
        let key = self.0.layout.shard(shard);
        // Whatever its time says: it is there.
        reading.ahead = i64::MAX;
        reading.moved = 0;
        while let Some(rows) = pieces.next().await? {
            for row in usv::rows(&rows) {
                resorted.rows += 1;
                resorted.digest = resorted.digest.plus(Digest::of(row));
            }
            reading.read(&key, &rows)?;
            self.set_aside(shard, reading, options).await?;
        }
        resorted.moved = reading.moved;
        Ok(resorted)
    }

    /// Puts away what is not for this shard, before anything is deleted that it came from.
    async fn set_aside(
        &self,
        shard: Shard,
        reading: &mut Reading,
        options: &CompactOptions,
    ) -> Result<(), Stop> {
        if !reading.bad.is_empty() {
            self.still_that(&reading.schema).await?;
        }
        for (source, bad) in std::mem::take(&mut reading.bad) {
            self.quarantine(shard, &source, &bad, &options.worker).await?;
        }
        for (other, rows) in std::mem::take(&mut reading.strays) {
            self.forward(other, rows).await?;
        }
        Ok(())
    }

    /// Rows that do not fit may be of a newer schema than ours: then they are not bad, we are late.
    async fn still_that(&self, schema: &Schema) -> Result<(), Stop> {
        self.refresh().await?;
        match self.schema().fingerprint() == schema.fingerprint() {
            true => Ok(()),
            false => Err(Stop::Abort("the schema was changed meanwhile".to_owned())),
        }
    }

    /// Whether publishing still makes sense.
    fn still_ours(&self, started: BootTime, tenure: Option<&Tenure>) -> Result<(), Stop> {
        if self.0.store.env().clock().boot().since(started) > PUBLISH_WITHIN {
            return Err(Stop::Abort("the shard was read too long ago".to_owned()));
        }
        match tenure.map(Tenure::check) {
            Some(Err(_)) => Err(Stop::Abort("the shard's lease was lost".to_owned())),
            _ => Ok(()),
        }
    }

    /// Notes what is known of the new shard. If that fails, the next compaction reads every row.
    async fn note(
        &self,
        after: Compacted,
        current: Option<&Statistics>,
        last: Option<&Statistics>,
        schema: String,
        options: &CompactOptions,
    ) {
        let Compacted { shard, version, before, len, tally } = after;
        let digest_before = tally.before.or(current.map(|s| s.digest)).unwrap_or_default();
        let deletions = current.map_or(tally.deletions_before, |statistics| statistics.deletions);
        let Ok(now) = self.now().await else { return };
        let statistics = Statistics {
            version: version.as_str().to_owned(),
            schema,
            rows: tally.counts.rows_after,
            deletions: deletions.saturating_add_signed(tally.deletions),
            bytes: len,
            digest: digest_before.plus(tally.written).minus(tally.removed),
            generation: last.map_or(0, |statistics| statistics.generation).saturating_add(1),
            compacted_at: now,
            worker_id: options.worker.clone(),
            version_before: before.map_or_else(String::new, |version| version.as_str().to_owned()),
            digest_before,
            digest_written: tally.written,
            digest_removed: tally.removed,
            last: tally.counts,
        };
        let key = self.0.layout.statistics(shard);
        let write = Write::any().durability(Durability::Volatile);
        match self.0.store.put(&key, statistics.to_bytes().into(), write).await {
            Ok(Put::Stored(_)) => {}
            other => tracing::debug!(?other, %shard, "the statistics could not be written"),
        }
    }

    /// Deletes what was merged. What cannot be deleted now is merged again, to no effect, and deleted
    /// then.
    async fn sweep(&self, done: &mut Compaction, pending: &[Key], flat: &[(Key, Version)]) {
        let store = &self.0.store;
        let mut swept = Ok(());
        for keys in pending.chunks(1000) {
            swept = store.discard(keys).await;
            if swept.is_err() {
                break;
            }
            done.swept += keys.len() as u64;
        }
        for (key, version) in flat {
            // Only in the version that was merged: whoever overwrote it meanwhile meant it.
            let deleted = match mutant::is(Mutant::InboxOverwrite) {
                true => store.delete(key).await,
                false => store.delete_version(key, version).await,
            };
            match deleted {
                Ok(Delete::Deleted) => done.swept += 1,
                Ok(Delete::Refused | Delete::Contended | Delete::Unknown(_)) => {}
                Err(error) if error.kind() == ErrorKind::Unsupported => done.left += 1,
                Err(error) => swept = Err(error),
            }
        }
        if let Err(error) = swept {
            tracing::warn!(%error, shard = %done.shard, "merged records could not be deleted yet");
        }
    }
}

struct Compacted {
    shard: Shard,
    version: Version,
    before: Option<Version>,
    len: u64,
    tally: Tally,
}

/// Reads inbox objects into a sorter.
struct Reading {
    schema: Arc<Schema>,
    width: leasehold_protocol::shard::Width,
    shard: Shard,
    ahead: i64,
    sorter: Sorter,
    quarantined: u64,
    bad: Vec<(String, Vec<Bad>)>,
    strays: BTreeMap<Shard, Vec<u8>>,
    moved: u64,
}

impl Reading {
    fn read(&mut self, key: &Key, body: &Bytes) -> Result<()> {
        let mut bad = Vec::new();
        for raw in usv::rows(body) {
            let Self { schema, width, shard, ahead, strays, moved, .. } = self;
            let pushed = self.sorter.push(|out| {
                let start = out.len();
                let row = match schema.canonical(raw, out) {
                    Ok(row) => row,
                    Err(error) => return Err(Some(error.to_string())),
                };
                if row.updated_at > *ahead {
                    return Err(Some(
                        "updated_at is more than 5 minutes ahead of the store's clock".to_owned(),
                    ));
                }
                let home = KeyHash::of_field(&out[start..start + row.key_len]).shard(*width);
                if home != *shard {
                    *moved += 1;
                    let rows = strays.entry(home).or_default();
                    rows.extend_from_slice(&out[start..]);
                    rows.push(usv::END);
                    return Err(None);
                }
                Ok(row.key_len)
            })?;
            if let Err(Some(reason)) = pushed {
                self.quarantined += 1;
                bad.push(Bad { row: raw.to_vec(), reason });
            }
        }
        if !bad.is_empty() {
            self.bad.push((key.as_str().to_owned(), bad));
        }
        Ok(())
    }
}

/// Merges a shard with what was taken in, piece by piece.
struct Merging<'a> {
    index: &'a Index,
    shard: Shard,
    schema: Arc<Schema>,
    merger: Merger,
    spool: Spool,
    tenure: Option<&'a Tenure>,
}

impl Merging<'_> {
    async fn run(&mut self, source: Option<&dyn Source>, sorted: &mut Sorted) -> Result<(), Stop> {
        let mut out = Vec::new();
        if let Some(source) = source {
            let mut pieces = Pieces::new(source);
            while let Some(rows) = pieces.next().await? {
                let mut rest = &rows[..];
                // Room for the whole at once: growing would copy it again and again.
                out.reserve(rest.len() + rest.len() / 8);
                while !rest.is_empty() {
                    let enough = rest.len().max(STEP) * 2;
                    let done = self.merger.merge(rest, sorted, &mut out, enough).map_err(stop)?;
                    rest = &rest[done..];
                    self.put_away(&mut out).await?;
                }
            }
        }
        loop {
            let finished = self.merger.finish(sorted, &mut out, STEP).map_err(stop)?;
            self.put_away(&mut out).await?;
            if finished {
                debug_assert!(sorted.head().is_none());
                return Ok(());
            }
        }
    }

    async fn put_away(&mut self, out: &mut Vec<u8>) -> Result<(), Stop> {
        self.spool.append(out)?;
        let bad = self.merger.take_bad();
        if !bad.is_empty() {
            self.index.still_that(&self.schema).await?;
            let source = self.index.0.layout.shard(self.shard);
            self.index.quarantine(self.shard, source.as_str(), &bad, "").await?;
        }
        for (home, rows) in self.merger.take_strays() {
            self.index.forward(home, rows).await?;
        }
        if let Some(Err(_)) = self.tenure.map(Tenure::check) {
            return Err(Stop::Abort("the shard's lease was lost".to_owned()));
        }
        tokio::task::yield_now().await;
        Ok(())
    }
}

fn stop(error: MergeError<Error>) -> Stop {
    match error {
        MergeError::Disorder => Stop::Disorder,
        MergeError::Incoming(error) => Stop::Failed(error),
    }
}

/// A shard in pieces of whole rows.
pub(super) struct Pieces<'a> {
    source: &'a dyn Source,
    at: u64,
    /// The beginning of a row whose end is in the next piece.
    cut: Vec<u8>,
}

impl<'a> Pieces<'a> {
    pub fn new(source: &'a dyn Source) -> Self {
        Self { source, at: 0, cut: Vec::new() }
    }

    /// The next rows, all of them whole.
    pub async fn next(&mut self) -> Result<Option<Bytes>> {
        let size = self.source.meta().size;
        while self.at < size {
            let piece = self.source.read_at(self.at, STEP * 2).await?;
            if piece.is_empty() {
                return Err(Error::unavailable("a shard ended too early"));
            }
            self.at += piece.len() as u64;
            let end = if self.at >= size { piece.len() } else { usv::complete(&piece) };
            if end == 0 {
                self.cut.extend_from_slice(&piece);
                continue;
            }
            if self.cut.is_empty() {
                self.cut = piece[end..].to_vec();
                return Ok(Some(piece.slice(..end)));
            }
            let mut rows = std::mem::take(&mut self.cut);
            rows.extend_from_slice(&piece[..end]);
            self.cut = piece[end..].to_vec();
            return Ok(Some(rows.into()));
        }
        match self.cut.is_empty() {
            true => Ok(None),
            false => Ok(Some(std::mem::take(&mut self.cut).into())),
        }
    }
}
