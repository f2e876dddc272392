//! What other tools, long inboxes and clocks can do to an index: nothing acknowledged is lost, nothing
//! deleted comes back, nothing older is shown.

#![allow(clippy::unwrap_used)] // in a test, a failure is a panic

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use leasehold::env::{BootTime, Clock, Entropy, Env};
use leasehold::index::{
    CompactOptions, Field, Freshness, Index, IndexSettings, NewIndex, Outcome, Schema, Shard, Width,
};
use leasehold::store::memory::Memory;
use leasehold::store::{Delete, Put, Write};
use leasehold::{ErrorKind, Key, List, Store, StoreSettings, StoreTime};
use leasehold_testkit::gate::{Gated, Verb};
use serde_json::{Value, json};

const KEY: &str = "example.com";

fn fields(names: &[&str]) -> Vec<Field> {
    names.iter().map(|name| Field::parse(name).unwrap()).collect()
}

async fn index(store: &Store, names: &[&str]) -> Index {
    Index::create(store, "domains", NewIndex::with_fields(fields(names)).unwrap()).await.unwrap()
}

fn usual() -> [&'static str; 2] {
    ["domain:domain", "n:integer"]
}

fn gated(memory: &Memory) -> (Arc<Gated>, Store) {
    let gate = Arc::new(Gated::new(Arc::new(memory.client(Env::system()))));
    let store = Store::new(gate.clone(), Env::system(), StoreSettings::default()).unwrap();
    (gate, store)
}

async fn drop_file(store: &Store, key: &str, body: &str) {
    let put = store.put(&Key::new(key).unwrap(), body.to_owned().into(), Write::any()).await;
    assert!(matches!(put.unwrap(), Put::Stored(_)));
    leasehold_testkit::left_alone(store, key);
}

async fn keys(store: &Store, prefix: &str) -> Vec<String> {
    let page = store.list(List::prefix(prefix).unwrap()).collect().await.unwrap();
    page.entries.into_iter().map(|entry| entry.key.to_string()).collect()
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
    seen.sort_by(|a, b| a.0.cmp(&b.0));
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

/// FIELD.md row 8, in the sharded inbox: another tool's object has a name that it may use again.
#[tokio::test]
async fn a_foreign_inbox_object_that_was_overwritten_is_not_deleted() {
    let memory = Memory::new(Env::system());
    let (gate, store) = gated(&memory);
    let index = index(&store, &usual()).await;
    let file = "indexes/domains/inbox/a3/mine.usv";
    drop_file(&store, file, &row(KEY, 1, 1)).await;
    let mut at = gate.stop(Verb::Put, "shards/a3.usv");
    let compacting = tokio::spawn({
        let index = index.clone();
        async move { index.compact().await }
    });
    at.reached().await;
    drop_file(&store, file, &row(KEY, 2, 2)).await;
    at.go();
    compacting.await.unwrap().unwrap();
    assert_eq!(n(&index, KEY).await, Some(json!(2)));
    index.compact().await.unwrap();
    assert_eq!(n(&index, KEY).await, Some(json!(2)));
    assert!(keys(&store, "indexes/domains/inbox/").await.is_empty());
}

/// And what was read of it once is not what it holds for ever.
#[tokio::test]
async fn a_foreign_inbox_object_that_changes_is_read_again() {
    let store = Store::memory();
    let index = index(&store, &usual()).await;
    let file = "indexes/domains/inbox/a3/mine.usv";
    for round in 1..4 {
        drop_file(&store, file, &row(KEY, round, round as u32)).await;
        assert_eq!(n(&index, KEY).await, Some(json!(round)));
    }
}

/// A wall clock that can be set.
#[derive(Debug, Default)]
struct Settable(Mutex<Duration>);

impl Clock for Settable {
    fn wall(&self) -> StoreTime {
        Env::system().clock().wall().minus(*self.0.lock().unwrap())
    }
    fn boot(&self) -> BootTime {
        Env::system().clock().boot()
    }
    fn sleep(&self, span: Duration) -> futures::future::BoxFuture<'static, ()> {
        Env::system().clock().sleep(span)
    }
}

