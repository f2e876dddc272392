//! Histories by hand: good ones pass, and for each property there is one that it refuses.

use super::*;
use crate::commands::torture::log::{Answer, Call, Line, Record, Value};

/// A history: each line is life, begin, end, call, answer. An end of 0 leaves it open.
fn lives(ops: Vec<(&str, u64, u64, Call, Answer)>) -> Vec<Life> {
    let mut lives: BTreeMap<String, Vec<Line>> = BTreeMap::new();
    for (number, (life, begin, end, call, answer)) in (1..).zip(ops) {
        let lines = lives.entry(life.to_owned()).or_default();
        lines.push(Line { at: begin, op: number, said: Said::Begin(call) });
        if end > 0 {
            lines.push(Line { at: end, op: number, said: Said::End(answer) });
        }
    }
    lives.into_iter().map(|(name, lines)| Life { name, lines }).collect()
}

fn seen(all: Vec<Observed>) -> Life {
    let line = |observed| Line { at: 0, op: 0, said: Said::Observed(observed) };
    Life { name: "conductor".into(), lines: all.into_iter().map(line).collect() }
}

fn verified() -> Observed {
    Observed::Verified { shards: 1, rows: 1, findings: Vec::new() }
}

/// The properties that do not hold.
fn broken(mut lives: Vec<Life>) -> Vec<String> {
    lives.push(seen(vec![verified()]));
    let report = check(&lives);
    for property in &report.properties {
        assert!(property.undecided.is_empty(), "{property:?}");
    }
    report.properties.into_iter().filter(|p| !p.holds()).map(|p| p.name).collect()
}

const NOTHING: [&str; 0] = [];

fn acquire() -> Call {
    Call::Acquire { lock: "l".into() }
}
fn acquired(token: u64) -> Answer {
    Answer::Acquired { token }
}
fn ask(token: u64) -> Call {
    Call::Check { lock: "l".into(), token }
}
fn release(token: u64) -> Call {
    Call::Release { lock: "l".into(), token }
}
use Answer::{Again, Done, First, GivenUp, Held, Lost, Nothing, Refused};

#[test]
fn locks_that_are_taken_in_turn_are_fine() {
    let history = vec![
        ("a", 1, 5, acquire(), acquired(10)),
        ("b", 2, 6, acquire(), Held),
        ("a", 7, 8, ask(10), Done),
        ("a", 9, 12, release(10), Done),
        // Overlaps the release, and comes after it.
        ("b", 10, 15, acquire(), acquired(11)),
        // Killed: nobody knows what became of this release.
        ("b", 16, 0, release(11), Done),
        ("c", 20, 25, acquire(), acquired(12)),
        // Stopped past its ttl, robbed, and told so.
        ("d", 30, 31, acquire(), acquired(13)),
        ("c", 32, 33, ask(12), Lost),
        ("c", 34, 35, release(12), Lost),
    ];
    assert_eq!(broken(lives(history)), NOTHING);
}

#[test]
fn two_holders_are_found() {
    let history = vec![
        ("a", 1, 2, acquire(), acquired(10)),
        ("b", 3, 4, acquire(), acquired(11)),
        ("a", 5, 6, ask(10), Done),
    ];
    let found = broken(lives(history));
    assert_eq!(found, ["each lock is linearizable", "one holder at a time, by token"]);
    // Asked before the other was told: there is an order.
    let history = vec![
        ("a", 1, 2, acquire(), acquired(10)),
        ("b", 3, 9, acquire(), acquired(11)),
        ("a", 5, 6, ask(10), Done),
    ];
    assert_eq!(broken(lives(history)), NOTHING);
}

#[test]
fn a_zombie_that_releases_is_found() {
    let history = vec![
        ("a", 1, 2, acquire(), acquired(10)),
        ("b", 3, 4, acquire(), acquired(11)),
        ("a", 5, 6, release(10), Done),
    ];
    let found = broken(lives(history));
    assert_eq!(found, ["each lock is linearizable", "one holder at a time, by token"]);
}

