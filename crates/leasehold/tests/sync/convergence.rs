//! Ways in which a replica could stay apart from the bucket for good: each must end.

use leasehold::queue::Outcome;

use super::*;

/// A fleet whose clock passes days in a moment.
pub struct Fleet {
    pub clock: super::time::Fast,
    pub bucket: Memory,
}

impl Fleet {
    pub fn new() -> Self {
        let clock = super::time::Fast::default();
        let bucket = Memory::new(clock.env());
        Self { clock, bucket }
    }

    fn open(&self, memory: Memory) -> Store {
        self.open_shared(Arc::new(memory))
    }

    pub fn open_shared(&self, memory: Arc<Memory>) -> Store {
        Store::new(memory, self.clock.env(), leasehold::StoreSettings::default()).unwrap()
    }

    pub async fn queue(&self) -> Queue {
        let store = self.open(self.bucket.client(self.clock.env()));
        Queue::open_or_create(&store, "q", Some(relaxed())).await.unwrap()
    }

    async fn node(&self, name: &str) -> (Replica, Queue) {
        let bucket = self.open(self.bucket.client(self.clock.env()));
        bucket.init().await.unwrap();
        let local = self.open(Memory::new(self.clock.env()));
        let replica = Replica::open(&local, &bucket, name).await.unwrap();
        let queue = replica.join("q").await.unwrap();
        (replica, queue)
    }

    pub async fn sleep(&self, span: Duration) {
        self.clock.env().clock().sleep(span).await;
    }

    /// Longer than a receipt is kept.
    async fn a_while(&self) {
        self.sleep(QueueSettings::default().retention + Duration::from_secs(60)).await;
    }

    async fn next(&self, queue: &Queue) -> Task {
        let worker = queue.worker("w");
        tokio::select! {
            task = worker.next() => task.unwrap().unwrap(),
            () = self.sleep(Duration::from_secs(600)) => panic!("nobody here may have it"),
        }
    }
}

/// An entry for the push must not be what keeps the receipt of the last one: then nobody could ever
/// push it again.
#[tokio::test]
async fn a_name_can_be_pushed_again_once_its_receipt_is_past_its_time() {
    let fleet = Fleet::new();
    let test = async {
        let queue = fleet.queue().await;
        let (a, here) = fleet.node("a").await;
        push(&here, "t").await;
        fleet.next(&here).await.ack().await.unwrap();
        a.up("q").await.unwrap();
        fleet.a_while().await;
        let again = here.push(NewTask::text("x").id("t")).await.unwrap();
        assert_eq!(again.outcome, Outcome::New);
        fleet.next(&here).await.ack().await.unwrap();
        let up = a.up("q").await.unwrap();
        assert_eq!((up.completed, up.duplicates), (1, 0), "{up:?}");
        let receipt = queue.receipt("t").await.unwrap().unwrap();
        assert_eq!(Some(receipt.incarnation), again.incarnation);
    };
    fleet.clock.pass(test).await;
}

/// A push of what was done before is no push: nothing is told, and nothing counted.
#[tokio::test]
async fn a_push_of_what_was_done_costs_nothing() {
    let bucket = Bucket::memory();
    bucket.queue().await;
    let node = bucket.node("a").await;
    push(&node.queue, "t").await;
    drain(&node.queue).await;
    assert_eq!(node.up().await.completed, 1);
    let again = node.queue.push(NewTask::text("x").id("t")).await.unwrap();
    assert_eq!(again.outcome, Outcome::AlreadyCompleted);
    let up = node.up().await;
    assert_eq!((up.completed, up.usage.requests()), (0, 0), "{up:?}");
}

