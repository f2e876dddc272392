//! Compiling, once and for ever.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use leasehold::index::{
    CompactOptions, Compaction, Compiler, CompilerSettings, Index, Outcome, Pass, Trigger,
};
use leasehold::{Error, ErrorKind, Store};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::open;
use crate::args::Args;
use crate::args::index::{Compact, Compile, Terms};
use crate::exit::Exit;
use crate::render::{self, WARN, paint};
use crate::supervised::{self, Leash, Report};

fn options(terms: &Terms) -> CompactOptions {
    let usual = CompactOptions::default();
    let mut trigger = Trigger::default();
    for one in &terms.trigger {
        trigger.count = one.count.or(trigger.count);
        trigger.bytes = one.bytes.or(trigger.bytes);
        trigger.age = one.age.or(trigger.age);
    }
    CompactOptions {
        lock: !terms.no_lock,
        trigger,
        parallel: usize::from(terms.parallel),
        worker: terms.worker.clone().unwrap_or(usual.worker),
        ..usual
    }
}

/// `leasehold index compact`.
pub async fn compact(args: &Args, index: &Index, compact: &Compact) -> anyhow::Result<Exit> {
    let options = CompactOptions { rewrite: compact.rewrite, ..options(&compact.terms) };
    let pass = match compact.shard {
        Some(shard) if shard.width() != index.package().width => {
            let digits = index.package().width.digits();
            return Err(super::invalid(format!("shards of this index have {digits} digits")).into());
        }
        Some(shard) => {
            Pass { shards: vec![index.compact_one(shard, &options).await?], failed: Vec::new() }
        }
        None => index.compact_with(&options).await?,
    };
    tell(args, index, &pass)?;
    pass.into_result()?;
    Ok(Exit::Done)
}

/// `leasehold index purge`.
pub async fn purge(args: &Args, index: &Index, age: Duration, force: bool) -> anyhow::Result<Exit> {
    let pass = index.purge(age, force, &CompactOptions::default()).await?;
    let purged: u64 = pass.shards.iter().map(|done| done.counts.purged).sum();
    match args.json {
        true => render::json(&json!({ "purged": purged }))?,
        false if args.quiet => {}
        false => render::line(format_args!("{purged} deletions forgotten"))?,
    }
    pass.into_result()?;
    Ok(Exit::Done)
}

/// How many pauses pass before it is looked whether there are new indexes.
const LOOK_EVERY: u32 = 6;

/// Finds indexes, each once.
struct Finder {
    store: Store,
    known: BTreeSet<String>,
    /// Folders that are no index: told once.
    others: BTreeSet<String>,
}

impl Finder {
    fn new(store: &Store) -> Self {
        Self { store: store.clone(), known: BTreeSet::new(), others: BTreeSet::new() }
    }

    /// The indexes that were not there the last time. Those that cannot be read do not keep the others
    /// from being compiled.
    async fn news(&mut self) -> Result<Vec<Index>, Error> {
        let mut news = Vec::new();
        for name in Index::names(&self.store).await? {
            if self.known.contains(&name) {
                continue;
            }
            let why = match Index::find(&self.store, &name).await {
                Ok(Some(index)) => {
                    news.push(index);
                    self.others.remove(&name);
                    self.known.insert(name);
                    continue;
                }
                Ok(None) => "it has no datapackage.json".to_owned(),
                Err(error) if error.kind() == ErrorKind::Unavailable => return Err(error),
                Err(error) => error.to_string(),
            };
            if self.others.insert(name.clone()) {
                tracing::warn!(%name, why, "this is no index, and is not compiled");
            }
        }
        Ok(news)
    }

    /// Looks again and again, and tells of new ones, until it is told to stop.
    async fn run(
        mut self,
        pause: Duration,
        tell: mpsc::Sender<Index>,
        stop: CancellationToken,
    ) -> anyhow::Result<()> {
        let pause = pause.saturating_mul(LOOK_EVERY).max(Duration::from_secs(1));
        while stop.run_until_cancelled(tokio::time::sleep(pause)).await.is_some() {
            match self.news().await {
                Ok(news) => {
                    for index in news {
                        // Nobody listens any more only when it is over.
                        let _ = tell.send(index).await;
                    }
                }
                Err(error) => tracing::warn!(%error, "cannot look for new indexes; trying again"),
            }
        }
        Ok(())
    }
}

