//! Standard error of processes that must not wait for whoever reads it.
//!
//! A supervisor and its processes talk into pipes. Should the other end stop reading, because it is
//! stopped, or hangs itself, a plain write would wait for it, and with it the renewal of every lease. So
//! in such a process standard error is a pipe to a thread of its own, which passes on what can be passed
//! on at once, and drops the rest. Whatever writes to standard error need not know.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// What a pipe takes without waiting, if it says that it takes something.
const PIECE: usize = 4096;
/// How long to wait for a reader that was quick so far.
const PATIENCE: Duration = Duration::from_secs(1);

/// Standard error, passed on by a thread, until this is dropped.
#[derive(Debug)]
pub struct Voice {
    to: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

impl Voice {
    /// From now on nobody here waits for those who read standard error.
    pub fn detach() -> std::io::Result<Self> {
        let to = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stderr(), 3)?;
        let ours = to.try_clone()?;
        let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        let thread = std::thread::Builder::new().name("voice".to_owned());
        let thread = thread.spawn(move || pass_on(File::from(read), File::from(ours)))?;
        rustix::stdio::dup2_stderr(&write)?;
        Ok(Self { to, thread: Some(thread) })
    }
}

impl Drop for Voice {
    fn drop(&mut self) {
        // That was the last end to write to, unless a child has one: the thread comes to an end.
        let _ = rustix::stdio::dup2_stderr(&self.to);
        let Some(thread) = self.thread.take() else { return };
        // What was said last is why we end. But a child that holds on to it must not hold us.
        for _ in 0..100 {
            if thread.is_finished() {
                let _ = thread.join();
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

fn pass_on(mut from: File, mut to: File) {
    let mut piece = [0; PIECE];
    let mut dropped = 0;
    while let Ok(read @ 1..) = from.read(&mut piece) {
        let patience = if dropped == 0 { PATIENCE } else { Duration::ZERO };
        if !takes(&to, patience) {
            dropped += read;
            continue;
        }
        if dropped > 0 {
            let _ = writeln!(to, "\n… {dropped} bytes were not read in time");
            dropped = 0;
            if !takes(&to, PATIENCE) {
                dropped = read;
                continue;
            }
        }
        let _ = to.write_all(&piece[..read]);
    }
}

/// Whether a piece can be written without waiting.
fn takes(to: &File, patience: Duration) -> bool {
    let patience = Timespec::try_from(patience).unwrap_or_default();
    let mut fds = [PollFd::new(to, PollFlags::OUT)];
    match poll(&mut fds, Some(&patience)) {
        Ok(0) => false,
        // Ready, or closed: then writing fails at once.
        Ok(_) => true,
        // Not a thing to wait for, or interrupted.
        Err(_) => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_reads_is_dropped_and_counted() {
        let (read, write) = rustix::pipe::pipe().unwrap();
        let (from, feed) = rustix::pipe::pipe().unwrap();
        let thread = std::thread::spawn(move || pass_on(from.into(), write.into()));
        let mut feed = File::from(feed);
        // Far more than both pipes hold.
        for _ in 0..1000 {
            feed.write_all(&[b'x'; 1000]).unwrap();
        }
        let mut read = File::from(read);
        let mut piece = vec![0; 60_000];
        read.read_exact(&mut piece).unwrap();
        feed.write_all(b"the end").unwrap();
        drop(feed);
        let mut rest = Vec::new();
        read.read_to_end(&mut rest).unwrap();
        thread.join().unwrap();
        let rest = String::from_utf8(rest).unwrap();
        assert!(
            rest.contains("bytes were not read in time") && rest.ends_with("the end"),
            "{rest}"
        );
        assert!(piece.len() + rest.len() < 500_000);
    }
}
