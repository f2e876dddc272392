use proptest::prelude::*;

use super::*;

fn schema() -> Schema {
    Schema::new(
        [
            "domain:domain",
            "name",
            "count:integer",
            "share:number",
            "ok:boolean",
            "day:date",
            "at:datetime",
            "more:object",
            "list:array",
        ]
        .iter()
        .map(|field| Field::parse(field).unwrap())
        .collect(),
    )
    .unwrap()
}

fn now() -> StoreTime {
    "2026-01-31T09:05:00.123456Z".parse().unwrap()
}

fn json(text: &str) -> Map<String, Value> {
    serde_json::from_str(text).unwrap()
}

fn write(record: &str) -> Result<String, RowError> {
    let mut out = Vec::new();
    schema().write_json(&json(record), now(), &mut out)?;
    Ok(String::from_utf8(out).unwrap().replace('\u{1f}', "|"))
}

#[test]
fn records_become_rows_in_one_spelling() {
    assert_eq!(
        write(
            r#"{"domain":"Example.COM.","name":"a\nb","count":7,"share":0.5,"ok":true,"day":"2026-01-31",
               "at":"2026-01-31T10:05:00+01:00","more":{"x": 1},"list":[1, 2]}"#
        )
        .unwrap(),
        "example.com|a\u{1b}Jb|7|0.5|true|2026-01-31|2026-01-31T09:05:00.000000Z|{\"x\":1}|[1,2]|\
         2026-01-31T09:05:00.123456Z|"
    );
    assert_eq!(
        write(r#"{"domain":"a.b","count":"+007","ok":"1","updated_at":"2026-01-31T09:05:00Z"}"#)
            .unwrap(),
        "a.b||7||true|||||2026-01-31T09:05:00.000000Z|"
    );
}

