//! What a replica is for.

use leasehold::queue::{Acked, Outcome};

use super::*;

#[tokio::test]
async fn work_goes_down_is_done_and_its_receipts_go_up() {
    for bucket in Bucket::everywhere("updown") {
        let queue = bucket.queue().await;
        for n in 0..5 {
            push(&queue, &format!("t{n}")).await;
        }
        let node = bucket.node("a").await;
        let down = node.down().await;
        assert_eq!((down.new, down.usage.get), (5, 6), "{}: {down:?}", bucket.name());
        let before = node.replica.bucket().usage();
        assert_eq!(drain(&node.queue).await.len(), 5);
        assert_eq!(node.replica.bucket().usage(), before, "working costs nothing");
        let up = node.up().await;
        assert_eq!((up.completed, up.duplicates, up.left), (5, 0, 0), "{up:?}");
        assert_eq!(up.usage.put, 5, "{up:?}");
        assert_eq!(up.usage.get + up.usage.head + up.usage.list, 0, "{}: {up:?}", bucket.name());
        let left = keys(queue.store()).await;
        assert!(left.iter().all(|key| key.contains("/completed/")), "{left:?}");
        assert_eq!(left.len(), 5);
        // Nothing is left to be told, and nothing is asked for that.
        let up = node.up().await;
        assert_eq!(up.usage.requests(), 0);
        let status = node.replica.status("q").await.unwrap();
        assert_eq!((status.outbox, status.duplicates, status.strict_requests), (0, 0, 15));
    }
}

#[tokio::test]
async fn what_is_pushed_offline_is_done_by_others() {
    for bucket in Bucket::everywhere("pushed") {
        let queue = bucket.queue().await;
        let (a, b) = (bucket.node("a").await, bucket.node("b").await);
        push(&a.queue, "chosen").await;
        a.queue.push(NewTask::text("x")).await.unwrap();
        a.queue.push_bundle(vec![NewTask::text("1"), NewTask::text("2")]).await.unwrap();
        assert!(keys(queue.store()).await.is_empty());
        let up = a.up().await;
        assert_eq!((up.pushed, up.left), (3, 0), "{}: {up:?}", bucket.name());
        // The bucket's are here already.
        let down = a.down().await;
        assert_eq!((down.new, down.unchanged, down.missing), (0, 3, 0), "{down:?}");
        assert_eq!(b.down().await.new, 3);
        assert_eq!(drain(&b.queue).await.len(), 4);
        assert_eq!(b.up().await.completed, 3);
        // And the first node does not do them again.
        let down = a.down().await;
        assert_eq!((down.removed, down.set_aside), (3, 0), "{down:?}");
        assert!(drain(&a.queue).await.is_empty());
        assert_eq!(
            a.queue.push(NewTask::text("x").id("chosen")).await.unwrap().outcome,
            Outcome::AlreadyCompleted
        );
    }
}

/// Pushed and done between two syncs: the bucket sees the receipt alone.
#[tokio::test]
async fn what_was_pushed_and_done_here_costs_one_put() {
    for bucket in Bucket::everywhere("here") {
        let queue = bucket.queue().await;
        let node = bucket.node("a").await;
        for _ in 0..3 {
            node.queue.push(NewTask::text("x")).await.unwrap();
        }
        assert_eq!(drain(&node.queue).await.len(), 3);
        let up = node.up().await;
        assert_eq!(
            (up.completed, up.usage.put, up.usage.get),
            (3, 3, 3),
            "{}: {up:?}",
            bucket.name()
        );
        assert_eq!(keys(queue.store()).await.len(), 3);
    }
}

