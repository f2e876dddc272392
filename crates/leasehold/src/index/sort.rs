//! Sorts more rows than fit into memory.
//!
//! Rows are collected up to a budget, sorted, and written to a file as a run; runs are merged when
//! they are read. Of several rows of one key only the one that counts comes out. The files have no
//! names: they go with the process, however that ends.

use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Seek as _, SeekFrom, Write as _};
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use leasehold_protocol::compile::Incoming;
use leasehold_protocol::format::datapackage::Schema;
use leasehold_protocol::format::usv;

use crate::store::large::{Staged, local};
use crate::{Error, Result};

/// Where spool files stand; the system's folder for temporary files if nothing is said.
pub(super) fn spool_file(folder: Option<&PathBuf>) -> Result<File> {
    let file = match folder {
        Some(folder) => tempfile::tempfile_in(folder),
        None => tempfile::tempfile(),
    };
    file.map_err(|error| local("make", error))
}

/// At most this many runs are merged at once: each has a buffer and an open file.
const MOST_RUNS: usize = 64;

/// The buffers of runs that are merged have at most this size each, and all of them together what was
/// sorted in memory before.
const BUFFER: usize = 64 << 10;

/// Collects rows.
#[derive(Debug)]
pub(super) struct Sorter {
    schema: Arc<Schema>,
    folder: Option<PathBuf>,
    budget: usize,
    rows: Vec<u8>,
    /// Where each row starts, how long it is and how long its key is.
    spans: Vec<Span>,
    runs: Vec<File>,
    pushed: u64,
    dropped: u64,
}

#[derive(Debug, Clone, Copy)]
struct Span {
    start: u32,
    len: u32,
    key: u32,
}

impl Span {
    fn row<'a>(&self, rows: &'a [u8]) -> &'a [u8] {
        &rows[self.start as usize..(self.start + self.len) as usize]
    }

    fn key<'a>(&self, rows: &'a [u8]) -> &'a [u8] {
        &rows[self.start as usize..(self.start + self.key) as usize]
    }
}

impl Sorter {
    /// Keeps up to `budget` bytes in memory.
    pub fn new(schema: Arc<Schema>, folder: Option<PathBuf>, budget: usize) -> Self {
        let (rows, spans, runs) = (Vec::new(), Vec::new(), Vec::new());
        let budget = budget.min(1 << 30);
        Self { schema, folder, budget, rows, spans, runs, pushed: 0, dropped: 0 }
    }

    /// Adds a canonical row that `write` appends, unless it fails.
    pub fn push<E>(
        &mut self,
        write: impl FnOnce(&mut Vec<u8>) -> Result<usize, E>,
    ) -> Result<Result<(), E>> {
        if self.rows.len() + self.spans.len() * size_of::<Span>() > self.budget {
            self.spill()?;
        }
        let start = self.rows.len();
        let key = match write(&mut self.rows) {
            Ok(key) => key,
            Err(error) => {
                self.rows.truncate(start);
                return Ok(Err(error));
            }
        };
        let len = (self.rows.len() - start) as u32;
        self.spans.push(Span { start: start as u32, len, key: key as u32 });
        self.pushed += 1;
        Ok(Ok(()))
    }

    /// Sorts what is in memory and drops the rows that do not count.
    fn sort(&mut self) {
        let (rows, schema) = (&self.rows, &self.schema);
        self.spans.sort_unstable_by(|a, b| {
            a.key(rows).cmp(b.key(rows)).then_with(|| counts(schema, b.row(rows), a.row(rows)))
        });
        let before = self.spans.len();
        self.spans.dedup_by(|later, first| later.key(rows) == first.key(rows));
        self.dropped += (before - self.spans.len()) as u64;
    }

    fn spill(&mut self) -> Result<()> {
        if self.spans.is_empty() {
            return Ok(());
        }
        self.sort();
        let file = spool_file(self.folder.as_ref())?;
        let mut out = std::io::BufWriter::with_capacity(BUFFER, file);
        for span in &self.spans {
            let row = span.row(&self.rows);
            out.write_all(row).and_then(|()| out.write_all(&[usv::END])).map_err(write_failed)?;
        }
        self.runs.push(out.into_inner().map_err(|error| write_failed(error.into_error()))?);
        self.rows.clear();
        self.spans.clear();
        if self.runs.len() >= MOST_RUNS {
            self.fold()?;
        }
        Ok(())
    }

    /// Makes one run of all.
    fn fold(&mut self) -> Result<()> {
        let runs = std::mem::take(&mut self.runs);
        let mut merged = Merged::new(self.schema.clone(), runs, self.budget)?;
        let file = spool_file(self.folder.as_ref())?;
        let mut out = std::io::BufWriter::with_capacity(BUFFER, file);
        while let Some(row) = merged.head() {
            out.write_all(row).and_then(|()| out.write_all(&[usv::END])).map_err(write_failed)?;
            merged.pop()?;
        }
        self.dropped += merged.dropped;
        self.runs.push(out.into_inner().map_err(|error| write_failed(error.into_error()))?);
        Ok(())
    }

