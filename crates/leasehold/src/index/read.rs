//! Looking records up.
//!
//! **Inbox first, then shard.** The other way round, a record that is merged in between is seen in
//! neither (FIELD.md row 28). An inbox object that is gone by the time it is read is fine for the same
//! reason: it is in the shard by now, and that is read afterwards.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use leasehold_protocol::format::datapackage::Schema;
use leasehold_protocol::format::statistics::Statistics;
use leasehold_protocol::format::usv;
use leasehold_protocol::mutant::{self, Mutant};
use leasehold_protocol::shard::{KeyHash, Shard};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::cache::{CachedShard, Flat, Kept};
use super::find::{Steps, find, find_by_reading, find_in_source, in_order, latest};
use super::inbox::is_unreadable;
use super::write::AHEAD;
use super::{Index, Inner, Known};
use crate::store::large::{PIECE, Source, Stamp};
use crate::store::{Get, Kind, List, Object};
use crate::{Error, ErrorKind, Key, Result};

/// How fresh an answer must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Freshness {
    /// What was put before is seen: 1 LIST and 1 GET, the GET without a body if the shard is known.
    #[default]
    Checked,
    /// As the shard was when it was last read, without the inbox. No request if the shard is known.
    StaleOk,
}

/// What a lookup found, and whether there was something that could not be read, or not all of it.
enum Found {
    Row(Option<Bytes>),
    Unreadable(Option<Bytes>),
}

impl Found {
    fn of(row: Option<Bytes>, unreadable: bool, schema: &Schema) -> Self {
        let most = schema.fields().len();
        match unreadable || row.as_ref().is_some_and(|row| usv::fields(row).count() > most) {
            true => Self::Unreadable(row),
            false => Self::Row(row),
        }
    }
}

/// The rows of a pending object.
struct Body {
    rows: Bytes,
    /// Whether they were checked when they were put: by one of us. A clock that is set back later
    /// must not hide them.
    checked: bool,
}

/// A shard of more than this is searched piece by piece instead of being read.
const LARGE: u64 = 64 << 20;

/// How many names of the flat inbox are kept.
const FEW: usize = 100;

/// The longest key whose name in the flat inbox is not split, however it is encoded.
const SHORT: usize = 60;

/// Each is a request to a bucket.
const LARGE_STEPS: Steps = Steps { probe: 256 << 10, block: 256 << 10 };

/// A file of less than this is read at once also the first time.
const GLANCED: u64 = 64 << 10;

/// Each is a system call.
const STEPS: Steps = Steps { probe: 1 << 10, block: 16 << 10 };

impl Index {
    /// The record with this key, or `None`. Sees what was put before.
    pub async fn get<T: DeserializeOwned>(&self, key: &str) -> Result<Option<T>> {
        let Some(record) = self.get_json(key).await? else { return Ok(None) };
        serde_json::from_value(Value::Object(record)).map(Some).map_err(|error| {
            Error::new(ErrorKind::Data, format!("the record {key:?} is of another type: {error}"))
        })
    }

    /// The same by field names.
    pub async fn get_json(&self, key: &str) -> Result<Option<Map<String, Value>>> {
        let row = self.get_row(key, Freshness::Checked).await?;
        Ok(row.map(|row| self.schema().read_json(&row)))
    }

    /// The records with these keys, in their order. Shards that several of them are in are read once.
    pub async fn get_many(&self, keys: &[String]) -> Result<Vec<Option<Map<String, Value>>>> {
        let known = self.known();
        let mut by_shard: BTreeMap<Shard, Vec<usize>> = BTreeMap::new();
        for (at, key) in keys.iter().enumerate() {
            let key = known.schema.normalise_key(key)?;
            by_shard.entry(Shard::of(&key, known.package.width)).or_default().push(at);
        }
        let mut tasks = tokio::task::JoinSet::new();
        let mut found = vec![None; keys.len()];
        let mut groups = by_shard.into_values();
        loop {
            while tasks.len() < 16
                && let Some(group) = groups.next()
            {
                let index = self.clone();
                let group: Vec<(usize, String)> =
                    group.into_iter().map(|at| (at, keys[at].clone())).collect();
                tasks.spawn(async move {
                    let mut found = Vec::with_capacity(group.len());
                    for (at, key) in group {
                        found.push((at, index.get_json(&key).await?));
                    }
                    Ok::<_, Error>(found)
                });
            }
            let Some(done) = tasks.join_next().await else { return Ok(found) };
            let done = done
                .map_err(|error| Error::unavailable("reading was interrupted").caused_by(error))?;
            for (at, record) in done? {
                found[at] = record;
            }
        }
    }

