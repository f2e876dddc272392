//! What a person types and sees: `tests/cmd/*.md`, run as they are read.

#![allow(clippy::unwrap_used)] // in a test, a failure is a panic

#[test]
fn transcripts() {
    trycmd::TestCases::new().env("NO_COLOR", "1").env("LEASEHOLD_STORE", "").case("tests/cmd/*.md");
}
