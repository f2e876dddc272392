//! `leasehold supervise`: one process per node, which runs what the fleet's plan says.
//!
//! ```text
//!   fleet.toml ──GET──▶ supervisor ──PUT──▶ nodes/{node}.json
//!                        │      ▲
//!        limits, the end │      │ reports, last words
//!                        ▼      │
//!                leasehold queue work …, leasehold index compile …
//! ```
//!
//! This is the driver; what runs, what is started again and how nodes are judged is decided in
//! [`leasehold::protocol::supervise`]. One task owns all state and is never kept waiting: whatever
//! asks the store does so in a task of its own, and comes back as an [`Event`].
//!
//! The processes are the ordinary commands. Each has a pipe from the supervisor for its standard
//! input, which closes when the supervisor ends, however that is; then it drains by itself. So a
//! supervisor that is killed leaves nobody behind for ever, and its successor needs no list of pids.

mod children;
mod notify;
mod orphans;
mod plan;
mod process;
mod record;
mod state;
mod sync;
mod unit;

use std::collections::VecDeque;
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::Duration;

use leasehold::env::BootTime;
use leasehold::fleet::{self, PlanText, Seat, Spelling};
use leasehold::lease::HeldBy;
use leasehold::protocol::format::fleet::NodePlan;
use leasehold::protocol::format::node::NodeError;
use leasehold::protocol::supervise;
use leasehold::queue::Queue;
use leasehold::store::Kind;
use leasehold::sync::Replica;
use leasehold::{Error, ErrorKind, Store, StoreSettings, StoreTime, Version};
use rustix::process::Signal;
use tokio::sync::mpsc;

pub use unit::print_unit;

use self::orphans::Orphans;
use self::process::{Slot, State as Running};
use self::state::State;
use self::sync::{Replicated, Syncing};
use crate::args::Args;
use crate::args::fleet::Supervise;
use crate::child::Signals;
use crate::config;
use crate::exit::{Ending, Exit};
use crate::render::{self, WARN, paint};
use crate::supervised::{Limits, Report};

/// Something that the supervisor has to know.
pub enum Event {
    /// A process told what it has done.
    Reported(u64, Box<Report>),
    /// A process said something, for people.
    Said(u64, String),
    /// A process ended.
    Ended(u64, Option<ExitStatus>),
    /// The plan was looked for: this, or still the same.
    Looked(leasehold::Result<Option<PlanText>>),
    /// The name was asked for.
    Seated(leasehold::Result<Result<Seat, HeldBy>>),
    /// The queues that this node's replica has.
    Replicated(leasehold::Result<Vec<Replicated>>),
    /// The record was written, at this time of the store's.
    Told(leasehold::Result<()>, Option<StoreTime>),
}

/// How often what dead workers left is cleaned up.
const REAP: Duration = Duration::from_secs(3600);
/// How much longer than its drain a process may take to end.
const SLACK: Duration = Duration::from_secs(15);
/// Before the end of a drain: how long to wait for tasks that were told to stop.
const LAST: Duration = Duration::from_secs(7);
/// How long the store may take to answer before work begins without it: less than systemd waits for us to
/// be ready.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long the same trouble is not told again.
const AGAIN: Duration = Duration::from_secs(3600);
/// How many different ones are remembered for that.
const MOST_TROUBLES: usize = 16;
/// How long the last report may take.
const GOODBYE: Duration = Duration::from_secs(5);

/// Runs until a signal, or until somebody else has this node's name.
pub async fn run(args: &Args, store: &Store, supervise: &Supervise) -> anyhow::Result<Ending> {
    let mut signals = Signals::catch()?;
    let node = config::node_name(args, supervise.node.as_deref())?;
    let folder = config::state_folder(args, supervise.state.as_deref())?;
    let state = State::open(folder, &node, &store.url())?;
    let mut words = store_words(args)?;
    words.push(format!("--supervised={node}"));
    let replica = match config::replica(args)? {
        Some(connect) => Some(Replica::open(&connect.open()?, store, &node).await?),
        None => None,
    };
    let own_connections = config::connect(args)?.settings;
    let usual = Limits {
        connections: own_connections.connections,
        requests_per_minute: own_connections.requests_per_minute,
    };
    let (mut supervisor, heard) = Supervisor::new(store, node, state, replica);
    supervisor.words = words;
    supervisor.usual = usual;
    supervisor.drain = supervise.drain;
    supervisor.quiet = args.quiet;
    if let Some(exit) = supervisor.take_place(&mut signals).await? {
        return Ok(exit.into());
    }
    supervisor.work(&mut signals, heard).await.map(Ending::from)
}

