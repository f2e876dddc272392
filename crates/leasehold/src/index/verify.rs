//! Checks that an index is what its compilers say it is.

use leasehold_protocol::format::statistics::Statistics;
use leasehold_protocol::format::usv;
use leasehold_protocol::merge::Digest;
use leasehold_protocol::shard::{KeyHash, Shard};

use super::Index;
use super::compact::Pieces;
use crate::Result;

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

impl Index {
    /// Reads every shard and checks it: every row fits the schema, is in its one spelling, in its
    /// place and in order, and rows, counts and digests are what the last compaction noted.
    pub async fn verify(&self) -> Result<Verified> {
        self.refresh().await?;
        let mut verified = Verified::default();
        for shard in self.existing_shards().await? {
            self.verify_shard(shard, &mut verified).await?;
        }
        Ok(verified)
    }

    async fn verify_shard(&self, shard: Shard, verified: &mut Verified) -> Result<()> {
        let layout = &self.0.layout;
        let known = self.known();
        let Some(source) = self.store().open(&layout.shard(shard)).await? else { return Ok(()) };
        let mut findings = Vec::new();
        let mut find = |grave: bool, what: String| findings.push(Finding { shard, what, grave });
        let (mut rows, mut deletions, mut digest) = (0_u64, 0_u64, Digest::default());
        let (mut last, mut canonical) = (Vec::new(), Vec::new());
        // One finding of a sort says enough.
        let (mut unsorted, mut respelled, mut astray, mut unreadable) = (0_u64, 0_u64, 0_u64, None);
        let mut pieces = Pieces::new(&*source);
        while let Some(piece) = pieces.next().await? {
            for row in usv::rows(&piece) {
                rows += 1;
                digest = digest.plus(Digest::of(row));
                canonical.clear();
                match known.schema.canonical(row, &mut canonical) {
                    Err(error) => unreadable = unreadable.or(Some((rows, error))),
                    Ok(parsed) => {
                        deletions += u64::from(parsed.deleted);
                        let key = &canonical[..parsed.key_len];
                        respelled += u64::from(canonical != row);
                        unsorted += u64::from(key <= &last[..]);
                        astray +=
                            u64::from(KeyHash::of_field(key).shard(known.package.width) != shard);
                        last.clear();
                        last.extend_from_slice(key);
                    }
                }
            }
        }
        if let Some((row, error)) = unreadable {
            find(true, format!("row {row} does not fit the schema: {error}"));
        }
        if unsorted > 0 {
            find(true, format!("{unsorted} rows are not in order, or twice"));
        }
        if astray > 0 {
            find(true, format!("{astray} rows belong to other shards"));
        }
        if respelled > 0 {
            find(
                false,
                format!("{respelled} rows are in another spelling: compact with --rewrite"),
            );
        }
        let statistics = self.store().get(&layout.statistics(shard)).await?;
        let statistics = statistics.and_then(|object| Statistics::parse(&object.body));
        match statistics.filter(|s| s.version == source.meta().version.as_str()) {
            None => find(false, "there are no statistics of this version".to_owned()),
            Some(statistics) => {
                if let Some(contradiction) = statistics.contradiction() {
                    find(true, contradiction);
                }
                if statistics.rows != rows {
                    find(true, format!("has {rows} rows, {} were written", statistics.rows));
                }
                if statistics.digest != digest {
                    find(true, "the rows are not those that were written".to_owned());
                }
            }
        }
        verified.shards += 1;
        verified.rows += rows;
        verified.deletions += deletions;
        verified.digest = verified.digest.plus(digest);
        verified.findings.append(&mut findings);
        Ok(())
    }
}
