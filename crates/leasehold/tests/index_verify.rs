//! `verify` finds what was lost, and accuses nobody who is only slow.

#![allow(clippy::unwrap_used)] // in a test, a failure is a panic

use std::sync::Arc;
use std::time::Duration;

use leasehold::env::{Clock as _, Env};
use leasehold::index::{
    CompactOptions, Field, Index, NewIndex, Outcome, Shard, Statistics, Verified, Width,
};
use leasehold::store::memory::Memory;
use leasehold::store::{Delete, Put, Write};
use leasehold::{Key, Store, StoreSettings};
use leasehold_testkit::clock::Fast;
use leasehold_testkit::gate::{Gated, Verb};
use serde_json::json;

struct Scene {
    clock: Fast,
    store: Store,
    index: Index,
}

impl Scene {
    /// 200 rows in 16 shards.
    async fn new() -> Self {
        let clock = Fast::default();
        let memory = Arc::new(Memory::new(clock.env()));
        let store = Store::new(memory, clock.env(), StoreSettings::default()).unwrap();
        let index = Index::create(&store, "t", new()).await.unwrap();
        let scene = Self { clock, store, index };
        let rows = (0..200).map(|n| json!({"k": format!("k{n}"), "n": n}));
        scene.clock.pass(scene.index.put_many(rows)).await.unwrap();
        scene.clock.pass(scene.index.compact()).await.unwrap();
        assert_eq!(scene.verify().await.findings, []);
        scene
    }

    async fn verify(&self) -> Verified {
        self.clock.pass(self.index.verify()).await.unwrap()
    }

    async fn read(&self, file: &str) -> String {
        let object = self.store.get(&key(file)).await.unwrap().unwrap();
        String::from_utf8(object.body.to_vec()).unwrap()
    }

    async fn write(&self, file: &str, body: impl Into<String>) {
        let put = self.store.put(&key(file), body.into().into(), Write::any()).await.unwrap();
        assert!(matches!(put, Put::Stored(_)));
    }

    async fn remove(&self, file: &str) {
        let deleted = self.store.delete(&key(file)).await.unwrap();
        assert!(matches!(deleted, Delete::Deleted));
    }

    /// What is found: of which shard, whether it is grave, and what.
    async fn found(&self) -> Vec<(String, bool, String)> {
        let findings = self.verify().await.findings.into_iter();
        findings.map(|found| (found.shard.to_string(), found.grave, found.what)).collect()
    }
}

fn new() -> NewIndex {
    let fields = ["k", "n:integer"].map(|name| Field::parse(name).unwrap());
    let width = Width::new(1).unwrap();
    NewIndex { width, ..NewIndex::with_fields(fields.to_vec()).unwrap() }
}

fn key(file: &str) -> Key {
    Key::new(format!("indexes/t/shards/{file}")).unwrap()
}

#[tokio::test]
async fn rows_and_shards_that_are_gone_are_found() {
    let scene = Scene::new().await;
    let rows = scene.read("3.usv").await;
    let cut: Vec<&str> = rows.split_inclusive('\n').skip(3).collect();
    scene.write("3.usv", cut.concat()).await;
    scene.remove("5.usv").await;
    scene.write("7.usv", "").await;
    // Of these only the description tells.
    scene.remove("9.usv").await;
    scene.remove("9.json").await;
    let found = scene.found().await;
    let graves: Vec<&str> =
        found.iter().filter(|found| found.1).map(|found| found.0.as_str()).collect();
    assert_eq!(graves, ["3", "5", "7", "9"], "{found:?}");
    let all = rows.lines().count();
    assert!(found[0].2.contains(&format!("has {} rows, {all} were written", all - 3)), "{found:?}");
    assert!(found[1].2.contains("is missing") && found[3].2.contains("is missing"), "{found:?}");
}

