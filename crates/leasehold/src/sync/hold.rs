//! Sync up of leases: who has what.

use leasehold_protocol::cas::{Nonce, Version, When};
use leasehold_protocol::format::lease::{Dialect, Lease, State};
use leasehold_protocol::format::outbox::Entry;
use leasehold_protocol::layout::queue::{Part, Unit};
use leasehold_protocol::lease::Seen;
use leasehold_protocol::queue::History;
use leasehold_protocol::settle::Proof;
use leasehold_protocol::sync::{self as decide, Asked, Hold, LocalLease, Missing};
use std::time::Duration;

use super::Pair;
use super::up::{Up, View, incarnation};
use crate::env::BootTime;
use crate::queue::wrote;
use crate::store::{Kind, Write};
use crate::{Error, Result};

/// How often the bucket's lease may change under our hands before another sync is to try.
const ROUNDS: usize = 8;
/// How long the lease of another node keeps this one's workers away: until a sync down says otherwise.
const FOREIGN: Duration = Duration::from_secs(365 * 86_400);

impl Pair<'_> {
    /// A lease of this node as the bucket is to see it: the replica's, judged by its age alone, because
    /// whichever of our processes has the task is our own business.
    pub(super) fn as_theirs(&self, unit: &Unit, ours: &Lease, entry: &Entry) -> Lease {
        let mut lease = ours.clone();
        lease.ttl = Some(self.there.settings().ttl);
        // In a directory ages are told by the boot clock, which takes a place; but of no process that
        // anybody could find to be gone.
        lease.place = lease.place.filter(|_| self.bucket().kind() == Kind::Directory);
        if let Some(place) = &mut lease.place {
            let boot = self.bucket().env().clock().boot();
            place.boot_time = boot.since(BootTime::from_boot(Duration::ZERO));
            place.pid_ns = format!("replica {}", self.replica.id);
            place.child = None;
        }
        lease.ask = None;
        lease.token = lease.token.max(Some(entry.token)).filter(|token| *token > 0);
        lease.other.remove(decide::FOREIGN_FIELD);
        lease.other.insert(decide::REPLICA_FIELD.to_owned(), self.replica.id.clone().into());
        let history = History::of(&lease);
        if history.incarnation.is_empty() && !entry.incarnation.is_empty() {
            History { incarnation: entry.incarnation.clone(), ..history }.write(&mut lease);
        }
        tracing::debug!(unit = unit.name(), "telling of a lease");
        lease
    }

    async fn write_lease(
        &self,
        unit: &Unit,
        lease: &Lease,
        when: When,
        entry: &mut Entry,
    ) -> Result<bool> {
        let nonce: Nonce = self.bucket().env().nonce();
        let now = self.bucket().now().await?;
        let mut lease = lease.clone().marked(nonce);
        if lease.state == State::Held {
            lease.heartbeat_at = Some(now);
            lease.expires_at = lease.ttl.map(|ttl| now.plus(ttl));
        }
        let write = Write::when(when, Proof::Nonce(nonce)).durability(self.there.durability());
        let key = self.there.keys().part(unit, Part::Lease)?;
        let put = self.bucket().put(&key, lease.to_bytes(Dialect::Task).into(), write).await?;
        let Some(version) = wrote(put)? else { return Ok(false) };
        entry.told = Some(version.as_str().to_owned());
        entry.token = lease.token.unwrap_or(0);
        Ok(true)
    }

    /// Puts a lease where there is none.
    pub(super) async fn create_lease(
        &self,
        unit: &Unit,
        lease: &Lease,
        entry: &mut Entry,
    ) -> Result<bool> {
        self.write_lease(unit, lease, When::Absent, entry).await
    }

    /// Tells that a worker of this node has a task, or learns that somebody else was first.
    pub(super) async fn tell_hold(
        &self,
        unit: &Unit,
        entry: &mut Entry,
        view: &mut View,
        up: &mut Up,
    ) -> Result<()> {
        let Some(ours) = view.record().cloned() else { return Ok(()) };
        if entry.withdrawn {
            // Nobody there cares, and its receipt will tell.
            return Ok(());
        }
        let lease = self.as_theirs(unit, &ours, entry);
        if self.put_lease(unit, &lease, entry, view).await? {
            up.held += 1;
        } else if !entry.withdrawn {
            up.lost += 1;
        }
        Ok(())
    }

    /// Tells that nobody of this node has a task any more, and what went wrong with it.
    pub(super) async fn tell_release(
        &self,
        unit: &Unit,
        entry: &mut Entry,
        view: &mut View,
        up: &mut Up,
    ) -> Result<()> {
        let Some(ours) = view.record().cloned() else { return Ok(()) };
        if entry.withdrawn {
            return self.set_aside(unit, view).await;
        }
        let lease = self.as_theirs(unit, &ours, entry);
        if self.put_lease(unit, &lease, entry, view).await? {
            up.released += 1;
            entry.told = None;
        }
        Ok(())
    }

    /// Writes our lease over whatever may be overwritten. `false` if the task is not ours to do; then
    /// the replica knows it.
    async fn put_lease(
        &self,
        unit: &Unit,
        lease: &Lease,
        entry: &mut Entry,
        view: &mut View,
    ) -> Result<bool> {
        let mut lease = lease.clone();
        let mut when = match &entry.told {
            Some(told) => When::Matches(Version::new(told.as_str())),
            None => When::Absent,
        };
        // A claim is not renewed for a task that somebody else has done meanwhile, and whoever does it here
        // is stopped (FIELD.md row 15).
        if when != When::Absent {
            let work = self.there.keys().part(unit, Part::Work)?;
            let there = self.bucket().head(&work).await?.is_some();
            if !there && !self.is_still_there(unit, entry, view).await? {
                return Ok(false);
            }
        }
        entry.told = None;
        let desk = self.there.desk(unit, &self.replica.node)?;
        for _ in 0..ROUNDS {
            let created = when == When::Absent;
            if self.write_lease(unit, &lease, when, entry).await? {
                // A lease that was not there may be of a task that is not there (FIELD.md row 7).
                return match created {
                    true => self.is_still_there(unit, entry, view).await,
                    false => Ok(true),
                };
            }
            let seen = desk.look().await?;
            let judged = seen.as_ref().map(|seen| (seen, desk.judge(seen)));
            let judged = judged.as_ref().map(|(seen, judgement)| (*seen, judgement));
            when = match decide::hold(judged, &self.replica.id) {
                Hold::Create => When::Absent,
                Hold::Renew(version) => When::Matches(version),
                Hold::TakeOver(version, theirs) => {
                    // Whoever had it may have completed it.
                    if !self.is_still_there(unit, entry, view).await? {
                        return Ok(false);
                    }
                    History {
                        not_before: History::of(&lease).not_before,
                        ..decide::merge(History::of(&lease), theirs)
                    }
                    .write(&mut lease);
                    let token = seen.as_ref().and_then(token).unwrap_or(0).saturating_add(1);
                    lease.token = lease.token.max(Some(token));
                    When::Matches(version)
                }
                Hold::Lost => {
                    self.revoke(unit, view).await?;
                    return Ok(false);
                }
            };
        }
        Err(Error::unavailable("others keep changing this lease in the bucket").at(desk.key()))
    }

    /// Whether the bucket still has the task in the push that is being done here. If not, the replica
    /// learns what became of it.
    async fn is_still_there(
        &self,
        unit: &Unit,
        entry: &mut Entry,
        view: &mut View,
    ) -> Result<bool> {
        let Some(ours) = view.local.work.clone() else { return Ok(true) };
        let mut asked = self.ask(unit, &ours).await?;
        if decide::missing(&ours, &asked) == Missing::SetAside
            && let Unit::Task(id) = unit
        {
            // Pushed here for later and told, due here, and not yet promoted there.
            let scheduled = self.scheduled().await?.contains(id);
            // Once more, after the scheduled ones: it may have been promoted in between, and done.
            asked = Asked { scheduled, ..self.ask(unit, &ours).await? };
        }
        let what = decide::missing(&ours, &asked);
        if what == Missing::Stay {
            return Ok(true);
        }
        // What we wrote a moment ago is of no use to anybody.
        if let Some(told) = entry.told.take() {
            let key = self.there.keys().part(unit, Part::Lease)?;
            let _ = self.bucket().retire(&key, &Version::new(told), entry.token).await?;
        }
        match what {
            Missing::SetAside => {
                // Somebody removed it. What runs may end, and what it comes to is recorded.
                entry.withdrawn = true;
                if view.local.lease != LocalLease::Held {
                    self.set_aside(unit, view).await?;
                }
            }
            _ => self.end_here(unit, what, view).await?,
        }
        Ok(false)
    }

    /// What the bucket says about a task: up to three GETs.
    pub(super) async fn ask(&self, unit: &Unit, ours: &str) -> Result<Asked> {
        let mut asked = Asked::default();
        let work = self.bucket().get(&self.there.keys().part(unit, Part::Work)?).await?;
        asked.work = work.map(|object| incarnation(unit, &object));
        // The work is removed after its record is written, so the record is asked for after the work.
        let receipt = self.there.receipt_of(unit).await?;
        asked.receipt = receipt.map(|receipt| receipt.about(ours).to_owned());
        if asked.receipt.as_deref() != Some(ours) && asked.work.as_deref() != Some(ours) {
            let letter = self.there.dead_letter(&unit.name()).await?;
            asked.letter = letter.map(|letter| letter.task.incarnation);
        }
        Ok(asked)
    }

    /// The task was ended elsewhere: nothing of it stays here but the receipt.
    pub(super) async fn end_here(&self, unit: &Unit, what: Missing, view: &mut View) -> Result<()> {
        if what == Missing::Done
            && let Some(theirs) = self.there.receipt_of(unit).await?
        {
            // First, so that nobody here takes it for open.
            self.take_receipt(unit, &theirs, None).await?;
        }
        self.drop_local(unit, view).await
    }

    /// Stops whoever works on a task here, and removes it.
    pub(super) async fn drop_local(&self, unit: &Unit, view: &mut View) -> Result<()> {
        if matches!(view.local.lease, LocalLease::Held) {
            self.revoke(unit, view).await?;
        }
        let keys = self.local.keys();
        if view.work.is_some() && !self.note_shown(unit, view).await? {
            return Ok(());
        }
        if let Some((_, version)) = view.work.take() {
            self.local.delete_work(&keys.part(unit, Part::Work)?, &version).await?;
        }
        // Whoever noticed that it lost the task may have gone already.
        if let Some(seen) = self.local.desk(unit, &self.replica.node)?.look().await?
            && view.local.lease != LocalLease::Held
        {
            let token = token(&seen).unwrap_or(0);
            let key = keys.part(unit, Part::Lease)?;
            let _ = self.local_store().retire(&key, &seen.version, token).await?;
        }
        view.local.work = None;
        view.local.lease = LocalLease::None;
        Ok(())
    }

    /// Keeps a task that is nowhere in the bucket where nobody runs it.
    pub(super) async fn set_aside(&self, unit: &Unit, view: &mut View) -> Result<()> {
        let Some((body, _)) = &view.work else { return Ok(()) };
        let key = self.outbox.keys().aside(unit)?;
        let put = self.local_store().put(&key, body.clone().into(), Write::any()).await?;
        wrote(put)?;
        tracing::warn!(unit = unit.name(), "is nowhere in the bucket any more: set aside");
        self.drop_local(unit, view).await
    }

    /// Takes a task from whoever works on it here: its lease becomes one of another node's, and the
    /// worker finds out.
    async fn revoke(&self, unit: &Unit, view: &mut View) -> Result<()> {
        let desk = self.local.desk(unit, &self.replica.node)?;
        for _ in 0..ROUNDS {
            let Some(seen) = desk.look().await? else { break };
            if seen.record.as_ref().is_ok_and(decide::is_foreign)
                || self.shut(unit, Some(&seen)).await?
            {
                break;
            }
        }
        view.local.lease = LocalLease::Foreign;
        Ok(())
    }

    /// Writes a lease that stands for another node's, over this one or where there is none.
    pub(super) async fn shut(&self, unit: &Unit, seen: Option<&Seen>) -> Result<bool> {
        let nonce = self.local_store().env().nonce();
        let now = self.local_store().now().await?;
        let holder =
            leasehold_protocol::lease::Holder { name: "another node", ttl: FOREIGN, place: None };
        let change = leasehold_protocol::lease::acquire(seen, &holder, now, 0, nonce);
        let mut lease = change.lease;
        lease.other.insert(decide::FOREIGN_FIELD.to_owned(), true.into());
        self.write_here(unit, &lease, change.when, nonce).await
    }

    /// Writes a lease into the replica.
    pub(super) async fn write_here(
        &self,
        unit: &Unit,
        lease: &Lease,
        when: When,
        nonce: Nonce,
    ) -> Result<bool> {
        let key = self.local.keys().part(unit, Part::Lease)?;
        let write = Write::when(when, Proof::Nonce(nonce)).durability(self.local.durability());
        let put = self.local_store().put(&key, lease.to_bytes(Dialect::Task).into(), write).await?;
        Ok(wrote(put)?.is_some())
    }
}

pub(super) fn token(seen: &Seen) -> Option<u64> {
    seen.record.as_ref().ok().and_then(|lease| lease.token)
}
