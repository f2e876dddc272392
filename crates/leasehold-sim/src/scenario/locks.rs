//! Locks, and files that they guard.

use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use leasehold::lock::{Guard, Lock, LockSettings};
use leasehold::scratchpad::Scratchpad;

use super::{Ctx, spawn};
use crate::rng::Rng;
use crate::world::{Life, NodeId, World};

/// Everybody who believes to hold a lock.
#[derive(Debug, Clone, Default)]
pub struct Registry(Arc<Mutex<Vec<Holder>>>);

#[derive(Debug, Clone)]
struct Holder {
    lock: usize,
    life: Life,
    name: String,
    token: u64,
    guard: Weak<Guard>,
}

impl Registry {
    /// Somebody got a lock: nobody else may believe to have it, and no token may come twice.
    fn acquired(&self, ctx: &Ctx, lock: usize, guard: &Arc<Guard>) {
        self.alone(ctx, lock, guard);
        let token = guard.token();
        let holders = self.all();
        // Whoever was robbed by force may hear of its own acquisition after that.
        let key = format!("locks/lock-{lock}.lock");
        let robbed = ctx.world.state().check.leases.was_robbed(&key, token);
        let trusted = !guard.trusted_for().is_zero() && !robbed;
        for other in holders.iter().filter(|other| other.lock == lock && other.life != ctx.life) {
            if trusted && token <= other.token {
                let (name, before) = (&other.name, other.token);
                ctx.hold(|_| Err(format!("lock {lock}: token {token} after {name} had {before}")));
            }
        }
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(Holder {
            lock,
            life: ctx.life,
            name: ctx.name.clone(),
            token,
            guard: Arc::downgrade(guard),
        });
    }

    fn all(&self) -> Vec<Holder> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whoever may go on is the only one who may.
    fn alone(&self, ctx: &Ctx, lock: usize, guard: &Guard) {
        if guard.trusted_for().is_zero() {
            return;
        }
        // Whoever is robbed by force finds out at its next renewal, and believes to hold it until then.
        let robbed = |token: u64| {
            ctx.world.state().check.leases.was_robbed(&format!("locks/lock-{lock}.lock"), token)
        };
        if robbed(guard.token()) {
            return;
        }
        for other in self.all() {
            let Some(theirs) = other.guard.upgrade() else { continue };
            let lives = ctx.world.state().lives(other.life);
            if other.lock != lock || other.life == ctx.life || !lives || robbed(other.token) {
                continue;
            }
            // Asked outside of the world's lock: it reads a clock.
            if !theirs.trusted_for().is_zero() && theirs.token() != guard.token() {
                let (name, us) = (&other.name, &ctx.name);
                ctx.hold(|_| Err(format!("lock {lock} has two holders: {name} and {us}")));
            }
        }
    }
}

/// A few locks, and as many files.
#[derive(Debug, Clone)]
pub struct Locks {
    settings: LockSettings,
    count: usize,
    ops: u64,
    registry: Registry,
}

impl Locks {
    /// Small ones, so that much happens to each.
    pub fn set_up(rng: &mut Rng) -> Self {
        let ttl = *rng.pick(&[6, 10, 10, 20]);
        let settings = LockSettings {
            timeout: Duration::from_secs(rng.between(1, 40)),
            heartbeat: Duration::from_secs(ttl / 3),
            ttl: Duration::from_secs(ttl),
            attempts: 10,
            retry_delay: Duration::from_millis(200),
        };
        Self { settings, count: 2, ops: rng.between(4, 12), registry: Registry::default() }
    }

    /// Where the locks' records are.
    pub fn keys(&self) -> Vec<String> {
        (0..self.count).map(|n| format!("locks/lock-{n}.lock")).collect()
    }

    fn lock(&self, ctx: &Ctx, n: usize) -> leasehold::Result<Lock> {
        Lock::named(&ctx.store, &format!("lock-{n}"), ctx.name.clone(), self.settings.clone())
    }

