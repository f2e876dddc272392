//! Names of objects.
//!
//! One grammar for every backend, so that a store can be moved from a directory to a bucket by
//! changing a URL. It is what all backends can hold *and list back* unchanged: S3 lists in XML,
//! which cannot carry control characters; a directory has no empty and no dot segments.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// The longest key, in bytes: S3's limit.
pub const MAX_KEY_BYTES: usize = 1024;

/// The name of an object: 1 to 1,024 bytes of UTF-8 in segments separated by `/`.
///
/// No segment is empty, `.` or `..`, and there are no control characters. A `Key` that exists is
/// valid; [`Key::new`] is the only way in.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Key(Arc<str>);

/// Why a text is not a key.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// Nothing at all.
    #[error("a key cannot be empty")]
    Empty,
    /// Longer than any store allows.
    #[error("a key has at most {MAX_KEY_BYTES} bytes, this one has {0}")]
    TooLong(usize),
    /// A control character, NUL among them.
    #[error("a key cannot contain control characters, this one has {0:?} at byte {1}")]
    Control(char, usize),
    /// A leading, trailing or doubled `/`.
    #[error("a key cannot start or end with '/' or contain '//'")]
    EmptySegment,
    /// A segment that means "here" or "up" in a file system.
    #[error("a key cannot have '.' or '..' as a segment")]
    DotSegment,
}

impl Key {
    /// The key with this name, or why it cannot be one.
    pub fn new(name: impl AsRef<str>) -> Result<Self, KeyError> {
        let name = name.as_ref();
        check(name, Form::Key)?;
        Ok(Self(name.into()))
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// This key's `segment` below it: `a/b` and `c` give `a/b/c`.
    pub fn join(&self, segment: &str) -> Result<Self, KeyError> {
        Self::new(format!("{self}/{segment}"))
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&*self.0, f)
    }
}

