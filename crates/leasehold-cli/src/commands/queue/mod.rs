//! `leasehold queue …`.

mod log;
mod push;
mod show;
mod work;

use leasehold::queue::{Mode, Queue, QueueSettings, usual_settings};
use leasehold::{Error, ErrorKind, Store};
use serde_json::json;

use crate::args::Args;
use crate::args::queue::{Purge, QueueCommand, QueueMode, QueueTerms};
use crate::commands::sync;
use crate::exit::{Ending, Exit};
use crate::render;

/// Does what was asked.
pub async fn run(args: &Args, store: &Store, command: &QueueCommand) -> anyhow::Result<Ending> {
    let done = Ok(Exit::Done.into());
    match command {
        QueueCommand::Create { queue, settings } => {
            without_comma(queue)?;
            let mut usual = usual_settings(store.kind());
            apply(settings, &mut usual);
            let queue = Queue::create(store, queue, usual).await?;
            show::settings(args, &queue)?;
            done
        }
        QueueCommand::Set { queue, settings } => {
            let Some(queue) = open(store, queue).await? else { return missing(queue) };
            queue.update(|there| apply(settings, there)).await?;
            show::settings(args, &queue)?;
            done
        }
        QueueCommand::Ls => {
            for name in Queue::list(store).await? {
                match args.json {
                    true => render::json(&json!({ "queue": name }))?,
                    false => render::verbatim(&name)?,
                }
            }
            done
        }
        QueueCommand::Show { queue, task } => match (open(store, queue).await?, task) {
            (None, _) => missing(queue),
            (Some(queue), None) => {
                show::settings(args, &queue)?;
                done
            }
            (Some(queue), Some(task)) => show::task(args, &queue, task).await,
        },
        QueueCommand::Status { queue, limit } => match open(store, queue).await? {
            None => missing(queue),
            Some(queue) => {
                let replica = match sync::replica(args, store).await? {
                    Some(replica) if replica.queue(queue.name()).await?.is_some() => {
                        Some(replica.status(queue.name()).await?)
                    }
                    _ => None,
                };
                show::status(args, &queue.status(*limit).await?, replica.as_ref(), *limit)?;
                done
            }
        },
        QueueCommand::Push(push) => push::run(args, store, push).await,
        QueueCommand::Peek { queue, limit } => match open(store, queue).await? {
            None => missing(queue),
            Some(queue) => {
                show::peeked(args, &queue.peek(*limit).await?)?;
                done
            }
        },
        QueueCommand::Work(work) => work::run(args, store, work).await,
        QueueCommand::Failed { queue, limit } => match open(store, queue).await? {
            None => missing(queue),
            Some(queue) => {
                show::failed(args, &queue.failed(*limit).await?)?;
                done
            }
        },
        QueueCommand::Retry { queue, tasks, all } => match open(store, queue).await? {
            None => missing(queue),
            Some(queue) => retry(args, &queue, tasks, *all).await,
        },
        QueueCommand::Purge { queue, what } => match open(store, queue).await? {
            None => missing(queue),
            Some(queue) => purge(args, &queue, what).await,
        },
        QueueCommand::Pause { queue } => match open(store, queue).await? {
            None => missing(queue),
            Some(queue) => {
                queue.pause().await?;
                paused(args, &queue, true)?;
                done
            }
        },
        QueueCommand::Resume { queue } => match open(store, queue).await? {
            None => missing(queue),
            Some(queue) => {
                queue.resume().await?;
                paused(args, &queue, false)?;
                done
            }
        },
        QueueCommand::Sweep { queue } => match open(store, queue).await? {
            None => missing(queue),
            Some(queue) => {
                let swept = queue.sweep().await?;
                match args.json {
                    true => render::json(&swept)?,
                    false => render::line(format_args!(
                        "{} receipts, {} leases, {} finished tasks and {} outdated dead letters \
                         removed, {} tasks promoted",
                        swept.receipts, swept.leases, swept.tasks, swept.letters, swept.promoted
                    ))?,
                }
                done
            }
        },
    }
}

/// The queue that workers and pushers of this node use: a relaxed one's is in the node's replica, if it
/// has one. Made if need be, which is told if wanted: who works on a queue that is new may mean another.
async fn open_to_work(args: &Args, store: &Store, name: &str, tell: bool) -> anyhow::Result<Queue> {
    if let Some(replica) = sync::replica(args, store).await?
        && let Some(queue) = replica.choose(name).await?
    {
        return Ok(queue);
    }
    if tell {
        if let Some(queue) = open(store, name).await? {
            return Ok(queue);
        }
        render::say(format_args!("queue {name} is new"));
    }
    Ok(Queue::open_or_create(store, name, None).await?)
}

