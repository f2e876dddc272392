//! Credentials for S3: found once for all requests, kept, fetched anew in time, and put under requests.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http::header::{AUTHORIZATION, HeaderName};
use http::{HeaderMap, HeaderValue, Method};
use opendal::HttpTransporter;
use reqsign_aws_v4::{
    Credential, DefaultCredentialProvider, RequestSigner, StaticCredentialProvider,
};
use reqsign_core::hash::{hex_hmac_sha256, hex_sha256, hmac_sha256};
use reqsign_core::time::Timestamp;
use reqsign_core::{
    Context, OsEnv, ProvideCredential as _, ProvideCredentialChain, SignRequest as _,
    SigningCredential as _,
};

use super::super::CloudOptions;
use super::super::outcome::unsent;
use super::super::transport::{Answered, Observed, Transport};
use super::unsendable;
use crate::{Error, ErrorKind, Result};

const UNSIGNED: &str = "UNSIGNED-PAYLOAD";
const X_AMZ_CONTENT: HeaderName = HeaderName::from_static("x-amz-content-sha256");
pub(super) const X_AMZ_DATE: HeaderName = HeaderName::from_static("x-amz-date");
pub(super) const X_AMZ_TOKEN: HeaderName = HeaderName::from_static("x-amz-security-token");

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

/// Whose requests these are, for all requests to a bucket.
#[derive(Debug)]
pub struct Keys {
    transport: Arc<Transport>,
    pub(super) provider: ProvideCredentialChain<Credential>,
    region: String,
    pub(super) state: Mutex<State>,
    /// Held while credentials are fetched: one of those who need them does it for all.
    fetching: tokio::sync::Mutex<()>,
}

/// A credential, and what was made of it for the present second.
#[derive(Debug, Default)]
pub(super) struct State {
    pub kept: Option<Kept>,
    pub newest: Option<Arc<Signing>>,
}

/// A credential that may do for many seconds.
#[derive(Debug)]
pub(super) struct Kept {
    pub credential: Credential,
    /// In seconds: when a better one may be asked for.
    pub again: i64,
}

/// For how long a credential has to be good, to be used while there is none that lasts longer.
const SPARE: Duration = Duration::from_secs(5);

/// How long a request waits for a new credential while the old one is good, and how long nobody asks
/// again, in seconds: those who give them out are slow or down, and the bucket is not.
const PATIENCE: Duration = Duration::from_secs(5);
const PAUSE: i64 = 10;

impl Kept {
    fn is_good(&self) -> bool {
        self.credential.is_valid_at(Timestamp::now() + SPARE)
    }

    /// Whether it lasts for long, which is two minutes; or there was none that lasts longer just now.
    fn will_do(&self) -> bool {
        self.credential.is_valid() || (self.is_good() && self.again > second())
    }
}

impl State {
    /// What signs requests of this second, if it can be had without asking anybody.
    fn at_hand(&mut self, region: &str) -> Result<Option<Arc<Signing>>> {
        if let Some(newest) = self.newest.as_ref().filter(|newest| newest.second == second()) {
            return Ok(Some(newest.clone()));
        }
        let Some(kept) = self.kept.as_ref().filter(|kept| kept.will_do()) else {
            return Ok(None);
        };
        let signing = Signing::new(kept.credential.clone(), region, self.newest.as_deref())?;
        Ok(Some(self.newest.insert(Arc::new(signing)).clone()))
    }
}

