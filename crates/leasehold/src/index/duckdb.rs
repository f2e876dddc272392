//! The same view in DuckDB.

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
    let quoted = |name: &str| format!("\"{}\"", name.replace('"', "\"\""));
    let columns: Vec<String> = schema
        .fields()
        .iter()
        .map(|field| {
            let kind = match field.kind {
                FieldKind::String | FieldKind::Object | FieldKind::Array => "VARCHAR",
                FieldKind::Integer => "BIGINT",
                FieldKind::Number => "DOUBLE",
                FieldKind::Boolean => "BOOLEAN",
                FieldKind::Date => "DATE",
                FieldKind::Datetime => "TIMESTAMP",
            };
            format!("'{}': '{kind}'", field.name.replace('\'', "''"))
        })
        .collect();
    let base = format!("{}/indexes/{}", root(index), index.name()).replace('\'', "''");
    // Patterns without a match are an error in DuckDB: glob() leaves them out.
    let files = ["shards/*.usv", "inbox/*/*.usv", "*.usv"]
        .map(|pattern| format!("SELECT file FROM glob('{base}/{pattern}')"))
        .join(" UNION ALL ");
    let variable = format!("{}_files", index.name()).replace('\'', "''");
    let (key, time, deleted) = (
        quoted(&schema.key().name),
        quoted(&schema.fields()[schema.updated_at()].name),
        quoted(&schema.fields()[schema.deleted()].name),
    );
    // Equal times: a deletion, then the larger row. Fields are separated by what is less than anything in
    // them, so the first field that differs decides.
    let ties: Vec<String> = schema
        .fields()
        .iter()
        .map(|field| format!("CAST({} AS VARCHAR) DESC NULLS LAST", quoted(&field.name)))
        .collect();
    // Control characters in values are written as ESC and a letter.
    let values: Vec<String> = schema
        .fields()
        .iter()
        .enumerate()
        .filter(|(at, _)| *at != schema.deleted())
        .map(|(_, field)| {
            let name = quoted(&field.name);
            match field.kind {
                FieldKind::String | FieldKind::Object | FieldKind::Array => {
                    format!("{} AS {name}", unescaped(&name))
                }
                _ => name,
            }
        })
        .collect();
    format!(
        "-- What is pending now; run this again to see what is put later.\n\
         SET VARIABLE \"{variable}\" = (SELECT list(file) FROM ({files}));\n\
         CREATE OR REPLACE VIEW {view} AS\n\
         SELECT {values}\n\
         FROM read_csv(getvariable('{variable}'),\n    \
             delim = chr(31), quote = '', escape = '', header = false, auto_detect = false,\n    \
             null_padding = true, columns = {{{columns}}})\n\
         QUALIFY row_number() OVER (PARTITION BY {key} \
             ORDER BY {time} DESC, coalesce({deleted}, false) DESC, {ties}) = 1\n    \
             AND coalesce({deleted}, false) = false;\n",
        view = quoted(index.name()),
        values = values.join(", "),
        ties = ties.join(", "),
        columns = columns.join(", "),
    )
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
