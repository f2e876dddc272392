//! `leasehold sync …`: a node's replica and the bucket.

use std::time::Duration;

use leasehold::settings::format_duration;
use leasehold::sync::{Plan, Replica, Status};
use leasehold::{Error, ErrorKind, Store};
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::args::Args;
use crate::args::sync::{Sync, SyncCommand};
use crate::exit::{Ending, Exit};
use crate::{config, render};

/// The node's replica, if the configuration names one.
pub async fn replica(args: &Args, store: &Store) -> anyhow::Result<Option<Replica>> {
    match config::replica(args)? {
        Some(connect) => {
            let node = config::node_name(args, None)?;
            Ok(Some(Replica::open(&connect.open()?, store, &node).await?))
        }
        None => Ok(None),
    }
}

/// Does what was asked.
pub async fn run(args: &Args, store: &Store, sync: &Sync) -> anyhow::Result<Ending> {
    let Some(replica) = replica(args, store).await? else {
        let message = "where is this node's replica? Say --replica DIR, LEASEHOLD_REPLICA, or \
                       `replica` in leasehold.toml";
        return Err(Error::new(ErrorKind::Invalid, message).into());
    };
    match &sync.command {
        None if sync.dry_run => {
            for queue in chosen(&replica, &sync.queues).await? {
                plan(args, &replica.plan(&queue).await?)?;
            }
        }
        None => now(args, &replica, &sync.queues, true, true).await?,
        Some(SyncCommand::Now { queues, up, down }) => {
            now(args, &replica, queues, !down, !up).await?;
        }
        Some(SyncCommand::Status { queues }) => {
            let mut all = Vec::new();
            for queue in chosen(&replica, queues).await? {
                all.push(replica.status(&queue).await?);
            }
            show(args, &all)?;
        }
        Some(SyncCommand::Run { queues }) => {
            let queues = match queues.is_empty() {
                true => chosen(&replica, queues).await?,
                false => queues.clone(),
            };
            let end = CancellationToken::new();
            let mut terminate = signal(SignalKind::terminate())?;
            let mut interrupt = signal(SignalKind::interrupt())?;
            let mut ran = std::pin::pin!(replica.run(&queues, end.clone()));
            loop {
                tokio::select! {
                    () = &mut ran => break,
                    _ = terminate.recv() => end.cancel(),
                    _ = interrupt.recv() => end.cancel(),
                }
            }
            // What is still to be told is told, if the bucket answers. Who is told again does not wait for it:
            // all of it is in the outbox.
            let last = async {
                for queue in &queues {
                    if replica.queue(queue).await?.is_some() {
                        replica.up(queue).await?;
                    }
                }
                anyhow::Ok(())
            };
            tokio::select! {
                told = last => told?,
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
        }
    }
    Ok(Exit::Done.into())
}

/// These queues, or all that this node has.
async fn chosen(replica: &Replica, queues: &[String]) -> anyhow::Result<Vec<String>> {
    match queues.is_empty() {
        true => Ok(replica.queues().await?),
        false => Ok(queues.to_vec()),
    }
}

async fn now(
    args: &Args,
    replica: &Replica,
    queues: &[String],
    up: bool,
    down: bool,
) -> anyhow::Result<()> {
    for queue in chosen(replica, queues).await? {
        replica.join(&queue).await?;
        let up = if up { Some(replica.up(&queue).await?) } else { None };
        let down = if down { Some(replica.down(&queue).await?) } else { None };
        if args.json {
            render::json(&json!({ "queue": queue, "up": up, "down": down }))?;
            continue;
        }
        let mut text = Vec::new();
        if let Some(up) = &up {
            text.push(format!(
                "told: {} done, {} given up, {} pushed, {} held, {} released",
                up.completed, up.given_up, up.pushed, up.held, up.released
            ));
            for (count, what) in [
                (up.duplicates, "were done elsewhere before"),
                (up.lost, "lost to others"),
                (up.troubled, "could not be told"),
            ] {
                if count > 0 {
                    text.push(format!("{count} {what}"));
                }
            }
        }
        if let Some(down) = &down {
            text.push(format!(
                "brought: {} new, {} unchanged, {} done elsewhere",
                down.new, down.unchanged, down.removed
            ));
            if down.set_aside > 0 {
                text.push(format!(
                    "{} set aside: the bucket knows nothing of them",
                    down.set_aside
                ));
            }
        }
        render::line(format_args!("{queue}  {}", text.join("; ")))?;
    }
    Ok(())
}

fn plan(args: &Args, plan: &Plan) -> anyhow::Result<()> {
    if args.json {
        return render::json(plan);
    }
    let Plan { queue, up, new, unchanged, missing } = plan;
    render::line(format_args!(
        "{queue}  would tell of {}, fetch up to {new}, ask for {missing}, leave {unchanged} as they are",
        up.len()
    ))?;
    if !up.is_empty() {
        let mut table = render::table(&["TASK", "TELLS"], &[]);
        for step in up {
            table.add_row([step.id.clone(), step.tells.join(", ")]);
        }
        render::line(table)?;
    }
    Ok(())
}

/// How replicas are doing.
fn show(args: &Args, all: &[Status]) -> anyhow::Result<()> {
    if args.json {
        return all.iter().try_for_each(render::json);
    }
    let header =
        ["QUEUE", "UP", "DOWN", "OUTBOX", "DUPLICATES", "LOST", "ASIDE", "REQUESTS", "SAVED"];
    let mut table = render::table(&header, &[3, 4, 5, 6, 7, 8]);
    for status in all {
        let mut row = vec![status.queue.clone(), ago(status.up_age_ms), ago(status.down_age_ms)];
        row.extend([status.outbox, status.duplicates, status.lost].map(|n| n.to_string()));
        row.extend([status.set_aside, status.requests].map(|n| n.to_string()));
        row.push(status.saved.to_string());
        table.add_row(row);
    }
    render::line(table)
}

fn ago(age: Option<u64>) -> String {
    age.map_or_else(
        || "never".to_owned(),
        |age| format!("{} ago", format_duration(Duration::from_secs(age / 1000))),
    )
}
