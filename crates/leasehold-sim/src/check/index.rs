//! The index: no record is lost, none comes back, and the latest counts.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use leasehold::StoreTime;
use leasehold::index::{Schema, Statistics};
use leasehold::protocol::format::usv;
use leasehold::protocol::layout::index::Layout;
use leasehold::protocol::shard::{Shard, Width};
use xxhash_rust::xxh3::xxh3_128;

use super::{Applied, Verdict};
use crate::objects::Stored;
use crate::world::{Micros, State};

/// How old deletions are when they are purged, at least: what arrives within that is remembered.
const PURGED_AFTER: Duration = Duration::from_secs(7200);

/// A record that was written.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Row {
    updated_at: i64,
    deleted: bool,
    bytes: Vec<u8>,
    at: Micros,
    flat: bool,
}

impl Row {
    /// The rule, told a second time: later, then a deletion, then the larger content.
    fn cmp(&self, other: &Self) -> Ordering {
        let content = |row: &Self| {
            let end = row.bytes.iter().rposition(|byte| *byte != 0x1f).map_or(0, |at| at + 1);
            row.bytes[..end].to_vec()
        };
        (self.updated_at, self.deleted, content(self)).cmp(&(
            other.updated_at,
            other.deleted,
            content(other),
        ))
    }
}

/// What is known of the index.
#[derive(Debug)]
pub struct IndexCheck {
    layout: Layout,
    schema: Arc<Schema>,
    width: Width,
    /// All records that ever were, by key.
    rows: BTreeMap<Vec<u8>, Vec<Row>>,
    /// The deletions of a key that were purged, and when.
    purged: BTreeMap<Vec<u8>, Vec<(Row, Micros)>>,
    /// How many shards were written.
    pub published: u64,
}

impl IndexCheck {
    /// For this index.
    pub fn new(index: &leasehold::index::Index) -> Option<Self> {
        Some(Self {
            layout: Layout::new(index.name()).ok()?,
            schema: index.schema(),
            width: index.package().width,
            rows: BTreeMap::new(),
            purged: BTreeMap::new(),
            published: 0,
        })
    }

    /// Checks a change of one of its objects.
    pub fn applied(&mut self, state: &State, applied: &Applied<'_>) -> Verdict {
        let key = applied.key;
        if !key.starts_with(self.layout.base()) {
            return Ok(());
        }
        let flat = self.layout.flat_name(key).is_some();
        if flat || self.layout.pending(key).is_some() {
            self.pending(state, applied, flat)?;
        }
        match self.layout.parse_shard(key) {
            Some((_, "usv")) => self.shard(state, applied),
            Some((shard, "json")) => self.statistics(state, applied, shard),
            _ => Ok(()),
        }
    }

    fn read(&self, stored: &Stored, at: Micros, flat: bool) -> Vec<(Vec<u8>, Row)> {
        let mut rows = Vec::new();
        for raw in usv::rows(&stored.body) {
            let mut bytes = Vec::new();
            if let Ok(row) = self.schema.canonical(raw, &mut bytes) {
                let (updated_at, deleted) = (row.updated_at, row.deleted);
                let key = bytes[..row.key_len].to_vec();
                rows.push((key, Row { updated_at, deleted, bytes, at, flat }));
            }
        }
        rows
    }

    fn pending(&mut self, state: &State, applied: &Applied<'_>, flat: bool) -> Verdict {
        let now = state.now;
        if let Some(after) = &applied.after {
            for (key, row) in self.read(after, now, flat) {
                self.timely(state, applied, &row)?;
                self.rows.entry(key).or_default().push(row);
            }
        }
        // Whoever writes over a file of the flat inbox means it.
        let meant = flat && applied.after.is_some();
        if let Some(before) = applied.before.as_ref().filter(|_| !meant) {
            let after = applied.after.as_ref().map(|after| self.read(after, now, flat));
            for (key, row) in self.read(before, now, flat) {
                let kept = after.iter().flatten().any(|(k, r)| *k == key && r.cmp(&row).is_ge());
                if !kept && !self.is_covered(state, &key, &row) {
                    return Err(format!(
                        "the record {} is gone from the inbox and not in its shard",
                        show(&row.bytes)
                    ));
                }
            }
        }
        Ok(())
    }

