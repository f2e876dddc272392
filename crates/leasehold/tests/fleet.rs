//! Plans, seats and nodes of a fleet, and what they cost.

#![allow(clippy::unwrap_used)] // in a test, a failure is a panic

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use leasehold::env::{BootTime, Clock, Entropy, Env};
use leasehold::fleet::{self, Forgot, Seat, Spelling};
use leasehold::protocol::format::node::Node;
use leasehold::protocol::supervise::{self, Standing};
use leasehold::store::memory::Memory;
use leasehold::{ErrorKind, Store, StoreSettings, StoreTime};

const MINUTE: Duration = Duration::from_secs(60);

/// A clock that goes on when it is told to, and whose wall clock is off.
#[derive(Debug)]
struct Told {
    millis: AtomicU64,
    off: AtomicI64,
}

impl Clock for Told {
    fn wall(&self) -> StoreTime {
        let micros = self.millis.load(SeqCst) as i64 * 1000;
        StoreTime::from_micros(1_800_000_000_000_000 + micros + self.off.load(SeqCst))
    }
    fn boot(&self) -> BootTime {
        BootTime::from_boot(Duration::from_millis(self.millis.load(SeqCst)))
    }
    fn sleep(&self, _: Duration) -> futures::future::BoxFuture<'static, ()> {
        Box::pin(tokio::time::sleep(Duration::from_millis(1)))
    }
}

#[derive(Debug)]
struct Counting(AtomicU64);

impl Entropy for Counting {
    fn fill(&self, bytes: &mut [u8]) {
        for byte in bytes {
            let n = self.0.fetch_add(0x9e37_79b9_7f4a_7c15, SeqCst);
            *byte = (n >> 56) as u8;
        }
    }
}

struct World {
    clock: Arc<Told>,
    store: Store,
}

fn world() -> World {
    let clock = Arc::new(Told { millis: AtomicU64::new(1_000_000), off: AtomicI64::new(0) });
    let env = Env::new(clock.clone(), Arc::new(Counting(AtomicU64::new(1))));
    let backend = Arc::new(Memory::new(env.clone()));
    let store = Store::new(backend, env, StoreSettings::default()).unwrap();
    World { clock, store }
}

impl World {
    fn pass(&self, span: Duration) {
        self.clock.millis.fetch_add(span.as_millis() as u64, SeqCst);
    }

    async fn standing(&self) -> Standing {
        fleet::nodes(&self.store).await.unwrap().pop().unwrap().standing
    }
}

fn record(every: Duration) -> Node {
    let json = serde_json::json!({ "version": "0", "started_at": null, "uptime_s": 1 });
    let mut json = json.as_object().unwrap().clone();
    json.insert("every".into(), leasehold::settings::format_duration(every).into());
    serde_json::from_value(json.into()).unwrap()
}

/// The figures of an idle node: a day of the supervisor's cycles, counted by the meter.
async fn a_day(every: Duration) -> (u64, u64) {
    let world = world();
    let store = &world.store;
    fleet::set(store, Spelling::Toml, "").await.unwrap().unwrap();
    let seat = Seat::take(store, "n", every).await.unwrap().unwrap();
    let plan = fleet::look(store, None).await.unwrap().unwrap();
    let known = (plan.spelling, plan.version);
    let before = store.usage();
    let mut left = 24 * 60 * MINUTE;
    loop {
        let pause = supervise::pause(every, store.env().random());
        if pause > left {
            break;
        }
        left -= pause;
        world.pass(pause);
        assert_eq!(fleet::look(store, Some(&known)).await.unwrap(), None);
        seat.report(&record(every)).await.unwrap();
    }
    let used = store.usage().since(&before);
    assert_eq!(used.requests(), used.put + used.head, "nothing but these: {used:?}");
    // A HEAD costs what a GET does, and counts as one.
    (used.put, used.head)
}

/// A node whose queues are all relaxed: with 24 LISTs and 24 GETs of its sync, at most 320 PUT and
/// LIST, and 300 GET a day.
#[tokio::test]
async fn an_idle_day_of_a_relaxed_node() {
    let (put, get) = a_day(5 * MINUTE).await;
    assert!((250..=275).contains(&put) && put == get, "{put} {get}");
    assert!(put + 24 <= 320 && get + 24 <= 300);
}

