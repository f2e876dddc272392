//! Counts every request, so that what a bucket costs is known and not guessed.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use serde::Serialize;

use super::backend::Kind;

/// What sort of request it is. Stores bill by these.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Class {
    /// Writes an object, or a part of one.
    Put,
    /// Reads an object.
    Get,
    /// Reads what the store tells of an object.
    Head,
    /// A page of a listing.
    List,
    /// Deletes one object, or a batch.
    Delete,
    /// Anything else, such as fetching credentials.
    Other,
}

const CLASSES: usize = 6;

/// Counts requests, bytes and retries. Shared by all clones of a store.
#[derive(Debug, Default)]
pub struct Meter {
    requests: [AtomicU64; CLASSES],
    sent: AtomicU64,
    received: AtomicU64,
    retries: AtomicU64,
}

impl Meter {
    /// Counts a request with this many bytes of body.
    pub fn request(&self, class: Class, sent: u64) {
        self.requests[class as usize].fetch_add(1, Relaxed);
        self.sent.fetch_add(sent, Relaxed);
    }

    /// Counts bytes of body that came back.
    pub fn received(&self, bytes: u64) {
        self.received.fetch_add(bytes, Relaxed);
    }

    /// Counts a request that had to be sent again.
    pub fn retried(&self) {
        self.retries.fetch_add(1, Relaxed);
    }

    /// What was counted so far.
    pub fn usage(&self) -> Usage {
        let count = |class: Class| self.requests[class as usize].load(Relaxed);
        Usage {
            put: count(Class::Put),
            get: count(Class::Get),
            head: count(Class::Head),
            list: count(Class::List),
            delete: count(Class::Delete),
            other: count(Class::Other),
            bytes_sent: self.sent.load(Relaxed),
            bytes_received: self.received.load(Relaxed),
            retries: self.retries.load(Relaxed),
        }
    }
}

/// Requests by class, bytes of body, and retries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, serde::Deserialize)]
pub struct Usage {
    /// Objects written.
    pub put: u64,
    /// Objects read.
    pub get: u64,
    /// Objects asked about.
    pub head: u64,
    /// Pages listed.
    pub list: u64,
    /// Deletes, a batch counting once.
    pub delete: u64,
    /// Other requests.
    pub other: u64,
    /// Bytes of body sent.
    pub bytes_sent: u64,
    /// Bytes of body received.
    pub bytes_received: u64,
    /// Requests that were sent again, already counted above.
    pub retries: u64,
}

impl Usage {
    /// What was used since `earlier`.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        self.combine(earlier, u64::saturating_sub)
    }

    /// Both together.
    #[must_use]
    pub fn plus(&self, other: &Self) -> Self {
        self.combine(other, u64::saturating_add)
    }

    fn combine(&self, other: &Self, f: fn(u64, u64) -> u64) -> Self {
        Self {
            put: f(self.put, other.put),
            get: f(self.get, other.get),
            head: f(self.head, other.head),
            list: f(self.list, other.list),
            delete: f(self.delete, other.delete),
            other: f(self.other, other.other),
            bytes_sent: f(self.bytes_sent, other.bytes_sent),
            bytes_received: f(self.bytes_received, other.bytes_received),
            retries: f(self.retries, other.retries),
        }
    }

    /// All requests.
    pub fn requests(&self) -> u64 {
        self.put + self.get + self.head + self.list + self.delete + self.other
    }

    /// The requests at list price, in dollars. Bytes inside a cloud's region are free, and leaving
    /// it they cost what the provider says: they are not in this figure.
    pub fn dollars(&self, prices: &Prices) -> f64 {
        let write = (self.put + self.list) as f64 * prices.write;
        let read = (self.get + self.head) as f64 * prices.read;
        (write + read) / 1000.0
    }
}

/// Dollars per 1,000 requests. Deletes are free everywhere.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Prices {
    /// PUT and LIST.
    pub write: f64,
    /// GET and HEAD.
    pub read: f64,
}

impl Prices {
    /// The list prices of a kind of store, in its cheapest usual region, November 2026.
    pub fn of(kind: Kind) -> Self {
        match kind {
            Kind::Directory | Kind::Memory => Self { write: 0.0, read: 0.0 },
            Kind::S3 | Kind::Gcs => Self { write: 0.005, read: 0.0004 },
            Kind::Azure => Self { write: 0.0065, read: 0.0005 },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_million_puts_on_s3_cost_five_dollars() {
        let usage = Usage { put: 1_000_000, delete: 1_000_000, ..Usage::default() };
        assert_eq!(usage.dollars(&Prices::of(Kind::S3)), 5.0);
        assert_eq!(usage.dollars(&Prices::of(Kind::Directory)), 0.0);
    }

    #[test]
    fn usage_is_counted_by_class() {
        let meter = Meter::default();
        meter.request(Class::Put, 10);
        meter.request(Class::Get, 0);
        let before = meter.usage();
        meter.request(Class::List, 0);
        meter.received(7);
        meter.retried();
        let since = meter.usage().since(&before);
        assert_eq!(since, Usage { list: 1, bytes_received: 7, retries: 1, ..Usage::default() });
        assert_eq!(before.plus(&since), meter.usage());
        assert_eq!(meter.usage().requests(), 3);
    }
}
