//! JSON that people wrote: read without changing it.

use serde::de::DeserializeOwned;

/// Why a text is not JSON that can be kept.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum JsonError {
    /// A whole number that would become another one.
    #[error("{0} is too large for a JSON number: write it as a text")]
    TooLarge(String),
    /// Not JSON, or not what was asked for.
    #[error("{0}")]
    Other(String),
}

/// What this text says. Refused where reading would change a number: whole numbers beyond 64 bits become
/// others, without a word.
pub fn read<T: DeserializeOwned>(text: &str) -> Result<T, JsonError> {
    match too_large(text) {
        Some(number) => Err(JsonError::TooLarge(number.to_owned())),
        None => serde_json::from_str(text).map_err(|error| JsonError::Other(error.to_string())),
    }
}

/// The first whole number that does not fit into 64 bits.
fn too_large(text: &str) -> Option<&str> {
    const FEW: usize = 18;
    let bytes = text.as_bytes();
    let mut at = 0;
    while at < bytes.len() {
        match bytes[at] {
            b'"' => {
                // To the end of the text: quotes after a backslash are part of it.
                at += 1;
                while let Some(next) = memchr::memchr2(b'"', b'\\', bytes.get(at..)?) {
                    at += next;
                    if bytes[at] == b'"' {
                        break;
                    }
                    at += 2;
                }
                at += 1;
            }
            b'-' | b'0'..=b'9' => {
                let part =
                    |byte: &u8| matches!(byte, b'0'..=b'9' | b'+' | b'-' | b'.' | b'e' | b'E');
                let length = bytes[at..].iter().take_while(|byte| part(byte)).count();
                let number = &text[at..at + length];
                let whole = length > FEW && !number.contains(['.', 'e', 'E']);
                if whole && number.parse::<i64>().is_err() && number.parse::<u64>().is_err() {
                    return Some(number);
                }
                at += length;
            }
            _ => at += 1,
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    #[test]
    fn whole_numbers_are_kept_or_refused() {
        for text in [
            "18446744073709551615",
            "-9223372036854775808",
            r#"{"a":["123456789012345678901","\\","\"123456789012345678901"],"b":1.5e3}"#,
            "123456789012345678901.0",
            "\"",
        ] {
            assert_eq!(too_large(text), None, "{text}");
        }
        for text in [
            "18446744073709551616",
            r#"{"id":123456789012345678901}"#,
            r#"["x\"", -9223372036854775809]"#,
        ] {
            assert!(matches!(read::<Value>(text), Err(JsonError::TooLarge(_))), "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_input_panics(text in ".*", cut in r#"["\\\\0-9é{}:, -]*"#) {
            let _ = (too_large(&text), too_large(&cut));
        }
    }
}
