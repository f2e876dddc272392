//! HTTP: where requests are counted, limited and timed, and where the store's clock and its error
//! codes are read. Under OpenDAL, and under what goes without it.

use std::pin::Pin;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures::Stream;
use http::request::Parts;
use http_body_util::Full;
use hyper::body::{Body as _, Incoming};
use leasehold_protocol::pace::Pace;
use leasehold_protocol::time::StoreTime;
use opendal::raw::Operation;
use opendal::{Buffer, Error as DalError, ErrorKind as DalKind, HttpBody, HttpTransport};
use tokio::sync::OwnedSemaphorePermit;

use super::answer::{Seen, parse_error_body};
use super::connect::{Client, Failure, Lent, Limit, Target, client, host_of, side_client};
#[cfg(feature = "s3")]
use super::s3::{Keys, Signing};
use crate::env::{BootTime, Env};
use crate::store::backend::Reading;
use crate::store::meter::{Class, Meter};
use crate::{Error, Result, StoreSettings};

/// Shared by all requests to a bucket.
#[derive(Debug)]
pub struct Transport {
    client: Client,
    /// For credentials, which come from elsewhere: connections to the bucket that stand idle must
    /// not keep these waiting.
    side: OnceLock<Client>,
    /// Requests wait here until they may be sent, one behind the other. Whoever is first waits for its
    /// turn; what is urgent does that at once, and so has but one of these before it.
    line: tokio::sync::Mutex<()>,
    /// Requests wait here for a connection, before their time begins to run.
    turns: Limit,
    connections: Arc<Limit>,
    /// How many may be sent in a minute.
    pace: Mutex<Option<Pace>>,
    timeout: Duration,
    meter: Arc<Meter>,
    env: Env,
    reading: Mutex<Option<Reading>>,
}

/// How far a clock may be off whose signatures S3 takes, in microseconds.
const TOO_SKEWED: u64 = 15 * 60 * 1_000_000;

impl Transport {
    pub fn new(settings: &StoreSettings, meter: Arc<Meter>, env: Env) -> Self {
        let connections = Arc::new(Limit::new(settings.connections));
        Self {
            client: client(&connections, settings.request_timeout, &env),
            side: OnceLock::new(),
            line: tokio::sync::Mutex::default(),
            turns: Limit::new(settings.connections),
            connections,
            pace: Mutex::new(settings.requests_per_minute.map(Pace::per_minute)),
            timeout: settings.request_timeout,
            meter,
            env,
            reading: Mutex::new(None),
        }
    }

