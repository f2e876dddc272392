//! How costs grow with size: points, the exponent of the power law through them, and a plot.
//!
//! A cost that grows as `n^0` does not depend on the size; as `n^1`, twice the size costs twice as
//! much. The exponent is the slope of the straight line through the points on axes of logarithms,
//! by least squares. A cost with a large constant part bends upwards there, so the slope of the
//! last step is given too.

mod svg;

use std::fmt;

use serde::Serialize;

use crate::report::thousands;

/// What is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cost {
    /// Microseconds.
    Time,
    /// Microseconds of CPU time, of all processes together.
    Cpu,
    /// Requests to the store: in a directory, calls that would be requests on a bucket.
    Requests,
    /// The most memory that a process had, in MiB.
    Memory,
}

impl Cost {
    const ALL: [Self; 4] = [Self::Time, Self::Cpu, Self::Requests, Self::Memory];

    fn title(self) -> &'static str {
        match self {
            Self::Time => "time, µs",
            Self::Cpu => "CPU time, µs",
            Self::Requests => "requests",
            Self::Memory => "memory of the process, MiB",
        }
    }
}

/// How much a cost may grow.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Bound {
    /// At most as this power of the size.
    Power(f64),
    /// Never above this, whatever the size.
    Value(f64),
}

/// The same at any size.
pub const FLAT: Bound = Bound::Power(0.0);
/// A search: as the logarithm of the size, and as the processor's caches are too small for it. As a
/// power over the sizes measured here, that is about this.
pub const LOGARITHMIC: Bound = Bound::Power(0.15);
/// What touches everything.
pub const LINEAR: Bound = Bound::Power(1.0);

/// The cost of one operation at several sizes.
#[derive(Debug, Serialize)]
pub struct Curve {
    name: String,
    cost: Cost,
    /// Size and cost, sizes rising.
    points: Vec<(f64, f64)>,
    at_most: Option<Bound>,
    exponent: Option<f64>,
    last_step: Option<f64>,
}

/// Several curves over the same sizes.
#[derive(Debug, Serialize)]
pub struct Chart {
    /// For the file's name.
    pub name: &'static str,
    title: &'static str,
    /// What the size is.
    size: &'static str,
    curves: Vec<Curve>,
    notes: Vec<String>,
}

/// How much above its bound a fitted exponent may be: points are noisy.
const SLACK: f64 = 0.15;

impl Chart {
    pub fn new(name: &'static str, title: &'static str, size: &'static str) -> Self {
        Self { name, title, size, curves: Vec::new(), notes: Vec::new() }
    }

    /// A curve without points yet, which may grow this much.
    pub fn curve(&mut self, name: &str, cost: Cost, at_most: Bound) {
        self.push(name, cost, Some(at_most));
    }

    fn push(&mut self, name: &str, cost: Cost, at_most: Option<Bound>) {
        let (name, points) = (name.to_owned(), Vec::new());
        let curve = Curve { name, cost, points, at_most, exponent: None, last_step: None };
        self.curves.push(curve);
    }

    /// Adds a point to the curve of this name and cost, which is made if it is not there yet.
    pub fn point(&mut self, name: &str, cost: Cost, size: f64, value: f64) {
        let is = |curve: &&mut Curve| curve.name == name && curve.cost == cost;
        if !self.curves.iter_mut().any(|curve| is(&curve)) {
            self.push(name, cost, None);
        }
        if let Some(curve) = self.curves.iter_mut().find(is) {
            curve.points.push((size, value));
            curve.exponent = slope(&curve.points);
            curve.last_step = slope(&curve.points[curve.points.len().saturating_sub(2)..]);
        }
    }

    /// Something that a reader should know.
    pub fn note(&mut self, note: impl Into<String>) {
        self.notes.push(note.into());
    }

    /// The chart as a picture.
    pub fn to_svg(&self) -> String {
        svg::draw(self)
    }

    /// The chart as tables in Markdown.
    pub fn to_markdown(&self) -> String {
        let mut out = format!("### {}\n\n", self.title);
        for cost in Cost::ALL {
            let (sizes, curves) = self.of(cost);
            if curves.is_empty() {
                continue;
            }
            let cells = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
            let mut head = vec![format!("{} by {}", cost.title(), self.size)];
            head.extend(sizes.iter().map(|size| short(*size)));
            head.extend(["grows as", "last step", "at most", ""].map(str::to_owned));
            out += &cells(head.clone());
            out += &cells(vec!["---".to_owned(); head.len()]);
            for curve in curves {
                let mut row = vec![curve.name.clone()];
                row.extend(sizes.iter().map(|size| curve.at(*size)));
                row.extend(curve.verdict());
                out += &cells(row);
            }
            out.push('\n');
        }
        for note in &self.notes {
            out += &format!("{note}\n\n");
        }
        out
    }

    /// The curves of this cost, and all sizes that they have points at.
    fn of(&self, cost: Cost) -> (Vec<f64>, Vec<&Curve>) {
        let curves: Vec<&Curve> = self
            .curves
            .iter()
            .filter(|curve| curve.cost == cost && !curve.points.is_empty())
            .collect();
        let mut sizes: Vec<f64> =
            curves.iter().flat_map(|curve| curve.points.iter().map(|(size, _)| *size)).collect();
        sizes.sort_by(f64::total_cmp);
        sizes.dedup();
        (sizes, curves)
    }
}

