use proptest::prelude::*;

use super::*;
use crate::cas::Version;
use crate::format::lease::{Dialect, State};
use crate::format::task::text_payload;

fn at(seconds: i64) -> StoreTime {
    StoreTime::from_micros(seconds * 1_000_000)
}

fn lease(state: State, history: &History) -> Lease {
    let holder = crate::lease::Holder { name: "w1", ttl: Duration::from_secs(60), place: None };
    let nonce = crate::cas::Nonce::from_bytes([7; 16]);
    let mut lease = crate::lease::acquire(None, &holder, at(0), 0, nonce).lease;
    lease.state = state;
    history.write(&mut lease);
    lease
}

fn seen(lease: Lease, now: StoreTime) -> Seen {
    Seen { record: Ok(lease), version: Version::new("v"), modified: at(0), now }
}

fn task() -> Task {
    Task {
        id: "t".into(),
        incarnation: "i1".into(),
        pushed_at: None,
        timeout: None,
        max_attempts: None,
        origin: None,
        payload: text_payload("x"),
    }
}

fn failure(seconds: i64) -> Failure {
    Failure { at: at(seconds), worker: "w1".into(), crash: false, error: "no".into() }
}

#[test]
fn a_history_survives_the_lease() {
    let mut done = Done::default();
    [4, 0, 1, 2, 9].into_iter().for_each(|n| done.insert(n));
    let history = History {
        incarnation: "i1".into(),
        failures: 2,
        crashes: 1,
        not_before: Some(at(90)),
        errors: vec![failure(1)],
        done,
        since: Some(at(0)),
    };
    let lease = lease(State::Released, &history);
    let again = Lease::parse(&lease.to_bytes(Dialect::Task)).unwrap();
    assert_eq!(History::of(&again), history);
    assert_eq!(again.expires_at, Some(at(90)), "free again to those who only know times");
    let mut emptied = again;
    History::default().write(&mut emptied);
    assert!(emptied.other.is_empty());
}

#[test]
fn a_holder_that_vanished_counts_as_a_crash_and_one_that_let_go_does_not() {
    let history = History { failures: 1, ..History::default() };
    let seen_at = seen(lease(State::Held, &history), at(100));
    for why in [Why::Expired, Why::HolderGone, Why::Rebooted, Why::Unreadable] {
        match claim(&seen_at, &Judgement::Free(why)) {
            Claim::Take(taken) => {
                assert_eq!((taken.failures, taken.crashes), (1, 1));
                assert!(taken.errors[0].crash && taken.errors[0].worker == "w1");
            }
            other => panic!("{other:?}"),
        }
    }
    let drained = seen(lease(State::Released, &history), at(100));
    let same = History { since: Some(at(0)), ..history };
    assert_eq!(claim(&drained, &Judgement::Free(Why::Released)), Claim::Take(same));
    let left = Duration::from_secs(3);
    assert_eq!(claim(&seen_at, &Judgement::Held { left }), Claim::Held(left));
}

#[test]
fn a_failed_task_waits_for_its_time_by_the_stores_clock() {
    let history = History { failures: 1, not_before: Some(at(90)), ..History::default() };
    let early = seen(lease(State::Released, &history), at(89));
    assert_eq!(claim(&early, &Judgement::Free(Why::Released)), Claim::Later(at(90)));
    let due = seen(lease(State::Released, &history), at(90));
    let taken = History { not_before: None, since: Some(at(0)), ..history };
    assert_eq!(claim(&due, &Judgement::Free(Why::Released)), Claim::Take(taken));
}

#[test]
fn failures_lead_to_a_dead_letter_at_the_limit_and_crashes_too() {
    let settings = QueueSettings { max_attempts: 3, max_crashes: 2, ..QueueSettings::default() };
    let mut history = History::default();
    for n in 1..=2 {
        match after_failure(&history, &task(), &settings, failure(n), None, u64::MAX) {
            AfterFailure::Retry(next) => history = next,
            other => panic!("{other:?}"),
        }
        assert_eq!(history.failures, n as u32);
    }
    let last = after_failure(&history, &task(), &settings, failure(3), None, 0);
    match last {
        AfterFailure::GiveUp(history) => assert_eq!(history.errors.len(), 3),
        other => panic!("{other:?}"),
    }
    assert!(!may_run(&History { crashes: 2, ..History::default() }, &task(), &settings));
    // The two are counted apart.
    let mixed = History { failures: 2, crashes: 1, ..History::default() };
    assert!(may_run(&mixed, &task(), &settings));
    // A task may have a limit of its own.
    let stubborn = Task { max_attempts: Some(9), ..task() };
    assert!(may_run(&History { failures: 8, ..History::default() }, &stubborn, &settings));
}

#[test]
fn pauses_double_up_to_the_cap_and_the_callers_own_wish_counts() {
    let settings = QueueSettings { max_attempts: 99, ..QueueSettings::default() };
    let pause = |failures, delay, random| {
        let history = History { failures, ..History::default() };
        match after_failure(&history, &task(), &settings, failure(0), delay, random) {
            AfterFailure::Retry(history) => history.not_before.unwrap().since(at(0)),
            other => panic!("{other:?}"),
        }
    };
    let second = Duration::from_secs(1);
    assert_eq!((pause(0, None, 0), pause(0, None, u64::MAX)), (second / 2, second));
    assert_eq!((pause(3, None, 0), pause(3, None, u64::MAX)), (second * 4, second * 8));
    assert_eq!(pause(60, None, u64::MAX), settings.backoff_cap);
    assert_eq!(pause(3, Some(second * 77), 5), second * 77);
}

