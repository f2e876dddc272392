//! Nothing is stuck, nothing spins, and one bad object stops nobody.

use std::fs::File;
use std::io::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold::queue::{Acked, NewTask, Queue};
use leasehold::store::memory::Memory;
use leasehold::{ErrorKind, Put, Write, env::Env};
use leasehold_testkit::conformance::over;
use leasehold_testkit::faulty::{Broken, Faulty};

use super::*;

async fn write(queue: &Queue, name: &str, body: &str) {
    let put = queue.store().put(&key(name), body.to_owned().into(), Write::any()).await.unwrap();
    assert!(matches!(put, Put::Stored(_)));
}

/// How many requests an idle worker makes in this time, and what it gets.
async fn idle(queue: &Queue, span: Duration) -> (u64, Option<String>) {
    let before = queue.store().usage();
    let worker = queue.worker("idle");
    let got = tokio::time::timeout(span, worker.next()).await;
    let got = got.ok().map(|task| task.unwrap().unwrap().id().to_owned());
    (queue.store().usage().since(&before).requests(), got)
}

#[tokio::test]
async fn old_leases_that_cannot_be_taken_cost_little() {
    for place in [memory(), directory(), on_s3("ministack", "old")] {
        let queue = queue(&place).await;
        for id in ["later", "foreign", "broken"] {
            push(&queue, id).await;
        }
        // To be tried again long after the ttl; somebody else's, for an hour; damaged.
        let worker = queue.worker("w");
        loop {
            let task = next(&worker).await;
            match task.id() {
                "later" => {
                    task.nack("later", Some(Duration::from_secs(600))).await.unwrap();
                    break;
                }
                _ => task.give_back().await.unwrap(),
            }
        }
        let foreign = r#"{"worker_id":"seed","ttl_ms":3600000}"#;
        write(&queue, "queues/q/pending/foreign/lease.json", foreign).await;
        // What is not even JSON must not stop anybody, and is healed after a ttl.
        write(&queue, "queues/q/pending/broken/lease.json", "locked").await;
        tokio::time::sleep(Duration::from_millis(3500)).await;
        let healed = next(&queue.worker("w")).await;
        assert_eq!(healed.id(), "broken", "{}", place.name);
        healed.ack().await.unwrap();
        let (requests, got) = idle(&queue, Duration::from_secs(2)).await;
        assert_eq!(got, None, "{}", place.name);
        let most = if place.name == "directory" { 400 } else { 30 };
        assert!(requests < most, "{}: {requests} requests in two seconds", place.name);
        assert!(queue.status(10).await.unwrap().held.len() == 2);
    }
}

