//! Compactions of a directory are published together, and what they merged is deleted at the end: what
//! that must not change.

#![allow(clippy::unwrap_used)] // in a test, a failure is a panic

use std::sync::Arc;

use leasehold::env::Env;
use leasehold::index::{
    CompactOptions, Field, Index, IndexSettings, NewIndex, Outcome, Pass, Shard, Width,
};
use leasehold::store::dir::Dir;
use leasehold::{List, Store, StoreSettings};
use leasehold_testkit::gate::{Gated, Verb};
use serde_json::json;
use tempfile::TempDir;

const RECORDS: usize = 300;

fn key(n: usize) -> String {
    format!("site-{n}.example")
}

struct World {
    folder: TempDir,
}

impl World {
    /// An index with single records that wait for nearly every shard.
    async fn new() -> (Self, Index) {
        let world = Self { folder: TempDir::new().unwrap() };
        let store = world.store(world.backend());
        let fields = ["domain:domain", "n:integer"].map(|field| Field::parse(field).unwrap());
        let new = NewIndex::with_fields(fields.to_vec()).unwrap();
        let index = Index::create(&store, "domains", new).await.unwrap();
        for n in 0..RECORDS {
            index.put(&json!({"domain": key(n), "n": n})).await.unwrap();
        }
        (world, index)
    }

    fn backend(&self) -> Arc<Dir> {
        Arc::new(Dir::new(self.folder.path(), false, Env::system()).unwrap())
    }

    fn store(&self, backend: Arc<dyn leasehold::store::Backend>) -> Store {
        Store::new(backend, Env::system(), StoreSettings::default()).unwrap()
    }

    async fn node(&self) -> (Arc<Gated>, Index) {
        let gate = Arc::new(Gated::new(self.backend()));
        let index = Index::open(&self.store(gate.clone()), "domains").await.unwrap();
        (gate, index)
    }

    /// How many files of rows there are.
    async fn count(&self, prefix: &str) -> usize {
        let store = self.store(self.backend());
        let page = store.list(List::prefix(prefix).unwrap()).collect().await.unwrap();
        page.entries.iter().filter(|entry| entry.key.as_str().ends_with(".usv")).count()
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

fn shards() -> usize {
    let shards = (0..RECORDS).map(|n| Shard::of(&key(n), Width::USUAL));
    shards.collect::<std::collections::BTreeSet<_>>().len()
}

fn all(pass: &Pass, outcome: impl Fn(&Outcome) -> bool) -> bool {
    pass.failed.is_empty() && pass.shards.len() == shards() && pass.count(outcome) == shards()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_deleted_before_it_is_published() {
    let (world, index) = World::new().await;
    let (gate, compiler) = world.node().await;
    let mut sweep = gate.stop(Verb::Delete, "inbox/");
    let pass = tokio::spawn(async move { compiler.compact().await });
    sweep.reached().await;
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
    let (gate, compiler) = world.node().await;
    let mut sweep = gate.stop(Verb::Delete, "inbox/");
    let pass = tokio::spawn(async move { compiler.compact().await });
    sweep.reached().await;
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
