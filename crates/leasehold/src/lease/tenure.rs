//! A lease that is held.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use leasehold_protocol::format::lease::{Ask, Lease, Process};
use leasehold_protocol::lease::{self, Refused, Seen};
use leasehold_protocol::mutant::{self, Mutant};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::Desk;
use crate::env::BootTime;
use crate::store::{Delete, Durability, Get, Kind, Put, Unknown, Watch};
use crate::{ErrorKind, Key, Result, Version, When};

/// What we know of our lease.
#[derive(Debug, Clone)]
pub(super) struct Held {
    pub lease: Lease,
    pub version: Version,
    /// When the last successful renewal began to be sent.
    pub sent: BootTime,
}

/// A lease that is held, and renewed until it is released, dropped or lost.
///
/// Dropping it releases it in the background as well as that can be done; the ttl is what others
/// can count on.
#[derive(Debug)]
pub struct Tenure {
    core: Arc<Core>,
    /// Where a dropped lease is released.
    runtime: Handle,
}

/// Renews whatever is held at a desk. One task per desk, kept for the next tenure: starting one for
/// each would cost a good part of what a lock in a directory does.
#[derive(Debug, Default)]
pub(super) struct Keeper {
    core: Weak<Core>,
    /// Ended also when its runtime did, before us.
    task: Option<JoinHandle<()>>,
    /// In whose nursery the desk is, until it gets a task.
    nursery: Option<tokio::runtime::Id>,
}

#[derive(Debug)]
struct Core {
    desk: Desk,
    /// Held while a renewal or the release is under way: they must not cross.
    writing: tokio::sync::Mutex<()>,
    held: Mutex<Held>,
    /// When it was acquired.
    since: BootTime,
    /// When its record was last known to be ours.
    seen: Mutex<BootTime>,
    lost: CancellationToken,
    /// Set once it is released: nothing is written after that.
    released: AtomicBool,
    asked: watch::Sender<Option<Ask>>,
    on_renewal: Mutex<Option<OnRenewal>>,
}

/// What a renewal changes in the record.
struct OnRenewal(Box<dyn Fn(&mut Lease) + Send + Sync>);

impl std::fmt::Debug for OnRenewal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("OnRenewal")
    }
}

impl Tenure {
    pub(super) fn new(desk: Desk, held: Held) -> Self {
        let asked = watch::Sender::new(held.lease.ask.clone());
        let core = Arc::new(Core {
            desk,
            writing: tokio::sync::Mutex::new(()),
            since: held.sent,
            seen: Mutex::new(held.sent),
            held: Mutex::new(held),
            lost: CancellationToken::new(),
            released: AtomicBool::new(false),
            asked,
            on_renewal: Mutex::default(),
        });
        let runtime = Handle::current();
        let mut keeper = core.desk.keeper();
        keeper.core = Arc::downgrade(&core);
        if keeper.task.as_ref().is_none_or(JoinHandle::is_finished)
            && keeper.nursery != Some(runtime.id())
        {
            match core.desk.0.store.nursery().take_in(&core.desk, &runtime) {
                true => keeper.nursery = Some(runtime.id()),
                false => {
                    keeper.task = Some(runtime.spawn(keep(Arc::downgrade(&core.desk.0))));
                }
            }
        }
        drop(keeper);
        Self { core, runtime }
    }

    /// The fence: higher than that of every earlier holder. Hand it to whatever you write to, and
    /// let that refuse lower ones.
    pub fn token(&self) -> u64 {
        self.core.held().lease.token.unwrap_or(0)
    }

    /// Cancelled when the lease is lost: stop then.
    pub fn lost(&self) -> CancellationToken {
        self.core.lost.clone()
    }

    /// Whether the lease can still be trusted at this moment. To be asked before each guarded
    /// action: a process that was stopped, or a machine that slept, learns it here first.
    pub fn check(&self) -> Result<()> {
        match self.core.is_trusted() {
            true => Ok(()),
            false => {
                self.core.lost.cancel();
                Err(self.core.desk.lost())
            }
        }
    }

