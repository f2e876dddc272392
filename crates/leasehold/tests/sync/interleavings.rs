//! Interleavings that break careless syncs, each driven step by step. Numbers are rows of the table of
//! known mistakes.

use leasehold::queue::Acked;
use leasehold_testkit::faulty::{Fault, Faulty};
use leasehold_testkit::gate::{Gated, Verb};

use super::*;

/// A sync that takes a task that it does not have for one that was deleted deletes what others have
/// just pushed.
#[tokio::test]
async fn row_14_what_is_not_here_is_not_deleted_there() {
    for bucket in Bucket::everywhere("row14") {
        let queue = bucket.queue().await;
        push(&queue, "old").await;
        let gate = Arc::new(Gated::new(behind(&bucket.client())));
        let node = bucket.node_with("a", over(gate.clone())).await;
        node.down().await;
        assert_eq!(drain(&node.queue).await, ["old"]);
        // The node is about to list, and has nothing; somebody pushes.
        let mut pause = gate.stop(Verb::List, "queues/q/");
        let replica = node.replica.clone();
        let syncing = tokio::spawn(async move {
            replica.up("q").await.unwrap();
            replica.down("q").await.unwrap();
        });
        pause.reached().await;
        push(&queue, "new").await;
        pause.go();
        syncing.await.unwrap();
        // And once more while it syncs.
        push(&queue, "newer").await;
        node.up().await;
        for id in ["new", "newer"] {
            assert!(queue.find(id).await.unwrap().is_some(), "{}: {id}", bucket.name());
        }
        node.down().await;
        assert_eq!(drain(&node.queue).await, ["new", "newer"], "{}", bucket.name());
    }
}

/// A sync after an ack puts the task, or its lease, into the bucket again.
#[tokio::test]
async fn row_15_what_was_acked_does_not_come_back() {
    for bucket in Bucket::everywhere("row15") {
        let queue = bucket.queue().await;
        push(&queue, "t").await;
        let (a, b) = (bucket.node("a").await, bucket.node("b").await);
        a.down().await;
        b.down().await;
        // A has it, and the bucket knows; B has done it, and its receipt is first.
        let on_a = next(&a.queue).await;
        assert_eq!(a.up().await.held, 1);
        next(&b.queue).await.ack_text("b").await.unwrap();
        assert_eq!(b.up().await.completed, 1);
        let only = ["queues/q/completed/t.json"];
        // B's clean-up knew nothing of A's lease.
        for _ in 0..2 {
            a.up().await;
            assert!(queue.find("t").await.unwrap().is_none(), "{}", bucket.name());
        }
        let lost = tokio::time::timeout(Duration::from_secs(5), on_a.lost().cancelled_owned());
        lost.await.expect("whoever does it in vain is stopped");
        // It had just finished.
        assert_eq!(on_a.ack_text("a").await.unwrap(), Acked::Again);
        a.up().await;
        a.down().await;
        b.down().await;
        b.up().await;
        assert_eq!(keys(queue.store()).await, only, "{}", bucket.name());
        assert_eq!(queue.receipt("t").await.unwrap().unwrap().result.unwrap().get(), "\"b\"");
        assert!(drain(&a.queue).await.is_empty() && drain(&b.queue).await.is_empty());
        assert_eq!(a.replica.status("q").await.unwrap().duplicates, 1);
    }
}

/// A copy that came down before the task was done elsewhere is removed, by the receipt.
#[tokio::test]
async fn row_15_a_listing_from_before_an_ack_brings_nothing_back() {
    for bucket in Bucket::everywhere("row15l") {
        let queue = bucket.queue().await;
        push(&queue, "t").await;
        push(&queue, "u").await;
        let gate = Arc::new(Gated::new(behind(&bucket.client())));
        let node = bucket.node_with("a", over(gate.clone())).await;
        let mut pause = gate.stop(Verb::Get, "pending/t/task.json");
        let replica = node.replica.clone();
        let syncing = tokio::spawn(async move { replica.down("q").await.unwrap() });
        pause.reached().await;
        let mut done = drain(&queue).await;
        done.sort();
        assert_eq!(done, ["t", "u"]);
        pause.go();
        let down = syncing.await.unwrap();
        assert!(down.new <= 1, "{down:?}");
        node.down().await;
        assert!(drain(&node.queue).await.is_empty(), "{}", bucket.name());
        node.up().await;
        let left = keys(queue.store()).await;
        assert!(left.iter().all(|key| key.contains("/completed/")), "{left:?}");
    }
}