/// The options of this command that say which store, for another process of the same kind.
pub fn store_words(args: &Args) -> anyhow::Result<Vec<String>> {
    let given = &args.store;
    let mut words = Vec::new();
    let mut option = |name: &str, value: Option<String>| {
        words.extend(value.map(|value| format!("--{name}={value}")));
    };
    option("store", given.store.clone());
    let replica = given.replica.as_ref().map(std::path::absolute).transpose()?;
    option("replica", replica.map(|path| path.display().to_string()));
    let config = given.config.as_ref().map(std::path::absolute).transpose()?;
    option("config", config.map(|path| path.display().to_string()));
    option("endpoint", given.endpoint.clone());
    option("region", given.region.clone());
    option("path-style", given.path_style.map(|yes| yes.to_string()));
    option("profile", given.profile.clone());
    option("access-key", given.access_key.clone());
    if given.anonymous {
        words.push("--anonymous".to_owned());
    }
    if given.force_network_fs {
        words.push("--force-network-fs".to_owned());
    }
    if args.verbose > 0 {
        words.push(format!("-{}", "v".repeat(args.verbose.into())));
    }
    Ok(words)
}

struct Supervisor {
    store: Store,
    node: String,
    state: State,
    /// What every process gets for its first words.
    words: Vec<String>,
    /// What a process may take where the plan does not say.
    usual: Limits,
    drain: Duration,
    quiet: bool,
    events: mpsc::Sender<Event>,
    slots: Vec<Slot>,
    ids: u64,
    /// The plan that was last seen in the store, good or not.
    known: Option<(Spelling, Version)>,
    /// The one that is carried out.
    carried_out: Option<Version>,
    refused: Option<String>,
    every: Duration,
    queues: Vec<String>,
    /// Of all processes together: connections, requests per minute.
    limits: (Option<u32>, Option<u32>),
    seat: Option<Arc<Seat>>,
    /// What is under way.
    looking: bool,
    telling: bool,
    seating: bool,
    started: BootTime,
    started_at: Option<StoreTime>,
    /// The store's clock, at a moment of ours.
    clock: Option<(StoreTime, BootTime)>,
    /// What was done by when: for rates.
    samples: VecDeque<(BootTime, u64, u64)>,
    /// What processes did that are no more.
    past: Report,
    errors: VecDeque<NodeError>,
    /// What was told lately, and when.
    troubles: VecDeque<(String, BootTime)>,
    next_look: BootTime,
    next_report: BootTime,
    next_reap: BootTime,
    ending: Option<End>,
    /// Somebody else has our name.
    lost: bool,
    /// Where relaxed queues are worked on.
    replica: Option<Replica>,
    /// Whether the plan has compilers, and the interval that it gives.
    compiles: bool,
    given: Option<Duration>,
    replicated: Vec<Replicated>,
    comparing: bool,
    syncing: Option<Syncing>,
    orphans: Orphans,
}

/// We have been told to end.
struct End {
    /// How often.
    told: u32,
    /// When tasks that still run are stopped.
    nudge: Option<BootTime>,
    /// When everything is killed.
    kill: BootTime,
}

impl Supervisor {
    /// One that has neither a plan nor its name yet, and where it hears of what happens.
    fn new(
        store: &Store,
        node: String,
        state: State,
        replica: Option<Replica>,
    ) -> (Self, mpsc::Receiver<Event>) {
        let (events, heard) = mpsc::channel(64);
        let now = store.env().clock().boot();
        let usual = StoreSettings::default();
        let supervisor = Self {
            store: store.clone(),
            node,
            state,
            words: Vec::new(),
            usual: Limits {
                connections: usual.connections,
                requests_per_minute: usual.requests_per_minute,
            },
            drain: supervise::USUAL_DRAIN,
            quiet: false,
            events,
            slots: Vec::new(),
            ids: 0,
            known: None,
            carried_out: None,
            refused: None,
            every: supervise::EVERY,
            queues: Vec::new(),
            limits: (None, None),
            seat: None,
            looking: false,
            telling: false,
            seating: false,
            started: now,
            started_at: None,
            clock: None,
            samples: VecDeque::new(),
            past: Report::default(),
            errors: VecDeque::new(),
            troubles: VecDeque::new(),
            next_look: now,
            next_report: now,
            next_reap: now,
            ending: None,
            lost: false,
            replica,
            compiles: false,
            given: None,
            replicated: Vec::new(),
            comparing: false,
            syncing: None,
            orphans: Orphans::new(now),
        };
        (supervisor, heard)
    }

