//! Every command, for people and for programs.

use serde_json::json;

use super::*;

#[test]
fn queues_are_made_shown_and_changed() {
    let place = directory();
    let out = place.ok(&["create", "q", "--ttl", "9s", "--max-attempts", "3"]);
    for (name, value) in [("ttl", "9s"), ("heartbeat", "3s"), ("max_attempts", "3")] {
        let line = out.lines().find(|line| line.trim_start().starts_with(name)).unwrap();
        assert!(line.trim_end().ends_with(value), "{line}");
    }
    assert!(!out.contains("nonce"), "{out}");
    let made = place.json(&["create", "r", "--shards", "4", "--receipts", "false"]).remove(0);
    assert_eq!((&made["queue"], &made["shards"]), (&json!("r"), &json!(4)));
    assert_eq!(made["receipts"], json!(false));
    assert_eq!(place.ok(&["ls"]), "q\nr\n");
    assert_eq!(place.json(&["ls"]), [json!({ "queue": "q" }), json!({ "queue": "r" })]);
    assert_eq!(place.json(&["show", "q"])[0]["ttl"], "9s");
    assert!(place.ok(&["set", "q", "--timeout", "1m"]).contains("timeout"));
    let set = place.json(&["set", "q", "--backoff", "2s"]).remove(0);
    assert_eq!((&set["backoff"], &set["timeout"]), (&json!("2s"), &json!("1m")));
    assert_eq!((&set["ttl"], &set["heartbeat"]), (&json!("9s"), &json!("3s")), "as they were");
    place.ok(&["pause", "q"]);
    assert!(place.ok(&["status", "q"]).starts_with("q  paused\n"));
    place.ok(&["pause", "q", "--json"]);
    place.ok(&["resume", "q"]);
    place.ok(&["resume", "q", "--json"]);
    assert_eq!(place.json(&["status", "q"])[0]["paused"], json!(false));
}

