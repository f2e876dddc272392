//! `queue work`: a command per task.

use serde_json::json;

use super::*;

#[test]
fn a_command_gets_its_task_in_every_way() {
    let place = directory();
    place.ok(&["push", "q", "hello {id} world", "--id", "t1"]);
    place.ok(&["push", "r", "{\"deep\": [1, 2]}", "--id", "t2"]);
    let script = "cat > $LEASEHOLD_TASK_ID.in; printf '%s|' \"$@\" > $LEASEHOLD_TASK_ID.args; \
        echo $LEASEHOLD_QUEUE $LEASEHOLD_ATTEMPT $LEASEHOLD_TOKEN > $LEASEHOLD_TASK_ID.env; \
        echo '{\"n\": 1}'";
    place.ok(&[
        "work",
        "q, r",
        "--exit-when-empty",
        "--name",
        "me",
        "--",
        "sh",
        "-c",
        script,
        "sh",
        "{}",
        "x{id}y{id}",
        "{attempt}",
        "{token}",
        "{queue}",
        "{other}",
    ]);
    assert_eq!(place.wait_for("t1.in"), "hello {id} world\n");
    assert_eq!(place.wait_for("t2.in"), "{\"deep\": [1, 2]}\n", "as it was pushed");
    let receipt = place.show("t1")["receipt"].clone();
    let token = receipt["token"].as_u64().unwrap();
    assert_eq!(place.wait_for("t1.env"), format!("q 1 {token}\n"));
    let args = format!("hello {{id}} world|xt1yt1|1|{token}|q|{{other}}|");
    assert_eq!(place.wait_for("t1.args"), args, "what is put in is not looked at again");
    assert!(place.wait_for("t2.args").starts_with("{\"deep\": [1, 2]}|xt2yt2|1|"));
    assert_eq!((&receipt["worker"], &receipt["result"]), (&json!("me"), &json!({ "n": 1 })));
}

#[test]
fn payloads_and_results_may_be_large() {
    let place = directory();
    let line = "y".repeat(3 << 20);
    let (code, _, err) = place.feed(&["push", "q", "-", "--bundle", "1"], line.as_bytes());
    assert_eq!(code, 0, "{err}");
    // More than a pipe holds, in both directions at once.
    place.ok(&[
        "work",
        "q",
        "--exit-when-empty",
        "--",
        "sh",
        "-c",
        "tee copy | { head -c 300000; cat > /dev/null; }",
    ]);
    assert_eq!(std::fs::metadata(place.path().join("copy")).unwrap().len(), (3 << 20) + 1);
    let kept = place.path().join(".leasehold/queues/q/completed").read_dir().unwrap();
    let receipt = std::fs::read(kept.last().unwrap().unwrap().path()).unwrap();
    let receipt: Value = serde_json::from_slice(&receipt).unwrap();
    assert_eq!(receipt["result"].as_str().unwrap().len(), 300_000);
}

#[test]
fn one_code_gives_up_at_once() {
    let place = directory();
    place.ok(&["push", "q", "x", "--id", "x"]);
    place.ok(&["push", "q", "y", "--id", "y"]);
    let script =
        "echo never, $LEASEHOLD_TASK_ID >&2; [ $LEASEHOLD_TASK_ID = x ] && exit 65; exit 42";
    let (_, out, _) = place.run(&[
        "work",
        "q",
        "--exit-when-empty",
        "--fail-code",
        "42",
        "--json",
        "--",
        "sh",
        "-c",
        &format!("[ $LEASEHOLD_ATTEMPT = 1 ] || exit 0; {script}"),
    ]);
    let tally: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(
        (&tally["failed"], &tally["retried"], &tally["done"]),
        (&json!(1), &json!(1), &json!(1))
    );
    let letter = place.show("y")["dead_letter"].clone();
    assert_eq!((&letter["failures"], &letter["crashes"]), (&json!(1), &json!(0)));
    assert_eq!(letter["errors"][0]["error"], "exit code 42: never, y");
    assert_eq!(place.show("x")["receipt"]["retries"], 1, "65 is like any other then");
}

