//! Servers that peers need: on 127.0.0.1 and free ports, with throw-away data, stopped when dropped.

use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use tempfile::TempDir;

/// Starts a server, given where the peers were fetched to and where its data goes; says with which variable the runners are
/// told where it is.
pub type Start = fn(&Path, &Path) -> Result<(Service, (&'static str, String))>;

/// A server that runs as long as this lives.
pub struct Service {
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

/// Redis without persistence. Where it is goes to the runners in the variable.
pub fn redis(fetched: &Path, above: &Path) -> Result<(Service, (&'static str, String))> {
    let (data, port) = (tempfile::tempdir_in(above)?, free_port()?);
    let mut command = unpacked(fetched, "usr/bin/redis-server");
    command.args(["--bind", "127.0.0.1", "--port", &port.to_string()]);
    command.args(["--save", "", "--appendonly", "no", "--dir"]).arg(data.path());
    Ok((start(command, data, port)?, ("REDIS_PORT", port.to_string())))
}

/// PostgreSQL as it is out of the box. It refuses to run as root: then it runs as nobody.
pub fn postgres(fetched: &Path, above: &Path) -> Result<(Service, (&'static str, String))> {
    const NOBODY: u32 = 65534;
    let (data, port) = (tempfile::tempdir_in(above)?, free_port()?);
    let root = rustix::process::geteuid().is_root();
    if root {
        std::os::unix::fs::chown(data.path(), Some(NOBODY), Some(NOBODY))?;
    }
    let program = |name: &str| {
        use std::os::unix::process::CommandExt as _;
        let mut command = unpacked(fetched, &format!("usr/lib/postgresql/15/bin/{name}"));
        command.current_dir(data.path());
        if root {
            command.uid(NOBODY).gid(NOBODY);
        }
        command
    };
    let cluster = data.path().join("cluster");
    let mut initdb = program("initdb");
    initdb.args(["-A", "trust", "-U", "postgres", "-D"]).arg(&cluster);
    let made = initdb.output().context("cannot run initdb")?;
    ensure!(made.status.success(), "initdb: {}", String::from_utf8_lossy(&made.stderr));
    let mut command = program("postgres");
    command.arg("-D").arg(&cluster).args(["-c", "listen_addresses=127.0.0.1"]);
    command.args(["-c", &format!("port={port}")]);
    command.arg("-c").arg(format!("unix_socket_directories={}", data.path().display()));
    Ok((start(command, data, port)?, ("POSTGRES_PORT", port.to_string())))
}

/// beanstalkd with a log that is flushed for every command.
pub fn beanstalkd(fetched: &Path, above: &Path) -> Result<(Service, (&'static str, String))> {
    let (data, port) = (tempfile::tempdir_in(above)?, free_port()?);
    let mut command = unpacked(fetched, "usr/bin/beanstalkd");
    command.args(["-l", "127.0.0.1", "-p", &port.to_string(), "-f", "0", "-b"]).arg(data.path());
    Ok((start(command, data, port)?, ("BEANSTALKD_PORT", port.to_string())))
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
    let mut service = Service { process, _data: data };
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
