//! Objects as files: what is done with them, once it is decided.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use leasehold_protocol::cas::{Version, When};
use leasehold_protocol::key::Key;
use leasehold_protocol::layout::queue::is_lease;
use leasehold_protocol::time::StoreTime;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, RenameFlags, Stat};
use rustix::io::Errno;

use super::names::path_of;
use super::temp::Temp;
use super::{HASHED, Work};
use crate::env::Env;
use crate::store::content_version;
use crate::store::types::{Delete, Durability};
use crate::{Error, ErrorKind, Result};

/// Makes the temporary file the object at `key`, if there is none. Needs no lock: the kernel
/// decides who is first, and those who hold the lock only ever replace or remove what is there.
/// `version` is what its content says, if that is told by the content.
pub(super) fn create(
    work: &Work,
    key: &Key,
    temp: &mut Temp,
    version: Option<&Version>,
) -> Result<Option<Version>> {
    let path = path_of(key.as_str());
    // Others may remove folders as fast as we make them, but not for ever.
    for round in 0..100 {
        match rename_new(work, temp.name(), &path) {
            Ok(()) => {
                temp.became_object();
                work.note_created(&path);
                return Ok(Some(stored_version(version, &temp.file)));
            }
            Err(Errno::EXIST) => match file_type(&work.root, &path) {
                // An empty folder was in the way, and is gone by now.
                None => {}
                Some(FileType::Directory) if remove_empty(&work.root, &path) => {}
                Some(FileType::Directory) => {
                    return Err(Error::invalid(
                        "other keys have this one as their directory: choose another name",
                    )
                    .at(key));
                }
                Some(_) => return Ok(None),
            },
            Err(Errno::NOENT) => {
                // As a rule it is the folder that is not there.
                if round > 0 {
                    work.temps.check(temp).map_err(|error| error.at(key))?;
                }
                match work.make_folders_above(&path) {
                    // Made, or removed again while we made the next: try once more.
                    Ok(()) | Err(Errno::NOENT) => {}
                    Err(error) => return Err(folder_error(error).at(key)),
                }
            }
            Err(error) => return Err(folder_error(error).at(key)),
        }
    }
    Err(Error::unavailable("others keep removing the folder of this key").at(key))
}

/// What came of making an object in its place.
pub(super) enum InPlace {
    Created(Version),
    /// There is one.
    Exists,
    /// It has to be made in another way.
    NotHere,
}

/// The same for the lease of a task, where its folder is there: without a temporary file and its rename, as
/// every task has a lease. Others may see it before it is written, and a crash may leave it
/// empty, as one of a client that knows no better: an empty lease is held for a ttl. What was put in its
/// place meanwhile is another file than the one that is written here, and has another version.
pub(super) fn create_lease(work: &Work, key: &Key, body: &[u8], env: &Env) -> Result<InPlace> {
    let path = path_of(key.as_str());
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let file = match open_below(&work.root, &path, flags, Mode::from_raw_mode(0o666)) {
        Ok(file) => file,
        Err(Errno::EXIST) => {
            let is_folder = file_type(&work.root, &path) == Some(FileType::Directory);
            return Ok(if is_folder { InPlace::NotHere } else { InPlace::Exists });
        }
        Err(Errno::NOENT | Errno::NOTDIR) => return Ok(InPlace::NotHere),
        Err(error) => return Err(folder_error(error).at(key)),
    };
    let written = loop {
        match rustix::io::write(&file, body) {
            Ok(written) if written == body.len() => {
                // We were stopped for a ttl, and somebody has taken it.
                if rustix::fs::fstat(&file).is_ok_and(|stat| stat.st_nlink == 0) {
                    return Ok(InPlace::Exists);
                }
                work.note_created(&path);
                return Ok(InPlace::Created(content_version(body)));
            }
            Ok(_) => break Errno::NOSPC,
            Err(Errno::INTR) => {}
            Err(error) => break error,
        }
    };
    // As if it had never been there, unless that takes long: then it is held for a ttl.
    if let Ok(Some(_stripe)) = work.stripes.lock_briefly(&work.root, key.as_str(), env)
        && let (Ok(ours), Ok(there)) = (identity(&file), identity_by_name(&work.root, &path))
        && ours == there
    {
        let _ = rustix::fs::unlinkat(&work.root, &*path, AtFlags::empty());
    }
    Err(write_error(written).at(key))
}

