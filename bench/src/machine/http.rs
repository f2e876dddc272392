//! The barest HTTP over loopback: a server that answers every request with the same bytes, and hyper
//! without anything around it. No client of a bucket on this machine can be faster.

use std::time::{Duration, Instant};

use anyhow::Result;
use bytes::Bytes;
use http_body_util::Full;
use hyper::Request;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

use crate::store::bucket::bare::{connect, send};

const ANSWER: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n";
/// The end of a request without a body.
const END: &[u8] = b"\r\n\r\n";

/// Requests per second over this many connections.
pub fn rate(runtime: &Runtime, connections: usize, window: Duration) -> Result<f64> {
    runtime.block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let host = listener.local_addr()?.to_string();
        let server = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(answer(stream));
            }
        });
        let mut clients = JoinSet::new();
        let start = Instant::now();
        for _ in 0..connections {
            let host = host.clone();
            clients.spawn(async move {
                let (mut connection, mut done) = (connect(&host).await?, 0_u64);
                while start.elapsed() < window {
                    let request = Request::get("/x").header("host", &host);
                    let request = request.body(Full::new(Bytes::new()))?;
                    send(&mut connection, request, 200).await?;
                    done += 1;
                }
                anyhow::Ok(done)
            });
        }
        let mut done = 0;
        while let Some(ended) = clients.join_next().await {
            done += ended??;
        }
        let rate = done as f64 / start.elapsed().as_secs_f64();
        server.abort();
        Ok(rate)
    })
}

async fn answer(mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let (mut buffer, mut held) = ([0; 4096], 0);
    loop {
        let read = stream.read(&mut buffer[held..]).await?;
        if read == 0 {
            return Ok(());
        }
        held += read;
        if buffer[..held].ends_with(END) {
            held = 0;
            stream.write_all(ANSWER).await?;
        }
    }
}
