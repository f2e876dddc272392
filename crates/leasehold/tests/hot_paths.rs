//! What hot paths take, counted: allocations, and calls of the store in a directory.
//!
//! Counts are exact where timings are not, so a change that makes a path twice as dear fails here
//! and not in a benchmark that nobody ran. Each bound is about half as much again as what was
//! counted when it was set: it leaves room for a field more in a record, not for another copy of it.

#![allow(clippy::unwrap_used, clippy::disallowed_methods)] // in a test, a failure is a panic

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use leasehold::env::Env;
use leasehold::index::{
    CompactOptions, Field, Freshness, Index, IndexSettings, NewIndex, Shard, Width,
};
use leasehold::lock::{Lock, LockSettings};
use leasehold::protocol::format::usv;
use leasehold::protocol::key::encode_segment;
use leasehold::protocol::shard::KeyHash;
use leasehold::queue::{NewTask, Queue, QueueSettings, usual_settings};
use leasehold::store::backend::{Backend, Lister, Reading};
use leasehold::store::memory::Memory;
use leasehold::store::meter::Meter;
use leasehold::store::{Connect, Delete, Get, Kind, Meta, Put, StoreUrl};
use leasehold::{Durability, Key, List, Store, StoreSettings, Version, When};
use tokio::runtime::{Builder, Runtime};

/// Counts what passes through to the system's allocator.
struct Counting;

thread_local! {
    /// Of this thread: the harness' own threads are none of our business, and what is counted
    /// here runs on one.
    static CALLS: Cell<u64> = const { Cell::new(0) };
}
static LIVE: AtomicU64 = AtomicU64::new(0);
static PEAK: AtomicU64 = AtomicU64::new(0);

fn grown(bytes: usize) {
    // A thread that is ending has no counter any more.
    let _ = CALLS.try_with(|calls| calls.set(calls.get() + 1));
    let live = LIVE.fetch_add(bytes as u64, Relaxed) + bytes as u64;
    PEAK.fetch_max(live, Relaxed);
}

// SAFETY: every call goes to the system's allocator as it is; counting allocates nothing.
#[allow(unsafe_code)] // an allocator cannot be had without
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grown(layout.size());
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        grown(layout.size());
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        LIVE.fetch_sub(layout.size() as u64, Relaxed);
        grown(size);
        unsafe { System.realloc(at, layout, size) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size() as u64, Relaxed);
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// One test at a time: the peak is everybody's.
fn alone() -> (MutexGuard<'static, ()>, Runtime) {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    (turn, Builder::new_current_thread().enable_all().build().unwrap())
}

/// How many allocations this takes, on this thread.
fn allocations<T>(work: impl FnOnce() -> T) -> u64 {
    let before = CALLS.get();
    drop(work());
    CALLS.get() - before
}

/// Allocations, or whatever was counted, per operation.
#[track_caller]
fn assert_at_most(what: &str, counted: u64, operations: u64, most: f64) {
    let each = counted as f64 / operations as f64;
    println!("{what}: {each:.2} of at most {most}");
    assert!(each <= most, "{what}: {each:.2} instead of at most {most}");
}

fn directory() -> (tempfile::TempDir, Store) {
    let folder = tempfile::tempdir().unwrap();
    let store = Connect::new(StoreUrl::Directory(folder.path().join("store"))).open().unwrap();
    (folder, store)
}

#[test]
fn reading_usv_allocates_nothing() {
    let (_turn, _) = alone();
    let row = "some-key.example\u{1f}A Company, Ltd\u{1f}7\u{1f}2024-02-15T10:30:05.000000Z\n";
    let text = row.repeat(10_000);
    let mut fields = 0;
    let counted = allocations(|| {
        fields = usv::rows(text.as_bytes()).map(|row| usv::fields(row).count()).sum();
    });
    assert_eq!((fields, counted), (40_000, 0));
    // What holds no control characters is not copied either.
    assert_eq!(allocations(|| usv::unescape("A Company, Ltd")), 0);
}

#[test]
fn a_key_is_one_allocation() {
    let (_turn, _) = alone();
    assert_eq!(allocations(|| Key::new("queues/q/pending/01K9ZZZZ/task.json").unwrap()), 1);
    assert_eq!(allocations(|| encode_segment("01K9ZZZZ0000")), 1);
}

const TASKS: u64 = 1_000;

