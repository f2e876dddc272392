//! Large objects, many objects, and stamps, in a directory.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use leasehold_protocol::cas::{Version, When};
use leasehold_protocol::key::Key;
use leasehold_protocol::time::StoreTime;
use rustix::fs::{AtFlags, Stat};
use rustix::io::Errno;

use super::discard::Doomed;
use super::files::{
    create, hash_file, io_error, mtime, open, read_all, replace, version_by_file, version_of,
};
use super::flush::Target;
use super::names::path_of;
use super::{Dir, HASHED, Shared};
use crate::store::large::{FileBody, Source, Stamp, Whole};
use crate::store::meter::Class;
use crate::store::types::{Durability, Meta, Object, Put};
use crate::{Error, Result};

/// Up to this size an object is read at once.
const SMALL: u64 = crate::store::large::SMALL as u64;

/// How long ago a change must be for another one to show in the times of a file, on the coarsest
/// file system.
const SETTLED_MICROS: i64 = 2_500_000;

/// This many files are removed on the caller's own thread: another one would take as long to begin.
const FEW: usize = 8;

impl Dir {
    /// An open file keeps its content whatever is put in its place.
    pub(super) fn open_source(&self, key: &Key) -> Result<Option<Box<dyn Source>>> {
        self.0.meter.request(Class::Get, 0);
        let Some(root) = self.0.root()? else { return Ok(None) };
        let Some((file, stat)) = open(root, key)? else { return Ok(None) };
        let failed = |error: Errno| io_error("read", error).at(key);
        let size = stat.st_size as u64;
        if size <= SMALL {
            let body = read_all(&file, &stat).map_err(failed)?;
            self.0.meter.received(body.len() as u64);
            let meta = self.0.meta(version_of(&body, &stat, key), &stat);
            return Ok(Some(Box::new(Whole(Object { body: body.into(), meta }))));
        }
        let version = match size > HASHED {
            true => version_by_file(&stat),
            false => hash_file(&file).map_err(failed)?,
        };
        let meta = self.0.meta(version, &stat);
        Ok(Some(Box::new(OpenFile { file, meta, shared: self.0.clone(), key: key.clone() })))
    }

    /// The content alone, of what is not too large to be kept.
    pub(super) fn slurp_file(&self, key: &Key) -> Option<(Stamp, Bytes)> {
        let absent = Some((Stamp::Absent, Bytes::new()));
        let Some(root) = self.0.root().ok()? else { return absent };
        let before = self.0.env.clock().wall();
        let Some((file, stat)) = open(root, key).ok()? else { return absent };
        if stat.st_size as u64 > HASHED {
            return None;
        }
        self.0.meter.request(Class::Get, 0);
        let body = read_all(&file, &stat).ok()?;
        self.0.meter.received(body.len() as u64);
        Some((stamp(&stat, before), body.into()))
    }

    /// The file alone.
    pub(super) fn glance_at(&self, key: &Key) -> Option<(Stamp, Option<Box<dyn Source>>)> {
        let Some(root) = self.0.root().ok()? else { return Some((Stamp::Absent, None)) };
        self.0.meter.request(Class::Get, 0);
        let before = self.0.env.clock().wall();
        let Some((file, stat)) = open(root, key).ok()? else { return Some((Stamp::Absent, None)) };
        let meta = self.0.meta(Version::new(""), &stat);
        let source = OpenFile { file, meta, shared: self.0.clone(), key: key.clone() };
        Some((stamp(&stat, before), Some(Box::new(source))))
    }

