//! Retries, and turns an unknown outcome into a fact.
//!
//! The decisions are [`leasehold_protocol::settle`]'s; this is the loop around them. Once an
//! attempt has gone unanswered there is *doubt*, and it stays: whatever a later attempt is told, a
//! refusal or an error, the earlier one may have applied or may still do so. Only a read that shows
//! our own bytes, or that the condition still holds, says more.

use bytes::Bytes;
use futures::future::BoxFuture;
use leasehold_protocol::backoff::full_jitter;
use leasehold_protocol::cas::{Version, When};
use leasehold_protocol::key::Key;
use leasehold_protocol::mutant::{self, Mutant};
use leasehold_protocol::settle::{self, Found, Verdict};

use super::backend::Backend;
use super::types::{Delete, Get, Put, Unknown, Write};
use crate::env::Env;
use crate::{Error, ErrorKind, Result, StoreSettings};

/// Whether a write that was not answered, and is not there, may be sent again.
pub(super) type MayRepeat<'a> = &'a (dyn Fn() -> BoxFuture<'a, Result<bool>> + Send + Sync);

/// Sends requests to a backend as often as the settings allow.
#[derive(Debug, Clone, Copy)]
pub(super) struct Driver<'a> {
    pub backend: &'a dyn Backend,
    pub env: &'a Env,
    pub settings: &'a StoreSettings,
}

impl<'a> Driver<'a> {
    pub async fn put(
        &self,
        key: &Key,
        body: Bytes,
        write: &Write,
        may_repeat: Option<MayRepeat<'_>>,
    ) -> Result<Put> {
        let mut attempts = Attempts::new(*self);
        let mut doubt = None;
        loop {
            if write.is_late(self.env) {
                return write.too_late(key, doubt);
            }
            // Whether the pause before another sending has been made.
            let mut paused = false;
            match self.backend.put(key, body.clone(), &write.when, write.durability).await {
                Ok(put @ (Put::Stored(_) | Put::Unknown(Unknown::NotFlushed(_)))) => {
                    return Ok(put);
                }
                Ok(Put::Contended) if mutant::is(Mutant::ConflictAsHeld) => {
                    return Ok(Put::Refused);
                }
                // Without doubt a refusal is somebody else's doing; and nothing can refuse a
                // write that has no condition.
                Ok(Put::Refused)
                    if doubt.is_none()
                        || write.when == When::Any
                        || mutant::is(Mutant::OwnRefusal) =>
                {
                    return Ok(Put::Refused);
                }
                Ok(Put::Refused) => {}
                Ok(Put::Contended) if doubt.is_none() => match attempts.pause().await {
                    true => continue,
                    false => return Ok(Put::Contended),
                },
                Ok(Put::Contended) => paused = attempts.pause().await,
                Ok(Put::Unknown(unknown)) => {
                    doubt = Some(unknown.into_error());
                    paused = attempts.pause().await;
                    if paused && (write.when == When::Any || mutant::is(Mutant::OwnRefusal)) {
                        continue;
                    }
                }
                // Not sent, for want of credentials perhaps: worth another attempt.
                Err(error) if doubt.is_none() => match attempts.again(&error).await {
                    true => continue,
                    false => return Err(error),
                },
                Err(error) => match attempts.again(&error).await {
                    true => paused = true,
                    false => attempts.give_up(),
                },
            }
            // From here on there is doubt. The last attempt is looked for as well.
            // Boxed: hardly any write comes here, and all would carry it along.
            let verdict = Box::pin(self.look_for_put(key, &body, write, &mut attempts)).await;
            match (verdict, &doubt) {
                (Some(Verdict::Applied(version)), _) => return Ok(Put::Stored(version)),
                (Some(Verdict::Overtaken), Some(cause)) => {
                    let error = Error::unavailable(format!(
                        "no answer ({cause}), and by now somebody else's object is there"
                    ));
                    return Ok(Put::Unknown(Unknown::Overtaken(error.at(key))));
                }
                (Some(Verdict::Open), Some(cause)) if paused || attempts.pause().await => {
                    let Some(may_repeat) = may_repeat else { continue };
                    match may_repeat().await {
                        Ok(true) => {}
                        Ok(false) => {
                            let error = Error::unavailable(format!(
                                "no answer ({cause}), and by now it is over"
                            ));
                            return Ok(Put::Unknown(Unknown::Overtaken(error.at(key))));
                        }
                        Err(error) => {
                            let error = Error::unavailable(format!("{cause}; then: {error}"));
                            return Ok(Put::Unknown(Unknown::NoAnswer(error)));
                        }
                    }
                }
                (_, doubt) => {
                    let cause = doubt.as_ref().map(ToString::to_string).unwrap_or_default();
                    let error = Error::unavailable(cause);
                    return Ok(Put::Unknown(Unknown::NoAnswer(error)));
                }
            }
        }
    }

