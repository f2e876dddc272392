//! Processes that crash, and a supervisor that is killed.

use super::*;

const SLOW: &str = r#"
[[node]]
name = "n"
every = "1s"
[[node.worker]]
queue = "q"
count = 2
command = "echo {} >> began; while [ ! -e go ]; do sleep 0.01; done; echo {} >> ran"
"#;

fn go(place: &Place) {
    std::fs::write(place.path().join("go"), "x").unwrap();
}

#[test]
fn a_killed_worker_is_started_again_and_its_task_done() {
    let place = directory();
    place.plan(SLOW);
    place.push("q", 0..2);
    let supervisor = place.supervise(&[]);
    wait_until("both run", || place.lines("began").len() == 2);
    let before = place.pids("q", 2);
    signal(before[0], "KILL");
    wait_until("the task was taken over", || place.lines("began").len() == 3);
    place.node_when("another is in its place", |node| {
        let after = pids(node, "q");
        after.len() == 2 && after.contains(&before[1]) && !after.contains(&before[0])
    });
    go(&place);
    wait_until("all is done", || place.counts("q") == [0, 0, 2, 0]);
    let node = place.node_when("it is counted", |node| node["node"]["done"] == 2);
    let processes = node["node"]["processes"].as_array().unwrap();
    assert_eq!(processes.iter().map(|one| one["restarts"].as_u64().unwrap()).sum::<u64>(), 1);
    assert!(node["node"]["errors"][0]["text"].as_str().unwrap().contains("killed by signal 9"));
    assert_eq!(node["crash_loop"], false);
    supervisor.end();
}

#[test]
fn a_crash_loop_is_told_and_mended() {
    let place = directory();
    place.plan("[[node]]\nname = \"n\"\nevery = \"1s\"\n[[node.compiler]]\nindex = \"x\"\n");
    let supervisor = place.supervise(&[]);
    let node = place.node_when("a crash loop", |node| node["crash_loop"] == true);
    assert_eq!(node["standing"], "alive");
    let shown = place.ok(&["nodes"]);
    assert!(shown.contains("crash loop: compiler x was started again"), "{shown}");
    assert!(shown.contains("there is no index \"x\""), "the reason: {shown}");
    assert!(place.said().contains("compiler x is in a crash loop"), "{}", place.said());
    // Its words are passed on once.
    let twice = |line: &str| line.starts_with('!') && line.contains("there is no index");
    assert!(!place.said().lines().any(twice), "{}", place.said());
    // Once it can work, it does.
    place.ok(&["index", "create", "x", "-f", "key", "-f", "value"]);
    place.ok(&["index", "put", "x", "key=a", "value=1"]);
    place.pids("x", 1);
    let node = place.node_when("it compiles", |node| node["node"]["done"] == 1);
    assert_eq!(node["node"]["failed"], 0);
    supervisor.end();
}

/// A supervisor that is killed leaves nobody for ever: what runs is finished, and not started again;
/// the next supervisor begins at once, although the name was not given back.
fn killed(place: &Place) {
    place.plan(SLOW);
    place.push("q", 0..2);
    let mut first = place.supervise(&[]);
    wait_until("both run", || place.lines("began").len() == 2);
    let old = place.pids("q", 2);
    first.0.kill().unwrap();
    first.0.wait().unwrap();
    let standing = place.node().unwrap()["standing"].clone();
    assert_eq!(standing, "gone", "its process is known to be dead");
    let start = Instant::now();
    let second = place.supervise(&[]);
    let new = place.node_when("a new supervisor", |node| {
        node["supervisor"].as_str().unwrap().ends_with(&format!(":{}", second.pid()))
            // Until its first report, the record still says what the other had said.
            && pids(node, "q").len() == 2
            && pids(node, "q").iter().all(|pid| !old.contains(pid))
    });
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
    assert_eq!(new["standing"], "alive");
    assert!(old.iter().all(|pid| is_there(*pid)), "their tasks are not cut off");
    place.push("q", 2..10);
    go(place);
    wait_until("the old ones end", || !old.iter().any(|pid| is_there(*pid)));
    wait_until("all is done", || place.counts("q") == [0, 0, 10, 0]);
    let mut ran = place.lines("ran");
    ran.sort();
    assert_eq!(ran, (0..10).map(|n| n.to_string()).collect::<Vec<_>>(), "each once");
    second.end();
}

