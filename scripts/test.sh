#!/usr/bin/env bash
# All the tests, from a fresh clone: installs the real servers that they need into .servers/ (once),
# then runs everything. Arguments go to `cargo test`.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/servers.sh
exec cargo test --workspace --locked "$@"
