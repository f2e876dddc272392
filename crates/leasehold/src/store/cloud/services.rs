//! Where a bucket is and who we are there, and OpenDAL's part of it.

use std::sync::Arc;

use opendal::raw::Servicer;
use serde::{Deserialize, Serialize};

use super::outcome::first_line;
#[cfg(feature = "s3")]
use super::s3::{credentials, is_express};
use crate::store::Kind;
use crate::{Error, ErrorKind, Result};

/// Where a bucket is and who we are there. What is `None` comes from where each provider's tools
/// look for it: AWS, Google and Azure environment variables, profiles, and instance metadata.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CloudOptions {
    /// The server's URL, for anything that is not the provider's own.
    pub endpoint: Option<String>,
    /// S3: the bucket's region.
    pub region: Option<String>,
    /// S3: the bucket in the path (`host/bucket/key`) instead of in the host name. By default only
    /// with an endpoint of one's own.
    pub path_style: Option<bool>,
    /// S3: the access key. Azure: the account's name.
    pub access_key: Option<String>,
    /// S3: the secret. Azure: the account's key.
    pub secret_key: Option<String>,
    /// S3: the token of temporary credentials.
    pub session_token: Option<String>,
    /// S3: a profile of the AWS configuration files.
    pub profile: Option<String>,
    /// Google: a file with credentials.
    pub credential_file: Option<String>,
    /// Send unsigned requests.
    pub anonymous: bool,
}

impl std::fmt::Debug for CloudOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Secrets stay out of logs.
        f.debug_struct("CloudOptions")
            .field("endpoint", &self.endpoint)
            .field("region", &self.region)
            .field("path_style", &self.path_style)
            .field("access_key", &self.access_key)
            .field("profile", &self.profile)
            .field("anonymous", &self.anonymous)
            .finish_non_exhaustive()
    }
}

#[cfg(feature = "s3")]
impl CloudOptions {
    pub(super) fn s3_endpoint(&self) -> &str {
        self.endpoint.as_deref().unwrap_or("https://s3.amazonaws.com")
    }

    pub(super) fn signing_region(&self) -> Result<String> {
        match (&self.region, &self.endpoint) {
            (Some(region), _) => Ok(region.clone()),
            // Servers of one's own hardly ever mind.
            (None, Some(_)) => Ok("us-east-1".to_owned()),
            (None, None) => Err(Error::invalid("no region: pass --region or set AWS_REGION")),
        }
    }

    pub(super) fn uses_path_style(&self, bucket: &str) -> bool {
        // A dot in a bucket's name does not match the certificate of the host it would become.
        self.path_style.unwrap_or(self.endpoint.is_some() || bucket.contains('.'))
    }
}

/// What makes OpenDAL's requests to such a bucket.
pub(super) fn build_service(
    kind: Kind,
    bucket: &str,
    prefix: &str,
    options: &CloudOptions,
) -> Result<Servicer> {
    match kind {
        #[cfg(feature = "s3")]
        Kind::S3 => s3_service(bucket, prefix, options),
        #[cfg(feature = "gcs")]
        Kind::Gcs => gcs_service(bucket, prefix, options),
        #[cfg(feature = "azure")]
        Kind::Azure => azure_service(bucket, prefix, options),
        other => Err(Error::new(
            ErrorKind::Unsupported,
            format!("this binary was built without support for {other:?}"),
        )),
    }
}

fn built<S: opendal::raw::Service>(service: opendal::Result<S>) -> Result<Servicer> {
    match service {
        Ok(service) => Ok(Arc::new(service)),
        Err(error) => {
            Err(Error::invalid(format!("cannot use this bucket: {}", first_line(&error))))
        }
    }
}

#[cfg(feature = "s3")]
fn s3_service(bucket: &str, prefix: &str, options: &CloudOptions) -> Result<Servicer> {
    use opendal::Builder as _;
    let mut s3 = opendal::services::S3::default()
        .bucket(bucket)
        .root(prefix)
        .region(&options.signing_region()?)
        .endpoint(options.s3_endpoint());
    if options.access_key.is_some() != options.secret_key.is_some() {
        return Err(Error::invalid("an access key needs its secret key, and the reverse"));
    }
    if !options.uses_path_style(bucket) {
        s3 = s3.enable_virtual_host_style();
    }
    // OpenDAL's own signer keeps credentials that do not say when they expire for ever, and signs
    // before requests wait for their turn. The sessions of S3 Express are made anew every few minutes.
    s3 = match is_express(bucket) && !options.anonymous {
        true => s3.credential_provider_chain(credentials(options)),
        false => s3.skip_signature(),
    };
    built(s3.build())
}

#[cfg(feature = "gcs")]
fn gcs_service(bucket: &str, prefix: &str, options: &CloudOptions) -> Result<Servicer> {
    use opendal::Builder as _;
    let mut gcs = opendal::services::Gcs::default().bucket(bucket).root(prefix);
    if let Some(endpoint) = &options.endpoint {
        gcs = gcs.endpoint(endpoint);
    }
    if let Some(file) = &options.credential_file {
        gcs = gcs.credential_path(file);
    }
    if options.anonymous {
        gcs = gcs.skip_signature();
    }
    built(gcs.build())
}

#[cfg(feature = "azure")]
fn azure_service(container: &str, prefix: &str, options: &CloudOptions) -> Result<Servicer> {
    use opendal::Builder as _;
    let endpoint = match (&options.endpoint, &options.access_key) {
        (Some(endpoint), _) => endpoint.clone(),
        (None, Some(account)) => format!("https://{account}.blob.core.windows.net"),
        (None, None) => {
            return Err(Error::invalid(
                "no storage account: set AZURE_STORAGE_ACCOUNT or pass --access-key",
            ));
        }
    };
    let mut azure =
        opendal::services::Azblob::default().container(container).root(prefix).endpoint(&endpoint);
    if let Some(account) = &options.access_key {
        azure = azure.account_name(account);
    }
    if let Some(key) = &options.secret_key {
        azure = azure.account_key(key);
    }
    if let Some(token) = &options.session_token {
        azure = azure.sas_token(token);
    }
    if options.anonymous {
        azure = azure.skip_signature();
    }
    built(azure.build())
}
