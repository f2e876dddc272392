//! Finding something to do.
//!
//! On a bucket a LIST page chooses candidates: what has no lease is free, and what has one that is
//! older than the queue's ttl is probably stale. Only when there is neither does a worker look into
//! younger leases, each version once, for what is due to be tried again. In a directory names are
//! read instead, which is much cheaper than files, and whether a task is free shows when it is
//! claimed.
//!
//! A listing that is minutes old does no harm: it only decides what is *tried*.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use leasehold_protocol::cas::Version;
use leasehold_protocol::layout::queue::{Part, Unit};
use leasehold_protocol::lease::SLACK;
use leasehold_protocol::queue::{Standing, order};
use leasehold_protocol::time::StoreTime;
use ulid::Ulid;

use super::Queue;
use super::claim::Tried;
use super::shunned::Shunned;
use crate::env::BootTime;
use crate::lease::Desk;
use crate::store::{Detail, Entry, Kind, List, Page};
use crate::{ErrorKind, Result};

/// How many pages of leased tasks to go through for something to do.
const PAGES: usize = 10;
/// How many young leases to look into at a time, on a bucket.
const LOOKS: usize = 50;
/// How many stale leases to try per listing: others see the same ones.
const STALE: usize = 4;
/// The same where nothing is free: whoever would only wait has the time.
const STALE_ALONE: usize = 64;
/// How many vain tries, one after the other, before a list is given up.
const VAIN: u32 = 12;
/// After how many barren lists to look further than the first page that has something.
const BARREN: u32 = 2;
/// When to look again at what could not be taken, but may be soon.
const SOON: Duration = Duration::from_secs(1);
/// When to look again at what cannot be read.
const UNREADABLE: Duration = super::shunned::SHUN;
/// How many leases are remembered.
const LOOKED: usize = 20_000;
/// How many names of a directory to work through before reading them again.
const NAMES: usize = 20_000;

/// Something to try.
#[derive(Debug)]
pub(super) enum Candidate {
    /// Had no lease when it was listed, or so it is hoped.
    Free(Unit),
    /// The same from a list of names that has proved old: a look first is cheaper than a claim.
    Doubtful(Unit),
    /// Had one that may be nobody's.
    Leased(Unit, Desk),
    /// A lease alone: what it was for is gone, it seems.
    Orphan(Unit, Desk),
}

impl Candidate {
    pub fn unit(&self) -> &Unit {
        let (Self::Free(unit)
        | Self::Doubtful(unit)
        | Self::Leased(unit, _)
        | Self::Orphan(unit, _)) = self;
        unit
    }

    pub fn is_bundle(&self) -> bool {
        matches!(self.unit(), Unit::Bundle(..))
    }
}

/// What one worker knows of one queue.
#[derive(Debug)]
pub(super) struct Finder {
    queue: Queue,
    worker: String,
    candidates: VecDeque<Candidate>,
    /// Whether nobody got in the way while the last list was worked through. Not known at first.
    alone: Option<bool>,
    /// Vain tries with the present candidates, one after the other.
    vain: u32,
    /// Whether there was any.
    disturbed: bool,
    /// Whether names are cheaper to read than keys: in a directory.
    by_name: bool,
    /// Whether anything came of the last list.
    fruitful: bool,
    /// How many lists, one after the other, had something to try of which nothing came.
    barren: u32,
    /// Whether it had nothing to try.
    dry: bool,
    /// Which parts the queue had, and when that was.
    overview: Option<(Overview, BootTime)>,
    /// What we took since names were read last: they are still there while we do it, and would look
    /// like somebody else's.
    taken: HashSet<Unit>,
    /// Leases that were looked into: not again before this, while they stay in this version.
    looked: HashMap<Unit, Looked>,
    /// What could not be claimed.
    pub shunned: Arc<Shunned>,
    /// Where a listing that found nothing in many pages goes on, by prefix.
    resume: HashMap<String, String>,
    /// Where to list next, where there is more than a page.
    depth: Depth,
    /// Which part of the queue to list next.
    turn: u64,
    /// When the earliest scheduled task is due, as far as we know, and when that was read.
    scheduled: Option<(Option<StoreTime>, BootTime)>,
}

