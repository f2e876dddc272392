//! What a suite found: a table for people, JSON for scripts.

use std::fmt;

use anyhow::Result;
use serde::Serialize;

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

/// What a suite found.
#[derive(Debug, Serialize)]
pub struct Report {
    suite: String,
    quick: bool,
    host: Host,
    load_before: String,
    load_after: String,
    facts: Vec<Fact>,
    rows: Vec<Row>,
}

impl Report {
    pub fn new(suite: &str, rig: &Rig) -> Self {
        Self {
            suite: suite.to_owned(),
            quick: rig.quick(),
            host: Host::of(rig.path()),
            load_before: load_average(),
            load_after: String::new(),
            facts: Vec::new(),
            rows: Vec::new(),
        }
    }

    pub fn add(&mut self, row: Row) {
        self.rows.push(row);
    }

    pub fn fact(&mut self, name: impl Into<String>, value: impl Into<String>) {
        self.facts.push(Fact { name: name.into(), value: value.into() });
    }

    pub fn finish(&mut self) {
        self.load_after = load_average();
    }

    pub fn to_json(&self) -> Result<String> {
        Ok(serde_json::to_string_pretty(self)?)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}{}", self.suite, if self.quick { " (quick: noisy)" } else { "" })?;
        writeln!(f, "{}", self.host)?;
        writeln!(f, "load {} before, {} after", self.load_before, self.load_after)?;
        if !self.rows.is_empty() {
            writeln!(f)?;
            self.rows(f)?;
        }
        let width = self.facts.iter().map(|fact| fact.name.chars().count()).max().unwrap_or(0);
        for (at, fact) in self.facts.iter().enumerate() {
            writeln!(f, "{}{:width$}  {}", if at == 0 { "\n" } else { "" }, fact.name, fact.value)?;
        }
        Ok(())
    }
}

impl Report {
    fn rows(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.rows.iter().map(|row| row.name.chars().count()).max().unwrap_or(0);
        writeln!(
            f,
            "{:width$}  {:>12}  {:>12}  {:>6}  {:>12}  {:>12}",
            "median of the runs", "ours", "floor, peer", "ratio", "spread", "target"
        )?;
        for row in &self.rows {
            let spread = format!("{}–{}", ratio(row.least), ratio(row.greatest));
            let target = match row.target {
                Some(Target::Ratio(least)) => format!("≥ {least} ×"),
                Some(Target::Rate(least)) => format!("≥ {}", row.unit.show(least)),
                None => String::new(),
            };
            let verdict = match row.met {
                Some(true) => "met",
                Some(false) => "MISSED",
                None => "",
            };
            let line = format!(
                "{:width$}  {:>12}  {:>12}  {:>6}  {spread:>12}  {target:>12}  {verdict}",
                row.name,
                row.unit.show(row.ours),
                row.unit.show(row.floor),
                ratio(row.ratio),
            );
            writeln!(f, "{}", line.trim_end())?;
        }
        writeln!(f, "\nfloors and notes")?;
        for row in &self.rows {
            writeln!(f, "  {}: {}", row.name, row.floor_is)?;
            if !row.note.is_empty() {
                writeln!(f, "    {}", row.note)?;
            }
        }
        Ok(())
    }
}

impl Unit {
    fn show(self, value: f64) -> String {
        match self {
            Self::Rate => format!("{}/s", thousands(value)),
            Self::Millis if value >= 10.0 => format!("{value:.0} ms"),
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
    }

    #[test]
    fn faster_is_a_ratio_above_one_in_any_unit() {
        let pairs = || Pairs { ours: vec![10.0], floor: vec![5.0] };
        assert_eq!(Row::new("", Unit::Rate, pairs(), "").ratio, 2.0);
        assert_eq!(Row::new("", Unit::Millis, pairs(), "").ratio, 0.5);
    }
}
