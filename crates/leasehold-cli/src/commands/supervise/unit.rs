//! `supervise --print-unit`: a service for systemd.

use std::time::Duration;

use crate::args::Args;
use crate::args::fleet::Supervise;
use crate::config;
use crate::exit::Exit;
use crate::render;

/// How much longer than the drain systemd waits before it kills everything.
const SLACK: Duration = Duration::from_secs(15);

/// Prints the unit that runs this command, with the options that were given.
pub fn print_unit(args: &Args, supervise: &Supervise) -> anyhow::Result<Exit> {
    // What stands in a file is found in the same way by the service, so it need not be written down.
    let mut words = vec![std::env::current_exe()?.display().to_string()];
    words.extend(super::store_words(args)?);
    words.push("supervise".to_owned());
    if let Some(node) = &supervise.node {
        words.push(format!("--node={node}"));
    }
    if let Some(state) = &supervise.state {
        words.push(format!("--state={}", std::path::absolute(state)?.display()));
    }
    words.push(format!("--drain={}", leasehold::settings::format_duration(supervise.drain)));
    let command = words.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" ");
    let environment = environment(|name| std::env::var(name).ok());
    let here = std::env::current_dir()?;
    let node = config::node_name(args, supervise.node.as_deref())?;
    let stop = (supervise.drain + SLACK).as_secs();
    render::line(format_args!(
        "\
# /etc/systemd/system/leasehold.service
# systemctl daemon-reload && systemctl enable --now leasehold
# A change of this node's plan needs no restart; `systemctl reload leasehold` applies it at once.
[Unit]
Description=Leasehold supervisor of node {}
Documentation=man:leasehold(1)
After=network-online.target
Wants=network-online.target
# It is to come back for ever: the network may be away for long.
StartLimitIntervalSec=0

[Service]
Type=notify
ExecStart={command}
ExecReload=/bin/kill -HUP $MAINPID
WorkingDirectory={}
{environment}# Credentials and the like: AWS_ACCESS_KEY_ID=…
EnvironmentFile=-/etc/leasehold.env
Restart=always
RestartSec=5s
# The supervisor is told to end, and tells its processes; what is left after that is killed.
KillMode=mixed
TimeoutStopSec={stop}s
StateDirectory=leasehold
# Commands of tasks run under these too: take out what they cannot live with.
NoNewPrivileges=true
PrivateTmp=true
ProtectKernelTunables=true
ProtectKernelModules=true
ProtectControlGroups=true
RestrictSUIDSGID=true
LockPersonality=true
OOMPolicy=continue

[Install]
WantedBy=multi-user.target",
        escaped(&node),
        escaped(&here.display().to_string()),
    ))?;
    Ok(Exit::Done)
}

/// What commands here are told by their environment, and the service would not be. No secrets: anybody may
/// read a unit.
const VARIABLES: &[&str] = &[
    "LEASEHOLD_STORE",
    "LEASEHOLD_NODE",
    "LEASEHOLD_STATE",
    "LEASEHOLD_REPLICA",
    "LEASEHOLD_CONFIG",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_PROFILE",
    "AWS_CONFIG_FILE",
    "AWS_SHARED_CREDENTIALS_FILE",
    "AZURE_STORAGE_ENDPOINT",
    "AZURE_STORAGE_ACCOUNT",
    "AZURE_STORAGE_ACCOUNT_NAME",
    "STORAGE_EMULATOR_HOST",
    "GOOGLE_APPLICATION_CREDENTIALS",
];

fn environment(variable: impl Fn(&str) -> Option<String>) -> String {
    let given = VARIABLES.iter().filter_map(|name| Some((name, variable(name)?)));
    given
        .filter(|(_, value)| !value.is_empty())
        .map(|(name, value)| {
            let value = escaped(&value).replace('\\', "\\\\").replace('"', "\\\"");
            format!("Environment=\"{name}={}\"\n", value.replace('\n', "\\n"))
        })
        .collect()
}

/// A word of a command line, for systemd.
fn quoted(word: &str) -> String {
    let word = escaped(word).replace('$', "$$");
    match word.is_empty() || word.contains([' ', '\t', '\n', '"', '\'', '\\', ';']) {
        true => {
            format!("\"{}\"", word.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n"))
        }
        false => word,
    }
}

/// Percent signs mean something there.
fn escaped(text: &str) -> String {
    text.replace('%', "%%")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_survive_systemd() {
        for (word, text) in [
            ("plain", "plain"),
            ("a b", "\"a b\""),
            ("50%", "50%%"),
            ("$HOME", "$$HOME"),
            ("say \"x\"", "\"say \\\"x\\\"\""),
            ("", "\"\""),
        ] {
            assert_eq!(quoted(word), text);
        }
    }

    #[test]
    fn the_environment_goes_along_without_secrets() {
        let given = |name: &str| match name {
            "LEASEHOLD_STORE" => Some("s3://b/50% \"x\"".to_owned()),
            "AWS_REGION" => Some("eu-west-1".to_owned()),
            "LEASEHOLD_NODE" => Some(String::new()),
            "AWS_ACCESS_KEY_ID" | "AWS_SECRET_ACCESS_KEY" => Some("secret".to_owned()),
            _ => None,
        };
        let expected = "Environment=\"LEASEHOLD_STORE=s3://b/50%% \\\"x\\\"\"\n\
                        Environment=\"AWS_REGION=eu-west-1\"\n";
        assert_eq!(environment(given), expected);
    }
}
