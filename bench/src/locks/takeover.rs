//! How long after a kill -9 of its holder a lock is somebody else's, on the same host.

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use leasehold::lock::{Lock, LockSettings};
use leasehold::store::{Connect, Kind, StoreUrl};

use crate::report::Report;
use crate::rig::Rig;
use crate::stats::percentile;

/// Holds a lock until it is killed.
#[derive(clap::Args)]
pub struct Options {
    dir: std::path::PathBuf,
}

pub fn run(rig: &Rig, report: &mut Report) -> Result<()> {
    let arena = rig.arena("takeover")?;
    let runtime = rig.runtime()?;
    let settings =
        LockSettings { timeout: Duration::from_secs(30), ..LockSettings::of(Kind::Directory) };
    let mut gaps = Vec::new();
    for _ in 0..rig.pick(40, 15) {
        let mut holder = Command::new(std::env::current_exe()?)
            .arg("takeover-child")
            .arg(arena.store_path())
            .stdout(Stdio::piped())
            .spawn()?;
        let stdout = holder.stdout.take().context("no pipe")?;
        BufReader::new(stdout).read_line(&mut String::new())?;
        let lock = Lock::named(&arena.store, "bench", "heir", settings.clone())?;
        let heir = runtime.spawn(async move {
            let guard = lock.acquire_timeout(Duration::from_secs(30)).await?;
            let at = Instant::now();
            guard.release().await?;
            Ok::<_, leasehold::Error>(at)
        });
        std::thread::sleep(Duration::from_millis(50));
        let killed = Instant::now();
        holder.kill()?;
        holder.wait()?;
        let at = runtime.block_on(heir)??;
        gaps.push(at.saturating_duration_since(killed).as_secs_f64() * 1000.0);
    }
    let (middle, most) = (percentile(&gaps, 0.5), percentile(&gaps, 1.0));
    report.fact(
        "takeover after kill -9, same host",
        format!("{middle:.1} ms median, {most:.1} ms at most (target 20 ms)"),
    );
    arena.clear()
}

pub fn child(options: &Options) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let store = Connect::new(StoreUrl::Directory(options.dir.clone())).open()?;
        let lock = Lock::named(&store, "bench", "victim", LockSettings::of(Kind::Directory))?;
        let _guard = lock.acquire().await?;
        println!("held");
        std::future::pending::<()>().await;
        Ok(())
    })
}
