//! Locks, on a directory, in memory and on a real S3 server.

#![allow(clippy::unwrap_used)] // in a test, a failure is a panic

use std::sync::Arc;
use std::sync::OnceLock;
use std::time::Duration;

use leasehold::env::Env;
use leasehold::lease::Asked;
use leasehold::lock::{Election, Lock, LockSettings, Semaphore, blocking};
use leasehold::store::memory::Memory;
use leasehold::store::{Connect, Kind, Store, StoreUrl};
use leasehold::{ErrorKind, Key, Write};
use leasehold_testkit::conformance::{on_server, over};
use leasehold_testkit::faulty::{Fault, Faulty};
use leasehold_testkit::servers::Server;

fn directory() -> (Store, tempfile::TempDir) {
    let root = tempfile::tempdir().unwrap();
    let url = StoreUrl::Directory(root.path().join("store"));
    (Connect::new(url).open().unwrap(), root)
}

/// Another process' view of the same directory.
fn again(root: &tempfile::TempDir) -> Store {
    Connect::new(StoreUrl::Directory(root.path().join("store"))).open().unwrap()
}

fn bucket(prefix: &str) -> Store {
    static SERVER: OnceLock<Server> = OnceLock::new();
    on_server(SERVER.get_or_init(Server::seaweedfs), "s3", prefix)
}

fn quick() -> LockSettings {
    LockSettings {
        timeout: Duration::from_millis(200),
        heartbeat: Duration::from_millis(100),
        ttl: Duration::from_secs(1),
        ..LockSettings::of(Kind::Directory)
    }
}

fn lock(store: &Store, holder: &str) -> Lock {
    Lock::named(store, "the lock", holder, LockSettings::of(store.kind())).unwrap()
}

#[tokio::test]
async fn one_holds_and_the_other_is_told_who() {
    let (dir, _root) = directory();
    for store in [Store::memory(), dir, bucket("told")] {
        let (a, b) = (lock(&store, "a"), lock(&store, "b"));
        let guard = a.acquire().await.unwrap();
        let held = b.try_acquire().await.unwrap().unwrap_err();
        assert_eq!((held.holder.as_str(), held.token), ("a", Some(guard.token())));
        let error = b.acquire_timeout(Duration::from_millis(50)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Held);
        assert!(error.to_string().contains("still held by a"), "{error}");
        guard.check().unwrap();
        let first = guard.token();
        guard.release().await.unwrap();
        let guard = b.acquire().await.unwrap();
        assert!(guard.token() > first);
        guard.release().await.unwrap();
    }
}

