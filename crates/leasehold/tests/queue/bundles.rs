//! Many small tasks in one object.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use leasehold::ErrorKind;
use leasehold::env::Env;
use leasehold::queue::{Acked, NewTask, Queue, QueueSettings};
use leasehold::store::memory::Memory;
use leasehold_testkit::conformance::over;
use leasehold_testkit::faulty::{Fault, Faulty};

use super::*;

async fn bundle(queue: &Queue, count: usize) -> Vec<String> {
    let tasks = (0..count).map(|n| NewTask::text(&n.to_string())).collect();
    queue.push_bundle(tasks).await.unwrap()
}

#[tokio::test]
async fn a_bundle_is_done_task_by_task_with_one_receipt() {
    for place in everywhere("bundle") {
        let queue = queue(&place).await;
        let ids = bundle(&queue, 20).await;
        assert_eq!(queue.status(0).await.unwrap().counts.free, 20);
        let worker = queue.worker("w");
        let mut done = Vec::new();
        for _ in 0..20 {
            let task = next(&worker).await;
            done.push(task.id().to_owned());
            let text = task.text();
            task.ack_text(&format!("did {text}")).await.unwrap();
        }
        assert_eq!(done, ids);
        let kept = left(&place.store).await;
        assert_eq!(kept.len(), 1, "{kept:?}");
        let status = queue.status(0).await.unwrap();
        assert_eq!(status.counts.completed, 20);
        let receipt = place.store.get(&key(&kept[0])).await.unwrap().unwrap();
        let receipt = leasehold::queue::Receipt::parse(&receipt.body).unwrap();
        let results = receipt.results.unwrap();
        assert_eq!(results[7].as_ref().unwrap().get(), "\"did 7\"");
    }
}

#[tokio::test]
async fn a_task_that_fails_leaves_the_bundle() {
    for place in everywhere("leaves") {
        let queue = queue(&place).await;
        let ids = bundle(&queue, 5).await;
        let worker = until_empty(&queue, "w");
        let mut seen = Vec::new();
        while let Some(task) = worker.next().await.unwrap() {
            seen.push(task.id().to_owned());
            match (task.id() == ids[1], task.id() == ids[3], task.attempt()) {
                (true, _, 1) => assert!(task.nack("again", None).await.unwrap()),
                (_, true, _) => task.fail("never").await.unwrap(),
                _ => drop(task.ack().await.unwrap()),
            }
        }
        assert_eq!(seen.len(), 6, "{}: {seen:?}", place.name);
        assert_eq!(seen.iter().filter(|id| **id == ids[1]).count(), 2);
        assert_eq!(queue.failed_ids().await.unwrap(), [ids[3].clone()]);
        let counts = queue.status(0).await.unwrap().counts;
        assert_eq!((counts.free, counts.leased, counts.failed), (0, 0, 1));
    }
}

#[tokio::test]
async fn a_successor_does_only_the_rest() {
    for place in everywhere("rest") {
        let queue = queue(&place).await;
        bundle(&queue, 10).await;
        let worker = queue.worker("first");
        let mut done = BTreeSet::new();
        for _ in 0..4 {
            let task = next(&worker).await;
            done.insert(task.text());
            task.ack_text("by the first").await.unwrap();
        }
        // One is under way: it is finished, the rest goes back.
        let under_way = next(&worker).await;
        worker.drain().await.unwrap();
        assert!(worker.next().await.unwrap().is_none());
        done.insert(under_way.text());
        under_way.ack().await.unwrap();
        let heir = queue.worker("heir");
        for _ in 0..5 {
            let task = next(&heir).await;
            assert_eq!(task.attempt(), 1, "a drain does not count");
            assert!(done.insert(task.text()), "{}: done twice", place.name);
            task.ack().await.unwrap();
        }
        assert_eq!(done.len(), 10);
        let kept = left(&place.store).await;
        assert_eq!(kept.len(), 1, "{}: {kept:?}", place.name);
        let receipt = place.store.get(&key(&kept[0])).await.unwrap().unwrap();
        assert!(String::from_utf8_lossy(&receipt.body).contains("by the first"));
    }
}

