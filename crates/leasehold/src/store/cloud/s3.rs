//! Single objects on S3, without a detour.
//!
//! To read, write or delete one object is what everything above does all day. By way of OpenDAL that
//! takes twice the processor time of the request itself, for the sake of what is not needed here; so
//! these requests are built in this file. Listings, batches, uploads in parts and S3 Express, whose
//! sessions are an affair of their own, are OpenDAL's.
//!
//! All of them, Express aside, are signed with what `keys` has, when their turn has come: so no
//! signature grows old in the line. It covers all that decides what a request does, its condition
//! included, and not the body, like OpenDAL's.

mod keys;

use std::sync::Arc;

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, HOST, HeaderName, IF_MATCH, IF_NONE_MATCH};
use http::{HeaderMap, HeaderValue, Method, Request, Uri};
use http_body_util::Full;
use leasehold_protocol::cas::{Version, When};
use leasehold_protocol::key::Key;
use leasehold_protocol::time::StoreTime;

use self::keys::Headers;
pub use self::keys::{Keys, Signing, credentials};
use super::CloudOptions;
use super::answer::{Answer, Condition, Seen};
use super::connect::{Target, host_of};
use super::outcome::{
    condition_of, etag, meta_of, not_deleted, not_got, not_stored, read_error, stored,
};
use super::transport::{Reply, Transport, Urgency, header};
use crate::store::meter::Class;
use crate::store::types::{Delete, Get, Meta, Object, Put};
use crate::{Error, Result};

/// Whether a bucket is of S3 Express.
pub fn is_express(bucket: &str) -> bool {
    bucket.ends_with("--x-s3")
}

/// The objects of a bucket, below a prefix.
#[derive(Debug)]
pub struct Objects {
    transport: Arc<Transport>,
    to: Target,
    host: HeaderValue,
    /// What comes before a key in the path of its URL.
    base: String,
    /// `None` if requests are not to be signed.
    keys: Option<Arc<Keys>>,
}

impl Objects {
    /// `None` where this takes more than is done here.
    pub fn new(
        transport: &Arc<Transport>,
        bucket: &str,
        prefix: &str,
        options: &CloudOptions,
        keys: Option<Arc<Keys>>,
    ) -> Option<Self> {
        if is_express(bucket) {
            return None;
        }
        let region = options.signing_region().ok()?;
        let url: Uri = bucket_url(bucket, options, &region).parse().ok()?;
        if url.query().is_some() {
            return None;
        }
        let to = Target::of(&url)?;
        let mut base = url.path().trim_end_matches('/').to_owned() + "/";
        if !prefix.is_empty() {
            push_encoded(&mut base, prefix);
            base.push('/');
        }
        let host = to.to_string().try_into().ok()?;
        Some(Self { transport: transport.clone(), to, host, base, keys })
    }

    /// The object, or that it is still this version.
    pub async fn get(&self, key: &Key, unless: Option<&Version>) -> Result<Get> {
        let known = unless.map(|version| (IF_NONE_MATCH, etag(version)));
        // "Not modified" can come as a 412 too.
        match self.ask(Method::GET, key, known, None, Urgency::InLine).await {
            Ok(mut reply) => match reply.body.read_all().await {
                Ok(body) => {
                    let meta = meta(&reply.headers, body.len() as u64, reply.date, key)?;
                    Ok(Get::Found(Object { body, meta }))
                }
                // It came, but not all of it.
                Err(failure) => {
                    let seen = Seen { failure: failure.to_string(), ..reply.seen };
                    Err(read_error(seen.answer(Condition::None), Some(key)))
                }
            },
            Err(failed) => not_got(failed.answer(Condition::Absent), unless.is_some(), key),
        }
    }

    /// What the store tells of the object.
    pub async fn head(&self, key: &Key) -> Result<Option<Meta>> {
        match self.ask(Method::HEAD, key, None, None, Urgency::InLine).await {
            Ok(reply) => {
                let size = header(&reply.headers, "content-length").and_then(|n| n.parse().ok());
                meta(&reply.headers, size.unwrap_or(0), reply.date, key).map(Some)
            }
            Err(failed) => match failed.answer(Condition::None) {
                Answer::Missing => Ok(None),
                other => Err(read_error(other, Some(key))),
            },
        }
    }

    pub async fn put(&self, key: &Key, body: Bytes, when: &When, urgency: Urgency) -> Result<Put> {
        let condition = match when {
            When::Any => None,
            When::Absent => Some((IF_NONE_MATCH, "*".to_owned())),
            When::Matches(version) => Some((IF_MATCH, etag(version))),
        };
        match self.ask(Method::PUT, key, condition, Some(body), urgency).await {
            Ok(mut reply) => {
                reply.body.skip().await;
                Ok(stored(version(&reply.headers), key))
            }
            Err(failed) => not_stored(failed.answer(condition_of(when)), key),
        }
    }

    pub async fn delete(&self, key: &Key, version: Option<&Version>) -> Result<Delete> {
        let condition = version.map(|version| (IF_MATCH, etag(version)));
        match self.ask(Method::DELETE, key, condition, None, Urgency::InLine).await {
            Ok(mut reply) => {
                reply.body.skip().await;
                Ok(Delete::Deleted)
            }
            Err(failed) => {
                let condition = match version {
                    Some(_) => Condition::Matches,
                    None => Condition::None,
                };
                not_deleted(failed.answer(condition), key)
            }
        }
    }

