//! Runs the benchmarks of a suite one after the other.

use std::path::PathBuf;

use anyhow::{Result, ensure};

use crate::report::Report;
use crate::rig::Rig;

/// What every suite can be asked.
#[derive(Default, clap::Args)]
pub struct Options {
    /// Where the benchmarks write; they clean up after themselves. By default a temporary folder
    /// in ./target, or in $TMPDIR if there is no ./target.
    #[arg(long, value_name = "PATH")]
    pub dir: Option<PathBuf>,
    /// Shorter runs and smaller folders: within a minute, with more noise.
    #[arg(long)]
    pub quick: bool,
    /// One JSON document instead of a table.
    #[arg(long)]
    pub json: bool,
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
}

/// A benchmark: measures something and adds rows to the report.
pub struct Bench {
    /// For `--only`.
    pub name: &'static str,
    /// Measures.
    pub run: fn(&Rig, &mut Report) -> Result<()>,
}

/// Runs a suite and prints its report.
pub fn run(suite: &str, benches: &[Bench], options: &Options) -> Result<()> {
    let wanted =
        |bench: &&Bench| options.only.as_ref().is_none_or(|name| bench.name.contains(name));
    let benches: Vec<&Bench> = benches.iter().filter(wanted).collect();
    ensure!(!benches.is_empty(), "no benchmark of {suite} has such a name");
    let rig = Rig::new(options)?;
    let mut report = Report::new(suite, &rig);
    for bench in benches {
        eprintln!("{suite}: {} …", bench.name);
        (bench.run)(&rig, &mut report)?;
    }
    report.finish();
    match options.json {
        true => println!("{}", report.to_json()?),
        false => print!("{report}"),
    }
    Ok(())
}