/// Makes the temporary file the object at `key` if `when` holds. The caller holds the lock.
pub(super) fn replace(
    work: &Work,
    key: &Key,
    temp: &mut Temp,
    version: Option<&Version>,
    when: &When,
    durability: Durability,
) -> Result<Option<Version>> {
    let path = path_of(key.as_str());
    loop {
        let there = open(&work.root, key)?;
        if let When::Matches(expected) = when {
            let Some((file, stat)) = &there else { return Ok(None) };
            let now =
                read_version(file, stat, key).map_err(|error| io_error("read", error).at(key))?;
            if now != *expected {
                return Ok(None);
            }
        }
        let Some((_, stat)) = there else {
            // Unconditional, and nothing there: a creator may still be faster, then replace that.
            match create(work, key, temp, version)? {
                Some(version) => return Ok(Some(version)),
                None => continue,
            }
        };
        keep_permissions(&temp.file, &stat);
        match rename_over(work, temp, &path, durability) {
            Ok(()) => return Ok(Some(stored_version(version, &temp.file))),
            // Only those with the lock remove objects, so it is the temporary file that is gone.
            Err(Errno::NOENT) => {
                work.temps.check(temp).map_err(|error| error.at(key))?;
            }
            Err(error) => return Err(write_error(error).at(key)),
        }
    }
}

/// Removes the object if it is this version. The caller holds the lock.
pub(super) fn remove(work: &Work, key: &Key, version: Option<&Version>) -> Result<Delete> {
    remove_after(work, key, version, || Ok(()))
}

/// The same, having done something else first: only if it is this version.
pub(super) fn remove_after(
    work: &Work,
    key: &Key,
    version: Option<&Version>,
    first: impl FnOnce() -> Result<()>,
) -> Result<Delete> {
    let path = path_of(key.as_str());
    // Once for both the look and the removal: finding it takes longer than either.
    match beneath(work, &path) {
        Ok((folder, name)) => remove_from(&folder, name, key, version, first),
        Err(Errno::NOENT | Errno::NOTDIR) if version.is_some() => Ok(Delete::Refused),
        Err(Errno::NOENT | Errno::NOTDIR) => Ok(Delete::Deleted),
        Err(error) => Err(write_error(error).at(key)),
    }
}

/// Removes two objects of one folder, each if it is its version: the second also if the first was
/// not there. `between` is done before the second goes. The first is what counts: if the second
/// cannot be removed, it is reported as one that has changed.
pub(super) fn remove_both(
    work: &Work,
    one: (&Key, &Version),
    other: (&Key, &Version),
    between: impl FnOnce() -> Result<()>,
) -> Result<(Delete, Delete)> {
    let (path, second) = (path_of(one.0.as_str()), path_of(other.0.as_str()));
    let (folder, name) = match beneath(work, &path) {
        Ok(found) => found,
        Err(Errno::NOENT | Errno::NOTDIR) => return Ok((Delete::Refused, Delete::Refused)),
        Err(error) => return Err(write_error(error).at(one.0)),
    };
    let first = remove_from(&folder, name, one.0, Some(one.1), || Ok(()))?;
    let name = second.rsplit_once('/').map_or(&*second, |(_, name)| name);
    let version = Some(other.1).filter(|version| !work.drafts.is_known(&folder, name, version));
    let second = remove_from(&folder, name, other.0, version, between);
    let second = second.unwrap_or_else(|error| {
        tracing::debug!(%error, "one of two stays");
        Delete::Refused
    });
    Ok((first, second))
}

/// The version of the file with this name, if there is one.
pub(super) fn version_at(folder: &Folder<'_>, name: &str, key: &Key) -> Result<Option<Version>> {
    let open = |flags| rustix::fs::openat(folder.as_fd(), name, flags, Mode::empty());
    let there = opened(open_unnoted(OPEN | OFlags::NOFOLLOW, open), key)?;
    let Some((file, stat)) = there else { return Ok(None) };
    let version = read_version(&file, &stat, key);
    version.map(Some).map_err(|error| io_error("read", error).at(key))
}

