//! Known mistakes, each an interleaving that breaks a design like ours. They are compiled in only
//! with the feature `mutants`, for the checkers to catch: a checker that misses a known mistake
//! would miss an unknown one. In every other build [`is`] is the constant `false`.

/// A mistake, by its row in the table of interleavings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Mutant {
    /// get-then-put lock.
    GetThenPut = 1,
    /// delete-then-claim.
    DeleteThenClaim = 2,
    /// own 412.
    OwnRefusal = 3,
    /// 409 as held.
    ConflictAsHeld = 4,
    /// zombie heartbeat.
    ZombieHeartbeat = 5,
    /// zombie ack.
    ZombieAck = 6,
    /// ghost claim.
    GhostClaim = 7,
    /// inbox overwrite.
    InboxOverwrite = 8,
    /// first shard write.
    FirstShardWrite = 9,
    /// outlived lock.
    OutlivedLock = 10,
    /// straggler overwrite.
    StragglerOverwrite = 11,
    /// naive clock.
    NaiveClock = 12,
    /// equal times.
    EqualTimes = 13,
    /// absent means deleted.
    AbsentMeansDeleted = 14,
    /// resurrection.
    Resurrection = 15,
    /// empty lock file.
    EmptyLockFile = 16,
    /// random page.
    RandomPage = 17,
    /// unnormalised keys.
    UnnormalisedKeys = 18,
    /// inbox always wins.
    InboxAlwaysWins = 19,
    /// failed shard read.
    FailedShardRead = 20,
    /// late ghost PUT.
    LateGhostPut = 21,
    /// same id, new task.
    SameIdNewTask = 22,
    /// half-done dead letter.
    HalfDoneDeadLetter = 23,
    /// split page.
    SplitPage = 24,
    /// ask to death.
    AskToDeath = 25,
    /// quick but doubled.
    QuickButDoubled = 26,
    /// other pid namespace.
    OtherPidNamespace = 27,
    /// reader order.
    ReaderOrder = 28,
    /// compiler order.
    CompilerOrder = 29,
    /// checked, then paused.
    CheckedThenPaused = 30,
    /// suspend.
    Suspend = 31,
}

impl Mutant {
    /// All of them.
    pub const ALL: [Self; 31] = [
        Self::GetThenPut,
        Self::DeleteThenClaim,
        Self::OwnRefusal,
        Self::ConflictAsHeld,
        Self::ZombieHeartbeat,
        Self::ZombieAck,
        Self::GhostClaim,
        Self::InboxOverwrite,
        Self::FirstShardWrite,
        Self::OutlivedLock,
        Self::StragglerOverwrite,
        Self::NaiveClock,
        Self::EqualTimes,
        Self::AbsentMeansDeleted,
        Self::Resurrection,
        Self::EmptyLockFile,
        Self::RandomPage,
        Self::UnnormalisedKeys,
        Self::InboxAlwaysWins,
        Self::FailedShardRead,
        Self::LateGhostPut,
        Self::SameIdNewTask,
        Self::HalfDoneDeadLetter,
        Self::SplitPage,
        Self::AskToDeath,
        Self::QuickButDoubled,
        Self::OtherPidNamespace,
        Self::ReaderOrder,
        Self::CompilerOrder,
        Self::CheckedThenPaused,
        Self::Suspend,
    ];

    /// Its row.
    pub const fn row(self) -> u8 {
        self as u8
    }

    /// What the table calls it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::GetThenPut => "get-then-put lock",
            Self::DeleteThenClaim => "delete-then-claim",
            Self::OwnRefusal => "own 412",
            Self::ConflictAsHeld => "409 as held",
            Self::ZombieHeartbeat => "zombie heartbeat",
            Self::ZombieAck => "zombie ack",
            Self::GhostClaim => "ghost claim",
            Self::InboxOverwrite => "inbox overwrite",
            Self::FirstShardWrite => "first shard write",
            Self::OutlivedLock => "outlived lock",
            Self::StragglerOverwrite => "straggler overwrite",
            Self::NaiveClock => "naive clock",
            Self::EqualTimes => "equal times",
            Self::AbsentMeansDeleted => "absent means deleted",
            Self::Resurrection => "resurrection",
            Self::EmptyLockFile => "empty lock file",
            Self::RandomPage => "random page",
            Self::UnnormalisedKeys => "unnormalised keys",
            Self::InboxAlwaysWins => "inbox always wins",
            Self::FailedShardRead => "failed shard read",
            Self::LateGhostPut => "late ghost PUT",
            Self::SameIdNewTask => "same id, new task",
            Self::HalfDoneDeadLetter => "half-done dead letter",
            Self::SplitPage => "split page",
            Self::AskToDeath => "ask to death",
            Self::QuickButDoubled => "quick but doubled",
            Self::OtherPidNamespace => "other pid namespace",
            Self::ReaderOrder => "reader order",
            Self::CompilerOrder => "compiler order",
            Self::CheckedThenPaused => "checked, then paused",
            Self::Suspend => "suspend",
        }
    }
}

/// Whether this mistake is being made. It is decided for the whole process: checkers use many
/// threads on one mistake at a time.
#[cfg(feature = "mutants")]
pub fn is(mutant: Mutant) -> bool {
    ACTIVE.load(std::sync::atomic::Ordering::Relaxed) == mutant.row()
}

/// Whether this mistake is being made: never, in a build without the feature `mutants`.
#[cfg(not(feature = "mutants"))]
pub const fn is(_mutant: Mutant) -> bool {
    false
}

/// Makes this mistake from now on, or none.
#[cfg(feature = "mutants")]
pub fn make(mutant: Option<Mutant>) {
    ACTIVE.store(mutant.map_or(0, Mutant::row), std::sync::atomic::Ordering::Relaxed);
}

#[cfg(feature = "mutants")]
static ACTIVE: std::sync::atomic::AtomicU8 = std::sync::atomic::AtomicU8::new(0);
