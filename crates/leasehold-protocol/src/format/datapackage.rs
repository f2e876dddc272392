//! `datapackage.json`: what the records of an index look like.
//!
//! A Frictionless data package, so that other tools read the shards with their types: fields,
//! dialect, primary key; and our own settings under `leasehold`. The first field is the key. Two
//! fields are ours: `updated_at`, by which the latest record wins, and `_deleted`, which marks a
//! deletion.
//!
//! Rows have no header and old rows stay as they are, so a schema only ever grows at its end.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::cas::Nonce;
use crate::shard::{Shard, Width};

/// The layout of indexes that this code writes.
pub const FORMAT: u32 = 1;

/// The usual name of the field that tells when a record was written.
pub const UPDATED_AT: &str = "updated_at";

/// The field that is `true` in deletions and empty in records.
pub const DELETED: &str = "_deleted";

/// The longest key, in bytes: with its escapes it must fit into the name of an object.
pub const MAX_KEY: usize = 300;

/// The longest row, in bytes.
pub const MAX_ROW: usize = 4 << 20;

/// What a field holds. Frictionless' names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Text.
    String,
    /// A whole number of 64 bits.
    Integer,
    /// A decimal number.
    Number,
    /// `true` or `false`.
    Boolean,
    /// `2026-01-31`.
    Date,
    /// `2026-01-31T09:05:00.123456Z`.
    Datetime,
    /// A JSON object.
    Object,
    /// A JSON array.
    Array,
}

impl Kind {
    /// The name in a schema.
    pub fn name(self) -> &'static str {
        match self {
            Self::String => "string",
            Self::Integer => "integer",
            Self::Number => "number",
            Self::Boolean => "boolean",
            Self::Date => "date",
            Self::Datetime => "datetime",
            Self::Object => "object",
            Self::Array => "array",
        }
    }

    /// "a string", "an integer".
    pub(super) fn with_article(self) -> String {
        let article = match self {
            Self::Integer | Self::Object | Self::Array => "an",
            _ => "a",
        };
        format!("{article} {}", self.name())
    }

    fn parse(text: &str) -> Option<Self> {
        serde_json::from_value(Value::String(text.to_owned())).ok()
    }
}

/// A field of a record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Field {
    /// Its name.
    pub name: String,
    /// What it holds.
    pub kind: Kind,
    /// Whether it must not be empty.
    pub required: bool,
    /// How many characters it has at most.
    pub max_length: Option<usize>,
    /// Whether it is a domain, to be normalised.
    pub domain: bool,
    /// What else stands in its description: titles and the like.
    pub other: Map<String, Value>,
}

impl Field {
    /// An optional field.
    pub fn new(name: impl Into<String>, kind: Kind) -> Self {
        Self {
            name: name.into(),
            kind,
            required: false,
            max_length: None,
            domain: false,
            other: Map::new(),
        }
    }

    /// The field in a text like `domain`, `name:string`, `count:integer!` (required) or
    /// `site:domain`.
    pub fn parse(text: &str) -> Result<Self, SchemaError> {
        let (name, kind) = text.split_once(':').unwrap_or((text, "string"));
        let required = kind.ends_with('!');
        let kind = kind.strip_suffix('!').unwrap_or(kind);
        let domain = kind == "domain";
        let kind = match domain {
            true => Kind::String,
            false => Kind::parse(kind).ok_or_else(|| {
                SchemaError::new(format!(
                    "field {name:?}: unknown type {kind:?} (string, integer, number, boolean, date, \
                     datetime, object, array, domain)"
                ))
            })?,
        };
        Ok(Self { required, domain, ..Self::new(name, kind) })
    }

    /// `is_key`: only the key is required in deletions as well, which Frictionless knows no exception for.
    /// What is required in records alone stands among our settings.
    fn to_json(&self, is_key: bool) -> Value {
        let mut field = self.other.clone();
        field.insert("name".to_owned(), self.name.clone().into());
        field.insert("type".to_owned(), self.kind.name().into());
        let mut constraints = match field.remove("constraints") {
            Some(Value::Object(constraints)) => constraints,
            _ => Map::new(),
        };
        if self.required && is_key {
            constraints.insert("required".to_owned(), true.into());
        }
        if let Some(most) = self.max_length {
            constraints.insert("maxLength".to_owned(), most.into());
        }
        if !constraints.is_empty() {
            field.insert("constraints".to_owned(), constraints.into());
        }
        field.into()
    }

