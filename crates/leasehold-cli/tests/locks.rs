//! Locks held by real processes: killed, stopped, in other namespaces, and many at once.

#![allow(clippy::unwrap_used)] // in a test, a failure is a panic
#![allow(clippy::disallowed_methods)] // real processes take real time

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use leasehold_testkit::servers::Server;

const BIN: &str = env!("CARGO_BIN_EXE_leasehold");

fn leasehold(folder: &Path) -> Command {
    let mut command = Command::new(BIN);
    command.current_dir(folder).env("NO_COLOR", "1").env_remove("LEASEHOLD_STORE");
    command.stdin(Stdio::null());
    command
}

fn run(command: &mut Command) -> (i32, String, String) {
    let Output { status, stdout, stderr } = command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (status.code().unwrap_or(-1), text(stdout), text(stderr))
}

/// Waits until this file is there and has content.
#[track_caller]
fn wait_for(path: &Path) -> String {
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        match std::fs::read_to_string(path) {
            Ok(text) if !text.is_empty() => return text,
            _ if Instant::now() > end => panic!("{} did not appear", path.display()),
            _ => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

/// A command that says when it started, and goes on saying that it is alive.
fn beating(name: &str) -> String {
    let say = |what: &str| format!("date +%s%N > {name}.tmp && mv {name}.tmp {name}.{what}");
    format!("{}; while :; do {}; sleep 0.005; done", say("start"), say("beat"))
}

fn holder(folder: &Path, name: &str, more: &[&str]) -> Child {
    let mut command = leasehold(folder);
    command.args(["lock", "run", "x", "--wait", "30s"]).args(more);
    command.args(["--", "sh", "-c", &beating(name)]).stderr(Stdio::null()).spawn().unwrap()
}

fn nanos(path: &Path) -> u128 {
    wait_for(path).trim().parse().unwrap_or(0)
}

#[test]
fn a_command_runs_under_its_lock_and_its_code_is_ours() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    let sh = ["--", "sh", "-c"];
    let (code, out, err) = run(leasehold(dir)
        .args(["lock", "run", "a b/c"])
        .args(sh)
        .arg("echo $LEASEHOLD_TOKEN; exit 7"));
    assert_eq!(code, 7, "{err}");
    assert!(out.trim().parse::<u64>().unwrap() > 1_700_000_000_000_000, "{out}");
    let (code, _, err) = run(leasehold(dir).args(["lock", "run", "x", "--", "no-such-program"]));
    assert_eq!(code, 127, "{err}");
    let (code, _, _) = run(leasehold(dir).args(["lock", "run", "x"]).args(sh).arg("kill -TERM $$"));
    assert_eq!(code, 128 + 15);
    let (code, out, _) = run(leasehold(dir).args(["lock", "ls"]));
    assert_eq!((code, out.as_str()), (0, ""), "everything is released");
    let (code, _, err) = run(leasehold(dir).args([
        "lock",
        "run",
        "x",
        "--ttl",
        "1s",
        "--heartbeat",
        "1s",
        "--",
        "true",
    ]));
    assert_eq!(code, 2);
    assert!(err.contains("do not go together"), "{err}");
}

#[test]
fn who_cannot_get_it_is_told_and_may_ask() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    let mut first = holder(dir, "a", &["--holder", "first", "--yield-on-ask"]);
    wait_for(&dir.join("a.start"));
    let (code, _, err) =
        run(leasehold(dir).args(["lock", "run", "x", "--wait", "50ms", "--", "true"]));
    assert_eq!(code, 75);
    assert!(err.contains("still held by first after 50ms"), "{err}");
    // One attempt means no waiting at all.
    let once = ["lock", "run", "x", "--attempts", "1", "--", "true"];
    assert_eq!(run(leasehold(dir).args(once)).0, 75);
    let (code, out, _) = run(leasehold(dir).args(["--json", "lock", "show", "x"]));
    assert_eq!(code, 0);
    assert!(out.contains(r#""state":"held""#) && out.contains(r#""holder":"first""#), "{out}");
    let (code, _, err) = run(leasehold(dir).args(["lock", "release", "x"]));
    assert_eq!(code, 3);
    assert!(err.contains("refused, first holds it"), "{err}");
    assert_eq!(run(leasehold(dir).args(["lock", "clean"])).1, "removed 0 locks\n");
    // Asked, seen at the next heartbeat, released.
    assert_eq!(run(leasehold(dir).args(["lock", "ask", "x"])).0, 0);
    let (code, _, err) =
        run(leasehold(dir).args(["lock", "run", "x", "--wait", "10s", "--", "true"]));
    assert_eq!(code, 0, "{err}");
    assert_eq!(first.wait().unwrap().code(), Some(128 + 15));
    assert_eq!(run(leasehold(dir).args(["lock", "ask", "x"])).0, 4);
}

/// FIELD.md row 26: the successor comes within milliseconds, and never while the other's command
/// lives.
#[test]
fn after_kill_9_the_next_is_quick_and_never_doubled() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    let mut gaps = Vec::new();
    let mut current = holder(dir, "0", &[]);
    for round in 0..8 {
        wait_for(&dir.join(format!("{round}.start")));
        let next = holder(dir, &format!("{}", round + 1), &[]);
        std::thread::sleep(Duration::from_millis(120));
        let killed = Instant::now();
        current.kill().unwrap();
        current.wait().unwrap();
        let started = nanos(&dir.join(format!("{}.start", round + 1)));
        gaps.push(killed.elapsed());
        std::thread::sleep(Duration::from_millis(30));
        let last = nanos(&dir.join(format!("{round}.beat")));
        assert!(last <= started, "round {round}: alive {} ns after its successor", last - started);
        current = next;
    }
    current.kill().unwrap();
    current.wait().unwrap();
    gaps.sort();
    // Its ttl is 3 s: only by looking at the process can it be this quick.
    assert!(gaps[gaps.len() / 2] < Duration::from_millis(1500), "{gaps:?}");
}

/// What the command has started goes with it, in whatever group it is.
#[cfg(target_os = "linux")]
#[test]
fn after_kill_9_nothing_that_came_of_the_command_is_left() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    let script =
        format!("setsid sh -c '{}' & timeout 60 sh -c '{}'", beating("own"), beating("deep"));
    let mut first = leasehold(dir);
    first.args(["lock", "run", "x", "--", "sh", "-c", &script]).stderr(Stdio::null());
    let mut first = first.spawn().unwrap();
    for name in ["own", "deep"] {
        wait_for(&dir.join(format!("{name}.beat")));
    }
    first.kill().unwrap();
    first.wait().unwrap();
    let mut second = holder(dir, "b", &[]);
    let started = nanos(&dir.join("b.start"));
    std::thread::sleep(Duration::from_millis(50));
    for name in ["own", "deep"] {
        let last = nanos(&dir.join(format!("{name}.beat")));
        assert!(last <= started, "{name} was alive {} ns after its successor", last - started);
    }
    second.kill().unwrap();
    second.wait().unwrap();
}

