//! What an actor does next, by the answer that it got.

use leasehold_protocol::lease::{self, Holder, Refused, Seen};
use leasehold_protocol::mutant::{self, Mutant};
use leasehold_protocol::queue::{self as decide, Met};

use super::records::{
    LEASE, LETTER, NAMES, Push, RECEIPT, Small, Stored, TTL, WORK, name, settings, task,
};
use super::{Held, Past3, QueueRules, Record, Step};
use crate::engine::{Bounds, If, Mark, World, mark_of, version};
use crate::lease::{nonce, store_time};

impl QueueRules {
    /// One push, renewals, and faults of all kinds.
    pub fn ack(bounds: Bounds) -> Self {
        Self { claims: 1, nacks: 0, pushes: 1, forgets: 0, retries: 0, renews: true, bounds }
    }

    /// Two pushes, and a receipt that is forgotten between them.
    pub fn again(bounds: Bounds) -> Self {
        Self { claims: 1, nacks: 0, pushes: 2, forgets: 1, retries: 0, renews: false, bounds }
    }

    /// Failures, dead letters, retries.
    pub fn retry(bounds: Bounds) -> Self {
        Self { claims: 2, nacks: 2, pushes: 1, forgets: 0, retries: 1, renews: false, bounds }
    }

    pub(super) fn see(&self, world: &World<Self>) -> Option<(Seen, Small, Mark)> {
        let (mark, body, modified) = world.at(LEASE)?;
        let Stored::Lease(small) = *body else { return None };
        let seen = Seen {
            record: Ok(small.lease()),
            version: version(mark),
            modified: store_time(modified),
            now: store_time(world.now),
        };
        Some((seen, small, mark))
    }

    pub(super) fn record(&self, world: &World<Self>, record: Record) -> Option<(Push, Mark)> {
        let key = if record == Record::Receipt { RECEIPT } else { LETTER };
        let (mark, body, _) = world.at(key)?;
        match body {
            Stored::Receipt(push, _) | Stored::Letter(push, _) => Some((*push, mark)),
            _ => None,
        }
    }

    pub(super) fn work(&self, world: &World<Self>) -> Option<(Push, Mark)> {
        let (mark, body, _) = world.at(WORK)?;
        let Stored::Work(push) = body else { return None };
        Some((*push, mark))
    }

    pub(super) fn trusted(&self, world: &World<Self>, held: &Held) -> bool {
        let elapsed = store_time(world.now).since(store_time(held.sent));
        elapsed < TTL - lease::margin(TTL)
    }

    pub(super) fn go(&self, world: &mut World<Self>, actor: usize, step: Step) {
        world.actors[actor].local.step = step;
    }

    /// `Desk::write_claim`, filled in by `Queue::claim_leased`.
    pub(super) fn claim(
        &self,
        world: &mut World<Self>,
        actor: usize,
        seen: Option<(&Seen, Past3)>,
    ) {
        let holder = Holder { name: NAMES[actor], ttl: TTL, place: None };
        let mark = world.nonce(actor);
        let now = store_time(world.now);
        let change = lease::acquire(seen.map(|(seen, _)| seen), &holder, now, 0, nonce(mark));
        let mut lease = Small::of(&change.lease);
        if let Some((_, (failures, crashes, not_before, inc))) = seen {
            (lease.failures, lease.crashes) = (failures, crashes);
            (lease.not_before, lease.inc) = (not_before, inc);
        }
        self.go(world, actor, Step::Claiming(lease, world.now));
        world.send(actor, LEASE, Some(Stored::Lease(lease)), If::from(&change.when));
    }

    /// Reads what was claimed.
    pub(super) fn begin(
        &self,
        world: &mut World<Self>,
        actor: usize,
        lease: Small,
        mark: Mark,
        sent: u8,
    ) {
        let found = self.work(world);
        // FIELD.md row 7: runs what its listing showed, whether or not it is there still.
        let listed = world.history.promised.first().map(|inc| (Push { inc: *inc, at: 0 }, 0));
        let found = match mutant::is(Mutant::GhostClaim) {
            true => found.or(listed),
            false => found,
        };
        let Some((push, work)) = found else {
            world.history.seen.claimed_nothing = true;
            self.go(world, actor, Step::Dropping(lease, mark));
            return world.send(actor, LEASE, None, If::Is(mark));
        };
        let past = lease.past().about(&name(push.inc), Some(store_time(push.at)));
        let (failures, crashes) = (past.failures as u8, past.crashes as u8);
        let held = Held { lease, version: mark, sent, push, work, failures, crashes };
        if !decide::may_run(&past, &task(push), &settings()) {
            return self.give_up(world, actor, held);
        }
        world.history.started_nothing |= self.work(world).is_none_or(|(there, _)| there != push);
        self.go(world, actor, Step::Running(held));
    }