    fn now(&self) -> BootTime {
        self.store.env().clock().boot()
    }

    /// Takes the name and the first plan, before anything is started: a second supervisor of this
    /// name must not start anything. A store that does not answer keeps nobody from working.
    async fn take_place(&mut self, signals: &mut Signals) -> anyhow::Result<Option<Exit>> {
        let cached = self.state.plan();
        if let Some(plan) = &cached
            && let Ok(parsed) = super::fleet::parse(&plan.text, plan.spelling)
        {
            self.every = interval(parsed.plan_of(&self.node));
        }
        let away = || {
            let message = "the store does not answer: beginning without it";
            Error::new(ErrorKind::Unavailable, message)
        };
        let clock = self.store.env().clone();
        let seated = tokio::select! {
            seated = Seat::take(&self.store, &self.node, self.every) => seated,
            // What comes of it all the same is found by the next attempt.
            () = clock.clock().sleep(PATIENCE) => Err(away()),
            () = told_to_end(signals) => return Ok(Some(Exit::Done)),
        };
        let mut answers = true;
        match seated {
            Ok(Ok(seat)) => self.seat = Some(Arc::new(seat)),
            Ok(Err(held)) => {
                let message =
                    format!("node {} is supervised already, by {}", self.node, held.holder);
                return Err(Error::new(ErrorKind::Held, message).into());
            }
            // Nor does one that refuses a node which it once knew: a clock that is not set yet after a boot, or a
            // token that has expired, is mended while what can be done without it is done.
            Err(error)
                if error.kind() == ErrorKind::Unavailable
                    || (error.kind() == ErrorKind::Denied && cached.is_some()) =>
            {
                answers = false;
                self.trouble(error.to_string());
            }
            Err(error) => return Err(error.into()),
        }
        // One that did not answer just now is asked again once the last plan is carried out.
        let looked = match answers {
            true => tokio::select! {
                looked = fleet::look(&self.store, None) => looked,
                () = clock.clock().sleep(PATIENCE) => Err(away()),
                () = told_to_end(signals) => return Ok(Some(Exit::Done)),
            },
            false => Ok(None),
        };
        let found = matches!(&looked, Ok(Some(_)));
        self.plan_came(looked);
        // Whatever is wrong with the one in the store: the last good one is carried out.
        if self.carried_out.is_none()
            && let Some(plan) = cached
        {
            let refused = self.refused.take();
            let known = self.known.take();
            self.plan_came(Ok(Some(plan)));
            if found {
                self.known = known;
            }
            self.refused = refused;
        }
        notify::tell(&format!("READY=1\nSTATUS=node {}", self.node));
        self.next_look = if answers { self.after_pause() } else { self.now() };
        Ok(None)
    }

    async fn work(
        &mut self,
        signals: &mut Signals,
        mut heard: mpsc::Receiver<Event>,
    ) -> anyhow::Result<Exit> {
        // In a directory a new plan is told at once.
        let mut watches = match self.store.kind() {
            Kind::Directory => vec![
                self.store.watch(Spelling::Toml.key()?.as_str())?,
                self.store.watch(Spelling::Json.key()?.as_str())?,
            ],
            _ => Vec::new(),
        };
        let now = self.now();
        self.next_report = now;
        let part = self.store.env().random() % 1000;
        self.next_reap = now.plus(REAP.mul_f64(part as f64 / 1000.0));
        loop {
            self.act();
            if self.ending.is_some() && self.slots.is_empty() {
                break;
            }
            let now = self.now();
            self.orphans.bury(now, self.slots.iter().filter_map(Slot::pid));
            let pause = self.next_wake();
            let lost = self.seat.as_ref().map(|seat| seat.lost());
            tokio::select! {
                event = heard.recv() => if let Some(event) = event { self.came(event) },
                () = self.store.env().clock().sleep(pause) => {}
                () = any_change(&mut watches) => self.next_look = self.now(),
                () = crate::supervised::cut(lost.as_ref()) => {
                    self.trouble("the node's record could not be renewed in time".to_owned());
                    self.seat = None;
                    self.next_report = self.now();
                }
                signal = signals.next() => self.signalled(signal),
            }
        }
        tokio::select! {
            () = async {
                self.end_sync().await;
                self.say_goodbye().await;
            } => {}
            // What the bucket was not told stays in the outbox.
            () = told_to_end(signals) => tracing::warn!("told again: not waiting for the store"),
        }
        Ok(if self.lost { Exit::Lost } else { Exit::Done })
    }

