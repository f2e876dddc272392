//! What an index holds and what is waiting.

use std::collections::BTreeMap;
use std::time::Duration;

use leasehold_protocol::format::lease::Dialect;
use leasehold_protocol::format::statistics::Statistics;
use leasehold_protocol::layout::index::Pending;
use leasehold_protocol::lease::Judgement;
use leasehold_protocol::shard::Shard;

use super::Index;
use crate::Result;
use crate::lease::{Desk, Terms};
use crate::store::{Detail, List};

/// What is known of a shard.
#[derive(Debug, Clone, Default)]
pub struct ShardStatus {
    /// Its size, if there is one.
    pub bytes: Option<u64>,
    /// Its rows, deletions included, where the statistics are about this version of it.
    pub rows: Option<u64>,
    /// How many of them are deletions.
    pub deletions: Option<u64>,
    /// Objects in its inbox.
    pub inbox_objects: u64,
    /// Records in its inbox, as far as names tell.
    pub inbox_records: u64,
    /// Bytes in its inbox.
    pub inbox_bytes: u64,
    /// How long the oldest of them has waited.
    pub inbox_age: Duration,
    /// Who is compacting it.
    pub locked_by: Option<String>,
}

/// What is known of an index.
#[derive(Debug, Clone, Default)]
pub struct Status {
    /// Shard by shard; those without anything are left out.
    pub shards: BTreeMap<Shard, ShardStatus>,
    /// Files in the flat inbox.
    pub flat_files: u64,
    /// Files of other tools whose names mean nothing to us: they stay, and nobody reads them.
    pub unknown: u64,
    /// Entries in quarantine.
    pub quarantined: u64,
}

impl Status {
    /// The sum over all shards.
    pub fn total(&self) -> ShardStatus {
        let mut total = ShardStatus::default();
        for shard in self.shards.values() {
            let add = |sum: &mut Option<u64>, more: Option<u64>| {
                if more.is_some() {
                    *sum = Some(sum.unwrap_or(0).saturating_add(more.unwrap_or(0)));
                }
            };
            add(&mut total.bytes, shard.bytes);
            add(&mut total.rows, shard.rows);
            add(&mut total.deletions, shard.deletions);
            total.inbox_objects += shard.inbox_objects;
            total.inbox_records = total.inbox_records.saturating_add(shard.inbox_records);
            total.inbox_bytes += shard.inbox_bytes;
            total.inbox_age = total.inbox_age.max(shard.inbox_age);
        }
        total
    }
}

impl Index {
    /// What is there and what is waiting. LISTs of everything but the content; with `deep`, one GET
    /// more per shard and lease, for rows and holders.
    pub async fn status(&self, deep: bool) -> Result<Status> {
        self.refresh().await?;
        let layout = &self.0.layout;
        let width = self.known().package.width;
        let mut status = Status::default();
        let mut locks = Vec::new();
        let list = List::prefix(layout.shards())?.detail(Detail::Stat);
        let mut listing = self.store().list(list);
        while let Some(page) = listing.next_page().await? {
            for entry in &page.entries {
                match layout.parse_shard(entry.key.as_str()) {
                    Some((shard, "usv")) => {
                        status.shards.entry(shard).or_default().bytes = entry.size;
                    }
                    Some((shard, "lock")) => locks.push(shard),
                    _ => {}
                }
            }
        }
        let list = List::prefix(layout.inbox())?.detail(Detail::Stat).unordered();
        let mut listing = self.store().list(list);
        while let Some(page) = listing.next_page().await? {
            let now = match page.now {
                Some(now) => now,
                None => self.store().now().await?,
            };
            status.unknown += page.unnamed;
            for entry in &page.entries {
                let pending = layout.pending(entry.key.as_str());
                let Some((shard, pending)) = pending.filter(|(shard, _)| shard.width() == width)
                else {
                    status.unknown += 1;
                    continue;
                };
                let shard = status.shards.entry(shard).or_default();
                shard.inbox_objects += 1;
                let records = match pending {
                    Pending::Single { .. } => 1,
                    Pending::Batch { count } => count,
                };
                shard.inbox_records = shard.inbox_records.saturating_add(records);
                shard.inbox_bytes += entry.size.unwrap_or(0);
                let age = entry.modified.map_or(Duration::ZERO, |at| now.since(at));
                shard.inbox_age = shard.inbox_age.max(age);
            }
        }
        let flat = self.known().package.flat_inbox;
        let folders = [layout.inbox(), layout.shards(), layout.quarantine()];
        let list = List::prefix(layout.base())?.delimited().unordered();
        let mut listing = self.store().list(list);
        while let Some(page) = listing.next_page().await? {
            let others = page.prefixes.iter().filter(|prefix| !folders.contains(prefix)).count();
            status.unknown += page.unnamed + others as u64;
            for entry in &page.entries {
                match entry.key.as_str() {
                    key if flat && layout.flat_name(key).is_some() => status.flat_files += 1,
                    key if key == layout.datapackage().as_str() => {}
                    _ => status.unknown += 1,
                }
            }
        }
        let mut listing = self.store().list(List::prefix(layout.quarantine())?);
        while let Some(page) = listing.next_page().await? {
            let keys = page.entries.iter().map(|entry| entry.key.as_str());
            status.quarantined += keys.filter(|key| key.ends_with(".json")).count() as u64;
        }
        if deep {
            self.look_deeper(&mut status, locks).await?;
        }
        Ok(status)
    }

    async fn look_deeper(&self, status: &mut Status, locks: Vec<Shard>) -> Result<()> {
        let shards: Vec<Shard> = status
            .shards
            .iter()
            .filter(|(_, s)| s.bytes.is_some())
            .map(|(shard, _)| *shard)
            .collect();
        let keys: Vec<_> = shards.iter().map(|shard| self.0.layout.statistics(*shard)).collect();
        let mut found = BTreeMap::new();
        self.read_objects(&keys, |key, object| {
            let statistics = object.and_then(|object| Statistics::parse(&object.body));
            if let (Some(statistics), Some((shard, _))) =
                (statistics, self.0.layout.parse_shard(key.as_str()))
            {
                found.insert(shard, statistics);
            }
            Ok(())
        })
        .await?;
        for (shard, statistics) in found {
            let Some(of) = status.shards.get_mut(&shard) else { continue };
            // Of another version of the shard: the size tells, without a request.
            if of.bytes == Some(statistics.bytes) {
                of.rows = Some(statistics.rows);
                of.deletions = Some(statistics.deletions);
            }
        }
        let ttl = self.0.settings.lock_ttl;
        for shard in locks {
            let terms = Terms { ttl, heartbeat: ttl / 3, dialect: Dialect::Task };
            let desk = Desk::new(self.store(), self.0.layout.lock(shard), "status", terms)?;
            if let Some(info) = desk.info().await?
                && let (Judgement::Held { .. }, Ok(lease)) = (&info.judgement, &info.lease)
            {
                status.shards.entry(shard).or_default().locked_by = Some(lease.holder.clone());
            }
        }
        Ok(())
    }
}
