use super::*;
use crate::format::lease::Process;

const TTL: Duration = Duration::from_secs(30);
const NONCE: Nonce = Nonce::from_bytes([5; 16]);

fn at(seconds: i64) -> StoreTime {
    StoreTime::from_micros(seconds * 1_000_000)
}

fn place(boot_seconds: u64) -> Place {
    Place {
        host: "pi".into(),
        boot_id: "boot-1".into(),
        boot_time: Duration::from_secs(boot_seconds),
        pid_ns: "ns-1".into(),
        process: Process { pid: 7, start: 70 },
        child: None,
    }
}

fn held(place: Option<Place>) -> Lease {
    let holder = Holder { name: "a", ttl: TTL, place: place.as_ref() };
    acquire(None, &holder, at(1000), 0, NONCE).lease
}

fn seen(lease: Lease, modified: i64, now: i64) -> Seen {
    Seen { record: Ok(lease), version: Version::new("v1"), modified: at(modified), now: at(now) }
}

fn observer() -> Observer<'static> {
    Observer { ttl: TTL, watched: Duration::ZERO, here: None, store_is_here: false, holder: None }
}

fn in_directory(here: &Place) -> Observer<'_> {
    Observer { here: Some(here), store_is_here: true, ..observer() }
}

fn is_free(judgement: Judgement, why: Why) -> bool {
    judgement == Judgement::Free(why)
}

#[test]
fn on_a_bucket_age_is_told_by_one_response() {
    let lease = held(None);
    // 30 s of ttl and 2 s of slack.
    assert_eq!(
        judge(&seen(lease.clone(), 1000, 1031), &observer()),
        Judgement::Held { left: Duration::from_secs(1) }
    );
    assert!(is_free(judge(&seen(lease.clone(), 1000, 1032), &observer()), Why::Expired));
    // Whatever the times in the record say: the writer's clock was a day off.
    let mut off = lease;
    for day in [-86_400, 86_400] {
        off.heartbeat_at = Some(at(1000 + day));
        off.expires_at = Some(at(1030 + day));
        assert!(matches!(
            judge(&seen(off.clone(), 1000, 1031), &observer()),
            Judgement::Held { .. }
        ));
        assert!(is_free(judge(&seen(off.clone(), 1000, 1032), &observer()), Why::Expired));
    }
}

#[test]
fn a_lease_is_judged_by_its_own_ttl() {
    let mut long = held(None);
    long.ttl = Some(Duration::from_secs(300));
    assert!(matches!(judge(&seen(long, 1000, 1100), &observer()), Judgement::Held { .. }));
    // Without one, by the difference of its writer's own two times.
    let mut theirs = held(None);
    theirs.ttl = None;
    theirs.expires_at = Some(at(1300));
    assert!(matches!(
        judge(&seen(theirs.clone(), 1000, 1100), &observer()),
        Judgement::Held { .. }
    ));
    assert!(is_free(judge(&seen(theirs.clone(), 1000, 1302), &observer()), Why::Expired));
    // With neither, by the observer's.
    theirs.expires_at = None;
    assert!(is_free(judge(&seen(theirs, 1000, 1032), &observer()), Why::Expired));
}

#[test]
fn without_a_store_clock_watching_decides() {
    let lease = held(None);
    let mut observer = observer();
    // No Date: now is as good as modified.
    let seen = seen(lease, 1000, 1000);
    observer.watched = Duration::from_secs(29);
    assert!(matches!(judge(&seen, &observer), Judgement::Held { .. }));
    observer.watched = TTL;
    assert!(is_free(judge(&seen, &observer), Why::Expired));
}

#[test]
fn in_a_directory_age_is_told_by_the_boot_clock() {
    let here = place(129);
    let observer = in_directory(&here);
    // However far the wall clock was set in between.
    for (modified, now) in [(1000, 1001), (1000, 90_000), (90_000, 1000)] {
        let there = seen(held(Some(place(100))), modified, now);
        assert_eq!(judge(&there, &observer), Judgement::Held { left: Duration::from_secs(1) });
        let there = seen(held(Some(place(99))), modified, now);
        assert!(is_free(judge(&there, &observer), Why::Expired));
    }
}

#[test]
fn another_boot_of_this_host_is_dead() {
    let here = Place { boot_id: "boot-2".into(), ..place(5) };
    let observer = in_directory(&here);
    assert!(is_free(judge(&seen(held(Some(place(100))), 1000, 1000), &observer), Why::Rebooted));
}

