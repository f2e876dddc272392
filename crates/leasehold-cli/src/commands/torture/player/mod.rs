//! One of the processes: uses locks, registers, the queue and the index, all at once, and writes down
//! what it does and is told. It does not know that it will be killed.

mod index;
mod locks;
mod queue;

use std::io::Read as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use anyhow::Context as _;
use leasehold::env::Env;
use leasehold::index::{Index, IndexSettings};
use leasehold::queue::Queue;
use leasehold::{Error, ErrorKind, Store};
use tokio_util::sync::CancellationToken;

use super::faults::{Spoiler, spoil};
use super::log::{Answer, Log, Said};
use super::plan::{Dice, Faults, INDEX, Plan, QUEUE};
use crate::args::Args;
use crate::args::torture::TorturePlayer;
use crate::config;
use crate::exit::Exit;

/// What all parts of a player share.
pub struct Player {
    pub plan: Plan,
    pub log: Log,
    pub name: String,
    pub store: Store,
    pub queue: Queue,
    pub index: Index,
    pub stop: CancellationToken,
    things: AtomicU64,
}

/// How often it tells what it used.
const TALLY: Duration = Duration::from_millis(250);

/// Plays until standard input ends, or finishes what is there.
pub async fn run(args: &Args, me: &TorturePlayer) -> anyhow::Result<Exit> {
    die_with_parent();
    let stop = CancellationToken::new();
    let heard = stop.clone();
    std::thread::spawn(move || {
        // Whatever comes, or the end.
        let _ = std::io::stdin().lock().read(&mut [0; 1]);
        heard.cancel();
    });
    let plan = Plan::read(&me.evidence)?;
    let env = Env::system();
    let name = format!("p{}.{}", me.player, me.life);
    let log = Log::create(&me.evidence.join("logs").join(format!("{name}.jsonl")), env.clone())?;
    let dice = |part: u64| Dice::new(plan.seed, &[me.player.into(), me.life.into(), part]);
    let mut connect = config::connect(args)?;
    connect.settings = Plan::store_settings(connect.settings);
    let settings = connect.settings.clone();
    let mut store = plan.adapt(connect.open()?);
    let mut spoiler = None;
    if plan.faults == Faults::InProcess {
        let made = Arc::new(Spoiler::new(plan.clone(), env, dice(0)));
        store = plan.adapt(spoil(&store, made.clone(), settings)?);
        spoiler = Some(made);
    }
    let tally = || Said::Tally {
        usage: store.usage(),
        faults: spoiler.as_ref().map(|spoiler| spoiler.done()).unwrap_or_default(),
    };
    let Some((queue, index)) = open(&plan, &store, &log, &stop).await? else {
        return Ok(Exit::Done);
    };
    let player = Arc::new(Player {
        plan: plan.clone(),
        log,
        name,
        store: store.clone(),
        queue,
        index,
        stop: stop.clone(),
        things: AtomicU64::new(0),
    });
    let mut parts = tokio::task::JoinSet::new();
    if me.drain {
        parts.spawn(queue::drain(player.clone()));
        parts.spawn(locks::drain(player.clone()));
        parts.spawn(index::drain(player.clone()));
    } else {
        parts.spawn(locks::play_locks(player.clone(), dice(1)));
        parts.spawn(locks::play_locks(player.clone(), dice(2)));
        parts.spawn(locks::play_registers(player.clone(), dice(3)));
        parts.spawn(locks::play_files(player.clone(), dice(4)));
        parts.spawn(queue::push(player.clone(), dice(5)));
        parts.spawn(queue::work(player.clone(), dice(6)));
        parts.spawn(index::write(player.clone(), dice(7)));
        parts.spawn(index::read(player.clone(), dice(8)));
        parts.spawn(index::compact(player.clone(), dice(9)));
    }
    loop {
        let joined = tokio::time::timeout(TALLY, parts.join_next()).await;
        player.log.say(tally());
        match joined {
            Ok(None) => return Ok(Exit::Done),
            Ok(Some(ended)) => ended.context("a part of the player panicked")?,
            Err(_) => {}
        }
    }
}

/// The queue and the index, which are there: asked for until the store answers.
async fn open(
    plan: &Plan,
    store: &Store,
    log: &Log,
    stop: &CancellationToken,
) -> anyhow::Result<Option<(Queue, Index)>> {
    while !stop.is_cancelled() {
        let opened = async {
            let queue = Queue::open(store, QUEUE).await?;
            let index = Index::open(store, INDEX).await?;
            Ok::<_, Error>((queue, index))
        };
        match opened.await {
            Ok((Some(queue), index)) => {
                let settings = IndexSettings { lock_ttl: plan.ttl, ..index.settings().clone() };
                return Ok(Some((queue, index.with_settings(settings))));
            }
            Ok((None, _)) => anyhow::bail!("the queue is gone"),
            Err(error) if error.kind() == ErrorKind::Unavailable => {}
            Err(error) => {
                log.say(Said::Odd(format!("opening: {error:?}")));
                return Err(error.into());
            }
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    Ok(None)
}

impl Player {
    fn stopped(&self) -> bool {
        self.stop.is_cancelled()
    }

    /// Waits, unless it is over.
    async fn pause(&self, span: Duration) {
        tokio::select! {
            () = tokio::time::sleep(span) => {}
            () = self.stop.cancelled() => {}
        }
    }

    /// A name that nothing else in this run has.
    fn unique(&self) -> String {
        format!("{}-{}", self.name, self.things.fetch_add(1, Relaxed))
    }

    /// What an error answers: nothing. One that no fault explains is written down.
    fn unknown(&self, doing: &str, error: &Error) -> Answer {
        self.explain(doing, error);
        Answer::Unknown { error: error.to_string() }
    }

    fn explain(&self, doing: &str, error: &Error) {
        if !matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Lost | ErrorKind::Held) {
            self.log.say(Said::Odd(format!("{doing}: {error:?}")));
        }
    }
}

/// Nobody is left behind when the conductor is killed.
fn die_with_parent() {
    #[cfg(target_os = "linux")]
    {
        let signal = Some(rustix::process::Signal::KILL);
        let _ = rustix::process::set_parent_process_death_signal(signal);
    }
}
