//! Every backend passes the same suite: a directory, memory, and real servers.

#![allow(clippy::unwrap_used)] // in a test, a failure is a panic

use std::sync::OnceLock;

use leasehold::store::{Connect, Store, StoreUrl};
use leasehold_testkit::conformance::{Backslash, Traits, on_server};
use leasehold_testkit::conformance_tests;
use leasehold_testkit::servers::Server;

mod memory {
    use super::*;
    conformance_tests!(Store::memory(), Traits::S3);
}

mod directory {
    use super::*;

    fn store() -> Store {
        static ROOT: OnceLock<tempfile::TempDir> = OnceLock::new();
        let root = ROOT.get_or_init(|| tempfile::tempdir().unwrap());
        Connect::new(StoreUrl::Directory(root.path().join("store"))).open().unwrap()
    }

    conformance_tests!(store(), Traits::S3);
}

fn bucket(scheme: &str, server: &Server) -> Store {
    on_server(server, scheme, "fleet/one")
}

mod seaweedfs {
    use super::*;

    fn store() -> Store {
        static SERVER: OnceLock<Server> = OnceLock::new();
        bucket("s3", SERVER.get_or_init(Server::seaweedfs))
    }

    conformance_tests!(
        store(),
        Traits { ordered: false, exact_prefixes: false, backslash: Backslash::Mangled }
    );
}

mod ministack {
    use super::*;

    fn store() -> Store {
        static SERVER: OnceLock<Server> = OnceLock::new();
        bucket("s3", SERVER.get_or_init(Server::ministack))
    }

    conformance_tests!(store(), Traits::S3);
}

mod azurite {
    use super::*;

    fn store() -> Store {
        static SERVER: OnceLock<Server> = OnceLock::new();
        bucket("az", SERVER.get_or_init(Server::azurite))
    }

    conformance_tests!(store(), Traits { backslash: Backslash::Refused, ..Traits::S3 });
}
