//! `leasehold torture`: real processes share a store, are killed and stopped at any moment, the
//! store's answers are spoilt on the way, and in the end a checker says whether what they were told
//! was possible.
//!
//! ```text
//!   conductor ── kill -9, STOP, CONT ──▶ players ──▶ fault proxy ──▶ store
//!       │                                  │ logs: before and after every operation
//!       └── drains, looks ──▶ evidence ◀───┘
//!                                 └──▶ check (pure) ──▶ verdict
//! ```
//!
//! All of it happens under a prefix of its own, so that it can be done in anybody's bucket.

mod check;
mod conductor;
mod ending;
mod faults;
mod log;
mod plan;
pub mod player;
mod proxy;
mod verdict;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail};
use indicatif::{ProgressBar, ProgressStyle};
use leasehold::index::{Field, Index, IndexSettings, NewIndex};
use leasehold::queue::Queue;
use leasehold::store::doctor::{Doctor, Verdict};
use leasehold::store::{Connect, StoreUrl};
use leasehold::{Error, ErrorKind, Key, Store};

use self::check::Life;
use self::conductor::{Stage, Troupe};
use self::log::{Log, Said};
use self::plan::{Faults, INDEX, Plan, QUEUE};
use self::proxy::Proxy;
use crate::args::torture::Torture;
use crate::args::{Args, StoreArgs};
use crate::config;
use crate::exit::Exit;
use crate::render::{self, DIM, paint};

/// Tortures a store, or checks the evidence of an earlier time.
pub async fn run(args: &Args, torture: &Torture) -> anyhow::Result<Exit> {
    if let Some(evidence) = &torture.check {
        let plan = Plan::read(evidence)?;
        return verdict::give(args, &plan, &check::check(&read_logs(evidence)?), evidence);
    }
    let mut connect = config::connect(args)?;
    let env = connect.env.clone();
    let run = format!("torture-{:08x}", env.random() >> 32);
    connect.url = within(&connect.url, &run)?;
    let store = connect.clone().open()?;
    let place = Place { connect, store };
    let evidence = Evidence::make(torture.keep.as_deref(), &run)?;
    let outcome = tortured(args, torture, &place, &evidence).await;
    match &outcome {
        Ok(Exit::Done) if torture.keep.is_none() => {
            place.clear().await.context("what was written could not be removed")?;
            std::fs::remove_dir_all(&evidence.0)?;
        }
        // Refused before it began.
        Ok(Exit::Usage) => {
            place.clear().await?;
            std::fs::remove_dir_all(&evidence.0)?;
        }
        _ => render::say(paint(
            DIM,
            format_args!("kept: {} and {}", place.store.url(), evidence.0.display()),
        )),
    }
    outcome
}

/// A prefix of its own in a store.
struct Place {
    connect: Connect,
    store: Store,
}

impl Place {
    /// Removes everything.
    async fn clear(&self) -> anyhow::Result<()> {
        if let StoreUrl::Directory(path) = &self.connect.url {
            return match std::fs::remove_dir_all(path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
                _ => Ok(()),
            };
        }
        // Whatever its root record says: we leave.
        for keys in ending::all(&self.store, "").await?.chunks(1000) {
            self.store.backend().delete_many(keys).await?;
        }
        Ok(())
    }
}

/// The folder with the logs.
struct Evidence(PathBuf);

impl Evidence {
    fn make(keep: Option<&Path>, run: &str) -> anyhow::Result<Self> {
        let path = match keep {
            Some(path) => path.to_owned(),
            None => std::env::temp_dir().join(format!("leasehold-{run}")),
        };
        std::fs::create_dir_all(&path)?;
        let path = path.canonicalize()?;
        for part in ["logs", "stderr"] {
            std::fs::create_dir(path.join(part)).with_context(|| {
                format!("{} holds the evidence of another time: name a new folder", path.display())
            })?;
        }
        Ok(Self(path))
    }
}

