//! Exit codes. Documented in `--help` and in the README; they stay as they are.

use leasehold::ErrorKind;

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// Done.
    Done = 0,
    /// Failed. The doctor: usable with limits. A worker: tasks were given up.
    Failed = 1,
    /// Wrong arguments or configuration. The doctor: unsafe, or damaged.
    Usage = 2,
    /// A condition did not hold, and nothing was changed.
    Refused = 3,
    /// There is no such object.
    NotFound = 4,
    /// The store did not answer: try again.
    Unavailable = 5,
    /// A lock could not be had in time.
    NotAcquired = 75,
    /// A lock was lost, and what ran under it was stopped.
    Lost = 76,
}

/// What a command ends with: a code of ours, or that of a program that we ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// Ours.
    Ours(Exit),
    /// The program's.
    Program(u8),
}

impl From<Exit> for Ending {
    fn from(exit: Exit) -> Self {
        Self::Ours(exit)
    }
}

impl From<Ending> for std::process::ExitCode {
    fn from(ending: Ending) -> Self {
        match ending {
            Ending::Ours(exit) => Self::from(exit as u8),
            Ending::Program(code) => Self::from(code),
        }
    }
}

/// For `--help`.
pub const HELP: &str = "\
Exit codes:
  0  done (doctor: safe)
  1  failed (doctor: usable with limits; queue work --exit-when-empty: tasks were given up)
  2  wrong arguments or configuration (doctor: unsafe, or damaged)
  3  refused: a condition did not hold, nothing was changed
  4  not found
  5  the store did not answer, or the outcome is unknown: try again
  75, 76  a lock was held by somebody else all the time; was lost";

impl Exit {
    /// The code for an error.
    pub fn of(error: &anyhow::Error) -> Self {
        match error.downcast_ref::<leasehold::Error>().map(leasehold::Error::kind) {
            Some(ErrorKind::Invalid) => Self::Usage,
            Some(ErrorKind::NotFound) => Self::NotFound,
            Some(ErrorKind::Held) => Self::NotAcquired,
            Some(ErrorKind::Unavailable) => Self::Unavailable,
            Some(ErrorKind::Lost) => Self::Lost,
            _ => Self::Failed,
        }
    }
}
