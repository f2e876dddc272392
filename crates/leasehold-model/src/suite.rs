//! Which models are checked, how far, and what came of it.

use std::fmt;

use stateright::{Checker as _, Expectation, Model as _};

use crate::engine::{Action, Bounds, Checked, Rules};
use crate::index::IndexRules;
use crate::lease::LeaseRules;
use crate::queue::QueueRules;

/// How far to go.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Limits {
    /// Minutes and gigabytes instead of seconds.
    pub deep: bool,
    /// So many faults, if not as many as usual.
    pub faults: Option<u8>,
    /// So many ticks.
    pub ticks: Option<u8>,
    /// Give up after this.
    pub seconds: Option<u64>,
    /// Stop once this property is broken.
    pub until: Option<&'static str>,
}

/// What came of a model.
#[derive(Debug)]
pub struct Report {
    /// Which.
    pub name: &'static str,
    /// Different states.
    pub states: usize,
    /// The longest way to one of them.
    pub depth: usize,
    /// What must hold and does not, with the way there.
    pub broken: Vec<(&'static str, String)>,
    /// What should happen somewhere and does not.
    pub unseen: Vec<&'static str>,
}

impl Report {
    /// Whether everything is as it should be.
    pub fn is_fine(&self) -> bool {
        self.broken.is_empty() && self.unseen.is_empty()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} states, depth {}", self.name, self.states, self.depth)?;
        for (property, way) in &self.broken {
            write!(f, "\n  BROKEN: {property}\n{way}")?;
        }
        for property in &self.unseen {
            write!(f, "\n  NEVER SEEN: {property}")?;
        }
        Ok(())
    }
}

/// Checks one model.
fn check<R: Rules>(name: &'static str, rules: R, limits: Limits) -> Report {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(4);
    let builder = Checked(rules).checker().threads(threads);
    let builder = match limits.seconds {
        Some(seconds) => builder.timeout(std::time::Duration::from_secs(seconds)),
        None => builder,
    };
    let finish = match limits.until {
        Some(property) => stateright::HasDiscoveries::AllOf([property].into()),
        None => stateright::HasDiscoveries::All,
    };
    let checker = builder.finish_when(finish).spawn_bfs().join();
    let mut discoveries = checker.discoveries();
    let (mut broken, mut unseen) = (Vec::new(), Vec::new());
    for property in checker.model().properties() {
        match (property.expectation, discoveries.remove(property.name)) {
            (Expectation::Sometimes, None) => unseen.push(property.name),
            (Expectation::Sometimes, Some(_)) | (_, None) => {}
            (_, Some(path)) => {
                let way: Vec<String> = path
                    .into_actions()
                    .iter()
                    .map(|action| format!("    {}", step(action)))
                    .collect();
                broken.push((property.name, way.join("\n")));
            }
        }
    }
    let (states, depth) = (checker.unique_state_count(), checker.max_depth());
    Report { name, states, depth, broken, unseen }
}

fn step<C: fmt::Debug>(action: &Action<C>) -> String {
    let actor = |actor: &usize| char::from(b'A' + *actor as u8);
    match action {
        Action::Choose(who, choice) => format!("{}: {choice:?}", actor(who)),
        Action::Deliver(who) => format!("{}: its request arrives and is answered", actor(who)),
        Action::LostBefore(who) => format!("{}: its request is lost", actor(who)),
        Action::LostAfter(who) => {
            format!("{}: its request arrives, the answer is lost", actor(who))
        }
        Action::Delay(who) => format!("{}: no answer; its request may arrive later", actor(who)),
        Action::Look(who) => format!("{}: looks what became of its request", actor(who)),
        Action::Land(n) => format!("a late request arrives (number {n})"),
        Action::Crash(who) => format!("{}: crashes and starts anew", actor(who)),
        Action::Tick => "time passes".to_owned(),
    }
}

const NAMES: [&str; 10] =
    ["lease", "renew", "asking", "guard", "ack", "push", "retry", "inbox", "index", "flat"];

/// The names of all models.
pub fn names() -> &'static [&'static str] {
    &NAMES
}

/// Checks the model with this name.
pub fn run(name: &str, limits: Limits) -> Option<Report> {
    let deep = u8::from(limits.deep);
    let bounds = |faults: u8, ticks: u8| Bounds {
        faults: limits.faults.unwrap_or(faults + deep),
        ticks: limits.ticks.unwrap_or(ticks),
        attempts: 2,
        ghost_life: u8::MAX,
    };
    // Time has no end there.
    let endless = |faults| Bounds { ticks: u8::MAX, ..bounds(faults, 0) };
    let lease = LeaseRules {
        tries: [1; 3],
        asks: [0; 3],
        writes: 0,
        renewals: deep,
        bounds: endless(1 - deep),
    };
    let index = IndexRules {
        puts: 2,
        flat: 0,
        reads: 0,
        compactions: 1,
        purges: 1,
        bounds: Bounds { ghost_life: 1, ..bounds(0, 3) },
    };
    Some(match name {
        "lease" => check("lease", lease, limits),
        "renew" => check("renew", LeaseRules { renewals: 1, bounds: endless(0), ..lease }, limits),
        "asking" => {
            let (tries, asks) = ([1, 1, 0], [0, 0, 2]);
            let rules = LeaseRules { tries, asks, renewals: 1, bounds: endless(0), ..lease };
            check("asking", rules, limits)
        }
        "guard" => {
            let rules = LeaseRules { writes: 1, renewals: 0, bounds: endless(0), ..lease };
            check("guard", rules, limits)
        }
        "ack" => check("ack", QueueRules::ack(bounds(1, 3)), limits),
        "push" => check("push", QueueRules::again(bounds(0, 4)), limits),
        "retry" => check("retry", QueueRules::retry(bounds(0, 3)), limits),
        "index" => check("index", index, limits),
        "inbox" => {
            let bounds = Bounds { ghost_life: 1, ..bounds(1, 2) };
            check("inbox", IndexRules { purges: 0, bounds, ..index }, limits)
        }
        "flat" => {
            let bounds = Bounds { ghost_life: 1, ..bounds(1, 0) };
            let rules = IndexRules { puts: 0, flat: 2, reads: 1, purges: 0, bounds, ..index };
            check("flat", rules, limits)
        }
        _ => return None,
    })
}
