//! What suites found: one table for people, in Markdown for documents, JSON for scripts.

mod markdown;
mod text;

use std::time::Duration;

use anyhow::Result;
use serde::Serialize;

use crate::chart::Chart;
use crate::host::{Host, load_average};
use crate::rig::Rig;
use crate::stats::{Pairs, median};

/// What a figure should be.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Target {
    /// At least this many times the floor.
    Ratio(f64),
    /// At least this many per second, whatever the floor.
    Rate(f64),
    /// At most this much, whatever the floor.
    AtMost(f64),
}

/// What is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// Per second: more is better.
    Rate,
    /// Milliseconds: less is better, and ratios are turned over so that more of them is, too.
    Millis,
}

/// A figure next to its floor.
#[derive(Debug, Serialize)]
pub struct Row {
    pub name: String,
    pub unit: Unit,
    pub ours: f64,
    pub floor: f64,
    /// The median of the ratios of each pair.
    pub ratio: f64,
    pub least: f64,
    pub greatest: f64,
    pub target: Option<Target>,
    pub met: Option<bool>,
    pub ours_runs: Vec<f64>,
    pub floor_runs: Vec<f64>,
    /// What the floor does.
    pub floor_is: &'static str,
    /// Anything else that a reader should know.
    pub note: String,
}

impl Row {
    /// A row of these pairs, without a target or a note.
    pub fn new(name: impl Into<String>, unit: Unit, pairs: Pairs, floor_is: &'static str) -> Self {
        let mut ratios = pairs.ratios();
        if unit == Unit::Millis {
            ratios.iter_mut().for_each(|ratio| *ratio = 1.0 / *ratio);
        }
        Self {
            name: name.into(),
            unit,
            ours: median(&pairs.ours),
            floor: median(&pairs.floor),
            ratio: median(&ratios),
            least: ratios.iter().copied().fold(f64::INFINITY, f64::min),
            greatest: ratios.iter().copied().fold(0.0, f64::max),
            target: None,
            met: None,
            ours_runs: pairs.ours,
            floor_runs: pairs.floor,
            floor_is,
            note: String::new(),
        }
    }

    /// With this target.
    pub fn target(mut self, target: Target) -> Self {
        self.met = Some(match target {
            Target::Ratio(least) => self.ratio >= least,
            Target::Rate(least) => self.ours >= least,
            Target::AtMost(most) => self.ours <= most,
        });
        self.target = Some(target);
        self
    }

    /// With this remark below it.
    pub fn note(mut self, note: impl Into<String>) -> Self {
        self.note = note.into();
        self
    }
}

/// Something measured that has no floor.
#[derive(Debug, Serialize)]
pub struct Fact {
    pub name: String,
    pub value: String,
}

/// Something that was asked for and not measured.
#[derive(Debug, Serialize)]
pub struct NotRun {
    pub name: String,
    pub why: String,
    /// Whether it was tried and went wrong.
    pub failed: bool,
}

/// What one suite found.
#[derive(Debug, Serialize)]
pub struct Section {
    pub suite: String,
    pub seconds: f64,
    pub facts: Vec<Fact>,
    pub rows: Vec<Row>,
    pub charts: Vec<Chart>,
    pub not_run: Vec<NotRun>,
}

/// What all suites of a run found.
#[derive(Debug, Serialize)]
pub struct Report {
    command: String,
    date: String,
    /// Of the sources around this program, if git knows.
    commit: String,
    quick: bool,
    host: Host,
    load_before: String,
    load_after: String,
    sections: Vec<Section>,
}

impl Report {
    pub fn new(rig: &Rig) -> Self {
        let arguments: Vec<String> = std::env::args().skip(1).collect();
        Self {
            command: format!("leasehold-bench {}", arguments.join(" ")),
            date: jiff::Timestamp::now().strftime("%Y-%m-%d %H:%M UTC").to_string(),
            commit: commit().unwrap_or_else(|| "unknown".to_owned()),
            quick: rig.quick(),
            host: Host::of(rig.path()),
            load_before: load_average(),
            load_after: String::new(),
            sections: Vec::new(),
        }
    }

    /// What comes next is found by this suite.
    pub fn begin(&mut self, suite: &str) {
        self.sections.push(Section {
            suite: suite.to_owned(),
            seconds: 0.0,
            facts: Vec::new(),
            rows: Vec::new(),
            charts: Vec::new(),
            not_run: Vec::new(),
        });
    }

    fn section(&mut self) -> &mut Section {
        if self.sections.is_empty() {
            self.begin("");
        }
        let last = self.sections.len() - 1;
        &mut self.sections[last]
    }

