//! A store in front of another one that stops at a request of the test's choice until it is told to
//! go on, or lets it fail: how interleavings are driven.

use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use bytes::Bytes;
use leasehold::store::backend::{Backend, Kind, Lister, Reading};
use leasehold::store::large::{Draft, FileBody, Source, Staged, Stamp};
use leasehold::store::meter::Meter;
use leasehold::store::{Delete, Durability, Get, List, Meta, Page, Put};
use leasehold::{Error, ErrorKind, Key, Result, Version, When};
use tokio::sync::oneshot;

/// What sort of request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    /// A read, in pieces or not.
    Get,
    /// A write.
    Put,
    /// A delete, of one or many.
    Delete,
    /// A listing's first page.
    List,
}

/// The wrapper. Each node of a test has its own, in front of a store that they share.
#[derive(Debug)]
pub struct Gated {
    inner: Arc<dyn Backend>,
    rules: Arc<Mutex<Vec<Rule>>>,
}

#[derive(Debug)]
struct Rule {
    verb: Verb,
    part: String,
    what: What,
}

#[derive(Debug)]
enum What {
    Stop { reached: oneshot::Sender<()>, go: oneshot::Receiver<()> },
    Fail(ErrorKind),
    Panic,
}

/// A stop that a test has asked for.
#[derive(Debug)]
pub struct Pause {
    reached: Option<oneshot::Receiver<()>>,
    go: Option<oneshot::Sender<()>>,
}

impl Pause {
    /// Returns once the request is about to be sent.
    ///
    /// # Panics
    ///
    /// When the store is gone before that, or half a minute has passed.
    pub async fn reached(&mut self) {
        if let Some(reached) = self.reached.take() {
            let reached = tokio::time::timeout(std::time::Duration::from_secs(30), reached).await;
            reached.expect("the request is sent within 30 s").expect("the store is still there");
        }
    }

    /// Lets it be sent.
    pub fn go(mut self) {
        if let Some(go) = self.go.take() {
            let _ = go.send(());
        }
    }
}

impl Gated {
    /// In front of this store.
    pub fn new(inner: Arc<dyn Backend>) -> Self {
        Self { inner, rules: Arc::default() }
    }

    /// Stops before the next such request for a key, or prefix, that contains `part`.
    pub fn stop(&self, verb: Verb, part: &str) -> Pause {
        let (reached, at) = oneshot::channel();
        let (go, wait) = oneshot::channel();
        self.add(verb, part, What::Stop { reached, go: wait });
        Pause { reached: Some(at), go: Some(go) }
    }

    /// Lets the next such request fail, without being sent.
    pub fn fail(&self, verb: Verb, part: &str, kind: ErrorKind) {
        self.add(verb, part, What::Fail(kind));
    }

    /// Lets the next such request panic: how a mistake of ours would end a task.
    pub fn panic(&self, verb: Verb, part: &str) {
        self.add(verb, part, What::Panic);
    }

    fn add(&self, verb: Verb, part: &str, what: What) {
        let rule = Rule { verb, part: part.to_owned(), what };
        self.rules.lock().unwrap_or_else(PoisonError::into_inner).push(rule);
    }

    async fn pass(&self, verb: Verb, key: &str) -> Result<()> {
        pass(&self.rules, verb, key).await
    }
}

async fn pass(rules: &Mutex<Vec<Rule>>, verb: Verb, key: &str) -> Result<()> {
    let rule = {
        let mut rules = rules.lock().unwrap_or_else(PoisonError::into_inner);
        let found = rules.iter().position(|rule| rule.verb == verb && key.contains(&rule.part));
        found.map(|at| rules.remove(at))
    };
    match rule.map(|rule| rule.what) {
        None => Ok(()),
        Some(What::Stop { reached, go }) => {
            let _ = reached.send(());
            let _ = go.await;
            Ok(())
        }
        Some(What::Fail(kind)) => Err(Error::new(kind, "made to fail by the test")),
        Some(What::Panic) => panic!("made to panic by the test"),
    }
}

