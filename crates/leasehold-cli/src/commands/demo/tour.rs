//! The tour: a supervisor, workers and a compiler go through a queue into an index, and one of them is
//! killed on the way.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use leasehold::env::BootTime;
use leasehold::fleet;
use leasehold::protocol::format::node::{Node, NodeProcess, Requests};
use leasehold::queue::{Queue, Receipt};
use leasehold::store::meter::{Prices, Usage};
use leasehold::store::{Connect, Kind, List, Store, StoreUrl};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use super::{Processes, verdict};
use crate::args::{Args, Demo};
use crate::exit::Exit;
use crate::render::{self, DIM, paint};

const NODE: &str = "demo";
const QUEUE: &str = "squares";
/// The task whose worker is killed: the only one that takes its time.
const SLOW: &str = "slow";
/// How long anything here may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// Shows everything, in order.
pub fn run(args: &Args, demo: &Demo, folder: &Path) -> anyhow::Result<Exit> {
    let runtime = crate::runtime(1)?;
    let (workers, tasks) = (demo.workers.unwrap_or(3), demo.number.unwrap_or(200));
    let path = folder.join("store");
    let store = Connect::new(StoreUrl::Directory(path.clone())).open()?;
    let mut tour = Tour {
        folder: folder.to_owned(),
        path,
        store,
        silent: args.json || args.quiet,
        json: args.json,
        step: 0,
        supervisor: Processes(Vec::new()),
        told: json!({}),
    };
    runtime.block_on(tour.all(workers, tasks))
}

struct Tour {
    folder: PathBuf,
    path: PathBuf,
    store: Store,
    silent: bool,
    json: bool,
    step: u32,
    supervisor: Processes,
    /// What was measured, for `--json`.
    told: Value,
}

impl Tour {
    async fn all(&mut self, workers: u32, tasks: u32) -> anyhow::Result<Exit> {
        self.line(format_args!(
            "A fleet on nothing but a plain directory, {}. No server; every process is an ordinary\n\
             leasehold command, and every figure was measured just now.",
            self.path.display()
        ))?;
        self.leasehold(&["index", "create", QUEUE, "-f", "n", "-f", "square:integer"])?;
        self.start(workers).await?;
        let queue = Queue::open_or_create(&self.store, QUEUE, None).await?;
        self.kill(&queue, workers).await?;
        self.push(tasks)?;
        self.grow(workers).await?;
        let done = self.finish(&queue, u64::from(tasks) + 1).await?;
        let found = self.ask(tasks).await?;
        let ended = self.end().await?;
        self.close(&[
            (done, "every task has exactly one receipt, that of the killed worker too"),
            (found, "the index holds every result, once"),
            (ended, "nothing is left running"),
        ])
        .await
    }

    /// The plan, and the processes that come of it.
    async fn start(&mut self, workers: u32) -> anyhow::Result<()> {
        self.title("A file says what each node runs. One supervisor per node makes it so.")?;
        let plan = self.plan(workers)?;
        for line in plan.lines().filter(|line| !line.is_empty() && !line.starts_with("every")) {
            self.line(paint(DIM, format_args!("   | {line}")))?;
        }
        self.show(&["fleet", "set", "fleet.toml"])?;
        self.leasehold(&["fleet", "set", "fleet.toml"])?;
        self.show(&["supervise", "--node", NODE])?;
        let start = self.now();
        let log = File::create(self.folder.join("log"))?;
        let supervisor = self
            .command(&["supervise", "--node", NODE, "--drain", "20s"])?
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .context("cannot start the supervisor")?;
        self.supervisor.0.push(supervisor);
        let all = workers as usize + 1;
        let node = self.node_when(|node| running(node).len() == all).await?;
        let names: Vec<String> = running(&node).iter().map(|one| name(one)).collect();
        self.measured("start_ms", start);
        self.line(format_args!("   {} run after {}", names.join(", "), self.since(start)))
    }

    fn plan(&self, workers: u32) -> anyhow::Result<String> {
        let plan = format!(
            r#"[[node]]
name = "{NODE}"
every = "1s"

[[node.worker]]
queue = "{QUEUE}"
count = {workers}
command = '''
  [ {{id}} != {SLOW} ] || sleep 1
  leasehold index put {QUEUE} n={{}} square=$(( {{}} * {{}} ))'''

[[node.compiler]]
index = "{QUEUE}"
pause = "1s"
"#
        );
        std::fs::write(self.folder.join("fleet.toml"), &plan)?;
        Ok(plan)
    }

