//! Real processes on one index: many writers, many compilers, kill -9. What a writer was told to be
//! there is there in the end, and nothing older.
//!
//! Seconds by default; `LEASEHOLD_FULL=1` takes minutes.

#![allow(clippy::unwrap_used)] // in a test, a failure is a panic
#![allow(clippy::disallowed_methods)] // real processes, in real time

use std::collections::HashMap;
use std::hash::{BuildHasher as _, RandomState};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use leasehold_testkit::servers::Server;
use serde_json::Value;

const BIN: &str = env!("CARGO_BIN_EXE_leasehold");
const KEYS: u64 = 2000;

/// How to reach the store that the processes share.
#[derive(Clone)]
struct Place {
    folder: Option<PathBuf>,
    arguments: Vec<String>,
    environment: Vec<(String, String)>,
}

impl Place {
    fn directory(folder: &Path) -> Self {
        let folder = folder.join("store");
        let store = folder.display().to_string();
        let arguments = vec!["--store".into(), store];
        Self { folder: Some(folder), arguments, environment: Vec::new() }
    }

    fn server(server: &Server) -> Self {
        let url = format!("s3://{}/races", server.bucket());
        Self {
            folder: None,
            arguments: ["--store", &url, "--endpoint", &server.endpoint(), "--region", "us-east-1"]
                .map(str::to_owned)
                .to_vec(),
            environment: vec![
                ("AWS_ACCESS_KEY_ID".into(), server.access_key().into()),
                ("AWS_SECRET_ACCESS_KEY".into(), server.secret_key().into()),
            ],
        }
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(BIN);
        command.args(&self.arguments).args(arguments).env_clear();
        command.envs(self.environment.iter().cloned());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn run(&self, arguments: &[&str], input: &str) -> (bool, String, String) {
        let mut child = self.command(arguments).spawn().unwrap();
        // A process that ends early does not read all of it.
        let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
        let done = child.wait_with_output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (done.status.success(), text(done.stdout), text(done.stderr))
    }

    #[track_caller]
    fn must(&self, arguments: &[&str]) -> String {
        let (done, out, said) = self.run(arguments, "");
        assert!(done, "{arguments:?}: {said}");
        out
    }
}

fn random(below: u64) -> u64 {
    RandomState::new().hash_one(0) % below
}

/// The time of the n-th record: they are told apart by it.
fn time(n: u64) -> String {
    format!(
        "2024-02-15T10:{:02}:{:02}.{:06}Z",
        n / 60_000_000 % 60,
        n / 1_000_000 % 60,
        n % 1_000_000
    )
}

#[derive(Clone, Copy, PartialEq)]
enum Inbox {
    Ours,
    Flat,
}

struct Race {
    place: Place,
    writers: u64,
    compilers: usize,
    seconds: u64,
    lock: bool,
    inbox: Inbox,
}

impl Race {
    fn run(self) {
        let Self { place, writers, compilers, seconds, lock, inbox } = self;
        let full = std::env::var_os("LEASEHOLD_FULL").is_some();
        let end = Instant::now() + Duration::from_secs(if full { seconds * 10 } else { seconds });
        place.must(&["index", "create", "race", "-f", "key", "-f", "n:integer"]);
        // On a busy machine it takes longer until enough has happened to speak of a race.
        let limit = end + Duration::from_secs(120);
        let counter = Arc::new(AtomicU64::new(1));
        // The latest record of each key that a writer was told to be there.
        let expected: Arc<Mutex<HashMap<String, u64>>> = Arc::default();
        let enough = Arc::new(AtomicBool::new(false));
        let killed = Arc::new(AtomicU64::new(0));
        let goes_on = {
            let (expected, enough, killed) = (expected.clone(), enough.clone(), killed.clone());
            move || {
                let now = Instant::now();
                let few = expected.lock().unwrap().len() <= 50 || killed.load(SeqCst) <= 4;
                let on = now < end || (few && now < limit && !enough.load(SeqCst));
                enough.fetch_or(!on, SeqCst);
                on
            }
        };
        let mut threads = Vec::new();
        for writer in 0..writers {
            let (place, counter, expected) = (place.clone(), counter.clone(), expected.clone());
            let goes_on = goes_on.clone();
            threads.push(std::thread::spawn(move || {
                while goes_on() {
                    write_some(&place, inbox, writer, writers, &counter, &expected);
                }
            }));
        }
        for _ in 0..compilers {
            let (place, killed, goes_on) = (place.clone(), killed.clone(), goes_on.clone());
            threads.push(std::thread::spawn(move || {
                while goes_on() {
                    let mut compiler = compiler(&place, lock);
                    let life =
                        Duration::from_millis(20 + random(if random(4) == 0 { 2000 } else { 300 }));
                    std::thread::sleep(life);
                    compiler.kill().unwrap();
                    compiler.wait().unwrap();
                    killed.fetch_add(1, SeqCst);
                }
            }));
        }
        for thread in threads {
            thread.join().unwrap();
        }
        let expected = expected.lock().unwrap().clone();
        assert!(expected.len() > 50, "only {} keys were written", expected.len());
        assert!(killed.load(SeqCst) > 4);
        check(&place, &expected);
        // Everything taken in: what is in the shards alone says the same.
        for _ in 0..20 {
            // A file that was just written is left alone.
            if place.folder.is_some() && inbox == Inbox::Flat {
                std::thread::sleep(Duration::from_secs(1));
            }
            place.must(&["index", "compact", "race"]);
            let status: Value =
                serde_json::from_str(&place.must(&["--json", "index", "status", "race"])).unwrap();
            if status["inbox_objects"] == 0 && status["flat_files"] == 0 {
                break;
            }
        }
        let status: Value =
            serde_json::from_str(&place.must(&["--json", "index", "status", "race"])).unwrap();
        assert_eq!((&status["inbox_objects"], &status["flat_files"]), (&0.into(), &0.into()));
        assert_eq!(status["quarantined"], 0);
        check(&place, &expected);
        place.must(&["index", "verify", "race"]);
    }
}

fn compiler(place: &Place, lock: bool) -> Child {
    let mut arguments = vec!["index", "compile", "race", "--pause", "20ms", "-q"];
    if !lock {
        arguments.push("--no-lock");
    }
    let mut command = place.command(&arguments);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

fn write_some(
    place: &Place,
    inbox: Inbox,
    writer: u64,
    writers: u64,
    counter: &AtomicU64,
    expected: &Mutex<HashMap<String, u64>>,
) {
    let mut written = Vec::new();
    let told = match inbox {
        Inbox::Ours => {
            let mut input = String::new();
            for _ in 0..=random(30) {
                let (key, n) = (format!("key-{}", random(KEYS)), counter.fetch_add(1, SeqCst));
                let at = time(n);
                input.push_str(&format!(r#"{{"key":"{key}","n":{n},"updated_at":"{at}"}}"#));
                input.push('\n');
                written.push((key, n));
            }
            place.run(&["index", "import", "race", "-q"], &input).0
        }
        Inbox::Flat => {
            // A file can be overwritten: each key has one writer, who writes in order.
            let key = format!("key-{}", random(KEYS / writers) * writers + writer);
            let n = counter.fetch_add(1, SeqCst);
            let row = format!("{key}\x1f{n}\x1f{}\n", time(n));
            let file = format!("indexes/race/{key}.usv");
            written.push((key, n));
            let told = place.run(&["put", &file, "-q"], &row).0;
            // Half of them look as if they had been left alone for long, and are taken in at once; unless
            // that has happened already.
            if let Some(store) = &place.folder
                && random(2) == 0
                && let Ok(file) = std::fs::File::options().write(true).open(store.join(file))
            {
                file.set_modified(SystemTime::now() - Duration::from_secs(60)).unwrap();
            }
            told
        }
    };
    assert!(told, "a writer failed");
    let mut expected = expected.lock().unwrap();
    for (key, n) in written {
        let latest = expected.entry(key).or_default();
        *latest = n.max(*latest);
    }
}

fn check(place: &Place, expected: &HashMap<String, u64>) {
    let found = place.must(&["index", "export", "race"]);
    let found: HashMap<String, u64> = found
        .lines()
        .map(|line| {
            let record: Value = serde_json::from_str(line).unwrap();
            (record["key"].as_str().unwrap().to_owned(), record["n"].as_u64().unwrap())
        })
        .collect();
    for (key, n) in expected {
        assert_eq!(found.get(key), Some(n), "{key}");
    }
    assert_eq!(found.len(), expected.len());
}

#[test]
fn writers_and_compilers_in_a_directory() {
    let folder = tempfile::tempdir().unwrap();
    let place = Place::directory(folder.path());
    Race { place, writers: 8, compilers: 4, seconds: 6, lock: true, inbox: Inbox::Ours }.run();
}

#[test]
fn without_locks_in_a_directory() {
    let folder = tempfile::tempdir().unwrap();
    let place = Place::directory(folder.path());
    Race { place, writers: 8, compilers: 4, seconds: 6, lock: false, inbox: Inbox::Ours }.run();
}

#[test]
fn the_flat_inbox_in_a_directory() {
    let folder = tempfile::tempdir().unwrap();
    let place = Place::directory(folder.path());
    Race { place, writers: 8, compilers: 4, seconds: 6, lock: true, inbox: Inbox::Flat }.run();
}

#[test]
fn writers_and_compilers_on_seaweedfs() {
    let server = Server::seaweedfs();
    let place = Place::server(&server);
    Race { place, writers: 8, compilers: 4, seconds: 8, lock: true, inbox: Inbox::Ours }.run();
}

#[test]
fn without_locks_on_seaweedfs() {
    let server = Server::seaweedfs();
    let place = Place::server(&server);
    Race { place, writers: 8, compilers: 4, seconds: 8, lock: false, inbox: Inbox::Ours }.run();
}

#[test]
fn the_flat_inbox_on_seaweedfs() {
    let server = Server::seaweedfs();
    let place = Place::server(&server);
    Race { place, writers: 8, compilers: 4, seconds: 8, lock: false, inbox: Inbox::Flat }.run();
}
