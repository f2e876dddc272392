//! The lease: three who want it, ask for it, renew it, release it, crash with it, and write a file
//! under it.
//!
//! On a bucket: a release leaves a record, and age is told by one response. The steps are those of
//! `leasehold::lease::{Desk, Tenure}`, each decision `leasehold_protocol::lease`'s. Clocks of the
//! actors are a day behind, right, and a day ahead. A tick is 4 s and the ttl 8 s: a holder stops
//! trusting its lease after 2 ticks, others take it after 3. Time has no end here: instead of the
//! clock's going on, everything becomes older, and what is older than matters is as old as matters.

use std::time::Duration;

use leasehold_protocol::cas::{Nonce, When};
use leasehold_protocol::format::lease::{Dialect, Lease, State};
use leasehold_protocol::lease::{self, Asking, Holder, Judgement, Observer, Refused, Seen, Why};
use leasehold_protocol::mutant::{self, Mutant};
use leasehold_protocol::settle::Proof;
use leasehold_protocol::time::StoreTime;
use stateright::Property;

use crate::engine::{Answer, Body, Bounds, Checked, If, Mark, Rules, World, mark_of, version};

const TICK: i64 = 4_000_000;
const TTL: Duration = Duration::from_secs(8);
const EPOCH: i64 = 1_700_000_000_000_000;
const DAY: i64 = 86_400_000_000;
const NAMES: [&str; 3] = ["a", "b", "c"];

/// The time is always this.
const NOW: u8 = 8;
/// A lease that is older than this is no staler, and its holder trusts it no less.
const OLDEST_LEASE: u8 = NOW - 3;
const OLDEST_RENEWAL: u8 = NOW - 2;

/// When the tick began, by the store's clock.
pub fn store_time(tick: u8) -> StoreTime {
    StoreTime::from_micros(EPOCH + i64::from(tick) * TICK)
}

/// The same as an actor takes it, whose clock is a day off.
fn skewed(tick: u8, actor: usize) -> StoreTime {
    StoreTime::from_micros(EPOCH + i64::from(tick) * TICK + (actor as i64 - 1) * DAY)
}

/// A nonce as the protocol knows it.
pub fn nonce(small: u16) -> Nonce {
    let mut bytes = [0; 16];
    bytes[14..].copy_from_slice(&small.to_be_bytes());
    Nonce::from_bytes(bytes)
}

fn small(text: Option<&String>) -> u16 {
    text.and_then(|text| u16::from_str_radix(&text[text.len().saturating_sub(4)..], 16).ok())
        .unwrap_or(0)
}

/// A lease record in small, or the file that it guards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stored {
    /// The lease.
    Lease(Small),
    /// The file: who wrote it last, with which token.
    File {
        /// The fence.
        token: u64,
        /// What was written.
        nonce: u16,
    },
}

/// What differs between the records of this model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Small {
    /// Who.
    pub holder: u8,
    /// The fence.
    pub token: u64,
    /// Which write.
    pub nonce: u16,
    /// Which acquisition.
    pub id: u16,
    /// Whether it is held.
    pub held: bool,
    /// Who asks for it.
    pub asked: Option<u8>,
}

impl Small {
    /// As the protocol knows it.
    pub fn lease(&self) -> Lease {
        // When the writer believes it to be. Nobody may believe it.
        let at = skewed(0, self.holder.into());
        Lease {
            holder: NAMES[usize::from(self.holder)].to_owned(),
            acquired_at: Some(at),
            heartbeat_at: Some(at),
            expires_at: Some(at.plus(TTL)),
            ttl: Some(TTL),
            token: Some(self.token),
            nonce: Some(nonce(self.nonce).to_string()),
            lease_id: Some(nonce(self.id).to_string()),
            state: if self.held { State::Held } else { State::Released },
            place: None,
            ask: self.asked.map(|by| leasehold_protocol::format::lease::Ask {
                by: NAMES[usize::from(by)].to_owned(),
                at,
            }),
            other: serde_json::Map::new(),
        }
    }

