//! 16 workers on an S3 server, against bare HTTP with the same requests.
//!
//! Requests per second, since that is what a bucket gives: a push is a PUT, a task done is a PUT (its
//! lease), a GET, a PUT (its receipt) and two DELETEs.

use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use hyper::header::ETAG;
use leasehold::queue::{Queue, QueueSettings};
use leasehold_testkit::servers::Server;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

use super::{Speed, contest, payload, player};
use crate::bucket::{Place, seaweedfs};
use crate::host::cpu_time;
use crate::report::{Report, Row, Target, Unit};
use crate::rig::{BODY, Rig};
use crate::stats::median;
use crate::store::bucket::bare::{Connection, connect, request, send};

const WORKERS: usize = 16;
const FLOOR: &str = "hyper, a connection per worker, the same requests signed as they are sent";

pub fn run(rig: &Rig, report: &mut Report) -> Result<()> {
    let Some(server) = seaweedfs(rig, report, "16 workers on SeaweedFS")? else { return Ok(()) };
    let runtime = rig.runtime()?;
    let store = Place::on(&server).open()?;
    runtime.block_on(store.init())?;
    let tasks = rig.pick(480, 240);
    let mut run = 0;
    let (mut our_cpu, mut bare_cpu) = (Vec::new(), Vec::new());
    let mut per_task = Vec::new();
    let runs = contest(rig.pick(9, 5), 2, |at| {
        run += 1;
        let cpu = cpu_time();
        match at {
            0 => {
                let name = format!("q{run}");
                let (speed, requests) = runtime.block_on(ours(&store, &name, tasks))?;
                our_cpu.push((cpu_time() - cpu).as_secs_f64() * 1e6 / tasks as f64);
                per_task.push(requests);
                Ok(speed)
            }
            _ => {
                let speed = bare(&runtime, &server, &format!("bare{run}"), tasks)?;
                bare_cpu.push((cpu_time() - cpu).as_secs_f64() * 1e6 / tasks as f64);
                Ok(speed)
            }
        }
    })?;
    let (push, drain) = runs[0].beside(&runs[1]);
    let row = Row::new("pushes by 16, SeaweedFS, requests", Unit::Rate, push, FLOOR);
    report.add(row.target(Target::Ratio(0.9)));
    let row = Row::new("drain by 16 workers, SeaweedFS, requests", Unit::Rate, drain, FLOOR);
    report.add(row.target(Target::Ratio(0.9)).note(format!(
        "{:.2} requests per task drained (the floor's 5); client's CPU per task: {:.0} µs, the \
         floor's {:.0} µs",
        median(&per_task),
        median(&our_cpu),
        median(&bare_cpu)
    )));
    Ok(())
}

/// Requests per second, pushing and draining, and requests per task drained.
async fn ours(store: &leasehold::Store, name: &str, tasks: usize) -> Result<(Speed, f64)> {
    let queue = Queue::create(store, name, QueueSettings::default()).await?;
    let (before, start) = (store.usage(), Instant::now());
    let pushed = player::push(queue.clone(), tasks, WORKERS, 1).await?;
    let push = store.usage().since(&before).requests() as f64 / start.elapsed().as_secs_f64();
    ensure!(pushed == tasks, "not all tasks were pushed");
    let (before, start) = (store.usage(), super::monotonic());
    let (done, last) = player::drain(&queue, WORKERS).await?;
    ensure!(done == tasks, "{done} tasks were done instead of {tasks}");
    let requests = store.usage().since(&before).requests() as f64;
    let drain = requests * 1e9 / last.saturating_sub(start) as f64;
    Ok((Speed { push, drain }, requests / tasks as f64))
}

fn bare(runtime: &Runtime, server: &Server, run: &str, tasks: usize) -> Result<Speed> {
    let each = tasks / WORKERS;
    let task = format!("{{\"payload\":\"{}\"}}\n", payload());
    runtime.block_on(async {
        let host = server.endpoint();
        let host = host.strip_prefix("http://").context("the servers speak plain HTTP")?;
        let mut workers = Vec::new();
        for worker in 0..WORKERS {
            let connection = connect(host).await?;
            workers.push(Bare {
                server: (host.to_owned(), server.bucket().to_owned()),
                keys: (server.access_key().to_owned(), server.secret_key().to_owned()),
                task: Bytes::from(task.clone()),
                connection,
                names: (0..each).map(|n| format!("{run}/{worker:02}-{n:05}")).collect(),
            });
        }
        let start = Instant::now();
        let mut tasks = JoinSet::new();
        for mut worker in workers {
            tasks.spawn(async move {
                for name in worker.names.clone() {
                    let body = worker.task.clone();
                    worker.ask("PUT", &format!("{name}/task.json"), body, NEW, 200).await?;
                }
                anyhow::Ok(worker)
            });
        }
        let mut workers = Vec::new();
        while let Some(worker) = tasks.join_next().await {
            workers.push(worker??);
        }
        let push = (each * WORKERS) as f64 / start.elapsed().as_secs_f64();
        let start = Instant::now();
        let mut tasks = JoinSet::new();
        for mut worker in workers {
            tasks.spawn(async move {
                for name in worker.names.clone() {
                    worker.one(&name).await?;
                }
                anyhow::Ok(())
            });
        }
        while let Some(worker) = tasks.join_next().await {
            worker??;
        }
        let drain = (each * WORKERS * 5) as f64 / start.elapsed().as_secs_f64();
        Ok(Speed { push, drain })
    })
}

const NEW: Option<(&str, &str)> = Some(("if-none-match", "*"));

struct Bare {
    server: (String, String),
    keys: (String, String),
    task: Bytes,
    connection: Connection,
    names: Vec<String>,
}

impl Bare {
    /// Claims, reads, records and removes a task.
    async fn one(&mut self, name: &str) -> Result<()> {
        let (task, lease) = (format!("{name}/task.json"), format!("{name}/lease.json"));
        let body = Bytes::from_static(BODY);
        let held = self.ask("PUT", &lease, body.clone(), NEW, 200).await?;
        let read = self.ask("GET", &task, Bytes::new(), None, 200).await?;
        self.ask("PUT", &format!("{name}.done"), body, NEW, 200).await?;
        self.ask("DELETE", &task, Bytes::new(), Some(("if-match", &read)), 204).await?;
        self.ask("DELETE", &lease, Bytes::new(), Some(("if-match", &held)), 204).await?;
        Ok(())
    }

    /// One request; gives back the version that the answer names.
    async fn ask(
        &mut self,
        method: &str,
        key: &str,
        body: Bytes,
        condition: Option<(&str, &str)>,
        status: u16,
    ) -> Result<String> {
        let (host, bucket) = (&self.server.0, &self.server.1);
        let (access, secret) = (&self.keys.0, &self.keys.1);
        let request = request(method, host, bucket, key, (access, secret), condition, body)?;
        let headers = send(&mut self.connection, request, status).await?;
        let etag = headers.get(ETAG).map(|etag| etag.to_str().map(str::to_owned));
        Ok(etag.transpose()?.unwrap_or_default())
    }
}
