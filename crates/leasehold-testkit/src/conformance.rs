//! The one suite that every backend passes.
//!
//! [`conformance_tests!`](crate::conformance_tests) makes a test of each case. A case gets a store
//! and works below a prefix of its own, so that cases can share a server.

#![allow(clippy::unwrap_used)] // this is test code: a failure is a panic

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use leasehold::store::{Delete, Detail, Durability, Get, List, Page, Put, Store, Write};
use leasehold::{Error, Key, Nonce, Proof, Version, When};

/// Makes a `#[tokio::test]` of every case for the store that `$store` gives.
#[macro_export]
macro_rules! conformance_tests {
    ($store:expr, $traits:expr) => {
        $crate::conformance_tests!(@cases $store, $traits;
            round_trip, empty_and_large, create_once, replace_in_version, delete_in_version,
            delete_is_idempotent, delete_many, race_of_creates, race_of_swaps,
            race_of_delete_and_swap, conditional_get, listing, listing_pages, listing_delimited,
            listing_sees_writes, odd_keys, times, durabilities, unconditional_put);
    };
    (@cases $store:expr, $traits:expr; $($case:ident),* $(,)?) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
            async fn $case() {
                $crate::conformance::$case($crate::conformance::Case {
                    store: $store,
                    name: concat!("conformance/", stringify!($case)),
                    traits: $traits,
                }).await;
            }
        )*
    };
}

/// In what a store may differ. None of it matters for safety, and the doctor names it.
#[derive(Debug, Clone, Copy)]
pub struct Traits {
    /// It lists in byte order.
    pub ordered: bool,
    /// A common prefix is gone with its last object.
    pub exact_prefixes: bool,
    /// What a backslash in a key is.
    pub backslash: Backslash,
}

/// What a backslash in a key is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backslash {
    /// A character like any other.
    Kept,
    /// Refused by us, because the store would make it a slash.
    Refused,
    /// Made a slash by a server that we cannot tell from S3. Our own layouts never write one.
    Mangled,
}

impl Traits {
    /// As S3 is documented.
    pub const S3: Self = Self { ordered: true, exact_prefixes: true, backslash: Backslash::Kept };
}

/// What a case gets.
#[derive(Debug, Clone)]
pub struct Case {
    /// The store under test.
    pub store: Store,
    /// The prefix that is this case's own.
    pub name: &'static str,
    /// In what the store differs.
    pub traits: Traits,
}

impl Case {
    fn key(&self, name: &str) -> Key {
        Key::new(format!("{}/{name}", self.name)).expect("a case's key is a key")
    }

    async fn put(&self, key: &Key, body: impl Into<Bytes>, when: When) -> Put {
        self.try_put(key, body.into(), when).await.expect("the put is answered")
    }

    async fn try_put(&self, key: &Key, body: Bytes, when: When) -> Result<Put, Error> {
        let write = Write::when(when, Proof::Bytes).durability(Durability::Volatile);
        self.store.put(key, body, write).await
    }

    async fn store(&self, key: &Key, body: impl Into<Bytes>, when: When) -> Version {
        stored(self.put(key, body, when).await)
    }

    async fn body(&self, key: &Key) -> Option<Bytes> {
        let object = self.store.get(key).await.expect("the get is answered");
        object.map(|object| object.body)
    }

    async fn version(&self, key: &Key) -> Option<Version> {
        let meta = self.store.head(key).await.expect("the head is answered");
        meta.map(|meta| meta.version)
    }

    async fn fill(&self, names: impl IntoIterator<Item = String>) {
        let puts = names.into_iter().map(|name| {
            let key = self.key(&name);
            async move {
                self.store(&key, name.clone(), When::Any).await;
            }
        });
        let mut puts = futures::StreamExt::buffer_unordered(futures::stream::iter(puts), 16);
        while futures::StreamExt::next(&mut puts).await.is_some() {}
    }

    fn list(&self, prefix: &str) -> List {
        List::prefix(format!("{}/{prefix}", self.name)).expect("a case's prefix is a prefix")
    }

    async fn names(&self, list: List) -> Vec<String> {
        let page = self.store.list(list).collect().await.expect("the list is answered");
        self.strip(&page)
    }

    fn strip(&self, page: &Page) -> Vec<String> {
        let keys = page.entries.iter().map(|entry| entry.key.as_str());
        let all = keys.chain(page.prefixes.iter().map(String::as_str));
        all.map(|key| key[self.name.len() + 1..].to_owned()).collect()
    }

    /// In the order of the listing where that is byte order, else sorted.
    fn in_order(&self, mut names: Vec<String>) -> Vec<String> {
        if !self.traits.ordered {
            names.sort();
        }
        names
    }
}

