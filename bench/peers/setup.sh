#!/usr/bin/env bash
# Fetches what users would pick instead of Leasehold into .peers/ (or $LEASEHOLD_PEERS), for benchmarks
# beside it: `leasehold-bench locks --peers`. Nothing is installed into the system: Debian packages are
# unpacked, Python's and npm's go into folders of their own.
#
# Silent and immediate when everything is there. Each part writes its stamp last, so an interrupted run is
# repaired by the next one, and a changed pin fetches that part anew. What cannot be fetched is no error: the
# part's .missing says why, the benchmarks report it, and the next run tries again. A new peer is a pin and a word
# in one of the three lists; who runs it is bench/src/peers/.
set -euo pipefail

# Debian's own packages: the distribution pins their versions; .peers/debs/.stamp says which they are.
debs=(redis-server redis-tools postgresql-15 beanstalkd)
python=(filelock==4.2.10 redis==8.1.0 'psycopg[binary]==3.3.8' greenstalk==2.1.1 huey==3.5.4
  duckdb==2.0.0 rocksdict==0.3.29 lmdb==3.0.0)
npm=(proper-lockfile@4.1.2)

dir=${LEASEHOLD_PEERS:-$(dirname -- "${BASH_SOURCE[0]}")/../../.peers}
mkdir -p "$dir"
dir=$(cd -- "$dir" && pwd)

# Two runs that start together fetch once.
exec 9>"$dir/.lock"
flock 9

log=$dir/setup.log
quietly() { "$@" >>"$log" 2>&1 </dev/null; }

# part NAME PINS...: fetches it by fetch_NAME unless its stamp says that it is there. The path counts too, since a
# venv does not survive being moved.
part() {
  local name=$1 stamp=$dir/$1/.stamp
  shift
  if [[ -f $stamp && "$(head -n 1 "$stamp")" == "$dir $*" ]]; then return; fi
  rm -rf "${dir:?}/$name"
  mkdir -p "$dir/$name"
  : >"$log"
  if "fetch_$name" "$@"; then
    { echo "$dir $*"; cd "$dir/$name" && "versions_$name"; } >"$dir/.new-stamp"
    mv "$dir/.new-stamp" "$stamp"
    echo "fetched $*"
  else
    { echo "could not be fetched: $*"; tail -n 3 "$log"; } >"$dir/$name/.missing"
    cat "$dir/$name/.missing" >&2
  fi
}

fetch_debs() {
  command -v apt-get >/dev/null || { echo "there is no apt-get here" >>"$log"; return 1; }
  mkdir -p "$dir/debs/archives/partial" "$dir/debs/root"
  # By name also where the system has them already, and from the rest of the world only what it lacks.
  (cd "$dir/debs/archives" && quietly apt-get download "$@") || return 1
  quietly apt-get install -y --no-install-recommends --download-only \
    -o Dir::Cache::archives="$dir/debs/archives" "$@" || return 1
  for deb in "$dir"/debs/archives/*.deb; do quietly dpkg -x "$deb" "$dir/debs/root" || return 1; done
}
versions_debs() { ls archives/*.deb; }

# One after the other: a package that cannot be had here keeps no other away.
fetch_venv() {
  quietly python3 -m venv "$dir/venv" || return 1
  local pin
  for pin in "$@"; do
    quietly "$dir/venv/bin/python3" -m pip install --disable-pip-version-check --no-input "$pin" ||
      echo "peers: $pin could not be installed" >&2
  done
}
versions_venv() { ./bin/python3 -m pip freeze --disable-pip-version-check; }

fetch_npm() {
  command -v npm >/dev/null || { echo "there is no npm here" >>"$log"; return 1; }
  quietly npm install --prefix "$dir/npm" --no-save --no-audit --no-fund "$@"
}
versions_npm() { :; }

part debs "${debs[@]}"
part venv "${python[@]}"
part npm "${npm[@]}"
rm -f "$log"
