//! The bare loop: lists the inbox, reads its files in the order of their inodes on two threads, merges
//! them into the shards, writes those, and unlinks the inbox. No locks, no conditions, no crash safety.

use std::collections::HashMap;
use std::fs::{self, File};
use std::os::unix::fs::DirEntryExt as _;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use anyhow::Result;
use rustix::fs::{AtFlags, Mode, OFlags};
use sha2::{Digest as _, Sha256};

const THREADS: usize = 2;

fn key(row: &[u8]) -> &[u8] {
    &row[..row.iter().position(|byte| *byte == 0x1f).unwrap_or(row.len())]
}

/// The time, the fourth field.
fn time(row: &[u8]) -> &[u8] {
    row.split(|byte| *byte == 0x1f).nth(3).unwrap_or_default()
}

/// Merges; with `durable`, one `syncfs` before the shards are renamed and one after.
pub fn merge(index: &Path, durable: bool) -> Result<()> {
    let mut files: Vec<(u64, PathBuf)> = Vec::new();
    for folder in fs::read_dir(index.join("inbox"))? {
        for entry in fs::read_dir(folder?.path())? {
            let entry = entry?;
            files.push((entry.ino(), entry.path()));
        }
    }
    files.sort_unstable();
    let groups: Vec<Mutex<Vec<Vec<u8>>>> = (0..256).map(|_| Mutex::default()).collect();
    let chunk = files.len().div_ceil(THREADS).max(1);
    std::thread::scope(|scope| {
        for files in files.chunks(chunk) {
            let groups = &groups;
            scope.spawn(move || {
                let mut local: Vec<Vec<Vec<u8>>> = (0..256).map(|_| Vec::new()).collect();
                for (_, path) in files {
                    let body = fs::read(path).unwrap_or_default();
                    for row in body.split_inclusive(|byte| *byte == b'\n') {
                        local[Sha256::digest(key(row))[0] as usize].push(row.to_vec());
                    }
                }
                for (at, rows) in local.into_iter().enumerate() {
                    if let Ok(mut group) = groups[at].lock() {
                        group.extend(rows);
                    }
                }
            });
        }
    });
    let next = AtomicUsize::new(0);
    let renames: Mutex<Vec<(PathBuf, PathBuf)>> = Mutex::default();
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                while let Some(group) = groups.get(next.fetch_add(1, Relaxed)) {
                    let Ok(mut rows) = group.lock() else { continue };
                    let rows = std::mem::take(&mut *rows);
                    let Some(first) = rows.first() else { continue };
                    let shard = Sha256::digest(key(first))[0];
                    let path = index.join(format!("shards/{shard:02x}.usv"));
                    let merged = merge_rows(&fs::read(&path).unwrap_or_default(), rows);
                    let temp = index.join(format!("shards/{shard:02x}.tmp"));
                    let _ = fs::write(&temp, merged);
                    match durable {
                        true => _ = renames.lock().map(|mut all| all.push((temp, path))),
                        false => _ = fs::rename(&temp, &path),
                    }
                }
            });
        }
    });
    if durable {
        let folder = File::open(index)?;
        rustix::fs::syncfs(&folder)?;
        for (temp, path) in renames.into_inner().unwrap_or_default() {
            fs::rename(temp, path)?;
        }
        File::open(index.join("shards"))?.sync_all()?;
    }
    let mut folders: HashMap<PathBuf, Vec<std::ffi::OsString>> = HashMap::new();
    for (_, path) in &files {
        if let (Some(folder), Some(name)) = (path.parent(), path.file_name()) {
            folders.entry(folder.to_owned()).or_default().push(name.to_owned());
        }
    }
    let folders: Vec<_> = folders.into_iter().collect();
    std::thread::scope(|scope| {
        for folders in folders.chunks(folders.len().div_ceil(THREADS).max(1)) {
            scope.spawn(move || {
                for (folder, names) in folders {
                    let flags = OFlags::PATH | OFlags::DIRECTORY;
                    let Ok(open) = rustix::fs::open(folder, flags, Mode::empty()) else { continue };
                    for name in names {
                        let _ = rustix::fs::unlinkat(&open, name, AtFlags::empty());
                    }
                }
            });
        }
    });
    Ok(())
}

fn merge_rows(shard: &[u8], mut rows: Vec<Vec<u8>>) -> Vec<u8> {
    rows.sort_unstable_by(|a, b| key(a).cmp(key(b)));
    let mut out = Vec::with_capacity(shard.len() + rows.iter().map(Vec::len).sum::<usize>());
    let (mut at, mut kept) = (0, 0);
    for row in &rows {
        let mut placed = false;
        while at < shard.len() {
            let rest = &shard[at..];
            let len = rest.iter().position(|byte| *byte == b'\n').map_or(rest.len(), |end| end + 1);
            match key(rest).cmp(key(row)) {
                std::cmp::Ordering::Less => at += len,
                std::cmp::Ordering::Equal => {
                    if time(row) > time(&rest[..len]) {
                        out.extend_from_slice(&shard[kept..at]);
                        out.extend_from_slice(row);
                        kept = at + len;
                    }
                    at += len;
                    placed = true;
                    break;
                }
                std::cmp::Ordering::Greater => break,
            }
        }
        if !placed {
            out.extend_from_slice(&shard[kept..at]);
            kept = at;
            out.extend_from_slice(row);
        }
    }
    out.extend_from_slice(&shard[kept..]);
    out
}
