//! What it costs: requests are exact, so they are asserted.

use leasehold::store::meter::Usage;
use tokio_util::sync::CancellationToken;

use super::faults::Cut;
use super::*;

fn calm() -> QueueSettings {
    QueueSettings {
        ttl: Duration::from_secs(900),
        heartbeat: Duration::from_secs(300),
        mode: Mode::Relaxed,
        durable: false,
        ..QueueSettings::default()
    }
}

/// A replica in memory, which is quick, with a bucket of its own meter.
async fn node(bucket: &Arc<Memory>, settings: QueueSettings) -> (Queue, Replica, Queue) {
    let queue = Queue::create(&over(bucket.clone()), "q", settings).await.unwrap();
    let client = over(Arc::new(bucket.client(Env::system())));
    client.init().await.unwrap();
    let local = over(Arc::new(Memory::new(Env::system())));
    let replica = Replica::open(&local, &client, "a").await.unwrap();
    let here = replica.join("q").await.unwrap();
    (queue, replica, here)
}

fn paid(usage: &Usage) -> u64 {
    usage.put + usage.get + usage.head + usage.list
}

async fn work(here: &Queue, tasks: u64) {
    let worker = here.worker("w");
    for _ in 0..tasks {
        worker.next().await.unwrap().unwrap().ack().await.unwrap();
    }
}

const TASKS: u64 = 10_000;

#[tokio::test]
async fn ten_thousand_single_tasks_cost_a_put_and_a_get_each() {
    let bucket = Arc::new(Memory::new(Env::system()));
    let (queue, replica, here) = node(&bucket, calm()).await;
    queue.push_many((0..TASKS).map(|n| NewTask::text(&n.to_string()))).await.unwrap();
    let before = replica.bucket().usage();
    assert_eq!(replica.down("q").await.unwrap().new, TASKS);
    let worker = here.worker("w");
    // Seven are caught in flight.
    let mut caught = Vec::new();
    for _ in 0..7 {
        caught.push(worker.next().await.unwrap().unwrap());
    }
    assert_eq!(replica.up("q").await.unwrap().held, 7);
    for task in caught {
        task.ack().await.unwrap();
    }
    work(&here, TASKS - 7).await;
    assert_eq!(replica.up("q").await.unwrap().completed, TASKS);
    let used = replica.bucket().usage().since(&before);
    println!("{used:?}");
    assert_eq!(used.put, TASKS + 7, "{used:?}");
    // One for the settings; for each lease that was caught, whether its task is still there, and was not
    // done before.
    assert_eq!(used.get, TASKS + 1 + 2 * 7, "{used:?}");
    assert_eq!(used.head, 0);
    assert_eq!(used.list, 1 + TASKS / 1000, "{used:?}");
    let status = replica.status("q").await.unwrap();
    assert_eq!((status.strict_requests, status.duplicates), (3 * TASKS, 0));
    assert_eq!(status.saved, (3 * TASKS) as i64 - status.requests as i64);
    assert_eq!(queue.status(0).await.unwrap().counts.completed, TASKS);
}

#[tokio::test]
async fn ten_thousand_bundled_tasks_cost_six_hundredths_each() {
    let bucket = Arc::new(Memory::new(Env::system()));
    let (queue, replica, here) = node(&bucket, calm()).await;
    let before = replica.bucket().usage();
    for _ in 0..TASKS / 100 {
        let tasks = (0..100).map(|n| NewTask::text(&n.to_string())).collect();
        queue.push_bundle(tasks).await.unwrap();
    }
    replica.down("q").await.unwrap();
    work(&here, TASKS).await;
    assert_eq!(replica.up("q").await.unwrap().completed, TASKS / 100);
    let used = replica.bucket().usage().since(&before);
    println!("{used:?}");
    // Pushing took a PUT for each bundle, elsewhere.
    assert!((paid(&used) + TASKS / 100) * 100 <= 6 * TASKS, "{used:?}");
    // Pushed here as well, and done before a sync.
    let before = replica.bucket().usage();
    for _ in 0..TASKS / 100 {
        let tasks = (0..100).map(|n| NewTask::text(&n.to_string())).collect();
        here.push_bundle(tasks).await.unwrap();
    }
    work(&here, TASKS).await;
    replica.up("q").await.unwrap();
    let used = replica.bucket().usage().since(&before);
    assert!(paid(&used) * 100 <= 2 * TASKS, "{used:?}");
}

