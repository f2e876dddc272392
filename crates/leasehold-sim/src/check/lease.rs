//! Leases: who may change a record from what to what.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use leasehold::protocol::format::lease::{Lease, Place, State as LeaseState};
use leasehold::protocol::sync::REPLICA_FIELD;

use super::{Applied, Verdict};
use crate::world::{Life, State};

/// What is known of leases.
#[derive(Debug, Default)]
pub struct Leases {
    /// The highest token that was given out at a key.
    highest: BTreeMap<String, u64>,
    /// The highest token that was taken by force: whoever had a lower one finds out later.
    forced: BTreeMap<String, u64>,
    /// Every state that a record was in, and whether the present one came back: a create that arrives
    /// twice, or is sent again, after its lease was deleted. Nobody trusts that.
    states: BTreeMap<String, (BTreeSet<String>, bool)>,
}

/// The ttl of records that name none.
const USUAL: Duration = Duration::from_secs(6);

impl Leases {
    /// Checks a change of a lease's record.
    pub fn applied(&mut self, state: &State, applied: &Applied<'_>) -> Verdict {
        if applied.label == "damage" {
            return Ok(());
        }
        let (states, back) = self.states.entry(applied.key.to_owned()).or_default();
        let was_back = *back;
        *back = match &applied.after {
            Some(after) => !states.insert(after.version.as_str().to_owned()),
            None => false,
        };
        let now = state.store_time();
        let after = applied.after.as_ref().and_then(|there| Lease::parse(&there.body).ok());
        if let ("force", Some(token)) = (applied.label, after.as_ref().and_then(|a| a.token)) {
            let forced = self.forced.entry(applied.key.to_owned()).or_default();
            *forced = token.max(*forced);
        }
        let Some(there) = &applied.before else { return self.token(applied, after.as_ref()) };
        let before = Lease::parse(&there.body).ok();
        let age = now.since(there.written);
        let Some(before) = before else {
            // Nobody knows whose it was: it is left alone for a ttl.
            return match age * 10 >= USUAL * 9 || applied.label == "force" {
                true => self.token(applied, after.as_ref()),
                false => Err("a damaged lease was taken too soon".to_owned()),
            };
        };
        // Which of its processes has the task is a replica's own business.
        let replica = replica_of(&before);
        let within = replica.is_some() && replica == after.as_ref().and_then(replica_of);
        let same = within || after.as_ref().is_some_and(|after| after.lease_id == before.lease_id);
        if before.state == LeaseState::Held && !same {
            let ttl = before.ttl.unwrap_or(USUAL);
            let stale = age * 10 >= ttl * 9;
            let gone =
                before.place.as_ref().is_some_and(|place| is_gone(state, place, applied.life));
            let own = before.place.as_ref().is_some_and(|p| p.process.pid == applied.life.pid());
            let own = own || (replica.is_some() && replica == state.replica_of(applied.life));
            // A late one that still applies met the very bytes that it was meant for: they were late, too.
            let late = applied.late || state.objects.deletes_blindly;
            let removed = after.is_none() && (own || late);
            if !(stale || gone || removed || was_back || applied.label == "force") {
                let did = match &after {
                    Some(after) => format!("taken by {}", after.holder),
                    None => "removed".to_owned(),
                };
                return Err(format!(
                    "the lease of {} (token {}) was {did} {age:?} after its last renewal, with a ttl \
                     of {ttl:?}",
                    before.holder,
                    before.token.unwrap_or(0),
                ));
            }
        }
        if let Some(after) = &after
            && !same
            && after.token <= before.token
        {
            return Err(format!("the token went from {:?} to {:?}", before.token, after.token));
        }
        self.token(applied, after.as_ref())
    }

    /// Whether the lease with this token was taken by force.
    pub fn was_robbed(&self, key: &str, token: u64) -> bool {
        self.forced.get(key).is_some_and(|forced| token < *forced)
    }

    /// Tokens of locks rise for ever. Those of tasks rise as long as there is a record.
    fn token(&mut self, applied: &Applied<'_>, after: Option<&Lease>) -> Verdict {
        let Some(token) = after.and_then(|lease| lease.token) else { return Ok(()) };
        if !applied.key.ends_with(".lock") || applied.late {
            return Ok(());
        }
        let highest = self.highest.entry(applied.key.to_owned()).or_default();
        if token < *highest {
            return Err(format!("token {token} after {highest}"));
        }
        *highest = token;
        Ok(())
    }
}

/// Which replica's lease this is.
fn replica_of(lease: &Lease) -> Option<String> {
    lease.other.get(REPLICA_FIELD)?.as_str().map(str::to_owned)
}

/// Whether whoever took it could see that the holder, and what it ran, are gone.
fn is_gone(state: &State, place: &Place, by: Life) -> bool {
    let node = &state.nodes[by.node];
    let lives = |pid: u32| state.process_lives(node.machine, node.container, pid);
    let near = place.boot_id == format!("boot-{}", node.machine)
        && place.pid_ns == format!("pid:[{}]", node.container);
    near && !lives(place.process.pid) && !place.child.as_ref().is_some_and(|child| lives(child.pid))
}
