//! Running a program that must not outlive us.
//!
//! A lock whose holder was killed is taken over within milliseconds. So what ran under it must be
//! gone by then, whatever was killed (FIELD.md row 26). Three processes stand in a row:
//!
//! ```text
//!   leasehold lock run     holds the lock
//!     │ a pipe             closed by the kernel when it dies
//!   leasehold (sitter)     recorded in the lock; kills the program and all that came of it when the
//!     │                    pipe closes; ends after it
//!     │ parent-death signal
//!   the program            started through a shim that asks for the signal, so that it does not
//!                          outlive a killed sitter either
//! ```
//!
//! The program is not started before the sitter is recorded in the lock. Through the pipe the
//! sitter hears again and again until when the lock can be trusted, by the clock that goes on
//! during suspend. When that is over, because its parent is stopped or the machine slept, it stops
//! the program by itself: politely, and then before anybody else may start.
//!
//! What is not covered: if runner *and* sitter are killed at once, the program dies with them, but
//! processes that it had started do not: Linux has no way to bind them to us but control groups,
//! which are not ours to make.
//!
//! A *task* of a queue runs the same way, with two differences. Whatever is left of it when its
//! program ends is ended with it, so that no attempt reaches into the next one. And its worker does
//! not note each sitter in a lease: it has a *warden*, a process that does nothing but live until the
//! worker and all its sitters have ended, and whose number stands in the worker's leases from the
//! start. They all hold the writing end of a pipe that the warden reads from; so does the program and
//! what it starts, and should runner and sitter be killed at once, what is left of the program still
//! keeps others from its task until the ttl is over.
//!
//! A *filter* (`pad update`) has no sitter. Whatever it does goes through a pipe to the runner, which
//! alone writes the file, in the version that was read: a filter that lives on has nobody to write
//! for. It gets the parent-death signal and is killed when the lock is lost.

use std::ffi::OsString;
use std::io::{Read as _, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{ExitCode, ExitStatus, Stdio};
use std::task::Poll;
use std::time::Duration;

use anyhow::Context as _;
use leasehold::env::{BootTime, Env};
use rustix::process::{Pid, Signal};
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};

const SITTER: &str = "--leasehold-sitter";
const TASK_SITTER: &str = "--leasehold-task-sitter";
const SHIM: &str = "--leasehold-shim";
const WARDEN: &str = "--leasehold-warden";

/// How a sitter ends that never started its program, because the lock was lost before. No exit code:
/// the program may have any. Nobody else sends it this.
const NOT_STARTED: Signal = Signal::ALARM;

/// Does the work of a sitter, a shim or a warden, if this process is one.
pub fn entry() -> Option<ExitCode> {
    let mut words = std::env::args_os().skip(1);
    let role = words.next()?;
    if role == SITTER || role == TASK_SITTER {
        let pipe = words.next()?.into_string().ok()?;
        return Some(match sit(&pipe, words.collect(), role == TASK_SITTER) {
            Ok(code) => ExitCode::from(code),
            Err(error) => {
                eprintln!("error: {error:#}");
                ExitCode::from(127)
            }
        });
    }
    if role == WARDEN {
        // Ends when everybody who holds the other end has.
        let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
        return Some(ExitCode::SUCCESS);
    }
    if role == SHIM {
        let parent = words.next()?.into_string().ok()?.parse().ok()?;
        return Some(become_program(parent, words.collect()));
    }
    None
}

/// This very program, to be started again: where it was installed, so that an upgrade takes effect,
/// or else what is running, if an upgrade has just removed that.
pub fn own_program() -> std::io::Result<std::path::PathBuf> {
    let installed = std::env::current_exe()?;
    match cfg!(target_os = "linux") && !installed.exists() {
        true => Ok("/proc/self/exe".into()),
        false => Ok(installed),
    }
}

/// Whether there is no such program that can be started, as far as that can be told: not where its name is put
/// together later.
pub fn is_missing(program: &std::ffi::OsStr) -> bool {
    let path = std::path::Path::new(program);
    if program.is_empty() || program.to_string_lossy().contains('{') {
        return false;
    }
    // A script that nobody may execute is as good as none.
    let runs = |path: &std::path::Path| {
        use std::os::unix::fs::PermissionsExt as _;
        path.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
    };
    if path.components().count() > 1 || program.to_string_lossy().contains('/') {
        return !runs(path);
    }
    // Without it, the system has places of its own.
    let Some(places) = std::env::var_os("PATH") else { return false };
    !std::env::split_paths(&places).any(|place| runs(&place.join(path)))
}

/// Whether the program shares a terminal with us, which sends it what is typed there.
pub fn on_terminal() -> bool {
    std::io::IsTerminal::is_terminal(&std::io::stdin())
}

