//! `leasehold queue work`: a command per task.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io::IsTerminal as _;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use leasehold::protocol::format::node::{MOST_HELD, shortened};
use leasehold::queue::{Acked, Queue, Task, Worker, WorkerSettings};
use leasehold::store::meter::Prices;
use leasehold::{ErrorKind, Store, host};
use rustix::process::Signal;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use super::invalid;
use super::log::{End, Run};
use crate::args::Args;
use crate::args::queue::Work;
use crate::child::{self, Pipes, Running, Warden};
use crate::exit::{Ending, Exit};
use crate::supervised::{self, Leash, Report};
use crate::{config, render};

/// The longest result that is kept: beyond it, a command should store its output elsewhere.
const RESULT: usize = 1 << 20;

/// How much of what a command says on standard error goes into its task's history.
const SAID: usize = 1000;

/// What has happened so far.
#[derive(Debug, Default)]
struct Tally {
    done: AtomicU64,
    again: AtomicU64,
    retried: AtomicU64,
    failed: AtomicU64,
    lost: AtomicU64,
    unrecorded: AtomicU64,
    under_way: AtomicU64,
    /// What is under way, as `queue/task`, and what went wrong last.
    seen: Mutex<(BTreeSet<String>, Option<String>)>,
    /// Whether we were told to end.
    draining: AtomicBool,
}

/// Exit codes of commands that INT or TERM ended.
const ENDED: [u8; 2] = [130, 143];

impl Tally {
    fn add(counter: &AtomicU64) {
        counter.fetch_add(1, Relaxed);
    }

    fn seen(&self) -> MutexGuard<'_, (BTreeSet<String>, Option<String>)> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn count(&self, end: End) {
        match end {
            End::Done => Self::add(&self.done),
            End::DoneBefore => Self::add(&self.again),
            End::Retried => Self::add(&self.retried),
            End::Failed => Self::add(&self.failed),
            End::Lost => Self::add(&self.lost),
            End::Unrecorded => Self::add(&self.unrecorded),
            End::Returned => {}
        }
    }

    /// Notes what went wrong with a task.
    fn note(&self, task: &str, error: &str) {
        self.seen().1 = Some(shortened(&format!("{task}: {error}")));
    }

    /// What a supervisor wants to know.
    fn report(&self, store: &Store) -> Report {
        let count = |counter: &AtomicU64| counter.load(Relaxed);
        let (held, error) = self.seen().clone();
        Report {
            done: count(&self.done),
            failed: count(&self.retried) + count(&self.failed),
            holds: count(&self.under_way),
            held: held.into_iter().take(MOST_HELD).collect(),
            error,
            usage: store.usage(),
        }
    }
}

pub async fn run(args: &Args, store: &Store, work: &Work) -> anyhow::Result<Ending> {
    let names: Vec<&str> = work.queues.split(',').map(str::trim).collect();
    if names.contains(&"") {
        return Err(invalid(format!("a queue without a name in {:?}", work.queues)));
    }
    if work.fail_code == 0 {
        return Err(invalid("--fail-code cannot be 0, which says that the task is done"));
    }
    // Whoever lacks the program fails faster than all others work, and would have the whole queue given up.
    if work.command.first().is_some_and(|program| program.is_empty()) {
        return Err(invalid("the command is empty: name a program to run for each task"));
    }
    if let Some(program) = work.command.first().filter(|program| child::is_missing(program)) {
        let program = program.to_string_lossy();
        return Err(invalid(format!(
            "cannot run {program}: there is no such program here, or it may not be executed"
        )));
    }
    // It stands in every lease, and so must be there before the first claim.
    let warden = Warden::start()?;
    let leash = Leash::take(args, store);
    let usual = || match &leash {
        Some(leash) => leash.name(),
        None => format!("{}:{}", host::host_name(), std::process::id()),
    };
    let settings = WorkerSettings {
        name: work.name.clone().unwrap_or_else(usual),
        poll: work.poll,
        until_empty: work.exit_when_empty,
        companion: warden.pid().and_then(host::process),
    };
    let tally = Arc::new(Tally::default());
    // Cancelled when running tasks have to stop too.
    let stop = CancellationToken::new();
    let bar = bar(args);
    let mut told = Signals {
        terminate: signal(SignalKind::terminate())?,
        interrupt: signal(SignalKind::interrupt())?,
        cut: leash.as_ref().map(Leash::cut),
        leash,
    };
    let has_replica = config::replica(args)?.is_some();
    let ended = loop {
        let mut queues = Vec::new();
        for name in &names {
            // A store that does not answer must not keep us from ending; nothing is under way.
            queues.push(tokio::select! {
                queue = super::open_to_work(args, store, name, !args.quiet) => queue?,
                () = told.once() => return Ok(Exit::Done.into()),
            });
        }
        let mut worker = Worker::new(queues.clone(), settings.clone());
        if has_replica {
            // Then its tasks are to be claimed elsewhere.
            worker = worker.until_switched();
        }
        let rest = Rest { queues, told: args.quiet || told.leash.is_some() };
        let ended =
            work_on(args, store, work, &worker, &tally, &stop, &bar, &mut told, rest).await?;
        tally.failed.fetch_add(worker.given_up(), Relaxed);
        let switched = worker.was_switched() && !tally.draining.load(Relaxed);
        if !switched || ended.iter().any(Result::is_err) {
            break ended;
        }
        tracing::info!("a queue was switched between strict and relaxed mode: going on there");
    };
    bar.finish_and_clear();
    match &mut told.leash {
        Some(leash) => leash.tell(tally.report(store)),
        None => report(args, &tally)?,
    }
    for ended in ended {
        ended?;
    }
    // A script that empties a queue wants to know; a service that is told to end has not failed.
    let gave_up = work.exit_when_empty && args.supervised.is_none();
    let gave_up = gave_up && tally.failed.load(Relaxed) + tally.unrecorded.load(Relaxed) > 0;
    Ok(if gave_up { Exit::Failed } else { Exit::Done }.into())
}

