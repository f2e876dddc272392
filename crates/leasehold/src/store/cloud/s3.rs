//! Single objects on S3, without a detour.
//!
//! To read, write or delete one object is what everything above does all day. By way of OpenDAL that
//! takes twice the processor time of the request itself, for the sake of what is not needed here; so
//! these requests are built and signed in this file. Listings, batches, uploads in parts and S3
//! Express, whose sessions are an affair of their own, are OpenDAL's.
//!
//! The signature covers all that decides what a request does, its condition included, and not the
//! body, like OpenDAL's.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_LENGTH, HOST, HeaderName, IF_MATCH, IF_NONE_MATCH};
use http::{HeaderMap, HeaderValue, Method, Request, Uri};
use http_body_util::Full;
use leasehold_protocol::cas::{Version, When};
use leasehold_protocol::key::Key;
use leasehold_protocol::time::StoreTime;
use opendal::HttpTransporter;
use reqsign_aws_v4::{Credential, DefaultCredentialProvider, StaticCredentialProvider};
use reqsign_core::hash::{hex_hmac_sha256, hex_sha256, hmac_sha256};
use reqsign_core::time::Timestamp;
use reqsign_core::{
    Context, OsEnv, ProvideCredential as _, ProvideCredentialChain, SigningCredential as _,
};

use super::answer::{Answer, Condition, Seen};
use super::connect::{Target, host_of};
use super::transport::{Answered, Observed, Reply, Transport, header};
use super::{CloudOptions, condition_of, etag, not_deleted, not_got, not_stored, read_error};
use crate::store::meter::Class;
use crate::store::types::{Delete, Get, Meta, Object, Put};
use crate::{Error, ErrorKind, Result};

const UNSIGNED: &str = "UNSIGNED-PAYLOAD";
const X_AMZ_CONTENT: HeaderName = HeaderName::from_static("x-amz-content-sha256");
const X_AMZ_DATE: HeaderName = HeaderName::from_static("x-amz-date");
const X_AMZ_TOKEN: HeaderName = HeaderName::from_static("x-amz-security-token");

/// The objects of a bucket, below a prefix.
#[derive(Debug)]
pub struct Objects {
    transport: Arc<Transport>,
    to: Target,
    host: HeaderValue,
    /// What comes before a key in the path of its URL.
    base: String,
    /// `None` if requests are not to be signed.
    keys: Option<Keys>,
}

