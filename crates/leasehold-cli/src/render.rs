//! How things look, to people and to programs.

use std::io::{IsTerminal as _, Write as _};

use anstyle::{AnsiColor, Style};
use comfy_table::{CellAlignment, Table, presets};
use leasehold::store::Kind;
use leasehold::store::meter::{Prices, Usage};
use serde::Serialize;

/// For what went well.
pub const GOOD: Style = AnsiColor::Green.on_default();
/// For what wants attention.
pub const WARN: Style = AnsiColor::Yellow.on_default();
/// For what went wrong.
pub const BAD: Style = AnsiColor::Red.on_default();
/// For what is said beside the point.
pub const DIM: Style = Style::new().dimmed();

/// A text in a style. Where colour is not wanted, `anstream` takes it out again.
pub fn paint(style: Style, text: impl std::fmt::Display) -> String {
    format!("{style}{text}{style:#}")
}

/// Prints a line of data.
pub fn line(text: impl std::fmt::Display) -> anyhow::Result<()> {
    Ok(writeln!(anstream::stdout(), "{text}")?)
}

/// Prints a line that is somebody's own: as it is where a program reads it, and so that it does nothing to a
/// terminal.
pub fn verbatim(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    Ok(match out.is_terminal() {
        true => writeln!(out, "{}", shown(text)),
        false => writeln!(out, "{text}"),
    }?)
}

/// A text of somebody else's, to be shown among ours: characters that would do something to a terminal are
/// spelt out.
pub fn shown(text: &str) -> std::borrow::Cow<'_, str> {
    let acts = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
    if !text.contains(acts) {
        return text.into();
    }
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        match acts(c) {
            true => shown.extend(c.escape_default()),
            false => shown.push(c),
        }
    }
    shown.into()
}

/// Prints a value as a line of JSON.
pub fn json(value: &impl Serialize) -> anyhow::Result<()> {
    line(serde_json::to_string(value)?)
}

/// Says something about the work, on standard error.
pub fn say(text: impl std::fmt::Display) {
    let _ = writeln!(anstream::stderr(), "{text}");
}

/// An error and what caused it.
pub fn error(error: &anyhow::Error) {
    let label = paint(BAD.bold(), "error:");
    let mut text = format!("{error:#}");
    if let Some(inner) = error.downcast_ref::<leasehold::Error>() {
        // The causes are for those who ask; the message stands on its own.
        text = inner.to_string();
        if let Some(source) = std::error::Error::source(inner) {
            tracing::info!("caused by: {source}");
        }
    }
    say(format_args!("{label} {text}"));
}

/// A table without lines, the given columns aligned to the right.
pub fn table(header: &[&str], right: &[usize]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    if !header.is_empty() {
        table.set_header(header.iter().copied());
    }
    for column in right {
        if let Some(column) = table.column_mut(*column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// A size for people.
pub fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["B", "kB", "MB", "GB", "TB"];
    let mut size = count as f64;
    let mut unit = 0;
    while size >= 999.5 && unit + 1 < UNITS.len() {
        size /= 1000.0;
        unit += 1;
    }
    match unit {
        0 => format!("{count} B"),
        _ if size < 9.95 => format!("{size:.1} {}", UNITS[unit]),
        _ => format!("{size:.0} {}", UNITS[unit]),
    }
}

#[derive(Serialize)]
struct Receipt<'a> {
    store: &'a str,
    requests: u64,
    #[serde(flatten)]
    usage: &'a Usage,
    dollars: f64,
}

/// What a command cost, on standard error so that data stays data.
pub fn receipt(store: &str, usage: &Usage, kind: Kind, json: bool) {
    let dollars = usage.dollars(&Prices::of(kind));
    if json {
        let receipt = Receipt { store, requests: usage.requests(), usage, dollars };
        // Numbers and text always serialise.
        say(serde_json::to_string(&receipt).unwrap_or_default());
        return;
    }
    let price = match kind.is_bucket() {
        true => format!("${dollars:.6} at list price"),
        false => "free: the store is on this machine".to_owned(),
    };
    let mut counts = vec![
        format!("PUT {}", usage.put),
        format!("GET {}", usage.get),
        format!("HEAD {}", usage.head),
        format!("LIST {}", usage.list),
        format!("DELETE {}", usage.delete),
    ];
    if usage.other > 0 {
        counts.push(format!("other {}", usage.other));
    }
    if usage.retries > 0 {
        counts.push(paint(WARN, format_args!("{} of them again", usage.retries)));
    }
    say(format_args!("{} {store}", paint(DIM, "receipt ")));
    say(format_args!("{} {}  ({})", paint(DIM, "requests"), usage.requests(), counts.join("  ")));
    say(format_args!(
        "{} {} sent, {} received",
        paint(DIM, "bytes   "),
        bytes(usage.bytes_sent),
        bytes(usage.bytes_received)
    ));
    say(format_args!("{} {price}", paint(DIM, "price   ")));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_short() {
        for (count, text) in [
            (0, "0 B"),
            (999, "999 B"),
            (1000, "1.0 kB"),
            (9_949, "9.9 kB"),
            (12_345, "12 kB"),
            (999_499, "999 kB"),
            (999_500, "1.0 MB"),
            (3_400_000_000, "3.4 GB"),
        ] {
            assert_eq!(bytes(count), text);
        }
    }
}
