//! Nodes that do whatever chance makes them do, offline or not, with syncs that die anywhere. In the
//! end every push has a receipt or a dead letter in the bucket, and nothing is left anywhere.

use std::collections::BTreeSet;

use leasehold::queue::Outcome;

use super::convergence::Fleet;
use super::faults::{Cut, Death};
use super::*;

/// The same for everybody who starts it with the same number.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }
}

struct Peer {
    local: Arc<Memory>,
    replica: Replica,
    queue: Queue,
    held: Vec<Task>,
}

impl Fleet {
    async fn claim(&self, queue: &Queue) -> Option<Task> {
        let worker = queue.worker("w");
        tokio::select! {
            task = worker.next() => task.unwrap(),
            () = self.sleep(Duration::from_secs(5)) => None,
        }
    }

    async fn peer(&self, name: &str) -> Peer {
        let local = Arc::new(Memory::new(self.clock.env()));
        let replica = self.replica(&local, name, None).await;
        let queue = replica.join("q").await.unwrap();
        Peer { local, replica, queue, held: Vec::new() }
    }

    /// A process of a node whose requests to the bucket end at some point.
    async fn replica(
        &self,
        local: &Arc<Memory>,
        name: &str,
        death: Option<&Arc<Death>>,
    ) -> Replica {
        let bucket = Arc::new(self.bucket.client(self.clock.env()));
        let settings = leasehold::StoreSettings::default();
        let bucket = match death {
            Some(death) => {
                Store::new(Arc::new(Cut::dying(bucket, death)), self.clock.env(), settings)
            }
            None => Store::new(bucket, self.clock.env(), settings),
        };
        let bucket = bucket.unwrap();
        if death.is_none() {
            bucket.init().await.unwrap();
        }
        Replica::open(&self.open_shared(local.clone()), &bucket, name).await.unwrap()
    }
}

async fn finish(dice: &mut Dice, task: Task) {
    let _ = match dice.roll(8) {
        0 => task.nack("once more", None).await.map(drop),
        1 => task.fail("never").await,
        2 => task.give_back().await,
        3 => {
            drop(task);
            Ok(())
        }
        _ => task.ack_text("done").await.map(drop),
    };
}

async fn a_life(seed: u64) {
    let fleet = Fleet::new();
    let mut dice = Dice(seed.wrapping_mul(7919) + 17);
    let mut log = Vec::new();
    let test = async {
        let queue = fleet.queue().await;
        let mut peers = vec![fleet.peer("a").await, fleet.peer("b").await, fleet.peer("c").await];
        let mut pushed = BTreeSet::new();
        for _ in 0..60 {
            let (n, what) = (dice.roll(3) as usize, dice.roll(16));
            log.push((n, what));
            match what {
                0..=3 => {
                    let mut task = NewTask::text("x");
                    if dice.roll(2) == 0 {
                        task = task.id(format!("c{}", dice.roll(4)));
                    }
                    if dice.roll(4) == 0 {
                        task = task.delay(Duration::from_secs(dice.roll(900)));
                    }
                    let on = if dice.roll(4) == 0 { &queue } else { &peers[n].queue };
                    let push = on.push(task).await.unwrap();
                    if push.outcome != Outcome::AlreadyCompleted {
                        pushed.insert(push.id);
                    }
                }
                4 => {
                    let tasks = (0..3).map(|n| NewTask::text(&n.to_string())).collect();
                    pushed.extend(peers[n].queue.push_bundle(tasks).await.unwrap());
                }
                5..=7 => {
                    let task = fleet.claim(&peers[n].queue).await;
                    peers[n].held.extend(task);
                }
                8 | 9 => {
                    if let Some(task) = peers[n].held.pop() {
                        finish(&mut dice, task).await;
                    }
                }
                10 => drop(peers[n].replica.up("q").await.unwrap()),
                11 => drop(peers[n].replica.down("q").await.unwrap()),
                12 => {
                    let death = Death::at(dice.roll(12) as i64, dice.roll(2) == 0);
                    let dying = fleet.replica(&peers[n].local, "d", Some(&death)).await;
                    let _ = match dice.roll(3) {
                        0 => dying.down("q").await.map(drop),
                        _ => dying.up("q").await.map(drop),
                    };
                }
                13 => fleet.sleep(Duration::from_secs(dice.roll(1200))).await,
                14 => {
                    for failed in queue.failed(10).await.unwrap() {
                        let _ = queue.retry(&failed.id).await;
                    }
                }
                _ => {
                    if let Some(task) = fleet.claim(&queue).await {
                        finish(&mut dice, task).await;
                    }
                }
            }
        }
        for peer in &mut peers {
            for task in peer.held.drain(..) {
                let _ = task.ack_text("done").await;
            }
        }
        for _ in 0..12 {
            for peer in &peers {
                peer.replica.up("q").await.unwrap();
                peer.replica.down("q").await.unwrap();
                while let Some(task) = fleet.claim(&peer.queue).await {
                    task.ack_text("done").await.unwrap();
                }
                peer.replica.up("q").await.unwrap();
                fleet.sleep(Duration::from_secs(1200)).await;
            }
        }
        let is_work = |key: &String| key.ends_with("/task.json") || key.ends_with("/tasks.jsonl");
        let left: Vec<_> = keys(queue.store()).await.into_iter().filter(is_work).collect();
        assert!(left.is_empty(), "{seed}: {left:?} {log:?}");
        for id in &pushed {
            let mut done = queue.receipt(id).await.unwrap().is_some();
            if let Some((bundle, n)) = id.split_once('.') {
                // Whoever does something here tells a result, so it shows what was done in the bundle.
                let receipt = queue.receipt(&format!("{bundle}-3")).await.unwrap();
                let results = receipt.and_then(|receipt| receipt.results).unwrap_or_default();
                done |= results.get(n.parse::<usize>().unwrap()).is_some_and(Option::is_some);
            }
            let dead = queue.dead_letter(id).await.unwrap().is_some();
            assert!(done || dead, "{seed}: {id} is nowhere: {log:?}");
        }
        for peer in &peers {
            let name = peer.replica.node();
            let left = keys(peer.queue.store()).await.into_iter().filter(is_work);
            let left: Vec<_> = left.collect();
            assert!(left.is_empty(), "{seed}: {left:?} at {name}: {log:?}");
            let status = peer.replica.status("q").await.unwrap();
            assert_eq!(status.outbox, 0, "{seed}: {name}: {log:?}");
        }
    };
    fleet.clock.pass(test).await;
}

#[tokio::test]
async fn whatever_happens_the_bucket_learns_of_it() {
    let seeds = std::env::var("LEASEHOLD_SEEDS").ok().and_then(|seeds| seeds.parse().ok());
    let only = std::env::var("LEASEHOLD_FROM").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0);
    for seed in only..seeds.unwrap_or(20) {
        a_life(seed).await;
    }
}
