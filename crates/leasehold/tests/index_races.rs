//! Interleavings that break an index as it is usually built, driven request by request. The numbers
//! are rows of FIELD.md.

#![allow(clippy::unwrap_used)] // in a test, a failure is a panic

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use leasehold::env::{BootTime, Clock, Entropy, Env};
use leasehold::index::{
    CompactOptions, Field, Index, IndexSettings, NewIndex, Outcome, Shard, Width,
};
use leasehold::store::memory::Memory;
use leasehold::store::{Put, Write};
use leasehold::{Error, ErrorKind, Key, List, Store, StoreSettings, StoreTime};
use leasehold_testkit::clock::Asleep;
use leasehold_testkit::faulty::{Broken, Fault, Faulty};
use leasehold_testkit::gate::{Gated, Verb};
use serde_json::{Value, json};

const KEY: &str = "example.com";

fn shard() -> Shard {
    Shard::of(KEY, Width::USUAL)
}

/// A store that several nodes share, each through a gate of its own.
struct World {
    memory: Arc<Memory>,
}

struct Node {
    gate: Arc<Gated>,
    index: Index,
}

impl World {
    async fn new() -> (Self, Node) {
        let memory = Arc::new(Memory::new(Env::system()));
        let world = Self { memory };
        let store = world.store(world.memory.clone());
        let fields = ["domain:domain", "n:integer"].map(|field| Field::parse(field).unwrap());
        let new = NewIndex::with_fields(fields.to_vec()).unwrap();
        Index::create(&store, "domains", new).await.unwrap();
        let node = world.node().await;
        (world, node)
    }

    fn store(&self, backend: Arc<dyn leasehold::store::Backend>) -> Store {
        let settings = StoreSettings { attempts: 1, ..StoreSettings::default() };
        Store::new(backend, Env::system(), settings).unwrap()
    }

    async fn node(&self) -> Node {
        let gate = Arc::new(Gated::new(self.memory.clone()));
        let index = Index::open(&self.store(gate.clone()), "domains").await.unwrap();
        Node { gate, index }
    }

    async fn keys(&self, prefix: &str) -> Vec<String> {
        let store = self.store(self.memory.clone());
        let page = store.list(List::prefix(prefix).unwrap()).collect().await.unwrap();
        page.entries.into_iter().map(|entry| entry.key.to_string()).collect()
    }

    async fn drop_file(&self, key: &str, body: &str) {
        let store = self.store(self.memory.clone());
        let put = store.put(&Key::new(key).unwrap(), body.to_owned().into(), Write::any()).await;
        assert!(matches!(put.unwrap(), Put::Stored(_)));
    }
}

impl Node {
    async fn put(&self, key: &str, n: i64) {
        self.index.put(&json!({"domain": key, "n": n})).await.unwrap();
    }

    async fn n(&self, key: &str) -> Option<Value> {
        self.index.get_json(key).await.unwrap().map(|record| record["n"].clone())
    }

    /// Compacts in the background.
    fn compact(&self, lock: bool) -> tokio::task::JoinHandle<Result<Outcome, Error>> {
        let index = self.index.clone();
        let options = CompactOptions { lock, ..CompactOptions::default() };
        tokio::spawn(async move { Ok(index.compact_one(shard(), &options).await?.outcome) })
    }
}

fn flat(n: i64, second: u32) -> String {
    format!("{KEY}\x1f{n}\x1f2024-02-15T10:30:{second:02}Z\n")
}

/// Row 8: the compiler reads x v1; a worker writes x v2; the compiler publishes v1 and deletes x.
#[tokio::test]
async fn row_8_a_file_that_was_overwritten_is_not_deleted() {
    let (world, a) = World::new().await;
    let file = format!("indexes/domains/{KEY}.usv");
    world.drop_file(&file, &flat(1, 1)).await;
    let mut pause = a.gate.stop(Verb::Put, "shards/a3.usv");
    let compaction = a.compact(true);
    pause.reached().await;
    world.drop_file(&file, &flat(2, 2)).await;
    pause.go();
    assert_eq!(compaction.await.unwrap().unwrap(), Outcome::Published);
    assert_eq!(world.keys(&file).await.len(), 1, "v2 is still there");
    assert_eq!(a.n(KEY).await, Some(json!(2)));
    a.index.compact().await.unwrap();
    assert_eq!(a.n(KEY).await, Some(json!(2)));
    assert!(world.keys(&file).await.is_empty());
}

