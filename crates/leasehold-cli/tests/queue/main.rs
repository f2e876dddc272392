//! `leasehold queue`, as people and scripts use it: real processes, in a directory and on real S3
//! servers, killed, stopped and drained.

#![allow(clippy::unwrap_used, missing_docs)] // in a test, a failure is a panic
#![allow(clippy::disallowed_methods)] // real processes take real time

mod bad_input;
mod commands;
mod drained;
mod interop;
mod killed;
mod stream;
mod work;

use std::io::Write as _;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use leasehold_testkit::servers::Server;
use serde_json::Value;

pub const BIN: &str = env!("CARGO_BIN_EXE_leasehold");

/// A folder to work in, and the store that commands use there.
pub struct Place {
    pub folder: tempfile::TempDir,
    pub variables: Vec<(&'static str, String)>,
}

/// A directory.
pub fn directory() -> Place {
    Place { folder: tempfile::tempdir().unwrap(), variables: Vec::new() }
}

/// A real S3 server, one for all tests.
pub fn seaweedfs() -> &'static Server {
    static SERVER: OnceLock<Server> = OnceLock::new();
    SERVER.get_or_init(Server::seaweedfs)
}

/// A place in its bucket.
pub fn bucket(prefix: &str) -> Place {
    let server = seaweedfs();
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

    /// `leasehold queue WORDS…`.
    pub fn queue(&self, words: &[&str]) -> Command {
        let mut command = Command::new(BIN);
        command.current_dir(self.path()).env("NO_COLOR", "1").env_remove("LEASEHOLD_STORE");
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::null()).arg("queue").args(words);
        command
    }

    /// Runs it to its end: code, output, errors.
    pub fn run(&self, words: &[&str]) -> (i32, String, String) {
        run(&mut self.queue(words))
    }

    /// The same with this on standard input.
    pub fn feed(&self, words: &[&str], input: &[u8]) -> (i32, String, String) {
        let mut command = self.queue(words);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        let input = input.to_vec();
        // It may end without reading all of it.
        let feeding = std::thread::spawn(move || drop(stdin.write_all(&input)));
        let output = child.wait_with_output().unwrap();
        feeding.join().unwrap();
        texts(output)
    }

    /// What it printed, which must have gone well.
    #[track_caller]
    pub fn ok(&self, words: &[&str]) -> String {
        let (code, out, err) = self.run(words);
        assert_eq!(code, 0, "{words:?}: {out}{err}");
        assert!(!err.contains("panicked"), "{err}");
        out
    }

    /// Works until there is nothing left, with tasks given up.
    #[track_caller]
    pub fn gives_up(&self, words: &[&str]) {
        let (code, out, err) = self.run(words);
        assert_eq!(code, 1, "{words:?}: {out}{err}");
        assert!(err.contains(" given up"), "{words:?}: {err}");
    }

    /// The same as values, one per line.
    #[track_caller]
    pub fn json(&self, words: &[&str]) -> Vec<Value> {
        let out = self.ok(&[&["--json"], words].concat());
        out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// Must fail with this code, saying this, and printing nothing.
    #[track_caller]
    pub fn fails(&self, words: &[&str], code: i32, part: &str) {
        let (was, out, err) = self.run(words);
        assert_eq!((was, out.as_str()), (code, ""), "{words:?}: {err}");
        assert!(err.contains(part), "{words:?}: {part:?} is not in: {err}");
        assert!(!err.contains("panicked"), "{err}");
    }

    /// A worker in the background.
    pub fn worker(&self, words: &[&str], script: &str) -> Running {
        let mut command = self.queue(&["work"]);
        command.args(words).args(["--", "sh", "-c", script]);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        Running(command.spawn().unwrap())
    }

    /// How many tasks of `q` are free, leased, completed, failed.
    #[track_caller]
    pub fn counts(&self) -> [u64; 4] {
        let status = self.json(&["status", "q"]).remove(0);
        ["free", "leased", "completed", "failed"].map(|name| status[name].as_u64().unwrap())
    }

    /// What became of a task.
    #[track_caller]
    pub fn show(&self, id: &str) -> Value {
        self.json(&["show", "q", id]).remove(0)
    }

    /// The content of a file that appears, sooner or later.
    #[track_caller]
    pub fn wait_for(&self, name: &str) -> String {
        let mut text = String::new();
        wait_until(name, || {
            text = std::fs::read_to_string(self.path().join(name)).unwrap_or_default();
            !text.is_empty()
        });
        text
    }

    /// The lines of a file, if it is there.
    pub fn lines(&self, name: &str) -> Vec<String> {
        let text = std::fs::read_to_string(self.path().join(name)).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }
}

/// A process that does not outlive its test.
pub struct Running(pub Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn texts(output: Output) -> (i32, String, String) {
    let Output { status, stdout, stderr } = output;
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (status.code().unwrap_or(-1), text(stdout), text(stderr))
}

pub fn run(command: &mut Command) -> (i32, String, String) {
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let pid = child.id();
    let (done, ended) = std::sync::mpsc::channel::<()>();
    // What hangs fails.
    let watch = std::thread::spawn(move || {
        if ended.recv_timeout(Duration::from_secs(100)) == Err(RecvTimeoutError::Timeout) {
            let _ = Command::new("kill").args(["-9", &pid.to_string()]).status();
        }
    });
    let output = child.wait_with_output().unwrap();
    drop(done);
    watch.join().unwrap();
    texts(output)
}

/// Waits until it is so.
#[track_caller]
pub fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < end, "not within a minute: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

pub fn signal(child: &Child, name: &str) {
    let done = Command::new("kill").args([format!("-{name}"), child.id().to_string()]).status();
    assert!(done.unwrap().success());
}

pub fn kill(mut child: Running) {
    child.0.kill().unwrap();
    child.0.wait().unwrap();
}

/// Its exit code, which must come within a minute.
#[track_caller]
pub fn ending(mut child: Running) -> Option<i32> {
    let mut status = None;
    wait_until("the process ends", || {
        status = child.0.try_wait().unwrap();
        status.is_some()
    });
    status.unwrap().code()
}

/// Whether the tests are to take their time.
pub fn full() -> bool {
    std::env::var_os("LEASEHOLD_FULL").is_some()
}