#[test]
fn what_fails_is_tried_again_later_and_later_and_then_given_up() {
    for bundle in ["1", "2"] {
        let place = directory();
        place.ok(&["create", "q", "--max-attempts", "4", "--backoff", "200ms"]);
        place.ok(&["push", "q", "poison", "fine", "--bundle", bundle]);
        let script = "[ {} = fine ] && exit 0; date +%s%N >> times; exit $LEASEHOLD_ATTEMPT";
        place.gives_up(&["work", "q", "--exit-when-empty", "--", "sh", "-c", script]);
        assert_eq!(place.counts()[..2], [0, 0]);
        let times: Vec<u128> =
            place.lines("times").iter().map(|time| time.parse().unwrap()).collect();
        assert_eq!(times.len(), 4);
        for (n, pair) in times.windows(2).enumerate() {
            let gap = pair[1] - pair[0];
            // Half of the pause is certain.
            assert!(gap >= (100_000_000 << n), "pause {n}: {gap} ns");
        }
        let letter = place.json(&["failed", "q"]).remove(0);
        assert_eq!((&letter["payload"], &letter["failures"]), (&json!("poison"), &json!(4)));
        let errors: Vec<&str> = letter["errors"]
            .as_array()
            .unwrap()
            .iter()
            .map(|failure| failure["error"].as_str().unwrap())
            .collect();
        assert_eq!(errors, ["exit code 1", "exit code 2", "exit code 3", "exit code 4"]);
    }
}

/// A command that goes on saying that it is alive, whatever it is sent.
fn beating(name: &str) -> String {
    format!("trap '' TERM; while :; do echo x > {name}; sleep 0.01; done")
}

/// It writes no more.
#[track_caller]
fn is_gone(place: &Place, name: &str) {
    std::fs::remove_file(place.path().join(name)).unwrap();
    std::thread::sleep(Duration::from_millis(80));
    assert!(!place.path().join(name).exists(), "{name} lives on");
}

/// Nothing of a command that took too long is left: not what ignores signals, not what left its
/// group, not what its parent did not wait for.
#[cfg(target_os = "linux")]
#[test]
fn a_timeout_ends_all_that_came_of_the_command() {
    let place = directory();
    place.ok(&["push", "q", "x", "--id", "x", "--timeout", "700ms", "--max-attempts", "1"]);
    let script = format!(
        "sh -c \"{}\" & setsid sh -c \"{}\" & sleep 60",
        beating("group"),
        beating("apart")
    );
    let start = Instant::now();
    place.gives_up(&["work", "q", "--exit-when-empty", "--", "sh", "-c", &script]);
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    is_gone(&place, "group");
    is_gone(&place, "apart");
    let letter = place.show("x")["dead_letter"].clone();
    assert_eq!(letter["errors"][0]["error"], "the command took longer than 700ms");
    // One that ignores the polite signal itself gets the other.
    place.ok(&["push", "q", "y", "--id", "y", "--timeout", "300ms", "--max-attempts", "1"]);
    let script = beating("stubborn");
    place.gives_up(&[
        "work",
        "q",
        "--exit-when-empty",
        "--grace",
        "200ms",
        "--",
        "sh",
        "-c",
        &script,
    ]);
    is_gone(&place, "stubborn");
    assert_eq!(place.counts(), [0, 0, 0, 2]);
}

/// What a command leaves behind ends with it, and holds nothing up.
#[cfg(target_os = "linux")]
#[test]
fn nothing_is_left_of_a_command_that_has_ended() {
    let place = directory();
    place.ok(&["push", "q", "x", "--id", "x"]);
    let script =
        format!("sh -c \"{}\" & while [ ! -e b ]; do sleep 0.01; done; echo ok", beating("b"));
    place.ok(&["work", "q", "--exit-when-empty", "--", "sh", "-c", &script]);
    assert_eq!(place.show("x")["receipt"]["result"], "ok");
    is_gone(&place, "b");
}

/// Its time, and its claim, count to its end, not to the end of its output.
#[test]
fn a_command_may_close_its_output_and_go_on() {
    let place = directory();
    place.ok(&["create", "q", "--ttl", "1s", "--max-attempts", "1"]);
    place.ok(&["push", "q", "x", "--id", "x"]);
    let script = "echo early; exec >&- 2>&-; sleep 2.5; exit 0";
    place.ok(&["work", "q", "--exit-when-empty", "--", "sh", "-c", script]);
    assert_eq!(place.show("x")["receipt"]["result"], "early", "longer than its ttl");
    place.ok(&["push", "q", "y", "--id", "y", "--timeout", "300ms"]);
    let start = Instant::now();
    place.gives_up(&[
        "work",
        "q",
        "--exit-when-empty",
        "--",
        "sh",
        "-c",
        "exec >&- 2>&-; sleep 30",
    ]);
    assert!(start.elapsed() < Duration::from_secs(15), "{:?}", start.elapsed());
    assert_eq!(place.show("y")["state"], "failed");
}

