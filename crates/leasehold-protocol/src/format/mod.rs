//! The bytes of stored records. Frozen examples of every version stand in `golden/`.

pub mod lease;
pub mod queue;
pub mod root;
pub mod task;
