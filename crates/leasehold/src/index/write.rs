//! Putting records into the inbox.
//!
//! Every object there has a name of its own and is never changed, so an older record cannot take the
//! place of a newer one before a compiler runs (FIELD.md rows 8 and 11). Which counts is decided when
//! they are merged or read.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use bytes::Bytes;
use leasehold_protocol::format::row::{Canonical, RowError};
use leasehold_protocol::format::usv;
use leasehold_protocol::mutant::{self, Mutant};
use leasehold_protocol::settle::Proof;
use leasehold_protocol::shard::{KeyHash, Shard};
use leasehold_protocol::time::StoreTime;
use serde::Serialize;
use serde_json::{Map, Value};
use tokio::task::JoinSet;

use super::Index;
use crate::env::BootTime;
use crate::store::{Put, Write};
use crate::{Error, ErrorKind, Key, Result, Store, When};

/// How far ahead of the store's clock a record's time may be. One from the far future would win every
/// merge until then.
pub(super) const AHEAD: Duration = Duration::from_secs(300);

/// How many keys are looked up at a time.
const AT_ONCE: usize = 16;

/// For how long our own clock goes on with what the store told. A wall clock that is set meanwhile is
/// seen after this.
const TOLD_FOR: Duration = Duration::from_millis(100);

impl Index {
    /// Writes a record, which every reader sees from now on. `Invalid` if it does not fit the schema.
    /// One PUT.
    ///
    /// It counts from its own `updated_at` if it has one, else from now by the store's clock.
    pub async fn put(&self, record: &impl Serialize) -> Result<()> {
        let record = to_map(record)?;
        let mut batch = self.batch().await?;
        self.add_to(&mut batch, &record).await?;
        batch.flush().await
    }

    /// Writes many records. If one does not fit the schema, nothing is written. One PUT per shard.
    pub async fn put_many<T: Serialize>(&self, records: impl IntoIterator<Item = T>) -> Result<()> {
        let mut batch = self.batch().await?;
        // Not one by one as below: then all that the records come from would have to be `Send`.
        let mut rest = Vec::new();
        for record in records {
            let record = to_map(&record)?;
            if !rest.is_empty() || batch.put_json(&record).is_err() {
                rest.push(record);
            }
        }
        for record in &rest {
            self.add_to(&mut batch, record).await?;
        }
        batch.flush().await
    }

    /// Adds a record to a batch. One that does not fit our schema may fit a newer one.
    async fn add_to(&self, batch: &mut Batch, record: &Map<String, Value>) -> Result<()> {
        let schema = self.schema();
        let Err(error) = batch.put_json(record) else { return Ok(()) };
        match self.has_other_schema(&schema).await {
            Ok(true) => batch.put_json(record),
            Ok(false) | Err(_) => Err(error),
        }
    }

    /// Writes a record that counts from now on, also where that of its key says a later time than it
    /// is: a clock was set back, or it was put by somebody whose clock is ahead. One that has an
    /// `updated_at` of its own counts from that, as with [`put`](Self::put).
    ///
    /// What [`get_row`](Self::get_row) costs, and one PUT.
    pub async fn replace(&self, record: &impl Serialize) -> Result<()> {
        let record = to_map(record)?;
        let schema = self.schema();
        let text = |place: usize| match record.get(&schema.fields()[place].name) {
            Some(Value::String(text)) if !text.is_empty() => Some(text.clone()),
            Some(Value::Number(number)) => Some(number.to_string()),
            _ => None,
        };
        let after = match (text(0), text(schema.updated_at())) {
            (Some(key), None) => self.time_of(&key).await?,
            // Without a key it is refused; with a time of its own it has that.
            _ => None,
        };
        let mut batch = self.batch().await?;
        batch.after = after;
        self.add_to(&mut batch, &record).await?;
        batch.flush().await
    }

    /// Deletes the record with this key, whether there is one or not, and whatever time it says. What
    /// [`get_row`](Self::get_row) costs, and one PUT.
    pub async fn delete(&self, key: &str) -> Result<()> {
        self.delete_many([key]).await
    }