#[derive(Debug)]
struct Looked {
    version: Option<Version>,
    desk: Desk,
    again: BootTime,
}

/// How far a queue of more than a page reaches, by the times in its tasks' names.
#[derive(Debug, Default)]
struct Depth {
    /// The first task, where there is more than a page.
    oldest: Option<u64>,
    /// The latest task that was seen.
    newest: u64,
    from_start: bool,
}

/// What a refill found out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Outlook {
    /// Whether anything at all is waiting or being done.
    pub busy: bool,
    /// Something is due in this time.
    pub due: Option<Duration>,
}

impl Outlook {
    /// Something is due in this time, too.
    pub fn sooner(&mut self, span: Duration) {
        self.due = Some(self.due.map_or(span, |due| due.min(span)));
    }

    /// Both together.
    pub fn and(&mut self, other: Self) {
        self.busy |= other.busy;
        other.due.into_iter().for_each(|due| self.sooner(due));
    }
}

/// Which parts of a queue there are.
#[derive(Debug, Clone, Copy, Default)]
struct Overview {
    pending: bool,
    bundles: bool,
}

impl Overview {
    fn any(self) -> bool {
        self.pending || self.bundles
    }
}

/// How long it is relied on.
const OVERVIEW: Duration = Duration::from_secs(10);

/// How long a list of scheduled tasks is good for.
const SCHEDULED: Duration = Duration::from_secs(30);

impl Finder {
    pub fn new(queue: Queue, worker: String) -> Self {
        Self {
            worker,
            candidates: VecDeque::new(),
            alone: None,
            vain: 0,
            disturbed: false,
            by_name: queue.store().kind() == Kind::Directory,
            fruitful: false,
            barren: 0,
            dry: false,
            overview: None,
            taken: HashSet::new(),
            looked: HashMap::new(),
            shunned: Arc::default(),
            resume: HashMap::new(),
            depth: Depth::default(),
            turn: queue.store().env().random(),
            scheduled: None,
            queue,
        }
    }

    /// The next candidate that is known.
    pub fn next(&mut self) -> Option<Candidate> {
        match self.candidates.pop_front() {
            Some(Candidate::Free(unit)) if self.alone == Some(false) => {
                Some(Candidate::Doubtful(unit))
            }
            candidate => candidate,
        }
    }

    /// What became of a candidate.
    pub fn tried(&mut self, unit: &Unit, tried: &Tried) {
        match tried {
            Tried::Task(_) | Tried::Bundle(_) => {
                if self.by_name {
                    self.taken.insert(unit.clone());
                }
                self.looked.remove(unit);
                self.vain = 0;
                self.fruitful = true;
            }
            Tried::Later(left) => self.not_before(unit, *left),
            // What cannot be read is not looked at again and again.
            Tried::Unreadable => self.not_before(unit, UNREADABLE),
            // A lease that may yet turn out to be nobody's has its time already.
            Tried::Taken | Tried::Over if self.looked.contains_key(unit) => {}
            Tried::Taken | Tried::Over => {
                (self.alone, self.disturbed) = (Some(false), true);
                self.vain += 1;
                if self.vain >= VAIN {
                    // The list is of no use any more.
                    self.candidates.clear();
                } else if !self.candidates.is_empty() {
                    // Somebody else works from here on: elsewhere may be better.
                    let random = self.queue.store().env().random();
                    let jump = random % self.candidates.len() as u64;
                    self.candidates.rotate_left(jump as usize);
                }
            }
        }
    }

    /// A lease is not looked into again before this has passed, unless it changes.
    fn not_before(&mut self, unit: &Unit, span: Duration) {
        let again = self.queue.store().env().clock().boot().plus(span);
        match self.looked.get_mut(unit) {
            Some(looked) => looked.again = again,
            None => {
                if let Ok(desk) = self.queue.desk(unit, &self.worker) {
                    self.note(unit, Looked { version: None, desk, again });
                }
            }
        }
    }

    fn note(&mut self, unit: &Unit, looked: Looked) {
        if self.looked.len() >= LOOKED {
            self.looked.clear();
        }
        self.looked.insert(unit.clone(), looked);
    }