/// Queues that somebody may have paused, which is told once: who waits for their end would wait for ever.
struct Rest {
    queues: Vec<Queue>,
    told: bool,
}

impl Rest {
    fn tell(&mut self) {
        let paused = |queue: &&Queue| queue.settings().paused;
        if !self.told
            && let Some(queue) = self.queues.iter().find(paused)
        {
            let name = queue.name();
            render::say(format_args!(
                "{name} is paused: waiting (`leasehold queue resume {name}`)"
            ));
            self.told = true;
        }
    }
}

/// Signals to end. Listened to all the time: one that comes between two queues counts.
struct Signals {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
    /// Cancelled when our supervisor is gone, until that has been heard.
    cut: Option<CancellationToken>,
    leash: Option<Leash>,
}

impl Signals {
    /// Completes when somebody wants us to end.
    async fn once(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
            () = supervised::cut(self.cut.as_ref()) => {}
        }
    }
}

/// Works until there is nothing left, or a signal says so.
#[allow(clippy::too_many_arguments)] // all that a worker needs, once
async fn work_on(
    args: &Args,
    store: &Store,
    work: &Work,
    worker: &Worker,
    tally: &Tally,
    stop: &CancellationToken,
    bar: &ProgressBar,
    told: &mut Signals,
    mut rest: Rest,
) -> anyhow::Result<Vec<anyhow::Result<()>>> {
    let loops = futures::future::join_all(
        (0..work.jobs).map(|_| one_after_the_other(store, worker, work, tally, stop)),
    );
    tokio::pin!(loops);
    let mut signals = 0;
    let mut deadline = None;
    // Goes on beside the tasks: it may have to wait for one of them.
    let drain = worker.drain();
    tokio::pin!(drain);
    let mut draining = false;
    let alone = told.leash.is_none();
    let mut tick = tokio::time::interval(match alone {
        true => Duration::from_millis(200),
        false => supervised::REPORT,
    });
    let ended = loop {
        let late = async {
            match deadline {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            ended = &mut loops => break ended,
            _ = tick.tick() => {
                rest.tell();
                bar.set_position(tally.done.load(Relaxed));
                bar.set_message(line(tally, store));
                if let Some(leash) = &mut told.leash {
                    leash.tell(tally.report(store));
                }
            }
            () = late, if !stop.is_cancelled() => stop.cancel(),
            drained = &mut drain, if draining => {
                draining = false;
                if let Err(error) = drained {
                    // Others get it after its ttl. No reason to cut off what is under way.
                    tracing::warn!(%error, "what was claimed and not begun could not be given back");
                }
            }
            _ = told.terminate.recv() => signals += 1,
            _ = told.interrupt.recv() => signals += 1,
            // Without a supervisor there is nobody to stop us later.
            () = supervised::cut(told.cut.as_ref()) => {
                told.cut = None;
                signals = signals.max(1);
            }
        }
        if signals == 1 && deadline.is_none() {
            if !args.quiet && alone {
                render::say("finishing what is under way; once more to stop it");
            }
            draining = true;
            tally.draining.store(true, Relaxed);
            deadline = Some(after(work.drain));
        } else if signals > 1 {
            stop.cancel();
        }
    };
    Ok(ended)
}

#[allow(clippy::disallowed_methods)] // a timer of the runtime's, not a time
fn after(span: Duration) -> tokio::time::Instant {
    tokio::time::Instant::now() + span
}

fn bar(args: &Args) -> ProgressBar {
    if args.quiet || args.json || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new_spinner();
    let style = ProgressStyle::with_template("{spinner} {msg}, {per_sec}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
    bar.enable_steady_tick(Duration::from_millis(100));
    bar
}

fn line(tally: &Tally, store: &Store) -> String {
    let count = |counter: &AtomicU64| counter.load(Relaxed);
    let mut line = format!(
        "{} done, {} under way, {} to be tried again, {} given up",
        count(&tally.done),
        count(&tally.under_way),
        count(&tally.retried),
        count(&tally.failed),
    );
    if store.kind().is_bucket() {
        let dollars = store.usage().dollars(&Prices::of(store.kind()));
        line.push_str(&format!(", ${dollars:.4} so far"));
    }
    line
}

fn report(args: &Args, tally: &Tally) -> anyhow::Result<()> {
    let count = |counter: &AtomicU64| counter.load(Relaxed);
    let [done, again, retried, failed, lost, unrecorded] =
        [&tally.done, &tally.again, &tally.retried, &tally.failed, &tally.lost, &tally.unrecorded]
            .map(count);
    if args.json {
        return render::json(&serde_json::json!({
            "done": done, "done_before": again, "retried": retried, "failed": failed, "lost": lost,
            "unrecorded": unrecorded,
        }));
    }
    if !args.quiet {
        let mut text = format!("{done} done");
        for (count, what) in [
            (again, "were done by somebody else before"),
            (retried, "to be tried again"),
            (failed, "given up"),
            (lost, "lost to somebody else"),
            (unrecorded, "times not recorded"),
        ] {
            if count > 0 {
                text.push_str(&format!(", {count} {what}"));
            }
        }
        render::say(text);
    }
    Ok(())
}

/// One of the jobs.
async fn one_after_the_other(
    store: &Store,
    worker: &Worker,
    work: &Work,
    tally: &Tally,
    stop: &CancellationToken,
) -> anyhow::Result<()> {
    let (mut trouble, mut unrecorded) = (0_u32, 0_u32);
    loop {
        let task = match worker.next().await {
            Ok(Some(task)) => task,
            Ok(None) => return Ok(()),
            // The store is away: it will be back.
            Err(error) if error.kind() == ErrorKind::Unavailable && trouble < 20 => {
                trouble += 1;
                tracing::warn!(%error, "cannot get tasks, trying again");
                tokio::select! {
                    () = tokio::time::sleep(pause(trouble)) => continue,
                    () = stop.cancelled() => return Err(error.into()),
                }
            }
            Err(error) => return Err(error.into()),
        };
        trouble = 0;
        Tally::add(&tally.under_way);
        let run = Run::of(&task);
        let name = run.name();
        tally.seen().0.insert(name.clone());
        let ended = run_task(task, work, tally, stop).await;
        tally.under_way.fetch_sub(1, Relaxed);
        tally.seen().0.remove(&name);
        let end = match ended {
            Ok(end) => end,
            // Somebody else has the task by now, or will.
            Err(error) if is_lost(&error) => End::Lost,
            Err(error) => {
                tally.note(&name, &format!("{error:#}"));
                tracing::warn!("{error:#}");
                End::Unrecorded
            }
        };
        tally.count(end);
        if let Some(file) = &work.log {
            run.log(file, store.env(), end);
        }
        unrecorded = if end == End::Unrecorded { unrecorded.saturating_add(1) } else { 0 };
        if unrecorded > 0 {
            // Whoever cannot record what was done leaves the rest alone for a while.
            let until = after(pause(unrecorded));
            let drains = async {
                while !tally.draining.load(Relaxed) {
                    tokio::time::sleep(Duration::from_millis(200)).await;
                }
            };
            tokio::select! {
                () = tokio::time::sleep_until(until) => {}
                () = stop.cancelled() => {}
                () = drains => {}
            }
        }
    }
}

/// How long to wait when something has gone wrong so often, one after the other.
fn pause(trouble: u32) -> Duration {
    Duration::from_millis(200).saturating_mul(1 << trouble.min(8))
}

fn is_lost(error: &anyhow::Error) -> bool {
    error.downcast_ref::<leasehold::Error>().is_some_and(|error| error.kind() == ErrorKind::Lost)
}

/// Whether the task is more than the system lets a program have as an argument.
fn is_too_long(error: &anyhow::Error) -> bool {
    let too_long = std::io::ErrorKind::ArgumentListTooLong;
    error.downcast_ref::<std::io::Error>().is_some_and(|error| error.kind() == too_long)
}

/// Whether there is not enough of something to start a program: open files, processes, memory.
fn is_out_of(error: &anyhow::Error) -> bool {
    use rustix::io::Errno;
    let code = error.downcast_ref::<std::io::Error>().and_then(std::io::Error::raw_os_error);
    [Errno::MFILE, Errno::NFILE, Errno::AGAIN, Errno::NOMEM]
        .iter()
        .any(|errno| code == Some(errno.raw_os_error()))
}

/// How a command ended.
enum Ended {
    /// By itself, with this code and output, and this as the last it said on standard error.
    By { code: u8, output: Vec<u8>, said: String },
    /// It took too long.
    TimedOut(Duration),
    /// We have to end.
    Stopped,
    /// The claim was lost.
    Lost,
}

async fn run_task(
    task: Task,
    work: &Work,
    tally: &Tally,
    stop: &CancellationToken,
) -> anyhow::Result<End> {
    let ended = match run_command(&task, work, stop).await {
        Ok(ended) => ended,
        Err(error) => {
            tracing::warn!("{}: {error:#}", Run::of(&task).name());
            let words = format!("{error:#}");
            if is_out_of(&error) {
                // This machine's fault, and nobody else's.
                task.give_back().await?;
                return Ok(End::Unrecorded);
            }
            if !is_too_long(&error) {
                // Not the task's fault, but it must not be tried for ever either.
                return Ok(nack(task, &words, tally).await?);
            }
            // It never gets shorter.
            let words = format!("{words}: take it from standard input instead of as {{}}");
            tally.note(task.id(), &words);
            task.fail(&words).await?;
            return Ok(End::Failed);
        }
    };
    match ended {
        Ended::By { code: 0, output, .. } => {
            let text = String::from_utf8_lossy(&output);
            let acked = match text.trim_end_matches('\n') {
                "" => task.ack().await?,
                text => match serde_json::from_str::<leasehold::queue::Json>(text) {
                    Ok(json) => task.ack_json(&json).await?,
                    Err(_) => task.ack_text(text).await?,
                },
            };
            Ok(match acked {
                Acked::First => End::Done,
                Acked::Again => End::DoneBefore,
            })
        }
        // Whoever stops a service tells all of its processes, the command too: not its fault.
        Ended::By { code, .. } if tally.draining.load(Relaxed) && ENDED.contains(&code) => {
            task.give_back().await?;
            Ok(End::Returned)
        }
        Ended::By { code, said, .. } if code == work.fail_code => {
            tally.note(task.id(), &format!("exit code {code}{said}"));
            task.fail(&format!("exit code {code}{said}")).await?;
            Ok(End::Failed)
        }
        Ended::By { code, said, .. } => {
            Ok(nack(task, &format!("exit code {code}{said}"), tally).await?)
        }
        Ended::TimedOut(limit) => {
            let limit = leasehold::settings::format_duration(limit);
            Ok(nack(task, &format!("the command took longer than {limit}"), tally).await?)
        }
        Ended::Stopped => {
            task.give_back().await?;
            Ok(End::Returned)
        }
        // Its claim is somebody else's: nothing is to be said about it.
        Ended::Lost => {
            let _ = task.give_back().await;
            Ok(End::Lost)
        }
    }
}

async fn nack(task: Task, error: &str, tally: &Tally) -> leasehold::Result<End> {
    tally.note(task.id(), error);
    let again = task.nack(error, None).await?;
    Ok(if again { End::Retried } else { End::Failed })
}

async fn run_command(task: &Task, work: &Work, stop: &CancellationToken) -> anyhow::Result<Ended> {
    let text = task.text();
    let queue = task.queue().map_or("", |queue| queue.name()).to_owned();
    let command = fill_in(&work.command, task, &text, &queue);
    let variables = [
        ("LEASEHOLD_QUEUE", queue),
        ("LEASEHOLD_TASK_ID", task.id().to_owned()),
        ("LEASEHOLD_ATTEMPT", task.attempt().to_string()),
        ("LEASEHOLD_TOKEN", task.token().to_string()),
    ];
    let (mut running, pipes) = Running::start_task(&command, variables)?;
    let Pipes { mut stdin, mut stdout, stderr } = pipes;
    running.trust(task.trusted_for());
    let feed = async {
        // A command that does not read its input is fine.
        let _ = stdin.write_all(text.as_bytes()).await;
        let _ = stdin.write_all(b"\n").await;
        drop(stdin);
    };
    let talk = async {
        let mut output = Vec::new();
        let read = async {
            let mut limited = (&mut stdout).take(RESULT as u64);
            limited.read_to_end(&mut output).await?;
            // What is beyond is read, or the command would wait for ever, and dropped.
            let cut = tokio::io::copy(&mut stdout, &mut tokio::io::sink()).await?;
            if cut > 0 {
                let (id, kept) = (task.id(), RESULT);
                tracing::warn!(id, kept, cut, "the output is too long for a result, and was cut");
            }
            anyhow::Ok(())
        };
        let ((), read, said) = tokio::join!(feed, read, pass_on(stderr));
        read?;
        anyhow::Ok((output, said))
    };
    tokio::pin!(talk);
    let lost = task.lost();
    let limit = task.timeout();
    let too_long = async {
        match limit {
            Some(limit) => tokio::time::sleep(limit).await,
            None => std::future::pending().await,
        }
    };
    tokio::pin!(too_long);
    let mut tick = tokio::time::interval(Duration::from_millis(500));
    let mut talked = None;
    let ended = loop {
        tokio::select! {
            // It may close its output long before it ends.
            all = &mut talk, if talked.is_none() => talked = Some(all?),
            code = running.wait(), if talked.is_some() => {
                let code = code?;
                let (output, said) = talked.unwrap_or_default();
                // Its sitter may have stopped it because the claim could not be trusted any more.
                return Ok(match task.check() {
                    _ if running.never_started() => Ended::Lost,
                    Ok(()) => Ended::By { code, output, said },
                    Err(_) if code == 0 => Ended::By { code, output, said },
                    Err(_) => Ended::Lost,
                });
            }
            _ = tick.tick() => running.trust(task.trusted_for()),
            () = &mut too_long => break Ended::TimedOut(limit.unwrap_or_default()),
            () = stop.cancelled() => break Ended::Stopped,
            () = lost.cancelled() => break Ended::Lost,
        }
    };
    running.signal(Signal::TERM);
    let grace = tokio::time::sleep(work.grace);
    tokio::pin!(grace);
    loop {
        tokio::select! {
            // Somebody has to read what it says, or it never gets to its end.
            _ = &mut talk, if talked.is_none() => talked = Some(Default::default()),
            _ = running.wait() => break,
            _ = tick.tick() => running.trust(task.trusted_for()),
            () = &mut grace => {
                running.kill().await?;
                break;
            }
        }
    }
    Ok(ended)
}

/// Passes on what the command says on standard error, and returns the end of it.
async fn pass_on(mut stderr: tokio::process::ChildStderr) -> String {
    let mut tail: Vec<u8> = Vec::new();
    let mut buffer = [0; 4096];
    while let Ok(read) = stderr.read(&mut buffer).await {
        if read == 0 {
            break;
        }
        // If ours is gone, the command need not know.
        let _ = std::io::Write::write_all(&mut std::io::stderr(), &buffer[..read]);
        tail.extend(&buffer[..read]);
        let surplus = tail.len().saturating_sub(SAID);
        tail.drain(..surplus);
    }
    match String::from_utf8_lossy(&tail).trim() {
        "" => String::new(),
        text => format!(": {text}"),
    }
}

/// Puts the task in the place of `{}` and the like.
fn fill_in(command: &[OsString], task: &Task, text: &str, queue: &str) -> Vec<OsString> {
    let attempt = task.attempt().to_string();
    let token = task.token().to_string();
    let places = [
        ("{}", text),
        ("{id}", task.id()),
        ("{attempt}", &attempt),
        ("{token}", &token),
        ("{queue}", queue),
    ];
    command.iter().map(|word| replace(word, &places)).collect()
}

/// In one pass: what is put in is not looked at again.
fn replace(word: &OsString, places: &[(&str, &str)]) -> OsString {
    let Some(word) = word.to_str() else { return word.clone() };
    let mut out = String::new();
    let mut rest = word;
    'next: while !rest.is_empty() {
        for (place, text) in places {
            if let Some(tail) = rest.strip_prefix(place) {
                out.push_str(text);
                rest = tail;
                continue 'next;
            }
        }
        let mut chars = rest.chars();
        out.extend(chars.next());
        rest = chars.as_str();
    }
    out.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_filled_in_once() {
        let places = [("{}", "a {id} b"), ("{id}", "7")];
        let filled = |word: &str| replace(&OsString::from(word), &places).into_string().unwrap();
        assert_eq!(filled("x={}.{id}"), "x=a {id} b.7");
        assert_eq!(filled("{other} {"), "{other} {");
        assert_eq!(filled("é{id}"), "é7");
    }
}