#[tokio::test]
async fn progress_is_written_with_the_heartbeat() {
    for place in [memory(), directory()] {
        let queue = queue(&place).await;
        bundle(&queue, 6).await;
        let worker = queue.worker("w");
        next(&worker).await.ack().await.unwrap();
        next(&worker).await.ack().await.unwrap();
        let held = next(&worker).await;
        tokio::time::sleep(Duration::from_millis(900)).await;
        let keys = left(&place.store).await;
        let lease = keys.iter().find(|key| key.ends_with("lease.json")).unwrap();
        let lease = place.store.get(&key(lease)).await.unwrap().unwrap();
        assert!(String::from_utf8_lossy(&lease.body).contains("\"done\":\"0-1\""));
        held.ack().await.unwrap();
    }
}

#[tokio::test]
async fn bundles_that_cannot_be_are_refused() {
    let place = memory();
    let queue = queue(&place).await;
    assert!(queue.push_bundle(Vec::new()).await.unwrap().is_empty());
    let many = vec![NewTask::text("x"); 10_001];
    let late = vec![NewTask::text("x").delay(Duration::from_secs(1))];
    let odd = vec![NewTask::text("x").id("y".repeat(3000))];
    for bad in [many, late, odd] {
        assert_eq!(queue.push_bundle(bad).await.unwrap_err().kind(), ErrorKind::Invalid);
    }
    assert!(left(&place.store).await.is_empty());
}

#[tokio::test]
async fn a_damaged_bundle_becomes_a_dead_letter_and_is_kept() {
    let place = memory();
    let queue = Queue::create(&place.store, "q", QueueSettings { ..quick() }).await.unwrap();
    let name = key("queues/q/bundles/01ARZ3NDEKTSV4RRFFQ69G5FAV-3/tasks.jsonl");
    let put = place.store.put(&name, "{\"half\":".into(), leasehold::Write::any()).await.unwrap();
    assert!(matches!(put, leasehold::Put::Stored(_)));
    let worker = until_empty(&queue, "w");
    assert!(worker.next().await.unwrap().is_none());
    let letter = queue.dead_letter("01ARZ3NDEKTSV4RRFFQ69G5FAV-3").await.unwrap().unwrap();
    assert_eq!(letter.task.payload.get(), r#""{\"half\":""#);
    // Its bytes are no task, and are not run as one.
    let refused = queue.retry("01ARZ3NDEKTSV4RRFFQ69G5FAV-3").await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Data);
    assert_eq!(left(&place.store).await, ["queues/q/failed/01ARZ3NDEKTSV4RRFFQ69G5FAV-3.json"]);
}

#[tokio::test]
async fn payloads_on_many_lines_are_tasks_like_others() {
    let place = memory();
    let queue = queue(&place).await;
    let pretty = "{\n  \"a\": 1,\r\n  \"b\": \"x\\ny\"\n}";
    let raw = |text: &str| NewTask::raw(serde_json::from_str(text).unwrap());
    queue.push_bundle(vec![raw(pretty), raw("{\"c\":2}")]).await.unwrap();
    let worker = until_empty(&queue, "w");
    let mut seen = Vec::new();
    while let Some(task) = worker.next().await.unwrap() {
        seen.push(task.json::<serde_json::Value>().unwrap());
        task.ack().await.unwrap();
    }
    let value = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
    assert_eq!(seen, [value(pretty), value("{\"c\":2}")]);
    assert!(queue.failed_ids().await.unwrap().is_empty());
}

