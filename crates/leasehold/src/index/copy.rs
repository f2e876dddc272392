//! Copies an index into another: the way to another width, another store, another schema.

use super::{Index, NewIndex};
use crate::{Error, Result, Store};

/// How much is collected before it is written: a batch has one object per shard.
const BATCH_BYTES: usize = 32 << 20;

impl Index {
    /// A new index with all records of this one, times and deletions included. `told` hears how many
    /// are done. What is put into this one meanwhile may be missing there: copy again, and the latest
    /// counts.
    pub async fn copy_to(
        &self,
        store: &Store,
        name: &str,
        new: NewIndex,
        mut told: impl FnMut(u64),
    ) -> Result<Self> {
        let to = match Self::find(store, name).await? {
            Some(to) => to,
            None => Self::create(store, name, new).await?,
        };
        self.refresh().await?;
        // No two descriptions have the same nonce.
        if to.name() == self.name() && to.package().nonce == self.package().nonce {
            return Err(Error::invalid("an index cannot be copied into itself"));
        }
        // Rows go by place: in other fields, columns would shift.
        self.schema().may_become(&to.schema())?;
        let mut scan = self.scan(2).await?;
        let mut batch = to.batch().await?;
        let mut done = 0;
        while let Some(chunk) = scan.next().await? {
            for row in leasehold_protocol::format::usv::rows(&chunk.rows) {
                batch.put_row(row)?;
                done += 1;
                if batch.bytes() >= BATCH_BYTES {
                    batch.flush().await?;
                    told(done);
                }
            }
        }
        batch.flush().await?;
        told(done);
        Ok(to)
    }
}