/// Releasing what is stale never takes it from somebody who has just got it.
#[test]
fn release_without_force_robs_nobody() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    assert_eq!(run(leasehold(dir).arg("init")).0, 0);
    for round in 0..12 {
        std::fs::create_dir_all(dir.join(".leasehold/locks")).unwrap();
        let stale = r#"{"holderId":"dead","state":"released","token":5}"#;
        std::fs::write(dir.join(".leasehold/locks/x.lock"), stale).unwrap();
        let mut holder = leasehold(dir);
        holder.args(["lock", "run", "x", "--", "sleep", "0.2"]).stderr(Stdio::null());
        let mut holder = holder.spawn().unwrap();
        std::thread::sleep(Duration::from_millis(round));
        let (code, _, err) = run(leasehold(dir).args(["lock", "release", "x"]));
        assert!(code == 0 || code == 3, "{code}: {err}");
        assert_eq!(holder.wait().unwrap().code(), Some(0), "round {round}: it lost its lock");
    }
}

/// FIELD.md row 5 with real processes: stopped past its ttl, taken over, and woken again.
#[test]
fn who_was_stopped_too_long_finds_out() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    let quick = ["--ttl", "1s", "--heartbeat", "200ms"];
    let mut first = holder(dir, "a", &quick);
    wait_for(&dir.join("a.start"));
    signal(&first, "STOP");
    let mut second = holder(dir, "b", &quick);
    let started = nanos(&dir.join("b.start"));
    // The first one's command was stopped before the second's started, although nobody could tell
    // its runner.
    std::thread::sleep(Duration::from_millis(50));
    let last = nanos(&dir.join("a.beat"));
    assert!(last <= started, "alive {} ns after its successor", last.saturating_sub(started));
    signal(&first, "CONT");
    assert_eq!(first.wait().unwrap().code(), Some(76));
    let (_, out, _) = run(leasehold(dir).args(["lock", "ls"]));
    assert!(out.contains("held"), "the second still holds it: {out}");
    second.kill().unwrap();
    second.wait().unwrap();
}

