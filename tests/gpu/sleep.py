#!/usr/bin/env python3
"""Programs that take nothing of the card while they are idle, and wake by whatever they call next, on a real card.

sleep.py [calls] [many] [hundred] [resting] [full] [neighbour] [cycles] [elsewhere]; all by default, in about 900 s; `elsewhere` needs two GPUs that are alike. Needs PyTorch, JAX, CuPy, Triton, CUDA 12.8 or later and `dist/` (cargo dist-local).
Rows go to $OUT/rows.jsonl.
"""
import array, random, re, statistics, threading
from harness import *

FAILED = []


def used():
    """MiB that the first card shows as used."""
    return cards()[0]


def cards():
    """MiB that each card shows as used."""
    asked = subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=60).stdout
    return [int(mib) for mib in asked.split()]


def host_gib():
    """GiB of the host that nothing uses."""
    return int(re.search(r"MemAvailable: +(\d+)", open("/proc/meminfo").read())[1]) / (1 << 20)


class Notebook:
    """A program that waits for lines."""

    def __init__(self, name, scheduler, gib=1, framework="torch"):
        environment = dict(os.environ, **scheduler.env, NVSHARE_MEMORY="swap", NVSHARE_SLEEP="1", NVSHARE_LOG="info", XLA_PYTHON_CLIENT_PREALLOCATE="false")
        LOGS.mkdir(exist_ok=True)
        self.name, self.scheduler, self.log = name, scheduler, LOGS / f"sleep-{name}.log"
        command = [DIST / "bin/nvshare-ctl", "run", "--library", DIST / "lib/nvshare/libnvshare.so", "--", sys.executable, HERE / "workloads/sleep_job.py", name, gib, framework]
        self.process = subprocess.Popen(list(map(str, command)), env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=open(self.log, "w"), text=True)

    def hear(self):
        line = self.process.stdout.readline()
        return json.loads(line) if line.startswith("{") else dict(right=False, died=self.process.wait(20), log=open(self.log).read()[-800:])

    def do(self, operation):
        begin = time.time()
        try:
            print(operation, file=self.process.stdin, flush=True)
        except BrokenPipeError:
            pass
        return dict(self.hear(), by_us=round(time.time() - begin, 4))

    def client(self):
        return self.scheduler.client(self.process.pid)

    def is_asleep(self):
        return (self.client() or {}).get("state") == "asleep"

    def sleep(self, patience=20):
        """Tells it to sleep. How long that takes, or what was said."""
        begin, said = time.time(), ""
        while time.time() - begin < patience:
            told = self.scheduler.ctl("sleep", str(self.client()["client"]))
            said = (told.stdout + told.stderr).strip()
            if told.returncode == 0:
                break
            time.sleep(0.05)  # it is still at work
        asked = time.time()
        while not self.is_asleep() and time.time() - asked < 10:
            time.sleep(0.005)
        return round(time.time() - asked, 3) if self.is_asleep() else said

    def end(self):
        self.process.stdin.close()
        try:
            return self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return "killed"


def check(right, what):
    if not right:
        FAILED.append(what)


def calls(rounds=1):
    """Each kind of call wakes."""
    with Scheduler("--gpu-memory", "20GiB", log="debug") as s:
        notebook = Notebook("calls", s)
        operations = notebook.hear().get("operations", [])
        check(operations, "it did not begin")
        notebook.do("add")
        # Once NVML is loaded, its calls and the driver's wake the program as before.
        for operation in operations * rounds + ["nvml", "add", "properties"]:
            before, out = used(), notebook.sleep()
            asleep = used()
            time.sleep(0.1)
            woke = notebook.do(operation)
            still = notebook.is_asleep()
            if still:
                woke["right"] = notebook.do("add")["right"]
            row(scenario="calls", operation=operation, before_mib=before, to_sleep_s=out, asleep_mib=asleep, **woke, woke=not still)
            check(isinstance(out, float) and woke.get("right") and asleep < before - 500, (operation, out, woke))
            if not woke.get("right"):
                break
        client = notebook.client() or {}
        row(scenario="calls counted", rc=notebook.end(), **(client.get("counters") or {}))


