#!/usr/bin/env bash
# Fuzzes everything that reads stored or typed bytes: scripts/fuzz.sh MINUTES [TARGET…]
# The minutes are shared by the targets, one after the other on one core. Each run is a line in
# docs/fuzzing.md. A finding ends the script; its input is in fuzz/artifacts/.
#
# Works with the stable toolchain: libFuzzer needs coverage instrumentation, which stable rustc can
# do, and no sanitizer, since there is no unsafe code to watch. `cargo fuzz run TARGET` works too.
set -euo pipefail
cd "$(dirname "$0")/.."
minutes=${1:?how many minutes}
shift
targets=("$@")
[ ${#targets[@]} -gt 0 ] || targets=(usv_reader rows merging leases tasks datapackages statistics keys settings journal configuration)
ledger=docs/fuzzing.md
out=${CARGO_TARGET_DIR:-target}/fuzz

flags=(--cfg fuzzing -Cpasses=sancov-module -Ccodegen-units=1)
for arg in level=4 inline-8bit-counters pc-table trace-compares; do
    flags+=("-Cllvm-args=-sanitizer-coverage-$arg")
done
# A target triple of its own keeps the instrumentation out of build scripts and macros.
triple=$(rustc -vV | sed -n 's/^host: //p')
RUSTFLAGS="${flags[*]}" CARGO_TARGET_DIR="$out" \
    cargo build --manifest-path fuzz/Cargo.toml --release --bins --target "$triple" ${LOCKED---locked}

# Where to start from: the frozen bytes of every format.
seeds() {
    case $1 in
        leases) echo golden/lock-*.json golden/lease-*.json ;;
        tasks) echo golden/task-*.json golden/receipt-*.json golden/dead-letter-*.json golden/tasks-*.jsonl ;;
        datapackages) echo golden/datapackage-*.json ;;
        statistics) echo golden/statistics-*.json golden/root-*.json ;;
        settings) echo golden/queue-*.json ;;
    esac
}

seconds=$((minutes * 60 / ${#targets[@]}))
# libFuzzer takes 0 for "for ever".
[ "$seconds" -gt 0 ] || seconds=1
commit=$(git rev-parse --short=10 HEAD)
for target in "${targets[@]}"; do
    corpus=fuzz/corpus/$target
    mkdir -p "$corpus" fuzz/artifacts
    for seed in fuzz/seeds/"$target"/* $(seeds "$target"); do
        [ -f "$seed" ] && cp "$seed" "$corpus/"
    done
    log=$out/$target.log
    dictionary=()
    [ -f fuzz/dictionaries/"$target" ] && dictionary=(-dict=fuzz/dictionaries/"$target")
    # Memory and time are limited, so that an input that takes too much of either is a finding.
    "$out/$triple/release/$target" "$corpus" "${dictionary[@]}" -max_total_time="$seconds" -max_len=2048 \
        -rss_limit_mb=1024 -malloc_limit_mb=64 -timeout=5 -print_final_stats=1 -verbosity=1 \
        -artifact_prefix=fuzz/artifacts/"$target"- >"$log" 2>&1 || {
        tail -40 "$log"
        echo "$target: see fuzz/artifacts/ and $log" >&2
        exit 1
    }
    executions=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
    memory=$(sed -n 's/^stat::peak_rss_mb: *//p' "$log")
    echo "| $(date -u +%F) | $commit | $target | $seconds | $executions | $memory | 0 |" >>"$ledger"
    echo "$target: $executions executions in $seconds s"
done
awk -F'|' '$7 ~ /^ *[0-9]+ *$/ { sum += $6 } END { printf "%d executions in the ledger\n", sum }' "$ledger"
