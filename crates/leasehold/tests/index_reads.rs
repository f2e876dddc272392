//! Looking records up: what it reads, what it costs, and that it shows the latest record whoever wrote it.

#![allow(clippy::unwrap_used)] // in a test, a failure is a panic

use std::io::Write as _;
use std::sync::OnceLock;
use std::time::Duration;

use leasehold::index::{CompactOptions, Field, Freshness, Index, NewIndex, Outcome, Shard, Width};
use leasehold::store::{Put, Write};
use leasehold::{Key, Store};
use leasehold_testkit::conformance::on_server;
use leasehold_testkit::servers::Server;
use serde_json::{Value, json};

const KEY: &str = "example.com";

fn new(flat_inbox: bool) -> NewIndex {
    let fields = ["domain:domain", "n:integer"].map(|name| Field::parse(name).unwrap());
    NewIndex { flat_inbox, ..NewIndex::with_fields(fields.to_vec()).unwrap() }
}

async fn index(store: &Store) -> Index {
    Index::create(store, "domains", new(true)).await.unwrap()
}

fn directory(path: &std::path::Path) -> Store {
    use leasehold::store::{Connect, StoreUrl};
    Connect::new(StoreUrl::Directory(path.to_owned())).open().unwrap()
}

async fn drop_file(store: &Store, key: &str, body: &str) {
    let put = store.put(&Key::new(key).unwrap(), body.to_owned().into(), Write::any()).await;
    assert!(matches!(put.unwrap(), Put::Stored(_)));
}

fn row(key: &str, n: i64, second: u32) -> String {
    format!("{key}\x1f{n}\x1f2024-02-15T10:30:{second:02}.000000Z\n")
}

async fn n(index: &Index, key: &str) -> Option<Value> {
    index.get_json(key).await.unwrap().map(|record| record["n"].clone())
}

async fn scanned(index: &Index) -> Vec<(String, Value)> {
    let mut scan = index.scan(1).await.unwrap();
    let (mut seen, schema) = (Vec::new(), index.schema());
    while let Some(chunk) = scan.next().await.unwrap() {
        for row in chunk.records(&schema) {
            let record = schema.read_json(row);
            seen.push((record["domain"].as_str().unwrap().to_owned(), record["n"].clone()));
        }
    }
    seen
}

/// Keys of the same shard as `KEY`, in order.
fn neighbours(count: usize) -> Vec<String> {
    let of = |key: &String| Shard::of(key, Width::USUAL) == Shard::of(KEY, Width::USUAL);
    let mut keys: Vec<String> =
        (0..).map(|n| format!("n{n:06}.example")).filter(of).take(count).collect();
    keys.sort();
    keys
}

/// Until a file that was changed counts as settled.
async fn settle() {
    tokio::time::sleep(Duration::from_millis(2700)).await;
}

/// A shard of another tool that is almost in order: a key stands in its place, and once more where a
/// search does not come by. Whichever of them is the latest, it counts.
#[tokio::test]
async fn of_a_key_that_stands_twice_in_a_shard_the_latest_record_counts() {
    let folder = tempfile::TempDir::new().unwrap();
    let keys = neighbours(41);
    let twice = &keys[20];
    for (round, (in_place, elsewhere)) in [(1, 2), (2, 1)].into_iter().enumerate() {
        for (at, place) in [0, 3, 12, 29, 38, 40].into_iter().enumerate() {
            let path = folder.path().join(format!("{round}-{at}"));
            for store in [Store::memory(), directory(&path)] {
                let index = index(&store).await;
                let mut shard = String::new();
                for (at, key) in keys.iter().enumerate() {
                    let n = if at == 20 { in_place } else { 0 };
                    shard.push_str(&row(key, n, n as u32));
                    if at == place {
                        shard.push_str(&row(twice, elsewhere, elsewhere as u32));
                    }
                }
                drop_file(&store, "indexes/domains/shards/a3.usv", &shard).await;
                // The first look is at the file, later ones may be at what was kept of it.
                for _ in 0..3 {
                    assert_eq!(n(&index, twice).await, Some(json!(2)), "{in_place} {place}");
                }
                let seen = scanned(&index).await;
                assert_eq!(seen.len(), 41);
                assert!(seen.contains(&(twice.clone(), json!(2))));
            }
        }
    }
}

