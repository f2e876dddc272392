//! A deterministic simulator: Leasehold's *real* lease, queue and index code on a simulated store,
//! clock, network and fleet.
//!
//! ```text
//!   scenario   what nodes do: lock, push, work, put, compile, sweep; and what must come of it
//!     │
//!   leasehold  the code that users run, unchanged
//!     │
//!   net        requests that get lost, arrive late or twice; 409, 500, 503; slow and stuck
//!     │
//!   objects    the store, with conditions as S3 has them        check: every write, as it lands
//!     ┆
//!   world      one clock, one heap of events, one seed; nodes that die, stop, and drift
//! ```
//!
//! One seed decides everything: the same seed gives the same history, to the byte. Nodes never share
//! memory; a process that dies just never hears from the world again, so nothing of it is cleaned up
//! that a `kill -9` would not clean up.

pub mod check;
pub mod disk;
pub mod env;
pub mod faults;
pub mod net;
pub mod objects;
pub mod rng;
pub mod scenario;
pub mod trace;
pub mod world;

use std::cell::Cell;
use std::sync::Once;

use faults::{Broken, Faults};
use rng::Rng;
use scenario::Scenario;
use world::World;

/// What to run.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// This scenario, or the one that the seed chooses.
    pub scenario: Option<Scenario>,
    /// Rates that take the place of the seed's own.
    pub rates: Vec<(String, f64)>,
    /// A store that breaks its word.
    pub broken: Option<Broken>,
    /// Whether to keep a history for people.
    pub record: bool,
}

/// What came of a seed.
#[derive(Debug)]
pub struct Outcome {
    /// The seed.
    pub seed: u64,
    /// What was run.
    pub scenario: Scenario,
    /// What went wrong.
    pub faults: String,
    /// What did not hold.
    pub violation: Option<String>,
    /// Equal for equal histories.
    pub hash: u64,
    /// How long it took by the simulated clock, in seconds.
    pub seconds: u64,
    /// The history, if it was asked for.
    pub history: Vec<String>,
}

thread_local! {
    static PANICKED: Cell<bool> = const { Cell::new(false) };
}

/// A panic in a background task would vanish there: it is noted instead.
fn note_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            PANICKED.set(true);
            usual(info);
        }));
    });
}

/// The first of these seeds at which something does not hold, on so many threads.
pub fn hunt(seeds: std::ops::Range<u64>, options: &Options, jobs: usize) -> Option<Outcome> {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
    let (next, found) = (AtomicU64::new(seeds.start), AtomicU64::new(u64::MAX));
    let first: Mutex<Option<Outcome>> = Mutex::default();
    std::thread::scope(|scope| {
        for _ in 0..jobs.max(1) {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, SeqCst);
                    if seed >= seeds.end || seed > found.load(SeqCst) {
                        return;
                    }
                    let outcome = run(seed, options);
                    if outcome.violation.is_some() {
                        found.fetch_min(seed, SeqCst);
                        let mut first = first.lock().unwrap_or_else(|bad| bad.into_inner());
                        if first.as_ref().is_none_or(|first| first.seed > seed) {
                            *first = Some(outcome);
                        }
                    }
                }
            });
        }
    });
    first.into_inner().unwrap_or_else(|bad| bad.into_inner())
}

/// Runs one seed.
pub fn run(seed: u64, options: &Options) -> Outcome {
    note_panics();
    let mut rng = Rng::new(seed);
    let drawn = *rng.pick(&Scenario::ALL);
    let mut faults = Faults::draw(&mut rng);
    for (name, rate) in &options.rates {
        faults.rate(name).into_iter().for_each(|fault| *fault = *rate);
    }
    let scenario = options.scenario.unwrap_or(drawn);
    let text = faults.text();
    let world = World::new(seed, faults, options.broken, options.record);
    let hook = world.clone();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .on_thread_park(move || hook.advance())
        .build()
        .expect("a runtime without drivers needs nothing from the system");
    PANICKED.set(false);
    let done = runtime.block_on(async {
        tokio::select! {
            biased;
            violation = world.violated() => Err(violation),
            done = scenario.play(&world, rng) => done,
        }
    });
    drop(runtime);
    let mut state = world.state();
    let mut violation = done.err();
    if PANICKED.get() {
        violation = Some(format!("a panic; {}", violation.unwrap_or_default()));
    }
    Outcome {
        seed,
        scenario,
        faults: text,
        violation,
        hash: state.trace.hash(),
        seconds: state.now / 1_000_000,
        history: state.trace.take_lines(),
    }
}
