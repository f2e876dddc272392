//! Tasks that fail, workers that vanish.

use std::time::Duration;

use leasehold::queue::{Acked, NewTask, Queue, QueueSettings};
use leasehold::{ErrorKind, Write};

use super::*;

#[tokio::test]
async fn a_failed_task_is_tried_again_and_then_given_up() {
    for place in everywhere("fails") {
        let settings = QueueSettings { max_attempts: 3, ..quick() };
        let queue = Queue::create(&place.store, "q", settings).await.unwrap();
        push(&queue, "poison").await;
        push(&queue, "fine").await;
        let worker = until_empty(&queue, "w");
        let mut attempts = Vec::new();
        while let Some(task) = worker.next().await.unwrap() {
            match task.id() {
                "fine" => drop(task.ack().await.unwrap()),
                _ => {
                    attempts.push(task.attempt());
                    task.nack(&format!("no. {}", attempts.len()), None).await.unwrap();
                }
            }
        }
        assert_eq!(attempts, [1, 2, 3], "{}", place.name);
        let letter = queue.dead_letter("poison").await.unwrap().unwrap();
        assert_eq!((letter.failures, letter.crashes), (3, 0));
        let errors: Vec<_> = letter.errors.iter().map(|failure| failure.error.as_str()).collect();
        assert_eq!(errors, ["no. 1", "no. 2", "no. 3"]);
        assert_eq!(
            left(&place.store).await,
            ["queues/q/completed/fine.json", "queues/q/failed/poison.json"]
        );
        // Once more, from the beginning.
        assert!(queue.retry("poison").await.unwrap());
        assert!(!queue.retry("nobody").await.unwrap());
        let worker = queue.worker("w");
        let task = next(&worker).await;
        assert_eq!((task.id(), task.attempt(), task.text().as_str()), ("poison", 1, "poison"));
        task.ack().await.unwrap();
        assert!(queue.dead_letter("poison").await.unwrap().is_none());
    }
}

#[tokio::test]
async fn a_delay_of_ones_own_counts() {
    for place in everywhere("delay") {
        let queue = queue(&place).await;
        push(&queue, "x").await;
        let worker = queue.worker("w");
        let start = std::time::Instant::now();
        next(&worker).await.nack("later", Some(Duration::from_secs(2))).await.unwrap();
        next(&worker).await.ack().await.unwrap();
        assert!(start.elapsed() >= Duration::from_secs(1), "{:?}", start.elapsed());
    }
}

#[tokio::test]
async fn a_task_that_is_dropped_counts_as_failed() {
    for place in [memory(), directory()] {
        let queue = queue(&place).await;
        push(&queue, "x").await;
        let worker = queue.worker("w");
        drop(next(&worker).await);
        let task = next(&worker).await;
        assert_eq!(task.attempt(), 2);
        task.ack().await.unwrap();
    }
}

#[tokio::test]
async fn a_task_that_is_given_back_does_not_count() {
    for place in everywhere("back") {
        let queue = queue(&place).await;
        push(&queue, "x").await;
        let worker = queue.worker("w");
        for _ in 0..7 {
            let task = next(&worker).await;
            assert_eq!(task.attempt(), 1, "{}", place.name);
            task.give_back().await.unwrap();
        }
        next(&worker).await.ack().await.unwrap();
    }
}

/// A holder that was killed: its lease is there, and nobody renews it.
async fn vanish(queue: &Queue) {
    let worker = queue.worker("victim");
    let task = next(&worker).await;
    // As if the process had ended: nothing is renewed, nothing released.
    let key = key(&format!("queues/q/pending/{}/lease.json", task.id()));
    let lease = queue.store().get(&key).await.unwrap().unwrap();
    task.give_back().await.unwrap();
    let text = String::from_utf8(lease.body.to_vec()).unwrap();
    // A process of this machine would be seen to be alive.
    let mut record: serde_json::Value = serde_json::from_str(&text).unwrap();
    for field in ["host", "boot_id", "boot_time_ms", "pid_namespace", "pid", "start_time"] {
        record.as_object_mut().unwrap().remove(field);
    }
    let body = serde_json::to_vec(&record).unwrap();
    let put = queue.store().put(&key, body.into(), leasehold::Write::any()).await.unwrap();
    assert!(matches!(put, leasehold::Put::Stored(_)));
}

#[tokio::test]
async fn a_worker_that_vanished_is_replaced_after_the_ttl_and_counted() {
    for place in everywhere("vanished") {
        let settings = QueueSettings { max_crashes: 2, ..quick() };
        let queue = Queue::create(&place.store, "q", settings).await.unwrap();
        push(&queue, "x").await;
        vanish(&queue).await;
        let start = std::time::Instant::now();
        let worker = queue.worker("heir");
        let task = next(&worker).await;
        assert!(start.elapsed() >= Duration::from_millis(900), "{} too early", place.name);
        assert_eq!(task.attempt(), 2);
        task.give_back().await.unwrap();
        vanish(&queue).await;
        // Twice is too often.
        let worker = until_empty(&queue, "heir");
        assert!(worker.next().await.unwrap().is_none());
        let letter = queue.dead_letter("x").await.unwrap().unwrap();
        assert_eq!((letter.failures, letter.crashes), (0, 2), "{}", place.name);
        assert!(letter.errors.iter().all(|failure| failure.crash && failure.worker == "victim"));
    }
}

