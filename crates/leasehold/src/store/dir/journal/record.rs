//! What stands in a segment of the journal: a header, then records.
//!
//! A record is framed by its length, the segment's epoch and a checksum over both and the content.
//! A segment is used again after its records are not needed any more, with the next epoch, so what
//! is left of earlier ones does not count.

use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// Where the records begin: one block, so that rewriting the header touches no record.
pub const HEADER: u64 = 4096;

const MAGIC: &[u8; 8] = b"LHJRNL1\n";
const FRAME: usize = 16;

/// Whose records these are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// Which use of the segment this is.
    pub epoch: u32,
    /// The boot in which it was written: within it, the kernel still has everything.
    pub boot_id: String,
    /// The device that the store was on.
    pub device: u64,
}

impl Header {
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(self.epoch.to_le_bytes());
        bytes.extend(self.device.to_le_bytes());
        put_text(&mut bytes, self.boot_id.as_bytes());
        let checksum = xxh3_64(&bytes);
        bytes.extend(checksum.to_le_bytes());
        bytes
    }

    /// The header, or `None` where there is none: the segment's writer died before it was whole,
    /// and so before anything in it counted.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let mut rest = bytes.strip_prefix(MAGIC)?;
        let epoch = u32::from_le_bytes(*take(&mut rest)?);
        let device = u64::from_le_bytes(*take(&mut rest)?);
        let boot_id = take_text(&mut rest)?;
        let length = bytes.len() - rest.len();
        let checksum = u64::from_le_bytes(*take(&mut rest)?);
        if checksum != xxh3_64(&bytes[..length]) {
            return None;
        }
        Some(Self { epoch, device, boot_id: String::from_utf8(boot_id.to_vec()).ok()? })
    }
}

/// One change of one object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// When it was made, by the boot clock, under the key's stripe lock: the order of changes.
    pub stamp: u64,
    /// Which object.
    pub key: String,
    /// What it was before, if that is known: a version, or `None` for nothing.
    pub before: Option<String>,
    /// What it is now: a content, or `None` for nothing.
    pub after: Option<Vec<u8>>,
}

impl Record {
    /// The record as it stands in a segment of this epoch.
    pub fn frame(&self, epoch: u32) -> Vec<u8> {
        let size = self.key.len() + self.after.as_ref().map_or(0, Vec::len) + 96;
        let mut bytes = Vec::with_capacity(FRAME + size);
        bytes.resize(FRAME, 0);
        bytes.extend(self.stamp.to_le_bytes());
        put_text(&mut bytes, self.key.as_bytes());
        for part in [self.before.as_ref().map(String::as_bytes), self.after.as_deref()] {
            bytes.push(u8::from(part.is_some()));
            put_text(&mut bytes, part.unwrap_or_default());
        }
        let length = (bytes.len() - FRAME) as u32;
        let checksum = checksum(&bytes[FRAME..], epoch);
        bytes[..4].copy_from_slice(&length.to_le_bytes());
        bytes[4..8].copy_from_slice(&epoch.to_le_bytes());
        bytes[8..FRAME].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let mut rest = bytes;
        let stamp = u64::from_le_bytes(*take(&mut rest)?);
        let key = String::from_utf8(take_text(&mut rest)?.to_vec()).ok()?;
        let mut part = || -> Option<Option<Vec<u8>>> {
            let [there] = *take::<1>(&mut rest)?;
            let text = take_text(&mut rest)?.to_vec();
            Some((there == 1).then_some(text))
        };
        let (before, after) = (part()?, part()?);
        let before = match before {
            Some(version) => Some(String::from_utf8(version).ok()?),
            None => None,
        };
        rest.is_empty().then_some(Self { stamp, key, before, after })
    }
}

/// The records of one epoch, up to where they end or the writer was interrupted.
pub fn records(bytes: &[u8], epoch: u32) -> Vec<Record> {
    let mut rest = bytes;
    let mut found = Vec::new();
    while let Some(record) = next(&mut rest, epoch) {
        found.push(record);
    }
    found
}

fn next(rest: &mut &[u8], epoch: u32) -> Option<Record> {
    let length = u32::from_le_bytes(*take(rest)?) as usize;
    let of = u32::from_le_bytes(*take(rest)?);
    let sum = u64::from_le_bytes(*take(rest)?);
    let content = rest.get(..length)?;
    *rest = &rest[length..];
    (of == epoch && sum == checksum(content, epoch)).then(|| Record::parse(content))?
}

fn checksum(content: &[u8], epoch: u32) -> u64 {
    xxh3_64_with_seed(content, u64::from(epoch) << 32 | content.len() as u64)
}

fn put_text(bytes: &mut Vec<u8>, text: &[u8]) {
    bytes.extend((text.len() as u32).to_le_bytes());
    bytes.extend(text);
}

fn take<'a, const N: usize>(rest: &mut &'a [u8]) -> Option<&'a [u8; N]> {
    let (first, tail) = rest.split_first_chunk()?;
    *rest = tail;
    Some(first)
}

fn take_text<'a>(rest: &mut &'a [u8]) -> Option<&'a [u8]> {
    let length = u32::from_le_bytes(*take(rest)?) as usize;
    let text = rest.get(..length)?;
    *rest = &rest[length..];
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_record() -> impl Strategy<Value = Record> {
        let body = proptest::option::of(proptest::collection::vec(any::<u8>(), 0..200));
        (any::<u64>(), ".{1,40}", proptest::option::of("[0-9a-f]{32}"), body)
            .prop_map(|(stamp, key, before, after)| Record { stamp, key, before, after })
    }

    proptest! {
        #[test]
        fn records_come_back_up_to_where_they_were_cut(
            written in proptest::collection::vec(any_record(), 0..8),
            cut in any::<prop::sample::Index>(),
        ) {
            let frames: Vec<_> = written.iter().map(|record| record.frame(7)).collect();
            let whole = frames.concat();
            prop_assert_eq!(&records(&whole, 7), &written);
            prop_assert!(records(&whole, 8).is_empty());
            let cut = cut.index(whole.len() + 1);
            let mut zeroed = whole[..cut].to_vec();
            zeroed.resize(whole.len() + 64, 0);
            let fits = frames.iter().scan(0, |end, frame| { *end += frame.len(); Some(*end) })
                .take_while(|end| *end <= cut).count();
            // Cutting within a run of zeros takes nothing away.
            prop_assert!(records(&zeroed, 7).len() >= fits);
            prop_assert!(written.starts_with(&records(&zeroed, 7)));
        }

        #[test]
        fn nothing_panics(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = records(&bytes, 0);
            let _ = Header::parse(&bytes);
        }
    }

    #[test]
    fn a_header_comes_back_and_a_torn_one_does_not() {
        let header = Header { epoch: 3, boot_id: "b-1".into(), device: 42 };
        let mut bytes = header.to_bytes();
        bytes.resize(HEADER as usize, 0);
        assert_eq!(Header::parse(&bytes), Some(header));
        bytes[9] ^= 1;
        assert_eq!(Header::parse(&bytes), None);
        assert_eq!(Header::parse(b""), None);
    }
}
