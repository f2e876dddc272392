//! The index, as its users see it: on memory, in a directory and on real servers.

#![allow(clippy::unwrap_used)] // in a test, a failure is a panic

use std::sync::OnceLock;
use std::time::Duration;

use leasehold::index::{
    CompactOptions, Field, Freshness, Index, IndexSettings, NewIndex, Outcome, Schema, Trigger,
    Width,
};
use leasehold::store::{Connect, Put, StoreUrl, Write};
use leasehold::{ErrorKind, Key, List, Store};
use leasehold_testkit::conformance::on_server;
use leasehold_testkit::servers::Server;
use serde::{Deserialize, Serialize};
use serde_json::json;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Company {
    domain: String,
    company_name: String,
    scraper_version: i64,
}

fn company(domain: &str, version: i64) -> Company {
    let company_name = format!("Company \"{domain}\",\nLtd\t\u{1f}é日");
    Company { domain: domain.to_owned(), company_name, scraper_version: version }
}

fn fields() -> Vec<Field> {
    ["domain:domain", "company_name", "scraper_version:integer", "updated_at:datetime"]
        .map(|field| Field::parse(field).unwrap())
        .to_vec()
}

async fn index(store: &Store, name: &str) -> Index {
    Index::create(store, name, NewIndex::with_fields(fields()).unwrap()).await.unwrap()
}

/// The keys below a prefix.
async fn keys(store: &Store, prefix: &str) -> Vec<String> {
    let page = store.list(List::prefix(prefix).unwrap()).collect().await.unwrap();
    page.entries.into_iter().map(|entry| entry.key.to_string()).collect()
}

async fn drop_file(store: &Store, key: &str, body: &str) {
    let put = store.put(&Key::new(key).unwrap(), body.to_owned().into(), Write::any()).await;
    assert!(matches!(put.unwrap(), Put::Stored(_)));
    leasehold_testkit::left_alone(store, key);
}

/// A record is seen the moment it was put, through every stage, and the latest counts.
async fn put_get_compact_delete(store: Store, name: &str) {
    let index = index(&store, name).await;
    index.put(&company("example.com", 1)).await.unwrap();
    let found: Company = index.get("Example.COM.").await.unwrap().unwrap();
    assert_eq!(found, company("example.com", 1));
    let many = (0..300).map(|n| company(&format!("site{n}.example"), n));
    index.put_many(many).await.unwrap();
    index.put(&company("example.com", 2)).await.unwrap();
    assert_eq!(index.get::<Company>("example.com").await.unwrap().unwrap().scraper_version, 2);
    let pass = index.compact().await.unwrap();
    assert_eq!(pass.records(), 302);
    assert!(keys(&store, &format!("indexes/{name}/inbox/")).await.is_empty());
    assert_eq!(
        index.get::<Company>("example.com").await.unwrap().unwrap(),
        company("example.com", 2)
    );
    for n in 0..300 {
        let found: Company = index.get(&format!("site{n}.example")).await.unwrap().unwrap();
        assert_eq!(found, company(&format!("site{n}.example"), n));
    }
    // A second handle, with nothing in its cache.
    let other = Index::open(&store, name).await.unwrap();
    assert_eq!(other.get::<Company>("site7.example").await.unwrap().unwrap().scraper_version, 7);
    assert!(other.get::<Company>("nobody.example").await.unwrap().is_none());
    other.delete("site7.example").await.unwrap();
    assert!(index.get::<Company>("site7.example").await.unwrap().is_none());
    index.compact().await.unwrap();
    assert!(index.get::<Company>("site7.example").await.unwrap().is_none());
    let found = index.get_many(&["site1.example".into(), "site7.example".into()]).await.unwrap();
    assert!(found[0].is_some() && found[1].is_none());
    let mut scan = index.scan(2).await.unwrap();
    let (schema, mut count) = (index.schema(), 0);
    while let Some(chunk) = scan.next().await.unwrap() {
        count += chunk.records(&schema).count();
    }
    assert_eq!(count, 300);
    let verified = index.verify().await.unwrap();
    assert_eq!((verified.rows, verified.deletions), (301, 1));
    assert!(verified.findings.is_empty(), "{:?}", verified.findings);
    // Purging forgets the deletion, and only that. A bucket's clock ticks in seconds.
    tokio::time::sleep(Duration::from_millis(if store.kind().is_bucket() { 2100 } else { 0 }))
        .await;
    let purged = index.purge(Duration::ZERO, true, &CompactOptions::default()).await.unwrap();
    assert_eq!(purged.shards.iter().map(|done| done.counts.purged).sum::<u64>(), 1);
    let verified = index.verify().await.unwrap();
    assert_eq!((verified.rows, verified.deletions, verified.findings.len()), (300, 0, 0));
    // Nothing to do: nothing is written.
    let before = store.usage();
    index.compact().await.unwrap();
    assert_eq!(store.usage().since(&before).put, 0);
}

