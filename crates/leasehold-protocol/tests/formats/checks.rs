//! What must hold whatever bytes are stored or typed: nothing panics, what was read once is written
//! and read the same from then on. Run by `main.rs` here on generated input, and by the fuzzers in
//! `fuzz/`, which include this file, on what they come up with.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use leasehold_protocol::cas::{Nonce, Version};
use leasehold_protocol::compile::{Incoming, Merger, Mode, Publish, publish};
use leasehold_protocol::format::datapackage::{Field, Package, Schema};
use leasehold_protocol::format::lease::{Dialect, Lease};
use leasehold_protocol::format::queue::QueueSettings;
use leasehold_protocol::format::root::Root;
use leasehold_protocol::format::statistics::Statistics;
use leasehold_protocol::format::task::{Bundle, DeadLetter, Receipt, Task};
use leasehold_protocol::format::usv;
use leasehold_protocol::key::{self, Key};
use leasehold_protocol::layout::index::Layout;
use leasehold_protocol::layout::queue::QueueKeys;
use leasehold_protocol::lease::{self, Asking, Holder, Judgement, Observer, Refused, Seen};
use leasehold_protocol::merge::Digest;
use leasehold_protocol::queue::{self, Done, History};
use leasehold_protocol::time::StoreTime;
use leasehold_protocol::{duration, shard};

const NONCE: Nonce = Nonce::from_bytes([9; 16]);

/// Rows and fields: none longer than what they are cut from, and no cut changes them.
pub fn usv_reader(bytes: &[u8]) {
    let whole: Vec<&[u8]> = usv::rows(bytes).collect();
    assert!(whole.iter().map(|row| row.len()).sum::<usize>() <= bytes.len());
    let cut = usv::complete(&bytes[..bytes.len() / 2]);
    let pieces: Vec<&[u8]> = usv::rows(&bytes[..cut]).chain(usv::rows(&bytes[cut..])).collect();
    assert_eq!(whole, pieces);
    for row in whole {
        assert!(usv::unpadded(row).len() <= row.len());
        assert_eq!(usv::fields(row).next().unwrap_or_default(), usv::first_field(row));
        for (at, field) in usv::fields(row).enumerate() {
            // Each takes a walk along the row.
            if at < 4 {
                assert_eq!(usv::field(row, at), field);
            }
            let Ok(text) = std::str::from_utf8(field) else { continue };
            let value = usv::unescape(text).into_owned();
            let mut once = Vec::new();
            usv::escape(&value, &mut once);
            assert!(!once.iter().any(|byte| [usv::END, usv::RECORD, usv::UNIT].contains(byte)));
            assert_eq!(usv::unescape(std::str::from_utf8(&once).unwrap()), value);
        }
    }
}

/// Schemas with keys of each kind, and values of all.
fn schemas() -> &'static [Arc<Schema>; 3] {
    static SCHEMAS: std::sync::LazyLock<[Arc<Schema>; 3]> = std::sync::LazyLock::new(|| {
        let of = |fields: &[&str]| {
            let fields = fields.iter().map(|field| Field::parse(field).unwrap()).collect();
            Arc::new(Schema::new(fields).unwrap())
        };
        let all = ["a", "b:integer", "c:number", "d:boolean", "e:date", "f:datetime", "g:object"];
        [
            of(&[&["id"][..], &all, &["updated_at:datetime", "h:array"]].concat()),
            of(&["id:integer", "name"]),
            of(&["host:domain", "updated_at:datetime", "name"]),
        ]
    });
    &SCHEMAS
}

/// A row in its one spelling stays as it is, also by way of JSON.
pub fn rows(bytes: &[u8]) {
    let Some((first, bytes)) = bytes.split_first() else { return };
    let schema = &schemas()[usize::from(first % 3)];
    for raw in usv::rows(bytes) {
        let (mut once, mut twice) = (Vec::new(), Vec::new());
        let _ = (schema.claim(raw), schema.read_json(raw));
        let Ok(parsed) = schema.canonical(raw, &mut once) else {
            assert!(once.is_empty());
            continue;
        };
        assert_eq!(usv::first_field(&once).len(), parsed.key_len);
        assert_eq!(schema.canonical(&once, &mut twice).unwrap(), parsed);
        assert_eq!(once, twice);
        let claim = schema.claim(&once).unwrap();
        assert_eq!((claim.updated_at, claim.deleted), (parsed.updated_at, parsed.deleted));
        let record = schema.read_json(&once);
        let mut thrice = Vec::new();
        schema.write_json(&record, StoreTime::from_micros(0), &mut thrice).unwrap();
        assert_eq!(String::from_utf8(once), String::from_utf8(thrice));
    }
}

/// Records as an inbox has them.
struct Sorted(std::collections::VecDeque<Vec<u8>>);

impl Incoming for Sorted {
    type Error = Infallible;
    fn head(&self) -> Option<&[u8]> {
        self.0.front().map(Vec::as_slice)
    }
    fn pop(&mut self) -> Result<(), Infallible> {
        self.0.pop_front();
        Ok(())
    }
}

