//! Medians, ratios and the alternation that makes them comparable.

use std::time::{Duration, Instant};

use anyhow::Result;

/// The middle one of these values; of an even number, the mean of the middle two.
pub fn median(values: &[f64]) -> f64 {
    percentile(values, 0.5)
}

/// The value below which this share of the values lies, between two values the mean by weight.
pub fn percentile(values: &[f64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let Some(last) = sorted.len().checked_sub(1) else { return f64::NAN };
    let at = last as f64 * share;
    let (low, weight) = (at.floor() as usize, at.fract());
    let high = (low + 1).min(last);
    sorted[low] * (1.0 - weight) + sorted[high] * weight
}

/// What each of `count` contestants gives, round by round, after one round that does not count:
/// neighbours in time saw the same machine.
pub fn rounds(
    rounds: usize,
    count: usize,
    mut run: impl FnMut(usize) -> Result<f64>,
) -> Result<Vec<Vec<f64>>> {
    let mut runs = vec![Vec::with_capacity(rounds); count];
    for round in 0..=rounds {
        for (at, runs) in runs.iter_mut().enumerate() {
            let value = run(at)?;
            if round > 0 {
                runs.push(value);
            }
        }
    }
    Ok(runs)
}

/// What our work and its floor gave, pair by pair.
#[derive(Debug, Default)]
pub struct Pairs {
    pub ours: Vec<f64>,
    pub floor: Vec<f64>,
}

impl Pairs {
    /// Runs both alternately, after one run each that does not count.
    pub fn measure(
        count: usize,
        mut ours: impl FnMut() -> Result<f64>,
        mut floor: impl FnMut() -> Result<f64>,
    ) -> Result<Self> {
        let mut runs = rounds(count, 2, |at| if at == 0 { ours() } else { floor() })?;
        let floor = runs.pop().unwrap_or_default();
        Ok(Self { ours: runs.pop().unwrap_or_default(), floor })
    }

    /// Ours by the floor, pair by pair: neighbours in time saw the same machine.
    pub fn ratios(&self) -> Vec<f64> {
        self.ours.iter().zip(&self.floor).map(|(ours, floor)| ours / floor).collect()
    }
}

/// How often per second `once` runs, tried for as long as `window`.
pub fn rate(window: Duration, mut once: impl FnMut() -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    let mut done = 0_u64;
    loop {
        once()?;
        done += 1;
        let elapsed = start.elapsed();
        if elapsed >= window {
            return Ok(done as f64 / elapsed.as_secs_f64());
        }
    }
}

/// [`rate`] for asynchronous work.
pub async fn rate_async(
    window: Duration,
    mut once: impl AsyncFnMut() -> Result<()>,
) -> Result<f64> {
    let start = Instant::now();
    let mut done = 0_u64;
    loop {
        once().await?;
        done += 1;
        let elapsed = start.elapsed();
        if elapsed >= window {
            return Ok(done as f64 / elapsed.as_secs_f64());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(percentile(&[1.0, 2.0, 3.0], 1.0), 3.0);
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn the_first_run_of_each_does_not_count() {
        let (mut ours, mut floor) = (0.0, 0.0);
        let pairs = Pairs::measure(
            3,
            || {
                ours += 1.0;
                Ok(ours)
            },
            || {
                floor += 2.0;
                Ok(floor)
            },
        )
        .unwrap();
        assert_eq!(pairs.ours, [2.0, 3.0, 4.0]);
        assert_eq!(pairs.ratios(), [0.5, 0.5, 0.5]);
    }
}
