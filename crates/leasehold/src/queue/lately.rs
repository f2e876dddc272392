//! What was completed lately, as far as this process knows.

use std::collections::{HashSet, VecDeque};
use std::sync::{Mutex, PoisonError};

/// The pushes whose receipts were seen last. A request that was under way for long can bring a task back
/// after its receipt (FIELD.md row 21); who has seen that receipt does not start it again. Others find
/// out when they ack.
#[derive(Debug, Default)]
pub(super) struct Lately(Mutex<(HashSet<String>, VecDeque<String>)>);

/// How many are remembered.
const MOST: usize = 1024;

impl Lately {
    /// Remembers that this push is completed.
    pub fn completed(&self, incarnation: &str) {
        let mut inner = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (known, order) = &mut *inner;
        if known.insert(incarnation.to_owned()) {
            order.push_back(incarnation.to_owned());
        }
        if order.len() > MOST
            && let Some(oldest) = order.pop_front()
        {
            known.remove(&oldest);
        }
    }

    /// Whether this push is known to be completed.
    pub fn knows(&self, incarnation: &str) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).0.contains(incarnation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_ones_are_remembered() {
        let lately = Lately::default();
        for n in 0..MOST + 10 {
            lately.completed(&n.to_string());
            lately.completed(&n.to_string());
        }
        assert!(!lately.knows("9") && lately.knows("10") && lately.knows("1033"));
        assert_eq!(lately.0.lock().unwrap().0.len(), MOST);
    }
}
