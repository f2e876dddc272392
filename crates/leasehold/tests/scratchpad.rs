//! The scratchpad: values in files, and locks around them.

#![allow(clippy::unwrap_used)] // in a test, a failure is a panic

use std::sync::Arc;
use std::time::Duration;

use leasehold::env::Env;
use leasehold::lock::LockSettings;
use leasehold::protocol::lease::Judgement;
use leasehold::scratchpad::{Format, Scratchpad};
use leasehold::store::Kind;
use leasehold::store::memory::Memory;
use leasehold::{Error, ErrorKind, Store};
use serde_json::{Value, json};

fn pad() -> (Scratchpad, tempfile::TempDir) {
    let root = tempfile::tempdir().unwrap();
    (Scratchpad::open(root.path().join("pad")).unwrap(), root)
}

fn quick() -> LockSettings {
    LockSettings {
        timeout: Duration::from_millis(100),
        heartbeat: Duration::from_millis(100),
        ttl: Duration::from_secs(1),
        ..LockSettings::of(Kind::Directory)
    }
}

fn files(root: &tempfile::TempDir, below: &str) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(root.path().join("pad").join(below))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name != ".lh")
        .collect();
    names.sort();
    names
}

#[tokio::test]
async fn values_go_in_and_come_out_by_the_files_name() {
    let (pad, root) = pad();
    let value = json!({ "a": [1, 2, { "b": "c: d" }], "n": null });
    for path in ["x.yaml", "deep/er/x.json"] {
        assert_eq!(pad.read_opt::<Value>(path).await.unwrap(), None);
        assert!(pad.read::<Value>(path).await.unwrap_err().to_string().contains("no such file"));
        pad.write(path, &value).await.unwrap();
        assert_eq!(pad.read::<Value>(path).await.unwrap(), value);
    }
    pad.write("notes.md", "# Notes\n").await.unwrap();
    assert_eq!(pad.read::<String>("./notes.md").await.unwrap(), "# Notes\n");
    pad.write_bytes("blob", vec![0, 255]).await.unwrap();
    assert_eq!(pad.read_bytes("blob").await.unwrap().unwrap(), vec![0, 255]);
    assert_eq!(pad.list("").await.unwrap(), ["blob", "deep/er/x.json", "notes.md", "x.yaml"]);
    pad.remove("blob").await.unwrap();
    pad.remove("blob").await.unwrap();
    assert_eq!(files(&root, ""), ["deep", "notes.md", "x.yaml"], "and nothing else is left");
    pad.write_bytes("broken.json", "{").await.unwrap();
    assert_eq!(pad.read::<Value>("broken.json").await.unwrap_err().kind(), ErrorKind::Data);
}

#[tokio::test]
async fn paths_stay_inside() {
    let (pad, root) = pad();
    for path in ["", "/etc/passwd", "../x", "a/../../x", "a\0b", "a//b", "x.lock"] {
        assert_eq!(pad.read_bytes(path).await.unwrap_err().kind(), ErrorKind::Invalid, "{path:?}");
        assert!(pad.write(path, "x").await.is_err() && pad.acquire_lock(path, "a").await.is_err());
    }
    pad.write("a.md", "x").await.unwrap();
    std::os::unix::fs::symlink("/tmp", root.path().join("pad/out")).unwrap();
    assert!(pad.write("out/leasehold-must-not-be-here.md", "x").await.is_err());
    assert!(!std::path::Path::new("/tmp/leasehold-must-not-be-here.md").exists());
}

#[tokio::test]
async fn with_lock_returns_and_releases() {
    let (pad, root) = pad();
    let doubled = pad
        .with_lock("n.json", async |file| {
            assert_eq!(file.read::<Value>().await?, None);
            file.write(&21).await?;
            let n: i64 = file.read().await?.unwrap();
            file.write(&(n * 2)).await?;
            assert!(root.path().join("pad/n.json.lock").exists(), "its lock is beside it");
            Ok(n * 2)
        })
        .await;
    assert_eq!(doubled.unwrap(), 42);
    assert_eq!(files(&root, ""), ["n.json"]);
    let failed = pad
        .with_lock("n.json", async |_| Err::<(), _>(Error::new(ErrorKind::Invalid, "inside")))
        .await;
    assert_eq!(failed.unwrap_err().to_string(), "inside");
    assert_eq!(files(&root, ""), ["n.json"]);
}

/// FIELD.md row 30: the lock was checked, then somebody else wrote: the write itself is refused.
#[tokio::test]
async fn a_guarded_write_is_conditional_on_what_was_seen() {
    let (pad, _root) = pad();
    pad.write("x.json", &1).await.unwrap();
    let mut locked = pad.lock("x.json").await.unwrap();
    assert_eq!(locked.read::<i64>().await.unwrap(), Some(1));
    // Somebody who does not mind the lock, or who took it over.
    pad.write("x.json", &2).await.unwrap();
    let error = locked.write(&10).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
    assert_eq!(pad.read::<i64>("x.json").await.unwrap(), 2);
    assert_eq!(locked.read::<i64>().await.unwrap(), Some(2));
    locked.write(&3).await.unwrap();
    locked.release().await.unwrap();
    assert_eq!(pad.read::<i64>("x.json").await.unwrap(), 3);
}

