//! Which store: a URL and what else it takes to open it.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use leasehold_protocol::key::{Key, percent_decode};

#[cfg(feature = "cloud")]
use super::cloud::{Cloud, CloudOptions};
use super::{Backend, Kind, Store, memory::Memory};
use crate::env::Env;
use crate::{Error, ErrorKind, Result, StoreSettings};

/// Which store. Parsed from `file:///path` or a bare path, `memory:`, `s3://bucket/prefix`,
/// `gs://bucket/prefix`, `az://container/prefix`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoreUrl {
    /// A directory.
    Directory(PathBuf),
    /// This process' memory.
    Memory,
    /// A bucket.
    Bucket {
        /// Whose.
        kind: Kind,
        /// Its name.
        bucket: String,
        /// What our keys begin with there, without a slash at either end. May be empty.
        prefix: String,
    },
}

const SCHEMES: &str = "file:///path or a bare path, memory:, s3://bucket/prefix, gs://bucket/prefix, az://container/prefix";

impl FromStr for StoreUrl {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if text.is_empty() {
            return Err(Error::invalid(format!("no store given; use {SCHEMES}")));
        }
        if text.contains('\0') {
            return Err(Error::invalid("a store's name cannot contain NUL"));
        }
        if text == "memory:" || text == "memory://" {
            return Ok(Self::Memory);
        }
        let Some((scheme, rest)) = text.split_once("://") else {
            // "s3:bucket" is a slip of the finger rather than the name of a directory.
            if let Some(("file" | "memory" | "s3" | "gs" | "az", _)) = text.split_once(':') {
                return Err(Error::invalid(format!("{text:?} lacks its \"//\"; use {SCHEMES}")));
            }
            // So is "s3/bucket", which would be made as a directory without a word.
            if let "memory" | "s3" | "gs" | "az" = text.split('/').next().unwrap_or(text) {
                return Err(Error::invalid(format!(
                    "{text:?} lacks its \":\" (write ./{text} if you mean a folder); use {SCHEMES}"
                )));
            }
            return Ok(Self::Directory(text.into()));
        };
        let kind = match scheme {
            "file" => return file_url(text, rest),
            "s3" => Kind::S3,
            "gs" => Kind::Gcs,
            "az" => Kind::Azure,
            other => {
                return Err(Error::invalid(format!("unknown scheme {other:?}; use {SCHEMES}")));
            }
        };
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        if bucket.is_empty() {
            return Err(Error::invalid(format!("{text:?} names no bucket; use {SCHEMES}")));
        }
        let prefix = prefix.trim_end_matches('/');
        check_bucket(bucket, prefix)?;
        Ok(Self::Bucket { kind, bucket: bucket.to_owned(), prefix: prefix.to_owned() })
    }
}

/// That there can be such a bucket, and such a beginning of keys in it.
pub(super) fn check_bucket(bucket: &str, prefix: &str) -> Result<()> {
    let legal = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
    if bucket.is_empty() || !bucket.chars().all(legal) {
        return Err(Error::invalid(format!("{bucket:?} cannot be the name of a bucket")));
    }
    let checked = match prefix {
        "" => Ok(()),
        prefix => Key::new(prefix).map(drop),
    };
    checked.map_err(|error| Error::invalid(format!("the prefix {prefix:?}: {error}")))
}

fn file_url(text: &str, rest: &str) -> Result<StoreUrl> {
    if !rest.starts_with('/') {
        return Err(Error::invalid(format!("{text:?} needs an absolute path: file:///path")));
    }
    let path = percent_decode(rest.as_bytes()).and_then(|bytes| String::from_utf8(bytes).ok());
    match path {
        Some(path) => Ok(StoreUrl::Directory(path.into())),
        None => Err(Error::invalid(format!("{text:?} has a broken %-escape"))),
    }
}

impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Directory(path) => write!(f, "{}", path.display()),
            Self::Memory => f.write_str("memory:"),
            Self::Bucket { kind, bucket, prefix } => {
                let scheme = match kind {
                    Kind::Gcs => "gs",
                    Kind::Azure => "az",
                    _ => "s3",
                };
                write!(f, "{scheme}://{bucket}")?;
                if !prefix.is_empty() {
                    write!(f, "/{prefix}")?;
                }
                Ok(())
            }
        }
    }
}

