//! `leasehold queue push`.

use std::io::{BufRead, IsTerminal as _, Read as _};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context as _;
use futures::StreamExt as _;
use indicatif::{ProgressBar, ProgressStyle};
use leasehold::queue::{Json, MAX_PAYLOAD, NewTask, Outcome, Pushed, Queue};
use leasehold::{Error, ErrorKind, Store};
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc::Sender;
use tokio_util::sync::CancellationToken;

use super::invalid;
use crate::args::Args;
use crate::args::queue::Push;
use crate::exit::{Ending, Exit};
use crate::render;

/// How many requests are under way at a time.
const AT_A_TIME: usize = 32;
/// How many tasks go into a bundle where many are pushed.
const BUNDLE: u32 = 100;
/// And how many bytes of them: long lines make smaller bundles. Several are in memory at a time.
const BYTES: usize = 4 << 20;
/// How long what was read waits for company.
const SOON: Duration = Duration::from_secs(1);

pub async fn run(args: &Args, store: &Store, push: &Push) -> anyhow::Result<Ending> {
    let stream = push.tasks == ["-"];
    if !stream && push.tasks.iter().any(|task| task == "-") {
        return Err(invalid("- reads tasks from standard input, and stands alone"));
    }
    if !stream && push.tasks.len() > 1 && (push.id.is_some() || push.wait) {
        return Err(invalid("--id and --wait are for one task"));
    }
    if stream && (push.id.is_some() || push.wait) {
        return Err(invalid("--id and --wait are for one task, not for -"));
    }
    let named = push.id.is_some() || push.id_field.is_some();
    let usual = if stream && !named && push.delay.is_none() { BUNDLE } else { 1 };
    let bundle = push.bundle.unwrap_or(usual) as usize;
    if bundle > 1 && (named || push.delay.is_some()) {
        return Err(invalid("tasks with names or a delay cannot be bundled: leave --bundle out"));
    }
    super::without_comma(&push.queue)?;
    // What is wrong with them is said before anything is made.
    let texts = push.tasks.iter().filter(|_| !stream);
    let tasks: Vec<NewTask> = texts.map(|text| task(text, push)).collect::<anyhow::Result<_>>()?;
    let queue = super::open_to_work(args, store, &push.queue, false).await?;
    if stream {
        return push_lines(args, &queue, push, bundle).await;
    }
    if push.wait && !queue.settings().receipts {
        return Err(invalid("the queue keeps no receipts: there is nothing to wait for"));
    }
    if bundle > 1 {
        for chunk in tasks.chunks(bundle) {
            for id in queue.push_bundle(chunk.to_vec()).await? {
                print(args, &id, "new")?;
            }
        }
        return Ok(Exit::Done.into());
    }
    for pushed in queue.push_many(tasks).await? {
        if push.wait {
            return wait(args, &queue, &pushed).await;
        }
        let outcome = match pushed.outcome {
            Outcome::New => "new",
            Outcome::AlreadyPending => "already pending",
            Outcome::AlreadyCompleted => "already completed",
        };
        print(args, &pushed.id, outcome)?;
    }
    Ok(Exit::Done.into())
}

fn print(args: &Args, id: &str, outcome: &str) -> anyhow::Result<()> {
    match (args.json, args.quiet) {
        (true, _) => render::json(&json!({ "id": id, "outcome": outcome })),
        (false, true) => Ok(()),
        (false, false) if outcome == "new" => render::verbatim(id),
        (false, false) => {
            let (id, outcome) = (render::shown(id), render::paint(render::DIM, outcome));
            render::line(format_args!("{id}  {outcome}"))
        }
    }
}

/// The task in this text: JSON if it is any, else the text.
fn task(text: &str, push: &Push) -> anyhow::Result<NewTask> {
    let json = match push.text {
        true => None,
        false => serde_json::from_str::<Json>(text).ok(),
    };
    let mut id = push.id.clone();
    if let Some(field) = &push.id_field {
        let value: serde_json::Value = serde_json::from_str(text).map_err(|error| {
            invalid(format!("not a JSON object with a field {field:?}: {error}"))
        })?;
        id = match value.get(field) {
            Some(serde_json::Value::String(id)) => Some(id.clone()),
            Some(number @ serde_json::Value::Number(_)) => Some(number.to_string()),
            _ => return Err(invalid(format!("no text or number in field {field:?}: {text}"))),
        };
    }
    let mut task = match json {
        Some(json) => NewTask::raw(json),
        None => NewTask::text(text),
    };
    if let Some(id) = id {
        task = task.id(id);
    }
    if let Some(delay) = push.delay {
        task = task.delay(delay);
    }
    if let Some(timeout) = push.timeout {
        task = task.timeout(timeout);
    }
    if let Some(attempts) = push.max_attempts {
        task = task.max_attempts(attempts);
    }
    Ok(task)
}

