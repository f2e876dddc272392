//! What a bucket can do to a request on the wire, and what becomes of it.

#![allow(clippy::unwrap_used)] // in a test, a failure is a panic

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use leasehold::env::Env;
use leasehold::store::cloud::CloudOptions;
use leasehold::store::{Connect, Delete, Put, Store, Unknown};
use leasehold::{Durability, Error, ErrorKind, Key, Nonce, Proof, StoreSettings, When, Write};
use leasehold_testkit::clock::{Asleep, Chance};
use leasehold_testkit::http::{Request, Spoil, TinyS3};

const OURS: Nonce = Nonce::from_bytes([9; 16]);

fn settings() -> StoreSettings {
    StoreSettings {
        request_timeout: Duration::from_millis(500),
        retry_base: Duration::from_millis(1),
        retry_cap: Duration::from_millis(2),
        attempts: 4,
        ..StoreSettings::default()
    }
}

fn connect(server: &TinyS3, settings: StoreSettings) -> Store {
    let mut connect = Connect::new("s3://bucket/fleet".parse().unwrap());
    connect.settings = settings;
    connect.cloud = CloudOptions {
        endpoint: Some(server.endpoint()),
        access_key: Some("key".into()),
        secret_key: Some("secret".into()),
        ..CloudOptions::default()
    };
    connect.open().unwrap()
}

fn key() -> Key {
    Key::new("the/key").unwrap()
}

/// A server that spoils the first requests to our key in this way, and nothing else.
fn spoiling(spoils: Vec<Spoil>) -> TinyS3 {
    let mut spoils = spoils.into_iter();
    TinyS3::start(move |request| match is_ours(request) {
        true => spoils.next().unwrap_or(Spoil::Nothing),
        false => Spoil::Nothing,
    })
}

fn is_ours(request: &Request) -> bool {
    request.target.starts_with("/bucket/fleet/the/key")
}

fn methods(server: &TinyS3) -> Vec<String> {
    let ours = server.requests().into_iter().filter(is_ours);
    ours.map(|request| request.method).collect()
}

async fn create(store: &Store) -> Result<Put, Error> {
    let body = format!(r#"{{"nonce":"{OURS}"}}"#);
    store.put(&key(), body.into(), Write::when(When::Absent, Proof::Nonce(OURS))).await
}

/// FIELD.md row 3 on the wire: however the answer is lost, the writer knows that it wrote.
#[tokio::test]
async fn a_write_that_was_carried_out_is_ours_whatever_became_of_its_answer() {
    for spoil in [
        Spoil::HangUpAfterwards,
        Spoil::Afterwards(500, "InternalError"),
        Spoil::Afterwards(503, "SlowDown"),
        Spoil::Afterwards(504, ""),
        Spoil::Slowly(Duration::from_millis(900)),
    ] {
        let server = spoiling(vec![spoil.clone()]);
        let put = create(&connect(&server, settings())).await.unwrap();
        assert!(matches!(put, Put::Stored(_)), "{spoil:?}: {put:?}");
    }
}

#[tokio::test]
async fn a_write_that_was_not_carried_out_is_sent_again() {
    for spoil in [Spoil::HangUp, Spoil::Instead(503, "SlowDown"), Spoil::Instead(429, "")] {
        let server = spoiling(vec![spoil.clone(), Spoil::Nothing]);
        let store = connect(&server, settings());
        let put = create(&store).await.unwrap();
        assert!(matches!(put, Put::Stored(_)), "{spoil:?}: {put:?}");
        // Sent, looked for, sent again: never blindly, and never by the HTTP library itself.
        assert_eq!(methods(&server), ["PUT", "GET", "PUT"], "{spoil:?}");
        assert_eq!(store.usage().retries, 1, "{spoil:?}");
    }
}

/// FIELD.md row 4 on the wire.
#[tokio::test]
async fn a_conflict_is_neither_held_nor_for_ever() {
    let conflict = Spoil::Instead(409, "ConditionalRequestConflict");
    let server = spoiling(vec![conflict.clone()]);
    let put = create(&connect(&server, settings())).await.unwrap();
    assert!(matches!(put, Put::Stored(_)), "{put:?}");
    assert_eq!(methods(&server), ["PUT", "PUT"]);
    let server = spoiling(vec![conflict; 9]);
    let put = create(&connect(&server, settings())).await.unwrap();
    assert!(matches!(put, Put::Contended), "{put:?}");
    // Azure's way of saying that it is there already.
    let server = spoiling(vec![Spoil::Instead(409, "BlobAlreadyExists")]);
    let put = create(&connect(&server, settings())).await.unwrap();
    assert!(matches!(put, Put::Refused), "{put:?}");
    assert_eq!(methods(&server), ["PUT"]);
}

#[tokio::test]
async fn a_store_that_never_answers_leaves_the_outcome_unknown() {
    let server = spoiling(vec![Spoil::HangUp; 99]);
    let put = create(&connect(&server, settings())).await.unwrap();
    let Put::Unknown(Unknown::NoAnswer(error)) = put else { panic!("{put:?}") };
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("the/key"), "{error}");
}

