#!/usr/bin/env python3
"""Seats on a real card: the device plugin with NVML, a kubelet that is played, and PyTorch programs at the sockets of two seats.

    tests/gpu/seats.py      needs dist/, and dist/libexec/kubelet (`cargo build --release --package nvshare-device-plugin --example kubelet`)

Rows: the slots are given out; a program sees its seat's limit; a second process of the seat gets what is left; two seats take turns and
their sums are right; a kernel's own fault makes no slot unhealthy.
"""
import json, os, pathlib, subprocess, sys, tempfile, time

from harness import DIST, GIB, LOGS, OUT, Scheduler, row, table

PROGRAM = """
import os, sys, time, torch
gib, seconds, total = float(sys.argv[1]), float(sys.argv[2]), torch.cuda.mem_get_info()[1]
blocks = [torch.full((2**28,), float(i), device="cuda") for i in range(int(gib))]
end, steps = time.time() + seconds, 0
while time.time() < end:
    for block in blocks:
        block.add_(1.0)
    torch.cuda.synchronize()
    steps += 1
# In parts: the comparison takes memory, too.
wrong = sum(int((part != i + steps).sum()) for i, block in enumerate(blocks) for part in block.split(2**22))
print(total >> 20, steps, wrong, flush=True)
"""
FAULT = """
import ctypes, torch
torch.ones(1, device="cuda")
driver = ctypes.CDLL("libcuda.so.1")
print(driver.cuMemsetD8_v2(ctypes.c_uint64(16), 1, ctypes.c_size_t(1)), flush=True)
torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")] = 1
torch.cuda.synchronize()
"""


def start(seats, seat, program, *arguments):
    environment = dict(os.environ, NVSHARE_SOCKET=str(seats / seat / "scheduler.sock"), LD_PRELOAD=str(DIST / "lib/nvshare/libnvshare.so"))
    return subprocess.Popen([sys.executable, "-c", program, *map(str, arguments)], env=environment, stdout=subprocess.PIPE,
                            stderr=open(LOGS / f"{seat}.log", "a"), text=True)


def finish(process):
    out = process.communicate(timeout=200)[0].split()
    return process.returncode, [int(word) for word in out]


def main():
    root = pathlib.Path(tempfile.mkdtemp(prefix="nvshare-seats-"))
    for folder in ("kubelet/kubelet/device-plugins", "kubelet/kubelet/pod-resources", "cdi", "etc-cdi", "state"):
        (root / folder).mkdir(parents=True)
    gpu = subprocess.check_output(["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"], text=True).split()[0]
    (root / "etc-cdi/nvidia.json").write_text(json.dumps({"cdiVersion": "0.3.0", "kind": "nvidia.com/gpu", "devices": [
        {"name": gpu, "containerEdits": {"env": ["SEEN=1"]}}]}))
    seats = root / "seats"
    with Scheduler("--seats", str(seats), "--gpu-memory", "16GiB", "--tq", "1") as scheduler:
        begin = time.time()
        kubelet = subprocess.Popen([DIST / "libexec/kubelet", root / "kubelet", f"one={gpu}::0", f"two={gpu}::1"], stdout=open(root / "given", "w"))
        plugin = subprocess.Popen(
            [DIST / "libexec/nvshare-device-plugin", "--kubelet", root / "kubelet/kubelet", "--cdi-dir", root / "cdi", "--etc-cdi", root / "etc-cdi",
             "--state", root / "state", "--library-dir", root / "state/lib", "--library", DIST / "lib/nvshare/libnvshare.so", "--run-dir", root,
             "--admin-socket", scheduler.env["NVSHARE_ADMIN_SOCKET"], "--slots", "2", "--slot-memory", "12GiB"],
            stderr=open(LOGS / "plugin.log", "w"))
        try:
            while len((root / "given").read_text().splitlines()) < 2 and time.time() < begin + 20:
                time.sleep(0.05)
            row(scenario="seats", what="two slots given out", seconds=f"{time.time() - begin:.2f}", lines=len((root / "given").read_text().splitlines()))
            until = time.time() + 10
            while sum(1 for s in scheduler.status()["seats"] if s["holder"]) < 2 and time.time() < until:
                time.sleep(0.1)
            named = {s["holder"]["pod"]: s["name"] for s in scheduler.status()["seats"] if s["holder"]}
            row(scenario="seats", what="named", seconds=f"{time.time() - begin:.2f}", pods=",".join(sorted(named)))
            first = start(seats, named["one"], PROGRAM, 8, 12)
            time.sleep(6)
            second = start(seats, named["one"], PROGRAM, 8, 1)
            code, _ = finish(second)
            row(scenario="seats", what="second process over the seat's limit", code=code, refused=code != 0)
            small = start(seats, named["one"], PROGRAM, 2, 1)
            row(scenario="seats", what="second process within it", result=finish(small))
            row(scenario="seats", what="the first process meanwhile", result=finish(first))
            jobs = [start(seats, named[pod], PROGRAM, 10, 20) for pod in ("one", "two")]
            time.sleep(15)
            rows = {c["pid"]: c["counters"] for c in scheduler.status()["clients"]}
            for pod, job in zip(("one", "two"), jobs):
                c = rows.get(job.pid, {})
                row(scenario="seats", what=f"in turns, pod {pod}", result=finish(job), hand_overs=c.get("hand_overs"), gated=c.get("gated"), passed_by=c.get("passed_by"))
            code, _ = finish(start(seats, named["two"], FAULT))
            time.sleep(2)
            code_after, after = finish(start(seats, named["two"], PROGRAM, 1, 1))
            row(scenario="seats", what="a kernel's own fault", code=code, next_program=(code_after, after))
            clients = scheduler.ctl("status").stdout
            row(scenario="seats", what="status says", seats=[line for line in clients.splitlines() if "seats" in line])
        finally:
            plugin.terminate()
            kubelet.kill()
            plugin.wait(10)
    print((LOGS / "plugin.log").read_text()[-3000:])
    table("seats")


if __name__ == "__main__":
    main()