/// Allocations of pushing and of draining, and requests of draining, all of `TASKS` tasks.
fn queue(runtime: &Runtime, store: &Store) -> (u64, u64, u64) {
    let settings = QueueSettings {
        // So long that no heartbeat falls into the test.
        ttl: Duration::from_secs(600),
        heartbeat: Duration::from_secs(200),
        durable: false,
        ..usual_settings(store.kind())
    };
    let queue = runtime.block_on(Queue::create(store, "q", settings)).unwrap();
    let payload = "x".repeat(200);
    // The first of all does what is done once.
    let push = async || queue.push(NewTask::text(&payload)).await.unwrap();
    runtime.block_on(async { push().await });
    let pushed = allocations(|| {
        runtime.block_on(async {
            for _ in 0..TASKS {
                push().await;
            }
        });
    });
    let worker = queue.worker("w");
    let one = async || worker.next().await.unwrap().unwrap().ack().await.unwrap();
    runtime.block_on(async { one().await });
    let before = store.usage();
    let drained = allocations(|| {
        runtime.block_on(async {
            for _ in 0..TASKS {
                let _ = one().await;
            }
        });
    });
    (pushed, drained, store.usage().since(&before).requests())
}

#[test]
fn tasks_in_memory() {
    let (_turn, runtime) = alone();
    let (pushed, drained, requests) = queue(&runtime, &Store::memory());
    assert_at_most("push", pushed, TASKS, 68.0);
    assert_at_most("task drained", drained, TASKS, 138.0);
    assert_at_most("requests of a task drained", requests, TASKS, 5.1);
}

#[test]
fn tasks_in_a_directory() {
    let (_turn, runtime) = alone();
    let (_folder, store) = directory();
    let (pushed, drained, requests) = queue(&runtime, &store);
    assert_at_most("push, directory", pushed, TASKS, 75.0);
    assert_at_most("task drained, directory", drained, TASKS, 165.0);
    assert_at_most("requests of a task drained, directory", requests, TASKS, 5.1);
}

#[test]
fn tasks_of_bundles() {
    let (_turn, runtime) = alone();
    let store = Store::memory();
    let settings = usual_settings(Kind::Memory);
    let queue = runtime.block_on(Queue::create(&store, "q", settings)).unwrap();
    let tasks: Vec<NewTask> = (0..TASKS).map(|n| NewTask::text(&n.to_string())).collect();
    let worker = queue.worker("w");
    let counted = allocations(|| {
        runtime.block_on(async {
            queue.push_bundle(tasks).await.unwrap();
            for _ in 0..TASKS {
                let task = worker.next().await.unwrap().unwrap();
                let _ = task.ack().await.unwrap();
            }
        });
    });
    assert_at_most("task of a bundle, pushed and drained", counted, TASKS, 15.0);
}

#[test]
fn a_lock_taken_and_released() {
    let (_turn, runtime) = alone();
    let store = Store::memory();
    let settings = LockSettings::of(Kind::Memory);
    let lock = Lock::named(&store, "a", "holder", settings).unwrap();
    let pair = async || lock.acquire().await.unwrap().release().await.unwrap();
    runtime.block_on(async { pair().await });
    let counted = allocations(|| {
        runtime.block_on(async {
            for _ in 0..100 {
                pair().await;
            }
        });
    });
    assert_at_most("lock + release", counted, 100, 56.0);
}

fn new_index() -> NewIndex {
    let fields = ["domain:domain", "name", "n:integer"].map(|field| Field::parse(field).unwrap());
    NewIndex { flat_inbox: false, ..NewIndex::with_fields(fields.to_vec()).unwrap() }
}

#[test]
fn a_warm_lookup() {
    let (_turn, runtime) = alone();
    let (_folder, store) = directory();
    let index = runtime.block_on(Index::create(&store, "i", new_index())).unwrap();
    let keys: Vec<String> = (0..500).map(|n| format!("site-{n}.example")).collect();
    runtime.block_on(async {
        let mut batch = index.batch().await.unwrap();
        for key in &keys {
            batch.put_texts([key.as_str(), "A Company", "7"]).unwrap();
        }
        batch.flush().await.unwrap();
        index.compact().await.unwrap();
        // What changed just now is looked at more closely.
        tokio::time::sleep(Duration::from_secs(3)).await;
        // The first look keeps nothing, the second does.
        for key in keys.iter().chain(&keys) {
            index.get_row(key, Freshness::Checked).await.unwrap().unwrap();
        }
    });
    for (name, freshness, most) in
        [("warm lookup", Freshness::Checked, 9.0), ("stale lookup", Freshness::StaleOk, 1.5)]
    {
        let counted = allocations(|| {
            runtime.block_on(async {
                for key in &keys {
                    index.get_row(key, freshness).await.unwrap().unwrap();
                }
            });
        });
        assert_at_most(name, counted, keys.len() as u64, most);
    }
}

