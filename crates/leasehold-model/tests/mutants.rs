//! Known mistakes (FIELD.md rows), each made in the models, which must notice:
//! `cargo test -p leasehold-model --features mutants`.

#![cfg(feature = "mutants")]

use leasehold_model::suite::{self, Limits};
use leasehold_protocol::mutant::{self, Mutant};

/// Which model sees each, and by which property.
const CAUGHT: &[(Mutant, &str, &str)] = &[
    (Mutant::GetThenPut, "lease", "one holder at a time"),
    (Mutant::DeleteThenClaim, "lease", "one holder at a time"),
    (Mutant::OwnRefusal, "lease", "nobody gives up what is its own"),
    (Mutant::ZombieHeartbeat, "renew", "one holder at a time"),
    (Mutant::ZombieAck, "ack", "no promised task is lost"),
    (Mutant::GhostClaim, "ack", "what is gone is not started"),
    (Mutant::InboxOverwrite, "flat", "no promised record is lost, none comes back"),
    (Mutant::FirstShardWrite, "inbox", "no promised record is lost, none comes back"),
    (Mutant::OutlivedLock, "renew", "one holder at a time"),
    (Mutant::InboxAlwaysWins, "inbox", "compilers come to the same bytes"),
    (Mutant::FailedShardRead, "inbox", "no shard goes back in time"),
    (Mutant::SameIdNewTask, "push", "no promised task is lost"),
    (Mutant::HalfDoneDeadLetter, "retry", "no promised task is lost"),
    (Mutant::AskToDeath, "asking", "nobody gives up what is its own"),
    (Mutant::ReaderOrder, "flat", "readers see what was stored before"),
    (Mutant::CompilerOrder, "index", "no promised record is lost, none comes back"),
    (Mutant::CheckedThenPaused, "guard", "no write with an old token after one with a new"),
];

/// One test, because a mistake is made by the whole process.
#[test]
fn every_known_mistake_is_caught() {
    let mut survived = Vec::new();
    for (mistake, model, property) in CAUGHT {
        mutant::make(Some(*mistake));
        let limits = Limits { until: Some(*property), ..Limits::default() };
        let report = suite::run(model, limits).expect("a model of this name");
        mutant::make(None);
        let broken: Vec<_> = report.broken.iter().map(|(name, _)| *name).collect();
        println!("row {} {}: {model}: {broken:?}", mistake.row(), mistake.name());
        for (name, way) in &report.broken {
            println!("  {name}\n{way}");
        }
        if !broken.contains(property) {
            survived.push((mistake.name(), *model, *property));
        }
    }
    assert!(survived.is_empty(), "not caught: {survived:?}");
}
