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
