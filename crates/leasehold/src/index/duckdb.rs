//! The same view in DuckDB.

use leasehold_protocol::format::datapackage::MAX_ROW;

use super::{FieldKind, Index};
use crate::store::Kind;

impl Index {
    /// SQL that makes a view with the index's name in DuckDB: shards and inbox, the latest record of
    /// each key, typed. For a bucket, DuckDB's `httpfs` has to be loaded and given the credentials.
    pub fn duckdb_view(&self) -> String {
        view(self)
    }
}

fn view(index: &Index) -> String {
    let schema = index.schema();
    let (fields, time, deleted) = (schema.fields(), schema.updated_at(), schema.deleted());
    let text = |text: &str| text.replace('\'', "''");
    let quoted = |name: &str| format!("\"{}\"", name.replace('"', "\"\""));
    // Read as text, whatever it is: a value of another type would fail the whole query.
    let columns: Vec<String> = (0..fields.len()).map(|at| format!("c{at}: 'VARCHAR'")).collect();
    let typed: Vec<String> = fields.iter().enumerate().map(|(at, of)| typed(at, of.kind)).collect();
    // Control characters in values are written as ESC and a letter.
    let values: Vec<String> = (0..fields.len())
        .filter(|at| *at != deleted)
        .map(|at| {
            let value = match column_type(fields[at].kind) {
                "VARCHAR" => unescaped(&typed[at]),
                _ => typed[at].clone(),
            };
            format!("{value} AS {}", quoted(&fields[at].name))
        })
        .collect();
    // What a compiler would put into quarantine does not count.
    let mut good = vec!["c0 IS NOT NULL".to_owned(), format!("{} IS NOT NULL", typed[time])];
    for at in (1..fields.len()).filter(|at| *at != time) {
        match fields[at].kind {
            kind if column_type(kind) == "VARCHAR" => {}
            // DuckDB would round.
            FieldKind::Integer => good.push(format!(
                "(c{at} IS NULL OR ({} IS NOT NULL AND regexp_full_match(c{at}, '[+-]?[0-9]+')))",
                typed[at]
            )),
            _ => good.push(format!("(c{at} IS NULL OR {} IS NOT NULL)", typed[at])),
        }
    }
    let base = text(&format!("{}/indexes/{}", root(index), index.name()));
    // Patterns without a match are an error in DuckDB: glob() leaves them out.
    let mut patterns = vec!["shards/*.usv", "inbox/*/*.usv"];
    if index.package().flat_inbox {
        patterns.push("*.usv");
    }
    let files: Vec<String> = patterns
        .iter()
        .map(|pattern| format!("SELECT file FROM glob('{base}/{pattern}')"))
        .collect();
    // What other tools say may be ahead of the clock; what we wrote was checked then.
    let ours = r"/inbox/[0-9a-f]+/(-[0-9]+|[0-9a-f]{16})-[0-9a-f]{32}\.usv$";
    let timely = format!(
        "(starts_with(filename, '{base}/shards/') OR regexp_matches(filename, '{ours}')\n        \
         OR epoch_us({}) <= epoch_us(now()) + 300000000)",
        typed[time]
    );
    // Equal times: a deletion, then the larger row. Fields are separated by what is less than anything in
    // them, so the first field that differs decides.
    let ties: Vec<String> = (0..fields.len()).map(|at| format!("c{at} DESC NULLS LAST")).collect();
    format!(
        "-- What is pending now; run this again to see what is put later.\n\
         SET VARIABLE \"{variable}\" = (SELECT list(file) FROM ({files}));\n\
         CREATE OR REPLACE VIEW {view} AS\n\
         SELECT {values}\n\
         FROM read_csv(getvariable('{variable}'),\n    \
             delim = chr(31), quote = '', escape = '', header = false, auto_detect = false,\n    \
             null_padding = true, ignore_errors = true, filename = true,\n    \
             max_line_size = {MAX_LINE}, buffer_size = {BUFFER}, columns = {{{columns}}})\n\
         WHERE {good}\n    \
             AND {timely}\n\
         QUALIFY row_number() OVER (PARTITION BY c0 \
             ORDER BY {time} DESC, coalesce({deleted}, false) DESC, {ties}) = 1\n    \
             AND coalesce({deleted}, false) = false;\n",
        variable = text(&format!("{}_files", index.name())),
        files = files.join(" UNION ALL "),
        view = quoted(index.name()),
        values = values.join(", "),
        columns = columns.join(", "),
        good = good.join("\n    AND "),
        time = typed[time],
        deleted = typed[deleted],
        ties = ties.join(", "),
    )
}

/// The longest line: a record, with its control characters escaped.
const MAX_LINE: usize = 2 * MAX_ROW;

/// How much is read at once: no more than DuckDB would by itself.
const BUFFER: usize = 32 << 20;

fn column_type(kind: FieldKind) -> &'static str {
    match kind {
        FieldKind::String | FieldKind::Object | FieldKind::Array => "VARCHAR",
        FieldKind::Integer => "BIGINT",
        FieldKind::Number => "DOUBLE",
        FieldKind::Boolean => "BOOLEAN",
        FieldKind::Date => "DATE",
        FieldKind::Datetime => "TIMESTAMP",
    }
}

/// A field's value, NULL where it is not of its type.
fn typed(at: usize, kind: FieldKind) -> String {
    match column_type(kind) {
        "VARCHAR" => format!("c{at}"),
        other => format!("TRY_CAST(c{at} AS {other})"),
    }
}

fn unescaped(name: &str) -> String {
    let mut text = name.to_owned();
    let letters = (1..=26).map(|code| (code, char::from(b'A' + code - 1)));
    let rest = [(0, 'z'), (28, 'f'), (29, 'g'), (30, 'r'), (31, 'u'), (127, 'd'), (27, 'e')];
    // DuckDB's texts hold no NUL: that one stays escaped. ESC itself comes last.
    for (code, letter) in letters.chain(rest).filter(|(code, _)| *code != 0) {
        text = format!("replace({text}, chr(27) || '{letter}', chr({code}))");
    }
    format!("CASE WHEN contains({name}, chr(27)) THEN {text} ELSE {name} END")
}

fn root(index: &Index) -> String {
    let url = index.store().url();
    match index.store().kind() {
        Kind::Directory => std::path::absolute(&url).map_or(url, |path| path.display().to_string()),
        _ => url,
    }
}
