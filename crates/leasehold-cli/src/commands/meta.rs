//! Commands about the command itself, made from the same definitions as its arguments.

use std::io::Write as _;
use std::path::Path;

use anyhow::Context as _;
use clap::CommandFactory as _;

use crate::args::Args;
use crate::exit::Exit;

/// A completion script.
pub fn completions(shell: clap_complete::Shell) -> anyhow::Result<Exit> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Args::command(), "leasehold", &mut script);
    std::io::stdout().write_all(&script)?;
    Ok(Exit::Done)
}

/// The manual page, or a page per command in this folder.
pub fn man(dir: Option<&Path>) -> anyhow::Result<Exit> {
    if let Some(dir) = dir {
        std::fs::create_dir_all(dir)
            .and_then(|()| clap_mangen::generate_to(Args::command(), dir))
            .with_context(|| format!("cannot write to {}", dir.display()))?;
        return Ok(Exit::Done);
    }
    let mut page = Vec::new();
    clap_mangen::Man::new(Args::command()).render(&mut page)?;
    std::io::stdout().write_all(&page)?;
    Ok(Exit::Done)
}
