//! Folders: made with their first object, and removed with their last as far as that is cheap.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::AtFlags;
use rustix::io::Errno;

use super::Work;
use super::files::{hash, make_folder};

/// What this process knows of folders, by the hash of their names. Only saves work, so it may be wrong or
/// forgotten.
#[derive(Debug, Default)]
pub(super) struct Traffic(Mutex<HashMap<u64, Known>>);

impl Traffic {
    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Known>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug, Default)]
struct Known {
    /// How many objects it has created there.
    created: u8,
    /// The last of them, if it has not deleted that: the folder is not empty.
    ours: Option<u64>,
    /// How often the folder was found not to be empty,
    full: u8,
    /// and how often it was not tried since: one time in 64 it is.
    spared: u8,
}

fn of<'a>(all: &'a mut HashMap<u64, Known>, folder: &str) -> &'a mut Known {
    if all.len() >= 4096 {
        all.clear();
    }
    all.entry(hash(folder)).or_default()
}

impl Work {
    /// Removes folders that the deleted object left empty, unless this process keeps making
    /// objects there: making a folder costs ten times what an object does. Nor are those tried that
    /// are not empty as far as we know: to find that out, the kernel reads as much of them as was
    /// deleted, with the folder locked. Empty folders do no harm, listings pass them over.
    pub(super) fn tidy(&self, path: &str, even_busy: bool) {
        let mut folder = path;
        while let Some((above, _)) = folder.rsplit_once('/') {
            folder = above;
            if !even_busy && !self.seems_empty(folder, path) {
                return;
            }
            let removed = rustix::fs::unlinkat(&self.root, folder, AtFlags::REMOVEDIR);
            let mut traffic = self.traffic.lock();
            match removed {
                // That it keeps being made again is worth knowing.
                Ok(()) => {
                    let known = of(&mut traffic, folder);
                    (known.ours, known.full) = (None, 0);
                }
                Err(error) => {
                    if error == Errno::NOTEMPTY {
                        let known = of(&mut traffic, folder);
                        known.full = known.full.saturating_add(1);
                    }
                    return;
                }
            }
        }
    }

    /// Whether to try to remove a folder, after the object at this path was deleted.
    fn seems_empty(&self, folder: &str, deleted: &str) -> bool {
        let mut traffic = self.traffic.lock();
        let Some(known) = traffic.get_mut(&hash(folder)) else { return true };
        if known.ours == Some(hash(deleted)) {
            known.ours = None;
        }
        if known.created > 4 || known.ours.is_some() {
            return false;
        }
        known.spared = if known.full < 8 { 0 } else { (known.spared + 1) % 64 };
        known.spared == 0
    }

    /// This process has made an object at this path.
    pub(super) fn note_created(&self, path: &str) {
        let Some((folder, _)) = path.rsplit_once('/') else { return };
        let mut traffic = self.traffic.lock();
        let known = of(&mut traffic, folder);
        known.created = known.created.saturating_add(1);
        known.ours = Some(hash(path));
    }

    /// Makes the folders above `path`.
    pub(super) fn make_folders_above(&self, path: &str) -> Result<(), Errno> {
        let Some((folder, _)) = path.rsplit_once('/') else { return Ok(()) };
        match make_folder(&self.root, folder) {
            Err(Errno::NOENT) => {
                self.make_folders_above(folder)?;
                make_folder(&self.root, folder)
            }
            made => made,
        }
    }
}