#[derive(Debug, Default)]
struct Counting(AtomicU64);

impl Entropy for Counting {
    fn fill(&self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            let next = self.0.fetch_add(1, SeqCst).to_be_bytes();
            chunk.copy_from_slice(&next[8 - chunk.len()..]);
        }
    }
}

/// A record that `put` acknowledged stays visible when the store's clock is set back by hours, as that
/// of a machine is that was started with a wrong one.
#[tokio::test]
async fn a_clock_that_is_set_back_hides_nothing() {
    let clock = Arc::new(Settable::default());
    let env = Env::new(clock.clone(), Arc::<Counting>::default());
    let memory = Arc::new(Memory::new(env.clone()));
    let open = || Store::new(memory.clone(), env.clone(), StoreSettings::default()).unwrap();
    let store = open();
    let writer = index(&store, &usual()).await;
    writer.put(&json!({"domain": KEY, "n": 1})).await.unwrap();
    *clock.0.lock().unwrap() = Duration::from_secs(8 * 3600);
    let reader = Index::open(&open(), "domains").await.unwrap();
    assert_eq!(n(&reader, KEY).await, Some(json!(1)));
    assert_eq!(scanned(&reader).await, [(KEY.to_owned(), json!(1))]);
    reader.compact().await.unwrap();
    assert!(reader.quarantined().await.unwrap().is_empty());
    assert_eq!(n(&reader, KEY).await, Some(json!(1)));
    // A file that any tool may have dropped was never checked: it has to wait.
    let ahead = Env::system().clock().wall();
    drop_file(&store, "indexes/domains/b.example.usv", &format!("b.example\x1f1\x1f{ahead}\n"))
        .await;
    reader.compact().await.unwrap();
    assert_eq!(reader.quarantined().await.unwrap().len(), 1);
}

/// A deletion is not purged before everything that waits was looked at: also where one compaction does
/// not take all of it.
#[tokio::test]
async fn purging_waits_for_the_whole_inbox() {
    let store = Store::memory();
    let created = index(&store, &usual()).await;
    let index =
        created.with_settings(IndexSettings { most_objects: 5, ..IndexSettings::default() });
    let gone = format!("{KEY}\x1f\x1f2024-02-15T10:30:30.000000Z\x1ftrue\n");
    for place in ["inbox/a3/{n}.usv", "{key}.usv"] {
        drop_file(&store, "indexes/domains/inbox/a3/gone.usv", &gone).await;
        index.compact().await.unwrap();
        // An older record waits behind more than one compaction takes.
        for (n, key) in neighbours(17).iter().enumerate() {
            let name = place.replace("{n}", &format!("{n:02}")).replace("{key}", key);
            drop_file(&store, &format!("indexes/domains/{name}"), &row(key, 0, 1)).await;
        }
        let name = place.replace("{n}", "99").replace("{key}", KEY);
        drop_file(&store, &format!("indexes/domains/{name}"), &row(KEY, 1, 1)).await;
        index.purge(Duration::ZERO, true, &CompactOptions::default()).await.unwrap();
        assert_eq!(n(&index, KEY).await, None, "{place}");
        index.compact().await.unwrap();
        assert_eq!(n(&index, KEY).await, None, "{place}");
    }
    // Once nothing waits any more, it is purged.
    index.purge(Duration::ZERO, true, &CompactOptions::default()).await.unwrap();
    assert_eq!(index.verify().await.unwrap().deletions, 0);
    assert_eq!(index.verify().await.unwrap().rows, 17);
}

