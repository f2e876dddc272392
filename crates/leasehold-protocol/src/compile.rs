//! Compiling a shard: plan → merge → publish → sweep, as data.
//!
//! ```text
//!   shard version ──▶ inbox ──▶ merge ──▶ publish ──▶ sweep
//!   (a proven 404     (listed     │         PUT if the     deletes what was merged,
//!    is empty, any     and read    │         version is     and nothing else
//!    other failure     after the   │         still that
//!    aborts)           version)    └ nothing changed: nothing is written
//! ```
//!
//! - **Version first, then inbox.** A compiler that read the inbox first and stalled could bring back
//!   a record that was merged, deleted and purged meanwhile (FIELD.md row 29). With the version
//!   first, its write is refused.
//! - **Refused, contended or unknown: nothing is deleted** (rows 9, 10, 20). The next compiler does it
//!   again, and gets the same bytes.
//! - **Purging** forgets a deletion only if this compaction saw no record of its key: one that was
//!   still in the inbox, swept only after the shard is published, could come back from there.
//!
//! The lease only saves work that would be done twice. The condition keeps the data.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::sync::Arc;

use crate::cas::{Version, When};
use crate::format::datapackage::Schema;
use crate::format::statistics::Counts;
use crate::format::usv;
use crate::merge::{Claim, Digest};
use crate::mutant::{self, Mutant};
use crate::shard::{KeyHash, Shard};

#[cfg(test)]
mod tests;

/// How rows of the shard are treated that no record touches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// They are known to be canonical, from statistics about this very version: copied.
    Copy,
    /// Each is read, checked and written in its one spelling.
    Rewrite,
}

/// The records of the inbox: canonical rows, sorted by key, one per key.
pub trait Incoming {
    /// What can go wrong when more of them are read.
    type Error;
    /// The next one.
    fn head(&self) -> Option<&[u8]>;
    /// Goes on to the one after.
    fn pop(&mut self) -> Result<(), Self::Error>;
}

/// Why merging stopped.
#[derive(Debug, PartialEq, Eq)]
pub enum MergeError<E> {
    /// The shard is not sorted: it has to be sorted first.
    Disorder,
    /// The records could not be read.
    Incoming(E),
}

/// A row of the shard that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bad {
    /// As it stands there.
    pub row: Vec<u8>,
    /// Why not.
    pub reason: String,
}

/// Merges a shard, as it comes in chunks, with the records of the inbox.
#[derive(Debug)]
pub struct Merger {
    schema: Arc<Schema>,
    mode: Mode,
    purge_before: Option<i64>,
    shard: Option<Shard>,
    last_key: Vec<u8>,
    canonical: Vec<u8>,
    /// The length of the key of the row in `canonical`, where records before it have yet to be inserted.
    begun: Option<usize>,
    tally: Tally,
    bad: Vec<Bad>,
    strays: BTreeMap<Shard, Vec<u8>>,
}

/// What merging did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// By row and record. `inbox`, and `older` and `quarantined` of the inbox, are added by whoever
    /// read it.
    pub counts: Counts,
    /// The sum of the hashes of all rows of the shard, where each was read.
    pub before: Option<Digest>,
    /// Of the rows that were written.
    pub written: Digest,
    /// Of the rows that were taken out.
    pub removed: Digest,
    /// Deletions in the shard before, where each row was read.
    pub deletions_before: u64,
    /// Deletions written less deletions taken out.
    pub deletions: i64,
    /// Rows that were written in another spelling.
    pub respelled: u64,
}

impl Tally {
    /// Whether the shard is another one now.
    pub fn changed(&self) -> bool {
        let Counts { inserted, replaced, purged, moved, .. } = self.counts;
        inserted + replaced + purged + moved + self.respelled > 0
    }
}

impl Merger {
    /// For a shard of this schema. Deletions from before `purge_before` are forgotten, which takes
    /// reading every row.
    pub fn new(schema: Arc<Schema>, mode: Mode, purge_before: Option<i64>) -> Self {
        let mode = if purge_before.is_some() { Mode::Rewrite } else { mode };
        let before = (mode == Mode::Rewrite).then(Digest::default);
        Self {
            schema,
            mode,
            purge_before,
            shard: None,
            last_key: Vec::new(),
            canonical: Vec::new(),
            begun: None,
            tally: Tally { before, ..Tally::default() },
            bad: Vec::new(),
            strays: BTreeMap::new(),
        }
    }

