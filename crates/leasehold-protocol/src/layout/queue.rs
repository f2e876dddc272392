//! Where a queue's objects are.
//!
//! ```text
//! queues/{queue}/queue.json                             its settings
//! queues/{queue}/pending/{task}/task.json, lease.json   (with shards: pending/{shard}/{task}/…)
//! queues/{queue}/bundles/{bundle}-{n}/tasks.jsonl, lease.json
//! queues/{queue}/scheduled/{time}/{task}/task.json
//! queues/{queue}/completed/{task}.json
//! queues/{queue}/failed/{task}.json
//! ```
//!
//! Names of queues and tasks may be any text: what a key cannot hold is escaped.

use crate::key::{Key, KeyError, MAX_KEY_BYTES, decode_segment, encode_segment, is_plain};
use crate::time::StoreTime;

pub(super) const ROOT: &str = "queues/";
const TASK: &str = "task.json";
const TASKS: &str = "tasks.jsonl";
const PENDING: &str = "pending/";
const LEASE: &str = "lease.json";

/// The most shards a queue can have.
pub const MAX_SHARDS: u16 = 256;

/// The keys of one queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueueKeys {
    /// `queues/{queue}/`.
    prefix: String,
    shards: u16,
}

/// One of the two objects of a task or bundle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// What is to be done.
    Work,
    /// Who does it.
    Lease,
}

/// What is to be done, by its name: the folder of a task or of a bundle.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Unit {
    /// A task.
    Task(String),
    /// A bundle of that many tasks.
    Bundle(String, u32),
}

impl Unit {
    /// Its name: what its receipt is called.
    pub fn name(&self) -> String {
        match self {
            Self::Task(id) => id.clone(),
            Self::Bundle(id, n) => format!("{id}-{n}"),
        }
    }

    /// How many tasks it stands for.
    pub fn tasks(&self) -> u64 {
        match self {
            Self::Task(_) => 1,
            Self::Bundle(_, n) => u64::from(*n),
        }
    }
}

/// The prefix under which all queues are.
pub fn all_queues() -> &'static str {
    ROOT
}

/// The queue's name in a common prefix like `queues/{queue}/`.
pub fn queue_name(prefix: &str) -> Option<String> {
    decode_segment(prefix.strip_prefix(ROOT)?.strip_suffix('/')?)
}

/// The folder of a task or bundle, if this key is one of its two objects: they are changed together.
pub fn unit_folder(key: &str) -> Option<&str> {
    let (_, rest) = key.strip_prefix(ROOT)?.split_once('/')?;
    // Not what is recorded of a task with such a name.
    let is_unit = rest.starts_with(PENDING) || rest.starts_with("bundles/");
    let (folder, name) = key.rsplit_once('/').filter(|_| is_unit)?;
    [LEASE, TASK, TASKS].contains(&name).then_some(folder)
}

/// Whether this is the key of a task's or bundle's lease.
pub fn is_lease(key: &str) -> bool {
    unit_folder(key).is_some_and(|folder| key[folder.len()..].strip_prefix('/') == Some(LEASE))
}

impl QueueKeys {
    /// The keys of the queue with this name.
    pub fn new(queue: &str, shards: u16) -> Result<Self, KeyError> {
        let keys = Self {
            prefix: format!("{ROOT}{}/", encode_segment(queue)),
            shards: shards.clamp(1, MAX_SHARDS),
        };
        keys.settings()?;
        Ok(keys)
    }

    /// `queue.json`.
    pub fn settings(&self) -> Result<Key, KeyError> {
        Key::new(format!("{}queue.json", self.prefix))
    }

    /// The prefix of everything that the queue has.
    pub fn everything(&self) -> &str {
        &self.prefix
    }

    /// The prefix of tasks that wait or run, in this shard.
    pub fn pending(&self, shard: u16) -> String {
        match self.shards {
            1 => self.all_pending(),
            _ => format!("{}{PENDING}{:02x}/", self.prefix, shard % self.shards),
        }
    }

    /// The prefix of all tasks that wait or run.
    pub fn all_pending(&self) -> String {
        format!("{}{PENDING}", self.prefix)
    }

    /// The prefix of bundles.
    pub fn bundles(&self) -> String {
        format!("{}bundles/", self.prefix)
    }

    /// The prefix of what is to be done later.
    pub fn scheduled(&self) -> String {
        format!("{}scheduled/", self.prefix)
    }

    /// The prefix of receipts.
    pub fn completed(&self) -> String {
        format!("{}completed/", self.prefix)
    }

    /// The prefix of dead letters.
    pub fn failed(&self) -> String {
        format!("{}failed/", self.prefix)
    }

    /// How many shards there are.
    pub fn shards(&self) -> u16 {
        self.shards
    }

    fn shard_of(&self, id: &str) -> u16 {
        // FNV-1a: which shard a task is in must never change, whatever library hashes the rest.
        let hash = id.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        (hash % u64::from(self.shards)) as u16
    }

