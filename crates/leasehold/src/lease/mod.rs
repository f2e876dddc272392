//! One lease protocol for everything: locks, tasks, shards and elections all use it.
//!
//! The decisions are [`leasehold_protocol::lease`]'s; here they are carried out. [`Desk`] tries to
//! get a lease and waits for it; a [`Tenure`] is a lease that is held, renewed in the background
//! until it is released, dropped or lost.
//!
//! Requests on a bucket: a free lease is one PUT; a released one a GET and a PUT, or one PUT where
//! this desk saw the release; a renewal is one PUT and so is a release. A desk that does not know
//! yet whether there is a record finds out by a PUT that may be refused.

mod nursery;
mod pass;
mod tenure;
mod wait;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use leasehold_protocol::format::lease::{Ask, Dialect, Lease, State};
use leasehold_protocol::key::Key;
use leasehold_protocol::lease::{self, Asking, Holder, Judgement, Observer, Refused, Seen, Why};
use leasehold_protocol::mutant::{self, Mutant};
use leasehold_protocol::settle::Proof;

use crate::env::BootTime;
use crate::store::{Durability, Kind, Put, Store, Unknown, Write};
use crate::{Error, ErrorKind, Result, Version, When, host};

pub(crate) use nursery::Nursery;
pub(crate) use pass::Passes;
pub use tenure::Tenure;
pub(crate) use wait::{Awaited, Waiting};

/// How long the record of a released lease stays where releasing does not remove it.
const TOMBSTONE: Duration = Duration::from_secs(86_400);

/// How a lease is kept.
#[derive(Debug, Clone)]
pub struct Terms {
    /// Without a renewal for this long, it is anybody's.
    pub ttl: Duration,
    /// How often it is renewed: each is a PUT.
    pub heartbeat: Duration,
    /// How its record is written.
    pub dialect: Dialect,
}

impl Terms {
    /// These terms, or why they cannot work.
    pub fn checked(self) -> Result<Self> {
        if self.heartbeat.is_zero() || self.heartbeat > self.ttl / 2 {
            return Err(Error::invalid(format!(
                "a lease must be renewed at least twice within its ttl: heartbeat {} and ttl {} do \
                 not go together",
                crate::settings::format_duration(self.heartbeat),
                crate::settings::format_duration(self.ttl),
            )));
        }
        Ok(self)
    }

    /// For how long a lease is young: most are released sooner, so until then nothing is started
    /// for it alone, neither renewals nor, in a directory, a watch for what others write into it.
    ///
    /// Locks are asked for, and whoever asks waits. What comes to the holder of a task can wait.
    fn young(&self) -> Duration {
        match self.dialect {
            Dialect::Lock => YOUNG,
            Dialect::Task => (self.heartbeat / 10).clamp(YOUNG, Duration::from_secs(1)),
        }
    }
}

/// The least time that a lease is young.
const YOUNG: Duration = Duration::from_millis(50);

/// A lease as a person or a program may want to see it.
#[derive(Debug, Clone)]
pub struct Info {
    /// Its record, or why it has none that can be read.
    pub lease: Result<Lease, String>,
    /// Whether somebody holds it.
    pub judgement: Judgement,
}

/// What came of an attempt.
#[derive(Debug)]
pub enum Attempt {
    /// It is ours.
    Acquired(Tenure),
    /// Somebody else's.
    Held(Box<HeldBy>),
}

/// Who holds a lease that we wanted.
#[derive(Debug, Clone)]
pub struct HeldBy {
    /// Its name, if its record can be read.
    pub holder: String,
    /// Its token.
    pub token: Option<u64>,
    /// It cannot become stale sooner than this.
    pub left: Duration,
    /// Who asks for it already.
    pub ask: Option<Ask>,
    /// Whether that is this very process, which must not be kept from going on.
    pub(crate) is_us: bool,
    /// Whether its record is older than the lease lasts. In a directory that alone is no proof that it is stale:
    /// this host's clock may have been set.
    pub(crate) is_aged: bool,
}

impl HeldBy {
    /// Whether that is this very process: an earlier attempt whose answer was lost.
    pub fn is_us(&self) -> bool {
        self.is_us
    }
}

/// What asking a holder came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Asked {
    /// The request stands in the record.
    Now,
    /// Somebody's request stood there already.
    Before(Ask),
    /// Nobody holds the lease.
    NobodyHolds,
}