    /// From what the protocol made of it.
    pub fn of(lease: &Lease) -> Self {
        let name = |text: &str| NAMES.iter().position(|name| *name == text).unwrap_or(0) as u8;
        Self {
            holder: name(&lease.holder),
            token: lease.token.unwrap_or(0),
            nonce: small(lease.nonce.as_ref()),
            id: small(lease.lease_id.as_ref()),
            held: lease.state == State::Held,
            asked: lease.ask.as_ref().map(|ask| name(&ask.by)),
        }
    }
}

impl Body for Stored {
    fn bytes(&self) -> Vec<u8> {
        match self {
            Self::Lease(small) => small.lease().to_bytes(Dialect::Lock),
            Self::File { token, nonce } => format!("{token} {nonce}").into_bytes(),
        }
    }
    fn proof(&self) -> Proof {
        match self {
            Self::Lease(small) => Proof::Nonce(nonce(small.nonce)),
            // As the scratchpad has it: equal bytes may be somebody else's.
            Self::File { .. } => Proof::None,
        }
    }
}

const LEASE: usize = 0;
const FILE: usize = 1;

/// What a holder has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Held {
    lease: Small,
    version: Mark,
    sent: u8,
    /// The version of the file that it has seen: `None` if it has not looked.
    file: Option<Option<Mark>>,
    renewals: u8,
    writes: u8,
}

/// Where an actor is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Step {
    /// Wants nothing yet.
    Idle,
    /// Somebody else was faster: is about to look again.
    Again(Small, u8),
    /// Acquires.
    Trying(Small, u8),
    /// FIELD.md row 2: deletes before it creates.
    Deleting,
    /// Asks.
    Asking,
    /// Has it.
    Holding(Held),
    /// Renews.
    Renewing(Held, Small, u8),
    /// A renewal or release was refused: is about to look whether it is still its own.
    Doubting(Held, bool),
    /// Releases.
    Releasing(Held),
    /// Writes the file.
    Writing(Held),
}

/// An actor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Local {
    step: Step,
    /// How often it may still try to acquire, and ask.
    tries: u8,
    asks: u8,
}

/// What an actor does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Choice {
    /// Looks, judges, takes, or creates what is not there.
    Look,
    /// Looks, and asks.
    Ask,
    /// Renews.
    Renew,
    /// Releases.
    Release,
    /// Looks whether the lease is still its own.
    Check,
    /// Reads the file.
    Read,
    /// Checks its lease, then writes.
    Write,
}

/// What was seen to happen.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct History {
    /// The highest token of an acquisition that applied.
    token: u64,
    /// The highest token that wrote the file.
    written: u64,
    /// How often the present acquisition was asked for.
    asked: u8,
    /// What must not happen, and did.
    wrong: Option<Wrong>,
    /// What should happen somewhere, and did.
    seen: Seldom,
}

/// What must not happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Wrong {
    /// Two acquisitions, and the token did not rise.
    TokenFell,
    /// A write with an older token after one with a newer.
    OldWrite,
    /// Somebody gave up a lease that was its own.
    WalkedAway,
    /// Asked twice.
    AskedTwice,
}

/// What should happen somewhere, or the model is too small to say anything.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Seldom {
    taken_over: bool,
    after_release: bool,
    settled: bool,
    asked_and_kept: bool,
    lost: bool,
    old_write_refused: bool,
}

/// The rules.
#[derive(Debug, Clone, Copy)]
pub struct LeaseRules {
    /// How often each tries to get it.
    pub tries: [u8; 3],
    /// How often each asks for it.
    pub asks: [u8; 3],
    /// Whether they write the file.
    pub writes: u8,
    /// How often a lease is renewed.
    pub renewals: u8,
    /// How much is tried.
    pub bounds: Bounds,
}

impl LeaseRules {
    fn see(&self, world: &World<Self>) -> Option<Seen> {
        let (mark, body, modified) = world.at(LEASE)?;
        let Stored::Lease(small) = body else { return None };
        Some(Seen {
            record: Ok(small.lease()),
            version: version(mark),
            modified: store_time(modified),
            now: store_time(world.now),
        })
    }

