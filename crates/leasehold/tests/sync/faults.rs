//! A store that goes away, for a while or for good.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering::SeqCst};

use async_trait::async_trait;
use bytes::Bytes;
use leasehold::store::backend::{Backend, Kind, Lister, Reading};
use leasehold::store::meter::Meter;
use leasehold::store::{Delete, Durability, Get, List, Meta, Page, Put};
use leasehold::{Error, ErrorKind, Key, Result, Version, When};

/// When a process dies: shared by the stores that it uses.
#[derive(Debug)]
pub struct Death {
    /// How many requests it still makes.
    left: AtomicI64,
    /// Whether the last one is carried out.
    carried_out: bool,
    pub happened: AtomicBool,
}

impl Death {
    pub fn at(request: i64, carried_out: bool) -> Arc<Self> {
        Arc::new(Self {
            left: AtomicI64::new(request),
            carried_out,
            happened: AtomicBool::new(false),
        })
    }
}

/// The wrapper.
#[derive(Debug)]
pub struct Cut {
    inner: Arc<dyn Backend>,
    /// Whether nothing gets through, for now.
    cut: AtomicBool,
    death: Option<Arc<Death>>,
}

enum Pass {
    Yes,
    /// Carried out, but nobody lives to see the answer.
    Unseen,
}

impl Cut {
    pub fn new(inner: Arc<dyn Backend>) -> Self {
        Self { inner, cut: AtomicBool::new(false), death: None }
    }

    pub fn dying(inner: Arc<dyn Backend>, death: &Arc<Death>) -> Self {
        Self { inner, cut: AtomicBool::new(false), death: Some(death.clone()) }
    }

    pub fn set(&self, cut: bool) {
        self.cut.store(cut, SeqCst);
    }

    fn pass(&self) -> Result<Pass> {
        if self.cut.load(SeqCst) {
            return Err(Error::new(ErrorKind::Unavailable, "cut off by the test"));
        }
        match &self.death {
            None => Ok(Pass::Yes),
            Some(death) => death.pass(),
        }
    }
}

impl Death {
    fn pass(&self) -> Result<Pass> {
        match self.left.fetch_sub(1, SeqCst) {
            1.. => Ok(Pass::Yes),
            left => {
                self.happened.store(true, SeqCst);
                match left == 0 && self.carried_out {
                    true => Ok(Pass::Unseen),
                    false => Err(dead()),
                }
            }
        }
    }
}

fn dead() -> Error {
    Error::new(ErrorKind::Internal, "the process died here")
}

fn seen<T>(pass: &Pass, answer: T) -> Result<T> {
    match pass {
        Pass::Yes => Ok(answer),
        Pass::Unseen => Err(dead()),
    }
}

#[async_trait]
impl Backend for Cut {
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
        let pass = self.pass()?;
        seen(&pass, self.inner.get(key, unless).await?)
    }

    async fn head(&self, key: &Key) -> Result<Option<Meta>> {
        let pass = self.pass()?;
        seen(&pass, self.inner.head(key).await?)
    }

    async fn put(
        &self,
        key: &Key,
        body: Bytes,
        when: &When,
        durability: Durability,
    ) -> Result<Put> {
        let pass = self.pass()?;
        seen(&pass, self.inner.put(key, body, when, durability).await?)
    }

    async fn delete(&self, key: &Key, version: Option<&Version>) -> Result<Delete> {
        let pass = self.pass()?;
        seen(&pass, self.inner.delete(key, version).await?)
    }

    async fn retire(&self, key: &Key, version: &Version, token: u64) -> Result<Delete> {
        let pass = self.pass()?;
        seen(&pass, self.inner.retire(key, version, token).await?)
    }

    async fn floor(&self, key: &Key) -> Result<u64> {
        self.inner.floor(key).await
    }

    async fn reserve(&self, token: u64) -> Result<()> {
        self.inner.reserve(token).await
    }

    async fn delete_many(&self, keys: &[Key]) -> Result<()> {
        let pass = self.pass()?;
        seen(&pass, self.inner.delete_many(keys).await?)
    }

    fn list(&self, list: List) -> Box<dyn Lister> {
        let inner = self.inner.list(list);
        let cut = self.cut.load(SeqCst);
        Box::new(CutLister { inner, cut, death: self.death.clone() })
    }

    async fn persist(&self, keys: &[Key]) -> Result<()> {
        self.inner.persist(keys).await
    }
}

struct CutLister {
    inner: Box<dyn Lister>,
    cut: bool,
    death: Option<Arc<Death>>,
}

#[async_trait]
impl Lister for CutLister {
    async fn next_page(&mut self) -> Result<Option<Page>> {
        if self.cut {
            return Err(Error::new(ErrorKind::Unavailable, "cut off by the test"));
        }
        let pass = match &self.death {
            None => Pass::Yes,
            Some(death) => death.pass()?,
        };
        seen(&pass, self.inner.next_page().await?)
    }
}
