//! Compactions of a directory are published together, and what they merged is deleted at the end: what
//! that must not change.

#![allow(clippy::unwrap_used)] // in a test, a failure is a panic

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use leasehold::env::{BootTime, Clock, Env};
use leasehold::index::{
    CompactOptions, Field, Index, IndexSettings, NewIndex, Outcome, Pass, Shard, Width,
};
use leasehold::store::dir::Dir;
use leasehold::{ErrorKind, List, Store, StoreSettings, StoreTime};
use leasehold_testkit::gate::{Gated, Pause, Verb};
use leasehold_testkit::temporary_files;
use serde_json::json;
use tempfile::TempDir;
use tokio::task::JoinHandle;

const RECORDS: usize = 300;

fn key(n: usize) -> String {
    format!("site-{n}.example")
}

struct World {
    folder: TempDir,
}

impl World {
    /// An index of 16 shards with single records that wait for each.
    async fn new() -> (Self, Index) {
        Self::of(Width::new(1).unwrap(), "").await
    }

    /// The same, wider, or with more text in each record.
    async fn of(width: Width, text: &str) -> (Self, Index) {
        let world = Self { folder: TempDir::new().unwrap() };
        let store = world.store(world.backend());
        let fields =
            ["domain:domain", "n:integer", "text"].map(|field| Field::parse(field).unwrap());
        let new = NewIndex { width, ..NewIndex::with_fields(fields.to_vec()).unwrap() };
        let index = Index::create(&store, "domains", new).await.unwrap();
        for n in 0..RECORDS {
            index.put(&json!({"domain": key(n), "n": n, "text": text})).await.unwrap();
        }
        (world, index)
    }

    fn backend(&self) -> Arc<Dir> {
        Arc::new(Dir::new(self.folder.path(), false, Env::system()).unwrap())
    }

    fn inbox(&self, shard: Shard) -> PathBuf {
        self.folder.path().join(format!("indexes/domains/inbox/{shard}"))
    }

    fn store(&self, backend: Arc<dyn leasehold::store::Backend>) -> Store {
        Store::new(backend, Env::system(), StoreSettings::default()).unwrap()
    }

    async fn node(&self) -> (Arc<Gated>, Index) {
        let gate = Arc::new(Gated::new(self.backend()));
        let index = Index::open(&self.store(gate.clone()), "domains").await.unwrap();
        (gate, index)
    }

    /// A pass that stands still before the first deletion.
    async fn stop_before_sweep(&self) -> (Pause, JoinHandle<leasehold::Result<Pass>>) {
        let (gate, compiler) = self.node().await;
        let mut sweep = gate.stop(Verb::Delete, "inbox/");
        let pass = tokio::spawn(async move { compiler.compact().await });
        sweep.reached().await;
        (sweep, pass)
    }

    /// How many files of rows there are.
    async fn count(&self, prefix: &str) -> usize {
        let store = self.store(self.backend());
        let page = store.list(List::prefix(prefix).unwrap()).collect().await.unwrap();
        page.entries.iter().filter(|entry| entry.key.as_str().ends_with(".usv")).count()
    }

    /// Makes this many of each object that waits.
    fn multiply(&self, times: usize) {
        for shard in records(Width::USUAL).into_keys() {
            for entry in std::fs::read_dir(self.inbox(shard)).unwrap().collect::<Vec<_>>() {
                let path = entry.unwrap().path();
                let name = path.file_name().unwrap().to_str().unwrap();
                let (name, _) = name.rsplit_once('-').unwrap();
                for n in 1..times {
                    let copy = path.with_file_name(format!("{name}-{n:032x}.usv"));
                    std::fs::copy(&path, copy).unwrap();
                }
            }
        }
    }

    async fn waiting(&self) -> usize {
        self.count("indexes/domains/inbox/").await
    }
}

async fn assert_all_there(index: &Index) {
    for n in 0..RECORDS {
        assert_eq!(index.get_json(&key(n)).await.unwrap().unwrap()["n"], n);
    }
}

/// How many records each shard gets.
fn records(width: Width) -> BTreeMap<Shard, usize> {
    let mut records = BTreeMap::new();
    for n in 0..RECORDS {
        *records.entry(Shard::of(&key(n), width)).or_default() += 1;
    }
    records
}

fn shards() -> usize {
    records(Width::new(1).unwrap()).len()
}

