//! The world: one clock, one heap of events, nodes that die and sleep, and one store.
//!
//! Everything that takes time is an event in the heap. When no task can go on, the runtime is about
//! to park its thread, and instead the world takes the next event: that is the whole scheduler.
//! Events at the same moment come in the order in which they were made, so a seed decides all.

use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use leasehold::StoreTime;

use crate::check::Checker;
use crate::disk::Disk;
use crate::faults::{Broken, Faults};
use crate::net::{Reply, Request};
use crate::objects::Objects;
use crate::rng::Rng;
use crate::trace::Trace;

/// Microseconds since the world began.
pub type Micros = u64;

/// The store's clock when the world begins: 2026-01-01.
pub const EPOCH: i64 = 1_767_225_600_000_000;

/// No world needs more than this.
const MOST_EVENTS: u64 = 400_000;

/// A world. Clones are the same one.
#[derive(Clone)]
pub struct World(Arc<Mutex<State>>);

impl std::fmt::Debug for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("World")
    }
}

/// A node by its number.
pub type NodeId = usize;

/// A disk by its number.
pub type DiskId = usize;

/// One life of a node's process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Life {
    /// Whose.
    pub node: NodeId,
    /// Which.
    pub epoch: u32,
}

impl Life {
    /// A process number that no other life has.
    pub fn pid(self) -> u32 {
        1000 + self.node as u32 * 1000 + self.epoch
    }
}

/// A node.
#[derive(Debug)]
pub struct Node {
    /// Its name, under which it holds leases.
    pub name: String,
    /// How many times it was started.
    pub epoch: u32,
    /// Whether its process runs.
    pub alive: bool,
    /// It does nothing before this.
    pub paused_until: Micros,
    /// For how long it was stopped so far: what a clock that stops during suspend leaves out.
    pub suspended: Micros,
    /// Its boot clock when the world began.
    boot: Micros,
    /// How fast its clocks run, in parts per million more or less.
    drift: i64,
    /// How far its wall clock is off.
    pub wall_off: i64,
    /// Its machine: nodes on one see each other's processes.
    pub machine: u32,
    /// Its container there.
    pub container: u32,
    /// What it is doing, for the checker.
    pub label: &'static str,
    /// Since when.
    pub began: Micros,
    /// Until when a process that it started outlives it.
    pub child_until: Micros,
    /// Whose clocks it goes by: processes of one machine have the same.
    clocks: NodeId,
    /// The disk of its machine, if it has one.
    pub disk: Option<DiskId>,
    /// It does not reach the store before this.
    pub offline_until: Micros,
    restarted: Option<Waker>,
}

/// What happens at some moment.
pub enum What {
    /// A sleeper wakes.
    Wake(Option<Life>, Arc<Sleeper>),
    /// A request reaches the store.
    Arrive(Box<Request>),
    /// An answer reaches its client.
    Answer(Life, Arc<Waiting>, Reply),
    /// A process dies.
    Crash(NodeId),
    /// It is started again.
    Restart(NodeId),
    /// A node stops for so long.
    Pause(NodeId, Micros),
    /// A node's wall clock is set.
    Jump(NodeId, i64),
    /// A node does not reach the store until this.
    Offline(NodeId, Micros),
    /// The store is overloaded until this.
    Storm(Micros),
    /// Somebody damages the object at a key.
    Damage(String),
}

struct Event {
    at: Micros,
    order: u64,
    what: What,
}

impl PartialEq for Event {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.order) == (other.at, other.order)
    }
}
impl Eq for Event {}
impl PartialOrd for Event {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Event {
    // The earliest is the greatest: the heap gives that first.
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.order).cmp(&(self.at, self.order))
    }
}

/// All of it.
pub struct State {
    /// Now.
    pub now: Micros,
    order: u64,
    events: u64,
    heap: BinaryHeap<Event>,
    /// Chance, of the network and of the store.
    pub rng: Rng,
    /// What goes wrong.
    pub faults: Faults,
    /// Whether anything goes wrong at present.
    pub troubled: bool,
    /// Whether nobody begins anything new.
    pub resting: bool,
    /// The store is overloaded until this.
    pub storm_until: Micros,
    /// A promise that the store breaks.
    pub broken: Option<Broken>,
    /// Keys of which somebody has emptied the object.
    pub emptied: std::collections::BTreeSet<String>,
    /// How long a node stops at most.
    pub longest_stall: Micros,
    /// How many keys a page of a listing has at most.
    pub page: usize,
    /// The nodes.
    pub nodes: Vec<Node>,
    /// The store.
    pub objects: Objects,
    /// The disks of machines that have one. They outlive every process.
    pub disks: Vec<Disk>,
    /// What must hold.
    pub check: Checker,
    /// What happened.
    pub trace: Trace,
    /// What did not hold.
    pub violation: Option<String>,
    main: Option<Waker>,
    seed: u64,
}