async fn tortured(
    args: &Args,
    torture: &Torture,
    place: &Place,
    evidence: &Evidence,
) -> anyhow::Result<Exit> {
    let Place { connect, store } = place;
    let env = store.env().clone();
    let anyway = match examine(store, torture.anyway).await? {
        Examined::Safe => false,
        Examined::Unsafe(why) if torture.anyway => {
            render::say(format_args!("the store is unsafe ({why}); going on anyway"));
            true
        }
        Examined::Unsafe(why) => {
            render::say(format_args!(
                "{} is unsafe: {why}. With --anyway it is tortured nevertheless, to see it fail.",
                store.url()
            ));
            return Ok(Exit::Usage);
        }
    };
    let endpoint = connect.cloud.endpoint.clone().filter(|_| store.kind().is_bucket());
    let spoilt = endpoint.filter(|endpoint| endpoint.starts_with("http://"));
    let (ttl, heartbeat) = Plan::terms(store.kind());
    let mut plan = Plan {
        seed: torture.seed.unwrap_or_else(|| env.random()),
        processes: torture.processes,
        store: store.url(),
        faults: if spoilt.is_some() { Faults::Proxy } else { Faults::InProcess },
        anyway,
        ttl,
        heartbeat,
        begin: 0,
        end: 0,
        interrupted: false,
    };
    let store = plan.adapt(store.clone());
    let (queue, index) = furnish(&plan, &store).await?;
    plan.begin = log::nanos(&env);
    plan.end = plan.begin + (torture.minutes * 60e9) as u64;
    plan.write(&evidence.0)?;
    verdict::announce(args, torture, &plan)?;
    let log = Log::create(&evidence.0.join("logs/conductor.jsonl"), env.clone())?;
    let proxy = match &spoilt {
        Some(endpoint) => Some(Proxy::start(endpoint, plan.clone(), env).await?),
        None => None,
    };
    let endpoint = proxy.as_ref().map(|proxy| proxy.endpoint.as_str());
    let arguments = arguments(&args.store, connect, endpoint);
    let stage = Stage { evidence: &evidence.0, arguments, log: &log };
    let mut troupe = Troupe::new(stage, torture.processes);
    let bar = bar(args, torture);
    let begin = log.now();
    let show = |kills: u64, pauses: u64| {
        bar.set_position((log.now() - begin) / 1_000_000_000);
        bar.set_message(format!("{kills} kills, {pauses} pauses"));
    };
    troupe.play(&plan, torture.kills, show, interruption()).await?;
    bar.set_message("the faults are over: draining");
    let played = calm(&plan, &evidence.0, &log)?;
    proxy.iter().for_each(Proxy::calm);
    troupe.finish().await?;
    // Half a minute, and as long again as it took.
    let patience = Duration::from_secs(60) + Duration::from_nanos(log.now() - plan.begin);
    troupe.drain(patience).await?;
    ending::observe(&plan, &queue, &index, &log).await?;
    let faults = proxy.as_ref().map(Proxy::done).unwrap_or_default();
    log.say(Said::Tally { usage: store.usage(), faults });
    bar.set_message("checking");
    note_panics(&evidence.0, &log)?;
    let report = check::check(&read_logs(&evidence.0)?);
    bar.finish_and_clear();
    verdict::give(args, &played, &report, &evidence.0)
}

/// The first interrupt ends the faults, and what was done so far is checked; the second one ends all.
async fn interruption() {
    let (first, heard) = tokio::sync::oneshot::channel();
    tokio::spawn(async move {
        let _ = tokio::signal::ctrl_c().await;
        let _ = first.send(());
        let _ = tokio::signal::ctrl_c().await;
        // The players end with us.
        std::process::exit(130);
    });
    if heard.await.is_err() {
        std::future::pending().await
    }
}

/// The plan as it was played. Interrupted before its end: the players that start now are to know that the
/// faults are over.
fn calm(plan: &Plan, evidence: &Path, log: &Log) -> anyhow::Result<Plan> {
    let now = log.now();
    if now >= plan.end {
        return Ok(plan.clone());
    }
    let played = Plan { end: now, interrupted: true, ..plan.clone() };
    played.write(evidence)?;
    Ok(played)
}

enum Examined {
    Safe,
    Unsafe(String),
}

