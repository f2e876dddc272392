//! Workers that are killed or stopped: nothing is lost, nothing is completed twice, and no task runs
//! twice at a time on one machine.

use serde_json::json;

use super::*;

/// A command that says when it started, and goes on saying that it is alive.
fn beating() -> String {
    let say = |what: &str| {
        format!(
            "date +%s%N > $LEASEHOLD_ATTEMPT.tmp; mv $LEASEHOLD_ATTEMPT.tmp $LEASEHOLD_ATTEMPT.{what}"
        )
    };
    format!("{}; while [ ! -e go ]; do {}; sleep 0.005; done; rm go", say("start"), say("beat"))
}

fn nanos(place: &Place, name: &str) -> u128 {
    place.wait_for(name).trim().parse().unwrap_or(0)
}

/// FIELD.md row 26: the successor is quick, and never there while the other's command lives.
fn replaced(place: &Place, attempt: u32) {
    let start = Instant::now();
    let started = nanos(place, &format!("{}.start", attempt + 1));
    assert!(start.elapsed() < Duration::from_secs(10), "its ttl is 30 s: {:?}", start.elapsed());
    std::thread::sleep(Duration::from_millis(30));
    let last = nanos(place, &format!("{attempt}.beat"));
    assert!(last <= started, "attempt {attempt}: alive {} ns after its successor", last - started);
}

#[cfg(target_os = "linux")]
#[test]
fn a_killed_worker_is_replaced_at_once_and_its_command_is_gone() {
    let place = directory();
    place.ok(&["create", "q", "--ttl", "30s", "--max-crashes", "20"]);
    place.ok(&["push", "q", "x", "--id", "x"]);
    chain(&place);
    let receipt = place.show("x")["receipt"].clone();
    assert_eq!(receipt["retries"], 4, "each was counted as a crash: {receipt}");
}

#[cfg(target_os = "linux")]
#[test]
fn the_same_with_a_bundle() {
    let place = directory();
    place.ok(&["create", "q", "--ttl", "30s", "--max-crashes", "20"]);
    place.ok(&["push", "q", "x", "x", "--bundle", "2"]);
    chain(&place);
}

/// On a bucket, too, where workers are on one machine.
#[cfg(target_os = "linux")]
#[test]
fn the_same_on_a_bucket() {
    let place = bucket("killed");
    place.ok(&["create", "q", "--ttl", "30s", "--max-crashes", "20"]);
    place.ok(&["push", "q", "x", "--id", "x"]);
    chain(&place);
}

/// Four workers, each killed while its command runs; the fifth finishes.
#[cfg(target_os = "linux")]
fn chain(place: &Place) {
    let worker = || place.worker(&["q", "--poll", "300ms"], &beating());
    let mut current = worker();
    for attempt in 1..5 {
        nanos(place, &format!("{attempt}.beat"));
        let next = match place.variables.is_empty() {
            // One that knows all there is to know, and waits.
            true => {
                let next = worker();
                std::thread::sleep(Duration::from_millis(300));
                kill(current);
                next
            }
            // On a bucket that would cost it requests: whoever comes anew is as quick.
            false => {
                kill(current);
                worker()
            }
        };
        replaced(place, attempt);
        current = next;
    }
    wait_until("it is done", || {
        let _ = std::fs::write(place.path().join("go"), "x");
        place.counts()[..2] == [0, 0]
    });
    kill(current);
}

/// Whoever cannot look at the process waits for the ttl, on a bucket.
#[cfg(target_os = "linux")]
#[test]
fn elsewhere_a_killed_worker_is_replaced_after_its_ttl() {
    let place = bucket("elsewhere");
    place.ok(&["create", "q", "--ttl", "3s"]);
    place.ok(&["push", "q", "x", "--id", "x"]);
    let first = place.worker(&["q"], &beating());
    nanos(&place, "1.beat");
    let killed = Instant::now();
    kill(first);
    let mut heir = Command::new("unshare");
    heir.args(["--user", "--map-root-user", "--fork", "--pid", "--mount-proc", BIN]);
    heir.args(["queue", "work", "q", "--exit-when-empty", "--poll", "200ms", "--"]);
    heir.args(["sh", "-c", "echo attempt $LEASEHOLD_ATTEMPT"]).current_dir(place.path());
    heir.envs(place.variables.iter().map(|(name, value)| (name, value)));
    let (code, _, err) = run(&mut heir);
    assert_eq!(code, 0, "{err}");
    // Renewed at most a second before it was killed.
    assert!(killed.elapsed() >= Duration::from_millis(1900), "{:?}", killed.elapsed());
    assert_eq!(place.show("x")["receipt"]["result"], "attempt 2");
    assert_eq!(place.show("x")["receipt"]["retries"], 1);
}

