//! Workers that are asked to end.

use serde_json::json;

use super::*;

/// Says that it runs, and ends when it may.
const PATIENT: &str =
    "echo $LEASEHOLD_ATTEMPT > run.{}; while [ ! -e go ]; do sleep 0.01; done; echo ok {}";

fn go(place: &Place) {
    std::fs::write(place.path().join("go"), "x").unwrap();
}

#[test]
fn what_runs_is_finished_and_nothing_else_is_started() {
    let place = directory();
    place.ok(&["push", "q", "0", "--id", "0"]);
    let worker = place.worker(&["q"], PATIENT);
    place.wait_for("run.0");
    place.ok(&["push", "q", "1", "--id", "1"]);
    signal(&worker.0, "TERM");
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(place.show("0")["state"], "held", "it goes on");
    go(&place);
    assert_eq!(ending(worker), Some(0));
    assert_eq!(place.show("0")["receipt"]["result"], "ok 0");
    assert_eq!(place.show("1")["state"], "free");
    assert!(!place.path().join("run.1").exists());
}

/// What is typed on a terminal goes to everybody in the foreground: the tasks need not suffer.
#[test]
fn control_c_lets_tasks_finish() {
    use std::os::unix::process::CommandExt as _;
    let place = directory();
    place.ok(&["push", "q", "0", "--id", "0"]);
    let mut worker = place.queue(&["work", "q", "--", "sh", "-c", PATIENT]);
    let worker = Running(worker.stderr(Stdio::null()).process_group(0).spawn().unwrap());
    place.wait_for("run.0");
    let group = format!("-{}", worker.0.id());
    assert!(Command::new("kill").args(["-INT", "--", &group]).status().unwrap().success());
    std::thread::sleep(Duration::from_millis(300));
    go(&place);
    assert_eq!(ending(worker), Some(0));
    assert_eq!(place.show("0")["receipt"]["result"], "ok 0");
}

#[test]
fn the_rest_of_a_bundle_goes_back_uncounted() {
    let place = directory();
    place.ok(&["push", "q", "0", "1", "2", "3", "4", "5", "--bundle", "6"]);
    let worker = place.worker(&["q", "-j", "2"], PATIENT);
    let two =
        |place: &Place| (0..6).filter(|n| place.path().join(format!("run.{n}")).exists()).count();
    wait_until("two of them run", || two(&place) == 2);
    signal(&worker.0, "TERM");
    std::thread::sleep(Duration::from_millis(200));
    go(&place);
    assert_eq!(ending(worker), Some(0));
    assert_eq!(two(&place), 2, "no more were started");
    let status = place.json(&["status", "q"]).remove(0);
    assert_eq!(
        (&status["leased"], &status["held"][0]["retries"]),
        (&json!(6), &json!(0)),
        "{status}"
    );
    let start = Instant::now();
    place.ok(&["work", "q", "--exit-when-empty", "--", "sh", "-c", PATIENT]);
    assert!(start.elapsed() < Duration::from_secs(10), "at once, not after the ttl");
    assert_eq!(two(&place), 6);
    for n in 0..6 {
        assert_eq!(place.lines(&format!("run.{n}")), ["1"], "a drain does not count");
    }
    assert_eq!(place.counts(), [0, 0, 6, 0]);
}