    /// Takes rows out that belong to other shards, where each row is read. A client that does not
    /// normalise keys puts them where nobody looks for them.
    #[must_use]
    pub fn of_shard(mut self, shard: Shard) -> Self {
        self.shard = Some(shard);
        self
    }

    /// What was done so far.
    pub fn tally(&self) -> &Tally {
        &self.tally
    }

    /// The rows that could not be read since this was last asked.
    pub fn take_bad(&mut self) -> Vec<Bad> {
        std::mem::take(&mut self.bad)
    }

    /// The rows of other shards that were taken out since this was last asked. They must be in the
    /// inboxes there before this shard is published.
    pub fn take_strays(&mut self) -> BTreeMap<Shard, Vec<u8>> {
        std::mem::take(&mut self.strays)
    }

    /// Merges these complete rows of the shard and the records up to them into `out`, until that has
    /// `enough` bytes, whichever they are of. Returns how many bytes of `rows` are done with: none, where
    /// there are that many records before the first. What is left is to come first the next time.
    pub fn merge<I: Incoming>(
        &mut self,
        rows: &[u8],
        inbox: &mut I,
        out: &mut Vec<u8>,
        enough: usize,
    ) -> Result<usize, MergeError<I::Error>> {
        match self.mode {
            Mode::Copy => self.copy(rows, inbox, out, enough),
            Mode::Rewrite => self.rewrite(rows, inbox, out, enough),
        }
    }

    fn copy<I: Incoming>(
        &mut self,
        rows: &[u8],
        inbox: &mut I,
        out: &mut Vec<u8>,
        enough: usize,
    ) -> Result<usize, MergeError<I::Error>> {
        let last_key = std::mem::take(&mut self.last_key);
        let mut last: &[u8] = &last_key;
        // Rows from `kept` to the current one stay as they are, and are copied together.
        let (mut at, mut kept) = (0, 0);
        while at < rows.len() && out.len() + (at - kept) < enough {
            // Past the rows before the next record, whose key is looked for once.
            let stop = rows.len().min(kept.saturating_add(enough - out.len()));
            let head = inbox.head().map(usv::first_field);
            let (mut passed, mut met) = (0, None);
            while at < stop {
                let (key, len) = usv::first_row(&rows[at..]);
                if key <= last {
                    return Err(MergeError::Disorder);
                }
                let order = head.map_or(Ordering::Greater, |head| head.cmp(key));
                if order.is_le() {
                    met = Some((key, len, order));
                    break;
                }
                (last, passed, at) = (key, passed + 1, at + len);
            }
            self.tally.counts.rows_before += passed;
            self.tally.counts.rows_after += passed;
            let Some((key, len, order)) = met else { break };
            out.extend_from_slice(&rows[kept..at]);
            kept = at;
            if order.is_lt() {
                // The row stays where it is: there may be more records before it than are enough.
                self.tally.inserted(&self.schema, inbox.head().unwrap_or_default(), out);
                inbox.pop().map_err(MergeError::Incoming)?;
                continue;
            }
            self.tally.counts.rows_before += 1;
            let row = &rows[at..at + len];
            self.settle(row.strip_suffix(&[usv::END]).unwrap_or(row), inbox, out)?;
            (last, at, kept) = (key, at + len, at + len);
        }
        out.extend_from_slice(&rows[kept..at]);
        if kept < at && !out.ends_with(&[usv::END]) {
            out.push(usv::END);
        }
        self.last_key = last.to_vec();
        Ok(at)
    }

    fn rewrite<I: Incoming>(
        &mut self,
        rows: &[u8],
        inbox: &mut I,
        out: &mut Vec<u8>,
        enough: usize,
    ) -> Result<usize, MergeError<I::Error>> {
        let mut canonical = std::mem::take(&mut self.canonical);
        let mut at = 0;
        while at < rows.len() && out.len() < enough {
            let rest = &rows[at..];
            let end = memchr::memchr2(usv::END, usv::RECORD, rest).unwrap_or(rest.len());
            let row = rest[..end].strip_suffix(b"\r").unwrap_or(&rest[..end]);
            let next = (at + end + 1).min(rows.len());
            let read = match self.begun.take() {
                // Read and counted when we were here last.
                Some(key_len) => Some(key_len),
                None => self.begin(row, &mut canonical)?,
            };
            let Some(key_len) = read else {
                at = next;
                continue;
            };
            match self.insert_up_to(&canonical[..key_len], inbox, out, enough)? {
                Inserted::Enough => {
                    self.begun = Some(key_len);
                    break;
                }
                Inserted::UpToSame => self.settle(&canonical, inbox, out)?,
                Inserted::All if self.purge(&canonical) => {}
                Inserted::All => {
                    out.extend_from_slice(&canonical);
                    out.push(usv::END);
                    self.tally.counts.rows_after += 1;
                }
            }
            at = next;
        }
        self.canonical = canonical;
        Ok(at)
    }

