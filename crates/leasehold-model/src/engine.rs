//! Actors on a store, and all that can come between them.
//!
//! The store is a few registers with conditional put and delete; a version is a hash of the content,
//! as on most stores, so what changes back has its old version again. An actor that is not waiting
//! for an answer chooses its next step; a write or delete that it makes is under way until
//!
//! - it is **delivered**: applied if its condition holds, and answered;
//! - it is **lost** before it is applied, or its answer is lost after;
//! - it is **delayed**: the actor gives up waiting, and the write lands at any later moment, as a
//!   ghost, or never.
//!
//! An actor may **crash** at any point and start anew, and **time** may pass between any two steps,
//! so everybody pauses for longer than any ttl. Faults and ticks are limited in number, nothing else
//! is: every order of all this is tried.
//!
//! What becomes of a write without an answer is told by [`settle`], the function that the product
//! runs, in the order of `leasehold::store::settle`: read, judge, send again.

use std::fmt::Debug;
use std::hash::{Hash, Hasher};

use leasehold_protocol::cas::{Version, When};
use leasehold_protocol::mutant::{self, Mutant};
use leasehold_protocol::settle::{self, Found, Proof, Verdict};
use stateright::{Model, Property};

/// A version in small: a hash of the content.
pub type Mark = u64;

/// What a register holds.
pub trait Body: Clone + Debug + Eq + Hash + Send + Sync + 'static {
    /// The bytes that the product would store.
    fn bytes(&self) -> Vec<u8>;
    /// How their author recognises them.
    fn proof(&self) -> Proof;

    /// The version of an object with this content.
    fn mark(&self) -> Mark {
        // Stable within a run, which is all that it takes.
        let mut hasher = std::hash::DefaultHasher::new();
        self.hash(&mut hasher);
        hasher.finish()
    }
}

/// A version as the protocol knows it.
pub fn version(mark: Mark) -> Version {
    Version::new(format!("{mark:016x}"))
}

/// The other way round. The protocol gives back only what it was given.
pub fn mark_of(version: &Version) -> Mark {
    u64::from_str_radix(version.as_str(), 16).unwrap_or(0)
}

/// A condition in small.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum If {
    /// None.
    Any,
    /// Nothing is there.
    Absent,
    /// This version is there.
    Is(Mark),
}

impl From<&When> for If {
    fn from(when: &When) -> Self {
        match when {
            When::Any => Self::Any,
            When::Absent => Self::Absent,
            When::Matches(version) => Self::Is(mark_of(version)),
        }
    }
}

impl From<If> for When {
    fn from(when: If) -> Self {
        match when {
            If::Any => Self::Any,
            If::Absent => Self::Absent,
            If::Is(mark) => Self::Matches(version(mark)),
        }
    }
}

/// A write (`body`) or a delete (none).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Request<B> {
    /// Of which register.
    pub key: usize,
    /// What to write.
    pub body: Option<B>,
    /// In which state.
    pub when: If,
}

/// A request under way.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Call<B> {
    /// What was asked for.
    pub request: Request<B>,
    /// How often it was sent.
    pub sent: u8,
    /// Whether some sending was not answered.
    pub doubt: bool,
    /// Whether the actor is about to look what became of it.
    pub looking: bool,
}

/// What came of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// It applied. The version, of a write.
    Done(Mark),
    /// The condition did not hold, and nothing of ours was ever in doubt.
    Refused,
    /// Something else is there; ours may have been there before.
    Overtaken,
    /// Nobody knows.
    NoAnswer,
}

/// An actor: what it knows, what it is waiting for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Actor<L, B> {
    /// Its own state.
    pub local: L,
    /// Its request under way.
    pub call: Option<Call<B>>,
    /// How many marks it has used.
    pub nonces: u8,
}

/// What a register holds, and since when.
pub type Register<B> = Option<(B, u8)>;