    /// Reads what is there and judges. `None` if that is not answered either, or not allowed.
    async fn look_for_put(
        &self,
        key: &Key,
        body: &[u8],
        write: &Write,
        attempts: &mut Attempts<'a>,
    ) -> Option<Verdict> {
        let found = loop {
            match self.backend.get(key, None).await {
                Ok(found) => break found,
                Err(error) if attempts.again(&error).await => {}
                Err(_) => return None,
            }
        };
        let found = match &found {
            Get::Found(object) => {
                Found::Object { body: &object.body, version: &object.meta.version }
            }
            Get::Absent | Get::Unchanged => Found::Absent,
        };
        Some(settle::put(found, body, &write.when, write.proof))
    }

    pub async fn delete(&self, key: &Key, version: Option<&Version>) -> Result<Delete> {
        let mut attempts = Attempts::new(*self);
        let mut doubt = None;
        loop {
            let mut paused = false;
            match self.backend.delete(key, version).await {
                Ok(done @ (Delete::Deleted | Delete::Unknown(Unknown::NotFlushed(_)))) => {
                    return Ok(done);
                }
                Ok(Delete::Refused) if doubt.is_none() || version.is_none() => {
                    return Ok(Delete::Refused);
                }
                Ok(Delete::Refused) => {}
                Ok(Delete::Contended) if attempts.pause().await => continue,
                Ok(Delete::Contended) if doubt.is_none() => return Ok(Delete::Contended),
                Ok(Delete::Contended) => {}
                Ok(Delete::Unknown(unknown)) => {
                    doubt = Some(unknown.into_error());
                    paused = attempts.pause().await;
                    if paused && version.is_none() {
                        continue;
                    }
                }
                Err(error) if attempts.again(&error).await => continue,
                Err(error) if doubt.is_none() => return Err(error),
                Err(_) => attempts.give_up(),
            }
            let verdict = match version {
                Some(version) => Box::pin(self.look_for_delete(key, version, &mut attempts)).await,
                None => None,
            };
            match verdict {
                Some(Verdict::Applied(_)) => return Ok(Delete::Deleted),
                // The version is not there any more, whoever's doing that is.
                Some(Verdict::Overtaken) => return Ok(Delete::Refused),
                Some(Verdict::Open) if paused || attempts.pause().await => {}
                Some(Verdict::Open) | None => {
                    let error = doubt.unwrap_or_else(|| Error::unavailable("no answer").at(key));
                    return Ok(Delete::Unknown(Unknown::NoAnswer(error)));
                }
            }
        }
    }

    async fn look_for_delete(
        &self,
        key: &Key,
        version: &Version,
        attempts: &mut Attempts<'a>,
    ) -> Option<Verdict> {
        loop {
            match self.backend.head(key).await {
                Ok(there) => {
                    let there = there.as_ref().map(|meta| &meta.version);
                    return Some(settle::delete(there, version));
                }
                Err(error) if attempts.again(&error).await => {}
                Err(_) => return None,
            }
        }
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

    /// Waits before another attempt if this error is worth one and one is left. A directory is not
    /// asked again: its disk is as full the second time, and its locks are waited for already.
    pub async fn again(&mut self, error: &Error) -> bool {
        error.kind() == ErrorKind::Unavailable
            && self.driver.backend.kind() != super::Kind::Directory
            && self.pause().await
    }

    fn left(&self) -> bool {
        self.made < self.driver.settings.attempts
    }

    /// No further attempt makes sense.
    fn give_up(&mut self) {
        self.made = self.driver.settings.attempts;
    }

    /// Waits before another attempt, or says that there is none left.
    pub async fn pause(&mut self) -> bool {
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
