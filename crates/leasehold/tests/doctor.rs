//! The doctor passes what is safe, names limits, and refuses what is broken.

#![allow(clippy::unwrap_used)] // in a test, a failure is a panic

use std::sync::Arc;

use leasehold::env::Env;
use leasehold::store::cloud::CloudOptions;
use leasehold::store::doctor::{Doctor, Outcome, Report, Verdict};
use leasehold::store::memory::Memory;
use leasehold::store::{Connect, List, Store, StoreUrl};
use leasehold::{ErrorKind, Key, Write};
use leasehold_testkit::conformance::{on_server, over};
use leasehold_testkit::faulty::{Broken, Faulty};
use leasehold_testkit::servers::Server;

async fn examine(store: &Store) -> Report {
    let report = Doctor::new(store).run(|_| {}).await.expect("the store answers");
    let left = store.list(List::prefix("").unwrap()).collect().await.unwrap();
    let left: Vec<_> = left.entries.iter().map(|entry| entry.key.as_str()).collect();
    let ours = left.iter().filter(|key| key.starts_with("leasehold-doctor")).count();
    assert_eq!(ours, 0, "the doctor left objects behind: {left:?}");
    report
}

fn not_passed(report: &Report) -> Vec<&'static str> {
    report
        .checks
        .iter()
        .filter(|check| check.outcome != Outcome::Pass)
        .map(|check| check.id)
        .collect()
}

