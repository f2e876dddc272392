//! Where the store is: flag, then environment, then file, then default.

use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use leasehold::lock::LockSettings;
use leasehold::settings::format_duration;
use leasehold::store::cloud::CloudOptions;
use leasehold::store::{Connect, Kind, StoreUrl};
use leasehold::{Error, ErrorKind, StoreSettings};
use serde::Deserialize;

use crate::args::{Args, LockTerms};

const FILE: &str = "leasehold.toml";
const DEFAULT_STORE: &str = "./.leasehold";

/// `leasehold.toml`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Config {
    /// The store's URL. A path is relative to the file.
    store: Option<String>,
    /// This node's replica: a directory. A path is relative to the file.
    replica: Option<PathBuf>,
    /// How to talk to it.
    connection: StoreSettings,
    /// Where a bucket is and who we are there.
    cloud: CloudOptions,
    /// Use a directory on a network file system.
    force_network_fs: bool,
    /// How locks are acquired and kept.
    lock: LockConfig,
    /// This node's name in the fleet.
    node: Option<String>,
    /// Where a node keeps what it must remember. A path is relative to the file.
    state: Option<PathBuf>,
}

/// This node's name: flag, environment, file, else the host's.
pub fn node_name(args: &Args, flag: Option<&str>) -> anyhow::Result<String> {
    let (config, _) = read_config(config_file(args).as_deref())?;
    let name = flag.map(str::to_owned).or_else(|| variable("LEASEHOLD_NODE")).or(config.node);
    let name = name.unwrap_or_else(leasehold::host::host_name);
    match name.is_empty() {
        true => Err(Error::new(ErrorKind::Invalid, "a node needs a name (--node)").into()),
        false => Ok(name),
    }
}

/// Where this node keeps what it must remember: flag, environment, file, else where the system keeps
/// such things.
pub fn state_folder(args: &Args, flag: Option<&Path>) -> anyhow::Result<PathBuf> {
    let (config, folder) = read_config(config_file(args).as_deref())?;
    let path = |name: &str| variable(name).map(PathBuf::from);
    let below = |base: PathBuf, rest: &str| base.join(rest);
    flag.map(Path::to_owned)
        .or_else(|| path("LEASEHOLD_STATE"))
        .or_else(|| config.state.map(|state| folder.join(state)))
        // Of a service.
        .or_else(|| path("STATE_DIRECTORY"))
        .or_else(|| path("XDG_STATE_HOME").map(|base| below(base, "leasehold")))
        .or_else(|| path("HOME").map(|base| below(base, ".local/state/leasehold")))
        .context("where to keep this node's state? Say --state")
}

/// `[lock]` in `leasehold.toml`. What is not given is what suits the store.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct LockConfig {
    #[serde(deserialize_with = "span")]
    timeout: Option<Duration>,
    #[serde(deserialize_with = "span")]
    heartbeat: Option<Duration>,
    #[serde(deserialize_with = "span")]
    ttl: Option<Duration>,
    attempts: Option<u32>,
    #[serde(deserialize_with = "span")]
    retry_delay: Option<Duration>,
}

/// Here, where it is known in which line it stands.
fn span<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Option<Duration>, D::Error> {
    let text = String::deserialize(from)?;
    leasehold::settings::parse_duration(&text).map(Some).map_err(serde::de::Error::custom)
}

/// The shortest ttl of a lock that a command line can keep: less is over before its command has started.
const LEAST_TTL: Duration = Duration::from_millis(100);

/// How the lock that was asked for is acquired and kept.
pub fn lock_settings(args: &Args, terms: &LockTerms, kind: Kind) -> anyhow::Result<LockSettings> {
    let (config, _) = read_config(config_file(args).as_deref())?;
    let file = config.lock;
    let usual = LockSettings::of(kind);
    let ttl = terms.ttl.or(file.ttl).unwrap_or(usual.ttl);
    if ttl < LEAST_TTL {
        let message = format!("a ttl of {} is too short: at least 100ms", format_duration(ttl));
        return Err(Error::new(ErrorKind::Invalid, message).into());
    }
    Ok(LockSettings {
        timeout: terms.wait.or(file.timeout).unwrap_or(usual.timeout),
        // A ttl of one's own gets a heartbeat that suits it.
        heartbeat: match (terms.heartbeat, file.heartbeat, terms.ttl) {
            (None, None, Some(ttl)) => ttl / 3,
            (flag, file, _) => flag.or(file).unwrap_or(usual.heartbeat),
        },
        ttl,
        // With a time to wait, that is what counts.
        attempts: match terms.wait {
            Some(_) => u32::MAX,
            None => terms.attempts.or(file.attempts).unwrap_or(usual.attempts),
        },
        retry_delay: terms.retry_delay.or(file.retry_delay).unwrap_or(usual.retry_delay),
    })
}

