//! Buckets: S3 and compatible stores, Google Cloud Storage, Azure Blob Storage.
//!
//! OpenDAL builds and signs the requests and reads the answers' XML. It is used below its operator,
//! whose path normalisation would change keys, and without its retries, which would turn our own
//! success into "already exists". Added here: the store's clock, request counting, timeouts, limits on
//! connections and requests, and outcomes decided by error codes (`answer`). On S3 requests are signed
//! here, and those for single objects go without OpenDAL altogether (`s3`).

mod answer;
mod connect;
mod large;
mod list;
mod outcome;
#[cfg(feature = "s3")]
mod rules;
#[cfg(feature = "s3")]
mod s3;
mod services;
mod transport;

use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use bytes::Bytes;
use leasehold_protocol::cas::{Version, When};
use leasehold_protocol::key::{Key, MAX_KEY_BYTES};
use leasehold_protocol::time::StoreTime;
use opendal::raw::oio::{Delete as _, ReadStream as _, Write as _};
use opendal::raw::{OpDelete, OpRead, OpReader, OpStat, OpWrite, Servicer, oio};
use opendal::{Buffer, BytesRange, Executor, HttpTransporter, Metadata, OperationContext, options};

use self::answer::{Answer, Condition};
use self::list::CloudLister;
use self::outcome::{
    condition_of, etag, failed, first_line, meta_of, modified, not_deleted, not_got, not_stored,
    read_error, stored, tells_nothing,
};
pub use self::services::CloudOptions;
use self::transport::{Answered, Observed, Transport, Urgency};
use super::backend::{Backend, Kind, Lister, Reading};
use super::large::{FileBody, Source};
use super::meter::Meter;
use super::types::{Delete, Durability, Get, List, Meta, Object, Put};
use super::url::check_bucket;
use crate::env::Env;
use crate::{Error, Result, StoreSettings};

/// A bucket, or what is below a prefix in it. Clones share the connections.
#[derive(Debug, Clone)]
pub struct Cloud {
    service: Servicer,
    transport: Arc<Transport>,
    executor: Executor,
    meter: Arc<Meter>,
    kind: Kind,
    url: String,
    /// How long our keys may be, below the prefix.
    room: usize,
    bucket: String,
    options: CloudOptions,
    /// The way without OpenDAL, where there is one.
    #[cfg(feature = "s3")]
    objects: Option<Arc<s3::Objects>>,
    /// What signs requests, where OpenDAL does not.
    #[cfg(feature = "s3")]
    keys: Option<Arc<s3::Keys>>,
}

impl Cloud {
    /// Connects to nothing yet: the first request does.
    pub fn new(
        kind: Kind,
        bucket: &str,
        prefix: &str,
        options: &CloudOptions,
        settings: &StoreSettings,
        env: &Env,
    ) -> Result<Self> {
        // A URL may have been put together by hand. OpenDAL would mend the prefix, and `s3` take it as
        // it is: what one of them writes the other would not find.
        check_bucket(bucket, prefix)?;
        if kind == Kind::Azure && !prefix.is_empty() {
            check_azure(prefix)
                .map_err(|error| Error::invalid(format!("prefix {prefix:?}: {error}")))?;
        }
        let service = services::build_service(kind, bucket, prefix, options)?;
        let meter = Arc::new(Meter::default());
        let transport = Arc::new(Transport::new(settings, meter.clone(), env.clone()));
        #[cfg(feature = "s3")]
        let keys = match kind == Kind::S3 && !options.anonymous && !s3::is_express(bucket) {
            true => Some(Arc::new(s3::Keys::new(&transport, options, options.signing_region()?))),
            false => None,
        };
        #[cfg(feature = "s3")]
        let objects = match kind {
            Kind::S3 => s3::Objects::new(&transport, bucket, prefix, options, keys.clone()),
            _ => None,
        };
        let scheme = match kind {
            Kind::Gcs => "gs",
            Kind::Azure => "az",
            _ => "s3",
        };
        let room = MAX_KEY_BYTES.saturating_sub(match prefix {
            "" => 0,
            prefix => prefix.len() + 1,
        });
        let url = match prefix {
            "" => format!("{scheme}://{bucket}"),
            prefix => format!("{scheme}://{bucket}/{prefix}"),
        };
        Ok(Self {
            service,
            transport,
            executor: Executor::default(),
            meter,
            kind,
            url,
            room,
            bucket: bucket.to_owned(),
            options: options.clone(),
            #[cfg(feature = "s3")]
            objects: objects.map(Arc::new),
            #[cfg(feature = "s3")]
            keys,
        })
    }

    /// A context in which the answer to an operation is noted.
    fn operation(&self) -> (OperationContext, Arc<Mutex<Answered>>) {
        let answered = Arc::new(Mutex::new(Answered::default()));
        (self.context(self.observed(&answered)), answered)
    }

    fn observed(&self, answered: &Arc<Mutex<Answered>>) -> Observed {
        Observed {
            #[cfg(feature = "s3")]
            keys: self.keys.clone(),
            ..Observed::new(&self.transport, answered)
        }
    }

