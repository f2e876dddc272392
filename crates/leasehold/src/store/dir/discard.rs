//! Removes many files at once.
//!
//! A file system keeps its inodes in blocks of a dozen or more, and writes whole blocks. Files of one
//! folder were made at different times, so theirs are all over the place; files of many folders that
//! were made one after the other stand next to each other. So many files are removed in the order of
//! their inodes whatever folder they are in: on ext4 that writes a quarter of the bytes that removing
//! them folder by folder does.

use std::borrow::Cow;
use std::collections::HashMap;
use std::os::fd::OwnedFd;

use leasehold_protocol::key::Key;
use rustix::fs::{AtFlags, Dir, OFlags};
use rustix::io::Errno;

use super::files::{open_beneath, write_error};
use super::names::path_of;
use crate::Result;

/// Fewer are removed as they come.
const MANY: usize = 2000;

/// How many folders are open at once.
const OPEN: usize = 256;

/// Files to be removed. There may be tens of thousands: names are shared with whoever asked.
#[derive(Debug)]
pub(super) struct Doomed {
    keys: Vec<Key>,
    folders: Vec<String>,
    /// By folder.
    entries: Vec<Entry>,
}

/// A file to be removed: where its key and its folder stand.
#[derive(Debug, Clone, Copy)]
struct Entry {
    inode: u64,
    folder: u32,
    key: u32,
}

/// Folders that are open. Files of others are gone, or cannot be removed.
type Open = HashMap<u32, OwnedFd>;

impl Doomed {
    /// The files of these objects.
    pub fn new(keys: &[Key]) -> Self {
        let mut numbers: HashMap<String, u32> = HashMap::new();
        let (mut folders, mut entries) = (Vec::new(), Vec::with_capacity(keys.len()));
        for (at, key) in keys.iter().enumerate() {
            let path = path_of(key.as_str());
            let (folder, _) = split(&path);
            let number = numbers.get(folder).copied().unwrap_or_else(|| {
                let number = folders.len() as u32;
                folders.push(folder.to_owned());
                numbers.insert(folder.to_owned(), number);
                number
            });
            entries.push(Entry { inode: 0, folder: number, key: at as u32 });
        }
        entries.sort_by_key(|entry| entry.folder);
        Self { keys: keys.to_vec(), folders, entries }
    }

    /// Removes them all as far as that can be done, and returns the first error. One that is gone
    /// already is no failure.
    pub fn remove(self, root: &OwnedFd) -> Result<()> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        self.remove_from(|folder| open_beneath(root, folder, flags))
    }

    /// The same, with another way to open a folder.
    fn remove_from(mut self, open: impl Fn(&str) -> Result<OwnedFd, Errno>) -> Result<()> {
        let mut entries = std::mem::take(&mut self.entries);
        let many = entries.len() >= MANY;
        let (mut opened, mut removed) = (Open::new(), Ok(()));
        // What is before `from` is done, and the folders from there to `at` are open.
        let (mut from, mut at) = (0, 0);
        while at < entries.len() {
            let folder = entries[at].folder;
            let end = at + entries[at..].partition_point(|entry| entry.folder == folder);
            let mut full = false;
            match open(&self.folders[folder as usize]) {
                Ok(fd) => {
                    if many {
                        self.number(&fd, &mut entries[at..end]);
                    }
                    opened.insert(folder, fd);
                    at = end;
                }
                // This process has as many files open as it may: this one comes after those.
                Err(Errno::MFILE | Errno::NFILE) if !opened.is_empty() => full = true,
                Err(Errno::NOENT | Errno::NOTDIR) => at = end,
                // The others are no worse for it.
                Err(error) => {
                    removed = removed.and(Err(write_error(error)));
                    at = end;
                }
            }
            if full || opened.len() >= OPEN || at == entries.len() {
                let ready = &mut entries[from..at];
                if many {
                    ready.sort_unstable_by_key(|entry| entry.inode);
                }
                removed = removed.and(self.remove_entries(&opened, ready));
                opened.clear();
                from = at;
            }
        }
        removed
    }

    /// Notes the inodes of these files of a folder, as far as a look at it tells. Nothing depends on it.
    fn number(&self, folder: &OwnedFd, entries: &mut [Entry]) {
        let Ok(dir) = Dir::read_from(folder) else { return };
        let places = entries.iter().enumerate().map(|(at, entry)| (self.name(entry), at));
        let places: HashMap<Cow<'_, str>, usize> = places.collect();
        // In a folder that holds far more than these, finding them takes longer than it saves.
        for there in dir.take(entries.len() * 2 + 1000).filter_map(Result::ok) {
            let at = there.file_name().to_str().ok().and_then(|name| places.get(name));
            if let Some(at) = at {
                entries[*at].inode = there.ino();
            }
        }
    }

    /// Removing waits for the disk now and then: two threads do it.
    fn remove_entries(&self, folders: &Open, entries: &[Entry]) -> Result<()> {
        if entries.len() < MANY {
            return self.remove_each(folders, entries);
        }
        let (ours, others) = entries.split_at(entries.len() / 2);
        std::thread::scope(|scope| {
            let other = std::thread::Builder::new();
            let other = other.spawn_scoped(scope, || self.remove_each(folders, others));
            let removed = self.remove_each(folders, ours);
            removed.and(match other.map(|thread| thread.join()) {
                Ok(Ok(removed)) => removed,
                Ok(Err(panic)) => std::panic::resume_unwind(panic),
                // There are as many threads as there may be.
                Err(_) => self.remove_each(folders, others),
            })
        })
    }

    fn remove_each(&self, folders: &Open, entries: &[Entry]) -> Result<()> {
        let mut removed = Ok(());
        for entry in entries {
            let Some(folder) = folders.get(&entry.folder) else { continue };
            match rustix::fs::unlinkat(folder, &*self.name(entry), AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT | Errno::ISDIR) => {}
                Err(error) if removed.is_ok() => {
                    removed = Err(write_error(error).at(&self.keys[entry.key as usize]));
                }
                Err(_) => {}
            }
        }
        removed
    }

    /// A file's name in its folder.
    fn name(&self, entry: &Entry) -> Cow<'_, str> {
        match path_of(self.keys[entry.key as usize].as_str()) {
            Cow::Borrowed(path) => Cow::Borrowed(split(path).1),
            Cow::Owned(path) => Cow::Owned(split(&path).1.to_owned()),
        }
    }
}

