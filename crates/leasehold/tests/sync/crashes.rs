//! A process that dies between any two requests, of the sync or of a worker: the next one finishes.

use std::sync::atomic::Ordering::SeqCst;

use super::faults::{Cut, Death};
use super::*;

/// A bucket and a replica, both in memory, that outlive those who use them.
struct World {
    bucket: Arc<Memory>,
    local: Arc<Memory>,
}

impl World {
    async fn new() -> Self {
        let world = Self {
            bucket: Arc::new(Memory::new(Env::system())),
            local: Arc::new(Memory::new(Env::system())),
        };
        Queue::create(&over(world.bucket.clone()), "q", relaxed()).await.unwrap();
        world.replica(None).await.join("q").await.unwrap();
        world
    }

    async fn there(&self) -> Queue {
        Queue::open(&over(self.bucket.clone()), "q").await.unwrap().unwrap()
    }

    /// A process of the node, that dies or not.
    async fn replica(&self, death: Option<&Arc<Death>>) -> Replica {
        let bucket: Arc<dyn Backend> = self.bucket.clone();
        let local: Arc<dyn Backend> = self.local.clone();
        let [bucket, local] = [bucket, local].map(|inner| match death {
            Some(death) => over(Arc::new(Cut::dying(inner, death))),
            None => over(inner),
        });
        match Replica::open(&local, &bucket, "a").await {
            Ok(replica) => replica,
            Err(_) => Replica::open(&over(self.local.clone()), &bucket, "a").await.unwrap(),
        }
    }

    async fn here(&self) -> Queue {
        self.replica(None).await.queue("q").await.unwrap().unwrap()
    }

    /// Without the lock of one that died.
    async fn recover(&self) -> Replica {
        let replica = self.replica(None).await;
        let lock = key("sync/sync.lock");
        let _ = over(self.local.clone()).delete(&lock).await.unwrap();
        replica
    }
}

/// Does it with every possible death, until it lives.
async fn with_every_death<F: Future<Output = ()>>(mut test: impl FnMut(Arc<Death>, String) -> F) {
    for carried_out in [false, true] {
        for request in 0.. {
            let death = Death::at(request, carried_out);
            test(death.clone(), format!("request {request}, carried out: {carried_out}")).await;
            if !death.happened.load(SeqCst) {
                assert!(request > 5, "nothing was tested");
                break;
            }
        }
    }
}

#[tokio::test]
async fn a_sync_up_that_dies_anywhere_is_finished_by_the_next() {
    with_every_death(|death, case| async move {
        let world = World::new().await;
        let there = world.there().await;
        for id in ["done", "dead", "nacked"] {
            push(&there, id).await;
        }
        there.push_bundle((0..2).map(|n| NewTask::text(&n.to_string())).collect()).await.unwrap();
        let replica = world.replica(None).await;
        replica.down("q").await.unwrap();
        let here = world.here().await;
        let worker = here.worker("w");
        let hour = Some(Duration::from_secs(3600));
        for _ in 0..5 {
            let task = worker.next().await.unwrap().unwrap();
            match task.id() {
                "done" => drop(task.ack().await.unwrap()),
                "dead" => task.fail("never").await.unwrap(),
                "nacked" => drop(task.nack("again", hour).await.unwrap()),
                _ if task.text() == "0" => drop(task.nack("again", hour).await.unwrap()),
                _ => drop(task.ack().await.unwrap()),
            }
        }
        push(&here, "pushed").await;
        here.push(NewTask::text("x").id("later").delay(Duration::from_secs(3600))).await.unwrap();
        let _ = world.replica(Some(&death)).await.up("q").await;
        let next = world.recover().await;
        let up = next.up("q").await.unwrap();
        assert_eq!((up.duplicates, up.lost, up.left, up.troubled), (0, 0, 0, 0), "{case}: {up:?}");
        let left = keys(there.store()).await;
        let count = |part: &str| left.iter().filter(|key| key.contains(part)).count();
        assert_eq!(count("/completed/"), 2, "{case}: {left:?}");
        assert_eq!(count("/failed/"), 1, "{case}: {left:?}");
        assert_eq!(count("/scheduled/"), 1, "{case}: {left:?}");
        // Those that failed, with what went wrong, and the one that was pushed.
        assert_eq!((count("task.json"), count("pending/nacked/")), (4, 2), "{case}: {left:?}");
        assert_eq!((count("bundles/"), count(".0/")), (0, 2), "{case}: {left:?}");
        for id in ["nacked"] {
            let (_, held) = there.find(id).await.unwrap().unwrap();
            assert_eq!(held.unwrap().retries, 1, "{case}");
        }
        let status = next.status("q").await.unwrap();
        assert_eq!((status.outbox, status.duplicates), (0, 0), "{case}: {status:?}");
    })
    .await;
}

/// A sync that died after its PUT does not know of it. What others have done since must not be pushed
/// again, whoever chose its name.
#[tokio::test]
async fn what_was_done_after_a_sync_up_died_does_not_come_back() {
    with_every_death(|death, case| async move {
        let world = World::new().await;
        let here = world.here().await;
        here.push(NewTask::text("x")).await.unwrap();
        here.push(NewTask::text("y")).await.unwrap();
        here.push_bundle(vec![NewTask::text("1"), NewTask::text("2")]).await.unwrap();
        let _ = world.replica(Some(&death)).await.up("q").await;
        let mut done = Vec::new();
        let others = until_empty(&world.there().await, "other");
        while let Some(task) = others.next().await.unwrap() {
            done.push(task.id().to_owned());
            match task.text().as_str() {
                "y" => task.fail("never").await.unwrap(),
                _ => drop(task.ack().await.unwrap()),
            }
        }
        let replica = world.recover().await;
        replica.up("q").await.unwrap();
        done.extend(drain(&world.there().await).await);
        replica.down("q").await.unwrap();
        done.extend(drain(&world.here().await).await);
        done.sort();
        let all = done.len();
        done.dedup();
        assert_eq!((all, done.len()), (4, 4), "{case}: {done:?}");
    })
    .await;
}

