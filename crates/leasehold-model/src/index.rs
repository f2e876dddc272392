//! The index: two compilers, of which one also purges, and a user who puts, deletes and reads one
//! record, through the inbox and through the flat inbox.
//!
//! No leases: they only save work, and the data must be safe without. The steps are those of
//! `leasehold::index::{compact, read}`, one request each; what is merged is merged by
//! `leasehold_protocol::compile`, on the bytes of real rows. A tick is an hour: a shard is not written
//! more than an hour after it was read, deletions are purged after two, and a request that is
//! delayed arrives within one, or never.

use std::cell::RefCell;
use std::cmp::Ordering;
use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;
use std::sync::{Arc, LazyLock};

use leasehold_protocol::compile::{Incoming, Merger, Mode, Publish, Published, may_sweep, publish};
use leasehold_protocol::format::datapackage::{Field, Kind, Schema};
use leasehold_protocol::format::usv;
use leasehold_protocol::merge::Claim;
use leasehold_protocol::mutant::{self, Mutant};
use leasehold_protocol::settle::Proof;
use leasehold_protocol::time::StoreTime;
use stateright::Property;

use crate::engine::{Answer, Body, Bounds, Checked, If, Mark, Rules, World, version};

const HOUR: i64 = 3_600_000_000;
const EPOCH: i64 = 1_700_000_000_000_000;
/// In ticks: `PUBLISH_WITHIN` and the least age of what is purged.
const PUBLISH_WITHIN: u8 = 1;
const PURGE_AFTER: u8 = 2;

const SHARD: usize = 0;
/// Objects of the inbox, each written once.
const INBOX: std::ops::Range<usize> = 1..4;
const FLAT: usize = 4;

static SCHEMA: LazyLock<Arc<Schema>> = LazyLock::new(|| {
    let fields = vec![Field::new("id", Kind::String), Field::new("v", Kind::String)];
    Arc::new(Schema::new(fields).unwrap_or_else(|error| unreachable!("{error}")))
});

/// A record of the one key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Rec {
    /// When it was written: the tick, and which put of all.
    at: (u8, u8),
    deleted: bool,
}

impl Rec {
    fn micros(self) -> i64 {
        EPOCH + i64::from(self.at.0) * HOUR + i64::from(self.at.1)
    }

    /// Its row, in its one spelling. Written once for each record: there are few, and it is asked for
    /// in every state.
    fn row(self) -> Arc<[u8]> {
        thread_local! {
            static ROWS: RefCell<HashMap<Rec, Arc<[u8]>>> = RefCell::default();
        }
        ROWS.with_borrow_mut(|rows| rows.entry(self).or_insert_with(|| self.write().into()).clone())
    }

    fn write(self) -> Vec<u8> {
        let (mut row, at) = (Vec::new(), StoreTime::from_micros(self.micros()));
        let written = match self.deleted {
            true => SCHEMA.write_deletion("x", at, &mut row),
            false => {
                let value = format!("v{}", self.at.1);
                SCHEMA.write_texts(["x", &value], at, &mut row)
            }
        };
        debug_assert!(written.is_ok());
        row
    }

    fn of(row: &[u8]) -> Option<Self> {
        let claim = SCHEMA.claim(row)?;
        let micros = claim.updated_at - EPOCH;
        let at = ((micros / HOUR) as u8, (micros % HOUR) as u8);
        Some(Self { at, deleted: claim.deleted })
    }

    /// Which counts.
    fn against(self, other: Self) -> Ordering {
        let (ours, theirs) = (self.row(), other.row());
        self.claim(&ours).against(&other.claim(&theirs))
    }

    fn claim(self, row: &[u8]) -> Claim<'_> {
        Claim { updated_at: self.micros(), deleted: self.deleted, row }
    }
}

fn latest(a: Option<Rec>, b: Option<Rec>) -> Option<Rec> {
    match (a, b) {
        (Some(a), Some(b)) if b.against(a).is_gt() => Some(b),
        (None, b) => b,
        (a, _) => a,
    }
}