#[test]
fn tasks_are_pushed_seen_done_and_looked_up() {
    let place = directory();
    place.ok(&["create", "q", "--backoff", "1ms", "--backoff-cap", "1ms", "--max-attempts", "2"]);
    let id = place.ok(&["push", "q", "hello world"]);
    assert_eq!(id.trim().len(), 26, "{id}");
    assert_eq!(place.ok(&["push", "q", "x", "--id", "a/b"]), "a/b\n");
    assert_eq!(place.ok(&["push", "q", "x", "--id", "a/b"]), "a/b  already pending\n");
    let again = place.json(&["push", "q", "x", "--id", "a/b"]);
    assert_eq!(again, [json!({ "id": "a/b", "outcome": "already pending" })]);
    assert_eq!(place.ok(&["push", "q", "{\"id\":7,\"n\":1}", "--id-field", "id"]), "7\n");
    assert_eq!(place.ok(&["push", "q", "later", "--id", "l", "--delay", "1h"]), "l\n");
    assert_eq!(place.ok(&["--quiet", "push", "q", "p", "--id", "quiet"]), "");
    assert_eq!(place.ok(&["push", "q", "b1", "b2", "b3", "--bundle", "2"]).lines().count(), 3);
    // Looked at, and still there.
    let peeked = place.ok(&["peek", "q"]);
    assert_eq!(peeked.lines().count(), 7, "{peeked}");
    assert!(peeked.contains("a/b  x\n") && peeked.contains("  hello world\n"), "{peeked}");
    let peeked = place.json(&["peek", "q", "-n", "100"]);
    let seven = peeked.iter().find(|task| task["id"] == "7").unwrap();
    assert_eq!(seven["payload"], json!({ "id": 7, "n": 1 }));
    assert_eq!(peeked.iter().filter(|task| task["bundle"].is_string()).count(), 3);
    assert_eq!(place.ok(&["peek", "q", "-n", "1"]).lines().count(), 1);
    let status = place.json(&["status", "q"]).remove(0);
    for (name, count) in [("free", 7), ("leased", 0), ("scheduled", 1), ("failed", 0)] {
        assert_eq!(status[name], json!(count), "{status}");
    }
    assert!(status["requests"].as_u64().unwrap() > 0 && status["oldest"].is_array(), "{status}");
    let (_, out, err) = place.run(&["status", "q"]);
    assert!(out.contains("scheduled") && out.contains("oldest: "), "{out}");
    assert!(err.contains(" requests"), "{err}");
    assert!(place.ok(&["show", "q", "a/b"]).contains("free"));
    assert_eq!(place.show("7")["task"]["payload"]["n"], 1);
    // Done, but for one that fails.
    let script = "read x; echo did $x; [ \"$x\" != p ] || { echo oh no >&2; exit 9; }";
    let work = ["work", "q", "--exit-when-empty", "--json", "--", "sh", "-c", script];
    // What is scheduled for later does not count as something left to do.
    let (code, out, err) = place.run(&work);
    assert_eq!(code, 1, "one was given up: {err}");
    let tally: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((&tally["done"], &tally["retried"]), (&json!(6), &json!(1)), "{tally}");
    assert_eq!((&tally["failed"], &tally["lost"]), (&json!(1), &json!(0)), "{tally}");
    assert_eq!(place.show("a/b")["receipt"]["result"], "did x");
    assert!(place.ok(&["show", "q", "a/b"]).contains("did x"));
    let dead = place.ok(&["failed", "q"]);
    assert!(dead.contains("quiet") && dead.contains("exit code 9: oh no"), "{dead}");
    let letter = place.json(&["failed", "q"]).remove(0);
    assert_eq!((&letter["failures"], &letter["payload"]), (&json!(2), &json!("p")));
    assert!(place.ok(&["show", "q", "quiet"]).contains("oh no"));
    assert_eq!(place.show("quiet")["state"], "failed");
    // Done before.
    assert_eq!(place.ok(&["push", "q", "x", "--id", "a/b"]), "a/b  already completed\n");
    assert_eq!(place.ok(&["retry", "q", "quiet"]), "1 pushed again\n");
    assert_eq!(place.show("quiet")["state"], "free");
    assert_eq!(place.json(&["retry", "q", "--all"]), [json!({ "pushed": 0 })]);
    let (code, out, err) = place.run(&["retry", "q", "nobody"]);
    assert_eq!((code, out.as_str()), (4, "0 pushed again\n"));
    assert!(err.contains("nobody: there is no such dead letter"), "{err}");
    // And away with it.
    let purged = place.json(&["purge", "q", "--pending", "--failed", "--completed"]).remove(0);
    assert_eq!((&purged["pending"], &purged["failed"]), (&json!(2), &json!(0)), "{purged}");
    assert_eq!(place.counts(), [0, 0, 0, 0]);
    assert_eq!(place.ok(&["purge", "q", "--failed"]), "0 failed removed\n");
    assert!(place.ok(&["sweep", "q"]).contains("0 receipts"));
    assert_eq!(place.json(&["sweep", "q"])[0]["leases"], json!(0));
    assert_eq!(place.ok(&["failed", "q"]) + &place.ok(&["peek", "q"]), "");
}