fn signal(child: &Child, name: &str) {
    let done = Command::new("kill").args([format!("-{name}"), child.id().to_string()]).status();
    assert!(done.unwrap().success());
}

/// FIELD.md row 27: "no such process" in a container says nothing about the host's.
#[cfg(target_os = "linux")]
#[test]
fn another_pid_namespace_does_not_take_over_early() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    let mut first = holder(dir, "a", &[]);
    wait_for(&dir.join("a.start"));
    let script = format!("exec {BIN} lock run x --wait 1500ms -- true");
    let contained = |script: &str| {
        Command::new("unshare")
            .args([
                "--user",
                "--map-root-user",
                "--fork",
                "--pid",
                "--mount-proc",
                "sh",
                "-c",
                script,
            ])
            .current_dir(dir)
            .stdin(Stdio::null())
            .status()
            .unwrap()
            .code()
    };
    assert_eq!(contained(&script), Some(75), "the holder is alive");
    first.kill().unwrap();
    first.wait().unwrap();
    // Dead, but who is in the container cannot know: by its ttl.
    let script = format!("exec {BIN} lock run x --wait 20s -- true");
    let start = Instant::now();
    assert_eq!(contained(&script), Some(0));
    assert!(start.elapsed() > Duration::from_millis(500), "{:?}", start.elapsed());
}

#[test]
fn no_more_run_than_there_are_slots() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    let script = "mkdir in.$$; ls -d in.* | wc -l >> counts; sleep 0.05; rmdir in.$$";
    let children: Vec<Child> = (0..8)
        .map(|_| {
            let mut command = leasehold(dir);
            command
                .args(["lock", "run", "pool", "--slots", "2", "--wait", "30s", "--", "sh", "-c"]);
            command.arg(script).spawn().unwrap()
        })
        .collect();
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
    let counts = std::fs::read_to_string(dir.join("counts")).unwrap();
    let most = counts.lines().map(|line| line.trim().parse::<u32>().unwrap()).max();
    assert_eq!((counts.lines().count(), most), (8, Some(2)), "{counts}");
}

#[test]
fn a_leader_runs_and_another_follows() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    let candidate = |name: &str| {
        let mut command = leasehold(dir);
        command.args(["elect", "boss", "--", "sh", "-c", &beating(name)]);
        command.stderr(Stdio::null()).spawn().unwrap()
    };
    let mut first = candidate("a");
    wait_for(&dir.join("a.start"));
    let mut second = candidate("b");
    std::thread::sleep(Duration::from_millis(300));
    assert!(!dir.join("b.start").exists(), "there is one leader");
    signal(&first, "TERM");
    assert_eq!(first.wait().unwrap().code(), Some(128 + 15));
    wait_for(&dir.join("b.start"));
    signal(&second, "TERM");
    second.wait().unwrap();
}

#[test]
fn the_lock_of_a_file_stands_beside_it() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    std::fs::write(dir.join("state.yaml"), "n: 1\n").unwrap();
    let show = ["--", "sh", "-c", "cat state.yaml.lock"];
    let (code, out, err) =
        run(leasehold(dir).args(["lock", "run", "--file", "./state.yaml"]).args(show));
    assert_eq!(code, 0, "{err}");
    assert!(out.contains(r#""holderId":""#), "{out}");
    let mut names: Vec<_> =
        dir.read_dir().unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, [".lh", "state.yaml"]);
    let (code, _, err) =
        run(leasehold(dir).args(["lock", "run", "--file", "no/such", "--", "true"]));
    assert_eq!(code, 2);
    assert!(err.contains("is not a directory"), "{err}");
}