/// The same where the store cannot delete conditionally: merged, left in place, reported.
#[tokio::test]
async fn without_conditional_deletes_flat_files_stay() {
    let (world, _) = World::new().await;
    let broken = Faulty::broken(world.memory.clone(), Broken::IgnoresDeleteMatch);
    // A root record that knows: as the store is made, or by the doctor.
    let root = "leasehold.json";
    world.drop_file(root, r#"{"format":1,"limits":["conditional-delete"]}"#).await;
    let index = Index::open(&world.store(Arc::new(broken)), "domains").await.unwrap();
    let file = format!("indexes/domains/{KEY}.usv");
    world.drop_file(&file, &flat(1, 1)).await;
    for outcome in [Outcome::Published, Outcome::Unchanged] {
        let done = index.compact_one(shard(), &CompactOptions::default()).await.unwrap();
        assert_eq!((done.outcome, done.left, done.swept), (outcome, 1, 0));
    }
    assert_eq!(world.keys(&file).await.len(), 1);
    // Objects with names of their own can go.
    index.put(&json!({"domain": KEY, "n": 5})).await.unwrap();
    index.compact().await.unwrap();
    assert!(world.keys("indexes/domains/inbox/").await.is_empty());
    assert_eq!(index.get_json(KEY).await.unwrap().unwrap()["n"], 5);
}

/// Row 9: two compilers find no shard, and both write it.
#[tokio::test]
async fn row_9_of_two_first_compilers_one_wins() {
    let (world, a) = World::new().await;
    let b = world.node().await;
    a.put(KEY, 1).await;
    let mut at_a = a.gate.stop(Verb::Put, "shards/a3.usv");
    let first = a.compact(false);
    at_a.reached().await;
    b.put(KEY, 2).await;
    assert_eq!(b.compact(false).await.unwrap().unwrap(), Outcome::Published);
    at_a.go();
    assert_eq!(first.await.unwrap().unwrap(), Outcome::Refused);
    assert_eq!(a.n(KEY).await, Some(json!(2)));
    // Whoever was refused deleted nothing: what only it had is still in the inbox.
    let (world, a) = World::new().await;
    let b = world.node().await;
    a.put(KEY, 1).await;
    let mut at_b = b.gate.stop(Verb::List, "inbox/a3/");
    let second = b.compact(false);
    at_b.reached().await;
    assert_eq!(a.compact(false).await.unwrap().unwrap(), Outcome::Published);
    a.put(KEY, 2).await;
    at_b.go();
    assert_eq!(second.await.unwrap().unwrap(), Outcome::Refused);
    assert_eq!(world.keys("indexes/domains/inbox/").await.len(), 1);
    assert_eq!(b.n(KEY).await, Some(json!(2)));
}

/// Row 10: a compaction outlives its lease; another compiler starts; the first one finishes.
#[tokio::test]
async fn row_10_who_outlived_its_lease_publishes_nothing_and_takes_no_lease_away() {
    let (world, slow) = World::new().await;
    let other = world.node().await;
    let short = IndexSettings { lock_ttl: Duration::from_millis(300), ..IndexSettings::default() };
    let slow = Node { index: slow.index.with_settings(short), gate: slow.gate };
    slow.put(KEY, 1).await;
    let mut at = slow.gate.stop(Verb::Get, "inbox/a3/");
    // Its heartbeats do not arrive any more.
    let mut beats = Vec::new();
    let compaction = slow.compact(true);
    at.reached().await;
    for _ in 0..20 {
        beats.push(slow.gate.stop(Verb::Put, "shards/a3.lock"));
    }
    // Its ttl, 2 s more, and one for a clock that counts in seconds.
    tokio::time::sleep(Duration::from_millis(3500)).await;
    other.put(KEY, 2).await;
    let mut held = other.gate.stop(Verb::Put, "shards/a3.usv");
    let second = other.compact(true);
    held.reached().await;
    drop(beats);
    at.go();
    let outcome = compaction.await.unwrap().unwrap();
    assert!(matches!(outcome, Outcome::Aborted { .. }), "{outcome:?}");
    let lock = world.store(world.memory.clone());
    let lock = lock.get(&Key::new("indexes/domains/shards/a3.lock").unwrap()).await.unwrap();
    let lock = String::from_utf8(lock.unwrap().body.to_vec()).unwrap();
    assert!(lock.contains(r#""state":"held""#), "{lock}");
    held.go();
    assert_eq!(second.await.unwrap().unwrap(), Outcome::Published);
    assert_eq!(other.n(KEY).await, Some(json!(2)));
    assert!(world.keys("indexes/domains/inbox/").await.is_empty());
}

/// The lock's path and content are the seed's, and a seed client's lock is respected.
#[tokio::test]
async fn the_lock_is_the_seeds() {
    let (world, a) = World::new().await;
    a.put(KEY, 1).await;
    let mut at = a.gate.stop(Verb::Put, "shards/a3.usv");
    let compaction = a.compact(true);
    at.reached().await;
    let store = world.store(world.memory.clone());
    let lock = store.get(&Key::new("indexes/domains/shards/a3.lock").unwrap()).await.unwrap();
    let lock: Value = serde_json::from_slice(&lock.unwrap().body).unwrap();
    for field in ["worker_id", "created_at", "expires_at"] {
        assert!(lock[field].is_string(), "{lock}");
    }
    at.go();
    compaction.await.unwrap().unwrap();
    let later = StoreTime::from_micros(4_000_000_000_000_000);
    let seed = format!(r#"{{"worker_id":"pi","created_at":"{later}","expires_at":"{later}"}}"#);
    world.drop_file("indexes/domains/shards/a3.lock", &seed).await;
    a.put(KEY, 2).await;
    let outcome = a.compact(true).await.unwrap().unwrap();
    assert_eq!(outcome, Outcome::Locked { by: "pi".to_owned() });
}

/// Row 11: an older record arrives after a newer one. Row 19: the inbox does not always win.
#[tokio::test]
async fn rows_11_and_19_the_latest_counts_whatever_arrives_last() {
    let (world, a) = World::new().await;
    let at = |time: &str, n: i64| json!({"domain": KEY, "n": n, "updated_at": time});
    a.index.put(&at("2024-02-15T10:00:00Z", 2)).await.unwrap();
    a.index.put(&at("2024-02-15T09:00:00Z", 1)).await.unwrap();
    assert_eq!(a.n(KEY).await, Some(json!(2)));
    a.index.compact().await.unwrap();
    a.index.put(&at("2024-02-15T09:30:00Z", 1)).await.unwrap();
    assert_eq!(a.n(KEY).await, Some(json!(2)));
    a.index.compact().await.unwrap();
    assert_eq!(a.n(KEY).await, Some(json!(2)));
    assert!(world.keys("indexes/domains/inbox/").await.is_empty());
}

#[derive(Debug)]
struct Skewed(Duration);

impl Clock for Skewed {
    fn wall(&self) -> StoreTime {
        Env::system().clock().wall().minus(self.0)
    }
    fn boot(&self) -> BootTime {
        Env::system().clock().boot()
    }
    fn sleep(&self, span: Duration) -> futures::future::BoxFuture<'static, ()> {
        Env::system().clock().sleep(span)
    }
}

#[derive(Debug, Default)]
struct Counting(AtomicU64);

impl Entropy for Counting {
    fn fill(&self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            let next = self.0.fetch_add(1, SeqCst).to_be_bytes();
            chunk.copy_from_slice(&next[8 - chunk.len()..]);
        }
    }
}

/// Row 12: a node whose clock is 8 hours behind loses every merge.
#[tokio::test]
async fn row_12_a_nodes_own_clock_does_not_matter() {
    let (world, a) = World::new().await;
    let behind =
        Env::new(Arc::new(Skewed(Duration::from_secs(8 * 3600))), Arc::<Counting>::default());
    let client = Arc::new(world.memory.client(behind.clone()));
    let store = Store::new(client, behind, StoreSettings::default()).unwrap();
    let late = Index::open(&store, "domains").await.unwrap();
    a.put(KEY, 1).await;
    late.put(&json!({"domain": KEY, "n": 2})).await.unwrap();
    assert_eq!(a.n(KEY).await, Some(json!(2)));
    a.index.compact().await.unwrap();
    assert_eq!(a.n(KEY).await, Some(json!(2)));
}

/// Row 13: equal times, and the order of listing decides.
#[tokio::test]
async fn row_13_equal_times_give_equal_bytes_in_any_order() {
    let mut bytes = Vec::new();
    for order in [[1, 2, 3], [3, 2, 1], [2, 3, 1]] {
        let (world, a) = World::new().await;
        for n in order {
            let row = format!("{KEY}\x1f{n}\x1f2024-02-15T10:30:05Z\n");
            // Names that are listed in this order.
            let place = order.iter().position(|other| *other == n).unwrap();
            world.drop_file(&format!("indexes/domains/inbox/a3/{place}.usv"), &row).await;
        }
        a.index.compact().await.unwrap();
        let store = world.store(world.memory.clone());
        let shard = store.get(&Key::new("indexes/domains/shards/a3.usv").unwrap()).await.unwrap();
        bytes.push(shard.unwrap().body);
    }
    assert!(bytes.iter().all(|body| *body == bytes[0]));
    assert!(bytes[0].starts_with(b"example.com\x1f3\x1f"));
}

/// Row 17: sampling the first page starves later keys, and `shards/` sits under the inbox's prefix.
#[tokio::test]
async fn row_17_every_key_is_taken_in_however_many_there_are() {
    let (world, a) = World::new().await;
    for n in 0..2300 {
        let key = format!("site{n}.example");
        let row = format!("{key}\x1f{n}\x1f2024-02-15T10:30:05Z\n");
        world.drop_file(&format!("indexes/domains/{key}.usv"), &row).await;
    }
    let mut batch = a.index.batch().await.unwrap();
    for n in 2300..2500 {
        batch.put_texts([format!("site{n}.example").as_str(), &n.to_string()]).unwrap();
    }
    batch.flush().await.unwrap();
    let pass = a.index.compact().await.unwrap();
    assert_eq!(pass.records(), 2500);
    assert_eq!(a.index.verify().await.unwrap().rows, 2500);
    let left = world.keys("indexes/domains/").await;
    assert!(left.iter().all(|key| key.contains("/shards/") || key.ends_with("package.json")));
    assert!(a.index.quarantined().await.unwrap().is_empty());
}

/// Row 18: two spellings are one record, and no key leaves its prefix.
#[tokio::test]
async fn row_18_keys_are_normalised_and_stay_where_they_belong() {
    let (world, a) = World::new().await;
    a.put("Example.COM.", 1).await;
    a.put("example.com", 2).await;
    a.index.compact().await.unwrap();
    assert_eq!(a.index.verify().await.unwrap().rows, 1);
    assert_eq!(a.n("EXAMPLE.com.").await, Some(json!(2)));
    let bad = a.index.put(&json!({"domain": "../../etc", "n": 1})).await.unwrap_err();
    assert_eq!(bad.kind(), ErrorKind::Invalid);
    // Keys that are no domains may be anything.
    let store = world.store(world.memory.clone());
    let fields = vec![Field::parse("id").unwrap()];
    let any = Index::create(&store, "any", NewIndex::with_fields(fields).unwrap()).await.unwrap();
    for key in ["../../etc", "a/b\\c", ".", "50%", "a\nb\u{1f}", "ключ", "x."] {
        any.put(&json!({"id": key})).await.unwrap();
        assert!(any.get_json(key).await.unwrap().is_some(), "{key:?}");
        any.compact().await.unwrap();
        assert_eq!(any.get_json(key).await.unwrap().unwrap()["id"], key, "{key:?}");
    }
    assert!(world.keys("").await.iter().all(|key| !key.contains("..") && !key.contains("etc")));
}

/// Row 20: reading the shard fails, is taken as empty, and the shard is overwritten.
#[tokio::test]
async fn row_20_a_failed_read_is_not_an_empty_shard() {
    let (world, a) = World::new().await;
    a.put(KEY, 1).await;
    a.index.compact().await.unwrap();
    a.put("other.example", 1).await;
    a.put(KEY, 2).await;
    let before = world.keys("indexes/domains/inbox/").await;
    for (verb, part) in [
        (Verb::Get, "shards/a3.usv"),
        (Verb::List, "inbox/a3/"),
        (Verb::Get, "inbox/a3/"),
        (Verb::Get, "shards/a3.json"),
        (Verb::Put, "shards/a3.usv"),
    ] {
        for kind in [ErrorKind::Unavailable, ErrorKind::Denied] {
            a.gate.fail(verb, part, kind);
            let error = a.compact(true).await.unwrap().unwrap_err();
            assert_eq!(error.kind(), kind, "{verb:?} {part}: {error}");
            assert_eq!(world.keys("indexes/domains/inbox/").await, before);
            assert_eq!(a.n(KEY).await, Some(json!(2)));
        }
    }
    a.index.compact().await.unwrap();
    assert_eq!(a.index.verify().await.unwrap().rows, 2);
}

/// A write whose answer is lost: our own bytes are recognised; what cannot be known deletes nothing.
#[tokio::test]
async fn an_unknown_publication_is_settled_by_its_bytes_or_deletes_nothing() {
    for (faults, reads, published) in [
        (vec![Fault::LostAnswer], vec![], true),
        (vec![Fault::LostRequest], vec![], true),
        (vec![Fault::LostAnswer], vec![false; 40], false),
        (vec![Fault::NotFlushed], vec![], false),
        (vec![Fault::Contended; 9], vec![], false),
    ] {
        let (world, a) = World::new().await;
        a.put(KEY, 1).await;
        let settings = StoreSettings {
            attempts: 3,
            retry_base: Duration::from_millis(1),
            ..StoreSettings::default()
        };
        let faulty = Arc::new(Faulty::writes(world.memory.clone(), []));
        let store = Store::new(faulty.clone(), Env::system(), settings).unwrap();
        let index = Index::open(&store, "domains").await.unwrap();
        store.init().await.unwrap();
        // Everything is read by the time that the shard is written: reads that fail are those that
        // would settle it.
        faulty.next_put_of("shards/a3.usv", faults, reads);
        let options = CompactOptions { lock: false, ..CompactOptions::default() };
        let outcome = index.compact_one(shard(), &options).await.unwrap().outcome;
        assert_eq!(outcome == Outcome::Published, published, "{outcome:?}");
        let left = world.keys("indexes/domains/inbox/").await;
        assert_eq!(left.is_empty(), published);
        assert_eq!(a.n(KEY).await, Some(json!(1)));
        a.index.compact().await.unwrap();
        assert_eq!(a.n(KEY).await, Some(json!(1)));
    }
}

/// Row 28: the reader reads the shard; x is published and deleted from the inbox; the reader lists
/// the inbox: x is in neither.
#[tokio::test]
async fn row_28_a_reader_sees_what_moves_while_it_reads() {
    for (verb, part) in [
        (Verb::List, "inbox/a3/"),
        (Verb::Get, "inbox/a3/"),
        (Verb::Get, "domains/example.com.usv"),
        (Verb::Get, "shards/a3.usv"),
    ] {
        let (world, compiler) = World::new().await;
        let reader = world.node().await;
        compiler.put("z.example", 0).await;
        compiler.put(KEY, 1).await;
        let mut at = reader.gate.stop(verb, part);
        let index = reader.index.clone();
        let reading = tokio::spawn(async move { index.get_json(KEY).await });
        at.reached().await;
        compiler.index.compact().await.unwrap();
        at.go();
        let found = reading.await.unwrap().unwrap();
        assert_eq!(found.unwrap()["n"], 1, "stopped at {verb:?} {part}");
        // The same for a reader of everything.
        compiler.put(KEY, 2).await;
        let mut at = reader.gate.stop(verb, part);
        let index = reader.index.clone();
        let scanning = tokio::spawn(async move {
            let mut scan = index.scan_shards(vec![shard()], 1).await?;
            let (mut seen, schema) = (Vec::new(), index.schema());
            while let Some(chunk) = scan.next().await? {
                seen.extend(chunk.records(&schema).map(|row| schema.read_json(row)["n"].clone()));
            }
            Ok::<_, Error>(seen)
        });
        tokio::select! {
            () = at.reached() => {}
            () = tokio::time::sleep(Duration::from_millis(300)) => {}
        }
        compiler.index.compact().await.unwrap();
        at.go();
        assert_eq!(scanning.await.unwrap().unwrap(), [json!(2)], "stopped at {verb:?} {part}");
    }
}

/// Row 29: a compiler has read the inbox and stalls; x is merged, deleted and purged; the compiler
/// brings x back. Stopped at every request of a compaction.
#[tokio::test]
async fn row_29_a_compiler_that_stalled_brings_nothing_back() {
    for (verb, part) in [
        (Verb::Get, "shards/a3.usv"),
        (Verb::Get, "shards/a3.json"),
        (Verb::List, "inbox/a3/"),
        (Verb::Get, "inbox/a3/"),
        (Verb::Put, "shards/a3.usv"),
        (Verb::Delete, "inbox/a3/"),
    ] {
        let (world, slow) = World::new().await;
        let quick = world.node().await;
        let other = same_shard();
        quick.put(&other, 0).await;
        quick.index.compact().await.unwrap();
        quick.put(KEY, 1).await;
        let mut at = slow.gate.stop(verb, part);
        let stalled = slow.compact(false);
        at.reached().await;
        quick.index.compact().await.unwrap();
        quick.put(&other, 1).await;
        quick.index.delete(KEY).await.unwrap();
        quick.index.compact().await.unwrap();
        quick.index.purge(Duration::ZERO, true, &CompactOptions::default()).await.unwrap();
        at.go();
        let outcome = stalled.await.unwrap().unwrap();
        assert_eq!(slow.n(KEY).await, None, "stopped at {verb:?} {part}: {outcome:?}");
        quick.index.compact().await.unwrap();
        assert_eq!(slow.n(KEY).await, None, "stopped at {verb:?} {part}: {outcome:?}");
        assert_eq!(quick.n(&other).await, Some(json!(1)));
    }
}

/// Another key of the same shard.
fn same_shard() -> String {
    let keys = (0..).map(|n| format!("n{n}.example"));
    keys.into_iter().find(|key| Shard::of(key, Width::USUAL) == shard()).unwrap()
}

/// The same where the shard comes back to the very bytes that the stalled compiler read: equal bytes
/// have equal versions, so the condition would hold. Deletions are purged after hours only, and a
/// shard that was read an hour ago is not written.
#[tokio::test]
async fn a_shard_that_came_back_to_its_old_bytes_fools_nobody() {
    let (world, quick) = World::new().await;
    let clock = Arc::new(Asleep::default());
    let env = Env::new(clock.clone(), Arc::<Counting>::default());
    let gate = Arc::new(Gated::new(Arc::new(world.memory.client(env.clone()))));
    let store = Store::new(gate.clone(), env, StoreSettings::default()).unwrap();
    let slow = Index::open(&store, "domains").await.unwrap();
    quick.put(&same_shard(), 0).await;
    quick.index.compact().await.unwrap();
    quick.put(KEY, 1).await;
    // Before the last read of the inbox: the shard and its version are read.
    let mut at = gate.stop(Verb::Get, "inbox/a3/");
    let index = slow.clone();
    let stalled = tokio::spawn(async move {
        let options = CompactOptions { lock: false, ..CompactOptions::default() };
        index.compact_one(shard(), &options).await
    });
    at.reached().await;
    // It has the object by now, let us say: its copy stays where it was.
    let pending = world.keys("indexes/domains/inbox/a3/").await.remove(0);
    let body = world.store(world.memory.clone());
    let body = body.get(&Key::new(&pending).unwrap()).await.unwrap().unwrap().body;
    quick.index.compact().await.unwrap();
    quick.index.delete(KEY).await.unwrap();
    quick.index.compact().await.unwrap();
    let young = quick.index.purge(Duration::ZERO, false, &CompactOptions::default()).await;
    assert!(young.unwrap_err().to_string().contains("2 hours"));
    quick.index.purge(Duration::ZERO, true, &CompactOptions::default()).await.unwrap();
    world.drop_file(&pending, std::str::from_utf8(&body).unwrap()).await;
    clock.sleep_for(Duration::from_secs(3601));
    at.go();
    let outcome = stalled.await.unwrap().unwrap().outcome;
    assert!(
        matches!(&outcome, Outcome::Aborted { reason } if reason.contains("too long ago")),
        "{outcome:?}"
    );
}

/// A deletion is forgotten only if nothing older waits in the inbox: it would be published without the
/// deletion, and the older record come back from the inbox.
#[tokio::test]
async fn purging_leaves_deletions_alone_that_the_inbox_has_a_word_about() {
    let (world, a) = World::new().await;
    a.put(KEY, 1).await;
    let old = world.keys("indexes/domains/inbox/").await.remove(0);
    let store = world.store(world.memory.clone());
    let body = store.get(&Key::new(&old).unwrap()).await.unwrap().unwrap().body;
    a.index.compact().await.unwrap();
    a.index.delete(KEY).await.unwrap();
    a.index.compact().await.unwrap();
    // The old record is back in the inbox: a sweep that did not happen.
    world.drop_file(&old, std::str::from_utf8(&body).unwrap()).await;
    let mut at = a.gate.stop(Verb::Delete, "inbox/");
    let index = a.index.clone();
    let purging = tokio::spawn(async move {
        index
            .purge(
                Duration::ZERO,
                true,
                &CompactOptions { lock: false, ..CompactOptions::default() },
            )
            .await
    });
    at.reached().await;
    let b = world.node().await;
    assert_eq!(b.compact(false).await.unwrap().unwrap(), Outcome::Unchanged);
    assert_eq!(b.n(KEY).await, None);
    at.go();
    purging.await.unwrap().unwrap();
    a.index.purge(Duration::ZERO, true, &CompactOptions::default()).await.unwrap();
    assert_eq!(b.n(KEY).await, None);
    assert_eq!(a.index.verify().await.unwrap().rows, 0);
}

/// Killed between any two requests, a compaction loses nothing and the next one finishes it.
#[tokio::test]
async fn a_compaction_that_dies_anywhere_loses_nothing() {
    for (verb, part) in [
        (Verb::Get, "shards/a3.usv"),
        (Verb::Get, "inbox/a3/"),
        (Verb::Put, "shards/a3.usv"),
        (Verb::Put, "shards/a3.json"),
        (Verb::Delete, "inbox/a3/"),
        (Verb::Put, "quarantine/"),
    ] {
        let (world, a) = World::new().await;
        a.put(KEY, 1).await;
        a.index.compact().await.unwrap();
        a.put(KEY, 2).await;
        a.put(&same_shard(), 3).await;
        world.drop_file("indexes/domains/inbox/a3/bad.usv", "nonsense\x1fx\n").await;
        let mut at = a.gate.stop(verb, part);
        let dying = a.compact(false);
        at.reached().await;
        dying.abort();
        let _ = dying.await;
        assert_eq!(a.n(KEY).await, Some(json!(2)));
        let b = world.node().await;
        b.index.compact().await.unwrap();
        assert_eq!(b.n(KEY).await, Some(json!(2)), "died at {verb:?} {part}");
        assert_eq!(b.n(&same_shard()).await, Some(json!(3)));
        assert!(world.keys("indexes/domains/inbox/").await.is_empty());
        assert_eq!(b.index.quarantined().await.unwrap().len(), 1);
        let verified = b.index.verify().await.unwrap();
        assert!(verified.findings.iter().all(|finding| !finding.grave), "{verified:?}");
    }
}

/// Fields are added while a compiler is at work that does not know them: rows that have them are not
/// damaged, and nothing of them is put into quarantine.
#[tokio::test]
async fn a_schema_that_grows_during_a_compaction_damages_nothing() {
    let (world, late) = World::new().await;
    let other = world.node().await;
    late.put(KEY, 1).await;
    late.index.compact().await.unwrap();
    late.put(KEY, 2).await;
    let mut at = late.gate.stop(Verb::List, "inbox/a3/");
    let compaction = late.compact(false);
    at.reached().await;
    other.index.add_fields(vec![Field::parse("city").unwrap()]).await.unwrap();
    let record = json!({"domain": KEY, "n": 3, "city": "Bern"});
    other.index.put(&record).await.unwrap();
    at.go();
    let outcome = compaction.await.unwrap().unwrap();
    assert!(matches!(outcome, Outcome::Aborted { .. }), "{outcome:?}");
    assert!(late.index.quarantined().await.unwrap().is_empty());
    assert_eq!(late.n(KEY).await, Some(json!(3)));
    late.index.compact().await.unwrap();
    assert_eq!(late.index.get_json(KEY).await.unwrap().unwrap()["city"], "Bern");
    assert!(world.keys("indexes/domains/inbox/").await.is_empty());
}
