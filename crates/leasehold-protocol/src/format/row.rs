//! Records as rows of a schema: checked, in one spelling, and back.
//!
//! A row is *canonical* when it has all the fields of the schema, each in the one spelling of its
//! type, and the key normalised. Compilers write canonical rows only, so equal records are equal
//! bytes.

use std::borrow::Cow;

use serde_json::{Map, Value};

use super::datapackage::{Field, Kind, MAX_KEY, MAX_ROW, Schema};
use super::json::{self, JsonError};
use super::usv;
use crate::merge::Claim;
use crate::mutant::{self, Mutant};
use crate::shard::normalise_domain;
use crate::time::StoreTime;

#[cfg(test)]
mod tests;

/// Why something cannot be a record of this index.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RowError {
    /// A field's value.
    #[error("field {field:?}: {reason}")]
    Field {
        /// Which.
        field: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The row as a whole.
    #[error("{0}")]
    Row(String),
}

/// What a canonical row is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Canonical {
    /// How many bytes the key's field has.
    pub key_len: usize,
    /// When it was written, in microseconds since 1970.
    pub updated_at: i64,
    /// Whether it is a deletion.
    pub deleted: bool,
}

impl Schema {
    /// A key as it is stored: normalised, checked.
    pub fn normalise_key<'a>(&self, key: &'a str) -> Result<Cow<'a, str>, RowError> {
        let field = self.key();
        let error = |reason: String| RowError::Field { field: field.name.clone(), reason };
        if key.is_empty() {
            return Err(error("the key is missing".to_owned()));
        }
        let key = match (field.domain, field.kind) {
            (true, _) if mutant::is(Mutant::UnnormalisedKeys) => Cow::Borrowed(key),
            (true, _) => normalise_domain(key).map_err(|bad| error(bad.to_string()))?,
            (false, Kind::Integer) => {
                let number: i64 =
                    key.parse().map_err(|_| error(format!("not a whole number: {key:?}")))?;
                Cow::Owned(number.to_string())
            }
            (false, _) => Cow::Borrowed(key),
        };
        if key.len() > MAX_KEY {
            return Err(error(format!(
                "a key has at most {MAX_KEY} bytes, this has {}",
                key.len()
            )));
        }
        Ok(key)
    }

    /// Appends the canonical form of this row, without an end. On an error nothing is appended.
    pub fn canonical(&self, raw: &[u8], out: &mut Vec<u8>) -> Result<Canonical, RowError> {
        let text = std::str::from_utf8(raw)
            .map_err(|error| RowError::Row(format!("not UTF-8 at byte {}", error.valid_up_to())))?;
        // Hardly any row has something to unescape: one look at all of it.
        let escaped = memchr::memchr(usv::ESCAPE, raw).is_some();
        let mut from = Some(0);
        let mut ends = memchr::memchr_iter(usv::UNIT, raw);
        let mut field = || {
            let start = from.take()?;
            let end = ends.next();
            from = end.map(|end| end + 1);
            text.get(start..end.unwrap_or(text.len()))
        };
        let unescaped = |field| if escaped { usv::unescape(field) } else { Cow::Borrowed(field) };
        let row = self.write(|_| Ok(field().map(unescaped)), None, out)?;
        if std::iter::from_fn(field).any(|field| !field.is_empty()) {
            out.truncate(out.len() - row.len);
            let (has, all) = (text.split(char::from(usv::UNIT)).count(), self.fields().len());
            let message = format!("the row has {has} fields, the schema has {all}");
            return Err(RowError::Row(message));
        }
        Ok(row.canonical)
    }

    /// Appends the record with these values by name. What is not given is empty; `now` is when it
    /// was written if it does not say so itself.
    pub fn write_json(
        &self,
        record: &Map<String, Value>,
        now: StoreTime,
        out: &mut Vec<u8>,
    ) -> Result<Canonical, RowError> {
        if let Some(name) = record.keys().find(|name| self.position(name).is_none()) {
            let names: Vec<&str> = self.fields().iter().map(|field| field.name.as_str()).collect();
            return Err(RowError::Row(format!(
                "there is no field {name:?} (there are {})",
                names.join(", ")
            )));
        }
        let text = |field: &Field| match record.get(&field.name) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Ok(Some(Cow::Borrowed(text.as_str()))),
            Some(value @ (Value::Object(_) | Value::Array(_)))
                if matches!(field.kind, Kind::Object | Kind::Array) =>
            {
                Ok(Some(Cow::Owned(value.to_string())))
            }
            Some(Value::Bool(value)) if field.kind == Kind::Boolean => {
                Ok(Some(Cow::Borrowed(if *value { "true" } else { "false" })))
            }
            Some(Value::Number(number)) if matches!(field.kind, Kind::Integer | Kind::Number) => {
                Ok(Some(Cow::Owned(number.to_string())))
            }
            Some(other) => Err(bad(field, format!("{other} is not {}", field.kind.with_article()))),
        };
        Ok(self.write(text, Some(now), out)?.canonical)
    }

    /// Appends the record with these values in the order of the fields. What is missing at the end
    /// is empty.
    pub fn write_texts<'a>(
        &self,
        values: impl IntoIterator<Item = &'a str>,
        now: StoreTime,
        out: &mut Vec<u8>,
    ) -> Result<Canonical, RowError> {
        let mut values = values.into_iter();
        let row = self.write(|_| Ok(values.next().map(Cow::Borrowed)), Some(now), out)?;
        if values.any(|value| !value.is_empty()) {
            out.truncate(out.len() - row.len);
            let all = self.fields().len();
            return Err(RowError::Row(format!("there are more values than the {all} fields")));
        }
        Ok(row.canonical)
    }

    /// Appends the deletion of this key.
    pub fn write_deletion(
        &self,
        key: &str,
        at: StoreTime,
        out: &mut Vec<u8>,
    ) -> Result<Canonical, RowError> {
        let key = self.normalise_key(key)?;
        let start = out.len();
        usv::escape(&key, out);
        let key_len = out.len() - start;
        for place in 1..self.fields().len() {
            out.push(usv::UNIT);
            if place == self.updated_at() {
                out.extend_from_slice(at.to_string().as_bytes());
            } else if place == self.deleted() {
                out.extend_from_slice(b"true");
            }
        }
        Ok(Canonical { key_len, updated_at: at.as_micros(), deleted: true })
    }

    fn write<'a>(
        &self,
        mut value: impl FnMut(&Field) -> Result<Option<Cow<'a, str>>, RowError>,
        now: Option<StoreTime>,
        out: &mut Vec<u8>,
    ) -> Result<Written, RowError> {
        let start = out.len();
        let written = (|| {
            let mut canonical = Canonical { key_len: 0, updated_at: 0, deleted: false };
            // The fields of a deletion may be empty, whatever the schema requires.
            let mut missing = None;
            for (at, field) in self.fields().iter().enumerate() {
                if at > 0 {
                    out.push(usv::UNIT);
                }
                let value = value(field)?.unwrap_or_default();
                if at == 0 {
                    let key = self.normalise_key(&value)?;
                    fits(field, &key).map_err(|reason| bad(field, reason))?;
                    usv::escape(&key, out);
                    canonical.key_len = out.len() - start;
                } else if at == self.updated_at() {
                    canonical.updated_at = match (value.is_empty(), now) {
                        (true, Some(now)) => {
                            out.extend_from_slice(now.to_string().as_bytes());
                            now.as_micros()
                        }
                        (true, None) => return Err(bad(field, "is missing")),
                        (false, _) => write_time(&value, out).map_err(|why| bad(field, why))?,
                    };
                } else if value.is_empty() {
                    if field.required && missing.is_none() {
                        missing = Some(field);
                    }
                } else {
                    let from = out.len();
                    write_value(field, &value, out).map_err(|reason| bad(field, reason))?;
                    if at == self.deleted() {
                        canonical.deleted = &out[from..] == b"true";
                        // One spelling of "not deleted".
                        if !canonical.deleted {
                            out.truncate(from);
                        }
                    }
                }
            }
            if let Some(field) = missing
                && !canonical.deleted
            {
                return Err(bad(field, "is missing"));
            }
            let len = out.len() - start;
            match len <= MAX_ROW {
                true => Ok(Written { canonical, len }),
                false => Err(RowError::Row(format!(
                    "a record has at most {MAX_ROW} bytes, this has {len}"
                ))),
            }
        })();
        if written.is_err() {
            out.truncate(start);
        }
        written
    }

    /// What decides about a row in any spelling, or `None` if it cannot be told when it was written.
    pub fn claim<'a>(&self, row: &'a [u8]) -> Option<Claim<'a>> {
        let (mut updated_at, mut deleted) = (None, false);
        for (at, field) in usv::fields(row).enumerate() {
            if at == self.updated_at() {
                updated_at = micros(field);
            } else if at == self.deleted() {
                deleted = is_true(field);
            }
        }
        Some(Claim { updated_at: updated_at?, deleted, row })
    }

    /// Whether a row is a deletion.
    pub fn is_deletion(&self, row: &[u8]) -> bool {
        usv::fields(row).nth(self.deleted()).is_some_and(is_true)
    }

    /// The typed value of a field, `Null` where it is empty. Text that is not of the field's type,
    /// which only foreign rows have, stays text.
    pub fn value(&self, at: usize, field: &[u8]) -> Value {
        let text = String::from_utf8_lossy(field);
        if text.is_empty() {
            return Value::Null;
        }
        let text = usv::unescape(&text);
        let typed = match self.fields().get(at).map(|field| field.kind) {
            Some(Kind::Integer) => text.parse::<i64>().ok().map(Value::from),
            Some(Kind::Number) => {
                text.parse::<f64>().ok().and_then(serde_json::Number::from_f64).map(Value::Number)
            }
            Some(Kind::Boolean) => boolean(&text).map(Value::Bool),
            Some(Kind::Object | Kind::Array) => serde_json::from_str(&text).ok(),
            _ => None,
        };
        typed.unwrap_or_else(|| Value::String(text.into_owned()))
    }

    /// The record in a row, by name. `_deleted` is left out of records.
    pub fn read_json(&self, row: &[u8]) -> Map<String, Value> {
        let mut fields = usv::fields(row);
        let mut record = Map::new();
        for (at, field) in self.fields().iter().enumerate() {
            let value = self.value(at, fields.next().unwrap_or_default());
            if at != self.deleted() || value == Value::Bool(true) {
                record.insert(field.name.clone(), value);
            }
        }
        record
    }
}

