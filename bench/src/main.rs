//! Side-by-side benchmarks: each figure of ours next to the bare loop that is its floor, and next to
//! what users would pick instead.
//!
//! A figure alone says more about the machine than about the program. So every benchmark runs our
//! work and the barest loop that does the same alternately, in the same run and in the same place,
//! and what counts is the ratio of the two:
//!
//! ```text
//!   warm up   ours  floor     not counted
//!   pair 1    ours  floor     ratio 1  ┐
//!   pair 2    ours  floor     ratio 2  ├ median, and spread from the least to the greatest
//!   …                                  ┘
//! ```
//!
//! ```text
//! cargo build --release -p leasehold-bench -p leasehold-cli
//! target/release/leasehold-bench all --quick           # minutes, nothing fetched
//! target/release/leasehold-bench all --full            # with all peers, fetched, and the largest sizes
//! target/release/leasehold-bench queue --peers --only durable [--dir PATH] [--json | --markdown]
//! target/release/leasehold-bench growth --plots docs   # pictures, too
//! ```
//!
//! A suite is a module with a list of [`Bench`](suite::Bench)es and a line in [`Command`].

// A benchmark measures real time; nothing here runs in the simulator.
#![allow(clippy::disallowed_methods)]

mod bucket;
mod chart;
mod growth;
mod host;
mod index;
mod locks;
mod machine;
mod peers;
mod queue;
mod report;
mod rig;
mod small;
mod stats;
mod store;
mod suite;

use clap::{Parser, Subcommand};
use suite::Suite;

/// Benchmarks of Leasehold, each next to the bare loop that is its floor.
#[derive(Parser)]
#[command(name = "leasehold-bench")]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Every suite, after the machine's own limits: one table.
    All(suite::Options),
    /// The machine's own limits.
    Machine(suite::Options),
    /// Objects in a directory and on S3 servers.
    Store(suite::Options),
    /// Locks, in a directory and on an S3 server.
    Locks(suite::Options),
    /// The queue, in a directory and on an S3 server.
    Queue(suite::Options),
    /// The index, in a directory and on an S3 server.
    Index(suite::Options),
    /// How costs grow with size.
    Growth(suite::Options),
    /// What a small machine feels.
    Small(suite::Options),
    /// Compacts, and tells how much memory that took.
    #[command(hide = true)]
    CompileChild(index::memory::Options),
    /// One kind of work on an index.
    #[command(hide = true)]
    IndexChild(growth::ChildOptions),
    /// One of the processes of a benchmark of locks.
    #[command(hide = true)]
    LockPlayer(locks::player::Options),
    /// The same of queues.
    #[command(hide = true)]
    QueuePlayer(queue::player::Options),
    /// Lists a folder, and tells how much memory that took: run by the listing benchmark, because
    /// a process' peak only ever rises.
    #[command(hide = true)]
    ListingChild(store::listing::child::Options),
}

const MACHINE: Suite = Suite { name: "machine", benches: machine::BENCHES };
const STORE: Suite = Suite { name: "store", benches: store::BENCHES };
const LOCKS: Suite = Suite { name: "locks", benches: locks::BENCHES };
const QUEUE: Suite = Suite { name: "queue", benches: queue::BENCHES };
const INDEX: Suite = Suite { name: "index", benches: index::BENCHES };
const GROWTH: Suite = Suite { name: "growth", benches: growth::BENCHES };
const SMALL: Suite = Suite { name: "small", benches: small::BENCHES };
/// In this order: what the machine can do comes first, what takes longest last.
const ALL: [Suite; 7] = [MACHINE, STORE, LOCKS, QUEUE, INDEX, SMALL, GROWTH];

fn main() -> anyhow::Result<()> {
    match Args::parse().command {
        Command::All(options) => suite::run(&ALL, &options),
        Command::Machine(options) => suite::run(&[MACHINE], &options),
        Command::Store(options) => suite::run(&[STORE], &options),
        Command::Locks(options) => suite::run(&[LOCKS], &options),
        Command::Queue(options) => suite::run(&[QUEUE], &options),
        Command::Index(options) => suite::run(&[INDEX], &options),
        Command::Growth(options) => suite::run(&[GROWTH], &options),
        Command::Small(options) => suite::run(&[SMALL], &options),
        Command::CompileChild(options) => index::memory::child(&options),
        Command::IndexChild(options) => growth::child(&options),
        Command::QueuePlayer(options) => queue::player::run(&options),
        Command::LockPlayer(options) => locks::player::run(&options),
        Command::ListingChild(options) => store::listing::child::run(&options),
    }
}
