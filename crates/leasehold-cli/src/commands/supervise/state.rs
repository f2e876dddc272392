//! What a node remembers across restarts: the last plan that could be carried out.

use std::fs::{File, TryLockError};
use std::io::{Read as _, Seek as _, Write as _};
use std::path::PathBuf;

use anyhow::Context as _;
use leasehold::fleet::{PlanText, Spelling};
use leasehold::protocol::shard::KeyHash;
use leasehold::{Error, ErrorKind, Version};
use serde::{Deserialize, Serialize};

/// A folder with the state of one node of one store; held by one process at a time.
#[derive(Debug)]
pub struct State {
    plan: PathBuf,
    pub folder: PathBuf,
    /// Locked as long as it is open.
    _lock: File,
}

#[derive(Serialize, Deserialize)]
struct Kept {
    json: bool,
    version: String,
    text: String,
}

impl State {
    /// The state of this node of this store. An error with kind `Held` if another supervisor of this
    /// machine has it; that holds also while the store cannot be reached.
    pub fn open(folder: PathBuf, node: &str, store: &str) -> anyhow::Result<Self> {
        std::fs::create_dir_all(&folder)
            .with_context(|| format!("cannot make the folder {}", folder.display()))?;
        // One folder may serve several stores, and names may be anything.
        let name = KeyHash::of(&format!("{store}\n{node}")).short();
        let lock = folder.join(format!("{name}.lock"));
        let mut file = File::options()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(&lock)
            .with_context(|| format!("cannot open {}", lock.display()))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut pid = String::new();
                let _ = (&mut file).take(20).read_to_string(&mut pid);
                let message =
                    format!("node {node} is supervised already, by process {}", pid.trim());
                return Err(Error::new(ErrorKind::Held, message).into());
            }
            Err(TryLockError::Error(error)) => {
                return Err(error).with_context(|| format!("cannot lock {}", lock.display()));
            }
        }
        // For people. A disk that is full keeps nobody from working.
        let _ = file.set_len(0).and_then(|()| file.rewind());
        let _ = writeln!(file, "{}", std::process::id());
        Ok(Self { plan: folder.join(format!("{name}.plan.json")), folder, _lock: file })
    }

    /// The last plan that could be carried out.
    pub fn plan(&self) -> Option<PlanText> {
        let kept: Kept = serde_json::from_slice(&std::fs::read(&self.plan).ok()?).ok()?;
        let spelling = if kept.json { Spelling::Json } else { Spelling::Toml };
        Some(PlanText { spelling, text: kept.text, version: Version::new(kept.version) })
    }

    /// Keeps it: all of it or nothing, should the power fail.
    pub fn keep(&self, plan: &PlanText) -> anyhow::Result<()> {
        let kept = Kept {
            json: plan.spelling == Spelling::Json,
            version: plan.version.as_str().to_owned(),
            text: plan.text.clone(),
        };
        // We have the lock, so one name will do; and whoever dies here leaves nothing that adds up.
        let beside = self.plan.with_extension("new");
        let mut file = File::create(&beside)?;
        file.write_all(&serde_json::to_vec(&kept)?)?;
        file.sync_all()?;
        std::fs::rename(&beside, &self.plan)?;
        Ok(())
    }

    /// Free bytes where it is.
    pub fn free(&self) -> Option<u64> {
        let disk = rustix::fs::statvfs(&self.folder).ok()?;
        Some(disk.f_bavail.saturating_mul(disk.f_frsize))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_has_one_holder_and_keeps_one_plan() {
        let folder = tempfile::tempdir().unwrap();
        let open = || State::open(folder.path().to_owned(), "n", "memory:");
        let state = open().unwrap();
        let error = open().unwrap_err().to_string();
        assert!(error.contains(&format!("by process {}", std::process::id())), "{error}");
        assert_eq!(state.plan(), None);
        let plan = |text: &str| PlanText {
            spelling: Spelling::Toml,
            text: text.to_owned(),
            version: Version::new(text),
        };
        for text in ["first", "second"] {
            state.keep(&plan(text)).unwrap();
            assert_eq!(state.plan(), Some(plan(text)));
        }
        // Whoever was killed in the middle of it left this.
        std::fs::write(state.plan.with_extension("new"), "{\"js").unwrap();
        drop(state);
        let state = open().unwrap();
        assert_eq!(state.plan(), Some(plan("second")));
        state.keep(&plan("third")).unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2, "the plan and the lock");
    }

    /// A disk that is full.
    #[cfg(target_os = "linux")]
    #[test]
    fn nothing_need_be_written() {
        let folder = tempfile::tempdir().unwrap();
        let open = || State::open(folder.path().to_owned(), "n", "memory:");
        drop(open().unwrap());
        let lock = std::fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().path();
        std::fs::remove_file(&lock).unwrap();
        std::os::unix::fs::symlink("/dev/full", &lock).unwrap();
        let state = open().unwrap();
        assert!(open().is_err(), "it is locked all the same");
        std::os::unix::fs::symlink("/dev/full", state.plan.with_extension("new")).unwrap();
        let plan =
            PlanText { spelling: Spelling::Toml, text: String::new(), version: Version::new("x") };
        assert!(state.keep(&plan).is_err());
        assert_eq!(state.plan(), None);
    }
}
