//! Bad input gets a clear message and a non-zero exit, and leaves nothing behind.

#![allow(clippy::unwrap_used)] // in a test, a failure is a panic

use std::path::Path;
use std::process::{Command, Output};

use leasehold_testkit::servers::Server;

const BIN: &str = env!("CARGO_BIN_EXE_leasehold");

fn leasehold(folder: &Path) -> Command {
    let mut command = Command::new(BIN);
    command.current_dir(folder).env_clear().env("NO_COLOR", "1");
    command
}

/// Runs it, and checks the exit code and a part of the message.
#[track_caller]
fn fails(command: &mut Command, code: i32, part: &str) -> String {
    let Output { status, stdout, stderr } = command.output().unwrap();
    let stderr = String::from_utf8(stderr).unwrap();
    assert_eq!(status.code(), Some(code), "{stderr}");
    assert!(stderr.contains(part), "{part:?} is not in: {stderr}");
    assert!(!stderr.contains("panicked"), "{stderr}");
    assert!(stdout.is_empty(), "{}", String::from_utf8_lossy(&stdout));
    stderr
}

fn is_empty(folder: &Path) -> bool {
    folder.read_dir().unwrap().next().is_none()
}

#[test]
fn stores_that_do_not_exist() {
    let folder = tempfile::tempdir().unwrap();
    for (url, part) in [
        ("ftp://host/x", "unknown scheme \"ftp\""),
        ("s3://", "names no bucket"),
        ("s3:bucket", "lacks its \"//\""),
        ("s3/bucket/x", "./s3/bucket/x if you mean a folder"),
        ("s3//bucket", "if you mean a folder"),
        ("gs/bucket", "if you mean a folder"),
        ("memory", "if you mean a folder"),
        ("s3://bu cket/x", "cannot be the name of a bucket"),
        ("gs:///x", "names no bucket"),
        ("file://host/x", "absolute path"),
        ("s3://bucket/a/../b", "'..'"),
    ] {
        fails(leasehold(folder.path()).args(["--store", url, "put", "k", "--text", "x"]), 2, part);
    }
    fails(leasehold(folder.path()).args(["--store", "s3://bucket", "ls"]), 2, "no region");
    fails(
        leasehold(folder.path()).args(["--store", "az://container", "ls"]),
        2,
        "no storage account",
    );
    assert!(is_empty(folder.path()));
}

#[test]
fn keys_that_cannot_be() {
    let folder = tempfile::tempdir().unwrap();
    let long = "x".repeat(1025);
    for (key, part) in [
        ("", "cannot be empty"),
        ("a/../b", "'..'"),
        ("..", "'..'"),
        ("/a", "cannot start or end with '/'"),
        ("a//b", "'//'"),
        ("tab\there", "control characters"),
        (long.as_str(), "at most 1024 bytes, this one has 1025"),
    ] {
        for verb in [&["cat"][..], &["stat"], &["rm"], &["put", "--text", "x"]] {
            fails(leasehold(folder.path()).args(verb).arg(key), 2, part);
        }
    }
    fails(leasehold(folder.path()).args(["ls", "../x"]), 2, "'..'");
    fails(leasehold(folder.path()).args(["rm", "ok", "a/../b"]), 2, "'..'");
    fails(leasehold(folder.path()).args(["rm", "--prefix", ""]), 2, "whole store");
    fails(
        leasehold(folder.path()).args(["rm", "a", "b", "--if-version", "1"]),
        2,
        "exactly one key",
    );
    assert!(is_empty(folder.path()));
}

#[test]
fn sources_that_cannot_be_read() {
    let folder = tempfile::tempdir().unwrap();
    fails(leasehold(folder.path()).args(["put", "k", "missing.txt"]), 1, "cannot read missing.txt");
    fails(leasehold(folder.path()).args(["put", "k", "."]), 1, "cannot read .");
    assert!(is_empty(folder.path()));
}

