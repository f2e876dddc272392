//! What people type: `leasehold.toml`, URLs of stores, spans of time.

use leasehold::StoreSettings;
use leasehold::store::StoreUrl;
use serde::Deserialize;

/// The part of `leasehold.toml` that the library reads; the rest is plain text and numbers.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Config {
    store: Option<String>,
    connection: StoreSettings,
    force_network_fs: bool,
}

/// Any text is read or refused.
pub fn configuration(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok(config) = toml::from_str::<Config>(text) {
        let _ = config.force_network_fs;
        let written = toml::to_string(&config.connection).expect("settings can be written");
        let again: StoreSettings = toml::from_str(&written).expect("and read again");
        assert_eq!(again, config.connection);
        let _ = config.connection.checked();
        let _ = config.store.map(|url| url.parse::<StoreUrl>());
    }
    let _ = text.parse::<StoreUrl>();
    if let Ok(span) = leasehold::settings::parse_duration(text) {
        let written = leasehold::settings::format_duration(span);
        assert_eq!(leasehold::settings::parse_duration(&written).ok(), Some(span));
    }
}
