//! Every model, to its usual depth: nothing is broken, and every situation that it is about occurs.

#![cfg(not(feature = "mutants"))]

use leasehold_model::suite::{self, Limits};

fn check(name: &str) {
    let report = suite::run(name, Limits::default()).expect("a model of this name");
    println!("{report}");
    assert!(report.is_fine(), "{report}");
    assert!(report.states > 1000, "{report}: too small to say anything");
}

/// One after the other: each uses all cores.
#[test]
fn nothing_is_broken() {
    for name in suite::names() {
        check(name);
    }
}
