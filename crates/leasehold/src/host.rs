//! This process and its host, and whether another process of it is still there.
//!
//! What it takes to recognise a dead holder at once: process numbers are reused, mean nothing in
//! another namespace, and nothing after a reboot.

use std::sync::OnceLock;
use std::time::Duration;

use leasehold_protocol::format::lease::{Place, Process};
use leasehold_protocol::lease::Liveness;
use leasehold_protocol::mutant::{self, Mutant};

use crate::env::{BootTime, Host};

/// Where this process runs, at this moment of its boot clock. `None` where the system does not say
/// which boot it is in: then holders are judged by their ttl alone.
pub fn here(now: BootTime) -> Option<Place> {
    static HERE: OnceLock<Option<Place>> = OnceLock::new();
    let mut place = HERE.get_or_init(find_out).clone()?;
    // A fork keeps the memory of its parent, but not its number.
    if place.process.pid != std::process::id() {
        place = find_out()?;
    }
    place.boot_time = now.since(BootTime::from_boot(Duration::ZERO));
    Some(place)
}

fn find_out() -> Option<Place> {
    let pid = std::process::id();
    // Boot clocks and start times of another time namespace, and process numbers of another
    // process namespace's /proc, are not comparable with anybody's.
    if !system::is_plain(pid) {
        return None;
    }
    Some(Place {
        host: host_name(),
        boot_id: Some(boot_id().to_owned()).filter(|id| !id.is_empty())?,
        boot_time: Duration::ZERO,
        pid_ns: pid_namespace(),
        process: Process { pid, start: start_time(pid)? },
        child: None,
    })
}

/// Which boot of this host this is; empty where the system does not say.
pub fn boot_id() -> &'static str {
    static ID: OnceLock<String> = OnceLock::new();
    ID.get_or_init(|| system::boot_id().unwrap_or_default())
}

/// What tells a folder of this machine from a copy of it, here or elsewhere: the machine, and the folder's
/// place on its disk. `None` where that cannot be told, or if it is not there yet.
pub(crate) fn folder(store: &crate::Store) -> Option<String> {
    if store.kind() != crate::store::Kind::Directory {
        return None;
    }
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt as _;
        let folder = std::fs::metadata(store.url()).ok()?;
        let born = folder.created().ok().and_then(|at| {
            at.duration_since(std::time::UNIX_EPOCH).ok().map(|since| since.as_micros())
        });
        Some(format!("{} {} {}", system::machine(), folder.ino(), born.unwrap_or_default()))
    }
    #[cfg(not(unix))]
    None
}

/// The process with this number, as it can be recognised later.
pub fn process(pid: u32) -> Option<Process> {
    Some(Process { pid, start: start_time(pid)? })
}

/// The host that this process really runs on.
#[derive(Debug)]
pub(crate) struct System;

impl Host for System {
    fn here(&self, now: BootTime) -> Option<Place> {
        here(now)
    }

    fn is_gone(&self, process: &Process) -> bool {
        is_gone(process)
    }
}

/// What became of a holder: gone only if both it and what it ran are.
pub fn liveness(host: &dyn Host, place: &Place, here: &Place) -> Option<Liveness> {
    let same_ns = place.pid_ns == here.pid_ns || mutant::is(Mutant::OtherPidNamespace);
    if place.boot_id != here.boot_id || !same_ns {
        return None;
    }
    let gone = |process: &Process| host.is_gone(process);
    let child_gone = place.child.as_ref().is_none_or(gone) || mutant::is(Mutant::QuickButDoubled);
    let all_gone = gone(&place.process) && child_gone;
    Some(if all_gone { Liveness::Gone } else { Liveness::Alive })
}

/// This host's name.
pub fn host_name() -> String {
    #[cfg(unix)]
    return rustix::system::uname().nodename().to_string_lossy().into_owned();
    #[cfg(not(unix))]
    "windows".to_owned()
}

#[cfg(any(target_os = "linux", target_os = "android"))]
mod system {
    use leasehold_protocol::format::lease::Process;

    pub fn boot_id() -> Option<String> {
        let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
        Some(id.trim().to_owned())
    }

    /// Which machine this is; what it runs on, too, because cards are copied whole. Only what everybody may
    /// read: all processes of a node must come to the same.
    pub fn machine() -> String {
        let files = ["/etc/machine-id", "/proc/device-tree/serial-number"];
        let texts = files.map(|file| std::fs::read_to_string(file).unwrap_or_default());
        texts.map(|text| text.trim_matches(['\0', '\n', ' ']).to_owned()).join("/")
    }

    pub fn pid_namespace() -> String {
        let link = std::fs::read_link("/proc/self/ns/pid");
        link.map(|link| link.to_string_lossy().into_owned()).unwrap_or_default()
    }

    /// Whether this process sees the host's clocks, and itself in `/proc`.
    pub fn is_plain(pid: u32) -> bool {
        let link = |name: &str| {
            let link = std::fs::read_link(format!("/proc/{name}"));
            link.map(|link| link.to_string_lossy().into_owned())
        };
        // Kernels without time namespaces have no such file.
        let time = link("self/ns/time").unwrap_or_else(|_| "time:[4026531834]".to_owned());
        time == "time:[4026531834]" && link("self").is_ok_and(|own| own == pid.to_string())
    }

