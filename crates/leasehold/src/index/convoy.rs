//! Compactions that publish together.
//!
//! In a directory each published shard is flushed to disk twice: its content before it gets its name, its
//! folder after that. A flush commits all that was changed in the file system since the last, deletions
//! of other inboxes as well, and whoever changes something meanwhile waits for it. So flushes are shared:
//!
//! ```text
//!   join ─▶ take, merge, stage ─▶ depart ──┬─▶ one flush of all contents, a name for each, one flush of the folder
//!   join ─▶ take, merge, stage ─▶ depart ──┤
//!   join ─▶ take, merge, stage ──────────▶ …  goes with the next
//! ```
//!
//! A convoy leaves when it is large enough, when nobody else is on the way, or when its first has waited
//! for long. Who waits has its shard in a file: it needs neither much memory nor one of the places of those
//! who are at work. What memory they have, for names, others may wait for who are waited for: so a convoy
//! leaves before it has half of it all, and who needs more than the other half is not waited for. It saves
//! work and is never needed: whoever does not join publishes alone.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use crate::env::Env;
use crate::store::large::Staged;
use crate::store::{Put, Store, Unknown, Write};
use crate::{Error, Result};

/// A convoy of this many leaves, whoever else is on the way: the next one merges while it is flushed.
const CROWD: usize = 32;

/// So does one with this many bytes to write: then there is more to flush than to commit.
const LOAD: u64 = 16 << 20;

/// So many may wait to be published: while one convoy is flushed, others are merged faster than that. With
/// fewer, everybody waits for the disk in the end.
const WAITING: usize = 4 * CROWD;

/// How long the first waits for others, who may be at a shard that is a thousand times as large.
const PATIENCE: Duration = Duration::from_millis(250);

/// How many may wait to be published. Each has a file open, so they have no more than a quarter of all that
/// this process may have.
pub(super) fn most_waiting() -> usize {
    let files = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let files = files.map_or(usize::MAX, |most| usize::try_from(most).unwrap_or(usize::MAX));
    WAITING.min(files / 4)
}

/// Compactions on their way to be published, in one process.
#[derive(Debug, Default)]
pub(super) struct Convoy(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// How many have joined and have yet to depart.
    coming: usize,
    /// How many convoys have left.
    left: u64,
    waiting: Vec<Waiting>,
    /// What they have to write, and what they have of the memory that all share.
    load: Load,
}

/// What a compaction brings along.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Load {
    /// Bytes to write.
    pub bytes: u64,
    /// Bytes in memory.
    pub kept: u64,
}

/// Who waits.
#[derive(Debug)]
enum Waiting {
    /// Publishes by itself when the convoy leaves.
    Alone(oneshot::Sender<()>),
    /// Is published with the others.
    Cargo(Box<Cargo>),
}

#[derive(Debug)]
struct Cargo {
    store: Store,
    staged: Staged,
    write: Write,
    tell: oneshot::Sender<Result<Put>>,
}

impl State {
    fn go_if_ready(&mut self, memory: u64) {
        let Load { bytes, kept } = self.load;
        let full = self.waiting.len() >= CROWD || bytes >= LOAD || kept >= memory / 2;
        if self.coming == 0 || full {
            self.go();
        }
    }

    fn go(&mut self) {
        self.load = Load::default();
        self.left += 1;
        let mut cargo = Vec::new();
        for waiting in self.waiting.drain(..) {
            match waiting {
                // Who was cancelled meanwhile does not hear it.
                Waiting::Alone(tell) => _ = tell.send(()),
                // Nor is written what nobody waits for any more.
                Waiting::Cargo(one) if one.tell.is_closed() => {}
                Waiting::Cargo(one) => cargo.push(*one),
            }
        }
        // As a task of its own: whoever happens to be the last may be cancelled. Without a runtime all of
        // them are over.
        if let (false, Ok(runtime)) = (cargo.is_empty(), Handle::try_current()) {
            runtime.spawn(publish(cargo));
        }
    }
}