    fn from_json(value: &Value, settings: &FieldSettings) -> Result<Self, SchemaError> {
        let Value::Object(given) = value else {
            return Err(SchemaError::new("a field is not an object"));
        };
        let mut other = given.clone();
        let Some(Value::String(name)) = other.remove("name") else {
            return Err(SchemaError::new("a field has no name"));
        };
        let kind = match other.remove("type") {
            None => Kind::String,
            Some(Value::String(kind)) => Kind::parse(&kind).ok_or_else(|| {
                SchemaError::new(format!("field {name:?} has the unknown type {kind:?}"))
            })?,
            Some(_) => return Err(SchemaError::new(format!("field {name:?}: type is not a text"))),
        };
        let mut field = Self::new(name, kind);
        if let Some(Value::Object(constraints)) = other.get_mut("constraints") {
            field.required = constraints.remove("required") == Some(Value::Bool(true));
            let most = constraints.remove("maxLength").and_then(|most| most.as_u64());
            field.max_length = most.and_then(|most| usize::try_from(most).ok());
            if constraints.is_empty() {
                other.remove("constraints");
            }
        }
        field.required |= settings.required.contains(&field.name);
        field.domain = settings.domains.contains(&field.name);
        field.other = other;
        Ok(field)
    }
}

/// Why a schema cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct SchemaError(String);

impl SchemaError {
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self(message.into())
    }
}

/// The fields of an index, ours included.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schema {
    fields: Vec<Field>,
    updated_at: usize,
    deleted: usize,
}

impl Schema {
    /// The schema with these fields of the user's. The first is the key; `updated_at` is added if it
    /// is not among them.
    pub fn new(mut fields: Vec<Field>) -> Result<Self, SchemaError> {
        if !fields.iter().any(|field| field.name == UPDATED_AT) {
            fields.push(Field::new(UPDATED_AT, Kind::Datetime));
        }
        if fields.iter().any(|field| field.name == DELETED) {
            return Err(SchemaError::new(format!("{DELETED:?} is a field of ours")));
        }
        fields.push(Field::new(DELETED, Kind::Boolean));
        Self::checked(fields)
    }

    /// The schema with `deleted`, the mark of deletions, between these fields.
    pub fn with_deleted(
        before: Vec<Field>,
        deleted: Field,
        behind: Vec<Field>,
    ) -> Result<Self, SchemaError> {
        Self::checked(before.into_iter().chain([deleted]).chain(behind).collect())
    }

    /// The schema with exactly these fields, ours among them.
    fn checked(mut fields: Vec<Field>) -> Result<Self, SchemaError> {
        let find = |name: &str, kind: Kind| match fields.iter().position(|f| f.name == name) {
            Some(at) if fields[at].kind == kind => Ok(at),
            Some(_) => Err(SchemaError::new(format!("{name:?} must be a {}", kind.name()))),
            None => Err(SchemaError::new(format!("there is no field {name:?}"))),
        };
        let updated_at = find(UPDATED_AT, Kind::Datetime)?;
        let deleted = find(DELETED, Kind::Boolean)?;
        if updated_at == 0 || deleted == 0 {
            return Err(SchemaError::new("the first field is the key: it cannot be one of ours"));
        }
        for (at, field) in fields.iter().enumerate() {
            let name = &field.name;
            if name.is_empty() || name.len() > 128 || name.chars().any(char::is_control) {
                return Err(SchemaError::new(format!("{name:?} cannot be the name of a field")));
            }
            if fields[..at].iter().any(|other| other.name.eq_ignore_ascii_case(name)) {
                return Err(SchemaError::new(format!("there are two fields {name:?}")));
            }
            if field.domain && field.kind != Kind::String {
                return Err(SchemaError::new(format!("{name:?}: a domain is a string")));
            }
        }
        let key = &mut fields[0];
        if !matches!(key.kind, Kind::String | Kind::Integer) {
            return Err(SchemaError::new(format!(
                "the key {:?} must be a string or an integer",
                key.name
            )));
        }
        key.required = true;
        Ok(Self { fields, updated_at, deleted })
    }

    /// All fields.
    pub fn fields(&self) -> &[Field] {
        &self.fields
    }

    /// The first field.
    pub fn key(&self) -> &Field {
        &self.fields[0]
    }

    /// Which field is `updated_at`.
    pub fn updated_at(&self) -> usize {
        self.updated_at
    }

    /// Which field is `_deleted`.
    pub fn deleted(&self) -> usize {
        self.deleted
    }

    /// Where the field with this name stands.
    pub fn position(&self, name: &str) -> Option<usize> {
        self.fields.iter().position(|field| field.name == name)
    }