    /// Whether this state of a lease was looked into already, and for how long it is to be left
    /// alone.
    fn left_alone(&self, unit: &Unit, lease: &Entry) -> Option<Duration> {
        let looked = self.looked.get(unit)?;
        let now = self.queue.store().env().clock().boot();
        let same = looked.version.is_none() || looked.version == lease.version;
        (same && looked.again > now).then(|| looked.again.since(now))
    }

    /// Lists what there is to do.
    pub async fn refill(&mut self) -> Result<Outlook> {
        self.candidates.clear();
        self.vain = 0;
        self.shunned.listing();
        // Whoever worked through a list undisturbed is alone, as far as it knows.
        let disturbed = std::mem::take(&mut self.disturbed);
        // Where the last list was of no use, the same again is not either.
        let fruitful = std::mem::take(&mut self.fruitful);
        // Also where what was tried is remembered, and nobody got in the way.
        self.barren = if fruitful || self.dry { 0 } else { self.barren.saturating_add(1) };
        self.alone = match (self.alone, disturbed) {
            (_, true) => Some(false),
            (None, false) if fruitful => Some(true),
            (Some(false), false) if fruitful => None,
            (alone, false) => alone,
        };
        let dry = std::mem::take(&mut self.dry);
        let first = self.overview.is_none();
        if self.by_name && (fruitful || first) && self.read_names().await? {
            self.overview.get_or_insert((Overview::default(), BootTime::from_boot(Duration::ZERO)));
            return Ok(Outlook { busy: true, due: None });
        }
        let now = self.queue.store().env().clock().boot();
        match self.overview {
            // What there was a moment ago is probably there still.
            Some((overview, at)) if !dry && overview.any() && now.since(at) < OVERVIEW => {
                let outlook = self.read_parts(overview).await?;
                if !self.candidates.is_empty() {
                    return Ok(outlook);
                }
            }
            Some(_) => {}
            // Most of what there is to do are pending tasks. If not, there is more to see.
            None => {
                let guess = Overview { pending: true, bundles: false };
                let outlook = self.read_parts(guess).await?;
                let pending = !self.candidates.is_empty();
                self.overview = Some((Overview { pending, ..guess }, now));
                return Ok(match pending {
                    true => outlook,
                    false => Outlook { busy: true, due: Some(Duration::ZERO) },
                });
            }
        }
        // One LIST shows which parts of the queue there are. Only this says that there is nothing:
        // between two listings a task can move from one part to the other.
        let keys = self.queue.keys().clone();
        let list = List::prefix(keys.everything())?.delimited();
        let parts = self.queue.store().list(list).collect().await?;
        let has = |prefix: &str| parts.prefixes.iter().any(|there| there == prefix);
        let overview =
            Overview { pending: has(&keys.all_pending()), bundles: has(&keys.bundles()) };
        self.overview = Some((overview, now));
        let mut outlook = Outlook { busy: false, due: None };
        if has(&keys.scheduled()) {
            outlook = self.promote(parts.now).await?;
        }
        if !self.candidates.is_empty() {
            return Ok(Outlook { busy: true, ..outlook });
        }
        outlook.and(self.read_parts(overview).await?);
        if !overview.any() {
            self.looked.clear();
            self.resume.clear();
            self.alone = None;
        }
        Ok(outlook)
    }

    async fn read_parts(&mut self, overview: Overview) -> Result<Outlook> {
        let keys = self.queue.keys().clone();
        let mut sources = Vec::new();
        self.turn = self.turn.wrapping_add(1);
        if overview.pending {
            let shards = u64::from(keys.shards());
            sources.extend((0..shards).map(|n| keys.pending(((self.turn + n) % shards) as u16)));
        }
        if overview.bundles {
            // Neither is to wait for the other to run dry.
            let at = if self.turn.is_multiple_of(2) { 0 } else { sources.len() };
            sources.insert(at, keys.bundles());
        }
        let mut outlook = Outlook::default();
        for source in sources {
            outlook.and(self.read_keys(&source).await?);
            if !self.candidates.is_empty() {
                return Ok(outlook);
            }
        }
        self.dry = true;
        Ok(outlook)
    }

