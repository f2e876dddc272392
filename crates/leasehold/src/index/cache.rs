//! What was read and may be read again: shards by version, inbox objects by name.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use bytes::Bytes;
use leasehold_protocol::cas::Version;
use leasehold_protocol::shard::Shard;

use super::IndexSettings;
use super::find::Guide;
use crate::store::large::Stamp;
use crate::{Key, Store};

/// A shard in memory.
#[derive(Debug)]
pub(super) struct CachedShard {
    pub version: Option<Version>,
    /// What the file system said before it was read.
    pub stamp: Option<Stamp>,
    pub body: Bytes,
    guide: Arc<OnceLock<Option<Guide>>>,
}

/// What a shard's inbox held.
#[derive(Debug)]
pub(super) struct CachedInbox {
    /// What the file system said before it was listed.
    pub stamp: Stamp,
    pub keys: Vec<Key>,
    /// Where that is, and where the shard's file is: making names takes as long as looking.
    pub folder: String,
    pub shard: String,
}

/// All that is kept about a shard.
#[derive(Debug)]
pub(super) struct Kept {
    pub inbox: Arc<CachedInbox>,
    pub shard: Arc<CachedShard>,
    pub flat: Flat,
}

/// What is known of the flat inbox.
#[derive(Debug, Clone, Default)]
pub(super) enum Flat {
    /// Nobody has looked yet.
    #[default]
    New,
    /// Nothing.
    Unknown,
    /// What its folder was like, and the files in it if they were few.
    Known(Stamp, Option<Arc<[Key]>>),
}

#[derive(Debug)]
pub(super) struct Cache {
    most: u64,
    folder: Option<PathBuf>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    shards: HashMap<u32, (Arc<CachedShard>, u64)>,
    inboxes: HashMap<u32, Arc<CachedInbox>>,
    flat: Flat,
    objects: HashMap<Key, (Bytes, u64)>,
    /// Shards that somebody has looked into.
    seen: HashSet<u32>,
    bytes: u64,
    tick: u64,
}

impl State {
    fn next(&mut self) -> u64 {
        self.tick += 1;
        self.tick
    }
}

