//! When a replica was synced, what it cost, and what it would have cost.

use leasehold_protocol::cas::When;
use leasehold_protocol::format::outbox::Known;
use leasehold_protocol::layout::sync::SyncKeys;
use leasehold_protocol::settle::Proof;
use leasehold_protocol::sync::{self as decide, End, TellLease};
use leasehold_protocol::time::StoreTime;
use serde::{Deserialize, Serialize};

use super::{Down, Pair, Replica, Up};
use crate::queue::{Mode, wrote};
use crate::store::meter::Usage;
use crate::store::{Durability, List, Write};
use crate::{Key, Result};

/// `sync/{queue}/state.json`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct State {
    /// The version of the bucket's settings that we have.
    pub settings_version: String,
    /// How many shards the bucket's queue has, if it was made again since the replica was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shards: Option<u16>,
    /// Whether a sync up has begun that did not end: what it was about to push may be there.
    pub telling: bool,
    /// Which one, by its lock's token: one that was stopped for longer than its lock may end after the next
    /// has begun.
    pub teller: u64,
    /// In which boot the last complete sync up ended. What is noted as told need not be on disk when the
    /// power fails.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub boot_id: String,
    /// When the last complete sync up ended.
    pub up_at: Option<StoreTime>,
    /// When the last complete sync down ended.
    pub down_at: Option<StoreTime>,
    /// Whether anything was pending then.
    pub pending: bool,
    /// Whether there were bundles.
    pub bundles: bool,
    /// How many syncs down since all parts of the queue were looked for.
    pub since_overview: u32,
    /// Tasks and bundles whose push was told.
    pub pushed: u64,
    /// Those whose completion was.
    pub completed: u64,
    /// Those that were given up.
    pub given_up: u64,
    /// Attempts before the last one, of those.
    pub retries: u64,
    /// Claims that somebody else's came before.
    pub lost: u64,
    /// All that was requested of the bucket.
    pub usage: Usage,
    /// Completions that came second, and are so long ago that each is not remembered any more.
    pub old_duplicates: u64,
    /// Those of them whose objects are still to be removed: they do not count again.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub forgetting: Vec<String>,
}

impl State {
    /// Whether what is untold here may have been told all the same, and be over: it is to be asked about
    /// first (FIELD.md row 15).
    pub fn is_careful(&self, boot_id: &str) -> bool {
        self.telling || (self.up_at.is_some() && self.boot_id != boot_id)
    }

    /// What strict mode would have paid for at least: a push is a PUT, a claim a PUT and a GET, an ack
    /// or a failure a PUT. Heartbeats and looking for tasks aside.
    fn strict(&self) -> u64 {
        self.pushed + 3 * (self.completed + self.given_up) + 3 * self.retries
    }

    /// What was paid for.
    fn paid(&self) -> u64 {
        let Usage { put, get, head, list, .. } = self.usage;
        put + get + head + list
    }

    pub fn add_up(&mut self, up: &Up) {
        self.pushed += up.pushed;
        self.completed += up.completed + up.duplicates;
        self.given_up += up.given_up;
        self.retries += up.retries;
        self.lost += up.lost;
        self.usage = self.usage.plus(&up.usage);
    }

    /// Whether a sync up was cut off is not for a sync down to say, nor how many duplicates were
    /// forgotten: another may have taken its place while it was stopped.
    pub fn add_down(&mut self, seen: &Self, down: &Down) {
        self.settings_version.clone_from(&seen.settings_version);
        self.down_at = seen.down_at;
        self.pending = seen.pending;
        self.bundles = seen.bundles;
        self.since_overview = seen.since_overview;
        self.usage = self.usage.plus(&down.usage);
    }
}

