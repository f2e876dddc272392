use std::collections::BTreeMap;
use std::convert::Infallible;
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::format::datapackage::Field;
use crate::time::StoreTime;

fn schema() -> Schema {
    Schema::new(vec![Field::parse("k").unwrap(), Field::parse("v").unwrap()]).unwrap()
}

struct Rows(std::vec::IntoIter<Vec<u8>>, Option<Vec<u8>>);

impl Rows {
    fn new(rows: Vec<Vec<u8>>) -> Self {
        let mut rows = rows.into_iter();
        let head = rows.next();
        Self(rows, head)
    }
}

impl Incoming for Rows {
    type Error = Infallible;
    fn head(&self) -> Option<&[u8]> {
        self.1.as_deref()
    }
    fn pop(&mut self) -> Result<(), Infallible> {
        self.1 = self.0.next();
        Ok(())
    }
}

#[derive(Debug, Clone)]
struct Record(u8, i64, bool, u8);

fn row(record: &Record) -> Vec<u8> {
    let Record(key, at, deleted, value) = record;
    let (key, at) = (format!("k{key:02}"), StoreTime::from_micros(*at));
    let mut out = Vec::new();
    match deleted {
        true => schema().write_deletion(&key, at, &mut out).unwrap(),
        false => schema().write_texts([key.as_str(), &format!("v{value}")], at, &mut out).unwrap(),
    };
    out
}

/// The latest of each key, the plain way.
fn latest(rows: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let mut map: BTreeMap<Vec<u8>, Vec<u8>> = BTreeMap::new();
    for row in rows {
        let key = usv::first_field(row).to_vec();
        let wins = map.get(&key).is_none_or(|old| {
            schema().claim(row).unwrap().against(&schema().claim(old).unwrap()).is_gt()
        });
        if wins {
            map.insert(key, row.clone());
        }
    }
    map.into_values().collect()
}

fn bytes(rows: &[Vec<u8>]) -> Vec<u8> {
    rows.iter().flat_map(|row| row.iter().copied().chain([usv::END])).collect()
}

fn digest(rows: &[u8]) -> Digest {
    usv::rows(rows).fold(Digest::default(), |sum, row| sum.plus(Digest::of(row)))
}

/// Merges in chunks of this size.
fn merged(
    shard: &[u8],
    inbox: Vec<Vec<u8>>,
    mode: Mode,
    purge: Option<i64>,
    chunk: usize,
) -> Result<(Vec<u8>, Tally, Vec<Bad>), MergeError<Infallible>> {
    let schema = schema();
    let mut merger = Merger::new(Arc::new(schema), mode, purge);
    let mut inbox = Rows::new(inbox);
    let (mut out, mut all) = (Vec::new(), Vec::new());
    let mut rest = shard;
    while !rest.is_empty() {
        let end = usv::complete(&rest[..chunk.min(rest.len())]);
        let end = if end == 0 || chunk >= rest.len() { rest.len() } else { end };
        let mut part = &rest[..end];
        while !part.is_empty() {
            let done = merger.merge(part, &mut inbox, &mut out, chunk)?;
            part = &part[done..];
            // Enough, and the row that made it so.
            assert!(out.len() < chunk + 150, "{} bytes where {chunk} were enough", out.len());
            all.append(&mut out);
        }
        rest = &rest[end..];
    }
    while !merger.finish(&mut inbox, &mut out, chunk)? {
        all.append(&mut out);
    }
    all.append(&mut out);
    let bad = merger.take_bad();
    Ok((all, *merger.tally(), bad))
}

