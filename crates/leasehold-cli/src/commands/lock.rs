//! `leasehold lock` and `leasehold elect`.

use std::path::{Path, PathBuf};

use leasehold::lease::{Asked, Info};
use leasehold::lock::{Election, Guard, Lock, Semaphore};
use leasehold::protocol::key::decode_segment;
use leasehold::protocol::layout::{ELECTIONS, LOCKS, SEMAPHORES};
use leasehold::protocol::lease::Judgement;
use leasehold::store::{List, StoreUrl};
use leasehold::{Error, ErrorKind, Key, Store, host};
use serde::Serialize;

use crate::args::{Args, Command, Elect, LockCommand, LockName, LockTerms, Program};
use crate::child::{Running, Signals, code_of_signal};
use crate::config;
use crate::exit::{Ending, Exit};
use crate::render;

/// The file whose lock is asked for, if it is one.
pub fn file_of(command: &Command) -> Option<&Path> {
    let lock = match command {
        Command::Lock(
            LockCommand::Run { lock, .. }
            | LockCommand::Show { lock }
            | LockCommand::Ask { lock }
            | LockCommand::Release { lock, .. },
        ) => lock,
        _ => return None,
    };
    lock.file.as_deref()
}

/// The folder that a file stands in, as a store.
pub fn folder_of(file: &Path) -> Result<StoreUrl, Error> {
    let parent = file.parent().filter(|parent| !parent.as_os_str().is_empty());
    let parent = parent.map_or_else(|| PathBuf::from("."), Path::to_owned);
    match parent.is_dir() {
        true => Ok(StoreUrl::Directory(parent)),
        false => Err(Error::new(
            ErrorKind::Invalid,
            format!("{} is not a directory: there is no place for the lock", parent.display()),
        )),
    }
}

fn holder(terms: &LockTerms) -> String {
    let usual = || format!("{}:{}", host::host_name(), std::process::id());
    terms.holder.clone().unwrap_or_else(usual)
}

fn lock_at(args: &Args, store: &Store, lock: &LockName, terms: &LockTerms) -> anyhow::Result<Lock> {
    let settings = config::lock_settings(args, terms, store.kind())?;
    let holder = holder(terms);
    let lock = match (&lock.name, &lock.file) {
        (_, Some(file)) => {
            let name = file.file_name().map(|name| name.to_string_lossy().into_owned());
            let name = name.ok_or_else(|| invalid(format!("{} names no file", file.display())))?;
            Lock::beside(store, &Key::new(name).map_err(Error::from)?, holder, settings)?
        }
        (Some(name), None) if name.is_empty() => {
            return Err(invalid("the name of a lock cannot be empty").into());
        }
        (Some(name), None) => Lock::named(store, name, holder, settings)?,
        (None, None) => return Err(invalid("which lock? Give a name or --file").into()),
    };
    Ok(lock)
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Invalid, message)
}

/// Who did not get it is told what to do about that.
fn or_longer(error: anyhow::Error) -> anyhow::Error {
    match error.downcast_ref::<Error>() {
        Some(held) if held.kind() == ErrorKind::Held => {
            Error::new(ErrorKind::Held, format!("{held}; wait longer with --wait 10m")).into()
        }
        _ => error,
    }
}

/// `leasehold lock …`.
pub async fn run(args: &Args, store: &Store, command: &LockCommand) -> anyhow::Result<Ending> {
    match command {
        LockCommand::Run { lock, terms, slots, run } => {
            let settings = config::lock_settings(args, terms, store.kind())?;
            let heartbeat = settings.heartbeat;
            let mut signals = Signals::catch()?;
            let acquire = async {
                match (slots, &lock.name) {
                    (Some(slots), Some(name)) => {
                        let slots = Semaphore::named(store, name, *slots, holder(terms), settings)?;
                        anyhow::Ok(slots.acquire().await?)
                    }
                    _ => Ok(lock_at(args, store, lock, terms)?.acquire().await?),
                }
            };
            let guard = tokio::select! {
                guard = acquire => guard.map_err(or_longer)?,
                signal = signals.stop() => return Ok(Ending::Program(code_of_signal(signal))),
            };
            let ended = run_under(&guard, run, heartbeat, &mut signals).await;
            finish(guard, ended).await
        }
        LockCommand::Ls => ls(args, store).await,
        LockCommand::Show { lock } => show(args, &find(args, store, lock).await?).await,
        LockCommand::Ask { lock } => ask(args, &find(args, store, lock).await?).await,
        LockCommand::Release { lock, force } => {
            release(args, &find(args, store, lock).await?, *force).await
        }
        LockCommand::Clean => clean(args, store).await,
    }
}

