//! Starting, restarting and ending the node's processes.

use std::process::ExitStatus;
use std::time::Duration;

use rustix::process::Signal;

use super::process::{State as Running, ending, start, sum};
use super::{End, LAST, SLACK, Supervisor, notify, since_boot};
use crate::render::{self, BAD, paint};
use crate::supervised::Report;

impl Supervisor {
    /// Tells all processes to end. Once more: stop what they are at. And again: kill them.
    pub(super) fn end(&mut self) {
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
        self.next_report = now;
    }

    /// Tells a process to end. Those that do not run are forgotten.
    pub(super) fn stop(&mut self, n: usize) {
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

    pub(super) fn remove(&mut self, n: usize) {
        let slot = self.slots.remove(n);
        let total = slot.total();
        self.past = sum(&self.past, &total);
    }

    pub(super) fn start(&mut self, n: usize) {
        let now = self.now();
        let limits = self.allowed();
        let mut words = self.words.clone();
        words.push(format!("--connections={}", limits.connections));
        words.extend(limits.requests_per_minute.map(|n| format!("--requests-per-minute={n}")));
        let slot = &mut self.slots[n];
        slot.before = slot.total();
        slot.report = Report::default();
        slot.last_words = (String::new(), false);
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

    pub(super) fn ended(&mut self, id: u64, status: Option<ExitStatus>) {
        let Some(n) = self.slots.iter().position(|slot| slot.id == id) else { return };
        let now = self.now();
        let slot = &mut self.slots[n];
        let dropped = slot.flow.dropped();
        slot.tell_dropped(dropped);
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
        // Who reads along has just heard them; the record has not.
        let said = text.clone();
        let (last_words, passed_on) = &slot.last_words;
        if !last_words.is_empty() {
            text.push_str(&format!(": {last_words}"));
        }
        let said = if *passed_on { said } else { text.clone() };
        let loops = (slot.restarts.is_loop() && !looped)
            .then(|| format!("{} is in a crash loop", slot.name()));
        self.trouble_told(said, text);
        if let Some(loops) = loops {
            render::say(paint(BAD, loops));
            self.next_report = now;
        }
    }
}
