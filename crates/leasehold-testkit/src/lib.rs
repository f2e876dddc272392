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

/// Makes a file of another tool look as if nobody had written to it for two minutes, where the store is a
/// directory. A compiler leaves it alone until then.
pub fn left_alone(store: &leasehold::Store, key: &str) {
    if store.kind() != leasehold::store::backend::Kind::Directory {
        return;
    }
    let (folder, _) = key.rsplit_once('/').unwrap_or_default();
    // A long name is cut into folders, and some characters of a key are written otherwise.
    all_left_alone(&std::path::Path::new(&store.url()).join(folder));
}

fn all_left_alone(folder: &std::path::Path) {
    for entry in std::fs::read_dir(folder).expect("the folder is there") {
        let path = entry.expect("it can be read").path();
        match path.is_dir() {
            true if path.to_string_lossy().ends_with("%~") => all_left_alone(&path),
            true => {}
            false => written_ago(&path, std::time::Duration::from_secs(120)),
        }
    }
}

/// Sets when a file was last written.
///
/// # Panics
///
/// If it is not there.
#[allow(clippy::disallowed_methods)] // what the file system calls now
pub fn written_ago(path: &std::path::Path, ago: std::time::Duration) {
    let file = std::fs::File::options().write(true).open(path).expect("the file is there");
    let then = std::time::SystemTime::now() - ago;
    file.set_modified(then).expect("times can be set");
}

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
