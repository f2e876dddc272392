//! The journal of the directory store.

use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::record::{Header, records};

const EPOCH: u32 = 7;

/// Segments and headers as they are, and with checksums that are right, which no fuzzer would find.
pub fn journal(bytes: &[u8]) {
    let _ = records(bytes, EPOCH);
    let _ = Header::parse(bytes);
    let mut header = b"LHJRNL2\n".to_vec();
    header.extend(bytes);
    header.extend(xxh3_64(&header).to_le_bytes());
    if let Some(parsed) = Header::parse(&header) {
        assert_eq!(Header::parse(&parsed.to_bytes()), Some(parsed));
    }
    // Two records: the first takes as many bytes as the first byte says.
    let Some((first, rest)) = bytes.split_first() else { return };
    let (one, two) = rest.split_at(usize::from(*first).min(rest.len()));
    let mut segment = Vec::new();
    for content in [one, two] {
        segment.extend((content.len() as u32).to_le_bytes());
        segment.extend(EPOCH.to_le_bytes());
        let seed = u64::from(EPOCH) << 32 | content.len() as u64;
        segment.extend(xxh3_64_with_seed(content, seed).to_le_bytes());
        segment.extend(content);
    }
    let found = records(&segment, EPOCH);
    let written: Vec<u8> = found.iter().flat_map(|record| record.frame(EPOCH)).collect();
    // A void intent keeps no more than its number, all others every byte.
    assert_eq!(records(&written, EPOCH), found);
    assert!(written.len() <= segment.len());
    assert!(records(&segment, EPOCH + 1).is_empty());
}