#[test]
fn a_file_where_a_directory_is_expected() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("file"), "content").unwrap();
    for store in ["file", "file/below"] {
        let mut put = leasehold(folder.path());
        fails(put.args(["--store", store, "put", "k", "--text", "x"]), 2, "is a file");
    }
    assert_eq!(std::fs::read(folder.path().join("file")).unwrap(), b"content");
}

#[test]
fn configuration_that_is_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("leasehold.toml");
    for (text, part) in [
        ("store = 3", "store"),
        ("stroe = \"x\"", "unknown field `stroe`"),
        ("[connection]\nrequest_timeout = \"fast\"", "not a duration like"),
        ("[connection]\nconnections = 0", "at least 1"),
        ("store = \"ftp://x\"", "unknown scheme"),
        ("not toml", "leasehold.toml is not right"),
        ("[lock]\nttl = \"3x\"", "leasehold.toml is not right"),
        ("[lock]\nttl = \"3x\"", "ttl = \"3x\""),
    ] {
        std::fs::write(&config, text).unwrap();
        fails(leasehold(folder.path()).arg("ls"), 2, part);
    }
    fails(leasehold(folder.path()).args(["--config", "none.toml", "ls"]), 1, "none.toml");
    fails(leasehold(folder.path()).args(["--connections", "many", "ls"]), 2, "invalid value");
    fails(leasehold(folder.path()).arg("lss"), 2, "unrecognized subcommand");
}

/// The order is flag, environment, file, default.
#[test]
fn the_store_comes_from_flag_then_environment_then_file() {
    let folder = tempfile::tempdir().unwrap();
    let below = folder.path().join("below");
    std::fs::create_dir(&below).unwrap();
    let put = |command: &mut Command| {
        let done = command.args(["put", "k", "--text", "x"]).output().unwrap();
        assert!(done.status.success(), "{done:?}");
    };
    put(&mut leasehold(&below));
    assert!(below.join(".leasehold/k").exists());
    std::fs::write(folder.path().join("leasehold.toml"), "store = \"by-file\"").unwrap();
    put(&mut leasehold(&below));
    assert!(folder.path().join("by-file/k").exists(), "relative to the file");
    put(leasehold(&below).env("LEASEHOLD_STORE", "by-env"));
    assert!(below.join("by-env/k").exists());
    put(leasehold(&below).env("LEASEHOLD_STORE", "by-env2").args(["--store", "by-flag"]));
    assert!(below.join("by-flag/k").exists() && !below.join("by-env2").exists());
}

/// In a mount namespace of its own, so that nothing of this machine is touched. Works for any user.
fn in_namespace(folder: &Path, script: &str) -> Output {
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--mount", "sh", "-euc", script]);
    command.current_dir(folder).env("BIN", BIN).env("NO_COLOR", "1");
    command.output().expect("unshare is part of util-linux")
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_said_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let script = r#"
        mkdir disk && mount -t tmpfs -o size=256k tmpfs disk
        $BIN --store disk/store put small --text fits
        head -c 1000000 /dev/zero > big
        code=0; $BIN --store disk/store put big big || code=$?
        echo "code $code"
        $BIN --store disk/store cat small
        echo
        ls disk/store
        echo "$(find disk/store/.lh/tmp -type f | wc -l) temporary files"
    "#;
    let done = in_namespace(folder.path(), script);
    let (out, err) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert!(out.contains("code 5"), "{out}{err}");
    assert!(err.contains("the disk is full: make room"), "{err}");
    assert!(out.contains("fits") && !out.contains("big"), "{out}");
    assert!(out.contains("\n0 temporary files"), "{out}");
}

