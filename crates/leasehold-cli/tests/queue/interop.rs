//! A client written from the seed document alone, with boto3, beside ours on one queue.

use std::collections::BTreeSet;

use super::*;

/// The other client.
fn seed(place: &Place, words: &[&str]) -> Command {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let servers = match std::env::var_os("LEASEHOLD_SERVERS") {
        Some(folder) => folder.into(),
        None => here.join("../../.servers"),
    };
    let python = servers.join("boto3/bin/python3");
    assert!(python.exists(), "{}: run scripts/test.sh, which installs it", python.display());
    let (verb, rest) = words.split_first().unwrap();
    let prefix = place.variables[0].1.rsplit_once('/').unwrap().1;
    let mut command = Command::new(python);
    command.arg(here.join("tests/queue/seed_worker.py"));
    command.args([verb, seaweedfs().bucket(), prefix, "q"]).args(rest);
    command.envs(place.variables.iter().map(|(name, value)| (name, value)));
    command.env("AWS_EC2_METADATA_DISABLED", "true").env("AWS_CONFIG_FILE", "/dev/null");
    command.current_dir(place.path()).stdin(Stdio::null()).stdout(Stdio::piped());
    command
}

/// Ids of tasks, from the lines that the other client prints.
fn done_by(child: Child) -> Vec<String> {
    let (code, out, _) = texts(child.wait_with_output().unwrap());
    assert_eq!(code, 0, "it fell");
    out.lines().map(str::to_owned).collect()
}

/// What is left of the queue below pending/, by the other client's own eyes: nothing.
#[track_caller]
fn nothing_is_left(place: &Place) {
    let mut ls = Command::new(BIN);
    ls.args(["ls", "queues/q/pending"]).current_dir(place.path());
    ls.envs(place.variables.iter().map(|(name, value)| (name, value)));
    let (code, out, err) = run(&mut ls);
    assert_eq!((code, out.as_str()), (0, ""), "{err}");
}

/// Three of theirs and three of ours: every task is done, none is lost, no lease is left.
#[test]
fn three_of_theirs_and_three_of_ours() {
    let place = bucket("mixed");
    place.ok(&["create", "q", "--ttl", "20s", "--heartbeat", "1s"]);
    let ours: BTreeSet<String> = (0..120).map(|n| format!("ours-{n}")).collect();
    let lines: String = ours.iter().map(|id| format!("{{\"id\":\"{id}\"}}\n")).collect();
    assert_eq!(place.feed(&["push", "q", "-", "--id-field", "id"], lines.as_bytes()).0, 0);
    assert!(seed(&place, &["push", "0", "80"]).status().unwrap().success());
    assert_eq!(place.counts(), [200, 0, 0, 0]);
    let theirs: Vec<Child> = ["a", "b", "c"]
        .iter()
        .map(|name| seed(&place, &["work", name, "60"]).spawn().unwrap())
        .collect();
    let script = "cat > $LEASEHOLD_TASK_ID.in; sleep 0.05; echo $LEASEHOLD_TASK_ID >> ran";
    let mine: Vec<Running> = (0..3)
        .map(|_| place.worker(&["q", "--exit-when-empty", "--poll", "500ms"], script))
        .collect();
    for worker in mine {
        assert_eq!(ending(worker), Some(0));
    }
    let logged: Vec<String> = theirs.into_iter().flat_map(done_by).collect();
    let [_, _, receipts, failed] = place.counts();
    nothing_is_left(&place);
    let mut all: BTreeSet<String> = logged.iter().cloned().collect();
    assert_eq!(all.len(), logged.len(), "none of theirs was done twice");
    let ran = place.lines("ran");
    assert_eq!((ran.len() as u64, failed), (receipts, 0), "one receipt for each of ours");
    eprintln!("{} done by ours, {} by theirs", ran.len(), logged.len());
    assert!(!ran.is_empty() && !logged.is_empty(), "both took part");
    for id in ran {
        assert!(all.insert(id.clone()), "{id} was done by both");
    }
    let expected: BTreeSet<String> =
        ours.into_iter().chain((0..80).map(|n| format!("seed-{n}"))).collect();
    assert_eq!(all, expected);
}

/// What they push in JSON of their own is a task for ours, which is that JSON.
#[test]
fn what_they_push_ours_do() {
    let place = bucket("pushed");
    assert!(seed(&place, &["push", "0", "25"]).status().unwrap().success());
    let peeked = place.json(&["--quiet", "push", "q", "own", "--id", "own"]);
    assert_eq!(peeked[0]["outcome"], "new");
    assert_eq!(place.counts(), [26, 0, 0, 0]);
    assert_eq!(place.show("seed-3")["task"]["payload"]["n"], 3);
    place.ok(&["work", "q", "-j", "4", "--exit-when-empty", "--", "cat"]);
    for n in 0..25 {
        let shown = place.show(&format!("seed-{n}"));
        assert_eq!(shown["receipt"]["result"]["n"], n, "{shown}");
    }
    assert_eq!(place.counts(), [0, 0, 26, 0]);
    nothing_is_left(&place);
}

/// One of theirs dies with a lease; ours takes it over after the queue's ttl. And the reverse: one of
/// ours dies, and theirs deletes its lease and claims.
#[test]
fn each_takes_over_from_the_other() {
    let place = bucket("dead");
    place.ok(&["create", "q", "--ttl", "2s"]);
    assert!(seed(&place, &["push", "0", "8"]).status().unwrap().success());
    let mut theirs = seed(&place, &["work", "mortal", "60"]).spawn().unwrap();
    wait_until("it has claimed one", || place.counts()[1] > 0);
    theirs.kill().unwrap();
    theirs.wait().unwrap();
    place.ok(&["work", "q", "--exit-when-empty", "--poll", "300ms", "--", "true"]);
    nothing_is_left(&place);
    place.ok(&["push", "q", "x", "--id", "x"]);
    let ours = place.worker(&["q"], "echo x > started; sleep 60");
    place.wait_for("started");
    kill(ours);
    let theirs = seed(&place, &["work", "heir", "3"]).spawn().unwrap();
    assert_eq!(done_by(theirs), ["x"]);
    nothing_is_left(&place);
}
