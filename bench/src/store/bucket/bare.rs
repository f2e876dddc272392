//! The floor: hyper without a pool, a client library or a timeout, and requests made beforehand.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::Request;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use leasehold_testkit::servers::Server;
use tokio::net::TcpStream;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

use super::{TASKS, object, sigv4};
use crate::rig::BODY;

type Connection = SendRequest<Full<Bytes>>;

/// Objects per second, each task writing `each` over a connection of its own.
pub fn puts(runtime: &Runtime, server: &Server, run: &str, each: usize) -> Result<f64> {
    let endpoint = server.endpoint();
    let host = endpoint.strip_prefix("http://").context("the servers speak plain HTTP")?;
    runtime.block_on(async {
        let mut work = Vec::new();
        for task in 0..TASKS {
            let requests: Vec<_> = (0..each)
                .map(|n| request(server, host, &object(run, task, n)))
                .collect::<Result<_>>()?;
            work.push((connect(host).await?, requests));
        }
        let start = Instant::now();
        let mut tasks = JoinSet::new();
        for (mut connection, requests) in work {
            tasks.spawn(async move {
                for request in requests {
                    send(&mut connection, request).await?;
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

async fn connect(host: &str) -> Result<Connection> {
    let stream = TcpStream::connect(host).await?;
    stream.set_nodelay(true)?;
    let (sender, connection) = handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    Ok(sender)
}

async fn send(connection: &mut Connection, request: Request<Full<Bytes>>) -> Result<()> {
    connection.ready().await?;
    let response = connection.send_request(request).await?;
    let status = response.status();
    let body = response.into_body().collect().await?.to_bytes();
    ensure!(status == 200, "HTTP {status}: {}", String::from_utf8_lossy(&body));
    Ok(())
}

fn request(server: &Server, host: &str, key: &str) -> Result<Request<Full<Bytes>>> {
    let path = format!("/{}/{key}", server.bucket());
    let mut request = Request::put(&path).header("host", host).header("if-none-match", "*");
    for (name, value) in
        sigv4::headers("PUT", host, &path, server.access_key(), server.secret_key())
    {
        request = request.header(name, value);
    }
    Ok(request.body(Full::new(Bytes::from_static(BODY)))?)
}
