//! A command that is a text: what `sh` runs, without running what stands in a task.
//!
//! Pasted into a script, a task like `; rm -rf .` is a part of it. So a task comes as a parameter of the
//! script, and its place is taken by that parameter, quoted as its surroundings ask for:
//!
//! ```text
//! curl {} > 'out {id}'    becomes    sh -c 'curl "$1" > '\''out '\''"$2"'\'''\''' sh {} {id}
//! ```

/// What may be put into a task by whoever pushes it. All else that is filled in is a number, or the plan's.
const PLACES: [&str; 2] = ["{}", "{id}"];

/// Where in a script we are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Within {
    Plain,
    Single,
    Double,
    Comment,
    /// `$(( … ))`, so many parentheses deep.
    Sum(u32),
}

/// The command that runs this script.
pub(super) fn command_of(script: &str) -> Vec<String> {
    let used: Vec<&str> = PLACES.into_iter().filter(|place| script.contains(place)).collect();
    let mut out = String::with_capacity(script.len());
    let mut within = Within::Plain;
    // What to return to after a sum.
    let mut around = Within::Plain;
    let mut rest = script;
    while let Some(next) = rest.chars().next() {
        if let Some(number) = used.iter().position(|place| rest.starts_with(place)) {
            rest = &rest[used[number].len()..];
            let number = number + 1;
            out.push_str(&match within {
                Within::Plain | Within::Comment => format!("\"${number}\""),
                Within::Single => format!("'\"${number}\"'"),
                Within::Double | Within::Sum(_) => format!("${{{number}}}"),
            });
            continue;
        }
        let begins_word = out.ends_with([' ', '\t', '\n', ';', '&', '|', '(']) || out.is_empty();
        let mut taken = next.len_utf8();
        within = match (within, next) {
            // It would escape the quote of the parameter.
            (Within::Plain | Within::Double, '\\')
                if used.iter().any(|place| rest[taken..].starts_with(place)) =>
            {
                rest = &rest[taken..];
                continue;
            }
            (Within::Plain | Within::Double, '\\') => {
                taken += rest[taken..].chars().next().map_or(0, char::len_utf8);
                within
            }
            (Within::Plain | Within::Double, '$') if rest.starts_with("$((") => {
                taken = 3;
                around = within;
                Within::Sum(2)
            }
            (Within::Plain, '\'') => Within::Single,
            (Within::Plain, '"') => Within::Double,
            (Within::Plain, '#') if begins_word => Within::Comment,
            (Within::Single, '\'') | (Within::Double, '"') | (Within::Comment, '\n') => {
                Within::Plain
            }
            (Within::Sum(depth), '(') => Within::Sum(depth + 1),
            (Within::Sum(1), ')') => around,
            (Within::Sum(depth), ')') => Within::Sum(depth - 1),
            (within, _) => within,
        };
        out.push_str(&rest[..taken]);
        rest = &rest[taken..];
    }
    let mut words = ["sh", "-c", &out].map(str::to_owned).to_vec();
    if !used.is_empty() {
        // The first is the script's own name.
        words.push("sh".to_owned());
        words.extend(used.into_iter().map(str::to_owned));
    }
    words
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn places_become_parameters() {
        for (script, becomes) in [
            ("true", &["true"][..]),
            ("curl {}", &["curl \"$1\"", "sh", "{}"]),
            ("x={id}.txt", &["x=\"$1\".txt", "sh", "{id}"]),
            ("echo \"got {} ({id})\"", &["echo \"got ${1} (${2})\"", "sh", "{}", "{id}"]),
            ("echo 'got {}'", &["echo 'got '\"$1\"''", "sh", "{}"]),
            ("echo $(( {} * ({} + 1) )) {}", &["echo $(( ${1} * (${1} + 1) )) \"$1\"", "sh", "{}"]),
            ("# don't\necho {}", &["# don't\necho \"$1\"", "sh", "{}"]),
            ("echo a#b'{}'", &["echo a#b''\"$1\"''", "sh", "{}"]),
            ("echo \\{}", &["echo \"$1\"", "sh", "{}"]),
            ("echo \\' {}", &["echo \\' \"$1\"", "sh", "{}"]),
            ("echo \"\\\"{}\"", &["echo \"\\\"${1}\"", "sh", "{}"]),
            ("echo {queue} {attempt}", &["echo {queue} {attempt}"]),
        ] {
            let words = command_of(script);
            assert_eq!(words[..2], ["sh", "-c"]);
            assert_eq!(words[2..], *becomes, "{script}");
        }
    }

    proptest! {
        /// Nothing of a task is ever pasted, and a script without places stays as it is.
        #[test]
        fn no_place_is_left(pieces in prop::collection::vec(prop::sample::select(vec![
            "{}", "{id}", "'", "\"", "\\", "$((", "))", "(", ")", "#", "\n", " ", "x", "ü", "$",
        ]), 0..20)) {
            let script = pieces.concat();
            let words = command_of(&script);
            let left = PLACES.iter().any(|place| words[2].contains(place));
            prop_assert!(!left, "left: {}", words[2]);
            if words.len() == 3 {
                prop_assert_eq!(&words[2], &script);
            }
        }
    }
}
