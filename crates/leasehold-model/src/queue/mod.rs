//! The queue: one task, two workers that claim, renew, ack, nack, give up, drain and crash, and a user
//! who pushes it, forgets its receipt, pushes it again under the same id, and retries it.
//!
//! The steps are those of `leasehold::queue::{claim, task, push, inspect}`, one request each, and
//! listings are as old as can be: a worker may try to claim at any time. Decisions are
//! `leasehold_protocol::queue`'s and `::lease`'s.

mod records;
mod steps;

use std::time::Duration;

use leasehold_protocol::format::task::Failure;
use leasehold_protocol::lease::{self, Observer};
use leasehold_protocol::mutant::{self, Mutant};
use leasehold_protocol::queue::{self as decide, AfterFailure, Claim, History as Past};
use stateright::Property;

use crate::engine::{Answer, Bounds, Checked, If, Mark, Rules, World};
use crate::lease::{nonce, store_time};
use records::{
    LEASE, LETTER, Push, RECEIPT, Small, Stored, TTL, WORK, settings, small, task, tick_of,
};

/// What a worker holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Held {
    lease: Small,
    version: Mark,
    sent: u8,
    push: Push,
    work: Mark,
    failures: u8,
    crashes: u8,
}

/// A record that counts for one push: the receipt or the dead letter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Record {
    /// The receipt.
    Receipt,
    /// The dead letter.
    Letter,
}

/// Where an actor is. What is in brackets is known by then.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Step {
    /// Does nothing.
    Idle,
    /// Writes a claim.
    Claiming(Small, u8),
    /// Claimed: is about to read the task.
    Begin(Small, Mark, u8),
    /// Found a lease that nobody holds: is about to look for a receipt,
    OverReceipt(Small, Mark, Past3),
    /// then for a dead letter,
    OverLetter(Small, Mark, Past3, Option<u16>),
    /// then at the task.
    OverWork(Small, Mark, Past3, Option<u16>, Option<u16>),
    /// It is over: deletes the task, then the lease.
    OverDeleting(Mark),
    /// Deletes a lease in this version.
    Retiring,
    /// Runs the task.
    Running(Held),
    /// Renews.
    Renewing(Held, Small, u8),
    /// A renewal was refused: is about to look.
    Doubting(Held),
    /// Writes the receipt or dead letter.
    Recording(Held, Record),
    /// It was refused: is about to look at what is there.
    RecordLook(Held, Record),
    /// Gives up: is about to look for a receipt.
    GivingUp(Held),
    /// Deletes the task.
    CleanWork(Held, Record),
    /// Deletes the lease.
    CleanLease(Held),
    /// That was refused: is about to look.
    CleanCheck(Held),
    /// Claimed for nothing: deletes the lease.
    Dropping(Small, Mark),
    /// Releases the lease.
    Leaving(Held, Past3),
    /// That was refused: is about to look.
    LeaveCheck(Held, Past3),
    /// FIELD.md row 6: deletes before anything is recorded.
    EarlyWork(Held),
    /// And the lease.
    EarlyLease(Held),
    /// The user pushes: writes the task,
    Pushing(Push),
    /// then looks for a receipt once more,
    Pushed(Push, Mark),
    /// and takes it back.
    Undoing,
    /// The user removes an old receipt.
    Forgetting,
    /// The user retries: is about to look for a receipt,
    RetryReceipt(Push, Mark),
    /// writes the task,
    RetryPut(Push, Mark, Push),
    /// may write it now that the old one is gone,
    RetryAgain(Push, Mark, Push),
    /// is about to look what is in the way,
    RetryLook(Push, Mark, Push),
    /// removes what is in the way,
    RetryClear(Push, Mark, Push),
    /// and removes the dead letter.
    RetryDrop,
}

/// Failures, crashes, and not before.
pub type Past3 = (u8, u8, Option<u8>, u16);

fn three(past: &Past) -> Past3 {
    let not_before = past.not_before.map(tick_of);
    (past.failures as u8, past.crashes as u8, not_before, small(&past.incarnation))
}

/// An actor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Local {
    step: Step,
    is_user: bool,
    /// What it may still do: claims of a worker, pushes of the user.
    left: u8,
    /// Failures of a worker, renewals; receipts that the user forgets.
    more: u8,
    /// Retries of the user.
    retries: u8,
}

/// What an actor does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Choice {
    /// Claims what an old listing showed as free.
    ClaimFree,
    /// Looks at the lease first.
    ClaimLeased,
    /// Goes on with what it is doing.
    Next,
    /// Done.
    Ack,
    /// Failed, to be tried again.
    Nack,
    /// Back to the others.
    Drain,
    /// Renews.
    Renew,
    /// Pushes.
    Push,
    /// Removes the receipt.
    Forget,
    /// Retries a dead letter.
    Retry,
}

