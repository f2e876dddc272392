//! The ways to list a folder, and a process of its own to see how much memory one takes.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use leasehold::store::{Connect, StoreUrl};
use leasehold::{List, Store};
use serde::{Deserialize, Serialize};
use tokio::runtime::{Builder, Runtime};

use super::{PAGE, by_pages};
use crate::host::peak_memory;

/// What to list, and how.
#[derive(clap::Args)]
pub struct Options {
    store: PathBuf,
    folder: String,
    how: How,
}

/// A way to list a folder.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum How {
    /// Ours: everything, page by page.
    Pages,
    /// Ours: the first page in order.
    FirstPage,
    /// Ours: a page in whatever order.
    AnyPage,
    /// The floor of `Pages`.
    BareSorted,
    /// The floor of `FirstPage`.
    BareFirstPage,
    /// The floor of `AnyPage`.
    BareAnyPage,
}

impl How {
    /// Lists, and returns how many keys there were.
    pub fn list(
        self,
        runtime: &Runtime,
        store: &Store,
        root: &Path,
        folder: &str,
    ) -> Result<usize> {
        let list = || List::prefix(format!("{folder}/"));
        let names = || -> Result<_> {
            let entries = std::fs::read_dir(root.join(folder))?;
            Ok(entries.map(|entry| Ok::<OsString, std::io::Error>(entry?.file_name())))
        };
        match self {
            Self::Pages => runtime.block_on(by_pages(store, list()?)),
            Self::FirstPage => runtime.block_on(by_pages(store, list()?.limit(PAGE))),
            Self::AnyPage => runtime.block_on(by_pages(store, list()?.unordered().limit(PAGE))),
            Self::BareSorted => {
                let mut names: Vec<_> = names()?.collect::<Result<_, _>>()?;
                names.sort_unstable();
                Ok(std::hint::black_box(names).len())
            }
            Self::BareFirstPage => {
                let mut names: Vec<_> = names()?.collect::<Result<_, _>>()?;
                if names.len() > PAGE {
                    names.select_nth_unstable(PAGE);
                    names.truncate(PAGE);
                }
                names.sort_unstable();
                Ok(std::hint::black_box(names).len())
            }
            Self::BareAnyPage => {
                let names: Vec<_> = names()?.take(PAGE).collect::<Result<_, _>>()?;
                Ok(std::hint::black_box(names).len())
            }
        }
    }
}

/// What the child says.
#[derive(Serialize, Deserialize)]
pub struct Said {
    /// The most memory it had, in KiB.
    pub peak_kib: u64,
}

/// Lists in a new process.
pub fn spawn(store: &Path, folder: &str, how: How) -> Result<Said> {
    let value = how.to_possible_value().context("every way has a name")?;
    let output = Command::new(std::env::current_exe()?)
        .arg("listing-child")
        .arg(store)
        .args([folder, value.get_name()])
        .output()?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "listing in a child failed: {stderr}");
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// What the child does.
pub fn run(options: &Options) -> Result<()> {
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let store = Connect::new(StoreUrl::Directory(options.store.clone())).open()?;
    options.how.list(&runtime, &store, &options.store, &options.folder)?;
    let peak_kib = peak_memory().context("the kernel does not tell VmHWM")?;
    println!("{}", serde_json::to_string(&Said { peak_kib })?);
    Ok(())
}
