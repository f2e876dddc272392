//! One file per noun.

pub mod demo;
pub mod doctor;
pub mod fleet;
pub mod index;
pub mod lock;
pub mod meta;
pub mod nodes;
pub mod objects;
pub mod pad;
pub mod queue;
pub mod supervise;
pub mod sync;
#[cfg(feature = "torture")]
pub mod torture;