    /// Names of tasks and bundles in a directory. Says whether there are any.
    async fn read_names(&mut self) -> Result<bool> {
        let keys = self.queue.keys().clone();
        self.turn = self.turn.wrapping_add(1);
        let shard = (self.turn % u64::from(keys.shards())) as u16;
        let mut units = Vec::new();
        for prefix in [keys.bundles(), keys.pending(shard)] {
            let mut list = List::prefix(prefix)?.delimited().unordered().loose();
            // Pages end where a bucket ends them; a directory has names for as long as one reads.
            list.page = NAMES;
            let mut listing = self.queue.store().list(list);
            while let Some(page) = listing.next_page().await? {
                units.extend(page.prefixes.iter().filter_map(|prefix| keys.parse_folder(prefix)));
                if units.len() >= NAMES {
                    break;
                }
            }
        }
        // Passed over once: by then it is done, or has a lease by which it is found, or was pushed again.
        let taken = std::mem::take(&mut self.taken);
        units.retain(|unit| !taken.contains(unit) && self.shuns(unit, false).is_none());
        if units.is_empty() {
            return Ok(false);
        }
        units.sort_unstable();
        let listing = vec![Standing::Free; units.len()];
        let order = order(&listing, self.alone, self.queue.store().env().random());
        let mut units: Vec<Option<Unit>> = units.into_iter().map(Some).collect();
        let candidates = order.into_iter().filter_map(|n| units[n].take()).map(Candidate::Free);
        self.candidates = candidates.collect();
        Ok(true)
    }

    /// Tasks or bundles under this prefix, with their leases.
    async fn read_keys(&mut self, prefix: &str) -> Result<Outlook> {
        let store = self.queue.store().clone();
        let resumed = self.resume.remove(prefix);
        let entry_point = resumed.clone().or_else(|| self.entry_point(prefix));
        let mut list = List::prefix(prefix)?.detail(Detail::Version);
        if let Some(after) = &entry_point {
            list = list.start_after(after);
        }
        let mut listing = store.list(list);
        let mut outlook = Outlook::default();
        let mut seen = Seen::default();
        let mut last = None;
        for n in 0..=PAGES {
            if n == PAGES {
                // More than enough for one look: the next one goes on from here.
                self.resume.extend(last.take().map(|last| (prefix.to_owned(), last)));
                outlook.due = Some(SOON);
                break;
            }
            let page = listing.next_page().await?;
            let Some(page) = page else { break };
            if n == 0 && entry_point.is_none() {
                self.depth.from_start = false;
                self.depth.oldest = match page.len() < crate::store::PAGE {
                    true => None,
                    false => page.entries.first().and_then(|first| self.time_of(first)),
                };
            }
            let newest = page.entries.last().and_then(|last| self.time_of(last));
            self.depth.newest = self.depth.newest.max(newest.unwrap_or(0));
            last = page.entries.last().map(|last| last.key.to_string()).or(last);
            seen.add(&self.queue, page);
            // Where a store does not list in order, the lease of what looks free may come later.
            if seen.units.iter().any(|shown| self.is_free(shown)) && self.barren < BARREN {
                break;
            }
        }
        if entry_point.is_some() && !seen.units.iter().any(|shown| self.is_free(shown)) {
            // What is before the entry point was not seen.
            if resumed.is_none() {
                // And nothing is as far out as this.
                (self.depth.from_start, self.depth.newest) = (true, 0);
            }
            (outlook.busy, outlook.due) = (true, Some(SOON));
        }
        self.shunned.note_unknown(seen.unknown);
        self.choose(seen, &mut outlook).await?;
        Ok(outlook)
    }

    /// The time in a task's name, if it has one.
    fn time_of(&self, entry: &Entry) -> Option<u64> {
        match self.queue.keys().parse_part(entry.key.as_str())?.0 {
            Unit::Task(id) | Unit::Bundle(id, _) => {
                Some(Ulid::from_string(&id).ok()?.timestamp_ms())
            }
        }
    }