    /// The same by the record itself, unless it was read or written a moment ago: somebody may have
    /// taken the lease by force. One GET.
    pub async fn confirm(&self) -> Result<()> {
        let core = &self.core;
        let age = core.desk.0.store.env().clock().boot().since(*core.seen());
        if age >= FRESH {
            core.look_after_change().await;
        }
        self.check()
    }

    /// For how long the lease can be trusted from now on, if it is not renewed: zero once it is
    /// lost. For what cannot ask before each action, and must be stopped in time instead.
    pub fn trusted_for(&self) -> Duration {
        self.core.trusted_for()
    }

    /// Completes when somebody asks for the lease.
    pub async fn asked(&self) -> Ask {
        let mut asked = self.core.asked.subscribe();
        match asked.wait_for(Option::is_some).await.map(|ask| ask.clone()) {
            Ok(Some(ask)) => ask,
            _ => std::future::pending().await,
        }
    }

    /// The record as it was last written or read.
    pub fn lease(&self) -> Lease {
        self.core.held().lease.clone()
    }

    /// The version of the record as it was last written or read.
    pub(crate) fn version(&self) -> Version {
        self.core.held().version.clone()
    }

    /// Notes which process works under the lease, at once: whoever looks must not take it over
    /// while that lives.
    pub async fn set_child(&self, child: Option<Process>) -> Result<()> {
        self.core
            .rewrite(|lease| {
                if let Some(place) = &mut lease.place {
                    place.child.clone_from(&child);
                }
            })
            .await
    }

    /// Lets go. An error with kind `Lost` says that it was not ours any more.
    pub async fn release(self) -> Result<()> {
        self.core.release().await
    }

    /// Renews the lease, changing what the caller keeps in its record.
    pub(crate) async fn rewrite(&self, change: impl Fn(&mut Lease)) -> Result<()> {
        self.core.rewrite(change).await
    }

    /// Has every renewal from now on change the record like this.
    pub(crate) fn on_renewal(&self, change: impl Fn(&mut Lease) + Send + Sync + 'static) {
        *self.core.on_renewal.lock().unwrap_or_else(PoisonError::into_inner) =
            Some(OnRenewal(Box::new(change)));
    }

    /// Lets go, leaving a record with this change, wherever the store is.
    pub(crate) async fn release_with(
        &self,
        durability: Durability,
        change: impl Fn(&mut Lease),
    ) -> Result<()> {
        self.core.leave(durability, change).await
    }

    /// Where its background work is done.
    pub(crate) fn runtime(&self) -> &Handle {
        &self.runtime
    }

    /// Removes the lease: what it guarded is done. Unconditionally where the store cannot do
    /// better, so only once nobody needs it any more. Says whether it was still ours.
    pub(crate) async fn remove(&self) -> Result<bool> {
        self.core.remove().await
    }

    /// Removes what the lease guarded, in this version, and then the lease, in one go. Says whether
    /// the first was there; the second is left to [`Tenure::remove`] if it has changed. `None`, and
    /// nothing is done, where one after the other is as good.
    pub(crate) async fn remove_with(&self, work: &Key, version: &Version) -> Result<Option<bool>> {
        self.core.remove_with(work, version).await
    }

    /// Gives the lease a token above this one, should its own not be.
    pub(super) async fn raise_above(&self, floor: u64) -> Result<()> {
        if self.token() > floor {
            return Ok(());
        }
        let token = floor.saturating_add(1);
        self.core.desk.0.store.backend().reserve(token).await?;
        // Boxed: rare, and every acquisition would carry it along.
        Box::pin(self.core.rewrite(|lease| lease.token = Some(token))).await
    }
}

impl Drop for Tenure {
    fn drop(&mut self) {
        if self.core.is_over() {
            return;
        }
        let core = self.core.clone();
        self.runtime.spawn(async move {
            if let Err(error) = core.release().await {
                tracing::debug!(%error, "a dropped lease could not be released");
            }
        });
    }
}

