//! Spans of time as text: `250ms`, `30s`, `5m`, `2h`, `1d`.

use std::time::Duration;

use serde::{Deserialize, Deserializer, Serializer, de::Error as _};

/// The text is not a duration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a duration like 250ms, 30s, 5m, 2h or 1d: {0:?}")]
pub struct DurationError(String);

/// The duration in a text like `250ms`, `30s`, `5m`, `2h` or `1d`.
pub fn parse(text: &str) -> Result<Duration, DurationError> {
    let bad = || DurationError(text.to_owned());
    let digits = text.find(|c: char| !c.is_ascii_digit()).ok_or_else(bad)?;
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| bad())?;
    let millis = match unit {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => return Err(bad()),
    };
    Ok(Duration::from_millis(number.checked_mul(millis).ok_or_else(bad)?))
}

/// The shortest text that [`parse`] reads as this duration, to the millisecond.
pub fn format(span: Duration) -> String {
    let millis = span.as_millis();
    for (unit, size) in [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000)] {
        if millis != 0 && millis.is_multiple_of(size) {
            return format!("{}{unit}", millis / size);
        }
    }
    format!("{millis}ms")
}

/// Writes `30s`, for serde's `with`.
pub fn serialize<S: Serializer>(span: &Duration, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&format(*span))
}

/// Reads `30s`, for serde's `with`.
pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
    let text = String::deserialize(from)?;
    parse(&text).map_err(D::Error::custom)
}

/// The same for a duration that may be missing, for serde's `with`.
pub mod option {
    use super::*;

    /// Writes `30s`.
    pub fn serialize<S: Serializer>(span: &Option<Duration>, to: S) -> Result<S::Ok, S::Error> {
        match span {
            Some(span) => to.serialize_str(&format(*span)),
            None => to.serialize_none(),
        }
    }

    /// Reads `30s`.
    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Duration>, D::Error> {
        let text = Option::<String>::deserialize(from)?;
        text.map(|text| parse(&text).map_err(D::Error::custom)).transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_and_written() {
        for (text, millis) in [("250ms", 250), ("30s", 30_000), ("5m", 300_000), ("1d", 86_400_000)]
        {
            assert_eq!(parse(text).unwrap(), Duration::from_millis(millis));
            assert_eq!(format(Duration::from_millis(millis)), text);
        }
        for bad in [
            "",
            "s",
            "5",
            "5 s",
            "-1s",
            "1.5s",
            "1w",
            "99999999999999999999s",
            "99999999999999999d",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