/// What is stored: rows, one or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Rows(Option<Rec>);

impl Body for Rows {
    fn bytes(&self) -> Vec<u8> {
        let Some(rec) = self.0 else { return Vec::new() };
        let mut bytes = rec.row().to_vec();
        bytes.push(usv::END);
        bytes
    }
    fn proof(&self) -> Proof {
        Proof::Bytes
    }
}

/// Records as they come from the inbox.
struct Sorted(VecDeque<Vec<u8>>);

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

/// A compaction under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Work {
    /// Which objects were listed, as bits, and which of them are read or swept.
    listed: u8,
    done: u8,
    /// The shard that was opened: its version, or that there was none. And when.
    shard: Option<Option<Mark>>,
    rows: Option<Rec>,
    started: u8,
    /// The latest of what was read in the inbox.
    inbox: Option<Rec>,
    flat: Option<Mark>,
    purge: bool,
    /// FIELD.md row 20: the shard could not be read, and was taken for empty.
    blind: bool,
}

/// Where an actor is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Step {
    /// Does nothing.
    Idle,
    /// Compacts: lists, opens the shard, reads.
    Compiling(Work),
    /// Writes the shard.
    Publishing(Work),
    /// Deletes what was merged.
    Sweeping(Work),
    /// Puts this.
    Putting(Rec),
    /// Reads: has listed the inbox, and must not miss this.
    Reading(Option<Rec>, u8),
    /// Has read the inbox, and found this; or, by mistake, the shard.
    ReadingOn(Option<Rec>, Option<Rec>),
}

/// An actor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Local {
    step: Step,
    role: Role,
    /// Compactions, or puts.
    left: u8,
    /// Flat files that the user writes.
    flat: u8,
    /// Lookups, or purges.
    reads: u8,
}

/// Who.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// Compacts.
    Compiler,
    /// Compacts and purges.
    Purger,
    /// Puts and reads.
    User,
}

/// What an actor does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Choice {
    /// Begins a compaction: lists.
    Compact,
    /// The same, and forgets old deletions.
    Purge,
    /// Goes on with what it is doing.
    Next,
    /// Goes on, but the shard cannot be read.
    ReadFails,
    /// Puts a record.
    Put,
    /// Deletes it.
    Delete,
    /// Writes a flat file, as other tools do.
    WriteFlat,
    /// Looks the record up: lists.
    Look,
}

/// What was seen to happen.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct History {
    /// How many puts there were.
    puts: u8,
    /// The latest of what the user was told to be stored.
    promised: Option<Rec>,
    wrong: Option<Wrong>,
    seen: Seldom,
}

/// What must not happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Wrong {
    /// A shard went back in time.
    Older,
    /// A reader missed what was stored before it began.
    Missed,
    /// A merge came to other bytes than the rule says.
    OtherBytes,
}

/// What should happen somewhere.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Seldom {
    refused: bool,
    unknown: bool,
    gone: bool,
    purged: bool,
    nothing: bool,
    too_late: bool,
    flat_kept: bool,
}

/// The rules.
#[derive(Debug, Clone, Copy)]
pub struct IndexRules {
    /// Puts and deletes of the user.
    pub puts: u8,
    /// Flat files that the user writes.
    pub flat: u8,
    /// Lookups.
    pub reads: u8,
    /// Compactions of each compiler.
    pub compactions: u8,
    /// Purges of the second.
    pub purges: u8,
    /// How much is tried.
    pub bounds: Bounds,
}

impl IndexRules {
    fn rec(&self, world: &World<Self>, key: usize) -> Option<Rec> {
        world.at(key).and_then(|(_, rows, _)| rows.0)
    }

    fn go(&self, world: &mut World<Self>, actor: usize, step: Step) {
        world.actors[actor].local.step = step;
    }

