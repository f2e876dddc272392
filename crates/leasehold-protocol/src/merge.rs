//! Which of two records of one key counts: the latest.
//!
//! Equal times are decided by what the records say, never by the order in which they were found, so
//! that every compiler gets the same bytes (FIELD.md row 13): a deletion wins, then the larger
//! content. That makes merging commutative, associative and idempotent.

use std::cmp::Ordering;

use crate::format::usv;
use crate::mutant::{self, Mutant};

/// What decides between two records of one key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Claim<'a> {
    /// When it was written, in microseconds since 1970.
    pub updated_at: i64,
    /// Whether it is a deletion.
    pub deleted: bool,
    /// Its row.
    pub row: &'a [u8],
}

impl Claim<'_> {
    /// `Greater` if this one counts, `Equal` if they are the same record.
    pub fn against(&self, other: &Claim<'_>) -> Ordering {
        if mutant::is(Mutant::EqualTimes) {
            return self.updated_at.cmp(&other.updated_at);
        }
        self.updated_at
            .cmp(&other.updated_at)
            .then(self.deleted.cmp(&other.deleted))
            .then_with(|| usv::unpadded(self.row).cmp(usv::unpadded(other.row)))
    }
}

/// The sum of the hashes of a shard's rows, modulo 2¹²⁸: does not depend on their order, and a row
/// can be added or taken out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Digest(pub u128);

impl Digest {
    /// Of one row. Padding does not count.
    pub fn of(row: &[u8]) -> Self {
        Self(xxhash_rust::xxh3::xxh3_128(usv::unpadded(row)))
    }

    /// Both together.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self(self.0.wrapping_add(other.0))
    }

    /// Without the other.
    #[must_use]
    pub fn minus(self, other: Self) -> Self {
        Self(self.0.wrapping_sub(other.0))
    }
}

impl std::fmt::Display for Digest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl std::str::FromStr for Digest {
    type Err = std::num::ParseIntError;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        u128::from_str_radix(text, 16).map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn latest<'a>(a: Claim<'a>, b: Claim<'a>) -> Claim<'a> {
        if a.against(&b).is_ge() { a } else { b }
    }

    #[test]
    fn the_latest_counts_then_a_deletion_then_the_larger() {
        let old = Claim { updated_at: 1, deleted: true, row: b"z" };
        let new = Claim { updated_at: 2, deleted: false, row: b"a" };
        assert_eq!(latest(old, new), new);
        let gone = Claim { updated_at: 2, deleted: true, row: b"" };
        assert_eq!(latest(new, gone), gone);
        let larger = Claim { updated_at: 2, deleted: false, row: b"b" };
        assert_eq!(latest(new, larger), larger);
        let padded = Claim { row: b"a\x1f\x1f", ..new };
        assert_eq!(padded.against(&new), Ordering::Equal);
    }

    fn claim() -> impl Strategy<Value = (i64, bool, Vec<u8>)> {
        // Few values, so that ties are common.
        (
            0i64..3,
            any::<bool>(),
            prop::collection::vec(prop::sample::select(b"ab\x1f".to_vec()), 0..4),
        )
    }

    proptest! {
        #[test]
        fn merging_has_no_order(a in claim(), b in claim(), c in claim()) {
            let claims = [&a, &b, &c].map(|(updated_at, deleted, row)| Claim {
                updated_at: *updated_at, deleted: *deleted, row: usv::unpadded(row),
            });
            let [a, b, c] = claims;
            prop_assert_eq!(latest(a, b), latest(b, a));
            prop_assert_eq!(latest(latest(a, b), c), latest(a, latest(b, c)));
            prop_assert_eq!(latest(a, a), a);
        }

        #[test]
        fn digests_add_up(rows in prop::collection::vec(any::<Vec<u8>>(), 0..8)) {
            let sum = |rows: &[Vec<u8>]| {
                rows.iter().fold(Digest::default(), |sum, row| sum.plus(Digest::of(row)))
            };
            let mut reversed = rows.clone();
            reversed.reverse();
            prop_assert_eq!(sum(&rows), sum(&reversed));
            if let Some((last, before)) = rows.split_last() {
                prop_assert_eq!(sum(&rows).minus(Digest::of(last)), sum(before));
            }
            prop_assert_eq!(sum(&rows).to_string().parse(), Ok(sum(&rows)));
        }
    }
}
