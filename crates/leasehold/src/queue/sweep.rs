//! Bringing scheduled tasks to the others, and cleaning up: every worker does a little.

use futures::StreamExt as _;
use leasehold_protocol::format::task as format;
use leasehold_protocol::layout::queue::{Part, Unit};
use leasehold_protocol::lease::Judgement;
use leasehold_protocol::mutant::{self, Mutant};
use leasehold_protocol::queue::is_outdated;
use leasehold_protocol::settle::Proof;
use leasehold_protocol::time::StoreTime;
use serde::Serialize;

use super::push::Placed;
use super::{Mode, Queue};
use crate::lease::Desk;
use crate::store::{Delete, Detail, Entry, List, Page};
use crate::{Key, Result};

/// How many receipts are removed at a time.
const AT_A_TIME: usize = 16;
/// How many scheduled tasks are promoted at a time.
const DUE: usize = 100;

/// What became of scheduled tasks.
#[derive(Debug)]
pub(crate) struct Promoted {
    /// Pending now.
    pub ids: Vec<String>,
    /// When the next one is due.
    pub next: Option<StoreTime>,
    /// Whether there may be more that are due.
    pub more: bool,
}

/// What a sweep did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Swept {
    /// Receipts that were older than the retention.
    pub receipts: u64,
    /// Leases without a task.
    pub leases: u64,
    /// Tasks that were completed or given up, and still stood there.
    pub tasks: u64,
    /// Scheduled tasks that were due.
    pub promoted: u64,
    /// Dead letters of tasks that were completed after all.
    pub letters: u64,
}

impl Queue {
    /// Moves scheduled tasks that are due to the pending ones, a page of them.
    pub(crate) async fn promote_due(&self, now: StoreTime) -> Result<Promoted> {
        let list = List::prefix(self.keys().scheduled())?.limit(DUE);
        let page = self.store().list(list).collect().await?.entries;
        // Not every store lists in order, so all of the page is looked at.
        let mut promoted = Promoted { ids: Vec::new(), next: None, more: page.len() >= DUE };
        let mut any = false;
        for entry in page {
            let Some((time, id)) = self.keys().parse_scheduled(entry.key.as_str()) else {
                continue;
            };
            if time > now {
                promoted.next = Some(promoted.next.map_or(time, |next| next.min(time)));
            } else {
                any = true;
                if self.promote(&entry.key, &id).await? {
                    promoted.ids.push(id);
                }
            }
        }
        // In order, what is behind something that is not due is not due either.
        // And a page of nothing but what has no business there stays as it is, however often it is listed.
        promoted.more &= promoted.next.is_none() && any;
        Ok(promoted)
    }

    /// Says whether the task is pending now by our doing.
    async fn promote(&self, key: &Key, id: &str) -> Result<bool> {
        let store = self.store();
        let Some(object) = store.get(key).await? else { return Ok(false) };
        let task = format::Task::parse(&object.body, id, &object.meta.mark());
        let unit = Unit::Task(id.to_owned());
        let mut promoted = false;
        // Promoted before, done or given up, and not removed here: a record says so.
        let push = (task.incarnation.as_str(), task.pushed_at);
        if self.recorded(&unit, push).await?.is_none() {
            let work = self.keys().part(&unit, Part::Work)?;
            let place = || self.place(&unit, &work, task.to_bytes(), push, Proof::Bytes);
            let mut placed = place().await?;
            // Whatever is there already: it is this one, or one that was pushed with its name, or an earlier
            // one that is over, and whoever did that has yet to clean up.
            if let Placed::Taken = placed
                && self.is_over(&unit).await?
            {
                placed = place().await?;
            }
            if let Placed::There(version) = placed {
                // And after: others may have promoted it, done it and removed it in between.
                match self.recorded(&unit, push).await? {
                    Some(_) => drop(self.delete_work(&work, &version).await?),
                    None => promoted = true,
                }
            }
        }
        if let (Some(outbox), false) = (self.outbox(), promoted) {
            // It gives way to what has its name, and will never show.
            outbox.not_pushing(&unit, &task.incarnation).await?;
        }
        self.delete_work(key, &object.meta.version).await?;
        Ok(promoted)
    }

