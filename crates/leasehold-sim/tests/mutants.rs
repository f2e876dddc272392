//! Every known mistake is caught: a checker that misses one of these would miss an unknown one.
#![cfg(feature = "mutants")]

use leasehold::protocol::mutant::{Mutant, make};
use leasehold_sim::scenario::Scenario;
use leasehold_sim::{Options, hunt};

/// Within this many seeds.
const SEEDS: u64 = 4000;

/// Where it shows.
fn scenario(mutant: Mutant) -> Scenario {
    use Mutant::*;
    match mutant {
        GetThenPut | DeleteThenClaim | ZombieHeartbeat | NaiveClock | EmptyLockFile
        | AskToDeath | CheckedThenPaused | Suspend | OtherPidNamespace => Scenario::Locks,
        OwnRefusal | ConflictAsHeld | ZombieAck | GhostClaim | LateGhostPut | SameIdNewTask
        | HalfDoneDeadLetter | SplitPage | QuickButDoubled => Scenario::Queue,
        InboxOverwrite | FirstShardWrite | OutlivedLock | StragglerOverwrite | EqualTimes
        | RandomPage | UnnormalisedKeys | InboxAlwaysWins | FailedShardRead | ReaderOrder => {
            Scenario::Index
        }
        CompilerOrder => Scenario::Purge,
        AbsentMeansDeleted | Resurrection => Scenario::Sync,
    }
}

/// One test for all of them: which mistake is made is decided for the whole process.
#[test]
fn every_mutant_is_caught() {
    let mut survived = Vec::new();
    for mutant in Mutant::ALL {
        make(Some(mutant));
        let options = Options { scenario: Some(scenario(mutant)), ..Options::default() };
        match hunt(0..SEEDS, &options, 2) {
            Some(caught) => println!(
                "{} {}: seed {} ({}): {}",
                mutant.row(),
                mutant.name(),
                caught.seed,
                caught.scenario.name(),
                caught.violation.unwrap_or_default()
            ),
            None => survived.push((mutant.row(), mutant.name())),
        }
        make(None);
    }
    assert!(survived.is_empty(), "nobody noticed: {survived:?}");
}
