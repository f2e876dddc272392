//! `leasehold-sim`: runs many seeds, or replays one.

use std::io::Write as _;
use std::process::{Command, ExitCode};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

use anyhow::{Context as _, bail};
use clap::Parser;
use leasehold::env::Env;
use leasehold_sim::faults::{Broken, NAMES};
use leasehold_sim::scenario::Scenario;
use leasehold_sim::{Options, Outcome, run};

/// Runs Leasehold's real code in simulated worlds, one per seed, and checks what must hold.
#[derive(Debug, Parser)]
struct Args {
    /// The seeds to run: `A..B`, without B.
    #[arg(long, value_name = "A..B", default_value = "0..1000", conflicts_with = "seed")]
    seeds: String,
    /// Replays one seed and prints its history.
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Only this scenario: locks, queue, index, purge, mixed or sync. By default the seed chooses.
    #[arg(long)]
    scenario: Option<String>,
    /// Rates that take the place of the seed's own: `ghost=0.1,crashes=2`; `calm` for none.
    #[arg(long, value_name = "NAME=RATE,…")]
    faults: Option<String>,
    /// Makes a known mistake, by its row or its name. Takes a build with `--features mutants`.
    #[arg(long, value_name = "ROW|NAME")]
    mutant: Option<String>,
    /// On a store that breaks this promise.
    #[arg(long, value_name = "NAME")]
    broken: Option<String>,
    /// How many seeds to run at a time.
    #[arg(long, default_value_t = 2)]
    jobs: usize,
    /// After how many failures to stop.
    #[arg(long, default_value_t = 10)]
    failures: usize,
    /// Appends a line to this file: commit, seeds, what went wrong, result.
    #[arg(long, value_name = "FILE")]
    ledger: Option<std::path::PathBuf>,
}

fn main() -> anyhow::Result<ExitCode> {
    let args = Args::parse();
    let mut options = Options {
        scenario: args.scenario.as_deref().map(scenario).transpose()?,
        rates: args.faults.as_deref().map(rates).transpose()?.unwrap_or_default(),
        broken: args.broken.as_deref().map(broken).transpose()?,
        record: false,
    };
    if let Some(mutant) = &args.mutant {
        make(mutant)?;
    }
    if let Some(seed) = args.seed {
        options.record = true;
        return Ok(replay(run(seed, &options)));
    }
    many(&args, &options)
}

fn scenario(name: &str) -> anyhow::Result<Scenario> {
    let names = Scenario::ALL.map(Scenario::name).join(", ");
    Scenario::named(name).with_context(|| format!("no scenario {name:?}: there are {names}"))
}

fn broken(name: &str) -> anyhow::Result<Broken> {
    let names = Broken::ALL.map(Broken::name).join(", ");
    let found = Broken::ALL.into_iter().find(|broken| broken.name() == name);
    found.with_context(|| format!("no such broken store {name:?}: there are {names}"))
}

fn rates(text: &str) -> anyhow::Result<Vec<(String, f64)>> {
    if text == "calm" {
        return Ok(NAMES.iter().map(|name| ((*name).to_owned(), 0.0)).collect());
    }
    let mut rates = Vec::new();
    for part in text.split(',') {
        let (name, rate) = part.split_once('=').context("faults are NAME=RATE,NAME=RATE")?;
        if !NAMES.contains(&name) {
            bail!("no fault {name:?}: there are {}", NAMES.join(", "));
        }
        rates.push((name.to_owned(), rate.parse().context("a rate is a number")?));
    }
    Ok(rates)
}

#[cfg(feature = "mutants")]
fn make(name: &str) -> anyhow::Result<()> {
    use leasehold::protocol::mutant::{Mutant, make};
    let found = Mutant::ALL
        .into_iter()
        .find(|mutant| mutant.name() == name || mutant.row().to_string() == name);
    make(Some(found.with_context(|| format!("no mutant {name:?}"))?));
    Ok(())
}

#[cfg(not(feature = "mutants"))]
fn make(_: &str) -> anyhow::Result<()> {
    bail!(
        "this build has no mutants: `cargo run --release -p leasehold-sim --features mutants -- …`"
    )
}