/// A receipt of an earlier push that nobody has swept yet is as good as none: strict mode would have
/// taken the new push.
#[tokio::test]
async fn a_result_is_not_dropped_for_a_receipt_that_is_past_its_time() {
    let fleet = Fleet::new();
    let test = async {
        let queue = fleet.queue().await;
        let (a, here) = fleet.node("a").await;
        push(&queue, "t").await;
        fleet.next(&queue).await.ack().await.unwrap();
        fleet.a_while().await;
        let again = here.push(NewTask::text("x").id("t")).await.unwrap();
        assert_eq!(again.outcome, Outcome::New);
        fleet.next(&here).await.ack_text("second").await.unwrap();
        let up = a.up("q").await.unwrap();
        assert_eq!((up.completed, up.duplicates), (1, 0), "{up:?}");
        let receipt = queue.receipt("t").await.unwrap().unwrap();
        assert_eq!(receipt.result.unwrap().get(), "\"second\"");
    };
    fleet.clock.pass(test).await;
}

/// One that lost its claim and finished all the same leaves the lease behind that stands for the
/// other's, without a task.
#[tokio::test]
async fn a_lease_of_others_that_was_left_alone_does_not_keep_the_next_push_away() {
    // Pushed in the bucket, pushed here; after the end was told, and before.
    for (pushed_here, told) in [(false, false), (false, true), (true, true)] {
        let case = format!("pushed here: {pushed_here}, told: {told}");
        let fleet = Fleet::new();
        let test = async {
            let queue = fleet.queue().await;
            push(&queue, "t").await;
            let ((a, on_a), (b, on_b)) = (fleet.node("a").await, fleet.node("b").await);
            a.down("q").await.unwrap();
            b.down("q").await.unwrap();
            let (task_a, task_b) = (fleet.next(&on_a).await, fleet.next(&on_b).await);
            b.up("q").await.unwrap();
            assert_eq!(a.up("q").await.unwrap().lost, 1, "{case}");
            let seen = key("queues/q/pending/t/lease.json");
            // The loser had just finished.
            task_a.ack().await.unwrap();
            task_b.ack().await.unwrap();
            assert!(a.local().head(&seen).await.unwrap().is_some(), "{case}");
            b.up("q").await.unwrap();
            if told {
                a.up("q").await.unwrap();
                assert!(a.local().head(&seen).await.unwrap().is_none(), "{case}");
            }
            fleet.a_while().await;
            a.up("q").await.unwrap();
            let on = if pushed_here { &on_a } else { &queue };
            let again = on.push(NewTask::text("x").id("t")).await.unwrap();
            assert_eq!(again.outcome, Outcome::New, "{case}");
            a.up("q").await.unwrap();
            a.down("q").await.unwrap();
            let task = fleet.next(&on_a).await;
            assert_eq!(Some(task.incarnation()), again.incarnation.as_deref(), "{case}");
        };
        fleet.clock.pass(test).await;
    }
}

/// What was lost to somebody who then lets go as the seeds' clients do, by deleting the lease, looks in
/// the bucket as it did before.
#[tokio::test]
async fn what_was_lost_and_is_free_as_before_is_opened() {
    let bucket = Bucket::memory();
    let queue = bucket.queue().await;
    push(&queue, "t").await;
    let (a, b) = (bucket.node("a").await, bucket.node("b").await);
    a.down().await;
    b.down().await;
    let (on_a, on_b) = (next(&a.queue).await, next(&b.queue).await);
    b.up().await;
    assert_eq!(a.up().await.lost, 1);
    drop(on_a);
    let _ = queue.store().delete(&key("queues/q/pending/t/lease.json")).await.unwrap();
    assert_eq!(a.down().await.opened, 1);
    next(&a.queue).await.ack().await.unwrap();
    drop(on_b);
}

