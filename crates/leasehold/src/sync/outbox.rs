//! What the bucket is still to be told: one small object for each task or bundle.
//!
//! Noted before a push, a receipt or a dead letter, so that none of them can be without its entry. A
//! claim is noted after it: one that nobody learns of costs others a race, and no task.

use std::time::Duration;

use leasehold_protocol::cas::{Version, When};
use leasehold_protocol::format::lease::Place;
use leasehold_protocol::format::outbox::{Entry, Intent, Writer};
use leasehold_protocol::layout::queue::Unit;
use leasehold_protocol::layout::sync::SyncKeys;
use leasehold_protocol::settle::Proof;
use leasehold_protocol::sync as decide;
use leasehold_protocol::time::StoreTime;

use crate::store::{Delete, Detail, Durability, List, Put, Store, Unknown, Write};
use crate::{Error, Result, host};

/// How many old duplicates are named at a time, about.
const AT_ONCE: usize = 1000;

/// The outbox of one queue of a replica.
#[derive(Debug, Clone)]
pub(crate) struct Outbox {
    store: Store,
    keys: SyncKeys,
}

impl Outbox {
    pub fn new(store: &Store, queue: &str) -> Result<Self> {
        Ok(Self { store: store.clone(), keys: SyncKeys::new(queue)? })
    }

    pub fn keys(&self) -> &SyncKeys {
        &self.keys
    }

    fn writer(&self, intent: Intent) -> Writer {
        Writer::new(intent, self.here().as_ref())
    }

    fn here(&self) -> Option<Place> {
        let env = self.store.env();
        env.host().here(env.clock().boot())
    }

    /// Work is about to be pushed.
    pub async fn pushing(
        &self,
        unit: &Unit,
        incarnation: &str,
        (chosen, scheduled): (bool, Option<StoreTime>),
        durability: Durability,
    ) -> Result<()> {
        let writer = Writer { incarnation: incarnation.to_owned(), ..self.writer(Intent::Push) };
        let note = |entry: &mut Entry| {
            entry.untold = true;
            entry.chosen |= chosen;
            entry.scheduled = scheduled.or(entry.scheduled);
            entry.add(writer.clone());
        };
        self.note(unit, durability, &note).await
    }

    /// Work was claimed.
    pub async fn claimed(
        &self,
        unit: &Unit,
        incarnation: &str,
        origin: Option<&str>,
    ) -> Result<()> {
        let note = |entry: &mut Entry| entry.name(incarnation, origin);
        self.note(unit, Durability::Volatile, &note).await
    }

    /// A receipt or a dead letter is about to be written.
    pub async fn finishing(
        &self,
        unit: &Unit,
        incarnation: &str,
        origin: Option<&str>,
        durability: Durability,
    ) -> Result<()> {
        let writer = Writer { incarnation: incarnation.to_owned(), ..self.writer(Intent::Finish) };
        let note = |entry: &mut Entry| {
            entry.name(incarnation, origin);
            entry.add(writer.clone());
        };
        self.note(unit, durability, &note).await
    }

    /// The record that this process has announced was not written: somebody else's stands.
    pub async fn not_finishing(&self, unit: &Unit, incarnation: &str) -> Result<()> {
        let writer = Writer { incarnation: incarnation.to_owned(), ..self.writer(Intent::Finish) };
        // It was pushed, of course, and will not show that any more.
        let pushed = |announced: &Writer| {
            announced.intent == Intent::Push && announced.incarnation == incarnation
        };
        self.withdraw(unit, &|announced| *announced == writer || pushed(announced)).await
    }

    /// A push that was announced, by whomever, was not made, or gave way: another has its name.
    pub async fn not_pushing(&self, unit: &Unit, incarnation: &str) -> Result<()> {
        let push = |announced: &Writer| {
            announced.intent == Intent::Push && announced.incarnation == incarnation
        };
        self.withdraw(unit, &push).await
    }

    async fn withdraw(&self, unit: &Unit, which: &(impl Fn(&Writer) -> bool + Sync)) -> Result<()> {
        for _ in 0..64 {
            let Some((mut entry, version)) = self.entry(unit).await? else { return Ok(()) };
            if !entry.writers.iter().any(which) {
                break;
            }
            entry.writers.retain(|announced| !which(announced));
            if self.rewrite(unit, &entry, version).await?.is_some() {
                break;
            }
        }
        Ok(())
    }

    /// Changes an entry, or makes it. Whatever else stands in it stays.
    async fn note(
        &self,
        unit: &Unit,
        durability: Durability,
        change: &(impl Fn(&mut Entry) + Sync),
    ) -> Result<()> {
        let key = self.keys.entry(unit)?;
        let (mut entry, mut when) = (Entry::default(), When::Absent);
        for _ in 0..64 {
            change(&mut entry);
            // What a power loss must not take away from an entry is that its work is not known yet.
            let durability = if entry.untold { Durability::Durable } else { durability };
            if self.write(unit, &entry, when, durability).await?.is_some() {
                return Ok(());
            }
            (entry, when) = match self.store.get(&key).await? {
                None => (Entry::default(), When::Absent),
                Some(object) => (Entry::parse(&object.body), When::Matches(object.meta.version)),
            };
        }
        Err(Error::unavailable("others keep changing this entry of the outbox").at(&key))
    }