/// However long an inbox is, a record is seen under any name that another tool gives it.
#[tokio::test]
async fn a_long_inbox_hides_no_name() {
    let folder = tempfile::TempDir::new().unwrap();
    for store in [Store::memory(), directory(folder.path())] {
        let index = index(&store).await;
        let path = |name: &str| folder.path().join("indexes/domains/inbox/a3").join(name);
        std::fs::create_dir_all(path("")).unwrap();
        for at in 0..2100_u64 {
            let hash = at.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 8 | 0xa3 << 56;
            let name = format!("{hash:016x}-{at:032x}.usv");
            let body = row("other.example", 1, 1);
            match store.kind() {
                leasehold::store::Kind::Directory => std::fs::write(path(&name), body).unwrap(),
                _ => drop_file(&store, &format!("indexes/domains/inbox/a3/{name}"), &body).await,
            }
        }
        let names = [
            "0.usv",
            "Mine.usv",
            "a3ff.usv",
            "mine.usv",
            "-mine.usv",
            "~.usv",
            "a3aaaaaaaaaaaaaa-mine.usv",
        ];
        for (round, name) in names.into_iter().enumerate() {
            let file = format!("indexes/domains/inbox/a3/{name}");
            drop_file(&store, &file, &row(KEY, round as i64, round as u32)).await;
            assert_eq!(n(&index, KEY).await, Some(json!(round)), "{name}");
        }
        let before = store.usage();
        assert_eq!(n(&index, KEY).await, Some(json!(6)));
        if store.kind() == leasehold::store::Kind::Memory {
            assert_eq!(store.usage().since(&before).list, 3, "one for each 1,000 objects");
        }
    }
}

/// In a directory, the first look into a shard reads a few pieces of its file, the second all of it, and
/// later ones nothing.
#[tokio::test(flavor = "multi_thread")]
async fn the_first_look_into_a_shard_reads_little() {
    let folder = tempfile::tempdir().unwrap();
    let store = directory(folder.path());
    let created = index(&store).await;
    let keys = neighbours(2500);
    let mut batch = created.batch().await.unwrap();
    for (at, key) in keys.iter().enumerate() {
        batch.put_texts([key.as_str(), &at.to_string()]).unwrap();
    }
    batch.flush().await.unwrap();
    created.compact().await.unwrap();
    let size =
        std::fs::metadata(folder.path().join("indexes/domains/shards/a3.usv")).unwrap().len();
    assert!(size > 100 << 10);
    let read = |before: &leasehold::store::meter::Usage| store.usage().since(before).bytes_received;
    // Just written: it could be changed without its times telling. So it is read.
    let fresh = created.with_settings(Default::default());
    let before = store.usage();
    assert_eq!(n(&fresh, &keys[3]).await, Some(json!(3)));
    assert!(read(&before) >= size);
    settle().await;
    for at in (0..2500).step_by(97).chain([1, 2498, 2499]) {
        let index = created.with_settings(Default::default());
        let before = store.usage();
        assert_eq!(n(&index, &keys[at]).await, Some(json!(at)), "{at}");
        assert!(read(&before) < 40 << 10, "{at}: {}", read(&before));
    }
    let index = created.with_settings(Default::default());
    for missing in ["a.example", "n000000.exampl", "n999999.example", "zz.example"] {
        let near = (0..).map(|n| format!("{missing}{n}"));
        let near = near
            .into_iter()
            .find(|key| Shard::of(key, Width::USUAL) == Shard::of(KEY, Width::USUAL));
        let index = created.with_settings(Default::default());
        assert_eq!(n(&index, &near.unwrap()).await, None);
    }
    for (most, least) in [(40 << 10, 1), (size, size), (0, 0)] {
        let before = store.usage();
        assert_eq!(n(&index, &keys[1234]).await, Some(json!(1234)));
        assert!((least..=most).contains(&read(&before)), "{} of {size}", read(&before));
    }
    // What another tool makes of the file in its place, of the same size, and with the same time of
    // modification: it has no order any more, and a key twice.
    let path = folder.path().join("indexes/domains/shards/a3.usv");
    let text = std::fs::read_to_string(&path).unwrap();
    let mut rows: Vec<String> = text.lines().map(|row| format!("{row}\n")).collect();
    rows[900] = rows[100].replace("\x1f100\x1f2", "\x1f777\x1f3");
    let other = rows.concat();
    assert_eq!(other.len(), text.len());
    let modified = std::fs::metadata(&path).unwrap().modified().unwrap();
    let mut file = std::fs::OpenOptions::new().write(true).truncate(true).open(&path).unwrap();
    file.write_all(other.as_bytes()).unwrap();
    file.set_modified(modified).unwrap();
    drop(file);
    for _ in 0..2 {
        let index = created.with_settings(Default::default());
        for _ in 0..3 {
            assert_eq!(n(&index, &keys[100]).await, Some(json!(777)));
        }
        settle().await;
    }
}