    pub fn add(&mut self, row: Row) {
        self.section().rows.push(row);
    }

    pub fn fact(&mut self, name: impl Into<String>, value: impl Into<String>) {
        self.section().facts.push(Fact { name: name.into(), value: value.into() });
    }

    pub fn chart(&mut self, chart: Chart) {
        self.section().charts.push(chart);
    }

    /// Says that this was not measured, and why: nothing is left out in silence. Once is enough.
    pub fn not_run(&mut self, name: impl Into<String>, why: impl Into<String>) {
        let not_run = NotRun { name: name.into(), why: why.into(), failed: false };
        let said = |known: &NotRun| (&known.name, &known.why) == (&not_run.name, &not_run.why);
        if !self.section().not_run.iter().any(said) {
            self.section().not_run.push(not_run);
        }
    }

    /// Says that this was tried and went wrong.
    pub fn failed(&mut self, name: impl Into<String>, error: &anyhow::Error) {
        let (name, why) = (name.into(), format!("{error:#}"));
        self.section().not_run.push(NotRun { name, why, failed: true });
    }

    /// Whether nothing went wrong.
    pub fn is_whole(&self) -> bool {
        !self.sections.iter().flat_map(|section| &section.not_run).any(|not_run| not_run.failed)
    }

    /// How long the suite took.
    pub fn took(&mut self, time: Duration) {
        self.section().seconds = time.as_secs_f64();
    }

    pub fn charts(&self) -> impl Iterator<Item = &Chart> {
        self.sections.iter().flat_map(|section| &section.charts)
    }

    pub fn finish(&mut self) {
        self.load_after = load_average();
    }

    pub fn to_json(&self) -> Result<String> {
        Ok(serde_json::to_string_pretty(self)?)
    }

    /// All rows, with the suite that found each.
    fn rows(&self) -> impl Iterator<Item = (&str, &Row)> {
        self.sections
            .iter()
            .flat_map(|section| section.rows.iter().map(|row| (section.suite.as_str(), row)))
    }
}

/// The commit that is checked out, with a mark if files were changed since.
fn commit() -> Option<String> {
    let folder = env!("CARGO_MANIFEST_DIR");
    let mut git = std::process::Command::new("git");
    git.args(["-C", folder, "describe", "--always", "--dirty", "--exclude=*", "--abbrev=10"]);
    let output = git.output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}

impl Row {
    /// The cells of a table, behind the name: ours, floor, ratio, spread, target, verdict.
    fn cells(&self) -> [String; 6] {
        [
            self.unit.show(self.ours),
            self.unit.show(self.floor),
            ratio(self.ratio),
            format!("{}–{}", ratio(self.least), ratio(self.greatest)),
            match self.target {
                Some(Target::Ratio(least)) => format!("≥ {least} ×"),
                Some(Target::Rate(least)) => format!("≥ {}", self.unit.show(least)),
                Some(Target::AtMost(most)) => format!("≤ {}", self.unit.show(most)),
                None => String::new(),
            },
            match self.met {
                Some(true) => "met".to_owned(),
                Some(false) => "MISSED".to_owned(),
                None => String::new(),
            },
        ]
    }
}

impl Unit {
    fn show(self, value: f64) -> String {
        match self {
            Self::Rate => format!("{}/s", thousands(value)),
            Self::Millis if value >= 10.0 => format!("{value:.0} ms"),
            Self::Millis if value < 0.1 => format!("{:.1} µs", value * 1e3),
            Self::Millis => format!("{value:.2} ms"),
        }
    }
}

fn ratio(value: f64) -> String {
    match value >= 10.0 {
        true => format!("{value:.1}"),
        false => format!("{value:.2}"),
    }
}

/// The number without decimals, in groups of three digits.
pub fn thousands(value: f64) -> String {
    let digits = format!("{value:.0}");
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at) % 3 == 0 {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_readable() {
        assert_eq!(thousands(999.4), "999");
        assert_eq!(thousands(1234567.0), "1,234,567");
        assert_eq!(Unit::Millis.show(1.234), "1.23 ms");
        assert_eq!(Unit::Millis.show(0.001_234), "1.2 µs");
    }

    #[test]
    fn faster_is_a_ratio_above_one_in_any_unit() {
        let pairs = || Pairs { ours: vec![10.0], floor: vec![5.0] };
        assert_eq!(Row::new("", Unit::Rate, pairs(), "").ratio, 2.0);
        assert_eq!(Row::new("", Unit::Millis, pairs(), "").ratio, 0.5);
    }
}