#[tokio::test]
async fn half_a_body_is_not_an_object() {
    let server = TinyS3::start({
        let mut gets = 0;
        move |request| {
            if request.method == "GET" && is_ours(request) {
                gets += 1;
            }
            if request.method == "GET" && gets == 1 { Spoil::HalfABody } else { Spoil::Nothing }
        }
    });
    let store = connect(&server, settings());
    let body = bytes::Bytes::from(vec![b'x'; 100_000]);
    store.put(&key(), body.clone(), Write::any()).await.map(drop).unwrap();
    assert_eq!(store.get(&key()).await.unwrap().unwrap().body, body);
    assert_eq!(store.usage().retries, 1);
}

#[tokio::test]
async fn deletes_are_settled_on_the_wire_too() {
    for spoil in [Spoil::HangUpAfterwards, Spoil::HangUp, Spoil::Afterwards(500, "InternalError")] {
        let server = spoiling(vec![Spoil::Nothing, spoil.clone()]);
        let store = connect(&server, settings());
        let Put::Stored(version) = create(&store).await.unwrap() else { panic!("not stored") };
        let delete = store.delete_version(&key(), &version).await.unwrap();
        assert!(matches!(delete, Delete::Deleted), "{spoil:?}: {delete:?}");
        assert_eq!(store.get(&key()).await.unwrap(), None);
    }
}

#[tokio::test]
async fn what_is_final_is_not_tried_again() {
    for (status, code, kind) in [
        (403, "AccessDenied", ErrorKind::Denied),
        (403, "RequestTimeTooSkewed", ErrorKind::Denied),
        (404, "NoSuchBucket", ErrorKind::Invalid),
        (301, "PermanentRedirect", ErrorKind::Invalid),
        (400, "InvalidArgument", ErrorKind::Invalid),
        (400, "ExpiredToken", ErrorKind::Denied),
        (501, "NotImplemented", ErrorKind::Unsupported),
    ] {
        let server = spoiling(vec![Spoil::Instead(status, code); 9]);
        let error = create(&connect(&server, settings())).await.unwrap_err();
        assert_eq!(error.kind(), kind, "{code}: {error}");
        assert!(error.to_string().contains(code), "{error}");
        assert_eq!(methods(&server), ["PUT"], "{code}");
    }
}

/// The store's clock is its own: `Date` and `Last-Modified` of one response.
#[tokio::test]
async fn the_clock_is_the_servers() {
    let server = spoiling(vec![]);
    let store = connect(&server, settings());
    create(&store).await.map(drop).unwrap();
    let meta = store.head(&key()).await.unwrap().unwrap();
    assert_eq!(meta.now.to_string(), "2026-11-15T10:00:07.000000Z");
    assert_eq!(meta.now.since(meta.modified), Duration::from_secs(7));
    let now = store.now().await.unwrap();
    assert!(now.since(meta.now) < Duration::from_secs(60), "{now}");
}

/// However much there is to do, no more connections than allowed, also while credentials and
/// bodies are waited for.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn connections_are_limited() {
    for connections in [1, 4] {
        let server = TinyS3::start(|_| Spoil::Slowly(Duration::from_millis(5)));
        let settings =
            StoreSettings { connections, request_timeout: Duration::from_secs(20), ..settings() };
        let store = connect(&server, settings);
        let puts = (0..60).map(|n| {
            let store = store.clone();
            tokio::spawn(async move {
                let key = Key::new(format!("k/{n}")).unwrap();
                store.put(&key, "x".into(), Write::any()).await.map(drop).unwrap();
                store.get(&key).await.map(drop).unwrap();
            })
        });
        for put in futures::future::join_all(puts).await {
            put.unwrap();
        }
        assert!(server.most_connections() <= connections, "{}", server.most_connections());
    }
}

