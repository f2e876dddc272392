//! The report for people at a terminal.

use std::fmt;

use super::{Report, Section};

const HEAD: [&str; 6] = ["ours", "floor, peer", "ratio", "spread", "target", ""];
const WIDTHS: [usize; 6] = [12, 12, 6, 12, 12, 0];

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}{}", self.command, if self.quick { " (quick: noisy)" } else { "" })?;
        writeln!(f, "{}, commit {}", self.date, self.commit)?;
        writeln!(f, "{}", self.host)?;
        writeln!(f, "load {} before, {} after", self.load_before, self.load_after)?;
        self.table(f)?;
        for section in &self.sections {
            facts(f, section)?;
        }
        for chart in self.charts() {
            write!(f, "\n{chart}")?;
        }
        let timed = self.sections.iter().filter(|section| section.seconds > 0.0);
        let took: Vec<String> =
            timed.map(|section| format!("{} {:.0} s", section.suite, section.seconds)).collect();
        writeln!(f, "\ntook: {}", took.join(", "))?;
        let mut first = true;
        for section in &self.sections {
            for not_run in &section.not_run {
                let (title, suite) = (if first { "\nnot run\n" } else { "" }, &section.suite);
                first = false;
                let failed = if not_run.failed { "FAILED: " } else { "" };
                writeln!(f, "{title}  {suite}, {}: {failed}{}", not_run.name, not_run.why)?;
            }
        }
        Ok(())
    }
}

fn facts(f: &mut fmt::Formatter<'_>, section: &Section) -> fmt::Result {
    let width = section.facts.iter().map(|fact| fact.name.chars().count()).max().unwrap_or(0);
    for (at, fact) in section.facts.iter().enumerate() {
        if at == 0 {
            writeln!(f, "\n{}", section.suite)?;
        }
        writeln!(f, "  {:width$}  {}", fact.name, fact.value)?;
    }
    Ok(())
}

impl Report {
    /// One table of all suites, and below it what the floors are.
    fn table(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(width) = self.rows().map(|(_, row)| row.name.chars().count()).max() else {
            return Ok(());
        };
        let line = |name: &str, cells: [&str; 6]| {
            let cells: String =
                cells.iter().zip(WIDTHS).map(|(cell, width)| format!("  {cell:>width$}")).collect();
            format!("{name:width$}{cells}").trim_end().to_owned()
        };
        writeln!(f, "\n{}", line("median of the runs", HEAD))?;
        let mut under = "";
        for (suite, row) in self.rows() {
            if suite != under {
                writeln!(f, "{suite}")?;
                under = suite;
            }
            writeln!(f, "{}", line(&row.name, row.cells().each_ref().map(String::as_str)))?;
        }
        writeln!(f, "\nfloors and notes")?;
        for (_, row) in self.rows() {
            writeln!(f, "  {}: {}", row.name, row.floor_is)?;
            if !row.note.is_empty() {
                writeln!(f, "    {}", row.note)?;
            }
        }
        Ok(())
    }
}