    fn list(&self, world: &World<Self>) -> u8 {
        let listed = |bits, key: usize| bits | u8::from(world.registers[key].is_some()) << key;
        INBOX.chain([FLAT]).fold(0, listed)
    }

    /// The next of these keys.
    fn first(bits: u8) -> Option<usize> {
        INBOX.chain([FLAT]).find(|key| bits & 1 << key != 0)
    }

    fn compile(&self, world: &mut World<Self>, actor: usize, mut work: Work, fails: bool) {
        // FIELD.md row 29: the inbox first, then the shard.
        let late = mutant::is(Mutant::CompilerOrder) && work.listed & !work.done != 0;
        if work.shard.is_none() && !late {
            work.started = world.now;
            match fails {
                false => {
                    work.shard = Some(world.at(SHARD).map(|(mark, ..)| mark));
                    work.rows = self.rec(world, SHARD);
                }
                true if mutant::is(Mutant::FailedShardRead) => {
                    (work.shard, work.blind) = (Some(None), true);
                }
                // Not a proven absence: given up.
                true => return self.go(world, actor, Step::Idle),
            }
        } else if let Some(key) = Self::first(work.listed & !work.done) {
            work.done |= 1 << key;
            match (world.at(key), key) {
                (Some((mark, rows, _)), _) => {
                    work.inbox = latest(work.inbox, rows.0);
                    if key == FLAT {
                        work.flat = Some(mark);
                    }
                }
                // Merged, or taken back.
                (None, FLAT) => {}
                (None, _) => {
                    world.history.seen.gone = true;
                    return self.go(world, actor, Step::Idle);
                }
            }
        }
        match work.shard.is_some() && work.listed & !work.done == 0 {
            true => self.merge(world, actor, work),
            false => self.go(world, actor, Step::Compiling(work)),
        }
    }

    fn merge(&self, world: &mut World<Self>, actor: usize, work: Work) {
        let purge_before =
            work.purge.then(|| EPOCH + (i64::from(world.now) - i64::from(PURGE_AFTER)) * HOUR);
        let mut merger = Merger::new(SCHEMA.clone(), Mode::Rewrite, purge_before);
        let mut inbox = Sorted(work.inbox.iter().map(|rec| rec.row().to_vec()).collect());
        let (shard, mut out) = (Rows(work.rows).bytes(), Vec::new());
        let merged = merger.merge(&shard, &mut inbox, &mut out, usize::MAX);
        debug_assert!(merged.is_ok());
        let finished = merger.finish(&mut inbox, &mut out, usize::MAX);
        debug_assert!(finished.is_ok());
        let mut rows = Rows(usv::rows(&out).next().and_then(Rec::of));
        // FIELD.md row 19: what is in the inbox wins.
        if mutant::is(Mutant::InboxAlwaysWins) && work.inbox.is_some() {
            rows = Rows(work.inbox);
        }
        let expected = latest(work.rows, work.inbox);
        let purged = rows.0.is_none() && expected.is_some();
        world.history.seen.purged = purged;
        let is_right = match (purged, expected) {
            (true, Some(rec)) => rec.deleted && purge_before.is_some_and(|at| rec.micros() < at),
            _ => rows.bytes() == Rows(expected).bytes(),
        };
        if !is_right {
            world.history.wrong = Some(Wrong::OtherBytes);
        }
        let seen = work.shard.flatten().map(version);
        match publish(merger.tally(), seen.as_ref()) {
            Publish::Nothing => {
                world.history.seen.nothing = true;
                self.sweep(world, actor, work, Published::Nothing);
            }
            Publish::Write(_) if world.now - work.started > PUBLISH_WITHIN => {
                world.history.seen.too_late = true;
                self.go(world, actor, Step::Idle);
            }
            Publish::Write(when) => {
                let mut when = If::from(&when);
                // FIELD.md rows 9 and 20.
                if work.blind || mutant::is(Mutant::FirstShardWrite) && when == If::Absent {
                    when = If::Any;
                }
                self.go(world, actor, Step::Publishing(work));
                world.send(actor, SHARD, Some(rows), when);
            }
        }
    }

