//! When records were written, whatever the clocks say: of two puts one after the other the second counts,
//! and what is deleted is gone.

#![allow(clippy::unwrap_used)] // in a test, a failure is a panic

use std::sync::{Arc, Mutex};
use std::time::Duration;

use leasehold::env::{BootTime, Clock, Env};
use leasehold::index::{Field, Index, NewIndex};
use leasehold::store::cloud::CloudOptions;
use leasehold::store::memory::Memory;
use leasehold::store::{Connect, Put, Write};
use leasehold::{ErrorKind, Key, Store, StoreSettings, StoreTime};
use leasehold_testkit::clock::Chance;
use leasehold_testkit::http::{Spoil, TinyS3};
use serde_json::{Value, json};

const KEY: &str = "example.com";

/// A clock that stands still unless it is set.
#[derive(Debug)]
struct Set(Mutex<(StoreTime, Duration)>);

impl Set {
    fn at(text: &str) -> Arc<Self> {
        Arc::new(Self(Mutex::new((text.parse().unwrap(), Duration::from_secs(5000)))))
    }

    fn env(self: &Arc<Self>) -> Env {
        Env::new(self.clone(), Arc::new(Chance))
    }

    fn wall(&self, text: &str) {
        self.0.lock().unwrap().0 = text.parse().unwrap();
    }

    fn pass(&self, span: Duration) {
        let mut now = self.0.lock().unwrap();
        *now = (now.0.plus(span), now.1 + span);
    }

    fn back(&self, span: Duration) {
        let mut now = self.0.lock().unwrap();
        now.0 = now.0.minus(span);
    }
}

impl Clock for Set {
    fn wall(&self) -> StoreTime {
        self.0.lock().unwrap().0
    }
    fn boot(&self) -> BootTime {
        BootTime::from_boot(self.0.lock().unwrap().1)
    }
    fn sleep(&self, span: Duration) -> futures::future::BoxFuture<'static, ()> {
        Box::pin(tokio::time::sleep(span))
    }
}

fn new() -> NewIndex {
    let fields = ["domain:domain", "n:integer"].map(|name| Field::parse(name).unwrap());
    NewIndex::with_fields(fields.to_vec()).unwrap()
}

async fn n(index: &Index, key: &str) -> Option<Value> {
    index.get_json(key).await.unwrap().map(|record| record["n"].clone())
}

async fn drop_file(store: &Store, key: &str, body: &str) {
    let put = store.put(&Key::new(key).unwrap(), body.to_owned().into(), Write::any()).await;
    assert!(matches!(put.unwrap(), Put::Stored(_)));
}

fn connect(server: &TinyS3, clock: &Arc<Set>) -> Store {
    let mut connect = Connect::new("s3://bucket/fleet".parse().unwrap());
    connect.env = clock.env();
    connect.cloud = CloudOptions {
        endpoint: Some(server.endpoint()),
        access_key: Some("key".into()),
        secret_key: Some("secret".into()),
        ..CloudOptions::default()
    };
    connect.open().unwrap()
}

/// The times of the records that were put.
fn stamps(server: &TinyS3) -> Vec<String> {
    let puts = server.requests().into_iter().filter(|request| request.target.contains("/inbox/"));
    let text = puts.map(|request| String::from_utf8(request.body).unwrap());
    text.map(|row| row.split('\x1f').nth(2).unwrap().to_owned()).collect()
}

/// A bucket tells whole seconds, and every process is new: within the second its own clock decides. One
/// that is hours off stays within what the bucket told.
#[tokio::test]
async fn processes_that_put_within_a_second_are_in_order() {
    // This server's `Date` is always 10:00:07.
    let server = TinyS3::start(|_| Spoil::Nothing);
    let clock = Set::at("2026-11-15T10:00:07.100000Z");
    Index::create(&connect(&server, &clock), "domains", new()).await.unwrap();
    for wall in ["10:00:07.300000", "10:00:07.600000", "15:00:00.000000", "05:00:00.000000"] {
        clock.wall(&format!("2026-11-15T{wall}Z"));
        let store = connect(&server, &clock);
        let index = Index::open(&store, "domains").await.unwrap();
        index.put(&json!({"domain": KEY, "n": 1})).await.unwrap();
    }
    assert_eq!(
        stamps(&server),
        [
            "2026-11-15T10:00:07.300000Z",
            "2026-11-15T10:00:07.600000Z",
            "2026-11-15T10:00:08.000000Z",
            "2026-11-15T10:00:07.000000Z",
        ]
    );
}

struct Scene {
    clock: Arc<Set>,
    memory: Arc<Memory>,
}

impl Scene {
    async fn new() -> (Self, Store) {
        let clock = Set::at("2026-11-15T10:00:00Z");
        let memory = Arc::new(Memory::new(clock.env()));
        let scene = Self { clock, memory };
        let store = scene.store();
        Index::create(&store, "domains", new()).await.unwrap();
        (scene, store)
    }

    fn store(&self) -> Store {
        Store::new(self.memory.clone(), self.clock.env(), StoreSettings::default()).unwrap()
    }

    /// As another process has it.
    async fn open(&self) -> Index {
        Index::open(&self.store(), "domains").await.unwrap()
    }
}

