//! Lists a directory store in key order, page by page.
//!
//! Memory is bounded, however many names a folder has: in order, the [smallest](Smallest) of them are
//! kept, and the folder is read again for those behind. So the first page of a million entries costs
//! reading their names once and sorting a few thousand of them; unordered, it costs a page.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use async_trait::async_trait;
use leasehold_protocol::key::{Key, MAX_KEY_BYTES};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags};
use rustix::io::Errno;

use super::names::{Name, is_usual, path_of, read_name};
use super::smallest::Smallest;
use super::{Shared, file_meta, io_error, mtime, open_beneath};
use crate::store::backend::Lister;
use crate::store::large::Stamp;
use crate::store::meter::Class;
use crate::store::types::{Detail, Entry, List, Page};
use crate::{Error, Result};

pub struct DirLister {
    shared: Arc<Shared>,
    /// `None` while a page is being made, and after one could not be.
    walk: Option<Walk>,
}

impl DirLister {
    pub fn new(shared: Arc<Shared>, list: List) -> Self {
        Self { shared, walk: Some(Walk { list, stack: Vec::new(), state: State::Fresh }) }
    }
}

#[async_trait]
impl Lister for DirLister {
    async fn next_page(&mut self) -> Result<Option<Page>> {
        let mut walk = self
            .walk
            .take()
            .ok_or_else(|| Error::unavailable("the listing was interrupted: start it anew"))?;
        let shared = self.shared.clone();
        // A page can mean reading a million names: not on an executor's thread.
        let (walk, page) = tokio::task::spawn_blocking(move || {
            let page = walk.page(&shared);
            (walk, page)
        })
        .await
        .map_err(|error| Error::unavailable("the listing was interrupted").caused_by(error))?;
        // What failed half-way cannot be continued: names that were read are gone.
        if page.is_ok() {
            self.walk = Some(walk);
        }
        page
    }
}

enum State {
    Fresh,
    Walking,
    Done,
}

struct Walk {
    list: List,
    stack: Vec<Folder>,
    state: State,
}

impl Walk {
    fn page(&mut self, shared: &Shared) -> Result<Option<Page>> {
        if matches!(self.state, State::Done) {
            return Ok(None);
        }
        shared.meter.request(Class::List, 0);
        let mut page = Page { now: Some(shared.env.clock().wall()), ..Page::default() };
        let Some(root) = shared.root()? else {
            self.state = State::Done;
            return Ok(Some(page));
        };
        if matches!(self.state, State::Fresh) {
            // Straight to the folder that the prefix names; what is above it is never read.
            let base = self.list.prefix.rsplit_once('/').map_or("", |(base, _)| base);
            let key = if base.is_empty() { String::new() } else { format!("{base}/") };
            self.enter(root, shared, key)?;
            self.state = State::Walking;
        }
        while page.len() < self.list.page {
            let Some(folder) = self.stack.last_mut() else {
                self.state = State::Done;
                break;
            };
            let next = folder.next(root, shared, &self.list)?;
            page.unnamed += std::mem::take(&mut folder.unnamed);
            let Some((name, is_folder)) = next else {
                self.stack.pop();
                continue;
            };
            let key = [folder.key.as_str(), &name].concat();
            if !is_folder {
                page.entries.extend(self.entry(root, key)?);
            } else if !self.list.delimited || !key.starts_with(&self.list.prefix) {
                self.enter(root, shared, key)?;
            } else if self.list.loose || self.holds_any(root, shared, &key)? {
                page.prefixes.push(key);
            }
        }
        Ok(Some(page))
    }

    /// Starts on a folder, unless it is gone.
    fn enter(&mut self, root: &OwnedFd, shared: &Shared, key: String) -> Result<()> {
        if let Some(folder) = Folder::open(root, shared, key, &self.list)? {
            self.stack.push(folder);
        }
        Ok(())
    }

    /// The object with this key, or `None` if it was removed in the meantime.
    fn entry(&self, root: &OwnedFd, key: String) -> Result<Option<Entry>> {
        let Ok(key) = Key::new(key) else { return Ok(None) };
        let mut entry = Entry { key, size: None, modified: None, version: None };
        match self.list.detail {
            Detail::Keys => {}
            Detail::Stat => {
                let path = path_of(entry.key.as_str());
                match rustix::fs::statat(root, &*path, AtFlags::SYMLINK_NOFOLLOW) {
                    Ok(stat) => {
                        entry.size = u64::try_from(stat.st_size).ok();
                        entry.modified = Some(mtime(&stat));
                    }
                    Err(Errno::NOENT | Errno::NOTDIR) => return Ok(None),
                    Err(error) => return Err(io_error("list", error).at(&entry.key)),
                }
            }
            Detail::Version => {
                let Some((version, stat)) = file_meta(root, &entry.key)? else { return Ok(None) };
                entry.size = u64::try_from(stat.st_size).ok();
                entry.modified = Some(mtime(&stat));
                entry.version = Some(version);
            }
        }
        Ok(Some(entry))
    }