/// Where one lease is asked for, under one name.
#[derive(Debug, Clone)]
pub struct Desk(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    store: Store,
    key: Key,
    name: String,
    terms: Terms,
    memory: Mutex<Memory>,
    keeper: Mutex<tenure::Keeper>,
}

/// What a desk remembers from one request to the next.
#[derive(Debug, Default)]
struct Memory {
    /// A record that we know to be free: our own release.
    free: Option<Seen>,
    /// Whether a record was ever seen.
    exists: bool,
    /// When somebody else was last seen to hold it.
    contended: Option<BootTime>,
    /// When we got it after others had their turn.
    turn: Option<BootTime>,
    /// The version that was seen last, and since when.
    watched: Option<(Version, BootTime)>,
}

impl Desk {
    /// For the lease at `key`, to be held under `name`.
    pub fn new(store: &Store, key: Key, name: impl Into<String>, terms: Terms) -> Result<Self> {
        let (store, name, terms) = (store.clone(), name.into(), terms.checked()?);
        Ok(Self(Arc::new(Shared {
            store,
            key,
            name,
            terms,
            memory: Mutex::default(),
            keeper: Mutex::default(),
        })))
    }

    /// The key.
    pub fn key(&self) -> &Key {
        &self.0.key
    }

    /// The name under which it is held.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// How it is kept.
    pub fn terms(&self) -> &Terms {
        &self.0.terms
    }

    /// Tries once. Does not wait for anybody, but does go on as long as the record keeps changing.
    pub async fn attempt(&self) -> Result<Attempt> {
        let now = self.0.store.env().clock().boot();
        let (known, exists, give_way) = {
            let mut memory = self.memory();
            let exists = memory.exists && !self.release_removes();
            let within =
                |since: Option<BootTime>, span| since.is_some_and(|at| now.since(at) < span);
            let give_way = self.0.store.kind() == Kind::Directory
                && within(memory.contended, wait::LATELY)
                && !within(memory.turn, wait::TURN);
            (memory.free.take(), exists, give_way)
        };
        // Others wait for it, and whoever has just released it is always the first to try again:
        // let them have a turn. One of them will have taken it.
        if give_way {
            wait::give_way(&self.0.store);
            return self.attempt_again().await;
        }
        match known {
            // Where a record once was there still is one: creating it would only be refused.
            None if exists => self.attempt_again().await,
            known => self.acquire(known, false).await,
        }
    }

    /// The same after somebody was seen to hold it: looks first, which costs a tenth of trying.
    pub async fn attempt_again(&self) -> Result<Attempt> {
        let seen = self.look().await?;
        if let Some(seen) = &seen
            && let Judgement::Held { left } = self.judge(seen)
        {
            self.note_contention();
            return Ok(self.held_by(seen, left));
        }
        self.memory().turn = Some(self.0.store.env().clock().boot());
        self.acquire(seen, false).await
    }

    /// Takes the lease even from a living holder, which finds out at its next renewal.
    pub async fn force(&self) -> Result<Attempt> {
        self.acquire(None, true).await
    }

    /// Takes the lease if there is none, without looking first: one PUT. `None` if there is one.
    /// `fill` adds to the record what the caller keeps there.
    pub(crate) async fn create(&self, fill: impl Fn(&mut Lease)) -> Result<Option<Tenure>> {
        Ok(self.write_claim(None, &fill).await?.ok())
    }

    /// Takes the lease in the state that was seen, and judged free, and in no other: one PUT.
    pub(crate) async fn take(
        &self,
        seen: &Seen,
        fill: impl Fn(&mut Lease),
    ) -> Result<Option<Tenure>> {
        Ok(self.write_claim(Some(seen), &fill).await?.ok())
    }

