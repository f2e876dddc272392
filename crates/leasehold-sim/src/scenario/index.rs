//! An index: writers, compilers, readers.

use std::sync::Arc;
use std::time::Duration;

use leasehold::index::{
    CompactOptions, Field, Finding, Freshness, Index, IndexSettings, NewIndex, Verified, Width,
};
use leasehold::protocol::shard::Shard;
use leasehold::{Key, StoreTime, Write};
use serde_json::json;

use super::{Ctx, Role, spawn};
use crate::check::index::IndexCheck;
use crate::rng::Rng;
use crate::world::{NodeId, World};

const NAME: &str = "i";

/// An index and what is done with it.
#[derive(Debug, Clone)]
pub struct Records {
    keys: Vec<String>,
    ops: u64,
    /// Over hours.
    long: bool,
    compilers: usize,
}

impl Records {
    /// A small index: a few keys, in two shards.
    pub async fn set_up(
        world: &World,
        ctx: &Ctx,
        rng: &mut Rng,
        long: bool,
    ) -> leasehold::Result<Self> {
        let fields = ["domain:domain", "value"].map(|text| Field::parse(text).expect("a field"));
        let mut new = NewIndex::with_fields(fields.to_vec())?;
        let width = Width::new(1).expect("one digit");
        (new.width, new.flat_inbox) = (width, rng.chance(0.7));
        let index = Index::create(&ctx.store, NAME, new).await?;
        world.state().check.index = IndexCheck::new(&index);
        // Names that fall into two shards.
        let mut keys: Vec<String> = Vec::new();
        let mut shards: Vec<Shard> = Vec::new();
        for n in 0..64 {
            let key = format!("{}{n}.example", ["a", "z"][n % 2]);
            let shard = Shard::of(&key, width);
            if shards.len() < 2 && !shards.contains(&shard) {
                shards.push(shard);
            }
            if shards.contains(&shard) && keys.len() < 4 {
                keys.push(key);
            }
        }
        let ops = if long { rng.between(6, 14) } else { rng.between(3, 8) };
        Ok(Self { keys, ops, long, compilers: rng.between(2, 3) as usize })
    }

    /// Nodes that write, compile and read.
    pub fn spawn(&self, world: &World, rng: &mut Rng) -> Vec<NodeId> {
        let mut nodes = Vec::new();
        for n in 0..2 + self.compilers {
            let records = self.clone();
            let role: Role = Arc::new(move |ctx: Ctx| {
                let records = records.clone();
                Box::pin(async move {
                    match n < 2 {
                        true => records.write(ctx).await,
                        false => records.compile(ctx).await,
                    }
                })
            });
            let name = if n < 2 { format!("writer-{n}") } else { format!("compiler-{}", n - 2) };
            nodes.push(spawn(world, rng, &name, role));
        }
        nodes
    }

    async fn open(&self, ctx: &Ctx) -> Index {
        loop {
            match Index::open(&ctx.store, NAME).await {
                Ok(index) => {
                    let lock_ttl = Duration::from_secs(12);
                    return index
                        .with_settings(IndexSettings { lock_ttl, ..IndexSettings::default() });
                }
                Err(error) => ctx.expected("open", &error),
            }
            ctx.sleep(Duration::from_secs(1)).await;
        }
    }

    async fn pause(&self, ctx: &mut Ctx) {
        let most = if self.long { 3_000_000 } else { 30_000 };
        let pause = ctx.rng.skewed_millis(1, most);
        ctx.sleep(pause).await;
    }

    async fn write(self, mut ctx: Ctx) {
        let index = self.open(&ctx).await;
        for n in 0..self.ops {
            self.pause(&mut ctx).await;
            if ctx.is_over() {
                return;
            }
            let key = ctx.rng.pick(&self.keys).clone();
            let value = format!("{}-{}-{n}", ctx.name, ctx.life.epoch);
            let spelled = match ctx.rng.below(4) {
                0 => format!("{}.", key.to_uppercase()),
                _ => key.clone(),
            };
            let done = match ctx.rng.below(12) {
                0..=3 => {
                    ctx.label("put");
                    index.put(&json!({"domain": spelled, "value": value})).await
                }
                4..=5 => {
                    // A time of its own, which others may have chosen as well.
                    ctx.label("");
                    let now = ctx.world.state().store_time().as_micros();
                    let at = StoreTime::from_micros(now / 20_000_000 * 20_000_000);
                    let at = at.to_string();
                    index.put(&json!({"domain": spelled, "value": value, "updated_at": at})).await
                }
                6..=7 => {
                    ctx.label("put");
                    index.delete(&spelled).await
                }
                8 => {
                    ctx.label("put");
                    let both = self.keys.iter().take(2);
                    index.put_many(both.map(|key| json!({"domain": key, "value": value}))).await
                }
                9 if index.package().flat_inbox => self.drop_file(&ctx, &key, &value).await,
                _ => self.read(&ctx, &index, &key, &spelled).await,
            };
            ctx.label("");
            if let Err(error) = done {
                ctx.expected("write", &error);
            }
        }
    }

