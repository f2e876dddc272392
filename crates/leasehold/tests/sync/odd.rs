//! What happens to replicas that nobody thinks of: copied, older than their queue, full of old counts.

use leasehold::Write;
use leasehold_testkit::clock::Fast;

use super::*;

fn copy(from: &std::path::Path, to: &std::path::Path) {
    let done = std::process::Command::new("cp").arg("-a").arg(from).arg(to).status().unwrap();
    assert!(done.success());
}

async fn opened(folder: &std::path::Path, bucket: &Bucket) -> Replica {
    let store = Connect::new(StoreUrl::Directory(folder.to_owned())).open().unwrap();
    Replica::open(&store, &bucket.client(), "copy").await.unwrap()
}

fn id(folder: &std::path::Path) -> String {
    let text = std::fs::read(folder.join("sync/replica.json")).unwrap();
    serde_json::from_slice::<serde_json::Value>(&text).unwrap()["id"].as_str().unwrap().to_owned()
}

/// A replica's folder is copied while it holds a task, as with a card of a Raspberry Pi: the copy is
/// another node, and does not take the first one's lease in the bucket for its own.
#[tokio::test]
async fn a_copied_replica_is_another_one() {
    for bucket in Bucket::everywhere("copied") {
        let queue = bucket.queue().await;
        push(&queue, "t").await;
        let a = bucket.node("a").await;
        a.down().await;
        let task = next(&a.queue).await;
        push(&a.queue, "pushed").await;
        // Before the bucket has heard of it.
        let first = a.root.path().join("store");
        let second = a.root.path().join("copy");
        copy(&first, &second);
        let b = opened(&second, &bucket).await;
        assert_ne!(id(&first), id(&second), "{}", bucket.name());
        let before = (id(&first), id(&second));
        // Whoever opens them next finds them so.
        a.again(bucket.client()).await;
        let again = opened(&second, &bucket).await;
        assert_eq!((id(&first), id(&second)), before);
        drop(again);
        assert_eq!(a.up().await.held, 1, "{}", bucket.name());
        let up = b.up("q").await.unwrap();
        assert_eq!((up.held, up.pushed, up.troubled), (0, 0, 0), "{}: {up:?}", bucket.name());
        assert_eq!(up.lost, 1, "it is the first one's: {up:?}");
        task.ack().await.unwrap();
        let up = a.up().await;
        assert_eq!((up.completed, up.duplicates), (1, 0), "{up:?}");
        assert_eq!(drain(&a.queue).await, ["pushed"]);
        assert_eq!(a.up().await.completed, 1);
        b.down("q").await.unwrap();
        b.up("q").await.unwrap();
        let b_queue = b.queue("q").await.unwrap().unwrap();
        assert!(drain(&b_queue).await.is_empty(), "{}", bucket.name());
        let counts = queue.status(0).await.unwrap().counts;
        assert_eq!((counts.completed, counts.free, counts.leased), (2, 0, 0), "{}", bucket.name());
    }
}

/// A folder that was copied long after it was told of everything, and is opened days later, brings
/// nothing back.
#[tokio::test]
async fn an_old_copy_brings_nothing_back() {
    let bucket = Bucket::memory();
    let queue = bucket.queue().await;
    let a = bucket.node("a").await;
    // A name that nobody chose: pushing it asks nobody whether it was done.
    a.queue.push(NewTask::text("t")).await.unwrap();
    let second = a.root.path().join("copy");
    copy(&a.root.path().join("store"), &second);
    a.up().await;
    assert_eq!(drain(&a.queue).await.len(), 1);
    a.up().await;
    let b = opened(&second, &bucket).await;
    let up = b.up("q").await.unwrap();
    assert_eq!(up.pushed, 0, "{up:?}");
    assert!(drain(&b.queue("q").await.unwrap().unwrap()).await.is_empty());
    let counts = queue.status(0).await.unwrap().counts;
    assert_eq!((counts.completed, counts.free), (1, 0));
}

