//! One seed decides everything: the same seed gives the same history twice.

use leasehold_sim::{Options, run};

#[test]
fn the_same_seed_gives_the_same_history() {
    for seed in 0..60 {
        let (first, second) = (run(seed, &Options::default()), run(seed, &Options::default()));
        assert_eq!(first.hash, second.hash, "seed {seed} ({})", first.scenario.name());
        assert_eq!(first.violation, second.violation, "seed {seed}");
    }
}

#[test]
fn keeping_a_history_changes_nothing() {
    for seed in 60..75 {
        let recorded = run(seed, &Options { record: true, ..Options::default() });
        assert_eq!(recorded.hash, run(seed, &Options::default()).hash, "seed {seed}");
        assert!(recorded.history.len() > 20, "seed {seed} has a history that can be read");
    }
}

#[test]
fn different_seeds_give_different_histories() {
    let hashes: std::collections::BTreeSet<u64> =
        (0..40).map(|seed| run(seed, &Options::default()).hash).collect();
    assert_eq!(hashes.len(), 40);
}