/// Nor where files that are nobody's records hide what waits behind them.
#[tokio::test]
async fn purging_waits_for_what_stands_behind_other_files() {
    let store = Store::memory();
    let created = index(&store, &usual()).await;
    let index =
        created.with_settings(IndexSettings { most_objects: 5, ..IndexSettings::default() });
    let gone = format!("{KEY}\x1f\x1f2024-02-15T10:30:30.000000Z\x1ftrue\n");
    drop_file(&store, "indexes/domains/inbox/a3/gone.usv", &gone).await;
    index.compact().await.unwrap();
    let others: Vec<_> = (0..5).map(|n| format!("indexes/domains/inbox/a3/{n}.txt")).collect();
    for other in &others {
        drop_file(&store, other, "?").await;
    }
    drop_file(&store, "indexes/domains/inbox/a3/99.usv", &row(KEY, 1, 1)).await;
    let now = store.now().await.unwrap().as_micros();
    let options = CompactOptions { purge_before: Some(now), ..CompactOptions::default() };
    index.compact_one(Shard::of(KEY, Width::USUAL), &options).await.unwrap();
    for other in &others {
        let deleted = store.delete(&Key::new(other.as_str()).unwrap()).await.unwrap();
        assert!(matches!(deleted, Delete::Deleted));
    }
    index.compact().await.unwrap();
    assert_eq!(n(&index, KEY).await, None);
    assert_eq!(index.verify().await.unwrap().deletions, 1);
}

/// FIELD.md row 28 with a shard that another tool wrote in no order: it is sorted while it is read, and
/// what was pending is read again for that.
#[tokio::test]
async fn a_scan_of_an_unsorted_shard_sees_what_moves() {
    let memory = Memory::new(Env::system());
    let (gate, store) = gated(&memory);
    let reader = index(&store, &usual()).await;
    let (_, other) = gated(&memory);
    let compiler = Index::open(&other, "domains").await.unwrap();
    let keys = neighbours(2);
    let unsorted = format!("{}{}", row(&keys[1], 0, 1), row(&keys[0], 0, 1));
    drop_file(&store, "indexes/domains/shards/a3.usv", &unsorted).await;
    compiler.put(&json!({"domain": KEY, "n": 1})).await.unwrap();
    // The first read of the pending object goes through; the second comes too late.
    let mut first = gate.stop(Verb::Get, "inbox/a3/");
    let scanning = tokio::spawn(async move { scanned(&reader).await });
    first.reached().await;
    let mut second = gate.stop(Verb::Get, "inbox/a3/");
    first.go();
    tokio::select! {
        () = second.reached() => {}
        () = tokio::time::sleep(Duration::from_millis(300)) => {}
    }
    compiler.compact().await.unwrap();
    second.go();
    let seen = scanning.await.unwrap();
    assert_eq!(seen.len(), 3, "{seen:?}");
}

/// Shards that other tools wrote, in any order and with any end of records, never show an older record
/// than the latest.
#[tokio::test]
async fn foreign_shards_show_the_latest_record() {
    for end in ["\n", "\x1e", "\x1e\n", "\r\n"] {
        let store = Store::memory();
        let index = index(&store, &usual()).await;
        let other = &neighbours(1)[0];
        let mut shard = String::new();
        for (key, n, second) in [(KEY, 1, 1), (KEY, 3, 3), (other, 0, 1), (KEY, 2, 2)] {
            shard.push_str(row(key, n, second).trim_end());
            shard.push_str(end);
        }
        drop_file(&store, "indexes/domains/shards/a3.usv", &shard).await;
        assert_eq!(n(&index, KEY).await, Some(json!(3)), "{end:?}");
        // One older than that is pending.
        drop_file(&store, "indexes/domains/inbox/a3/old.usv", &row(KEY, 2, 2)).await;
        for _ in 0..2 {
            assert_eq!(n(&index, KEY).await, Some(json!(3)), "{end:?}");
            let seen = scanned(&index).await;
            assert_eq!(seen, [(KEY.to_owned(), json!(3)), (other.clone(), json!(0))], "{end:?}");
            index.compact().await.unwrap();
        }
        let verified = index.verify().await.unwrap();
        assert!(verified.findings.is_empty(), "{end:?}: {:?}", verified.findings);
    }
    // In order, but with ends of records that are not ours.
    let store = Store::memory();
    let index = index(&store, &usual()).await;
    let shard = row(KEY, 3, 3).replace('\n', "\x1e\n");
    drop_file(&store, "indexes/domains/shards/a3.usv", &shard).await;
    drop_file(&store, "indexes/domains/inbox/a3/old.usv", &row(KEY, 2, 2)).await;
    assert_eq!(n(&index, KEY).await, Some(json!(3)));
}