async fn publish(cargo: Vec<Cargo>) {
    let Some(store) = cargo.first().map(|one| one.store.clone()) else { return };
    let (staged, tell): (Vec<_>, Vec<_>) =
        cargo.into_iter().map(|one| ((one.staged, one.write), one.tell)).unzip();
    for (put, tell) in store.publish(staged).await.into_iter().zip(tell) {
        let _ = tell.send(put);
    }
}

impl Convoy {
    /// Joins those who are at work, and share this many bytes of memory.
    pub fn join(self: &Arc<Self>, memory: u64) -> Place {
        self.state().coming += 1;
        let (convoy, coming) = (self.clone(), AtomicBool::new(true));
        Place { convoy, coming, memory, turn: Mutex::default() }
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
    memory: u64,
    turn: Mutex<Option<OwnedSemaphorePermit>>,
}

impl Place {
    /// Is at work by this permit, and gives it back when it departs.
    pub fn hold(&self, turn: OwnedSemaphorePermit) {
        *self.turn.lock().unwrap_or_else(PoisonError::into_inner) = Some(turn);
    }

    /// Keeps its permit when it departs: until what this returns is dropped.
    pub fn keep_turn(&self) -> Option<OwnedSemaphorePermit> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Is not waited for, until [`Place::rejoin`]: whoever waits for something that the others hold would
    /// keep them waiting for ever.
    pub fn leave(&self) {
        if self.coming.swap(false, SeqCst) {
            let mut state = self.convoy.state();
            state.coming -= 1;
            state.go_if_ready(self.memory);
        }
    }

    /// The same before it waits for this much memory, if those who wait for it may have that.
    pub fn leave_for(&self, bytes: u64) {
        if bytes > self.memory / 2 {
            self.leave();
        }
    }

    /// Is waited for again.
    pub fn rejoin(&self) {
        if !self.coming.swap(true, SeqCst) {
            self.convoy.state().coming += 1;
        }
    }

    /// Returns when the convoy leaves.
    pub async fn depart(&self, load: Load, env: &Env) {
        let (tell, told) = oneshot::channel();
        let before = self.wait_in(Waiting::Alone(tell), load);
        let _ = self.patiently(told, before, env).await;
    }

    /// Is published with the convoy.
    pub async fn publish(
        &self,
        store: &Store,
        staged: Staged,
        write: Write,
        kept: u64,
    ) -> Result<Put> {
        let (tell, told) = oneshot::channel();
        let (load, store) = (Load { bytes: staged.len(), kept }, store.clone());
        let env = store.env().clone();
        let cargo = Box::new(Cargo { store, staged, write, tell });
        let before = self.wait_in(Waiting::Cargo(cargo), load);
        self.patiently(told, before, &env).await.unwrap_or_else(|| {
            let error = Error::unavailable("publishing was interrupted");
            Ok(Put::Unknown(Unknown::NoAnswer(error)))
        })
    }

    /// Returns how many convoys left before the one that it waits in.
    fn wait_in(&self, waiting: Waiting, load: Load) -> u64 {
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner).take();
        let mut state = self.convoy.state();
        if self.coming.swap(false, SeqCst) {
            state.coming -= 1;
        }
        state.waiting.push(waiting);
        let Load { bytes, kept } = &mut state.load;
        *bytes = bytes.saturating_add(load.bytes);
        *kept = kept.saturating_add(load.kept);
        let before = state.left;
        state.go_if_ready(self.memory);
        drop((state, turn));
        before
    }

