//! `leasehold demo --race`: processes race for objects, and the store decides.
//!
//! The workers are processes of their own on a temporary directory store; the parent only starts
//! them at the same moment, listens, and in the end reads from the store who really won and compares
//! that with what the workers were told.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc;

use anyhow::{Context as _, bail, ensure};
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use leasehold::store::meter::Usage;
use leasehold::store::{Connect, Kind, List, Put, Store, StoreUrl};
use leasehold::{Durability, Key, Proof, When, Write};
use serde::{Deserialize, Serialize};

use super::{Processes, verdict};
use crate::args::{Args, Demo as Asked, DemoWorker};
use crate::exit::Exit;
use crate::render::{self, DIM, paint};

/// How often each worker increments the shared counter.
const SWAPS: u32 = 50;

/// What a worker tells the parent, one line each.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Line {
    Ready,
    Progress { won: u32, lost: u32 },
    Done(Told),
}

/// What a worker was told by the store.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Told {
    won: u32,
    lost: u32,
    swapped: u32,
    swaps_refused: u32,
    usage: Usage,
}

/// How many race, and for how many objects.
struct Demo {
    workers: u32,
    objects: u32,
}

/// Runs the race and shows it.
pub fn run(args: &Args, asked: &Asked, dir: &Path) -> anyhow::Result<Exit> {
    let (workers, objects) = (asked.workers.unwrap_or(8), asked.number.unwrap_or(5000));
    let demo = &Demo { workers, objects };
    if !args.json && !args.quiet {
        render::line(format_args!(
            "{} processes race to create {} objects, then to increment one counter {SWAPS} times each.\n\
             There is no server: the store is a plain directory, {}\n",
            demo.workers,
            demo.objects,
            dir.display()
        ))?;
    }
    let told = race(args, demo, dir)?;
    let seen = crate::runtime(1)?.block_on(look(dir, demo))?;
    report(args, demo, &told, &seen)
}

fn race(args: &Args, demo: &Demo, dir: &Path) -> anyhow::Result<Vec<Told>> {
    let (lines, from_workers) = mpsc::channel();
    let mut workers = Processes(Vec::new());
    let mut starts = Vec::new();
    for id in 0..demo.workers {
        let (child, start) = spawn(dir, id, demo, lines.clone())?;
        workers.0.push(child);
        starts.push(start);
    }
    drop(lines);
    let mut ready = 0;
    let mut told: BTreeMap<u32, Told> = BTreeMap::new();
    let bars = Bars::new(demo, !args.json && !args.quiet);
    while told.len() < demo.workers as usize {
        let (id, line) = from_workers.recv().context("all workers ended early")?;
        match line? {
            Line::Ready => {
                ready += 1;
                if ready == demo.workers {
                    for start in &mut starts {
                        writeln!(start).context("a worker ended early")?;
                    }
                }
            }
            Line::Progress { won, lost } => bars.show(id, won, lost),
            Line::Done(result) => {
                bars.show(id, result.won, result.lost);
                told.insert(id, result);
            }
        }
    }
    bars.finish();
    for child in &mut workers.0 {
        let status = child.wait()?;
        ensure!(status.success(), "a worker failed: {status}");
    }
    Ok(told.into_values().collect())
}

type Heard = (u32, anyhow::Result<Line>);

fn spawn(
    dir: &Path,
    id: u32,
    demo: &Demo,
    lines: mpsc::Sender<Heard>,
) -> anyhow::Result<(Child, ChildStdin)> {
    let mut child = Command::new(std::env::current_exe()?)
        .arg("demo-worker")
        .arg(dir)
        .args([id.to_string(), demo.objects.to_string(), SWAPS.to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start a worker")?;
    let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
        bail!("a worker has no pipes");
    };
    std::thread::spawn(move || {
        for line in BufReader::new(stdout).lines() {
            let line = line.map_err(Into::into).and_then(|line| {
                serde_json::from_str(&line).with_context(|| format!("a worker said {line:?}"))
            });
            if lines.send((id, line)).is_err() {
                return;
            }
        }
    });
    Ok((child, stdin))
}

/// One of the racing processes.
pub async fn worker(worker: &DemoWorker) -> anyhow::Result<Exit> {
    let store = Connect::new(StoreUrl::Directory(worker.dir.clone())).open()?;
    store.init().await?;
    let before = store.usage();
    tell(&Line::Ready)?;
    std::io::stdin().lock().read_line(&mut String::new())?;
    let mut told = Told::default();
    for (number, tried) in shuffled(&store, worker.objects).into_iter().zip(1..) {
        match create(&store, &object_key(number)?, worker.id).await? {
            true => told.won += 1,
            false => told.lost += 1,
        }
        if tried % 20 == 0 {
            tell(&Line::Progress { won: told.won, lost: told.lost })?;
        }
    }
    while told.swapped < worker.swaps {
        match increment(&store).await? {
            true => told.swapped += 1,
            false => told.swaps_refused += 1,
        }
    }
    told.usage = store.usage().since(&before);
    tell(&Line::Done(told))?;
    Ok(Exit::Done)
}

/// Everyone goes for the same objects, each in an order of its own: with one order, whoever is
/// ahead would win everything.
fn shuffled(store: &Store, count: u32) -> Vec<u32> {
    let mut numbers: Vec<u32> = (0..count).collect();
    for last in (1..numbers.len()).rev() {
        let other = store.env().random() % (last as u64 + 1);
        numbers.swap(last, other as usize);
    }
    numbers
}

fn tell(line: &Line) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", serde_json::to_string(line)?)?;
    Ok(out.flush()?)
}

