//! Stored and typed bytes: the checks that the fuzzers run too, on generated input and on every input
//! that once failed.

#![allow(clippy::unwrap_used)] // in a test, a failure is a panic

mod checks;

use proptest::prelude::*;

/// Pieces of what is stored, put together at random: closer to the formats than random bytes are.
fn pieces() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop_oneof![
        4 => prop::sample::select(vec![
            "{", "}", "[", "]", ":", ",", "\"", "null", "true", "0", "-1", "1e400", "3000",
            "18446744073709551615", "30001769850300000000", "\"\\u0000\"", "\n", "\r\n", "\x1e", "\x1f",
            "\x1b", "\x1bn", "%2F", "%", "/", "..", "a", "x.de", "ü", "2026-01-31T09:05:00.123456Z",
            "9999-12-31T23:59:59Z", "250ms", "7d", "0-13,15", "\"holderId\":\"a\"", "\"worker_id\":\"b\"",
            "\"token\":5", "\"ttl_ms\":0", "\"state\":\"released\"", "\"incarnation\":\"i\"",
            "\"payload\":1", "\"pushed_at\":\"2026-01-31T09:05:00Z\"", "\"tasks\":1", "\"name\":\"n\"",
            "\"resources\":[{\"schema\":{\"fields\":[]}}]", "\"leasehold\":{\"format\":1,\"width\":2}",
            "queues/q/pending/t/lease.json", "indexes/i/inbox/00/", "shards/00.usv",
        ]).prop_map(|text| text.as_bytes().to_vec()),
        1 => prop::collection::vec(any::<u8>(), 0..12),
    ];
    prop::collection::vec(piece, 0..12).prop_map(|pieces| pieces.concat())
}

/// Frozen records with a few bytes changed.
fn damaged() -> impl Strategy<Value = Vec<u8>> {
    let golden = |name: &str| {
        std::fs::read(format!("{}/../../golden/{name}", env!("CARGO_MANIFEST_DIR"))).unwrap()
    };
    let records = [
        "lock-1.json",
        "lease-1.json",
        "task-1.json",
        "receipt-1.json",
        "dead-letter-1.json",
        "tasks-1.jsonl",
        "datapackage-1.json",
        "statistics-1.json",
        "leasehold-1.json",
        "shard-1.usv",
    ];
    let records: Vec<_> = records.iter().map(|name| golden(name)).collect();
    let changes = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4);
    (prop::sample::select(records), changes).prop_map(|(mut record, changes)| {
        for (at, byte) in changes {
            let at = at.index(record.len());
            record[at] = byte;
        }
        record
    })
}

fn all(bytes: &[u8]) {
    checks::usv_reader(bytes);
    checks::rows(bytes);
    checks::merging(bytes);
    checks::leases(bytes);
    checks::tasks(bytes);
    checks::datapackages(bytes);
    checks::statistics(bytes);
    checks::keys(bytes);
    checks::settings(bytes);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_is_put_together(bytes in pieces()) {
        all(&bytes);
    }

    #[test]
    fn whatever_is_damaged(bytes in damaged()) {
        all(&bytes);
    }
}

/// Inputs that a fuzzer found, each with what was wrong.
#[test]
fn what_once_failed() {
    // A number of another client that only fits a float came back as another after two rewrites.
    checks::leases(br#"{"worker_id":"w","tl_ms":30001769850300000000,"ttl_ms":0}"#);
}