fn bucket(server: &Server) -> Store {
    on_server(server, "s3", "fleet")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn memory_and_directory_are_safe() {
    let root = tempfile::tempdir().unwrap();
    let dir = Connect::new(StoreUrl::Directory(root.path().join("store"))).open().unwrap();
    for store in [Store::memory(), dir] {
        let report = examine(&store).await;
        assert_eq!(report.verdict, Verdict::Safe, "{:#?}", report.checks);
        assert_eq!(report.latencies.len(), 5);
        assert!(!report.recorded, "there is no root record yet");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn ministack_is_safe() {
    let server = Server::ministack();
    let report = examine(&bucket(&server)).await;
    assert_eq!(report.verdict, Verdict::Safe, "{:#?}", report.checks);
    assert!(report.clock_offset_s.is_some_and(|offset| offset.abs() < 5.0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn seaweedfs_is_usable_and_its_order_is_named() {
    let server = Server::seaweedfs();
    let report = examine(&bucket(&server)).await;
    assert_eq!(report.verdict, Verdict::UsableWithLimits, "{:#?}", report.checks);
    let limits = not_passed(&report);
    assert!(limits.contains(&"list-order"), "{limits:?}");
    for safety in ["create", "swap", "create-race", "swap-race", "delete", "delete-race"] {
        assert!(!limits.contains(&safety), "{:#?}", report.checks);
    }
}

/// A real server that ignores every condition.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn rclone_is_refused_by_the_doctor_and_by_the_library() {
    let server = Server::rclone();
    let store = bucket(&server);
    let report = examine(&store).await;
    assert_eq!(report.verdict, Verdict::Unsafe, "{:#?}", report.checks);
    let failed = not_passed(&report);
    assert!(failed.contains(&"create") && failed.contains(&"swap"), "{failed:?}");
    let key = Key::new("x").unwrap();
    let error = store.put(&key, "x".into(), Write::any()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    assert!(error.to_string().contains("leasehold doctor"), "{error}");
    let left = store.list(List::prefix("").unwrap()).collect().await.unwrap();
    assert!(left.entries.is_empty(), "trying it out left {:?}", left.entries);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn broken_promises_are_found() {
    for (broken, verdict, id) in [
        (Broken::IgnoresAbsent, Verdict::Unsafe, "create"),
        (Broken::IgnoresMatch, Verdict::Unsafe, "swap"),
        (Broken::RacesCreate, Verdict::Unsafe, "create-race"),
        (Broken::RacesMatch, Verdict::Unsafe, "swap-race"),
        (Broken::StaleList, Verdict::Unsafe, "list-after-write"),
        (Broken::IgnoresDeleteMatch, Verdict::UsableWithLimits, "delete"),
        (Broken::RacesDelete, Verdict::UsableWithLimits, "delete-race"),
        (Broken::UnsortedList, Verdict::UsableWithLimits, "list-order"),
    ] {
        let store = over(Arc::new(Faulty::broken(Arc::new(Memory::new(Env::system())), broken)));
        let report = examine(&store).await;
        assert_eq!(report.verdict, verdict, "{broken:?}: {:#?}", report.checks);
        assert!(not_passed(&report).contains(&id), "{broken:?}: {:?}", not_passed(&report));
    }
}

/// What only a race shows is noted in the root record, and every node minds it.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_verdict_is_noted_for_all_nodes() {
    let memory = Arc::new(Memory::new(Env::system()));
    let key = Key::new("x").unwrap();
    let node = || over(Arc::new(Faulty::broken(memory.clone(), Broken::RacesDelete)));
    let first = node();
    first.init().await.unwrap();
    assert!(first.limits().await.unwrap().is_empty(), "one request at a time shows nothing");
    assert!(examine(&first).await.recorded);

    let second = node();
    assert_eq!(second.limits().await.unwrap().len(), 1);
    let leasehold::Put::Stored(version) = second.put(&key, "x".into(), Write::any()).await.unwrap()
    else {
        panic!("not stored")
    };
    let error = second.delete_version(&key, &version).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);

    // The same objects behind a server whose races are lost: nobody may write any more.
    let third = over(Arc::new(Faulty::broken(memory.clone(), Broken::RacesCreate)));
    assert!(examine(&third).await.recorded);
    let error = node().put(&key, "y".into(), Write::any()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("marked unsafe"), "{error}");

    // One clean examination is not enough: races can be won by luck.
    assert!(examine(&over(memory.clone())).await.recorded);
    assert!(over(memory.clone()).put(&key, "y".into(), Write::any()).await.is_err());
    let mended = over(memory.clone());
    Doctor::new(&mended).forget().run(|_| {}).await.unwrap();
    over(memory).put(&key, "y".into(), Write::any()).await.map(drop).unwrap();
}

/// Examined before its first use, a store whose races are lost is marked all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn what_only_a_race_shows_is_noted_before_first_use() {
    let key = Key::new("x").unwrap();
    let racy =
        |memory: &Arc<Memory>, broken| over(Arc::new(Faulty::broken(memory.clone(), broken)));
    let memory = Arc::new(Memory::new(Env::system()));
    assert!(examine(&racy(&memory, Broken::RacesDelete)).await.recorded);
    let limits = racy(&memory, Broken::RacesDelete).limits().await.unwrap();
    assert_eq!(limits.len(), 1, "{limits:?}");
    let memory = Arc::new(Memory::new(Env::system()));
    assert!(examine(&racy(&memory, Broken::RacesCreate)).await.recorded);
    let put = racy(&memory, Broken::RacesCreate).put(&key, "x".into(), Write::any()).await;
    assert_eq!(put.unwrap_err().kind(), ErrorKind::Unsupported);
}

/// What works behind our back is warned of, where the server tells it.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn versioning_and_expiry_are_warned_of() {
    use leasehold_testkit::http::{Spoil, TinyS3};
    let server = TinyS3::start(|request| match request.target.as_str() {
        "/bucket?versioning=" => Spoil::Body("<V><Status>Enabled</Status></V>"),
        "/bucket?lifecycle=" => Spoil::Body(
            "<L><Rule><Expiration><Days>1</Days></Expiration><Status>Enabled</Status></Rule></L>",
        ),
        _ => Spoil::Nothing,
    });
    let mut connect = Connect::new("s3://bucket/fleet".parse().unwrap());
    connect.cloud = CloudOptions {
        endpoint: Some(server.endpoint()),
        access_key: Some("key".into()),
        secret_key: Some("secret".into()),
        ..CloudOptions::default()
    };
    let store = connect.open().unwrap();
    let warnings = store.backend().warnings().await;
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    assert!(warnings[0].contains("versioning is on") && warnings[1].contains("lifecycle rule"));
    let signed = |request: &leasehold_testkit::http::Request| {
        request.headers.get("authorization").is_some_and(|text| text.contains("Signature="))
    };
    assert!(server.requests().iter().all(signed), "{:?}", server.requests());
    assert!(Store::memory().backend().warnings().await.is_empty());
}