/// What was seen to happen.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct History {
    /// Pushes that the user was told to be pending.
    promised: Vec<u16>,
    /// Pushes with a receipt, or with a dead letter, at any time.
    done: Vec<u16>,
    dead: Vec<u16>,
    /// Pushes whose receipt was forgotten since.
    forgotten: Vec<u16>,
    /// A second receipt for one push, whose first was not forgotten.
    twice: bool,
    /// A task was started that was not there.
    started_nothing: bool,
    /// What should happen somewhere.
    seen: Seldom,
}

/// What should happen somewhere.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Seldom {
    again: bool,
    taken_over: bool,
    cleaned_for_others: bool,
    pushed_again: bool,
    retried: bool,
    claimed_nothing: bool,
    kept_new: bool,
}

/// The rules.
#[derive(Debug, Clone, Copy)]
pub struct QueueRules {
    claims: u8,
    nacks: u8,
    pushes: u8,
    forgets: u8,
    retries: u8,
    renews: bool,
    bounds: Bounds,
}

impl Rules for QueueRules {
    type Body = Stored;
    type Local = Local;
    type History = History;
    type Choice = Choice;

    fn bounds(&self) -> Bounds {
        self.bounds
    }

    fn registers(&self) -> usize {
        4
    }

    fn actors(&self) -> Vec<Local> {
        let worker = Local {
            step: Step::Idle,
            is_user: false,
            left: self.claims,
            more: self.nacks,
            retries: u8::from(self.renews),
        };
        let user = Local {
            step: Step::Idle,
            is_user: true,
            left: self.pushes,
            more: self.forgets,
            retries: self.retries,
        };
        vec![worker, worker, user]
    }

    fn choices(&self, world: &World<Self>, actor: usize) -> Vec<Choice> {
        let local = &world.actors[actor].local;
        let mut choices = Vec::new();
        match local.step {
            Step::Idle if local.is_user => {
                if local.left > 0 {
                    choices.push(Choice::Push);
                }
                // Receipts are kept for days, which is more than the resolution of any clock.
                if local.more > 0 && world.at(RECEIPT).is_some_and(|(.., at)| at < world.now) {
                    choices.push(Choice::Forget);
                }
                if local.retries > 0 && world.at(LETTER).is_some() {
                    choices.push(Choice::Retry);
                }
            }
            // Only what some listing has shown.
            Step::Idle if local.left > 0 && world.actors[2].nonces > 0 => {
                choices.extend([Choice::ClaimFree, Choice::ClaimLeased]);
            }
            Step::Idle => {}
            Step::Running(_) => {
                choices.push(Choice::Ack);
                if local.more > 0 {
                    choices.extend([Choice::Nack, Choice::Drain]);
                }
                if local.retries > 0 {
                    choices.push(Choice::Renew);
                }
            }
            _ => choices.push(Choice::Next),
        }
        choices
    }

    fn choose(&self, world: &mut World<Self>, actor: usize, choice: Choice) {
        let now = world.now;
        let local = &mut world.actors[actor].local;
        match (choice, local.step) {
            (Choice::ClaimFree, _) => {
                local.left -= 1;
                self.claim(world, actor, None);
            }
            (Choice::ClaimLeased, _) => {
                local.left -= 1;
                let Some((seen, lease, mark)) = self.see(world) else {
                    return self.claim(world, actor, None);
                };
                let observer = Observer {
                    ttl: TTL,
                    watched: Duration::ZERO,
                    here: None,
                    store_is_here: false,
                    holder: None,
                };
                if let Claim::Take(past) = decide::claim(&seen, &lease::judge(&seen, &observer)) {
                    self.go(world, actor, Step::OverReceipt(lease, mark, three(&past)));
                } else {
                    // Nothing was done: it may look again later.
                    world.actors[actor].local.left += u8::from(now < self.bounds.ticks);
                }
            }
            (Choice::Next, _) => self.next(world, actor),
            (Choice::Ack, Step::Running(held)) => match mutant::is(Mutant::ZombieAck) {
                false => self.write_record(world, actor, held, Record::Receipt, If::Absent),
                true => {
                    self.go(world, actor, Step::EarlyWork(held));
                    world.send(actor, WORK, None, If::Any);
                }
            },
            (Choice::Nack, Step::Running(held)) => {
                local.more -= 1;
                let mut past = held.lease.past();
                (past.failures, past.crashes) = (held.failures.into(), held.crashes.into());
                let (at, error) = (store_time(now), String::new());
                let failure = Failure { at, worker: String::new(), crash: false, error };
                let after =
                    decide::after_failure(&past, &task(held.push), &settings(), failure, None, 0);
                match after {
                    AfterFailure::Retry(past) => self.leave(world, actor, held, three(&past)),
                    AfterFailure::GiveUp(past) => {
                        let (failures, crashes, ..) = three(&past);
                        self.give_up(world, actor, Held { failures, crashes, ..held });
                    }
                }
            }
            (Choice::Drain, Step::Running(held)) => {
                let past = (held.failures, held.crashes, None, held.push.inc);
                self.leave(world, actor, held, past);
            }
            (Choice::Renew, Step::Running(held)) => {
                local.retries -= 1;
                let mark = world.nonce(actor);
                let lease = lease::renew(&held.lease.lease(), store_time(now), None, nonce(mark));
                let lease = Small::of(&lease);
                self.go(world, actor, Step::Renewing(held, lease, now));
                world.send(actor, LEASE, Some(Stored::Lease(lease)), If::Is(held.version));
            }
            (Choice::Push, _) => {
                local.left -= 1;
                if world.at(RECEIPT).is_some() {
                    return;
                }
                let push = Push { inc: world.nonce(actor), at: now };
                self.go(world, actor, Step::Pushing(push));
                world.send(actor, WORK, Some(Stored::Work(push)), If::Absent);
            }
            (Choice::Forget, _) => {
                local.more -= 1;
                let Some((mark, ..)) = world.at(RECEIPT) else { return };
                self.go(world, actor, Step::Forgetting);
                world.send(actor, RECEIPT, None, If::Is(mark));
            }
            (Choice::Retry, _) => {
                local.retries -= 1;
                let Some((letter, mark)) = self.record(world, Record::Letter) else { return };
                self.go(world, actor, Step::RetryReceipt(letter, mark));
            }
            _ => {}
        }
    }

