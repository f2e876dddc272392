//! As much of Amazon's Signature Version 4 as a PUT without a query needs.

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

/// What our own client sends too: the signature covers the head, not the body.
const UNSIGNED: &str = "UNSIGNED-PAYLOAD";

/// The headers that sign a request at this moment. `path` is escaped already.
pub fn headers(
    method: &str,
    host: &str,
    path: &str,
    access: &str,
    secret: &str,
) -> [(&'static str, String); 3] {
    let now = jiff::Timestamp::now().strftime("%Y%m%dT%H%M%SZ").to_string();
    let authorization = authorization(method, host, path, access, secret, &now);
    [
        ("x-amz-content-sha256", UNSIGNED.to_owned()),
        ("x-amz-date", now),
        ("authorization", authorization),
    ]
}

fn authorization(
    method: &str,
    host: &str,
    path: &str,
    access: &str,
    secret: &str,
    now: &str,
) -> String {
    let signed = "host;x-amz-content-sha256;x-amz-date";
    let canonical = format!(
        "{method}\n{path}\n\nhost:{host}\nx-amz-content-sha256:{UNSIGNED}\nx-amz-date:{now}\n\n\
         {signed}\n{UNSIGNED}"
    );
    let scope = format!("{}/us-east-1/s3/aws4_request", &now[..8]);
    let to_sign = format!("AWS4-HMAC-SHA256\n{now}\n{scope}\n{}", hex(&Sha256::digest(canonical)));
    let mut key = format!("AWS4{secret}").into_bytes();
    for part in scope.split('/') {
        key = mac(&key, part);
    }
    let signature = hex(&mac(&key, &to_sign));
    format!(
        "AWS4-HMAC-SHA256 Credential={access}/{scope}, SignedHeaders={signed}, \
         Signature={signature}"
    )
}

fn mac(key: &[u8], text: &str) -> Vec<u8> {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("a key of any length makes an HMAC");
    mac.update(text.as_bytes());
    mac.finalize().into_bytes().to_vec()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
