//! Runs the benchmarks of suites one after the other, into one report.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context as _, Error, Result, anyhow, ensure};

use crate::report::Report;
use crate::rig::Rig;

/// What every suite can be asked.
#[derive(Default, clap::Args)]
pub struct Options {
    /// Where the benchmarks write; they clean up after themselves. By default a temporary folder
    /// in ./target, or in $TMPDIR if there is no ./target.
    #[arg(long, value_name = "PATH")]
    pub dir: Option<PathBuf>,
    /// Shorter runs and smaller folders, nothing fetched: with more noise. All suites together take
    /// less than five minutes.
    #[arg(long, conflicts_with = "full")]
    pub quick: bool,
    /// Everything: the same as --peers --large.
    #[arg(long)]
    pub full: bool,
    /// One JSON document instead of a table.
    #[arg(long)]
    pub json: bool,
    /// Tables in Markdown.
    #[arg(long, conflicts_with = "json")]
    pub markdown: bool,
    /// Also what users would pick instead, in the same run; fetched into .peers/ the first time.
    /// Not every suite has some.
    #[arg(long)]
    pub peers: bool,
    /// Larger folders, where a suite has some: minutes more, and gigabytes of disk.
    #[arg(long)]
    pub large: bool,
    /// Only the benchmarks whose names contain this.
    #[arg(long, value_name = "NAME")]
    pub only: Option<String>,
    /// Where the plots go, if a suite has some.
    #[arg(long, value_name = "FOLDER")]
    pub plots: Option<PathBuf>,
}

/// A benchmark: measures something and adds rows to the report.
pub struct Bench {
    /// For `--only`.
    pub name: &'static str,
    /// Measures.
    pub run: fn(&Rig, &mut Report) -> Result<()>,
}

/// Benchmarks of one subject.
#[derive(Clone, Copy)]
pub struct Suite {
    pub name: &'static str,
    pub benches: &'static [Bench],
}

/// Runs suites and prints what they found. One benchmark that goes wrong does not keep the others
/// from running, but is an error in the end.
pub fn run(suites: &[Suite], options: &Options) -> Result<()> {
    let wanted =
        |bench: &&Bench| options.only.as_ref().is_none_or(|name| bench.name.contains(name));
    let any = suites.iter().any(|suite| suite.benches.iter().any(|bench| wanted(&bench)));
    ensure!(any, "no benchmark has such a name");
    let rig = Rig::new(options)?;
    let mut report = Report::new(&rig);
    if suites.len() > 1 && !rig.with_peers() {
        report.begin("all");
        report.not_run("peers", "not asked for: --full, or --peers, fetches and runs them");
    }
    for suite in suites {
        report.begin(suite.name);
        let start = Instant::now();
        for bench in suite.benches.iter().filter(wanted) {
            eprintln!("{}: {} …", suite.name, bench.name);
            // Servers for tests panic where they do not start.
            let run = AssertUnwindSafe(|| (bench.run)(&rig, &mut report));
            let done = catch_unwind(run).unwrap_or_else(|panic| Err(said(panic)));
            if let Err(error) = done {
                eprintln!("{}: {} FAILED: {error:#}", suite.name, bench.name);
                report.failed(bench.name, &error);
            }
        }
        report.took(start.elapsed());
    }
    report.finish();
    match options {
        Options { json: true, .. } => println!("{}", report.to_json()?),
        Options { markdown: true, .. } => print!("{}", report.to_markdown()),
        _ => print!("{report}"),
    }
    if let Some(folder) = &options.plots {
        std::fs::create_dir_all(folder)?;
        for chart in report.charts() {
            let path = folder.join(format!("{}.svg", chart.name));
            std::fs::write(&path, chart.to_svg())
                .with_context(|| format!("cannot write {}", path.display()))?;
        }
    }
    ensure!(report.is_whole(), "some benchmarks went wrong");
    Ok(())
}

/// What a panic said.
fn said(panic: Box<dyn Any + Send>) -> Error {
    let text = match panic.downcast::<String>() {
        Ok(text) => *text,
        Err(panic) => {
            panic.downcast::<&str>().map_or_else(|_| "a panic".to_owned(), |text| text.to_string())
        }
    };
    anyhow!("{}", text.lines().next().unwrap_or_default().to_owned())
}
