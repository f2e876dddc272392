//! The floor: hyper without a pool, a client library or a timeout.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::header::ETAG;
use hyper::{HeaderMap, Request};
use hyper_util::rt::TokioIo;
use leasehold_testkit::servers::Server;
use tokio::net::TcpStream;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

use super::sigv4::Signer;
use super::{TASKS, object};
use crate::rig::BODY;

/// An open connection to the server.
pub type Connection = SendRequest<Full<Bytes>>;

/// A server as a bare loop sees it.
pub struct Bare {
    host: String,
    bucket: String,
    signer: Signer,
}

impl Bare {
    pub fn new(server: &Server) -> Result<Arc<Self>> {
        let endpoint = server.endpoint();
        let host = endpoint.strip_prefix("http://").context("the servers speak plain HTTP")?;
        Ok(Arc::new(Self {
            host: host.to_owned(),
            bucket: server.bucket().to_owned(),
            signer: Signer::new(server.access_key(), server.secret_key()),
        }))
    }

    /// Opens a connection.
    pub async fn connect(&self) -> Result<Connection> {
        connect(&self.host).await
    }

    /// Sends a request and reads the answer; gives back the version that it names, if any. Anything but
    /// this status is an error.
    pub async fn ask(
        &self,
        connection: &mut Connection,
        method: &str,
        key: &str,
        body: Bytes,
        condition: Option<(&str, &str)>,
        expected: u16,
    ) -> Result<String> {
        let path = format!("/{}/{key}", self.bucket);
        let mut request = Request::builder().method(method).uri(&path).header("host", &self.host);
        if let Some((name, value)) = condition {
            request = request.header(name, value);
        }
        for (name, value) in self.signer.headers(method, &self.host, (&path, ""), condition) {
            request = request.header(name, value);
        }
        let headers = send(connection, request.body(Full::new(body))?, expected).await?;
        let etag = headers.get(ETAG).map(|etag| etag.to_str().map(str::to_owned));
        Ok(etag.transpose()?.unwrap_or_default())
    }
}

impl Bare {
    /// One page of the keys below a prefix of plain letters, which is read and not looked at.
    pub async fn list(&self, connection: &mut Connection, prefix: &str) -> Result<()> {
        let path = format!("/{}", self.bucket);
        let prefix = prefix.replace('/', "%2F");
        let query = format!("list-type=2&max-keys=1000&prefix={prefix}");
        let url = format!("{path}?{query}");
        let mut request = Request::builder().method("GET").uri(url).header("host", &self.host);
        for (name, value) in self.signer.headers("GET", &self.host, (&path, &query), None) {
            request = request.header(name, value);
        }
        send(connection, request.body(Full::default())?, 200).await?;
        Ok(())
    }
}

/// For an object that is not to be there yet.
pub const NEW: Option<(&str, &str)> = Some(("if-none-match", "*"));

/// A connection for each task.
pub fn connections(runtime: &Runtime, bare: &Bare) -> Result<Vec<Connection>> {
    (0..TASKS).map(|_| runtime.block_on(bare.connect())).collect()
}

/// Objects per second, each task writing `each` over a connection of its own.
pub fn puts(
    runtime: &Runtime,
    bare: &Arc<Bare>,
    connections: Vec<Connection>,
    run: &str,
    each: usize,
) -> Result<f64> {
    runtime.block_on(async {
        let start = Instant::now();
        let mut tasks = JoinSet::new();
        for (task, mut connection) in connections.into_iter().enumerate() {
            let (bare, run) = (bare.clone(), run.to_owned());
            tasks.spawn(async move {
                for n in 0..each {
                    let (key, body) = (object(&run, task, n), Bytes::from_static(BODY));
                    bare.ask(&mut connection, "PUT", &key, body, NEW, 200).await?;
                }
                anyhow::Ok(())
            });
        }
        while let Some(task) = tasks.join_next().await {
            task??;
        }
        Ok((TASKS * each) as f64 / start.elapsed().as_secs_f64())
    })
}

/// Opens one.
pub async fn connect(host: &str) -> Result<Connection> {
    let stream = TcpStream::connect(host).await?;
    stream.set_nodelay(true)?;
    let (sender, connection) = handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    Ok(sender)
}

/// Sends a request, reads the answer, and gives back its headers. Anything but this status is an error.
pub async fn send(
    connection: &mut Connection,
    request: Request<Full<Bytes>>,
    expected: u16,
) -> Result<HeaderMap> {
    connection.ready().await?;
    let response = connection.send_request(request).await?;
    let (head, body) = response.into_parts();
    let status = head.status;
    let body = body.collect().await?.to_bytes();
    ensure!(status == expected, "HTTP {status}: {}", String::from_utf8_lossy(&body));
    Ok(head.headers)
}
