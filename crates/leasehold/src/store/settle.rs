//! Retries, and turns an unknown outcome into a fact.
//!
//! The decisions are [`leasehold_protocol::settle`]'s; this is the loop around them.

use bytes::Bytes;
use leasehold_protocol::backoff::full_jitter;
use leasehold_protocol::cas::{Version, When};
use leasehold_protocol::key::Key;
use leasehold_protocol::settle::{self, Found, Verdict};

use super::backend::Backend;
use super::types::{Delete, Get, Put, Unknown, Write};
use crate::env::Env;
use crate::{Error, ErrorKind, Result, StoreSettings};

/// Sends requests to a backend as often as the settings allow.
#[derive(Debug, Clone, Copy)]
pub(super) struct Driver<'a> {
    pub backend: &'a dyn Backend,
    pub env: &'a Env,
    pub settings: &'a StoreSettings,
}

impl<'a> Driver<'a> {
    pub async fn put(&self, key: &Key, body: Bytes, write: &Write) -> Result<Put> {
        let mut attempts = Attempts::new(*self);
        loop {
            let sent = self.backend.put(key, body.clone(), &write.when, write.durability).await?;
            let refused = matches!(sent, Put::Refused);
            match sent {
                Put::Stored(_) | Put::Unknown(Unknown::NotFlushed(_)) => return Ok(sent),
                // A refusal of the first attempt is somebody else's doing. Later ones may be ours:
                // the earlier attempt landed and its answer did not. That is settled at once.
                Put::Refused if attempts.first() => return Ok(sent),
                Put::Refused => {}
                Put::Contended | Put::Unknown(_) => {
                    if !attempts.pause().await {
                        return Ok(sent);
                    }
                }
            }
            // What was contended did not apply, and an unconditional write can just be repeated.
            if matches!(sent, Put::Contended) || write.when == When::Any {
                continue;
            }
            match self.settle_put(key, &body, write, &mut attempts).await? {
                Some(Verdict::Applied(version)) => return Ok(Put::Stored(version)),
                Some(Verdict::Refused) => return Ok(Put::Refused),
                // A refusal, and then the condition holds again: it changed under us.
                Some(Verdict::Open) if !refused || attempts.pause().await => {}
                Some(Verdict::Open) | None => return Ok(unresolved_put(sent)),
            }
        }
    }

    /// Reads what is there and judges. `None` when the store did not answer that either.
    async fn settle_put(
        &self,
        key: &Key,
        body: &[u8],
        write: &Write,
        attempts: &mut Attempts<'a>,
    ) -> Result<Option<Verdict>> {
        loop {
            let found = match self.backend.get(key, None).await {
                Ok(found) => found,
                Err(error) if attempts.again(&error).await => continue,
                Err(error) if error.kind() == ErrorKind::Unavailable => return Ok(None),
                Err(error) => return Err(error),
            };
            let found = match &found {
                Get::Found(object) => {
                    Found::Object { body: &object.body, version: &object.meta.version }
                }
                Get::Absent | Get::Unchanged => Found::Absent,
            };
            return Ok(Some(settle::put(found, body, &write.when, write.proof)));
        }
    }

    pub async fn delete(&self, key: &Key, version: Option<&Version>) -> Result<Delete> {
        let mut attempts = Attempts::new(*self);
        loop {
            let sent = self.backend.delete(key, version).await?;
            let refused = matches!(sent, Delete::Refused);
            match sent {
                Delete::Deleted | Delete::Unknown(Unknown::NotFlushed(_)) => return Ok(sent),
                Delete::Refused if attempts.first() => return Ok(sent),
                Delete::Refused => {}
                Delete::Contended | Delete::Unknown(_) => {
                    if !attempts.pause().await {
                        return Ok(sent);
                    }
                }
            }
            let Some(version) = version else { continue };
            if matches!(sent, Delete::Contended) {
                continue;
            }
            let there = match self.backend.head(key).await {
                Ok(there) => there,
                // Sending the delete again is as safe as looking again.
                Err(error) if attempts.again(&error).await => continue,
                Err(error) if error.kind() == ErrorKind::Unavailable => {
                    return Ok(Delete::Unknown(Unknown::NoAnswer(error)));
                }
                Err(error) => return Err(error),
            };
            match settle::delete(there.as_ref().map(|meta| &meta.version), version) {
                Verdict::Applied(_) => return Ok(Delete::Deleted),
                Verdict::Refused => return Ok(Delete::Refused),
                Verdict::Open if !refused || attempts.pause().await => {}
                Verdict::Open => return Ok(sent),
            }
        }
    }
}

/// What to answer when reading back did not help: a refusal that may be our own doing is unknown.
fn unresolved_put(sent: Put) -> Put {
    match sent {
        Put::Refused => Put::Unknown(Unknown::NoAnswer(Error::unavailable(
            "the write was sent more than once and the store did not say what became of it",
        ))),
        other => other,
    }
}

/// Repeats a request that can be repeated safely until it is answered or the attempts are used up.
macro_rules! retrying {
    ($driver:expr, $request:expr) => {{
        let mut attempts = $crate::store::settle::Attempts::new($driver);
        loop {
            match $request {
                Err(error) if attempts.again(&error).await => {}
                answered => break answered,
            }
        }
    }};
}
pub(super) use retrying;

pub(super) struct Attempts<'a> {
    driver: Driver<'a>,
    made: u32,
}

impl<'a> Attempts<'a> {
    pub fn new(driver: Driver<'a>) -> Self {
        Self { driver, made: 1 }
    }

    /// Waits before another attempt if this error is worth one and one is left.
    pub async fn again(&mut self, error: &Error) -> bool {
        error.kind() == ErrorKind::Unavailable && self.pause().await
    }

    fn first(&self) -> bool {
        self.made == 1
    }

    fn left(&self) -> bool {
        self.made < self.driver.settings.attempts
    }

    /// Waits before another attempt, or says that there is none left.
    async fn pause(&mut self) -> bool {
        if !self.left() {
            return false;
        }
        let Driver { env, settings, backend } = self.driver;
        let pause =
            full_jitter(self.made - 1, settings.retry_base, settings.retry_cap, env.random());
        self.made += 1;
        backend.meter().retried();
        tracing::debug!(attempt = self.made, ?pause, "no clear answer, trying again");
        env.clock().sleep(pause).await;
        true
    }
}
