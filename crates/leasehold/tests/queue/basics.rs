//! What a queue is for.

use std::time::Duration;

use leasehold::queue::{Acked, NewTask, Outcome, Queue, QueueSettings, Worker, WorkerSettings};
use leasehold::{ErrorKind, Write};
use serde::{Deserialize, Serialize};

use super::*;

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Page {
    url: String,
    depth: u32,
}

#[tokio::test]
async fn what_is_pushed_is_done_once_and_leaves_a_receipt() {
    for place in everywhere("once") {
        let queue = queue(&place).await;
        let page = Page { url: "https://example.com".into(), depth: 2 };
        queue.push(NewTask::json(&page).unwrap().id("example.com")).await.unwrap();
        let worker = queue.worker("w1");
        let task = next(&worker).await;
        assert_eq!((task.id(), task.attempt()), ("example.com", 1));
        assert_eq!(task.json::<Page>().unwrap(), page);
        assert!(task.token() > 0);
        task.check().unwrap();
        assert_eq!(task.ack_json(&7).await.unwrap(), Acked::First);
        let receipt = queue.receipt("example.com").await.unwrap().unwrap();
        assert_eq!((receipt.worker.as_str(), receipt.retries), ("w1", 0));
        assert_eq!(receipt.result.unwrap().get(), "7");
        assert_eq!(
            left(&place.store).await,
            ["queues/q/completed/example.com.json"],
            "{}",
            place.name
        );
    }
}

#[tokio::test]
async fn a_chosen_id_is_not_done_again() {
    for place in everywhere("idempotent") {
        let queue = queue(&place).await;
        let outcome = async |id: &str| queue.push(NewTask::text("x").id(id)).await.unwrap().outcome;
        assert_eq!(outcome("a").await, Outcome::New);
        assert_eq!(outcome("a").await, Outcome::AlreadyPending);
        assert_eq!(drain(&queue, "w").await, ["a"]);
        assert_eq!(outcome("a").await, Outcome::AlreadyCompleted);
        assert!(drain(&queue, "w").await.is_empty());
    }
}

#[tokio::test]
async fn ids_may_be_any_text() {
    for place in everywhere("odd") {
        let queue = queue(&place).await;
        // SeaweedFS mangles what HTTP paths cannot carry well; what matters stays apart there too.
        let mut ids = vec!["a/b", "..", "Zürich (2)", "100%", "x.", "https://example.com/?q=1&r"];
        for id in &ids {
            push(&queue, id).await;
        }
        let mut done = drain(&queue, "w").await;
        done.sort();
        ids.sort_unstable();
        assert_eq!(done, ids, "{}", place.name);
    }
}

#[tokio::test]
async fn generated_ids_sort_by_time() {
    let place = memory();
    let queue = queue(&place).await;
    let pushed = queue.push_many((0..500).map(|n| NewTask::text(&n.to_string()))).await.unwrap();
    let ids: Vec<_> = pushed.iter().map(|pushed| pushed.id.clone()).collect();
    assert!(ids.is_sorted());
    // A lone worker goes through them in order, from wherever it starts.
    let done = drain(&queue, "w").await;
    let start = done.iter().position(|id| *id == ids[0]).unwrap();
    assert_eq!([&done[start..], &done[..start]].concat(), ids);
}

#[tokio::test]
async fn delayed_tasks_wait_for_their_time() {
    for place in everywhere("delayed") {
        let queue = queue(&place).await;
        let late = NewTask::text("late").id("late").delay(Duration::from_millis(2500));
        queue.push(late).await.unwrap();
        push(&queue, "now").await;
        // What is not due does not keep anybody.
        assert_eq!(drain(&queue, "w").await, ["now"], "{}", place.name);
        assert_eq!(queue.status(0).await.unwrap().counts.scheduled, 1);
        let worker = queue.worker("w");
        let task = next(&worker).await;
        assert_eq!(task.id(), "late");
        task.ack().await.unwrap();
        assert_eq!(queue.status(0).await.unwrap().counts.scheduled, 0);
    }
}

