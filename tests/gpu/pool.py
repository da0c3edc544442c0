#!/usr/bin/env python3
"""Hand-overs of two programs of 8 GiB, of which one fits, with memory of the host of their own and with the scheduler's (--host-memory), in
control groups without a limit and with one of 2 GiB: rates, who is charged, whether anybody is killed, whether every byte is right.

    pool.py [CASE ...]

Memory of their own is not tried with the limit: what does not fit there stays on the card, and the second program would wait."""
import re, statistics
from harness import *
from exchange import FIRST, hand_overs

GIB_EACH, SECONDS, LIMIT, BUDGET = 8, 10, 2 * GIB, "24GiB"
CASES = {
    # scheduler's arguments, limit of each program's control group
    "own": ([], None),
    "pool": (["--host-memory", BUDGET], None),
    "pool-limited": (["--host-memory", BUDGET], LIMIT),
    # A part of what has to leave: the rest is of the programs' own.
    "pool-small": (["--host-memory", "4GiB"], None),
}


class Group:
    """A control group, or why there is none."""

    def __init__(self, name, limit):
        root, self.files = pathlib.Path("/sys/fs/cgroup"), ("memory.max", "memory.peak", "memory.current")
        if not (root / "cgroup.controllers").exists():
            root, self.files = root / "memory", ("memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.usage_in_bytes")
        self.path, self.why = root / f"nvshare-pool-{os.getpid()}-{name}", ""
        try:
            self.path.mkdir()
            if limit:
                (self.path / self.files[0]).write_text(str(limit))
        except OSError as error:
            self.why = str(error)

    def gib(self, which):
        try:
            return round(int((self.path / self.files[which]).read_text()) / GIB, 2)
        except (OSError, ValueError):
            return "?"

    def env(self):
        return {} if self.why else dict(GROUP=str(self.path))

    def end(self):
        if not self.why:
            self.path.rmdir()


def case(name):
    arguments, limit = CASES[name]
    groups = {n: Group(f"{name}-{n}", limit) for n in "ab"}
    if limit and (why := next((g.why for g in groups.values() if g.why), "")):
        row(scenario="pool", case=name, skipped=f"no control group: {why}")
        return
    with Scheduler("--gpu-memory", f"{GIB_EACH * 1024 + 1536}MiB", "--tq", "0.3", *arguments, log="debug") as s:
        begin = time.time()
        jobs, _ = start_together(lambda go: [Job(str(HERE / "workloads" / "in_group.py"), n, "--gib", GIB_EACH, "--mib", 256, "--seconds", SECONDS, scheduler=s, go=go, env=dict(groups[n].env(), NVSHARE_MEMORY="swap"), log=f"pool-{name}-{n}.log") for n in "ab"])
        events = [json.loads(line) for line in s.ctl("watch", "--json", "--kept", "--no-follow").stdout.splitlines()]
        log = open(s.log).read()
        # Which of the segments were free again, and how long after the programs had ended: it says how long the kernel holds locked pages.
        time.sleep(2)
        freed = open(s.log).read().count("of the host's memory are free again")
    end = min((job.result.get("end", 0) for job in jobs), default=0)
    turns = hand_overs([event for event in events if event["time_us"] <= end * 1e6])
    late = turns[FIRST:]
    middle = lambda at: statistics.median(turn[at] for turn in late) if late else 0
    stands, out, back = (middle(at) for at in range(3))
    lines = lambda what: sum(open(job.log).read().count(what) for job in jobs)
    total = {k: sum(job.counters["counters"][k] for job in jobs if job.counters) for k in ("gated", "passed_by", "hand_overs", "deferrals", "evicted", "restored", "copied_out", "copied_in")}
    row(scenario="pool", case=name, setup_s=max(job.result.get("setup_s", 0) for job in jobs), turns=len(late), first_ms=" ".join(f"{t[0] * 1e3:.0f}" for t in turns[:FIRST]), stands_ms=round(stands * 1e3, 1), min_max=f"{min((t[0] for t in late), default=0) * 1e3:.0f}-{max((t[0] for t in late), default=0) * 1e3:.0f}",
        out_gib=round(out / GIB, 2), back_gib=round(back / GIB, 2), gib_s=round((out + back) / GIB / stands, 1) if stands else 0,
        peak_gib=" ".join(str(groups[n].gib(1)) for n in "ab"), segments=len(re.findall(r"asks for .* and gets", log)), freed=freed,
        **{k: v if k in ("gated", "passed_by", "hand_overs", "deferrals") else round(v / GIB, 1) for k, v in total.items()},
        own_memory=lines("memory of its own"), not_locked=lines("cannot be page-locked"), checked_gib=sum(job.result.get("checked_gib", 0) for job in jobs), wrong_bytes=sum(job.result.get("wrong_bytes", 1) for job in jobs),
        failed=" ".join(str(job.process.returncode) for job in jobs), wall_s=round(time.time() - begin, 1))
    for group in groups.values():
        group.end()


if __name__ == "__main__":
    print(card(), flush=True)
    warm_host(32)
    for name in sys.argv[1:] or CASES:
        case(name)
    table("pool")