/// That a push was told need not be on disk when the power fails. After a reboot the bucket is asked first:
/// what others have done since does not come back.
#[tokio::test]
async fn what_a_power_failure_undid_brings_nothing_back() {
    let bucket = Bucket::memory();
    let queue = bucket.queue().await;
    let node = bucket.node("a").await;
    let pushed = node.queue.push(NewTask::text("t")).await.unwrap();
    let local = node.queue.store();
    let entry = key(&format!("sync/q/outbox/pending/{}.json", pushed.id));
    let untold = local.get(&entry).await.unwrap().unwrap().body;
    assert_eq!(node.up().await.pushed, 1);
    assert_eq!(drain(&queue).await, [pushed.id]);
    let _ = local.put(&entry, untold, Write::any()).await.unwrap();
    let state = key("sync/q/state.json");
    let body = local.get(&state).await.unwrap().unwrap().body;
    let mut body: serde_json::Value = serde_json::from_slice(&body).unwrap();
    body["boot_id"] = "an earlier boot".into();
    let _ = local.put(&state, body.to_string().into(), Write::any()).await.unwrap();
    let up = node.up().await;
    assert_eq!((up.pushed, up.left), (0, 0), "{up:?}");
    assert!(drain(&node.queue).await.is_empty());
}

/// The bucket's queue was removed and made again with other shards. What was pushed here goes to where
/// it is looked for, and what is there comes down.
#[tokio::test]
async fn a_queue_with_other_shards_is_followed() {
    for bucket in Bucket::everywhere("shards") {
        let queue = bucket.queue().await;
        push(&queue, "old").await;
        let node = bucket.node("a").await;
        node.down().await;
        push(&node.queue, "here").await;
        let store = queue.store();
        for name in keys(store).await {
            let _ = store.delete(&key(&name)).await.unwrap();
        }
        let _ = store.delete(&key("queues/q/queue.json")).await.unwrap();
        for shards in [4, 2] {
            let sharded = QueueSettings { shards, ..relaxed() };
            let again = Queue::create(store, "q", sharded).await.unwrap();
            push(&again, "there").await;
            let down = node.down().await;
            assert_eq!(down.new, 1, "{}: {down:?}", bucket.name());
            let up = node.up().await;
            assert_eq!((up.troubled, up.left), (0, 0), "{}: {up:?}", bucket.name());
            let mut free: Vec<String> =
                again.peek(10).await.unwrap().into_iter().map(|task| task.id).collect();
            free.sort();
            match shards {
                4 => assert_eq!(free, ["here", "there"], "{}", bucket.name()),
                _ => assert_eq!(free, ["there"], "{}", bucket.name()),
            }
            let mut done = drain(&node.queue).await;
            done.sort();
            assert_eq!(done, free, "what is in no bucket is not run");
            let up = node.up().await;
            assert_eq!((up.completed as usize, up.left), (free.len(), 0), "{up:?}");
            let counts = again.status(0).await.unwrap().counts;
            assert_eq!((counts.free, counts.leased), (0, 0), "{}", bucket.name());
            for name in keys(store).await {
                let _ = store.delete(&key(&name)).await.unwrap();
            }
            let _ = store.delete(&key("queues/q/queue.json")).await.unwrap();
        }
    }
}