fn record() -> impl Strategy<Value = Record> {
    (0u8..12, 0i64..6, any::<bool>(), 0u8..3).prop_map(|(k, t, d, v)| Record(k, t, d, v))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    /// In any chunks and in either mode, the result is that of a map.
    #[test]
    fn merging_in_a_stream_is_merging(
        shard in prop::collection::vec(record(), 0..20),
        inbox in prop::collection::vec(record(), 0..20),
        chunk in 1usize..400,
        rewrite in any::<bool>(),
    ) {
        let shard = latest(&shard.iter().map(row).collect::<Vec<_>>());
        let inbox = latest(&inbox.iter().map(row).collect::<Vec<_>>());
        let before = bytes(&shard);
        let mode = if rewrite { Mode::Rewrite } else { Mode::Copy };
        let (after, tally, bad) = merged(&before, inbox.clone(), mode, None, chunk).unwrap();
        let expected = latest(&[shard.clone(), inbox.clone()].concat());
        prop_assert_eq!(&after, &bytes(&expected));
        prop_assert!(bad.is_empty());
        let counts = Counts { inbox: inbox.len() as u64, ..tally.counts };
        prop_assert!(counts.add_up(), "{counts:?}");
        prop_assert_eq!(counts.rows_after, expected.len() as u64);
        prop_assert_eq!(tally.changed(), before != after);
        prop_assert_eq!(digest(&before).plus(tally.written).minus(tally.removed), digest(&after));
        let deletions = |rows: &[Vec<u8>]| {
            rows.iter().filter(|row| schema().claim(row).unwrap().deleted).count() as i64
        };
        prop_assert_eq!(deletions(&shard) + tally.deletions, deletions(&expected));
        if rewrite {
            prop_assert_eq!(tally.before, Some(digest(&before)));
        }
        // Again: nothing changes, nothing is written.
        let (again, tally, _) = merged(&after, inbox, mode, None, chunk).unwrap();
        prop_assert_eq!(again, after);
        prop_assert_eq!(publish(&tally, Some(&Version::new("1"))), Publish::Nothing);
    }

    /// Nothing is forgotten that the inbox has a word about: it could come back from there.
    #[test]
    fn purging_forgets_old_deletions_only(
        shard in prop::collection::vec(record(), 0..20),
        inbox in prop::collection::vec(record(), 0..6),
        before in 0i64..7,
    ) {
        let shard = latest(&shard.iter().map(row).collect::<Vec<_>>());
        let inbox = latest(&inbox.iter().map(row).collect::<Vec<_>>());
        let (after, tally, _) =
            merged(&bytes(&shard), inbox.clone(), Mode::Copy, Some(before), 1000).unwrap();
        let expected: Vec<Vec<u8>> = latest(&[shard, inbox.clone()].concat())
            .into_iter()
            .filter(|row| {
                let claim = schema().claim(row).unwrap();
                let key = usv::first_field(row);
                let pending = inbox.iter().any(|other| usv::first_field(other) == key);
                !claim.deleted || claim.updated_at >= before || pending
            })
            .collect();
        prop_assert_eq!(after, bytes(&expected));
        let counts = Counts { inbox: inbox.len() as u64, ..tally.counts };
        prop_assert!(counts.add_up());
    }

    #[test]
    fn no_shard_makes_it_panic(
        shard in prop::collection::vec(prop::sample::select(b"ab\n\x1e\x1f\xff2".to_vec()), 0..80),
        inbox in prop::collection::vec(record(), 0..6),
        rewrite in any::<bool>(),
    ) {
        let inbox = latest(&inbox.iter().map(row).collect::<Vec<_>>());
        let mode = if rewrite { Mode::Rewrite } else { Mode::Copy };
        let _ = merged(&shard, inbox, mode, None, 7);
    }
}

/// However many records come before a row, no more of them are merged at once than are enough: the rest
/// of the inbox may be a hundred times as large as memory.
#[test]
fn a_large_inbox_before_one_row_is_merged_by_parts() {
    let last = row(&Record(99, 1, false, 1));
    let inbox: Vec<Vec<u8>> = (0..99).map(|key| row(&Record(key, 1, false, 1))).collect();
    for mode in [Mode::Copy, Mode::Rewrite] {
        let shard = bytes(std::slice::from_ref(&last));
        let (after, tally, _) = merged(&shard, inbox.clone(), mode, None, 100).unwrap();
        assert_eq!(after, bytes(&[&inbox[..], std::slice::from_ref(&last)].concat()));
        let counts = Counts { inbox: 99, ..tally.counts };
        assert!(counts.add_up() && counts.rows_before == 1 && counts.rows_after == 100);
        // A row that is met again and again is read once.
        assert_eq!(tally.before.unwrap_or(digest(&shard)), digest(&shard));
    }
}

