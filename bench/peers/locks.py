#!/usr/bin/env python3
"""Locks that are used from Python, played for the benchmark: see bench/src/peers/mod.rs for what is said on
standard input and output.

    locks.py PEER DIR      PEER is a name in PEERS below
"""

import fcntl
import json
import os
import sys
import time

TOKEN = os.urandom(8).hex()


# Each makes (take, release). `take` waits. Where a pause between two tries can be chosen it is 1 ms: with its
# default of 50 ms, filelock would be four to ten times slower in a crowd.
def flock(folder):
    path, held = f"{folder}/flock", {}

    def take():
        held["file"] = os.open(path, os.O_CREAT | os.O_RDWR)
        fcntl.flock(held["file"], fcntl.LOCK_EX)

    return take, lambda: os.close(held["file"])


def file_lock(folder):
    import filelock

    lock = filelock.FileLock(f"{folder}/file.lock")
    return lambda: lock.acquire(poll_interval=0.001), lock.release


def soft_file_lock(folder):
    import filelock

    lock = filelock.SoftFileLock(f"{folder}/soft.lock")
    return lambda: lock.acquire(poll_interval=0.001), lock.release


def redis_set_nx(_):
    import redis

    server = redis.Redis(host="127.0.0.1", port=int(os.environ["PORT"]))
    # Only what is ours: the usual way to release it.
    drop = server.register_script(
        "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) else return 0 end"
    )

    def take():
        while not server.set("lock", TOKEN, nx=True, px=10_000):
            time.sleep(0.001)

    return take, lambda: drop(keys=["lock"], args=[TOKEN])


def postgres_advisory(_):
    import psycopg

    dsn = f"host=127.0.0.1 port={os.environ['PORT']} user=postgres dbname=postgres"
    session = psycopg.connect(dsn, autocommit=True)
    session.prepare_threshold = 1
    return (
        lambda: session.execute("select pg_advisory_lock(4242)").fetchone(),
        lambda: session.execute("select pg_advisory_unlock(4242)").fetchone(),
    )


PEERS = {
    "flock": flock,
    "filelock": file_lock,
    "soft-filelock": soft_file_lock,
    "redis": redis_set_nx,
    "postgres": postgres_advisory,
}


def rate(take, release, seconds):
    start, done = time.perf_counter(), 0
    while True:
        take()
        release()
        done += 1
        spent = time.perf_counter() - start
        if spent >= seconds:
            return done / spent


def count(take, release, path, total):
    share = 0
    while True:
        take()
        try:
            with open(path) as file:
                value = json.load(file)
            if value["counter"] >= total:
                return share
            value["counter"] += 1
            with open(path, "w") as file:
                json.dump(value, file)
            share += 1
        finally:
            release()


def main():
    peer, folder = sys.argv[1:]
    take, release = PEERS[peer](folder)
    print("ready", flush=True)
    for line in sys.stdin:
        match line.split():
            case ["rate", seconds]:
                answer = rate(take, release, float(seconds))
            case ["count", total]:
                answer = count(take, release, f"{folder}/counter.json", int(total))
            case ["take"]:
                take()
                answer = "taken"
            case ["release"]:
                release()
                answer = "released"
            case _:
                sys.exit(f"not understood: {line}")
        print(answer, flush=True)


main()
