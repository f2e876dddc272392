//! Removes files that other programs may write: they know nothing of our locks.
//!
//! Between a look at a file and its removal another program may put a new one in its place. So the file is
//! first given another name, then looked at, and given back if it is another one by then. Whoever dies in
//! between leaves it under that name, in its folder: there it is pending like any other file.

use std::os::fd::AsFd as _;

use leasehold_protocol::cas::Version;
use leasehold_protocol::key::Key;
use rustix::fs::{AtFlags, RenameFlags};
use rustix::io::Errno;

use super::Work;
use super::files::{Folder, beneath, remove_after, version_at, write_error};
use super::names::path_of;
use crate::Result;
use crate::store::types::Delete;

/// Longer names have no room for another one.
const LONGEST: usize = 150;

/// Removes the object if it is this version, under whatever locks.
pub(super) fn remove(work: &Work, key: &Key, version: &Version, random: u64) -> Result<Delete> {
    let path = path_of(key.as_str());
    let (folder, name) = match beneath(work, &path) {
        Ok(found) => found,
        Err(Errno::NOENT | Errno::NOTDIR) => return Ok(Delete::Refused),
        Err(error) => return Err(write_error(error).at(key)),
    };
    // A large file's version is told by its times, which another name changes.
    let told_by_content = !version.as_str().contains('-');
    let stem = name.strip_suffix(".usv").filter(|stem| stem.len() <= LONGEST && told_by_content);
    let Some(stem) = stem else { return remove_after(work, key, Some(version), || Ok(())) };
    // Most that are another one by now are found here, and keep their name.
    if version_at(&folder, name, key)?.as_ref() != Some(version) {
        return Ok(Delete::Refused);
    }
    let aside = format!("{stem}~{random:016x}.usv");
    match take_aside(&folder, name, &aside, key, version)? {
        Some(outcome) => Ok(outcome),
        None => remove_after(work, key, Some(version), || Ok(())),
    }
}

/// `None` where the file system cannot do that.
fn take_aside(
    folder: &Folder<'_>,
    name: &str,
    aside: &str,
    key: &Key,
    version: &Version,
) -> Result<Option<Delete>> {
    let rename = |from: &str, to: &str| {
        let flags = RenameFlags::NOREPLACE;
        rustix::fs::renameat_with(folder.as_fd(), from, folder.as_fd(), to, flags)
    };
    let failed = |error: Errno| write_error(error).at(key);
    match rename(name, aside) {
        Ok(()) => {}
        Err(Errno::NOENT | Errno::EXIST) => return Ok(Some(Delete::Refused)),
        Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => return Ok(None),
        Err(error) => return Err(failed(error)),
    }
    if version_at(folder, aside, key)?.as_ref() == Some(version) {
        return match rustix::fs::unlinkat(folder.as_fd(), aside, AtFlags::empty()) {
            // Another compiler may have taken it for a file of its own.
            Ok(()) | Err(Errno::NOENT) => Ok(Some(Delete::Deleted)),
            Err(error) => Err(failed(error)),
        };
    }
    match rename(aside, name) {
        // There is a yet newer one: this one is pending under the name that it has.
        Ok(()) | Err(Errno::EXIST | Errno::NOENT) => Ok(Some(Delete::Refused)),
        Err(error) => Err(failed(error)),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs;

    use super::*;
    use crate::env::Env;
    use crate::store::backend::Backend as _;
    use crate::store::dir::Dir;

    /// Another program replaces the file just after the look at it, and then once more.
    #[tokio::test]
    async fn a_file_that_was_replaced_in_between_is_given_back() {
        let folder = tempfile::tempdir().unwrap();
        let dir = Dir::new(folder.path(), true, Env::system()).unwrap();
        let key = Key::new("i/a.usv").unwrap();
        let at = |name: &str| folder.path().join("i").join(name);
        fs::create_dir(folder.path().join("i")).unwrap();
        fs::write(at("a.usv"), "old").unwrap();
        let old = dir.head(&key).await.unwrap().unwrap().version;
        let work = dir.0.work().unwrap();
        let path = path_of(key.as_str());
        let take = |aside: &str| {
            let (folder, name) = beneath(work, &path).unwrap();
            take_aside(&folder, name, aside, &key, &old).unwrap().unwrap()
        };
        fs::write(at("a.usv"), "new").unwrap();
        assert!(matches!(take("a~1.usv"), Delete::Refused));
        assert_eq!(fs::read(at("a.usv")).unwrap(), b"new");
        assert!(!at("a~1.usv").exists());
        // As if this process had died, and another tool gone on.
        fs::rename(at("a.usv"), at("a~2.usv")).unwrap();
        fs::write(at("a.usv"), "newer").unwrap();
        assert!(matches!(take("a~2.usv"), Delete::Refused));
        assert_eq!(fs::read(at("a~2.usv")).unwrap(), b"new");
        assert_eq!(fs::read(at("a.usv")).unwrap(), b"newer");
        assert!(matches!(remove(work, &key, &old, 7).unwrap(), Delete::Refused));
        fs::write(at("a.usv"), "old").unwrap();
        assert!(matches!(remove(work, &key, &old, 7).unwrap(), Delete::Deleted));
        assert_eq!(fs::read_dir(folder.path().join("i")).unwrap().count(), 1, "a~2.usv");
    }
}
