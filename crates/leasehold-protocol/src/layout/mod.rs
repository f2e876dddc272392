//! Every key in the store: built and parsed here, and nowhere else.

pub mod fleet;
pub mod index;
pub mod queue;
pub mod sync;