    fn context(&self, observed: Observed) -> OperationContext {
        OperationContext::from_parts(HttpTransporter::new(observed), self.executor.clone())
    }

    /// What was read, and what was told of it.
    async fn fetch(
        &self,
        context: &OperationContext,
        key: &Key,
        read: options::ReadOptions,
    ) -> Result<(Option<Metadata>, Bytes), opendal::Error> {
        let (range, read, _): (BytesRange, OpRead, OpReader) = read.into();
        let reader = self.service.read_dyn(context, key.as_str(), read)?;
        let (told, mut stream) = oio::Read::open(&reader, range).await?;
        let body = stream.read_all().await?;
        Ok((told.into_metadata(), body.to_bytes()))
    }

    /// Whether this provider can hold the key as it is.
    fn check(&self, key: &Key) -> Result<()> {
        let name = key.as_str();
        if name.len() > self.room {
            return Err(Error::invalid(format!(
                "with the store's prefix this key is longer than {MAX_KEY_BYTES} bytes"
            ))
            .at(key));
        }
        if self.kind == Kind::Azure {
            check_azure(name).map_err(|error| error.at(key))?;
        }
        Ok(())
    }

    fn uses_generations(&self) -> bool {
        self.kind == Kind::Gcs
    }

    /// The version in what OpenDAL tells of an object: Google's generation, or the ETag without
    /// its quotes, which some answers have and others have not.
    fn version(&self, meta: &Metadata) -> Option<Version> {
        let text = match self.uses_generations() {
            true => meta.version(),
            false => meta.etag(),
        };
        text.map(|text| Version::new(text.trim_matches('"')))
    }

    fn meta(&self, meta: &Metadata, size: u64, date: Option<StoreTime>, key: &Key) -> Result<Meta> {
        meta_of(self.version(meta), modified(meta), size, date, key)
    }
}

/// Azure turns a backslash into a slash, and drops a dot at the end of a segment.
fn check_azure(name: &str) -> Result<()> {
    match name.contains('\\') || name.split('/').any(|segment| segment.ends_with('.')) {
        true => Err(Error::invalid(
            "Azure has no keys with a backslash or with a dot at the end of a segment",
        )),
        false => Ok(()),
    }
}

/// One object at a time, by OpenDAL.
impl Cloud {
    async fn dal_get(&self, key: &Key, unless: Option<&Version>) -> Result<Get> {
        let (context, answered) = self.operation();
        let mut read = options::ReadOptions::default();
        match unless {
            Some(version) if self.uses_generations() => {
                read.if_version_not_match = Some(version.to_string());
            }
            Some(version) => read.if_none_match = Some(etag(version)),
            None => {}
        }
        match self.fetch(&context, key, read).await {
            Ok((None, _)) => Err(tells_nothing(key)),
            Ok((Some(meta), body)) => {
                let date = answered.lock().unwrap_or_else(PoisonError::into_inner).date;
                let meta = self.meta(&meta, body.len() as u64, date, key)?;
                Ok(Get::Found(Object { body, meta }))
            }
            // "Not modified" can come as a 412 too.
            Err(error) => {
                let answer = failed(&answered, &error, Condition::Absent);
                not_got(answer, unless.is_some(), key)
            }
        }
    }

    async fn dal_head(&self, key: &Key) -> Result<Option<Meta>> {
        let (context, answered) = self.operation();
        match self.service.stat_dyn(&context, key.as_str(), OpStat::new()).await {
            Ok(told) => {
                let date = answered.lock().unwrap_or_else(PoisonError::into_inner).date;
                let meta = told.into_metadata();
                Ok(Some(self.meta(&meta, meta.content_length(), date, key)?))
            }
            Err(error) => match failed(&answered, &error, Condition::None) {
                Answer::Missing => Ok(None),
                other => Err(read_error(other, Some(key))),
            },
        }
    }

    async fn dal_put(&self, key: &Key, body: Bytes, when: &When, urgency: Urgency) -> Result<Put> {
        let mut write = options::WriteOptions::default();
        // For Google, OpenDAL makes a conditional write an upload in several requests. The plain
        // one takes the condition just as well, in its query.
        let mut generation = None;
        match when {
            When::Any => {}
            When::Absent if self.uses_generations() => generation = Some("0".to_owned()),
            When::Matches(version) if self.uses_generations() => {
                generation = Some(version.to_string());
            }
            When::Absent => write.if_not_exists = true,
            When::Matches(version) => write.if_match = Some(etag(version)),
        }
        let answered = Arc::new(Mutex::new(Answered::default()));
        let context = self.context(Observed { generation, urgency, ..self.observed(&answered) });
        let written = async {
            let capability = self.service.capability_dyn();
            let (write, _) = OpWrite::from_options(&capability, write)?;
            let mut writer = self.service.write_dyn(&context, key.as_str(), write)?;
            if !body.is_empty() {
                writer.write(Buffer::from(body)).await?;
            }
            writer.close().await
        };
        match written.await {
            Ok(meta) => Ok(stored(self.version(&meta), key)),
            Err(error) => not_stored(failed(&answered, &error, condition_of(when)), key),
        }
    }

