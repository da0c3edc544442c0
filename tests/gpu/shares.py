#!/usr/bin/env python3
"""Shares of a real card's time, and quanta that follow from what hand-overs cost, by the programs' own iterations against their own rate alone.
shares.py [--memory managed|swap] SCENARIO ..., each of: fitting notfitting force change auto burst together; all take about 830 s; and curve, which takes 250 s. --seconds N: of each run of `fitting`
(15 s unless said otherwise), `notfitting` (50 s, once with each memory unless --memory says which) and `together` (12 s, about 170 s in all). Needs PyTorch and `dist/` (cargo dist-local).
Rows go to $OUT/rows.jsonl as they come. Exit code 1 if a program failed or a figure misses its aim."""
import argparse, statistics
from harness import *

MISSED = []


def aim(name, reached, **fields):
    row(**fields, aim=name, reached=reached)
    if not reached:
        MISSED.append((name, fields))


def start_together(jobs, make):
    """Starts jobs that wait for each other; `make(name, go)` starts one."""
    go = pathlib.Path(tempfile.mkdtemp()) / "go"
    started = [make(name, go) for name in jobs]
    until = time.time() + 120
    while not all(pathlib.Path(f"{go}.{name}").exists() for name in jobs):
        time.sleep(0.01)
        if time.time() > until or any(job.process.poll() is not None for job in started):
            raise SystemExit(f"not set up: {[open(job.log).read()[-500:] for job in started]}")
    go.touch()
    return started


def results(jobs, timeout=200):
    out = []
    for job in jobs:
        text = job.output(timeout)
        if job.process.returncode != 0 or not text:
            MISSED.append((job.name, open(job.log).read()[-500:]))
            job.kill()
        out.append(json.loads(text.strip().splitlines()[-1]) if text and job.process.returncode == 0 else dict(per_s=0.0, by=[], steps=0))
    return out


def streams(variables, seconds, scheduler=None, graph=False, every=0, gib=0):
    """`stream_job.py` with each of these environments over the same seconds."""
    extra = ["--graph"] * graph + (["--every", every] if every else []) + (["--gib", gib] if gib else [])
    names = [f"s{i}" for i in range(len(variables))]
    make = lambda name, go: Job("stream_job.py", name, "--seconds", seconds, *extra, scheduler=scheduler, go=go, env=variables[names.index(name)])
    return start_together(names, make)


def limit(percent, policy=None):
    return dict(CUDA_DEVICE_SM_LIMIT=str(percent), **({"GPU_CORE_UTILIZATION_POLICY": policy} if policy else {}))


def parts_of(rates, percents):
    """What each got of the sum, and by how much the worst is off what its limit gives it."""
    parts = [rate / sum(rates) for rate in rates] if sum(rates) else [0] * len(rates)
    return parts, max(abs(part * sum(percents) / p - 1) for part, p in zip(parts, percents))


def fitting(seconds=15):
    """Limits of programs that fit together, and what they get done in sum against natively."""
    alone = results(streams([{}], 5))[0]["per_s"]
    native = sum(r["per_s"] for r in results(streams([{}] * 3, 8)))
    row(scenario="fitting", what="native", alone_per_s=alone, three_per_s=round(native, 1))
    cases = [((20, 30, 40), False), ((30, 70), False), ((100, 100, 100), False), ((20, 30, 40), True)]
    for percents, graph in cases:
        with Scheduler("--gpu-memory", "60GiB", log="info") as s:
            rates = [r["per_s"] for r in results(streams([limit(p) for p in percents], seconds, s, graph))]
            turns = s.gpu(s.status())["turns"]
        parts, off = parts_of(rates, percents)
        aim("within 5 % of the shares, in sum no less than natively", off <= 0.05 and sum(rates) >= native * 0.99, scenario="fitting", what="/".join(map(str, percents)) + " graph" * graph, parts=" ".join(f"{part:.3f}" for part in parts), worst=f"{off:.3f}", sum_of_alone=f"{sum(rates) / alone:.3f}", sum_of_native=f"{sum(rates) / native:.3f}", turns=turns)


