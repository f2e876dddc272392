//! Bodies that are written before they are published, and published together.
//!
//! ```text
//!   stage ─▶ temporary file ──┐
//!   stage ─▶ temporary file ──┼─▶ flush their data ─▶ rename each on its condition ─▶ flush their folders
//!   stage ─▶ temporary file ──┘
//! ```
//!
//! Two flushes, however many they are. Nobody sees any of them before its data is on disk.

use std::collections::BTreeSet;

use bytes::Bytes;
use leasehold_protocol::cas::{Version, When};
use leasehold_protocol::key::Key;

use super::Dir;
use super::files::version_by_content;
use super::flush::Target;
use super::names::path_of;
use super::noted::put_outcome;
use super::temp::Temp;
use crate::store::large::Staged;
use crate::store::meter::Class;
use crate::store::types::Put;
use crate::{Error, Result};

/// What is known of a body that was staged.
#[derive(Debug)]
struct StagedFile {
    temp: Temp,
    version: Option<Version>,
}

impl Dir {
    pub(super) fn stage_file(&self, key: &Key, body: &Bytes) -> Result<Option<Staged>> {
        let temp = self.0.work()?.temps.write(body).map_err(|error| error.at(key))?;
        begin_to_write(&temp);
        let file = Box::new(StagedFile { temp, version: version_by_content(body) });
        Ok(Some(Staged { key: key.clone(), len: body.len() as u64, file }))
    }

    pub(super) async fn publish_files(&self, all: Vec<(Staged, When)>) -> Vec<Result<Put>> {
        let mut files = Vec::with_capacity(all.len());
        for (Staged { key, len, file }, when) in all {
            self.0.meter.request(Class::Put, len);
            let file = file.downcast::<StagedFile>().map_err(|file| {
                // Whoever made it has to remove it.
                Staged { key: key.clone(), len, file }.elsewhere()
            });
            files.push((key, file, when));
        }
        let data =
            files.iter().filter_map(|(_, file, _)| Some(file.as_ref().ok()?.temp.file.clone()));
        let flushed = self.flush_all(data.map(Target::File).collect()).await;
        let mut shown = Vec::with_capacity(files.len());
        for (key, file, when) in files {
            let made = match (file, &flushed) {
                (Ok(file), Ok(())) => self.show(&key, file.version, file.temp, when).await,
                // Nothing is visible yet, so a failure here is a plain one.
                (Ok(_), Err(error)) => Err(again(error).at(&key)),
                (Err(error), _) => Err(error),
            };
            shown.push((key, made));
            // There may be many, and others have something to do on this thread.
            tokio::task::yield_now().await;
        }
        // What stands in one folder is there once that is on disk.
        let (mut folders, mut notes, mut above) = (Vec::new(), Vec::new(), BTreeSet::new());
        for (key, made) in &mut shown {
            let Ok(Some((_, note))) = made else { continue };
            let path = path_of(key.as_str()).into_owned();
            if above.insert(path.rsplit_once('/').map_or("", |(above, _)| above).to_owned()) {
                folders.push(Target::FoldersAbove(path));
            }
            notes.extend(note.take());
        }
        let flushed = match folders.is_empty() {
            true => Ok(()),
            false => self.flush_then_note(folders, notes).await,
        };
        let outcome = |(key, made): (Key, Result<_>)| {
            let Some((version, _)) = made? else { return Ok(Put::Refused) };
            let flushed = flushed.as_ref().map_or_else(|error| Err(again(error)), |()| Ok(()));
            Ok(put_outcome(version, flushed, &key))
        };
        shown.into_iter().map(outcome).collect()
    }

    async fn flush_all(&self, targets: Vec<Target>) -> Result<()> {
        let flusher = &self.0.work()?.flusher;
        let _writer = flusher.writer();
        flusher.flush(targets).await
    }
}

/// Begins to write a file out, on this thread: the flush that it waits for has less to do then.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn begin_to_write(temp: &Temp) {
    // To say that it is not needed in memory does just that. Most of it is under way then, and stays.
    let _ = rustix::fs::fadvise(&temp.file, 0, None, rustix::fs::Advice::DontNeed);
}

/// The same where there is no such thing.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn begin_to_write(_: &Temp) {}

/// The same error for one more who is told.
fn again(error: &Error) -> Error {
    Error::new(error.kind(), error.to_string())
}
