//! Exit codes. Documented in `--help` and in the README; they stay as they are.

use leasehold::ErrorKind;

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// Done.
    Done = 0,
    /// Failed. The doctor: usable with limits.
    Failed = 1,
    /// Wrong arguments or configuration. The doctor: unsafe.
    Usage = 2,
    /// A condition did not hold, and nothing was changed.
    Refused = 3,
    /// There is no such object.
    NotFound = 4,
    /// The store did not answer: try again.
    Unavailable = 5,
}

/// For `--help`.
pub const HELP: &str = "\
Exit codes:
  0  done (doctor: safe)
  1  failed (doctor: usable with limits)
  2  wrong arguments or configuration (doctor: unsafe)
  3  refused: a condition did not hold, nothing was changed
  4  not found
  5  the store did not answer, or the outcome is unknown: try again";

impl Exit {
    /// The code for an error.
    pub fn of(error: &anyhow::Error) -> Self {
        match error.downcast_ref::<leasehold::Error>().map(leasehold::Error::kind) {
            Some(ErrorKind::Invalid) => Self::Usage,
            Some(ErrorKind::Unavailable) => Self::Unavailable,
            _ => Self::Failed,
        }
    }
}