#[tokio::test]
async fn a_held_task_is_left_alone_by_others_and_its_loser_is_stopped() {
    for bucket in Bucket::everywhere("held") {
        let queue = bucket.queue().await;
        push(&queue, "t").await;
        let (a, b) = (bucket.node("a").await, bucket.node("b").await);
        a.down().await;
        b.down().await;
        let (on_a, on_b) = (next(&a.queue).await, next(&b.queue).await);
        // The first lease to reach the bucket.
        assert_eq!(a.up().await.held, 1);
        let up = b.up().await;
        assert_eq!((up.held, up.lost), (0, 1), "{}: {up:?}", bucket.name());
        let lost = tokio::time::timeout(Duration::from_secs(5), on_b.lost().cancelled_owned());
        lost.await.expect("the loser is told");
        drop(on_b);
        assert_eq!(a.up().await.held, 1, "renewed");
        // Nobody of the second node takes it while the first has it.
        let worker = until_empty(&b.queue, "w");
        let waits = tokio::time::timeout(Duration::from_millis(500), worker.next()).await;
        assert!(waits.is_err(), "it is busy, elsewhere");
        assert_eq!(on_a.ack().await.unwrap(), Acked::First);
        assert_eq!(a.up().await.completed, 1);
        assert_eq!(b.down().await.removed, 1);
        assert_eq!(keys(queue.store()).await, ["queues/q/completed/t.json"], "{}", bucket.name());
        for node in [&a, &b] {
            let status = node.replica.status("q").await.unwrap();
            assert_eq!((status.duplicates, status.outbox), (0, 0), "{status:?}");
        }
    }
}

#[tokio::test]
async fn two_nodes_that_do_the_same_task_complete_it_once() {
    for bucket in Bucket::everywhere("twice") {
        let queue = bucket.queue().await;
        push(&queue, "t").await;
        let (a, b) = (bucket.node("a").await, bucket.node("b").await);
        a.down().await;
        b.down().await;
        next(&a.queue).await.ack_text("a").await.unwrap();
        next(&b.queue).await.ack_text("b").await.unwrap();
        assert_eq!(b.up().await.completed, 1);
        let up = a.up().await;
        assert_eq!((up.completed, up.duplicates), (0, 1), "{}: {up:?}", bucket.name());
        assert_eq!(a.replica.status("q").await.unwrap().duplicates, 1);
        // The first counts, here too.
        let receipt = a.queue.receipt("t").await.unwrap().unwrap();
        assert_eq!(receipt.result.unwrap().get(), "\"b\"");
        assert_eq!(a.up().await.usage.requests(), 0);
        assert_eq!(keys(queue.store()).await, ["queues/q/completed/t.json"]);
    }
}

#[tokio::test]
async fn failures_and_dead_letters_go_up() {
    for bucket in Bucket::everywhere("failures") {
        let queue = bucket.queue().await;
        push(&queue, "t").await;
        push(&queue, "u").await;
        let node = bucket.node("a").await;
        node.down().await;
        let hour = Some(Duration::from_secs(3600));
        let task = next(&node.queue).await;
        assert_eq!(task.id(), "t");
        task.nack("not today", hour).await.unwrap();
        next(&node.queue).await.fail("never").await.unwrap();
        let up = node.up().await;
        assert_eq!((up.released, up.given_up, up.left), (1, 1, 0), "{}: {up:?}", bucket.name());
        let (_, held) = queue.find("t").await.unwrap().unwrap();
        let held = held.unwrap();
        assert_eq!((held.state, held.retries), ("retrying", 1), "{}", bucket.name());
        let letter = queue.dead_letter("u").await.unwrap().unwrap();
        assert_eq!((letter.failures, letter.errors[0].error.as_str()), (1, "never"));
        assert!(letter.task.origin.is_none());
        assert!(queue.find("u").await.unwrap().is_none());
        // Another node does not try before its time either.
        let b = bucket.node("b").await;
        assert_eq!(b.down().await.new, 0);
        // Retried in the bucket, it is a new task for everybody.
        assert!(queue.retry("u").await.unwrap());
        assert_eq!(node.down().await.new, 1);
        assert_eq!(drain_one(&node.queue).await, "u");
        assert_eq!(node.up().await.completed, 1);
    }
}

async fn drain_one(queue: &Queue) -> String {
    let task = next(queue).await;
    let id = task.id().to_owned();
    task.ack().await.unwrap();
    id
}

