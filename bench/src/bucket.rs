//! The S3 servers that benchmarks run on.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use leasehold::Store;
use leasehold::store::cloud::CloudOptions;
use leasehold::store::{Connect, StoreUrl};
use leasehold_testkit::servers::{Server, servers_folder};

use crate::report::Report;
use crate::rig::Rig;

/// SeaweedFS, started anew. If it is not installed, and nothing may be, the report says that this was
/// not measured.
pub fn seaweedfs(rig: &Rig, report: &mut Report, what: &str) -> Result<Option<Server>> {
    Ok(is_installed(rig, report, what, "weed")?.then(Server::seaweedfs))
}

/// The same of ministack.
pub fn ministack(rig: &Rig, report: &mut Report, what: &str) -> Result<Option<Server>> {
    Ok(is_installed(rig, report, what, "ministack")?.then(Server::ministack))
}

fn is_installed(rig: &Rig, report: &mut Report, what: &str, program: &str) -> Result<bool> {
    let here = || servers_folder().join("venv/bin").join(program).exists();
    if !here() && rig.with_peers() {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/servers.sh");
        let done = Command::new("bash").arg(script).stdout(std::io::stderr()).status()?;
        ensure!(done.success(), "scripts/servers.sh failed");
    }
    if !here() {
        report.not_run(what, "no S3 server is installed: scripts/servers.sh, or --full, does that");
    }
    Ok(here())
}

/// A store that another process of the benchmark can open, too.
#[derive(Debug, Clone)]
pub enum Place {
    Directory(PathBuf),
    Bucket { endpoint: String, bucket: String, access_key: String, secret_key: String },
}

impl Place {
    /// The bucket of a server.
    pub fn on(server: &Server) -> Self {
        Self::Bucket {
            endpoint: server.endpoint(),
            bucket: server.bucket().to_owned(),
            access_key: server.access_key().to_owned(),
            secret_key: server.secret_key().to_owned(),
        }
    }

    /// What the other process is told: one word.
    pub fn word(&self) -> String {
        match self {
            Self::Directory(path) => path.display().to_string(),
            Self::Bucket { endpoint, bucket, access_key, secret_key } => {
                format!("s3 {endpoint} {bucket} {access_key} {secret_key}")
            }
        }
    }

    /// What that word means.
    pub fn parse(word: &str) -> Result<Self> {
        let Some(bucket) = word.strip_prefix("s3 ") else {
            return Ok(Self::Directory(PathBuf::from(word)));
        };
        let words: Vec<String> = bucket.split(' ').map(str::to_owned).collect();
        let words: [String; 4] = words.try_into().ok().context("not a bucket")?;
        let [endpoint, bucket, access_key, secret_key] = words;
        Ok(Self::Bucket { endpoint, bucket, access_key, secret_key })
    }

    pub fn open(&self) -> Result<Store> {
        match self {
            Self::Directory(path) => Ok(Connect::new(StoreUrl::Directory(path.clone())).open()?),
            Self::Bucket { endpoint, bucket, access_key, secret_key } => {
                let mut connect = Connect::new(format!("s3://{bucket}").parse()?);
                connect.cloud = CloudOptions {
                    endpoint: Some(endpoint.clone()),
                    access_key: Some(access_key.clone()),
                    secret_key: Some(secret_key.clone()),
                    ..CloudOptions::default()
                };
                Ok(connect.open()?)
            }
        }
    }
}
