//! Real servers for tests and benchmarks: each [`Server`] is one process on 127.0.0.1, on free
//! ports, with its own throw-away data and an empty bucket.
//!
//! `scripts/servers.sh` installs the programs into `.servers/`; a test never skips because one is
//! missing, it fails.
//!
//! # A server never outlives its test
//!
//! Tests keep servers in statics, which are never dropped, and tests that kill processes are killed
//! themselves. So the server is not stopped by [`Drop`] alone: it shares its process group with a
//! shell that reads from a pipe whose only writing end is in the process that called the
//! constructor. However that process ends, the pipe closes, and the shell kills the server, removes
//! its data, and then kills what is left of the group, itself included:
//!
//! ```text
//!   test process ──pipe──▶ watchdog (sh)  ┐
//!        └───────child───▶ server         ├ one process group, led by the server
//!                             └─ children ┘
//! ```
//!
//! As long as the watchdog is in the group, the kernel gives the group's number to no other
//! process, so the watchdog cannot hit a stranger, even when the server died long before.
// Test-only: the waiting here is for real processes, in real time, and never simulated.
#![allow(clippy::disallowed_methods)]

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// The bucket (or container) that every server has.
const BUCKET: &str = "test";

/// At least 3 characters: `rclone` refuses every request with a shorter access key.
const S3_ACCESS_KEY: &str = "leasehold-test";
const S3_SECRET_KEY: &str = "leasehold-test-secret";

/// Azurite's account and key, the same in every installation and published in its documentation.
const AZURITE_ACCOUNT: &str = "devstoreaccount1";
const AZURITE_KEY: &str =
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";

/// How long a server may take until it answers, and again until it has made the bucket.
const START_DEADLINE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(20);

/// Starts on new ports each time: another process can take a port between our finding it free and
/// the server using it.
const START_ATTEMPTS: u32 = 3;

/// `sh -c WATCHDOG sh DATA SOCKETS PROGRAM [ARGUMENT]...` becomes PROGRAM; see the module's
/// documentation.
///
/// Descriptor 3 is the pipe, because a shell gives its background jobs /dev/null as standard input.
/// The signals are ignored because the kernel hangs up a group that loses its parent while a member
/// is stopped, as tests do to servers. `$$` is the server, even in the watchdog: it is the process
/// that the shell was before it became PROGRAM.
const WATCHDOG: &str = r#"
data=$1 sockets=$2
shift 2
exec 3<&0 </dev/null
(
    trap '' HUP INT TERM
    read -r _ <&3
    kill -9 $$
    rm -rf "$data" $sockets
    kill -9 0
) 2>/dev/null &
exec "$@" 3<&-
"#;

/// Makes the bucket with a signed request, and writes and deletes one object in it on S3: the first
/// write to a new bucket of SeaweedFS stalls, for 0.2 s at best, which would look like a slow or
/// lost answer to a test.
const MAKE_BUCKET: &str = r#"
import base64, email.utils, hashlib, hmac, http.client, sys, time

kind, port, account, secret, bucket, seconds = sys.argv[1:]
deadline = time.monotonic() + float(seconds)

def mac(key, text):
    return hmac.new(key, text.encode(), hashlib.sha256)

def s3_headers(method, path, body):
    now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    digest = hashlib.sha256(body).hexdigest()
    headers = {"host": "127.0.0.1:" + port, "x-amz-content-sha256": digest, "x-amz-date": now}
    names = ";".join(headers)
    canonical = "\n".join([method, path, "", *map(":".join, headers.items()), "", names, digest])
    scope = now[:8] + "/us-east-1/s3/aws4_request"
    key = b"AWS4" + secret.encode()
    for part in scope.split("/"):
        key = mac(key, part).digest()
    canonical = hashlib.sha256(canonical.encode()).hexdigest()
    signature = mac(key, "\n".join(["AWS4-HMAC-SHA256", now, scope, canonical])).hexdigest()
    credential = f"Credential={account}/{scope}, SignedHeaders={names}, Signature={signature}"
    return headers | {"authorization": "AWS4-HMAC-SHA256 " + credential}

def azure_headers(method, path, body):
    resource = path.replace("?restype=container", "\nrestype:container")
    headers = {"x-ms-date": email.utils.formatdate(usegmt=True), "x-ms-version": "2021-12-02"}
    lines = [method, *[""] * 11, *map(":".join, headers.items()), f"/{account}{resource}"]
    signature = base64.b64encode(mac(base64.b64decode(secret), "\n".join(lines)).digest()).decode()
    return headers | {"authorization": f"SharedKey {account}:{signature}", "content-length": "0"}

