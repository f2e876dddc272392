//! An HTTP proxy between the processes and the store, on loopback, that spoils answers.
//!
//! Requests go through byte by byte, head and all, so that signatures hold: what is signed is the host
//! that the client believes to talk to, and servers take its word for it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, bail};
use leasehold::env::Env;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use super::log::nanos;
use super::plan::{Dice, Plan, Weather};

/// What happens to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Fault {
    None,
    /// Not carried out; the connection is closed.
    Refused,
    /// Carried out; the connection is closed without an answer.
    AnswerLost,
    /// The connection is closed, and later it is carried out.
    Ghost(Duration),
    /// Carried out late.
    Slow(Duration),
    /// Not carried out; 503.
    Overloaded,
    /// Carried out; 500.
    ErrorAfterwards,
    /// Carried out twice; the first answer counts.
    Twice,
}

impl Fault {
    fn name(self) -> Option<&'static str> {
        Some(match self {
            Self::None => return None,
            Self::Refused => "refused",
            Self::AnswerLost => "answer lost",
            Self::Ghost(_) => "arrived late",
            Self::Slow(_) => "slow",
            Self::Overloaded => "503",
            Self::ErrorAfterwards => "500 after it was done",
            Self::Twice => "done twice",
        })
    }

    fn roll(weather: Option<Weather>, dice: &mut Dice) -> Self {
        let n = dice.below(1000);
        match (weather, n) {
            (None, _) => Self::None,
            (Some(Weather::Calm), 0..=1) => Self::Refused,
            (Some(Weather::Calm), 2..=5) => Self::AnswerLost,
            (Some(Weather::Calm), 6..=8) => Self::Slow(dice.millis(20, 500)),
            (Some(Weather::Lossy), 0..=29) => Self::Refused,
            (Some(Weather::Lossy), 30..=89) => Self::AnswerLost,
            (Some(Weather::Lossy), 90..=104) => Self::Ghost(dice.millis(200, 6000)),
            (Some(Weather::Lossy), 105..=154) => Self::Slow(dice.millis(20, 1500)),
            // Longer than anybody waits.
            (Some(Weather::Lossy), 155..=157) => Self::Slow(dice.millis(3200, 5000)),
            (Some(Weather::Lossy), 158..=187) => Self::Overloaded,
            (Some(Weather::Lossy), 188..=207) => Self::ErrorAfterwards,
            (Some(Weather::Lossy), 208..=227) => Self::Twice,
            (Some(Weather::Storm), 0..=799) => Self::Overloaded,
            (Some(Weather::Storm), 800..=949) => Self::Refused,
            _ => Self::None,
        }
    }
}

/// The proxy. Ends with the runtime.
#[derive(Debug)]
pub struct Proxy {
    /// Where clients go.
    pub endpoint: String,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    target: String,
    plan: Plan,
    env: Env,
    dice: Mutex<Dice>,
    done: Mutex<BTreeMap<String, u64>>,
    calm: AtomicBool,
}

/// Heads and bodies longer than this are not ours.
const MOST: usize = 64 << 20;

