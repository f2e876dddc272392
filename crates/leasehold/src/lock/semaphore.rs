//! A lock with several holders.

use std::time::Duration;

use leasehold_protocol::key::{Key, encode_segment};
use leasehold_protocol::layout::SEMAPHORES;

use super::{Guard, Lock, LockSettings};
use crate::lease::{Awaited, HeldBy, Waiting};
use crate::{Error, ErrorKind, Result, Store};

/// At most `slots` holders at a time. Every holder must name the same number.
#[derive(Debug, Clone)]
pub struct Semaphore {
    store: Store,
    /// What the slots' keys begin with.
    folder: String,
    slots: Vec<Lock>,
}

impl Semaphore {
    /// The semaphore with this name.
    pub fn named(
        store: &Store,
        name: &str,
        slots: u32,
        holder: impl Into<String>,
        settings: LockSettings,
    ) -> Result<Self> {
        if !(1..=1000).contains(&slots) {
            return Err(Error::invalid("a semaphore has 1 to 1,000 slots"));
        }
        let holder = holder.into();
        // Not among the locks, where one could have the name of a slot.
        let folder = format!("{SEMAPHORES}{}/", encode_segment(name));
        let slot = |number: u32| {
            let key = Key::new(format!("{folder}{number}.lock"))?;
            Lock::at(store, key, holder.clone(), settings.clone())
        };
        let slots = (0..slots).map(slot).collect::<Result<_>>()?;
        Ok(Self { store: store.clone(), folder, slots })
    }

    /// A slot, or who holds the one that is likely to be free first.
    pub async fn try_acquire(&self) -> Result<Result<Guard, HeldBy>> {
        // Everybody starts somewhere else, or all would fight for the first.
        let start = self.store.env().random() as usize % self.slots.len();
        let mut soonest: Option<HeldBy> = None;
        for index in 0..self.slots.len() {
            match self.slots[(start + index) % self.slots.len()].try_acquire().await? {
                Ok(guard) => return Ok(Ok(guard)),
                Err(held) if soonest.as_ref().is_none_or(|best| held.left < best.left) => {
                    soonest = Some(held);
                }
                Err(_) => {}
            }
        }
        soonest.map(Err).ok_or_else(|| Error::invalid("a semaphore without slots"))
    }

    /// Waits for a slot as long as the settings say.
    pub async fn acquire(&self) -> Result<Guard> {
        let settings = self.slots[0].settings().clone();
        self.acquire_timeout(settings.patience()).await
    }

    /// Waits for a slot for at most this long.
    pub async fn acquire_timeout(&self, patience: Duration) -> Result<Guard> {
        let awaited = Awaited::AnyOf(self.folder.clone());
        let base = self.slots[0].settings().retry_delay;
        let mut waiting = Waiting::new(&self.store, awaited, Some(patience), base);
        loop {
            match self.try_acquire().await? {
                Ok(guard) => return Ok(guard),
                Err(held) => {
                    if !waiting.pause(&self.store, &held).await {
                        let message = format!(
                            "all {} slots are still held after {}, one of them by {}",
                            self.slots.len(),
                            crate::settings::format_duration(patience),
                            held.holder
                        );
                        return Err(Error::new(ErrorKind::Held, message));
                    }
                }
            }
        }
    }

    /// The locks behind it, one per slot.
    pub fn slots(&self) -> &[Lock] {
        &self.slots
    }
}
