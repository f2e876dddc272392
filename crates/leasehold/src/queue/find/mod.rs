//! Finding something to do.
//!
//! On a bucket a LIST page chooses candidates: what has no lease is free, and what has one that is
//! older than the queue's ttl is probably stale. Only when there is neither does a worker look into
//! younger leases, each version once, for what is due to be tried again. In a directory names are
//! read instead, which is much cheaper than files, and whether a task is free shows when it is
//! claimed.
//!
//! A listing that is minutes old does no harm: it only decides what is *tried*.
//!
//! As long as something is free, nobody would come to what is due to be tried again, was left by the dead,
//! or is scheduled. So every now and then a worker [tends](Finder::tend) to those first.

mod board;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use leasehold_protocol::cas::Version;
use leasehold_protocol::layout::queue::{Part, Unit};
use leasehold_protocol::lease::SLACK;
use leasehold_protocol::queue::{Standing, order};
use leasehold_protocol::time::StoreTime;
use ulid::Ulid;

pub(super) use self::board::{Attempt, Board};
use super::Queue;
use super::shunned::Shunned;
use crate::env::BootTime;
use crate::lease::Desk;
use crate::store::{Detail, Entry, Kind, List, Page};
use crate::{ErrorKind, Result};

/// How many pages of leased tasks to go through for something to do.
const PAGES: usize = 10;
/// How many young leases to look into at a time, on a bucket.
const LOOKS: usize = 50;
/// The same where there is something free.
const TENDED: usize = 10;
/// How many stale leases to try per listing: others see the same ones.
const STALE: usize = 4;
/// The same where nothing is free: whoever would only wait has the time.
const STALE_ALONE: usize = 64;
/// After how many barren lists to look further than the first page that has something.
const BARREN: u32 = 2;
/// When to look again at what could not be taken, but may be soon.
const SOON: Duration = Duration::from_secs(1);
/// When to look again at what cannot be read.
const UNREADABLE: Duration = super::shunned::SHUN;
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

/// Lists what one worker may try in one queue.
#[derive(Debug)]
pub(super) struct Finder {
    queue: Queue,
    board: Arc<Board>,
    /// What the listing under way has found so far. Nobody sees it before that has ended: what others
    /// took meanwhile would look as if there had been nothing.
    found: Vec<Candidate>,
    /// Whether names are cheaper to read than keys: in a directory.
    by_name: bool,
    /// How many lists, one after the other, had something to try of which nothing came.
    barren: u32,
    /// Whether it had nothing to try.
    dry: bool,
    /// Which parts the queue had, and when that was.
    overview: Option<(Overview, BootTime)>,
    /// What could not be claimed.
    pub shunned: Arc<Shunned>,
    /// Where a listing that found nothing in many pages goes on, by prefix.
    resume: HashMap<String, String>,
    /// Where to list next, where there is more than a page.
    depth: Depth,
    /// Which part of the queue to list next.
    turn: u64,
    /// Whether the next list is to be searched for what is due, whatever is free.
    tending: bool,
    /// Which part comes first then.
    tend_turn: u64,
    /// When the earliest scheduled task is due, as far as we know, and when that was read.
    scheduled: Option<(Option<StoreTime>, BootTime)>,
    /// For how long that is good: a small directory is read for nothing.
    scheduled_for: Duration,
}

#[derive(Debug)]
struct Looked {
    version: Option<Version>,
    /// Where it was asked for.
    desk: Option<Desk>,
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

    /// The parts that are in this one alone.
    fn without(self, other: Self) -> Self {
        Self { pending: self.pending && !other.pending, bundles: self.bundles && !other.bundles }
    }
}

/// How long it is relied on.
const OVERVIEW: Duration = Duration::from_secs(10);

/// How long a list of scheduled tasks is good for.
const SCHEDULED: Duration = Duration::from_secs(30);

impl Finder {
    pub fn new(board: &Arc<Board>) -> Self {
        let (board, queue) = (board.clone(), board.queue().clone());
        Self {
            board,
            found: Vec::new(),
            by_name: queue.store().kind() == Kind::Directory,
            barren: 0,
            dry: false,
            overview: None,
            shunned: Arc::default(),
            resume: HashMap::new(),
            depth: Depth::default(),
            turn: queue.store().env().random(),
            tending: false,
            tend_turn: queue.store().env().random(),
            scheduled: None,
            scheduled_for: SCHEDULED,
            queue,
        }
    }

    /// Lists what there is to do: the first of it is for the caller, and the rest for whoever asks.
    pub async fn refill(&mut self) -> Result<(Option<Attempt>, Outlook)> {
        let listed = self.list().await;
        // Also what a listing found before it failed.
        let found = std::mem::take(&mut self.found);
        match listed {
            Ok(outlook) => Ok((self.board.publish(found), outlook)),
            Err(error) => {
                self.board.add(found);
                Err(error)
            }
        }
    }

