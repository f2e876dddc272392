//! Starts the processes, kills and stops them, and starts them again.

use std::ffi::OsString;
use std::fs::OpenOptions;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;

use anyhow::Context as _;
use rustix::process::{Pid, Signal, kill_process};

use super::log::{Deed, Log, Observed, Said};
use super::plan::{Dice, Plan};

/// What it takes to start a process.
pub struct Stage<'a> {
    /// Where the logs go.
    pub evidence: &'a Path,
    /// How to reach the store.
    pub arguments: Vec<OsString>,
    /// What is done to whom is written here.
    pub log: &'a Log,
}

struct Player {
    number: u32,
    life: u32,
    /// `None` while it is dead.
    running: Option<(Child, ChildStdin)>,
    /// When it is started again.
    start_at: u64,
    /// When it goes on, if it is stopped.
    resume_at: Option<u64>,
}

/// All processes. Those that run are killed when this is dropped.
pub struct Troupe<'a> {
    stage: Stage<'a>,
    players: Vec<Player>,
}

/// How long anything may take that should end by itself.
const PATIENCE: Duration = Duration::from_secs(40);
const TICK: Duration = Duration::from_millis(5);

fn nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}

impl<'a> Troupe<'a> {
    pub fn new(stage: Stage<'a>, processes: u32) -> Self {
        let player =
            |number| Player { number, life: 0, running: None, start_at: 0, resume_at: None };
        Self { stage, players: (0..processes).map(player).collect() }
    }

    /// Plays until the plan's end, or until `stop` completes.
    pub async fn play(
        &mut self,
        plan: &Plan,
        kills_per_minute: u32,
        mut tell: impl FnMut(u64, u64),
        stop: impl Future<Output = ()>,
    ) -> anyhow::Result<()> {
        let mut dice = Dice::new(plan.seed, &[0xc04d]);
        let log = self.stage.log;
        let between_kills = match kills_per_minute {
            0 => u64::MAX,
            kills => 60_000_000_000 / u64::from(kills),
        };
        let between_pauses = 6_000_000_000 / u64::from(plan.processes);
        let jitter = |dice: &mut Dice, mean: u64| mean / 2 + dice.below(mean.clamp(1, 1 << 40));
        let mut next_kill = log.now().saturating_add(jitter(&mut dice, between_kills));
        let mut next_pause = log.now() + jitter(&mut dice, between_pauses);
        let (mut kills, mut pauses) = (0, 0);
        tokio::pin!(stop);
        loop {
            let now = log.now();
            if now >= plan.end {
                return Ok(());
            }
            self.look_after(now, false)?;
            if now >= next_kill {
                next_kill = now + jitter(&mut dice, between_kills);
                let alive: Vec<usize> = self.alive(|_| true);
                if !alive.is_empty() {
                    let victim = *dice.pick(&alive);
                    self.kill(victim, now + nanos(dice.millis(0, 300)))?;
                    kills += 1;
                }
            }
            if now >= next_pause {
                next_pause = now + jitter(&mut dice, between_pauses);
                let awake = self.alive(|player| player.resume_at.is_none());
                if !awake.is_empty() {
                    let victim = *dice.pick(&awake);
                    let span = match dice.permille(500) {
                        true => dice.millis(20, 600),
                        false => plan.too_long() + dice.millis(0, 1500),
                    };
                    self.pause(victim, now, span)?;
                    pauses += 1;
                }
            }
            tell(kills, pauses);
            tokio::select! {
                () = tokio::time::sleep(TICK) => {}
                () = &mut stop => return Ok(()),
            }
        }
    }

    fn alive(&self, which: impl Fn(&Player) -> bool) -> Vec<usize> {
        let alive = |(at, player): (usize, &Player)| {
            (player.running.is_some() && which(player)).then_some(at)
        };
        self.players.iter().enumerate().filter_map(alive).collect()
    }

    /// Starts who is to be started, wakes who is to be woken, notices who ended.
    fn look_after(&mut self, now: u64, drain: bool) -> anyhow::Result<()> {
        for player in &mut self.players {
            if player.running.is_none() && now >= player.start_at {
                player.life += 1;
                player.running = Some(start(&self.stage, player.number, player.life, drain)?);
                let Player { number, life, .. } = *player;
                self.stage.log.say(Said::Deed(Deed::Start { player: number, life }));
            }
            if player.resume_at.is_some_and(|at| now >= at) {
                player.resume_at = None;
                if let Some((child, _)) = &player.running {
                    send(child, Signal::CONT);
                }
            }
            if let Some((child, _)) = &mut player.running
                && let Some(status) = child.try_wait()?
            {
                // Nobody told it to.
                let (number, life) = (player.number, player.life);
                let ended = Deed::Ended { player: number, life, code: status.code().or(Some(-1)) };
                self.stage.log.say(Said::Deed(ended));
                self.stage.log.say(Said::Odd(format!("player {number}.{life} ended: {status}")));
                player.running = None;
                player.start_at = now + 1_000_000_000;
            }
        }
        Ok(())
    }

