//! Pushing and working.

use std::sync::Arc;
use std::time::Duration;

use leasehold::ErrorKind;
use leasehold::queue::{Acked, NewTask, Task, Worker, WorkerSettings};
use serde_json::json;

use super::super::log::{Answer, Call};
use super::super::plan::Dice;
use super::Player;

/// Pushes tasks: some under names that others push too, some in bundles, some for later; and pushes
/// dead letters again.
pub async fn push(player: Arc<Player>, mut dice: Dice) {
    while !player.stopped() {
        match dice.below(100) {
            0..=59 => push_one(&player, &mut dice, None).await,
            // Everybody does, in this second.
            60..=79 => {
                let slot = player.log.now() / 1_000_000_000;
                push_one(&player, &mut dice, Some(format!("t-shared-{slot}"))).await;
            }
            80..=94 => push_bundle(&player, 2 + dice.below(4) as u32).await,
            _ => retry(&player, &mut dice).await,
        }
        player.pause(dice.millis(200, 1400)).await;
    }
}

async fn push_one(player: &Player, dice: &mut Dice, shared: Option<String>) {
    // A push does not see what is scheduled under its name: both would run, and each have its end.
    let later = shared.is_none() && dice.permille(150);
    let id = shared.unwrap_or_else(|| format!("t-{}", player.unique()));
    let mut task = NewTask::text(&id).id(id.clone());
    if later {
        task = task.delay(dice.millis(100, 2500));
    }
    let op = player.log.begin(Call::Push { task: id.clone() });
    let answer = match player.queue.push(task).await {
        Ok(pushed) => Answer::Pushed { tasks: vec![id], incarnation: pushed.incarnation },
        Err(error) => player.unknown("push", &error),
    };
    player.log.end(op, answer);
}

async fn push_bundle(player: &Player, tasks: u32) {
    let new = (0..tasks).map(|n| NewTask::text(&n.to_string())).collect();
    let op = player.log.begin(Call::PushBundle { tasks });
    let answer = match player.queue.push_bundle(new).await {
        Ok(tasks) => Answer::Pushed { tasks, incarnation: None },
        Err(error) => player.unknown("push a bundle", &error),
    };
    player.log.end(op, answer);
}

async fn retry(player: &Player, dice: &mut Dice) {
    let failed = match player.queue.failed(8).await {
        Ok(failed) => failed,
        Err(error) => return player.explain("dead letters", &error),
    };
    if failed.is_empty() {
        return;
    }
    let task = dice.pick(&failed).id.clone();
    let op = player.log.begin(Call::Retry { task: task.clone() });
    let answer = match player.queue.retry(&task).await {
        Ok(true) => Answer::Done,
        Ok(false) => Answer::Nothing,
        Err(error) => player.unknown("retry", &error),
    };
    player.log.end(op, answer);
}

fn worker(player: &Player, until_empty: bool) -> Worker {
    let settings = WorkerSettings {
        poll: Duration::from_millis(700),
        until_empty,
        ..WorkerSettings::named(player.name.clone())
    };
    Worker::new(vec![player.queue.clone()], settings)
}

/// Works on three tasks at a time.
pub async fn work(player: Arc<Player>, dice: Dice) {
    let worker = Arc::new(worker(&player, false));
    let mut callers = tokio::task::JoinSet::new();
    for n in 0..3 {
        let (player, worker, mut dice) = (player.clone(), worker.clone(), dice.clone());
        for _ in 0..n {
            dice = Dice::new(dice.roll(), &[]);
        }
        callers.spawn(async move {
            while !player.stopped() {
                tokio::select! {
                    task = claim(&player, &worker) => match task {
                        Claimed::Task(task) => do_task(&player, &mut dice, *task).await,
                        Claimed::Nothing => player.pause(dice.millis(50, 300)).await,
                    },
                    () = player.stop.cancelled() => return,
                }
            }
        });
    }
    while callers.join_next().await.is_some() {}
}

enum Claimed {
    Task(Box<Task>),
    Nothing,
}

