//! How queues and tasks look.

use std::time::Duration;

use leasehold::queue::{Failed, Mode, Peeked, Queue, Status};
use leasehold::settings::format_duration;
use serde_json::json;

use crate::args::Args;
use crate::exit::{Ending, Exit};
use crate::render;

/// The settings of a queue.
pub fn settings(args: &Args, queue: &Queue) -> anyhow::Result<()> {
    let settings = queue.settings();
    let mut fields = serde_json::to_value(&*settings)?;
    if let Some(fields) = fields.as_object_mut() {
        fields.remove("nonce");
        // Not written where they are as ever, but not hidden either.
        if settings.mode == Mode::Relaxed {
            fields.insert("sync_up".to_owned(), format_duration(settings.sync_up).into());
            fields.insert("sync_down".to_owned(), format_duration(settings.sync_down).into());
        }
    }
    if args.json {
        if let Some(fields) = fields.as_object_mut() {
            fields.insert("queue".to_owned(), queue.name().into());
        }
        return render::json(&fields);
    }
    let mut table = render::table(&[], &[]);
    table.add_row(["queue", &*render::shown(queue.name())]);
    for (name, value) in fields.as_object().into_iter().flatten() {
        let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        table.add_row([name.as_str(), &value]);
    }
    render::line(table)
}

/// How a queue is doing.
pub fn status(
    args: &Args,
    status: &Status,
    replica: Option<&leasehold::sync::Status>,
    limit: usize,
) -> anyhow::Result<()> {
    if args.json {
        let mut fields = serde_json::to_value(status)?;
        if let (Some(fields), Some(replica)) = (fields.as_object_mut(), replica) {
            fields.insert("replica".to_owned(), serde_json::to_value(replica)?);
        }
        return render::json(&fields);
    }
    let counts = &status.counts;
    let paused =
        if status.paused { render::paint(render::WARN, "  paused") } else { String::new() };
    render::line(format_args!("{}{paused}", status.queue))?;
    let mut table = render::table(&[], &[1]);
    let unknown = ("unknown: objects with names that are no task's", counts.unknown);
    for (name, count) in [
        ("free", counts.free),
        ("claimed or waiting to be tried again", counts.leased),
        ("scheduled", counts.scheduled),
        ("completed (receipts)", counts.completed),
        ("failed", counts.failed),
    ]
    .into_iter()
    .chain((unknown.1 > 0).then_some(unknown))
    {
        table.add_row([format!("  {name}"), count.to_string()]);
    }
    render::line(table)?;
    if let Some((id, since)) = &status.oldest {
        render::line(format_args!("oldest: {id}, since {since}"))?;
    }
    if let Some(replica) = replica {
        render::line(format_args!(
            "this node: {} duplicates, {} requests saved, {} still to be told",
            replica.duplicates, replica.saved, replica.outbox
        ))?;
    }
    if !status.held.is_empty() {
        let mut table =
            render::table(&["TASK", "STATE", "WORKER", "RENEWED", "RETRIES", "PROGRESS"], &[4]);
        for held in &status.held {
            // Not in colour: a table counts what colours it as width.
            let state = held.state.to_owned();
            let ago = format_duration(Duration::from_secs(held.age_ms / 1000));
            let progress = held.progress.as_ref().map_or_else(String::new, ToString::to_string);
            table.add_row([
                render::shown(&held.id).into_owned(),
                state,
                render::shown(&held.worker).into_owned(),
                format!("{ago} ago"),
                held.retries.to_string(),
                progress,
            ]);
        }
        render::line(table)?;
        if status.held.len() >= limit && status.counts.leased > limit as u64 {
            render::line(format_args!("and others: see --limit"))?;
        }
    }
    if !args.quiet {
        let requests = format!("{} requests", status.requests);
        render::say(render::paint(render::DIM, requests));
    }
    Ok(())
}

