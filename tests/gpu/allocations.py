#!/usr/bin/env python3
"""What an allocation and its free cost on a real card, natively and with each kind of memory, in turn: allocations.py [ROUNDS].
Run on a machine with a GPU and `dist/` (cargo dist-local). Rows go to $OUT/rows.jsonl as they come."""
import statistics
from harness import *

HOW = ("native", "off", "managed", "swap")


def allocations(rounds=3):
    seen = {}
    for i in range(rounds):
        for how in HOW:
            if how == "native":
                job = Job("alloc_job.py", f"native{i}").finish(60)
            else:
                with Scheduler("--gpu-memory", "8GiB", log="warn") as s:
                    job = Job("alloc_job.py", f"{how}{i}", scheduler=s, env=dict(NVSHARE_MEMORY=how, NVSHARE_LOG="warn")).finish(60)
            for mib, took in job.result.items():
                if mib != "name":
                    seen.setdefault((int(mib), how), []).append(took)
    middle = lambda mib, how, what: statistics.median(took[what] for took in seen[mib, how])
    for mib, how in sorted(seen, key=lambda key: (key[0], HOW.index(key[1]))):
        both, native = middle(mib, how, "both"), middle(mib, "native", "both")
        row(scenario="allocations", mib=mib, how=how, rounds=len(seen[mib, how]), alloc_us=middle(mib, how, "alloc"), free_us=middle(mib, how, "free"), both_us=both, p99_us=middle(mib, how, "p99"), of_native=round(both / native, 3))


if __name__ == "__main__":
    print(card(), flush=True)
    allocations(*map(int, sys.argv[1:]))
    table("allocations")
