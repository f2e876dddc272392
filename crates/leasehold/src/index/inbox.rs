//! What is pending: listing it and reading it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use leasehold_protocol::format::root::Limit;
use leasehold_protocol::format::usv;
use leasehold_protocol::layout::index::Pending;
use leasehold_protocol::mutant::{self, Mutant};
use leasehold_protocol::shard::{KeyHash, Shard};

use super::cache::CachedInbox;
use super::{Index, Inner};
use crate::store::large::{SMALL, Stamp};
use crate::store::{Detail, Kind, List, Meta, Object, PAGE};
use crate::{Error, ErrorKind, Key, Result, StoreTime};

/// How many inbox objects of a bucket are read at a time, by all who read an index: where requests keep a
/// pace, everything else waits behind these.
pub(super) const WINDOW: usize = 24;

/// How many names of a shard's inbox are kept.
const MOST_NAMES: usize = 10_000;

/// How long nobody must have written to another tool's file before it is taken in and deleted: a tool that
/// has it open goes on writing into a file that is no more.
const STILL: Duration = Duration::from_secs(5);

/// The same for a file that looks unfinished: empty, or its last row without an end.
const UNFINISHED: Duration = Duration::from_secs(60);

/// The pending objects of all shards that have any.
pub(super) type Backlog = BTreeMap<Shard, Listed>;

/// The pending objects of a shard, as far as they are listed.
#[derive(Debug, Default)]
pub(super) struct Listed {
    pub keys: Vec<Key>,
    /// How many bytes they have, as far as the listing tells: a bucket's always does.
    pub bytes: u64,
    /// Whether there may be more.
    pub more: bool,
}

impl Listed {
    /// The objects, or `None` if they have yet to be listed.
    pub fn known(self) -> Option<Vec<Key>> {
        (!self.more || !self.keys.is_empty()).then_some(self.keys)
    }
}

impl Index {
    /// The objects in a shard's inbox, up to `most` names.
    pub(super) async fn list_inbox(&self, shard: Shard, most: usize) -> Result<Listed> {
        let list = List::prefix(self.0.layout.inbox_of(shard))?.limit(most).unordered();
        let mut listing = self.0.store.list(list);
        let (mut keys, mut bytes, mut count) = (Vec::new(), 0_u64, 0);
        while let Some(page) = listing.next_page().await? {
            // Names that mean nothing to us count as well: they took the place of others.
            count += page.entries.len();
            for entry in page.entries {
                if self.0.layout.pending(entry.key.as_str()).is_some() {
                    bytes = bytes.saturating_add(entry.size.unwrap_or(0));
                    keys.push(entry.key);
                }
            }
        }
        Ok(Listed { keys, bytes, more: count >= most })
    }

    /// All that is pending: object by object if that is not much more than `most`, else as far as it is
    /// listed by then, and which other shards have any. As many LISTs as there are pages, and one.
    pub(super) async fn backlog(&self, most: usize) -> Result<Backlog> {
        let layout = &self.0.layout;
        let mut backlog = Backlog::new();
        let mut listing = self.0.store.list(List::prefix(layout.inbox())?.unordered());
        let (mut count, mut last, mut cut) = (0, None, false);
        while !cut && let Some(page) = listing.next_page().await? {
            cut = count >= most;
            count += page.entries.len();
            for entry in page.entries {
                if let Some((shard, _)) = layout.pending(entry.key.as_str()) {
                    let listed = backlog.entry(shard).or_default();
                    listed.bytes = listed.bytes.saturating_add(entry.size.unwrap_or(0));
                    listed.keys.push(entry.key);
                    last = Some(shard);
                }
            }
        }
        if cut {
            // In order, only the last shard can have more. A directory is not listed in order.
            let ordered = self.0.store.kind() != Kind::Directory
                && !self.0.store.limits().await?.contains(&Limit::ListOrder);
            match ordered {
                true => _ = last.map(|last| backlog.entry(last).or_default().more = true),
                false => backlog.clear(),
            }
            let mut listing = self.0.store.list(List::prefix(layout.inbox())?.delimited());
            while let Some(page) = listing.next_page().await? {
                let prefixes = page.prefixes.iter();
                for shard in prefixes.filter_map(|prefix| layout.shard_of_prefix(prefix)) {
                    backlog.entry(shard).or_insert(Listed { more: true, ..Listed::default() });
                }
            }
        }
        let width = self.known().package.width;
        backlog.retain(|shard, _| shard.width() == width);
        Ok(backlog)
    }

