//! The bytes of stored records. Frozen examples of every version stand in `golden/`.

pub mod datapackage;
pub mod fleet;
pub mod json;
pub mod lease;
pub mod node;
pub mod outbox;
pub mod quarantine;
pub mod queue;
pub mod root;
pub mod row;
pub mod statistics;
pub mod task;
pub mod usv;
