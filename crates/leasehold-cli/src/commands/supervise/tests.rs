//! A node's days, with a clock that runs as fast as nothing happens.

use leasehold::env::Env;
use leasehold::queue::{Mode, NewTask, QueueSettings, Worker, WorkerSettings};
use leasehold::store::memory::Memory;
use leasehold::store::meter::Usage;
use leasehold_testkit::clock::Fast;

use super::*;

const DAY: Duration = Duration::from_secs(86_400);

fn open(memory: Memory, env: &Env) -> Store {
    Store::new(Arc::new(memory), env.clone(), StoreSettings::default()).unwrap()
}

/// A day of a node, from its start on: the supervisor's own loop, which starts the sync's, and a worker
/// of its queue beside them, here instead of in a process of its own. What they ask of the bucket.
async fn a_day(seed: u64, mode: Mode, pending: usize) -> Usage {
    let clock = Fast::default();
    let env = clock.seeded(seed);
    let bucket = Memory::new(env.clone());
    let there = open(bucket.client(env.clone()), &env);
    let settings = QueueSettings {
        ttl: Duration::from_secs(900),
        heartbeat: Duration::from_secs(300),
        mode,
        ..QueueSettings::default()
    };
    let queue = Queue::create(&there, "q", settings).await.unwrap();
    // Nobody is to do them today.
    queue.pause().await.unwrap();
    queue.push_many((0..pending).map(|_| NewTask::text("x"))).await.unwrap();
    // No process is started for it: it would not know this clock.
    let plan =
        "[[node]]\nname = \"n\"\n[[node.worker]]\nqueue = \"q\"\ncount = 0\ncommand = \"true\"\n";
    fleet::set(&there, Spelling::Toml, plan).await.unwrap().unwrap();
    let client = open(bucket.client(env.clone()), &env);
    let replica = Replica::open(&open(Memory::new(env.clone()), &env), &client, "n").await.unwrap();
    let folder = tempfile::tempdir().unwrap();
    let state = State::open(folder.path().to_owned(), "n", "memory:").unwrap();
    let (mut supervisor, heard) =
        Supervisor::new(&client, "n".to_owned(), state, Some(replica.clone()));
    supervisor.quiet = true;
    let mut signals = Signals::catch().unwrap();
    let mut before = Usage::default();
    let day = async {
        assert!(supervisor.take_place(&mut signals).await.unwrap().is_none());
        let here = replica.choose("q").await.unwrap().unwrap();
        if pending > 0 {
            // Fetching them once is not idling.
            before = client.usage();
        }
        let poll = Duration::from_secs(300);
        let settings = WorkerSettings { poll, ..WorkerSettings::named("n") };
        let worker = Worker::new(vec![here], settings).until_switched();
        tokio::select! {
            ended = supervisor.work(&mut signals, heard) => panic!("it ended: {ended:?}"),
            task = worker.next() => panic!("there is nothing to do: {task:?}"),
            () = env.clock().sleep(DAY) => {}
        }
    };
    clock.pass(day).await;
    // It did what it is there for.
    let seen = leasehold::fleet::nodes(&there).await.unwrap();
    let uptime = seen[0].record.as_ref().unwrap().uptime_s;
    assert!(uptime > 86_400 - 400, "it reports: {uptime} s");
    if mode == Mode::Relaxed {
        let status = replica.status("q").await.unwrap();
        assert!(status.down_age_ms.unwrap() <= 3_960_000, "{status:?}");
    }
    let used = client.usage().since(&before);
    println!("{mode:?}, seed {seed}, {pending} pending: {used:?}");
    used
}

/// A supervisor of node `n` that has not begun, its store, and the folder of its state.
fn fresh() -> (Supervisor, Store, tempfile::TempDir) {
    let env = Fast::default().env();
    let store = open(Memory::new(env.clone()), &env);
    let folder = tempfile::tempdir().unwrap();
    let state = State::open(folder.path().to_owned(), "n", "memory:").unwrap();
    let (supervisor, _) = Supervisor::new(&store, "n".to_owned(), state, None);
    (supervisor, store, folder)
}

/// The name was taken, and the answer got lost: whoever finds its own record there is not somebody else.
#[tokio::test]
async fn nobody_gives_way_to_itself() {
    let (mut supervisor, store, _folder) = fresh();
    let first = Seat::take(&store, "n", supervise::EVERY).await.unwrap().unwrap();
    let held = Seat::take(&store, "n", supervise::EVERY).await.unwrap().unwrap_err();
    supervisor.seated(Ok(Err(held.clone())));
    assert!(supervisor.ending.is_none() && !supervisor.lost);
    drop(first);
    // By another process it is taken.
    let text = store.get(&leasehold::Key::new("nodes/n.json").unwrap()).await.unwrap().unwrap();
    assert!(String::from_utf8_lossy(&text.body).contains(&std::process::id().to_string()));
}

/// What is under way is not waited for by looking again and again.
#[tokio::test]
async fn nothing_is_waited_for_in_haste() {
    let (mut supervisor, _, _folder) = fresh();
    let now = supervisor.now();
    let later = now.plus(Duration::from_secs(20));
    (supervisor.next_look, supervisor.next_report, supervisor.next_reap) = (now, now, later);
    assert!(supervisor.next_wake() <= Duration::from_millis(1));
    (supervisor.looking, supervisor.seating) = (true, true);
    assert!(supervisor.next_wake() >= Duration::from_secs(10));
    (supervisor.looking, supervisor.seating, supervisor.telling) = (false, false, true);
    assert!(supervisor.next_wake() <= Duration::from_millis(1), "a look is due");
    supervisor.quiet = true;
    supervisor.end();
    assert!(supervisor.next_wake() >= Duration::from_secs(1), "but not for those who leave");
}

/// Days of the same are one line an hour, and all of it is in the record.
#[tokio::test]
async fn the_same_trouble_is_not_told_again_and_again() {
    let (mut supervisor, _, _folder) = fresh();
    for _ in 0..100 {
        supervisor.trouble("away".to_owned());
        supervisor.trouble("gone".to_owned());
    }
    assert_eq!(supervisor.troubles.len(), 2);
    assert_eq!(supervisor.errors.len(), 5);
}

/// All that an idle node with a relaxed queue asks for in a day, its start included: at most 320 PUT and
/// LIST, and 300 GET. As many with tasks that are here and not to be done.
#[tokio::test]
async fn an_idle_day_of_a_relaxed_node() {
    for pending in [0, 999] {
        let used = a_day(1, Mode::Relaxed, pending).await;
        assert!(used.put + used.list <= 320, "{used:?}");
        assert!(used.get + used.head <= 300, "{used:?}");
        assert!(used.put > 200, "it reports every five minutes or so: {used:?}");
    }
}