def request(sign, method, path, body=b""):
    while True:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=10)
            connection.request(method, path, body, sign(method, path, body))
            response = connection.getresponse()
            answer = f"{response.status} {response.read().decode(errors='replace')}"
            if response.status < 300:
                return
            if response.status < 500:
                sys.exit(f"{method} {path}: {answer}")
        except (OSError, http.client.HTTPException) as error:
            answer = repr(error)
        if time.monotonic() > deadline:
            sys.exit(f"{method} {path}: {answer}")
        time.sleep(0.1)

if kind == "azure":
    request(azure_headers, "PUT", f"/{account}/{bucket}?restype=container")
else:
    request(s3_headers, "PUT", f"/{bucket}")
    request(s3_headers, "PUT", f"/{bucket}/warm-up", b"warm-up")
    request(s3_headers, "DELETE", f"/{bucket}/warm-up")
"#;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    SeaweedFs,
    Ministack,
    Azurite,
    Rclone,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::SeaweedFs => "SeaweedFS",
            Kind::Ministack => "ministack",
            Kind::Azurite => "Azurite",
            Kind::Rclone => "rclone",
        }
    }

    /// Where `scripts/servers.sh` puts the program, in `.servers`.
    fn program(self) -> &'static str {
        match self {
            Kind::SeaweedFs => "venv/bin/weed",
            Kind::Ministack => "venv/bin/ministack",
            Kind::Azurite => "azurite/node_modules/.bin/azurite-blob",
            Kind::Rclone => "venv/bin/rclone",
        }
    }
}

/// A running server with an empty bucket; it stops, and its data goes, when this is dropped or the
/// process ends.
#[derive(Debug)]
#[must_use = "the server stops when this is dropped"]
pub struct Server {
    kind: Kind,
    port: u16,
    /// The server itself. Its standard input is the pipe that the watchdog reads.
    child: Child,
    data: TempDir,
}

impl Server {
    /// Starts SeaweedFS, the S3 server to trust: correct under races, conditional deletes included.
    /// Takes about 2.5 s.
    ///
    /// Refuses wrong credentials and unsigned requests with 403. Lists in an order of its own, not
    /// by bytes.
    ///
    /// # Panics
    ///
    /// When it is not installed or does not start, as every constructor here.
    pub fn seaweedfs() -> Server {
        Server::start(Kind::SeaweedFs)
    }

    /// Starts ministack, an S3 server in memory with strict semantics, list order included. Takes
    /// about half a second.
    ///
    /// Accepts any credentials, and none.
    ///
    /// # Panics
    ///
    /// When it is not installed or does not start.
    pub fn ministack() -> Server {
        Server::start(Kind::Ministack)
    }

    /// Starts Azurite, which speaks Azure's Blob protocol. Takes about a second.
    ///
    /// Refuses a wrong key and unsigned requests with 403, and an unknown account with 404.
    ///
    /// # Panics
    ///
    /// When it is not installed or does not start.
    pub fn azurite() -> Server {
        Server::start(Kind::Azurite)
    }

    /// Starts `rclone serve s3`, which ignores every condition: a store that must be refused. Takes
    /// about 0.2 s.
    ///
    /// Refuses wrong credentials with 403 and unsigned requests with 400.
    ///
    /// # Panics
    ///
    /// When it is not installed or does not start.
    pub fn rclone() -> Server {
        Server::start(Kind::Rclone)
    }

    /// The URL that clients are configured with; for Azurite it ends with the account.
    pub fn endpoint(&self) -> String {
        match self.kind {
            Kind::Azurite => format!("http://127.0.0.1:{}/{AZURITE_ACCOUNT}", self.port),
            _ => format!("http://127.0.0.1:{}", self.port),
        }
    }

    /// The access key that the server knows; for Azurite the account's name.
    pub fn access_key(&self) -> &str {
        match self.kind {
            Kind::Azurite => AZURITE_ACCOUNT,
            _ => S3_ACCESS_KEY,
        }
    }

