//! The floor: hyper without a pool, a client library or a timeout, and requests made beforehand.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::{HeaderMap, Request};
use hyper_util::rt::TokioIo;
use leasehold_testkit::servers::Server;
use tokio::net::TcpStream;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

use super::{TASKS, object, sigv4};
use crate::rig::BODY;

/// An open connection to the server.
pub type Connection = SendRequest<Full<Bytes>>;

/// Connections, and the requests to be sent over each.
pub struct Work(Vec<(Connection, Vec<Request<Full<Bytes>>>)>);

impl Work {
    /// `each` objects for every task.
    pub fn prepare(runtime: &Runtime, server: &Server, run: &str, each: usize) -> Result<Self> {
        let endpoint = server.endpoint();
        let host = endpoint.strip_prefix("http://").context("the servers speak plain HTTP")?;
        let mut work = Vec::new();
        for task in 0..TASKS {
            let requests: Vec<_> = (0..each)
                .map(|n| {
                    let keys = (server.access_key(), server.secret_key());
                    let (key, body) = (object(run, task, n), Bytes::from_static(BODY));
                    let new = Some(("if-none-match", "*"));
                    request("PUT", host, server.bucket(), &key, keys, new, body)
                })
                .collect::<Result<_>>()?;
            work.push((runtime.block_on(connect(host))?, requests));
        }
        Ok(Self(work))
    }

    /// Objects per second.
    pub fn run(self, runtime: &Runtime) -> Result<f64> {
        let count: usize = self.0.iter().map(|(_, requests)| requests.len()).sum();
        runtime.block_on(async {
            let start = Instant::now();
            let mut tasks = JoinSet::new();
            for (mut connection, requests) in self.0 {
                tasks.spawn(async move {
                    for request in requests {
                        send(&mut connection, request, 200).await?;
                    }
                    anyhow::Ok(())
                });
            }
            while let Some(task) = tasks.join_next().await {
                task??;
            }
            Ok(count as f64 / start.elapsed().as_secs_f64())
        })
    }
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

/// A signed request.
pub fn request(
    method: &str,
    host: &str,
    bucket: &str,
    key: &str,
    (access, secret): (&str, &str),
    condition: Option<(&str, &str)>,
    body: Bytes,
) -> Result<Request<Full<Bytes>>> {
    let path = format!("/{bucket}/{key}");
    let mut request = Request::builder().method(method).uri(&path).header("host", host);
    if let Some((name, value)) = condition {
        request = request.header(name, value);
    }
    for (name, value) in sigv4::headers(method, host, &path, access, secret) {
        request = request.header(name, value);
    }
    Ok(request.body(Full::new(body))?)
}
