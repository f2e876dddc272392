#!/usr/bin/env python3
"""Queues that are used from Python, played for the benchmark: see bench/src/queue/player.rs for what is said
on standard input and output. What a server flushes is said to it where it is started.

    queues.py PEER DIR      PEER is a name in PEERS below
"""

import os
import sys
import time

PAYLOAD = "x" * 200


class Postgres:
    """A table, as everybody does it: SKIP LOCKED to claim, DELETE to ack; synchronous_commit is on."""

    def __init__(self):
        import psycopg

        dsn = f"host=127.0.0.1 port={os.environ['PORT']} user=postgres dbname=postgres"
        self.session = psycopg.connect(dsn, autocommit=True)
        self.session.prepare_threshold = 1

    def reset(self):
        run = self.session.execute
        run("drop table if exists q")
        run("create table q(id bigserial primary key, data text, status char default 'p', lease_until timestamptz)")
        run("create index on q(id) where status = 'p'")

    def push(self):
        self.session.execute("insert into q(data) values (%s)", (PAYLOAD,))

    def claim(self):
        row = self.session.execute(
            "update q set status = 'r', lease_until = now() + interval '5 min' where id = (select id from q"
            " where status = 'p' order by id for update skip locked limit 1) returning id, data"
        ).fetchone()
        return row and row[0]

    def ack(self, task):
        self.session.execute("delete from q where id = %s", (task,))


class Beanstalkd:
    def __init__(self):
        import greenstalk

        self.client = greenstalk.Client(("127.0.0.1", int(os.environ["PORT"])))
        self.nothing = greenstalk.TimedOutError

    def reset(self):
        while task := self.claim():
            self.ack(task)

    def push(self):
        self.client.put(PAYLOAD)

    def claim(self):
        try:
            return self.client.reserve(timeout=0)
        except self.nothing:
            return None

    def ack(self, task):
        self.client.delete(task)


class Redis:
    """A list, and a list per worker of what it holds: LMOVE to claim, LREM to ack."""

    def __init__(self):
        import redis

        self.server = redis.Redis(host="127.0.0.1", port=int(os.environ["PORT"]))
        self.mine = f"held-by-{os.getpid()}"

    def reset(self):
        self.server.flushall()

    def push(self):
        self.server.lpush("q", PAYLOAD)

    def claim(self):
        return self.server.lmove("q", self.mine, "RIGHT", "LEFT")

    def ack(self, task):
        self.server.lrem(self.mine, 1, task)


class Huey:
    """The storages of huey: to take a task is to remove it, so a worker that dies loses it."""

    def __init__(self, storage, path, **options):
        import huey.storage

        self.path = path
        self.storage = getattr(huey.storage, storage)("q", path, **options)

    def reset(self):
        self.storage.flush_queue()

    def push(self):
        self.storage.enqueue(PAYLOAD.encode())

    def claim(self):
        return self.storage.dequeue()

    def ack(self, task):
        pass


PEERS = {
    "postgres": lambda folder: Postgres(),
    "beanstalkd": lambda folder: Beanstalkd(),
    "redis": lambda folder: Redis(),
    "huey-file": lambda folder: Huey("FileStorage", f"{folder}/huey"),
    "huey-sqlite": lambda folder: Huey("SqliteStorage", f"{folder}/huey.db", timeout=60, fsync=True),
}


def drain(queue):
    done, last = 0, 0
    while task := queue.claim():
        queue.ack(task)
        done, last = done + 1, time.monotonic_ns()
    return f"{done} {last}"


def main():
    queue = PEERS[sys.argv[1]](sys.argv[2])
    print("ready", flush=True)
    for line in sys.stdin:
        match line.split():
            case ["reset"]:
                queue.reset()
                answer = 0
            case ["push", count]:
                for _ in range(int(count)):
                    queue.push()
                answer = count
            case ["drain"]:
                answer = drain(queue)
            case _:
                sys.exit(f"not understood: {line}")
        print(answer, flush=True)


main()