/// Everything.
#[derive(Debug)]
pub struct World<R: Rules> {
    /// The time, in ticks.
    pub now: u8,
    /// The store.
    pub registers: Vec<Register<R::Body>>,
    /// Who is there.
    pub actors: Vec<Actor<R::Local, R::Body>>,
    /// Writes that may land yet, and since when.
    pub ghosts: Vec<(Request<R::Body>, u8)>,
    /// How many faults there were.
    pub faults: u8,
    /// Whether somebody just found that its write had applied although it was not answered.
    pub settled: bool,
    /// What the properties need to know of the past.
    pub history: R::History,
}

// By hand: derives would ask the same of the rules.
impl<R: Rules> Clone for World<R> {
    fn clone(&self) -> Self {
        Self {
            now: self.now,
            registers: self.registers.clone(),
            actors: self.actors.clone(),
            ghosts: self.ghosts.clone(),
            faults: self.faults,
            settled: self.settled,
            history: self.history.clone(),
        }
    }
}

impl<R: Rules> PartialEq for World<R> {
    fn eq(&self, other: &Self) -> bool {
        (self.now, self.faults, self.settled) == (other.now, other.faults, other.settled)
            && self.registers == other.registers
            && self.actors == other.actors
            && self.ghosts == other.ghosts
            && self.history == other.history
    }
}

impl<R: Rules> Hash for World<R> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.now.hash(state);
        self.registers.hash(state);
        self.actors.hash(state);
        self.ghosts.hash(state);
        self.faults.hash(state);
        self.settled.hash(state);
        self.history.hash(state);
    }
}

impl<R: Rules> World<R> {
    /// What is at this key: its version, its content, when it was written.
    pub fn at(&self, key: usize) -> Option<(Mark, &R::Body, u8)> {
        self.registers[key].as_ref().map(|(body, modified)| (body.mark(), body, *modified))
    }

    /// A mark that was never used.
    pub fn nonce(&mut self, actor: usize) -> u16 {
        let actor_ = &mut self.actors[actor];
        actor_.nonces += 1;
        (actor as u16 + 1) << 8 | u16::from(actor_.nonces)
    }

    /// The actor waits for this from now on.
    pub fn send(&mut self, actor: usize, key: usize, body: Option<R::Body>, when: If) {
        let request = Request { key, body, when };
        let call = Call { request, sent: 1, doubt: false, looking: false };
        self.actors[actor].call = Some(call);
    }
}

/// What the actors do.
pub trait Rules: Clone + Debug + Send + Sync + Sized + 'static {
    /// What registers hold.
    type Body: Body;
    /// What an actor knows.
    type Local: Clone + Debug + Eq + Hash + Send + Sync;
    /// What the properties need to know of the past.
    type History: Clone + Debug + Default + Eq + Hash + Send + Sync;
    /// What an actor may choose to do.
    type Choice: Clone + Copy + Debug + Eq + Hash + Send + Sync;

    /// How much is tried.
    fn bounds(&self) -> Bounds;
    /// How many registers there are.
    fn registers(&self) -> usize;
    /// Where each actor begins.
    fn actors(&self) -> Vec<Self::Local>;
    /// What this actor, which waits for nothing, may do.
    fn choices(&self, world: &World<Self>, actor: usize) -> Vec<Self::Choice>;
    /// Does it: at most one read of the store, and then perhaps a request.
    fn choose(&self, world: &mut World<Self>, actor: usize, choice: Self::Choice);
    /// Its request was answered.
    fn answered(&self, world: &mut World<Self>, actor: usize, answer: Answer);
    /// Where this actor begins again after a crash, or `None` if it has nothing to lose.
    fn crashed(&self, world: &World<Self>, actor: usize) -> Option<Self::Local>;
    /// A write or delete has applied. `before` was there.
    fn applied(
        &self,
        _world: &mut World<Self>,
        _key: usize,
        _before: Option<&Self::Body>,
        _after: Option<&Self::Body>,
    ) {
    }
    /// Before each step: forgets what only mattered for the last one, so that equal situations are
    /// one state whatever led there.
    fn forget(&self, _history: &mut Self::History) {}
    /// Time passes.
    fn tick(&self, world: &mut World<Self>) {
        world.now += 1;
        let (now, life) = (world.now, self.bounds().ghost_life);
        world.ghosts.retain(|(_, since)| now - since <= life);
    }
    /// What time it is at the start.
    fn start(&self) -> u8 {
        0
    }
    /// Whether this actor will never do anything again.
    fn is_finished(&self, world: &World<Self>, actor: usize) -> bool;
    /// What must hold.
    fn properties(&self) -> Vec<Property<Checked<Self>>>;
}