    /// Another tool leaves a record beside the inbox.
    async fn drop_file(&self, ctx: &Ctx, key: &str, value: &str) -> leasehold::Result<()> {
        let now = ctx.world.state().store_time();
        let row = format!("{key}\u{1f}{value}\u{1f}{now}\n");
        let key = Key::new(format!("indexes/{NAME}/{key}.usv"))?;
        ctx.note(|| format!("leaves {key}"));
        ctx.store.put(&key, row.into(), Write::any()).await.map(drop)
    }

    async fn read(
        &self,
        ctx: &Ctx,
        index: &Index,
        key: &str,
        spelled: &str,
    ) -> leasehold::Result<()> {
        let since = ctx.now();
        let row = index.get_row(spelled, Freshness::Checked).await?;
        ctx.note(|| {
            let row = row.as_ref().map(|row| String::from_utf8_lossy(row).replace('\u{1f}', "|"));
            format!("reads {key}: {row:?}")
        });
        ctx.hold(|state| match &state.check.index {
            Some(check) => check.read_by(since, key, row.as_deref()),
            None => Ok(()),
        });
        Ok(())
    }

    async fn compile(self, mut ctx: Ctx) {
        let index = self.open(&ctx).await;
        for _ in 0..self.ops {
            self.pause(&mut ctx).await;
            if ctx.is_over() {
                return;
            }
            let options = CompactOptions {
                lock: ctx.rng.chance(0.6),
                rewrite: ctx.rng.chance(0.1),
                parallel: ctx.rng.between(1, 2) as usize,
                worker: ctx.name.clone(),
                ..CompactOptions::default()
            };
            let purge = self.long && ctx.rng.chance(0.4);
            let passed = match ctx.rng.below(10) {
                _ if purge => {
                    ctx.label("purge");
                    index.purge(Duration::from_secs(7200), false, &options).await.map(Some)
                }
                0 => {
                    let verified = index.verify().await;
                    match verified {
                        Ok(verified) => {
                            if let Some(found) = accusation(&verified) {
                                ctx.hold(|_| Err(format!("verify: {}", found.what)));
                            }
                            Ok(None)
                        }
                        Err(error) => Err(error),
                    }
                }
                1..=2 => {
                    let key = ctx.rng.pick(&self.keys).clone();
                    self.read(&ctx, &index, &key, &key).await.map(|()| None)
                }
                _ => index.compact_with(&options).await.map(Some),
            };
            ctx.label("");
            match passed {
                Ok(Some(pass)) => ctx.note(|| {
                    let done = pass.shards.iter().map(|done| format!("{:?}", done.outcome));
                    format!("compacted: {}", done.collect::<Vec<_>>().join(", "))
                }),
                Ok(None) => {}
                Err(error) => ctx.expected("compact", &error),
            }
        }
    }

    /// Once trouble is over, the inbox empties, and the latest of all records count.
    pub async fn finish(&self, world: &World, ctx: &Ctx) -> Result<(), String> {
        let index = self.open(ctx).await;
        for _ in 0..20 {
            let options = CompactOptions { worker: ctx.name.clone(), ..CompactOptions::default() };
            let pass = index.compact_with(&options).await;
            let pass = pass.and_then(leasehold::index::Pass::into_result);
            pass.map_err(|error| format!("compact: {error}"))?;
            let left = {
                let state = world.state();
                state.check.index.as_ref().and_then(|check| check.leftovers(&state))
            };
            if left.is_none() {
                break;
            }
            world.sleep(Duration::from_secs(10)).await;
        }
        let verified = index.verify().await.map_err(|error| format!("verify: {error}"))?;
        if let Some(found) = accusation(&verified) {
            return Err(format!("verify: {}", found.what));
        }
        for key in &self.keys {
            self.read(ctx, &index, key, key).await.map_err(|error| format!("read: {error}"))?;
        }
        let state = world.state();
        let Some(check) = &state.check.index else { return Ok(()) };
        if let Some(left) = check.leftovers(&state) {
            return Err(format!("the inbox does not empty: {left} is still there"));
        }
        check.at_the_end(&state)
    }
}

/// What verify finds wrong. Statistics of a compiler that died may land after a purge by another that died
/// before it noted its own: then rows seem to be missing that nobody misses. Each row that leaves a shard is
/// judged when it does, so nothing is overlooked for it.
fn accusation(verified: &Verified) -> Option<&Finding> {
    let late = |finding: &Finding| finding.what.contains("nobody noted where");
    verified.findings.iter().find(|finding| finding.grave && !late(finding))
}
