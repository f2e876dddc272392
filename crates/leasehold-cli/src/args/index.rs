//! What can be asked of an index.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args as ClapArgs, Subcommand, ValueEnum};
use leasehold::index::{Shard, Trigger};

use super::duration;

/// How records look outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Comma-separated, with a header
    Csv,
    /// Tab-separated, with a header; no quotes: tab, newline, carriage return and backslash are \t, \n, \r, \\
    Tsv,
    /// One JSON object per line
    Jsonl,
    /// As in the shards: fields in the order of the schema, no header
    Usv,
}

/// How the answer of a query looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum AnswerFormat {
    /// For people
    Table,
    /// Comma-separated, with a header
    Csv,
    /// One JSON object per line
    Jsonl,
}

#[derive(Debug, Subcommand)]
pub enum IndexCommand {
    /// Make an index
    Create(Create),
    /// List the indexes of the store
    Ls,
    /// Show what the records of an index look like
    Show {
        /// The index
        index: String,
    },
    /// Change what the records look like: fields are added at the end
    Alter(Alter),
    /// Write a record: the whole of it. Fields that are not given are empty from then on
    Put {
        /// The index
        index: String,
        /// FIELD=VALUE; without any, one JSON object is read from standard input
        values: Vec<String>,
    },
    /// Print records
    Get {
        /// The index
        index: String,
        /// Their keys
        #[arg(required = true)]
        keys: Vec<String>,
        /// Do not look for what was put since the shard was last compacted: saves a LIST
        #[arg(long)]
        stale_ok: bool,
    },
    /// Delete records
    #[command(visible_alias = "rm")]
    Delete {
        /// The index
        index: String,
        /// Their keys
        #[arg(required = true)]
        keys: Vec<String>,
    },
    /// Write records from a file or standard input
    Import(Import),
    /// Print all records
    #[command(visible_alias = "scan")]
    Export {
        /// The index
        index: String,
        /// How
        #[arg(long, value_enum, default_value_t = Format::Jsonl)]
        format: Format,
    },
    /// Take the inbox in, once
    Compact(Compact),
    /// Take inboxes in, for ever
    Compile(Compile),
    /// Ask in SQL: every index is a table with its name
    ///
    /// Nothing is written: SELECT, WITH, VALUES and EXPLAIN are answered. Times are compared as times, however
    /// they are spelled: updated_at > datetime('now', '-1 hour'). What is no column any more is text: say
    /// datetime(max(updated_at)) > datetime('now', '-1 hour').
    Query {
        /// SELECT …
        sql: String,
        /// How the answer looks
        #[arg(long, value_enum)]
        format: Option<AnswerFormat>,
    },
    /// Print SQL that makes the index a view in DuckDB
    Duckdb {
        /// The index
        index: String,
    },
    /// Show shards, inbox, locks and quarantine
    Status {
        /// The index
        index: String,
        /// Only what listings tell: without rows and locks
        #[arg(long)]
        quick: bool,
    },
    /// Check every shard against what its compilers noted
    Verify {
        /// The index
        index: String,
    },
    /// What could not be read
    #[command(subcommand)]
    Quarantine(QuarantineCommand),
    /// Forget deletions
    Purge {
        /// The index
        index: String,
        /// Only older ones
        #[arg(long, value_name = "DURATION", default_value = "7d", value_parser = duration)]
        older_than: Duration,
        /// Also those of the last two hours: safe only while nobody writes
        #[arg(long)]
        force: bool,
    },
    /// Copy all records into another index
    Copy(Copy),
}

#[derive(Debug, ClapArgs)]
pub struct Create {
    /// Its name
    pub index: String,
    /// A field, the first one being the key: NAME, or NAME:TYPE with string, integer, number, boolean,
    /// date, datetime, object, array or domain; NAME:TYPE! must not be empty
    #[arg(short, long = "field", value_name = "FIELD", required_unless_present = "schema")]
    pub fields: Vec<String>,
    /// Take the fields from this JSON file: a table schema or a data package
    #[arg(long, value_name = "FILE", conflicts_with = "fields")]
    pub schema: Option<PathBuf>,
    /// How many hexadecimal digits name a shard: 2 make 256 shards
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=4))]
    pub width: u8,
    /// Do not pick up KEY.usv files that other tools drop: saves a request per lookup
    #[arg(long)]
    pub no_flat: bool,
}

