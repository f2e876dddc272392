//! Durable writes: on disk before success is reported, beside the journal or in it.

use bytes::Bytes;
use leasehold_protocol::cas::{Version, When};
use leasehold_protocol::key::Key;

use super::files::{FileId, create, id_of, open, replace, version_by_content};
use super::flush::Target;
use super::journal::{Note, State};
use super::names::path_of;
use super::temp::Temp;
use super::{Dir, Work};
use crate::store::types::{Durability, Put, Unknown};
use crate::{Error, ErrorKind, Result};
use std::sync::Arc;

impl Dir {
    pub(super) async fn put_durable(
        &self,
        key: &Key,
        body: Bytes,
        temp: Temp,
        when: &When,
    ) -> Result<Put> {
        let work = self.0.work()?;
        if work.flusher.notes(&work.private, body.len())
            && let Some(file) = id_of(&temp.file)
        {
            return self.put_noted(key, body, (temp, file), when).await;
        }
        self.put_direct(key, version_by_content(&body), temp, when).await
    }

    /// Through the journal: two flushes, shared with others.
    async fn put_noted(
        &self,
        key: &Key,
        body: Bytes,
        file: (Temp, FileId),
        when: &When,
    ) -> Result<Put> {
        let work = self.0.work()?;
        // Nothing is visible yet, so a failure here is a plain one.
        let intended = work.flusher.intend(key, body.clone(), file).await;
        let mut intended = intended.map_err(|error| error.at(key))?;
        let (at, when, version) = (key.clone(), when.clone(), version_by_content(&body));
        // Creating needs the lock too: it gives the notes on a key their order.
        let change = self.locked(key, move |work, stripe| {
            let Some(temp) = intended.temp() else {
                return Err(Error::new(ErrorKind::Internal, "the temporary file is in use"));
            };
            let stored = store(work, &at, temp, version.as_ref(), &when, Durability::Volatile)?;
            let Some(version) = stored else { return Ok(None) };
            let committed = intended.commit(work.flusher.stamp());
            drop(stripe);
            Ok(Some((version, committed)))
        });
        let Some((version, committed)) = change.await? else { return Ok(Put::Refused) };
        let flushed = match committed {
            Ok(answer) => answer.wait().await,
            Err(error) => Err(error),
        };
        Ok(put_outcome(version, flushed, key))
    }

    /// Beside the journal: the data is flushed, then the object becomes visible, then its folders
    /// are flushed. If anybody keeps a journal, that is noted in the end: an older note must not
    /// undo it.
    pub(super) async fn put_direct(
        &self,
        key: &Key,
        version: Option<Version>,
        temp: Temp,
        when: &When,
    ) -> Result<Put> {
        let work = self.0.work()?;
        let data = vec![Target::File(temp.file.clone())];
        work.flusher.flush(data).await.map_err(|error| error.at(key))?;
        let shown = self.show(key, version, temp, when.clone()).await?;
        let Some((version, note)) = shown else { return Ok(Put::Refused) };
        let folders = Target::FoldersAbove(path_of(key.as_str()).into_owned());
        let flushed = self.flush_then_note(vec![folders], note.into_iter().collect()).await;
        Ok(put_outcome(version, flushed, key))
    }

    /// Makes a file whose data is on disk the object at `key`, if `when` holds. Returns its version, and what is
    /// to be noted once that is on disk too.
    pub(super) async fn show(
        &self,
        key: &Key,
        version: Option<Version>,
        mut temp: Temp,
        when: When,
    ) -> Result<Option<(Version, Option<Note>)>> {
        let at = key.clone();
        self.locked(key, move |work, stripe| {
            let version = version.as_ref();
            let stored = store(work, &at, &mut temp, version, &when, Durability::Durable)?;
            let note = work.note_if_kept(&at, State::AsItIs);
            drop(stripe);
            Ok(stored.map(|version| (version, note)))
        })
        .await
    }

    /// Flushes the objects that are there, and that the others are not.
    pub(super) async fn persist_noted(&self, keys: &[Key]) -> Result<()> {
        let work = self.0.work()?;
        let mut targets = Vec::with_capacity(keys.len() * 2);
        let mut notes = Vec::new();
        for key in keys {
            let mut file = open(&work.root, key)?;
            // Asked for after the look at it: a journal that begins later has only later notes.
            if work.flusher.must_note(&work.private) {
                let at = key.clone();
                let found = self.locked(key, move |work, _stripe| {
                    let file = open(&work.root, &at)?;
                    let state = if file.is_some() { State::AsItIs } else { State::Absent };
                    Ok((file, work.note_if_kept(&at, state)))
                });
                let note;
                (file, note) = found.await?;
                notes.extend(note);
            }
            targets.extend(file.map(|(file, _)| Target::File(Arc::new(file))));
            targets.push(Target::FoldersAbove(path_of(key.as_str()).into_owned()));
        }
        self.flush_then_note(targets, notes).await
    }

    /// In this order: *as it is* must be true on disk before it is noted there.
    pub(super) async fn flush_then_note(
        &self,
        targets: Vec<Target>,
        notes: Vec<Note>,
    ) -> Result<()> {
        let flusher = &self.0.work()?.flusher;
        flusher.flush(targets).await?;
        match notes.is_empty() {
            true => Ok(()),
            false => flusher.note(notes).await,
        }
    }
}

impl Work {
    /// A note of what this object is now, if anybody keeps a journal. The caller holds the key's
    /// stripe lock and has made the change.
    fn note_if_kept(&self, key: &Key, state: State) -> Option<Note> {
        let kept = self.flusher.must_note(&self.private);
        kept.then(|| Note { stamp: self.flusher.stamp(), key: key.to_string(), state })
    }

    /// The same for deleted ones; nobody waits for it.
    pub(super) fn note_deleted<'a>(&self, keys: impl IntoIterator<Item = &'a Key>) {
        let mut keys = keys.into_iter().peekable();
        if keys.peek().is_none() || !self.flusher.must_note(&self.private) {
            return;
        }
        for key in keys {
            let (stamp, key) = (self.flusher.stamp(), key.to_string());
            self.flusher.note_later(Note { stamp, key, state: State::Absent });
        }
    }
}

/// Makes the temporary file the object at `key` if `when` holds. The caller holds the lock.
fn store(
    work: &Work,
    key: &Key,
    temp: &mut Temp,
    version: Option<&Version>,
    when: &When,
    durability: Durability,
) -> Result<Option<Version>> {
    match when {
        When::Absent => create(work, key, temp, version),
        When::Any | When::Matches(_) => replace(work, key, temp, version, when, durability),
    }
}

/// It is there. Whether it stays after a power loss is another matter.
pub(super) fn put_outcome(version: Version, flushed: Result<()>, key: &Key) -> Put {
    match flushed {
        Ok(()) => Put::Stored(version),
        Err(error) => Put::Unknown(Unknown::NotFlushed(error.at(key))),
    }
}
