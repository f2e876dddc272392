//! Lost answers: what the driver makes of them, and what that costs.

#![allow(clippy::unwrap_used)] // in a test, a failure is a panic

use std::sync::Arc;
use std::time::Duration;

use leasehold::env::Env;
use leasehold::store::memory::Memory;
use leasehold::store::meter::Usage;
use leasehold::store::{Backend, Delete, Put, Store, Unknown};
use leasehold::{Durability, ErrorKind, Key, Nonce, Proof, StoreSettings, Version, When, Write};
use leasehold_testkit::faulty::{Fault, Faulty};

const OURS: Nonce = Nonce::from_bytes([7; 16]);

struct Scene {
    memory: Arc<Memory>,
    key: Key,
}

impl Scene {
    fn new() -> Self {
        Self { memory: Arc::new(Memory::new(Env::system())), key: Key::new("lease").unwrap() }
    }

    /// What somebody else writes, past all faults.
    async fn others_write(&self, body: &'static str) -> Version {
        let put = self.memory.put(&self.key, body.into(), &When::Any, Durability::Volatile).await;
        match put.unwrap() {
            Put::Stored(version) => version,
            other => panic!("{other:?}"),
        }
    }

    async fn store(&self, writes: &[Fault], reads: &[bool]) -> Store {
        // The root record is made first, so that the faults hit what the test is about.
        let settings = || StoreSettings {
            retry_base: Duration::from_millis(1),
            retry_cap: Duration::from_millis(1),
            attempts: 4,
            ..StoreSettings::default()
        };
        let plain = Store::new(self.memory.clone(), Env::system(), settings()).unwrap();
        plain.init().await.unwrap();
        let reads = std::iter::once(true).chain(reads.iter().copied());
        let faulty = Faulty::writes(self.memory.clone(), writes.iter().copied()).reads(reads);
        let store = Store::new(Arc::new(faulty), Env::system(), settings()).unwrap();
        store.init().await.unwrap();
        store
    }