    /// `Held::give_up`: only with a lease that can be trusted.
    pub(super) fn give_up(&self, world: &mut World<Self>, actor: usize, held: Held) {
        let step = match self.trusted(world, &held) {
            true => Step::GivingUp(held),
            false => Step::Idle,
        };
        self.go(world, actor, step);
    }

    pub(super) fn write_record(
        &self,
        world: &mut World<Self>,
        actor: usize,
        held: Held,
        r: Record,
        when: If,
    ) {
        let nonce = world.nonce(actor);
        let (key, body) = match r {
            Record::Receipt => (RECEIPT, Stored::Receipt(held.push, nonce)),
            Record::Letter => (LETTER, Stored::Letter(held.push, nonce)),
        };
        self.go(world, actor, Step::Recording(held, r));
        world.send(actor, key, Some(body), when);
    }

    /// Only the version that was read (FIELD.md rows 22, 23).
    pub(super) fn clean_up(
        &self,
        world: &mut World<Self>,
        actor: usize,
        held: Held,
        record: Record,
    ) {
        let any = match record {
            Record::Receipt => mutant::is(Mutant::SameIdNewTask),
            Record::Letter => mutant::is(Mutant::HalfDoneDeadLetter),
        };
        self.go(world, actor, Step::CleanWork(held, record));
        world.send(actor, WORK, None, if any { If::Any } else { If::Is(held.work) });
    }

    pub(super) fn leave(&self, world: &mut World<Self>, actor: usize, held: Held, past: Past3) {
        let mark = world.nonce(actor);
        let now = store_time(world.now);
        let mut lease = Small::of(&lease::release(&held.lease.lease(), now, nonce(mark)));
        (lease.failures, lease.crashes, lease.not_before) = (past.0, past.1, past.2);
        lease.inc = held.push.inc;
        self.go(world, actor, Step::Leaving(held, past));
        world.send(actor, LEASE, Some(Stored::Lease(lease)), If::Is(held.version));
    }

    /// `Core::read_again`: the record if it is still ours.
    pub(super) fn still_ours(&self, world: &World<Self>, mut held: Held) -> Option<Held> {
        let seen = self.see(world);
        match lease::after_refusal(&held.lease.lease(), seen.as_ref().map(|(seen, ..)| seen)) {
            Refused::StillOurs(lease, version) => {
                held.lease = Small::of(&lease);
                held.version = mark_of(&version);
                Some(held)
            }
            Refused::Lost => None,
        }
    }