/// With the flat inbox a lookup costs one request more, as the design says.
#[test]
fn the_flat_inbox_costs_a_request() {
    let (_turn, runtime) = alone();
    let store = Store::memory();
    runtime.block_on(async {
        let new = NewIndex { flat_inbox: true, ..new_index() };
        let index = Index::create(&store, "i", new).await.unwrap();
        let mut batch = index.batch().await.unwrap();
        batch.put_texts(["a.example", "A", "1"]).unwrap();
        batch.flush().await.unwrap();
        index.compact().await.unwrap();
        for _ in 0..2 {
            let before = store.usage();
            index.get_row("a.example", Freshness::Checked).await.unwrap().unwrap();
            let used = store.usage().since(&before);
            assert_eq!((used.list, used.get, used.requests()), (1, 2, 3), "{used:?}");
        }
    });
}

/// What a compiler has in memory does not depend on the size of the shard, new or updated.
#[test]
fn a_compaction_has_a_limit() {
    let (_turn, runtime) = alone();
    let mut peaks = Vec::new();
    for mib in [12_u64, 36] {
        let (_folder, store) = directory();
        let width = Width::new(1).unwrap();
        let new = NewIndex { width, ..new_index() };
        let index = runtime.block_on(Index::create(&store, "i", new)).unwrap();
        let text = "x".repeat(4_000);
        let rows = mib << 8;
        let keys = (0..).map(|n| format!("site-{n}.example"));
        let keys = keys.filter(|key| Shard::of(key, width).number() == 0);
        let keys: Vec<String> = keys.take(rows as usize).collect();
        let put = async |keys: &[String], text: &str| {
            let mut batch = index.batch().await.unwrap();
            for key in keys {
                batch.put_texts([key.as_str(), text, "7"]).unwrap();
                if batch.bytes() > 2 << 20 {
                    batch.flush().await.unwrap();
                }
            }
            batch.flush().await.unwrap();
        };
        for keys in [&keys[..], &keys[..100]] {
            let counted = allocations(|| runtime.block_on(put(keys, &text)));
            assert_at_most("row put", counted, keys.len() as u64, 2.0);
            let before = LIVE.load(Relaxed);
            PEAK.store(before, Relaxed);
            runtime.block_on(index.compact()).unwrap().into_result().unwrap();
            peaks.push((PEAK.load(Relaxed) - before) as f64 / f64::from(1 << 20));
        }
    }
    println!("{peaks:.1?} MiB at most");
    assert!(peaks.iter().all(|peak| *peak <= 40.0), "{peaks:.1?} MiB");
    let grown = [peaks[2] - peaks[0], peaks[3] - peaks[1]];
    assert!(grown.iter().all(|more| *more <= 6.0), "it grows with the shard: {peaks:.1?} MiB");
}

/// All compactions of a process together: first ones, of records that are larger than usual, many
/// shards at a time.
#[test]
fn compactions_of_many_shards_have_a_limit_together() {
    let (_turn, runtime) = alone();
    let (_folder, store) = directory();
    let new = NewIndex { width: Width::new(1).unwrap(), ..new_index() };
    let index = runtime.block_on(Index::create(&store, "i", new)).unwrap();
    let text = "x".repeat(1_000);
    let put = async |rows: std::ops::Range<u32>| {
        let mut batch = index.batch().await.unwrap();
        for n in rows {
            batch.put_texts([format!("site-{n}.example").as_str(), text.as_str(), "7"]).unwrap();
            if batch.bytes() > 8 << 20 {
                batch.flush().await.unwrap();
            }
        }
        batch.flush().await.unwrap();
    };
    let mut peaks = Vec::new();
    // 3 MiB a shard, in batches of half a MiB; then as much again, one in two a record that is there.
    for rows in [0..48_000, 24_000..72_000] {
        runtime.block_on(put(rows));
        let before = LIVE.load(Relaxed);
        PEAK.store(before, Relaxed);
        let pass = runtime.block_on(index.compact()).unwrap();
        peaks.push((PEAK.load(Relaxed) - before) as f64 / f64::from(1 << 20));
        assert_eq!(pass.records(), 48_000);
    }
    println!("{peaks:.1?} MiB at most");
    assert!(peaks.iter().all(|peak| *peak <= 32.0), "{peaks:.1?} MiB");
}

