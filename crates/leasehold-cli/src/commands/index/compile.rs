//! Compiling, once and for ever.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use leasehold::Store;
use leasehold::index::{
    CompactOptions, Compaction, Compiler, CompilerSettings, Index, Outcome, Pass, Trigger,
};
use serde_json::{Value, json};
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

/// `leasehold index compile`: until a signal.
pub async fn compile(args: &Args, store: &Store, compile: &Compile) -> anyhow::Result<Exit> {
    let names = match compile.indexes.is_empty() {
        true => Index::names(store).await?,
        false => compile.indexes.clone(),
    };
    let stop = CancellationToken::new();
    let mut compilers = Vec::new();
    for name in &names {
        let index = open(store, name).await?;
        let settings = CompilerSettings { options: options(&compile.terms), pause: compile.pause };
        compilers.push((index.clone(), Compiler::new(&index, settings)));
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
    let mut running = tokio::task::JoinSet::new();
    // What a supervisor is told goes where passes are shown otherwise.
    let supervised = leash.is_some();
    let show = Shown { json: args.json && !supervised, quiet: args.quiet || supervised };
    let tally = Arc::new(Mutex::new(Report::default()));
    for (index, compiler) in compilers {
        let (stop, tally) = (stop.clone(), tally.clone());
        running.spawn(async move {
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
        });
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
