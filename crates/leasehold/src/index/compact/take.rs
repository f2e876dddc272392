//! Reads the inbox of a shard, and sorts it.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use leasehold_protocol::compile::Bad;
use leasehold_protocol::format::datapackage::{MAX_ROW, Schema};
use leasehold_protocol::format::usv;
use leasehold_protocol::merge::Digest;
use leasehold_protocol::shard::{KeyHash, Shard, Width};
use tokio::sync::MutexGuard;

use super::super::convoy::Place;
use super::super::inbox::{Listed, is_unreadable};
use super::super::sort::{Sorted, Sorter};
use super::super::write::AHEAD;
use super::{CompactOptions, Index, Pieces, Stop, Work};
use crate::store::Object;
use crate::store::large::Source;
use crate::{Key, Result, Version};

/// What is to be taken in.
#[derive(Debug)]
pub(super) struct Inbox<'a> {
    /// The objects. Those with names of ours are deleted whatever their version, because they have one
    /// only.
    pub keys: Cow<'a, [Key]>,
    /// How many bytes they have, as far as that was listed.
    pub bytes: u64,
    /// Whether there may be more than those.
    pub more: bool,
}

/// What was taken in.
#[derive(Debug)]
pub(super) struct Taken {
    pub sorted: Sorted,
    /// Records of this shard, readable or not.
    pub records: u64,
    pub quarantined: u64,
    /// Objects that other tools may overwrite: deleted in the version that was read.
    pub flat: Vec<(Key, Version)>,
    /// How many of those were left where they are: they cannot be read, or are still being written.
    pub left: u64,
    /// Rows of the shard itself, where it had to be sorted.
    pub resorted: Option<Resorted>,
}

/// What became of an object that is read in pieces.
enum Large {
    Gone,
    Left,
    Taken(Version),
}

#[derive(Debug, Default)]
pub(super) struct Resorted {
    pub rows: u64,
    pub moved: u64,
    pub digest: Digest,
}