/// What was seen only saves requests: a task that a damaged disk or an old backup has lost comes down
/// again.
#[tokio::test]
async fn what_got_lost_here_comes_down_again() {
    let bucket = Bucket::memory();
    let queue = bucket.queue().await;
    push(&queue, "t").await;
    queue.push_bundle(vec![NewTask::text("b")]).await.unwrap();
    let node = bucket.node("a").await;
    assert_eq!(node.down().await.new, 2);
    for key in keys(node.queue.store()).await {
        let _ = node.queue.store().delete(&Key::new(key).unwrap()).await.unwrap();
    }
    assert_eq!(node.down().await.new, 0, "nothing changed, but it is missed");
    assert_eq!(node.down().await.new, 2);
    assert_eq!(node.down().await.unchanged, 2);
    assert_eq!(drain(&node.queue).await.len(), 2);
}

/// A dead letter, a new push of the same name, a claim of that: all between two syncs.
#[tokio::test]
async fn a_dead_letter_is_told_though_its_task_was_pushed_and_claimed_again() {
    let bucket = Bucket::memory();
    let queue = bucket.queue().await;
    push(&queue, "t").await;
    let node = bucket.node("a").await;
    node.down().await;
    let first = next(&node.queue).await;
    let given_up = first.incarnation().to_owned();
    first.fail("never").await.unwrap();
    let again = node.queue.push(NewTask::text("x").id("t")).await.unwrap();
    assert_eq!(again.outcome, Outcome::New);
    let task = next(&node.queue).await;
    let up = node.up().await;
    assert_eq!((up.given_up, up.pushed, up.held, up.lost), (1, 1, 1, 0), "{up:?}");
    assert_eq!(queue.dead_letter("t").await.unwrap().unwrap().task.incarnation, given_up);
    let (there, _) = queue.find("t").await.unwrap().unwrap();
    assert_eq!(there.payload.get(), "\"x\"", "the new one");
    // Not every time.
    assert_eq!(node.up().await.given_up, 0);
    task.ack().await.unwrap();
    assert_eq!(node.up().await.completed, 1);
    assert_eq!(node.outbox().await, 0);
    assert_eq!(keys(queue.store()).await, ["queues/q/completed/t.json", "queues/q/failed/t.json"]);
}

/// The same, and done by the time of the sync: what is pending there is the push that was given up, and
/// not one of somebody else's.
#[tokio::test]
async fn a_dead_letter_and_the_receipt_of_the_next_push_are_both_told() {
    let bucket = Bucket::memory();
    let queue = bucket.queue().await;
    push(&queue, "t").await;
    let node = bucket.node("a").await;
    node.down().await;
    next(&node.queue).await.fail("never").await.unwrap();
    node.queue.push(NewTask::text("x").id("t")).await.unwrap();
    next(&node.queue).await.ack_text("second").await.unwrap();
    let up = node.up().await;
    assert_eq!((up.given_up, up.completed, up.duplicates), (1, 1, 0), "{up:?}");
    assert_eq!(queue.receipt("t").await.unwrap().unwrap().result.unwrap().get(), "\"second\"");
    assert_eq!(node.outbox().await, 0);
    assert_eq!(keys(queue.store()).await, ["queues/q/completed/t.json", "queues/q/failed/t.json"]);
}

/// A node that pushes for later, and whose own workers are not the ones that do it.
#[tokio::test]
async fn a_delayed_task_that_was_done_elsewhere_is_not_kept_here() {
    let bucket = Bucket::memory();
    let queue = bucket.queue().await;
    let (a, b) = (bucket.node("a").await, bucket.node("b").await);
    let soon = NewTask::text("x").id("later").delay(Duration::from_millis(1500));
    a.queue.push(soon).await.unwrap();
    assert_eq!(a.up().await.pushed, 1);
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(b.down().await.new, 1);
    assert_eq!(drain(&b.queue).await, ["later"]);
    assert_eq!(b.up().await.completed, 1);
    let down = a.down().await;
    assert_eq!((down.removed, down.set_aside), (1, 0), "{down:?}");
    let left = keys(a.queue.store()).await;
    assert_eq!(left, ["queues/q/completed/later.json"]);
    assert!(drain(&a.queue).await.is_empty());
    assert_eq!(keys(queue.store()).await, ["queues/q/completed/later.json"]);
}

