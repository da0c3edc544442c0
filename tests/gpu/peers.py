#!/usr/bin/env python3
"""Programs that use two cards with peer access, natively and under nvshare, managed and with swap: alone, and in turns of 0.1 s with a neighbour
on each card. Every word is checked by the programs. Needs two GPUs of one host, nvcc (or samples/bin), PyTorch and `dist/` (cargo dist-local).
`alone`, `turns`: the cases of samples/peers.cu; in turns, two of its `rounds` against each other, too. `torch`: workloads/peers_job.py.
`ranks`: an all-reduce by NCCL over two processes. In about 150 s. Rows go to $OUT/rows.jsonl as they come. Exit code 1 if anything failed."""
import concurrent.futures
import samples
from harness import *

FAILED = []
PEERS = HERE / "samples/bin/peers"
# Neighbour and program do not fit on this together; what all have is far below what a card has.
CAPACITY, NEIGHBOUR_GIB, TURN = "2816MiB", 2, "0.1"
STATED = {(case, "managed"): "every GPU reaches managed memory" for case in ("after_the_end", "current_elsewhere")}
STATED["copies", "swap"] = "a copy that names the wrong contexts is refused"
samples.TIMEOUT = 60


def memories():
    return [os.environ["NVSHARE_MEMORY"]] if "NVSHARE_MEMORY" in os.environ else ["managed", "swap"]