/// A task that kills its workers ends as a dead letter; the others of its bundle do not suffer.
#[cfg(target_os = "linux")]
#[test]
fn crash_loops_end() {
    for bundle in ["1", "5"] {
        let place = directory();
        place.ok(&["create", "q", "--max-crashes", "3"]);
        place.ok(&["push", "q", "a", "b", "poison", "c", "d", "--bundle", bundle]);
        // The worker is the parent of what looks after the command.
        let script = "[ {} != poison ] || { kill -9 $(ps -o ppid= -p $PPID); sleep 60; }; \
                      echo {} >> done";
        let mut rounds = 0;
        loop {
            rounds += 1;
            assert!(rounds < 20, "it goes on for ever");
            let (code, _, _) =
                place.run(&["work", "q", "--exit-when-empty", "--", "sh", "-c", script]);
            if code == 0 {
                break;
            }
        }
        let letters = place.json(&["failed", "q"]);
        assert_eq!(letters.len(), 1, "{letters:?}");
        assert_eq!((&letters[0]["payload"], &letters[0]["crashes"]), (&json!("poison"), &json!(3)));
        assert_eq!(letters[0]["failures"], 0);
        assert_eq!(letters[0]["errors"][0]["error"], "the worker's process ended");
        let mut done = place.lines("done");
        done.sort();
        done.dedup();
        assert_eq!(done, ["a", "b", "c", "d"]);
        assert_eq!(place.counts()[..2], [0, 0]);
    }
}

/// Stopped past its ttl, replaced, and woken again: its command was stopped in time, and what it
/// does then counts for nothing.
#[cfg(target_os = "linux")]
#[test]
fn a_worker_that_was_stopped_too_long_does_no_harm() {
    for bundle in ["1", "2"] {
        let place = directory();
        place.ok(&["create", "q", "--ttl", "1s"]);
        place.ok(&["push", "q", "x", "x", "--bundle", bundle]);
        let script = "n=$LEASEHOLD_TOKEN; echo $LEASEHOLD_ATTEMPT > attempt; \
            while [ ! -e go ]; do date +%s%N > $n.tmp; mv $n.tmp beat.$n; sleep 0.005; done; echo $n";
        let mut first = place.queue(&["work", "q", "--json", "--", "sh", "-c", script]);
        let first = first.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        place.wait_for("attempt");
        signal(&first, "STOP");
        std::fs::remove_file(place.path().join("attempt")).unwrap();
        let heir = place.worker(&["q", "-j", "2", "--exit-when-empty"], script);
        wait_until("it is taken over", || place.lines("attempt") == ["2"]);
        let start = Instant::now();
        let beats = |place: &Place| {
            let names = place.path().read_dir().unwrap().map(|entry| entry.unwrap().path());
            let beats = names.filter(|path| path.to_string_lossy().contains("beat."));
            let mut beats: Vec<String> =
                beats.map(|path| std::fs::read_to_string(path).unwrap()).collect();
            beats.sort();
            beats
        };
        // The first one's last beat does not move any more.
        let oldest = beats(&place).remove(0);
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(beats(&place).remove(0), oldest, "{:?} later", start.elapsed());
        signal(&first, "CONT");
        // What was lost is noticed; the rest it may help with.
        std::thread::sleep(Duration::from_millis(300));
        std::fs::write(place.path().join("go"), "x").unwrap();
        assert_eq!(ending(heir), Some(0));
        wait_until("all is done", || place.counts()[..2] == [0, 0]);
        signal(&first, "TERM");
        let (code, out, _) = texts(first.wait_with_output().unwrap());
        assert_eq!(code, 0);
        let tally: Value = serde_json::from_str(&out).unwrap();
        assert_eq!((&tally["lost"], &tally["done_before"]), (&json!(1), &json!(0)), "{tally}");
        assert_eq!(place.counts(), [0, 0, 2, 0]);
    }
}

/// What looks after a command is slower to start than its claim can be trusted for, so that the
/// command never runs: that is not a command that went well.
#[cfg(target_os = "linux")]
#[test]
fn what_never_ran_is_not_done() {
    let place = directory();
    place.ok(&["create", "q", "--max-crashes", "1000000", "--durable", "false"]);
    // Shorter than a command line lets anybody ask for.
    let file = place.path().join(".leasehold/queues/q/queue.json");
    let mut settings: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    (settings["ttl"], settings["heartbeat"]) = (json!("4ms"), json!("1ms"));
    std::fs::write(&file, settings.to_string()).unwrap();
    let input: String = (0..20).map(|n| format!("{n}\n")).collect();
    for bundle in ["1", "5"] {
        assert_eq!(place.feed(&["push", "q", "-", "--bundle", bundle], input.as_bytes()).0, 0);
    }
    let worker = place.worker(&["q", "-j", "4"], "echo {id} >> ran");
    std::thread::sleep(Duration::from_millis(1500));
    kill(worker);
    place.ok(&["set", "q", "--ttl", "30s"]);
    place.ok(&["work", "q", "-j", "4", "--exit-when-empty", "--", "sh", "-c", "echo {id} >> ran"]);
    let [free, leased, _, failed] = place.counts();
    assert_eq!([free, leased, failed], [0, 0, 0]);
    let ran: std::collections::BTreeSet<String> = place.lines("ran").into_iter().collect();
    assert_eq!(ran.len(), 40, "some were completed without having run");
}

