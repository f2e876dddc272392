//! Compactions that publish together.
//!
//! In a directory each published shard is flushed to disk twice: its content before it gets its name, its
//! folder after that. A flush commits all that was changed in the file system since the last, deletions
//! of other inboxes as well, and whoever changes something meanwhile waits for it. So flushes are shared:
//!
//! ```text
//!   join ─▶ take, merge ─▶ depart ──┬─▶ publish: one flush of all contents, one of the folder ─▶ sweep
//!   join ─▶ take, merge ─▶ depart ──┤
//!   join ─▶ take, merge ──────────▶ …  goes with the next
//! ```
//!
//! A convoy leaves when it is large enough, when nobody else is on the way, or when its first has waited
//! for long. It saves work and is never needed: whoever does not join publishes alone.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;

use crate::env::Env;

/// A convoy of this many leaves, whoever else is on the way: the next one merges while it is flushed.
const CROWD: usize = 16;

/// So does one with this many bytes to write: then there is more to flush than to commit.
const LOAD: u64 = 8 << 20;

/// How long the first waits for others, who may be at a shard that is a thousand times as large.
const PATIENCE: Duration = Duration::from_millis(250);

/// Compactions on their way to be published, in one process.
#[derive(Debug, Default)]
pub(super) struct Convoy(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// How many have joined and have yet to depart.
    coming: usize,
    waiting: Vec<oneshot::Sender<()>>,
    bytes: u64,
}

impl State {
    fn go_if_ready(&mut self, crowd: usize) {
        if self.coming == 0 || self.waiting.len() >= crowd || self.bytes >= LOAD {
            self.go();
        }
    }

    fn go(&mut self) {
        self.bytes = 0;
        for waiting in self.waiting.drain(..) {
            // Who was cancelled meanwhile does not hear it.
            let _ = waiting.send(());
        }
    }
}

impl Convoy {
    /// Joins `parallel` others at most: half of them make a convoy, so that the other half has something
    /// to do while it is flushed.
    pub fn join(self: &Arc<Self>, parallel: usize) -> Place {
        self.state().coming += 1;
        let crowd = (parallel / 2).clamp(1, CROWD);
        Place { convoy: self.clone(), coming: AtomicBool::new(true), crowd }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A compaction's place. Whoever drops it is not waited for.
#[derive(Debug)]
pub(super) struct Place {
    convoy: Arc<Convoy>,
    coming: AtomicBool,
    crowd: usize,
}

impl Place {
    /// Is not waited for, until [`Place::rejoin`]: whoever waits for something that the others hold would
    /// keep them waiting for ever.
    pub fn leave(&self) {
        if self.coming.swap(false, SeqCst) {
            let mut state = self.convoy.state();
            state.coming -= 1;
            state.go_if_ready(self.crowd);
        }
    }

    /// Is waited for again.
    pub fn rejoin(&self) {
        if !self.coming.swap(true, SeqCst) {
            self.convoy.state().coming += 1;
        }
    }

    /// Returns when the convoy leaves, having this many bytes to write.
    pub async fn depart(&self, bytes: u64, env: &Env) {
        let (go, told) = oneshot::channel();
        {
            let mut state = self.convoy.state();
            if self.coming.swap(false, SeqCst) {
                state.coming -= 1;
            }
            state.waiting.push(go);
            state.bytes = state.bytes.saturating_add(bytes);
            state.go_if_ready(self.crowd);
        }
        tokio::select! {
            biased;
            _ = told => {}
            () = env.clock().sleep(PATIENCE) => self.convoy.state().go(),
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.leave();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn depart(place: Place) -> tokio::task::JoinHandle<Place> {
        depart_with(place, 1)
    }

    fn depart_with(place: Place, bytes: u64) -> tokio::task::JoinHandle<Place> {
        tokio::spawn(async move {
            place.depart(bytes, &Env::system()).await;
            place
        })
    }

    /// Much less than anybody's patience: whoever is on the way by then did not wait for that to end.
    async fn settle() {
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn a_convoy_leaves_when_half_of_them_are_there() {
        let convoy = Arc::new(Convoy::default());
        let mut places: Vec<Place> = (0..8).map(|_| convoy.join(8)).collect();
        let first: Vec<_> = places.drain(..3).map(depart).collect();
        settle().await;
        assert!(first.iter().all(|place| !place.is_finished()));
        let fourth = depart(places.remove(0));
        settle().await;
        assert!(fourth.is_finished() && first.iter().all(|place| place.is_finished()));
        assert_eq!(convoy.state().coming, 4);
    }

    #[tokio::test]
    async fn the_last_waits_for_nobody() {
        let convoy = Arc::new(Convoy::default());
        let alone = depart(convoy.join(32));
        settle().await;
        assert!(alone.is_finished());
        // Nor for those that gave up, or wait for what it holds.
        let (one, two, three) = (convoy.join(32), convoy.join(32), convoy.join(32));
        let one = depart(one);
        drop(two);
        settle().await;
        assert!(!one.is_finished());
        three.leave();
        settle().await;
        assert!(one.is_finished());
        three.rejoin();
        assert_eq!(convoy.state().coming, 1);
        drop(three);
        assert_eq!(convoy.state().coming, 0);
    }

    #[tokio::test]
    async fn nobody_waits_for_long() {
        let convoy = Arc::new(Convoy::default());
        let slow = convoy.join(32);
        depart(convoy.join(32)).await.unwrap();
        assert_eq!(convoy.state().coming, 1);
        drop(slow);
    }

    #[tokio::test]
    async fn much_to_write_leaves_at_once() {
        let convoy = Arc::new(Convoy::default());
        let (large, other) = (convoy.join(32), convoy.join(32));
        let large = depart_with(large, LOAD);
        settle().await;
        assert!(large.is_finished());
        assert_eq!(convoy.state().coming, 1);
        drop(other);
    }
}
