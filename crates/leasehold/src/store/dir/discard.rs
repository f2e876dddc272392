//! Removes many files at once.
//!
//! A file system keeps its inodes in blocks of a dozen or more, and writes whole blocks. Files of one
//! folder were made at different times, so theirs are all over the place; files of many folders that
//! were made one after the other stand next to each other. So many files are removed in the order of
//! their inodes whatever folder they are in: on ext4 that writes a quarter of the bytes that removing
//! them folder by folder does.

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

/// Removing waits for the disk now and then: as many threads do it.
const THREADS: usize = 2;

/// Files to be removed, by folder. Names stand in one buffer: there may be tens of thousands.
#[derive(Debug)]
pub(super) struct Doomed {
    folders: Vec<(String, Vec<Name>)>,
    text: String,
}

/// Where a name stands.
#[derive(Debug, Clone, Copy)]
struct Name {
    start: usize,
    len: usize,
}

impl Name {
    fn of<'a>(&self, text: &'a str) -> &'a str {
        &text[self.start..self.start + self.len]
    }
}

/// A file to be removed.
#[derive(Debug, Clone, Copy)]
struct Entry {
    inode: u64,
    folder: usize,
    name: Name,
}

impl Doomed {
    /// The files of these objects.
    pub fn new(keys: &[Key]) -> Self {
        let mut doomed = Self { folders: Vec::new(), text: String::new() };
        let mut numbers: HashMap<String, usize> = HashMap::new();
        for key in keys {
            let path = path_of(key.as_str());
            let (folder, name) = path.rsplit_once('/').unwrap_or((".", &path));
            let number = match numbers.get(folder) {
                Some(number) => *number,
                None => {
                    doomed.folders.push((folder.to_owned(), Vec::new()));
                    numbers.insert(folder.to_owned(), doomed.folders.len() - 1);
                    doomed.folders.len() - 1
                }
            };
            let start = doomed.text.len();
            doomed.text.push_str(name);
            doomed.folders[number].1.push(Name { start, len: name.len() });
        }
        doomed
    }

    /// Removes them. One that is gone already is no failure.
    pub fn remove(&self, root: &OwnedFd) -> Result<()> {
        let total: usize = self.folders.iter().map(|(_, names)| names.len()).sum();
        for folders in self.folders.chunks(OPEN) {
            let (mut open, mut entries) = (Vec::with_capacity(folders.len()), Vec::new());
            for (folder, names) in folders {
                let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
                let fd = match open_beneath(root, folder, flags) {
                    Ok(fd) => fd,
                    Err(Errno::NOENT | Errno::NOTDIR) => continue,
                    Err(error) => return Err(write_error(error)),
                };
                let number = open.len();
                let entry = |name: &Name| Entry { inode: 0, folder: number, name: *name };
                let from = entries.len();
                entries.extend(names.iter().map(entry));
                if total >= MANY {
                    self.number(&fd, &mut entries[from..]);
                }
                open.push(fd);
            }
            if total >= MANY {
                entries.sort_unstable_by_key(|entry| entry.inode);
            }
            self.remove_entries(&open, &entries)?;
        }
        Ok(())
    }

    /// Notes the inodes of these files of a folder, as far as a look at it tells. Nothing depends on it.
    fn number(&self, folder: &OwnedFd, entries: &mut [Entry]) {
        let Ok(dir) = Dir::read_from(folder) else { return };
        let places = entries.iter().enumerate().map(|(at, entry)| (entry.name.of(&self.text), at));
        let places: HashMap<&str, usize> = places.collect();
        // In a folder that holds far more than these, finding them takes longer than it saves.
        for there in dir.take(entries.len() * 2 + 1000).filter_map(Result::ok) {
            let at = there.file_name().to_str().ok().and_then(|name| places.get(name));
            if let Some(at) = at {
                entries[*at].inode = there.ino();
            }
        }
    }

    fn remove_entries(&self, folders: &[OwnedFd], entries: &[Entry]) -> Result<()> {
        if entries.len() < MANY {
            return self.remove_each(folders, entries);
        }
        let parts = entries.chunks(entries.len().div_ceil(THREADS));
        std::thread::scope(|scope| {
            let threads: Vec<_> =
                parts.map(|part| scope.spawn(|| self.remove_each(folders, part))).collect();
            threads.into_iter().try_for_each(|thread| match thread.join() {
                Ok(removed) => removed,
                Err(panic) => std::panic::resume_unwind(panic),
            })
        })
    }

    fn remove_each(&self, folders: &[OwnedFd], entries: &[Entry]) -> Result<()> {
        for Entry { folder, name, .. } in entries {
            let name = name.of(&self.text);
            match rustix::fs::unlinkat(&folders[*folder], name, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT | Errno::ISDIR) => {}
                Err(error) => return Err(write_error(error)),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
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
}