/// What became of one task.
pub async fn task(args: &Args, queue: &Queue, id: &str) -> anyhow::Result<Ending> {
    let receipt = queue.receipt(id).await?;
    let letter = queue.dead_letter(id).await?;
    let mut pending = queue.find(id).await?;
    // Not one that was done or given up: looking for it takes lists.
    let mut scheduled = None;
    if pending.is_none() && receipt.is_none() && letter.is_none() {
        if let Some((task, time)) = queue.find_scheduled(id).await? {
            (pending, scheduled) = (Some((task, None)), Some(time));
        } else {
            // It may have come to its time between the two looks.
            pending = queue.find(id).await?;
        }
    }
    let state = match (&pending, &receipt, &letter) {
        _ if scheduled.is_some() => "scheduled",
        (Some((_, Some(held))), ..) => held.state,
        (Some((_, None)), ..) => "free",
        (None, Some(_), _) => "completed",
        (None, None, Some(_)) => "failed",
        (None, None, None) => {
            render::say(format_args!(
                "{id}: there is no such task (tasks in bundles cannot be found by name)"
            ));
            return Ok(Exit::NotFound.into());
        }
    };
    if args.json {
        let (task, lease) = match &pending {
            Some((task, lease)) => (Some(task), lease.as_ref()),
            None => (None, None),
        };
        render::json(&json!({
            "id": id, "state": state, "task": task, "lease": lease, "receipt": receipt,
            "dead_letter": letter, "not_before": scheduled,
        }))?;
        return Ok(Exit::Done.into());
    }
    let mut table = render::table(&[], &[]);
    table.add_row(["task", &*render::shown(id)]);
    table.add_row(["state", state]);
    if let Some((task, held)) = &pending {
        if let Some(at) = task.pushed_at {
            table.add_row(["pushed at", &at.to_string()]);
        }
        table.add_row(["payload", &*render::shown(&task.text())]);
        if let Some(time) = scheduled {
            table.add_row(["not before", &time.to_string()]);
        }
        if let Some(held) = held {
            table.add_row(["worker", &*render::shown(&held.worker)]);
            table.add_row(["retries", &held.retries.to_string()]);
            if let Some(at) = held.not_before {
                table.add_row(["not before", &at.to_string()]);
            }
        }
    }
    if let Some(receipt) = &receipt {
        table.add_row(["completed at", &receipt.completed_at.to_string()]);
        table.add_row(["by", &*render::shown(&receipt.worker)]);
        if let Some(result) = &receipt.result {
            let result = leasehold::protocol::format::task::plain_text(result);
            table.add_row(["result", &*render::shown(&result)]);
        }
    }
    if let Some(letter) = &letter {
        table.add_row(["given up at", &letter.failed_at.to_string()]);
        for failure in &letter.errors {
            let what = if failure.crash { "crash" } else { "failure" };
            let text = format!("{} {}: {}", failure.at, failure.worker, failure.error);
            table.add_row([what, &*render::shown(&text)]);
        }
    }
    render::line(table)?;
    Ok(Exit::Done.into())
}

/// Tasks, one per line.
pub fn peeked(args: &Args, tasks: &[Peeked]) -> anyhow::Result<()> {
    for task in tasks {
        match args.json {
            true => render::json(task)?,
            false => render::line(format_args!(
                "{}  {}",
                render::paint(render::DIM, render::shown(&task.id)),
                render::shown(&task.text())
            ))?,
        }
    }
    Ok(())
}

/// Dead letters, one per line.
pub fn failed(args: &Args, letters: &[Failed]) -> anyhow::Result<()> {
    if args.json {
        for failed in letters {
            render::json(&failed.letter)?;
        }
        return Ok(());
    }
    if letters.is_empty() {
        return Ok(());
    }
    let mut table =
        render::table(&["TASK", "GIVEN UP AT", "FAILURES", "CRASHES", "LAST ERROR"], &[2, 3]);
    for Failed { id, letter } in letters {
        let last = letter.errors.last().map_or("", |failure| failure.error.as_str());
        table.add_row([
            render::shown(id).into_owned(),
            letter.failed_at.to_string(),
            letter.failures.to_string(),
            letter.crashes.to_string(),
            render::shown(last.lines().next().unwrap_or("")).into_owned(),
        ]);
    }
    render::line(table)
}