struct Written {
    canonical: Canonical,
    len: usize,
}

fn bad(field: &Field, reason: impl Into<String>) -> RowError {
    RowError::Field { field: field.name.clone(), reason: reason.into() }
}

/// Whether this field says `true`, in any spelling that is read.
pub fn is_true(field: &[u8]) -> bool {
    matches!(field, b"true" | b"True" | b"TRUE" | b"1")
}

fn boolean(text: &str) -> Option<bool> {
    match text {
        "true" | "True" | "TRUE" | "1" => Some(true),
        "false" | "False" | "FALSE" | "0" => Some(false),
        _ => None,
    }
}

/// Whether a value is not too long.
fn fits(field: &Field, value: &str) -> Result<(), String> {
    let Some(most) = field.max_length else { return Ok(()) };
    match value.chars().count() {
        count if count > most => Err(format!("has {count} characters, {most} are allowed")),
        _ => Ok(()),
    }
}

/// Appends a value that is not empty, in the one spelling of its type.
fn write_value(field: &Field, value: &str, out: &mut Vec<u8>) -> Result<(), String> {
    fits(field, value)?;
    let kind = field.kind;
    let wrong = || {
        let shown: String = value.chars().take(60).collect();
        format!("not {}: {shown:?}", kind.with_article())
    };
    match kind {
        Kind::String if field.domain => {
            let domain = normalise_domain(value).map_err(|error| error.to_string())?;
            usv::escape(&domain, out);
        }
        Kind::String => usv::escape(value, out),
        Kind::Integer => {
            let number: i64 = value.parse().map_err(|_| wrong())?;
            match value.starts_with(['+', '0']) || value.starts_with("-0") {
                true => out.extend_from_slice(number.to_string().as_bytes()),
                false => out.extend_from_slice(value.as_bytes()),
            }
        }
        Kind::Number => {
            let number: f64 = value.parse().map_err(|_| wrong())?;
            // Words like "inf" and "nan" are numbers to some and not to others.
            let spelled =
                value.bytes().all(|b| matches!(b, b'0'..=b'9' | b'+' | b'-' | b'.' | b'e' | b'E'));
            if !number.is_finite() || !spelled {
                return Err(wrong());
            }
            out.extend_from_slice(value.strip_prefix('+').unwrap_or(value).as_bytes());
        }
        Kind::Boolean => {
            let value = boolean(value).ok_or_else(wrong)?;
            out.extend_from_slice(if value { b"true" } else { b"false" });
        }
        Kind::Date => {
            let date: jiff::civil::Date = value.parse().map_err(|_| wrong())?;
            // The parser is more generous than readers of these files are.
            if value.len() != 10 || date.year() < 0 {
                return Err(wrong());
            }
            out.extend_from_slice(value.as_bytes());
        }
        Kind::Datetime => {
            write_time(value, out)?;
        }
        Kind::Object | Kind::Array => {
            let json: Value = match json::read(value) {
                Err(error @ JsonError::TooLarge(_)) => return Err(error.to_string()),
                read => read.map_err(|_| wrong())?,
            };
            if json.is_object() != (kind == Kind::Object)
                || json.is_array() != (kind == Kind::Array)
            {
                return Err(wrong());
            }
            usv::escape(&json.to_string(), out);
        }
    }
    Ok(())
}