def many(count=40, gib=1):
    """Idle notebooks of 1 GiB each; all sleep, one wakes, then all at once."""
    with Scheduler("--gpu-memory", "60GiB", log="info") as s:
        notebooks = [Notebook(f"many{i}", s, gib) for i in range(count)]
        for n in notebooks:
            n.hear(), n.do("add")
        before, host = used(), host_gib()
        outs = [n.sleep() for n in notebooks]
        asleep, host = used(), host - host_gib()
        one = notebooks[0].do("item")
        begin = time.time()
        for n in notebooks[1:]:
            print("product", file=n.process.stdin, flush=True)
        rest = [n.hear() for n in notebooks[1:]]
        row(scenario="many", notebooks=count, gib=gib, before_mib=before, asleep_mib=asleep, host_gib=round(host, 1), to_sleep_s=[round(f(o for o in outs if isinstance(o, float)), 2) for f in (min, statistics.median, max)], one_s=one.get("took"), one_all_s=one.get("all"), all_s=round(time.time() - begin, 2), right=[r["right"] for r in [one, *rest]].count(True), ended=[n.end() for n in notebooks].count(0))
        check(all(r.get("right") for r in [one, *rest]) and all(isinstance(o, float) for o in outs), ("many", outs, one, rest))


def hundred():
    """The same with a hundred, of 64 MiB each: the machine's memory does not hold a hundred of 1 GiB."""
    many(100, 1 / 16)


