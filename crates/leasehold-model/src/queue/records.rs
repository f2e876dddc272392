//! What stands in the store, as small as the checker needs it, and as the product writes it.

use std::time::Duration;

use leasehold_protocol::format::lease::{Dialect, Lease, State};
use leasehold_protocol::format::queue::QueueSettings;
use leasehold_protocol::format::task::{DeadLetter, Receipt, Task, text_payload};
use leasehold_protocol::queue::History as Past;
use leasehold_protocol::settle::Proof;
use leasehold_protocol::time::StoreTime;

use crate::engine::Body;
use crate::lease::{nonce, store_time};

pub(super) const TTL: Duration = Duration::from_secs(8);
pub(super) const TICK: Duration = Duration::from_secs(4);
pub(super) const NAMES: [&str; 3] = ["a", "b", "user"];

pub(super) const WORK: usize = 0;
pub(super) const LEASE: usize = 1;
pub(super) const RECEIPT: usize = 2;
pub(super) const LETTER: usize = 3;

pub(super) fn settings() -> QueueSettings {
    QueueSettings {
        ttl: TTL,
        heartbeat: TICK,
        max_attempts: 2,
        max_crashes: 2,
        backoff: TICK,
        backoff_cap: TICK,
        ..QueueSettings::default()
    }
}

pub(super) fn name(inc: u16) -> String {
    nonce(inc).to_string()
}

pub(super) fn small(text: &str) -> u16 {
    u16::from_str_radix(text.get(text.len().saturating_sub(4)..).unwrap_or(""), 16).unwrap_or(0)
}

pub(super) fn tick_of(time: StoreTime) -> u8 {
    let ticks = time.since(store_time(0)).as_micros().div_ceil(TICK.as_micros());
    u8::try_from(ticks).unwrap_or(u8::MAX)
}

/// Which push of the task.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Push {
    pub(super) inc: u16,
    pub(super) at: u8,
}

/// A task's lease in small.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Small {
    pub(super) holder: u8,
    pub(super) token: u64,
    pub(super) nonce: u16,
    pub(super) id: u16,
    pub(super) held: bool,
    pub(super) since: u8,
    /// Its history, without the texts.
    pub(super) inc: u16,
    pub(super) failures: u8,
    pub(super) crashes: u8,
    pub(super) not_before: Option<u8>,
}

impl Small {
    pub(super) fn past(&self) -> Past {
        Past {
            incarnation: if self.inc == 0 { String::new() } else { name(self.inc) },
            failures: self.failures.into(),
            crashes: self.crashes.into(),
            not_before: self.not_before.map(store_time),
            since: Some(store_time(self.since)),
            ..Past::default()
        }
    }

    pub(super) fn lease(&self) -> Lease {
        let at = store_time(self.since);
        let mut lease = Lease {
            holder: NAMES[usize::from(self.holder)].to_owned(),
            acquired_at: Some(at),
            heartbeat_at: Some(at),
            expires_at: Some(at.plus(TTL)),
            ttl: Some(TTL),
            token: Some(self.token),
            nonce: Some(name(self.nonce)),
            lease_id: Some(name(self.id)),
            state: if self.held { State::Held } else { State::Released },
            place: None,
            ask: None,
            other: serde_json::Map::new(),
        };
        self.past().write(&mut lease);
        lease
    }

    pub(super) fn of(lease: &Lease) -> Self {
        let past = Past::of(lease);
        Self {
            holder: NAMES.iter().position(|name| *name == lease.holder).unwrap_or(0) as u8,
            token: lease.token.unwrap_or(0),
            nonce: small(lease.nonce.as_deref().unwrap_or("")),
            id: small(lease.lease_id.as_deref().unwrap_or("")),
            held: lease.state == State::Held,
            since: lease.acquired_at.map_or(0, tick_of),
            inc: small(&past.incarnation),
            failures: past.failures as u8,
            crashes: past.crashes as u8,
            not_before: past.not_before.map(tick_of),
        }
    }
}

/// What is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stored {
    /// `task.json`.
    Work(Push),
    /// `lease.json`.
    Lease(Small),
    /// The receipt.
    Receipt(Push, u16),
    /// The dead letter.
    Letter(Push, u16),
}

pub(super) fn task(push: Push) -> Task {
    Task {
        id: "t".to_owned(),
        incarnation: name(push.inc),
        pushed_at: Some(store_time(push.at)),
        timeout: None,
        max_attempts: None,
        origin: None,
        payload: text_payload("x"),
    }
}

impl Body for Stored {
    fn bytes(&self) -> Vec<u8> {
        match self {
            Self::Work(push) => task(*push).to_bytes(),
            Self::Lease(lease) => lease.lease().to_bytes(Dialect::Task),
            Self::Receipt(push, nonce) => Receipt {
                id: "t".to_owned(),
                incarnation: name(push.inc),
                worker: String::new(),
                token: 0,
                pushed_at: Some(store_time(push.at)),
                started_at: None,
                completed_at: store_time(0),
                retries: 0,
                result: None,
                results: None,
                replaced: Vec::new(),
                copied: false,
                nonce: name(*nonce),
            }
            .to_bytes(),
            Self::Letter(push, nonce) => DeadLetter {
                task: task(*push),
                failed_at: store_time(0),
                worker: String::new(),
                failures: 0,
                crashes: 0,
                errors: Vec::new(),
                nonce: name(*nonce),
            }
            .to_bytes(),
        }
    }
    fn proof(&self) -> Proof {
        match self {
            Self::Work(push) => Proof::Nonce(nonce(push.inc)),
            Self::Lease(lease) => Proof::Nonce(nonce(lease.nonce)),
            Self::Receipt(_, mark) | Self::Letter(_, mark) => Proof::Nonce(nonce(*mark)),
        }
    }
}