/// So many requests a minute, ten seconds' worth of them at once; and the limits can be changed while
/// requests are under way. Only lower bounds: a slow machine sends fewer.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn requests_keep_their_pace() {
    let server = TinyS3::start(|_| Spoil::Slowly(Duration::from_millis(5)));
    let settings = StoreSettings {
        requests_per_minute: Some(600),
        request_timeout: Duration::from_secs(20),
        ..settings()
    };
    let store = connect(&server, settings);
    let clock = store.env().clone();
    let send = async |count: u32| {
        let start = clock.clock().boot();
        let heads = (0..count).map(|_| store.head(leasehold_key()));
        futures::future::join_all(heads).await.into_iter().for_each(|head| drop(head.unwrap()));
        clock.clock().boot().since(start)
    };
    let before = server.requests().len();
    assert!(send(120).await >= Duration::from_millis(1800), "20 beyond the burst, 10 a second");
    assert_eq!(server.requests().len() - before, 120);
    // A new limit counts at once, with a burst of its own; and no limit is none.
    store.limit(1, Some(60));
    assert!(send(12).await >= Duration::from_millis(1800), "2 beyond the burst, 1 a second");
    store.limit(8, None);
    assert!(send(100).await < Duration::from_secs(60), "100 of them at the last pace");
    assert!(server.most_requests() > 2);
    // Fewer connections: those that are out count until they are back. Others may stand idle.
    store.limit(2, None);
    send(40).await;
    server.most_requests();
    send(40).await;
    let most = server.most_requests();
    assert!(most <= 2, "{most} at once");
}

/// However many wait because of the pace, a renewal is sent next; and whatever was signed is as old as
/// its sending, not as its waiting: a store refuses what is older than 15 minutes.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_renewal_waits_for_no_more_than_one_other() {
    const BURST: usize = 100;
    let server = TinyS3::start(|_| Spoil::Nothing);
    let settings = StoreSettings {
        requests_per_minute: Some(600),
        request_timeout: Duration::from_secs(20),
        connections: 8,
        ..settings()
    };
    let store = connect(&server, settings);
    let heads = (0..BURST + 40).map(|_| {
        let store = store.clone();
        tokio::spawn(async move { store.head(&key()).await.map(drop).unwrap() })
    });
    let heads: Vec<_> = heads.collect();
    let seen = |many: usize| server.requests().len() >= many;
    while !seen(BURST) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let before = server.requests().len();
    assert!(matches!(put_one(&store).await, Put::Stored(_)));
    let requests = server.requests();
    let renewed = requests.iter().position(|request| request.method == "PUT").unwrap();
    // The one before it, and what a busy machine lets pass until it asks.
    assert!(renewed <= before + 20, "{} others went before it", renewed - before);
    for head in heads {
        head.await.unwrap();
    }
    let dates = server.requests().into_iter().map(|request| request.headers["x-amz-date"].clone());
    let dates: std::collections::BTreeSet<String> = dates.collect();
    assert!(dates.len() >= 3, "4 s of sending, all signed at {dates:?}");
}

fn leasehold_key() -> &'static Key {
    static KEY: std::sync::OnceLock<Key> = std::sync::OnceLock::new();
    KEY.get_or_init(key)
}

/// A prefix is honoured everywhere, and so is the key as it is.
#[tokio::test]
async fn keys_arrive_unchanged_below_the_prefix() {
    let server = spoiling(vec![]);
    let store = connect(&server, settings());
    for (name, target) in [
        ("a b", "/bucket/fleet/a%20b"),
        (" edge ", "/bucket/fleet/%20edge%20"),
        ("50%", "/bucket/fleet/50%25"),
        ("x+y?z#", "/bucket/fleet/x%2By%3Fz%23"),
        ("é/ü", "/bucket/fleet/%C3%A9/%C3%BC"),
    ] {
        let key = Key::new(name).unwrap();
        store.put(&key, "x".into(), Write::any()).await.map(drop).unwrap();
        let last = server.requests().pop().unwrap();
        assert_eq!(last.target, target);
        assert_eq!(store.get(&key).await.unwrap().unwrap().body, "x");
    }
}

