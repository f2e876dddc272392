//! One file per noun.

pub mod demo;
pub mod doctor;
pub mod index;
pub mod lock;
pub mod meta;
pub mod objects;
pub mod pad;
pub mod queue;
pub mod sync;
