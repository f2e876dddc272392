//! What a queue stores about its tasks: the task, its receipt, its dead letter.
//!
//! Each names the task's *incarnation*, which every push and every retry makes anew. A record about
//! another incarnation says nothing about this one (FIELD.md rows 22, 23).

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::duration;
use crate::time::StoreTime;

/// A payload or result: JSON as it was given.
pub type Json = Box<RawValue>;

/// `task.json`, and a line of `tasks.jsonl`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Task {
    /// Its name. Within a bundle it is not written: it is the bundle's, with a number.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub id: String,
    /// Which push of it this is. Empty within a bundle, which has one for all.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub incarnation: String,
    /// When it was pushed, by the store's clock.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pushed_at: Option<StoreTime>,
    /// How long one attempt may take.
    #[serde(default, with = "duration::option", skip_serializing_if = "Option::is_none")]
    pub timeout: Option<Duration>,
    /// How often it may fail before it is given up, if not as often as the queue says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_attempts: Option<u32>,
    /// In a node's replica: the version of the object in the bucket that this is a copy of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<String>,
    /// What is to be done.
    pub payload: Json,
}

/// The stored bytes cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a record of a queue: {0}")]
pub struct RecordError(String);

impl Task {
    /// The task in these bytes.
    ///
    /// What another client put there without our envelope is a payload as a whole: JSON as it is,
    /// other text as a JSON text, other bytes as `{"hex": …}`. Its incarnation is `mark`: what tells this
    /// object from another with the same bytes.
    pub fn parse(bytes: &[u8], id: &str, mark: &str) -> Self {
        if let Ok(mut task) = serde_json::from_slice::<Self>(bytes)
            && !task.incarnation.is_empty()
        {
            task.id = id.to_owned();
            return task;
        }
        let payload = match std::str::from_utf8(bytes) {
            Ok(text) => {
                serde_json::from_str::<Json>(text.trim()).unwrap_or_else(|_| text_payload(text))
            }
            Err(_) => {
                let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
                serde_json::value::to_raw_value(&serde_json::json!({ "hex": hex }))
                    .unwrap_or_default()
            }
        };
        Self {
            id: id.to_owned(),
            incarnation: mark.to_owned(),
            pushed_at: None,
            timeout: None,
            max_attempts: None,
            origin: None,
            payload,
        }
    }

    /// Its bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        line(self)
    }
}

/// A text as a payload or result.
pub fn text_payload(text: &str) -> Json {
    // Text always serialises.
    serde_json::value::to_raw_value(text).unwrap_or_default()
}

/// The text behind a payload that is one; any other as it stands.
pub fn plain_text(payload: &RawValue) -> String {
    serde_json::from_str(payload.get()).unwrap_or_else(|_| payload.get().to_owned())
}

/// `completed/{task}.json`: the first finisher's, and the only one.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Receipt {
    /// Which task, or which bundle.
    pub id: String,
    /// Which push of it.
    pub incarnation: String,
    /// Who did it.
    pub worker: String,
    /// The fence of whoever did it.
    pub token: u64,
    /// When it was pushed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pushed_at: Option<StoreTime>,
    /// When it was claimed by whoever did it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_at: Option<StoreTime>,
    /// When it was done, by the store's clock.
    pub completed_at: StoreTime,
    /// How often it failed or crashed before.
    #[serde(default)]
    pub retries: u32,
    /// What came out of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub result: Option<Json>,
    /// What came out of each task of a bundle; `null` for those that left it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub results: Option<Vec<Option<Json>>>,
    /// Those of other pushes whose place it took, where it cannot be told which push came first. They
    /// were recorded all the same, and are not recorded again.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub replaced: Vec<Replaced>,
    /// In a node's replica: it came from the bucket, and the bucket need not be told.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub copied: bool,
    /// Marks the write of this record.
    #[serde(default)]
    pub nonce: String,
}

/// A receipt whose place another took.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Replaced {
    /// Which push it was about.
    pub incarnation: String,
    /// The mark of its write.
    #[serde(default)]
    pub nonce: String,
}

impl Receipt {
    /// The receipt in these bytes.
    pub fn parse(bytes: &[u8]) -> Result<Self, RecordError> {
        serde_json::from_slice(bytes).map_err(|error| RecordError(error.to_string()))
    }

    /// Whether it says that this push is done.
    pub fn is_about(&self, incarnation: &str) -> bool {
        self.pushes().any(|done| done == incarnation)
    }

    /// Which push it is about: this one, if that is among them.
    pub fn about<'a>(&'a self, ours: &'a str) -> &'a str {
        if self.is_about(ours) { ours } else { &self.incarnation }
    }

    /// The pushes that are done by what it says.
    pub fn pushes(&self) -> impl Iterator<Item = &str> {
        let replaced = self.replaced.iter().map(|replaced| replaced.incarnation.as_str());
        std::iter::once(self.incarnation.as_str()).chain(replaced)
    }

    /// Whether the receipt with this mark was recorded, as it or before it.
    pub fn has_recorded(&self, nonce: &str) -> bool {
        self.nonce == nonce || self.replaced.iter().any(|replaced| replaced.nonce == nonce)
    }

    /// Its bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        line(self)
    }
}

/// What went wrong with a task, once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// When, by the store's clock.
    pub at: StoreTime,
    /// Who had it.
    pub worker: String,
    /// Whether the worker vanished rather than reporting it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub crash: bool,
    /// What it said.
    pub error: String,
}

