//! Listings of a bucket, by OpenDAL.

use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use leasehold_protocol::cas::Version;
use leasehold_protocol::key::Key;
use opendal::raw::OpList;
use opendal::raw::oio::{self, List as _};
use opendal::{Metadata, options};

use super::Cloud;
use super::answer::{Answer, Condition};
use super::outcome::{failed, first_line, modified, read_error};
use super::transport::Answered;
use crate::store::backend::Lister;
use crate::store::types::{Entry, List, Page};
use crate::{Error, ErrorKind, Result};

/// A listing, page by page.
pub struct CloudLister {
    lister: Result<oio::Lister, String>,
    answered: Arc<Mutex<Answered>>,
    generations: bool,
    list: List,
    /// What of the current page has arrived: kept when fetching more of it fails.
    partial: Page,
    done: bool,
}

impl CloudLister {
    pub fn new(cloud: &Cloud, list: List) -> Self {
        let (context, answered) = cloud.operation();
        let capability = cloud.service.capability_dyn();
        let options = options::ListOptions {
            limit: capability.list_with_limit.then_some(list.page),
            start_after: list.start_after.clone().filter(|_| capability.list_with_start_after),
            recursive: !list.delimited,
            ..options::ListOptions::default()
        };
        let path = if list.prefix.is_empty() { "/" } else { &list.prefix };
        let lister = cloud.service.list_dyn(&context, path, OpList::from(options));
        Self {
            lister: lister.map_err(|error| first_line(&error)),
            answered,
            generations: cloud.uses_generations(),
            list,
            partial: Page::default(),
            done: false,
        }
    }

    fn add(&mut self, path: &str, meta: &Metadata) {
        // What is not asked for is dropped here: Azure ignores the entry point, and SeaweedFS has
        // been seen to list siblings of a prefix.
        let after = self.list.start_after.as_deref();
        let version = if self.generations { meta.version() } else { meta.etag() };
        if path.ends_with('/') {
            // A folder marker has a version, a common prefix has none.
            let wanted = self.list.delimited
                && version.is_none()
                && path.starts_with(&self.list.prefix)
                && after.is_none_or(|after| path > after || after.starts_with(path));
            if wanted && self.partial.prefixes.last().is_none_or(|last| last != path) {
                self.partial.prefixes.push(path.to_owned());
            }
            return;
        }
        if !self.list.includes(path) {
            return;
        }
        // Other tools may have put objects here that are not for us.
        let Ok(key) = Key::new(path) else { return };
        self.partial.entries.push(Entry {
            key,
            size: Some(meta.content_length()),
            modified: modified(meta),
            version: version.map(|text| Version::new(text.trim_matches('"'))),
        });
    }
}

#[async_trait]
impl Lister for CloudLister {
    async fn next_page(&mut self) -> Result<Option<Page>> {
        if self.done {
            return Ok(None);
        }
        while self.partial.len() < self.list.page {
            let lister = match &mut self.lister {
                Ok(lister) => lister,
                Err(error) => return Err(Error::new(ErrorKind::Data, error.clone())),
            };
            match lister.next().await {
                Ok(Some(entry)) => {
                    let (path, meta) = entry.into_parts();
                    self.add(&path, &meta);
                }
                Ok(None) => {
                    self.done = true;
                    break;
                }
                Err(error) => {
                    // A page that came but cannot be read: OpenDAL would go on behind it.
                    let status =
                        self.answered.lock().unwrap_or_else(PoisonError::into_inner).seen.status;
                    if (200..300).contains(&status) && !error.is_temporary() {
                        let message = format!("the listing cannot be read: {}", first_line(&error));
                        self.lister = Err(message.clone());
                        return Err(Error::new(ErrorKind::Data, message));
                    }
                    return Err(match failed(&self.answered, &error, Condition::None) {
                        Answer::Missing => Error::invalid("the bucket does not exist"),
                        other => read_error(other, None),
                    });
                }
            }
        }
        let mut page = std::mem::take(&mut self.partial);
        page.now = self.answered.lock().unwrap_or_else(PoisonError::into_inner).date;
        Ok(Some(page))
    }
}
