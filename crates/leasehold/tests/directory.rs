//! What is particular to a directory: names, leftovers, permissions, conflicts, other tools.

#![allow(clippy::unwrap_used)] // in a test, a failure is a panic

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use leasehold::store::{Connect, Delete, Detail, List, Put, Store, StoreUrl};
use leasehold::{Durability, Error, ErrorKind, Key, Proof, When, Write};

struct Scene {
    root: tempfile::TempDir,
}

impl Scene {
    fn new() -> Self {
        Self { root: tempfile::tempdir().unwrap() }
    }

    fn dir(&self) -> PathBuf {
        self.root.path().join("store")
    }

    fn store(&self) -> Store {
        Connect::new(StoreUrl::Directory(self.dir())).open().unwrap()
    }
}

fn key(name: &str) -> Key {
    Key::new(name).unwrap()
}

async fn put(store: &Store, name: &str, body: &'static str) -> Result<Put, Error> {
    let write = Write::any().durability(Durability::Volatile);
    store.put(&key(name), body.into(), write).await
}

async fn names(store: &Store, prefix: &str) -> Vec<String> {
    let page = store.list(List::prefix(prefix).unwrap()).collect().await.unwrap();
    page.entries.iter().map(|entry| entry.key.to_string()).collect()
}

#[tokio::test]
async fn reading_makes_nothing() {
    let scene = Scene::new();
    let store = scene.store();
    assert_eq!(store.get(&key("a")).await.unwrap(), None);
    assert_eq!(names(&store, "").await, Vec::<String>::new());
    assert!(!scene.dir().exists());
}

#[tokio::test]
async fn other_tools_find_ordinary_keys_where_they_expect_them() {
    let scene = Scene::new();
    let store = scene.store();
    put(&store, "indexes/d/shards/5e.usv", "rows").await.map(drop).unwrap();
    assert_eq!(fs::read(scene.dir().join("indexes/d/shards/5e.usv")).unwrap(), b"rows");
    // And we find what they write.
    fs::write(scene.dir().join("indexes/d/example.com.usv"), "theirs").unwrap();
    assert_eq!(names(&store, "indexes/d/e").await, ["indexes/d/example.com.usv"]);
    let object = store.get(&key("indexes/d/example.com.usv")).await.unwrap().unwrap();
    assert_eq!(object.body, "theirs");
}

#[tokio::test]
async fn a_key_cannot_be_the_directory_of_another() {
    let scene = Scene::new();
    let store = scene.store();
    put(&store, "a/b", "file").await.map(drop).unwrap();
    for (name, part) in [("a", "as their directory"), ("a/b/c", "name of one of this key's")] {
        let error = put(&store, name, "x").await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains(part), "{error}");
    }
    assert_eq!(leasehold_testkit::temporary_files(&scene.dir()), 0);
    // A key below an object is simply not there, and neither is a folder an object.
    assert_eq!(store.get(&key("a/b/c")).await.unwrap(), None);
    assert_eq!(store.get(&key("a")).await.unwrap(), None);
    assert!(matches!(store.delete(&key("a")).await.unwrap(), Delete::Deleted));
    assert_eq!(names(&store, "").await, ["a/b", "leasehold.json"]);
}

#[tokio::test]
async fn empty_folders_are_no_obstacle() {
    let scene = Scene::new();
    let store = scene.store();
    store.init().await.unwrap();
    fs::create_dir_all(scene.dir().join("a/b/c")).unwrap();
    let delimited = List::prefix("").unwrap().delimited();
    assert!(store.list(delimited).collect().await.unwrap().prefixes.is_empty());
    put(&store, "a", "an object after all").await.map(drop).unwrap();
    assert_eq!(names(&store, "").await, ["a", "leasehold.json"]);
}

#[tokio::test]
async fn folders_go_with_their_last_object() {
    let scene = Scene::new();
    let store = scene.store();
    put(&store, "queues/q/pending/t/task.json", "x").await.map(drop).unwrap();
    store.delete(&key("queues/q/pending/t/task.json")).await.map(drop).unwrap();
    assert!(!scene.dir().join("queues").exists());
}

