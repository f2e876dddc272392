//! What is in the way of a journal or of a recovery.

use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;

use leasehold::When;
use tempfile::TempDir;

use crate::power::*;

/// Folders with segments that a recovery could not use.
fn set_aside(dir: &Path) -> usize {
    let names = std::fs::read_dir(dir.join(".lh")).unwrap();
    let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.starts_with("log.")).count()
}

#[test]
fn what_is_in_the_way_of_one_key_does_not_harm_the_others() {
    let dir = TempDir::new().unwrap();
    let outside = TempDir::new().unwrap();
    let journal = journal_of(dir.path(), async |store| {
        for name in ["fine", "folder", "link", "socket", "linked/x", "file/x"] {
            put(&store, name, "noted", When::Absent).await;
        }
    });
    let path = |name: &str| dir.path().join(name);
    for name in ["fine", "folder", "link", "socket"] {
        std::fs::remove_file(path(name)).unwrap();
    }
    for name in ["linked", "file"] {
        std::fs::remove_dir_all(path(name)).unwrap();
    }
    std::fs::create_dir(path("folder")).unwrap();
    std::fs::write(path("folder/other"), "by somebody").unwrap();
    std::fs::write(outside.path().join("target"), "not ours").unwrap();
    symlink(outside.path().join("target"), path("link")).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(path("socket")).unwrap();
    symlink(outside.path(), path("linked")).unwrap();
    std::fs::write(path("file"), "by somebody").unwrap();
    lose_power(dir.path(), journal);

    let found = read_all(dir.path(), &["fine", "folder", "folder/other", "file"]);
    let theirs = Some("by somebody".to_owned());
    assert_eq!(found, [Some("noted".to_owned()), None, theirs.clone(), theirs]);
    let target = std::fs::read_to_string(outside.path().join("target")).unwrap();
    assert_eq!(target, "not ours");
    assert!(!outside.path().join("x").exists());
    assert!(!log(dir.path()).exists());
    assert_eq!(set_aside(dir.path()), 1);
    // And that was it: nothing is tried again.
    std::fs::remove_file(path("fine")).unwrap();
    assert_eq!(read_one(dir.path(), "fine"), None);
}

/// Whoever may write to the store might have put it there.
#[test]
fn temporary_files_are_not_written_through_links() {
    let dir = TempDir::new().unwrap();
    let outside = TempDir::new().unwrap();
    let journal = journal_of(dir.path(), async |store| {
        put(&store, "x", "noted", When::Absent).await;
    });
    std::fs::remove_file(dir.path().join("x")).unwrap();
    std::fs::write(dir.path().join("y"), "readable").unwrap();
    std::fs::remove_dir_all(dir.path().join(".lh/tmp")).unwrap();
    symlink(outside.path(), dir.path().join(".lh/tmp")).unwrap();
    lose_power(dir.path(), journal);

    let store = open(dir.path());
    runtime().block_on(async {
        assert_eq!(read(&store, "y").await.as_deref(), Some("readable"));
        // What would be written now might be undone later.
        let write = leasehold::Write::when(When::Any, leasehold::Proof::Bytes);
        store.put(&key("y"), "new".into(), write).await.unwrap_err();
    });
    assert!(std::fs::read_dir(outside.path()).unwrap().next().is_none());
    drop(store);
    std::fs::remove_file(dir.path().join(".lh/tmp")).unwrap();
    assert_eq!(read_one(dir.path(), "x").as_deref(), Some("noted"));
}

#[test]
fn without_a_journal_everything_is_flushed_in_its_place() {
    let dir = TempDir::new().unwrap();
    std::fs::create_dir(dir.path().join(".lh")).unwrap();
    std::fs::write(log(dir.path()), "in the way").unwrap();
    let store = open(dir.path());
    let runtime = runtime();
    runtime.block_on(keep_journal(&store));
    std::fs::remove_file(log(dir.path())).unwrap();
    // That was not final.
    runtime.block_on(keep_journal(&store));
    assert_eq!(segments(dir.path()).len(), 1);
    drop(store);
    assert!(!log(dir.path()).exists());
    assert_eq!(leasehold_testkit::temporary_files(dir.path()), 0);
}

/// Others flushed and raised the floor, but the kernel may have dropped what this one wrote.
#[test]
fn what_a_process_with_failed_flushes_noted_is_mended_below_the_floor() {
    let dir = TempDir::new().unwrap();
    let runtime = runtime();
    let store = open(dir.path());
    let mut journal = runtime.block_on(async {
        keep_journal(&store).await;
        put(&store, "torn", "whole", When::Absent).await;
        put(&store, "replaced", "whole", When::Absent).await;
        let journal = snapshot(dir.path());
        put(&store, "replaced", "later", When::Any).await;
        journal
    });
    // Another's floor.
    std::fs::copy(&segments(dir.path())[0], dir.path().join("aside")).unwrap();
    let other = open(dir.path());
    runtime.block_on(keep_journal(&other));
    drop(other);
    let floor = snapshot(dir.path()).into_iter().find(|(name, _)| name == "floor").unwrap();
    journal.retain(|(name, _)| name != "floor");
    for (name, _) in &mut journal {
        *name = name.replace(".log", ".kept.log");
    }
    journal.push(floor);
    drop(store);
    std::fs::write(dir.path().join("torn"), "").unwrap();
    lose_power(dir.path(), journal);
    let found = read_all(dir.path(), &["torn", "replaced"]);
    assert_eq!(found, [Some("whole".to_owned()), Some("later".to_owned())]);
}

/// Root may be the first to open the store after a boot.
#[test]
fn what_is_recovered_belongs_to_who_wrote_it() {
    let dir = TempDir::new().unwrap();
    let journal = journal_of(dir.path(), async |store| {
        put(&store, "a/b", "noted", When::Absent).await;
    });
    std::fs::remove_dir_all(dir.path().join("a")).unwrap();
    lose_power(dir.path(), journal);
    let mut owner = std::fs::metadata(dir.path()).unwrap().uid();
    if owner == 0 {
        owner = 1234;
        for path in segments(dir.path()) {
            std::os::unix::fs::chown(path, Some(owner), Some(owner)).unwrap();
        }
    }
    assert_eq!(read_one(dir.path(), "a/b").as_deref(), Some("noted"));
    for name in ["a", "a/b"] {
        assert_eq!(std::fs::metadata(dir.path().join(name)).unwrap().uid(), owner, "{name}");
    }
    let mode = |name: &str| std::fs::metadata(dir.path().join(name)).unwrap().mode();
    assert_eq!(mode("a/b") & 0o444, (mode("a") & 0o111) << 2);
}