/// Everything that can be sent to us goes on to the command.
#[test]
fn signals_reach_the_command() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    let script = "for s in USR1 USR2 WINCH HUP INT QUIT; do trap \"echo $s >> got\" $s; done; \
                  trap 'echo TERM >> got; exit 9' TERM; echo x > started; while :; do sleep 0.01; done";
    let mut command = leasehold(dir);
    let mut first = command.args(["lock", "run", "x", "--", "sh", "-c", script]).spawn().unwrap();
    wait_for(&dir.join("started"));
    let mut expected = String::new();
    for name in ["USR1", "USR2", "WINCH", "HUP", "INT", "QUIT", "TERM"] {
        expected = format!("{expected}{name}\n");
        signal(&first, name);
        let end = Instant::now() + Duration::from_secs(20);
        while std::fs::read_to_string(dir.join("got")).unwrap_or_default() != expected {
            assert!(Instant::now() < end, "{name} did not arrive");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
    assert_eq!(first.wait().unwrap().code(), Some(9));
    assert_eq!(run(leasehold(dir).args(["lock", "ls"])).1, "", "and it was released");
}

/// A caller that ignores the end of its children (`trap '' CHLD`) hands that down.
#[test]
fn callers_that_ignore_their_children_do_no_harm() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    let ignoring = |rest: &str| {
        let script = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); \
                     os.execvp(sys.argv[1], sys.argv[1:])";
        let mut command = Command::new("python3");
        command.args(["-c", script, "sh", "-c", rest]).current_dir(dir).stdin(Stdio::null());
        command.output().unwrap()
    };
    let out = ignoring(&format!("exec {BIN} lock run x -- sh -c 'true; exit 7'"));
    assert_eq!(out.status.code(), Some(7), "{}", String::from_utf8_lossy(&out.stderr));
    let out = ignoring(&format!("exec {BIN} pad update n.yaml -- sh -c 'cat; echo n: 1'"));
    assert_eq!(out.status.code(), Some(0), "{}", String::from_utf8_lossy(&out.stderr));
}

/// What a signal interrupts leaves neither its lock nor its filter, and the file as it was.
#[test]
fn an_interrupted_update_lets_go() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    assert_eq!(run(leasehold(dir).args(["pad", "write", "n.yaml", "--text", "n: 1"])).0, 0);
    let script = format!("cat > /dev/null; {}", beating("f"));
    for (name, code) in [("TERM", 143), ("INT", 130)] {
        let mut update = leasehold(dir);
        update.args(["pad", "update", "n.yaml", "--ttl", "5m", "--", "sh", "-c", &script]);
        let mut update = update.spawn().unwrap();
        wait_for(&dir.join("f.beat"));
        signal(&update, name);
        assert_eq!(update.wait().unwrap().code(), Some(code));
        let (_, out, _) = run(leasehold(dir).args(["ls"]));
        assert!(!out.contains("n.yaml.lock"), "{out}");
        std::thread::sleep(Duration::from_millis(30));
        std::fs::remove_file(dir.join("f.beat")).unwrap();
        std::thread::sleep(Duration::from_millis(60));
        assert!(!dir.join("f.beat").exists(), "the filter lives on");
        std::fs::remove_file(dir.join("f.start")).unwrap();
    }
    assert_eq!(run(leasehold(dir).args(["pad", "read", "n.yaml"])).1, "n: 1");
}

/// kill -9 of `pad update` takes its filter with it, and the next update is quick and right.
#[cfg(target_os = "linux")]
#[test]
fn a_filter_does_not_outlive_its_update() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    let mut update = leasehold(dir);
    update.args(["pad", "update", "n.yaml", "--", "sh", "-c", &beating("f")]);
    let mut update = update.spawn().unwrap();
    wait_for(&dir.join("f.beat"));
    update.kill().unwrap();
    update.wait().unwrap();
    let (code, _, err) =
        run(leasehold(dir).args(["pad", "update", "n.yaml", "--", "echo", "n: 5"]));
    assert_eq!(code, 0, "{err}");
    std::thread::sleep(Duration::from_millis(30));
    std::fs::remove_file(dir.join("f.beat")).unwrap();
    std::thread::sleep(Duration::from_millis(60));
    assert!(!dir.join("f.beat").exists(), "the filter lives on");
    assert_eq!(run(leasehold(dir).args(["pad", "read", "n.yaml"])).1, "n: 5\n");
}

