//! Running a program that must not outlive us.
//!
//! A lock whose holder was killed is taken over within milliseconds. So what ran under it must be
//! gone by then, whatever was killed (FIELD.md row 26). Three processes stand in a row:
//!
//! ```text
//!   leasehold lock run     holds the lock
//!     │ a pipe             closed by the kernel when it dies
//!   leasehold (sitter)     recorded in the lock; kills the program and all of its group when the
//!     │                    pipe closes; ends after it
//!     │ parent-death signal
//!   the program            started through a shim that asks for the signal, so that it does not
//!                          outlive a killed sitter either
//! ```
//!
//! The program is not started before the sitter is recorded in the lock. Through the pipe the
//! sitter hears again and again for how long the lock can be trusted; if it hears nothing in time,
//! because its parent is stopped or cut off, it stops the program by itself.

use std::ffi::OsString;
use std::io::{Read as _, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{ExitCode, ExitStatus};
use std::time::Duration;

use anyhow::Context as _;
use rustix::process::{Pid, Signal};
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};

const SITTER: &str = "--leasehold-sitter";
const SHIM: &str = "--leasehold-shim";

/// Does the work of a sitter or a shim, if this process is one.
pub fn entry() -> Option<ExitCode> {
    let mut words = std::env::args_os().skip(1);
    let role = words.next()?;
    if role == SITTER {
        let pipe = words.next()?.into_string().ok()?;
        return Some(match sit(&pipe, words.collect()) {
            Ok(code) => ExitCode::from(code),
            Err(error) => {
                eprintln!("error: {error:#}");
                ExitCode::from(127)
            }
        });
    }
    if role == SHIM {
        let parent = words.next()?.into_string().ok()?.parse().ok()?;
        return Some(become_program(parent, words.collect()));
    }
    None
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
        let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        // The reading end, and only that, goes to the sitter.
        rustix::io::fcntl_setfd(&read, rustix::io::FdFlags::empty())?;
        let sitter = Command::new(std::env::current_exe()?)
            .arg(SITTER)
            .arg(read.as_raw_fd().to_string())
            .args(command)
            .envs(variables)
            .spawn()
            .context("cannot start the command")?;
        drop::<OwnedFd>(read);
        Ok(Self { sitter, pipe: Some(write.into()) })
    }

    /// The sitter's number: what is to be recorded in the lock.
    pub fn pid(&self) -> Option<u32> {
        self.sitter.id()
    }

    /// Lets the program start, or go on, for this long.
    pub fn trust(&mut self, span: Duration) -> anyhow::Result<()> {
        let pipe = self.pipe.as_mut().context("the command was stopped")?;
        let millis = u64::try_from(span.as_millis()).unwrap_or(u64::MAX);
        Ok(pipe.write_all(&millis.to_le_bytes())?)
    }

    /// Completes when the program has ended, with its exit code.
    pub async fn wait(&mut self) -> anyhow::Result<u8> {
        Ok(code_of(self.sitter.wait().await?))
    }

    /// Passes a signal on to the program.
    pub fn signal(&self, signal: Signal) {
        let pid = self.pid().and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw);
        if let Some(pid) = pid {
            // If it has just ended, so much the better.
            let _ = rustix::process::kill_process(pid, signal);
        }
    }

    /// Kills the program and all of its group.
    pub fn kill(&mut self) {
        self.pipe = None;
    }
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
fn sit(pipe: &str, command: Vec<OsString>) -> anyhow::Result<u8> {
    let mut line = std::fs::File::open(format!("/dev/fd/{pipe}"))?;
    let Some(first) = hear(&mut line) else { return Ok(0) };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut program = std::process::Command::new(std::env::current_exe()?);
        program.arg(SHIM).arg(std::process::id().to_string()).args(&command);
        // On a terminal the program stays in the foreground group, or it could not read from it.
        let own_group = !std::io::IsTerminal::is_terminal(&std::io::stdin());
        if own_group {
            program.process_group(0);
        }
        let mut program = Command::from(program).spawn().context("cannot start the command")?;
        let pid = program.id().and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw);
        let send = |signal: Signal| {
            if let Some(pid) = pid {
                let _ = match own_group {
                    true => rustix::process::kill_process_group(pid, signal),
                    false => rustix::process::kill_process(pid, signal),
                };
            }
        };
        let (words, mut heard) = tokio::sync::watch::channel(first);
        std::thread::spawn(move || {
            // Ends when the other end is closed: by intent, or because its process died.
            while let Some(span) = hear(&mut line) {
                words.send_replace(span);
            }
        });
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut hangup = signal(SignalKind::hangup())?;
        let mut quit = signal(SignalKind::quit())?;
        let mut trusted = *heard.borrow_and_update();
        let mut warned = false;
        let status = loop {
            tokio::select! {
                status = program.wait() => break status?,
                word = heard.changed() => match word {
                    Ok(()) => trusted = *heard.borrow_and_update(),
                    Err(_) => {
                        send(Signal::KILL);
                        break program.wait().await?;
                    }
                },
                // First politely, and then before anybody else may start.
                () = tokio::time::sleep(trusted) => match warned {
                    false => {
                        send(Signal::TERM);
                        (warned, trusted) = (true, first / 20);
                    }
                    true => {
                        send(Signal::KILL);
                        break program.wait().await?;
                    }
                },
                _ = terminate.recv() => send(Signal::TERM),
                _ = interrupt.recv() => send(Signal::INT),
                _ = hangup.recv() => send(Signal::HUP),
                _ = quit.recv() => send(Signal::QUIT),
            }
        };
        // What it started in its group ends with it.
        if own_group {
            send(Signal::KILL);
        }
        Ok(code_of(status))
    })
}

/// For how long the lock can be trusted, or `None` when the line is cut.
fn hear(line: &mut std::fs::File) -> Option<Duration> {
    let mut millis = [0; 8];
    line.read_exact(&mut millis).ok()?;
    Some(Duration::from_millis(u64::from_le_bytes(millis)))
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