#[test]
fn once_more_or_too_late_and_it_goes_back_uncounted() {
    for (bundle, words, signals) in
        [("1", &[][..], 2), ("1", &["--drain", "300ms"], 1), ("2", &["--drain", "300ms"], 1)]
    {
        let place = directory();
        place.ok(&["push", "q", "0", "1", "--bundle", bundle]);
        let worker = place.worker(&[&["q"], words].concat(), PATIENT);
        wait_until("one runs", || {
            ["run.0", "run.1"].iter().any(|name| !place.lines(name).is_empty())
        });
        for _ in 0..signals {
            signal(&worker.0, "TERM");
            std::thread::sleep(Duration::from_millis(100));
        }
        assert_eq!(ending(worker), Some(0));
        assert_eq!(place.counts()[2..], [0, 0]);
        go(&place);
        let start = Instant::now();
        place.ok(&["work", "q", "--exit-when-empty", "--", "sh", "-c", PATIENT]);
        assert!(start.elapsed() < Duration::from_secs(10), "at once, not after the ttl");
        for name in ["run.0", "run.1"] {
            assert_eq!(place.lines(name), ["1"], "it does not count");
        }
        assert_eq!(place.counts(), [0, 0, 2, 0]);
    }
}

/// A drain that comes while the last task of a bundle is being recorded waits for nothing for ever.
#[test]
fn a_drain_at_any_moment_ends() {
    let place = directory();
    let rounds = if full() { 60 } else { 12 };
    for round in 0..rounds {
        place.ok(&["push", "q", "a", "b", "c", "d", "e", "f", "--bundle", "2"]);
        let worker = place.worker(&["q", "-j", "3"], "echo {} >> ran");
        let before = place.lines("ran").len();
        wait_until("it runs", || place.lines("ran").len() > before);
        std::thread::sleep(Duration::from_millis(round * 5 % 60));
        signal(&worker.0, "TERM");
        assert_eq!(ending(worker), Some(0));
    }
    place.ok(&["work", "q", "--exit-when-empty", "-j", "4", "--", "true"]);
    assert_eq!(place.counts(), [0, 0, rounds * 6, 0]);
}

/// A service manager tells every process of a service to end, the commands too.
#[test]
fn a_command_that_is_told_to_end_with_its_worker_does_not_count() {
    let place = directory();
    place.ok(&["push", "q", "0", "--id", "0"]);
    let worker = place.worker(&["q"], "echo $$ > pid.{}; sleep 60");
    let command = place.wait_for("pid.0");
    signal(&worker.0, "TERM");
    // The worker has to know first, as it would.
    std::thread::sleep(Duration::from_millis(300));
    let told = Command::new("kill").args(["-TERM", command.trim()]).status();
    assert!(told.unwrap().success());
    assert_eq!(ending(worker), Some(0));
    let shown = place.show("0");
    assert_eq!((&shown["state"], &shown["lease"]["retries"]), (&json!("retrying"), &json!(0)));
}

/// What runs is finished, also where something else that was claimed cannot be given back.
#[test]
fn a_bundle_that_cannot_be_given_back_stops_no_command() {
    let place = directory();
    place.ok(&["create", "urgent"]);
    place.ok(&["push", "q", "0", "1", "2", "--bundle", "3"]);
    let script = "read x; touch run.$x; while [ ! -e go.$x ]; do sleep 0.05; done; echo ok $x";
    let worker = place.worker(&["urgent,q"], script);
    wait_until("it runs", || place.path().join("run.0").exists());
    place.ok(&["push", "urgent", "u", "--id", "u"]);
    // Until the first queue is looked at again.
    std::thread::sleep(Duration::from_millis(1500));
    std::fs::write(place.path().join("go.0"), "").unwrap();
    wait_until("the urgent one runs", || place.path().join("run.u").exists());
    let bundles = place.path().join(".leasehold/queues/q/bundles");
    let bundle = std::fs::read_dir(&bundles).unwrap().next().unwrap().unwrap().path();
    std::fs::remove_file(bundle.join("lease.json")).unwrap();
    std::fs::create_dir(bundle.join("lease.json")).unwrap();
    signal(&worker.0, "TERM");
    std::thread::sleep(Duration::from_millis(700));
    std::fs::write(place.path().join("go.u"), "").unwrap();
    assert_eq!(ending(worker), Some(0));
    let shown = place.json(&["show", "urgent", "u"]).remove(0);
    assert_eq!(shown["receipt"]["result"], "ok u");
}
