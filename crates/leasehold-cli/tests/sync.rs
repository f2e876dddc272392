//! Relaxed mode with real processes: three nodes, each a supervisor with its workers and a replica of its
//! own, and one bucket. They are cut off at random, their supervisors are killed in the middle of whatever
//! they do, and their clocks are hours apart.

#![allow(clippy::unwrap_used, missing_docs)] // in a test, a failure is a panic
#![allow(clippy::disallowed_methods)] // real processes take real time

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering::SeqCst};
use std::time::{Duration, Instant};

use leasehold_testkit::servers::Server;
use serde_json::Value;

const BIN: &str = env!("CARGO_BIN_EXE_leasehold");

/// What a node's line to the bucket does.
const OPEN: u8 = 0;
const REFUSES: u8 = 1;
const DELAYS: u8 = 2;
const DROPS: u8 = 3;

/// A line to the bucket that can be spoiled.
struct Line {
    address: SocketAddr,
    state: Arc<AtomicU8>,
}

impl Line {
    fn new(to: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::new(AtomicU8::new(OPEN));
        let shared = state.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let Ok(server) = TcpStream::connect(&to) else { continue };
                let pipes = [(stream.try_clone(), server.try_clone()), (Ok(server), Ok(stream))];
                for (from, to) in pipes {
                    let (Ok(from), Ok(to)) = (from, to) else { continue };
                    let state = shared.clone();
                    std::thread::spawn(move || pipe(from, to, &state));
                }
            }
        });
        Self { address, state }
    }
}

fn pipe(mut from: TcpStream, mut to: TcpStream, state: &AtomicU8) {
    let mut buffer = [0; 16 << 10];
    let mut passed = 0_u32;
    while let Ok(read @ 1..) = from.read(&mut buffer) {
        passed += 1;
        match state.load(SeqCst) {
            REFUSES => break,
            DELAYS => std::thread::sleep(Duration::from_millis(120)),
            // Some answers get lost after the request was carried out.
            DROPS if passed.is_multiple_of(3) => break,
            _ => {}
        }
        if to.write_all(&buffer[..read]).is_err() {
            break;
        }
    }
    let _ = from.shutdown(std::net::Shutdown::Both);
    let _ = to.shutdown(std::net::Shutdown::Both);
}

/// A process that does not outlive its test.
struct Running(Child);

impl Running {
    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }

    /// Tells it to end, and waits for that.
    fn end(mut self, said: &Path) {
        let pid = self.0.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
        let status = self.0.wait().unwrap();
        let said = || std::fs::read_to_string(said).unwrap_or_default();
        assert!(status.success(), "{status}: {}", said());
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct Node {
    name: &'static str,
    folder: PathBuf,
    variables: Vec<(&'static str, String)>,
    line: Option<Line>,
}

impl Node {
    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(BIN);
        command.current_dir(&self.folder).env("NO_COLOR", "1").env_remove("LEASEHOLD_STORE");
        command.env_remove("NOTIFY_SOCKET").env("LEASEHOLD_NODE", self.name);
        command.env("LEASEHOLD_STATE", self.folder.join("state"));
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::null()).args(words);
        command
    }

    #[track_caller]
    fn ok(&self, words: &[&str]) -> String {
        let output = self.command(words).output().unwrap();
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    #[track_caller]
    fn json(&self, words: &[&str]) -> Value {
        serde_json::from_str(&self.ok(&[&["--json"], words].concat())).unwrap()
    }

    fn push(&self, from: usize, count: usize) {
        let mut command = self.command(&["queue", "push", "q", "-", "--bundle", "1"]);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let lines: String = (from..from + count).map(|n| format!("{n}\n")).collect();
        child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
        let done = child.wait_with_output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    }

    fn said(&self) -> PathBuf {
        self.folder.join("said")
    }

    fn supervisor(&self) -> Running {
        let said = File::options().create(true).append(true).open(self.said()).unwrap();
        let mut command = self.command(&["supervise", "--drain", "40s"]);
        Running(command.stdout(Stdio::null()).stderr(said).spawn().unwrap())
    }

    fn lines(&self, file: &str) -> Vec<String> {
        let text = std::fs::read_to_string(self.folder.join(file)).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }
}

/// Numbers that differ from run to run are not wanted: the machine's timing differs enough.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }
}