impl World {
    /// The world of this seed.
    pub fn new(seed: u64, faults: Faults, broken: Option<Broken>, record: bool) -> Self {
        let mut rng = Rng::new(seed ^ 0x005e_ed0f_0a11);
        let page = match faults.short_pages > 0.0 {
            true => rng.between(2, 7) as usize,
            false => 1000,
        };
        let mut objects = Objects::default();
        objects.deletes_blindly = faults.no_conditional_delete > 0.0;
        objects.order = match (faults.unsorted > 0.0, rng.chance(0.5)) {
            (false, _) => crate::objects::Order::Bytes,
            (true, false) => crate::objects::Order::Folders,
            (true, true) => crate::objects::Order::Hash,
        };
        Self(Arc::new(Mutex::new(State {
            now: 0,
            order: 0,
            events: 0,
            heap: BinaryHeap::new(),
            rng,
            faults,
            troubled: false,
            resting: false,
            storm_until: 0,
            broken,
            emptied: std::collections::BTreeSet::new(),
            longest_stall: 60_000_000,
            page,
            nodes: Vec::new(),
            objects,
            disks: Vec::new(),
            check: Checker::default(),
            trace: Trace::new(record),
            violation: None,
            main: None,
            seed,
        })))
    }

    /// All of it, to be looked at or changed for a moment.
    pub fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a node, alive from now on.
    pub fn add_node(&self, name: &str, machine: u32, container: u32) -> NodeId {
        let mut state = self.state();
        let skewed = state.faults.skew > 0.0;
        let day = 86_400_000_000_i64;
        let wall_off = match skewed {
            true => state.rng.below(2 * day as u64) as i64 - day,
            false => 0,
        };
        let drift = if skewed { state.rng.below(1001) as i64 - 500 } else { 0 };
        let boot = state.rng.between(1_000_000, 86_400_000_000);
        let clocks = state.nodes.len();
        state.nodes.push(Node {
            name: name.to_owned(),
            epoch: 1,
            alive: true,
            paused_until: 0,
            suspended: 0,
            boot,
            drift,
            wall_off,
            machine,
            container,
            label: "",
            began: 0,
            child_until: 0,
            clocks,
            disk: None,
            offline_until: 0,
            restarted: None,
        });
        state.nodes.len() - 1
    }

    /// Adds a disk, with nothing on it.
    pub fn add_disk(&self) -> DiskId {
        let mut state = self.state();
        state.disks.push(Disk::default());
        state.disks.len() - 1
    }

    /// Puts a node on the machine that has this disk: with the clocks of whoever was the first there.
    pub fn on_disk(&self, node: NodeId, disk: DiskId) {
        let mut state = self.state();
        let first = state.nodes.iter().position(|other| other.disk == Some(disk));
        let of = &mut state.nodes[node];
        (of.disk, of.clocks) = (Some(disk), first.unwrap_or(node));
    }

    /// Randomness for one life of a node.
    pub fn chance_of(&self, life: Life) -> Rng {
        let seed = self.state().seed;
        let mut rng = Rng::new(seed.wrapping_mul(0x2545_f491_4f6c_dd1d));
        rng.fork(u64::from(life.pid()))
    }

    /// Waits for this long by the world's own clock.
    pub fn sleep(&self, span: Duration) -> Sleep {
        self.sleep_of(None, span.as_micros() as u64)
    }

    /// Waits for this long by a node's clock.
    pub fn sleep_on(&self, life: Life, span: Duration) -> Sleep {
        let micros = u64::try_from(span.as_micros()).unwrap_or(u64::MAX / 4).min(u64::MAX / 4);
        let drift = self.state().clocks_of(life.node).drift;
        // A clock that runs fast is through sooner.
        let real = (i128::from(micros) * 1_000_000 / i128::from(1_000_000 + drift)) as u64;
        self.sleep_of(Some(life), real.max(1))
    }

