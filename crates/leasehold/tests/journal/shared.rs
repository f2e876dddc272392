//! Several processes, and what they must not do to each other.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use leasehold::When;
use tempfile::TempDir;

use crate::power::*;

pub const DIR: &str = "LEASEHOLD_TEST_DIR";

/// This program again, running one of its ignored tests on `dir`.
pub fn child(test: &str, dir: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--ignored", "--nocapture", "--test-threads=1"])
        .env(DIR, dir)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Not a test: another process, which notes `task` and waits to be killed.
#[test]
#[ignore = "is started by another test"]
fn child_notes_a_task() {
    let Some(dir) = std::env::var_os(DIR) else { return };
    let store = open(Path::new(&dir));
    runtime().block_on(async {
        keep_journal(&store).await;
        put(&store, "task", "x", When::Absent).await;
        println!("\nnoted");
        std::future::pending::<()>().await;
    });
}

#[test]
fn a_persisted_delete_is_final_whoever_noted_the_object_and_died() {
    let dir = TempDir::new().unwrap();
    let mut writer = child("shared::child_notes_a_task", dir.path());
    let mut lines = BufReader::new(writer.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap() == "noted"));
    writer.kill().unwrap();
    writer.wait().unwrap();
    let dead = snapshot(dir.path());
    let is_dead = |name: &str| name != "floor" && dead.iter().any(|(other, _)| *other == name);
    assert_eq!(read_one(dir.path(), "task").as_deref(), Some("x"));
    assert_eq!(segments(dir.path()).len(), 1, "opening a store removes nothing");

    let store = open(dir.path());
    let runtime = runtime();
    let journal = runtime.block_on(async {
        delete(&store, "task").await;
        store.persist(&[key("task")]).await.unwrap();
        let early = snapshot(dir.path());
        // The next one that it notes.
        put(&store, "other", "y", When::Absent).await;
        std::fs::write(dir.path().join("task"), "x").unwrap();
        // Longer than notes are kept.
        tokio::time::sleep(Duration::from_secs(7)).await;
        std::fs::remove_file(dir.path().join("task")).unwrap();
        assert!(!segments(dir.path()).is_empty());
        for path in segments(dir.path()) {
            let name = path.file_name().unwrap().to_str().unwrap();
            assert!(!is_dead(name), "what the dead noted is put away");
        }
        [early, snapshot(dir.path())]
    });
    drop(store);
    for mut journal in journal {
        // The unlink did not reach the disk.
        let there: Vec<_> = journal.iter().map(|(name, _)| name.clone()).collect();
        journal.extend(
            dead.iter().filter(|(name, _)| is_dead(name) && !there.contains(name)).cloned(),
        );
        lose_power(dir.path(), journal);
        assert_eq!(read_one(dir.path(), "task"), None);
    }
}

#[test]
fn journals_of_the_dead_are_put_away_with_the_next_flush_of_everything() {
    let dir = TempDir::new().unwrap();
    let store = open(dir.path());
    runtime().block_on(keep_journal(&store));
    let living = segments(dir.path());
    assert_eq!(living.len(), 1);
    // As one that was killed leaves it: not locked, of this boot. And one of a process whose
    // flushes failed.
    let named = |end: &str| log(dir.path()).join(format!("{}0-1{end}", prefix(&boot_id())));
    std::fs::copy(&living[0], named(".log")).unwrap();
    std::fs::copy(&living[0], named(".kept.log")).unwrap();
    let other = open(dir.path());
    runtime().block_on(read(&other, "x"));
    assert_eq!(segments(dir.path()).len(), 3);
    drop(other);
    drop(store);
    assert_eq!(segments(dir.path()), [named(".kept.log")]);
}

/// A process that was stopped while it raised the floor has its lock, perhaps for hours.
#[test]
fn durable_writes_go_on_and_are_durable_while_another_has_the_floor() {
    const TASKS: usize = 16;
    let dir = TempDir::new().unwrap();
    let store = open(dir.path());
    let runtime = runtime();
    runtime.block_on(keep_journal(&store));
    let floor = std::fs::File::options().write(true).open(log(dir.path()).join("floor")).unwrap();
    floor.lock().unwrap();
    let name = |task: usize, n: usize| format!("folder-{task}/{n}");
    let body = |task: usize, n: usize| format!("{task} {n}\n").repeat(60_000 / 6);
    let journal = runtime.block_on(async {
        let mut tasks = tokio::task::JoinSet::new();
        for task in 0..TASKS {
            let store = store.clone();
            tasks.spawn(async move {
                // More than all segments that may wait have room for.
                for n in 0..40 {
                    put(&store, &name(task, n), &body(task, n), When::Absent).await;
                }
            });
        }
        let all = tokio::time::timeout(Duration::from_secs(120), tasks.join_all());
        all.await.expect("durable writes wait for the floor");
        snapshot(dir.path())
    });
    assert!(journal.iter().any(|(_, bytes)| bytes.len() > 8 << 20), "segments grow meanwhile");
    drop(floor);
    drop(store);
    assert!(!log(dir.path()).exists(), "a clean end leaves no journal");
    for task in 0..TASKS {
        std::fs::remove_dir_all(dir.path().join(format!("folder-{task}"))).unwrap();
    }
    lose_power(dir.path(), journal);
    for task in 0..TASKS {
        for n in [0, 20, 39] {
            let found = read_one(dir.path(), &name(task, n));
            assert!(found == Some(body(task, n)), "{}", name(task, n));
        }
    }
}

