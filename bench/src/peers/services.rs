//! Servers that peers need: on 127.0.0.1 and free ports, with throw-away data, stopped when dropped.

use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use tempfile::TempDir;

/// A server that a peer needs. The runners are told its port in `$PORT`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Server {
    /// Redis without persistence.
    Redis,
    /// Redis with a log that is flushed before each answer.
    DurableRedis,
    /// PostgreSQL as it is out of the box: durable.
    Postgres,
    /// beanstalkd with a log that is flushed for every command.
    Beanstalkd,
}

/// A server that runs as long as this lives.
pub struct Service {
    pub port: u16,
    process: Child,
    _data: TempDir,
}

impl Drop for Service {
    fn drop(&mut self) {
        // Its data is thrown away anyway.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Server {
    /// Starts it, given where the peers were fetched to and where its data goes.
    pub fn start(self, fetched: &Path, above: &Path) -> Result<Service> {
        let (data, port) = (tempfile::tempdir_in(above)?, free_port()?);
        let command = match self {
            Self::Redis | Self::DurableRedis => {
                let mut command = unpacked(fetched, "usr/bin/redis-server");
                command.args(["--bind", "127.0.0.1", "--port", &port.to_string(), "--save", ""]);
                command.args(match self {
                    Self::Redis => ["--appendonly", "no", "--appendfsync", "no"],
                    _ => ["--appendonly", "yes", "--appendfsync", "always"],
                });
                command.arg("--dir").arg(data.path());
                command
            }
            Self::Postgres => postgres(fetched, data.path(), port)?,
            Self::Beanstalkd => {
                let mut command = unpacked(fetched, "usr/bin/beanstalkd");
                command.args(["-l", "127.0.0.1", "-p", &port.to_string(), "-f", "0", "-b"]);
                command.arg(data.path());
                command
            }
        };
        start(command, data, port)
    }
}

/// PostgreSQL refuses to run as root: then it runs as nobody.
fn postgres(fetched: &Path, data: &Path, port: u16) -> Result<Command> {
    const NOBODY: u32 = 65534;
    let root = rustix::process::geteuid().is_root();
    if root {
        std::os::unix::fs::chown(data, Some(NOBODY), Some(NOBODY))?;
    }
    let program = |name: &str| {
        use std::os::unix::process::CommandExt as _;
        let mut command = unpacked(fetched, &format!("usr/lib/postgresql/15/bin/{name}"));
        command.current_dir(data);
        if root {
            command.uid(NOBODY).gid(NOBODY);
        }
        command
    };
    let cluster = data.join("cluster");
    let mut initdb = program("initdb");
    initdb.args(["-A", "trust", "-U", "postgres", "-D"]).arg(&cluster);
    let made = initdb.output().context("cannot run initdb")?;
    ensure!(made.status.success(), "initdb: {}", String::from_utf8_lossy(&made.stderr));
    let mut command = program("postgres");
    command.arg("-D").arg(&cluster).args(["-c", "listen_addresses=127.0.0.1"]);
    command.args(["-c", &format!("port={port}")]);
    command.arg("-c").arg(format!("unix_socket_directories={}", data.display()));
    Ok(command)
}

/// A program of an unpacked Debian package.
fn unpacked(fetched: &Path, program: &str) -> Command {
    let root = fetched.join("debs/root");
    let mut command = Command::new(root.join(program));
    let libraries =
        ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu"];
    let libraries: Vec<_> =
        libraries.iter().map(|folder| root.join(folder).display().to_string()).collect();
    command.env("LD_LIBRARY_PATH", libraries.join(":"));
    command
}

fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

fn start(mut command: Command, data: TempDir, port: u16) -> Result<Service> {
    let log = std::fs::File::create(data.path().join("log"))?;
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    let process = command.spawn().with_context(|| format!("cannot start {command:?}"))?;
    let mut service = Service { port, process, _data: data };
    let end = Instant::now() + Duration::from_secs(20);
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        let ended = service.process.try_wait()?;
        if ended.is_some() || Instant::now() > end {
            let log = std::fs::read_to_string(service._data.path().join("log"));
            bail!("{command:?} does not answer: {}", log.unwrap_or_default());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    // A server that answers may still be starting up, and says so to its first clients.
    std::thread::sleep(Duration::from_millis(500));
    Ok(service)
}
