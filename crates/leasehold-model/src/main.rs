//! Checks the models:
//! `cargo run --release -p leasehold-model -- [--deep] [--faults N] [--ticks N] [--seconds N] [NAME…]`.

use leasehold_model::suite::{self, Limits};

fn main() -> std::process::ExitCode {
    let mut limits = Limits::default();
    let mut names = Vec::new();
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut number = || args.next().and_then(|text| text.parse::<u8>().ok());
        match arg.as_str() {
            "--deep" => limits.deep = true,
            "--faults" => limits.faults = number(),
            "--ticks" => limits.ticks = number(),
            "--seconds" => limits.seconds = number().map(Into::into),
            _ => names.push(arg),
        }
    }
    if names.is_empty() {
        names.extend(suite::names().iter().map(|name| (*name).to_owned()));
    }
    let mut fine = true;
    for name in &names {
        // How long it took is for people, and decides nothing.
        #[allow(clippy::disallowed_methods)]
        let began = std::time::Instant::now();
        match suite::run(name, limits) {
            Some(report) => {
                println!("{report} ({:.1} s)", began.elapsed().as_secs_f64());
                fine &= report.is_fine();
            }
            None => {
                eprintln!("no model {name:?}: there are {}", suite::names().join(", "));
                fine = false;
            }
        }
    }
    match fine {
        true => std::process::ExitCode::SUCCESS,
        false => std::process::ExitCode::FAILURE,
    }
}