#[tokio::test]
async fn a_claim_is_renewed_as_long_as_it_takes() {
    for place in everywhere("renewed") {
        let queue = queue(&place).await;
        push(&queue, "long").await;
        let worker = queue.worker("w");
        let task = next(&worker).await;
        let other = queue.worker("other");
        let stolen = tokio::time::timeout(Duration::from_secs(4), other.next()).await;
        assert!(stolen.is_err(), "{}: stolen from a living worker", place.name);
        task.check().unwrap();
        assert_eq!(task.ack().await.unwrap(), Acked::First);
    }
}

#[tokio::test]
async fn receipts_are_swept_after_their_time_and_the_id_is_free_again() {
    let place = directory();
    let queue = queue(&place).await;
    push(&queue, "x").await;
    drain(&queue, "w").await;
    assert_eq!(queue.sweep().await.unwrap().receipts, 0);
    // An hour is the least that can be asked for; the file is made older instead.
    queue.update(|settings| settings.retention = Duration::from_secs(3600)).await.unwrap();
    let root = place.store.url();
    let file = std::path::Path::new(&root).join("queues/q/completed/x.json");
    let old = std::time::SystemTime::now() - Duration::from_secs(4000);
    std::fs::File::open(&file).unwrap().set_modified(old).unwrap();
    assert_eq!(queue.sweep().await.unwrap().receipts, 1);
    push(&queue, "x").await;
    assert_eq!(drain(&queue, "w").await, ["x"]);
}

/// Runs of a few minutes each leave no more and more receipts: whoever makes some removes old ones.
#[tokio::test]
async fn short_runs_sweep_too() {
    let place = directory();
    let settings = QueueSettings { retention: Duration::from_secs(3600), ..quick() };
    let queue = Queue::create(&place.store, "q", settings).await.unwrap();
    queue.push_many((0..1500).map(|n| NewTask::text(&n.to_string()))).await.unwrap();
    drain(&queue, "w").await;
    let folder = std::path::Path::new(&place.store.url()).join("queues/q/completed");
    let receipts = || std::fs::read_dir(&folder).unwrap().map(|file| file.unwrap().path());
    let receipts = || receipts().filter(|file| file.extension().is_some_and(|it| it == "json"));
    assert_eq!(receipts().count(), 1500);
    let old = std::time::SystemTime::now() - Duration::from_secs(4000);
    receipts().for_each(|file| std::fs::File::open(file).unwrap().set_modified(old).unwrap());
    // An idle one has nothing to do with it.
    drain(&queue, "w").await;
    assert_eq!(receipts().count(), 1500);
    // At least a page, and twice as many as it makes.
    for (made, kept) in [(3, 503), (2, 5)] {
        queue.push_many((0..made).map(|n| NewTask::text(&n.to_string()))).await.unwrap();
        assert_eq!(drain(&queue, "w").await.len(), made);
        assert_eq!(receipts().count(), kept);
    }
}

#[tokio::test]
async fn without_receipts_nothing_is_left() {
    for place in everywhere("without") {
        let settings = QueueSettings { receipts: false, ..quick() };
        let queue = Queue::create(&place.store, "q", settings).await.unwrap();
        queue.push_many((0..5).map(|n| NewTask::text(&n.to_string()))).await.unwrap();
        assert_eq!(drain(&queue, "w").await.len(), 5);
        assert!(left(&place.store).await.is_empty(), "{}", place.name);
    }
}

/// A retry writes the task and then removes the dead letter. Its process is killed in between, the task
/// is completed, and the letter still stands: another retry, or a sweep, must not run it again.
#[tokio::test]
async fn a_retry_that_was_cut_off_is_not_done_twice() {
    for sweeps in [false, true] {
        for place in everywhere(if sweeps { "cut-swept" } else { "cut-retried" }) {
            let queue = queue(&place).await;
            push(&queue, "x").await;
            let worker = queue.worker("w");
            next(&worker).await.fail("no").await.unwrap();
            let key = leasehold::Key::new("queues/q/failed/x.json").unwrap();
            let letter = place.store.get(&key).await.unwrap().unwrap().body;
            // On a bucket pushes that are a second apart cannot be told apart.
            tokio::time::sleep(Duration::from_millis(1100)).await;
            assert!(queue.retry("x").await.unwrap());
            let put = place.store.put(&key, letter, leasehold::Write::any()).await.unwrap();
            assert!(matches!(put, leasehold::Put::Stored(_)));
            // Pending again: the letter is about another push, and pushing once more changes nothing.
            let (pending, _) = queue.find("x").await.unwrap().unwrap();
            let task = next(&worker).await;
            assert_eq!((task.id(), task.pushed_at()), ("x", pending.pushed_at));
            assert_eq!(task.ack().await.unwrap(), Acked::First);
            match sweeps {
                true => assert_eq!(queue.sweep().await.unwrap().letters, 1, "{}", place.name),
                false => assert!(!queue.retry("x").await.unwrap(), "{}", place.name),
            }
            assert_eq!(left(&place.store).await, ["queues/q/completed/x.json"], "{}", place.name);
            assert_eq!(queue.sweep().await.unwrap().letters, 0);
        }
    }
}