#[async_trait]
impl Backend for Gated {
    fn url(&self) -> String {
        self.inner.url()
    }

    fn kind(&self) -> Kind {
        self.inner.kind()
    }

    fn meter(&self) -> &Arc<Meter> {
        self.inner.meter()
    }

    fn reading(&self) -> Option<Reading> {
        self.inner.reading()
    }

    async fn get(&self, key: &Key, unless: Option<&Version>) -> Result<Get> {
        self.pass(Verb::Get, key.as_str()).await?;
        self.inner.get(key, unless).await
    }

    async fn head(&self, key: &Key) -> Result<Option<Meta>> {
        self.inner.head(key).await
    }

    async fn put(
        &self,
        key: &Key,
        body: Bytes,
        when: &When,
        durability: Durability,
    ) -> Result<Put> {
        self.pass(Verb::Put, key.as_str()).await?;
        self.inner.put(key, body, when, durability).await
    }

    fn draft(&self, body: &Bytes) -> Option<Draft> {
        self.inner.draft(body)
    }

    async fn link(&self, key: &Key, draft: &Draft) -> Result<Option<Put>> {
        self.pass(Verb::Put, key.as_str()).await?;
        self.inner.link(key, draft).await
    }

    async fn delete(&self, key: &Key, version: Option<&Version>) -> Result<Delete> {
        self.pass(Verb::Delete, key.as_str()).await?;
        self.inner.delete(key, version).await
    }

    async fn delete_many(&self, keys: &[Key]) -> Result<()> {
        for key in keys {
            self.pass(Verb::Delete, key.as_str()).await?;
        }
        self.inner.delete_many(keys).await
    }

    async fn open(&self, key: &Key) -> Result<Option<Box<dyn Source>>> {
        self.pass(Verb::Get, key.as_str()).await?;
        self.inner.open(key).await
    }

    async fn put_file(
        &self,
        key: &Key,
        body: &FileBody,
        when: &When,
        durability: Durability,
    ) -> Result<Put> {
        self.pass(Verb::Put, key.as_str()).await?;
        self.inner.put_file(key, body, when, durability).await
    }

    async fn stage(&self, key: &Key, body: &Bytes) -> Result<Option<Staged>> {
        self.inner.stage(key, body).await
    }

    async fn publish(&self, staged: Vec<(Staged, When)>) -> Vec<Result<Put>> {
        let (mut outcomes, mut passed) = (Vec::new(), Vec::new());
        for (staged, when) in staged {
            let pass = self.pass(Verb::Put, staged.key().as_str()).await;
            outcomes.push(pass.err().map(Err));
            if let Some(None) = outcomes.last() {
                passed.push((staged, when));
            }
        }
        let mut published = self.inner.publish(passed).await.into_iter();
        let outcome = |failed: Option<_>| failed.or_else(|| published.next()).expect("one of each");
        outcomes.into_iter().map(outcome).collect()
    }

    async fn discard(&self, keys: &[Key]) -> Result<()> {
        for key in keys {
            self.pass(Verb::Delete, key.as_str()).await?;
        }
        self.inner.discard(keys).await
    }

    fn stamp(&self, name: &str) -> Option<Stamp> {
        self.inner.stamp(name)
    }

    fn list(&self, list: List) -> Box<dyn Lister> {
        let prefix = list.prefix_text().to_owned();
        let inner = self.inner.list(list);
        Box::new(GatedLister { inner, prefix: Some(prefix), rules: self.rules.clone() })
    }

    async fn persist(&self, keys: &[Key]) -> Result<()> {
        self.inner.persist(keys).await
    }
}

struct GatedLister {
    inner: Box<dyn Lister>,
    prefix: Option<String>,
    rules: Arc<Mutex<Vec<Rule>>>,
}

#[async_trait]
impl Lister for GatedLister {
    async fn next_page(&mut self) -> Result<Option<Page>> {
        if let Some(prefix) = self.prefix.take() {
            pass(&self.rules, Verb::List, &prefix).await?;
        }
        self.inner.next_page().await
    }
}
