//! What was pushed here.

use leasehold_protocol::format::outbox::{Entry, state_hash, unit_hash};
use leasehold_protocol::format::task as format;
use leasehold_protocol::layout::queue::{Part, Unit};
use leasehold_protocol::settle::Proof;
use leasehold_protocol::sync::{self as decide, LocalLease, Missing};

use super::{Up, View};
use crate::queue::push::{Placed, Stored, bundle_of};
use crate::sync::Pair;
use crate::{Error, Result};

impl Pair<'_> {
    /// Says whether the task is the one that the bucket has.
    pub(super) async fn tell_push(
        &self,
        unit: &Unit,
        entry: &mut Entry,
        view: &mut View,
        up: &mut Up,
    ) -> Result<bool> {
        // Its name follows from a bundle's, so whoever had the bundle elsewhere may have pushed it, too.
        let left = matches!(unit, Unit::Task(id) if bundle_of(id).is_some());
        if view.work.is_some() && view.local.scheduled.is_some() {
            self.tell_scheduled(unit, entry).await?;
        }
        if is_copy(unit, view) {
            // It is another push that is to be told of, and that is yet to come.
            entry.untold = false;
            return Ok(true);
        }
        self.checked.get_or_try_init(|| self.check_queue()).await?;
        // This may have been there, and be over (FIELD.md row 15).
        let ours = view.local.work.clone().or(view.local.scheduled.clone());
        if (self.careful || left)
            && let Some(ours) = &ours
            && self.ended_there(unit, ours, view).await?
        {
            return Ok(false);
        }
        let keys = self.there.keys();
        let receipt = keys.receipt(unit)?;
        let stored = match unit {
            Unit::Task(id) => {
                let scheduled = match (&view.work, entry.scheduled) {
                    (None, Some(time)) => {
                        let key = self.local.keys().scheduled_at(time, id)?;
                        self.local_store().get(&key).await?.map(|object| (time, object))
                    }
                    _ => None,
                };
                let (key, body) = match (&view.work, &scheduled) {
                    (Some((body, _)), _) => (keys.part(unit, Part::Work)?, &body[..]),
                    (None, Some((time, object))) => {
                        (keys.scheduled_at(*time, id)?, &object.body[..])
                    }
                    // Promoted while we looked: told of next time.
                    (None, None) => return Ok(true),
                };
                let task = format::Task {
                    origin: None,
                    ..format::Task::parse(body, id, ours.as_deref().unwrap_or_default())
                };
                // One that left a bundle must not be seen as free before its time.
                if let (LocalLease::Released(history), Some(lease)) =
                    (&view.local.lease, view.record())
                    && history.tries() > 0
                {
                    let lease = self.as_theirs(unit, lease, entry);
                    self.create_lease(unit, &lease, entry).await?;
                }
                let stored = self
                    .there
                    .store_task(&key, &receipt, &task, entry.chosen || left, Proof::Bytes)
                    .await?;
                match stored {
                    Stored::Pending(there) if there.as_deref() == Some(&task.incarnation) => None,
                    stored => Some(stored),
                }
            }
            Unit::Bundle(..) => {
                let Some((body, _)) = &view.work else { return Ok(true) };
                let body = format::Bundle::copied(body, None)
                    .map_err(|error| Error::new(crate::ErrorKind::Data, error.to_string()))?;
                let key = keys.part(unit, Part::Work)?;
                let push = (ours.as_deref().unwrap_or_default(), None);
                match self.there.place(unit, &key, body, push, Proof::Bytes).await? {
                    Placed::There(version) => Some(Stored::New(version)),
                    Placed::Over(_) => Some(Stored::Over),
                    // Its name is fresh: whatever stands there is this one.
                    Placed::Taken => None,
                }
            }
        };
        match stored {
            Some(Stored::New(version)) => {
                up.pushed += 1;
                let work = keys.part(unit, Part::Work)?;
                if view.work.is_some() && view.local.lease != LocalLease::Foreign {
                    up.seen.push((unit_hash(work.as_str()), state_hash(version.as_str(), "free")));
                }
                if view.work.is_some() {
                    entry.origin = Some(version.as_str().to_owned());
                    entry.incarnation = view.local.work.clone().unwrap_or_default();
                }
            }
            None => {}
            Some(Stored::Over) => {
                // The bucket has had it.
                (entry.untold, entry.scheduled) = (false, None);
                up.pushed += 1;
                if let Some(ours) = ours
                    && self.ended_there(unit, &ours, view).await?
                {
                    return Ok(false);
                }
            }
            Some(Stored::Pending(_)) => return Ok(false),
            Some(Stored::Completed) => {
                if let Some(theirs) = self.there.receipt_of(unit).await? {
                    self.take_receipt(unit, &theirs, None).await?;
                }
                return Ok(false);
            }
        }
        entry.untold = false;
        entry.scheduled = None;
        Ok(true)
    }

    /// Whether this push is done or given up in the bucket; then it is here, too.
    async fn ended_there(&self, unit: &Unit, ours: &str, view: &mut View) -> Result<bool> {
        let what = decide::missing(ours, &self.ask(unit, ours).await?);
        let ended = matches!(what, Missing::Done | Missing::Dead);
        if ended {
            self.end_here(unit, what, view).await?;
        }
        Ok(ended)
    }

    /// Tells of what waits for its time beside a task of its name.
    async fn tell_scheduled(&self, unit: &Unit, entry: &Entry) -> Result<()> {
        let (Unit::Task(id), Some(time)) = (unit, entry.scheduled) else { return Ok(()) };
        let here = self.local_store().get(&self.local.keys().scheduled_at(time, id)?).await?;
        let Some(object) = here else { return Ok(()) };
        let task = format::Task::parse(&object.body, id, &object.meta.mark());
        let (key, receipt) =
            (self.there.keys().scheduled_at(time, id)?, self.there.keys().receipt(unit)?);
        // Done before: it gives way here, too, once its time has come.
        self.there.store_task(&key, &receipt, &task, entry.chosen, Proof::Bytes).await.map(drop)
    }
}

/// Whether the work came from the bucket.
fn is_copy(unit: &Unit, view: &View) -> bool {
    let Some((body, _)) = &view.work else { return false };
    match unit {
        Unit::Task(id) => format::Task::parse(body, id, "").origin.is_some(),
        Unit::Bundle(id, _) => {
            format::Bundle::parse(body, id).is_ok_and(|bundle| bundle.origin.is_some())
        }
    }
}
