//! What can be asked of `torture`.

use std::path::PathBuf;

use clap::Args as ClapArgs;

#[derive(Debug, ClapArgs)]
pub struct Torture {
    /// For how long processes are killed and stopped; draining and checking come on top
    #[arg(short, long, value_name = "M", default_value_t = 1.0, value_parser = minutes)]
    pub minutes: f64,

    /// How many processes play
    #[arg(short = 'n', long, value_name = "N", default_value_t = 6, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub processes: u32,

    /// What decides about kills, pauses, faults and operations [default: random]
    #[arg(long, value_name = "S")]
    pub seed: Option<u64>,

    /// Keep the logs in this new folder, and the objects in the store
    #[arg(long, value_name = "DIR")]
    pub keep: Option<PathBuf>,

    /// How often somebody is killed per minute
    #[arg(long, value_name = "N", default_value_t = 60, value_parser = clap::value_parser!(u32).range(0..=600))]
    pub kills: u32,

    /// Go on although the doctor says that the store is unsafe
    #[arg(long)]
    pub anyway: bool,

    /// Only check the logs that were kept in this folder
    #[arg(long, value_name = "DIR", conflicts_with_all = ["keep", "seed", "anyway"])]
    pub check: Option<PathBuf>,
}

fn minutes(text: &str) -> Result<f64, String> {
    let minutes: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    match (0.05..=10_080.0).contains(&minutes) {
        true => Ok(minutes),
        false => Err("between 0.05 and 10080".to_owned()),
    }
}

/// One of the processes.
#[derive(Debug, ClapArgs)]
pub struct TorturePlayer {
    /// Where the plan and the logs are
    pub evidence: PathBuf,
    /// Which player
    pub player: u32,
    /// Which life of it
    pub life: u32,
    /// Finish what is there instead of playing
    #[arg(long)]
    pub drain: bool,
}
