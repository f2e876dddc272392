//! Where a node's replica keeps what its sync needs.
//!
//! ```text
//! sync/replica.json                                   which replica this is
//! sync/clock.json                                     what the bucket's clock says
//! sync/{queue}/outbox/{pending|bundles}/{unit}.json   what the bucket is still to be told
//! sync/{queue}/duplicates/{unit}~{tasks}~{nonce}      completions that came second
//! sync/{queue}/aside/{unit}.json                      work that is nowhere in the bucket any more
//! sync/{queue}/known.bin                              what a sync down has seen
//! sync/{queue}/state.json                             when, how often, at what cost
//! sync/{queue}/dry.json                               a worker has nothing to do
//! ```

use super::queue::Unit;
use crate::key::{Key, KeyError, decode_segment, encode_segment};

pub(super) const ROOT: &str = "sync/";

/// `sync/replica.json`.
pub fn replica() -> Result<Key, KeyError> {
    Key::new(format!("{ROOT}replica.json"))
}

/// `sync/clock.json`.
pub fn clock() -> Result<Key, KeyError> {
    Key::new(format!("{ROOT}clock.json"))
}

/// The keys of one queue in a replica, besides the queue's own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SyncKeys {
    /// `sync/{queue}/`.
    prefix: String,
}

impl SyncKeys {
    /// The keys of the queue with this name.
    pub fn new(queue: &str) -> Result<Self, KeyError> {
        let keys = Self { prefix: format!("{ROOT}{}/", encode_segment(queue)) };
        keys.state()?;
        Ok(keys)
    }

    /// The prefix of the outbox.
    pub fn outbox(&self) -> String {
        format!("{}outbox/", self.prefix)
    }

    /// The two parts of the outbox, in the order in which the bucket is told: tasks that left a bundle
    /// before the bundle.
    pub fn outbox_parts(&self) -> [String; 2] {
        ["pending/", "bundles/"].map(|part| format!("{}{part}", self.outbox()))
    }

    /// Where it stands what the bucket is to be told of this task or bundle.
    pub fn entry(&self, unit: &Unit) -> Result<Key, KeyError> {
        Key::new(format!("{}{}.json", self.outbox(), of_unit(unit)))
    }

    /// The prefix of the entries of tasks that left this bundle.
    pub fn entries_of_those_who_left(&self, bundle: &str) -> String {
        format!("{}pending/{}.", self.outbox(), encode_segment(bundle))
    }

    /// The task or bundle that an entry is about.
    pub fn parse_entry(&self, key: &str) -> Option<Unit> {
        let name = key.strip_prefix(&self.outbox())?.strip_suffix(".json")?;
        let unit = match name.split_once('/')? {
            ("pending", id) => Unit::Task(decode_segment(id)?),
            ("bundles", name) => {
                let (id, n) = name.rsplit_once('-')?;
                Unit::Bundle(decode_segment(id)?, n.parse().ok()?)
            }
            _ => return None,
        };
        let ours = self.entry(&unit).is_ok_and(|built| built.as_str() == key);
        ours.then_some(unit)
    }

    /// The prefix of completions that came second.
    pub fn duplicates(&self) -> String {
        format!("{}duplicates/", self.prefix)
    }

    /// Where a completion is counted that came second. `mark` tells it from others of its task, and
    /// is the same when it is counted again.
    pub fn duplicate(&self, unit: &Unit, mark: &str) -> Result<Key, KeyError> {
        // For people; long ones would not fit into a file's name.
        let name: String = encode_segment(&unit.name()).chars().take(40).collect();
        Key::new(format!("{}{name}~{}~{mark}", self.duplicates(), unit.tasks()))
    }

    /// How many tasks were done in vain, by the key that counts them.
    pub fn parse_duplicate(&self, key: &str) -> Option<u64> {
        let name = key.strip_prefix(&self.duplicates())?;
        name.rsplit('~').nth(1)?.parse().ok()
    }

    /// The prefix of work that was set aside.
    pub fn set_aside(&self) -> String {
        format!("{}aside/", self.prefix)
    }

    /// Where work is kept that is nowhere in the bucket any more.
    pub fn aside(&self, unit: &Unit) -> Result<Key, KeyError> {
        Key::new(format!("{}{}.json", self.set_aside(), of_unit(unit)))
    }

    /// What a sync down has seen.
    pub fn known(&self) -> Result<Key, KeyError> {
        Key::new(format!("{}known.bin", self.prefix))
    }

    /// When, how often, at what cost.
    pub fn state(&self) -> Result<Key, KeyError> {
        Key::new(format!("{}state.json", self.prefix))
    }

    /// There while a worker has nothing to do.
    pub fn dry(&self) -> Result<Key, KeyError> {
        Key::new(format!("{}dry.json", self.prefix))
    }
}

fn of_unit(unit: &Unit) -> String {
    match unit {
        Unit::Task(id) => format!("pending/{}", encode_segment(id)),
        Unit::Bundle(id, n) => format!("bundles/{}-{n}", encode_segment(id)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn those_who_left_a_bundle_are_found_by_its_name() {
        let keys = SyncKeys::new("q").unwrap();
        let left = keys.entry(&Unit::Task("01ABC.17".into())).unwrap();
        assert_eq!(left.as_str(), "sync/q/outbox/pending/01ABC.17.json");
        assert!(left.as_str().starts_with(&keys.entries_of_those_who_left("01ABC")));
    }

    proptest! {
        #[test]
        fn any_name_is_found_again(queue in ".{0,30}", id in ".{0,60}", n in 1u32..9) {
            let keys = SyncKeys::new(&queue).unwrap();
            for unit in [Unit::Task(id.clone()), Unit::Bundle(id.clone(), n)] {
                let entry = keys.entry(&unit).unwrap();
                prop_assert_eq!(keys.parse_entry(entry.as_str()), Some(unit.clone()));
                let duplicate = keys.duplicate(&unit, "00ff").unwrap();
                prop_assert_eq!(keys.parse_duplicate(duplicate.as_str()), Some(unit.tasks()));
            }
        }
    }
}
