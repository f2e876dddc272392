//! DuckDB and Frictionless, the real programs, read an index's files as they are, and say the same as
//! we do.

#![allow(clippy::unwrap_used)] // in a test, a failure is a panic

use std::path::Path;
use std::process::{Command, Stdio};

use leasehold_testkit::servers::servers_folder;
use serde_json::{Value, json};

const BIN: &str = env!("CARGO_BIN_EXE_leasehold");

fn leasehold(folder: &Path, arguments: &[&str], input: &str) -> String {
    use std::io::Write as _;
    let mut child = Command::new(BIN)
        .args(arguments)
        .current_dir(folder)
        .env_clear()
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let done = child.wait_with_output().unwrap();
    assert!(done.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).unwrap()
}

fn python(folder: &Path, script: &str) -> String {
    let python = servers_folder().join("readers/bin/python3");
    assert!(
        python.exists(),
        "not installed: run scripts/test.sh (looked for {})",
        python.display()
    );
    let done = Command::new(python).args(["-c", script]).current_dir(folder).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).unwrap()
}

/// Values that tear tables apart. No NUL: DuckDB's texts hold none.
const VALUES: [&str; 14] = [
    "plain",
    "a, b, \"c\"",
    "\"",
    "\"unbalanced",
    "'single'",
    "line\nbreak",
    "carriage\rreturn\r\n",
    "tab\tand \u{1f} \u{1e} \u{1d} \u{1c}",
    "\u{1b}[31mred\u{1b}J",
    "Zürich, Åre, Łódź",
    "日本語 한국어 עברית العربية",
    "👩‍👩‍👧 🏳️‍🌈",
    " spaces ",
    "\\N null NULL",
];

fn prepared(folder: &Path) -> Vec<Value> {
    let fields = ["domain:domain", "name", "n:integer", "share:number", "ok:boolean", "day:date"];
    let mut create = vec!["index", "create", "sites"];
    fields.iter().for_each(|field| create.extend(["-f", field]));
    leasehold(folder, &create, "");
    let mut records = Vec::new();
    let mut input = String::new();
    for n in 0..500_usize {
        let value = VALUES[n % VALUES.len()];
        let record = json!({
            "domain": format!("site{n}.example"),
            "name": if n % 17 == 3 { Value::Null } else { value.into() },
            "n": if n % 11 == 5 { Value::Null } else { (n as i64 - 250).into() },
            "share": n as f64 / 8.0,
            "ok": n % 2 == 0,
            "day": format!("2026-01-{:02}", n % 28 + 1),
        });
        input.push_str(&record.to_string());
        input.push('\n');
        records.push(record);
    }
    leasehold(folder, &["index", "import", "sites"], &input);
    leasehold(folder, &["index", "compact", "sites"], "");
    records
}

#[test]
fn duckdb_reads_what_we_read() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    prepared(folder);
    // Some of it pending, some of it deleted, some of it replaced.
    leasehold(folder, &["index", "put", "sites", "domain=site3.example", "name=later", "n=9"], "");
    leasehold(folder, &["index", "delete", "sites", "site4.example"], "");
    leasehold(folder, &["index", "put", "sites", "domain=new.example"], "");
    let view = leasehold(folder, &["index", "duckdb", "sites"], "");
    std::fs::write(folder.join("view.sql"), view).unwrap();
    let columns = "domain, name, n, share, ok, strftime(updated_at, '%Y-%m-%dT%H:%M:%S.%f') t";
    let theirs = python(
        folder,
        &format!(
            "import duckdb, json\n\
             c = duckdb.connect(); c.execute(open('view.sql').read())\n\
             for row in c.execute(\"select {columns} from sites order by domain\").fetchall():\n    \
                 print(json.dumps(row))"
        ),
    );
    let theirs: Vec<Value> =
        theirs.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let sql = "select domain, name, n, share, ok, updated_at from sites order by domain";
    let ours = leasehold(folder, &["index", "query", sql, "--format", "jsonl"], "");
    let ours: Vec<Value> = ours.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(ours.len(), 500);
    assert_eq!(theirs.len(), ours.len());
    for (theirs, ours) in theirs.iter().zip(&ours) {
        assert_eq!(theirs[0], ours["domain"]);
        assert_eq!(theirs[1], ours["name"], "{ours}");
        assert_eq!(theirs[2], ours["n"]);
        assert_eq!(theirs[3], ours["share"]);
        // SQLite's booleans are numbers.
        let ok = ours["ok"].as_i64().map(|ok| ok == 1);
        assert_eq!(theirs[4].as_bool(), ok, "{ours}");
        assert_eq!(
            theirs[5].as_str().unwrap(),
            ours["updated_at"].as_str().unwrap().trim_end_matches('Z')
        );
    }
    let name =
        |domain: &str| ours.iter().find(|row| row["domain"] == domain).map(|row| &row["name"]);
    assert_eq!(name("site3.example"), Some(&json!("later")));
    assert_eq!(name("site4.example"), None);
    // An aggregate, typed.
    let sql = "select count(*), sum(n), min(day), max(share) from sites where n > 0";
    let ours = leasehold(folder, &["index", "query", sql, "--format", "csv"], "");
    let theirs = python(
        folder,
        &format!(
            "import duckdb\nc = duckdb.connect(); c.execute(open('view.sql').read())\n\
             print(*c.execute(\"{sql}\").fetchone(), sep=',')"
        ),
    );
    assert_eq!(ours.lines().nth(1), theirs.lines().next());
}

