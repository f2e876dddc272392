//! Compilers: many of them, anywhere, at once.
//!
//! A pass looks which shards have work and compacts them in random order, so that compilers do not
//! clump on the same ones. Shards that others are at are left to them.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use leasehold_protocol::backoff::full_jitter;
use leasehold_protocol::compile::Trigger;
use leasehold_protocol::shard::Shard;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::compact::{Compaction, Done, Outcome, Work};
use super::convoy::{Place, most_waiting};
use super::{Index, IndexSettings};
use crate::env::BootTime;
use crate::store::{Detail, Kind, List};
use crate::{Error, ErrorKind, Result, host};

/// How many flat files are taken in at once.
const AT_ONCE: usize = 50_000;

/// How many objects that were merged are left to be deleted together, all of this process' compilers
/// together. Their names are in memory, about 128 bytes each.
const UNSWEPT: usize = 50_000;

/// Of how many shards: their leases are held until then, so that nobody else can have them.
const UNSWEPT_SHARDS: usize = 64;

/// For how long, whatever the slowest compaction is at.
const UNSWEPT_FOR: Duration = Duration::from_secs(10);

impl IndexSettings {
    /// How many names of merged objects are kept: no more than one compaction may have.
    pub(super) fn most_unswept(&self) -> usize {
        self.most_objects.min(UNSWEPT)
    }
}

/// How to compact.
#[derive(Debug, Clone)]
pub struct CompactOptions {
    /// Take the shard's advisory lease first. Without it the result is the same, and work may be done
    /// twice.
    pub lock: bool,
    /// Read and write every row anew, also where the inbox is empty: after a change of the schema, or
    /// for shards that another tool wrote.
    pub rewrite: bool,
    /// Forget deletions from before this time, in microseconds since 1970. See [`Index::purge`].
    pub purge_before: Option<i64>,
    /// Leave a shard alone until this much is waiting for it.
    pub trigger: Trigger,
    /// How many shards to work on at a time.
    pub parallel: usize,
    /// Under which name.
    pub worker: String,
}

impl Default for CompactOptions {
    fn default() -> Self {
        Self {
            lock: true,
            rewrite: false,
            purge_before: None,
            trigger: Trigger::default(),
            parallel: 32,
            worker: format!("{}:{}", host::host_name(), std::process::id()),
        }
    }
}

/// How long a compiler that runs for ever pauses.
#[derive(Debug, Clone)]
pub struct CompilerSettings {
    /// How to compact.
    pub options: CompactOptions,
    /// The pause after a pass that found nothing to do: each pass costs a LIST, and one more for the
    /// flat inbox.
    pub pause: Duration,
}

impl Default for CompilerSettings {
    fn default() -> Self {
        Self { options: CompactOptions::default(), pause: Duration::from_secs(10) }
    }
}

/// What a pass did.
#[derive(Debug, Default)]
pub struct Pass {
    /// Shard by shard.
    pub shards: Vec<Compaction>,
    /// What went wrong, shard by shard. The others went on.
    pub failed: Vec<(Shard, Error)>,
}

impl Pass {
    /// How many shards ended like this.
    pub fn count(&self, outcome: impl Fn(&Outcome) -> bool) -> usize {
        self.shards.iter().filter(|done| outcome(&done.outcome)).count()
    }

    /// How many records were taken in.
    pub fn records(&self) -> u64 {
        let done =
            |done: &&Compaction| matches!(done.outcome, Outcome::Published | Outcome::Unchanged);
        self.shards.iter().filter(done).map(|done| done.counts.inbox).sum()
    }

    /// The error of the first shard that failed, if any did.
    pub fn into_result(mut self) -> Result<Self> {
        match self.failed.is_empty() {
            true => Ok(self),
            false => Err(self.failed.swap_remove(0).1),
        }
    }
}

impl Index {
    /// Takes in the inboxes of all shards that nobody else is at. An error is that of the first shard
    /// that failed; the others are done.
    pub async fn compact(&self) -> Result<Pass> {
        self.compact_with(&CompactOptions::default()).await?.into_result()
    }