#[tokio::test]
async fn draining_while_the_last_task_is_acked_ends() {
    for place in [memory(), directory(), on_s3("ministack", "draining")] {
        for _ in 0..10 {
            let queue = Queue::open_or_create(&place.store, "q", Some(quick())).await.unwrap();
            bundle(&queue, 2).await;
            let worker = queue.worker("w");
            next(&worker).await.ack().await.unwrap();
            let last = next(&worker).await;
            let (acked, drained) = tokio::time::timeout(Duration::from_secs(10), async {
                tokio::join!(last.ack(), worker.drain())
            })
            .await
            .expect("it ends");
            acked.unwrap();
            drained.unwrap();
        }
        let counts = Queue::open(&place.store, "q").await.unwrap().unwrap();
        assert_eq!(counts.status(0).await.unwrap().counts.completed, 20, "{}", place.name);
    }
}

#[tokio::test]
async fn what_goes_back_is_not_handed_out_any_more() {
    for place in [memory(), directory()] {
        let queue = queue(&place).await;
        bundle(&queue, 5).await;
        let worker = queue.worker("w");
        let other = next(&worker).await;
        next(&worker).await.give_back().await.unwrap();
        other.ack().await.unwrap();
        // The bundle is the others' by now, and done is what was acked.
        let heir = queue.worker("heir");
        let mut texts = BTreeSet::new();
        for _ in 0..4 {
            let task = next(&heir).await;
            texts.insert(task.text());
            task.ack().await.unwrap();
        }
        assert_eq!(texts.len(), 4, "{}", place.name);
    }
}

#[tokio::test]
async fn acked_work_survives_a_worker_that_is_dropped() {
    for place in [memory(), directory()] {
        let queue = queue(&place).await;
        bundle(&queue, 10).await;
        let worker = queue.worker("w");
        for _ in 0..4 {
            next(&worker).await.ack().await.unwrap();
        }
        drop(worker);
        let heir = queue.worker("heir");
        for _ in 0..6 {
            next(&heir).await.ack().await.unwrap();
        }
        assert_eq!(queue.status(0).await.unwrap().counts.completed, 10, "{}", place.name);
    }
}

#[tokio::test]
async fn long_results_survive_a_drain() {
    let place = memory();
    let queue = queue(&place).await;
    bundle(&queue, 60).await;
    let worker = queue.worker("w");
    for _ in 0..50 {
        next(&worker).await.ack_text(&"r".repeat(4000)).await.unwrap();
    }
    worker.drain().await.unwrap();
    let heir = queue.worker("heir");
    for _ in 0..10 {
        next(&heir).await.ack_text("short").await.unwrap();
    }
    let kept = left(&place.store).await;
    let receipt = place.store.get(&key(&kept[0])).await.unwrap().unwrap();
    let receipt = leasehold::queue::Receipt::parse(&receipt.body).unwrap();
    assert!(receipt.results.unwrap().iter().all(Option::is_some));
}

#[tokio::test]
async fn a_task_that_left_is_not_done_again_by_a_successor() {
    let place = memory();
    let queue = queue(&place).await;
    let ids = bundle(&queue, 3).await;
    let worker = queue.worker("victim");
    let first = next(&worker).await;
    // It leaves, and its worker vanishes before it could write that down.
    first.nack("again", None).await.unwrap();
    let keys = left(&place.store).await;
    let lease = keys.iter().find(|key| key.contains("/bundles/") && key.ends_with("lease.json"));
    let lease = key(lease.unwrap());
    worker.drain().await.unwrap();
    let stale = r#"{"worker_id":"victim","ttl_ms":1}"#;
    let put = place.store.put(&lease, stale.into(), leasehold::Write::any()).await.unwrap();
    assert!(matches!(put, leasehold::Put::Stored(_)));
    tokio::time::sleep(Duration::from_millis(2200)).await;
    let done = drain(&queue, "heir").await;
    let mut sorted = done.clone();
    sorted.sort();
    assert_eq!(sorted, ids, "each once: {done:?}");
    let counts = queue.status(0).await.unwrap().counts;
    assert_eq!((counts.completed, counts.failed), (3, 0));
}

