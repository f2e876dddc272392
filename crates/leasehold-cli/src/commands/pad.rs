//! `leasehold pad`: shared files, changed safely.

use std::io::{Read as _, Write as _};

use anyhow::Context as _;
use base64::Engine as _;
use leasehold::protocol::layout::is_ours;
use leasehold::scratchpad::{Format, Locked, Scratchpad};
use leasehold::{Error, ErrorKind, Key, Store, host};
use rustix::process::Signal;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::args::{Args, FileFormat, LockTerms, PadCommand};
use crate::child::{Filter, Signals, code_of_signal};
use crate::config;
use crate::exit::{Ending, Exit};
use crate::render;

/// `leasehold pad …`.
pub async fn run(args: &Args, store: &Store, command: &PadCommand) -> anyhow::Result<Ending> {
    match command {
        PadCommand::Read { path, format } => {
            read(args, &open(args, store, None)?, path, format_of(path, *format)).await
        }
        PadCommand::Write { path, format, text } => {
            check_path(path)?;
            let bytes = match text {
                Some(text) => text.clone().into_bytes(),
                None => {
                    let mut bytes = Vec::new();
                    let mut stdin = std::io::stdin().lock();
                    stdin.read_to_end(&mut bytes).context("cannot read standard input")?;
                    bytes
                }
            };
            check(path, format_of(path, *format), &bytes)?;
            let pad = open(args, store, None)?;
            pad.with_lock(path, async |file| file.write_bytes(bytes).await).await?;
            Ok(Exit::Done.into())
        }
        PadCommand::Update { path, format, terms, allow_empty, command } => {
            check_path(path)?;
            let pad = open(args, store, Some(terms))?;
            update(&pad, path, format_of(path, *format), *allow_empty, command).await
        }
        PadCommand::Ls { prefix } => {
            let paths = open(args, store, None)?.list(prefix).await?;
            for path in paths.iter().filter(|path| !is_ours(path)) {
                match args.json {
                    true => render::json(&serde_json::json!({ "path": path }))?,
                    false => render::line(path)?,
                }
            }
            Ok(Exit::Done.into())
        }
    }
}

fn open(args: &Args, store: &Store, terms: Option<&LockTerms>) -> anyhow::Result<Scratchpad> {
    let none = LockTerms::default();
    let terms = terms.unwrap_or(&none);
    let holder = format!("{}:{}", host::host_name(), std::process::id());
    let pad = Scratchpad::on(store, terms.holder.clone().unwrap_or(holder))?;
    Ok(pad.with_settings(config::lock_settings(args, terms, store.kind())?))
}

/// What queues, indexes and locks are made of is no file to be written.
fn check_path(path: &str) -> anyhow::Result<()> {
    match is_ours(path.strip_prefix("./").unwrap_or(path)) {
        true => Err(Error::new(
            ErrorKind::Invalid,
            format!("{path:?} cannot be a file here: that place is Leasehold's own"),
        )
        .into()),
        false => Ok(()),
    }
}

fn format_of(path: &str, given: Option<FileFormat>) -> Format {
    match given {
        None => Format::of(path),
        Some(FileFormat::Yaml) => Format::Yaml,
        Some(FileFormat::Json) => Format::Json,
        Some(FileFormat::Text) => Format::Text,
        Some(FileFormat::Raw) => Format::Raw,
    }
}

/// What a file's name or a flag promises must be in it.
fn check(path: &str, format: Format, bytes: &[u8]) -> anyhow::Result<()> {
    if format == Format::Raw {
        return Ok(());
    }
    let key = Key::new(path.strip_prefix("./").unwrap_or(path)).map_err(Error::from)?;
    let parsed = format.parse::<serde_json::Value>(bytes, &key);
    parsed.map(drop).map_err(|error| {
        Error::new(ErrorKind::Invalid, format!("{error}; nothing was written")).into()
    })
}

async fn read(args: &Args, pad: &Scratchpad, path: &str, format: Format) -> anyhow::Result<Ending> {
    let Some(bytes) = pad.read_bytes(path).await? else {
        render::say(format_args!("{path}: there is no such file"));
        return Ok(Exit::NotFound.into());
    };
    match (args.json, format) {
        (true, Format::Yaml | Format::Json | Format::Text) => {
            let key = Key::new(path.strip_prefix("./").unwrap_or(path)).map_err(Error::from)?;
            render::json(&format.parse::<serde_json::Value>(&bytes, &key)?)?;
        }
        // As `cat` has it: bytes have no value of their own.
        (true, Format::Raw) => render::json(&match std::str::from_utf8(&bytes) {
            Ok(text) => serde_json::json!({ "path": path, "text": text }),
            Err(_) => {
                let text = base64::prelude::BASE64_STANDARD.encode(&bytes);
                serde_json::json!({ "path": path, "base64": text })
            }
        })?,
        (false, _) => std::io::stdout().write_all(&bytes)?,
    }
    Ok(Exit::Done.into())
}