/// FIELD.md row 30 with real processes: stopped past its ttl, overtaken, woken, and refused.
#[test]
fn an_update_that_was_stopped_too_long_writes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    assert_eq!(run(leasehold(dir).args(["pad", "write", "n.yaml", "--text", "n: 1"])).0, 0);
    let quick = ["--ttl", "1s", "--heartbeat", "200ms", "--wait", "30s"];
    let script = "echo x > started; while [ ! -e go ]; do sleep 0.01; done; echo n: 2";
    let mut first = leasehold(dir);
    first.args(["pad", "update", "n.yaml"]).args(quick).args(["--", "sh", "-c", script]);
    let mut first = first.stderr(Stdio::null()).spawn().unwrap();
    wait_for(&dir.join("started"));
    signal(&first, "STOP");
    let mut second = leasehold(dir);
    second.args(["pad", "update", "n.yaml"]).args(quick).args(["--", "echo", "n: 3"]);
    let (code, _, err) = run(&mut second);
    assert_eq!(code, 0, "{err}");
    // Its filter finishes before it is woken, so that all that is left to do is to write.
    std::fs::write(dir.join("go"), "x").unwrap();
    std::thread::sleep(Duration::from_millis(100));
    signal(&first, "CONT");
    assert_eq!(first.wait().unwrap().code(), Some(76));
    assert_eq!(run(leasehold(dir).args(["pad", "read", "n.yaml"])).1, "n: 3\n");
}

#[test]
fn formats_can_be_given_by_flag() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    let pad = |words: &[&str]| run(leasehold(dir).arg("pad").args(words));
    let (code, _, err) = pad(&["write", "state", "--format", "json", "--text", "{"]);
    assert_eq!(code, 2);
    assert!(err.contains("not valid Json") && err.contains("nothing was written"), "{err}");
    assert_eq!(pad(&["write", "state", "--format", "json", "--text", "{\"n\": 1}"]).0, 0);
    assert_eq!(pad(&["update", "state", "--format", "yaml", "--", "echo", "a: [1"]).0, 2);
    assert_eq!(pad(&["update", "state", "--format", "yaml", "--", "echo", "a: 1"]).0, 0);
    let (_, out, _) =
        run(leasehold(dir).args(["--json", "pad", "read", "state", "--format", "yaml"]));
    assert_eq!(out, "{\"a\":1}\n");
    // And what a name promises can be overruled.
    assert_eq!(pad(&["write", "odd.json", "--format", "raw", "--text", "{"]).0, 0);
}

/// "The store does not answer" and "somebody holds it" are told apart.
#[test]
fn a_store_that_is_down_is_not_a_lock_that_is_held() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = leasehold(folder.path());
    command.args(["lock", "run", "x", "--store", "s3://b/p", "--wait", "1s", "--", "true"]);
    command.env("AWS_ENDPOINT_URL", "http://127.0.0.1:9").env("AWS_ACCESS_KEY_ID", "k");
    command.env("AWS_SECRET_ACCESS_KEY", "s");
    std::fs::write(folder.path().join("leasehold.toml"), "[connection]\nattempts = 1\n").unwrap();
    let (code, _, err) = run(&mut command);
    assert_eq!(code, 5, "{err}");
}

/// How many processes and increments: all of them with LEASEHOLD_FULL=1, a sample otherwise.
fn crowd(full: (usize, usize), sample: (usize, usize)) -> (usize, usize) {
    if std::env::var_os("LEASEHOLD_FULL").is_some() { full } else { sample }
}

fn increments(folder: &Path, variables: &[(&str, String)], crowd: (usize, usize)) {
    let (processes, each) = crowd;
    let script = format!(
        "for i in $(seq {each}); do {BIN} pad update counter.yaml --wait 10m --ttl 2m -- \
         awk '{{print \"n: \" $2+1}}' || exit 1; done"
    );
    let variables = variables.iter().map(|(name, value)| (*name, value.as_str()));
    let variables: Vec<_> = variables.collect();
    let write = ["pad", "write", "counter.yaml", "--text", "n: 0\n"];
    let (code, _, err) = run(leasehold(folder).envs(variables.clone()).args(write));
    assert_eq!(code, 0, "{err}");
    let children: Vec<Child> = (0..processes)
        .map(|_| {
            let mut shell = Command::new("sh");
            shell.args(["-c", &script]).current_dir(folder).stdin(Stdio::null());
            shell.envs(variables.clone()).spawn().unwrap()
        })
        .collect();
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
    let read = ["pad", "read", "counter.yaml"];
    let (_, out, _) = run(leasehold(folder).envs(variables).args(read));
    assert_eq!(out, format!("n: {}\n", processes * each));
}