    fn push(&mut self, tasks: u32) -> anyhow::Result<()> {
        self.title("Work is pushed, and shared.")?;
        let start = self.now();
        let numbers: Vec<String> = (1..=tasks).map(|n| n.to_string()).collect();
        self.show(&[
            "queue",
            "push",
            QUEUE,
            "--bundle",
            "1",
            "1",
            "2",
            "3",
            "…",
            &tasks.to_string(),
        ])?;
        let words = ["queue", "push", QUEUE, "--bundle", "1"].map(str::to_owned);
        let words: Vec<&str> = words.iter().chain(&numbers).map(String::as_str).collect();
        self.leasehold(&words)?;
        self.told["tasks"] = json!(tasks + 1);
        self.line(format_args!("   {tasks} tasks pushed after {}", self.since(start)))
    }

    /// Kills a worker in the middle of a task, and waits for another to have it.
    async fn kill(&mut self, queue: &Queue, workers: u32) -> anyhow::Result<()> {
        self.title("A worker is killed in the middle of a task.")?;
        self.show(&["queue", "push", QUEUE, "0", "--id", SLOW])?;
        self.leasehold(&["queue", "push", QUEUE, "0", "--id", SLOW])?;
        let victim = self.holder_when(queue, |_| true).await?;
        let Some(victim) = victim else {
            bail!("the slow task was done before its worker could die")
        };
        let pid: u32 = victim.rsplit(':').next().unwrap_or_default().parse()?;
        self.line(paint(
            DIM,
            format_args!("   $ kill -9 {pid}      # it has the task \"{SLOW}\""),
        ))?;
        let start = self.now();
        let raw = i32::try_from(pid).ok().and_then(Pid::from_raw).context("not a process")?;
        kill_process(raw, Signal::KILL).context("cannot kill the worker")?;
        let heir = self.holder_when(queue, |holder| holder != victim).await?;
        let took = self.since(start);
        self.measured("takeover_ms", start);
        let heir = match heir {
            Some(heir) => format!("worker {}", heir.rsplit(':').next().unwrap_or_default()),
            None => "another worker, which has done it already".to_owned(),
        };
        self.line(format_args!("   its task was taken over after {took}, by {heir}"))?;
        let all = workers as usize + 1;
        let node = self
            .node_when(|node| {
                let running = running(node);
                running.len() == all && running.iter().all(|one| one.pid != Some(pid))
            })
            .await?;
        let restarts: u64 = node.processes.iter().map(|one| one.restarts).sum();
        ensure!(restarts == 1, "{restarts} processes were started again");
        self.measured("replaced_ms", start);
        self.line(format_args!(
            "   its place was taken, as the node's record says after {}",
            self.since(start)
        ))
    }

    /// Another plan, without touching what it does not change.
    async fn grow(&mut self, workers: u32) -> anyhow::Result<()> {
        self.title("The plan changes while everything runs.")?;
        let before = self.node_when(|_| true).await?;
        let start = self.now();
        self.plan(workers + 2)?;
        self.line(paint(DIM, format_args!("   | count = {}", workers + 2)))?;
        self.show(&["fleet", "set", "fleet.toml"])?;
        self.leasehold(&["fleet", "set", "fleet.toml"])?;
        let all = workers as usize + 3;
        let after = self.node_when(|node| running(node).len() == all).await?;
        let pids = |node: &Node| -> Vec<u32> {
            let workers = running(node).into_iter().filter(|one| one.role == "worker");
            workers.filter_map(|one| one.pid).collect()
        };
        let (old, new) = (pids(&before), pids(&after));
        let kept = old.iter().filter(|pid| new.contains(pid)).count();
        self.told["kept"] = json!(kept);
        self.measured("changed_ms", start);
        self.line(format_args!(
            "   {} workers after {}; {kept} of the {} that ran kept their processes",
            new.len(),
            self.since(start),
            old.len()
        ))
    }

    /// Waits for the end of the work, and reads who did what.
    async fn finish(&mut self, queue: &Queue, tasks: u64) -> anyhow::Result<bool> {
        self.title("The work is done.")?;
        let start = self.now();
        loop {
            let counts = queue.status(0).await?.counts;
            if counts.free + counts.leased == 0 {
                break;
            }
            self.pause(start).await?;
        }
        let mut by: BTreeMap<String, u64> = BTreeMap::new();
        let mut taken_over = 0;
        let mut listing = self.store.list(List::prefix(format!("queues/{QUEUE}/completed/"))?);
        while let Some(page) = listing.next_page().await? {
            for entry in page.entries {
                let object = self.store.get(&entry.key).await?.context("a receipt has vanished")?;
                let receipt = Receipt::parse(&object.body)?;
                let pid = receipt.worker.rsplit(':').next().unwrap_or_default().to_owned();
                *by.entry(pid).or_default() += 1;
                taken_over += u64::from(receipt.retries > 0);
            }
        }
        let receipts: u64 = by.values().sum();
        let failed = queue.status(0).await?.counts.failed;
        let shares: Vec<String> = by.iter().map(|(pid, count)| format!("{pid}: {count}")).collect();
        self.line(format_args!(
            "   {receipts} receipts for {tasks} tasks; {taken_over} of them taken over from the dead"
        ))?;
        self.line(paint(DIM, format_args!("   by worker  {}", shares.join("  "))))?;
        self.told["receipts"] = json!(receipts);
        self.told["taken_over"] = json!(taken_over);
        Ok(receipts == tasks && failed == 0 && taken_over == 1)
    }

