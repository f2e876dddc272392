//! One kind of work on an index, in a process of its own: memory is told by its peak.

use std::io::{BufRead as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use leasehold::index::{Freshness, Index};
use serde::{Deserialize, Serialize};

use crate::host::peak_memory;
use crate::index::data;
use crate::stats::median;

/// What to do, on which index. Keys, or rows, come on standard input, one a line.
#[derive(clap::Args)]
pub struct Options {
    work: Work,
    store: PathBuf,
    index: String,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
pub enum Work {
    /// Looks the keys up, and again; the last time counts. A first look reads little of a shard and keeps
    /// nothing, the second keeps it.
    LookupWarm,
    /// Looks the keys up, each with nothing cached.
    LookupCold,
    /// Puts the rows, one by one.
    Put,
    /// Compacts what waits.
    Compact,
}

/// What one operation took.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Took {
    pub micros: f64,
    pub requests: f64,
    /// The most memory that the process had.
    pub mib: f64,
}

impl Work {
    /// Does this in a process of its own.
    pub fn measure(self, store: &Path, index: &str, lines: &[String]) -> Result<Took> {
        let name = clap::ValueEnum::to_possible_value(&self).context("every work has a name")?;
        let mut child = Command::new(std::env::current_exe()?)
            .args(["index-child", name.get_name()])
            .arg(store)
            .arg(index)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut stdin = child.stdin.take().context("no pipe")?;
        for line in lines {
            writeln!(stdin, "{line}")?;
        }
        drop(stdin);
        let output = child.wait_with_output()?;
        ensure!(output.status.success(), "{name:?} in a process of its own failed");
        Ok(serde_json::from_slice(&output.stdout)?)
    }
}

/// What the process does.
pub fn run(options: &Options) -> Result<()> {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let lines: Vec<String> = std::io::stdin().lock().lines().collect::<Result<_, _>>()?;
    let store = data::open(&options.store)?;
    let (mut micros, mut before) = (Vec::new(), store.usage());
    runtime.block_on(async {
        let mut index = Index::open(&store, &options.index).await?;
        if let Work::LookupWarm = options.work {
            for key in lines.iter().chain(&lines) {
                index.get_row(key, Freshness::Checked).await?.context("a record is missing")?;
            }
        }
        before = store.usage();
        let rounds = if let Work::Compact = options.work { &lines[..0] } else { &lines[..] };
        for line in rounds {
            if let Work::LookupCold = options.work {
                // Opening it is not what is measured.
                let used = store.usage().since(&before);
                index = Index::open(&store, &options.index).await?;
                before = store.usage().since(&used);
            }
            let start = Instant::now();
            match options.work {
                Work::Put => {
                    let mut batch = index.batch().await?;
                    batch.put_row(line.as_bytes())?;
                    batch.flush().await?;
                }
                _ => {
                    let found = index.get_row(line, Freshness::Checked).await?;
                    found.context("a record is missing")?;
                }
            }
            micros.push(start.elapsed().as_secs_f64() * 1e6);
        }
        if let Work::Compact = options.work {
            let start = Instant::now();
            let pass = index.compact().await?.into_result()?;
            micros.push(start.elapsed().as_secs_f64() * 1e6);
            ensure!(pass.records() > 0, "there was nothing to compact");
        }
        anyhow::Ok(())
    })?;
    let took = Took {
        micros: median(&micros),
        requests: store.usage().since(&before).requests() as f64 / micros.len() as f64,
        mib: peak_memory().context("the kernel does not tell VmHWM")? as f64 / 1024.0,
    };
    println!("{}", serde_json::to_string(&took)?);
    Ok(())
}
