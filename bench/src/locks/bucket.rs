//! The same on an S3 server: alone beside bare HTTP, in a crowd, and after a kill -9.

use std::time::Instant;

use anyhow::Result;
use bytes::Bytes;
use leasehold_testkit::servers::Server;

use super::contended::race;
use super::takeover::take_over;
use super::{Contestant, Kind};
use crate::bucket::{Place, seaweedfs};
use crate::report::{Report, Row, Target, Unit};
use crate::rig::{BODY, Rig};
use crate::stats::{Pairs, median, percentile};
use crate::store::bucket::bare::Bare;

const FLOOR: &str = "hyper: PUT If-Match and PUT If-Match again, over one connection";
const PROCESSES: usize = 8;

pub fn run(rig: &Rig, report: &mut Report) -> Result<()> {
    let Some(server) = seaweedfs(rig, report, "locks on SeaweedFS")? else { return Ok(()) };
    let ours =
        Contestant { name: "ours", place: Place::on(&server), kind: Kind::Ourselves("ours") };
    rig.runtime()?.block_on(ours.place.open()?.init())?;

    let mut player = ours.player()?;
    let what = format!("rate {}", rig.window().as_secs_f64());
    let (mut rates, before) = (0.0, player.ask("requests")?);
    let pairs = Pairs::measure(
        rig.pairs(),
        || {
            let rate = player.ask(&what)?;
            rates += rate * rig.window().as_secs_f64();
            Ok(rate)
        },
        || bare(rig, &server),
    )?;
    let requests = player.ask("requests")? - before;
    let row = Row::new("lock + release, SeaweedFS", Unit::Rate, pairs, FLOOR);
    let note = format!("{:.2} requests per pair (the floor's 2)", requests / rates);
    report.add(row.target(Target::Ratio(0.9)).note(note));
    drop(player);

    let total = rig.pick(400.0, 100.0);
    let (mut millis, mut shares) = (Vec::new(), Vec::new());
    for _ in 0..rig.pick(3, 1) {
        let (took, share) = race(&ours, PROCESSES, total)?;
        millis.push(took);
        shares.push(share);
    }
    report.fact(
        format!("{total} locked increments, {PROCESSES} processes, SeaweedFS"),
        format!(
            "{:.1} s, {:.1} ms each; smallest share / largest {:.2}, {:.2} at worst",
            median(&millis) / 1e3,
            median(&millis) / total,
            median(&shares),
            percentile(&shares, 0.0)
        ),
    );

    let gaps: Vec<f64> = (0..rig.pick(10, 3)).map(|_| take_over(&ours)).collect::<Result<_>>()?;
    report.fact(
        "takeover after kill -9, same host, SeaweedFS",
        format!(
            "{:.0} ms median, {:.0} ms at most; elsewhere it takes the lock's ttl",
            median(&gaps),
            percentile(&gaps, 1.0)
        ),
    );
    Ok(())
}

/// Pairs per second.
fn bare(rig: &Rig, server: &Server) -> Result<f64> {
    let bare = Bare::new(server)?;
    let (key, body) = ("bare.lock", Bytes::from_static(BODY));
    rig.single_threaded()?.block_on(async {
        let mut connection = bare.connect().await?;
        let mut version = bare.ask(&mut connection, "PUT", key, body.clone(), None, 200).await?;
        let (start, mut writes) = (Instant::now(), 0);
        while start.elapsed() < rig.window() {
            let seen = Some(("if-match", version.as_str()));
            version = bare.ask(&mut connection, "PUT", key, body.clone(), seen, 200).await?;
            writes += 1;
        }
        Ok(f64::from(writes) / 2.0 / start.elapsed().as_secs_f64())
    })
}
