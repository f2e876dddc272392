//! Connections to a bucket: never more than allowed, and used again.
//!
//! A request that has its turn takes an idle connection or opens one, and the connection is idle
//! again before the turn is over: so there are never more than turns. Those that were given up, whose
//! answer nobody waits for any more, count until they are closed: each carries a permit for as long
//! as it is open.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures::future::BoxFuture;
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{Request, Response, Uri};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::connect::{Connected, Connection, HttpConnector};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::AbortHandle;
use tower_service::Service;

use crate::env::{BootTime, Env};

/// Why a request was not answered.
pub type Failure = Box<dyn std::error::Error + Send + Sync>;

/// A connection that nobody has used for so long is closed when somebody looks, which is as often.
const IDLE: Duration = Duration::from_secs(10);

/// One that nobody has used for so long is not used again: nobody has looked. The machine was asleep, or
/// the runtime of whoever looks has ended, or is busy. Its server may have forgotten it, and whatever is
/// between them too, so that a request over it might never be answered.
const TOO_OLD: Duration = Duration::from_secs(20);

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

/// Where requests go: a server, as connections to it are told apart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    scheme: Scheme,
    authority: Authority,
}

impl Target {
    /// The server in this URL: the same one however it is written.
    pub fn of(uri: &Uri) -> Option<Self> {
        let authority = host_of(uri)?.to_ascii_lowercase().parse().ok()?;
        Some(Self { scheme: uri.scheme()?.clone(), authority })
    }

    fn uri(&self) -> Result<Uri, http::Error> {
        let Self { scheme, authority } = self;
        let root = PathAndQuery::from_static("/");
        Uri::builder()
            .scheme(scheme.clone())
            .authority(authority.clone())
            .path_and_query(root)
            .build()
    }
}

/// What the `Host` of a request to this URL says: without the port if that is the usual one.
pub fn host_of(uri: &Uri) -> Option<String> {
    let authority = uri.authority()?;
    let usual = if uri.scheme() == Some(&Scheme::HTTP) { 80 } else { 443 };
    Some(match authority.port_u16().filter(|port| *port != usual) {
        Some(port) => format!("{}:{port}", authority.host()),
        None => authority.host().to_owned(),
    })
}

/// As in a request's `Host`.
impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.authority.fmt(f)
    }
}

/// Sends requests, over connections that it keeps for the next one.
#[derive(Debug)]
pub struct Client {
    plain: Limited,
    /// Made when it is needed: reading the system's certificates takes milliseconds.
    secure: OnceLock<HttpsConnector<Limited>>,
    pool: Arc<Pool>,
}

/// Connections that nobody uses at the moment.
#[derive(Debug)]
struct Pool {
    kept: Mutex<Kept>,
    /// How many there may be.
    most: usize,
    env: Env,
}

#[derive(Debug, Default)]
struct Kept {
    idle: Vec<Idle>,
    /// Whether somebody closes them when they come of age.
    watched: bool,
}

/// How long a connection that was used before may take to be ready for a request. It is at once, as a
/// rule.
const UNREADY: Duration = Duration::from_millis(100);

/// An open connection. If it is dropped it is closed.
#[derive(Debug)]
struct Link {
    sender: SendRequest<Full<Bytes>>,
    task: AbortHandle,
}

impl Drop for Link {
    fn drop(&mut self) {
        // One that is ready ends by itself, in order. Any other would first write all of a body that
        // the server may not read any more, and keep its socket and its permit until then.
        if !self.sender.is_ready() {
            self.task.abort();
        }
    }
}

#[derive(Debug)]
struct Idle {
    to: Target,
    link: Link,
    since: BootTime,
}

impl Idle {
    fn is_fresh(&self, now: BootTime, age: Duration) -> bool {
        now.since(self.since) < age && !self.link.sender.is_closed()
    }
}

/// A connection that is in use. If it is dropped it is closed.
#[derive(Debug)]
pub struct Lent {
    to: Target,
    link: Link,
    pool: Arc<Pool>,
}

impl Lent {
    /// The answer has been read: somebody else may use it.
    pub fn give_back(self) {
        let Self { to, link, pool } = self;
        let since = pool.env.clock().boot();
        let mut kept = pool.kept();
        if link.sender.is_closed() || kept.idle.len() >= pool.most {
            return;
        }
        kept.idle.push(Idle { to, link, since });
        if !kept.watched
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            kept.watched = true;
            drop(kept);
            runtime.spawn(close_unused(Watching(Arc::downgrade(&pool))));
        }
    }
}

/// Says that nobody watches a pool any more, also when its runtime ends.
struct Watching(Weak<Pool>);

impl Drop for Watching {
    fn drop(&mut self) {
        if let Some(pool) = self.0.upgrade() {
            pool.kept().watched = false;
        }
    }
}

/// Closes what has not been used for long, until nothing is left.
async fn close_unused(mut watching: Watching) {
    loop {
        tokio::time::sleep(IDLE).await;
        let Some(pool) = watching.0.upgrade() else { return };
        let now = pool.env.clock().boot();
        let mut kept = pool.kept();
        kept.idle.retain(|idle| idle.is_fresh(now, IDLE));
        if kept.idle.is_empty() {
            // Under the lock: whoever comes next sees that nobody watches. And said once: when this
            // is dropped somebody else may be watching already.
            kept.watched = false;
            watching.0 = Weak::new();
            return;
        }
    }
}