/// One task per line, in a stream: memory stays flat however many there are.
async fn push_lines(
    args: &Args,
    queue: &Queue,
    push: &Push,
    bundle: usize,
) -> anyhow::Result<Ending> {
    let bar = bar(args);
    let (lines, receiver) = tokio::sync::mpsc::channel::<anyhow::Result<Vec<NewTask>>>(4);
    // Reading waits, and must not keep the requests from going on.
    let options = Reading { bundle, push: clone(push) };
    let waiting = Arc::new(Mutex::new(Chunk::default()));
    let read = waiting.clone();
    std::thread::spawn(move || options.read(&lines, &read));
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let interrupted = CancellationToken::new();
    let mut pushed = 0_u64;
    let mut known = 0_u64;
    // No more is begun once something went wrong.
    let stop = CancellationToken::new();
    let chunks = futures::stream::unfold(receiver, |mut receiver| async {
        let chunk = loop {
            let (rest, done) = tokio::select! {
                biased;
                () = stop.cancelled() => break None,
                // What was read is pushed, and no more is read.
                () = interrupted.cancelled() => {
                    receiver.close();
                    match receiver.recv().await {
                        Some(chunk) => break Some(chunk),
                        None => (Chunk::take(&waiting), true),
                    }
                }
                chunk = receiver.recv() => break chunk,
                // Whoever writes now and then does not wait for a bundle to be full.
                () = tokio::time::sleep(SOON) => (Chunk::take(&waiting), false),
            };
            match rest.is_empty() {
                true if done => break None,
                true => {}
                false => break Some(Ok(rest)),
            }
        };
        chunk.map(|chunk| (chunk, receiver))
    });
    let pushes = chunks
        .map(|chunk| async move {
            let chunk = chunk?;
            let count = chunk.len() as u64;
            if bundle > 1 {
                queue.push_bundle(chunk).await?;
                return anyhow::Ok((count, 0));
            }
            let mut known = 0;
            for task in chunk {
                let pushed = queue.push(task).await?;
                known += u64::from(pushed.outcome != Outcome::New);
            }
            Ok((count - known, known))
        })
        .buffer_unordered(AT_A_TIME);
    let mut pushes = Box::pin(pushes);
    let mut outcome = Ok(());
    // To the end also after an error: what is under way may be stored already, and is counted.
    loop {
        let push = tokio::select! {
            push = pushes.next() => push,
            Some(()) = async { tokio::select! {
                told = terminate.recv() => told,
                told = interrupt.recv() => told,
            } } => {
                // Whoever asks twice does not want to wait for what is under way either.
                if interrupted.is_cancelled() {
                    break;
                }
                interrupted.cancel();
                continue;
            }
        };
        let Some(push) = push else { break };
        match push {
            Ok((new, old)) => {
                pushed += new;
                known += old;
                bar.set_position(pushed + known);
            }
            Err(error) => {
                stop.cancel();
                outcome = outcome.and(Err(error));
            }
        }
    }
    drop(pushes);
    bar.finish_and_clear();
    match args.json {
        true => render::json(&json!({ "pushed": pushed, "known": known }))?,
        false if known > 0 => {
            render::line(format_args!("{pushed} pushed, {known} were there already"))?;
        }
        false => render::line(format_args!("{pushed} pushed"))?,
    }
    outcome.with_context(|| "not all tasks were pushed: those that were stay".to_owned())?;
    Ok(match interrupted.is_cancelled() {
        // There may be more.
        true => Exit::Failed,
        false => Exit::Done,
    }
    .into())
}

/// What the reading thread needs of the options.
struct Reading {
    bundle: usize,
    push: Push,
}

/// Tasks that were read and wait for company.
#[derive(Default)]
struct Chunk {
    tasks: Vec<NewTask>,
    bytes: usize,
}

impl Chunk {
    fn take(chunk: &Mutex<Self>) -> Vec<NewTask> {
        std::mem::take(&mut *chunk.lock().unwrap_or_else(PoisonError::into_inner)).tasks
    }
}