    /// Where one of the two objects of a task or bundle is.
    pub fn part(&self, unit: &Unit, part: Part) -> Result<Key, KeyError> {
        let file = match (part, unit) {
            (Part::Lease, _) => LEASE,
            (Part::Work, Unit::Task(_)) => TASK,
            (Part::Work, Unit::Bundle(..)) => TASKS,
        };
        match unit {
            // Asked for several times in the life of each task: not formatted.
            Unit::Task(id) if self.shards == 1 && is_plain(id) => {
                Key::new([&*self.prefix, PENDING, id, "/", file].concat())
            }
            Unit::Task(id) => {
                let (folder, id) = (self.pending(self.shard_of(id)), encode_segment(id));
                Key::new(format!("{folder}{id}/{file}"))
            }
            Unit::Bundle(id, n) => {
                let (folder, id) = (self.bundles(), encode_segment(id));
                Key::new(format!("{folder}{id}-{n}/{file}"))
            }
        }
    }

    /// Where a task waits for its time.
    pub fn scheduled_at(&self, time: StoreTime, id: &str) -> Result<Key, KeyError> {
        Key::new(format!("{}scheduled/{time}/{}/task.json", self.prefix, encode_segment(id)))
    }

    /// Where the receipt is.
    pub fn receipt(&self, unit: &Unit) -> Result<Key, KeyError> {
        Key::new(format!("{}{}.json", self.completed(), encode_segment(&unit.name())))
    }

    /// Where the dead letter is.
    pub fn dead_letter(&self, id: &str) -> Result<Key, KeyError> {
        Key::new(format!("{}{}.json", self.failed(), encode_segment(id)))
    }

    /// Which object of which task or bundle this key is.
    pub fn parse_part(&self, key: &str) -> Option<(Unit, Part)> {
        let rest = key.strip_prefix(&self.prefix)?;
        let (folder, rest) = rest.split_once('/')?;
        let (unit, file) = match folder {
            "pending" if self.shards == 1 => {
                let (id, file) = rest.split_once('/')?;
                (Unit::Task(decode_segment(id)?), file)
            }
            "pending" => {
                let (_, rest) = rest.split_once('/')?;
                let (id, file) = rest.split_once('/')?;
                (Unit::Task(decode_segment(id)?), file)
            }
            "bundles" => {
                let (name, file) = rest.split_once('/')?;
                (parse_bundle(name)?, file)
            }
            _ => return None,
        };
        let part = match (file, &unit) {
            (LEASE, _) => Part::Lease,
            (TASK, Unit::Task(_)) | (TASKS, Unit::Bundle(..)) => Part::Work,
            _ => return None,
        };
        // Only what would be built like this is ours: no second spelling, no other shard.
        let ours = self.part(&unit, part).is_ok_and(|built| built.as_str() == key);
        ours.then_some((unit, part))
    }

    /// The task or bundle whose folder this common prefix is.
    pub fn parse_folder(&self, prefix: &str) -> Option<Unit> {
        // There may be tens of thousands, and nearly all of them are like this: built from what they say.
        let name = prefix.strip_prefix(&self.prefix).and_then(|rest| rest.strip_prefix(PENDING));
        if let Some(id) = name.and_then(|name| name.strip_suffix('/'))
            && self.shards == 1
            && is_plain(id)
            && prefix.len() + LEASE.len() <= MAX_KEY_BYTES
        {
            return Some(Unit::Task(id.to_owned()));
        }
        for part in [TASK, TASKS] {
            if let Some((unit, _)) = self.parse_part(&format!("{prefix}{part}")) {
                return Some(unit);
            }
        }
        None
    }

    /// When to do what, by the key of a scheduled task.
    pub fn parse_scheduled(&self, key: &str) -> Option<(StoreTime, String)> {
        let rest = key.strip_prefix(&self.scheduled())?;
        let (time, rest) = rest.split_once('/')?;
        let id = rest.strip_suffix("/task.json")?;
        Some((time.parse().ok()?, decode_segment(id)?))
    }

    /// The name in the key of a receipt or a dead letter.
    pub fn parse_record(&self, key: &str) -> Option<String> {
        let rest = key.strip_prefix(&self.prefix)?;
        let name = rest.strip_prefix("completed/").or_else(|| rest.strip_prefix("failed/"))?;
        decode_segment(name.strip_suffix(".json")?)
    }
}