def notfitting(seconds=50, gib=6, percents=(20, 30, 40)):
    """Limits of programs of which one fits the GPU at a time."""
    alone = results(streams([{}], 5, gib=gib))[0]["per_s"]
    chosen = os.environ.get("NVSHARE_MEMORY")
    for memory, overhead, useful in (("managed", 12, 0.85), ("swap", 5, 0.95)):
        if chosen not in (None, memory):
            continue
        choose_memory(memory)
        with Scheduler("--gpu-memory", "8GiB", "--tq", f"auto {overhead}% 120", log="info") as s:
            jobs = streams([limit(p) for p in percents], seconds, s, gib=gib)
            until = time.time() + seconds - 1
            while time.time() < until:
                time.sleep(1)
                gpu, counted = s.gpu(s.status()), [s.client(job.process.pid) for job in jobs]
            rates = [r["per_s"] for r in results(jobs)]
        parts, off = parts_of(rates, percents)
        held, _ = parts_of([c["held_ms"] for c in counted], percents)
        for job, percent, client in zip(jobs, percents, counted):
            row(scenario="notfitting", what=f"{percent} %", **job.counted([client]))
        aim(f"within 5 % of the shares, {useful} useful", off <= 0.05 and sum(rates) >= useful * alone, scenario="notfitting", what="/".join(map(str, percents)), overhead=overhead, parts=" ".join(f"{part:.3f}" for part in parts), held=" ".join(f"{part:.3f}" for part in held),
            worst=f"{off:.3f}", useful=f"{sum(rates) / alone:.3f}", turns=gpu["turns"], quantum_ms=gpu["quantum_ms"], cost_ms=round(gpu["switch_cost_us"] / 1e3, 1))
        if chosen is None:
            del os.environ["NVSHARE_MEMORY"]


