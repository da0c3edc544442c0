#!/usr/bin/env python3
"""CUDA IPC and dma-bufs on a real card: each answer natively, and under nvshare with NVSHARE_MEMORY=swap; then in turns with a job that does not fit beside.

ipc.py [driver] [torch] [ranges] [moments] [turns], and with two GPUs [cards]; all by default, in about 120 s. Needs a GPU, PyTorch and `dist/` (cargo dist-local). Rows go to $OUT/rows.jsonl.
"""
from harness import *

FAILED = []
UNDER = dict(NVSHARE_MEMORY="swap")
# The driver refuses a card for which the memory was not opened, but for copies.
STATED = {question: "all cards that are peers reach it" for question in ("it fills by that", "the other one fills by itself")}


def held(name, native, under, job):
    """A row for each question: what was answered, and whether both answers are the same."""
    asked = native.get("answers", {})
    for question, answer in asked.items():
        got = under.get("answers", {}).get(question, "no answer")
        verdict = "same" if got == answer else f"stated: {STATED[question]}" if question in STATED else "DIFFERS"
        row(scenario=name, question=question, native=answer, under=got, verdict=verdict)
        if verdict == "DIFFERS":
            FAILED.append(f"{name}: {question}: {got}, natively {answer}")
    for what, took in under.get("times", {}).items():
        row(scenario=f"{name} ms", what=what, native=round(native.get("times", {}).get(what, 0), 3), under=round(took, 3))
    clients = [client for client in job.clients.values() if client]
    row(scenario=f"{name} counted", immovable_mib=max([sum(u["immovable"] for u in c["usage"]) >> 20 for c in clients], default="?"), **job.counted(clients))
    if not asked or job.process.returncode != 0:
        FAILED.append(f"{name}: {'no answers' if not asked else 'the job failed'}")


def pair(name, what):
    native = Job("ipc_job.py", f"native-{what}", what).finish(40)
    with Scheduler("--gpu-memory", "40GiB", log="info") as s:
        job = Job("ipc_job.py", f"under-{what}", what, scheduler=s, env=UNDER)
        job.finish(40, every=0.2)
    held(name, native.result, job.result, job)
    return native


def driver():
    pair("driver", "driver")


def cards():
    pair("cards", "cards")


def torch():
    pair("torch", "torch")


def ranges():
    """Natively, alone, and in turns of 0.1 s: what a dma-buf names stays, and 6 GiB of the program move."""
    native = pair("ranges", "ranges")
    with Scheduler("--gpu-memory", "16GiB", "--tq", "0.1", log="info") as s:
        beside = Job("job.py", "beside", "--gib", 12, "--steps", 100000, scheduler=s, env=UNDER)
        job = Job("ipc_job.py", "ranges", "ranges", 6, scheduler=s, env=UNDER)
        job.finish(60, every=0.2, others=[beside])
        beside.kill()
    held("ranges in turns", native.result, job.result, job)


def moments():
    """What nobody else has moves: 4 GiB that another process opens for moments, alone, and beside a job of 10 GiB on 12 GiB."""
    native = pair("moments", "moments")
    with Scheduler("--gpu-memory", "12GiB", "--tq", "0.2", log="info") as s:
        beside = Job("job.py", "beside", "--gib", 10, "--steps", 100000, scheduler=s, env=UNDER)
        job = Job("ipc_job.py", "moments", "moments", scheduler=s, env=UNDER)
        job.finish(60, every=0.1, others=[beside])
        beside.kill()
    held("moments in turns", native.result, job.result, job)


def turns():
    """Exporter and importer have 6 GiB that move, beside a job of 12 GiB on 16 GiB; what they share stays."""
    with Scheduler("--gpu-memory", "16GiB", "--tq", "0.1", log="info") as s:
        beside = Job("job.py", "beside", "--gib", 12, "--steps", 100000, scheduler=s, env=UNDER)
        job = Job("ipc_job.py", "turns", "torch", 6, scheduler=s, env=UNDER)
        job.finish(50, every=0.5, others=[beside])
        beside.kill()
    right = {"a tensor, in order of an event, seen by the child": True, "and by the parent": True, "tensors right, of 100 both ways": 100,
             "the child sees what the parent did to its own": True, "the child ends": ["bye", None, 0], "other memory is right": True}
    held("turns", dict(answers=right), job.result, job)


if __name__ == "__main__":
    has_two = len(subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60).stdout.splitlines()) > 1
    run_scenarios([driver, torch, ranges, moments, turns] + [cards] * has_two, FAILED)
