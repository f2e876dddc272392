//! What a queue holds, and putting right what went wrong.

use std::time::Duration;

use leasehold_protocol::format::task::{self as format, DeadLetter, plain_text};
use leasehold_protocol::layout::queue::{Part, Unit};
use leasehold_protocol::queue::{Claim, History, claim, is_outdated};
use leasehold_protocol::settle::Proof;
use leasehold_protocol::time::StoreTime;
use serde::Serialize;

use super::push::{Placed, Recorded};
use super::{Queue, push};
use crate::store::{Detail, List};
use crate::{Error, ErrorKind, Key, Result};

/// How many tasks there are in each state. Tasks of bundles count one by one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// Nobody has claimed them.
    pub free: u64,
    /// They have a lease: being done, or waiting to be tried again.
    pub leased: u64,
    /// Not to be done yet.
    pub scheduled: u64,
    /// Receipts that are kept.
    pub completed: u64,
    /// Dead letters.
    pub failed: u64,
    /// Objects among the tasks that are none, or whose names nobody can have meant: they are left
    /// alone.
    pub unknown: u64,
}

/// A task that somebody has, or had.
#[derive(Debug, Clone, Serialize)]
pub struct HeldTask {
    /// The task, or the bundle.
    pub id: String,
    /// Who.
    pub worker: String,
    /// How long ago the claim was renewed, by the store's clock.
    pub age_ms: u64,
    /// `held`, `retrying`, or `stalled` where the worker seems to be gone.
    pub state: &'static str,
    /// How often it failed or crashed before.
    pub retries: u32,
    /// When it is tried again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub not_before: Option<StoreTime>,
    /// What its worker noted last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub progress: Option<serde_json::Value>,
}

/// How a queue is doing.
#[derive(Debug, Clone, Serialize)]
pub struct Status {
    /// Its name.
    pub queue: String,
    /// Whether it is paused.
    pub paused: bool,
    /// How many tasks are in which state.
    #[serde(flatten)]
    pub counts: Counts,
    /// The oldest task that waits, and since when, where that can be told without reading it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub oldest: Option<(String, StoreTime)>,
    /// What is being done, and by whom; not more than asked for.
    pub held: Vec<HeldTask>,
    /// How many requests this took.
    pub requests: u64,
}

/// A task as a passer-by sees it.
#[derive(Debug, Clone, Serialize)]
pub struct Peeked {
    /// Its name.
    pub id: String,
    /// The bundle it is in.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bundle: Option<String>,
    /// When it was pushed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pushed_at: Option<StoreTime>,
    /// What is to be done.
    pub payload: format::Json,
}

impl Peeked {
    /// The payload as text.
    pub fn text(&self) -> String {
        plain_text(&self.payload)
    }
}

/// A dead letter in a list.
#[derive(Debug, Clone, Serialize)]
pub struct Failed {
    /// Its name.
    pub id: String,
    /// The letter.
    #[serde(flatten)]
    pub letter: DeadLetter,
}

impl Queue {
    /// Counts, the oldest task, and up to `most` leases. One LIST per thousand objects, and one GET
    /// per lease that is looked into.
    pub async fn status(&self, most: usize) -> Result<Status> {
        let before = self.store().usage();
        let settings = self.refresh().await?;
        let mut counts = Counts::default();
        let mut oldest: Option<(String, StoreTime)> = None;
        let mut leased: Vec<(Unit, Option<StoreTime>)> = Vec::new();
        for prefix in [self.keys().all_pending(), self.keys().bundles()] {
            let mut listing = self.store().list(List::prefix(prefix)?.detail(Detail::Stat));
            let mut lease: Option<(Unit, Option<StoreTime>)> = None;
            while let Some(page) = listing.next_page().await? {
                for entry in page.entries {
                    match self.keys().parse_part(entry.key.as_str()) {
                        Some((unit, Part::Lease)) => lease = Some((unit, entry.modified)),
                        Some((unit, Part::Work)) => {
                            if let Some(time) = entry.modified
                                && oldest.as_ref().is_none_or(|(_, oldest)| time < *oldest)
                            {
                                oldest = Some((unit.name(), time));
                            }
                            match lease.take().filter(|(leased, _)| *leased == unit) {
                                None => counts.free += unit.tasks(),
                                Some(lease) => {
                                    counts.leased += unit.tasks();
                                    leased.push(lease);
                                }
                            }
                        }
                        None => counts.unknown += 1,
                    }
                }
            }
        }
        counts.scheduled = self.count(&self.keys().scheduled()).await?;
        // A bundle's receipt stands for all of its tasks, also for those that left it: these are
        // counted where they are.
        let left;
        (counts.failed, left) = self.count_failed().await?;
        counts.completed = self.count_receipts().await?.saturating_sub(left);
        // The oldest claims are the interesting ones.
        leased.sort_by_key(|(_, modified)| *modified);
        let mut held = Vec::new();
        for (unit, _) in leased.into_iter().take(most) {
            held.extend(self.held(&unit).await?);
        }
        let requests = self.store().usage().since(&before).requests();
        let (queue, paused) = (self.name().to_owned(), settings.paused);
        Ok(Status { queue, paused, counts, oldest, held, requests })
    }