    async fn write(
        &self,
        unit: &Unit,
        entry: &Entry,
        when: When,
        durability: Durability,
    ) -> Result<Option<Version>> {
        let nonce = self.store.env().nonce();
        let entry = Entry { nonce: nonce.to_string(), ..entry.clone() };
        let write = Write::when(when, Proof::Nonce(nonce)).durability(durability);
        match self.store.put(&self.keys.entry(unit)?, entry.to_bytes().into(), write).await? {
            Put::Stored(version) => Ok(Some(version)),
            Put::Refused | Put::Contended | Put::Unknown(Unknown::Overtaken(_)) => Ok(None),
            Put::Unknown(unknown) => Err(unknown.into_error()),
        }
    }

    /// The entry about this task or bundle.
    pub async fn entry(&self, unit: &Unit) -> Result<Option<(Entry, Version)>> {
        let object = self.store.get(&self.keys.entry(unit)?).await?;
        Ok(object.map(|object| (Entry::parse(&object.body), object.meta.version)))
    }

    /// Whether there is one.
    pub async fn has(&self, unit: &Unit) -> Result<bool> {
        Ok(self.store.head(&self.keys.entry(unit)?).await?.is_some())
    }

    /// Writes down what was told, unless something was noted since, and says in which version it stands.
    pub async fn rewrite(
        &self,
        unit: &Unit,
        entry: &Entry,
        version: Version,
    ) -> Result<Option<Version>> {
        let durability = if entry.untold { Durability::Durable } else { Durability::Volatile };
        self.write(unit, entry, When::Matches(version), durability).await
    }

    /// Notes what was told in an entry in which something else was noted since.
    pub async fn note_told(&self, unit: &Unit, before: &Entry, told: &Entry) -> Result<()> {
        for _ in 0..64 {
            let Some((mut entry, version)) = self.entry(unit).await? else { return Ok(()) };
            decide::note_told(&mut entry, before, told);
            if self.rewrite(unit, &entry, version).await?.is_some() {
                return Ok(());
            }
        }
        Err(Error::unavailable("others keep changing this entry of the outbox"))
    }

    /// Removes an entry, unless something was noted since.
    pub async fn remove(&self, unit: &Unit, version: &Version) -> Result<bool> {
        match self.store.delete_version(&self.keys.entry(unit)?, version).await? {
            Delete::Deleted => Ok(true),
            Delete::Refused | Delete::Contended => Ok(false),
            Delete::Unknown(unknown) => Err(unknown.into_error()),
        }
    }

    /// Whether a writer of the entry has ended, and so will not do what it announced.
    pub fn is_gone(&self, entry: &Entry, n: usize) -> bool {
        use leasehold_protocol::lease::Liveness;
        let Some(here) = self.here() else { return false };
        match entry.writers.get(n).and_then(Writer::place) {
            Some(place) if place.boot_id != here.boot_id => true,
            Some(place) => {
                host::liveness(self.store.env().host(), &place, &here) == Some(Liveness::Gone)
            }
            None => false,
        }
    }

    /// Counts a completion that came second. Counting the same again, by its mark, changes nothing.
    pub async fn count_duplicate(&self, unit: &Unit, mark: &str) -> Result<()> {
        let key = self.keys.duplicate(unit, mark)?;
        let write = Write::when(When::Absent, Proof::Bytes);
        match self.store.put(&key, "{}\n".into(), write).await? {
            Put::Unknown(unknown) => Err(unknown.into_error()),
            Put::Stored(_) | Put::Refused | Put::Contended => Ok(()),
        }
    }

    /// How many tasks were done in vain, as far as it is remembered of each; but not by these.
    pub async fn duplicates(&self, except: &[String]) -> Result<u64> {
        let mut listing = self.store.list(List::prefix(self.keys.duplicates())?.unordered());
        let mut count = 0;
        while let Some(page) = listing.next_page().await? {
            let keys = page.entries.iter().map(|entry| entry.key.as_str());
            let counted = keys.filter(|key| !except.iter().any(|other| other == key));
            count += counted.filter_map(|key| self.keys.parse_duplicate(key)).sum::<u64>();
        }
        Ok(count)
    }

    /// Some of those that are older than this, and how many tasks they count.
    pub async fn old_duplicates(&self, retention: Duration) -> Result<(u64, Vec<String>)> {
        let list = List::prefix(self.keys.duplicates())?.unordered().detail(Detail::Stat);
        let mut listing = self.store.list(list);
        let (mut count, mut old) = (0, Vec::new());
        while let Some(page) = listing.next_page().await? {
            let Some(now) = page.now else { continue };
            for entry in page.entries {
                let is_old = entry.modified.is_some_and(|at| now.since(at) >= retention);
                if let (true, Some(tasks)) = (is_old, self.keys.parse_duplicate(entry.key.as_str()))
                {
                    count += tasks;
                    old.push(entry.key.to_string());
                }
            }
            if old.len() >= AT_ONCE {
                break;
            }
        }
        Ok((count, old))
    }

    /// Notes that a worker has nothing to do, or has again.
    pub async fn dry(&self, dry: bool) -> Result<()> {
        let key = self.keys.dry()?;
        match dry {
            true => {
                let write = Write::any().durability(Durability::Volatile);
                let _ = self.store.put(&key, "{}\n".into(), write).await?;
            }
            false => {
                let _ = self.store.delete(&key).await?;
            }
        }
        Ok(())
    }
}
