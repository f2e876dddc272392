//! Checks that an index is what its compilers say it is.

use std::time::Duration;

use leasehold_protocol::format::row::RowError;
use leasehold_protocol::format::statistics::Statistics;
use leasehold_protocol::format::usv;
use leasehold_protocol::merge::Digest;
use leasehold_protocol::shard::{KeyHash, Shard};

use super::Index;
use super::compact::Pieces;
use super::write::AHEAD;
use crate::store::large::Source;
use crate::{Result, StoreTime};

/// Something that is not as it should be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// In which shard.
    pub shard: Shard,
    /// What.
    pub what: String,
    /// Whether records may be wrong or missing. Otherwise only statistics are, or another tool wrote
    /// the shard and the next compaction mends it.
    pub grave: bool,
}

/// What was checked.
#[derive(Debug, Clone, Default)]
pub struct Verified {
    /// How many shards.
    pub shards: u64,
    /// How many rows, deletions included.
    pub rows: u64,
    /// How many of them are deletions.
    pub deletions: u64,
    /// The sum of all digests.
    pub digest: Digest,
    /// What is not as it should be.
    pub findings: Vec<Finding>,
}

/// How long a compiler that has just written a shard is given to note it, and how often.
const NOTED_WITHIN: Duration = Duration::from_secs(2);
const LOOKS: u32 = 3;

/// What the rows of a shard are like. One finding of a sort says enough.
#[derive(Debug, Default)]
struct Rows {
    count: u64,
    deletions: u64,
    digest: Digest,
    unsorted: u64,
    respelled: u64,
    astray: u64,
    /// The first that cannot be read, and why.
    unreadable: Option<(u64, RowError)>,
    /// How many are ahead of the store's clock, and the time of the last of them.
    ahead: u64,
    last: i64,
}

impl Index {
    /// Reads every shard and checks it: every row fits the schema, is in its one spelling, in its
    /// place and in order, and rows, counts and digests are what the last compaction noted. A shard
    /// that is named anywhere is there.
    pub async fn verify(&self) -> Result<Verified> {
        self.refresh().await?;
        let mut verified = Verified::default();
        // Nobody deletes shards, and what names one comes after it.
        let width = self.package().width;
        let mut shards = self.shards_with(&["usv", "json"]).await?;
        shards.extend(self.package().shards.iter().filter(|shard| shard.width() == width));
        for shard in shards {
            self.verify_shard(shard, &mut verified).await?;
        }
        Ok(verified)
    }

    async fn verify_shard(&self, shard: Shard, verified: &mut Verified) -> Result<()> {
        let key = self.0.layout.shard(shard);
        let mut findings = Vec::new();
        let mut find = |grave: bool, what: String| findings.push(Finding { shard, what, grave });
        let mut looks = 0;
        let (rows, statistics, current) = loop {
            let source = self.store().open(&key).await?;
            let rows = match &source {
                Some(source) => Some(self.rows_of(shard, &**source).await?),
                None => None,
            };
            let statistics = self.statistics(shard).await?;
            let version = source.as_ref().map(|source| source.meta().version.as_str());
            let current = statistics.as_ref().is_some_and(|s| Some(s.version.as_str()) == version);
            looks += 1;
            // A compiler may be between writing it and noting that, or have done both since we read it.
            let fewer = |s: &Statistics| rows.as_ref().map_or(0, |rows| rows.count) < s.rows;
            if current || looks == LOOKS || !statistics.as_ref().is_some_and(fewer) {
                break (rows, statistics, current);
            }
            self.store().env().clock().sleep(NOTED_WITHIN).await;
        };
        let Some(rows) = rows else {
            match statistics {
                Some(statistics) => {
                    find(true, format!("is missing: {} rows were written", statistics.rows));
                }
                None => find(true, "is missing: datapackage.json names it".to_owned()),
            }
            verified.findings.append(&mut findings);
            return Ok(());
        };
        rows.judge(&mut find);
        match statistics {
            None => find(false, "there are no statistics of it".to_owned()),
            Some(statistics) if current => {
                if let Some(contradiction) = statistics.contradiction() {
                    find(true, contradiction);
                }
                if statistics.rows != rows.count {
                    let count = rows.count;
                    find(true, format!("has {count} rows, {} were written", statistics.rows));
                }
                if statistics.digest != rows.digest {
                    find(true, "the rows are not those that were written".to_owned());
                }
            }
            Some(statistics) if rows.count < statistics.rows => find(
                true,
                format!(
                    "has {} rows, {} were written, and nobody noted where the others are",
                    rows.count, statistics.rows
                ),
            ),
            Some(_) => {
                find(false, "was changed by something that left no statistics".to_owned());
            }
        }
        verified.shards += 1;
        verified.rows += rows.count;
        verified.deletions += rows.deletions;
        verified.digest = verified.digest.plus(rows.digest);
        verified.findings.append(&mut findings);
        Ok(())
    }

    /// Reads a shard.
    async fn rows_of(&self, shard: Shard, source: &dyn Source) -> Result<Rows> {
        let known = self.known();
        let ahead = source.meta().now.plus(AHEAD).as_micros();
        let mut of = Rows { last: i64::MIN, ..Rows::default() };
        let (mut last, mut canonical) = (Vec::new(), Vec::new());
        let mut pieces = Pieces::new(source);
        while let Some(piece) = pieces.next().await? {
            for row in usv::rows(&piece) {
                of.count += 1;
                of.digest = of.digest.plus(Digest::of(row));
                canonical.clear();
                let parsed = match known.schema.canonical(row, &mut canonical) {
                    Ok(parsed) => parsed,
                    Err(error) => {
                        of.unreadable.get_or_insert((of.count, error));
                        continue;
                    }
                };
                of.deletions += u64::from(parsed.deleted);
                let key = &canonical[..parsed.key_len];
                of.respelled += u64::from(canonical != row);
                of.unsorted += u64::from(key <= &last[..]);
                of.astray += u64::from(KeyHash::of_field(key).shard(known.package.width) != shard);
                of.ahead += u64::from(parsed.updated_at > ahead);
                of.last = of.last.max(parsed.updated_at);
                last.clear();
                last.extend_from_slice(key);
            }
        }
        Ok(of)
    }
}

impl Rows {
    /// What is wrong with them by themselves.
    fn judge(&self, find: &mut impl FnMut(bool, String)) {
        let Self { unsorted, astray, respelled, ahead, .. } = self;
        if let Some((row, error)) = &self.unreadable {
            find(true, format!("row {row} does not fit the schema: {error}"));
        }
        if *unsorted > 0 {
            find(true, format!("{unsorted} rows are not in order, or twice"));
        }
        if *astray > 0 {
            find(true, format!("{astray} rows belong to other shards"));
        }
        if *respelled > 0 {
            find(
                false,
                format!("{respelled} rows are in another spelling: compact with --rewrite"),
            );
        }
        if *ahead > 0 {
            // Right as far as anybody knows: a clock may have been set back.
            let last = StoreTime::from_micros(self.last);
            let text = format!(
                "{ahead} rows are ahead of the store's clock, the last of {last}: what is put before \
                 then does not count; delete them or put them anew by hand"
            );
            find(false, text);
        }
    }
}
