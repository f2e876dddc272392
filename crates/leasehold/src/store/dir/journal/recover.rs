//! After a power loss: what was noted, but may not have reached its file.
//!
//! The notes on one object, in order, are a chain of states: what it was before the first, and what
//! each made of it. If the file shows one of these, or nothing, or a torn one, it becomes the last.
//! If it shows something else, that was written later without a note and did reach the disk: it
//! stays.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::time::Duration;

use leasehold_protocol::key::Key;
use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use super::record::{self, HEADER, Header, Record};
use super::{device_of, flush_folders, folder, sync_everything};
use crate::store::content_version;
use crate::store::dir::files::{self, io_error, make_folder, read_all};
use crate::store::dir::names::{PRIVATE, path_of};
use crate::{Error, Result, host};

/// How long to wait for another process that is at it.
const PATIENCE: u32 = 60_000;

/// Brings the store to what was reported durable before a power loss, if there was one, and removes
/// what dead processes of this boot left.
pub fn recover(root: &OwnedFd) -> Result<()> {
    let segments = list(root).map_err(failed)?;
    if segments.is_empty() {
        return Ok(());
    }
    let device = device_of(root).map_err(failed)?;
    let of_now = |header: &Header| header.boot_id == host::boot_id() && header.device == device;
    let mut old = false;
    for name in &segments {
        if let Some(Found { header: Some(header), .. }) = open(root, name).map_err(failed)? {
            old |= !of_now(&header);
        }
    }
    match old {
        true => bring_back(root, &of_now),
        // Nothing is lost, so this can wait for whoever may write here.
        false => {
            let _ = remove_dead(root);
            Ok(())
        }
    }
}

struct Found {
    file: OwnedFd,
    header: Option<Header>,
}

fn list(root: &OwnedFd) -> Result<Vec<String>, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = match rustix::fs::openat(root, folder(), flags, Mode::empty()) {
        Ok(folder) => folder,
        Err(Errno::NOENT) => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut names = Vec::new();
    for entry in rustix::fs::Dir::new(folder)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if name.ends_with(".log") {
            names.push(name);
        }
    }
    Ok(names)
}

