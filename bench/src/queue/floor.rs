//! The barest queue in a directory: a file per task, a lease beside it, no check of any kind.
//!
//! Push creates a temporary file and renames it; a worker creates a lease file (`O_EXCL`), reads the
//! task, writes the lease, and removes both. Workers are threads; each takes its own slice of one
//! listing, so that nobody gets in another's way, and only then what is left.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Barrier;

use anyhow::{Context as _, Result, ensure};

use super::{Speed, monotonic, payload, per_second};
use crate::rig::BODY;

/// Pushes and drains this many, and removes what is left of it.
pub fn run(folder: &Path, tasks: usize, workers: usize, flush: bool) -> Result<Speed> {
    run_with(folder, tasks, workers, flush, || Ok(()))
}

/// The same, with this in between.
pub fn run_with(
    folder: &Path,
    tasks: usize,
    workers: usize,
    flush: bool,
    between: impl FnOnce() -> Result<()>,
) -> Result<Speed> {
    let folder = folder.join("bare-queue");
    for name in ["tmp", "pending", "claimed"] {
        fs::create_dir_all(folder.join(name))?;
    }
    let payload = payload();
    let start = monotonic();
    for n in 0..tasks {
        let temp = folder.join("tmp/new");
        let mut file = File::create_new(&temp)?;
        file.write_all(payload.as_bytes())?;
        if flush {
            file.sync_all()?;
        }
        drop(file);
        fs::rename(&temp, folder.join(format!("pending/{n:08}.json")))?;
    }
    let push = per_second(tasks, start, monotonic());
    between()?;

    let (listed, ready) = (Barrier::new(workers), Barrier::new(workers + 1));
    let (start, ends) = std::thread::scope(|scope| -> Result<_> {
        let mut threads = Vec::new();
        for k in 0..workers {
            let (folder, listed, ready) = (&folder, &listed, &ready);
            threads.push(scope.spawn(move || {
                ready.wait();
                Slice { folder, k, workers, flush }.drain(listed)
            }));
        }
        ready.wait();
        let start = monotonic();
        let mut ends = Vec::new();
        for thread in threads {
            ends.push(thread.join().ok().context("a worker panicked")??);
        }
        Ok((start, ends))
    })?;
    let done: usize = ends.iter().map(|(done, _)| done).sum();
    ensure!(done == tasks, "{done} tasks were done instead of {tasks}");
    let end = ends.iter().map(|(_, last)| *last).max().unwrap_or(start);
    fs::remove_dir_all(&folder)?;
    Ok(Speed { push, drain: per_second(tasks, start, end) })
}

/// One worker.
struct Slice<'a> {
    folder: &'a PathBuf,
    k: usize,
    workers: usize,
    flush: bool,
}

impl Slice<'_> {
    fn list(&self) -> Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(self.folder.join("pending"))? {
            names.push(entry?.file_name().into_string().ok().context("not our name")?);
        }
        names.sort_unstable();
        Ok(names)
    }

    /// How many were done, and when the last was.
    fn drain(&self, listed: &Barrier) -> Result<(usize, u64)> {
        let Self { k, workers, .. } = *self;
        let all = self.list()?;
        let count = all.len();
        let mut names = all[count * k / workers..count * (k + 1) / workers].to_vec();
        listed.wait();
        let (mut done, mut last) = (0, 0);
        let mut body = Vec::new();
        loop {
            for name in &names {
                if self.task(name, &mut body)? {
                    done += 1;
                    last = monotonic();
                }
            }
            names = self.list()?;
            if names.is_empty() {
                return Ok((done, last));
            }
            let count = names.len();
            names.rotate_left(count * k / workers % count);
        }
    }

    fn task(&self, name: &str, body: &mut Vec<u8>) -> Result<bool> {
        let task = self.folder.join(format!("pending/{name}"));
        let lease = self.folder.join(format!("claimed/{name}.lease"));
        let Ok(mut held) = File::create_new(&lease) else { return Ok(false) };
        body.clear();
        let Ok(mut file) = File::open(&task) else {
            fs::remove_file(&lease)?;
            return Ok(false);
        };
        file.read_to_end(body)?;
        held.write_all(BODY)?;
        if self.flush {
            held.sync_all()?;
        }
        drop(held);
        fs::remove_file(&task)?;
        fs::remove_file(&lease)?;
        Ok(true)
    }
}