/// A claim that cannot be written is none: as soon as there is room, the task is done.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_holds_no_task() {
    let folder = tempfile::tempdir().unwrap();
    let script = r#"
        mkdir disk && mount -t tmpfs -o size=512k tmpfs disk
        $BIN --store disk/store queue push q one
        $BIN --store disk/store queue work q --exit-when-empty -- true
        $BIN --store disk/store queue push q two
        head -c 1000000 /dev/zero > disk/filler || true
        $BIN --store disk/store queue work q --exit-when-empty -- true 2> said &
        tries=0
        until grep -q full said; do tries=$((tries + 1)); [ $tries -lt 300 ]; sleep 0.1; done
        cat said >&2
        echo "$(find disk/store/queues/q/pending -name lease.json | wc -l) leases"
        rm disk/filler
        wait $!
        echo "$(find disk/store/queues/q/pending -type f | wc -l) left"
    "#;
    let done = in_namespace(folder.path(), script);
    let (out, err) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert!(done.status.success(), "{out}{err}");
    assert!(err.contains("the disk is full: make room"), "{out}{err}");
    assert!(out.contains("\n0 leases") && out.contains("\n0 left"), "{out}{err}");
}

#[cfg(target_os = "linux")]
#[test]
fn a_read_only_directory_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let script = r#"
        mkdir disk && mount -t tmpfs tmpfs disk
        $BIN --store disk/store put k --text old
        mount -o remount,ro disk
        code=0; $BIN --store disk/store put k --text new || code=$?; echo "replace $code"
        code=0; $BIN --store disk/store rm k || code=$?; echo "delete $code"
        code=0; $BIN --store disk/other put k --text new || code=$?; echo "create $code"
        $BIN --store disk/store cat k
    "#;
    let done = in_namespace(folder.path(), script);
    let (out, err) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    for verb in ["replace 1", "delete 1", "create 1"] {
        assert!(out.contains(verb), "{verb}: {out}{err}");
    }
    assert!(err.contains("Read-only file system"), "{err}");
    assert!(out.ends_with("old"), "reading still works: {out}{err}");
}

fn bucket<'a>(command: &'a mut Command, server: &Server, secret: &str) -> &'a mut Command {
    command
        .env("AWS_ACCESS_KEY_ID", server.access_key())
        .env("AWS_SECRET_ACCESS_KEY", secret)
        .env("AWS_ENDPOINT_URL", server.endpoint())
        .env("LEASEHOLD_STORE", format!("s3://{}/fleet", server.bucket()))
}

#[test]
fn buckets_that_do_not_let_us() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::seaweedfs();
    let run = || leasehold(folder.path());
    let put = ["put", "k", "--text", "x"];
    fails(bucket(&mut run(), &server, "wrong").args(put), 1, "refuses these credentials");
    fails(bucket(&mut run(), &server, "wrong").arg("ls"), 1, "refuses these credentials");
    let mut other = run();
    bucket(&mut other, &server, server.secret_key()).args(["--store", "s3://no-such-bucket"]);
    fails(other.args(put), 2, "the bucket does not exist");
    let mut fine = run();
    let done = bucket(&mut fine, &server, server.secret_key()).args(put).output().unwrap();
    assert!(done.status.success(), "{done:?}");
    let mut ls = run();
    let listed = bucket(&mut ls, &server, server.secret_key()).arg("ls").output().unwrap();
    assert_eq!(listed.stdout, b"k\nleasehold.json\n");
}

#[test]
fn an_endpoint_that_does_not_answer() {
    let folder = tempfile::tempdir().unwrap();
    // A port that nobody listens on: bound once, and let go.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut put = leasehold(folder.path());
    put.args(["--endpoint", &format!("http://127.0.0.1:{port}"), "--store", "s3://bucket"]);
    put.env("AWS_ACCESS_KEY_ID", "k").env("AWS_SECRET_ACCESS_KEY", "s");
    fails(put.args(["put", "k", "--text", "x"]), 5, "the store did not answer");
    assert!(is_empty(folder.path()));
}

