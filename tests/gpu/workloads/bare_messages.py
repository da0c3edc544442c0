#!/usr/bin/env python3
"""What a message costs on this machine: a byte goes to a process that sleeps, which answers at once.

A hand-over with nothing to move is as much: LOCK_OK wakes a thread of the next program, and RUNNING wakes the scheduler. One JSON line at the end: the times there and back, in ms. GO=path: as for job.py.
"""
import argparse, json, os, socket, time
p = argparse.ArgumentParser()
p.add_argument("name"); p.add_argument("--seconds", type=float, default=20); p.add_argument("--every-ms", type=float, default=50, help="pause before each message")
a = p.parse_args()
ours, theirs = socket.socketpair()
if os.fork() == 0:
    ours.close()
    while byte := theirs.recv(1): theirs.send(byte)
    os._exit(0)
theirs.close()
if go := os.environ.get("GO"):
    open(f"{go}.{a.name}", "w").close()
    while not os.path.exists(go): time.sleep(0.002)
begin, took = time.time(), []
while time.time() - begin < a.seconds:
    time.sleep(a.every_ms / 1e3)
    sent = time.perf_counter()
    ours.send(b"!"); ours.recv(1)
    took.append((time.perf_counter() - sent) * 1e3)
q = sorted(took)
print(json.dumps(dict(name=a.name, end=round(time.time(), 3), messages=len(q), p50_ms=round(q[len(q) // 2], 3), p90_ms=round(q[len(q) * 9 // 10], 3), p99_ms=round(q[len(q) * 99 // 100], 3), max_ms=round(q[-1], 3))), flush=True)
