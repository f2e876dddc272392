//! The queue, on a directory, in memory and on real S3 servers.

#![allow(clippy::unwrap_used, clippy::disallowed_methods, missing_docs)] // in a test, a failure is a panic

mod basics;
mod bundles;
mod callers;
mod counted;
mod failures;
mod interleavings;
mod liveness;
mod passes;

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use leasehold::queue::{NewTask, Queue, QueueSettings, Task, Worker, WorkerSettings};
use leasehold::store::memory::Memory;
use leasehold::store::{Connect, Store, StoreUrl};
use leasehold::{Key, env::Env};
use leasehold_testkit::conformance::{on_server, over};
use leasehold_testkit::servers::Server;

/// A store, and what must live as long.
pub struct Place {
    pub name: &'static str,
    pub store: Store,
    root: Option<tempfile::TempDir>,
    prefix: String,
}

impl Place {
    /// Where it is, if it is a directory.
    pub fn path(&self) -> PathBuf {
        self.root.as_ref().expect("a directory").path().join("store")
    }

    /// Another process' view of the same store.
    pub fn again(&self) -> Store {
        match &self.root {
            Some(root) => open(root),
            None if self.name == "memory" => self.store.clone(),
            None => bucket(self.name, &self.prefix),
        }
    }
}

fn open(root: &tempfile::TempDir) -> Store {
    Connect::new(StoreUrl::Directory(root.path().join("store"))).open().unwrap()
}

fn bucket(server: &str, prefix: &str) -> Store {
    static SEAWEED: OnceLock<Server> = OnceLock::new();
    static MINISTACK: OnceLock<Server> = OnceLock::new();
    let server = match server {
        "seaweedfs" => SEAWEED.get_or_init(Server::seaweedfs),
        _ => MINISTACK.get_or_init(Server::ministack),
    };
    on_server(server, "s3", prefix)
}

pub fn memory() -> Place {
    let store = over(Arc::new(Memory::new(Env::system())));
    Place { name: "memory", store, root: None, prefix: String::new() }
}

pub fn directory() -> Place {
    let root = tempfile::tempdir().unwrap();
    let store = open(&root);
    Place { name: "directory", store, root: Some(root), prefix: String::new() }
}

pub fn on_s3(server: &'static str, prefix: &str) -> Place {
    let store = bucket(server, prefix);
    Place { name: server, store, root: None, prefix: prefix.to_owned() }
}

/// One of each kind.
pub fn everywhere(test: &str) -> Vec<Place> {
    vec![memory(), directory(), on_s3("ministack", test), on_s3("seaweedfs", test)]
}

/// Settings under which things happen soon.
pub fn quick() -> QueueSettings {
    QueueSettings {
        ttl: Duration::from_secs(1),
        heartbeat: Duration::from_millis(300),
        backoff: Duration::from_millis(20),
        backoff_cap: Duration::from_millis(100),
        ..QueueSettings::default()
    }
}

pub async fn queue(place: &Place) -> Queue {
    Queue::create(&place.store, "q", quick()).await.unwrap()
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

pub async fn next(worker: &Worker) -> Task {
    let next = tokio::time::timeout(Duration::from_secs(20), worker.next());
    next.await.expect("a task within 20 s").unwrap().expect("a task")
}

/// Acks everything there is, and says what.
pub async fn drain(queue: &Queue, name: &str) -> Vec<String> {
    let worker = until_empty(queue, name);
    let mut done = Vec::new();
    while let Some(task) = worker.next().await.unwrap() {
        done.push(task.id().to_owned());
        task.ack().await.unwrap();
    }
    done
}

/// All keys of the queue but its settings.
pub async fn left(store: &Store) -> Vec<String> {
    let list = leasehold::List::prefix("queues/q/").unwrap();
    let page = store.list(list).collect().await.unwrap();
    let keys = page.entries.iter().map(|entry| entry.key.to_string());
    keys.filter(|key| !key.ends_with("/queue.json")).collect()
}

pub fn key(name: &str) -> Key {
    Key::new(name).unwrap()
}
