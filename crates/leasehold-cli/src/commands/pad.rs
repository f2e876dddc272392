//! `leasehold pad`: shared files, changed safely.

use std::io::{Read as _, Write as _};

use anyhow::Context as _;
use leasehold::scratchpad::{Format, Locked, Scratchpad};
use leasehold::{Error, ErrorKind, Key, Store, host};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::args::{Args, LockTerms, PadCommand};
use crate::child::Running;
use crate::config;
use crate::exit::{Ending, Exit};
use crate::render;

/// `leasehold pad …`.
pub async fn run(args: &Args, store: &Store, command: &PadCommand) -> anyhow::Result<Ending> {
    match command {
        PadCommand::Read { path } => read(args, &open(args, store, None)?, path).await,
        PadCommand::Write { path, text } => {
            let bytes = match text {
                Some(text) => text.clone().into_bytes(),
                None => {
                    let mut bytes = Vec::new();
                    let mut stdin = std::io::stdin().lock();
                    stdin.read_to_end(&mut bytes).context("cannot read standard input")?;
                    bytes
                }
            };
            check(path, &bytes)?;
            let pad = open(args, store, None)?;
            pad.with_lock(path, async |file| file.write_bytes(bytes).await).await?;
            Ok(Exit::Done.into())
        }
        PadCommand::Update { path, terms, command } => {
            let pad = open(args, store, Some(terms))?;
            update(&pad, path, command).await
        }
        PadCommand::Ls { prefix } => {
            for path in open(args, store, None)?.list(prefix).await? {
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

/// What a file's name promises must be in it.
fn check(path: &str, bytes: &[u8]) -> anyhow::Result<()> {
    let key = Key::new(path.strip_prefix("./").unwrap_or(path)).map_err(Error::from)?;
    match Format::of(path) {
        Format::Yaml | Format::Json => {
            let parsed = Format::of(path).parse::<serde_json::Value>(bytes, &key);
            parsed.map(drop).map_err(|error| {
                Error::new(ErrorKind::Invalid, format!("{error}; nothing was written")).into()
            })
        }
        Format::Text | Format::Raw => Ok(()),
    }
}

async fn read(args: &Args, pad: &Scratchpad, path: &str) -> anyhow::Result<Ending> {
    let Some(bytes) = pad.read_bytes(path).await? else {
        render::say(format_args!("{path}: there is no such file"));
        return Ok(Exit::NotFound.into());
    };
    match (args.json, Format::of(path)) {
        (true, Format::Yaml | Format::Json | Format::Text) => {
            render::json(&pad.read::<serde_json::Value>(path).await?)?;
        }
        _ => std::io::stdout().write_all(&bytes)?,
    }
    Ok(Exit::Done.into())
}

/// The file goes through the command, under its lock.
async fn update(
    pad: &Scratchpad,
    path: &str,
    command: &[std::ffi::OsString],
) -> anyhow::Result<Ending> {
    let mut locked = match pad.lock(path).await {
        Ok(locked) => locked,
        Err(error) if error.kind() == ErrorKind::Unavailable => {
            render::error(&error.into());
            return Ok(Exit::NotAcquired.into());
        }
        Err(error) => return Err(error.into()),
    };
    let changed = async {
        let before = locked.read_bytes().await?.unwrap_or_default();
        let (code, after) = filter(command, &before, &locked).await?;
        if code != 0 {
            return Ok(Ending::Program(code));
        }
        check(path, &after)?;
        locked.write_bytes(after).await?;
        anyhow::Ok(Exit::Done.into())
    };
    let outcome = changed.await;
    if let Err(error) = locked.release().await
        && error.kind() != ErrorKind::Lost
    {
        tracing::warn!(%error, "the lock could not be released; its ttl will end it");
    }
    outcome
}

/// Runs the command between the file as it is and as it will be. It ends with us, as what runs
/// under a lock has to.
async fn filter(
    command: &[std::ffi::OsString],
    input: &[u8],
    locked: &Locked<'_>,
) -> anyhow::Result<(u8, Vec<u8>)> {
    let variables = [("LEASEHOLD_TOKEN", locked.token().to_string())];
    let mut running = Running::start(command, variables, true)?;
    let (mut stdin, mut stdout) = running.pipes().context("the command has no pipes")?;
    running.trust(locked.trusted_for());
    let feed = async {
        // A command that does not read its input is fine.
        let _ = stdin.write_all(input).await;
        drop(stdin);
    };
    let talk = async {
        let mut output = Vec::new();
        let ((), read) = tokio::join!(feed, stdout.read_to_end(&mut output));
        read.map(|_| output)
    };
    tokio::pin!(talk);
    let mut tick = tokio::time::interval(std::time::Duration::from_millis(200));
    let output = loop {
        tokio::select! {
            output = &mut talk => break output?,
            _ = tick.tick() => running.trust(locked.trusted_for()),
        }
    };
    let code = running.wait().await?;
    Ok((code, output))
}