    fn answered(&self, world: &mut World<Self>, actor: usize, answer: Answer) {
        let done = matches!(answer, Answer::Done(_));
        let refused = matches!(answer, Answer::Refused | Answer::Overtaken);
        let step = world.actors[actor].local.step;
        let next = match (step, answer) {
            (Step::Claiming(lease, sent), Answer::Done(mark)) => Step::Begin(lease, mark, sent),
            (Step::OverDeleting(mark), _) if done || refused => {
                self.go(world, actor, Step::Retiring);
                return world.send(actor, LEASE, None, If::Is(mark));
            }
            (Step::Renewing(mut held, lease, sent), Answer::Done(mark)) => {
                (held.lease, held.version, held.sent) = (lease, mark, sent);
                Step::Running(held)
            }
            (Step::Renewing(held, ..), _) if refused => Step::Doubting(held),
            (Step::Renewing(held, ..), _) => Step::Running(held),
            (Step::Recording(held, record), _) if done => {
                return self.clean_up(world, actor, held, record);
            }
            (Step::Recording(held, record), _) if refused => Step::RecordLook(held, record),
            // Not recorded, as far as anybody knows: to be done again.
            (Step::Recording(held, Record::Receipt), _) => {
                let past = (held.failures + 1, held.crashes, Some(world.now), held.push.inc);
                return self.leave(world, actor, held, past);
            }
            (Step::CleanWork(held, record), _) if done || refused => {
                if refused && self.work(world).is_some_and(|(there, _)| there != held.push) {
                    world.history.seen.kept_new = true;
                }
                let _ = record;
                self.go(world, actor, Step::CleanLease(held));
                return world.send(actor, LEASE, None, If::Is(held.version));
            }
            (Step::CleanLease(held), Answer::Refused) => Step::CleanCheck(held),
            (Step::Dropping(lease, version), Answer::Refused) => {
                // The same look as after a refused removal of what was held.
                let push = Push { inc: 0, at: 0 };
                let held = Held { lease, version, sent: 0, push, work: 0, failures: 0, crashes: 0 };
                Step::CleanCheck(held)
            }
            (Step::Leaving(held, past), _) if refused => Step::LeaveCheck(held, past),
            (Step::EarlyWork(held), _) => {
                self.go(world, actor, Step::EarlyLease(held));
                return world.send(actor, LEASE, None, If::Any);
            }
            (Step::EarlyLease(held), _) => {
                return self.write_record(world, actor, held, Record::Receipt, If::Absent);
            }
            (Step::Pushing(push), Answer::Done(mark)) => Step::Pushed(push, mark),
            (Step::RetryPut(letter, mark, push), _) if done => {
                world.history.seen.retried = true;
                world.history.promised.push(push.inc);
                let _ = letter;
                return self.drop_letter(world, actor, mark);
            }
            (Step::RetryPut(letter, mark, push), _) if refused => {
                Step::RetryLook(letter, mark, push)
            }
            (Step::RetryClear(letter, mark, push), _) if done || refused => {
                Step::RetryAgain(letter, mark, push)
            }
            _ => Step::Idle,
        };
        self.go(world, actor, next);
    }