fn config_file(args: &Args) -> Option<PathBuf> {
    args.store.config.clone().or_else(|| variable("LEASEHOLD_CONFIG").map(Into::into))
}

/// Everything that it takes to open the store that was asked for.
pub fn connect(args: &Args) -> anyhow::Result<Connect> {
    let (config, folder) = read_config(config_file(args).as_deref())?;
    let store = args.store.store.clone().or_else(|| variable("LEASEHOLD_STORE"));
    let url = match (store, &config.store) {
        (Some(url), _) => url.parse()?,
        (None, Some(url)) => match url.parse()? {
            StoreUrl::Directory(path) => StoreUrl::Directory(folder.join(path)),
            other => other,
        },
        (None, None) => DEFAULT_STORE.parse()?,
    };
    let mut connect = Connect::new(url);
    connect.env = crate::clock::env();
    connect.settings = config.connection;
    if let Some(connections) = args.store.connections {
        connect.settings.connections = connections;
    }
    if let Some(limit) = args.store.requests_per_minute {
        connect.settings.requests_per_minute = Some(limit);
    }
    connect.force_network_fs = args.store.force_network_fs || config.force_network_fs;
    connect.cloud = cloud_options(args, config.cloud, &connect.url);
    Ok(connect)
}

/// Everything that it takes to open this node's replica, if it has one.
pub fn replica(args: &Args) -> anyhow::Result<Option<Connect>> {
    let (config, folder) = read_config(config_file(args).as_deref())?;
    let given = args.store.replica.clone();
    let path = given
        .or_else(|| variable("LEASEHOLD_REPLICA").map(PathBuf::from))
        .or_else(|| config.replica.map(|path| folder.join(path)));
    let Some(path) = path else { return Ok(None) };
    if let StoreUrl::Directory(store) = self::connect(args)?.url {
        // Each would take the other's records for its own.
        let (here, there) = (resolved(&path)?, resolved(&store)?);
        if here.starts_with(&there) || there.starts_with(&here) {
            let message = format!(
                "the replica {} and the store {} must be different folders, none of them in the other",
                path.display(),
                store.display()
            );
            return Err(Error::new(ErrorKind::Invalid, message).into());
        }
    }
    let mut connect = Connect::new(StoreUrl::Directory(path));
    connect.env = crate::clock::env();
    connect.force_network_fs = args.store.force_network_fs || config.force_network_fs;
    Ok(Some(connect))
}

/// The path without links and dots, also where it is not there yet.
fn resolved(path: &Path) -> anyhow::Result<PathBuf> {
    let mut real = PathBuf::new();
    for part in std::path::absolute(path)?.components() {
        match part {
            Component::ParentDir => _ = real.pop(),
            part => real.push(part),
        }
        // Step by step: what comes after a link is where that leads to.
        real = real.canonicalize().unwrap_or(real);
    }
    Ok(real)
}

/// A variable of the environment. An empty one is as good as none.
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

fn read_config(given: Option<&Path>) -> anyhow::Result<(Config, PathBuf)> {
    let path = match given {
        Some(path) => path.to_owned(),
        None => match find_config() {
            Some(path) => path,
            None => return Ok((Config::default(), PathBuf::new())),
        },
    };
    let text = std::fs::read_to_string(&path)
        .with_context(|| format!("cannot read the configuration {}", path.display()))?;
    let config = toml::from_str(&text).map_err(|error| {
        Error::new(ErrorKind::Invalid, format!("{} is not right: {error}", path.display()))
    })?;
    let folder = path.parent().map(Path::to_owned).unwrap_or_default();
    Ok((config, folder))
}

fn find_config() -> Option<PathBuf> {
    let here = std::env::current_dir().ok()?;
    here.ancestors().map(|folder| folder.join(FILE)).find(|path| path.is_file())
}

