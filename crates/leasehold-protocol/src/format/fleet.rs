//! `fleet.toml`: what each node of the fleet runs.
//!
//! ```toml
//! [[node]]                             # the first entry that matches a node's name is its plan
//! name = "pi-*"                        # or a list of names and patterns; * is any text, ? one character
//! connections = 16                     # of all its processes together
//! requests_per_minute = 600            # the same
//!
//! [[node.worker]]
//! queue = ["urgent", "scrape"]         # in order of priority
//! count = 2                            # processes
//! jobs = 4                             # tasks at a time, each
//! command = ["./scrape.sh", "{}"]      # or a text, which `sh -c` runs
//!
//! [[node.compiler]]
//! index = "domains"
//! ```
//!
//! Plain data: the text is parsed elsewhere, from TOML or JSON. What is not known is refused: a word
//! that is misspelt must not be a plan that is half carried out.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::duration;

/// What each node of the fleet runs.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fleet {
    /// The plans, in order: the first whose name matches is a node's.
    #[serde(default)]
    pub node: Vec<NodePlan>,
}

/// What a node runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodePlan {
    /// Which nodes: names and patterns.
    pub name: Words,
    /// How often the node looks for another plan and writes its record: a HEAD and a PUT each time.
    #[serde(default, with = "duration::option", skip_serializing_if = "Option::is_none")]
    pub every: Option<Duration>,
    /// How many connections all its processes open together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connections: Option<u32>,
    /// How many requests all its processes send in a minute.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requests_per_minute: Option<u32>,
    /// Workers of queues.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub worker: Vec<WorkerPlan>,
    /// Compilers of indexes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub compiler: Vec<CompilerPlan>,
}

/// Workers that do the same.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkerPlan {
    /// The queues, in order of priority.
    pub queue: Words,
    /// How many processes.
    #[serde(default = "one")]
    pub count: u32,
    /// How many tasks at a time, each of them.
    #[serde(default = "one")]
    pub jobs: u32,
    /// What runs for each task.
    pub command: Words,
    /// Variables of its environment.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// How often to look for tasks at least, where there were none.
    #[serde(default, with = "duration::option", skip_serializing_if = "Option::is_none")]
    pub poll: Option<Duration>,
    /// How long running tasks may go on when the worker has to end.
    #[serde(default, with = "duration::option", skip_serializing_if = "Option::is_none")]
    pub drain: Option<Duration>,
    /// How long a command has between TERM and KILL.
    #[serde(default, with = "duration::option", skip_serializing_if = "Option::is_none")]
    pub grace: Option<Duration>,
    /// The exit code that says that a task will never work.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fail_code: Option<u8>,
    /// A file to which a line is appended for each run. Costs no request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log: Option<String>,
}

/// Compilers that do the same.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CompilerPlan {
    /// The indexes.
    pub index: Words,
    /// How many processes.
    #[serde(default = "one")]
    pub count: u32,
    /// The pause after a pass that found nothing to do.
    #[serde(default, with = "duration::option", skip_serializing_if = "Option::is_none")]
    pub pause: Option<Duration>,
    /// How many shards at a time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parallel: Option<u16>,
}

fn one() -> u32 {
    1
}

/// One text, or a list of texts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Words {
    /// Written as one.
    One(String),
    /// Written as a list.
    List(Vec<String>),
}

impl Words {
    /// Them, one or many.
    pub fn all(&self) -> &[String] {
        match self {
            Self::One(word) => std::slice::from_ref(word),
            Self::List(words) => words,
        }
    }
}

impl Serialize for Words {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::One(word) => to.serialize_str(word),
            Self::List(words) => words.serialize(to),
        }
    }
}

impl<'de> Deserialize<'de> for Words {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        // Not an untagged enum: that says only that nothing matched.
        struct OneOrMany;
        impl<'de> Visitor<'de> for OneOrMany {
            type Value = Words;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text or a list of texts")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Words, E> {
                Ok(Words::One(text.to_owned()))
            }
            fn visit_seq<A: de::SeqAccess<'de>>(self, mut list: A) -> Result<Words, A::Error> {
                let mut words = Vec::new();
                while let Some(word) = list.next_element()? {
                    words.push(word);
                }
                Ok(Words::List(words))
            }
        }
        from.deserialize_any(OneOrMany)
    }
}