    fn sweep(&self, world: &mut World<Self>, actor: usize, work: Work, published: Published) {
        if !may_sweep(published) {
            return self.go(world, actor, Step::Idle);
        }
        // What was read is deleted: the bits are used once more.
        let read = work.done;
        self.sweep_on(world, actor, Work { listed: read, done: 0, ..work });
    }

    fn sweep_on(&self, world: &mut World<Self>, actor: usize, mut work: Work) {
        let Some(key) = Self::first(work.listed & !work.done) else {
            return self.go(world, actor, Step::Idle);
        };
        work.done |= 1 << key;
        let when = match (key, work.flat) {
            // FIELD.md row 8: whatever is there by now.
            (FLAT, _) if mutant::is(Mutant::InboxOverwrite) => If::Any,
            (FLAT, Some(mark)) => If::Is(mark),
            // Gone before it was read.
            (FLAT, None) => return self.sweep_on(world, actor, work),
            _ => If::Any,
        };
        self.go(world, actor, Step::Sweeping(work));
        world.send(actor, key, None, when);
    }

    fn put(&self, world: &mut World<Self>, actor: usize, key: usize, deleted: bool) {
        world.history.puts += 1;
        let rec = Rec { at: (world.now, world.history.puts), deleted };
        self.go(world, actor, Step::Putting(rec));
        world.send(actor, key, Some(Rows(Some(rec))), If::Absent);
    }

    fn read(&self, world: &mut World<Self>, actor: usize, floor: Option<Rec>, best: Option<Rec>) {
        let missed = match floor {
            None => false,
            Some(floor) => match best {
                Some(best) => best.against(floor).is_lt(),
                None => !floor.deleted,
            },
        };
        if missed {
            world.history.wrong = Some(Wrong::Missed);
        }
        self.go(world, actor, Step::Idle);
    }

    fn everything(&self, world: &World<Self>) -> Option<Rec> {
        (SHARD..=FLAT).fold(None, |best, key| latest(best, self.rec(world, key)))
    }
}

impl Rules for IndexRules {
    type Body = Rows;
    type Local = Local;
    type History = History;
    type Choice = Choice;

    fn bounds(&self) -> Bounds {
        self.bounds
    }

    fn registers(&self) -> usize {
        FLAT + 1
    }

    fn actors(&self) -> Vec<Local> {
        let compiler = Local {
            step: Step::Idle,
            role: Role::Compiler,
            left: self.compactions,
            flat: 0,
            reads: 0,
        };
        let purger = Local { role: Role::Purger, reads: self.purges, ..compiler };
        let user = Local {
            role: Role::User,
            left: self.puts,
            flat: self.flat,
            reads: self.reads,
            ..compiler
        };
        vec![compiler, purger, user]
    }

    fn choices(&self, world: &World<Self>, actor: usize) -> Vec<Choice> {
        let local = &world.actors[actor].local;
        let mut choices = Vec::new();
        match (local.step, local.role) {
            (Step::Idle, Role::User) => {
                if local.left > 0 {
                    choices.extend([Choice::Put, Choice::Delete]);
                }
                if local.flat > 0 {
                    choices.push(Choice::WriteFlat);
                }
                if local.reads > 0 && world.history.promised.is_some() {
                    choices.push(Choice::Look);
                }
            }
            (Step::Idle, _) => {
                if local.left > 0 && self.list(world) != 0 {
                    choices.push(Choice::Compact);
                }
                // There is something to purge.
                let now = world.now;
                let old = |rec: Rec| rec.deleted && rec.at.0 + PURGE_AFTER < now;
                if local.reads > 0 && self.rec(world, SHARD).is_some_and(old) {
                    choices.push(Choice::Purge);
                }
            }
            (Step::Compiling(work), _) => {
                choices.push(Choice::Next);
                if work.shard.is_none() && world.faults < self.bounds.faults {
                    choices.push(Choice::ReadFails);
                }
            }
            _ => choices.push(Choice::Next),
        }
        choices
    }

