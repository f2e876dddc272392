//! The journal: what makes many durable writes cost one flush.
//!
//! A durable write may either flush its file and its folders, which costs two flushes, or be made
//! visible at once and noted in the journal, which costs a part of one: all that are noted at the
//! same time share it. Every few seconds the whole file system is flushed in the background, and
//! what was noted until then is forgotten. What was created and deleted in between never reaches
//! the disk but for its note, which flash memory is grateful for.
//!
//! ```text
//!   .lh/log/{process}-{n}.log   header, records; locked (flock) by its writer while that lives
//! ```
//!
//! Within a boot nothing is ever read back: when a process dies, the kernel still has its files.
//! The first process after a power loss finds segments of another boot and [recovers](recover)
//! from them before it does anything else.
//!
//! Deletes are noted too, while there is a journal, but nobody waits for that: a delete that was
//! not persisted may be undone by a power loss, within seconds, as without a journal.

mod record;
mod recover;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags};
use rustix::io::Errno;

pub use record::Record;
pub use recover::recover;

use self::record::{HEADER, Header};
use super::files::make_folder;
use super::names::PRIVATE;
use crate::env::{BootTime, Env};
use crate::host;

/// A segment is full at this size.
const FULL: u64 = 4 << 20;
/// A segment grows by this much: within what it has, a flush writes nothing but the records.
const GROWTH: u64 = 256 << 10;
/// How long a record waits to be forgotten.
const KEEP: Duration = Duration::from_secs(5);

/// Where the segments are, from the root.
pub fn folder() -> String {
    format!("{PRIVATE}/log")
}

/// Whether anybody keeps a journal in this store.
pub fn is_kept(private: &OwnedFd) -> bool {
    rustix::fs::statat(private, "log", AtFlags::SYMLINK_NOFOLLOW).is_ok()
}

/// This process' journal of one store. Belongs to the flushing thread.
#[derive(Debug)]
pub struct Journal {
    root: Arc<OwnedFd>,
    env: Env,
    tag: u64,
    made: u32,
    current: Option<Segment>,
    forgetter: Option<Forgetter>,
}

#[derive(Debug)]
struct Segment {
    file: OwnedFd,
    name: String,
    header: Header,
    /// Where the next record goes.
    end: u64,
    /// Up to where blocks are written.
    ready: u64,
    /// When the first record was noted.
    since: Option<BootTime>,
}

impl Journal {
    pub fn new(root: Arc<OwnedFd>, env: Env) -> Self {
        let tag = env.random();
        Self { root, env, tag, made: 0, current: None, forgetter: None }
    }

    /// Writes the records, and if `flush` is given returns once they are on disk.
    pub fn note(&mut self, records: &[Record], flush: bool) -> Result<(), Errno> {
        if self.current.as_ref().is_some_and(|segment| segment.end >= FULL) {
            self.forget_later();
        }
        let mut segment = match self.current.take() {
            Some(segment) => segment,
            None => self.next_segment()?,
        };
        let noted = segment.note(records, self.env.clock().boot());
        let noted = noted.and_then(|()| match flush {
            true => rustix::fs::fdatasync(&segment.file),
            false => Ok(()),
        });
        self.current = Some(segment);
        noted
    }

    /// When the records that were noted so far should be forgotten; `None` if there are none.
    pub fn due(&self) -> Option<Duration> {
        let since = self.current.as_ref()?.since?;
        Some(KEEP.saturating_sub(self.env.clock().boot().since(since)))
    }

    /// Has everything flushed in the background, so that the records so far can be forgotten.
    pub fn forget_later(&mut self) {
        let Some(segment) = self.current.take() else { return };
        if segment.since.is_none() {
            self.current = Some(segment);
            return;
        }
        if self.forgetter.is_none() {
            self.forgetter = Forgetter::start(self.root.clone());
        }
        // Without a thread the segment stays, and is forgotten by whoever finds it later.
        if let Some(forgetter) = &self.forgetter {
            let _ = forgetter.full.send(segment);
        }
    }