/// Tried here when it was due, while nobody had looked in the bucket whether anything is.
#[tokio::test]
async fn a_delayed_task_that_failed_here_is_not_set_aside() {
    let bucket = Bucket::memory();
    let queue = bucket.queue().await;
    let (a, b) = (bucket.node("a").await, bucket.node("b").await);
    let soon = NewTask::text("x").id("later").delay(Duration::from_millis(1500));
    a.queue.push(soon).await.unwrap();
    assert_eq!(a.up().await.pushed, 1);
    let hour = Some(Duration::from_secs(3600));
    next(&a.queue).await.nack("not today", hour).await.unwrap();
    let up = a.up().await;
    assert_eq!((up.released, up.left), (1, 0), "{up:?}");
    assert_eq!(a.replica.status("q").await.unwrap().set_aside, 0);
    // The bucket learns that it is due, and what it has been through.
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(b.down().await.promoted, 1);
    let (_, held) = queue.find("later").await.unwrap().unwrap();
    assert_eq!(held.unwrap().retries, 1);
    let down = a.down().await;
    assert_eq!((down.set_aside, down.removed), (0, 0), "{down:?}");
}

/// A queue that was made again with more shards has its tasks elsewhere: what went where this replica
/// thinks would be found by nobody.
#[tokio::test]
async fn nothing_is_pushed_to_where_nobody_looks() {
    let bucket = Bucket::memory();
    let queue = bucket.queue().await;
    push(&queue, "done").await;
    let node = bucket.node("a").await;
    node.down().await;
    assert_eq!(drain(&node.queue).await, ["done"]);
    push(&node.queue, "t").await;
    let settings = key("queues/q/queue.json");
    let _ = queue.store().delete(&settings).await.unwrap();
    let up = node.up().await;
    assert_eq!((up.completed, up.pushed, up.troubled, up.left), (1, 0, 1, 1), "{up:?}");
    let sharded = QueueSettings { shards: 4, ..relaxed() };
    Queue::create(queue.store(), "q", sharded).await.unwrap();
    let up = node.up().await;
    assert_eq!((up.pushed, up.troubled, up.left), (0, 1, 1), "{up:?}");
    // And made again as it was.
    let _ = queue.store().delete(&settings).await.unwrap();
    let again = bucket.queue().await;
    let up = node.up().await;
    assert_eq!((up.pushed, up.troubled, up.left), (1, 0, 0), "{up:?}");
    assert_eq!(drain(&again).await, ["t"]);
}

/// Half of a bundle is done in the bucket, with results, and the rest here.
#[tokio::test]
async fn results_of_a_bundle_that_was_begun_elsewhere_are_kept() {
    let fleet = Fleet::new();
    let test = async {
        let queue = fleet.queue().await;
        queue.push_bundle((0..2).map(|n| NewTask::text(&n.to_string())).collect()).await.unwrap();
        let (a, here) = fleet.node("a").await;
        // Its worker ends after the first.
        fleet.next(&queue).await.ack_text("there").await.unwrap();
        fleet.sleep(Duration::from_secs(60)).await;
        assert_eq!(a.down("q").await.unwrap().new, 1);
        fleet.next(&here).await.ack_text("here").await.unwrap();
        assert_eq!(a.up("q").await.unwrap().completed, 1);
        let page = queue.store().list(List::prefix("queues/q/completed/").unwrap());
        let page = page.collect().await.unwrap();
        let receipt = queue.store().get(&page.entries[0].key).await.unwrap().unwrap();
        let receipt: serde_json::Value = serde_json::from_slice(&receipt.body).unwrap();
        let mut results = receipt["results"].as_array().unwrap().clone();
        results.sort_by_key(ToString::to_string);
        assert_eq!(results, ["here", "there"]);
    };
    fleet.clock.pass(test).await;
}