/// Why a plan cannot be carried out.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct FleetError(String);

/// The most processes of one node: beyond it, a plan is a slip of the finger.
pub const MOST_PROCESSES: u32 = 256;
/// The most tasks that one worker does at a time.
const MOST_JOBS: u32 = 1024;
/// The fewest requests a minute with which a process can keep its leases.
pub const LEAST_REQUESTS: u32 = 6;
/// How often a node may report: less would be all it does, more would not be noticed.
const EVERY: std::ops::RangeInclusive<Duration> =
    Duration::from_secs(1)..=Duration::from_secs(24 * 3600);

impl Fleet {
    /// This plan, or why it cannot be carried out.
    pub fn checked(self) -> Result<Self, FleetError> {
        for (n, plan) in self.node.iter().enumerate() {
            let place = format!("node {} ({})", n + 1, plan.name.all().join(", "));
            let bad = |what: String| FleetError(format!("{place}: {what}"));
            plan.check().map_err(bad)?;
            for name in plan.name.all() {
                let earlier = self.node[..n].iter().flat_map(|plan| plan.name.all());
                if let Some(first) = earlier.into_iter().find(|first| covers(first, name)) {
                    return Err(bad(format!(
                        "it never counts for {name:?}: {first:?} stands before it, and the first that \
                         matches is the plan"
                    )));
                }
            }
        }
        Ok(self)
    }

    /// The plan of the node with this name: the first that matches.
    pub fn plan_of(&self, node: &str) -> Option<&NodePlan> {
        self.node.iter().find(|plan| plan.name.all().iter().any(|name| matches(name, node)))
    }
}

impl NodePlan {
    fn check(&self) -> Result<(), String> {
        not_empty("name", &self.name)?;
        for (n, worker) in self.worker.iter().enumerate() {
            worker.check().map_err(|what| format!("worker {}: {what}", n + 1))?;
        }
        for (n, compiler) in self.compiler.iter().enumerate() {
            compiler.check().map_err(|what| format!("compiler {}: {what}", n + 1))?;
        }
        let processes = self.processes();
        if processes > MOST_PROCESSES {
            return Err(format!("{processes} processes; the most is {MOST_PROCESSES}"));
        }
        if let Some(every) = self.every.filter(|every| !EVERY.contains(every)) {
            let [least, most] = [EVERY.start(), EVERY.end()].map(|span| duration::format(*span));
            return Err(format!("every is {least} to {most}, not {}", duration::format(every)));
        }
        // The supervisor is one of them.
        let all = processes + 1;
        if let Some(connections) = self.connections.filter(|connections| *connections < all) {
            return Err(format!(
                "connections = {connections} is not one for each: it runs {processes} processes and a \
                 supervisor"
            ));
        }
        if let Some(requests) = self.requests_per_minute.filter(|n| *n < all * LEAST_REQUESTS) {
            return Err(format!(
                "requests_per_minute = {requests} is too few: {processes} processes and a supervisor \
                 need {LEAST_REQUESTS} each to keep their leases"
            ));
        }
        Ok(())
    }

    /// How many processes it runs.
    pub fn processes(&self) -> u32 {
        let workers = self.worker.iter().map(|worker| worker.count);
        let compilers = self.compiler.iter().map(|compiler| compiler.count);
        workers.chain(compilers).fold(0, u32::saturating_add)
    }
}

