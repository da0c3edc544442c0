#!/usr/bin/env python3
"""Programs that take nothing of the card while they are idle, and wake by whatever they call next, on a real card.

sleep.py [calls] [many] [full]; all by default, in about 150 s. Needs PyTorch, CUDA 12.8 or later and `dist/` (cargo dist-local). Rows go to $OUT/rows.jsonl.
"""
from harness import *

FAILED = []


def used():
    """MiB that the card shows as used."""
    asked = subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=60).stdout
    return int(asked.split()[0])


class Notebook:
    """A program that waits for lines."""

    def __init__(self, name, scheduler, gib=1):
        environment = dict(os.environ, **scheduler.env, NVSHARE_MEMORY="swap", NVSHARE_SLEEP="1", NVSHARE_LOG="info")
        LOGS.mkdir(exist_ok=True)
        self.name, self.scheduler, self.log = name, scheduler, LOGS / f"sleep-{name}.log"
        command = [DIST / "bin/nvshare-ctl", "run", "--library", DIST / "lib/nvshare/libnvshare.so", "--", sys.executable, HERE / "workloads/sleep_job.py", name, str(gib)]
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


def many(count=12):
    """Idle notebooks of 1 GiB each; all sleep, one wakes, then all at once."""
    with Scheduler("--gpu-memory", "60GiB", log="info") as s:
        notebooks = [Notebook(f"many{i}", s) for i in range(count)]
        for n in notebooks:
            n.hear(), n.do("add")
        before = used()
        outs = [n.sleep() for n in notebooks]
        asleep = used()
        one = notebooks[0].do("item")
        begin = time.time()
        for n in notebooks[1:]:
            print("product", file=n.process.stdin, flush=True)
        rest = [n.hear() for n in notebooks[1:]]
        row(scenario="many", notebooks=count, before_mib=before, asleep_mib=asleep, to_sleep_s=str(outs), one_s=one.get("took"), one_all_s=one.get("all"), all_s=round(time.time() - begin, 2), right=[r["right"] for r in [one, *rest]].count(True), ended=str([n.end() for n in notebooks]))
        check(all(r.get("right") for r in [one, *rest]) and all(isinstance(o, float) for o in outs), ("many", outs, one, rest))


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


if __name__ == "__main__":
    run_scenarios([calls, many, full], FAILED)