    async fn list(&mut self) -> Result<Outlook> {
        // Of one that nobody waited for any more.
        self.found.clear();
        self.tending = false;
        self.shunned.listing();
        let fruitful = self.board.begin();
        // Also where what was tried is remembered, and nobody got in the way.
        self.barren = if fruitful || self.dry { 0 } else { self.barren.saturating_add(1) };
        let dry = std::mem::take(&mut self.dry);
        let first = self.overview.is_none();
        if self.by_name && (fruitful || first) && self.read_names().await? {
            self.overview.get_or_insert((Overview::default(), BootTime::from_boot(Duration::ZERO)));
            return Ok(Outlook { busy: true, due: None });
        }
        let now = self.queue.store().env().clock().boot();
        // What was read to its end just now, and what it showed.
        let mut read = None;
        match self.overview {
            // What there was a moment ago is probably there still.
            Some((overview, at)) if !dry && overview.any() && now.since(at) < OVERVIEW => {
                let mut outlook = self.read_parts(overview).await?;
                if self.found.is_empty() && self.depth.from_start {
                    // It began in the middle, and nothing is as far out as that.
                    outlook = self.read_parts(overview).await?;
                }
                if !self.found.is_empty() {
                    return Ok(outlook);
                }
                read = (outlook.busy && !self.is_partial()).then_some((overview, outlook));
            }
            Some(_) => {}
            // Most of what there is to do are pending tasks. If not, there is more to see.
            None => {
                let guess = Overview { pending: true, bundles: false };
                let outlook = self.read_parts(guess).await?;
                let pending = !self.found.is_empty();
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
        if !self.found.is_empty() {
            return Ok(Outlook { busy: true, ..outlook });
        }
        // What was read a moment ago, and is being worked on, shows the same again.
        let unread = match read {
            Some((read, found)) => {
                outlook.and(found);
                overview.without(read)
            }
            None => overview,
        };
        outlook.and(self.read_parts(unread).await?);
        if !overview.any() {
            self.board.forget();
            self.resume.clear();
        }
        Ok(outlook)
    }

    /// Finds what is due and not free, and puts it before everything else. On a bucket two LISTs as a rule, and
    /// a GET for each of ten leases that are younger than a ttl and not known to be held.
    pub async fn tend(&mut self) -> Result<()> {
        self.found.clear();
        let tended = match self.by_name {
            true => self.tend_names().await,
            false => self.tend_keys().await,
        };
        self.board.put_first(std::mem::take(&mut self.found));
        tended
    }

    async fn tend_keys(&mut self) -> Result<()> {
        let promoted = self.promote(None).await.map(drop);
        let first = self.found.len();
        // From the start: what comes back is older than what is new. Where other listings go on is their affair.
        let depth = std::mem::take(&mut self.depth);
        let resume = std::mem::take(&mut self.resume);
        let turn = std::mem::replace(&mut self.turn, self.tend_turn);
        self.tending = true;
        // Where it is not known yet what there is, nobody has been waiting for long.
        let parts = self.overview.map(|(overview, _)| overview).unwrap_or_default();
        let read = self.read_parts(parts).await;
        self.tending = false;
        self.tend_turn = std::mem::replace(&mut self.turn, turn);
        (self.depth, self.resume) = (depth, resume);
        // The others are on the board already.
        let mut at = 0;
        self.found.retain(|candidate| {
            at += 1;
            at <= first || !matches!(candidate, Candidate::Free(_))
        });
        promoted.and(read.map(drop))
    }

    /// Names show no leases. But those that have one are met when they are claimed, and whether the next two
    /// thousand have one can be asked for little.
    async fn tend_names(&mut self) -> Result<()> {
        let promoted = self.promote(None).await.map(drop);
        for (n, unit) in self.board.to_tend().into_iter().enumerate() {
            // There may be many, and others have something to do on this thread.
            if n % 256 == 255 {
                tokio::task::yield_now().await;
            }
            let lease = self.queue.keys().part(&unit, Part::Lease)?;
            if !self.queue.store().backend().seems_there(&lease)
                || self.shuns(&unit, true).is_some()
            {
                continue;
            }
            let desk = self.board.desk_for(&unit)?;
            // What cannot be read is told of elsewhere.
            let span = match self.glance(&desk).await {
                Ok(Glance::Take) => {
                    self.found.push(Candidate::Leased(unit.clone(), desk.clone()));
                    SOON
                }
                Ok(Glance::In(span)) => {
                    self.board.meet(&unit);
                    span
                }
                Err(_) => UNREADABLE,
            };
            // Its lease may be another by then.
            let again = self.queue.store().env().clock().boot().plus(span.min(UNREADABLE));
            self.board.note(&unit, Looked { version: None, desk: Some(desk), again });
        }
        promoted
    }

    /// Whether a listing did not go from the start to the end.
    fn is_partial(&self) -> bool {
        self.depth.from_start || !self.resume.is_empty()
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
            if !self.found.is_empty() {
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
        self.board.pass_over(&mut units);
        units.retain(|unit| self.shuns(unit, false).is_none());
        if units.is_empty() {
            return Ok(false);
        }
        // Tens of thousands, perhaps: most differ in their first bytes, which are quick to compare.
        let mut units: Vec<(u128, Unit)> =
            units.into_iter().map(|unit| (beginning(&unit), unit)).collect();
        units.sort_unstable();
        let listing = vec![Standing::Free; units.len()];
        let order = order(&listing, self.board.alone(), self.queue.store().env().random());
        let mut units: Vec<Option<Unit>> = units.into_iter().map(|(_, unit)| Some(unit)).collect();
        let candidates = order.into_iter().filter_map(|n| units[n].take()).map(Candidate::Free);
        self.found.extend(candidates);
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
        self.board.listing();
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
        // Only several keep apart: whoever is alone finds whole pages from the start.
        if std::mem::take(&mut self.depth.from_start) || self.board.alone() == Some(true) {
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
            // Of our own claims under way the listing may not show the lease yet.
            standing.push(match self.is_free(shown) && !self.board.is_ours(&shown.unit) {
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
            match self.board.left_alone(&shown.unit, lease) {
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
            let desk = self.board.desk_for(&shown.unit)?;
            let again = self.queue.store().env().clock().boot().plus(SOON);
            let version = shown.lease.as_ref().and_then(|lease| lease.version.clone());
            self.board.note(&shown.unit, Looked { version, desk: Some(desk.clone()), again });
            self.found.push(match shown.work {
                true => Candidate::Leased(shown.unit.clone(), desk),
                false => Candidate::Orphan(shown.unit.clone(), desk),
            });
        }
        let order = order(&standing, self.board.alone(), random);
        self.found.extend(order.into_iter().map(|n| Candidate::Free(units[n].unit.clone())));
        if self.found.is_empty() || self.tending {
            self.look_into(&units, outlook).await?;
        }
        Ok(())
    }

    /// Nothing is free: what is due to be tried again, or was left by a process of this machine?
    async fn look_into(&mut self, units: &[Shown], outlook: &mut Outlook) -> Result<()> {
        let looks = match (self.by_name, self.tending) {
            (true, _) => usize::MAX,
            (false, true) => TENDED,
            (false, false) => LOOKS,
        };
        let mut made = 0;
        // Not always the same ones, where not all are looked into.
        let from = if self.tending { self.tend_turn as usize % units.len().max(1) } else { 0 };
        let units = units[from..].iter().chain(&units[..from]);
        for shown in units.filter(|shown| shown.work) {
            let Some(lease) = &shown.lease else { continue };
            // A claim of ours that is under way, and has landed.
            if self.board.is_ours(&shown.unit) {
                outlook.sooner(SOON);
                continue;
            }
            if self.shuns(&shown.unit, true).is_some() {
                continue;
            }
            if let Some(left) = self.board.left_alone(&shown.unit, lease) {
                outlook.sooner(left);
                continue;
            }
            if made >= looks {
                outlook.sooner(SOON);
                break;
            }
            made += 1;
            let desk = self.board.desk_for(&shown.unit)?;
            let span = match self.glance(&desk).await {
                Ok(Glance::Take) => {
                    self.found.push(Candidate::Leased(shown.unit.clone(), desk.clone()));
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
            self.board.note(&shown.unit, Looked { version, desk: Some(desk), again });
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
            && boot.since(read) < self.scheduled_for
            && next.is_none_or(|next| next > now)
        {
            return Ok(due(next));
        }
        let super::sweep::Promoted { ids, next, more } = self.queue.promote_due(now).await?;
        self.found.extend(ids.into_iter().map(|id| Candidate::Free(Unit::Task(id))));
        // As long as there may be more that are due, nobody relies on what was read.
        self.scheduled = (!more).then_some((next, boot));
        if self.by_name {
            // A hundredth of the time at most goes into it.
            let took = self.queue.store().env().clock().boot().since(boot);
            self.scheduled_for = took.saturating_mul(100).clamp(SOON, SCHEDULED);
        }
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

/// What units are in the order of, as far as it reaches.
fn beginning(unit: &Unit) -> u128 {
    let (Unit::Task(id) | Unit::Bundle(id, _)) = unit;
    let mut bytes = [0; 16];
    let length = id.len().min(16);
    bytes[..length].copy_from_slice(&id.as_bytes()[..length]);
    let is_bundle = matches!(unit, Unit::Bundle(..));
    (u128::from(is_bundle) << 127) | (u128::from_be_bytes(bytes) >> 1)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beginnings_are_in_order() {
        let ids = ["", "\0", "a", "a\0", "aa", "b", "é", "01M7HDV8VWZ97JFM2640XRZ68N"];
        let longer = ids.iter().map(|id| format!("01M7HDV8VWZ97JFM{id}"));
        let ids: Vec<String> = ids.iter().map(|id| (*id).to_owned()).chain(longer).collect();
        let tasks = ids.iter().cloned().map(Unit::Task);
        let units: Vec<Unit> =
            tasks.chain(ids.iter().cloned().map(|id| Unit::Bundle(id, 3))).collect();
        for one in &units {
            for other in &units {
                let quickly = (beginning(one), one).cmp(&(beginning(other), other));
                assert_eq!(quickly, one.cmp(other), "{one:?} {other:?}");
            }
        }
    }
}