/// Exact, on a bucket: a free lock is one PUT, a released one a GET and a PUT, or one PUT where
/// this process saw the release; a release is one PUT.
#[tokio::test]
async fn requests_are_counted() {
    for store in [over(Arc::new(Faulty::writes(memory(), []))), bucket("counted")] {
        store.init().await.unwrap();
        let (a, b) = (lock(&store, "a"), lock(&store, "b"));
        let before = store.usage();
        let guard = a.acquire().await.unwrap();
        let used = store.usage().since(&before);
        assert_eq!((used.put, used.requests()), (1, 1), "a free lock: {used:?}");

        let before = store.usage();
        guard.release().await.unwrap();
        let used = store.usage().since(&before);
        assert_eq!((used.put, used.requests()), (1, 1), "a release: {used:?}");

        let before = store.usage();
        let guard = a.acquire().await.unwrap();
        let used = store.usage().since(&before);
        assert_eq!((used.put, used.requests()), (1, 1), "where we saw the release: {used:?}");
        guard.release().await.unwrap();

        let beating = LockSettings {
            heartbeat: Duration::from_millis(400),
            ttl: Duration::from_secs(60),
            ..LockSettings::of(store.kind())
        };
        let kept = Lock::named(&store, "kept", "a", beating).unwrap().acquire().await.unwrap();
        let (before, first) = (store.usage(), kept.lease().heartbeat_at);
        while kept.lease().heartbeat_at == first {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let used = store.usage().since(&before);
        assert_eq!((used.put, used.requests()), (1, 1), "a heartbeat: {used:?}");
        kept.release().await.unwrap();

        let guard = a.acquire().await.unwrap();
        assert!(b.try_acquire().await.unwrap().is_err());
        guard.release().await.unwrap();
        let before = store.usage();
        let guard = b.acquire().await.unwrap();
        let used = store.usage().since(&before);
        assert_eq!((used.put, used.get, used.requests()), (1, 1, 2), "a released one: {used:?}");
        guard.release().await.unwrap();
    }
}

fn memory() -> Arc<Memory> {
    Arc::new(Memory::new(Env::system()))
}

#[tokio::test]
async fn with_releases_whatever_happens() {
    let (store, _root) = directory();
    let a = lock(&store, "a");
    assert!(a.with(async |guard| guard.token() > 0).await.unwrap());
    let failed: Result<(), &str> = a.with(async |_| Err("inside")).await.unwrap();
    assert_eq!(failed, Err("inside"));
    let task = {
        let a = a.clone();
        tokio::spawn(async move {
            let guard = a.acquire().await.unwrap();
            assert!(guard.token() == 0, "this panics");
        })
    };
    assert!(task.await.unwrap_err().is_panic());
    let guard = lock(&store, "b").acquire_timeout(Duration::from_secs(1)).await.unwrap();
    // Dropping releases too.
    drop(guard);
    let guard = a.acquire_timeout(Duration::from_secs(1)).await.unwrap();
    guard.release().await.unwrap();
    assert!(!store_has(&store, "locks/the lock.lock").await);
}

async fn store_has(store: &Store, key: &str) -> bool {
    store.head(&Key::new(key).unwrap()).await.unwrap().is_some()
}

#[tokio::test]
async fn heartbeats_keep_it_and_stop_with_it() {
    let (dir, _root) = directory();
    for store in [Store::memory(), dir] {
        let a = Lock::named(&store, "x", "a", quick()).unwrap();
        let b = Lock::named(&store, "x", "b", quick()).unwrap();
        let guard = a.acquire().await.unwrap();
        let first = guard.lease().heartbeat_at;
        tokio::time::sleep(Duration::from_millis(1500)).await;
        guard.check().unwrap();
        assert!(guard.lease().heartbeat_at > first, "renewed twice over its ttl");
        assert!(b.try_acquire().await.unwrap().is_err());
        guard.release().await.unwrap();
        let before = store.usage();
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert_eq!(store.usage(), before, "renewed after its release");
    }
}

/// The token rises across release, restart and clock steps, also where the record is deleted.
#[tokio::test]
async fn tokens_rise_across_everything() {
    let (store, root) = directory();
    let mut last = 0;
    for round in 0..20 {
        let store = if round % 5 == 4 { again(&root) } else { store.clone() };
        let guard = lock(&store, "a").acquire().await.unwrap();
        assert!(guard.token() > last, "round {round}: {} after {last}", guard.token());
        last = guard.token();
        guard.release().await.unwrap();
    }
    // Another boot: what was given out is below what comes, whatever the clock says.
    let fence = root.path().join("store/.lh/fence");
    let text = std::fs::read_to_string(&fence).unwrap();
    let mut record: serde_json::Value = serde_json::from_str(&text).unwrap();
    let mark = record["mark"].as_u64().unwrap();
    assert!(mark >= last, "a power loss now would repeat tokens");
    record["boot_id"] = "an earlier boot".into();
    record["mark"] = (mark + 10_000_000_000_000).into();
    std::fs::write(&fence, record.to_string()).unwrap();
    let guard = lock(&again(&root), "a").acquire().await.unwrap();
    assert!(guard.token() > mark + 10_000_000_000_000);
    guard.release().await.unwrap();
}

/// A stale lock is taken over: by its ttl where nothing is known of its holder, and never early.
#[tokio::test]
async fn stale_locks_are_taken_over_by_ttl() {
    let (store, _root) = directory();
    store.init().await.unwrap();
    let key = Key::new("state.yaml.lock").unwrap();
    // A lock of another client: only the seed's three fields, and long out of date.
    let foreign = r#"{"holderId":"worker-001","acquiredAt":"2024-02-15T10:30:00.000Z",
                      "lastHeartbeat":"2024-02-15T10:30:05.000Z"}"#;
    for body in [foreign, "", "{"] {
        store.put(&key, body.into(), Write::any()).await.map(drop).unwrap();
        let lock = Lock::beside(&store, &Key::new("state.yaml").unwrap(), "b", quick()).unwrap();
        assert!(lock.try_acquire().await.unwrap().is_err(), "{body}: respected at first");
        let guard = lock.acquire_timeout(Duration::from_secs(10)).await.unwrap();
        guard.release().await.unwrap();
    }
}