    /// Reads and counts a row of the shard into `canonical`, and returns the length of its key, or `None`
    /// if it does not stay here.
    fn begin<E>(
        &mut self,
        row: &[u8],
        canonical: &mut Vec<u8>,
    ) -> Result<Option<usize>, MergeError<E>> {
        canonical.clear();
        if row.is_empty() {
            return Ok(None);
        }
        let Some(key_len) = self.read(row, canonical) else { return Ok(None) };
        // The order is that of the one spelling.
        let key = &canonical[..key_len];
        if let Some(home) = self.stray(key) {
            self.move_out(home, canonical);
            return Ok(None);
        }
        if key <= &self.last_key[..] {
            return Err(MergeError::Disorder);
        }
        self.last_key.clear();
        self.last_key.extend_from_slice(key);
        Ok(Some(key_len))
    }

    /// Appends the records behind the shard's last row, until `out` has `enough` bytes. Returns
    /// whether there are no more.
    pub fn finish<I: Incoming>(
        &mut self,
        inbox: &mut I,
        out: &mut Vec<u8>,
        enough: usize,
    ) -> Result<bool, MergeError<I::Error>> {
        while let Some(head) = inbox.head() {
            if out.len() >= enough {
                return Ok(false);
            }
            self.tally.inserted(&self.schema, head, out);
            inbox.pop().map_err(MergeError::Incoming)?;
        }
        Ok(true)
    }

    /// The canonical form of a row of the shard and the length of its key.
    fn read(&mut self, row: &[u8], canonical: &mut Vec<u8>) -> Option<usize> {
        let tally = &mut self.tally;
        tally.counts.rows_before += 1;
        let digest = Digest::of(row);
        tally.before = tally.before.map(|before| before.plus(digest));
        match self.schema.canonical(row, canonical) {
            Ok(parsed) => {
                tally.deletions_before += u64::from(parsed.deleted);
                if row != canonical.as_slice() {
                    tally.respelled += 1;
                    tally.removed = tally.removed.plus(digest);
                    tally.written = tally.written.plus(Digest::of(canonical));
                }
                Some(parsed.key_len)
            }
            Err(error) => {
                tally.counts.quarantined += 1;
                tally.respelled += 1;
                tally.removed = tally.removed.plus(digest);
                self.bad.push(Bad { row: row.to_vec(), reason: error.to_string() });
                None
            }
        }
    }

    /// The shard that a key belongs to, if that is another one.
    fn stray(&self, key: &[u8]) -> Option<Shard> {
        let shard = self.shard?;
        let home = KeyHash::of_field(key).shard(shard.width());
        (home != shard).then_some(home)
    }

    fn move_out(&mut self, home: Shard, row: &[u8]) {
        self.tally.counts.moved += 1;
        self.tally.removed = self.tally.removed.plus(Digest::of(row));
        self.tally.deletions -= i64::from(is_deletion(&self.schema.claim(row)));
        let rows = self.strays.entry(home).or_default();
        rows.extend_from_slice(row);
        rows.push(usv::END);
    }

    /// Appends the records before `key`, until `out` has `enough` bytes.
    fn insert_up_to<I: Incoming>(
        &mut self,
        key: &[u8],
        inbox: &mut I,
        out: &mut Vec<u8>,
        enough: usize,
    ) -> Result<Inserted, MergeError<I::Error>> {
        while let Some(head) = inbox.head() {
            match usv::first_field(head).cmp(key) {
                Ordering::Less if out.len() >= enough => return Ok(Inserted::Enough),
                Ordering::Less => self.tally.inserted(&self.schema, head, out),
                Ordering::Equal => return Ok(Inserted::UpToSame),
                Ordering::Greater => break,
            }
            inbox.pop().map_err(MergeError::Incoming)?;
        }
        Ok(Inserted::All)
    }

