//! Logs as operations in time.

use std::collections::HashMap;

use super::super::log::{Answer, Call, Line, Said};
use super::search::Timed;

/// The log of one life of one process.
#[derive(Debug, Clone)]
pub struct Life {
    /// Whose.
    pub name: String,
    /// What it says.
    pub lines: Vec<Line>,
}

/// An operation. Without an answer it is open.
#[derive(Debug, Clone)]
pub struct Op<'a> {
    /// Whose.
    pub life: &'a str,
    /// Its number there.
    pub number: u64,
    /// When it began.
    pub begin: u64,
    /// When it was answered.
    pub end: Option<u64>,
    /// What was asked.
    pub call: &'a Call,
    /// What was answered.
    pub answer: Option<&'a Answer>,
}

impl Op<'_> {
    /// Who did it, for messages.
    pub fn by(&self) -> String {
        format!("{}#{}", self.life, self.number)
    }

    /// The same for a search.
    pub fn timed<O>(&self, op: O) -> Timed<O> {
        Timed { begin: self.begin, end: self.end, by: self.by(), op }
    }
}

/// All operations of all lives.
pub fn operations(lives: &[Life]) -> Vec<Op<'_>> {
    let mut all = Vec::new();
    for life in lives {
        let mut open: HashMap<u64, usize> = HashMap::new();
        for line in &life.lines {
            match &line.said {
                Said::Begin(call) => {
                    open.insert(line.op, all.len());
                    all.push(Op {
                        life: &life.name,
                        number: line.op,
                        begin: line.at,
                        end: None,
                        call,
                        answer: None,
                    });
                }
                // An answer that tells nothing leaves the operation open.
                Said::End(Answer::Unknown { .. }) => {}
                Said::End(answer) => {
                    if let Some(op) = open.remove(&line.op).and_then(|at| all.get_mut(at)) {
                        op.end = Some(line.at);
                        op.answer = Some(answer);
                    }
                }
                _ => {}
            }
        }
    }
    all
}