    pub(super) async fn put_large(
        &self,
        key: &Key,
        body: &FileBody,
        when: &When,
        durability: Durability,
    ) -> Result<Put> {
        self.0.meter.request(Class::Put, body.len());
        let work = self.0.work()?;
        let _writer = (durability != Durability::Volatile).then(|| work.flusher.writer());
        let (shared, from) = (self.0.clone(), body.clone());
        let mut temp = tokio::task::spawn_blocking(move || shared.work()?.temps.copy(&from))
            .await
            .map_err(|error| Error::unavailable("the write was interrupted").caused_by(error))?
            .map_err(|error| error.at(key))?;
        // Its version is told by the file, not by the content: it is too large for that.
        if durability == Durability::Durable {
            return self.put_direct(key, None, temp, when).await;
        }
        if durability == Durability::Ordered {
            let data = vec![Target::File(temp.file.clone())];
            work.flusher.flush(data).await.map_err(|error| error.at(key))?;
        }
        let stored = match when {
            When::Absent => create(work, key, &mut temp, None)?,
            When::Any | When::Matches(_) => {
                let (at, when) = (key.clone(), when.clone());
                self.locked(key, move |work, stripe| {
                    let stored = replace(work, &at, &mut temp, None, &when, durability);
                    drop(stripe);
                    stored
                })
                .await?
            }
        };
        Ok(stored.map_or(Put::Refused, Put::Stored))
    }

    /// Removes files without locks: whoever calls this knows that nobody replaces them. The folders
    /// stay, for the next ones.
    pub(super) async fn discard_files(&self, keys: &[Key]) -> Result<()> {
        let Some(root) = self.0.root()?.cloned() else { return Ok(()) };
        for _ in keys {
            self.0.meter.request(Class::Delete, 0);
        }
        let doomed = Doomed::new(keys);
        if keys.len() <= FEW {
            return doomed.remove(&root);
        }
        tokio::task::spawn_blocking(move || doomed.remove(&root))
            .await
            .map_err(|error| Error::unavailable("deleting was interrupted").caused_by(error))?
    }

    pub(super) fn stamp_of(&self, name: &str) -> Option<Stamp> {
        let root = match self.0.root() {
            Ok(Some(root)) => root,
            Ok(None) => return Some(Stamp::Absent),
            Err(_) => return None,
        };
        let path = path_of(name);
        let before = self.0.env.clock().wall();
        let stat = match rustix::fs::statat(root, &*path, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            Err(Errno::NOENT | Errno::NOTDIR) => return Some(Stamp::Absent),
            Err(_) => return None,
        };
        Some(stamp(&stat, before))
    }
}

/// What a look at a file or folder says that began at this time: not later, or what changed meanwhile might
/// seem to be long ago.
pub(super) fn stamp(stat: &Stat, before: StoreTime) -> Stamp {
    #[allow(clippy::unnecessary_cast)] // the fields differ in type between systems
    let ids = [
        stat.st_ino as i64,
        stat.st_size as i64,
        stat.st_mtime as i64,
        stat.st_mtime_nsec as i64,
        stat.st_ctime as i64,
        stat.st_ctime_nsec as i64,
    ];
    // The change time cannot be set by anybody, and is never before the modification.
    let changed = ids[4].saturating_mul(1_000_000).saturating_add(ids[5] / 1000);
    let changed = changed.max(mtime(stat).as_micros());
    Stamp::Present { ids, settled: before.as_micros().saturating_sub(changed) > SETTLED_MICROS }
}

#[derive(Debug)]
struct OpenFile {
    file: OwnedFd,
    meta: Meta,
    shared: Arc<Shared>,
    key: Key,
}

#[async_trait]
impl Source for OpenFile {
    fn meta(&self) -> &Meta {
        &self.meta
    }

    async fn read_at(&self, offset: u64, len: usize) -> Result<Bytes> {
        let piece = read_piece(&self.file, offset, len);
        let piece = piece.map_err(|error| io_error("read", error).at(&self.key))?;
        self.shared.meter.received(piece.len() as u64);
        Ok(piece.into())
    }
}

fn read_piece(file: &OwnedFd, offset: u64, len: usize) -> Result<Vec<u8>, Errno> {
    let mut piece = Vec::with_capacity(len);
    while piece.len() < len {
        let at = offset + piece.len() as u64;
        match rustix::io::pread(file, rustix::buffer::spare_capacity(&mut piece), at) {
            Ok(0) => break,
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    piece.truncate(len);
    Ok(piece)
}