#[test]
fn rows_that_cannot_be_read_are_set_aside_and_the_rest_goes_on() {
    let (a, c) = (row(&Record(1, 1, false, 1)), row(&Record(3, 1, false, 1)));
    let shard = [&a[..], b"\nk02\x1fno time\n", &c[..], b"\x1e\n"].concat();
    let (after, tally, bad) = merged(&shard, vec![], Mode::Rewrite, None, 1000).unwrap();
    assert_eq!(after, bytes(&[a, c]));
    assert_eq!(bad.len(), 1);
    assert_eq!(bad[0].row, b"k02\x1fno time");
    assert!(bad[0].reason.contains("updated_at"), "{}", bad[0].reason);
    assert!(tally.changed() && tally.counts.add_up());
}

#[test]
fn short_rows_and_other_spellings_are_mended() {
    let shard = b"k01\x1fx\x1f2026-01-31T09:05:00Z\nk02\x1fy\x1f2026-01-31T09:05:00.5Z\n";
    let (after, tally, _) = merged(shard, vec![], Mode::Rewrite, None, 1000).unwrap();
    assert_eq!(
        after,
        b"k01\x1fx\x1f2026-01-31T09:05:00.000000Z\x1f\nk02\x1fy\x1f2026-01-31T09:05:00.500000Z\x1f\n"
    );
    assert_eq!(tally.respelled, 2);
    assert_eq!(tally.before.unwrap().plus(tally.written).minus(tally.removed), digest(&after));
}

#[test]
fn a_shard_out_of_order_is_noticed() {
    let rows = [row(&Record(2, 1, false, 1)), row(&Record(1, 1, false, 1))];
    for mode in [Mode::Copy, Mode::Rewrite] {
        for chunk in [1, 1000] {
            let outcome = merged(&bytes(&rows), vec![], mode, None, chunk);
            assert_eq!(outcome.unwrap_err(), MergeError::Disorder);
        }
    }
    let twice = [rows[0].clone(), rows[0].clone()];
    let outcome = merged(&bytes(&twice), vec![], Mode::Copy, None, 1000);
    assert_eq!(outcome.unwrap_err(), MergeError::Disorder);
}

/// FIELD.md row 9: the first write of a shard is conditional too. Row 19: the inbox does not always
/// win.
#[test]
fn what_is_published_names_what_was_seen() {
    let mut tally = Tally::default();
    assert_eq!(publish(&tally, None), Publish::Nothing);
    tally.counts.inserted = 1;
    assert_eq!(publish(&tally, None), Publish::Write(When::Absent));
    let version = Version::new("7");
    assert_eq!(publish(&tally, Some(&version)), Publish::Write(When::Matches(version.clone())));
    assert!(may_sweep(Published::Nothing) && may_sweep(Published::Stored));
    assert!(!may_sweep(Published::Refused) && !may_sweep(Published::Unknown));
    let newer = row(&Record(1, 5, false, 1));
    let older = row(&Record(1, 4, false, 2));
    let (after, _, _) =
        merged(&bytes(std::slice::from_ref(&newer)), vec![older], Mode::Copy, None, 99).unwrap();
    assert_eq!(after, bytes(&[newer]));
}

#[test]
fn triggers_fire_when_it_is_worth_it() {
    let age = Duration::from_secs;
    assert!(!Trigger::default().fires(0, 0, age(0)));
    assert!(Trigger::default().fires(1, 1, age(0)));
    let trigger = Trigger { count: Some(10), bytes: None, age: Some(age(60)) };
    assert!(!trigger.fires(9, 1 << 30, age(59)));
    assert!(trigger.fires(10, 1, age(0)));
    assert!(trigger.fires(1, 1, age(60)));
}
