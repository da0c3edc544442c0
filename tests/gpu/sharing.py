#!/usr/bin/env python3
"""Programs whose processes share memory: each natively, alone under nvshare with NVSHARE_MEMORY=swap, and in turns of 0.1 s beside a neighbour that does
not fit with it. The answers have to be the native ones, with launches gated and none passed by; in turns, there are to be 500 hand-overs in sum.

sharing.py [NAME ...] [--only alone|turns] [--hand-overs 500]: all by default, in about 240 s. Needs a GPU, PyTorch, CuPy and `dist/` (cargo dist-local).
`spawn`, `forkserver`: PyTorch's queues of tensors. `parameters`: a model that three processes train. `allreduce`: four processes that map each other's buffers.
`cupy`, `rmm`: handles of pools' arrays. `events`: processes that order their work by each other's events. `many`: 100 producers and 100 consumers, as threads of eight
processes. `static`: a stripped program with the CUDA runtime in it (needs nvcc). What is not installed has not passed. Rows go to $OUT/rows.jsonl; exit code 1 if anything failed.

In turns a program goes on until its own processes have given the GPU back often enough, or for 30 s. The neighbour's hand-overs are not in the sum.
Three schedulers with a neighbour each run at the same time; each has a third of the programs, one after the other."""
import argparse, concurrent.futures, math, threading, types
from harness import *

STATIC = OUT / "sharing_static"
PROGRAMS = {name: "sharing_job.py" for name in ("spawn", "forkserver", "parameters", "allreduce", "cupy", "rmm")}
PROGRAMS |= dict(events="sharing_driver.py", many="sharing_driver.py", static=str(STATIC))
LEAST = dict(allreduce=200)
LANES = [["many", "cupy", "forkserver"], ["allreduce", "spawn", "events"], ["parameters", "static", "rmm"]]
UNDER = dict(NVSHARE_MEMORY="swap")
# Beside the neighbour 1 GiB is free. Each process has 1.25 GiB of its own, so none fits beside it; the eight of `many` fit without it.
# What they share stays: at most 0.6 GiB, so that the neighbour has room beside it.
CAPACITY, NEIGHBOUR_GIB, GIB_EACH = "12GiB", 11, 1.25
ALONE, IN_TURNS, LIMIT = 2, 30, 130  # seconds: of rounds, of rounds in turns at most, until a program is killed
FAILED, LOCK = [], threading.Lock()


def tell(**fields):
    with LOCK:
        row(**fields)


def failed(what):
    with LOCK:
        FAILED.append(what)


def scheduler(*arguments):
    with LOCK:  # Two at once would get the same log.
        return Scheduler(*arguments, log="info")


class Sharing(Job):
    """A program, and what all its processes are seen to do. In turns it is told to stop when they have given the GPU back `enough` times."""

    def __init__(self, name, how, seconds, scheduler=None, stop=None, enough=math.inf):
        self.program, self.how, self.stop, self.enough, self.immovable = name, how, stop, enough, 0
        arguments = ["--seconds", seconds, "--least", LEAST.get(name, 2), "--gib", GIB_EACH] + (["--stop", stop] if stop else [])
        super().__init__(PROGRAMS[name], name, *arguments, scheduler=scheduler, env=UNDER if scheduler else None, log=f"sharing-{name}-{how}.log")

    def look(self, others=()):
        super().look(others)
        here = [c for c in self.clients.values() if not c["gone"]]
        self.immovable = max(self.immovable, sum(u["immovable"] for c in here for u in c["usage"]))
        if self.stop and self.hand_overs() >= self.enough:
            pathlib.Path(self.stop).touch()

    def hand_overs(self):
        return sum(c["counters"]["hand_overs"] for c in self.clients.values())

    def finish(self, others=()):
        super().finish(LIMIT, every=0.4, others=others)
        for pid, client in self.clients.items():  # After a failure, a child may wait for a parent that is gone.
            if not client["gone"]:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        return self

    def skipped(self):
        return self.result.get("answers", {}).get("skipped")


def why_not(native, job):
    """Why a run does not count, or nothing."""
    answers, wanted = job.result.get("answers"), native.result.get("answers")
    if job.process.returncode != 0 or not answers:
        return f"ended with {job.process.returncode}: {(answers or {}).get('failed', 'no answer' if not answers else '')}"
    if native is job:
        return None
    for question in {**wanted, **answers}:
        if answers.get(question) != wanted.get(question):
            return f"{question}: {answers.get(question)}, natively {wanted.get(question)}"
    counted = job.counted(list(job.clients.values()))
    if not counted["gated"] or counted["passed_by"] != 0:
        return f"{counted['gated']} launches were gated, {counted['passed_by']} passed by"
    return None


