//! The index: merging an inbox, looking records up, asking in SQL, reading and writing USV.
//!
//! 1,000,000 records in 256 shards; an inbox of 100,000 updates, half of them of records that are
//! there (one in five of those older than what is there), half of them new.

mod bucket;
pub mod data;
mod floor;
mod import;
mod lookup;
pub mod memory;
mod merge;
mod peers;
mod sql;
mod usv;

use crate::suite::Bench;

/// All of them.
pub const BENCHES: &[Bench] = &[
    Bench { name: "usv", run: usv::run },
    Bench { name: "merge-files", run: merge::files },
    Bench { name: "merge-batches", run: merge::batches },
    Bench { name: "lookup", run: lookup::run },
    Bench { name: "sql", run: sql::run },
    Bench { name: "import", run: import::run },
    Bench { name: "bucket", run: bucket::run },
    Bench { name: "peers", run: peers::run },
    Bench { name: "memory", run: memory::run },
];
