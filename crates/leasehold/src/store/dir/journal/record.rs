//! What stands in a segment of the journal: a header, then records.
//!
//! A record is framed by its length, the segment's epoch and a checksum over both and the content.
//! A segment is used again after its records are not needed any more, with the next epoch, so what
//! is left of earlier ones does not count.

use bytes::Bytes;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::store::dir::files::FileId;

/// Where the records begin: one block, so that rewriting the header touches no record.
pub const HEADER: u64 = 4096;

const MAGIC: &[u8; 8] = b"LHJRNL2\n";
const FRAME: usize = 16;

/// Whose records these are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// Which use of the segment this is.
    pub epoch: u32,
    /// Tells writers apart: numbers of intents are theirs.
    pub writer: u64,
    /// The boot in which it was written: within it, the kernel still has everything.
    pub boot_id: String,
}

impl Header {
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(self.epoch.to_le_bytes());
        bytes.extend(self.writer.to_le_bytes());
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
        let writer = u64::from_le_bytes(*take(&mut rest)?);
        let boot_id = take_text(&mut rest)?;
        let length = bytes.len() - rest.len();
        let checksum = u64::from_le_bytes(*take(&mut rest)?);
        if checksum != xxh3_64(&bytes[..length]) {
            return None;
        }
        Some(Self { epoch, writer, boot_id: String::from_utf8(boot_id.to_vec()).ok()? })
    }
}

/// What stands in a segment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Record {
    /// On disk before the file becomes visible.
    Intent(Intent),
    /// On disk before success is reported.
    Note(Note),
    /// The intent with this number came to nothing.
    Void(u64),
}

/// A file that is about to become an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Intent {
    /// Its number, among those of its writer.
    pub number: u64,
    /// When it was written.
    pub stamp: u64,
    /// Which file.
    pub file: FileId,
    /// Which object.
    pub key: String,
    /// The whole content.
    pub body: Bytes,
}

/// What an object was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Note {
    /// When, by the boot clock, under the key's stripe lock: the order of changes.
    pub stamp: u64,
    /// Which object.
    pub key: String,
    /// What it is since.
    pub state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// The content of the writer's intent with this number.
    Content(u64),
    /// There is none.
    Absent,
    /// What the file shows: it was flushed before this was noted.
    AsItIs,
}

impl Record {
    /// The record as it stands in a segment of this epoch.
    pub fn frame(&self, epoch: u32) -> Vec<u8> {
        let mut bytes = vec![0; FRAME];
        match self {
            Self::Intent(Intent { number, stamp, file, key, body }) => {
                bytes.reserve(key.len() + body.len() + 64);
                bytes.push(b'i');
                bytes.extend(number.to_le_bytes());
                bytes.extend(stamp.to_le_bytes());
                bytes.extend(file.inode.to_le_bytes());
                bytes.extend(file.born.0.to_le_bytes());
                bytes.extend(file.born.1.to_le_bytes());
                put_text(&mut bytes, key.as_bytes());
                put_text(&mut bytes, body);
            }
            Self::Note(Note { stamp, key, state }) => {
                let (kind, number) = match state {
                    State::Content(number) => (b'c', *number),
                    State::Absent => (b'a', 0),
                    State::AsItIs => (b's', 0),
                };
                bytes.push(kind);
                bytes.extend(number.to_le_bytes());
                bytes.extend(stamp.to_le_bytes());
                put_text(&mut bytes, key.as_bytes());
            }
            Self::Void(number) => {
                bytes.push(b'v');
                bytes.extend(number.to_le_bytes());
            }
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
        let [kind] = *take::<1>(&mut rest)?;
        let number = u64::from_le_bytes(*take(&mut rest)?);
        if kind == b'v' {
            return rest.is_empty().then_some(Self::Void(number));
        }
        let stamp = u64::from_le_bytes(*take(&mut rest)?);
        let record = if kind == b'i' {
            let inode = u64::from_le_bytes(*take(&mut rest)?);
            let seconds = i64::from_le_bytes(*take(&mut rest)?);
            let born = (seconds, u32::from_le_bytes(*take(&mut rest)?));
            let key = String::from_utf8(take_text(&mut rest)?.to_vec()).ok()?;
            let body = Bytes::copy_from_slice(take_text(&mut rest)?);
            Self::Intent(Intent { number, stamp, file: FileId { inode, born }, key, body })
        } else {
            let state = match kind {
                b'c' => State::Content(number),
                b'a' => State::Absent,
                b's' => State::AsItIs,
                _ => return None,
            };
            let key = String::from_utf8(take_text(&mut rest)?.to_vec()).ok()?;
            Self::Note(Note { stamp, key, state })
        };
        rest.is_empty().then_some(record)
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
        let body = proptest::collection::vec(any::<u8>(), 0..200);
        let ids = (any::<u64>(), any::<u64>(), any::<u64>(), any::<(i64, u32)>());
        (0..5, ids, ".{1,40}", body).prop_map(|(kind, (number, stamp, inode, born), key, body)| {
            let state = match kind {
                0 => return Record::Void(number),
                1 => {
                    let (file, body) = (FileId { inode, born }, body.into());
                    return Record::Intent(Intent { number, stamp, file, key, body });
                }
                2 => State::Content(number),
                3 => State::Absent,
                _ => State::AsItIs,
            };
            Record::Note(Note { stamp, key, state })
        })
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
        let header = Header { epoch: 3, writer: 42, boot_id: "b-1".into() };
        let mut bytes = header.to_bytes();
        bytes.resize(HEADER as usize, 0);
        assert_eq!(Header::parse(&bytes), Some(header));
        bytes[9] ^= 1;
        assert_eq!(Header::parse(&bytes), None);
        assert_eq!(Header::parse(b""), None);
    }
}
