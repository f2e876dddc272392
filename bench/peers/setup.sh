#!/usr/bin/env bash
# Fetches what users would pick instead of Leasehold into .peers/ (or $LEASEHOLD_PEERS), for benchmarks
# beside it: `leasehold-bench locks --peers`. Nothing is installed into the system: Debian packages are
# unpacked, Python's and npm's go into folders of their own.
#
# Silent and immediate when everything is there. Each part writes its stamp last, so an interrupted run is
# repaired by the next one, and a changed pin fetches that part anew. A new peer is a pin and a word in one
# of the three lists; who runs it is bench/src/peers.rs.
set -euo pipefail

# Debian's own packages: the distribution pins their versions; .peers/debs/.stamp says which they are.
debs=(redis-server redis-tools postgresql-15 beanstalkd)
python=(filelock==4.2.10 redis==8.1.0 'psycopg[binary]==3.3.8' greenstalk==2.1.1)
npm=(proper-lockfile@4.1.2)

dir=${LEASEHOLD_PEERS:-$(dirname -- "${BASH_SOURCE[0]}")/../../.peers}
mkdir -p "$dir"
dir=$(cd -- "$dir" && pwd)

# Two runs that start together fetch once.
exec 9>"$dir/.lock"
flock 9

log=$dir/setup.log
quietly() {
  if ! "$@" >"$log" 2>&1 </dev/null; then
    cat "$log" >&2
    echo "peers: failed: $*" >&2
    exit 1
  fi
}

# part NAME PINS: whether this part has to be fetched; empties its folder if so. The path counts too, since a
# venv does not survive being moved.
part() {
  local stamp=$dir/$1/.stamp
  if [[ -f $stamp && "$(head -n 1 "$stamp")" == "$dir $2" ]]; then return 1; fi
  rm -rf "${dir:?}/$1"
  mkdir -p "$dir/$1"
}
done_with() { { echo "$dir $2"; shift 2; printf '%s\n' "$@"; } >"$dir/$1/.stamp"; }

if part debs "${debs[*]}"; then
  command -v apt-get >/dev/null || { echo "peers: needs apt-get for ${debs[*]}" >&2; exit 1; }
  mkdir -p "$dir/debs/archives/partial" "$dir/debs/root"
  # By name also where the system has them already, and from the rest of the world only what it lacks.
  (cd "$dir/debs/archives" && quietly apt-get download "${debs[@]}")
  quietly apt-get install -y --no-install-recommends --download-only \
    -o Dir::Cache::archives="$dir/debs/archives" "${debs[@]}"
  for deb in "$dir"/debs/archives/*.deb; do quietly dpkg -x "$deb" "$dir/debs/root"; done
  done_with debs "${debs[*]}" "$dir"/debs/archives/*.deb
  echo "fetched ${debs[*]}"
fi

if part venv "${python[*]}"; then
  quietly python3 -m venv "$dir/venv"
  quietly "$dir/venv/bin/python3" -m pip install --disable-pip-version-check --no-input "${python[@]}"
  done_with venv "${python[*]}"
  echo "fetched ${python[*]}"
fi

if part npm "${npm[*]}"; then
  quietly npm install --prefix "$dir/npm" --no-save --no-audit --no-fund "${npm[@]}"
  done_with npm "${npm[*]}"
  echo "fetched ${npm[*]}"
fi

rm -f "$log"
