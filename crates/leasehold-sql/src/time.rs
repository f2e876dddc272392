//! Times in comparisons: whatever their spelling, they are compared as times.
//!
//! SQLite has no type for them, and compares texts byte by byte: `2026-01-31T09:05:00.000000Z`, as records
//! have it, with `2026-01-31 09:05:00`, which `datetime('now')` gives. So columns of datetimes have a
//! collation, which counts wherever SQLite compares, sorts or groups them.

use std::cmp::Ordering;

use leasehold::protocol::format::row;

/// The name of the collation.
pub const COLLATION: &str = "leasehold_time";

/// Which of two texts comes first. What is not a time comes after all times, nothing at all before them.
pub fn compare(one: &str, other: &str) -> Ordering {
    // As records have it, which is most of what is compared.
    if is_usual(one) && is_usual(other) {
        return one.cmp(other);
    }
    place(one).cmp(&place(other))
}

fn is_usual(text: &str) -> bool {
    text.len() == 27 && text.as_bytes()[10] == b'T' && text.ends_with('Z')
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Place<'a> {
    Empty,
    Time(i64),
    Other(&'a str),
}

fn place(text: &str) -> Place<'_> {
    match (text.is_empty(), micros(text)) {
        (true, _) => Place::Empty,
        (false, Some(micros)) => Place::Time(micros),
        (false, None) => Place::Other(text),
    }
}

/// A time in any spelling that SQLite's functions or people use: without a zone it is UTC, what is left out
/// at the end is the earliest that it can be.
fn micros(text: &str) -> Option<i64> {
    const EARLIEST: &str = "0000-01-01T00:00:00Z";
    let text = text.trim();
    // What `unixepoch()` gives.
    if (9..=11).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit()) {
        return text.parse::<i64>().ok()?.checked_mul(1_000_000);
    }
    let mut full = text.to_owned();
    if full.as_bytes().get(10) == Some(&b' ') {
        full.replace_range(10..11, "T");
    }
    if let Some(micros) = row::micros(full.as_bytes()) {
        return Some(micros);
    }
    full.push_str(match full.len() {
        length @ (4 | 7 | 10 | 13 | 16) => &EARLIEST[length..],
        _ => "Z",
    });
    row::micros(full.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spellings_of_one_time_are_equal() {
        for text in [
            "2026-01-31T09:05:00.000000Z",
            "2026-01-31T09:05:00Z",
            "2026-01-31 09:05:00",
            "2026-01-31 09:05",
            "2026-01-31T09:05:00.000",
            "2026-01-31T10:05:00+01:00",
            "2026-01-31 10:05:00+01:00",
            " 2026-01-31 09:05:00 ",
            "1769850300",
        ] {
            assert_eq!(compare(text, "2026-01-31T09:05:00.000000Z"), Ordering::Equal, "{text}");
        }
    }

    /// One order for all texts, or SQLite's sorting would depend on where it begins.
    #[test]
    fn everything_has_its_place() {
        let texts = [
            "",
            "2025",
            "2026-01-31T08:05:00.000000Z",
            "2026-01-31T10:00:00+01:00",
            "2026-01-31 09:05:00",
            "2026-01-31T09:05:00.000001Z",
            "2026-01-31 23",
            "2026-02",
            "9999-01-01",
            "2026-02-30",
            "tomorrow",
            "ü日本語日本語日本語",
        ];
        for (at, one) in texts.iter().enumerate() {
            for (other_at, other) in texts.iter().enumerate() {
                assert_eq!(compare(one, other), at.cmp(&other_at), "{one} and {other}");
            }
        }
    }
}