/// How much is tried.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// Losses, delays and crashes.
    pub faults: u8,
    /// Ticks.
    pub ticks: u8,
    /// How often a request is sent.
    pub attempts: u8,
    /// For how many ticks a delayed write may still land.
    pub ghost_life: u8,
}

/// A model of these rules.
#[derive(Debug, Clone)]
pub struct Checked<R>(pub R);

/// What happens next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action<C> {
    /// The actor does something.
    Choose(usize, C),
    /// Its request arrives, and it hears of it.
    Deliver(usize),
    /// Its request never arrives.
    LostBefore(usize),
    /// Its request arrives, and it does not hear of it.
    LostAfter(usize),
    /// It gives up waiting, and its request may arrive later.
    Delay(usize),
    /// It looks what became of its request.
    Look(usize),
    /// A delayed request arrives.
    Land(usize),
    /// The actor loses everything that it knows.
    Crash(usize),
    /// Time passes.
    Tick,
}

impl<R: Rules> Checked<R> {
    /// Applies a request if its condition holds.
    fn apply(&self, world: &mut World<R>, request: &Request<R::Body>) -> Option<Mark> {
        let there = world.registers[request.key].take();
        let holds = match request.when {
            If::Any => true,
            If::Absent => there.is_none(),
            If::Is(mark) => there.as_ref().is_some_and(|(body, _)| body.mark() == mark),
        };
        if !holds {
            world.registers[request.key] = there;
            return None;
        }
        let now = world.now;
        world.registers[request.key] = request.body.clone().map(|body| (body, now));
        let before = there.map(|(body, _)| body);
        self.0.applied(world, request.key, before.as_ref(), request.body.as_ref());
        Some(request.body.as_ref().map_or(0, Body::mark))
    }

    fn answer(&self, world: &mut World<R>, actor: usize, answer: Answer) {
        world.actors[actor].call = None;
        self.0.answered(world, actor, answer);
    }

    /// No answer to this sending: what next, as `leasehold::store::settle` has it.
    fn unanswered(&self, world: &mut World<R>, actor: usize) {
        let attempts = self.0.bounds().attempts;
        let Some(call) = &mut world.actors[actor].call else { return };
        call.doubt = true;
        // FIELD.md row 3: sends again at once, and believes what that is told.
        let blind = mutant::is(Mutant::OwnRefusal) && call.sent < attempts;
        match (blind || call.request.when == If::Any) && call.sent < attempts {
            true => call.sent += 1,
            false => call.looking = true,
        }
    }

    fn look(&self, world: &mut World<R>, actor: usize) {
        let Some(mut call) = world.actors[actor].call.clone() else { return };
        let there = world.at(call.request.key);
        let verdict = match &call.request.body {
            Some(body) => {
                let found = there.map(|(mark, body, _)| (body.bytes(), version(mark)));
                let found = match &found {
                    Some((body, version)) => Found::Object { body, version },
                    None => Found::Absent,
                };
                settle::put(found, &body.bytes(), &call.request.when.into(), body.proof())
            }
            None => match call.request.when {
                If::Is(mark) => {
                    let there = there.map(|(mark, ..)| version(mark));
                    settle::delete(there.as_ref(), &version(mark))
                }
                If::Any | If::Absent => Verdict::Open,
            },
        };
        let is_delete = call.request.body.is_none();
        world.settled = !is_delete && matches!(verdict, Verdict::Applied(_));
        let answer = match verdict {
            Verdict::Applied(version) => Answer::Done(mark_of(&version)),
            Verdict::Overtaken if is_delete => Answer::Refused,
            Verdict::Overtaken => Answer::Overtaken,
            Verdict::Open if call.sent < self.0.bounds().attempts => {
                (call.sent, call.looking) = (call.sent + 1, false);
                world.actors[actor].call = Some(call);
                return;
            }
            Verdict::Open => Answer::NoAnswer,
        };
        self.answer(world, actor, answer);
    }

