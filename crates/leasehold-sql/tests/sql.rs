//! Questions and answers.

#![allow(clippy::unwrap_used)] // in a test, a failure is a panic

use leasehold::index::{Field, Index, IndexSettings, NewIndex};
use leasehold::{Error, Store};
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
        ("insert into sites values (1,2,3,4,5,6)", "may not be modified"),
    ] {
        let error = ask(&store, sql).await.unwrap_err().to_string();
        assert!(error.contains(part), "{sql}: {error}");
    }
}
