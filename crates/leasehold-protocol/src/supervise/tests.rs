use proptest::prelude::*;

use super::*;
use crate::format::fleet::Fleet;

fn plan(json: &str) -> NodePlan {
    let fleet: Fleet = serde_json::from_str(&format!(r#"{{"node":[{json}]}}"#)).unwrap();
    fleet.checked().unwrap().node.remove(0)
}

const SMALL: &str = r#"{"name": "a",
    "worker": [
        {"queue": ["urgent", "q"], "count": 2, "jobs": 3, "command": ["run", "{}"], "poll": "5s",
         "env": {"A": "1"}},
        {"queue": "other", "command": "echo {} | wc", "drain": "2m", "fail_code": 7}
    ],
    "compiler": [{"index": ["x", "-y"], "pause": "1m"}]}"#;

#[test]
fn a_plan_becomes_commands() {
    let all = processes(&plan(SMALL));
    assert_eq!(all.len(), 4);
    assert_eq!(all[0], all[1]);
    assert_eq!(
        all[0].words.join(" "),
        "queue work --jobs=3 --drain=30s --poll=5s urgent,q -- run {}"
    );
    assert_eq!(all[0].env["A"], "1");
    assert_eq!(
        all[2].words,
        [
            "queue",
            "work",
            "--jobs=1",
            "--drain=2m",
            "--fail-code=7",
            "other",
            "--",
            "sh",
            "-c",
            "echo \"$1\" | wc",
            "sh",
            "{}"
        ]
    );
    assert_eq!(all[2].drain, Duration::from_secs(120));
    assert_eq!(all[3].words.join(" "), "index compile --pause=1m -- x -y");
}

#[test]
fn what_did_not_change_is_left_alone() {
    let before = processes(&plan(SMALL));
    let running: Vec<&Process> = before.iter().collect();
    assert_eq!(compare(&running, &before), Changes::default());
    // Another order is the same plan.
    let mut moved = before.clone();
    moved.reverse();
    assert_eq!(compare(&running, &moved), Changes::default());
    // One less: the later of the two goes. One more: only that is started.
    assert_eq!(compare(&running, &before[1..]), Changes { stop: vec![1], start: vec![] });
    let more: Vec<Process> = before.iter().chain(&before[..1]).cloned().collect();
    assert_eq!(compare(&running, &more), Changes { stop: vec![], start: vec![before[0].clone()] });
    // Another command is another process.
    let mut other = before.clone();
    other[2].words.push("x".to_owned());
    let changes = compare(&running, &other);
    assert_eq!((changes.stop, &changes.start[..]), (vec![2], &other[2..3]));
    assert_eq!(compare(&running, &[]).stop, [0, 1, 2, 3]);
}

#[test]
fn pauses_double_and_a_loop_is_told_and_forgiven() {
    let mut restarts = Restarts::default();
    let mut now = Duration::ZERO;
    for (n, longest) in [500, 1000, 2000, 4000, 8000, 16_000, 32_000, 60_000, 60_000]
        .map(Duration::from_millis)
        .into_iter()
        .enumerate()
    {
        assert_eq!(restarts.is_loop(), n >= LOOP, "{n}");
        let mut other = restarts.clone();
        assert_eq!(restarts.ended(Duration::ZERO, now, u64::MAX), longest);
        assert_eq!(other.ended(Duration::ZERO, now, 0), longest / 2);
        now += longest;
    }
    assert_eq!(restarts.count, 9);
    restarts.running(Duration::from_secs(59));
    assert!(restarts.is_loop());
    restarts.running(STABLE);
    assert!(!restarts.is_loop());
    assert_eq!(restarts.ended(STABLE, now, u64::MAX), FIRST);
    assert!(!restarts.is_loop());
}

#[test]
fn ends_that_are_far_apart_are_no_loop() {
    let mut restarts = Restarts::default();
    for n in 0..100 {
        restarts.ended(Duration::from_secs(30), Duration::from_secs(200) * n, 0);
        assert!(!restarts.is_loop());
    }
    assert_eq!(restarts.count, 100);
}

#[test]
fn nodes_are_judged_by_what_they_missed() {
    let every = Duration::from_secs(50);
    for (age, expected) in [
        (0, Standing::Alive),
        (149, Standing::Alive),
        (150, Standing::Stalled),
        (499, Standing::Stalled),
        (500, Standing::Gone),
    ] {
        assert_eq!(standing(Duration::from_secs(age), every), expected, "{age}");
    }
    assert!(is_clock_off(-3_600_000) && is_clock_off(10_000) && !is_clock_off(-2_000));
}

/// A day of a node that reports every 5 minutes: at most 275 reports, each a PUT and a GET. With the
/// 24 LISTs and GETs of its sync, 299 of each.
#[test]
fn a_day_has_no_more_than_275_reports_of_five_minutes() {
    let reports = |every: u64, random: u64| {
        let day = Duration::from_secs(86_400);
        day.as_secs_f64() / pause(Duration::from_secs(every), random).as_secs_f64()
    };
    assert!(reports(300, 0) <= 275.0);
    assert!(reports(300, u64::MAX) >= 250.0);
    // A strict node: within a minute.
    assert!(pause(EVERY, u64::MAX) < Duration::from_secs(60));
    assert!(reports(EVERY.as_secs(), 0) <= 1646.0);
}

proptest! {
    /// Whatever ran and whatever is wanted: after the changes, what runs is what is wanted, and
    /// nothing was stopped that is wanted.
    #[test]
    fn changes_lead_to_the_plan(
        running in proptest::collection::vec(0..4usize, 0..12),
        wanted in proptest::collection::vec(0..4usize, 0..12),
    ) {
        let kinds: Vec<Process> = (0..4)
            .map(|n| plan(&format!(
                r#"{{"name":"a","worker":[{{"queue":"q{n}","command":"x"}}]}}"#
            )))
            .map(|plan| processes(&plan).remove(0))
            .collect();
        let runs: Vec<&Process> = running.iter().map(|n| &kinds[*n]).collect();
        let wanted: Vec<Process> = wanted.iter().map(|n| kinds[*n].clone()).collect();
        let changes = compare(&runs, &wanted);
        let kept = runs.iter().enumerate().filter(|(n, _)| !changes.stop.contains(n));
        let mut after: Vec<Process> = kept.map(|(_, process)| (*process).clone()).collect();
        after.extend(changes.start.iter().cloned());
        after.sort();
        let mut sorted = wanted.clone();
        sorted.sort();
        prop_assert_eq!(after, sorted);
        for n in &changes.stop {
            prop_assert!(!changes.start.contains(runs[*n]));
        }
    }

    #[test]
    fn shares_never_exceed_the_limit(limit in 1..100_000u32, processes in 0..300u32) {
        let (ours, each) = share(limit, processes);
        if limit > processes {
            prop_assert!(ours + each * processes <= limit);
        }
        prop_assert!(ours >= 1 && each >= 1);
    }
}

#[test]
fn a_flood_of_lines_is_cut_and_counted() {
    let mut flow = Flow::default();
    let at = |seconds: u64| Duration::from_secs(1000 + seconds);
    let passed = (0..5000).filter(|_| flow.line(at(0)).is_some()).count();
    assert_eq!(passed, 1000);
    assert_eq!(flow.line(at(1)), Some(4000), "what was dropped is told with the next line");
    let passed = (0..5000).filter(|_| flow.line(at(1)).is_some()).count();
    assert_eq!((passed, flow.dropped()), (19, 4981));
    // After a rest as much as at first, and no more, however long it was.
    let passed = (0..5000).filter(|_| flow.line(at(1_000_000)).is_some()).count();
    assert_eq!(passed, 1000);
}
