#!/usr/bin/env python3
"""What users would pick instead, on the files of the index benchmarks.

    leasehold-bench index-data DIR [--batches]
    python3 bench/peers/index.py DIR/filled/indexes/domains [only]     # needs duckdb, lmdb, rocksdict

Each peer starts with the 1,000,000 records in its own form (not timed; DuckDB with the shards themselves),
reads the inbox file by file, merges it and commits. The inbox is not deleted, which ours does within its time.
"""
import glob, os, shutil, sqlite3, sys, tempfile, time

index, only = sys.argv[1], (sys.argv[2] if len(sys.argv) > 2 else "")
US = "\x1f"
temp = tempfile.mkdtemp(dir=os.path.dirname(index.rstrip("/")) or ".")


def base():
    for path in sorted(glob.glob(index + "/shards/*.usv")):
        for line in open(path):
            yield line.rstrip("\n").split(US)[:4]


def inbox():
    rows = []
    for path in glob.glob(index + "/inbox/*/*.usv"):
        with open(path) as file:
            rows += [line.split(US)[:4] for line in file.read().splitlines()]
    return rows


def sqlite():
    c = sqlite3.connect(temp + "/s.db")
    c.execute("pragma journal_mode=wal"), c.execute("pragma synchronous=normal")
    c.execute("create table d(domain text primary key, name text, v int, t text) without rowid")
    c.executemany("insert into d values(?,?,?,?)", sorted(base())), c.commit()
    start = time.perf_counter()
    c.executemany("insert into d values(?,?,?,?) on conflict(domain) do update set name=excluded.name, v=excluded.v, t=excluded.t "
                  "where excluded.t > d.t", sorted(inbox()))
    c.commit()
    return time.perf_counter() - start


def lmdb():
    import lmdb
    env = lmdb.open(temp + "/lmdb", map_size=1 << 30)
    with env.begin(write=True) as t:
        for r in sorted(base()):
            t.put(r[0].encode(), US.join(r[1:]).encode(), append=True)
    start = time.perf_counter()
    with env.begin(write=True) as t:
        for r in sorted(inbox()):
            old = t.get(r[0].encode())
            if old is None or r[3].encode() > bytes(old).rsplit(b"\x1f", 1)[1]:
                t.put(r[0].encode(), US.join(r[1:]).encode())
    return time.perf_counter() - start


def rocksdb():
    from rocksdict import Options, Rdict, WriteBatch
    db = Rdict(temp + "/rocks", Options(raw_mode=True))
    for r in base():
        db[r[0].encode()] = US.join(r[1:]).encode()
    db.flush()
    start = time.perf_counter()
    rows, batch = inbox(), WriteBatch(raw_mode=True)
    keys = [r[0].encode() for r in rows]
    for key, r, old in zip(keys, rows, db[keys]):
        if old is None or r[3].encode() > old.rsplit(b"\x1f", 1)[1]:
            batch.put(key, US.join(r[1:]).encode())
    db.write(batch), db.flush()
    return time.perf_counter() - start


def duckdb():
    import duckdb
    c = duckdb.connect()
    c.execute("set threads=2")
    columns = "{'domain':'VARCHAR','name':'VARCHAR','v':'BIGINT','t':'VARCHAR','d':'BOOLEAN'}"
    read = lambda glob: (f"read_csv('{index}/{glob}', delim=chr(31), quote='', escape='', header=false, auto_detect=false, "
                         f"null_padding=true, columns={columns})")
    start = time.perf_counter()
    c.execute(f"copy (select domain, name, v, t, d, sha256(domain)[1:2] s from (select * from {read('shards/*.usv')} union all "
              f"select * from {read('inbox/*/*.usv')}) qualify row_number() over (partition by domain order by t desc) = 1 order by s, domain) "
              f"to '{temp}/out' (format csv, delimiter '{US}', header false, quote '', escape '', partition_by (s))")
    return time.perf_counter() - start


for peer in (sqlite, lmdb, rocksdb, duckdb):
    if only in peer.__name__:
        print(f"{peer.__name__:8} {peer() * 1000:8.0f} ms", flush=True)
shutil.rmtree(temp)