fn replay(outcome: Outcome) -> ExitCode {
    let Outcome { seed, scenario, faults, violation, hash, seconds, history } = outcome;
    for line in history {
        println!("{line}");
    }
    println!(
        "seed {seed}: {}, {faults}; {seconds} s of its own time; history {hash:016x}",
        scenario.name()
    );
    match violation {
        None => {
            println!("everything held");
            ExitCode::SUCCESS
        }
        Some(violation) => {
            println!("violated: {violation}");
            ExitCode::FAILURE
        }
    }
}

fn many(args: &Args, options: &Options) -> anyhow::Result<ExitCode> {
    let range = args.seeds.split_once("..").context("seeds are A..B")?;
    let (from, to): (u64, u64) = (range.0.parse()?, range.1.parse()?);
    let clock = Env::system();
    let start = clock.clock().boot();
    let next = AtomicU64::new(from);
    let stop = AtomicBool::new(false);
    let failed: Mutex<Vec<Outcome>> = Mutex::default();
    let mut seconds = 0;
    std::thread::scope(|scope| {
        let work = || {
            let mut seconds = 0;
            while !stop.load(SeqCst) {
                let seed = next.fetch_add(1, SeqCst);
                if seed >= to {
                    break;
                }
                let outcome = run(seed, options);
                seconds += outcome.seconds;
                if let Some(violation) = &outcome.violation {
                    eprintln!(
                        "seed {seed} ({}, {}): {violation}\n  replay: {}",
                        outcome.scenario.name(),
                        outcome.faults,
                        command(args, seed)
                    );
                    let mut failed = failed.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
                    failed.push(outcome);
                    if failed.len() >= args.failures {
                        stop.store(true, SeqCst);
                    }
                }
            }
            seconds
        };
        let threads: Vec<_> = (0..args.jobs.max(1)).map(|_| scope.spawn(work)).collect();
        for thread in threads {
            seconds += thread.join().unwrap_or(0);
        }
    });
    let ran = next.load(SeqCst).min(to) - from;
    let took = clock.clock().boot().since(start).as_secs_f64();
    let failed = failed.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
    let rate = ran as f64 / took;
    println!(
        "{ran} seeds in {took:.1} s, {rate:.0} a second; {:.0} days of their own time; {} violations",
        seconds as f64 / 86_400.0,
        failed.len()
    );
    if let Some(path) = &args.ledger {
        let mut file = std::fs::OpenOptions::new().create(true).append(true).open(path)?;
        let faults = args.faults.as_deref().unwrap_or("drawn by seed");
        let scenario = options.scenario.map_or("all", Scenario::name);
        let result = match failed.first() {
            None => "held".to_owned(),
            Some(first) => format!("{} violations (first seed {})", failed.len(), first.seed),
        };
        let to = from + ran;
        writeln!(file, "{},{from}..{to},{scenario},{faults},{rate:.0},{result}", commit())?;
    }
    Ok(if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// How to see a seed again.
fn command(args: &Args, seed: u64) -> String {
    let mut text = "cargo run --release -p leasehold-sim".to_owned();
    if cfg!(feature = "mutants") {
        text.push_str(" --features mutants");
    }
    text.push_str(&format!(" -- --seed {seed}"));
    for (flag, value) in [
        ("scenario", &args.scenario),
        ("faults", &args.faults),
        ("mutant", &args.mutant),
        ("broken", &args.broken),
    ] {
        if let Some(value) = value {
            text.push_str(&format!(" --{flag} '{value}'"));
        }
    }
    text
}

/// Which code this is, as far as git can tell.
fn commit() -> String {
    let git = |args: &[&str]| {
        let done = Command::new("git").args(args).output().ok()?;
        done.status.success().then(|| String::from_utf8_lossy(&done.stdout).trim().to_owned())
    };
    let commit = git(&["rev-parse", "--short=12", "HEAD"]).unwrap_or_else(|| "unknown".to_owned());
    match git(&["status", "--porcelain", "--untracked-files=no", "crates"]).as_deref() {
        Some("") => commit,
        _ => format!("{commit}+"),
    }
}
