"""A client of a queue written from the seed document alone: it knows nothing of Leasehold.

  seed_worker.py push  BUCKET PREFIX QUEUE FIRST COUNT     pushes tasks in JSON of its own
  seed_worker.py work  BUCKET PREFIX QUEUE NAME STALE      works until there is nothing left

Claim: PUT lease.json with If-None-Match: *. Heartbeat: the same object again. Stale: LastModified is
older than STALE seconds; delete it, then claim. Ack: delete task.json and lease.json.
Each task that was done is a line on standard output.
"""

import json
import random
import sys
import time
from datetime import datetime, timezone

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

s3 = boto3.client("s3", config=Config(s3={"addressing_style": "path"}))
verb, bucket, prefix, queue = sys.argv[1:5]
root = f"{prefix}/queues/{queue}/pending/"


def lease(name):
    now = datetime.now(timezone.utc).isoformat()
    return json.dumps({"worker_id": name, "created_at": now, "heartbeat_at": now}).encode()


def push(first, count):
    for n in range(first, first + count):
        body = json.dumps({"task_id": f"seed-{n}", "n": n, "company": "example.com"}).encode()
        s3.put_object(Bucket=bucket, Key=f"{root}seed-{n}/task.json", Body=body)


def listing():
    tasks, leases = set(), {}
    for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=root):
        for entry in page.get("Contents", []):
            task, _, file = entry["Key"][len(root):].rpartition("/")
            if file == "task.json":
                tasks.add(task)
            elif file == "lease.json":
                leases[task] = entry["LastModified"]
    return tasks, leases


def claim(task, name):
    try:
        s3.put_object(Bucket=bucket, Key=f"{root}{task}/lease.json", Body=lease(name), IfNoneMatch="*")
        return True
    except ClientError as error:
        if error.response["ResponseMetadata"]["HTTPStatusCode"] in (409, 412):
            return False
        raise


def work(name, stale):
    while True:
        tasks, leases = listing()
        if not tasks:
            return
        now = datetime.now(timezone.utc)
        free = [task for task in tasks if task not in leases]
        old = [task for task in tasks if task in leases and (now - leases[task]).total_seconds() > stale]
        for task in old:
            s3.delete_object(Bucket=bucket, Key=f"{root}{task}/lease.json")
        candidates = free + old
        random.shuffle(candidates)
        if not candidates:
            time.sleep(0.2)
        for task in candidates[:5]:
            if not claim(task, name):
                continue
            try:
                s3.get_object(Bucket=bucket, Key=f"{root}{task}/task.json")["Body"].read()
            except ClientError as error:
                if error.response["ResponseMetadata"]["HTTPStatusCode"] != 404:
                    raise
                # It was finished since it was listed.
                s3.delete_object(Bucket=bucket, Key=f"{root}{task}/lease.json")
                continue
            time.sleep(random.uniform(0.01, 0.05))
            s3.put_object(Bucket=bucket, Key=f"{root}{task}/lease.json", Body=lease(name))  # heartbeat
            time.sleep(random.uniform(0.01, 0.05))
            s3.delete_object(Bucket=bucket, Key=f"{root}{task}/task.json")
            s3.delete_object(Bucket=bucket, Key=f"{root}{task}/lease.json")
            print(task, flush=True)


if verb == "push":
    push(int(sys.argv[5]), int(sys.argv[6]))
else:
    work(sys.argv[5], float(sys.argv[6]))