    async fn acquire(&self, mut known: Option<Seen>, force: bool) -> Result<Attempt> {
        let Shared { key, .. } = &*self.0;
        let mut last = None;
        // Every round but the last was lost to somebody who acquired or released in between.
        for _ in 0..32 {
            let (tried, sent) = match self.write_claim(known.as_ref(), &|_| {}).await? {
                Ok(tenure) => return Ok(Attempt::Acquired(tenure)),
                Err(tried) => *tried,
            };
            let Some(seen) = self.look().await? else {
                known = None;
                continue;
            };
            // Our own write may have landed after all, and somebody may have asked for it since.
            if let Refused::StillOurs(lease, version) = lease::after_refusal(&tried, Some(&seen)) {
                let held = tenure::Held { lease: *lease, version, sent };
                return Ok(Attempt::Acquired(Tenure::new(self.clone(), held)));
            }
            match self.judge(&seen) {
                Judgement::Held { left } if !force => {
                    self.note_contention();
                    return Ok(self.held_by(&seen, left));
                }
                Judgement::Free(why) if why != Why::Released => {
                    tracing::info!(%key, ?why, "taking over a stale lease");
                    known = Some(seen);
                }
                _ => known = Some(seen),
            }
            last.clone_from(&known);
        }
        // Others keep taking and releasing it: as good as held, by whoever was seen last.
        match &last {
            Some(seen) => {
                self.note_contention();
                Ok(self.held_by(seen, Duration::ZERO))
            }
            None => Err(Error::unavailable("others keep taking and releasing this lease").at(key)),
        }
    }

    /// Writes the record of an acquisition over the one that is known, or where there is none. Gives
    /// back what was tried, and when, where somebody else was faster.
    async fn write_claim(
        &self,
        known: Option<&Seen>,
        fill: &impl Fn(&mut Lease),
    ) -> Result<Result<Tenure, Box<(Lease, BootTime)>>> {
        let Shared { store, key, name, terms, .. } = &*self.0;
        let sent = store.env().clock().boot();
        let place = store.env().host().here(sent);
        let holder = Holder { name, ttl: terms.ttl, place: place.as_ref() };
        let now = store.now().await?;
        let backend = store.backend();
        let nonce = store.env().nonce();
        let mut change = lease::acquire(known, &holder, now, 0, nonce);
        fill(&mut change.lease);
        if mutant::is(Mutant::GetThenPut) {
            if known.is_none() && store.get(key).await?.is_some() {
                return Ok(Err(Box::new((change.lease, sent))));
            }
            change.when = When::Any;
        }
        if mutant::is(Mutant::DeleteThenClaim) && known.is_some() {
            let _ = store.delete(key).await?;
            change.when = When::Absent;
        }
        backend.reserve(change.lease.token.unwrap_or(0)).await?;
        let landing = Landing { desk: self, lease: &change.lease, settled: false };
        let put = self.write(&change.lease, change.when, nonce).await;
        landing.settle(&put);
        self.claimed(change.lease, put?, sent).await
    }

    /// What a claim with this record came to, which began to be written then.
    async fn claimed(
        &self,
        lease: Lease,
        put: Put,
        sent: BootTime,
    ) -> Result<Result<Tenure, Box<(Lease, BootTime)>>> {
        let Shared { store, key, .. } = &*self.0;
        match put {
            Put::Stored(version) => {
                let tenure = Tenure::new(self.clone(), tenure::Held { lease, version, sent });
                // Now that it is ours, everybody who held it before has released it, and their
                // tokens are known. Asked before, the answer could be out of date.
                tenure.raise_above(store.backend().floor(key).await?).await?;
                Ok(Ok(tenure))
            }
            Put::Unknown(unknown @ (Unknown::NoAnswer(_) | Unknown::NotFlushed(_))) => {
                Err(unknown.into_error())
            }
            Put::Refused | Put::Contended | Put::Unknown(Unknown::Overtaken(_)) => {
                Ok(Err(Box::new((lease, sent))))
            }
        }
    }

    /// What is there now.
    pub async fn info(&self) -> Result<Option<Info>> {
        let Some(seen) = self.look().await? else { return Ok(None) };
        let judgement = self.judge(&seen);
        Ok(Some(Info { lease: seen.record.map_err(|error| error.to_string()), judgement }))
    }