fn all(pass: &Pass, outcome: impl Fn(&Outcome) -> bool) -> bool {
    pass.failed.is_empty() && pass.shards.len() == shards() && pass.count(outcome) == shards()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_deleted_before_it_is_published() {
    let (world, index) = World::new().await;
    let (sweep, pass) = world.stop_before_sweep().await;
    // Every shard is there, and all that it is made of.
    assert_eq!(world.waiting().await, RECORDS);
    let (_, other) = world.node().await;
    assert_eq!(world.count("indexes/domains/shards/").await, shards());
    // Nobody else begins with what is about to go.
    let pass_of_other = other.compact().await.unwrap();
    assert!(all(&pass_of_other, |outcome| matches!(outcome, Outcome::Locked { .. })));
    sweep.go();
    let pass = pass.await.unwrap().unwrap();
    assert!(all(&pass, |outcome| *outcome == Outcome::Published), "{pass:?}");
    assert_eq!(pass.shards.iter().map(|done| done.swept).sum::<u64>(), RECORDS as u64);
    assert_eq!(world.waiting().await, 0);
    assert_all_there(&index).await;
    // And no lease is held any more.
    for n in 0..RECORDS {
        index.put(&json!({"domain": key(n), "n": n})).await.unwrap();
    }
    let pass = other.compact().await.unwrap();
    assert!(all(&pass, |outcome| *outcome == Outcome::Published), "{pass:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_dies_before_the_sweep_loses_nothing() {
    let (world, index) = World::new().await;
    let (_sweep, pass) = world.stop_before_sweep().await;
    pass.abort();
    assert!(pass.await.unwrap_err().is_cancelled());
    // A record that came since, of a key that is in an unswept object as well.
    index.put(&json!({"domain": key(0), "n": -1})).await.unwrap();
    let options = CompactOptions { lock: false, ..CompactOptions::default() };
    let (_, other) = world.node().await;
    let pass = other.compact_with(&options).await.unwrap();
    assert_eq!(pass.count(|outcome| *outcome == Outcome::Published), 1, "{pass:?}");
    assert_eq!(pass.count(|outcome| *outcome == Outcome::Unchanged), shards() - 1, "{pass:?}");
    assert_eq!(world.waiting().await, 0);
    assert_eq!(index.get_json(&key(0)).await.unwrap().unwrap()["n"], -1);
    index.put(&json!({"domain": key(0), "n": 0})).await.unwrap();
    assert_all_there(&index).await;
}

/// Those that wait for memory hold up nobody who has some, and the other way round.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn little_memory_is_enough_for_all() {
    let (world, index) = World::new().await;
    // No compaction is listed beforehand, and only a few fit at a time; each takes several rounds.
    for (most_objects, compiler_bytes) in [(50_000, 1 << 20), (1, 1 << 20)] {
        let settings = IndexSettings { most_objects, compiler_bytes, ..IndexSettings::default() };
        let (_, compiler) = world.node().await;
        let pass = compiler.with_settings(settings).compact().await.unwrap();
        assert!(all(&pass, |outcome| *outcome == Outcome::Published), "{pass:?}");
        assert_eq!(pass.records(), RECORDS as u64);
        assert_eq!(world.waiting().await, 0);
        assert_all_there(&index).await;
        for n in 0..RECORDS {
            index.put(&json!({"domain": key(n), "n": n})).await.unwrap();
        }
    }
}

/// A folder that nothing can be deleted from is in nobody else's way, and what is told is true.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_deleted_keeps_nothing_else() {
    let (world, index) = World::new().await;
    let records = records(Width::new(1).unwrap());
    let (stuck, few) = records.iter().nth(7).unwrap();
    let (sweep, pass) = world.stop_before_sweep().await;
    // Permissions do not stop everybody. A link in the way does: nobody follows it.
    let aside = world.folder.path().join("aside");
    std::fs::rename(world.inbox(*stuck), &aside).unwrap();
    std::os::unix::fs::symlink(&aside, world.inbox(*stuck)).unwrap();
    sweep.go();
    let pass = pass.await.unwrap().unwrap();
    assert!(all(&pass, |outcome| *outcome == Outcome::Published), "{pass:?}");
    for done in &pass.shards {
        let swept = if done.shard == *stuck { 0 } else { records[&done.shard] };
        assert_eq!(done.swept, swept as u64, "{}", done.shard);
        let left = std::fs::read_dir(world.inbox(done.shard)).unwrap().count();
        assert_eq!(left, records[&done.shard] - swept, "{}", done.shard);
    }
    // The next pass makes up for it.
    std::fs::remove_file(world.inbox(*stuck)).unwrap();
    std::fs::rename(&aside, world.inbox(*stuck)).unwrap();
    let pass = index.compact().await.unwrap();
    assert_eq!(pass.count(|outcome| *outcome == Outcome::Unchanged), 1, "{pass:?}");
    assert_eq!(pass.shards[0].swept, *few as u64);
    assert_eq!(world.waiting().await, 0);
    assert_all_there(&index).await;
}