/// A drain that comes while the last task is being recorded leaves that alone, and does not wait for
/// it: whoever drains may be the one who has to go on with it.
#[tokio::test]
async fn a_drain_does_not_wait_for_a_bundle_that_is_being_completed() {
    for place in everywhere("completing") {
        let queue = queue(&place).await;
        bundle(&queue, 2).await;
        let worker = queue.worker("w");
        next(&worker).await.ack().await.unwrap();
        let last = next(&worker).await;
        let mut ack = Box::pin(last.ack());
        // As far as it gets without waiting: in memory and in a directory, to the end.
        let acked = futures::poll!(&mut ack);
        let drain = tokio::time::timeout(Duration::from_secs(10), worker.drain());
        drain.await.expect("it waits for ever").unwrap();
        if acked.is_pending() {
            assert_eq!(ack.await.unwrap(), Acked::First, "{}", place.name);
        }
        let kept = left(&place.store).await;
        assert_eq!(kept.len(), 1, "{}: {kept:?}", place.name);
    }
}

/// A bundle whose workers vanish again and again is broken up: the tasks that are not to blame are
/// done, and nothing is lost.
#[tokio::test]
async fn a_bundle_whose_workers_vanish_is_broken_up() {
    let place = memory();
    let settings = QueueSettings { max_crashes: 2, ..quick() };
    let queue = Queue::create(&place.store, "q", settings).await.unwrap();
    bundle(&queue, 4).await;
    let worker = queue.worker("w");
    next(&worker).await.ack().await.unwrap();
    worker.drain().await.unwrap();
    // As if two workers had died with it.
    let keys = left(&place.store).await;
    let lease = key(keys.iter().find(|key| key.ends_with("lease.json")).unwrap());
    let body = place.store.get(&lease).await.unwrap().unwrap().body;
    let mut record: serde_json::Value = serde_json::from_slice(&body).unwrap();
    record["crashes"] = 2.into();
    let body = serde_json::to_vec(&record).unwrap();
    let put = place.store.put(&lease, body.into(), leasehold::Write::any()).await.unwrap();
    assert!(matches!(put, leasehold::Put::Stored(_)));
    let worker = until_empty(&queue, "heir");
    let mut done = BTreeSet::new();
    while let Some(task) = worker.next().await.unwrap() {
        assert_eq!(task.attempt(), 1);
        assert!(done.insert(task.id().to_owned()), "twice");
        task.ack().await.unwrap();
    }
    assert_eq!(done.len(), 3, "{done:?}");
    let counts = queue.status(0).await.unwrap().counts;
    assert_eq!((counts.free, counts.leased, counts.failed), (0, 0, 0));
}

/// A task is to leave its bundle, and no answer comes: it has left, or it has not. Whoever goes on with
/// the bundle looks, so that it is not done both there and on its own.
#[tokio::test]
async fn a_task_that_may_have_left_is_not_done_twice() {
    use Fault::{LostAnswer, LostRequest};
    for (fault, letter) in [(LostAnswer, false), (LostRequest, false), (LostAnswer, true)] {
        let memory = Arc::new(Memory::new(Env::system()));
        let faulty = Arc::new(Faulty::writes(memory.clone(), []));
        let store = over(faulty.clone());
        let queue = Queue::create(&store, "q", quick()).await.unwrap();
        let tasks = (0..3).map(|n| NewTask::text(&n.to_string())).collect();
        let names = queue.push_bundle(tasks).await.unwrap();
        let worker = queue.worker("w");
        let first = next(&worker).await;
        assert_eq!(first.id(), names[0]);
        // The write itself, and all questions about it for a while.
        let object = if letter { "/failed/" } else { "/task.json" };
        faulty.next_put_of(object, vec![fault], vec![false; 12]);
        let gone = match letter {
            true => first.fail("never").await.map(|()| false),
            false => first.nack("later", None).await,
        };
        assert!(gone.is_err(), "{fault:?}: {gone:?}");
        drop(worker);
        // Another process, and the store answers again.
        let queue = Queue::open(&over(memory), "q").await.unwrap().unwrap();
        let mut done = Vec::new();
        let worker = until_empty(&queue, "heir");
        while let Some(task) = worker.next().await.unwrap() {
            done.push(task.id().to_owned());
            task.ack_text("done").await.unwrap();
        }
        done.sort();
        // Given up, it is not done at all; else once.
        let expected = if letter { &names[1..] } else { &names[..] };
        assert_eq!(done, expected, "{fault:?}");
        let receipts = left(queue.store()).await;
        let own = receipts.iter().filter(|key| key.ends_with(".0.json")).count();
        assert_eq!(own, usize::from(fault == LostAnswer), "{fault:?}: {receipts:?}");
    }
}