    fn judge(&self, seen: &Seen) -> Judgement {
        let watched = Duration::ZERO;
        let observer =
            Observer { ttl: TTL, watched, here: None, store_is_here: false, holder: None };
        lease::judge(seen, &observer)
    }

    /// `Desk::write_claim`.
    fn claim(&self, world: &mut World<Self>, actor: usize, seen: Option<&Seen>) {
        let holder = Holder { name: NAMES[actor], ttl: TTL, place: None };
        let mark = world.nonce(actor);
        // Where there is no record the token is the store's time, which is later by then than any
        // before.
        let now = match seen {
            None => StoreTime::from_micros(EPOCH.max(world.history.token as i64 + 1)),
            Some(_) => skewed(world.now, actor),
        };
        let change = lease::acquire(seen, &holder, now, 0, nonce(mark));
        let mut when = If::from(&change.when);
        if mutant::is(Mutant::GetThenPut) {
            when = If::Any;
        }
        let lease = Small::of(&change.lease);
        world.actors[actor].local.step = Step::Trying(lease, world.now);
        world.send(actor, LEASE, Some(Stored::Lease(lease)), when);
    }

    fn look(&self, world: &mut World<Self>, actor: usize) {
        let before = world.actors[actor].local.step;
        let Some(seen) = self.see(world) else { return self.claim(world, actor, None) };
        if let Step::Again(tried, sent) = before
            && let Refused::StillOurs(lease, version) =
                lease::after_refusal(&tried.lease(), Some(&seen))
        {
            world.history.seen.settled = true;
            return self.hold(world, actor, Small::of(&lease), mark_of(&version), sent);
        }
        match self.judge(&seen) {
            Judgement::Held { .. } => self.walk_away(world, actor, before),
            Judgement::Free(why) => {
                let seldom = &mut world.history.seen;
                match why {
                    Why::Released => seldom.after_release = true,
                    _ => seldom.taken_over = true,
                }
                if mutant::is(Mutant::DeleteThenClaim) {
                    world.actors[actor].local.step = Step::Deleting;
                    return world.send(actor, LEASE, None, If::Any);
                }
                self.claim(world, actor, Some(&seen));
            }
        }
    }

    fn hold(&self, world: &mut World<Self>, actor: usize, lease: Small, version: Mark, sent: u8) {
        let held = Held { lease, version, sent, file: None, renewals: 0, writes: 0 };
        world.actors[actor].local.step = Step::Holding(held);
    }

    /// Gives up. Wrong if what stands there is its own.
    fn walk_away(&self, world: &mut World<Self>, actor: usize, from: Step) {
        let own = match from {
            Step::Again(tried, _) | Step::Trying(tried, _) => Some(tried.id),
            Step::Doubting(held, _) => Some(held.lease.id),
            _ => None,
        };
        if let Some((_, Stored::Lease(there), _)) = world.at(LEASE)
            && there.held
            && Some(there.id) == own
        {
            world.history.wrong = Some(Wrong::WalkedAway);
        }
        world.actors[actor].local.step = Step::Idle;
    }

    fn trusted(&self, world: &World<Self>, held: &Held) -> bool {
        let elapsed = store_time(world.now).since(store_time(held.sent));
        elapsed < TTL - lease::margin(TTL)
    }

    /// `Core::read_again`.
    fn check(&self, world: &mut World<Self>, actor: usize, mut held: Held, releasing: bool) {
        let seen = self.see(world);
        match lease::after_refusal(&held.lease.lease(), seen.as_ref()) {
            // FIELD.md row 25: a refusal is taken for a loss.
            Refused::StillOurs(..) if mutant::is(Mutant::AskToDeath) => {
                self.walk_away(world, actor, Step::Doubting(held, releasing));
            }
            Refused::StillOurs(lease, version) => {
                world.history.seen.asked_and_kept |= lease.ask.is_some();
                held.lease = Small::of(&lease);
                held.version = mark_of(&version);
                world.actors[actor].local.step = Step::Holding(held);
                // Goes on with what it was about to do.
                match releasing {
                    true => self.release(world, actor, held),
                    false => self.renew(world, actor, held),
                }
            }
            Refused::Lost => {
                world.history.seen.lost = true;
                self.walk_away(world, actor, Step::Doubting(held, releasing));
            }
        }
    }