    /// Nodes that use them.
    pub fn spawn(&self, world: &World, rng: &mut Rng, nodes: usize) -> Vec<NodeId> {
        let node = |n: usize| {
            let locks = self.clone();
            let role = Arc::new(move |ctx: Ctx| -> futures::future::BoxFuture<'static, ()> {
                let locks = locks.clone();
                Box::pin(async move { locks.live(ctx).await })
            });
            spawn(world, rng, &format!("locker-{n}"), role)
        };
        (0..nodes).map(node).collect()
    }

    async fn live(self, mut ctx: Ctx) {
        for _ in 0..self.ops {
            ctx.label("");
            let pause = ctx.rng.skewed_millis(1, 15_000);
            ctx.sleep(pause).await;
            if ctx.is_over() {
                return;
            }
            let n = ctx.rng.below(self.count as u64) as usize;
            let done = match ctx.rng.below(20) {
                0..=9 => self.hold(&mut ctx, n, false).await,
                10 => self.hold(&mut ctx, n, true).await,
                11..=16 => self.write(&mut ctx, n).await,
                17..=18 => self.ask(&ctx, n).await,
                _ => self.look(&ctx, n).await,
            };
            if let Err(error) = done {
                ctx.expected("lock", &error);
            }
        }
    }

    async fn hold(&self, ctx: &mut Ctx, n: usize, force: bool) -> leasehold::Result<()> {
        let lock = self.lock(ctx, n)?;
        let guard = match force {
            true => {
                ctx.label("force");
                let forced = lock.force().await;
                ctx.label("");
                forced?
            }
            false => match ctx.rng.chance(0.4) {
                true => match lock.try_acquire().await? {
                    Ok(guard) => guard,
                    Err(_) => return Ok(()),
                },
                false => lock.acquire().await?,
            },
        };
        let guard = Arc::new(guard);
        ctx.note(|| format!("holds lock {n} with token {}", guard.token()));
        self.registry.acquired(ctx, n, &guard);
        let yields = ctx.rng.chance(0.5);
        for _ in 0..ctx.rng.between(0, 6) {
            let pause = ctx.rng.skewed_millis(1, 8000);
            ctx.sleep(pause).await;
            if guard.check().is_err() {
                ctx.note(|| format!("has lost lock {n}"));
                self.lost_for_a_reason(ctx, n, guard.token());
                return Ok(());
            }
            self.registry.alone(ctx, n, &guard);
            if yields && guard.lease().ask.is_some() {
                break;
            }
        }
        match ctx.rng.chance(0.8) {
            true => {
                ctx.note(|| format!("releases lock {n}"));
                let Some(guard) = Arc::into_inner(guard) else { return Ok(()) };
                guard.release().await
            }
            false => {
                ctx.note(|| format!("drops lock {n}"));
                drop(guard);
                Ok(())
            }
        }
    }

    /// Where nothing goes wrong, nobody gives up what is its own (FIELD.md row 25).
    fn lost_for_a_reason(&self, ctx: &Ctx, n: usize, token: u64) {
        let ttl = self.settings.ttl;
        ctx.hold(|state| {
            if !state.faults.answers_all() {
                return Ok(());
            }
            let Ok(key) = leasehold::Key::new(format!("locks/lock-{n}.lock")) else {
                return Ok(());
            };
            let Some(there) = state.objects.get(&key) else { return Ok(()) };
            let fresh = state.store_time().since(there.written) < ttl / 2;
            let lease = leasehold::protocol::format::lease::Lease::parse(&there.body);
            match lease.is_ok_and(|lease| lease.token == Some(token)) && fresh {
                true => Err(format!("lock {n} was given up, and nobody had taken it")),
                false => Ok(()),
            }
        });
    }

    /// Reads a number, thinks, and writes the next, under the file's lock.
    async fn write(&self, ctx: &mut Ctx, n: usize) -> leasehold::Result<()> {
        let pad =
            Scratchpad::on(&ctx.store, ctx.name.clone())?.with_settings(self.settings.clone());
        let (mut locked, bytes) = pad.lock_and_read(&format!("pad/{n}")).await?;
        let before = bytes.as_ref().map(|bytes| String::from_utf8_lossy(bytes).into_owned());
        let counter: u64 = before
            .as_deref()
            .and_then(|text| text.split_once(' '))
            .and_then(|(counter, _)| counter.parse().ok())
            .unwrap_or(0);
        let think = ctx.rng.skewed_millis(1, 12_000);
        ctx.sleep(think).await;
        let text = format!("{} {}", counter + 1, locked.token());
        match locked.write_bytes(text.clone()).await {
            Ok(()) => ctx.note(|| format!("wrote {text:?} to file {n}")),
            Err(error) => ctx.note(|| format!("could not write {text:?}: {error}")),
        }
        locked.release().await
    }

    async fn ask(&self, ctx: &Ctx, n: usize) -> leasehold::Result<()> {
        self.lock(ctx, n)?.ask().await.map(drop)
    }

    async fn look(&self, ctx: &Ctx, n: usize) -> leasehold::Result<()> {
        let lock = self.lock(ctx, n)?;
        lock.info().await?;
        lock.clean().await.map(drop)
    }

    /// Once trouble is over, whatever was left behind can be taken within its ttl.
    pub async fn finish(&self, world: &World, ctx: &Ctx) -> Result<(), String> {
        let patience = self.settings.ttl * 3 + Duration::from_secs(60);
        for n in 0..self.count {
            let lock = self.lock(ctx, n).map_err(|error| error.to_string())?;
            let guard = lock.acquire_timeout(patience).await;
            let guard = guard.map_err(|error| format!("lock {n} is stuck: {error}"))?;
            let guard = Arc::new(guard);
            self.registry.acquired(ctx, n, &guard);
            let guard = Arc::into_inner(guard).ok_or("a guard is shared")?;
            guard.release().await.map_err(|error| format!("lock {n}: {error}"))?;
        }
        let _ = world;
        Ok(())
    }
}