#[test]
fn a_killed_supervisor_leaves_nobody_in_a_directory() {
    killed(&directory());
}

#[test]
fn a_killed_supervisor_leaves_nobody_on_a_bucket() {
    killed(&bucket("killed"));
}

/// At any moment, again and again: in the end every task has one receipt.
#[test]
fn supervisors_die_all_the_time() {
    let place = directory();
    place.plan(
        r#"
[[node]]
name = "n"
[[node.worker]]
queue = "q"
count = 2
drain = "1s"
command = "echo {} >> ran; sleep 0.02"
"#,
    );
    place.push("q", 0..100);
    for round in 0..8 {
        let mut supervisor = place.supervise(&[]);
        std::thread::sleep(Duration::from_millis(300 + round * 70));
        supervisor.0.kill().unwrap();
        supervisor.0.wait().unwrap();
    }
    let supervisor = place.supervise(&[]);
    wait_until("all is done", || place.counts("q") == [0, 0, 100, 0]);
    // All may have been done before it has begun, and before that a signal just ends it.
    place.node_when("it is there", |node| {
        node["supervisor"].as_str().unwrap().ends_with(&format!(":{}", supervisor.pid()))
    });
    supervisor.end();
    let mut ran = place.lines("ran");
    ran.sort();
    ran.dedup();
    assert_eq!(ran.len(), 100);
}

/// A node that lacks a program tells of it, and leaves the tasks to the others.
#[test]
fn a_program_that_is_not_there_costs_no_task() {
    let place = directory();
    let plan = |command: &str| {
        place.plan(&format!(
            "[[node]]\nname = \"n\"\nevery = \"1s\"\n[[node.worker]]\nqueue = \"q\"\ncommand = {command}\n"
        ));
    };
    plan("[\"./no-such-program\", \"{}\"]");
    place.push("q", 0..5);
    let supervisor = place.supervise(&[]);
    place.node_when("a crash loop", |node| node["crash_loop"] == true);
    let shown = place.ok(&["nodes"]);
    assert!(shown.contains("cannot run ./no-such-program"), "{shown}");
    assert_eq!(place.counts("q"), [5, 0, 0, 0], "none was tried");
    plan("[\"true\", \"{}\"]");
    wait_until("all is done", || place.counts("q") == [0, 0, 5, 0]);
    supervisor.end();
}

/// The first process of a container gets whatever loses its parent, and waits for it.
#[cfg(target_os = "linux")]
#[test]
fn a_first_process_leaves_no_zombies() {
    let place = directory();
    place.plan(SLOW);
    place.push("q", 0..2);
    let mut words = vec!["--pid", "--fork", "--kill-child", "--mount-proc", BIN];
    words.extend(["supervise", "--node", "n"]);
    let with = |program: &str| {
        let ours = place.command(&[]);
        let mut command = Command::new(program);
        command.current_dir(place.path()).stdin(Stdio::null());
        command.envs(ours.get_envs().filter_map(|(name, value)| Some((name, value?))));
        command
    };
    if !with("unshare").args(&words[..4]).arg("true").status().is_ok_and(|done| done.success()) {
        eprintln!("NOT TESTED: this takes the right to make a process namespace");
        return;
    }
    let said = File::create(place.path().join("said")).unwrap();
    let unshare = Running(with("unshare").args(&words).stderr(said).spawn().unwrap());
    wait_until("both run", || place.lines("began").len() == 2);
    let children = |pid: u64| -> Vec<u64> {
        let path = format!("/proc/{pid}/task/{pid}/children");
        let text = std::fs::read_to_string(path).unwrap_or_default();
        text.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
    };
    let first = children(unshare.pid())[0];
    let worker = children(first)[0];
    let below = children(worker);
    assert!(!below.is_empty(), "a warden and a sitter at least");
    signal(worker, "KILL");
    let is_listed = |pid: u64| std::path::Path::new(&format!("/proc/{pid}")).exists();
    wait_until("nothing is left of it", || {
        !is_listed(worker) && !below.iter().any(|p| is_listed(*p))
    });
    go(&place);
    wait_until("all is done", || place.counts("q") == [0, 0, 2, 0]);
    signal(first, "TERM");
    assert_eq!(unshare.ending(), Some(0));
}