/// The latest row of each key, in order.
fn latest(schema: &Schema, bytes: &[u8]) -> Vec<Vec<u8>> {
    let mut latest: BTreeMap<Vec<u8>, Vec<u8>> = BTreeMap::new();
    for raw in usv::rows(bytes) {
        let mut row = Vec::new();
        let Ok(parsed) = schema.canonical(raw, &mut row) else { continue };
        let there = latest.entry(row[..parsed.key_len].to_vec()).or_insert_with(|| row.clone());
        if schema.claim(&row).unwrap().against(&schema.claim(there).unwrap()).is_gt() {
            *there = row;
        }
    }
    latest.into_values().collect()
}

/// A shard and an inbox merge to the same bytes whichever way, the sums are right, and merging the
/// same again changes nothing.
pub fn merging(bytes: &[u8]) {
    let Some((first, bytes)) = bytes.split_first() else { return };
    let schema = &schemas()[usize::from(first % 3)];
    let cut = usize::from(*first) * bytes.len() / 255;
    let (shard, inbox) = (latest(schema, &bytes[..cut]), latest(schema, &bytes[cut..]));
    let join = |rows: &[Vec<u8>]| {
        rows.iter().fold(Vec::new(), |mut all, row| {
            all.extend_from_slice(row);
            all.push(usv::END);
            all
        })
    };
    let merge = |shard: &[u8], mode, enough| {
        let mut merger = Merger::new(schema.clone(), mode, None);
        let mut sorted = Sorted(inbox.iter().cloned().collect());
        let (mut out, mut all, mut at) = (Vec::new(), Vec::new(), 0);
        while at < shard.len() {
            at += merger.merge(&shard[at..], &mut sorted, &mut out, enough).unwrap();
            all.append(&mut out);
        }
        while !merger.finish(&mut sorted, &mut out, enough).unwrap() {
            all.append(&mut out);
        }
        all.append(&mut out);
        assert!(merger.take_bad().is_empty());
        let mut tally = *merger.tally();
        tally.counts.inbox = inbox.len() as u64;
        (all, tally)
    };
    let before = join(&shard);
    let (copied, tally) = merge(&before, Mode::Copy, 64);
    let (rewritten, whole) = merge(&before, Mode::Rewrite, usize::MAX);
    assert_eq!(copied, rewritten);
    assert_eq!((tally.counts, tally.written), (whole.counts, whole.written));
    assert!(whole.counts.add_up(), "{:?}", whole.counts);
    let digest =
        |rows: &[u8]| usv::rows(rows).fold(Digest::default(), |sum, row| sum.plus(Digest::of(row)));
    assert_eq!(whole.before, Some(digest(&before)));
    assert_eq!(digest(&copied), digest(&before).plus(whole.written).minus(whole.removed));
    let both = [before, join(&inbox)].concat();
    assert_eq!(copied, join(&latest(schema, &both)));
    let (again, tally) = merge(&copied, Mode::Rewrite, 1);
    assert_eq!(again, copied);
    assert_eq!(publish(&tally, None), Publish::Nothing);
}

/// A lease in either dialect, and what is decided about it.
pub fn leases(bytes: &[u8]) {
    let record = Lease::parse(bytes);
    for now in [0, 1_800_000_000_000_000] {
        let (version, now) = (Version::new("v"), StoreTime::from_micros(now));
        let modified = StoreTime::from_micros(1_700_000_000_000_000);
        let seen = Seen { record: record.clone(), version, modified, now };
        let place = record.as_ref().ok().and_then(|lease| lease.place.clone());
        for store_is_here in [false, true] {
            let observer = Observer {
                ttl: Duration::from_secs(3),
                watched: Duration::from_secs(1),
                here: place.as_ref(),
                store_is_here,
                holder: None,
            };
            let judgement = lease::judge(&seen, &observer);
            assert!(!matches!(judgement, Judgement::Held { left } if left.is_zero()));
            let _ = queue::claim(&seen, &judgement);
        }
        let holder = Holder { name: "h", ttl: Duration::from_secs(3), place: None };
        let taken = lease::acquire(Some(&seen), &holder, now, 0, NONCE).lease;
        let before = record.as_ref().ok().and_then(|lease| lease.token);
        assert!(taken.token > before);
        assert!(matches!(lease::after_refusal(&taken, Some(&seen)), Refused::Lost));
        let renewed = lease::renew(&taken, now, None, NONCE);
        if let Asking::Write(change) = lease::ask(&seen, "me", now, NONCE) {
            assert!(matches!(change.lease.ask, Some(ask) if ask.by == "me"));
        }
        let released = lease::release(&renewed, now, NONCE);
        assert_eq!(released.token, taken.token);
    }
    let Ok(lease) = record else { return };
    for dialect in [Dialect::Lock, Dialect::Task] {
        assert_eq!(Lease::parse(&lease.to_bytes(dialect)).as_ref(), Ok(&lease));
    }
    let history = History::of(&lease);
    let mut written = lease.clone();
    history.write(&mut written);
    assert_eq!(History::of(&written), history);
    let _ = history.about("i", None);
}

