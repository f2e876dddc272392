//! The plan changes while everything runs.

use super::*;

fn two(first: u32, second: &str) -> String {
    format!(
        r#"
[[node]]
name = "n"
every = "1s"
[[node.worker]]
queue = "a"
count = {first}
command = "echo {{}} >> ran; sleep 0.05"
[[node.worker]]
queue = ["b"]
command = ["sh", "-c", "{second}"]
"#
    )
}

/// Reconfiguration under load: what did not change keeps its process, and no task is lost or done
/// twice.
fn what_did_not_change_goes_on(place: &Place) {
    place.plan(&two(2, "true"));
    let supervisor = place.supervise(&[]);
    let (a, b) = (place.pids("a", 2), place.pids("b", 1));
    place.push("a", 0..80);
    wait_until("it is in the middle of it", || place.lines("ran").len() > 20);
    let start = Instant::now();
    place.plan(&two(3, "exit 0"));
    let node = place.node_when("the new plan", |node| pids(node, "a").len() == 3);
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
    assert_eq!(pids(&node, "a")[..2], a[..], "they go on");
    place.node_when("the other is another", |node| {
        pids(node, "b").len() == 1 && pids(node, "b") != b
    });
    // And back: the first ones stay.
    place.plan(&two(1, "exit 0"));
    place.node_when("one less", |node| pids(node, "a") == a[..1]);
    wait_until("all is done", || place.counts("a")[2] == 80);
    wait_until("the old ones are gone", || !is_there(b[0]) && !is_there(a[1]));
    let mut ran = place.lines("ran");
    ran.sort();
    ran.dedup();
    assert_eq!((ran.len(), place.lines("ran").len()), (80, 80), "each once");
    supervisor.end();
    assert!(!is_there(a[0]));
}

#[test]
fn what_did_not_change_goes_on_in_a_directory() {
    what_did_not_change_goes_on(&directory());
}

#[test]
fn what_did_not_change_goes_on_with_a_bucket() {
    what_did_not_change_goes_on(&bucket("plan"));
}

/// A broken change is refused and told, and what ran goes on; after a restart, too.
#[test]
fn a_broken_change_is_refused() {
    for place in [directory(), bucket("broken")] {
        place.plan(&two(1, "true"));
        let supervisor = place.supervise(&[]);
        let before = place.pids("a", 1);
        let good = place.ok(&["fleet", "show"]);
        // What we are asked to write is checked first.
        std::fs::write(place.path().join("bad.toml"), "[[node]]\nnmae = \"n\"\n").unwrap();
        place.fails(&["fleet", "set", "bad.toml"], 2, "unknown field `nmae`");
        assert_eq!(place.ok(&["fleet", "show"]), good);
        // Others may write anything.
        for (text, part) in
            [("[[node", "TOML parse error"), ("[[node]]\nname = \"\"\n", "name is empty")]
        {
            place.ok(&["put", "fleet.toml", "--text", text]);
            let node = place.node_when("it is refused", |node| {
                node["node"]["refused"].as_str().is_some_and(|told| told.contains(part))
            });
            assert_eq!(pids(&node, "a"), before);
            assert!(place.said().contains(part), "{}", place.said());
        }
        let shown = place.ok(&["nodes"]);
        assert!(shown.contains("does not carry out the plan that is there"), "{shown}");
        supervisor.end();
        let supervisor = place.supervise(&[]);
        let node = place.node_when("the last good plan", |node| pids(node, "a").len() == 1);
        assert!(node["node"]["refused"].as_str().is_some(), "{node}");
        // There is none at all: nobody said that nothing should run.
        place.ok(&["rm", "fleet.toml"]);
        let node = place.node_when("none", |node| {
            node["node"]["refused"].as_str().is_some_and(|told| told.contains("no fleet.toml"))
        });
        assert_eq!(pids(&node, "a").len(), 1);
        place.plan(&two(2, "true"));
        let node = place.node_when("a good one", |node| pids(node, "a").len() == 2);
        assert!(node["node"].get("refused").is_none(), "{node}");
        supervisor.end();
    }
}

/// A supervisor that looks once an hour is told to look now.
#[test]
fn hang_up_applies_a_change_at_once() {
    let place = bucket("hup");
    let plan = |count: u32| two(count, "true").replace("1s", "1h");
    place.plan(&plan(1));
    let supervisor = place.supervise(&[]);
    place.pids("a", 1);
    place.plan(&plan(2));
    std::thread::sleep(Duration::from_millis(1500));
    assert_eq!(pids(&place.node().unwrap(), "a").len(), 1, "not yet");
    signal(supervisor.pid(), "HUP");
    place.pids("a", 2);
    supervisor.end();
}

