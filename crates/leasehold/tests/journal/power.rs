//! Plays a power loss: the journal is kept aside as it was at some moment, the files are brought
//! into a state that the kernel might have left on disk, and the journal is put back as one of
//! another boot.

use std::path::{Path, PathBuf};

use leasehold::store::{Connect, StoreUrl};
use leasehold::{Durability, Key, Proof, Put, Store, Version, When, Write};
use xxhash_rust::xxh3::xxh3_64;

pub fn key(name: &str) -> Key {
    Key::new(name).unwrap()
}

pub fn open(dir: &Path) -> Store {
    Connect::new(StoreUrl::Directory(dir.to_owned())).open().unwrap()
}

pub async fn put(store: &Store, name: &str, body: &str, when: When) -> Version {
    put_as(store, name, body, when, Durability::Durable).await
}

pub async fn put_as(
    store: &Store,
    name: &str,
    body: &str,
    when: When,
    durability: Durability,
) -> Version {
    let write = Write::when(when, Proof::Bytes).durability(durability);
    match store.put(&key(name), body.to_owned().into(), write).await.unwrap() {
        Put::Stored(version) => version,
        other => panic!("{name}: {other:?}"),
    }
}

pub async fn delete(store: &Store, name: &str) {
    let deleted = store.delete(&key(name)).await.unwrap();
    assert!(matches!(deleted, leasehold::Delete::Deleted));
}

pub async fn read(store: &Store, name: &str) -> Option<String> {
    let object = store.get(&key(name)).await.unwrap()?;
    Some(String::from_utf8(object.body.to_vec()).unwrap())
}

/// Many writers at once, so that a journal is kept; 16 objects `warm/…` come with it.
pub async fn keep_journal(store: &Store) {
    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..16 {
        let store = store.clone();
        tasks.spawn(async move { put(&store, &format!("warm/{n}"), "warm", When::Any).await });
    }
    tasks.join_all().await;
}

pub fn log(dir: &Path) -> PathBuf {
    dir.join(".lh/log")
}

pub fn segments(dir: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(log(dir)) else { return Vec::new() };
    let paths = entries.map(|entry| entry.unwrap().path());
    paths.filter(|path| path.extension().is_some_and(|end| end == "log")).collect()
}

/// The journal as it is on disk now: names and contents.
pub type Journal = Vec<(String, Vec<u8>)>;

pub fn snapshot(dir: &Path) -> Journal {
    let Ok(entries) = std::fs::read_dir(log(dir)) else { return Vec::new() };
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.map(|name| (name.clone(), std::fs::read(log(dir).join(name)).unwrap())).collect()
}

pub fn boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap().trim().to_owned()
}

fn earlier_boot() -> String {
    let id = boot_id();
    let first = if id.starts_with('0') { "1" } else { "0" };
    format!("{first}{}", &id[1..])
}

/// How names of segments begin.
pub fn prefix(boot_id: &str) -> String {
    format!("{:016x}-", xxh3_64(boot_id.as_bytes()))
}

/// The same file of the journal, had it been written in an earlier boot.
fn of_earlier_boot(name: &str, mut bytes: Vec<u8>) -> (String, Vec<u8>) {
    let (now, earlier) = (boot_id(), earlier_boot());
    let sum = |bytes: &mut [u8], end: usize| {
        let sum = xxh3_64(&bytes[..end]);
        bytes[end..end + 8].copy_from_slice(&sum.to_le_bytes());
    };
    if name == "floor" {
        for block in bytes.chunks_mut(4096) {
            for slot in block[16..80].chunks_mut(16) {
                if slot[..8] == xxh3_64(now.as_bytes()).to_le_bytes() {
                    slot[..8].copy_from_slice(&xxh3_64(earlier.as_bytes()).to_le_bytes());
                }
            }
            if block.starts_with(b"LHFLOOR1") {
                sum(block, 80);
            }
        }
        return (name.to_owned(), bytes);
    }
    let at = bytes.windows(now.len()).position(|window| window == now.as_bytes()).unwrap();
    bytes[at..at + now.len()].copy_from_slice(earlier.as_bytes());
    sum(&mut bytes, at + now.len());
    (name.replace(&prefix(&now), &prefix(&earlier)), bytes)
}

/// Puts the journal back as that of an earlier boot.
pub fn lose_power(dir: &Path, journal: Journal) {
    let _ = std::fs::remove_dir_all(log(dir));
    std::fs::create_dir_all(log(dir)).unwrap();
    for (name, bytes) in journal {
        let (name, bytes) = of_earlier_boot(&name, bytes);
        std::fs::write(log(dir).join(name), bytes).unwrap();
    }
}

/// Makes the last record of the only segment unreadable: it was not on disk yet.
pub fn lose_last_record(journal: &mut Journal) {
    let mut segments = journal.iter_mut().filter(|(name, _)| name.ends_with(".log"));
    let (_, bytes) = segments.next().unwrap();
    assert!(segments.next().is_none());
    let end = bytes.iter().rposition(|byte| *byte != 0).unwrap();
    bytes[end] ^= 1;
}

pub fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

/// Runs `work` with a journal, and returns the journal as it was at the end of it. The store is
/// closed by then.
pub fn journal_of<T, F: Future<Output = T>>(dir: &Path, work: impl FnOnce(Store) -> F) -> Journal {
    let runtime = runtime();
    let store = open(dir);
    let journal = runtime.block_on(async {
        keep_journal(&store).await;
        let _other = work(store.clone()).await;
        snapshot(dir)
    });
    assert!(!journal.is_empty(), "no journal was kept");
    drop(store);
    drop(runtime);
    assert!(!log(dir).exists(), "a clean end leaves no journal");
    journal
}

/// What the store shows after the machine came up again.
pub fn read_all(dir: &Path, names: &[&str]) -> Vec<Option<String>> {
    let store = open(dir);
    runtime().block_on(async {
        let mut found = Vec::new();
        for name in names {
            found.push(read(&store, name).await);
        }
        found
    })
}

pub fn read_one(dir: &Path, name: &str) -> Option<String> {
    read_all(dir, &[name]).remove(0)
}
