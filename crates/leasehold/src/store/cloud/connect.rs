//! Connections to a bucket: never more than allowed.
//!
//! Counting requests would not do: a connection whose response has been read is not back in the
//! pool yet when the next request looks there, and a new one would be opened beside it. So each
//! connection carries a permit for as long as it is open.

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures::future::BoxFuture;
use http::Uri;
use http_body_util::Full;
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::connect::{Connected, Connection, HttpConnector};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tower_service::Service;

pub type Client = hyper_util::client::legacy::Client<HttpsConnector<Limited>, Full<Bytes>>;

/// A number of permits that can be changed.
#[derive(Debug)]
pub struct Limit {
    permits: Arc<Semaphore>,
    size: Mutex<usize>,
}

impl Limit {
    pub fn new(size: usize) -> Self {
        Self { permits: Arc::new(Semaphore::new(size)), size: Mutex::new(size) }
    }

    /// One of them, when there is one.
    pub async fn take(&self) -> Option<OwnedSemaphorePermit> {
        self.permits.clone().acquire_owned().await.ok()
    }

    /// That many from now on. If they are fewer, those that are out count until they are back.
    pub fn set(&self, size: usize) {
        let mut now = self.size.lock().unwrap_or_else(PoisonError::into_inner);
        if size > *now {
            self.permits.add_permits(size - *now);
        } else if let Ok(surplus) = u32::try_from(*now - size)
            && surplus > 0
        {
            let permits = self.permits.clone();
            tokio::spawn(async move {
                if let Ok(surplus) = permits.acquire_many_owned(surplus).await {
                    surplus.forget();
                }
            });
        }
        *now = size;
    }
}

/// A client for requests now and then to several hosts: an idle connection to one must not keep
/// another waiting, so there are none.
pub fn side_client(timeout: Duration) -> Client {
    build(Arc::new(Limit::new(4)), 0, timeout)
}

/// A client with at most this many connections, of which as many may be idle as there are now.
pub fn client(connections: &Arc<Limit>, timeout: Duration) -> Client {
    let idle = *connections.size.lock().unwrap_or_else(PoisonError::into_inner);
    build(connections.clone(), idle, timeout)
}

fn build(permits: Arc<Limit>, idle: usize, timeout: Duration) -> Client {
    let mut http = HttpConnector::new();
    http.enforce_http(false);
    http.set_nodelay(true);
    http.set_connect_timeout(Some(timeout.min(Duration::from_secs(10))));
    let limited = Limited { http, permits };
    // The system's certificates know a company's own; a bare container has none at all.
    let tls = match HttpsConnectorBuilder::new().with_native_roots() {
        Ok(tls) => tls,
        Err(_) => HttpsConnectorBuilder::new().with_webpki_roots(),
    };
    let https = tls.https_or_http().enable_http1().wrap_connector(limited);
    hyper_util::client::legacy::Client::builder(TokioExecutor::new())
        .pool_timer(TokioTimer::new())
        .pool_idle_timeout(Duration::from_secs(20))
        .pool_max_idle_per_host(idle)
        // What is sent again by this is proven not to have left: the pooled connection was closed
        // before the request was written to it.
        .retry_canceled_requests(true)
        .build(https)
}

/// Opens connections as long as there are permits.
#[derive(Debug, Clone)]
pub struct Limited {
    http: HttpConnector,
    permits: Arc<Limit>,
}

impl Service<Uri> for Limited {
    type Response = Permitted;
    type Error = Box<dyn std::error::Error + Send + Sync>;
    type Future = BoxFuture<'static, Result<Permitted, Self::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.http.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let permits = self.permits.clone();
        let mut http = self.http.clone();
        Box::pin(async move {
            let permit = permits.take().await;
            let stream = http.call(uri).await?;
            Ok(Permitted { stream, _permit: permit })
        })
    }
}

/// A connection and its permit.
#[derive(Debug)]
pub struct Permitted {
    stream: TokioIo<TcpStream>,
    _permit: Option<OwnedSemaphorePermit>,
}

impl Connection for Permitted {
    fn connected(&self) -> Connected {
        self.stream.connected()
    }
}

impl Read for Permitted {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl Write for Permitted {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[std::io::IoSlice<'_>],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bytes)
    }
}