    /// Removes a lease whose task is gone: only after a look at the task, past its ttl, and in the
    /// version that was judged (FIELD.md row 24).
    pub(super) async fn sweep_lease(&self, unit: &Unit, desk: &Desk) -> Result<bool> {
        let Some(seen) = desk.look().await? else { return Ok(false) };
        if mutant::is(Mutant::SplitPage) {
            return self.store().retire(desk.key(), &seen.version, 0).await.map(|_| true);
        }
        if let Judgement::Held { .. } = desk.judge(&seen) {
            return Ok(false);
        }
        // One that was released a moment ago may be of a task that is just being written.
        if seen.now.since(seen.modified) < self.settings().ttl {
            return Ok(false);
        }
        if self.store().head(&self.keys().part(unit, Part::Work)?).await?.is_some() {
            return Ok(false);
        }
        let token = seen.record.as_ref().ok().and_then(|lease| lease.token).unwrap_or(0);
        let deleted = self.store().retire(desk.key(), &seen.version, token).await?;
        Ok(matches!(deleted, Delete::Deleted))
    }

    /// Cleans up all there is: promotes what is due, removes what is over, and what is old.
    pub async fn sweep(&self) -> Result<Swept> {
        self.refresh().await?;
        let now = self.store().now().await?;
        let mut swept = Swept::default();
        loop {
            let promoted = self.promote_due(now).await?;
            swept.promoted += promoted.ids.len() as u64;
            if !promoted.more {
                break;
            }
        }
        self.sweep_pending(&mut swept).await?;
        self.sweep_letters(&mut swept).await?;
        self.sweep_receipts(&mut swept).await?;
        Ok(swept)
    }

    /// Removes dead letters that are out of date. Two GETs each.
    async fn sweep_letters(&self, swept: &mut Swept) -> Result<()> {
        for id in self.failed_ids().await? {
            let key = self.keys().dead_letter(&id)?;
            let Some(object) = self.store().get(&key).await? else { continue };
            // What cannot be read is for people to look at.
            let Ok(letter) = format::DeadLetter::parse(&object.body) else { continue };
            let receipt = self.receipt(&id).await?;
            let outdated = receipt.is_some_and(|receipt| is_outdated(&letter, &receipt));
            if outdated || self.is_done_in_bundle(&id).await? {
                // The receipt must be on disk before we delete on the strength of it.
                let unit = Unit::Task(id);
                self.store().persist(&[self.keys().receipt(&unit)?]).await?;
                swept.letters += u64::from(self.delete_work(&key, &object.meta.version).await?);
            }
        }
        Ok(())
    }

    /// Cleans up after workers that died: leases that outlived their ttl and have no task, and tasks
    /// under such leases that are over. A LIST per thousand objects, and two or three requests for
    /// each lease that is as old as that: cheap enough to be done by every node, now and then.
    pub async fn reap(&self) -> Result<Swept> {
        let ttl = self.refresh().await?.ttl;
        let mut swept = Swept::default();
        for prefix in [self.keys().all_pending(), self.keys().bundles()] {
            let list = List::prefix(prefix)?.detail(Detail::Stat).unordered();
            let mut listing = self.store().list(list);
            while let Some(page) = listing.next_page().await? {
                let Some(now) = page.now else { continue };
                for entry in page.entries {
                    let Some((unit, Part::Lease)) = self.keys().parse_part(entry.key.as_str())
                    else {
                        continue;
                    };
                    let old = |modified: StoreTime| now.since(modified) >= ttl.saturating_add(ttl);
                    if !entry.modified.is_some_and(old) {
                        continue;
                    }
                    // It looks for the task itself, which may be on another page.
                    let desk = self.desk(&unit, "sweep")?;
                    if self.sweep_lease(&unit, &desk).await? {
                        swept.leases += 1;
                    } else if self.settings().receipts && self.is_over(&unit).await? {
                        swept.tasks += 1;
                        swept.leases += u64::from(self.sweep_lease(&unit, &desk).await?);
                    }
                }
            }
        }
        // Workers of a relaxed queue are at their replicas: nobody else forgets receipts here.
        if self.settings().mode == Mode::Relaxed {
            self.sweep_old_receipts(usize::MAX, &mut swept).await?;
        }
        Ok(swept)
    }