    /// Asks whoever holds the lease to let go of it.
    pub async fn ask(&self) -> Result<Asked> {
        let Shared { store, key, name, .. } = &*self.0;
        for _ in 0..32 {
            let Some(seen) = self.look().await? else { return Ok(Asked::NobodyHolds) };
            if let Judgement::Free(_) = self.judge(&seen) {
                return Ok(Asked::NobodyHolds);
            }
            let nonce = store.env().nonce();
            match lease::ask(&seen, name, store.now().await?, nonce) {
                Asking::NobodyToAsk => return Ok(Asked::NobodyHolds),
                Asking::Pending(ask) => return Ok(Asked::Before(ask)),
                Asking::Write(change) => {
                    match self.write(&change.lease, change.when.clone(), nonce).await? {
                        Put::Stored(_) => return Ok(Asked::Now),
                        Put::Refused | Put::Contended | Put::Unknown(Unknown::Overtaken(_)) => {}
                        Put::Unknown(unknown) => return Err(unknown.into_error()),
                    }
                }
            }
        }
        Err(Error::unavailable("the holder keeps renewing: try again").at(key))
    }

    /// Removes the record if nobody holds the lease, and says whether it did.
    pub async fn clean(&self) -> Result<bool> {
        let Some(seen) = self.look().await? else { return Ok(false) };
        if let Judgement::Held { .. } = self.judge(&seen) {
            return Ok(false);
        }
        // Where a release leaves a record, it is what keeps tokens rising: it stays for a day.
        if !self.release_removes() && seen.now.since(seen.modified) < TOMBSTONE {
            return Ok(false);
        }
        let token = seen.record.as_ref().ok().and_then(|lease| lease.token).unwrap_or(0);
        self.remove(&seen.version, token).await
    }

    /// Removes the record in this version, remembering its token.
    async fn remove(&self, version: &Version, token: u64) -> Result<bool> {
        use crate::store::Delete;
        let Shared { store, key, .. } = &*self.0;
        match store.retire(key, version, token).await? {
            Delete::Deleted => Ok(true),
            Delete::Refused | Delete::Contended => Ok(false),
            Delete::Unknown(unknown) => Err(unknown.into_error()),
        }
    }

    /// Releases a lease of ours that was found.
    async fn give_back(&self, lease: Lease, version: Version) -> Result<()> {
        if self.release_removes() {
            self.remove(&version, lease.token.unwrap_or(0)).await?;
            return Ok(());
        }
        let (now, nonce) = (self.0.store.now().await?, self.0.store.env().nonce());
        let released = lease::release(&lease, now, nonce);
        match self.write(&released, When::Matches(version), nonce).await? {
            Put::Unknown(unknown) => Err(unknown.into_error()),
            // Refused: somebody has asked for it or taken it, and will find it stale.
            Put::Stored(_) | Put::Refused | Put::Contended => Ok(()),
        }
    }

    pub(crate) async fn look(&self) -> Result<Option<Seen>> {
        let Shared { store, key, .. } = &*self.0;
        let Some(object) = store.get(key).await? else {
            let mut memory = self.memory();
            (memory.watched, memory.exists) = (None, false);
            return Ok(None);
        };
        // Damaged leases are healed, but what was never one is somebody's: `Cargo.lock`, say.
        let record = Lease::parse(&object.body);
        let start = object.body.iter().find(|byte| !byte.is_ascii_whitespace() && **byte != 0);
        // Where only leases stand, that is damage too.
        let names_are_chosen = self.0.terms.dialect == Dialect::Lock;
        if names_are_chosen && record.is_err() && start.is_some_and(|byte| *byte != b'{') {
            let message = "is not a lock but something else: choose another name";
            return Err(Error::new(ErrorKind::Data, message).at(key));
        }
        let mut seen = Seen {
            record,
            version: object.meta.version,
            modified: object.meta.modified,
            now: object.meta.now,
        };
        if mutant::is(Mutant::NaiveClock) {
            seen.now = store.env().clock().wall();
        }
        let now = store.env().clock().boot();
        let mut memory = self.memory();
        memory.exists = true;
        if memory.watched.as_ref().is_none_or(|(version, _)| *version != seen.version) {
            memory.watched = Some((seen.version.clone(), now));
        }
        drop(memory);
        Ok(Some(seen))
    }

