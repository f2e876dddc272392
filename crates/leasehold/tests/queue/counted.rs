//! What it costs: requests are exact, so they are asserted.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use leasehold::queue::{NewTask, Queue, QueueSettings, Worker, WorkerSettings};

use super::*;

const TASKS: u64 = 1000;

async fn push_and_drain(place: &Place, settings: QueueSettings) -> leasehold::store::meter::Usage {
    let queue = Queue::create(&place.store, "q", settings).await.unwrap();
    let before = place.store.usage();
    queue.push_many((0..TASKS).map(|n| NewTask::text(&n.to_string()))).await.unwrap();
    let worker = queue.worker("w");
    for _ in 0..TASKS {
        next(&worker).await.ack_text("done").await.unwrap();
    }
    place.store.usage().since(&before)
}

/// One per task, and one every half a minute for the queue's settings: on a busy machine the test
/// takes that long.
fn assert_gets(used: &leasehold::store::meter::Usage) {
    assert!((TASKS..=TASKS + 5).contains(&used.get), "{used:?}");
}

/// A ttl so long that no heartbeat falls into the test.
fn calm() -> QueueSettings {
    QueueSettings {
        ttl: Duration::from_secs(600),
        heartbeat: Duration::from_secs(200),
        ..QueueSettings::default()
    }
}

#[tokio::test]
async fn a_task_costs_three_puts_and_a_get() {
    for place in [memory(), on_s3("ministack", "three")] {
        let used = push_and_drain(&place, calm()).await;
        assert_eq!((used.put, used.head), (3 * TASKS, 0), "{used:?}");
        assert_gets(&used);
        assert!(used.list * 100 <= TASKS, "{used:?}");
        assert_eq!(used.delete, 2 * TASKS);
    }
}

#[tokio::test]
async fn without_receipts_two() {
    for place in [memory(), on_s3("ministack", "two")] {
        let used = push_and_drain(&place, QueueSettings { receipts: false, ..calm() }).await;
        assert_eq!((used.put, used.head), (2 * TASKS, 0), "{used:?}");
        assert_gets(&used);
        assert!(used.list * 100 <= TASKS, "{used:?}");
    }
}

#[tokio::test]
async fn bundles_of_a_hundred_cost_a_hundredth() {
    for place in [memory(), on_s3("ministack", "bundles")] {
        let queue = Queue::create(&place.store, "q", calm()).await.unwrap();
        let before = place.store.usage();
        for _ in 0..10 {
            let tasks = (0..100).map(|n| NewTask::text(&n.to_string())).collect();
            queue.push_bundle(tasks).await.unwrap();
        }
        let worker = queue.worker("w");
        for _ in 0..TASKS {
            next(&worker).await.ack().await.unwrap();
        }
        let used = place.store.usage().since(&before);
        let paid = used.put + used.get + used.head + used.list;
        assert!(paid * 100 <= 6 * TASKS, "{used:?}");
        let dollars = used.dollars(&leasehold::store::meter::Prices { write: 0.005, read: 0.0004 });
        assert!(dollars * 1e6 / TASKS as f64 <= 0.5, "{dollars}");
    }
}

/// Refused PUTs and LISTs together, per claim, until the last task is claimed.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn fifty_workers_keep_out_of_each_others_way() {
    let mut vain = Vec::new();
    for _ in 0..5 {
        let place = memory();
        // Without receipts every PUT is a claim, or a refused one.
        let settings = QueueSettings { receipts: false, ..calm() };
        let queue = Queue::create(&place.store, "q", settings).await.unwrap();
        queue.push_many((0..TASKS).map(|n| NewTask::text(&n.to_string()))).await.unwrap();
        let before = place.store.usage();
        let claimed = Arc::new(AtomicU64::new(0));
        let mut workers = tokio::task::JoinSet::new();
        for n in 0..50 {
            let (queue, claimed) = (queue.clone(), claimed.clone());
            workers.spawn(async move {
                let settings =
                    WorkerSettings { until_empty: true, ..WorkerSettings::named(format!("w{n}")) };
                let worker = Worker::new(vec![queue.clone()], settings);
                let mut last = None;
                while let Some(task) = worker.next().await.unwrap() {
                    if claimed.fetch_add(1, SeqCst) + 1 == TASKS {
                        last = Some(queue.store().usage());
                    }
                    // Long enough that all of them are at it.
                    tokio::time::sleep(Duration::from_millis(5)).await;
                    task.ack().await.unwrap();
                }
                last
            });
        }
        let last = workers.join_all().await.into_iter().flatten().next().unwrap();
        assert_eq!(claimed.load(SeqCst), TASKS, "some were done twice");
        let used = last.since(&before);
        let refused = used.put - TASKS;
        println!("{refused} refused, {} lists, {} heads", used.list, used.head);
        vain.push((refused + used.list) as f64 / TASKS as f64);
    }
    vain.sort_by(f64::total_cmp);
    assert!(vain[2] <= 0.3, "{vain:?} vain requests per claim");
}

#[tokio::test]
async fn an_idle_worker_lists_once_per_poll() {
    for place in [memory(), on_s3("ministack", "idle")] {
        let queue = Queue::create(&place.store, "q", calm()).await.unwrap();
        let worker = until_empty(&queue, "w");
        assert!(worker.next().await.unwrap().is_none());
        // From the second look on.
        for _ in 0..3 {
            let before = place.store.usage();
            assert!(worker.next().await.unwrap().is_none());
            let used = place.store.usage().since(&before);
            assert!(used.list <= 1 && used.requests() == used.list, "{used:?}");
            tokio::time::sleep(Duration::from_millis(400)).await;
        }
    }
}

/// Ten thousand here, a million in the benchmark: the first claim does not depend on how many wait.
#[tokio::test]
async fn the_first_claim_of_many_takes_few_lists() {
    for place in [memory(), on_s3("ministack", "many")] {
        let queue = Queue::create(&place.store, "q", calm()).await.unwrap();
        queue.push_many((0..3000).map(|n| NewTask::text(&n.to_string()))).await.unwrap();
        let before = place.store.usage();
        let worker = queue.worker("w");
        next(&worker).await.ack().await.unwrap();
        let used = place.store.usage().since(&before);
        assert!(used.list <= 3, "{used:?}");
    }
}