    async fn put(&self, store: &Store, when: When) -> (Put, Usage) {
        let before = store.usage();
        let body = format!(r#"{{"nonce":"{OURS}"}}"#);
        let write = Write::when(when, Proof::Nonce(OURS));
        let put = store.put(&self.key, body.into(), write).await.unwrap();
        (put, store.usage().since(&before))
    }

    async fn body(&self, store: &Store) -> Option<String> {
        let object = store.get(&self.key).await.unwrap();
        object.map(|object| String::from_utf8(object.body.to_vec()).unwrap())
    }
}

#[tokio::test]
async fn without_faults_a_write_is_one_request() {
    let scene = Scene::new();
    let store = scene.store(&[], &[]).await;
    let (put, usage) = scene.put(&store, When::Absent).await;
    assert!(matches!(put, Put::Stored(_)));
    assert_eq!((usage.put, usage.requests(), usage.retries), (1, 1, 0));
    // A refusal of the first attempt is somebody else's doing: nothing to look up.
    let (put, usage) = scene.put(&store, When::Absent).await;
    assert!(matches!(put, Put::Refused));
    assert_eq!(usage.requests(), 1);
}

/// FIELD.md row 3: the write landed, the answer was lost, and the holder knows that it holds.
#[tokio::test]
async fn a_lost_answer_is_found_by_its_nonce() {
    let scene = Scene::new();
    let store = scene.store(&[Fault::LostAnswer], &[]).await;
    let (put, usage) = scene.put(&store, When::Absent).await;
    assert!(matches!(put, Put::Stored(_)), "{put:?}");
    assert_eq!((usage.put, usage.get, usage.retries), (1, 1, 1));
}

/// The same for a swap, and the version that it returns can be swapped again.
#[tokio::test]
async fn a_lost_swap_is_found_by_its_nonce() {
    let scene = Scene::new();
    let old = scene.others_write("old").await;
    let store = scene.store(&[Fault::LostAnswer], &[]).await;
    let (put, _) = scene.put(&store, When::Matches(old)).await;
    let Put::Stored(version) = put else { panic!("{put:?}") };
    let (put, usage) = scene.put(&store, When::Matches(version)).await;
    assert!(matches!(put, Put::Stored(_)), "{put:?}");
    assert_eq!(usage.requests(), 1);
}

/// FIELD.md row 3, the other way round: the retry is refused by our own first attempt.
#[tokio::test]
async fn a_retry_that_meets_its_own_first_attempt_has_won() {
    let scene = Scene::new();
    let store = scene.store(&[Fault::Delayed], &[]).await;
    let (put, usage) = scene.put(&store, When::Absent).await;
    assert!(matches!(put, Put::Stored(_)), "{put:?}");
    // Sent, not there, sent again, refused, there.
    assert_eq!((usage.get, usage.retries), (2, 1));
}

#[tokio::test]
async fn a_lost_request_is_sent_again() {
    let scene = Scene::new();
    let store = scene.store(&[Fault::LostRequest, Fault::LostRequest], &[]).await;
    let (put, usage) = scene.put(&store, When::Absent).await;
    assert!(matches!(put, Put::Stored(_)), "{put:?}");
    assert_eq!(usage.retries, 2);
}

/// Somebody else's object is there: whether ours was before it, nobody can tell.
#[tokio::test]
async fn somebody_elses_object_is_not_ours_and_not_overwritten() {
    let scene = Scene::new();
    let store = scene.store(&[Fault::LostRequest], &[]).await;
    let version = scene.others_write("theirs").await;
    let (put, _) = scene.put(&store, When::Absent).await;
    assert!(matches!(put, Put::Unknown(Unknown::Overtaken(_))), "{put:?}");
    assert_eq!(scene.body(&store).await.as_deref(), Some("theirs"));
    // And a swap of what is no longer there.
    let store = scene.store(&[Fault::LostRequest], &[]).await;
    scene.others_write("theirs again").await;
    let (put, _) = scene.put(&store, When::Matches(version)).await;
    assert!(matches!(put, Put::Unknown(Unknown::Overtaken(_))), "{put:?}");
    assert_eq!(scene.body(&store).await.as_deref(), Some("theirs again"));
}

/// An unanswered attempt is still under way while later ones are told "others are writing": that
/// it did not apply would be a guess.
#[tokio::test]
async fn doubt_is_not_forgotten() {
    let scene = Scene::new();
    let contended = [Fault::LostAnswer, Fault::Contended, Fault::Contended, Fault::Contended];
    let store = scene.store(&contended, &[]).await;
    let (put, _) = scene.put(&store, When::Absent).await;
    assert!(matches!(put, Put::Stored(_)), "{put:?}");
    let scene = Scene::new();
    let lost = [Fault::LostRequest, Fault::Contended, Fault::Contended, Fault::Contended];
    let store = scene.store(&lost, &[]).await;
    let (put, _) = scene.put(&store, When::Absent).await;
    assert!(matches!(put, Put::Unknown(Unknown::NoAnswer(_))), "{put:?}");
}

/// Also the last attempt is looked for.
#[tokio::test]
async fn the_last_attempt_is_looked_for_too() {
    let scene = Scene::new();
    let lost = [Fault::LostRequest, Fault::LostRequest, Fault::LostRequest, Fault::LostAnswer];
    let store = scene.store(&lost, &[]).await;
    let (put, usage) = scene.put(&store, When::Absent).await;
    assert!(matches!(put, Put::Stored(_)), "{put:?}");
    assert_eq!(usage.retries, 3, "four attempts are allowed");
}

#[tokio::test]
async fn reading_back_is_repeated_too() {
    let scene = Scene::new();
    let store = scene.store(&[Fault::LostAnswer], &[false, false]).await;
    let (put, _) = scene.put(&store, When::Absent).await;
    assert!(matches!(put, Put::Stored(_)), "{put:?}");
}

#[tokio::test]
async fn what_cannot_be_found_out_stays_unknown() {
    let scene = Scene::new();
    let store = scene.store(&[Fault::LostAnswer], &[false; 8]).await;
    let (put, _) = scene.put(&store, When::Absent).await;
    assert!(matches!(put, Put::Unknown(Unknown::NoAnswer(_))), "{put:?}");
    let scene = Scene::new();
    let store = scene.store(&[Fault::LostRequest; 8], &[]).await;
    let (put, usage) = scene.put(&store, When::Any).await;
    assert!(matches!(put, Put::Unknown(Unknown::NoAnswer(_))), "{put:?}");
    assert_eq!(usage.retries, 3, "four attempts are allowed");
}

/// FIELD.md row 4: contention is neither a refusal nor for ever.
#[tokio::test]
async fn contention_is_tried_again_and_then_reported() {
    let scene = Scene::new();
    let store = scene.store(&[Fault::Contended, Fault::Contended], &[]).await;
    let (put, usage) = scene.put(&store, When::Absent).await;
    assert!(matches!(put, Put::Stored(_)), "{put:?}");
    assert_eq!((usage.get, usage.retries), (0, 2));
    let store = scene.store(&[Fault::Contended; 8], &[]).await;
    let (put, _) = scene.put(&store, When::Any).await;
    assert!(matches!(put, Put::Contended), "{put:?}");
}

/// Reading a write back proves nothing about the disk.
#[tokio::test]
async fn a_failed_flush_is_not_settled_by_reading() {
    let scene = Scene::new();
    let store = scene.store(&[Fault::NotFlushed], &[]).await;
    let (put, usage) = scene.put(&store, When::Absent).await;
    assert!(matches!(put, Put::Unknown(Unknown::NotFlushed(_))), "{put:?}");
    assert_eq!(usage.requests(), 1);
}

#[tokio::test]
async fn deletes_are_settled_too() {
    for fault in [Fault::LostAnswer, Fault::LostRequest, Fault::Contended] {
        let scene = Scene::new();
        let version = scene.others_write("doomed").await;
        let store = scene.store(&[fault], &[]).await;
        let delete = store.delete_version(&scene.key, &version).await.unwrap();
        assert!(matches!(delete, Delete::Deleted), "{fault:?}: {delete:?}");
        assert_eq!(scene.body(&store).await, None, "{fault:?}");
    }
    let scene = Scene::new();
    let old = scene.others_write("old").await;
    scene.others_write("new").await;
    let store = scene.store(&[Fault::LostRequest], &[]).await;
    let delete = store.delete_version(&scene.key, &old).await.unwrap();
    assert!(matches!(delete, Delete::Refused), "{delete:?}");
    assert_eq!(scene.body(&store).await.as_deref(), Some("new"));
}

#[tokio::test]
async fn reads_are_repeated_and_then_given_up() {
    let scene = Scene::new();
    scene.others_write("there").await;
    let store = scene.store(&[], &[false, false, false]).await;
    assert_eq!(scene.body(&store).await.as_deref(), Some("there"));
    let store = scene.store(&[], &[false; 4]).await;
    let error = store.get(&scene.key).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
}
