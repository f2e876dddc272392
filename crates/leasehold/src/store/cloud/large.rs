//! Large objects on a bucket: read in ranges of one version, written in parts.

use std::sync::PoisonError;

use async_trait::async_trait;
use bytes::Bytes;
use leasehold_protocol::cas::When;
use leasehold_protocol::key::Key;
use opendal::raw::oio::{ReadStream as _, Write as _};
use opendal::raw::{OpRead, OpReader, OpWrite, oio};
use opendal::{Buffer, BytesRange, options};

use super::Cloud;
use super::answer::{Answer, Condition};
use super::outcome::{condition_of, etag, failed, not_stored, read_error, stored, tells_nothing};
use crate::store::Backend as _;
use crate::store::Kind;
use crate::store::large::{FileBody, PIECE, SMALL, Source, Whole};
use crate::store::types::{Durability, Meta, Object, Put, Unknown};
use crate::{Error, ErrorKind, Result};

impl Cloud {
    pub(super) async fn open_source(&self, key: &Key) -> Result<Option<Box<dyn Source>>> {
        self.check(key)?;
        let (context, answered) = self.operation();
        let fetched = async {
            let (range, read, _): (BytesRange, OpRead, OpReader) =
                options::ReadOptions::default().into();
            let reader = self.service.read_dyn(&context, key.as_str(), read)?;
            let (told, mut stream) = oio::Read::open(&reader, range).await?;
            let mut first = Vec::new();
            // What does not fit is asked for again, in ranges: a stream that somebody reads slowly
            // would be cut off.
            let mut ended = false;
            while first.len() < SMALL && !ended {
                let piece = stream.read().await?;
                ended = piece.is_empty();
                first.extend_from_slice(&piece.to_bytes());
            }
            Ok::<_, opendal::Error>((told.into_metadata(), Bytes::from(first), ended))
        };
        match fetched.await {
            Ok((None, ..)) => Err(tells_nothing(key)),
            Ok((Some(told), first, ended)) => {
                let date = answered.lock().unwrap_or_else(PoisonError::into_inner).date;
                let size = match ended {
                    true => first.len() as u64,
                    false => told.content_length(),
                };
                let meta = self.meta(&told, size, date, key)?;
                if ended || first.len() as u64 == size {
                    return Ok(Some(Box::new(Whole(Object { body: first, meta }))));
                }
                let (cloud, key) = (self.clone(), key.clone());
                Ok(Some(Box::new(Ranged { cloud, key, meta, first })))
            }
            Err(error) => match failed(&answered, &error, Condition::None) {
                Answer::Missing => Ok(None),
                other => Err(read_error(other, Some(key))),
            },
        }
    }

    pub(super) async fn put_parts(
        &self,
        key: &Key,
        body: &FileBody,
        when: &When,
        durability: Durability,
    ) -> Result<Put> {
        // Google's uploads in parts take no condition that OpenDAL could pass on: one request.
        if self.kind == Kind::Gcs || body.len() <= PIECE as u64 {
            return self.put(key, body.read_all()?, when, durability).await;
        }
        self.check(key)?;
        let mut write = options::WriteOptions::default();
        match when {
            When::Any => {}
            When::Absent => write.if_not_exists = true,
            When::Matches(version) => write.if_match = Some(etag(version)),
        }
        let (context, answered) = self.operation();
        let capability = self.service.capability_dyn();
        let unsent = |error: opendal::Error| {
            Error::new(ErrorKind::Internal, format!("cannot write in parts: {error}")).at(key)
        };
        let (write, _) = OpWrite::from_options(&capability, write).map_err(unsent)?;
        let mut writer = self.service.write_dyn(&context, key.as_str(), write).map_err(unsent)?;
        let mut at = 0;
        let mut sent = Ok(());
        while at < body.len() && sent.is_ok() {
            let piece = body.read_at(at, PIECE)?;
            at += piece.len() as u64;
            sent = writer.write(Buffer::from(piece)).await;
        }
        let error = match sent {
            Ok(()) => match writer.close().await {
                Ok(told) => return Ok(stored(self.version(&told), key)),
                Err(error) => error,
            },
            Err(error) => error,
        };
        let answer = failed(&answered, &error, condition_of(when));
        // Parts that belong to nothing cost money until a lifecycle rule removes them. Where it is
        // not known whether the upload was completed, aborting it does no harm.
        let _ = writer.abort().await;
        match answer {
            // "No such upload": another attempt of ours may have completed it.
            Answer::Missing | Answer::NotModified => {
                let error = Error::unavailable("the upload is gone").at(key);
                Ok(Put::Unknown(Unknown::NoAnswer(error)))
            }
            other => not_stored(other, key),
        }
    }
}

#[derive(Debug)]
struct Ranged {
    cloud: Cloud,
    key: Key,
    meta: Meta,
    first: Bytes,
}

#[async_trait]
impl Source for Ranged {
    fn meta(&self) -> &Meta {
        &self.meta
    }

    async fn read_at(&self, offset: u64, len: usize) -> Result<Bytes> {
        let left = self.meta.size.saturating_sub(offset);
        let len = u64::try_from(len).unwrap_or(u64::MAX).min(left);
        if len == 0 {
            return Ok(Bytes::new());
        }
        if offset + len <= self.first.len() as u64 {
            return Ok(self.first.slice(offset as usize..(offset + len) as usize));
        }
        let Self { cloud, key, meta, .. } = self;
        let (context, answered) = cloud.operation();
        let mut read = options::ReadOptions {
            range: BytesRange::from(offset..offset + len),
            ..options::ReadOptions::default()
        };
        match cloud.uses_generations() {
            true => read.if_version_match = Some(meta.version.to_string()),
            false => read.if_match = Some(etag(&meta.version)),
        }
        let replaced = || Error::new(ErrorKind::Lost, "was replaced while it was read").at(key);
        match cloud.fetch(&context, key, read).await {
            // A server that does not mind the condition still tells what it sent.
            Ok((Some(told), body)) => match cloud.version(&told).as_ref() == Some(&meta.version) {
                true if body.len() as u64 == len => Ok(body),
                true => Err(Error::unavailable("fewer bytes than asked for").at(key)),
                false => Err(replaced()),
            },
            Ok((None, _)) => Err(tells_nothing(key)),
            Err(error) => match failed(&answered, &error, Condition::Matches) {
                Answer::Missing | Answer::Refused | Answer::NotModified => Err(replaced()),
                other => Err(read_error(other, Some(key))),
            },
        }
    }
}
