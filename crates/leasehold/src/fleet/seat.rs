//! A node's name, held.

use std::time::Duration;

use leasehold_protocol::format::node::Node;
use leasehold_protocol::layout::fleet as layout;
use tokio_util::sync::CancellationToken;

use super::terms;
use crate::lease::{Attempt, Desk, HeldBy, Tenure};
use crate::store::{Durability, Store};
use crate::{Result, host};

/// A node's name, held by this process until it leaves or has not reported for three intervals.
#[derive(Debug)]
pub struct Seat {
    tenure: Tenure,
    every: Duration,
}

impl Seat {
    /// Takes the name for a supervisor that reports this often, or says who has it. That of a process
    /// of this machine that is dead, or of one that has not reported, is taken over.
    pub async fn take(store: &Store, node: &str, every: Duration) -> Result<Result<Self, HeldBy>> {
        let us = format!("{}:{}", host::host_name(), std::process::id());
        let desk = Desk::new(store, layout::node(node)?, us, terms(every))?;
        Ok(match desk.attempt().await? {
            Attempt::Acquired(tenure) => Ok(Self { tenure, every }),
            Attempt::Held(held) => Err(*held),
        })
    }

    /// How often it has to report.
    pub fn every(&self) -> Duration {
        self.every
    }

    /// Reports, which renews it. One PUT. An error with kind `Lost` says that the name is somebody
    /// else's by now, or may be.
    pub async fn report(&self, node: &Node) -> Result<()> {
        self.tenure.check()?;
        self.tenure.rewrite(|lease| node.put_into(lease)).await
    }

    /// Cancelled when the name is lost.
    pub fn lost(&self) -> CancellationToken {
        self.tenure.lost()
    }

    /// Says goodbye: the record stays, and others see that nobody has the name.
    pub async fn leave(&self, node: &Node) -> Result<()> {
        self.tenure.release_with(Durability::Volatile, |lease| node.put_into(lease)).await
    }
}