/// What the doctor says. One who goes on anyway finds no trace of it.
async fn examine(store: &Store, anyway: bool) -> anyhow::Result<Examined> {
    match store.init().await {
        Ok(()) => {}
        Err(error) if error.kind() == ErrorKind::Unsupported => {
            return Ok(Examined::Unsafe(error.to_string()));
        }
        Err(error) => return Err(error.into()),
    }
    let report = Doctor::new(store).run(|_| {}).await?;
    if report.verdict != Verdict::Unsafe {
        return Ok(Examined::Safe);
    }
    if anyway {
        let root = Key::new(leasehold::protocol::format::root::ROOT_KEY)?;
        let _ = store.backend().delete(&root, None).await?;
    }
    let failed = report
        .checks
        .iter()
        .filter(|check| check.outcome == leasehold::store::doctor::Outcome::Fail);
    let failed: Vec<&str> = failed.map(|check| check.detail.as_str()).collect();
    Ok(Examined::Unsafe(failed.join("; ")))
}

/// Makes the queue and the index.
async fn furnish(plan: &Plan, store: &Store) -> anyhow::Result<(Queue, Index)> {
    let queue = Queue::create(store, QUEUE, plan.queue_settings()).await?;
    let fields = ["key", "value"].map(Field::parse).into_iter().collect::<Result<Vec<_>, _>>();
    let fields = fields.map_err(|error| Error::new(ErrorKind::Internal, error.to_string()))?;
    let index = Index::create(store, INDEX, NewIndex::with_fields(fields)?).await?;
    let settings = IndexSettings { lock_ttl: plan.ttl, ..IndexSettings::default() };
    Ok((queue, index.with_settings(settings)))
}

/// The place called `run` in a store.
fn within(url: &StoreUrl, run: &str) -> anyhow::Result<StoreUrl> {
    Ok(match url {
        StoreUrl::Memory => {
            bail!(Error::new(ErrorKind::Invalid, "memory is not shared by processes"))
        }
        StoreUrl::Directory(path) => StoreUrl::Directory(path.join(run)),
        StoreUrl::Bucket { kind, bucket, prefix } => StoreUrl::Bucket {
            kind: *kind,
            bucket: bucket.clone(),
            prefix: match prefix.is_empty() {
                true => run.to_owned(),
                false => format!("{prefix}/{run}"),
            },
        },
    })
}

/// What we were given, for the players, with this place as the store. Secrets stay where they are:
/// in the environment or in files.
fn arguments(given: &StoreArgs, connect: &Connect, endpoint: Option<&str>) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = vec!["--quiet".into(), "--store".into()];
    arguments.push(match &connect.url {
        StoreUrl::Directory(path) => path.clone().into(),
        url => url.to_string().into(),
    });
    let mut add = |flag: &str, value: Option<OsString>| {
        if let Some(value) = value {
            arguments.extend([flag.into(), value]);
        }
    };
    add("--config", given.config.clone().map(Into::into));
    let endpoint = endpoint.map(str::to_owned).or_else(|| given.endpoint.clone());
    add("--endpoint", endpoint.map(Into::into));
    add("--region", given.region.clone().map(Into::into));
    add("--path-style", given.path_style.map(|value| value.to_string().into()));
    add("--profile", given.profile.clone().map(Into::into));
    add("--access-key", given.access_key.clone().map(Into::into));
    add("--connections", given.connections.map(|value| value.to_string().into()));
    if given.anonymous {
        arguments.push("--anonymous".into());
    }
    if given.force_network_fs {
        arguments.push("--force-network-fs".into());
    }
    arguments
}

fn bar(args: &Args, torture: &Torture) -> ProgressBar {
    if args.json || args.quiet {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("  {bar:40.green/black} {pos:>4} s  {msg}");
    let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new((torture.minutes * 60.0) as u64).with_style(style)
}

/// What the players said on their way out.
fn note_panics(evidence: &Path, log: &Log) -> anyhow::Result<()> {
    for entry in std::fs::read_dir(evidence.join("stderr"))? {
        let path = entry?.path();
        let text = String::from_utf8_lossy(&std::fs::read(&path)?).into_owned();
        for line in text.lines().filter(|line| line.contains("panicked")) {
            log.say(Said::Odd(format!("{}: {line}", path.display())));
        }
    }
    Ok(())
}

fn read_logs(evidence: &Path) -> anyhow::Result<Vec<Life>> {
    let folder = evidence.join("logs");
    let mut lives = Vec::new();
    let entries = std::fs::read_dir(&folder)
        .with_context(|| format!("there are no logs in {}", folder.display()))?;
    for entry in entries {
        let path = entry?.path();
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        lives.push(Life { name, lines: log::read(&path)? });
    }
    lives.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(lives)
}
