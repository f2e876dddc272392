//! What happened: a hash always, and lines for people when a seed is replayed.

use xxhash_rust::xxh3::xxh3_64;

/// What happened so far.
#[derive(Debug)]
pub struct Trace {
    hash: u64,
    lines: Option<Vec<String>>,
}

impl Trace {
    /// Nothing yet. Lines are kept only if asked for.
    pub fn new(record: bool) -> Self {
        Self { hash: 0, lines: record.then(Vec::new) }
    }

    /// Whether lines are kept.
    pub fn records(&self) -> bool {
        self.lines.is_some()
    }

    /// Two equal histories have equal hashes, and different ones different ones.
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// Mixes a fact into the hash.
    pub fn mix(&mut self, fact: u64) {
        self.hash = (self.hash ^ fact).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    }

    /// The same with bytes.
    pub fn mix_bytes(&mut self, bytes: &[u8]) {
        self.mix(xxh3_64(bytes));
    }

    /// Writes a line, if lines are kept.
    pub fn note(&mut self, now: u64, who: &str, text: impl FnOnce() -> String) {
        if let Some(lines) = &mut self.lines {
            let (seconds, micros) = (now / 1_000_000, now % 1_000_000);
            lines.push(format!("{seconds:>6}.{micros:06}  {who:<10} {}", text()));
        }
    }

    /// The lines.
    pub fn into_lines(self) -> Vec<String> {
        self.lines.unwrap_or_default()
    }

    /// The lines, leaving none.
    pub fn take_lines(&mut self) -> Vec<String> {
        self.lines.as_mut().map(std::mem::take).unwrap_or_default()
    }
}
