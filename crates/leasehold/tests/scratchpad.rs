//! The scratchpad: values in files, and locks around them.

#![allow(clippy::unwrap_used)] // in a test, a failure is a panic

use std::sync::Arc;
use std::time::Duration;

use leasehold::env::Env;
use leasehold::lock::LockSettings;
use leasehold::protocol::lease::Judgement;
use leasehold::scratchpad::Scratchpad;
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
    let _ = Store::memory();
}