/// However many names a folder has, the first of them in order do not take the memory of all.
#[test]
fn the_first_of_many_names_have_a_limit() {
    let (_turn, runtime) = alone();
    let (folder, store) = directory();
    let many = folder.path().join("store/many");
    std::fs::create_dir_all(&many).unwrap();
    for n in 0..60_000_u32 {
        // 9 MiB of names.
        let name = format!("{:08x}{}", n.wrapping_mul(2_654_435_761), "n".repeat(152));
        std::fs::write(many.join(name), "").unwrap();
    }
    let before = LIVE.load(Relaxed);
    PEAK.store(before, Relaxed);
    let list = List::prefix("many/").unwrap().limit(1500);
    let listed = runtime.block_on(store.list(list).collect()).unwrap().entries.len();
    let peak = (PEAK.load(Relaxed) - before) as f64 / f64::from(1 << 20);
    println!("{peak:.1} MiB at most");
    assert!(listed == 1500 && peak <= 4.0, "{peak:.1} MiB");
}

/// However much of an inbox comes before one row of its shard.
#[test]
fn an_inbox_before_one_row_has_a_limit() {
    let (_turn, runtime) = alone();
    let text = "x".repeat(1_000);
    for rewrite in [false, true] {
        let (_folder, store) = directory();
        let width = Width::new(1).unwrap();
        let new = NewIndex { width, ..new_index() };
        let index = runtime.block_on(Index::create(&store, "i", new)).unwrap();
        let shard = Shard::of("zz.example", width);
        let keys = (0..).map(|n| format!("site-{n}.example"));
        let keys = keys.filter(|key| Shard::of(key, width) == shard).take(24_000);
        let options = CompactOptions { rewrite, ..CompactOptions::default() };
        let compacted = async |keys: &mut dyn Iterator<Item = String>| {
            let mut batch = index.batch().await.unwrap();
            for key in keys {
                batch.put_texts([key.as_str(), text.as_str(), "7"]).unwrap();
                if batch.bytes() > 1 << 20 {
                    batch.flush().await.unwrap();
                }
            }
            batch.flush().await.unwrap();
            let before = LIVE.load(Relaxed);
            PEAK.store(before, Relaxed);
            let done = index.compact_one(shard, &options).await.unwrap();
            assert_eq!(done.counts.quarantined, 0);
            (done.counts.rows_after, (PEAK.load(Relaxed) - before) as f64 / f64::from(1 << 20))
        };
        let (rows, _) = runtime.block_on(compacted(&mut ["zz.example".to_owned()].into_iter()));
        assert_eq!(rows, 1);
        let (rows, peak) = runtime.block_on(compacted(&mut { keys }));
        println!("{peak:.1} MiB at most");
        assert!(rows == 24_001 && peak <= 20.0, "{peak:.1} MiB");
    }
}

/// A bucket whose objects are copied into memory by those who read them, as by a transfer.
#[derive(Debug)]
struct Bucket(Memory);