fn remove_from(
    folder: &Folder<'_>,
    name: &str,
    key: &Key,
    version: Option<&Version>,
    first: impl FnOnce() -> Result<()>,
) -> Result<Delete> {
    if version.is_some() && version_at(folder, name, key)?.as_ref() != version {
        return Ok(Delete::Refused);
    }
    first()?;
    match rustix::fs::unlinkat(folder.as_fd(), name, AtFlags::empty()) {
        Ok(()) => Ok(Delete::Deleted),
        // EISDIR on Linux, EPERM on macOS: a folder is not an object.
        Err(Errno::NOENT | Errno::NOTDIR | Errno::ISDIR) => Ok(Delete::Deleted),
        Err(error) => Err(write_error(error).at(key)),
    }
}

pub(super) fn rename_new(work: &Work, temp: &str, path: &str) -> Result<(), Errno> {
    let (folder, name) = beneath(work, path)?;
    let flags = RenameFlags::NOREPLACE;
    match rustix::fs::renameat_with(&work.temps.folder, temp, folder.as_fd(), name, flags) {
        // Some file systems cannot; a hard link never replaces either.
        Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => {
            rustix::fs::linkat(&work.temps.folder, temp, folder.as_fd(), name, AtFlags::empty())?;
            // The object is there. A temporary name that stays is swept some day.
            let _ = rustix::fs::unlinkat(&work.temps.folder, temp, AtFlags::empty());
            Ok(())
        }
        renamed => renamed,
    }
}

/// The folder that an object stands in and its name there. Symbolic links are not followed: one in
/// the way could lead out of the store.
pub(super) fn beneath<'a>(work: &'a Work, path: &'a str) -> Result<(Folder<'a>, &'a str), Errno> {
    let Some((folder, name)) = path.rsplit_once('/') else {
        return Ok((Folder::Root(&work.root), path));
    };
    Ok((Folder::Below(work.folders.open(&work.root, folder)?), name))
}

pub(super) enum Folder<'a> {
    Root(&'a OwnedFd),
    Below(Arc<OwnedFd>),
}

/// How folders are opened to reach what is in them.
#[cfg(any(target_os = "linux", target_os = "android"))]
pub(super) const FOLDER: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);
/// The same where there is no cheaper way.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
pub(super) const FOLDER: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// Folders right below the root that are kept open: opening one takes three times as long as looking
/// whether it is still the same.
///
/// Only those: a look follows links above the last name, and further down one of them might have
/// been put there since.
#[derive(Debug, Default)]
pub(super) struct Folders(Mutex<Vec<Kept>>);

#[derive(Debug)]
struct Kept {
    name: String,
    folder: Arc<OwnedFd>,
    /// Not used again while it is open.
    identity: Identity,
}

/// How many: locks, elections and the like.
const KEPT: usize = 8;

impl Folders {
    fn open(&self, root: &OwnedFd, name: &str) -> Result<Arc<OwnedFd>, Errno> {
        if name.contains('/') {
            return Ok(Arc::new(open_beneath(root, name, FOLDER)?));
        }
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = kept.iter().position(|kept| kept.name == name) {
            if identity_by_name(root, name)? == kept[at].identity {
                return Ok(kept[at].folder.clone());
            }
            kept.remove(at);
        }
        let folder = Arc::new(open_beneath(root, name, FOLDER)?);
        let identity = identity(&folder)?;
        if kept.len() >= KEPT {
            kept.remove(0);
        }
        kept.push(Kept { name: name.to_owned(), folder: folder.clone(), identity });
        Ok(folder)
    }
}

/// What tells a file from every other that is there at the same time.
pub(super) type Identity = (u64, u64);

/// That of an open file.
pub(super) fn identity(file: &OwnedFd) -> Result<Identity, Errno> {
    Ok(identity_of(&rustix::fs::fstat(file)?))
}

pub(super) fn identity_of(stat: &Stat) -> Identity {
    #[allow(clippy::unnecessary_cast)] // the fields differ in type between systems
    (stat.st_dev as u64, stat.st_ino as u64)
}

/// That of whatever has this name; links are not followed.
///
/// Times are not asked for: newer kernels remember who has seen a file's times, and the next write
/// to it has to note a finer one then, which takes longer than all the rest.
#[cfg(any(target_os = "linux", target_os = "android"))]
pub(super) fn identity_by_name(root: &OwnedFd, path: &str) -> Result<Identity, Errno> {
    use rustix::fs::{StatxFlags, makedev, statx};
    match statx(root, path, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::INO) {
        Ok(stat) => Ok((makedev(stat.stx_dev_major, stat.stx_dev_minor), stat.stx_ino)),
        // Kernels before 4.11, and sandboxes that do not know the call.
        Err(Errno::NOSYS | Errno::PERM) => {
            Ok(identity_of(&rustix::fs::statat(root, path, AtFlags::SYMLINK_NOFOLLOW)?))
        }
        Err(error) => Err(error),
    }
}