/// Google's conditions: one request each, with the generation in its query.
#[tokio::test]
async fn googles_conditions_are_generations() {
    const OBJECT: &str = r#"{"name":"fleet/the/key","bucket":"bucket","generation":"17","size":"1",
        "etag":"CBE=","updated":"2026-11-15T10:00:00Z","md5Hash":"","contentType":"text/plain"}"#;
    let server = TinyS3::start(|request| match request.method.as_str() {
        "POST" if request.target.contains("ifGenerationMatch=4") => Spoil::Instead(412, ""),
        "POST" | "PUT" => Spoil::Body(OBJECT),
        _ => Spoil::Nothing,
    });
    let mut connect = Connect::new("gs://bucket/fleet".parse().unwrap());
    connect.settings = settings();
    connect.cloud =
        CloudOptions { endpoint: Some(server.endpoint()), anonymous: true, ..Default::default() };
    let store = connect.open().unwrap();
    let put = async |when: When| {
        let durability = Durability::Volatile;
        store.backend().put(&key(), "x".into(), &when, durability).await.unwrap()
    };
    let Put::Stored(version) = put(When::Absent).await else { panic!("not stored") };
    assert_eq!(version.as_str(), "17");
    assert!(matches!(put(When::Matches(version)).await, Put::Stored(_)));
    assert!(matches!(put(When::Matches(leasehold::Version::new("4"))).await, Put::Refused));
    let targets: Vec<String> = server.requests().into_iter().map(|seen| seen.target).collect();
    assert_eq!(targets.len(), 3, "one request each: {targets:?}");
    for (target, condition) in targets.iter().zip(["0", "17", "4"]) {
        assert!(target.contains("fleet%2Fthe%2Fkey"), "{target}");
        assert!(target.ends_with(&format!("ifGenerationMatch={condition}")), "{target}");
    }
}

/// What an answer begins with that has this status.
fn head(status: &str) -> String {
    format!("HTTP/1.1 {status}\r\nDate: Sun, 15 Nov 2026 10:00:07 GMT\r\n")
}

/// A server in whose hands a connection is: the first, the second and so on. Its URL.
fn by_hand(serve: impl Fn(TcpStream, usize) + Send + Sync + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let serve = Arc::new(serve);
    std::thread::spawn(move || {
        for (n, stream) in listener.incoming().enumerate() {
            let (stream, serve) = (stream.unwrap(), serve.clone());
            std::thread::spawn(move || serve(stream, n));
        }
    });
    endpoint
}

/// The first line of the next request, if there is one. Its body is not read.
fn request_line(mut stream: &TcpStream) -> Option<String> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte).ok()?;
        head.extend(byte);
    }
    String::from_utf8(head).unwrap().lines().next().map(str::to_owned)
}

fn connect_unsigned(endpoint: String, settings: StoreSettings) -> Store {
    connect_at(endpoint, settings, Env::system())
}

fn connect_at(endpoint: String, settings: StoreSettings, env: Env) -> Store {
    let mut connect = Connect::new("s3://bucket".parse().unwrap());
    (connect.settings, connect.env) = (settings, env);
    connect.cloud =
        CloudOptions { endpoint: Some(endpoint), anonymous: true, ..CloudOptions::default() };
    connect.open().unwrap()
}

/// A server may close a connection that nobody uses. The next request goes over a new one, and there
/// is no doubt about it: it never left.
#[tokio::test]
async fn a_connection_that_was_closed_while_it_was_idle_costs_nothing() {
    let endpoint = by_hand(|mut stream, _| {
        request_line(&stream).unwrap();
        let answer = head("404 Not Found") + "Content-Length: 0\r\n\r\n";
        stream.write_all(answer.as_bytes()).unwrap();
    });
    let store = connect_unsigned(endpoint, settings());
    for _ in 0..10 {
        assert_eq!(store.head(&key()).await.unwrap(), None);
        tokio::time::sleep(Duration::from_millis(30)).await;
    }
    assert_eq!((store.usage().head, store.usage().retries), (10, 0));
}