fn open(root: &OwnedFd, name: &str) -> Result<Option<Found>, Errno> {
    let path = format!("{}/{name}", folder());
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let file = match rustix::fs::openat(root, path, flags, Mode::empty()) {
        Ok(file) => file,
        Err(Errno::NOENT) => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut bytes = vec![0; HEADER as usize];
    let read = rustix::io::pread(&file, &mut bytes, 0)?;
    Ok(Some(Found { header: Header::parse(&bytes[..read]), file }))
}

/// Segments of this boot whose writers are gone: with everything flushed, they are not needed.
fn remove_dead(root: &OwnedFd) -> Result<(), Errno> {
    let mut dead = Vec::new();
    for name in list(root)? {
        if let Some(found) = open(root, &name)?
            && rustix::fs::flock(&found.file, FlockOperation::NonBlockingLockExclusive).is_ok()
        {
            dead.push((name, found.file));
        }
    }
    if dead.is_empty() {
        return Ok(());
    }
    sync_everything(root)?;
    for (name, _) in &dead {
        rustix::fs::unlinkat(root, format!("{}/{name}", folder()), AtFlags::empty())?;
    }
    // Goes only if nobody keeps a journal.
    let _ = rustix::fs::unlinkat(root, folder(), AtFlags::REMOVEDIR);
    Ok(())
}

fn bring_back(root: &OwnedFd, of_now: &dyn Fn(&Header) -> bool) -> Result<()> {
    let _only_one = lock(root)?;
    // Somebody else may have done it while we waited.
    let mut records = Vec::new();
    let mut done = Vec::new();
    for name in list(root).map_err(failed)? {
        let Some(Found { file, header }) = open(root, &name).map_err(failed)? else { continue };
        let Some(header) = header.filter(|header| !of_now(header)) else { continue };
        let stat = rustix::fs::fstat(&file).map_err(failed)?;
        let bytes = read_all(&file, &stat).map_err(failed)?;
        let bytes = bytes.get(HEADER as usize..).unwrap_or_default();
        records.extend(record::records(bytes, header.epoch));
        done.push(name);
    }
    if done.is_empty() {
        return Ok(());
    }
    let (count, restored) = (records.len(), apply(root, records)?);
    sync_everything(root).map_err(failed)?;
    for name in &done {
        let path = format!("{}/{name}", folder());
        rustix::fs::unlinkat(root, path, AtFlags::empty()).map_err(failed)?;
    }
    flush_folders(root).map_err(failed)?;
    tracing::info!(
        notes = count,
        restored,
        "the machine was not shut down cleanly: the journal was read back"
    );
    Ok(())
}

/// Applies the notes, and says how many objects were not as they should be.
fn apply(root: &OwnedFd, mut records: Vec<Record>) -> Result<usize> {
    records.sort_by_key(|record| record.stamp);
    let mut chains = HashMap::<String, Vec<Record>>::new();
    for record in records {
        chains.entry(record.key.clone()).or_default().push(record);
    }
    let mut restored = 0;
    for (key, chain) in chains {
        let key = Key::new(&key)?;
        let there = match files::open(root, &key)? {
            Some((file, stat)) => Some(read_all(&file, &stat).map_err(failed)?),
            None => None,
        };
        let Some(last) = chain.last() else { continue };
        if there == last.after || !is_of(&chain, there.as_deref()) {
            continue;
        }
        restored += 1;
        let path = path_of(key.as_str());
        match &last.after {
            Some(body) => write(root, &path, body).map_err(|error| failed(error).at(&key))?,
            None => match rustix::fs::unlinkat(root, &*path, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(error) => return Err(failed(error).at(&key)),
            },
        }
    }
    Ok(restored)
}

/// Whether this is one of the chain's states, or what a power loss made of one.
fn is_of(chain: &[Record], there: Option<&[u8]>) -> bool {
    let Some(there) = there else { return true };
    let version = content_version(there);
    there.iter().all(|byte| *byte == 0)
        || chain.iter().any(|record| {
            record.before.as_deref() == Some(version.as_str())
                || record.after.as_deref().is_some_and(|after| after.starts_with(there))
        })
}

fn write(root: &OwnedFd, path: &str, body: &[u8]) -> Result<(), Errno> {
    make_folder(root, PRIVATE)?;
    make_folder(root, &format!("{PRIVATE}/tmp"))?;
    let mut at = 0;
    while let Some(slash) = path[at..].find('/') {
        make_folder(root, &path[..at + slash])?;
        at += slash + 1;
    }
    let temp = format!("{PRIVATE}/tmp/recovered");
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::CLOEXEC;
    let file = rustix::fs::openat(root, &temp, flags, Mode::from_raw_mode(0o666))?;
    if let Ok(old) = rustix::fs::statat(root, path, AtFlags::SYMLINK_NOFOLLOW) {
        files::keep_permissions(&file, &old);
    }
    super::write_all(&file, body, 0)?;
    rustix::fs::fsync(&file)?;
    let (folder, name) = path.rsplit_once('/').unwrap_or((".", path));
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = files::open_beneath(root, folder, flags)?;
    rustix::fs::renameat(root, &temp, &folder, name)
}

fn lock(root: &OwnedFd) -> Result<OwnedFd> {
    let path = format!("{PRIVATE}/recover.lock");
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
    let file = rustix::fs::openat(root, path, flags, Mode::from_raw_mode(0o666)).map_err(failed)?;
    for _ in 0..PATIENCE {
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(Errno::WOULDBLOCK | Errno::INTR) => std::thread::sleep(Duration::from_millis(1)),
            Err(error) => return Err(failed(error)),
        }
    }
    Err(Error::unavailable("another process has been recovering this store for a minute"))
}

fn failed(error: Errno) -> Error {
    io_error("recover what was written before the machine went down", error)
}