    /// The actor's request arrives, and it hears of it.
    pub(crate) fn deliver(&self, world: &mut World<R>, actor: usize) {
        let Some(call) = world.actors[actor].call.clone() else { return };
        let doubt = call.doubt && !mutant::is(Mutant::OwnRefusal);
        match self.apply(world, &call.request) {
            Some(mark) => self.answer(world, actor, Answer::Done(mark)),
            None if doubt => {
                if let Some(call) = &mut world.actors[actor].call {
                    call.looking = true;
                }
            }
            None => self.answer(world, actor, Answer::Refused),
        }
    }
}

impl<R: Rules> Model for Checked<R> {
    type State = World<R>;
    type Action = Action<R::Choice>;

    fn init_states(&self) -> Vec<Self::State> {
        let actor = |local| Actor { local, call: None, nonces: 0 };
        vec![World {
            now: self.0.start(),
            registers: vec![None; self.0.registers()],
            actors: self.0.actors().into_iter().map(actor).collect(),
            ghosts: Vec::new(),
            faults: 0,
            settled: false,
            history: R::History::default(),
        }]
    }

    fn actions(&self, world: &Self::State, actions: &mut Vec<Self::Action>) {
        let bounds = self.0.bounds();
        let may_fail = world.faults < bounds.faults;
        for (at, actor) in world.actors.iter().enumerate() {
            match &actor.call {
                None => {
                    let choices = self.0.choices(world, at);
                    actions.extend(choices.into_iter().map(|choice| Action::Choose(at, choice)));
                }
                Some(call) if call.looking => actions.push(Action::Look(at)),
                Some(_) => {
                    actions.push(Action::Deliver(at));
                    if may_fail {
                        actions.push(Action::LostBefore(at));
                        actions.push(Action::LostAfter(at));
                        actions.push(Action::Delay(at));
                    }
                }
            }
            if may_fail && self.0.crashed(world, at).is_some() {
                actions.push(Action::Crash(at));
            }
        }
        actions.extend((0..world.ghosts.len()).map(Action::Land));
        if world.now < bounds.ticks {
            actions.push(Action::Tick);
        }
    }

    fn next_state(&self, last: &Self::State, action: Self::Action) -> Option<Self::State> {
        let mut world = last.clone();
        self.0.forget(&mut world.history);
        world.settled = false;
        match action {
            Action::Choose(actor, choice) => self.0.choose(&mut world, actor, choice),
            Action::Deliver(actor) => self.deliver(&mut world, actor),
            Action::LostBefore(actor) => {
                world.faults += 1;
                self.unanswered(&mut world, actor);
            }
            Action::LostAfter(actor) => {
                world.faults += 1;
                let request = world.actors[actor].call.as_ref()?.request.clone();
                self.apply(&mut world, &request);
                self.unanswered(&mut world, actor);
            }
            Action::Delay(actor) => {
                world.faults += 1;
                let request = world.actors[actor].call.as_ref()?.request.clone();
                let now = world.now;
                world.ghosts.push((request, now));
                self.unanswered(&mut world, actor);
            }
            Action::Look(actor) => self.look(&mut world, actor),
            Action::Land(ghost) => {
                let (request, _) = world.ghosts.remove(ghost);
                self.apply(&mut world, &request);
            }
            Action::Crash(actor) => {
                world.faults += 1;
                let local = self.0.crashed(&world, actor)?;
                let now = world.now;
                let actor = &mut world.actors[actor];
                actor.local = local;
                // What it sent may arrive after its end.
                if let Some(call) = actor.call.take() {
                    world.ghosts.push((call.request, now));
                }
            }
            Action::Tick => self.0.tick(&mut world),
        }
        for actor in 0..world.actors.len() {
            // How many marks it has used does not matter any more.
            if world.actors[actor].call.is_none() && self.0.is_finished(&world, actor) {
                world.actors[actor].nonces = 0;
            }
        }
        Some(world)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        self.0.properties()
    }
}
