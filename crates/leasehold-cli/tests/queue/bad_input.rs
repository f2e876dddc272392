//! What cannot be: a clear message, a code of its own, and nothing half-written.

use super::*;

fn objects(place: &Place) -> Vec<String> {
    fn walk(folder: &Path, found: &mut Vec<String>) {
        for entry in folder.read_dir().into_iter().flatten().flatten() {
            match entry.file_type().unwrap().is_dir() {
                true => walk(&entry.path(), found),
                false => found.push(entry.path().display().to_string()),
            }
        }
    }
    let mut found = Vec::new();
    walk(&place.path().join(".leasehold/queues"), &mut found);
    found
}

#[test]
fn queues_that_are_not_there() {
    let place = directory();
    let with = ["show", "status", "peek", "failed", "pause", "resume", "sweep", "set"];
    let mut all: Vec<Vec<&str>> = with.iter().map(|verb| vec![*verb, "nope"]).collect();
    all.extend([
        vec!["retry", "nope", "--all"],
        vec!["purge", "nope", "--pending"],
        vec!["show", "nope", "task"],
    ]);
    for words in all {
        place.fails(&words, 4, "nope: there is no such queue (see `leasehold queue ls`)");
    }
    place.ok(&["create", "q"]);
    place.fails(&["create", "q"], 2, "there is a queue \"q\" already");
    place.fails(&["show", "q", "nobody"], 4, "nobody: there is no such task");
    assert_eq!(objects(&place).len(), 1);
}

#[test]
fn names_that_cannot_be() {
    let place = directory();
    let long = "n".repeat(2000);
    for verb in [vec!["create"], vec!["status"], vec!["push"], vec!["show"]] {
        for (name, part) in [("", "a queue needs a name"), (long.as_str(), "at most")] {
            let mut words = [verb.as_slice(), &[name]].concat();
            if verb == ["push"] {
                words.push("task");
            }
            place.fails(&words, 2, part);
        }
    }
    place.fails(&["work", "a,,b", "--", "true"], 2, "a queue without a name");
    place.fails(&["work", "", "--", "true"], 2, "a queue without a name");
    assert!(objects(&place).is_empty(), "{:?}", objects(&place));
    place.ok(&["create", "q"]);
    place.fails(&["push", "q", "x", "--id", &long], 2, "task id");
    place.fails(&["push", "q", "x", "--id", ""], 2, "a task needs a name");
    assert_eq!(place.counts(), [0, 0, 0, 0]);
    // Everything else can be a name.
    for odd in ["a b", "..", ".", "é/ü?#%", "-x", "\u{1f980}", "a\nb", "a'\"b"] {
        let id = format!("--id={odd}");
        place.ok(&["push", "q", "x", &id]);
        assert_eq!(place.json(&["show", "q", "--", odd])[0]["state"], "free", "{odd:?}");
    }
    let script = "printf '%s' \"$LEASEHOLD_TASK_ID\"";
    place.ok(&["work", "q", "--exit-when-empty", "--", "sh", "-c", script]);
    for odd in ["a b", "..", ".", "é/ü?#%", "-x", "\u{1f980}", "a\nb", "a'\"b"] {
        let shown = place.json(&["show", "q", "--", odd]).remove(0);
        assert_eq!(shown["receipt"]["result"], odd);
    }
}

