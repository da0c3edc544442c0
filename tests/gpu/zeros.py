#!/usr/bin/env python3
"""Calls every hooked function with nothing but zeros, natively and hooked: the driver's own answer has to come back.

Run on a machine with a GPU, a C compiler and `dist/` (cargo dist-local). Each call has a process of its own, because the driver
dies of some; what differs is printed, and the exit code is 1."""
import concurrent.futures, os, pathlib, subprocess, sys, tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "dist/lib/nvshare/libnvshare.so"
NAMES = (ROOT / "tests/e2e/tests/golden/exports.txt").read_text().split()
# These block for ever, or end the process's use of the driver, by design.
LEFT_OUT = {"dlsym", "dlvsym"}


def call(guest, name, hooked):
    env = dict(os.environ, NVSHARE_LOG="off", NVSHARE_SOCKET="/nonexistent")
    if hooked:
        env["LD_PRELOAD"] = str(LIBRARY)
    try:
        done = subprocess.run([guest, name], env=env, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout.strip()
    except subprocess.TimeoutExpired:
        return "hangs", ""


with tempfile.TemporaryDirectory() as work, concurrent.futures.ThreadPoolExecutor(12) as pool:
    guest = f"{work}/zeros"
    subprocess.run(["cc", "-w", "-pthread", "-o", guest, str(ROOT / "tests/guests/zeros.c"), "-ldl"], check=True)
    names = [name for name in NAMES if name not in LEFT_OUT]
    answers = {key: pool.submit(call, guest, *key) for name in names for key in [(name, False), (name, True)]}
    different = absent = 0
    for name in names:
        native, hooked = (answers[name, h].result() for h in (False, True))
        absent += native[1] == "absent"
        if native != hooked:
            different += 1
            print(f"{name}: natively {native}, hooked {hooked}", flush=True)
print(f"{len(names)} functions, {absent} of them absent from this driver, {different} with another answer than the driver's")
sys.exit(different > 0)
