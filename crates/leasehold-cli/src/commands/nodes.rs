//! `leasehold nodes`: how the fleet is doing.

use std::time::Duration;

use leasehold::Store;
use leasehold::fleet::{self, Forgot, Seen};
use leasehold::protocol::format::node::{Node, NodeProcess};
use leasehold::protocol::supervise::{Standing, is_clock_off};
use serde_json::json;

use crate::args::Args;
use crate::args::fleet::{Nodes, NodesCommand};
use crate::exit::{Ending, Exit};
use crate::render::{self, WARN, paint};

/// Does what was asked.
pub async fn run(args: &Args, store: &Store, nodes: &Nodes) -> anyhow::Result<Ending> {
    if let Some(NodesCommand::Forget { name, force }) = &nodes.command {
        return Ok(match fleet::forget(store, name, *force).await? {
            Forgot::Done => Exit::Done,
            Forgot::Missing => {
                render::say(format_args!("{name}: there is no such node (see `leasehold nodes`)"));
                Exit::NotFound
            }
            Forgot::Alive => {
                render::say(format_args!(
                    "{name} reports, and would be back: stop it first, or --force"
                ));
                Exit::Refused
            }
        }
        .into());
    }
    let all = fleet::nodes(store).await?;
    if args.json {
        for seen in &all {
            render::json(&to_json(seen))?;
        }
        return Ok(Exit::Done.into());
    }
    if all.is_empty() {
        render::say("no node has reported yet (see `leasehold supervise`)");
        return Ok(Exit::Done.into());
    }
    let header = [
        "node",
        "state",
        "heard of",
        "up",
        "processes",
        "holds",
        "done",
        "per min",
        "failed",
        "clock",
        "disk free",
        "cost",
    ];
    let mut table = render::table(&header, &[2, 3, 4, 5, 6, 7, 8, 9, 10, 11]);
    for seen in &all {
        table.add_row(row(seen));
    }
    render::line(&table)?;
    for seen in &all {
        for trouble in trouble(seen) {
            render::line(format_args!("{} {}: {trouble}", paint(WARN, "!"), seen.name))?;
        }
    }
    Ok(Exit::Done.into())
}

fn to_json(seen: &Seen) -> serde_json::Value {
    let mut value = json!({
        "name": seen.name,
        "standing": seen.standing.word(),
        "age_ms": u64::try_from(seen.age.as_millis()).unwrap_or(u64::MAX),
        "supervisor": seen.supervisor,
        "clock_off": seen.record.as_ref().is_ok_and(|node| is_clock_off(node.clock_ahead_ms)),
        "crash_loop": seen.record.as_ref().is_ok_and(|node| loops(node).next().is_some()),
    });
    match &seen.record {
        Ok(node) => value["node"] = json!(node),
        Err(error) => value["unreadable"] = json!(error),
    }
    value
}

fn loops(node: &Node) -> impl Iterator<Item = &NodeProcess> {
    node.processes.iter().filter(|process| process.crash_loop)
}

fn row(seen: &Seen) -> Vec<String> {
    let mut cells =
        vec![seen.name.clone(), seen.standing.word().to_owned(), format!("{} ago", span(seen.age))];
    let Ok(node) = &seen.record else { return cells };
    let running = node.processes.iter().filter(|process| process.pid.is_some()).count();
    let clock = match node.clock_ahead_ms {
        off if is_clock_off(off) => format!("{:+} s", off / 1000),
        _ => "ok".to_owned(),
    };
    cells.extend([
        span(Duration::from_secs(node.uptime_s)),
        format!("{running}/{}", node.processes.len()),
        node.holds.to_string(),
        node.done.to_string(),
        format!("{:.1}", node.done_per_minute),
        node.failed.to_string(),
        clock,
        node.disk_free.map(render::bytes).unwrap_or_default(),
        format!("${:.4}", node.dollars),
    ]);
    cells
}

/// What somebody should look at.
fn trouble(seen: &Seen) -> Vec<String> {
    let node = match &seen.record {
        Ok(node) => node,
        Err(error) => return vec![format!("its record cannot be read: {error}")],
    };
    let mut all = Vec::new();
    if matches!(seen.standing, Standing::Stalled | Standing::Gone) {
        all.push(format!(
            "not heard of for {}; it was to report every {}",
            span(seen.age),
            span(node.every)
        ));
    }
    if is_clock_off(node.clock_ahead_ms) {
        let ahead = if node.clock_ahead_ms > 0 { "ahead of" } else { "behind" };
        let off = span(Duration::from_millis(node.clock_ahead_ms.unsigned_abs()));
        all.push(format!("its clock is {off} {ahead} the store's"));
    }
    if let Some(refused) = &node.refused {
        all.push(format!("does not carry out the plan that is there: {refused}"));
    }
    if seen.standing == Standing::Stopped {
        return all;
    }
    for process in loops(node) {
        all.push(format!(
            "crash loop: {} {} was started again {} times",
            process.role,
            process.of.join(","),
            process.restarts
        ));
    }
    if let Some(last) = node.errors.last() {
        let at = last.at.map(|at| format!(" ({at})")).unwrap_or_default();
        all.push(format!("last error{at}: {}", last.text));
    }
    all
}

/// A span for people: the largest unit that fits.
fn span(span: Duration) -> String {
    match span.as_secs() {
        seconds if seconds < 120 => format!("{seconds}s"),
        seconds if seconds < 2 * 3600 => format!("{}m", seconds / 60),
        seconds if seconds < 2 * 86_400 => format!("{}h", seconds / 3600),
        seconds => format!("{}d", seconds / 86_400),
    }
}