/// An overloaded server answers before it has read all of a request, and reads no more of it. The next
/// one does not wait behind that: it goes over another connection, for which there is room even
/// where only one is allowed.
#[tokio::test]
async fn a_connection_on_which_a_body_is_stuck_is_not_used_again() {
    for connections in [1, 4] {
        let endpoint = by_hand(|mut stream, _| {
            while let Some(line) = request_line(&stream) {
                if line.starts_with("PUT") {
                    let text = "<Error><Code>SlowDown</Code></Error>";
                    let answer = head("503 Slow Down") + "Content-Length: 36\r\n\r\n" + text;
                    stream.write_all(answer.as_bytes()).unwrap();
                    std::thread::sleep(Duration::from_secs(120));
                }
                let answer = head("404 Not Found") + "Content-Length: 0\r\n\r\n";
                stream.write_all(answer.as_bytes()).unwrap();
            }
        });
        let settings =
            StoreSettings { connections, request_timeout: Duration::from_secs(60), ..settings() };
        let store = connect_unsigned(endpoint, settings);
        let put = || {
            let body = vec![b'x'; 16 << 20].into();
            store.backend().put(leasehold_key(), body, &When::Any, Durability::Volatile)
        };
        for put in futures::future::join_all((0..connections).map(|_| put())).await {
            let Put::Unknown(Unknown::NoAnswer(error)) = put.unwrap() else { panic!("not busy") };
            assert!(error.to_string().contains("SlowDown"), "{error}");
        }
        for _ in 0..3 {
            let get = tokio::time::timeout(Duration::from_secs(20), store.get(&key())).await;
            assert_eq!(get.unwrap().unwrap(), None);
        }
        assert_eq!((store.usage().get, store.usage().retries), (3, 0));
    }
}

/// While a machine sleeps nobody closes its connections, and whoever is between it and the server
/// forgets them without a word.
#[tokio::test]
async fn a_connection_that_was_idle_for_long_is_not_used_again() {
    let requests: Arc<[AtomicUsize; 3]> = Arc::default();
    let seen = requests.clone();
    let endpoint = by_hand(move |mut stream, n| {
        while request_line(&stream).is_some() {
            seen[n].fetch_add(1, SeqCst);
            let answer = head("404 Not Found") + "Content-Length: 0\r\n\r\n";
            stream.write_all(answer.as_bytes()).unwrap();
        }
    });
    let clock = Arc::new(Asleep::default());
    let env = Env::new(clock.clone(), Arc::new(Chance));
    let store = connect_at(endpoint, settings(), env);
    for asleep in [0, 15, 25] {
        clock.sleep_for(Duration::from_secs(asleep));
        assert_eq!(store.head(&key()).await.unwrap(), None);
    }
    let requests: Vec<usize> = requests.iter().map(|count| count.load(SeqCst)).collect();
    assert_eq!(requests, [2, 1, 0], "after 15 s the same connection, after 25 s another one");
}

/// One request, and nothing before or after it.
async fn put_one(store: &Store) -> Put {
    let (any, volatile) = (When::Any, Durability::Volatile);
    store.backend().put(&key(), "x".into(), &any, volatile).await.unwrap()
}

/// Some servers have something to say about a success, or that they have nothing to say.
#[tokio::test]
async fn answers_with_a_body_that_nobody_asked_for_do_not_cost_a_connection() {
    for body in ["Content-Length: 7\r\n\r\nstored!", "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"]
    {
        let opened = Arc::new(AtomicUsize::new(0));
        let count = opened.clone();
        let endpoint = by_hand(move |mut stream, _| {
            count.fetch_add(1, SeqCst);
            while let Some(line) = request_line(&stream) {
                if line.starts_with("PUT") {
                    stream.read_exact(&mut [0]).unwrap();
                }
                let answer = head("200 OK") + "ETag: \"v\"\r\n" + body;
                stream.write_all(answer.as_bytes()).unwrap();
            }
        });
        let store = connect_unsigned(endpoint, settings());
        let version = leasehold::Version::new("v");
        for _ in 0..3 {
            let put = put_one(&store).await;
            assert!(matches!(put, Put::Stored(_)), "{put:?}");
            let delete = store.backend().delete(&key(), Some(&version)).await.unwrap();
            assert!(matches!(delete, Delete::Deleted), "{delete:?}");
        }
        assert_eq!(opened.load(SeqCst), 1, "{body:?}");
    }
}

/// That the rest of such an answer does not come takes nothing from what its head told.
#[tokio::test]
async fn a_success_does_not_wait_for_the_rest_of_its_answer() {
    let endpoint = by_hand(|mut stream, _| {
        while request_line(&stream).is_some() {
            stream.read_exact(&mut [0]).unwrap();
            let answer = head("200 OK") + "ETag: \"v\"\r\nContent-Length: 7\r\n\r\nsto";
            stream.write_all(answer.as_bytes()).unwrap();
        }
    });
    let settings =
        StoreSettings { connections: 1, request_timeout: Duration::from_secs(60), ..settings() };
    let store = connect_unsigned(endpoint, settings);
    for _ in 0..3 {
        let put = tokio::time::timeout(Duration::from_secs(20), put_one(&store)).await.unwrap();
        assert!(matches!(put, Put::Stored(_)), "{put:?}");
    }
}
