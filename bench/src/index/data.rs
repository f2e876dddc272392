//! Records to work on.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use leasehold::Store;
use leasehold::index::{Field, Index, IndexSettings, NewIndex, Shard, Width};
use leasehold::protocol::shard::KeyHash;
use leasehold::store::{Connect, StoreUrl};
use tokio::runtime::Runtime;

use crate::rig::Rig;

pub const NAME: &str = "domains";

/// Records and updates.
#[derive(Clone, Copy)]
pub struct Size {
    pub records: u64,
    pub updates: u64,
}

pub fn size(rig: &Rig) -> Size {
    rig.pick(
        Size { records: 1_000_000, updates: 100_000 },
        Size { records: 100_000, updates: 10_000 },
    )
}

fn mix(n: u64) -> u64 {
    let mut z = n.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

const WORDS: [&str; 16] = [
    "acme", "bright", "cedar", "delta", "ember", "falcon", "green", "harbor", "iron", "jade",
    "kite", "lumen", "maple", "north", "ocean", "pine",
];
const ENDS: [&str; 8] = ["com", "net", "org", "io", "co", "de", "co.uk", "biz"];

/// The key of the n-th record.
pub fn domain(n: u64) -> String {
    let h = mix(n);
    let (a, b) = (WORDS[(h & 15) as usize], WORDS[(h >> 5 & 15) as usize]);
    format!("{a}{b}{n}.{}", ENDS[(h >> 10 & 7) as usize])
}

/// A row as a compiler writes it.
fn row(n: u64, second: u64, version: u64) -> String {
    let h = mix(n ^ 0x77);
    let (a, b) = (WORDS[(h & 15) as usize], WORDS[(h >> 5 & 15) as usize]);
    let (s, m, hour, day) = (second % 60, second / 60 % 60, second / 3600 % 24, second / 86_400);
    let (month, day) = (day / 28 % 12 + 1, day % 28 + 1);
    let time = format!("2024-{month:02}-{day:02}T{hour:02}:{m:02}:{s:02}.000000Z");
    format!("{}\u{1f}{a} {b} Légal\u{1f}{version}\u{1f}{time}\u{1f}\n", domain(n))
}

fn base_time(n: u64) -> u64 {
    86_400 + mix(n ^ 0xABCD) % (200 * 86_400)
}

/// The updates, half of them of existing records.
pub fn updates(size: Size) -> impl Iterator<Item = (String, String)> {
    let step = size.records / (size.updates / 2).max(1);
    (0..size.updates).map(move |j| {
        let (n, second) = match j % 2 == 0 {
            true => {
                let n = j / 2 * step;
                let older = mix(j).is_multiple_of(5);
                let by = 1 + mix(j ^ 9) % 80_000;
                (n, if older { base_time(n) - by } else { base_time(n) + by })
            }
            false => (size.records + j / 2, 250 * 86_400 + mix(j) % 86_400),
        };
        (domain(n), row(n, second, 10))
    })
}

/// An index with all records, compacted.
pub fn base(rig: &Rig, runtime: &Runtime) -> Result<PathBuf> {
    let path = rig.path().join("base");
    if !path.exists() {
        build(runtime, &path, size(rig).records)?;
    }
    Ok(path)
}

/// Makes an index of this many records in a new store at this path, compacted.
pub fn build(runtime: &Runtime, path: &Path, records: u64) -> Result<()> {
    let store = open(path)?;
    runtime.block_on(async {
        let index = create(&store).await?;
        import(&index, records).await?;
        index.compact().await?;
        anyhow::Ok(())
    })
}

/// The index, without records yet.
pub async fn create(store: &Store) -> Result<Index> {
    let fields =
        ["domain:domain", "company_name", "scraper_version:integer", "updated_at:datetime"];
    Ok(Index::create(store, NAME, NewIndex::with_fields(parsed(&fields)?)?).await?)
}

fn parsed(fields: &[&str]) -> Result<Vec<Field>> {
    let parse = |field: &&str| Field::parse(field).map_err(leasehold::Error::from);
    Ok(fields.iter().map(parse).collect::<Result<_, _>>()?)
}

/// Puts this many records, in batches as an import does.
pub async fn import(index: &Index, records: u64) -> Result<()> {
    let mut batch = index.batch().await?;
    for n in 0..records {
        batch.put_row(base_row(n).trim_end().as_bytes())?;
        if batch.bytes() > BATCH {
            batch.flush().await?;
        }
    }
    Ok(batch.flush().await?)
}

const BATCH: usize = 32 << 20;

/// The n-th record.
pub fn base_row(n: u64) -> String {
    row(n, base_time(n), 1 + mix(n ^ 5) % 9)
}

/// A record as an update of the n-th one.
pub fn update(n: u64) -> String {
    row(n, 250 * 86_400 + n % 86_400, 10)
}

/// An index of 16 shards, of which most uses fill the first alone.
pub async fn create_one_shard(store: &Store, name: &str) -> Result<Index> {
    let width = Width::new(1).context("a width")?;
    let fields = parsed(&["id", "text"])?;
    let new = NewIndex { width, flat_inbox: false, ..NewIndex::with_fields(fields)? };
    Ok(Index::create(store, name, new).await?)
}

/// The keys that are in its first shard.
pub fn one_shard_keys() -> Result<impl Iterator<Item = String>> {
    let width = Width::new(1).context("a width")?;
    let keys = (1_u64..).map(|n| format!("key-{n}"));
    Ok(keys.filter(move |key| Shard::of(key, width).number() == 0))
}

/// Puts this many records of 1 kB into all its shards.
pub async fn fill_all_shards(index: &Index, records: u64) -> Result<()> {
    let text = "x".repeat(980);
    let mut batch = index.batch().await?;
    for n in 0..records {
        batch.put_texts([format!("key-{n}").as_str(), &text])?;
        if batch.bytes() > BATCH {
            batch.flush().await?;
        }
    }
    Ok(batch.flush().await?)
}

/// Puts at least this many bytes into its first shard; tells how many records.
pub async fn fill_one_shard(index: &Index, most: usize) -> Result<u64> {
    let text = "x".repeat(900);
    let (mut batch, mut bytes, mut records) = (index.batch().await?, 0, 0);
    for key in one_shard_keys()? {
        batch.put_texts([key.as_str(), &text])?;
        records += 1;
        if batch.bytes() > BATCH.min(most - bytes) {
            bytes += batch.bytes();
            batch.flush().await?;
            if bytes >= most {
                break;
            }
        }
    }
    Ok(records)
}

pub fn open(path: &Path) -> Result<Store> {
    Ok(Connect::new(StoreUrl::Directory(path.to_owned())).open()?)
}

pub fn open_index(runtime: &Runtime, path: &Path) -> Result<Index> {
    let index = runtime.block_on(Index::open(&open(path)?, NAME))?;
    Ok(index.with_settings(IndexSettings::default()))
}

/// The folder of the index in a store.
pub fn folder(store: &Path) -> PathBuf {
    store.join("indexes").join(NAME)
}

/// A store with the files of `base`. Copies: links would show in the times of its own files, by which readers
/// know that nobody has touched them since they were compiled.
pub fn linked(base: &Path, to: &Path) -> Result<()> {
    if to.exists() {
        fs::remove_dir_all(to)?;
    }
    fs::create_dir_all(folder(to).join("shards"))?;
    fs::create_dir_all(folder(to).join("inbox"))?;
    fs::copy(base.join("leasehold.json"), to.join("leasehold.json"))?;
    fs::copy(folder(base).join("datapackage.json"), folder(to).join("datapackage.json"))?;
    for entry in fs::read_dir(folder(base).join("shards"))? {
        let entry = entry?;
        fs::copy(entry.path(), folder(to).join("shards").join(entry.file_name()))?;
    }
    Ok(())
}

/// An inbox of one object per update.
pub fn fill_files(store: &Path, size: Size) -> Result<()> {
    for shard in Width::USUAL.all() {
        fs::create_dir_all(folder(store).join("inbox").join(shard.to_string()))?;
    }
    for (n, (key, row)) in updates(size).enumerate() {
        let hash = KeyHash::of(&key);
        let shard = hash.shard(Width::USUAL);
        let name = format!("inbox/{shard}/{}-{n:032x}.usv", hash.short());
        fs::write(folder(store).join(name), row)?;
    }
    Ok(())
}

/// An inbox of one batch per shard.
pub fn fill_batches(store: &Path, size: Size) -> Result<()> {
    let mut shards: BTreeMap<Shard, (usize, String)> = BTreeMap::new();
    for (key, row) in updates(size) {
        let (count, rows) = shards.entry(Shard::of(&key, Width::USUAL)).or_default();
        *count += 1;
        rows.push_str(&row);
    }
    for (shard, (count, rows)) in shards {
        let inbox = folder(store).join("inbox").join(shard.to_string());
        fs::create_dir_all(&inbox)?;
        fs::write(inbox.join(format!("-{count}-{:032x}.usv", 7)), rows)?;
    }
    Ok(())
}
