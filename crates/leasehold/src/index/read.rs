//! Looking records up.
//!
//! **Inbox first, then shard.** The other way round, a record that is merged in between is seen in
//! neither (FIELD.md row 28). An inbox object that is gone by the time it is read is fine for the same
//! reason: it is in the shard by now, and that is read afterwards.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use leasehold_protocol::format::datapackage::Schema;
use leasehold_protocol::format::usv;
use leasehold_protocol::merge::Claim;
use leasehold_protocol::mutant::{self, Mutant};
use leasehold_protocol::shard::{KeyHash, Shard};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::cache::CachedShard;
use super::write::AHEAD;
use super::{Index, Known};
use crate::store::large::{PIECE, Source, Stamp};
use crate::store::{Get, Kind};
use crate::{Error, ErrorKind, Result};

/// How fresh an answer must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Freshness {
    /// What was put before is seen: 1 LIST and 1 GET, the GET without a body if the shard is known.
    #[default]
    Checked,
    /// As the shard was when it was last read, without the inbox. No request if the shard is known.
    StaleOk,
}

/// What a lookup found, and whether there was something pending that could not be read.
enum Found {
    Row(Option<Bytes>),
    Unreadable(Option<Bytes>),
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
        let known = self.known();
        match self.get_row_as(key, freshness, &known).await? {
            Found::Row(row) => Ok(row),
            // A pending record that does not fit may be of a newer schema than ours.
            Found::Unreadable(row) => {
                self.refresh().await?;
                let now = self.known();
                if now.schema.fingerprint() == known.schema.fingerprint() {
                    return Ok(row);
                }
                match self.get_row_as(key, freshness, &now).await? {
                    Found::Row(row) | Found::Unreadable(row) => Ok(row),
                }
            }
        }
    }

    async fn get_row_as(&self, key: &str, freshness: Freshness, known: &Known) -> Result<Found> {
        let key = known.schema.normalise_key(key)?;
        let hash = KeyHash::of(&key);
        let shard = hash.shard(known.package.width);
        let mut field = Vec::with_capacity(key.len());
        usv::escape(&key, &mut field);
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
        let best = latest(&known.schema, best, row);
        let best = best.filter(|row| !known.schema.claim(row).is_some_and(|claim| claim.deleted));
        Ok(if unreadable { Found::Unreadable(best) } else { Found::Row(best) })
    }

    /// What is pending and may hold a key.
    async fn pending_bodies(&self, shard: Shard, hash: &KeyHash) -> Result<Vec<Body>> {
        let mut bodies = Vec::new();
        for key in self.pending_of(shard, hash).await? {
            let checked = self.0.layout.is_ours(key.as_str());
            if let Some(rows) = self.0.cache.object(&key) {
                bodies.push(Body { rows, checked });
            } else if let Some(object) = self.0.store.get(&key).await? {
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

    async fn flat_body(&self, key: &str) -> Result<Option<Bytes>> {
        // Long names are cut into folders, which change without the flat inbox' own folder changing.
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_');
        if key.len() < 128 && key.bytes().all(plain) && self.flat_is_empty().await? {
            return Ok(None);
        }
        if self.0.store.stamp(&self.0.layout.flat_text(key)) == Some(Stamp::Absent) {
            return Ok(None);
        }
        let Ok(flat) = self.0.layout.flat(key) else { return Ok(None) };
        Ok(self.0.store.get(&flat).await?.map(|object| object.body))
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
        for raw in usv::rows(&body.rows) {
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
        let loaded = match self.load_shard(shard, freshness).await? {
            Loaded::Whole(loaded) => loaded,
            Loaded::Large(source) => return find_in_source(&*source, field).await,
        };
        let found = find(&loaded.body, field);
        if let Some(row) = found.filter(|row| is_single(&loaded.body, row)) {
            return Ok(Some(loaded.body.slice_ref(row)));
        }
        if found.is_none() && (loaded.was_checked() || is_in_order(&loaded.body)) {
            return Ok(None);
        }
        // Another tool wrote this shard. Once for this version: put it into order.
        let body = in_order(schema, &loaded.body);
        let row = find(&body, field).map(|row| body.slice_ref(row));
        // Kept under the same version or stamp: it is the same shard.
        let mended = CachedShard::new(loaded.version.clone(), loaded.stamp, body);
        mended.was_checked();
        self.0.cache.keep_shard(shard, mended);
        Ok(row)
    }

    /// A shard as it is now, or as it was when it was last read.
    pub(super) async fn load_shard(&self, shard: Shard, freshness: Freshness) -> Result<Loaded> {
        let cached = self.0.cache.shard(shard);
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
                    let again = CachedShard::new(Some(version), stamp, body);
                    if cached.is_some_and(|cached| cached.was_checked()) {
                        again.was_checked();
                    }
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

fn latest(schema: &Schema, a: Option<Bytes>, b: Option<Bytes>) -> Option<Bytes> {
    let (Some(first), Some(second)) = (&a, &b) else { return a.or(b) };
    let wins = match (schema.claim(first), schema.claim(second)) {
        (Some(first), Some(second)) => Claim::against(&first, &second).is_ge(),
        (first, _) => first.is_some(),
    };
    if wins { a } else { b }
}

/// The row of this key in a sorted shard.
fn find<'a>(body: &'a [u8], key: &[u8]) -> Option<&'a [u8]> {
    let (mut low, mut high) = (0, body.len());
    while low < high {
        let middle = low + (high - low) / 2;
        let start = memchr::memrchr(usv::END, &body[low..middle]).map_or(low, |at| low + at + 1);
        let end = memchr::memchr(usv::END, &body[start..]).map_or(body.len(), |at| start + at);
        let row = &body[start..end];
        match usv::first_field(row).cmp(key) {
            std::cmp::Ordering::Less => low = end + 1,
            std::cmp::Ordering::Greater => high = start,
            std::cmp::Ordering::Equal => return Some(row),
        }
    }
    None
}

/// Whether a row that was found is whole and the only one of its key, as its neighbours tell: other
/// tools may have ended records otherwise, or have put two shards together.
fn is_single(body: &[u8], row: &[u8]) -> bool {
    let (key, start) = (usv::first_field(row), row.as_ptr() as usize - body.as_ptr() as usize);
    let before = body[..start].strip_suffix(&[usv::END]).unwrap_or_default();
    let from = memchr::memrchr(usv::END, before).map_or(0, |at| at + 1);
    let behind = body.get(start + row.len() + 1..).unwrap_or_default();
    let is_less = before.is_empty() || usv::first_field(&before[from..]) < key;
    let is_more = behind.is_empty() || usv::first_field(behind) > key;
    is_less && is_more && memchr::memchr2(usv::RECORD, b'\r', row).is_none()
}

/// The same in a shard that is not in memory: about one piece per halving down to the piece's size.
async fn find_in_source(source: &dyn Source, key: &[u8]) -> Result<Option<Bytes>> {
    const BLOCK: u64 = 256 << 10;
    let size = source.meta().size;
    let (mut low, mut high) = (0, size);
    // Invariant: the row, if there is one, starts at or after `low` and before `high`; `low` is the
    // start of a row.
    while high - low > BLOCK {
        let middle = low + (high - low) / 2;
        let mut piece = source.read_at(middle, BLOCK as usize).await?;
        // A row can be longer than a block.
        let mut end = memchr::memchr(usv::END, &piece);
        while end.is_none() && middle + (piece.len() as u64) < size {
            piece = source.read_at(middle, piece.len() * 2).await?;
            end = memchr::memchr(usv::END, &piece);
        }
        // Where no row starts behind `middle`, one may still start at it.
        let Some(end) = end else {
            high = middle + 1;
            break;
        };
        let start = middle + end as u64 + 1;
        if start >= high {
            high = middle + 1;
            continue;
        }
        let mut row = piece.slice(end + 1..);
        if memchr::memchr(usv::UNIT, &row).is_none() {
            row = source.read_at(start, 8 << 10).await?;
        }
        match usv::first_field(&row) <= key {
            true => low = start,
            false => high = start,
        }
    }
    let mut len = usize::try_from(high - low).unwrap_or(usize::MAX) + BLOCK as usize;
    loop {
        let piece = source.read_at(low, len).await?;
        let whole = low + piece.len() as u64 >= size;
        let rows = if whole { piece.len() } else { usv::complete(&piece) };
        match find(&piece[..rows], key) {
            Some(row) => return Ok(Some(piece.slice_ref(row))),
            // The last row may have been cut off.
            None if !whole && (rows == 0 || low + (rows as u64) < high) => len *= 2,
            None => return Ok(None),
        }
    }
}

/// Whether the rows are as a compiler of ours leaves them.
fn is_in_order(body: &[u8]) -> bool {
    if memchr::memchr2(usv::RECORD, b'\r', body).is_some() {
        return false;
    }
    let mut last: &[u8] = &[];
    for row in usv::rows(body) {
        let key = usv::first_field(row);
        if key <= last {
            return false;
        }
        last = key;
    }
    true
}

fn in_order(schema: &Schema, body: &[u8]) -> Bytes {
    let mut rows: BTreeMap<Vec<u8>, Bytes> = BTreeMap::new();
    let mut row = Vec::new();
    for raw in usv::rows(body) {
        row.clear();
        let Ok(parsed) = schema.canonical(raw, &mut row) else { continue };
        let key = row[..parsed.key_len].to_vec();
        let old = rows.remove(&key);
        if let Some(row) = latest(schema, old, Some(Bytes::copy_from_slice(&row))) {
            rows.insert(key, row);
        }
    }
    let mut out = Vec::with_capacity(body.len());
    for row in rows.values() {
        out.extend_from_slice(row);
        out.push(usv::END);
    }
    out.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Meta;
    use crate::store::Object;
    use crate::store::large::Whole;
    use crate::{StoreTime, Version};

    /// Every key is found and no other, in memory and piece by piece, with rows shorter and longer
    /// than a piece.
    #[tokio::test]
    async fn search_finds_every_row_and_no_other() {
        for (count, width) in [(0, 1), (1, 10), (2, 10), (1000, 3), (40_000, 60), (12, 700_000)] {
            let mut body = Vec::new();
            for n in 0..count {
                body.extend_from_slice(
                    format!("k{:06}\x1f{}\n", n * 2, "x".repeat(width)).as_bytes(),
                );
            }
            let now = StoreTime::from_micros(0);
            let size = body.len() as u64;
            let meta = Meta { version: Version::new("1"), modified: now, now, size };
            let source = Whole(Object { body: body.clone().into(), meta });
            let step = (count / 50).max(1);
            for n in (0..count * 2 + 1).step_by(step) {
                let key = format!("k{n:06}");
                let expected = (n % 2 == 0 && n < count * 2).then_some(key.as_bytes());
                let found = find(&body, key.as_bytes()).map(usv::first_field);
                assert_eq!(found, expected, "{count} {width} {key}");
                let found = find_in_source(&source, key.as_bytes()).await.unwrap();
                assert_eq!(
                    found.as_deref().map(usv::first_field),
                    expected,
                    "{count} {width} {key}"
                );
            }
        }
    }
}
