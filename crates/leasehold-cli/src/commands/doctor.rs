//! `leasehold doctor`.

use leasehold::Store;
use leasehold::store::doctor::{Check, Doctor, Outcome, Report, Verdict};

use crate::args::Args;
use crate::exit::Exit;
use crate::render::{self, BAD, DIM, GOOD, WARN, paint};

/// Examines the store, showing each check as it ends.
pub async fn run(args: &Args, store: &Store, forget: bool, repair: bool) -> anyhow::Result<Exit> {
    let show = !args.json && !args.quiet;
    if show {
        render::line(format_args!("examining {}", store.url()))?;
    }
    let mut doctor = Doctor::new(store);
    if forget {
        doctor = doctor.forget();
    }
    if repair {
        doctor = doctor.repair();
    }
    let report = tokio::select! {
        report = doctor.run(|check| if show { show_check(check) }) => report?,
        _ = tokio::signal::ctrl_c() => {
            render::say("interrupted: removing what was written");
            doctor.clean_up().await?;
            return Ok(Exit::Unavailable);
        }
    };
    match args.json {
        true => render::json(&report)?,
        false => show_report(&report)?,
    }
    Ok(match report.verdict {
        Verdict::Safe => Exit::Done,
        Verdict::UsableWithLimits => Exit::Failed,
        Verdict::Damaged | Verdict::Unsafe => Exit::Usage,
    })
}

fn show_check(check: &Check) {
    let mark = match check.outcome {
        Outcome::Pass => paint(GOOD, "ok   "),
        Outcome::Limit => paint(WARN, "limit"),
        Outcome::Fail => paint(BAD, "FAIL "),
    };
    let _ = render::line(format_args!("  {mark}  {:<28} {}", check.what, check.detail));
}

fn show_report(report: &Report) -> anyhow::Result<()> {
    let mut table = render::table(&["verb", "p50", "p99", "samples"], &[1, 2, 3]);
    for row in &report.latencies {
        let millis = |time: f64| format!("{time:.2} ms");
        table.add_row([
            row.verb.to_owned(),
            millis(row.p50_ms),
            millis(row.p99_ms),
            row.samples.to_string(),
        ]);
    }
    render::line(format_args!("\n{table}\n"))?;
    for warning in &report.warnings {
        render::line(format_args!("{} {warning}", paint(WARN, "warning:")))?;
    }
    if let Some(left) = &report.left_behind {
        render::line(format_args!("{} {left}", paint(WARN, "left behind:")))?;
    }
    let failed = |outcome: Outcome| report.checks.iter().filter(|c| c.outcome == outcome).count();
    let verdict = match report.verdict {
        Verdict::Safe => paint(GOOD.bold(), "safe"),
        Verdict::UsableWithLimits => format!(
            "{}: {} of the checks named what this store cannot do; Leasehold does without",
            paint(WARN.bold(), "usable with limits"),
            failed(Outcome::Limit)
        ),
        Verdict::Damaged => format!(
            "{}: leasehold.json cannot be read, and nobody can write here. If this is the right place, \
             `leasehold doctor --repair` writes a new one; everything else stays",
            paint(BAD.bold(), "damaged")
        ),
        Verdict::Unsafe => format!(
            "{}: locks would be held twice or data lost; Leasehold refuses this store",
            paint(BAD.bold(), "unsafe")
        ),
    };
    render::line(format_args!("{} is {verdict}", report.store))?;
    let noted = match report.recorded {
        _ if report.verdict == Verdict::Damaged => "not noted",
        true => "noted in leasehold.json, where every node reads it",
        false => "not noted: there is no leasehold.json here yet",
    };
    render::line(paint(DIM, format_args!("{noted}; it took {} requests", report.usage.requests())))
}