/// A container may be told another boot id than its host.
#[test]
fn a_locked_segment_is_of_now_whatever_it_says() {
    let dir = TempDir::new().unwrap();
    let store = open(dir.path());
    let runtime = runtime();
    runtime.block_on(async {
        keep_journal(&store).await;
        put(&store, "x", "noted", When::Absent).await;
    });
    let [segment] = &segments(dir.path())[..] else { panic!("one writer, one segment") };
    let name = segment.file_name().unwrap().to_str().unwrap();
    let elsewhere = segment.with_file_name(name.replace(&prefix(&boot_id()), &prefix("other")));
    std::fs::rename(segment, &elsewhere).unwrap();
    std::fs::remove_file(dir.path().join("x")).unwrap();
    assert_eq!(read_one(dir.path(), "x"), None, "nothing was read back");
    assert!(elsewhere.exists(), "and nothing was removed");
    // Its writer finds that its segment has gone, and makes another.
    runtime.block_on(async {
        put(&store, "y", "1", When::Absent).await;
        put(&store, "y", "2", When::Any).await;
    });
    assert!(segments(dir.path()).len() == 2);
}

#[test]
fn a_removed_journal_is_noticed() {
    let dir = TempDir::new().unwrap();
    let store = open(dir.path());
    let runtime = runtime();
    runtime.block_on(keep_journal(&store));
    std::fs::remove_dir_all(log(dir.path())).unwrap();
    let journal = runtime.block_on(async {
        put(&store, "first", "x", When::Absent).await;
        put(&store, "second", "x", When::Absent).await;
        snapshot(dir.path())
    });
    drop(store);
    std::fs::remove_file(dir.path().join("second")).unwrap();
    lose_power(dir.path(), journal);
    assert_eq!(read_one(dir.path(), "second").as_deref(), Some("x"));
}

/// Whatever they do, and whenever the first of them begins to keep a journal: if all of it reached
/// the disk, reading back the journal changes nothing.
#[test]
fn notes_never_undo_what_is_durable() {
    for round in 0..12 {
        let dir = TempDir::new().unwrap();
        let stores = [open(dir.path()), open(dir.path()), open(dir.path())];
        let runtime = runtime();
        let journal = runtime.block_on(async {
            let mut tasks = tokio::task::JoinSet::new();
            // Two lone ones, which write directly until they see a journal, and one with many.
            for (task, store) in [0, 1, 2, 2, 2, 2].into_iter().enumerate() {
                let store = stores[store].clone();
                tasks.spawn(async move {
                    let pause = if task < 2 { 0 } else { round };
                    tokio::time::sleep(Duration::from_millis(pause)).await;
                    for n in 0..12 {
                        change(&store, task, n).await;
                    }
                });
            }
            tasks.join_all().await;
            snapshot(dir.path())
        });
        let names = ["k/0", "k/1", "k/2"];
        assert!(!journal.is_empty());
        drop(stores);
        let before = read_all(dir.path(), &names);
        lose_power(dir.path(), journal);
        assert_eq!(read_all(dir.path(), &names), before, "round {round}");
    }
}

async fn change(store: &leasehold::Store, task: usize, n: usize) {
    let name = format!("k/{}", (task + n) % 3);
    // Some are too large to be noted.
    let length = if (task + n).is_multiple_of(5) { 1_100_000 } else { 10 };
    let body = format!("{task}-{n} ").repeat(length / 4);
    let write = |when| leasehold::Write::when(when, leasehold::Proof::Bytes);
    match n % 4 {
        0 | 1 => drop(store.put(&key(&name), body.into(), write(When::Any)).await.unwrap()),
        2 => drop(store.put(&key(&name), body.into(), write(When::Absent)).await.unwrap()),
        _ => {
            drop(store.delete(&key(&name)).await.unwrap());
            store.persist(&[key(&name)]).await.unwrap();
        }
    }
}