/// A record may say a later time than it is: the clock was set back, or whoever put it has another. It is
/// replaced and deleted all the same, also when it is in its shard by then.
#[tokio::test]
async fn what_is_replaced_or_deleted_is_so_whatever_time_it_says() {
    for compacted in [false, true] {
        let (scene, _store) = Scene::new().await;
        let compact = async || {
            if compacted {
                scene.open().await.compact().await.unwrap();
            }
        };
        scene.open().await.put(&json!({"domain": KEY, "n": 1})).await.unwrap();
        compact().await;
        scene.clock.back(Duration::from_secs(60));
        // This is what it is about: a put does not look.
        scene.open().await.put(&json!({"domain": KEY, "n": 2})).await.unwrap();
        assert_eq!(n(&scene.open().await, KEY).await, Some(json!(1)));
        scene.open().await.replace(&json!({"domain": "Example.com.", "n": 3})).await.unwrap();
        assert_eq!(n(&scene.open().await, KEY).await, Some(json!(3)));
        compact().await;
        scene.open().await.delete(KEY).await.unwrap();
        assert_eq!(n(&scene.open().await, KEY).await, None);
        compact().await;
        // A deletion is a record as well.
        scene.open().await.replace(&json!({"domain": KEY, "n": 4})).await.unwrap();
        assert_eq!(n(&scene.open().await, KEY).await, Some(json!(4)));
        let ahead = scene.clock.env().clock().wall().plus(Duration::from_secs(290)).to_string();
        let own = json!({"domain": KEY, "n": 5, "updated_at": ahead});
        scene.open().await.put(&own).await.unwrap();
        compact().await;
        scene.open().await.delete_many(["a.example", KEY]).await.unwrap();
        assert_eq!(n(&scene.open().await, KEY).await, None);
        compact().await;
        assert_eq!(n(&scene.open().await, KEY).await, None);
        // Who names a time means it.
        let old = json!({"domain": KEY, "n": 6, "updated_at": "2026-01-01T00:00:00Z"});
        scene.open().await.replace(&old).await.unwrap();
        assert_eq!(n(&scene.open().await, KEY).await, None);
    }
}

/// A record from the far future, in a shard that another tool wrote, can be deleted. What is put after
/// that is of the present, or it would stand in everybody's way.
#[tokio::test]
async fn deleting_a_record_of_the_far_future_does_not_lead_there() {
    let (scene, store) = Scene::new().await;
    let row = format!("{KEY}\x1f1\x1f2099-01-01T00:00:00.000000Z\n");
    drop_file(&store, "indexes/domains/shards/a3.usv", &row).await;
    let index = scene.open().await;
    assert_eq!(n(&index, KEY).await, Some(json!(1)));
    let verified = index.verify().await.unwrap();
    let named = |text: &str| verified.findings.iter().any(|finding| finding.what.contains(text));
    assert!(named("1 rows are ahead") && named("2099"), "{:?}", verified.findings);
    index.delete(KEY).await.unwrap();
    assert_eq!(n(&index, KEY).await, None);
    index.compact().await.unwrap();
    assert_eq!(n(&index, KEY).await, None);
    index.put(&json!({"domain": "b.example", "n": 2})).await.unwrap();
    let record = index.get_json("b.example").await.unwrap().unwrap();
    let at = record["updated_at"].as_str().unwrap();
    assert!(at.starts_with("2026-11-15T10:00:00.0000"), "{at}");
}

/// Records from a pipe count from when they came, not from when the first one was waited for.
#[tokio::test]
async fn records_that_come_slowly_are_of_when_they_came() {
    let (scene, _store) = Scene::new().await;
    let second = Duration::from_secs(1);
    let mut batch = scene.open().await.batch().await.unwrap();
    for round in 0..3 {
        for span in [second / 20, second, 400 * second] {
            scene.clock.pass(span);
            scene.open().await.put(&json!({"domain": KEY, "n": 1})).await.unwrap();
            scene.clock.pass(second / 1000);
            let record = json!({"domain": KEY, "n": 2});
            batch.put(&record).unwrap();
            batch.flush().await.unwrap();
            assert_eq!(n(&scene.open().await, KEY).await, Some(json!(2)), "{round} {span:?}");
        }
        // One that says its own time, which is the present.
        scene.clock.pass(400 * second);
        let now = scene.clock.env().clock().wall().to_string();
        batch.put(&json!({"domain": "a.example", "n": 3, "updated_at": now})).unwrap();
        // A clock that is set meanwhile is seen.
        scene.clock.back(200 * second);
        scene.clock.pass(second);
        let far = scene.clock.env().clock().wall().plus(302 * second).to_string();
        let ahead = json!({"domain": "b.example", "n": 3, "updated_at": far});
        assert_eq!(batch.put(&ahead).unwrap_err().kind(), ErrorKind::Invalid);
        scene.clock.pass(200 * second);
    }
}

/// A file that is too large for memory is checked for its time like any other.
#[tokio::test]
async fn a_large_file_of_the_far_future_waits_in_quarantine() {
    let (scene, store) = Scene::new().await;
    let index = scene.open().await;
    index.add_fields(vec![Field::parse("text").unwrap()]).await.unwrap();
    // What is put by us is not checked again: that must not carry over to the file.
    index.put(&json!({"domain": KEY, "n": 1})).await.unwrap();
    let text = "x".repeat(1_200_000);
    let row = format!("{KEY}\x1f2\x1f2099-01-01T00:00:00Z\x1f\x1f{text}\n");
    drop_file(&store, &format!("indexes/domains/{KEY}.usv"), &row).await;
    drop_file(&store, "indexes/domains/inbox/a3/large.usv", &row.replace("Z\x1f", "Z\x1ffalse"))
        .await;
    assert_eq!(n(&index, KEY).await, Some(json!(1)));
    index.compact().await.unwrap();
    assert_eq!(index.quarantined().await.unwrap().len(), 2);
    assert_eq!(n(&index, KEY).await, Some(json!(1)));
}
