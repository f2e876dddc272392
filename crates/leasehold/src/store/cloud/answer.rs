//! What a bucket's answer means, decided by its error *code*, not by the status alone.
//!
//! Nothing outside this file compares status codes.

use crate::{Error, ErrorKind};

/// What came back for one request.
#[derive(Debug, Clone, Default)]
pub struct Seen {
    /// The status, or 0 if no answer came.
    pub status: u16,
    /// The store's own code for the error: `PreconditionFailed`, `BlobAlreadyExists`, ….
    pub code: String,
    /// The store's own words.
    pub message: String,
    /// Why no answer came.
    pub failure: String,
    /// Whether it is the answer to a HEAD: that has no body which would say why.
    pub is_head: bool,
}

/// What condition a request had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Condition {
    /// None.
    None,
    /// The object must not be there.
    Absent,
    /// The object must be there in a certain version, or must have changed since.
    Matches,
}

/// What an answer that is not a success means.
#[derive(Debug)]
pub enum Answer {
    /// The object is not there.
    Missing,
    /// The object is still the version that the caller knows.
    NotModified,
    /// The condition does not hold.
    Refused,
    /// Others were writing at the same time.
    Contended,
    /// No answer, or one that leaves open whether the request was carried out.
    Unanswered(Error),
    /// The request was not carried out, and will not be next time.
    Failed(Error),
}

fn is_expired(code: &str) -> bool {
    matches!(code, "ExpiredToken" | "InvalidToken" | "TokenRefreshRequired")
}

impl Seen {
    /// Whether credentials that are fetched anew could be better.
    pub fn refuses_credentials(&self) -> bool {
        let code = self.code.as_str();
        // To a HEAD these are as good as any reason. Others are a key of the reader's own that encrypts
        // the object (400), another region (400), and what is not allowed (403).
        let unexplained = self.is_head && code.is_empty() && matches!(self.status, 400 | 403);
        is_expired(code) || code == "InvalidAccessKeyId" || unexplained
    }

    /// Whether those who give out credentials cannot do so just now, rather than will not.
    pub fn will_pass(&self) -> bool {
        let code = self.code.as_str();
        // STS says so with a 400.
        code.contains("Throttl")
            || matches!(code, "RequestLimitExceeded" | "IDPCommunicationError")
            || matches!(self.status, 408 | 429 | 500..)
    }

    /// What this answer means to a request with this condition.
    pub fn answer(&self, condition: Condition) -> Answer {
        use Answer::*;
        // Codes first: they are what the store means.
        match self.code.as_str() {
            "ConditionalRequestConflict" | "OperationAborted" | "ConcurrentModification" => {
                return Contended;
            }
            "BlobAlreadyExists" | "PreconditionFailed" | "ConditionNotMet" | "conditionNotMet"
                if condition != Condition::None =>
            {
                return Refused;
            }
            "NoSuchBucket" | "ContainerNotFound" | "InvalidBucketName" => {
                return Failed(self.error(
                    ErrorKind::Invalid,
                    "the bucket does not exist: check its name, the region and the endpoint",
                ));
            }
            "RequestTimeTooSkewed" => {
                return Failed(self.error(
                    ErrorKind::Denied,
                    "the store refuses this machine's clock: set it right",
                ));
            }
            "AuthorizationHeaderMalformed" | "PermanentRedirect" | "TemporaryRedirect" => {
                return Failed(
                    self.error(ErrorKind::Invalid, "the bucket is in another region or endpoint"),
                );
            }
            code if is_expired(code) => {
                return Failed(self.error(
                    ErrorKind::Denied,
                    "the store refuses these credentials: they have expired",
                ));
            }
            "RequestTimeout" | "IncompleteBody" | "InternalError" | "ServiceUnavailable"
            | "SlowDown" | "ServerBusy" | "OperationTimedOut" => {
                return Unanswered(self.error(ErrorKind::Unavailable, "the store is overloaded"));
            }
            _ => {}
        }
        match self.status {
            0 => Unanswered(self.error(ErrorKind::Unavailable, "the store did not answer")),
            304 => NotModified,
            412 if condition != Condition::None => Refused,
            // Unless the code says otherwise, a conflict is somebody writing at the same time.
            409 => Contended,
            404 if condition == Condition::Matches => Refused,
            404 => Missing,
            // An upload in several requests whose session is gone.
            410 => Unanswered(self.error(ErrorKind::Unavailable, "the store broke off the upload")),
            401 | 403 => Failed(self.error(
                ErrorKind::Denied,
                "the store refuses these credentials: check the key, the secret and what they allow",
            )),
            // Credentials that have expired are answered like that; and it is about no object.
            400 if self.is_head && self.code.is_empty() => Failed(self.error(
                ErrorKind::Denied,
                "the store refuses this request: have the credentials expired, or is the bucket in \
                 another region?",
            )),
            301 | 307 | 308 => Failed(
                self.error(ErrorKind::Invalid, "the bucket is in another region or endpoint"),
            ),
            501 => Failed(self.error(ErrorKind::Unsupported, "the store cannot do this")),
            // Also a success with a body that could not be read: the request was carried out.
            200..=299 | 408 | 429 | 499 | 500.. => {
                Unanswered(self.error(ErrorKind::Unavailable, "the store failed to answer"))
            }
            _ => Failed(self.error(ErrorKind::Invalid, "the store refuses this request")),
        }
    }