    /// Takes in the inbox of one shard. LISTs: one per 1,000 objects in it, one for the flat inbox.
    pub async fn compact_one(&self, shard: Shard, options: &CompactOptions) -> Result<Compaction> {
        self.refresh().await?;
        let mut flat = Vec::new();
        let mut listing = self.flat_files()?;
        while let Some(mut files) = listing.next(AT_ONCE).await? {
            flat.append(&mut files.remove(&shard).unwrap_or_default());
        }
        let work = Work { flat, whole: true, ..Work::default() };
        let done = self.compact_fully(shard, work, options).await?;
        self.name_shards([shard].into()).await;
        Ok(done.compaction)
    }

    /// One pass over all shards that have work.
    pub async fn compact_with(&self, options: &CompactOptions) -> Result<Pass> {
        self.pass(options, &CancellationToken::new()).await
    }

    /// Forgets deletions older than `age`, and says how many. A record of the same key with an older
    /// `updated_at` that arrives after that would be back: hence at least two hours, unless `force`.
    pub async fn purge(
        &self,
        age: Duration,
        force: bool,
        options: &CompactOptions,
    ) -> Result<Pass> {
        if age < Duration::from_secs(7200) && !force {
            return Err(Error::invalid(
                "deletions younger than 2 hours are not purged: a record that is still on its way \
                 would come back (force it if nobody is writing)",
            ));
        }
        let before = self.now().await?.minus(age).as_micros();
        let options = CompactOptions { trigger: Trigger::default(), ..options.clone() };
        // First what waits anywhere: records in the wrong place go where they are seen.
        let first = CompactOptions { purge_before: None, rewrite: false, ..options.clone() };
        let mut pass = self.compact_with(&first).await?;
        let options = CompactOptions { purge_before: Some(before), ..options };
        let Pass { shards, failed } = self.compact_with(&options).await?;
        pass.shards.extend(shards);
        pass.failed.extend(failed);
        Ok(pass)
    }

    async fn pass(&self, options: &CompactOptions, stop: &CancellationToken) -> Result<Pass> {
        self.refresh().await?;
        // What fits into memory is worked through from one listing. It came before the shards'
        // versions, but what is in the objects is read after them: that is what counts.
        let most = match self.store().kind() {
            Kind::Directory => self.0.settings.most_objects.min(20_000),
            _ => self.0.settings.most_objects,
        };
        let mut backlog = self.backlog(most).await?;
        let detail = if options.trigger.is_always() { Detail::Keys } else { Detail::Stat };
        let mut flat_files = self.flat_files_in(detail)?;
        let mut flat = flat_files.next(AT_ONCE).await?.unwrap_or_default();
        let whole = flat_files.is_done();
        let mut shards: BTreeSet<Shard> = backlog.keys().chain(flat.keys()).copied().collect();
        if options.rewrite || options.purge_before.is_some() {
            shards.extend(self.existing_shards().await?);
        }
        let mut pass = Pass::default();
        loop {
            let mut order: Vec<Shard> = shards.into_iter().collect();
            self.shuffle(&mut order);
            let mut work = Vec::with_capacity(order.len());
            for shard in order {
                let listed = backlog.remove(&shard).unwrap_or_default();
                let (more, bytes, pending) = (listed.more, listed.bytes, listed.known());
                let flat = flat.remove(&shard).unwrap_or_default();
                let waiting = flat_files.waiting(shard);
                work.push((
                    shard,
                    Work { pending, bytes, more, flat, waiting, whole, ..Work::default() },
                ));
            }
            self.work_through(work, options, stop, &mut pass).await?;
            // The names of a million flat files are not for memory: the rest comes in turn.
            match flat_files.next(AT_ONCE).await? {
                Some(more) if !stop.is_cancelled() => flat = more,
                _ => break,
            }
            shards = flat.keys().copied().collect();
        }
        // Not only those that were made: who made them may have died before naming them.
        let written = pass.shards.iter().filter(|done| done.outcome == Outcome::Published);
        self.name_shards(written.map(|done| done.shard).collect()).await;
        Ok(pass)
    }