#[tokio::test]
async fn what_a_dead_node_had_is_taken_over() {
    for bucket in Bucket::everywhere("dead") {
        let queue = bucket.queue().await;
        push(&queue, "t").await;
        let (a, b) = (bucket.node("a").await, bucket.node("b").await);
        a.down().await;
        let task = next(&a.queue).await;
        a.up().await;
        // Young: not even fetched.
        assert_eq!(b.down().await.new, 0);
        tokio::time::sleep(Duration::from_secs(6)).await;
        let down = b.down().await;
        assert_eq!(down.new, 1, "{}: {down:?}", bucket.name());
        let again = next(&b.queue).await;
        assert_eq!(again.attempt(), 2, "a crash counts");
        assert_eq!(b.up().await.held, 1);
        // The first node is back, and learns that it is too late.
        assert_eq!(a.up().await.lost, 1, "{}", bucket.name());
        again.ack().await.unwrap();
        assert_eq!(b.up().await.completed, 1);
        drop(task);
    }
}

#[tokio::test]
async fn delayed_tasks_are_told_and_done_once() {
    for bucket in Bucket::everywhere("delayed") {
        let queue = bucket.queue().await;
        let node = bucket.node("a").await;
        let soon = NewTask::text("x").id("later").delay(Duration::from_millis(1500));
        node.queue.push(soon).await.unwrap();
        let up = node.up().await;
        assert_eq!((up.pushed, up.left), (1, 0), "{}: {up:?}", bucket.name());
        assert!(keys(queue.store()).await[0].contains("/scheduled/"));
        let task = next(&node.queue).await;
        // Here it is being done, and there it waits for its time, which nobody has looked for.
        assert_eq!(node.up().await.held, 1);
        let down = node.down().await;
        assert_eq!(down.set_aside, 0, "{down:?}");
        task.ack().await.unwrap();
        node.up().await;
        // A bucket tells whole seconds.
        tokio::time::sleep(Duration::from_millis(1100)).await;
        node.down().await;
        assert!(drain(&node.queue).await.is_empty());
        assert_eq!(
            keys(queue.store()).await,
            ["queues/q/completed/later.json"],
            "{}",
            bucket.name()
        );
    }
}

#[tokio::test]
async fn what_was_purged_in_the_bucket_is_set_aside() {
    for bucket in Bucket::everywhere("purged") {
        let queue = bucket.queue().await;
        push(&queue, "t").await;
        push(&queue, "u").await;
        let node = bucket.node("a").await;
        node.down().await;
        let task = next(&node.queue).await;
        assert_eq!(queue.purge_pending().await.unwrap(), 2);
        let up = node.up().await;
        assert_eq!((up.held, up.lost), (0, 0), "{up:?}");
        let down = node.down().await;
        assert_eq!((down.set_aside, down.removed), (1, 0), "{}: {down:?}", bucket.name());
        assert_eq!(node.replica.status("q").await.unwrap().set_aside, 1);
        // What ran runs to its end, and is recorded.
        task.ack().await.unwrap();
        assert_eq!(node.up().await.completed, 1);
        assert!(drain(&node.queue).await.is_empty());
        assert_eq!(keys(queue.store()).await, ["queues/q/completed/t.json"]);
    }
}

#[tokio::test]
async fn tasks_that_leave_a_bundle_are_known_before_it_is_over() {
    for bucket in Bucket::everywhere("bundle") {
        let queue = bucket.queue().await;
        let tasks = (0..4).map(|n| NewTask::text(&n.to_string())).collect();
        queue.push_bundle(tasks).await.unwrap();
        let node = bucket.node("a").await;
        assert_eq!(node.down().await.new, 1);
        let worker = node.queue.worker("w");
        for _ in 0..4 {
            let task = worker.next().await.unwrap().unwrap();
            match task.text().as_str() {
                "1" => drop(task.nack("again", Some(Duration::from_secs(3600))).await.unwrap()),
                "2" => task.fail("never").await.unwrap(),
                _ => drop(task.ack().await.unwrap()),
            }
        }
        let up = node.up().await;
        assert_eq!(
            (up.completed, up.given_up, up.pushed, up.left),
            (1, 1, 1, 0),
            "{}: {up:?}",
            bucket.name()
        );
        let left = keys(queue.store()).await;
        assert_eq!(left.len(), 4, "{left:?}");
        assert!(left.iter().any(|key| key.ends_with(".1/task.json")), "{left:?}");
        assert!(left.iter().any(|key| key.ends_with(".1/lease.json")), "{left:?}");
        let status = queue.status(10).await.unwrap();
        assert_eq!((status.counts.free, status.counts.leased, status.counts.failed), (0, 1, 1));
    }
}