/// FIELD.md row 26 at its worst: the worker is killed, and what looks after its command is stopped,
/// so that the command lives on. Nobody takes the task over until it is gone.
#[cfg(target_os = "linux")]
fn nobody_comes_while_the_command_lives(place: &Place, bundle: &str) {
    // Orphans become ours. The kernel wakes a group that is stopped when it loses its family.
    rustix::process::set_child_subreaper(Some(rustix::process::getpid())).unwrap();
    place.ok(&["create", "q", "--ttl", "60s"]);
    assert_eq!(place.feed(&["push", "q", "-", "--bundle", bundle], b"x\n").0, 0);
    let script = "echo $PPID > sitter.$LEASEHOLD_ATTEMPT; \
                  [ $LEASEHOLD_ATTEMPT = 2 ] || while :; do echo x > beat; sleep 0.01; done";
    let first = place.worker(&["q"], script);
    let sitter = place.wait_for("sitter.1").trim().to_owned();
    place.wait_for("beat");
    let send = |name: &str| {
        assert!(Command::new("kill").args([name, &sitter]).status().unwrap().success());
    };
    send("-STOP");
    kill(first);
    let mut early = place.worker(&["q"], script);
    std::thread::sleep(Duration::from_millis(2500));
    std::fs::remove_file(place.path().join("beat")).unwrap();
    place.wait_for("beat");
    assert!(!place.path().join("sitter.2").exists(), "it runs twice at a time");
    send("-CONT");
    // In a directory who waits sees it at once; on a bucket who comes anew.
    if !place.variables.is_empty() {
        kill(std::mem::replace(&mut early, place.worker(&["q"], script)));
    }
    let start = Instant::now();
    place.wait_for("sitter.2");
    assert!(start.elapsed() < Duration::from_secs(20), "its ttl is 60 s: {:?}", start.elapsed());
    wait_until("it is done", || place.counts() == [0, 0, 1, 0]);
    kill(early);
}

#[cfg(target_os = "linux")]
#[test]
fn nobody_comes_while_the_command_lives_in_a_directory() {
    nobody_comes_while_the_command_lives(&directory(), "1");
}

#[cfg(target_os = "linux")]
#[test]
fn nobody_comes_while_the_command_lives_in_a_bundle() {
    nobody_comes_while_the_command_lives(&directory(), "100");
}

#[cfg(target_os = "linux")]
#[test]
fn nobody_comes_while_the_command_lives_on_a_bucket() {
    nobody_comes_while_the_command_lives(&bucket("lives"), "1");
}

/// Workers die all the time, and then there is calm: every task has exactly one receipt.
fn random_kills(place: &Place, kills: u64) {
    let (singles, bundled) = (240, 60);
    place.ok(&["create", "q", "--ttl", "10s", "--max-crashes", "100000"]);
    let lines =
        |range: std::ops::Range<u64>| -> String { range.map(|n| format!("{n}\n")).collect() };
    let push = |bundle: &str, input: String| {
        assert_eq!(place.feed(&["push", "q", "-", "--bundle", bundle], input.as_bytes()).0, 0);
    };
    push("1", lines(0..singles));
    push("10", lines(singles..singles + bundled));
    // A lock ends with whoever has it: who does not get it runs beside another.
    let script = "exec 9> lock.{}; flock -n 9 || echo {} >> doubled; echo {} >> ran; sleep 0.05";
    let worker = || place.worker(&["q", "--poll", "500ms", "--exit-when-empty"], script);
    let mut workers: Vec<Running> = (0..8).map(|_| worker()).collect();
    let mut seed = 0x9e37_79b9_u64;
    for _ in 0..kills {
        std::thread::sleep(Duration::from_millis(200));
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let victim = (seed >> 33) as usize % workers.len();
        kill(std::mem::replace(&mut workers[victim], worker()));
    }
    for worker in workers {
        assert_eq!(ending(worker), Some(0));
    }
    assert_eq!(place.counts(), [0, 0, singles + bundled, 0]);
    assert!(place.lines("doubled").is_empty(), "at the same time: {:?}", place.lines("doubled"));
    let mut ran: Vec<u64> = place.lines("ran").iter().map(|line| line.parse().unwrap()).collect();
    let times = ran.len() as u64;
    ran.sort_unstable();
    ran.dedup();
    assert_eq!(ran.len() as u64, singles + bundled, "each of them ran");
    eprintln!("{kills} kills: {times} runs of {} tasks", singles + bundled);
    // Nothing is left behind that a sweep would have to find.
    let swept = place.json(&["sweep", "q"]).remove(0);
    assert_eq!((&swept["tasks"], &swept["promoted"]), (&json!(0), &json!(0)), "{swept}");
}

#[cfg(target_os = "linux")]
#[test]
fn random_kills_lose_nothing_in_a_directory() {
    random_kills(&directory(), if full() { 150 } else { 20 });
}

#[cfg(target_os = "linux")]
#[test]
fn random_kills_lose_nothing_on_a_bucket() {
    random_kills(&bucket("random"), if full() { 150 } else { 20 });
}
