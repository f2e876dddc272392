//! What a recovery does to files. Nothing outside the store is touched, whatever links lead there,
//! and nothing inside it that is not an object.

use std::os::fd::{AsFd, OwnedFd};

use bytes::Bytes;
use leasehold_protocol::key::Key;
use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Stat, Uid};
use rustix::io::Errno;

use crate::env::Env;
use crate::store::dir::files::{
    self, FOLDER, FileId, file_type, id_of, make_folder, open_beneath, read_all, remove_empty,
};
use crate::store::dir::names::{PRIVATE, path_of};

/// Why an object is not as it should be.
pub enum Unrestored {
    /// Something about it: the others can be helped.
    Key(String),
    /// The store cannot be written now: all of it must be tried again.
    Store(Errno),
}

impl From<Errno> for Unrestored {
    fn from(error: Errno) -> Self {
        match error {
            Errno::LOOP
            | Errno::XDEV
            | Errno::NOTDIR
            | Errno::ISDIR
            | Errno::EXIST
            | Errno::NOTEMPTY
            | Errno::ACCESS
            | Errno::PERM
            | Errno::NXIO
            | Errno::NAMETOOLONG => Self::Key(error.to_string()),
            error => Self::Store(error),
        }
    }
}

pub struct Restore<'a> {
    pub root: &'a OwnedFd,
    pub env: &'a Env,
}

impl Restore<'_> {
    /// Removes the object, and says whether it was there.
    pub fn absent(&self, key: &Key) -> Result<bool, Unrestored> {
        if self.open(key)?.is_none() {
            return Ok(false);
        }
        let path = path_of(key.as_str());
        let (folder, name) = beneath(self.root, &path)?;
        rustix::fs::unlinkat(folder.as_fd(), name, AtFlags::empty())?;
        Ok(true)
    }

    /// Gives the object this content, and says whether it had another.
    pub fn content(&self, key: &Key, body: &[u8], owner: &Stat) -> Result<bool, Unrestored> {
        let there = self.open(key)?;
        if let Some((file, stat)) = &there
            && shows(file, stat, body)?
        {
            return Ok(false);
        }
        let owner = there.as_ref().map_or(owner, |(_, stat)| stat);
        self.write(&path_of(key.as_str()), body, owner)?;
        Ok(true)
    }

    /// Gives the object its content if it is one of these files and does not show it.
    pub fn torn(
        &self,
        key: &Key,
        files: &[(FileId, Bytes)],
        owner: &Stat,
    ) -> Result<bool, Unrestored> {
        if files.is_empty() {
            return Ok(false);
        }
        let Some((file, _)) = self.open(key)? else { return Ok(false) };
        let there = id_of(&file);
        match files.iter().rfind(|(id, _)| Some(*id) == there) {
            Some((_, body)) => self.content(key, body, owner),
            None => Ok(false),
        }
    }

    fn open(&self, key: &Key) -> Result<Option<(OwnedFd, Stat)>, Unrestored> {
        let path = path_of(key.as_str());
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file = match open_beneath(self.root, &path, flags) {
            Ok(file) => file,
            Err(Errno::NOENT | Errno::NOTDIR) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let stat = rustix::fs::fstat(&file)?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => Ok(Some((file, stat))),
            FileType::Directory => Ok(None),
            _ => Err(Unrestored::Key("there is something else in its place".into())),
        }
    }

    fn write(&self, path: &str, body: &[u8], owner: &Stat) -> Result<(), Unrestored> {
        let tmp = format!("{PRIVATE}/tmp");
        make_folder(self.root, &tmp)?;
        let folder = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        // Whatever is wrong with this one is wrong for all.
        let temps = open_beneath(self.root, &tmp, folder).map_err(Unrestored::Store)?;
        let temp = format!("recovered-{:016x}", self.env.random());
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let file = rustix::fs::openat(&temps, &temp, flags, Mode::from_raw_mode(0o666))
            .map_err(Unrestored::Store)?;
        let write = || -> Result<(), Unrestored> {
            super::write_all(&file, body, 0)?;
            files::keep_permissions(&file, owner);
            rustix::fs::fsync(&file)?;
            self.make_folders_above(path, owner)?;
            // A folder that nothing is left in.
            if file_type(self.root, path) == Some(FileType::Directory)
                && !remove_empty(self.root, path)
            {
                return Err(Errno::ISDIR.into());
            }
            let (above, name) = beneath(self.root, path)?;
            Ok(rustix::fs::renameat(&temps, &temp, above.as_fd(), name)?)
        };
        let written = write();
        if written.is_err() {
            let _ = rustix::fs::unlinkat(&temps, &temp, AtFlags::empty());
        }
        written
    }

    /// Makes the folders above `path`, with this owner.
    fn make_folders_above(&self, path: &str, owner: &Stat) -> Result<(), Errno> {
        let Some((folder, _)) = path.rsplit_once('/') else { return Ok(()) };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        match open_beneath(self.root, folder, flags) {
            Err(Errno::NOENT) => {}
            opened => return opened.map(drop),
        }
        self.make_folders_above(folder, owner)?;
        let (above, name) = beneath(self.root, folder)?;
        rustix::fs::mkdirat(above.as_fd(), name, Mode::from_raw_mode(0o777))?;
        let made = open_beneath(self.root, folder, flags)?;
        let (user, group) = (Uid::from_raw(owner.st_uid), Gid::from_raw(owner.st_gid));
        let _ = rustix::fs::fchown(&made, Some(user), Some(group));
        // Who may read a file may enter its folder.
        let mode = owner.st_mode & 0o777;
        let _ = rustix::fs::fchmod(&made, Mode::from_raw_mode(mode | (mode & 0o444) >> 2));
        Ok(())
    }
}

/// The folder that something stands in and its name there, without following symbolic links.
fn beneath<'a>(root: &OwnedFd, path: &'a str) -> Result<(OwnedFd, &'a str), Errno> {
    let (folder, name) = path.rsplit_once('/').unwrap_or((".", path));
    Ok((open_beneath(root, folder, FOLDER)?, name))
}

/// Whether the file has this content.
fn shows(file: &OwnedFd, stat: &Stat, body: &[u8]) -> Result<bool, Errno> {
    Ok(u64::try_from(stat.st_size) == Ok(body.len() as u64) && read_all(file, stat)? == body)
}