    fn sleep_of(&self, life: Option<Life>, micros: Micros) -> Sleep {
        let sleeper = Arc::new(Sleeper::default());
        let mut state = self.state();
        let at = state.now.saturating_add(micros);
        state.at(at, What::Wake(life, sleeper.clone()));
        Sleep(sleeper)
    }

    /// Waits until a life of a node is over and the next one begins, and says which that is.
    pub fn next_life(&self, life: Life) -> NextLife {
        NextLife(self.clone(), life)
    }

    /// Waits until something is violated.
    pub fn violated(&self) -> Violated {
        Violated(self.clone())
    }

    /// Takes events until one lets somebody go on. Called when nobody can.
    pub fn advance(&self) {
        let mut wakers = Vec::new();
        {
            let mut state = self.state();
            while wakers.is_empty() && state.violation.is_none() {
                let Some(event) = state.heap.pop() else {
                    state.violate("nothing can ever happen again: everybody waits".to_owned());
                    break;
                };
                state.now = event.at;
                state.events += 1;
                if state.events > MOST_EVENTS {
                    state.violate("it does not come to an end".to_owned());
                    break;
                }
                state.happen(event.what, &mut wakers);
            }
            // Whoever was woken may have ended meanwhile, and then the thread would sleep for ever: the
            // main task is always woken, too.
            wakers.extend(state.main.clone());
        }
        wakers.into_iter().for_each(Waker::wake);
    }
}

impl State {
    /// Has this happen at that moment.
    pub fn at(&mut self, at: Micros, what: What) {
        self.order += 1;
        let order = self.order;
        self.heap.push(Event { at, order, what });
    }

    /// Something that must hold does not. The first counts.
    pub fn violate(&mut self, what: String) {
        if self.violation.is_none() {
            self.trace.note(self.now, "!!", || what.clone());
            self.violation = Some(what);
        }
    }

    /// Whether this is the present life of its node.
    pub fn lives(&self, life: Life) -> bool {
        let node = &self.nodes[life.node];
        node.alive && node.epoch == life.epoch
    }

    /// The present life of a node.
    pub fn life(&self, node: NodeId) -> Life {
        Life { node, epoch: self.nodes[node].epoch }
    }

    /// The store's time.
    pub fn store_time(&self) -> StoreTime {
        StoreTime::from_micros(EPOCH + self.now as i64)
    }

    /// Whoever has the clocks that this node goes by.
    fn clocks_of(&self, node: NodeId) -> &Node {
        &self.nodes[self.nodes[node].clocks]
    }

    /// A node's boot clock. One that stops during suspend is a known mistake.
    pub fn boot(&self, node: NodeId) -> Micros {
        let node = self.clocks_of(node);
        let now = self.now + node.boot;
        (i128::from(now) * i128::from(1_000_000 + node.drift) / 1_000_000) as u64
    }

    /// A node's wall clock.
    pub fn wall(&self, node: NodeId) -> StoreTime {
        let node = self.clocks_of(node);
        let drifted = i128::from(self.now) * i128::from(node.drift) / 1_000_000;
        StoreTime::from_micros(EPOCH + self.now as i64 + drifted as i64 + node.wall_off)
    }

    /// Whether a process of this machine and container is there.
    pub fn process_lives(&self, machine: u32, container: u32, pid: u32) -> bool {
        self.nodes.iter().enumerate().any(|(n, node)| {
            let life = self.life(n);
            let here = node.machine == machine && node.container == container;
            // What a process started may live on for a while.
            let child = pid == CHILD + life.pid() && (node.alive || self.now < node.child_until);
            here && (child || (pid == life.pid() && node.alive))
        })
    }