#[test]
fn frictionless_finds_nothing_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let records = prepared(folder);
    leasehold(folder, &["index", "delete", "sites", "site4.example"], "");
    leasehold(folder, &["index", "compact", "sites"], "");
    let package = folder.join(".leasehold/indexes/sites/datapackage.json");
    let script = format!(
        "import json, frictionless\n\
         p = frictionless.Package({path:?})\n\
         r = p.validate(); print(json.dumps(r.valid))\n\
         print(json.dumps([t.errors[0].message for t in r.tasks if t.errors]))\n\
         rows = p.get_resource('shards').read_rows()\n\
         print(json.dumps([[r['domain'], r['n'], r['ok'], type(r['updated_at']).__name__] for r in rows]))",
        path = package.display().to_string()
    );
    let said = python(folder, &script);
    let mut said = said.lines();
    assert_eq!(said.next(), Some("true"), "{:?}", said.next());
    let rows: Vec<(String, Option<i64>, Option<bool>, String)> =
        serde_json::from_str(said.nth(1).unwrap()).unwrap();
    assert_eq!(rows.len(), records.len());
    for (domain, n, ok, time) in rows {
        assert_eq!(time, "datetime");
        let record = records.iter().find(|record| record["domain"] == domain.as_str()).unwrap();
        if domain != "site4.example" {
            assert_eq!((json!(n), json!(ok)), (record["n"].clone(), record["ok"].clone()));
        }
    }
}

/// Deletions without what records must have, and shards that purging left empty, are valid to others too.
#[test]
fn deletions_and_empty_shards_are_valid() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let create = ["index", "create", "sites", "-f", "id", "-f", "name:string!", "-f", "n:integer!"];
    leasehold(folder, &create, "");
    leasehold(folder, &["index", "put", "sites", "id=a", "name=x", "n=1"], "");
    leasehold(folder, &["index", "put", "sites", "id=b", "name=y", "n=2"], "");
    leasehold(folder, &["index", "compact", "sites"], "");
    leasehold(folder, &["index", "delete", "sites", "a"], "");
    leasehold(folder, &["index", "compact", "sites"], "");
    let package = folder.join(".leasehold/indexes/sites/datapackage.json");
    let script = format!(
        "import json, frictionless\n\
         r = frictionless.Package({path:?}).validate()\n\
         print(json.dumps([e.message for t in r.tasks for e in t.errors] + [e.message for e in r.errors]))",
        path = package.display().to_string()
    );
    assert_eq!(python(folder, &script).trim(), "[]");
    leasehold(folder, &["index", "purge", "sites", "--older-than", "0s", "--force"], "");
    let shards = folder.join(".leasehold/indexes/sites/shards");
    let empty = |file: std::io::Result<std::fs::DirEntry>| {
        let file = file.unwrap();
        file.path().extension().is_some_and(|e| e == "usv") && file.metadata().unwrap().len() == 0
    };
    assert_eq!(shards.read_dir().unwrap().filter_map(|file| empty(file).then_some(())).count(), 1);
    assert_eq!(python(folder, &script).trim(), "[]");
    let view = leasehold(folder, &["index", "duckdb", "sites"], "");
    std::fs::write(folder.join("view.sql"), view).unwrap();
    let theirs = python(
        folder,
        "import duckdb\nc = duckdb.connect(); c.execute(open('view.sql').read())\n\
         print(c.execute('select id, name, n from sites').fetchall())",
    );
    assert_eq!(theirs.trim(), "[('b', 'y', 2)]");
}

