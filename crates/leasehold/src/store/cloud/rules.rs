//! Rules of an S3 bucket that work behind our back, read for the doctor.
//!
//! Versioning keeps a paid copy of every heartbeat for ever; an expiry rule deletes receipts and
//! records that somebody relies on. OpenDAL does not ask for either, so the two requests are
//! signed here, with the same credentials.

use opendal::{Buffer, HttpTransporter};
use reqsign_aws_v4::RequestSigner;
use reqsign_core::Signer;

use super::CloudOptions;
use super::s3::{context, credentials};

/// What to warn of. What may not be read, or is not supported, is passed over in silence: it is
/// often not allowed.
pub async fn warnings(
    transport: &HttpTransporter,
    bucket: &str,
    options: &CloudOptions,
) -> Vec<String> {
    let mut warnings = Vec::new();
    if let Some(text) = ask(transport, bucket, options, "versioning").await
        && text.contains("<Status>Enabled</Status>")
    {
        warnings.push(
            "versioning is on: every heartbeat and every deleted task keeps a paid copy; turn it \
             off for this bucket, or expire noncurrent versions within a day"
                .to_owned(),
        );
    }
    if let Some(text) = ask(transport, bucket, options, "lifecycle").await
        && text.contains("<Expiration>")
        && text.contains("<Status>Enabled</Status>")
    {
        warnings.push(
            "a lifecycle rule expires objects: if it covers this prefix, it deletes records that \
             Leasehold relies on"
                .to_owned(),
        );
    }
    warnings
}

async fn ask(
    transport: &HttpTransporter,
    bucket: &str,
    options: &CloudOptions,
    what: &str,
) -> Option<String> {
    let region = options.signing_region().ok()?;
    let endpoint = match options.endpoint.as_deref() {
        Some(endpoint) => endpoint.trim_end_matches('/').to_owned(),
        None => format!("https://s3.{region}.amazonaws.com"),
    };
    let request = http::Request::get(format!("{endpoint}/{bucket}?{what}=")).body(()).ok()?;
    let (mut parts, ()) = request.into_parts();
    if !options.anonymous {
        let signer = RequestSigner::new("s3", &region);
        let signer = Signer::new(context(transport), credentials(options), signer);
        signer.sign(&mut parts, None).await.ok()?;
    }
    let request = http::Request::from_parts(parts, Buffer::new());
    let response = transport.send(request).await.ok()?;
    let found = response.status().is_success();
    tracing::debug!(what, status = response.status().as_u16(), "asked for the bucket's rules");
    let body = response.into_body().to_bytes();
    found.then(|| String::from_utf8_lossy(&body).into_owned())
}
