"""Runs jobs natively and under nvshare on a real card, and prints a table of rows that count.

A row under nvshare counts only with the library's own counters beside it, read from the scheduler: launches gated > 0,
passed by = 0, and hand-overs with what was evicted and restored where turns are taken.
"""
import argparse, json, mmap, os, pathlib, shutil, signal, subprocess, sys, tempfile, time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
DIST = ROOT / "dist"
OUT = pathlib.Path(os.environ.get("OUT", tempfile.mkdtemp()))
LOGS = OUT / "logs"
GIB = 2**30
ROWS = []


def choose_memory(memory):
    """How programs under nvshare get device memory; each row says so from then on."""
    if memory:
        os.environ["NVSHARE_MEMORY"] = memory


def row(**fields):
    """Writes a row as it comes."""
    if memory := os.environ.get("NVSHARE_MEMORY"):
        fields["memory"] = memory
    ROWS.append(fields)
    with open(OUT / "rows.jsonl", "a") as f:
        f.write(json.dumps(fields) + "\n")
    print("  " + "  ".join(f"{k}={v}" for k, v in fields.items()), flush=True)


def table(name, columns=None):
    """Prints all rows of a scenario once more, aligned."""
    rows = [r for r in ROWS if r.get("scenario") == name]
    if not rows:
        return
    columns = columns or [c for c in dict.fromkeys(k for r in rows for k in r) if c != "scenario"]
    cells = [columns] + [[str(r.get(c, "")) for c in columns] for r in rows]
    widths = [max(len(r[i]) for r in cells) for i in range(len(columns))]
    print(f"\n== {name}")
    for r in cells:
        print("  ".join(c.ljust(w) for c, w in zip(r, widths)).rstrip())
    sys.stdout.flush()


def warm_host(gib):
    """Touches host memory: a virtual machine may get its memory only when it is first used, and evictions would be blamed for that."""
    t = time.time()
    m = mmap.mmap(-1, gib << 30)
    m.madvise(mmap.MADV_HUGEPAGE)
    for at in range(0, gib << 30, 4096):
        m[at] = 1
    m.close()
    print(f"  touched {gib} GiB of host memory in {time.time() - t:.1f} s", flush=True)


class Scheduler:
    """A scheduler of its own, with its sockets in a fresh directory."""

    def __init__(self, *arguments, log="debug"):
        self.dir = tempfile.mkdtemp(prefix="nvshare-")
        self.env = dict(os.environ, NVSHARE_SOCKET=f"{self.dir}/scheduler.sock", NVSHARE_ADMIN_SOCKET=f"{self.dir}/admin.sock")
        LOGS.mkdir(exist_ok=True)
        self.log = LOGS / f"scheduler-{len(list(LOGS.glob('scheduler-*')))}.log"
        self.process = subprocess.Popen([DIST / "bin/nvshare-scheduler", "--log", log, *arguments], env=self.env, stderr=open(self.log, "w"))
        while not os.path.exists(self.env["NVSHARE_ADMIN_SOCKET"]):
            time.sleep(0.01)
            if self.process.poll() is not None:
                raise SystemExit(open(self.log).read())

    def ctl(self, *arguments):
        return subprocess.run([DIST / "bin/nvshare-ctl", *arguments], env=self.env, capture_output=True, text=True, timeout=20)

    def status(self):
        return json.loads(self.ctl("status", "--json").stdout)

    def gpu(self, status):
        """The GPU on which the programs run: the first that they may see."""
        return status["gpus"][int(os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0])]

    def client(self, pid):
        found = [c for c in self.status()["clients"] if c["pid"] == pid]
        return found[-1] if found else None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(10)
        shutil.rmtree(self.dir, ignore_errors=True)


