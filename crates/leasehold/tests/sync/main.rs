//! Relaxed mode: replicas and their sync, on a directory, in memory and on real S3 servers.

#![allow(clippy::unwrap_used, clippy::disallowed_methods, missing_docs)] // in a test, a failure is a panic

mod basics;
mod chance;
mod convergence;
mod counted;
mod crashes;
mod faults;
mod interleavings;
mod odd;

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use leasehold::env::Env;
use leasehold::queue::{Mode, NewTask, Queue, QueueSettings, Task, Worker, WorkerSettings};
use leasehold::store::backend::Backend;
use leasehold::store::memory::Memory;
use leasehold::store::{Connect, Store, StoreUrl};
use leasehold::sync::Replica;
use leasehold::{Key, List};
use leasehold_testkit::clock as time;
use leasehold_testkit::conformance::{on_server, over};
use leasehold_testkit::servers::Server;

/// A bucket: how to get another client of it.
pub enum Bucket {
    Memory(Arc<Memory>),
    Directory(tempfile::TempDir),
    S3(&'static str, String),
}

impl Bucket {
    pub fn memory() -> Self {
        Self::Memory(Arc::new(Memory::new(Env::system())))
    }

    pub fn name(&self) -> &str {
        match self {
            Self::Memory(_) => "memory",
            Self::Directory(_) => "directory",
            Self::S3(server, _) => server,
        }
    }

    /// One of each kind.
    pub fn everywhere(test: &str) -> Vec<Self> {
        let s3 = |server| Self::S3(server, test.to_owned());
        let directory = Self::Directory(tempfile::tempdir().unwrap());
        vec![Self::memory(), directory, s3("ministack"), s3("seaweedfs")]
    }

    /// Another client, with a meter of its own.
    pub fn client(&self) -> Store {
        match self {
            Self::Memory(memory) => over(Arc::new(memory.client(Env::system()))),
            Self::Directory(root) => directory(root),
            Self::S3(server, prefix) => {
                static SEAWEED: OnceLock<Server> = OnceLock::new();
                static MINISTACK: OnceLock<Server> = OnceLock::new();
                let server = match *server {
                    "seaweedfs" => SEAWEED.get_or_init(Server::seaweedfs),
                    _ => MINISTACK.get_or_init(Server::ministack),
                };
                on_server(server, "s3", prefix)
            }
        }
    }

    /// The queue in the bucket, made if need be.
    pub async fn queue(&self) -> Queue {
        Queue::open_or_create(&self.client(), "q", Some(relaxed())).await.unwrap()
    }

    /// A node with a directory of its own.
    pub async fn node(&self, name: &str) -> Node {
        self.node_with(name, self.client()).await
    }

    pub async fn node_with(&self, name: &str, bucket: Store) -> Node {
        let root = tempfile::tempdir().unwrap();
        bucket.init().await.unwrap();
        let replica = Replica::open(&directory(&root), &bucket, name).await.unwrap();
        let queue = replica.join("q").await.unwrap();
        Node { replica, queue, root }
    }
}

fn directory(root: &tempfile::TempDir) -> Store {
    Connect::new(StoreUrl::Directory(root.path().join("store"))).open().unwrap()
}

/// A node, and what must live as long.
pub struct Node {
    pub replica: Replica,
    pub queue: Queue,
    pub root: tempfile::TempDir,
}

impl Node {
    /// The same replica as another process sees it, with this bucket.
    pub async fn again(&self, bucket: Store) -> Replica {
        Replica::open(&directory(&self.root), &bucket, "again").await.unwrap()
    }

    pub async fn up(&self) -> leasehold::sync::Up {
        self.replica.up("q").await.unwrap()
    }

    pub async fn down(&self) -> leasehold::sync::Down {
        self.replica.down("q").await.unwrap()
    }

    pub async fn outbox(&self) -> u64 {
        self.replica.status("q").await.unwrap().outbox
    }
}

/// A gate, or faults, in front of a client.
pub fn behind(client: &Store) -> Arc<dyn Backend> {
    client.backend().clone()
}

/// Relaxed, with short times.
pub fn relaxed() -> QueueSettings {
    QueueSettings {
        ttl: Duration::from_secs(3),
        heartbeat: Duration::from_secs(1),
        backoff: Duration::from_millis(20),
        backoff_cap: Duration::from_millis(100),
        mode: Mode::Relaxed,
        sync_up: Duration::from_secs(1),
        sync_down: Duration::from_secs(12),
        ..QueueSettings::default()
    }
}

pub async fn push(queue: &Queue, id: &str) {
    queue.push(NewTask::text(id).id(id)).await.unwrap();
}

/// A worker that ends when there is nothing left.
pub fn until_empty(queue: &Queue, name: &str) -> Worker {
    let settings = WorkerSettings {
        until_empty: true,
        poll: Duration::from_millis(300),
        ..WorkerSettings::named(name)
    };
    Worker::new(vec![queue.clone()], settings)
}

pub async fn next(queue: &Queue) -> Task {
    let worker = queue.worker("w");
    let next = tokio::time::timeout(Duration::from_secs(20), worker.next());
    next.await.expect("a task within 20 s").unwrap().expect("a task")
}

/// Acks everything there is, and says what.
pub async fn drain(queue: &Queue) -> Vec<String> {
    let worker = until_empty(queue, "w");
    let mut done = Vec::new();
    while let Some(task) = worker.next().await.unwrap() {
        done.push(task.id().to_owned());
        task.ack_text("done").await.unwrap();
    }
    done
}

/// All keys of the queue but its settings.
pub async fn keys(store: &Store) -> Vec<String> {
    let page = store.list(List::prefix("queues/q/").unwrap()).collect().await.unwrap();
    let keys = page.entries.iter().map(|entry| entry.key.to_string());
    keys.filter(|key| !key.ends_with("/queue.json")).collect()
}

pub fn key(name: &str) -> Key {
    Key::new(name).unwrap()
}
