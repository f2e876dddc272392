//! The index: the latest record counts, and what was acknowledged is never lost.

use std::collections::BTreeMap;

use super::super::log::{Answer, Call, Observed, Record};
use super::Property;
use super::history::Op;

#[derive(Debug, Default)]
struct Key<'a> {
    /// When it began, when it was acknowledged, what.
    writes: Vec<(u64, Option<u64>, &'a Record)>,
    /// Lookups that were answered.
    lookups: Vec<(u64, u64, Option<&'a Record>, String)>,
}

/// Every lookup finds the latest of what was acknowledged before it, or something later still; and
/// what was found once is not replaced by something older.
pub fn check(ops: &[Op<'_>]) -> Property {
    let mut property = Property::new("no acknowledged record is lost or replaced by an older one");
    let mut keys: BTreeMap<&str, Key<'_>> = BTreeMap::new();
    for op in ops {
        match (op.call, op.answer) {
            (Call::Put { key, record }, Some(Answer::Done) | None) => {
                keys.entry(key).or_default().writes.push((op.begin, op.end, record));
            }
            (Call::Get { key }, Some(Answer::Found { record })) => {
                let (begin, end) = (op.begin, op.end.unwrap_or(op.begin));
                let lookup = (begin, end, record.as_ref(), op.by());
                keys.entry(key).or_default().lookups.push(lookup);
            }
            _ => {}
        }
    }
    for (name, mut key) in keys {
        check_key(name, &mut key, &mut property);
    }
    property
}

fn check_key(name: &str, key: &mut Key<'_>, property: &mut Property) {
    // What is known to be there, from when on.
    let mut known: Vec<(u64, &Record)> =
        key.writes.iter().filter_map(|(_, end, record)| Some(((*end)?, *record))).collect();
    known.extend(key.lookups.iter().filter_map(|(_, end, found, _)| Some((*end, (*found)?))));
    known.sort_unstable_by_key(|(at, _)| *at);
    key.lookups.sort_by_key(|(begin, ..)| *begin);
    let mut at = 0;
    let mut floor: Option<&Record> = None;
    for (begin, end, found, by) in &key.lookups {
        while let Some((_, record)) = known.get(at).filter(|(since, _)| since < begin) {
            floor = floor.max(Some(record));
            at += 1;
        }
        property.checked += 1;
        let begun =
            |record: &&Record| key.writes.iter().any(|(write, _, of)| write < end && of == record);
        let right = match found {
            Some(found) => !found.deleted && Some(*found) >= floor && begun(found),
            None => {
                floor.is_none_or(|floor| floor.deleted)
                    || key.writes.iter().any(|(write, _, record)| {
                        write < end && record.deleted && Some(*record) > floor
                    })
            }
        };
        if !right {
            property.broken.push(format!(
                "{name}: {by} found {found:?} from {begin} to {end}, but {floor:?} was there before"
            ));
        }
    }
}

/// What `verify` found, and whether everything was taken in.
pub fn check_digests(observed: &[&Observed]) -> Property {
    let mut property = Property::new("the index's digests add up, its inbox is empty");
    for thing in observed {
        match thing {
            Observed::Verified { shards, findings, .. } => {
                property.checked += shards;
                property.broken.extend(findings.iter().cloned());
            }
            Observed::Inbox { objects } if *objects > 0 => {
                property.broken.push(format!("{objects} objects are still in the inbox"));
            }
            _ => {}
        }
    }
    if property.checked == 0 {
        property.undecided.push("nobody has looked".to_owned());
    }
    property
}