async fn create(store: &Store, key: &Key, id: u32) -> anyhow::Result<bool> {
    let nonce = store.env().nonce();
    let body = format!("{id} {nonce}");
    let write = Write::when(When::Absent, Proof::Nonce(nonce)).durability(Durability::Volatile);
    applied(store.put(key, body.into(), write).await?)
}

async fn increment(store: &Store) -> anyhow::Result<bool> {
    let key = counter_key()?;
    let nonce = store.env().nonce();
    let (count, when) = match store.get(&key).await? {
        Some(object) => (read_number(&object.body)?, When::Matches(object.meta.version)),
        None => (0, When::Absent),
    };
    let body = format!("{} {nonce}", count + 1);
    let write = Write::when(when, Proof::Nonce(nonce)).durability(Durability::Volatile);
    applied(store.put(&key, body.into(), write).await?)
}

fn applied(put: Put) -> anyhow::Result<bool> {
    match put {
        Put::Stored(_) => Ok(true),
        Put::Refused | Put::Contended => Ok(false),
        Put::Unknown(unknown) => Err(unknown.into_error().into()),
    }
}

/// What the store says in the end.
struct Seen {
    owners: BTreeMap<u32, u32>,
    objects: u32,
    counter: u32,
    usage: Usage,
}

async fn look(dir: &Path, demo: &Demo) -> anyhow::Result<Seen> {
    let store = Connect::new(StoreUrl::Directory(dir.to_owned())).open()?;
    let mut seen =
        Seen { owners: BTreeMap::new(), objects: 0, counter: 0, usage: Usage::default() };
    let mut listing = store.list(List::prefix("race/")?);
    while let Some(page) = listing.next_page().await? {
        for entry in page.entries {
            let object = store.get(&entry.key).await?.context("an object has vanished")?;
            *seen.owners.entry(read_number(&object.body)?).or_default() += 1;
            seen.objects += 1;
        }
    }
    let counter = store.get(&counter_key()?).await?;
    seen.counter = counter.map_or(Ok(0), |object| read_number(&object.body))?;
    seen.usage = store.usage();
    ensure!(seen.objects <= demo.objects, "there are more objects than were raced for");
    Ok(seen)
}

fn report(args: &Args, demo: &Demo, told: &[Told], seen: &Seen) -> anyhow::Result<Exit> {
    let won: u32 = told.iter().map(|told| told.won).sum();
    let swapped: u32 = told.iter().map(|told| told.swapped).sum();
    let owners_agree = told
        .iter()
        .zip(0..)
        .all(|(told, id)| seen.owners.get(&id).copied().unwrap_or(0) == told.won);
    let created = won == demo.objects && seen.objects == demo.objects && owners_agree;
    let counted = seen.counter == swapped;
    let usage = told.iter().fold(seen.usage, |sum, told| sum.plus(&told.usage));
    let exit = if created && counted { Exit::Done } else { Exit::Failed };
    if args.json {
        render::json(&serde_json::json!({
            "workers": told,
            "objects": seen.objects,
            "counter": seen.counter,
            "correct": exit == Exit::Done,
            "usage": usage,
        }))?;
        return Ok(exit);
    }
    if !args.quiet {
        let header = ["worker", "won", "came too late", "increments", "tried again"];
        let mut table = render::table(&header, &[1, 2, 3, 4]);
        for (told, id) in told.iter().zip(1..) {
            let cells = [id, told.won, told.lost, told.swapped, told.swaps_refused];
            table.add_row(cells.map(|cell| cell.to_string()));
        }
        render::line(format_args!("{table}\n"))?;
    }
    render::line(format_args!(
        "{}  every object has exactly one owner, and it is the one who was told so: {} of {}",
        verdict(created),
        seen.objects,
        demo.objects
    ))?;
    render::line(format_args!(
        "{}  no increment was lost: {swapped} acknowledged, the counter says {}",
        verdict(counted),
        seen.counter
    ))?;
    if !args.quiet {
        render::line("")?;
        render::receipt("a temporary directory", &usage, Kind::Directory, false);
        render::say(paint(
            DIM,
            format_args!(
                "the same requests would cost ${:.4} on S3",
                usage.dollars(&leasehold::store::meter::Prices::of(Kind::S3))
            ),
        ));
    }
    Ok(exit)
}

/// A bar per worker: what it has won of all there is. Only on a terminal.
struct Bars(Vec<ProgressBar>);

impl Bars {
    fn new(demo: &Demo, show: bool) -> Self {
        if !show {
            return Self(Vec::new());
        }
        let all = MultiProgress::new();
        let style =
            ProgressStyle::with_template("  {prefix:>9} {bar:40.green/black} won {pos:>4}  {msg}")
                .unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = |id: u32| {
            // Full would be twice the fair share.
            let share = u64::from(demo.objects / demo.workers * 2).max(1);
            let bar = all.add(ProgressBar::new(share).with_style(style.clone()));
            bar.set_prefix(format!("worker {}", id + 1));
            bar
        };
        Self((0..demo.workers).map(bar).collect())
    }

    fn show(&self, id: u32, won: u32, lost: u32) {
        if let Some(bar) = self.0.get(id as usize) {
            bar.set_position(won.into());
            bar.set_message(format!("came too late {lost}"));
        }
    }

    fn finish(&self) {
        for bar in &self.0 {
            bar.finish_and_clear();
        }
    }
}

fn object_key(number: u32) -> anyhow::Result<Key> {
    Ok(Key::new(format!("race/{number:05}"))?)
}

fn counter_key() -> anyhow::Result<Key> {
    Ok(Key::new("counter")?)
}

/// The number that a body begins with.
fn read_number(body: &[u8]) -> anyhow::Result<u32> {
    let text = std::str::from_utf8(body).context("not text")?;
    let number = text.split(' ').next().unwrap_or_default();
    number.parse().with_context(|| format!("not a number: {number:?}"))
}