    /// Whether there is an object below this folder that the listing includes. Empty folders are
    /// left behind on purpose, and a common prefix without objects does not exist.
    fn holds_any(&self, root: &OwnedFd, shared: &Shared, key: &str) -> Result<bool> {
        // In whatever order: the first object settles it.
        let mut list = self.list.clone().unordered();
        list.prefix = key.to_owned();
        let mut open = vec![key.to_owned()];
        while let Some(key) = open.pop() {
            let Some(mut folder) = Folder::open(root, shared, key, &list)? else { continue };
            while let Some((name, is_folder)) = folder.next(root, shared, &list)? {
                if !is_folder {
                    return Ok(true);
                }
                open.push(format!("{}{name}", folder.key));
            }
        }
        Ok(false)
    }
}

/// A folder being listed. Names of folders in it end with `/`, which puts them in key order.
struct Folder {
    /// The common beginning of all its keys: empty, or ending with `/`.
    key: String,
    names: Names,
    /// How many names were passed over since this was last asked.
    unnamed: u64,
}

enum Names {
    Sorted(Smallest),
    /// As they come: folders still to be read, and the long-segment beginning that each stands for.
    Streamed(Vec<(String, Dir)>),
}

impl Folder {
    fn open(root: &OwnedFd, shared: &Shared, key: String, list: &List) -> Result<Option<Self>> {
        let Some(dir) = open_dir(root, &path_of(key.trim_end_matches('/')))? else {
            return Ok(None);
        };
        let (open, mut unnamed) = (vec![(String::new(), dir)], 0);
        let names = if list.ordered {
            let mut names = Smallest::new(list.limit);
            read_all(root, shared, &key, list, open, |name| names.push(name), &mut unnamed)?;
            Names::Sorted(names)
        } else {
            Names::Streamed(open)
        };
        Ok(Some(Self { key, names, unnamed }))
    }

    /// The next name and whether it is a folder's.
    fn next(
        &mut self,
        root: &OwnedFd,
        shared: &Shared,
        list: &List,
    ) -> Result<Option<(String, bool)>> {
        let name = match &mut self.names {
            Names::Streamed(open) => next_name(open, &self.key, list, &mut self.unnamed)?,
            Names::Sorted(names) => match names.next() {
                Some(name) => Some(name.to_owned()),
                None => self.read_on(root, shared, list)?,
            },
        };
        Ok(name.map(|name| {
            let is_folder = name.ends_with('/');
            (name, is_folder)
        }))
    }

    /// The first name behind those that were kept of the last reading.
    fn read_on(&mut self, root: &OwnedFd, shared: &Shared, list: &List) -> Result<Option<String>> {
        let Names::Sorted(names) = &mut self.names else { return Ok(None) };
        let Some(last) = names.last().filter(|_| names.was_cut()).map(str::to_owned) else {
            return Ok(None);
        };
        let Some(dir) = open_dir(root, &path_of(self.key.trim_end_matches('/')))? else {
            return Ok(None);
        };
        // Those that were used up make room first.
        *names = names.larger();
        let take = |name: &str| {
            if name > last.as_str() {
                names.push(name);
            }
        };
        // What has no business there was counted the first time.
        read_all(root, shared, &self.key, list, vec![(String::new(), dir)], take, &mut 0)?;
        Ok(names.next().map(str::to_owned))
    }
}

/// Reads a folder to its end.
fn read_all(
    root: &OwnedFd,
    shared: &Shared,
    key: &str,
    list: &List,
    mut open: Vec<(String, Dir)>,
    mut take: impl FnMut(&str),
    unnamed: &mut u64,
) -> Result<()> {
    // On some file systems a file that is replaced while its folder is read can be passed over.
    // There the folder is read until it held still, and names that came twice are shown once.
    for _ in 0..4 {
        let before = shared.changes_of(root, key)?;
        *unnamed = 0;
        while let Some(name) = next_name(&mut open, key, list, unnamed)? {
            take(&name);
        }
        if before.is_none() || shared.changes_of(root, key)? == before {
            break;
        }
        match open_dir(root, &path_of(key.trim_end_matches('/')))? {
            Some(dir) => open.push((String::new(), dir)),
            None => break,
        }
    }
    Ok(())
}

