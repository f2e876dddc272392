//! Reads and writes USV in memory.

use std::time::Instant;

use anyhow::Result;
use leasehold::protocol::format::usv;

use super::data;
use crate::report::{Report, Row, Target, Unit};
use crate::rig::Rig;
use crate::stats::Pairs;

pub fn run(rig: &Rig, report: &mut Report) -> Result<()> {
    let size = data::Size { records: 1_000_000, updates: 400_000 };
    let text: String = data::updates(size).map(|(_, row)| row).collect();
    let bytes = text.as_bytes();
    let fields: Vec<&str> = text.lines().flat_map(|line| line.split('\u{1f}')).collect();
    let per_second = |start: Instant| bytes.len() as f64 / start.elapsed().as_secs_f64() / 1e6;
    let bare = || {
        let start = Instant::now();
        std::hint::black_box(memchr::memchr2_iter(usv::UNIT, usv::END, bytes).count());
        Ok(per_second(start))
    };
    let parse = Pairs::measure(
        rig.pairs(),
        || {
            let start = Instant::now();
            let mut sum = 0;
            for row in usv::rows(bytes) {
                for field in usv::fields(row) {
                    sum += field.len();
                }
            }
            std::hint::black_box(sum);
            Ok(per_second(start))
        },
        bare,
    )?;
    let row =
        Row::new("USV, read every field (MB)", Unit::Rate, parse, "memchr2 over the same bytes");
    report.add(row.target(Target::Rate(1000.0)));
    let rows = Pairs::measure(
        rig.pairs(),
        || {
            let start = Instant::now();
            let mut sum = 0;
            for row in usv::rows(bytes) {
                sum += usv::first_field(row).len();
            }
            std::hint::black_box(sum);
            Ok(per_second(start))
        },
        bare,
    )?;
    let row =
        Row::new("USV, read rows and keys (MB)", Unit::Rate, rows, "memchr2 over the same bytes");
    report.add(row.target(Target::Rate(1000.0)));
    let mut out = Vec::with_capacity(bytes.len() * 2);
    let mut copy = Vec::with_capacity(bytes.len() * 2);
    let write = Pairs::measure(
        rig.pairs(),
        || {
            let start = Instant::now();
            out.clear();
            for row in fields.chunks(5) {
                for (at, field) in row.iter().enumerate() {
                    if at > 0 {
                        out.push(usv::UNIT);
                    }
                    usv::escape(field, &mut out);
                }
                out.push(usv::END);
            }
            anyhow::ensure!(out == bytes);
            Ok(per_second(start))
        },
        || {
            let start = Instant::now();
            copy.clear();
            for field in &fields {
                copy.extend_from_slice(field.as_bytes());
                copy.push(usv::UNIT);
            }
            std::hint::black_box(&copy);
            Ok(per_second(start))
        },
    )?;
    let row = Row::new("USV, write (MB)", Unit::Rate, write, "the same fields, copied");
    report.add(row.target(Target::Rate(800.0)));
    Ok(())
}