    /// The answer to a request, if that is a success.
    async fn ask(
        &self,
        method: Method,
        key: &Key,
        condition: Option<(HeaderName, String)>,
        body: Option<Bytes>,
        urgency: Urgency,
    ) -> Result<Reply, Failed> {
        let condition = match condition {
            Some((name, value)) => Some((name, HeaderValue::try_from(value).map_err(unsendable)?)),
            None => None,
        };
        let class = class_of(&method);
        let mut refused = false;
        loop {
            let admitted = self.transport.admit(class, urgency).await;
            let (method, condition, body) = (method.clone(), condition.clone(), body.clone());
            let (request, signing) = self.request(method, key, condition, body).await?;
            let seen = match self.transport.exchange(admitted, &self.to, request).await {
                Ok(reply) if reply.status.is_success() => return Ok(reply),
                Ok(mut reply) => {
                    Box::pin(reply.explain()).await;
                    reply.seen
                }
                Err(failure) => Seen { failure, ..Seen::default() },
            };
            // Whoever is not known to the store has had nothing carried out: nothing is doubled.
            if let (Some(keys), Some(signing)) = (&self.keys, signing)
                && seen.refuses_credentials()
                && !refused
                && Box::pin(keys.has_other(&signing.credential)).await?
            {
                refused = true;
                self.transport.note_retry();
                continue;
            }
            return Err(Failed::Answered(seen));
        }
    }

    async fn request(
        &self,
        method: Method,
        key: &Key,
        condition: Option<(HeaderName, HeaderValue)>,
        body: Option<Bytes>,
    ) -> Result<(Request<Full<Bytes>>, Option<Arc<Signing>>)> {
        let mut path = String::with_capacity(self.base.len() + key.as_str().len() + 8);
        path.push_str(&self.base);
        push_encoded(&mut path, key.as_str());
        // In the order of their names, which the signature wants.
        let mut headers = Headers::default();
        if let Some(body) = &body {
            headers.add(CONTENT_LENGTH, body.len().into());
        }
        headers.add(HOST, self.host.clone());
        if let Some((name, value)) = condition {
            headers.add(name, value);
        }
        let mut signing = None;
        if let Some(keys) = &self.keys {
            let current = keys.signing().await?;
            current.sign(&method, &path, &mut headers)?;
            signing = Some(current);
        }
        let mut request = Request::new(Full::new(body.unwrap_or_default()));
        *request.method_mut() = method;
        *request.uri_mut() = path.try_into().map_err(unsendable)?;
        *request.headers_mut() = headers.map;
        Ok((request, signing))
    }
}

/// Why there is no success.
enum Failed {
    /// What came back, or that nothing did.
    Answered(Seen),
    /// Nothing was sent.
    Unsent(Error),
}

impl Failed {
    fn answer(self, condition: Condition) -> Answer {
        match self {
            Self::Answered(seen) => seen.answer(condition),
            Self::Unsent(error) => Answer::Failed(error),
        }
    }
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Self::Unsent(error)
    }
}

fn unsendable(error: impl std::fmt::Display) -> Error {
    Error::invalid(format!("this cannot be put into a request: {error}"))
}

fn class_of(method: &Method) -> Class {
    match *method {
        Method::GET => Class::Get,
        Method::HEAD => Class::Head,
        Method::DELETE => Class::Delete,
        _ => Class::Put,
    }
}

fn version(headers: &HeaderMap) -> Option<Version> {
    header(headers, "etag").map(|etag| Version::new(etag.trim_matches('"')))
}

fn meta(headers: &HeaderMap, size: u64, date: Option<StoreTime>, key: &Key) -> Result<Meta> {
    let modified = header(headers, "last-modified").and_then(StoreTime::from_http_date);
    meta_of(version(headers), modified, size, date, key)
}

/// The URL of a bucket, as OpenDAL makes it of the same options.
pub fn bucket_url(bucket: &str, options: &CloudOptions, region: &str) -> String {
    let endpoint = options.s3_endpoint();
    let mut url = match endpoint.starts_with("http") {
        true => endpoint.to_owned(),
        false => format!("https://{endpoint}"),
    };
    url = url.replace(&format!("//{bucket}."), "//");
    if let Ok(uri) = url.parse::<Uri>()
        && uri.query().is_none()
        && let (Some(scheme), Some(host)) = (uri.scheme_str(), host_of(&uri))
    {
        url = format!("{scheme}://{}{}", host.to_ascii_lowercase(), uri.path());
    }
    url.truncate(url.trim_end_matches('/').len());
    if url == "https://s3.amazonaws.com" {
        url = format!("https://s3.{region}.amazonaws.com");
    }
    match options.uses_path_style(bucket) {
        true => format!("{url}/{bucket}"),
        false => url.replacen("//", &format!("//{bucket}."), 1),
    }
}

/// Escapes what the signature wants to be escaped: so path and signature are about the same.
fn push_encoded(path: &mut String, text: &str) {
    const HEX: &[u8; 16] = b"0123456789ABCDEF";
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => {
                path.push(byte.into());
            }
            _ => {
                path.push('%');
                path.push(HEX[usize::from(byte >> 4)].into());
                path.push(HEX[usize::from(byte & 15)].into());
            }
        }
    }
}

#[cfg(test)]
mod tests;
