//! What was completed lately, as far as this process knows.

use std::collections::{HashSet, VecDeque};
use std::sync::{Mutex, PoisonError};

use leasehold_protocol::layout::queue::Unit;

/// The pushes whose receipts were seen last. A request that was under way for long can bring a task back
/// after its receipt (FIELD.md row 21); who has seen that receipt does not start it again. Others find
/// out when they ack.
#[derive(Debug, Default)]
pub(super) struct Lately(Mutex<(HashSet<String>, VecDeque<String>)>);

/// How many are remembered.
const MOST: usize = 1024;

impl Lately {
    /// Remembers that this push is completed.
    pub fn completed(&self, unit: &Unit, incarnation: &str) {
        let push = push(unit, incarnation);
        let mut inner = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (known, order) = &mut *inner;
        if known.insert(push.clone()) {
            order.push_back(push);
        }
        if order.len() > MOST
            && let Some(oldest) = order.pop_front()
        {
            known.remove(&oldest);
        }
    }

    /// Whether this push is known to be completed.
    pub fn knows(&self, unit: &Unit, incarnation: &str) -> bool {
        let push = push(unit, incarnation);
        self.0.lock().unwrap_or_else(PoisonError::into_inner).0.contains(&push)
    }
}

/// A task that somebody copied under another name is another one.
fn push(unit: &Unit, incarnation: &str) -> String {
    format!("{incarnation} {}", unit.name())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_ones_are_remembered() {
        let lately = Lately::default();
        let (unit, other) = (Unit::Task("t".to_owned()), Unit::Task("u".to_owned()));
        for n in 0..MOST + 10 {
            lately.completed(&unit, &n.to_string());
            lately.completed(&unit, &n.to_string());
        }
        let knows = |n: &str| lately.knows(&unit, n);
        assert!(!knows("9") && knows("10") && knows("1033"));
        assert!(!lately.knows(&other, "10"));
        assert_eq!(lately.0.lock().unwrap().0.len(), MOST);
    }
}
