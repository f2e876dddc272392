//! HTTP under OpenDAL: where requests are counted, limited and timed, and where the store's clock
//! and its error codes are read.

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures::Stream;
use leasehold_protocol::time::StoreTime;
use opendal::raw::Operation;
use opendal::{Buffer, Error as DalError, ErrorKind as DalKind, HttpBody, HttpTransport};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::answer::{Seen, parse_error_body};
use crate::env::Env;
use crate::store::backend::Reading;
use crate::store::meter::{Class, Meter};
use crate::{Error, Result, StoreSettings};

/// Shared by all requests to a bucket.
#[derive(Debug)]
pub struct Transport {
    client: reqwest::Client,
    connections: Arc<Semaphore>,
    timeout: Duration,
    meter: Arc<Meter>,
    env: Env,
    reading: Mutex<Option<Reading>>,
}

impl Transport {
    pub fn new(settings: &StoreSettings, meter: Arc<Meter>, env: Env) -> Result<Self> {
        // Whoever installed a provider before us keeps it.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = reqwest::Client::builder()
            .http1_only()
            .pool_max_idle_per_host(settings.connections)
            .pool_idle_timeout(Duration::from_secs(50))
            .connect_timeout(settings.request_timeout.min(Duration::from_secs(10)))
            .tcp_nodelay(true)
            .user_agent(concat!("leasehold/", env!("CARGO_PKG_VERSION")))
            // A signature is for one host, and a hidden second sending would turn our own success
            // into a refusal. Both are decided above, in the open.
            .redirect(reqwest::redirect::Policy::none())
            .retry(reqwest::retry::never())
            .build()
            .map_err(|error| Error::unavailable("cannot set up HTTP").caused_by(error))?;
        Ok(Self {
            client,
            connections: Arc::new(Semaphore::new(settings.connections)),
            timeout: settings.request_timeout,
            meter,
            env,
            reading: Mutex::new(None),
        })
    }

    /// The newest word of the store's clock.
    pub fn reading(&self) -> Option<Reading> {
        *self.reading.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn send(
        self: Arc<Self>,
        request: http::Request<Buffer>,
        seen: &Mutex<Answered>,
    ) -> opendal::Result<http::Response<HttpBody>> {
        let permit = self.connections.clone().acquire_owned().await.ok();
        let (parts, body) = request.into_parts();
        let class = class_of(&parts);
        let body = body.to_bytes();
        self.meter.request(class, body.len() as u64);
        // A slow line may take its time over a large body: 64 KiB/s are enough for anyone.
        let patience = self.timeout + Duration::from_millis(body.len() as u64 / 64);
        let url = reqwest::Url::parse(&parts.uri.to_string())
            .map_err(|error| DalError::new(DalKind::Unexpected, "bad URL").set_source(error))?;
        let mut request = self.client.request(parts.method.clone(), url).headers(parts.headers);
        if !body.is_empty() {
            request = request.body(body);
        }
        let sent = match tokio::time::timeout(patience, request.send()).await {
            Ok(Ok(response)) => Ok(response),
            Ok(Err(error)) => Err(reason(&error)),
            Err(_) => Err(format!("no answer within {} s", patience.as_secs())),
        };
        let mut response = match sent {
            Ok(response) => response,
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
        let code = header(&response, "x-ms-error-code").unwrap_or_default().to_owned();
        note(seen, class, |answered| {
            answered.date = date;
            answered.seen = Seen { status: status.as_u16(), code, ..Seen::default() };
        });
        let mut out = http::Response::builder().status(status).extension(parts.uri);
        if let Some(headers) = out.headers_mut() {
            std::mem::swap(headers, response.headers_mut());
        }
        let length = match parts.method {
            http::Method::HEAD => None,
            _ => response.content_length(),
        };
        let meter = self.meter.clone();
        let stream = Box::pin(response.bytes_stream());
        let mut body = Body { stream, meter, permit, idle: None, timeout: self.timeout };
        if status.is_success() || parts.method == http::Method::HEAD {
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
    DalError::new(DalKind::Unexpected, "no answer")
}

fn note(seen: &Mutex<Answered>, class: Class, change: impl FnOnce(&mut Answered)) {
    // Requests for credentials are not the operation's own.
    if class != Class::Other {
        change(&mut seen.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

fn header<'a>(response: &'a reqwest::Response, name: &str) -> Option<&'a str> {
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

/// The innermost reason: "connection refused" rather than "error sending request".
fn reason(error: &reqwest::Error) -> String {
    let mut inner: &dyn std::error::Error = error;
    while let Some(source) = inner.source() {
        inner = source;
    }
    let url = error.url().map(|url| url.origin().ascii_serialization()).unwrap_or_default();
    format!("{url}: {inner}")
}

/// What one operation got for an answer.
#[derive(Debug, Default)]
pub struct Answered {
    pub seen: Seen,
    pub date: Option<StoreTime>,
}

/// One operation's own view of the transport: what came back for it is noted here.
pub struct Observed {
    pub transport: Arc<Transport>,
    pub answered: Arc<Mutex<Answered>>,
}

impl HttpTransport for Observed {
    async fn fetch(
        &self,
        request: http::Request<Buffer>,
    ) -> opendal::Result<http::Response<HttpBody>> {
        self.transport.clone().send(request, &self.answered).await
    }
}

/// A response's body. Holds its connection's permit until it has been read or dropped, and gives
/// up when nothing arrives for as long as a request may take.
struct Body {
    stream: Pin<Box<dyn Stream<Item = reqwest::Result<Bytes>> + Send + Sync>>,
    meter: Arc<Meter>,
    permit: Option<OwnedSemaphorePermit>,
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
        match this.stream.as_mut().poll_next(cx) {
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
                    this.permit = None;
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