fn stored(put: Put) -> Version {
    match put {
        Put::Stored(version) => version,
        other => panic!("not stored: {other:?}"),
    }
}

fn nonce(n: u128) -> Nonce {
    Nonce::from_bytes(n.to_be_bytes())
}

/// What was written is read.
pub async fn round_trip(case: Case) {
    let key = case.key("a/b.txt");
    assert_eq!(case.body(&key).await, None);
    assert_eq!(case.version(&key).await, None);
    let version = case.store(&key, "hello", When::Any).await;
    let object = case.store.get(&key).await.unwrap().expect("it was just written");
    assert_eq!(object.body, "hello");
    assert_eq!(object.meta.size, 5);
    assert_eq!(object.meta.version, version);
    let meta = case.store.head(&key).await.unwrap().expect("it was just written");
    assert_eq!((meta.version, meta.size), (version, 5));
    assert_eq!(meta.modified, object.meta.modified);
}

/// Bodies of every size survive.
pub async fn empty_and_large(case: Case) {
    let empty = case.key("empty");
    case.store(&empty, "", When::Absent).await;
    assert_eq!(case.body(&empty).await.as_deref(), Some(&b""[..]));
    let large = case.key("large");
    let body: Vec<u8> =
        (0..3_000_000u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    case.store(&large, body.clone(), When::Absent).await;
    assert!(case.body(&large).await.as_deref() == Some(&body[..]), "3 MB came back changed");
}

/// Only the first create applies.
pub async fn create_once(case: Case) {
    let key = case.key("once");
    let version = case.store(&key, "first", When::Absent).await;
    assert!(matches!(case.put(&key, "second", When::Absent).await, Put::Refused));
    assert_eq!(case.body(&key).await.as_deref(), Some(&b"first"[..]));
    assert_eq!(case.version(&key).await, Some(version));
}

/// A swap applies to the matched version only, and not to nothing.
pub async fn replace_in_version(case: Case) {
    let key = case.key("swap");
    let first = case.store(&key, "one", When::Absent).await;
    let second = case.store(&key, "two", When::Matches(first.clone())).await;
    assert_ne!(first, second);
    assert!(matches!(case.put(&key, "three", When::Matches(first)).await, Put::Refused));
    assert_eq!(case.body(&key).await.as_deref(), Some(&b"two"[..]));
    let missing = case.key("missing");
    assert!(matches!(case.put(&missing, "x", When::Matches(second)).await, Put::Refused));
    assert_eq!(case.body(&missing).await, None);
}

/// A conditional delete applies to the matched version only, and not to nothing.
pub async fn delete_in_version(case: Case) {
    let key = case.key("victim");
    let first = case.store(&key, "one", When::Absent).await;
    let second = case.store(&key, "two", When::Matches(first.clone())).await;
    let delete = async |version: &Version| case.store.delete_version(&key, version).await.unwrap();
    assert!(matches!(delete(&first).await, Delete::Refused));
    assert_eq!(case.body(&key).await.as_deref(), Some(&b"two"[..]));
    assert!(matches!(delete(&second).await, Delete::Deleted));
    assert_eq!(case.body(&key).await, None);
    assert!(matches!(delete(&second).await, Delete::Refused));
}

/// An unconditional delete of nothing is done already, and a deleted key can be created again.
pub async fn delete_is_idempotent(case: Case) {
    let key = case.key("deep/er/key");
    for _ in 0..2 {
        assert!(matches!(case.store.delete(&key).await.unwrap(), Delete::Deleted));
        case.store(&key, "again", When::Absent).await;
        assert!(matches!(case.store.delete(&key).await.unwrap(), Delete::Deleted));
        assert_eq!(case.body(&key).await, None);
    }
}

/// Many deletes at once, missing keys among them.
pub async fn delete_many(case: Case) {
    case.fill((0..40).map(|n| format!("n{n:02}"))).await;
    let keys: Vec<Key> = (0..45).step_by(2).map(|n| case.key(&format!("n{n:02}"))).collect();
    case.store.delete_many(&keys).await.unwrap();
    case.store.delete_many(&keys).await.unwrap();
    case.store.delete_many(&[]).await.unwrap();
    let left = case.names(case.list("")).await;
    let odd: Vec<String> = (1..40).step_by(2).map(|n| format!("n{n:02}")).collect();
    assert_eq!(case.in_order(left), odd);
}

/// 16 creators, one winner, and its bytes are there.
pub async fn race_of_creates(case: Case) {
    for round in 0..10 {
        let key = case.key(&format!("round-{round}"));
        let race = (0..16u128).map(|n| {
            let (case, key) = (case.clone(), key.clone());
            tokio::spawn(async move {
                let body = format!("{}", nonce(n));
                let write = Write::when(When::Absent, Proof::Nonce(nonce(n)))
                    .durability(Durability::Volatile);
                let put = case.store.put(&key, body.clone().into(), write).await.unwrap();
                (put, body)
            })
        });
        let mut winners = Vec::new();
        for result in futures::future::join_all(race).await {
            let (put, body) = result.expect("no panic");
            match put {
                Put::Stored(version) => winners.push((version, body)),
                Put::Refused => {}
                other => panic!("neither stored nor refused: {other:?}"),
            }
        }
        assert_eq!(winners.len(), 1, "round {round}: {winners:?}");
        let (version, body) = winners.remove(0);
        assert_eq!(case.body(&key).await, Some(body.into()));
        assert_eq!(case.version(&key).await, Some(version));
    }
}

/// 16 incrementers of one counter: what was acknowledged is there.
pub async fn race_of_swaps(case: Case) {
    let key = case.key("counter");
    case.store(&key, "0 start", When::Absent).await;
    let increments = (0..16u128).map(|n| {
        let (case, key) = (case.clone(), key.clone());
        tokio::spawn(async move {
            let mut acknowledged = 0;
            for round in 0..40 {
                let object = case.store.get(&key).await.unwrap().expect("the counter is there");
                let text = String::from_utf8(object.body.to_vec()).unwrap();
                let count: u64 = text.split(' ').next().unwrap().parse().unwrap();
                let mark = nonce(n << 64 | round);
                let body = format!("{} {mark}", count + 1);
                let write = Write::when(When::Matches(object.meta.version), Proof::Nonce(mark))
                    .durability(Durability::Volatile);
                match case.store.put(&key, body.into(), write).await.unwrap() {
                    Put::Stored(_) => acknowledged += 1,
                    Put::Refused | Put::Contended => {}
                    Put::Unknown(unknown) => panic!("{:?}", unknown.error()),
                }
                if acknowledged == 5 {
                    break;
                }
            }
            acknowledged
        })
    });
    let acknowledged: u64 =
        futures::future::join_all(increments).await.into_iter().map(|n| n.unwrap()).sum();
    let body = case.body(&key).await.unwrap();
    let text = String::from_utf8(body.to_vec()).unwrap();
    assert_eq!(text.split(' ').next().unwrap(), acknowledged.to_string());
    assert!(acknowledged >= 16, "only {acknowledged} increments of 16 tasks went through");
}

/// A delete and a swap of the same version: exactly one applies.
pub async fn race_of_delete_and_swap(case: Case) {
    for round in 0..20 {
        let key = case.key(&format!("round-{round}"));
        let version = case.store(&key, format!("start {round}"), When::Absent).await;
        let swap = {
            let (case, key, version) = (case.clone(), key.clone(), version.clone());
            tokio::spawn(async move { case.put(&key, "swapped", When::Matches(version)).await })
        };
        let delete = {
            let (case, key) = (case.clone(), key.clone());
            tokio::spawn(async move { case.store.delete_version(&key, &version).await.unwrap() })
        };
        let (swap, delete) = (swap.await.unwrap(), delete.await.unwrap());
        let there = case.body(&key).await;
        match (&swap, &delete) {
            (Put::Stored(_), Delete::Refused) => {
                assert_eq!(there.as_deref(), Some(&b"swapped"[..]))
            }
            (Put::Refused, Delete::Deleted) => assert_eq!(there, None),
            both => panic!("round {round}: {both:?}, and then {there:?}"),
        }
    }
}

/// A read of a known version moves no body.
pub async fn conditional_get(case: Case) {
    let key = case.key("cached");
    let first = case.store(&key, "one", When::Any).await;
    let get = async |known: &Version| case.store.get_if_changed(&key, known).await.unwrap();
    assert!(matches!(get(&first).await, Get::Unchanged));
    let second = case.store(&key, "two", When::Any).await;
    let Get::Found(object) = get(&first).await else { panic!("it changed") };
    assert_eq!((object.body.as_ref(), &object.meta.version), (&b"two"[..], &second));
    assert!(matches!(case.store.delete(&key).await.unwrap(), Delete::Deleted));
    assert!(matches!(get(&second).await, Get::Absent));
}

/// Prefixes, entry points and limits; sizes, times and versions.
pub async fn listing(case: Case) {
    let names = ["a", "b/1", "b/2", "b/3/x", "b!", "b0", "c"];
    case.fill(names.map(str::to_owned)).await;
    let sorted = |names: &[&str]| {
        let mut names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        names.sort();
        names
    };
    let all = case.names(case.list("")).await;
    assert_eq!(case.in_order(all), sorted(&names));
    let below = case.names(case.list("b/")).await;
    assert_eq!(case.in_order(below), sorted(&["b/1", "b/2", "b/3/x"]));
    let beginning = case.names(case.list("b")).await;
    assert_eq!(case.in_order(beginning), sorted(&["b!", "b/1", "b/2", "b/3/x", "b0"]));
    assert_eq!(case.names(case.list("none")).await, Vec::<String>::new());
    assert_eq!(case.names(case.list("a/")).await, Vec::<String>::new());
    let unordered = case.names(case.list("").unordered()).await;
    assert_eq!(unordered.iter().cloned().collect::<BTreeSet<_>>().len(), names.len());
    assert_eq!(case.names(case.list("").limit(3)).await.len(), 3);
    assert_eq!(case.names(case.list("").limit(0)).await.len(), 0);
    if case.traits.ordered {
        let after = case.list("").start_after(format!("{}/b/2", case.name));
        assert_eq!(case.names(after).await, ["b/3/x", "b0", "c"]);
    }
    let page = case.store.list(case.list("").detail(Detail::Version)).collect().await.unwrap();
    for entry in &page.entries {
        let meta = case.store.head(&entry.key).await.unwrap().expect("it was just listed");
        assert_eq!(entry.size, Some(meta.size), "{}", entry.key);
        assert_eq!(entry.version.as_ref(), Some(&meta.version), "{}", entry.key);
        let listed = entry.modified.expect("it was asked for");
        assert_eq!(listed.floor_to_second(), meta.modified.floor_to_second(), "{}", entry.key);
    }
}

/// More keys than fit on a page, and every one comes exactly once.
pub async fn listing_pages(case: Case) {
    let names: Vec<String> = (0..1_060).map(|n| format!("{}/{n:04}", n % 3)).collect();
    case.fill(names.clone()).await;
    let mut names = names;
    names.sort();
    for (page_size, pages) in [(1000, 2), (250, 5)] {
        let mut listing = case.store.list(case.list("").page_size(page_size));
        let mut all = Vec::new();
        let mut full = 0;
        while let Some(page) = listing.next_page().await.unwrap() {
            assert!(page.len() <= page_size);
            full += 1;
            all.extend(case.strip(&page));
        }
        assert!((pages..=pages + 1).contains(&full), "{full} pages of {page_size}");
        assert_eq!(case.in_order(all), names);
    }
}

/// Everything behind the next slash is one prefix.
pub async fn listing_delimited(case: Case) {
    case.fill(["a", "b/1", "b/2", "c/d/1", "e"].map(str::to_owned)).await;
    let page = async |list: List| case.store.list(list).collect().await.unwrap();
    let top = page(case.list("").delimited()).await;
    let prefixes: Vec<String> =
        top.prefixes.iter().map(|prefix| prefix[case.name.len() + 1..].to_owned()).collect();
    assert_eq!(case.in_order(prefixes), ["b/", "c/"]);
    assert_eq!(top.entries.len(), 2);
    let below = page(case.list("c/").delimited()).await;
    assert_eq!(below.prefixes, [format!("{}/c/d/", case.name)]);
    assert!(below.entries.is_empty());
    // A prefix is gone with its last object.
    case.store.delete(&case.key("c/d/1")).await.map(drop).unwrap();
    if case.traits.exact_prefixes {
        let top = page(case.list("").delimited()).await;
        assert_eq!(top.prefixes, [format!("{}/b/", case.name)]);
    }
}

/// A listing shows what was written and deleted before it.
pub async fn listing_sees_writes(case: Case) {
    for round in 0..10 {
        let key = case.key(&format!("round-{round}"));
        case.store(&key, "x", When::Absent).await;
        let name = format!("round-{round}");
        assert!(case.names(case.list("")).await.contains(&name), "{name} is not listed");
        case.store.delete(&key).await.map(drop).unwrap();
        assert!(!case.names(case.list("")).await.contains(&name), "{name} is still listed");
    }
}

/// Any legal character, in names of any legal length, goes in and comes back.
pub async fn odd_keys(case: Case) {
    // A bucket's 1,024 bytes include the store's own prefix.
    let room = 1024 - case.name.len() - 1 - "fleet/one/".len();
    let mut names: Vec<String> = [
        "with space",
        " leading and trailing ",
        "plus+and&equals=",
        "percent%41%zz%",
        "question?#hash",
        "quote\"'`",
        "<angle>&amp;",
        "semi;colon:at@",
        "tilde~dollar$",
        "(paren)[x]{y}|^",
        "ünïcödé/日本語/🦀",
        ".hidden/..dots",
        "a.lock",
        ".lh/x",
        "star*",
    ]
    .map(str::to_owned)
    .to_vec();
    let backslash = "back\\slash".to_owned();
    match case.traits.backslash {
        Backslash::Kept => names.push(backslash),
        Backslash::Mangled => {}
        Backslash::Refused => {
            let refused = case.try_put(&case.key(&backslash), "x".into(), When::Any).await;
            assert_eq!(refused.unwrap_err().kind(), leasehold::ErrorKind::Invalid);
        }
    }
    // Real file systems and servers limit one segment; a key of 1,024 bytes is made of many.
    let long: String =
        (0..room).map(|n| if n % 100 == 99 && n + 1 < room { '/' } else { 'x' }).collect();
    assert_eq!(long.len(), room);
    names.push(long);
    for name in &names {
        let key = case.key(name);
        case.store(&key, name.clone(), When::Absent).await;
        assert_eq!(case.body(&key).await, Some(name.clone().into()), "{name}");
    }
    let listed: BTreeSet<String> = case.names(case.list("")).await.into_iter().collect();
    assert_eq!(listed, names.iter().cloned().collect());
    for name in &names {
        assert!(matches!(case.store.delete(&case.key(name)).await.unwrap(), Delete::Deleted));
    }
    assert_eq!(case.names(case.list("")).await, Vec::<String>::new());
}

/// The store tells its time, and an object's age by it alone.
pub async fn times(case: Case) {
    let key = case.key("clock");
    case.store(&key, "tick", When::Any).await;
    let before = case.store.now().await.unwrap();
    let meta = case.store.head(&key).await.unwrap().expect("it was just written");
    let age = meta.now.since(meta.modified);
    assert!(age < Duration::from_secs(60), "{age:?} old when it was just written");
    // Seconds are rounded down, and nothing is written in the future.
    assert!(meta.modified <= meta.now.plus(Duration::from_secs(1)), "{meta:?}");
    let after = case.store.now().await.unwrap();
    assert!(after >= before.minus(Duration::from_secs(2)), "{before} then {after}");
}

/// Whatever is promised about a power loss, the outcome is the same.
pub async fn durabilities(case: Case) {
    for durability in [Durability::Durable, Durability::Ordered, Durability::Volatile] {
        let key = case.key(&format!("{durability:?}"));
        let put = async |body: &'static str, when: When| {
            let write = Write::when(when, Proof::Bytes).durability(durability);
            case.store.put(&key, body.into(), write).await.unwrap()
        };
        let first = stored(put("one", When::Absent).await);
        let second = stored(put("two", When::Matches(first.clone())).await);
        assert!(matches!(put("three", When::Matches(first)).await, Put::Refused));
        assert!(matches!(put("four", When::Absent).await, Put::Refused));
        assert_eq!(case.version(&key).await, Some(second));
        stored(put("five", When::Any).await);
        assert_eq!(case.body(&key).await.as_deref(), Some(&b"five"[..]));
        case.store.persist(&[key]).await.unwrap();
    }
}