/// How a replica of a queue is doing.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Status {
    /// The queue.
    pub queue: String,
    /// Its mode, as it came down last.
    pub mode: Mode,
    /// How long ago the last sync up was complete.
    pub up_age_ms: Option<u64>,
    /// How long ago the last sync down was.
    pub down_age_ms: Option<u64>,
    /// Tasks and bundles of which the bucket is still to be told something.
    pub outbox: u64,
    /// Tasks that were done here, and elsewhere before.
    pub duplicates: u64,
    /// Claims that somebody else's came before.
    pub lost: u64,
    /// Tasks that are nowhere in the bucket any more: kept, but not run.
    pub set_aside: u64,
    /// Paid requests of all syncs.
    pub requests: u64,
    /// Paid requests that strict mode would have made at least, for the same tasks.
    pub strict_requests: u64,
    /// The difference: what was saved.
    pub saved: i64,
    /// Whether a worker has nothing to do.
    pub dry: bool,
}

/// What the next sync would do.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Plan {
    /// The queue.
    pub queue: String,
    /// What the bucket would be told.
    pub up: Vec<Step>,
    /// How many tasks and bundles of the bucket are new or changed: fetched, unless somebody has them.
    pub new: u64,
    /// How many are as they were.
    pub unchanged: u64,
    /// How many are here and not in the bucket: their receipts would be asked for.
    pub missing: u64,
}

/// What the bucket would be told of one task or bundle.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Step {
    /// Its name.
    pub id: String,
    /// `done`, `given up`, `pushed`, `held`, `released`, or `nothing yet`.
    pub tells: Vec<&'static str>,
}

impl Replica {
    pub(super) async fn state(&self, queue: &str) -> Result<State> {
        Ok(self.state_with_version(queue).await?.0)
    }

    async fn state_with_version(&self, queue: &str) -> Result<(State, When)> {
        let key = SyncKeys::new(queue)?.state()?;
        Ok(match self.local().get(&key).await? {
            None => (State::default(), When::Absent),
            Some(object) => {
                let state = serde_json::from_slice(&object.body).unwrap_or_default();
                (state, When::Matches(object.meta.version))
            }
        })
    }

    /// Changes the state, whatever another sync did to it meanwhile: one that was stopped for longer than
    /// its lock must not write what it knew before over what became of it since.
    pub(super) async fn change_state(
        &self,
        queue: &str,
        change: impl Fn(&mut State) + Send,
    ) -> Result<()> {
        loop {
            let (mut state, version) = self.state_with_version(queue).await?;
            change(&mut state);
            // Whole or as before: it decides about requests and figures only.
            if self.write_state(queue, &state, version, Durability::Ordered).await? {
                return Ok(());
            }
        }
    }

    /// Notes, before the first request, that the bucket is about to be told: what dies from here on may
    /// have pushed something without knowing it.
    pub(super) async fn note_telling(&self, queue: &str, teller: u64) -> Result<()> {
        loop {
            let (mut state, version) = self.state_with_version(queue).await?;
            if state.telling && state.teller >= teller {
                return Ok(());
            }
            state.telling = true;
            state.teller = teller;
            if self.write_state(queue, &state, version, Durability::Durable).await? {
                return Ok(());
            }
        }
    }

    /// Forgets completions that came second once their receipts are forgotten, and keeps their number.
    pub(super) async fn forget_duplicates(&self, pair: &Pair<'_>) -> Result<()> {
        let (queue, retention) = (pair.local.name(), pair.local.settings().retention);
        loop {
            let (mut state, version) = self.state_with_version(queue).await?;
            // First those that were counted before a crash.
            let forgetting = std::mem::take(&mut state.forgetting);
            for key in &forgetting {
                let Ok(key) = Key::new(key.as_str()) else { continue };
                let _ = self.local().delete(&key).await?;
            }
            // A sync up that was cut off counts once more what it had counted: it must find that.
            let (count, old) = match state.telling {
                true => (0, Vec::new()),
                false => pair.outbox.old_duplicates(retention).await?,
            };
            if old.is_empty() && forgetting.is_empty() {
                return Ok(());
            }
            // Counted and named in one write, and on disk before the first of them goes. Another sync that
            // has counted them meanwhile has changed the state.
            state.old_duplicates += count;
            state.forgetting = old;
            self.write_state(queue, &state, version, Durability::Durable).await?;
        }
    }

