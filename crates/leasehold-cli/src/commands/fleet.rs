//! `leasehold fleet …`: the plan that says what each node runs.

use std::io::Read as _;
use std::path::Path;

use anyhow::Context as _;
use leasehold::fleet::{self, PlanText, Spelling};
use leasehold::protocol::format::fleet::Fleet;
use leasehold::protocol::supervise::processes;
use leasehold::{Error, ErrorKind, Store};
use serde_json::json;

use crate::args::Args;
use crate::args::fleet::FleetCommand;
use crate::exit::{Ending, Exit};
use crate::render;

/// The plan in a text, or what is wrong with it.
pub fn parse(text: &str, spelling: Spelling) -> leasehold::Result<Fleet> {
    let fleet: Result<Fleet, String> = match spelling {
        Spelling::Toml => toml::from_str(text).map_err(|error| error.to_string()),
        Spelling::Json => serde_json::from_str(text).map_err(|error| error.to_string()),
    };
    let checked = fleet.and_then(|fleet| fleet.checked().map_err(|error| error.to_string()));
    checked.map_err(|error| {
        Error::new(ErrorKind::Invalid, format!("the plan is not right: {}", error.trim_end()))
    })
}

/// Does what was asked of a store.
pub async fn run(args: &Args, store: &Store, command: &FleetCommand) -> anyhow::Result<Ending> {
    match command {
        FleetCommand::Show { node } => show(args, store, node.as_deref()).await,
        FleetCommand::Check { file } => check(args, file).map(Ending::from),
        FleetCommand::Set { file } => {
            let (text, spelling) = read(file)?;
            let plan = parse(&text, spelling)?;
            match fleet::set(store, spelling, &text).await? {
                Some(version) => tell(args, &plan, Some(version.as_str()))?,
                None => {
                    render::say(
                        "somebody else changed the plan at the same time: look, and try again",
                    );
                    return Ok(Exit::Refused.into());
                }
            }
            Ok(Exit::Done.into())
        }
    }
}

/// `leasehold fleet check`, which needs no store.
pub fn check(args: &Args, file: &Path) -> anyhow::Result<Exit> {
    let (text, spelling) = read(file)?;
    tell(args, &parse(&text, spelling)?, None)?;
    Ok(Exit::Done)
}

fn read(file: &Path) -> anyhow::Result<(String, Spelling)> {
    let mut text = String::new();
    if file == Path::new("-") {
        std::io::stdin().read_to_string(&mut text).context("cannot read standard input")?;
        let spelling = match text.trim_start().starts_with('{') {
            true => Spelling::Json,
            false => Spelling::Toml,
        };
        return Ok((text, spelling));
    }
    text = std::fs::read_to_string(file)
        .with_context(|| format!("cannot read the plan {}", file.display()))?;
    let is_json = file.extension().is_some_and(|end| end.eq_ignore_ascii_case("json"));
    Ok((text, if is_json { Spelling::Json } else { Spelling::Toml }))
}

fn tell(args: &Args, plan: &Fleet, version: Option<&str>) -> anyhow::Result<()> {
    if args.json {
        return render::json(&json!({ "version": version, "plan": plan }));
    }
    if args.quiet {
        return Ok(());
    }
    for entry in &plan.node {
        let workers: u32 = entry.worker.iter().map(|worker| worker.count).sum();
        let compilers: u32 = entry.compiler.iter().map(|compiler| compiler.count).sum();
        render::line(format_args!(
            "{}: {workers} workers, {compilers} compilers",
            entry.name.all().join(", ")
        ))?;
    }
    render::line(match version {
        Some(_) => "this is the fleet's plan now: nodes carry it out within a minute",
        None => "this plan can be carried out",
    })
}

async fn show(args: &Args, store: &Store, node: Option<&str>) -> anyhow::Result<Ending> {
    let there = match fleet::look(store, None).await {
        Ok(Some(there)) => there,
        Ok(None) => return Ok(Exit::NotFound.into()),
        Err(error) if error.kind() == ErrorKind::Invalid => {
            render::say(error);
            return Ok(Exit::NotFound.into());
        }
        Err(error) => return Err(error.into()),
    };
    let PlanText { text, spelling, version } = &there;
    let Some(node) = node else {
        match args.json {
            true => {
                let plan = parse(text, *spelling)?;
                render::json(&json!({ "version": version.as_str(), "plan": plan }))?;
            }
            // As it is, comments and all, so that it can be edited and set again.
            false => render::line(text.trim_end())?,
        }
        return Ok(Exit::Done.into());
    };
    let plan = parse(text, *spelling)?;
    let Some(plan) = plan.plan_of(node) else {
        render::say(format_args!("{node}: no entry of the plan matches this name"));
        return Ok(Exit::NotFound.into());
    };
    for process in processes(plan) {
        match args.json {
            true => render::json(&json!({
                "role": process.role.word(), "of": process.of, "command": process.words,
                "env": process.env,
            }))?,
            false => render::line(format_args!("leasehold {}", shell_words(&process.words)))?,
        }
    }
    Ok(Exit::Done.into())
}

/// Words as one would type them.
pub fn shell_words(words: &[String]) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=,:@%+{}".contains(c);
    let quoted = words.iter().map(|word| match !word.is_empty() && word.chars().all(plain) {
        true => word.clone(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    });
    quoted.collect::<Vec<_>>().join(" ")
}
