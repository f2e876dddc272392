//! Writes a merged shard, what is known of it, and deletes what it was made of.

use std::borrow::Cow;
use std::time::Duration;

use leasehold_protocol::compile::{self, Publish, Published, Tally};
use leasehold_protocol::format::statistics::Statistics;
use leasehold_protocol::mutant::{self, Mutant};
use leasehold_protocol::settle::Proof;
use leasehold_protocol::shard::Shard;

use super::super::convoy::{Load, Place};
use super::super::sort::Spooled;
use super::{CompactOptions, Compaction, Done, Index, Outcome, Stop};
use crate::env::BootTime;
use crate::lease::Tenure;
use crate::store::large::{FileBody, Stamp};
use crate::store::{Delete, Durability, Kind, Put, Write};
use crate::{ErrorKind, Key, Version, When};

/// A shard that was read longer ago than this is not written any more. Deletions may be purged after a
/// day, and a compiler that slept that long could bring back what they deleted: on most stores equal
/// bytes have equal versions.
const PUBLISH_WITHIN: Duration = Duration::from_secs(3600);

/// A shard that is merged and not yet written.
pub(super) struct New<'a> {
    pub shard: Shard,
    /// The version that it was made from.
    pub seen: Option<Version>,
    /// Whether that could not be read ([`Mutant::FailedShardRead`]).
    pub blind: bool,
    pub tally: Tally,
    pub body: Spooled,
    pub load: Load,
    /// With whom it is published, if it is staged.
    pub place: Option<&'a Place>,
    /// When the old one was read.
    pub started: BootTime,
    pub tenure: Option<&'a Tenure>,
    /// Statistics about the very version that was read,
    pub current: Option<&'a Statistics>,
    /// and the last there are.
    pub last: Option<&'a Statistics>,
    /// in this version.
    pub noted: Option<Version>,
    pub schema: String,
}

impl Index {
    /// Writes the shard, if it is another one, in the place of the version that was read.
    pub(super) async fn publish(
        &self,
        new: New<'_>,
        options: &CompactOptions,
        done: &mut Compaction,
    ) -> Result<Published, Stop> {
        let store = &self.0.store;
        let shard = new.shard;
        let key = self.0.layout.shard(shard);
        let published = match compile::publish(&new.tally, new.seen.as_ref()) {
            Publish::Nothing => {
                // Others wrote it: it must be on disk before what it is made of goes.
                store.persist(std::slice::from_ref(&key)).await?;
                self.note_unchanged(new, options).await;
                Published::Nothing
            }
            Publish::Write(when) => {
                self.still_ours(new.started, new.tenure)?;
                let noted = self.unnote(&new).await?;
                let first = mutant::is(Mutant::FirstShardWrite) && new.seen.is_none();
                let when = if new.blind || first { When::Any } else { when };
                let held = new.tenure.is_some();
                let New { seen, tally, body, load, current, last, schema, started, .. } = new;
                let len = load.bytes;
                (done.bytes, done.created) = (len, seen.is_none());
                // Once what it says was purged, the shard may be what we have read again.
                let mut until = started.plus(PUBLISH_WITHIN);
                if let (Spooled::Staged(_), Some(tenure)) = (&body, new.tenure) {
                    // Nor do others wait for one whose lease may be over by then.
                    until = until.min(store.env().clock().boot().plus(tenure.trusted_for()));
                }
                let write = Write::when(when, Proof::Bytes).until(until);
                let put = match body {
                    Spooled::Memory(bytes) => store.put(&key, bytes, write).await?,
                    Spooled::Staged(staged) => match new.place {
                        Some(place) => place.publish(store, staged, write, load.kept).await?,
                        None => store.publish(vec![(staged, write)]).await.swap_remove(0)?,
                    },
                    Spooled::File(file) => {
                        // In a directory one that is not so large has to be read whole: its
                        // version is told by its content.
                        let directory = store.kind() == Kind::Directory;
                        let _alone = match directory {
                            true => Some(self.0.sending.lock().await),
                            false => None,
                        };
                        store.put_file(&key, &FileBody::new(file)?, write).await?
                    }
                };
                match put {
                    Put::Stored(version) => {
                        let before = seen;
                        let after = Compacted { shard, version, before, len, tally, held, noted };
                        self.note(after, current, last, schema, options).await;
                        Published::Stored
                    }
                    Put::Refused | Put::Contended => Published::Refused,
                    Put::Unknown(unknown) => {
                        tracing::info!(%shard, error = %unknown.error(), "nobody knows whether it was written");
                        Published::Unknown
                    }
                }
            }
        };
        done.outcome = match published {
            Published::Nothing => Outcome::Unchanged,
            Published::Stored => Outcome::Published,
            Published::Refused => Outcome::Refused,
            Published::Unknown => {
                Outcome::Aborted { reason: "it is not known whether the shard was written".into() }
            }
        };
        Ok(published)
    }

