//! Real processes on one directory: races, and kill -9.

#![allow(clippy::unwrap_used)] // in a test, a failure is a panic

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const BIN: &str = env!("CARGO_BIN_EXE_leasehold");

/// What the tour shows is measured, and it says itself whether it is as promised.
#[test]
fn the_tour_is_true() {
    let done = Command::new(BIN).args(["demo", "-n", "60", "--json"]).output().unwrap();
    let out = String::from_utf8(done.stdout).unwrap();
    assert!(done.status.success(), "{out}{}", String::from_utf8_lossy(&done.stderr));
    let told: serde_json::Value = serde_json::from_str(&out).unwrap();
    for (name, expected) in [("tasks", 61), ("receipts", 61), ("records", 61), ("taken_over", 1)] {
        assert_eq!(told[name], expected, "{name}: {out}");
    }
    assert_eq!((&told["correct"], &told["kept"]), (&true.into(), &3.into()), "{out}");
    assert!(told["takeover_ms"].as_u64().unwrap() < 20_000, "its ttl is 30 s: {out}");
}

#[test]
fn the_race_is_true() {
    let words = ["demo", "--race", "-n", "600", "-j", "6", "--json"];
    let done = Command::new(BIN).args(words).output().unwrap();
    let out = String::from_utf8(done.stdout).unwrap();
    assert!(done.status.success(), "{out}{}", String::from_utf8_lossy(&done.stderr));
    assert!(out.contains(r#""correct":true"#) && out.contains(r#""objects":600"#), "{out}");
    assert!(out.contains(r#""counter":300"#), "{out}");
}

fn worker(dir: &Path, id: u32) -> Child {
    let mut child = Command::new(BIN)
        .arg("demo-worker")
        .arg(dir)
        .args([id.to_string(), "20000".to_owned(), "1".to_owned()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let stdout = child.stdout.take().unwrap();
    let mut stdout = BufReader::new(stdout);
    stdout.read_line(&mut line).unwrap();
    assert!(line.contains("ready"), "{line}");
    writeln!(child.stdin.as_mut().unwrap()).unwrap();
    // Wait until it is in the middle of it: the first progress report.
    line.clear();
    stdout.read_line(&mut line).unwrap();
    assert!(line.contains("progress"), "{line}");
    // Somebody has to read what it says, or it stops.
    std::thread::spawn(move || for _ in stdout.lines() {});
    child
}

/// Killed at any moment, a process leaves no lock and no half-written object; what it may leave is
/// one temporary file.
#[test]
fn kill_9_leaves_no_lock_and_no_half_written_object() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("store");
    let rounds = 8;
    for round in 0..rounds {
        let mut workers = [worker(&dir, round * 2), worker(&dir, round * 2 + 1)];
        std::thread::sleep(Duration::from_millis(u64::from(round) * 7));
        for worker in &mut workers {
            worker.kill().unwrap();
            worker.wait().unwrap();
        }
        let put = Command::new(BIN)
            .arg("--store")
            .arg(&dir)
            .args(["put", "counter", "--text", "0 after the crash"])
            .output()
            .unwrap();
        assert!(put.status.success(), "{}", String::from_utf8_lossy(&put.stderr));
    }
    let temps = leasehold_testkit::temporary_files(&dir);
    assert!(temps <= rounds as usize * 2, "{temps} temporary files of {} processes", rounds * 2);
    let mut objects = 0;
    for entry in dir.join("race").read_dir().unwrap() {
        let body = std::fs::read_to_string(entry.unwrap().path()).unwrap();
        // "ID NONCE", the nonce of 32 digits: all there or not there.
        assert_eq!(body.split(' ').nth(1).map(str::len), Some(32), "{body:?}");
        objects += 1;
    }
    assert!(objects > 0, "they did not even start");
}
