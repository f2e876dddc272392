//! Records in and out.

use std::borrow::Cow;
use std::fs::File;
use std::io::{BufRead as _, BufReader, BufWriter, IsTerminal as _, Read, Write as _};
use std::path::Path;

use anyhow::Context as _;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use leasehold::Error;
use leasehold::index::{Batch, Index, NewIndex, Width};
use leasehold::protocol::{self, format::usv};
use serde_json::{Map, Value, json};

use super::invalid;
use super::tabular::{self, Quotes};
use crate::args::Args;
use crate::args::index::{Copy, Format, Import};
use crate::exit::Exit;
use crate::render;

/// What some tools begin a file of UTF-8 with.
const BOM: &[u8] = "\u{feff}".as_bytes();

/// How much is written at a time: one object per shard.
const BATCH_BYTES: usize = 16 << 20;

/// A bar if somebody is watching: of bytes where it is known how many there are.
fn progress(args: &Args, length: Option<u64>) -> ProgressBar {
    let bar = match length {
        Some(length) => ProgressBar::new(length),
        None => ProgressBar::no_length(),
    };
    let template = match length {
        Some(_) => "{bar:30} {bytes}/{total_bytes} {bytes_per_sec} {msg}",
        None => "{spinner} {bytes} {bytes_per_sec} {msg}",
    };
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    if args.quiet || args.json || !std::io::stderr().is_terminal() {
        bar.set_draw_target(ProgressDrawTarget::hidden());
    }
    bar
}

fn format_of(file: &Path) -> Format {
    match file.extension().and_then(|extension| extension.to_str()) {
        Some("csv") => Format::Csv,
        Some("tsv" | "tab") => Format::Tsv,
        Some("usv") => Format::Usv,
        _ => Format::Jsonl,
    }
}

/// Collects records and writes them by the batch.
struct Importer<'a> {
    batch: Batch,
    bar: &'a ProgressBar,
    skip_bad: bool,
    written: u64,
    bad: u64,
    line: u64,
}

impl Importer<'_> {
    async fn add(
        &mut self,
        put: impl FnOnce(&mut Batch) -> Result<(), Error>,
    ) -> anyhow::Result<()> {
        self.line += 1;
        match put(&mut self.batch) {
            Ok(()) => self.written += 1,
            Err(error) if self.skip_bad => {
                self.bad += 1;
                tracing::warn!(record = self.line, %error, "left out");
            }
            Err(error) => {
                let (line, before) = (self.line, self.written - self.batch.len() as u64);
                let message =
                    format!("record {line}: {error} ({before} records before it are written)");
                return Err(invalid(message).into());
            }
        }
        if self.batch.bytes() >= BATCH_BYTES {
            self.flush().await?;
        }
        Ok(())
    }

    async fn flush(&mut self) -> anyhow::Result<()> {
        self.batch.flush().await?;
        self.bar.set_message(format!("{} records", self.written));
        Ok(())
    }
}

/// `leasehold index import`.
pub async fn import(args: &Args, index: &Index, import: &Import) -> anyhow::Result<Exit> {
    let stdin = import.file == Path::new("-");
    let format = import.format.unwrap_or_else(|| format_of(&import.file));
    let (source, length): (Box<dyn Read>, Option<u64>) = match stdin {
        true => (Box::new(std::io::stdin()), None),
        false => {
            let cannot = || format!("cannot read {}", import.file.display());
            let file = File::open(&import.file).with_context(cannot)?;
            let length = file.metadata().with_context(cannot)?.len();
            (Box::new(file), Some(length))
        }
    };
    let bar = progress(args, length);
    let source = bar.wrap_read(source);
    let batch = index.batch().await?;
    let (skip_bad, line) = (import.skip_bad, 0);
    let mut importer = Importer { batch, bar: &bar, skip_bad, written: 0, bad: 0, line };
    match format {
        Format::Csv | Format::Tsv => from_table(index, source, format, &mut importer).await?,
        Format::Jsonl => from_lines(source, &mut importer).await?,
        Format::Usv => from_usv(source, &mut importer).await?,
    }
    importer.flush().await?;
    let (written, bad) = (importer.written, importer.bad);
    bar.finish_and_clear();
    match args.json {
        true => render::json(&json!({ "written": written, "left_out": bad }))?,
        false if args.quiet => {}
        false if bad > 0 => {
            render::line(format_args!("{written} records written, {bad} left out"))?
        }
        false => render::line(format_args!("{written} records written"))?,
    }
    Ok(if bad > 0 { Exit::Failed } else { Exit::Done })
}

async fn from_table(
    index: &Index,
    source: impl Read,
    format: Format,
    importer: &mut Importer<'_>,
) -> anyhow::Result<()> {
    let tabs = format == Format::Tsv;
    let mut reader = csv::ReaderBuilder::new();
    let reader = reader.delimiter(if tabs { b'\t' } else { b',' }).quoting(!tabs).flexible(false);
    let mut reader = reader.from_reader(Quotes::new(source));
    let schema = index.schema();
    // Which of our fields each column is.
    let mut places = Vec::new();
    for name in reader.headers().context("cannot read the header")? {
        let name = name.trim_start_matches('\u{feff}');
        let name = if tabs { tabular::unescape(name) } else { name.into() };
        let place = schema.position(&name).ok_or_else(|| {
            let names: Vec<&str> =
                schema.fields().iter().map(|field| field.name.as_str()).collect();
            invalid(format!("the header has {name:?}, the index has {}", names.join(", ")))
        })?;
        if places.contains(&place) {
            return Err(invalid(format!("the header has {name:?} twice")).into());
        }
        places.push(place);
    }
    let mut record = csv::StringRecord::new();
    loop {
        // A record that cannot be read is a bad record; the next one can be.
        let read = match reader.read_record(&mut record) {
            Ok(false) => return Ok(()),
            // All that follows an open quote is read as one value.
            Ok(true) if !tabs && reader.get_ref().ended_within() => {
                let line = record.position().map_or(0, csv::Position::line);
                Err(invalid(format!("a quote is not closed, in line {line} or after it")))
            }
            Ok(true) => Ok(()),
            Err(error) => Err(match error.kind() {
                csv::ErrorKind::UnequalLengths { expected_len, len, .. } => {
                    invalid(format!("has {len} values, the header has {expected_len}"))
                }
                csv::ErrorKind::Utf8 { .. } => invalid("is not UTF-8"),
                _ => return Err(anyhow::Error::new(error).context("cannot read")),
            }),
        };
        let put = |batch: &mut Batch| {
            read?;
            let mut values = vec![Cow::Borrowed(""); schema.fields().len()];
            for (place, value) in places.iter().zip(&record) {
                values[*place] = if tabs { tabular::unescape(value) } else { value.into() };
            }
            batch.put_texts(values.iter().map(|value| &**value))
        };
        importer.add(put).await?;
    }
}

