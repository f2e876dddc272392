//! Finding the row of a key in a shard.

use std::collections::BTreeMap;

use bytes::Bytes;
use leasehold_protocol::format::datapackage::Schema;
use leasehold_protocol::format::usv;
use leasehold_protocol::merge::Claim;

use super::compact::Pieces;
use crate::Result;
use crate::store::large::Source;

/// Of two rows of one key, the one that counts.
pub(super) fn latest(schema: &Schema, a: Option<Bytes>, b: Option<Bytes>) -> Option<Bytes> {
    let (Some(first), Some(second)) = (&a, &b) else { return a.or(b) };
    let wins = match (schema.claim(first), schema.claim(second)) {
        (Some(first), Some(second)) => Claim::against(&first, &second).is_ge(),
        (first, _) => first.is_some(),
    };
    if wins { a } else { b }
}

/// The row of this key in a sorted shard.
pub(super) fn find<'a>(body: &'a [u8], key: &[u8]) -> Option<&'a [u8]> {
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

/// How a shard that is not in memory is searched.
#[derive(Debug, Clone, Copy)]
pub(super) struct Steps {
    /// What is read to see on which side a key is.
    pub probe: usize,
    /// What is read at once in the end.
    pub block: usize,
}

/// The same in a shard that is not in memory: about one probe per halving down to the size of a block.
pub(super) async fn find_in_source(
    source: &dyn Source,
    key: &[u8],
    steps: Steps,
) -> Result<Option<Bytes>> {
    let Steps { probe, block } = steps;
    let size = source.meta().size;
    let (mut low, mut high) = (0, size);
    // Invariant: the row, if there is one, starts at or after `low` and before `high`; `low` is the
    // start of a row.
    while high - low > block as u64 {
        let middle = low + (high - low) / 2;
        let mut piece = source.read_at(middle, probe).await?;
        // A row can be longer than that.
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
    let mut len = usize::try_from(high - low).unwrap_or(usize::MAX) + probe;
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

/// The same in one that may be in no order: all of it is read.
pub(super) async fn find_by_reading(
    source: &dyn Source,
    key: &[u8],
    schema: &Schema,
) -> Result<Option<Bytes>> {
    let (mut best, mut row) = (None, Vec::new());
    let mut pieces = Pieces::new(source);
    while let Some(rows) = pieces.next().await? {
        for raw in usv::rows(&rows) {
            row.clear();
            if let Ok(parsed) = schema.canonical(raw, &mut row)
                && row[..parsed.key_len] == *key
            {
                best = latest(schema, best, Some(Bytes::copy_from_slice(&row)));
            }
        }
    }
    Ok(best)
}

/// Where the rows of a shard in memory are: the beginning of every 16th key, and where its row starts. A
/// search in it stays within the processor's cache, where one in the shard misses at every step.
#[derive(Debug)]
pub(super) struct Guide {
    heads: Vec<u128>,
    starts: Vec<u32>,
}

impl Guide {
    /// `None` if the rows are not as a compiler of ours leaves them: in order, each key once, no ends of
    /// records but ours.
    pub fn of(body: &[u8]) -> Option<Self> {
        const EVERY: usize = 16;
        if memchr::memchr2(usv::RECORD, b'\r', body).is_some() {
            return None;
        }
        let mut guide = Self { heads: Vec::new(), starts: Vec::new() };
        let (mut at, mut count, mut last): (_, _, &[u8]) = (0, 0, &[]);
        while at < body.len() {
            let end = memchr::memchr(usv::END, &body[at..]).map_or(body.len(), |end| at + end);
            let key = usv::first_field(&body[at..end]);
            if key <= last {
                return None;
            }
            if count % EVERY == 0 {
                guide.heads.push(head(key));
                guide.starts.push(u32::try_from(at).ok()?);
            }
            (last, at, count) = (key, end + 1, count + 1);
        }
        Some(guide)
    }

    /// The row of this key in the shard that it was made of.
    pub fn find<'a>(&self, body: &'a [u8], key: &[u8]) -> Option<&'a [u8]> {
        let head = head(key);
        // Keys that begin alike may stand in several stretches.
        let from = self.heads.partition_point(|other| *other < head).saturating_sub(1);
        let to = from + self.heads[from..].partition_point(|other| *other <= head);
        let from = self.starts.get(from).map_or(0, |at| *at as usize);
        let to = self.starts.get(to).map_or(body.len(), |at| *at as usize);
        find(&body[from..to], key)
    }
}

/// The first bytes of a key as a number: of two keys, the lesser never has the greater one.
fn head(key: &[u8]) -> u128 {
    let mut first = [0; 16];
    let len = key.len().min(16);
    first[..len].copy_from_slice(&key[..len]);
    u128::from_be_bytes(first)
}

/// The rows in order, of each key the one that counts.
pub(super) fn in_order(schema: &Schema, body: &[u8]) -> Bytes {
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
                for (probe, block) in [(256 << 10, 256 << 10), (1 << 10, 16 << 10), (8, 64)] {
                    let steps = Steps { probe, block };
                    let found = find_in_source(&source, key.as_bytes(), steps).await.unwrap();
                    let found = found.as_deref().map(usv::first_field);
                    assert_eq!(found, expected, "{count} {width} {key} {block}");
                }
            }
        }
    }

    /// The guide leads to every row and to no other, also where many keys begin with the same bytes, or
    /// are shorter than what it keeps of them.
    #[test]
    fn a_guide_leads_to_every_row() {
        let common = "the-same-sixteen-bytes-and-more";
        for (count, start) in [(0, ""), (1, ""), (16, ""), (17, "x"), (1000, common), (700, "")] {
            let mut keys: Vec<String> = (0..count).map(|n| format!("{start}{}", n * 2)).collect();
            keys.extend([common, &common[..16], &common[..3]].map(str::to_owned));
            keys.sort();
            let body: String = keys.iter().map(|key| format!("{key}\x1fvalue\n")).collect();
            for body in [body.as_str(), body.trim_end()] {
                let guide = Guide::of(body.as_bytes()).unwrap();
                for key in &keys {
                    let found = guide.find(body.as_bytes(), key.as_bytes());
                    assert_eq!(found.map(usv::first_field), Some(key.as_bytes()), "{key}");
                }
                for n in 0..count {
                    let key = format!("{start}{}", n * 2 + 1);
                    assert_eq!(guide.find(body.as_bytes(), key.as_bytes()), None, "{key}");
                }
                for key in ["", "\0", "zzzz", "the-same-sixteen-bytes-and-mor"] {
                    assert_eq!(guide.find(body.as_bytes(), key.as_bytes()), None, "{key}");
                }
            }
        }
        let empty = Guide::of(b"").unwrap();
        assert_eq!(empty.find(b"", b"a"), None);
        for bad in ["b\na\n", "a\na\n", "a\x1e\nb\n", "a\r\nb\r\n", "\na\n"] {
            assert!(Guide::of(bad.as_bytes()).is_none(), "{bad:?}");
        }
    }
}