def tree(pid):
    """A process and all below it."""
    above = {}
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            above[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            pass  # it has just ended
    found = [pid]
    for at in found:
        found += [child for child, parent in above.items() if parent == at]
    return found


class Job:
    """A workload, native (no scheduler) or under nvshare."""

    def __init__(self, script, *arguments, scheduler=None, go=None, env=None, log=None):
        command = [str(HERE / "workloads" / script) if "/" not in script else script, *map(str, arguments)]
        if command[0].endswith(".py"):
            command.insert(0, sys.executable)
        environment = dict(scheduler.env if scheduler else os.environ, **(env or {}))
        self.scheduler = scheduler
        if scheduler:
            environment.setdefault("NVSHARE_LOG", "info")
            command = [str(DIST / "bin/nvshare-ctl"), "run", "--library", str(DIST / "lib/nvshare/libnvshare.so"), "--", *command]
        if go:
            environment["GO"] = str(go)
        self.name = str(arguments[0])
        self.clients, self.managed = {}, 0
        LOGS.mkdir(exist_ok=True)
        self.log = LOGS / (log or f"job-{self.name}.log")
        self.begin = time.time()
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=open(self.log, "a"), text=True)

    def look(self, others=()):
        """Notes what the scheduler knows of the job and of its children: of all its clients but the jobs `others`."""
        theirs = {job.process.pid for job in others}
        try:
            self.clients.update((c["pid"], c) for c in self.scheduler.status()["clients"] if c["pid"] not in theirs)
        except (ValueError, subprocess.TimeoutExpired):
            return  # no answer: what was seen last stands
        self.managed = max(self.managed, sum(c["counters"]["managed"] for c in self.clients.values() if not c["gone"]))

    def output(self, timeout):
        try:
            return self.process.communicate(timeout=max(timeout, 0.01))[0]
        except subprocess.TimeoutExpired:
            return None

    def kill(self):
        for pid in tree(self.process.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def finish(self, timeout=500, every=None, others=()):
        """Waits for the end; looks at the job's clients meanwhile, `every` so many seconds, and once more at the end."""
        until = time.time() + timeout
        while (out := self.output(min(every or timeout, until - time.time()))) is None and time.time() < until:
            if self.scheduler:
                self.look(others)
        if out is None:
            print(f"  {self.name} is killed: not done in {timeout} s", flush=True)
            self.kill()
            out = self.output(20) or ""
        self.wall = time.time() - self.begin
        with open(self.log, "a") as f:
            f.write(out)
        lines = [line for line in out.splitlines() if line.startswith("{")]
        self.result = json.loads(lines[-1]) if lines else {}
        if self.process.returncode != 0:
            print(f"  {self.name} failed with {self.process.returncode}:", out[-1500:], open(self.log).read()[-1500:], flush=True)
        self.counters = self.scheduler.client(self.process.pid) if self.scheduler else None
        if self.scheduler and every:
            self.look(others)
        return self

    def counted(self, clients=None):
        """What makes a row count; summed over these clients, else the job's own process."""
        clients = clients or ([self.counters] if self.counters else [])
        if not clients:
            return dict(gated=0, passed_by="?")
        c = {name: sum(client["counters"][name] for client in clients) for name in clients[0]["counters"]}
        restore = c["copied_in"] / GIB / (c["restore_ns"] / 1e9) if c["restore_ns"] else 0
        evict = c["copied_out"] / GIB / (c["evict_ns"] / 1e9) if c["evict_ns"] else 0
        return dict(gated=c["gated"], passed_by=c["passed_by"], hand_overs=c["hand_overs"], deferrals=c["deferrals"], evicted_gib=round(c["evicted"] / GIB, 2), restored_gib=round(c["restored"] / GIB, 2),
                    copied_out_gib=round(c["copied_out"] / GIB, 2), copied_in_gib=round(c["copied_in"] / GIB, 2),
                    evict_gib_s=round(evict, 1), restore_gib_s=round(restore, 1), held_s=round(sum(client["held_ms"] for client in clients) / 1e3, 2))


def start_together(jobs_of):
    """Starts jobs that wait for each other: `jobs_of(go)` makes them; returns them finished, and the time from GO until all were done."""
    go = pathlib.Path(tempfile.mkdtemp()) / "go"
    jobs = jobs_of(go)
    while not all(os.path.exists(f"{go}.{job.name}") for job in jobs):
        time.sleep(0.01)
        for job in jobs:
            if job.process.poll() is not None:
                job.finish()
                for other in jobs:
                    other.process.kill()
                raise SystemExit(f"{job.name} ended before GO")
    begin = time.time()
    go.touch()
    for job in jobs:
        job.finish()
    return jobs, max(job.result.get("end", time.time()) for job in jobs) - begin


def card():
    query = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version,memory.total,memory.used", "--format=csv,noheader"], capture_output=True, text=True, timeout=60).stdout.strip()
    return query


def run_scenarios(scenarios, failed):
    """What a file of scenarios does when it is run: `FILE [--memory managed|swap] SCENARIO ...`, all by default. Prints the table of each, and the first of what `failed`; ends the process, with exit code 1 if anything did."""
    by_name = {scenario.__name__: scenario for scenario in scenarios}
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", choices=["managed", "swap"], help="NVSHARE_MEMORY for the runs under nvshare")
    parser.add_argument("scenario", nargs="*", choices=[*by_name, []], metavar="SCENARIO", help=" ".join(by_name) + "; all by default")
    arguments = parser.parse_args()
    choose_memory(arguments.memory)
    print(card(), flush=True)
    for name in arguments.scenario or by_name:
        begin = time.time()
        by_name[name]()
        print(f"  {name} took {time.time() - begin:.0f} s", flush=True)
    for scenario in dict.fromkeys(r["scenario"] for r in ROWS):
        table(scenario)
    for failure in failed[:10]:
        print("FAILED", failure)
    print(card())
    sys.exit(bool(failed))
