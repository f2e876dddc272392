use std::time::Duration;

use super::*;
use crate::cas::Nonce;
use crate::format::outbox::Writer;
use crate::lease::{Holder, Why, acquire, release};
use crate::time::StoreTime;

fn at(seconds: i64) -> StoreTime {
    StoreTime::from_micros(seconds * 1_000_000)
}

fn local(work: Option<&str>, lease: LocalLease) -> Local {
    let work = work.map(str::to_owned);
    Local { work, scheduled: None, lease, receipt: None, letter: None }
}

fn entry() -> Entry {
    Entry { incarnation: "i".into(), ..Entry::default() }
}

fn failed() -> LocalLease {
    LocalLease::Released(History { failures: 1, ..History::default() })
}

#[test]
fn what_is_open_is_told_with_its_lease() {
    let untold = Entry { untold: true, ..entry() };
    let free = local(Some("i"), LocalLease::None);
    assert_eq!(tell(&untold, &free), Tale { push: true, ..Tale::default() });
    assert_eq!(tell(&entry(), &free), Tale::default());
    let held = local(Some("i"), LocalLease::Held);
    assert_eq!(tell(&entry(), &held).lease, Some(TellLease::Hold));
    assert_eq!(tell(&entry(), &local(Some("i"), failed())).lease, Some(TellLease::Release));
    // Claimed and handed back between two syncs: nobody need know.
    let drained = local(Some("i"), LocalLease::Released(History::default()));
    assert_eq!(tell(&entry(), &drained).lease, None);
    let told = Entry { told: Some("v".into()), ..entry() };
    assert_eq!(tell(&told, &drained).lease, Some(TellLease::Release));
}

/// FIELD.md row 15: a sync after an ack does not tell of the task or its lease again.
#[test]
fn a_receipt_wins_over_everything() {
    let untold = Entry { untold: true, told: Some("v".into()), ..entry() };
    for lease in [LocalLease::None, LocalLease::Held, failed(), LocalLease::Dead] {
        for work in [None, Some("i")] {
            let mut done = local(work, lease.clone());
            done.receipt = Some("i".into());
            let told = Tale { end: Some(End::Done), ..Tale::default() };
            assert_eq!(tell(&untold, &done), told);
            // Also over a dead letter.
            done.letter = Some("i".into());
            assert_eq!(tell(&untold, &done), told);
        }
    }
}

/// A task that was pushed again under its name: the old one's end is told, and the new one too.
#[test]
fn a_receipt_of_another_push_says_nothing_about_this_one() {
    let untold = Entry { untold: true, ..entry() };
    let mut again = local(Some("j"), LocalLease::None);
    again.receipt = Some("i".into());
    assert_eq!(tell(&untold, &again), Tale { end: Some(End::Done), push: true, lease: None });
    again.receipt = Some("h".into());
    assert_eq!(tell(&untold, &again), Tale { end: None, push: true, lease: None });
}

/// Given up, pushed again and claimed between two syncs: the bucket learns of both.
#[test]
fn a_dead_letter_of_an_earlier_push_is_owed_until_it_is_told() {
    let mut again = entry();
    again.name("j", None);
    let mut here = local(Some("j"), LocalLease::Held);
    here.letter = Some("i".into());
    assert!(owes_letter(&again, &here));
    here.letter = Some("h".into());
    assert!(!owes_letter(&again, &here), "it was told before");
    here.letter = Some("i".into());
    assert!(!owes_letter(&entry(), &here));
    here.receipt = Some("i".into());
    assert!(!owes_letter(&again, &here), "a receipt beats it");
    // What is to come is not what came before it.
    let writer = Writer { incarnation: "j".into(), ..Writer::new(Intent::Finish, None) };
    again.add(writer);
    here.lease = LocalLease::Foreign;
    assert!(!is_settled(&again, &here, |_| false));
}

/// The entry is there before the transition, and must be there after it.
#[test]
fn an_entry_stays_until_what_it_announced_is_seen_or_cannot_come() {
    let finishing = Entry { writers: vec![Writer::new(Intent::Finish, None)], ..entry() };
    let pushing = Entry { writers: vec![Writer::new(Intent::Push, None)], ..entry() };
    let nothing = local(None, LocalLease::None);
    let foreign = local(Some("i"), LocalLease::Foreign);
    for (entry, local, alive, gone) in [
        (&pushing, &nothing, false, true),
        (&pushing, &foreign, true, true),
        (&finishing, &foreign, false, true),
        (&finishing, &nothing, false, true),
        (&entry(), &foreign, true, true),
        (&entry(), &local(Some("i"), LocalLease::Held), false, false),
    ] {
        assert_eq!(is_settled(entry, local, |_| false), alive, "{entry:?} {local:?}");
        assert_eq!(is_settled(entry, local, |_| true), gone, "{entry:?} {local:?}");
    }
    let mut done = local(None, LocalLease::None);
    done.receipt = Some("i".into());
    assert!(is_settled(&finishing, &done, |_| false));
    done.receipt = Some("earlier".into());
    assert!(!is_settled(&finishing, &done, |_| false));
}

