//! HTTP under OpenDAL: where requests are counted, limited and timed, and where the store's clock
//! and its error codes are read.

use std::pin::Pin;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use futures::Stream;
use http_body_util::{BodyDataStream, BodyExt as _, Full};
use hyper::body::Incoming;
use leasehold_protocol::pace::Pace;
use leasehold_protocol::time::StoreTime;
use opendal::raw::Operation;
use opendal::{Buffer, Error as DalError, ErrorKind as DalKind, HttpBody, HttpTransport};
use tokio::sync::OwnedSemaphorePermit;

use super::answer::{Seen, parse_error_body};
use super::connect::{Client, Limit, client, side_client};
use crate::StoreSettings;
use crate::env::{BootTime, Env};
use crate::store::backend::Reading;
use crate::store::meter::{Class, Meter};

/// Shared by all requests to a bucket.
#[derive(Debug)]
pub struct Transport {
    client: Client,
    /// For credentials, which come from elsewhere: connections to the bucket that stand idle must
    /// not keep these waiting.
    side: OnceLock<Client>,
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
            client: client(&connections, settings.request_timeout),
            side: OnceLock::new(),
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

    /// Waits until one more request may be sent.
    async fn keep_pace(&self) {
        let now = self.env.clock().boot().since(BootTime::from_boot(Duration::ZERO));
        let wait = self.pace().as_mut().map(|pace| pace.take(now)).unwrap_or_default();
        if !wait.is_zero() {
            self.env.clock().sleep(wait).await;
        }
    }

    async fn send(
        self: Arc<Self>,
        request: http::Request<Buffer>,
        seen: &Mutex<Answered>,
    ) -> opendal::Result<http::Response<HttpBody>> {
        let (parts, body) = request.into_parts();
        let class = class_of(&parts);
        let body = body.to_bytes();
        let (client, turn) = match class {
            Class::Other => (self.side.get_or_init(|| side_client(self.timeout)), None),
            _ => (&self.client, self.turns.take().await),
        };
        // With a connection in hand: so no more than there are connections wait in line, and none of
        // them longer than that many requests take.
        if class != Class::Other {
            self.keep_pace().await;
        }
        self.meter.request(class, body.len() as u64);
        // A slow line may take its time over a large body: 64 KiB/s are enough for anyone.
        let patience = self.timeout + Duration::from_millis(body.len() as u64 / 64);
        let (uri, is_head) = (parts.uri.clone(), parts.method == http::Method::HEAD);
        let mut request = http::Request::new(Full::new(body));
        *request.method_mut() = parts.method;
        *request.uri_mut() = parts.uri;
        *request.headers_mut() = parts.headers;
        request.headers_mut().insert(http::header::USER_AGENT, AGENT);
        let sent = match tokio::time::timeout(patience, client.request(request)).await {
            Ok(Ok(response)) => Ok(response),
            Ok(Err(error)) => Err(reason(&uri, &error)),
            Err(_) => Err(format!("no answer within {} s", patience.as_secs())),
        };
        let mut response = match sent {
            Ok(response) => response,
            Err(failure) if class == Class::Other => {
                note_side(seen, failure);
                return Err(no_answer());
            }
            Err(failure) => {
                note(seen, class, |answered| answered.seen = Seen { failure, ..Seen::default() });
                return Err(no_answer());
            }
        };
        let status = response.status();
        let date = header(&response, "date").and_then(StoreTime::from_http_date);
        if let Some(store) = date
            && class != Class::Other
        {
            let reading = Reading { store, at: self.env.clock().boot() };
            *self.reading.lock().unwrap_or_else(PoisonError::into_inner) = Some(reading);
        }
        if class == Class::Other && status.is_server_error() {
            note_side(seen, format!("HTTP {}", status.as_u16()));
        }
        let mut code = header(&response, "x-ms-error-code").unwrap_or_default().to_owned();
        // The answer to a HEAD has no body that would say why.
        let off = date.map(|store| self.env.clock().wall().as_micros().abs_diff(store.as_micros()));
        if is_head && status == http::StatusCode::FORBIDDEN && off > Some(TOO_SKEWED) {
            code = "RequestTimeTooSkewed".to_owned();
        }
        note(seen, class, |answered| {
            answered.date = date;
            answered.seen = Seen { status: status.as_u16(), code, ..Seen::default() };
        });
        let length = match is_head {
            true => None,
            false => header(&response, "content-length").and_then(|text| text.parse().ok()),
        };
        let mut out = http::Response::builder().status(status).extension(uri);
        if let Some(headers) = out.headers_mut() {
            std::mem::swap(headers, response.headers_mut());
        }
        let stream = response.into_body().into_data_stream();
        let meter = self.meter.clone();
        let mut body = Body { stream, meter, turn, idle: None, timeout: self.timeout };
        if status.is_success() || is_head {
            return build(out, HttpBody::new(body, length));
        }
        // An error's body is small, and its code is what decides.
        let text = body.read_up_to(64 << 10).await;
        let (code, message) = parse_error_body(&text);
        note(seen, class, |answered| {
            if answered.seen.code.is_empty() {
                answered.seen.code = code;
            }
            answered.seen.message = message;
        });
        let once = futures::stream::iter([Ok(Buffer::from(text))]);
        build(out, HttpBody::new(once, None))
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

fn header<'a>(response: &'a http::Response<Incoming>, name: &str) -> Option<&'a str> {
    response.headers().get(name)?.to_str().ok()
}

