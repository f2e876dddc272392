//! The bucket's listing, task by task.

use std::collections::VecDeque;

use leasehold_protocol::cas::Version;
use leasehold_protocol::format::outbox::state_hash;
use leasehold_protocol::layout::queue::{Part, Unit};
use leasehold_protocol::lease::SLACK;
use leasehold_protocol::sync::LeaseThere;

use crate::Result;
use crate::queue::Queue;
use crate::store::{Detail, List, Page};

/// What the bucket's listing shows of a task or bundle.
#[derive(Debug)]
pub(super) struct Shown {
    pub unit: Unit,
    pub work: Option<Version>,
    pub lease: Option<(Version, LeaseThere)>,
}

impl Shown {
    pub fn lease_there(&self) -> LeaseThere {
        self.lease.as_ref().map_or(LeaseThere::None, |(_, standing)| *standing)
    }

    /// What stands for this state. How often a living lease was renewed makes no difference.
    pub fn state(&self, work: &Version) -> u64 {
        let lease = match &self.lease {
            None => "free".to_owned(),
            Some((_, LeaseThere::Old)) => {
                let version = self.lease.as_ref().map_or("", |(version, _)| version.as_str());
                format!("old {version}")
            }
            Some(_) => "young".to_owned(),
        };
        state_hash(work.as_str(), &lease)
    }
}

/// All that the bucket has under some prefixes, page by page.
pub(super) struct Walk<'a> {
    there: &'a Queue,
    prefixes: VecDeque<String>,
    listing: Option<crate::store::Listing>,
    /// The last of a page: its other half may be on the next one (FIELD.md row 24).
    last: Option<Shown>,
}

impl<'a> Walk<'a> {
    pub fn new(there: &'a Queue, prefixes: Vec<String>) -> Self {
        Self { there, prefixes: prefixes.into(), listing: None, last: None }
    }

    pub async fn next(&mut self) -> Result<Option<Vec<Shown>>> {
        loop {
            if self.listing.is_none() {
                let Some(prefix) = self.prefixes.pop_front() else {
                    return Ok(self.last.take().map(|last| vec![last]));
                };
                let list = List::prefix(prefix)?.detail(Detail::Version);
                self.listing = Some(self.there.store().list(list));
            }
            let Some(listing) = &mut self.listing else { continue };
            match listing.next_page().await? {
                Some(page) => return Ok(Some(self.take(page))),
                None => self.listing = None,
            }
        }
    }

    fn take(&mut self, page: Page) -> Vec<Shown> {
        let ttl = self.there.settings().ttl.saturating_add(SLACK);
        let mut shown: Vec<Shown> = self.last.take().into_iter().collect();
        for entry in page.entries {
            let Some((unit, part)) = self.there.keys().parse_part(entry.key.as_str()) else {
                continue;
            };
            let Some(version) = entry.version else { continue };
            if shown.last().is_none_or(|last| last.unit != unit) {
                shown.push(Shown { unit, work: None, lease: None });
            }
            let Some(last) = shown.last_mut() else { continue };
            match part {
                Part::Work => last.work = Some(version),
                Part::Lease => {
                    let old =
                        page.now.zip(entry.modified).is_some_and(|(now, at)| now.since(at) >= ttl);
                    let standing = if old { LeaseThere::Old } else { LeaseThere::Young };
                    last.lease = Some((version, standing));
                }
            }
        }
        self.last = shown.pop();
        shown
    }
}