#[derive(Debug, ClapArgs)]
pub struct Alter {
    /// The index
    pub index: String,
    /// Add this field behind the others
    #[arg(short, long = "add", value_name = "FIELD", required_unless_present = "schema")]
    pub add: Vec<String>,
    /// Take the fields from this JSON file
    #[arg(long, value_name = "FILE", conflicts_with = "add")]
    pub schema: Option<PathBuf>,
    /// Even if records that are there may not fit: those go to quarantine
    #[arg(long, requires = "schema")]
    pub force: bool,
}

#[derive(Debug, ClapArgs)]
pub struct Import {
    /// The index
    pub index: String,
    /// The file; - is standard input
    #[arg(default_value = "-")]
    pub file: PathBuf,
    /// What is in it [default: by its name, else JSON lines]
    #[arg(long, value_enum)]
    pub format: Option<Format>,
    /// Leave out records that do not fit instead of stopping, and say how many
    #[arg(long)]
    pub skip_bad: bool,
}

#[derive(Debug, Clone, ClapArgs)]
pub struct Terms {
    /// Do not take the shards' locks: safe, but work may be done twice
    #[arg(long)]
    pub no_lock: bool,
    /// Leave a shard alone until this much waits for it: 1000 (objects), 10MB or 5m (age); any of them
    #[arg(long, value_name = "LEAST", value_parser = trigger, value_delimiter = ',')]
    pub trigger: Vec<Trigger>,
    /// How many shards to work on at a time
    #[arg(short = 'j', long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub parallel: u16,
    /// The name under which locks are held [default: host:pid]
    #[arg(long, value_name = "NAME")]
    pub worker: Option<String>,
}

#[derive(Debug, ClapArgs)]
pub struct Compact {
    /// The index
    pub index: String,
    /// Only this shard, like 5e
    #[arg(long, value_name = "SHARD")]
    pub shard: Option<Shard>,
    /// Read and write every row of every shard anew
    #[arg(long)]
    pub rewrite: bool,
    #[command(flatten)]
    pub terms: Terms,
}

#[derive(Debug, ClapArgs)]
pub struct Compile {
    /// The indexes [default: all of the store]
    pub indexes: Vec<String>,
    /// The pause after each pass: one costs a LIST or two
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = duration)]
    pub pause: Duration,
    #[command(flatten)]
    pub terms: Terms,
}

#[derive(Debug, Subcommand)]
pub enum QuarantineCommand {
    /// List what could not be read
    Ls {
        /// The index
        index: String,
    },
    /// Print the rows of an entry as they were found
    Show {
        /// The index
        index: String,
        /// The entry
        id: String,
    },
    /// Try again, after the schema was mended
    Retry {
        /// The index
        index: String,
        /// The entries [default: all]
        ids: Vec<String>,
    },
}

#[derive(Debug, ClapArgs)]
pub struct Copy {
    /// From this index
    pub from: String,
    /// Into this one, which is made if it is not there
    pub to: String,
    /// How many digits name a shard there [default: the same]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=4))]
    pub width: Option<u8>,
    /// In another store
    #[arg(long, value_name = "URL")]
    pub to_store: Option<String>,
}

fn trigger(text: &str) -> Result<Trigger, String> {
    let none = Trigger::default();
    if let Ok(count) = text.parse() {
        return Ok(Trigger { count: Some(count), ..none });
    }
    for (unit, size) in [("kB", 1000), ("MB", 1_000_000), ("GB", 1_000_000_000_u64)] {
        if let Some(number) = text.strip_suffix(unit).and_then(|number| number.parse::<u64>().ok())
        {
            return Ok(Trigger { bytes: number.checked_mul(size), ..none });
        }
    }
    let age = duration(text).map_err(|_| format!("not like 1000, 10MB or 5m: {text:?}"))?;
    Ok(Trigger { age: Some(age), ..none })
}
