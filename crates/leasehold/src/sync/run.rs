//! The loop that keeps replicas in step: up and down, each in its interval.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::Replica;
use super::down::Asking;
use crate::env::BootTime;
use crate::queue::Mode;
use crate::{ErrorKind, Result};

/// How often to look whether a worker has nothing to do: a look at the local directory.
const LOOK: Duration = Duration::from_secs(5);
const NEVER: Duration = Duration::from_secs(u32::MAX as u64);
/// The first pause after a sync that failed.
const FIRST: Duration = Duration::from_secs(5);

/// When what is due, for one queue.
#[derive(Debug, Clone)]
struct Due {
    up: BootTime,
    down: BootTime,
    /// When a worker that has nothing to do is reason enough to ask.
    dry: BootTime,
    /// For how long it is not, after an answer with nothing new.
    dry_pause: Duration,
    failures: u32,
}

impl Replica {
    /// Keeps these queues in step with the bucket until it is cancelled. Those that this node has no
    /// replica of yet are joined. Errors are reported and tried again: a node may be offline for days.
    pub async fn run(&self, queues: &[String], end: CancellationToken) {
        let mut due: BTreeMap<&String, Due> = BTreeMap::new();
        while !end.is_cancelled() {
            let mut next = self.boot().plus(LOOK);
            for queue in queues {
                let mut when = match due.remove(queue) {
                    Some(when) => when,
                    None => self.begin(queue).await,
                };
                tokio::select! {
                    () = self.turn(queue, &mut when) => {}
                    () = end.cancelled() => return,
                }
                next = next.min(when.up).min(when.down);
                due.insert(queue, when);
            }
            let pause = next.since(self.boot()).max(Duration::from_millis(1));
            tokio::select! {
                () = self.local().env().clock().sleep(pause) => {}
                () = end.cancelled() => return,
            }
        }
    }

    fn boot(&self) -> BootTime {
        self.local().env().clock().boot()
    }

    /// The interval, and up to a tenth of it: nodes that were started together come apart.
    fn jittered(&self, interval: Duration) -> Duration {
        let random = self.local().env().random();
        interval + interval.mul_f64((random >> 11) as f64 / (1_u64 << 53) as f64 / 10.0)
    }

    /// A node that was restarted does not ask again what it asked a moment ago.
    async fn begin(&self, queue: &str) -> Due {
        let now = self.boot();
        let mut due = Due { up: now, down: now, dry: now, dry_pause: Duration::ZERO, failures: 0 };
        if let (Ok(Some(local)), Ok(status)) = (self.queue(queue).await, self.status(queue).await)
            && let Some(age) = status.down_age_ms
        {
            let left = local.settings().sync_down.saturating_sub(Duration::from_millis(age));
            due.down = now.plus(left);
        }
        due
    }

    async fn turn(&self, queue: &str, due: &mut Due) {
        let done = self.try_turn(queue, due).await;
        match done {
            Ok(()) => due.failures = 0,
            // Somebody else syncs at this moment.
            Err(error) if error.kind() == ErrorKind::Held => self.again(due, FIRST),
            Err(error) => {
                tracing::warn!(queue, %error, "the sync failed, trying again");
                due.failures = due.failures.saturating_add(1);
                let pause = FIRST.saturating_mul(2u32.saturating_pow(due.failures.min(8) - 1));
                self.again(due, pause);
            }
        }
    }

    /// What is due is due again after this.
    fn again(&self, due: &mut Due, pause: Duration) {
        let now = self.boot();
        let later = now.plus(self.jittered(pause));
        for at in [&mut due.up, &mut due.down] {
            if *at <= now {
                *at = later;
            }
        }
        due.dry = due.dry.max(later);
    }

    async fn try_turn(&self, queue: &str, due: &mut Due) -> Result<()> {
        let now = self.boot();
        let local = match self.queue(queue).await? {
            Some(local) => local,
            None if due.up > now => return Ok(()),
            None => self.join(queue).await?,
        };
        let settings = local.settings();
        if due.up <= now {
            let alone = self.lock().await?;
            self.up_alone(queue, &alone).await?;
            // From now, not from when it was due: a machine that slept does not make up for it.
            due.up = self.boot().plus(self.jittered(settings.sync_up));
        }
        let asked = due.down <= now;
        let dry = due.dry <= now && settings.mode == Mode::Relaxed && self.is_dry(queue).await?;
        if asked || dry {
            let _alone = self.lock().await?;
            // The settings are asked for at their time only.
            let asking = Asking { settings: asked, all_parts: !asked };
            let down = self.down_alone(queue, asking).await?;
            let now = self.boot();
            if asked {
                due.down = now.plus(self.jittered(settings.sync_down));
            }
            due.dry_pause = match down.new {
                0 => due.dry_pause.saturating_mul(2).max(settings.sync_up),
                // There may be more where this came from.
                _ => settings.sync_up / 10,
            };
            // Who has found nothing several times waits for the next regular turn.
            due.dry = match due.dry_pause < settings.sync_down {
                true => now.plus(due.dry_pause),
                false => now.plus(NEVER),
            };
        }
        Ok(())
    }
}