    fn crashed(&self, world: &World<Self>, actor: usize) -> Option<Local> {
        let local = world.actors[actor].local;
        (local.step != Step::Idle).then_some(Local { step: Step::Idle, ..local })
    }

    fn forget(&self, history: &mut History) {
        history.seen = Seldom::default();
    }

    fn is_finished(&self, world: &World<Self>, actor: usize) -> bool {
        let local = &world.actors[actor].local;
        // The user's marks say whether anything was ever pushed.
        !local.is_user && local.step == Step::Idle && local.left == 0
    }

    fn applied(
        &self,
        world: &mut World<Self>,
        _key: usize,
        before: Option<&Stored>,
        after: Option<&Stored>,
    ) {
        let history = &mut world.history;
        if let (Some(Stored::Receipt(push, _)), None) = (before, after) {
            history.forgotten.push(push.inc);
        }
        match after {
            Some(Stored::Receipt(push, _)) => {
                let known = |list: &[u16]| list.contains(&push.inc);
                history.twice |= known(&history.done) && !known(&history.forgotten);
                history.done.push(push.inc);
                history.done.sort_unstable();
                history.done.dedup();
            }
            Some(Stored::Letter(push, _)) => {
                history.dead.push(push.inc);
                history.dead.sort_unstable();
                history.dead.dedup();
            }
            _ => {}
        }
    }

    fn properties(&self) -> Vec<Property<Checked<Self>>> {
        type Q = Checked<QueueRules>;
        type W = World<QueueRules>;
        fn over(world: &W, inc: u16) -> bool {
            world.history.done.contains(&inc) || world.history.dead.contains(&inc)
        }
        let mut properties = vec![
            Property::always("no promised task is lost", |model: &Q, world: &W| {
                let pending = model.0.work(world).map(|(push, _)| push.inc);
                world.history.promised.iter().all(|inc| over(world, *inc) || pending == Some(*inc))
            }),
            Property::always("one receipt for each push while it is kept", |_: &Q, world: &W| {
                !world.history.twice
            }),
            Property::always("what is gone is not started", |_: &Q, world: &W| {
                !world.history.started_nothing
            }),
            // Time alone changes nothing stored, so it is enough to ask at the end of it.
            Property::always("left alone, every task ends", |model: &Q, world: &W| {
                world.now < model.0.bounds.ticks || drains(model, world)
            }),
            Property::sometimes("done", |_: &Q, world: &W| !world.history.done.is_empty()),
            Property::sometimes("taken over", |_: &Q, world: &W| world.history.seen.taken_over),
            Property::sometimes("completed by another already", |_: &Q, world: &W| {
                world.history.seen.again
            }),
            Property::sometimes("claimed what is gone", |_: &Q, world: &W| {
                world.history.seen.claimed_nothing
            }),
        ];
        if self.bounds.faults > 0 {
            properties.push(Property::sometimes("cleaned up for another", |_: &Q, world: &W| {
                world.history.seen.cleaned_for_others
            }));
        }
        match self.retries {
            0 if self.forgets == 0 => {}
            0 => properties.extend([
                Property::sometimes("pushed again", |_: &Q, world: &W| {
                    world.history.seen.pushed_again
                }),
                Property::sometimes(
                    "a new push left alone by an old worker",
                    |_: &Q, world: &W| world.history.seen.kept_new,
                ),
            ]),
            _ => properties.extend([
                Property::sometimes("given up", |_: &Q, world: &W| !world.history.dead.is_empty()),
                Property::sometimes("retried", |_: &Q, world: &W| world.history.seen.retried),
            ]),
        }
        properties
    }
}

/// Whether a fresh worker, alone and long after, brings every promised task to its end.
fn drains(model: &Checked<QueueRules>, world: &World<QueueRules>) -> bool {
    let mut world = world.clone();
    world.ghosts.clear();
    world.now += 8;
    for actor in &mut world.actors {
        actor.call = None;
        actor.local.step = Step::Idle;
        (actor.local.left, actor.local.more, actor.local.retries) = (0, 0, 0);
    }
    for _ in 0..60 {
        if world.actors[0].call.is_some() {
            model.deliver(&mut world, 0);
            continue;
        }
        let local = &mut world.actors[0].local;
        let choice = match local.step {
            Step::Idle if world.registers[WORK].is_none() => {
                return world.history.promised.iter().all(|inc| {
                    world.history.done.contains(inc) || world.history.dead.contains(inc)
                });
            }
            Step::Idle => {
                local.left = 1;
                Choice::ClaimLeased
            }
            Step::Running(_) => Choice::Ack,
            _ => Choice::Next,
        };
        model.0.choose(&mut world, 0, choice);
    }
    false
}