    /// The secret that belongs to [`access_key`](Server::access_key); for Azurite the account's
    /// key, in base64.
    pub fn secret_key(&self) -> &str {
        match self.kind {
            Kind::Azurite => AZURITE_KEY,
            _ => S3_SECRET_KEY,
        }
    }

    /// The bucket (for Azurite the container) that exists, and is empty, once the server is
    /// started.
    pub fn bucket(&self) -> &str {
        BUCKET
    }

    /// The process of the server itself, to be stopped, continued or killed by a test.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    fn start(kind: Kind) -> Server {
        let servers = servers_folder();
        let program = servers.join(kind.program());
        assert!(
            program.exists(),
            "{} is not installed: run scripts/test.sh (it installs the servers into .servers/); \
             looked for {}",
            kind.name(),
            program.display()
        );
        let mut attempt = 1;
        loop {
            let mut server = Server::launch(kind, &program);
            match server.wait_until_it_answers() {
                Ok(()) => {
                    server.make_bucket(&servers.join("venv/bin/python3"));
                    return server;
                }
                Err(NotReady::Exited(_)) if attempt < START_ATTEMPTS => attempt += 1,
                Err(why) => server.give_up(&why.to_string()),
            }
        }
    }

    /// Starts the process and its watchdog, and waits for nothing.
    fn launch(kind: Kind, program: &Path) -> Server {
        let data = tempfile::Builder::new()
            .prefix(&format!("leasehold-{}-", kind.name().to_lowercase()))
            .tempdir()
            .expect("a temporary folder for the server's data");
        let root = data.path();
        let launch = match kind {
            Kind::SeaweedFs => Launch::seaweedfs(root),
            Kind::Ministack => Launch::ministack(),
            Kind::Azurite => Launch::azurite(root),
            Kind::Rclone => Launch::rclone(root),
        };
        let log = File::create(log_file(root)).expect("the server's log can be written");
        let child = Command::new("sh")
            .args(["-c", WATCHDOG, "sh"])
            .arg(root)
            .arg(launch.sockets.join(" "))
            .arg(program)
            .args(launch.arguments)
            // Nothing in the caller's environment changes a test: no proxy, no server's setting.
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("HOME", root)
            .env("TMPDIR", root)
            .envs(launch.environment)
            .current_dir(root)
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(log.try_clone().expect("a second handle of the log"))
            .stderr(log)
            .spawn()
            .expect("sh can be started");
        Server { kind, port: launch.port, child, data }
    }

    fn wait_until_it_answers(&mut self) -> Result<(), NotReady> {
        let deadline = Instant::now() + START_DEADLINE;
        loop {
            if let Some(status) = self.child.try_wait().expect("the server is our child") {
                return Err(NotReady::Exited(status.to_string()));
            }
            if listens(self.pid(), self.port) && answers(self.port) {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(NotReady::Silent);
            }
            std::thread::sleep(POLL);
        }
    }

    fn make_bucket(&self, python: &Path) {
        let protocol = match self.kind {
            Kind::Azurite => "azure",
            Kind::SeaweedFs | Kind::Ministack | Kind::Rclone => "s3",
        };
        let output = Command::new(python)
            .args(["-I", "-S", "-c", MAKE_BUCKET, protocol])
            .arg(self.port.to_string())
            .args([self.access_key(), self.secret_key(), BUCKET])
            .arg(START_DEADLINE.as_secs().to_string())
            .stdin(Stdio::null())
            .output();
        match output {
            Ok(output) if output.status.success() => {}
            Ok(output) => {
                let said = String::from_utf8_lossy(&output.stderr);
                self.give_up(&format!("did not make the bucket: {}", said.trim()));
            }
            Err(error) => self
                .give_up(&format!("has no bucket: {} does not start: {error}", python.display())),
        }
    }

    /// Panics with what the server said last.
    fn give_up(&self, why: &str) -> ! {
        let log = fs::read(log_file(self.data.path())).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let lines: Vec<&str> = log.lines().collect();
        let tail = lines[lines.len().saturating_sub(40)..].join("\n");
        panic!(
            "{} on port {} {why}\n--- the end of its log ---\n{tail}",
            self.kind.name(),
            self.port
        );
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Fails when the server is gone already, which is fine.
        let _ = self.child.kill();
        // The watchdog sees this and ends the rest of the group, after `drop` has returned.
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

/// What a kind of server is started with.
#[derive(Default)]
struct Launch {
    port: u16,
    arguments: Vec<String>,
    environment: Vec<(&'static str, String)>,
    /// What the server leaves outside of its data folder when it is killed.
    sockets: Vec<String>,
}

impl Launch {
    fn seaweedfs(data: &Path) -> Launch {
        // No anonymous identity, so unsigned requests are refused.
        let identities = format!(
            r#"{{"identities": [{{
                "name": "test",
                "credentials": [{{"accessKey": "{S3_ACCESS_KEY}", "secretKey": "{S3_SECRET_KEY}"}}],
                "actions": ["Admin", "Read", "Write", "List", "Tagging"]
            }}]}}"#
        );
        let config = data.join("s3.json");
        fs::write(&config, identities).expect("the server's data can be written");
        let data = data.display();
        let mut arguments = vec![
            "server".to_owned(),
            format!("-dir={data}"),
            "-ip=127.0.0.1".to_owned(),
            "-ip.bind=127.0.0.1".to_owned(),
            "-master.telemetry=false".to_owned(),
            "-master.electionTimeout=1s".to_owned(),
            "-master.peers=none".to_owned(), // leads at once, instead of a second later
            "-master.volumeSizeLimitMB=256".to_owned(),
            "-volume.max=50".to_owned(),
            // Without it a large disk that is nearly full (1 %) takes no writes at all.
            "-volume.minFreeSpace=64MiB".to_owned(),
            "-filer".to_owned(),
            format!("-filer.localSocket={data}/filer.sock"),
            "-s3".to_owned(),
            format!("-s3.localSocket={data}/s3.sock"),
            format!("-s3.config={}", config.display()),
            "-s3.port.iceberg=0".to_owned(),
            "-s3.port.lance=0".to_owned(),
        ];
        let mut sockets = Vec::new();
        let ports: [u16; 8] = free_ports();
        for (part, pair) in ["master", "volume", "filer", "s3"].iter().zip(ports.chunks(2)) {
            let (http, grpc) = (pair[0], pair[1]);
            arguments.push(format!("-{part}.port={http}"));
            arguments.push(format!("-{part}.port.grpc={grpc}"));
            // No option moves these elsewhere.
            sockets.push(format!("/tmp/seaweedfs-{part}-grpc-{grpc}.sock"));
        }
        Launch {
            port: ports[6], // HTTP of the part "s3"
            arguments,
            sockets,
            ..Launch::default()
        }
    }

    fn ministack() -> Launch {
        let [port] = free_ports();
        let environment =
            vec![("BIND_HOST", "127.0.0.1".to_owned()), ("GATEWAY_PORT", port.to_string())];
        Launch { port, environment, ..Launch::default() }
    }

    fn azurite(data: &Path) -> Launch {
        let [port] = free_ports();
        let arguments = vec![
            "--blobHost=127.0.0.1".to_owned(),
            format!("--blobPort={port}"),
            format!("--location={}", data.display()),
            "--silent".to_owned(),
            "--disableTelemetry".to_owned(),
            "--skipApiVersionCheck".to_owned(),
        ];
        Launch { port, arguments, ..Launch::default() }
    }

    fn rclone(data: &Path) -> Launch {
        let [port] = free_ports();
        let buckets = data.join("buckets");
        fs::create_dir(&buckets).expect("the server's data can be written");
        let arguments = vec![
            "serve".to_owned(),
            "s3".to_owned(),
            "--config=".to_owned(), // none
            format!("--addr=127.0.0.1:{port}"),
            format!("--auth-key={S3_ACCESS_KEY},{S3_SECRET_KEY}"),
            buckets.display().to_string(),
        ];
        Launch { port, arguments, ..Launch::default() }
    }
}