impl WorkerPlan {
    fn check(&self) -> Result<(), String> {
        not_empty("queue", &self.queue)?;
        // They become one word of a command line.
        let odd = |queue: &&String| queue.contains(',') || queue.starts_with('-');
        if let Some(queue) = self.queue.all().iter().find(odd) {
            return Err(format!(
                "queue {queue:?}: several are a list, and a name here cannot begin with -"
            ));
        }
        not_empty("command", &self.command)?;
        if self.jobs == 0 || self.jobs > MOST_JOBS {
            return Err(format!("jobs is 1 to {MOST_JOBS}, not {}", self.jobs));
        }
        if self.fail_code == Some(0) {
            return Err("fail_code cannot be 0, which says that the task is done".to_owned());
        }
        if let Some(name) = self.env.keys().find(|name| name.is_empty() || name.contains('=')) {
            return Err(format!("env: {name:?} cannot be the name of a variable"));
        }
        let texts = self.command.all().iter().chain(self.env.keys()).chain(self.env.values());
        let texts = texts.chain(&self.log);
        match texts.into_iter().any(|text| text.contains('\0')) {
            true => Err("a command cannot contain NUL".to_owned()),
            false => Ok(()),
        }
    }
}

impl CompilerPlan {
    fn check(&self) -> Result<(), String> {
        not_empty("index", &self.index)?;
        match self.parallel {
            Some(0) => Err("parallel is at least 1".to_owned()),
            _ => Ok(()),
        }
    }
}

fn not_empty(what: &str, words: &Words) -> Result<(), String> {
    let words = words.all();
    // An empty argument is fine, but nothing is called that.
    let nameless = words.first().is_none_or(String::is_empty);
    match nameless || (what != "command" && words.iter().any(String::is_empty)) {
        true => Err(format!("{what} is empty")),
        false => Ok(()),
    }
}