#[test]
fn many_processes_lose_no_increment_in_a_directory() {
    let folder = tempfile::tempdir().unwrap();
    increments(folder.path(), &[], crowd((32, 200), (32, 10)));
}

#[test]
fn many_processes_lose_no_increment_on_a_bucket() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::ministack();
    let variables = [
        ("LEASEHOLD_STORE", format!("s3://{}/pad", server.bucket())),
        ("AWS_ENDPOINT_URL", server.endpoint()),
        ("AWS_ACCESS_KEY_ID", server.access_key().to_owned()),
        ("AWS_SECRET_ACCESS_KEY", server.secret_key().to_owned()),
    ];
    increments(folder.path(), &variables, crowd((32, 200), (8, 5)));
}

/// Whatever `lock ls` prints, the others understand.
#[test]
fn slots_and_elections_are_shown_asked_and_released_by_their_names() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    let lock = |words: &[&str]| run(leasehold(dir).arg("--json").arg("lock").args(words));
    let mut slot = leasehold(dir);
    slot.args([
        "lock",
        "run",
        "gpu",
        "--slots",
        "1",
        "--holder",
        "s",
        "--",
        "sh",
        "-c",
        &beating("a"),
    ]);
    let mut slot = slot.stderr(Stdio::null()).spawn().unwrap();
    let mut boss = leasehold(dir);
    boss.args(["elect", "a b", "--holder", "e", "--", "sh", "-c", &beating("b")]);
    let mut boss = boss.stderr(Stdio::null()).spawn().unwrap();
    wait_for(&dir.join("a.start"));
    wait_for(&dir.join("b.start"));
    let listed: Vec<serde_json::Value> =
        lock(&["ls"]).1.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(listed.len(), 2, "{listed:?}");
    for row in &listed {
        let name = row["lock"].as_str().unwrap();
        let (code, out, err) = lock(&["show", name]);
        assert_eq!(code, 0, "{name}: {err}");
        let shown: serde_json::Value = serde_json::from_str(&out).unwrap();
        assert_eq!((&shown["lock"], &shown["holder"]), (&row["lock"], &row["holder"]));
        assert_eq!(lock(&["ask", name]).0, 0);
        let (code, _, err) = lock(&["release", name]);
        assert!(code == 3 && err.contains("holds it"), "{code}: {err}");
        let (code, out, err) = lock(&["release", "--force", name]);
        assert_eq!(code, 0, "{err}");
        assert!(out.contains("taken from ") && out.contains(name), "{out}");
    }
    slot.kill().unwrap();
    slot.wait().unwrap();
    // Whoever led stands again, and leads.
    boss.kill().unwrap();
    boss.wait().unwrap();
    let (code, _, err) = lock(&["release", "nobody"]);
    assert!(code == 4 && err.contains("nobody: nobody holds it"), "{code}: {err}");
    assert_eq!(lock(&["show", "semaphores/nobody/0"]).0, 4);
}

#[test]
fn a_candidate_that_says_how_long_stands_that_long() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    let mut boss = leasehold(dir);
    boss.args(["elect", "boss", "--holder", "first", "--", "sh", "-c", &beating("a")]);
    let mut boss = boss.stderr(Stdio::null()).spawn().unwrap();
    wait_for(&dir.join("a.start"));
    for terms in [["--wait", "100ms"], ["--attempts", "1"]] {
        let words = ["elect", "boss", terms[0], terms[1], "--", "true"];
        let (code, _, err) = run(leasehold(dir).args(words));
        assert_eq!(code, 75, "{err}");
        assert!(err.contains("held by first") && err.contains("longer with --wait"), "{err}");
    }
    boss.kill().unwrap();
    boss.wait().unwrap();
}
