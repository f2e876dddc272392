//! The first names of a folder, in order, however many it has.
//!
//! A file system gives names in an order of its own, so all are read for the first page of a listing
//! in order. Kept are only as many as are wanted, or as many as memory should have; for more, the folder is
//! read again.

/// How many names are kept of the first reading, at least;
const AT_LEAST: usize = 4 * 1024;
/// at most, and where nobody says how many are wanted: some 12 MiB of usual names;
const AT_FIRST: usize = 128 * 1024;
/// and of any later one.
const AT_MOST: usize = 256 * 1024;
/// How many are put in order at a time, at least.
const CHUNK: usize = 4096;

/// The smallest of the names that were pushed: all of them, unless it [was cut](Smallest::was_cut).
#[derive(Debug)]
pub struct Smallest {
    keep: usize,
    /// All names in one buffer, in order up to `sorted`.
    text: String,
    spans: Vec<(u32, u32)>,
    sorted: usize,
    next: usize,
    /// The largest that was kept when it was cut last: what is not smaller was left out.
    bound: Option<String>,
}

impl Smallest {
    /// For the first reading, by one who wants this many names.
    pub fn new(wanted: Option<usize>) -> Self {
        Self::keeping(wanted.unwrap_or(AT_FIRST).clamp(AT_LEAST, AT_FIRST))
    }

    /// For a reading after this one was used up.
    pub fn larger(&self) -> Self {
        Self::keeping((2 * self.keep).min(AT_MOST))
    }

    /// Keeps at least this many names, if there are as many, and at most half as many more.
    fn keeping(keep: usize) -> Self {
        let (text, spans) = (String::new(), Vec::new());
        Self { keep, text, spans, sorted: 0, next: 0, bound: None }
    }

    /// Takes a name, unless there are enough smaller ones. Not after the first [`next`](Smallest::next).
    pub fn push(&mut self, name: &str) {
        if self.bound.as_deref().is_some_and(|bound| name >= bound) {
            return;
        }
        let start = self.text.len();
        self.text.push_str(name);
        self.spans.push((start as u32, self.text.len() as u32));
        if self.spans.len() > self.keep + self.keep / 2 {
            self.cut();
        }
    }

    fn cut(&mut self) {
        let Self { keep, text, spans, .. } = self;
        let of = |span: &(u32, u32)| &text[span.0 as usize..span.1 as usize];
        // Where a folder is read until it holds still, each name comes several times.
        spans.sort_unstable_by(|a, b| of(a).cmp(of(b)));
        spans.dedup_by(|a, b| of(a) == of(b));
        if spans.len() > *keep {
            spans.truncate(*keep);
            self.bound = spans.last().map(|largest| of(largest).to_owned());
        }
        let mut kept = String::with_capacity(text.len());
        for span in spans {
            let start = kept.len() as u32;
            kept.push_str(of(span));
            *span = (start, kept.len() as u32);
        }
        self.text = kept;
    }

    /// Whether names were left out, all of them larger than those that are here.
    pub fn was_cut(&self) -> bool {
        self.bound.is_some()
    }

    /// The one that [`next`](Smallest::next) gave last.
    pub fn last(&self) -> Option<&str> {
        let &(start, end) = self.spans.get(self.next.checked_sub(1)?)?;
        Some(&self.text[start as usize..end as usize])
    }

    /// The next name in order. What was pushed twice comes once.
    pub fn next(&mut self) -> Option<&str> {
        let Self { text, spans, sorted, next, .. } = self;
        let of = |span: &(u32, u32)| &text[span.0 as usize..span.1 as usize];
        loop {
            if next == sorted && *sorted < spans.len() {
                // Put a chunk of the smallest of the rest in front, in order. Chunks grow, so that
                // taking all costs little more than one sort.
                let rest = &mut spans[*sorted..];
                let chunk = CHUNK.max(*sorted).min(rest.len());
                if chunk < rest.len() {
                    rest.select_nth_unstable_by(chunk, |a, b| of(a).cmp(of(b)));
                }
                rest[..chunk].sort_unstable_by(|a, b| of(a).cmp(of(b)));
                *sorted += chunk;
            }
            let span = spans.get(*next)?;
            *next += 1;
            if *next < 2 || of(&spans[*next - 2]) != of(span) {
                return Some(of(span));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Names in no order, each twice.
    fn names(many: u32) -> Vec<String> {
        let scattered = |n: u32| format!("{:08x}", n.wrapping_mul(2_654_435_761));
        (0..many).chain((0..many).rev()).map(scattered).collect()
    }

    /// All names, by as many readings as it takes.
    fn read(names: &[String], keep: usize) -> (Vec<String>, usize) {
        let (mut all, mut readings) = (Vec::<String>::new(), 0);
        let mut smallest = Smallest::keeping(keep);
        loop {
            readings += 1;
            let last = all.last().cloned();
            for name in names.iter().filter(|name| last.as_ref().is_none_or(|last| *name > last)) {
                smallest.push(name);
                assert!(smallest.spans.len() <= smallest.keep + smallest.keep / 2);
            }
            while let Some(name) = smallest.next() {
                all.push(name.to_owned());
            }
            if !smallest.was_cut() {
                return (all, readings);
            }
            smallest = smallest.larger();
        }
    }

    #[test]
    fn every_name_comes_once_and_in_order() {
        for many in [0, 1, 5, 6, 7, 100, 20_000] {
            let names = names(many);
            let wanted: Vec<String> =
                names.iter().cloned().collect::<BTreeSet<_>>().into_iter().collect();
            for keep in [1, 4, 1000, AT_LEAST, AT_FIRST] {
                assert_eq!(read(&names, keep).0, wanted, "{many} names, {keep} kept");
            }
        }
    }

    #[test]
    fn what_fits_is_read_once_and_more_a_few_times() {
        assert_eq!(read(&names(1000), AT_LEAST).1, 1);
        // However often they come.
        assert_eq!(read(&names(1000), 1000).1, 1);
        let readings = read(&names(20_000), 100).1;
        assert!((2..=12).contains(&readings), "{readings} readings");
    }
}
