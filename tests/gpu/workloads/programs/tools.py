#!/usr/bin/env python3
"""NVIDIA's tools on a sample: each puts itself between a program and the driver, as nvshare does. memcheck, racecheck, a profile of a kernel, a debugger."""
import pathlib, re, shutil, subprocess, sys, program
program.need()
HERE = pathlib.Path(__file__).resolve().parent
sample = [str(HERE.parents[1] / "samples/bin/basics"), "histogram"]
def find(tool): return shutil.which(tool) or next((str(p) for p in sorted(pathlib.Path("/").glob(f"usr/local/cuda*/bin/{tool}"))), None)
def call(name, tool, *arguments, seconds=25):
    if not find(tool): return f"no {tool}"
    try: r = subprocess.run([find(tool), *arguments], capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired: return "too slow"
    print(f"== {name}: {r.returncode}\n{r.stdout[-1500:]}\n{r.stderr[-1500:]}", file=sys.stderr)
    return r.returncode, *sorted(set(re.findall(r"ERROR SUMMARY: .*|RACECHECK SUMMARY: .*|exited normally|No kernels were profiled", r.stdout + r.stderr)))
with program.work(lambda: None):
    seen = {
        "memcheck": call("memcheck", "compute-sanitizer", "--tool", "memcheck", *sample),
        "racecheck": call("racecheck", "compute-sanitizer", "--tool", "racecheck", *sample),
        "ncu": call("ncu", "ncu", "--clock-control", "none", "--launch-count", "3", "--section", "LaunchStats", *sample),
        "cuda-gdb": call("cuda-gdb", "cuda-gdb", "-batch", "-ex", "run", "--args", *sample),
    }
program.tell(str(seen), seen=str(seen))