/// In a directory leases are made, then written. Whoever stops in between has them for a ttl, and what it
/// writes later is in nobody's way.
#[tokio::test]
async fn an_empty_lease_is_held_for_a_ttl() {
    let place = directory();
    let queue = queue(&place).await;
    push(&queue, "t").await;
    let lease = place.path().join("queues/q/pending/t/lease.json");
    let mut stopped = File::create_new(&lease).unwrap();
    let start = Instant::now();
    let task = next(&queue.worker("w")).await;
    assert!(start.elapsed() >= Duration::from_secs(1), "{:?}", start.elapsed());
    stopped.write_all(br#"{"worker_id":"stopped","ttl_ms":3600000}"#).unwrap();
    let held = std::fs::read_to_string(&lease).unwrap();
    assert!(held.contains(r#""worker_id":"w""#), "{held}");
    task.ack().await.unwrap();
    assert_eq!(left(&place.store).await, ["queues/q/completed/t.json"]);
}

/// Where nothing is flushed, a power loss may leave a receipt empty: the task, if it is still there, is done once
/// more, and that is recorded.
#[tokio::test]
async fn a_torn_receipt_is_written_anew() {
    for place in everywhere("torn-receipt") {
        let queue = queue(&place).await;
        push(&queue, "t").await;
        write(&queue, "queues/q/completed/t.json", "").await;
        assert_eq!(drain(&queue, "w").await, ["t"], "{}", place.name);
        let receipt = queue.receipt("t").await.unwrap().expect("it was recorded");
        assert_eq!(receipt.worker, "w");
        assert_eq!(left(&place.store).await, ["queues/q/completed/t.json"], "{}", place.name);
    }
}

/// They all have the same content, and the time of one says nothing about the next.
#[tokio::test]
async fn an_empty_lease_is_not_as_old_as_the_one_before() {
    let place = directory();
    let queue = queue(&place).await;
    push(&queue, "t").await;
    let lease = place.path().join("queues/q/pending/t/lease.json");
    File::create_new(&lease).unwrap();
    let worker = queue.worker("w");
    let claimed = async {
        let task = next(&worker).await;
        (Instant::now(), task)
    };
    let replaced = async {
        tokio::time::sleep(Duration::from_millis(800)).await;
        let other = place.path().join("queues/q/other");
        File::create_new(&other).unwrap();
        std::fs::rename(&other, &lease).unwrap();
        Instant::now()
    };
    let ((claimed, task), replaced) = tokio::join!(claimed, replaced);
    assert!(claimed - replaced >= Duration::from_millis(900), "{:?}", claimed - replaced);
    task.ack().await.unwrap();
}

#[tokio::test]
async fn a_lone_lease_keeps_nobody_on_a_store_without_conditional_deletes() {
    let memory = Arc::new(Memory::new(Env::system()));
    let store = over(Arc::new(Faulty::broken(memory, Broken::IgnoresDeleteMatch)));
    let queue = Queue::create(&store, "q", quick()).await.unwrap();
    let orphan = r#"{"worker_id":"gone","ttl_ms":1,"state":"released"}"#;
    write(&queue, "queues/q/pending/x/lease.json", orphan).await;
    tokio::time::sleep(Duration::from_millis(3200)).await;
    let ended = tokio::time::timeout(Duration::from_secs(5), drain(&queue, "w")).await;
    assert_eq!(ended.expect("it ends"), Vec::<String>::new());
}

#[tokio::test]
async fn scheduled_tasks_that_are_due_are_all_done() {
    for place in [memory(), directory()] {
        let queue = queue(&place).await;
        let soon = Duration::from_millis(1);
        queue.push_many((0..250).map(|n| NewTask::text(&n.to_string()).delay(soon))).await.unwrap();
        tokio::time::sleep(Duration::from_millis(1200)).await;
        assert_eq!(drain(&queue, "w").await.len(), 250, "{}", place.name);
    }
}

#[tokio::test]
async fn what_is_behind_many_that_wait_is_found() {
    let place = memory();
    let queue = queue(&place).await;
    let late = r#"{"worker_id":"w","state":"released","not_before":"2999-01-01T00:00:00Z"}"#;
    for n in 0..5500 {
        let folder = format!("queues/q/pending/a{n:04}");
        write(&queue, &format!("{folder}/task.json"), "{}").await;
        write(&queue, &format!("{folder}/lease.json"), late).await;
    }
    push(&queue, "z").await;
    let (requests, got) = idle(&queue, Duration::from_secs(20)).await;
    assert_eq!(got.as_deref(), Some("z"), "{requests} requests");
}

#[tokio::test]
async fn names_that_nobody_can_have_meant_are_left_alone_and_counted() {
    let place = memory();
    let queue = queue(&place).await;
    for odd in ["bundles/x-03/tasks.jsonl", "pending/100%/task.json", "pending/readme.txt"] {
        write(&queue, &format!("queues/q/{odd}"), "{}").await;
    }
    push(&queue, "fine").await;
    next(&queue.worker("w")).await.ack().await.unwrap();
    let (requests, got) = idle(&queue, Duration::from_secs(2)).await;
    assert!(got.is_none() && requests < 20, "{requests}");
    assert_eq!(queue.status(0).await.unwrap().counts.unknown, 3);
}

#[tokio::test]
async fn ids_that_leave_no_room_for_a_lease_are_refused() {
    let place = memory();
    let queue = queue(&place).await;
    let room = 1024 - "queues/q/pending//task.json".len();
    for length in room - 3..=room {
        let pushed = queue.push(NewTask::text("x").id("i".repeat(length))).await;
        match pushed {
            Ok(_) => assert!(length < room, "{length}"),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Invalid),
        }
    }
    drain(&queue, "w").await;
    let reserved = NewTask::text("x").id("01ARZ3NDEKTSV4RRFFQ69G5FAV-3");
    assert_eq!(queue.push(reserved).await.unwrap_err().kind(), ErrorKind::Invalid);
}

#[tokio::test]
async fn a_bundle_that_lies_about_itself_harms_nobody() {
    let place = memory();
    let queue = queue(&place).await;
    let name = "queues/q/bundles/01ARZ3NDEKTSV4RRFFQ69G5FAV-3/tasks.jsonl";
    write(&queue, name, "{\"incarnation\":\"i\",\"tasks\":4294967295}\n").await;
    assert!(drain(&queue, "w").await.is_empty());
    assert_eq!(queue.failed_ids().await.unwrap().len(), 1);
}

#[tokio::test]
async fn a_task_that_is_dropped_where_there_is_no_runtime_counts() {
    let place = memory();
    let queue = queue(&place).await;
    push(&queue, "x").await;
    let worker = queue.worker("w");
    let task = next(&worker).await;
    std::thread::spawn(move || drop(task)).join().unwrap();
    assert_eq!(next(&worker).await.attempt(), 2);
}

#[tokio::test]
async fn many_callers_cost_no_more_than_one() {
    let place = memory();
    let queue = queue(&place).await;
    let urgent = Queue::create(&place.store, "urgent", quick()).await.unwrap();
    let settings = leasehold::queue::WorkerSettings::named("w");
    let worker = leasehold::queue::Worker::new(vec![urgent, queue.clone()], settings);
    let before = place.store.usage();
    let calls = (0..16).map(|_| tokio::time::timeout(Duration::from_secs(3), worker.next()));
    futures::future::join_all(calls).await;
    let lists = place.store.usage().since(&before).list;
    assert!(lists <= 14, "{lists} LISTs of two empty queues in three seconds");
    // An empty queue of higher priority is not asked for each task.
    let tasks = (0..300).map(|n| NewTask::text(&n.to_string())).collect();
    queue.push_bundle(tasks).await.unwrap();
    let before = place.store.usage();
    for _ in 0..300 {
        next(&worker).await.ack().await.unwrap();
    }
    let lists = place.store.usage().since(&before).list;
    assert!(lists < 10, "{lists} LISTs");
}

#[tokio::test]
async fn an_old_completion_does_not_replace_a_newer_one() {
    let place = memory();
    let queue = queue(&place).await;
    push(&queue, "t").await;
    let a = next(&queue.worker("a")).await;
    write(&queue, "queues/q/pending/t/lease.json", r#"{"worker_id":"a","ttl_ms":1}"#).await;
    tokio::time::sleep(Duration::from_millis(4500)).await;
    next(&queue.worker("b")).await.fail("no").await.unwrap();
    assert!(queue.retry("t").await.unwrap());
    next(&queue.worker("c")).await.ack_text("by c").await.unwrap();
    assert_eq!(a.ack_text("by a").await.unwrap(), Acked::Again);
    let receipt = queue.receipt("t").await.unwrap().unwrap();
    assert_eq!(receipt.result.unwrap().get(), "\"by c\"");
}

/// What a supervisor does now and then: leases that nobody has any more and tasks that are over go,
/// everything else stays, and it costs next to nothing.
#[tokio::test]
async fn a_reaper_takes_only_what_is_over() {
    for place in [memory(), directory(), on_s3("ministack", "reap")] {
        let queue = queue(&place).await;
        let store = &place.store;
        let worker = queue.worker("w");
        push(&queue, "over").await;
        let body = async |name: &str| {
            let object = store.get(&key(&format!("queues/q/pending/{name}"))).await.unwrap();
            String::from_utf8(object.unwrap().body.to_vec()).unwrap()
        };
        let task = next(&worker).await;
        let (lease, work) = (body("over/lease.json").await, body("over/task.json").await);
        task.ack().await.unwrap();
        push(&queue, "held").await;
        let held = next(&worker).await;
        push(&queue, "free").await;
        // As if their worker had died between the receipt and the clean-up, before a reboot.
        let mut lease: serde_json::Value = serde_json::from_str(&lease).unwrap();
        lease["boot_id"] = "another".into();
        let lease = lease.to_string();
        write(&queue, "queues/q/pending/over/task.json", &work).await;
        write(&queue, "queues/q/pending/over/lease.json", &lease).await;
        write(&queue, "queues/q/pending/lone/lease.json", &lease).await;
        tokio::time::sleep(Duration::from_millis(3500)).await;
        let before = store.usage();
        let swept = queue.reap().await.unwrap();
        let used = store.usage().since(&before);
        assert_eq!((swept.leases, swept.tasks), (2, 1), "{}: {swept:?}", place.name);
        assert!(used.list == 2 && used.requests() < 20, "{}: {used:?}", place.name);
        let mut left = left(store).await;
        left.retain(|key| key.contains("/pending/"));
        let kept = ["free/task.json", "held/lease.json", "held/task.json"];
        assert_eq!(left, kept.map(|name| format!("queues/q/pending/{name}")), "{}", place.name);
        assert_eq!(queue.reap().await.unwrap(), leasehold::queue::Swept::default());
        held.ack().await.unwrap();
    }
}

/// Whoever pushed it did not allow others to claim it: that is told, but keeps nobody from the rest.
#[tokio::test]
async fn a_task_that_may_not_be_claimed_stops_nobody() {
    let memory = Arc::new(Memory::new(Env::system()));
    let faulty = Arc::new(Faulty::writes(memory, []));
    let store = over(faulty.clone());
    let queue = Queue::create(&store, "q", quick()).await.unwrap();
    for id in ["a", "b", "c", "d", "e"] {
        push(&queue, id).await;
    }
    faulty.deny_writes_of("/pending/a/");
    let worker = until_empty(&queue, "w");
    let mut done = Vec::new();
    let ended = loop {
        match worker.next().await {
            Ok(Some(task)) => {
                done.push(task.id().to_owned());
                task.ack().await.unwrap();
            }
            ended => break ended,
        }
    };
    done.sort();
    assert_eq!(done, ["b", "c", "d", "e"]);
    let error = ended.expect_err("something is left");
    assert_eq!(error.kind(), ErrorKind::Denied);
    assert!(error.to_string().starts_with("queues/q/pending/a/lease.json"), "{error}");
    // Who has done something waits for more, and costs no more than with an empty queue.
    push(&queue, "f").await;
    let worker = queue.worker("w");
    next(&worker).await.ack().await.unwrap();
    let before = store.usage();
    let idle = tokio::time::timeout(Duration::from_secs(2), worker.next()).await;
    let requests = store.usage().since(&before).requests();
    assert!(idle.is_err() && requests < 20, "{requests} requests in two seconds");
    // And who can do nothing at all says why.
    let ended = tokio::time::timeout(Duration::from_secs(10), queue.worker("x").next()).await;
    let error = ended.expect("it ends").expect_err("nothing can be claimed");
    assert_eq!(error.kind(), ErrorKind::Denied);
    // Where nothing at all may be written, not everything is tried.
    queue.push_many((0..500).map(|n| NewTask::text(&n.to_string()))).await.unwrap();
    faulty.deny_writes_of("lease.json");
    let before = store.usage();
    let error = queue.worker("y").next().await.expect_err("nothing can be claimed");
    let puts = store.usage().since(&before).put;
    assert!(error.kind() == ErrorKind::Denied && puts <= 100, "{error}, {puts} PUTs");
}

#[tokio::test]
async fn many_that_are_due_again_are_found_at_once() {
    for place in [memory(), directory()] {
        let queue = queue(&place).await;
        queue.push_many((0..50).map(|n| NewTask::text(&n.to_string()))).await.unwrap();
        let worker = queue.worker("w");
        for _ in 0..50 {
            let task = next(&worker).await;
            task.nack("later", Some(Duration::from_secs(1))).await.unwrap();
        }
        // Past the ttl and what is added to it, so that the listing alone shows them.
        tokio::time::sleep(Duration::from_millis(4500)).await;
        let before = place.store.usage();
        assert_eq!(drain(&queue, "w").await.len(), 50);
        let lists = place.store.usage().since(&before).list;
        // In a directory names are read first, which show no leases.
        let most = if place.name == "directory" { 16 } else { 8 };
        assert!(lists <= most, "{}: {lists} LISTs for 50 tasks", place.name);
    }
}

/// Others made it again, with its tasks in other places: nothing would ever be found.
#[tokio::test]
async fn a_worker_of_a_queue_that_has_other_shards_now_ends() {
    let place = memory();
    let queue = queue(&place).await;
    let worker = queue.worker("w");
    let object = place.store.get(&key("queues/q/queue.json")).await.unwrap().unwrap();
    let mut settings: serde_json::Value = serde_json::from_slice(&object.body).unwrap();
    settings["shards"] = 4.into();
    write(&queue, "queues/q/queue.json", &settings.to_string()).await;
    assert_eq!(queue.refresh().await.unwrap_err().kind(), ErrorKind::Data);
    let ended = tokio::time::timeout(Duration::from_secs(5), worker.next()).await;
    assert_eq!(ended.expect("it ends").unwrap_err().kind(), ErrorKind::Data);
}

/// Somebody always has something new to do; what is due, was given back or was left by the dead has its turn
/// all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_due_has_its_turn_among_the_free() {
    // On a bucket that costs something, and is done twice a minute.
    tokio::join!(among_the_free(directory(), 30), among_the_free(memory(), 90));
}

async fn among_the_free(place: Place, most: u64) {
    let queue = queue(&place).await;
    push(&queue, "0-failed").await;
    push(&queue, "0-left").await;
    let gone = until_empty(&queue, "gone");
    for _ in 0..2 {
        let task = next(&gone).await;
        match task.id() {
            "0-failed" => _ = task.nack("once", None).await.unwrap(),
            // As if its process had died: nobody renews it.
            _ => {
                let lease = r#"{"worker_id":"dead","ttl_ms":500}"#;
                std::mem::forget(task);
                write(&queue, "queues/q/pending/0-left/lease.json", lease).await;
            }
        }
    }
    let delayed = NewTask::text("delayed").id("0-delayed").delay(Duration::from_secs(1));
    queue.push(delayed).await.unwrap();
    let backlog = 5000;
    queue.push_many((0..backlog).map(|n| NewTask::text("x").id(format!("1-{n}")))).await.unwrap();
    let worker = queue.worker("w");
    let mut waiting = vec!["0-delayed", "0-failed", "0-left"];
    let start = Instant::now();
    let mut done = 0;
    while !waiting.is_empty() {
        assert!(start.elapsed() < Duration::from_secs(most), "{waiting:?} after {done}");
        let task = next(&worker).await;
        waiting.retain(|id| *id != task.id());
        task.ack().await.unwrap();
        done += 1;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(done < backlog, "only after everything else");
}