#[test]
fn who_pushes_can_wait_for_the_result() {
    let place = directory();
    place.ok(&["create", "q", "--backoff", "1ms", "--backoff-cap", "1ms", "--max-attempts", "2"]);
    let script = "read x; case $x in bad) echo broken >&2; exit 1;; none) ;; *) echo got $x;; esac";
    let worker = place.worker(&["q"], script);
    assert_eq!(place.ok(&["push", "q", "5", "--wait"]), "got 5\n");
    assert_eq!(place.ok(&["push", "q", "none", "--wait"]), "");
    let receipt = place.json(&["push", "q", "6", "--id", "six", "--wait"]).remove(0);
    assert_eq!((&receipt["id"], &receipt["result"]), (&json!("six"), &json!("got 6")));
    assert_eq!(place.ok(&["push", "q", "6", "--id", "six", "--wait"]), "got 6\n", "the same");
    let (code, _, err) = place.run(&["push", "q", "bad", "--id", "b", "--wait"]);
    assert_eq!(code, 1);
    assert!(err.contains("b: given up after 2 attempts: exit code 1: broken"), "{err}");
    // Pushed again under the same name, its old dead letter is not the answer.
    kill(worker);
    let mut second = place.queue(&["push", "q", "good", "--id", "b", "--wait"]);
    let second = second.stdout(Stdio::piped()).spawn().unwrap();
    wait_until("it is pending", || place.show("b")["state"] == "free");
    std::thread::sleep(Duration::from_millis(200));
    let worker = place.worker(&["q"], script);
    let second = texts(second.wait_with_output().unwrap());
    assert_eq!((second.0, second.1.as_str()), (0, "got good\n"));
    kill(worker);
    // Where no receipts are kept, waiting would be for ever.
    place.ok(&["create", "n", "--receipts", "false"]);
    place.fails(&["push", "n", "x", "--wait"], 2, "keeps no receipts");
}

#[test]
fn a_paused_queue_rests() {
    let place = directory();
    place.ok(&["push", "q", "x", "--id", "x"]);
    place.ok(&["pause", "q"]);
    let worker = place.worker(&["q"], "echo done > done");
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(place.counts(), [1, 0, 0, 0]);
    kill(worker);
    place.ok(&["resume", "q"]);
    place.ok(&["work", "q", "--exit-when-empty", "--", "true"]);
    assert_eq!(place.counts(), [0, 0, 1, 0]);
}

#[test]
fn a_letter_that_cannot_be_pushed_again_keeps_nobody_from_the_others() {
    let place = directory();
    place.ok(&["create", "q", "--max-attempts", "1"]);
    for id in ["a", "b", "c"] {
        place.ok(&["push", "q", id, "--id", id]);
    }
    place.gives_up(&["work", "q", "--exit-when-empty", "--", "false"]);
    assert_eq!(place.counts(), [0, 0, 0, 3]);
    let failed = place.path().join(".leasehold/queues/q/failed");
    std::fs::write(failed.join("a.json"), "damaged").unwrap();
    place.ok(&["push", "q", "another", "--id", "b"]);
    let (code, out, err) = place.run(&["retry", "q", "--all"]);
    assert_eq!((code, out.as_str()), (3, "1 pushed again\n"), "{err}");
    assert!(err.contains("a: not pushed") && err.contains("b: not pushed"), "{err}");
    assert!(failed.join("a.json").exists() && failed.join("b.json").exists());
    assert_eq!(place.counts(), [2, 0, 0, 2]);
}

#[test]
fn what_waits_for_its_time_is_shown() {
    let place = directory();
    place.ok(&["push", "q", "x", "--id", "later", "--delay", "1h"]);
    let shown = place.show("later");
    assert_eq!((&shown["state"], &shown["task"]["payload"]), (&json!("scheduled"), &json!("x")));
    assert!(shown["not_before"].is_string());
    assert!(place.ok(&["show", "q", "later"]).contains("not before"));
    place.fails(&["show", "q", "never"], 4, "no such task");
}

/// Another client's spelling of a name: nobody does it, and nobody may think that all is done.
#[test]
fn names_that_are_no_tasks_are_told() {
    let place = directory();
    place.ok(&["push", "q", "x"]);
    // In a directory, a key's `%` is `%25` once more.
    let name = "https%3A%2F%2Fexample.com".replace('%', "%25");
    let folder = place.path().join(".leasehold/queues/q/pending").join(name);
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("task.json"), "{}").unwrap();
    let (code, _, err) = place.run(&["work", "q", "--exit-when-empty", "--", "true"]);
    assert_eq!((code, err.matches("names that are no task's").count()), (0, 1), "{err}");
    let status = place.ok(&["status", "q"]);
    assert!(status.contains("unknown"), "{status}");
}
