//! A busy worker of a directory gives one file to many tasks as their lease.

use std::collections::{HashMap, HashSet};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use leasehold::ErrorKind;
use leasehold::queue::{Acked, Task};
use leasehold_testkit::faulty::{Fault, Faulty};

use super::*;

fn lease(place: &Place, id: &str) -> PathBuf {
    place.path().join(format!("queues/q/pending/{id}/lease.json"))
}

fn inode(path: &Path) -> u64 {
    path.metadata().unwrap().ino()
}

/// Tasks of a new queue that have one lease file, and the others that were claimed on the way: how fast this
/// machine is decides who shares with whom.
async fn sharing(place: &Place, queue: &Queue, worker: &Worker) -> (Vec<Task>, Vec<Task>) {
    for round in 0..20 {
        for n in 0..40 {
            push(queue, &format!("t{round}-{n}")).await;
        }
        let mut groups: HashMap<u64, Vec<Task>> = HashMap::new();
        for _ in 0..40 {
            let task = next(worker).await;
            groups.entry(inode(&lease(place, task.id()))).or_default().push(task);
        }
        let (shared, single): (Vec<_>, Vec<_>) =
            groups.into_values().partition(|tasks| tasks.len() > 5);
        let mut shared = shared.into_iter();
        let others = single.into_iter().flatten();
        match shared.next() {
            Some(tasks) => return (tasks, others.chain(shared.flatten()).collect()),
            None => ack_all(others.collect()).await,
        }
    }
    panic!("no two tasks in a row within milliseconds");
}

async fn ack_all(tasks: Vec<Task>) {
    for task in tasks {
        assert_eq!(task.ack().await.unwrap(), Acked::First);
    }
}

/// Waits until their holder finds that they are lost, and ends as if it had died then.
async fn forget_when_lost(tasks: Vec<Task>) {
    for task in tasks {
        let lost = tokio::time::timeout(Duration::from_secs(5), task.lost().cancelled_owned());
        lost.await.expect("the lease is lost");
        std::mem::forget(task);
    }
}

#[tokio::test]
async fn tasks_that_share_a_lease_are_done_and_renewed_one_by_one() {
    let place = directory();
    let queue = queue(&place).await;
    let worker = queue.worker("w");
    let (mut shared, others) = sharing(&place, &queue, &worker).await;
    ack_all(others).await;
    // Nobody else gets them.
    let other = until_empty(&queue, "other");
    let looked = tokio::time::timeout(Duration::from_millis(200), other.next()).await;
    assert!(looked.is_err(), "they are held");
    // One is done, the others stay as they are.
    ack_all(vec![shared.pop().unwrap()]).await;
    assert!(shared.iter().all(|task| task.check().is_ok()));
    // After the first renewal each has a record of its own, with the token that it had.
    tokio::time::sleep(Duration::from_millis(1500)).await;
    let files: HashSet<_> = shared.iter().map(|task| inode(&lease(&place, task.id()))).collect();
    assert_eq!(files.len(), shared.len());
    for task in &shared {
        task.check().unwrap();
        let record = std::fs::read_to_string(lease(&place, task.id())).unwrap();
        let record: serde_json::Value = serde_json::from_str(&record).unwrap();
        assert_eq!(record["token"], task.token(), "{record}");
    }
    ack_all(shared).await;
    let left = left(&place.store).await;
    assert!(left.iter().all(|key| key.starts_with("queues/q/completed/")), "{left:?}");
}

/// What a worker left when it was killed, or stopped for long, is somebody else's after a ttl, each for itself.
#[tokio::test]
async fn what_is_taken_over_stays_with_whoever_took_it() {
    let place = directory();
    let queue = queue(&place).await;
    let worker = queue.worker("w");
    let (shared, others) = sharing(&place, &queue, &worker).await;
    ack_all(others).await;
    let taken = shared[0].id().to_owned();
    let hers = r#"{"worker_id":"hers","ttl_ms":60000}"#;
    std::fs::remove_file(lease(&place, &taken)).unwrap();
    std::fs::write(lease(&place, &taken), hers).unwrap();
    // The others are not concerned; and with receipts, whoever is done first has done it.
    for task in shared {
        let is_taken = task.id() == taken;
        assert_eq!(task.ack().await.unwrap(), Acked::First);
        assert!(!is_taken || std::fs::read_to_string(lease(&place, &taken)).unwrap() == hers);
    }
    let left = left(&place.store).await;
    let pending = left.iter().filter(|key| key.starts_with("queues/q/pending/"));
    assert_eq!(pending.collect::<Vec<_>>(), [&format!("queues/q/pending/{taken}/lease.json")]);
}