    fn happen(&mut self, what: What, wakers: &mut Vec<Waker>) {
        match what {
            What::Wake(life, sleeper) => {
                // Nobody waits for it any more.
                if Arc::strong_count(&sleeper) == 1 {
                    return;
                }
                if let Some(life) = life {
                    if !self.lives(life) {
                        return;
                    }
                    let until = self.nodes[life.node].paused_until;
                    if until > self.now {
                        return self.at(until, What::Wake(Some(life), sleeper));
                    }
                }
                wakers.extend(sleeper.wake());
            }
            What::Arrive(request) => self.arrive(*request),
            What::Answer(life, waiting, reply) => {
                if !self.lives(life) || Arc::strong_count(&waiting) == 1 {
                    return;
                }
                let until = self.nodes[life.node].paused_until;
                if until > self.now {
                    return self.at(until, What::Answer(life, waiting, reply));
                }
                // Cut off while it was under way.
                let offline = self.now < self.nodes[life.node].offline_until;
                wakers.extend(waiting.answer(if offline { Reply::None } else { reply }));
            }
            What::Crash(node) => {
                if self.nodes[node].alive {
                    self.note(node, || "crashes".to_owned());
                    self.nodes[node].alive = false;
                    let linger = match self.rng.chance(0.5) {
                        true => self.rng.between(1, 8_000_000),
                        false => 0,
                    };
                    self.nodes[node].child_until = self.now + linger;
                    self.nodes[node].paused_until = 0;
                    let back = self.now + linger.max(self.rng.between(1000, 60_000_000));
                    self.at(back, What::Restart(node));
                }
            }
            What::Restart(node) => {
                self.note(node, || "starts again".to_owned());
                let of = &mut self.nodes[node];
                of.epoch += 1;
                of.alive = true;
                of.label = "";
                wakers.extend(of.restarted.take());
            }
            What::Pause(node, span) => {
                if self.nodes[node].alive {
                    self.note(node, || format!("stops for {} s", span / 1_000_000));
                    let of = &mut self.nodes[node];
                    let before = of.paused_until.max(self.now);
                    of.paused_until = before.max(self.now + span);
                    of.suspended += of.paused_until - before;
                }
            }
            What::Jump(node, by) => {
                self.note(node, || format!("its wall clock jumps by {} s", by / 1_000_000));
                let clocks = self.nodes[node].clocks;
                self.nodes[clocks].wall_off += by;
            }
            What::Offline(node, until) => {
                self.note(node, || format!("is cut off until {} s", until / 1_000_000));
                let of = &mut self.nodes[node];
                of.offline_until = until.max(of.offline_until);
            }
            What::Storm(until) => self.storm_until = until,
            What::Damage(key) => self.damage(&key),
        }
    }

    /// Writes down what a node does.
    pub fn note(&mut self, node: NodeId, text: impl FnOnce() -> String) {
        let name = self.nodes[node].name.clone();
        self.trace.note(self.now, &name, text);
    }
}

/// Process numbers from here on are of children.
pub const CHILD: u32 = 1_000_000;

/// Somebody who sleeps.
#[derive(Debug, Default)]
pub struct Sleeper(Mutex<(bool, Option<Waker>)>);

impl Sleeper {
    fn wake(&self) -> Option<Waker> {
        let mut inner = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        inner.0 = true;
        inner.1.take()
    }
}

/// Completes when its time has come.
pub struct Sleep(Arc<Sleeper>);

impl Future for Sleep {
    type Output = ();
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let mut inner = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        match inner.0 {
            true => Poll::Ready(()),
            false => {
                inner.1 = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

/// Somebody who waits for an answer.
#[derive(Debug, Default)]
pub struct Waiting(Mutex<(Option<Reply>, Option<Waker>)>);

impl Waiting {
    fn answer(&self, reply: Reply) -> Option<Waker> {
        let mut inner = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // The first answer counts.
        if inner.0.is_none() {
            inner.0 = Some(reply);
        }
        inner.1.take()
    }
}

/// Completes with the answer.
pub struct Answer(pub Arc<Waiting>);

impl Future for Answer {
    type Output = Reply;
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Reply> {
        let mut inner = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        match inner.0.take() {
            Some(reply) => Poll::Ready(reply),
            None => {
                inner.1 = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

/// Completes with a node's next life.
pub struct NextLife(World, Life);

impl Future for NextLife {
    type Output = Life;
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Life> {
        let Self(world, life) = &*self;
        let mut state = world.state();
        let node = &mut state.nodes[life.node];
        if node.alive && node.epoch > life.epoch {
            return Poll::Ready(Life { node: life.node, epoch: node.epoch });
        }
        node.restarted = Some(context.waker().clone());
        Poll::Pending
    }
}

/// Completes with what was violated.
pub struct Violated(World);

impl Future for Violated {
    type Output = String;
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<String> {
        let mut state = self.0.state();
        match state.violation.clone() {
            Some(violation) => Poll::Ready(violation),
            None => {
                state.main = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}