    fn renew(&self, world: &mut World<Self>, actor: usize, mut held: Held) {
        let mark = world.nonce(actor);
        let renewed =
            lease::renew(&held.lease.lease(), skewed(world.now, actor), None, nonce(mark));
        held.renewals += 1;
        let renewed = Small::of(&renewed);
        world.actors[actor].local.step = Step::Renewing(held, renewed, world.now);
        let when = match mutant::is(Mutant::ZombieHeartbeat) {
            true => If::Any,
            false => If::Is(held.version),
        };
        world.send(actor, LEASE, Some(Stored::Lease(renewed)), when);
    }

    fn release(&self, world: &mut World<Self>, actor: usize, held: Held) {
        let mark = world.nonce(actor);
        let released = lease::release(&held.lease.lease(), skewed(world.now, actor), nonce(mark));
        world.actors[actor].local.step = Step::Releasing(held);
        match mutant::is(Mutant::OutlivedLock) {
            true => world.send(actor, LEASE, None, If::Any),
            false => {
                let body = Stored::Lease(Small::of(&released));
                world.send(actor, LEASE, Some(body), If::Is(held.version));
            }
        }
    }
}

impl Rules for LeaseRules {
    type Body = Stored;
    type Local = Local;
    type History = History;
    type Choice = Choice;

    fn bounds(&self) -> Bounds {
        self.bounds
    }

    fn registers(&self) -> usize {
        2
    }

    fn actors(&self) -> Vec<Local> {
        let actor =
            |at: usize| Local { step: Step::Idle, tries: self.tries[at], asks: self.asks[at] };
        (0..3).map(actor).collect()
    }

    fn choices(&self, world: &World<Self>, actor: usize) -> Vec<Choice> {
        let local = &world.actors[actor].local;
        match local.step {
            Step::Idle => {
                let mut choices = Vec::new();
                if local.tries > 0 {
                    choices.push(Choice::Look);
                }
                if local.asks > 0 {
                    choices.push(Choice::Ask);
                }
                choices
            }
            Step::Again(..) => vec![Choice::Look],
            Step::Doubting(..) => vec![Choice::Check],
            Step::Holding(held) => {
                let mut choices = vec![Choice::Release];
                if held.renewals < self.renewals {
                    choices.push(Choice::Renew);
                }
                if held.writes < self.writes {
                    match held.file {
                        None => choices.push(Choice::Read),
                        Some(_) if self.trusted(world, &held) => choices.push(Choice::Write),
                        Some(_) => {}
                    }
                }
                choices
            }
            _ => Vec::new(),
        }
    }

    fn choose(&self, world: &mut World<Self>, actor: usize, choice: Choice) {
        let local = &mut world.actors[actor].local;
        match (choice, local.step) {
            (Choice::Look, step) => {
                if step == Step::Idle {
                    local.tries -= 1;
                }
                self.look(world, actor);
            }
            (Choice::Ask, _) => {
                local.asks -= 1;
                let Some(seen) = self.see(world) else { return };
                if let Judgement::Free(_) = self.judge(&seen) {
                    return;
                }
                let mark = world.nonce(actor);
                let now = skewed(world.now, actor);
                if let Asking::Write(change) = lease::ask(&seen, NAMES[actor], now, nonce(mark)) {
                    let When::Matches(_) = change.when else { return };
                    world.actors[actor].local.step = Step::Asking;
                    let body = Stored::Lease(Small::of(&change.lease));
                    world.send(actor, LEASE, Some(body), If::from(&change.when));
                }
            }
            (Choice::Renew, Step::Holding(held)) => self.renew(world, actor, held),
            (Choice::Release, Step::Holding(held)) => self.release(world, actor, held),
            (Choice::Check, Step::Doubting(held, releasing)) => {
                self.check(world, actor, held, releasing);
            }
            (Choice::Read, Step::Holding(mut held)) => {
                held.file = Some(world.at(FILE).map(|(mark, ..)| mark));
                world.actors[actor].local.step = Step::Holding(held);
            }
            (Choice::Write, Step::Holding(mut held)) => {
                held.writes += 1;
                let nonce = world.nonce(actor);
                let when = match held.file.flatten() {
                    // FIELD.md row 30: it checked its lease, and that is that.
                    _ if mutant::is(Mutant::CheckedThenPaused) => If::Any,
                    Some(mark) => If::Is(mark),
                    None => If::Absent,
                };
                world.actors[actor].local.step = Step::Writing(held);
                let body = Stored::File { token: held.lease.token, nonce };
                world.send(actor, FILE, Some(body), when);
            }
            _ => {}
        }
    }

