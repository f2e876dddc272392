//! Looking after an index.

use std::io::{IsTerminal as _, Write as _};

use anstyle::{Ansi256Color, Style};
use leasehold::Store;
use leasehold::index::{Index, Quarantined, Shard, ShardStatus, Status};
use leasehold::protocol::format::usv;
use leasehold::settings::format_duration;
use serde_json::{Value, json};

use super::open;
use crate::args::Args;
use crate::args::index::QuarantineCommand;
use crate::exit::Exit;
use crate::render::{self, BAD, DIM, GOOD, WARN, paint};

/// `leasehold index status`.
pub async fn status(args: &Args, index: &Index, quick: bool) -> anyhow::Result<Exit> {
    let status = index.status(!quick).await?;
    let total = status.total();
    if args.json {
        let shards: Vec<Value> =
            status.shards.iter().map(|(shard, of)| to_json(*shard, of)).collect();
        render::json(&json!({
            "index": index.name(),
            "rows": total.rows,
            "deletions": total.deletions,
            "bytes": total.bytes,
            "inbox_objects": total.inbox_objects,
            "inbox_records": total.inbox_records,
            "inbox_bytes": total.inbox_bytes,
            "inbox_age_seconds": total.inbox_age.as_secs(),
            "flat_files": status.flat_files,
            "unknown_files": status.unknown,
            "quarantined": status.quarantined,
            "shards": shards,
        }))?;
        return Ok(Exit::Done);
    }
    let made = status.shards.values().filter(|shard| shard.bytes.is_some()).count();
    let all = index.package().width.shards();
    let line = |label: &str, text: String| {
        render::line(format_args!("{} {text}", paint(DIM, format_args!("{label:<11}"))))
    };
    line("index", index.name().to_owned())?;
    line("shards", format!("{made} of {all}, {}", render::bytes(total.bytes.unwrap_or(0))))?;
    if let Some(rows) = total.rows {
        let deletions = total.deletions.unwrap_or(0);
        line("records", format!("{} and {deletions} deletions", rows - deletions.min(rows)))?;
    }
    let age = std::time::Duration::from_secs(total.inbox_age.as_secs());
    line(
        "inbox",
        match total.inbox_objects {
            0 => "empty".to_owned(),
            objects => format!(
                "{} records in {objects} objects, {}, the oldest {} old",
                total.inbox_records,
                render::bytes(total.inbox_bytes),
                format_duration(age)
            ),
        },
    )?;
    if status.flat_files > 0 {
        line("flat inbox", format!("{} files", status.flat_files))?;
    }
    if status.unknown > 0 {
        let text =
            format!("{} files whose names mean nothing here: nobody reads them", status.unknown);
        line("unknown", paint(WARN, text))?;
    }
    for (shard, of) in &status.shards {
        if let Some(holder) = &of.locked_by {
            line("locked", format!("{shard} by {holder}"))?;
        }
    }
    if status.quarantined > 0 {
        let text = format!("{} entries: see `index quarantine ls`", status.quarantined);
        line("quarantine", paint(WARN, text))?;
    }
    if std::io::stdout().is_terminal() && all == 256 {
        render::line("")?;
        heat_map(&status)?;
    }
    Ok(Exit::Done)
}

fn to_json(shard: Shard, of: &ShardStatus) -> Value {
    json!({
        "shard": shard.to_string(),
        "bytes": of.bytes,
        "rows": of.rows,
        "deletions": of.deletions,
        "inbox_objects": of.inbox_objects,
        "inbox_records": of.inbox_records,
        "inbox_bytes": of.inbox_bytes,
        "inbox_age_seconds": of.inbox_age.as_secs(),
        "locked_by": of.locked_by,
    })
}

