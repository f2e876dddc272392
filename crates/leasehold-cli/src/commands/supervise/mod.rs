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

mod notify;
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
use leasehold::protocol::supervise::{self, compare, processes, share};
use leasehold::queue::Queue;
use leasehold::store::Kind;
use leasehold::sync::Replica;
use leasehold::{Error, ErrorKind, Store, StoreTime, Version};
use rustix::process::Signal;
use tokio::sync::mpsc;

pub use unit::print_unit;

use self::process::{Slot, State as Running, ending, start, sum};
use self::state::State;
use self::sync::{Replicated, Syncing};
use crate::args::Args;
use crate::args::fleet::Supervise;
use crate::child::Signals;
use crate::config;
use crate::exit::{Ending, Exit};
use crate::render::{self, BAD, WARN, paint};
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
    let (events, heard) = mpsc::channel(64);
    let now = store.env().clock().boot();
    let own_connections = config::connect(args)?.settings;
    let mut supervisor = Supervisor {
        store: store.clone(),
        node,
        state,
        words,
        usual: Limits {
            connections: own_connections.connections,
            requests_per_minute: own_connections.requests_per_minute,
        },
        drain: supervise.drain,
        quiet: args.quiet,
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
    };
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
        let seated = tokio::select! {
            seated = Seat::take(&self.store, &self.node, self.every) => seated,
            _ = signals.stop() => return Ok(Some(Exit::Done)),
        };
        match seated {
            Ok(Ok(seat)) => self.seat = Some(Arc::new(seat)),
            Ok(Err(held)) => {
                let message =
                    format!("node {} is supervised already, by {}", self.node, held.holder);
                return Err(Error::new(ErrorKind::Held, message).into());
            }
            Err(error) if error.kind() == ErrorKind::Unavailable => self.trouble(error.to_string()),
            Err(error) => return Err(error.into()),
        }
        let looked = tokio::select! {
            looked = fleet::look(&self.store, None) => looked,
            _ = signals.stop() => return Ok(Some(Exit::Done)),
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
        (self.next_look, self.next_report) = (self.after_pause(), now);
        let part = self.store.env().random() % 1000;
        self.next_reap = now.plus(REAP.mul_f64(part as f64 / 1000.0));
        loop {
            self.act();
            if self.ending.is_some() && self.slots.is_empty() {
                break;
            }
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
        self.end_sync().await;
        self.say_goodbye().await;
        Ok(if self.lost { Exit::Lost } else { Exit::Done })
    }

    fn after_pause(&self) -> BootTime {
        self.now().plus(supervise::pause(self.every, self.store.env().random()))
    }

    /// How long nothing is to be done, if nothing happens.
    fn next_wake(&self) -> Duration {
        let mut next = vec![self.next_look, self.next_report, self.next_reap];
        for slot in &self.slots {
            match &slot.state {
                Running::Waiting(until) | Running::Draining(_, until) => next.push(*until),
                Running::Running(_) => {}
            }
        }
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
                if let Some(slot) = self.slots.iter_mut().find(|slot| slot.id == id) {
                    let pid = slot.pid().unwrap_or_default();
                    render::say(format_args!("{} ({pid}): {line}", slot.name()));
                    slot.last_words = line;
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

    /// Tells all processes to end. Once more: stop what they are at. And again: kill them.
    fn end(&mut self) {
        let now = self.now();
        let last = LAST.min(self.drain / 3);
        let told = self.ending.as_ref().map_or(0, |end| end.told) + 1;
        self.ending = Some(match told {
            1 => End { told, nudge: Some(now.plus(self.drain - last)), kill: now.plus(self.drain) },
            2 => End { told, nudge: Some(now), kill: now.plus(last) },
            _ => End { told, nudge: None, kill: now },
        });
        if told > 1 {
            return;
        }
        notify::tell("STOPPING=1");
        if !self.quiet {
            render::say(format_args!(
                "ending: {} processes have {}",
                self.slots.len(),
                leasehold::settings::format_duration(self.drain)
            ));
        }
        for n in (0..self.slots.len()).rev() {
            self.stop(n);
        }
    }

    /// Tells a process to end. Those that do not run are forgotten.
    fn stop(&mut self, n: usize) {
        let slot = &mut self.slots[n];
        let until = self.store.env().clock().boot().plus(slot.process.drain + SLACK);
        match std::mem::replace(&mut slot.state, Running::Waiting(until)) {
            Running::Running(child) => {
                child.signal(Signal::TERM);
                slot.state = Running::Draining(child, until);
            }
            draining @ Running::Draining(..) => slot.state = draining,
            Running::Waiting(_) => self.remove(n),
        }
    }

    fn remove(&mut self, n: usize) {
        let slot = self.slots.remove(n);
        let total = slot.total();
        self.past = sum(&self.past, &total);
    }

    fn start(&mut self, n: usize) {
        let now = self.now();
        let limits = self.allowed();
        let mut words = self.words.clone();
        words.push(format!("--connections={}", limits.connections));
        words.extend(limits.requests_per_minute.map(|n| format!("--requests-per-minute={n}")));
        let slot = &mut self.slots[n];
        slot.before = slot.total();
        slot.report = Report::default();
        slot.last_words.clear();
        match start(slot, &words, now, self.events.clone()) {
            Ok(child) => slot.state = Running::Running(child),
            Err(error) => {
                let random = self.store.env().random();
                let pause = slot.restarts.ended(Duration::ZERO, since_boot(now), random);
                slot.state = Running::Waiting(now.plus(pause));
                let text = format!("{}: {error:#}", slot.name());
                self.trouble(text);
            }
        }
    }

    fn ended(&mut self, id: u64, status: Option<ExitStatus>) {
        let Some(n) = self.slots.iter().position(|slot| slot.id == id) else { return };
        let now = self.now();
        let slot = &mut self.slots[n];
        // It holds nothing any more.
        slot.report.holds = 0;
        slot.report.held.clear();
        let Running::Running(child) = &slot.state else {
            self.remove(n);
            self.share_out();
            return;
        };
        let (pid, ran) = (child.pid, now.since(child.since));
        let looped = slot.restarts.is_loop();
        let pause = slot.restarts.ended(ran, since_boot(now), self.store.env().random());
        slot.state = Running::Waiting(now.plus(pause));
        let mut text = format!("{} ({pid}) {}", slot.name(), ending(status));
        if !slot.last_words.is_empty() {
            text.push_str(&format!(": {}", slot.last_words));
        }
        let loops = (slot.restarts.is_loop() && !looped)
            .then(|| format!("{} is in a crash loop", slot.name()));
        self.trouble(text);
        if let Some(loops) = loops {
            render::say(paint(BAD, loops));
            self.next_report = now;
        }
    }

    /// Looks for another plan, in a task of its own.
    fn look(&mut self) {
        self.looking = true;
        self.next_look = self.after_pause();
        let (store, known, events) = (self.store.clone(), self.known.clone(), self.events.clone());
        tokio::spawn(async move {
            let looked = fleet::look(&store, known.as_ref()).await;
            let _ = events.send(Event::Looked(looked)).await;
        });
    }

    /// Carries out a plan, or says why not: then what runs goes on.
    fn plan_came(&mut self, looked: leasehold::Result<Option<PlanText>>) {
        let plan = match looked {
            Ok(Some(plan)) => plan,
            Ok(None) => return,
            Err(error) if error.kind() == ErrorKind::Unavailable => {
                return self.trouble(format!("cannot read the plan: {error}"));
            }
            // There is none. That is not a plan to run nothing: somebody may be about to write it.
            Err(error) => return self.refuse(error.to_string()),
        };
        self.known = Some((plan.spelling, plan.version.clone()));
        let parsed = match super::fleet::parse(&plan.text, plan.spelling) {
            Ok(parsed) => parsed,
            Err(error) => return self.refuse(error.to_string()),
        };
        if self.refused.take().is_some() {
            self.next_report = self.now();
        }
        if self.carried_out.as_ref() == Some(&plan.version) {
            return;
        }
        let ours = parsed.plan_of(&self.node);
        if ours.is_none() {
            self.trouble(format!("no entry of the plan matches {}", self.node));
        }
        self.carry_out(ours);
        self.carried_out = Some(plan.version.clone());
        self.next_report = self.now();
        if let Err(error) = self.state.keep(&plan) {
            self.trouble(format!("the plan could not be kept for the next start: {error:#}"));
        }
    }

    fn refuse(&mut self, reason: String) {
        if self.refused.as_ref() == Some(&reason) {
            return;
        }
        render::say(format_args!("{} {reason}", paint(WARN, "refused:")));
        if self.carried_out.is_some() {
            render::say("what runs goes on as before");
        }
        self.refused = Some(reason);
        self.next_report = self.now();
    }

    fn carry_out(&mut self, plan: Option<&NodePlan>) {
        if self.ending.is_some() {
            return;
        }
        let wanted = plan.map(processes).unwrap_or_default();
        let places: Vec<usize> =
            (0..self.slots.len()).filter(|n| !self.slots[*n].is_draining()).collect();
        let running: Vec<_> = places.iter().map(|n| &self.slots[*n].process).collect();
        let changes = compare(&running, &wanted);
        if !self.quiet {
            let kept = running.len() - changes.stop.len();
            render::say(format_args!(
                "node {}: {kept} processes go on, {} end, {} start",
                self.node,
                changes.stop.len(),
                changes.start.len()
            ));
        }
        // From the last to the first, so that places stay what they are.
        for n in changes.stop.iter().rev() {
            self.stop(places[*n]);
        }
        let now = self.now();
        for process in changes.start {
            self.ids += 1;
            self.slots.push(Slot::new(self.ids, process, now));
        }
        self.limits =
            plan.map_or((None, None), |plan| (plan.connections, plan.requests_per_minute));
        self.given = plan.and_then(|plan| plan.every);
        self.compiles = plan.is_some_and(|plan| !plan.compiler.is_empty());
        let mut queues: Vec<String> = plan
            .into_iter()
            .flat_map(|plan| &plan.worker)
            .flat_map(|w| w.queue.all())
            .cloned()
            .collect();
        queues.sort();
        queues.dedup();
        self.queues = queues;
        self.every = self.interval();
        self.compare_replica(true);
        self.share_out();
        (self.next_look, self.next_report) = (self.after_pause(), now);
    }

    /// What each process may take.
    fn allowed(&self) -> Limits {
        let count = u32::try_from(self.slots.len()).unwrap_or(u32::MAX);
        let (connections, requests) = self.limits;
        Limits {
            connections: connections
                .map_or(self.usual.connections, |limit| share(limit, count).1 as usize),
            requests_per_minute: match requests {
                Some(limit) => Some(share(limit, count).1),
                None => self.usual.requests_per_minute,
            },
        }
    }

    /// Tells everybody what it may take, ourselves included.
    fn share_out(&mut self) {
        let count = u32::try_from(self.slots.len()).unwrap_or(u32::MAX);
        let (connections, requests) = self.limits;
        self.store.limit(
            connections.map_or(self.usual.connections, |limit| share(limit, count).0 as usize),
            requests.map(|limit| share(limit, count).0).or(self.usual.requests_per_minute),
        );
        let limits = self.allowed();
        self.slots.iter_mut().filter_map(Slot::child).for_each(|child| child.limit(&limits));
    }

    fn seated(&mut self, seated: leasehold::Result<Result<Seat, HeldBy>>) {
        match seated {
            Ok(Ok(seat)) => {
                self.seat = Some(Arc::new(seat));
                self.next_report = self.now();
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
        render::say(format_args!("{} {text}", paint(WARN, "!")));
        self.note_error(text);
    }
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