/// Another tool may add rows; that is no loss, and the next compaction takes note.
#[tokio::test]
async fn a_shard_that_another_tool_changed_is_no_loss() {
    let scene = Scene::new().await;
    let width = Width::new(1).unwrap();
    let name = (0..).map(|n| format!("z{n}")).find(|key| Shard::of(key, width).to_string() == "3");
    let mut rows = scene.read("3.usv").await;
    rows.push_str(&format!("{}\x1f1\x1f2026-01-01T00:00:00.000000Z\x1f\n", name.unwrap()));
    scene.write("3.usv", rows).await;
    let found = scene.found().await;
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(!found[0].1 && found[0].2.contains("left no statistics"), "{found:?}");
}

/// A compiler that has written a shard of fewer rows, after a purge, and not yet its statistics.
#[tokio::test]
async fn a_compiler_that_is_under_way_is_not_accused() {
    let scene = Scene::new().await;
    let noted = scene.read("3.json").await;
    let before = Statistics::parse(noted.as_bytes()).unwrap();
    let before = Statistics { rows: 1000, version: "before".into(), ..before };
    let before = String::from_utf8(before.to_bytes()).unwrap();
    scene.write("3.json", before.clone()).await;
    let notes = async {
        scene.clock.sleep(Duration::from_secs(1)).await;
        scene.write("3.json", noted).await;
    };
    let both = futures::future::join(scene.index.verify(), notes);
    let (verified, ()) = scene.clock.pass(both).await;
    assert_eq!(verified.unwrap().findings, []);
    // One that never does is.
    scene.write("3.json", before).await;
    let found = scene.found().await;
    assert!(found.len() == 1 && found[0].1, "{found:?}");
}

/// Statistics that were lost are noted again by whoever reads every row, and only then.
#[tokio::test]
async fn lost_statistics_are_noted_again() {
    let scene = Scene::new().await;
    scene.remove("3.json").await;
    scene.write("4.json", "{").await;
    let found = scene.found().await;
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(found.iter().all(|found| !found.1 && found.2.contains("no statistics")), "{found:?}");
    let options = CompactOptions { rewrite: true, lock: false, ..CompactOptions::default() };
    for puts in [2, 0] {
        let before = scene.store.usage().put;
        let pass = scene.clock.pass(scene.index.compact_with(&options)).await.unwrap();
        assert_eq!(pass.count(|outcome| *outcome == Outcome::Unchanged), 16);
        assert_eq!(scene.store.usage().put - before, puts);
        assert_eq!(scene.found().await, []);
    }
    let statistics = Statistics::parse(scene.read("3.json").await.as_bytes()).unwrap();
    assert_eq!(statistics.contradiction(), None);
    // And they are as good as any: what comes next is copied on top of them.
    scene.clock.pass(scene.index.put(&json!({"k": "k1", "n": 7}))).await.unwrap();
    scene.clock.pass(scene.index.compact()).await.unwrap();
    assert_eq!(scene.found().await, []);
}

/// A compiler that forgot deletions, wrote the shard and died before it noted that, has lost nothing.
#[tokio::test]
async fn a_compiler_that_died_after_a_purge_is_not_accused() {
    for lock in [true, false] {
        let gate = Arc::new(Gated::new(Arc::new(Memory::new(Env::system()))));
        let store = Store::new(gate.clone(), Env::system(), StoreSettings::default()).unwrap();
        let index = Index::create(&store, "t", new()).await.unwrap();
        let keys = || (0..200).map(|n| format!("k{n}"));
        index.put_many(keys().map(|key| json!({"k": key, "n": 1}))).await.unwrap();
        index.delete_many(keys()).await.unwrap();
        index.compact().await.unwrap();
        let mut noting = gate.stop(Verb::Put, "shards/3.json");
        let purging = tokio::spawn({
            let (index, options) = (index.clone(), CompactOptions { lock, ..Default::default() });
            async move { index.purge(Duration::ZERO, true, &options).await }
        });
        noting.reached().await;
        purging.abort();
        let verified = index.verify().await.unwrap();
        assert!(verified.findings.iter().all(|found| !found.grave), "{:?}", verified.findings);
        let three = verified.findings.iter().find(|found| found.shard.to_string() == "3");
        assert!(three.unwrap().what.contains("no statistics"), "{three:?}");
    }
}
