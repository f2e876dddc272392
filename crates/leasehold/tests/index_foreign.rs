//! Files that other tools put into an index: half-written, unreadable, of any size and name. None is lost,
//! none is in the way of the others.

#![allow(clippy::unwrap_used)] // in a test, a failure is a panic

use std::fs::File;
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use leasehold::env::Env;
use leasehold::index::{CompactOptions, Field, Index, NewIndex, Outcome, Shard, Width};
use leasehold::store::memory::Memory;
use leasehold::store::{Connect, Put, StoreUrl, Write};
use leasehold::{ErrorKind, Key, Store, StoreSettings};
use leasehold_testkit::gate::{Gated, Verb};
use leasehold_testkit::written_ago;
use serde_json::{Value, json};

const KEY: &str = "example.com";

async fn index(store: &Store) -> Index {
    let fields = ["domain:domain", "n:integer"].map(|name| Field::parse(name).unwrap());
    let new = NewIndex::with_fields(fields.to_vec()).unwrap();
    Index::create(store, "domains", new).await.unwrap()
}

/// An index in a directory, and that.
async fn in_a_directory() -> (tempfile::TempDir, Index, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let store = Connect::new(StoreUrl::Directory(path.clone())).open().unwrap();
    (folder, index(&store).await, path.join("indexes/domains"))
}

async fn drop_file(store: &Store, key: &str, body: impl Into<bytes::Bytes>) {
    let put = store.put(&Key::new(key).unwrap(), body.into(), Write::any()).await;
    assert!(matches!(put.unwrap(), Put::Stored(_)));
}

fn row(key: &str, n: i64) -> String {
    format!("{key}\x1f{n}\x1f2024-02-15T10:30:05.000000Z\n")
}

async fn n(index: &Index, key: &str) -> Option<Value> {
    index.get_json(key).await.unwrap().map(|record| record["n"].clone())
}

async fn scanned(index: &Index) -> Vec<String> {
    let mut scan = index.scan(1).await.unwrap();
    let (mut seen, schema) = (Vec::new(), index.schema());
    while let Some(chunk) = scan.next().await.unwrap() {
        for row in chunk.records(&schema) {
            seen.push(schema.read_json(row)["domain"].as_str().unwrap().to_owned());
        }
    }
    seen.sort();
    seen
}

/// How many were left, and how many records were taken in.
async fn compact(index: &Index) -> (u64, u64) {
    let pass = index.compact().await.unwrap();
    (pass.shards.iter().map(|done| done.left).sum(), pass.records())
}

const SECOND: Duration = Duration::from_secs(1);

/// A tool opens its file, a compiler comes by, the tool writes and closes: what it wrote is there.
#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_is_being_written_is_left_alone() {
    for inbox in ["example.com.usv", "inbox/a3/theirs.usv"] {
        let (_folder, index, base) = in_a_directory().await;
        // Beside it, a record of ours, which is not held up, and whose sweep does not take it along.
        index
            .put(&json!({"domain": KEY, "n": 1, "updated_at": "2020-01-01T00:00:00Z"}))
            .await
            .unwrap();
        let path = base.join(inbox);
        let mut file = File::create(&path).unwrap();
        assert_eq!(compact(&index).await, (1, 1), "{inbox}: empty");
        assert_eq!(n(&index, KEY).await, Some(json!(1)));
        let whole = row(KEY, 7);
        let (half, rest) = whole.split_at(14);
        file.write_all(half.as_bytes()).unwrap();
        file.flush().unwrap();
        written_ago(&path, 30 * SECOND);
        assert_eq!(compact(&index).await, (1, 0), "{inbox}: half a row");
        file.write_all(rest.as_bytes()).unwrap();
        assert_eq!(compact(&index).await, (1, 0), "{inbox}: just written");
        assert_eq!(n(&index, KEY).await, Some(json!(7)), "and seen all the same");
        assert_eq!(scanned(&index).await, [KEY]);
        drop(file);
        written_ago(&path, 6 * SECOND);
        assert_eq!(compact(&index).await, (0, 1), "{inbox}: done");
        assert!(!path.exists());
        assert_eq!(n(&index, KEY).await, Some(json!(7)));
        assert!(index.quarantined().await.unwrap().is_empty());
        assert!(index.verify().await.unwrap().findings.is_empty());
    }
}

/// One that stays unfinished is taken for what it is, and one from the future does not wait for that.
#[tokio::test(flavor = "multi_thread")]
async fn no_file_waits_for_ever() {
    let (_folder, index, base) = in_a_directory().await;
    let path = base.join("example.com.usv");
    std::fs::write(&path, row(KEY, 1).trim_end()).unwrap();
    written_ago(&path, 61 * SECOND);
    assert_eq!(compact(&index).await, (0, 1));
    std::fs::write(&path, "").unwrap();
    written_ago(&path, 61 * SECOND);
    assert_eq!(compact(&index).await, (0, 0));
    assert!(!path.exists());
    std::fs::write(&path, row(KEY, 2)).unwrap();
    let file = File::options().write(true).open(&path).unwrap();
    file.set_modified(file.metadata().unwrap().modified().unwrap() + 7200 * SECOND).unwrap();
    assert_eq!(compact(&index).await, (0, 1));
    assert!(!path.exists());
}