#[test]
fn tokens_that_fall_or_repeat_are_found() {
    for second in [9, 10] {
        let history = vec![
            ("a", 1, 2, acquire(), acquired(10)),
            ("a", 3, 4, release(10), Done),
            ("b", 5, 6, acquire(), acquired(second)),
        ];
        let found = broken(lives(history));
        assert_eq!(found, ["each lock is linearizable", "tokens strictly rise"], "{second}");
    }
}

#[test]
fn a_free_lock_that_nobody_gets_is_found() {
    let history = vec![
        ("a", 1, 2, acquire(), acquired(10)),
        ("a", 3, 4, release(10), Done),
        ("b", 5, 6, acquire(), Held),
    ];
    assert_eq!(broken(lives(history)), ["each lock is linearizable"]);
    // Somebody who was never answered may have it.
    let history = vec![
        ("c", 1, 0, acquire(), Held),
        ("a", 1, 2, acquire(), acquired(10)),
        ("a", 3, 4, release(10), Done),
        ("b", 5, 6, acquire(), Held),
    ];
    assert_eq!(broken(lives(history)), NOTHING);
}

fn value(n: u64) -> Value {
    Value { n, by: format!("op-{n}"), token: 0 }
}
fn swap(from: u64, to: u64) -> Call {
    let from = (from > 0).then(|| value(from));
    Call::Swap { register: "r".into(), from, to: value(to) }
}
fn read() -> Call {
    Call::Read { register: "r".into() }
}
fn holds(n: u64) -> Answer {
    Answer::Value { value: (n > 0).then(|| value(n)) }
}
const REGISTER: [&str; 1] = ["each register is linearizable"];

#[test]
fn registers_that_are_swapped_in_turn_are_fine() {
    let history = vec![
        ("a", 1, 9, swap(0, 1), Done),
        ("b", 2, 8, swap(0, 2), Refused),
        ("b", 3, 4, read(), holds(0)),
        // Never answered, and it happened, as the reader knows.
        ("c", 10, 0, swap(1, 2), Done),
        ("b", 20, 21, read(), holds(1)),
        ("b", 22, 23, read(), holds(2)),
        ("b", 24, 25, swap(2, 3), Done),
        // Never answered, and it did not happen.
        ("c", 30, 0, swap(3, 4), Done),
        ("b", 31, 32, read(), holds(3)),
        ("b", 33, 34, swap(3, 4), Nothing),
        ("b", 40, 41, read(), holds(3)),
    ];
    assert_eq!(broken(lives(history)), NOTHING);
}

#[test]
fn lost_updates_and_stale_reads_are_found() {
    // Both were told that they replaced the same.
    let mut other = value(1);
    other.by = "another".into();
    let twice = Call::Swap { register: "r".into(), from: None, to: other };
    let history = vec![("a", 1, 5, swap(0, 1), Done), ("b", 2, 6, twice, Done)];
    assert_eq!(broken(lives(history)), REGISTER);
    // Acknowledged, and then not there.
    let history = vec![("a", 1, 2, swap(0, 1), Done), ("b", 3, 4, read(), holds(0))];
    assert_eq!(broken(lives(history)), REGISTER);
    // New, then old again.
    let history = vec![
        ("a", 1, 9, swap(0, 1), Done),
        ("b", 2, 3, read(), holds(1)),
        ("b", 4, 5, read(), holds(0)),
    ];
    assert_eq!(broken(lives(history)), REGISTER);
    // The writer's own refusal: it was told no, and it had happened.
    let history = vec![("a", 1, 2, swap(0, 1), Refused), ("b", 3, 4, read(), holds(1))];
    assert_eq!(broken(lives(history)), REGISTER);
}

#[test]
fn open_operations_may_happen_late_but_only_once() {
    let history = vec![
        ("a", 1, 0, swap(0, 1), Done),
        ("b", 10, 11, read(), holds(0)),
        ("b", 12, 13, read(), holds(1)),
        ("b", 14, 15, read(), holds(0)),
    ];
    assert_eq!(broken(lives(history)), REGISTER);
    // Not before it began.
    let history = vec![("b", 1, 2, read(), holds(1)), ("a", 3, 0, swap(0, 1), Done)];
    assert_eq!(broken(lives(history)), REGISTER);
}