/// FIELD.md rows 1 and 2: many who want one stale lease, one winner.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn of_many_thieves_one_wins() {
    let (dir, root) = directory();
    for (store, rounds) in [(Store::memory(), 1000), (dir, 1000)] {
        for round in 0..rounds {
            let name = format!("stale-{round}");
            let key = leasehold::lock::key_of(&name).unwrap();
            let stale = r#"{"holderId":"dead","state":"released","token":7}"#;
            store.put(&key, stale.into(), Write::any()).await.map(drop).unwrap();
            let thieves = (0..16).map(|n| {
                let store = match store.kind() {
                    Kind::Directory if n % 4 == 0 => again(&root),
                    _ => store.clone(),
                };
                let settings = LockSettings::of(Kind::Directory);
                // Half of them have the same name: that is no reason to share a lock.
                let holder = format!("thief {}", n / 8 * n);
                let lock = Lock::named(&store, &name, holder, settings).unwrap();
                tokio::spawn(async move { lock.try_acquire().await.unwrap().ok() })
            });
            let guards: Vec<_> = futures::future::join_all(thieves).await;
            let guards: Vec<_> = guards.into_iter().filter_map(|guard| guard.unwrap()).collect();
            assert_eq!(guards.len(), 1, "round {round}");
            assert!(guards[0].token() > 7);
        }
    }
}

/// FIELD.md row 3: the answer was lost, and the holder knows that it holds.
#[tokio::test]
async fn a_lost_answer_is_not_a_lost_lock() {
    for fault in [Fault::LostAnswer, Fault::Delayed, Fault::LostRequest, Fault::Contended] {
        let memory = memory();
        over(memory.clone()).init().await.unwrap();
        let store = over(Arc::new(Faulty::writes(memory.clone(), [fault])));
        store.limits().await.unwrap();
        let guard = lock(&store, "a").acquire().await.unwrap();
        guard.check().unwrap();
        let there = lock(&over(memory), "b").try_acquire().await.unwrap().unwrap_err();
        assert_eq!((there.holder.as_str(), there.token), ("a", Some(guard.token())), "{fault:?}");
        guard.release().await.unwrap();
    }
}

/// A store that is down is not somebody who holds the lock.
#[tokio::test]
async fn a_store_that_is_down_holds_nothing() {
    let settings = leasehold::StoreSettings { attempts: 1, ..Default::default() };
    let memory = memory();
    over(memory.clone()).init().await.unwrap();
    let faulty = Faulty::writes(memory, [Fault::LostRequest]).reads([true, false]);
    let store = Store::new(Arc::new(faulty), Env::system(), settings).unwrap();
    store.limits().await.unwrap();
    let error = lock(&store, "a").acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
}

