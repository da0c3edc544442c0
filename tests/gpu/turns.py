#!/usr/bin/env python3
"""Legal programs that a library which keeps handles or adds barriers crashes or hangs, in turns on a real card, and what launches and ends of handles cost.
Needs nvcc and `dist/` (cargo dist-local). Rows go to $OUT/rows.jsonl as they come. Exit code 1 if a program failed."""
import concurrent.futures, statistics
from harness import *

BIN = pathlib.Path(tempfile.mkdtemp())
FAILED = []


def build(name):
    out = BIN / name
    if not out.exists():
        subprocess.run(["nvcc", "-std=c++17", "-arch=native", "-o", out, HERE / f"turns/{name}.cu", "-lcuda"], check=True)
    return str(out)


def command(program, *arguments, scheduler=None, timeout=120):
    """Runs a program; its exit code, what it printed, and its client at the scheduler."""
    environment, line = dict(os.environ), [program, *map(str, arguments)]
    if scheduler:
        environment.update(scheduler.env, NVSHARE_LOG="warn", LD_PRELOAD=str(DIST / "lib/nvshare/libnvshare.so"))
    process = subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        out = process.communicate(timeout=timeout)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        out = process.communicate()[0] + " HANGS"
    return process.returncode, out.strip(), scheduler and scheduler.client(process.pid)


def in_turns(scenario, program, arguments, runs, memory, tq, worlds=4, timeout=60):
    """Pairs of the same program, each pair with a scheduler of its own; `runs` programs in sum."""
    path = build(program)
    natively = command(path, *arguments)
    row(scenario=scenario, how="native", rc=natively[0], said=natively[1][-80:])

    def world(_):
        ended = []
        with Scheduler("--gpu-memory", memory, "--tq", str(tq), log="info") as s, concurrent.futures.ThreadPoolExecutor(2) as two:
            for _ in range(-(-runs // (2 * worlds))):
                pair = [two.submit(command, path, *arguments, scheduler=s, timeout=timeout) for _ in range(2)]
                ended += [p.result() for p in pair]
        return ended

    with concurrent.futures.ThreadPoolExecutor(worlds) as all_worlds:
        ended = [e for w in all_worlds.map(world, range(worlds)) for e in w]
    bad = [(rc, out[-300:]) for rc, out, _ in ended if rc != 0]
    FAILED.extend(bad)
    clients = [c for _, _, c in ended if c]
    total = lambda name: sum(c["counters"][name] for c in clients)
    row(scenario=scenario, how="in turns", runs=len(ended), failed=len(bad), counted=len(clients), hand_overs=total("hand_overs"), deferrals=total("deferrals"), gated=total("gated"), passed_by=total("passed_by"), evicted_gib=round(total("evicted") / GIB, 1), said=ended[-1][1][-80:], first_failure=str(bad[:1]))


def churn():
    in_turns("churn", "stream_churn", [3], 100, "2GiB", 0.2)


def legacy():
    in_turns("legacy", "legacy_wait", [10, 8], 20, "12GiB", 0.5, timeout=100)


def launches(pairs=20):
    """Eager launches alone, natively and under nvshare, interleaved: medians of the pairs' ratios."""
    path = build("launch_cost")
    with Scheduler("--gpu-memory", "100GiB", log="info") as s:
        for streams, threads in ((1, 1), (8, 1), (32, 1), (4, 8)):
            ratios, natives, unders = [], [], []
            for i in range(pairs if threads == 1 else 6):
                order = [None, s] if i % 2 else [s, None]
                ns = {bool(on): json.loads(command(path, streams, threads, 300, scheduler=on)[1].splitlines()[-1])["ns"] for on in order}
                natives.append(ns[False]), unders.append(ns[True]), ratios.append(ns[True] / ns[False])
            q = statistics.quantiles(ratios, n=4)
            row(scenario="launches", streams=streams, threads=threads, pairs=len(ratios), native_ns=round(statistics.median(natives), 1), under_ns=round(statistics.median(unders), 1), ratio=round(statistics.median(ratios), 4), quartiles=f"{q[0]:.4f} {q[2]:.4f}", least_most=f"{min(ratios):.4f} {max(ratios):.4f}")


def ends():
    """The ends of handles while another client waits, against native ones."""
    path, other = build("destroy_cost"), build("stream_churn")
    native = json.loads(command(path, 5)[1].splitlines()[-1])
    with Scheduler("--gpu-memory", "2GiB", "--tq", "0.2", log="info") as s, concurrent.futures.ThreadPoolExecutor(1) as one:
        neighbour = one.submit(command, other, 12, scheduler=s)
        rc, out, client = command(path, 10, scheduler=s)
        FAILED.extend([(rc, out)] if rc or neighbour.result()[0] else [])
        under = json.loads(out.splitlines()[-1]) if rc == 0 else {}
        for name in under:
            row(scenario="ends", handle=name, n=under[name]["n"], native_p50_us=native[name]["p50"], native_p99_us=native[name]["p99"], native_max_us=native[name]["max"], under_p50_us=under[name]["p50"], under_p99_us=under[name]["p99"], under_max_us=under[name]["max"], hand_overs=client["counters"]["hand_overs"])


def contexts(samples=60, seconds=20):
    """The ends of contexts: natively, and under nvshare, alone and beside another such program; only the last has to wait for its turns. In 4 times `seconds` at most."""
    path, alone = build("context_cost"), {}

    def ends(how, programs, scheduler=None):
        with concurrent.futures.ThreadPoolExecutor(programs) as pool:
            ended = [p.result() for p in [pool.submit(command, path, samples, seconds, scheduler=scheduler) for _ in range(programs)]]
        FAILED.extend([(rc, out) for rc, out, _ in ended if rc])
        printed = [json.loads(out.splitlines()[-1]) for rc, out, _ in ended if rc == 0]
        hand_overs = sum(client["counters"]["hand_overs"] for _, _, client in ended if client)
        for when in ("at_once", "later"):
            took = sorted(t for p in printed for t in p[when])
            if took:
                at = lambda part: took[min(len(took) * part // 100, len(took) - 1)]
                first = alone.setdefault((programs, when), (at(50), at(99)))
                row(scenario="contexts", how=how, programs=programs, ends=when, n=len(took), p50_us=at(50), p90_us=at(90), p99_us=at(99), max_us=took[-1], p50_more_us=at(50) - first[0], p99_more_us=at(99) - first[1], hand_overs=hand_overs)

    for programs in (1, 2):
        ends("native", programs)
    for programs in (1, 2):
        with Scheduler("--gpu-memory", "2GiB", "--tq", "0.2", log="info") as s:
            ends("nvshare", programs, s)


if __name__ == "__main__":
    run_scenarios([churn, legacy, launches, ends, contexts], FAILED)