impl Reading {
    /// Reads to the end, or to the first line that is no task. What is not enough for a bundle is in `chunk`
    /// for whoever does not want to wait for more.
    fn read(&self, to: &Sender<anyhow::Result<Vec<NewTask>>>, chunk: &Mutex<Chunk>) {
        let mut stdin = std::io::stdin().lock();
        let mut number = 0_u64;
        let ended = loop {
            if to.is_closed() {
                return;
            }
            number += 1;
            let task = match next_line(&mut stdin) {
                Ok(None) => break Ok(()),
                Ok(Some(line)) if line.is_empty() => continue,
                Ok(Some(line)) => task(&line, &self.push).and_then(|task| match task.size() {
                    size if size > MAX_PAYLOAD => Err(too_long()),
                    _ => Ok(task),
                }),
                Err(error) => Err(error),
            };
            let task = match task {
                Ok(task) => task,
                Err(error) => break Err(error),
            };
            let full = {
                let mut chunk = chunk.lock().unwrap_or_else(PoisonError::into_inner);
                let before = match chunk.bytes + task.size() > BYTES && !chunk.tasks.is_empty() {
                    true => std::mem::take(&mut *chunk).tasks,
                    false => Vec::new(),
                };
                chunk.bytes += task.size();
                chunk.tasks.push(task);
                let full = match chunk.tasks.len() >= self.bundle {
                    true => std::mem::take(&mut *chunk).tasks,
                    false => Vec::new(),
                };
                [before, full]
            };
            for tasks in full.into_iter().filter(|tasks| !tasks.is_empty()) {
                if to.blocking_send(Ok(tasks)).is_err() {
                    // No more is wanted. These are not pushed, nor is anything behind them.
                    return;
                }
            }
        };
        let rest = Chunk::take(chunk);
        if !rest.is_empty() && to.blocking_send(Ok(rest)).is_err() {
            return;
        }
        if let Err(error) = ended {
            let at = Error::new(ErrorKind::Invalid, format!("line {number}: {error:#}"));
            let _ = to.blocking_send(Err(at.into()));
        }
    }
}

fn too_long() -> anyhow::Error {
    invalid(format!(
        "longer than {MAX_PAYLOAD} bytes, which is the most for a task: store it as an object, and push \
         its name"
    ))
}

/// The next line, without its end. One that is too long for a task is not read to its end.
fn next_line(from: &mut impl BufRead) -> anyhow::Result<Option<String>> {
    let mut line = Vec::new();
    // With its end, and a byte more than may be.
    let most = MAX_PAYLOAD as u64 + 3;
    from.take(most).read_until(b'\n', &mut line)?;
    if line.is_empty() {
        return Ok(None);
    }
    if line.last() == Some(&b'\n') {
        line.pop();
        if line.last() == Some(&b'\r') {
            line.pop();
        }
    }
    if line.len() > MAX_PAYLOAD {
        return Err(too_long());
    }
    match String::from_utf8(line) {
        Ok(line) => Ok(Some(line)),
        Err(_) => Err(invalid("not valid UTF-8")),
    }
}

/// The options of a task, for another thread.
fn clone(push: &Push) -> Push {
    Push {
        queue: push.queue.clone(),
        tasks: Vec::new(),
        id: None,
        id_field: push.id_field.clone(),
        text: push.text,
        delay: push.delay,
        timeout: push.timeout,
        max_attempts: push.max_attempts,
        bundle: push.bundle,
        wait: false,
    }
}

fn bar(args: &Args) -> ProgressBar {
    if args.quiet || args.json || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::no_length();
    let style = ProgressStyle::with_template("{spinner} {human_pos} pushed, {per_sec}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
    bar.enable_steady_tick(Duration::from_millis(100));
    bar
}

async fn wait(args: &Args, queue: &Queue, pushed: &Pushed) -> anyhow::Result<Ending> {
    let id = &pushed.id;
    let local = !queue.store().kind().is_bucket();
    let poll = if local { Duration::from_millis(50) } else { Duration::from_secs(2) };
    match queue.wait(pushed, poll).await? {
        Ok(receipt) => {
            match (args.json, &receipt.result) {
                (true, _) => render::json(&receipt)?,
                (false, None) => {}
                (false, Some(result)) => {
                    render::verbatim(&leasehold::protocol::format::task::plain_text(result))?;
                }
            }
            Ok(Exit::Done.into())
        }
        Err(letter) => {
            if args.json {
                render::json(&letter)?;
            }
            let last = letter.errors.last().map_or("", |failure| failure.error.as_str());
            let tries = letter.failures + letter.crashes;
            let (id, last) = (render::shown(id), render::shown(last));
            render::say(format_args!("{id}: given up after {tries} attempts: {last}"));
            Ok(Exit::Failed.into())
        }
    }
}
