//! The lease record: who holds something, since when, until when.
//!
//! Two dialects of one record. Lock files (`{file}.lock`) are written in camel case with `holderId`,
//! `acquiredAt` and `lastHeartbeat`; shard locks and task leases in snake case with `worker_id`,
//! `created_at`, `expires_at` and `heartbeat_at`. Either is understood wherever a lease stands, and
//! records that have only those fields are respected. Fields that we do not know survive a rewrite.

use std::fmt::Write as _;
use std::time::Duration;

use serde_json::{Map, Value};

use crate::cas::Nonce;
use crate::time::StoreTime;

/// The highest token: what every reader of JSON can hold exactly. Given out are those up to half of
/// it and what counts on from there, so that a clock that is centuries ahead leaves room.
pub const MAX_TOKEN: u64 = 1 << 53;

/// How the fields are called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// Lock files: camel case.
    Lock,
    /// Shard locks and task leases: snake case.
    Task,
}

/// Whether somebody holds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// The holder named in the record.
    Held,
    /// Nobody. The record stays so that the next token is higher; it looks expired to others.
    Released,
}

/// A process, recognisable after its number was given to another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    /// Its number.
    pub pid: u32,
    /// When it started, as its system counts it: two processes with one number differ in this.
    pub start: u64,
}

/// Where the holder runs. What is needed to tell at once that it is dead.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The host's name.
    pub host: String,
    /// Which boot of the host: process numbers and the boot clock mean nothing in another.
    pub boot_id: String,
    /// The boot clock when the lease was last renewed.
    pub boot_time: Duration,
    /// The namespace that process numbers belong to. A container has its own.
    pub pid_ns: String,
    /// The holder.
    pub process: Process,
    /// What the holder runs under the lease, if that is another process.
    pub child: Option<Process>,
}

/// Somebody wants the lease and asks for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ask {
    /// Who.
    pub by: String,
    /// When.
    pub at: StoreTime,
}

/// A lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    /// Who holds it, or held it last.
    pub holder: String,
    /// Since when.
    pub acquired_at: Option<StoreTime>,
    /// When it was last renewed.
    pub heartbeat_at: Option<StoreTime>,
    /// Until when, if it is not renewed. For people and for other clients: we judge by age.
    pub expires_at: Option<StoreTime>,
    /// How long after a renewal it is stale.
    pub ttl: Option<Duration>,
    /// The fence: rises with every acquisition.
    pub token: Option<u64>,
    /// Marks the write of this record.
    pub nonce: Option<String>,
    /// Marks the acquisition: kept by every rewrite. Names are shared, and two who take over one
    /// record compute the same token.
    pub lease_id: Option<String>,
    /// Whether it is held.
    pub state: State,
    /// Where the holder runs.
    pub place: Option<Place>,
    /// Who asks for it.
    pub ask: Option<Ask>,
    /// Fields of others.
    pub other: Map<String, Value>,
}

/// The bytes are not a lease record.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a lease record: {0}")]
pub struct LeaseError(String);

/// A field's name in both dialects.
struct Name {
    lock: &'static str,
    task: &'static str,
}

macro_rules! names {
    ($($constant:ident: $lock:literal, $task:literal;)*) => {
        $(const $constant: Name = Name { lock: $lock, task: $task };)*
        const NAMES: &[Name] = &[$(Name { lock: $lock, task: $task }),*];
    };
}

names! {
    HOLDER: "holderId", "worker_id";
    ACQUIRED: "acquiredAt", "created_at";
    HEARTBEAT: "lastHeartbeat", "heartbeat_at";
    EXPIRES: "expiresAt", "expires_at";
    TTL: "ttlMs", "ttl_ms";
    TOKEN: "token", "token";
    NONCE: "nonce", "nonce";
    LEASE_ID: "leaseId", "lease_id";
    STATE: "state", "state";
    HOST: "host", "host";
    BOOT_ID: "bootId", "boot_id";
    BOOT_TIME: "bootTimeMs", "boot_time_ms";
    PID_NS: "pidNamespace", "pid_namespace";
    PID: "pid", "pid";
    START: "startTime", "start_time";
    CHILD_PID: "childPid", "child_pid";
    CHILD_START: "childStartTime", "child_start_time";
    ASKED_BY: "askedBy", "asked_by";
    ASKED_AT: "askedAt", "asked_at";
}

