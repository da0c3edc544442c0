#!/usr/bin/env python3
"""Hand-overs on a card that is full: plain ballast leaves 10 GiB, and two programs have 8 GiB each, of managed memory and of memory that the library maps.

What managed memory gives up stays with the driver until other memory asks for it, so this shows what `exchange.py` with its configured capacity cannot. Only
one program has managed memory, and never more than is free. Rows go to $OUT/rows.jsonl; exit code 1 if a word was wrong or a program failed.
Cases can be named: full.py "managed and swap"."""
import ctypes, statistics
from harness import *

LEFT, GIB_EACH = 10 * GIB, 8
# The scheduler may fill what the ballast leaves, but for half a GiB.
CAPACITY = "9728MiB"
CASES = [("managed and swap", ["managed", "swap"]), ("swap and swap", ["swap", "swap"])]


def ballast():
    """Fills the card but for what is left, says so, and keeps it until the end of its input."""
    driver = ctypes.CDLL("libcuda.so.1")
    context, free, total, place = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_uint64()
    assert not driver.cuInit(0) and not driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) and not driver.cuCtxSetCurrent(context)
    while not driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) and free.value > LEFT + (64 << 20):
        if driver.cuMemAlloc_v2(ctypes.byref(place), ctypes.c_size_t(min(free.value - LEFT, 8 * GIB))):
            break
    print(f"{free.value / GIB:.2f}", flush=True)
    sys.stdin.read()
    os._exit(0)


def case(name, memories, seconds):
    """One row for each direction: how long the card stands still, in the first hand-over and later ones, and what the one that comes waits for its memory."""
    with Scheduler("--gpu-memory", CAPACITY, "--tq", "1", log="info") as s:
        jobs, _ = start_together(lambda go: [Job("exchange_job.py", n, "--gib", GIB_EACH, "--mib", 256, "--seconds", seconds, scheduler=s, go=go, env=dict(NVSHARE_MEMORY=memory, NVSHARE_LOG="debug"), log=f"full-{name.replace(' ', '-')}-{n}.log") for n, memory in zip("ab", memories)])
        events = [json.loads(line) for line in s.ctl("watch", "--json", "--kept", "--no-follow").stdout.splitlines()]
    end = min(job.result.get("end", 0) for job in jobs)
    memory_of = {event["client"]: None for event in events if event.get("client")}
    pids = {event.get("pid"): event["client"] for event in events if event.get("pid")}
    memory_of.update({pids[job.process.pid]: memory for job, memory in zip(jobs, memories) if job.process.pid in pids})
    turns, drained, left = [], None, None
    for event in events:
        if event["time_us"] > end * 1e6:
            break
        if event["event"] in ("released", "idle"):
            drained, left = event["up_us"], event["client"]
        elif event["event"] == "running" and drained is not None and event["client"] != left:
            if event["bytes"]:
                turns.append((f"{memory_of.get(left)} to {memory_of.get(event['client'])}", (event["up_us"] - drained) / 1e6, event["took_us"] / 1e6, event["bytes"]))
            drained = None
    total = {k: sum(job.counters["counters"][k] for job in jobs if job.counters) for k in ("gated", "passed_by", "hand_overs", "deferrals")}
    wrong, failed = sum(job.result.get("wrong_bytes", 1) for job in jobs), sum(job.process.returncode != 0 for job in jobs)
    for way in dict.fromkeys(turn[0] for turn in turns):
        stands, restores = ([turn[at] for turn in turns if turn[0] == way] for at in (1, 2))
        row(scenario="full", case=name, way=way, turns=len(stands), first_s=round(stands[0], 3), later_s=round(statistics.median(stands[1:] or stands), 3), worst_later_s=round(max(stands[1:] or stands), 3),
            restore_s=round(statistics.median(restores), 3), gib=round(statistics.median(turn[3] for turn in turns if turn[0] == way) / GIB, 2), wrong_bytes=wrong, failed=failed, **total)
    return wrong + failed + (not turns)


if __name__ == "__main__":
    if sys.argv[1:] == ["ballast"]:
        ballast()
    print(card(), flush=True)
    warm_host(16)
    held = subprocess.Popen([sys.executable, __file__, "ballast"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    print(f"  ballast leaves {held.stdout.readline().strip()} GiB", flush=True)
    bad = sum(case(name, memories, int(os.environ.get("SECONDS_EACH", 25))) for name, memories in CASES if not sys.argv[1:] or name in sys.argv[1:])
    held.stdin.close()
    table("full")
    sys.exit(bad > 0)
