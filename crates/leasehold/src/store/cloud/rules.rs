//! Rules of an S3 bucket that work behind our back, read for the doctor.
//!
//! Versioning keeps a paid copy of every heartbeat for ever; an expiry rule deletes receipts and
//! records that somebody relies on. OpenDAL does not ask for either, so the two requests are made
//! here, and signed like any other.

use opendal::raw::Operation;
use opendal::{Buffer, HttpTransporter};

use super::CloudOptions;
use super::s3::bucket_url;

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
    let url = bucket_url(bucket, options, &options.signing_region().ok()?);
    // Whatever is an operation goes to the bucket, and is signed.
    let request = http::Request::get(format!("{url}?{what}=")).extension(Operation::Read);
    let request = request.body(Buffer::new()).ok()?;
    let response = transport.send(request).await.ok()?;
    let found = response.status().is_success();
    tracing::debug!(what, status = response.status().as_u16(), "asked for the bucket's rules");
    let body = response.into_body().to_bytes();
    found.then(|| String::from_utf8_lossy(&body).into_owned())
}