/// A guarded write whose answer was lost: equal bytes may be somebody else's.
#[tokio::test]
async fn equal_bytes_of_somebody_else_are_not_ours() {
    use leasehold_testkit::conformance::over;
    use leasehold_testkit::faulty::{Fault, Faulty};
    let settings = leasehold::StoreSettings { attempts: 2, ..Default::default() };
    let memory = Arc::new(Memory::new(Env::system()));
    let plain = Scratchpad::on(&over(memory.clone()), "plain").unwrap();
    plain.write("n.json", &5).await.unwrap();
    // The lock, then the file: that request is lost, and somebody writes the same meanwhile.
    let faults = [Fault::None, Fault::LostRequest];
    let store = Arc::new(Faulty::writes(memory.clone(), faults));
    let store = Store::new(store, Env::system(), settings.clone()).unwrap();
    store.limits().await.unwrap();
    let pad = Scratchpad::on(&store, "a").unwrap();
    let mut locked = pad.lock("n.json").await.unwrap();
    assert_eq!(locked.read::<i64>().await.unwrap(), Some(5));
    plain.write("n.json", &6).await.unwrap();
    let error = locked.write(&6).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains("may have been written or not"), "{error}");
    // Where the request was lost and nobody wrote, it is sent again.
    let faults = [Fault::None, Fault::LostRequest];
    let store = Store::new(Arc::new(Faulty::writes(memory, faults)), Env::system(), settings);
    let store = store.unwrap();
    store.limits().await.unwrap();
    let pad = Scratchpad::on(&store, "b").unwrap();
    let mut locked = pad.lock("m.json").await.unwrap();
    locked.write(&1).await.unwrap();
    assert_eq!(plain.read::<i64>("m.json").await.unwrap(), 1);
}

/// Whose lock was taken by force writes nothing, although the file is as it was.
#[tokio::test]
async fn a_guarded_write_checks_the_token() {
    let (pad, root) = pad();
    let slow = LockSettings {
        heartbeat: Duration::from_secs(60),
        ttl: Duration::from_secs(200),
        ..LockSettings::of(Kind::Directory)
    };
    let pad = pad.with_settings(slow.clone());
    pad.write("x.json", &1).await.unwrap();
    let mut locked = pad.lock("x.json").await.unwrap();
    let url = leasehold::store::StoreUrl::Directory(root.path().join("pad"));
    let other = leasehold::store::Connect::new(url).open().unwrap().without_root_record();
    let file = leasehold::Key::new("x.json").unwrap();
    let thief = leasehold::lock::Lock::beside(&other, &file, "thief", slow).unwrap();
    let thief = thief.force().await.unwrap();
    std::thread::sleep(Duration::from_millis(10));
    assert_eq!(locked.write(&2).await.unwrap_err().kind(), ErrorKind::Lost);
    assert_eq!(pad.read::<i64>("x.json").await.unwrap(), 1);
    thief.release().await.unwrap();
}

/// A format that the name does not tell, everywhere.
#[tokio::test]
async fn formats_can_be_given() {
    let (pad, _root) = pad();
    let add = |value: Option<i64>| Ok(value.unwrap_or(0) + 1);
    assert_eq!(pad.update_as("state", Format::Json, add).await.unwrap(), 1);
    assert_eq!(pad.update_as("state", Format::Json, add).await.unwrap(), 2);
    assert!(pad.update("state", add).await.is_err(), "its name does not tell");
    let mut locked = pad.lock("state").await.unwrap();
    assert_eq!(locked.read_as::<i64>(Format::Yaml).await.unwrap(), Some(2));
    locked.write_as(&json!({ "n": 3 }), Format::Yaml).await.unwrap();
    locked.release().await.unwrap();
    assert_eq!(pad.read_as::<Value>("state", Format::Yaml).await.unwrap(), Some(json!({"n": 3})));
}

/// An update is a PUT for the lock, a GET, a PUT, and a PUT for the release.
#[tokio::test]
async fn an_update_costs_four_requests() {
    use leasehold_testkit::faulty::Faulty;
    let memory = Arc::new(Memory::new(Env::system()));
    let store = leasehold_testkit::conformance::over(Arc::new(Faulty::writes(memory, [])));
    store.init().await.unwrap();
    let pad = Scratchpad::on(&store, "a").unwrap();
    let before = store.usage();
    pad.update("n.json", |n: Option<i64>| Ok(n.unwrap_or(0) + 1)).await.unwrap();
    let used = store.usage().since(&before);
    assert_eq!((used.put, used.get, used.requests()), (3, 1, 4), "{used:?}");
}