    /// The newest word of the store's clock.
    pub fn reading(&self) -> Option<Reading> {
        *self.reading.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on: at most so many connections, and requests a minute.
    pub fn limit(&self, connections: usize, requests_per_minute: Option<u32>) {
        self.turns.set(connections);
        self.connections.set(connections);
        *self.pace() = requests_per_minute.map(Pace::per_minute);
    }

    fn pace(&self) -> std::sync::MutexGuard<'_, Option<Pace>> {
        self.pace.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a request that is sent again.
    pub fn note_retry(&self) {
        self.meter.retried();
    }

    /// Waits until one more request may be sent. What has a date or a signature gets it after this: it
    /// may take long.
    ///
    /// At a low pace hundreds may wait, and that may take longer than a lease lasts. A renewal waits for
    /// one of them, and for other renewals.
    pub async fn admit(&self, class: Class, urgency: Urgency) -> Admitted {
        if class == Class::Other {
            return Admitted { class, turn: None };
        }
        let first = match urgency {
            Urgency::InLine => Some(self.line.lock().await),
            Urgency::First => None,
        };
        let turn = self.turns.take().await;
        self.keep_pace().await;
        drop(first);
        Admitted { class, turn }
    }

    async fn keep_pace(&self) {
        let now = self.env.clock().boot().since(BootTime::from_boot(Duration::ZERO));
        let wait = self.pace().as_mut().map(|pace| pace.take(now)).unwrap_or_default();
        if !wait.is_zero() {
            self.env.clock().sleep(wait).await;
        }
    }

    /// Sends a request in origin form, and gives back the answer up to its body; or says why there is
    /// none.
    pub async fn exchange(
        &self,
        admitted: Admitted,
        to: &Target,
        mut request: http::Request<Full<Bytes>>,
    ) -> Result<Reply, String> {
        let size = request.body().size_hint().lower();
        let Admitted { class, turn } = admitted;
        let client = match class {
            Class::Other => self.side.get_or_init(|| side_client(self.timeout, &self.env)),
            _ => &self.client,
        };
        self.meter.request(class, size);
        // A slow line may take its time over a large body: 64 KiB/s are enough for anyone.
        let patience = self.timeout + Duration::from_millis(size / 64);
        let is_head = request.method() == http::Method::HEAD;
        request.headers_mut().insert(http::header::USER_AGENT, AGENT);
        let sent = self.env.clock().boot();
        let (response, lent) = match tokio::time::timeout(patience, client.send(to, request)).await
        {
            Ok(Ok(answered)) => answered,
            Ok(Err(error)) => return Err(reason(to, &error)),
            Err(_) => return Err(format!("no answer within {} s", patience.as_secs())),
        };
        let (head, body) = response.into_parts();
        let (status, headers) = (head.status, head.headers);
        let date = header(&headers, "date").and_then(StoreTime::from_http_date);
        if let Some(store) = date
            && class != Class::Other
        {
            let at = self.env.clock().boot();
            let unsure = Duration::from_secs(1) + at.since(sent);
            let reading = Reading { store, at, unsure };
            *self.reading.lock().unwrap_or_else(PoisonError::into_inner) = Some(reading);
        }
        let mut code = header(&headers, "x-ms-error-code").unwrap_or_default().to_owned();
        // The answer to a HEAD has no body that would say why.
        if is_head
            && status == http::StatusCode::FORBIDDEN
            && date.is_some_and(|store| self.is_off(store))
        {
            code = "RequestTimeTooSkewed".to_owned();
        }
        let seen = Seen { status: status.as_u16(), code, is_head, ..Seen::default() };
        let body = Body::new(body, lent, turn, self);
        Ok(Reply { status, headers, seen, date, body })
    }

    /// Whether this machine's clock is further from the store's than S3 allows.
    fn is_off(&self, store: StoreTime) -> bool {
        self.env.clock().wall().as_micros().abs_diff(store.as_micros()) > TOO_SKEWED
    }

    async fn send(
        &self,
        request: http::Request<Buffer>,
        observed: &Observed,
    ) -> opendal::Result<http::Response<HttpBody>> {
        let (mut parts, body) = request.into_parts();
        let (class, body) = (class_of(&parts), body.to_bytes());
        let bad = || DalError::new(DalKind::Unexpected, "bad URL");
        let to = Target::of(&parts.uri).ok_or_else(bad)?;
        // As it is written there: so it was signed, or will be.
        let host = host_of(&parts.uri).and_then(|host| host.try_into().ok()).ok_or_else(bad)?;
        parts.headers.insert(http::header::HOST, host);
        let seen = &*observed.answered;
        let unsent = |error| {
            note(seen, class, |answered| answered.unsent = Some(error));
            no_answer()
        };
        let mut refused = false;
        let (mut reply, explained) = loop {
            let admitted = self.admit(class, observed.urgency).await;
            let mut sent = parts.clone();
            let signed = observed.sign(&mut sent, class).await.map_err(unsent)?;
            let mut request = http::Request::new(Full::new(body.clone()));
            *request.method_mut() = sent.method;
            *request.headers_mut() = sent.headers;
            if let Some(path) = sent.uri.path_and_query() {
                *request.uri_mut() = http::Uri::from(path.clone());
            }
            let mut reply = match self.exchange(admitted, &to, request).await {
                Ok(reply) => reply,
                Err(failure) if class == Class::Other => {
                    note_side(seen, failure);
                    return Err(no_answer());
                }
                Err(failure) => {
                    let failed = Seen { failure, ..Seen::default() };
                    note(seen, class, |answered| answered.seen = failed);
                    return Err(no_answer());
                }
            };
            if reply.status.is_success() {
                break (reply, None);
            }
            let text = reply.explain().await;
            // As in `s3`: nothing was carried out.
            if let Some(signed) = signed
                && reply.seen.refuses_credentials()
                && !refused
                && observed.has_other(&signed).await.map_err(unsent)?
            {
                refused = true;
                self.note_retry();
                continue;
            }
            break (reply, Some(text));
        };
        if class == Class::Other && reply.seen.will_pass() {
            note_side(seen, format!("HTTP {} {}", reply.seen.status, reply.seen.code));
        }
        let length = match reply.seen.is_head {
            true => None,
            false => header(&reply.headers, "content-length").and_then(|text| text.parse().ok()),
        };
        let mut out = http::Response::builder().status(reply.status).extension(parts.uri);
        if let Some(headers) = out.headers_mut() {
            std::mem::swap(headers, &mut reply.headers);
        }
        let Reply { seen: told, date, body, .. } = reply;
        note(seen, class, |answered| (answered.date, answered.seen) = (date, told));
        match explained {
            None => build(out, HttpBody::new(body, length)),
            Some(text) => {
                let once = futures::stream::iter([Ok(Buffer::from(text))]);
                build(out, HttpBody::new(once, None))
            }
        }
    }
}

/// When a request is sent, of those that wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Urgency {
    /// After those that came before it.
    InLine,
    /// Before those that can wait: a lease that is not renewed in time is lost.
    First,
}