/// A lease that landed after its caller had stopped waiting, or whose answer never came, is given
/// back: nobody has to wait for its ttl of five minutes.
#[tokio::test]
async fn what_nobody_waits_for_is_given_back() {
    // The caller goes while the answer is on its way.
    let memory = memory();
    over(memory.clone()).init().await.unwrap();
    let store = over(Arc::new(Faulty::writes(memory.clone(), [Fault::SlowAnswer])));
    store.limits().await.unwrap();
    let a = lock(&store, "a");
    let gone = tokio::time::timeout(Duration::from_millis(100), a.acquire()).await;
    assert!(gone.is_err(), "it was answered too soon for this test");
    let b = lock(&over(memory.clone()), "b");
    let guard = b.acquire_timeout(Duration::from_secs(20)).await.unwrap();
    guard.release().await.unwrap();
    // No answer at all, and no second attempt.
    let settings = leasehold::StoreSettings { attempts: 1, ..Default::default() };
    let faulty = Faulty::writes(memory, [Fault::LostAnswer]).reads([true, false]);
    let store = Store::new(Arc::new(faulty), Env::system(), settings).unwrap();
    store.limits().await.unwrap();
    let a = Lock::named(&store, "other", "a", LockSettings::of(Kind::S3)).unwrap();
    assert_eq!(a.acquire().await.unwrap_err().kind(), ErrorKind::Unavailable);
    let b = Lock::named(&store, "other", "b", LockSettings::of(Kind::S3)).unwrap();
    let guard = b.acquire_timeout(Duration::from_secs(20)).await.unwrap();
    guard.release().await.unwrap();
}

/// A record with a token that no other can be above does not stop tokens from rising.
#[tokio::test]
async fn absurd_tokens_do_no_harm() {
    let (store, _root) = directory();
    store.init().await.unwrap();
    let key = leasehold::lock::key_of("the lock").unwrap();
    let absurd = r#"{"holderId":"x","state":"released","token":18446744073709551615}"#;
    let mut last = 0;
    for round in 0..4 {
        if round % 2 == 0 {
            store.put(&key, absurd.into(), Write::any()).await.map(drop).unwrap();
        }
        let guard = lock(&store, "a").acquire().await.unwrap();
        assert!(guard.token() > last && guard.token() < 1 << 53, "{} after {last}", guard.token());
        last = guard.token();
        guard.release().await.unwrap();
    }
}

/// A slot of a semaphore and a lock never share a record, whatever they are called.
#[tokio::test]
async fn slots_and_locks_have_records_of_their_own() {
    let (store, _root) = directory();
    let slots = Semaphore::named(&store, "x", 2, "a", quick()).unwrap();
    let first = slots.acquire().await.unwrap();
    let second = slots.acquire().await.unwrap();
    for name in ["x", "x.0", "x.1", "x/0"] {
        let lock = Lock::named(&store, name, "b", quick()).unwrap();
        lock.try_acquire().await.unwrap().unwrap().release().await.unwrap();
    }
    assert!(slots.try_acquire().await.unwrap().is_err());
    first.release().await.unwrap();
    second.release().await.unwrap();
}

/// FIELD.md row 5: who slept past its ttl has lost, learns it, and takes nothing back.
#[tokio::test]
async fn who_slept_too_long_has_lost() {
    let (dir, _root) = directory();
    for store in [Store::memory(), dir] {
        let a = Lock::named(&store, "x", "a", quick()).unwrap();
        let guard = a.acquire().await.unwrap();
        // Somebody takes it by force: to the holder that looks like having slept.
        let b = Lock::named(&store, "x", "b", quick()).unwrap();
        let thief = b.force().await.unwrap();
        assert!(thief.token() > guard.token());
        tokio::time::timeout(Duration::from_secs(10), guard.lost().cancelled()).await.unwrap();
        assert_eq!(guard.check().unwrap_err().kind(), ErrorKind::Lost);
        assert_eq!(guard.release().await.unwrap_err().kind(), ErrorKind::Lost);
        thief.check().unwrap();
        let info = b.info().await.unwrap().unwrap();
        assert_eq!(info.lease.unwrap().holder, "b");
        thief.release().await.unwrap();
    }
}

