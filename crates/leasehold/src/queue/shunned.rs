//! What could not be claimed, and is left alone for a while: one bad object, or one that is not for us,
//! must not keep anybody from the others.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use leasehold_protocol::layout::queue::Unit;

use crate::env::BootTime;
use crate::{Error, ErrorKind, Key};

/// For how long it is left alone.
pub(super) const SHUN: Duration = Duration::from_secs(60);
/// How many are remembered.
const MOST: usize = 20_000;
/// How many claims that we may not make, one after the other, before the rest is not tried either.
const IN_A_ROW: u32 = 100;

/// What one worker shuns of one queue.
#[derive(Debug, Default)]
pub(super) struct Shunned(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    units: HashMap<Unit, Shun>,
    /// Whether the last list showed something that we may not claim.
    shown: bool,
    /// Claims that we may not make, one after the other.
    in_a_row: u32,
    /// Whether there were too many of them.
    many: bool,
    /// Objects in the last list whose names are no task's.
    unknown: u64,
    /// What was said the last time.
    said: Option<(String, Option<Key>)>,
}

#[derive(Debug, Clone, Copy)]
struct Shun {
    again: BootTime,
    denied: bool,
}

impl Shunned {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Leaves alone what cannot be read, or may not be claimed. Says whether more should be tried.
    pub fn add(&self, unit: &Unit, error: &Error, now: BootTime) -> bool {
        let mut inner = self.inner();
        let denied = error.kind() == ErrorKind::Denied;
        // Others do not want to read the same a thousand times.
        match denied && inner.in_a_row > 0 {
            true => tracing::debug!(%error, "another task may not be claimed"),
            false => tracing::warn!(%error, "a task cannot be claimed"),
        }
        if inner.units.len() >= MOST {
            inner.units.clear();
        }
        inner.units.insert(unit.clone(), Shun { again: now.plus(SHUN), denied });
        if !denied {
            return true;
        }
        inner.said = Some((error.message().to_owned(), error.key().cloned()));
        inner.in_a_row += 1;
        if inner.in_a_row < IN_A_ROW {
            return true;
        }
        (inner.many, inner.in_a_row) = (true, 0);
        false
    }

    /// Something was claimed: it is not that we may do nothing at all.
    pub fn claimed(&self) {
        let mut inner = self.inner();
        (inner.many, inner.in_a_row) = (false, 0);
    }

    /// A new list is made.
    pub fn listing(&self) {
        let mut inner = self.inner();
        (inner.shown, inner.unknown) = (false, 0);
    }

    /// The list shows this many objects whose names are no task's.
    pub fn note_unknown(&self, count: u64) {
        self.inner().unknown += count;
    }

    /// How many objects the last list showed whose names are no task's. Nobody will ever do them.
    pub fn unknown(&self) -> u64 {
        self.inner().unknown
    }

    /// For how long something that is listed is to be left alone, and whether because we may not claim
    /// it. What cannot be read and has a lease by now is looked at again.
    pub fn left_alone(
        &self,
        unit: &Unit,
        leased: bool,
        now: impl FnOnce() -> BootTime,
    ) -> Option<(Duration, bool)> {
        let mut inner = self.inner();
        let Shun { again, denied } = *inner.units.get(unit)?;
        let now = now();
        if again <= now || (leased && !denied) {
            return None;
        }
        inner.shown |= denied;
        Some((again.since(now), denied))
    }

    /// Why we can do nothing: there is something that we may not claim and, while the queue is `quiet`,
    /// nothing else, or too much of it. A queue in which others work, or another caller here, is not
    /// quiet: there may yet be something for us.
    pub fn error(&self, quiet: bool) -> Option<Error> {
        let inner = self.inner();
        let (message, key) =
            inner.said.as_ref().filter(|_| (inner.shown && quiet) || inner.many)?;
        let error = Error::new(ErrorKind::Denied, message);
        Some(match key {
            Some(key) => error.at(key),
            None => error,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_not_be_claimed_is_told_once_a_list_shows_it() {
        let (shunned, unit) = (Shunned::default(), Unit::Task("t".to_owned()));
        let at = |seconds| BootTime::from_boot(Duration::from_secs(seconds));
        let denied = || Error::new(ErrorKind::Denied, "no").at(&Key::new("k").unwrap());
        assert!(shunned.add(&unit, &denied(), at(0)));
        assert!(shunned.error(true).is_none());
        for leased in [false, true] {
            let left = shunned.left_alone(&unit, leased, || at(10));
            assert_eq!(left, Some((Duration::from_secs(50), true)));
        }
        assert_eq!(shunned.error(true).unwrap().to_string(), "k: no");
        assert!(shunned.error(false).is_none());
        shunned.listing();
        assert!(
            shunned.left_alone(&unit, false, || at(60)).is_none() && shunned.error(true).is_none()
        );
        // As many as that, and it is not about one of them.
        let more = (0..IN_A_ROW - 1).map(|_| shunned.add(&unit, &denied(), at(0)));
        assert_eq!(more.filter(|more| !more).count(), 1);
        assert!(shunned.error(false).is_some());
        shunned.claimed();
        assert!(shunned.error(true).is_none());
    }

    #[test]
    fn what_cannot_be_read_is_looked_at_again_when_it_has_a_lease() {
        let (shunned, unit) = (Shunned::default(), Unit::Task("t".to_owned()));
        let at = |seconds| BootTime::from_boot(Duration::from_secs(seconds));
        shunned.add(&unit, &Error::new(ErrorKind::Data, "bad"), at(0));
        assert_eq!(shunned.left_alone(&unit, false, || at(0)), Some((SHUN, false)));
        assert_eq!(shunned.left_alone(&unit, true, || at(0)), None);
        assert!(shunned.error(true).is_none());
    }
}