    /// The part that workers do now and then: about as many receipts as this. Says whether there may be
    /// more that are old.
    pub(super) async fn sweep_a_little(&self, most: usize) -> Result<bool> {
        self.sweep_old_receipts(most, &mut Swept::default()).await
    }

    /// Removes receipts that are past their time, from the start for as long as all are: names that we
    /// made sort by time, so what is behind is younger. Says whether there may be more.
    async fn sweep_old_receipts(&self, most: usize, swept: &mut Swept) -> Result<bool> {
        let list = List::prefix(self.keys().completed())?.detail(Detail::Version);
        let mut listing = self.store().list(list.clone().limit(most));
        let mut seen = 0;
        loop {
            let Some(page) = listing.next_page().await? else { return Ok(seen >= most) };
            let listed = page.entries.len();
            seen += listed;
            if self.forget_old(page, swept).await? == listed as u64 {
                continue;
            }
            if listed < crate::store::PAGE {
                return Ok(false);
            }
            // Names that others chose say nothing about age, so a page is looked at anywhere: who always
            // began at the start would never come to those behind it.
            let start = b"0123456789ABCDEFGHJKMNPQRSTVWXYZabcdefghijklmnopqrstuvwxyz";
            let random = self.store().env().random();
            let letter = start[(random % start.len() as u64) as usize] as char;
            let anywhere = list.start_after(format!("{}{letter}", self.keys().completed()));
            let page = self.store().list(anywhere.limit(crate::store::PAGE)).collect().await?;
            self.forget_old(page, swept).await?;
            return Ok(false);
        }
    }

    /// Removes all receipts that are past their time.
    async fn sweep_receipts(&self, swept: &mut Swept) -> Result<()> {
        let list = List::prefix(self.keys().completed())?.detail(Detail::Version).unordered();
        let mut listing = self.store().list(list);
        while let Some(page) = listing.next_page().await? {
            self.forget_old(page, swept).await?;
        }
        Ok(())
    }

    /// Removes the receipts on a page that are past their time, several at once. Says how many.
    async fn forget_old(&self, page: Page, swept: &mut Swept) -> Result<u64> {
        let Some(now) = page.now else { return Ok(0) };
        let retention = self.settings().retention;
        let is_old =
            |entry: &Entry| entry.modified.is_some_and(|modified| now.since(modified) >= retention);
        let old: Vec<Entry> = page.entries.into_iter().filter(is_old).collect();
        let forgotten = futures::stream::iter(old).map(|entry| self.forget(entry));
        let mut forgotten = forgotten.buffer_unordered(AT_A_TIME);
        let mut count = 0;
        while let Some(gone) = forgotten.next().await {
            count += u64::from(gone?);
        }
        swept.receipts += count;
        Ok(count)
    }

    async fn forget(&self, receipt: Entry) -> Result<bool> {
        let Some(version) = &receipt.version else { return Ok(false) };
        Ok(self.may_forget(&receipt.key).await? && self.delete_work(&receipt.key, version).await?)
    }

    async fn sweep_pending(&self, swept: &mut Swept) -> Result<()> {
        for prefix in [self.keys().all_pending(), self.keys().bundles()] {
            let mut listing = self.store().list(List::prefix(prefix)?);
            let mut leases: Vec<Unit> = Vec::new();
            while let Some(page) = listing.next_page().await? {
                for entry in page.entries {
                    match self.keys().parse_part(entry.key.as_str()) {
                        Some((unit, Part::Lease)) => leases.push(unit),
                        // A lease comes before its task.
                        Some((unit, Part::Work)) => {
                            leases.retain(|lease| *lease != unit);
                            if self.settings().receipts && self.is_over(&unit).await? {
                                swept.tasks += 1;
                                let desk = self.desk(&unit, "sweep")?;
                                swept.leases += u64::from(self.sweep_lease(&unit, &desk).await?);
                            }
                        }
                        None => {}
                    }
                }
                for unit in leases.drain(..) {
                    let desk = self.desk(&unit, "sweep")?;
                    swept.leases += u64::from(self.sweep_lease(&unit, &desk).await?);
                }
            }
        }
        Ok(())
    }
}