impl Lease {
    /// The record in these bytes, in either dialect.
    pub fn parse(bytes: &[u8]) -> Result<Self, LeaseError> {
        let mut fields: Map<String, Value> =
            serde_json::from_slice(bytes).map_err(|error| LeaseError(error.to_string()))?;
        let mut taken = Fields::default();
        for name in NAMES {
            for key in [name.lock, name.task] {
                if let Some(value) = fields.remove(key) {
                    taken.0.insert(name.lock, value);
                }
            }
        }
        let holder = taken.text(&HOLDER)?.ok_or_else(|| LeaseError("it names no holder".into()))?;
        let state = match taken.text(&STATE)?.as_deref() {
            None | Some("held") => State::Held,
            Some("released") => State::Released,
            Some(other) => return Err(LeaseError(format!("unknown state {other:?}"))),
        };
        let ask = match (taken.text(&ASKED_BY)?, taken.time(&ASKED_AT)?) {
            (Some(by), Some(at)) => Some(Ask { by, at }),
            _ => None,
        };
        Ok(Self {
            holder,
            acquired_at: taken.time(&ACQUIRED)?,
            heartbeat_at: taken.time(&HEARTBEAT)?,
            expires_at: taken.time(&EXPIRES)?,
            ttl: taken.number(&TTL)?.map(Duration::from_millis),
            // One that we never give out, written by hand: from there, no other could be higher.
            token: taken.number(&TOKEN)?.filter(|token| *token <= MAX_TOKEN),
            nonce: taken.text(&NONCE)?,
            lease_id: taken.text(&LEASE_ID)?,
            state,
            place: taken.place()?,
            ask,
            other: fields,
        })
    }

    /// The record's bytes in this dialect: JSON with a final newline, what people look for first.
    ///
    /// Written by hand rather than through a map of values: a lock in a directory takes tens of
    /// microseconds, and that would be a good part of it.
    pub fn to_bytes(&self, dialect: Dialect) -> Vec<u8> {
        let mut out = Writer { text: String::with_capacity(640), dialect };
        out.text(&HOLDER, &self.holder);
        out.time(&ACQUIRED, self.acquired_at);
        out.time(&HEARTBEAT, self.heartbeat_at);
        out.time(&EXPIRES, self.expires_at);
        out.number(&TTL, self.ttl.map(millis));
        out.number(&TOKEN, self.token);
        out.maybe(&NONCE, self.nonce.as_deref());
        out.maybe(&LEASE_ID, self.lease_id.as_deref());
        let state = match self.state {
            State::Held => "held",
            State::Released => "released",
        };
        out.text(&STATE, state);
        if let Some(place) = &self.place {
            out.text(&HOST, &place.host);
            out.text(&BOOT_ID, &place.boot_id);
            out.number(&BOOT_TIME, Some(millis(place.boot_time)));
            out.text(&PID_NS, &place.pid_ns);
            out.number(&PID, Some(place.process.pid.into()));
            out.number(&START, Some(place.process.start));
            out.number(&CHILD_PID, place.child.as_ref().map(|child| child.pid.into()));
            out.number(&CHILD_START, place.child.as_ref().map(|child| child.start));
        }
        out.maybe(&ASKED_BY, self.ask.as_ref().map(|ask| ask.by.as_str()));
        out.time(&ASKED_AT, self.ask.as_ref().map(|ask| ask.at));
        for (key, value) in &self.other {
            // One of ours under the other dialect's name was read as ours, and is not here.
            out.field(key);
            out.text.push_str(&value.to_string());
        }
        out.text.push_str("}\n");
        out.text.into_bytes()
    }

    /// The record with a fresh mark for its next write.
    #[must_use]
    pub fn marked(mut self, nonce: Nonce) -> Self {
        self.nonce = Some(nonce.to_string());
        self
    }
}

/// Writes a JSON object field by field.
struct Writer {
    text: String,
    dialect: Dialect,
}

impl Writer {
    fn field(&mut self, key: &str) {
        self.text.push(if self.text.is_empty() { '{' } else { ',' });
        self.string(key);
        self.text.push(':');
    }

