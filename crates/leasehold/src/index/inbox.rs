//! What is pending: listing it and reading it.

use std::collections::BTreeMap;
use std::sync::Arc;

use leasehold_protocol::layout::index::Pending;
use leasehold_protocol::mutant::{self, Mutant};
use leasehold_protocol::shard::{KeyHash, Shard};

use super::Index;
use super::cache::CachedInbox;
use crate::store::large::Stamp;
use crate::store::{Kind, List, Object, PAGE};
use crate::{Key, Result};

/// How many inbox objects of a bucket are read at a time.
const WINDOW: usize = 24;

/// The pending objects of some shards.
#[derive(Debug, Default)]
pub(super) struct Backlog {
    /// By shard.
    pub inbox: BTreeMap<Shard, Vec<Key>>,
    /// Whether `inbox` has all objects, and not only the shards that have any.
    pub complete: bool,
}

impl Index {
    /// The objects in a shard's inbox, up to `most` of them.
    pub(super) async fn list_inbox(&self, shard: Shard, most: usize) -> Result<Vec<Key>> {
        let list = List::prefix(self.0.layout.inbox_of(shard))?.limit(most).unordered();
        let mut listing = self.0.store.list(list);
        let mut keys = Vec::new();
        while let Some(page) = listing.next_page().await? {
            let pending = |key: &Key| self.0.layout.pending(key.as_str()).is_some();
            keys.extend(page.entries.into_iter().map(|entry| entry.key).filter(pending));
        }
        Ok(keys)
    }

    /// All that is pending, object by object if that is not more than `most`, else only which shards
    /// have any. One LIST while the inbox is small.
    pub(super) async fn backlog(&self, most: usize) -> Result<Backlog> {
        let layout = &self.0.layout;
        let mut backlog = Backlog { complete: true, ..Backlog::default() };
        let mut listing = self.0.store.list(List::prefix(layout.inbox())?.unordered());
        let mut count = 0;
        while let Some(page) = listing.next_page().await? {
            count += page.entries.len();
            if count > most {
                backlog.complete = false;
                break;
            }
            for entry in page.entries {
                if let Some((shard, _)) = layout.pending(entry.key.as_str()) {
                    backlog.inbox.entry(shard).or_default().push(entry.key);
                }
            }
        }
        if !backlog.complete {
            backlog.inbox.clear();
            let mut listing = self.0.store.list(List::prefix(layout.inbox())?.delimited());
            while let Some(page) = listing.next_page().await? {
                for shard in
                    page.prefixes.iter().filter_map(|prefix| layout.shard_of_prefix(prefix))
                {
                    backlog.inbox.entry(shard).or_default();
                }
            }
        }
        let width = self.known().package.width;
        backlog.inbox.retain(|shard, _| shard.width() == width);
        Ok(backlog)
    }

    /// Lists the flat inbox, if there is one.
    pub(super) fn flat_files(&self) -> Result<FlatFiles> {
        let mut list = List::prefix(self.0.layout.base())?.delimited().unordered();
        if mutant::is(Mutant::RandomPage) {
            list = List::prefix(self.0.layout.base())?.limit(7);
        }
        let flat = self.known().package.flat_inbox;
        let listing = flat.then(|| self.0.store.list(list));
        Ok(FlatFiles { index: self.clone(), listing })
    }

    /// The shard that a file of the flat inbox belongs to by its name.
    fn flat_shard(&self, key: &Key) -> Option<Shard> {
        let name = self.0.layout.flat_name(key.as_str())?;
        let known = self.known();
        let normalised = known.schema.normalise_key(&name);
        // A name that cannot be a key belongs somewhere too: its content goes to quarantine there.
        let name = normalised.map_or_else(|_| name.clone(), |key| key.into_owned());
        Some(Shard::of(&name, known.package.width))
    }