    async fn dal_delete(&self, key: &Key, version: Option<&Version>) -> Result<Delete> {
        let (context, answered) = self.operation();
        let condition = match version {
            Some(_) => Condition::Matches,
            None => Condition::None,
        };
        let mut delete = options::DeleteOptions::default();
        match version {
            Some(version) if self.uses_generations() => {
                delete.if_version_match = Some(version.to_string());
            }
            Some(version) => delete.if_match = Some(etag(version)),
            None => {}
        }
        let deleted = async {
            let capability = self.service.capability_dyn();
            let delete = OpDelete::from_options(&capability, delete)?;
            let mut deleter = self.service.delete_dyn(&context)?;
            deleter.delete(key.as_str(), delete).await?;
            deleter.close().await
        };
        match deleted.await {
            Ok(()) => Ok(Delete::Deleted),
            Err(error) => not_deleted(failed(&answered, &error, condition), key),
        }
    }
}

#[async_trait]
impl Backend for Cloud {
    fn url(&self) -> String {
        self.url.clone()
    }

    fn kind(&self) -> Kind {
        self.kind
    }

    fn limit(&self, connections: usize, requests_per_minute: Option<u32>) {
        self.transport.limit(connections, requests_per_minute);
    }

    fn meter(&self) -> &Arc<Meter> {
        &self.meter
    }

    fn reading(&self) -> Option<Reading> {
        self.transport.reading()
    }

    async fn get(&self, key: &Key, unless: Option<&Version>) -> Result<Get> {
        self.check(key)?;
        #[cfg(feature = "s3")]
        if let Some(objects) = &self.objects {
            return objects.get(key, unless).await;
        }
        // Boxed, here and below: what goes the short way need not carry this along.
        Box::pin(self.dal_get(key, unless)).await
    }

    async fn head(&self, key: &Key) -> Result<Option<Meta>> {
        self.check(key)?;
        #[cfg(feature = "s3")]
        if let Some(objects) = &self.objects {
            return objects.head(key).await;
        }
        Box::pin(self.dal_head(key)).await
    }

    async fn put(
        &self,
        key: &Key,
        body: Bytes,
        when: &When,
        durability: Durability,
    ) -> Result<Put> {
        self.check(key)?;
        // What need not outlive a power loss is what is written again and again: renewals of leases.
        let urgency = match durability {
            Durability::Volatile => Urgency::First,
            Durability::Durable | Durability::Ordered => Urgency::InLine,
        };
        #[cfg(feature = "s3")]
        if let Some(objects) = &self.objects {
            return objects.put(key, body, when, urgency).await;
        }
        Box::pin(self.dal_put(key, body, when, urgency)).await
    }

    async fn delete(&self, key: &Key, version: Option<&Version>) -> Result<Delete> {
        self.check(key)?;
        #[cfg(feature = "s3")]
        if let Some(objects) = &self.objects {
            return objects.delete(key, version).await;
        }
        Box::pin(self.dal_delete(key, version)).await
    }

    async fn delete_many(&self, keys: &[Key]) -> Result<()> {
        if keys.is_empty() {
            return Ok(());
        }
        keys.iter().try_for_each(|key| self.check(key))?;
        let (context, answered) = self.operation();
        let deleted = async {
            let mut deleter = self.service.delete_dyn(&context)?;
            for key in keys {
                deleter.delete(key.as_str(), OpDelete::new()).await?;
            }
            deleter.close().await
        };
        match deleted.await {
            Ok(()) => Ok(()),
            Err(error) => Err(match failed(&answered, &error, Condition::None) {
                Answer::Failed(error) => error,
                // A batch was answered but some of it failed: deleting again is safe.
                Answer::Unanswered(_) => Error::unavailable(format!(
                    "some objects could not be deleted: {}",
                    first_line(&error)
                )),
                other => read_error(other, None),
            }),
        }
    }

    async fn open(&self, key: &Key) -> Result<Option<Box<dyn Source>>> {
        self.open_source(key).await
    }

    async fn put_file(
        &self,
        key: &Key,
        body: &FileBody,
        when: &When,
        durability: Durability,
    ) -> Result<Put> {
        self.put_parts(key, body, when, durability).await
    }

    fn list(&self, list: List) -> Box<dyn Lister> {
        Box::new(CloudLister::new(self, list))
    }

    async fn warnings(&self) -> Vec<String> {
        #[cfg(feature = "s3")]
        if self.kind == Kind::S3 {
            let (context, _) = self.operation();
            return rules::warnings(context.http_transport(), &self.bucket, &self.options).await;
        }
        Vec::new()
    }

    async fn persist(&self, _: &[Key]) -> Result<()> {
        Ok(())
    }
}
