#!/usr/bin/env python3
"""Jobs on two real cards of one host. Needs two GPUs, PyTorch and `dist/` (cargo dist-local).
`ranks`: two jobs of two ranks each over NCCL, both gangs, with room for one of them; in the last run the ranks of one are stopped for a second.
`moves`: two processes that each fill both cards hand over, against two that fill one. Rows go to $OUT/rows.jsonl as they come. Exit code 1 if a program failed."""
import concurrent.futures, re
from harness import *

FAILED = []


def ranks(runs=6, worlds=2, steps=400):
    arguments = ["--gib", 4, "--steps", steps]
    native = Job("ranks_job.py", "native", *arguments).finish(150).result
    row(scenario="ranks", run="native", total_s=native.get("total_s"), setup_s=native.get("setup_s"))

    def one(run):
        with Scheduler("--gpu-memory", "7GiB", "--tq", "0.5") as s:
            go = pathlib.Path(tempfile.mkdtemp()) / "go"
            jobs = [Job("ranks_job.py", name, *arguments, scheduler=s, go=go, env=dict(NVSHARE_GANG=f"{name}{run}:2"), log=f"ranks-{run}-{name}.log") for name in "ab"]
            until = time.time() + 150
            while not all(os.path.exists(f"{go}.{job.name}") for job in jobs) and time.time() < until and all(job.process.poll() is None for job in jobs):
                time.sleep(0.01)
            begin = time.time()
            go.touch()
            stopped = 0
            if run == runs - 1:
                time.sleep(native.get("total_s", 4) / 2)
                pids = [pid for pid in tree(jobs[0].process.pid) if pid != jobs[0].process.pid]
                stopped = len(pids)
                for sent in (signal.SIGSTOP, signal.SIGCONT):
                    for pid in pids:
                        os.kill(pid, sent)
                    time.sleep(1)
            clients = {}
            while any(job.process.poll() is None for job in jobs) and time.time() < begin + 120:
                clients.update((c["pid"], c) for c in s.status()["clients"])
                time.sleep(0.3)
            for job in jobs:
                job.finish(1)
            clients.update((c["pid"], c) for c in s.status()["clients"])
            took = max(job.result.get("end", begin + 999) for job in jobs) - begin
            well = all(job.process.returncode == 0 and job.result.get("sum") == native.get("sum") for job in jobs)
            counted = jobs[0].counted([c for c in clients.values() if c["counters"]["gated"]])
            if not well:
                FAILED.append((run, [(job.process.returncode, open(job.log).read()[-800:]) for job in jobs]))
            row(scenario="ranks", run=run, well=well, both_s=round(took, 2), useful=round(2 * native.get("total_s", 0) / took, 3), processes=sum(1 for c in clients.values() if c["counters"]["gated"]), stopped=stopped, switch_us=[g["switch_us"] for g in s.status()["gpus"]], **counted)

    with concurrent.futures.ThreadPoolExecutor(worlds) as all_worlds:
        for _ in all_worlds.map(one, range(runs)):
            pass


def hand_overs(log):
    """Seconds from each order to give the lock back to the next grant, from the scheduler's log."""
    at, took = None, []
    for line in open(log):
        now = re.match(r"\S+T(\d+):(\d+):([\d.]+)Z", line)
        now = now and int(now[1]) * 3600 + int(now[2]) * 60 + float(now[3])
        if "DropLock" in line:
            at = now
        elif "LockOk" in line and at:
            took.append(now - at)
            at = None
    return sorted(took)


def moves():
    """Processes on one card and on two: seconds from the order to give the lock back to the next grant, in which memory leaves, and those of a restore; medians."""
    medians = {}
    for gpus in (1, 2):
        with Scheduler("--gpu-memory", "10GiB", "--tq", "1") as s:
            jobs, _ = start_together(lambda go: [Job("blocks_job.py", n, "--gib", 8, "--mib", 128, "--gpus", gpus, "--seconds", 14, scheduler=s, go=go, log=f"two-{gpus}-{n}.log") for n in "ab"])
            out = hand_overs(s.log)
            back = sorted(float(t) for job in jobs for t in re.findall(r"restored \d{4} MiB in ([\d.]+) s", open(job.log).read()))
            medians[gpus] = (out[len(out) // 2] if out else 0, back[len(back) // 2] if back else 0)
            for job in jobs:
                wrong = job.result.get("wrong_words")
                row(scenario="moves", gpus=gpus, job=job.name, out_s=round(medians[gpus][0], 4), out_of_one=round(medians[gpus][0] / medians[1][0], 3), restore_s=medians[gpus][1], restore_of_one=round(medians[gpus][1] / medians[1][1], 3), wrong=wrong, **job.counted())
                FAILED.extend([(gpus, job.result)] if wrong != 0 or len(out) < 4 else [])


if __name__ == "__main__":
    run_scenarios([ranks, moves], FAILED)