    /// Somewhere between the oldest task and the newest, where there is more than one page.
    fn entry_point(&mut self, prefix: &str) -> Option<String> {
        let oldest = self.depth.oldest?;
        if std::mem::take(&mut self.depth.from_start) {
            return None;
        }
        let random = self.queue.store().env().random();
        // Every now and then from the start, for what sorts before.
        if random.is_multiple_of(8) {
            return None;
        }
        // Twice as far as was seen: whoever goes on finds the end in a few steps.
        let span = self.depth.newest.checked_sub(oldest).filter(|span| *span > 0)?;
        let at = oldest + (random / 8) % span.saturating_mul(2);
        Some(format!("{prefix}{}", Ulid::from_parts(at, 0)))
    }

    /// For how long what could not be claimed is left alone, and whether because we may not.
    fn shuns(&self, unit: &Unit, leased: bool) -> Option<(Duration, bool)> {
        self.shunned.left_alone(unit, leased, || self.queue.store().env().clock().boot())
    }

    /// Whether something is to be claimed that has no lease.
    fn is_free(&self, shown: &Shown) -> bool {
        shown.work && shown.lease.is_none() && self.shuns(&shown.unit, false).is_none()
    }

    /// Makes candidates of what a listing shows.
    async fn choose(&mut self, seen: Seen, outlook: &mut Outlook) -> Result<()> {
        let Seen { units, now, .. } = seen;
        let random = self.queue.store().env().random();
        let ttl = self.queue.settings().ttl.saturating_add(SLACK);
        let is_old = |lease: &Entry| match (now, lease.modified) {
            (Some(now), Some(modified)) => now.since(modified) >= ttl,
            _ => false,
        };
        let removes = self.queue.store().deletes_conditionally().await?;
        let mut standing = Vec::with_capacity(units.len());
        let mut stale = Vec::new();
        for (n, shown) in units.iter().enumerate() {
            standing.push(match self.is_free(shown) {
                true => Standing::Free,
                false => Standing::Leased,
            });
            if let Some((left, denied)) = self.shuns(&shown.unit, shown.lease.is_some()) {
                // Nobody waits for what is not for them.
                outlook.busy |= !denied;
                outlook.sooner(left);
                continue;
            }
            let old = shown.lease.as_ref().is_some_and(is_old);
            // An old lease alone is nobody's work; a young one may be of work that is just written.
            outlook.busy |= shown.work || !old;
            let Some(lease) = shown.lease.as_ref().filter(|_| old && (shown.work || removes))
            else {
                continue;
            };
            match self.left_alone(&shown.unit, lease) {
                Some(left) => outlook.sooner(left),
                None => stale.push(n),
            }
        }
        let most = if standing.contains(&Standing::Free) { STALE } else { STALE_ALONE };
        while stale.len() > most {
            let drop = random as usize % stale.len();
            stale.swap_remove(drop);
        }
        for n in stale {
            let shown = &units[n];
            let desk = self.desk_for(&shown.unit)?;
            let again = self.queue.store().env().clock().boot().plus(SOON);
            let version = shown.lease.as_ref().and_then(|lease| lease.version.clone());
            self.note(&shown.unit, Looked { version, desk: desk.clone(), again });
            self.candidates.push_back(match shown.work {
                true => Candidate::Leased(shown.unit.clone(), desk),
                false => Candidate::Orphan(shown.unit.clone(), desk),
            });
        }
        for n in order(&standing, self.alone, random) {
            self.candidates.push_back(Candidate::Free(units[n].unit.clone()));
        }
        if self.candidates.is_empty() {
            self.look_into(&units, outlook).await?;
        }
        Ok(())
    }

    fn desk_for(&self, unit: &Unit) -> Result<Desk> {
        match self.looked.get(unit) {
            // It remembers for how long it has seen the lease unchanged.
            Some(looked) => Ok(looked.desk.clone()),
            None => self.queue.desk(unit, &self.worker),
        }
    }

