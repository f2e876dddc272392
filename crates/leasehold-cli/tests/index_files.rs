//! Records in and out as files: every format there and back, and files that are not as they should be.

#![allow(clippy::unwrap_used)] // in a test, a failure is a panic

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

const BIN: &str = env!("CARGO_BIN_EXE_leasehold");

fn leasehold(folder: &Path, arguments: &[&str], input: &[u8]) -> (i32, String, String) {
    let mut child = Command::new(BIN)
        .args(arguments)
        .current_dir(folder)
        .env_clear()
        .env("NO_COLOR", "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // It may have ended before reading all of it.
    let _ = child.stdin.take().unwrap().write_all(input);
    let done = child.wait_with_output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let said = text(done.stderr);
    assert!(!said.contains("panicked"), "{said}");
    (done.status.code().unwrap(), text(done.stdout), said)
}

#[track_caller]
fn must(folder: &Path, arguments: &[&str], input: &[u8]) -> String {
    let (code, out, said) = leasehold(folder, arguments, input);
    assert_eq!(code, 0, "{arguments:?}: {said}");
    out
}

fn count(folder: &Path) -> usize {
    must(folder, &["index", "export", "sites"], b"").lines().count()
}

const FIELDS: [&str; 7] =
    ["id", "name", "n:integer", "x:number", "ok:boolean", "tags:array", "o:object"];

fn create(folder: &Path, name: &str) {
    let mut create = vec!["index", "create", name, "-q"];
    FIELDS.iter().for_each(|field| create.extend(["-f", field]));
    must(folder, &create, b"");
}

/// What is exported and imported elsewhere is exported the same, in every format.
#[test]
fn every_format_goes_there_and_back() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    create(folder, "sites");
    let values = [
        "plain",
        "a, b, \"c\"",
        "\"",
        "'",
        "line\nbreak",
        "\r",
        "\r\n",
        "tab\t",
        "\0\u{1}\u{1a}\u{1b}\u{1c}",
        "\u{1d}\u{1e}\u{1f}\u{7f}",
        "\u{1b}J",
        "\u{feff}bom",
        " spaces ",
        "日本語 👩‍👩‍👧",
        "null",
        "\\N",
        "#x",
        "-",
        "=1+1",
    ];
    let mut lines = String::new();
    for (n, value) in values.iter().enumerate() {
        let record = json!({
            "id": format!("{value}{n}"), "name": value, "n": n as i64 - 5, "x": n as f64 / 3.0, "ok": n % 2 == 0,
            "tags": [value, 1, null], "o": {"k": value}, "updated_at": "2024-02-15T10:30:05.000001Z",
        });
        lines.push_str(&record.to_string());
        lines.push('\n');
    }
    lines.push_str("{\"id\":\"only a key\",\"updated_at\":\"2024-02-15T10:30:05Z\"}\n");
    must(folder, &["index", "import", "sites", "-q"], lines.as_bytes());
    must(folder, &["index", "compact", "sites", "-q"], b"");
    let sorted = |name: &str| {
        let text = must(folder, &["index", "export", name], b"");
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    let all = sorted("sites");
    assert_eq!(all.len(), values.len() + 1);
    for format in ["csv", "tsv", "jsonl", "usv"] {
        let text = must(folder, &["index", "export", "sites", "--format", format], b"");
        create(folder, format);
        must(folder, &["index", "import", format, "--format", format, "-q"], text.as_bytes());
        assert_eq!(sorted(format), all, "{format}");
        // Once more over what is there: nothing changes.
        must(folder, &["index", "compact", format, "-q"], b"");
        must(folder, &["index", "import", format, "--format", format, "-q"], text.as_bytes());
        let again: Value = serde_json::from_str(
            must(folder, &["--json", "index", "compact", format], b"").lines().next().unwrap(),
        )
        .unwrap();
        assert_eq!(again["outcome"], "unchanged", "{format}");
    }
}

/// A file with a mark of its byte order, as spreadsheets write it.
#[test]
fn marks_of_byte_order_are_no_part_of_names() {
    for (format, text) in [
        ("csv", "\u{feff}id,name\na,b\n"),
        ("csv", "\u{feff}\"id\",name\r\na,b\r\n"),
        ("tsv", "\u{feff}id\tname\na\tb"),
        ("jsonl", "\u{feff}{\"id\":\"a\",\"name\":\"b\"}\r\n"),
        ("usv", "\u{feff}a\u{1f}b\n"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        create(folder.path(), "sites");
        let import = ["index", "import", "sites", "--format", format, "-q"];
        must(folder.path(), &import, text.as_bytes());
        let found = must(folder.path(), &["--json", "index", "get", "sites", "a"], b"");
        let found: Value = serde_json::from_str(&found).unwrap();
        assert_eq!(found["name"], "b", "{format}");
    }
}

/// What does not fit stops the import, with its number; with `--skip-bad` it is left out and counted,
/// whatever is wrong with it.
#[test]
fn bad_records_are_named_or_left_out() {
    for (format, text, bad, part) in [
        ("csv", &b"id,n\na,1\nb\nc,3\n"[..], 1, "record 2"),
        ("csv", b"id,n\na,1\nb,2,x\nc,3\n", 1, "record 2"),
        ("csv", b"id,n\na,1\nb,\xff\nc,3\n", 1, "record 2"),
        ("csv", b"id,n\na,1\nb,two\n,7\nc,3\n", 2, "record 2"),
        ("csv", b"id,n\na,1\nc,3\n\"d,4\n", 1, "record 3"),
        ("tsv", b"id\tn\na\t1\nb\nc\t3\n", 1, "record 2"),
        ("jsonl", b"{\"id\":\"a\"}\n{\"id\":\n[]\n\xff\n{\"id\":\"c\"}\n", 3, "record 2"),
        ("usv", b"a\nb\x1f\x1ftwo\n\xff\n\x1f\x1f7\nc\n", 3, "record 2"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        create(folder, "sites");
        let import = ["index", "import", "sites", "--format", format];
        let (code, out, said) = leasehold(folder, &import, text);
        assert_eq!((code, out.as_str()), (2, ""), "{format} {text:?}: {said}");
        assert!(said.contains(part), "{format} {text:?}: {said}");
        assert_eq!(count(folder), 0, "what was not flushed is not written");
        let import = ["index", "import", "sites", "--format", format, "--skip-bad", "--json"];
        let (code, out, said) = leasehold(folder, &import, text);
        assert_eq!(code, 1, "{format} {text:?}: {said}");
        let said: Value = serde_json::from_str(&out).unwrap();
        assert_eq!(
            (&said["written"], &said["left_out"]),
            (&json!(2), &json!(bad)),
            "{format} {text:?}"
        );
        assert_eq!(count(folder), 2);
    }
}

/// Headers that say two things, or nothing.
#[test]
fn headers_that_cannot_be_meant_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    create(folder.path(), "sites");
    for (text, part) in [
        ("id,name,name\na,b,c\n", "twice"),
        ("name\nb\n", "the key is missing"),
        ("id,nmae\na,b\n", "the header has \"nmae\""),
    ] {
        let import = ["index", "import", "sites", "--format", "csv"];
        let (code, _, said) = leasehold(folder.path(), &import, text.as_bytes());
        assert_eq!(code, 2, "{said}");
        assert!(said.contains(part), "{said}");
    }
    assert_eq!(count(folder.path()), 0);
    let (code, _, said) =
        leasehold(folder.path(), &["index", "import", "sites", "nowhere.csv"], b"");
    assert!(code != 0 && said.contains("nowhere.csv"), "{said}");
}

/// Nothing of a file is changed, or swallowed, without a word.
#[test]
fn what_cannot_be_kept_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    create(folder, "sites");
    // TSV has no quotes.
    let tsv = "id\tname\nq3\t\"open\nq4\tx\\ty\\\\\\N\n";
    must(folder, &["index", "import", "sites", "--format", "tsv", "-q"], tsv.as_bytes());
    let name = |id: &str| {
        let text = must(folder, &["--json", "index", "get", "sites", id], b"");
        serde_json::from_str::<Value>(&text).unwrap()["name"].clone()
    };
    assert_eq!((name("q3"), name("q4")), (json!("\"open"), json!("x\ty\\\\N")));
    // CSV has, and one that is not closed takes the rest of the file along.
    let csv = "id,name\nq5,plain\nq6,\"open\nq7,x\n";
    let import = ["index", "import", "sites", "--format", "csv"];
    let (code, _, said) = leasehold(folder, &import, csv.as_bytes());
    assert_eq!(code, 2, "{said}");
    assert!(said.contains("a quote is not closed, in line 3"), "{said}");
    assert_eq!(count(folder), 2);
    let (code, out, _) =
        leasehold(folder, &[&import[..], &["--skip-bad"]].concat(), csv.as_bytes());
    assert_eq!((code, out.trim()), (1, "1 records written, 1 left out"));
    // A number that JSON cannot keep.
    for (format, text) in [
        ("jsonl", "{\"id\":\"a\",\"o\":{\"id\":123456789012345678901}}\n"),
        ("jsonl", "{\"id\":\"a\",\"x\":123456789012345678901}\n"),
        ("csv", "id,o\na,\"{\"\"id\"\":123456789012345678901}\"\n"),
        ("usv", "a\x1f\x1f\x1f\x1f\x1f[123456789012345678901]\n"),
    ] {
        let import = ["index", "import", "sites", "--format", format];
        let (code, _, said) = leasehold(folder, &import, text.as_bytes());
        assert_eq!(code, 2, "{format}: {said}");
        assert!(said.contains("123456789012345678901 is too large"), "{said}");
    }
    assert_eq!(count(folder), 3);
}
