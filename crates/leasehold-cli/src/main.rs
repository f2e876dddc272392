//! The `leasehold` command: what a person touches.
//!
//! `args` says what can be asked, `config` where the store is, `commands` do it, and `render` says
//! how it looks. Everything that matters happens in the library.

mod args;
mod child;
mod clock;
mod commands;
mod config;
mod exit;
mod render;
mod supervised;
mod voice;

use std::process::ExitCode;

use clap::Parser as _;

use crate::args::{Args, Command, fleet};
use crate::exit::{Ending, Exit};

fn main() -> ExitCode {
    // The processes between us and what we run: nothing else is needed for them.
    if let Some(code) = child::entry() {
        return code;
    }
    let args = Args::try_parse().unwrap_or_else(|error| misunderstood(&error));
    let talks_into_a_pipe = match &args.command {
        Command::Supervise(supervise) => !supervise.print_unit,
        _ => args.supervised.is_some(),
    };
    raise_file_limit(&args);
    // Without it they talk as others do.
    let _voice = talks_into_a_pipe.then(|| voice::Voice::detach().ok());
    start_logging(&args);
    let outcome = run(&args);
    let ending = match outcome {
        Ok(ending) => ending,
        Err(error) => {
            // Whoever reads our output has seen enough: `leasehold ls | head`.
            if is_broken_pipe(&error) {
                return ExitCode::SUCCESS;
            }
            render::error(&error);
            Exit::of(&error).into()
        }
    };
    ending.into()
}

/// Says what is wrong with the arguments, and ends.
fn misunderstood(error: &clap::Error) -> ! {
    let words: Vec<_> = std::env::args_os().skip(1).collect();
    let has = |word: &str| words.iter().any(|given| given == word);
    let takes_command = has("elect") || has("run") || has("work") || has("update");
    if error.kind() == clap::error::ErrorKind::UnknownArgument && takes_command && !has("--") {
        let _ = error.print();
        render::say(
            "\nA command and its arguments go behind `--`: leasehold lock run deploy -- ./deploy.sh",
        );
        std::process::exit(2);
    }
    error.exit()
}

/// Each process that is run takes a handful of open files: 256 of a supervisor's, or a thousand jobs of a
/// worker's, are more than the thousand that most systems give at first. They allow more to those who ask.
fn raise_file_limit(args: &Args) {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    const ENOUGH: u64 = 8192;
    let runs_many = matches!(
        &args.command,
        Command::Supervise(_) | Command::Queue(args::queue::QueueCommand::Work(_))
    );
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if let (true, Some(now)) = (runs_many, current)
        && now < ENOUGH
    {
        let current = Some(maximum.map_or(ENOUGH, |most| most.min(ENOUGH)));
        // If not, it is told when there are too many.
        let _ = setrlimit(Resource::Nofile, Rlimit { current, maximum });
    }
}

fn run(args: &Args) -> anyhow::Result<Ending> {
    match &args.command {
        // These need no store.
        Command::Completions { shell } => commands::meta::completions(*shell).map(Ending::from),
        Command::Man { dir } => commands::meta::man(dir.as_deref()).map(Ending::from),
        Command::Demo(demo) => commands::demo::run(args, demo).map(Ending::from),
        Command::DemoWorker(worker) => {
            runtime(1)?.block_on(commands::demo::race::worker(worker)).map(Ending::from)
        }
        Command::Supervise(supervise) if supervise.print_unit => {
            commands::supervise::print_unit(args, supervise).map(Ending::from)
        }
        Command::Fleet(fleet::FleetCommand::Check { file }) => {
            commands::fleet::check(args, file).map(Ending::from)
        }
        #[cfg(feature = "torture")]
        Command::Torture(torture) => {
            runtime(4)?.block_on(commands::torture::run(args, torture)).map(Ending::from)
        }
        #[cfg(feature = "torture")]
        Command::TorturePlayer(player) => {
            runtime(1)?.block_on(commands::torture::player::run(args, player)).map(Ending::from)
        }
        // The doctor wants to be in many places at once.
        Command::Doctor { .. } => runtime(4)?.block_on(with_store(args)),
        // Shards are merged side by side.
        Command::Index(_) => {
            let cores = std::thread::available_parallelism().map_or(2, usize::from);
            runtime(cores.clamp(2, 8))?.block_on(with_store(args))
        }
        _ => runtime(1)?.block_on(with_store(args)),
    }
}