#[test]
fn a_store_from_the_future_is_read_but_not_written() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join(".leasehold");
    std::fs::create_dir(&root).unwrap();
    std::fs::write(root.join("k"), "content").unwrap();
    for (record, part) in [
        (r#"{"format":2}"#, "format 2"),
        (r#"{"format":1,"requires":["time-travel"]}"#, "requires time-travel"),
        ("{", "not a Leasehold root record"),
    ] {
        std::fs::write(root.join("leasehold.json"), record).unwrap();
        let mut put = leasehold(folder.path());
        fails(put.args(["put", "k", "--text", "new"]), 1, part);
        fails(leasehold(folder.path()).args(["rm", "k"]), 1, part);
        let cat = leasehold(folder.path()).args(["cat", "k"]).output().unwrap();
        assert_eq!(cat.stdout, b"content");
    }
}

/// Nobody locks everybody out by a slip of the finger, and who did it otherwise is told how to mend it.
#[test]
fn the_root_record_is_not_written_by_hand_and_can_be_repaired() {
    let folder = tempfile::tempdir().unwrap();
    let run = || leasehold(folder.path());
    let ok = |words: &[&str]| {
        let done = run().args(words).output().unwrap();
        assert!(done.status.success(), "{words:?}: {done:?}");
        String::from_utf8(done.stdout).unwrap()
    };
    ok(&["put", "k", "--text", "x"]);
    ok(&["queue", "push", "q", "task"]);
    let own = "the store's own record";
    fails(run().args(["put", "leasehold.json", "--text", "{"]), 2, own);
    fails(run().args(["rm", "leasehold.json"]), 2, own);
    fails(run().args(["rm", "k", "leasehold.json"]), 2, own);
    for path in ["leasehold.json", "./leasehold.json", "queues/q/x.yaml", "locks/a", "nodes/n.json"]
    {
        fails(run().args(["pad", "write", path, "--text", "1"]), 2, "Leasehold's own");
        fails(run().args(["pad", "update", path, "--", "cat"]), 2, "Leasehold's own");
    }
    assert_eq!(ok(&["pad", "ls"]), "k\n");
    assert_eq!(ok(&["rm", "--prefix", "l"]), "deleted 0 objects\n");
    assert!(folder.path().join(".leasehold/leasehold.json").exists());
    // What a stranger did to it.
    std::fs::write(folder.path().join(".leasehold/leasehold.json"), "{").unwrap();
    let sick = run().arg("doctor").output().unwrap();
    let text = String::from_utf8(sick.stdout).unwrap();
    assert_eq!(sick.status.code(), Some(2), "{text}");
    assert!(text.contains("is damaged") && text.contains("doctor --repair"), "{text}");
    assert!(ok(&["doctor", "--repair"]).contains("is safe"));
    ok(&["put", "k", "--text", "new"]);
    // One that can be read stays as it is.
    let record = folder.path().join(".leasehold/leasehold.json");
    let before = std::fs::read(&record).unwrap();
    ok(&["doctor", "--repair"]);
    assert_eq!(std::fs::read(&record).unwrap(), before);
    std::fs::write(&record, r#"{"format":2}"#).unwrap();
    let _ = run().args(["doctor", "--repair"]).output().unwrap();
    assert_eq!(std::fs::read(&record).unwrap(), br#"{"format":2}"#, "of a later version");
}

#[test]
fn a_command_that_writes_nothing_empties_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let pad = |words: &[&str]| leasehold(folder.path()).arg("pad").args(words).output().unwrap();
    assert!(pad(&["write", "n.txt", "--text", "7"]).status.success());
    let update = ["pad", "update", "n.txt", "--", "/bin/true"];
    fails(leasehold(folder.path()).args(update), 3, "--allow-empty");
    assert_eq!(pad(&["read", "n.txt"]).stdout, b"7");
    assert!(pad(&["update", "n.txt", "--allow-empty", "--", "/bin/true"]).status.success());
    assert_eq!(pad(&["read", "n.txt"]).stdout, b"");
    // What was empty may stay so.
    assert!(pad(&["update", "n.txt", "--", "/bin/true"]).status.success());
}

/// Each would take the other's records for its own.
#[test]
fn a_replica_is_apart_from_its_store() {
    let folder = tempfile::tempdir().unwrap();
    let run = || leasehold(folder.path());
    std::fs::create_dir(folder.path().join(".leasehold")).unwrap();
    std::os::unix::fs::symlink(".leasehold", folder.path().join("link")).unwrap();
    for replica in [".leasehold", "./x/../.leasehold", ".leasehold/r", ".", "link/r"] {
        let words = ["--replica", replica, "queue", "push", "q", "x"];
        fails(run().args(words), 2, "must be different folders");
    }
    assert!(is_empty(&folder.path().join(".leasehold")));
    let apart =
        run().args(["--replica", ".leasehold-r", "queue", "push", "q", "x"]).output().unwrap();
    assert!(apart.status.success(), "{apart:?}");
}

#[test]
fn what_is_not_there_is_not_found() {
    let folder = tempfile::tempdir().unwrap();
    let run = || leasehold(folder.path());
    for words in [&["show", "no"][..], &["get", "no", "k"], &["export", "no"], &["status", "no"]] {
        fails(run().arg("index").args(words), 4, "see `leasehold index ls`");
    }
    fails(run().args(["--replica", "r", "sync", "now", "no"]), 4, "see `leasehold queue ls`");
}

#[test]
fn slips_of_the_finger_get_a_hint() {
    let folder = tempfile::tempdir().unwrap();
    let run = || leasehold(folder.path());
    for words in [&["lock", "run", "deploy", "echo", "hi"][..], &["queue", "work", "q", "echo"]] {
        fails(run().args(words), 2, "go behind `--`");
    }
    fails(run().args(["lock", "run", "x", "--ttl", "1ms", "--", "true"]), 2, "at least 100ms");
    fails(run().args(["pad", "write", "a.yaml", "--text", "a: [1"]), 2, "is not valid YAML");
    assert!(is_empty(folder.path()));
}

#[test]
fn bytes_are_json_where_json_is_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join(".leasehold")).unwrap();
    std::fs::write(folder.path().join(".leasehold/b.bin"), [0xff, 0]).unwrap();
    let read = leasehold(folder.path()).args(["--json", "pad", "read", "b.bin"]).output().unwrap();
    let read: serde_json::Value = serde_json::from_slice(&read.stdout).unwrap();
    assert_eq!(read, serde_json::json!({ "path": "b.bin", "base64": "/wA=" }));
}