    fn held_by(&self, seen: &Seen, left: Duration) -> Attempt {
        let record = seen.record.as_ref().ok();
        let lasts = record.and_then(|lease| lease.ttl).unwrap_or(self.0.terms.ttl);
        Attempt::Held(Box::new(HeldBy {
            holder: record.map_or_else(
                || "somebody whose record cannot be read".to_owned(),
                |lease| lease.holder.clone(),
            ),
            token: record.and_then(|lease| lease.token),
            left,
            ask: record.and_then(|lease| lease.ask.clone()),
            is_us: record.and_then(|lease| lease.place.as_ref()).is_some_and(|place| {
                // The first processes of two containers have the same number.
                host::here(BootTime::from_boot(Duration::ZERO)).is_some_and(|here| {
                    place.process == here.process
                        && place.boot_id == here.boot_id
                        && place.pid_ns == here.pid_ns
                })
            }),
            is_aged: seen.now.since(seen.modified) > lasts.saturating_add(lease::SLACK),
        }))
    }

    pub(crate) fn judge(&self, seen: &Seen) -> Judgement {
        let Shared { store, terms, .. } = &*self.0;
        let now = store.env().clock().boot();
        let watched = match &self.memory().watched {
            Some((version, since)) if *version == seen.version => now.since(*since),
            _ => Duration::ZERO,
        };
        let here = store.env().host().here(now);
        // Whether a holder lives costs a look at /proc. Of what is released nobody has to ask.
        let held = seen.record.as_ref().ok().filter(|lease| lease.state == State::Held);
        let there = held.and_then(|lease| lease.place.as_ref());
        let holder = match (there, &here) {
            (Some(there), Some(here)) => host::liveness(store.env().host(), there, here),
            _ => None,
        };
        let store_is_here = store.kind() == Kind::Directory;
        let observer =
            Observer { ttl: terms.ttl, watched, here: here.as_ref(), store_is_here, holder };
        lease::judge(seen, &observer)
    }

    async fn write(&self, lease: &Lease, when: When, nonce: crate::Nonce) -> Result<Put> {
        self.write_as(lease, when, nonce, Durability::Volatile).await
    }

    async fn write_as(
        &self,
        lease: &Lease,
        when: When,
        nonce: crate::Nonce,
        durability: Durability,
    ) -> Result<Put> {
        let Shared { store, key, terms, .. } = &*self.0;
        let body = Bytes::from(lease.to_bytes(terms.dialect));
        let write = Write::when(when, Proof::Nonce(nonce)).durability(durability);
        store.put(key, body, write).await
    }

    /// Whether a release removes the record: lock files in a directory go, as other clients expect.
    fn release_removes(&self) -> bool {
        self.0.store.kind() == Kind::Directory && self.0.terms.dialect == Dialect::Lock
    }

    fn note_contention(&self) {
        let now = self.0.store.env().clock().boot();
        self.memory().contended = Some(now);
    }

    fn keeper(&self) -> MutexGuard<'_, tenure::Keeper> {
        self.0.keeper.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.0.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lost(&self) -> Error {
        Error::new(ErrorKind::Lost, "the lease is no longer ours").at(&self.0.key)
    }
}

/// A record that is being written. If nobody waits for the answer any more, or none comes, it may
/// stand there all the same, with nobody to renew or release it: then it is looked for and released,
/// so that others need not wait for its ttl.
struct Landing<'a> {
    desk: &'a Desk,
    lease: &'a Lease,
    settled: bool,
}

impl Landing<'_> {
    /// It is known what became of it, or else not.
    fn settle(mut self, put: &Result<Put>) {
        // An error says that nothing was written.
        self.settled = !matches!(put, Ok(Put::Unknown(Unknown::NoAnswer(_))));
    }
}

impl Drop for Landing<'_> {
    fn drop(&mut self) {
        if self.settled {
            return;
        }
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let (desk, lease) = (self.desk.clone(), self.lease.clone());
        runtime.spawn(async move {
            // A request that nobody waits for may still be on its way.
            for pause in [0, 1, 5, 20] {
                desk.0.store.env().clock().sleep(Duration::from_secs(pause)).await;
                let Ok(seen) = desk.look().await else { continue };
                match lease::after_refusal(&lease, seen.as_ref()) {
                    Refused::StillOurs(lease, version) => {
                        if let Err(error) = desk.give_back(*lease, version).await {
                            tracing::debug!(%error, "a lease that nobody waits for stays");
                            continue;
                        }
                        return;
                    }
                    // Somebody else's, and so ours is over; but what is not there may yet come.
                    Refused::Lost if seen.is_some() => return,
                    Refused::Lost => {}
                }
            }
        });
    }
}