async fn from_lines(source: impl Read, importer: &mut Importer<'_>) -> anyhow::Result<()> {
    let mut source = BufReader::with_capacity(1 << 20, source);
    let (mut line, mut first) = (Vec::new(), true);
    loop {
        line.clear();
        if source.read_until(b'\n', &mut line).context("cannot read")? == 0 {
            return Ok(());
        }
        let text = if first { line.strip_prefix(BOM).unwrap_or(&line) } else { &line };
        first = false;
        if text.trim_ascii().is_empty() {
            continue;
        }
        let put = |batch: &mut Batch| {
            let text = std::str::from_utf8(text).map_err(|_| invalid("is not UTF-8"))?;
            let record: Map<String, Value> = protocol::format::json::read(text)
                .map_err(|error| invalid(format!("not a JSON object: {error}")))?;
            batch.put_json(&record)
        };
        importer.add(put).await?;
    }
}

async fn from_usv(mut source: impl Read, importer: &mut Importer<'_>) -> anyhow::Result<()> {
    let (mut buffer, mut first) = (Vec::new(), true);
    loop {
        let start = buffer.len();
        buffer.resize(start + (1 << 20), 0);
        let read = source.read(&mut buffer[start..]).context("cannot read")?;
        buffer.truncate(start + read);
        let whole = if read == 0 { buffer.len() } else { usv::complete(&buffer) };
        for mut row in usv::rows(&buffer[..whole]) {
            if std::mem::take(&mut first) {
                row = row.strip_prefix(BOM).unwrap_or(row);
            }
            importer.add(|batch| batch.put_row(row)).await?;
        }
        buffer.drain(..whole);
        if read == 0 {
            return Ok(());
        }
    }
}

/// `leasehold index export`.
pub async fn export(index: &Index, format: Format) -> anyhow::Result<Exit> {
    let mut scan = index.scan(2).await?;
    let schema = scan.schema().clone();
    let mut out = BufWriter::with_capacity(1 << 20, std::io::stdout().lock());
    let names = schema.fields().iter().enumerate().filter(|(at, _)| *at != schema.deleted());
    let names: Vec<&str> = names.map(|(_, field)| field.name.as_str()).collect();
    let mut table = csv::Writer::from_writer(Vec::new());
    match format {
        Format::Csv => table.write_record(&names)?,
        Format::Tsv => tabular::write(&names, &mut out)?,
        Format::Jsonl | Format::Usv => {}
    }
    let values = |row: &[u8]| -> Vec<String> {
        let mut fields = usv::fields(row);
        let all = schema.fields().iter().map(|_| fields.next().unwrap_or_default());
        let shown = all.enumerate().filter(|(at, _)| *at != schema.deleted());
        shown
            .map(|(_, field)| usv::unescape(&String::from_utf8_lossy(field)).into_owned())
            .collect()
    };
    while let Some(chunk) = scan.next().await? {
        for row in chunk.records(&schema) {
            match format {
                Format::Usv => {
                    out.write_all(row)?;
                    out.write_all(&[usv::END])?;
                }
                Format::Jsonl => {
                    serde_json::to_writer(&mut out, &schema.read_json(row))?;
                    out.write_all(b"\n")?;
                }
                Format::Csv => table.write_record(values(row))?,
                Format::Tsv => tabular::write(&values(row), &mut out)?,
            }
        }
        table.flush()?;
        out.write_all(table.get_ref())?;
        table = csv::Writer::from_writer(Vec::new());
    }
    table.flush()?;
    out.write_all(table.get_ref())?;
    out.flush()?;
    Ok(Exit::Done)
}

/// `leasehold index copy`.
pub async fn copy(args: &Args, index: &Index, copy: &Copy) -> anyhow::Result<Exit> {
    let to = match &copy.to_store {
        Some(url) => {
            let mut connect = crate::config::connect(args)?;
            connect.url = url.parse()?;
            connect.open()?
        }
        None => index.store().clone(),
    };
    let package = index.package();
    let width = match copy.width {
        Some(width) => Width::new(width).ok_or_else(|| invalid("--width is 1 to 4"))?,
        None => package.width,
    };
    let new = NewIndex { schema: package.schema.clone(), width, flat_inbox: package.flat_inbox };
    let mut copied = 0;
    index.copy_to(&to, &copy.to, new, |done| copied = done).await?;
    match args.json {
        true => render::json(&json!({ "copied": copied }))?,
        false if args.quiet => {}
        false => render::line(format_args!(
            "{copied} records copied into the inbox of {}: compact it next",
            copy.to
        ))?,
    }
    Ok(Exit::Done)
}