def resting(count=24, patience=90):
    """Idle notebooks that do not fit together, and go by themselves (`--sleep-after 2`). Then each one wakes, by turns."""
    with Scheduler("--gpu-memory", "16GiB", "--sleep-after", "2", log="info") as s:
        notebooks = [Notebook(f"resting{i}", s) for i in range(count)]
        for n in notebooks:
            n.hear(), n.do("add")
        before, begin, asleep, last = used(), time.time(), 0, time.time()
        while time.time() - begin < patience and time.time() - last < 15:
            now = sum(client["state"] == "asleep" for client in s.status()["clients"])
            if now != asleep:
                asleep, last = now, time.time()
            time.sleep(0.2)
        took, left = last - begin, used()
        woke = [n.do("item") for n in notebooks]
        by = sorted(w["by_us"] for w in woke)
        row(scenario="resting", notebooks=count, before_mib=before, asleep=asleep, after_s=round(took, 1), left_mib=left, right=[w.get("right") for w in woke].count(True), wake_p50_s=by[count // 2], wake_most_s=by[-1],
            ended=[n.end() for n in notebooks].count(0))
        check(asleep >= count - 8 and all(w.get("right") for w in woke), ("resting", asleep, woke[:3]))


def full():
    """A notebook wakes beside a job that has filled the capacity meanwhile: it waits its turn."""
    with Scheduler("--gpu-memory", "8GiB", "--tq", "1", log="info") as s:
        notebook = Notebook("full", s, 4)
        notebook.hear(), notebook.do("add")
        out = notebook.sleep()
        job = Job("job.py", "full-job", "--gib", 6, "--seconds", 15, scheduler=s, env=dict(NVSHARE_MEMORY="swap"))
        time.sleep(8)
        woke = [notebook.do(operation) for operation in ("item", "product", "replay")]
        rc = notebook.end()
        job.finish(60)
        row(scenario="full", to_sleep_s=out, woke=str([(w.get("took"), w.get("all")) for w in woke]), right=all(w.get("right") for w in woke), rc=rc, job_rc=job.process.returncode, **job.counted())
        check(all(w.get("right") for w in woke) and rc == 0 and job.process.returncode == 0, ("full", woke))


def neighbour(pairs=20, seconds=1.5):
    """A neighbour's steps while a notebook goes to sleep and comes back, beside its steps when nothing happens."""
    steps, windows = OUT / "steps", []
    with Scheduler("--gpu-memory", "40GiB", log="info") as s:
        notebook = Notebook("beside", s)
        notebook.hear(), notebook.do("add")
        job = Job("steps_job.py", "steps", steps, pairs * (seconds + 2) + 12, scheduler=s, env=dict(NVSHARE_MEMORY="swap"))
        time.sleep(10)
        for _ in range(pairs):
            quiet = time.time()
            time.sleep(seconds)
            out = time.time()
            slept = notebook.sleep()
            asleep = time.time()
            woke = notebook.do("item")
            windows.append((quiet, out, asleep, time.time()))
            check(isinstance(slept, float) and woke.get("right"), ("neighbour", slept, woke))
        rc = notebook.end()
        job.finish(pairs * (seconds + 2) + 40)
    all_steps = array.array("d", steps.read_bytes())
    timed = list(zip(all_steps[::2], all_steps[1::2]))

    def of(begin, end):
        return [took for at, took in timed if begin <= at and at + took <= end]
    out, back = [[statistics.mean(of(*w[i:i + 2])) / statistics.mean(of(*w[:2])) for w in windows if of(*w[i:i + 2])] for i in (1, 2)]
    quiet, busy = [sorted(took for w in windows for took in of(w[i], w[j])) for i, j in ((0, 1), (1, 3))]
    for what, ratios in (("goes to sleep", out), ("comes back", back)):
        row(scenario="neighbour", meanwhile=what, pairs=len(ratios), step_ratio=round(statistics.median(ratios), 4), least=round(min(ratios), 4), most=round(max(ratios), 4))
    row(scenario="neighbour steps", quiet=len(quiet), quiet_ms=[round(1e3 * quiet[int(len(quiet) * q)], 3) for q in (0.5, 0.99)], quiet_most=round(1e3 * quiet[-1], 2), busy=len(busy),
        busy_ms=[round(1e3 * busy[int(len(busy) * q)], 3) for q in (0.5, 0.99)], busy_most=round(1e3 * busy[-1], 2), rc=rc, **job.counted())


def cycles(seconds=330):
    """Programs of four frameworks that sleep and wake at the same time, by operations drawn by lot."""
    until = time.time() + seconds
    with Scheduler("--gpu-memory", "40GiB", log="info") as s:
        def go(framework):
            notebook, draw, outs, ins, right, why = Notebook(f"cycles-{framework}", s, 1, framework), random.Random(framework), [], [], 0, ""
            operations = notebook.hear().get("operations")
            while operations and time.time() < until:
                slept = notebook.sleep()
                if not isinstance(slept, float):
                    why = slept
                    break
                woke = notebook.do(draw.choice(operations))
                if not woke.get("right"):
                    why = str(woke)
                    break
                right += 1
                outs.append(slept), ins.append(woke["by_us"])
            client = notebook.client() or {}
            counted = {name: (client.get("counters") or {}).get(name) for name in ("gated", "passed_by")}
            row(scenario="cycles", framework=framework, cycles=right, **{f"{way}_{name}_s": round(sorted(values)[min(int(len(values) * q), len(values) - 1)], 3) for way, values in (("out", outs), ("in", ins))
                if values for name, q in (("p50", 0.5), ("p99", 0.99), ("most", 1))}, rc=notebook.end(), why=why[-300:], **counted)
            check(right >= 10 and not why, ("cycles", framework, right, why))
        threads = [threading.Thread(target=go, args=(framework,)) for framework in ("torch", "jax", "cupy", "triton")]
        for t in threads:
            t.start()
        for t in threads:
            t.join()


def elsewhere(rounds=4):
    """Notebooks of three frameworks that see two cards. While they sleep, a job fills the one that they have left (`--wake-elsewhere`)."""
    if len(cards()) < 2:
        return row(scenario="elsewhere", skipped="one GPU alone")
    with Scheduler("--gpu-memory", "8GiB", "--tq", "60", "--wake-elsewhere", log="info") as s:
        notebooks, draw = [Notebook(f"elsewhere-{framework}", s, 1, framework) for framework in ("torch", "cupy", "triton")], random.Random(1)
        operations = [n.hear().get("operations", []) for n in notebooks]
        [n.do("add") for n in notebooks]
        for i in range(rounds):
            outs = [n.sleep() for n in notebooks]
            asleep, here = cards(), {n.client()["usage"][0]["gpu"] for n in notebooks}
            job = Job("job.py", f"elsewhere-job{i}", "--gib", 7.5, "--seconds", 60, scheduler=s, env=dict(NVSHARE_MEMORY="swap", CUDA_VISIBLE_DEVICES=str(i % 2)))
            begin = time.time()
            while time.time() - begin < 40 and not any(c["resident"] > 7 << 30 for c in s.status()["clients"] if c["pid"] == job.process.pid):
                time.sleep(0.1)
            woke = [n.do(draw.choice(names)) for n, names in zip(notebooks, operations)]
            there = {n.client()["usage"][0]["gpu"] for n in notebooks}
            row(scenario="elsewhere", round=i, to_sleep_s=outs, asleep_mib=asleep, awake_mib=cards(), by_s=[w.get("by_us") for w in woke], right=[w.get("right") for w in woke].count(True), moved=not here & there)
            check(all(w.get("right") for w in woke) and all(isinstance(o, float) for o in outs) and not here & there, ("elsewhere", i, outs, woke, here, there))
            job.process.kill(), job.process.wait()
            if FAILED:
                break
        row(scenario="elsewhere ended", rcs=[n.end() for n in notebooks])


if __name__ == "__main__":
    run_scenarios([calls, many, hundred, resting, full, neighbour, cycles, elsewhere], FAILED)