/// The file goes through the command, under its lock.
async fn update(
    pad: &Scratchpad,
    path: &str,
    format: Format,
    allow_empty: bool,
    command: &[std::ffi::OsString],
) -> anyhow::Result<Ending> {
    let mut signals = Signals::catch()?;
    let (mut locked, before) = tokio::select! {
        locked = pad.lock_and_read(path) => locked?,
        signal = signals.stop() => return Ok(Ending::Program(code_of_signal(signal))),
    };
    let before = before.unwrap_or_default();
    let changed = async {
        match filter(command, &before, &locked, &mut signals).await? {
            // A command that forgets to write is more likely than one that wants nothing to be left.
            Filtered::Into(after) if after.is_empty() && !before.is_empty() && !allow_empty => {
                render::say(format_args!(
                    "{path}: refused, the command wrote nothing (--allow-empty if that is meant); \
                     nothing was changed"
                ));
                Ok(Exit::Refused.into())
            }
            Filtered::Into(after) => {
                check(path, format, &after)?;
                locked.write_bytes(after).await?;
                anyhow::Ok(Exit::Done.into())
            }
            Filtered::Failed(code) => Ok(Ending::Program(code)),
            Filtered::Lost => {
                render::say("the lock was lost: the command was stopped, nothing was written");
                Ok(Exit::Lost.into())
            }
        }
    };
    let outcome = changed.await;
    if let Err(error) = locked.release().await
        && error.kind() != ErrorKind::Lost
    {
        tracing::warn!(%error, "the lock could not be released; its ttl will end it");
    }
    outcome
}

/// What came of a filter.
enum Filtered {
    /// This is to be the file.
    Into(Vec<u8>),
    /// It ended with this code, or was ended by a signal to us: the file stays as it is.
    Failed(u8),
    /// The lock was lost meanwhile.
    Lost,
}

/// How long a filter that was asked to end has for it.
const GRACE: std::time::Duration = std::time::Duration::from_secs(5);

/// Runs the command between the file as it is and as it will be.
async fn filter(
    command: &[std::ffi::OsString],
    input: &[u8],
    locked: &Locked<'_>,
    signals: &mut Signals,
) -> anyhow::Result<Filtered> {
    let variables = [("LEASEHOLD_TOKEN", locked.token().to_string())];
    let mut filter = Filter::start(command, variables)?;
    let (mut stdin, mut stdout) = filter.pipes().context("the command has no pipes")?;
    let lost = locked.lost();
    let mut stopped = None;
    let mut output = Vec::new();
    {
        let feed = async {
            // A command that does not read its input is fine.
            let _ = stdin.write_all(input).await;
            drop(stdin);
        };
        let talk = async { tokio::join!(feed, stdout.read_to_end(&mut output)).1 };
        tokio::pin!(talk);
        loop {
            // Who was asked to end and has not is killed.
            let deadline = async {
                match stopped {
                    Some(_) => tokio::time::sleep(GRACE).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                done = &mut talk => {
                    done?;
                    break;
                }
                () = lost.cancelled() => {
                    filter.signal(Signal::KILL);
                    filter.wait().await?;
                    return Ok(Filtered::Lost);
                }
                signal = signals.stop() => {
                    filter.signal(signal);
                    stopped = Some(signal);
                }
                () = deadline => {
                    filter.signal(Signal::KILL);
                    break;
                }
            }
        }
    }
    // It may have closed its output and gone on.
    let code = loop {
        tokio::select! {
            code = filter.wait() => break code?,
            () = lost.cancelled() => {
                filter.signal(Signal::KILL);
                filter.wait().await?;
                return Ok(Filtered::Lost);
            }
            signal = signals.stop() => {
                filter.signal(if stopped.is_some() { Signal::KILL } else { signal });
                stopped = Some(signal);
            }
        }
    };
    Ok(match (stopped, code) {
        (Some(signal), _) => Filtered::Failed(code_of_signal(signal)),
        (None, 0) => Filtered::Into(output),
        (None, code) => Filtered::Failed(code),
    })
}