#[test]
fn so_many_at_a_time_and_no_more() {
    let place = directory();
    let input: String = (0..24).map(|n| format!("{n}\n")).collect();
    for bundle in ["1", "24"] {
        assert_eq!(place.feed(&["push", "q", "-", "--bundle", bundle], input.as_bytes()).0, 0);
        let script = "mkdir in.$$; ls -d in.* | wc -l >> counts; sleep 0.2; rmdir in.$$";
        place.ok(&["work", "q", "-j", "4", "--exit-when-empty", "--", "sh", "-c", script]);
        let most = place.lines("counts").iter().map(|n| n.trim().parse::<u32>().unwrap()).max();
        assert_eq!((place.lines("counts").len(), most), (24, Some(4)));
        std::fs::remove_file(place.path().join("counts")).unwrap();
    }
}

#[test]
fn the_first_queue_comes_first() {
    let place = directory();
    for n in 0..5 {
        place.ok(&["push", "normal", &format!("n{n}")]);
    }
    place.ok(&["push", "urgent", "u0", "u1", "u2"]);
    // What comes in between is next, too.
    let script = format!("echo {{}} >> order; [ {{}} != u2 ] || {BIN} queue push urgent u3");
    place.ok(&["work", "urgent,normal", "--exit-when-empty", "--", "sh", "-c", &script]);
    let order = place.lines("order");
    assert_eq!(order.len(), 9, "{order:?}");
    let last_urgent = order.iter().rposition(|task| task.starts_with('u'));
    assert!(last_urgent <= Some(4), "{order:?}");
    assert!(order[..3].iter().all(|task| task.starts_with('u')), "{order:?}");
}

/// "Empty" is when nothing is left to do for anybody, also not later.
#[test]
fn empty_is_when_others_are_done_too() {
    let place = directory();
    place.ok(&["push", "q", "x", "--id", "x"]);
    let first = place.worker(
        &["q", "--exit-when-empty"],
        "[ $LEASEHOLD_ATTEMPT = 1 ] || exit 0; echo x > started; sleep 1; exit 3",
    );
    place.wait_for("started");
    let start = Instant::now();
    place.ok(&["work", "q", "--exit-when-empty", "--", "sh", "-c", "echo $LEASEHOLD_ATTEMPT"]);
    // It waited for the other one's attempt, and one of them did the next.
    assert!(start.elapsed() > Duration::from_millis(500), "{:?}", start.elapsed());
    kill(first);
    place.ok(&["work", "q", "--exit-when-empty", "--", "true"]);
    assert_eq!(place.counts(), [0, 0, 1, 0]);
}

#[test]
fn commands_that_cannot_be_started_are_failures_of_the_task() {
    let place = directory();
    place.ok(&["create", "q", "--max-attempts", "2", "--backoff", "1ms"]);
    place.ok(&["push", "q", "x", "--id", "x"]);
    // Known before the first claim: no task suffers for a slip of the finger.
    std::fs::write(place.path().join("plain"), "not to be executed").unwrap();
    for program in ["no-such-program", "./nothere", "./plain"] {
        let words = ["work", "q", "--exit-when-empty", "--", program];
        place.fails(&words, 2, "there is no such program here");
    }
    assert_eq!(place.counts(), [1, 0, 0, 0]);
    // Not to be known before: the program's name comes from the task.
    let (code, _, err) = place.run(&["work", "q", "--exit-when-empty", "--", "./no-such-{}"]);
    assert_eq!(code, 1, "{err}");
    assert!(err.contains("1 to be tried again, 1 given up"), "{err}");
    let errors = place.show("x")["dead_letter"]["errors"].clone();
    let text = errors[1]["error"].as_str().unwrap();
    assert!(text.contains("exit code 127") && text.contains("no-such-x"), "{text}");
}

#[test]
fn who_waits_for_a_paused_queue_is_told() {
    let place = directory();
    place.ok(&["push", "q", "x"]);
    place.ok(&["pause", "q"]);
    let mut command = place.queue(&["work", "q,other", "--exit-when-empty", "--", "true"]);
    let said = std::fs::File::create(place.path().join("said")).unwrap();
    let worker = Running(command.stderr(said).spawn().unwrap());
    let told = "q is paused: waiting (`leasehold queue resume q`)";
    wait_until("it is told", || place.lines("said").iter().any(|line| line == told));
    std::thread::sleep(Duration::from_millis(500));
    let said = place.lines("said");
    assert_eq!(said.iter().filter(|line| *line == told).count(), 1, "once: {said:?}");
    assert!(said.contains(&"queue other is new".to_owned()), "{said:?}");
    assert!(!said.contains(&"queue q is new".to_owned()), "{said:?}");
    kill(worker);
}

