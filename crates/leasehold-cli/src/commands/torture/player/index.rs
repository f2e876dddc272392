//! Putting, deleting, looking up and compacting.

use std::sync::Arc;
use std::time::Duration;

use leasehold::StoreTime;
use leasehold::index::CompactOptions;
use serde_json::{Map, Value, json};

use super::super::log::{Answer, Call, Record, Said};
use super::super::plan::{Dice, keys};
use super::Player;

/// Puts records and deletions, one by one or several together. They name their own times, which are
/// not always the latest and sometimes equal, so that what counts is known by rule.
pub async fn write(player: Arc<Player>, mut dice: Dice) {
    while !player.stopped() {
        let Ok(now) = player.store.now().await else {
            player.pause(dice.millis(50, 200)).await;
            continue;
        };
        let many = if dice.permille(150) { 4 } else { 1 };
        let mut records: Vec<(String, Record)> = Vec::new();
        for _ in 0..many {
            let now = now.as_micros();
            let time = match dice.below(10) {
                0..=4 => now,
                5..=7 => now - now.rem_euclid(200_000),
                _ => now - dice.below(3_000_000) as i64,
            };
            let deleted = dice.permille(150);
            let record = Record { time, deleted, value: player.unique() };
            records.push((dice.pick(&keys()).clone(), record));
        }
        put(&player, records).await;
        player.pause(dice.millis(30, 250)).await;
    }
}

async fn put(player: &Player, records: Vec<(String, Record)>) {
    let rows: Vec<Value> = records
        .iter()
        .map(|(key, record)| {
            let time = StoreTime::from_micros(record.time).to_string();
            match record.deleted {
                false => json!({ "key": key, "value": record.value, "updated_at": time }),
                true => json!({
                    "key": key, "value": record.value, "updated_at": time, "_deleted": true,
                }),
            }
        })
        .collect();
    let begin = |(key, record)| player.log.begin(Call::Put { key, record });
    let ops: Vec<u64> = records.into_iter().map(begin).collect();
    let answer = match player.index.put_many(&rows).await {
        Ok(()) => Answer::Done,
        Err(error) => player.unknown("put", &error),
    };
    for op in ops {
        player.log.end(op, answer.clone());
    }
}

/// Looks records up.
pub async fn read(player: Arc<Player>, mut dice: Dice) {
    while !player.stopped() {
        let key = dice.pick(&keys()).clone();
        get(&player, &key).await;
        player.pause(dice.millis(20, 200)).await;
    }
}

async fn get(player: &Player, key: &str) {
    let op = player.log.begin(Call::Get { key: key.to_owned() });
    let answer = match player.index.get_json(key).await {
        Ok(found) => Answer::Found { record: found.map(|found| record(player, &found)) },
        Err(error) => player.unknown("get", &error),
    };
    player.log.end(op, answer);
}

fn record(player: &Player, found: &Map<String, Value>) -> Record {
    let text = |name: &str| found.get(name).and_then(Value::as_str).unwrap_or_default().to_owned();
    let time = text("updated_at").parse::<StoreTime>().map(StoreTime::as_micros);
    let time = time.unwrap_or_else(|_| {
        player.log.say(Said::Odd(format!("a record is {found:?}")));
        0
    });
    Record { time, deleted: false, value: text("value") }
}

/// Compacts all the time, now and then without the lease that saves work.
pub async fn compact(player: Arc<Player>, mut dice: Dice) {
    while !player.stopped() {
        player.pause(dice.millis(500, 3000)).await;
        compact_once(&player, dice.permille(700)).await;
    }
}

async fn compact_once(player: &Player, lock: bool) -> bool {
    let options =
        CompactOptions { lock, parallel: 4, worker: player.unique(), ..CompactOptions::default() };
    let op = player.log.begin(Call::Compact);
    match player.index.compact_with(&options).await {
        Ok(pass) => {
            player.log.end(op, Answer::Done);
            for (_, error) in &pass.failed {
                player.explain("compact", error);
            }
            pass.failed.is_empty()
        }
        Err(error) => {
            player.log.end(op, player.unknown("compact", &error));
            false
        }
    }
}

/// Takes in what is there, and looks everything up.
pub async fn drain(player: Arc<Player>) {
    for _ in 0..10 {
        if compact_once(&player, true).await {
            break;
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    for key in keys() {
        get(&player, &key).await;
    }
}