/// Leave to send one request.
pub struct Admitted {
    class: Class,
    turn: Option<OwnedSemaphorePermit>,
}

/// An answer. Its body has not been read.
pub struct Reply {
    pub status: http::StatusCode,
    pub headers: http::HeaderMap,
    /// What it means, as far as its head tells.
    pub seen: Seen,
    pub date: Option<StoreTime>,
    pub body: Body,
}

impl Reply {
    /// Reads the body of an error, which is small: its code is what decides.
    pub async fn explain(&mut self) -> Bytes {
        let text = self.body.read_up_to(64 << 10).await;
        let (code, message) = parse_error_body(&text);
        if self.seen.code.is_empty() {
            self.seen.code = code;
        }
        self.seen.message = message;
        text
    }
}

fn build(
    response: http::response::Builder,
    body: HttpBody,
) -> opendal::Result<http::Response<HttpBody>> {
    response
        .body(body)
        .map_err(|error| DalError::new(DalKind::Unexpected, "bad response").set_source(error))
}

fn no_answer() -> DalError {
    DalError::new(DalKind::Unexpected, "no answer").set_temporary()
}

fn note_side(seen: &Mutex<Answered>, failure: String) {
    seen.lock().unwrap_or_else(PoisonError::into_inner).side_failure = Some(failure);
}

