//! The store layer: objects in a directory and on S3 servers.

pub mod bucket;
mod churn;
mod durable;
pub mod floor;
pub mod listing;
mod swap;

use anyhow::{Result, bail};
use leasehold::{Durability, Proof, Put, Version, When, Write};

use crate::suite::Bench;

/// All of them. The one that a file system's memory of deleted files disturbs most comes first.
pub const BENCHES: &[Bench] = &[
    Bench { name: "durable", run: durable::run },
    Bench { name: "churn", run: churn::run },
    Bench { name: "swap", run: swap::run },
    Bench { name: "listing", run: listing::run },
    Bench { name: "bucket", run: bucket::run },
];

/// A write that applies only where nothing is.
fn create(durability: Durability) -> Write {
    Write::when(When::Absent, Proof::Bytes).durability(durability)
}

/// The version that was stored; anything else means that the benchmark measures the wrong thing.
fn stored(put: Put) -> Result<Version> {
    match put {
        Put::Stored(version) => Ok(version),
        other => bail!("a write of the benchmark was not stored: {other:?}"),
    }
}
