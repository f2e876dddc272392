//! What could not be read: kept, reported, never in the way.

use leasehold_protocol::compile::Bad;
use leasehold_protocol::format::quarantine::Reason;
use leasehold_protocol::format::usv;
use leasehold_protocol::layout::index::quarantine_id;
use leasehold_protocol::shard::Shard;

use super::Index;
use crate::store::{List, Put, Write};
use crate::{Error, ErrorKind, Result};

/// Rows in quarantine.
#[derive(Debug, Clone)]
pub struct Quarantined {
    /// Under which name.
    pub id: String,
    /// Why.
    pub reason: Reason,
}

impl Index {
    /// Puts rows into quarantine. The same rows of the same source have the same name, so doing it
    /// twice is doing it once. The rows come first: a reason without rows would be a loss.
    pub(super) async fn quarantine(
        &self,
        shard: Shard,
        source: &str,
        bad: &[Bad],
        worker: &str,
    ) -> Result<()> {
        let mut rows = Vec::new();
        for bad in bad {
            rows.extend_from_slice(&bad.row);
            rows.push(usv::END);
        }
        let id = quarantine_id(shard, source, &rows);
        let reason = Reason {
            source: source.to_owned(),
            shard: shard.to_string(),
            at: self.now().await?,
            worker_id: worker.to_owned(),
            reasons: bad.iter().map(|bad| bad.reason.clone()).collect(),
        };
        tracing::warn!(%id, source, rows = bad.len(), reason = bad[0].reason, "put into quarantine");
        let reason = reason.to_bytes();
        let layout = &self.0.layout;
        for (key, body) in
            [(layout.quarantined(&id)?, rows), (layout.quarantine_reason(&id)?, reason)]
        {
            match self.store().put(&key, body.into(), Write::any()).await? {
                Put::Stored(_) => {}
                Put::Refused | Put::Contended => {
                    return Err(Error::unavailable("the store is busy: try again").at(&key));
                }
                Put::Unknown(unknown) => return Err(unknown.into_error()),
            }
        }
        Ok(())
    }

    /// What is in quarantine.
    pub async fn quarantined(&self) -> Result<Vec<Quarantined>> {
        let mut all = Vec::new();
        let mut listing = self.store().list(List::prefix(self.0.layout.quarantine())?);
        while let Some(page) = listing.next_page().await? {
            for entry in page.entries {
                let Some(id) = self.0.layout.parse_quarantine(entry.key.as_str()) else { continue };
                if let Some(reason) = self.reason_of(&id).await? {
                    all.push(Quarantined { id, reason });
                }
            }
        }
        Ok(all)
    }

    /// Why rows are in quarantine, or `None` if they are not. A reason that cannot be read says so: the rows
    /// are there all the same, and the name says of which shard they are.
    async fn reason_of(&self, id: &str) -> Result<Option<Reason>> {
        let Some(object) = self.store().get(&self.0.layout.quarantine_reason(id)?).await? else {
            return Ok(None);
        };
        let unreadable = || Reason {
            source: String::new(),
            shard: id.split('-').next().unwrap_or_default().to_owned(),
            at: object.meta.modified,
            worker_id: String::new(),
            reasons: vec!["why they are here cannot be read".to_owned()],
        };
        Ok(Some(Reason::parse(&object.body).unwrap_or_else(unreadable)))
    }

    /// One entry and its rows as they were found, or `None`.
    pub async fn show_quarantined(&self, id: &str) -> Result<Option<(Quarantined, Vec<u8>)>> {
        let layout = &self.0.layout;
        let Some(reason) = self.reason_of(id).await? else { return Ok(None) };
        let rows = self.store().get(&layout.quarantined(id)?).await?;
        let rows = rows.map(|object| object.body.to_vec()).unwrap_or_default();
        Ok(Some((Quarantined { id: id.to_owned(), reason }, rows)))
    }

    /// Tries the rows of an entry again, after the schema or the store was mended. Those that can be
    /// read now go to the inbox; if all can, the entry is gone. Returns how many could and how many
    /// could not.
    pub async fn retry_quarantined(&self, id: &str) -> Result<Option<(usize, usize)>> {
        self.refresh().await?;
        let Some((entry, rows)) = self.show_quarantined(id).await? else { return Ok(None) };
        let schema = self.schema();
        let mut batch = self.batch().await?;
        let mut bad = Vec::new();
        let mut canonical = Vec::new();
        for row in usv::rows(&rows) {
            canonical.clear();
            // A record that does not say when it was written must not become new by being retried.
            let tried = schema.canonical(row, &mut canonical).map_err(Error::from);
            if let Err(error) = tried.and_then(|_| batch.put_row(&canonical)) {
                bad.push(Bad { row: row.to_vec(), reason: error.to_string() });
            }
        }
        let good = batch.len();
        if good == 0 && !bad.is_empty() {
            return Ok(Some((0, bad.len())));
        }
        batch.flush().await?;
        let layout = &self.0.layout;
        if !bad.is_empty() {
            let Ok(shard) = entry.reason.shard.parse() else {
                let message = format!("{:?} is not a shard", entry.reason.shard);
                return Err(Error::new(ErrorKind::Data, message).at(&layout.quarantine_reason(id)?));
            };
            self.quarantine(shard, &entry.reason.source, &bad, &entry.reason.worker_id).await?;
        }
        // The reason last: as long as it is there, the entry is listed. One without rows is what is left
        // of a retry that died here.
        let keys = [layout.quarantined(id)?, layout.quarantine_reason(id)?];
        self.store().delete_many(&keys[..1]).await?;
        self.store().delete_many(&keys[1..]).await?;
        Ok(Some((good, bad.len())))
    }
}
