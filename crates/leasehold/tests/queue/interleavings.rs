//! Interleavings that break careless queues, each driven step by step. Numbers are rows of the
//! table of known mistakes.

use std::sync::Arc;
use std::time::Duration;

use leasehold::queue::{Acked, NewTask, Outcome, Queue, QueueSettings, Task};
use leasehold::store::memory::Memory;
use leasehold::{Put, Version, When, Write, env::Env};
use leasehold_testkit::conformance::over;
use leasehold_testkit::faulty::{Broken, Fault, Faulty};
use leasehold_testkit::gate::{Gated, Verb};

use super::*;

async fn body(queue: &Queue, name: &str) -> Vec<u8> {
    queue.store().get(&key(name)).await.unwrap().unwrap().body.to_vec()
}

async fn write(queue: &Queue, name: &str, body: Vec<u8>) -> Version {
    match queue.store().put(&key(name), body.into(), Write::any()).await.unwrap() {
        Put::Stored(version) => version,
        other => panic!("{other:?}"),
    }
}

const LEASE: &str = "queues/q/pending/t/lease.json";
const TASK: &str = "queues/q/pending/t/task.json";

/// A claims `t` and is paused; B takes it over, as it may after the ttl.
async fn overtaken(queue: &Queue) -> (Task, Task) {
    let a = next(&queue.worker("a")).await;
    // A's lease as it would look after a ttl without a heartbeat.
    write(queue, LEASE, br#"{"worker_id":"a","ttl_ms":1}"#.to_vec()).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    let b = next(&queue.worker("b")).await;
    assert_eq!(b.id(), "t");
    (a, b)
}

/// Every write of push, claim, ack and clean-up in turn: lost on the way there, lost on the way back,
/// late, or contended.
#[tokio::test]
async fn row_3_and_4_no_lost_answer_loses_or_doubles_a_task() {
    use Fault::{Contended, Delayed, LostAnswer, LostRequest};
    for fault in [LostRequest, LostAnswer, Delayed, Contended] {
        for position in 0..6 {
            let memory = Arc::new(Memory::new(Env::system()));
            Queue::create(&over(memory.clone()), "q", quick()).await.unwrap();
            let faults = vec![Fault::None; position].into_iter().chain([fault]);
            let store = over(Arc::new(Faulty::writes(memory, faults)));
            let queue = Queue::open(&store, "q").await.unwrap().unwrap();
            let pushed = queue.push(NewTask::text("x").id("t")).await.unwrap();
            let case = format!("{fault:?} at {position}");
            assert_eq!(pushed.outcome, Outcome::New, "{case}");
            let worker = until_empty(&queue, "w");
            let mut first = 0;
            while let Some(task) = worker.next().await.unwrap() {
                assert_eq!((task.id(), task.attempt()), ("t", 1), "{case}");
                first += usize::from(task.ack().await.unwrap() == Acked::First);
            }
            assert_eq!(first, 1, "{case}");
            assert_eq!(left(&store).await, ["queues/q/completed/t.json"], "{case}");
        }
    }
}

#[tokio::test]
async fn row_6_an_ack_after_a_takeover_completes_once_and_deletes_nothing_unfinished() {
    for place in everywhere("row6") {
        let queue = queue(&place).await;
        push(&queue, "t").await;
        let (a, b) = overtaken(&queue).await;
        // A wakes up and has done the work after all: it is the first to record it.
        assert_eq!(a.ack_text("by a").await.unwrap(), Acked::First, "{}", place.name);
        // B's work is in vain, and it is told.
        assert_eq!(b.ack_text("by b").await.unwrap(), Acked::Again);
        let receipt = queue.receipt("t").await.unwrap().unwrap();
        assert_eq!(receipt.result.unwrap().get(), "\"by a\"");
        assert_eq!(left(&place.store).await, ["queues/q/completed/t.json"], "{}", place.name);
    }
}

#[tokio::test]
async fn row_6_a_nack_after_a_takeover_changes_nothing() {
    for place in everywhere("row6n") {
        let queue = queue(&place).await;
        push(&queue, "t").await;
        let (a, b) = overtaken(&queue).await;
        a.nack("too late", None).await.unwrap_err();
        b.check().unwrap();
        assert_eq!(b.ack().await.unwrap(), Acked::First);
    }
}

#[tokio::test]
async fn row_6_without_receipts_a_late_ack_deletes_nothing() {
    for place in [memory(), directory()] {
        let settings = QueueSettings { receipts: false, ..quick() };
        let queue = Queue::create(&place.store, "q", settings).await.unwrap();
        push(&queue, "t").await;
        let (a, b) = overtaken(&queue).await;
        // A learns at its next heartbeat, or when it asks, that it lost the task.
        tokio::time::sleep(Duration::from_millis(700)).await;
        a.ack().await.unwrap_err();
        assert!(queue.store().get(&key(TASK)).await.unwrap().is_some());
        assert_eq!(b.ack().await.unwrap(), Acked::First);
    }
}

#[tokio::test]
async fn row_7_a_claim_from_an_old_listing_runs_nothing() {
    for place in everywhere("row7") {
        let queue = queue(&place).await;
        for n in 0..30 {
            push(&queue, &format!("t{n}")).await;
        }
        // A has listed all of them, and claims one by one.
        let a = until_empty(&queue, "a");
        let mut done = vec![next(&a).await];
        // B does everything else meanwhile.
        let b = drain_all_but(&queue, done[0].id()).await;
        assert_eq!(b, 29, "{}", place.name);
        done.pop().unwrap().ack().await.unwrap();
        assert!(a.next().await.unwrap().is_none(), "{}", place.name);
        let kept = left(&place.store).await;
        assert!(kept.iter().all(|key| key.contains("/completed/")), "{kept:?}");
    }
}

async fn drain_all_but(queue: &Queue, id: &str) -> usize {
    let worker = queue.worker("b");
    let mut done = 0;
    while let Ok(task) = tokio::time::timeout(Duration::from_millis(1500), worker.next()).await {
        let task = task.unwrap().unwrap();
        assert_ne!(task.id(), id);
        task.ack().await.unwrap();
        done += 1;
    }
    done
}

#[tokio::test]
async fn row_21_a_create_that_lands_late_is_cleaned_up_by_the_receipt() {
    for place in everywhere("row21") {
        let queue = queue(&place).await;
        push(&queue, "t").await;
        let ghost = body(&queue, TASK).await;
        assert_eq!(drain(&queue, "w").await, ["t"]);
        // The network delivers the first push once more.
        write(&queue, TASK, ghost).await;
        // It may run elsewhere, but it is not completed twice, and then it is gone.
        let elsewhere = Queue::open(&place.again(), "q").await.unwrap().unwrap();
        let worker = elsewhere.worker("w");
        assert_eq!(next(&worker).await.ack().await.unwrap(), Acked::Again);
        assert_eq!(left(&place.store).await, ["queues/q/completed/t.json"], "{}", place.name);
        // A sweep would have done as well.
        let ghost = br#"{"incarnation":"x","payload":1}"#.to_vec();
        let receipt = String::from_utf8(body(&queue, "queues/q/completed/t.json").await).unwrap();
        let incarnation = receipt.split("\"incarnation\":\"").nth(1).unwrap();
        let incarnation = incarnation.split('"').next().unwrap();
        let ghost =
            String::from_utf8(ghost).unwrap().replace("\"x\"", &format!("\"{incarnation}\""));
        write(&queue, TASK, ghost.into_bytes()).await;
        assert_eq!(queue.sweep().await.unwrap().tasks, 1);
        assert_eq!(left(&place.store).await, ["queues/q/completed/t.json"]);
    }
}

#[tokio::test]
async fn row_22_a_slow_worker_does_not_delete_what_was_pushed_again() {
    for place in everywhere("row22") {
        let queue = queue(&place).await;
        push(&queue, "t").await;
        let (a, b) = overtaken(&queue).await;
        b.ack().await.unwrap();
        // The receipt's time is over, and the user pushes the same name again.
        queue.purge_receipts(Duration::ZERO).await.unwrap();
        let pushed = queue.push(NewTask::text("new").id("t")).await.unwrap();
        assert_eq!(pushed.outcome, Outcome::New);
        let _ = a.ack().await.unwrap();
        let task = String::from_utf8(body(&queue, TASK).await).unwrap();
        assert!(task.contains("\"new\""), "{}: {task}", place.name);
        // A's receipt is about another push: the new one is still to be done.
        let worker = queue.worker("w");
        let task = next(&worker).await;
        assert_eq!(task.text(), "new");
        assert_eq!(task.ack_text("new").await.unwrap(), Acked::First);
        assert_eq!(left(&place.store).await, ["queues/q/completed/t.json"]);
    }
}

#[tokio::test]
async fn row_23_a_half_done_dead_letter_does_not_delete_the_retry() {
    for place in everywhere("row23") {
        let queue = queue(&place).await;
        push(&queue, "t").await;
        let b = next(&queue.worker("b")).await;
        let old = place.store.get(&key(TASK)).await.unwrap().unwrap();
        b.fail("broken").await.unwrap();
        // As if B had been paused before it deleted the task, and the user retried meanwhile.
        write(&queue, TASK, old.body.to_vec()).await;
        assert!(queue.retry("t").await.unwrap());
        // B goes on: it deletes only what it had read.
        let deleted = place.store.delete_version(&key(TASK), &old.meta.version).await.unwrap();
        assert!(matches!(deleted, leasehold::Delete::Refused), "{}", place.name);
        let worker = queue.worker("w");
        let task = next(&worker).await;
        assert_eq!((task.id(), task.attempt()), ("t", 1));
        task.ack().await.unwrap();
        assert!(queue.dead_letter("t").await.unwrap().is_none());
    }
}

#[tokio::test]
async fn a_push_is_not_taken_for_what_was_given_up_and_not_cleaned_up() {
    for place in everywhere("given-up") {
        let queue = queue(&place).await;
        push(&queue, "t").await;
        let b = next(&queue.worker("b")).await;
        let old = body(&queue, TASK).await;
        b.fail("broken").await.unwrap();
        // As if B had died before it deleted the task.
        write(&queue, TASK, old).await;
        let pushed = queue.push(NewTask::text("new").id("t")).await.unwrap();
        assert_eq!(pushed.outcome, Outcome::New, "{}", place.name);
        let task = next(&queue.worker("w")).await;
        assert_eq!(task.text(), "new");
        task.ack().await.unwrap();
    }
}

#[tokio::test]
async fn row_24_a_living_lease_is_not_swept_and_a_dead_one_without_a_task_is() {
    for place in everywhere("row24") {
        let queue = queue(&place).await;
        push(&queue, "t").await;
        let held = next(&queue.worker("w")).await;
        // On another page than its task, it would look like this to a sweep.
        let task = body(&queue, TASK).await;
        let _ = place.store.delete(&key(TASK)).await.unwrap();
        assert_eq!(queue.sweep().await.unwrap().leases, 0, "{}", place.name);
        write(&queue, TASK, task).await;
        held.check().unwrap();
        held.ack().await.unwrap();
        let orphan = br#"{"worker_id":"gone","ttl_ms":1,"state":"released"}"#;
        write(&queue, "queues/q/pending/u/lease.json", orphan.to_vec()).await;
        tokio::time::sleep(Duration::from_millis(3200)).await;
        assert_eq!(queue.sweep().await.unwrap().leases, 1, "{}", place.name);
        assert_eq!(left(&place.store).await, ["queues/q/completed/t.json"]);
    }
}

#[tokio::test]
async fn a_crash_between_receipt_and_clean_up_is_finished_by_others() {
    for place in everywhere("half") {
        let queue = queue(&place).await;
        push(&queue, "t").await;
        let task = body(&queue, TASK).await;
        let held = next(&queue.worker("w")).await;
        let lease = body(&queue, LEASE).await;
        held.ack().await.unwrap();
        // The receipt is there, and so is all the rest.
        write(&queue, TASK, task).await;
        let lease = String::from_utf8(lease).unwrap().replace("\"ttl_ms\":1000", "\"ttl_ms\":1");
        let mut lease: serde_json::Value = serde_json::from_str(&lease).unwrap();
        lease.as_object_mut().unwrap().remove("boot_id");
        write(&queue, LEASE, serde_json::to_vec(&lease).unwrap()).await;
        tokio::time::sleep(Duration::from_millis(2500)).await;
        assert!(drain(&queue, "heir").await.is_empty(), "{}: done again", place.name);
        assert_eq!(left(&place.store).await, ["queues/q/completed/t.json"], "{}", place.name);
    }
}

#[tokio::test]
async fn a_store_without_conditional_deletes_works_too() {
    let memory = Arc::new(Memory::new(Env::system()));
    let store = over(Arc::new(Faulty::broken(memory, Broken::IgnoresDeleteMatch)));
    let queue = Queue::create(&store, "q", quick()).await.unwrap();
    assert!(
        store
            .limits()
            .await
            .unwrap()
            .iter()
            .any(|limit| { String::from(limit.clone()) == "conditional-delete" })
    );
    for n in 0..10 {
        push(&queue, &format!("t{n}")).await;
    }
    assert_eq!(drain(&queue, "w").await.len(), 10);
    let kept = left(&store).await;
    assert!(kept.iter().all(|key| key.contains("/completed/")), "{kept:?}");
}

#[tokio::test]
async fn a_listing_that_is_old_does_no_harm() {
    let place = memory();
    let queue = queue(&place).await;
    push(&queue, "t").await;
    // A task that stands in an old listing, was done, and pushed again under its name meanwhile.
    assert_eq!(drain(&queue, "w").await, ["t"]);
    let when = When::Absent;
    let late = Write::when(when, leasehold::Proof::Bytes);
    let put = place.store.put(&key(LEASE), r#"{"worker_id":"late"}"#.into(), late).await.unwrap();
    assert!(matches!(put, Put::Stored(_)), "an old listing makes somebody claim what is gone");
    assert!(drain(&queue, "w").await.is_empty());
    tokio::time::sleep(Duration::from_millis(3100)).await;
    queue.sweep().await.unwrap();
    assert_eq!(left(&place.store).await, ["queues/q/completed/t.json"]);
}

/// A promotes a scheduled task and is slow: others promote, do and remove it between A's look at the
/// receipt and its write, so the task is back after its receipt. Who saw the receipt does not start it
/// again, and a promotion that finds the receipt afterwards takes the task away.
#[tokio::test]
async fn row_21_a_task_that_comes_back_is_not_started_by_who_saw_it_completed() {
    for place in everywhere("row21-back") {
        let queue = queue(&place).await;
        push(&queue, "t").await;
        let task = body(&queue, TASK).await;
        let worker = until_empty(&queue, "w");
        let done = next(&worker).await;
        assert_eq!(done.ack().await.unwrap(), Acked::First);
        // The late write.
        write(&queue, TASK, task.clone()).await;
        assert!(worker.next().await.unwrap().is_none(), "{}", place.name);
        assert_eq!(left(&place.store).await, ["queues/q/completed/t.json"], "{}", place.name);
        // Another process does not know, and finds out when it acks.
        write(&queue, TASK, task.clone()).await;
        let other = Queue::open(&place.again(), "q").await.unwrap().unwrap();
        let again = next(&other.worker("other")).await;
        assert_eq!(again.ack().await.unwrap(), Acked::Again, "{}", place.name);
        assert_eq!(left(&place.store).await, ["queues/q/completed/t.json"], "{}", place.name);
    }
}

/// The answer to a push is lost, and the task is done, or given up, before the pusher looks for it. It is
/// not sent again: that would be another task for a moment, which somebody may claim.
#[tokio::test]
async fn a_push_that_was_done_meanwhile_is_not_sent_again() {
    for (what, part) in [("chosen", "task.json"), ("given", "task.json"), ("bundle", "tasks.jsonl")]
    {
        for fails in [false, true] {
            let memory = Arc::new(Memory::new(Env::system()));
            let settings = QueueSettings { max_attempts: 1, ..quick() };
            let others = Queue::create(&over(memory.clone()), "q", settings).await.unwrap();
            let gate = Arc::new(Gated::new(Arc::new(Faulty::writes(memory, [Fault::LostAnswer]))));
            let queue = Queue::open(&over(gate.clone()), "q").await.unwrap().unwrap();
            let mut looks = gate.stop(Verb::Get, part);
            let push = tokio::spawn(async move {
                match what {
                    "chosen" => queue.push(NewTask::text("x").id("t")).await.map(|it| it.outcome),
                    "given" => queue.push(NewTask::text("x")).await.map(|it| it.outcome),
                    _ => queue.push_bundle(vec![NewTask::text("x")]).await.map(|_| Outcome::New),
                }
            });
            looks.reached().await;
            let worker = until_empty(&others, "w");
            let task = next(&worker).await;
            match fails {
                true => task.fail("broken").await.unwrap(),
                false => drop(task.ack().await.unwrap()),
            }
            assert!(worker.next().await.unwrap().is_none());
            gate.panic(Verb::Put, part);
            looks.go();
            assert_eq!(push.await.unwrap().unwrap(), Outcome::New, "{what} {fails}");
            let left = left(others.store()).await;
            assert!(!left.iter().any(|key| key.contains("pending")), "{what} {fails}: {left:?}");
        }
    }
}