fn note(seen: &Mutex<Answered>, class: Class, change: impl FnOnce(&mut Answered)) {
    // Requests for credentials are not the operation's own.
    if class != Class::Other {
        change(&mut seen.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

const AGENT: http::HeaderValue =
    http::HeaderValue::from_static(concat!("leasehold/", env!("CARGO_PKG_VERSION")));

/// The text of a header, if there is one.
pub fn header<'a>(headers: &'a http::HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

fn class_of(request: &Parts) -> Class {
    match request.extensions.get::<Operation>() {
        Some(Operation::Write | Operation::Copy) => Class::Put,
        Some(Operation::Read) => Class::Get,
        Some(Operation::Stat) => Class::Head,
        Some(Operation::List) => Class::List,
        Some(Operation::Delete) => Class::Delete,
        _ => Class::Other,
    }
}

/// The innermost reason: "connection refused" rather than "client error".
fn reason(to: &Target, error: &Failure) -> String {
    let mut inner: &dyn std::error::Error = &**error;
    while let Some(source) = inner.source() {
        inner = source;
    }
    format!("{to}: {inner}")
}

/// What one operation got for an answer.
#[derive(Debug, Default)]
pub struct Answered {
    pub seen: Seen,
    pub date: Option<StoreTime>,
    /// Why a request for credentials was not answered.
    pub side_failure: Option<String>,
    /// Why the newest request was not sent, if it is known.
    pub unsent: Option<Error>,
}

/// What a request was signed with.
#[cfg(feature = "s3")]
type Signed = Arc<Signing>;
#[cfg(not(feature = "s3"))]
type Signed = std::convert::Infallible;

/// One operation's own view of the transport: what came back for it is noted here.
pub struct Observed {
    pub transport: Arc<Transport>,
    pub answered: Arc<Mutex<Answered>>,
    /// Google's condition for writes.
    pub generation: Option<String>,
    pub urgency: Urgency,
    /// What signs its requests, where OpenDAL does not.
    #[cfg(feature = "s3")]
    pub keys: Option<Arc<Keys>>,
}

impl Observed {
    /// An operation that can wait, whose requests go out as they are.
    pub fn new(transport: &Arc<Transport>, answered: &Arc<Mutex<Answered>>) -> Self {
        Self {
            transport: transport.clone(),
            answered: answered.clone(),
            generation: None,
            urgency: Urgency::InLine,
            #[cfg(feature = "s3")]
            keys: None,
        }
    }

    /// Signs a request, if OpenDAL has not done so. Returns what it was signed with.
    async fn sign(&self, request: &mut Parts, class: Class) -> Result<Option<Signed>> {
        #[cfg(feature = "s3")]
        if let Some(keys) = self.keys.as_ref().filter(|_| class != Class::Other) {
            return keys.sign(request).await.map(Some);
        }
        let _ = (request, class);
        Ok(None)
    }

    /// Whether there is something else to sign with than this, which was refused.
    async fn has_other(&self, refused: &Signed) -> Result<bool> {
        #[cfg(feature = "s3")]
        if let Some(keys) = &self.keys {
            return keys.has_other(&refused.credential).await;
        }
        let _ = refused;
        Ok(false)
    }
}

impl HttpTransport for Observed {
    async fn fetch(
        &self,
        mut request: http::Request<Buffer>,
    ) -> opendal::Result<http::Response<HttpBody>> {
        if let Some(generation) = &self.generation
            && request.extensions().get::<Operation>() == Some(&Operation::Write)
        {
            // Google's requests carry a token and no signature of their URL.
            let uri = request.uri().to_string();
            let sign = if uri.contains('?') { '&' } else { '?' };
            let uri = format!("{uri}{sign}ifGenerationMatch={generation}").parse();
            *request.uri_mut() = uri
                .map_err(|error| DalError::new(DalKind::Unexpected, "bad URL").set_source(error))?;
        }
        self.transport.send(request, self).await
    }
}

/// A response's body. Keeps its connection and its turn until it has been read or dropped, and gives
/// up when nothing arrives for as long as a request may take.
pub struct Body {
    incoming: Incoming,
    used: Option<(Lent, Option<OwnedSemaphorePermit>)>,
    meter: Arc<Meter>,
    idle: Option<Pin<Box<tokio::time::Sleep>>>,
    timeout: Duration,
}

impl Body {
    fn new(
        incoming: Incoming,
        lent: Lent,
        turn: Option<OwnedSemaphorePermit>,
        transport: &Transport,
    ) -> Self {
        let Transport { meter, timeout, .. } = transport;
        let (meter, timeout) = (meter.clone(), *timeout);
        let mut body = Self { incoming, used: Some((lent, turn)), meter, idle: None, timeout };
        if body.incoming.is_end_stream() {
            body.end();
        }
        body
    }

    /// It has been read. First the connection, then the turn: whoever has the turn next finds it.
    fn end(&mut self) {
        if let Some((lent, turn)) = self.used.take() {
            lent.give_back();
            drop(turn);
        }
    }

    fn poll_bytes(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Failure>>> {
        loop {
            match Pin::new(&mut self.incoming).poll_frame(cx) {
                Poll::Ready(frame) => {
                    self.idle = None;
                    let frame = match frame {
                        Some(Ok(frame)) => match frame.into_data() {
                            Ok(bytes) => Some(Ok(bytes)),
                            // Trailers say nothing that anybody asked for.
                            Err(_) => continue,
                        },
                        Some(Err(error)) => Some(Err(error.into())),
                        None => None,
                    };
                    if let Some(Ok(bytes)) = &frame {
                        self.meter.received(bytes.len() as u64);
                    }
                    if frame.is_none() || self.incoming.is_end_stream() {
                        self.end();
                    }
                    return Poll::Ready(frame);
                }
                Poll::Pending => {
                    let timeout = self.timeout;
                    let idle =
                        self.idle.get_or_insert_with(|| Box::pin(tokio::time::sleep(timeout)));
                    return idle.as_mut().poll(cx).map(|()| Some(Err("no more came".into())));
                }
            }
        }
    }

    async fn next_bytes(&mut self) -> Option<Result<Bytes, Failure>> {
        std::future::poll_fn(|cx| self.poll_bytes(cx)).await
    }

    /// All of it.
    #[cfg(feature = "s3")]
    pub async fn read_all(&mut self) -> Result<Bytes, Failure> {
        let Some(first) = self.next_bytes().await.transpose()? else { return Ok(Bytes::new()) };
        // Small objects come in one piece.
        let Some(second) = self.next_bytes().await.transpose()? else { return Ok(first) };
        let mut all = BytesMut::from(first);
        all.extend_from_slice(&second);
        while let Some(more) = self.next_bytes().await.transpose()? {
            all.extend_from_slice(&more);
        }
        Ok(all.freeze())
    }

    /// Lets go of it when the answer's head has told all. A little is read for the sake of the
    /// connection, which can be used again once nothing more comes; but nobody waits long for that.
    #[cfg(feature = "s3")]
    pub async fn skip(&mut self) {
        if self.used.is_some() {
            // Boxed: as a rule there is none.
            let rest = Box::pin(self.read_up_to(4 << 10));
            let _ = tokio::time::timeout(Duration::from_millis(100), rest).await;
        }
    }

    /// What comes of it, and no more than about this much.
    async fn read_up_to(&mut self, most: usize) -> Bytes {
        let mut all = BytesMut::new();
        while all.len() < most
            && let Some(Ok(more)) = self.next_bytes().await
        {
            all.extend_from_slice(&more);
        }
        all.freeze()
    }
}

impl Stream for Body {
    type Item = opendal::Result<Buffer>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.get_mut().poll_bytes(cx).map(|item| {
            item.map(|item| match item {
                Ok(bytes) => Ok(Buffer::from(bytes)),
                Err(error) => Err(no_answer().set_source(std::io::Error::other(error))),
            })
        })
    }
}