/// The same where nobody minds.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
pub(super) fn identity_by_name(root: &OwnedFd, path: &str) -> Result<Identity, Errno> {
    Ok(identity_of(&rustix::fs::statat(root, path, AtFlags::SYMLINK_NOFOLLOW)?))
}

/// Opens something so that reading it does not note a time in it: the first read after each write
/// would. Whose file it is not may not ask for that, and whoever was refused once asks no more.
#[cfg(any(target_os = "linux", target_os = "android"))]
pub(super) fn open_unnoted(
    flags: OFlags,
    open: impl Fn(OFlags) -> Result<OwnedFd, Errno>,
) -> Result<OwnedFd, Errno> {
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
    static REFUSED: AtomicBool = AtomicBool::new(false);
    if REFUSED.load(Relaxed) {
        return open(flags);
    }
    match open(flags | OFlags::NOATIME) {
        Err(Errno::PERM) => {
            let opened = open(flags)?;
            REFUSED.store(true, Relaxed);
            Ok(opened)
        }
        opened => opened,
    }
}

/// The same where there is no such thing.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
pub(super) fn open_unnoted(
    flags: OFlags,
    open: impl Fn(OFlags) -> Result<OwnedFd, Errno>,
) -> Result<OwnedFd, Errno> {
    open(flags)
}

impl AsFd for Folder<'_> {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        match self {
            Self::Root(root) => root.as_fd(),
            Self::Below(folder) => folder.as_fd(),
        }
    }
}