/// Whatever happens while a sync tells of something is noted again, and told of next time.
#[tokio::test]
async fn what_happens_while_it_is_told_is_told_next_time() {
    for bucket in [Bucket::memory(), Bucket::S3("ministack", "meanwhile".into())] {
        let queue = bucket.queue().await;
        let gate = Arc::new(Gated::new(behind(&bucket.client())));
        let node = bucket.node_with("a", over(gate.clone())).await;
        push(&node.queue, "t").await;
        // The push is being told; the task is claimed and done meanwhile.
        let mut pause = gate.stop(Verb::Put, "pending/t/task.json");
        let replica = node.replica.clone();
        let syncing = tokio::spawn(async move { replica.up("q").await.unwrap() });
        pause.reached().await;
        assert_eq!(drain(&node.queue).await, ["t"]);
        pause.go();
        let up = syncing.await.unwrap();
        assert_eq!((up.pushed, up.completed, up.left), (1, 0, 1), "{up:?}");
        assert!(queue.find("t").await.unwrap().is_some());
        let up = node.up().await;
        assert_eq!((up.completed, up.left), (1, 0), "{up:?}");
        assert_eq!(keys(queue.store()).await, ["queues/q/completed/t.json"]);
    }
}

/// Every write of a sync in turn: lost on the way there, lost on the way back, late, or contended.
#[tokio::test]
async fn row_3_and_4_no_lost_answer_loses_or_doubles_anything() {
    use Fault::{Contended, Delayed, LostAnswer, LostRequest};
    for fault in [LostRequest, LostAnswer, Delayed, Contended] {
        for position in 0..9 {
            let bucket = Bucket::memory();
            let queue = bucket.queue().await;
            push(&queue, "t").await;
            push(&queue, "h").await;
            let faults = vec![Fault::None; position].into_iter().chain([fault]);
            let node = bucket.node("a").await;
            node.down().await;
            let held = next(&node.queue).await;
            assert_eq!(held.id(), "h");
            assert_eq!(drain_one(&node.queue).await, "t");
            node.queue.push(NewTask::text("x").id("p")).await.unwrap();
            let client = over(Arc::new(Faulty::writes(behind(&bucket.client()), faults)));
            let replica = node.again(client).await;
            let case = format!("{fault:?} at {position}");
            let up = replica.up("q").await.unwrap();
            assert_eq!(
                (up.completed, up.held, up.duplicates, up.lost),
                (1, 1, 0, 0),
                "{case}: {up:?}"
            );
            held.ack().await.unwrap();
            let up = replica.up("q").await.unwrap();
            assert_eq!((up.completed, up.duplicates), (1, 0), "{case}: {up:?}");
            assert_eq!(drain(&queue).await, ["p"], "{case}");
            let left = keys(queue.store()).await;
            let receipts = ["h", "p", "t"].map(|id| format!("queues/q/completed/{id}.json"));
            assert_eq!(left, receipts, "{case}");
        }
    }
}

async fn drain_one(queue: &Queue) -> String {
    let task = next(queue).await;
    let id = task.id().to_owned();
    task.ack().await.unwrap();
    id
}

/// A queue that is switched while it is in use.
#[tokio::test]
async fn a_switch_of_mode_loses_nothing() {
    for bucket in Bucket::everywhere("switch") {
        let queue = bucket.queue().await;
        for n in 0..4 {
            push(&queue, &format!("t{n}")).await;
        }
        let node = bucket.node("a").await;
        node.down().await;
        assert_eq!(
            node.replica.choose("q").await.unwrap().unwrap().store().url(),
            node.queue.store().url()
        );
        let held = next(&node.queue).await;
        let done = drain_one(&node.queue).await;
        push(&node.queue, "offline").await;
        // Strict from now on; the node learns it with its next sync down.
        queue.update(|settings| settings.mode = Mode::Strict).await.unwrap();
        node.down().await;
        assert_eq!(node.queue.refresh().await.unwrap().mode, Mode::Strict);
        let now = node.replica.choose("q").await.unwrap().unwrap();
        assert_eq!(now.store().url(), bucket.client().url());
        // What it holds is finished, and what the outbox has still goes up.
        held.ack().await.unwrap();
        let up = node.up().await;
        assert_eq!((up.completed, up.pushed, up.left), (2, 1, 0), "{}: {up:?}", bucket.name());
        let mut all = drain(&now).await;
        all.push(done);
        assert_eq!(all.len(), 4, "{all:?}");
        assert!(all.contains(&"offline".to_owned()));
        // And back: what was done meanwhile is not done again.
        queue.refresh().await.unwrap();
        queue.update(|settings| settings.mode = Mode::Relaxed).await.unwrap();
        push(&queue, "again").await;
        let again = node.replica.choose("q").await.unwrap().unwrap();
        assert_eq!(again.settings().mode, Mode::Relaxed);
        assert_eq!(drain(&again).await, ["again"], "{}", bucket.name());
        assert_eq!(node.up().await.completed, 1);
        assert_eq!(keys(queue.store()).await.len(), 6);
    }
}

