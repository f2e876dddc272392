//! Questions and answers.

#![allow(clippy::unwrap_used)] // in a test, a failure is a panic

use leasehold::index::{Field, Index, IndexSettings, NewIndex};
use leasehold::{Error, ErrorKind, Store};
use leasehold_sql::{Answer, Database, Value};
use serde_json::json;

#[derive(Default)]
struct Text(String);

impl Answer for Text {
    type Error = Error;

    fn columns(&mut self, names: &[&str]) -> Result<(), Error> {
        self.0 = names.join("|");
        Ok(())
    }

    fn row(&mut self, values: &[Value<'_>]) -> Result<(), Error> {
        let values: Vec<String> = values
            .iter()
            .map(|value| match value {
                Value::Null => "NULL".to_owned(),
                Value::Integer(number) => number.to_string(),
                Value::Real(number) => format!("{number:?}"),
                Value::Text(text) => format!("{text:?}"),
                Value::Blob(_) => "BLOB".to_owned(),
            })
            .collect();
        self.0.push('\n');
        self.0.push_str(&values.join("|"));
        Ok(())
    }
}

async fn index(store: &Store, name: &str, fields: &[&str]) -> Index {
    let fields = fields.iter().map(|field| Field::parse(field).unwrap()).collect();
    Index::create(store, name, NewIndex::with_fields(fields).unwrap()).await.unwrap()
}

/// Some records in shards, some pending, one deleted, one replaced.
async fn filled(store: &Store) -> Index {
    let index = index(
        store,
        "sites",
        &["domain:domain", "name", "n:integer", "share:number", "ok:boolean"],
    )
    .await;
    for n in 0..40 {
        let record = json!({
            "domain": format!("s{n:02}.example"), "name": format!("name\n{}", n % 3), "n": n,
            "share": f64::from(n) / 4.0, "ok": n % 2 == 0,
        });
        index.put(&record).await.unwrap();
    }
    index.compact().await.unwrap();
    index.delete("s03.example").await.unwrap();
    index.put(&json!({"domain": "s04.example", "name": "later", "n": -4})).await.unwrap();
    index.put(&json!({"domain": "new.example"})).await.unwrap();
    index
}

async fn ask(store: &Store, sql: &str) -> Result<String, Error> {
    let (store, sql) = (store.clone(), sql.to_owned());
    let runtime = tokio::runtime::Handle::current();
    let asked = tokio::task::spawn_blocking(move || {
        let database = Database::new(&store, runtime, IndexSettings::default(), 3)?;
        let mut text = Text::default();
        database.query(&sql, &mut text)?;
        Ok(text.0)
    });
    asked.await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_are_typed_and_see_what_is_pending() {
    let store = Store::memory();
    filled(&store).await;
    for (sql, answer) in [
        ("select count(*) from sites", "count(*)\n40"),
        (
            "select domain, n from sites where domain = 's04.example'",
            "domain|n\n\"s04.example\"|-4",
        ),
        ("select n from sites where domain = 's03.example'", "n"),
        (
            "select n, share, ok, name from sites where n = 7",
            "n|share|ok|name\n7|1.75|0|\"name\\n1\"",
        ),
        ("select n, ok from sites where domain = 'new.example'", "n|ok\nNULL|NULL"),
        (
            "select sum(n), min(n), typeof(n), typeof(share) from sites where n between 5 and 6",
            "sum(n)|min(n)|typeof(n)|typeof(share)\n11|5|\"integer\"|\"real\"",
        ),
        (
            "select name, count(*) c from sites where n >= 36 and n < 39 group by name order by name",
            "name|c\n\"name\\n0\"|1\n\"name\\n1\"|1\n\"name\\n2\"|1",
        ),
        ("select count(*) from sites where name = 'later'", "count(*)\n1"),
        ("select count(*) from sites where name is null", "count(*)\n1"),
        (
            "select domain from sites where domain in ('s01.example', 's02.example', 'x') order by 1",
            "domain\n\"s01.example\"\n\"s02.example\"",
        ),
        ("select domain from sites where n > '38'", "domain\n\"s39.example\""),
        ("select count(*) from sites a join sites b on a.domain = b.domain", "count(*)\n40"),
        ("select length(updated_at) from sites limit 1", "length(updated_at)\n27"),
        (
            "select strftime('%Y', updated_at) > '2000' from sites limit 1",
            "strftime('%Y', updated_at) > '2000'\n1",
        ),
        (
            "select * from sites where domain = 's01.example' and n = 2",
            "domain|name|n|share|ok|updated_at",
        ),
    ] {
        assert_eq!(ask(&store, sql).await.unwrap(), answer, "{sql}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn indexes_are_joined() {
    let store = Store::memory();
    filled(&store).await;
    let owners = index(&store, "owners", &["id:integer", "site"]).await;
    owners
        .put_many((0..5).map(|n| json!({"id": n, "site": format!("s{n:02}.example")})))
        .await
        .unwrap();
    let sql = "select o.id, s.n from owners o left join sites s on s.domain = o.site order by 1";
    assert_eq!(ask(&store, sql).await.unwrap(), "id|n\n0|0\n1|1\n2|2\n3|NULL\n4|-4");
    assert_eq!(
        ask(&store, "select site from owners where id = 3").await.unwrap(),
        "site\n\"s03.example\""
    );
}

/// `WHERE key = …` reads one shard, however many there are.
#[tokio::test(flavor = "multi_thread")]
async fn a_key_is_one_shard() {
    let store = Store::memory();
    filled(&store).await;
    let before = store.usage();
    ask(&store, "select n from sites where domain = 's05.example'").await.unwrap();
    let cost = store.usage().since(&before);
    // The description, the shard, the flat file that might be there.
    assert_eq!((cost.get, cost.list), (3, 1), "{cost:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn mistakes_are_explained() {
    let store = Store::memory();
    filled(&store).await;
    for (sql, part) in [
        ("select * from nobody", "there is no index \"nobody\""),
        ("select nobody from sites", "no such column"),
        ("selct", "syntax error"),
        ("insert into sites values (1,2,3,4,5,6)", "nothing is written"),
    ] {
        let error = ask(&store, sql).await.unwrap_err().to_string();
        assert!(error.contains(part), "{sql}: {error}");
    }
}

/// SQLite tells the rows of `a OR b` apart by their numbers, across scans: none may be lost or come twice.
#[tokio::test(flavor = "multi_thread")]
async fn either_or_finds_each_record_once() {
    let store = Store::memory();
    filled(&store).await;
    for (sql, answer) in [
        ("select n from sites where domain = 's05.example' or n = 5", "n\n5"),
        ("select n from sites where domain = 's05.example' or n = 6 order by 1", "n\n5\n6"),
        (
            "select count(*) from sites where domain = 's05.example' or n = 6 or n = 7",
            "count(*)\n3",
        ),
        (
            "select count(*) from sites where n < 3 or name = 'later' or domain = 's01.example'",
            "count(*)\n4",
        ),
    ] {
        assert_eq!(ask(&store, sql).await.unwrap(), answer, "{sql}");
    }
}

/// Dates compare as texts, also with texts that look like numbers.
#[tokio::test(flavor = "multi_thread")]
async fn dates_compare_with_years() {
    let store = Store::memory();
    let days = index(&store, "days", &["id:integer", "day:date", "at:datetime"]).await;
    for (id, year) in [(1, 2024), (2, 2025), (3, 2026)] {
        let (day, at) = (format!("{year}-06-01"), format!("{year}-06-01T00:00:00Z"));
        days.put(&json!({"id": id, "day": day, "at": at})).await.unwrap();
    }
    for (sql, answer) in [
        ("select count(*) from days where day >= '2025'", "count(*)\n2"),
        ("select count(*) from days where day < '2025'", "count(*)\n1"),
        ("select count(*) from days where at between '2025' and '2026'", "count(*)\n1"),
        ("select count(*) from days where updated_at > '2000'", "count(*)\n3"),
        ("select max(day), typeof(at) from days", "max(day)|typeof(at)\n\"2026-06-01\"|\"text\""),
    ] {
        assert_eq!(ask(&store, sql).await.unwrap(), answer, "{sql}");
    }
}

/// A key equals what SQLite says that it equals, of whatever type.
#[tokio::test(flavor = "multi_thread")]
async fn keys_equal_what_sqlite_says() {
    let store = Store::memory();
    let numbers = index(&store, "numbers", &["id:integer", "x"]).await;
    numbers.put(&json!({"id": 3, "x": "three"})).await.unwrap();
    let texts = index(&store, "texts", &["id", "x"]).await;
    for id in ["3", "3.0", "A", "007"] {
        texts.put(&json!({"id": id, "x": id})).await.unwrap();
    }
    for (condition, count) in [
        ("id = 3", 1),
        ("id = 3.0", 1),
        ("id = '3'", 1),
        ("id = ' 3 '", 1),
        ("id = '3.0'", 1),
        ("id = '3e0'", 1),
        ("id = 3.5", 0),
        ("id = '3x'", 0),
        ("id = ''", 0),
        ("id = null", 0),
        ("id = x'33'", 0),
        ("id = 1e300", 0),
        ("id in (3.0, '3', 4)", 1),
    ] {
        let sql = format!("select count(*) from numbers where {condition}");
        assert_eq!(ask(&store, &sql).await.unwrap(), format!("count(*)\n{count}"), "{sql}");
    }
    for (condition, count) in [
        ("id = 3", 1),
        ("id = 3.0", 1),
        ("id = '3'", 1),
        ("id = 'a'", 0),
        ("id = 'a' collate nocase", 1),
        ("id = 7", 0),
        ("id = x'33'", 0),
        ("id like 'a'", 1),
        ("id is '3'", 1),
    ] {
        let sql = format!("select count(*) from texts where {condition}");
        assert_eq!(ask(&store, &sql).await.unwrap(), format!("count(*)\n{count}"), "{sql}");
    }
}

/// What other tools wrote: a deletion in another spelling is a deletion, carriage returns belong to no
/// value.
#[tokio::test(flavor = "multi_thread")]
async fn foreign_rows_are_read_as_they_are_meant() {
    use leasehold::Key;
    use leasehold::store::Write;
    let store = Store::memory();
    let index = index(&store, "sites", &["domain", "n:integer"]).await;
    let key = "a";
    let shard = leasehold::index::Shard::of(key, leasehold::index::Width::USUAL);
    for (deleted, rows) in [("True", 0), ("1", 0), ("true\r", 0), ("", 1), ("\r", 1)] {
        let body = format!("{key}\x1f1\x1f2024-02-15T10:30:05Z\x1f{deleted}\n");
        let file = Key::new(format!("indexes/sites/shards/{shard}.usv")).unwrap();
        let put = store.put(&file, body.into(), Write::any()).await.unwrap();
        assert!(matches!(put, leasehold::store::Put::Stored(_)));
        let sql = "select count(*) from sites where _deleted is null";
        assert_eq!(ask(&store, sql).await.unwrap(), format!("count(*)\n{rows}"), "{deleted:?}");
        assert_eq!(index.get_json(key).await.unwrap().is_some(), rows == 1, "{deleted:?}");
    }
}

/// Names of fields are only names.
#[tokio::test(flavor = "multi_thread")]
async fn names_of_fields_are_quoted() {
    let store = Store::memory();
    let names = ["id", "a\"b", "x) TEXT HIDDEN, (y", "select", "é 'x'", "rowid"];
    index(&store, "odd", &names)
        .await
        .put(&json!({"id": 1.to_string(), "a\"b": "v"}))
        .await
        .unwrap();
    assert_eq!(
        ask(&store, "select * from odd").await.unwrap().lines().next().unwrap(),
        "id|a\"b|x) TEXT HIDDEN, (y|select|é 'x'|rowid|updated_at"
    );
    assert_eq!(ask(&store, "select \"a\"\"b\" v from odd").await.unwrap(), "v\n\"v\"");
}

/// SQLite takes names that differ in case only for one. The answer is never another index's.
#[tokio::test(flavor = "multi_thread")]
async fn indexes_that_differ_in_case_only_are_not_mixed_up() {
    let store = Store::memory();
    for (name, n) in [("sites", 1), ("Sites", 2), ("site", 3)] {
        let index = index(&store, name, &["domain:domain", "n:integer"]).await;
        index.put(&json!({"domain": "a.example", "n": n})).await.unwrap();
    }
    for (sql, answer) in [
        ("select n from sites", "n\n1"),
        ("select n from Sites", "n\n2"),
        ("select n, 'SITES', N as SITE from \"sites\"", "n|'SITES'|SITE\n1|\"SITES\"|1"),
        ("select N from site where SITE.n = 3", "n\n3"),
    ] {
        let text = ask(&store, sql).await.unwrap();
        assert_eq!(text.to_lowercase(), answer.to_lowercase(), "{sql}");
    }
    for sql in [
        "select a.n, b.n from sites a join Sites b using (domain)",
        "select a.n, b.n from Sites a join \"sites\" b using (domain)",
    ] {
        let error = ask(&store, sql).await.unwrap_err();
        assert!(error.to_string().contains("differ in case only"), "{sql}: {error}");
    }
    // Also where they are asked for one after the other.
    let (store, runtime) = (store.clone(), tokio::runtime::Handle::current());
    let second = tokio::task::spawn_blocking(move || {
        let database = Database::new(&store, runtime, IndexSettings::default(), 1)?;
        database.query("select n from sites", &mut Text::default())?;
        database.query("select n from Sites", &mut Text::default())
    });
    let error = second.await.unwrap().unwrap_err();
    assert!(error.to_string().contains("differ in case only"), "{error}");
}

/// Whatever is not a question is refused, before it does anything.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_written() {
    let store = Store::memory();
    filled(&store).await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("x.db").display().to_string();
    for sql in [
        format!("VACUUM INTO '{file}'"),
        format!("ATTACH '{file}' AS other"),
        "CREATE TABLE other (x)".to_owned(),
        "CREATE TEMP TABLE other AS SELECT * FROM sites".to_owned(),
        "CREATE VIEW other AS SELECT 1".to_owned(),
        "INSERT INTO sites (domain) VALUES ('x.example')".to_owned(),
        "UPDATE sites SET n = 1".to_owned(),
        "DELETE FROM sites".to_owned(),
        "BEGIN".to_owned(),
        "PRAGMA journal_mode = off".to_owned(),
        "SELECT 1; DROP TABLE sites".to_owned(),
        "".to_owned(),
        "-- nothing".to_owned(),
    ] {
        let error = ask(&store, &sql).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{sql}: {error}");
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    for sql in [
        "WITH RECURSIVE c(x) AS (VALUES (1) UNION ALL SELECT x + 1 FROM c WHERE x < 3) SELECT * FROM c",
        "EXPLAIN QUERY PLAN SELECT * FROM sites",
        "VALUES (1)",
        "SELECT name FROM pragma_table_info('sites')",
        "SELECT value FROM json_each('[1]')",
    ] {
        ask(&store, sql).await.unwrap();
    }
}

/// SQLite's own tables come first: an index of that name is not answered for by them.
#[tokio::test(flavor = "multi_thread")]
async fn names_that_sqlite_has_are_refused() {
    let store = Store::memory();
    for name in ["sqlite_master", "json_each", "Sqlite_Schema"] {
        index(&store, name, &["key", "value"]).await;
        let error = ask(&store, &format!("SELECT count(*) FROM {name}")).await.unwrap_err();
        assert!(error.to_string().contains("of its own"), "{name}: {error}");
    }
    let error = ask(&store, "SELECT * FROM json_each('[1]')").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
}

/// However a time is spelled, it is compared as a time.
#[tokio::test(flavor = "multi_thread")]
async fn times_are_compared_as_times() {
    let store = Store::memory();
    let index = index(&store, "runs", &["key", "at:datetime"]).await;
    for (key, at) in [
        ("a", "2026-01-31T08:00:00Z"),
        ("b", "2026-01-31T09:00:00Z"),
        ("c", "2026-01-31T09:00:00.000001Z"),
        ("d", "2026-01-31T23:00:00Z"),
    ] {
        index.put(&json!({"key": key, "at": at})).await.unwrap();
    }
    index.put(&json!({"key": "now"})).await.unwrap();
    for (filter, keys) in [
        ("at > '2026-01-31 09:00:00'", "c d"),
        ("at >= '2026-01-31T09:00:00Z'", "b c d"),
        ("at = '2026-01-31T10:00:00+01:00'", "b"),
        ("at IN ('2026-01-31 08:00', '2026-01-31T10:00:00+01:00')", "a b"),
        ("at BETWEEN '2026-01-31 08:30' AND '2026-01-31 09:00:00'", "b"),
        ("NOT at > '2026-01-31 09:00:00'", "a b"),
        ("key = 'a' OR at > '2026-01-31 09:00:00.000001'", "a d"),
        ("at > datetime('2026-01-31 12:00:00', '-3 hours')", "c d"),
        ("at > unixepoch('2026-01-31 09:00:00')", "c d"),
        ("at >= '2026-01-31' AND at < '2026-02'", "a b c d"),
        ("at > ''", "a b c d"),
        ("updated_at > datetime('now', '-1 hour') AND at IS NULL", "now"),
        ("updated_at > datetime('now', '+1 hour')", ""),
        ("updated_at > current_timestamp AND updated_at < datetime('now', '-1 day')", ""),
    ] {
        let sql = format!(
            "SELECT group_concat(key, ' ') FROM (SELECT key FROM runs WHERE {filter} ORDER BY key)"
        );
        let found = ask(&store, &sql).await.unwrap();
        let found = found.lines().nth(1).unwrap().trim_matches('"').replace("NULL", "");
        assert_eq!(found, keys, "{filter}");
    }
}
