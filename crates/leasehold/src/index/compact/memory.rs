//! How much memory a compaction may use: out of what all of this process share.
//!
//! In a directory files tell their sizes; of a bucket's objects the listing did. Sorting and merging keep to what
//! was planned, and what turns out larger goes through files.

use leasehold_protocol::layout::index::Pending;
use tokio::sync::OwnedSemaphorePermit;

use super::super::convoy::Place;
use super::super::inbox::WINDOW;
use super::super::sort::IN_MEMORY;
use super::merge::PIECE;
use super::take::Inbox;
use super::{Index, Stop, Work};
use crate::Key;
use crate::store::Kind;
use crate::store::large::SMALL;

/// How many objects are looked at to find out how much they hold.
const LOOKED_AT: usize = 64;

/// How many shards of a bucket are opened at a time before there is room for them: the first [`SMALL`] of
/// each is in memory by then.
pub(in super::super) const OPENING: usize = 8;

/// What a record has, as long as nobody tells.
const USUAL: usize = 256;

/// Less than this is sorted in memory, whatever was expected: a usual inbox needs no files, wherever they
/// might be.
const SORT: usize = 256 << 10;

/// So is less than this of the new shard kept there.
const SPOOL: usize = 1 << 20;

/// How much memory a compaction uses where, in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plan {
    /// For records being sorted: more go through files.
    pub sort: usize,
    /// For the new shard, until it is written: more goes to a file.
    pub spool: usize,
    /// For objects of the inbox as they are read.
    bodies: usize,
    /// For the names of its objects.
    pub names: usize,
}

impl Plan {
    fn of(inbox: usize, names: usize, index: &Index) -> Self {
        let all = usize::try_from(index.0.settings.compiler_bytes).unwrap_or(usize::MAX);
        // Objects of a bucket are read several at a time.
        let directory = index.0.store.kind() == Kind::Directory;
        let at_once = if directory { SMALL } else { WINDOW * SMALL };
        Self {
            // Rows, and where each of them is.
            sort: inbox.saturating_add(inbox / 8).clamp(SORT, (all / 5).max(SORT)),
            spool: inbox.clamp(SPOOL, IN_MEMORY),
            bodies: inbox.min(at_once),
            names: names.saturating_mul(128),
        }
    }

    /// The same for a shard of this size.
    fn with(self, size: u64) -> (Self, u64) {
        let size = usize::try_from(size).unwrap_or(usize::MAX);
        let spool = self.spool.saturating_add(size).min(IN_MEMORY);
        let piece = size.min(PIECE);
        // What was merged waits to be put away as long as the spool has something already.
        let out = if size > piece { piece + piece / 8 } else { 0 };
        let reading_or_merging = self.bodies.max(piece + out + spool);
        let bytes = [self.sort, reading_or_merging, self.names, 64 << 10];
        let bytes = bytes.into_iter().fold(0, usize::saturating_add);
        (Self { spool, ..self }, bytes as u64)
    }
}

/// Memory that a compaction has, given back when it is dropped.
#[derive(Debug)]
pub(super) struct Memory(OwnedSemaphorePermit);

impl Memory {
    /// Gives back all but this many bytes.
    pub fn keep(&mut self, bytes: usize) {
        let rest = self.0.num_permits().saturating_sub((bytes >> 10) + 1);
        drop(self.0.split(rest));
    }
}

impl Index {
    /// How much a compaction may use before the shard is known. Of that, `unsorted` bytes are sorted with
    /// the inbox.
    pub(super) fn plan(&self, inbox: &Inbox<'_>, work: &Work, unsorted: u64) -> Plan {
        let most = usize::try_from(self.0.settings.compiler_bytes).unwrap_or(usize::MAX);
        let unsorted = usize::try_from(unsorted).unwrap_or(usize::MAX);
        let mut bytes = work.flat.len().saturating_mul(USUAL).saturating_add(unsorted);
        let listed = usize::try_from(inbox.bytes).unwrap_or(usize::MAX);
        bytes = bytes.saturating_add(listed);
        let mut looked = 0;
        for key in inbox.keys.iter().take_while(|_| listed == 0) {
            bytes = bytes.saturating_add(match self.0.layout.pending(key.as_str()) {
                Some((_, Pending::Batch { count })) => {
                    let count = usize::try_from(count).unwrap_or(usize::MAX);
                    looked += 1;
                    let size = (looked <= LOOKED_AT).then(|| self.size_of(key)).flatten();
                    size.unwrap_or(count.saturating_mul(USUAL))
                }
                _ => USUAL,
            });
            if bytes >= most {
                break;
            }
        }
        Plan::of(bytes.min(most), inbox.keys.len() + work.flat.len(), self)
    }

    /// How large an object is, where that can be told at once.
    fn size_of(&self, key: &Key) -> Option<usize> {
        usize::try_from(self.0.store.stamp(key.as_str())?.size()?).ok()
    }

    /// Takes memory for a compaction of a shard of this size.
    pub(super) async fn reserve(
        &self,
        plan: Plan,
        size: u64,
        work: &Work,
    ) -> Result<(Plan, Memory), Stop> {
        let all = (self.0.settings.compiler_bytes >> 10).clamp(1 << 10, u64::from(u32::MAX));
        let (plan, bytes) = plan.with(size);
        let needed = u32::try_from((bytes >> 10).min(all)).unwrap_or(u32::MAX);
        let permit = match self.0.memory.clone().try_acquire_many_owned(needed) {
            Ok(permit) => permit,
            Err(_) => {
                // Those that have it may wait for us to publish together.
                work.place.iter().for_each(|place| place.leave_for(bytes));
                let permit = self.0.memory.clone().acquire_many_owned(needed).await;
                permit.map_err(|_| Stop::Abort("this process is ending".to_owned()))?
            }
        };
        work.place.iter().for_each(Place::rejoin);
        Ok((plan, Memory(permit)))
    }
}