def for_each_memory(what):
    """Both kinds of memory at once, each with a scheduler of its own."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        return dict(zip(memories(), pool.map(what, memories())))


def tell(scenario, memory, **fields):
    row(**dict(dict(scenario=scenario, memory=memory), **fields))


def total(clients):
    names = ("gated", "passed_by", "hand_overs", "deferrals")
    return {name: sum(c["counters"][name] for c in clients) for name in names} | {f"{name}_gib": round(sum(c["counters"][name] for c in clients) / GIB, 1) for name in ("evicted", "restored")}


class Neighbours:
    """A scheduler, and on each of two cards a program that fills most of what the scheduler gives away, until the end."""

    def __init__(self, scenario, memory):
        self.scenario, self.memory = scenario, memory
        self.scheduler = Scheduler("--gpu-memory", CAPACITY, "--tq", TURN, log="info")

    def __enter__(self):
        self.stops, self.jobs = [pathlib.Path(self.scheduler.dir) / f"stop{card}" for card in (0, 1)], []
        for card, stop in enumerate(self.stops):
            env = dict(CUDA_VISIBLE_DEVICES=str(card), NVSHARE_MEMORY=self.memory)
            self.jobs.append(Job(str(HERE / "workloads/programs/neighbour.py"), f"neighbour{card}", stop, "--gib", NEIGHBOUR_GIB, "--seconds", 150, scheduler=self.scheduler, env=env, log=f"{self.scenario}-{self.memory}-neighbour{card}.log"))
        until = time.time() + 30
        while not all(os.path.exists(f"{stop}.ready") for stop in self.stops) and time.time() < until:
            time.sleep(0.02)
        return self

    def others(self):
        """The clients that are no neighbours."""
        theirs = {job.process.pid for job in self.jobs}
        return [c for c in self.scheduler.status()["clients"] if c["pid"] not in theirs]

    def __exit__(self, *_):
        for stop in self.stops:
            stop.touch()
        for job in self.jobs:
            job.finish(30)
            tell(self.scenario, self.memory, who=job.name, said="right" if job.result.get("ok") else f"FAILED {job.result}", passes=job.result.get("passes"), **total([job.counters] if job.counters else []))
            if not job.result.get("ok"):
                FAILED.append(f"{self.scenario} {self.memory}: {job.name}: {job.result}")
        self.scheduler.__exit__()


def cases():
    if not PEERS.exists():
        subprocess.run(["sh", HERE / "samples/build.sh", "peers"], check=True, stdout=subprocess.DEVNULL)
    return samples.cases(["peers/"], False)


NATIVE = {}


def natively():
    if not NATIVE:
        NATIVE.update(samples.all_of(cases(), 4, samples.run))
    return NATIVE


def compare(scenario, memory, under, **fields):
    """A row for each case: what came out natively and under nvshare."""
    for case in cases():
        native, got = natively()[case.name], under[case.name]
        stated = STATED.get((case.case, memory))
        verdict = "same" if samples.same(native, got) else f"stated: {stated}" if stated else "DIFFERS"
        tell(scenario, memory, who=case.case, native=native.state, said=got.state, verdict=verdict, native_s=native.seconds, under_s=got.seconds, **fields)
        if verdict == "DIFFERS":
            FAILED.append("\n".join([f"{scenario} {memory}: {case.name}: {got.state}", *samples.differences(native, got), *(f"    stderr: {line[:300]}" for line in got.errors.splitlines()[-6:])]))


def alone():
    natively()

    def world(memory):
        with Scheduler("--gpu-memory", "40GiB", log="info") as s:
            under = samples.all_of(cases(), 4, lambda c: samples.run(c, s, dict(NVSHARE_MEMORY=memory)))
            return under, total(s.status()["clients"])
    for memory, (under, counted) in for_each_memory(world).items():
        compare("alone", memory, under)
        tell("alone", memory, who="all", **counted)


def turns(seconds=20):
    natively()

    def world(memory):
        with Neighbours("turns", memory) as n:
            under = samples.all_of(cases(), 3, lambda c: samples.run(c, n.scheduler, dict(NVSHARE_MEMORY=memory)))
            counted = total(n.others())
            jobs = [Job(str(PEERS), "rounds", seconds, 1024, scheduler=n.scheduler, env=dict(NVSHARE_MEMORY=memory), log=f"turns-{memory}-rounds{k}.log") for k in (1, 2)]
            for job in jobs:
                job.finish(seconds + 40)
            return under, counted, jobs
    native = Job(str(PEERS), "rounds", 3, 1024, log="turns-native-rounds.log").finish(40)
    tell("turns", "native", who="rounds", said=native.process.returncode, rounds=native.result.get("rounds"))
    for memory, (under, counted, jobs) in for_each_memory(world).items():
        compare("turns", memory, under)
        tell("turns", memory, who="all", **counted)
        for job in jobs:
            well = job.process.returncode == 0 and job.counters and job.counters["counters"]["hand_overs"] > 0
            tell("turns", memory, who="rounds", said="right" if well else f"FAILED {job.process.returncode}", rounds=job.result.get("rounds"), **total([job.counters] if job.counters else []))
            if not well:
                FAILED.append(f"turns {memory}: rounds: {job.process.returncode} {open(job.log).read()[-600:]}")


def torch(seconds=12):
    native = Job("peers_job.py", "native", "--seconds", 3, log="torch-native.log").finish(80)
    tell("torch", "native", who="peers_job", said=native.result.get("said"), steps=native.result.get("steps"))

    def world(memory):
        with Neighbours("torch", memory) as n:
            return Job("peers_job.py", memory, "--seconds", seconds, scheduler=n.scheduler, env=dict(NVSHARE_MEMORY=memory), log=f"torch-{memory}.log").finish(seconds + 60)
    for memory, job in for_each_memory(world).items():
        same = bool(native.result) and job.result.get("said") == native.result["said"]
        tell("torch", memory, who="peers_job", said=job.result.get("said"), verdict="same" if same else "DIFFERS", steps=job.result.get("steps"), **total([job.counters] if job.counters else []))
        if not same:
            FAILED.append(f"torch {memory}: {job.result.get('said')}, natively {native.result.get('said')}")


def ranks(steps=60):
    arguments = ["--gib", 1, "--steps", steps]
    native = Job("ranks_job.py", "native", *arguments, log="ranks-native.log").finish(80)
    tell("ranks", "native", who="ranks_job", total_s=native.result.get("total_s"))

    def world(memory):
        with Neighbours("ranks", memory) as n:
            job = Job("ranks_job.py", memory, *arguments, scheduler=n.scheduler, env=dict(NVSHARE_MEMORY=memory, NVSHARE_GANG=f"ranks-{memory}:2"), log=f"ranks-{memory}.log").finish(100)
            return job, total([c for c in n.others() if c["counters"]["gated"]])
    for memory, (job, counted) in for_each_memory(world).items():
        same = bool(native.result) and job.result.get("sum") == native.result.get("sum")
        tell("ranks", memory, who="ranks_job", verdict="same" if same else "DIFFERS", total_s=job.result.get("total_s"), **counted)
        if not same:
            FAILED.append(f"ranks {memory}: {job.result}, natively {native.result}; {open(job.log).read()[-600:]}")


if __name__ == "__main__":
    run_scenarios([alone, turns, torch, ranks], FAILED)