    /// `false` if another sync has changed it.
    async fn write_state(
        &self,
        queue: &str,
        state: &State,
        when: When,
        durability: Durability,
    ) -> Result<bool> {
        let key = SyncKeys::new(queue)?.state()?;
        let body = serde_json::to_vec(state).unwrap_or_default();
        let write = Write::when(when, Proof::Bytes).durability(durability);
        Ok(wrote(self.local().put(&key, body.into(), write).await?)?.is_some())
    }

    pub(super) async fn known(&self, queue: &str) -> Result<Known> {
        let key = SyncKeys::new(queue)?.known()?;
        let object = self.local().get(&key).await?;
        Ok(object.map(|object| Known::parse(&object.body)).unwrap_or_default())
    }

    pub(super) async fn save_known(&self, queue: &str, known: &Known) -> Result<()> {
        let key = SyncKeys::new(queue)?.known()?;
        let write = Write::any().durability(Durability::Ordered);
        wrote(self.local().put(&key, known.to_bytes().into(), write).await?).map(drop)
    }

    /// How the replica of a queue is doing. No request to the bucket.
    pub async fn status(&self, queue: &str) -> Result<Status> {
        let pair = self.pair(queue).await?;
        let state = self.state(queue).await?;
        let now = self.local().now().await?;
        let age = |at: Option<StoreTime>| {
            at.map(|at| u64::try_from(now.since(at).as_millis()).unwrap_or(u64::MAX))
        };
        let keys = pair.outbox.keys();
        let (paid, strict) = (state.paid(), state.strict());
        Ok(Status {
            queue: queue.to_owned(),
            mode: pair.local.settings().mode,
            up_age_ms: age(state.up_at),
            down_age_ms: age(state.down_at),
            outbox: self.count(&keys.outbox()).await?,
            duplicates: state.old_duplicates + pair.outbox.duplicates(&state.forgetting).await?,
            lost: state.lost,
            set_aside: self.count(&keys.set_aside()).await?,
            requests: paid,
            strict_requests: strict,
            saved: i64::try_from(strict).unwrap_or(i64::MAX)
                - i64::try_from(paid).unwrap_or(i64::MAX),
            dry: self.is_dry(queue).await?,
        })
    }

    async fn count(&self, prefix: &str) -> Result<u64> {
        let mut listing = self.local().list(List::prefix(prefix)?.unordered());
        let mut count = 0;
        while let Some(page) = listing.next_page().await? {
            count += page.entries.len() as u64;
        }
        Ok(count)
    }

    /// What the next sync of a queue would do. One LIST per thousand objects, and nothing else; nothing
    /// is changed anywhere.
    pub async fn plan(&self, queue: &str) -> Result<Plan> {
        let pair = self.pair(queue).await?;
        let mut up = Vec::new();
        let mut listing = self.local().list(List::prefix(pair.outbox.keys().outbox())?);
        while let Some(page) = listing.next_page().await? {
            for entry in page.entries {
                let Some(unit) = pair.outbox.keys().parse_entry(entry.key.as_str()) else {
                    continue;
                };
                let Some((entry, _)) = pair.outbox.entry(&unit).await? else { continue };
                let view = pair.look(&unit, &entry).await?;
                up.push(Step { id: unit.name(), tells: words(&decide::tell(&entry, &view.local)) });
            }
        }
        let Down { new, unchanged, missing, .. } = self.compare(&pair).await?;
        Ok(Plan { queue: queue.to_owned(), up, new, unchanged, missing })
    }
}

fn words(tale: &decide::Tale) -> Vec<&'static str> {
    let end = tale.end.map(|end| match end {
        End::Done => "done",
        End::Dead => "given up",
    });
    let lease = tale.lease.map(|lease| match lease {
        TellLease::Hold => "held",
        TellLease::Release => "released",
    });
    let words: Vec<_> = [end, tale.push.then_some("pushed"), lease].into_iter().flatten().collect();
    if words.is_empty() { vec!["nothing yet"] } else { words }
}