impl Index {
    /// Waits for the turn to list an inbox. Names need memory too, and how much shows when they are
    /// there: so only one lists at a time, and gives up its turn once there is room for its compaction.
    pub(super) async fn turn(&self, work: &Work) -> MutexGuard<'_, ()> {
        // Whose turn it is may wait for memory that others hold who wait for us.
        work.place.iter().for_each(Place::leave);
        self.0.listing.lock().await
    }

    /// What there is to take in.
    pub(super) async fn inbox(&self, shard: Shard) -> Result<Inbox<'static>> {
        let most = self.0.settings.most_objects.max(1);
        let Listed { keys, bytes, more } = self.list_inbox(shard, most).await?;
        Ok(Inbox { keys: keys.into(), bytes, more })
    }

    /// Reads the inbox.
    pub(super) async fn take(
        &self,
        shard: Shard,
        inbox: &Inbox<'_>,
        work: &Work,
        options: &CompactOptions,
        unsorted: Option<&dyn Source>,
        budget: usize,
    ) -> Result<Taken, Stop> {
        let known = self.known();
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
        let (mut gone, mut flat, mut left) = (false, Vec::new(), 0);
        for keys in inbox.keys.chunks(1024) {
            let each = |key: &Key, object: Option<Object>| {
                let Some(object) = object else {
                    gone = true;
                    return Ok(());
                };
                // What one of us put was checked then, and its name is not used again. Others' records
                // are judged by the time of this very answer: it may have taken us an hour to ask.
                if self.0.layout.is_ours(key.as_str()) {
                    reading.ahead = i64::MAX;
                    return reading.read(key, &object.body);
                }
                match self.take_foreign(key, &object, &mut reading)? {
                    true => flat.push((key.clone(), object.meta.version)),
                    false => left += 1,
                }
                Ok(())
            };
            let unread = self.read_objects(keys, each).await?;
            left += unread.left;
            for key in unread.large {
                let ours = self.0.layout.is_ours(key.as_str());
                match self.take_large(&key, ours, shard, &mut reading, options).await? {
                    Large::Taken(version) if !ours => flat.push((key, version)),
                    Large::Taken(_) => {}
                    Large::Left => left += 1,
                    Large::Gone => gone = true,
                }
            }
            if gone {
                // Merged by another compiler, whose shard is not the one that we opened.
                return Err(Stop::Abort("another compiler has taken the inbox".to_owned()));
            }
            self.set_aside(shard, &mut reading, options).await?;
        }
        for keys in work.flat.chunks(1024) {
            let each = |key: &Key, object: Option<Object>| {
                // One that is gone was merged, or taken back by whoever wrote it.
                let Some(object) = object else { return Ok(()) };
                match self.take_foreign(key, &object, &mut reading)? {
                    true => flat.push((key.clone(), object.meta.version)),
                    false => left += 1,
                }
                Ok(())
            };
            let unread = self.read_objects(keys, each).await?;
            left += unread.left;
            for key in unread.large {
                match self.take_large(&key, false, shard, &mut reading, options).await? {
                    Large::Taken(version) => flat.push((key, version)),
                    Large::Left => left += 1,
                    Large::Gone => {}
                }
            }
            self.set_aside(shard, &mut reading, options).await?;
        }
        let records = reading.sorter.pushed() + reading.quarantined;
        let resorted = match unsorted {
            Some(source) => Some(self.take_shard(source, shard, &mut reading, options).await?),
            None => None,
        };
        let Reading { sorter, quarantined, .. } = reading;
        Ok(Taken { sorted: sorter.finish()?, records, quarantined, flat, left, resorted })
    }

    /// Reads a file of another tool, unless that may still be writing it: what it writes after the file
    /// was deleted is lost.
    fn take_foreign(&self, key: &Key, object: &Object, reading: &mut Reading) -> Result<bool> {
        if self.may_be_written(&object.meta, object.body.last().copied()) {
            return Ok(false);
        }
        reading.ahead = object.meta.now.plus(AHEAD).as_micros();
        reading.read(key, usv::unmarked(&object.body))?;
        Ok(true)
    }

    /// Reads an object that is too large for memory. As with the others, records that were not checked when
    /// they were put are judged by this answer's time.
    async fn take_large(
        &self,
        key: &Key,
        ours: bool,
        shard: Shard,
        reading: &mut Reading,
        options: &CompactOptions,
    ) -> Result<Large, Stop> {
        match self.take_pieces(key, ours, shard, reading, options).await {
            // What was read of it is merged, and merged again once the rest can be read.
            Err(Stop::Failed(error)) if !ours && is_unreadable(&error) => {
                tracing::warn!(%key, %error, "left where it is");
                Ok(Large::Left)
            }
            taken => taken,
        }
    }

    async fn take_pieces(
        &self,
        key: &Key,
        ours: bool,
        shard: Shard,
        reading: &mut Reading,
        options: &CompactOptions,
    ) -> Result<Large, Stop> {
        let Some(source) = self.0.store.open(key).await? else { return Ok(Large::Gone) };
        let meta = source.meta();
        reading.ahead = if ours { i64::MAX } else { meta.now.plus(AHEAD).as_micros() };
        if !ours {
            let last = source.read_at(meta.size.saturating_sub(1), 1).await?;
            if self.may_be_written(meta, last.last().copied()) {
                return Ok(Large::Left);
            }
        }
        let (mut pieces, mut at) = (Pieces::of_foreign(&*source), 0);
        while let Some(piece) = pieces.next().await? {
            let rows = if at == 0 && !ours { usv::unmarked(&piece) } else { &piece };
            match pieces.is_part() {
                true => reading.refuse(key, at, rows),
                false => reading.read(key, rows)?,
            }
            at += piece.len();
            self.set_aside(shard, reading, options).await?;
        }
        Ok(Large::Taken(meta.version.clone()))
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
}

/// Reads inbox objects into a sorter.
struct Reading {
    schema: Arc<Schema>,
    width: Width,
    shard: Shard,
    ahead: i64,
    sorter: Sorter,
    quarantined: u64,
    bad: Vec<(String, Vec<Bad>)>,
    strays: BTreeMap<Shard, Vec<u8>>,
    moved: u64,
}

impl Reading {
    /// Refuses part of a row that is longer than any record.
    fn refuse(&mut self, key: &Key, at: usize, part: &[u8]) {
        let row = part.strip_suffix(&[usv::END]).unwrap_or(part).to_vec();
        let reason = format!("part of a row of more than {MAX_ROW} bytes");
        self.quarantined += 1;
        // Parts may be equal, and what is the same of the same source is kept once.
        self.bad.push((format!("{key} from byte {at}"), vec![Bad { row, reason }]));
    }

    fn read(&mut self, key: &Key, body: &[u8]) -> Result<()> {
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
