//! A small S3 in this process whose answers a test can spoil, one request at a time.
//!
//! It knows PUT, GET, HEAD and DELETE of whole objects with their conditions, and nothing else. It
//! is for what real servers cannot be made to do on request: to carry out a write and hang up, to
//! be overloaded, to answer 409.

use std::collections::HashMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// What to do to a request.
#[derive(Debug, Clone)]
pub enum Spoil {
    /// Answer it as it should be.
    Nothing,
    /// Answer with this status and error code, without carrying it out.
    Instead(u16, &'static str),
    /// Carry it out, then answer with this status and error code.
    Afterwards(u16, &'static str),
    /// Close the connection without an answer, without carrying it out.
    HangUp,
    /// Carry it out, then close the connection without an answer.
    HangUpAfterwards,
    /// Send the head and half of the body, then close the connection.
    HalfABody,
    /// Answer with this body.
    Body(&'static str),
    /// Wait this long, then answer as it should be.
    Slowly(Duration),
}

/// A request as the server saw it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// GET, PUT, ….
    pub method: String,
    /// Path and query.
    pub target: String,
    /// The names in lower case.
    pub headers: HashMap<String, String>,
    /// The body.
    pub body: Vec<u8>,
}

type Script = Box<dyn FnMut(&Request) -> Spoil + Send>;

struct Shared {
    script: Mutex<Script>,
    objects: Mutex<HashMap<String, Vec<u8>>>,
    seen: Mutex<Vec<Request>>,
    open: AtomicUsize,
    most: AtomicUsize,
    busy: AtomicUsize,
    most_busy: AtomicUsize,
}

/// The server. Its threads end with the test process.
pub struct TinyS3 {
    address: SocketAddr,
    shared: Arc<Shared>,
}

impl TinyS3 {
    /// Starts it; `script` decides what happens to each request.
    pub fn start(script: impl FnMut(&Request) -> Spoil + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port on loopback");
        let address = listener.local_addr().expect("a bound listener has an address");
        let shared = Arc::new(Shared {
            script: Mutex::new(Box::new(script)),
            objects: Mutex::default(),
            seen: Mutex::default(),
            open: AtomicUsize::new(0),
            most: AtomicUsize::new(0),
            busy: AtomicUsize::new(0),
            most_busy: AtomicUsize::new(0),
        });
        let server = shared.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let shared = server.clone();
                std::thread::spawn(move || {
                    let open = shared.open.fetch_add(1, SeqCst) + 1;
                    shared.most.fetch_max(open, SeqCst);
                    // An error is the client hanging up.
                    let _ = serve(&stream, &shared);
                    shared.open.fetch_sub(1, SeqCst);
                });
            }
        });
        Self { address, shared }
    }

    /// Its URL.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// All requests so far.
    pub fn requests(&self) -> Vec<Request> {
        lock(&self.shared.seen).clone()
    }

    /// How many connections were open at once at most.
    pub fn most_connections(&self) -> usize {
        self.shared.most.load(SeqCst)
    }

    /// How many requests were under way at once at most since this was last asked.
    pub fn most_requests(&self) -> usize {
        self.shared.most_busy.swap(0, SeqCst)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn serve(stream: &TcpStream, shared: &Shared) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    while let Some(request) = read_request(&mut reader)? {
        let busy = Busy::new(shared);
        lock(&shared.seen).push(request.clone());
        let spoil = lock(&shared.script)(&request);
        let carried_out = || carry_out(shared, &request);
        let (answer, cut) = match spoil {
            Spoil::Nothing => (carried_out(), false),
            Spoil::Slowly(pause) => {
                std::thread::sleep(pause);
                (carried_out(), false)
            }
            Spoil::Body(text) => {
                (Answer { status: 200, etag: None, body: text.as_bytes().to_vec() }, false)
            }
            Spoil::Instead(status, code) => (Answer::error(status, code), false),
            Spoil::Afterwards(status, code) => {
                carried_out();
                (Answer::error(status, code), false)
            }
            Spoil::HangUp => return Ok(()),
            Spoil::HangUpAfterwards => {
                carried_out();
                return Ok(());
            }
            Spoil::HalfABody => (carried_out(), true),
        };
        let mut bytes = answer.bytes(request.method == "HEAD");
        if cut {
            bytes.truncate(bytes.len() - answer.body.len() / 2);
        }
        // Before the client knows and sends the next one.
        drop(busy);
        let mut stream = stream;
        stream.write_all(&bytes)?;
        if cut {
            return Ok(());
        }
    }
    Ok(())
}