#[test]
fn records_about_another_incarnation_count_as_absent() {
    assert_eq!(met("i2", Some("i1"), None), Met::Open);
    assert_eq!(met("i2", None, Some("i1")), Met::Open);
    assert_eq!(met("i2", Some("i2"), Some("i1")), Met::Over);
    assert_eq!(met("i2", None, Some("i2")), Met::Over);
    let history = History { incarnation: "i1".into(), failures: 4, ..History::default() };
    assert_eq!(history.clone().about("i2", None).failures, 0);
    assert_eq!(history.about("i1", None).failures, 4);
    // A claimer that vanished before it read the task did not know which push it had.
    let crashed = History { crashes: 1, since: Some(at(5)), ..History::default() };
    assert_eq!(crashed.clone().about("i1", Some(at(3))).crashes, 1);
    // Unless the task was pushed only after that.
    assert_eq!(crashed.about("i1", Some(at(19))).crashes, 0);
    assert!(gives_way(Some(at(1)), Some(at(2))) && gives_way(Some(at(3)), Some(at(1))));
    assert!(!gives_way(Some(at(9)), Some(at(1))));
    assert!(gives_way(None, Some(at(1))));
}

#[test]
fn long_errors_and_many_are_cut() {
    let mut history = History::default();
    for n in 0..30 {
        history.note(Failure { error: "é".repeat(3000), ..failure(n) });
    }
    assert_eq!(history.errors.len(), ERRORS);
    assert_eq!(history.errors[0].at, at(20));
    assert!(history.errors[0].error.len() <= ERROR_BYTES + 3);
}

proptest! {
    #[test]
    fn done_is_a_set(numbers in proptest::collection::vec(0u32..300, 0..80)) {
        let mut done = Done::default();
        numbers.iter().for_each(|n| done.insert(*n));
        let set: std::collections::BTreeSet<_> = numbers.into_iter().collect();
        prop_assert_eq!(done.len(), set.len() as u64);
        prop_assert!((0..300).all(|n| done.contains(n) == set.contains(&n)));
        prop_assert_eq!(Done::parse(&done.to_string()), done);
    }

    #[test]
    fn no_text_panics(text in "[0-9,-]{0,40}") {
        let done = Done::parse(&text);
        let _ = (done.len(), done.contains(3));
    }
}

fn receipt(incarnation: &str, pushed_at: Option<StoreTime>) -> Receipt {
    Receipt {
        id: "t".into(),
        incarnation: incarnation.into(),
        worker: "w".into(),
        token: 1,
        pushed_at,
        started_at: None,
        completed_at: StoreTime::from_micros(0),
        retries: 0,
        result: None,
        results: None,
        replaced: Vec::new(),
        copied: false,
        nonce: format!("{incarnation}'s"),
    }
}

#[test]
fn a_receipt_names_those_that_could_take_its_place_back() {
    let at = |seconds| Some(at(seconds));
    let (first, mut second) = (receipt("first", at(10)), receipt("second", at(11)));
    replace(&mut second, &first);
    replace(&mut second, &first);
    assert_eq!(second.pushes().collect::<Vec<_>>(), ["second", "first"]);
    assert!(second.is_about("first") && second.has_recorded("first's"));
    assert_eq!((second.about("first"), second.about("other")), ("first", "second"));
    // And those that these had named.
    let mut third = receipt("third", at(12));
    replace(&mut third, &second);
    assert!(third.is_about("first") && third.is_about("second"));
    assert_eq!(Receipt::parse(&third.to_bytes()).unwrap().replaced, third.replaced);
    // One that is clearly older cannot come back.
    let mut late = receipt("late", at(100));
    replace(&mut late, &third);
    assert!(late.replaced.is_empty());
    // However many there are.
    for n in 0..100 {
        replace(&mut third, &receipt(&n.to_string(), at(12)));
    }
    assert!(third.replaced.len() < 20);
}

#[test]
fn a_dead_letter_is_out_of_date_once_its_task_is_completed() {
    let at = |seconds| Some(at(seconds));
    let letter = |pushed_at| DeadLetter {
        task: Task { incarnation: "one".into(), pushed_at, ..task() },
        failed_at: StoreTime::from_micros(0),
        worker: "w".into(),
        failures: 1,
        crashes: 0,
        errors: Vec::new(),
        nonce: String::new(),
    };
    // The very push, or a later one.
    let mut two = receipt("two", at(10));
    replace(&mut two, &receipt("one", at(10)));
    assert!(is_outdated(&letter(at(10)), &two));
    assert!(is_outdated(&letter(at(10)), &receipt("one", at(10))));
    assert!(is_outdated(&letter(None), &receipt("one", None)));
    assert!(is_outdated(&letter(at(10)), &receipt("two", at(11))));
    // An earlier one, or nobody knows: then it is kept.
    assert!(!is_outdated(&letter(at(10)), &receipt("two", at(9))));
    assert!(!is_outdated(&letter(at(10)), &receipt("two", at(10))));
    assert!(!is_outdated(&letter(None), &receipt("two", at(11))));
}