    /// A record that does not say when it was written is of the time when that was done.
    fn timely(&self, state: &State, applied: &Applied<'_>, row: &Row) -> Verdict {
        const OFF: Duration = Duration::from_secs(20);
        let now_dead = !state.lives(applied.life);
        if applied.late || now_dead || applied.label != "put" {
            return Ok(());
        }
        let written = StoreTime::from_micros(row.updated_at);
        let began = crate::world::EPOCH + state.nodes[applied.life.node].began as i64;
        let early = StoreTime::from_micros(began).since(written) > OFF;
        let late = written.since(state.store_time()) > OFF;
        match early || late {
            true => Err(format!("the record {} has a time of another clock", show(&row.bytes))),
            false => Ok(()),
        }
    }

    /// Whether the shard has the record, or one that counts instead.
    fn is_covered(&self, state: &State, key: &[u8], row: &Row) -> bool {
        if self.purges(key).any(|(purged, _)| purged.cmp(row).is_ge()) {
            return true;
        }
        let text = usv::unescape(&String::from_utf8_lossy(key)).into_owned();
        let shard = self.layout.shard(Shard::of(&text, self.width));
        let Some(stored) = state.objects.get(&shard) else { return false };
        self.read(stored, 0, false).iter().any(|(k, there)| k == key && there.cmp(row).is_ge())
    }

    fn shard(&mut self, state: &State, applied: &Applied<'_>) -> Verdict {
        let Some(after) = &applied.after else { return Err("the shard is gone".to_owned()) };
        self.published += 1;
        let now = state.now;
        let rows = self.read(after, now, false);
        if !rows.windows(2).all(|two| two[0].0 < two[1].0) {
            return Err("the shard is not in order".to_owned());
        }
        let before = applied.before.as_ref().map(|there| self.read(there, now, false));
        for (key, old) in before.unwrap_or_default() {
            match rows.iter().find(|(k, _)| *k == key) {
                Some((_, new)) if new.cmp(&old).is_ge() => {}
                Some((_, new)) => {
                    return Err(format!(
                        "{} gave way to {}, which counts less",
                        show(&old.bytes),
                        show(&new.bytes)
                    ));
                }
                None if old.deleted && applied.label == "purge" => {
                    let deleted = StoreTime::from_micros(old.updated_at);
                    if state.store_time().since(deleted) < Duration::from_secs(7000) {
                        return Err(format!("a young deletion was purged: {}", show(&old.bytes)));
                    }
                    self.purged.entry(key).or_default().push((old, now));
                }
                None => return Err(format!("{} is gone from the shard", show(&old.bytes))),
            }
        }
        for (key, row) in rows {
            let known = self.rows.get(&key).into_iter().flatten().filter(|r| r.bytes == row.bytes);
            let Some(last) = known.map(|r| r.at).max() else {
                return Err(format!("{} was never put", show(&row.bytes)));
            };
            let is_over = |(purged, when): &(Row, Micros)| row.cmp(purged).is_le() && last < *when;
            if !self.purges(&key).any(is_over) {
                continue;
            }
            if !self.may_be_back(state, &row, last) {
                return Err(format!("{} is back after it was deleted", show(&row.bytes)));
            }
            // As good as put anew.
            self.rows.entry(key).or_default().push(row);
        }
        Ok(())
    }

    /// Whether a record that was purged may be back: it is in the inbox, and either what it says is that
    /// its key is deleted, which it stays, or it came there later than a purge waits for.
    ///
    /// A compiler that brings back what it once read does not find it in the inbox (FIELD.md row 29).
    fn may_be_back(&self, state: &State, row: &Row, last: Micros) -> bool {
        let arrived = StoreTime::from_micros(crate::world::EPOCH + last as i64);
        let late = arrived.since(StoreTime::from_micros(row.updated_at)) > PURGED_AFTER;
        let mut inbox = state.objects.under(self.layout.base()).filter(|(key, _)| {
            let key = key.as_str();
            self.layout.flat_name(key).is_some() || self.layout.pending(key).is_some()
        });
        (row.deleted || late)
            && inbox.any(|(_, stored)| {
                self.read(stored, 0, false).iter().any(|(_, there)| there.bytes == row.bytes)
            })
    }

    /// Statistics of the shard as it is must be right.
    fn statistics(&self, state: &State, applied: &Applied<'_>, shard: Shard) -> Verdict {
        let Some(after) = &applied.after else { return Ok(()) };
        let Some(statistics) = Statistics::parse(&after.body) else {
            return Err("the statistics cannot be read".to_owned());
        };
        if let Some(contradiction) = statistics.contradiction() {
            return Err(contradiction);
        }
        let stored = state.objects.get(&self.layout.shard(shard));
        let Some(stored) = stored.filter(|s| s.version.as_str() == statistics.version) else {
            return Ok(());
        };
        let (mut rows, mut digest) = (0, 0_u128);
        for row in usv::rows(&stored.body) {
            rows += 1;
            digest = digest.wrapping_add(xxh3_128(usv::unpadded(row)));
        }
        match statistics.rows == rows && statistics.digest.0 == digest {
            true => Ok(()),
            false => Err("the digest is not that of the shard".to_owned()),
        }
    }

