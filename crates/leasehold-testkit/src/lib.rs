//! What the tests share.
//!
//! - [`http`]: a small S3 whose answers a test can spoil;
//! - [`servers`]: real S3 and Azure servers, started on loopback and stopped with the tests;
//! - [`conformance`]: the one suite that every backend passes;
//! - [`gate`]: a store that stops, or fails, at a request of a test's choice;
//! - [`clock`]: clocks that are hours off, or run as fast as nothing happens;
//! - [`faulty`]: a store that loses answers, or breaks its word, on request.

pub mod clock;
pub mod conformance;
pub mod faulty;
pub mod gate;
pub mod http;
pub mod servers;

/// How many temporary files a store in a directory has.
pub fn temporary_files(store: &std::path::Path) -> usize {
    let folder = store.join(".lh/tmp");
    assert!(folder.is_dir(), "nothing was ever written to {}", store.display());
    files_below(&folder)
}

fn files_below(folder: &std::path::Path) -> usize {
    let Ok(entries) = std::fs::read_dir(folder) else { return 0 };
    let count = |entry: std::fs::DirEntry| match entry.file_type() {
        Ok(kind) if kind.is_dir() => files_below(&entry.path()),
        _ => 1,
    };
    entries.filter_map(Result::ok).map(count).sum()
}