def sm_clocks(jobs, seconds):
    """The card's clock in MHz, on average over so many seconds while these run: a card that rests now and then may run faster."""
    clocks, until = [], time.time() + seconds
    while time.time() < until and all(job.process.poll() is None for job in jobs):
        query = subprocess.run(["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=60).stdout.split()
        clocks += [int(clock) for clock in query[:1] if clock.isdigit()]
        time.sleep(0.03)
    return round(statistics.mean(clocks)) if clocks else "?"


def force(seconds=12):
    """A limit of a program that is alone, second by second, and for which part of the time it held the GPU as the scheduler counts."""
    jobs = streams([{}], 6)
    alone_mhz = sm_clocks(jobs, 5)
    alone = results(jobs)[0]["per_s"]
    for percent in (25,):
        with Scheduler("--gpu-memory", "60GiB", log="info") as s:
            jobs = streams([limit(percent, "force")], seconds, s, every=1)
            time.sleep(2)
            begin, before = time.time(), s.client(jobs[0].process.pid)["held_ms"]
            mhz = sm_clocks(jobs, seconds - 5)
            held = (s.client(jobs[0].process.pid)["held_ms"] - before) / (time.time() - begin) / 10
            result = results(jobs)[0]
        got = result["per_s"] / alone * 100
        each = [round((b - a) / alone * 100, 1) for a, b in zip([0] + result["by"], result["by"])]
        aim("25 ± 2 % alone", abs(got - percent) <= 2, scenario="force", what=f"{percent} % alone", got_percent=round(got, 2), held_percent=round(held, 2), alone_mhz=alone_mhz, mhz=mhz, each_second=" ".join(map(str, each)))


def change():
    """`set-limit` from 20 to 60 under force, second by second."""
    alone = results(streams([{}], 5))[0]["per_s"]
    with Scheduler("--gpu-memory", "60GiB", log="info") as s:
        job = streams([limit(20, "force")], 12, s, every=0.5)[0]
        time.sleep(5)
        client = s.client(job.process.pid)["client"]
        at = time.time()
        said = s.ctl("set-limit", str(client), "--compute", "60").stdout.strip()
        result = results([job])[0]
    by = [b - a for a, b in zip([0] + result["by"], result["by"])]
    percent = [round(n / 0.5 / alone * 100, 1) for n in by]
    step = int((at - result.get("start", at)) / 0.5)
    after = percent[step + 2 : step + 10]
    aim("60 % within a second", bool(after) and abs(statistics.mean(after) - 60) <= 4, scenario="change", said=said, changed_in_half_second=step, percents=" ".join(map(str, percent)))


def rate_between(result, begin, end):
    """Steps a second of a `--every 1` run between two of its seconds."""
    by = [0] + result["by"]
    end = min(end, len(by) - 1)
    return (by[end] - by[begin]) / (end - begin) if end > begin else 0.0


def auto(seconds=None):
    """Two jobs of 12 GiB on 16 GiB with an overhead of 5 %: the part of the time in which nobody held the card, from one turn's begin to another's."""
    seconds = seconds or (45 if os.environ.get("NVSHARE_MEMORY") == "swap" else 72)
    alone = results([Job("job.py", "alone", "--gib", 12, "--seconds", 5)])[0]["per_s"]
    with Scheduler("--gpu-memory", "16GiB", "--tq", "auto 5% 120", log="info") as s:
        jobs = start_together(["a", "b"], lambda name, go: Job("job.py", name, "--gib", 12, "--seconds", seconds, scheduler=s, go=go))
        seen, until = [], time.time() + seconds
        while time.time() < until:
            at, status = time.time(), s.status()
            gpu, held = s.gpu(status), sum(client["held_ms"] for client in status["clients"])
            # A turn has just begun: between two such moments lie whole hand-overs and nothing else that nobody holds.
            if not seen or seen[-1]["turns"] != gpu["turns"]:
                seen.append(dict(turns=gpu["turns"], quantum=gpu["quantum_ms"], cost=gpu["switch_cost_us"] / 1e3, at=at, held=held / 1e3))
            time.sleep(0.1)
        rates = [r["per_s"] for r in results(jobs)]
    known = [turn for turn in seen if turn["turns"] >= 5]
    enough = len(known) >= 3 and sum(rates) > 0
    switching = 0.0
    if enough:
        first, last = known[0], known[-1]
        switching = (1 - (last["held"] - first["held"]) / (last["at"] - first["at"])) * 100
    found = enough and all(abs(turn["quantum"] / known[-1]["quantum"] - 1) < 0.25 for turn in known)
    aim("4 to 6 % of the time, found within 5 turns", found and 4 <= switching <= 6, scenario="auto", switching_percent=round(switching, 2), of_turns=len(known) - 1, quantum_ms=seen[-1]["quantum"], cost_ms=round(seen[-1]["cost"], 1),
        useful=f"{sum(rates) / alone:.3f}", turn_and_quantum=" ".join(f"{turn['turns']}:{turn['quantum']}" for turn in seen[:16]))


def percentiles(latencies):
    """Median, 99th percentile and longest, in milliseconds."""
    ordered = sorted(latencies) or [0.0]
    return dict(bursts=len(latencies), p50_ms=round(ordered[len(ordered) // 2], 2), p99_ms=round(ordered[int(len(ordered) * 0.99)], 1), max_ms=round(ordered[-1], 1))


# In a run of `beside`, the job is alone for so many seconds, then the scheduler sees for so many that bursts are short; what comes afterwards counts.
ALONE, LEARNS = 7, 9


def beside(overhead, wait, seconds=26):
    """Bursts of 4 GiB beside a job of 12 GiB on 14 GiB: how long they took, and what the job did against its own seconds alone, in the same run."""
    begin, end = ALONE + LEARNS, ALONE + LEARNS + seconds
    with Scheduler("--gpu-memory", "14GiB", "--tq", f"auto {overhead}% {wait}", log="info") as s:
        def make(name, go):
            if name == "burst":
                return Job("burst_job.py", name, "--gib", 4, "--after", ALONE, "--until", end, scheduler=s, go=go)
            return Job("job.py", name, "--gib", 12, "--seconds", end + 0.5, "--every", 1, scheduler=s, go=go)

        jobs = start_together(["burst", "job"], make)
        time.sleep(end - 0.5)
        status = s.status()
        gpu, clients = s.gpu(status), [s.client(job.process.pid) for job in jobs]
        bursts, steps = results(jobs)
    alone, together_with = rate_between(steps, 2, ALONE), rate_between(steps, begin, end)
    loss = (1 - together_with / alone) * 100 if alone else 100.0
    took = [ms for at, ms in bursts.get("all", []) if at >= begin]
    first = [ms for at, ms in bursts.get("all", []) if at < begin]
    measured = percentiles(took)
    counted = {name: sum(client["counters"][name] for client in clients if client) for name in ("gated", "passed_by", "evicted", "restored")}
    return measured, loss, dict(overhead=overhead, max_wait=wait, **measured, worst_at_first_ms=round(max(first, default=0), 1), loss_percent=round(loss, 1), alone_per_s=round(alone, 2), beside_per_s=round(together_with, 2), turns=gpu["turns"], cost_ms=round(gpu["switch_cost_us"] / 1e3, 1), gated=counted["gated"], passed_by=counted["passed_by"], moved_gib=round((counted["evicted"] + counted["restored"]) / GIB, 1))


def burst():
    """What short work waits and long work loses with the overhead that the aim names, and what bursts take where both fit."""
    managed = os.environ.get("NVSHARE_MEMORY") != "swap"
    overhead, wait, most_ms, most_loss = (50, 0.4, 500, 45) if managed else (15, 30, 250, 15)
    measured, loss, fields = beside(overhead, wait)
    aim(f"p99 of {most_ms} ms at a loss of {most_loss} %", measured["bursts"] > 0 and measured["p99_ms"] <= most_ms and loss <= most_loss, scenario="burst", what="on 14 GiB", **fields)

    def fits(scheduler):
        def make(name, go):
            if name == "burst":
                return Job("burst_job.py", name, "--gib", 4, "--every-ms", 100, "--after", 1, "--until", 10, scheduler=scheduler, go=go)
            return Job("job.py", name, "--gib", 12, "--seconds", 10.5, "--every", 1, scheduler=scheduler, go=go)

        bursts, steps = results(start_together(["burst", "job"], make))
        return percentiles([ms for _, ms in bursts.get("all", [])]), round(steps["per_s"], 2)

    native, native_steps = fits(None)
    row(scenario="burst", what="on 20 GiB, natively", **native, beside_per_s=native_steps)
    with Scheduler("--gpu-memory", "20GiB", "--tq", f"auto {overhead}% {wait}", log="info") as s:
        ours, steps = fits(s)
        turns = s.gpu(s.status())["turns"]
    aim("p99 of 1.1 times the native one", 0 < ours["bursts"] and ours["p99_ms"] <= 1.1 * native["p99_ms"], scenario="burst", what="on 20 GiB", **ours, beside_per_s=steps, turns=turns)


def curve():
    """The same for other overheads."""
    for overhead in (2, 5, 10, 25, 50):
        row(scenario="curve", **beside(overhead, 30)[2])


def together(seconds=12, runs=5):
    """Two jobs that fit and that each fill the card, side by side and one at a time, interleaved."""
    ratios = []
    for run in range(runs):
        done = {}
        for how in (["--exclusive"], [])[:: 1 if run % 2 else -1]:
            with Scheduler("--gpu-memory", "60GiB", *how, log="info") as s:
                jobs = start_together(["a", "b"], lambda name, go: Job("stream_job.py", name, "--seconds", seconds, scheduler=s, go=go))
                done[bool(how)] = sum(r["per_s"] for r in results(jobs))
        ratios.append(done[True] / max(done[False], 1e-9))
        row(scenario="together", run=run + 1, side_by_side_per_s=round(done[False], 2), one_at_a_time_per_s=round(done[True], 2), ratio=f"{ratios[-1]:.4f}")
    middle = statistics.median(ratios)
    aim("one at a time does at least as much", middle >= 1, scenario="together", median=f"{middle:.4f}")


if __name__ == "__main__":
    print(card(), flush=True)
    scenarios = ["fitting", "notfitting", "force", "change", "auto", "burst", "together"]
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory", choices=["managed", "swap"], help="NVSHARE_MEMORY for the runs under nvshare")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("scenario", nargs="*", choices=[*scenarios, "curve", []])
    arguments = parser.parse_args()
    choose_memory(arguments.memory)
    for scenario in arguments.scenario or scenarios:
        begin = time.time()
        given = [arguments.seconds] if arguments.seconds and (scenario.endswith("fitting") or scenario == "together") else []
        globals()[scenario](*given)
        print(f"  {scenario} took {time.time() - begin:.0f} s", flush=True)
    for scenario in dict.fromkeys(r["scenario"] for r in ROWS):
        table(scenario)
    for missed in MISSED:
        print("MISSED", missed)
    print(card())
    sys.exit(bool(MISSED))
