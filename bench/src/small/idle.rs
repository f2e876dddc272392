//! What a worker and a supervisor take that have nothing to do, with all processes that belong to
//! them.

use std::fs::read_to_string;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use super::{command, program};
use crate::report::Report;
use crate::rig::Rig;

const PLAN: &str = "[[node]]\nname = \"n\"\n";

pub fn run(rig: &Rig, report: &mut Report) -> Result<()> {
    let Some(program) = program(report, "idle memory and CPU")? else { return Ok(()) };
    let arena = rig.arena("small-idle")?;
    let here = || command(&program, arena.path());
    done(here().args(["queue", "create", "q"]))?;
    std::fs::write(arena.path().join("fleet.toml"), PLAN)?;
    done(here().args(["fleet", "set", "fleet.toml"]))?;
    let span = rig.pick(Duration::from_secs(20), Duration::from_secs(4));
    for (name, arguments) in [
        ("a worker", &["queue", "work", "q", "--", "true"][..]),
        ("a supervisor", &["supervise", "--node", "n"]),
    ] {
        let mut running = Running::start(here().args(arguments))?;
        std::thread::sleep(Duration::from_secs(2));
        running.still_runs()?;
        let before = running.cpu_ticks()?;
        std::thread::sleep(span);
        running.still_runs()?;
        let ticks = running.cpu_ticks()?.saturating_sub(before);
        let percent = ticks as f64 / ticks_per_second() / span.as_secs_f64() * 100.0;
        let (all, own, processes) = running.memory()?;
        report.fact(
            format!("{name} with nothing to do"),
            format!(
                "{:.1} MiB resident in {processes} processes, {:.1} of it their own; {percent:.2} % of \
                 a core over {} s (targets for a supervisor: 20 MiB, 0.5 %)",
                all as f64 / 1024.0,
                own as f64 / 1024.0,
                span.as_secs()
            ),
        );
    }
    arena.clear()
}

fn done(command: &mut Command) -> Result<()> {
    let output = command.output()?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

fn ticks_per_second() -> f64 {
    rustix::param::clock_ticks_per_second() as f64
}

/// A process, ended when this is dropped.
struct Running(Child);

impl Running {
    fn start(command: &mut Command) -> Result<Self> {
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Self(command.spawn()?))
    }

    fn still_runs(&mut self) -> Result<()> {
        let ended = self.0.try_wait()?;
        ensure!(ended.is_none(), "it ended by itself: {ended:?}");
        Ok(())
    }

    /// Itself, and all that it has started.
    fn family(&self) -> Result<Vec<u32>> {
        let mut family = vec![self.0.id()];
        let mut at = 0;
        while let Some(parent) = family.get(at).copied() {
            at += 1;
            for thread in std::fs::read_dir(format!("/proc/{parent}/task"))? {
                let path = thread?.path().join("children");
                let children = read_to_string(&path).unwrap_or_default();
                family
                    .extend(children.split_whitespace().filter_map(|pid| pid.parse::<u32>().ok()));
            }
        }
        Ok(family)
    }

    fn cpu_ticks(&self) -> Result<u64> {
        let mut sum = 0;
        for pid in self.family()? {
            let stat = read_to_string(format!("/proc/{pid}/stat"))?;
            let (_, fields) = stat.rsplit_once(')').context("not a stat")?;
            let fields: Vec<&str> = fields.split_whitespace().collect();
            for field in &fields[11..=12] {
                sum += field.parse::<u64>()?;
            }
        }
        Ok(sum)
    }

    /// KiB resident, KiB of it shared with no file, processes.
    fn memory(&self) -> Result<(u64, u64, usize)> {
        let family = self.family()?;
        let (mut all, mut own) = (0, 0);
        for pid in &family {
            let status = read_to_string(format!("/proc/{pid}/status"))?;
            let kib = |name: &str| -> Option<u64> {
                let line = status.lines().find_map(|line| line.strip_prefix(name))?;
                line.trim_start_matches(':').trim().strip_suffix(" kB")?.parse().ok()
            };
            all += kib("VmRSS").context("no VmRSS")?;
            own += kib("RssAnon").context("no RssAnon")?;
        }
        Ok((all, own, family.len()))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Asked to end first: then it takes its own processes with it.
        if let Some(pid) = rustix::process::Pid::from_raw(self.0.id().cast_signed()) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        for _ in 0..100 {
            if !matches!(self.0.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