    fn after_pause(&self) -> BootTime {
        self.now().plus(supervise::pause(self.every, self.store.env().random()))
    }

    /// How long nothing is to be done, if nothing happens.
    fn next_wake(&self) -> Duration {
        // What is under way says when it is done, and is not begun again before that. Who waited for it here
        // would wait in vain, a thousand times a second.
        let mut next = Vec::new();
        if self.ending.is_none() {
            next.push(self.next_reap);
            if !self.looking {
                next.push(self.next_look);
            }
        }
        if !self.telling && !self.seating {
            next.push(self.next_report);
        }
        for slot in &self.slots {
            match &slot.state {
                Running::Waiting(until) | Running::Draining(_, until) => next.push(*until),
                Running::Running(_) => {}
            }
        }
        next.extend(self.orphans.next());
        if let Some(end) = &self.ending {
            next.extend(end.nudge);
            next.push(end.kill);
        }
        let now = self.now();
        let pause = next.into_iter().map(|at| at.since(now)).min().unwrap_or_default();
        // A timer stops while the machine sleeps, and the boot clock does not.
        pause.clamp(Duration::from_millis(1), Duration::from_secs(30))
    }

    /// Does what is due.
    fn act(&mut self) {
        let now = self.now();
        for n in 0..self.slots.len() {
            match &self.slots[n].state {
                Running::Waiting(until) if *until <= now => self.start(n),
                Running::Draining(child, until) if *until <= now => {
                    child.signal(Signal::KILL);
                    let name = self.slots[n].name();
                    self.trouble(format!("{name} did not end in time and was killed"));
                    if let Running::Draining(_, until) = &mut self.slots[n].state {
                        *until = now.plus(SLACK);
                    }
                }
                _ => {}
            }
        }
        if let Some(end) = &mut self.ending {
            let signal = match () {
                () if end.kill <= now => {
                    end.kill = now.plus(Duration::from_secs(1));
                    Some(Signal::KILL)
                }
                () if end.nudge.is_some_and(|at| at <= now) => {
                    end.nudge = None;
                    Some(Signal::TERM)
                }
                () => None,
            };
            if let Some(signal) = signal {
                self.slots
                    .iter_mut()
                    .filter_map(Slot::child)
                    .for_each(|child| child.signal(signal));
            }
            // Others see that it drains.
            if self.next_report <= now {
                self.report();
            }
            return;
        }
        if self.next_look <= now && !self.looking {
            self.look();
            self.compare_replica(false);
        }
        if self.next_report <= now {
            self.report();
        }
        if self.next_reap <= now {
            self.next_reap = now.plus(supervise::pause(REAP, self.store.env().random()));
            // Of relaxed queues a node with nothing else to do has less to ask.
            if self.is_relaxed() {
                self.next_reap = now.plus(supervise::pause(REAP * 24, self.store.env().random()));
            }
            tokio::spawn(reap(self.store.clone(), self.queues.clone()));
            self.compare_replica(true);
        }
    }