/// Nobody else can have a shard that was published and is not swept: so not all of them wait.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn not_every_shard_waits_for_the_last() {
    let (world, index) = World::of(Width::USUAL, "").await;
    world.multiply(9);
    let (sweep, pass) = world.stop_before_sweep().await;
    let (published, all) = (world.count("indexes/domains/shards/").await, records(Width::USUAL));
    // Those that were under way when the 64th was there came along.
    assert!(published <= 64 + 32 && all.len() > 96, "{published} of {}", all.len());
    sweep.go();
    let pass = pass.await.unwrap().unwrap();
    assert_eq!(pass.count(|outcome| *outcome == Outcome::Published), all.len());
    assert!(pass.shards.iter().all(|done| done.swept == 9 * all[&done.shard] as u64));
    assert_eq!(world.waiting().await, 0);
    assert_all_there(&index).await;
}

/// A few objects of a shard are deleted with its publication, and its lease is released: nobody waits for
/// the others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_few_objects_do_not_wait_to_be_deleted() {
    let (world, index) = World::of(Width::USUAL, "").await;
    let all = records(Width::USUAL);
    let (slow, few) = all.iter().find(|(_, count)| **count == 1).unwrap();
    let (gate, compiler) = world.node().await;
    let mut read = gate.stop(Verb::Get, &format!("shards/{slow}.usv"));
    let pass = tokio::spawn(async move { compiler.compact().await });
    read.reached().await;
    for _ in 0..300 {
        if world.waiting().await == *few {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    // All the others, with one that has not even begun to merge.
    assert_eq!(world.waiting().await, *few);
    let (_, other) = world.node().await;
    for n in 0..RECORDS {
        index.put(&json!({"domain": key(n), "n": n})).await.unwrap();
    }
    let others = other.compact().await.unwrap();
    assert_eq!(others.count(|outcome| *outcome == Outcome::Published), all.len() - 1);
    assert_eq!(others.count(|outcome| matches!(outcome, Outcome::Locked { .. })), 1);
    read.go();
    let pass = pass.await.unwrap().unwrap();
    assert_eq!(pass.count(|outcome| *outcome == Outcome::Published), all.len());
    // Of a lease that was released nothing is left in a directory.
    let store = world.store(world.backend());
    let shards = store.list(List::prefix("indexes/domains/shards/").unwrap()).collect().await;
    let left = shards.unwrap().entries;
    assert!(!left.iter().any(|entry| entry.key.as_str().ends_with(".lock")), "{left:?}");
    index.compact().await.unwrap();
    assert_all_there(&index).await;
}

/// What was staged is seen by nobody before it is published, and goes if that is refused.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_convoy_of_which_some_are_refused() {
    let (world, index) = World::new().await;
    let records = records(Width::new(1).unwrap());
    let (contended, few) = records.first_key_value().unwrap();
    let (gate, compiler) = world.node().await;
    // Each is asked for by its name, and the first stops them all.
    let mut publish = gate.stop(Verb::Put, "shards/");
    let mut lease = gate.stop(Verb::Put, "shards/");
    let options = CompactOptions { lock: false, ..CompactOptions::default() };
    let pass = tokio::spawn(async move { compiler.compact_with(&options).await });
    publish.reached().await;
    assert_eq!(world.count("indexes/domains/shards/").await, 0);
    assert!(temporary_files(world.folder.path()) > 1);
    // Meanwhile somebody else publishes one of them.
    let options = CompactOptions { lock: false, ..CompactOptions::default() };
    let (_, other) = world.node().await;
    let done = other.compact_one(*contended, &options).await.unwrap();
    assert_eq!((done.outcome, done.swept), (Outcome::Published, *few as u64));
    index.put(&json!({"domain": key(0), "n": 0})).await.unwrap();
    let waiting = world.waiting().await;
    publish.go();
    lease.reached().await;
    lease.go();
    let pass = pass.await.unwrap().unwrap();
    assert_eq!(pass.count(|outcome| *outcome == Outcome::Refused), 1, "{pass:?}");
    assert_eq!(pass.count(|outcome| *outcome == Outcome::Published), shards() - 1, "{pass:?}");
    assert!(waiting > world.waiting().await);
    assert_eq!(temporary_files(world.folder.path()), 0);
    other.compact().await.unwrap();
    assert_eq!(world.waiting().await, 0);
    assert_all_there(&index).await;
}

/// Where nobody can say what became of a convoy, nothing of it is deleted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_convoy_that_is_lost_deletes_nothing() {
    let (world, index) = World::new().await;
    let (gate, compiler) = world.node().await;
    gate.panic(Verb::Put, ".usv");
    let pass = compiler.compact().await.unwrap();
    let lost = pass.count(|outcome| matches!(outcome, Outcome::Aborted { .. }));
    assert!(lost > 0 && pass.failed.is_empty(), "{pass:?}");
    let swept: u64 = pass.shards.iter().map(|done| done.swept).sum();
    assert_eq!(world.waiting().await as u64 + swept, RECORDS as u64);
    assert_all_there(&index).await;
    compiler.compact().await.unwrap();
    assert_eq!(world.waiting().await, 0);
    assert_all_there(&index).await;
}