    /// A task that waits or is being done, and who has it. Not one in a bundle.
    pub async fn find(&self, id: &str) -> Result<Option<(Peeked, Option<HeldTask>)>> {
        let unit = Unit::Task(id.to_owned());
        let key = self.keys().part(&unit, Part::Work)?;
        let Some(task) = self.peek_into(&key, &unit, 1).await?.pop() else { return Ok(None) };
        Ok(Some((task, self.held(&unit).await?)))
    }

    /// A task that waits for its time, and which. A LIST per thousand that do.
    pub async fn find_scheduled(&self, id: &str) -> Result<Option<(Peeked, StoreTime)>> {
        let Some((time, key)) = self.scheduled_key(id).await? else { return Ok(None) };
        let found = self.peek_into(&key, &Unit::Task(id.to_owned()), 1).await?.pop();
        Ok(found.map(|task| (task, time)))
    }

    async fn held(&self, unit: &Unit) -> Result<Option<HeldTask>> {
        let desk = self.desk(unit, "status")?;
        let Some(seen) = desk.look().await? else { return Ok(None) };
        let lease = seen.record.as_ref().ok();
        let history = lease.map(History::of).unwrap_or_default();
        let (state, not_before) = match claim(&seen, &desk.judge(&seen)) {
            Claim::Held(_) => ("held", None),
            Claim::Later(at) => ("retrying", Some(at)),
            Claim::Take(taken) if taken.crashes > history.crashes => ("stalled", None),
            Claim::Take(_) => ("retrying", None),
        };
        let age = seen.now.since(seen.modified);
        Ok(Some(HeldTask {
            id: unit.name(),
            worker: lease.map_or_else(String::new, |lease| lease.holder.clone()),
            age_ms: u64::try_from(age.as_millis()).unwrap_or(u64::MAX),
            state,
            retries: history.tries(),
            not_before,
            progress: lease.and_then(|lease| lease.other.get("progress").cloned()),
        }))
    }

    async fn count(&self, prefix: &str) -> Result<u64> {
        let mut listing = self.store().list(List::prefix(prefix)?.unordered());
        let mut count = 0;
        while let Some(page) = listing.next_page().await? {
            count += page.entries.len() as u64;
        }
        Ok(count)
    }

    async fn count_receipts(&self) -> Result<u64> {
        let mut listing = self.store().list(List::prefix(self.keys().completed())?.unordered());
        let mut count = 0_u64;
        while let Some(page) = listing.next_page().await? {
            for entry in page.entries {
                let name = self.keys().parse_record(entry.key.as_str()).unwrap_or_default();
                count = count.saturating_add(match push::bundle_of(&name) {
                    Some(('-', tasks)) => u64::from(tasks),
                    // Of a task that left its bundle, whose receipt stands for it too.
                    Some(_) => 0,
                    None => 1,
                });
            }
        }
        Ok(count)
    }

    /// Dead letters, and how many of them are of tasks that left bundles.
    async fn count_failed(&self) -> Result<(u64, u64)> {
        let (mut all, mut left) = (0, 0);
        let mut listing = self.store().list(List::prefix(self.keys().failed())?.unordered());
        while let Some(page) = listing.next_page().await? {
            for entry in page.entries {
                let name = self.keys().parse_record(entry.key.as_str()).unwrap_or_default();
                all += 1;
                left += u64::from(matches!(push::bundle_of(&name), Some(('.', _))));
            }
        }
        Ok((all, left))
    }

