//! `leasehold supervise`, `fleet` and `nodes` with real processes: reconfigured, crashed, drained and
//! killed, in a directory and on a real S3 server.

#![allow(clippy::unwrap_used, missing_docs)] // in a test, a failure is a panic
#![allow(clippy::disallowed_methods)] // real processes take real time

mod bad_input;
mod crashes;
mod drain;
mod idle;
mod nodes;
mod plan;
mod relaxed;
mod trouble;

use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use leasehold_testkit::servers::Server;
use serde_json::Value;

pub const BIN: &str = env!("CARGO_BIN_EXE_leasehold");

/// A folder to work in, and the store that commands use there.
pub struct Place {
    pub folder: tempfile::TempDir,
    pub variables: Vec<(&'static str, String)>,
}

pub fn directory() -> Place {
    Place { folder: tempfile::tempdir().unwrap(), variables: Vec::new() }
}

/// A place in the bucket of a real S3 server.
pub fn bucket(prefix: &str) -> Place {
    static SERVER: OnceLock<Server> = OnceLock::new();
    let server = SERVER.get_or_init(Server::ministack);
    let variables = vec![
        ("LEASEHOLD_STORE", format!("s3://{}/{prefix}", server.bucket())),
        ("AWS_ENDPOINT_URL", server.endpoint()),
        ("AWS_ACCESS_KEY_ID", server.access_key().to_owned()),
        ("AWS_SECRET_ACCESS_KEY", server.secret_key().to_owned()),
        ("AWS_DEFAULT_REGION", "us-east-1".to_owned()),
    ];
    Place { folder: tempfile::tempdir().unwrap(), variables }
}

impl Place {
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(BIN);
        command.current_dir(self.path()).env("NO_COLOR", "1").env_remove("LEASEHOLD_STORE");
        command.env_remove("NOTIFY_SOCKET").env("LEASEHOLD_STATE", self.path().join("state"));
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::null()).args(words);
        command
    }

    /// Code, output, errors.
    pub fn run(&self, words: &[&str]) -> (i32, String, String) {
        let done = self.command(words).output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (done.status.code().unwrap_or(-1), text(done.stdout), text(done.stderr))
    }

    #[track_caller]
    pub fn ok(&self, words: &[&str]) -> String {
        let (code, out, err) = self.run(words);
        assert_eq!(code, 0, "{words:?}: {out}{err}");
        assert!(!err.contains("panicked"), "{err}");
        out
    }

    #[track_caller]
    pub fn fails(&self, words: &[&str], code: i32, part: &str) {
        let (was, out, err) = self.run(words);
        assert_eq!(was, code, "{words:?}: {out}{err}");
        assert!(err.contains(part), "{words:?}: {part:?} is not in: {err}");
        assert!(!err.contains("panicked"), "{err}");
    }

    /// Makes this the fleet's plan.
    #[track_caller]
    pub fn plan(&self, text: &str) {
        std::fs::write(self.path().join("plan.toml"), text).unwrap();
        self.ok(&["fleet", "set", "plan.toml"]);
    }

    /// A supervisor of node `n` in the background. What it says goes to the file `said`.
    pub fn supervise(&self, words: &[&str]) -> Running {
        let said =
            File::options().create(true).append(true).open(self.path().join("said")).unwrap();
        let mut command = self.command(&["supervise", "--node", "n"]);
        command.args(words).stdout(Stdio::null()).stderr(said);
        Running(command.spawn().unwrap())
    }

    pub fn said(&self) -> String {
        std::fs::read_to_string(self.path().join("said")).unwrap_or_default()
    }

    /// What `leasehold nodes` says of node `n`.
    #[track_caller]
    pub fn node(&self) -> Option<Value> {
        let out = self.ok(&["nodes", "--json"]);
        let mut nodes = out.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        nodes.find(|node| node["name"] == "n")
    }

    /// What it says once it says this.
    #[track_caller]
    pub fn node_when(&self, what: &str, is_so: impl Fn(&Value) -> bool) -> Value {
        let mut node = Value::Null;
        wait_until(what, || {
            node = self.node().unwrap_or_default();
            is_so(&node)
        });
        node
    }

    /// The numbers of the processes that run, once there are so many of this queue or index.
    #[track_caller]
    pub fn pids(&self, of: &str, count: usize) -> Vec<u64> {
        let node = self
            .node_when(&format!("{count} processes of {of}"), |node| pids(node, of).len() == count);
        pids(&node, of)
    }

    #[track_caller]
    pub fn push(&self, queue: &str, range: std::ops::Range<u64>) {
        let tasks: Vec<String> = range.map(|n| n.to_string()).collect();
        let tasks = tasks.iter().map(String::as_str);
        self.ok(
            &[&["queue", "push", queue, "--bundle", "1"][..], &tasks.collect::<Vec<_>>()].concat()
        );
    }

    /// How many tasks of a queue are free, leased, completed, failed.
    #[track_caller]
    pub fn counts(&self, queue: &str) -> [u64; 4] {
        let status: Value =
            serde_json::from_str(&self.ok(&["queue", "status", queue, "--json"])).unwrap();
        ["free", "leased", "completed", "failed"].map(|name| status[name].as_u64().unwrap())
    }

    /// The lines of a file, if it is there.
    pub fn lines(&self, name: &str) -> Vec<String> {
        let text = std::fs::read_to_string(self.path().join(name)).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }
}

/// The numbers of the processes that run and are not told to end.
pub fn pids(node: &Value, of: &str) -> Vec<u64> {
    let processes = node["node"]["processes"].as_array().cloned().unwrap_or_default();
    let ours = processes.iter().filter(|one| one["of"][0] == of && one["state"] == "running");
    ours.map(|one| one["pid"].as_u64().unwrap()).collect()
}

/// A process that does not outlive its test.
pub struct Running(pub Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[track_caller]
pub fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    // Long: other tests may have most of the machine.
    let end = Instant::now() + Duration::from_secs(180);
    while !is_so() {
        assert!(Instant::now() < end, "not within three minutes: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

pub fn signal(pid: u64, name: &str) {
    let done = Command::new("kill").args([format!("-{name}"), pid.to_string()]).status();
    assert!(done.unwrap().success());
}

pub fn is_there(pid: u64) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.trim().chars().next());
    state.is_some_and(|state| state != 'Z')
}

impl Running {
    pub fn pid(&self) -> u64 {
        self.0.id().into()
    }

    /// Its exit code, which must come within a minute.
    #[track_caller]
    pub fn ending(mut self) -> Option<i32> {
        let mut status = None;
        wait_until("the supervisor ends", || {
            status = self.0.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap().code()
    }

    /// Tells it to end, and waits for that.
    #[track_caller]
    pub fn end(self) {
        signal(self.pid(), "TERM");
        assert_eq!(self.ending(), Some(0));
    }
}