/// FIELD.md row 27.
#[test]
fn a_dead_holder_is_believed_only_in_its_own_namespace() {
    let here = place(101);
    let gone = Observer { holder: Some(Liveness::Gone), ..in_directory(&here) };
    let lease = seen(held(Some(place(100))), 1000, 1000);
    assert!(is_free(judge(&lease, &gone), Why::HolderGone));
    let alive = Observer { holder: Some(Liveness::Alive), ..gone.clone() };
    assert!(matches!(judge(&lease, &alive), Judgement::Held { .. }));
    let container = Place { pid_ns: "ns-2".into(), ..place(101) };
    let elsewhere = Observer { here: Some(&container), ..gone.clone() };
    assert!(matches!(judge(&lease, &elsewhere), Judgement::Held { .. }));
    let other_boot = Place { host: "pj".into(), boot_id: "boot-9".into(), ..place(101) };
    let elsewhere = Observer { here: Some(&other_boot), ..gone.clone() };
    assert!(matches!(judge(&lease, &elsewhere), Judgement::Held { .. }));
    // On a bucket too, two processes of one host know each other; a host's name alone is nothing.
    let bucket = Observer { store_is_here: false, ..gone };
    assert!(is_free(judge(&lease, &bucket), Why::HolderGone));
    let namesake = Place { boot_id: "boot-9".into(), ..place(101) };
    let namesake = Observer { here: Some(&namesake), ..bucket };
    assert!(matches!(judge(&lease, &namesake), Judgement::Held { .. }));
}

/// A lock written by hand with only the seed's fields, in a directory: neither its times nor the
/// file's are trusted, only what we watched.
#[test]
fn foreign_locks_in_a_directory_are_watched() {
    let mut foreign = held(None);
    (foreign.ttl, foreign.expires_at, foreign.token) = (None, None, None);
    let here = place(1);
    let mut observer = in_directory(&here);
    let young = seen(foreign.clone(), 90_000, 90_000);
    assert_eq!(judge(&young, &observer), Judgement::Held { left: TTL });
    observer.watched = TTL - Duration::from_secs(1);
    assert!(matches!(judge(&young, &observer), Judgement::Held { .. }));
    observer.watched = TTL;
    assert!(is_free(judge(&young, &observer), Why::Expired));
    // An old file is believed after half of that: the clock may have been set, but whoever is
    // alive has renewed it meanwhile.
    let old = seen(foreign, 0, 90_000);
    observer.watched = Duration::ZERO;
    assert_eq!(judge(&old, &observer), Judgement::Held { left: TTL / 2 });
    observer.watched = TTL / 2;
    assert!(is_free(judge(&old, &observer), Why::Expired));
}

/// FIELD.md row 16.
#[test]
fn damaged_records_are_free_after_a_ttl() {
    let broken = |now| Seen { record: Lease::parse(b""), ..seen(held(None), 1000, now) };
    assert!(matches!(judge(&broken(1001), &observer()), Judgement::Held { .. }));
    assert!(is_free(judge(&broken(1032), &observer()), Why::Unreadable));
    let here = place(1);
    let watched = Observer { watched: TTL, ..in_directory(&here) };
    assert!(is_free(judge(&broken(1001), &watched), Why::Unreadable));
}

#[test]
fn tokens_rise() {
    let holder = Holder { name: "a", ttl: TTL, place: None };
    let token = |seen: Option<&Seen>, now, floor| {
        acquire(seen, &holder, at(now), floor, NONCE).lease.token.unwrap()
    };
    // From absence: at least the store's time, and above whatever was given out here.
    assert_eq!(token(None, 1000, 0), 1_000_000_000);
    assert_eq!(token(None, 1000, 5_000_000_000), 5_000_000_001);
    // From a record: one more, whatever the clock says.
    let released = release(&held(None), at(1001), NONCE);
    for now in [0, 1000, 90_000] {
        assert_eq!(token(Some(&seen(released.clone(), 1001, 1001)), now, 0), 1_000_000_001);
    }
    let mut foreign = held(None);
    foreign.token = None;
    assert_eq!(token(Some(&seen(foreign, 1000, 1000)), 2000, 0), 2_000_000_000);
}