    /// The schema with these fields behind its own.
    pub fn grown(&self, more: Vec<Field>) -> Result<Self, SchemaError> {
        if let Some(field) = more.iter().find(|field| field.required) {
            return Err(SchemaError::new(format!(
                "{:?} cannot be required: the records that are there do not have it",
                field.name
            )));
        }
        Self::checked(self.fields.iter().cloned().chain(more).collect())
    }

    /// Whether records written by `self` mean the same under `next`: `next` has the same fields in
    /// the same places, and possibly more behind them that need not be there.
    pub fn may_become(&self, next: &Self) -> Result<(), SchemaError> {
        for (at, old) in self.fields.iter().enumerate() {
            let Some(new) = next.fields.get(at) else {
                return Err(SchemaError::new(format!("the field {:?} is missing", old.name)));
            };
            let narrower = match (old.max_length, new.max_length) {
                (_, None) => false,
                (None, Some(_)) => true,
                (Some(old), Some(new)) => new < old,
            };
            let what = match () {
                () if new.name != old.name => "another name",
                () if new.kind != old.kind => "another type",
                () if new.domain != old.domain => "another normalisation",
                () if new.required && !old.required => "to be there",
                () if narrower => "to be shorter",
                () => continue,
            };
            return Err(SchemaError::new(format!(
                "the field {:?} (number {}) would have {what}; fields are only added at the end",
                old.name,
                at + 1
            )));
        }
        self.grown(next.fields[self.fields.len()..].to_vec()).map(|_| ())
    }

    /// A short text that differs between schemas that read rows differently.
    pub fn fingerprint(&self) -> String {
        let mut text = String::new();
        for field in &self.fields {
            let Field { name, kind, required, max_length, domain, .. } = field;
            text.push_str(&format!("{name:?}{kind:?}{required}{max_length:?}{domain};"));
        }
        format!("{:016x}", xxhash_rust::xxh3::xxh3_64(text.as_bytes()))
    }
}

/// Our settings of fields, by their names.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
struct FieldSettings {
    domains: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    required: Vec<String>,
}

/// Our settings of an index.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Settings {
    format: u32,
    width: u8,
    #[serde(flatten)]
    fields: FieldSettings,
    #[serde(default = "yes")]
    flat_inbox: bool,
    #[serde(default)]
    nonce: String,
    #[serde(flatten)]
    other: Map<String, Value>,
}

fn yes() -> bool {
    true
}

/// The content of `datapackage.json`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Package {
    /// The index's name.
    pub name: String,
    /// What its records look like.
    pub schema: Schema,
    /// How many digits name a shard.
    pub width: Width,
    /// Whether `{key}.usv` files beside the inbox are picked up. Costs one request per lookup and one
    /// LIST per compaction.
    pub flat_inbox: bool,
    /// The shards that are known to exist, for readers that take no pattern as a path (Frictionless
    /// does not). We look for ourselves.
    pub shards: Vec<Shard>,
    /// Marks the write of this record.
    pub nonce: String,
    /// What else stands there: kept when we rewrite it.
    other: Map<String, Value>,
    other_settings: Map<String, Value>,
}

impl Package {
    /// A new index.
    pub fn new(name: impl Into<String>, schema: Schema, width: Width, flat_inbox: bool) -> Self {
        Self {
            name: name.into(),
            schema,
            width,
            flat_inbox,
            shards: Vec::new(),
            nonce: String::new(),
            other: Map::new(),
            other_settings: Map::new(),
        }
    }

    /// The same with a fresh nonce.
    #[must_use]
    pub fn marked(mut self, nonce: Nonce) -> Self {
        self.nonce = nonce.to_string();
        self
    }