#[tokio::test]
async fn queues_are_worked_in_order_of_priority() {
    for place in [memory(), directory()] {
        let urgent = Queue::create(&place.store, "urgent", quick()).await.unwrap();
        let normal = Queue::create(&place.store, "normal", quick()).await.unwrap();
        for n in 0..3 {
            push(&normal, &format!("n{n}")).await;
        }
        let worker = Worker::new(
            vec![urgent.clone(), normal.clone()],
            WorkerSettings { until_empty: true, ..WorkerSettings::named("w") },
        );
        next(&worker).await.ack().await.unwrap();
        push(&urgent, "u").await;
        // An empty queue is not looked at for each task of another.
        tokio::time::sleep(Duration::from_millis(1200)).await;
        let mut order = Vec::new();
        while let Some(task) = worker.next().await.unwrap() {
            order.push(task.queue().unwrap().name().to_owned());
            task.ack().await.unwrap();
        }
        assert_eq!(order, ["urgent", "normal", "normal"]);
    }
}

#[tokio::test]
async fn a_paused_queue_rests() {
    for place in [memory(), directory()] {
        let queue = queue(&place).await;
        push(&queue, "x").await;
        queue.pause().await.unwrap();
        let worker = queue.worker("w");
        let early = tokio::time::timeout(Duration::from_millis(300), worker.next()).await;
        assert!(early.is_err(), "{early:?}");
        queue.resume().await.unwrap();
        assert_eq!(next(&worker).await.id(), "x");
    }
}