#[tokio::test]
async fn foreign_files_are_passed_over() {
    let scene = Scene::new();
    let store = scene.store();
    put(&store, "a", "ours").await.map(drop).unwrap();
    let dir = scene.dir();
    fs::write(dir.join("50%zz"), "not ours").unwrap();
    fs::write(dir.join("line\nbreak"), "not ours").unwrap();
    std::os::unix::fs::symlink("/etc/passwd", dir.join("link")).unwrap();
    assert_eq!(names(&store, "").await, ["a", "leasehold.json"]);
    let error = store.get(&key("link")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Data, "{error}");
}

#[tokio::test]
async fn a_crash_leaves_what_the_next_process_sweeps() {
    let scene = Scene::new();
    scene.store().init().await.unwrap();
    let two_hours_ago = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
    // Of this version's processes, and of an earlier one's.
    let folders = [scene.dir().join(".lh/tmp/a"), scene.dir().join(".lh/tmp")];
    fs::create_dir_all(&folders[0]).unwrap();
    for folder in &folders {
        fs::write(folder.join("alive-1"), "half an obj").unwrap();
        fs::write(folder.join("dead-1"), "half an obj").unwrap();
        let old = fs::File::options().write(true).open(folder.join("dead-1")).unwrap();
        old.set_modified(two_hours_ago).unwrap();
    }
    let dead = || folders.iter().filter(|folder| folder.join("dead-1").exists()).count();
    put(&scene.store(), "a", "x").await.map(drop).unwrap();
    assert_eq!(dead(), 2, "nobody looks again so soon");
    let swept = scene.dir().join(".lh/swept");
    let sweep_was = |at: SystemTime| {
        fs::File::options().write(true).open(&swept).unwrap().set_modified(at).unwrap();
    };
    sweep_was(two_hours_ago);
    put(&scene.store(), "a", "x").await.map(drop).unwrap();
    assert_eq!(dead(), 0, "they were left by a crash");
    for folder in &folders {
        assert!(folder.join("alive-1").exists(), "it may be somebody's who is writing right now");
    }
    assert!(fs::metadata(&swept).unwrap().modified().unwrap() > two_hours_ago);
    // A clock that is put back does not keep anybody from sweeping.
    fs::write(folders[0].join("dead-1"), "half an obj").unwrap();
    let old = fs::File::options().write(true).open(folders[0].join("dead-1")).unwrap();
    old.set_modified(two_hours_ago).unwrap();
    sweep_was(two_hours_ago + Duration::from_secs(10_000_000_000));
    put(&scene.store(), "a", "x").await.map(drop).unwrap();
    assert_eq!(dead(), 0);
}

#[tokio::test]
async fn nothing_is_left_by_refusals() {
    let scene = Scene::new();
    let store = scene.store();
    put(&store, "a", "x").await.map(drop).unwrap();
    for durability in [Durability::Durable, Durability::Ordered, Durability::Volatile] {
        for when in [When::Absent, When::Matches(leasehold::Version::new("no"))] {
            let write = Write::when(when, Proof::Bytes).durability(durability);
            let refused = store.put(&key("a"), "y".into(), write).await.unwrap();
            assert!(matches!(refused, Put::Refused));
        }
        let write = Write::any().durability(durability);
        store.put(&key("a"), "z".into(), write).await.map(drop).unwrap();
    }
    assert_eq!(leasehold_testkit::temporary_files(&scene.dir()), 0);
}

#[tokio::test]
async fn permissions_survive_a_rewrite() {
    let scene = Scene::new();
    let store = scene.store();
    put(&store, "secret", "1").await.map(drop).unwrap();
    let path = scene.dir().join("secret");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    for durability in [Durability::Volatile, Durability::Ordered] {
        let write = Write::any().durability(durability);
        store.put(&key("secret"), "2".into(), write).await.map(drop).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }
}

#[tokio::test]
async fn a_file_in_the_stores_place_is_said_at_once() {
    let scene = Scene::new();
    fs::write(scene.dir(), "a file").unwrap();
    let error = Connect::new(StoreUrl::Directory(scene.dir())).open().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("is a file"), "{error}");
    let below = Connect::new(StoreUrl::Directory(scene.dir().join("below"))).open();
    assert_eq!(below.unwrap_err().kind(), ErrorKind::Invalid);
}

