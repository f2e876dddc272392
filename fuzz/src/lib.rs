//! What the fuzzers run: the checks of the ordinary suite, on bytes of their own making.

#[path = "../../crates/leasehold-protocol/tests/formats/checks.rs"]
pub mod checks;
pub mod configuration;
pub mod journal;
// Private to the directory store, and so compiled here from the same file.
#[path = "../../crates/leasehold/src/store/dir/journal/record.rs"]
#[allow(dead_code)]
mod record;
mod store;