#[tokio::test]
async fn a_first_telling_of_a_claim_that_dies_anywhere_keeps_it() {
    keeps_a_claim(false).await;
}

#[tokio::test]
async fn a_renewal_of_a_claim_that_dies_anywhere_keeps_it() {
    keeps_a_claim(true).await;
}

async fn keeps_a_claim(told: bool) {
    with_every_death(|death, case| async move {
        let world = World::new().await;
        let there = world.there().await;
        push(&there, "t").await;
        world.replica(None).await.down("q").await.unwrap();
        let task = next(&world.here().await).await;
        if told {
            world.replica(None).await.up("q").await.unwrap();
        }
        let _ = world.replica(Some(&death)).await.up("q").await;
        let replica = world.recover().await;
        let up = replica.up("q").await.unwrap();
        assert_eq!((up.held, up.lost, up.left), (1, 0, 1), "{case}: {up:?}");
        task.check().unwrap();
        task.ack().await.unwrap();
        assert_eq!(replica.up("q").await.unwrap().completed, 1, "{case}");
        assert_eq!(keys(there.store()).await, ["queues/q/completed/t.json"], "{case}");
    })
    .await;
}

#[tokio::test]
async fn a_sync_down_that_dies_anywhere_is_finished_by_the_next() {
    with_every_death(|death, case| async move {
        let world = World::new().await;
        let there = world.there().await;
        for id in ["done", "dead", "purged", "stays", "held"] {
            push(&there, id).await;
        }
        world.replica(None).await.down("q").await.unwrap();
        // What others did since.
        let worker = there.worker("other");
        for _ in 0..3 {
            let task = worker.next().await.unwrap().unwrap();
            match task.id() {
                "dead" => task.fail("never").await.unwrap(),
                "done" => drop(task.ack().await.unwrap()),
                _ => std::mem::forget(task),
            }
        }
        let _ = there.store().delete(&key("queues/q/pending/purged/task.json")).await.unwrap();
        push(&there, "new").await;
        there.push_bundle(vec![NewTask::text("b")]).await.unwrap();
        let _ = world.replica(Some(&death)).await.down("q").await;
        let next = world.recover().await;
        next.down("q").await.unwrap();
        let status = next.status("q").await.unwrap();
        assert_eq!((status.set_aside, status.outbox), (1, 0), "{case}: {status:?}");
        // Nobody's but those.
        let worker = world.here().await.worker("w");
        let mut got = Vec::new();
        for _ in 0..3 {
            let next = tokio::time::timeout(Duration::from_secs(5), worker.next()).await;
            let task = next.unwrap_or_else(|_| panic!("{case}: only {got:?}")).unwrap().unwrap();
            got.push(task.text());
            task.ack().await.unwrap();
        }
        got.sort();
        assert_eq!(got, ["b", "new", "stays"], "{case}");
        let more = tokio::time::timeout(Duration::from_millis(20), worker.next()).await;
        assert!(more.is_err(), "{case}: {more:?}");
    })
    .await;
}

/// What is there, the bucket learns of: there is no receipt, dead letter or push without its entry.
#[tokio::test]
async fn a_worker_that_dies_anywhere_hides_nothing_from_the_bucket() {
    with_every_death(|death, case| async move {
        let world = World::new().await;
        let there = world.there().await;
        let own = world.replica(Some(&death)).await;
        let act = async {
            let Some(here) = own.queue("q").await? else { return leasehold::Result::<()>::Ok(()) };
            here.push(NewTask::text("x").id("a")).await?;
            here.push(NewTask::text("x").id("b")).await?;
            here.push_bundle(vec![NewTask::text("1"), NewTask::text("2")]).await?;
            let worker = here.worker("w");
            for _ in 0..4 {
                let Some(task) = worker.next().await? else { break };
                match (task.id(), task.text().as_str()) {
                    ("b", _) => task.fail("never").await?,
                    (_, "1") => drop(task.nack("later", Some(Duration::from_secs(3600))).await?),
                    _ => drop(task.ack().await?),
                }
            }
            Ok(())
        };
        // A request that was to come is not waited for.
        let _ = tokio::time::timeout(Duration::from_secs(5), act).await;
        let replica = world.recover().await;
        replica.up("q").await.unwrap();
        let (here, there) = (keys(&over(world.local.clone())).await, keys(there.store()).await);
        for key in here {
            let told = key.contains("/completed/")
                || key.contains("/failed/")
                || key.ends_with("/task.json")
                || key.ends_with("/tasks.jsonl");
            // What is over there may be left over here, by one that died while it cleaned up.
            let name = key.split('/').nth(3).unwrap().trim_end_matches(".json");
            let over = there.iter().any(|there| {
                (there.contains("/completed/") || there.contains("/failed/"))
                    && there.contains(name)
            });
            assert!(!told || over || there.contains(&key), "{case}: {key} is not in {there:?}");
        }
    })
    .await;
}
