//! Which shard a key belongs to.
//!
//! The first hexadecimal digits of the SHA-256 of the key, as
//! `hashlib.sha256(key.encode()).hexdigest()[:2]` gives them. Keys that are declared to be domains
//! are normalised first: `Example.com` and `example.com.` would otherwise be two records in two
//! shards (FIELD.md row 18).

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use sha2::{Digest as _, Sha256};

use crate::format::usv;

/// How many hexadecimal digits name a shard: 1 to 4, for 16 to 65,536 shards. Fixed when an index is
/// made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Width(u8);

impl Width {
    /// 256 shards.
    pub const USUAL: Self = Self(2);

    /// This many digits, or `None` where that is too few or too many.
    pub fn new(digits: u8) -> Option<Self> {
        (1..=4).contains(&digits).then_some(Self(digits))
    }

    /// How many digits.
    pub fn digits(self) -> u8 {
        self.0
    }

    /// How many shards.
    pub fn shards(self) -> u32 {
        16_u32.pow(u32::from(self.0))
    }

    /// All shards, in order.
    pub fn all(self) -> impl DoubleEndedIterator<Item = Shard> + ExactSizeIterator {
        (0..self.shards() as usize).map(move |number| Shard { number: number as u16, width: self })
    }
}

/// A shard, written as its digits: `5e`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shard {
    number: u16,
    width: Width,
}

impl Shard {
    /// The shard with this number.
    pub fn new(number: u32, width: Width) -> Option<Self> {
        (number < width.shards()).then_some(Self { number: number as u16, width })
    }

    /// The shard of a key that is normalised already.
    pub fn of(key: &str, width: Width) -> Self {
        KeyHash::of(key).shard(width)
    }

    /// Its number.
    pub fn number(self) -> u32 {
        u32::from(self.number)
    }

    /// How many digits it is written with.
    pub fn width(self) -> Width {
        self.width
    }
}

impl PartialOrd for Shard {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Shard {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.width.0, self.number).cmp(&(other.width.0, other.number))
    }
}

impl fmt::Display for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:0width$x}", self.number, width = self.width.0 as usize)
    }
}

/// The text is not the name of a shard.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a shard, like 5e: {0:?}")]
pub struct ShardError(String);

impl FromStr for Shard {
    type Err = ShardError;

    fn from_str(text: &str) -> Result<Self, ShardError> {
        let bad = || ShardError(text.to_owned());
        // One spelling only: lower case, no sign.
        if !text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')) {
            return Err(bad());
        }
        let width = u8::try_from(text.len()).ok().and_then(Width::new).ok_or_else(bad)?;
        let number = u16::from_str_radix(text, 16).map_err(|_| bad())?;
        Ok(Self { number, width })
    }
}

/// The SHA-256 of a key.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct KeyHash([u8; 32]);

impl KeyHash {
    /// Of a key that is normalised already.
    pub fn of(key: &str) -> Self {
        Self(Sha256::digest(key.as_bytes()).into())
    }

    /// Of the key in this field of a row.
    pub fn of_field(field: &[u8]) -> Self {
        Self::of(&usv::unescape(&String::from_utf8_lossy(field)))
    }

    /// The shard that it falls into.
    pub fn shard(&self, width: Width) -> Shard {
        let first = u16::from_be_bytes([self.0[0], self.0[1]]);
        Shard { number: first >> (16 - 4 * u32::from(width.0)), width }
    }

    /// Its first 64 bits.
    pub fn number(&self) -> i64 {
        let mut first = [0; 8];
        first.copy_from_slice(&self.0[..8]);
        i64::from_be_bytes(first)
    }

    /// Its first 16 digits: how the names of inbox objects begin.
    pub fn short(&self) -> String {
        format!("{:016x}", self.number())
    }
}

impl fmt::Debug for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.short())
    }
}

/// Why a text is not a domain.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a domain: {0:?}")]
pub struct DomainError(String);

/// The one spelling of a domain: lower case, no dot at the end, IDN as ASCII (`xn--…`).
pub fn normalise_domain(text: &str) -> Result<Cow<'_, str>, DomainError> {
    let plain = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'.' | b'-' | b'_');
    let tidy = !text.is_empty() && !text.starts_with('.') && !text.ends_with('.');
    if tidy && text.bytes().all(plain) && !text.contains("..") && !text.contains("xn--") {
        return Ok(Cow::Borrowed(text));
    }
    let bad = || DomainError(text.to_owned());
    let trimmed = text.strip_suffix('.').unwrap_or(text);
    let ascii = idna::domain_to_ascii(trimmed).map_err(|_| bad())?;
    let tidy = !ascii.is_empty() && !ascii.starts_with('.') && !ascii.ends_with('.');
    match tidy && ascii.bytes().all(plain) && !ascii.contains("..") {
        true => Ok(Cow::Owned(ascii)),
        false => Err(bad()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// From `hashlib.sha256(key.encode()).hexdigest()[:2]`.
    #[test]
    fn shards_agree_with_python() {
        for (key, shard) in [
            ("example.com", "a3"),
            ("google.com", "d4"),
            ("", "e3"),
            ("a", "ca"),
            ("xn--bcher-kva.example", "97"),
            ("Zürich/2", "19"),
            ("日本語", "77"),
            ("a\nb", "7e"),
        ] {
            assert_eq!(Shard::of(key, Width::USUAL).to_string(), shard, "{key:?}");
        }
    }

    #[test]
    fn every_width_takes_the_first_digits() {
        let hash = KeyHash::of("example.com");
        for digits in 1..=4 {
            let shard = hash.shard(Width::new(digits).unwrap()).to_string();
            assert_eq!(shard, hash.short()[..digits as usize]);
            assert_eq!(shard.parse::<Shard>().unwrap().to_string(), shard);
        }
        assert_eq!(Width::new(0), None);
        assert_eq!(Width::new(5), None);
        assert_eq!(Width::USUAL.all().count(), 256);
        for bad in ["", "5E", "+5", "12345", "zz", "5 "] {
            assert!(bad.parse::<Shard>().is_err(), "{bad}");
        }
    }

    /// FIELD.md row 18.
    #[test]
    fn domains_have_one_spelling() {
        for same in ["example.com", "Example.COM", "example.com.", "EXAMPLE.com."] {
            assert_eq!(normalise_domain(same).unwrap(), "example.com");
        }
        assert_eq!(normalise_domain("Bücher.example").unwrap(), "xn--bcher-kva.example");
        assert_eq!(normalise_domain("XN--BCHER-KVA.example").unwrap(), "xn--bcher-kva.example");
        assert_eq!(normalise_domain("_dmarc.a.b").unwrap(), "_dmarc.a.b");
        for bad in ["", ".", "..", "a..b", "../etc", "a/b", "a b", "a\u{1f}b", ".a", "a.."] {
            assert!(normalise_domain(bad).is_err(), "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn normalising_twice_changes_nothing(text in any::<String>()) {
            if let Ok(once) = normalise_domain(&text) {
                prop_assert_eq!(normalise_domain(&once).unwrap(), once.clone());
            }
        }

        #[test]
        fn ordinary_domains_are_accepted(text in "[a-z][a-z0-9]{0,10}(\\.[a-z]{2,6}){1,3}") {
            prop_assert_eq!(normalise_domain(&text).unwrap(), text.clone());
        }
    }
}