/// More than the system lets a program have as an argument: counted, and not tried again and again.
#[test]
fn a_task_that_is_too_long_for_an_argument_is_given_up_and_counted() {
    let place = directory();
    assert_eq!(place.feed(&["push", "q", "-"], "x".repeat(200_000).as_bytes()).0, 0);
    let (code, _, err) = place.run(&["work", "q", "--exit-when-empty", "--", "echo", "{}"]);
    assert_eq!(code, 1, "{err}");
    assert!(err.contains("Argument list too long") && err.contains("1 given up"), "{err}");
    assert_eq!(place.counts(), [0, 0, 0, 1]);
    let letter = place.ok(&["failed", "q"]);
    assert!(letter.contains("take it from standard input"), "{}", &letter[letter.len() - 300..]);
}

/// An idle worker is woken by the file system, not by its poll.
#[test]
fn a_push_wakes_an_idle_worker() {
    let place = directory();
    place.ok(&["create", "q", "--durable", "false"]);
    let worker = place.worker(&["q"], "date +%s%N > woken.tmp; mv woken.tmp woken");
    place.ok(&["push", "q", "first"]);
    place.wait_for("woken");
    let mut latencies = Vec::new();
    for _ in 0..8 {
        std::fs::remove_file(place.path().join("woken")).unwrap();
        // Long enough for its pauses to have grown to a second.
        std::thread::sleep(Duration::from_millis(700));
        place.ok(&["push", "q", "x"]);
        // When the task came to be, by the file system's clock.
        let woken: u128 = place.wait_for("woken").trim().parse().unwrap();
        wait_until("the receipt is there", || place.counts()[2] as usize == latencies.len() + 2);
        let newest = place.path().join(".leasehold/queues/q/completed").read_dir().unwrap();
        let receipt = newest.map(|entry| std::fs::read(entry.unwrap().path()).unwrap());
        let pushed = receipt.map(|bytes| {
            let receipt: Value = serde_json::from_slice(&bytes).unwrap();
            receipt["pushed_at"].as_str().unwrap().to_owned()
        });
        let pushed: leasehold::StoreTime = pushed.max().unwrap().parse().unwrap();
        latencies.push(woken as i128 / 1000 - i128::from(pushed.as_micros()));
    }
    kill(worker);
    latencies.sort_unstable();
    eprintln!("from push to the start of the command, µs: {latencies:?}");
    // The aim is 50 ms; by its poll alone it would be half a second on average.
    assert!(latencies[latencies.len() / 2] < 250_000, "µs: {latencies:?}");
}

/// A result is somebody's data: a program gets it as it is.
#[test]
fn results_are_not_changed_on_their_way_into_a_pipe() {
    let place = directory();
    place.ok(&["create", "q"]);
    let worker = place.worker(&["q"], r"printf 'A\033[31mred\033[0mB\001C\037D'");
    let result = place.ok(&["push", "q", "x", "--wait", "--id", "x"]);
    assert_eq!(result, "A\u{1b}[31mred\u{1b}[0mB\u{1}C\u{1f}D\n");
    kill(worker);
    // Among words of ours it is spelt out.
    let shown = place.ok(&["show", "q", "x"]);
    assert!(shown.contains(r"A\u{1b}[31mred") && !shown.contains('\u{1b}'), "{shown}");
}

/// What is given up without being run counts as well.
#[test]
fn tasks_that_crashed_too_often_are_told() {
    let place = directory();
    place.ok(&["create", "q", "--max-crashes", "1"]);
    place.ok(&["push", "q", "x", "--id", "x"]);
    let worker = place.worker(&["q"], "echo x > started; sleep 60");
    place.wait_for("started");
    kill(worker);
    let (code, _, err) = place.run(&["work", "q", "--exit-when-empty", "--", "true"]);
    assert_eq!(code, 1, "{err}");
    assert!(err.contains("1 given up"), "{err}");
    assert_eq!(place.counts(), [0, 0, 0, 1]);
}

#[test]
fn no_time_at_all_is_no_limit() {
    let place = directory();
    place.ok(&["create", "q", "--timeout", "0s"]);
    place.ok(&["push", "q", "x", "--timeout", "0s"]);
    place.ok(&["push", "q", "y"]);
    place.ok(&["work", "q", "--exit-when-empty", "--", "true"]);
    assert_eq!(place.counts(), [0, 0, 2, 0]);
}