impl Proxy {
    /// Starts one in front of this endpoint, which must be plain HTTP.
    pub async fn start(endpoint: &str, plan: Plan, env: Env) -> anyhow::Result<Self> {
        let rest = endpoint.strip_prefix("http://").context("only plain HTTP can be spoilt")?;
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let target = match authority.contains(':') {
            true => authority.to_owned(),
            false => format!("{authority}:80"),
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.context("no port for the proxy")?;
        let port = listener.local_addr()?.port();
        let dice = Mutex::new(Dice::new(plan.seed, &[0xf15e]));
        let shared = Arc::new(Shared {
            target,
            plan,
            env,
            dice,
            done: Mutex::default(),
            calm: AtomicBool::new(false),
        });
        let server = shared.clone();
        tokio::spawn(async move {
            loop {
                let Ok((client, _)) = listener.accept().await else {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                    continue;
                };
                let shared = server.clone();
                tokio::spawn(async move {
                    // An error is somebody hanging up.
                    if let Err(error) = serve(client, &shared).await {
                        tracing::debug!(%error, "a connection ended");
                    }
                });
            }
        });
        Ok(Self { endpoint: format!("http://127.0.0.1:{port}/{path}"), shared })
    }

    /// No more faults, also before the plan's end.
    pub fn calm(&self) {
        self.shared.calm.store(true, SeqCst);
    }

    /// Faults so far, by kind.
    pub fn done(&self) -> BTreeMap<String, u64> {
        self.shared.done.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Shared {
    fn next(&self) -> Fault {
        if self.calm.load(SeqCst) {
            return Fault::None;
        }
        let weather = Weather::at(&self.plan, nanos(&self.env));
        let mut dice = self.dice.lock().unwrap_or_else(PoisonError::into_inner);
        let fault = Fault::roll(weather, &mut dice);
        if let Some(name) = fault.name() {
            let mut done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
            *done.entry(name.to_owned()).or_default() += 1;
        }
        fault
    }

    async fn connect(&self) -> anyhow::Result<Wire> {
        let stream = TcpStream::connect(&self.target).await?;
        stream.set_nodelay(true)?;
        Ok(Wire { stream, buffer: Vec::new() })
    }

    /// Carries a request out on a connection of its own, for which nobody waits.
    fn later(self: &Arc<Self>, request: Message, pause: Duration) {
        let shared = self.clone();
        tokio::spawn(async move {
            tokio::time::sleep(pause).await;
            let sent = async {
                let mut wire = shared.connect().await?;
                wire.ask(&request).await
            };
            if let Err(error) = sent.await {
                tracing::debug!(%error, "a late request did not arrive at all");
            }
        });
    }
}

async fn serve(client: TcpStream, shared: &Arc<Shared>) -> anyhow::Result<()> {
    client.set_nodelay(true)?;
    let mut client = Wire { stream: client, buffer: Vec::new() };
    let mut server: Option<Wire> = None;
    while let Some(request) = client.read_message(Side::Request).await? {
        let fault = shared.next();
        match fault {
            Fault::Refused => return Ok(()),
            Fault::Ghost(pause) => {
                shared.later(request, pause);
                return Ok(());
            }
            Fault::Overloaded => {
                client.stream.write_all(&error_answer(&request, 503, "SlowDown")).await?;
                continue;
            }
            Fault::Slow(pause) => tokio::time::sleep(pause).await,
            Fault::None | Fault::AnswerLost | Fault::ErrorAfterwards | Fault::Twice => {}
        }
        let mut wire = match server.take() {
            Some(wire) => wire,
            None => shared.connect().await?,
        };
        let answer = wire.ask(&request).await?;
        if !answer.closes {
            server = Some(wire);
        }
        match fault {
            Fault::AnswerLost => return Ok(()),
            Fault::ErrorAfterwards => {
                client.stream.write_all(&error_answer(&request, 500, "InternalError")).await?;
                continue;
            }
            Fault::Twice => {
                shared.later(request, Duration::ZERO);
            }
            _ => {}
        }
        client.stream.write_all(&answer.bytes).await?;
        if answer.closes {
            return Ok(());
        }
    }
    Ok(())
}

fn error_answer(request: &Message, status: u16, code: &str) -> Vec<u8> {
    let body = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?><Error><Code>{code}</Code>\
         <Message>by the torture</Message></Error>"
    );
    let mut answer = format!(
        "HTTP/1.1 {status} Spoilt\r\nContent-Type: application/xml\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    if !request.is_head {
        answer.push_str(&body);
    }
    answer.into_bytes()
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Request,
    /// To a request that was HEAD or not.
    Answer(bool),
}

/// A request or an answer as it came.
#[derive(Debug, Clone)]
struct Message {
    bytes: Vec<u8>,
    is_head: bool,
    /// Whether nothing comes after it.
    closes: bool,
}

/// How a body ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Body {
    Length(usize),
    Chunked,
    /// With the connection.
    Close,
}

struct Wire {
    stream: TcpStream,
    /// What was read and not used yet.
    buffer: Vec<u8>,
}

impl Wire {
    async fn ask(&mut self, request: &Message) -> anyhow::Result<Message> {
        self.stream.write_all(&request.bytes).await?;
        let answer = self.read_message(Side::Answer(request.is_head)).await?;
        answer.context("the store hung up")
    }