/// Appends a time with its fixed width, and returns its microseconds.
fn write_time(value: &str, out: &mut Vec<u8>) -> Result<i64, String> {
    let bytes = value.as_bytes();
    if let Some(time) = plain_micros(bytes) {
        out.extend_from_slice(&bytes[..19]);
        out.extend_from_slice(if bytes.len() == 27 { &bytes[19..] } else { b".000000Z" });
        return Ok(time);
    }
    let time: StoreTime =
        value.parse().map_err(|error: crate::time::TimeError| error.to_string())?;
    out.extend_from_slice(time.to_string().as_bytes());
    Ok(time.as_micros())
}

/// The microseconds since 1970 of a time in any spelling that we read.
pub fn micros(text: &[u8]) -> Option<i64> {
    plain_micros(text).or_else(|| {
        let time: StoreTime = std::str::from_utf8(text).ok()?.parse().ok()?;
        Some(time.as_micros())
    })
}

/// The same for the two usual spellings, `2026-01-31T09:05:00Z` and with six more digits, without
/// going through a general parser.
fn plain_micros(text: &[u8]) -> Option<i64> {
    if !matches!(text.len(), 20 | 27) || text[text.len() - 1] != b'Z' {
        return None;
    }
    let number = |from: usize, to: usize| {
        text[from..to].iter().try_fold(0_i64, |sum, byte| match byte {
            b'0'..=b'9' => Some(sum * 10 + i64::from(byte - b'0')),
            _ => None,
        })
    };
    let marks = [text[4], text[7], text[10], text[13], text[16]] == *b"--T::";
    if !marks || (text.len() == 27 && text[19] != b'.') {
        return None;
    }
    let (year, month, day) = (number(0, 4)?, number(5, 7)?, number(8, 10)?);
    let (hour, minute, second) = (number(11, 13)?, number(14, 16)?, number(17, 19)?);
    let fraction = if text.len() == 27 { number(20, 26)? } else { 0 };
    let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let days = match month {
        1 | 3 | 5 | 7 | 8 | 10 | 12 => 31,
        4 | 6 | 9 | 11 => 30,
        2 if leap => 29,
        2 => 28,
        _ => return None,
    };
    if day < 1 || day > days || hour > 23 || minute > 59 || second > 59 {
        return None;
    }
    // Days since 1970, with years that begin in March: leap days come last.
    let y = if month <= 2 { year - 1 } else { year };
    let (era, month) = (y.div_euclid(400), (month + 9) % 12);
    let of_era = y.rem_euclid(400);
    let of_year = (153 * month + 2) / 5 + day - 1;
    let days = era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468;
    let micros = ((days * 24 + hour) * 60 + minute) * 60 + second;
    let micros = micros * 1_000_000 + fraction;
    // The very last hours of the year 9999 are beyond what we write.
    (StoreTime::from_micros(micros).as_micros() == micros).then_some(micros)
}