/// Leases are made, then written: nobody takes one in between for an empty one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_that_is_being_written_is_waited_for() {
    let scene = Scene::new();
    let store = scene.store();
    put(&store, "queues/q/pending/t/task.json", "{}").await.map(drop).unwrap();
    let (name, empty) = ("queues/q/pending/t/lease.json", "queues/q/pending/t/empty.json");
    put(&store, empty, "").await.map(drop).unwrap();
    let (path, at) = (scene.dir().join(name), key(name));
    // Who writes may be held up on a busy machine.
    let waited_for = async || {
        fs::write(&path, "").unwrap();
        let read = store.get(&at);
        let written = async {
            tokio::time::sleep(Duration::from_millis(2)).await;
            fs::write(&path, "held").unwrap();
        };
        tokio::join!(read, written).0.unwrap().unwrap().body == "held"
    };
    let mut tries = 0;
    while !waited_for().await {
        tries += 1;
        assert!(tries < 100);
    }
    // Not for ever, and no other object is.
    fs::write(&path, "").unwrap();
    assert_eq!(store.get(&at).await.unwrap().unwrap().body, "");
    assert_eq!(store.get(&key(empty)).await.unwrap().unwrap().body, "");
}

/// All empty leases have the same content, and each is somebody's.
#[tokio::test]
async fn an_empty_lease_is_not_taken_for_another() {
    let scene = Scene::new();
    let store = scene.store();
    put(&store, "queues/q/pending/t/task.json", "{}").await.map(drop).unwrap();
    let name = key("queues/q/pending/t/lease.json");
    let path = scene.dir().join(name.as_str());
    fs::write(&path, "").unwrap();
    let first = store.get(&name).await.unwrap().unwrap().meta.version;
    assert_eq!(store.head(&name).await.unwrap().unwrap().version, first);
    let other = scene.dir().join("other");
    fs::write(&other, "").unwrap();
    fs::rename(&other, &path).unwrap();
    let second = store.get(&name).await.unwrap().unwrap().meta.version;
    assert_ne!(first, second);
    let take = |version| Write::when(When::Matches(version), Proof::Bytes);
    assert!(matches!(store.put(&name, "x".into(), take(first.clone())).await, Ok(Put::Refused)));
    assert!(matches!(store.delete_version(&name, &first).await, Ok(Delete::Refused)));
    assert!(matches!(store.put(&name, "x".into(), take(second)).await, Ok(Put::Stored(_))));
}

/// The lease of a task is made where it stands, in one step with the decision who is first.
#[tokio::test]
async fn one_of_many_gets_a_lease() {
    let scene = Scene::new();
    let store = scene.store();
    put(&store, "queues/q/pending/t/task.json", "{}").await.map(drop).unwrap();
    let name = key("queues/q/pending/t/lease.json");
    let create = || Write::when(When::Absent, Proof::Bytes).durability(Durability::Volatile);
    let mut claims = tokio::task::JoinSet::new();
    for n in 0..16 {
        let (store, name, write) = (scene.store(), name.clone(), create());
        claims.spawn(async move { store.put(&name, format!("{n}").into(), write).await.unwrap() });
    }
    let stored = claims.join_all().await;
    let mut stored = stored.into_iter().filter_map(|put| match put {
        Put::Stored(version) => Some(version),
        _ => None,
    });
    let version = stored.next().unwrap();
    assert_eq!(stored.next(), None);
    assert_eq!(store.get(&name).await.unwrap().unwrap().meta.version, version);
    // A folder in its place, and none where it should be: as with every other object.
    let other = key("queues/q/pending/u/lease.json");
    fs::create_dir_all(scene.dir().join(other.as_str())).unwrap();
    assert!(matches!(store.put(&other, "x".into(), create()).await.unwrap(), Put::Stored(_)));
    let lone = key("queues/q/pending/v/lease.json");
    assert!(matches!(store.put(&lone, "x".into(), create()).await.unwrap(), Put::Stored(_)));
    assert_eq!(names(&store, "queues/q/pending/v").await, [lone.as_str()]);
}