    /// Lists the flat inbox, if there is one.
    pub(super) fn flat_files(&self) -> Result<FlatFiles> {
        self.flat_files_in(Detail::Keys)
    }

    /// The same; with sizes and times, it also tells how much waits and since when.
    pub(super) fn flat_files_in(&self, detail: Detail) -> Result<FlatFiles> {
        let mut list = List::prefix(self.0.layout.base())?.delimited().unordered().detail(detail);
        if mutant::is(Mutant::RandomPage) {
            list = List::prefix(self.0.layout.base())?.detail(detail).limit(7);
        }
        let flat = self.known().package.flat_inbox;
        let listing = flat.then(|| self.0.store.list(list));
        Ok(FlatFiles { index: self.clone(), listing, waiting: BTreeMap::new() })
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

    /// The pending objects that may hold a key: its own, batches, and those that other tools named. A LIST
    /// for each 1,000 that are pending, because they may have named them anything; none in a directory whose
    /// folder has not changed.
    pub(super) async fn pending_of(&self, shard: Shard, hash: &KeyHash) -> Result<Vec<Key>> {
        let prefix = self.0.layout.inbox_of(shard);
        let folder = prefix.trim_end_matches('/');
        let found = |stamp: Stamp, keys: Vec<Key>| {
            let shard = self.0.layout.shard_text(shard);
            Arc::new(CachedInbox { stamp, keys, folder: folder.to_owned(), shard })
        };
        let (store, cache) = (&self.0.store, &self.0.cache);
        if let Some(known) = cache.inbox(shard)
            && store.stamp(folder).is_some_and(|stamp| stamp.confirms(&known.stamp))
        {
            return Ok(self.of_key(&known.keys, hash));
        }
        if let Some((stamp, keys)) = store.peek(folder, PAGE) {
            let ours = self.of_key(&keys, hash);
            cache.keep_inbox(shard, found(stamp, keys));
            return Ok(ours);
        }
        // Before it is listed: what changes meanwhile shows the next time.
        let stamp = store.stamp(folder);
        let mut listing = store.list(List::prefix(&prefix)?.unordered());
        let (mut ours, mut keys) = (Vec::new(), Vec::new());
        while let Some(page) = listing.next_page().await? {
            let page: Vec<Key> = page.entries.into_iter().map(|entry| entry.key).collect();
            ours.extend(self.of_key(&page, hash));
            // Names only; but a backlog of a million is not for memory.
            if stamp.is_some() && keys.len() <= MOST_NAMES {
                keys.extend(page);
            }
        }
        match stamp {
            Some(stamp) if keys.len() <= MOST_NAMES => {
                cache.keep_inbox(shard, found(stamp, keys));
            }
            _ => cache.forget_inbox(shard),
        }
        Ok(ours)
    }

    pub(super) fn of_key(&self, keys: &[Key], hash: &KeyHash) -> Vec<Key> {
        if keys.is_empty() {
            return Vec::new();
        }
        let short = hash.short();
        let may_hold = |key: &&Key| match self.0.layout.pending(key.as_str()) {
            // A name that only looks like one of ours says nothing.
            Some((_, Pending::Single { hash })) => {
                hash == short || !self.0.layout.is_ours(key.as_str())
            }
            Some((_, Pending::Batch { .. })) => true,
            None => false,
        };
        keys.iter().filter(may_hold).cloned().collect()
    }

    /// Whether another tool may still be writing this file, of which this is the last byte. Only in a
    /// directory: an object of a bucket is there as a whole or not at all.
    pub(super) fn may_be_written(&self, meta: &Meta, last: Option<u8>) -> bool {
        if self.0.store.kind() != Kind::Directory {
            return false;
        }
        let ended = matches!(last, Some(usv::END | usv::RECORD));
        let still = if ended { STILL } else { UNFINISHED };
        // Who writes now writes no time far ahead: it was set, or the clock was set back. Such a file
        // must not wait until then.
        meta.modified <= meta.now.plus(UNFINISHED) && meta.now.since(meta.modified) < still
    }

    /// Reads these objects and hands each to `each`, in any order; `None` for one that is gone. Returns
    /// what could not be handed over.
    pub(super) async fn read_objects(
        &self,
        keys: &[Key],
        mut each: impl FnMut(&Key, Option<Object>) -> Result<()>,
    ) -> Result<Unread> {
        let store = &self.0.store;
        let mut unread = Unread::default();
        let mut hand_over = |key: Key, read: Small| match read {
            Small::Gone => each(&key, None),
            Small::Whole(object) => each(&key, Some(object)),
            Small::TooLarge => {
                unread.large.push(key);
                Ok(())
            }
            Small::Unreadable => {
                unread.left += 1;
                Ok(())
            }
        };
        if matches!(store.kind(), Kind::Directory | Kind::Memory) {
            for (at, key) in keys.iter().enumerate() {
                hand_over(key.clone(), Small::read(self, key).await?)?;
                if at % 64 == 63 {
                    tokio::task::yield_now().await;
                }
            }
            return Ok(unread);
        }
        let mut reads = tokio::task::JoinSet::new();
        let mut rest = keys.iter();
        loop {
            while rest.len() > 0 && reads.len() < WINDOW {
                // Each waits for one at most, and goes on with what it has: so they get about the same.
                let reading = self.0.reading.clone();
                let leave = match reading.clone().try_acquire_owned() {
                    Ok(leave) => Some(leave),
                    Err(_) if reads.is_empty() => reading.acquire_owned().await.ok(),
                    Err(_) => break,
                };
                let Some(key) = rest.next() else { break };
                let (index, key) = (self.clone(), key.clone());
                reads.spawn(async move {
                    let read = Small::read(&index, &key).await;
                    drop(leave);
                    (read, key)
                });
            }
            let Some(read) = reads.join_next().await else { return Ok(unread) };
            let (read, key) = read.map_err(|error| {
                crate::Error::unavailable("reading was interrupted").caused_by(error)
            })?;
            hand_over(key, read?)?;
        }
    }
}

/// What was not handed over of the objects that were to be read.
#[derive(Debug, Default)]
pub(super) struct Unread {
    /// Too large for that: to be read in pieces.
    pub large: Vec<Key>,
    /// How many files of other tools cannot be read.
    pub left: u64,
}

/// Whether this is about one file of another tool, which must not keep the others from being read: it
/// belongs to somebody else, or the disk has lost it.
pub(super) fn is_unreadable(error: &Error) -> bool {
    let source = std::error::Error::source(error).and_then(|source| source.downcast_ref());
    let lost = source == Some(&rustix::io::Errno::IO);
    lost || matches!(error.kind(), ErrorKind::Denied | ErrorKind::Data)
}

/// An object that is read at once if it is small.
enum Small {
    Gone,
    Whole(Object),
    TooLarge,
    Unreadable,
}

impl Small {
    async fn read(index: &Index, key: &Key) -> Result<Self> {
        let Inner { store, layout, .. } = &*index.0;
        // One record is never too large, and most objects hold one: the shorter way.
        let single = matches!(layout.pending(key.as_str()), Some((_, Pending::Single { .. })));
        if single && layout.is_ours(key.as_str()) {
            return Ok(store.get(key).await?.map_or(Self::Gone, Self::Whole));
        }
        match Self::open(index, key).await {
            Err(error) if is_unreadable(&error) && !layout.is_ours(key.as_str()) => {
                tracing::warn!(%key, %error, "left where it is");
                Ok(Self::Unreadable)
            }
            read => read,
        }
    }