fn directory() -> Store {
    static ROOT: OnceLock<tempfile::TempDir> = OnceLock::new();
    let root = ROOT.get_or_init(|| tempfile::tempdir().unwrap());
    Connect::new(StoreUrl::Directory(root.path().join("store"))).open().unwrap()
}

fn seaweedfs() -> Store {
    static SERVER: OnceLock<Server> = OnceLock::new();
    on_server(SERVER.get_or_init(Server::seaweedfs), "s3", "fleet/one")
}

fn ministack() -> Store {
    static SERVER: OnceLock<Server> = OnceLock::new();
    on_server(SERVER.get_or_init(Server::ministack), "s3", "fleet/one")
}

fn azurite() -> Store {
    static SERVER: OnceLock<Server> = OnceLock::new();
    on_server(SERVER.get_or_init(Server::azurite), "az", "fleet/one")
}

#[tokio::test(flavor = "multi_thread")]
async fn put_get_compact_delete_in_memory() {
    put_get_compact_delete(Store::memory(), "domains").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn put_get_compact_delete_in_a_directory() {
    put_get_compact_delete(directory(), "domains").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn put_get_compact_delete_on_seaweedfs() {
    put_get_compact_delete(seaweedfs(), "domains").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn put_get_compact_delete_on_ministack() {
    put_get_compact_delete(ministack(), "domains").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn put_get_compact_delete_on_azurite() {
    put_get_compact_delete(azurite(), "domains").await;
}

/// Shards of many pieces go through files and uploads in parts, with the same guarantees.
async fn large_shards(store: Store, name: &str) {
    let new =
        NewIndex { width: Width::new(1).unwrap(), ..NewIndex::with_fields(fields()).unwrap() };
    let created = Index::create(&store, name, new).await.unwrap();
    let settings = IndexSettings { compiler_bytes: 4 << 20, ..IndexSettings::default() };
    let index = created.with_settings(settings);
    let text = "x".repeat(40_000);
    for round in 0..2 {
        let mut batch = index.batch().await.unwrap();
        // All in one shard: its first compaction and one on top of it.
        let mut n = 0;
        while batch.len() < 250 {
            n += 1;
            let key = format!("big{round}-{n}.example");
            if leasehold::index::Shard::of(&key, Width::new(1).unwrap()).number() == 3 {
                batch.put_texts([key.as_str(), &text, "1"]).unwrap();
            }
        }
        batch.flush().await.unwrap();
        let pass = index.compact().await.unwrap();
        assert_eq!(pass.count(|outcome| *outcome == Outcome::Published), 1, "{pass:?}");
    }
    let shard = store.head(&Key::new(format!("indexes/{name}/shards/3.usv")).unwrap()).await;
    assert!(shard.unwrap().unwrap().size > 20_000_000);
    let verified = index.verify().await.unwrap();
    assert_eq!(verified.rows, 500);
    assert!(verified.findings.is_empty(), "{:?}", verified.findings);
}

#[tokio::test(flavor = "multi_thread")]
async fn large_shards_in_memory() {
    large_shards(Store::memory(), "large").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn large_shards_in_a_directory() {
    large_shards(directory(), "large").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn large_shards_on_seaweedfs() {
    large_shards(seaweedfs(), "large").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn large_shards_on_ministack() {
    large_shards(ministack(), "large").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn large_shards_on_azurite() {
    large_shards(azurite(), "large").await;
}

/// The flat inbox of the seed: any tool may drop a record.
async fn flat_files(store: Store, name: &str) {
    let index = index(&store, name).await;
    let row =
        |domain: &str, version: u32, at: &str| format!("{domain}\x1fAcme\x1f{version}\x1f{at}\n");
    let file = |key: &str| format!("indexes/{name}/{key}.usv");
    drop_file(&store, &file("example.com"), &row("example.com", 3, "2024-02-15T10:30:05Z")).await;
    drop_file(&store, &file("Other.com"), &row("Other.com", 4, "2024-02-15T11:30:05+01:00")).await;
    // Named after one key, holding another; and one that nobody can read.
    drop_file(&store, &file("wrong.com"), &row("right.com", 5, "2024-02-15T10:30:05Z")).await;
    drop_file(&store, &file("broken.com"), "broken.com\x1fAcme\x1fthree\x1f2024-02-15T10:30:05Z")
        .await;
    assert_eq!(index.get::<Company>("example.com").await.unwrap().unwrap().scraper_version, 3);
    index.compact().await.unwrap();
    index.compact().await.unwrap();
    for (key, version) in [("example.com", 3), ("other.com", 4), ("right.com", 5)] {
        assert_eq!(index.get::<Company>(key).await.unwrap().unwrap().scraper_version, version);
    }
    let left = keys(&store, &format!("indexes/{name}/")).await;
    assert!(!left.iter().any(|key| key.ends_with("com.usv")), "{left:?}");
    let quarantined = index.quarantined().await.unwrap();
    assert_eq!(quarantined.len(), 1);
    assert!(quarantined[0].reason.source.ends_with("broken.com.usv"));
    assert!(quarantined[0].reason.reasons[0].contains("not an integer"), "{quarantined:?}");
    assert_eq!(index.status(true).await.unwrap().quarantined, 1);
    // An older file does not win over what is there; a newer one does.
    drop_file(&store, &file("example.com"), &row("example.com", 1, "2020-01-01T00:00:00Z")).await;
    assert_eq!(index.get::<Company>("example.com").await.unwrap().unwrap().scraper_version, 3);
    index.compact().await.unwrap();
    assert_eq!(index.get::<Company>("example.com").await.unwrap().unwrap().scraper_version, 3);
    // The schema is mended, and the record comes back.
    let (entry, rows) = index.show_quarantined(&quarantined[0].id).await.unwrap().unwrap();
    assert_eq!((entry.id.as_str(), rows.len()), (quarantined[0].id.as_str(), 43));
    assert_eq!(index.retry_quarantined(&entry.id).await.unwrap(), Some((0, 1)));
    let text = ["domain:domain", "company_name", "scraper_version", "updated_at:datetime"];
    let text = Schema::new(text.map(|field| Field::parse(field).unwrap()).to_vec()).unwrap();
    let refused = index.set_schema(text.clone(), false).await.unwrap_err();
    assert!(refused.to_string().contains("another type"), "{refused}");
    index.set_schema(text, true).await.unwrap();
    assert_eq!(index.retry_quarantined(&entry.id).await.unwrap(), Some((1, 0)));
    assert!(index.quarantined().await.unwrap().is_empty());
    assert_eq!(index.get_json("broken.com").await.unwrap().unwrap()["scraper_version"], "three");
}

#[tokio::test(flavor = "multi_thread")]
async fn flat_files_in_memory() {
    flat_files(Store::memory(), "flat").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn flat_files_in_a_directory() {
    flat_files(directory(), "flat").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn flat_files_on_seaweedfs() {
    flat_files(seaweedfs(), "flat").await;
}

#[tokio::test]
async fn records_that_do_not_fit_write_nothing() {
    let store = Store::memory();
    let index = index(&store, "domains").await;
    for (record, part) in [
        (json!({"company_name": "x"}), "the key is missing"),
        (json!({"domain": "a.b", "scraper_version": "x"}), "not an integer"),
        (json!({"domain": "a.b", "nmae": "x"}), "there is no field"),
        (json!({"domain": "a.b", "updated_at": "yesterday"}), "not a time"),
        (json!({"domain": "a.b", "updated_at": "2999-01-01T00:00:00Z"}), "5 minutes ahead"),
        (json!({"domain": "a/b"}), "not a domain"),
        (json!(["a.b"]), "by field name"),
    ] {
        let good = json!({"domain": "good.example"});
        let error = index.put_many([good, record]).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains(part), "{error}");
    }
    assert!(keys(&store, "indexes/domains/inbox/").await.is_empty());
    let again = Index::create(&store, "domains", NewIndex::with_fields(fields()).unwrap()).await;
    assert!(again.unwrap_err().to_string().contains("already"));
    assert!(Index::open(&store, "nothing").await.unwrap_err().to_string().contains("no index"));
    assert!(Index::open(&store, "../x").await.is_err());
}

#[tokio::test]
async fn a_schema_grows_and_old_records_are_padded() {
    let store = Store::memory();
    let index = index(&store, "domains").await;
    index.put(&company("old.example", 1)).await.unwrap();
    index.compact().await.unwrap();
    index.add_fields(vec![Field::parse("country").unwrap()]).await.unwrap();
    index.put(&json!({"domain": "new.example", "country": "CH"})).await.unwrap();
    let old = index.get_json("old.example").await.unwrap().unwrap();
    assert_eq!((&old["scraper_version"], &old["country"]), (&json!(1), &json!(null)));
    index
        .compact_with(&CompactOptions { rewrite: true, ..CompactOptions::default() })
        .await
        .unwrap();
    assert_eq!(index.get_json("new.example").await.unwrap().unwrap()["country"], "CH");
    assert!(index.verify().await.unwrap().findings.is_empty());
    // A handle, or a compiler, that does not know yet takes nothing for damaged.
    let late = Index::open(&store, "domains").await.unwrap();
    index.add_fields(vec![Field::parse("city").unwrap()]).await.unwrap();
    index.put(&json!({"domain": "new.example", "country": "CH", "city": "Bern"})).await.unwrap();
    assert_eq!(late.get_json("new.example").await.unwrap().unwrap()["city"], "Bern");
    let late = Index::open(&store, "domains").await.unwrap();
    index.add_fields(vec![Field::parse("street").unwrap()]).await.unwrap();
    index.put(&json!({"domain": "new.example", "street": "x"})).await.unwrap();
    late.compact().await.unwrap();
    assert!(late.quarantined().await.unwrap().is_empty());
    assert_eq!(late.get_json("new.example").await.unwrap().unwrap()["street"], "x");
    let error = index.add_fields(vec![Field::parse("country").unwrap()]).await.unwrap_err();
    assert!(error.to_string().contains("two fields"), "{error}");
}

/// Shards that another tool wrote, unsorted, with other ends of records and a damaged row.
#[tokio::test]
async fn foreign_shards_are_read_and_mended() {
    let store = Store::memory();
    let index = index(&store, "domains").await;
    let keys = ["b", "a", "c"].map(|name| {
        let found = (0..).map(|n| format!("{name}{n}.example"));
        let of = |key: &String| leasehold::index::Shard::of(key, Width::USUAL).number() == 7;
        found.into_iter().find(of).unwrap()
    });
    let row = |key: &str| format!("{key}\x1fAcme\x1f1\x1f2024-02-15T10:30:05Z\x1e\n");
    let body = format!(
        "{}{}{}{}rubbish\x1e\n",
        row(&keys[0]),
        row(&keys[1]),
        row(&keys[0]),
        row(&keys[2])
    );
    drop_file(&store, "indexes/domains/shards/07.usv", &body).await;
    for key in &keys {
        assert!(index.get::<Company>(key).await.unwrap().is_some(), "{key}");
    }
    let mut scan = index.scan(1).await.unwrap();
    let chunk = scan.next().await.unwrap().unwrap();
    assert_eq!(chunk.records(&index.schema()).count(), 3);
    index.put(&company(&keys[1], 9)).await.unwrap();
    let pass = index.compact().await.unwrap();
    let done = &pass.shards[0];
    assert_eq!(done.outcome, Outcome::Published);
    assert!(done.counts.add_up(), "{:?}", done.counts);
    assert_eq!(
        (done.counts.rows_before, done.counts.rows_after, done.counts.quarantined),
        (5, 3, 1)
    );
    let verified = index.verify().await.unwrap();
    assert!(verified.findings.is_empty(), "{:?}", verified.findings);
    assert_eq!(index.get::<Company>(&keys[1]).await.unwrap().unwrap().scraper_version, 9);
    assert_eq!(index.quarantined().await.unwrap().len(), 1);
}

#[tokio::test]
async fn an_index_is_copied_with_another_width() {
    let store = Store::memory();
    let index = index(&store, "domains").await;
    index.put_many((0..50).map(|n| company(&format!("s{n}.example"), n))).await.unwrap();
    index.compact().await.unwrap();
    index.delete("s3.example").await.unwrap();
    let new =
        NewIndex { width: Width::new(3).unwrap(), ..NewIndex::with_fields(fields()).unwrap() };
    let wide = index.copy_to(&store, "wide", new, |_| {}).await.unwrap();
    wide.compact().await.unwrap();
    assert_eq!(wide.verify().await.unwrap().rows, 50);
    assert!(wide.get::<Company>("s3.example").await.unwrap().is_none());
    for key in ["s0.example", "s49.example"] {
        assert_eq!(wide.get_json(key).await.unwrap(), index.get_json(key).await.unwrap());
    }
}

/// Requests are the first figure of a bucket: exact.
#[tokio::test]
async fn requests_are_counted() {
    let store = Store::memory();
    let new = NewIndex { flat_inbox: false, ..NewIndex::with_fields(fields()).unwrap() };
    let index = Index::create(&store, "domains", new).await.unwrap();
    let used = || store.usage();
    let before = used();
    index.put(&company("example.com", 1)).await.unwrap();
    let cost = used().since(&before);
    assert_eq!((cost.put, cost.requests()), (1, 1));
    index.compact().await.unwrap();
    // Cold: one LIST, one GET.
    let cold = Index::open(&store, "domains").await.unwrap();
    let before = used();
    cold.get_row("example.com", Freshness::Checked).await.unwrap().unwrap();
    let cost = used().since(&before);
    assert_eq!((cost.list, cost.get, cost.requests()), (1, 1, 2));
    assert!(cost.bytes_received > 0);
    // Warm: the GET moves no body.
    let before = used();
    cold.get_row("example.com", Freshness::Checked).await.unwrap().unwrap();
    let cost = used().since(&before);
    assert_eq!((cost.list, cost.get, cost.requests(), cost.bytes_received), (1, 1, 2, 0));
    // Stale is fine: nothing.
    let before = used();
    cold.get_row("example.com", Freshness::StaleOk).await.unwrap().unwrap();
    assert_eq!(used().since(&before).requests(), 0);
    // One pending record of this key: one GET more, once.
    index.put(&company("example.com", 2)).await.unwrap();
    for gets in [2, 1] {
        let before = used();
        cold.get_row("example.com", Freshness::Checked).await.unwrap().unwrap();
        let cost = used().since(&before);
        assert_eq!((cost.list, cost.get), (1, gets));
    }
    // Compacting one shard with 2,500 objects: ⌈m/1000⌉ LISTs, plus one.
    let shard = leasehold::index::Shard::of("example.com", Width::USUAL);
    for n in 0..2499 {
        let row = format!("example.com\x1fA\x1f{n}\x1f2024-02-15T10:30:05Z\n");
        let name = format!("a379a6f6eeafb9a5-{n:032x}");
        drop_file(&store, &format!("indexes/domains/inbox/{shard}/{name}.usv"), &row).await;
    }
    let before = used();
    let done = index.compact_one(shard, &CompactOptions::default()).await.unwrap();
    assert_eq!((done.outcome, done.counts.inbox, done.swept), (Outcome::Published, 2500, 2500));
    let cost = used().since(&before);
    assert_eq!(cost.list, 3, "{cost:?}");
    assert_eq!(cost.delete, 3, "deletes go in batches");
}

/// What one LIST shows is worked through from that LIST.
#[tokio::test]
async fn a_small_inbox_takes_one_list() {
    let store = Store::memory();
    let new = NewIndex { flat_inbox: false, ..NewIndex::with_fields(fields()).unwrap() };
    let index = Index::create(&store, "domains", new).await.unwrap();
    index.put_many((0..200).map(|n| company(&format!("s{n}.example"), n))).await.unwrap();
    index.compact().await.unwrap();
    index.put_many((0..200).map(|n| company(&format!("s{n}.example"), n + 1))).await.unwrap();
    let before = store.usage();
    let pass = index.compact().await.unwrap();
    assert!(pass.shards.len() > 100);
    assert_eq!(store.usage().since(&before).list, 1);
}

/// A pass over a long inbox: no more LISTs than its pages and one, also where a compaction does not take
/// all of it at once.
#[tokio::test]
async fn a_long_inbox_takes_as_many_lists_as_pages() {
    for (most_objects, shards, lists) in
        [(50_000, 1, 3), (50_000, 5, 13), (1000, 1, 4), (2000, 5, 16), (700, 1, 4)]
    {
        let store = Store::memory();
        let new = NewIndex { flat_inbox: false, ..NewIndex::with_fields(fields()).unwrap() };
        let index = Index::create(&store, "domains", new).await.unwrap();
        let settings = IndexSettings { most_objects, ..IndexSettings::default() };
        let index = index.with_settings(settings);
        for shard in 0..shards {
            let key = (0..).map(|n| format!("s{n}.example"));
            let of =
                |key: &String| leasehold::index::Shard::of(key, Width::USUAL).number() == shard;
            let key = key.into_iter().find(of).unwrap();
            for n in 0..2500 {
                let row =
                    format!("{key}\x1fA\x1f{n}\x1f2024-02-15T10:{:02}:{:02}Z\n", n / 60, n % 60);
                let name = format!("0000000000000000-{n:032x}");
                drop_file(&store, &format!("indexes/domains/inbox/{shard:02x}/{name}.usv"), &row)
                    .await;
            }
        }
        let before = store.usage();
        let pass = index.compact().await.unwrap();
        let cost = store.usage().since(&before);
        assert_eq!(pass.records(), 2500 * u64::from(shards), "{pass:?}");
        // Besides, one for the names of new shards.
        assert_eq!(cost.list, lists + 1, "{most_objects} {shards}: {cost:?}");
        assert!(lists <= u64::from(shards) * 3 + 1);
        assert!(keys(&store, "indexes/domains/inbox/").await.is_empty());
        let verified = index.verify().await.unwrap();
        assert!(verified.findings.is_empty(), "{:?}", verified.findings);
    }
}

#[tokio::test]
async fn triggers_hold_back_small_trickles() {
    let store = Store::memory();
    let index = index(&store, "domains").await;
    index.put(&company("example.com", 1)).await.unwrap();
    let trigger = Trigger { count: Some(3), ..Trigger::default() };
    let options = CompactOptions { trigger, ..CompactOptions::default() };
    assert!(index.compact_with(&options).await.unwrap().shards.is_empty());
    index.put(&company("example.com", 2)).await.unwrap();
    index.put(&company("example.com", 3)).await.unwrap();
    assert_eq!(index.compact_with(&options).await.unwrap().shards.len(), 1);
    assert_eq!(index.get::<Company>("example.com").await.unwrap().unwrap().scraper_version, 3);
    // Files of the flat inbox count, by number, size and age.
    let row = "b.example\x1fAcme\x1f1\x1f2024-02-15T10:30:05Z\n";
    for (fires, trigger) in [
        (false, Trigger { count: Some(2), ..Trigger::default() }),
        (false, Trigger { bytes: Some(1000), ..Trigger::default() }),
        (false, Trigger { age: Some(Duration::from_secs(3600)), ..Trigger::default() }),
        (true, Trigger { bytes: Some(20), ..Trigger::default() }),
        (true, Trigger { age: Some(Duration::from_secs(1)), ..Trigger::default() }),
    ] {
        drop_file(&store, "indexes/domains/b.example.usv", row).await;
        let wait = if trigger.age.is_some() && fires { 2100 } else { 0 };
        tokio::time::sleep(Duration::from_millis(wait)).await;
        let options = CompactOptions { trigger, ..CompactOptions::default() };
        let pass = index.compact_with(&options).await.unwrap();
        assert_eq!(pass.shards.len() == 1, fires, "{trigger:?}");
    }
}

/// More in the inbox than one compaction takes: in rounds.
#[tokio::test]
async fn a_long_inbox_is_taken_in_by_parts() {
    let store = Store::memory();
    let created = index(&store, "domains").await;
    let index =
        created.with_settings(IndexSettings { most_objects: 10, ..IndexSettings::default() });
    let shard = leasehold::index::Shard::of("example.com", Width::USUAL);
    for n in 0..37 {
        let row = format!("example.com\x1fA\x1f{n}\x1f2024-02-15T10:30:{n:02}Z\n");
        drop_file(&store, &format!("indexes/domains/inbox/{shard}/{n}.usv"), &row).await;
    }
    let done = index.compact_one(shard, &CompactOptions::default()).await.unwrap();
    assert_eq!((done.counts.inbox, done.swept), (37, 37));
    assert_eq!(index.get::<Company>("example.com").await.unwrap().unwrap().scraper_version, 36);
}

/// A directory's cache is checked with a system call, and never fooled by a change.
#[tokio::test(flavor = "multi_thread")]
async fn a_warm_cache_in_a_directory_sees_every_change() {
    let folder = tempfile::tempdir().unwrap();
    let open = || Connect::new(StoreUrl::Directory(folder.path().join("s"))).open().unwrap();
    let writer = index(&open(), "domains").await;
    let reader = Index::open(&open(), "domains").await.unwrap();
    for n in 0..200 {
        writer.put(&company("example.com", n)).await.unwrap();
        if n % 3 == 0 {
            writer.compact().await.unwrap();
        }
        for _ in 0..2 {
            let found: Company = reader.get("example.com").await.unwrap().unwrap();
            assert_eq!(found.scraper_version, n);
        }
    }
}

#[tokio::test]
async fn shards_are_kept_on_disk_if_asked() {
    let store = Store::memory();
    let folder = tempfile::tempdir().unwrap();
    let writer = index(&store, "domains").await;
    writer.put(&company("example.com", 1)).await.unwrap();
    writer.compact().await.unwrap();
    let open = || {
        let cache_folder = Some(folder.path().to_owned());
        writer.with_settings(IndexSettings { cache_folder, ..IndexSettings::default() })
    };
    assert!(open().get::<Company>("example.com").await.unwrap().is_some());
    let before = store.usage();
    assert!(open().get::<Company>("example.com").await.unwrap().is_some());
    assert_eq!(store.usage().since(&before).bytes_received, 0, "revalidated, not transferred");
    writer.put(&company("example.com", 2)).await.unwrap();
    writer.compact().await.unwrap();
    assert_eq!(open().get::<Company>("example.com").await.unwrap().unwrap().scraper_version, 2);
}