    /// Whether publishing still makes sense.
    fn still_ours(&self, started: BootTime, tenure: Option<&Tenure>) -> Result<(), Stop> {
        if self.0.store.env().clock().boot().since(started) > PUBLISH_WITHIN {
            return Err(Stop::Abort("the shard was read too long ago".to_owned()));
        }
        match tenure.map(Tenure::check) {
            Some(Err(_)) => Err(Stop::Abort("the shard's lease was lost".to_owned())),
            _ => Ok(()),
        }
    }

    /// Removes statistics that say more rows than the new shard will have: should we die before we note
    /// where the others are, nobody could tell that from a loss. Returns which are there then.
    async fn unnote(&self, new: &New<'_>) -> Result<Option<Version>, Stop> {
        if new.last.is_none_or(|last| last.rows <= new.tally.counts.rows_after) {
            return Ok(new.noted.clone());
        }
        match self.0.store.delete(&self.0.layout.statistics(new.shard)).await? {
            Delete::Deleted => Ok(None),
            Delete::Refused | Delete::Contended | Delete::Unknown(_) => {
                Err(Stop::Abort("its statistics could not be removed".to_owned()))
            }
        }
    }

    /// Notes what is known of a shard that stays as it is, where that was lost, or another tool wrote it:
    /// every row of it was read.
    async fn note_unchanged(&self, new: New<'_>, options: &CompactOptions) {
        let New { shard, seen, tally, load, current, last, noted, schema, tenure, .. } = new;
        let Some(version) = seen else { return };
        let is_noted = |s: &Statistics| s.version == version.as_str() && s.schema == schema;
        if last.is_some_and(is_noted) {
            return;
        }
        let (before, len, held) = (Some(version.clone()), load.bytes, tenure.is_some());
        let same = Compacted { shard, version, before, len, tally, held, noted };
        self.note(same, current, last, schema, options).await;
    }

    /// Notes what is known of the new shard. If that fails, the next compaction reads every row.
    async fn note(
        &self,
        after: Compacted,
        current: Option<&Statistics>,
        last: Option<&Statistics>,
        schema: String,
        options: &CompactOptions,
    ) {
        let Compacted { shard, version, before, len, tally, held, noted } = after;
        let digest_before = tally.before.or(current.map(|s| s.digest)).unwrap_or_default();
        let deletions = current.map_or(tally.deletions_before, |statistics| statistics.deletions);
        let Ok(now) = self.now().await else { return };
        // Only with the lease: without it, somebody else may have written it again by now.
        let stamp = match held {
            true => self.0.store.stamp(&self.0.layout.shard_text(shard)),
            false => None,
        };
        let file = stamp.filter(|stamp| stamp.size() == Some(len)).and_then(|stamp| stamp.text());
        let statistics = Statistics {
            version: version.as_str().to_owned(),
            schema,
            rows: tally.counts.rows_after,
            deletions: deletions.saturating_add_signed(tally.deletions),
            bytes: len,
            digest: digest_before.plus(tally.written).minus(tally.removed),
            generation: last.map_or(0, |statistics| statistics.generation).saturating_add(1),
            compacted_at: now,
            worker_id: options.worker.clone(),
            version_before: before.map_or_else(String::new, |version| version.as_str().to_owned()),
            digest_before,
            digest_written: tally.written,
            digest_removed: tally.removed,
            last: tally.counts,
            file,
        };
        let key = self.0.layout.statistics(shard);
        // Without the lease, somebody may have noted a later one.
        let write = match (held, noted) {
            (true, _) => Write::any(),
            (false, Some(noted)) => Write::when(When::Matches(noted), Proof::Bytes),
            (false, None) => Write::when(When::Absent, Proof::Bytes),
        };
        let write = write.durability(Durability::Volatile);
        match self.0.store.put(&key, statistics.to_bytes().into(), write).await {
            Ok(Put::Stored(_)) => {}
            other => tracing::debug!(?other, %shard, "the statistics could not be written"),
        }
    }

