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