    /// The same of many keys. If one cannot be a key, nothing is written. One PUT per shard.
    pub async fn delete_many<T: Into<String>>(
        &self,
        keys: impl IntoIterator<Item = T>,
    ) -> Result<()> {
        let keys: Vec<String> = keys.into_iter().map(Into::into).collect();
        let mut batch = self.batch().await?;
        for keys in keys.chunks(AT_ONCE) {
            let mut looks = JoinSet::new();
            for key in keys.iter().cloned() {
                let index = self.clone();
                looks.spawn(async move { index.time_of(&key).await.map(|after| (key, after)) });
            }
            while let Some(looked) = looks.join_next().await {
                let (key, after) = looked.map_err(interrupted)??;
                batch.after = after;
                batch.delete(&key)?;
            }
        }
        batch.flush().await
    }

    /// Collects records, to be written together.
    pub async fn batch(&self) -> Result<Batch> {
        let now = self.now().await?;
        Ok(Batch {
            index: self.clone(),
            now,
            at: self.store().env().clock().boot(),
            after: None,
            groups: BTreeMap::new(),
            row: Vec::new(),
            bytes: 0,
            count: 0,
        })
    }

    /// The time of a record that does not say its own: the store's, and later than any before, so
    /// that of two puts of one process the second one counts.
    fn next_time(&self, now: StoreTime) -> StoreTime {
        let next = |last: i64| Some(now.as_micros().max(last.saturating_add(1)));
        let last = self.0.last.fetch_update(SeqCst, SeqCst, next).unwrap_or(i64::MIN);
        StoreTime::from_micros(now.as_micros().max(last.saturating_add(1)))
    }

    /// The same without counting it, for what may turn out not to be needed.
    fn mark_time(&self, used: i64) {
        self.0.last.fetch_max(used, SeqCst);
    }
}

/// Records that are to be written together: one object per shard.
#[derive(Debug)]
pub struct Batch {
    index: Index,
    /// The store's time,
    now: StoreTime,
    /// when our clock showed this.
    at: BootTime,
    /// The time of a record that the next one is to count after.
    after: Option<i64>,
    groups: BTreeMap<Shard, Group>,
    row: Vec<u8>,
    bytes: usize,
    count: usize,
}

#[derive(Debug, Default)]
struct Group {
    rows: Vec<u8>,
    count: usize,
    hash: Option<KeyHash>,
}

impl Batch {
    /// Adds a record.
    pub fn put(&mut self, record: &impl Serialize) -> Result<()> {
        self.put_json(&to_map(record)?)
    }

    /// Adds a record by field names.
    pub fn put_json(&mut self, record: &Map<String, Value>) -> Result<()> {
        let schema = self.index.schema();
        self.add(|now, row| schema.write_json(record, now, row))
    }