/// FIELD.md row 25: asked, seen, still held; asking twice changes nothing; released when it likes.
#[tokio::test]
async fn a_holder_is_asked_and_decides() {
    let (dir, _root) = directory();
    for store in [Store::memory(), dir] {
        let a = Lock::named(&store, "x", "a", quick()).unwrap();
        let b = Lock::named(&store, "x", "b", quick()).unwrap();
        assert_eq!(b.ask().await.unwrap(), Asked::NobodyHolds);
        let guard = a.acquire().await.unwrap();
        assert_eq!(b.ask().await.unwrap(), Asked::Now);
        assert!(matches!(b.ask().await.unwrap(), Asked::Before(ask) if ask.by == "b"));
        let asked = tokio::time::timeout(Duration::from_secs(10), guard.asked()).await.unwrap();
        assert_eq!(asked.by, "b");
        guard.check().unwrap();
        tokio::time::sleep(Duration::from_millis(1200)).await;
        guard.check().unwrap();
        assert!(b.try_acquire().await.unwrap().is_err(), "it is kept");
        guard.release().await.unwrap();
        b.acquire().await.unwrap().release().await.unwrap();
    }
}

/// A host whose wall clock is a day off, and whose boot clock started at another time.
#[derive(Debug)]
struct OffClock(i64);

impl leasehold::env::Clock for OffClock {
    fn wall(&self) -> leasehold::StoreTime {
        let right = Env::system().clock().wall();
        leasehold::StoreTime::from_micros(right.as_micros() + self.0 * 1_000_000)
    }

    fn boot(&self) -> leasehold::env::BootTime {
        Env::system().clock().boot()
    }

    fn sleep(&self, span: Duration) -> futures::future::BoxFuture<'static, ()> {
        Env::system().clock().sleep(span)
    }
}

#[derive(Debug)]
struct Chance;

impl leasehold::env::Entropy for Chance {
    fn fill(&self, bytes: &mut [u8]) {
        bytes.copy_from_slice(&Env::system().nonce().to_string().as_bytes()[..bytes.len()]);
    }
}

fn off_by(seconds: i64) -> Env {
    Env::new(Arc::new(OffClock(seconds)), Arc::new(Chance))
}

/// FIELD.md row 12: clocks a day off in either direction steal nothing and wedge nothing.
#[tokio::test]
async fn wrong_clocks_steal_nothing_and_wedge_nothing() {
    const DAY: i64 = 86_400;
    let memory = memory();
    let root = tempfile::tempdir().unwrap();
    for (holder, other) in [(0, DAY), (0, -DAY), (DAY, 0), (-DAY, 0), (DAY, -DAY), (-DAY, DAY)] {
        let in_memory = |off: i64| {
            let backend = Arc::new(memory.client(off_by(off)));
            Store::new(backend, off_by(off), leasehold::StoreSettings::default()).unwrap()
        };
        let in_directory = |off: i64| {
            let mut connect = Connect::new(StoreUrl::Directory(root.path().join("store")));
            connect.env = off_by(off);
            connect.open().unwrap()
        };
        for (a, b) in
            [(in_memory(holder), in_memory(other)), (in_directory(holder), in_directory(other))]
        {
            let a = Lock::named(&a, "x", "a", quick()).unwrap();
            let b = Lock::named(&b, "x", "b", quick()).unwrap();
            let guard = a.acquire().await.unwrap();
            let first = guard.token();
            assert!(b.try_acquire().await.unwrap().is_err(), "{holder} {other}: stolen");
            tokio::time::sleep(Duration::from_millis(120)).await;
            assert!(b.try_acquire().await.unwrap().is_err(), "{holder} {other}: stolen");
            guard.check().unwrap();
            guard.release().await.unwrap();
            let guard = b.acquire().await.unwrap();
            assert!(guard.token() > first, "{holder} {other}: {} after {first}", guard.token());
            guard.release().await.unwrap();
        }
    }
}

/// A laptop that can be put to sleep: the boot clock goes on, timers do not.
#[derive(Debug, Default)]
struct Laptop(std::sync::atomic::AtomicU64);

impl leasehold::env::Clock for Laptop {
    fn wall(&self) -> leasehold::StoreTime {
        Env::system().clock().wall()
    }

