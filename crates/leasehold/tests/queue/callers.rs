//! Many callers of one worker: they share one list, and none keeps the others waiting.

use std::sync::Arc;
use std::time::Duration;

use leasehold::queue::{NewTask, Queue, QueueSettings, Task, Worker, WorkerSettings};
use leasehold::store::meter::Usage;
use leasehold_testkit::conformance::over;
use leasehold_testkit::gate::{Gated, Verb};
use tokio::task::JoinHandle;

use super::*;

/// A ttl so long that no heartbeat falls into the test.
fn calm() -> QueueSettings {
    QueueSettings {
        ttl: Duration::from_secs(600),
        heartbeat: Duration::from_secs(200),
        ..QueueSettings::default()
    }
}

/// A queue behind a gate, in memory and in a directory.
async fn gated() -> Vec<(Place, Arc<Gated>, Queue)> {
    let mut all = Vec::new();
    for place in [memory(), directory()] {
        let gate = Arc::new(Gated::new(place.store.backend().clone()));
        let queue = Queue::create(&over(gate.clone()), "q", calm()).await.unwrap();
        all.push((place, gate, queue));
    }
    all
}

fn call(worker: &Arc<Worker>) -> JoinHandle<Task> {
    let worker = worker.clone();
    tokio::spawn(async move { next(&worker).await })
}

async fn soon(call: JoinHandle<Task>) -> Task {
    tokio::time::timeout(Duration::from_secs(10), call).await.expect("within 10 s").unwrap()
}

/// A listing can take as long as a hundred other requests: whoever has claimed something meanwhile
/// goes on with it.
#[tokio::test]
async fn whoever_has_claimed_a_task_does_not_wait_for_a_listing() {
    for (place, gate, queue) in gated().await {
        push(&queue, "t").await;
        let worker = Arc::new(queue.worker("w"));
        let mut reading = gate.stop(Verb::Get, "pending/t/task.json");
        let first = call(&worker);
        reading.reached().await;
        let mut listing = gate.stop(Verb::List, "queues/q/");
        let second = call(&worker);
        listing.reached().await;
        reading.go();
        let task = soon(first).await;
        assert_eq!(task.id(), "t", "{}", place.name);
        task.ack().await.unwrap();
        // And whoever has listed goes on from there.
        push(&queue, "u").await;
        listing.go();
        assert_eq!(soon(second).await.id(), "u", "{}", place.name);
    }
}

/// A listing that is made while a claim of ours is under way shows the task as free. That is nobody
/// else's doing, so it costs nothing: neither a refused claim, nor a look before each of the next.
#[tokio::test]
async fn a_claim_under_way_is_not_taken_for_somebody_elses() {
    for (place, gate, queue) in gated().await {
        push(&queue, "t").await;
        let worker = Arc::new(queue.worker("w"));
        let mut claiming = gate.stop(Verb::Put, "pending/t/lease.json");
        let first = call(&worker);
        claiming.reached().await;
        let before = queue.store().usage();
        let second = call(&worker);
        // Long enough for a list.
        tokio::time::sleep(Duration::from_millis(100)).await;
        let used = queue.store().usage().since(&before);
        assert!(used.list > 0, "{}: {used:?}", place.name);
        assert_eq!(used.put, 0, "{}: it was claimed twice", place.name);
        claiming.go();
        soon(first).await.ack().await.unwrap();
        queue.push(NewTask::text("u")).await.unwrap();
        soon(second).await.ack().await.unwrap();
        assert_eq!(queue.store().usage().since(&before).head, 0, "{}", place.name);
    }
}

/// Whoever gives up waiting does not keep the task from the others.
#[tokio::test]
async fn a_claim_that_was_given_up_is_made_by_another_caller() {
    for (place, gate, queue) in gated().await {
        push(&queue, "t").await;
        let worker = Arc::new(queue.worker("w"));
        let mut claiming = gate.stop(Verb::Put, "pending/t/lease.json");
        let first = call(&worker);
        claiming.reached().await;
        first.abort();
        assert!(first.await.is_err());
        // Its request may land after all.
        claiming.go();
        assert_eq!(soon(call(&worker)).await.id(), "t", "{}", place.name);
    }
}

/// What 16 callers request to do all that there is, as those of so many workers.
async fn drain_by_sixteen(queue: &Queue, tasks: usize, workers: usize) -> Usage {
    queue.push_many((0..tasks).map(|n| NewTask::text(&n.to_string()))).await.unwrap();
    let before = queue.store().usage();
    let mut all = Vec::new();
    for n in 0..workers {
        let settings =
            WorkerSettings { until_empty: true, ..WorkerSettings::named(format!("w{n}")) };
        let queue = Queue::open(queue.store(), queue.name()).await.unwrap().unwrap();
        all.push(Arc::new(Worker::new(vec![queue], settings)));
    }
    let mut callers = tokio::task::JoinSet::new();
    for n in 0..16 {
        let worker = all[n % workers].clone();
        callers.spawn(async move {
            let mut done = 0;
            while let Some(task) = worker.next().await.unwrap() {
                tokio::task::yield_now().await;
                task.ack().await.unwrap();
                done += 1;
            }
            done
        });
    }
    let done: usize = callers.join_all().await.into_iter().sum();
    assert_eq!(done, tasks);
    queue.store().usage().since(&before)
}

/// A claim, a read, a receipt and two deletes each, and next to nothing else: nobody runs into
/// another caller, or looks into a lease that another caller holds.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn sixteen_callers_cost_what_one_does() {
    // Among them one or two, or twice that, for receipts that are past their time.
    for (place, tasks, lists) in
        [(memory(), 480, 6), (memory(), 2500, 10), (on_s3("ministack", "sixteen"), 480, 8)]
    {
        let queue = Queue::create(&place.store, "q", calm()).await.unwrap();
        let used = drain_by_sixteen(&queue, tasks, 1).await;
        let n = tasks as u64;
        assert_eq!((used.put, used.head, used.delete), (2 * n, 0, 2 * n), "{used:?}");
        // And the queue's settings, at first and every half a minute.
        assert!((n..=n + 5).contains(&used.get), "{used:?}");
        assert!(used.list <= lists, "{}: {used:?}", place.name);
        println!("{} {tasks}: {used:?}", place.name);
    }
}

/// Four workers that know nothing of each other find out, and then keep apart.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn four_workers_of_four_callers_keep_apart() {
    let place = memory();
    let queue = Queue::create(&place.store, "q", calm()).await.unwrap();
    let tasks = 1000;
    let used = drain_by_sixteen(&queue, tasks, 4).await;
    println!("{used:?}");
    let n = tasks as u64;
    let refused = used.put - 2 * n;
    assert!((refused + used.list) * 10 <= n, "{used:?}");
}