/// A worker lets a task leave its bundle and is stopped before it writes that; others take the bundle
/// over and do the task; woken up, it writes. The task is not completed once more, nor given up.
#[tokio::test]
async fn a_task_that_leaves_after_its_bundle_is_done_is_not_done_again() {
    for place in everywhere("late-leave") {
        let queue = queue(&place).await;
        let names = bundle(&queue, 2).await;
        // What a nack writes, taken from another bundle's.
        let other = bundle(&queue, 2).await;
        let worker = until_empty(&queue, "w");
        let mut task_json = None;
        while let Some(task) = worker.next().await.unwrap() {
            if task.id() == other[1] && task.attempt() == 1 {
                task.nack("later", Some(Duration::from_secs(1))).await.unwrap();
                let name = key(&format!("queues/q/pending/{}/task.json", other[1]));
                task_json = place.store.get(&name).await.unwrap().map(|object| object.body);
            } else {
                task.ack_text("done").await.unwrap();
            }
        }
        let all = left(&place.store).await;
        assert_eq!(all.len(), 3, "two bundles, and one that left: {all:?}");
        let late = String::from_utf8(task_json.unwrap().to_vec()).unwrap();
        let late = late.replace(&other[1], &names[1]);
        let name = key(&format!("queues/q/pending/{}/task.json", names[1]));
        let put = place.store.put(&name, late.into(), leasehold::Write::any()).await.unwrap();
        assert!(matches!(put, leasehold::Put::Stored(_)));
        assert!(drain(&queue, "heir").await.is_empty(), "{}: done again", place.name);
        assert_eq!(left(&place.store).await, all, "{}", place.name);
        // The same with a dead letter.
        let task = Queue::open(&place.again(), "q").await.unwrap().unwrap();
        push(&task, "model").await;
        next(&task.worker("w")).await.fail("no").await.unwrap();
        let letter = task.dead_letter("model").await.unwrap().unwrap();
        let text = String::from_utf8(letter.to_bytes()).unwrap().replace("model", &names[1]);
        let name = key(&format!("queues/q/failed/{}.json", names[1]));
        for sweeps in [true, false] {
            let put = place.store.put(&name, text.clone().into(), leasehold::Write::any()).await;
            assert!(matches!(put.unwrap(), leasehold::Put::Stored(_)));
            match sweeps {
                true => assert_eq!(queue.sweep().await.unwrap().letters, 1, "{}", place.name),
                false => assert!(!queue.retry(&names[1]).await.unwrap(), "{}", place.name),
            }
            assert!(queue.dead_letter(&names[1]).await.unwrap().is_none());
        }
    }
}

