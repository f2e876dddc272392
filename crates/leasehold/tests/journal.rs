//! The directory store's journal: what was reported durable survives a power loss.
//!
//! A power loss is played: the segments are kept aside as they were at some moment, the files are
//! brought into a state that the kernel might have left on disk, the segments are put back as those
//! of another boot, and the store is opened anew.
#![allow(clippy::unwrap_used)]
#![cfg(target_os = "linux")]

use std::path::{Path, PathBuf};

use leasehold::store::{Connect, StoreUrl};
use leasehold::{Durability, Key, Proof, Put, Store, When, Write};
use tempfile::TempDir;

fn key(name: &str) -> Key {
    Key::new(name).unwrap()
}

fn open(dir: &Path) -> Store {
    Connect::new(StoreUrl::Directory(dir.to_owned())).open().unwrap()
}

async fn put(store: &Store, name: &str, body: &str, when: When) -> leasehold::Version {
    let write = Write::when(when, Proof::Bytes);
    match store.put(&key(name), body.to_owned().into(), write).await.unwrap() {
        Put::Stored(version) => version,
        other => panic!("{name}: {other:?}"),
    }
}

async fn delete(store: &Store, name: &str) {
    let deleted = store.delete(&key(name)).await.unwrap();
    assert!(matches!(deleted, leasehold::Delete::Deleted));
}

async fn read(store: &Store, name: &str) -> Option<String> {
    let object = store.get(&key(name)).await.unwrap()?;
    Some(String::from_utf8(object.body.to_vec()).unwrap())
}

/// Many writers at once, so that a journal is kept; 16 objects `warm/…` come with it.
async fn keep_journal(store: &Store) {
    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..16 {
        let store = store.clone();
        tasks.spawn(async move { put(&store, &format!("warm/{n}"), "warm", When::Absent).await });
    }
    tasks.join_all().await;
}

fn segments(dir: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(dir.join(".lh/log")) else { return Vec::new() };
    entries.map(|entry| entry.unwrap().path()).collect()
}

/// The journal as it is on disk now.
fn snapshot(dir: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    segments(dir).into_iter().map(|path| (path.clone(), std::fs::read(path).unwrap())).collect()
}