impl Objects {
    /// `None` where this takes more than is done here.
    pub fn new(
        transport: &Arc<Transport>,
        bucket: &str,
        prefix: &str,
        options: &CloudOptions,
    ) -> Option<Self> {
        if bucket.ends_with("--x-s3") {
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
        let keys = (!options.anonymous).then(|| Keys::new(options, region));
        let host = to.to_string().try_into().ok()?;
        Some(Self { transport: transport.clone(), to, host, base, keys })
    }

    /// The object, or that it is still this version.
    pub async fn get(&self, key: &Key, unless: Option<&Version>) -> Result<Get> {
        let known = unless.map(|version| (IF_NONE_MATCH, etag(version)));
        // "Not modified" can come as a 412 too.
        match self.ask(Class::Get, Method::GET, key, known, None).await {
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
        match self.ask(Class::Head, Method::HEAD, key, None, None).await {
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

    pub async fn put(&self, key: &Key, body: Bytes, when: &When) -> Result<Put> {
        let condition = match when {
            When::Any => None,
            When::Absent => Some((IF_NONE_MATCH, "*".to_owned())),
            When::Matches(version) => Some((IF_MATCH, etag(version))),
        };
        match self.ask(Class::Put, Method::PUT, key, condition, Some(body)).await {
            Ok(mut reply) => {
                reply.body.skip().await;
                Ok(Put::Stored(version(&reply.headers, key)?))
            }
            Err(failed) => not_stored(failed.answer(condition_of(when)), key),
        }
    }

    pub async fn delete(&self, key: &Key, version: Option<&Version>) -> Result<Delete> {
        let condition = version.map(|version| (IF_MATCH, etag(version)));
        match self.ask(Class::Delete, Method::DELETE, key, condition, None).await {
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
        class: Class,
        method: Method,
        key: &Key,
        condition: Option<(HeaderName, String)>,
        body: Option<Bytes>,
    ) -> Result<Reply, Failed> {
        let (request, signing) = self.request(method, key, condition, body).await?;
        match self.transport.exchange(class, &self.to, request).await {
            Ok(reply) if reply.status.is_success() => Ok(reply),
            Ok(mut reply) => {
                Box::pin(reply.explain()).await;
                if let (Some(keys), Some(signing)) = (&self.keys, signing)
                    && reply.seen.refuses_credentials()
                {
                    keys.forget(&signing.credential);
                }
                Err(Failed::Answered(reply.seen))
            }
            Err(failure) => Err(Failed::Answered(Seen { failure, ..Seen::default() })),
        }
    }

    async fn request(
        &self,
        method: Method,
        key: &Key,
        condition: Option<(HeaderName, String)>,
        body: Option<Bytes>,
    ) -> Result<(Request<Full<Bytes>>, Option<Arc<Signing>>), Failed> {
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
            headers.add(name, value.try_into().map_err(unsendable)?);
        }
        let mut signing = None;
        if let Some(keys) = &self.keys {
            let current = match keys.current() {
                Some(current) => current,
                // Boxed: once a second, and all others would carry its state along.
                None => Box::pin(keys.fetch(&self.transport)).await?,
            };
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

fn unsendable(error: impl std::fmt::Display) -> Failed {
    Failed::Unsent(Error::invalid(format!("this cannot be put into a request: {error}")))
}

fn version(headers: &HeaderMap, key: &Key) -> Result<Version> {
    match header(headers, "etag") {
        Some(etag) => Ok(Version::new(etag.trim_matches('"'))),
        None => {
            let message = "the store does not tell the object's version";
            Err(Error::new(ErrorKind::Unsupported, message).at(key))
        }
    }
}

fn meta(headers: &HeaderMap, size: u64, date: Option<StoreTime>, key: &Key) -> Result<Meta> {
    let modified = header(headers, "last-modified").and_then(StoreTime::from_http_date);
    let Some(modified) = modified else {
        let message = "the store does not tell when it was written";
        return Err(Error::new(ErrorKind::Unsupported, message).at(key));
    };
    // Without a Date there is no store clock; the doctor says so. An age of zero is the safe side:
    // nothing looks stale.
    let now = date.unwrap_or(modified);
    Ok(Meta { version: version(headers, key)?, modified, now, size })
}

/// The URL of a bucket, as OpenDAL makes it of the same options.
fn bucket_url(bucket: &str, options: &CloudOptions, region: &str) -> String {
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

/// Where credentials come from: as given, or as Amazon's tools find them.
pub fn credentials(options: &CloudOptions) -> ProvideCredentialChain<Credential> {
    if let (Some(access), Some(secret)) = (&options.access_key, &options.secret_key) {
        let mut given = StaticCredentialProvider::new(access, secret);
        if let Some(token) = &options.session_token {
            given = given.with_session_token(token);
        }
        return ProvideCredentialChain::new().push(given);
    }
    let mut usual = DefaultCredentialProvider::builder();
    if let Some(profile) = &options.profile {
        usual = usual.with_profile(profile);
    }
    if options.endpoint.is_some() {
        usual = usual.no_imds();
    }
    ProvideCredentialChain::new().push(usual.build())
}

/// Headers of a request, and how the signature wants them.
#[derive(Default)]
struct Headers {
    map: HeaderMap,
    canonical: String,
    names: String,
}

impl Headers {
    fn add(&mut self, name: HeaderName, value: HeaderValue) {
        if !self.names.is_empty() {
            self.names.push(';');
        }
        self.names.push_str(name.as_str());
        self.canonical.push_str(name.as_str());
        self.canonical.push(':');
        // Ours are all text.
        self.canonical.push_str(value.to_str().unwrap_or_default());
        self.canonical.push('\n');
        self.map.insert(name, value);
    }
}

/// Credentials, and what was made of them for the present second.
#[derive(Debug)]
struct Keys {
    provider: ProvideCredentialChain<Credential>,
    region: String,
    newest: Mutex<Option<Arc<Signing>>>,
    /// Held while credentials are fetched: one of those who need them does it for all.
    fetching: tokio::sync::Mutex<Option<Kept>>,
}

/// A credential that may do for many seconds.
#[derive(Debug)]
struct Kept {
    credential: Credential,
    /// In seconds: when a better one may be asked for.
    again: i64,
}

/// For how long a credential has to be good, to be used while there is none that lasts longer.
const SPARE: Duration = Duration::from_secs(5);

/// How long a request waits for a new credential while the old one is good, and how long nobody asks
/// again, in seconds: those who give them out are slow or down, and the bucket is not.
const PATIENCE: Duration = Duration::from_secs(5);
const PAUSE: i64 = 10;

impl Keys {
    fn new(options: &CloudOptions, region: String) -> Self {
        let (provider, newest) = (credentials(options), Mutex::default());
        Self { provider, region, newest, fetching: tokio::sync::Mutex::default() }
    }

    /// What signs requests of this second, if there is something.
    fn current(&self) -> Option<Arc<Signing>> {
        let newest = self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        newest.as_ref().filter(|newest| newest.second == second()).cloned()
    }

    async fn fetch(&self, transport: &Arc<Transport>) -> Result<Arc<Signing>, Failed> {
        let mut kept = self.fetching.lock().await;
        if let Some(signing) = self.current() {
            return Ok(signing);
        }
        let credential = Self::renewed(&mut kept, self.provide(transport)).await?;
        let mut newest = self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        let signing = Arc::new(Signing::new(credential, &self.region, newest.as_deref())?);
        *newest = Some(signing.clone());
        Ok(signing)
    }

    /// The credential that is kept, or a new one if that does not last long any more: two minutes. If
    /// none can be had, the old one for as long as it is good.
    async fn renewed(
        kept: &mut Option<Kept>,
        provide: impl Future<Output = Result<Credential, Failed>>,
    ) -> Result<Credential, Failed> {
        let now = Timestamp::now();
        let again = now.as_second() + PAUSE;
        let Some(old) = kept.as_mut().filter(|old| old.credential.is_valid_at(now + SPARE)) else {
            let credential = provide.await?;
            *kept = Some(Kept { credential: credential.clone(), again });
            return Ok(credential);
        };
        if !old.credential.is_valid() && old.again <= now.as_second() {
            match tokio::time::timeout(PATIENCE, provide).await {
                Ok(Ok(credential)) => old.credential = credential,
                _ => tracing::warn!("no new credentials for the bucket: the old ones expire soon"),
            }
            old.again = again;
        }
        Ok(old.credential.clone())
    }

    /// The store refuses this one, whatever it says of itself: the next request fetches one anew.
    fn forget(&self, refused: &Credential) {
        let is_refused = |credential: &Credential| {
            credential.access_key_id == refused.access_key_id
                && credential.session_token == refused.session_token
        };
        // If somebody is fetching, a new one comes anyway.
        if let Ok(mut kept) = self.fetching.try_lock() {
            kept.take_if(|kept| is_refused(&kept.credential));
        }
        let mut newest = self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        newest.take_if(|newest| is_refused(&newest.credential));
    }

    async fn provide(&self, transport: &Arc<Transport>) -> Result<Credential, Failed> {
        let answered = Arc::new(Mutex::new(Answered::default()));
        let observed =
            Observed { transport: transport.clone(), answered: answered.clone(), generation: None };
        let context = context(&HttpTransporter::new(observed));
        let why = match self.provider.provide_credential(&context).await {
            Ok(Some(credential)) => return Ok(credential),
            Ok(None) => "none were found".to_owned(),
            Err(error) => error.to_string(),
        };
        // They could not be fetched just now: that is not the same as having none.
        let answered = answered.lock().unwrap_or_else(PoisonError::into_inner);
        Err(Failed::Unsent(match &answered.side_failure {
            Some(failure) => Error::unavailable(format!("no credentials: {failure}")),
            None => Error::new(
                ErrorKind::Denied,
                format!("the request could not be sent (are there credentials?): {why}"),
            ),
        }))
    }
}

/// What the search for credentials may use.
pub fn context(transport: &HttpTransporter) -> Context {
    Context::new()
        .with_file_read(reqsign_file_read_tokio::TokioFileRead)
        .with_http_send(transport.clone())
        .with_env(OsEnv)
}

/// The machine's own time, as OpenDAL takes it: a store judges a signature by it, and nothing else
/// depends on it.
fn second() -> i64 {
    Timestamp::now().as_second()
}

/// What signs the requests of one second.
struct Signing {
    second: i64,
    credential: Credential,
    /// The second, `20261115T094157Z`, as text and as a header.
    date: String,
    date_header: HeaderValue,
    token: Option<HeaderValue>,
    /// `20261115/us-east-1/s3/aws4_request`
    scope: String,
    /// Good for a day.
    key: Vec<u8>,
}

impl std::fmt::Debug for Signing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Secrets stay out of logs.
        f.debug_struct("Signing").field("scope", &self.scope).finish_non_exhaustive()
    }
}

impl Signing {
    /// For now; the key is `before`'s if that is of the same day and credential.
    fn new(credential: Credential, region: &str, before: Option<&Self>) -> Result<Self, Failed> {
        let second = second();
        let now = Timestamp::from_second(second).map_err(unsendable)?;
        let date = now.format_iso8601();
        let scope = format!("{}/{region}/s3/aws4_request", now.format_date());
        let secret = &credential.secret_access_key;
        let same = |before: &&Self| {
            before.scope == scope && before.credential.secret_access_key == *secret
        };
        let key = match before.filter(same) {
            Some(before) => before.key.clone(),
            None => scope.split('/').fold(format!("AWS4{secret}").into_bytes(), |key, part| {
                hmac_sha256(&key, part.as_bytes())
            }),
        };
        let token = credential.session_token.as_deref().map(HeaderValue::from_str);
        let mut token = token.transpose().map_err(unsendable)?;
        token.iter_mut().for_each(|token| token.set_sensitive(true));
        let date_header = HeaderValue::from_str(&date).map_err(unsendable)?;
        Ok(Self { second, credential, date, date_header, token, scope, key })
    }

    /// Adds what makes the request ours. All headers that are there are signed.
    fn sign(&self, method: &Method, path: &str, headers: &mut Headers) -> Result<(), Failed> {
        headers.add(X_AMZ_CONTENT, HeaderValue::from_static(UNSIGNED));
        headers.add(X_AMZ_DATE, self.date_header.clone());
        if let Some(token) = &self.token {
            headers.add(X_AMZ_TOKEN, token.clone());
        }
        let Headers { map, canonical, names } = headers;
        let request = [method.as_str(), "\n", path, "\n\n", canonical, "\n", names, "\n", UNSIGNED];
        let hash = hex_sha256(request.concat().as_bytes());
        let Self { credential, date, scope, key, .. } = self;
        let to_sign = ["AWS4-HMAC-SHA256\n", date, "\n", scope, "\n", &hash].concat();
        let signature = hex_hmac_sha256(key, to_sign.as_bytes());
        let access = &credential.access_key_id;
        let words = ["AWS4-HMAC-SHA256 Credential=", access, "/", scope, ", SignedHeaders=", names];
        let value = [&words.concat(), ", Signature=", &signature].concat();
        let mut value = HeaderValue::try_from(value).map_err(unsendable)?;
        value.set_sensitive(true);
        map.insert(AUTHORIZATION, value);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