async fn with_store(args: &Args) -> anyhow::Result<Ending> {
    let mut connect = config::connect(args)?;
    let file = commands::lock::file_of(&args.command);
    if let Some(file) = file {
        // The lock of a file stands beside it, whatever the store is otherwise.
        connect.url = commands::lock::folder_of(file)?;
    }
    if matches!(args.command, Command::Doctor { .. }) {
        // Its races need a connection for everyone.
        connect.settings.connections = connect.settings.connections.max(16);
    }
    let mut store = connect.open()?;
    if file.is_some() {
        store = store.without_root_record();
    }
    if let Some(outcome) = run_locked(args, &store).await {
        return finish(args, &store, outcome);
    }
    let outcome = match &args.command {
        Command::Init => commands::objects::init(args, &store).await,
        Command::Doctor { forget, repair } => {
            commands::doctor::run(args, &store, *forget, *repair).await
        }
        Command::Ls(ls) => commands::objects::ls(args, &store, ls).await,
        Command::Cat { key } => commands::objects::cat(args, &store, key).await,
        Command::Stat { key } => commands::objects::stat(args, &store, key).await,
        Command::Put(put) => commands::objects::put(args, &store, put).await,
        Command::Rm(rm) => commands::objects::rm(args, &store, rm).await,
        Command::Completions { .. }
        | Command::Man { .. }
        | Command::Demo(_)
        | Command::Lock(_)
        | Command::Elect(_)
        | Command::Pad(_)
        | Command::Queue(_)
        | Command::Index(_)
        | Command::Supervise(_)
        | Command::Fleet(_)
        | Command::Nodes(_)
        | Command::Sync(_)
        | Command::DemoWorker(_) => unreachable!("handled before"),
        #[cfg(feature = "torture")]
        Command::Torture(_) | Command::TorturePlayer(_) => unreachable!("handled before"),
    };
    finish(args, &store, outcome.map(Ending::from))
}

/// Commands about locks, which may end with another program's exit code.
async fn run_locked(args: &Args, store: &leasehold::Store) -> Option<anyhow::Result<Ending>> {
    Some(match &args.command {
        Command::Lock(lock) => commands::lock::run(args, store, lock).await,
        Command::Elect(elect) => commands::lock::elect(args, store, elect).await,
        Command::Pad(pad) => commands::pad::run(args, store, pad).await,
        Command::Queue(queue) => commands::queue::run(args, store, queue).await,
        Command::Index(index) => commands::index::run(args, store, index).await,
        Command::Supervise(supervise) => commands::supervise::run(args, store, supervise).await,
        Command::Fleet(fleet) => commands::fleet::run(args, store, fleet).await,
        Command::Nodes(nodes) => commands::nodes::run(args, store, nodes).await,
        Command::Sync(sync) => commands::sync::run(args, store, sync).await,
        _ => return None,
    })
}

fn finish(
    args: &Args,
    store: &leasehold::Store,
    outcome: anyhow::Result<Ending>,
) -> anyhow::Result<Ending> {
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

/// Wherever in the chain it stands: writers of JSON and CSV have errors of their own around it.
fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let broken = |kind| kind == std::io::ErrorKind::BrokenPipe;
    error.chain().any(|error| {
        let io = error.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
        let json =
            error.downcast_ref::<serde_json::Error>().and_then(serde_json::Error::io_error_kind);
        let csv = error.downcast_ref::<csv::Error>().and_then(|error| match error.kind() {
            csv::ErrorKind::Io(error) => Some(error.kind()),
            _ => None,
        });
        io.or(json).or(csv).is_some_and(broken)
    })
}