    /// Up to `most` tasks that wait or are being done, without claiming them. One GET each.
    pub async fn peek(&self, most: usize) -> Result<Vec<Peeked>> {
        let mut peeked = Vec::new();
        for prefix in [self.keys().all_pending(), self.keys().bundles()] {
            let mut listing = self.store().list(List::prefix(prefix)?);
            while peeked.len() < most {
                let Some(page) = listing.next_page().await? else { break };
                for entry in page.entries {
                    let part = self.keys().parse_part(entry.key.as_str());
                    if let Some((unit, Part::Work)) = part
                        && peeked.len() < most
                    {
                        peeked
                            .extend(self.peek_into(&entry.key, &unit, most - peeked.len()).await?);
                    }
                }
            }
        }
        Ok(peeked)
    }

    async fn peek_into(&self, key: &Key, unit: &Unit, most: usize) -> Result<Vec<Peeked>> {
        let Some(object) = self.store().get(key).await? else { return Ok(Vec::new()) };
        let (bundle, tasks) = match unit {
            Unit::Task(id) => {
                (None, vec![format::Task::parse(&object.body, id, &object.meta.mark())])
            }
            Unit::Bundle(id, _) => match format::Bundle::parse(&object.body, id) {
                Ok(bundle) => (Some(unit.name()), bundle.tasks),
                Err(error) => {
                    return Err(Error::new(ErrorKind::Data, error.to_string()).at(key));
                }
            },
        };
        let peek = |task: format::Task| Peeked {
            id: task.id,
            bundle: bundle.clone(),
            pushed_at: task.pushed_at,
            payload: task.payload,
        };
        Ok(tasks.into_iter().take(most).map(peek).collect())
    }

    /// Up to `most` dead letters. One GET each.
    pub async fn failed(&self, most: usize) -> Result<Vec<Failed>> {
        let list = List::prefix(self.keys().failed())?.limit(most);
        let mut failed = Vec::new();
        for entry in self.store().list(list).collect().await?.entries {
            let Some(id) = self.keys().parse_record(entry.key.as_str()) else { continue };
            if let Some(letter) = self.dead_letter(&id).await? {
                failed.push(Failed { id, letter });
            }
        }
        Ok(failed)
    }

    /// The names of all dead letters.
    pub async fn failed_ids(&self) -> Result<Vec<String>> {
        let mut listing = self.store().list(List::prefix(self.keys().failed())?);
        let mut ids = Vec::new();
        while let Some(page) = listing.next_page().await? {
            let names =
                page.entries.iter().map(|entry| self.keys().parse_record(entry.key.as_str()));
            ids.extend(names.flatten());
        }
        Ok(ids)
    }