fn seen(replica: Option<&str>, released: bool) -> Seen {
    let nonce = Nonce::from_bytes([1; 16]);
    let holder = Holder { name: "w", ttl: Duration::from_secs(900), place: None };
    let mut lease = acquire(None, &holder, at(100), 0, nonce).lease;
    if released {
        lease = release(&lease, at(100), nonce);
    }
    if let Some(replica) = replica {
        lease.other.insert(REPLICA_FIELD.into(), replica.into());
    }
    Seen { record: Ok(lease), version: Version::new("v"), modified: at(100), now: at(200) }
}

#[test]
fn the_first_lease_in_the_bucket_wins() {
    let held = Judgement::Held { left: Duration::from_secs(1) };
    assert_eq!(hold(None, "me"), Hold::Create);
    assert_eq!(hold(Some((&seen(None, false), &held)), "me"), Hold::Lost);
    assert_eq!(hold(Some((&seen(Some("you"), false), &held)), "me"), Hold::Lost);
    // The answer to our own write was lost, or we died before we noted it.
    let ours = Hold::Renew(Version::new("v"));
    assert_eq!(hold(Some((&seen(Some("me"), false), &held)), "me"), ours);
    let stale = Judgement::Free(Why::Expired);
    match hold(Some((&seen(Some("you"), false), &stale)), "me") {
        Hold::TakeOver(_, history) => assert_eq!(history.crashes, 1),
        other => panic!("{other:?}"),
    }
    let released = Judgement::Free(Why::Released);
    match hold(Some((&seen(None, true), &released)), "me") {
        Hold::TakeOver(_, history) => assert_eq!(history.crashes, 0),
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_both_counted_is_counted() {
    let ours = History { incarnation: "i".into(), failures: 2, ..History::default() };
    let theirs = History { incarnation: "i".into(), failures: 1, crashes: 3, ..History::default() };
    let merged = merge(ours.clone(), theirs);
    assert_eq!((merged.failures, merged.crashes), (2, 3));
    let other = History { incarnation: "j".into(), failures: 9, ..History::default() };
    assert_eq!(merge(ours.clone(), other), ours);
}

/// FIELD.md row 14.
#[test]
fn what_is_not_here_is_fetched_and_never_deleted_there() {
    assert_eq!(bring(false, LeaseThere::None), Bring::Fetch);
    assert_eq!(bring(false, LeaseThere::Young), Bring::Nothing);
    assert_eq!(bring(false, LeaseThere::Old), Bring::Look);
    assert_eq!(bring(true, LeaseThere::Young), Bring::Shut);
}

#[test]
fn nothing_is_inferred_from_absence() {
    let nothing = Asked::default();
    assert_eq!(missing("i", &nothing), Missing::SetAside);
    let some = |text: &str| Some(text.to_owned());
    let with = |receipt: &str| Asked { receipt: some(receipt), ..Asked::default() };
    assert_eq!(missing("i", &with("i")), Missing::Done);
    assert_eq!(missing("i", &with("j")), Missing::SetAside);
    assert_eq!(missing("i", &Asked { letter: some("i"), ..Asked::default() }), Missing::Dead);
    assert_eq!(missing("i", &Asked { work: some("i"), ..Asked::default() }), Missing::Stay);
    assert_eq!(missing("i", &Asked { work: some("j"), ..Asked::default() }), Missing::Replaced);
    assert_eq!(missing("i", &Asked { scheduled: true, ..Asked::default() }), Missing::Stay);
}

/// A push that was told is not told again because something else was noted meanwhile (FIELD.md row 15).
#[test]
fn what_was_told_is_told_whatever_was_noted_meanwhile() {
    let push = |of: &str| Writer { incarnation: of.to_owned(), ..Writer::new(Intent::Push, None) };
    let before = Entry { untold: true, writers: vec![push("i")], ..entry() };
    let told = Entry { untold: false, origin: Some("v".into()), writers: Vec::new(), ..entry() };
    // A claim.
    let mut now = before.clone();
    now.name("i", None);
    note_told(&mut now, &before, &told);
    assert_eq!(now, told);
    // Another push, which is yet to be told.
    let mut now = before.clone();
    now.add(push("j"));
    note_told(&mut now, &before, &told);
    assert!(now.untold);
    assert_eq!(now.writers, [push("j")]);
}

/// What waits for its time is told although an earlier push of its name came to an end.
#[test]
fn an_end_says_nothing_about_what_waits_for_its_time() {
    let untold = Entry { untold: true, ..entry() };
    let mut waits = local(None, LocalLease::None);
    waits.scheduled = Some("j".into());
    waits.letter = Some("i".into());
    assert_eq!(tell(&untold, &waits), Tale { end: Some(End::Dead), push: true, lease: None });
    // And one that is announced is not shown by another of its name.
    let push = Writer { incarnation: "k".into(), ..Writer::new(Intent::Push, None) };
    let announced = Entry { writers: vec![push], ..untold };
    assert!(!is_settled(&announced, &waits, |_| false));
    waits.scheduled = Some("k".into());
    assert!(is_settled(&announced, &waits, |_| false));
}