/// Tasks with a lease each, which nobody touches: two objects a task.
#[tokio::test]
async fn a_hundred_thousand_unchanged_tasks_cost_lists_only() {
    const MANY: usize = 100_000;
    let bucket = Arc::new(Memory::new(Env::system()));
    let (_, replica, _) = node(&bucket, calm()).await;
    let store = over(bucket.clone());
    let lease = br#"{"worker_id":"other","ttl_ms":3600000}"#;
    for n in 0..MANY {
        let folder = format!("queues/q/pending/{n:06}");
        let task = format!(r#"{{"incarnation":"{n:032x}","payload":{n}}}"#);
        let any = leasehold::Write::any;
        let _ = store.put(&key(&format!("{folder}/task.json")), task.into(), any()).await.unwrap();
        let lease = lease.to_vec().into();
        let _ = store.put(&key(&format!("{folder}/lease.json")), lease, any()).await.unwrap();
    }
    // Somebody has all of them: nothing is fetched.
    let down = replica.down("q").await.unwrap();
    assert_eq!((down.new, down.usage.get), (0, 1), "{down:?}");
    // Some are let go of and fetched, and then had again.
    for n in 0..MANY / 50 {
        let key = key(&format!("queues/q/pending/{n:06}/lease.json"));
        let _ = store.delete(&key).await.unwrap();
    }
    let down = replica.down("q").await.unwrap();
    assert_eq!(down.new as usize, MANY / 50, "{down:?}");
    for n in 0..MANY / 50 {
        let key = key(&format!("queues/q/pending/{n:06}/lease.json"));
        let _ = store.put(&key, lease.to_vec().into(), leasehold::Write::any()).await.unwrap();
    }
    assert_eq!(replica.down("q").await.unwrap().shut as usize, MANY / 50);
    for _ in 0..2 {
        let down = replica.down("q").await.unwrap();
        assert_eq!(down.unchanged as usize, MANY, "{down:?}");
        let used = down.usage;
        // The conditional GET of the settings aside.
        assert!(used.list <= 201 && used.get == 1 && used.head == 0 && used.put == 0, "{used:?}");
    }
}

/// With the supervisor's own heartbeat and its look at the plan, 274 each a day, that makes less than 320
/// PUT and LIST and 300 GET.
#[tokio::test]
async fn an_idle_day_costs_a_list_an_hour() {
    for pending in [0, 999] {
        let clock = super::time::Fast::default();
        let env = clock.env();
        let bucket = Arc::new(Memory::new(env.clone()));
        let settings = leasehold::StoreSettings::default();
        let open =
            |memory: Memory| Store::new(Arc::new(memory), env.clone(), settings.clone()).unwrap();
        let there = open(bucket.client(env.clone()));
        let queue = Queue::create(&there, "q", calm()).await.unwrap();
        // Nobody here does anything with them.
        for n in 0..pending {
            queue.push(NewTask::text("x").id(format!("{n:06}"))).await.unwrap();
        }
        let client = open(bucket.client(env.clone()));
        client.init().await.unwrap();
        let replica = Replica::open(&open(Memory::new(env.clone())), &client, "a").await.unwrap();
        replica.join("q").await.unwrap();
        // What a worker with nothing to do leaves.
        let dry = key("sync/q/dry.json");
        let _ = replica.local().put(&dry, "{}".into(), leasehold::Write::any()).await.unwrap();
        let end = CancellationToken::new();
        let queues = ["q".to_owned()];
        replica.down("q").await.unwrap();
        let before = client.usage();
        let day = env.clock().sleep(Duration::from_secs(86_400));
        let ran = async {
            tokio::select! {
                () = replica.run(&queues, end.clone()) => unreachable!("it runs until it is told to end"),
                () = day => end.cancel(),
            }
        };
        clock.pass(ran).await;
        let used = client.usage().since(&before);
        println!("{pending} pending: {used:?}");
        assert_eq!((used.put, used.delete, used.head), (0, 0, 0), "{used:?}");
        assert!(used.get <= 26, "{used:?}");
        assert!(used.list <= 46, "{used:?}");
        let state = replica.status("q").await.unwrap();
        assert!(state.up_age_ms.unwrap() <= 330_000 && state.down_age_ms.unwrap() <= 3_960_000);
    }
}

/// Offline for a day: work goes on, and all of it is told when the bucket is back.
#[tokio::test]
async fn an_offline_day_loses_nothing() {
    let clock = super::time::Fast::default();
    let env = clock.env();
    let bucket = Arc::new(Memory::new(env.clone()));
    let settings = leasehold::StoreSettings { attempts: 1, ..Default::default() };
    let open =
        |backend: Arc<dyn Backend>| Store::new(backend, env.clone(), settings.clone()).unwrap();
    let there = open(Arc::new(bucket.client(env.clone())));
    let queue = Queue::create(&there, "q", calm()).await.unwrap();
    for n in 0..24 {
        push(&queue, &format!("t{n:02}")).await;
    }
    let cut = Arc::new(Cut::new(Arc::new(bucket.client(env.clone()))));
    let client = open(cut.clone());
    client.init().await.unwrap();
    let local = open(Arc::new(Memory::new(env.clone())));
    let replica = Replica::open(&local, &client, "a").await.unwrap();
    let here = replica.join("q").await.unwrap();
    replica.down("q").await.unwrap();
    let (end, queues) = (CancellationToken::new(), vec!["q".to_owned()]);
    let (looping, ended) = (replica.clone(), end.clone());
    let syncing = tokio::spawn(async move { looping.run(&queues, ended).await });
    cut.set(true);
    let worker = here.worker("w");
    let day = async {
        for n in 0..24 {
            let task = worker.next().await.unwrap().unwrap();
            match n % 10 {
                3 => task.fail("never").await.unwrap(),
                _ => drop(task.ack().await.unwrap()),
            }
            here.push(NewTask::text("offline")).await.unwrap();
            env.clock().sleep(Duration::from_secs(3600)).await;
        }
        assert!(queue.receipt("t00").await.unwrap().is_none());
        cut.set(false);
        env.clock().sleep(Duration::from_secs(3600)).await;
    };
    clock.pass(day).await;
    let counts = queue.status(0).await.unwrap().counts;
    // All that was there is done or given up; what was pushed meanwhile came after it, and waits.
    assert_eq!((counts.completed, counts.failed, counts.free), (21, 3, 24), "{counts:?}");
    assert_eq!(replica.status("q").await.unwrap().outbox, 0);
    end.cancel();
    clock.pass(syncing).await.unwrap();
}