    fn came(&mut self, event: Event) {
        match event {
            Event::Reported(id, report) => {
                if let Some(slot) = self.slots.iter_mut().find(|slot| slot.id == id) {
                    let error = report.error.clone().filter(|_| report.error != slot.report.error);
                    slot.report = *report;
                    if let Some(error) = error {
                        self.note_error(error);
                    }
                }
            }
            Event::Said(id, line) => {
                let now = since_boot(self.now());
                if let Some(slot) = self.slots.iter_mut().find(|slot| slot.id == id) {
                    let passed_on = slot.flow.line(now);
                    if let Some(dropped) = passed_on {
                        slot.tell_dropped(dropped);
                        let pid = slot.pid().unwrap_or_default();
                        render::say(format_args!("{} ({pid}): {line}", slot.name()));
                    }
                    slot.last_words = (line, passed_on.is_some());
                }
            }
            Event::Ended(id, status) => self.ended(id, status),
            Event::Looked(looked) => {
                self.looking = false;
                self.plan_came(looked);
            }
            Event::Seated(seated) => {
                self.seating = false;
                self.seated(seated);
            }
            Event::Replicated(replicated) => {
                self.comparing = false;
                match replicated {
                    Ok(replicated) => self.replicated(replicated),
                    Err(error) => self.trouble(format!("the replica cannot be read: {error}")),
                }
            }
            Event::Told(told, now) => {
                self.telling = false;
                if let Some(now) = now {
                    self.clock = Some((now, self.now()));
                    let up = self.now().since(self.started);
                    self.started_at.get_or_insert(now.minus(up));
                }
                // Lost is told by the seat itself.
                if let Err(error) = told
                    && error.kind() != ErrorKind::Lost
                {
                    self.trouble(format!("cannot report: {error}"));
                }
            }
        }
    }

    fn signalled(&mut self, signal: Signal) {
        match signal {
            Signal::HUP => {
                self.next_look = self.now();
                self.next_report = self.now();
            }
            Signal::TERM | Signal::INT | Signal::QUIT => self.end(),
            _ => {}
        }
    }

    fn seated(&mut self, seated: leasehold::Result<Result<Seat, HeldBy>>) {
        match seated {
            Ok(Ok(seat)) => {
                self.seat = Some(Arc::new(seat));
                self.next_report = self.now();
            }
            // It landed, and its answer did not: by the next report it is given back, or too old.
            Ok(Err(held)) if held.is_us() => {
                tracing::info!("an earlier attempt to take the name stands in the way");
            }
            Ok(Err(held)) => {
                self.trouble(format!(
                    "node {} is supervised by {} by now: ending here",
                    self.node, held.holder
                ));
                self.lost = true;
                if self.ending.is_none() {
                    self.end();
                }
            }
            Err(error) => self.trouble(format!("cannot report: {error}")),
        }
    }

    /// Says what went wrong, and keeps it for the record.
    fn trouble(&mut self, text: String) {
        self.trouble_told(text.clone(), text);
    }

    /// The same with other words for who reads along than for the record.
    fn trouble_told(&mut self, told: String, text: String) {
        let now = self.now();
        // A store that is away for days is told of once an hour.
        self.troubles.retain(|(_, at)| now.since(*at) < AGAIN);
        if !self.troubles.iter().any(|(said, _)| *said == told) {
            render::say(format_args!("{} {told}", paint(WARN, "!")));
            self.troubles.push_back((told, now));
            if self.troubles.len() > MOST_TROUBLES {
                self.troubles.pop_front();
            }
        }
        self.note_error(text);
    }
}

/// Completes when somebody wants this process to end. To look at the plan again is nothing to wait for.
async fn told_to_end(signals: &mut Signals) {
    while !matches!(signals.next().await, Signal::TERM | Signal::INT | Signal::QUIT) {}
}

/// How often a node with this plan reports.
fn interval(plan: Option<&NodePlan>) -> Duration {
    plan.and_then(|plan| plan.every).unwrap_or(supervise::EVERY)
}

fn since_boot(now: BootTime) -> Duration {
    now.since(BootTime::from_boot(Duration::ZERO))
}

async fn any_change(watches: &mut [leasehold::store::Watch]) {
    match watches {
        [first, second] => tokio::select! {
            () = first.changed() => {}
            () = second.changed() => {}
        },
        _ => std::future::pending().await,
    }
}

/// Cleans up what dead workers left. What fails now is done another time.
async fn reap(store: Store, queues: Vec<String>) {
    for name in queues {
        let reaped = match Queue::open(&store, &name).await {
            Ok(Some(queue)) => queue.reap().await,
            Ok(None) => continue,
            Err(error) => Err(error),
        };
        match reaped {
            Ok(swept) => tracing::info!(queue = name, ?swept, "cleaned up"),
            Err(error) => tracing::warn!(queue = name, %error, "cleaning up failed"),
        }
    }
}

#[cfg(test)]
mod tests;
