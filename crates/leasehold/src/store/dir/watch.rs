//! Watching folders, with the kernel's help.
//!
//! One inotify instance and one thread serve the whole process: a user may have only 128 instances.
//! Folders are watched, not files: an object that is replaced is another file each time. A folder
//! that is not there yet is waited for in the nearest one above it.
//!
//! A folder that is made in a watched one is watched too, until an object appears in it: a key like
//! `pending/7/task.json` makes its folder first, and whoever listed just then would not see it.

use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use tokio::sync::Notify;

/// Watches the folder of a key or prefix for names that begin like it.
#[derive(Debug)]
pub struct Watcher {
    spot: Spot,
    bell: Arc<Bell>,
    /// What is watched now: the folder, or one above it. `None` once that failed.
    armed: Option<Armed>,
}

#[derive(Debug)]
struct Armed {
    hub: &'static Hub,
    id: u64,
    folder: String,
}

impl Drop for Armed {
    fn drop(&mut self) {
        self.hub.unsubscribe(self.id);
    }
}

/// What a watcher is interested in.
#[derive(Debug, Clone)]
struct Spot {
    root: Arc<OwnedFd>,
    /// Below the root; empty for the root itself.
    folder: String,
    /// What names in it begin with.
    name: String,
}

#[derive(Debug, Default)]
struct Bell {
    rung: Notify,
    /// The watched folder is gone: another one has to be watched.
    moved: AtomicBool,
}

impl Watcher {
    /// For this path below the root; one that ends with `/` is a folder with all that is in it.
    pub fn new(root: &Arc<OwnedFd>, path: &str) -> Self {
        let (folder, name) = path.rsplit_once('/').unwrap_or(("", path));
        let spot = Spot { root: root.clone(), folder: folder.to_owned(), name: name.to_owned() };
        let mut watcher = Self { spot, bell: Arc::default(), armed: None };
        watcher.arm();
        watcher
    }

    pub fn is_live(&self) -> bool {
        self.armed.is_some()
    }

    pub async fn changed(&mut self) {
        let Some(armed) = &self.armed else { return std::future::pending().await };
        self.bell.rung.notified().await;
        // First the right folder, then the caller looks: nothing is missed in between.
        if self.bell.moved.load(SeqCst) || armed.folder != self.spot.folder {
            self.arm();
        }
    }

    /// Watches the folder, or the deepest one above it that is there.
    fn arm(&mut self) {
        self.armed = None;
        self.bell.moved.store(false, SeqCst);
        let Some(hub) = hub() else { return };
        let mut folder = self.spot.folder.clone();
        loop {
            let name = match self.spot.folder[folder.len()..].trim_start_matches('/') {
                "" => self.spot.name.clone(),
                below => below.split('/').next().unwrap_or_default().to_owned(),
            };
            let deepest = self.armed.as_ref().map(|armed| armed.folder.len());
            let spot = Spot { folder: folder.clone(), name, ..self.spot.clone() };
            match hub.subscribe(spot, &self.bell) {
                Ok(id) => {
                    let whole = folder == self.spot.folder;
                    self.armed = Some(Armed { hub, id, folder });
                    if whole {
                        return;
                    }
                    // The next one down may have been made before this one was watched.
                    folder = self.spot.folder.clone();
                }
                Err(Errno::NOENT | Errno::NOTDIR) => {
                    folder = match folder.rsplit_once('/') {
                        Some((above, _)) => above.to_owned(),
                        None if !folder.is_empty() => String::new(),
                        None => return,
                    };
                    if deepest.is_some_and(|deepest| folder.len() <= deepest) {
                        return;
                    }
                }
                // No watches left, or no /proc: whoever waits looks more often.
                Err(error) => {
                    tracing::debug!(%error, "changes are not told in this directory");
                    return;
                }
            }
        }
    }
}

/// The process' one inotify instance.
#[derive(Debug)]
struct Hub {
    inotify: OwnedFd,
    /// A fork has the instance, but not the thread that reads from it.
    process: u32,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// By the kernel's number, which it does not use again.
    folders: HashMap<i32, Vec<Subscriber>>,
    last: u64,
}

#[derive(Debug, Clone)]
struct Subscriber {
    id: u64,
    spot: Spot,
    bell: Arc<Bell>,
    /// Only until an object appears in it.
    new_folder: bool,
}

fn hub() -> Option<&'static Hub> {
    static HUB: OnceLock<Option<Hub>> = OnceLock::new();
    static STARTED: OnceLock<bool> = OnceLock::new();
    let hub = HUB.get_or_init(|| {
        let inotify = inotify::init(CreateFlags::CLOEXEC).ok()?;
        Some(Hub { inotify, process: std::process::id(), state: Mutex::default() })
    });
    let hub = hub.as_ref().filter(|hub| hub.process == std::process::id())?;
    let start = || std::thread::Builder::new().name("leasehold-watch".into()).spawn(|| hub.run());
    STARTED.get_or_init(|| start().is_ok()).then_some(hub)
}

/// How long to gather changes after the first one was told.
const GATHER: Duration = Duration::from_micros(500);