/// A timer stops while the machine sleeps, and the boot clock does not. So nobody sleeps for long.
const SLICE: Duration = Duration::from_secs(1);

/// For how long a look at the record is as good as a new one.
const FRESH: Duration = Duration::from_millis(5);

/// Starts the task of a desk in the nursery, if its lease is not young any more. Says whether it is
/// to stay there: it is held, but not for long yet.
pub(super) fn grow_up(desk: &Arc<super::Shared>, now: BootTime) -> bool {
    let mut keeper = desk.keeper.lock().unwrap_or_else(PoisonError::into_inner);
    let core = keeper.core.upgrade().filter(|core| !core.is_over());
    if core.as_ref().is_some_and(|core| now.since(core.since) < desk.terms.young()) {
        return true;
    }
    keeper.nursery = None;
    if core.is_some() && keeper.task.as_ref().is_none_or(JoinHandle::is_finished) {
        keeper.task = Some(tokio::spawn(keep(Arc::downgrade(desk))));
    }
    false
}

/// Renews what is held at a desk, until nothing has been for a while.
async fn keep(desk: Weak<super::Shared>) {
    let mut idle_since = None;
    let mut not_before = BootTime::from_boot(Duration::ZERO);
    // The record of this lease is watched.
    let mut watch: Option<(Weak<Core>, Watch)> = None;
    let mut changed = false;
    loop {
        let (core, env, heartbeat, young, told) = {
            let Some(desk) = desk.upgrade() else { return };
            let env = desk.store.env().clone();
            let mut keeper = desk.keeper.lock().unwrap_or_else(PoisonError::into_inner);
            let core = keeper.core.upgrade().filter(|core| !core.is_over());
            let now = env.clock().boot();
            match (&core, idle_since) {
                (Some(_), _) => idle_since = None,
                (None, None) => idle_since = Some(now),
                (None, Some(since)) if now.since(since) >= desk.terms.heartbeat => {
                    keeper.task = None;
                    return;
                }
                (None, Some(_)) => {}
            }
            drop(keeper);
            let terms = &desk.terms;
            let told = desk.store.kind() == Kind::Directory;
            (core, env, terms.heartbeat, terms.young(), told)
        };
        let now = env.clock().boot();
        let mut pause = heartbeat;
        match core {
            Some(core) => {
                let same = |weak: &Weak<Core>| std::ptr::eq(weak.as_ptr(), Arc::as_ptr(&core));
                watch = watch.filter(|(of, _)| same(of));
                if told && watch.is_none() && now.since(core.since) >= young {
                    let desk = &core.desk.0;
                    let made = desk.store.watch(desk.key.as_str());
                    watch = Some((Arc::downgrade(&core), made.unwrap_or_else(|_| Watch::never())));
                    // Whatever happened before.
                    changed = true;
                }
                if std::mem::take(&mut changed) {
                    core.look_after_change().await;
                }
                let due = core.due_in();
                if !core.is_trusted() || (due.is_zero() && now >= not_before) {
                    not_before = now.plus(core.beat().await);
                }
                pause = core.due_in().max(not_before.since(env.clock().boot()));
            }
            None => watch = None,
        }
        if told && watch.is_none() {
            pause = pause.min(young);
        }
        let sleep = env.clock().sleep(pause.min(SLICE).max(Duration::from_millis(1)));
        match &mut watch {
            Some((_, watch)) => tokio::select! {
                biased;
                () = sleep => {}
                () = watch.changed() => changed = true,
            },
            None => sleep.await,
        }
    }
}

impl Core {
    /// Released or lost: there is nothing to renew.
    fn is_over(&self) -> bool {
        self.released.load(SeqCst) || self.lost.is_cancelled()
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn seen(&self) -> MutexGuard<'_, BootTime> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_trusted(&self) -> bool {
        !self.trusted_for().is_zero()
    }