/// The letter of a later push than the one that was completed stays: it is what became of it.
#[tokio::test]
async fn a_dead_letter_of_a_later_push_stays() {
    for place in everywhere("later-letter") {
        let queue = queue(&place).await;
        push(&queue, "x").await;
        let worker = queue.worker("w");
        next(&worker).await.fail("no").await.unwrap();
        tokio::time::sleep(Duration::from_millis(1100)).await;
        assert!(queue.retry("x").await.unwrap());
        next(&worker).await.fail("no again").await.unwrap();
        let letter = queue.dead_letter("x").await.unwrap().unwrap();
        // A worker that was thought to be dead completes the first push only now.
        let receipt = leasehold::queue::Receipt {
            id: "x".into(),
            incarnation: "the first push".into(),
            worker: "zombie".into(),
            token: 1,
            pushed_at: letter.task.pushed_at.map(|at| at.minus(Duration::from_secs(1))),
            started_at: None,
            completed_at: letter.failed_at,
            retries: 0,
            result: None,
            results: None,
            replaced: Vec::new(),
            copied: false,
            nonce: "n".into(),
        };
        let key = leasehold::Key::new("queues/q/completed/x.json").unwrap();
        let put = place.store.put(&key, receipt.to_bytes().into(), leasehold::Write::any()).await;
        assert!(matches!(put.unwrap(), leasehold::Put::Stored(_)));
        assert_eq!(queue.sweep().await.unwrap().letters, 0);
        assert!(queue.retry("x").await.unwrap(), "{}", place.name);
    }
}

/// The clock was set back between two pushes of a name: the dead letter of the second takes the place of the
/// first's all the same, or its payload would be nowhere.
#[tokio::test]
async fn a_push_by_a_clock_that_was_set_back_leaves_its_own_dead_letter() {
    // A bucket has one clock.
    for place in [memory(), directory()] {
        let queue = queue(&place).await;
        let worker = queue.worker("w");
        let letter = key("queues/q/failed/t.json");
        for payload in ["old", "new"] {
            queue.push(NewTask::text(payload).id("t")).await.unwrap();
            next(&worker).await.fail("broken").await.unwrap();
            let there = place.store.get(&letter).await.unwrap().unwrap();
            let mut there: serde_json::Value = serde_json::from_slice(&there.body).unwrap();
            assert_eq!(there["payload"], payload, "{}", place.name);
            // As if that had been pushed by a clock far ahead.
            there["pushed_at"] = "2099-01-01T00:00:00Z".into();
            let _ = place.store.put(&letter, there.to_string().into(), Write::any()).await.unwrap();
        }
    }
}

/// A retry must not throw a dead letter away because something else has its name.
#[tokio::test]
async fn a_retry_keeps_the_letter_while_another_task_has_its_name() {
    let place = memory();
    let queue = queue(&place).await;
    push(&queue, "t").await;
    next(&queue.worker("w")).await.fail("no").await.unwrap();
    queue.push(NewTask::text("something else").id("t")).await.unwrap();
    assert_eq!(queue.retry("t").await.unwrap_err().kind(), leasehold::ErrorKind::Held);
    assert_eq!(queue.failed_ids().await.unwrap(), ["t"]);
    assert_eq!(queue.find("t").await.unwrap().unwrap().0.text(), "something else");
}

#[tokio::test]
async fn a_task_that_waits_for_its_time_is_found() {
    let place = memory();
    let queue = queue(&place).await;
    let later = NewTask::text("x").id("later").delay(Duration::from_secs(3600));
    queue.push(later).await.unwrap();
    let (task, time) = queue.find_scheduled("later").await.unwrap().unwrap();
    assert_eq!(task.text(), "x");
    assert!(time > task.pushed_at.unwrap());
    assert!(queue.find_scheduled("never").await.unwrap().is_none());
}

/// A disk that is full, a store that is away: what was done and cannot be recorded is done again, and never given
/// up for that.
#[tokio::test]
async fn trouble_with_the_store_is_no_failure_of_the_task() {
    use leasehold_testkit::gate::{Gated, Verb};
    let gated = Arc::new(Gated::new(Arc::new(Memory::new(Env::system()))));
    let settings = QueueSettings { max_attempts: 1, ..quick() };
    let queue = Queue::create(&over(gated.clone()), "q", settings).await.unwrap();
    push(&queue, "x").await;
    let worker = queue.worker("w");
    for _ in 0..12 {
        gated.fail(Verb::Put, "/completed/", ErrorKind::Unavailable);
    }
    let mut unrecorded = 0;
    loop {
        let task = next(&worker).await;
        assert_eq!(task.attempt(), 1);
        match task.ack().await {
            Ok(acked) => break assert_eq!(acked, Acked::First),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Unavailable),
        }
        unrecorded += 1;
    }
    assert!(unrecorded > 1, "{unrecorded}");
}