    /// The results, from the index.
    async fn ask(&mut self, tasks: u32) -> anyhow::Result<bool> {
        self.title("The results are in the index: found by key, or by SQL.")?;
        let start = self.now();
        // The compiler takes them in by and by; nobody has to wait for that to read them.
        let index = leasehold::index::Index::open(&self.store, QUEUE).await?;
        while index.status(false).await?.total().inbox_objects > 0 {
            self.pause(start).await?;
        }
        let shards = index.status(false).await?.shards.len();
        self.line(format_args!("   the compiler has merged all of them into {shards} shards"))?;
        self.show(&["index", "get", QUEUE, "7"])?;
        let one = self.leasehold(&["index", "get", QUEUE, "7", "--json"])?;
        let one: Value = serde_json::from_str(&one).context("the index does not answer")?;
        self.line(format_args!("   n = {}, square = {}", text(&one["n"]), text(&one["square"])))?;
        let expected: u64 = (0..=u64::from(tasks)).map(|n| n * n).sum();
        let (records, total) = match cfg!(feature = "sql") {
            true => self.query()?,
            false => self.export()?,
        };
        self.told["records"] = json!(records);
        Ok(records == u64::from(tasks) + 1 && total == expected && text(&one["square"]) == "49")
    }

    fn query(&mut self) -> anyhow::Result<(u64, u64)> {
        let sql = format!("SELECT count(*) AS records, sum(square) AS total FROM {QUEUE}");
        self.show(&["index", "query", &format!("\"{sql}\"")])?;
        let answer = self.leasehold(&["index", "query", &sql, "--format", "jsonl"])?;
        let answer: Value = serde_json::from_str(&answer).context("the query was not answered")?;
        self.line(format_args!("   records = {}, total = {}", answer["records"], answer["total"]))?;
        let number = |name: &str| answer[name].as_u64().unwrap_or_default();
        Ok((number("records"), number("total")))
    }

    fn export(&mut self) -> anyhow::Result<(u64, u64)> {
        self.show(&["index", "export", QUEUE])?;
        let all = self.leasehold(&["index", "export", QUEUE, "--format", "jsonl"])?;
        let squares = all.lines().map(|line| {
            let row: Value = serde_json::from_str(line).unwrap_or_default();
            text(&row["square"]).parse().unwrap_or(0)
        });
        Ok((all.lines().count() as u64, squares.sum()))
    }

    /// Drains the node.
    async fn end(&mut self) -> anyhow::Result<bool> {
        self.title("The node is told to end.")?;
        let node = self.node_when(|_| true).await?;
        let start = self.now();
        let pid = self.supervisor.0.first().context("there is no supervisor")?.id();
        self.line(paint(DIM, format_args!("   $ kill -TERM {pid}")))?;
        let raw = i32::try_from(pid).ok().and_then(Pid::from_raw);
        kill_process(raw.context("not a process")?, Signal::TERM)?;
        let supervisor = self.supervisor.0.first_mut().context("there is no supervisor")?;
        let status = supervisor.wait()?;
        self.measured("drain_ms", start);
        self.line(format_args!(
            "   {} processes and their supervisor ended after {}",
            running(&node).len(),
            self.since(start)
        ))?;
        let left = running(&node).into_iter().filter_map(|one| one.pid);
        let gone = |pid: u32| leasehold::host::process(pid).is_none();
        Ok(status.success() && left.into_iter().all(gone))
    }

    /// The verdict and the receipt.
    async fn close(&mut self, promises: &[(bool, &str)]) -> anyhow::Result<Exit> {
        let last = fleet::nodes(&self.store).await?.pop().and_then(|seen| seen.record.ok());
        let Requests { put, get, head, list, delete } =
            last.map(|node| node.requests).unwrap_or_default();
        let usage = Usage { put, get, head, list, delete, ..Usage::default() };
        let right = promises.iter().all(|(holds, _)| *holds);
        let exit = if right { Exit::Done } else { Exit::Failed };
        if self.json {
            self.told["correct"] = json!(right);
            self.told["usage"] = json!(usage);
            render::json(&self.told)?;
            return Ok(exit);
        }
        self.line("")?;
        for (holds, what) in promises {
            render::line(format_args!("{}  {what}", verdict(*holds)))?;
        }
        if !self.silent {
            render::line("")?;
            let counts = [("PUT", put), ("GET", get), ("HEAD", head), ("LIST", list)];
            let counts = counts.map(|(class, count)| format!("{class} {count}")).join("  ");
            render::line(format_args!(
                "{} the node made {} requests ({counts}  DELETE {delete}), by its own record:\n\
                 {:8}free here, and ${:.4} at the list price of S3",
                paint(DIM, "receipt"),
                usage.requests(),
                "",
                usage.dollars(&Prices::of(Kind::S3))
            ))?;
        }
        Ok(exit)
    }