    /// Compacts these shards, several at a time: while one is flushed to disk, others are merged, and
    /// they share their flushes.
    async fn work_through(
        &self,
        work: Vec<(Shard, Work)>,
        options: &CompactOptions,
        stop: &CancellationToken,
        pass: &mut Pass,
    ) -> Result<()> {
        let mut work = work.into_iter().peekable();
        let mut running = JoinSet::new();
        // So many are at work, and others may wait to be published.
        let turns = Arc::new(Semaphore::new(options.parallel.clamp(1, Semaphore::MAX_PERMITS)));
        let many = options.parallel.max(1).saturating_add(most_waiting());
        let few = many.min(options.parallel.max(1).saturating_add(UNSWEPT_SHARDS));
        // Those that will wait to be swept as well are fewer: nobody else can have their shards until then.
        let most = |work: &(Shard, Work)| if work.1.is_swept_later() { few } else { many };
        // What is published, and not yet swept, and since when.
        let (mut unswept, mut names): (Vec<Done>, usize) = (Vec::new(), 0);
        let mut since = None;
        let mut interrupted = None;
        loop {
            // Half of the names there is room for, so that those under way have some.
            let may_begin = names <= self.0.settings.most_unswept() / 2
                && unswept.len() < UNSWEPT_SHARDS
                && interrupted.is_none()
                && !stop.is_cancelled();
            while may_begin
                && work.peek().is_some_and(|next| running.len() + unswept.len() < most(next))
                && let Ok(turn) = turns.clone().try_acquire_owned()
                && let Some((shard, mut work)) = work.next()
            {
                let (index, options) = (self.clone(), options.clone());
                work.place = self.place(&options);
                work.later = work.place.is_some();
                let mut turn = Some(turn);
                if let Some(place) = &work.place {
                    turn.take().into_iter().for_each(|turn| place.hold(turn));
                }
                running.spawn(async move {
                    let _turn = turn;
                    let done = match index.fires(shard, &work, &options.trigger).await {
                        Ok(true) => index.compact_fully(shard, work, &options).await,
                        Ok(false) => return (shard, None),
                        Err(error) => Err(error),
                    };
                    (shard, Some(done))
                });
            }
            let more = may_begin
                && work.peek().is_some_and(|next| running.len() + unswept.len() < most(next));
            let joined = tokio::select! {
                biased;
                () = self.overdue(since) => None,
                joined = running.join_next() => joined,
                // Somebody has departed.
                _ = turns.acquire(), if more && !running.is_empty() => continue,
            };
            match joined {
                None if unswept.is_empty() => return interrupted.map_or(Ok(()), Err),
                // If possible while nothing is published: a flush would write again and again what
                // deleting changes.
                None => {
                    self.sweep_together(&mut unswept).await;
                    (names, since) = (0, None);
                    pass.shards.extend(unswept.drain(..).map(|done| done.compaction));
                }
                Some(Ok((_, Some(Ok(done))))) => match &done.unswept {
                    Some(left) => {
                        names += left.keys.len();
                        since = since.or_else(|| Some(self.store().env().clock().boot()));
                        unswept.push(done);
                    }
                    None => pass.shards.push(done.compaction),
                },
                Some(Ok((shard, Some(Err(error))))) => {
                    tracing::warn!(%shard, %error, "a shard could not be compacted");
                    pass.failed.push((shard, error));
                }
                Some(Ok((_, None))) => {}
                Some(Err(error)) => {
                    // The others are ended as usual: what they published is swept.
                    let message = "a compaction was interrupted";
                    let error = Error::new(ErrorKind::Internal, message).caused_by(error);
                    interrupted.get_or_insert(error);
                }
            }
        }
    }

    /// Returns once what was published then has to be swept.
    async fn overdue(&self, since: Option<BootTime>) {
        let Some(since) = since else { return std::future::pending().await };
        let clock = self.store().env().clock();
        let left = UNSWEPT_FOR.saturating_sub(clock.boot().since(since));
        if !left.is_zero() {
            clock.sleep(left).await;
        }
    }

