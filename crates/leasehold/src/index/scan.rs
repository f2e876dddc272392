//! Reading all records: shards and inbox, merged.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use bytes::Bytes;
use leasehold_protocol::compile::{Incoming as _, MergeError, Merger, Mode};
use leasehold_protocol::format::datapackage::Schema;
use leasehold_protocol::format::row::is_true;
use leasehold_protocol::format::usv;
use leasehold_protocol::shard::{KeyHash, Shard};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::Index;
use super::compact::Pieces;
use super::read::{Freshness, Loaded};
use super::sort::{Sorted, Sorter};
use super::write::AHEAD;
use crate::store::large::{Source, Whole};
use crate::store::{Meta, Object};
use crate::{Error, ErrorKind, Key, Result, StoreTime, Version};

/// How much of an inbox is sorted in memory.
const BUDGET: usize = 8 << 20;

/// How much a chunk may be longer than what was read of the shard.
const ENOUGH: usize = 1 << 20;

/// More inbox objects than this are listed shard by shard.
const MOST_LISTED: usize = 100_000;

/// Some rows of a shard, in order: the latest of each key, deletions among them.
#[derive(Debug, Clone)]
pub struct Chunk {
    /// Of which shard.
    pub shard: Shard,
    /// Whole rows.
    pub rows: Bytes,
}

impl Chunk {
    /// The rows of records. Deletions are left out.
    pub fn records<'a>(&'a self, schema: &'a Schema) -> impl Iterator<Item = &'a [u8]> + 'a {
        let deleted = schema.deleted();
        usv::rows(&self.rows).filter(move |row| !is_true(usv::field(row, deleted)))
    }
}

/// All records of an index, as they come. Dropping it ends the reading.
#[derive(Debug)]
pub struct Scan {
    schema: Arc<Schema>,
    chunks: mpsc::Receiver<Result<Chunk>>,
    _tasks: JoinSet<()>,
}

impl Scan {
    /// What the records look like.
    pub fn schema(&self) -> &Arc<Schema> {
        &self.schema
    }

    /// The next rows, or `None` after the last. Rows of one shard come in order, shards in any.
    pub async fn next(&mut self) -> Result<Option<Chunk>> {
        self.chunks.recv().await.transpose()
    }

    /// The same where there is no async. Must not be called from a runtime's thread.
    pub fn blocking_next(&mut self) -> Result<Option<Chunk>> {
        self.chunks.blocking_recv().transpose()
    }
}

impl Index {
    /// All records, what is pending included. One LIST of the inbox, then one GET per shard and per
    /// pending object; `parallel` shards at a time.
    pub async fn scan(&self, parallel: usize) -> Result<Scan> {
        self.scan_shards(self.shards().collect(), parallel).await
    }

    /// The same of some shards.
    pub async fn scan_shards(&self, shards: Vec<Shard>, parallel: usize) -> Result<Scan> {
        // Records of a newer schema than ours would look damaged.
        self.refresh().await?;
        // The inbox first, then the shards: what is merged in between is seen in both.
        let backlog = self.backlog(MOST_LISTED).await?;
        let mut flat = BTreeMap::new();
        let mut files = self.flat_files()?;
        while let Some(more) = files.next(MOST_LISTED).await? {
            for (shard, mut keys) in more {
                flat.entry(shard).or_insert_with(Vec::new).append(&mut keys);
            }
        }
        let existing = match self.store().kind().is_bucket() {
            // One LIST saves the GETs of shards that are not there.
            true => Some(self.existing_shards().await?),
            false => None,
        };
        let plan = Arc::new(Plan { index: self.clone(), shards, backlog, flat, existing });
        let (send, chunks) = mpsc::channel(parallel.max(1) * 2);
        let next = Arc::new(AtomicUsize::new(0));
        let mut tasks = JoinSet::new();
        for _ in 0..parallel.max(1) {
            let (plan, next, send) = (plan.clone(), next.clone(), send.clone());
            tasks.spawn(async move {
                while let Some(shard) = plan.shards.get(next.fetch_add(1, Relaxed)) {
                    if let Err(error) = plan.read(*shard, &send).await {
                        let _ = send.send(Err(error)).await;
                        return;
                    }
                    if send.is_closed() {
                        return;
                    }
                }
            });
        }
        Ok(Scan { schema: self.schema(), chunks, _tasks: tasks })
    }
}