fn cloud_options(args: &Args, file: CloudOptions, url: &StoreUrl) -> CloudOptions {
    let StoreUrl::Bucket { kind, .. } = url else { return file };
    let flags = &args.store;
    let first = |flag: &Option<String>, variables: &[&str], file: Option<String>| {
        flag.clone().or_else(|| variables.iter().find_map(|name| variable(name))).or(file)
    };
    let (endpoint, account, key, token): (&[&str], &[&str], &[&str], &[&str]) = match kind {
        Kind::Azure => (
            &["AZURE_STORAGE_ENDPOINT"],
            &["AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_ACCOUNT_NAME"],
            &["AZURE_STORAGE_KEY", "AZURE_STORAGE_ACCOUNT_KEY"],
            &["AZURE_STORAGE_SAS_TOKEN"],
        ),
        Kind::Gcs => (&["STORAGE_EMULATOR_HOST"], &[], &[], &[]),
        // With a profile asked for by flag, keys in the environment do not count.
        _ if flags.profile.is_some() => (ENDPOINTS, &[], &[], &[]),
        _ => {
            (ENDPOINTS, &["AWS_ACCESS_KEY_ID"], &["AWS_SECRET_ACCESS_KEY"], &["AWS_SESSION_TOKEN"])
        }
    };
    let region = first(&flags.region, &["AWS_REGION", "AWS_DEFAULT_REGION"], file.region);
    let profile = first(&flags.profile, &[], file.profile);
    CloudOptions {
        endpoint: first(&flags.endpoint, endpoint, file.endpoint),
        region: region.or_else(|| profile_region(profile.as_deref())),
        path_style: flags.path_style.or(file.path_style),
        access_key: first(&flags.access_key, account, file.access_key),
        secret_key: first(&None, key, file.secret_key),
        session_token: first(&None, token, file.session_token),
        profile,
        credential_file: file.credential_file,
        anonymous: flags.anonymous || file.anonymous,
    }
}

const ENDPOINTS: &[&str] = &["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"];

/// The region that the AWS configuration file names for this profile.
fn profile_region(profile: Option<&str>) -> Option<String> {
    let path = variable("AWS_CONFIG_FILE").map(PathBuf::from);
    let path = path.or_else(|| Some(Path::new(&variable("HOME")?).join(".aws/config")))?;
    let profile = profile.map(str::to_owned).or_else(|| variable("AWS_PROFILE"));
    region_in(&std::fs::read_to_string(path).ok()?, profile.as_deref().unwrap_or("default"))
}

fn region_in(config: &str, profile: &str) -> Option<String> {
    let mut here = false;
    for line in config.lines().map(str::trim) {
        if let Some(section) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            let name = section.trim();
            here = name.strip_prefix("profile ").unwrap_or(name).trim() == profile;
        } else if here
            && let Some((name, value)) = line.split_once('=')
            && name.trim() == "region"
        {
            return Some(value.trim().to_owned());
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_region_of_a_profile_is_found() {
        let config =
            "[default]\nregion = eu-west-1\n\n[profile ci]\noutput=json\nregion=us-east-2\n";
        assert_eq!(region_in(config, "default").as_deref(), Some("eu-west-1"));
        assert_eq!(region_in(config, "ci").as_deref(), Some("us-east-2"));
        assert_eq!(region_in(config, "other"), None);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// Whatever stands in the file, it is read or refused.
        #[test]
        fn no_configuration_panics(
            pieces in prop::collection::vec(prop::sample::select(vec![
                "store", "connection", "cloud", "lock", "ttl", "attempts", "request_timeout", "[", "]",
                "=", ".", "\"", "\n", " ", "30s", "-1", "99999999999999999999", "true", "{", "}", "#", "ü",
                "[connection]\n", "[lock]\n", "store = \"s3://b/p\"\n", "attempts = 4\n", "ttl = \"9d\"\n",
            ]), 0..14),
        ) {
            let text = pieces.concat();
            if let Ok(config) = toml::from_str::<Config>(&text) {
                let _ = config.connection.checked();
                let _ = config.store.map(|url| url.parse::<StoreUrl>());
            }
            let _ = region_in(&text, "default");
            let _ = text.parse::<StoreUrl>();
        }
    }
}
