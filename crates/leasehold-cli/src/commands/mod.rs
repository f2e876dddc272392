//! One file per noun.

pub mod demo;
pub mod doctor;
pub mod meta;
pub mod objects;
