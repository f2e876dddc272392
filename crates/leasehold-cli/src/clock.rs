//! Where the command's time comes from: the system, and in tests of several nodes on one machine a wall
//! clock that is off.

use leasehold::env::Env;

/// The system's time and chance.
///
/// In builds with debug assertions, and in no other, `LEASEHOLD_TEST_CLOCK` is the number of seconds by
/// which this process' wall clock is ahead of the system's, or behind it. It is for tests: nodes of one
/// machine that disagree about the time by hours. The clock since boot is the system's, as a wrong wall
/// clock does not change how fast time passes; so are the times that the file system gives to files, as
/// on a machine that has its directory from another one; and so is the time in requests' signatures,
/// which S3 would refuse.
pub fn env() -> Env {
    let system = Env::system();
    #[cfg(debug_assertions)]
    if let Some(seconds) = std::env::var("LEASEHOLD_TEST_CLOCK").ok().and_then(|s| s.parse().ok()) {
        let clock = off::Off { system: system.clone(), seconds };
        return system.with_clock(std::sync::Arc::new(clock));
    }
    system
}

#[cfg(debug_assertions)]
mod off {
    use std::time::Duration;

    use futures::future::BoxFuture;
    use leasehold::StoreTime;
    use leasehold::env::{BootTime, Clock, Env};

    /// The system's clock, with a wall clock that is off.
    #[derive(Debug)]
    pub struct Off {
        pub system: Env,
        pub seconds: i64,
    }

    impl Clock for Off {
        fn wall(&self) -> StoreTime {
            let off = self.seconds.saturating_mul(1_000_000);
            StoreTime::from_micros(self.system.clock().wall().as_micros().saturating_add(off))
        }

        fn boot(&self) -> BootTime {
            self.system.clock().boot()
        }

        fn sleep(&self, span: Duration) -> BoxFuture<'static, ()> {
            self.system.clock().sleep(span)
        }
    }
}
