//! Leasehold's protocols, checked exhaustively for a few actors and small bounds.
//!
//! Every decision is the function of [`leasehold_protocol`] that the product runs; the order of the
//! steps mirrors the drivers in `leasehold`, one request at a time. [`engine`] supplies the store,
//! lost answers, late writes, crashes and the passing of time; [`lease`], [`queue`] and [`index`] say
//! what the actors do and what must hold. `docs/models.md` has the figures.

pub mod engine;
pub mod index;
pub mod lease;
pub mod queue;
pub mod suite;