/// A reason that cannot be read is the reason of one entry: the others are shown, and so are its rows.
#[tokio::test]
async fn an_unreadable_reason_hides_nothing() {
    let store = Store::memory();
    let index = index(&store, &usual()).await;
    for name in ["one", "two"] {
        let file = format!("indexes/domains/inbox/a3/{name}.usv");
        drop_file(&store, &file, &format!("{KEY}\x1f{name}\x1f2024-02-15T10:30:01Z\n")).await;
        index.compact().await.unwrap();
    }
    let entries = index.quarantined().await.unwrap();
    assert_eq!(entries.len(), 2);
    for damage in ["", "{\"source\": 3}", "\u{0}\u{1}"] {
        let file = format!("indexes/domains/quarantine/{}.json", entries[0].id);
        drop_file(&store, &file, damage).await;
        let again = index.quarantined().await.unwrap();
        assert_eq!(again.len(), 2, "{damage:?}");
        assert_eq!(again[0].id, entries[0].id);
        assert_eq!(again[0].reason.shard, "a3");
        assert!(again[0].reason.reasons[0].contains("cannot be read"), "{:?}", again[0]);
        assert_eq!(again[1].reason, entries[1].reason);
        let (_, rows) = index.show_quarantined(&entries[0].id).await.unwrap().unwrap();
        assert!(!rows.is_empty());
        assert_eq!(index.retry_quarantined(&entries[0].id).await.unwrap(), Some((0, 1)));
    }
    // Once the rows fit, they come back and the entry goes.
    let schema = Schema::new(fields(&["domain:domain", "n"])).unwrap();
    index.set_schema(schema, true).await.unwrap();
    for entry in &entries {
        assert_eq!(index.retry_quarantined(&entry.id).await.unwrap(), Some((1, 0)));
    }
    assert!(index.quarantined().await.unwrap().is_empty());
    assert!(keys(&store, "indexes/domains/quarantine/").await.is_empty());
    assert!(n(&index, KEY).await.is_some());
}

/// A shard of a client that does not normalise keys holds rows that belong elsewhere: a compaction
/// brings them home, and every row is accounted for.
#[tokio::test]
async fn rows_of_foreign_shards_are_brought_home() {
    for sorted in [true, false] {
        let store = Store::memory();
        let index = index(&store, &usual()).await;
        let raw = Shard::of("Example.com", Width::USUAL);
        assert_ne!(raw, Shard::of(KEY, Width::USUAL));
        let mut rows = [row("Example.com", 1, 1), row("Example.com.", 0, 1)];
        if !sorted {
            rows.reverse();
        }
        drop_file(&store, &format!("indexes/domains/shards/{raw}.usv"), &rows.concat()).await;
        let options = CompactOptions { rewrite: true, ..CompactOptions::default() };
        let pass = index.compact_with(&options).await.unwrap();
        assert!(pass.shards.iter().all(|done| done.counts.add_up()), "{pass:?}");
        index.compact().await.unwrap();
        assert_eq!(n(&index, KEY).await, Some(json!(1)), "sorted: {sorted}");
        let verified = index.verify().await.unwrap();
        assert!(verified.findings.is_empty(), "{:?}", verified.findings);
        assert_eq!(verified.rows, 1);
    }
}