def judge(native, job):
    """A row for a run."""
    why = why_not(native, job)
    verdict = "not installed" if not why and job.skipped() else f"FAILED: {why}" if why else "right" if native is job else "same"
    counted = {}
    if job is not native:
        counted = job.counted(list(job.clients.values()))
        names = ("gated", "passed_by", "hand_overs", "deferrals", "evicted_gib", "restored_gib")
        counted = dict(clients=len(job.clients), **{name: counted[name] for name in names if name in counted}, immovable_mib=job.immovable >> 20)
    rounds = job.result.get("counts", {}).get("rounds", "?")
    tell(scenario=job.how, program=job.program, verdict=verdict, answers=len(job.result.get("answers", {})), rounds=rounds, total_s=round(job.wall, 1), **counted)
    if why:
        failed(f"{job.how}: {job.program}: {why}")
    return not why and not job.skipped()


def build():
    """The static program; says why there is none."""
    if not shutil.which("nvcc"):
        return "no nvcc"
    source = HERE / "workloads/sharing_static.cu"
    command = ["nvcc", "-O2", "-std=c++17", "-arch=sm_90", "-cudart", "static", "-Xlinker", "--strip-all", source, "-o", STATIC]
    made = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if made.returncode:
        failed(f"static: does not build: {made.stderr[-800:]}")
        return "does not build"


def four_at_once(what, names):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        return dict(zip(names, pool.map(what, names)))


def natively(names):
    def one(name):
        job = Sharing(name, "native", ALONE).finish()
        return job if judge(job, job) else None
    return {name: job for name, job in four_at_once(one, names).items() if job}


def alone(natives):
    def one(name):
        with scheduler("--gpu-memory", "40GiB") as s:
            judge(natives[name], Sharing(name, "alone", ALONE, s).finish())
    four_at_once(one, natives)


def lane(number, names, natives, enough):
    """Programs one after the other, beside one neighbour. Returns the hand-overs of each."""
    done = {}
    with scheduler("--gpu-memory", CAPACITY, "--tq", "0.1") as s:
        stop = pathlib.Path(s.dir) / "stop"
        neighbour = Job(str(HERE / "workloads/programs/neighbour.py"), f"neighbour{number}", stop, "--gib", NEIGHBOUR_GIB, "--seconds", 500, scheduler=s, env=UNDER)
        try:
            until = time.time() + 40
            while not os.path.exists(f"{stop}.ready") and neighbour.process.poll() is None and time.time() < until:
                time.sleep(0.02)
            before = [neighbour]
            for name in names:
                job = Sharing(name, "turns", IN_TURNS, s, pathlib.Path(s.dir) / f"stop-{name}", enough).finish(before)
                done[name] = job.hand_overs()
                judge(natives[name], job)
                before += [types.SimpleNamespace(process=types.SimpleNamespace(pid=pid)) for pid in job.clients]
        finally:
            stop.touch()
            neighbour.finish(30)
        well = neighbour.result.get("ok") is True
        verdict = "right" if well else f"FAILED: {neighbour.result}"
        tell(scenario="turns", program=neighbour.name, verdict=verdict, rounds=neighbour.result.get("passes", "?"), **neighbour.counted())
        if not well:
            failed(f"turns: {neighbour.name}: {neighbour.result}")
    return done


def turns(natives, hand_overs):
    """Each program is to have a half more than its part of the sum: some may be slower than others."""
    enough = math.ceil(1.5 * hand_overs / max(1, len(natives)))
    lanes = [[name for name in names if name in natives] for names in LANES]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        all_done = list(pool.map(lambda at: lane(*at, natives, enough), [at for at in enumerate(lanes) if at[1]]))
    done = sum(count for of_lane in all_done for count in of_lane.values())
    tell(scenario="sum", programs=len(natives), hand_overs=done, wanted=hand_overs, verdict="enough" if done >= hand_overs else "FAILED: too few")
    if done < hand_overs:
        failed(f"turns: {done} hand-overs in sum, not {hand_overs}")


def timed(what, *arguments):
    begin = time.time()
    result = what(*arguments)
    print(f"  {what.__name__} took {time.time() - begin:.0f} s", flush=True)
    return result


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("names", nargs="*", choices=[*PROGRAMS, []], metavar="NAME", help=" ".join(PROGRAMS) + "; all by default")
    p.add_argument("--only", choices=["alone", "turns"], help="what comes after the native runs; both by default")
    p.add_argument("--hand-overs", type=int, help="in sum, wanted; for fewer programs 500 in proportion")
    a = p.parse_args()
    names = a.names or list(PROGRAMS)
    print(card(), flush=True)
    if "static" in names and (reason := build()):
        tell(scenario="native", program="static", verdict="not installed", why=reason)
        names.remove("static")
    natives = timed(natively, names)
    if a.only != "turns":
        timed(alone, natives)
    if a.only != "alone":
        timed(turns, natives, a.hand_overs or 500 * (len(names) if a.names else len(PROGRAMS)) // len(PROGRAMS))
    for scenario in dict.fromkeys(r["scenario"] for r in ROWS):
        table(scenario)
    for failure in FAILED[:10]:
        print("FAILED", failure)
    print(card())
    sys.exit(bool(FAILED))