    pub(super) fn next(&self, world: &mut World<Self>, actor: usize) {
        match world.actors[actor].local.step {
            Step::Begin(lease, mark, sent) => self.begin(world, actor, lease, mark, sent),
            Step::OverReceipt(lease, mark, past) => {
                let receipt = self.record(world, Record::Receipt).map(|(push, _)| push.inc);
                self.go(world, actor, Step::OverLetter(lease, mark, past, receipt));
            }
            Step::OverLetter(lease, mark, past, receipt) => {
                let letter = self.record(world, Record::Letter).map(|(push, _)| push.inc);
                if receipt.or(letter).is_none() {
                    return self.take(world, actor, lease, mark, past);
                }
                self.go(world, actor, Step::OverWork(lease, mark, past, receipt, letter));
            }
            Step::OverWork(lease, mark, past, receipt, letter) => {
                let Some((push, work)) = self.work(world) else {
                    self.go(world, actor, Step::Retiring);
                    return world.send(actor, LEASE, None, If::Is(mark));
                };
                let (receipt, letter) = (receipt.map(name), letter.map(name));
                match decide::met(&name(push.inc), receipt.as_deref(), letter.as_deref()) {
                    Met::Open => self.take(world, actor, lease, mark, past),
                    Met::Over => {
                        world.history.seen.cleaned_for_others = true;
                        self.go(world, actor, Step::OverDeleting(mark));
                        world.send(actor, WORK, None, If::Is(work));
                    }
                }
            }
            Step::Doubting(held) => match self.still_ours(world, held) {
                Some(held) => self.go(world, actor, Step::Running(held)),
                // Told so: it stops.
                None => self.go(world, actor, Step::Idle),
            },
            Step::RecordLook(held, record) => match self.record(world, record) {
                None => self.write_record(world, actor, held, record, If::Absent),
                Some((there, mark)) => {
                    let (at, ours) = (store_time(there.at), store_time(held.push.at));
                    let same = there.inc == held.push.inc;
                    if same || !decide::gives_way(Some(at), Some(ours)) {
                        world.history.seen.again |= same;
                        return self.clean_up(world, actor, held, record);
                    }
                    self.write_record(world, actor, held, record, If::Is(mark));
                }
            },
            Step::GivingUp(held) => match self.record(world, Record::Receipt) {
                Some((there, _)) if there.inc == held.push.inc => {
                    self.clean_up(world, actor, held, Record::Letter);
                }
                _ => self.write_record(world, actor, held, Record::Letter, If::Absent),
            },
            Step::CleanCheck(held) => match self.still_ours(world, held) {
                Some(held) => {
                    self.go(world, actor, Step::CleanLease(held));
                    world.send(actor, LEASE, None, If::Is(held.version));
                }
                None => self.go(world, actor, Step::Idle),
            },
            Step::LeaveCheck(held, past) => match self.still_ours(world, held) {
                Some(held) => self.leave(world, actor, held, past),
                None => self.go(world, actor, Step::Idle),
            },
            Step::Pushed(push, mark) => match self.record(world, Record::Receipt) {
                Some((there, _)) if there.inc != push.inc => {
                    self.go(world, actor, Step::Undoing);
                    world.send(actor, WORK, None, If::Is(mark));
                }
                _ => {
                    world.history.seen.pushed_again |= !world.history.promised.is_empty();
                    world.history.promised.push(push.inc);
                    self.go(world, actor, Step::Idle);
                }
            },
            Step::RetryReceipt(letter, mark) => match self.record(world, Record::Receipt) {
                Some((there, _)) if there.inc == letter.inc => self.drop_letter(world, actor, mark),
                _ => {
                    let push = Push { inc: world.nonce(actor), at: world.now };
                    self.retry_put(world, actor, letter, mark, push);
                }
            },
            Step::RetryAgain(letter, mark, push) => {
                self.retry_put(world, actor, letter, mark, push);
            }
            Step::RetryLook(letter, mark, push) => match self.work(world) {
                None => self.retry_put(world, actor, letter, mark, push),
                Some((there, _)) if there.inc != letter.inc => {
                    self.drop_letter(world, actor, mark);
                }
                Some((_, work)) => {
                    self.go(world, actor, Step::RetryClear(letter, mark, push));
                    world.send(actor, WORK, None, If::Is(work));
                }
            },
            _ => {}
        }
    }

    pub(super) fn take(
        &self,
        world: &mut World<Self>,
        actor: usize,
        lease: Small,
        mark: Mark,
        past: Past3,
    ) {
        world.history.seen.taken_over |= past.1 > lease.crashes;
        let seen = Seen {
            record: Ok(lease.lease()),
            version: version(mark),
            modified: store_time(0),
            now: store_time(world.now),
        };
        self.claim(world, actor, Some((&seen, past)));
    }

    pub(super) fn retry_put(
        &self,
        world: &mut World<Self>,
        actor: usize,
        old: Push,
        mark: Mark,
        push: Push,
    ) {
        self.go(world, actor, Step::RetryPut(old, mark, push));
        world.send(actor, WORK, Some(Stored::Work(push)), If::Absent);
    }

    pub(super) fn drop_letter(&self, world: &mut World<Self>, actor: usize, mark: Mark) {
        self.go(world, actor, Step::RetryDrop);
        world.send(actor, LETTER, None, If::Is(mark));
    }
}