#[test]
fn what_does_not_fit_is_refused_with_the_reason() {
    for (record, part) in [
        (r#"{"name":"x"}"#, "the key is missing"),
        (r#"{"domain":""}"#, "the key is missing"),
        (r#"{"domain":"a/../b"}"#, "not a domain"),
        (r#"{"domain":"a.b","count":"x"}"#, "not an integer: \"x\""),
        (r#"{"domain":"a.b","count":1.5}"#, "not an integer"),
        (r#"{"domain":"a.b","count":99999999999999999999}"#, "not an integer"),
        (r#"{"domain":"a.b","count":true}"#, "true is not an integer"),
        (r#"{"domain":"a.b","share":"inf"}"#, "not a number"),
        (r#"{"domain":"a.b","ok":"maybe"}"#, "not a boolean"),
        (r#"{"domain":"a.b","day":"2026-02-30"}"#, "not a date"),
        (r#"{"domain":"a.b","at":"2026-01-31T09:05:00"}"#, "not a time like"),
        (r#"{"domain":"a.b","updated_at":"yesterday"}"#, "not a time like"),
        (r#"{"domain":"a.b","more":[]}"#, "not an object"),
        (r#"{"domain":"a.b","nmae":"x"}"#, "there is no field \"nmae\""),
    ] {
        let error = write(record).unwrap_err().to_string();
        assert!(error.contains(part), "{record}: {error}");
    }
    let long = format!(r#"{{"domain":"a.b","name":"{}"}}"#, "x".repeat(MAX_ROW));
    assert!(write(&long).unwrap_err().to_string().contains("at most"));
    let mut short = Field::new("s", Kind::String);
    short.max_length = Some(3);
    let schema = Schema::new(vec![Field::new("k", Kind::String), short]).unwrap();
    let mut out = b"kept".to_vec();
    let error = schema.write_texts(["k", "éééé"], now(), &mut out).unwrap_err().to_string();
    assert!(error.contains("has 4 characters, 3 are allowed"), "{error}");
    assert!(schema.write_texts(["k", "éé", "", "x", "y"], now(), &mut out).is_err());
    assert!(schema.write_texts(["x".repeat(301).as_str()], now(), &mut out).is_err());
    assert_eq!(out, b"kept", "an error appends nothing");
}

#[test]
fn required_fields_must_be_there_except_in_deletions() {
    let fields = ["k", "v:string!"].map(|field| Field::parse(field).unwrap()).to_vec();
    let schema = Schema::new(fields).unwrap();
    let mut out = Vec::new();
    assert!(schema.write_texts(["a"], now(), &mut out).is_err());
    let deletion = schema.write_deletion("a", now(), &mut out).unwrap();
    assert!(deletion.deleted);
    let mut again = Vec::new();
    assert_eq!(schema.canonical(&out, &mut again).unwrap(), deletion);
    assert_eq!(again, out);
    assert!(schema.claim(&out).unwrap().deleted);
}

#[test]
fn foreign_rows_are_read() {
    let fields =
        ["domain:domain", "company_name", "scraper_version:integer", "updated_at:datetime"];
    let fields = fields.map(|field| Field::parse(field).unwrap()).to_vec();
    let schema = Schema::new(fields).unwrap();
    let mut out = Vec::new();
    let row = "Example.com\u{1f}Acme\u{1f}3\u{1f}2024-02-15T10:30:05+00:00".as_bytes();
    schema.canonical(row, &mut out).unwrap();
    assert_eq!(
        String::from_utf8(out.clone()).unwrap(),
        "example.com\u{1f}Acme\u{1f}3\u{1f}2024-02-15T10:30:05.000000Z\u{1f}"
    );
    assert_eq!(schema.read_json(&out)["scraper_version"], 3);
    // A column too many is a shifted row.
    for bad in [
        &b"a.b\x1fx\x1f3\x1f2024-02-15T10:30:05Z\x1f\x1fy"[..],
        b"a.b\x1fx\x1f3",
        b"a.b\xff",
        b"a.b",
    ] {
        assert!(schema.canonical(bad, &mut out).is_err());
    }
}

proptest! {
    #[test]
    fn canonical_rows_stay_as_they_are(
        name in any::<String>(), count in any::<i64>(), share in any::<f64>(), micros in any::<i64>(),
    ) {
        let record = serde_json::json!({
            "domain": "a.b", "name": name, "count": count,
            "share": if share.is_finite() { Value::from(share) } else { Value::Null },
        });
        let Value::Object(record) = record else { unreachable!() };
        let (schema, now) = (schema(), StoreTime::from_micros(micros));
        let mut once = Vec::new();
        let parsed = schema.write_json(&record, now, &mut once).unwrap();
        let mut twice = Vec::new();
        prop_assert_eq!(schema.canonical(&once, &mut twice).unwrap(), parsed);
        prop_assert_eq!(&once, &twice);
        prop_assert_eq!(parsed.updated_at, now.as_micros());
        prop_assert_eq!(schema.claim(&once).unwrap().updated_at, now.as_micros());
        let back = schema.read_json(&once);
        let expected = if name.is_empty() { Value::Null } else { Value::from(name) };
        prop_assert_eq!(&back["name"], &expected);
        prop_assert_eq!(&back["count"], &Value::from(count));
    }

    #[test]
    fn both_parsers_of_times_agree(micros in any::<i64>()) {
        let time = StoreTime::from_micros(micros);
        let text = time.to_string();
        prop_assert_eq!(plain_micros(text.as_bytes()), Some(time.as_micros()));
        let short = format!("{}Z", &text[..19]);
        prop_assert_eq!(plain_micros(short.as_bytes()), Some(time.floor_to_second().as_micros()));
    }

    #[test]
    fn what_the_quick_parser_reads_the_other_reads_too(
        text in "[0-2][0-9]{3}-[0-1][0-9]-[0-3][0-9]T[0-2][0-9]:[0-6][0-9]:[0-6][0-9](\\.[0-9]{6})?Z"
    ) {
        if let Some(micros) = plain_micros(text.as_bytes()) {
            prop_assert_eq!(text.parse::<StoreTime>().map(StoreTime::as_micros), Ok(micros));
        }
    }

    #[test]
    fn no_input_panics(row in any::<Vec<u8>>()) {
        let schema = schema();
        let mut out = Vec::new();
        if let Ok(parsed) = schema.canonical(&row, &mut out) {
            prop_assert_eq!(usv::first_field(&out).len(), parsed.key_len);
        } else {
            prop_assert!(out.is_empty());
        }
        let _ = (schema.claim(&row), schema.read_json(&row));
    }
}