    fn trusted_for(&self) -> Duration {
        if self.is_over() {
            return Duration::ZERO;
        }
        let ttl = self.desk.0.terms.ttl;
        let until = self.held().sent.plus(ttl.saturating_sub(lease::margin(ttl)));
        until.since(self.desk.0.store.env().clock().boot())
    }

    /// When to renew it next, counted from now; zero if it is due.
    fn due_in(&self) -> Duration {
        let heartbeat = self.desk.0.terms.heartbeat;
        let age = self.desk.0.store.env().clock().boot().since(self.held().sent);
        heartbeat.saturating_sub(age)
    }

    /// A renewal that is due. Says how long to wait before another try.
    async fn beat(&self) -> Duration {
        let heartbeat = self.desk.0.terms.heartbeat;
        if !self.is_trusted() {
            if !self.is_over() {
                tracing::warn!(key = %self.desk.0.key, "the lease was not renewed in time");
                self.lost.cancel();
            }
            return Duration::ZERO;
        }
        match self.renew().await {
            Ok(()) => Duration::ZERO,
            Err(error) if error.kind() == ErrorKind::Lost => Duration::ZERO,
            Err(error) => {
                tracing::warn!(key = %self.desk.0.key, %error, "the lease could not be renewed");
                // The ttl goes on running: sooner than the next heartbeat.
                heartbeat / 4
            }
        }
    }

    /// One renewal. `Lost` if it is not ours any more.
    async fn renew(&self) -> Result<()> {
        self.rewrite(|lease| self.note(lease)).await
    }

    /// Changes the record as its holder has asked for.
    fn note(&self, lease: &mut Lease) {
        let change = self.on_renewal.lock().unwrap_or_else(PoisonError::into_inner);
        change.iter().for_each(|change| change.0(lease));
    }

    /// A renewal that changes something in the record.
    async fn rewrite(&self, change: impl Fn(&mut Lease)) -> Result<()> {
        let _writing = self.writing.lock().await;
        let store = &self.desk.0.store;
        while !self.released.load(SeqCst) {
            let sent = store.env().clock().boot();
            let Held { lease: held, version, .. } = self.held().clone();
            let nonce = store.env().nonce();
            let boot_time = Some(sent.since(BootTime::from_boot(Duration::ZERO)));
            let mut renewed = lease::renew(&held, store.now().await?, boot_time, nonce);
            change(&mut renewed);
            let when = match mutant::is(Mutant::ZombieHeartbeat) {
                true => When::Any,
                false => When::Matches(version),
            };
            match self.desk.write(&renewed, when, nonce).await? {
                Put::Stored(version) => {
                    *self.held() = Held { lease: renewed, version, sent };
                    *self.seen() = sent;
                    break;
                }
                Put::Unknown(unknown @ (Unknown::NoAnswer(_) | Unknown::NotFlushed(_))) => {
                    return Err(unknown.into_error());
                }
                Put::Refused | Put::Contended | Put::Unknown(Unknown::Overtaken(_)) => {
                    self.read_again(&held).await?;
                }
            }
        }
        Ok(())
    }

    /// After a refusal: somebody changed the record. Still ours, or lost?
    async fn read_again(&self, held: &Lease) -> Result<()> {
        let there: Option<Seen> = self.desk.look().await?;
        match lease::after_refusal(held, there.as_ref()) {
            Refused::StillOurs(lease, version) => {
                if lease.ask.is_some() {
                    self.asked.send_replace(lease.ask.clone());
                }
                let mut ours = self.held();
                ours.lease = *lease;
                ours.version = version;
                Ok(())
            }
            Refused::Lost => {
                self.lost.cancel();
                Err(self.desk.lost())
            }
        }
    }

    /// Somebody changed the record: to ask for the lease, or to take it. We ourselves, as often as
    /// not, and then it is what we know.
    async fn look_after_change(&self) {
        let _writing = self.writing.lock().await;
        if self.is_over() {
            return;
        }
        let Held { lease, version, .. } = self.held().clone();
        let store = &self.desk.0.store;
        let now = store.env().clock().boot();
        if let Ok(Get::Unchanged) = store.get_if_changed(&self.desk.0.key, &version).await {
            *self.seen() = now;
            return;
        }
        // What cannot be read now is found out by the next renewal.
        if let Err(error) = self.read_again(&lease).await {
            tracing::debug!(%error, "the record of a lease was changed");
        }
    }