    /// Why flushing in the background failed, if it did.
    pub fn failure(&self) -> Option<Errno> {
        let forgetter = self.forgetter.as_ref()?;
        *forgetter.failed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Flushes everything and removes the segments: the regular end.
    pub fn close(mut self) {
        self.forget_later();
        let mut unused: Vec<_> = self.current.take().into_iter().collect();
        if let Some(Forgetter { full, spare, thread, .. }) = self.forgetter.take() {
            drop(full);
            let _ = thread.join();
            unused.extend(spare.try_iter());
        }
        for segment in &unused {
            segment.remove(&self.root);
        }
        if !unused.is_empty() {
            // Goes only if nobody else keeps a journal.
            let _ = rustix::fs::unlinkat(&self.root, folder(), AtFlags::REMOVEDIR);
        }
    }

    fn next_segment(&mut self) -> Result<Segment, Errno> {
        if let Some(forgetter) = &self.forgetter
            && let Ok(segment) = forgetter.spare.try_recv()
        {
            return Ok(segment);
        }
        self.made += 1;
        let name = format!("{:016x}-{}.log", self.tag, self.made);
        Segment::create(&self.root, name)
    }
}

impl Segment {
    /// A new one. It is locked before anybody can see it, and on disk before anything is in it.
    fn create(root: &OwnedFd, name: String) -> Result<Self, Errno> {
        let temp = format!("{PRIVATE}/tmp/{name}");
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file = rustix::fs::openat(root, &temp, flags, Mode::from_raw_mode(0o666))?;
        let made = (|| {
            rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)?;
            let header =
                Header { epoch: 1, boot_id: host::boot_id().to_owned(), device: device_of(root)? };
            write_all(&file, &header.to_bytes(), 0)?;
            let mut segment = Self { file, name, header, end: HEADER, ready: HEADER, since: None };
            segment.make_room(GROWTH - HEADER)?;
            rustix::fs::fsync(&segment.file)?;
            let path = segment.path();
            // Somebody may remove the empty folder meanwhile, but not for ever.
            for _ in 0..100 {
                make_folder(root, &folder())?;
                match rustix::fs::renameat(root, &temp, root, &path) {
                    Err(Errno::NOENT) => {}
                    renamed => {
                        renamed?;
                        flush_folders(root)?;
                        return Ok(segment);
                    }
                }
            }
            Err(Errno::NOENT)
        })();
        if made.is_err() {
            let _ = rustix::fs::unlinkat(root, &temp, AtFlags::empty());
        }
        made
    }

    fn path(&self) -> String {
        format!("{}/{}", folder(), self.name)
    }

    fn note(&mut self, records: &[Record], now: BootTime) -> Result<(), Errno> {
        let mut bytes = Vec::new();
        for record in records {
            bytes.extend(record.frame(self.header.epoch));
        }
        self.make_room(bytes.len() as u64)?;
        write_all(&self.file, &bytes, self.end)?;
        self.end += bytes.len() as u64;
        self.since.get_or_insert(now);
        Ok(())
    }

    fn make_room(&mut self, bytes: u64) -> Result<(), Errno> {
        let needed = self.end + bytes;
        if needed > self.ready {
            let ready = needed.next_multiple_of(GROWTH);
            write_all(&self.file, &vec![0; (ready - self.ready) as usize], self.ready)?;
            self.ready = ready;
        }
        Ok(())
    }

    /// Makes it as new. Its records are not needed any more.
    fn forget(&mut self) -> Result<(), Errno> {
        self.header.epoch = self.header.epoch.wrapping_add(1);
        write_all(&self.file, &self.header.to_bytes(), 0)?;
        rustix::fs::fdatasync(&self.file)?;
        (self.end, self.since) = (HEADER, None);
        Ok(())
    }

    fn remove(&self, root: &OwnedFd) {
        // One that stays is removed by whoever finds it later.
        let _ = rustix::fs::unlinkat(root, self.path(), AtFlags::empty());
    }
}

/// Flushes the file system, so that full segments can be used again.
#[derive(Debug)]
struct Forgetter {
    full: mpsc::Sender<Segment>,
    spare: mpsc::Receiver<Segment>,
    failed: Arc<Mutex<Option<Errno>>>,
    thread: std::thread::JoinHandle<()>,
}

impl Forgetter {
    fn start(root: Arc<OwnedFd>) -> Option<Self> {
        let (full, segments) = mpsc::channel::<Segment>();
        let (give, spare) = mpsc::channel();
        let failed = Arc::<Mutex<Option<Errno>>>::default();
        let failure = failed.clone();
        let run = move || {
            while let Ok(first) = segments.recv() {
                let mut full = vec![first];
                full.extend(segments.try_iter());
                let flushed = sync_everything(&root);
                let forgotten =
                    flushed.and_then(|()| full.iter_mut().try_for_each(Segment::forget));
                if let Err(error) = forgotten {
                    // The segments stay: after a reboot they may be all there is.
                    *failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                    return;
                }
                for (n, segment) in full.into_iter().enumerate() {
                    match n {
                        0 => drop(give.send(segment)),
                        _ => segment.remove(&root),
                    }
                }
            }
        };
        let thread = std::thread::Builder::new().name("leasehold-forget".into()).spawn(run).ok()?;
        Some(Self { full, spare, failed, thread })
    }
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn sync_everything(root: &OwnedFd) -> Result<(), Errno> {
    rustix::fs::syncfs(root)
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn sync_everything(_: &OwnedFd) -> Result<(), Errno> {
    Err(Errno::NOSYS)
}

/// That a segment is there must be on disk too.
fn flush_folders(root: &OwnedFd) -> Result<(), Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    for path in [folder().as_str(), PRIVATE] {
        rustix::fs::fsync(rustix::fs::openat(root, path, flags, Mode::empty())?)?;
    }
    rustix::fs::fsync(root.as_fd())
}

#[allow(clippy::unnecessary_cast)] // the field differs in type between systems
fn device_of(root: &OwnedFd) -> Result<u64, Errno> {
    Ok(rustix::fs::fstat(root)?.st_dev as u64)
}

fn write_all(file: &OwnedFd, mut bytes: &[u8], mut at: u64) -> Result<(), Errno> {
    while !bytes.is_empty() {
        match rustix::io::pwrite(file, bytes, at) {
            Ok(0) => return Err(Errno::IO),
            Ok(written) => {
                bytes = &bytes[written..];
                at += written as u64;
            }
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