    /// Nothing is free: what is due to be tried again, or was left by a process of this machine?
    async fn look_into(&mut self, units: &[Shown], outlook: &mut Outlook) -> Result<()> {
        let looks = if self.by_name { usize::MAX } else { LOOKS };
        let mut made = 0;
        for shown in units.iter().filter(|shown| shown.work) {
            let Some(lease) = &shown.lease else { continue };
            if self.shuns(&shown.unit, true).is_some() {
                continue;
            }
            if let Some(left) = self.left_alone(&shown.unit, lease) {
                outlook.sooner(left);
                continue;
            }
            if made >= looks {
                outlook.sooner(SOON);
                break;
            }
            made += 1;
            let desk = self.desk_for(&shown.unit)?;
            let span = match self.glance(&desk).await {
                Ok(Glance::Take) => {
                    self.candidates.push_back(Candidate::Leased(shown.unit.clone(), desk.clone()));
                    SOON
                }
                Ok(Glance::In(span)) => span,
                Err(error) if error.kind() == ErrorKind::Denied => {
                    let now = self.queue.store().env().clock().boot();
                    self.shunned.add(&shown.unit, &error, now);
                    UNREADABLE
                }
                Err(error) if error.is_about_data() => {
                    tracing::warn!(%error, "a lease cannot be read");
                    UNREADABLE
                }
                Err(error) => return Err(error),
            };
            outlook.sooner(span);
            let again = self.queue.store().env().clock().boot().plus(span);
            let version = lease.version.clone();
            self.note(&shown.unit, Looked { version, desk, again });
        }
        Ok(())
    }

    async fn glance(&self, desk: &Desk) -> Result<Glance> {
        use leasehold_protocol::queue::{Claim, claim};
        let Some(seen) = desk.look().await? else { return Ok(Glance::Take) };
        Ok(match claim(&seen, &desk.judge(&seen)) {
            Claim::Take(_) => Glance::Take,
            Claim::Later(at) => Glance::In(at.since(seen.now)),
            // A process of this machine can end at any time.
            Claim::Held(left) if self.by_name => Glance::In(left.min(Duration::from_secs(1))),
            Claim::Held(left) => Glance::In(left),
        })
    }

    /// Brings scheduled tasks that are due to the others. Says when the next one is.
    async fn promote(&mut self, now: Option<StoreTime>) -> Result<Outlook> {
        let boot = self.queue.store().env().clock().boot();
        let now = now.or(self.queue.store().backend().reading().map(|read| read.store));
        let Some(now) = now else { return Ok(Outlook::default()) };
        let due = |next: Option<StoreTime>| Outlook {
            busy: false,
            due: next.map(|next| next.since(now).max(Duration::from_millis(5))),
        };
        if let Some((next, read)) = self.scheduled
            && boot.since(read) < SCHEDULED
            && next.is_none_or(|next| next > now)
        {
            return Ok(due(next));
        }
        let super::sweep::Promoted { ids, next, more } = self.queue.promote_due(now).await?;
        self.candidates.extend(ids.into_iter().map(|id| Candidate::Free(Unit::Task(id))));
        // As long as there may be more that are due, nobody relies on what was read.
        self.scheduled = (!more).then_some((next, boot));
        Ok(match more {
            true => Outlook { busy: true, due: Some(Duration::ZERO) },
            false => due(next),
        })
    }
}

enum Glance {
    Take,
    In(Duration),
}

/// What listings show of a task or bundle.
#[derive(Debug)]
struct Shown {
    unit: Unit,
    work: bool,
    lease: Option<Entry>,
}

#[derive(Debug, Default)]
struct Seen {
    units: Vec<Shown>,
    /// Where in `units` each is.
    places: HashMap<Unit, usize>,
    now: Option<StoreTime>,
    /// How many objects have names that are no task's.
    unknown: u64,
}

impl Seen {
    fn add(&mut self, queue: &Queue, page: Page) {
        self.now = page.now.or(self.now);
        for entry in page.entries {
            let Some((unit, part)) = queue.keys().parse_part(entry.key.as_str()) else {
                self.unknown += 1;
                continue;
            };
            // The two keys of a task follow each other, on two pages perhaps, where the store lists in
            // order. Where it does not, a task whose lease came elsewhere must not look free for ever.
            let at = match self.places.get(&unit) {
                Some(at) => *at,
                None => {
                    self.places.insert(unit.clone(), self.units.len());
                    self.units.push(Shown { unit, work: false, lease: None });
                    self.units.len() - 1
                }
            };
            match part {
                Part::Work => self.units[at].work = true,
                Part::Lease => self.units[at].lease = Some(entry),
            }
        }
    }
}