/// Hundreds of killed processes leave hundreds of open operations, and that must not matter.
#[test]
fn many_open_operations_are_no_trouble() {
    let mut history = Vec::new();
    for n in 0..400 {
        let at = n * 100;
        history.push(("killed", at + 1, 0, acquire(), Held));
        history.push(("a", at + 10, at + 30, acquire(), acquired(n + 1)));
        history.push(("b", at + 11, at + 29, acquire(), Held));
        history.push(("a", at + 40, at + 41, ask(n + 1), Done));
        history.push(("a", at + 50, at + 51, release(n + 1), Done));
        history.push(("killed", at + 60, 0, swap(n, 5000 + n), Done));
        history.push(("c", at + 61, at + 70, swap(n, n + 1), Done));
        history.push(("d", at + 62, at + 71, swap(n, 9000 + n), Refused));
    }
    assert_eq!(broken(lives(history.clone())), NOTHING);
    // And what is wrong at their end is still found.
    history.push(("a", 50_000, 50_001, ask(3), Done));
    history.push(("a", 50_000, 50_001, read(), holds(3)));
    let found = broken(lives(history));
    assert_eq!(found.len(), 3, "{found:?}");
}

#[test]
fn an_old_token_that_writes_last_is_found() {
    let write = |from: Option<(u64, u64)>, (n, token): (u64, u64)| Call::Swap {
        register: "f".into(),
        from: from.map(|(n, token)| Value { token, ..value(n) }),
        to: Value { token, ..value(n) },
    };
    let good = vec![
        ("a", 1, 2, write(None, (1, 7)), Done),
        ("b", 3, 4, write(Some((1, 7)), (2, 8)), Done),
    ];
    assert_eq!(broken(lives(good)), NOTHING);
    let bad = vec![
        ("a", 1, 2, write(None, (1, 7)), Done),
        ("b", 3, 4, write(Some((1, 7)), (2, 6)), Done),
    ];
    assert_eq!(broken(lives(bad)), ["no write of an old token lands after a newer one's"]);
}

fn push() -> Call {
    Call::Push { task: "t".into() }
}
fn pushed() -> Answer {
    Answer::Pushed { tasks: vec!["t".into()], incarnation: Some("i".into()) }
}
fn claimed(token: u64) -> Answer {
    Answer::Claimed { task: "t".into(), token, push: "i".into() }
}
fn ack(token: u64) -> Call {
    Call::Ack { task: "t".into(), token, push: "i".into() }
}
fn receipt(token: u64) -> Observed {
    Observed::Receipt { id: "t".into(), incarnation: "i".into(), token, results: None }
}
fn letter() -> Observed {
    Observed::DeadLetter { id: "t".into(), incarnation: "i".into() }
}

/// A task that was pushed, claimed and acked with token 5, and then this.
fn worked(more: Vec<(&str, u64, u64, Call, Answer)>, end: Vec<Observed>) -> Vec<String> {
    let mut history = vec![
        ("a", 1, 2, push(), pushed()),
        ("a", 3, 4, Call::Claim, claimed(5)),
        ("a", 5, 6, ack(5), First),
    ];
    history.extend(more);
    let mut lives = lives(history);
    lives.push(seen(end));
    broken(lives)
}

#[test]
fn tasks_come_to_one_end() {
    assert_eq!(worked(vec![], vec![receipt(5)]), NOTHING);
    // Stopped past its ttl, while another completed it.
    let zombie = vec![("b", 3, 4, Call::Claim, claimed(4)), ("b", 20, 21, ack(4), Again)];
    assert_eq!(worked(zombie, vec![receipt(5)]), NOTHING);
    // Given up, by all who know.
    let fail = Call::Fail { task: "t".into(), token: 5 };
    let history = vec![
        ("a", 1, 2, push(), pushed()),
        ("a", 3, 4, Call::Claim, claimed(5)),
        ("a", 5, 6, fail, GivenUp),
    ];
    let mut given_up = lives(history);
    given_up.push(seen(vec![letter()]));
    assert_eq!(broken(given_up), NOTHING);
    // Never answered, so it need not be there.
    assert_eq!(broken(lives(vec![("a", 1, 0, push(), pushed())])), NOTHING);
}

