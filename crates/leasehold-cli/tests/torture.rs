//! `leasehold torture`, in short: on a directory, on a real S3 server, and on one that breaks its
//! word, which must be caught.
//!
//! Half a minute each by default; `LEASEHOLD_FULL=1` takes ten minutes each.

#![allow(clippy::unwrap_used, missing_docs)] // in a test, a failure is a panic
#![cfg(all(target_os = "linux", feature = "torture"))]

use std::path::Path;
use std::process::{Command, Stdio};

use leasehold_testkit::servers::Server;
use serde_json::Value;

const BIN: &str = env!("CARGO_BIN_EXE_leasehold");

fn minutes(short: &str) -> String {
    match std::env::var_os("LEASEHOLD_FULL") {
        Some(_) => "10".to_owned(),
        None => short.to_owned(),
    }
}

fn torture(folder: &Path, store: &str, words: &[&str]) -> Command {
    let mut command = Command::new(BIN);
    command.current_dir(folder).env("NO_COLOR", "1").env("TMPDIR", folder).stdin(Stdio::null());
    command.args(["torture", "--store", store]).args(words);
    command
}

fn on(server: &Server, folder: &Path, words: &[&str]) -> Command {
    let store = format!("s3://{}/mine", server.bucket());
    let mut command = torture(folder, &store, words);
    command
        .env("AWS_ENDPOINT_URL", server.endpoint())
        .env("AWS_ACCESS_KEY_ID", server.access_key())
        .env("AWS_SECRET_ACCESS_KEY", server.secret_key())
        .env("AWS_DEFAULT_REGION", "us-east-1");
    command
}

/// Its exit code, what it printed, and what it said.
fn run(command: &mut Command) -> (i32, String, String) {
    let output = command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap_or(-1), text(output.stdout), text(output.stderr))
}

/// The verdict, which must be good.
#[track_caller]
fn good(command: &mut Command) -> Value {
    let (code, out, err) = run(command.arg("--json"));
    assert!(!out.is_empty(), "{code}: {err}");
    let verdict: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(code, 0, "{verdict:#}\n{err}");
    eprintln!("{verdict:#}");
    // It was one, and not a walk in the park.
    let count = |name: &str| verdict[name].as_u64().unwrap();
    assert!(count("kills") > 3 && count("pauses") > 0, "{verdict:#}");
    assert!(count("operations") > 300 && count("open") > 0 && count("takeovers") > 0);
    assert!(!verdict["faults"].as_object().unwrap().is_empty());
    for property in verdict["properties"].as_array().unwrap() {
        assert!(property["checked"].as_u64().unwrap() > 0, "nothing to check: {property}");
    }
    verdict
}

#[test]
fn a_directory_is_tortured() {
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("store").display().to_string();
    let evidence = folder.path().join("evidence");
    let kept = evidence.display().to_string();
    let words = ["--minutes", &minutes("0.35"), "-n", "4", "--seed", "7", "--keep", &kept];
    let verdict = good(&mut torture(folder.path(), &store, &words));
    assert_eq!(verdict["faults_by"], "in_process");
    // What was kept says the same again.
    let mut check = Command::new(BIN);
    let (code, out, err) = run(check.args(["torture", "--json", "--check"]).arg(&evidence));
    assert_eq!(code, 0, "{out}{err}");
    let again: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(again["properties"], verdict["properties"]);
    // And lines that are missing are noticed: all receipts, because one alone may be of a push
    // whose answer was lost, and such a task need not be there.
    let log = evidence.join("logs/conductor.jsonl");
    let lines = std::fs::read_to_string(&log).unwrap();
    let of_a_task = |line: &&str| line.contains("receipt") && line.contains("\"t-");
    assert!(lines.lines().any(|line| of_a_task(&line)));
    let fewer: Vec<&str> = lines.lines().filter(|line| !of_a_task(line)).collect();
    std::fs::write(&log, fewer.join("\n") + "\n").unwrap();
    let mut check = Command::new(BIN);
    let (code, out, _) = run(check.args(["torture", "--check"]).arg(&evidence));
    assert_eq!(code, 1, "{out}");
    assert!(out.contains("was pushed, and is lost") && out.contains("torture --check"), "{out}");
}

#[test]
fn a_real_s3_server_is_tortured_and_left_as_it_was() {
    let server = Server::seaweedfs();
    let folder = tempfile::tempdir().unwrap();
    let words = ["--minutes", &minutes("0.4"), "-n", "4", "--seed", "11"];
    let verdict = good(&mut on(&server, folder.path(), &words));
    assert_eq!(verdict["faults_by"], "proxy");
    let faults = verdict["faults"].as_object().unwrap();
    assert!(faults.contains_key("answer lost"), "{faults:?}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "the evidence is gone");
    let mut list = Command::new(BIN);
    list.args(["ls", "--store", &format!("s3://{}", server.bucket())]);
    list.env("AWS_ENDPOINT_URL", server.endpoint())
        .env("AWS_ACCESS_KEY_ID", server.access_key())
        .env("AWS_SECRET_ACCESS_KEY", server.secret_key())
        .env("AWS_DEFAULT_REGION", "us-east-1");
    let (code, out, err) = run(&mut list);
    assert_eq!((code, out.as_str()), (0, ""), "{err}");
}

/// A server that ignores conditions is refused, and whoever goes on anyway is shown why.
#[test]
fn a_store_that_breaks_its_word_is_caught() {
    let server = Server::rclone();
    let folder = tempfile::tempdir().unwrap();
    let words = ["--minutes", "0.15", "-n", "3", "--kills", "20"];
    let (code, out, err) = run(&mut on(&server, folder.path(), &words));
    assert_eq!((code, out.as_str()), (2, ""), "{err}");
    assert!(err.contains("is unsafe") && err.contains("--anyway"), "{err}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    let (code, out, err) = run(on(&server, folder.path(), &words).args(["--anyway", "--json"]));
    assert_eq!(code, 1, "{out}{err}");
    let verdict: Value = serde_json::from_str(&out).unwrap();
    let broken = |property: &&Value| !property["broken"].as_array().unwrap().is_empty();
    let names: Vec<&str> = verdict["properties"]
        .as_array()
        .unwrap()
        .iter()
        .filter(broken)
        .map(|property| property["name"].as_str().unwrap())
        .collect();
    eprintln!("broken: {names:?}");
    assert!(names.contains(&"each register is linearizable"), "{names:?}");
    assert!(Path::new(verdict["evidence"].as_str().unwrap()).join("verdict.json").exists());
}

#[test]
fn what_cannot_be_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    for (words, part) in [
        (&["--store", "memory:"][..], "not shared by processes"),
        (&["--minutes", "0"], "between 0.05 and 10080"),
        (&["--processes", "0"], "0 is not in 1..=64"),
        (&["--check", "here", "--seed", "1"], "cannot be used with"),
        (&["--check", "nowhere"], "cannot read nowhere/plan.json"),
    ] {
        let mut command = Command::new(BIN);
        let (code, out, err) = run(command.current_dir(folder.path()).arg("torture").args(words));
        assert_ne!((code, out.is_empty()), (0, false), "{words:?}");
        assert!(err.contains(part), "{words:?}: {err}");
    }
}
