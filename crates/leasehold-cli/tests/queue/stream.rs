//! Many lines are an ordinary thing to push, and memory stays flat.

use super::*;

#[cfg(target_os = "linux")]
fn most_memory(child: &Child) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[cfg(target_os = "linux")]
#[test]
fn memory_stays_flat_however_many_lines_there_are() {
    let lines: u64 = if full() { 1_000_000 } else { 200_000 };
    let place = directory();
    let mut push = place.queue(&["push", "q", "-"]);
    let mut push = push.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut stdin = std::io::BufWriter::new(push.stdin.take().unwrap());
    let write = |stdin: &mut std::io::BufWriter<_>, lines: std::ops::Range<u64>| {
        for n in lines {
            writeln!(stdin, "{{\"url\":\"https://example.com/{n}\",\"depth\":{}}}", n % 7).unwrap();
        }
        stdin.flush().unwrap();
    };
    write(&mut stdin, 0..lines / 10);
    let early = most_memory(&push);
    write(&mut stdin, lines / 10..lines);
    // All but what is in the pipe has been read by now.
    let late = most_memory(&push);
    drop(stdin);
    let (code, out, _) = texts(push.wait_with_output().unwrap());
    assert_eq!((code, out), (0, format!("{lines} pushed\n")));
    assert_eq!(place.counts(), [lines, 0, 0, 0]);
    eprintln!("push - of {lines} lines: {early} kB after a tenth, {late} kB at the end");
    assert!(late < 64 << 10, "{late} kB");
    assert!(late - early < 8 << 10, "{early} kB after a tenth, {late} kB at the end");
}

#[test]
fn single_tasks_and_bundles_of_any_size_can_be_streamed() {
    let place = directory();
    let (code, out, _) = place.feed(&["push", "q", "-", "--bundle", "1"], b"a\n\n{\"b\":1}\nc");
    assert_eq!((code, out.as_str()), (0, "3 pushed\n"));
    assert_eq!(place.feed(&["push", "q", "-", "--bundle", "10"], b"").1, "0 pushed\n");
    let (code, out, _) = place.feed(&["push", "q", "-", "--text", "--json"], b"{\"d\":1}\r\n4\n");
    assert_eq!((code, out.as_str()), (0, "{\"known\":0,\"pushed\":2}\n"));
    assert_eq!(place.counts(), [5, 0, 0, 0]);
    let payloads: std::collections::BTreeSet<String> =
        place.json(&["peek", "q"]).iter().map(|task| task["payload"].to_string()).collect();
    let expected = ["\"a\"", "{\"b\":1}", "\"c\"", "\"{\\\"d\\\":1}\"", "\"4\""];
    assert_eq!(payloads, expected.map(str::to_owned).into());
}

/// Bundles of long lines are smaller: nobody has to know how long they are.
#[test]
fn long_lines_make_smaller_bundles() {
    let place = directory();
    let line = "x".repeat(200_000) + "\n";
    let (code, out, err) = place.feed(&["push", "q", "-"], line.repeat(150).as_bytes());
    assert_eq!((code, out.as_str()), (0, "150 pushed\n"), "{err}");
    let bundles =
        std::fs::read_dir(place.path().join(".leasehold/queues/q/bundles")).unwrap().count();
    assert_eq!((place.counts(), bundles), ([150, 0, 0, 0], 8));
}

/// What is wrong with a line is said with its number, and what stands before it is pushed, no more.
#[test]
fn a_line_that_is_too_long_ends_the_stream() {
    for bundle in ["1", "2", "100"] {
        let place = directory();
        let mut input = b"a\nb\nc\n".to_vec();
        input.extend(vec![b'x'; 17 << 20]);
        input.extend(b"\nd\ne\n".repeat(200));
        let (code, out, err) = place.feed(&["push", "q", "-", "--bundle", bundle], &input);
        assert_eq!((code, out.trim()), (2, "3 pushed"), "{err}");
        assert!(err.contains("line 4") && err.contains("16777216 bytes"), "{err}");
    }
}

/// `tail -f` into a queue: what comes is pushed soon, and a signal loses nothing that was read.
#[test]
fn lines_do_not_wait_for_a_bundle_to_be_full() {
    use std::io::{Read as _, Write as _};
    use std::process::Stdio;
    let place = directory();
    place.ok(&["create", "q"]);
    let mut command = place.queue(&["push", "q", "-"]);
    let mut push = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = push.stdin.take().unwrap();
    lines.write_all(b"one\ntwo\nthree\n").unwrap();
    wait_until("they are pushed", || place.counts()[0] == 3);
    lines.write_all(b"four\nfive\n").unwrap();
    std::thread::sleep(std::time::Duration::from_millis(300));
    signal(&push, "TERM");
    let mut said = String::new();
    push.stdout.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!(said.trim(), "5 pushed");
    // There may have been more to come.
    assert_eq!(push.wait().unwrap().code(), Some(1));
    assert_eq!(place.counts()[0], 5);
}