/// Workers of all nodes. Every fiftieth task fails the first time it is tried anywhere, so that there are
/// times before which something must not be done.
const PLAN: &str = r#"
[[node]]
name = "*"
every = "2s"
[[node.worker]]
queue = "q"
jobs = 2
poll = "500ms"
drain = "30s"
log = "ends"
command = "[ $LEASEHOLD_ATTEMPT != 1 ] || [ $(({} % 50)) != 0 ] || exit 1; echo {} >> ran"
"#;

/// How far the nodes' clocks are ahead, in hours. Requests are signed by the true time all the same: S3 does
/// not talk to those whose clock is off by more than a quarter of an hour.
const HOURS: [i64; 3] = [5, -7, 0];

fn three_nodes(
    root: &Path,
    lines: bool,
    variables: &[(&'static str, String)],
    to: &str,
) -> Vec<Node> {
    let node = |(name, hours): (&'static str, i64)| {
        let folder = root.join(name);
        std::fs::create_dir(&folder).unwrap();
        let mut variables = variables.to_vec();
        variables.push(("LEASEHOLD_REPLICA", folder.join("replica").display().to_string()));
        variables.push(("LEASEHOLD_TEST_CLOCK", (hours * 3600).to_string()));
        let line = lines.then(|| Line::new(to.to_owned()));
        if let Some(line) = &line {
            variables.push(("AWS_ENDPOINT_URL", format!("http://{}", line.address)));
        }
        Node { name, folder, variables, line }
    };
    ["a", "b", "c"].into_iter().zip(HOURS).map(node).collect()
}

fn converge(bucket: &Node, nodes: &[Node], tasks: usize, trouble: Duration) {
    let settings = ["--mode", "relaxed", "--sync-up", "1s", "--sync-down", "2s", "--ttl", "9s"];
    bucket.ok(&[&["queue", "create", "q"][..], &settings].concat());
    std::fs::write(bucket.folder.join("plan.toml"), PLAN).unwrap();
    bucket.ok(&["fleet", "set", "plan.toml"]);
    // Half of them in the bucket, the others by the nodes, which do not ask anybody.
    let each = tasks / 6;
    let there = tasks - 3 * each;
    bucket.push(0, there);
    let mut supervisors: Vec<Running> = nodes.iter().map(Node::supervisor).collect();
    for (n, node) in nodes.iter().enumerate() {
        node.push(there + n * each, each);
    }
    let mut dice = Dice(7);
    let mut kills = 0;
    let end = Instant::now() + trouble;
    while Instant::now() < end {
        std::thread::sleep(Duration::from_millis(100 + dice.roll(300)));
        let at = dice.roll(3) as usize;
        if let Some(line) = &nodes[at].line {
            line.state.store(dice.roll(4) as u8, SeqCst);
        }
        if dice.roll(3) == 0 {
            let at = dice.roll(3) as usize;
            // kill -9, in the middle of whatever it does. Its workers hear of it, and end.
            supervisors[at].kill();
            supervisors[at] = nodes[at].supervisor();
            kills += 1;
        }
    }
    for line in nodes.iter().filter_map(|node| node.line.as_ref()) {
        line.state.store(OPEN, SeqCst);
    }
    let done = || {
        let status = bucket.json(&["queue", "status", "q"]);
        let count = |name: &str| status[name].as_u64().unwrap();
        (count("completed"), count("free") + count("leased"), status)
    };
    let end = Instant::now() + Duration::from_secs(240);
    loop {
        let (completed, left, status) = done();
        if completed == tasks as u64 && left == 0 {
            break;
        }
        assert!(Instant::now() < end, "{status}");
        std::thread::sleep(Duration::from_millis(500));
    }
    // A directory has no clock but its machine's: there each takes its own for the store's, while the times
    // of files come from the true one, as they do on a machine that has its directory from another. That
    // does no harm, and nobody can tell who is off.
    if nodes.iter().all(|node| node.line.is_some()) {
        clocks_are_told(bucket);
    }
    for (supervisor, node) in supervisors.into_iter().zip(nodes) {
        supervisor.end(&node.said());
    }
    // Everybody tells what is still to be told, and twice so that nothing comes back.
    let mut duplicates = 0;
    for round in 0..2 {
        for node in nodes {
            node.json(&["sync", "now", "q"]);
            let status = node.json(&["queue", "status", "q"])["replica"].clone();
            if round == 1 {
                assert_eq!(status["outbox"], 0, "{status}");
                assert_eq!(status["set_aside"], 0, "{status}");
                duplicates += status["duplicates"].as_u64().unwrap();
            }
        }
    }
    let (completed, left, status) = done();
    assert_eq!((completed, left), (tasks as u64, 0), "{status}");
    assert_eq!(status["failed"], 0, "{status}");
    // What is compared: the commands' own lines say what was run, and each task was. The workers' lines say
    // which runs were recorded in their node's replica, as its first or not: these are what the bucket is
    // told of, and each of them beyond the first of a task is a duplicate. A run that was stopped because
    // somebody else has the task, or whose command had just ended then, is recorded nowhere, and is none.
    // No worker is killed here, so none can record a run without its line.
    let (mut seen, mut runs, mut recorded) = (BTreeSet::new(), 0, 0);
    for node in nodes {
        let ran = node.lines("ran");
        runs += ran.len();
        seen.extend(ran);
        let end = |line: &String| serde_json::from_str::<Value>(line).unwrap()["end"].clone();
        let ends: Vec<Value> = node.lines("ends").iter().map(end).collect();
        recorded += ends.iter().filter(|end| *end == "done" || *end == "done before").count();
        assert!(!ends.iter().any(|end| end == "unrecorded"), "{ends:?}");
    }
    println!(
        "{tasks} tasks, {kills} supervisors killed, {runs} runs, {recorded} recorded by nodes, \
         {duplicates} duplicates"
    );
    assert_eq!(seen.len(), tasks);
    assert!(runs >= recorded, "{runs} runs and {recorded} completions");
    assert_eq!((recorded - tasks) as u64, duplicates);
    assert!(kills > 0);
}

/// Everybody can see whose clock is off, and by how much.
fn clocks_are_told(bucket: &Node) {
    if !cfg!(debug_assertions) {
        eprintln!("NOT TESTED: clocks that are off, which takes debug assertions");
        return;
    }
    let out = bucket.ok(&["nodes", "--json"]);
    let nodes: Vec<Value> = out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(nodes.len(), 3, "{out}");
    for (node, hours) in nodes.iter().zip(HOURS) {
        let ahead = node["node"]["clock_ahead_ms"].as_i64().unwrap();
        assert!((ahead - hours * 3_600_000).abs() < 60_000, "{hours} h: {node}");
        assert_eq!(node["clock_off"], hours != 0, "{node}");
    }
}

/// A client without a replica.
fn bucket(root: &Path, variables: &[(&'static str, String)]) -> Node {
    Node { name: "x", folder: root.to_owned(), variables: variables.to_vec(), line: None }
}

#[test]
fn three_nodes_on_an_s3_server_cut_off_and_killed() {
    let server = Server::ministack();
    let root = tempfile::tempdir().unwrap();
    let variables = [
        ("LEASEHOLD_STORE", format!("s3://{}/sync", server.bucket())),
        ("AWS_ENDPOINT_URL", server.endpoint()),
        ("AWS_ACCESS_KEY_ID", server.access_key().to_owned()),
        ("AWS_SECRET_ACCESS_KEY", server.secret_key().to_owned()),
        ("AWS_DEFAULT_REGION", "us-east-1".to_owned()),
    ];
    let to = server.endpoint().trim_start_matches("http://").to_owned();
    let nodes = three_nodes(root.path(), true, &variables, &to);
    let bucket = bucket(root.path(), &variables);
    converge(&bucket, &nodes, 1000, Duration::from_secs(10));
}

#[test]
fn three_nodes_on_a_directory_killed() {
    let root = tempfile::tempdir().unwrap();
    let variables = [("LEASEHOLD_STORE", root.path().join("bucket").display().to_string())];
    let nodes = three_nodes(root.path(), false, &variables, "");
    let bucket = bucket(root.path(), &variables);
    converge(&bucket, &nodes, 1000, Duration::from_secs(10));
}
