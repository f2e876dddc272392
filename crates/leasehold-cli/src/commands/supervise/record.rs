//! What the node says of itself.

use std::time::Duration;

use leasehold::fleet::Seat;
use leasehold::protocol::format::node::{
    MOST_ERRORS, MOST_HELD, Node, NodeError, NodeProcess, Requests, shortened,
};
use leasehold::store::meter::{Prices, Usage};
use leasehold::{Store, StoreTime};

use super::process::{State as Running, sum};
use super::{Event, GOODBYE, Supervisor};

/// Over how long rates are told.
const RATES: Duration = Duration::from_secs(600);

impl Supervisor {
    /// Writes the record, or takes the name first, in a task of its own.
    pub(super) fn report(&mut self) {
        if self.telling || self.seating {
            return;
        }
        self.next_report = self.after_pause();
        let node = self.record();
        let (store, events) = (self.store.clone(), self.events.clone());
        let (name, every) = (self.node.clone(), self.every);
        let Some(seat) = self.seat.clone() else {
            // Who is about to leave takes no name.
            if self.ending.is_some() {
                return;
            }
            self.seating = true;
            tokio::spawn(async move {
                let seated = Seat::take(&store, &name, every).await;
                let _ = events.send(Event::Seated(seated)).await;
            });
            return;
        };
        if seat.every() != self.every && self.ending.is_none() {
            // What others may conclude from silence is part of the lease.
            (self.seating, self.seat) = (true, None);
            tokio::spawn(async move {
                let seated = match seat.leave(&node).await {
                    Ok(()) => Seat::take(&store, &name, every).await,
                    Err(error) => Err(error),
                };
                let _ = events.send(Event::Seated(seated)).await;
            });
            return;
        }
        self.telling = true;
        tokio::spawn(async move {
            let mut node = node;
            let now = by_the_store(&store, &mut node).await;
            let told = seat.report(&node).await;
            let _ = events.send(Event::Told(told, now)).await;
        });
    }

    /// Leaves the name to others, saying so. The store may not answer.
    pub(super) async fn say_goodbye(&mut self) {
        let Some(seat) = self.seat.take() else { return };
        let mut node = self.record();
        let store = self.store.clone();
        let goodbye = async {
            by_the_store(&store, &mut node).await;
            seat.leave(&node).await
        };
        match tokio::time::timeout(GOODBYE, goodbye).await {
            Ok(Err(error)) => tracing::warn!(%error, "could not say goodbye"),
            Ok(Ok(())) => {}
            Err(_) => tracing::warn!("could not say goodbye in time"),
        }
    }

    pub(super) fn note_error(&mut self, text: String) {
        let at = self.clock.map(|(store, at)| store.plus(self.now().since(at)));
        self.errors.push_back(NodeError { at, text: shortened(&text) });
        while self.errors.len() > MOST_ERRORS {
            self.errors.pop_front();
        }
    }

    fn record(&mut self) -> Node {
        let now = self.now();
        let mut processes = Vec::new();
        let mut all = self.past.clone();
        let mut held = Vec::new();
        let mut holds = 0;
        for slot in &mut self.slots {
            if let Running::Running(child) = &slot.state {
                slot.restarts.running(now.since(child.since));
            }
            let total = slot.total();
            processes.push(NodeProcess {
                role: slot.process.role.word().to_owned(),
                of: slot.process.of.clone(),
                pid: slot.pid(),
                state: match &slot.state {
                    Running::Running(_) => "running",
                    Running::Waiting(_) => "waiting",
                    Running::Draining(..) => "draining",
                }
                .to_owned(),
                crash_loop: slot.restarts.is_loop(),
                restarts: slot.restarts.count,
                done: total.done,
                failed: total.failed,
            });
            holds += total.holds;
            held.extend(total.held.iter().take(MOST_HELD - held.len().min(MOST_HELD)).cloned());
            all = sum(&all, &total);
        }
        let usage = all.usage.plus(&self.store.usage());
        self.samples.push_back((now, all.done, all.failed));
        while self.samples.len() > 2 && now.since(self.samples[0].0) > RATES {
            self.samples.pop_front();
        }
        let (since, done, failed) = self.samples.front().copied().unwrap_or((now, 0, 0));
        let minutes = now.since(since).as_secs_f64() / 60.0;
        let rate = |count: u64| match minutes > 0.0 {
            // Two digits: it is for people, and compared with other nodes.
            true => (count as f64 / minutes * 100.0).round() / 100.0,
            false => 0.0,
        };
        Node {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            started_at: self.started_at,
            uptime_s: now.since(self.started).as_secs(),
            every: self.every,
            draining: self.ending.is_some(),
            plan: self.carried_out.as_ref().map(|version| version.as_str().to_owned()),
            refused: self.refused.as_deref().map(shortened),
            processes,
            held,
            holds,
            done: all.done,
            failed: all.failed,
            done_per_minute: rate(all.done.saturating_sub(done)),
            failed_per_minute: rate(all.failed.saturating_sub(failed)),
            errors: self.errors.iter().cloned().collect(),
            disk_free: self.state.free(),
            clock_ahead_ms: 0,
            requests: by_class(&usage),
            dollars: usage.dollars(&Prices::of(self.store.kind())),
            other: serde_json::Map::new(),
        }
    }
}

fn by_class(usage: &Usage) -> Requests {
    let Usage { put, get, head, list, delete, .. } = *usage;
    Requests { put, get, head, list, delete }
}

/// Adds what takes the store's clock, and says what that is.
async fn by_the_store(store: &Store, node: &mut Node) -> Option<StoreTime> {
    let now = store.now().await.ok()?;
    let wall = store.env().clock().wall();
    node.clock_ahead_ms = (wall.as_micros() - now.as_micros()) / 1000;
    if node.started_at.is_none() {
        node.started_at = Some(now.minus(Duration::from_secs(node.uptime_s)));
    }
    Some(now)
}