/// Hard links of one file are objects like any other.
#[tokio::test]
async fn one_body_becomes_many_objects() {
    let scene = Scene::new();
    let store = scene.store();
    let backend = store.backend();
    let lease = |id: &str| key(&format!("queues/q/pending/{id}/lease.json"));
    for id in ["a", "b", "c", "d"] {
        let task = format!("queues/q/pending/{id}/task.json");
        put(&store, &task, "{}").await.map(drop).unwrap();
    }
    let drafts = || {
        fs::read_dir(scene.dir().join(".lh/tmp"))
            .unwrap()
            .flatten()
            .flat_map(|folder| fs::read_dir(folder.path()).unwrap().flatten())
            .count()
    };
    let draft = backend.draft(&"held".into()).unwrap();
    assert_eq!(drafts(), 1);
    for id in ["a", "b", "c"] {
        let Some(Put::Stored(version)) = backend.link(&lease(id), &draft).await.unwrap() else {
            panic!("{id} was not made");
        };
        let found = store.get(&lease(id)).await.unwrap().unwrap();
        assert_eq!((&found.body[..], found.meta.version), (&b"held"[..], version));
    }
    // One that is there stays as it is, and a folder is not made for it.
    put(&store, lease("d").as_str(), "other").await.map(drop).unwrap();
    assert!(matches!(backend.link(&lease("d"), &draft).await, Ok(Some(Put::Refused))));
    // Where it is there already, that was us: somebody asked again because no answer came.
    assert!(matches!(backend.link(&lease("a"), &draft).await, Ok(Some(Put::Stored(_)))));
    assert!(matches!(backend.link(&lease("nowhere"), &draft).await, Ok(None)));
    assert!(!scene.dir().join("queues/q/pending/nowhere").exists());
    // Each goes its own way.
    let version = store.head(&lease("a")).await.unwrap().unwrap().version;
    let renewed = Write::when(When::Matches(version.clone()), Proof::Bytes);
    assert!(matches!(
        store.put(&lease("a"), "renewed".into(), renewed).await.unwrap(),
        Put::Stored(_)
    ));
    assert!(matches!(store.delete_version(&lease("b"), &version).await.unwrap(), Delete::Deleted));
    assert_eq!(store.get(&lease("c")).await.unwrap().unwrap().body, "held");
    drop(draft);
    assert_eq!(drafts(), 0);
    assert_eq!(store.get(&lease("c")).await.unwrap().unwrap().body, "held");
}

