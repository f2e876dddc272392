//! Locks, registers, and files under locks.

use std::sync::Arc;
use std::time::Duration;

use leasehold::lock::{Guard, Lock};
use leasehold::scratchpad::{Locked, Scratchpad};
use leasehold::store::{Durability, Put};
use leasehold::{ErrorKind, Key, Proof, When, Write};
use serde_json::json;

use super::super::log::{Answer, Call, Said, Value};
use super::super::plan::{Dice, files, locks, registers};
use super::Player;

/// Takes locks, asks whether they are its own, and lets go: or holds one for longer than its ttl, or
/// forgets it.
pub async fn play_locks(player: Arc<Player>, mut dice: Dice) {
    let holder = player.unique();
    while !player.stopped() {
        let name = dice.pick(&locks()).clone();
        let patience = dice.millis(0, 1500);
        let Some(guard) = acquire(&player, &name, &holder, patience).await else {
            player.pause(dice.millis(10, 200)).await;
            continue;
        };
        let long = dice.permille(60);
        let checks = if long { 15 } else { 1 + dice.below(5) };
        let span = if long { player.plan.ttl / 10 } else { dice.millis(2, 100) };
        for _ in 0..checks {
            if player.stopped() || !check(&player, &name, &guard) {
                break;
            }
            tokio::time::sleep(span).await;
        }
        check(&player, &name, &guard);
        let op = player.log.begin(Call::Release { lock: name, token: guard.token() });
        if dice.permille(80) {
            // Released in the background, at some time.
            drop(guard);
        } else {
            release(&player, op, guard.release().await);
        }
        player.pause(dice.millis(0, 120)).await;
    }
}

async fn acquire(player: &Player, name: &str, holder: &str, patience: Duration) -> Option<Guard> {
    let lock = match Lock::named(&player.store, name, holder, player.plan.lock_settings()) {
        Ok(lock) => lock,
        Err(error) => {
            player.log.say(Said::Odd(format!("lock {name}: {error:?}")));
            return None;
        }
    };
    let op = player.log.begin(Call::Acquire { lock: name.to_owned() });
    match lock.acquire_timeout(patience).await {
        Ok(guard) => {
            player.log.end(op, Answer::Acquired { token: guard.token() });
            Some(guard)
        }
        Err(error) if error.kind() == ErrorKind::Held => {
            player.log.end(op, Answer::Held);
            None
        }
        Err(error) => {
            player.log.end(op, player.unknown("acquire", &error));
            None
        }
    }
}

fn check(player: &Player, name: &str, guard: &Guard) -> bool {
    let op = player.log.begin(Call::Check { lock: name.to_owned(), token: guard.token() });
    let held = guard.check().is_ok();
    player.log.end(op, if held { Answer::Done } else { Answer::Lost });
    held
}

fn release(player: &Player, op: u64, released: leasehold::Result<()>) {
    let answer = match released {
        Ok(()) => Answer::Done,
        Err(error) if error.kind() == ErrorKind::Lost => Answer::Lost,
        Err(error) => player.unknown("release", &error),
    };
    player.log.end(op, answer);
}

/// Reads registers and swaps what they hold for something new.
pub async fn play_registers(player: Arc<Player>, mut dice: Dice) {
    while !player.stopped() {
        let register = dice.pick(&registers()).clone();
        let Ok(key) = Key::new(register.clone()) else { return };
        if let Some((value, when)) = read(&player, &register, &key).await
            && dice.permille(800)
        {
            player.pause(dice.millis(0, 15)).await;
            swap(&player, register, &key, value, when).await;
        }
        player.pause(dice.millis(5, 120)).await;
    }
}

async fn read(player: &Player, register: &str, key: &Key) -> Option<(Option<Value>, When)> {
    let op = player.log.begin(Call::Read { register: register.to_owned() });
    match player.store.get(key).await {
        Ok(object) => {
            let value = object.as_ref().map(|object| parse(player, &object.body));
            player.log.end(op, Answer::Value { value: value.clone() });
            let when = object.map_or(When::Absent, |object| When::Matches(object.meta.version));
            Some((value, when))
        }
        Err(error) => {
            player.log.end(op, player.unknown("read", &error));
            None
        }
    }
}

fn parse(player: &Player, body: &[u8]) -> Value {
    serde_json::from_slice(body).unwrap_or_else(|_| {
        let body = String::from_utf8_lossy(body);
        player.log.say(Said::Odd(format!("a register holds {body:?}")));
        Value { n: 0, by: "nobody".to_owned(), token: 0 }
    })
}