    fn now(&self) -> BootTime {
        self.store.env().clock().boot()
    }

    fn since(&self, start: BootTime) -> String {
        format!("{:.2} s", self.now().since(start).as_secs_f64())
    }

    fn measured(&mut self, name: &str, start: BootTime) {
        let span = self.now().since(start).as_millis();
        self.told[name] = json!(u64::try_from(span).unwrap_or(u64::MAX));
    }

    fn line(&self, text: impl std::fmt::Display) -> anyhow::Result<()> {
        match self.silent {
            true => Ok(()),
            false => render::line(text),
        }
    }

    fn title(&mut self, text: &str) -> anyhow::Result<()> {
        self.step += 1;
        let number = paint(render::GOOD.bold(), self.step);
        self.line(format_args!("\n{number}  {}", paint(anstyle::Style::new().bold(), text)))
    }

    fn show(&self, words: &[&str]) -> anyhow::Result<()> {
        self.line(paint(DIM, format_args!("   $ leasehold {}", words.join(" "))))
    }

    fn command(&self, words: &[&str]) -> anyhow::Result<Command> {
        let own = crate::child::own_program()?;
        let mut command = Command::new(&own);
        command.args(words).current_dir(&self.folder).stdin(Stdio::null());
        command
            .env("LEASEHOLD_STORE", &self.path)
            .env("LEASEHOLD_STATE", self.folder.join("state"));
        command.env_remove("LEASEHOLD_CONFIG").env_remove("NOTIFY_SOCKET");
        // So that the plan can say `leasehold`.
        let bin = self.folder.join("bin");
        if !bin.exists() {
            std::fs::create_dir(&bin)?;
            std::os::unix::fs::symlink(std::env::current_exe()?, bin.join("leasehold"))?;
        }
        let paths = std::env::var_os("PATH").unwrap_or_default();
        let all = std::iter::once(bin).chain(std::env::split_paths(&paths));
        command.env("PATH", std::env::join_paths(all)?);
        Ok(command)
    }

    /// Runs a command to its end, and gives what it printed.
    fn leasehold(&self, words: &[&str]) -> anyhow::Result<String> {
        let done = self.command(words)?.output().context("cannot run a command")?;
        let said = String::from_utf8_lossy(&done.stderr);
        ensure!(done.status.success(), "leasehold {} failed: {said}", words[..2].join(" "));
        Ok(String::from_utf8(done.stdout)?)
    }

    /// Waits a little; an error if that has been done for too long.
    async fn pause(&mut self, start: BootTime) -> anyhow::Result<()> {
        if let Some(supervisor) = self.supervisor.0.first_mut()
            && let Some(status) = supervisor.try_wait()?
        {
            bail!("the supervisor has ended ({status}): {}", self.log());
        }
        ensure!(self.now().since(start) < PATIENCE, "that took too long: {}", self.log());
        tokio::time::sleep(Duration::from_millis(5)).await;
        Ok(())
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.join("log")).unwrap_or_default()
    }

    /// What the node says of itself, once it says this.
    async fn node_when(&mut self, is_so: impl Fn(&Node) -> bool) -> anyhow::Result<Node> {
        let start = self.now();
        loop {
            let seen = fleet::nodes(&self.store).await?.pop().and_then(|seen| seen.record.ok());
            if let Some(node) = seen.filter(&is_so) {
                return Ok(node);
            }
            self.pause(start).await?;
        }
    }

    /// Who has the slow task, once it is somebody like this; `None` if it is done.
    async fn holder_when(
        &mut self,
        queue: &Queue,
        is_so: impl Fn(&str) -> bool,
    ) -> anyhow::Result<Option<String>> {
        let start = self.now();
        loop {
            let Some((_, held)) = queue.find(SLOW).await? else { return Ok(None) };
            let held = held.filter(|held| held.state == "held" && is_so(&held.worker));
            if let Some(held) = held {
                return Ok(Some(held.worker));
            }
            self.pause(start).await?;
        }
    }
}

fn running(node: &Node) -> Vec<&NodeProcess> {
    node.processes.iter().filter(|one| one.state == "running").collect()
}

fn name(process: &NodeProcess) -> String {
    format!("{} {}", process.role, process.pid.unwrap_or_default())
}

fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}