impl Pool {
    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The one that was used last, of those that are ready if there are any: the others may come of
    /// age. If they `must` be ready those that are not are closed.
    ///
    /// One that is given back is ready a moment later. But if its server answered before it had read
    /// the whole request, as an overloaded one may, the rest of that is still being written.
    fn take(&self, to: &Target, must: bool) -> Option<Link> {
        let now = self.env.clock().boot();
        let mut kept = self.kept();
        // Those to another server would keep this one's from being opened.
        let is_fit = |idle: &Idle| idle.to == *to && idle.is_fresh(now, TOO_OLD);
        if kept.idle.last().is_some_and(|last| is_fit(last) && last.link.sender.is_ready()) {
            return kept.idle.pop().map(|idle| idle.link);
        }
        kept.idle.retain(is_fit);
        match kept.idle.iter().rposition(|idle| idle.link.sender.is_ready()) {
            Some(ready) => Some(kept.idle.remove(ready).link),
            None if must => {
                kept.idle.clear();
                None
            }
            None => kept.idle.pop().map(|idle| idle.link),
        }
    }
}

impl Client {
    /// The answer to a request in origin form, and the connection, to be given back when the answer has
    /// been read.
    ///
    /// Sent again is only what is proven not to have left: the connection was closed while it was
    /// idle, before the request was written to it.
    pub async fn send(
        &self,
        to: &Target,
        mut request: Request<Full<Bytes>>,
    ) -> Result<(Response<Incoming>, Lent), Failure> {
        let mut must_be_ready = false;
        loop {
            let idle = self.pool.take(to, must_be_ready);
            let was_idle = idle.is_some();
            let mut link = match idle {
                Some(link) => link,
                // Boxed: few requests need a new one, and all would carry its state along.
                None => Box::pin(self.open(to)).await?,
            };
            if !was_idle {
                link.sender.ready().await?;
            } else if !link.sender.is_ready() {
                match Box::pin(tokio::time::timeout(UNREADY, link.sender.ready())).await {
                    Ok(Ok(())) => {}
                    Ok(Err(_)) => continue,
                    Err(_) => {
                        must_be_ready = true;
                        continue;
                    }
                }
            }
            match link.sender.try_send_request(request).await {
                Ok(response) => {
                    let lent = Lent { to: to.clone(), link, pool: self.pool.clone() };
                    return Ok((response, lent));
                }
                Err(mut failed) => match failed.take_message() {
                    Some(unsent) if was_idle => request = unsent,
                    _ => return Err(failed.into_error().into()),
                },
            }
        }
    }

    async fn open(&self, to: &Target) -> Result<Link, Failure> {
        match to.scheme == Scheme::HTTP {
            true => converse(dial(self.plain.clone(), to).await?).await,
            false => {
                let secure = self.secure.get_or_init(|| secured(self.plain.clone()));
                converse(dial(secure.clone(), to).await?).await
            }
        }
    }
}

async fn dial<S>(mut connector: S, to: &Target) -> Result<S::Response, Failure>
where
    S: Service<Uri>,
    S::Error: Into<Failure>,
{
    std::future::poll_fn(|cx| connector.poll_ready(cx)).await.map_err(Into::into)?;
    connector.call(to.uri()?).await.map_err(Into::into)
}

/// Begins to speak HTTP on an open connection.
async fn converse<T>(stream: T) -> Result<Link, Failure>
where
    T: Read + Write + Unpin + Send + 'static,
{
    let (sender, connection) = handshake(stream).await?;
    let task = tokio::spawn(async move {
        if let Err(error) = connection.await {
            tracing::debug!(%error, "a connection to the bucket ended");
        }
    });
    Ok(Link { sender, task: task.abort_handle() })
}

/// A client for requests now and then to several hosts: it keeps no connections.
pub fn side_client(timeout: Duration, env: &Env) -> Client {
    build(Arc::new(Limit::new(4)), 0, timeout, env)
}

/// A client with at most this many connections, of which as many may be idle as there are now.
pub fn client(connections: &Arc<Limit>, timeout: Duration, env: &Env) -> Client {
    let idle = *connections.size.lock().unwrap_or_else(PoisonError::into_inner);
    build(connections.clone(), idle, timeout, env)
}

fn build(permits: Arc<Limit>, most: usize, timeout: Duration, env: &Env) -> Client {
    let mut http = HttpConnector::new();
    http.enforce_http(false);
    http.set_nodelay(true);
    http.set_connect_timeout(Some(timeout.min(Duration::from_secs(10))));
    let pool = Arc::new(Pool { kept: Mutex::default(), most, env: env.clone() });
    Client { plain: Limited { http, permits }, secure: OnceLock::new(), pool }
}

fn secured(plain: Limited) -> HttpsConnector<Limited> {
    // The system's certificates know a company's own; a bare container has none at all.
    let tls = match HttpsConnectorBuilder::new().with_native_roots() {
        Ok(tls) => tls,
        Err(_) => HttpsConnectorBuilder::new().with_webpki_roots(),
    };
    tls.https_only().enable_http1().wrap_connector(plain)
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