#[test]
fn a_name_that_was_given_up_and_pushed_again_has_two_ends() {
    let ended = |given_up: Call, end: u64, letter: &str| {
        let another = Answer::Pushed { tasks: vec!["t".into()], incarnation: Some("j".into()) };
        let history = vec![
            ("a", 1, 2, push(), pushed()),
            ("a", 3, 4, Call::Claim, claimed(5)),
            ("a", 5, end, given_up, GivenUp),
            ("b", 7, 8, push(), another),
            (
                "b",
                9,
                10,
                Call::Claim,
                Answer::Claimed { task: "t".into(), token: 4, push: "j".into() },
            ),
            ("b", 11, 12, Call::Ack { task: "t".into(), token: 4, push: "j".into() }, First),
        ];
        let mut lives = lives(history);
        let letter = Observed::DeadLetter { id: "t".into(), incarnation: letter.into() };
        let receipt =
            Observed::Receipt { id: "t".into(), incarnation: "j".into(), token: 4, results: None };
        lives.push(seen(vec![receipt, letter]));
        broken(lives)
    };
    let fail = || Call::Fail { task: "t".into(), token: 5 };
    let nack = || Call::Nack { task: "t".into(), token: 5 };
    // With an answer, and without.
    for end in [6, 0] {
        assert_eq!(ended(fail(), end, "i"), NOTHING);
        assert_eq!(ended(nack(), end, "i"), NOTHING);
        assert_eq!(ended(fail(), end, "j"), [KEPT]);
    }
}

const KEPT: &str = "every pushed task has one receipt or one dead letter";
const ONCE: &str = "no task is completed twice";

#[test]
fn lost_tasks_are_found() {
    assert_eq!(broken(lives(vec![("a", 1, 2, push(), pushed())])), [KEPT]);
    assert_eq!(worked(vec![], vec![]), [KEPT, ONCE]);
    assert_eq!(worked(vec![], vec![receipt(5), letter()]), [KEPT]);
    assert_eq!(worked(vec![], vec![receipt(5), receipt(5)]), [KEPT]);
    let other =
        Observed::Receipt { id: "t".into(), incarnation: "j".into(), token: 5, results: None };
    assert_eq!(worked(vec![], vec![other]), [KEPT, ONCE], "a receipt of another push");
    let nobodys = Observed::DeadLetter { id: "x".into(), incarnation: "i".into() };
    assert_eq!(worked(vec![], vec![receipt(5), nobodys]), [KEPT]);
}

#[test]
fn second_completions_are_found() {
    let again = vec![("b", 3, 7, Call::Claim, claimed(6)), ("b", 8, 9, ack(6), First)];
    assert_eq!(worked(again, vec![receipt(5)]), [ONCE]);
    assert_eq!(worked(vec![], vec![receipt(4)]), [ONCE], "a receipt that nobody wrote");
    // Given up after all, pushed again, and completed: that is another push.
    let retried = Call::Ack { task: "t".into(), token: 6, push: "j".into() };
    let again = vec![
        ("b", 7, 8, Call::Retry { task: "t".into() }, Done),
        ("b", 9, 10, Call::Claim, claimed(6)),
        ("b", 11, 12, retried, First),
    ];
    let last =
        Observed::Receipt { id: "t".into(), incarnation: "j".into(), token: 6, results: None };
    assert_eq!(worked(again, vec![last]), NOTHING);
}

#[test]
fn who_starts_what_it_saw_completed_is_found() {
    let own = vec![("a", 8, 9, Call::Claim, claimed(6))];
    assert_eq!(worked(own, vec![receipt(5)]), ["nobody starts what it saw completed"]);
    let another = Answer::Claimed { task: "t".into(), token: 6, push: "j".into() };
    let own = vec![("a", 8, 9, Call::Claim, another)];
    assert_eq!(worked(own, vec![receipt(5)]), NOTHING, "another push of it");
    let others = vec![("b", 8, 9, Call::Claim, claimed(6))];
    assert_eq!(worked(others, vec![receipt(5)]), NOTHING, "allowed, and counted");
}