    fn boot(&self) -> leasehold::env::BootTime {
        let slept = self.0.load(std::sync::atomic::Ordering::SeqCst);
        Env::system().clock().boot().plus(Duration::from_secs(slept))
    }

    fn sleep(&self, span: Duration) -> futures::future::BoxFuture<'static, ()> {
        Env::system().clock().sleep(span)
    }
}

/// FIELD.md row 31: who slept for an hour trusts nothing from before, without asking anybody.
#[tokio::test]
async fn a_suspended_machine_trusts_nothing() {
    let laptop = Arc::new(Laptop::default());
    let env = Env::new(laptop.clone(), Arc::new(Chance));
    let backend = Arc::new(memory().client(env.clone()));
    let store = Store::new(backend, env, leasehold::StoreSettings::default()).unwrap();
    let guard = lock(&store, "a").acquire().await.unwrap();
    guard.check().unwrap();
    laptop.0.store(3600, std::sync::atomic::Ordering::SeqCst);
    let before = store.usage();
    assert_eq!(guard.check().unwrap_err().kind(), ErrorKind::Lost);
    assert_eq!(guard.trusted_for(), Duration::ZERO);
    assert_eq!(store.usage(), before);
}

/// A holder on another host, or in another boot of it, is judged by its ttl alone: whatever process
/// has its number here.
#[tokio::test]
async fn a_holder_elsewhere_is_taken_over_by_its_ttl_and_never_early() {
    let (dir, _root) = directory();
    for store in [Store::memory(), dir] {
        store.init().await.unwrap();
        let key = leasehold::lock::key_of("x").unwrap();
        let record = r#"{"holderId":"far","ttlMs":1500,"token":5,"state":"held","host":"far",
            "bootId":"another","bootTimeMs":1,"pidNamespace":"pid:[1]","pid":4194300,"startTime":1}"#;
        store.put(&key, record.into(), Write::any()).await.map(drop).unwrap();
        let start = Env::system().clock().boot();
        let near = Lock::named(&store, "x", "near", quick()).unwrap();
        let guard = near.acquire_timeout(Duration::from_secs(20)).await.unwrap();
        let waited = Env::system().clock().boot().since(start);
        assert!(waited >= Duration::from_millis(1400), "taken after {waited:?}");
        assert!(guard.token() > 5);
        guard.release().await.unwrap();
    }
}