    async fn release(&self) -> Result<()> {
        if !self.desk.release_removes() {
            return self.leave(Durability::Volatile, |lease| self.note(lease)).await;
        }
        let _writing = self.writing.lock().await;
        loop {
            if self.lost.is_cancelled() {
                return Err(self.desk.lost());
            }
            if self.remove_once().await? {
                return Ok(());
            }
            let held = self.held().lease.clone();
            self.read_again(&held).await?;
        }
    }

    /// Removes the record in the version that we know, and says whether it did.
    async fn remove_once(&self) -> Result<bool> {
        let (version, token) = {
            let held = self.held();
            (held.version.clone(), held.lease.token.unwrap_or(0))
        };
        let removed = self.desk.remove(&version, token).await?;
        if removed {
            self.released.store(true, SeqCst);
        }
        Ok(removed)
    }

    /// Removes the record whatever it takes, as long as it is ours.
    async fn remove(&self) -> Result<bool> {
        let _writing = self.writing.lock().await;
        let store = &self.desk.0.store;
        loop {
            if self.released.load(SeqCst) {
                return Ok(false);
            }
            if self.remove_once().await? {
                return Ok(true);
            }
            let held = self.held().lease.clone();
            // Boxed: as a rule it is as we left it.
            match Box::pin(self.read_again(&held)).await {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::Lost => return Ok(false),
                Err(error) => return Err(error),
            }
            if !store.deletes_conditionally().await? {
                let _ = store.delete(&self.desk.0.key).await?;
                self.released.store(true, SeqCst);
                return Ok(true);
            }
        }
    }

    async fn remove_with(&self, work: &Key, version: &Version) -> Result<Option<bool>> {
        let _writing = self.writing.lock().await;
        if self.released.load(SeqCst) {
            return Ok(None);
        }
        let Held { lease, version: ours, .. } = self.held().clone();
        let Desk(desk) = &self.desk;
        let token = lease.token.unwrap_or(0);
        let removed = desk.store.finish((work, version), (&desk.key, &ours), token).await?;
        let Some((work, lease)) = removed else { return Ok(None) };
        if let Delete::Deleted = lease {
            self.released.store(true, SeqCst);
        }
        Ok(Some(matches!(work, Delete::Deleted)))
    }

    /// Leaves a record that says that nobody holds the lease.
    async fn leave(&self, durability: Durability, change: impl Fn(&mut Lease)) -> Result<()> {
        let _writing = self.writing.lock().await;
        let store = &self.desk.0.store;
        loop {
            if self.lost.is_cancelled() && !mutant::is(Mutant::OutlivedLock) {
                return Err(self.desk.lost());
            }
            let Held { lease: held, version, .. } = self.held().clone();
            let nonce = store.env().nonce();
            let now = store.now().await?;
            let mut released = lease::release(&held, now, nonce);
            change(&mut released);
            let when = match mutant::is(Mutant::OutlivedLock) {
                true => When::Any,
                false => When::Matches(version),
            };
            match self.desk.write_as(&released, when, nonce, durability).await? {
                Put::Stored(version) => {
                    // The next acquisition at this desk needs not read it.
                    let seen = Seen { record: Ok(released), version, modified: now, now };
                    self.desk.memory().free = Some(seen);
                    self.released.store(true, SeqCst);
                    return Ok(());
                }
                Put::Unknown(unknown @ (Unknown::NoAnswer(_) | Unknown::NotFlushed(_))) => {
                    return Err(unknown.into_error());
                }
                Put::Refused | Put::Contended | Put::Unknown(Unknown::Overtaken(_)) => {}
            }
            self.read_again(&held).await?;
        }
    }
}