fn class_of(request: &http::request::Parts) -> Class {
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
fn reason(uri: &http::Uri, error: &hyper_util::client::legacy::Error) -> String {
    let mut inner: &dyn std::error::Error = error;
    while let Some(source) = inner.source() {
        inner = source;
    }
    format!("{}: {inner}", uri.authority().map_or("", |host| host.as_str()))
}

/// What one operation got for an answer.
#[derive(Debug, Default)]
pub struct Answered {
    pub seen: Seen,
    pub date: Option<StoreTime>,
    /// Why a request for credentials was not answered.
    pub side_failure: Option<String>,
}

/// One operation's own view of the transport: what came back for it is noted here.
pub struct Observed {
    pub transport: Arc<Transport>,
    pub answered: Arc<Mutex<Answered>>,
    /// Google's condition for writes.
    pub generation: Option<String>,
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
        self.transport.clone().send(request, &self.answered).await
    }
}

/// A response's body. Keeps its turn until it has been read or dropped, and gives up when nothing
/// arrives for as long as a request may take.
struct Body {
    stream: BodyDataStream<Incoming>,
    meter: Arc<Meter>,
    turn: Option<OwnedSemaphorePermit>,
    idle: Option<Pin<Box<tokio::time::Sleep>>>,
    timeout: Duration,
}

impl Body {
    async fn read_up_to(&mut self, most: usize) -> Vec<u8> {
        use futures::StreamExt as _;
        let mut all = Vec::new();
        while all.len() < most
            && let Some(Ok(chunk)) = self.next().await
        {
            all.extend_from_slice(&chunk.to_bytes());
        }
        all
    }
}

impl Stream for Body {
    type Item = opendal::Result<Buffer>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        match Pin::new(&mut this.stream).poll_next(cx) {
            Poll::Ready(item) => {
                this.idle = None;
                let item = match item {
                    Some(Ok(bytes)) => {
                        this.meter.received(bytes.len() as u64);
                        Some(Ok(Buffer::from(bytes)))
                    }
                    Some(Err(error)) => Some(Err(no_answer().set_source(error))),
                    None => None,
                };
                if item.is_none() {
                    this.turn = None;
                }
                Poll::Ready(item)
            }
            Poll::Pending => {
                let timeout = this.timeout;
                let idle = this.idle.get_or_insert_with(|| Box::pin(tokio::time::sleep(timeout)));
                match idle.as_mut().poll(cx) {
                    Poll::Ready(()) => Poll::Ready(Some(Err(no_answer()))),
                    Poll::Pending => Poll::Pending,
                }
            }
        }
    }
}