    async fn patiently<T>(
        &self,
        mut told: oneshot::Receiver<T>,
        before: u64,
        env: &Env,
    ) -> Option<T> {
        tokio::select! {
            biased;
            answer = &mut told => return answer.ok(),
            () = env.clock().sleep(PATIENCE) => {
                let mut state = self.convoy.state();
                // Else it is on its way, and those who gather now are none of its business.
                if state.left == before {
                    state.go();
                }
            }
        }
        told.await.ok()
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
    use tokio::sync::Semaphore;

    fn depart(place: Place) -> tokio::task::JoinHandle<Place> {
        depart_with(place, Load { bytes: 1, kept: 1 })
    }

    fn depart_with(place: Place, load: Load) -> tokio::task::JoinHandle<Place> {
        tokio::spawn(async move {
            place.depart(load, &Env::system()).await;
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
    async fn a_convoy_leaves_when_it_is_large_enough() {
        let convoy = Arc::new(Convoy::default());
        let mut places: Vec<Place> = (0..CROWD + 4).map(|_| convoy.join(1 << 20)).collect();
        let first: Vec<_> = places.drain(..CROWD - 1).map(depart).collect();
        settle().await;
        assert!(first.iter().all(|place| !place.is_finished()));
        let last = depart(places.remove(0));
        settle().await;
        assert!(last.is_finished() && first.iter().all(|place| place.is_finished()));
        assert_eq!(convoy.state().coming, 4);
    }

    #[tokio::test]
    async fn who_waits_lets_others_begin() {
        let (convoy, turns) = (Arc::new(Convoy::default()), Arc::new(Semaphore::new(1)));
        let (one, other) = (convoy.join(1 << 20), convoy.join(1 << 20));
        one.hold(turns.clone().try_acquire_owned().unwrap());
        assert_eq!(turns.available_permits(), 0);
        let one = depart(one);
        settle().await;
        assert!(!one.is_finished() && turns.available_permits() == 1);
        other.hold(turns.clone().try_acquire_owned().unwrap());
        drop(other);
        settle().await;
        assert!(one.is_finished() && turns.available_permits() == 1);
    }

    #[tokio::test]
    async fn the_last_waits_for_nobody() {
        let convoy = Arc::new(Convoy::default());
        let alone = depart(convoy.join(1 << 20));
        settle().await;
        assert!(alone.is_finished());
        // Nor for those that gave up, or wait for what it holds.
        let (one, two, three) = (convoy.join(1 << 20), convoy.join(1 << 20), convoy.join(1 << 20));
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
        let slow = convoy.join(1 << 20);
        depart(convoy.join(1 << 20)).await.unwrap();
        assert_eq!(convoy.state().coming, 1);
        drop(slow);
    }

    /// Whoever waits for its own convoy to be flushed does not send off the next one.
    #[tokio::test]
    async fn who_is_under_way_sends_nobody_off() {
        let convoy = Arc::new(Convoy::default());
        let (one, other) = (convoy.join(1 << 20), convoy.join(1 << 20));
        let (slow, _answer) = oneshot::channel::<()>();
        let before = one.wait_in(Waiting::Alone(oneshot::channel().0), Load::default());
        convoy.state().go();
        let later = convoy.join(1 << 20);
        later.wait_in(Waiting::Alone(slow), Load::default());
        let env = Env::system();
        let (_never, told) = oneshot::channel::<()>();
        let waited = tokio::time::timeout(2 * PATIENCE, one.patiently(told, before, &env)).await;
        assert!(waited.is_err() && convoy.state().waiting.len() == 1);
        drop(other);
        assert!(convoy.state().waiting.is_empty());
    }

    #[tokio::test]
    async fn much_to_write_leaves_at_once() {
        let convoy = Arc::new(Convoy::default());
        let (large, other) = (convoy.join(1 << 20), convoy.join(1 << 20));
        let large = depart_with(large, Load { bytes: LOAD, kept: 0 });
        settle().await;
        assert!(large.is_finished());
        assert_eq!(convoy.state().coming, 1);
        drop(other);
    }

    /// Or else they wait for each other.
    #[tokio::test]
    async fn half_of_the_memory_leaves_at_once() {
        let convoy = Arc::new(Convoy::default());
        let (one, other) = (convoy.join(1 << 20), convoy.join(1 << 20));
        one.depart(Load { bytes: 0, kept: 1 << 19 }, &Env::system()).await;
        assert_eq!(convoy.state().coming, 1);
        other.leave_for(1 << 19);
        assert_eq!(convoy.state().coming, 1);
        other.leave_for((1 << 19) + 1);
        assert_eq!(convoy.state().coming, 0);
    }
}