#[test]
fn a_task_that_came_back_begins_with_a_new_lease() {
    let back = vec![("b", 5, 9, Call::Claim, claimed(3)), ("b", 10, 11, ack(3), Again)];
    assert_eq!(worked(back, vec![receipt(5)]), NOTHING);
    let second = 1_000_000;
    let history = vec![
        ("a", 1, 2, push(), pushed()),
        ("a", 3, 4, Call::Claim, claimed(5 * second)),
        ("a", 5, 6, ack(5 * second), First),
        ("b", 7, 8, Call::Claim, claimed(4 * second)),
    ];
    let mut back = lives(history);
    back.push(seen(vec![receipt(5 * second)]));
    assert_eq!(broken(back), ["tokens strictly rise"]);
    // Not before it was completed.
    let early = vec![("b", 5, 6, Call::Claim, claimed(3)), ("b", 10, 11, ack(3), Again)];
    let found = worked(early, vec![receipt(5)]);
    assert!(found.contains(&"each task's claim is linearizable".to_owned()), "{found:?}");
    // And not for two at a time.
    let working = |token| Call::Working { task: "t".into(), token };
    let two = vec![
        ("b", 7, 8, Call::Claim, claimed(3)),
        ("c", 9, 10, Call::Claim, claimed(4)),
        ("b", 11, 12, working(3), Done),
    ];
    let found = worked(two, vec![receipt(5)]);
    assert_eq!(found, ["each task's claim is linearizable", "one holder at a time, by token"]);
}

#[test]
fn a_claim_that_two_have_is_found() {
    let working = |token| Call::Working { task: "t".into(), token };
    let more = vec![
        ("b", 10, 11, Call::Claim, claimed(6)),
        ("c", 12, 13, Call::Claim, claimed(7)),
        ("b", 14, 15, working(6), Done),
    ];
    let found = worked(more, vec![receipt(5)]);
    assert_eq!(found, ["each task's claim is linearizable", "one holder at a time, by token"]);
}

#[test]
fn tasks_of_bundles_are_found_in_the_bundles_receipt() {
    let id = "01ARZ3NDEKTSV4RRFFQ69G5FAV";
    let tasks = vec![format!("{id}.0"), format!("{id}.1")];
    let pushed = Answer::Pushed { tasks, incarnation: None };
    let history = vec![("a", 1, 2, Call::PushBundle { tasks: 2 }, pushed)];
    let bundle = |results: Vec<bool>| Observed::Receipt {
        id: format!("{id}-2"),
        incarnation: "i".into(),
        token: 3,
        results: Some(results),
    };
    let own = |n| Observed::DeadLetter { id: format!("{id}.{n}"), incarnation: "i".into() };
    for (end, expected) in [
        (vec![bundle(vec![true, true])], vec![]),
        (vec![bundle(vec![true, false]), own(1)], vec![]),
        (vec![bundle(vec![true, false])], vec![KEPT]),
        (vec![bundle(vec![true, true]), own(0)], vec![KEPT]),
    ] {
        let expected: Vec<&str> = expected;
        let mut lives = lives(history.clone());
        lives.push(seen(end));
        assert_eq!(broken(lives), expected);
    }
}

fn record(time: i64, value: &str) -> Record {
    Record { time, deleted: false, value: value.into() }
}
fn deletion(time: i64) -> Record {
    Record { time, deleted: true, value: String::new() }
}
fn put(record: Record) -> Call {
    Call::Put { key: "k".into(), record }
}
fn get() -> Call {
    Call::Get { key: "k".into() }
}
fn found(record: Option<Record>) -> Answer {
    Answer::Found { record }
}
const INDEX: [&str; 1] = ["no acknowledged record is lost or replaced by an older one"];

#[test]
fn the_latest_record_counts() {
    let history = vec![
        ("a", 1, 2, put(record(10, "x")), Done),
        ("b", 3, 4, put(record(5, "older")), Done),
        ("b", 5, 6, get(), found(Some(record(10, "x")))),
        ("c", 7, 0, put(record(20, "open")), Done),
        ("b", 8, 9, get(), found(Some(record(10, "x")))),
        ("b", 10, 11, get(), found(Some(record(20, "open")))),
        // At equal times a deletion wins.
        ("a", 12, 13, put(deletion(20)), Done),
        ("b", 14, 15, get(), found(None)),
        ("a", 16, 17, put(record(20, "zzz")), Done),
        ("b", 18, 19, get(), found(None)),
    ];
    assert_eq!(broken(lives(history)), NOTHING);
}