    fn error(&self, kind: ErrorKind, what: &str) -> Error {
        let words = [self.code.as_str(), self.message.as_str(), self.failure.as_str()];
        let mut words: Vec<String> =
            words.iter().filter(|word| !word.is_empty()).map(|word| (*word).to_owned()).collect();
        if self.status != 0 {
            words.insert(0, format!("HTTP {}", self.status));
        }
        match words.is_empty() {
            true => Error::new(kind, what),
            false => Error::new(kind, format!("{what} ({})", words.join(": "))),
        }
    }
}

/// The code and message in an error's body: XML from S3 and Azure, JSON from Google.
pub fn parse_error_body(body: &[u8]) -> (String, String) {
    let text = String::from_utf8_lossy(body);
    let element = |name: &str| {
        let start = text.find(&format!("<{name}>"))? + name.len() + 2;
        let end = text[start..].find("</")?;
        Some(text[start..start + end].trim().to_owned())
    };
    if let Some(code) = element("Code") {
        return (code, element("Message").unwrap_or_default());
    }
    let json: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
    let error = &json["error"];
    let word = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    (word(&error["errors"][0]["reason"]), word(&error["message"]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(status: u16, code: &str) -> Seen {
        Seen { status, code: code.to_owned(), ..Seen::default() }
    }

    /// FIELD.md row 4: "conflicting operation" is not "somebody has it", and the reverse.
    #[test]
    fn the_code_tells_contention_from_refusal() {
        for code in ["ConditionalRequestConflict", "OperationAborted", ""] {
            assert!(
                matches!(seen(409, code).answer(Condition::Matches), Answer::Contended),
                "{code}"
            );
        }
        assert!(matches!(
            seen(409, "BlobAlreadyExists").answer(Condition::Matches),
            Answer::Refused
        ));
        assert!(matches!(
            seen(412, "PreconditionFailed").answer(Condition::Matches),
            Answer::Refused
        ));
        assert!(matches!(seen(412, "").answer(Condition::Matches), Answer::Refused));
    }

    #[test]
    fn a_matched_key_that_is_missing_is_a_refusal_and_a_missing_bucket_an_error() {
        assert!(matches!(seen(404, "NoSuchKey").answer(Condition::Matches), Answer::Refused));
        assert!(matches!(seen(404, "NoSuchKey").answer(Condition::None), Answer::Missing));
        assert!(matches!(seen(404, "").answer(Condition::None), Answer::Missing));
        // A create cannot be refused because nothing is there: something else is wrong.
        assert!(matches!(seen(404, "").answer(Condition::Absent), Answer::Missing));
        assert!(matches!(seen(412, "LeaseIdMissing").answer(Condition::None), Answer::Failed(_)));
        for condition in [Condition::None, Condition::Absent, Condition::Matches] {
            let Answer::Failed(error) = seen(404, "NoSuchBucket").answer(condition) else {
                panic!("a missing bucket is not a missing key");
            };
            assert_eq!(error.kind(), ErrorKind::Invalid);
        }
    }

    #[test]
    fn what_may_have_been_carried_out_is_unanswered() {
        for status in [0, 200, 408, 429, 500, 502, 503, 504] {
            assert!(
                matches!(seen(status, "").answer(Condition::Matches), Answer::Unanswered(_)),
                "{status}"
            );
        }
        assert!(matches!(
            seen(400, "RequestTimeout").answer(Condition::Matches),
            Answer::Unanswered(_)
        ));
    }

    /// A HEAD is not told why. What is wrong is not the object, which others would take for damaged.
    #[test]
    fn a_bare_refusal_of_a_head_is_about_credentials() {
        for status in [400, 403] {
            let bare = Seen { is_head: true, ..seen(status, "") };
            let Answer::Failed(error) = bare.answer(Condition::None) else { panic!("{status}") };
            assert_eq!(error.kind(), ErrorKind::Denied);
        }
        let Answer::Failed(error) = seen(400, "").answer(Condition::None) else { panic!("a GET") };
        assert_eq!(error.kind(), ErrorKind::Invalid);
    }

    #[test]
    fn those_who_give_out_credentials_may_be_busy() {
        for busy in [seen(400, "Throttling"), seen(400, "IDPCommunicationError"), seen(429, "")] {
            assert!(busy.will_pass(), "{busy:?}");
        }
        for refusal in [seen(400, "ExpiredToken"), seen(403, "AccessDenied"), seen(404, "")] {
            assert!(!refusal.will_pass(), "{refusal:?}");
        }
    }

    #[test]
    fn error_bodies_are_read() {
        let xml = b"<?xml version=\"1.0\"?>\n<Error><Code>NoSuchKey</Code><Message>gone</Message></Error>";
        assert_eq!(parse_error_body(xml), ("NoSuchKey".into(), "gone".into()));
        let json =
            br#"{"error":{"code":412,"message":"no","errors":[{"reason":"conditionNotMet"}]}}"#;
        assert_eq!(parse_error_body(json), ("conditionNotMet".into(), "no".into()));
        assert_eq!(parse_error_body(b"<html>oops"), (String::new(), String::new()));
        assert_eq!(parse_error_body(b"<Code>\xff"), (String::new(), String::new()));
    }
}