/// Rows are copied by place: into an index with other fields, columns would shift.
#[tokio::test]
async fn an_index_is_not_copied_into_other_fields() {
    let store = Store::memory();
    let from = index(&store, &["domain:domain", "name", "city"]).await;
    from.put(&json!({"domain": KEY, "name": "Acme", "city": "Bern"})).await.unwrap();
    let new = |names: &[&str]| NewIndex::with_fields(fields(names)).unwrap();
    let other = ["domain:domain", "city", "name"];
    Index::create(&store, "other", new(&other)).await.unwrap();
    let same = || new(&["domain:domain", "name", "city"]);
    let refused = from.copy_to(&store, "other", same(), |_| {}).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Invalid, "{refused}");
    let refused = from.copy_to(&store, "domains", same(), |_| {}).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Invalid, "{refused}");
    // More fields at the end are fine.
    let grown = Index::create(&store, "grown", same()).await.unwrap();
    grown.add_fields(fields(&["country"])).await.unwrap();
    from.copy_to(&store, "grown", same(), |_| {}).await.unwrap();
    assert_eq!(grown.get_json(KEY).await.unwrap().unwrap()["city"], "Bern");
}

/// A key's greatest length holds for keys, too.
#[tokio::test]
async fn a_key_that_is_too_long_is_refused() {
    let store = Store::memory();
    let key = Field { max_length: Some(5), ..Field::parse("domain").unwrap() };
    let schema = Schema::new(vec![key, Field::parse("n:integer").unwrap()]).unwrap();
    let new = NewIndex { schema, width: Width::USUAL, flat_inbox: true };
    let index = Index::create(&store, "domains", new).await.unwrap();
    index.put(&json!({"domain": "äöüéè", "n": 1})).await.unwrap();
    let error = index.put(&json!({"domain": "abcdef", "n": 1})).await.unwrap_err();
    assert!(error.to_string().contains("5 are allowed"), "{error}");
}

/// Keys of every sort, the longest included, go through every stage in a directory with a flat inbox.
#[tokio::test(flavor = "multi_thread")]
async fn keys_of_every_sort_are_found_in_a_directory() {
    use leasehold::store::{Connect, StoreUrl};
    let folder = tempfile::tempdir().unwrap();
    let store = Connect::new(StoreUrl::Directory(folder.path().join("s"))).open().unwrap();
    let index = index(&store, &["domain", "n:integer"]).await;
    let mut all: Vec<String> = (0..=0x7f_u8).map(|byte| format!("k{}", char::from(byte))).collect();
    all.extend(
        ["\u{80}", "\u{7ff}", "\u{ffff}", "\u{10ffff}", ".", "..", "%", " ", "\n"]
            .map(String::from),
    );
    all.extend([300, 255, 256, 201].map(|length| "x".repeat(length)));
    all.extend([100, 75].map(|count| "%".repeat(count) + &"/".repeat(count)));
    all.push("日".repeat(100));
    index.put_many(all.iter().map(|key| json!({"domain": key, "n": 1}))).await.unwrap();
    for _ in 0..2 {
        for key in &all {
            assert_eq!(n(&index, key).await, Some(json!(1)), "{key:?}");
        }
        index.compact().await.unwrap();
    }
    // And through the flat inbox, under the name that we look for.
    for key in &all {
        let mut row = Vec::new();
        leasehold::protocol::format::usv::escape(key, &mut row);
        let row = format!("{}\x1f2\x1f2024-02-15T10:30:01Z\n", String::from_utf8(row).unwrap());
        let layout = leasehold::protocol::layout::index::Layout::new("domains").unwrap();
        let name = layout.flat(key).unwrap();
        drop_file(&store, name.as_str(), &row).await;
    }
    for key in &all {
        assert_eq!(n(&index, key).await, Some(json!(1)), "{key:?}: the file is older");
    }
    let pass = index.compact().await.unwrap();
    assert_eq!(pass.records(), all.len() as u64);
    assert!(index.quarantined().await.unwrap().is_empty());
    assert_eq!(index.verify().await.unwrap().rows, all.len() as u64);
    assert!(index.get_row("", Freshness::Checked).await.is_err());
}