#[test]
fn options_that_make_no_sense() {
    let place = directory();
    for (words, part) in [
        (&["push", "q", "a", "b", "--id", "x"][..], "for one task"),
        (&["push", "q", "a", "b", "--wait"], "for one task"),
        (&["push", "q", "-", "--id", "x"], "for one task, not for -"),
        (&["push", "q", "-", "--wait"], "for one task, not for -"),
        (&["push", "q", "a", "--bundle", "5", "--id", "x"], "cannot be bundled"),
        (&["push", "q", "-", "--bundle", "5", "--id-field", "x"], "cannot be bundled"),
        (&["push", "q", "-", "--bundle", "5", "--delay", "1s"], "cannot be bundled"),
        (&["push", "q", "a", "--bundle", "0"], "--bundle"),
        (&["push", "q", "a", "--bundle", "10001"], "--bundle"),
        (&["push", "q", "a", "--bundle", "5", "--wait"], "--wait"),
        (&["push", "q", "a", "--id", "x", "--id-field", "y"], "--id-field"),
        (&["push", "q", "a", "--delay", "soon"], "soon"),
        (&["push", "q", "a", "--delay", "-1s"], "-1"),
        (&["push", "q", "a", "--timeout", "5"], "5"),
        (&["push", "q", "a", "--max-attempts", "0"], "--max-attempts"),
        (&["push", "q", "{\"a\":1}", "--id-field", "b"], "no text or number in field \"b\""),
        (&["push", "q", "plain", "--id-field", "b"], "not a JSON object with a field \"b\""),
        (&["push", "q", "[1]", "--id-field", "b"], "\"b\""),
        (&["push", "q"], "TASK"),
        (&["create", "q", "--ttl", "1s", "--heartbeat", "1s"], "do not go together"),
        (&["create", "q", "--ttl", "0s"], "at least 1s"),
        (&["create", "q", "--ttl", "10ms"], "at least 1s"),
        (&["create", "q", "--ttl", "99999999999h"], "a ttl is at most 365d"),
        (&["create", "q", "--heartbeat", "9999999999h"], "do not go together"),
        (&["create", "q", "--shards", "0"], "1 to 256 shards"),
        (&["create", "q", "--shards", "257"], "1 to 256 shards"),
        (&["create", "q", "--max-attempts", "0"], "at least 1"),
        (&["create", "q", "--max-crashes", "0"], "at least 1"),
        (&["create", "q", "--backoff", "2h"], "longer than its cap"),
        (&["create", "q", "--receipts", "maybe"], "maybe"),
        (&["create", "q", "--retention", "1s"], "retention"),
        (&["work", "q"], "CMD"),
        (&["work", "q", "-j", "0", "--", "true"], "0"),
        (&["work", "q", "--poll", "never", "--", "true"], "never"),
        (&["work", "q", "--fail-code", "256", "--", "true"], "256"),
        (&["work", "q", "--fail-code", "0", "--", "true"], "0"),
        (&["purge", "q"], "--pending"),
        (&["retry", "q"], "TASKS"),
        (&["retry", "q", "x", "--all"], "--all"),
    ] {
        place.fails(words, 2, part);
        assert!(objects(&place).is_empty(), "{words:?}: {:?}", objects(&place));
    }
    place.ok(&["create", "q"]);
    place.fails(&["set", "q", "--shards", "2"], 2, "shards is fixed");
    place.fails(&["set", "q", "--ttl", "10ms"], 2, "at least 1s");
    assert_eq!(place.json(&["show", "q"])[0]["ttl"], "30s");
}

/// What was pushed before a bad line stays, and is counted; nothing after it is.
#[test]
fn a_bad_line_in_a_stream() {
    for bundle in ["1", "7"] {
        let place = directory();
        let mut input = String::new();
        for n in 0..500 {
            input.push_str(&format!("{{\"k\":\"n{n}\"}}\n"));
        }
        let (words, bad): (&[&str], &[u8]) = match bundle {
            "1" => (&["push", "q", "-", "--id-field", "k"], b"not json\n{\"k\":\"after\"}\n"),
            _ => (&["push", "q", "-", "--bundle", "7"], b"\xff\xfe\nafter\n"),
        };
        let (code, out, err) = place.feed(words, &[input.as_bytes(), bad].concat());
        assert_eq!((code, out.as_str()), (2, "500 pushed\n"), "{err}");
        assert!(err.contains("line 501: "), "{err}");
        assert_eq!(place.counts(), [500, 0, 0, 0]);
        assert!(!place.ok(&["peek", "q", "-n", "1000"]).contains("after"));
        if bundle == "1" {
            // The whole again, mended.
            let (code, out, _) = place.feed(
                &["push", "q", "-", "--id-field", "k"],
                &[input.as_bytes(), b"{\"k\":\"after\"}\n"].concat(),
            );
            assert_eq!((code, out.as_str()), (0, "1 pushed, 500 were there already\n"));
            let (code, out, _) = place
                .feed(&["push", "q", "-", "--id-field", "k", "--json"], b"{\"k\":\"n1\"}\nx\n");
            assert_eq!((code, out.as_str()), (2, "{\"known\":1,\"pushed\":0}\n"));
        }
    }
}

#[test]
fn a_store_that_is_away_is_told_apart() {
    let place = Place {
        folder: tempfile::tempdir().unwrap(),
        variables: vec![
            ("LEASEHOLD_STORE", "s3://b/p".to_owned()),
            ("AWS_ENDPOINT_URL", "http://127.0.0.1:9".to_owned()),
            ("AWS_ACCESS_KEY_ID", "k".to_owned()),
            ("AWS_SECRET_ACCESS_KEY", "s".to_owned()),
        ],
    };
    std::fs::write(place.path().join("leasehold.toml"), "[connection]\nattempts = 1\n").unwrap();
    for words in [&["push", "q", "x"][..], &["status", "q"], &["ls"]] {
        place.fails(words, 5, "error:");
    }
}

#[test]
fn dashes_and_empty_commands_are_refused() {
    let place = directory();
    place.ok(&["create", "q"]);
    place.fails(&["push", "q", "-", "extra"], 2, "stands alone");
    place.fails(&["push", "q,r", "x"], 2, "commas separate queues");
    place.fails(&["create", "q,r"], 2, "commas separate queues");
    place.ok(&["push", "q", "x"]);
    place.fails(&["work", "q", "--exit-when-empty", "--", ""], 2, "the command is empty");
    assert_eq!(place.counts(), [1, 0, 0, 0]);
    assert_eq!(place.json(&["pause", "q"])[0]["paused"], true);
    assert_eq!(place.json(&["resume", "q"])[0]["paused"], false);
}