/// Whether the pattern matches the name: `*` is any text, `?` one character.
pub fn matches(pattern: &str, name: &str) -> bool {
    let (pattern, name): (Vec<char>, Vec<char>) =
        (pattern.chars().collect(), name.chars().collect());
    // Where to go on when what follows the last star does not fit: one further.
    let (mut p, mut n, mut star) = (0, 0, None);
    while n < name.len() {
        match pattern.get(p) {
            Some('*') => {
                star = Some((p, n));
                p += 1;
            }
            Some(c) if *c == '?' || *c == name[n] => (p, n) = (p + 1, n + 1),
            _ => match star {
                Some((at, from)) => {
                    star = Some((at, from + 1));
                    (p, n) = (at + 1, from + 1);
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|c| *c == '*')
}

/// Whether whatever the second matches is matched by the first. Not every such case is found, but
/// what is found is one: a pattern that matches another's own text, stars and all, matches all that
/// the other does.
fn covers(first: &str, second: &str) -> bool {
    // A question mark of the first would take a star of the second for one character.
    let careful = second.contains('*') && first.contains('?');
    !careful && matches(first, second)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(json: &str) -> Result<Fleet, String> {
        let fleet: Fleet = serde_json::from_str(json).map_err(|error| error.to_string())?;
        fleet.checked().map_err(|error| error.to_string())
    }

    #[test]
    fn the_first_match_is_the_plan() {
        let fleet = parse(
            r#"{"node": [
                {"name": "pi-4", "connections": 4},
                {"name": ["pi-*", "nas"], "worker": [{"queue": "q", "command": "true"}]},
                {"name": "*"}
            ]}"#,
        )
        .unwrap();
        assert_eq!(fleet.plan_of("pi-4").unwrap().connections, Some(4));
        for node in ["pi-5", "pi-", "nas"] {
            assert_eq!(fleet.plan_of(node).unwrap().worker.len(), 1, "{node}");
        }
        assert!(fleet.plan_of("laptop").unwrap().worker.is_empty());
        assert_eq!(Fleet::default().plan_of("laptop"), None);
        let worker = &fleet.node[1].worker[0];
        assert_eq!((worker.count, worker.jobs), (1, 1));
    }

    #[test]
    fn what_cannot_be_carried_out_is_refused_with_the_reason() {
        let worker = |inside: &str| {
            format!(r#"{{"node":[{{"name":"a","worker":[{{"queue":"q",{inside}}}]}}]}}"#)
        };
        for (json, part) in [
            (r#"{"nodes": []}"#.to_owned(), "unknown field `nodes`"),
            (r#"{"node": [{"worker": []}]}"#.to_owned(), "missing field `name`"),
            (r#"{"node": [{"name": 3}]}"#.to_owned(), "a text or a list of texts"),
            (r#"{"node": [{"name": []}]}"#.to_owned(), "name is empty"),
            (r#"{"node": [{"name": ["a", ""]}]}"#.to_owned(), "name is empty"),
            (worker(r#""command":"x","cuont":2"#), "unknown field `cuont`"),
            (worker(r#""count":2"#), "missing field `command`"),
            (worker(r#""command":[]"#), "worker 1: command is empty"),
            (worker(r#""command":"x"}, {"queue":"a,b","command":"x""#), "several are a list"),
            (worker(r#""command":"x"}, {"queue":"-q","command":"x""#), "cannot begin with -"),
            (worker(r#""command":"x","jobs":0"#), "jobs is 1 to 1024"),
            (worker(r#""command":"x","fail_code":0"#), "fail_code cannot be 0"),
            (worker(r#""command":"x","count":300"#), "300 processes"),
            (worker(r#""command":"x","count":4294967295"#), "4294967295 processes"),
            (worker(r#""command":"x","poll":"soon""#), "not a duration"),
            (worker(r#""command":"x","env":{"A=B":""}"#), "cannot be the name of a variable"),
            (worker("\"command\":\"a\\u0000b\""), "NUL"),
            (r#"{"node":[{"name":"a","every":"1ms"}]}"#.to_owned(), "every is 1s to 1d"),
            (
                r#"{"node":[{"name":"a","connections":1,"worker":[{"queue":"q","command":"x"}]}]}"#
                    .to_owned(),
                "not one for each",
            ),
            (
                r#"{"node":[{"name":"a","requests_per_minute":5}]}"#.to_owned(),
                "requests_per_minute = 5 is too few",
            ),
            (
                r#"{"node":[{"name":"a","compiler":[{"index":""}]}]}"#.to_owned(),
                "compiler 1: index is empty",
            ),
            (
                r#"{"node":[{"name":"pi-*"},{"name":"pi-4"}]}"#.to_owned(),
                "node 2 (pi-4): it never counts for \"pi-4\": \"pi-*\" stands before it",
            ),
            (r#"{"node":[{"name":"*"},{"name":"a*"}]}"#.to_owned(), "never counts"),
            (r#"{"node":[{"name":"a"},{"name":"a"}]}"#.to_owned(), "never counts"),
        ] {
            let error = parse(&json).unwrap_err();
            assert!(error.contains(part), "{json}: {error}");
        }
        for fine in [
            "{}",
            r#"{"node":[{"name":"a?"},{"name":"a*"}]}"#,
            r#"{"node":[{"name":"pi-4"},{"name":"pi-*"}]}"#,
            r#"{"node":[{"name":"a","worker":[{"queue":"q","command":"x","count":0}]}]}"#,
            r#"{"node":[{"name":"a","worker":[{"queue":"q","command":["x",""]}]}]}"#,
        ] {
            assert!(parse(fine).is_ok(), "{fine}");
        }
    }

    #[test]
    fn patterns() {
        for (pattern, name, fits) in [
            ("pi-*", "pi-4", true),
            ("pi-*", "pi", false),
            ("*", "", true),
            ("", "", true),
            ("", "a", false),
            ("a?c", "abc", true),
            ("a?c", "ac", false),
            ("*a*b", "xaxb", true),
            ("*a*b", "xaxbx", false),
            ("é?", "éü", true),
            ("[ab]", "a", false),
        ] {
            assert_eq!(matches(pattern, name), fits, "{pattern} {name}");
        }
    }

    proptest! {
        #[test]
        fn nothing_that_is_covered_escapes(
            first in "[ab*?]{0,5}", second in "[ab*?]{0,5}", name in "[ab]{0,5}"
        ) {
            if covers(&first, &second) && matches(&second, &name) {
                prop_assert!(matches(&first, &name));
            }
        }

        #[test]
        fn no_input_panics(text in any::<String>(), name in any::<String>()) {
            let _ = parse(&text);
            let _ = matches(&text, &name);
        }
    }
}