/// Records with the same time: DuckDB takes the same one as we do.
#[test]
fn duckdb_decides_between_equal_times_as_we_do() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    leasehold(
        folder,
        &["index", "create", "sites", "-f", "id", "-f", "name", "-f", "n:integer"],
        "",
    );
    let mut input = String::new();
    for n in 0..60_u32 {
        // Several records of each key, in any order; one has an empty name.
        let name = ["b", "a", "", "c\u{1f}", "é"][(n * 7 % 5) as usize];
        let (id, n) = (n % 9, n * 31 % 17);
        let at = "2024-02-15T10:30:05.000000Z";
        let record = json!({"id": id.to_string(), "name": name, "n": n, "updated_at": at});
        input.push_str(&format!("{record}\n"));
    }
    leasehold(folder, &["index", "import", "sites"], &input);
    let view = leasehold(folder, &["index", "duckdb", "sites"], "");
    std::fs::write(folder.join("view.sql"), view).unwrap();
    let theirs = python(
        folder,
        "import duckdb, json\nc = duckdb.connect(); c.execute(open('view.sql').read())\n\
         for r in c.execute('select id, name, n from sites order by id').fetchall(): print(json.dumps(r))",
    );
    let theirs: Vec<Value> =
        theirs.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let sql = "select id, name, n from sites order by id";
    let ours = leasehold(folder, &["index", "query", sql, "--format", "jsonl"], "");
    let ours: Vec<Value> = ours
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap())
        .map(|row| json!([row["id"], row["name"], row["n"]]))
        .collect();
    assert_eq!(theirs, ours);
    assert_eq!(ours.len(), 9);
}

/// Whatever other tools have put beside the records: DuckDB shows what we show.
#[test]
fn duckdb_leaves_out_what_we_leave_out() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let fields = ["-f", "id", "-f", "n:integer", "-f", "text", "-f", "filename"];
    for (name, flat) in [("dropped", true), ("undropped", false)] {
        let create = [&["index", "create", name], &fields[..]].concat();
        let create = if flat { create } else { [&create[..], &["--no-flat"]].concat() };
        leasehold(folder, &create, "");
        let long = "x".repeat(3 << 20);
        leasehold(
            folder,
            &["index", "import", name],
            &json!({"id": "long", "text": long}).to_string(),
        );
        leasehold(folder, &["index", "put", name, "id=a", "n=1", "filename=f"], "");
        leasehold(folder, &["index", "compact", name], "");
        leasehold(folder, &["index", "put", name, "id=b", "n=2"], "");
        let base = folder.join(".leasehold/indexes").join(name);
        let row = |id: &str, n: &str, at: &str| format!("{id}\x1f{n}\x1f\x1f\x1f{at}\n");
        let now = "2024-02-15T10:30:05Z";
        let flat = [
            row("flat", "3", now),
            row("a", "nonsense", "2100-01-01T00:00:00Z"),
            row("ahead", "4", "2100-01-01T00:00:00Z"),
            row("b", "1.5", "2024-02-15T11:30:05+01:00"),
            row("", "1", now),
            row("timeless", "1", ""),
            format!("wide\x1f1\x1f\x1f\x1f{now}\x1f\x1fmore\n"),
            "half\x1f".to_owned(),
        ];
        std::fs::write(base.join("flat.usv"), flat.concat()).unwrap();
        std::fs::write(base.join("bytes.usv"), b"\xff\xfe\x1f1\x1f\x1f\x1f2024-02-15T10:30:05Z\n")
            .unwrap();
        let view = leasehold(folder, &["index", "duckdb", name], "");
        std::fs::write(folder.join("view.sql"), view).unwrap();
        let sql = format!("select id, n, length(text), filename from {name} order by id");
        let theirs = python(
            folder,
            &format!(
                "import duckdb\nc = duckdb.connect(); c.execute(open('view.sql').read())\n\
                 for row in c.execute('{sql}').fetchall(): print(*['' if v is None else v for v in row], sep=',')"
            ),
        );
        let ours = leasehold(folder, &["index", "query", &sql, "--format", "csv"], "");
        let ours: Vec<&str> = ours.lines().skip(1).collect();
        assert_eq!(theirs.lines().collect::<Vec<_>>(), ours, "{name}");
        assert_eq!(ours.len(), if name == "dropped" { 4 } else { 3 });
    }
}