/// Numbers in stored names and statistics are other people's: the largest add up to nothing worse than
/// nonsense.
#[tokio::test]
async fn absurd_numbers_do_no_harm() {
    let store = Store::memory();
    let index = index(&store, &usual()).await;
    index.put(&json!({"domain": KEY, "n": 1})).await.unwrap();
    index.compact().await.unwrap();
    for name in [format!("-{}-x", u64::MAX), format!("-{}-y", u64::MAX)] {
        drop_file(&store, &format!("indexes/domains/inbox/a3/{name}.usv"), &row(KEY, 0, 1)).await;
    }
    assert!(index.status(true).await.unwrap().total().inbox_records > 1);
    let file = Key::new("indexes/domains/shards/a3.json").unwrap();
    let text = store.get(&file).await.unwrap().unwrap().body;
    let mut statistics: Value = serde_json::from_slice(&text).unwrap();
    for field in ["rows", "deletions", "generation", "bytes"] {
        statistics[field] = u64::MAX.into();
    }
    for field in ["rows_before", "inbox", "replaced", "older", "rows_after"] {
        statistics["last"][field] = u64::MAX.into();
    }
    drop_file(&store, file.as_str(), &statistics.to_string()).await;
    assert!(!index.verify().await.unwrap().findings.is_empty());
    index.status(true).await.unwrap().total();
    index.delete(KEY).await.unwrap();
    let pass = index.compact().await.unwrap();
    assert_eq!(pass.count(|outcome| *outcome == Outcome::Published), 1);
}

/// Other tools read the shards that the description names: one that a compiler died before naming is
/// named by the next.
#[tokio::test]
async fn a_shard_that_was_not_named_is_named_later() {
    let memory = Memory::new(Env::system());
    let (gate, store) = gated(&memory);
    let index = index(&store, &usual()).await;
    index.put(&json!({"domain": KEY, "n": 1})).await.unwrap();
    gate.fail(Verb::Put, "datapackage.json", ErrorKind::Denied);
    index.compact().await.unwrap();
    assert!(index.package().shards.is_empty());
    index.put(&json!({"domain": KEY, "n": 2})).await.unwrap();
    index.compact().await.unwrap();
    assert_eq!(index.package().shards, [Shard::of(KEY, Width::USUAL)]);
}

/// What a power loss leaves of a lock is an empty file. One that is old keeps nobody from compacting, though each
/// command looks at it once only; one that is not may be somebody's.
#[tokio::test]
async fn an_old_empty_lock_does_not_stop_compaction() {
    use leasehold::store::{Connect, StoreUrl};
    let folder = tempfile::tempdir().unwrap();
    let store = Connect::new(StoreUrl::Directory(folder.path().join("s"))).open().unwrap();
    let index = index(&store, &usual()).await;
    let shard = Shard::of(KEY, Width::USUAL);
    let lock = folder.path().join(format!("s/indexes/domains/shards/{shard}.lock"));
    std::fs::create_dir_all(lock.parent().unwrap()).unwrap();
    for (age, outcome) in [(3600, true), (10, false)] {
        index.put(&json!({"domain": KEY, "n": age})).await.unwrap();
        let file = std::fs::File::create(&lock).unwrap();
        let now = file.metadata().unwrap().modified().unwrap();
        file.set_modified(now - Duration::from_secs(age)).unwrap();
        let again = Index::open(&store, "domains").await.unwrap();
        let pass = again.compact().await.unwrap();
        let published = pass.shards.iter().any(|done| done.outcome == Outcome::Published);
        assert_eq!(published, outcome, "{age}: {pass:?}");
    }
}