    /// The next message, or `None` if there is none.
    async fn read_message(&mut self, side: Side) -> anyhow::Result<Option<Message>> {
        loop {
            let mut from = 0;
            let end = loop {
                if let Some(end) = find(&self.buffer, b"\r\n\r\n", from) {
                    break end + 4;
                }
                from = self.buffer.len().saturating_sub(3);
                if !self.fill().await? {
                    match self.buffer.is_empty() {
                        true => return Ok(None),
                        false => bail!("cut off in the middle of a head"),
                    }
                }
            };
            let head = Head::parse(&self.buffer[..end], side)?;
            // "Continue": the answer itself is still to come.
            if head.is_interim {
                self.buffer.drain(..end);
                continue;
            }
            let (end, closes) = match head.body {
                Body::Length(length) => (self.read_to(end + length).await?, head.closes),
                Body::Chunked => (self.read_chunks(end).await?, head.closes),
                Body::Close => {
                    while self.fill().await? {}
                    (self.buffer.len(), true)
                }
            };
            let bytes = self.buffer.drain(..end).collect();
            return Ok(Some(Message { bytes, is_head: head.is_head, closes }));
        }
    }

    async fn read_to(&mut self, end: usize) -> anyhow::Result<usize> {
        while self.buffer.len() < end {
            if !self.fill().await? {
                bail!("cut off in the middle of a body");
            }
        }
        Ok(end)
    }

    /// Where the chunks that begin at `at` end.
    async fn read_chunks(&mut self, mut at: usize) -> anyhow::Result<usize> {
        loop {
            let line = loop {
                if let Some(end) = find(&self.buffer, b"\r\n", at) {
                    break end;
                }
                if !self.fill().await? {
                    bail!("cut off between chunks");
                }
            };
            let text = String::from_utf8_lossy(&self.buffer[at..line]).into_owned();
            let size = text.split(';').next().unwrap_or_default().trim();
            let size = usize::from_str_radix(size, 16).context("a chunk without a size")?;
            at = line + 2;
            if size == 0 {
                // Trailers, up to an empty line.
                loop {
                    let end = loop {
                        if let Some(end) = find(&self.buffer, b"\r\n", at) {
                            break end;
                        }
                        if !self.fill().await? {
                            bail!("cut off after the last chunk");
                        }
                    };
                    let empty = end == at;
                    at = end + 2;
                    if empty {
                        return Ok(at);
                    }
                }
            }
            at = self.read_to(at.saturating_add(size).saturating_add(2)).await?;
        }
    }

