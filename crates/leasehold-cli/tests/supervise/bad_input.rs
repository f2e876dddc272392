//! What people type.

use super::*;

#[test]
fn plans_that_cannot_be_carried_out_are_refused_with_the_place() {
    let place = directory();
    let check = |text: &str, part: &str| {
        std::fs::write(place.path().join("f.toml"), text).unwrap();
        for verb in ["check", "set"] {
            place.fails(&["fleet", verb, "f.toml"], 2, part);
        }
    };
    check("node = 3", "invalid type");
    check("[[node]]\nname = \"a\"\nworkers = []\n", "unknown field `workers`");
    check("[[node]]\nname = \"a\"\n[[node.worker]]\nqueue = \"q\"\n", "missing field `command`");
    check("[[node]]\nname = \"*\"\n[[node]]\nname = \"a\"\n", "never counts for \"a\"");
    assert!(!place.path().join(".leasehold/fleet.toml").exists());
    place.fails(&["fleet", "check", "no-such-file"], 1, "no-such-file");
    place.fails(&["fleet", "show"], 4, "no fleet.toml");
    std::fs::write(place.path().join("f.json"), "{\"node\": [{}]}").unwrap();
    place.fails(&["fleet", "check", "f.json"], 2, "missing field `name`");
    place.fails(&["supervise", "--node", ""], 2, "a node needs a name");
    place.fails(&["supervise", "--drain", "soon"], 2, "not a duration");
    place.fails(&["supervise", "--requests-per-minute", "0"], 2, "invalid value");
    std::fs::write(place.path().join("file"), "x").unwrap();
    place.fails(&["supervise", "--node", "n", "--state", "file/x"], 1, "cannot make the folder");
}

#[test]
fn a_plan_says_what_a_node_runs() {
    let place = directory();
    place.plan(
        "[[node]]\nname = \"pi-*\"\n[[node.worker]]\nqueue = \"q\"\ncommand = \"it's | wc\"\n\
         [[node.compiler]]\nindex = \"x\"\n",
    );
    assert_eq!(
        place.ok(&["fleet", "show", "--node", "pi-4"]),
        "leasehold queue work --jobs=1 --drain=30s q -- sh -c 'it'\\''s | wc'\n\
         leasehold index compile -- x\n"
    );
    place.fails(&["fleet", "show", "--node", "nas"], 4, "no entry of the plan matches");
}

/// Nobody answers: the supervisor says so and goes on with the last plan that it knows.
#[test]
fn a_store_that_does_not_answer_keeps_nobody_from_working() {
    let mut place = bucket("away");
    let plan = "[[node]]\nname = \"n\"\nevery = \"1s\"\n[[node.worker]]\nqueue = \"q\"\ncommand = \"true\"\n";
    place.plan(plan);
    std::fs::write(
        place.path().join("leasehold.toml"),
        "node = \"n\"\n[connection]\nattempts = 1\n",
    )
    .unwrap();
    let supervisor = place.supervise(&[]);
    place.pids("q", 1);
    supervisor.end();
    let there = std::mem::take(&mut place.variables);
    place.variables = there.clone();
    for (name, value) in &mut place.variables {
        if *name == "AWS_ENDPOINT_URL" {
            "http://127.0.0.1:9".clone_into(value);
        }
    }
    std::fs::remove_file(place.path().join("said")).unwrap();
    let supervisor = place.supervise(&[]);
    wait_until("it tries", || place.said().contains("node n: 0 processes go on, 0 end, 1 start"));
    supervisor.end();
}

#[test]
fn the_unit_is_one_that_systemd_takes() {
    let place = directory();
    let unit = place.ok(&["supervise", "--print-unit", "--node", "50% of it", "--drain", "90s"]);
    assert!(unit.contains("--node=50%% of it\" --drain=90s"), "{unit}");
    assert!(unit.contains("TimeoutStopSec=105s") && unit.contains("KillMode=mixed"), "{unit}");
    let file = place.path().join("leasehold.service");
    std::fs::write(&file, &unit).unwrap();
    match Command::new("systemd-analyze").arg("verify").arg(&file).output() {
        Ok(done) => {
            let said = String::from_utf8_lossy(&done.stderr);
            let ours = said.lines().filter(|line| line.contains("leasehold.service"));
            // Not on a machine without man pages.
            let ours: Vec<&str> = ours.filter(|line| !line.contains("man ")).collect();
            assert!(ours.is_empty(), "{ours:?}");
        }
        Err(error) => eprintln!("NOT TESTED: systemd-analyze: {error}"),
    }
}

/// systemd is told when it is ready, and when it ends.
#[test]
fn systemd_is_told() {
    let place = directory();
    place.plan("");
    let path = place.path().join("notify");
    let socket = std::os::unix::net::UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut command = place.command(&["supervise", "--node", "n"]);
    let supervisor = Running(command.env("NOTIFY_SOCKET", &path).spawn().unwrap());
    let mut buffer = [0; 200];
    let mut hear = || {
        let length = socket.recv(&mut buffer).unwrap();
        String::from_utf8_lossy(&buffer[..length]).into_owned()
    };
    assert!(hear().starts_with("READY=1"));
    signal(supervisor.pid(), "TERM");
    assert_eq!(hear(), "STOPPING=1");
    assert_eq!(supervisor.ending(), Some(0));
}
