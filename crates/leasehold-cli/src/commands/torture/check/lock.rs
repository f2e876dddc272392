//! A lock with fencing tokens.
//!
//! Anybody may take it at any time, as far as this model knows: when a holder is dead or late is not
//! its business. But whoever asks "is it still mine?" and is told yes must be the last who took it, and
//! that is what mutual exclusion comes to.

use super::search::Model;

/// A lock. It begins free.
#[derive(Debug)]
pub struct Lock;

/// Who has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Holder {
    /// Nobody.
    Free,
    /// Whoever was given this token.
    Token(u64),
    /// Somebody who never learned its token.
    Somebody,
}

/// What is known of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct State {
    /// Who has it.
    pub holder: Holder,
    /// The highest token so far.
    pub highest: u64,
}

/// What happened to it.
#[derive(Debug, Clone)]
pub enum Op {
    /// It was taken, with this token.
    Acquired(u64),
    /// Perhaps it was taken.
    OpenAcquire,
    /// Somebody had it.
    Held,
    /// It was held with this token.
    Checked(u64),
    /// It was held with this token, and free then.
    Released(u64),
    /// It was not held with this token in the end. Perhaps it was released before that.
    LostOnRelease(u64),
    /// Perhaps it was released.
    OpenRelease(u64),
}

impl Model for Lock {
    type State = State;
    type Op = Op;

    fn start(&self) -> State {
        State { holder: Holder::Free, highest: 0 }
    }

    fn step(&self, state: &State, op: &Op) -> Vec<State> {
        let with = |holder: Holder| State { holder, ..*state };
        let is = |token: u64| state.holder == Holder::Token(token);
        match op {
            Op::Acquired(token) if *token > state.highest => {
                vec![State { holder: Holder::Token(*token), highest: *token }]
            }
            Op::OpenAcquire => vec![with(Holder::Somebody)],
            Op::Held if state.holder != Holder::Free => vec![*state],
            Op::Checked(token) if is(*token) => vec![*state],
            Op::Released(token) | Op::OpenRelease(token) if is(*token) => {
                vec![with(Holder::Free)]
            }
            Op::LostOnRelease(token) if is(*token) => vec![*state, with(Holder::Free)],
            Op::LostOnRelease(_) => vec![*state],
            _ => Vec::new(),
        }
    }

    /// A token never comes back.
    fn is_spent(&self, state: &State, op: &Op) -> bool {
        match op {
            Op::OpenRelease(token) => state.holder != Holder::Token(*token),
            _ => false,
        }
    }

    fn alike(&self, one: &Op, other: &Op) -> bool {
        matches!((one, other), (Op::OpenAcquire, Op::OpenAcquire))
    }
}