    fn choose(&self, world: &mut World<Self>, actor: usize, choice: Choice) {
        let local = &mut world.actors[actor].local;
        match (choice, local.step) {
            (Choice::Compact | Choice::Purge, _) => {
                match choice {
                    Choice::Purge => local.reads -= 1,
                    _ => local.left -= 1,
                }
                let work = Work {
                    listed: self.list(world),
                    done: 0,
                    shard: None,
                    rows: None,
                    started: 0,
                    inbox: None,
                    flat: None,
                    purge: choice == Choice::Purge,
                    blind: false,
                };
                self.go(world, actor, Step::Compiling(work));
            }
            (Choice::Next, Step::Compiling(work)) => self.compile(world, actor, work, false),
            (Choice::ReadFails, Step::Compiling(work)) => {
                world.faults += 1;
                self.compile(world, actor, work, true);
            }
            (Choice::Put | Choice::Delete, _) => {
                local.left -= 1;
                let key = INBOX.start + usize::from(self.puts - local.left - 1);
                self.put(world, actor, key, choice == Choice::Delete);
            }
            (Choice::WriteFlat, _) => {
                local.flat -= 1;
                // Other tools write it whatever is there. Were that delayed, it would undo a later
                // write of their own, which nobody can prevent: so it is not.
                world.history.puts += 1;
                let rec = Rec { at: (world.now, world.history.puts), deleted: false };
                world.registers[FLAT] = Some((Rows(Some(rec)), world.now));
                world.history.promised = latest(world.history.promised, Some(rec));
            }
            (Choice::Look, _) => {
                local.reads -= 1;
                let floor = world.history.promised;
                // FIELD.md row 28: the shard first.
                let step = match mutant::is(Mutant::ReaderOrder) {
                    true => Step::ReadingOn(floor, self.rec(world, SHARD)),
                    false => Step::Reading(floor, self.list(world)),
                };
                self.go(world, actor, step);
            }
            (Choice::Next, Step::Reading(floor, listed)) => {
                let keys = INBOX.chain([FLAT]).filter(|key| listed & 1 << key != 0);
                let best = keys.fold(None, |best, key| latest(best, self.rec(world, key)));
                self.go(world, actor, Step::ReadingOn(floor, best));
            }
            (Choice::Next, Step::ReadingOn(floor, best)) => {
                let rest = match mutant::is(Mutant::ReaderOrder) {
                    true => INBOX
                        .chain([FLAT])
                        .fold(None, |best, key| latest(best, self.rec(world, key))),
                    false => self.rec(world, SHARD),
                };
                self.read(world, actor, floor, latest(best, rest));
            }
            _ => {}
        }
    }

    fn answered(&self, world: &mut World<Self>, actor: usize, answer: Answer) {
        match (world.actors[actor].local.step, answer) {
            (Step::Publishing(work), answer) => {
                let published = match answer {
                    Answer::Done(_) => Published::Stored,
                    Answer::Refused => Published::Refused,
                    Answer::Overtaken | Answer::NoAnswer => Published::Unknown,
                };
                world.history.seen.refused = published == Published::Refused;
                world.history.seen.unknown = published == Published::Unknown;
                self.sweep(world, actor, work, published);
            }
            (Step::Sweeping(work), answer) => {
                world.history.seen.flat_kept = answer == Answer::Refused;
                self.sweep_on(world, actor, work);
            }
            (Step::Putting(rec), Answer::Done(_)) => {
                world.history.promised = latest(world.history.promised, Some(rec));
                self.go(world, actor, Step::Idle);
            }
            _ => self.go(world, actor, Step::Idle),
        }
    }

