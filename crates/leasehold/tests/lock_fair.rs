//! A lock on a bucket that several want again and again: nobody is passed over for long, and it costs
//! few requests. How even the shares are is for `leasehold-bench locks` to say.

#![allow(clippy::unwrap_used)] // in a test, a failure is a panic

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use leasehold::ErrorKind;
use leasehold::lock::{Lock, LockSettings};
use leasehold::store::cloud::CloudOptions;
use leasehold::store::{Connect, Kind, Store};
use leasehold_testkit::http::{Request, Spoil, TinyS3};

const BASE: Duration = Duration::from_millis(40);

/// A process' own view of the bucket.
fn on(server: &TinyS3) -> Store {
    let mut connect = Connect::new("s3://bucket".parse().unwrap());
    connect.cloud = CloudOptions {
        endpoint: Some(server.endpoint()),
        access_key: Some("key".into()),
        secret_key: Some("secret".into()),
        ..CloudOptions::default()
    };
    connect.open().unwrap()
}

fn lock(store: &Store, holder: &str) -> Lock {
    let settings = LockSettings { retry_delay: BASE, ..LockSettings::of(Kind::S3) };
    Lock::named(store, "the lock", holder, settings).unwrap()
}

/// The record that a request writes, if it writes that of a lock.
fn record(request: &Request) -> Option<serde_json::Value> {
    let is_lock = request.method == "PUT" && request.target.contains("locks/");
    is_lock.then(|| serde_json::from_slice(&request.body).unwrap())
}

async fn hold() {
    tokio::time::sleep(BASE * 3 / 2).await;
}

/// Whoever has just released a lock takes it again by one request, and the others need two: they would
/// wait for ever. So they tell, and it gives way; and once nobody comes any more, it costs what it did.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_takes_it_again_is_told_that_others_wait_and_gives_way() {
    let told = Arc::new(AtomicBool::new(false));
    let server = TinyS3::start({
        let told = told.clone();
        move |request| match record(request) {
            Some(record) if record.get("waiting").is_some() => {
                told.store(true, SeqCst);
                Spoil::Nothing
            }
            // By chance it would get it now and then.
            Some(record) if record["holderId"] == "b" && !told.load(SeqCst) => {
                Spoil::Instead(412, "PreconditionFailed")
            }
            _ => Spoil::Nothing,
        }
    });
    let (ours, theirs) = (on(&server), on(&server));
    let a = lock(&ours, "a");
    let mut guard = a.acquire().await.unwrap();
    let b = lock(&theirs, "b");
    let waits = tokio::spawn(async move { b.acquire_forever().await.unwrap() });
    for turn in 0.. {
        hold().await;
        if told.load(SeqCst) {
            break;
        }
        assert!(turn < 500, "nobody told that it waits");
        guard.release().await.unwrap();
        guard = a.acquire().await.unwrap();
    }
    // It is refused once, because the record has changed.
    hold().await;
    let before = ours.usage();
    guard.release().await.unwrap();
    let used = ours.usage().since(&before);
    assert_eq!((used.put, used.get, used.requests()), (2, 1, 3), "{used:?}");
    // The other looks often enough; on a machine that is very slow perhaps not the first time.
    let mut turns = 0;
    let error = loop {
        match a.acquire_timeout(Duration::from_secs(3)).await {
            Ok(guard) => {
                turns += 1;
                assert!(turns < 10, "it does not give way");
                guard.release().await.unwrap();
            }
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), ErrorKind::Held);
    waits.await.unwrap().release().await.unwrap();
    // The other is gone.
    let mut requests = Vec::new();
    for _ in 0..6 {
        let before = ours.usage();
        let guard = a.acquire().await.unwrap();
        hold().await;
        guard.release().await.unwrap();
        requests.push(ours.usage().since(&before).requests());
    }
    assert_eq!(requests[3..], [2, 2, 2], "{requests:?}");
    assert_eq!(requests.iter().max(), Some(&3), "{requests:?}");
}

/// The longer a lock is held, the more seldom it is looked at.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn looks_are_seldom_while_it_is_held_for_long() {
    let server = TinyS3::start(|_| Spoil::Nothing);
    let (ours, theirs) = (on(&server), on(&server));
    let guard = lock(&ours, "a").acquire().await.unwrap();
    let error = lock(&theirs, "b").acquire_timeout(BASE * 75).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Held);
    // Without growth there would be 150 of them.
    assert!(theirs.usage().get < 60, "{:?}", theirs.usage());
    let marks = server.requests().iter().filter_map(record).any(|it| it.get("waiting").is_some());
    assert!(!marks, "who holds it for long takes it over nobody's head");
    guard.release().await.unwrap();
}
