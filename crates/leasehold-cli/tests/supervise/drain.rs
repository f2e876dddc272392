//! A supervisor that is told to end.

use super::*;

fn plan(command: &str) -> String {
    format!(
        r#"
[[node]]
name = "n"
every = "1s"
[[node.worker]]
queue = "q"
count = 3
jobs = 2
drain = "10m"
command = "{command}"
"#
    )
}

/// Drain under load: what runs is finished, nothing else is begun, nothing is lost or done twice.
fn under_load(place: &Place) {
    place.plan(&plan("echo {} >> began; sleep 0.3; echo {} >> ran"));
    place.push("q", 0..60);
    let supervisor = place.supervise(&["--drain", "40s"]);
    wait_until("it is in the middle of it", || place.lines("ran").len() > 10);
    let start = Instant::now();
    supervisor.end();
    assert!(start.elapsed() < Duration::from_secs(50), "{:?}", start.elapsed());
    let done = place.lines("ran").len() as u64;
    assert_eq!(place.lines("began").len() as u64, done, "nothing was cut off");
    assert!(done < 60, "it was not drained but finished");
    // Some may have been claimed a moment before, and given back.
    let [free, leased, completed, failed] = place.counts("q");
    assert_eq!([free + leased, completed, failed], [60 - done, done, 0]);
    assert_eq!(place.node().unwrap()["standing"], "stopped");
    let supervisor = place.supervise(&[]);
    wait_until("all is done", || place.counts("q") == [0, 0, 60, 0]);
    supervisor.end();
    let mut ran = place.lines("ran");
    ran.sort();
    ran.dedup();
    assert_eq!((ran.len(), place.lines("ran").len()), (60, 60), "each once");
}

#[test]
fn drained_under_load_in_a_directory() {
    under_load(&directory());
}

#[test]
fn drained_under_load_on_a_bucket() {
    under_load(&bucket("drain"));
}

/// Tasks that would take longer than there is time are stopped and go back, uncounted.
#[test]
fn what_takes_too_long_goes_back() {
    let place = directory();
    place.plan(&plan("echo $LEASEHOLD_ATTEMPT >> began; [ -e go ] || sleep 100"));
    place.push("q", 0..4);
    let supervisor = place.supervise(&["--drain", "3s"]);
    wait_until("all run", || place.lines("began").len() == 4);
    let start = Instant::now();
    supervisor.end();
    assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    std::fs::write(place.path().join("go"), "x").unwrap();
    let supervisor = place.supervise(&[]);
    wait_until("all is done", || place.counts("q") == [0, 0, 4, 0]);
    supervisor.end();
    assert_eq!(place.lines("began"), ["1"; 8], "it does not count");
}

/// A worker that does not end is killed in time, and what it ran with it.
#[test]
fn who_does_not_listen_is_killed() {
    let place = directory();
    place.plan(&plan("trap '' TERM; echo $$ >> began; while :; do sleep 0.1; done"));
    place.push("q", 0..1);
    let supervisor = place.supervise(&["--drain", "2s"]);
    wait_until("it runs", || place.lines("began").len() == 1);
    let workers = place.pids("q", 3);
    let start = Instant::now();
    // Stopped, it hears nothing at all.
    signal(workers[0], "STOP");
    supervisor.end();
    assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    let command: u64 = place.lines("began")[0].parse().unwrap();
    wait_until("nobody is left", || {
        !is_there(command) && !workers.iter().any(|pid| is_there(*pid))
    });
}

/// Once more, and it does not wait.
#[test]
fn told_twice_it_is_quick() {
    let place = directory();
    place.plan(&plan("echo x >> began; sleep 100"));
    place.push("q", 0..1);
    let supervisor = place.supervise(&["--drain", "5m"]);
    wait_until("it runs", || place.lines("began").len() == 1);
    signal(supervisor.pid(), "INT");
    std::thread::sleep(Duration::from_millis(300));
    assert!(is_there(supervisor.pid()));
    let start = Instant::now();
    supervisor.end();
    assert!(start.elapsed() < Duration::from_secs(40), "{:?}", start.elapsed());
    assert_eq!(place.counts("q")[2..], [0, 0]);
}