    async fn open(index: &Index, key: &Key) -> Result<Self> {
        let Some(source) = index.0.store.open(key).await? else { return Ok(Self::Gone) };
        if source.meta().size > SMALL as u64 {
            return Ok(Self::TooLarge);
        }
        let (body, meta) = (source.read_at(0, SMALL).await?, source.meta().clone());
        Ok(Self::Whole(Object { body, meta }))
    }
}

/// Files of the flat inbox, by the shard that their names belong to.
pub(super) type Flat = BTreeMap<Shard, Vec<Key>>;

/// A listing of the flat inbox.
pub(super) struct FlatFiles {
    index: Index,
    listing: Option<crate::store::Listing>,
    waiting: BTreeMap<Shard, Waiting>,
}

/// How much waits for a shard in the flat inbox, and since when.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Waiting {
    pub bytes: u64,
    pub since: Option<StoreTime>,
}

impl FlatFiles {
    /// What waits for a shard, of the files that were told.
    pub fn waiting(&self, shard: Shard) -> Waiting {
        self.waiting.get(&shard).copied().unwrap_or_default()
    }

    /// Whether the last file was told.
    pub fn is_done(&self) -> bool {
        self.listing.is_none()
    }

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
                    let waiting = self.waiting.entry(shard).or_default();
                    waiting.bytes = waiting.bytes.saturating_add(entry.size.unwrap_or(0));
                    waiting.since = match (waiting.since, entry.modified) {
                        (Some(since), Some(modified)) => Some(since.min(modified)),
                        (since, modified) => since.or(modified),
                    };
                    flat.entry(shard).or_default().push(entry.key);
                    count += 1;
                }
            }
        }
        Ok(Some(flat))
    }
}