enum NotReady {
    /// Before it answered; usually because another process took one of its ports.
    Exited(String),
    Silent,
}

impl std::fmt::Display for NotReady {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            NotReady::Exited(status) => {
                write!(f, "ended {START_ATTEMPTS} times while starting ({status})")
            }
            NotReady::Silent => write!(f, "did not answer within {} s", START_DEADLINE.as_secs()),
        }
    }
}

/// The nearest `.servers` at or above this crate, or `$LEASEHOLD_SERVERS`.
pub fn servers_folder() -> PathBuf {
    if let Some(folder) = std::env::var_os("LEASEHOLD_SERVERS") {
        return std::path::absolute(folder).expect("LEASEHOLD_SERVERS is a path");
    }
    let crate_folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    crate_folder
        .ancestors()
        .map(|folder| folder.join(".servers"))
        .find(|folder| folder.is_dir())
        // Named in the message about the missing program.
        .unwrap_or_else(|| crate_folder.join(".servers"))
}

fn log_file(data: &Path) -> PathBuf {
    data.join("server.log")
}

/// Different ports that nothing listens on at this moment.
fn free_ports<const N: usize>() -> [u16; N] {
    // All are held until all are found, so that none is found twice.
    let held: [TcpListener; N] = std::array::from_fn(|_| {
        TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port on 127.0.0.1")
    });
    held.each_ref()
        .map(|listener| listener.local_addr().expect("a bound socket has an address").port())
}