async fn open(store: &Store, name: &str) -> anyhow::Result<Option<Queue>> {
    Ok(Queue::open(store, name).await?)
}

fn missing(name: &str) -> anyhow::Result<Ending> {
    render::say(format_args!("{name}: there is no such queue (see `leasehold queue ls`)"));
    Ok(Exit::NotFound.into())
}

fn invalid(message: impl Into<String>) -> anyhow::Error {
    Error::new(ErrorKind::Invalid, message).into()
}

/// Puts what was asked for into the settings.
fn apply(terms: &QueueTerms, settings: &mut QueueSettings) {
    fn set<T: Clone>(to: &mut T, from: &Option<T>) {
        if let Some(from) = from {
            *to = from.clone();
        }
    }
    set(&mut settings.ttl, &terms.ttl);
    // A ttl of one's own gets a heartbeat that suits it.
    set(&mut settings.heartbeat, &terms.heartbeat.or(terms.ttl.map(|ttl| ttl / 3)));
    set(&mut settings.max_attempts, &terms.max_attempts);
    set(&mut settings.max_crashes, &terms.max_crashes);
    set(&mut settings.backoff, &terms.backoff);
    set(&mut settings.backoff_cap, &terms.backoff_cap);
    if terms.timeout.is_some() {
        settings.timeout = terms.timeout;
    }
    set(&mut settings.shards, &terms.shards);
    set(&mut settings.receipts, &terms.receipts);
    set(&mut settings.retention, &terms.retention);
    set(&mut settings.durable, &terms.durable);
    set(&mut settings.sync_up, &terms.sync_up);
    set(&mut settings.sync_down, &terms.sync_down);
    match terms.mode {
        Some(QueueMode::Strict) => settings.mode = Mode::Strict,
        Some(QueueMode::Relaxed) => settings.mode = Mode::Relaxed,
        None => {}
    }
    // A ttl that nobody chose suits the mode.
    let least = settings.sync_up.saturating_mul(3);
    if settings.mode == Mode::Relaxed && terms.ttl.is_none() && settings.ttl < least {
        settings.ttl = least;
        settings.heartbeat = terms.heartbeat.unwrap_or(least / 3);
    }
}

async fn retry(args: &Args, queue: &Queue, tasks: &[String], all: bool) -> anyhow::Result<Ending> {
    let ids = match all {
        true => queue.failed_ids().await?,
        false => tasks.to_vec(),
    };
    let mut missing = false;
    let mut pushed = 0;
    let mut kept = None;
    for id in &ids {
        match queue.retry(id).await {
            Ok(true) => pushed += 1,
            Ok(false) => {
                missing = true;
                render::say(format_args!("{id}: there is no such dead letter"));
            }
            // About this one alone: the others can be pushed all the same.
            Err(error) if matches!(error.kind(), ErrorKind::Data | ErrorKind::Held) => {
                render::say(format_args!("{id}: not pushed: {error}"));
                kept = Some(Exit::Refused);
            }
            Err(error) => {
                render::say(format_args!("{pushed} pushed again before this"));
                return Err(error.into());
            }
        }
    }
    match args.json {
        true => render::json(&json!({ "pushed": pushed }))?,
        false => render::line(format_args!("{pushed} pushed again"))?,
    }
    Ok(kept.unwrap_or(if missing { Exit::NotFound } else { Exit::Done }).into())
}

async fn purge(args: &Args, queue: &Queue, what: &Purge) -> anyhow::Result<Ending> {
    let mut purged = serde_json::Map::new();
    if what.pending {
        purged.insert("pending".into(), queue.purge_pending().await?.into());
    }
    if what.failed {
        purged.insert("failed".into(), queue.purge_failed().await?.into());
    }
    if what.completed {
        let all = queue.purge_receipts(std::time::Duration::ZERO).await?;
        purged.insert("completed".into(), all.into());
    }
    match args.json {
        true => render::json(&purged)?,
        false => {
            for (what, count) in purged {
                render::line(format_args!("{count} {what} removed"))?;
            }
        }
    }
    Ok(Exit::Done.into())
}

fn paused(args: &Args, queue: &Queue, paused: bool) -> anyhow::Result<()> {
    match args.json {
        true => render::json(&json!({ "queue": queue.name(), "paused": paused })),
        false => Ok(()),
    }
}

/// `queue work` takes several names, and would never find a queue with a comma in its own.
fn without_comma(queue: &str) -> anyhow::Result<()> {
    match queue.contains(',') {
        true => Err(invalid(format!("{queue:?} cannot be worked on: commas separate queues"))),
        false => Ok(()),
    }
}