/// The seed's clients may write into the file. Then all its names say so, and their tasks are done again
/// some day rather than never.
#[tokio::test]
async fn a_client_that_writes_into_a_shared_lease_loses_nothing() {
    let place = directory();
    let queue = queue(&place).await;
    let worker = queue.worker("w");
    let (shared, others) = sharing(&place, &queue, &worker).await;
    ack_all(others).await;
    let ids: HashSet<_> = shared.iter().map(|task| task.id().to_owned()).collect();
    let hers = r#"{"worker_id":"hers","ttl_ms":1000}"#;
    std::fs::write(lease(&place, shared[0].id()), hers).unwrap();
    // The holder finds out at its next renewal.
    forget_when_lost(shared).await;
    let again: HashSet<_> = drain(&queue, "again").await.into_iter().collect();
    assert_eq!(again, ids);
}

/// A pass is used once at a key: otherwise whoever had a task before could take its lease for the one that
/// it had.
#[tokio::test]
async fn a_task_that_comes_back_at_once_has_another_lease() {
    let place = directory();
    let queue = queue(&place).await;
    let worker = queue.worker("w");
    for round in 0..50 {
        let id = format!("t{round}");
        for n in 0..3 {
            push(&queue, &format!("before-{round}-{n}")).await;
        }
        for _ in 0..3 {
            next(&worker).await.ack().await.unwrap();
        }
        push(&queue, &id).await;
        let zombie = next(&worker).await;
        let first = std::fs::read(lease(&place, &id)).unwrap();
        // Somebody removes it, and it comes again.
        std::fs::remove_dir_all(place.path().join(format!("queues/q/pending/{id}"))).unwrap();
        push(&queue, &id).await;
        let task = next(&worker).await;
        assert_eq!(task.id(), id);
        let second = std::fs::read(lease(&place, &id)).unwrap();
        assert_ne!(first, second, "round {round}");
        // Whoever had it before cannot end this one.
        let _ = zombie.give_back().await;
        assert_eq!(std::fs::read(lease(&place, &id)).unwrap(), second);
        task.ack().await.unwrap();
    }
}

/// A power loss may leave the names of a file whose content never reached the disk. All its tasks are free after
/// one ttl, not one after the other.
#[tokio::test]
async fn a_shared_lease_that_is_empty_holds_its_tasks_for_one_ttl() {
    let place = directory();
    let queue = queue(&place).await;
    let worker = queue.worker("w");
    let (shared, others) = sharing(&place, &queue, &worker).await;
    ack_all(others).await;
    let ids: HashSet<_> = shared.iter().map(|task| task.id().to_owned()).collect();
    let paths: Vec<_> = ids.iter().map(|id| lease(&place, id)).collect();
    let file = std::fs::File::options().write(true).open(&paths[0]).unwrap();
    file.set_len(0).unwrap();
    file.set_modified(std::time::SystemTime::now() - Duration::from_secs(60)).unwrap();
    // Nobody renews them any more.
    forget_when_lost(shared).await;
    let files: HashSet<_> = paths.iter().map(|path| inode(path)).collect();
    assert_eq!(files.len(), 1);
    let start = std::time::Instant::now();
    let again: HashSet<_> = drain(&queue, "again").await.into_iter().collect();
    assert_eq!(again, ids);
    // Half a ttl each, one after the other, would be half as many seconds.
    let most = 0.4 * ids.len() as f64;
    assert!(start.elapsed().as_secs_f64() < most, "{} took {:?}", ids.len(), start.elapsed());
}

/// A claim whose answer got lost is found and given back, long before its ttl is over.
#[tokio::test]
async fn a_pass_without_an_answer_is_looked_for() {
    let place = directory();
    let faulty = Arc::new(Faulty::writes(place.store.backend().clone(), []));
    let (ttl, heartbeat) = (Duration::from_secs(600), Duration::from_secs(200));
    let settings = QueueSettings { ttl, heartbeat, ..quick() };
    let queue = Queue::create(&over(faulty.clone()), "q", settings).await.unwrap();
    let worker = queue.worker("w");
    let ids: HashSet<_> = (0..60).map(|n| format!("t{n}")).collect();
    for id in &ids {
        push(&queue, id).await;
    }
    let mut done = HashSet::new();
    let mut ack = async |task: Task| {
        assert!(done.insert(task.id().to_owned()));
        task.ack().await.unwrap();
    };
    // An ordinary claim is settled by a look at it. So is this one, but by somebody else.
    let mut lost = None;
    for _ in 0..20 {
        ack(next(&worker).await).await;
        ack(next(&worker).await).await;
        faulty.next_put_of("/lease.json", vec![Fault::LostAnswer], Vec::new());
        match worker.next().await {
            Ok(task) => ack(task.unwrap()).await,
            Err(error) => {
                lost = Some(error);
                break;
            }
        }
    }
    assert_eq!(lost.expect("a pass was used").kind(), ErrorKind::Unavailable);
    let rest = tokio::time::timeout(Duration::from_secs(60), drain(&queue, "rest"));
    for id in rest.await.expect("nothing is held") {
        assert!(done.insert(id));
    }
    assert_eq!(done, ids);
}