fn parse_bundle(name: &str) -> Option<Unit> {
    let (id, n) = name.rsplit_once('-')?;
    Some(Unit::Bundle(decode_segment(id)?, n.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_task_and_its_lease_are_changed_together() {
        let folder = Some("queues/q/pending/x");
        assert_eq!(unit_folder("queues/q/pending/x/task.json"), folder);
        assert_eq!(unit_folder("queues/q/pending/x/lease.json"), folder);
        assert_eq!(unit_folder("queues/q/bundles/x-3/tasks.jsonl"), Some("queues/q/bundles/x-3"));
        for alone in ["queues/q/completed/x.json", "locks/lease.json", "lease.json"] {
            assert_eq!(unit_folder(alone), None, "{alone}");
        }
    }

    #[test]
    fn keys_are_where_other_clients_look_for_them() {
        let keys = QueueKeys::new("scrape", 1).unwrap();
        let task = Unit::Task("example.com".into());
        let key = |part| keys.part(&task, part).unwrap().to_string();
        assert_eq!(key(Part::Work), "queues/scrape/pending/example.com/task.json");
        assert_eq!(key(Part::Lease), "queues/scrape/pending/example.com/lease.json");
        assert_eq!(
            keys.receipt(&task).unwrap().as_str(),
            "queues/scrape/completed/example.com.json"
        );
        let bundle = Unit::Bundle("01ABC".into(), 100);
        let tasks = keys.part(&bundle, Part::Work).unwrap();
        assert_eq!(tasks.as_str(), "queues/scrape/bundles/01ABC-100/tasks.jsonl");
        assert_eq!(keys.dead_letter("a/b").unwrap().as_str(), "queues/scrape/failed/a%2Fb.json");
        let time: StoreTime = "2026-01-31T09:05:00.123456Z".parse().unwrap();
        let later = keys.scheduled_at(time, "x").unwrap();
        assert_eq!(
            later.as_str(),
            "queues/scrape/scheduled/2026-01-31T09:05:00.123456Z/x/task.json"
        );
        assert_eq!(keys.parse_scheduled(later.as_str()), Some((time, "x".into())));
        assert_eq!(queue_name("queues/scrape/"), Some("scrape".into()));
    }

    #[test]
    fn what_is_not_ours_is_passed_over() {
        let keys = QueueKeys::new("q", 1).unwrap();
        for key in [
            "queues/q/pending/x/notes.txt",
            "queues/q/pending/task.json",
            "queues/q/pending/x/y/task.json",
            "queues/q/bundles/x/tasks.jsonl",
            "queues/q/bundles/x-3/task.json",
            "queues/q/bundles/x-03/tasks.jsonl",
            "queues/q/pending/100%/task.json",
            "queues/other/pending/x/task.json",
        ] {
            assert_eq!(keys.parse_part(key), None, "{key}");
        }
    }

    #[test]
    fn a_unit_is_its_two_objects() {
        for (key, folder, lease) in [
            ("queues/q/pending/x/task.json", Some("queues/q/pending/x"), false),
            ("queues/q/pending/x/lease.json", Some("queues/q/pending/x"), true),
            ("queues/q/pending/06/x/lease.json", Some("queues/q/pending/06/x"), true),
            ("queues/q/bundles/x-3/tasks.jsonl", Some("queues/q/bundles/x-3"), false),
            ("queues/q/bundles/x-3/lease.json", Some("queues/q/bundles/x-3"), true),
            ("queues/q/pending/x/notes.txt", None, false),
            // Of tasks that are called like this.
            ("queues/q/completed/lease.json", None, false),
            ("queues/q/failed/lease.json", None, false),
            ("queues/q/completed/task.json", None, false),
            ("queues/lease.json", None, false),
            ("pending/x/lease.json", None, false),
        ] {
            assert_eq!((unit_folder(key), is_lease(key)), (folder, lease), "{key}");
        }
    }

    #[test]
    fn shards_never_move() {
        let keys = QueueKeys::new("q", 16).unwrap();
        let key = keys.part(&Unit::Task("example.com".into()), Part::Work).unwrap();
        assert_eq!(key.as_str(), "queues/q/pending/06/example.com/task.json");
    }

    proptest! {
        /// At a glance or not, the same.
        #[test]
        fn folders_are_those_of_tasks(name in "[ -~é]{0,12}", shards in 1u16..3) {
            let keys = QueueKeys::new("q", shards).unwrap();
            let folder = format!("queues/q/pending/{name}/");
            let unit = keys.parse_part(&format!("{folder}task.json")).map(|(unit, _)| unit);
            prop_assert_eq!(keys.parse_folder(&folder), unit);
        }

        #[test]
        fn any_name_is_found_again(queue in ".{0,30}", id in ".{0,60}", shards in 1u16..300) {
            let keys = QueueKeys::new(&queue, shards).unwrap();
            for unit in [Unit::Task(id.clone()), Unit::Bundle(id.clone(), 7)] {
                for part in [Part::Work, Part::Lease] {
                    let key = keys.part(&unit, part).unwrap();
                    prop_assert_eq!(keys.parse_part(key.as_str()), Some((unit.clone(), part)));
                    let (folder, _) = key.as_str().rsplit_once('/').unwrap();
                    prop_assert_eq!(keys.parse_folder(&format!("{folder}/")), Some(unit.clone()));
                }
                let receipt = keys.receipt(&unit).unwrap();
                prop_assert_eq!(keys.parse_record(receipt.as_str()), Some(unit.name()));
            }
            let prefix = format!("queues/{}/", encode_segment(&queue));
            prop_assert_eq!(queue_name(&prefix), Some(queue));
        }
    }
}