/// A strict node reads its plan within every minute: at most 1,646 PUT and as many GET a day, less
/// than a cent.
#[tokio::test]
async fn an_idle_day_of_a_strict_node() {
    let (put, get) = a_day(supervise::EVERY).await;
    assert!((1500..=1646).contains(&put) && put == get, "{put} {get}");
    assert!(put as f64 * 0.005 / 1000.0 + get as f64 * 0.0004 / 1000.0 < 0.01);
}

/// Neither written nor read: a mistake must not take the memory of a whole fleet.
#[tokio::test]
async fn a_plan_that_is_too_long_is_refused() {
    let world = world();
    let store = &world.store;
    let long = "# ".repeat(600_000);
    let error = fleet::set(store, Spelling::Toml, &long).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    let key = Spelling::Toml.key().unwrap();
    let _ = store.put(&key, long.into(), leasehold::Write::any()).await.unwrap();
    let before = store.usage();
    let error = fleet::look(store, None).await.unwrap_err();
    assert!(error.to_string().contains("too long for a plan: 1200000 bytes"), "{error}");
    let used = store.usage().since(&before);
    assert_eq!((used.get, used.bytes_received), (0, 0), "{used:?}");
    // What can be read is read again.
    let _ = store.put(&key, "# short".into(), leasehold::Write::any()).await.unwrap();
    assert_eq!(fleet::look(store, None).await.unwrap().unwrap().text, "# short");
}

#[tokio::test]
async fn a_seat_is_one_node_s_and_is_judged_by_the_store_s_clock() {
    let world = world();
    let seat = Seat::take(&world.store, "n", MINUTE).await.unwrap().unwrap();
    seat.report(&record(MINUTE)).await.unwrap();
    // A second one, from elsewhere: here, from a process that is us, and alive.
    let held = Seat::take(&world.store, "n", MINUTE).await.unwrap().unwrap_err();
    assert!(held.holder.ends_with(&format!(":{}", std::process::id())), "{}", held.holder);
    assert_eq!(world.standing().await, Standing::Alive);
    assert_eq!(fleet::forget(&world.store, "n", false).await.unwrap(), Forgot::Alive);
    // Whatever this node's own clock says (FIELD.md row 12).
    world.pass(MINUTE * 2);
    assert_eq!(world.standing().await, Standing::Alive);
    world.pass(MINUTE);
    assert_eq!(world.standing().await, Standing::Stalled);
    world.pass(MINUTE * 7);
    assert_eq!(world.standing().await, Standing::Gone);
    // It was away for so long that the name may be somebody else's.
    assert_eq!(seat.report(&record(MINUTE)).await.unwrap_err().kind(), ErrorKind::Lost);
    let again = Seat::take(&world.store, "n", MINUTE).await.unwrap().unwrap();
    again.report(&record(MINUTE)).await.unwrap();
    assert_eq!(world.standing().await, Standing::Alive);
    again.leave(&record(MINUTE)).await.unwrap();
    assert_eq!(world.standing().await, Standing::Stopped);
    assert_eq!(fleet::forget(&world.store, "n", false).await.unwrap(), Forgot::Done);
    assert_eq!(fleet::forget(&world.store, "n", false).await.unwrap(), Forgot::Missing);
}

#[tokio::test]
async fn a_plan_is_one_text_in_one_place() {
    let World { store, .. } = world();
    assert_eq!(fleet::look(&store, None).await.unwrap_err().kind(), ErrorKind::Invalid);
    let first = fleet::set(&store, Spelling::Toml, "a").await.unwrap().unwrap();
    let plan = fleet::look(&store, None).await.unwrap().unwrap();
    assert_eq!((plan.text.as_str(), &plan.version), ("a", &first));
    let known = (plan.spelling, plan.version);
    assert_eq!(fleet::look(&store, Some(&known)).await.unwrap(), None);
    // In the other spelling, whoever knows the first finds it.
    fleet::set(&store, Spelling::Json, "{}").await.unwrap().unwrap();
    let plan = fleet::look(&store, Some(&known)).await.unwrap().unwrap();
    assert_eq!((plan.spelling, plan.text.as_str()), (Spelling::Json, "{}"));
    assert_eq!(fleet::look(&store, None).await.unwrap().unwrap().text, "{}");
}
