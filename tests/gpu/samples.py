#!/usr/bin/env python3
"""The samples, natively and under nvshare: what each prints and how it ends must be the same.

Run on a machine with a GPU, `dist/` (cargo dist-local) and tests/gpu/samples/bin (samples/build.sh). Rows go to $OUT/rows.jsonl,
what differs to $OUT/samples.txt as well. A case that is skipped has not passed. Exit code 1 if a case that is well natively is not
the same under nvshare."""
import argparse, collections, threading, types
from concurrent.futures import ThreadPoolExecutor
from harness import *

BIN = HERE / "samples/bin"
TIMEOUT = 30
WORK = pathlib.Path(tempfile.mkdtemp(prefix="samples-"))
# What looks at the whole card's memory runs by itself.
ALONE = {"memory_info", "reset_gives_back", "memory_seen_by_nvml", "many_of_cudaMalloc_freed_async", "destroyed_with_memory"}
# Differences that docs/reference.md states, or the note beside each here.
MANAGED = "which managed memory is no good for: the same passes unless NVSHARE_PLAIN=none is said"
STATED = {"ipc/children+managed": f"an IPC handle, {MANAGED}", "ipc/small_and_inside+managed": f"an IPC handle, {MANAGED}", "pointers/dma_buf+managed": f"a NIC, {MANAGED}",
          "pointers/driver_each+managed": "attributes say what managed memory cannot do", "streams/wait_value+managed": f"stream memory operations, {MANAGED}", "streams/batch_of_operations+managed": f"stream memory operations, {MANAGED}",
          "managed/prefetch_device_memory": "device memory is managed memory, and can be prefetched", "pools/access": "a managed pool takes any access",
          "multi_gpu/without_peer_access": "every GPU reaches managed memory", "peers/after_the_end": "every GPU reaches managed memory",
          "peers/current_elsewhere": "every GPU reaches managed memory",
          "device/memory_seen_by_nvml": "before a program's first allocation, NVML tells of the whole card",
          "graphs/forbidden_while_capturing": "with swap, memory is allocated and freed beside an open capture"}
STATED |= {name.replace(f"{program}/", f"{program}-ptds/"): why for name, why in STATED.items() for program in ("streams", "graphs")}
# Cases that are run once more under nvshare with other variables. The first get the driver's own memory, as their executables
# show what they need.
ALSO = {name: ("managed", {"NVSHARE_PLAIN": "none"}) for name in ("ipc", "pointers", "streams", "streams-ptds")} | {"basics": ("off", {"NVSHARE_MEMORY": "off"})}
numbers = iter(range(10**6))
lock = threading.Lock()


def cases(filters, also):
    """All cases of all programs, or those whose `program/case` has one of the filters in it."""
    found = []
    for program in sorted(p for p in BIN.iterdir() if ".so" not in p.name):
        listed = subprocess.run([program], capture_output=True, text=True, timeout=20)
        if listed.returncode:
            raise SystemExit(f"{program.name} does not start: {listed.stderr}")
        names = listed.stdout.split()
        variants = [("", {})] + ([ALSO[program.name]] if also and program.name in ALSO else [])
        found += [types.SimpleNamespace(program=program, case=name, name=f"{program.name}/{name}{'+' * bool(label)}{label}", native_name=f"{program.name}/{name}", env=env) for label, env in variants for name in names]
    return [c for c in found if not filters or any(f in c.name for f in filters)]


def run(case, scheduler=None, env=None):
    """One run; its output goes to files, since what a case leaves behind may hold a pipe open."""
    with lock:
        number = next(numbers)
    out, err = WORK / f"{number}.out", WORK / f"{number}.err"
    command, environment = [str(case.program), case.case], dict(os.environ, **(env or {}))
    if scheduler:
        environment.update(scheduler.env, **case.env)
        command = [str(DIST / "bin/nvshare-ctl"), "run", "--library", str(DIST / "lib/nvshare/libnvshare.so"), "--", *command]
    begin = time.time()
    with open(out, "w") as o, open(err, "w") as e:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=o, stderr=e)
        try:
            code = process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            for pid in tree(process.pid):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            process.wait()
            code = "timeout"
    text = out.read_text(errors="replace")
    lines = text.splitlines()
    last = lines[-1] if lines else ""
    state = "skipped" if code == 0 and last.startswith("skipped") else "ok" if code == 0 and last == "ok" else f"exit {code}"
    return types.SimpleNamespace(code=code, lines=lines, state=state, seconds=round(time.time() - begin, 2), errors=err.read_text(errors="replace"))


def all_of(some, at_once, how):
    """Results by case: the crowd at once, the others one by one after it."""
    alone = [c for c in some if c.case in ALONE]
    crowd = [c for c in some if c.case not in ALONE]
    with ThreadPoolExecutor(at_once) as pool:
        results = dict(zip((c.name for c in crowd), pool.map(how, crowd)))
    return results | {c.name: how(c) for c in alone}


def same(a, b):
    return a.code == b.code and a.lines == b.lines