/// Puts the segments back as those of an earlier boot.
fn lose_power(dir: &Path, segments: Vec<(PathBuf, Vec<u8>)>) {
    let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let boot_id = boot_id.trim().as_bytes();
    std::fs::create_dir_all(dir.join(".lh/log")).unwrap();
    for (path, mut bytes) in segments {
        let at = bytes.windows(boot_id.len()).position(|window| window == boot_id).unwrap();
        bytes[at] = if bytes[at] == b'0' { b'1' } else { b'0' };
        let end = at + boot_id.len();
        let checksum = xxhash_rust::xxh3::xxh3_64(&bytes[..end]);
        bytes[end..end + 8].copy_from_slice(&checksum.to_le_bytes());
        std::fs::write(path, bytes).unwrap();
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

/// Runs `work` with a journal, and returns the journal as it was at the end of it. The store is
/// closed by then.
fn journal_of<T, F: Future<Output = T>>(
    dir: &Path,
    work: impl FnOnce(Store) -> F,
) -> Vec<(PathBuf, Vec<u8>)> {
    let runtime = runtime();
    let store = open(dir);
    let journal = runtime.block_on(async {
        keep_journal(&store).await;
        let _other = work(store.clone()).await;
        snapshot(dir)
    });
    assert!(!journal.is_empty(), "no journal was kept");
    drop(store);
    drop(runtime);
    assert!(segments(dir).is_empty(), "a clean end leaves no journal");
    journal
}

#[test]
fn what_was_created_comes_back() {
    let dir = TempDir::new().unwrap();
    let journal = journal_of(dir.path(), async |store| {
        put(&store, "a/b/c", "new", When::Absent).await;
        put(&store, "torn", "whole", When::Absent).await;
        put(&store, "cut", "whole", When::Absent).await;
    });
    std::fs::remove_dir_all(dir.path().join("a")).unwrap();
    std::fs::write(dir.path().join("torn"), "").unwrap();
    std::fs::write(dir.path().join("cut"), "who").unwrap();
    lose_power(dir.path(), journal);
    let store = open(dir.path());
    runtime().block_on(async {
        assert_eq!(read(&store, "a/b/c").await.as_deref(), Some("new"));
        assert_eq!(read(&store, "torn").await.as_deref(), Some("whole"));
        assert_eq!(read(&store, "cut").await.as_deref(), Some("whole"));
    });
    assert!(segments(dir.path()).is_empty());
}

#[test]
fn the_last_of_several_writers_wins_whichever_reached_the_disk() {
    for left_on_disk in ["one", "two", "three", ""] {
        let dir = TempDir::new().unwrap();
        let journal = journal_of(dir.path(), async |store| {
            let one = put(&store, "x", "one", When::Absent).await;
            // Another process' journal: the order is told by the notes' stamps.
            let other = open(dir.path());
            let two = put(&other, "x", "two", When::Matches(one)).await;
            put(&store, "x", "three", When::Matches(two)).await;
            assert!(segments(dir.path()).len() > 1, "the other kept a journal of its own");
            other
        });
        std::fs::write(dir.path().join("x"), left_on_disk).unwrap();
        lose_power(dir.path(), journal);
        let store = open(dir.path());
        let found = runtime().block_on(read(&store, "x"));
        assert_eq!(found.as_deref(), Some("three"), "{left_on_disk:?} was on disk");
    }
}

#[test]
fn what_was_written_later_and_reached_the_disk_stays() {
    let dir = TempDir::new().unwrap();
    let journal = journal_of(dir.path(), async |store| {
        let noted = put(&store, "x", "noted", When::Absent).await;
        let write =
            Write::when(When::Matches(noted), Proof::Bytes).durability(Durability::Volatile);
        let put = store.put(&key("x"), "later".into(), write).await.unwrap();
        assert!(matches!(put, Put::Stored(_)));
    });
    lose_power(dir.path(), journal);
    let found = runtime().block_on(read(&open(dir.path()), "x"));
    assert_eq!(found.as_deref(), Some("later"));
}

#[test]
fn what_was_deleted_does_not_come_back() {
    let dir = TempDir::new().unwrap();
    let journal = journal_of(dir.path(), async |store| {
        put(&store, "gone", "x", When::Absent).await;
        put(&store, "again", "x", When::Absent).await;
        delete(&store, "gone").await;
        delete(&store, "again").await;
        put(&store, "again", "second", When::Absent).await;
        // Whoever wants to be sure asks.
        store.persist(&[key("gone")]).await.unwrap();
    });
    // The disk still has the first, and never had the second.
    std::fs::write(dir.path().join("gone"), "x").unwrap();
    std::fs::write(dir.path().join("again"), "x").unwrap();
    lose_power(dir.path(), journal);
    let store = open(dir.path());
    runtime().block_on(async {
        assert_eq!(read(&store, "gone").await, None);
        assert_eq!(read(&store, "again").await.as_deref(), Some("second"));
    });
}

#[test]
fn a_torn_end_of_the_journal_takes_nothing_else_with_it() {
    let dir = TempDir::new().unwrap();
    let mut journal = journal_of(dir.path(), async |store| {
        put(&store, "first", "1", When::Absent).await;
        put(&store, "last", "2", When::Absent).await;
    });
    for name in ["first", "last"] {
        std::fs::remove_file(dir.path().join(name)).unwrap();
    }
    let (_, bytes) = journal.first_mut().unwrap();
    let end = bytes.iter().rposition(|byte| *byte != 0).unwrap();
    bytes[end] ^= 1;
    lose_power(dir.path(), journal);
    let store = open(dir.path());
    runtime().block_on(async {
        assert_eq!(read(&store, "first").await.as_deref(), Some("1"));
        assert_eq!(read(&store, "last").await, None);
    });
}

#[test]
fn forgotten_notes_are_not_read_back() {
    let dir = TempDir::new().unwrap();
    let store = open(dir.path());
    let runtime = runtime();
    let journal = runtime.block_on(async {
        keep_journal(&store).await;
        put(&store, "early", "x", When::Absent).await;
        // Longer than notes are kept: everything is flushed, and the segment used again.
        tokio::time::sleep(std::time::Duration::from_secs(7)).await;
        put(&store, "late", "x", When::Absent).await;
        snapshot(dir.path())
    });
    drop(store);
    std::fs::remove_file(dir.path().join("early")).unwrap();
    std::fs::remove_file(dir.path().join("late")).unwrap();
    lose_power(dir.path(), journal);
    let store = open(dir.path());
    runtime.block_on(async {
        assert_eq!(read(&store, "early").await, None, "removed after it was safely on disk");
        assert_eq!(read(&store, "late").await.as_deref(), Some("x"));
    });
}

#[test]
fn journals_of_the_dead_are_put_away_and_those_of_the_living_are_not() {
    let dir = TempDir::new().unwrap();
    let store = open(dir.path());
    runtime().block_on(keep_journal(&store));
    let living = segments(dir.path());
    assert_eq!(living.len(), 1);
    // As one that was killed leaves it: not locked, of this boot.
    std::fs::copy(&living[0], dir.path().join(".lh/log/0000-1.log")).unwrap();
    let other = open(dir.path());
    assert_eq!(segments(dir.path()), living);
    drop(other);
    drop(store);
    assert!(!dir.path().join(".lh/log").exists());
}
