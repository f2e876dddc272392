//! A real file system, copied while it is in use: what a disk has when the power fails.
//!
//! Needs root, `mkfs.ext4` and loop devices. Where these are not to be had it says so and does
//! nothing, unless `LEASEHOLD_REQUIRE_DISK` is set.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use leasehold::When;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::power::*;
use crate::shared::{DIR, child};

const TASKS: usize = 8;

fn run(program: &str, args: &[&str]) -> bool {
    let mut command = Command::new(program);
    command.args(args).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// A mounted image.
struct Mount(PathBuf);

impl Mount {
    fn new(image: &Path, at: PathBuf, options: &str) -> Option<Self> {
        std::fs::create_dir_all(&at).unwrap();
        let (image, path) = (image.to_str().unwrap(), at.to_str().unwrap());
        run("mount", &["-o", options, image, path]).then_some(Self(at))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if !run("umount", &[self.0.to_str().unwrap()]) {
            run("umount", &["-l", self.0.to_str().unwrap()]);
        }
    }
}

/// What the n-th change of a key makes of it.
fn state(name: &str, n: u64) -> Option<String> {
    (!n.is_multiple_of(5)).then(|| format!("{name} {n}\n").repeat(300))
}

/// Not a test: changes one key per task, and says so after each.
#[test]
#[ignore = "is started by another test"]
fn child_writes_until_killed() {
    let Some(dir) = std::env::var_os(DIR) else { return };
    let store = open(Path::new(&dir));
    runtime().block_on(async {
        let mut tasks = tokio::task::JoinSet::new();
        for task in 0..TASKS {
            let store = store.clone();
            tasks.spawn(async move {
                let name = format!("folder-{task}/x");
                for n in 1_u64.. {
                    match state(&name, n) {
                        Some(body) => drop(put(&store, &name, &body, When::Any).await),
                        None => {
                            delete(&store, &name).await;
                            store.persist(&[key(&name)]).await.unwrap();
                        }
                    }
                    println!("\n{name} {n}");
                }
            });
        }
        tasks.join_all().await;
    });
}

#[test]
fn what_was_acknowledged_is_on_a_real_disk() {
    let dir = TempDir::new().unwrap();
    let image = dir.path().join("image");
    std::fs::File::create(&image).unwrap().set_len(48 << 20).unwrap();
    let made = run("mkfs.ext4", &["-q", "-F", image.to_str().unwrap()]);
    let mounted = made.then(|| Mount::new(&image, dir.path().join("disk"), "loop")).flatten();
    let Some(disk) = mounted else {
        assert!(std::env::var_os("LEASEHOLD_REQUIRE_DISK").is_none(), "cannot mount an image");
        // Past the capture of output: nobody should believe that this was tested.
        let _ = writeln!(std::io::stderr(), "\nNOT TESTED: cannot mount an image; needs root");
        return;
    };
    let store = disk.0.join("store");
    let mut writer = child("disk::child_writes_until_killed", &store);
    let told = Arc::new(Mutex::new(HashMap::<String, u64>::new()));
    let lines = BufReader::new(writer.stdout.take().unwrap()).lines();
    let hear = told.clone();
    let listener = std::thread::spawn(move || {
        for line in lines.map_while(Result::ok) {
            if let Some((name, n)) = line.split_once(' ')
                && let (true, Ok(n)) = (name.starts_with("folder-"), n.parse())
            {
                hear.lock().unwrap().insert(name.to_owned(), n);
            }
        }
    });
    let pid = Pid::from_raw(i32::try_from(writer.id()).unwrap()).unwrap();
    for round in 0..4 {
        std::thread::sleep(Duration::from_millis(700 + 600 * round));
        kill_process(pid, Signal::STOP).unwrap();
        std::thread::sleep(Duration::from_millis(100));
        let told = told.lock().unwrap().clone();
        let copy = copy_of(&image, &dir.path().join("copy"));
        kill_process(pid, Signal::CONT).unwrap();
        assert_eq!(told.len(), TASKS, "the writer is at work");
        check(&copy, dir.path(), &told, round);
    }
    writer.kill().unwrap();
    writer.wait().unwrap();
    listener.join().unwrap();
}

/// The image at one moment: nothing was written to it while it was read.
fn copy_of(image: &Path, copy: &Path) -> PathBuf {
    let mut before = std::fs::read(image).unwrap();
    for _ in 0..20 {
        let now = std::fs::read(image).unwrap();
        if now == before {
            std::fs::write(copy, now).unwrap();
            return copy.to_owned();
        }
        before = now;
    }
    panic!("the image does not come to rest");
}

fn check(copy: &Path, dir: &Path, told: &HashMap<String, u64>, round: u64) {
    let disk = Mount::new(copy, dir.join("later"), "loop").unwrap();
    let store = disk.0.join("store");
    let journal = snapshot(&store);
    assert!(!journal.is_empty());
    lose_power(&store, journal);
    drop(disk);
    // First as one that cannot be written to: it can still be read.
    let disk = Mount::new(copy, dir.join("later"), "loop,ro").unwrap();
    read_one(&store, "folder-0/y");
    drop(disk);
    let disk = Mount::new(copy, dir.join("later"), "loop").unwrap();
    for (name, n) in told {
        let found = read_one(&store, name);
        let fits = [*n, n + 1].iter().any(|n| state(name, *n) == found);
        let start = found.map(|found| found.chars().take(30).collect::<String>());
        assert!(fits, "round {round}: {name} was acknowledged at {n}, and is {start:?}");
    }
    drop(disk);
}
