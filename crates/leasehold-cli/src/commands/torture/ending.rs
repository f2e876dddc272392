//! What is there in the end, without faults and without anybody else.

use std::time::Duration;

use leasehold::index::{Index, Outcome};
use leasehold::protocol::layout::queue::QueueKeys;
use leasehold::queue::{DeadLetter, Queue, Receipt};
use leasehold::store::List;
use leasehold::{Key, Store};

use super::log::{Log, Observed, Said};
use super::plan::Plan;

/// How long it may take until nothing is left.
const PATIENCE: Duration = Duration::from_secs(60);

/// Cleans up as anybody may, and writes down what is there.
pub async fn observe(plan: &Plan, queue: &Queue, index: &Index, log: &Log) -> anyhow::Result<()> {
    let see = |observed: Observed| log.say(Said::Observed(observed));
    let keys = QueueKeys::new(queue.name(), queue.settings().shards)?;
    // Leases without a task, which a worker left that was killed, go once their ttl is over.
    let deadline = log.now() + PATIENCE.as_nanos() as u64;
    queue.sweep().await?;
    let mut left = leftovers(queue.store(), &keys).await?;
    while !left.is_empty() && log.now() < deadline {
        tokio::time::sleep(plan.ttl / 2).await;
        queue.sweep().await?;
        left = leftovers(queue.store(), &keys).await?;
    }
    left.into_iter().for_each(|key| see(Observed::Left { key: key.to_string() }));
    for key in all(queue.store(), &keys.completed()).await? {
        let Some(object) = queue.store().get(&key).await? else { continue };
        let id = keys.parse_record(key.as_str()).unwrap_or_else(|| key.to_string());
        match Receipt::parse(&object.body) {
            Ok(receipt) => see(Observed::Receipt {
                id,
                incarnation: receipt.incarnation,
                token: receipt.token,
                results: receipt.results.map(|all| all.iter().map(Option::is_some).collect()),
            }),
            Err(error) => log.say(Said::Odd(format!("{key}: {error}"))),
        }
    }
    for key in all(queue.store(), &keys.failed()).await? {
        let Some(object) = queue.store().get(&key).await? else { continue };
        let id = keys.parse_record(key.as_str()).unwrap_or_else(|| key.to_string());
        match DeadLetter::parse(&object.body) {
            Ok(letter) => {
                see(Observed::DeadLetter { id, incarnation: letter.task.incarnation });
            }
            Err(error) => log.say(Said::Odd(format!("{key}: {error}"))),
        }
    }
    observe_index(plan, index, log).await
}

async fn observe_index(plan: &Plan, index: &Index, log: &Log) -> anyhow::Result<()> {
    // A shard whose compiler was killed a moment ago is still leased.
    for _ in 0..6 {
        let pass = index.compact().await?;
        if pass.count(|outcome| matches!(outcome, Outcome::Locked { .. })) == 0 {
            break;
        }
        tokio::time::sleep(plan.too_long() / 2).await;
    }
    let status = index.status(false).await?;
    let objects = status.total().inbox_objects;
    log.say(Said::Observed(Observed::Inbox { objects }));
    let verified = index.verify().await?;
    let grave = verified.findings.iter().filter(|finding| finding.grave);
    let mut findings: Vec<String> =
        grave.map(|finding| format!("shard {}: {}", finding.shard, finding.what)).collect();
    if status.quarantined > 0 {
        findings.push(format!("{} records are in quarantine", status.quarantined));
    }
    let (shards, rows) = (verified.shards, verified.rows);
    log.say(Said::Observed(Observed::Verified { shards, rows, findings }));
    Ok(())
}

/// Objects of tasks that should have come to their end.
async fn leftovers(store: &Store, keys: &QueueKeys) -> anyhow::Result<Vec<Key>> {
    let mut left = Vec::new();
    for prefix in [keys.all_pending(), keys.bundles(), keys.scheduled()] {
        left.extend(all(store, &prefix).await?);
    }
    Ok(left)
}

/// All keys with this prefix.
pub async fn all(store: &Store, prefix: &str) -> anyhow::Result<Vec<Key>> {
    let mut keys = Vec::new();
    let mut listing = store.list(List::prefix(prefix)?);
    while let Some(page) = listing.next_page().await? {
        keys.extend(page.entries.into_iter().map(|entry| entry.key));
    }
    Ok(keys)
}
