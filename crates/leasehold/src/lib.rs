//! Locks, a work queue and a shared index on nothing but a bucket or a plain directory.
//!
//! What is here so far: [`lock`]s with fencing tokens, a work [`queue`], an [`index`] of any number of
//! records and a [`scratchpad`] of shared files, on one [`lease`] protocol, on the ground that
//! everything stands on: [`store`], compare-and-swap objects with one meaning on a directory, in
//! memory, and on S3, GCS and Azure.
//!
//! ```
//! use leasehold::{Key, Proof, Put, Store, When, Write};
//!
//! # async fn tour() -> Result<(), leasehold::Error> {
//! let store = Store::memory();
//! let key = Key::new("hello.txt")?;
//! // Only one of many racing writers creates an object, and the outcome says who. The nonce is how
//! // a writer whose answer got lost recognises its own bytes.
//! let nonce = store.env().nonce();
//! let body = format!("first, by {nonce}");
//! match store.put(&key, body.into(), Write::when(When::Absent, Proof::Nonce(nonce))).await? {
//!     Put::Stored(version) => println!("ours, in version {version}"),
//!     Put::Refused => println!("somebody was faster"),
//!     Put::Contended => println!("others keep writing: try again"),
//!     Put::Unknown(unknown) => println!("no answer: {}", unknown.error()),
//! }
//! # Ok(())
//! # }
//! # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(tour()).unwrap();
//! ```
//!
//! The library reads no environment and no home folder, prints nothing, and takes its clock and
//! its randomness from [`env::Env`].

pub mod env;
pub mod error;
pub mod fleet;
pub mod host;
pub mod index;
pub mod lease;
pub mod lock;
pub mod queue;
pub mod scratchpad;
pub mod settings;
pub mod store;
pub mod sync;

pub use error::{Error, ErrorKind};
pub use leasehold_protocol::cas::{Nonce, Version, When};
pub use leasehold_protocol::key::Key;
pub use leasehold_protocol::settle::Proof;
pub use leasehold_protocol::time::StoreTime;
pub use settings::StoreSettings;
pub use store::{Delete, Durability, Get, List, Meta, Object, Put, Store, Write};

/// The pure part: decisions and formats.
pub use leasehold_protocol as protocol;

/// What most functions here return.
pub type Result<T, E = Error> = std::result::Result<T, E>;