    /// The pending objects that may hold a key: its own, and batches. One LIST, or two more where the
    /// inbox is long; none in a directory whose folder has not changed.
    pub(super) async fn pending_of(&self, shard: Shard, hash: &KeyHash) -> Result<Vec<Key>> {
        let layout = &self.0.layout;
        let folder = layout.inbox_of(shard);
        let stamp = self.0.store.stamp(folder.trim_end_matches('/'));
        if stamp == Some(Stamp::Absent) {
            return Ok(Vec::new());
        }
        if let (Some(stamp), Some(known)) = (stamp, self.0.cache.inbox(shard))
            && stamp.confirms(&known.stamp)
        {
            return Ok(self.of_key(&known.keys, hash));
        }
        let mut listing = self.0.store.list(List::prefix(&folder)?.unordered());
        let listed = match self.0.store.peek(folder.trim_end_matches('/'), PAGE) {
            Some(keys) => Some(keys),
            None => {
                let (mut keys, mut whole) = (Vec::new(), false);
                // A short page is not the last one.
                while keys.len() < PAGE && !whole {
                    match listing.next_page().await? {
                        Some(page) => keys.extend(page.entries.into_iter().map(|entry| entry.key)),
                        None => whole = true,
                    }
                }
                whole.then_some(keys)
            }
        };
        if let Some(keys) = listed {
            let ours = self.of_key(&keys, hash);
            if let Some(stamp) = stamp {
                self.0.cache.keep_inbox(shard, Arc::new(CachedInbox { stamp, keys }));
            }
            return Ok(ours);
        }
        // A long inbox: only the two short ranges that matter.
        let mut ours = Vec::new();
        for prefix in [layout.batches_of(shard), layout.singles_of(hash, shard)] {
            let mut listing = self.0.store.list(List::prefix(prefix)?.unordered());
            while let Some(page) = listing.next_page().await? {
                ours.extend(page.entries.into_iter().map(|entry| entry.key));
            }
        }
        Ok(ours)
    }

    fn of_key(&self, keys: &[Key], hash: &KeyHash) -> Vec<Key> {
        if keys.is_empty() {
            return Vec::new();
        }
        let short = hash.short();
        let may_hold = |key: &&Key| match self.0.layout.pending(key.as_str()) {
            Some((_, Pending::Single { hash })) => hash == short,
            Some((_, Pending::Batch { .. })) => true,
            None => false,
        };
        keys.iter().filter(may_hold).cloned().collect()
    }

    /// Reads these objects and hands each to `each`, in any order; `None` for one that is gone.
    pub(super) async fn read_objects(
        &self,
        keys: &[Key],
        mut each: impl FnMut(&Key, Option<Object>) -> Result<()>,
    ) -> Result<()> {
        let store = &self.0.store;
        if matches!(store.kind(), Kind::Directory | Kind::Memory) {
            for (at, key) in keys.iter().enumerate() {
                each(key, store.get(key).await?)?;
                if at % 64 == 63 {
                    tokio::task::yield_now().await;
                }
            }
            return Ok(());
        }
        let mut reads = tokio::task::JoinSet::new();
        let mut rest = keys.iter();
        loop {
            while reads.len() < WINDOW
                && let Some(key) = rest.next()
            {
                let (store, key) = (store.clone(), key.clone());
                reads.spawn(async move { (store.get(&key).await, key) });
            }
            let Some(read) = reads.join_next().await else { return Ok(()) };
            let (object, key) = read.map_err(|error| {
                crate::Error::unavailable("reading was interrupted").caused_by(error)
            })?;
            each(&key, object?)?;
        }
    }
}

/// Files of the flat inbox, by the shard that their names belong to.
pub(super) type Flat = BTreeMap<Shard, Vec<Key>>;

/// A listing of the flat inbox.
pub(super) struct FlatFiles {
    index: Index,
    listing: Option<crate::store::Listing>,
}

impl FlatFiles {
    /// The next files, about as many as asked for, or `None` after the last.
    pub async fn next(&mut self, most: usize) -> Result<Option<Flat>> {
        let Some(listing) = &mut self.listing else { return Ok(None) };
        let (mut flat, mut count) = (Flat::new(), 0);
        while count < most {
            let Some(page) = listing.next_page().await? else {
                self.listing = None;
                break;
            };
            for entry in page.entries {
                if let Some(shard) = self.index.flat_shard(&entry.key) {
                    flat.entry(shard).or_default().push(entry.key);
                    count += 1;
                }
            }
        }
        Ok(Some(flat))
    }
}