/// What is passed on to the program.
const SIGNALS: [(fn() -> SignalKind, Signal); 7] = [
    (SignalKind::terminate, Signal::TERM),
    (SignalKind::interrupt, Signal::INT),
    (SignalKind::hangup, Signal::HUP),
    (SignalKind::quit, Signal::QUIT),
    (SignalKind::user_defined1, Signal::USR1),
    (SignalKind::user_defined2, Signal::USR2),
    (SignalKind::window_change, Signal::WINCH),
];

/// The signals that this process gets, instead of what they would do by themselves.
pub struct Signals {
    all: Vec<(tokio::signal::unix::Signal, Signal)>,
    /// Only to have a handler. Whoever started us may ignore it, and then the end of a child is
    /// never told.
    _child: tokio::signal::unix::Signal,
}

impl Signals {
    /// From now on.
    pub fn catch() -> std::io::Result<Self> {
        let caught = SIGNALS.iter().map(|(kind, number)| Ok((signal(kind())?, *number)));
        Ok(Self {
            all: caught.collect::<std::io::Result<_>>()?,
            _child: signal(SignalKind::child())?,
        })
    }

    /// The next one.
    pub async fn next(&mut self) -> Signal {
        std::future::poll_fn(|context| {
            let came = |(signal, number): &mut (tokio::signal::unix::Signal, Signal)| {
                signal.poll_recv(context).is_ready().then_some(*number)
            };
            self.all.iter_mut().find_map(came).map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }

    /// The next one that asks a process to end.
    pub async fn stop(&mut self) -> Signal {
        loop {
            let number = self.next().await;
            if [Signal::TERM, Signal::INT, Signal::HUP, Signal::QUIT].contains(&number) {
                return number;
            }
        }
    }
}

/// Whether the program gets it from the terminal that it shares with us, so that it would get it
/// twice.
fn comes_from_terminal(signal: Signal) -> bool {
    [Signal::INT, Signal::QUIT, Signal::WINCH].contains(&signal) && on_terminal()
}

/// The exit code of what a signal ended, as shells have it.
pub fn code_of_signal(signal: Signal) -> u8 {
    u8::try_from(128 + signal.as_raw()).unwrap_or(1)
}

/// A program between a file as it is and as it will be.
pub struct Filter(Child);

impl Filter {
    /// Starts it, in a group of its own unless it shares a terminal with us.
    pub fn start(
        command: &[OsString],
        variables: impl IntoIterator<Item = (&'static str, String)>,
    ) -> anyhow::Result<Self> {
        let mut shim = std::process::Command::new(own_program()?);
        shim.arg(SHIM).arg(std::process::id().to_string()).args(command).envs(variables);
        if !on_terminal() {
            shim.process_group(0);
        }
        let mut shim = Command::from(shim);
        shim.stdin(Stdio::piped()).stdout(Stdio::piped());
        Ok(Self(shim.spawn().context("cannot start the command")?))
    }

    /// Where it reads from and writes to.
    pub fn pipes(&mut self) -> Option<(tokio::process::ChildStdin, tokio::process::ChildStdout)> {
        Some((self.0.stdin.take()?, self.0.stdout.take()?))
    }

    /// Passes a signal on to it.
    pub fn signal(&self, signal: Signal) {
        if !comes_from_terminal(signal) {
            send_to_group(self.0.id(), !on_terminal(), signal);
        }
    }

    /// Completes when it has ended, with its exit code.
    pub async fn wait(&mut self) -> anyhow::Result<u8> {
        Ok(code_of(self.0.wait().await?))
    }
}

/// How a program talks to us.
pub struct Pipes {
    pub stdin: tokio::process::ChildStdin,
    pub stdout: tokio::process::ChildStdout,
    pub stderr: tokio::process::ChildStderr,
}

/// A process that lives until we and all our tasks have ended: whoever finds us gone, but not it,
/// leaves our tasks alone.
pub struct Warden {
    process: Child,
    /// Everything that we start inherits it.
    _pipe: OwnedFd,
}

impl Warden {
    /// Starts it.
    pub fn start() -> anyhow::Result<Self> {
        let (read, pipe) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        let mut warden = std::process::Command::new(own_program()?);
        // Signals to our group are not for it: it must not end before the others.
        warden.arg(WARDEN).process_group(0);
        warden.stdin(read).stdout(Stdio::null()).stderr(Stdio::null());
        let process = Command::from(warden).spawn().context("cannot start a process")?;
        // From now on: had the warden inherited it, it would wait for itself.
        rustix::io::fcntl_setfd(&pipe, rustix::io::FdFlags::empty())?;
        Ok(Self { process, _pipe: pipe })
    }

    /// Its number.
    pub fn pid(&self) -> Option<u32> {
        self.process.id()
    }
}

/// A program that runs, and ends with us.
pub struct Running {
    sitter: Child,
    /// The sitter's life line.
    pipe: Option<std::fs::File>,
}

impl Running {
    /// Starts the sitter. The program starts with the first [`Running::trust`].
    pub fn start(
        command: &[OsString],
        variables: impl IntoIterator<Item = (&'static str, String)>,
    ) -> anyhow::Result<Self> {
        Self::start_with(command, variables, Stdio::inherit, false)
    }

    /// The same for a task, which talks to us instead of to whoever started us.
    pub fn start_task(
        command: &[OsString],
        variables: impl IntoIterator<Item = (&'static str, String)>,
    ) -> anyhow::Result<(Self, Pipes)> {
        let mut running = Self::start_with(command, variables, Stdio::piped, true)?;
        let Child { stdin, stdout, stderr, .. } = &mut running.sitter;
        let pipes = stdin.take().zip(stdout.take()).zip(stderr.take());
        let ((stdin, stdout), stderr) = pipes.context("the command has no pipes")?;
        Ok((running, Pipes { stdin, stdout, stderr }))
    }

    fn start_with(
        command: &[OsString],
        variables: impl IntoIterator<Item = (&'static str, String)>,
        stdio: fn() -> Stdio,
        is_task: bool,
    ) -> anyhow::Result<Self> {
        let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        // The reading end, and only that, goes to the sitter. Writing never waits for it.
        rustix::io::fcntl_setfd(&read, rustix::io::FdFlags::empty())?;
        rustix::io::ioctl_fionbio(&write, true)?;
        let mut sitter = std::process::Command::new(own_program()?);
        sitter.arg(if is_task { TASK_SITTER } else { SITTER });
        sitter.arg(read.as_raw_fd().to_string()).args(command).envs(variables);
        sitter.stdin(stdio()).stdout(stdio()).stderr(stdio());
        if is_task {
            // What is typed on a terminal is for the worker, which then lets its tasks finish.
            sitter.process_group(0);
        }
        let sitter = Command::from(sitter).spawn().context("cannot start the command")?;
        drop::<OwnedFd>(read);
        Ok(Self { sitter, pipe: Some(write.into()) })
    }

    /// The sitter's number: what is to be recorded in the lock.
    pub fn pid(&self) -> Option<u32> {
        self.sitter.id()
    }

    /// Lets the program start, or go on, for this long.
    pub fn trust(&mut self, span: Duration) {
        let until = millis(Env::system().clock().boot().plus(span));
        if let Some(pipe) = &mut self.pipe {
            // If the line is full, the sitter does not listen; if it is broken, it has ended.
            let _ = pipe.write(&until.to_le_bytes());
        }
    }

    /// Completes when the program has ended, with its exit code.
    pub async fn wait(&mut self) -> anyhow::Result<u8> {
        Ok(code_of(self.sitter.wait().await?))
    }

    /// Whether it has ended, and the program never ran: the lock could not be trusted any more when
    /// it was to start. Its exit code says nothing then.
    pub fn never_started(&mut self) -> bool {
        let signal = |status: ExitStatus| status.signal() == Some(NOT_STARTED.as_raw());
        matches!(self.sitter.try_wait(), Ok(Some(status)) if signal(status))
    }

    /// Passes a signal on to the program, by way of the sitter.
    pub fn signal(&self, signal: Signal) {
        if !comes_from_terminal(signal) {
            send_to(self.pid(), signal);
        }
    }

    /// Kills the program and all that came of it.
    pub async fn kill(&mut self) -> anyhow::Result<u8> {
        self.pipe = None;
        // A sitter that is stopped itself cannot do it; the program dies with it.
        let sitter = self.pid();
        tokio::select! {
            code = self.wait() => code,
            () = tokio::time::sleep(Duration::from_secs(1)) => {
                send_to(sitter, Signal::KILL);
                self.wait().await
            }
        }
    }
}

fn send_to(pid: Option<u32>, signal: Signal) {
    let pid = pid.and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw);
    if let Some(pid) = pid {
        // If it has just ended, so much the better.
        let _ = rustix::process::kill_process(pid, signal);
    }
}

/// The same to all of a group, if it has its own.
fn send_to_group(pid: Option<u32>, own_group: bool, signal: Signal) {
    match pid.and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw) {
        Some(pid) if own_group => {
            let _ = rustix::process::kill_process_group(pid, signal);
        }
        _ => send_to(pid, signal),
    }
}

fn millis(time: BootTime) -> u64 {
    let since = time.since(BootTime::from_boot(Duration::ZERO));
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// 128 and the signal's number for a program that was killed, as shells have it.
fn code_of(status: ExitStatus) -> u8 {
    match (status.code(), status.signal()) {
        (Some(code), _) => u8::try_from(code).unwrap_or(1),
        (None, Some(signal)) => u8::try_from(128 + signal).unwrap_or(1),
        (None, None) => 1,
    }
}

/// The sitter.
fn sit(pipe: &str, command: Vec<OsString>, is_task: bool) -> anyhow::Result<u8> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        // Before anything else, so that no signal finds us without.
        let mut signals = Signals::catch()?;
        let mut line = std::fs::File::open(format!("/dev/fd/{pipe}"))?;
        let Some(first) = hear(&mut line) else { return not_started() };
        let now = || millis(Env::system().clock().boot());
        let span = first.saturating_sub(now());
        if span == 0 {
            return not_started();
        }
        // Processes whose parents die become ours, and can be killed with the rest.
        #[cfg(target_os = "linux")]
        rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
        let mut program = std::process::Command::new(own_program()?);
        program.arg(SHIM).arg(std::process::id().to_string()).args(&command);
        // On a terminal the program stays in the foreground group, or it could not read from it.
        let own_group = !on_terminal();
        if own_group {
            program.process_group(0);
        }
        let mut program = Command::from(program).spawn().context("cannot start the command")?;
        let pid = program.id();
        let send = |signal: Signal| send_to_group(pid, own_group, signal);
        let (words, mut heard) = tokio::sync::watch::channel(first);
        std::thread::spawn(move || {
            // Ends when the other end is closed: by intent, or because its process died.
            while let Some(until) = hear(&mut line) {
                words.send_replace(until);
            }
        });
        let mut warned = false;
        let mut tick = tokio::time::interval(Duration::from_millis((span / 50).clamp(5, 200)));
        let status = loop {
            tokio::select! {
                status = program.wait() => break status?,
                // In slices: a timer stops while the machine sleeps.
                _ = tick.tick() => {
                    let (until, now) = (*heard.borrow(), now());
                    if now >= until + span / 20 {
                        send(Signal::KILL);
                        let status = program.wait().await?;
                        bury_all();
                        break status;
                    }
                    if now >= until && !warned {
                        send(Signal::TERM);
                        warned = true;
                    }
                }
                word = heard.changed() => if word.is_err() {
                    send(Signal::KILL);
                    let status = program.wait().await?;
                    bury_all();
                    break status;
                },
                // What is typed on a terminal the program gets from there.
                signal = signals.next() => if !comes_from_terminal(signal) { send(signal) },
            }
        };
        if is_task {
            bury_all();
        }
        Ok(code_of(status))
    })
}

fn not_started() -> anyhow::Result<u8> {
    rustix::process::kill_process(rustix::process::getpid(), NOT_STARTED)?;
    // It takes effect before the call returns, or we would be here.
    Ok(1)
}

/// Kills whatever came of the program and has become ours, until there is nothing left.
#[cfg(target_os = "linux")]
fn bury_all() {
    use rustix::process::{WaitOptions, wait};
    let me = std::process::id().to_string();
    // Each round reaches the next generation; no family is that deep.
    for _ in 0..1000 {
        match wait(WaitOptions::NOHANG) {
            Err(_) => return,
            Ok(Some(_)) => continue,
            Ok(None) => {}
        }
        let own = std::fs::read_dir("/proc").into_iter().flatten().flatten().filter_map(|entry| {
            let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
            let stat = std::fs::read_to_string(entry.path().join("stat")).ok()?;
            let (_, rest) = stat.rsplit_once(')')?;
            (rest.split_whitespace().nth(1)? == me).then_some(pid)
        });
        own.for_each(|pid| send_to(Some(pid), Signal::KILL));
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Without a way to adopt them, the group is all that can be reached.
#[cfg(not(target_os = "linux"))]
fn bury_all() {}

/// Until when the lock can be trusted, or `None` when the line is cut.
fn hear(line: &mut std::fs::File) -> Option<u64> {
    let mut until = [0; 8];
    line.read_exact(&mut until).ok()?;
    Some(u64::from_le_bytes(until))
}

/// The shim: asks to die with its parent, and becomes the program.
fn become_program(parent: u32, command: Vec<OsString>) -> ExitCode {
    #[cfg(target_os = "linux")]
    {
        let asked = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
        let now = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get().unsigned_abs());
        // It may have died before we asked.
        if asked.is_err() || now != Some(parent) {
            return ExitCode::from(125);
        }
    }
    let _ = parent;
    let Some((program, words)) = command.split_first() else { return ExitCode::from(125) };
    let error = std::process::Command::new(program).args(words).exec();
    eprintln!("error: cannot run {}: {error}", program.to_string_lossy());
    ExitCode::from(if error.kind() == std::io::ErrorKind::NotFound { 127 } else { 126 })
}
