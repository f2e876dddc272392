//! Being told of changes in a directory. Linux only: elsewhere a watch never wakes.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)] // in a test, a failure is a panic

use std::time::Duration;

use leasehold::lease::Asked;
use leasehold::lock::{Lock, LockSettings};
use leasehold::store::{Connect, Delete, Kind, List, Put, Store, StoreUrl, Watch};
use leasehold::{Durability, Key, Write};

/// Longer than any wake-up takes on a busy machine, and shorter than any heartbeat here.
const LONG: Duration = Duration::from_secs(10);

fn open(root: &tempfile::TempDir) -> Store {
    Connect::new(StoreUrl::Directory(root.path().join("store"))).open().unwrap()
}

async fn put(store: &Store, key: &str) {
    let write = Write::any().durability(Durability::Volatile);
    let put = store.put(&Key::new(key).unwrap(), key.to_owned().into(), write).await.unwrap();
    assert!(matches!(put, Put::Stored(_)));
}

async fn delete(store: &Store, key: &str) {
    assert!(matches!(store.delete(&Key::new(key).unwrap()).await.unwrap(), Delete::Deleted));
}

#[track_caller]
fn woken(woken: Result<(), tokio::time::error::Elapsed>) {
    assert!(woken.is_ok(), "not told of a change");
}

async fn wake(watch: &mut Watch) -> Result<(), tokio::time::error::Elapsed> {
    tokio::time::timeout(LONG, watch.changed()).await
}

/// Takes the wakes that are still under way.
async fn calm(watch: &mut Watch) {
    while tokio::time::timeout(Duration::from_millis(100), watch.changed()).await.is_ok() {}
}

#[tokio::test]
async fn a_key_that_appears_changes_or_goes_wakes() {
    let root = tempfile::tempdir().unwrap();
    let (store, other) = (open(&root), open(&root));
    store.init().await.unwrap();
    // Neither the folder nor the one above it is there yet.
    let mut watch = store.watch("a/b/x").unwrap();
    assert!(watch.is_live());
    for _ in 0..2 {
        put(&other, "a/b/x").await;
        woken(wake(&mut watch).await);
        calm(&mut watch).await;
        put(&other, "a/b/x").await;
        woken(wake(&mut watch).await);
        calm(&mut watch).await;
        // With it go its folders, and they come again.
        delete(&other, "a/b/x").await;
        woken(wake(&mut watch).await);
        calm(&mut watch).await;
        assert!(watch.is_live());
    }
    put(&other, "a/b/x").await;
    calm(&mut watch).await;
    put(&other, "a/b/other").await;
    put(&other, "a/c").await;
    let told = tokio::time::timeout(Duration::from_millis(100), watch.changed()).await;
    assert!(told.is_err(), "told of what nobody asked for");
    // Nothing is missed because nobody was waiting.
    put(&other, "a/b/x").await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    woken(wake(&mut watch).await);
    assert!(store.watch("a/../b").is_err());
}

/// Whoever only looks when woken finds everything: also what stands in folders made just before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_looks_when_woken_misses_nothing() {
    let root = tempfile::tempdir().unwrap();
    let (store, other) = (open(&root), open(&root));
    store.init().await.unwrap();
    let mut watch = store.watch("queues/q/pending/").unwrap();
    let writer = tokio::spawn(async move {
        for n in 0..300 {
            // Folders two deep, like those of tasks in a queue with shards.
            put(&other, &format!("queues/q/pending/{}/{n}/task.json", n % 3)).await;
            if n % 10 == 0 {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            if n % 50 == 0 {
                put(&other, &format!("queues/q/pending/lone-{n}")).await;
            }
        }
    });
    let mut seen = std::collections::BTreeSet::new();
    while seen.len() < 306 {
        let mut listing = store.list(List::prefix("queues/q/pending/").unwrap());
        let mut new = 0;
        while let Some(page) = listing.next_page().await.unwrap() {
            for entry in page.entries {
                let key = entry.key.clone();
                assert!(seen.insert(entry.key));
                delete(&store, key.as_str()).await;
                new += 1;
            }
        }
        // An empty look was one too many at most; the next must be worth it some time.
        if new == 0 && seen.len() < 306 {
            woken(wake(&mut watch).await);
        }
    }
    writer.await.unwrap();
}

#[tokio::test]
async fn buckets_tell_nothing() {
    let mut watch = Store::memory().watch("x").unwrap();
    assert!(!watch.is_live());
    assert!(tokio::time::timeout(Duration::from_millis(20), watch.changed()).await.is_err());
}

/// A holder whose next heartbeat is far away is asked, or robbed, and knows at once.
#[tokio::test]
async fn a_holder_learns_at_once_what_becomes_of_its_lock() {
    let root = tempfile::tempdir().unwrap();
    let (store, other) = (open(&root), open(&root));
    let slow = LockSettings {
        heartbeat: Duration::from_secs(60),
        ttl: Duration::from_secs(200),
        ..LockSettings::of(Kind::Directory)
    };
    let a = Lock::named(&store, "x", "a", slow.clone()).unwrap();
    let b = Lock::named(&other, "x", "b", slow).unwrap();
    let guard = a.acquire().await.unwrap();
    assert_eq!(b.ask().await.unwrap(), Asked::Now);
    let ask = tokio::time::timeout(LONG, guard.asked()).await.expect("it was not told");
    assert_eq!(ask.by, "b");
    guard.check().unwrap();
    // It can still be released, although the record is not what it wrote.
    guard.release().await.unwrap();
    let guard = a.acquire().await.unwrap();
    let thief = b.force().await.unwrap();
    tokio::time::timeout(LONG, guard.lost().cancelled()).await.expect("it was not told");
    thief.release().await.unwrap();
}

/// Somebody who has waited for long is woken by the release, and hardly looks until then.
#[tokio::test]
async fn who_waits_long_looks_seldom() {
    let root = tempfile::tempdir().unwrap();
    let (store, other) = (open(&root), open(&root));
    let patient = LockSettings {
        timeout: Duration::from_secs(60),
        attempts: 30,
        ..LockSettings::of(Kind::Directory)
    };
    let guard = Lock::named(&store, "x", "a", patient.clone()).unwrap().acquire().await.unwrap();
    let waiting = tokio::spawn({
        let lock = Lock::named(&other, "x", "b", patient).unwrap();
        async move { lock.acquire().await.unwrap() }
    });
    // Until it has given up on a quick release.
    while other.usage().get < 110 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let before = other.usage().get;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let looks = other.usage().get - before;
    // Every 5 ms at most, without a watch: 400. With one every 20: 100.
    assert!(looks < 250, "{looks} looks in a second");
    guard.release().await.unwrap();
    let guard = tokio::time::timeout(LONG, waiting).await.unwrap().unwrap();
    guard.release().await.unwrap();
}
