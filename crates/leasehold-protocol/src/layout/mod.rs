//! Every key in the store: built and parsed here, and nowhere else.

pub mod fleet;
pub mod index;
pub mod queue;
pub mod sync;

use crate::format::root::ROOT_KEY;

/// Where records of locks stand.
pub const LOCKS: &str = "locks/";
/// Where records of semaphores' slots stand.
pub const SEMAPHORES: &str = "semaphores/";
/// Where records of elections stand.
pub const ELECTIONS: &str = "elections/";

/// Whether this is the key of a record of ours, which nobody should write as a file. The fleet's plan is
/// no such record: people write it.
pub fn is_ours(key: &str) -> bool {
    let folders = [LOCKS, SEMAPHORES, ELECTIONS, queue::ROOT, index::INDEXES, sync::ROOT];
    key == ROOT_KEY
        || key.starts_with(fleet::all_nodes())
        || folders.iter().any(|folder| key.starts_with(folder))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ours_are_ours_and_files_are_not() {
        for ours in [
            "leasehold.json",
            "locks/a.lock",
            "semaphores/gpu/0.lock",
            "elections/e.lock",
            "queues/q/queue.json",
            "indexes/i/datapackage.json",
            "sync/q/outbox",
            fleet::node("pi").unwrap().as_str(),
        ] {
            assert!(is_ours(ours), "{ours}");
        }
        for theirs in ["notes/queues/x", "queues.yaml", "locks", "a/leasehold.json", "fleet.toml"] {
            assert!(!is_ours(theirs), "{theirs}");
        }
    }
}
