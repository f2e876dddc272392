//! How large the program is, and how long it takes to start.

use std::io::Read as _;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};

use super::{command, program};
use crate::report::{Report, Row, Target, Unit};
use crate::rig::Rig;
use crate::stats::Pairs;

/// In milliseconds.
const TARGET: Target = Target::AtMost(10.0);
const FLOOR: &str = "/bin/echo, started the same way, to its first byte";

pub fn run(rig: &Rig, report: &mut Report) -> Result<()> {
    let Some(program) = program(report, "size and start of the command")? else { return Ok(()) };
    let size = std::fs::metadata(&program)?.len() as f64 / 1e6;
    report.fact("size of the program", format!("{size:.1} MB"));
    let arena = rig.arena("small-start")?;
    for (name, arguments) in [
        ("start, --version", &["--version"][..]),
        ("start, lock run to the child's start", &["lock", "run", "a", "--", "/bin/echo", "x"]),
    ] {
        let pairs = Pairs::measure(
            rig.pick(60, 20),
            || first_byte(command(&program, arena.path()).args(arguments)),
            || first_byte(Command::new("/bin/echo").arg("x")),
        )?;
        report.add(Row::new(name, Unit::Millis, pairs, FLOOR).target(TARGET));
    }
    arena.clear()
}

/// From before it is started to the first byte that it, or what it runs, writes.
fn first_byte(command: &mut Command) -> Result<f64> {
    let start = Instant::now();
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
    let mut stdout = child.stdout.take().context("no pipe")?;
    stdout.read_exact(&mut [0])?;
    let millis = start.elapsed().as_secs_f64() * 1e3;
    std::io::copy(&mut stdout, &mut std::io::sink())?;
    ensure!(child.wait()?.success(), "{command:?} failed");
    Ok(millis)
}
