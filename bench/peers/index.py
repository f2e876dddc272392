#!/usr/bin/env python3
"""Databases and engines on the files of the index benchmarks, played for the benchmark:

    index.py PEER DIR      PEER is a name in PEERS below; its database goes to DIR

    (start)           ready
    build INDEX       built       has the records of INDEX/shards; remembers INDEX
    merge             MILLIS      reads INDEX/inbox file by file, merges it and commits
    lookup KEY...     MILLIS      median of single lookups, each key asked for once before
    scan              MILLIS      counts all records by version

Nobody deletes the inbox, which ours does within its time.
"""
import glob
import os
import sqlite3
import statistics
import sys
import time

US = "\x1f"


def records(index):
    for path in sorted(glob.glob(index + "/shards/*.usv")):
        with open(path) as file:
            for line in file:
                yield line.rstrip("\n").split(US)[:4]


def inbox(index):
    rows = []
    for path in glob.glob(index + "/inbox/*/*.usv"):
        with open(path) as file:
            rows += [line.split(US)[:4] for line in file.read().splitlines()]
    return rows


class Sqlite:
    def __init__(self, folder):
        self.database = sqlite3.connect(folder + "/s.db")
        self.run = self.database.execute
        self.run("pragma journal_mode=wal"), self.run("pragma synchronous=normal")
        self.run("pragma cache_size=-262144")

    def build(self, index):
        self.run("create table d(domain text primary key, name text, v int, t text) without rowid")
        self.database.executemany("insert into d values(?,?,?,?)", sorted(records(index)))
        self.database.commit()

    def merge(self, index):
        self.database.executemany(
            "insert into d values(?,?,?,?) on conflict(domain) do update set name = excluded.name, v = excluded.v,"
            " t = excluded.t where excluded.t > d.t",
            sorted(inbox(index)),
        )
        self.database.commit()

    def lookup(self, key):
        return self.run("select * from d where domain = ?", (key,)).fetchone()

    def scan(self):
        return self.run("select v, count(*) from d group by v").fetchall()


class Lmdb:
    def __init__(self, folder):
        import lmdb

        self.env = lmdb.open(folder + "/lmdb", map_size=4 << 30)

    def build(self, index):
        with self.env.begin(write=True) as all:
            for row in sorted(records(index)):
                all.put(row[0].encode(), US.join(row[1:]).encode(), append=True)
        self.reader = self.env.begin()

    def merge(self, index):
        self.reader.abort()
        with self.env.begin(write=True) as all:
            for row in sorted(inbox(index)):
                old = all.get(row[0].encode())
                if old is None or row[3].encode() > bytes(old).rsplit(b"\x1f", 1)[1]:
                    all.put(row[0].encode(), US.join(row[1:]).encode())

    def lookup(self, key):
        return self.reader.get(key.encode())

    def scan(self):
        counts = {}
        for _, value in self.reader.cursor():
            version = bytes(value).split(b"\x1f", 2)[1]
            counts[version] = counts.get(version, 0) + 1
        return counts


class RocksDb:
    def __init__(self, folder):
        from rocksdict import Options, Rdict

        self.database = Rdict(folder + "/rocks", Options(raw_mode=True))

    def build(self, index):
        for row in records(index):
            self.database[row[0].encode()] = US.join(row[1:]).encode()
        self.database.flush()

    def merge(self, index):
        from rocksdict import WriteBatch

        rows, batch = inbox(index), WriteBatch(raw_mode=True)
        keys = [row[0].encode() for row in rows]
        for key, row, old in zip(keys, rows, self.database[keys]):
            if old is None or row[3].encode() > old.rsplit(b"\x1f", 1)[1]:
                batch.put(key, US.join(row[1:]).encode())
        self.database.write(batch), self.database.flush()

    def lookup(self, key):
        return self.database[key.encode()]

    def scan(self):
        counts = {}
        for _, value in self.database.items():
            version = value.split(b"\x1f", 2)[1]
            counts[version] = counts.get(version, 0) + 1
        return counts


class DuckDb:
    """Reads and writes the files as they are."""

    COLUMNS = "{'domain':'VARCHAR','name':'VARCHAR','v':'BIGINT','t':'VARCHAR','d':'BOOLEAN'}"

    def __init__(self, folder):
        import duckdb

        self.out, self.run = folder + "/out", duckdb.connect().execute
        self.run("set threads=2")

    def build(self, index):
        self.index = index

    def read(self, names):
        return (
            f"read_csv('{self.index}/{names}', delim=chr(31), quote='', escape='', header=false, auto_detect=false,"
            f" null_padding=true, columns={self.COLUMNS})"
        )

    def merge(self, _):
        self.run(
            "copy (select domain, name, v, t, d, sha256(domain)[1:2] s from (select * from "
            f"{self.read('shards/*.usv')} union all select * from {self.read('inbox/*/*.usv')})"
            " qualify row_number() over (partition by domain order by t desc) = 1 order by s, domain)"
            f" to '{self.out}' (format csv, delimiter '{US}', header false, quote '', escape '', partition_by (s))"
        )

    def lookup(self, key):
        return self.run(f"select * from {self.read('shards/*.usv')} where domain = ?", [key]).fetchone()

    def scan(self):
        return self.run(f"select v, count(*) from {self.read('shards/*.usv')} group by v").fetchall()


PEERS = {"sqlite": Sqlite, "lmdb": Lmdb, "rocksdb": RocksDb, "duckdb": DuckDb}


def millis(work):
    start = time.perf_counter()
    found = work()
    spent = (time.perf_counter() - start) * 1000
    if found is None:
        sys.exit("a record is missing")
    return spent


def main():
    peer = PEERS[sys.argv[1]](sys.argv[2])
    index = None
    print("ready", flush=True)
    for line in sys.stdin:
        match line.split():
            case ["build", index]:
                peer.build(index)
                os.sync()
                answer = "built"
            case ["merge"]:
                answer = millis(lambda: peer.merge(index) or True)
            case ["lookup", *keys]:
                # DuckDB reads everything for each.
                keys = keys[:3] if isinstance(peer, DuckDb) else keys
                for key in keys:
                    peer.lookup(key)
                answer = statistics.median(millis(lambda: peer.lookup(key)) for key in keys)
            case ["scan"]:
                answer = millis(peer.scan)
            case _:
                sys.exit(f"not understood: {line}")
        print(answer, flush=True)


main()
