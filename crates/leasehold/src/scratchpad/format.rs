//! What is in a file: YAML, JSON, Markdown or anything, told by its name.

use std::fmt;

use leasehold_protocol::key::Key;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{Error, ErrorKind, Result};

/// How a value is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// `.yaml`, `.yml`
    Yaml,
    /// `.json`
    Json,
    /// `.md`, `.markdown`, `.txt`: text as it is.
    Text,
    /// Everything else: bytes as they are.
    Raw,
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Yaml => "YAML",
            Self::Json => "JSON",
            Self::Text => "text",
            Self::Raw => "bytes",
        })
    }
}

impl Format {
    /// What a file with this name holds.
    pub fn of(path: &str) -> Self {
        let name = path.rsplit('/').next().unwrap_or(path);
        let extension = name.rsplit_once('.').map(|(_, extension)| extension.to_ascii_lowercase());
        match extension.as_deref() {
            Some("yaml" | "yml") => Self::Yaml,
            Some("json") => Self::Json,
            Some("md" | "markdown" | "txt") => Self::Text,
            _ => Self::Raw,
        }
    }

    /// The value in these bytes. Text becomes a string; raw bytes have no value.
    pub fn parse<T: DeserializeOwned>(self, bytes: &[u8], key: &Key) -> Result<T> {
        let bad = |error: String| {
            Error::new(ErrorKind::Data, format!("is not valid {self}: {error}")).at(key)
        };
        let text = || std::str::from_utf8(bytes).map_err(|error| bad(error.to_string()));
        match self {
            Self::Yaml => serde_saphyr::from_str(text()?).map_err(|error| bad(error.to_string())),
            Self::Json => serde_json::from_slice(bytes).map_err(|error| bad(error.to_string())),
            Self::Text => {
                let value = serde_json::Value::String(text()?.to_owned());
                serde_json::from_value(value).map_err(|error| bad(error.to_string()))
            }
            Self::Raw => Err(no_value(key)),
        }
    }

    /// The bytes of this value.
    pub fn write<T: Serialize + ?Sized>(self, value: &T, key: &Key) -> Result<Vec<u8>> {
        let bad =
            |error: String| Error::invalid(format!("cannot be written as {self}: {error}")).at(key);
        match self {
            Self::Yaml => {
                // By way of JSON's model: what it cannot hold cannot be read back either.
                let value = serde_json::to_value(value).map_err(|error| bad(error.to_string()))?;
                let text =
                    serde_saphyr::to_string(&value).map_err(|error| bad(error.to_string()))?;
                Ok(text.into_bytes())
            }
            Self::Json => {
                let mut bytes =
                    serde_json::to_vec_pretty(value).map_err(|error| bad(error.to_string()))?;
                bytes.push(b'\n');
                Ok(bytes)
            }
            Self::Text => {
                match serde_json::to_value(value).map_err(|error| bad(error.to_string()))? {
                    serde_json::Value::String(text) => Ok(text.into_bytes()),
                    _ => Err(bad("it is not a text".to_owned())),
                }
            }
            Self::Raw => Err(no_value(key)),
        }
    }
}

fn no_value(key: &Key) -> Error {
    Error::invalid("its name does not say what it holds: read and write it as bytes").at(key)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn key() -> Key {
        Key::new("k").unwrap()
    }

    #[test]
    fn names_tell_the_format() {
        for (path, format) in [
            ("a/state.yaml", Format::Yaml),
            ("a.YML", Format::Yaml),
            ("x.json", Format::Json),
            ("notes.md", Format::Text),
            ("a.b/c", Format::Raw),
            ("bin", Format::Raw),
        ] {
            assert_eq!(Format::of(path), format, "{path}");
        }
    }

    #[test]
    fn values_come_back_as_they_went_in() {
        let value = json!({
            "counter": 3, "pi": 3.5, "none": null, "yes": true, "list": [1, "two", {"three": 3}],
            "odd": ["", " ", "yes", "no", "null", "1", "1.5", "a: b", "- x", "#c", "é\n\"'\\", "0x10", "~"],
            "empty": {}, "nothing": []
        });
        for format in [Format::Yaml, Format::Json] {
            let bytes = format.write(&value, &key()).unwrap();
            let again: Value = format.parse(&bytes, &key()).unwrap();
            assert_eq!(again, value, "{}", String::from_utf8_lossy(&bytes));
        }
        let text = "# Title\n\n- x\n";
        let bytes = Format::Text.write(text, &key()).unwrap();
        assert_eq!(bytes, text.as_bytes());
        assert_eq!(Format::Text.parse::<String>(&bytes, &key()).unwrap(), text);
    }

    #[test]
    fn nonsense_is_refused() {
        for (format, bytes) in [
            (Format::Json, &b"{"[..]),
            (Format::Json, b""),
            (Format::Yaml, b"a: [1"),
            (Format::Yaml, b"\xff"),
            (Format::Text, b"\xff"),
            (Format::Raw, b"x"),
        ] {
            assert!(format.parse::<Value>(bytes, &key()).is_err(), "{format:?}");
        }
        assert!(Format::Text.write(&json!({"a": 1}), &key()).is_err());
        assert!(Format::Raw.write("x", &key()).is_err());
    }
}