fn ministack() -> Store {
    static SERVER: OnceLock<Server> = OnceLock::new();
    on_server(SERVER.get_or_init(Server::ministack), "s3", "fleet/reads")
}

/// What a lookup and a compaction cost on a bucket: exactly that.
async fn requests(store: Store, counts: &[u64]) {
    for flat in [false, true] {
        let name = format!("counted-{flat}");
        let created = Index::create(&store, &name, new(flat)).await.unwrap();
        let extra = u64::from(flat);
        let shard = Shard::of(KEY, Width::USUAL);
        created.put(&json!({"domain": KEY, "n": 1})).await.unwrap();
        created.compact().await.unwrap();
        let index = Index::open(&store, &name).await.unwrap();
        // Cold: 1 LIST and 1 GET, and one for the flat inbox. Warm: the same, without a body.
        let mut received = Vec::new();
        for _ in 0..2 {
            let before = store.usage();
            index.get_row(KEY, Freshness::Checked).await.unwrap().unwrap();
            let cost = store.usage().since(&before);
            let expected = (1, 1 + extra, 2 + extra);
            assert_eq!((cost.list, cost.get, cost.requests()), expected, "{cost:?}");
            received.push(cost.bytes_received);
        }
        let body = index.get_row(KEY, Freshness::StaleOk).await.unwrap().unwrap().len() as u64 + 1;
        assert_eq!(received[0], received[1] + body);
        let before = store.usage();
        index.get_row(KEY, Freshness::StaleOk).await.unwrap().unwrap();
        assert_eq!(store.usage().since(&before).requests(), 0);
        // Without anything cached, stale is fine as well: 1 GET, no LIST.
        let cold = Index::open(&store, &name).await.unwrap();
        let before = store.usage();
        cold.get_row(KEY, Freshness::StaleOk).await.unwrap().unwrap();
        let cost = store.usage().since(&before);
        assert_eq!((cost.list, cost.get, cost.requests()), (0, 1, 1), "{cost:?}");
        for &count in counts {
            let mut puts = tokio::task::JoinSet::new();
            for at in 0..count {
                let store = store.clone();
                let file = format!("indexes/{name}/inbox/{shard}/a379a6f6eeafb9a5-{at:032x}.usv");
                puts.spawn(async move { drop_file(&store, &file, &row(KEY, at as i64, 1)).await });
                if puts.len() == 32 {
                    puts.join_next().await.unwrap().unwrap();
                }
            }
            puts.join_all().await;
            let before = store.usage();
            let done = created.compact_one(shard, &CompactOptions::default()).await.unwrap();
            let cost = store.usage().since(&before);
            let expected = (Outcome::Unchanged, count, count);
            assert_eq!((done.outcome, done.counts.inbox, done.swept), expected);
            assert_eq!(cost.list, count.div_ceil(1000) + extra, "{count}: {cost:?}");
            // Of the description, the lease, the shard, its statistics, and each object once.
            assert_eq!(cost.get, count + 4, "{count}: {cost:?}");
            assert_eq!(cost.delete, count.div_ceil(1000), "{count}: {cost:?}");
        }
    }
}

