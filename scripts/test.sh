#!/usr/bin/env bash
# All the tests, from a fresh clone: installs the real servers that they need into .servers/ (once),
# then runs everything. Arguments go to `cargo test`. The simulator comes last: thousands of seeds,
# and known mistakes that it must notice.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/servers.sh
cargo test --workspace --locked "$@"
exec cargo test --profile sim -p leasehold-sim --features mutants --locked