/// What makes an object appear, change or go. Not: being read, or written to bit by bit.
const EVENTS: WatchFlags = WatchFlags::CREATE
    .union(WatchFlags::CLOSE_WRITE)
    .union(WatchFlags::DELETE)
    .union(WatchFlags::MOVE)
    .union(WatchFlags::DELETE_SELF)
    .union(WatchFlags::MOVE_SELF)
    .union(WatchFlags::ONLYDIR)
    .union(WatchFlags::DONT_FOLLOW);

impl Hub {
    fn subscribe(&self, spot: Spot, bell: &Arc<Bell>) -> Result<u64, Errno> {
        let mut state = self.state();
        state.last += 1;
        let id = state.last;
        let subscriber = Subscriber { id, spot, bell: bell.clone(), new_folder: false };
        self.add(&mut state, subscriber).map(|()| id)
    }

    /// Watches the subscriber's folder for it. The state is locked, so that no event of a folder is
    /// handled before it is known who wants it.
    fn add(&self, state: &mut State, subscriber: Subscriber) -> Result<(), Errno> {
        let Spot { root, folder, .. } = &subscriber.spot;
        // By the open root, which stays the same whatever becomes of its path.
        let path = format!("/proc/self/fd/{}/{folder}/.", root.as_raw_fd());
        let number = inotify::add_watch(&self.inotify, path, EVENTS)?;
        state.folders.entry(number).or_default().push(subscriber);
        Ok(())
    }

    fn unsubscribe(&self, id: u64) {
        let mut state = self.state();
        state.folders.retain(|number, subscribers| {
            subscribers.retain(|subscriber| subscriber.id != id);
            let wanted = !subscribers.is_empty();
            if !wanted {
                // It may be gone already.
                let _ = inotify::remove_watch(&self.inotify, *number);
            }
            wanted
        });
    }

    fn run(&self) {
        let mut buffer = [MaybeUninit::uninit(); 16 << 10];
        let mut reader = inotify::Reader::new(self.inotify.as_fd(), &mut buffer);
        loop {
            match reader.next() {
                Ok(event) => {
                    let name = event.file_name().and_then(|name| name.to_str().ok());
                    self.tell(event.wd(), event.events(), name.unwrap_or_default());
                }
                Err(Errno::INTR) => continue,
                Err(error) => {
                    tracing::debug!(%error, "changes are told no longer");
                    return;
                }
            }
            // The first of many is told at once, the rest together: in a folder where others make
            // and delete thousands of files a second, we must not be woken for each.
            if reader.is_buffer_empty() {
                std::thread::sleep(GATHER);
            }
        }
    }

    fn tell(&self, number: i32, what: ReadFlags, name: &str) {
        let mut state = self.state();
        if what.contains(ReadFlags::QUEUE_OVERFLOW) {
            state.folders.values().flatten().for_each(|one| one.bell.rung.notify_one());
            return;
        }
        let gone = ReadFlags::IGNORED | ReadFlags::DELETE_SELF | ReadFlags::MOVE_SELF;
        if what.intersects(gone) {
            for one in state.folders.remove(&number).unwrap_or_default() {
                if !one.new_folder {
                    one.bell.moved.store(true, SeqCst);
                }
                one.bell.rung.notify_one();
            }
            // Moved away it would go on telling.
            if what.contains(ReadFlags::MOVE_SELF) {
                let _ = inotify::remove_watch(&self.inotify, number);
            }
            return;
        }
        let Some(subscribers) = state.folders.get_mut(&number) else { return };
        let concerned: Vec<Subscriber> = subscribers
            .iter()
            .filter(|one| name.starts_with(one.spot.name.as_str()))
            .cloned()
            .collect();
        let new_folder = what.contains(ReadFlags::ISDIR)
            && what.intersects(ReadFlags::CREATE | ReadFlags::MOVED_TO);
        if !what.contains(ReadFlags::ISDIR) {
            subscribers.retain(|one| !one.new_folder);
            if subscribers.is_empty() {
                state.folders.remove(&number);
                let _ = inotify::remove_watch(&self.inotify, number);
            }
        }
        for one in concerned {
            if new_folder {
                self.follow(&mut state, &one, name, 0);
            }
            // After that, so that who looks now finds what was there before.
            one.bell.rung.notify_one();
        }
    }

    /// Watches a folder that was made, and what was made in it meanwhile.
    fn follow(&self, state: &mut State, above: &Subscriber, name: &str, depth: u32) {
        let mut one = above.clone();
        one.new_folder = true;
        one.spot.name = String::new();
        one.spot.folder = match above.spot.folder.as_str() {
            "" => name.to_owned(),
            folder => format!("{folder}/{name}"),
        };
        // Gone already, or no watches left: looking now and then has to do.
        if depth > 8 || self.add(state, one.clone()).is_err() {
            return;
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let opened = rustix::fs::openat(&one.spot.root, &*one.spot.folder, flags, Mode::empty());
        let Ok(entries) = opened.and_then(rustix::fs::Dir::new) else { return };
        for entry in entries.filter_map(Result::ok).take(64) {
            let name = entry.file_name();
            if entry.file_type() == FileType::Directory
                && name != c"."
                && name != c".."
                && let Ok(name) = name.to_str()
            {
                self.follow(state, &one, name, depth + 1);
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
