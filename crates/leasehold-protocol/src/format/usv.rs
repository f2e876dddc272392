//! USV: fields separated by 0x1F, records ended by a newline, UTF-8, no header.
//!
//! This is what DuckDB, qsv and Frictionless read as CSV with another delimiter and no quotes. What
//! would disturb them inside a value, control characters, is written as ESC and a letter, and read
//! back:
//!
//! | character | written as ESC and |
//! | --- | --- |
//! | 0x01 to 0x1A | `A` to `Z`: newline is `J`, tab `I`, carriage return `M` |
//! | 0x00, 0x1B, 0x1C, 0x1D, 0x1E, 0x1F, 0x7F | `z`, `e`, `f`, `g`, `r`, `u`, `d` |
//!
//! The reader also takes 0x1E, and 0x1E with a newline, as the end of a record. Rows that are too
//! short are padded: schemas grow at the end only.

use std::borrow::Cow;

use memchr::{memchr, memchr2};

/// Between fields.
pub const UNIT: u8 = 0x1f;
/// What other writers of USV put at the end of records.
pub const RECORD: u8 = 0x1e;
/// At the end of records.
pub const END: u8 = b'\n';
/// Before the letter that stands for a control character.
pub const ESCAPE: u8 = 0x1b;

fn letter(control: u8) -> u8 {
    match control {
        0x01..=0x1a => b'A' + control - 1,
        0x00 => b'z',
        0x1b => b'e',
        0x1c => b'f',
        0x1d => b'g',
        0x1e => b'r',
        0x1f => b'u',
        _ => b'd',
    }
}

fn control(letter: u8) -> Option<u8> {
    Some(match letter {
        b'A'..=b'Z' => letter - b'A' + 1,
        b'z' => 0x00,
        b'e' => 0x1b,
        b'f' => 0x1c,
        b'g' => 0x1d,
        b'r' => 0x1e,
        b'u' => 0x1f,
        b'd' => 0x7f,
        _ => return None,
    })
}

fn is_control(byte: u8) -> bool {
    byte < 0x20 || byte == 0x7f
}

/// Appends a value as a field.
pub fn escape(value: &str, out: &mut Vec<u8>) {
    // All of it, whatever is found: that takes 16 bytes at a time.
    if !value.bytes().fold(false, |found, byte| found | is_control(byte)) {
        return out.extend_from_slice(value.as_bytes());
    }
    for byte in value.bytes() {
        match is_control(byte) {
            true => out.extend([ESCAPE, letter(byte)]),
            false => out.push(byte),
        }
    }
}

/// The value in a field. An ESC that no known letter follows is an ESC.
pub fn unescape(field: &str) -> Cow<'_, str> {
    if memchr(ESCAPE, field.as_bytes()).is_none() {
        return Cow::Borrowed(field);
    }
    let mut out = String::with_capacity(field.len());
    let mut rest = field;
    while let Some(at) = memchr(ESCAPE, rest.as_bytes()) {
        out.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        match rest.bytes().next().and_then(control) {
            Some(byte) => {
                out.push(char::from(byte));
                rest = &rest[1..];
            }
            None => out.push(char::from(ESCAPE)),
        }
    }
    out.push_str(rest);
    Cow::Owned(out)
}

/// What some tools begin a file of UTF-8 with.
const MARK: &[u8] = "\u{feff}".as_bytes();

/// The content of a file of another tool: without the mark that some put before the first row. A key of
/// ours may begin with that character.
pub fn unmarked(file: &[u8]) -> &[u8] {
    file.strip_prefix(MARK).unwrap_or(file)
}

/// The rows in these bytes, without their ends. Empty ones do not count; what follows the last end
/// is a row too.
pub fn rows(bytes: &[u8]) -> Rows<'_> {
    Rows { bytes, at: 0 }
}

/// An iterator over rows.
#[derive(Debug, Clone)]
pub struct Rows<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Iterator for Rows<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        while self.at < self.bytes.len() {
            let rest = &self.bytes[self.at..];
            let end = memchr2(END, RECORD, rest).unwrap_or(rest.len());
            self.at += end + 1;
            let row = trim(&rest[..end]);
            if !row.is_empty() {
                return Some(row);
            }
        }
        None
    }
}

/// Without the carriage return that some writers put before a newline. Ours never ends so.
fn trim(row: &[u8]) -> &[u8] {
    row.strip_suffix(b"\r").unwrap_or(row)
}

/// Where the last complete row ends: everything before can be read, the rest is kept until more
/// arrives.
pub fn complete(bytes: &[u8]) -> usize {
    memchr::memrchr2(END, RECORD, bytes).map_or(0, |at| at + 1)
}

/// The fields of a row.
pub fn fields(row: &[u8]) -> Fields<'_> {
    Fields { row, ends: memchr::memchr_iter(UNIT, row), from: Some(0) }
}

/// An iterator over fields.
#[derive(Debug, Clone)]
pub struct Fields<'a> {
    row: &'a [u8],
    /// One search for the whole row: fields are short, and starting one for each costs more.
    ends: memchr::Memchr<'a>,
    from: Option<usize>,
}

impl<'a> Iterator for Fields<'a> {
    type Item = &'a [u8];

    #[inline]
    fn next(&mut self) -> Option<&'a [u8]> {
        let from = self.from?;
        match self.ends.next() {
            Some(end) => {
                self.from = Some(end + 1);
                Some(&self.row[from..end])
            }
            None => {
                self.from = None;
                Some(&self.row[from..])
            }
        }
    }
}

/// The first field of a row: its key.
#[inline]
pub fn first_field(row: &[u8]) -> &[u8] {
    &row[..memchr(UNIT, row).unwrap_or(row.len())]
}

