#!/usr/bin/env python3
"""The main job on a real card. first_light.py [--memory managed|swap|off] [--cold] SCENARIO ..., each of: alone turns decoder decoders ballast faults
moves exchange fit switch capture contexts; quanta may follow, as in turns:10,2, and numbers of tokens, as in decoders:550.

--cold: the host's memory is not touched first, where rates of moves are not looked at. Run on a machine with a GPU, PyTorch and `dist/` (cargo dist-local). Rows go to $OUT/rows.jsonl as they come."""
import re
from harness import *
from exchange import exchange

SUM = {}


def native_sum(*arguments):
    """The checksum of a native run, and its time: every row is held against it."""
    key = " ".join(map(str, arguments))
    if key not in SUM:
        job = Job("job.py", "native", *arguments).finish()
        SUM[key] = job.result
    return SUM[key]


def alone(pairs=5):
    """Total time with set-up, native and under nvshare, interleaved."""
    ratios = []
    for i in range(pairs):
        native = Job("job.py", f"native{i}", "--gib", 12, "--steps", 300).finish()
        with Scheduler("--gpu-memory", "100GiB", log="info") as s:
            under = Job("job.py", f"under{i}", "--gib", 12, "--steps", 300, scheduler=s).finish()
        t = [round(j.result["setup_s"] + j.result["total_s"], 3) for j in (native, under)]
        ratios.append(t[1] / t[0])
        row(scenario="alone", native_s=t[0], under_s=t[1], ratio=round(t[1] / t[0], 4), native_setup=native.result["setup_s"], under_setup=under.result["setup_s"], native_wall=round(native.wall, 2), under_wall=round(under.wall, 2),
            same_sum=native.result["sum"] == under.result["sum"], **under.counted())
    ratios.sort()
    row(scenario="alone", ratio=f"median {ratios[len(ratios) // 2]:.4f} min {ratios[0]:.4f} max {ratios[-1]:.4f}")


def turns(quanta=(10, 5, 2), steps=800, restore=True, scenario="turns", dirty="one"):
    args = ["--gib", 12, "--steps", steps, "--dirty", dirty]
    native = native_sum(*args)
    for tq in quanta:
        with Scheduler("--gpu-memory", "16GiB", "--tq", str(tq)) as s:
            env = {} if restore else dict(NVSHARE_RESTORE="0")
            jobs, both = start_together(lambda go: [Job("job.py", n, *args, scheduler=s, go=go, env=env, log=f"{scenario}-{tq}-{n}.log") for n in "ab"])
            for job in jobs:
                row(scenario=scenario, tq=tq, dirty=dirty, job=job.name, alone_s=native["total_s"], total_s=job.result.get("total_s"), both_s=round(both, 2), useful=round(2 * native["total_s"] / both, 4), same_sum=job.result.get("sum") == native["sum"],
                    step_p50=job.result["step_ms"]["p50"], step_p50_alone=native["step_ms"]["p50"], step_max=job.result["step_ms"]["max"], **job.counted())
            print(s.ctl("status").stdout, flush=True)


def decoder(rounds=4):
    """A decoder in CUDA graphs and eagerly, alone: natively, and with each kind of memory, interleaved."""
    rates = {}
    for i in range(rounds):
        for how in ("native", "off", "managed", "swap"):
            with Scheduler("--gpu-memory", "100GiB", log="info") as s:
                under = {} if how == "native" else dict(scheduler=s, env=dict(NVSHARE_MEMORY=how))
                job = Job("graph_decode_job.py", f"{how}{i}", **under).finish(100)
            native = rates.setdefault("native", [])
            rates.setdefault(how, []).append(job.result)
            ratios = {kind: round(job.result[f"{kind}_per_s"] / native[-1][f"{kind}_per_s"], 4) for kind in ("graph", "eager")}
            row(scenario="decoder", how=how, graph_per_s=job.result["graph_per_s"], eager_per_s=job.result["eager_per_s"], graph_of_native=ratios["graph"], eager_of_native=ratios["eager"], setup_s=job.result["setup_s"],
                same_tokens=job.result["sum"] == native[0]["sum"] and job.result["sum_eager"] == native[0]["sum_eager"], **(job.counted() if under else {}))
    for how in rates:
        for kind in ("graph", "eager"):
            of = sorted(r[f"{kind}_per_s"] / n[f"{kind}_per_s"] for r, n in zip(rates[how], rates["native"]))
            row(scenario="decoder", how=how, kind=kind, of_native=f"median {(of[(len(of) - 1) // 2] + of[len(of) // 2]) / 2:.4f} min {of[0]:.4f} max {of[-1]:.4f}")