    /// The row of the record with this key, or `None`.
    pub async fn get_row(&self, key: &str, freshness: Freshness) -> Result<Option<Bytes>> {
        let (row, known) = self.latest_row(key, freshness).await?;
        Ok(row.filter(|row| !known.schema.is_deletion(row)))
    }

    /// When the latest record of this key was written, or its deletion, in microseconds since 1970.
    pub(super) async fn time_of(&self, key: &str) -> Result<Option<i64>> {
        let (row, known) = self.latest_row(key, Freshness::Checked).await?;
        Ok(row.and_then(|row| known.schema.claim(&row).map(|claim| claim.updated_at)))
    }

    /// The row with this key, deletions included, and the schema that it was read by.
    async fn latest_row(
        &self,
        key: &str,
        freshness: Freshness,
    ) -> Result<(Option<Bytes>, Arc<Known>)> {
        let known = self.known();
        let row = match self.latest_row_as(key, freshness, &known).await? {
            Found::Row(row) => return Ok((row, known)),
            // What does not fit may be of a newer schema than ours.
            Found::Unreadable(row) => row,
        };
        if !self.has_other_schema(&known.schema).await? {
            return Ok((row, known));
        }
        let known = self.known();
        match self.latest_row_as(key, freshness, &known).await? {
            Found::Row(row) | Found::Unreadable(row) => Ok((row, known)),
        }
    }

    /// Whether the schema is another one by now: a conditional GET.
    pub(super) async fn has_other_schema(&self, schema: &Schema) -> Result<bool> {
        self.refresh().await?;
        Ok(self.schema().fingerprint() != schema.fingerprint())
    }

    async fn latest_row_as(&self, key: &str, freshness: Freshness, known: &Known) -> Result<Found> {
        let key = known.schema.normalise_key(key)?;
        let hash = KeyHash::of(&key);
        let shard = hash.shard(known.package.width);
        let mut field = Vec::with_capacity(key.len());
        usv::escape(&key, &mut field);
        if freshness == Freshness::Checked
            && let Some(row) = self.row_kept(&key, &hash, &field, known)
        {
            return Ok(Found::of(row, false, &known.schema));
        }
        let (mut best, mut unreadable) = (None, false);
        let early = match mutant::is(Mutant::ReaderOrder) {
            true => Some(self.row_in_shard(shard, &field, freshness, &known.schema).await?),
            false => None,
        };
        if freshness == Freshness::Checked {
            let mut bodies = self.pending_bodies(shard, &hash).await?;
            if known.package.flat_inbox
                && let Some(body) = self.flat_body(&key).await?
            {
                bodies.push(Body { rows: body, checked: false });
            }
            for body in bodies {
                let newest = self.newest_of(&known.schema, &body, &field, &mut unreadable).await?;
                best = latest(&known.schema, best, newest);
            }
        }
        let row = match early {
            Some(row) => row,
            None => self.row_in_shard(shard, &field, freshness, &known.schema).await?,
        };
        Ok(Found::of(latest(&known.schema, best, row), unreadable, &known.schema))
    }