struct Plan {
    index: Index,
    shards: Vec<Shard>,
    backlog: super::inbox::Backlog,
    flat: super::inbox::Flat,
    existing: Option<std::collections::BTreeSet<Shard>>,
}

impl Plan {
    async fn read(&self, shard: Shard, send: &mpsc::Sender<Result<Chunk>>) -> Result<()> {
        let index = &self.index;
        let mut keys: Vec<Key> = match self.backlog.get(&shard) {
            Some(listed) if listed.more => index.list_inbox(shard, usize::MAX).await?.keys,
            Some(listed) => listed.keys.clone(),
            None => Vec::new(),
        };
        keys.extend(self.flat.get(&shard).into_iter().flatten().cloned());
        let sorted = match keys.is_empty() {
            true => Sorted::empty(),
            false => self.pending(shard, &keys).await?,
        };
        // A shard that was not there when we listed them may be by now, with what was pending.
        let absent = self.existing.as_ref().is_some_and(|existing| !existing.contains(&shard));
        let source = match absent && keys.is_empty() {
            true => None,
            false => self.open(shard).await?,
        };
        match source {
            Some(source) => self.merge(shard, &*source, sorted, &keys, send).await,
            None => self.finish(shard, &mut self.merger(), sorted, send).await,
        }
    }

    fn merger(&self) -> Merger {
        Merger::new(self.index.schema(), Mode::Copy, None)
    }

    /// Through the cache where that saves the transfer.
    async fn open(&self, shard: Shard) -> Result<Option<Box<dyn Source>>> {
        if !self.index.prefers_cache(shard) {
            return self.index.store().open(&self.index.0.layout.shard(shard)).await;
        }
        Ok(match self.index.load_shard(shard, Freshness::Checked).await? {
            Loaded::Large(source) => Some(source),
            Loaded::Whole(cached) => {
                let (now, size) = (StoreTime::from_micros(0), cached.body.len() as u64);
                let meta = Meta { version: Version::new("cached"), modified: now, now, size };
                Some(Box::new(Whole(Object { body: cached.body.clone(), meta })))
            }
        })
    }

    async fn pending(&self, shard: Shard, keys: &[Key]) -> Result<Sorted> {
        let index = &self.index;
        let schema = index.schema();
        let width = index.package().width;
        let ahead = index.now().await?.plus(AHEAD).as_micros();
        let folder = index.settings().spool_folder.clone();
        let mut sorter = Sorter::new(schema.clone(), folder, BUDGET);
        let mut read = |key: &Key, rows: &[u8], start: bool| {
            let checked = index.0.layout.is_ours(key.as_str());
            let rows = if start && !checked { usv::unmarked(rows) } else { rows };
            for raw in usv::rows(rows) {
                let pushed = sorter.push(|out| {
                    let start = out.len();
                    let row = schema.canonical(raw, out).map_err(|_| ())?;
                    let home = KeyHash::of_field(&out[start..start + row.key_len]);
                    // What cannot be read, or is elsewhere at home, does not count here.
                    let timely = checked || row.updated_at <= ahead;
                    match timely && home.shard(width) == shard {
                        true => Ok(row.key_len),
                        false => Err(()),
                    }
                })?;
                let _ = pushed;
            }
            Ok(())
        };
        // One that is gone is in the shard by now, which is read after this.
        let each = |key: &Key, object: Option<Object>| match object {
            Some(object) => read(key, &object.body, true),
            None => Ok(()),
        };
        for key in index.read_objects(keys, each).await?.large {
            let Some(source) = index.store().open(&key).await? else { continue };
            let (mut pieces, mut start) = (Pieces::of_foreign(&*source), true);
            while let Some(rows) = pieces.next().await? {
                if !pieces.is_part() {
                    read(&key, &rows, start)?;
                }
                start = false;
            }
        }
        sorter.finish()
    }