async fn claim(player: &Player, worker: &Worker) -> Claimed {
    let op = player.log.begin(Call::Claim);
    match worker.next().await {
        Ok(Some(task)) => {
            let (id, push) = (task.id().to_owned(), task.incarnation().to_owned());
            player.log.end(op, Answer::Claimed { task: id, token: task.token(), push });
            Claimed::Task(Box::new(task))
        }
        Ok(None) => {
            player.log.end(op, Answer::Nothing);
            Claimed::Nothing
        }
        Err(error) => {
            player.log.end(op, player.unknown("claim", &error));
            Claimed::Nothing
        }
    }
}

async fn do_task(player: &Player, dice: &mut Dice, task: Task) {
    let (id, token) = (task.id().to_owned(), task.token());
    // Now and then for longer than a claim lasts without renewal.
    let (steps, span) = match dice.permille(30) {
        true => (13, player.plan.ttl / 10),
        false => (dice.below(4), dice.millis(5, 80)),
    };
    for _ in 0..steps {
        if !working(player, &task) {
            break;
        }
        tokio::time::sleep(span).await;
    }
    working(player, &task);
    match dice.below(100) {
        0..=79 => ack(player, task).await,
        80..=89 => nack(player, task).await,
        90..=92 => {
            let op = player.log.begin(Call::Fail { task: id, token });
            let answer = match task.fail("by chance").await {
                Ok(()) => Answer::GivenUp,
                Err(error) if error.kind() == ErrorKind::Lost => Answer::Lost,
                Err(error) => player.unknown("fail", &error),
            };
            player.log.end(op, answer);
        }
        93..=95 => {
            // Dropped: given back in the background, at some time.
            player.log.begin(Call::Nack { task: id, token });
            drop(task);
        }
        _ => {
            let op = player.log.begin(Call::Nack { task: id, token });
            let answer = match task.give_back().await {
                Ok(()) => Answer::Done,
                Err(error) if error.kind() == ErrorKind::Lost => Answer::Lost,
                Err(error) => player.unknown("give back", &error),
            };
            player.log.end(op, answer);
        }
    }
}

fn working(player: &Player, task: &Task) -> bool {
    let (id, token) = (task.id().to_owned(), task.token());
    let op = player.log.begin(Call::Working { task: id, token });
    let held = task.check().is_ok();
    player.log.end(op, if held { Answer::Done } else { Answer::Lost });
    held
}

async fn ack(player: &Player, task: Task) {
    let (id, push) = (task.id().to_owned(), task.incarnation().to_owned());
    let op = player.log.begin(Call::Ack { task: id, token: task.token(), push });
    let answer = match task.ack_json(&json!({ "by": player.name })).await {
        Ok(Acked::First) => Answer::First,
        Ok(Acked::Again) => Answer::Again,
        Err(error) => player.unknown("ack", &error),
    };
    player.log.end(op, answer);
}

async fn nack(player: &Player, task: Task) {
    let op = player.log.begin(Call::Nack { task: task.id().to_owned(), token: task.token() });
    let answer = match task.nack("by chance", None).await {
        Ok(true) => Answer::Done,
        Ok(false) => Answer::GivenUp,
        Err(error) if error.kind() == ErrorKind::Lost => Answer::Lost,
        Err(error) => player.unknown("nack", &error),
    };
    player.log.end(op, answer);
}

/// Works until nothing is left, also of what was for later.
pub async fn drain(player: Arc<Player>) {
    loop {
        let worker = Arc::new(worker(&player, true));
        let mut callers = tokio::task::JoinSet::new();
        for _ in 0..4 {
            let (player, worker) = (player.clone(), worker.clone());
            callers.spawn(async move {
                while let Claimed::Task(task) = claim(&player, &worker).await {
                    ack(&player, *task).await;
                }
            });
        }
        while callers.join_next().await.is_some() {}
        match player.queue.status(0).await.map(|status| status.counts) {
            Ok(counts) if counts.free + counts.leased + counts.scheduled == 0 => return,
            Ok(_) => {}
            Err(error) => player.explain("status", &error),
        }
        tokio::time::sleep(Duration::from_millis(300)).await;
        if let Err(error) = player.queue.sweep().await {
            player.explain("sweep", &error);
        }
    }
}