    /// Appends the row or the record of the same key at the inbox's head, whichever counts.
    fn settle<I: Incoming>(
        &mut self,
        row: &[u8],
        inbox: &mut I,
        out: &mut Vec<u8>,
    ) -> Result<(), MergeError<I::Error>> {
        let head = inbox.head().unwrap_or_default();
        let new = self.schema.claim(head);
        let old = self.schema.claim(row);
        let wins = match (&new, &old) {
            _ if mutant::is(Mutant::InboxAlwaysWins) => true,
            (Some(new), Some(old)) => new.against(old).is_gt(),
            // A row of which nobody knows when it was written gives way.
            (_, None) => true,
            (None, Some(_)) => false,
        };
        let tally = &mut self.tally;
        tally.counts.rows_after += 1;
        if wins {
            tally.counts.replaced += 1;
            tally.written = tally.written.plus(Digest::of(head));
            tally.removed = tally.removed.plus(Digest::of(row));
            tally.deletions += i64::from(is_deletion(&new)) - i64::from(is_deletion(&old));
            out.extend_from_slice(head);
        } else {
            tally.counts.older += 1;
            out.extend_from_slice(row);
        }
        out.push(usv::END);
        inbox.pop().map_err(MergeError::Incoming)
    }

    /// Whether this row is a deletion that may be forgotten, and is.
    fn purge(&mut self, row: &[u8]) -> bool {
        let Some(before) = self.purge_before else { return false };
        let claim = self.schema.claim(row);
        let Some(claim) = claim.filter(|claim| claim.deleted && claim.updated_at < before) else {
            return false;
        };
        self.tally.counts.purged += 1;
        self.tally.removed = self.tally.removed.plus(Digest::of(claim.row));
        self.tally.deletions -= 1;
        true
    }
}

/// How far the records before a row were inserted.
enum Inserted {
    /// There may be more of them.
    Enough,
    /// All, and the next one is of the row's own key.
    UpToSame,
    /// All, and there is none of the row's key.
    All,
}

fn is_deletion(claim: &Option<Claim<'_>>) -> bool {
    claim.is_some_and(|claim| claim.deleted)
}

impl Tally {
    fn inserted(&mut self, schema: &Schema, row: &[u8], out: &mut Vec<u8>) {
        self.counts.inserted += 1;
        self.counts.rows_after += 1;
        self.written = self.written.plus(Digest::of(row));
        self.deletions += i64::from(schema.is_deletion(row));
        out.extend_from_slice(row);
        out.push(usv::END);
    }
}

/// What to write, once everything is merged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Publish {
    /// Nothing: the shard already says it all.
    Nothing,
    /// The new shard, under this condition.
    Write(When),
}

/// What to write. `seen` is the version that was read before the inbox, `None` if it was proven that
/// there is no shard: two first compilers must not both win (FIELD.md row 9).
pub fn publish(tally: &Tally, seen: Option<&Version>) -> Publish {
    match (tally.changed(), seen) {
        (false, _) => Publish::Nothing,
        (true, Some(version)) => Publish::Write(When::Matches(version.clone())),
        (true, None) => Publish::Write(When::Absent),
    }
}

/// What became of the publication.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Published {
    /// There was nothing to write.
    Nothing,
    /// It is there.
    Stored,
    /// Another compiler was first.
    Refused,
    /// Nobody knows.
    Unknown,
}

/// Whether what was merged may be deleted from the inbox: only if it certainly is in the shard.
pub fn may_sweep(published: Published) -> bool {
    match published {
        Published::Nothing | Published::Stored => true,
        Published::Refused | Published::Unknown => false,
    }
}

/// When a shard with this much in its inbox is worth rewriting.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Trigger {
    /// From this many objects on.
    pub count: Option<u64>,
    /// From this many bytes on.
    pub bytes: Option<u64>,
    /// When the oldest object has waited this long.
    pub age: Option<std::time::Duration>,
}

impl Trigger {
    /// Whether nothing is asked for: then any object will do.
    pub fn is_always(&self) -> bool {
        *self == Self::default()
    }

    /// Whether it is worth it. Any one of what is asked for suffices.
    pub fn fires(&self, count: u64, bytes: u64, age: std::time::Duration) -> bool {
        count > 0
            && (self.is_always()
                || self.count.is_some_and(|least| count >= least)
                || self.bytes.is_some_and(|least| bytes >= least)
                || self.age.is_some_and(|least| age >= least))
    }
}