/// `failed/{task}.json`: a dead letter.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct DeadLetter {
    /// The task as it was.
    #[serde(flatten)]
    pub task: Task,
    /// When it was given up.
    pub failed_at: StoreTime,
    /// Who gave it up.
    pub worker: String,
    /// How often it failed.
    #[serde(default)]
    pub failures: u32,
    /// How often whoever ran it vanished.
    #[serde(default)]
    pub crashes: u32,
    /// The last of what went wrong, oldest first.
    #[serde(default)]
    pub errors: Vec<Failure>,
    /// Marks the write of this record.
    #[serde(default)]
    pub nonce: String,
}

/// A dead letter without what `flatten` cannot carry: raw JSON has to be read on its own.
#[derive(Deserialize)]
struct DeadLetterFields {
    failed_at: StoreTime,
    worker: String,
    #[serde(default)]
    failures: u32,
    #[serde(default)]
    crashes: u32,
    #[serde(default)]
    errors: Vec<Failure>,
    #[serde(default)]
    nonce: String,
}

impl DeadLetter {
    /// The dead letter in these bytes.
    pub fn parse(bytes: &[u8]) -> Result<Self, RecordError> {
        let bad = |error: serde_json::Error| RecordError(error.to_string());
        let task: Task = serde_json::from_slice(bytes).map_err(bad)?;
        let fields: DeadLetterFields = serde_json::from_slice(bytes).map_err(bad)?;
        let DeadLetterFields { failed_at, worker, failures, crashes, errors, nonce } = fields;
        Ok(Self { task, failed_at, worker, failures, crashes, errors, nonce })
    }

    /// Its bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        line(self)
    }
}

/// The name of a task of a bundle.
pub fn bundle_task(bundle: &str, n: u32) -> String {
    format!("{bundle}.{n}")
}

/// The lines of `tasks.jsonl`: the first is about the bundle, each other is a task.
#[derive(Debug, Clone)]
pub struct Bundle {
    /// Which push of it this is.
    pub incarnation: String,
    /// When it was pushed.
    pub pushed_at: Option<StoreTime>,
    /// In a node's replica: the version of the object in the bucket that this is a copy of.
    pub origin: Option<String>,
    /// Its tasks.
    pub tasks: Vec<Task>,
}

#[derive(Serialize, Deserialize)]
struct BundleHead {
    incarnation: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pushed_at: Option<StoreTime>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    origin: Option<String>,
    tasks: u32,
}

impl Bundle {
    /// The bundle in these bytes. Its tasks have names and its incarnation.
    pub fn parse(bytes: &[u8], id: &str) -> Result<Self, RecordError> {
        let bad = |error: serde_json::Error| RecordError(error.to_string());
        let text = std::str::from_utf8(bytes).map_err(|error| RecordError(error.to_string()))?;
        let mut lines = text.lines();
        let head = lines.next().ok_or_else(|| RecordError("it is empty".into()))?;
        let head: BundleHead = serde_json::from_str(head).map_err(bad)?;
        let mut tasks = Vec::new();
        for (n, line) in lines.enumerate() {
            let mut task: Task = serde_json::from_str(line).map_err(bad)?;
            // Never a name of its own: two bundles could have the same, and one would be lost when
            // both leave.
            task.id = bundle_task(id, n as u32);
            // Of its own, so that a task that leaves the bundle is told from the others.
            task.incarnation = format!("{}.{n}", head.incarnation);
            task.pushed_at = task.pushed_at.or(head.pushed_at);
            tasks.push(task);
        }
        if tasks.len() != head.tasks as usize {
            let (found, said) = (tasks.len(), head.tasks);
            return Err(RecordError(format!("{found} tasks instead of {said}")));
        }
        let BundleHead { incarnation, pushed_at, origin, .. } = head;
        Ok(Self { incarnation, pushed_at, origin, tasks })
    }

    /// Its bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let head = BundleHead {
            incarnation: self.incarnation.clone(),
            pushed_at: self.pushed_at,
            origin: self.origin.clone(),
            tasks: self.tasks.len() as u32,
        };
        let mut bytes = line(&head);
        for task in &self.tasks {
            bytes.extend(one_line(line(task)));
        }
        bytes
    }

    /// The same bytes as a copy of the object in this version, or as no copy: the tasks' lines stay as
    /// they are.
    pub fn copied(bytes: &[u8], origin: Option<&str>) -> Result<Vec<u8>, RecordError> {
        let bad = |error: serde_json::Error| RecordError(error.to_string());
        let end = bytes.iter().position(|byte| *byte == b'\n').unwrap_or(bytes.len());
        let mut head: BundleHead = serde_json::from_slice(&bytes[..end]).map_err(bad)?;
        head.origin = origin.map(str::to_owned);
        let mut copy = line(&head);
        copy.extend(bytes.get(end + 1..).unwrap_or_default());
        Ok(copy)
    }
}

/// The same JSON without line breaks but the last: a payload is written as it was given, which may be
/// on many lines. They can only stand between tokens, where a space means the same.
fn one_line(mut bytes: Vec<u8>) -> Vec<u8> {
    if let Some((_, json)) = bytes.split_last_mut() {
        json.iter_mut().filter(|byte| matches!(byte, b'\n' | b'\r')).for_each(|byte| *byte = b' ');
    }
    bytes
}

/// JSON and a line break. Numbers and text always serialise.
fn line(value: &impl Serialize) -> Vec<u8> {
    let mut bytes = serde_json::to_vec(value).unwrap_or_default();
    bytes.push(b'\n');
    bytes
}

#[cfg(test)]
mod tests;
