//! Draws a chart: a panel per cost, side by side, both axes logarithmic.

use std::fmt::Write as _;

use super::{Chart, Cost, Curve, power};

const PANEL: f64 = 330.0;
const PLOT: (f64, f64) = (250.0, 210.0);
const LEFT: f64 = 62.0;
const TOP: f64 = 66.0;
const LEGEND_LINE: f64 = 17.0;
/// Told apart by the colour-blind, too (Okabe and Ito).
const COLOURS: [&str; 7] =
    ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"];

/// From here to there, in whole powers of ten.
#[derive(Clone, Copy)]
struct Axis {
    from: i32,
    to: i32,
}

impl Axis {
    /// Holds all of these; zero and less cannot be shown.
    fn of(values: impl Iterator<Item = f64>) -> Self {
        let logs = values.filter(|value| *value > 0.0).map(f64::log10);
        let (low, high) =
            logs.fold((f64::MAX, f64::MIN), |(low, high), log| (low.min(log), high.max(log)));
        if low > high {
            return Self { from: 0, to: 1 };
        }
        // A hair beyond a power of ten, as 1,024 is, is no reason for another one.
        let from = (low + 0.02).floor() as i32;
        Self { from, to: ((high - 0.02).ceil() as i32).max(from + 1) }
    }

    /// Where on it a value is, from 0 to 1.
    fn at(self, value: f64) -> f64 {
        (value.log10() - f64::from(self.from)) / f64::from(self.to - self.from)
    }
}

pub fn draw(chart: &Chart) -> String {
    let panels: Vec<_> = Cost::ALL
        .into_iter()
        .map(|cost| (cost, chart.of(cost).1))
        .filter(|(_, curves)| !curves.is_empty())
        .collect();
    let lines = panels.iter().map(|(_, curves)| curves.len()).max().unwrap_or(0);
    let width = PANEL * panels.len().max(1) as f64;
    let height = TOP + PLOT.1 + 56.0 + LEGEND_LINE * lines as f64;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <title>{title}</title>\n<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n\
         <text x=\"16\" y=\"26\" font-size=\"16\" font-weight=\"bold\">{title}</text>\n",
        title = escaped(chart.title)
    );
    for (at, (cost, curves)) in panels.iter().enumerate() {
        panel(&mut out, PANEL * at as f64 + LEFT, chart.size, *cost, curves);
    }
    out.push_str("</svg>\n");
    out
}

fn panel(out: &mut String, left: f64, size: &str, cost: Cost, curves: &[&Curve]) {
    let points = || curves.iter().flat_map(|curve| curve.points.iter());
    let x_axis = Axis::of(points().map(|(size, _)| *size));
    let y_axis = Axis::of(points().map(|(_, cost)| *cost));
    let x = |value: f64| left + PLOT.0 * x_axis.at(value);
    let y = |value: f64| TOP + PLOT.1 * (1.0 - y_axis.at(value));
    text(out, (left, TOP - 12.0), "start", cost.title());
    for power in x_axis.from..=x_axis.to {
        let at = x(10_f64.powi(power));
        grid(out, (at, TOP), (at, TOP + PLOT.1));
        text(out, (at, TOP + PLOT.1 + 16.0), "middle", &tick(power));
    }
    for power in y_axis.from..=y_axis.to {
        let at = y(10_f64.powi(power));
        grid(out, (left, at), (left + PLOT.0, at));
        text(out, (left - 6.0, at + 4.0), "end", &tick(power));
    }
    text(out, (left + PLOT.0 / 2.0, TOP + PLOT.1 + 34.0), "middle", size);
    for (n, curve) in curves.iter().enumerate() {
        let colour = COLOURS[n % COLOURS.len()];
        // Where two lie on top of each other, both can be seen.
        let dash = if n % 2 == 1 { " stroke-dasharray=\"7 5\"" } else { "" };
        let shown = curve.points.iter().filter(|(_, cost)| *cost > 0.0);
        let shown: Vec<(f64, f64)> = shown.map(|(size, cost)| (x(*size), y(*cost))).collect();
        let line: Vec<String> = shown.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let _ = writeln!(
            out,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"{dash}/>",
            line.join(" ")
        );
        for (x, y) in shown {
            let _ =
                writeln!(out, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.5\" fill=\"{colour}\"/>");
        }
        let at = TOP + PLOT.1 + 56.0 + LEGEND_LINE * n as f64;
        let _ = writeln!(
            out,
            "<line x1=\"{left}\" y1=\"{0}\" x2=\"{1}\" y2=\"{0}\" stroke=\"{colour}\" \
             stroke-width=\"3\"{dash}/>",
            at - 4.0,
            left + 20.0
        );
        let exponent = curve.exponent.map_or_else(|| "none".to_owned(), power);
        text(out, (left + 26.0, at), "start", &format!("{}: {exponent}", curve.name));
    }
}

fn grid(out: &mut String, (x1, y1): (f64, f64), (x2, y2): (f64, f64)) {
    let _ = writeln!(
        out,
        "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"#d8d8d8\"/>"
    );
}

fn text(out: &mut String, (x, y): (f64, f64), anchor: &str, text: &str) {
    let text = escaped(text);
    let _ = writeln!(
        out,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" fill=\"#222222\">{text}</text>"
    );
}

/// A power of ten, in words that are short.
fn tick(power: i32) -> String {
    match power {
        ..=-1 => format!("{:.*}", power.unsigned_abs() as usize, 10_f64.powi(power)),
        0..=2 => 10_u32.pow(power.unsigned_abs()).to_string(),
        3..=5 => format!("{} k", 10_u32.pow(power.unsigned_abs() - 3)),
        6..=8 => format!("{} M", 10_u32.pow(power.unsigned_abs() - 6)),
        _ => format!("1e{power}"),
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