    /// Compacts until the inbox is taken in, in as many rounds as its size needs.
    async fn compact_fully(
        &self,
        shard: Shard,
        mut work: Work,
        options: &CompactOptions,
    ) -> Result<Done> {
        let most = self.0.settings.most_objects.max(1);
        let mut all: Option<Compaction> = None;
        loop {
            // Flat files are taken in by parts as well.
            let later = work.flat.split_off(work.flat.len().min(most));
            work.whole &= later.is_empty();
            let whole = work.whole;
            // So are objects, from one listing as far as it goes.
            let next = work.pending.as_mut().map(|keys| keys.split_off(keys.len().min(most)));
            let next = next.filter(|keys| !keys.is_empty());
            // Each part has its share of the bytes: nobody remembers how many each object has.
            let now = work.pending.as_ref().map_or(0, Vec::len) as u64;
            let objects = now + next.as_ref().map_or(0, Vec::len) as u64;
            let bytes = work.bytes.checked_div(objects).map_or(0, |each| each.saturating_mul(now));
            let rest = work.bytes.saturating_sub(bytes);
            work.bytes = bytes;
            let cut = work.more;
            work.more |= next.is_some();
            // Of objects that have yet to be listed, it shows then whether there are more.
            work.later &= later.is_empty() && !(work.more && work.pending.is_some());
            let together = work.place.is_some();
            let Done { compaction: mut done, unswept } =
                self.compact_shard(shard, work, options).await?;
            let more = done.more || !later.is_empty();
            // Files that could not be deleted are there, though not in the next round.
            let whole = whole && done.left == 0;
            work = Work {
                more: cut && next.is_some(),
                bytes: if next.is_some() { rest } else { 0 },
                pending: next,
                flat: later,
                whole,
                place: self.place(options).filter(|_| together),
                later: together,
                ..Work::default()
            };
            if let Some(before) = &all {
                done.counts.inbox += before.counts.inbox;
                done.counts.inserted += before.counts.inserted;
                done.counts.replaced += before.counts.replaced;
                done.counts.older += before.counts.older;
                done.counts.quarantined += before.counts.quarantined;
                done.counts.purged += before.counts.purged;
                done.counts.moved += before.counts.moved;
                done.counts.rows_before = before.counts.rows_before;
                done.swept += before.swept;
                done.left += before.left;
                done.bytes += before.bytes;
                done.created |= before.created;
                if done.outcome == Outcome::Idle || done.outcome == Outcome::Unchanged {
                    done.counts.rows_after = done.counts.rows_after.max(before.counts.rows_after);
                    done.outcome = before.outcome.clone();
                }
            }
            let goes_on = matches!(done.outcome, Outcome::Published | Outcome::Unchanged);
            // What could not be deleted would be taken in again and again.
            if !more || !goes_on || done.swept == all.as_ref().map_or(0, |before| before.swept) {
                return Ok(Done { compaction: done, unswept });
            }
            all = Some(done);
        }
    }

    /// Where flushes are worth sharing.
    fn place(&self, options: &CompactOptions) -> Option<Place> {
        let directory = self.store().kind() == Kind::Directory && options.parallel > 1;
        directory.then(|| self.0.convoy.join(self.0.settings.compiler_bytes))
    }

    /// Whether it is worth it to compact a shard. Asks for sizes and times only if it matters.
    async fn fires(&self, shard: Shard, work: &Work, trigger: &Trigger) -> Result<bool> {
        if trigger.is_always() {
            return Ok(true);
        }
        let list = List::prefix(self.0.layout.inbox_of(shard))?.detail(Detail::Stat).unordered();
        let mut listing = self.store().list(list);
        let (mut count, mut bytes) = (work.flat.len() as u64, work.waiting.bytes);
        let mut age = match work.waiting.since {
            Some(since) => self.store().now().await?.since(since),
            None => Duration::ZERO,
        };
        while let Some(page) = listing.next_page().await? {
            let now = match page.now {
                Some(now) => now,
                None => self.store().now().await?,
            };
            for entry in &page.entries {
                count += 1;
                bytes += entry.size.unwrap_or(0);
                age = age.max(entry.modified.map_or(Duration::ZERO, |at| now.since(at)));
            }
            if trigger.fires(count, bytes, age) {
                return Ok(true);
            }
        }
        Ok(trigger.fires(count, bytes, age))
    }