/// The next name that the listing may include, in the order of the file system. Folders that hold
/// the rests of long segments are read as if their content stood here.
fn next_name(
    open: &mut Vec<(String, Dir)>,
    key: &str,
    list: &List,
    unnamed: &mut u64,
) -> Result<Option<String>> {
    while let Some((start, dir)) = open.last_mut() {
        let Some(entry) = dir.read() else {
            open.pop();
            continue;
        };
        let entry = entry.map_err(|error| io_error("list", error))?;
        let Some(name) = read_name(entry.file_name().to_bytes()) else {
            *unnamed += u64::from(!is_usual(entry.file_name().to_bytes()));
            continue;
        };
        let mut kind = entry.file_type();
        if kind == FileType::Unknown {
            let flags = AtFlags::SYMLINK_NOFOLLOW;
            let Ok(fd) = dir.fd() else { continue };
            match rustix::fs::statat(fd, entry.file_name(), flags) {
                Ok(stat) => kind = FileType::from_raw_mode(stat.st_mode),
                Err(_) => continue,
            }
        }
        let name = match (name, kind) {
            // Not formatted: there may be millions.
            (Name::Segment(name), FileType::RegularFile) => [start.as_str(), &name].concat(),
            (Name::Segment(name), FileType::Directory) => [start.as_str(), &name, "/"].concat(),
            (Name::Continued(name), FileType::Directory)
                if key.len() + start.len() + name.len() <= MAX_KEY_BYTES =>
            {
                let start = format!("{start}{name}");
                let below = dir
                    .fd()
                    .and_then(|fd| {
                        rustix::fs::openat(fd, entry.file_name(), OPEN_DIR, Mode::empty())
                    })
                    .and_then(|fd| Dir::read_from(fd.as_fd()));
                match below {
                    Ok(below) => open.push((start, below)),
                    Err(Errno::NOENT) => {}
                    Err(error) => return Err(io_error("list", error)),
                }
                continue;
            }
            // Not an object: a symbolic link, a socket, a foreign name.
            _ => {
                *unnamed += 1;
                continue;
            }
        };
        // Longer than any key.
        if key.len() + name.len() > MAX_KEY_BYTES + 1 {
            *unnamed += 1;
            continue;
        }
        // Whoever wants a whole folder wants every name in it.
        let all = list.start_after.is_none() && key.starts_with(&list.prefix);
        if all || may_include(list, &format!("{key}{name}")) {
            return Ok(Some(name));
        }
    }
    Ok(None)
}

/// Whether the listing includes this key, or may include one below this folder.
fn may_include(list: &List, key: &str) -> bool {
    if !key.ends_with('/') {
        return list.includes(key);
    }
    let right_prefix = key.starts_with(&list.prefix) || list.prefix.starts_with(key);
    let after =
        list.start_after.as_deref().is_none_or(|after| key > after || after.starts_with(key));
    right_prefix && after
}

const OPEN_DIR: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC).union(OFlags::NOFOLLOW);

fn open_dir(root: &OwnedFd, path: &str) -> Result<Option<Dir>> {
    let path = if path.is_empty() { "." } else { path };
    match open_beneath(root, path, OPEN_DIR).and_then(Dir::new) {
        Ok(dir) => Ok(Some(dir)),
        // What a symbolic link leads to is not in the store.
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::XDEV) => Ok(None),
        Err(error) => Err(io_error("list", error)),
    }
}

/// The objects right in this folder, unless there are more than `most`, or folders in it.
pub fn peek(shared: &Shared, folder: &str, most: usize) -> Option<(Stamp, Vec<Key>)> {
    let root = shared.root().ok()??;
    // Where a folder has to be read until it holds still, that is the listing's work.
    if shared.changes_of(root, folder).ok()?.is_some() {
        return None;
    }
    shared.meter.request(Class::List, 0);
    let Some(mut dir) = open_dir(root, &path_of(folder)).ok()? else {
        return Some((Stamp::Absent, Vec::new()));
    };
    // Before it is read: what changes meanwhile shows the next time.
    let before = shared.env.clock().wall();
    let stamp = super::large::stamp(&dir.stat().ok()?, before);
    let mut keys = Vec::new();
    while let Some(entry) = dir.read() {
        let entry = entry.ok()?;
        let name = entry.file_name().to_bytes();
        if name == b"." || name == b".." {
            continue;
        }
        if keys.len() == most || entry.file_type() != FileType::RegularFile {
            return None;
        }
        if let Some(Name::Segment(name)) = read_name(name) {
            keys.push(Key::new(format!("{folder}/{name}")).ok()?);
        }
    }
    Some((stamp, keys))
}