    /// The record's bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let fields = self.schema.fields.iter().enumerate();
        let fields: Vec<Value> = fields.map(|(at, field)| field.to_json(at == 0)).collect();
        let names = |which: fn(&Field) -> bool, from: usize| {
            let fields = self.schema.fields[from..].iter().filter(|field| which(field));
            fields.map(|field| field.name.clone()).collect()
        };
        let settings = Settings {
            format: FORMAT,
            width: self.width.digits(),
            fields: FieldSettings {
                domains: names(|field| field.domain, 0),
                required: names(|field| field.required, 1),
            },
            flat_inbox: self.flat_inbox,
            nonce: self.nonce.clone(),
            other: self.other_settings.clone(),
        };
        let mut package = self.other.clone();
        package.insert("name".to_owned(), self.name.clone().into());
        // The quote is a character that our files never contain: nothing is quoted.
        package.insert(
            "resources".to_owned(),
            serde_json::json!([{
                "name": "shards",
                "path": self.path(),
                "type": "table",
                "scheme": "file",
                "format": "csv",
                "mediatype": "text/csv",
                "encoding": "utf-8",
                "dialect": {
                    "header": false,
                    "delimiter": "\u{1f}",
                    "lineTerminator": "\n",
                    "quoteChar": "\u{1d}",
                    "doubleQuote": false,
                    "skipInitialSpace": false,
                },
                "schema": {
                    "fields": fields,
                    "primaryKey": [self.schema.key().name],
                    "missingValues": [""],
                },
            }]),
        );
        let settings = serde_json::to_value(settings).unwrap_or_default();
        package.insert("leasehold".to_owned(), settings);
        // Maps with text keys always serialise.
        let mut bytes = serde_json::to_vec_pretty(&package).unwrap_or_default();
        bytes.push(b'\n');
        bytes
    }

    /// One pattern until there are shards, and where there are too many to name.
    fn path(&self) -> Value {
        match self.shards.len() {
            1..=4096 => self.shards.iter().map(|shard| format!("shards/{shard}.usv")).collect(),
            _ => "shards/*.usv".into(),
        }
    }

    /// The record in these bytes. Other tools' data packages without our settings are refused.
    pub fn parse(bytes: &[u8]) -> Result<Self, SchemaError> {
        let text = |error: &dyn std::fmt::Display| {
            SchemaError::new(format!("datapackage.json cannot be read: {error}"))
        };
        let mut other: Map<String, Value> =
            serde_json::from_slice(bytes).map_err(|error| text(&error))?;
        let Some(Value::String(name)) = other.remove("name") else {
            return Err(text(&"it has no name"));
        };
        let settings = other.remove("leasehold").ok_or_else(|| text(&"it is not an index"))?;
        let settings: Settings = serde_json::from_value(settings).map_err(|error| text(&error))?;
        if settings.format != FORMAT {
            return Err(SchemaError::new(format!(
                "the index has format {}, this binary knows format {FORMAT}: upgrade it",
                settings.format
            )));
        }
        let width = Width::new(settings.width).ok_or_else(|| text(&"the width is not 1 to 4"))?;
        let resources = other.remove("resources").unwrap_or_default();
        let fields = resources
            .pointer("/0/schema/fields")
            .and_then(Value::as_array)
            .ok_or_else(|| text(&"it has no fields"))?;
        let fields = fields.iter().map(|field| Field::from_json(field, &settings.fields));
        let schema = Schema::checked(fields.collect::<Result<_, _>>()?)?;
        let shard = |path: &Value| {
            path.as_str()?.strip_prefix("shards/")?.strip_suffix(".usv")?.parse().ok()
        };
        let paths = resources.pointer("/0/path").and_then(Value::as_array);
        let shards = paths.map(|paths| paths.iter().filter_map(shard).collect());
        Ok(Self {
            name,
            schema,
            width,
            flat_inbox: settings.flat_inbox,
            shards: shards.unwrap_or_default(),
            nonce: settings.nonce,
            other,
            other_settings: settings.other,
        })
    }

    /// The fields in a JSON text: an array of fields, a table schema with `fields`, or a whole data
    /// package.
    pub fn fields_in(bytes: &[u8]) -> Result<Vec<Field>, SchemaError> {
        let value: Value = serde_json::from_slice(bytes)
            .map_err(|error| SchemaError::new(format!("the schema is not JSON: {error}")))?;
        let fields = value
            .pointer("/resources/0/schema/fields")
            .or_else(|| value.get("fields"))
            .unwrap_or(&value)
            .as_array()
            .ok_or_else(|| SchemaError::new("the schema has no fields"))?;
        let settings: FieldSettings = value
            .get("leasehold")
            .and_then(|settings| serde_json::from_value(settings.clone()).ok())
            .unwrap_or_default();
        let fields: Vec<Field> = fields
            .iter()
            .map(|field| Field::from_json(field, &settings))
            .collect::<Result<_, _>>()?;
        Ok(fields.into_iter().filter(|field| field.name != DELETED).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example of the seed document.
    fn domains() -> Schema {
        Schema::new(vec![
            Field { domain: true, ..Field::new("domain", Kind::String) },
            Field::new("company_name", Kind::String),
            Field::new("scraper_version", Kind::Integer),
            Field::new("updated_at", Kind::Datetime),
        ])
        .unwrap()
    }

    fn package() -> Package {
        let package = Package::new("domains", domains(), Width::USUAL, true);
        package.marked(Nonce::from_bytes([1; 16]))
    }

    #[test]
    fn golden_bytes_are_still_read_and_written() {
        let golden = include_bytes!("../../../../golden/datapackage-1.json");
        assert_eq!(Package::parse(golden).unwrap(), package());
        assert_eq!(String::from_utf8_lossy(&package().to_bytes()), String::from_utf8_lossy(golden));
    }

    #[test]
    fn fields_are_added_at_the_end_and_nowhere_else() {
        let old = domains();
        let grown = old.grown(vec![Field::new("country", Kind::String)]).unwrap();
        assert_eq!(old.may_become(&grown), Ok(()));
        assert_eq!(grown.deleted(), old.deleted());
        assert!(grown.may_become(&old).is_err());
        let required = Field { required: true, ..Field::new("x", Kind::String) };
        assert!(old.grown(vec![required]).is_err());
        assert!(old.grown(vec![Field::new("domain", Kind::String)]).is_err());
        let renamed = Schema::new(vec![Field::new("site", Kind::String)]).unwrap();
        assert!(old.may_become(&renamed).unwrap_err().to_string().contains("another name"));
    }

    #[test]
    fn schemas_that_cannot_work_are_refused() {
        let new = |fields: &[&str]| {
            Schema::new(fields.iter().map(|field| Field::parse(field).unwrap()).collect())
        };
        assert!(new(&["id:integer", "at:datetime"]).is_ok());
        for (bad, part) in [
            (&["x:number"][..], "must be a string or an integer"),
            (&["updated_at:datetime"], "cannot be one of ours"),
            (&["id", "_deleted:boolean"], "a field of ours"),
            (&["id", "updated_at:string"], "must be a datetime"),
            (&["id", "a", "A"], "two fields"),
            (&["id", ""], "cannot be the name"),
        ] {
            let error = new(bad).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
        assert!(Field::parse("a:uuid").unwrap_err().to_string().contains("unknown type"));
        assert!(Field::parse("a:integer!").unwrap().required);
        assert!(Field::parse("a:domain").unwrap().domain);
    }

    #[test]
    fn what_others_wrote_survives_a_rewrite() {
        let mut value: Value = serde_json::from_slice(&package().to_bytes()).unwrap();
        value["title"] = "Domains".into();
        value["leasehold"]["later"] = 1.into();
        value["resources"][0]["schema"]["fields"][1]["title"] = "Company".into();
        value["resources"][0]["schema"]["fields"][1]["constraints"]["minLength"] = 2.into();
        let bytes = serde_json::to_vec(&value).unwrap();
        let again: Value =
            serde_json::from_slice(&Package::parse(&bytes).unwrap().to_bytes()).unwrap();
        assert_eq!(again, value);
    }

    /// Deletions leave required fields empty: a tool that validates the shards must not be told.
    #[test]
    fn only_the_key_is_required_for_others() {
        let fields = ["id", "name:string!", "n:integer"].map(|field| Field::parse(field).unwrap());
        let schema = Schema::new(fields.to_vec()).unwrap();
        let package = Package::new("x", schema, Width::USUAL, true);
        let value: Value = serde_json::from_slice(&package.to_bytes()).unwrap();
        assert_eq!(value["leasehold"]["required"], serde_json::json!(["name"]));
        assert_eq!(value.to_string().matches("\"required\":true").count(), 1);
        assert_eq!(Package::parse(&package.to_bytes()), Ok(package.clone()));
        assert!(Package::fields_in(&package.to_bytes()).unwrap()[1].required);
        // As other tools write it.
        let mut other = value;
        other["resources"][0]["schema"]["fields"][1]["constraints"]["required"] = true.into();
        other["leasehold"]["required"] = Value::Null;
        other["leasehold"].as_object_mut().unwrap().remove("required");
        assert_eq!(Package::parse(&serde_json::to_vec(&other).unwrap()), Ok(package));
    }

    #[test]
    fn existing_shards_are_named() {
        let mut package = package();
        package.shards = vec!["00".parse().unwrap(), "5e".parse().unwrap()];
        let bytes = package.to_bytes();
        assert_eq!(Package::parse(&bytes).unwrap(), package);
        assert!(String::from_utf8(bytes).unwrap().contains("\"shards/5e.usv\""));
    }

    #[test]
    fn damage_and_newer_formats_are_refused() {
        for bad in [&b""[..], b"{}", b"[]", b"\xff", br#"{"name":"x","leasehold":{}}"#] {
            assert!(Package::parse(bad).is_err());
        }
        let text = String::from_utf8(package().to_bytes()).unwrap();
        let newer = text.replace("\"format\": 1", "\"format\": 2");
        assert!(Package::parse(newer.as_bytes()).unwrap_err().to_string().contains("upgrade"));
    }
}