#[tokio::test]
async fn locks_by_hand() {
    let (pad, root) = pad();
    let pad = pad.with_settings(quick());
    assert!(pad.acquire_lock("deep/s.yaml", "worker-001").await.unwrap());
    let text = std::fs::read_to_string(root.path().join("pad/deep/s.yaml.lock")).unwrap();
    for field in ["\"holderId\":\"worker-001\"", "\"acquiredAt\":\"20", "\"lastHeartbeat\":\"20"] {
        assert!(text.contains(field), "{field} in {text}");
    }
    assert!(!pad.acquire_lock("deep/s.yaml", "worker-002").await.unwrap());
    let wrong = pad.release_lock("deep/s.yaml", "worker-002").await.unwrap_err();
    assert!(wrong.to_string().contains("locked by worker-001, not by worker-002"), "{wrong}");
    // The same name in another process, or here another scratchpad, is not the same holder.
    let other = Scratchpad::open(root.path().join("pad")).unwrap();
    let wrong = other.release_lock("deep/s.yaml", "worker-001").await.unwrap_err();
    assert!(wrong.to_string().contains("not through this scratchpad: by process"), "{wrong}");
    let info = pad.lock_info("deep/s.yaml").await.unwrap().unwrap();
    assert!(matches!(info.judgement, Judgement::Held { .. }));
    pad.release_lock("deep/s.yaml", "worker-001").await.unwrap();
    pad.release_lock("deep/s.yaml", "worker-001").await.unwrap();
    pad.release_lock("never.yaml", "worker-001").await.unwrap();
    assert!(pad.acquire_lock("deep/s.yaml", "worker-002").await.unwrap());
    pad.dispose().await.unwrap();
    assert!(!root.path().join("pad/deep/s.yaml.lock").exists());
}

#[tokio::test]
async fn stale_locks_are_counted_and_fresh_ones_kept() {
    let (pad, root) = pad();
    let pad = pad.with_settings(quick());
    pad.write("a.json", &1).await.unwrap();
    for (name, body) in [("old.json.lock", r#"{"holderId":"gone"}"#), ("empty.lock", "")] {
        std::fs::write(root.path().join("pad").join(name), body).unwrap();
    }
    // What only ends like a lock is somebody's file: not removed, and not taken for one.
    std::fs::write(root.path().join("pad/Cargo.lock"), "# generated\nversion = 4\n").unwrap();
    assert!(pad.acquire_lock("a.json", "alive").await.unwrap());
    assert_eq!(pad.clean_stale_locks().await.unwrap(), 2);
    assert_eq!(files(&root, ""), ["Cargo.lock", "a.json", "a.json.lock"]);
    assert_eq!(pad.acquire_lock("Cargo", "x").await.unwrap_err().kind(), ErrorKind::Data);
    pad.dispose().await.unwrap();
}

/// 64 tasks in four clients: no increment is lost, on a directory and in memory.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn updates_are_not_lost() {
    let root = tempfile::tempdir().unwrap();
    let memory = Arc::new(Memory::new(Env::system()));
    let patient = LockSettings { timeout: Duration::from_secs(60), attempts: 30, ..quick() };
    for path in ["counter.yaml", "counter.json"] {
        let tasks = (0..64).map(|n| {
            let pad = match path.ends_with("yaml") {
                true => Scratchpad::open(root.path()).unwrap(),
                false => {
                    let store = leasehold_testkit::conformance::over(memory.clone());
                    Scratchpad::on(&store, format!("task {n}")).unwrap()
                }
            };
            let pad = pad
                .with_settings(LockSettings { ttl: Duration::from_secs(20), ..patient.clone() })
                .with_durability(leasehold::Durability::Volatile);
            tokio::spawn(async move {
                for _ in 0..5 {
                    let add = |value: Option<Value>| {
                        let count = value.and_then(|value| value["n"].as_i64()).unwrap_or(0);
                        Ok(json!({ "n": count + 1 }))
                    };
                    pad.update(path, add).await.unwrap();
                }
            })
        });
        for task in futures::future::join_all(tasks).await {
            task.unwrap();
        }
    }
    let pad = Scratchpad::open(root.path()).unwrap();
    assert_eq!(pad.read::<Value>("counter.yaml").await.unwrap()["n"], 320);
    let pad = Scratchpad::on(&leasehold_testkit::conformance::over(memory), "reader").unwrap();
    assert_eq!(pad.read::<Value>("counter.json").await.unwrap()["n"], 320);
    let names: Vec<_> =
        std::fs::read_dir(root.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names.len(), 2, "{names:?}: the file and .lh");
    let temporary = leasehold_testkit::temporary_files(root.path());
    assert_eq!(temporary, 0, "temporary files are left");
}
