use proptest::prelude::*;

use super::*;

fn task(id: &str, payload: &str) -> Task {
    Task {
        id: id.into(),
        incarnation: "0123456789abcdef".into(),
        pushed_at: Some("2026-01-31T09:05:00.123456Z".parse().unwrap()),
        timeout: Some(Duration::from_secs(90)),
        max_attempts: Some(3),
        origin: None,
        payload: serde_json::from_str(payload).unwrap(),
    }
}

#[test]
fn the_formats_are_frozen() {
    let golden = |name: &str| {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../golden/");
        std::fs::read(format!("{folder}{name}")).unwrap()
    };
    let task = task("example.com", r#"{"url":"https://example.com","deep":[1,2]}"#);
    assert_eq!(task.to_bytes(), golden("task-1.json"));
    let read = Task::parse(&golden("task-1.json"), "example.com", "v");
    assert_eq!(read.to_bytes(), golden("task-1.json"));

    let receipt = Receipt::parse(&golden("receipt-1.json")).unwrap();
    assert_eq!(receipt.to_bytes(), golden("receipt-1.json"));
    assert_eq!((receipt.worker.as_str(), receipt.retries), ("pi-4:812", 1));

    let letter = DeadLetter::parse(&golden("dead-letter-1.json")).unwrap();
    assert_eq!(letter.to_bytes(), golden("dead-letter-1.json"));
    assert_eq!((letter.failures, letter.crashes, letter.errors.len()), (2, 1, 1));
    assert_eq!(letter.task.payload.get(), task.payload.get());

    let bundle = Bundle::parse(&golden("tasks-1.jsonl"), "01ABC").unwrap();
    let ids: Vec<_> = bundle.tasks.iter().map(|task| task.id.as_str()).collect();
    assert_eq!(ids, ["01ABC.0", "01ABC.1"]);
    assert_eq!(bundle.tasks[1].incarnation, "0123456789abcdef.1");
}

#[test]
fn what_others_put_there_is_a_payload() {
    for (bytes, payload) in [
        (r#"{"company": "x"}"#, r#"{"company": "x"}"#),
        // Looks like ours, but names no incarnation.
        (r#"{"payload": 1}"#, r#"{"payload": 1}"#),
        ("https://example.com\n", r#""https://example.com\n""#),
        ("", r#""""#),
    ] {
        let task = Task::parse(bytes.as_bytes(), "t", "v7");
        assert_eq!((task.payload.get(), task.incarnation.as_str()), (payload, "v7"));
    }
    assert_eq!(Task::parse(&[0xff, 0xfe], "t", "v").payload.get(), r#"{"hex":"fffe"}"#);
}

#[test]
fn each_task_of_a_bundle_is_on_one_line() {
    let payloads = ["{\n  \"a\": \"x\\ny\",\r\n\t\"b\": [1,\r2]\n}", "\"c\"", "[\n]"];
    let bundle = Bundle {
        incarnation: "i".into(),
        pushed_at: None,
        origin: None,
        tasks: payloads.iter().map(|payload| task("", payload)).collect(),
    };
    let bytes = bundle.to_bytes();
    assert_eq!(bytes.iter().filter(|byte| **byte == b'\n').count(), 4);
    let read = Bundle::parse(&bytes, "b").unwrap();
    for (task, payload) in read.tasks.iter().zip(payloads) {
        let value = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
        assert_eq!(value(task.payload.get()), value(payload));
    }
    // A task on its own is kept as it was given.
    let alone = task("t", payloads[0]);
    assert_eq!(Task::parse(&alone.to_bytes(), "t", "v").payload.get(), payloads[0]);
}

#[test]
fn a_cut_bundle_is_not_taken_for_a_whole_one() {
    let mut tasks = vec![task("", "1"), task("", "2"), task("", "3")];
    tasks.iter_mut().for_each(|task| task.incarnation.clear());
    let bundle = Bundle { incarnation: "i".into(), pushed_at: None, origin: None, tasks };
    let bytes = bundle.to_bytes();
    assert_eq!(Bundle::parse(&bytes, "b").unwrap().tasks.len(), 3);
    let shorter = bytes[..bytes.len() - 1].iter().rposition(|byte| *byte == b'\n').unwrap();
    assert!(Bundle::parse(&bytes[..=shorter], "b").is_err());
    assert!(Bundle::parse(b"", "b").is_err());
}

proptest! {
    #[test]
    fn any_text_is_a_payload(text in ".{0,80}") {
        let payload = text_payload(&text);
        prop_assert_eq!(plain_text(&payload), text);
    }

    #[test]
    fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..120)) {
        let _ = Task::parse(&bytes, "t", "v");
        let _ = Receipt::parse(&bytes);
        let _ = DeadLetter::parse(&bytes);
        let _ = Bundle::parse(&bytes, "b");
    }
}
