//! What a node remembers across restarts: the last plan that could be carried out.

use std::fs::File;
use std::io::{Read as _, Seek as _, Write as _};
use std::path::PathBuf;

use anyhow::Context as _;
use leasehold::fleet::{PlanText, Spelling};
use leasehold::protocol::shard::KeyHash;
use leasehold::{Error, ErrorKind, Version};
use serde::{Deserialize, Serialize};

/// A folder with the state of one node of one store; held by one process at a time.
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
        if file.try_lock().is_err() {
            let mut pid = String::new();
            let _ = file.read_to_string(&mut pid);
            let message = format!("node {node} is supervised already, by process {}", pid.trim());
            return Err(Error::new(ErrorKind::Held, message).into());
        }
        file.set_len(0)?;
        file.rewind()?;
        writeln!(file, "{}", std::process::id())?;
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
        let mut file = tempfile::NamedTempFile::new_in(&self.folder)?;
        serde_json::to_writer(&mut file, &kept)?;
        file.as_file().sync_all()?;
        file.persist(&self.plan)?;
        Ok(())
    }

    /// Free bytes where it is.
    pub fn free(&self) -> Option<u64> {
        let disk = rustix::fs::statvfs(&self.folder).ok()?;
        Some(disk.f_bavail.saturating_mul(disk.f_frsize))
    }
}