    /// The row of a key, where all that could tell about it is kept and still as it was: two system calls in
    /// a directory, three with the flat inbox. `None` where it takes more than that.
    fn row_kept(
        &self,
        key: &str,
        hash: &KeyHash,
        field: &[u8],
        known: &Known,
    ) -> Option<Option<Bytes>> {
        let Inner { store, layout, cache, .. } = &*self.0;
        let Kept { inbox, shard, flat } = cache.kept(hash.shard(known.package.width))?;
        let (before, guide) = (shard.stamp?, shard.guide()?);
        // In this order, as always: what is merged meanwhile is seen in the shard.
        if !store.stamp(&inbox.folder)?.confirms(&inbox.stamp)
            || !self.of_key(&inbox.keys, hash).is_empty()
        {
            return None;
        }
        if known.package.flat_inbox {
            let Flat::Known(before, Some(files)) = flat else { return None };
            let confirmed = store.stamp(layout.base().trim_end_matches('/'))?.confirms(&before);
            if !confirmed || !self.is_not_among(&files, key) {
                return None;
            }
        }
        if !store.stamp(&inbox.shard)?.confirms(&before) {
            return None;
        }
        Some(guide.find(&shard.body, field).map(|row| shard.body.slice_ref(row)))
    }

    /// Whether none of these files of the flat inbox is a key's. A long name is split: its file stands in a
    /// folder of its own, whose changes do not show in that of the others.
    fn is_not_among(&self, files: &[Key], key: &str) -> bool {
        let is_other = |flat: Key| !files.contains(&flat);
        key.len() <= SHORT && (files.is_empty() || self.0.layout.flat(key).is_ok_and(is_other))
    }

    /// What is pending and may hold a key.
    async fn pending_bodies(&self, shard: Shard, hash: &KeyHash) -> Result<Vec<Body>> {
        let mut bodies = Vec::new();
        for key in self.pending_of(shard, hash).await? {
            let checked = self.0.layout.is_ours(key.as_str());
            if let Some(rows) = self.0.cache.object(&key) {
                bodies.push(Body { rows, checked });
            } else if let Some(object) = self.get_pending(&key, checked).await? {
                // Under another tool's name there may be something else the next time.
                if checked {
                    self.0.cache.keep_object(key, object.body.clone());
                }
                bodies.push(Body { rows: object.body, checked });
            }
            // Else merged meanwhile: the shard, which is read after this, has it.
        }
        Ok(bodies)
    }

    async fn get_pending(&self, key: &Key, ours: bool) -> Result<Option<Object>> {
        match self.0.store.get(key).await {
            // It may hold any key, and must not keep us from reading the others.
            Err(error) if !ours && is_unreadable(&error) => {
                tracing::warn!(%key, %error, "left out");
                Ok(None)
            }
            read => read,
        }
    }

    async fn flat_body(&self, key: &str) -> Result<Option<Bytes>> {
        if self.is_not_flat(key).await? {
            return Ok(None);
        }
        if self.0.store.stamp(&self.0.layout.flat_text(key)) == Some(Stamp::Absent) {
            return Ok(None);
        }
        let Ok(flat) = self.0.layout.flat(key) else { return Ok(None) };
        Ok(self.0.store.get(&flat).await?.map(|object| object.body))
    }

    /// Whether the flat inbox is known not to hold a key, by the look of its folder: cheaper than a look at
    /// the file, and the same for all keys. Only in a directory, and not where others are at it right now.
    async fn is_not_flat(&self, key: &str) -> Result<bool> {
        let (store, layout, cache) = (&self.0.store, &self.0.layout, &self.0.cache);
        if store.kind() != Kind::Directory {
            return Ok(false);
        }
        let (before, known) = match cache.flat() {
            // The first look is at the file alone: there may be no second.
            Flat::New => return Ok(false),
            Flat::Unknown => (Stamp::Absent, None),
            Flat::Known(before, files) => (before, files),
        };
        let Some(stamp) = store.stamp(layout.base().trim_end_matches('/')) else {
            return Ok(false);
        };
        if stamp.confirms(&before) {
            return Ok(known.is_some_and(|files| self.is_not_among(&files, key)));
        }
        if stamp.is_settled() {
            // For the next look: what changes while it is listed shows then.
            let list = List::prefix(layout.base())?.delimited().loose().unordered();
            let mut listing = store.list(list.limit(FEW + 1));
            let (mut files, mut count) = (Vec::new(), 0);
            while let Some(page) = listing.next_page().await? {
                count += page.len();
                let names = page.entries.into_iter().map(|entry| entry.key);
                files.extend(names.filter(|key| layout.flat_name(key.as_str()).is_some()));
            }
            cache.keep_flat(stamp, (count <= FEW).then(|| files.into()));
        }
        Ok(false)
    }