    fn crashed(&self, world: &World<Self>, actor: usize) -> Option<Local> {
        let local = world.actors[actor].local;
        let there = local.step != Step::Idle && local.role != Role::User;
        there.then_some(Local { step: Step::Idle, ..local })
    }

    fn forget(&self, history: &mut History) {
        history.seen = Seldom::default();
    }

    fn is_finished(&self, _world: &World<Self>, _actor: usize) -> bool {
        // Nobody uses marks here.
        false
    }

    fn applied(
        &self,
        world: &mut World<Self>,
        key: usize,
        before: Option<&Rows>,
        after: Option<&Rows>,
    ) {
        if let (SHARD, Some(Rows(Some(before))), Some(Rows(after))) = (key, before, after) {
            let fell = match after {
                Some(after) => after.against(*before).is_lt(),
                None => !before.deleted,
            };
            if fell {
                world.history.wrong = Some(Wrong::Older);
            }
        }
    }

    fn properties(&self) -> Vec<Property<Checked<Self>>> {
        type I = Checked<IndexRules>;
        type W = World<IndexRules>;
        fn never(world: &W, wrong: Wrong) -> bool {
            world.history.wrong != Some(wrong)
        }
        let mut properties = vec![
            Property::always(
                "no promised record is lost, none comes back",
                |model: &I, world: &W| match (world.history.promised, model.0.everything(world)) {
                    (None, _) => true,
                    (Some(promised), Some(there)) => there.against(promised).is_ge(),
                    (Some(promised), None) => promised.deleted,
                },
            ),
            Property::always("no shard goes back in time", |_: &I, world: &W| {
                never(world, Wrong::Older)
            }),
            Property::always("readers see what was stored before", |_: &I, world: &W| {
                never(world, Wrong::Missed)
            }),
            Property::always("compilers come to the same bytes", |_: &I, world: &W| {
                never(world, Wrong::OtherBytes)
            }),
            Property::always("left alone, the inbox empties", |model: &I, world: &W| {
                world.now < model.0.bounds.ticks || drains(model, world)
            }),
            Property::sometimes("refused", |_: &I, world: &W| world.history.seen.refused),
        ];
        if self.bounds.faults > 0 {
            properties.extend([
                Property::sometimes("unknown", |_: &I, world: &W| world.history.seen.unknown),
                Property::sometimes("nothing to write", |_: &I, world: &W| {
                    world.history.seen.nothing
                }),
            ]);
        }
        if self.bounds.ticks > PUBLISH_WITHIN {
            properties.push(Property::sometimes("too late", |_: &I, world: &W| {
                world.history.seen.too_late
            }));
        }
        if self.puts > 1 {
            properties.push(Property::sometimes("an inbox object was gone", |_: &I, world: &W| {
                world.history.seen.gone
            }));
        }
        if self.purges > 0 {
            properties
                .push(Property::sometimes("purged", |_: &I, world: &W| world.history.seen.purged));
        }
        if self.flat > 0 {
            properties
                .push(Property::sometimes("a newer flat file was kept", |_: &I, world: &W| {
                    world.history.seen.flat_kept
                }));
        }
        properties
    }
}

/// Whether a compiler alone, long after, empties the inbox without losing anything.
fn drains(model: &Checked<IndexRules>, world: &World<IndexRules>) -> bool {
    let mut world = world.clone();
    world.ghosts.clear();
    let expected = model.0.everything(&world);
    for actor in &mut world.actors {
        actor.call = None;
        actor.local.step = Step::Idle;
    }
    for _ in 0..40 {
        if world.actors[0].call.is_some() {
            model.deliver(&mut world, 0);
            continue;
        }
        let local = &mut world.actors[0].local;
        let choice = match local.step {
            Step::Idle => {
                local.left = 1;
                if model.0.list(&world) == 0 {
                    return model.0.rec(&world, SHARD) == expected;
                }
                Choice::Compact
            }
            _ => Choice::Next,
        };
        model.0.choose(&mut world, 0, choice);
    }
    false
}