/// Where nothing can be deleted conditionally, locks work all the same.
#[tokio::test]
async fn locks_do_not_need_conditional_delete() {
    use leasehold_testkit::faulty::Broken;
    let store = over(Arc::new(Faulty::broken(memory(), Broken::IgnoresDeleteMatch)));
    assert_eq!(store.limits().await.unwrap().len(), 1);
    for _ in 0..3 {
        let guard = lock(&store, "a").acquire().await.unwrap();
        assert!(lock(&store, "b").try_acquire().await.unwrap().is_err());
        guard.release().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn no_more_holders_than_slots() {
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    let (store, _root) = directory();
    let inside = Arc::new(AtomicUsize::new(0));
    let most = Arc::new(AtomicUsize::new(0));
    let workers = (0..12).map(|n| {
        let (store, inside, most) = (store.clone(), inside.clone(), most.clone());
        tokio::spawn(async move {
            // On a busy machine a task may have to wait for seconds; that is not the point here.
            let settings = LockSettings {
                timeout: Duration::from_secs(60),
                ttl: Duration::from_secs(60),
                attempts: 30,
                ..LockSettings::of(Kind::Directory)
            };
            let slots = Semaphore::named(&store, "pool", 3, format!("w{n}"), settings).unwrap();
            for _ in 0..5 {
                let guard = slots.acquire().await.unwrap();
                most.fetch_max(inside.fetch_add(1, SeqCst) + 1, SeqCst);
                tokio::time::sleep(Duration::from_millis(2)).await;
                inside.fetch_sub(1, SeqCst);
                guard.release().await.unwrap();
            }
        })
    });
    for worker in futures::future::join_all(workers).await {
        worker.unwrap();
    }
    assert_eq!(most.load(SeqCst), 3);
    assert!(Semaphore::named(&store, "pool", 0, "w", quick()).is_err());
}

#[tokio::test]
async fn a_leader_is_known_and_replaced() {
    let (store, _root) = directory();
    let election = |name: &str| Election::named(&store, "boss", name, quick()).unwrap();
    let (a, b) = (election("a"), election("b"));
    assert_eq!(a.leader().await.unwrap(), None);
    let leading = a.campaign().await.unwrap();
    assert_eq!(b.leader().await.unwrap().as_deref(), Some("a"));
    let next = tokio::spawn({
        let b = b.clone();
        async move { b.campaign().await.unwrap() }
    });
    let changed = tokio::spawn({
        let b = b.clone();
        async move { b.changed(Some("a"), Duration::from_millis(1)).await.unwrap() }
    });
    tokio::time::sleep(Duration::from_millis(50)).await;
    leading.release().await.unwrap();
    let leading = next.await.unwrap();
    assert_ne!(changed.await.unwrap().as_deref(), Some("a"));
    assert_eq!(a.leader().await.unwrap().as_deref(), Some("b"));
    leading.release().await.unwrap();
}

#[test]
fn locks_without_async() {
    let (store, _root) = directory();
    let of = |holder: &str| {
        blocking::Lock::new(Lock::named(&store, "x", holder, quick()).unwrap()).unwrap()
    };
    let (a, b) = (of("a"), of("b"));
    let guard = a.acquire().unwrap();
    assert!(b.try_acquire().unwrap().is_err());
    // Renewed while this thread does something else.
    std::thread::sleep(Duration::from_millis(1300));
    guard.check().unwrap();
    drop(guard);
    assert!(b.with(|guard| guard.check().is_ok()).unwrap());
    a.acquire().unwrap().release().unwrap();
    let slots = Semaphore::named(&store, "pool", 1, "a", quick()).unwrap();
    let slots = blocking::Semaphore::new(slots).unwrap();
    let slot = slots.acquire().unwrap();
    assert!(slots.try_acquire().unwrap().is_err());
    slot.release().unwrap();
    let election = Election::named(&store, "boss", "a", quick()).unwrap();
    let election = blocking::Election::new(election).unwrap();
    let leading = election.campaign().unwrap();
    assert_eq!(election.leader().unwrap().as_deref(), Some("a"));
    leading.release().unwrap();
}

/// Renewals do not end with the runtime in which a lock was first used.
#[test]
fn a_lock_outlives_its_first_runtime() {
    let (store, _root) = directory();
    let lock = Lock::named(&store, "x", "a", quick()).unwrap();
    for _ in 0..2 {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let guard = lock.acquire().await.unwrap();
            tokio::time::sleep(Duration::from_millis(1300)).await;
            guard.check().unwrap();
            guard.release().await.unwrap();
        });
    }
}

#[test]
fn settings_that_cannot_work_are_refused_with_a_reason() {
    let store = Store::memory();
    let try_with = |settings: LockSettings| Lock::named(&store, "x", "a", settings).map(drop);
    let fine = LockSettings::of(Kind::Directory);
    assert!(try_with(fine.clone()).is_ok());
    let error = try_with(LockSettings { heartbeat: fine.ttl, ..fine.clone() }).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("heartbeat 3s and ttl 3s do not go together"), "{error}");
    assert!(try_with(LockSettings { attempts: 0, ..fine.clone() }).is_err());
    assert!(try_with(LockSettings { heartbeat: Duration::ZERO, ..fine }).is_err());
}

#[allow(dead_code)]
fn is_send<T: Send>(_: T) {}

/// Everything can be used from spawned tasks.
#[allow(dead_code)]
fn futures_are_send(lock: &'static Lock) {
    is_send(lock.acquire());
    is_send(lock.try_acquire());
    is_send(lock.ask());
    is_send(async { matches!(lock.info().await, Ok(Some(_))) });
}
