//! The report for documents: RESULTS.md, docs/growth.md.

use super::Report;

impl Report {
    /// Tables in Markdown.
    pub fn to_markdown(&self) -> String {
        let quick = if self.quick { ", quick" } else { "" };
        let mut out =
            format!("{}, commit {}, `{}`{quick}.\n\n", self.date, self.commit, self.command);
        let host = self.host.to_string().replace('\n', "; ");
        out += &format!("{host}; load {} before, {} after.\n\n", self.load_before, self.load_after);
        if self.rows().next().is_some() {
            out += "| suite | work | ours | floor or peer | ratio | spread | target | |\n";
            out += "| --- | --- | --- | --- | --- | --- | --- | --- |\n";
        }
        for (suite, row) in self.rows() {
            out += &format!("| {suite} | {} | {} |\n", row.name, row.cells().join(" | "));
        }
        out.push('\n');
        for section in &self.sections {
            for fact in &section.facts {
                out += &format!("- {}: {}: {}\n", section.suite, fact.name, fact.value);
            }
        }
        out.push('\n');
        for chart in self.charts() {
            out += &chart.to_markdown();
        }
        for section in &self.sections {
            for not_run in &section.not_run {
                let failed = if not_run.failed { "**failed**: " } else { "" };
                out += &format!(
                    "- not run: {}, {}: {failed}{}\n",
                    section.suite, not_run.name, not_run.why
                );
            }
        }
        out
    }
}