    /// Deletes what was merged. What cannot be deleted now is merged again, to no effect, and deleted
    /// then.
    pub(super) async fn sweep(
        &self,
        done: &mut Compaction,
        pending: &[Key],
        flat: &[(Key, Version)],
    ) {
        let store = &self.0.store;
        let mut swept = Ok(());
        // Those that other tools may overwrite are among the flat ones, with their versions, or left.
        let ours: Cow<'_, [Key]> = match flat.is_empty() && done.left == 0 {
            true => pending.into(),
            false => {
                pending.iter().filter(|key| self.0.layout.is_ours(key.as_str())).cloned().collect()
            }
        };
        // The more files are deleted at once, the less is written to delete each.
        let at_once = if store.kind() == Kind::Directory { ours.len().max(1) } else { 1000 };
        for keys in ours.chunks(at_once) {
            swept = store.discard(keys).await;
            if swept.is_err() {
                done.swept += self.gone(keys).await;
                break;
            }
            done.swept += keys.len() as u64;
        }
        for (key, version) in flat {
            // Only in the version that was merged: whoever overwrote it meanwhile meant it.
            let deleted = match mutant::is(Mutant::InboxOverwrite) {
                true => store.delete(key).await,
                false => store.delete_foreign(key, version).await,
            };
            match deleted {
                Ok(Delete::Deleted) => done.swept += 1,
                Ok(Delete::Refused | Delete::Contended | Delete::Unknown(_)) => {}
                Err(error) if error.kind() == ErrorKind::Unsupported => done.left += 1,
                Err(error) => swept = Err(error),
            }
        }
        if let Err(error) = swept {
            tracing::warn!(%error, shard = %done.shard, "merged records could not be deleted yet");
        }
    }
}

impl Index {
    /// Deletes what was merged by several compactions, which in a directory is best done at once: the
    /// more files, the less is written to delete each.
    pub(in super::super) async fn sweep_together(&self, all: &mut [Done]) {
        let unswept = all.iter_mut().filter_map(|done| done.unswept.as_mut());
        // Moved, not copied: there are as many as may be in memory.
        let counts: Vec<usize> = unswept.map(|unswept| unswept.keys.len()).collect();
        let mut keys = Vec::with_capacity(counts.iter().sum());
        for done in all.iter_mut() {
            keys.extend(
                done.unswept.iter_mut().flat_map(|unswept| std::mem::take(&mut unswept.keys)),
            );
        }
        let swept = self.0.store.discard(&keys).await;
        let mut rest = &keys[..];
        let unswept = all.iter_mut().filter(|done| done.unswept.is_some());
        for (done, count) in unswept.zip(counts) {
            let (ours, others) = rest.split_at(count);
            rest = others;
            let shard = done.compaction.shard;
            // What could not be deleted of one shard says nothing about the others.
            done.compaction.swept += match &swept {
                Ok(()) => count as u64,
                Err(error) => {
                    let gone = self.gone(ours).await;
                    if gone < count as u64 {
                        tracing::warn!(%error, %shard, "merged records could not be deleted yet");
                    }
                    gone
                }
            };
        }
        // Before there is room for others.
        drop(keys);
        for done in all {
            if let Some(tenure) = done.unswept.take().and_then(|unswept| unswept.tenure) {
                self.let_go(done.compaction.shard, tenure).await;
            }
        }
    }

    /// How many of these objects are there no more, where that can be told at once.
    async fn gone(&self, keys: &[Key]) -> u64 {
        let mut gone = 0;
        for keys in keys.chunks(1024) {
            let absent = |key: &&Key| self.0.store.stamp(key.as_str()) == Some(Stamp::Absent);
            gone += keys.iter().filter(absent).count() as u64;
            tokio::task::yield_now().await;
        }
        gone
    }
}

struct Compacted {
    shard: Shard,
    version: Version,
    before: Option<Version>,
    len: u64,
    tally: Tally,
    /// Whether its lease is held.
    held: bool,
    /// The version of the statistics that these take the place of.
    noted: Option<Version>,
}