/// The folder of a file, and its name there.
fn split(path: &str) -> (&str, &str) {
    path.rsplit_once('/').unwrap_or((".", path))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn what_was_named_goes_and_nothing_else() {
        for count in [10, 3 * MANY] {
            let dir = tempfile::TempDir::new().unwrap();
            let root: OwnedFd = std::fs::File::open(dir.path()).unwrap().into();
            let mut keys = Vec::new();
            for n in 0..count {
                let folder = format!("in/{:x}", n % 7);
                std::fs::create_dir_all(dir.path().join(&folder)).unwrap();
                let name = format!("{folder}/{n}.usv");
                std::fs::write(dir.path().join(&name), "x").unwrap();
                if n % 5 > 0 {
                    keys.push(Key::new(name).unwrap());
                }
            }
            // What is gone already, in a folder that is there and one that is not; and a folder.
            std::fs::create_dir(dir.path().join("in/1/folder")).unwrap();
            let others = ["in/1/gone.usv", "in/nowhere/gone.usv", "in/1/folder", "gone"];
            keys.extend(others.map(|key| Key::new(key).unwrap()));
            Doomed::new(&keys).remove(&root).unwrap();
            let left = |n: &usize| dir.path().join(format!("in/{:x}/{n}.usv", n % 7)).exists();
            let left: Vec<usize> = (0..count).filter(left).collect();
            assert_eq!(left, (0..count).step_by(5).collect::<Vec<_>>());
            assert!(dir.path().join("in/1/folder").exists());
        }
    }

    /// Ten folders of `each` files.
    fn ten_folders(each: usize) -> (tempfile::TempDir, Vec<Key>) {
        let dir = tempfile::TempDir::new().unwrap();
        let mut keys = Vec::new();
        for n in 0..10 * each {
            std::fs::create_dir_all(dir.path().join(format!("{}", n % 10))).unwrap();
            let name = format!("{}/{n}.usv", n % 10);
            std::fs::write(dir.path().join(&name), "x").unwrap();
            keys.push(Key::new(name).unwrap());
        }
        (dir, keys)
    }

    fn files(dir: &tempfile::TempDir, folder: usize) -> usize {
        std::fs::read_dir(dir.path().join(folder.to_string())).unwrap().count()
    }

    #[test]
    fn one_that_cannot_be_removed_is_in_nobodys_way() {
        for each in [3, MANY / 5] {
            let (dir, keys) = ten_folders(each);
            let open = |folder: &str| match folder {
                "3" => Err(Errno::ACCESS),
                // Opened, but nothing can be removed from what is no folder.
                "6" => Ok(std::fs::File::open(dir.path().join("6/6.usv")).unwrap().into()),
                _ => Ok(std::fs::File::open(dir.path().join(folder)).unwrap().into()),
            };
            Doomed::new(&keys).remove_from(open).unwrap_err();
            for folder in 0..10 {
                let left = if matches!(folder, 3 | 6) { each } else { 0 };
                assert_eq!(files(&dir, folder), left, "{folder}");
            }
        }
    }

    #[test]
    fn few_files_may_be_open() {
        for each in [3, MANY / 5] {
            let (dir, keys) = ten_folders(each);
            let (calls, full) = (Cell::new(0), Cell::new(0));
            // Every third is refused, and opened when it is asked for again.
            let open = |folder: &str| {
                calls.set(calls.get() + 1);
                if calls.get() % 3 == 0 {
                    full.set(full.get() + 1);
                    return Err(Errno::MFILE);
                }
                Ok(std::fs::File::open(dir.path().join(folder)).unwrap().into())
            };
            Doomed::new(&keys).remove_from(open).unwrap();
            assert!(full.get() > 2);
            assert!((0..10).all(|folder| files(&dir, folder) == 0));
            // None at all: that is told, and does not go on for ever.
            let (dir, keys) = ten_folders(each);
            Doomed::new(&keys).remove_from(|_| Err(Errno::MFILE)).unwrap_err();
            assert!((0..10).all(|folder| files(&dir, folder) == each));
        }
    }
}
