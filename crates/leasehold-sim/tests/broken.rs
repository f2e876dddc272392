//! Stores that break their word are noticed: `doctor` has to refuse them, and here is why.

use leasehold_sim::faults::Broken;
use leasehold_sim::{Options, hunt};

/// Within this many seeds.
const SEEDS: u64 = 3000;

#[test]
fn every_broken_store_is_caught() {
    let mut survived = Vec::new();
    for broken in Broken::ALL {
        let options = Options { broken: Some(broken), ..Options::default() };
        match hunt(0..SEEDS, &options, 2) {
            Some(caught) => println!(
                "{}: seed {} ({}): {}",
                broken.name(),
                caught.seed,
                caught.scenario.name(),
                caught.violation.unwrap_or_default()
            ),
            None => survived.push(broken.name()),
        }
    }
    assert!(survived.is_empty(), "nobody noticed: {survived:?}");
}
