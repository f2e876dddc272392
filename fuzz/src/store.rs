//! What the journal's records need of the directory store.

pub mod dir {
    pub mod files {
        /// Which file.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub struct FileId {
            pub inode: u64,
            pub born: (i64, u32),
        }
    }
}