    /// The row of this key in an inbox object that counts, in its one spelling. What cannot be read
    /// does not count: a compiler puts it into quarantine.
    async fn newest_of(
        &self,
        schema: &Schema,
        body: &Body,
        field: &[u8],
        unreadable: &mut bool,
    ) -> Result<Option<Bytes>> {
        let mut best = None;
        let mut row = Vec::new();
        let rows = if body.checked { &body.rows[..] } else { usv::unmarked(&body.rows) };
        for raw in usv::rows(rows) {
            row.clear();
            let Ok(parsed) = schema.canonical(raw, &mut row) else {
                *unreadable = true;
                continue;
            };
            if row[..parsed.key_len] == *field
                && (body.checked || parsed.updated_at <= self.now().await?.plus(AHEAD).as_micros())
            {
                best = latest(schema, best, Some(Bytes::copy_from_slice(&row)));
            }
        }
        Ok(best)
    }

    async fn row_in_shard(
        &self,
        shard: Shard,
        field: &[u8],
        freshness: Freshness,
        schema: &Arc<Schema>,
    ) -> Result<Option<Bytes>> {
        let cached = self.0.cache.shard(shard);
        if freshness == Freshness::Checked
            && cached.is_none()
            && let Some(found) = self.glance(shard, field).await?
        {
            return Ok(found);
        }
        let loaded = match self.load_again(shard, freshness, cached).await? {
            Loaded::Whole(loaded) => loaded,
            Loaded::Large(source) => {
                // Statistics about this very version are a compiler's of ours, and so is the shard.
                let known = self.statistics(shard).await?;
                let sorted = known.is_some_and(|s| s.version == source.meta().version.as_str());
                return match sorted {
                    true => find_in_source(&*source, field, LARGE_STEPS).await,
                    false => find_by_reading(&*source, field, schema).await,
                };
            }
        };
        if let Some(guide) = loaded.guide() {
            return Ok(guide.find(&loaded.body, field).map(|row| loaded.body.slice_ref(row)));
        }
        // Another tool wrote this shard. Once for this version: put it into order.
        let body = in_order(schema, &loaded.body);
        let row = find(&body, field).map(|row| body.slice_ref(row));
        // Kept under the same version or stamp: it is the same shard.
        let mended = CachedShard::new(loaded.version.clone(), loaded.stamp, body);
        self.0.cache.keep_shard(shard, mended);
        Ok(row)
    }

    /// Looks a row up in a shard's file without reading all of it: the first time that this process looks
    /// into a shard in a directory, which is the only time for most programs. `None` if it has to be read
    /// after all, also because it is not known to be in order.
    async fn glance(&self, shard: Shard, field: &[u8]) -> Result<Option<Option<Bytes>>> {
        let (store, cache) = (&self.0.store, &self.0.cache);
        if !cache.is_new(shard) {
            return Ok(None);
        }
        let Some((stamp, source)) = store.glance(&self.0.layout.shard(shard)) else {
            return Ok(None);
        };
        let Some(source) = source else { return Ok(Some(None)) };
        if source.meta().size < GLANCED || !stamp.is_settled() {
            return Ok(None);
        }
        let Some(file) = stamp.text() else { return Ok(None) };
        let statistics = store.get(&self.0.layout.statistics(shard)).await?;
        if !statistics.is_some_and(|object| Statistics::are_of_file(&object.body, &file)) {
            return Ok(None);
        }
        Ok(Some(find_in_source(&*source, field, STEPS).await?))
    }

    pub(super) async fn statistics(&self, shard: Shard) -> Result<Option<Statistics>> {
        let object = self.0.store.get(&self.0.layout.statistics(shard)).await?;
        Ok(object.and_then(|object| Statistics::parse(&object.body)))
    }

    /// A shard as it is now, or as it was when it was last read.
    pub(super) async fn load_shard(&self, shard: Shard, freshness: Freshness) -> Result<Loaded> {
        self.load_again(shard, freshness, self.0.cache.shard(shard)).await
    }

