//! The store: objects with conditions, as S3 has them, and with every promise that it may break.

use std::collections::BTreeMap;

use bytes::Bytes;
use leasehold::store::{Entry, Get, List, Meta, Object, Page};
use leasehold::{Key, StoreTime, Version, When};
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

use crate::faults::Broken;

/// An object.
#[derive(Debug, Clone)]
pub struct Stored {
    /// Its content.
    pub body: Bytes,
    /// As on S3, a hash of the content: equal bytes have equal versions.
    pub version: Version,
    /// When it was written, to the microsecond. Clients are told whole seconds.
    pub written: StoreTime,
}

/// In which order keys are listed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Order {
    /// By bytes, as S3 does.
    #[default]
    Bytes,
    /// A folder before its siblings, as SeaweedFS does.
    Folders,
    /// In none.
    Hash,
}

/// All objects.
#[derive(Debug, Default)]
pub struct Objects {
    objects: BTreeMap<Key, Stored>,
    /// What was there before the last change of a key, for a store that shows old states.
    before: BTreeMap<Key, (Option<Stored>, StoreTime)>,
    /// DELETE takes no condition.
    pub deletes_blindly: bool,
    /// A promise that is broken.
    pub broken: Option<Broken>,
    /// The order of listings.
    pub order: Order,
    /// Times are told to the microsecond, as a directory tells them.
    pub fine: bool,
}

/// For how long old states are shown.
const STALE: std::time::Duration = std::time::Duration::from_millis(1500);

impl Objects {
    /// What is at a key.
    pub fn get(&self, key: &Key) -> Option<&Stored> {
        self.objects.get(key)
    }

    /// What a client is shown.
    fn shown(&self, key: &Key, now: StoreTime) -> Option<&Stored> {
        if self.broken == Some(Broken::StaleReads)
            && let Some((before, at)) = self.before.get(key)
            && now.since(*at) < STALE
        {
            return before.as_ref();
        }
        self.objects.get(key)
    }

    /// Everything under a prefix.
    pub fn under<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = (&'a Key, &'a Stored)> {
        self.objects.iter().filter(move |(key, _)| key.as_str().starts_with(prefix))
    }

    /// The version of these bytes.
    pub fn version_of(&self, body: &[u8]) -> Version {
        match self.broken == Some(Broken::WeakVersions) {
            true => Version::new(format!("len-{}", body.len())),
            false => Version::new(format!("{:032x}", xxh3_128(body))),
        }
    }

    /// Whether a condition holds.
    pub fn holds(&self, key: &Key, when: &When) -> bool {
        match (when, self.objects.get(key)) {
            (When::Absent, Some(_)) => self.broken == Some(Broken::EverybodyCreates),
            (When::Any, _) | (When::Absent, None) => true,
            (When::Matches(_), None) => false,
            (When::Matches(version), Some(there)) => *version == there.version,
        }
    }

    /// Writes, whatever is there, and gives back what was.
    pub fn put(&mut self, key: &Key, body: Bytes, now: StoreTime) -> Option<Stored> {
        let version = self.version_of(&body);
        let stored = Stored { body, version, written: now };
        let before = self.objects.insert(key.clone(), stored);
        self.remember(key, before.clone(), now);
        before
    }

    /// Deletes, and gives back what was there.
    pub fn delete(&mut self, key: &Key, now: StoreTime) -> Option<Stored> {
        let before = self.objects.remove(key);
        self.remember(key, before.clone(), now);
        before
    }

    fn remember(&mut self, key: &Key, before: Option<Stored>, now: StoreTime) {
        if self.broken == Some(Broken::StaleReads) {
            self.before.insert(key.clone(), (before, now));
        }
    }

    /// What a GET is told.
    pub fn read(&self, key: &Key, unless: Option<&Version>, now: StoreTime) -> Get {
        match self.shown(key, now) {
            None => Get::Absent,
            Some(stored) if unless == Some(&stored.version) => Get::Unchanged,
            Some(stored) => {
                Get::Found(Object { body: stored.body.clone(), meta: self.meta(stored, now) })
            }
        }
    }

    /// What a HEAD is told.
    pub fn look(&self, key: &Key, now: StoreTime) -> Option<Meta> {
        self.shown(key, now).map(|stored| self.meta(stored, now))
    }

    /// A page of a listing, and where the next one begins.
    pub fn list(
        &self,
        list: &List,
        after: Option<&str>,
        most: usize,
        now: StoreTime,
    ) -> (Page, Option<String>) {
        let most = most.min(list.most_per_page()).max(1);
        let mut items: BTreeMap<(String, String), Option<Entry>> = BTreeMap::new();
        let after = after.map(|text| (self.place(text), text.to_owned()));
        for (key, stored) in &self.objects {
            let text = key.as_str();
            if !list.includes(text) {
                continue;
            }
            let (text, entry) = match list.fold(text) {
                Some(prefix) => (prefix, None),
                None => {
                    let entry = Entry {
                        key: key.clone(),
                        size: Some(stored.body.len() as u64),
                        modified: Some(self.told(stored.written)),
                        version: Some(stored.version.clone()),
                    };
                    (text, Some(entry))
                }
            };
            let place = (self.place(text), text.to_owned());
            if after.as_ref().is_none_or(|after| place > *after) {
                items.insert(place, entry);
            }
        }
        let more = items.len() > most;
        let mut page = Page { now: Some(self.told(now)), ..Page::default() };
        let mut last = None;
        for (n, ((_, text), entry)) in items.into_iter().take(most).enumerate() {
            last = Some(text.clone());
            // The last of a page is left out, and the next page begins behind it.
            if more && n + 1 == most && self.broken == Some(Broken::ListLosesKeys) {
                continue;
            }
            match entry {
                Some(entry) => page.entries.push(entry),
                None => page.prefixes.push(text),
            }
        }
        (page, last.filter(|_| more))
    }

    fn place(&self, key: &str) -> String {
        match self.order {
            Order::Bytes => String::new(),
            Order::Folders => key.replace('/', "\u{1}"),
            Order::Hash => format!("{:016x}", xxh3_64(key.as_bytes())),
        }
    }

    fn told(&self, time: StoreTime) -> StoreTime {
        if self.fine { time } else { time.floor_to_second() }
    }

    fn meta(&self, stored: &Stored, now: StoreTime) -> Meta {
        Meta {
            version: stored.version.clone(),
            modified: self.told(stored.written),
            now: self.told(now),
            size: stored.body.len() as u64,
        }
    }
}
