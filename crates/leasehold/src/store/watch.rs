//! Being told that something changed, instead of asking again and again.
//!
//! A watch only saves time and looks. It may wake without a cause, and it is never *needed*: whoever
//! waits by one also looks now and then, because buckets have none, other systems neither, and a
//! kernel's watches can run out.

#[cfg(any(target_os = "linux", target_os = "android"))]
use super::dir::watch::Watcher;

/// Wakes whoever waits for keys to change.
#[derive(Debug)]
pub struct Watch {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    watcher: Option<Watcher>,
}

impl Watch {
    /// One that never wakes.
    pub fn never() -> Self {
        Self {
            #[cfg(any(target_os = "linux", target_os = "android"))]
            watcher: None,
        }
    }

    #[cfg(any(target_os = "linux", target_os = "android"))]
    pub(super) fn by(watcher: Watcher) -> Self {
        Self { watcher: Some(watcher) }
    }

    /// Whether changes are told at all. If not, whoever waits has to look more often.
    pub fn is_live(&self) -> bool {
        #[cfg(any(target_os = "linux", target_os = "android"))]
        return self.watcher.as_ref().is_some_and(Watcher::is_live);
        #[cfg(not(any(target_os = "linux", target_os = "android")))]
        false
    }

    /// Completes when something may have changed since the watch was made or since this completed
    /// last; never where changes are not told. Nothing is missed if it is dropped half-way.
    ///
    /// Look after making the watch and after each time, in that order: what changed before the look
    /// is seen by it, and what changes later wakes the next call.
    pub async fn changed(&mut self) {
        #[cfg(any(target_os = "linux", target_os = "android"))]
        if let Some(watcher) = &mut self.watcher {
            return watcher.changed().await;
        }
        std::future::pending().await
    }
}