/// Tasks, receipts, dead letters, bundles.
pub fn tasks(bytes: &[u8]) {
    let once = Task::parse(bytes, "t", "v").to_bytes();
    assert_eq!(Task::parse(&once, "t", "v").to_bytes(), once);
    if let Ok(receipt) = Receipt::parse(bytes) {
        let once = receipt.to_bytes();
        assert_eq!(Receipt::parse(&once).unwrap().to_bytes(), once);
    }
    if let Ok(letter) = DeadLetter::parse(bytes) {
        let once = letter.to_bytes();
        assert_eq!(DeadLetter::parse(&once).unwrap().to_bytes(), once);
    }
    if let Ok(bundle) = Bundle::parse(bytes, "b") {
        let once = bundle.to_bytes();
        assert_eq!(Bundle::parse(&once, "b").unwrap().to_bytes(), once);
    }
}

/// Schemas.
pub fn datapackages(bytes: &[u8]) {
    if let Ok(package) = Package::parse(bytes) {
        let once = package.to_bytes();
        assert_eq!(Package::parse(&once).unwrap(), package);
        assert_eq!(package.schema.may_become(&package.schema), Ok(()));
        let _ = package.schema.fingerprint();
    }
    if let Ok(fields) = Package::fields_in(bytes) {
        let _ = Schema::new(fields);
    }
    if let Ok(text) = std::str::from_utf8(bytes) {
        let _ = Field::parse(text);
    }
}

/// Statistics of a shard, the root record.
pub fn statistics(bytes: &[u8]) {
    if let Some(statistics) = Statistics::parse(bytes) {
        assert_eq!(Statistics::parse(&statistics.to_bytes()), Some(statistics.clone()));
        let _ = statistics.contradiction();
    }
    if let Ok(root) = Root::parse(bytes) {
        assert_eq!(Root::parse(&root.to_bytes()), Ok(root.clone()));
        let _ = root.may_write();
    }
}

/// Names: any text becomes a segment and comes back, and a key that is understood is the one that we
/// would write.
pub fn keys(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let segment = key::encode_segment(&text);
    assert_eq!(key::decode_segment(&segment).as_deref(), Some(&*text));
    assert!(!segment.contains('/'));
    if text.len() < 300 {
        assert!(Key::new(&segment).is_ok(), "{segment:?}");
    }
    if let Some(plain) = key::decode_segment(&text) {
        assert_eq!(key::encode_segment(&plain), text);
    }
    let _ = (key::check_prefix(&text), key::percent_decode(bytes));
    let key = Key::new(&text);
    for shards in [1, 8] {
        let Ok(keys) = QueueKeys::new("q", shards) else { panic!("a plain name") };
        if let (Some((unit, part)), true) = (keys.parse_part(&text), key.is_ok()) {
            assert_eq!(keys.part(&unit, part).unwrap().as_str(), text);
        }
        let _ = keys.parse_folder(&text);
        let _ = (keys.parse_record(&text), keys.parse_scheduled(&text));
        // As it is, and as what it is of our prefix.
        let within = format!("{}{text}", keys.everything());
        if let (Some((unit, part)), Ok(_)) = (keys.parse_part(&within), Key::new(&within)) {
            assert_eq!(keys.part(&unit, part).unwrap().as_str(), within);
        }
        if let (Some((time, id)), Ok(_)) = (keys.parse_scheduled(&within), Key::new(&within)) {
            assert_eq!(keys.scheduled_at(time, &id).unwrap().as_str(), within);
        }
        let _ = keys.parse_record(&within);
    }
    let layout = Layout::new("i").unwrap();
    for name in [text.to_string(), format!("{}{text}", layout.base())] {
        let _ = (layout.pending(&name), layout.parse_shard(&name), layout.parse_quarantine(&name));
        if let (Some(key), Ok(_)) = (layout.flat_name(&name), Key::new(&name)) {
            assert_eq!(layout.flat(&key).unwrap().as_str(), name);
        }
    }
    let _ = (Layout::new(&text), QueueKeys::new(&text, 1), text.parse::<shard::Shard>());
    if let Ok(once) = shard::normalise_domain(&text) {
        assert_eq!(shard::normalise_domain(&once).as_deref(), Ok(&*once));
    }
}

/// Settings of queues, spans, times, ranges.
pub fn settings(bytes: &[u8]) {
    if let Ok(settings) = QueueSettings::parse(bytes) {
        assert_eq!(QueueSettings::parse(&settings.to_bytes()), Ok(settings.clone()));
        let _ = settings.checked();
    }
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok(span) = duration::parse(text) {
        assert_eq!(duration::parse(&duration::format(span)), Ok(span));
    }
    if let Ok(time) = text.parse::<StoreTime>() {
        assert_eq!(time.to_string().parse(), Ok(time));
        assert_eq!(time.to_string().len(), 27);
    }
    let _ = StoreTime::from_http_date(text);
    let mut done = Done::parse(text);
    assert_eq!(Done::parse(&done.to_string()), done);
    let before = done.len();
    if !done.contains(7) {
        done.insert(7);
        assert_eq!(done.len(), before + 1);
    }
    assert_eq!(Done::parse(&done.to_string()), done);
}