/// A lock that there may be, under the name that people know.
struct Found {
    name: String,
    lock: Lock,
}

/// The lock that `lock ls` lists under this name. Slots and elections are listed by their keys; a lock can
/// have such a name too, and then comes first.
async fn find(args: &Args, store: &Store, given: &LockName) -> anyhow::Result<Found> {
    let terms = LockTerms::default();
    let lock = lock_at(args, store, given, &terms)?;
    let Some(name) = given.name.clone() else {
        return Ok(Found { name: lock.key().to_string(), lock });
    };
    let is_key = [SEMAPHORES, ELECTIONS].iter().any(|folder| name.starts_with(folder));
    if is_key
        && lock.info().await?.is_none()
        && let Ok(key) = Key::new(format!("{name}.lock"))
    {
        let settings = config::lock_settings(args, &terms, store.kind())?;
        return Ok(Found { lock: Lock::at(store, key, holder(&terms), settings)?, name });
    }
    Ok(Found { name, lock })
}

/// `leasehold elect`.
pub async fn elect(args: &Args, store: &Store, elect: &Elect) -> anyhow::Result<Ending> {
    let settings = config::lock_settings(args, &elect.terms, store.kind())?;
    let heartbeat = settings.heartbeat;
    let election = Election::named(store, &elect.name, holder(&elect.terms), settings)?;
    // Who says how long stands that long; others stand until they lead.
    let for_ever = elect.terms.wait.is_none() && elect.terms.attempts.is_none();
    let mut signals = Signals::catch()?;
    loop {
        let campaign = async {
            match for_ever {
                true => election.campaign().await,
                false => election.campaign_in_time().await,
            }
        };
        let leading = tokio::select! {
            leading = campaign => leading.map_err(|error| or_longer(error.into()))?,
            signal = signals.stop() => return Ok(Ending::Program(code_of_signal(signal))),
        };
        tracing::info!(token = leading.token(), "leading");
        match run_under(&leading, &elect.run, heartbeat, &mut signals).await {
            // Another leads by now: stand again.
            Ok(Ended::Lost) => render::say("lost the election: standing again"),
            ended => return finish(leading, ended).await,
        }
    }
}

/// How what ran under a lock ended.
enum Ended {
    By(u8),
    Lost,
}