/// Everything that it takes to open a store.
#[derive(Debug, Clone)]
pub struct Connect {
    /// Which.
    pub url: StoreUrl,
    /// How to talk to it.
    pub settings: StoreSettings,
    /// Where a bucket is and who we are there.
    #[cfg(feature = "cloud")]
    pub cloud: CloudOptions,
    /// Use a directory even on a network file system, where it is not safe between machines.
    pub force_network_fs: bool,
    /// Time and chance.
    pub env: Env,
}

impl Connect {
    /// With default settings.
    pub fn new(url: StoreUrl) -> Self {
        Self {
            url,
            settings: StoreSettings::default(),
            #[cfg(feature = "cloud")]
            cloud: CloudOptions::default(),
            force_network_fs: false,
            env: Env::system(),
        }
    }

    /// The store. Nothing is sent or written yet.
    pub fn open(self) -> Result<Store> {
        let settings = self.settings.checked()?;
        let backend: Arc<dyn Backend> = match &self.url {
            StoreUrl::Memory => Arc::new(Memory::new(self.env.clone())),
            #[cfg(unix)]
            StoreUrl::Directory(path) => {
                Arc::new(super::dir::Dir::new(path, self.force_network_fs, self.env.clone())?)
            }
            #[cfg(feature = "cloud")]
            StoreUrl::Bucket { kind, bucket, prefix } => {
                let (cloud, env) = (&self.cloud, &self.env);
                Arc::new(Cloud::new(*kind, bucket, prefix, cloud, &settings, env)?)
            }
            #[allow(unreachable_patterns)]
            other => {
                return Err(Error::new(
                    ErrorKind::Unsupported,
                    format!("{other} cannot be opened on this system; use a bucket"),
                ));
            }
        };
        Store::new(backend, self.env, settings)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bucket(kind: Kind, bucket: &str, prefix: &str) -> StoreUrl {
        StoreUrl::Bucket { kind, bucket: bucket.into(), prefix: prefix.into() }
    }

    #[test]
    fn urls_name_stores() {
        for (text, url) in [
            ("./.leasehold", StoreUrl::Directory("./.leasehold".into())),
            ("/var/lib/x", StoreUrl::Directory("/var/lib/x".into())),
            ("file:///var/lib/a%20b", StoreUrl::Directory("/var/lib/a b".into())),
            ("memory:", StoreUrl::Memory),
            ("s3://b", bucket(Kind::S3, "b", "")),
            ("s3://b/", bucket(Kind::S3, "b", "")),
            ("s3://b/fleet/one/", bucket(Kind::S3, "b", "fleet/one")),
            ("gs://b/x", bucket(Kind::Gcs, "b", "x")),
            ("az://c/x", bucket(Kind::Azure, "c", "x")),
        ] {
            assert_eq!(text.parse::<StoreUrl>().unwrap(), url, "{text}");
        }
    }

    #[test]
    fn bad_urls_say_what_to_write_instead() {
        for (text, part) in [
            ("", "no store given"),
            ("ftp://x", "unknown scheme \"ftp\""),
            ("s3://", "names no bucket"),
            ("s3:///key", "names no bucket"),
            ("s3:bucket", "lacks its \"//\""),
            ("s3://b?x=1", "cannot be the name of a bucket"),
            ("s3://b/a/../c", "'..'"),
            ("s3://b//a", "'//'"),
            ("file://host/x", "absolute path"),
            ("file:///a%zz", "%-escape"),
            ("a\0b", "NUL"),
        ] {
            let error = text.parse::<StoreUrl>().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid, "{text}");
            assert!(error.to_string().contains(part), "{text}: {error}");
        }
    }

    #[cfg(feature = "s3")]
    #[test]
    fn buckets_that_are_put_together_by_hand_are_checked_too() {
        let open = |url: StoreUrl| {
            let mut connect = Connect::new(url);
            connect.cloud.region = Some("eu-north-1".to_owned());
            connect.open()
        };
        for (name, prefix, part) in [
            ("b", "/a//b/", "the prefix \"/a//b/\""),
            ("b", "a/", "'/'"),
            ("b", "/", "'/'"),
            ("b", "a/../b", "'..'"),
            ("b", "a\nb", "control"),
            ("b/c", "", "cannot be the name of a bucket"),
            ("", "a", "cannot be the name of a bucket"),
        ] {
            let error = open(bucket(Kind::S3, name, prefix)).map(drop).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
            assert!(error.to_string().contains(part), "{error}");
        }
        for prefix in ["", "a/b"] {
            open(bucket(Kind::S3, "b", prefix)).map(drop).unwrap();
        }
    }
}