/// Of completions that came second only the number is kept, once their receipts are forgotten: exactly,
/// whatever dies in between. And receipts of a relaxed queue are forgotten in the bucket, too.
#[tokio::test]
async fn what_is_past_its_time_is_forgotten_but_counted() {
    let clock = Fast::default();
    let env = clock.env();
    let memory = Memory::new(env.clone());
    let open =
        |memory: Memory| Store::new(Arc::new(memory), env.clone(), Default::default()).unwrap();
    let there = open(memory.client(env.clone()));
    let queue = Queue::create(&there, "q", relaxed()).await.unwrap();
    let local = Memory::new(env.clone());
    let (near, far) = (open(local.client(env.clone())), open(memory.client(env.clone())));
    let replica = Replica::open(&near, &far, "a").await.unwrap();
    let here = replica.join("q").await.unwrap();
    let test = async {
        for n in 0..3 {
            push(&queue, &format!("t{n}")).await;
        }
        replica.down("q").await.unwrap();
        // Everybody does everything.
        for queue in [&queue, &here] {
            let worker = until_empty(queue, "w");
            while let Some(task) = worker.next().await.unwrap() {
                task.ack().await.unwrap();
            }
        }
        assert_eq!(replica.up("q").await.unwrap().duplicates, 3);
        let marks = || async {
            let list = List::prefix("sync/q/duplicates/").unwrap();
            let page = replica.local().list(list).collect().await.unwrap();
            page.entries.into_iter().map(|entry| entry.key.to_string()).collect::<Vec<_>>()
        };
        let duplicates = || async { replica.status("q").await.unwrap().duplicates };
        replica.down("q").await.unwrap();
        assert_eq!((marks().await.len(), duplicates().await), (3, 3));
        env.clock().sleep(Duration::from_secs(8 * 86_400)).await;
        // One that died after it had counted them, and removed one.
        let state = key("sync/q/state.json");
        let object = replica.local().get(&state).await.unwrap().unwrap();
        let mut half: serde_json::Value = serde_json::from_slice(&object.body).unwrap();
        half["old_duplicates"] = 2.into();
        half["forgetting"] = marks().await[..2].into();
        let write = leasehold::Write::any;
        let _ = replica.local().put(&state, half.to_string().into(), write()).await.unwrap();
        let _ = replica.local().delete(&key(&marks().await[0])).await.unwrap();
        assert_eq!((marks().await.len(), duplicates().await), (2, 3));
        replica.down("q").await.unwrap();
        assert_eq!((marks().await.len(), duplicates().await), (0, 3));
        assert_eq!(queue.status(0).await.unwrap().counts.completed, 3);
        // A reap begins anywhere, and so does not find them each time.
        for _ in 0..64 {
            queue.reap().await.unwrap();
        }
        assert_eq!(queue.status(0).await.unwrap().counts.completed, 0);
    };
    clock.pass(test).await;
}

/// Whoever comes while another process of its node fetches everything for the first time gets the queue
/// all the same.
#[tokio::test]
async fn nobody_is_turned_away_by_a_sync_of_its_own_node() {
    use leasehold::lock::{Lock, LockSettings};
    let bucket = Bucket::memory();
    bucket.queue().await;
    let root = tempfile::tempdir().unwrap();
    let replica = Replica::open(&directory(&root), &bucket.client(), "a").await.unwrap();
    let settings =
        LockSettings { ttl: Duration::from_secs(60), ..LockSettings::of(replica.local().kind()) };
    let lock = Lock::at(replica.local(), key("sync/sync.lock"), "another", settings).unwrap();
    let guard = lock.acquire().await.unwrap();
    let queue = replica.choose("q").await.unwrap().unwrap();
    assert!(queue.settings().replica);
    guard.release().await.unwrap();
}

/// What a power loss leaves of a lock is an empty file: each sync is a process of its own, and none may wait
/// for good.
#[tokio::test]
async fn an_old_empty_lock_does_not_stop_syncs() {
    let bucket = Bucket::memory();
    let queue = bucket.queue().await;
    let node = bucket.node("a").await;
    push(&node.queue, "t").await;
    let lock = node.root.path().join("store/sync/sync.lock");
    let file = std::fs::File::create(&lock).unwrap();
    file.set_modified(std::time::SystemTime::now() - Duration::from_secs(3600)).unwrap();
    assert_eq!(node.again(bucket.client()).await.up("q").await.unwrap().pushed, 1);
    assert!(queue.find("t").await.unwrap().is_some());
}