/// FIELD.md row 12: an older record in a file that was left would be back.
#[tokio::test(flavor = "multi_thread")]
async fn deletions_are_kept_as_long_as_a_file_is_left() {
    let (_folder, index, base) = in_a_directory().await;
    index.delete(KEY).await.unwrap();
    let path = base.join("example.com.usv");
    std::fs::write(&path, row(KEY, 1)).unwrap();
    let before = index.store().now().await.unwrap().plus(SECOND).as_micros();
    let options = CompactOptions { purge_before: Some(before), ..CompactOptions::default() };
    let shard = Shard::of(KEY, Width::USUAL);
    let done = index.compact_one(shard, &options).await.unwrap();
    assert_eq!((done.left, done.counts.purged), (1, 0));
    written_ago(&path, 6 * SECOND);
    assert_eq!(compact(&index).await, (0, 1));
    assert_eq!(n(&index, KEY).await, None);
}

fn gated(memory: &Memory) -> (Arc<Gated>, Store) {
    let gate = Arc::new(Gated::new(Arc::new(memory.client(Env::system()))));
    let store = Store::new(gate.clone(), Env::system(), StoreSettings::default()).unwrap();
    (gate, store)
}

/// One that belongs to somebody else stops neither its shard nor a query. One of ours does: it was
/// acknowledged.
#[tokio::test]
async fn an_unreadable_file_is_left_alone() {
    let memory = Memory::new(Env::system());
    let (gate, store) = gated(&memory);
    let index = index(&store).await;
    for theirs in ["indexes/domains/example.com.usv", "indexes/domains/inbox/a3/theirs.usv"] {
        drop_file(&store, theirs, row("theirs.example", 7)).await;
        index.put(&json!({"domain": KEY, "n": 1})).await.unwrap();
        let denied = || gate.fail(Verb::Get, theirs, ErrorKind::Denied);
        denied();
        assert_eq!(scanned(&index).await, [KEY]);
        if theirs.contains("inbox") {
            denied();
            assert_eq!(n(&index, KEY).await, Some(json!(1)));
        }
        denied();
        let pass = index.compact().await.unwrap();
        let left: u64 = pass.shards.iter().map(|done| done.left).sum();
        assert_eq!((left, pass.count(|outcome| *outcome == Outcome::Published)), (1, 1));
        assert!(store.head(&Key::new(theirs).unwrap()).await.unwrap().is_some());
        assert!(store.delete(&Key::new(theirs).unwrap()).await.is_ok());
    }
    index.put(&json!({"domain": KEY, "n": 2})).await.unwrap();
    gate.fail(Verb::Get, "inbox/a3/a379", ErrorKind::Denied);
    assert_eq!(index.compact().await.unwrap_err().kind(), ErrorKind::Denied);
}

/// A file without ends of rows goes to quarantine in parts, none of which is taken for a record.
#[tokio::test]
async fn a_row_that_is_too_long_is_quarantined_in_parts() {
    let store = Store::memory();
    let index = index(&store).await;
    // Where the first part ends, something begins that looks like a row.
    let mut body = vec![b'x'; 5 << 20];
    body.extend_from_slice(row("evil.example", 6).as_bytes());
    body.extend_from_slice(row(KEY, 7).as_bytes());
    body.extend_from_slice(&vec![b'y'; 9 << 20]);
    drop_file(&store, "indexes/domains/example.com.usv", body.clone()).await;
    assert_eq!(scanned(&index).await, [KEY]);
    let (left, _) = compact(&index).await;
    assert_eq!((left, scanned(&index).await), (0, vec![KEY.to_owned()]));
    assert_eq!(n(&index, KEY).await, Some(json!(7)));
    let quarantined = index.quarantined().await.unwrap();
    let mut kept = 0;
    for entry in &quarantined {
        assert!(entry.reason.reasons[0].contains("part of a row"), "{entry:?}");
        let (_, rows) = index.show_quarantined(&entry.id).await.unwrap().unwrap();
        assert!(rows.len() <= 6 << 20);
        kept += rows.len() - 1;
    }
    assert_eq!(kept, body.len() - row(KEY, 7).len() - "\n".len(), "nothing of it is lost");
    assert!(index.verify().await.unwrap().findings.is_empty());
}

#[tokio::test]
async fn a_mark_before_the_first_row_is_not_part_of_the_key() {
    let store = Store::memory();
    let index = index(&store).await;
    for name in ["example.com", "inbox/a3/theirs"] {
        let file = format!("indexes/domains/{name}.usv");
        drop_file(&store, &file, format!("\u{feff}{}", row(KEY, 7))).await;
        assert_eq!(n(&index, KEY).await, Some(json!(7)));
        assert_eq!(scanned(&index).await, [KEY]);
        assert_eq!(compact(&index).await, (0, 1));
        assert!(index.quarantined().await.unwrap().is_empty());
    }
}

/// What nobody will ever read is at least counted.
#[tokio::test(flavor = "multi_thread")]
async fn files_that_mean_nothing_are_counted() {
    let (_folder, index, base) = in_a_directory().await;
    index.put(&json!({"domain": KEY, "n": 1})).await.unwrap();
    std::fs::write(base.join("example.com.usv"), row(KEY, 2)).unwrap();
    assert_eq!(index.status(false).await.unwrap().unknown, 0);
    for name in
        ["50%.usv", "a%2Fb.usv", "notes.txt", "inbox/A3/x.usv", "inbox/a3/x.tmp", "inbox/a/y.usv"]
    {
        let path = base.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, row(KEY, 3)).unwrap();
    }
    std::os::unix::fs::symlink("example.com.usv", base.join("link.usv")).unwrap();
    std::fs::create_dir(base.join("folder")).unwrap();
    std::fs::write(base.join("folder/x.usv"), row(KEY, 3)).unwrap();
    let status = index.status(true).await.unwrap();
    assert_eq!((status.unknown, status.flat_files, status.total().inbox_objects), (8, 1, 1));
    index.compact().await.unwrap();
    assert_eq!(index.status(true).await.unwrap().unknown, 8);
    assert_eq!(n(&index, KEY).await, Some(json!(1)));
}