impl AsRef<str> for Key {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl From<Key> for String {
    fn from(key: Key) -> Self {
        key.0.to_string()
    }
}

impl TryFrom<String> for Key {
    type Error = KeyError;
    fn try_from(name: String) -> Result<Self, KeyError> {
        Self::new(name)
    }
}

impl std::str::FromStr for Key {
    type Err = KeyError;
    fn from_str(name: &str) -> Result<Self, KeyError> {
        Self::new(name)
    }
}

/// The beginning of keys: what a listing is restricted to. May be empty, and may end with `/`.
pub fn check_prefix(prefix: &str) -> Result<(), KeyError> {
    if prefix.is_empty() {
        return Ok(());
    }
    check(prefix, Form::Prefix)
}

enum Form {
    Key,
    Prefix,
}

fn check(name: &str, form: Form) -> Result<(), KeyError> {
    if name.is_empty() {
        return Err(KeyError::Empty);
    }
    if name.len() > MAX_KEY_BYTES {
        return Err(KeyError::TooLong(name.len()));
    }
    if let Some((at, c)) = name.char_indices().find(|(_, c)| c.is_control()) {
        return Err(KeyError::Control(c, at));
    }
    let segments = match form {
        Form::Key => name,
        // "a/" names everything below a.
        Form::Prefix => name.strip_suffix('/').unwrap_or(name),
    };
    for segment in segments.split('/') {
        match segment {
            "" => return Err(KeyError::EmptySegment),
            "." | ".." => return Err(KeyError::DotSegment),
            _ => {}
        }
    }
    Ok(())
}

/// Whether [`encode_segment`] leaves this as it is, at a glance: most names are like this.
pub(crate) fn is_plain(text: &str) -> bool {
    let plain = |byte: u8| matches!(byte, b' '..=b'~') && !matches!(byte, b'/' | b'%' | b'\\');
    !text.is_empty() && !text.ends_with('.') && text.bytes().all(plain)
}

/// Any text as one key segment, reversibly: ordinary names stay as they are.
///
/// What some store cannot hold in a segment becomes `%XX`: slashes of both kinds, control
/// characters, and a dot at the end. The empty text is `%`, which nothing else becomes.
pub fn encode_segment(text: &str) -> String {
    if is_plain(text) {
        return text.to_owned();
    }
    if text.is_empty() {
        return "%".to_owned();
    }
    let last = text.len() - 1;
    let mut out = String::with_capacity(text.len());
    for (at, c) in text.char_indices() {
        if c == '/' || c == '%' || c == '\\' || c.is_control() || (c == '.' && at == last) {
            let mut utf8 = [0; 4];
            for byte in c.encode_utf8(&mut utf8).bytes() {
                out.push_str(&format!("%{byte:02X}"));
            }
        } else {
            out.push(c);
        }
    }
    out
}

/// The text that [`encode_segment`] was given, or `None` where the segment is not its work.
pub fn decode_segment(segment: &str) -> Option<String> {
    if is_plain(segment) {
        return Some(segment.to_owned());
    }
    if segment == "%" {
        return Some(String::new());
    }
    let bytes = percent_decode(segment.as_bytes())?;
    let text = String::from_utf8(bytes).ok()?;
    (encode_segment(&text) == segment).then_some(text)
}

/// The bytes behind `%XX` escapes, or `None` where a `%` is not followed by two hex digits.
pub fn percent_decode(text: &[u8]) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&byte, tail)) = rest.split_first() {
        if byte != b'%' {
            out.push(byte);
            rest = tail;
            continue;
        }
        let [high, low, ..] = tail else { return None };
        let digit = |c: &u8| (*c as char).to_digit(16);
        out.push((digit(high)? * 16 + digit(low)?) as u8);
        rest = &tail[2..];
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn bad_keys_are_refused_with_the_reason() {
        assert_eq!(Key::new(""), Err(KeyError::Empty));
        assert_eq!(Key::new("a\0b"), Err(KeyError::Control('\0', 1)));
        assert_eq!(Key::new("a\nb"), Err(KeyError::Control('\n', 1)));
        assert_eq!(Key::new("a/../b"), Err(KeyError::DotSegment));
        assert_eq!(Key::new(".."), Err(KeyError::DotSegment));
        assert_eq!(Key::new("./a"), Err(KeyError::DotSegment));
        for slashes in ["/a", "a/", "a//b", "/"] {
            assert_eq!(Key::new(slashes), Err(KeyError::EmptySegment), "{slashes}");
        }
        assert_eq!(Key::new("x".repeat(1025)), Err(KeyError::TooLong(1025)));
        assert!(Key::new("x".repeat(1024)).is_ok());
        // The limit is in bytes, not characters.
        assert_eq!(Key::new("é".repeat(513)), Err(KeyError::TooLong(1026)));
    }

    #[test]
    fn prefixes_may_be_empty_or_end_with_a_slash() {
        for ok in ["", "a", "a/", "a/b"] {
            assert_eq!(check_prefix(ok), Ok(()), "{ok}");
        }
        for bad in ["/", "a//", "../", "a/./"] {
            assert!(check_prefix(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn ordinary_segments_stay_readable() {
        assert_eq!(encode_segment("example.com"), "example.com");
        assert_eq!(encode_segment("Zürich 2 (b)"), "Zürich 2 (b)");
        assert_eq!(encode_segment("a/b"), "a%2Fb");
        assert_eq!(encode_segment(".."), ".%2E");
        assert_eq!(encode_segment("example.com."), "example.com%2E");
        assert_eq!(decode_segment("%zz"), None);
        // Only the one spelling that we write is read back: no two names for one thing.
        assert_eq!(decode_segment("%61"), None);
    }

    proptest! {
        #[test]
        fn any_text_survives_as_a_segment(text in ".{0,60}") {
            let segment = encode_segment(&text);
            prop_assert!(Key::new(&segment).is_ok(), "{segment:?}");
            prop_assert!(!segment.contains('/'));
            prop_assert_eq!(decode_segment(&segment), Some(text));
        }

        #[test]
        fn no_input_panics(text in any::<String>()) {
            let _ = Key::new(&text);
            let _ = check_prefix(&text);
            let _ = decode_segment(&text);
        }
    }
}
