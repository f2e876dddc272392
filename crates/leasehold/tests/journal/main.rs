//! The directory store's journal: what was reported durable survives a power loss.
#![allow(clippy::unwrap_used)]
#![cfg(target_os = "linux")]

mod disk;
mod power;
mod shared;
mod trouble;

use leasehold::{Durability, Put, When};
use tempfile::TempDir;

use crate::power::*;

#[test]
fn what_was_created_comes_back() {
    let dir = TempDir::new().unwrap();
    let journal = journal_of(dir.path(), async |store| {
        put(&store, "a/b/c", "new", When::Absent).await;
        put(&store, "torn", "whole", When::Absent).await;
        put(&store, "cut", "whole", When::Absent).await;
        put(&store, "mixed", "whole", When::Absent).await;
    });
    std::fs::remove_dir_all(dir.path().join("a")).unwrap();
    std::fs::write(dir.path().join("torn"), "").unwrap();
    std::fs::write(dir.path().join("cut"), "who").unwrap();
    std::fs::write(dir.path().join("mixed"), "\0\0ole").unwrap();
    lose_power(dir.path(), journal);
    let found = read_all(dir.path(), &["a/b/c", "torn", "cut", "mixed"]);
    let whole = Some("whole".to_owned());
    assert_eq!(found, [Some("new".to_owned()), whole.clone(), whole.clone(), whole]);
    assert!(!log(dir.path()).exists());
}

#[test]
fn the_last_of_several_writers_wins_whichever_reached_the_disk() {
    for left_on_disk in ["one", "two", "three", "", "something else"] {
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
        let found = read_one(dir.path(), "x");
        assert_eq!(found.as_deref(), Some("three"), "{left_on_disk:?} was on disk");
    }
}

/// P made it `one` and had not noted that when Q's `two` was acknowledged.
#[test]
fn a_note_that_is_missing_in_between_takes_nothing_away() {
    for left_on_disk in ["zero", "one", "two", ""] {
        let dir = TempDir::new().unwrap();
        let mut before = Journal::new();
        let journal = journal_of(dir.path(), async |store| {
            let zero = put(&store, "x", "zero", When::Absent).await;
            before = snapshot(dir.path());
            let one = put(&store, "x", "one", When::Matches(zero)).await;
            let other = open(dir.path());
            put(&other, "x", "two", When::Matches(one)).await;
            other
        });
        let earlier = |(name, bytes): (String, Vec<u8>)| {
            let was = before.iter().find(|(other, _)| *other == name && name != "floor");
            let bytes = was.map_or(bytes, |(_, bytes)| bytes.clone());
            (name, bytes)
        };
        let journal: Journal = journal.into_iter().map(earlier).collect();
        std::fs::write(dir.path().join("x"), left_on_disk).unwrap();
        lose_power(dir.path(), journal);
        assert_eq!(read_one(dir.path(), "x").as_deref(), Some("two"), "{left_on_disk:?}");
    }
}

#[test]
fn a_volatile_write_in_between_changes_nothing() {
    for left_on_disk in ["zero", "one", "two", ""] {
        let dir = TempDir::new().unwrap();
        let journal = journal_of(dir.path(), async |store| {
            let zero = put(&store, "x", "zero", When::Absent).await;
            let when = When::Matches(zero);
            let one = put_as(&store, "x", "one", when, Durability::Volatile).await;
            put(&store, "x", "two", When::Matches(one)).await;
        });
        std::fs::write(dir.path().join("x"), left_on_disk).unwrap();
        lose_power(dir.path(), journal);
        assert_eq!(read_one(dir.path(), "x").as_deref(), Some("two"), "{left_on_disk:?}");
    }
}

/// That is what volatile means.
#[test]
fn a_later_volatile_write_is_undone_and_a_persisted_one_is_not() {
    let dir = TempDir::new().unwrap();
    let journal = journal_of(dir.path(), async |store| {
        for name in ["volatile", "persisted"] {
            let noted = put(&store, name, "noted", When::Absent).await;
            let when = When::Matches(noted);
            put_as(&store, name, "later", when, Durability::Volatile).await;
        }
        store.persist(&[key("persisted")]).await.unwrap();
    });
    lose_power(dir.path(), journal);
    let found = read_all(dir.path(), &["volatile", "persisted"]);
    assert_eq!(found, [Some("noted".to_owned()), Some("later".to_owned())]);
}