/// A plan in JSON, which takes the place of the one in TOML.
#[test]
fn a_plan_can_be_json() {
    let place = directory();
    place.plan(&two(1, "true"));
    let supervisor = place.supervise(&[]);
    place.pids("a", 1);
    let json = r#"{"node": [{"name": "*", "every": "1s",
        "worker": [{"queue": "a", "count": 3, "command": ["true"]}]}]}"#;
    std::fs::write(place.path().join("plan.json"), json).unwrap();
    place.ok(&["fleet", "set", "plan.json"]);
    place.pids("a", 3);
    assert_eq!(place.ok(&["ls", "fleet"]).trim(), "fleet.json");
    // And back.
    place.plan(&two(2, "true"));
    place.pids("a", 2);
    assert_eq!(place.ok(&["ls", "fleet"]).trim(), "fleet.toml");
    supervisor.end();
}

/// Limits are divided, and told to those that run.
#[test]
fn limits_are_shared_out() {
    let place = bucket("limits");
    let plan = |count: u32| {
        format!(
            r#"
[[node]]
name = "n"
every = "1s"
connections = 12
requests_per_minute = 1200
[[node.worker]]
queue = "a"
count = {count}
command = "true"
"#
        )
    };
    place.plan(&plan(2));
    let supervisor = place.supervise(&[]);
    let before = place.pids("a", 2);
    let words = |pid: u64| std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap();
    assert!(words(before[0]).contains("--connections=4\0--requests-per-minute=400"));
    place.plan(&plan(5));
    let after = place.pids("a", 5);
    assert_eq!(after[..2], before[..]);
    assert!(words(after[4]).contains("--connections=2\0--requests-per-minute=200"));
    place.push("a", 0..40);
    wait_until("all is done", || place.counts("a")[2] == 40);
    supervisor.end();
}

/// Changes faster than processes start and end: in the end the last one is carried out, and nothing else.
#[test]
fn many_changes_at_once_come_to_the_last_one() {
    let place = directory();
    place.plan(&two(1, "true"));
    let supervisor = place.supervise(&[]);
    place.pids("a", 1);
    for n in 0..25 {
        // Some are broken, and one is the last good one again.
        match n % 5 {
            3 => drop(place.ok(&["put", "fleet.toml", "--text", "[[node"])),
            4 => place.plan(&two(1, "true")),
            _ => place.plan(&two(n % 4, &format!("exit {n}"))),
        }
    }
    place.plan(&two(3, "exit 99"));
    let is_last = |node: &Value| {
        let processes = node["node"]["processes"].as_array().unwrap();
        processes.len() == 4 && processes.iter().all(|one| one["state"] == "running")
    };
    let node = place.node_when("the last plan", |node| pids(node, "a").len() == 3 && is_last(node));
    assert!(node["node"].get("refused").is_none(), "{node}");
    let b = pids(&node, "b")[0];
    let words = std::fs::read_to_string(format!("/proc/{b}/cmdline")).unwrap();
    assert!(words.contains("exit 99"), "{words}");
    let pid = supervisor.pid();
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    assert_eq!(children.split_whitespace().count(), 4, "nobody was forgotten: {children}");
    supervisor.end();
}

/// More processes than most systems let a process have open files for, at first.
#[test]
fn open_files_are_enough_for_what_a_plan_allows() {
    let place = directory();
    place.plan(&two(25, "true"));
    let ours = place.command(&[]);
    let mut command = Command::new("sh");
    command.current_dir(place.path()).stdin(Stdio::null());
    command.envs(ours.get_envs().filter_map(|(name, value)| Some((name, value?))));
    // The same proportions, a tenth of it.
    let script = "ulimit -Sn 100; exec \"$0\" supervise --node n";
    let supervisor = Running(command.args(["-c", script, BIN]).spawn().unwrap());
    place.pids("a", 25);
    supervisor.end();
}

/// What stands in a task is never run, wherever a script has its place.
#[test]
fn a_task_is_no_part_of_the_script() {
    let place = directory();
    place.plan(
        r#"
[[node]]
name = "n"
[[node.worker]]
queue = "q"
command = """
# don't be misled by {}
printf '%s\\n' {} >> plain; printf '%s\\n' "<{}>" >> double; printf '%s\\n' '<{}>' >> single
"""
"#,
    );
    let tasks = ["$(touch pwned); touch pwned; `touch pwned`", "it's \"so\" * $HOME"];
    for task in tasks {
        place.ok(&["queue", "push", "q", "--text", task]);
    }
    let supervisor = place.supervise(&[]);
    wait_until("both are done", || place.counts("q")[2] == 2);
    supervisor.end();
    for (file, around) in [("plain", ["", ""]), ("double", ["<", ">"]), ("single", ["<", ">"])] {
        let mut lines = place.lines(file);
        lines.sort();
        let mut expected = tasks.map(|task| [around[0], task, around[1]].concat());
        expected.sort();
        assert_eq!(lines, expected, "{file}");
    }
    assert!(!place.path().join("pwned").exists());
}