/// A clock that runs 50 times as fast from then on.
#[derive(Debug)]
struct Fast(BootTime);

impl Clock for Fast {
    fn wall(&self) -> StoreTime {
        Env::system().clock().wall()
    }
    fn boot(&self) -> BootTime {
        self.0.plus(Env::system().clock().boot().since(self.0) * 50)
    }
    fn sleep(&self, span: Duration) -> futures::future::BoxFuture<'static, ()> {
        Env::system().clock().sleep(span / 50)
    }
}

/// Nor does anybody wait for long, if the last one is slow.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_shard_keeps_no_other() {
    let (world, index) = World::new().await;
    let records = records(Width::new(1).unwrap());
    let (slow, few) = records.first_key_value().unwrap();
    let gate = Arc::new(Gated::new(world.backend()));
    let env = Env::system().with_clock(Arc::new(Fast(Env::system().clock().boot())));
    let store = Store::new(gate.clone(), env, StoreSettings::default()).unwrap();
    let compiler = Index::open(&store, "domains").await.unwrap();
    let mut read = gate.stop(Verb::Get, &format!("shards/{slow}.usv"));
    let pass = tokio::spawn(async move { compiler.compact().await });
    read.reached().await;
    for _ in 0..300 {
        if world.waiting().await == *few {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(world.waiting().await, *few);
    // Their leases are released, too.
    let other = records.last_key_value().unwrap().0;
    let (_, node) = world.node().await;
    let mut outcome = Outcome::Locked { by: String::new() };
    for _ in 0..100 {
        let options = CompactOptions::default();
        outcome = node.compact_one(*other, &options).await.unwrap().outcome;
        if outcome == Outcome::Idle {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(outcome, Outcome::Idle);
    read.go();
    let pass = pass.await.unwrap().unwrap();
    assert!(all(&pass, |outcome| *outcome == Outcome::Published), "{pass:?}");
    assert_eq!(world.waiting().await, 0);
    assert_all_there(&index).await;
}

/// A compaction that panics ends the pass, but not before what the others published is swept.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_panic_leaves_nothing_unswept() {
    let (world, index) = World::new().await;
    let records = records(Width::new(1).unwrap());
    let (broken, few) = records.last_key_value().unwrap();
    let (gate, compiler) = world.node().await;
    gate.panic(Verb::Get, &format!("shards/{broken}.usv"));
    let error = compiler.compact().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Internal);
    // All were under way by then.
    assert_eq!(world.count("indexes/domains/shards/").await, shards() - 1);
    assert_eq!(world.waiting().await, *few);
    let options = CompactOptions { lock: false, ..CompactOptions::default() };
    let pass = compiler.compact_with(&options).await.unwrap();
    assert_eq!(pass.count(|outcome| *outcome == Outcome::Published), 1, "{pass:?}");
    assert_all_there(&index).await;
}

/// What is small needs no folder for files, also if its records are larger than usual.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn small_compactions_need_no_spool() {
    let text = "x".repeat(6_000);
    let (world, index) = World::of(Width::new(1).unwrap(), &text).await;
    let (_, compiler) = world.node().await;
    let spool_folder = Some(world.folder.path().join("nowhere"));
    let compiler =
        compiler.with_settings(IndexSettings { spool_folder, ..IndexSettings::default() });
    let pass = compiler.compact().await.unwrap();
    assert!(all(&pass, |outcome| *outcome == Outcome::Published), "{pass:?}");
    // Nor does a shard of nearly a MB that has to be sorted.
    let shard = Shard::of(&key(0), Width::new(1).unwrap());
    let keys = (RECORDS..).map(key).filter(|key| Shard::of(key, Width::new(1).unwrap()) == shard);
    let mut keys: Vec<String> = keys.take(150).collect();
    keys.sort_unstable_by(|a, b| b.cmp(a));
    let row = |key: &String| format!("{key}\x1f1\x1f{text}\x1f2024-02-15T10:30:05.000000Z\n");
    let rows: String = keys.iter().map(row).collect();
    let file = world.folder.path().join(format!("indexes/domains/shards/{shard}.usv"));
    std::fs::write(file, rows).unwrap();
    for n in 0..RECORDS {
        index.put(&json!({"domain": key(n), "n": n})).await.unwrap();
    }
    let pass = compiler.compact().await.unwrap();
    assert!(all(&pass, |outcome| *outcome == Outcome::Published), "{pass:?}");
    let done = pass.shards.iter().find(|done| done.shard == shard).unwrap();
    assert_eq!(done.counts.rows_before, 150);
    assert_all_there(&index).await;
    assert!(index.get_json(&keys[0]).await.unwrap().is_some());
}