impl Keys {
    pub fn new(transport: &Arc<Transport>, options: &CloudOptions, region: String) -> Self {
        let (transport, provider) = (transport.clone(), credentials(options));
        let (state, fetching) = (Mutex::default(), tokio::sync::Mutex::default());
        Self { transport, provider, region, state, fetching }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What signs requests of this second.
    pub async fn signing(&self) -> Result<Arc<Signing>> {
        let at_hand = self.state().at_hand(&self.region)?;
        match at_hand {
            Some(signing) => Ok(signing),
            // Boxed: this is rare, and all others would carry its state along.
            None => Box::pin(self.fetch()).await,
        }
    }

    /// A new credential. If none can be had, the old one for as long as it is good.
    async fn fetch(&self) -> Result<Arc<Signing>> {
        let _one = self.fetching.lock().await;
        let has_old = {
            let mut state = self.state();
            // Somebody else may have fetched it meanwhile.
            if let Some(signing) = state.at_hand(&self.region)? {
                return Ok(signing);
            }
            state.kept.as_ref().is_some_and(Kept::is_good)
        };
        let provided = match has_old {
            false => self.provide().await,
            true => match tokio::time::timeout(PATIENCE, self.provide()).await {
                Ok(provided) => provided,
                Err(_) => Err(Error::unavailable("no credentials: nobody gave any in time")),
            },
        };
        let again = second() + PAUSE;
        let mut state = self.state();
        match provided {
            Ok(credential) => {
                let before = state.newest.as_deref();
                let signing = Signing::new(credential.clone(), &self.region, before)?;
                state.kept = Some(Kept { credential, again });
                Ok(state.newest.insert(Arc::new(signing)).clone())
            }
            Err(error) => {
                // It may have been refused meanwhile: then it is not there any more.
                if let Some(old) = state.kept.as_mut().filter(|kept| kept.is_good()) {
                    tracing::warn!("no new credentials for the bucket: the old ones expire soon");
                    old.again = again;
                }
                state.at_hand(&self.region)?.ok_or(error)
            }
        }
    }

    async fn provide(&self) -> Result<Credential> {
        let answered = Arc::new(Mutex::new(Answered::default()));
        let observed = Observed::new(&self.transport, &answered);
        let context = Context::new()
            .with_file_read(reqsign_file_read_tokio::TokioFileRead)
            .with_http_send(HttpTransporter::new(observed))
            .with_env(OsEnv);
        let why = match self.provider.provide_credential(&context).await {
            Ok(Some(credential)) => return Ok(credential),
            Ok(None) => "none were found".to_owned(),
            Err(error) => error.to_string(),
        };
        let answered = answered.lock().unwrap_or_else(PoisonError::into_inner);
        Err(unsent(&answered, ErrorKind::Denied, &why))
    }

    /// Whether there is another credential than this one, which the store refuses, whatever it says of
    /// itself: it may have been exchanged, or revoked, or the clock is wrong.
    pub async fn has_other(&self, refused: &Credential) -> Result<bool> {
        self.forget(refused);
        Ok(!is_same(&self.signing().await?.credential, refused))
    }

    pub(super) fn forget(&self, refused: &Credential) {
        // What came since is kept: the answer was to a request from before that.
        let mut state = self.state();
        state.kept.take_if(|kept| is_same(&kept.credential, refused));
        state.newest.take_if(|newest| is_same(&newest.credential, refused));
    }

    /// Signs a request of OpenDAL's, with all the headers that it has. Returns whose it is by that.
    pub async fn sign(&self, request: &mut http::request::Parts) -> Result<Arc<Signing>> {
        let signing = self.signing().await?;
        // Whether it lasts for long enough has been decided.
        let credential = Credential { expires_in: None, ..signing.credential.clone() };
        RequestSigner::new("s3", &self.region)
            .with_standard_session_token()
            .sign_request(&Context::new(), request, Some(&credential), None)
            .await
            .map_err(unsendable)?;
        Ok(signing)
    }
}

fn is_same(one: &Credential, other: &Credential) -> bool {
    one.access_key_id == other.access_key_id && one.session_token == other.session_token
}

/// The machine's own time, as OpenDAL takes it: a store judges a signature by it, and nothing else
/// depends on it.
fn second() -> i64 {
    Timestamp::now().as_second()
}

/// Headers of a request, and how the signature wants them.
#[derive(Default)]
pub struct Headers {
    pub map: HeaderMap,
    canonical: String,
    names: String,
}

impl Headers {
    pub fn add(&mut self, name: HeaderName, value: HeaderValue) {
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

/// What signs the requests of one second.
pub struct Signing {
    second: i64,
    pub credential: Credential,
    /// The second, `20261115T094157Z`, as text and as a header.
    date: String,
    date_header: HeaderValue,
    token: Option<HeaderValue>,
    /// `20261115/us-east-1/s3/aws4_request`
    pub(super) scope: String,
    /// Good for a day.
    pub(super) key: Vec<u8>,
}

impl std::fmt::Debug for Signing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Secrets stay out of logs.
        f.debug_struct("Signing").field("scope", &self.scope).finish_non_exhaustive()
    }
}

impl Signing {
    /// For now; the key is `before`'s if that is of the same day and credential.
    pub(super) fn new(credential: Credential, region: &str, before: Option<&Self>) -> Result<Self> {
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
    pub fn sign(&self, method: &Method, path: &str, headers: &mut Headers) -> Result<()> {
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