/// A worker is stopped before its last task; its successor lets one leave that it has done, and that is
/// done on its own. Woken up, it finishes the bundle, and does not record that one once more.
#[tokio::test]
async fn who_was_stopped_leaves_out_what_left_meanwhile() {
    for place in everywhere("stopped-bundle") {
        let queue = queue(&place).await;
        let names = bundle(&queue, 2).await;
        let stopped = queue.worker("stopped");
        let first = next(&stopped).await;
        let second = next(&stopped).await;
        first.ack_text("first").await.unwrap();
        // As its lease would look after a ttl without a heartbeat.
        let lease = format!("queues/q/bundles/{}-2/lease.json", names[0].trim_end_matches(".0"));
        let stale = r#"{"worker_id":"stopped","ttl_ms":1}"#;
        let put = place.store.put(&key(&lease), stale.into(), leasehold::Write::any()).await;
        assert!(matches!(put.unwrap(), leasehold::Put::Stored(_)));
        tokio::time::sleep(Duration::from_millis(1100)).await;
        let heir = Queue::open(&place.again(), "q").await.unwrap().unwrap();
        let again = next(&heir.worker("heir")).await;
        assert_eq!(again.id(), names[0], "{}", place.name);
        again.nack("later", Some(Duration::ZERO)).await.unwrap();
        // It has the rest of the bundle, and takes its time.
        let other = heir.worker("other");
        let mut own = next(&other).await;
        let _rest = match own.id() == names[1] {
            true => Some(std::mem::replace(&mut own, next(&other).await)),
            false => None,
        };
        assert_eq!(own.id(), names[0], "{}", place.name);
        assert_eq!(own.ack_text("own").await.unwrap(), leasehold::queue::Acked::First);
        assert_eq!(second.ack_text("second").await.unwrap(), leasehold::queue::Acked::First);
        let receipts = left(&place.store).await;
        let receipt = receipts.iter().find(|key| key.ends_with("-2.json")).unwrap();
        let receipt = place.store.get(&key(receipt)).await.unwrap().unwrap();
        let receipt: serde_json::Value = serde_json::from_slice(&receipt.body).unwrap();
        assert_eq!(receipt["results"], serde_json::json!([null, "second"]), "{}", place.name);
    }
}

/// What left before the crash is not done again, and is found by a few lists.
#[tokio::test]
async fn who_goes_on_after_a_crash_asks_little() {
    for shards in [1, 4] {
        let place = memory();
        let settings = QueueSettings { shards, ..quick() };
        let queue = Queue::create(&place.store, "q", settings).await.unwrap();
        bundle(&queue, 100).await;
        let worker = queue.worker("w");
        let mut left_it = BTreeSet::new();
        for n in 0..13 {
            let task = next(&worker).await;
            let name = task.id().to_owned();
            match n {
                // A task of its own, and a dead letter.
                1 => drop(task.nack("later", Some(Duration::from_secs(60))).await.unwrap()),
                11 => task.fail("never").await.unwrap(),
                _ => task.ack().await.unwrap().eq(&Acked::First).then_some(()).unwrap(),
            }
            if [1, 11].contains(&n) {
                left_it.insert(name);
            }
        }
        worker.drain().await.unwrap();
        // As if its worker had died before it could write down what had left.
        let keys = left(&place.store).await;
        let lease =
            keys.iter().find(|key| key.contains("/bundles/") && key.ends_with("lease.json"));
        let lease = key(lease.unwrap());
        let body = place.store.get(&lease).await.unwrap().unwrap().body;
        let mut record: serde_json::Value = serde_json::from_slice(&body).unwrap();
        record["crashes"] = 1.into();
        record.as_object_mut().unwrap().remove("done");
        let body = serde_json::to_vec(&record).unwrap();
        let put = place.store.put(&lease, body.into(), leasehold::Write::any()).await.unwrap();
        assert!(matches!(put, leasehold::Put::Stored(_)));
        let heir = queue.worker("heir");
        let before = place.store.usage();
        let first = next(&heir).await;
        let used = place.store.usage().since(&before);
        assert!(used.head < 10 && used.list < 8 + 4 * u64::from(shards), "{used:?}");
        let mut names = BTreeSet::from([first.id().to_owned()]);
        first.ack().await.unwrap();
        for _ in 0..97 {
            let task = next(&heir).await;
            names.insert(task.id().to_owned());
            task.ack().await.unwrap();
        }
        assert_eq!((names.len(), names.intersection(&left_it).count()), (98, 0));
    }
}

/// A bundle that somebody else has by now is no reason for a drain to fail.
#[tokio::test]
async fn a_drain_of_what_was_lost_is_no_error() {
    let place = memory();
    let queue = queue(&place).await;
    bundle(&queue, 3).await;
    let worker = queue.worker("w");
    next(&worker).await.ack().await.unwrap();
    let keys = left(&place.store).await;
    let lease = key(keys.iter().find(|key| key.ends_with("lease.json")).unwrap());
    let other = r#"{"worker_id":"other","ttl_ms":60000}"#;
    let put = place.store.put(&lease, other.into(), leasehold::Write::any()).await.unwrap();
    assert!(matches!(put, leasehold::Put::Stored(_)));
    worker.drain().await.unwrap();
    assert!(worker.next().await.unwrap().is_none());
}