    struct Stat {
        state: char,
        threads: u64,
        start: u64,
    }

    /// What `/proc/PID/stat` says. The command's name, in brackets, may contain anything, so
    /// fields are counted from the last bracket.
    fn stat(pid: u32) -> std::io::Result<Option<Stat>> {
        let text = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
        let fields = text.rsplit_once(')').map(|(_, rest)| rest.split_whitespace());
        let parse = |mut fields: std::str::SplitWhitespace<'_>| {
            let state = fields.next()?.chars().next()?;
            let threads = fields.nth(16)?.parse().ok()?;
            Some(Stat { state, threads, start: fields.nth(1)?.parse().ok()? })
        };
        Ok(fields.and_then(parse))
    }

    pub fn start_time(pid: u32) -> Option<u64> {
        Some(stat(pid).ok()??.start)
    }

    pub fn is_gone(process: &Process) -> bool {
        match stat(process.pid) {
            // A process whose first thread has ended looks like a zombie while others run on.
            Ok(Some(Stat { state, threads, start })) => {
                start != process.start || (matches!(state, 'Z' | 'X') && threads <= 1)
            }
            // Something is there that we cannot read: that is not "gone". And what is not shown
            // may be hidden from us (hidepid): only "no such process" is proof.
            Ok(None) => false,
            Err(_) => super::no_such_process(process.pid),
        }
    }
}

#[cfg(unix)]
fn no_such_process(pid: u32) -> bool {
    use rustix::process::{Pid, test_kill_process};
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    pid.is_some_and(|pid| test_kill_process(pid) == Err(rustix::io::Errno::SRCH))
}

#[cfg(all(unix, not(any(target_os = "linux", target_os = "android"))))]
mod system {
    use leasehold_protocol::format::lease::Process;

    /// A call to a program, once per process: there is no safe call for it.
    pub fn boot_id() -> Option<String> {
        let done =
            std::process::Command::new("sysctl").args(["-n", "kern.bootsessionuuid"]).output();
        let id = String::from_utf8(done.ok()?.stdout).ok()?.trim().to_owned();
        (!id.is_empty()).then_some(id)
    }

    pub fn machine() -> String {
        super::host_name()
    }

    pub fn is_plain(_: u32) -> bool {
        true
    }

    pub fn pid_namespace() -> String {
        "none".to_owned()
    }

    /// Not told: a reused number then looks alive, and the ttl decides.
    pub fn start_time(_: u32) -> Option<u64> {
        Some(0)
    }

    pub fn is_gone(process: &Process) -> bool {
        super::no_such_process(process.pid)
    }
}

#[cfg(not(unix))]
mod system {
    use leasehold_protocol::format::lease::Process;

    pub fn boot_id() -> Option<String> {
        None
    }

    pub fn is_plain(_: u32) -> bool {
        false
    }

    pub fn pid_namespace() -> String {
        String::new()
    }

    pub fn start_time(_: u32) -> Option<u64> {
        None
    }

    pub fn is_gone(_: &Process) -> bool {
        false
    }
}

use system::{is_gone, pid_namespace, start_time};

#[cfg(test)]
mod tests {
    use super::*;

    fn now() -> BootTime {
        BootTime::from_boot(Duration::from_secs(1))
    }

    #[test]
    fn this_process_is_alive_and_a_dead_one_is_not() {
        let here = here(now()).expect("this system says which boot it is in");
        assert_eq!(liveness(&System, &here, &here), Some(Liveness::Alive));
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let recorded = process(child.id()).unwrap();
        let place = |process: Process| Place { process, ..here.clone() };
        assert_eq!(liveness(&System, &place(recorded.clone()), &here), Some(Liveness::Alive));
        child.kill().unwrap();
        // A zombie is gone: nobody has waited for it yet.
        while !is_gone(&recorded) {
            std::thread::yield_now();
        }
        assert_eq!(liveness(&System, &place(recorded.clone()), &here), Some(Liveness::Gone));
        // FIELD.md row 26: a holder is not gone while what it ran is alive.
        let mut both = place(recorded.clone());
        both.child = Some(here.process.clone());
        assert_eq!(liveness(&System, &both, &here), Some(Liveness::Alive));
        child.wait().unwrap();
        assert_eq!(liveness(&System, &place(recorded), &here), Some(Liveness::Gone));
    }

    #[test]
    fn a_reused_number_is_another_process() {
        let here = here(now()).unwrap();
        let mut earlier = here.clone();
        earlier.process.start += 1;
        if cfg!(target_os = "linux") {
            assert_eq!(liveness(&System, &earlier, &here), Some(Liveness::Gone));
        }
    }

    /// FIELD.md row 27.
    #[test]
    fn other_namespaces_and_boots_are_not_judged() {
        let here = here(now()).unwrap();
        let mut dead = here.clone();
        dead.process = Process { pid: u32::MAX / 2, start: 1 };
        assert_eq!(liveness(&System, &dead, &here), Some(Liveness::Gone));
        let container = Place { pid_ns: "other".into(), ..dead.clone() };
        assert_eq!(liveness(&System, &container, &here), None);
        let rebooted = Place { boot_id: "other".into(), ..dead };
        assert_eq!(liveness(&System, &rebooted, &here), None);
    }
}
