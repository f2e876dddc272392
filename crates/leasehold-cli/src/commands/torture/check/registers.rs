//! Registers: plain ones, and files that are written under a lock.

use std::collections::BTreeMap;

use super::super::log::{Answer, Call, Value};
use super::Property;
use super::history::Op;
use super::register::{Op as RegisterOp, Register};
use super::search::{Outcome, Timed, search};

/// Each register is linearizable; and who wrote under an old token never wrote after a newer one.
pub fn check(ops: &[Op<'_>]) -> [Property; 2] {
    let mut linearizable = Property::new("each register is linearizable");
    let mut fenced = Property::new("no write of an old token lands after a newer one's");
    let mut registers: BTreeMap<&str, Vec<Timed<RegisterOp>>> = BTreeMap::new();
    let mut replaced: BTreeMap<(&str, &Value), (&Value, String)> = BTreeMap::new();
    for op in ops {
        let (register, what) = match (op.call, op.answer) {
            (Call::Read { register }, Some(Answer::Value { value })) => {
                (register, RegisterOp::Read(value.clone()))
            }
            (Call::Swap { register, from, to }, answer) => {
                let what = match answer {
                    Some(Answer::Done) => RegisterOp::Swapped(from.clone(), to.clone()),
                    Some(Answer::Refused) => RegisterOp::Refused(from.clone()),
                    None => RegisterOp::Open(from.clone(), to.clone()),
                    // It says that nothing was changed, and not what is there.
                    Some(_) => continue,
                };
                if let (Some(Answer::Done), Some(from)) = (answer, from) {
                    replaced.insert((register, to), (from, op.by()));
                }
                (register, what)
            }
            _ => continue,
        };
        registers.entry(register).or_default().push(op.timed(what));
    }
    for (register, history) in registers {
        linearizable.checked += history.len() as u64;
        match search(&Register, &history) {
            Outcome::Linearizable => {}
            Outcome::Broken(story) => linearizable.broken.push(format!("{register}: {story}")),
            Outcome::Undecided(story) => {
                linearizable.undecided.push(format!("{register}: {story}"));
            }
        }
    }
    for ((register, to), (from, by)) in replaced {
        fenced.checked += 1;
        if to.token < from.token {
            fenced.broken.push(format!(
                "{register}: {by} replaced what was written with token {} by {to:?}",
                from.token
            ));
        }
    }
    [linearizable, fenced]
}