/// A lease that is a link is removed with its task unless it is another one by now.
#[tokio::test]
async fn a_linked_lease_that_was_changed_stays() {
    let scene = Scene::new();
    let store = scene.store();
    let backend = store.backend();
    let other = scene.dir().join("other");
    // What became of the lease, and whether it is ours still.
    type Change<'a> = &'a dyn Fn(&std::path::Path);
    let written = |path: &std::path::Path| fs::write(path, "hers").unwrap();
    let replaced = |path: &std::path::Path| {
        fs::write(&other, "hers").unwrap();
        fs::rename(&other, path).unwrap();
    };
    let copied = |path: &std::path::Path| {
        fs::write(&other, "ours").unwrap();
        fs::rename(&other, path).unwrap();
    };
    let gone = |path: &std::path::Path| fs::remove_file(path).unwrap();
    // More drafts than are remembered: they do no harm.
    let forgotten = |_: &std::path::Path| {
        (0..9).for_each(|n| drop(backend.draft(&format!("other {n}").into())));
    };
    let changes: [(&str, Change<'_>, bool); 6] = [
        ("nothing", &|_| {}, true),
        ("written", &written, false),
        ("replaced", &replaced, false),
        ("copied", &copied, true),
        ("gone", &gone, false),
        ("forgotten", &forgotten, true),
    ];
    for (name, change, ours) in changes {
        let (task, lease) = (
            format!("queues/q/pending/{name}/task.json"),
            format!("queues/q/pending/{name}/lease.json"),
        );
        put(&store, &task, "{}").await.map(drop).unwrap();
        let version = store.head(&key(&task)).await.unwrap().unwrap().version;
        let draft = backend.draft(&"ours".into()).unwrap();
        let Some(Put::Stored(ours_version)) = backend.link(&key(&lease), &draft).await.unwrap()
        else {
            panic!("{name} was not made");
        };
        // Times are coarse, and who takes a lease over does so after its ttl.
        tokio::time::sleep(Duration::from_millis(20)).await;
        change(&scene.dir().join(&lease));
        let (task, lease) = (key(&task), key(&lease));
        let removed = backend.finish((&task, &version), (&lease, &ours_version), 7).await.unwrap();
        let (work, held) = removed.unwrap();
        assert!(matches!(work, Delete::Deleted), "{name}");
        assert_eq!(matches!(held, Delete::Deleted), ours, "{name}");
        let there = store.get(&lease).await.unwrap().map(|lease| lease.body);
        let hers = (!ours && name != "gone").then_some("hers".into());
        assert_eq!(there, hers, "{name}");
    }
}

/// Somebody holds the stripe lock and does not let go: the error says who.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stuck_process_is_named_and_does_not_block_others() {
    let scene = Scene::new();
    let store = scene.store();
    put(&store, "a", "x").await.map(drop).unwrap();
    let locks = scene.dir().join(".lh/locks");
    let held: Vec<fs::File> = (0..64)
        .map(|n| {
            let file = fs::File::create(locks.join(format!("{n:02}"))).unwrap();
            file.lock().unwrap();
            file
        })
        .collect();
    let waiting = tokio::spawn({
        let store = store.clone();
        async move { put(&store, "a", "y").await }
    });
    // Creating needs no lock, and reading neither.
    let create = Write::when(When::Absent, Proof::Bytes).durability(Durability::Volatile);
    let created = store.put(&key("b"), "new".into(), create).await.unwrap();
    assert!(matches!(created, Put::Stored(_)));
    assert_eq!(store.get(&key("a")).await.unwrap().unwrap().body, "x");
    let error = waiting.await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    let me = format!("process {}", std::process::id());
    assert!(error.to_string().contains(&me), "{error}");
    assert_eq!(leasehold_testkit::temporary_files(&scene.dir()), 0);
    drop(held);
    put(&store, "a", "y").await.map(drop).unwrap();
}

