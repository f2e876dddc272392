//! The pure part of Leasehold: every decision and every format.
//!
//! Nothing here performs I/O, reads a clock or draws a random number. "Now", nonces and bytes are
//! arguments, so the same functions run in unit tests, property tests, fuzzers, the model checker,
//! the simulator and the product.
//!
//! | module | what it decides |
//! | --- | --- |
//! | [`key`] | which names an object may have, and how any name becomes one |
//! | [`layout`] | every key in the store: built and parsed there, and nowhere else |
//! | [`cas`] | the words of compare-and-swap: version, condition, nonce |
//! | [`lease`] | who may hold, until when, with which token |
//! | [`queue`] | what becomes of a task: run, try again later, give up, clean up |
//! | [`shard`] | which shard a key belongs to |
//! | [`merge`] | which of two records counts |
//! | [`compile`] | how a shard takes in its inbox |
//! | [`supervise`] | what a node runs, what is started again, how nodes are doing |
//! | [`pace`] | when the next request may be sent |
//! | [`sync`] | what a replica tells the bucket, and what it takes from it |
//! | [`settle`] | what a read says about a write whose answer was lost |
//! | [`time`] | the store's time and its text form |
//! | [`duration`] | spans of time as text |
//! | [`backoff`] | how long to wait before the next attempt |
//! | [`mutant`] | known mistakes that the checkers must catch |
//! | [`mod@format`] | the bytes of stored records |

pub mod backoff;
pub mod cas;
pub mod compile;
pub mod duration;
pub mod format;
pub mod key;
pub mod layout;
pub mod lease;
pub mod merge;
pub mod mutant;
pub mod pace;
pub mod queue;
pub mod settle;
pub mod shard;
pub mod supervise;
pub mod sync;
pub mod time;