/// Runs a command as long as the lock is held.
async fn run_under(
    guard: &Guard,
    run: &Program,
    heartbeat: std::time::Duration,
    signals: &mut Signals,
) -> anyhow::Result<Ended> {
    let variables = [("LEASEHOLD_TOKEN", guard.token().to_string())];
    let mut running = Running::start(&run.command, variables)?;
    // First it stands in the lock, then it starts.
    guard.set_child(running.pid().and_then(host::process)).await?;
    running.trust(guard.trusted_for());
    let mut tick = tokio::time::interval((heartbeat / 2).min(std::time::Duration::from_secs(1)));
    let lost = guard.lost();
    let mut stopping = None;
    let mut was_lost = false;
    loop {
        let deadline = async {
            match stopping {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            code = running.wait() => {
                let code = code?;
                // Its sitter may have stopped it because the lock could not be trusted any more.
                let lost = was_lost || guard.check().is_err() || running.never_started();
                return Ok(if lost { Ended::Lost } else { Ended::By(code) });
            }
            _ = tick.tick(), if !was_lost => running.trust(guard.trusted_for()),
            () = lost.cancelled(), if !was_lost => {
                render::say("the lock was lost: stopping the command");
                was_lost = true;
                running.signal(rustix::process::Signal::TERM);
                stopping = Some(after(run.grace));
            }
            _ = guard.asked(), if run.yield_on_ask && stopping.is_none() => {
                render::say("asked for the lock: stopping the command");
                running.signal(rustix::process::Signal::TERM);
                stopping = Some(after(run.grace));
            }
            () = deadline => {
                let code = running.kill().await?;
                return Ok(if was_lost { Ended::Lost } else { Ended::By(code) });
            }
            signal = signals.next() => running.signal(signal),
        }
    }
}

#[allow(clippy::disallowed_methods)] // a timer of the runtime's, not a time
fn after(span: std::time::Duration) -> tokio::time::Instant {
    tokio::time::Instant::now() + span
}

async fn finish(guard: Guard, ended: anyhow::Result<Ended>) -> anyhow::Result<Ending> {
    let ended = match ended {
        Ok(ended) => ended,
        Err(error) => {
            // Nobody should have to wait for the ttl because we could not start something.
            let _ = guard.release().await;
            return Err(error);
        }
    };
    match ended {
        Ended::Lost => Ok(Exit::Lost.into()),
        Ended::By(code) => match guard.release().await {
            Ok(()) => Ok(Ending::Program(code)),
            // It was done before the lock was lost, for all we know: but not provably.
            Err(error) if error.kind() == ErrorKind::Lost => {
                render::say("the lock was lost before it could be released");
                Ok(Exit::Lost.into())
            }
            Err(error) => {
                tracing::warn!(%error, "the lock could not be released; its ttl will end it");
                Ok(Ending::Program(code))
            }
        },
    }
}

#[derive(Serialize)]
struct Row {
    lock: String,
    state: &'static str,
    holder: Option<String>,
    token: Option<u64>,
    heartbeat_at: Option<String>,
    asked_by: Option<String>,
}

fn row(name: String, info: &Info) -> Row {
    let state = match (&info.judgement, &info.lease) {
        (Judgement::Held { .. }, Ok(_)) => "held",
        (Judgement::Held { .. }, Err(_)) => "unreadable",
        (Judgement::Free(leasehold::protocol::lease::Why::Released), _) => "released",
        (Judgement::Free(_), _) => "stale",
    };
    let lease = info.lease.as_ref().ok();
    Row {
        lock: name,
        state,
        holder: lease.map(|lease| lease.holder.clone()),
        token: lease.and_then(|lease| lease.token),
        heartbeat_at: lease.and_then(|lease| lease.heartbeat_at).map(|time| time.to_string()),
        asked_by: lease.and_then(|lease| lease.ask.as_ref()).map(|ask| ask.by.clone()),
    }
}

/// The records of locks by their names, of slots and elections by their keys.
async fn locks(args: &Args, store: &Store) -> anyhow::Result<Vec<(String, Lock)>> {
    let settings = config::lock_settings(args, &LockTerms::default(), store.kind())?;
    let mut locks = Vec::new();
    for prefix in [LOCKS, SEMAPHORES, ELECTIONS] {
        let mut listing = store.list(List::prefix(prefix)?);
        while let Some(page) = listing.next_page().await? {
            for entry in page.entries {
                let Some(path) = entry.key.as_str().strip_suffix(".lock") else { continue };
                let name = match path.strip_prefix(LOCKS) {
                    Some(name) => decode_segment(name),
                    None => Some(path.to_owned()),
                };
                let Some(name) = name else { continue };
                let holder = holder(&LockTerms::default());
                locks.push((name, Lock::at(store, entry.key, holder, settings.clone())?));
            }
        }
    }
    Ok(locks)
}

async fn ls(args: &Args, store: &Store) -> anyhow::Result<Ending> {
    let mut table =
        render::table(&["lock", "state", "holder", "token", "last heartbeat", "asked by"], &[]);
    let mut any = false;
    for (name, lock) in locks(args, store).await? {
        let Some(info) = lock.info().await? else { continue };
        let row = row(name, &info);
        if args.json {
            render::json(&row)?;
            continue;
        }
        any = true;
        table.add_row([
            row.lock,
            row.state.to_owned(),
            row.holder.unwrap_or_default(),
            row.token.map(|token| token.to_string()).unwrap_or_default(),
            row.heartbeat_at.unwrap_or_default(),
            row.asked_by.unwrap_or_default(),
        ]);
    }
    if any {
        render::line(table)?;
    }
    Ok(Exit::Done.into())
}

async fn show(args: &Args, found: &Found) -> anyhow::Result<Ending> {
    let Some(info) = found.lock.info().await? else { return Ok(nobody_holds(found)) };
    let row = row(found.name.clone(), &info);
    if args.json {
        render::json(&row)?;
        return Ok(Exit::Done.into());
    }
    let pairs = [
        ("lock", Some(row.lock)),
        ("state", Some(row.state.to_owned())),
        ("holder", row.holder),
        ("token", row.token.map(|token| token.to_string())),
        ("heartbeat", row.heartbeat_at),
        ("asked by", row.asked_by),
    ];
    for (label, value) in pairs {
        if let Some(value) = value {
            let label = render::paint(render::DIM, format_args!("{label:<9}"));
            render::line(format_args!("{label} {value}"))?;
        }
    }
    Ok(Exit::Done.into())
}

fn nobody_holds(found: &Found) -> Ending {
    render::say(format_args!("{}: nobody holds it (see `leasehold lock ls`)", found.name));
    Exit::NotFound.into()
}

async fn ask(args: &Args, found: &Found) -> anyhow::Result<Ending> {
    let said = match found.lock.ask().await? {
        Asked::Now => "asked".to_owned(),
        Asked::Before(ask) => format!("{} has asked already, at {}", ask.by, ask.at),
        Asked::NobodyHolds => return Ok(nobody_holds(found)),
    };
    if !args.quiet {
        render::line(said)?;
    }
    Ok(Exit::Done.into())
}

async fn release(args: &Args, found: &Found, force: bool) -> anyhow::Result<Ending> {
    let Found { name, lock } = found;
    let say = |what: String| match args.quiet {
        true => Ok(()),
        false => render::line(format_args!("{name}: {what}")),
    };
    let Some(info) = lock.info().await? else { return Ok(nobody_holds(found)) };
    if let Judgement::Free(_) = info.judgement
        && lock.clean().await?
    {
        say("nobody held it any more; its record is removed".to_owned())?;
        return Ok(Exit::Done.into());
    }
    let guard = match force {
        true => lock.force().await?,
        // Whoever has taken it since we looked keeps it.
        false => match lock.try_acquire().await? {
            Ok(guard) => guard,
            Err(held) => {
                render::say(format_args!(
                    "{name}: refused, {} holds it; ask it with `lock ask`, or take it with --force",
                    held.holder
                ));
                return Ok(Exit::Refused.into());
            }
        },
    };
    guard.release().await?;
    say(match (&info.judgement, &info.lease) {
        (Judgement::Held { .. }, Ok(lease)) => format!("taken from {} and released", lease.holder),
        _ => "released".to_owned(),
    })?;
    Ok(Exit::Done.into())
}

async fn clean(args: &Args, store: &Store) -> anyhow::Result<Ending> {
    let mut cleaned = 0;
    for (_, lock) in locks(args, store).await? {
        match lock.clean().await {
            Ok(done) => cleaned += usize::from(done),
            // Not a lock at all: not ours to remove.
            Err(error) if error.kind() == ErrorKind::Data => render::say(&error),
            Err(error) => return Err(error.into()),
        }
    }
    match args.json {
        true => render::json(&serde_json::json!({ "cleaned": cleaned }))?,
        false if args.quiet => {}
        false => render::line(format_args!("removed {cleaned} locks"))?,
    }
    Ok(Exit::Done.into())
}
