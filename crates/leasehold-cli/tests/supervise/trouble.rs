//! Stores that do not answer, signals at the wrong moment, and pipes that nobody reads.

use std::io::{Read as _, Write as _};
use std::net::TcpListener;

use super::*;

/// A place whose store takes every connection and never says a word.
fn silence() -> (Place, TcpListener) {
    let mut place = bucket("silence");
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    for (name, value) in &mut place.variables {
        if *name == "AWS_ENDPOINT_URL" {
            value.clone_from(&address);
        }
    }
    (place, listener)
}

/// Hundredths of a second of CPU so far.
#[cfg(target_os = "linux")]
fn ticks(pid: u64) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

/// A line to the store that is there and silent, as behind many a firewall: the node begins with the plan that
/// it knows before systemd loses patience, whatever hangs it up meanwhile; and ends when it is told to.
#[test]
fn silence_keeps_nobody_from_working() {
    let mut place = bucket("silence");
    place.plan(
        "[[node]]\nname = \"n\"\nevery = \"1s\"\n[[node.worker]]\nqueue = \"q\"\ncommand = \"true\"\n",
    );
    let supervisor = place.supervise(&[]);
    place.pids("q", 1);
    supervisor.end();
    std::fs::remove_file(place.path().join("said")).unwrap();
    let (silent, _listener) = silence();
    place.variables = silent.variables.clone();
    let start = Instant::now();
    let supervisor = place.supervise(&["--drain", "10m"]);
    std::thread::sleep(Duration::from_secs(1));
    // To look at the plan again is no reason to end.
    signal(supervisor.pid(), "HUP");
    wait_until("it begins", || place.said().contains("0 processes go on, 0 end, 1 start"));
    let after = start.elapsed();
    assert!(after > Duration::from_secs(5) && after < Duration::from_secs(80), "{after:?}");
    // Waiting for an answer takes no work, however often it is asked to look.
    #[cfg(target_os = "linux")]
    {
        std::thread::sleep(Duration::from_secs(2));
        signal(supervisor.pid(), "HUP");
        let before = ticks(supervisor.pid());
        std::thread::sleep(Duration::from_secs(5));
        let used = ticks(supervisor.pid()) - before;
        assert!(used < 20, "{used} hundredths of a second in five");
    }
    let start = Instant::now();
    signal(supervisor.pid(), "TERM");
    std::thread::sleep(Duration::from_millis(500));
    signal(supervisor.pid(), "TERM");
    std::thread::sleep(Duration::from_millis(500));
    supervisor.end();
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
}

/// Whoever is told to end does, however long the store takes to answer.
#[test]
fn silence_keeps_nobody_from_ending() {
    let (place, _listener) = silence();
    let mut worker = place.command(&["queue", "work", "q", "--", "true"]);
    let worker = Running(worker.stderr(Stdio::null()).spawn().unwrap());
    let mut sync = bucket("silence");
    sync.ok(&["queue", "create", "s", "--mode", "relaxed"]);
    let replica = place.path().join("replica").display().to_string();
    sync.ok(&["--replica", &replica, "sync", "now", "s"]);
    sync.ok(&["--replica", &replica, "queue", "push", "s", "x"]);
    sync.variables.clone_from(&place.variables);
    let mut syncing = sync.command(&["--replica", &replica, "sync", "run", "s"]);
    let syncing = Running(syncing.stderr(Stdio::null()).spawn().unwrap());
    std::thread::sleep(Duration::from_secs(3));
    let start = Instant::now();
    worker.end();
    signal(syncing.pid(), "TERM");
    std::thread::sleep(Duration::from_millis(500));
    syncing.end();
    assert!(start.elapsed() < Duration::from_secs(15), "{:?}", start.elapsed());
    let status = sync.ok(&["--replica", &replica, "sync", "status", "--json"]);
    let status: Value = serde_json::from_str(status.trim()).unwrap();
    assert_eq!(status["outbox"], 1, "what was not told is kept: {status}");
}

/// A store that answers everything with the same refusal. Ends with the test's process.
fn refusing(code: &str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let body = format!("<Error><Code>{code}</Code><Message>no</Message></Error>");
    let head = "HTTP/1.1 403 Forbidden\r\nContent-Type: application/xml\r\nConnection: close\r\n\
                Date: Mon, 01 Jan 2024 00:00:00 GMT\r\n";
    let answer = format!("{head}Content-Length: {}\r\n\r\n{body}", body.len());
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut request = [0; 16 << 10];
            let _ = stream.read(&mut request);
            let _ = stream.write_all(answer.as_bytes());
        }
    });
    address
}

/// A machine without a battery for its clock, just after a boot: S3 refuses all that it signs. It does what
/// can be done, if it has been a node before; else somebody has to be told that something is wrong.
#[test]
fn a_node_goes_on_that_the_store_refuses_for_now() {
    let mut place = bucket("refused");
    place.plan(
        "[[node]]\nname = \"n\"\nevery = \"1s\"\n[[node.worker]]\nqueue = \"q\"\ncommand = \"true\"\n",
    );
    let there = place.variables.clone();
    let refusing = refusing("RequestTimeTooSkewed");
    let refused: Vec<_> = there
        .iter()
        .map(|(name, value)| match *name == "AWS_ENDPOINT_URL" {
            true => (*name, refusing.clone()),
            false => (*name, value.clone()),
        })
        .collect();
    place.variables.clone_from(&refused);
    let (code, _, said) = place.run(&["supervise", "--node", "n"]);
    assert!(code != 0 && said.contains("refuses this machine's clock"), "{code}: {said}");
    place.variables = there;
    let supervisor = place.supervise(&[]);
    place.pids("q", 1);
    supervisor.end();
    std::fs::remove_file(place.path().join("said")).unwrap();
    place.variables = refused;
    let supervisor = place.supervise(&["--drain", "5s"]);
    wait_until("it begins", || place.said().contains("0 processes go on, 0 end, 1 start"));
    assert!(place.said().contains("refuses this machine's clock"), "{}", place.said());
    supervisor.end();
}

