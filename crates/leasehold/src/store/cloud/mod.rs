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
use opendal::raw::oio::{Delete as _, List as _, ReadStream as _, Write as _};
use opendal::raw::{OpDelete, OpList, OpRead, OpReader, OpStat, OpWrite, Servicer, oio};
use opendal::{Buffer, BytesRange, Executor, HttpTransporter, Metadata, OperationContext, options};

use self::answer::{Answer, Condition};
pub use self::services::CloudOptions;
use self::transport::{Answered, Observed, Transport, Urgency};
use super::backend::{Backend, Kind, Lister, Reading};
use super::large::{FileBody, Source};
use super::meter::Meter;
use super::types::{Delete, Durability, Entry, Get, List, Meta, Object, Page, Put, Unknown};
use super::url::check_bucket;
use crate::env::Env;
use crate::{Error, ErrorKind, Result, StoreSettings};

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

/// What an answer tells of an object.
fn meta_of(
    version: Option<Version>,
    modified: Option<StoreTime>,
    size: u64,
    date: Option<StoreTime>,
    key: &Key,
) -> Result<Meta> {
    let untold = |what: &str| Error::new(ErrorKind::Unsupported, what).at(key);
    let modified = modified.ok_or_else(|| untold("the store does not tell when it was written"))?;
    let version = version.ok_or_else(|| untold("the store does not tell the object's version"))?;
    // Without a Date there is no store clock; the doctor says so. An age of zero is the safe side:
    // nothing looks stale.
    let now = date.unwrap_or(modified);
    Ok(Meta { version, modified, now, size })
}