    fn kill(&mut self, at: usize, start_at: u64) -> anyhow::Result<()> {
        let player = &mut self.players[at];
        if let Some((mut child, _stdin)) = player.running.take() {
            let Player { number, life, .. } = *player;
            // Written before, so that whoever reads knows why the log ends there.
            self.stage.log.say(Said::Deed(Deed::Kill { player: number, life }));
            child.kill()?;
            child.wait()?;
        }
        (player.start_at, player.resume_at) = (start_at, None);
        Ok(())
    }

    fn pause(&mut self, at: usize, now: u64, span: Duration) -> anyhow::Result<()> {
        let player = &mut self.players[at];
        let Some((child, _)) = &player.running else { return Ok(()) };
        let (number, life, millis) = (player.number, player.life, span.as_millis() as u64);
        self.stage.log.say(Said::Deed(Deed::Pause { player: number, life, millis }));
        send(child, Signal::STOP);
        player.resume_at = Some(now + nanos(span));
        Ok(())
    }

    /// Ends everybody: every second one is asked to, the others are killed.
    pub async fn finish(&mut self) -> anyhow::Result<()> {
        for at in 0..self.players.len() {
            let player = &mut self.players[at];
            if let (Some(_), Some((child, _))) = (player.resume_at.take(), &player.running) {
                send(child, Signal::CONT);
            }
            if at % 2 == 1 {
                self.kill(at, 0)?;
            }
        }
        self.wait_for_all(PATIENCE, true).await
    }

    /// Starts everybody once more, to finish what is there.
    pub async fn drain(&mut self, patience: Duration) -> anyhow::Result<()> {
        for player in &mut self.players {
            player.start_at = 0;
        }
        self.look_after(self.stage.log.now(), true)?;
        self.wait_for_all(patience, false).await
    }

    /// Waits until everybody has ended by itself; who does not in time is killed.
    async fn wait_for_all(&mut self, patience: Duration, ask: bool) -> anyhow::Result<()> {
        let log = self.stage.log;
        let deadline = log.now() + nanos(patience);
        let mut asked = Vec::new();
        for player in &mut self.players {
            let Some((child, stdin)) = player.running.take() else { continue };
            let stdin = match ask {
                // Its standard input ends.
                true => None,
                false => Some(stdin),
            };
            asked.push((player.number, player.life, child, stdin));
        }
        while !asked.is_empty() {
            let mut left = Vec::new();
            for (player, life, mut child, stdin) in asked {
                match child.try_wait()? {
                    Some(status) => {
                        let code = status.code().or(Some(-1));
                        log.say(Said::Deed(Deed::Ended { player, life, code }));
                    }
                    None if log.now() >= deadline => {
                        let what = format!("player {player}.{life} did not end in {patience:?}");
                        log.say(Said::Observed(Observed::Stuck { what }));
                        child.kill()?;
                        child.wait()?;
                    }
                    None => left.push((player, life, child, stdin)),
                }
            }
            asked = left;
            tokio::time::sleep(TICK).await;
        }
        Ok(())
    }
}

impl Drop for Troupe<'_> {
    fn drop(&mut self) {
        for player in &mut self.players {
            if let Some((child, _)) = &mut player.running {
                let _ = child.kill();
                let _ = child.wait();
            }
        }
    }
}

fn start(
    stage: &Stage<'_>,
    player: u32,
    life: u32,
    drain: bool,
) -> anyhow::Result<(Child, ChildStdin)> {
    let path: PathBuf = stage.evidence.join("stderr").join(format!("p{player}.txt"));
    let stderr = OpenOptions::new().create(true).append(true).open(path)?;
    let mut command = Command::new(std::env::current_exe()?);
    command.args(&stage.arguments).arg("torture-player").arg(stage.evidence);
    command.args([player.to_string(), life.to_string()]);
    if drain {
        command.arg("--drain");
    }
    // A group of its own: who interrupts us does not interrupt them.
    let mut child = command
        .process_group(0)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(stderr)
        .spawn()
        .context("cannot start a player")?;
    let stdin = child.stdin.take().context("a player has no standard input")?;
    Ok((child, stdin))
}

fn send(child: &Child, signal: Signal) {
    // It is our child and not waited for yet: the number is its own.
    if let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        let _ = kill_process(pid, signal);
    }
}