#[test]
fn lost_and_replaced_records_are_found() {
    let there = ("a", 1, 2, put(record(10, "x")), Done);
    for (more, answer) in [
        (vec![], None),
        (vec![("b", 3, 4, put(record(5, "older")), Done)], Some(record(5, "older"))),
        // At equal times the larger wins, whatever came last.
        (vec![("b", 3, 4, put(record(10, "a")), Done)], Some(record(10, "a"))),
        (vec![("b", 3, 4, put(deletion(5)), Done)], None),
        // Nobody wrote this.
        (vec![], Some(record(30, "y"))),
        // Deleted, and back again.
        (vec![("b", 3, 4, put(deletion(11)), Done)], Some(record(10, "x"))),
    ] {
        let mut history = vec![there.clone()];
        history.extend(more);
        history.push(("c", 10, 11, get(), found(answer)));
        assert_eq!(broken(lives(history.clone())), INDEX, "{history:?}");
    }
    // Found once, and then something older.
    let history = vec![
        there,
        ("b", 3, 0, put(record(20, "open")), Done),
        ("c", 5, 6, get(), found(Some(record(20, "open")))),
        ("c", 7, 8, get(), found(Some(record(10, "x")))),
    ];
    assert_eq!(broken(lives(history)), INDEX);
}

#[test]
fn what_is_left_and_what_is_odd_is_found() {
    let found = |observed| broken(vec![seen(vec![observed])]);
    let digests = ["the index's digests add up, its inbox is empty"];
    let bad = vec!["shard 00: the rows are not those that were written".to_owned()];
    assert_eq!(found(Observed::Verified { shards: 1, rows: 1, findings: bad }), digests);
    assert_eq!(found(Observed::Inbox { objects: 1 }), digests);
    assert_eq!(found(Observed::Inbox { objects: 0 }), NOTHING);
    let ends = ["once the faults stop, everything comes to its end"];
    assert_eq!(found(Observed::Left { key: "k".into() }), ends);
    assert_eq!(found(Observed::Stuck { what: "it".into() }), ends);
    let say = |said| vec![Life { name: "a".into(), lines: vec![Line { at: 0, op: 0, said }] }];
    let odd = ["nothing happened that no fault explains"];
    assert_eq!(broken(say(Said::Odd("why".into()))), odd);
    let ended = |code| say(Said::Deed(Deed::Ended { player: 1, life: 1, code }));
    assert_eq!(broken(ended(Some(101))), odd);
    assert_eq!(broken(ended(Some(0))), NOTHING);
    // Without a look at the index nothing is known of it.
    assert!(!check(&[]).holds());
}

#[test]
fn what_happened_is_counted() {
    let said = [
        Said::Deed(Deed::Start { player: 0, life: 1 }),
        Said::Deed(Deed::Kill { player: 0, life: 1 }),
        Said::Deed(Deed::Pause { player: 0, life: 1, millis: 5 }),
        Said::Tally {
            usage: Usage { put: 1, ..Usage::default() },
            faults: [("503".to_owned(), 1)].into(),
        },
        Said::Tally {
            usage: Usage { put: 3, ..Usage::default() },
            faults: [("503".to_owned(), 2)].into(),
        },
    ];
    let lines: Vec<Line> = said.into_iter().map(|said| Line { at: 0, op: 0, said }).collect();
    let two =
        vec![Life { name: "a".into(), lines: lines.clone() }, Life { name: "b".into(), lines }];
    let report = check(&two);
    assert_eq!((report.lives, report.kills, report.pauses), (2, 2, 2));
    assert_eq!((report.usage.put, report.faults["503"]), (6, 4));
    let history = lives(vec![
        ("a", 1, 2, acquire(), acquired(1)),
        ("b", 3, 4, acquire(), acquired(2)),
        ("b", 5, 6, release(2), Done),
        ("c", 7, 8, acquire(), acquired(3)),
        ("c", 9, 0, acquire(), Held),
    ]);
    let report = check(&history);
    assert_eq!((report.operations, report.open, report.takeovers), (5, 1, 1));
}
