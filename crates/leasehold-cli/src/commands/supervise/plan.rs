//! Reading the plan and carrying it out.

use leasehold::ErrorKind;
use leasehold::fleet::{self, PlanText};
use leasehold::protocol::format::fleet::NodePlan;
use leasehold::protocol::supervise::{compare, processes, share};

use super::process::Slot;
use super::{Event, Supervisor};
use crate::commands::fleet::parse;
use crate::render::{self, WARN, paint};
use crate::supervised::Limits;

impl Supervisor {
    /// Looks for another plan, in a task of its own.
    pub(super) fn look(&mut self) {
        self.looking = true;
        self.next_look = self.after_pause();
        let (store, known, events) = (self.store.clone(), self.known.clone(), self.events.clone());
        tokio::spawn(async move {
            let looked = fleet::look(&store, known.as_ref()).await;
            let _ = events.send(Event::Looked(looked)).await;
        });
    }

    /// Carries out a plan, or says why not: then what runs goes on.
    pub(super) fn plan_came(&mut self, looked: leasehold::Result<Option<PlanText>>) {
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
        let parsed = match parse(&plan.text, plan.spelling) {
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

    pub(super) fn refuse(&mut self, reason: String) {
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

    pub(super) fn carry_out(&mut self, plan: Option<&NodePlan>) {
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
    pub(super) fn allowed(&self) -> Limits {
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
    pub(super) fn share_out(&mut self) {
        let count = u32::try_from(self.slots.len()).unwrap_or(u32::MAX);
        let (connections, requests) = self.limits;
        self.store.limit(
            connections.map_or(self.usual.connections, |limit| share(limit, count).0 as usize),
            requests.map(|limit| share(limit, count).0).or(self.usual.requests_per_minute),
        );
        let limits = self.allowed();
        self.slots.iter_mut().filter_map(Slot::child).for_each(|child| child.limit(&limits));
    }
}