def differences(native, under, most=8):
    shown = []
    for i in range(max(len(native.lines), len(under.lines))):
        n, u = (r.lines[i] if i < len(r.lines) else "(nothing)" for r in (native, under))
        if n != u:
            shown += [f"    native: {n[:200]}", f"    under:  {u[:200]}"]
        if len(shown) >= 2 * most:
            return shown + ["    ..."]
    return shown


def verdict(case, native, under, again):
    if native.state == "skipped":
        return native.lines[-1] if same(native, under) else "failed: skipped natively alone"
    if same(native, under):
        return "passed" if native.state == "ok" else "native: fails, and is the same under nvshare"
    if not same(native, again):
        return "native: differs from run to run"
    if native.state != "ok":
        return "native: fails, and differs under nvshare"
    if case.name in STATED:
        return f"stated: {STATED[case.name]}"
    return f"failed: {under.state}" if under.state != "ok" else "failed: prints something else"


def neighbour(scheduler, gib):
    stop = pathlib.Path(scheduler.dir) / "stop"
    job = Job(str(HERE / "workloads/programs/neighbour.py"), "neighbour", stop, "--gib", gib, "--seconds", 300, scheduler=scheduler, log="samples-neighbour.log")
    until = time.time() + 30
    while not os.path.exists(f"{stop}.ready") and job.process.poll() is None and time.time() < until:
        time.sleep(0.01)
    return job, stop


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("filters", nargs="*", metavar="FILTER", help="program/case, or a part of it; all by default")
    parser.add_argument("--limit", metavar="SIZE", help="NVSHARE_MEM_LIMIT for the runs under nvshare")
    parser.add_argument("--memory", choices=["managed", "swap", "off"], help="NVSHARE_MEMORY for the runs under nvshare")
    parser.add_argument("--contended", action="store_true", help="with a neighbour, on 5632 MiB, in turns of 0.3 s")
    parser.add_argument("--at-once", type=int, default=6, metavar="N", help="so many cases at the same time")
    parser.add_argument("--once", action="store_true", help="no case a second time with other variables")
    parser.add_argument("--all", action="store_true", help="a row for each case, also for those that passed")
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    a = parser.parse_args()
    choose_memory(a.memory)
    chosen = cases(a.filters, not a.once)
    if a.list:
        print("\n".join(c.name for c in chosen))
        raise SystemExit
    if not chosen:
        parser.error("no such case")
    print(card(), flush=True)
    begin = time.time()
    native = all_of([c for c in chosen if not c.env], a.at_once, run)
    native |= all_of([types.SimpleNamespace(**{**vars(c), "name": c.native_name, "env": {}}) for c in chosen if c.native_name not in native], a.at_once, run)
    between = time.time()
    arguments = ("--gpu-memory", "5632MiB", "--tq", "0.3") if a.contended else ("--gpu-memory", "100GiB")
    with Scheduler(*arguments, log="info") as s:
        other, stop = neighbour(s, 4) if a.contended else (None, None)
        try:
            env = {"NVSHARE_MEM_LIMIT": a.limit} if a.limit else {}
            under = all_of(chosen, a.at_once, lambda c: run(c, s, env))
            counters = [c["counters"] for c in s.status()["clients"]]
        finally:
            if other:
                stop.touch()
                other.finish(20)
    between2 = time.time()
    # What differs is run natively once more: it may differ from run to run by itself.
    again = all_of([c for c in chosen if not same(native[c.native_name], under[c.name])], a.at_once, run)
    totals, failed = collections.Counter(), []
    for c in chosen:
        n, u = native[c.native_name], under[c.name]
        v = verdict(c, n, u, again.get(c.name))
        totals[v.partition(":")[0]] += 1
        r = dict(scenario="samples", case=c.name, native=n.state, under=u.state, native_s=n.seconds, under_s=u.seconds, verdict=v)
        with open(OUT / "rows.jsonl", "a") as f:
            f.write(json.dumps(r) + "\n")
        if a.all or v != "passed":
            ROWS.append(r)
        if v != "passed" and not v.startswith("skipped"):
            failed.append("\n".join([f"{c.name}: {v}", *(differences(n, u) or [f"    both:   {line[:200]}" for line in u.lines[-3:]]), *(f"    stderr: {line[:300]}" for line in u.errors.splitlines()[-4:])]))
    (OUT / "samples.txt").write_text("\n".join(failed) + "\n")
    print("\n".join(failed))
    table("samples")
    print("\n" + ", ".join(f"{k} {v}" for k, v in sorted(totals.items())), f"of {len(chosen)}; natively {between - begin:.0f} s, under nvshare {between2 - between:.0f} s")
    print("clients %d, " % len(counters) + ", ".join(f"{k} {sum(c[k] for c in counters)}" for k in ("gated", "passed_by", "hand_overs") if counters))
    if other:
        print("neighbour:", other.result)
    shutil.rmtree(WORK, ignore_errors=True)
    raise SystemExit(totals["failed"] > 0 or bool(other and not other.result.get("ok")))