def decoders(counts=(550,), tq=2):
    """Two decoders of 21 GiB each, most of them an unused cache, with room for one, for each of these numbers of tokens; native runs give the same first 200 tokens, and others later."""
    for tokens in counts:
        two_decoders(int(tokens), tq)


def two_decoders(tokens, tq):
    arguments = (24, 32768, tokens)
    native = Job("decode_job.py", "alone", *arguments).finish(100).result
    with Scheduler("--gpu-memory", "24GiB", "--tq", str(tq), log="info") as s:
        alone = Job("decode_job.py", "under", *arguments, scheduler=s).finish(100).result
        row(scenario="decoders", tokens=tokens, job="one alone", median_ms=alone["median_ms"], native_median_ms=native["median_ms"], of_native=round(alone["per_s"] / native["per_s"], 4))
        jobs, both = start_together(lambda go: [Job("decode_job.py", n, *arguments, scheduler=s, go=go, log=f"decoders-{tokens}-{n}.log") for n in "ab"])
        for job in jobs:
            row(scenario="decoders", tokens=tokens, tq=tq, job=job.name, alone_per_s=native["per_s"], both_s=round(both, 2), in_sum_of_alone=round(2 * native["total_s"] / both, 4), median_ms=job.result["median_ms"], max_ms=job.result["max_ms"], same_first_tokens=job.result["first"] == native["first"] != 0, **job.counted())


def ballast(pairs=5):
    """Pairs of jobs on a card that another program, of which the scheduler knows nothing, has filled but for 17 GiB; no capacity is configured."""
    args = ["--gib", 12, "--steps", 60]
    native = native_sum(*args)
    ready = pathlib.Path(tempfile.mkdtemp()) / "go"
    other = Job("ballast_job.py", "ballast", 17, go=ready)
    try:
        while not os.path.exists(f"{ready}.ballast") and other.process.poll() is None:
            time.sleep(0.05)
        with Scheduler("--tq", "1", log="info") as s:
            for pair in range(pairs):
                jobs, both = start_together(lambda go: [Job("job.py", n, *args, scheduler=s, go=go, log=f"ballast-{pair}-{n}.log") for n in "ab"])
                for job in jobs:
                    row(scenario="ballast", pair=pair + 1, job=job.name, capacity_gib=round(s.gpu(s.status())["capacity"] / GIB, 2), rc=job.process.returncode, both_s=round(both, 2), same_sum=job.result.get("sum") == native["sum"], **job.counted())
    finally:
        other.kill()
        other.output(20)


def faults():
    """The control: restore switched off, so that page faults bring the memory back."""
    turns(quanta=(10,), steps=300, restore=False, scenario="faults")
    turns(quanta=(10,), steps=300, scenario="faults")


