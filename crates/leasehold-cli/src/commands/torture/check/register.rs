//! A register that is compared and swapped.

use super::search::Model;
use crate::commands::torture::log::Value;

/// A register. It begins empty.
#[derive(Debug)]
pub struct Register;

/// What happened to it.
#[derive(Debug, Clone)]
pub enum Op {
    /// It held this.
    Read(Option<Value>),
    /// It held the first, and then the second.
    Swapped(Option<Value>, Value),
    /// It did not hold this.
    Refused(Option<Value>),
    /// Perhaps it was swapped.
    Open(Option<Value>, Value),
}

impl Model for Register {
    type State = Option<Value>;
    type Op = Op;

    fn start(&self) -> Self::State {
        None
    }

    fn step(&self, state: &Self::State, op: &Op) -> Vec<Self::State> {
        match op {
            Op::Read(value) if value == state => vec![state.clone()],
            Op::Swapped(from, to) | Op::Open(from, to) if from == state => vec![Some(to.clone())],
            Op::Refused(from) if from != state => vec![state.clone()],
            _ => Vec::new(),
        }
    }

    /// Numbers only rise, so what was replaced does not come back.
    fn is_spent(&self, state: &Self::State, op: &Op) -> bool {
        let Op::Open(from, _) = op else { return false };
        let number = |value: &Option<Value>| value.as_ref().map_or(0, |value| value.n);
        number(from) < number(state) || (number(from) == number(state) && from != state)
    }

    fn alike(&self, _: &Op, _: &Op) -> bool {
        false
    }
}
