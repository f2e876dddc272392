//! Ourselves and the bare floor, as processes that are told what to do: see `peers`.

use std::fs::{File, OpenOptions};
use std::io::{BufRead as _, Read as _, Seek as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use leasehold::lock::{Lock, LockSettings, blocking};
use leasehold::scratchpad::Scratchpad;
use leasehold::{Durability, Store};
use rustix::fd::OwnedFd;
use rustix::fs::{Mode, OFlags};
use serde_json::json;

use crate::bucket::Place;
use crate::rig::BODY;
use crate::stats::{rate, rate_async};
use crate::store::floor;

/// One of the processes of a benchmark of locks.
#[derive(clap::Args)]
pub struct Options {
    role: Role,
    /// A folder, or a bucket: see `bucket::Place`.
    place: String,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Role {
    /// Leasehold, everything on one thread.
    Ours,
    /// Leasehold with two workers, as the runtime has on a machine of two cores.
    OursTwoWorkers,
    /// Bare system calls.
    Bare,
}

pub fn run(options: &Options) -> Result<()> {
    let place = Place::parse(&options.place)?;
    let mut player: Box<dyn Play> = match (options.role, &place) {
        (Role::Bare, Place::Directory(folder)) => Box::new(Bare::new(folder)?),
        (Role::Bare, Place::Bucket { .. }) => bail!("the bare lock is a file"),
        (role, place) => Box::new(Ours::new(place, role == Role::OursTwoWorkers)?),
    };
    println!("ready");
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let (verb, argument) = line.split_once(' ').unwrap_or((&line, ""));
        let answer = match verb {
            "rate" => player.rate(Duration::from_secs_f64(argument.parse()?))?.to_string(),
            "count" => player.count(argument.parse()?)?.to_string(),
            "take" => {
                player.take()?;
                "taken".to_owned()
            }
            "release" => {
                player.release()?;
                "released".to_owned()
            }
            "requests" => player.requests().to_string(),
            _ => bail!("not understood: {line}"),
        };
        println!("{answer}");
    }
    Ok(())
}

trait Play {
    /// How often per second it is taken and released.
    fn rate(&mut self, window: Duration) -> Result<f64>;
    /// How many increments up to `total` were ours.
    fn count(&mut self, total: u64) -> Result<u64>;
    fn take(&mut self) -> Result<()>;
    fn release(&mut self) -> Result<()>;
    /// How many requests to the store so far.
    fn requests(&self) -> u64 {
        0
    }
}

struct Ours {
    runtime: tokio::runtime::Runtime,
    store: Store,
    lock: Lock,
    pad: Scratchpad,
    held: Option<blocking::Guard>,
}

impl Ours {
    fn new(place: &Place, two_workers: bool) -> Result<Self> {
        let mut builder = match two_workers {
            true => tokio::runtime::Builder::new_multi_thread(),
            false => tokio::runtime::Builder::new_current_thread(),
        };
        let store = place.open()?;
        let settings = LockSettings {
            timeout: Duration::from_secs(60),
            attempts: 30,
            ..LockSettings::of(store.kind())
        };
        // As the peers: a lock, and no fsync.
        let pad = Scratchpad::on(&store, format!("worker-{}", std::process::id()))?
            .with_settings(settings.clone())
            .with_durability(Durability::Volatile);
        Ok(Self {
            runtime: builder.worker_threads(2).enable_all().build()?,
            store: store.clone(),
            lock: Lock::named(&store, "bench", "worker-001", settings)?,
            pad,
            held: None,
        })
    }
}

impl Play for Ours {
    fn rate(&mut self, window: Duration) -> Result<f64> {
        self.runtime.block_on(rate_async(window, async || {
            self.lock.acquire().await?.release().await?;
            Ok(())
        }))
    }

    fn count(&mut self, total: u64) -> Result<u64> {
        self.runtime.block_on(async {
            let mut share = 0;
            loop {
                let mut was = u64::MAX;
                let add = |value: Option<serde_json::Value>| {
                    was = value.and_then(|value| value["counter"].as_u64()).unwrap_or(u64::MAX);
                    // Who finds it full writes it once more as it is.
                    Ok(json!({ "counter": was.saturating_add(1).min(total) }))
                };
                self.pad.update("counter.json", add).await?;
                if was >= total {
                    return Ok(share);
                }
                share += 1;
            }
        })
    }

    fn take(&mut self) -> Result<()> {
        // Renewed on a thread of its own while this one waits to be told more.
        self.held = Some(blocking::Lock::new(self.lock.clone())?.acquire()?);
        Ok(())
    }

    fn release(&mut self) -> Result<()> {
        Ok(self.held.take().map_or(Ok(()), blocking::Guard::release)?)
    }

    fn requests(&self) -> u64 {
        self.store.usage().requests()
    }
}

/// A lock file that is there or not.
struct Bare {
    dir: PathBuf,
    folder: OwnedFd,
}

impl Bare {
    fn new(dir: &Path) -> Result<Self> {
        for name in ["tmp", "data"] {
            std::fs::create_dir_all(dir.join(name))?;
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self { dir: dir.to_owned(), folder: rustix::fs::open(dir, flags, Mode::empty())? })
    }
}

impl Play for Bare {
    /// Create temporary (O_EXCL), write, close, link, unlink temporary, unlink.
    fn rate(&mut self, window: Duration) -> Result<f64> {
        rate(window, || {
            drop(floor::write_new(&self.folder, "tmp/new", BODY)?);
            floor::link(&self.folder, "tmp/new", "data/x.lock")?;
            floor::remove(&self.folder, "tmp/new")?;
            floor::remove(&self.folder, "data/x.lock")?;
            Ok(())
        })
    }

    /// O_EXCL lock file with a random pause of at most 0.8 ms, file rewritten in place.
    fn count(&mut self, total: u64) -> Result<u64> {
        let counter = self.dir.join("counter.json");
        let mut share = 0;
        let mut random = u64::from(std::process::id()) | 1;
        loop {
            let mut tries = 0;
            while self.take().is_err() {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                let most = 50 << u64::min(tries, 4);
                tries += 1;
                std::thread::sleep(Duration::from_micros(random % most + 5));
            }
            let mut file = OpenOptions::new().read(true).write(true).open(&counter)?;
            let mut text = String::new();
            file.read_to_string(&mut text)?;
            let value: serde_json::Value = serde_json::from_str(&text)?;
            let count = value["counter"].as_u64().context("not a counter")?;
            if count < total {
                let text = format!("{{\"counter\":{}}}\n", count + 1);
                file.rewind()?;
                file.write_all(text.as_bytes())?;
                file.set_len(text.len() as u64)?;
                share += 1;
            }
            self.release()?;
            if count >= total {
                return Ok(share);
            }
        }
    }

    fn take(&mut self) -> Result<()> {
        File::create_new(self.dir.join("counter.lock"))?.write_all(BODY)?;
        Ok(())
    }

    fn release(&mut self) -> Result<()> {
        Ok(std::fs::remove_file(self.dir.join("counter.lock"))?)
    }
}