    fn answered(&self, world: &mut World<Self>, actor: usize, answer: Answer) {
        let step = world.actors[actor].local.step;
        let next = match (step, answer) {
            (Step::Trying(lease, sent), Answer::Done(mark)) => {
                return self.hold(world, actor, lease, mark, sent);
            }
            // FIELD.md row 3: believes the refusal.
            (Step::Trying(..), Answer::Refused) if mutant::is(Mutant::OwnRefusal) => {
                return self.walk_away(world, actor, step);
            }
            (Step::Trying(lease, sent), Answer::Refused | Answer::Overtaken) => {
                Step::Again(lease, sent)
            }
            // An error; what may have landed is nobody's and becomes stale.
            (Step::Trying(..), Answer::NoAnswer) => Step::Idle,
            (Step::Deleting, _) => return self.claim(world, actor, None),
            (Step::Renewing(mut held, lease, sent), Answer::Done(mark)) => {
                (held.lease, held.version, held.sent) = (lease, mark, sent);
                Step::Holding(held)
            }
            (Step::Renewing(held, ..), Answer::Refused | Answer::Overtaken) => {
                Step::Doubting(held, false)
            }
            // Not known: trusts what it had, for as long as that lasts.
            (Step::Renewing(held, ..), Answer::NoAnswer) => Step::Holding(held),
            (Step::Releasing(_), Answer::Done(_) | Answer::NoAnswer) => Step::Idle,
            (Step::Releasing(held), Answer::Refused | Answer::Overtaken) => {
                Step::Doubting(held, true)
            }
            (Step::Writing(mut held), answer) => {
                held.file = match answer {
                    Answer::Done(mark) => Some(Some(mark)),
                    Answer::Refused => {
                        world.history.seen.old_write_refused |=
                            held.lease.token < world.history.written;
                        None
                    }
                    // The file must be read again before it is written again.
                    Answer::Overtaken | Answer::NoAnswer => None,
                };
                Step::Holding(held)
            }
            (Step::Asking, _) => Step::Idle,
            (other, _) => other,
        };
        world.actors[actor].local.step = next;
    }

    fn crashed(&self, world: &World<Self>, actor: usize) -> Option<Local> {
        let local = world.actors[actor].local;
        (local.step != Step::Idle).then_some(Local { step: Step::Idle, ..local })
    }

    fn forget(&self, history: &mut History) {
        history.seen = Seldom::default();
    }

    fn start(&self) -> u8 {
        NOW
    }

    fn tick(&self, world: &mut World<Self>) {
        if let Some((_, modified)) = &mut world.registers[LEASE] {
            *modified = (*modified - 1).max(OLDEST_LEASE);
        }
        for actor in &mut world.actors {
            match &mut actor.local.step {
                Step::Again(_, sent) | Step::Trying(_, sent) => {
                    *sent = (*sent - 1).max(OLDEST_RENEWAL);
                }
                Step::Renewing(held, _, sent) => {
                    *sent = (*sent - 1).max(OLDEST_RENEWAL);
                    held.sent = (held.sent - 1).max(OLDEST_RENEWAL);
                }
                Step::Holding(held)
                | Step::Doubting(held, _)
                | Step::Releasing(held)
                | Step::Writing(held) => held.sent = (held.sent - 1).max(OLDEST_RENEWAL),
                Step::Idle | Step::Deleting | Step::Asking => {}
            }
        }
    }

