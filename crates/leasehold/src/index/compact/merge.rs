//! Merges a shard with what was taken in.

use std::sync::Arc;

use bytes::Bytes;
use leasehold_protocol::compile::{Incoming as _, MergeError, Merger};
use leasehold_protocol::format::datapackage::{MAX_ROW, Schema};
use leasehold_protocol::format::usv;
use leasehold_protocol::shard::Shard;

use super::super::sort::{Sorted, Spool};
use super::{Index, Stop};
use crate::lease::Tenure;
use crate::store::large::{SMALL, Source};
use crate::{Error, Result};

/// How much of a shard is read at once.
pub(super) const PIECE: usize = 4 << 20;

/// How much of what only waits in the inbox is merged between two looks at the rest of the world.
const STEP: usize = 256 << 10;

/// Room for the row that makes it enough.
const SLACK: usize = 4 << 10;

/// Merges a shard with what was taken in, piece by piece.
pub(super) struct Merging<'a> {
    pub index: &'a Index,
    pub shard: Shard,
    pub schema: Arc<Schema>,
    pub merger: Merger,
    pub spool: Spool,
    pub tenure: Option<&'a Tenure>,
}

impl Merging<'_> {
    pub async fn run(
        &mut self,
        source: Option<&dyn Source>,
        sorted: &mut Sorted,
    ) -> Result<(), Stop> {
        let mut out = Vec::new();
        if let Some(source) = source {
            let mut pieces = Pieces::new(source);
            while let Some(rows) = pieces.next().await? {
                let mut rest = &rows[..];
                while !rest.is_empty() {
                    // Room for the whole at once: growing would copy it again and again.
                    let enough = rest.len() + (rest.len() / 8).max(sorted.in_memory()).min(STEP);
                    out.reserve_exact(enough + SLACK);
                    let done = self.merger.merge(rest, sorted, &mut out, enough).map_err(stop)?;
                    rest = &rest[done..];
                    self.put_away(&mut out).await?;
                }
            }
        }
        loop {
            let left = sorted.in_memory().min(STEP);
            out.reserve_exact(left);
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
pub(in super::super) struct Pieces<'a> {
    source: &'a dyn Source,
    piece: usize,
    at: u64,
    /// The beginning of a row whose end is in the next piece.
    cut: Vec<u8>,
    /// Whether rows that are too long for a record come in parts.
    in_parts: bool,
    part: bool,
    /// Whether the rest of such a row comes next.
    torn: bool,
}

impl<'a> Pieces<'a> {
    pub fn new(source: &'a dyn Source) -> Self {
        Self::of(source, PIECE)
    }

    /// About this many bytes at a time.
    pub fn of(source: &'a dyn Source, piece: usize) -> Self {
        let (in_parts, part, torn) = (false, false, false);
        Self { source, piece, at: 0, cut: Vec::new(), in_parts, part, torn }
    }

    /// Of another tool's file, which may be anything: a row that is too long for a record comes in parts.
    pub fn of_foreign(source: &'a dyn Source) -> Self {
        Self { in_parts: true, ..Self::of(source, SMALL) }
    }

    /// Whether what came last is part of a row that is too long for a record. It may look like a row.
    pub fn is_part(&self) -> bool {
        self.part
    }

    /// The next rows, all of them whole unless [`Pieces::is_part`].
    pub async fn next(&mut self) -> Result<Option<Bytes>> {
        let size = self.source.meta().size;
        self.part = self.torn;
        while self.at < size {
            let piece = self.source.read_at(self.at, self.piece).await?;
            if piece.is_empty() {
                return Err(Error::unavailable("a shard ended too early"));
            }
            if self.torn {
                // Up to its end; what follows that is read again.
                let end = memchr::memchr2(usv::END, usv::RECORD, &piece).map(|end| end + 1);
                self.torn = end.is_none();
                let end = end.unwrap_or(piece.len());
                self.at += end as u64;
                return Ok(Some(piece.slice(..end)));
            }
            self.at += piece.len() as u64;
            let end = if self.at >= size { piece.len() } else { usv::complete(&piece) };
            if end == 0 {
                self.cut.extend_from_slice(&piece);
                if self.in_parts && self.cut.len() > MAX_ROW {
                    (self.part, self.torn) = (true, true);
                    return Ok(Some(std::mem::take(&mut self.cut).into()));
                }
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