#[tokio::test]
async fn settings_are_shared_and_checked() {
    let place = directory();
    let queue = queue(&place).await;
    let again = Queue::open(&place.again(), "q").await.unwrap().unwrap();
    assert_eq!(again.settings().ttl, Duration::from_secs(1));
    queue.update(|settings| settings.max_attempts = 9).await.unwrap();
    assert_eq!(again.refresh().await.unwrap().max_attempts, 9);
    let error = queue.update(|settings| settings.shards = 4).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    let error = queue.update(|settings| settings.heartbeat = settings.ttl).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    let error = Queue::create(&place.store, "q", quick()).await.unwrap_err();
    assert!(error.to_string().contains("already"), "{error}");
    assert!(Queue::open(&place.store, "nobody's").await.unwrap().is_none());
    for bad in ["", &"x".repeat(2000)] {
        assert_eq!(Queue::open(&place.store, bad).await.unwrap_err().kind(), ErrorKind::Invalid);
    }
    assert_eq!(Queue::list(&place.store).await.unwrap(), ["q"]);
    let error = queue.push(NewTask::text("x").id("y".repeat(2000))).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    let huge = NewTask::text(&"x".repeat(leasehold::queue::MAX_PAYLOAD));
    let error = queue.push(huge).await.unwrap_err();
    assert!(error.to_string().contains("push its key"), "{error}");
    let error = queue.push(NewTask::text("x").max_attempts(0)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(left(&place.store).await.is_empty());
}

#[tokio::test]
async fn shards_spread_the_tasks_and_lose_none() {
    for place in everywhere("shards") {
        let settings = QueueSettings { shards: 8, ..quick() };
        let queue = Queue::create(&place.store, "q", settings).await.unwrap();
        for n in 0..40 {
            push(&queue, &format!("t{n}")).await;
        }
        let folders: std::collections::BTreeSet<_> = left(&place.store)
            .await
            .iter()
            .map(|key| key.split('/').nth(3).unwrap().to_owned())
            .collect();
        assert!(folders.len() > 3, "{folders:?}");
        let mut done = drain(&queue, "w").await;
        done.sort();
        done.dedup();
        assert_eq!(done.len(), 40, "{}", place.name);
    }
}

#[tokio::test]
async fn waiting_for_a_result() {
    for place in [memory(), directory()] {
        let queue = queue(&place).await;
        let poll = Duration::from_millis(10);
        let worker = queue.worker("w");
        let good = queue.push(NewTask::text("x").id("good")).await.unwrap();
        let waiter = {
            let (queue, good) = (queue.clone(), good.clone());
            tokio::spawn(async move { queue.wait(&good, poll).await })
        };
        next(&worker).await.ack_text("fine").await.unwrap();
        let receipt = waiter.await.unwrap().unwrap().unwrap();
        assert_eq!(receipt.result.unwrap().get(), "\"fine\"");
        let again = queue.push(NewTask::text("x").id("good")).await.unwrap();
        assert!(queue.wait(&again, poll).await.unwrap().is_ok(), "done before");
        let bad = queue.push(NewTask::text("x").id("bad")).await.unwrap();
        next(&worker).await.fail("never").await.unwrap();
        let letter = queue.wait(&bad, poll).await.unwrap().unwrap_err();
        assert_eq!(letter.errors[0].error, "never");
        // A dead letter of an earlier push says nothing about this one.
        let bad = queue.push(NewTask::text("x").id("bad")).await.unwrap();
        assert_eq!(bad.outcome, Outcome::New);
        let early = tokio::time::timeout(Duration::from_millis(200), queue.wait(&bad, poll)).await;
        assert!(early.is_err(), "{early:?}");
        queue.purge_pending().await.unwrap();
        let gone = queue.wait(&bad, poll).await.unwrap_err();
        assert!(gone.to_string().contains("gone"), "{gone}");
    }
}

#[tokio::test]
async fn status_tells_who_does_what() {
    for place in everywhere("status") {
        let queue = queue(&place).await;
        for id in ["a", "b", "c"] {
            push(&queue, id).await;
        }
        queue.push(NewTask::text("d").delay(Duration::from_secs(60))).await.unwrap();
        let worker = queue.worker("w7");
        let held = next(&worker).await;
        held.progress(&"half").await.unwrap();
        let failed = next(&worker).await;
        failed.fail("no").await.unwrap();
        let status = queue.status(10).await.unwrap();
        let counts = status.counts;
        assert_eq!((counts.free, counts.leased, counts.scheduled), (1, 1, 1), "{}", place.name);
        assert_eq!((counts.failed, counts.completed), (1, 0));
        assert_eq!(status.held.len(), 1);
        assert_eq!((status.held[0].id.as_str(), status.held[0].worker.as_str()), (held.id(), "w7"));
        assert_eq!(status.held[0].state, "held");
        assert_eq!(status.held[0].progress, Some("half".into()));
        assert!(status.requests < 20, "{}", status.requests);
        assert!(status.oldest.is_some());
        let peeked = queue.peek(10).await.unwrap();
        assert_eq!(peeked.len(), 2);
        assert_eq!(peeked[0].text(), peeked[0].id);
        held.ack().await.unwrap();
        assert_eq!(queue.purge_pending().await.unwrap(), 2);
        assert_eq!(queue.purge_failed().await.unwrap(), 1);
        assert_eq!(queue.purge_receipts(Duration::ZERO).await.unwrap(), 1);
        assert!(left(&place.store).await.is_empty());
    }
}

/// Two names fight for everything: each task is done once.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn many_workers_share_the_work() {
    for place in everywhere("shared") {
        let queue = queue(&place).await;
        let count = if place.name == "directory" { 400 } else { 150 };
        queue.push_many((0..count).map(|n| NewTask::text("x").id(format!("t{n}")))).await.unwrap();
        let mut workers = tokio::task::JoinSet::new();
        for n in 0..8 {
            let queue = Queue::open(&place.again(), "q").await.unwrap().unwrap();
            workers.spawn(async move { drain(&queue, &format!("w{n}")).await });
        }
        let mut done: Vec<_> = workers.join_all().await.into_iter().flatten().collect();
        assert_eq!(done.len(), count, "{}: some were done twice or not at all", place.name);
        done.sort();
        done.dedup();
        assert_eq!(done.len(), count);
        let status = queue.status(0).await.unwrap();
        assert_eq!(status.counts.completed, count as u64);
        assert_eq!((status.counts.free, status.counts.leased), (0, 0));
    }
}

