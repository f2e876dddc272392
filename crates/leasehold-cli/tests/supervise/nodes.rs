//! How the fleet is doing.

use super::*;

const IDLE: &str = "[[node]]\nname = \"*\"\nevery = \"1s\"\n";

#[test]
fn a_node_is_alive_stalled_gone_and_back() {
    let place = directory();
    place.plan(IDLE);
    let supervisor = place.supervise(&[]);
    let node = place.node_when("alive", |node| node["standing"] == "alive");
    let said = &node["node"];
    assert_eq!(said["version"], env!("CARGO_PKG_VERSION"));
    assert!(
        said["disk_free"].as_u64().unwrap() > 0 && said["requests"]["get"].as_u64().unwrap() > 0
    );
    assert_eq!((&said["every"], &said["holds"]), (&"1s".into(), &0.into()));
    assert!(said["plan"].as_str().is_some() && said["started_at"].as_str().is_some());
    // Its uptime rises: it reports.
    place.node_when("three reports", |node| node["node"]["uptime_s"].as_u64() >= Some(3));
    signal(supervisor.pid(), "STOP");
    place.node_when("stalled", |node| node["standing"] == "stalled");
    place.node_when("gone", |node| node["standing"] == "gone");
    assert!(place.ok(&["nodes"]).contains("not heard of for"));
    signal(supervisor.pid(), "CONT");
    place.node_when("alive again", |node| node["standing"] == "alive");
    place.fails(&["nodes", "forget", "n"], 3, "would be back");
    supervisor.end();
    assert_eq!(place.node().unwrap()["standing"], "stopped");
    place.ok(&["nodes", "forget", "n"]);
    assert_eq!(place.node(), None);
    place.fails(&["nodes", "forget", "n"], 4, "no such node");
}

/// One supervisor for one name, whether they share a folder or not; the second is told who has it.
#[test]
fn a_name_has_one_supervisor() {
    for place in [directory(), bucket("name")] {
        place.plan(IDLE);
        let supervisor = place.supervise(&[]);
        place.node_when("alive", |node| node["standing"] == "alive");
        let pid = supervisor.pid().to_string();
        place.fails(&["supervise", "--node", "n"], 75, &pid);
        place.fails(&["supervise", "--node", "n", "--state", "elsewhere"], 75, &pid);
        // Another name is another node.
        let other = Running(place.command(&["supervise", "--node", "m"]).spawn().unwrap());
        wait_until("both", || place.ok(&["nodes", "--json"]).lines().count() == 2);
        other.end();
        supervisor.end();
        let again = place.supervise(&[]);
        place.node_when("alive again", |node| node["standing"] == "alive");
        again.end();
    }
}

/// Somebody took the name while this one could not be heard of: it ends, and its workers with it.
#[test]
fn who_lost_its_name_ends() {
    let place = bucket("lost");
    place.plan(
        "[[node]]\nname = \"*\"\nevery = \"1s\"\n[[node.worker]]\nqueue = \"q\"\ncommand = \"true\"\n",
    );
    let first = place.supervise(&[]);
    let worker = place.pids("q", 1)[0];
    signal(first.pid(), "STOP");
    // Another machine sees nothing of its process: after the ttl the name is anybody's.
    let text = place.ok(&["cat", "nodes/n.json"]);
    let mut record: Value = serde_json::from_str(&text).unwrap();
    record["boot_id"] = "another".into();
    record["host"] = "another".into();
    place.ok(&["put", "nodes/n.json", "--text", &record.to_string()]);
    place.node_when("gone", |node| node["standing"] == "gone");
    let second =
        Running(place.command(&["supervise", "--node", "n", "--state", "b"]).spawn().unwrap());
    place.node_when("the second has it", |node| {
        node["supervisor"].as_str().unwrap().ends_with(&format!(":{}", second.pid()))
    });
    signal(first.pid(), "CONT");
    assert_eq!(first.ending(), Some(76));
    assert!(!is_there(worker));
    assert!(place.said().contains("is supervised by"), "{}", place.said());
    second.end();
}

/// Records that nobody here wrote: a clock that is off, a later version, no record at all.
#[test]
fn odd_records_are_shown() {
    let place = directory();
    place.ok(&["init"]);
    let golden = include_str!("../../../../golden/node-1.json");
    let off = golden.replace("\"clock_ahead_ms\":-1500", "\"clock_ahead_ms\":-7200000");
    for (name, text) in [("off", off.as_str()), ("odd", "{\"worker_id\":\"x\"}"), ("bad", "x")] {
        place.ok(&["put", &format!("nodes/{name}.json"), "--text", text]);
    }
    let out = place.ok(&["nodes", "--json"]);
    let nodes: Vec<Value> = out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let names: Vec<&str> = nodes.iter().map(|node| node["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["bad", "odd", "off"]);
    assert!(nodes[0]["unreadable"].is_string() && nodes[1]["unreadable"].is_string(), "{out}");
    assert_eq!(nodes[2]["clock_off"], true);
    let shown = place.ok(&["nodes"]);
    assert!(shown.contains("off: its clock is 2h behind the store's"), "{shown}");
    assert!(shown.contains("crash loop: worker scrape was started again 5 times"), "{shown}");
    assert!(shown.contains("its record cannot be read"), "{shown}");
}

/// What dead workers left behind is cleaned up by a sweep that costs next to nothing; here the
/// record says what a node has done and what that cost.
#[test]
fn a_node_says_what_it_did_and_what_it_cost() {
    let place = bucket("cost");
    place.plan(
        r#"
[[node]]
name = "n"
every = "1s"
[[node.worker]]
queue = "q"
command = "[ {} != 3 ] || { echo too bad >&2; exit 1; }"
"#,
    );
    place.ok(&["queue", "create", "q", "--max-attempts", "1"]);
    place.push("q", 0..5);
    let supervisor = place.supervise(&[]);
    let node = place
        .node_when("it is told", |node| node["node"]["done"] == 4 && node["node"]["failed"] == 1);
    let said = &node["node"];
    assert!(said["errors"].to_string().contains("exit code 1: too bad"), "{said}");
    assert!(
        said["dollars"].as_f64().unwrap() > 0.0 && said["requests"]["put"].as_u64().unwrap() > 10
    );
    assert!(said["clock_ahead_ms"].as_i64().unwrap().abs() < 5000);
    supervisor.end();
}