#[test]
fn an_unacknowledged_overwrite_leaves_a_whole_content() {
    // What was there before was noted, or was flushed before there was a journal.
    for (noted, torn, expected) in [
        (true, "", "old"),
        (true, "\0\0\0", "old"),
        (false, "", "new"),
        (false, "n\0w", "new"),
        (false, "ne", "new"),
    ] {
        let dir = TempDir::new().unwrap();
        if !noted {
            let store = open(dir.path());
            runtime().block_on(put(&store, "x", "old", When::Absent));
        }
        let mut journal = journal_of(dir.path(), async |store| {
            if noted {
                put(&store, "x", "old", When::Absent).await;
            }
            put(&store, "x", "new", When::Any).await;
        });
        // The intent is on disk, the commit is not. The rename is, and the data is not: written in
        // place, so that it is the same file.
        lose_last_record(&mut journal);
        std::fs::write(dir.path().join("x"), torn).unwrap();
        lose_power(dir.path(), journal);
        let found = read_one(dir.path(), "x");
        assert_eq!(found.as_deref(), Some(expected), "noted before: {noted}, torn: {torn:?}");
    }
}

#[test]
fn an_unacknowledged_overwrite_that_did_not_reach_the_disk_is_gone() {
    let dir = TempDir::new().unwrap();
    let mut journal = journal_of(dir.path(), async |store| {
        put(&store, "x", "new", When::Absent).await;
    });
    lose_last_record(&mut journal);
    // Another file: the rename did not happen.
    std::fs::rename(dir.path().join("x"), dir.path().join("elsewhere")).unwrap();
    std::fs::write(dir.path().join("x"), "old").unwrap();
    lose_power(dir.path(), journal);
    assert_eq!(read_one(dir.path(), "x").as_deref(), Some("old"));
}

#[test]
fn a_refused_write_never_appears() {
    let dir = TempDir::new().unwrap();
    let journal = journal_of(dir.path(), async |store| {
        put_as(&store, "x", "there", When::Absent, Durability::Volatile).await;
        let write = leasehold::Write::when(When::Absent, leasehold::Proof::Bytes);
        let refused = store.put(&key("x"), "refused".into(), write).await.unwrap();
        assert!(matches!(refused, Put::Refused));
        // Its file goes once that is noted.
        for _ in 0..1000 {
            if leasehold_testkit::temporary_files(dir.path()) == 0 {
                return;
            }
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        panic!("the temporary file of a refused write stays");
    });
    lose_power(dir.path(), journal);
    assert_eq!(read_one(dir.path(), "x").as_deref(), Some("there"));
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
    let found = read_all(dir.path(), &["gone", "again"]);
    assert_eq!(found, [None, Some("second".to_owned())]);
}

/// An object where a folder was, and a folder where an object was.
#[test]
fn objects_and_folders_change_places() {
    let dir = TempDir::new().unwrap();
    let journal = journal_of(dir.path(), async |store| {
        put(&store, "a", "x", When::Absent).await;
        put(&store, "b/c", "x", When::Absent).await;
        delete(&store, "a").await;
        delete(&store, "b/c").await;
        put(&store, "a/d", "second", When::Absent).await;
        put(&store, "b", "second", When::Absent).await;
    });
    std::fs::remove_dir_all(dir.path().join("a")).unwrap();
    std::fs::remove_file(dir.path().join("b")).unwrap();
    std::fs::write(dir.path().join("a"), "x").unwrap();
    std::fs::create_dir(dir.path().join("b")).unwrap();
    std::fs::write(dir.path().join("b/c"), "x").unwrap();
    lose_power(dir.path(), journal);
    let second = Some("second".to_owned());
    let found = read_all(dir.path(), &["a", "a/d", "b/c", "b"]);
    assert_eq!(found, [None, second.clone(), None, second]);
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
    lose_last_record(&mut journal);
    lose_power(dir.path(), journal);
    assert_eq!(read_all(dir.path(), &["first", "last"]), [Some("1".to_owned()), None]);
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
    // The first was removed after it was safely on disk.
    assert_eq!(read_all(dir.path(), &["early", "late"]), [None, Some("x".to_owned())]);
}
