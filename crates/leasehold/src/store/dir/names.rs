//! Keys as paths below the root, and back.
//!
//! Ordinary keys keep their plain names, so that other tools find the files where they expect
//! them. What differs:
//!
//! - `%` becomes `%25`, and a segment that is exactly `.lh`, our own folder, becomes `%2Elh`;
//! - a segment too long for a file name is cut into folders whose names end with `%~`.

use std::borrow::Cow;

use leasehold_protocol::key::percent_decode;

/// Our own folder in the root: stripe locks and temporary files.
pub const PRIVATE: &str = ".lh";

/// Ends the name of a folder that holds the rest of a long segment. Not a valid escape, so no
/// segment encodes to it.
const CONTINUED: &str = "%~";

/// The longest encoded segment that is one file name. Names may have 255 bytes; other tools that
/// put `.lock` or `.tmp` behind them need some.
const LONGEST: usize = 200;

/// The path of a key (or of the folder that a prefix ending with `/` names), relative to the root.
pub fn path_of(key: &str) -> Cow<'_, str> {
    let plain =
        |segment: &str| segment.len() <= LONGEST && !segment.contains('%') && segment != PRIVATE;
    if key.split('/').all(plain) {
        return Cow::Borrowed(key);
    }
    let segments: Vec<String> = key.split('/').map(encode).collect();
    Cow::Owned(segments.join("/"))
}

fn encode(segment: &str) -> String {
    let escaped = match segment == PRIVATE {
        true => "%2Elh".to_owned(),
        false => segment.replace('%', "%25"),
    };
    let mut out = String::with_capacity(escaped.len() + 8);
    let mut rest = escaped.as_str();
    while rest.len() > LONGEST {
        // What is left over is a name of its own: never so short that it could be "..".
        let cut = cut_point(rest, LONGEST.min(rest.len() - PRIVATE.len() - 1));
        out.push_str(&rest[..cut]);
        out.push_str(CONTINUED);
        out.push('/');
        rest = &rest[cut..];
    }
    out.push_str(rest);
    out
}

/// The last place at or before `most` that splits neither a character nor an escape.
fn cut_point(text: &str, most: usize) -> usize {
    let mut cut = most;
    while !text.is_char_boundary(cut) {
        cut -= 1;
    }
    match text[..cut].rfind('%') {
        Some(at) if at + 3 > cut => at,
        _ => cut,
    }
}

/// What a name in a folder is.
#[derive(Debug, PartialEq, Eq)]
pub enum Name<'a> {
    /// A segment, or the end of a long one.
    Segment(Cow<'a, str>),
    /// The beginning of a long segment: the folder holds the rest.
    Continued(Cow<'a, str>),
}

/// Whether every folder, or the root, has this name, which no key has.
pub fn is_usual(name: &[u8]) -> bool {
    name.is_empty() || name == b"." || name == b".." || name == PRIVATE.as_bytes()
}

/// What this file name stands for, or `None` if it is not one of ours.
pub fn read_name(name: &[u8]) -> Option<Name<'_>> {
    if is_usual(name) {
        return None;
    }
    let name = std::str::from_utf8(name).ok()?;
    // Ours are never this long, and a longer one could be listed but not read.
    if name.len() > LONGEST + CONTINUED.len() || name.chars().any(char::is_control) {
        return None;
    }
    if !name.contains('%') {
        return (name.len() <= LONGEST).then_some(Name::Segment(Cow::Borrowed(name)));
    }
    match name.strip_suffix(CONTINUED) {
        Some(start) => Some(Name::Continued(decode(start)?)),
        None => Some(Name::Segment(decode(name)?)),
    }
}

fn decode(text: &str) -> Option<Cow<'_, str>> {
    if !text.contains('%') {
        return Some(Cow::Borrowed(text));
    }
    let decoded = String::from_utf8(percent_decode(text.as_bytes())?).ok()?;
    // One spelling only: a name that we would not have written is not ours.
    let ours = decoded.replace('%', "%25") == text || (text == "%2Elh" && decoded == PRIVATE);
    ours.then_some(Cow::Owned(decoded))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key_of(path: &str) -> Option<String> {
        let mut key = String::new();
        let mut names = path.split('/').peekable();
        while let Some(name) = names.next() {
            match read_name(name.as_bytes())? {
                Name::Segment(segment) => {
                    key.push_str(&segment);
                    if names.peek().is_some() {
                        key.push('/');
                    }
                }
                Name::Continued(start) => key.push_str(&start),
            }
        }
        Some(key)
    }

    #[test]
    fn ordinary_keys_keep_their_names() {
        for key in ["queues/q/pending/t-1/task.json", "Zürich (2) + é ~x", "a.lock", "..a/.b"] {
            assert_eq!(path_of(key), key);
        }
    }

    #[test]
    fn the_rest_is_reversible() {
        let long = "x".repeat(600);
        let wide = "é".repeat(300);
        let percents = "%".repeat(300);
        let edge = format!("{}%", "y".repeat(199));
        for key in [
            "100%",
            ".lh",
            "a/.lh/b",
            "%2Elh",
            "%~",
            &long,
            &wide,
            &percents,
            &edge,
            &format!("a/{long}/b"),
        ] {
            let path = path_of(key);
            assert!(path.split('/').all(|name| name.len() <= 255), "{path}");
            assert!(path.split('/').all(|name| name != PRIVATE), "{path}");
            assert_eq!(key_of(&path).as_deref(), Some(key), "{path}");
        }
    }

    #[test]
    fn foreign_names_are_not_ours() {
        let long = [b'x'; 201];
        for name in [&b".lh"[..], b"..", b"a\x01", b"\xff", b"50%zz", b"%41", &long] {
            assert_eq!(read_name(name), None, "{name:?}");
        }
    }
}