/// A chosen name is one task, wherever it is pushed.
#[tokio::test]
async fn a_name_that_two_nodes_chose_is_one_task() {
    for bucket in Bucket::everywhere("name") {
        let queue = bucket.queue().await;
        let (a, b) = (bucket.node("a").await, bucket.node("b").await);
        for node in [&a, &b] {
            push(&node.queue, "t").await;
        }
        // Done by both, before either told of it: one run too many, and one receipt.
        assert_eq!(drain(&a.queue).await, ["t"]);
        assert_eq!(drain(&b.queue).await, ["t"]);
        assert_eq!(a.up().await.completed, 1);
        let up = b.up().await;
        assert_eq!((up.completed, up.duplicates), (0, 1), "{}: {up:?}", bucket.name());
        assert_eq!(keys(queue.store()).await, ["queues/q/completed/t.json"]);
        // Pushed by both, done by neither.
        for node in [&a, &b] {
            push(&node.queue, "u").await;
        }
        assert_eq!(a.up().await.pushed, 1);
        let up = b.up().await;
        assert_eq!((up.pushed, up.left), (0, 0), "{up:?}");
        assert_eq!(b.down().await.new, 1, "the first one's");
        assert_eq!(drain(&b.queue).await, ["u"]);
        assert_eq!(b.up().await.completed, 1);
        assert_eq!(a.down().await.removed, 1);
    }
}

#[tokio::test]
async fn strict_workers_and_relaxed_nodes_share_a_queue() {
    for bucket in Bucket::everywhere("mixed") {
        let queue = bucket.queue().await;
        for n in 0..10 {
            push(&queue, &format!("t{n}")).await;
        }
        let node = bucket.node("a").await;
        node.down().await;
        let strict = next(&queue).await;
        let mut done = drain(&node.queue).await;
        assert_eq!(done.len(), 10);
        strict.ack().await.unwrap();
        let up = node.up().await;
        assert_eq!((up.completed, up.duplicates), (9, 1), "{}: {up:?}", bucket.name());
        assert!(drain(&queue).await.is_empty());
        done.sort();
        done.dedup();
        assert_eq!(done.len(), 10);
        assert_eq!(keys(queue.store()).await.len(), 10, "{}", bucket.name());
    }
}

/// A node gets back what it pushed itself and lost to another, once that is gone.
#[tokio::test]
async fn what_was_lost_to_a_node_that_died_comes_back() {
    for bucket in Bucket::everywhere("back") {
        bucket.queue().await;
        let (a, b) = (bucket.node("a").await, bucket.node("b").await);
        push(&a.queue, "t").await;
        a.up().await;
        b.down().await;
        let on_b = next(&b.queue).await;
        b.up().await;
        let on_a = next(&a.queue).await;
        assert_eq!(a.up().await.lost, 1, "{}", bucket.name());
        drop(on_a);
        assert_eq!(a.down().await.opened, 0);
        // Nobody tells of B's claim any more.
        tokio::time::sleep(Duration::from_secs(6)).await;
        let down = a.down().await;
        assert_eq!(down.opened, 1, "{}: {down:?}", bucket.name());
        let task = next(&a.queue).await;
        assert!(task.attempt() > 1);
        task.ack().await.unwrap();
        assert_eq!(a.up().await.completed, 1, "{}", bucket.name());
        drop(on_b);
    }
}
