//! What we depend on is what `deny.toml` allows: licences, bans and sources, without a network.

#![allow(clippy::unwrap_used)] // in a test, a failure is a panic

use std::collections::BTreeSet;
use std::process::Command;

use serde::Deserialize;

#[derive(Deserialize)]
struct Deny {
    licenses: Licenses,
    bans: Bans,
}

#[derive(Deserialize)]
struct Licenses {
    allow: BTreeSet<String>,
}

#[derive(Deserialize)]
struct Bans {
    deny: Vec<Banned>,
}

#[derive(Deserialize)]
struct Banned {
    name: String,
}

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
    resolve: Resolve,
}

#[derive(Deserialize)]
struct Resolve {
    nodes: Vec<Node>,
}

#[derive(Deserialize)]
struct Node {
    id: String,
}

#[derive(Deserialize)]
struct Package {
    id: String,
    name: String,
    license: Option<String>,
    source: Option<String>,
}

/// Whether an SPDX expression is satisfied by these licences. `OR` binds weaker than `AND`.
fn allowed(expression: &str, allow: &BTreeSet<String>) -> bool {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut at = 0;
    either(&words, &mut at, allow)
}

fn either(words: &[&str], at: &mut usize, allow: &BTreeSet<String>) -> bool {
    let mut holds = both(words, at, allow);
    while words.get(*at) == Some(&"OR") {
        *at += 1;
        holds |= both(words, at, allow);
    }
    holds
}

fn both(words: &[&str], at: &mut usize, allow: &BTreeSet<String>) -> bool {
    let mut holds = one(words, at, allow);
    while words.get(*at) == Some(&"AND") {
        *at += 1;
        holds &= one(words, at, allow);
    }
    holds
}

fn one(words: &[&str], at: &mut usize, allow: &BTreeSet<String>) -> bool {
    let Some(word) = words.get(*at) else { return false };
    *at += 1;
    if *word == "(" {
        let holds = either(words, at, allow);
        *at += 1;
        return holds;
    }
    let mut name = (*word).to_owned();
    if words.get(*at) == Some(&"WITH") {
        name = format!("{name} WITH {}", words.get(*at + 1).unwrap_or(&""));
        *at += 2;
    }
    allow.contains(&name)
}

#[test]
fn expressions_are_understood() {
    let allow = ["MIT", "Apache-2.0 WITH LLVM-exception", "ISC"].map(str::to_owned).into();
    for (expression, holds) in [
        ("MIT", true),
        ("GPL-3.0", false),
        ("GPL-3.0 OR MIT", true),
        ("MIT/Apache-2.0", true),
        ("MIT AND GPL-3.0", false),
        ("(MIT OR GPL-3.0) AND ISC", true),
        ("GPL-3.0 OR MIT AND BSD-3-Clause", false),
        ("Apache-2.0 WITH LLVM-exception", true),
        ("Apache-2.0", false),
        ("", false),
    ] {
        assert_eq!(allowed(expression, &allow), holds, "{expression}");
    }
}

#[test]
fn dependencies_are_what_deny_toml_allows() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let deny = std::fs::read_to_string(format!("{root}/deny.toml")).unwrap();
    let deny: Deny = toml::from_str(&deny).unwrap();
    // Only what is built here is downloaded here.
    let rustc = Command::new("rustc").arg("-vV").output().unwrap().stdout;
    let rustc = String::from_utf8(rustc).unwrap();
    let host = rustc.lines().find_map(|line| line.strip_prefix("host: ")).unwrap();
    let done = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version=1", "--locked", "--offline", "--all-features"])
        .args(["--filter-platform", host])
        .current_dir(root)
        .output()
        .unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let metadata: Metadata = serde_json::from_slice(&done.stdout).unwrap();
    let used: BTreeSet<&str> = metadata.resolve.nodes.iter().map(|node| node.id.as_str()).collect();
    let mut wrong = Vec::new();
    let mut checked = 0;
    for package in metadata.packages.iter().filter(|package| used.contains(package.id.as_str())) {
        checked += 1;
        let license = package.license.as_deref().unwrap_or_default();
        if !allowed(license, &deny.licenses.allow) {
            wrong.push(format!("{}: licence {license:?}", package.name));
        }
        if deny.bans.deny.iter().any(|banned| banned.name == package.name) {
            wrong.push(format!("{}: banned", package.name));
        }
        if package.source.as_deref().is_some_and(|source| !source.starts_with("registry+")) {
            wrong.push(format!("{}: not from the registry", package.name));
        }
    }
    assert!(checked > 50, "only {checked} packages: is the metadata right?");
    assert!(wrong.is_empty(), "{wrong:#?}");
}
