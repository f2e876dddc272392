//! Where the fleet's plan is, and what its nodes say of themselves.
//!
//! ```text
//! fleet.toml, or fleet.json     what each node runs
//! nodes/{node}.json             the node's record, which is also its lease
//! ```

use crate::key::{Key, KeyError, decode_segment, encode_segment};

/// The fleet's plan as TOML. Counts before the one in JSON, should both be there.
pub const PLAN_TOML: &str = "fleet.toml";
/// The same as JSON.
pub const PLAN_JSON: &str = "fleet.json";

const NODES: &str = "nodes/";

/// The prefix of all nodes' records.
pub fn all_nodes() -> &'static str {
    NODES
}

/// The record of the node with this name. Any text is a name.
pub fn node(name: &str) -> Result<Key, KeyError> {
    Key::new(format!("{NODES}{}.json", encode_segment(name)))
}

/// The node's name in the key of its record.
pub fn node_name(key: &str) -> Option<String> {
    let name = key.strip_prefix(NODES)?.strip_suffix(".json")?;
    decode_segment(name).filter(|name| !name.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_name_comes_back_from_its_key() {
        for name in ["pi-4", "a/b", "..", "späti", "x.json", "*"] {
            assert_eq!(node_name(node(name).unwrap().as_str()).as_deref(), Some(name));
        }
        for other in ["nodes/", "nodes/.json", "nodes/a/b.json", "fleet.toml", "nodes/a.lock"] {
            assert_eq!(node_name(other), None, "{other}");
        }
    }
}