impl Cache {
    pub fn new(settings: &IndexSettings, store: &Store, index: &str) -> Self {
        // Two stores may share a folder: what is kept is told apart by where it came from.
        let origin = xxhash_rust::xxh3::xxh3_64(format!("{}\0{index}", store.url()).as_bytes());
        let folder =
            settings.cache_folder.as_ref().map(|folder| folder.join(format!("{origin:016x}")));
        Self { most: settings.cache_bytes, folder, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn shard(&self, shard: Shard) -> Option<Arc<CachedShard>> {
        let mut state = self.state();
        let tick = state.next();
        let (cached, used) = state.shards.get_mut(&shard.number())?;
        *used = tick;
        Some(cached.clone())
    }

    /// A shard and what was pending for it, if both are kept.
    pub fn kept(&self, shard: Shard) -> Option<Kept> {
        let mut state = self.state();
        let tick = state.next();
        let inbox = state.inboxes.get(&shard.number())?.clone();
        let (cached, used) = state.shards.get_mut(&shard.number())?;
        *used = tick;
        Some(Kept { inbox, shard: cached.clone(), flat: state.flat.clone() })
    }

    /// Whether this is the first look into a shard. The next is not.
    pub fn is_new(&self, shard: Shard) -> bool {
        self.state().seen.insert(shard.number())
    }

    /// Keeps a shard and returns it.
    pub fn keep_shard(&self, shard: Shard, cached: CachedShard) -> Arc<CachedShard> {
        let cached = Arc::new(cached);
        let size = cached.body.len() as u64;
        if size > self.most {
            return cached;
        }
        let mut state = self.state();
        let tick = state.next();
        let old = state.shards.insert(shard.number(), (cached.clone(), tick));
        state.bytes += size;
        state.bytes -= old.map_or(0, |(old, _)| old.body.len() as u64);
        self.make_room(&mut state);
        cached
    }

    pub fn inbox(&self, shard: Shard) -> Option<Arc<CachedInbox>> {
        self.state().inboxes.get(&shard.number()).cloned()
    }

    pub fn keep_inbox(&self, shard: Shard, inbox: Arc<CachedInbox>) {
        self.state().inboxes.insert(shard.number(), inbox);
    }

    pub fn forget_inbox(&self, shard: Shard) {
        self.state().inboxes.remove(&shard.number());
    }

    /// What is known of the flat inbox. Somebody has looked from now on.
    pub fn flat(&self) -> Flat {
        let mut state = self.state();
        match &state.flat {
            Flat::New => std::mem::replace(&mut state.flat, Flat::Unknown),
            known => known.clone(),
        }
    }

    pub fn keep_flat(&self, stamp: Stamp, files: Option<Arc<[Key]>>) {
        self.state().flat = Flat::Known(stamp, files);
    }

    pub fn object(&self, key: &Key) -> Option<Bytes> {
        let mut state = self.state();
        let tick = state.next();
        let (body, used) = state.objects.get_mut(key)?;
        *used = tick;
        Some(body.clone())
    }

    pub fn keep_object(&self, key: Key, body: Bytes) {
        let size = body.len() as u64;
        if size > self.most / 4 {
            return;
        }
        let mut state = self.state();
        let tick = state.next();
        let old = state.objects.insert(key, (body, tick));
        state.bytes += size;
        state.bytes -= old.map_or(0, |(old, _)| old.len() as u64);
        self.make_room(&mut state);
    }

    /// Lets go of what was not used for longest, down to three quarters: not for every object anew.
    fn make_room(&self, state: &mut State) {
        const ENTRIES: usize = 100_000;
        if state.bytes <= self.most && state.objects.len() <= ENTRIES {
            return;
        }
        let mut used: Vec<u64> = state.shards.values().map(|(_, used)| *used).collect();
        used.extend(state.objects.values().map(|(_, used)| *used));
        used.sort_unstable();
        let mut keep = used.len() * 3 / 4;
        loop {
            let after = used.get(used.len() - keep).copied().unwrap_or(u64::MAX);
            state.shards.retain(|_, (_, used)| *used >= after);
            state.objects.retain(|_, (_, used)| *used >= after);
            let shards: u64 =
                state.shards.values().map(|(cached, _)| cached.body.len() as u64).sum();
            let objects: u64 = state.objects.values().map(|(body, _)| body.len() as u64).sum();
            state.bytes = shards + objects;
            if state.bytes <= self.most / 4 * 3 || keep == 0 {
                return;
            }
            keep /= 2;
        }
    }

    fn file(&self, shard: Shard, version: &Version) -> Option<PathBuf> {
        let version = xxhash_rust::xxh3::xxh3_128(version.as_str().as_bytes());
        Some(self.folder.as_ref()?.join(format!("{shard}-{version:032x}.usv")))
    }

    /// The version of a shard that a former run of a program left on disk, if any.
    pub fn on_disk(&self, shard: Shard) -> Option<(Version, Bytes)> {
        let folder = self.folder.as_ref()?;
        let name = std::fs::read_to_string(folder.join(format!("{shard}.version"))).ok()?;
        let version = Version::new(name);
        let body = std::fs::read(self.file(shard, &version)?).ok()?;
        // The hash of the body is its last line of defence against a file that was cut off.
        let hash = std::fs::read_to_string(folder.join(format!("{shard}.hash"))).ok()?;
        (hash == format!("{:032x}", xxhash_rust::xxh3::xxh3_128(&body)))
            .then(|| (version, body.into()))
    }

    /// Leaves a shard on disk. What goes wrong is the next run's loss and nobody else's.
    pub fn keep_on_disk(&self, shard: Shard, version: &Version, body: &[u8]) {
        let (Some(folder), Some(file)) = (&self.folder, self.file(shard, version)) else { return };
        let old = std::fs::read_to_string(folder.join(format!("{shard}.version"))).ok();
        let hash = format!("{:032x}", xxhash_rust::xxh3::xxh3_128(body));
        let write = || -> std::io::Result<()> {
            std::fs::create_dir_all(folder)?;
            for (path, bytes) in [
                (file, body),
                (folder.join(format!("{shard}.hash")), hash.as_bytes()),
                (folder.join(format!("{shard}.version")), version.as_str().as_bytes()),
            ] {
                let mut temp = tempfile::NamedTempFile::new_in(folder)?;
                std::io::Write::write_all(&mut temp, bytes)?;
                temp.persist(path).map_err(|error| error.error)?;
            }
            Ok(())
        };
        match write() {
            Ok(()) => {
                let old = old.map(Version::new).filter(|old| old != version);
                if let Some(old) = old.and_then(|old| self.file(shard, &old)) {
                    let _ = std::fs::remove_file(old);
                }
            }
            Err(error) => tracing::debug!(%error, %shard, "a shard could not be kept on disk"),
        }
    }
}

impl CachedShard {
    pub fn new(version: Option<Version>, stamp: Option<Stamp>, body: Bytes) -> Self {
        Self { version, stamp, body, guide: Arc::default() }
    }

    /// The same shard, as it was found to be again.
    pub fn again(&self, stamp: Option<Stamp>) -> Self {
        let Self { version, body, guide, .. } = self;
        Self { version: version.clone(), stamp, body: body.clone(), guide: guide.clone() }
    }

    /// Where its rows are, or `None` if it is in no order: another tool wrote it.
    pub fn guide(&self) -> Option<&Guide> {
        self.guide.get_or_init(|| Guide::of(&self.body)).as_ref()
    }
}