/// Opens what is below the root without following any symbolic link, also on the way.
pub(super) fn open_beneath(root: &OwnedFd, path: &str, flags: OFlags) -> Result<OwnedFd, Errno> {
    open_below(root, path, flags, Mode::empty())
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn open_below(root: &OwnedFd, path: &str, flags: OFlags, mode: Mode) -> Result<OwnedFd, Errno> {
    use rustix::fs::ResolveFlags;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    loop {
        match rustix::fs::openat2(root, path, flags, mode, resolve) {
            // Something was renamed on the way.
            Err(Errno::AGAIN) => {}
            // Kernels before 5.6, and sandboxes that do not know the call.
            Err(Errno::NOSYS | Errno::PERM) => {
                return rustix::fs::openat(root, path, flags | OFlags::NOFOLLOW, mode);
            }
            opened => return opened,
        }
    }
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn open_below(root: &OwnedFd, path: &str, flags: OFlags, mode: Mode) -> Result<OwnedFd, Errno> {
    rustix::fs::openat(root, path, flags | OFlags::NOFOLLOW, mode)
}

pub(super) fn rename_over(
    work: &Work,
    temp: &mut Temp,
    path: &str,
    durability: Durability,
) -> Result<(), Errno> {
    let (folder, name) = beneath(work, path)?;
    // ext4 starts writing a file's data when it is renamed over another, so that a power loss
    // shows the old or the new content. That costs four times the rename. An exchange does not.
    if durability == Durability::Volatile {
        let flags = RenameFlags::EXCHANGE;
        match rustix::fs::renameat_with(
            &work.temps.folder,
            temp.name(),
            folder.as_fd(),
            name,
            flags,
        ) {
            Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => {}
            // The old content stands in the temporary file now, and goes with it.
            exchanged => return exchanged,
        }
    }
    rustix::fs::renameat(&work.temps.folder, temp.name(), folder.as_fd(), name)?;
    temp.became_object();
    Ok(())
}

pub(super) fn file_type(root: &OwnedFd, path: &str) -> Option<FileType> {
    let stat = rustix::fs::statat(root, path, AtFlags::SYMLINK_NOFOLLOW).ok()?;
    Some(FileType::from_raw_mode(stat.st_mode))
}

/// Removes a folder that holds nothing but folders, and says whether it is gone.
pub(super) fn remove_empty(root: &OwnedFd, path: &str) -> bool {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let Ok(folder) = rustix::fs::openat(root, path, flags, Mode::empty()) else {
        return true;
    };
    let Ok(entries) = rustix::fs::Dir::new(folder) else { return false };
    for entry in entries.filter_map(Result::ok) {
        let name = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        let Ok(name) = name.to_str() else { return false };
        let below = format!("{path}/{name}");
        if file_type(root, &below) != Some(FileType::Directory) || !remove_empty(root, &below) {
            return false;
        }
    }
    match rustix::fs::unlinkat(root, path, AtFlags::REMOVEDIR) {
        Ok(()) | Err(Errno::NOENT) => true,
        Err(_) => false,
    }
}

pub(super) fn make_folder(root: &OwnedFd, path: &str) -> Result<(), Errno> {
    match rustix::fs::mkdirat(root, path, Mode::from_raw_mode(0o777)) {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(error) => Err(error),
    }
}

/// The file of an object, or `None` if there is no object with this key.
pub(super) fn open(root: &OwnedFd, key: &Key) -> Result<Option<(OwnedFd, Stat)>> {
    let path = path_of(key.as_str());
    opened(open_unnoted(OPEN, |flags| open_beneath(root, &path, flags)), key)
}

/// How objects are opened: a pipe in the place of one is not waited for.
const OPEN: OFlags = OFlags::RDONLY.union(OFlags::CLOEXEC).union(OFlags::NONBLOCK);

/// What opening an object's file came to.
fn opened(file: Result<OwnedFd, Errno>, key: &Key) -> Result<Option<(OwnedFd, Stat)>> {
    let file = match file {
        Ok(file) => file,
        Err(Errno::NOENT | Errno::NOTDIR) => return Ok(None),
        Err(error) => return Err(io_error("open", error).at(key)),
    };
    let stat = rustix::fs::fstat(&file).map_err(|error| io_error("open", error).at(key))?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Ok(Some((file, stat))),
        FileType::Directory => Ok(None),
        _ => Err(Error::new(ErrorKind::Data, "is not a regular file").at(key)),
    }
}

pub(super) fn file_meta(root: &OwnedFd, key: &Key) -> Result<Option<(Version, Stat)>> {
    let Some((file, stat)) = open(root, key)? else { return Ok(None) };
    let version =
        read_version(&file, &stat, key).map_err(|error| io_error("read", error).at(key))?;
    Ok(Some((version, stat)))
}

pub(super) fn read_all(file: &OwnedFd, stat: &Stat) -> Result<Vec<u8>, Errno> {
    let size = usize::try_from(stat.st_size).unwrap_or(0);
    // One byte more than it has, so that the read that fills it also sees the end.
    let mut body = Vec::with_capacity(size + 1);
    loop {
        if body.len() == body.capacity() {
            body.reserve(64 << 10);
        }
        let room = body.capacity() - body.len();
        match rustix::io::read(file, rustix::buffer::spare_capacity(&mut body)) {
            // A file that gives less than was asked for has no more.
            Ok(read) if read < room => return Ok(body),
            Ok(_) => {}
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
}

pub(super) fn read_version(file: &OwnedFd, stat: &Stat, key: &Key) -> Result<Version, Errno> {
    match stat.st_size as u64 {
        size if size > HASHED => Ok(version_by_file(stat)),
        size if size > WHOLE => hash_file(file),
        _ => Ok(version_of(&read_all(file, stat)?, stat, key)),
    }
}

/// What is larger is not read as a whole to be hashed: getting memory for it takes longer than either.
const WHOLE: u64 = 64 << 10;

/// The version of a file that is not too large to have one of its content.
pub(super) fn hash_file(file: &OwnedFd) -> Result<Version, Errno> {
    let mut hash = xxhash_rust::xxh3::Xxh3::new();
    let (mut piece, mut at) = (vec![0; WHOLE as usize], 0);
    loop {
        match rustix::io::pread(file, &mut *piece, at) {
            Ok(0) => return Ok(Version::new(format!("{:032x}", hash.digest128()))),
            Ok(read) => {
                hash.update(&piece[..read]);
                at += read as u64;
            }
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
}

pub(super) fn version_of(body: &[u8], stat: &Stat, key: &Key) -> Version {
    if stat.st_size as u64 > HASHED {
        return version_by_file(stat);
    }
    // One empty lease is like the next, and yet somebody else's. When it was changed does not matter: one that a
    // power loss emptied may be a file with many names, which is changed with each that goes.
    match body.is_empty() && is_lease(key.as_str()) {
        true => {
            Version::new(format!("{:x}-{:x}.{:x}", stat.st_ino, stat.st_mtime, stat.st_mtime_nsec))
        }
        false => content_version(body),
    }
}

/// The version of an object whose content does not tell.
pub(super) fn version_by_file(stat: &Stat) -> Version {
    Version::new(format!(
        "{:x}-{:x}-{:x}.{:x}-{:x}.{:x}",
        stat.st_ino,
        stat.st_size,
        stat.st_mtime,
        stat.st_mtime_nsec,
        stat.st_ctime,
        stat.st_ctime_nsec
    ))
}

/// The version of an object with this content, unless it is so large that its file tells.
pub(super) fn version_by_content(body: &[u8]) -> Option<Version> {
    (body.len() as u64 <= HASHED).then(|| content_version(body))
}

/// The version of what has just become an object: by its content, or else by its file, whose times that
/// has changed.
fn stored_version(version: Option<&Version>, file: &OwnedFd) -> Version {
    let by_file = || rustix::fs::fstat(file).ok().map(|stat| version_by_file(&stat));
    // If it cannot be told, whoever compares finds another.
    version.cloned().or_else(by_file).unwrap_or_else(|| Version::new(""))
}

/// Which file this is, also after a reboot. Numbers alone are used again at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FileId {
    pub inode: u64,
    /// When it was made: seconds, nanoseconds.
    pub born: (i64, u32),
}

/// `None` where the file system does not say.
#[cfg(any(target_os = "linux", target_os = "android"))]
pub(super) fn id_of(file: &OwnedFd) -> Option<FileId> {
    use rustix::fs::{StatxFlags, statx};
    let wanted = StatxFlags::INO | StatxFlags::BTIME;
    let stat = statx(file, c"", AtFlags::EMPTY_PATH, wanted).ok()?;
    let born = (stat.stx_btime.tv_sec, stat.stx_btime.tv_nsec);
    let told = StatxFlags::from_bits_retain(stat.stx_mask).contains(wanted);
    told.then_some(FileId { inode: stat.stx_ino, born })
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
pub(super) fn id_of(_: &OwnedFd) -> Option<FileId> {
    None
}

/// Gives the new file the mode and owner of the one it replaces, as far as we may.
pub(super) fn keep_permissions(file: &OwnedFd, old: &Stat) {
    let Ok(new) = rustix::fs::fstat(file) else { return };
    if (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid) {
        let owner = rustix::fs::Uid::from_raw(old.st_uid);
        let group = rustix::fs::Gid::from_raw(old.st_gid);
        let _ = rustix::fs::fchown(file, Some(owner), Some(group));
    }
    if new.st_mode != old.st_mode {
        let _ = rustix::fs::fchmod(file, Mode::from_raw_mode(old.st_mode));
    }
}

#[allow(clippy::unnecessary_cast)] // the fields differ in type between systems
pub(super) fn mtime(stat: &Stat) -> StoreTime {
    let seconds = stat.st_mtime as i64;
    let micros = stat.st_mtime_nsec as i64 / 1000;
    StoreTime::from_micros(seconds.saturating_mul(1_000_000).saturating_add(micros))
}

pub(super) fn hash(text: &str) -> u64 {
    xxhash_rust::xxh3::xxh3_64(text.as_bytes())
}

pub(super) fn io_error(verb: &str, error: Errno) -> Error {
    if matches!(error, Errno::LOOP | Errno::XDEV) {
        let message = format!("cannot {verb}: there is a symbolic link in its place or on the way");
        return Error::new(ErrorKind::Data, message).caused_by(error);
    }
    let kind = match error {
        Errno::ACCESS | Errno::PERM | Errno::ROFS => ErrorKind::Denied,
        Errno::NAMETOOLONG => ErrorKind::Invalid,
        _ => ErrorKind::Unavailable,
    };
    Error::new(kind, format!("cannot {verb}: {error}")).caused_by(error)
}

pub(super) fn write_error(error: Errno) -> Error {
    match error {
        Errno::NOSPC | Errno::DQUOT => {
            Error::unavailable("the disk is full: make room, then try again").caused_by(error)
        }
        error => io_error("write", error),
    }
}

pub(super) fn folder_error(error: Errno) -> Error {
    match error {
        Errno::NOTDIR => Error::invalid(
            "an object has the name of one of this key's directories: choose another name",
        )
        .caused_by(error),
        error => write_error(error),
    }
}
