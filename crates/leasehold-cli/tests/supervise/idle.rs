//! What a supervisor takes that has nothing to do.

use super::*;

/// The number behind a name in `/proc/PID/status`, in kB.
fn status(pid: u64, name: &str) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find(|line| line.starts_with(name)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Hundredths of a second of CPU so far.
fn ticks(pid: u64) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

/// At most 20 MiB and half a percent of a core: asserted for the program as it is installed
/// (`cargo test --release`), told for any.
#[cfg(target_os = "linux")]
#[test]
fn an_idle_supervisor_takes_little() {
    for (name, place) in [("directory", directory()), ("bucket", bucket("idle"))] {
        // It reports, and reads its plan, every second: far more often than it would.
        place.plan(
            "[[node]]\nname = \"n\"\nevery = \"1s\"\n[[node.worker]]\nqueue = \"q\"\ncommand = \"true\"\n",
        );
        let supervisor = place.supervise(&[]);
        place.pids("q", 1);
        std::thread::sleep(Duration::from_secs(2));
        let before = ticks(supervisor.pid());
        let span = 20;
        std::thread::sleep(Duration::from_secs(span));
        let percent = (ticks(supervisor.pid()) - before) as f64 / span as f64;
        let (all, own) = (status(supervisor.pid(), "VmRSS"), status(supervisor.pid(), "RssAnon"));
        eprintln!("{name}: {all} kB resident, {own} kB of it its own; {percent:.2} % of a core");
        assert!(own <= 20 << 10, "{name}: {own} kB");
        if !cfg!(debug_assertions) {
            assert!(all <= 20 << 10, "{name}: {all} kB");
            assert!(percent <= 0.5, "{name}: {percent} %");
        }
        supervisor.end();
    }
}
