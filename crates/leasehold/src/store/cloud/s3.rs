//! Single objects on S3, without a detour.
//!
//! To read, write or delete one object is what everything above does all day. By way of OpenDAL that
//! takes twice the processor time of the request itself, for the sake of what is not needed here; so
//! these requests are built and signed in this file. Listings, batches, uploads in parts and S3
//! Express, whose sessions are an affair of their own, are OpenDAL's.
//!
//! The signature covers all that decides what a request does, its condition included, and not the
//! body, like OpenDAL's.

use std::fmt::Write as _;
use std::sync::{Arc, Mutex, PoisonError};

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
use super::connect::Target;
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
        Some(Self { transport: transport.clone(), host: to.host()?, to, base, keys })
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
            Ok(reply) => Ok(Put::Stored(version(&reply.headers, key)?)),
            Err(failed) => not_stored(failed.answer(condition_of(when)), key),
        }
    }

    pub async fn delete(&self, key: &Key, version: Option<&Version>) -> Result<Delete> {
        let condition = version.map(|version| (IF_MATCH, etag(version)));
        match self.ask(Class::Delete, Method::DELETE, key, condition, None).await {
            Ok(_) => Ok(Delete::Deleted),
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
        let request = self.request(method, key, condition, body).await?;
        match self.transport.exchange(class, &self.to, request).await {
            Ok(reply) if reply.status.is_success() => Ok(reply),
            Ok(mut reply) => {
                reply.explain().await;
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
    ) -> Result<Request<Full<Bytes>>, Failed> {
        let mut path = String::with_capacity(self.base.len() + key.as_str().len() + 8);
        path.push_str(&self.base);
        push_encoded(&mut path, key.as_str());
        let mut headers = HeaderMap::with_capacity(10);
        if let Some(body) = &body {
            headers.insert(CONTENT_LENGTH, body.len().into());
        }
        headers.insert(HOST, self.host.clone());
        if let Some((name, value)) = condition {
            headers.insert(name, value.try_into().map_err(unsendable)?);
        }
        if let Some(keys) = &self.keys {
            // The machine's own time, as OpenDAL takes it: a store judges a signature by it, and
            // nothing else depends on it.
            let now = Timestamp::now().format_iso8601();
            let signing = match keys.current(&now) {
                Some(signing) => signing,
                None => keys.fetch(&self.transport, &now).await?,
            };
            signing.sign(&method, &path, &mut headers, now)?;
        }
        let mut request = Request::new(Full::new(body.unwrap_or_default()));
        *request.method_mut() = method;
        *request.uri_mut() = path.try_into().map_err(unsendable)?;
        *request.headers_mut() = headers;
        Ok(request)
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
    url = url.replace(&format!("//{bucket}."), "//").trim_end_matches('/').to_owned();
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

/// Credentials, and the key that was made of them for today.
#[derive(Debug)]
struct Keys {
    provider: ProvideCredentialChain<Credential>,
    region: String,
    newest: Mutex<Option<Arc<Signing>>>,
    /// Held while credentials are fetched: one of those who need them does it for all.
    fetching: tokio::sync::Mutex<()>,
}

impl Keys {
    fn new(options: &CloudOptions, region: String) -> Self {
        let provider = credentials(options);
        Self { provider, region, newest: Mutex::default(), fetching: tokio::sync::Mutex::default() }
    }

    /// The key for requests of this time, if it is known and does not expire yet.
    fn current(&self, now: &str) -> Option<Arc<Signing>> {
        let newest = self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        let newest = newest.as_ref()?;
        let lasts = newest.credential.expires_in.is_none() || newest.credential.is_valid();
        (lasts && newest.scope.starts_with(&now[..8])).then(|| newest.clone())
    }

    async fn fetch(&self, transport: &Arc<Transport>, now: &str) -> Result<Arc<Signing>, Failed> {
        let _fetching = self.fetching.lock().await;
        if let Some(signing) = self.current(now) {
            return Ok(signing);
        }
        let answered = Arc::new(Mutex::new(Answered::default()));
        let observed =
            Observed { transport: transport.clone(), answered: answered.clone(), generation: None };
        let context = context(&HttpTransporter::new(observed));
        let found = self.provider.provide_credential(&context).await;
        let why = match found {
            Ok(Some(credential)) => {
                let signing = Arc::new(Signing::new(credential, &self.region, now)?);
                let mut newest = self.newest.lock().unwrap_or_else(PoisonError::into_inner);
                *newest = Some(signing.clone());
                return Ok(signing);
            }
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

/// A credential, and the key that is made of it for one day.
struct Signing {
    credential: Credential,
    /// `20261115/us-east-1/s3/aws4_request`
    scope: String,
    key: Vec<u8>,
    token: Option<HeaderValue>,
}

impl std::fmt::Debug for Signing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Secrets stay out of logs.
        f.debug_struct("Signing").field("scope", &self.scope).finish_non_exhaustive()
    }
}

impl Signing {
    fn new(credential: Credential, region: &str, now: &str) -> Result<Self, Failed> {
        let scope = format!("{}/{region}/s3/aws4_request", &now[..8]);
        let mut key = format!("AWS4{}", credential.secret_access_key).into_bytes();
        for part in scope.split('/') {
            key = hmac_sha256(&key, part.as_bytes());
        }
        let token = credential.session_token.as_deref().map(HeaderValue::from_str);
        let mut token = token.transpose().map_err(unsendable)?;
        token.iter_mut().for_each(|token| token.set_sensitive(true));
        Ok(Self { credential, scope, key, token })
    }

    /// Adds what makes the request ours. All headers that are there are signed.
    fn sign(
        &self,
        method: &Method,
        path: &str,
        headers: &mut HeaderMap,
        now: String,
    ) -> Result<(), Failed> {
        headers.insert(X_AMZ_CONTENT, HeaderValue::from_static(UNSIGNED));
        headers.insert(X_AMZ_DATE, HeaderValue::from_str(&now).map_err(unsendable)?);
        if let Some(token) = &self.token {
            headers.insert(X_AMZ_TOKEN, token.clone());
        }
        let mut canonical = String::with_capacity(512);
        let mut names = String::with_capacity(96);
        let _ = write!(canonical, "{method}\n{path}\n\n");
        // In the order of their names.
        for name in [
            &CONTENT_LENGTH,
            &HOST,
            &IF_MATCH,
            &IF_NONE_MATCH,
            &X_AMZ_CONTENT,
            &X_AMZ_DATE,
            &X_AMZ_TOKEN,
        ] {
            let Some(value) = headers.get(name) else { continue };
            let value = value.to_str().map_err(unsendable)?;
            let _ = writeln!(canonical, "{name}:{value}");
            if !names.is_empty() {
                names.push(';');
            }
            names.push_str(name.as_str());
        }
        let _ = write!(canonical, "\n{names}\n{UNSIGNED}");
        let Self { credential, scope, key, .. } = self;
        let hash = hex_sha256(canonical.as_bytes());
        let to_sign = format!("AWS4-HMAC-SHA256\n{now}\n{scope}\n{hash}");
        let signature = hex_hmac_sha256(key, to_sign.as_bytes());
        let access = &credential.access_key_id;
        let mut value: HeaderValue = format!(
            "AWS4-HMAC-SHA256 Credential={access}/{scope}, SignedHeaders={names}, Signature={signature}"
        )
        .try_into()
        .map_err(unsendable)?;
        value.set_sensitive(true);
        headers.insert(AUTHORIZATION, value);
        Ok(())
    }
}