#[tokio::test]
async fn requests_are_counted_in_memory() {
    requests(Store::memory(), &[1, 999, 1000, 1001, 2500]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_are_counted_on_ministack() {
    requests(ministack(), &[1, 1001]).await;
}

/// A file of the flat inbox that its tool writes again in its place: that does not show in its folder, and is
/// seen at once. So is one that comes beside it, and one that goes.
#[tokio::test(flavor = "multi_thread")]
async fn a_flat_file_that_changes_in_its_place_is_read_again() {
    let folder = tempfile::tempdir().unwrap();
    let store = directory(folder.path());
    let index = index(&store).await;
    let other = &neighbours(1)[0];
    index
        .put(&json!({"domain": KEY, "n": -1, "updated_at": "2023-01-01T00:00:00Z"}))
        .await
        .unwrap();
    index
        .put(&json!({"domain": other, "n": -2, "updated_at": "2023-01-01T00:00:00Z"}))
        .await
        .unwrap();
    index.compact().await.unwrap();
    let file = |key: &str| folder.path().join(format!("indexes/domains/{key}.usv"));
    std::fs::write(file(KEY), row(KEY, 0, 0)).unwrap();
    settle().await;
    for round in 0..4 {
        for _ in 0..3 {
            assert_eq!(n(&index, KEY).await, Some(json!(round)));
            assert_eq!(n(&index, other).await, Some(json!(-2)));
        }
        std::fs::write(file(KEY), row(KEY, round + 1, round as u32 + 1)).unwrap();
    }
    std::fs::write(file(other), row(other, 5, 5)).unwrap();
    for _ in 0..3 {
        assert_eq!(n(&index, KEY).await, Some(json!(4)));
        assert_eq!(n(&index, other).await, Some(json!(5)));
    }
    // Taken back before anybody compiled it.
    std::fs::remove_file(file(other)).unwrap();
    for _ in 0..3 {
        assert_eq!(n(&index, other).await, Some(json!(-2)));
    }
}

/// Who keeps an index open sees fields that were added later, pending or in the shard, and can write them.
#[tokio::test]
async fn a_field_that_was_added_later_is_seen_and_written() {
    let store = Store::memory();
    let old = index(&store).await;
    old.put(&json!({"domain": KEY, "n": 1})).await.unwrap();
    old.compact().await.unwrap();
    assert_eq!(n(&old, KEY).await, Some(json!(1)));
    let writer = Index::open(&store, "domains").await.unwrap();
    let other = Index::open(&store, "domains").await.unwrap();
    let city = Field::parse("city").unwrap();
    writer.add_fields(vec![city]).await.unwrap();
    writer.put(&json!({"domain": KEY, "n": 2, "city": "Oslo"})).await.unwrap();
    writer.compact().await.unwrap();
    let record = old.get_json(KEY).await.unwrap().unwrap();
    assert_eq!(record["city"], "Oslo", "{record:?}");
    // Once it knows, looking costs what it did.
    let before = store.usage();
    old.get_json(KEY).await.unwrap();
    let used = store.usage().since(&before);
    assert_eq!((used.list, used.get), (1, 2), "inbox, flat inbox, shard: {used:?}");
    let known = json!({"domain": "a.example", "n": 3});
    let new = json!({"domain": "b.example", "n": 3, "city": "Rome"});
    other.put_many([known, new.clone()]).await.unwrap();
    assert_eq!(writer.get_json("b.example").await.unwrap().unwrap()["city"], "Rome");
    let error = other.put(&json!({"domain": KEY, "town": "Rome"})).await.unwrap_err();
    assert!(error.to_string().contains("there is no field \"town\""), "{error}");
}