    fn is_finished(&self, world: &World<Self>, actor: usize) -> bool {
        let local = &world.actors[actor].local;
        local.step == Step::Idle && local.tries == 0 && local.asks == 0
    }

    fn applied(
        &self,
        world: &mut World<Self>,
        _key: usize,
        before: Option<&Stored>,
        after: Option<&Stored>,
    ) {
        let history = &mut world.history;
        match (before, after) {
            (_, Some(Stored::File { token, .. })) => {
                if *token < history.written {
                    history.wrong = Some(Wrong::OldWrite);
                }
                history.written = history.written.max(*token);
            }
            (_, Some(Stored::Lease(lease))) if lease.id == lease.nonce => {
                if lease.token <= history.token {
                    history.wrong = Some(Wrong::TokenFell);
                }
                (history.token, history.asked) = (lease.token, 0);
            }
            (Some(Stored::Lease(before)), Some(Stored::Lease(after)))
                if before.asked != after.asked && after.asked.is_some() =>
            {
                history.asked += 1;
                if history.asked > 1 {
                    history.wrong = Some(Wrong::AskedTwice);
                }
            }
            _ => {}
        }
    }

    fn properties(&self) -> Vec<Property<Checked<Self>>> {
        fn never(world: &World<LeaseRules>, wrong: Wrong) -> bool {
            world.history.wrong != Some(wrong)
        }
        let mut properties = vec![
            Property::always(
                "one holder at a time",
                |model: &Checked<Self>, world: &World<Self>| {
                    let holds = |step: &Step| match step {
                        Step::Holding(held)
                        | Step::Renewing(held, ..)
                        | Step::Doubting(held, false)
                        | Step::Writing(held) => model.0.trusted(world, held),
                        _ => false,
                    };
                    world.actors.iter().filter(|actor| holds(&actor.local.step)).count() <= 1
                },
            ),
            Property::always("tokens rise", |_: &Checked<Self>, world: &World<Self>| {
                never(world, Wrong::TokenFell)
            }),
            Property::always(
                "no write with an old token after one with a new",
                |_: &Checked<Self>, world: &World<Self>| never(world, Wrong::OldWrite),
            ),
            Property::always(
                "nobody gives up what is its own",
                |_: &Checked<Self>, world: &World<Self>| never(world, Wrong::WalkedAway),
            ),
            Property::always(
                "a lease is asked for once",
                |_: &Checked<Self>, world: &World<Self>| never(world, Wrong::AskedTwice),
            ),
            // Once nobody does anything any more, the next one gets it after the ttl.
            Property::always(
                "a lease never stays stuck",
                |model: &Checked<Self>, world: &World<Self>| {
                    let mut later = world.clone();
                    later.now = later.now.saturating_add(3);
                    model
                        .0
                        .see(&later)
                        .is_none_or(|seen| matches!(model.0.judge(&seen), Judgement::Free(_)))
                },
            ),
            Property::sometimes("taken over", |_: &Checked<Self>, world: &World<Self>| {
                world.history.seen.taken_over
            }),
            Property::sometimes(
                "taken after a release",
                |_: &Checked<Self>, world: &World<Self>| world.history.seen.after_release,
            ),
            Property::sometimes("lost", |_: &Checked<Self>, world: &World<Self>| {
                world.history.seen.lost
            }),
        ];
        if self.bounds.faults > 0 {
            properties.push(Property::sometimes(
                "held although the answer was lost",
                |_: &Checked<Self>, world: &World<Self>| world.settled,
            ));
        }
        if self.bounds.faults > 0 && self.asks != [0; 3] {
            properties.push(Property::sometimes(
                "found to be its own, and asked for already",
                |_: &Checked<Self>, world: &World<Self>| world.history.seen.settled,
            ));
        }
        if self.asks != [0; 3] {
            properties.push(Property::sometimes(
                "asked for, and kept",
                |_: &Checked<Self>, world: &World<Self>| world.history.seen.asked_and_kept,
            ));
        }
        if self.writes > 0 {
            properties.push(Property::sometimes(
                "an old write refused",
                |_: &Checked<Self>, world: &World<Self>| world.history.seen.old_write_refused,
            ));
        }
        properties
    }
}