impl Curve {
    fn at(&self, size: f64) -> String {
        let point = self.points.iter().find(|(at, _)| *at == size);
        point.map_or_else(|| "–".to_owned(), |(_, value)| short(*value))
    }

    /// Exponent, that of the last step, the bound, and whether it holds.
    fn verdict(&self) -> [String; 4] {
        let power = |exponent: Option<f64>| exponent.map_or_else(|| "–".to_owned(), power);
        let most = self.points.iter().map(|(_, cost)| *cost).fold(0.0, f64::max);
        let missed = match (self.at_most, self.exponent) {
            (Some(Bound::Power(bound)), Some(exponent)) => Some(exponent > bound + SLACK),
            (Some(Bound::Value(bound)), _) => Some(most > bound),
            _ => None,
        };
        let met = missed.map_or("", |missed| if missed { "MISSED" } else { "met" });
        let bound = match self.at_most {
            Some(Bound::Power(bound)) => format!("n^{bound}"),
            Some(Bound::Value(bound)) => short(bound),
            None => String::new(),
        };
        [power(self.exponent), power(self.last_step), bound, met.to_owned()]
    }
}

/// Tables for people.
impl fmt::Display for Chart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.title)?;
        for cost in Cost::ALL {
            let (sizes, curves) = self.of(cost);
            let Some(width) = curves.iter().map(|curve| curve.name.chars().count()).max() else {
                continue;
            };
            let head = cost.title();
            let width = width.max(head.chars().count());
            write!(f, "  {head:width$}")?;
            for size in &sizes {
                write!(f, " {:>9}", short(*size))?;
            }
            writeln!(f, " {:>9} {:>9} {:>7}", "grows as", "last step", "at most")?;
            for curve in curves {
                write!(f, "  {:width$}", curve.name)?;
                for size in &sizes {
                    write!(f, " {:>9}", curve.at(*size))?;
                }
                let [exponent, last, bound, met] = curve.verdict();
                let line = format!(" {exponent:>9} {last:>9} {bound:>7} {met}");
                writeln!(f, "{}", line.trim_end())?;
            }
        }
        self.notes.iter().try_for_each(|note| writeln!(f, "  {note}"))
    }
}

/// The slope on axes of logarithms, by least squares; none without two sizes that cost something.
fn slope(points: &[(f64, f64)]) -> Option<f64> {
    let logs: Vec<(f64, f64)> = points
        .iter()
        .filter(|(size, cost)| *size > 0.0 && *cost > 0.0)
        .map(|(size, cost)| (size.ln(), cost.ln()))
        .collect();
    let count = logs.len() as f64;
    let mean_x = logs.iter().map(|(x, _)| x).sum::<f64>() / count;
    let mean_y = logs.iter().map(|(_, y)| y).sum::<f64>() / count;
    let spread = logs.iter().map(|(x, _)| (x - mean_x).powi(2)).sum::<f64>();
    let together = logs.iter().map(|(x, y)| (x - mean_x) * (y - mean_y)).sum::<f64>();
    (spread > 0.0).then(|| together / spread)
}

/// An exponent in words. Nothing is `-0.00`.
fn power(exponent: f64) -> String {
    format!("n^{:.2}", (exponent * 100.0).round() / 100.0 + 0.0)
}

/// At most four digits that count.
fn short(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        large if large >= 100.0 => thousands(value),
        middle if middle >= 10.0 => format!("{value:.1}"),
        small if small >= 0.1 => format!("{value:.2}").trim_end_matches(".00").to_owned(),
        _ => format!("{value:.4}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(power: f64, at_most: f64) -> Chart {
        let at_most = Bound::Power(at_most);
        let mut chart = Chart::new("test", "A test", "things");
        chart.curve("work", Cost::Time, at_most);
        for size in [1e3, 1e4, 1e5] {
            chart.point("work", Cost::Time, size, 3.0 * f64::powf(size, power));
        }
        chart
    }

    #[test]
    fn the_exponent_of_a_power_is_found() {
        for power in [0.0, 0.5, 1.0, 2.0] {
            let exponent = chart(power, 1.0).curves[0].exponent.unwrap();
            assert!((exponent - power).abs() < 1e-9, "{exponent} instead of {power}");
        }
        assert_eq!(slope(&[(10.0, 1.0)]), None);
        assert_eq!(slope(&[(10.0, 0.0), (100.0, 0.0)]), None);
    }

    #[test]
    fn what_grows_faster_than_it_may_is_missed() {
        assert!(chart(1.0, 1.0).to_string().contains("met"));
        assert!(chart(1.3, 1.0).to_string().contains("MISSED"));
        assert!(chart(1.3, 1.0).to_markdown().contains("| n^1.30 | n^1.30 | n^1 | MISSED |"));
    }

    #[test]
    fn a_cost_may_have_a_limit_instead() {
        for (limit, verdict) in [(10.0, "met"), (9.0, "MISSED")] {
            let mut chart = Chart::new("test", "A test", "things");
            chart.curve("memory", Cost::Memory, Bound::Value(limit));
            chart.point("memory", Cost::Memory, 1.0, 1.0);
            chart.point("memory", Cost::Memory, 10.0, 10.0);
            assert!(chart.to_string().contains(verdict));
        }
    }

    #[test]
    fn a_picture_has_all_its_points() {
        let svg = chart(1.0, 1.0).to_svg();
        assert_eq!(svg.matches("<circle").count(), 3);
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
    }
}
