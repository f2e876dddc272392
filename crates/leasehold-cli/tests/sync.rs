//! Relaxed mode with real processes: three nodes with their own replicas and one bucket, cut off at random,
//! their syncs killed.

#![allow(clippy::unwrap_used, missing_docs)] // in a test, a failure is a panic
#![allow(clippy::disallowed_methods)] // real processes take real time

use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
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

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct Node {
    folder: PathBuf,
    variables: Vec<(&'static str, String)>,
    line: Option<Line>,
}

impl Node {
    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(BIN);
        command.current_dir(&self.folder).env("NO_COLOR", "1").env_remove("LEASEHOLD_STORE");
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::null()).args(words);
        command
    }

    #[track_caller]
    fn json(&self, words: &[&str]) -> Value {
        let output = self.command(&[&["--json"], words].concat()).output().unwrap();
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    fn push(&self, from: usize, count: usize) {
        let mut command = self.command(&["queue", "push", "q", "-", "--bundle", "1"]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let lines: String = (from..from + count).map(|n| format!("{n}\n")).collect();
        child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
        assert!(child.wait().unwrap().success());
    }

    fn syncer(&self) -> Running {
        let mut command = self.command(&["-q", "sync", "run", "q"]);
        Running(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
    }

    fn worker(&self) -> Running {
        let script = "echo {} >> log";
        let words = ["--json", "-q", "queue", "work", "q", "-j", "2", "--", "sh", "-c", script];
        let mut command = self.command(&words);
        Running(command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap())
    }
}

/// Ends a worker, and returns how many completions it reported: as the first here, or not.
fn drain(mut worker: Running) -> u64 {
    let pid = worker.0.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    let mut text = String::new();
    worker.0.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    assert!(worker.0.wait().unwrap().success(), "{text}");
    let report: Value = serde_json::from_str(text.trim()).unwrap();
    report["done"].as_u64().unwrap() + report["done_before"].as_u64().unwrap()
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

fn three_nodes(
    root: &std::path::Path,
    lines: bool,
    variables: &[(&'static str, String)],
    to: &str,
) -> Vec<Node> {
    let node = |name: &str| {
        let folder = root.join(name);
        std::fs::create_dir(&folder).unwrap();
        let mut variables = variables.to_vec();
        variables.push(("LEASEHOLD_REPLICA", folder.join("replica").display().to_string()));
        let line = lines.then(|| Line::new(to.to_owned()));
        if let Some(line) = &line {
            variables.push(("AWS_ENDPOINT_URL", format!("http://{}", line.address)));
        }
        Node { folder, variables, line }
    };
    ["a", "b", "c"].map(node).into()
}

fn converge(
    root: &std::path::Path,
    bucket: &Node,
    nodes: &[Node],
    tasks: usize,
    trouble: Duration,
) {
    let settings = ["--mode", "relaxed", "--sync-up", "1s", "--sync-down", "2s", "--ttl", "9s"];
    let created =
        bucket.command(&[&["queue", "create", "q"][..], &settings].concat()).output().unwrap();
    assert!(created.status.success(), "{}", String::from_utf8_lossy(&created.stderr));
    // Half of them in the bucket, the others by the nodes, which do not ask anybody.
    let each = tasks / 6;
    let there = tasks - 3 * each;
    bucket.push(0, there);
    let syncers_of = |node: &Node| {
        let joined = node.command(&["sync", "now", "q"]).output().unwrap();
        assert!(joined.status.success(), "{}", String::from_utf8_lossy(&joined.stderr));
        node.syncer()
    };
    let mut syncers: Vec<Running> = nodes.iter().map(syncers_of).collect();
    for (n, node) in nodes.iter().enumerate() {
        node.push(there + n * each, each);
    }
    let workers: Vec<Running> = nodes.iter().map(Node::worker).collect();
    let mut dice = Dice(7);
    let end = Instant::now() + trouble;
    while Instant::now() < end {
        std::thread::sleep(Duration::from_millis(100 + dice.roll(300)));
        let at = dice.roll(3) as usize;
        if let Some(line) = &nodes[at].line {
            line.state.store(dice.roll(4) as u8, SeqCst);
        }
        if dice.roll(3) == 0 {
            let at = dice.roll(3) as usize;
            // kill -9, in the middle of whatever it does.
            syncers[at].0.kill().unwrap();
            syncers[at].0.wait().unwrap();
            syncers[at] = nodes[at].syncer();
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
    let completions: u64 = workers.into_iter().map(drain).sum();
    drop(syncers);
    // Everybody tells what is still to be told, and twice so that nothing comes back.
    let mut duplicates = 0;
    for round in 0..2 {
        for node in nodes {
            node.json(&["sync", "now", "q"]);
            let status = node.json(&["sync", "status", "q"]);
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
    // Each was done, and each run beyond the first is a duplicate.
    let mut seen = BTreeSet::new();
    let mut lines = 0;
    for node in nodes {
        let log = std::fs::read_to_string(node.folder.join("log")).unwrap_or_default();
        lines += log.lines().count() as u64;
        seen.extend(log.lines().map(str::to_owned));
    }
    println!(
        "{tasks} tasks, {lines} runs, {completions} completions reported, {duplicates} duplicates"
    );
    assert_eq!(seen.len(), tasks);
    assert!(lines >= completions, "{lines} runs and {completions} completions");
    assert_eq!(completions - tasks as u64, duplicates, "{}", root.display());
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
    let bucket = Node { folder: root.path().to_owned(), variables: variables.to_vec(), line: None };
    converge(root.path(), &bucket, &nodes, 1000, Duration::from_secs(15));
}

#[test]
fn three_nodes_on_a_directory_killed() {
    let root = tempfile::tempdir().unwrap();
    let variables = [("LEASEHOLD_STORE", root.path().join("bucket").display().to_string())];
    let nodes = three_nodes(root.path(), false, &variables, "");
    let bucket = Node { folder: root.path().to_owned(), variables: variables.to_vec(), line: None };
    converge(root.path(), &bucket, &nodes, 1000, Duration::from_secs(10));
}
