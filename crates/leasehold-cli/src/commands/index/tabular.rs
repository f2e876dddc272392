//! What readers of CSV and TSV do not agree on.

use std::borrow::Cow;
use std::io::{Read, Write};

/// Reads on, and knows whether a quote of CSV is open: readers take all that follows it for one value, up to the
/// end of the file.
pub struct Quotes<R> {
    source: R,
    place: Place,
    ended: bool,
    /// How many bytes of a mark of the byte order may follow.
    mark: &'static [u8],
}

#[derive(Clone, Copy, PartialEq)]
enum Place {
    Start,
    Plain,
    Within,
    /// After a quote within: the end, or the first of two.
    After,
}

impl<R: Read> Quotes<R> {
    /// Of this file.
    pub fn new(source: R) -> Self {
        Self { source, place: Place::Start, ended: false, mark: "\u{feff}".as_bytes() }
    }

    /// Whether the file has ended within quotes.
    pub fn ended_within(&self) -> bool {
        self.ended && self.place == Place::Within
    }

    fn follow(&mut self, byte: u8) {
        if let Some((first, rest)) = self.mark.split_first() {
            self.mark = if byte == *first { rest } else { &[] };
            if byte == *first {
                return;
            }
        }
        self.place = match (self.place, byte) {
            (Place::Start | Place::After, b'"') => Place::Within,
            (Place::Within, b'"') => Place::After,
            (Place::Within, _) => Place::Within,
            (_, b',' | b'\n' | b'\r') => Place::Start,
            _ => Place::Plain,
        };
    }
}

impl<R: Read> Read for Quotes<R> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let count = self.source.read(into)?;
        self.ended = count == 0 && !into.is_empty();
        into[..count].iter().for_each(|byte| self.follow(*byte));
        Ok(count)
    }
}

/// Writes a line of TSV.
pub fn write(values: &[impl AsRef<str>], out: &mut impl Write) -> std::io::Result<()> {
    for (at, value) in values.iter().enumerate() {
        if at > 0 {
            out.write_all(b"\t")?;
        }
        out.write_all(escape(value.as_ref()).as_bytes())?;
    }
    out.write_all(b"\n")
}

fn escape(value: &str) -> Cow<'_, str> {
    if !value.contains(['\t', '\n', '\r', '\\']) {
        return value.into();
    }
    let mut out = String::with_capacity(value.len() + 8);
    for c in value.chars() {
        match c {
            '\t' => out.push_str("\\t"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\\' => out.push_str("\\\\"),
            c => out.push(c),
        }
    }
    out.into()
}

/// A value of TSV. A backslash before anything else is a backslash.
pub fn unescape(value: &str) -> Cow<'_, str> {
    if !value.contains('\\') {
        return value.into();
    }
    let mut out = String::with_capacity(value.len());
    let mut rest = value.chars();
    while let Some(c) = rest.next() {
        let mut after = rest.clone();
        let meant = match (c, after.next()) {
            ('\\', Some('t')) => '\t',
            ('\\', Some('n')) => '\n',
            ('\\', Some('r')) => '\r',
            ('\\', Some('\\')) => '\\',
            _ => {
                out.push(c);
                continue;
            }
        };
        out.push(meant);
        rest = after;
    }
    out.into()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn open_quotes_are_noticed() {
        for (text, open) in [
            ("a,b\n", false),
            ("a,\"b\"\n", false),
            ("a,\"b", true),
            ("a,\"b\nc,d\n", true),
            ("a,\"b\"\"\n", true),
            ("a,\"b\"\"\"\n", false),
            ("a,b\"\n", false),
            ("\u{feff}\"a\"\n\"b", true),
            ("\u{feff}\"a\"\n", false),
        ] {
            let mut quotes = Quotes::new(text.as_bytes());
            std::io::copy(&mut quotes, &mut std::io::sink()).unwrap();
            assert_eq!(quotes.ended_within(), open, "{text:?}");
        }
    }

    #[test]
    fn values_of_tsv_go_there_and_back() {
        for value in ["", "plain", "\"", "a\tb\nc\rd\\e", "\\N", "\\\\t", "日\\"] {
            let escaped = escape(value);
            assert!(!escaped.contains(['\t', '\n', '\r']));
            assert_eq!(unescape(&escaped), value);
        }
        assert_eq!(unescape("C:\\Windows \\"), "C:\\Windows \\");
    }
}