#[test]
fn there_is_a_manual_page_per_command() {
    let folder = tempfile::tempdir().unwrap();
    let done = leasehold(folder.path()).args(["man", "pages"]).output().unwrap();
    assert!(done.status.success(), "{done:?}");
    for page in ["leasehold.1", "leasehold-queue.1", "leasehold-queue-work.1"] {
        assert!(folder.path().join("pages").join(page).is_file(), "{page}");
    }
}

/// `leasehold index export x | head -1`.
#[test]
fn who_has_read_enough_is_no_error() {
    use std::io::Read as _;
    let folder = tempfile::tempdir().unwrap();
    let run = || leasehold(folder.path());
    let ok = |words: &[&str]| assert!(run().args(words).output().unwrap().status.success());
    ok(&["index", "create", "x", "-f", "key", "-f", "value"]);
    let rows: String = (0..20_000).map(|n| format!("k{n},a longer value {n}\n")).collect();
    std::fs::write(folder.path().join("rows.csv"), format!("key,value\n{rows}")).unwrap();
    ok(&["index", "import", "x", "rows.csv"]);
    let sql = "select * from x";
    for words in [
        &["index", "export", "x"][..],
        &["index", "export", "x", "--format", "csv"],
        &["index", "query", sql, "--format", "csv"],
        &["--json", "index", "query", sql],
    ] {
        let mut command = run();
        command.args(words).stdout(std::process::Stdio::piped());
        let mut child = command.stderr(std::process::Stdio::piped()).spawn().unwrap();
        let mut few = [0; 10];
        child.stdout.take().unwrap().read_exact(&mut few).unwrap();
        let Output { status, stderr, .. } = child.wait_with_output().unwrap();
        let stderr = String::from_utf8_lossy(&stderr);
        assert!(status.success() && stderr.is_empty(), "{words:?}: {status}: {stderr}");
    }
}