/// What a write came to that was carried out. In which version? Whoever asks finds our bytes, or why
/// nobody can be told.
fn stored(version: Option<Version>, key: &Key) -> Put {
    match version {
        Some(version) => Put::Stored(version),
        None => {
            let error = Error::unavailable("the store does not tell the new version");
            Put::Unknown(Unknown::NoAnswer(error.at(key)))
        }
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

fn condition_of(when: &When) -> Condition {
    match when {
        When::Any => Condition::None,
        When::Absent => Condition::Absent,
        When::Matches(_) => Condition::Matches,
    }
}

/// The condition value that a version stands for on the wire.
fn etag(version: &Version) -> String {
    format!("\"{version}\"")
}

fn modified(meta: &Metadata) -> Option<StoreTime> {
    let time = meta.last_modified()?;
    let time = std::time::SystemTime::from(time);
    let micros = time.duration_since(std::time::UNIX_EPOCH).ok()?.as_micros();
    Some(StoreTime::from_micros(i64::try_from(micros).ok()?))
}

/// What a failed operation means, from what the transport saw. OpenDAL's own view of it is only
/// used where no answer was seen at all: it failed before sending, over credentials for example.
fn failed(answered: &Mutex<Answered>, error: &opendal::Error, condition: Condition) -> Answer {
    let mut answered = answered.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(error) = answered.unsent.take() {
        return Answer::Failed(error);
    }
    let seen = &answered.seen;
    if seen.status == 0 && seen.failure.is_empty() {
        let kind = match error.kind() {
            opendal::ErrorKind::ConfigInvalid => ErrorKind::Invalid,
            opendal::ErrorKind::PermissionDenied => ErrorKind::Denied,
            opendal::ErrorKind::Unsupported => ErrorKind::Unsupported,
            _ => ErrorKind::Denied,
        };
        return Answer::Failed(unsent(&answered, kind, &first_line(error)));
    }
    seen.answer(condition)
}

/// Why nothing was sent. That credentials could not be fetched just now is not the same as having none.
fn unsent(answered: &Answered, kind: ErrorKind, why: &str) -> Error {
    match &answered.side_failure {
        Some(failure) => Error::unavailable(format!("no credentials: {failure}")),
        None => {
            let what = "the request could not be sent (are there credentials?)";
            Error::new(kind, format!("{what}: {why}"))
        }
    }
}

fn first_line(error: &opendal::Error) -> String {
    let mut text = error.message().to_owned();
    let mut source = std::error::Error::source(error);
    while let Some(inner) = source {
        text = format!("{text}: {inner}");
        source = inner.source();
    }
    text.lines().next().unwrap_or_default().to_owned()
}

fn tells_nothing(key: &Key) -> Error {
    Error::new(ErrorKind::Unsupported, "the store tells nothing of the object").at(key)
}

/// For reads: everything that is not an answer is an error.
fn read_error(answer: Answer, key: Option<&Key>) -> Error {
    let error = match answer {
        Answer::Unanswered(error) | Answer::Failed(error) => error,
        Answer::Contended => Error::unavailable("the store is busy with this object"),
        other => Error::new(ErrorKind::Internal, format!("unexpected answer to a read: {other:?}")),
    };
    match key {
        Some(key) => error.at(key),
        None => error,
    }
}

/// What a read came to that was no success.
fn not_got(answer: Answer, conditional: bool, key: &Key) -> Result<Get> {
    match answer {
        Answer::Missing => Ok(Get::Absent),
        Answer::NotModified => Ok(Get::Unchanged),
        Answer::Refused if conditional => Ok(Get::Unchanged),
        other => Err(read_error(other, Some(key))),
    }
}

/// The same of a write.
fn not_stored(answer: Answer, key: &Key) -> Result<Put> {
    match answer {
        Answer::Refused => Ok(Put::Refused),
        Answer::Contended => Ok(Put::Contended),
        Answer::Unanswered(error) => Ok(Put::Unknown(Unknown::NoAnswer(error.at(key)))),
        Answer::Missing | Answer::NotModified => Err(Error::invalid(
            "the bucket does not exist: check its name, the region and the endpoint",
        )),
        Answer::Failed(error) => Err(error.at(key)),
    }
}

/// The same of a delete.
fn not_deleted(answer: Answer, key: &Key) -> Result<Delete> {
    match answer {
        Answer::Refused => Ok(Delete::Refused),
        Answer::Missing | Answer::NotModified => Ok(Delete::Deleted),
        Answer::Contended => Ok(Delete::Contended),
        Answer::Unanswered(error) => Ok(Delete::Unknown(Unknown::NoAnswer(error.at(key)))),
        Answer::Failed(error) => Err(error.at(key)),
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
        let (context, answered) = self.operation();
        let capability = self.service.capability_dyn();
        let options = options::ListOptions {
            limit: capability.list_with_limit.then_some(list.page),
            start_after: list.start_after.clone().filter(|_| capability.list_with_start_after),
            recursive: !list.delimited,
            ..options::ListOptions::default()
        };
        let path = if list.prefix.is_empty() { "/" } else { &list.prefix };
        let lister = self.service.list_dyn(&context, path, OpList::from(options));
        Box::new(CloudLister {
            lister: lister.map_err(|error| first_line(&error)),
            answered,
            generations: self.uses_generations(),
            list,
            partial: Page::default(),
            done: false,
        })
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

struct CloudLister {
    lister: Result<oio::Lister, String>,
    answered: Arc<Mutex<Answered>>,
    generations: bool,
    list: List,
    /// What of the current page has arrived: kept when fetching more of it fails.
    partial: Page,
    done: bool,
}

impl CloudLister {
    fn add(&mut self, path: &str, meta: &Metadata) {
        // What is not asked for is dropped here: Azure ignores the entry point, and SeaweedFS has
        // been seen to list siblings of a prefix.
        let after = self.list.start_after.as_deref();
        let version = if self.generations { meta.version() } else { meta.etag() };
        if path.ends_with('/') {
            // A folder marker has a version, a common prefix has none.
            let wanted = self.list.delimited
                && version.is_none()
                && path.starts_with(&self.list.prefix)
                && after.is_none_or(|after| path > after || after.starts_with(path));
            if wanted && self.partial.prefixes.last().is_none_or(|last| last != path) {
                self.partial.prefixes.push(path.to_owned());
            }
            return;
        }
        if !self.list.includes(path) {
            return;
        }
        // Other tools may have put objects here that are not for us.
        let Ok(key) = Key::new(path) else { return };
        self.partial.entries.push(Entry {
            key,
            size: Some(meta.content_length()),
            modified: modified(meta),
            version: version.map(|text| Version::new(text.trim_matches('"'))),
        });
    }
}

#[async_trait]
impl Lister for CloudLister {
    async fn next_page(&mut self) -> Result<Option<Page>> {
        if self.done {
            return Ok(None);
        }
        while self.partial.len() < self.list.page {
            let lister = match &mut self.lister {
                Ok(lister) => lister,
                Err(error) => return Err(Error::new(ErrorKind::Data, error.clone())),
            };
            match lister.next().await {
                Ok(Some(entry)) => {
                    let (path, meta) = entry.into_parts();
                    self.add(&path, &meta);
                }
                Ok(None) => {
                    self.done = true;
                    break;
                }
                Err(error) => {
                    // A page that came but cannot be read: OpenDAL would go on behind it.
                    let status =
                        self.answered.lock().unwrap_or_else(PoisonError::into_inner).seen.status;
                    if (200..300).contains(&status) && !error.is_temporary() {
                        let message = format!("the listing cannot be read: {}", first_line(&error));
                        self.lister = Err(message.clone());
                        return Err(Error::new(ErrorKind::Data, message));
                    }
                    return Err(match failed(&self.answered, &error, Condition::None) {
                        Answer::Missing => Error::invalid("the bucket does not exist"),
                        other => read_error(other, None),
                    });
                }
            }
        }
        let mut page = std::mem::take(&mut self.partial);
        page.now = self.answered.lock().unwrap_or_else(PoisonError::into_inner).date;
        Ok(Some(page))
    }
}
