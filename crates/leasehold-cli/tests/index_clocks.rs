//! Commands one after the other, each a process of its own: the later one counts. And a compiler of all
//! indexes, whatever else stands among them.

#![allow(clippy::unwrap_used)] // in a test, a failure is a panic
#![allow(clippy::disallowed_methods)] // real processes, in real time

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use leasehold_testkit::servers::Server;

const BIN: &str = env!("CARGO_BIN_EXE_leasehold");

fn leasehold(store: &str) -> Command {
    let mut command = Command::new(BIN);
    command.env_clear().env("LEASEHOLD_STORE", store);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn on_server(server: &Server) -> impl Fn() -> Command + use<> {
    let url = format!("s3://{}/clocks", server.bucket());
    let (endpoint, key) = (server.endpoint(), server.access_key().to_owned());
    let secret = server.secret_key().to_owned();
    move || {
        let mut command = leasehold(&url);
        command.args(["--endpoint", &endpoint, "--region", "us-east-1"]);
        command.env("AWS_ACCESS_KEY_ID", &key).env("AWS_SECRET_ACCESS_KEY", &secret);
        command
    }
}

#[track_caller]
fn must(command: &mut Command, arguments: &[&str]) -> String {
    let Output { status, stdout, stderr } = command.args(arguments).output().unwrap();
    assert!(status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&stderr));
    String::from_utf8(stdout).unwrap()
}

fn is_there(command: &mut Command, key: &str) -> bool {
    command.args(["index", "get", "t", key]).status().unwrap().success()
}

/// A bucket tells whole seconds, and a new process knows no more than that.
#[test]
fn the_later_of_two_commands_counts_on_a_bucket() {
    let server = Server::ministack();
    let command = on_server(&server);
    must(&mut command(), &["index", "create", "t", "-f", "k", "-f", "n:integer"]);
    for n in 0..12 {
        let key = format!("k=a{n}");
        must(&mut command(), &["index", "put", "t", &key, "n=1"]);
        must(&mut command(), &["index", "put", "t", &key, "n=2"]);
        let found = must(&mut command(), &["index", "get", "t", &key[2..], "--json"]);
        assert!(found.contains("\"n\":2"), "{n}: {found}");
        must(&mut command(), &["index", "delete", "t", &key[2..]]);
        assert!(!is_there(&mut command(), &key[2..]), "{n}");
    }
}

/// What comes through a pipe counts from when it came, also against what was put while the pipe was open.
#[test]
fn an_import_from_a_pipe_is_of_when_its_lines_came() {
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("store").display().to_string();
    must(&mut leasehold(&store), &["index", "create", "t", "-f", "k", "-f", "n:integer"]);
    must(&mut leasehold(&store), &["index", "put", "t", "k=y", "n=1"]);
    let mut import = leasehold(&store);
    import.args(["index", "import", "t", "-", "--format", "jsonl"]).stdin(Stdio::piped());
    let mut import = import.spawn().unwrap();
    // It has begun by then; if it has not, this shows nothing, and it never fails wrongly.
    std::thread::sleep(Duration::from_millis(1500));
    must(&mut leasehold(&store), &["index", "put", "t", "k=x", "n=1"]);
    must(&mut leasehold(&store), &["index", "delete", "t", "y"]);
    let mut pipe = import.stdin.take().unwrap();
    pipe.write_all(b"{\"k\":\"x\",\"n\":2}\n{\"k\":\"y\",\"n\":2}\n").unwrap();
    drop(pipe);
    assert!(import.wait().unwrap().success());
    for key in ["x", "y"] {
        let found = must(&mut leasehold(&store), &["index", "get", "t", key, "--json"]);
        assert!(found.contains("\"n\":2"), "{key}: {found}");
    }
}

fn files(folder: &Path) -> usize {
    let Ok(entries) = std::fs::read_dir(folder) else { return 0 };
    let entries = entries.flatten();
    entries.map(|entry| if entry.path().is_dir() { files(&entry.path()) } else { 1 }).sum()
}

/// A folder that is no index keeps none from being compiled, and one that is made later is compiled too.
#[test]
fn all_indexes_are_compiled_whatever_else_is_there() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("store");
    let store = root.display().to_string();
    must(&mut leasehold(&store), &["index", "create", "t", "-f", "k", "-f", "n:integer"]);
    must(&mut leasehold(&store), &["index", "put", "t", "k=a", "n=1"]);
    std::fs::create_dir_all(root.join("indexes/stranger")).unwrap();
    std::fs::write(root.join("indexes/stranger/notes.txt"), "hello").unwrap();
    std::fs::create_dir_all(root.join("indexes/broken")).unwrap();
    std::fs::write(root.join("indexes/broken/datapackage.json"), "{").unwrap();
    assert_eq!(must(&mut leasehold(&store), &["index", "ls"]), "broken\nt\n");
    let compiler =
        leasehold(&store).args(["index", "compile", "--pause", "100ms"]).spawn().unwrap();
    let inbox_is_taken = |index: &str| {
        let until = Instant::now() + Duration::from_secs(60);
        while files(&root.join("indexes").join(index).join("inbox")) > 0 {
            assert!(Instant::now() < until, "nobody compiles {index}");
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    inbox_is_taken("t");
    must(&mut leasehold(&store), &["index", "create", "later", "-f", "k", "-f", "n:integer"]);
    must(&mut leasehold(&store), &["index", "put", "later", "k=a", "n=1"]);
    inbox_is_taken("later");
    let pid = compiler.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    let done = compiler.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{said}");
    for name in ["stranger", "broken"] {
        assert_eq!(said.matches(&format!("name={name}")).count(), 1, "{said}");
    }
}