/// What came out is what went in, also of a hand-over: numbers that are too long for us, too.
#[tokio::test]
async fn results_survive_a_hand_over_as_they_are() {
    let place = memory();
    let queue = queue(&place).await;
    bundle(&queue, 3).await;
    let odd = r#"{"id":123456789012345678901234,"a":1e400}"#;
    let raw = |text: &str| serde_json::from_str::<leasehold::queue::Json>(text).unwrap();
    let worker = queue.worker("w");
    next(&worker).await.ack_json(&raw(odd)).await.unwrap();
    next(&worker).await.ack_json(&raw("\"5\"")).await.unwrap();
    worker.drain().await.unwrap();
    next(&queue.worker("heir")).await.ack_json(&raw("5")).await.unwrap();
    let kept = left(&place.store).await;
    let receipt = place.store.get(&key(&kept[0])).await.unwrap().unwrap();
    let receipt = leasehold::queue::Receipt::parse(&receipt.body).unwrap();
    let results: Vec<String> =
        receipt.results.unwrap().iter().map(|it| it.as_ref().unwrap().get().to_owned()).collect();
    assert_eq!(results, [odd, "\"5\"", "5"]);
}

/// What earlier versions wrote into leases is read.
#[tokio::test]
async fn results_of_earlier_versions_are_kept() {
    let place = memory();
    let queue = queue(&place).await;
    bundle(&queue, 2).await;
    let worker = queue.worker("w");
    next(&worker).await.ack_text("x").await.unwrap();
    worker.drain().await.unwrap();
    let keys = left(&place.store).await;
    let lease = key(keys.iter().find(|key| key.ends_with("lease.json")).unwrap());
    let body = place.store.get(&lease).await.unwrap().unwrap().body;
    let mut record: serde_json::Value = serde_json::from_slice(&body).unwrap();
    assert_eq!(record["result_texts"], serde_json::json!([[0, "\"x\""]]));
    record.as_object_mut().unwrap().remove("result_texts");
    record["results"] = serde_json::json!([[0, { "old": 1 }]]);
    let body = serde_json::to_vec(&record).unwrap();
    let put = place.store.put(&lease, body.into(), leasehold::Write::any()).await.unwrap();
    assert!(matches!(put, leasehold::Put::Stored(_)));
    next(&queue.worker("heir")).await.ack().await.unwrap();
    let kept = left(&place.store).await;
    let receipt = place.store.get(&key(&kept[0])).await.unwrap().unwrap();
    let receipt = leasehold::queue::Receipt::parse(&receipt.body).unwrap();
    let results = receipt.results.unwrap();
    assert_eq!(results[0].as_ref().unwrap().get(), r#"{"old":1}"#);
    assert!(results[1].is_none());
}

#[tokio::test]
async fn results_of_a_bundle_have_a_limit() {
    let place = memory();
    let queue = queue(&place).await;
    bundle(&queue, 12).await;
    let worker = queue.worker("w");
    for _ in 0..12 {
        next(&worker).await.ack_text(&"r".repeat(1 << 20)).await.unwrap();
    }
    let kept = left(&place.store).await;
    let receipt = place.store.get(&key(&kept[0])).await.unwrap().unwrap();
    assert!(receipt.body.len() < 9 << 20);
    let receipt = leasehold::queue::Receipt::parse(&receipt.body).unwrap();
    let results = receipt.results.unwrap();
    let cut = |result: &&Option<leasehold::queue::Json>| {
        result.as_ref().unwrap().get() == r#"{"too_long":1048578}"#
    };
    assert_eq!((results.len(), results.iter().filter(cut).count()), (12, 5));
}
