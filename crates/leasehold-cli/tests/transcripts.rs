//! What a person types and sees: `tests/cmd/*.md`, run as they are read.

#[test]
fn transcripts() {
    trycmd::TestCases::new().env("NO_COLOR", "1").env("LEASEHOLD_STORE", "").case("tests/cmd/*.md");
}