/// Whether it is process `pid` that listens on `port`.
///
/// Without this, two test runs that were given the same port would both be content with the one
/// server that got it.
#[cfg(target_os = "linux")]
fn listens(pid: u32, port: u16) -> bool {
    const LISTEN: &str = "0A";
    let Ok(sockets) = fs::read_to_string("/proc/net/tcp") else {
        return true;
    };
    let port = format!(":{port:04X}");
    let mut inodes = sockets.lines().filter_map(|line| {
        let columns: Vec<&str> = line.split_whitespace().collect();
        (columns.len() > 9 && columns[1].ends_with(&port) && columns[3] == LISTEN)
            .then(|| columns[9].to_owned())
    });
    inodes.any(|inode| {
        let socket = PathBuf::from(format!("socket:[{inode}]"));
        let Ok(descriptors) = fs::read_dir(format!("/proc/{pid}/fd")) else {
            return false;
        };
        descriptors
            .flatten()
            .any(|entry| fs::read_link(entry.path()).is_ok_and(|target| target == socket))
    })
}

#[cfg(not(target_os = "linux"))]
fn listens(_pid: u32, _port: u16) -> bool {
    true
}

/// Whether an HTTP server answers on `port`, be it with a refusal, but not with an error of its own
/// (5xx).
fn answers(port: u16) -> bool {
    let ask = || -> std::io::Result<[u8; 12]> {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(1))?;
        stream.set_read_timeout(Some(Duration::from_secs(2)))?;
        stream.write_all(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")?;
        let mut start = [0; 12]; // "HTTP/1.1 200"
        stream.read_exact(&mut start)?;
        Ok(start)
    };
    ask().is_ok_and(|start| start.starts_with(b"HTTP/1.") && start[9] < b'5')
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};

    use super::*;

    fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(10);
        while !is_so() {
            assert!(Instant::now() < deadline, "not within 10 s: {what}");
            std::thread::sleep(POLL);
        }
    }

    #[test]
    fn a_dropped_server_is_gone_with_its_data() {
        let server = Server::rclone();
        let (port, data) = (server.port, server.data.path().to_owned());
        assert!(answers(port) && data.exists());
        drop(server);
        assert!(!answers(port));
        wait_until("the data is removed", || !data.exists());
    }

    #[test]
    fn a_server_dies_with_the_process_that_started_it() {
        let mut owner = Command::new(std::env::current_exe().expect("this test has a program"))
            .args(["own_a_server_until_killed", "--ignored", "--nocapture"])
            .stdout(Stdio::piped())
            .spawn()
            .expect("this test can be started again");
        let output = BufReader::new(owner.stdout.take().expect("piped"));
        let line = output
            .lines()
            .map(|line| line.expect("the owner's output is text"))
            .find(|line| line.starts_with("owned: "))
            .expect("the owner ended early");
        let mut words = line.splitn(3, ' ').skip(1);
        let port: u16 = words.next().and_then(|port| port.parse().ok()).expect("the port");
        let data = PathBuf::from(words.next().expect("the data folder"));
        assert!(answers(port) && data.exists());

        owner.kill().expect("the owner can be killed"); // SIGKILL: nothing of it runs any more
        owner.wait().expect("the owner is our child");
        wait_until("the server is gone", || !answers(port));
        wait_until("the data is removed", || !data.exists());
    }

    #[test]
    #[ignore = "run by a_server_dies_with_the_process_that_started_it"]
    fn own_a_server_until_killed() {
        let server = Server::rclone();
        println!("\nowned: {} {}", server.port, server.data.path().display());
        std::thread::sleep(Duration::from_secs(20));
    }
}
