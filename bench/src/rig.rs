//! What every benchmark needs: a place, runtimes, and how long to measure.

use std::cell::OnceCell;
use std::fs::{File, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use leasehold::Store;
use leasehold::store::{Connect, StoreUrl};
use rustix::fd::OwnedFd;
use rustix::fs::{Mode, OFlags};
use tempfile::TempDir;
use tokio::runtime::{Builder, Runtime};

use crate::peers::{Contender, Peer, Peers};
use crate::report::Report;
use crate::suite::Options;

/// An object as small as a lease: about 120 bytes.
pub const BODY: &[u8] = br#"{"worker_id":"worker-001","created_at":"2026-11-15T06:50:00.000Z","expires_at":"2026-11-15T06:55:00.000Z","fence":1234}"#;

/// Where the benchmarks run and for how long. What they leave goes when this is dropped.
pub struct Rig {
    folder: TempDir,
    quick: bool,
    large: bool,
    with_peers: bool,
    peers: OnceCell<Peers>,
}

impl Rig {
    pub fn new(options: &Options) -> Result<Self> {
        let above = match &options.dir {
            Some(dir) => dir.clone(),
            None if Path::new("target").is_dir() => PathBuf::from("target"),
            None => std::env::temp_dir(),
        };
        let above = std::path::absolute(&above)?;
        std::fs::create_dir_all(&above)?;
        let folder = tempfile::Builder::new()
            .prefix("leasehold-bench-")
            .tempdir_in(&above)
            .with_context(|| format!("cannot write to {}", above.display()))?;
        // Servers of peers that do not run as root have their data in it, too.
        std::fs::set_permissions(folder.path(), Permissions::from_mode(0o755))?;
        let Options { quick, full, .. } = *options;
        let (large, with_peers) = (options.large || full, options.peers || full);
        Ok(Self { folder, quick, large, with_peers, peers: OnceCell::new() })
    }

    /// Those of these peers that can take part, if peers were asked for. The report says why the
    /// others cannot.
    pub fn peers<'a>(
        &'a self,
        report: &mut Report,
        all: &[&'static Peer],
    ) -> Result<Vec<Contender<'a>>> {
        if !self.with_peers {
            return Ok(Vec::new());
        }
        if self.peers.get().is_none() {
            let _ = self.peers.set(Peers::prepare(self.path())?);
        }
        let Some(peers) = self.peers.get() else { return Ok(Vec::new()) };
        Ok(peers.able(report, all))
    }

    /// Whether what is missing may be fetched.
    pub fn with_peers(&self) -> bool {
        self.with_peers
    }

    /// A folder of the benchmarks' own.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    pub fn quick(&self) -> bool {
        self.quick
    }

    /// Whether there is time and room for larger folders.
    pub fn large(&self) -> bool {
        self.large
    }

    /// This if there is time, that if it has to be quick.
    pub fn pick<T>(&self, full: T, quick: T) -> T {
        if self.quick { quick } else { full }
    }

    /// How many pairs to measure.
    pub fn pairs(&self) -> usize {
        self.pick(7, 5)
    }

    /// How long one run of one side lasts.
    pub fn window(&self) -> Duration {
        self.pick(Duration::from_millis(1000), Duration::from_millis(250))
    }

    /// A new, empty folder with this name, with a store and a place for the floor in it.
    pub fn arena(&self, name: &str) -> Result<Arena> {
        let path = self.path().join(name);
        // Of a benchmark that went wrong.
        if path.exists() {
            std::fs::remove_dir_all(&path)?;
        }
        std::fs::create_dir(&path)?;
        Arena::new(path)
    }

    /// Two workers, as the command has on a machine of two cores.
    pub fn runtime(&self) -> Result<Runtime> {
        Ok(Builder::new_multi_thread().worker_threads(2).enable_all().build()?)
    }

    /// Everything on one thread.
    pub fn single_threaded(&self) -> Result<Runtime> {
        Ok(Builder::new_current_thread().enable_all().build()?)
    }
}

/// A store and, beside it in the same folder, the floor's files: `tmp/` and `data/`.
pub struct Arena {
    path: PathBuf,
    folder: File,
    pub store: Store,
    pub floor: OwnedFd,
}

impl Arena {
    fn new(path: PathBuf) -> Result<Self> {
        let floor = path.join("floor");
        std::fs::create_dir_all(floor.join("tmp"))?;
        std::fs::create_dir_all(floor.join("data"))?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let floor = rustix::fs::open(&floor, flags, Mode::empty())?;
        let store = Connect::new(StoreUrl::Directory(path.join("store"))).open()?;
        Ok(Self { folder: File::open(&path)?, path, store, floor })
    }

    /// The store's folder.
    pub fn store_path(&self) -> PathBuf {
        self.path.join("store")
    }

    /// The folder of the floor.
    pub fn floor_path(&self) -> PathBuf {
        self.path.join("floor")
    }

    /// Where all of it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes out what earlier runs left in memory, so that the next one does not pay for it.
    pub fn settle(&self) -> Result<()> {
        Ok(rustix::fs::syncfs(&self.folder)?)
    }

    /// Removes it: the next benchmark should not find a file system that is busy with this one.
    pub fn clear(self) -> Result<()> {
        std::fs::remove_dir_all(&self.path)?;
        self.settle()
    }
}