    async fn merge(
        &self,
        shard: Shard,
        source: &dyn Source,
        mut sorted: Sorted,
        keys: &[Key],
        send: &mpsc::Sender<Result<Chunk>>,
    ) -> Result<()> {
        let mut merger = self.merger();
        let mut pieces = Pieces::new(source);
        let mut first = true;
        while let Some(rows) = pieces.next().await? {
            let foreign = memchr::memchr(usv::RECORD, &rows).is_some();
            if sorted.head().is_none() && !foreign && !first {
                if send.send(Ok(Chunk { shard, rows })).await.is_err() {
                    return Ok(());
                }
                continue;
            }
            let mut rest = &rows[..];
            while !rest.is_empty() {
                let mut out = Vec::with_capacity(rest.len() + rest.len() / 8);
                let merged = match foreign {
                    true => Err(MergeError::Disorder),
                    false => merger.merge(rest, &mut sorted, &mut out, rest.len() + ENOUGH),
                };
                match merged {
                    Ok(done) => rest = &rest[done..],
                    // Nothing of it has been sent: put it into order first.
                    Err(MergeError::Disorder) if first => {
                        return self.resort(shard, keys, send).await;
                    }
                    Err(MergeError::Disorder) => {
                        let key = self.index.0.layout.shard(shard);
                        let message = "is not in order: compact the index with --rewrite first";
                        return Err(Error::new(ErrorKind::Data, message).at(&key));
                    }
                    Err(MergeError::Incoming(error)) => return Err(error),
                }
                first = false;
                if send.send(Ok(Chunk { shard, rows: out.into() })).await.is_err() {
                    return Ok(());
                }
            }
        }
        self.finish(shard, &mut merger, sorted, send).await
    }

    /// A shard that another tool wrote, in whatever order. What is pending is read once more, and then
    /// the shard once more: what is gone from the inbox by now is not in the shard that we had.
    async fn resort(
        &self,
        shard: Shard,
        keys: &[Key],
        send: &mpsc::Sender<Result<Chunk>>,
    ) -> Result<()> {
        let index = &self.index;
        let schema = index.schema();
        let folder = index.settings().spool_folder.clone();
        let mut sorter = Sorter::new(schema.clone(), folder, BUDGET);
        let mut pending = self.pending(shard, keys).await?;
        let Some(source) = index.store().open(&index.0.layout.shard(shard)).await? else {
            return self.finish(shard, &mut self.merger(), pending, send).await;
        };
        let mut pieces = Pieces::new(&*source);
        while let Some(rows) = pieces.next().await? {
            for raw in usv::rows(&rows) {
                let read = |out: &mut Vec<u8>| schema.canonical(raw, out).map(|row| row.key_len);
                let _ = sorter.push(read)?;
            }
        }
        while let Some(row) = pending.head() {
            let key = usv::first_field(row).len();
            let pushed = sorter.push(|out| {
                out.extend_from_slice(row);
                Ok::<_, ()>(key)
            });
            let _ = pushed?;
            pending.pop()?;
        }
        self.finish(shard, &mut self.merger(), sorter.finish()?, send).await
    }

    async fn finish(
        &self,
        shard: Shard,
        merger: &mut Merger,
        mut sorted: Sorted,
        send: &mpsc::Sender<Result<Chunk>>,
    ) -> Result<()> {
        loop {
            let mut out = Vec::new();
            let finished = match merger.finish(&mut sorted, &mut out, 1 << 20) {
                Ok(finished) => finished,
                Err(MergeError::Incoming(error)) => return Err(error),
                Err(MergeError::Disorder) => true,
            };
            if !out.is_empty() && send.send(Ok(Chunk { shard, rows: out.into() })).await.is_err() {
                return Ok(());
            }
            if finished {
                return Ok(());
            }
        }
    }
}
