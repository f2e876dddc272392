//! What must hold, checked at the moment when a write is carried out: the store's true history is
//! known here, whatever the nodes believe.

pub mod index;
pub mod lease;
pub mod queue;
pub mod replica;

use crate::objects::Stored;
use crate::world::{DiskId, Life, State};

/// A write that was carried out.
#[derive(Debug)]
pub struct Applied<'a> {
    /// Whose.
    pub life: Life,
    /// What that node was doing when it was sent.
    pub label: &'static str,
    /// Where.
    pub key: &'a str,
    /// What was there.
    pub before: Option<Stored>,
    /// What is there now.
    pub after: Option<Stored>,
    /// It arrived after its sender had stopped waiting, or a second time.
    pub late: bool,
}

/// What is known of the past.
#[derive(Debug, Default)]
pub struct Checker {
    /// Of leases.
    pub leases: lease::Leases,
    /// Of the queue.
    pub queue: Option<queue::QueueCheck>,
    /// Of the index.
    pub index: Option<index::IndexCheck>,
}

/// Whether something holds, or what does not.
pub type Verdict = Result<(), String>;

impl State {
    /// Checks a write that was carried out.
    pub fn applied(&mut self, applied: Applied<'_>) {
        if let Some(after) = &applied.after {
            let body = after.body.clone();
            self.trace.mix_bytes(&body);
        }
        let mut check = std::mem::take(&mut self.check);
        let verdict = check.applied(self, &applied);
        self.check = check;
        if let Err(what) = verdict {
            let node = &self.nodes[applied.life.node].name;
            self.violate(format!("{}: {what} (by {node})", applied.key));
        }
    }
}

impl State {
    /// Checks what was written to a machine's disk.
    pub fn applied_here(&mut self, disk: DiskId, applied: Applied<'_>) {
        let Some(mut queue) = self.check.queue.take() else { return };
        let verdict = queue.applied_here(self, disk, &applied);
        self.check.queue = Some(queue);
        if let Err(what) = verdict {
            let node = &self.nodes[applied.life.node].name;
            self.violate(format!("disk {disk}: {}: {what} (by {node})", applied.key));
        }
    }
}

impl Checker {
    fn applied(&mut self, state: &State, applied: &Applied<'_>) -> Verdict {
        let key = applied.key;
        if key.ends_with("/lease.json") || key.ends_with(".lock") {
            self.leases.applied(state, applied)?;
        }
        if key.starts_with("pad/") && !key.ends_with(".lock") {
            pad(applied)?;
        }
        if let Some(queue) = &mut self.queue {
            queue.applied(state, applied)?;
        }
        if let Some(index) = &mut self.index {
            index.applied(state, applied)?;
        }
        Ok(())
    }
}

/// A file of the scratchpad: `{counter} {token}`. Every write counts on from the one before, and
/// none is by a lower token.
fn pad(applied: &Applied<'_>) -> Verdict {
    let read = |stored: &Option<Stored>| -> Option<(u64, u64)> {
        let text = String::from_utf8_lossy(&stored.as_ref()?.body).into_owned();
        let (counter, token) = text.split_once(' ')?;
        Some((counter.parse().ok()?, token.parse().ok()?))
    };
    let (before, token) = read(&applied.before).unwrap_or((0, 0));
    let Some((after, by)) = read(&applied.after) else { return Err("the file is gone".to_owned()) };
    if after != before + 1 {
        return Err(format!("an update was lost: {before} became {after}"));
    }
    match by < token {
        true => Err(format!("a guarded write by token {by} landed after one by {token}")),
        false => Ok(()),
    }
}
