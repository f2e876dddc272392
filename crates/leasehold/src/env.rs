//! The clock, the randomness and the neighbouring processes, read here and nowhere else.
//!
//! `clippy.toml` bans the system's own everywhere else, so that tests and the simulator can put
//! their own in: one seed must decide everything.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use leasehold_protocol::cas::Nonce;
use leasehold_protocol::format::lease::{Place, Process};
use leasehold_protocol::time::StoreTime;

/// A point on this host's own clock that goes on during suspend. It says nothing about wall time
/// and means nothing on another host or after a reboot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct BootTime(Duration);

impl BootTime {
    /// The point that long after boot.
    pub const fn from_boot(since: Duration) -> Self {
        Self(since)
    }

    /// How long after `earlier` this is; zero if it is not.
    pub fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    /// The point `span` later.
    pub fn plus(self, span: Duration) -> Self {
        Self(self.0.saturating_add(span))
    }
}

/// Tells the time and waits.
pub trait Clock: Debug + Send + Sync {
    /// This host's wall clock. Only for what this host alone writes and judges.
    fn wall(&self) -> StoreTime;
    /// This host's clock since boot, suspend included.
    fn boot(&self) -> BootTime;
    /// Completes after `span`.
    fn sleep(&self, span: Duration) -> BoxFuture<'static, ()>;
    /// Returns after `span`, on this very thread: for moments that a runtime's timers are too coarse for.
    fn nap(&self, span: Duration) {
        std::thread::sleep(span);
    }
}

/// Random bytes.
pub trait Entropy: Debug + Send + Sync {
    /// Fills `bytes` with random ones.
    fn fill(&self, bytes: &mut [u8]);
}

/// Where this process runs, and which others of its host are still there.
pub trait Host: Debug + Send + Sync {
    /// Where this process runs, at this moment of its boot clock. `None` where the system does not
    /// say which boot it is in: then holders are judged by their ttl alone.
    fn here(&self, now: BootTime) -> Option<Place>;
    /// Whether there is no such process in this one's namespace.
    fn is_gone(&self, process: &Process) -> bool;
}

/// Where time and chance come from, and who the neighbours are.
#[derive(Debug, Clone)]
pub struct Env {
    clock: Arc<dyn Clock>,
    entropy: Arc<dyn Entropy>,
    host: Arc<dyn Host>,
}

impl Env {
    /// The operating system's.
    pub fn system() -> Self {
        Self::new(Arc::new(SystemClock), Arc::new(SystemEntropy))
    }

    /// These, on this host.
    pub fn new(clock: Arc<dyn Clock>, entropy: Arc<dyn Entropy>) -> Self {
        Self { clock, entropy, host: Arc::new(crate::host::System) }
    }

    /// The same on another host.
    #[must_use]
    pub fn on(self, host: Arc<dyn Host>) -> Self {
        Self { host, ..self }
    }

    /// The same with another clock.
    #[must_use]
    pub fn with_clock(self, clock: Arc<dyn Clock>) -> Self {
        Self { clock, ..self }
    }

    /// The clock.
    pub fn clock(&self) -> &dyn Clock {
        &*self.clock
    }

    /// The host.
    pub fn host(&self) -> &dyn Host {
        &*self.host
    }

    /// A fresh nonce.
    pub fn nonce(&self) -> Nonce {
        let mut bytes = [0; 16];
        self.entropy.fill(&mut bytes);
        Nonce::from_bytes(bytes)
    }

    /// 64 random bits.
    pub fn random(&self) -> u64 {
        let mut bytes = [0; 8];
        self.entropy.fill(&mut bytes);
        u64::from_ne_bytes(bytes)
    }
}

impl Default for Env {
    fn default() -> Self {
        Self::system()
    }
}

#[derive(Debug)]
struct SystemClock;

impl Clock for SystemClock {
    #[allow(clippy::disallowed_methods)] // this is the one place
    fn wall(&self) -> StoreTime {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let micros = since.map_or(0, |since| since.as_micros());
        StoreTime::from_micros(i64::try_from(micros).unwrap_or(i64::MAX))
    }

    fn boot(&self) -> BootTime {
        boot_time()
    }

    fn sleep(&self, span: Duration) -> BoxFuture<'static, ()> {
        Box::pin(tokio::time::sleep(span))
    }
}

/// Not CLOCK_MONOTONIC on Linux: that stands still while a laptop sleeps, and a lease would be
/// trusted long after it was lost (FIELD.md row 31). macOS' monotonic clock goes on.
#[cfg(unix)]
fn boot_time() -> BootTime {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    const CLOCK: rustix::time::ClockId = rustix::time::ClockId::Boottime;
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    const CLOCK: rustix::time::ClockId = rustix::time::ClockId::Monotonic;
    let time = rustix::time::clock_gettime(CLOCK);
    BootTime(Duration::new(
        u64::try_from(time.tv_sec).unwrap_or(0),
        u32::try_from(time.tv_nsec).unwrap_or(0),
    ))
}

/// Windows' `Instant` goes on during suspend.
#[cfg(not(unix))]
#[allow(clippy::disallowed_methods)] // this is the one place
fn boot_time() -> BootTime {
    use std::sync::OnceLock;
    use std::time::Instant;
    static START: OnceLock<Instant> = OnceLock::new();
    BootTime(START.get_or_init(Instant::now).elapsed())
}

#[derive(Debug)]
struct SystemEntropy;

impl Entropy for SystemEntropy {
    #[allow(clippy::disallowed_methods)] // this is the one place
    fn fill(&self, bytes: &mut [u8]) {
        // A kernel without random numbers cannot run anything safely: nonces would repeat.
        getrandom::fill(bytes).expect("the operating system gives random bytes");
    }
}