/// A worker whose queue is switched ends, and gives back what it has not handed out.
#[tokio::test]
async fn a_worker_notices_a_switch() {
    let bucket = Bucket::memory();
    let queue = bucket.queue().await;
    queue.push_bundle(vec![NewTask::text("1"), NewTask::text("2")]).await.unwrap();
    let node = bucket.node("a").await;
    node.down().await;
    let worker = Worker::new(vec![node.queue.clone()], WorkerSettings::named("w")).until_switched();
    let first = worker.next().await.unwrap().unwrap();
    queue.update(|settings| settings.mode = Mode::Strict).await.unwrap();
    node.down().await;
    node.queue.refresh().await.unwrap();
    assert!(worker.next().await.unwrap().is_none());
    assert!(worker.was_switched());
    first.ack().await.unwrap();
    let up = node.up().await;
    assert_eq!((up.released, up.left), (1, 0), "{up:?}");
    // The rest is done there: one of two.
    assert_eq!(drain(&queue).await.len(), 1);
}

/// Only the bucket's queue is purged, retried and set.
#[tokio::test]
async fn a_replica_is_not_for_administration() {
    let bucket = Bucket::memory();
    bucket.queue().await;
    let node = bucket.node("a").await;
    assert!(node.queue.purge_pending().await.is_err());
    assert!(node.queue.retry("x").await.is_err());
    assert!(node.queue.pause().await.is_err());
}

/// Clocks hours apart: times in the replica are the bucket's.
#[tokio::test]
async fn a_node_whose_clock_is_hours_off_writes_the_buckets_times() {
    for hours in [-8_i64, 8] {
        let bucket = Bucket::memory();
        let queue = bucket.queue().await;
        push(&queue, "t").await;
        let env = Env::new(Arc::new(super::time::Off { hours }), Arc::new(super::time::Chance));
        let local = over(Arc::new(Memory::new(env.clone())));
        let local = Store::new(behind(&local), env, leasehold::StoreSettings::default()).unwrap();
        let replica = Replica::open(&local, &bucket.client(), "a").await.unwrap();
        let here = replica.join("q").await.unwrap();
        replica.down("q").await.unwrap();
        let task = next(&here).await;
        task.nack("later", Some(Duration::from_millis(300))).await.unwrap();
        assert_eq!(drain(&here).await, ["t"], "a retry is due when it is due");
        here.push(NewTask::text("x").id("mine")).await.unwrap();
        replica.up("q").await.unwrap();
        let there = queue.store().now().await.unwrap();
        let minute = Duration::from_secs(60);
        let near = |time: leasehold::StoreTime| time.since(there).max(there.since(time)) < minute;
        let receipt = queue.receipt("t").await.unwrap().unwrap();
        assert!(near(receipt.completed_at), "{hours}: {receipt:?}");
        let (mine, _) = queue.find("mine").await.unwrap().unwrap();
        assert!(near(mine.pushed_at.unwrap()), "{hours}: {mine:?}");
    }
}

/// A sync tells of a push, the answer is lost, and strict workers do the task, or give it up, before the
/// sync looks: it is not sent again, and it is over here, too.
#[tokio::test]
async fn a_push_that_was_done_while_it_was_told_is_not_sent_again() {
    for (bundle, fails) in [(false, false), (false, true), (true, false), (true, true)] {
        let bucket = Bucket::memory();
        let queue = bucket.queue().await;
        queue.update(|settings| settings.max_attempts = 1).await.unwrap();
        let faulty = Arc::new(Faulty::writes(behind(&bucket.client()), []));
        let gate = Arc::new(Gated::new(faulty.clone()));
        let node = bucket.node_with("a", over(gate.clone())).await;
        let part = match bundle {
            true => {
                node.queue.push_bundle(vec![NewTask::text("x")]).await.unwrap();
                "tasks.jsonl"
            }
            false => {
                node.queue.push(NewTask::text("x")).await.unwrap();
                "task.json"
            }
        };
        faulty.next_put_of(part, vec![Fault::LostAnswer], vec![]);
        let mut looks = gate.stop(Verb::Get, part);
        let replica = node.replica.clone();
        let syncing = tokio::spawn(async move { replica.up("q").await.unwrap() });
        looks.reached().await;
        let strict = Queue::open(&bucket.client(), "q").await.unwrap().unwrap();
        let task = next(&strict).await;
        match fails {
            true => task.fail("broken").await.unwrap(),
            false => drop(task.ack_text("done").await.unwrap()),
        }
        gate.panic(Verb::Put, part);
        looks.go();
        let up = syncing.await.unwrap();
        assert_eq!(up.pushed, 1, "{bundle} {fails}: {up:?}");
        // What failed in a bundle left it: it has a dead letter, and the bundle a receipt.
        let ends = keys(queue.store()).await;
        assert_eq!(ends.len(), if bundle && fails { 2 } else { 1 }, "{ends:?}");
        node.down().await;
        assert!(drain(&node.queue).await.is_empty(), "{bundle} {fails}: done again");
        let up = node.up().await;
        assert_eq!(up.left, 0, "{bundle} {fails}: {up:?}");
        assert_eq!(keys(queue.store()).await, ends, "{bundle} {fails}");
    }
}
