//! On what machine and file system the figures were taken: they mean little without it.

use std::fmt;
use std::fs::read_to_string;
use std::path::Path;
use std::time::Duration;

use serde::Serialize;

/// The machine and the file system.
#[derive(Debug, Serialize)]
pub struct Host {
    cpu: String,
    cpus: usize,
    kernel: String,
    folder: String,
    /// Type, device and options of the file system.
    mount: String,
    /// ext4 without a journal does not use an inode again for minutes after its file was deleted,
    /// and looks at every one of them when it makes a file: up to half a millisecond for what
    /// otherwise takes 20 µs. Ratios then say little wherever files were deleted before.
    without_journal: bool,
}

impl Host {
    /// This machine, and the file system of this folder.
    pub fn of(folder: &Path) -> Self {
        let cpu = read_to_string("/proc/cpuinfo").unwrap_or_default();
        let cpu = cpu.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
        let kernel = read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let mounts = read_to_string("/proc/mounts").unwrap_or_default();
        let mount = mount_of(folder, &mounts);
        Self {
            cpu: cpu.map_or("an unknown CPU", |(_, name)| name).to_owned(),
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            kernel: kernel.trim().to_owned(),
            folder: folder.display().to_string(),
            without_journal: is_ext4_without_journal(&mount),
            mount: mount.to_string(),
        }
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} × {}, kernel {}", self.cpus, self.cpu, self.kernel)?;
        write!(f, "in {} on {}", self.folder, self.mount)?;
        if self.without_journal {
            write!(
                f,
                "\nno journal: making files is slow for minutes after others were deleted, ours and \
                 the floor's alike, which draws ratios towards 1; use --dir with another file system"
            )?;
        }
        Ok(())
    }
}

/// The one-minute load average.
pub fn load_average() -> String {
    let load = read_to_string("/proc/loadavg").unwrap_or_default();
    load.split(' ').next().unwrap_or_default().to_owned()
}

/// How much time of all cores this process has used so far.
pub fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    let seconds = Duration::from_secs(time.tv_sec.unsigned_abs());
    seconds + Duration::from_nanos(time.tv_nsec.unsigned_abs())
}

/// The greatest amount of memory that this process has had so far, in KiB.
pub fn peak_memory() -> Option<u64> {
    let status = read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix(" kB")?.trim().parse().ok()
}

/// A line of `/proc/mounts`.
#[derive(Debug, PartialEq, Eq)]
struct Mount<'a> {
    device: &'a str,
    kind: &'a str,
    options: &'a str,
}

impl fmt::Display for Mount<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}, {})", self.kind, self.device, self.options)
    }
}

/// Of the mounts above the folder, the one furthest down, and of those the newest.
fn mount_of<'a>(folder: &Path, mounts: &'a str) -> Mount<'a> {
    let mut best = (0, Mount { device: "?", kind: "an unknown file system", options: "?" });
    for line in mounts.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let [device, point, kind, options, ..] = words[..] else { continue };
        let depth = Path::new(point).components().count();
        if folder.starts_with(point) && depth >= best.0 {
            best = (depth, Mount { device, kind, options });
        }
    }
    best.1
}

/// Whether the kernel runs no journal for this file system, which it would show as `sda1-8`.
fn is_ext4_without_journal(mount: &Mount<'_>) -> bool {
    let Ok(journals) = std::fs::read_dir("/proc/fs/jbd2") else { return false };
    let device = mount.device.rsplit('/').next().unwrap_or_default();
    let journal = format!("{device}-");
    mount.kind == "ext4"
        && !journals
            .flatten()
            .any(|entry| entry.file_name().to_string_lossy().starts_with(&journal))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_mount_counts() {
        let mounts = "/dev/a / ext4 rw 0 0\n/dev/b /tmp/x xfs rw,noatime 0 0\n";
        assert_eq!(mount_of(Path::new("/tmp/x/y"), mounts).to_string(), "xfs (/dev/b, rw,noatime)");
        assert_eq!(mount_of(Path::new("/tmp/xy"), mounts).to_string(), "ext4 (/dev/a, rw)");
    }
}