/// 16 × 16 shards: green by size, towards red by what waits for them.
fn heat_map(status: &Status) -> anyhow::Result<()> {
    let largest = status.shards.values().filter_map(|of| of.bytes).max().unwrap_or(0).max(1);
    let longest = status.shards.values().map(|of| of.inbox_records).max().unwrap_or(0);
    let colour = |of: Option<&ShardStatus>| match of {
        Some(of) if of.inbox_records > 0 => {
            // 214 orange … 196 red.
            [220, 214, 208, 202, 196][(of.inbox_records / (longest / 4).max(1)).min(4) as usize]
        }
        Some(of) if of.bytes.is_some() => {
            [22, 28, 34, 40, 46][(of.bytes.unwrap_or(0) * 4 / largest).min(4) as usize]
        }
        _ => 236,
    };
    render::line(paint(DIM, "    0 1 2 3 4 5 6 7 8 9 a b c d e f"))?;
    for row in 0..16_u32 {
        let mut text = paint(DIM, format_args!("  {row:x} "));
        for column in 0..16 {
            let shard: Option<Shard> = format!("{:02x}", row * 16 + column).parse().ok();
            let of = shard.and_then(|shard| status.shards.get(&shard));
            let style = Style::new().fg_color(Some(Ansi256Color(colour(of)).into()));
            text.push_str(&paint(
                style,
                if of.is_some_and(|of| of.locked_by.is_some()) { "▒▒" } else { "██" },
            ));
        }
        render::line(text)?;
    }
    render::line(paint(DIM, "    green: by size; yellow to red: by what waits; ▒: being compacted"))
}

/// `leasehold index verify`.
pub async fn verify(args: &Args, index: &Index) -> anyhow::Result<Exit> {
    let verified = index.verify().await?;
    let grave = verified.findings.iter().any(|finding| finding.grave);
    if args.json {
        let findings: Vec<Value> = verified
            .findings
            .iter()
            .map(|f| json!({ "shard": f.shard.to_string(), "what": f.what, "grave": f.grave }))
            .collect();
        render::json(&json!({
            "correct": !grave,
            "shards": verified.shards,
            "rows": verified.rows,
            "deletions": verified.deletions,
            "digest": verified.digest.to_string(),
            "findings": findings,
        }))?;
    } else {
        for finding in &verified.findings {
            let mark = match finding.grave {
                true => paint(BAD, "FAIL"),
                false => paint(WARN, "note"),
            };
            render::line(format_args!("{mark}  {}  {}", finding.shard, finding.what))?;
        }
        let verdict = match grave {
            true => paint(BAD.bold(), "not correct"),
            false => paint(GOOD.bold(), "correct"),
        };
        render::line(format_args!(
            "{} is {verdict}: {} shards, {} rows, {} of them deletions, digest {}",
            index.name(),
            verified.shards,
            verified.rows,
            verified.deletions,
            verified.digest
        ))?;
    }
    Ok(if grave { Exit::Failed } else { Exit::Done })
}

/// `leasehold index quarantine …`.
pub async fn quarantine(
    args: &Args,
    store: &Store,
    command: &QuarantineCommand,
) -> anyhow::Result<Exit> {
    match command {
        QuarantineCommand::Ls { index } => {
            for Quarantined { id, reason } in open(store, index).await?.quarantined().await? {
                match args.json {
                    true => render::json(&json!({ "id": id, "reason": reason }))?,
                    false => render::line(format_args!(
                        "{id}  {} rows of {}: {}",
                        reason.reasons.len(),
                        reason.source,
                        reason.reasons.first().map_or("", String::as_str)
                    ))?,
                }
            }
            Ok(Exit::Done)
        }
        QuarantineCommand::Show { index, id } => {
            let Some((entry, rows)) = open(store, index).await?.show_quarantined(id).await? else {
                return Ok(missing(id));
            };
            if args.json {
                let rows: Vec<_> = usv::rows(&rows).map(String::from_utf8_lossy).collect();
                render::json(&json!({ "id": id, "reason": entry.reason, "rows": rows }))?;
                return Ok(Exit::Done);
            }
            for reason in &entry.reason.reasons {
                render::say(reason);
            }
            std::io::stdout().write_all(&rows)?;
            Ok(Exit::Done)
        }
        QuarantineCommand::Retry { index, ids } => {
            let index = open(store, index).await?;
            let ids = match ids.is_empty() {
                true => index.quarantined().await?.into_iter().map(|entry| entry.id).collect(),
                false => ids.clone(),
            };
            let (mut good, mut bad, mut exit) = (0, 0, Exit::Done);
            for id in &ids {
                match index.retry_quarantined(id).await? {
                    Some((now, still)) => (good, bad) = (good + now, bad + still),
                    None => exit = missing(id),
                }
            }
            match args.json {
                true => render::json(&json!({ "retried": good, "still_bad": bad }))?,
                false => {
                    render::line(format_args!("{good} rows back in the inbox, {bad} still bad"))?
                }
            }
            Ok(if bad > 0 { Exit::Failed } else { exit })
        }
    }
}

fn missing(id: &str) -> Exit {
    render::say(format_args!("{id}: there is no such entry"));
    Exit::NotFound
}