    fn name(&mut self, name: &Name) {
        self.field(match self.dialect {
            Dialect::Lock => name.lock,
            Dialect::Task => name.task,
        });
    }

    fn string(&mut self, text: &str) {
        let plain = |byte: u8| (0x20..0x7f).contains(&byte) && byte != b'"' && byte != b'\\';
        if text.bytes().all(plain) {
            self.text.push('"');
            self.text.push_str(text);
            self.text.push('"');
        } else {
            // Text always serialises.
            self.text.push_str(&serde_json::to_string(text).unwrap_or_default());
        }
    }

    fn text(&mut self, name: &Name, text: &str) {
        self.name(name);
        self.string(text);
    }

    fn maybe(&mut self, name: &Name, text: Option<&str>) {
        if let Some(text) = text {
            self.text(name, text);
        }
    }

    fn time(&mut self, name: &Name, time: Option<StoreTime>) {
        if let Some(time) = time {
            self.name(name);
            self.text.push('"');
            let _ = write!(self.text, "{time}");
            self.text.push('"');
        }
    }

    fn number(&mut self, name: &Name, number: Option<u64>) {
        if let Some(number) = number {
            self.name(name);
            let _ = write!(self.text, "{number}");
        }
    }
}

fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}

/// Our fields of a record, under their camel case names.
#[derive(Default)]
struct Fields(std::collections::BTreeMap<&'static str, Value>);

impl Fields {
    fn take(&mut self, name: &Name) -> Option<Value> {
        self.0.remove(name.lock).filter(|value| !value.is_null())
    }

    fn text(&mut self, name: &Name) -> Result<Option<String>, LeaseError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(LeaseError(format!("{} is not text but {other}", name.lock))),
        }
    }

    fn number(&mut self, name: &Name) -> Result<Option<u64>, LeaseError> {
        match self.take(name) {
            None => Ok(None),
            Some(value) => match value.as_u64() {
                Some(number) => Ok(Some(number)),
                None => Err(LeaseError(format!("{} is not a whole number but {value}", name.lock))),
            },
        }
    }

    fn time(&mut self, name: &Name) -> Result<Option<StoreTime>, LeaseError> {
        match self.text(name)? {
            None => Ok(None),
            Some(text) => match text.parse() {
                Ok(time) => Ok(Some(time)),
                Err(error) => Err(LeaseError(format!("{}: {error}", name.lock))),
            },
        }
    }

    /// All of it, or nothing: half a place proves nothing about the holder.
    fn place(&mut self) -> Result<Option<Place>, LeaseError> {
        let (host, boot_id) = (self.text(&HOST)?, self.text(&BOOT_ID)?);
        let (boot_time, pid_ns) = (self.number(&BOOT_TIME)?, self.text(&PID_NS)?);
        let process = self.process(&PID, &START)?;
        let child = self.process(&CHILD_PID, &CHILD_START)?;
        let (Some(host), Some(boot_id), Some(boot_time), Some(pid_ns), Some(process)) =
            (host, boot_id, boot_time, pid_ns, process)
        else {
            return Ok(None);
        };
        let boot_time = Duration::from_millis(boot_time);
        Ok(Some(Place { host, boot_id, boot_time, pid_ns, process, child }))
    }

    fn process(&mut self, pid: &Name, start: &Name) -> Result<Option<Process>, LeaseError> {
        let (pid, start) = (self.number(pid)?, self.number(start)?);
        Ok(match (pid.and_then(|pid| u32::try_from(pid).ok()), start) {
            (Some(pid), Some(start)) => Some(Process { pid, start }),
            _ => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn full() -> Lease {
        let time = |text: &str| Some(text.parse().unwrap());
        Lease {
            holder: "worker-001".into(),
            acquired_at: time("2026-01-31T09:05:00Z"),
            heartbeat_at: time("2026-01-31T09:05:01Z"),
            expires_at: time("2026-01-31T09:05:04Z"),
            ttl: Some(Duration::from_secs(3)),
            token: Some(1_769_850_300_000_000),
            nonce: Some(Nonce::from_bytes([1; 16]).to_string()),
            lease_id: Some(Nonce::from_bytes([2; 16]).to_string()),
            state: State::Held,
            place: Some(Place {
                host: "pi-4".into(),
                boot_id: "b0a7".into(),
                boot_time: Duration::from_millis(123_456),
                pid_ns: "pid:[4026531836]".into(),
                process: Process { pid: 4711, start: 99 },
                child: Some(Process { pid: 4712, start: 100 }),
            }),
            ask: Some(Ask { by: "worker-002".into(), at: "2026-01-31T09:05:02Z".parse().unwrap() }),
            other: Map::new(),
        }
    }

    #[test]
    fn golden_bytes_are_still_read_and_written() {
        for (dialect, golden) in [
            (Dialect::Lock, &include_bytes!("../../../../golden/lock-1.json")[..]),
            (Dialect::Task, include_bytes!("../../../../golden/lease-1.json")),
        ] {
            assert_eq!(Lease::parse(golden), Ok(full()));
            assert_eq!(
                String::from_utf8_lossy(&full().to_bytes(dialect)),
                String::from_utf8_lossy(golden)
            );
        }
    }

    /// The seeds' own records, as they stand in the documents.
    #[test]
    fn records_of_other_clients_are_understood() {
        let lock = br#"{ "holderId": "worker-001", "acquiredAt": "2024-02-15T10:30:00.000Z",
                         "lastHeartbeat": "2024-02-15T10:30:05.000Z" }"#;
        let lease = Lease::parse(lock).unwrap();
        assert_eq!((lease.holder.as_str(), lease.state), ("worker-001", State::Held));
        assert_eq!((lease.ttl, lease.token, lease.place), (None, None, None));
        let task = br#"{"worker_id":"pi-a","created_at":"2024-02-15T10:30:00Z",
                        "expires_at":"2024-02-15T10:35:00Z"}"#;
        let lease = Lease::parse(task).unwrap();
        assert_eq!(lease.holder, "pi-a");
        assert!(lease.expires_at.is_some());
    }

    #[test]
    fn unknown_fields_survive_a_rewrite() {
        let text = br#"{"worker_id":"w","attempts":3,"x":{"y":[1]}}"#;
        for dialect in [Dialect::Lock, Dialect::Task] {
            let lease = Lease::parse(&Lease::parse(text).unwrap().to_bytes(dialect)).unwrap();
            assert_eq!(lease.other["attempts"], 3);
            assert_eq!(lease.other["x"]["y"][0], 1);
        }
    }

    /// Were it believed, the next token could not be higher, here or anywhere in its stripe.
    #[test]
    fn a_token_that_cannot_be_ours_is_none() {
        for (text, token) in [
            ("18446744073709551615", None),
            ("9007199254740993", None),
            ("9007199254740992", Some(MAX_TOKEN)),
            ("7", Some(7)),
        ] {
            let record = format!(r#"{{"holderId":"a","ttlMs":5000,"token":{text}}}"#);
            let lease = Lease::parse(record.as_bytes()).unwrap();
            assert_eq!((lease.token, lease.ttl), (token, Some(Duration::from_secs(5))));
        }
    }

    #[test]
    fn damage_is_reported_and_not_guessed() {
        for bad in [
            &b""[..],
            b"{",
            b"[]",
            b"{}",
            b"\0\0\0",
            b"{\"holderId\":3}",
            b"{\"holderId\":\"a\",\"token\":-1}",
            b"{\"holderId\":\"a\",\"state\":\"maybe\"}",
            b"{\"holderId\":\"a\",\"lastHeartbeat\":\"soon\"}",
        ] {
            assert!(Lease::parse(bad).is_err(), "{}", String::from_utf8_lossy(bad));
        }
        // Half a place proves nothing, but the lease is one.
        let half = Lease::parse(br#"{"holderId":"a","host":"h","pid":7}"#).unwrap();
        assert_eq!(half.place, None);
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = Lease::parse(&bytes);
        }

        #[test]
        fn any_holder_survives(holder in ".{0,40}", token in 0..=MAX_TOKEN, camel in any::<bool>()) {
            let lease = Lease { holder, token: Some(token), ..full() };
            let dialect = if camel { Dialect::Lock } else { Dialect::Task };
            prop_assert_eq!(Lease::parse(&lease.to_bytes(dialect)), Ok(lease));
        }
    }
}