    /// A reader that began at `since` was shown this.
    pub fn read_by(&self, since: Micros, key: &str, shown: Option<&[u8]>) -> Verdict {
        let mut field = Vec::new();
        usv::escape(key, &mut field);
        let none = Vec::new();
        let rows = self.rows.get(&field).unwrap_or(&none);
        let before = rows.iter().filter(|row| row.at < since && !row.flat);
        let least = before.filter(|row| self.counts(&field, row)).max_by(|a, b| a.cmp(b));
        let text = |row: Option<&Row>| row.map_or_else(|| "nothing".into(), |row| show(&row.bytes));
        match (shown, least) {
            (Some(shown), least) => {
                let Some(row) = rows.iter().find(|row| row.bytes == shown) else {
                    return Err(format!("a reader was shown {}, which was never put", show(shown)));
                };
                match least.is_none_or(|least| row.cmp(least).is_ge()) {
                    true => Ok(()),
                    false => Err(format!(
                        "a reader was shown {} after {} was put",
                        show(shown),
                        text(least)
                    )),
                }
            }
            (None, None) => Ok(()),
            (None, Some(least)) => {
                let gone = rows.iter().any(|row| row.deleted && row.cmp(least).is_ge());
                match gone || self.purges(&field).any(|(purged, _)| purged.cmp(least).is_ge()) {
                    true => Ok(()),
                    false => Err(format!(
                        "a reader was shown nothing after {} was put",
                        text(Some(least))
                    )),
                }
            }
        }
    }

    fn purges<'a>(&'a self, key: &[u8]) -> impl Iterator<Item = &'a (Row, Micros)> + use<'a> {
        self.purged.get(key).into_iter().flatten()
    }

    /// Whether a record is still known: not deleted, with the deletion purged since. What arrives
    /// after that with an older time is back, which is why deletions are kept for hours.
    fn counts(&self, key: &[u8], row: &Row) -> bool {
        !self.purges(key).any(|(purged, when)| row.at < *when && row.cmp(purged).is_le())
    }

    /// Once everything has come to rest: every shard is what the rule makes of all records.
    pub fn at_the_end(&self, state: &State) -> Verdict {
        for (key, rows) in &self.rows {
            let text = usv::unescape(&String::from_utf8_lossy(key)).into_owned();
            let shard = self.layout.shard(Shard::of(&text, self.width));
            let there = state.objects.get(&shard).map(|stored| self.read(stored, 0, false));
            let there = there.unwrap_or_default().into_iter().find(|(k, _)| k == key);
            let flats = rows.iter().any(|row| row.flat);
            let counting = rows.iter().filter(|row| !row.flat && self.counts(key, row));
            let Some(most) = counting.max_by(|a, b| a.cmp(b)) else {
                // All of them were deleted, and that was purged. What comes later is new.
                continue;
            };
            match there {
                Some((_, row)) if row.cmp(most).is_eq() || (flats && row.cmp(most).is_gt()) => {}
                Some((_, row)) => {
                    return Err(format!(
                        "{} counts at the end, and not {}",
                        show(&row.bytes),
                        show(&most.bytes)
                    ));
                }
                None if self.purges(key).any(|(purged, _)| purged.cmp(most).is_ge()) => {}
                None => return Err(format!("{} is lost", show(&most.bytes))),
            }
        }
        // The bytes that any compiler would have written.
        for (key, stored) in state.objects.under(&self.layout.shards()) {
            if let Some((_, "usv")) = self.layout.parse_shard(key.as_str()) {
                let mut bytes = Vec::new();
                for (_, row) in self.read(stored, 0, false) {
                    bytes.extend_from_slice(&row.bytes);
                    bytes.push(b'\n');
                }
                if bytes != stored.body {
                    return Err(format!("{key} is not in its one spelling"));
                }
            }
        }
        Ok(())
    }

    /// What is still in the inbox.
    pub fn leftovers(&self, state: &State) -> Option<String> {
        let mut all = state.objects.under(self.layout.base()).map(|(key, _)| key.as_str());
        let left = all.find(|key| {
            let flat = self.layout.flat_name(key).is_some() && !state.objects.deletes_blindly;
            flat || self.layout.pending(key).is_some()
        });
        left.map(str::to_owned)
    }
}

fn show(row: &[u8]) -> String {
    String::from_utf8_lossy(row).replace('\u{1f}', "|")
}
