//! Processes that nobody waits for, where we are the first process of a container.
//!
//! Whatever loses its parent there becomes ours: the sitters and wardens of a worker that was killed,
//! and whatever a command left. When they end they stay as zombies until somebody waits for them, and
//! a container may have only so many processes. Elsewhere the system's first process does that.

use std::time::Duration;

use leasehold::env::BootTime;
use rustix::process::{Pid, WaitOptions, waitpid};

/// How often to look.
const EVERY: Duration = Duration::from_secs(5);

/// What becomes ours without our doing.
pub struct Orphans {
    /// When to look next; never where we are not the first process.
    next: Option<BootTime>,
}

impl Orphans {
    pub fn new(now: BootTime) -> Self {
        let first = cfg!(target_os = "linux") && std::process::id() == 1;
        Self { next: first.then_some(now) }
    }

    /// When to look next.
    pub fn next(&self) -> Option<BootTime> {
        self.next
    }

    /// Waits for those that have ended, if it is time, but not for these: they are waited for elsewhere.
    pub fn bury(&mut self, now: BootTime, ours: impl Iterator<Item = u32>) {
        if self.next.is_none_or(|next| next > now) {
            return;
        }
        self.next = Some(now.plus(EVERY));
        let ours: Vec<u32> = ours.collect();
        let Ok(processes) = std::fs::read_dir("/proc") else { return };
        let numbers = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        for pid in numbers.filter(|pid: &u32| !ours.contains(pid)) {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            if is_zombie_of_ours(&stat)
                && let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw)
            {
                let _ = waitpid(Some(pid), WaitOptions::NOHANG);
            }
        }
    }
}

/// By `/proc/PID/stat`: its name, in brackets, may contain anything.
fn is_zombie_of_ours(stat: &str) -> bool {
    let mut fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace();
    fields.next() == Some("Z") && fields.next() == Some("1")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zombies_are_known_by_their_state_and_parent() {
        assert!(is_zombie_of_ours("17 (a) Z 5) Z 1 17 17 0"));
        assert!(!is_zombie_of_ours("17 (a) Z 2 17 17 0"));
        assert!(!is_zombie_of_ours("17 (Z 1) S 1 17 17 0"));
        assert!(!is_zombie_of_ours(""));
    }
}
