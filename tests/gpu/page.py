#!/usr/bin/env python3
"""The figures that users ask for first, in rounds: page.py [--rounds N]. A round of 240 s runs `job.py` natively and with each memory, two such jobs in turns, and bursts beside a job.
Rows go to $OUT/rows.jsonl as they come. page.py --of FILE ...: the medians of all rounds that these files hold, with the least and the most. Needs PyTorch and `dist/` (cargo dist-local)."""
import argparse, statistics
import first_light, shares
from harness import *

JOB = ["--gib", 12, "--steps", 200]
TURNS = [("swap", 2), ("managed", 5)]
BURSTS = [("swap", 15, 30), ("managed", 50, 0.4)]


def one_round(number):
    native = Job("job.py", f"native{number}", *JOB).finish()
    with_set_up = lambda job: job.result["setup_s"] + job.result["total_s"]
    for memory in ("managed", "swap")[:: 1 if number % 2 else -1]:
        choose_memory(memory)
        with Scheduler("--gpu-memory", "100GiB", log="info") as s:
            job = Job("job.py", f"{memory}{number}", *JOB, scheduler=s).finish()
        row(scenario="alone", round=number, native_s=round(with_set_up(native), 3), ratio=round(with_set_up(job) / with_set_up(native), 4), same_sum=job.result["sum"] == native.result["sum"], **job.counted())
    # Both jobs in turns are held against the native run of this round.
    first_light.SUM[" ".join(map(str, [*JOB, "--dirty", "one"]))] = native.result
    for memory, tq in TURNS:
        choose_memory(memory)
        first_light.turns((tq,), JOB[-1])
    for memory, overhead, wait in BURSTS:
        choose_memory(memory)
        row(scenario="burst", round=number, **shares.beside(overhead, wait)[2])


def summary(rows):
    """Each figure of each kind of row: median, least, most, and the number of runs."""
    figures = {"alone": ["ratio"], "turns": ["useful", "hand_overs"], "burst": ["p50_ms", "p99_ms", "loss_percent", "cost_ms"]}
    for scenario, names in figures.items():
        for memory in ("managed", "swap"):
            of = [r for r in rows if r["scenario"] == scenario and r["memory"] == memory]
            for name in names if of else []:
                values = sorted(r[name] for r in of)
                print(f"{scenario:6} {memory:8} {name:13} {statistics.median(values):.4g} ({values[0]:.4g}, {values[-1]:.4g}), {len(values)} rows")
            wrong = [r for r in of if r.get("same_sum") is False or r.get("passed_by")]
            if wrong:
                print(f"{scenario:6} {memory:8} DOES NOT COUNT: {len(wrong)} rows")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--first", type=int, default=1, help="number of the first round, where several calls make one page")
    parser.add_argument("--of", nargs="+", metavar="FILE")
    arguments = parser.parse_args()
    if arguments.of:
        summary([json.loads(line) for file in arguments.of for line in open(file)])
        sys.exit()
    print(card(), flush=True)
    warm_host(48)
    for number in range(arguments.first, arguments.first + arguments.rounds):
        begin = time.time()
        one_round(number)
        print(f"  round {number} took {time.time() - begin:.0f} s", flush=True)
    summary(ROWS)
    for missed in shares.MISSED:
        print("FAILED", missed)
    sys.exit(bool(shares.MISSED))