/// `leasehold index compile`: until a signal.
pub async fn compile(args: &Args, store: &Store, compile: &Compile) -> anyhow::Result<Exit> {
    let stop = CancellationToken::new();
    let mut running = tokio::task::JoinSet::new();
    let (tell_new, mut new) = mpsc::channel(1);
    let mut indexes = Vec::new();
    match compile.indexes.is_empty() {
        true => {
            let mut finder = Finder::new(store);
            indexes = finder.news().await?;
            running.spawn(finder.run(compile.pause, tell_new, stop.clone()));
        }
        false => {
            for name in &compile.indexes {
                indexes.push(open(store, name).await?);
            }
        }
    }
    let signal = stop.clone();
    let mut leash = Leash::take(args, store);
    let cut = leash.as_ref().map(Leash::cut);
    tokio::spawn(async move {
        tokio::select! {
            () = ended() => {}
            () = supervised::cut(cut.as_ref()) => {}
        }
        signal.cancel();
    });
    // What a supervisor is told goes where passes are shown otherwise.
    let supervised = leash.is_some();
    let show = Shown { json: args.json && !supervised, quiet: args.quiet || supervised };
    let tally = Arc::new(Mutex::new(Report::default()));
    let run = |index: Index| {
        let (stop, tally) = (stop.clone(), tally.clone());
        let settings = CompilerSettings { options: options(&compile.terms), pause: compile.pause };
        let compiler = Compiler::new(&index, settings);
        async move {
            let mut told = Ok(());
            let run = compiler.run(stop.clone(), |pass| {
                count(&tally, &index, pass);
                told = show.pass(&index, pass);
                if told.is_err() {
                    stop.cancel();
                }
            });
            run.await?;
            told
        }
    };
    for index in indexes {
        running.spawn(run(index));
    }
    let mut tick = tokio::time::interval(supervised::REPORT);
    let mut tell = || {
        if let Some(leash) = &mut leash {
            let counted = tally.lock().unwrap_or_else(PoisonError::into_inner).clone();
            leash.tell(Report { usage: store.usage(), ..counted });
        }
    };
    let mut outcome = Ok(());
    loop {
        tokio::select! {
            _ = tick.tick(), if supervised => tell(),
            Some(index) = new.recv() => {
                running.spawn(run(index));
            }
            done = running.join_next() => {
                let Some(done) = done else { break };
                outcome = outcome.and(done.map_err(Into::into).and_then(|done| done));
                // One index that cannot be compiled any more: the others end what they are at.
                stop.cancel();
            }
        }
    }
    tell();
    outcome.map(|()| Exit::Done)
}

/// Adds a pass to what a supervisor is told.
fn count(tally: &Mutex<Report>, index: &Index, pass: &Pass) {
    let mut tally = tally.lock().unwrap_or_else(PoisonError::into_inner);
    tally.done += pass.records();
    tally.failed += pass.failed.len() as u64;
    if let Some((shard, error)) = pass.failed.first() {
        let text = format!("{}, shard {shard}: {error}", index.name());
        tally.error = Some(leasehold::protocol::format::node::shortened(&text));
    }
}

#[cfg(unix)]
async fn ended() {
    use tokio::signal::unix::{SignalKind, signal};
    let Ok(mut term) = signal(SignalKind::terminate()) else { return };
    tokio::select! {
        _ = tokio::signal::ctrl_c() => {}
        _ = term.recv() => {}
    }
}

#[cfg(not(unix))]
async fn ended() {
    let _ = tokio::signal::ctrl_c().await;
}

fn tell(args: &Args, index: &Index, pass: &Pass) -> anyhow::Result<()> {
    Shown { json: args.json, quiet: args.quiet }.pass(index, pass)
}

#[derive(Clone, Copy)]
struct Shown {
    json: bool,
    quiet: bool,
}

fn outcome(done: &Compaction) -> &'static str {
    match done.outcome {
        Outcome::Idle => "idle",
        Outcome::Locked { .. } => "locked",
        Outcome::Unchanged => "unchanged",
        Outcome::Published => "published",
        Outcome::Refused => "refused",
        Outcome::Aborted { .. } => "aborted",
    }
}

fn to_json(done: &Compaction) -> Value {
    json!({
        "shard": done.shard.to_string(),
        "outcome": outcome(done),
        "counts": done.counts,
        "bytes": done.bytes,
        "swept": done.swept,
        "left": done.left,
    })
}

impl Shown {
    fn pass(self, index: &Index, pass: &Pass) -> anyhow::Result<()> {
        if self.json {
            for done in &pass.shards {
                render::json(&to_json(done))?;
            }
            return Ok(());
        }
        if self.quiet {
            return Ok(());
        }
        let count = |name: &str| pass.shards.iter().filter(|done| outcome(done) == name).count();
        let sum = |of: fn(&Compaction) -> u64| pass.shards.iter().map(of).sum::<u64>();
        let mut text = format!(
            "{}: {} records into {} shards",
            index.name(),
            pass.records(),
            count("published")
        );
        for (name, what) in [
            ("unchanged", "unchanged"),
            ("locked", "left to other compilers"),
            ("refused", "written by others first"),
            ("aborted", "given up"),
        ] {
            if count(name) > 0 {
                text.push_str(&format!(", {} {what}", count(name)));
            }
        }
        if sum(|done| done.counts.quarantined) > 0 {
            let bad = sum(|done| done.counts.quarantined);
            text.push_str(&paint(WARN, format_args!(", {bad} rows put into quarantine")));
        }
        if sum(|done| done.left) > 0 {
            let left = sum(|done| done.left);
            text.push_str(&paint(
                WARN,
                format_args!(", {left} files of other tools left in place"),
            ));
        }
        render::line(text)
    }
}