    /// Adds a record from texts in the order of the fields.
    pub fn put_texts<'a>(&mut self, values: impl IntoIterator<Item = &'a str>) -> Result<()> {
        let schema = self.index.schema();
        self.add(|now, row| schema.write_texts(values, now, row))
    }

    /// Adds a row of USV, with or without `updated_at`.
    pub fn put_row(&mut self, row: &[u8]) -> Result<()> {
        let text = std::str::from_utf8(row).map_err(|error| {
            Error::invalid(format!("not UTF-8 at byte {}", error.valid_up_to()))
        })?;
        let values: Vec<_> = text.split(char::from(usv::UNIT)).map(usv::unescape).collect();
        self.put_texts(values.iter().map(|value| &**value))
    }

    /// Adds the deletion of a key.
    pub fn delete(&mut self, key: &str) -> Result<()> {
        let schema = self.index.schema();
        self.add(|now, row| schema.write_deletion(key, now, row))
    }

    fn add(
        &mut self,
        write: impl FnOnce(StoreTime, &mut Vec<u8>) -> Result<Canonical, RowError>,
    ) -> Result<()> {
        let index = self.index.clone();
        let told = self.time();
        let mut now = index.next_time(told);
        if let Some(after) = self.after {
            now = now.max(StoreTime::from_micros(after.saturating_add(1)));
        }
        self.row.clear();
        let written = write(now, &mut self.row)?;
        let ahead = told.plus(AHEAD).as_micros();
        if written.updated_at > ahead && written.updated_at != now.as_micros() {
            return Err(Error::invalid(format!(
                "updated_at {} is more than 5 minutes ahead of the store's clock ({})",
                StoreTime::from_micros(written.updated_at),
                told,
            )));
        }
        self.after = None;
        // What is put after a record that named its own time counts after it. Not after one from the
        // far future: then all that this process writes would be from there.
        if written.updated_at <= ahead {
            index.mark_time(written.updated_at);
        }
        let hash = KeyHash::of_field(&self.row[..written.key_len]);
        let shard = hash.shard(index.known().package.width);
        let group = self.groups.entry(shard).or_default();
        group.rows.extend_from_slice(&self.row);
        group.rows.push(usv::END);
        group.count += 1;
        group.hash = Some(hash);
        self.bytes += self.row.len() + 1;
        self.count += 1;
        Ok(())
    }

    /// The store's time. Records may come slowly, from a pipe: each counts from when it came, not from
    /// when the first one did, or it would lose against what was put meanwhile.
    fn time(&mut self) -> StoreTime {
        let boot = self.index.store().env().clock().boot();
        let passed = boot.since(self.at);
        if passed > TOLD_FOR
            && let Some(now) = self.index.told()
        {
            (self.now, self.at) = (now, boot);
            return now;
        }
        self.now.plus(passed)
    }

    /// How many records it holds.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// How many bytes they have.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Writes them, one object per shard, and is empty then. On an error some may be there and others
    /// not; writing all of them again is safe.
    pub async fn flush(&mut self) -> Result<()> {
        let groups = std::mem::take(&mut self.groups);
        (self.bytes, self.count) = (0, 0);
        let store = self.index.store().clone();
        let mut writes = JoinSet::new();
        let one = groups.len() == 1;
        for (shard, group) in groups {
            let key = self.index.pending_key(shard, group.count, group.hash);
            let write = write_pending(store.clone(), key, group.rows.into());
            match one {
                true => return write.await,
                // All at once: in a directory they share their flushes, and a bucket's connections
                // are limited below.
                false => _ = writes.spawn(write),
            }
        }
        let mut outcome = Ok(());
        while let Some(done) = writes.join_next().await {
            outcome = outcome.and(done.map_err(interrupted).flatten());
        }
        outcome
    }
}

fn interrupted(error: tokio::task::JoinError) -> Error {
    Error::new(ErrorKind::Internal, "a write was interrupted").caused_by(error)
}

fn to_map(record: &impl Serialize) -> Result<Map<String, Value>> {
    let value = serde_json::to_value(record)
        .map_err(|error| Error::invalid(format!("the record cannot be written: {error}")))?;
    match value {
        Value::Object(record) => Ok(record),
        _ => Err(Error::invalid("a record is a struct or a map, by field name")),
    }
}

impl Index {
    fn pending_key(&self, shard: Shard, count: usize, hash: Option<KeyHash>) -> Key {
        let layout = &self.0.layout;
        let nonce = match mutant::is(Mutant::StragglerOverwrite) {
            true => crate::Nonce::from_bytes([0; 16]),
            false => self.0.store.env().nonce(),
        };
        match (count, hash) {
            (1, Some(hash)) => layout.single(&hash, shard, nonce),
            _ => layout.batch(shard, count, nonce),
        }
    }

    /// Writes rows of another shard into the inbox there.
    pub(super) async fn forward(&self, shard: Shard, rows: Vec<u8>) -> Result<()> {
        let count = usv::rows(&rows).count();
        let hash = usv::rows(&rows).next().map(|row| KeyHash::of_field(usv::first_field(row)));
        let key = self.pending_key(shard, count, hash);
        write_pending(self.0.store.clone(), key, rows.into()).await
    }
}

/// Writes an inbox object. Its name is its own, so nobody else's bytes can be there.
async fn write_pending(store: Store, key: Key, rows: Bytes) -> Result<()> {
    let when = match mutant::is(Mutant::StragglerOverwrite) {
        true => When::Any,
        false => When::Absent,
    };
    match store.put(&key, rows, Write::when(when, Proof::Bytes)).await? {
        Put::Stored(_) => Ok(()),
        Put::Refused => Err(Error::new(ErrorKind::Internal, "a name of our own is taken").at(&key)),
        Put::Contended => Err(Error::unavailable("the store is busy: try again").at(&key)),
        Put::Unknown(unknown) => Err(unknown.into_error()),
    }
}