#[cfg(all(test, feature = "s3"))]
mod tests {
    use std::time::Duration;

    use leasehold_testkit::http::{Spoil, TinyS3};

    use super::*;
    use crate::index::{Field, NewIndex};
    use crate::store::Connect;
    use crate::store::cloud::CloudOptions;

    /// Compactions of many shards do not put hundreds of reads in line, before what cannot wait.
    #[tokio::test(flavor = "multi_thread")]
    async fn all_who_read_share_a_window() {
        let server = TinyS3::start(|_| Spoil::Slowly(Duration::from_millis(5)));
        let mut connect = Connect::new("s3://bucket".parse().unwrap());
        connect.settings.connections = 3 * WINDOW;
        let endpoint = Some(server.endpoint());
        connect.cloud = CloudOptions { endpoint, anonymous: true, ..CloudOptions::default() };
        let store = connect.open().unwrap();
        let new = NewIndex::with_fields(vec![Field::parse("name").unwrap()]).unwrap();
        let index = Index::create(&store, "i", new).await.unwrap();
        let reads = (0..8).map(|shard| {
            let index = index.clone();
            tokio::spawn(async move {
                let key = |n| Key::new(format!("indexes/i/inbox/{shard:02x}/{n}.usv")).unwrap();
                let keys: Vec<Key> = (0..2 * WINDOW).map(key).collect();
                let mut gone = 0;
                let large = index.read_objects(&keys, |_, object| {
                    gone += usize::from(object.is_none());
                    Ok(())
                });
                assert!(large.await.unwrap().large.is_empty());
                assert_eq!(gone, keys.len());
            })
        });
        for read in futures::future::join_all(reads).await {
            read.unwrap();
        }
        let most = server.most_requests();
        assert!(most > 4 && most <= WINDOW, "{most} at once");
    }
}