    pub(super) async fn existing_shards(&self) -> Result<BTreeSet<Shard>> {
        self.shards_with(&["usv"]).await
    }

    /// The shards of which there is a file of one of these sorts.
    pub(super) async fn shards_with(&self, sorts: &[&str]) -> Result<BTreeSet<Shard>> {
        let mut shards = BTreeSet::new();
        let width = self.package().width;
        let mut listing = self.store().list(List::prefix(self.0.layout.shards())?);
        while let Some(page) = listing.next_page().await? {
            for entry in &page.entries {
                if let Some((shard, sort)) = self.0.layout.parse_shard(entry.key.as_str())
                    && sorts.contains(&sort)
                    && shard.width() == width
                {
                    shards.insert(shard);
                }
            }
        }
        Ok(shards)
    }

    /// Names new shards in the description, for readers that take no pattern. Best effort: the next
    /// pass that makes a shard does it again.
    async fn name_shards(&self, created: BTreeSet<Shard>) {
        let known: BTreeSet<Shard> = self.package().shards.iter().copied().collect();
        if created.is_subset(&known) || self.package().width.shards() > 4096 {
            return;
        }
        let named = async {
            let existing: Vec<Shard> = self.existing_shards().await?.into_iter().collect();
            self.change(|package| {
                let news = package.shards != existing;
                package.shards.clone_from(&existing);
                Ok(news)
            })
            .await
        };
        if let Err(error) = named.await {
            tracing::debug!(%error, "new shards could not be named in datapackage.json");
        }
    }

    fn shuffle<T>(&self, items: &mut [T]) {
        for at in (1..items.len()).rev() {
            let other = self.store().env().random() % (at as u64 + 1);
            items.swap(at, other as usize);
        }
    }
}

/// Compacts for ever.
#[derive(Debug, Clone)]
pub struct Compiler {
    index: Index,
    settings: CompilerSettings,
}

impl Compiler {
    /// For this index.
    pub fn new(index: &Index, settings: CompilerSettings) -> Self {
        Self { index: index.clone(), settings }
    }

    /// Makes passes until it is told to stop, and tells about each that did something. A store that
    /// does not answer is waited for; only errors that waiting cannot mend end it.
    pub async fn run(&self, stop: CancellationToken, mut tell: impl FnMut(&Pass)) -> Result<()> {
        let clock_of = || self.index.store().env().clone();
        let mut failures = 0;
        while !stop.is_cancelled() {
            let pause = match self.index.pass(&self.settings.options, &stop).await {
                Ok(pass) => {
                    failures = 0;
                    let busy = pass.count(|outcome| *outcome == Outcome::Published) > 0;
                    if busy || !pass.failed.is_empty() || !pass.shards.is_empty() {
                        tell(&pass);
                    }
                    let random = clock_of().random();
                    // Spread, so that compilers that started together do not stay together.
                    let part = full_jitter(0, self.settings.pause, self.settings.pause, random);
                    self.settings.pause / 2 + part / 2
                }
                Err(error) if error.kind() == ErrorKind::Unavailable => {
                    tracing::warn!(%error, "the store does not answer; trying again");
                    failures += 1;
                    let cap = Duration::from_secs(60);
                    full_jitter(failures, Duration::from_secs(1), cap, clock_of().random())
                }
                Err(error) => return Err(error),
            };
            let sleep = clock_of().clock().sleep(pause);
            tokio::select! {
                biased;
                () = sleep => {}
                () = stop.cancelled() => {}
            }
        }
        Ok(())
    }
}
