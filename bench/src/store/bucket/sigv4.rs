//! As much of Amazon's Signature Version 4 as a request for one object needs.

use std::fmt::Write as _;

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

/// What our own client sends too: the signature covers the head, not the body.
const UNSIGNED: &str = "UNSIGNED-PAYLOAD";

/// Signs requests. The key, which is good for a day, is made once: as any client would.
pub struct Signer {
    access: String,
    scope: String,
    key: Hmac<Sha256>,
}

impl Signer {
    pub fn new(access: &str, secret: &str) -> Self {
        let scope = format!("{}/us-east-1/s3/aws4_request", &now()[..8]);
        let mut key = format!("AWS4{secret}").into_bytes();
        for part in scope.split('/') {
            key = mac(&hmac(&key), part);
        }
        Self { access: access.to_owned(), scope, key: hmac(&key) }
    }

    /// The headers that sign a request at this moment. `path` and `query` are escaped already, and the
    /// query's parts in order; `condition` is signed with the rest.
    pub fn headers(
        &self,
        method: &str,
        host: &str,
        (path, query): (&str, &str),
        condition: Option<(&str, &str)>,
    ) -> [(&'static str, String); 3] {
        let now = now();
        let (signed, condition) = match condition {
            Some((name, value)) => {
                let signed = format!("host;{name};x-amz-content-sha256;x-amz-date");
                (signed, format!("{name}:{value}\n"))
            }
            None => ("host;x-amz-content-sha256;x-amz-date".to_owned(), String::new()),
        };
        let canonical = format!(
            "{method}\n{path}\n{query}\nhost:{host}\n{condition}x-amz-content-sha256:{UNSIGNED}\n\
             x-amz-date:{now}\n\n{signed}\n{UNSIGNED}"
        );
        let Self { access, scope, key } = self;
        let to_sign =
            format!("AWS4-HMAC-SHA256\n{now}\n{scope}\n{}", hex(&Sha256::digest(canonical)));
        let signature = hex(&mac(key, &to_sign));
        let authorization = format!(
            "AWS4-HMAC-SHA256 Credential={access}/{scope}, SignedHeaders={signed}, \
             Signature={signature}"
        );
        [
            ("x-amz-content-sha256", UNSIGNED.to_owned()),
            ("x-amz-date", now),
            ("authorization", authorization),
        ]
    }
}

fn now() -> String {
    jiff::Timestamp::now().strftime("%Y%m%dT%H%M%SZ").to_string()
}

fn hmac(key: &[u8]) -> Hmac<Sha256> {
    Hmac::new_from_slice(key).expect("a key of any length makes an HMAC")
}

fn mac(key: &Hmac<Sha256>, text: &str) -> Vec<u8> {
    key.clone().chain_update(text).finalize().into_bytes().to_vec()
}

fn hex(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        let _ = write!(text, "{byte:02x}");
    }
    text
}