/// The key of the first of these rows, which end with a newline, and how many bytes the row has with its
/// end.
#[inline]
pub fn first_row(rows: &[u8]) -> (&[u8], usize) {
    let key = memchr2(UNIT, END, rows).unwrap_or(rows.len());
    let end = memchr(END, &rows[key..]).map_or(rows.len(), |end| key + end + 1);
    (&rows[..key], end)
}

/// The field at this place, empty where the row is too short.
pub fn field(row: &[u8], at: usize) -> &[u8] {
    fields(row).nth(at).unwrap_or_default()
}

/// The row without the empty fields at its end, which padding may add or leave out.
pub fn unpadded(row: &[u8]) -> &[u8] {
    let kept = row.iter().rposition(|byte| *byte != UNIT).map_or(0, |at| at + 1);
    &row[..kept]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(text: &str) -> Vec<Vec<String>> {
        rows(text.as_bytes())
            .map(|row| {
                fields(row)
                    .map(|field| unescape(std::str::from_utf8(field).unwrap()).into_owned())
                    .collect()
            })
            .collect()
    }

    #[test]
    fn golden_bytes_are_still_read_and_written() {
        let golden = include_str!("../../../../golden/shard-1.usv");
        let values = [
            ["example.com", "Acme, \"Ltd\"", "3"],
            ["xn--bcher-kva.example", "Bücher\nund\tmehr\r", ""],
            ["z.example", "\0\u{1b}\u{1c}\u{1d}\u{1e}\u{1f}\u{7f}", "-1"],
        ];
        let mut out = Vec::new();
        for row in &values {
            for (at, value) in row.iter().enumerate() {
                if at > 0 {
                    out.push(UNIT);
                }
                escape(value, &mut out);
            }
            out.push(END);
        }
        assert_eq!(std::str::from_utf8(&out).unwrap(), golden);
        assert_eq!(read(golden), values.map(|row| row.map(str::to_owned).to_vec()));
    }

    #[test]
    fn other_ends_of_records_are_read() {
        let expected = [["a", "1"], ["b", "2"]].map(|row| row.map(str::to_owned).to_vec());
        for text in [
            "a\u{1f}1\nb\u{1f}2\n",
            "a\u{1f}1\nb\u{1f}2",
            "a\u{1f}1\u{1e}b\u{1f}2\u{1e}",
            "a\u{1f}1\u{1e}\nb\u{1f}2\u{1e}\n",
            "a\u{1f}1\r\nb\u{1f}2\r\n",
            "\n\na\u{1f}1\n\nb\u{1f}2\n\n",
        ] {
            assert_eq!(read(text), expected, "{text:?}");
        }
        assert_eq!(complete(b"a\nb"), 2);
        assert_eq!(complete(b"a\x1eb"), 2);
        assert_eq!(complete(b"ab"), 0);
    }

    #[test]
    fn a_mark_counts_at_the_beginning_of_a_file_only() {
        assert_eq!(unmarked("\u{feff}a\n".as_bytes()), b"a\n");
        assert_eq!(unmarked(b"a\n"), b"a\n");
        assert_eq!(unmarked("a\u{feff}".as_bytes()), "a\u{feff}".as_bytes());
    }

    #[test]
    fn short_rows_and_padding_are_the_same() {
        assert_eq!(field(b"a\x1fb", 1), b"b");
        assert_eq!(field(b"a\x1fb", 7), b"");
        assert_eq!(unpadded(b"a\x1fb\x1f\x1f"), b"a\x1fb");
        assert_eq!(unpadded(b"\x1f\x1f"), b"");
    }

    proptest! {
        #[test]
        fn every_value_survives(values in prop::collection::vec(any::<String>(), 1..6)) {
            let mut row = Vec::new();
            for (at, value) in values.iter().enumerate() {
                if at > 0 {
                    row.push(UNIT);
                }
                escape(value, &mut row);
            }
            prop_assert!(!row.iter().any(|byte| *byte == END || *byte == RECORD || *byte == b'\r'));
            let back: Vec<String> = fields(&row)
                .map(|field| unescape(std::str::from_utf8(field).unwrap()).into_owned())
                .collect();
            prop_assert_eq!(back, values);
        }

        /// What is read and written again is read the same: a shard can go through any number of
        /// compilers.
        #[test]
        fn any_text_settles_after_one_writing(text in any::<String>()) {
            let value = unescape(&text).into_owned();
            let mut once = Vec::new();
            escape(&value, &mut once);
            let once = String::from_utf8(once).unwrap();
            prop_assert_eq!(unescape(&once), value);
        }

        /// Cut anywhere, the pieces give the same rows as the whole.
        #[test]
        fn rows_do_not_depend_on_chunks(
            bytes in prop::collection::vec(prop::sample::select(b"ab\n\x1e\x1f".to_vec()), 0..60),
            cut in 0usize..60,
        ) {
            let whole: Vec<&[u8]> = rows(&bytes).collect();
            let cut = complete(&bytes[..cut.min(bytes.len())]);
            let pieces: Vec<&[u8]> = rows(&bytes[..cut]).chain(rows(&bytes[cut..])).collect();
            prop_assert_eq!(whole, pieces);
        }

        #[test]
        fn no_input_panics(bytes in any::<Vec<u8>>()) {
            for row in rows(&bytes) {
                let _ = (first_field(row), field(row, 3), unpadded(row));
                for field in fields(row) {
                    if let Ok(text) = std::str::from_utf8(field) {
                        let _ = unescape(text);
                    }
                }
            }
        }
    }
}