    /// The same, given what is kept of it.
    async fn load_again(
        &self,
        shard: Shard,
        freshness: Freshness,
        cached: Option<Arc<CachedShard>>,
    ) -> Result<Loaded> {
        if freshness == Freshness::StaleOk
            && let Some(cached) = cached
        {
            return Ok(Loaded::Whole(cached));
        }
        let (store, cache) = (&self.0.store, &self.0.cache);
        if let Some(cached) = &cached
            && let Some(before) = cached.stamp
            && store
                .stamp(&self.0.layout.shard_text(shard))
                .is_some_and(|now| now.confirms(&before))
        {
            return Ok(Loaded::Whole(cached.clone()));
        }
        let key = self.0.layout.shard(shard);
        // In a directory the stamp says what a version would.
        if let Some((stamp, body)) = store.slurp(&key) {
            let found = CachedShard::new(None, Some(stamp), body);
            return Ok(Loaded::Whole(match stamp {
                Stamp::Absent => Arc::new(found),
                Stamp::Present { .. } => cache.keep_shard(shard, found),
            }));
        }
        // Before it is read: what changes while we read shows next time.
        let stamp = store.stamp(self.0.layout.shard_text(shard).as_str());
        if stamp == Some(Stamp::Absent) {
            return Ok(Loaded::Whole(Arc::new(CachedShard::new(None, None, Bytes::new()))));
        }
        let kept = match &cached {
            Some(cached) => cached.version.clone().map(|version| (version, cached.body.clone())),
            None => cache.on_disk(shard),
        };
        if let Some((version, body)) = kept {
            match store.get_if_changed(&key, &version).await? {
                Get::Unchanged => {
                    let again = match cached {
                        Some(cached) => cached.again(stamp),
                        None => CachedShard::new(Some(version), stamp, body),
                    };
                    return Ok(Loaded::Whole(cache.keep_shard(shard, again)));
                }
                Get::Found(object) => {
                    cache.keep_on_disk(shard, &object.meta.version, &object.body);
                    let found = CachedShard::new(Some(object.meta.version), stamp, object.body);
                    return Ok(Loaded::Whole(cache.keep_shard(shard, found)));
                }
                Get::Absent => {
                    return Ok(Loaded::Whole(Arc::new(CachedShard::new(None, None, Bytes::new()))));
                }
            }
        }
        let Some(source) = store.open(&key).await? else {
            return Ok(Loaded::Whole(Arc::new(CachedShard::new(None, None, Bytes::new()))));
        };
        if source.meta().size > LARGE {
            return Ok(Loaded::Large(source));
        }
        let body = read_whole(&*source).await?;
        cache.keep_on_disk(shard, &source.meta().version, &body);
        let found = CachedShard::new(Some(source.meta().version.clone()), stamp, body);
        Ok(Loaded::Whole(cache.keep_shard(shard, found)))
    }

    /// Whether reading a shard is cheaper through the cache than as a stream.
    pub(super) fn prefers_cache(&self, shard: Shard) -> bool {
        let known = self.0.cache.shard(shard).is_some();
        known || (self.0.settings.cache_folder.is_some() && self.0.store.kind() != Kind::Directory)
    }
}

/// A shard that was read.
pub(super) enum Loaded {
    /// All of it.
    Whole(Arc<CachedShard>),
    /// Too large for that.
    Large(Box<dyn Source>),
}

async fn read_whole(source: &dyn Source) -> Result<Bytes> {
    let size = usize::try_from(source.meta().size).unwrap_or(usize::MAX);
    let first = source.read_at(0, PIECE).await?;
    if first.len() >= size {
        return Ok(first);
    }
    let mut body = Vec::with_capacity(size);
    body.extend_from_slice(&first);
    while body.len() < size {
        let piece = source.read_at(body.len() as u64, PIECE).await?;
        if piece.is_empty() {
            return Err(Error::unavailable("a shard ended too early"));
        }
        body.extend_from_slice(&piece);
    }
    Ok(body.into())
}
