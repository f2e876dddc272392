//! What a read says about a write whose answer was lost.
//!
//! A write can apply although its answer never arrives, and a retry of it is then refused *by its
//! own first attempt*. Taking that refusal for "somebody else holds it" is a known bug of several
//! systems in this field (FIELD.md row 3). So after an unknown outcome, and after any refusal that
//! follows a retry, the driver reads the object and asks these functions.

use crate::cas::{Nonce, Version, When};

/// How the author recognises its own bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Proof {
    /// The body carries this nonce in its hexadecimal form.
    Nonce(Nonce),
    /// The body carries none; equal bytes count as ours. Only for objects where it does not matter
    /// who wrote them, as with index shards.
    Bytes,
    /// The body carries none, and it does matter: equal bytes may be somebody else's, a counter's
    /// for example, and what became of ours stays unknown.
    None,
}

/// What was found at the key.
#[derive(Debug, Clone, Copy)]
pub enum Found<'a> {
    /// Nothing.
    Absent,
    /// This body in this version.
    Object {
        /// The content.
        body: &'a [u8],
        /// Its version.
        version: &'a Version,
    },
}

/// What became of the write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// It applied, and this is its version.
    Applied(Version),
    /// Something else is there now. Ours may have applied before that or never; in either case it
    /// is not what counts any more, and doing it again could do it twice.
    Overtaken,
    /// It has not applied so far and its condition still holds: try again.
    Open,
}

/// What became of a `put(body, when)` of which some attempt was not answered.
pub fn put(found: Found<'_>, body: &[u8], when: &When, proof: Proof) -> Verdict {
    match found {
        Found::Object { body: there, version } => {
            // Equal bytes with our nonce are ours. A record with our nonce that somebody extended
            // since is not: its version is not one that our caller has seen.
            let ours = there == body && carries(there, proof);
            match when {
                _ if ours => Verdict::Applied(version.clone()),
                When::Any => Verdict::Open,
                When::Matches(expected) if expected == version => Verdict::Open,
                When::Absent | When::Matches(_) => Verdict::Overtaken,
            }
        }
        Found::Absent => match when {
            When::Any | When::Absent => Verdict::Open,
            When::Matches(_) => Verdict::Overtaken,
        },
    }
}

/// What became of a delete of `version` that may have been sent several times, where `there` is
/// the version that is there now. `Applied` carries the deleted version.
///
/// An absent object counts as applied, whoever removed it: the caller wanted that version gone.
pub fn delete(there: Option<&Version>, version: &Version) -> Verdict {
    match there {
        None => Verdict::Applied(version.clone()),
        Some(there) if there == version => Verdict::Open,
        Some(_) => Verdict::Overtaken,
    }
}

/// Whether these bytes can be told from somebody else's equal ones.
fn carries(bytes: &[u8], proof: Proof) -> bool {
    match proof {
        Proof::Nonce(nonce) => {
            let text = nonce.to_string();
            bytes.windows(text.len()).any(|window| window == text.as_bytes())
        }
        Proof::Bytes => true,
        Proof::None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OURS: Proof = Proof::Nonce(Nonce::from_bytes([7; 16]));

    fn version(text: &str) -> Version {
        Version::new(text)
    }

    fn object<'a>(body: &'a [u8], version: &'a Version) -> Found<'a> {
        Found::Object { body, version }
    }

    #[test]
    fn the_nonce_decides_and_not_the_content() {
        let record = |nonce: u8, more: &str| {
            format!(r#"{{"nonce":"{}"{more}}}"#, Nonce::from_bytes([nonce; 16])).into_bytes()
        };
        let (ours, v) = (record(7, ""), version("2"));
        for when in [When::Absent, When::Matches(version("1")), When::Any] {
            let verdict = put(object(&ours, &v), &ours, &when, OURS);
            assert_eq!(verdict, Verdict::Applied(v.clone()), "{when:?}");
        }
        let judge = |there: &[u8]| put(object(there, &v), &ours, &When::Absent, OURS);
        assert_eq!(judge(&record(8, "")), Verdict::Overtaken);
        // Ours, but somebody has extended it: that version was never ours.
        assert_eq!(judge(&record(7, r#","asked":1"#)), Verdict::Overtaken);
        // The same bytes without a nonce are not proof of anything.
        let verdict = put(object(b"same", &v), b"same", &When::Absent, OURS);
        assert_eq!(verdict, Verdict::Overtaken);
    }

    #[test]
    fn a_condition_that_still_holds_leaves_the_write_open() {
        let v = version("1");
        let there = object(b"old", &v);
        assert_eq!(put(there, b"new", &When::Matches(v.clone()), OURS), Verdict::Open);
        assert_eq!(put(there, b"new", &When::Any, OURS), Verdict::Open);
        assert_eq!(put(Found::Absent, b"new", &When::Absent, OURS), Verdict::Open);
        assert_eq!(put(Found::Absent, b"new", &When::Any, OURS), Verdict::Open);
    }

    #[test]
    fn a_matched_object_that_is_gone_may_have_been_ours() {
        let when = When::Matches(version("1"));
        assert_eq!(put(Found::Absent, b"new", &when, OURS), Verdict::Overtaken);
        let other = version("3");
        assert_eq!(put(object(b"x", &other), b"new", &when, OURS), Verdict::Overtaken);
    }

    #[test]
    fn shards_are_compared_by_their_bytes() {
        let v = version("1");
        let verdict = put(object(b"rows", &v), b"rows", &When::Absent, Proof::Bytes);
        assert_eq!(verdict, Verdict::Applied(v.clone()));
        let verdict = put(object(b"other", &v), b"rows", &When::Absent, Proof::Bytes);
        assert_eq!(verdict, Verdict::Overtaken);
    }

    #[test]
    fn equal_bytes_prove_nothing_where_it_matters_whose_they_are() {
        let (old, v) = (version("1"), version("2"));
        let when = When::Matches(old.clone());
        let verdict = put(object(b"n: 6", &v), b"n: 6", &when, Proof::None);
        assert_eq!(verdict, Verdict::Overtaken);
        // Not there yet: it may be sent again.
        let verdict = put(object(b"n: 5", &old), b"n: 6", &when, Proof::None);
        assert_eq!(verdict, Verdict::Open);
    }

    #[test]
    fn a_delete_is_done_when_its_version_is_gone_and_nothing_replaced_it() {
        let v = version("1");
        assert_eq!(delete(None, &v), Verdict::Applied(v.clone()));
        assert_eq!(delete(Some(&v), &v), Verdict::Open);
        assert_eq!(delete(Some(&version("2")), &v), Verdict::Overtaken);
    }
}
