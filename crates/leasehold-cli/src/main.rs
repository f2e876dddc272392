//! The `leasehold` command: what a person touches.
//!
//! `args` says what can be asked, `config` where the store is, `commands` do it, and `render` says
//! how it looks. Everything that matters happens in the library.

mod args;
mod commands;
mod config;
mod exit;
mod render;

use std::process::ExitCode;

use clap::Parser as _;

use crate::args::{Args, Command};
use crate::exit::Exit;

fn main() -> ExitCode {
    let args = Args::parse();
    start_logging(&args);
    let outcome = run(&args);
    let exit = match outcome {
        Ok(exit) => exit,
        Err(error) => {
            // Whoever reads our output has seen enough: `leasehold ls | head`.
            if is_broken_pipe(&error) {
                return ExitCode::SUCCESS;
            }
            render::error(&error);
            Exit::of(&error)
        }
    };
    ExitCode::from(exit as u8)
}

fn run(args: &Args) -> anyhow::Result<Exit> {
    match &args.command {
        // These need no store.
        Command::Completions { shell } => commands::meta::completions(*shell),
        Command::Man => commands::meta::man(),
        Command::Demo(demo) => commands::demo::run(args, demo),
        Command::DemoWorker(worker) => runtime(1)?.block_on(commands::demo::worker(worker)),
        // The doctor wants to be in many places at once.
        Command::Doctor { .. } => runtime(4)?.block_on(with_store(args)),
        _ => runtime(1)?.block_on(with_store(args)),
    }
}

async fn with_store(args: &Args) -> anyhow::Result<Exit> {
    let mut connect = config::connect(args)?;
    if matches!(args.command, Command::Doctor { .. }) {
        // Its races need a connection for everyone.
        connect.settings.connections = connect.settings.connections.max(16);
    }
    let store = connect.open()?;
    let outcome = match &args.command {
        Command::Init => commands::objects::init(args, &store).await,
        Command::Doctor { forget } => commands::doctor::run(args, &store, *forget).await,
        Command::Ls(ls) => commands::objects::ls(args, &store, ls).await,
        Command::Cat { key } => commands::objects::cat(args, &store, key).await,
        Command::Stat { key } => commands::objects::stat(args, &store, key).await,
        Command::Put(put) => commands::objects::put(args, &store, put).await,
        Command::Rm(rm) => commands::objects::rm(args, &store, rm).await,
        Command::Completions { .. } | Command::Man | Command::Demo(_) | Command::DemoWorker(_) => {
            unreachable!("handled without a store")
        }
    };
    // What a failed command cost is part of what it cost.
    if args.stats {
        render::receipt(&store.url(), &store.usage(), store.kind(), args.json);
    }
    outcome
}

fn runtime(threads: usize) -> anyhow::Result<tokio::runtime::Runtime> {
    let mut builder = match threads {
        1 => tokio::runtime::Builder::new_current_thread(),
        _ => tokio::runtime::Builder::new_multi_thread(),
    };
    Ok(builder.worker_threads(threads).enable_all().build()?)
}

/// Our own words by `-v` and `-vv`, those of the libraries below only from `-vvv` on.
fn start_logging(args: &Args) {
    use tracing_subscriber::filter::{LevelFilter, Targets};
    use tracing_subscriber::layer::SubscriberExt as _;
    use tracing_subscriber::util::SubscriberInitExt as _;
    let (ours, theirs) = match (args.quiet, args.verbose) {
        (true, _) => (LevelFilter::ERROR, LevelFilter::ERROR),
        (false, 0) => (LevelFilter::WARN, LevelFilter::ERROR),
        (false, 1) => (LevelFilter::INFO, LevelFilter::WARN),
        (false, 2) => (LevelFilter::DEBUG, LevelFilter::WARN),
        (false, _) => (LevelFilter::TRACE, LevelFilter::DEBUG),
    };
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .without_time()
        .with_target(false);
    let filter = Targets::new().with_default(theirs).with_target("leasehold", ours);
    tracing_subscriber::registry().with(filter).with(lines).init();
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .downcast_ref::<std::io::Error>()
        .is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}
