//! How a torture came out, for people and for programs.

use std::path::Path;

use leasehold::store::Kind;
use leasehold::store::meter::Prices;
use serde::Serialize;

use super::check::{Property, Report};
use super::plan::{Faults, Plan};
use crate::args::Args;
use crate::args::torture::Torture;
use crate::exit::Exit;
use crate::render::{self, BAD, DIM, GOOD, WARN, paint};

/// Says what is going to happen.
pub fn announce(args: &Args, torture: &Torture, plan: &Plan) -> anyhow::Result<()> {
    if args.json || args.quiet {
        return Ok(());
    }
    render::line(format_args!(
        "{} processes share {} for {} minutes, and are killed {} times a minute.\n\
         Answers are spoilt {}. The seed is {}.",
        plan.processes,
        plan.store,
        torture.minutes,
        torture.kills,
        how(plan.faults),
        plan.seed
    ))
}

fn how(faults: Faults) -> &'static str {
    match faults {
        Faults::Proxy => "by an HTTP proxy between them and the store",
        Faults::InProcess => {
            "in each process, between the library and the store (no proxy can be put there)"
        }
    }
}

#[derive(Serialize)]
struct Verdict<'a> {
    holds: bool,
    store: &'a str,
    seed: u64,
    processes: u32,
    seconds: f64,
    /// Whether it ended earlier than it was meant to.
    interrupted: bool,
    faults_by: Faults,
    evidence: &'a Path,
    dollars: f64,
    #[serde(flatten)]
    report: &'a Report,
}

/// Says how it came out, and leaves it with the evidence.
pub fn give(args: &Args, plan: &Plan, report: &Report, evidence: &Path) -> anyhow::Result<Exit> {
    let prices = Prices::of(kind(&plan.store));
    let verdict = Verdict {
        holds: report.holds(),
        store: &plan.store,
        seed: plan.seed,
        processes: plan.processes,
        seconds: (plan.end - plan.begin) as f64 / 1e9,
        interrupted: plan.interrupted,
        faults_by: plan.faults,
        evidence,
        dollars: report.usage.dollars(&prices),
        report,
    };
    let _ = std::fs::write(evidence.join("verdict.json"), serde_json::to_vec_pretty(&verdict)?);
    match args.json {
        true => render::json(&verdict)?,
        false => show(args, &verdict)?,
    }
    Ok(if verdict.holds { Exit::Done } else { Exit::Failed })
}

/// Of a store's URL.
fn kind(url: &str) -> Kind {
    match url.split_once("://") {
        Some(("s3", _)) => Kind::S3,
        Some(("gs", _)) => Kind::Gcs,
        Some(("az", _)) => Kind::Azure,
        _ => Kind::Directory,
    }
}

fn show(args: &Args, verdict: &Verdict<'_>) -> anyhow::Result<()> {
    let Verdict { report, .. } = verdict;
    if !args.quiet {
        let mut table = render::table(&[], &[1]);
        let mut row = |what: &str, count: String| {
            table.add_row([what.to_owned(), count]);
        };
        row("seconds", format!("{:.0}", verdict.seconds));
        row("operations", report.operations.to_string());
        row("  never answered", report.open.to_string());
        row("processes started", report.lives.to_string());
        row("  killed (kill -9)", report.kills.to_string());
        row("  stopped for a while", report.pauses.to_string());
        row("locks and tasks taken over", report.takeovers.to_string());
        row("tasks completed", report.completed.to_string());
        row("  given up", report.given_up.to_string());
        row("  started once more after that", report.late_starts.to_string());
        row("faults", report.faults.values().sum::<u64>().to_string());
        for (kind, count) in &report.faults {
            row(&format!("  {kind}"), count.to_string());
        }
        row("requests", report.usage.requests().to_string());
        if verdict.dollars > 0.0 {
            row("  dollars at list price", format!("{:.4}", verdict.dollars));
        }
        render::line(format_args!("\n{table}\n"))?;
    }
    for property in &report.properties {
        show_property(property)?;
    }
    if verdict.interrupted {
        render::line(format_args!("\n{}: not all was played", paint(WARN.bold(), "interrupted")))?;
    }
    match verdict.holds {
        true => render::line(format_args!("\n{}", paint(GOOD.bold(), "everything holds"))),
        false => {
            render::line(format_args!("\n{}", paint(BAD.bold(), "NOT EVERYTHING HOLDS")))?;
            let evidence = verdict.evidence.display();
            render::line(paint(
                DIM,
                format_args!(
                    "logs: {evidence}/logs, one file per life of a process; times are nanoseconds of \
                     the boot clock\nall that is broken: {evidence}/verdict.json\n\
                     check again: leasehold torture --check {evidence}\n\
                     of one key, in order of time: cat {evidence}/logs/*.jsonl | grep KEY | sort"
                ),
            ))
        }
    }
}

fn show_property(property: &Property) -> anyhow::Result<()> {
    let mark = match (property.broken.is_empty(), property.undecided.is_empty()) {
        (true, true) => paint(GOOD, "yes"),
        (true, false) => paint(WARN, "???"),
        (false, _) => paint(BAD.bold(), "NO "),
    };
    render::line(format_args!("  {mark}  {:<62} {:>8}", property.name, property.checked))?;
    let bad = property.broken.iter().chain(&property.undecided);
    for story in bad.clone().take(3) {
        render::line(format_args!("       {story}"))?;
    }
    let more = bad.count().saturating_sub(3);
    match more {
        0 => Ok(()),
        _ => render::line(format_args!("       and {more} more")),
    }
}