    async fn fill(&mut self) -> anyhow::Result<bool> {
        if self.buffer.len() > MOST {
            bail!("longer than anything of ours");
        }
        Ok(self.stream.read_buf(&mut self.buffer).await? > 0)
    }
}

struct Head {
    body: Body,
    is_head: bool,
    is_interim: bool,
    closes: bool,
}

impl Head {
    fn parse(bytes: &[u8], side: Side) -> anyhow::Result<Self> {
        let text = String::from_utf8_lossy(bytes);
        let mut lines = text.split("\r\n");
        let first = lines.next().unwrap_or_default();
        let mut body = None;
        let mut closes = false;
        for line in lines {
            let Some((name, value)) = line.split_once(':') else { continue };
            let (name, value) = (name.trim().to_ascii_lowercase(), value.trim());
            match name.as_str() {
                "content-length" if body != Some(Body::Chunked) => {
                    let length: usize = value.parse().context("a length that is no number")?;
                    anyhow::ensure!(length <= MOST, "longer than anything of ours");
                    body = Some(Body::Length(length));
                }
                "transfer-encoding" if value.to_ascii_lowercase().contains("chunked") => {
                    body = Some(Body::Chunked);
                }
                "connection" => closes = value.eq_ignore_ascii_case("close"),
                _ => {}
            }
        }
        Ok(match side {
            Side::Request => {
                let is_head = first.starts_with("HEAD ");
                Self { body: body.unwrap_or(Body::Length(0)), is_head, is_interim: false, closes }
            }
            Side::Answer(is_head) => {
                let status: u16 =
                    first.split(' ').nth(1).and_then(|text| text.parse().ok()).unwrap_or(0);
                let empty = is_head || matches!(status, 204 | 304);
                let body = match (empty, body) {
                    (true, _) => Body::Length(0),
                    (false, Some(body)) => body,
                    (false, None) => Body::Close,
                };
                Self { body, is_head, is_interim: (100..200).contains(&status), closes }
            }
        })
    }
}

fn find(buffer: &[u8], what: &[u8], from: usize) -> Option<usize> {
    let from = from.min(buffer.len());
    buffer[from..].windows(what.len()).position(|window| window == what).map(|at| from + at)
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn wires() -> (TcpStream, Wire) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (server, _) = listener.accept().await.unwrap();
        (client, Wire { stream: server, buffer: Vec::new() })
    }

    #[tokio::test]
    async fn messages_are_told_apart_and_stay_as_they_are() {
        let (mut client, mut wire) = wires().await;
        let put = b"PUT /x HTTP/1.1\r\nHost: a:1\r\nContent-Length: 3\r\n\r\nabc";
        let chunked = b"POST /y HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n\
                        4;x=y\r\nabcd\r\n0\r\nTrailer: t\r\n\r\n";
        let head = b"HEAD /z HTTP/1.1\r\nHost: a:1\r\n\r\n";
        client.write_all(&[&put[..], chunked, head].concat()).await.unwrap();
        client.shutdown().await.unwrap();
        for expected in [&put[..], chunked, head] {
            let message = wire.read_message(Side::Request).await.unwrap().unwrap();
            assert_eq!(String::from_utf8(message.bytes).unwrap().as_bytes(), expected);
            assert_eq!(message.is_head, expected == head);
        }
        assert!(wire.read_message(Side::Request).await.unwrap().is_none());
    }

    #[tokio::test]
    async fn answers_end_where_they_should() {
        let (mut client, mut wire) = wires().await;
        let interim = b"HTTP/1.1 100 Continue\r\n\r\n";
        let to_head = b"HTTP/1.1 200 OK\r\nContent-Length: 77\r\n\r\n";
        let unchanged = b"HTTP/1.1 304 Not Modified\r\n\r\n";
        let rest = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nuntil the end";
        client.write_all(&[&interim[..], to_head, unchanged, rest].concat()).await.unwrap();
        client.shutdown().await.unwrap();
        for (expected, side, closes) in [
            (&to_head[..], Side::Answer(true), false),
            (unchanged, Side::Answer(false), false),
            (rest, Side::Answer(false), true),
        ] {
            let message = wire.read_message(side).await.unwrap().unwrap();
            assert_eq!(message.bytes, expected);
            assert_eq!(message.closes, closes);
        }
    }

    #[test]
    fn calm_is_after_the_end() {
        let mut dice = Dice::new(1, &[]);
        assert!((0..1000).all(|_| Fault::roll(None, &mut dice) == Fault::None));
        let storm = |dice: &mut Dice| Fault::roll(Some(Weather::Storm), dice) != Fault::None;
        assert!((0..1000).filter(|_| storm(&mut dice)).count() > 900);
    }
}