/// A file that is dropped into a flat inbox that was empty for a while is seen at once, whatever its name.
#[tokio::test(flavor = "multi_thread")]
async fn a_file_dropped_into_an_empty_flat_inbox_is_seen_at_once() {
    use leasehold::store::{Connect, StoreUrl};
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let store = Connect::new(StoreUrl::Directory(path.clone())).open().unwrap();
    let index = index(&store, &["domain", "n:integer"]).await;
    let long = "x".repeat(290);
    let layout = leasehold::protocol::layout::index::Layout::new("domains").unwrap();
    // A name that is cut into folders: they stay when the file goes.
    drop_file(&store, layout.flat(&long).unwrap().as_str(), &row(&long, 0, 1)).await;
    index.compact().await.unwrap();
    // Until the folder has not changed for so long that it counts as settled.
    tokio::time::sleep(Duration::from_millis(3000)).await;
    for _ in 0..3 {
        assert_eq!(n(&index, KEY).await, None);
        assert_eq!(n(&index, &long).await, Some(json!(0)));
    }
    let calls = || std::fs::metadata(path.join("indexes/domains")).unwrap().modified().unwrap();
    let before = calls();
    // As any tool does it, without us.
    std::fs::write(path.join(format!("indexes/domains/{KEY}.usv")), row(KEY, 1, 1)).unwrap();
    assert_ne!(calls(), before);
    assert_eq!(n(&index, KEY).await, Some(json!(1)));
    drop_file(&store, layout.flat(&long).unwrap().as_str(), &row(&long, 2, 2)).await;
    assert_eq!(n(&index, &long).await, Some(json!(2)));
    index.compact().await.unwrap();
    for second in 3..6 {
        assert_eq!(n(&index, KEY).await, Some(json!(second - 2)));
        let file = path.join(format!("indexes/domains/{KEY}.usv"));
        std::fs::write(file, row(KEY, second - 1, second as u32)).unwrap();
        assert_eq!(n(&index, KEY).await, Some(json!(second - 1)));
    }
}

/// Objects that are larger than what is read at once: every row counts, good or bad, and a file that is
/// overwritten meanwhile stays.
#[tokio::test]
async fn large_objects_are_taken_in_by_pieces() {
    let memory = Memory::new(Env::system());
    let (gate, store) = gated(&memory);
    let index = index(&store, &["domain", "text"]).await;
    let keys_here = neighbours(200);
    let text = "x".repeat(30_000);
    let row =
        |key: &str, second: u32| format!("{key}\x1f{text}\x1f2024-02-15T10:30:{second:02}Z\n");
    let mut body: String = keys_here.iter().map(|key| row(key, 1)).collect();
    body.push_str("nonsense\n");
    assert!(body.len() > 5 << 20);
    let file = format!("indexes/domains/{}.usv", keys_here[0]);
    drop_file(&store, &file, &body).await;
    drop_file(&store, "indexes/domains/inbox/a3/large.usv", &body.replace(":01Z", ":02Z")).await;
    let seen = scanned_keys(&index).await;
    assert_eq!(seen, keys_here);
    let mut at = gate.stop(Verb::Put, "shards/a3.usv");
    let compacting = tokio::spawn({
        let index = index.clone();
        async move { index.compact().await }
    });
    at.reached().await;
    drop_file(&store, &file, &row(&keys_here[0], 5)).await;
    at.go();
    let pass = compacting.await.unwrap().unwrap();
    assert_eq!((pass.records(), pass.shards[0].counts.quarantined), (402, 2));
    assert_eq!(keys(&store, &file).await.len(), 1, "overwritten meanwhile");
    assert!(keys(&store, "indexes/domains/inbox/").await.is_empty());
    index.compact().await.unwrap();
    let verified = index.verify().await.unwrap();
    assert_eq!((verified.rows, verified.findings.len()), (200, 0), "{:?}", verified.findings);
    let first = index.get_json(&keys_here[0]).await.unwrap().unwrap();
    assert_eq!(first["updated_at"], "2024-02-15T10:30:05.000000Z");
    assert_eq!(index.quarantined().await.unwrap().len(), 2);
}

async fn scanned_keys(index: &Index) -> Vec<String> {
    let mut scan = index.scan(1).await.unwrap();
    let (mut seen, schema) = (Vec::new(), index.schema());
    while let Some(chunk) = scan.next().await.unwrap() {
        let keys = chunk.records(&schema).map(|row| schema.read_json(row)["domain"].clone());
        seen.extend(keys.map(|key| key.as_str().unwrap().to_owned()));
    }
    seen
}
