//! Relaxed queues under a supervisor: claimed in the node's replica, told to the bucket later.

use super::*;

const PLAN: &str = r#"
[[node]]
name = "n"
[[node.worker]]
queue = "q"
count = 2
drain = "1s"
poll = "500ms"
command = "echo {} >> ran; sleep 0.02"
"#;

/// A bucket that is a directory, which the replica is not.
fn far_directory() -> Place {
    let mut place = directory();
    let store = place.path().join("far").display().to_string();
    place.variables.push(("LEASEHOLD_STORE", store));
    place
}

fn create(place: &Place) {
    let times = ["--sync-up", "1s", "--sync-down", "3s", "--ttl", "10s"];
    place.ok(&[
        &["queue", "create", "q", "--mode", "relaxed", "--max-crashes", "1000"][..],
        &times,
    ]
    .concat());
    place.plan(PLAN);
}

fn each_once(place: &Place, count: usize) {
    let mut ran = place.lines("ran");
    let all = ran.len();
    ran.sort();
    ran.dedup();
    assert_eq!((ran.len(), all), (count, count), "one node does nothing twice");
}

/// Work from elsewhere comes down, is done here, and the bucket is told; what is pushed here goes up.
fn end_to_end(place: &Place) {
    create(place);
    place.push("q", 0..60);
    let supervisor = place.supervise(&["--replica", "replica"]);
    wait_until("what was pushed elsewhere is done", || place.counts("q") == [0, 0, 60, 0]);
    place.ok(&["--replica", "replica", "queue", "push", "q", "100", "101", "102", "--bundle", "1"]);
    place.push("q", 60..70);
    wait_until("the rest, too", || place.counts("q") == [0, 0, 73, 0]);
    let node = place.node_when("it is counted", |node| {
        // Reported at the end at the latest.
        node["standing"] == "alive"
    });
    assert_eq!(node["node"]["refused"], Value::Null);
    supervisor.end();
    each_once(place, 73);
    let node = place.node().unwrap();
    assert_eq!((&node["standing"], &node["node"]["done"]), (&"stopped".into(), &73.into()));
    let status = place.ok(&["--replica", "replica", "sync", "status", "--json"]);
    let status: Value = serde_json::from_str(status.lines().next().unwrap()).unwrap();
    assert_eq!(status["outbox"], 0, "{status}");
}

#[test]
fn end_to_end_with_a_directory() {
    end_to_end(&far_directory());
}

#[test]
fn end_to_end_with_a_bucket() {
    end_to_end(&bucket("relaxed"));
}

/// What was done just before the end is told before the end.
#[test]
fn a_drain_tells_the_bucket() {
    let place = far_directory();
    create(&place);
    place.ok(&["queue", "set", "q", "--sync-up", "10m", "--sync-down", "1h", "--ttl", "30m"]);
    place.push("q", 0..40);
    let supervisor = place.supervise(&["--replica", "replica"]);
    wait_until("all have run", || place.lines("ran").len() == 40);
    assert!(place.counts("q")[2] < 40, "the bucket has heard of the first ones at most");
    supervisor.end();
    assert_eq!(place.counts("q"), [0, 0, 40, 0]);
}

/// Supervisors killed in the middle of a sync, again and again: each task has one receipt, none is left
/// and none comes back.
fn killed_in_the_middle(place: &Place) {
    create(place);
    place.push("q", 0..100);
    for round in 0..8 {
        let mut supervisor = place.supervise(&["--replica", "replica"]);
        std::thread::sleep(Duration::from_millis(500 + round * 130));
        supervisor.0.kill().unwrap();
        supervisor.0.wait().unwrap();
    }
    let supervisor = place.supervise(&["--replica", "replica"]);
    wait_until("all is done", || place.counts("q") == [0, 0, 100, 0]);
    // It stays so: nothing comes back with the next syncs.
    std::thread::sleep(Duration::from_secs(4));
    assert_eq!(place.counts("q"), [0, 0, 100, 0]);
    supervisor.end();
    let mut ran = place.lines("ran");
    ran.sort();
    ran.dedup();
    assert_eq!(ran.len(), 100);
}

#[test]
fn supervisors_killed_in_the_middle_of_a_sync_with_a_directory() {
    killed_in_the_middle(&far_directory());
}

#[test]
fn supervisors_killed_in_the_middle_of_a_sync_with_a_bucket() {
    killed_in_the_middle(&bucket("midsync"));
}

/// A queue is switched between the modes while its workers run: nothing is lost, nothing done twice.
#[test]
fn a_queue_is_switched_while_it_is_worked_on() {
    let place = far_directory();
    create(&place);
    place.ok(&["queue", "set", "q", "--mode", "strict"]);
    place.push("q", 0..20);
    let supervisor = place.supervise(&["--replica", "replica"]);
    wait_until("strictly", || place.counts("q")[2] == 20);
    place.ok(&["queue", "set", "q", "--mode", "relaxed", "--sync-up", "1s", "--ttl", "10s"]);
    // Workers look at the settings every half minute.
    std::thread::sleep(Duration::from_secs(33));
    place.push("q", 20..60);
    wait_until("relaxed", || place.counts("q") == [0, 0, 60, 0]);
    assert!(place.path().join("replica/queues/q").exists());
    supervisor.end();
    each_once(&place, 60);
}