fn next(player: &Player, from: &Option<Value>, token: u64) -> Value {
    let n = from.as_ref().map_or(0, |value| value.n) + 1;
    Value { n, by: player.unique(), token }
}

async fn swap(player: &Player, register: String, key: &Key, from: Option<Value>, when: When) {
    let to = next(player, &from, 0);
    let nonce = player.store.env().nonce();
    let body = json!({ "n": to.n, "by": to.by, "nonce": nonce.to_string() }).to_string();
    let write = Write::when(when, Proof::Nonce(nonce)).durability(Durability::Volatile);
    let op = player.log.begin(Call::Swap { register, from, to });
    let answer = match player.store.put(key, body.into(), write).await {
        Ok(Put::Stored(_)) => Answer::Done,
        Ok(Put::Refused) => Answer::Refused,
        Ok(Put::Contended) => Answer::Nothing,
        Ok(Put::Unknown(unknown)) => Answer::Unknown { error: unknown.error().to_string() },
        Err(error) => player.unknown("swap", &error),
    };
    player.log.end(op, answer);
}

/// Changes files under their locks.
pub async fn play_files(player: Arc<Player>, mut dice: Dice) {
    let Ok(pad) = Scratchpad::on(&player.store, player.unique()) else { return };
    let pad = pad.with_settings(player.plan.lock_settings());
    while !player.stopped() {
        let file = dice.pick(&files()).clone();
        if let Some(locked) = lock_file(&player, &pad, &file).await {
            change(&player, &mut dice, &file, locked).await;
        }
        player.pause(dice.millis(10, 200)).await;
    }
}

async fn lock_file<'a>(player: &Player, pad: &'a Scratchpad, file: &str) -> Option<Locked<'a>> {
    let op = player.log.begin(Call::Acquire { lock: file.to_owned() });
    match pad.lock(file).await {
        Ok(locked) => {
            player.log.end(op, Answer::Acquired { token: locked.token() });
            Some(locked)
        }
        Err(error) if error.kind() == ErrorKind::Held => {
            player.log.end(op, Answer::Held);
            None
        }
        Err(error) => {
            player.log.end(op, player.unknown("lock a file", &error));
            None
        }
    }
}

async fn change(player: &Player, dice: &mut Dice, file: &str, mut locked: Locked<'_>) {
    let token = locked.token();
    for _ in 0..=dice.below(2) {
        let op = player.log.begin(Call::Read { register: file.to_owned() });
        let from = match locked.read_bytes().await {
            Ok(body) => body.map(|body| parse(player, &body)),
            Err(error) => {
                player.log.end(op, player.unknown("read a file", &error));
                break;
            }
        };
        player.log.end(op, Answer::Value { value: from.clone() });
        // Long enough now and then to be robbed on the way.
        let pause = if dice.permille(30) { player.plan.ttl } else { dice.millis(0, 40) };
        tokio::time::sleep(pause).await;
        let to = next(player, &from, token);
        let body = json!({ "n": to.n, "by": to.by, "token": to.token }).to_string();
        let op = player.log.begin(Call::Swap { register: file.to_owned(), from, to });
        let answer = match locked.write_bytes(body).await {
            Ok(()) => Answer::Done,
            Err(error) if error.kind() == ErrorKind::Lost => Answer::Nothing,
            Err(error) => player.unknown("write a file", &error),
        };
        let done = answer == Answer::Done;
        player.log.end(op, answer);
        if !done {
            break;
        }
    }
    let op = player.log.begin(Call::Release { lock: file.to_owned(), token });
    release(player, op, locked.release().await);
}

/// Each lock can be had, and each register be read.
pub async fn drain(player: Arc<Player>) {
    let patience = player.plan.too_long() * 2 + Duration::from_secs(20);
    for name in locks() {
        match acquire(&player, &name, &player.unique(), patience).await {
            Some(guard) => {
                check(&player, &name, &guard);
                let op = player.log.begin(Call::Release { lock: name, token: guard.token() });
                release(&player, op, guard.release().await);
            }
            None => player.log.say(Said::Odd(format!("{name} cannot be had in the end"))),
        }
    }
    let Ok(pad) = Scratchpad::on(&player.store, player.unique()) else { return };
    let mut settings = player.plan.lock_settings();
    settings.timeout = patience;
    let pad = pad.with_settings(settings);
    for file in files() {
        match lock_file(&player, &pad, &file).await {
            Some(locked) => change(&player, &mut Dice::new(0, &[]), &file, locked).await,
            None => player.log.say(Said::Odd(format!("{file} cannot be locked in the end"))),
        }
    }
    for register in registers() {
        if let Ok(key) = Key::new(register.clone()) {
            read(&player, &register, &key).await;
        }
    }
}