/// Without a condition the last writer wins, whoever else writes.
pub async fn unconditional_put(case: Case) {
    let key = case.key("any");
    let writers: Vec<_> = (0..16)
        .map(|n| {
            let (case, key) = (case.clone(), key.clone());
            tokio::spawn(async move { case.store(&key, format!("writer {n}"), When::Any).await })
        })
        .collect();
    let mut versions = BTreeSet::new();
    for writer in writers {
        versions.insert(writer.await.unwrap());
    }
    let version = case.version(&key).await.expect("somebody wrote");
    assert!(versions.contains(&version));
}

/// A store on this server, below a prefix.
pub fn on_server(server: &crate::servers::Server, scheme: &str, prefix: &str) -> Store {
    let url = format!("{scheme}://{}/{prefix}", server.bucket());
    let mut connect = leasehold::store::Connect::new(url.parse().unwrap());
    connect.cloud = leasehold::store::cloud::CloudOptions {
        endpoint: Some(server.endpoint()),
        access_key: Some(server.access_key().to_owned()),
        secret_key: Some(server.secret_key().to_owned()),
        ..Default::default()
    };
    connect.open().unwrap()
}

/// A store behind an `Arc`'d backend, for cases that wrap one.
pub fn over(backend: Arc<dyn leasehold::store::Backend>) -> Store {
    Store::new(backend, leasehold::env::Env::system(), leasehold::StoreSettings::default())
        .expect("the default settings work")
}