    /// How many rows were added.
    pub fn pushed(&self) -> u64 {
        self.pushed
    }

    /// The rows in order.
    pub fn finish(mut self) -> Result<Sorted> {
        if self.runs.is_empty() {
            self.sort();
            let Self { rows, spans, dropped, .. } = self;
            return Ok(Sorted { rows: Rows::Memory { rows, spans, next: 0 }, dropped });
        }
        self.spill()?;
        let Self { schema, runs, budget, dropped, rows, spans, .. } = self;
        drop((rows, spans));
        Ok(Sorted { rows: Rows::Disk(Merged::new(schema, runs, budget)?), dropped })
    }
}

fn write_failed(error: std::io::Error) -> Error {
    local("write", error)
}

/// Which of two rows of one key counts.
fn counts(schema: &Schema, a: &[u8], b: &[u8]) -> Ordering {
    match (schema.claim(a), schema.claim(b)) {
        (Some(a), Some(b)) => a.against(&b),
        _ => usv::unpadded(a).cmp(usv::unpadded(b)),
    }
}

/// Rows in order, one per key.
#[derive(Debug)]
pub(super) struct Sorted {
    rows: Rows,
    dropped: u64,
}

#[derive(Debug)]
enum Rows {
    Memory { rows: Vec<u8>, spans: Vec<Span>, next: usize },
    Disk(Merged),
}

impl Sorted {
    /// None.
    pub fn empty() -> Self {
        Self { rows: Rows::Memory { rows: Vec::new(), spans: Vec::new(), next: 0 }, dropped: 0 }
    }

    /// About how many bytes of rows are left in memory.
    pub fn in_memory(&self) -> usize {
        match &self.rows {
            Rows::Memory { rows, spans, next } => {
                let left = spans.len().saturating_sub(*next);
                // Each ends with a byte that is not in memory.
                rows.len() / spans.len().max(1) * left + left
            }
            Rows::Disk(_) => 0,
        }
    }

    /// How many rows did not count, once all were read.
    pub fn dropped(&self) -> u64 {
        match &self.rows {
            Rows::Memory { .. } => self.dropped,
            Rows::Disk(merged) => self.dropped + merged.dropped,
        }
    }
}

impl Incoming for Sorted {
    type Error = Error;

    fn head(&self) -> Option<&[u8]> {
        match &self.rows {
            Rows::Memory { rows, spans, next } => spans.get(*next).map(|span| span.row(rows)),
            Rows::Disk(merged) => merged.head(),
        }
    }

    fn pop(&mut self) -> Result<()> {
        match &mut self.rows {
            Rows::Memory { next, .. } => {
                *next += 1;
                Ok(())
            }
            Rows::Disk(merged) => merged.pop(),
        }
    }
}

/// Runs being merged.
#[derive(Debug)]
struct Merged {
    schema: Arc<Schema>,
    runs: Vec<BufReader<File>>,
    heap: BinaryHeap<Head>,
    current: Option<Vec<u8>>,
    dropped: u64,
}

/// The next row of a run. The smallest key comes first.
#[derive(Debug, PartialEq, Eq)]
struct Head {
    row: Vec<u8>,
    run: usize,
}

impl Ord for Head {
    fn cmp(&self, other: &Self) -> Ordering {
        let (ours, theirs) = (usv::first_field(&self.row), usv::first_field(&other.row));
        theirs.cmp(ours).then_with(|| other.run.cmp(&self.run))
    }
}

impl PartialOrd for Head {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Merged {
    fn new(schema: Arc<Schema>, files: Vec<File>, budget: usize) -> Result<Self> {
        let buffer = (budget / files.len().max(1)).clamp(4 << 10, BUFFER);
        let mut runs = Vec::with_capacity(files.len());
        for mut file in files {
            file.seek(SeekFrom::Start(0)).map_err(|error| local("read", error))?;
            runs.push(BufReader::with_capacity(buffer, file));
        }
        let mut merged = Self { schema, runs, heap: BinaryHeap::new(), current: None, dropped: 0 };
        for run in 0..merged.runs.len() {
            merged.refill(run, Vec::new())?;
        }
        merged.pop()?;
        Ok(merged)
    }

    fn refill(&mut self, run: usize, mut row: Vec<u8>) -> Result<()> {
        row.clear();
        let read = self.runs[run].read_until(usv::END, &mut row);
        if read.map_err(|error| local("read", error))? > 0 {
            row.pop();
            self.heap.push(Head { row, run });
        }
        Ok(())
    }

    fn head(&self) -> Option<&[u8]> {
        self.current.as_deref()
    }