/// Lock files are never deleted by us; if somebody else does, nobody locks a dead one.
#[tokio::test]
async fn removed_lock_files_are_made_again() {
    let scene = Scene::new();
    let (first, second) = (scene.store(), scene.store());
    put(&first, "a", "1").await.map(drop).unwrap();
    put(&second, "a", "2").await.map(drop).unwrap();
    for entry in fs::read_dir(scene.dir().join(".lh/locks")).unwrap() {
        fs::remove_file(entry.unwrap().path()).unwrap();
    }
    put(&first, "a", "3").await.map(drop).unwrap();
    put(&second, "a", "4").await.map(drop).unwrap();
    assert_eq!(fs::read_dir(scene.dir().join(".lh/locks")).unwrap().count(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn concurrent_durable_writes_all_arrive() {
    let scene = Scene::new();
    let store = scene.store();
    let writers = (0..16).map(|writer| {
        let store = store.clone();
        tokio::spawn(async move {
            for n in 0..20 {
                let key = key(&format!("d/{writer}/{n}"));
                let write = Write::when(When::Absent, Proof::Bytes);
                let put = store.put(&key, "durable".into(), write).await.unwrap();
                assert!(matches!(put, Put::Stored(_)));
            }
        })
    });
    for writer in futures::future::join_all(writers).await {
        writer.unwrap();
    }
    assert_eq!(names(&store, "d/").await.len(), 320);
    assert_eq!(leasehold_testkit::temporary_files(&scene.dir()), 0);
}

#[tokio::test]
async fn large_objects_have_versions_too() {
    let scene = Scene::new();
    let store = scene.store();
    let large = key("large");
    let body = bytes::Bytes::from(vec![1; 17 << 20]);
    let mut version = None;
    for _ in 0..3 {
        let when = version.map_or(When::Absent, When::Matches);
        let write = Write::when(when.clone(), Proof::Bytes).durability(Durability::Volatile);
        let Put::Stored(stored) = store.put(&large, body.clone(), write.clone()).await.unwrap()
        else {
            panic!("not stored")
        };
        assert_eq!(store.head(&large).await.unwrap().unwrap().version, stored);
        assert!(matches!(store.put(&large, body.clone(), write).await.unwrap(), Put::Refused));
        version = Some(stored);
    }
}

/// Long segments are cut into folders, and still listed in order among their neighbours.
#[tokio::test]
async fn long_segments_are_listed_in_order() {
    let scene = Scene::new();
    let store = scene.store();
    let stem = "s".repeat(200);
    let mut all: Vec<String> = ["", "!", "/x", "0", "zz", "é"]
        .iter()
        .map(|end| format!("long/{stem}{end}"))
        .chain([format!("long/{}", "s".repeat(199)), format!("long/{}", "s".repeat(900))])
        // The stem itself cannot be both an object and a directory.
        .filter(|name| *name != format!("long/{stem}"))
        .collect();
    for name in &all {
        put(&store, name, "x").await.map(drop).unwrap();
    }
    all.sort();
    assert_eq!(names(&store, "long/").await, all);
    let after = List::prefix("long/").unwrap().start_after(&all[2]).detail(Detail::Version);
    let rest = store.list(after).collect().await.unwrap();
    assert_eq!(rest.entries.len(), all.len() - 3);
    for name in &all {
        store.delete(&key(name)).await.map(drop).unwrap();
    }
    assert_eq!(names(&store, "long/").await, Vec::<String>::new());
}

/// A folder of more names than are kept of one reading is listed in order all the same, each name
/// once, folders and long segments among them; and what has no business there is counted once.
#[tokio::test]
async fn large_folders_are_listed_in_order() {
    let scene = Scene::new();
    let store = scene.store();
    put(&store, "many/first", "x").await.map(drop).unwrap();
    let folder = scene.dir().join("many");
    let stem = "s".repeat(300);
    let mut all = vec!["many/first".to_owned()];
    for n in 0..16_000_u32 {
        let name = format!("{:08x}", n.wrapping_mul(2_654_435_761));
        match n % 4_000 {
            0 => {
                for name in [format!("{name}/below"), format!("{name}{stem}")] {
                    put(&store, &format!("many/{name}"), "x").await.map(drop).unwrap();
                    all.push(format!("many/{name}"));
                }
            }
            n if n % 2 == 0 => {
                std::fs::write(folder.join(&name), "").unwrap();
                all.push(format!("many/{name}"));
            }
            // Stands among the names, and is not listed.
            _ => std::fs::create_dir(folder.join(&name)).unwrap(),
        }
    }
    std::os::unix::fs::symlink("first", folder.join("link")).unwrap();
    all.sort();
    let list = || List::prefix("many/").unwrap();
    let listed = async |list: List| {
        let page = store.list(list).collect().await.unwrap();
        let keys: Vec<String> = page.entries.iter().map(|entry| entry.key.to_string()).collect();
        (keys, page.prefixes, page.unnamed)
    };
    let (keys, _, unnamed) = listed(list()).await;
    assert!(keys == all && unnamed == 1, "{} of {}, {unnamed}", keys.len(), all.len());
    // As many names as are wanted are kept at first, and every other one is a folder.
    let (keys, _, unnamed) = listed(list().limit(7_000)).await;
    assert!(keys == all[..7_000] && unnamed == 1, "{} of 7,000, {unnamed}", keys.len());
    let (keys, _, _) = listed(list().limit(7_000).start_after(&all[100])).await;
    assert!(keys == all[101..7_101], "{} of 7,000", keys.len());
    let (mut keys, prefixes, _) = listed(list().limit(7_000).delimited()).await;
    let folders = prefixes.len();
    keys.extend(prefixes.into_iter().map(|prefix| format!("{prefix}below")));
    keys.sort();
    assert!(keys == all[..7_000] && folders > 1, "{} of 7,000, {folders} folders", keys.len());
}

/// A segment cut into folders leaves no tail that means something else.
#[tokio::test]
async fn long_segments_with_odd_tails_are_objects_like_any_other() {
    let scene = Scene::new();
    let store = scene.store();
    let mut all: Vec<String> =
        [".", "..", ".lh", "x"].map(|tail| format!("{}{tail}", "s".repeat(200))).into();
    for name in &all {
        put(&store, name, "x").await.map(drop).unwrap();
        assert_eq!(store.get(&key(name)).await.unwrap().unwrap().body, "x", "{name}");
    }
    all.push("leasehold.json".to_owned());
    all.sort();
    assert_eq!(names(&store, "").await, all);
}

/// No key leads out of the store, whatever somebody has put in its way.
#[tokio::test]
async fn symbolic_links_are_not_followed() {
    let scene = Scene::new();
    let store = scene.store();
    put(&store, "a/b", "x").await.map(drop).unwrap();
    let outside = scene.root.path().join("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("secret"), "s").unwrap();
    std::os::unix::fs::symlink(&outside, scene.dir().join("link")).unwrap();
    for durability in [Durability::Volatile, Durability::Durable] {
        let create = Write::when(When::Absent, Proof::Bytes).durability(durability);
        let created = store.put(&key("link/new"), "x".into(), create).await;
        assert_eq!(created.unwrap_err().kind(), ErrorKind::Data);
    }
    assert!(put(&store, "link/secret", "y").await.is_err());
    assert!(store.get(&key("link/secret")).await.is_err());
    assert!(store.delete(&key("link/secret")).await.is_err());
    assert_eq!(names(&store, "link/").await, Vec::<String>::new());
    assert_eq!(fs::read_dir(&outside).unwrap().count(), 1);
    assert_eq!(fs::read(outside.join("secret")).unwrap(), b"s");
}

/// What cannot be opened is no reason to give up flushing for ever.
#[tokio::test]
async fn durable_writes_survive_a_persist_of_nonsense() {
    let scene = Scene::new();
    let store = scene.store();
    put(&store, "a", "x").await.map(drop).unwrap();
    store.persist(&[key("a/b"), key("none/at/all")]).await.unwrap();
    store.put(&key("b"), "x".into(), Write::any()).await.map(drop).unwrap();
}

/// A backup made of hard links keeps removed lock files alive: they are not the locks any more.
#[tokio::test]
async fn a_lock_file_that_lives_on_elsewhere_is_not_the_lock() {
    let scene = Scene::new();
    let first = scene.store();
    put(&first, "a", "1").await.map(drop).unwrap();
    put(&first, "a", "2").await.map(drop).unwrap();
    let locks = scene.dir().join(".lh/locks");
    let kept = scene.root.path().join("kept");
    fs::create_dir(&kept).unwrap();
    for entry in fs::read_dir(&locks).unwrap() {
        let entry = entry.unwrap();
        fs::hard_link(entry.path(), kept.join(entry.file_name())).unwrap();
        fs::remove_file(entry.path()).unwrap();
    }
    // Somebody holds the new lock; whoever still had the old one would not mind.
    let held: Vec<fs::File> = (0..64)
        .map(|n| {
            let file = fs::File::create(locks.join(format!("{n:02}"))).unwrap();
            file.lock().unwrap();
            file
        })
        .collect();
    let waiting = tokio::time::timeout(Duration::from_millis(300), put(&first, "a", "3"));
    assert!(waiting.await.is_err(), "it did not wait for the lock");
    drop(held);
    // And whoever stopped waiting does not write any more.
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(first.get(&key("a")).await.unwrap().unwrap().body, "2");
    put(&first, "a", "4").await.map(drop).unwrap();
}

/// Everything behind a prefix is only looked into as far as it takes to find one object.
#[tokio::test]
async fn limits_cut_what_comes_last() {
    let scene = Scene::new();
    let store = scene.store();
    for name in ["a", "b/1", "c", "d/1", "e"] {
        put(&store, &format!("x/{name}"), "x").await.map(drop).unwrap();
    }
    let list = List::prefix("x/").unwrap().delimited().limit(3);
    let page = store.list(list).collect().await.unwrap();
    let keys: Vec<_> = page.entries.iter().map(|entry| entry.key.as_str()).collect();
    assert_eq!((keys, page.prefixes), (vec!["x/a", "x/c"], vec!["x/b/".to_owned()]));
}