#[tokio::test]
async fn large_payloads_go_through() {
    for place in everywhere("large") {
        let queue = queue(&place).await;
        let text = "ü".repeat(2 << 20);
        queue.push(NewTask::text(&text)).await.unwrap();
        let worker = queue.worker("w");
        let task = next(&worker).await;
        assert_eq!(task.text(), text);
        task.ack().await.unwrap();
    }
}

/// What another client pushes again, with the same name and the same bytes, is another task: neither the
/// receipt of the first nor a failed attempt in between makes it go.
#[tokio::test]
async fn what_another_client_pushes_again_is_done_again() {
    for place in everywhere("again") {
        let queue = queue(&place).await;
        let work = key("queues/q/pending/t/task.json");
        for round in 0..2 {
            let _ = place.store.put(&work, "{\"day\":1}".into(), Write::any()).await.unwrap();
            queue.sweep().await.unwrap();
            let worker = queue.worker("w");
            next(&worker).await.nack("not yet", Some(Duration::ZERO)).await.unwrap();
            let acked = next(&worker).await.ack_text(&format!("round {round}")).await.unwrap();
            assert_eq!(acked, Acked::First, "{}, round {round}", place.name);
            let receipt = queue.receipt("t").await.unwrap().unwrap();
            assert!(receipt.result.unwrap().get().contains(&format!("round {round}")));
            // A bucket tells whole seconds.
            tokio::time::sleep(Duration::from_millis(1100)).await;
        }
    }
}

/// A delayed push that was answered "new" is done, whatever receipt of its name stands when its time comes.
#[tokio::test]
async fn a_task_may_schedule_itself_again() {
    for place in everywhere("nightly") {
        let queue = queue(&place).await;
        let worker = queue.worker("w");
        let nightly = |delay| NewTask::text("x").id("nightly").delay(delay);
        queue.push(nightly(Duration::ZERO)).await.unwrap();
        let task = next(&worker).await;
        let pushed = queue.push(nightly(Duration::from_millis(1500))).await.unwrap();
        assert_eq!(pushed.outcome, Outcome::New, "{}", place.name);
        assert_eq!(task.ack().await.unwrap(), Acked::First, "{}", place.name);
        assert_eq!(next(&worker).await.ack().await.unwrap(), Acked::First, "{}", place.name);
        // From now on the name is done.
        let pushed = queue.push(nightly(Duration::from_millis(1500))).await.unwrap();
        assert_eq!(pushed.outcome, Outcome::AlreadyCompleted, "{}", place.name);
    }
}

/// Tasks of other clients have no other mark than their bytes, and these may be equal: under several names,
/// or under the same once more.
#[tokio::test]
async fn equal_tasks_of_other_clients_are_all_done() {
    for place in everywhere("equal") {
        let settings = QueueSettings { receipts: false, ..quick() };
        let queue = Queue::create(&place.store, "q", settings).await.unwrap();
        let put = async |id: &str| {
            let key = key(&format!("queues/q/pending/{id}/task.json"));
            let body = "{\"url\":\"x\"}".into();
            let _ = place.store.put(&key, body, Write::any()).await.unwrap();
        };
        for id in ["a", "b", "c"] {
            put(id).await;
        }
        let worker = queue.worker("w");
        let mut done = Vec::new();
        for n in 0..4 {
            let task = next(&worker).await;
            done.push(task.id().to_owned());
            task.ack().await.unwrap();
            if n == 2 {
                put("a").await;
            }
        }
        done[..3].sort();
        assert_eq!(done, ["a", "b", "c", "a"], "{}", place.name);
    }
}