/// A request that is under way.
struct Busy<'a>(&'a Shared);

impl<'a> Busy<'a> {
    fn new(shared: &'a Shared) -> Self {
        let busy = shared.busy.fetch_add(1, SeqCst) + 1;
        shared.most_busy.fetch_max(busy, SeqCst);
        Self(shared)
    }
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.busy.fetch_sub(1, SeqCst);
    }
}

fn read_request(reader: &mut BufReader<TcpStream>) -> std::io::Result<Option<Request>> {
    let mut line = String::new();
    if reader.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    let mut words = line.split_whitespace().map(str::to_owned);
    let method = words.next().unwrap_or_default();
    let target = words.next().unwrap_or_default();
    let mut headers = HashMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let Some((name, value)) = line.trim_end().split_once(':') else { break };
        headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
    }
    let length = headers.get("content-length").and_then(|text| text.parse().ok()).unwrap_or(0);
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    Ok(Some(Request { method, target, headers, body }))
}

struct Answer {
    status: u16,
    etag: Option<String>,
    body: Vec<u8>,
}

impl Answer {
    fn error(status: u16, code: &str) -> Self {
        let body = format!("<Error><Code>{code}</Code><Message>by the test</Message></Error>");
        Self { status, etag: None, body: body.into_bytes() }
    }

    fn bytes(&self, head: bool) -> Vec<u8> {
        let mut text = format!(
            "HTTP/1.1 {} X\r\nDate: Sun, 15 Nov 2026 10:00:07 GMT\r\nContent-Length: {}\r\n",
            self.status,
            self.body.len()
        );
        if let Some(etag) = &self.etag {
            text.push_str(&format!(
                "ETag: {etag}\r\nLast-Modified: Sun, 15 Nov 2026 10:00:00 GMT\r\n"
            ));
        }
        text.push_str("\r\n");
        let mut bytes = text.into_bytes();
        if !head {
            bytes.extend_from_slice(&self.body);
        }
        bytes
    }
}

fn etag(body: &[u8]) -> String {
    let hash = body.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("\"{hash:016x}\"")
}

fn carry_out(shared: &Shared, request: &Request) -> Answer {
    let mut objects = lock(&shared.objects);
    let there = objects.get(&request.target).map(|body| etag(body));
    let header = |name: &str| request.headers.get(name).map(String::as_str);
    if let (Some("*"), Some(_)) = (header("if-none-match"), &there) {
        return Answer::error(412, "PreconditionFailed");
    }
    if let Some(expected) = header("if-match") {
        match &there {
            None => return Answer::error(404, "NoSuchKey"),
            Some(there) if there != expected => return Answer::error(412, "PreconditionFailed"),
            Some(_) => {}
        }
    }
    match request.method.as_str() {
        "PUT" => {
            let etag = etag(&request.body);
            objects.insert(request.target.clone(), request.body.clone());
            Answer { status: 200, etag: Some(etag), body: Vec::new() }
        }
        "DELETE" => {
            objects.remove(&request.target);
            Answer { status: 204, etag: None, body: Vec::new() }
        }
        _ => match objects.get(&request.target) {
            Some(body) => Answer { status: 200, etag: there, body: body.clone() },
            None => Answer::error(404, "NoSuchKey"),
        },
    }
}