    /// Pushes a dead letter's task again, as new: its failures are forgotten. `false` if there is
    /// no such dead letter. An error if it is of a whole bundle, which is no task, or if another task
    /// with its name is pending.
    pub async fn retry(&self, id: &str) -> Result<bool> {
        self.not_in_a_replica()?;
        let store = self.store();
        let letter_key = self.keys().dead_letter(id)?;
        let Some(object) = store.get(&letter_key).await? else { return Ok(false) };
        if let Some(('-', _)) = push::bundle_of(id) {
            // Its bytes would be run as one task, and its name counted as all of its tasks.
            let message = "a whole bundle that could not be read: its bytes are in the letter's \
                           payload; push its tasks anew, then remove the letter";
            return Err(Error::new(ErrorKind::Data, message).at(&letter_key));
        }
        let letter = DeadLetter::parse(&object.body)
            .map_err(|error| Error::new(ErrorKind::Data, error.to_string()).at(&letter_key))?;
        // Completed after all: by a worker that was thought to be dead, or because another retry came
        // as far as pushing the task.
        let receipt = self.receipt(id).await?;
        let outdated = receipt.is_some_and(|receipt| is_outdated(&letter, &receipt));
        if outdated || self.is_done_in_bundle(id).await? {
            self.delete_work(&letter_key, &object.meta.version).await?;
            return Ok(false);
        }
        let nonce = store.env().nonce();
        let given_up = letter.task.incarnation.clone();
        let task = format::Task {
            id: id.to_owned(),
            incarnation: nonce.to_string(),
            pushed_at: Some(store.now().await?),
            ..letter.task
        };
        let unit = Unit::Task(id.to_owned());
        let key = self.keys().part(&unit, Part::Work)?;
        loop {
            let push = (task.incarnation.as_str(), task.pushed_at);
            match self.place(&unit, &key, task.to_bytes(), push, Proof::Nonce(nonce)).await? {
                Placed::There(_) | Placed::Over(Recorded::This) => break,
                // Completed after all, by a later push.
                Placed::Over(Recorded::Later) => {
                    self.delete_work(&letter_key, &object.meta.version).await?;
                    return Ok(false);
                }
                Placed::Taken => {}
            }
            // It stands there already: pushed again by somebody, or not yet removed by whoever
            // gave it up.
            let Some(there) = store.get(&key).await? else { continue };
            let pending = format::Task::parse(&there.body, id, &there.meta.mark());
            if pending.incarnation != given_up {
                // By another retry of the same, that is. Something else with its name does not stand
                // for it, and the letter would be lost.
                if pending.payload.get() == task.payload.get() {
                    break;
                }
                let message = "another task with this name is pending, with another payload: the dead \
                               letter is kept";
                return Err(Error::new(ErrorKind::Held, message).at(&key));
            }
            self.delete_work(&key, &there.meta.version).await?;
        }
        self.delete_work(&letter_key, &object.meta.version).await?;
        Ok(true)
    }

    /// Removes a dead letter. `false` if there is none.
    pub async fn discard(&self, id: &str) -> Result<bool> {
        self.not_in_a_replica()?;
        let key = self.keys().dead_letter(id)?;
        let Some(meta) = self.store().head(&key).await? else { return Ok(false) };
        self.delete_work(&key, &meta.version).await
    }

    /// Removes all tasks that nobody has claimed, and what is scheduled. Returns how many.
    pub async fn purge_pending(&self) -> Result<u64> {
        self.not_in_a_replica()?;
        let mut purged = 0;
        let prefixes = [self.keys().all_pending(), self.keys().bundles(), self.keys().scheduled()];
        for prefix in prefixes {
            let mut listing = self.store().list(List::prefix(prefix)?.detail(Detail::Version));
            let mut lease: Option<Unit> = None;
            while let Some(page) = listing.next_page().await? {
                for entry in page.entries {
                    let key = entry.key.as_str();
                    let tasks = match self.keys().parse_part(key) {
                        Some((unit, Part::Lease)) => {
                            lease = Some(unit);
                            continue;
                        }
                        Some((unit, Part::Work)) if lease.as_ref() == Some(&unit) => continue,
                        Some((unit, Part::Work)) => unit.tasks(),
                        None if self.keys().parse_scheduled(key).is_some() => 1,
                        None => continue,
                    };
                    if let Some(version) = &entry.version
                        && self.delete_work(&entry.key, version).await?
                    {
                        purged += tasks;
                    }
                }
            }
        }
        Ok(purged)
    }

    /// Removes all dead letters. Returns how many.
    pub async fn purge_failed(&self) -> Result<u64> {
        let mut purged = 0;
        for id in self.failed_ids().await? {
            purged += u64::from(self.discard(&id).await?);
        }
        Ok(purged)
    }

    /// Removes receipts older than this, whatever the retention says. Returns how many.
    pub async fn purge_receipts(&self, older_than: Duration) -> Result<u64> {
        self.not_in_a_replica()?;
        let mut purged = 0;
        let list = List::prefix(self.keys().completed())?.detail(Detail::Version);
        let mut listing = self.store().list(list);
        while let Some(page) = listing.next_page().await? {
            for entry in page.entries {
                if let (Some(now), Some(modified), Some(version)) =
                    (page.now, entry.modified, &entry.version)
                    && now.since(modified) >= older_than
                    && self.delete_work(&entry.key, version).await?
                {
                    purged += 1;
                }
            }
        }
        Ok(purged)
    }
}