#[async_trait]
impl Backend for Bucket {
    fn url(&self) -> String {
        self.0.url()
    }
    fn kind(&self) -> Kind {
        Kind::S3
    }
    fn meter(&self) -> &Arc<Meter> {
        self.0.meter()
    }
    fn reading(&self) -> Option<Reading> {
        self.0.reading()
    }
    async fn get(&self, key: &Key, unless: Option<&Version>) -> leasehold::Result<Get> {
        let mut got = self.0.get(key, unless).await?;
        if let Get::Found(object) = &mut got {
            object.body = object.body.to_vec().into();
            // The answer takes its time, and others are asked for meanwhile.
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Ok(got)
    }
    async fn head(&self, key: &Key) -> leasehold::Result<Option<Meta>> {
        self.0.head(key).await
    }
    async fn put(
        &self,
        key: &Key,
        body: Bytes,
        when: &When,
        durability: Durability,
    ) -> leasehold::Result<Put> {
        self.0.put(key, body, when, durability).await
    }
    async fn delete(&self, key: &Key, version: Option<&Version>) -> leasehold::Result<Delete> {
        self.0.delete(key, version).await
    }
    async fn delete_many(&self, keys: &[Key]) -> leasehold::Result<()> {
        self.0.delete_many(keys).await
    }
    fn list(&self, list: List) -> Box<dyn Lister> {
        self.0.list(list)
    }
    async fn persist(&self, keys: &[Key]) -> leasehold::Result<()> {
        self.0.persist(keys).await
    }
}

/// On a bucket nobody knows how large records are but the listing: it is asked.
#[test]
fn large_records_of_a_bucket_keep_to_the_limit() {
    let (_turn, runtime) = alone();
    let bucket = Arc::new(Bucket(Memory::new(Env::system())));
    let store = Store::new(bucket, Env::system(), StoreSettings::default()).unwrap();
    let width = Width::new(1).unwrap();
    let new = NewIndex { width, flat_inbox: false, ..new_index() };
    let index = runtime.block_on(Index::create(&store, "i", new)).unwrap();
    let text = "x".repeat(4_000);
    // Four shards with 20 batches each, of 64 records: 5 MB.
    let mut keys: BTreeMap<Shard, Vec<String>> = BTreeMap::new();
    for key in (0..).map(|n| format!("site-{n}.example")) {
        let shard = Shard::of(&key, width);
        if shard.number() < 4 && keys.get(&shard).is_none_or(|keys| keys.len() < 1280) {
            keys.entry(shard).or_default().push(key);
        }
        if keys.values().map(Vec::len).sum::<usize>() == 4 * 1280 {
            break;
        }
    }
    runtime.block_on(async {
        for chunk in keys.values().flat_map(|keys| keys.chunks(64)) {
            let mut batch = index.batch().await.unwrap();
            for key in chunk {
                batch.put_texts([key.as_str(), text.as_str(), "7"]).unwrap();
            }
            batch.flush().await.unwrap();
        }
    });
    let compiler_bytes = 8 << 20;
    let index = index.with_settings(IndexSettings { compiler_bytes, ..IndexSettings::default() });
    let before = LIVE.load(Relaxed);
    PEAK.store(before, Relaxed);
    let pass = runtime.block_on(index.compact()).unwrap();
    let peak = (PEAK.load(Relaxed) - before) as f64 / f64::from(1 << 20);
    assert_eq!(pass.records(), 4 * 1280);
    println!("{peak:.1} MiB at most");
    // What is planned, and a shard that the store has while it still has what it is made of.
    assert!(peak <= 8.0 + 6.0 + 1.0, "{peak:.1} MiB");
}

/// So do the names of what they merged, until it is deleted: many tiny objects.
#[test]
fn names_of_what_was_merged_have_a_limit_together() {
    let (_turn, runtime) = alone();
    let (folder, store) = directory();
    let width = Width::new(1).unwrap();
    let new = NewIndex { width, ..new_index() };
    let index = runtime.block_on(Index::create(&store, "i", new)).unwrap();
    let inbox = folder.path().join("store/indexes/i/inbox");
    for n in 0..48_000 {
        let key = format!("site-{n}.example");
        let shard = inbox.join(Shard::of(&key, width).to_string());
        std::fs::create_dir_all(&shard).unwrap();
        let name = format!("{}-{n:032x}.usv", KeyHash::of(&key).short());
        let row = format!("{key}\x1fA\x1f1\x1f2024-02-15T10:30:05.000000Z\n");
        std::fs::write(shard.join(name), row).unwrap();
    }
    let settings =
        IndexSettings { most_objects: 4_000, compiler_bytes: 3 << 20, ..IndexSettings::default() };
    let index = index.with_settings(settings);
    let before = LIVE.load(Relaxed);
    PEAK.store(before, Relaxed);
    let pass = runtime.block_on(index.compact()).unwrap();
    let peak = (PEAK.load(Relaxed) - before) as f64 / f64::from(1 << 20);
    assert_eq!(pass.records(), 48_000);
    assert_eq!(pass.shards.iter().map(|done| done.swept).sum::<u64>(), 48_000);
    println!("{peak:.1} MiB at most");
    assert!(peak <= 3.5, "{peak:.1} MiB");
}