/// Whoever drains says so, as long as it takes.
#[test]
fn others_see_that_a_node_drains() {
    let place = directory();
    place.plan(
        r#"
[[node]]
name = "n"
every = "1s"
[[node.worker]]
queue = "q"
drain = "10m"
command = "echo x >> began; while [ ! -e go ]; do sleep 0.05; done"
"#,
    );
    place.push("q", 0..1);
    let supervisor = place.supervise(&["--drain", "5m"]);
    wait_until("it runs", || place.lines("began").len() == 1);
    signal(supervisor.pid(), "TERM");
    place.node_when("it drains", |node| node["node"]["draining"] == true);
    // It reports on, and does not work at it.
    let before = place.node().unwrap()["node"]["uptime_s"].as_u64().unwrap();
    #[cfg(target_os = "linux")]
    {
        signal(supervisor.pid(), "HUP");
        let before = ticks(supervisor.pid());
        std::thread::sleep(Duration::from_secs(5));
        let used = ticks(supervisor.pid()) - before;
        assert!(used < 20, "{used} hundredths of a second in five");
    }
    place.node_when("it reports", |node| {
        node["node"]["uptime_s"].as_u64() > Some(before) && node["standing"] == "alive"
    });
    std::fs::write(place.path().join("go"), "x").unwrap();
    assert_eq!(supervisor.ending(), Some(0));
    assert_eq!(place.counts("q"), [0, 0, 1, 0]);
}

/// A supervisor that is stopped listens to nobody. Its workers go on, however much they have to say.
#[test]
fn a_supervisor_that_does_not_listen_stops_no_work() {
    let place = directory();
    // Each says more than a pipe holds.
    place.plan(
        r#"
[[node]]
name = "n"
every = "1s"
[[node.worker]]
queue = "q"
command = "head -c 100000 /dev/zero | tr '\\0' x >&2; echo {} >> ran"
"#,
    );
    let supervisor = place.supervise(&[]);
    place.pids("q", 1);
    signal(supervisor.pid(), "STOP");
    place.push("q", 0..5);
    wait_until("all is done", || place.counts("q") == [0, 0, 5, 0]);
    signal(supervisor.pid(), "CONT");
    place.node_when("it is counted", |node| node["node"]["done"] == 5);
    assert_eq!(place.lines("ran").len(), 5);
    supervisor.end();
}

/// Whoever reads what a supervisor says may stop reading: the fleet goes on.
#[test]
fn a_reader_that_does_not_read_stops_no_work() {
    let place = directory();
    place.plan(
        r#"
[[node]]
name = "n"
every = "1s"
[[node.worker]]
queue = "q"
command = "seq 20000 >&2; echo {} >> ran"
"#,
    );
    let mut command = place.command(&["supervise", "--node", "n"]);
    let mut supervisor = command.stderr(Stdio::piped()).spawn().unwrap();
    // Held, and never read from.
    let _held = supervisor.stderr.take().unwrap();
    let supervisor = Running(supervisor);
    place.push("q", 0..5);
    wait_until("all is done", || place.counts("q") == [0, 0, 5, 0]);
    place.node_when("it reports", |node| node["node"]["done"] == 5);
    supervisor.end();
}

/// A command that says the same all day does not fill the disk with it.
#[test]
fn a_flood_of_words_is_cut() {
    let place = directory();
    place.plan(
        r#"
[[node]]
name = "n"
[[node.worker]]
queue = "q"
command = "seq 50000 >&2"
"#,
    );
    let supervisor = place.supervise(&[]);
    place.push("q", 0..1);
    wait_until("all is done", || place.counts("q") == [0, 0, 1, 0]);
    supervisor.end();
    let said = place.said();
    assert!(said.lines().count() < 20_000, "{} lines", said.lines().count());
    assert!(said.contains("more lines"), "{}", &said[said.len().saturating_sub(300)..]);
}

/// The settings of one queue in a replica are damaged: the others are kept in step all the same.
#[test]
fn one_damaged_queue_does_not_keep_the_others_from_their_sync() {
    let mut place = directory();
    let store = place.path().join("far").display().to_string();
    place.variables.push(("LEASEHOLD_STORE", store));
    let times = ["--mode", "relaxed", "--sync-up", "1s", "--sync-down", "3s", "--ttl", "10s"];
    for queue in ["bad", "q"] {
        place.ok(&[&["queue", "create", queue][..], &times].concat());
        place.ok(&["--replica", "replica", "sync", "now", queue]);
    }
    std::fs::write(place.path().join("replica/queues/bad/queue.json"), "{\"ttl").unwrap();
    place.plan("[[node]]\nname = \"n\"\nevery = \"1s\"\n[[node.worker]]\nqueue = \"q\"\ncommand = \"true\"\n");
    place.push("q", 0..3);
    let supervisor = place.supervise(&["--replica", "replica"]);
    wait_until("all is done", || place.counts("q") == [0, 0, 3, 0]);
    supervisor.end();
}
