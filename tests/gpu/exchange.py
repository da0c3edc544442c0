#!/usr/bin/env python3
"""What a hand-over costs in which all memory of one program leaves and all of another one's comes, on a real card: `exchange` of first_light.py, or this by itself.

Every figure comes from the scheduler's events: how long the card stands still, from the end of one program's work to the open gate of the other, and the bytes
that left and came in between. Aims are held against what the same run measured: the bare link, the restore alone, managed memory."""
import re, statistics
from harness import *

CASES = [
    # name, memory, exchange, arguments
    ("all changed", "swap", "swap", ["--gib", 8, "--mib", 256]),
    ("all changed, one way after the other", "swap", "nobody", ["--gib", 8, "--mib", 256]),
    ("90 % unchanged", "swap", "swap", ["--gib", 8, "--mib", 256, "--still", 0.9]),
    ("90 % zeros", "swap", "swap", ["--gib", 8, "--mib", 256, "--zeros", 0.9]),
    ("2048 of 2 MiB", "swap", "swap", ["--gib", 4, "--mib", 2]),
    ("managed", "managed", "swap", ["--gib", 8, "--mib", 256]),
]
# Contexts and modules take a part of the capacity: half a GiB each on an H200.
BESIDE_GIB = 1.5
# The host's memory is made in the first hand-overs.
FIRST = 4


def hand_overs(events):
    """Seconds that the card stood still, bytes that left and bytes that came, and seconds from the grant to the open gate, of each hand-over."""
    found, drained, left, out = [], None, None, 0
    for event in events:
        if event["event"] in ("released", "idle"):
            drained, left, out = event["up_us"], event["client"], 0
        elif event["event"] == "evicted":
            out += event["bytes"] or 0
        elif event["event"] == "running" and drained is not None and event["client"] != left:
            if event["bytes"]:
                found.append(((event["up_us"] - drained) / 1e6, out, event["bytes"], event["took_us"] / 1e6))
            drained = None
    return found


def case(name, memory, how, arguments, seconds):
    gib = arguments[arguments.index("--gib") + 1]
    with Scheduler("--gpu-memory", f"{round((gib + BESIDE_GIB) * 1024)}MiB", "--tq", "0.3", "--exchange", how, log="info") as s:
        short = re.sub(r"\W+", "-", name)
        jobs, _ = start_together(lambda go: [Job("exchange_job.py", n, *arguments, "--seconds", seconds, scheduler=s, go=go, env=dict(NVSHARE_MEMORY=memory), log=f"exchange-{short}-{n}.log") for n in "ab"])
        kept = s.ctl("watch", "--json", "--kept", "--no-follow").stdout
        (LOGS / f"exchange-{short}-events.jsonl").write_text(kept)
        events = [json.loads(line) for line in kept.splitlines()]
    end = min(job.result.get("end", 0) for job in jobs)
    # What the programs look at afterwards does not change.
    turns = hand_overs([event for event in events if event["time_us"] <= end * 1e6])[FIRST:]
    middle = lambda at: statistics.median(turn[at] for turn in turns) if turns else 0
    stands, out, back, restore = (middle(at) for at in range(4))
    left_out = [sum(int(m) for job in jobs for m in re.findall(what, open(job.log).read())) for what in (r"not copied: (\d+) MiB of zeros", r"(\d+) MiB that had not changed")]
    total = {k: sum(job.counters["counters"][k] for job in jobs if job.counters) for k in ("gated", "passed_by", "hand_overs", "deferrals", "evicted", "restored")}
    both = (out + back) / GIB
    lines = lambda what: sum(open(job.log).read().count(what) for job in jobs)
    row(scenario="exchange", case=name, memory=memory, exchange=how, turns=len(turns), stands_ms=round(stands * 1e3, 1), min_max=f"{min((t[0] for t in turns), default=0) * 1e3:.1f}-{max((t[0] for t in turns), default=0) * 1e3:.1f}", grant_to_open_ms=round(restore * 1e3, 1), out_gib=round(out / GIB, 2), back_gib=round(back / GIB, 2), gib_s=round(both / stands, 1) if stands else 0,
        gated=total["gated"], passed_by=total["passed_by"], hand_overs=total["hand_overs"], deferrals=total["deferrals"], evicted_gib=round(total["evicted"] / GIB, 1), restored_gib=round(total["restored"] / GIB, 1), zeros_gib=round(left_out[0] / 1024, 1), unchanged_gib=round(left_out[1] / 1024, 1),
        checked_gib=sum(job.result.get("checked_gib", 0) for job in jobs), wrong_bytes=sum(job.result.get("wrong_bytes", 1) for job in jobs), failed=sum(job.process.returncode != 0 for job in jobs), errors=lines("ERROR"))
    return dict(stands=stands, restore=restore, rate=both / stands if stands else 0, moved=back)


def exchange(seconds=12, cases=None):
    """Two programs of which one fits, for each case; then each aim against what was measured beside it."""
    link = Job("bare_moves.py", "link", "--link").finish().result
    duplex = link["pinned_both"]
    row(scenario="exchange link", **link)
    seen = {name: case(name, *rest, seconds) for name, *rest in CASES if not cases or name in cases}
    changed, alone = seen.get("all changed"), seen.get("all changed, one way after the other")

    def aim(what, value, least=None, most=None):
        row(scenario="exchange aims", what=what, measured=round(value, 3), aim=f">= {least}" if least is not None else f"<= {most}", met=value >= least if least is not None else value <= most)

    if changed and changed["stands"]:
        aim("all changed, GiB/s both ways of the duplex link", changed["rate"] / duplex, least=0.8)
        aim("all changed, GiB/s both ways", changed["rate"], least=75)
        if (managed := seen.get("managed")) and managed["rate"]:
            aim("all changed, GiB/s of managed memory's", changed["rate"] / managed["rate"], least=2.5)
        if (zeros := seen.get("90 % zeros")) and zeros["stands"]:
            aim("90 % zeros, time of all changed", zeros["stands"] / zeros["moved"] * changed["moved"] / changed["stands"], most=0.25)
    if (small := seen.get("2048 of 2 MiB")) and small["stands"]:
        aim("2048 of 2 MiB, GiB/s both ways", small["rate"], least=45)
    if (still := seen.get("90 % unchanged")) and still["stands"] and alone and alone["restore"]:
        aim("90 % unchanged, time of the restore alone", still["stands"] / still["moved"] * alone["moved"] / alone["restore"], most=1.1)


if __name__ == "__main__":
    print(card(), flush=True)
    warm_host(32)
    exchange(cases=sys.argv[1:])
    for scenario in dict.fromkeys(r["scenario"] for r in ROWS):
        table(scenario)