    fn pop(&mut self) -> Result<()> {
        self.current = None;
        let Some(Head { mut row, run }) = self.heap.pop() else { return Ok(()) };
        self.refill(run, Vec::new())?;
        while let Some(next) = self.heap.peek()
            && usv::first_field(&next.row) == usv::first_field(&row)
        {
            let Some(Head { row: other, run }) = self.heap.pop() else { break };
            self.refill(run, Vec::new())?;
            if counts(&self.schema, &other, &row).is_gt() {
                row = other;
            }
            self.dropped += 1;
        }
        self.current = Some(row);
        Ok(())
    }
}

/// Bytes in memory as long as they are few, and in a file from then on.
#[derive(Debug)]
pub(super) struct Spool {
    memory: Vec<u8>,
    file: Option<File>,
    folder: Option<PathBuf>,
    limit: usize,
    len: u64,
}

/// What is kept in memory at most.
pub(super) const IN_MEMORY: usize = 6 << 20;

impl Spool {
    /// Keeps up to `limit` bytes in memory.
    pub fn new(folder: Option<PathBuf>, limit: usize) -> Self {
        Self { memory: Vec::new(), file: None, folder, limit: limit.min(IN_MEMORY), len: 0 }
    }

    /// How many bytes are in memory.
    pub fn in_memory(&self) -> usize {
        self.memory.capacity()
    }

    pub fn len(&self) -> u64 {
        self.len
    }

    /// Moves these bytes to the end.
    pub fn append(&mut self, bytes: &mut Vec<u8>) -> Result<()> {
        self.len += bytes.len() as u64;
        if self.file.is_none() && self.memory.is_empty() && bytes.len() <= self.limit {
            self.memory = std::mem::take(bytes);
            return Ok(());
        }
        let both = self.memory.len() + bytes.len();
        if self.file.is_none() && both <= self.limit {
            if both > self.memory.capacity() {
                // Twice as much each time, and never more than it may have.
                let room = (2 * both).min(self.limit) - self.memory.len();
                self.memory.reserve_exact(room);
            }
            self.memory.append(bytes);
            return Ok(());
        }
        let file = match &mut self.file {
            Some(file) => file,
            None => self.file.insert(spool_file(self.folder.as_ref())?),
        };
        let memory = std::mem::take(&mut self.memory);
        file.write_all(&memory).and_then(|()| file.write_all(bytes)).map_err(write_failed)?;
        bytes.clear();
        Ok(())
    }

    /// What was collected.
    pub fn finish(self) -> Spooled {
        match self.file {
            None => Spooled::Memory(self.memory.into()),
            Some(file) => Spooled::File(file),
        }
    }
}

pub(super) enum Spooled {
    Memory(Bytes),
    File(File),
    /// Written already, where nobody sees it yet.
    Staged(Staged),
}

#[cfg(test)]
mod tests {
    use super::*;
    use leasehold_protocol::format::datapackage::Field;
    use leasehold_protocol::time::StoreTime;

    fn schema() -> Arc<Schema> {
        Arc::new(Schema::new(vec![Field::parse("k").unwrap(), Field::parse("v").unwrap()]).unwrap())
    }

    /// However little memory there is, the same rows come out: each key once, the latest.
    #[test]
    fn rows_come_out_in_order_whatever_the_budget() {
        let schema = schema();
        let sorted = |budget: usize| {
            let mut sorter = Sorter::new(schema.clone(), None, budget);
            for n in 0..5000_u64 {
                let key = format!("k{:04}", n.wrapping_mul(2_654_435_761) % 1000);
                let at = StoreTime::from_micros((n * 7919 % 5000) as i64);
                let pushed = sorter.push(|out| {
                    let row = schema.write_texts([key.as_str(), &n.to_string()], at, out);
                    row.map(|row| row.key_len)
                });
                pushed.unwrap().unwrap();
            }
            assert_eq!(sorter.pushed(), 5000);
            let mut sorted = sorter.finish().unwrap();
            let mut rows = Vec::new();
            while let Some(row) = sorted.head() {
                rows.push(row.to_vec());
                sorted.pop().unwrap();
            }
            assert_eq!(sorted.dropped() as usize + rows.len(), 5000);
            rows
        };
        let all = sorted(1 << 20);
        assert!(all.is_sorted_by(|a, b| usv::first_field(a) < usv::first_field(b)));
        assert_eq!(all.len(), 1000);
        // So little that more runs are made than are merged at once.
        for budget in [1 << 10, 20 << 10] {
            assert_eq!(sorted(budget), all, "{budget}");
        }
    }

    #[test]
    fn a_spool_grows_out_of_memory() {
        for pieces in [1, 3] {
            let mut spool = Spool::new(None, IN_MEMORY);
            let piece = vec![b'x'; 3 << 20];
            for _ in 0..pieces {
                spool.append(&mut piece.clone()).unwrap();
            }
            assert_eq!(spool.len(), pieces * (3 << 20));
            match spool.finish() {
                Spooled::Memory(bytes) => assert!(pieces == 1 && bytes.len() == 3 << 20),
                Spooled::Staged(_) => unreachable!("nobody has a store"),
                Spooled::File(file) => {
                    assert!(pieces == 3 && file.metadata().unwrap().len() == 9 << 20);
                }
            }
        }
    }
}
