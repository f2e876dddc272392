//! Locks in a directory: alone, in a crowd, and after a kill -9.

pub mod contended;
pub mod takeover;
mod uncontended;

use crate::suite::Bench;

/// All of them.
pub const BENCHES: &[Bench] = &[
    Bench { name: "uncontended", run: uncontended::run },
    Bench { name: "contended", run: contended::run },
    Bench { name: "takeover", run: takeover::run },
];