#[test]
fn a_takeover_matches_the_version_that_was_judged() {
    let holder = Holder { name: "b", ttl: TTL, place: None };
    let stale = seen(held(None), 1000, 2000);
    let change = acquire(Some(&stale), &holder, at(2000), 0, NONCE);
    assert_eq!(change.when, When::Matches(Version::new("v1")));
    assert_eq!(acquire(None, &holder, at(2000), 0, NONCE).when, When::Absent);
}

/// FIELD.md row 25: being asked is not being robbed.
#[test]
fn a_holder_survives_being_asked() {
    let mine = held(None);
    let before = seen(mine.clone(), 1000, 1001);
    let Asking::Write(asked) = ask(&before, "b", at(1001), Nonce::from_bytes([6; 16])) else {
        panic!("nobody had asked");
    };
    assert_eq!(asked.when, When::Matches(before.version.clone()));
    let there = Seen { version: Version::new("v2"), ..seen(asked.lease.clone(), 1001, 1002) };
    let Refused::StillOurs(lease, version) = after_refusal(&mine, Some(&there)) else {
        panic!("it is still ours");
    };
    assert_eq!((lease.ask.unwrap().by.as_str(), version.as_str()), ("b", "v2"));
    // Once is enough.
    assert!(matches!(ask(&there, "c", at(1002), NONCE), Asking::Pending(ask) if ask.by == "b"));
    // A renewal keeps the request; a release answers it.
    let asked =
        Lease::parse(&there.record.unwrap().to_bytes(crate::format::lease::Dialect::Task)).unwrap();
    assert!(renew(&asked, at(1003), None, NONCE).ask.is_some());
    let released = release(&asked, at(1003), NONCE);
    assert!(released.ask.is_none());
    assert_eq!(ask(&seen(released, 1003, 1003), "b", at(1004), NONCE), Asking::NobodyToAsk);
}

/// Two processes with one name take over one record: the same token, and yet only one of them
/// holds it.
#[test]
fn a_namesake_with_the_same_token_is_somebody_else() {
    let stale = seen(held(None), 1000, 2000);
    let holder = Holder { name: "agent", ttl: TTL, place: None };
    let ours = acquire(Some(&stale), &holder, at(2000), 0, Nonce::from_bytes([6; 16])).lease;
    let theirs = acquire(Some(&stale), &holder, at(2000), 0, Nonce::from_bytes([7; 16])).lease;
    assert_eq!((&ours.holder, ours.token), (&theirs.holder, theirs.token));
    assert_eq!(after_refusal(&ours, Some(&seen(theirs, 2000, 2000))), Refused::Lost);
    let renewed = renew(&ours, at(2001), None, NONCE);
    assert!(matches!(
        after_refusal(&ours, Some(&seen(renewed, 2001, 2001))),
        Refused::StillOurs(..)
    ));
}

/// A boot time that is yet to come is of another clock.
#[test]
fn a_boot_time_in_the_future_proves_nothing() {
    let here = place(100);
    let there = seen(held(Some(place(5000))), 1000, 1001);
    let mut observer = in_directory(&here);
    assert!(matches!(judge(&there, &observer), Judgement::Held { .. }));
    observer.watched = TTL;
    assert!(is_free(judge(&there, &observer), Why::Expired));
}

#[test]
fn somebody_elses_lease_is_lost() {
    let mine = held(None);
    let holder = Holder { name: "b", ttl: TTL, place: None };
    let theirs = acquire(Some(&seen(mine.clone(), 1000, 2000)), &holder, at(2000), 0, NONCE).lease;
    assert_eq!(after_refusal(&mine, Some(&seen(theirs, 2000, 2000))), Refused::Lost);
    assert_eq!(after_refusal(&mine, None), Refused::Lost);
    // The same name with another token is another acquisition: ours was taken in between.
    let again = Lease { token: Some(mine.token.unwrap() + 2), ..mine.clone() };
    assert_eq!(after_refusal(&mine, Some(&seen(again, 2000, 2000))), Refused::Lost);
    let released = release(&mine, at(1001), NONCE);
    assert_eq!(after_refusal(&mine, Some(&seen(released, 1001, 1001))), Refused::Lost);
}

#[test]
fn a_holder_stops_before_anyone_may_start() {
    for ttl in [1, 3, 30, 300].map(Duration::from_secs) {
        assert!(margin(ttl) > Duration::ZERO && margin(ttl) < ttl);
    }
}