def moves():
    """Each move of the library against the same move bare: medians, since evictions vary by a third from one to the next."""
    bare = Job("bare_moves.py", "bare").finish().result
    row(scenario="bare moves", **{k: v for k, v in bare.items() if not k.endswith("_all")})
    for mib in (1024, 256, 128, 20, 2):
        with Scheduler("--gpu-memory", "16GiB", "--tq", "1", "--exchange", "nobody") as s:
            jobs, _ = start_together(lambda go: [Job("blocks_job.py", n, "--mib", mib, "--seconds", 16, scheduler=s, go=go, log=f"moves-{mib}-{n}.log") for n in "ab"])
            for job in jobs:
                rates = {w: sorted(float(m) for m in re.findall(w + r" 81\d\d MiB in [\d.]+ s \(([\d.]+) GiB/s\)", open(job.log).read())) for w in ("evicted", "restored")}
                mid = {w: r[len(r) // 2] if r else 0 for w, r in rates.items()}
                row(scenario="moves", mib=mib, job=job.name, evict=mid["evicted"], evict_of_bare=round(mid["evicted"] / bare[f"evict_{mib}"], 3), evict_min_max=f"{min(rates['evicted'], default=0)}-{max(rates['evicted'], default=0)}",
                    bare_min_max=f"{min(bare[f'evict_{mib}_all'])}-{max(bare[f'evict_{mib}_all'])}", restore=mid["restored"], restore_of_bare=round(mid["restored"] / bare[f"restore_{mib}"], 3), restore_of_pinned=round(mid["restored"] / bare["pinned_h2d"], 3), wrong=job.result.get("wrong_words"), **job.counted())


def fit(pairs=3):
    """Two jobs that fit: native time slicing against nvshare, interleaved."""
    for args in (["--gib", 2, "--steps", 800, "--cpu-ms", 12], ["--gib", 4, "--steps", 400]):
        ratios, args_text = [], " ".join(map(str, args))
        for i in range(pairs):
            jobs, native = start_together(lambda go: [Job("job.py", n, *args, go=go) for n in "ab"])
            sums = [j.result["sum"] for j in jobs]
            with Scheduler("--gpu-memory", "100GiB", log="info") as s:
                jobs, under = start_together(lambda go: [Job("job.py", n, *args, scheduler=s, go=go) for n in "ab"])
                counted = jobs[0].counted([job.counters for job in jobs])
            ratios.append(under / native)
            row(scenario="fit", args=args_text, native_s=round(native, 3), under_s=round(under, 3), ratio=round(under / native, 4), same_sum=sums == [j.result["sum"] for j in jobs], **counted)
        ratios.sort()
        row(scenario="fit", args=args_text, ratio=f"median {ratios[len(ratios) // 2]:.4f} min {ratios[0]:.4f} max {ratios[-1]:.4f}")


def parts_of_hand_overs(scheduler):
    """The parts of each hand-over in ms, from the scheduler's events; one that another event interrupts is left out. The library tells `drain` and `open`; what is beside them is the way of messages."""
    events = [json.loads(line) for line in scheduler.ctl("watch", "--json", "--no-follow").stdout.splitlines()]
    steps = [event for event in events if event["event"] in ("released", "granted", "running")]
    phase = lambda event, name: sum(p["took_us"] for p in event["phases"] if p["phase"] == name)
    for released, granted, running in zip(steps, steps[1:], steps[2:]):
        if [e["event"] for e in (released, granted, running)] != ["released", "granted", "running"] or released["took_us"] is None:
            continue
        drain, opens = phase(released, "drain"), phase(running, "open")
        micros = dict(to_drain=released["took_us"] - drain, drain=drain, to_grant=granted["up_us"] - released["up_us"], to_gate=running["took_us"] - opens, open=opens, gpu_free=running["up_us"] - released["up_us"])
        yield dict(at_s=round(released["up_us"] / 1e6, 2), **{part: round(us / 1e3, 3) for part, us in micros.items()})


def switch(seconds=(25,)):
    """Hand-overs with nothing to move: one at a time, memory for both. Where their time goes, the slowest one by one, and bare messages beside them."""
    with Scheduler("--gpu-memory", "100GiB", "--exclusive", "--tq", "0.1", log="info") as s:
        jobs, both = start_together(lambda go: [Job("job.py", n, "--gib", 2, "--seconds", seconds[0], scheduler=s, go=go) for n in "ab"] + [Job("bare_messages.py", "bare", "--seconds", seconds[0], go=go)])
        n, p50, p99, longest = s.gpu(s.status())["switch_us"]
        bare = jobs.pop().result
        for job in jobs:
            row(scenario="switch", job=job.name, switches=n, p50_ms=p50 / 1e3, p99_ms=p99 / 1e3, max_ms=longest / 1e3, **job.counted())
        hand_overs = list(parts_of_hand_overs(s))
        for part in list(hand_overs[0])[1:] if hand_overs else []:
            q = sorted(h[part] for h in hand_overs)
            row(scenario="parts of a switch", part=part, switches=len(q), p50_ms=q[len(q) // 2], p90_ms=q[len(q) * 9 // 10], p99_ms=q[len(q) * 99 // 100], max_ms=q[-1])
        row(scenario="parts of a switch", part="bare message, there and back", switches=bare.get("messages"), **{k: bare.get(k) for k in ("p50_ms", "p90_ms", "p99_ms", "max_ms")})
        for slow in sorted(hand_overs, key=lambda h: -h["gpu_free"])[:8]:
            row(scenario="slowest switches", **slow)


def capture():
    """PyTorch captures a CUDA graph while another program takes the lock."""
    with Scheduler("--gpu-memory", "16GiB", "--tq", "0.5", log="info") as s:
        other = Job("job.py", "other", "--gib", 12, "--seconds", 40, scheduler=s)
        job = Job("capture_job.py", "capture", scheduler=s).finish()
        other.finish()
        row(scenario="capture", **{k: job.result.get(k) for k in ("captures", "replays", "wrong", "error")}, returncode=job.process.returncode, **job.counted())


def contexts(most=4):
    """What programs take beside what they allocate, as the scheduler measures it and as NVML says of the card; the second has plain memory."""
    with Scheduler(log="info") as s:
        jobs = []
        try:
            for n in range(1, most + 1):
                jobs.append(Job("job.py", f"context{n}", "--gib", 2, "--seconds", 90, scheduler=s, env=dict(NVSHARE_PLAIN="all") if n == 2 else None))
                while not (c := s.client(jobs[-1].process.pid)) or not c["usage"] or c["usage"][0]["allocated"] < 2 * GIB:
                    time.sleep(0.1)
                time.sleep(11)  # it is looked at every 5 s, and counts from the second time on
                g, clients = s.gpu(s.status()), [s.client(job.process.pid) for job in jobs]
                apps = subprocess.run(["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=20).stdout
                by_nvml = sum(int(line.split(",")[1]) for line in apps.splitlines()) << 20
                row(scenario="contexts", programs=n, capacity_gib=round(g["capacity"] / GIB, 3), overhead_mib=g["overhead"] >> 20, each_mib=[c["overhead"] >> 20 for c in clients], immovable_mib=[c["usage"][0]["immovable"] >> 20 for c in clients],
                    nvml_processes_mib=by_nvml >> 20, beside_plain_mib=by_nvml - sum(c["usage"][0]["immovable"] for c in clients) >> 20, gated=sum(c["counters"]["gated"] for c in clients), passed_by=sum(c["counters"]["passed_by"] for c in clients))
        finally:
            for job in jobs:
                job.kill()
                job.output(20)


if __name__ == "__main__":
    print(card(), flush=True)
    arguments = sys.argv[1:]
    if arguments[:1] == ["--memory"]:
        choose_memory(arguments[1])
        del arguments[:2]
    warm = "--cold" not in arguments
    arguments = [argument for argument in arguments if argument != "--cold"]
    wanted = arguments or ["alone", "turns", "decoder", "decoders", "ballast", "faults", "moves", "exchange", "fit", "switch", "capture", "contexts"]
    if warm and {"turns", "decoders", "ballast", "faults", "moves", "exchange", "capture"} & {w.split(":")[0] for w in wanted}:
        warm_host(48)
    for scenario in wanted:
        name, _, argument = scenario.partition(":")
        begin = time.time()
        if argument:
            globals()[name](tuple(float(x) for x in argument.split(",")))
        else:
            globals()[name]()
        print(f"  {name} took {time.time() - begin:.0f} s", flush=True)
    for scenario in dict.fromkeys(r["scenario"] for r in ROWS):
        table(scenario)
    print(card())
