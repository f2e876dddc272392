//! Relaxed queues: their workers claim in this node's replica, and the supervisor keeps that in step
//! with the bucket.
//!
//! Which queues those are is told by the replica itself, at no cost: a worker that finds its queue
//! switched to relaxed mode joins it there, and the supervisor sees it at its next look.

use std::time::Duration;

use leasehold::protocol::supervise::EVERY;
use leasehold::queue::Mode;
use leasehold::sync::Replica;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::{Event, GOODBYE, Supervisor};

/// A queue of the replica.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Replicated {
    pub name: String,
    /// Whether it is a relaxed one still. One that is not any more may have something to tell.
    pub relaxed: bool,
    pub sync_up: Duration,
}

/// The loop that keeps these queues in step.
pub struct Syncing {
    queues: Vec<String>,
    end: CancellationToken,
    running: JoinHandle<()>,
}

impl Supervisor {
    /// Whether all that this node does is work on relaxed queues: then it reads its plan and reports
    /// when it syncs up, and asks for nothing in between.
    pub(super) fn is_relaxed(&self) -> bool {
        let relaxed = |queue: &String| {
            self.replicated.iter().any(|replicated| replicated.name == *queue && replicated.relaxed)
        };
        !self.compiles && !self.queues.is_empty() && self.queues.iter().all(relaxed)
    }

    /// How often this node reports.
    pub(super) fn interval(&self) -> Duration {
        let up = self.replicated.iter().map(|replicated| replicated.sync_up).min();
        match (self.given, up) {
            (Some(given), _) => given,
            (None, Some(up)) if self.is_relaxed() => up.max(EVERY),
            (None, _) => EVERY,
        }
    }

    /// Finds out what the replica has, in a task of its own. With `ask`, queues of the plan that are
    /// not there are asked for in the bucket, one GET each, and joined if they are relaxed ones.
    pub(super) fn compare_replica(&mut self, ask: bool) {
        let Some(replica) = self.replica.clone().filter(|_| !self.comparing) else { return };
        self.comparing = true;
        let (queues, events) = (self.queues.clone(), self.events.clone());
        tokio::spawn(async move {
            if ask {
                for queue in queues {
                    // Who is offline, or early, sees it another time.
                    if let Err(error) = replica.choose(&queue).await {
                        tracing::debug!(queue, %error, "the queue cannot be looked at");
                    }
                }
            }
            let _ = events.send(Event::Replicated(all(&replica).await)).await;
        });
    }

    pub(super) fn replicated(&mut self, replicated: Vec<Replicated>) {
        if self.ending.is_some() {
            return;
        }
        self.replicated = replicated;
        let every = self.interval();
        if every != self.every {
            self.every = every;
            (self.next_look, self.next_report) = (self.after_pause(), self.now());
        }
        let queues: Vec<String> = self.replicated.iter().map(|one| one.name.clone()).collect();
        let ended = self.syncing.as_ref().is_none_or(|syncing| syncing.running.is_finished());
        let same = self.syncing.as_ref().is_some_and(|syncing| syncing.queues == queues);
        if (same && !ended) || queues.is_empty() {
            return;
        }
        if let Some(syncing) = self.syncing.take() {
            syncing.end.cancel();
        }
        let Some(replica) = self.replica.clone() else { return };
        let end = CancellationToken::new();
        let (names, stop) = (queues.clone(), end.clone());
        let running = tokio::spawn(async move { replica.run(&names, stop).await });
        self.syncing = Some(Syncing { queues, end, running });
    }

    /// Ends the loop and tells the bucket what is still to be told, if it answers. What cannot be told
    /// now is in the outbox.
    pub(super) async fn end_sync(&mut self) {
        let Some(Syncing { queues, end, running }) = self.syncing.take() else { return };
        let Some(replica) = self.replica.clone() else { return };
        end.cancel();
        let last = async {
            let _ = running.await;
            for queue in queues {
                if let Err(error) = replica.up(&queue).await {
                    tracing::warn!(queue, %error, "the bucket could not be told everything");
                }
            }
        };
        let left = self.ending.as_ref().map(|end| end.kill.since(self.now()));
        let patience = left.unwrap_or_default().max(GOODBYE);
        if tokio::time::timeout(patience, last).await.is_err() {
            tracing::warn!("the bucket could not be told everything in time");
        }
    }
}

async fn all(replica: &Replica) -> leasehold::Result<Vec<Replicated>> {
    let mut all = Vec::new();
    for name in replica.queues().await? {
        // One whose settings were damaged after they were listed is seen another time.
        if let Ok(Some(queue)) = replica.queue(&name).await {
            let settings = queue.settings();
            let relaxed = settings.mode == Mode::Relaxed;
            all.push(Replicated { name, relaxed, sync_up: settings.sync_up });
        }
    }
    Ok(all)
}
